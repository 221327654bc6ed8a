"""Training codes: how programs such as Megatron-LM and leaven store, copy and exchange tensors."""

import math
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, TypeAdapter

from leaven.documents.planning import StateRow
from leaven.errors import InputError
from leaven.planning.accelerators import Dtype
from leaven.planning.collectives import LINK_SHARE
from leaven.planning.hardware import Cluster
from leaven.planning.traced import Factors

Selective = Literal["core", "products"]
Balance = Literal["weight", "number", "work"]
Sends = Literal["expert", "node"]
Moments = Literal["adam", "adam-8bit", "muon"]

# Bytes of gradients that torch's DistributedDataParallel exchanges at a time.
DDP_BUCKET = 25 * 2**20
_DTYPES = {4: "fp32", 2: "16 bits"}


@dataclass(frozen=True)
class TrainingCode:
    """The memory use and communication of a training code. Sizes are bytes per parameter unless stated otherwise."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    name: str = ""
    # States, which exist from step to step.
    weights: int = 4
    grads: int = 4  # gradients of one micro-batch; if ``accumulation`` is 0, their sum over the micro-batches
    accumulation: int = 0  # sum of the gradients over the micro-batches, if stored separately from ``grads``
    optimizer: int = 8  # moments, and the master copy if any
    master: int = 0  # fp32 copy of 16-bit weights; part of ``optimizer``
    optimizer_of_matrices: int | None = None  # ``optimizer`` for matrices of blocks, if different (Muon)
    ns_steps: int = 0  # Newton-Schulz iterations on each matrix of a block in a step (Muon)
    average: int = 0  # average of the weights, sharded like ``optimizer``
    # Copies.
    compute_copy: int = 2  # copy of fp32 weights in the compute dtype
    gathered_ends: int = 0  # gathered copy of embedding and unembedding, if every rank needs them in full
    exchange: int = 0  # temporary memory of a block while ranks exchange its gradients
    update_copy: int = 0  # temporary memory of the optimizer update, when activations are already freed
    # Whether weights are cast when a product reads them. Then a single rank has no copy of the embedding, and with
    # full recomputation a copy of only one block at a time. Under ZeRO 3 the embedding is freed after its use.
    autocast: bool = False
    shards_weights_from: int = 3  # first ZeRO stage that shards the weights
    bucket: int = 0  # bytes of communication buffers for gradients and weights
    # Activations.
    element: int = 2  # bytes of an element of an activation tensor
    residual: int = 2  # bytes of an element of the residual stream
    flash_attention: bool = True  # attention uses a flash kernel, which does not write scores to memory
    # Documents, ALiBi and windows are a mask of the scores, one for all layers of a forward pass that have the same.
    masks: bool = False
    isolated: bool = False  # attention stops at the start of a document, so with ``masks`` each sequence has its own
    sequence_parallel: bool = False  # tensor-parallel ranks split the sequence outside attention and MLP
    gathered_inputs: bool = False  # with sequence_parallel: the gathered inputs of attention and MLP are saved
    # What selective recomputation repeats. core: scores, softmax and weighted sum of attention; products: everything
    # except attention and every second matrix product, as in torchtitan.
    selective: Selective = "core"
    # Full recomputation stops at the last tensor that the backward pass needs, as torch's checkpoint does: it repeats
    # neither the last product of a block without experts nor the return of tokens from other ranks' experts.
    stops_early: bool = False
    # Loss.
    logit: int = 14  # peak bytes per logit
    sharded_logit: int | None = None  # ``logit`` with a vocabulary sharded over tensor-parallel ranks; None: the same
    logits_at_once: float = math.inf  # largest number of logits that exist at the same time
    unembedding: int = 0  # gradient of the unembedding, which the loss computes and keeps until the backward pass
    # Pipeline.
    keeps_outputs: bool = False  # a pipeline stage keeps its outputs in memory after sending them
    balance: Balance = "weight"  # how blocks are assigned to stages: see :func:`stages.stage_layers`
    # Several stages on a rank need a multiple of pp micro-batches, and the same number of layers in every stage.
    even_stages: bool = False
    # Overhead. Usual values are 1 to 2 GB (Ultra-Scale Playbook) and 5 to 10%.
    fixed_gib: float = 2.0  # GiB of device context, NCCL and kernels
    slack: float = 0.05  # share of all other memory that the allocator reserves but cannot use
    # Speed.
    products: Dtype = "bf16"  # dtype of matrix products in blocks
    fused: bool = False  # elementwise operators are fused even without torch.compile
    overlap: bool = True  # the gradient exchange overlaps with the last backward pass
    message: float = DDP_BUCKET  # bytes of gradients per message, if ``units`` is 0 and ZeRO at most 1
    # FSDP units per block, which are exchanged one by one; the root unit (all parameters outside the blocks) comes
    # last. With a pipeline and ZeRO 0 or 1, all units are exchanged after the last backward pass.
    units: int = 0
    behind_products: bool = False  # of the tp parts of a tensor-parallel exchange, all but one overlap with products
    hidden_transfers: bool = False  # with several stages on a rank, stages send activations behind compute
    shared_nics: bool = True  # a data-parallel collective uses all NICs of its ranks in a node, not only one
    slower: float = 1.0  # factor on the time of a block, fitted to measurements
    # Host: seconds in which it issues the kernels of a block, of whatever size. 0: not measured.
    host_pass: float = 0.0  # for a forward and a backward pass of one micro-batch
    host_step: float = 0.0  # for clipping, optimizer and metrics, once per step
    host_wait: float = 0.0  # like host_pass, but the GPU waits for all of it, however long it computes
    # Experts.
    whole_experts: bool = False  # ep x tp ranks have whole experts; otherwise each expert is split over tp ranks
    # A token is sent to each of its experts (expert), or once to each node and each rank with any of them (node).
    sends: Sends = "expert"
    network_share: float = LINK_SHARE  # share of the network's bandwidth that sending tokens reaches
    hidden_sends: bool = False  # tokens are sent while another micro-batch is computed
    sending_share: float = 0.0  # with hidden_sends: share of the multiprocessors that sending tokens occupies
    # A token's experts have consecutive numbers, as from gates that programs make even for benchmarks. False: random.
    consecutive: bool = False
    permuted: float | None = None  # share of the memory bandwidth that copying tokens reaches; None: as other copies
    experts_at_once: int = 0  # number of products of experts that run at the same time; 0: all of a rank
    torch_grouped: bool = False  # products of experts are torch's grouped product, which is slower on some devices
    # Kernels between products, in blocks that run eagerly (traced.py). Empty: as operators.py and memory.py count.
    moved: Factors = ()  # by width: bytes that they read and write per token and element, forward and backward
    saved: Factors = ()  # by width: bytes saved for the backward pass, and the peak of temporary bytes beside them
    eager: float = 1.0  # share of the memory bandwidth that they reach on average
    breaks_graphs: bool = False  # in a block with experts, torch.compile fuses none of them

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(vars(self)[name] for name in self.__dataclass_fields__))

    def averaging(self, averages: bool) -> "TrainingCode":
        return replace(self, average=4) if averages else self

    def isolating(self, documents: str) -> "TrainingCode":
        """Return the training code of runs with this value of ``data.documents``: "packed" or "isolated"."""
        return replace(self, isolated=True) if documents == "isolated" else self

    def tensors_only(self) -> "TrainingCode":
        """Return a copy without fixed memory and slack, for comparison with the measured memory of tensors."""
        return replace(self, fixed_gib=0.0, slack=0.0)

    def with_moments(self, moments: Moments) -> "TrainingCode":
        """Return the training code with the optimizer states of another optimizer.

        ``adam-8bit`` has moments of 1 byte (Dettmers 2021, arXiv 2110.02861). Their scales (one per 2,048 values)
        do not count. ``muon`` uses Muon for the matrices of blocks, and Adam for all other parameters.
        """
        matrices = self.master + 4 if moments == "muon" else None
        return replace(
            self, optimizer=self.master + (2 if moments == "adam-8bit" else 8), optimizer_of_matrices=matrices
        )

    def with_muon(self, ns_steps: int) -> "TrainingCode":
        """Return the code with leaven's Muon, or unchanged if ``ns_steps`` is 0."""
        return replace(self.with_moments("muon"), ns_steps=ns_steps) if ns_steps else self


