"""How long a step takes, from the device's published numbers: operators, transfers, bubble, optimiser.

A block is its operators (operators.py) and what its ranks exchange (collectives.py). Gathers and scatters of ZeRO 2
and 3 hide behind the compute of their own micro-batch, and the gradients of ZeRO 0 and 1, in code that overlaps them,
behind the last backward pass. Stragglers, congestion and the host's own slowness are not modelled.
"""

from dataclasses import dataclass
from functools import cache
from math import ceil
from typing import TypeAlias

from leaven.planning.accelerators import Accelerator
from leaven.planning.arrangement import Arrangement, scheduled
from leaven.planning.blueprint import Block, Blueprint, blueprint
from leaven.planning.collectives import all_reduce, all_to_all, hop, one_nic, ring
from leaven.planning.hardware import Cluster
from leaven.planning.implementations import LEAVEN_BF16, Implementation
from leaven.planning.operators import Operator, Work, block_operators, matmul_seconds, stream_seconds
from leaven.planning.stages import rank_layers, stage_parameters
from leaven.recipe.layout import Layout, Recompute
from leaven.recipe.shape import ModelShape

Model: TypeAlias = ModelShape | Blueprint


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimiser step, and where they go. ``step`` is their sum.

    ``compute`` of all micro-batches without ``tensor_parallel`` exchanges (and those of context and experts) and
    ``pipeline`` transfers; ``bubble`` idle at both ends of the pipeline; ``data_parallel`` what of the gradient and
    weight exchange is not hidden.
    """

    compute: float
    tensor_parallel: float
    pipeline: float
    bubble: float
    data_parallel: float
    optimizer: float

    @property
    def step(self) -> float:
        return float(sum(vars(self).values()))


@dataclass(frozen=True)
class BlockTime:
    """Seconds of the mean block for one micro-batch: forward, backward with recomputation, and what ranks exchange.

    ``weight`` is the part of ``backward`` that computes gradients of weights. ``operators``: where forward and
    backward go in the first block, without recomputation.
    """

    forward: float
    backward: float
    all_reduce: float
    weight: float
    operators: tuple[Operator, ...]

    @property
    def total(self) -> float:
        return self.forward + self.backward + self.all_reduce


def block_time(model: Model, how: Arrangement, cluster: Cluster, code: Implementation = LEAVEN_BF16) -> BlockTime:
    """Time of the mean block of a model for one micro-batch."""
    layout, table = how.layout, blueprint(model)
    work = Work(
        tokens=_tokens(table, how),
        seq_len=table.seq_len,
        width=table.d_model,
        tp=layout.tp,
        cp=layout.cp,
        ep=layout.ep,
        fused=layout.compile or code.pace.fused,
    )
    return _block_time(table, work, layout.recompute, cluster.accelerator, code)


@cache
def _block_time(
    table: Blueprint, work: Work, recompute: Recompute, accelerator: Accelerator, code: Implementation
) -> BlockTime:
    forward = backward = exchanged = weight = 0.0
    for block, count in table.kinds:
        share = count / table.n_layers
        operators = block_operators(block, work, accelerator, code)
        once = code.pace.slower * sum(operator.forward for operator in operators)
        again = _again(operators, once, recompute, code)
        forward += share * once
        backward += share * (code.pace.slower * sum(operator.backward for operator in operators) + again)
        weight += share * sum(operator.weight for operator in operators)
        passes = 3 if recompute == "full" else 2  # the forward pass may be there twice
        exchanged += share * passes * _exchange(block, work, accelerator, code)
    first = block_operators(table.blocks[0], work, accelerator, code)
    return BlockTime(forward, backward, exchanged, weight, first)


def _again(operators: tuple[Operator, ...], once: float, recompute: Recompute, code: Implementation) -> float:
    """Seconds of what is computed again in the backward pass."""
    if recompute == "none":
        return 0.0
    core = sum(operator.forward for operator in operators if operator.name == "attention")
    if recompute == "selective" and code.selective == "core":
        return core
    # else everything but attention and every second product
    kept = core + sum(operator.forward for operator in operators if operator.weight) / 2
    return once - (kept if recompute == "selective" else 0.0)


def _exchange(block: Block, work: Work, accelerator: Accelerator, code: Implementation) -> float:
    """Seconds that the ranks of a block exchange in one pass, forward or backward: tensor ranks after each of two
    branches, context ranks keys and values in a ring as far as attention does not hide it, experts tokens there and
    back."""
    node = Cluster(work.tp * work.cp * work.ep, accelerator)
    stream = code.element * work.tokens * work.width
    seconds = 2 * all_reduce(stream, work.tp, 1, node)
    if code.pace.behind_products:
        seconds /= work.tp
    if work.cp > 1:
        core = block.core
        keys = code.element * work.tokens * core.kv_heads * (core.d_qk + core.d_v) / work.tp
        operators = block_operators(block, work, accelerator, code)
        attention = next(operator.forward for operator in operators if operator.name == "attention")
        seconds += max(0.0, ring(work.cp * keys, work.cp, work.tp, node) - attention)
    sent = max((row.passed for row in block.matmuls if row.routed), default=0)
    if sent and work.ep > 1:
        message = stream * sent / (work.tp if code.sequence_parallel else 1)
        seconds += 2 * all_to_all(message, work.ep, work.tp, node)
    return seconds


@dataclass(frozen=True)
class _Stage:
    """Blocks of the ranks of a pipeline that have most, and of the last; parameters of the rank that has most."""

    most: int
    last: int
    parameters: float


@cache
def _stages(table: Blueprint, layout: Layout, code: Implementation) -> _Stage:
    ranks = range(layout.pp)
    counts = [rank_layers(table, layout, rank, code) for rank in ranks]
    return _Stage(max(counts), counts[-1], max(stage_parameters(table, layout, rank, code) for rank in ranks))


def logits_seconds(model: Model, how: Arrangement, cluster: Cluster, code: Implementation = LEAVEN_BF16) -> float:
    """Seconds of the logits and their loss for one micro-batch, forward and backward: every byte at the peak is
    written and read."""
    table = blueprint(model)
    return _logits_seconds(table, _tokens(table, how), how.layout.tp, cluster.accelerator, code)


@cache
def _logits_seconds(table: Blueprint, m: int, tp: int, accelerator: Accelerator, code: Implementation) -> float:
    n, k = table.vocab_size // tp, table.d_model
    products = sum(matmul_seconds(sizes, accelerator) for sizes in ((m, n, k), (m, k, n), (n, k, m)))
    return products + stream_seconds(2.0 * code.logit * m * n, accelerator)


def transfer_seconds(model: Model, how: Arrangement, cluster: Cluster, code: Implementation = LEAVEN_BF16) -> float:
    """Seconds that a pass of one micro-batch is on the way from a stage to the next."""
    table, layout = blueprint(model), how.layout
    if layout.pp == 1:
        return 0.0
    message = code.residual * _tokens(table, how) * table.d_model / layout.tp
    return hop(message, layout.ranks, cluster)


def adding_seconds(parameters: float, accelerator: Accelerator, code: Implementation = LEAVEN_BF16) -> float:
    """Seconds in which the gradients of a micro-batch are added to those before."""
    summed = code.accumulation or code.grads
    return parameters * (code.element + 2 * summed) / (accelerator.memory_tb_s * 1e12)


def _tokens(table: Blueprint, how: Arrangement) -> int:
    """Of a micro-batch on one rank."""
    return how.micro_batch * table.seq_len // how.layout.cp


def step_time(model: Model, how: Arrangement, cluster: Cluster, code: Implementation = LEAVEN_BF16) -> StepTime:
    """Time of one optimiser step: (m + (p - 1) / v) slots of the slowest of p ranks with v stages each, then the
    optimiser.

    A zero-bubble schedule fills the bubble with the weights' halves of backward passes: of every forward and backward
    pass twice that half is gone from it (ZB-H1, Qi et al. 2023, arXiv 2401.10241: T_F + T_B - T_W, where T_B is the
    other half alone). So torch's schedule comes out (planning/schedule.py, and measured: docs/log.md).
    """
    layout, table, accelerator = how.layout, blueprint(model), cluster.accelerator
    p, m = layout.pp, scheduled(layout, how.grad_accumulation)
    block, stage = block_time(table, how, cluster, code), _stages(table, layout, code)
    logits = logits_seconds(table, how, cluster, code)
    # The slowest stage: the last with the logits, or one of more blocks in the middle.
    ends = stage.last * block.total + logits >= stage.most * block.total
    n, extra = (stage.last, logits) if ends else (stage.most, 0.0)
    bandwidth = accelerator.memory_tb_s * 1e12
    adding = adding_seconds(stage.parameters, accelerator, code)
    compute, exchanged = n * (block.forward + block.backward) + extra + adding, n * block.all_reduce
    transfer = 2 * layout.stages_per_rank * transfer_seconds(table, how, cluster, code)
    idle = compute + exchanged + transfer
    if layout.schedule == "zero-bubble":
        idle = max(0.0, idle - 2 * (n * block.weight + extra / 3 + adding))
    states = code.weights + code.grads + code.accumulation + code.optimizer
    sharers = layout.dp * layout.cp // layout.dp_replicate if layout.zero else 1
    return StepTime(
        compute=m * compute,
        tensor_parallel=m * exchanged,
        pipeline=m * transfer,
        bubble=(p - 1) * idle / layout.stages_per_rank,
        data_parallel=_data_parallel(how, cluster, code, stage, n * block.forward),
        optimizer=2 * stage.parameters / sharers * states / bandwidth,
    )


def _data_parallel(how: Arrangement, cluster: Cluster, code: Implementation, stage: _Stage, forward: float) -> float:
    """Seconds a step of data-parallel exchange that no compute hides; ``forward`` of the stage, one micro-batch."""
    layout, m, ranks = how.layout, how.grad_accumulation, how.layout.dp * how.layout.cp
    if ranks == 1:
        return 0.0
    if not code.pace.shared_nics:
        cluster = one_nic(cluster)
    sharers, backward = ranks // layout.dp_replicate, 2 * forward
    hidden = backward if code.pace.overlap else 0.0
    grads, weights = stage.parameters * (code.accumulation or code.grads), stage.parameters * code.weights
    messages = ceil(grads / code.pace.message)
    if layout.zero == 0:
        return max(0.0, all_reduce(grads, ranks, layout.tp, cluster, messages) - hidden)
    # Between replicas, of the share of each, once a step.
    between = all_reduce(grads / sharers, layout.dp_replicate, layout.tp * sharers, cluster)
    if layout.zero > 1:  # a message for every unit that a model is cut into, its blocks
        messages, hidden = stage.most, backward
    scatter = ring(grads, sharers, layout.tp, cluster, messages)
    if layout.zero == 3:
        copy = stage.parameters * (code.compute_copy or code.weights)
        fetch = ring(copy, sharers, layout.tp, cluster, messages)
        return m * (max(0.0, fetch - forward) + max(0.0, fetch + scatter - backward)) + between
    gather = ring(weights, sharers, layout.tp, cluster, messages)
    return (m if layout.zero == 2 else 1) * max(0.0, scatter - hidden) + between + gather
