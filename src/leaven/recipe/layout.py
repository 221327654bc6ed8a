"""The layout of a run: how training is parallelised over ranks. The layout changes only the last bits of the loss."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from leaven.recipe.base import Part

Recompute = Literal["none", "selective", "full"]
Pipeline = Literal["gpipe", "1f1b", "interleaved", "zero-bubble"]
# The limit is more ranks than any cluster has. With larger degrees, a search for layouts would take too long.
Degree = Annotated[int, Field(gt=0, le=2**24)]


class Layout(Part):
    """The parallelism of a run over dp x cp x tp x pp ranks, options that save memory or time, and a timeout."""

    dp: Degree = 1  # data-parallel degree
    tp: Degree = 1  # tensor-parallel degree
    pp: Degree = 1  # pipeline-parallel degree
    cp: Degree = 1  # context-parallel degree; for ``leaven plan`` and exports, not for training
    ep: Degree = 1  # expert-parallel degree: the experts of a layer are divided among this many of the dp x cp ranks
    zero: int = Field(default=0, ge=0, le=3)  # ZeRO stage
    dp_replicate: Degree = 1  # number of replicas (HSDP); ZeRO shards each replica over dp / dp_replicate ranks
    schedule: Pipeline = "1f1b"
    stages_per_rank: Degree = 1  # pipeline stages on each rank
    recompute: Recompute = "none"  # activation checkpointing: which activations the backward pass recomputes
    compile: bool = False  # torch.compile for each block: costs a minute, speeds up steps, changes the last bits
    timeout_seconds: int = Field(default=600, gt=0)  # the run ends if a process does not answer for this long

    @model_validator(mode="after")
    def _validate_combination(self) -> "Layout":
        if self.dp % self.dp_replicate:
            raise ValueError(f"dp_replicate = {self.dp_replicate} does not divide dp = {self.dp}; choose a divisor")
        if self.dp * self.cp % self.ep:
            raise ValueError(f"ep = {self.ep} does not divide dp x cp = {self.dp * self.cp}; choose a divisor")
        if self.zero == 0 and self.dp_replicate > 1:
            raise ValueError(
                "dp_replicate has no effect with zero = 0, which replicates everything; leave out dp_replicate, or "
                "set zero to 1, 2 or 3"
            )
        if self.pp == 1 and (self.schedule != "1f1b" or self.stages_per_rank > 1):
            raise ValueError("pp = 1 has no pipeline; leave out schedule and stages_per_rank, or set pp to 2 or more")
        if self.stages_per_rank > 1 and self.schedule in {"gpipe", "1f1b"}:
            raise ValueError(
                f'schedule = "{self.schedule}" has one stage per rank; set schedule = "interleaved", or '
                "stages_per_rank = 1"
            )
        if self.schedule == "interleaved" and self.stages_per_rank == 1:
            raise ValueError(
                'schedule = "interleaved" needs several stages per rank; set stages_per_rank = 2 or more, or '
                'schedule = "1f1b"'
            )
        if self.schedule == "zero-bubble" and self.zero > 1:
            # torch 2.13 frees the gathered parameters before the second half, whose gradients are then wrong without
            # an error. Gradients that are sharded after each micro-batch are missing in the second half, too.
            raise ValueError(
                f'schedule = "zero-bubble" computes a backward pass in two halves, and zero = {self.zero} frees '
                "weights or gradients that the second half needs; set zero = 1"
            )
        return self

    @property
    def ranks(self) -> int:
        return self.dp * self.cp * self.tp * self.pp
