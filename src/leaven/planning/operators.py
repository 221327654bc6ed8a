"""Seconds of the operators of one block on one accelerator.

A product of matrices takes whole waves of tiles at the best measured matmul, as far as its widths suit the tensor
cores; everything else reads and writes the memory at its bandwidth; nothing is shorter than a launch. Constants are
few, and each says which published rows forced it; all other tables are judged without having been looked at for it.
"""

from dataclasses import dataclass
from functools import cache
from math import ceil

from leaven.planning.blueprint import Block, Matmul
from leaven.planning.accelerators import Accelerator, Dtype
from leaven.planning.implementations import Implementation

# The share of the best measured matmul that large products sustain in training: the best is of the best shape, alone
# and on a cool device.
SUSTAINED = 0.90
# The share of the memory's bandwidth that a kernel reaches that only reads and writes.
STREAMED = 0.85
# Attention by a flash kernel, as a share of SUSTAINED, charged for the full matrix of scores: a causal kernel skips half
# and is about half as efficient on the rest.
FLASH = 0.85
# Products whose widths are no multiple of 64 elements (128 bytes), and of 8 (16 bytes: hardly any tensor cores).
UNALIGNED, MISALIGNED = 0.75, 0.15
# Seconds from one kernel to the next when the device waits for the host.
LAUNCH = 5e-6
# Extra depth that filling and emptying a tile's pipeline costs, in elements of k.
_FILL = 128
# (rows, columns, share of the best rate): smaller tiles read more for each product.
_TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.92), (64, 64, 0.6))


@dataclass(frozen=True)
class Operator:
    """Seconds of one operator for one micro-batch; ``weight`` what of ``backward`` computes gradients of weights."""

    name: str
    forward: float
    backward: float
    weight: float = 0.0


def matmul_seconds(
    m: int, n: int, k: int, accelerator: Accelerator, count: int = 1, dtype: Dtype = "bf16", element: int = 2
) -> float:
    """Seconds of ``count`` products (m, k) x (k, n) in one launch: the longer of whole waves of tiles and of reading
    and writing the matrices once."""
    best = accelerator.matmul(dtype)
    rate = (accelerator.matmul_flops if best is None else best * 1e12) * SUSTAINED
    if n % 8 or k % 8:
        rate *= MISALIGNED
    elif n % 64 or k % 64:
        rate *= UNALIGNED
    processors = accelerator.multiprocessors

    def tiled(rows: int, columns: int, share: float) -> float:
        tiles = count * ceil(m / rows) * ceil(n / columns)
        slots = ceil(tiles / processors) * processors if processors else tiles
        return slots * 2 * rows * columns * (k + _FILL) / (rate * share)

    moved = count * element * (m * k + k * n + m * n)
    return max(min(tiled(*tile) for tile in _TILES), moved / _bandwidth(accelerator), LAUNCH)


def stream_seconds(size: float, accelerator: Accelerator) -> float:
    """Seconds of a kernel that reads and writes ``size`` bytes together."""
    return max(size / _bandwidth(accelerator), LAUNCH)


def _bandwidth(accelerator: Accelerator) -> float:
    return accelerator.memory_tb_s * 1e12 * STREAMED


