"""Compute the time of the operators of one block on one accelerator.

A matrix product is computed in tiles, at a fraction of the fastest matmul rate. Flash attention runs at a fraction of
the rate of matrix products. The memory bandwidth limits all other operators. Sources of the constants:
docs/evidence/planner-accuracy.md.
"""

from dataclasses import dataclass
from functools import cache
from math import ceil

from leaven.planning.accelerators import Accelerator, Dtype
from leaven.planning.blueprint import BlockTable, Matmul
from leaven.planning.collectives import reached
from leaven.planning.traced import Factors, traced
from leaven.planning.training_codes import TrainingCode

STREAMED = 0.85  # share of the memory bandwidth that a kernel reaches if it only reads and writes
# Speed of flash attention / sustained matmul rate for accelerators without measured rates (``sustained``). All scores
# are counted: a causal kernel skips half of them, and is about half as efficient on the rest.
FLASH = 0.85
# Share of the rate if n or k is not a multiple of 64 elements (128 bytes). Source: bigscience,
# train/tr11-176B-ml/chronicles-prequel.md, line 582 (h 14,400 at tp 8).
UNALIGNED = 0.75
# Share of the rate if n or k is not a multiple of 8 elements (16 bytes): in the same file, products of scores on an
# A100, line 833 (heads of width 108) against line 831 (width 216). Wide products are assumed to be as slow.
MISALIGNED = 0.15
LAUNCH = 5e-6  # minimum seconds of a kernel
_FILL = 128  # filling and draining a tile's pipeline takes as long as this many elements of k
# (rows, columns, share of the rate): smaller tiles are slower, because they read more data per product.
_TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.92), (64, 64, 0.6))


@dataclass(frozen=True)
class Operator:
    """The time of one operator for one micro-batch, in seconds."""

    name: str
    forward: float
    backward: float
    weight: float = 0.0  # part of ``backward`` that computes the gradients of weights

    def times(self, factor: float) -> "Operator":
        return Operator(self.name, factor * self.forward, factor * self.backward, factor * self.weight)


@dataclass(frozen=True)
class Work:
    """The part of a micro-batch that one rank computes."""

    tokens: int  # tokens of the micro-batch on this rank
    seq_len: int
    width: int  # d_model
    tp: int = 1
    cp: int = 1
    ep: int = 1
    fused: bool = False  # whether elementwise operators are fused


def expert_ranks(work: Work, code: TrainingCode) -> tuple[int, int]:
    """Return (number of ranks that share the experts, distance from one to the next)."""
    return (work.ep * work.tp, 1) if code.whole_experts else (work.ep, work.tp)


def matmul_seconds(
    mnk: tuple[int, int, int],
    accelerator: Accelerator,
    *,
    count: int = 1,
    dtype: Dtype = "bf16",
    over_tokens: bool = False,
) -> float:
    """Return the seconds of ``count`` products (m, k) x (k, n) in one launch; ``mnk`` is (m, n, k).

    Each multiprocessor computes one tile of the result at a time, so the last round takes as long as a full one.
    Products are slower if n or k is not a multiple of 64. With ``over_tokens``, k is a number of tokens, and only n
    must be a multiple.
    """
    m, n, k = mnk
    own = None if dtype == "bf16" else accelerator.matmul(dtype)
    rate = accelerator.sustained_share * (accelerator.matmul_flops if own is None else own * 1e12)
    aligned = 64 if over_tokens else k
    if n % 8 or aligned % 8:
        rate *= MISALIGNED
    elif n % 64 or aligned % 64:
        rate *= UNALIGNED
    wave = accelerator.multiprocessors or 1

    def tiled(rows: int, columns: int, share: float) -> float:
        tiles = count * ceil(m / rows) * ceil(n / columns)
        return ceil(tiles / wave) * wave * 2 * rows * columns * (k + _FILL) / (rate * share)

    moved = 2 * count * (m * k + k * n + m * n)
    return max(min(tiled(*tile) for tile in _TILES), stream_seconds(moved, accelerator))


def flash_flops(accelerator: Accelerator) -> tuple[float, float]:
    """Return the FLOP/s of a flash attention kernel, forward and backward, with masked scores counted as work."""
    rate, measured = accelerator.matmul_flops * accelerator.sustained_share, accelerator.sustained
    if measured is None:
        return FLASH * rate, FLASH * rate
    return rate * measured.attention / measured.matmul, rate * measured.attention_backward / measured.matmul


