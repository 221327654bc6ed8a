"""Memory of one rank, by part, in bytes: that of the rank of a pipeline that needs most.

First principles: what the optimiser needs for every parameter, what the backward pass needs of every operator,
the logits, and a fixed amount that no formula gives. Measured activations of compiled and uncompiled code differ
from the count by up to 1.4x (SwiGLU, Ultra-Scale Playbook: 22 h + 12 d_ff against 16 h + 8 d_ff), and buckets of the
gradient reduction are not counted: that is the thin part. A fused or chunked cross-entropy needs far less than
``logit`` says: 24 of 61 published MPT rows that fit in 80 GB are counted above it. leaven's own steps are held
against the count by benchmarks/memory.py.
"""

import math
from dataclasses import dataclass, replace
from functools import cache

from leaven.planning.arrangement import Arrangement, scheduled
from leaven.recipe.layout import Layout
from leaven.recipe.shape import Activation, ModelShape, Role

GIB = 2**30
# Copies of d_ff that the backward pass needs: before and after the activation; a gated MLP also gate and product.
_MLP_TENSORS: dict[Activation, int] = {"gelu": 2, "relu": 1, "squared_relu": 2, "swiglu": 4}


@dataclass(frozen=True)
class Implementation:
    """What memory depends on besides shape and layout: the training code.

    ``weights``, ``grads``, ``optimizer``: bytes a parameter. ``compute_copy``: bytes a parameter of the copy that
    the matmuls read, where the weights are kept in fp32; ``gathered_ends`` of what is in no block, if every one of
    several ranks has that whole. ``update_copy``: bytes a parameter in an update, when the activations are gone.
    ``element``: bytes of an activation; ``residual``: of one of the residual stream. ``gathered_inputs``: with
    sequence parallelism, the inputs of column-parallel products are kept whole. ``logit``: bytes a logit at the peak
    of an unfused cross-entropy: bf16 and fp32 logits, their log-softmax, and a gradient; ``logits_at_once``: how many
    there are at most; ``unembedding``: bytes a parameter of its gradient, which the loss keeps to the backward pass.
    ``even_stages``: a pipeline's blocks in equal numbers, whatever the ends weigh. ``fixed_gib``: context, NCCL,
    kernels. ``slack``: share of everything else lost to fragmentation.
    """

    weights: int = 4
    grads: int = 4
    optimizer: int = 8
    compute_copy: int = 2
    gathered_ends: int = 0
    update_copy: int = 0
    element: int = 2
    residual: int = 2
    logit: int = 14
    logits_at_once: float = math.inf
    unembedding: int = 0
    flash_attention: bool = True
    sequence_parallel: bool = False
    gathered_inputs: bool = False
    even_stages: bool = False
    fixed_gib: float = 2.0
    slack: float = 0.05


