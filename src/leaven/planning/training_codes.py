"""What memory and time depend on besides shape and layout: the code that trains, read from training_codes.toml."""

import math
import tomllib
from collections.abc import Mapping
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

# torch's DistributedDataParallel exchanges gradients so many bytes at a time.
DDP_BUCKET = 25 * 2**20
_DTYPES = {4: "fp32", 2: "16 bits"}


@dataclass(frozen=True)
class TrainingCode:
    """Bytes and habits of a training code. Bytes are per parameter where nothing else is said."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    # States.
    weights: int = 4  # that stay from step to step
    grads: int = 4  # as the backward pass gives them
    accumulation: int = 0  # sum of gradients over micro-batches, where it is kept beside them
    optimizer: int = 8  # moments, and the master copy if there is one
    master: int = 0  # copy of the weights in fp32; part of ``optimizer``
    optimizer_of_matrices: int | None = None  # ``optimizer`` of the blocks' matrices, where it differs (Muon)
    # Copies.
    compute_copy: int = 2  # weights as products read them, where they are kept in fp32
    gathered_ends: int = 0  # embedding and unembedding, where each of several ranks has them whole
    exchange: int = 0  # of a block while ranks exchange its gradients
    update_copy: int = 0  # what an update needs beside the states, when the activations are gone
    # A single rank casts weights as products read them: no embedding, and with full recomputation a block at a time;
    # under ZeRO 3 an embedding is freed like a block.
    autocast: bool = False
    shards_weights_from: int = 3  # the first ZeRO stage that shares out the weights
    bucket: int = 0  # bytes of buffers for the exchange of gradients and weights
    # Activations.
    element: int = 2  # bytes of an element
    residual: int = 2  # bytes of an element of the residual stream
    flash_attention: bool = True  # the scores of attention are never written
    sequence_parallel: bool = False  # between products a tensor rank has a stretch of positions only
    gathered_inputs: bool = False  # the inputs of column-parallel products are kept whole all the same
    selective: Selective = "core"  # recomputed: the core of attention, or all but every second product
    # Loss.
    logit: int = 14  # bytes of a logit at its peak
    sharded_logit: int | None = None  # the same with the vocabulary over tensor ranks, where it differs
    logits_at_once: float = math.inf  # logits that exist at once, at most
    unembedding: int = 0  # gradient of the unembedding that the loss keeps until the backward pass
    # Pipeline.
    keeps_outputs: bool = False  # a stage keeps what it has sent on
    balance: Balance = "weight"  # blocks are dealt to stages by the weight of the ends, by number, or by FLOPs
    # Overhead: the lower ends of what is usual, 1 to 2 GB (Ultra-Scale Playbook) and 5 to 10%.
    fixed_gib: float = 2.0  # context, NCCL, kernels
    slack: float = 0.05  # share of everything else that the allocator holds and cannot use
    # Pace.
    products: Dtype = "bf16"  # dtype of a block's products
    fused: bool = False  # elementwise operators are fused without a compiler, too
    overlap: bool = True  # gradients are exchanged during the last backward pass
    message: float = DDP_BUCKET  # bytes of gradients in one exchange, where ``units`` is 0
    # Parts of a block that are exchanged one by one at every ZeRO stage, as torch's FSDP2 does, and last the root
    # unit of what is in no block; below ZeRO 2 a pipeline exchanges all of them after the last backward pass.
    units: int = 0
    behind_products: bool = False  # tensor ranks exchange in as many pieces as ranks, all but the first hidden
    shared_nics: bool = True  # the rings of a group go over all network adapters of a node
    slower: float = 1.0  # factor on the time of a block that no operator explains

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(vars(self)[name] for name in self.__dataclass_fields__))

    def with_moments(self, moments: Moments) -> "TrainingCode":
        """The same code with another optimizer.

        ``adam``: two moments in fp32. ``adam-8bit``: two of a byte (Dettmers 2021, arXiv 2110.02861; its scales, one
        for 2,048 values, are not counted). ``muon``: one in fp32 for matrices, Adam for everything else.
        """
        matrices = self.master + 4 if moments == "muon" else None
        return replace(
            self, optimizer=self.master + (2 if moments == "adam-8bit" else 8), optimizer_of_matrices=matrices
        )


def read_training_codes(path: Path) -> dict[str, TrainingCode]:
    """Every code of the file by name. Each group of values must have a source."""
    adapter, values = TypeAdapter(TrainingCode), dict[str, dict[str, Any]]()
    for name, groups in tomllib.loads(path.read_text(encoding="utf-8")).items():
        flat = dict(values.get(groups.pop("like", ""), {}))
        for group, entries in groups.items():
            assert entries.pop("source", ""), f"{path}: [{name}] {group} has no source"
            flat |= entries
        values[name] = flat
    return {name: adapter.validate_python(flat) for name, flat in values.items()}


TRAINING_CODES: Mapping[str, TrainingCode] = read_training_codes(Path(__file__).with_suffix(".toml"))
LEAVEN_BF16, LEAVEN_FP32 = TRAINING_CODES["leaven-bf16"], TRAINING_CODES["leaven-fp32"]


def in_precision(cluster: Cluster, compute: str) -> tuple[Cluster, TrainingCode]:
    """A cluster with its speed in a recipe's precision, and leaven's own code in it.

    fp16 is planned as bf16 is: every accelerator has the same peak for both.

    Raises:
        InputError: for fp32 on an accelerator whose peak in fp32 is not known.
    """
    if compute != "fp32":
        return cluster, LEAVEN_BF16
    accelerator = cluster.accelerator
    peak = accelerator.peak("fp32")
    if peak is None:
        raise InputError(
            f"no peak of {accelerator.name} in fp32 is known, in which this recipe computes; "
            f"plan it with --set precision.compute=bf16"
        )
    slower = replace(accelerator, peak_tflops=peak, best_matmul_tflops=accelerator.matmul("fp32"))
    return replace(cluster, accelerator=slower), LEAVEN_FP32


def states(params: float, code: TrainingCode, matrices: float = 0.0) -> list[StateRow]:
    """Return what a code keeps for ``params`` parameters from step to step, before it is shared out over ranks.

    ``matrices`` of them are in the blocks' matrices, of which some optimizers keep less.

    7B parameters in fp32 with Adam are 4 + 4 + 8 = 16 bytes each, 112 GB; in bf16 with fp32 master weights it is 16
    again, 2 + 2 + 4 + 8. The 140 GB of a rule that is often copied ("the optimizer is three times the weights") are
    20 bytes each: there must be a master copy beside weights that are in fp32 already.
    """
    moments, lean = code.optimizer - code.master, 0.0 if code.optimizer_of_matrices is None else matrices
    master = "a copy in fp32 that the updates are added to: small ones would be rounded off"
    adam = f"Adam's means of the gradient and of its square, {moments / 2:g} bytes each"
    found = (
        ("weights", params, code.weights, f"what the model is, {_DTYPES.get(code.weights, 'bytes')}"),
        ("gradients", params, code.grads, "one for every weight, until the update"),
        ("accumulation", params, code.accumulation, "the gradients' sum over micro-batches, kept beside them"),
        ("master weights", params, code.master, master),
        ("momentum of matrices", lean, (code.optimizer_of_matrices or 0) - code.master, "one mean of the gradient"),
        ("moments", params - lean, moments, adam),
    )
    return [
        StateRow(name=name, bytes_each=each, bytes=each * count, why=why)
        for name, count, each, why in found
        if each and count
    ]
