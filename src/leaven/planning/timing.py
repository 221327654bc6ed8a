"""Compute the time of a step: operators, transfers, bubble, optimizer, and waiting for the host.

Ranks exchange gradients and weights as follows:

- Gradients: under ZeRO 0 and 1 once per step, under ZeRO 2 and 3 during the backward pass of every micro-batch.
- Weights: under ZeRO 1 and 2 once per step, under ZeRO 3 during every pass.
- Parameters outside the blocks (embedding, last norm, unembedding): FSDP exchanges them together, as its root unit.
  This exchange does not overlap with compute. The first operator of a pass waits for the root unit's weights, and the
  root unit's gradients are complete only at the end of the backward pass.

The host issues the kernels of a step one after the other, and a GPU runs them meanwhile. So a step takes at least as
long as the host needs to issue all kernels. This time depends on the number of blocks and micro-batches, not on their
size. It was measured for leaven's own trainer only. In torchtitan and similar codes, each block of a model with
experts takes a further time that depends neither on its size nor on the device (``host_wait``). Stragglers and
congestion are not modelled.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from math import ceil

from leaven.planning.accelerators import Accelerator
from leaven.planning.arrangement import Arrangement, scheduled
from leaven.planning.blueprint import BlockTable, Blueprint, Model, blueprint
from leaven.planning.collectives import all_reduce, all_to_all, hop, ring, send_once
from leaven.planning.hardware import Cluster
from leaven.planning.operators import Operator, Work, block_operators, expert_ranks, matmul_seconds, stream_seconds
from leaven.planning.stages import RankParameters, rank_blocks, rank_parameters, sharers, stage_layers
from leaven.planning.training_codes import LEAVEN_BF16, TrainingCode
from leaven.recipe.layout import Layout, Recompute


@dataclass(frozen=True)
class StepTime:
    """The seconds of one optimizer step by part; ``step`` is the sum of the parts."""

    compute: float  # forward and backward passes of all micro-batches
    tensor_parallel: float  # communication of tensor-, context- and expert-parallel ranks
    pipeline: float  # transfers between stages
    bubble: float  # idle time while the pipeline fills and drains
    data_parallel: float  # exchange of gradients and weights that does not overlap with compute
    optimizer: float
    host: float = 0.0  # time in which the GPU waits, because the host takes longer to issue the kernels of the step

    @property
    def step(self) -> float:
        return float(sum(vars(self).values()))

    def times(self, factor: float) -> "StepTime":
        return StepTime(**{part: factor * seconds for part, seconds in vars(self).items()})


@dataclass(frozen=True)
class BlockTime:
    """The seconds of one block for one micro-batch, as a mean over the blocks of a model."""

    forward: float
    backward: float  # including recomputation
    all_reduce: float  # communication of tensor-, context- and expert-parallel ranks
    weight: float  # part of ``backward`` that computes the gradients of weights

    @property
    def total(self) -> float:
        return self.forward + self.backward + self.all_reduce


def block_time(model: Model, how: Arrangement, cluster: Cluster, code: TrainingCode = LEAVEN_BF16) -> BlockTime:
    """Return the time of one block for one micro-batch, as a mean over the blocks of a model."""
    layout, table = how.layout, blueprint(model)
    work = Work(
        tokens=_tokens(table, how),
        seq_len=table.seq_len,
        width=table.d_model,
        tp=layout.tp,
        cp=layout.cp,
        ep=layout.ep,
        fused=layout.compile or code.fused,
    )
    # The tokens of m - 1 of m micro-batches are sent while another micro-batch is computed.
    hidden = 1 - 1 / how.grad_accumulation if code.hidden_sends else 0.0
    return _block_time(table, work, layout.recompute, cluster.accelerator, code, hidden)


@cache
def _block_time(  # noqa: PLR0917 (a cache)
    table: Blueprint, work: Work, recompute: Recompute, accelerator: Accelerator, code: TrainingCode, hidden: float
) -> BlockTime:
    forward = backward = exchanged = weight = 0.0
    for block, count in table.kinds:
        share = count / table.n_layers
        operators = block_operators(block, work, accelerator, code)
        once = sum(operator.forward for operator in operators)
        again = _recomputed(operators, once, recompute, code)
        forward += share * once
        backward += share * (sum(operator.backward for operator in operators) + again)
        weight += share * sum(operator.weight for operator in operators)
        passes = 3 if recompute == "full" else 2  # full recomputation repeats the forward pass
        stops = code.stops_early and recompute == "full"
        sends = (passes - stops / 2) * _sends(block, work, accelerator, code)
        computed = sum(operator.forward + operator.backward for operator in operators) + again
        # Behind compute, sends take no time of their own, but occupy a share of the multiprocessors.
        sends -= (1 - code.sending_share) * hidden * min(sends, computed)
        exchanged += share * (passes * _exchange(block, work, accelerator, code) + sends)
    return BlockTime(forward, backward, exchanged, weight)


def _recomputed(operators: tuple[Operator, ...], once: float, recompute: Recompute, code: TrainingCode) -> float:
    """Return the seconds that recomputation adds to a block's backward pass; ``once``: seconds of a forward pass."""
    if recompute == "none":
        return 0.0
    core = sum(operator.forward for operator in operators if operator.name == "attention")
    if recompute == "selective" and code.selective == "core":
        return core
    if recompute == "full":
        last = sum(operator.forward for operator in operators if operator.name == "mlp.out")
        return once - (last if code.stops_early else 0.0)
    # With ``selective = "products"``, attention and every second matrix product are kept.
    # Products of routed experts are repeated.
    dense = (operator for operator in operators if operator.weight and "experts" not in operator.name)
    return once - (core + sum(operator.forward for operator in dense) / 2)


