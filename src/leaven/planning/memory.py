"""Compute the memory of one rank by part, in bytes.

Weights, gradients and optimizer states are sharded as in the ZeRO paper (arXiv 1910.02054). Activations are mainly
the tensors that autograd saves for the backward pass. Comparisons with measurements:
docs/evidence/planner-accuracy.md (published runs) and benchmarks/memory.py (leaven).
"""

from collections import defaultdict
from dataclasses import dataclass
from functools import cache

from leaven.planning.arrangement import Arrangement, scheduled
from leaven.planning.blueprint import BlockTable, Blueprint, Model, blueprint
from leaven.planning.stages import in_flight, rank_blocks, rank_parameters, sharers
from leaven.planning.traced import traced
from leaven.planning.training_codes import LEAVEN_BF16, Balance, TrainingCode
from leaven.recipe.layout import Layout, Recompute

GIB = 2**30
# Number of saved tensors of the MLP's width: the input and the output of the activation function (ReLU needs only the
# output), or in a gated MLP the gate before and after its activation, the other factor, and the product. A fused
# kernel computes the gate after its activation again (Megatron-LM: core/fusions/fused_bias_swiglu.py, _geglu.py).
_MLP_TENSORS = {"relu": 1, "gelu": 2, "squared_relu": 2, "xielu": 2, "swiglu": 4, "geglu": 4}
_GATED_AND_FUSED = 3


@dataclass(frozen=True)
class Memory:
    """The memory of one rank by part, in bytes; ``total`` is the sum of the parts."""

    weights: float
    grads: float
    accumulation: float  # sum of gradients over micro-batches, if stored separately from ``grads``
    optimizer: float
    gathered: float  # copies of weights for matrix products: in the compute dtype, or gathered from other ranks
    activations: float
    logits: float
    buffers: float  # for the exchange of gradients and weights, and for the optimizer update
    fixed: float  # device context, NCCL, kernels
    reserve: float  # reserved by the allocator but not usable (fragmentation)

    @property
    def total(self) -> float:
        return float(sum(vars(self).values()))

    @property
    def states(self) -> float:
        """The bytes of weights and optimizer states, which stay allocated from step to step."""
        return self.weights + self.optimizer

    @property
    def parts_gib(self) -> dict[str, float]:
        return {name: value / GIB for name, value in vars(self).items()}


@dataclass(frozen=True)
class _States:
    """The memory of a rank, for any micro-batch size: activations in bytes per token, everything else in bytes."""

    weights: float
    grads: float
    accumulation: float
    optimizer: float
    gathered: float  # ``gathered`` of :class:`Memory`, without ``units``
    units: float  # copies of weights that exist only while their block is in use
    buffers: float
    exchange: float  # gradients of a block while they are exchanged
    update: float  # temporary memory of the optimizer update
    stays: float  # activations saved until the backward pass, in bytes per token
    once: float  # activations that exist for only one micro-batch and one block at a time, in bytes per token
    freed: float  # bytes per token of ``stays`` and ``once`` that are free again when a block exchanges its gradients


