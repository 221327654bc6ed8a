"""Which proxy to tune before a run, what that costs, and when not to tune at all.

A proxy is a smaller model of the same family with as many tokens a parameter and as many steps as the target: batch
and tokens shrink by the same factor. The rule's columns for batch and tokens then cancel, so that nothing rests on
the duration exponent, which is the least certain one. Hyperparameters are written at the proxy, and the rule carries
them up in width and depth.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from leaven.recipe.errors import InputError
from leaven.recipe.shape import ModelShape
from leaven.recipe.units import format_quantity

SMALLEST = 50_000_000
"""Parameters of the smallest proxy with published evidence: 50 M carried a search to 7.2 B, and 58 M "costs a little"
against 483 M (arXiv 2512.22382, as its readers report)."""
SAFE = 136_000_000
"""Parameters from which on a tuned lr was also the best at 483 M (same source)."""
SMALL_FACTOR = 32
"""Target over proxy where nothing is published to copy: leaven's own searches went from 0.2 M to 6.4 M, where a
quarter of the gain was left (docs/log.md)."""
FARTHEST = 100
"""Target over proxy at most, in parameters and so in tokens (arXiv 2512.22382: 1.6 B to 155 B tokens)."""
NARROWER, SHALLOWER = 16, 32
"""Width and depth of the target over the proxy's at most (same source; planning.tested_ground)."""
THINNEST, WIDEST, LEAST_DEPTH = 16.0, 160.0, 2
"""d / L of a proxy, where the target's own lies within, and its blocks at least."""
TRIALS = (64, 48, 32, 24, 16)
SHARE = 0.10
"""Of the run, what a search may cost by default."""
WORTH = 0.24
"""Of the run, what tuning has brought at most: 1.32 times the tokens at 7.2 B (arXiv 2512.22382); 1.09 times in
leaven's own measurement (docs/log.md)."""
NEAR = 1.25
"""How far from the size that was asked for a proxy may be."""
ENOUGH_LINEAGES = 3
"""Published lineages near a size that make its published values worth taking."""


@dataclass(frozen=True)
class Proxy:
    """A model to tune in place of the target."""

    shape: ModelShape
    batch_tokens: int
    tokens: int
    trials: int
    cost: float  # of all trials, as a share of the target's training FLOPs
    evidence: str  # what is known of proxies of this size


@dataclass(frozen=True)
class Tuning:
    """Whether to tune, and why; ``proxy`` is None where the published values are the better choice."""

    proxy: Proxy | None
    reason: str


def choose_proxy(model: ModelShape, batch_tokens: int, tokens: int, lineages: int, size: int | None = None) -> Tuning:
    """The proxy of a target, or the reason for none.

    Args:
        lineages: how many published lineages are near the target's size.
        size: parameters of the proxy that the user asks for; the evidence is stated, not enforced.

    Raises:
        InputError: if there is no shape of about ``size`` parameters to transfer from.
    """
    if size is not None:
        shape = proxy_shape(model, size)
        if shape is None or not 1 / NEAR <= shape.params / size <= NEAR:
            raise InputError(f"--proxy {format_quantity(size)}: {_no_shape(model, size)}")
        proxy = _proxy(model, shape, batch_tokens, tokens)
        return Tuning(proxy, f"as asked for: {_cost(proxy)}")
    known = lineages >= ENOUGH_LINEAGES
    least = max(SMALLEST, model.params / FARTHEST) if known else model.params / SMALL_FACTOR
    most = max(SAFE, 1.5 * least)
    tried: list[Proxy] = []
    for wanted in (most * (least / most) ** (n / 8) for n in range(9)):
        shape = proxy_shape(model, wanted, least)
        if shape is None:
            continue
        proxy = _proxy(model, shape, batch_tokens, tokens)
        if proxy.trials == TRIALS[0]:
            return Tuning(proxy, _cost(proxy))
        tried.append(proxy)
    smallest = min(tried, key=lambda proxy: proxy.shape.params, default=None)
    if smallest is None or smallest.cost > WORTH:
        return Tuning(None, _not_worth(smallest, least))
    return Tuning(smallest, f"{_cost(smallest)}; {TRIALS[0]} would cost more than they bring")


