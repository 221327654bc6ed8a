"""How long a step takes, from first principles and one calibrated number.

A block's time is its matmuls at ``SUSTAINED`` of the best measured matmul, its other operators at the bandwidth of
the memory, and its tensor-parallel all-reduces. The model of overlap is simple and stated: tensor-parallel and
pipeline communication is never hidden; gradient reduction hides behind the backward pass of one micro-batch;
ZeRO-3 gathers hide behind the compute of their own micro-batch. Launch latency, stragglers, wave quantisation of
matmuls and congestion are not modelled: small models and large clusters are in truth slower than said here, up to
3.5 times (1.3B on 512 GPUs, one micro-batch a step). With full recomputation well-tuned FSDP is up to 36% faster.
"""

from dataclasses import dataclass
from functools import cache

from leaven.planning.arrangement import Arrangement, scheduled
from leaven.planning.flops import forward_flops
from leaven.planning.hardware import Cluster
from leaven.planning.memory import (
    LEAVEN_BF16,
    Implementation,
    layer_activation_bytes,
    rank_layers,
    stage_parameters,
)
from leaven.recipe.shape import ModelShape

# The share of the best measured matmul that the matmuls of a block sustain in training. What is left of a measured
# block after the other terms: 0.73 (Korthikanti 2022 Table 4, 22B) and 0.69 (BLOOM 176B, line 867 to 870).
SUSTAINED = 0.70
# The share of a link's bandwidth that a ring collective reaches.
LINK_SHARE = 0.75


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimiser step, and where they go. ``step`` is their sum.

    ``compute`` of all micro-batches without ``tensor_parallel`` and ``pipeline`` transfers; ``bubble`` idle at both
    ends of the pipeline; ``data_parallel`` what of the gradient and weight exchange is not hidden.
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
    """Seconds of one block for one micro-batch: forward, backward with recomputation, and their all-reduces."""

    forward: float
    backward: float
    all_reduce: float


@cache
def block_time(
    shape: ModelShape, how: Arrangement, cluster: Cluster, code: Implementation = LEAVEN_BF16
) -> BlockTime:
    """Time of one block for one micro-batch.

    Every byte kept for the backward pass is written once and read once in the forward, twice that in the backward.
    Attention is charged for the full matrix: what a causal kernel skips, its lower throughput takes back.
    """
    layout, accelerator = how.layout, cluster.accelerator
    tokens = how.micro_batch * shape.seq_len
    forward = forward_flops(shape)
    flops = tokens * forward.layers() / shape.n_layers / layout.tp
    matmul = flops / (accelerator.matmul_flops * SUSTAINED)
    traffic = 2 * layer_activation_bytes(shape, how.micro_batch, layout.tp, code)
    once = matmul + traffic / (accelerator.memory_tb_s * 1e12)
    attention_share = forward.attention / forward.layers()
    again = {"none": 0.0, "selective": once * attention_share, "full": once}[layout.recompute]
    # two all-reduces forward, two backward, two more where the whole forward is repeated
    message = code.element * tokens * shape.d_model
    reductions = 6 if layout.recompute == "full" else 4
    all_reduce = reductions * 2 * _ring(message, layout.tp, _bandwidth(cluster, layout.tp, 1))
    return BlockTime(once, 2 * once + again, all_reduce)


def step_time(shape: ModelShape, how: Arrangement, cluster: Cluster, code: Implementation = LEAVEN_BF16) -> StepTime:
    """Time of one optimiser step: (m + (p - 1) / v) slots of the slowest of p ranks with v stages each, then the
    optimiser. Zero-bubble is timed as 1F1B is: what it hides is not modelled."""
    layout, p = how.layout, how.layout.pp
    m = scheduled(layout, how.grad_accumulation)
    block = block_time(shape, how, cluster, code)
    tokens = how.micro_batch * shape.seq_len
    logits = (
        3 * tokens * forward_flops(shape).unembedding / layout.tp / (cluster.accelerator.matmul_flops * SUSTAINED)
    )
    # The slowest stage: the last with the logits, or one of more blocks in the middle.
    layers = [rank_layers(shape, layout, rank, code) for rank in range(p)]
    seconds = block.forward + block.backward + block.all_reduce
    last_is_slowest = layers[-1] * seconds + logits >= max(layers) * seconds
    n, extra = (layers[-1], logits) if last_is_slowest else (max(layers), 0.0)
    compute, reduce = n * (block.forward + block.backward) + extra, n * block.all_reduce
    hop = code.residual * tokens * shape.d_model / layout.tp / _bandwidth(cluster, layout.ranks, layout.ranks)
    transfer = 2 * hop * layout.stages_per_rank if p > 1 else 0.0
    states = code.weights + code.grads + code.optimizer
    own = stage_parameters(shape, layout, 0, code) / (layout.dp // layout.dp_replicate if layout.zero else 1)
    return StepTime(
        compute=m * compute,
        tensor_parallel=m * reduce,
        pipeline=m * transfer,
        bubble=(p - 1) * (compute + reduce + transfer) / layout.stages_per_rank,
        data_parallel=_exposed_data_parallel(shape, how, cluster, code, n * block.forward),
        optimizer=2 * own * states / (cluster.accelerator.memory_tb_s * 1e12),
    )


def _exposed_data_parallel(
    shape: ModelShape, how: Arrangement, cluster: Cluster, code: Implementation, forward: float
) -> float:
    """Seconds a step of data-parallel exchange that no compute hides; ``forward`` of the stage, one micro-batch."""
    layout, m = how.layout, how.grad_accumulation
    if layout.dp == 1:
        return 0.0
    backward, sharers = 2 * forward, layout.dp // layout.dp_replicate
    bandwidth = _bandwidth(cluster, layout.tp * sharers, layout.tp)
    parameters = stage_parameters(shape, layout, 0, code)
    scatter = _ring(parameters * code.grads, sharers, bandwidth)
    gather = _ring(parameters * code.weights, sharers, bandwidth)
    if layout.zero == 0:
        return max(0.0, 2 * scatter - backward)
    # Between replicas, of the share of each, once a step.
    between = _bandwidth(cluster, layout.tp * layout.dp, layout.tp * sharers)
    reduce = 2 * _ring(parameters * code.grads / sharers, layout.dp_replicate, between)
    if layout.zero == 1:
        return max(0.0, scatter + reduce - backward) + gather
    if layout.zero == 2:
        return m * max(0.0, scatter - backward) + reduce + gather
    fetch = _ring(parameters * (code.compute_copy or code.weights), sharers, bandwidth)
    return m * (max(0.0, fetch - forward) + max(0.0, fetch + scatter - backward)) + reduce


def _ring(size: float, ranks: int, bandwidth: float) -> float:
    """Seconds of a reduce-scatter or an all-gather of ``size`` bytes; an all-reduce is two."""
    return (ranks - 1) / ranks * size / bandwidth


def _bandwidth(cluster: Cluster, span: int, stride: int) -> float:
    """Bytes/s of a rank in a group of ranks ``stride`` apart over ``span`` ranks.

    Inside a node it is the link. Across nodes the rings of a group share the NICs of its members in a node.
    """
    accelerator = cluster.accelerator
    gb_s = accelerator.link_gb_s
    if span > accelerator.node_size:
        members = max(1, accelerator.node_size // stride)
        gb_s = min(gb_s, members * accelerator.network_gb_s)
    return gb_s * 1e9 * LINK_SHARE