def stage_memory(model: Model, how: Arrangement, stage: int, code: TrainingCode = LEAVEN_BF16) -> Memory:
    """Return the memory of one rank. ``stage`` is its pipeline rank, from 0 to pp - 1."""
    table, layout = blueprint(model), how.layout
    rank = _states(table, layout, stage, code)
    tokens = how.micro_batch * table.seq_len / layout.cp
    flying = in_flight(layout, stage, scheduled(layout, how.grad_accumulation))
    activations, inside, logits = flying * tokens * rank.stays, tokens * rank.once, 0.0
    if stage == layout.pp - 1:
        each = code.logit if layout.tp == 1 or code.sharded_logit is None else code.sharded_logit
        logits = each * min(tokens * table.vocab_size / layout.tp, code.logits_at_once)
        # Bytes per token and channel of the final norm's input and output.
        at_end: float = code.residual + code.element
        if code.unembedding:
            # The loss keeps two gradients until the backward pass: of the unembedding and of the unembedding's input.
            # While the first is summed over chunks of tokens, a second tensor of the unembedding's size exists.
            waiting = flying if layout.schedule in {"gpipe", "zero-bubble"} else 1
            at_end = code.residual + code.element * (1 + waiting)
            unembedding = table.embedding / layout.tp
            logits += waiting * code.unembedding * unembedding
            # The gradient of a chunk, in the compute dtype. Otherwise it is gone when most of the memory is in use.
            if layout.tp > 1 or tokens * table.vocab_size > code.logits_at_once:
                logits += code.element * unembedding
            # Tensor-parallel ranks also hold the unembedding in the compute dtype, and three tensors of its input's
            # size: the input, a chunk of it (counted in full) and its gradient.
            if layout.tp > 1:
                logits += code.element * (unembedding + 3 * tokens * table.d_model)
        activations += tokens * table.d_model * at_end / (layout.tp if code.sequence_parallel else 1)
    masks = mask_bytes(table, how, stage, code)
    # The logits and the temporary memory of a block's backward pass never exist together: only the larger counts.
    in_block = max(0.0, max(inside, inside - tokens * rank.freed + rank.exchange) + rank.units - logits)
    exchange = min(rank.exchange, in_block)
    units = min(rank.units, in_block - exchange)
    gathered = rank.gathered + units
    activations += in_block - exchange - units
    reused = 0.0
    waits = flying == how.grad_accumulation and layout.schedule != "zero-bubble"
    if waits and code.autocast and not code.compute_copy:
        # All forward passes come before the first backward pass, so gradients take the memory of activations that
        # this pass frees. Counted in fp32 only, where it was measured.
        reused = min(rank.grads, activations / flying + logits)
    grads = rank.grads - reused
    activations += masks
    # The update needs memory for all gradients, and may use what the backward pass has freed.
    update = max(0.0, rank.update + reused - gathered - logits - activations)
    buffers = rank.buffers + exchange + update
    dynamic = rank.weights + grads + rank.accumulation + rank.optimizer
    dynamic += gathered + activations + logits + buffers
    return Memory(
        rank.weights,
        grads,
        rank.accumulation,
        rank.optimizer,
        gathered,
        activations,
        logits,
        buffers,
        code.fixed_gib * GIB,
        code.slack * dynamic,
    )


def mask_bytes(table: Blueprint, how: Arrangement, stage: int, code: TrainingCode) -> float:
    """Return the bytes of a rank's masks of attention scores, which its layers share. Tensor-parallel ranks keep the
    masks of all heads."""
    if not code.masks:
        return 0.0
    layout, found = how.layout, dict[int | None, float]()
    for block, _ in rank_blocks(table, layout.pp, layout.stages_per_rank, stage, code.balance):
        core, each = block.core, how.micro_batch if code.isolated else 1
        if core.softcap:  # booleans for documents only: windows need no tensor
            found[None] = each if code.isolated else 0
        elif code.isolated or core.alibi or core.window:
            found[core.window] = code.element * each * (core.heads if core.alibi else 1)
    passes = in_flight(layout, stage, scheduled(layout, how.grad_accumulation)) * layout.stages_per_rank
    return passes * sum(found.values()) * table.seq_len**2


