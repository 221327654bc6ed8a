"""A shape of so many parameters: width, depth and d_ff such that proportions are as asked for and everything divides.

Symbols: N parameters, d width, L layers, f width of the MLP, V vocabulary.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from leaven.recipe.shape import ModelShape

TOLERANCE = 0.03
"""How far from the parameters that were asked for a shape may be."""
VOCABULARIES = (512, 1_024, 2_048, 4_096, 8_192, 16_384, 32_768, 49_152, 65_536, 98_304, 131_072)
"""Vocabularies that divide by 128 and by every tensor-parallel degree up to 8."""
VOCABULARY_SHARE = 0.25
"""Most of the parameters that one matrix of the vocabulary may take."""
TIED_SHARE = 0.08
"""From this share of the parameters on, embedding and unembedding are one matrix."""
_DEEPEST = 200
_UNEVEN = (0.0, 0.1, 0.03, 0.1)  # by the remainder of the layers by 4


class Proportions(NamedTuple):
    """``aspect`` d / L, ``ff_ratio`` f / d; key-value heads by number, or by the query heads to each of them."""

    aspect: float
    ff_ratio: float
    d_head: int
    group: int = 1
    n_kv_heads: int | None = None
    width: int | None = None  # of one published run: considered though it may not be round

    @property
    def unit(self) -> int:
        """What a width is a multiple of."""
        return self.d_head * (self.n_kv_heads or self.group)


def usual_ff_ratio(activation: str, n_heads: int, n_kv_heads: int) -> float:
    """f / d at which a block has 12 d^2 parameters: 4, of a gated MLP 8/3 (Shazeer 2020, arXiv 2002.05202); fewer
    key-value heads give what they save to the MLP, as in Llama 2 70B (3.5) and Llama 3 405B (3.25)."""
    return (12 - 2 - 2 * n_kv_heads / n_heads) / (3 if activation == "swiglu" else 2)


def usual_width(params: int, aspect: float) -> float:
    """12 d^2 L parameters in the blocks, with L = d / aspect."""
    return math.cbrt(params * aspect / 12)


def vocabulary(params: int, width: float, usual: float) -> int:
    """The nearest to ``usual``, or the largest below it, whose matrix takes no more than `VOCABULARY_SHARE`."""
    nearest = min(VOCABULARIES, key=lambda size: abs(math.log(size / usual)))
    fitting = [size for size in VOCABULARIES if size <= nearest and size * width <= VOCABULARY_SHARE * params]
    return max(fitting, default=VOCABULARIES[0])


def shape_of(params: int, proportions: Proportions, fixed: dict[str, Any]) -> ModelShape:
    """The shape within `TOLERANCE` of ``params`` whose proportions are nearest, or the nearest in size if none is.

    ``fixed`` are the other fields of a :class:`ModelShape`. Off by 1% in size counts as by 3% in d / L and by 0.6% in
    d_ff; layers that 4, or 2, pipeline stages cannot share count as 3%, or 10%, in d / L.
    """

    def cost(shape: ModelShape, size: int) -> tuple[bool, float]:
        off = abs(size / params - 1)
        aspect = abs(math.log(shape.d_model / shape.n_layers / proportions.aspect))
        ff = abs(math.log(shape.d_ff / shape.d_model / proportions.ff_ratio))
        outside = off > TOLERANCE
        return outside, (off if outside else aspect + 5 * ff + 3 * off + _UNEVEN[shape.n_layers % 4])

    best = min(_shapes(params, proportions, fixed), key=lambda pair: cost(*pair))[0]
    return ModelShape.model_validate(best.model_dump())


def _shapes(params: int, proportions: Proportions, fixed: dict[str, Any]) -> Iterator[tuple[ModelShape, int]]:
    """Shapes of about the size, with their sizes."""
    usual = usual_width(params, proportions.aspect)
    for d in _widths(usual, proportions):
        for f in _mlp_widths(d, proportions):
            heads = d // proportions.d_head
            sides = {"d_model": d, "d_ff": f, "d_head": proportions.d_head, "n_heads": heads}
            kv_heads = proportions.n_kv_heads or heads // proportions.group
            one = ModelShape.model_validate(fixed | sides | {"n_kv_heads": kv_heads, "n_layers": 1})
            first = one.params
            layer = one.model_copy(update={"n_layers": 2}).params - first
            ends = first - layer
            exact = (params - ends) / layer
            for depth in {math.floor(exact), math.ceil(exact)}:
                n_layers = min(max(depth, 1), _DEEPEST)
                yield one.model_copy(update={"n_layers": n_layers}), ends + n_layers * layer


def _widths(usual: float, proportions: Proportions) -> list[int]:
    unit = proportions.unit
    steps = range(1, max(round(4 * usual / unit), 8) + 1)
    widths = [unit * step for step in steps if usual / 3 <= unit * step <= 3 * usual]
    return [d for d in widths if d % _round(d) == 0 or d == proportions.width] or widths or [unit]


def _round(d: int) -> int:
    """Widths are multiples of this: from 4,096 on, heads of 128 divide by 8, the most a node takes in parallel."""
    return next(
        step
        for least, step in ((4_096, 1_024), (2_048, 512), (1_024, 256), (512, 128), (256, 64), (128, 32), (0, 16))
        if d >= least
    )


def _mlp_widths(d: int, proportions: Proportions) -> list[int]:
    """Multiples of 32 to 256, whatever is fine enough, within an eighth of the ratio, nearest first."""
    wanted = proportions.ff_ratio * d
    step = 32 if d < 512 else 64 if d < 1_024 or proportions.width else 128 if d < 2_048 else 256
    nearest = max(round(wanted / step), 1) * step
    around = sorted({nearest + n * step for n in range(-6, 7)}, key=lambda f: abs(f - wanted))
    return [f for f in around if f > 0 and abs(f / wanted - 1) <= 1 / 8] or [nearest]