@cache
def block_operators(
    block: Block,
    width: int,
    tokens: int,
    seq_len: int,
    degrees: tuple[int, int, int],
    fused: bool,
    accelerator: Accelerator,
    code: Implementation,
) -> tuple[Operator, ...]:
    """What one block does for ``tokens`` tokens of a rank, of sequences of ``seq_len``; ``width`` is d_model and
    ``degrees`` are those of tensor, context and expert parallelism."""
    tp, cp, ep = degrees
    found = [_product(rows, tokens, tp, ep, accelerator, code.pace.products) for rows in _fused(block)]
    found.append(_core(block, tokens, seq_len, tp, cp, accelerator, code))
    split = tp if code.sequence_parallel else 1
    stream, hidden = code.residual * tokens * width / split, code.element * tokens * width / split
    mask = tokens * width / split if block.dropout else 0
    # per branch: the norm reads the stream and writes its product's input; the branch is added to the stream
    # (with its dropout's mask); backward each reads what it had and what comes, and writes what goes
    found.append(
        Operator(
            "norms and residuals",
            2
            * (
                stream_seconds(stream + hidden, accelerator) + stream_seconds(2 * stream + hidden + mask, accelerator)
            ),
            2
            * (
                stream_seconds(2 * stream + hidden, accelerator)
                + stream_seconds(2 * stream + hidden + mask, accelerator)
            ),
        )
    )
    wide = sum(row.passed * row.on_rank(tp)[1] for row in block.matmuls if _enters(row)) * code.element * tokens
    out = sum(row.passed * row.on_rank(tp)[0] for row in block.matmuls if _leaves(row)) * code.element * tokens
    # of a gated MLP, the activation of the gate and the product; one kernel where they are fused, else two
    twice = 0 if fused or wide == out else 2 * out
    found.append(
        Operator(
            "activation",
            stream_seconds(wide + out + twice, accelerator),
            stream_seconds(2 * wide + out + 1.5 * twice, accelerator),
        )
    )
    if not block.dropout:  # rotary positions: queries and keys, read and written; not fused, turned, scaled and added
        turned = 2 * tokens * code.element * (block.core.heads + block.core.kv_heads) * block.core.d_qk / tp
        turned *= 1 if fused else 4
        found.append(Operator("positions", stream_seconds(turned, accelerator), stream_seconds(turned, accelerator)))
    return tuple(found)


def _enters(row: Matmul) -> bool:
    return row.name.endswith((".in", ".gate"))


def _leaves(row: Matmul) -> bool:
    return row.name.endswith(".out") and not row.name.startswith("attention")


def _fused(block: Block) -> list[tuple[Matmul, ...]]:
    """Products with the same input are one: queries, keys and values; gate and in."""
    groups: dict[tuple[object, ...], tuple[Matmul, ...]] = {}
    for row in block.matmuls:
        key = (row.name.split(".", maxsplit=1)[0], row.k, row.split, row.stored, row.split == "row")
        groups[key] = (*groups.get(key, ()), row)
    return list(groups.values())


def _product(
    rows: tuple[Matmul, ...], tokens: int, tp: int, ep: int, accelerator: Accelerator, dtype: Dtype
) -> Operator:
    first = rows[0]
    k, n = first.on_rank(tp)[0], sum(row.on_rank(tp)[1] for row in rows)
    count = max(1, first.stored // ep) if first.routed else 1
    m = ceil(tokens * first.passed / count)
    forward = matmul_seconds(m, n, k, accelerator, count, dtype)
    inputs = matmul_seconds(m, k, n, accelerator, count, dtype)
    weight = matmul_seconds(n, k, m, accelerator, count, dtype)
    return Operator(" + ".join(row.name for row in rows), forward, inputs + weight, weight)


def _core(
    block: Block, tokens: int, seq_len: int, tp: int, cp: int, accelerator: Accelerator, code: Implementation
) -> Operator:
    """Scores, softmax and the weighted sum. A flash kernel computes the scores again in its backward pass, five products
    for two; without it every score is written and read: product, softmax, dropout, product."""
    core = block.core
    keys, heads = int(core.keys(seq_len)), max(1, core.heads // tp)
    sequences = max(1, tokens * cp // seq_len)
    rows = max(1, tokens // sequences)
    if code.flash_attention:
        once = tokens * core.flops(seq_len) / tp / (accelerator.matmul_flops * SUSTAINED * FLASH)
        return Operator("attention", max(once, LAUNCH), max(2.5 * once, LAUNCH))
    batch = sequences * heads
    scores, values = (
        matmul_seconds(rows, keys, core.d_qk, accelerator, batch),
        matmul_seconds(rows, core.d_v, keys, accelerator, batch),
    )
    element, each = code.element, batch * rows * keys
    softmax = stream_seconds(2 * element * each, accelerator)
    dropped = stream_seconds((2 * element + 1) * each, accelerator) if block.dropout else 0.0
    backward = 2 * (scores + values) + stream_seconds(3 * element * each, accelerator) + dropped
    return Operator("attention", scores + values + softmax + dropped, backward)