@cache
def _states(table: Blueprint, layout: Layout, stage: int, code: TrainingCode) -> _States:
    t = layout.tp
    blocks = rank_blocks(table, layout.pp, layout.stages_per_rank, stage, code.balance)
    in_blocks, experts, ends = rank_parameters(table, layout, stage, code)
    dense = ends + in_blocks
    ranks, ranks_of_expert = sharers(layout)

    def held(bytes_each: float, sharded_from: int, parameters: float, of_experts: float) -> float:
        if layout.zero < sharded_from:
            return bytes_each * (parameters + of_experts)
        return bytes_each * (parameters / ranks + of_experts / ranks_of_expert)

    vectors = sum(count * (block.vectors + block.split_vectors / t) for block, count in blocks)
    matrices = in_blocks - vectors
    of_matrices = code.optimizer if code.optimizer_of_matrices is None else code.optimizer_of_matrices
    optimizer = held(code.optimizer, 1, dense - matrices, 0) + held(of_matrices, 1, matrices, experts)
    copy = code.compute_copy or code.weights
    unit, two_units = _units(tuple(block for block, _ in blocks), layout, code)
    # Under ZeRO 3, weights are gathered by unit: one unit is in use and the next is prefetched.
    # With several ranks, leaven uses a gathered copy of the weights, also in fp32.
    whole_copy = copy if code.autocast and layout.ranks > 1 else code.compute_copy
    units, gathered = 0.0, two_units * copy if layout.zero == 3 else whole_copy * (dense + experts)
    if code.gathered_ends and layout.ranks > 1:
        gathered += ends * (code.gathered_ends - (whole_copy if layout.zero < 3 else 0))
    if code.autocast and layout.zero == 3:
        units, gathered = two_units * copy, gathered - two_units * copy
        if stage == 0 and not table.tied:
            gathered -= code.gathered_ends * table.embedding / t
    if code.autocast and layout.ranks == 1:
        gathered = code.compute_copy * (dense - ends + experts + table.embedding)
        if layout.recompute == "full":
            units, gathered = code.compute_copy * two_units, code.compute_copy * table.embedding
    stays, once, freed = _per_token(table, layout, stage, code)
    return _States(
        weights=held(code.weights, code.shards_weights_from, dense, experts),
        grads=held(code.grads, 2, dense, experts),
        accumulation=held(code.accumulation, 2, dense, experts),
        optimizer=optimizer + held(code.average, 1, dense, experts),
        gathered=gathered,
        units=units,
        buffers=code.bucket if ranks > 1 else 0,
        exchange=code.exchange * unit if layout.zero and ranks > 1 else 0.0,
        update=held(code.update_copy, 1, dense, experts),
        stays=stays,
        once=once,
        freed=freed,
    )


def _units(blocks: tuple[BlockTable, ...], layout: Layout, code: TrainingCode) -> tuple[float, float]:
    """Count a rank's parameters in its largest FSDP unit, and in its largest pair of adjacent units."""
    t, ep = layout.tp, layout.ep
    whole = max(block.whole + (block.cut + block.experts / ep) / t for block in blocks)
    if code.units != 2:
        return whole, 2 * whole
    mlps = (
        sum(
            row.size / ((t if row.split != "none" else 1) * (ep if row.routed else 1))
            for row in block.matmuls
            if row.name.startswith("mlp.")
        )
        for block in blocks
    )
    return max(mlps), whole


def _per_token(table: Blueprint, layout: Layout, stage: int, code: TrainingCode) -> tuple[float, float, float]:
    """Return a rank's ``stays``, ``once`` and ``freed`` of :class:`_States`, in bytes per token."""
    t, last = layout.tp, stage == layout.pp - 1
    stretch = t if code.sequence_parallel else 1
    blocks = rank_blocks(table, layout.pp, layout.stages_per_rank, stage, code.balance)
    kept = [
        (block_kept(block, table.d_model, table.seq_len, t, layout.ep, recompute=layout.recompute, code=code), count)
        for block, count in blocks
    ]
    stays = sum(count * each.stays for each, count in kept)
    residual = code.residual * table.d_model / stretch
    if stage == 0 and table.embedding_norm:  # this norm saves its input
        stays += residual
    if stage == 0 and blocks[0][0].dropout:  # the mask of the dropout after the embedding
        stays += table.d_model / stretch
    if code.keeps_outputs and not last:
        stays += residual * layout.stages_per_rank
    # Context parallelism: keys, values and their gradients that are passed around the ring, the current and the next.
    pairs = max(block.core.kv_heads * (block.core.d_qk + block.core.d_v) for block, _ in blocks)
    ring = 2 * 2 * code.element * pairs / t if layout.cp > 1 else 0.0
    most, _ = max(kept, key=lambda each: each[0].once + each[0].gradients)
    # With two units in a block (leaven's trainer), the MLP's activations are free when its gradients are exchanged.
    freed = most.mlp + most.gradients if code.units == 2 else 0.0
    return stays, most.once + most.gradients + ring, freed