def stream_seconds(size: float, accelerator: Accelerator) -> float:
    """Return the seconds of a kernel that reads and writes ``size`` bytes in total."""
    return max(size / (accelerator.memory_tb_s * 1e12 * STREAMED), LAUNCH)


@cache
def block_operators(
    block: BlockTable, work: Work, accelerator: Accelerator, code: TrainingCode
) -> tuple[Operator, ...]:
    """Return the operators of one block, with their times on one rank."""
    found = [_product(rows, work, accelerator, code) for rows in _together(block)]
    found.append(_attention(block, work, accelerator, code))
    eager = _eager(block, work, code) if accelerator.name != "cpu" else ()
    if eager:
        both = traced(block, work.width, eager, tp=work.tp, ep=work.ep, split_sequence=code.sequence_parallel)
        forward, backward = (work.tokens * each / (accelerator.memory_tb_s * 1e12 * code.eager) for each in both)
        found.append(Operator("between products", forward, backward))
        return tuple(operator.times(code.slower) for operator in found)
    found += [_norms(block, work, accelerator, code), _activation(block, work, accelerator, code)]
    found += _sorting(block, work, accelerator, code)
    # Rotary positions: queries and keys are read and written once if fused, otherwise four times. Also counted for
    # blocks with other positions, except those with dropout: with an exact condition, errors on MPT (ALiBi) are
    # larger.
    if not block.dropout:
        heads = (block.core.heads + block.core.kv_heads) / work.tp
        moved = 2 * code.element * work.tokens * heads * block.core.d_qk * (1 if work.fused else 4)
        seconds = stream_seconds(moved, accelerator)
        found.append(Operator("positions", seconds, seconds))
    return tuple(operator.times(code.slower) for operator in found)


def _together(block: BlockTable) -> list[tuple[Matmul, ...]]:
    """Return the matrix products of a block, grouped by their input: query, key and value are one group."""
    groups: dict[tuple[object, ...], tuple[Matmul, ...]] = {}
    for row in block.matmuls:
        key = (row.name.partition(".")[0], row.k, row.split, row.stored)
        groups[key] = (*groups.get(key, ()), row)
    return list(groups.values())