# leaven's own trainer: fp32 weights, AdamW states and residual stream, matmuls in bf16, the ends gathered in fp32,
# some logits at a time (model/loss.py: bf16, and fp32 log-softmaxes that become the gradient) with the unembedding's
# gradient of a micro-batch, and the parameters before an update beside those after it.
LEAVEN_BF16 = Implementation(
    gathered_ends=4,
    update_copy=4,
    residual=4,
    logit=6,
    logits_at_once=2**27,
    unembedding=4,
    sequence_parallel=True,
    gathered_inputs=True,
)


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank by part. ``total`` is their sum."""

    weights: float
    grads: float
    optimizer: float
    activations: float
    logits: float
    other: float

    @property
    def total(self) -> float:
        return self.weights + self.grads + self.optimizer + self.activations + self.logits + self.other

    @property
    def parts_gib(self) -> dict[str, float]:
        return {name: value / GIB for name, value in vars(self).items()}


@dataclass(frozen=True)
class ParameterCounts:
    """Parameters by how tensor parallelism cuts them: matrices are divided, vectors are on every rank."""

    layer_matrices: int
    layer_vectors: int
    embedding: int
    embedding_vectors: int
    positions: int
    final_vectors: int
    unembedding: int
    tied: bool


@cache
def parameter_counts(shape: ModelShape) -> ParameterCounts:
    """The parameters of one block and of the two ends, summed over ``shape.parameters()``."""
    block = [p for p in shape.parameters() if p.layer == 0]
    ends = {p.name.removesuffix(".weight"): p.size for p in shape.parameters() if p.layer is None}
    matrices = sum(p.size for p in block if p.role is Role.HIDDEN_WEIGHT)
    return ParameterCounts(
        layer_matrices=matrices,
        layer_vectors=sum(p.size for p in block) - matrices,
        embedding=ends["embedding"],
        embedding_vectors=sum(size for name, size in ends.items() if name.startswith("norm.embedding")),
        positions=ends.get("positions", 0),
        final_vectors=sum(size for name, size in ends.items() if name.startswith("norm.final")),
        unembedding=ends.get("unembedding", ends["embedding"]),
        tied=shape.tied_embeddings,
    )


@cache
def stage_layers(shape: ModelShape, stages: int, even: bool = False) -> tuple[int, ...]:
    """Blocks of each pipeline stage, so that the most loaded has the least, one block at least.

    The embedding weighs on the first stage and the unembedding on the last, each as many blocks as it has parameters
    of one: a block's memory and, of the unembedding, its FLOPs too go by its matrices. ``even`` stages differ by one
    block at most, what does not divide in the middle: how BLOOM and others were laid out.
    """
    if stages == 1:
        return (shape.n_layers,)
    if even:
        base, more = divmod(shape.n_layers, stages)
        longer = {*[*range(1, stages - 1), 0, stages - 1][:more]}
        return tuple(base + (stage in longer) for stage in range(stages))
    count, middle = parameter_counts(shape), stages - 2
    ends = count.embedding / count.layer_matrices, count.unembedding / count.layer_matrices

    def load(layers: tuple[int, ...]) -> tuple[float, float]:
        loads = [layers[0] + ends[0], *layers[1:-1], layers[-1] + ends[1]]
        return max(loads), sum(stage**2 for stage in loads)

    def split(first: int, last: int) -> tuple[int, ...] | None:
        rest = shape.n_layers - first - last
        if rest < middle or (not middle and rest):
            return None
        base, more = divmod(rest, middle) if middle else (0, 0)
        return (first, *(base + (stage < more) for stage in range(middle)), last)

    sizes = range(1, -(-shape.n_layers // stages) + 2)
    splits = [found for first in sizes for last in sizes if (found := split(first, last)) is not None]
    return min(splits, key=load)


def rank_layers(shape: ModelShape, layout: Layout, rank: int, code: Implementation = LEAVEN_BF16) -> int:
    """Blocks on a rank of the pipeline, of all its stages: r, r + pp, ..."""
    return sum(stage_layers(shape, layout.pp * layout.stages_per_rank, code.even_stages)[rank :: layout.pp])


def stage_parameters(shape: ModelShape, layout: Layout, stage: int, code: Implementation = LEAVEN_BF16) -> float:
    """Parameters on one tensor-parallel rank of a rank of the pipeline. Tied embeddings are on both ends."""
    count, t = parameter_counts(shape), layout.tp
    blocks = rank_layers(shape, layout, stage, code) * (count.layer_matrices / t + count.layer_vectors)
    return blocks + _end_parameters(shape, layout, stage)


def _end_parameters(shape: ModelShape, layout: Layout, stage: int) -> float:
    count, t = parameter_counts(shape), layout.tp
    parameters, first, last = 0.0, stage == 0, stage == layout.pp - 1
    if first:
        parameters += count.embedding / t + count.embedding_vectors + count.positions
    if last:
        parameters += count.final_vectors + (0 if count.tied and first else count.unembedding / t)
    return parameters


def layer_activation_bytes(shape: ModelShape, sequences: int, tp: int, code: Implementation = LEAVEN_BF16) -> float:
    """What one block keeps for its backward pass, in bytes, for ``sequences`` sequences on one rank.

    For a GPT with d_ff = 4h in bf16 this is s b h (10 + 24/t + 5 a s/(h t)), Korthikanti 2022, arXiv 2205.05198,
    equation 2; dropout masks are 2h of the 10, and not there without dropout.
    """
    tokens, d, e = sequences * shape.seq_len, shape.d_model, code.element
    d_q, d_kv = shape.n_heads * shape.d_head, shape.n_kv_heads * shape.d_head
    norms, products = 2 * code.residual * d + (2 * d if shape.dropout else 0), 2 * e * d  # the inputs of two of each
    split = 2 * e * (d_q + d_kv) + e * _MLP_TENSORS[shape.activation] * shape.d_ff
    if shape.qk_norm:
        split += e * (d_q + d_kv)
    if not code.flash_attention:
        scores = shape.n_heads * shape.seq_len
        split += scores * (2 * e + 1 if shape.dropout else e)
    stretch = tp if code.sequence_parallel else 1
    return tokens * (norms / stretch + products / (1 if code.gathered_inputs else stretch) + split / tp)


def in_flight(layout: Layout, rank: int, micro_batches: int) -> float:
    """Micro-batches of which a rank of the pipeline keeps what it needs, of all its stages, at the most.

    All under GPipe, p - r under 1F1B; of v stages 2 (p - r - 1) + (v - 1) p + 1 of the v m passes (Narayanan et al.
    2021, arXiv 2104.04473, 2.2); p under zero-bubble, which puts the weights' half of a backward pass off. So torch's
    schedules have it.
    """
    p, v = layout.pp, layout.stages_per_rank
    if layout.schedule == "gpipe":
        return micro_batches
    if layout.schedule == "zero-bubble":
        return min(micro_batches, p)
    if v == 1:
        return min(micro_batches, p - rank)
    return min(v * micro_batches, 2 * (p - rank - 1) + (v - 1) * p + 1) / v


def stage_memory(shape: ModelShape, how: Arrangement, stage: int, code: Implementation = LEAVEN_BF16) -> Memory:
    """Memory of one rank in one place of the pipeline.

    States: ZeRO paper, arXiv 1910.02054. Full recomputation keeps every block's input and the working set of one.
    """
    layout, sharers = how.layout, how.layout.dp // how.layout.dp_replicate
    parameters, ends = stage_parameters(shape, layout, stage, code), _end_parameters(shape, layout, stage)
    weights, grads, optimizer = (
        parameters * size / (sharers if layout.zero >= sharded_from else 1)
        for size, sharded_from in ((code.weights, 3), (code.grads, 2), (code.optimizer, 1))
    )
    if layout.zero == 3:  # the gathered unit in use and the one fetched ahead
        count = parameter_counts(shape)
        unit = count.layer_matrices / layout.tp + count.layer_vectors
        copy = 2 * unit * (code.compute_copy or code.weights)
    else:
        copy = parameters * code.compute_copy
    if code.gathered_ends and layout.ranks > 1:
        copy += ends * (code.gathered_ends - (code.compute_copy if layout.zero < 3 else 0))
    kept, working_set = _kept_and_working_set(shape, how, code)
    flying = in_flight(layout, stage, scheduled(layout, how.grad_accumulation))
    activations = flying * rank_layers(shape, layout, stage, code) * kept + working_set
    tokens = how.micro_batch * shape.seq_len
    if shape.embedding_norm and stage == 0:  # its input
        activations += flying * code.residual * tokens * shape.d_model
    logits = 0.0
    if stage == layout.pp - 1:
        logits = code.logit * min(tokens * shape.vocab_size / layout.tp, code.logits_at_once)
        if code.unembedding:
            # The loss has computed what its backward pass will give, and keeps it until then: of the unembedding, and
            # of its input; and beside them the product that is added to the first.
            waiting = flying if layout.schedule in {"gpipe", "zero-bubble"} else 1
            unembedding = parameter_counts(shape).unembedding / layout.tp
            logits += waiting * (code.unembedding * unembedding + code.element * tokens * shape.d_model / layout.tp)
            logits += code.element * unembedding
    update = code.update_copy * parameters / (sharers if layout.zero else 1)
    update = max(0.0, update - copy - logits - activations)  # when it is made, these are gone
    weights += copy
    dynamic = weights + grads + optimizer + activations + logits + update
    other = code.fixed_gib * GIB + code.slack * dynamic + update
    return Memory(weights, grads, optimizer, activations, logits, other)


def worst_stage(shape: ModelShape, how: Arrangement, code: Implementation = LEAVEN_BF16) -> Memory:
    """Memory of the rank that needs most: the first stage, the second (it may have more blocks), or the last."""
    pp = how.layout.pp
    memories = (stage_memory(shape, how, stage, code) for stage in {0, min(1, pp - 1), pp - 1})
    return max(memories, key=lambda memory: memory.total)


def _kept_and_working_set(shape: ModelShape, how: Arrangement, code: Implementation) -> tuple[float, float]:
    """Bytes that every block in flight keeps, and bytes that exist once while one block is computed again."""
    tp = how.layout.tp
    layer = layer_activation_bytes(shape, how.micro_batch, tp, code)
    if how.layout.recompute == "none":
        return layer, 0.0
    if how.layout.recompute == "full":
        block_input = code.residual * how.micro_batch * shape.seq_len * shape.d_model
        return block_input / (tp if code.sequence_parallel else 1), layer
    # selective: the attention core again. A flash kernel does that anyway, then there is nothing left to save.
    without_scores = layer_activation_bytes(shape, how.micro_batch, tp, replace(code, flash_attention=True))
    return without_scores, layer - without_scores