def worst_stage(model: Model, how: Arrangement, code: TrainingCode = LEAVEN_BF16) -> Memory:
    """Return the memory of the pipeline rank that needs the most."""
    layout = how.layout
    ranks = _ranks_of_most_memory(blueprint(model), layout.pp, layout.stages_per_rank, code.balance)
    memories = (stage_memory(model, how, rank, code) for rank in ranks)
    return max(memories, key=lambda memory: memory.total)


@cache
def _ranks_of_most_memory(table: Blueprint, pp: int, stages_per_rank: int, balance: Balance) -> tuple[int, ...]:
    """Return ranks that may need the most memory: first, last, and one for each distinct set of blocks."""
    firsts = {rank_blocks(table, pp, stages_per_rank, rank, balance): rank for rank in reversed(range(1, pp))}
    return (0, *({*firsts.values(), pp - 1} - {0}))


def activation_parts(
    model: Model, how: Arrangement, stage: int, code: TrainingCode = LEAVEN_BF16
) -> dict[str, float]:
    """Return the bytes of one rank's activations by operator. Their sum is ``stage_memory(...).activations``.

    With recomputation, the operators of blocks have one key, ``kept``. All other activations are in ``elsewhere``.
    """
    table, layout = blueprint(model), how.layout
    tokens = how.micro_batch * table.seq_len / layout.cp
    tokens *= in_flight(layout, stage, scheduled(layout, how.grad_accumulation))
    found: defaultdict[str, float] = defaultdict(float)
    for block, count in rank_blocks(table, layout.pp, layout.stages_per_rank, stage, code.balance):
        if layout.recompute == "none":
            by_operator = operators_kept(block, table.d_model, table.seq_len, layout.tp, code)
        else:
            kept = block_kept(
                block, table.d_model, table.seq_len, layout.tp, layout.ep, recompute=layout.recompute, code=code
            )
            by_operator = {"kept": kept.stays}
        for name, each in by_operator.items():
            found[name] += tokens * count * each
    if masks := mask_bytes(table, how, stage, code):
        found["attention.masks"] = masks
    everything = stage_memory(table, how, stage, code).activations
    return dict(found) | {"elsewhere": max(0.0, everything - sum(found.values()))}


@dataclass(frozen=True)
class Kept:
    """The activation memory of one block on one rank, in bytes per token."""

    stays: float  # activations saved until the backward pass of the micro-batch
    once: float  # activations that exist only while the block is recomputed
    gradients: float  # peak memory of the gradients of activations within the block
    mlp: float  # activations of the MLP, which are freed before the MLP's gradients are exchanged