def trials_worth(each: float) -> int:
    """How many trials to make; ``each`` is the cost of one as a share of the run: the most within ``SHARE``, else
    within ``WORTH``."""
    for limit in (SHARE, WORTH):
        for trials in TRIALS:
            if trials * each <= limit:
                return trials
    return TRIALS[-1]


def proxy_shape(model: ModelShape, params: float, least: float = 0.0) -> ModelShape | None:
    """The smaller shape of the family that is nearest to ``params`` and to the target's proportions, of ``least``
    parameters or more; None if there is none."""

    def off(size: int, width: int, depth: int) -> float:
        wider, deeper = model.d_model / width, model.n_layers / depth
        return abs(math.log(size / params)) + abs(math.log(wider / deeper)) / 2

    found = [one for one in _smaller(model) if one[0] >= least]
    best = min(found, key=lambda one: off(*one), default=None)
    return _scaled(model, *best[1:]) if best else None


def _smaller(model: ModelShape) -> Iterator[tuple[int, int, int]]:
    """Parameters, width and depth of the family's shapes of half the size or less, within the ratios that the rule
    was tested on. The head dimension, the query heads to a key-value head and d_ff / d_model stay."""
    unit = model.d_head * (model.n_heads // model.n_kv_heads)
    half, aspect = model.params / 2, model.d_model / model.n_layers
    thinnest, widest = min(THINNEST, aspect / 2), max(WIDEST, aspect)
    shallowest = max(-(-model.n_layers // SHALLOWER), min(LEAST_DEPTH, model.n_layers))
    for width in range(max(unit, -(-model.d_model // NARROWER // unit) * unit), model.d_model, unit):
        one, two = (_scaled(model, width, depth).params for depth in (1, 2))
        for depth in range(shallowest, model.n_layers + 1):
            size = one + (depth - 1) * (two - one)
            if size <= half and thinnest <= width / depth <= widest:
                yield size, width, depth


def _scaled(model: ModelShape, width: int, depth: int) -> ModelShape:
    """At another width and depth, with a whole d_ff near the same proportion."""
    exact = model.d_ff * width % model.d_model == 0
    d_ff = None if exact else max(round(model.d_ff * width / model.d_model / 32), 1) * 32
    return model.scaled(width, depth, d_ff=d_ff)


def _proxy(model: ModelShape, shape: ModelShape, batch_tokens: int, tokens: int) -> Proxy:
    smaller = model.params / shape.params
    sequences = max(round(batch_tokens / smaller / shape.seq_len), 1)
    length = round(tokens / smaller)
    each = shape.params * length / (model.params * tokens)
    trials = trials_worth(each)
    if shape.params >= SAFE * 0.8:
        evidence = "the best lr of 136 M was the best at 483 M"
    elif shape.params >= SMALLEST * 0.8:
        evidence = "proxies of 50 M and 58 M were used; the lr of 58 M costs a little at 483 M"
    else:
        evidence = (
            f"below the {format_quantity(SMALLEST)} of published proxies; in leaven's own runs 0.2 M kept a quarter "
            "of its gain at 6.4 M"
        )
    return Proxy(shape, sequences * shape.seq_len, length, trials, trials * each, evidence)


def _cost(proxy: Proxy) -> str:
    return f"{proxy.trials} trials cost {proxy.cost:.1%} of this run"


def _not_worth(smallest: Proxy | None, least: float) -> str:
    if smallest is None:
        return f"{format_quantity(round(least))} parameters are the smallest with evidence, half of this run or more"
    return (
        f"{smallest.trials} trials of {format_quantity(smallest.shape.params)} parameters, the smallest with "
        "evidence, cost "
        f"{smallest.cost:.0%} of this run; tuning has brought {WORTH:.0%} at most"
    )


def _no_shape(model: ModelShape, size: float) -> str:
    sizes = [params for params, *_ in _smaller(model)]
    below, above = [one for one in sizes if one < size], [one for one in sizes if one > size]
    near = [format_quantity(one) for one in (*([max(below)] if below else []), *([min(above)] if above else []))]
    if not near:
        return "this model is too small to have a proxy; leave --proxy out"
    return f"no shape of this family has that size; {' and '.join(near)} are the nearest"