def _read(path: Path) -> Iterator[tuple[str, TrainingCode]]:
    """Yield (name, training code) for each table of a TOML file. The key ``like`` names a table to start from."""
    adapter, values = TypeAdapter(TrainingCode), dict[str, dict[str, Any]]()
    for name, groups in tomllib.loads(path.read_text(encoding="utf-8")).items():
        values[name] = values.get(groups.pop("like", ""), {}) | {"name": name}
        for group, entries in groups.items():
            source = entries.pop("source", "")
            assert source, f"{path}: [{name}] {group} has no source"
            if group in {"moved", "saved"}:  # factors by width
                values[name][group] = tuple((dict(values[name].get(group, ())) | entries).items())
            else:
                values[name] |= entries
        yield name, adapter.validate_python(values[name])


TRAINING_CODES: Mapping[str, TrainingCode] = dict(_read(Path(__file__).with_suffix(".toml")))
LEAVEN_BF16, LEAVEN_FP32 = TRAINING_CODES["leaven-bf16"], TRAINING_CODES["leaven-fp32"]
# Programs for which layouts may be searched. The others may lack something that the search tries, such as a ZeRO
# stage. They are only compared with published measurements.
OFFERED = ("megatron-flash", "megatron-2026", "megatron-moe", "megatron-deepep", "megatron-deepep-overlap")