def _product(rows: tuple[Matmul, ...], work: Work, accelerator: Accelerator, code: TrainingCode) -> Operator:
    """Return one operator for matrix products that have the same input."""
    first, dtype = rows[0], code.products
    whole = first.routed and code.whole_experts
    tp, ranks = (1, work.ep * work.tp) if whole else (work.tp, work.ep)
    k, n = first.on_rank(tp)[0], sum(row.on_rank(tp)[1] for row in rows)
    count = max(1, first.stored // ranks) if first.routed else 1
    m = ceil(work.tokens * first.passed * tp / (work.tp * count))
    at_once = min(code.experts_at_once or count, count)  # products that run at the same time
    turns = count / at_once
    forward, inputs = (
        turns * matmul_seconds(sizes, accelerator, count=at_once, dtype=dtype) for sizes in ((m, n, k), (m, k, n))
    )
    weight = turns * matmul_seconds((n, k, m), accelerator, count=at_once, dtype=dtype, over_tokens=True)
    slower = 1.0
    if first.routed and code.torch_grouped and accelerator.sustained and accelerator.sustained.grouped:
        slower = accelerator.sustained.matmul / accelerator.sustained.grouped
    return Operator(" + ".join(row.name for row in rows), forward, inputs + weight, weight).times(slower)


def _eager(block: BlockTable, work: Work, code: TrainingCode) -> Factors:
    """Return the entries of ``code.moved`` (bytes read and written) for kernels that are not compiled."""
    routed = any(row.routed for row in block.matmuls)
    if not work.fused or (routed and code.breaks_graphs):
        return code.moved
    if not routed and work.tp == 1:
        return ()
    # Only attention is compiled in a block with experts, and attention and the MLP if tensor ranks split a block
    # (distributed/sharded_model.py).
    compiled = {"queries", "keys", "normed"} | (set() if routed else {"hidden", "plain_hidden"})
    return tuple(each for each in code.moved if each[0] not in compiled)


def _attention(block: BlockTable, work: Work, accelerator: Accelerator, code: TrainingCode) -> Operator:
    """Return scores, softmax and weighted sum as one operator. Without a flash kernel, all scores are stored."""
    core = block.core
    if code.flash_attention:  # two products forward and five backward, where scores are recomputed
        forward, backward = flash_flops(accelerator)
        once = work.tokens * core.flops(work.seq_len) / work.tp
        return Operator("attention", max(once / forward, LAUNCH), max(2.5 * once / backward, LAUNCH))
    sequences, keys = max(1, work.tokens * work.cp // work.seq_len), work.seq_len
    rows, count = work.tokens // sequences, sequences * max(1, core.heads // work.tp)
    scores = matmul_seconds((rows, keys, core.d_qk), accelerator, count=count)
    values = matmul_seconds((rows, core.d_v, keys), accelerator, count=count)
    each = code.element * count * rows * keys
    dropped = stream_seconds(each * (2 + 1 / code.element), accelerator) if block.dropout else 0.0
    forward = scores + values + stream_seconds(2 * each, accelerator) + dropped
    return Operator("attention", forward, 2 * (scores + values) + stream_seconds(3 * each, accelerator) + dropped)


def _norms(block: BlockTable, work: Work, accelerator: Accelerator, code: TrainingCode) -> Operator:
    size = work.tokens * work.width / (work.tp if code.sequence_parallel else 1)
    stream, hidden, mask = code.residual * size, code.element * size, size if block.dropout else 0.0
    added = stream_seconds(2 * stream + hidden + mask, accelerator)
    forward = backward = 2 * added
    for name in block.norms:
        read = hidden if name.endswith("_out") else stream  # "_out": on the output of a branch
        forward += stream_seconds(read + hidden, accelerator)
        backward += stream_seconds(2 * read + hidden, accelerator)
    if block.qk_norm:
        heads = code.element * work.tokens * (block.core.heads + block.core.kv_heads) * block.core.d_qk / work.tp
        forward += stream_seconds(2 * heads, accelerator)
        backward += stream_seconds(3 * heads, accelerator)
    return Operator("norms and residuals", forward, backward)


def _activation(block: BlockTable, work: Work, accelerator: Accelerator, code: TrainingCode) -> Operator:
    """Return the MLP's activation function as one operator. Without fusion, a gated MLP runs two kernels."""
    entering = sum(
        row.passed * row.on_rank(work.tp)[1] for row in block.matmuls if row.name.endswith((".in", ".gate"))
    )
    ends = (row for row in block.matmuls if row.name.endswith(".out") and not row.name.startswith("attention"))
    leaving = sum(row.passed * row.on_rank(work.tp)[0] for row in ends)
    twice = 0 if work.fused or entering == leaving else 2 * leaving
    each = code.element * work.tokens
    return Operator(
        "activation",
        stream_seconds(each * (entering + leaving + twice), accelerator),
        stream_seconds(each * (2 * entering + leaving + 1.5 * twice), accelerator),
    )


def _sorting(block: BlockTable, work: Work, accelerator: Accelerator, code: TrainingCode) -> list[Operator]:
    """Return one operator that sorts tokens by expert and restores their order, or [] in a block without experts.

    If a rank sends one copy of a token to each expert, the receiving rank sorts the copies again. If it sends one
    copy to each rank, the receiving rank copies the token for each of its experts.
    """
    experts = max(((row.stored, row.passed) for row in block.matmuls if row.routed), default=None)
    if not experts:
        return []
    copies, (ranks, _) = experts[1], expert_ranks(work, code)
    once = code.sends == "node" and ranks > 1
    tokens = reached(ranks, experts, code.consecutive) if once else 1  # tokens that are copied, for each own token
    rows = work.tokens / (work.tp if code.sequence_parallel else 1)
    each = code.element * rows * work.width
    slower = STREAMED / code.permuted if code.permuted else 1.0
    seconds = stream_seconds(2 * (tokens + copies) * each * slower, accelerator)
    if ranks > 1 and not once:
        seconds += stream_seconds(4 * copies * each, accelerator)
    return [Operator("sorting", seconds, seconds)]
