"""How long a step takes, from the device's published numbers: operators, transfers, bubble, optimiser.

A block is its operators (operators.py) and its tensor-parallel collectives, which nothing hides. Gathers and
scatters of ZeRO 2 and 3 hide behind the compute of their own micro-batch, and the gradients of ZeRO 0 and 1 behind the
last backward pass. Stragglers, congestion and the host's own slowness are not modelled.
"""

from dataclasses import dataclass
from functools import cache
from math import ceil
from typing import TypeAlias

from leaven.planning.arrangement import Arrangement, scheduled
from leaven.planning.blueprint import Blueprint, blueprint
from leaven.planning.collectives import all_reduce, all_to_all, hop, one_nic, ring
from leaven.planning.accelerators import Accelerator
from leaven.planning.hardware import Cluster
from leaven.planning.implementations import LEAVEN_BF16, Implementation
from leaven.planning.operators import Operator, block_operators, matmul_seconds, stream_seconds
from leaven.planning.stages import rank_layers, stage_parameters
from leaven.recipe.layout import Layout
from leaven.recipe.shape import ModelShape

Model: TypeAlias = ModelShape | Blueprint


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimiser step, and where they go. ``step`` is their sum.

    ``compute`` of all micro-batches without ``tensor_parallel`` (and context- and expert-parallel) and ``pipeline``
    transfers; ``bubble`` idle at both ends of the pipeline; ``data_parallel`` what of the gradient and weight exchange
    is not hidden.
    """

    compute: float
    tensor_parallel: float
    pipeline: float
    bubble: float
    data_parallel: float
    optimizer: float

    @property
    def step(self) -> float:
        return self.compute + self.tensor_parallel + self.pipeline + self.bubble + self.data_parallel + self.optimizer


@dataclass(frozen=True)
class BlockTime:
    """Seconds of the mean block for one micro-batch: forward, backward with recomputation, and what its ranks exchange.

    ``weight`` is the part of ``backward`` that computes gradients of weights, ``operators`` where forward and backward
    go, without recomputation.
    """

    forward: float
    backward: float
    all_reduce: float
    weight: float = 0.0
    operators: tuple[Operator, ...] = ()


def block_time(model: Model, how: Arrangement, cluster: Cluster, code: Implementation = LEAVEN_BF16) -> BlockTime:
    """Time of the mean block of a model for one micro-batch."""
    layout = how.layout
    degrees = layout.tp, layout.cp, layout.ep
    accelerator = cluster.accelerator
    return _block_time(model, degrees, how.micro_batch, layout.recompute, layout.compile, accelerator, code)


@cache
def _block_time(
    model: Model,
    degrees: tuple[int, int, int],
    micro_batch: int,
    recompute: str,
    compiled: bool,
    accelerator: Accelerator,
    code: Implementation,
) -> BlockTime:
    (tp, cp, ep), table = degrees, blueprint(model)
    tokens = micro_batch * table.seq_len // cp
    node = Cluster(tp * cp * ep, accelerator)
    forward = backward = exchange = weight = 0.0
    shown: tuple[Operator, ...] = ()
    for block, count in table.kinds:
        operators = block_operators(
            block, table.d_model, tokens, table.seq_len, degrees, compiled or code.pace.fused, accelerator, code
        )
        once = code.pace.slower * sum(operator.forward for operator in operators)
        core = sum(operator.forward for operator in operators if operator.name == "attention")
        products = sum(operator.forward for operator in operators if operator.weight)
        again = {
            "none": 0.0,
            "selective": core if code.selective == "core" else once - core - products / 2,
            "full": once,
        }[recompute]
        share = count / table.n_layers
        forward += share * once
        backward += share * (code.pace.slower * sum(operator.backward for operator in operators) + again)
        weight += share * sum(operator.weight for operator in operators)
        # two all-reduces forward, two backward, two more where the whole forward is repeated
        passes = 3 if recompute == "full" else 2
        reduced = all_reduce(code.element * tokens * table.d_model, tp, 1, node)
        exchange += share * passes * 2 * reduced / (tp if code.pace.behind_products else 1)
        if cp > 1:  # keys and values go round while those that are here are used; backward their gradients too
            heads = block.core.kv_heads * (block.core.d_qk + block.core.d_v) / tp
            around = cp * ring(code.element * tokens * heads, cp, tp, node)
            exchange += share * (passes - 1 + 2) * max(0.0, around - core)
        if ep > 1:
            sent = max((row.passed for row in block.matmuls if row.routed), default=0)
            message = code.element * tokens * table.d_model * sent / (tp if code.sequence_parallel else 1)
            exchange += share * passes * 2 * all_to_all(message, ep, tp, node)
        shown = shown or operators
    return BlockTime(forward, backward, exchange, weight, shown)


@cache
def _stages(model: Model, layout: Layout, code: Implementation) -> tuple[int, int, float]:
    """Blocks of the rank of the pipeline that has most, and of the last; and parameters of the first."""
    counts = {rank: rank_layers(model, layout, rank, code) for rank in range(layout.pp)}
    return max(counts.values()), counts[layout.pp - 1], stage_parameters(model, layout, 0, code)


@cache
def _ends_seconds(
    model: Model, tp: int, cp: int, micro_batch: int, accelerator: Accelerator, code: Implementation
) -> float:
    """Seconds of the logits and their loss, forward and backward, for one micro-batch."""
    table = blueprint(model)
    tokens, width, vocab = micro_batch * table.seq_len // cp, table.d_model, table.vocab_size // tp
    products = ((tokens, vocab, width), (tokens, width, vocab), (vocab, width, tokens))
    loss = stream_seconds(2.0 * code.logit * tokens * vocab, accelerator)
    return sum(matmul_seconds(m, n, k, accelerator) for m, n, k in products) + loss


def step_time(model: Model, how: Arrangement, cluster: Cluster, code: Implementation = LEAVEN_BF16) -> StepTime:
    """Time of one optimiser step: (m + (p - 1) / v) slots of the slowest of p ranks with v stages each, then the
    optimiser. A zero-bubble schedule fills the bubble with the weights' halves of backward passes (ZB-H1: p - 1 times
    forward + backward - 2 weights', Qi et al. 2023, arXiv 2401.10241)."""
    layout, p, accelerator = how.layout, how.layout.pp, cluster.accelerator
    m = scheduled(layout, how.grad_accumulation)
    block = block_time(model, how, cluster, code)
    most, last, parameters = _stages(model, layout, code)
    logits = _ends_seconds(model, layout.tp, layout.cp, how.micro_batch, accelerator, code)
    # The slowest stage: the last with the logits, or one of more blocks in the middle.
    seconds = block.forward + block.backward + block.all_reduce
    n, extra = (last, logits) if last * seconds + logits >= most * seconds else (most, 0.0)
    summed = code.accumulation or code.grads
    # every micro-batch's gradients are added to those before
    adding = parameters * (code.element + 2 * summed) / (accelerator.memory_tb_s * 1e12)
    compute, reduce = n * (block.forward + block.backward) + extra + adding, n * block.all_reduce
    tokens = how.micro_batch * blueprint(model).seq_len // layout.cp
    transfer = 0.0
    if p > 1:
        message = code.residual * tokens * blueprint(model).d_model / layout.tp
        transfer = 2 * layout.stages_per_rank * hop(message, layout.ranks, cluster)
    idle = compute + reduce + transfer
    if layout.schedule == "zero-bubble":
        idle = max(0.0, idle - 3 * n * block.weight)
    states = code.weights + code.grads + code.accumulation + code.optimizer
    sharers = layout.dp * layout.cp // layout.dp_replicate if layout.zero else 1
    return StepTime(
        compute=m * compute,
        tensor_parallel=m * reduce,
        pipeline=m * transfer,
        bubble=(p - 1) * idle / layout.stages_per_rank,
        data_parallel=_exposed_data_parallel(how, cluster, code, parameters, most, n * block.forward),
        optimizer=2 * parameters / sharers * states / (accelerator.memory_tb_s * 1e12),
    )


