"""Describe training codes: programs such as Megatron-LM or leaven, on whose implementation memory and time depend
besides shape and layout. Their values are in training_codes.toml."""

import math
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, TypeAdapter

from leaven.documents.planning import StateRow
from leaven.planning.accelerators import Dtype
from leaven.planning.hardware import Cluster
from leaven.recipe.errors import InputError

Selective = Literal["core", "products"]
Balance = Literal["weight", "number", "work"]
Moments = Literal["adam", "adam-8bit", "muon"]

# Bytes of gradients that torch's DistributedDataParallel exchanges at a time.
DDP_BUCKET = 25 * 2**20
_DTYPES = {4: "fp32", 2: "16 bits"}


@dataclass(frozen=True)
class TrainingCode:
    """The memory use and communication of a training code; sizes are bytes per parameter unless stated otherwise."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    # States.
    weights: int = 4  # as they are stored from step to step
    grads: int = 4  # as the backward pass computes them
    accumulation: int = 0  # sum of gradients over micro-batches, if it is kept separately
    optimizer: int = 8  # moments, and the master copy if any
    master: int = 0  # copy of the weights in fp32; part of ``optimizer``
    optimizer_of_matrices: int | None = None  # ``optimizer`` for the blocks' matrices, if it differs (Muon)
    # Copies.
    compute_copy: int = 2  # weights in the compute dtype, if they are kept in fp32
    gathered_ends: int = 0  # embedding and unembedding, if every rank holds them in full
    exchange: int = 0  # extra memory of a block while ranks exchange its gradients
    update_copy: int = 0  # extra memory of the update, when the activations are free
    # A single rank casts weights when a product reads them, so there is no copy of the embedding, and with full
    # recomputation only one block's at a time. Under ZeRO 3 the embedding is freed like a block.
    autocast: bool = False
    shards_weights_from: int = 3  # first ZeRO stage that shards the weights
    bucket: int = 0  # bytes of communication buffers for gradients and weights
    # Activations.
    element: int = 2  # bytes of an element
    residual: int = 2  # bytes of an element of the residual stream
    flash_attention: bool = True  # the scores of attention are never written
    sequence_parallel: bool = False  # between products a tensor rank holds only part of the sequence
    gathered_inputs: bool = False  # with sequence_parallel: full inputs of column-parallel products are still saved
    selective: Selective = "core"  # what is recomputed: the core of attention, or all but every second product
    # Loss.
    logit: int = 14  # peak bytes per logit
    sharded_logit: int | None = None  # ``logit`` if tensor ranks shard the vocabulary; None if it is the same
    logits_at_once: float = math.inf  # most logits that exist at once
    unembedding: int = 0  # gradient of the unembedding that the loss keeps until the backward pass
    # Pipeline.
    keeps_outputs: bool = False  # a stage keeps the outputs that it has sent
    balance: Balance = "weight"  # how blocks are assigned to stages: see :func:`stages.stage_layers`
    # Overhead. Usual values are 1 to 2 GB (Ultra-Scale Playbook) and 5 to 10%.
    fixed_gib: float = 2.0  # context, NCCL, kernels
    slack: float = 0.05  # share of everything else that the allocator holds but cannot use
    # Speed.
    products: Dtype = "bf16"  # dtype of a block's products
    fused: bool = False  # elementwise operators are fused even without a compiler
    overlap: bool = True  # gradient exchange overlaps the last backward pass
    message: float = DDP_BUCKET  # bytes of gradients per exchange, if ``units`` is 0
    # Units per block that are exchanged one by one, as in torch's FSDP2; the root unit, everything outside the
    # blocks, comes last. Below ZeRO 2 a pipeline exchanges all of them after the last backward pass.
    units: int = 0
    behind_products: bool = False  # tensor ranks exchange in pieces that overlap with products, all but the first
    shared_nics: bool = True  # the rings of a group use all network adapters of a node
    slower: float = 1.0  # fitted factor on the time of a block

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(vars(self)[name] for name in self.__dataclass_fields__))

    def with_moments(self, moments: Moments) -> "TrainingCode":
        """Return the training code with another optimizer.

        ``adam`` stores two moments in fp32. ``adam-8bit`` stores two moments of one byte each (Dettmers 2021, arXiv
        2110.02861; its scales, one per 2,048 values, are not counted). ``muon`` stores one moment in fp32 for
        matrices and uses Adam for all other parameters.
        """
        matrices = self.master + 4 if moments == "muon" else None
        return replace(
            self, optimizer=self.master + (2 if moments == "adam-8bit" else 8), optimizer_of_matrices=matrices
        )


def _read(path: Path) -> Iterator[tuple[str, TrainingCode]]:
    """Yield the names and values of the training codes in a file. Every group of values must name its source."""
    adapter, values = TypeAdapter(TrainingCode), dict[str, dict[str, Any]]()
    for name, groups in tomllib.loads(path.read_text(encoding="utf-8")).items():
        values[name] = dict(values.get(groups.pop("like", ""), {}))
        for group, entries in groups.items():
            assert entries.pop("source", ""), f"{path}: [{name}] {group} has no source"
            values[name] |= entries
        yield name, adapter.validate_python(values[name])


TRAINING_CODES: Mapping[str, TrainingCode] = dict(_read(Path(__file__).with_suffix(".toml")))
LEAVEN_BF16, LEAVEN_FP32 = TRAINING_CODES["leaven-bf16"], TRAINING_CODES["leaven-fp32"]


def in_precision(cluster: Cluster, compute: str) -> tuple[Cluster, TrainingCode]:
    """Return the cluster with its speed in the compute dtype, and leaven's training code for this dtype.

    fp16 is planned like bf16, because every accelerator has the same peak for both.

    Raises:
        InputError: if ``compute`` is fp32 and the accelerator's fp32 peak is unknown.
    """
    if compute != "fp32":
        return cluster, LEAVEN_BF16
    accelerator = cluster.accelerator
    peak = accelerator.peak("fp32")
    if peak is None:
        raise InputError(
            f"no peak of {accelerator.name} in fp32 is known, and this recipe computes in fp32; "
            f"plan it with --set precision.compute=bf16"
        )
    slower = replace(accelerator, peak_tflops=peak, best_matmul_tflops=accelerator.matmul("fp32"))
    return replace(cluster, accelerator=slower), LEAVEN_FP32


def states(params: float, code: TrainingCode, matrices: float = 0.0) -> list[StateRow]:
    """Return what a training code stores for ``params`` parameters from step to step, before sharding over ranks.

    ``matrices`` is how many of the parameters are in matrices of blocks, for which some optimizers store less.

    7B parameters in fp32 with Adam need 4 + 4 + 8 = 16 bytes each, 112 GB. In bf16 with fp32 master weights they also
    need 2 + 2 + 4 + 8 = 16 bytes each. The 140 GB of a common rule of thumb ("the optimizer is three times the
    weights") are 20 bytes each, which requires a master copy of weights that are already in fp32.
    """
    moments, lean = code.optimizer - code.master, 0.0 if code.optimizer_of_matrices is None else matrices
    of_matrices = (code.optimizer_of_matrices or 0) - code.master
    master = "an fp32 copy that updates are added to, because in 16 bits small updates would be rounded off"
    adam = f"Adam's means of the gradient and of its square, {moments / 2:g} bytes each"
    found = (
        ("weights", params, code.weights, f"the model's parameters, {_DTYPES.get(code.weights, 'bytes')}"),
        ("gradients", params, code.grads, "one for every weight, until the update"),
        ("accumulation", params, code.accumulation, "the sum of gradients over micro-batches, stored separately"),
        ("master weights", params, code.master, master),
        ("momentum of matrices", lean, of_matrices, "Muon's mean of the gradient"),
        ("moments", params - lean, moments, adam),
    )
    return [
        StateRow(name=name, bytes_each=each, bytes=each * count, why=why)
        for name, count, each, why in found
        if each and count
    ]