def _exchange(block: BlockTable, work: Work, accelerator: Accelerator, code: TrainingCode) -> float:
    """Return the seconds of tensor- and context-parallel communication in a block, in one forward or backward pass.

    Context-parallel ranks exchange keys and values in a ring while they compute attention, so this exchange counts
    only if it takes longer than attention, and then only the difference.
    """
    stream, names = code.element * work.tokens * work.width, {row.name for row in block.matmuls}
    only_attention = code.whole_experts and not names & {"mlp.out", "mlp.shared.out"}
    seconds = (1 if only_attention else 2) * all_reduce(stream, work.tp, 1, accelerator)
    if code.behind_products:
        seconds /= work.tp
    if work.cp > 1:
        core = block.core
        keys = code.element * work.tokens * core.kv_heads * (core.d_qk + core.d_v) / work.tp
        operators = block_operators(block, work, accelerator, code)
        attention = next(operator.forward for operator in operators if operator.name == "attention")
        seconds += max(0.0, ring(work.cp * keys, work.cp, work.tp, accelerator) - attention)
    return seconds


def _sends(block: BlockTable, work: Work, accelerator: Accelerator, code: TrainingCode) -> float:
    """Return the seconds that a pass needs to send tokens to experts on other ranks and to return the outputs."""
    experts = max(((row.stored, row.passed) for row in block.matmuls if row.routed), default=None)
    ranks, stride = expert_ranks(work, code)
    if not experts or ranks == 1:
        return 0.0
    size = code.element * work.tokens * work.width / (work.tp if code.sequence_parallel else 1)
    if code.sends == "expert":
        return 2 * all_to_all(experts[1] * size, ranks, stride, accelerator)
    share = code.network_share
    return 2 * send_once(
        size, ranks, stride, accelerator, experts=experts, network_share=share, consecutive=code.consecutive
    )


def logits_seconds(model: Model, how: Arrangement, cluster: Cluster, code: TrainingCode = LEAVEN_BF16) -> float:
    """Return the seconds of the logits and the loss of one micro-batch, forward and backward."""
    table = blueprint(model)
    return _logits_seconds(table, _tokens(table, how), how.layout.tp, cluster.accelerator, code)


@cache
def _logits_seconds(table: Blueprint, m: int, tp: int, accelerator: Accelerator, code: TrainingCode) -> float:
    n, k = table.vocab_size // tp, table.d_model
    products = sum(matmul_seconds(sizes, accelerator) for sizes in ((m, n, k), (m, k, n), (n, k, m)))
    return products + stream_seconds(2.0 * code.logit * m * n, accelerator)


def transfer_seconds(model: Model, how: Arrangement, cluster: Cluster, code: TrainingCode = LEAVEN_BF16) -> float:
    """Return the seconds for sending the activations of one micro-batch to the next stage."""
    table, layout = blueprint(model), how.layout
    if layout.pp == 1:
        return 0.0
    message = code.residual * _tokens(table, how) * table.d_model / layout.tp
    return hop(message, layout.ranks, cluster.accelerator)