@cache
def operators_kept(
    block: BlockTable, d_model: int, seq_len: int, tp: int, code: TrainingCode = LEAVEN_BF16
) -> dict[str, float]:
    """Return the bytes per token that a rank stores for the backward pass of each operator, without recomputation.

    Source: Korthikanti 2022, arXiv 2205.05198, equations 2 and 4. Experts are assumed to get equally many tokens.
    """
    if code.saved:
        return {"block": _traced(block, d_model, tp, code)[0]}
    d, e, core = d_model, code.element, block.core
    stretch = tp if code.sequence_parallel else 1
    gathered = 1 if code.gathered_inputs else stretch
    q, k, v = core.heads * core.d_qk, core.kv_heads * core.d_qk, core.kv_heads * core.d_v
    rows = {row.name: row for row in block.matmuls}
    norm = code.residual * d / stretch
    found = {"norm.attention": norm} if "attention" in block.norms else {}
    found |= {
        "attention.inputs": e * d / gathered,
        "attention.query": e * q / tp,
        "attention.key": e * k / tp,
        "attention.value": e * v / tp,
        "attention.out": e * core.heads * core.d_v / tp,
    }
    # The latents of multi-head latent attention are saved before and after their norm.
    latents = sum(row.n for name, row in rows.items() if name in {"attention.latent", "attention.query_latent"})
    if latents:
        found["attention.latents"] = e * latents * (1 / stretch + 1 / gathered)
    if block.qk_norm:
        found["norm.query_key"] = e * (q + k) / tp
    if not code.flash_attention:
        # The probabilities; with dropout also the mask and the probabilities after dropout.
        found["attention.core"] = core.heads * seq_len * ((2 * e + 1) if block.dropout else e) / tp
    if "mlp" in block.norms:
        found["norm.mlp"] = norm
    if "mlp_out" in block.norms:
        found["norm.outputs"] = 2 * norm
    gated = block.activation in {"swiglu", "geglu"}
    tensors = _GATED_AND_FUSED if gated and code.fused else _MLP_TENSORS[block.activation]
    # Parallel branches share one saved input, unless each branch saves a gathered copy.
    parallel = "attention" in block.norms and "mlp" not in block.norms and gathered == stretch
    if ("mlp.in" in rows or "mlp.shared.in" in rows) and not parallel:
        found["mlp.inputs"] = e * d / gathered
    for mlp in ("mlp", "mlp.shared"):
        if f"{mlp}.in" in rows:
            found[mlp] = e * tensors * rows[f"{mlp}.in"].n / tp
    if "mlp.experts.in" in rows:
        experts = rows["mlp.experts.in"]
        # The scores in fp32, indices and weights for each copy of a token, and the input, if it has to be cast to the
        # dtype of the router's matrix.
        cast = code.weights * d if code.autocast and code.weights > e else 0
        found["mlp.router"] = (4 * experts.stored + 30 * experts.passed + cast) / gathered
        found["mlp.experts.inputs"] = e * experts.passed * d / gathered
        found["mlp.experts"] = e * tensors * experts.passed * experts.n / tp
        found["mlp.experts.outputs"] = e * experts.passed * d / gathered  # for the gradients of the router's weights
    if block.dropout:
        found["dropout"] = 2 * d / stretch
    return found


def _traced(block: BlockTable, d_model: int, tp: int, code: TrainingCode) -> tuple[float, float]:
    """Return (bytes that a block saves, peak of its temporary bytes), both per token, from the traces of ``code``."""
    return traced(block, d_model, code.saved, tp=tp, ep=1, split_sequence=code.sequence_parallel)


@cache
def block_kept(
    block: BlockTable,
    d_model: int,
    seq_len: int,
    tp: int,
    ep: int,
    *,
    recompute: Recompute,
    code: TrainingCode = LEAVEN_BF16,
) -> Kept:
    by_operator = operators_kept(block, d_model, seq_len, tp, code)
    everything, core = sum(by_operator.values()), by_operator.get("attention.core", 0.0)
    stretch = tp if code.sequence_parallel else 1
    block_input = code.residual * d_model / stretch
    if recompute == "none":
        stays = everything
    elif recompute == "full":
        stays = block_input
    elif code.selective == "core":  # a flash kernel saves no scores, so core is 0
        stays = everything - core
    else:
        # torchtitan saves the outputs of every second matrix product, but not those of routed experts: for them, what
        # ranks have exchanged. Source: pytorch/torchtitan, distributed/activation_checkpoint.py.
        dense = [row for row in block.matmuls if not row.routed]
        every_second = sum(code.element * row.n / (tp if row.split == "column" else stretch) for row in dense[::2])
        routed = max((row.passed for row in block.matmuls if row.routed), default=0) if ep > 1 else 0
        kept = code.element * (block.core.heads * block.core.d_v / tp + 2 * routed * d_model / stretch)
        stays = block_input + kept + every_second
    # The peak is in the MLP (gradients of its tensors and of its gathered output) or, without a flash kernel, in
    # attention (gradients of scores and probabilities). At that time, the saved tensors of the MLP are already free.
    e = code.element
    mlp = sum(by_operator.get(name, 0.0) for name in ("mlp", "mlp.shared", "mlp.experts", "mlp.experts.inputs"))
    widths = sum(row.n * row.passed for row in block.matmuls if row.name.endswith((".in", ".gate")))
    gradients = e * widths / tp + e * d_model
    if code.saved:
        gradients = _traced(block, d_model, tp, code)[1]
    scores = 0.0 if code.flash_attention else 2 * e * block.core.heads * seq_len / tp
    return Kept(stays, everything - stays, max(gradients, scores - mlp), mlp)