def training_code(name: str) -> TrainingCode:
    """Return a training code in `OFFERED` by its name. Raise InputError if there is none."""
    if name not in OFFERED:
        raise InputError(f"--code {name}: unknown; give one of {', '.join(OFFERED)}")
    return TRAINING_CODES[name]


def in_precision(cluster: Cluster, compute: str) -> tuple[Cluster, TrainingCode]:
    """Return the cluster with its speed in the dtype ``compute``, and leaven's training code for this dtype.

    Raise InputError if ``compute`` is fp32 and the accelerator's fp32 peak is unknown.
    """
    if compute != "fp32":  # accelerators have the same peak for bf16 and fp16
        return cluster, LEAVEN_BF16
    accelerator = cluster.accelerator
    if accelerator.peak("fp32") is None:
        raise InputError(
            f"no peak of {accelerator.name} in fp32 is known, and this recipe computes in fp32; "
            f"plan with --set precision.compute=bf16"
        )
    return replace(cluster, accelerator=replace(accelerator, dtype="fp32")), LEAVEN_FP32


def states(params: float, code: TrainingCode, matrices: float = 0.0) -> list[StateRow]:
    """Return a row for each state that the training code stores, before sharding: weights, moments and so on.

    ``matrices``: the number of parameters in matrices of blocks. Muon stores less for them.
    """
    moments, lean = code.optimizer - code.master, 0.0 if code.optimizer_of_matrices is None else matrices
    of_matrices = (code.optimizer_of_matrices or 0) - code.master
    master = "an fp32 copy that updates are added to, because in 16 bits small updates would be rounded off"
    adam = f"Adam's means of the gradient and of its square, {moments / 2:g} bytes each"
    found = (
        ("weights", params, code.weights, f"the model's parameters, {_DTYPES.get(code.weights, 'bytes')}"),
        ("gradients", params, code.grads, "one for every weight, kept until the update"),
        ("accumulation", params, code.accumulation, "the sum of gradients over micro-batches, stored separately"),
        ("master weights", params, code.master, master),
        ("momentum of matrices", lean, of_matrices, "Muon's mean of the gradient"),
        ("moments", params - lean, moments, adam),
        ("average", params, code.average, "the average of the weights, fp32"),
    )
    return [
        StateRow(name=name, bytes_each=each, bytes=each * count, why=why)
        for name, count, each, why in found
        if each and count
    ]