def adding_seconds(parameters: float, accelerator: Accelerator, code: TrainingCode = LEAVEN_BF16) -> float:
    """Return the seconds to add one micro-batch's gradients to the accumulated gradients."""
    return parameters * (code.element + 2 * (code.accumulation or code.grads)) / (accelerator.memory_tb_s * 1e12)


def _tokens(table: Blueprint, how: Arrangement) -> int:
    return how.micro_batch * table.seq_len // how.layout.cp


@cache
def _largest(table: Blueprint, layout: Layout, code: TrainingCode) -> tuple[int, int, RankParameters]:
    """Return (most blocks on a pipeline rank, blocks on the last rank, RankParameters with the largest total)."""
    layers = stage_layers(table, layout.pp * layout.stages_per_rank, code.balance)
    blocks = [sum(layers[rank :: layout.pp]) for rank in range(layout.pp)]
    parameters = [rank_parameters(table, layout, rank, code) for rank in reversed(range(layout.pp))]
    return max(blocks), blocks[-1], max(parameters, key=lambda held: held.total)


def step_time(model: Model, how: Arrangement, cluster: Cluster, code: TrainingCode = LEAVEN_BF16) -> StepTime:
    """Return the time of one optimizer step.

    With m micro-batches and p pipeline ranks of v stages each, the passes take m + (p - 1) / v times as long
    as one micro-batch on the slowest rank. The bubble of a zero-bubble schedule is (p - 1) (F + B - 2 W). F
    and B are the times of a forward and a backward pass. W is the part of B for gradients of weights (ZB-H1,
    Qi et al. 2023, arXiv 2401.10241).
    """
    layout, table, accelerator = how.layout, blueprint(model), cluster.accelerator
    p, m = layout.pp, scheduled(layout, how.grad_accumulation)
    block, (most, last, held) = block_time(table, how, cluster, code), _largest(table, layout, code)
    logits = logits_seconds(table, how, cluster, code)
    # The slowest rank is the last, which computes the logits, or a rank with more blocks.
    ends = last * block.total + logits >= most * block.total
    n, extra = (last, logits) if ends else (most, 0.0)
    bandwidth = accelerator.memory_tb_s * 1e12
    adding = adding_seconds(held.total, accelerator, code)
    compute, exchanged = n * (block.forward + block.backward) + extra + adding, n * block.all_reduce
    transfer = 2 * layout.stages_per_rank * transfer_seconds(table, how, cluster, code)
    idle = compute + exchanged + transfer
    if layout.schedule == "zero-bubble":
        idle = max(0.0, idle - 2 * (n * block.weight + extra / 3 + adding))
    states = code.weights + code.grads + code.accumulation + code.optimizer
    share = held.total
    if layout.zero:
        ranks, ranks_of_expert = sharers(layout)
        share = (held.blocks + held.ends) / ranks + held.experts / ranks_of_expert
    # Only while the pipeline fills and drains, stages wait for activations that are sent behind compute.
    behind = compute + exchanged if code.hidden_transfers and layout.stages_per_rank > 1 else 0.0
    time = StepTime(
        compute=m * compute,
        tensor_parallel=m * exchanged,
        pipeline=m * max(0.0, transfer - behind),
        bubble=(p - 1) * idle / layout.stages_per_rank,
        data_parallel=_data_parallel(
            how, cluster, code, held, most=most, forward=n * block.forward, backward=n * block.backward
        ),
        optimizer=2 * share * states / bandwidth + muon_seconds(table, layout, accelerator, code),
    )
    if accelerator.name == "cpu":  # there, the host computes
        return time
    passes = 4 / 3 if layout.recompute == "full" else 1  # recomputation issues the forward pass again
    # While a pipeline fills and drains, ranks wait for the hosts of others. Its schedule, sends and receives are
    # assumed to take a host as long as the passes of a block; this was not measured.
    filled, sent = m + (p - 1) / layout.stages_per_rank, layout.stages_per_rank if p > 1 else 0
    issuing = (most + sent) * filled * passes * code.host_pass + most * code.host_step
    waiting = most * filled * passes * code.host_wait
    return replace(time, host=max(0.0, issuing - time.step) + waiting)