def _exposed_data_parallel(
    how: Arrangement, cluster: Cluster, code: Implementation, parameters: float, units: int, forward: float
) -> float:
    """Seconds a step of data-parallel exchange that no compute hides; ``forward`` of the stage, one micro-batch."""
    layout, m, ranks = how.layout, how.grad_accumulation, how.layout.dp * how.layout.cp
    if ranks == 1:
        return 0.0
    if not code.pace.shared_nics:
        cluster = one_nic(cluster)
    backward, sharers = 2 * forward, ranks // layout.dp_replicate
    grads, weights = parameters * (code.accumulation or code.grads), parameters * code.weights
    buckets = ceil(grads / code.pace.message)
    hidden = backward if code.pace.overlap else 0.0
    if layout.zero == 0:
        return max(0.0, all_reduce(grads, ranks, layout.tp, cluster, buckets) - hidden)
    # Between replicas, of the share of each, once a step.
    between = all_reduce(grads / sharers, layout.dp_replicate, layout.tp * sharers, cluster)
    # ZeRO 1 in buckets, ZeRO 2 and 3 in the units that a model is cut into, its blocks
    scatter = ring(grads, sharers, layout.tp, cluster, buckets if layout.zero == 1 else units)
    if layout.zero == 3:
        copy = parameters * (code.compute_copy or code.weights)
        fetch = ring(copy, sharers, layout.tp, cluster, units)
        return m * (max(0.0, fetch - forward) + max(0.0, fetch + scatter - backward)) + between
    gather = ring(weights, sharers, layout.tp, cluster, buckets if layout.zero == 1 else units)
    times = m if layout.zero == 2 else 1
    return times * max(0.0, scatter - (backward if layout.zero == 2 else hidden)) + between + gather