@cache
def muon_seconds(table: Blueprint, layout: Layout, accelerator: Accelerator, code: TrainingCode) -> float:
    """Return the seconds per step that the slowest rank takes to orthogonalise block matrices for Muon.

    The ranks of a pipeline stage share the matrices of the stage. A rank receives a whole matrix, applies
    the Newton-Schulz iterations (three matrix products each), and sends the result in 16 bits.
    """
    ranks, slowest = layout.dp * layout.cp * layout.tp, 0.0
    copies = layout.dp_replicate if layout.zero else layout.dp * layout.cp  # ranks that store the same part
    for rank in range(layout.pp if code.ns_steps else 0):
        number, seconds, elements = 0.0, 0.0, 0.0
        for block, count in rank_blocks(table, layout.pp, layout.stages_per_rank, rank, code.balance):
            for row in block.matmuls:
                m, n = sorted((row.k, row.n))  # an iteration works on m rows and n >= m columns
                products = sum(
                    matmul_seconds(mnk, accelerator, dtype=code.products) for mnk in ((m, m, n), (m, m, m), (m, n, m))
                )
                number += count * row.stored
                seconds += count * row.stored * code.ns_steps * products
                elements += count * row.stored * m * n
        turns = ceil(number / ranks)
        size = 2 * elements / number  # bytes of a matrix
        there, back = (all_to_all(times * size, ranks, 1, accelerator) for times in (1, copies))
        slowest = max(slowest, turns * (seconds / number + there + back))
    return slowest


def _data_parallel(
    how: Arrangement,
    cluster: Cluster,
    code: TrainingCode,
    held: RankParameters,
    *,
    most: int,
    forward: float,
    backward: float,
) -> float:
    """Return the seconds per step of data-parallel communication that does not overlap with compute.

    ``held``: parameters of the largest rank. ``most``: largest number of blocks on a rank. ``forward``, ``backward``:
    seconds of one micro-batch on the slowest rank.
    """
    layout, m, ranks = how.layout, how.grad_accumulation, how.layout.dp * how.layout.cp
    if ranks == 1:
        return 0.0
    accelerator = cluster.accelerator
    if not code.shared_nics and cluster.nodes > 1:  # each ring has one NIC, as with one GPU per node
        accelerator = replace(accelerator, node_size=1)
    tp, ep, often = layout.tp, layout.ep, layout.zero > 1
    shard, expert_shard = sharers(layout)
    each, units = code.accumulation or code.grads, code.units * most
    # With FSDP, parameters outside the blocks are a unit of their own. Without FSDP, they are in the same messages as
    # the blocks.
    ends, blocks = (held.ends, held.blocks) if units else (0.0, held.blocks + held.ends)
    messages = units or (most if often else ceil(each * (blocks + held.experts) / code.message))
    hidden = backward if often or (code.overlap and not (units and layout.pp > 1)) else 0.0

    def over(collective: Callable[..., float], of_each: float) -> float:
        """Return the seconds of ``collective`` for a rank's parameters at ``of_each`` bytes each."""
        of_blocks = collective(of_each * blocks, shard, tp, accelerator, messages)
        of_experts = collective(of_each * held.experts, expert_shard, tp * ep, accelerator, messages)
        return of_blocks + (of_experts if held.experts else 0.0)

    if layout.zero == 0:
        root = all_reduce(each * ends, ranks, tp, accelerator) if ends else 0.0
        return root + max(0.0, over(all_reduce, each) - hidden)
    # Replicas (dp_replicate) all-reduce the gradients of their shards once per step, during the last backward pass.
    between = all_reduce(each * blocks / shard, layout.dp_replicate, tp * shard, accelerator, units or 1)
    if held.experts:
        copies, stride = ranks // ep // expert_shard, tp * ep * expert_shard
        between += all_reduce(each * held.experts / expert_shard, copies, stride, accelerator, units or 1)
    scatter, root, after = over(ring, each), 0.0, 0.0
    if ends:
        root = ring(each * ends, shard, tp, accelerator)
        after = all_reduce(each * ends / shard, layout.dp_replicate, tp * shard, accelerator)
    cut = layout.zero >= code.shards_weights_from
    copy = (code.compute_copy if cut else 0) or code.weights
    gather = over(ring, copy)
    first = ring(ends * (code.gathered_ends or copy), shard, tp, accelerator) if ends else 0.0
    if layout.zero == 3:
        scatter += gather
        fetched = m * (first + max(0.0, gather - forward))
    else:  # once per step: weights stay gathered until the last backward pass
        fetched = first + max(0.0, gather - (forward if cut else 0.0))
    times = m if often else 1
    exposed = (times - 1) * max(0.0, scatter - hidden) + max(0.0, scatter + between - hidden)
    return fetched + exposed + times * root + after
