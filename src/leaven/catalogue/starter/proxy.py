"""Choose the proxy to tune before a run, estimate what tuning costs, and decide whether to tune at all.

A proxy is a smaller model with the target's proportions, experts, tokens per parameter and number of steps. So if
the target is r times larger, its batch and its tokens are r times larger, too. With the default ``token_exponent``
of 1/2, the scaling rule multiplies the lr by r^1/2 for the batch and by r^-1/2 for the tokens: the factors cancel.
Sizes count the parameters that a token uses.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

from leaven.catalogue.messages import sentence
from leaven.documents.planning import ProxyRow
from leaven.errors import InputError
from leaven.recipe.shape import ModelShape
from leaven.recipe.units import format_quantity

SMALLEST = 50_000_000
"""Parameters of the smallest proxy with published evidence: values tuned at 50 M were used at 7.2 B, and the best lr
at 58 M "costs a little" if used at 483 M (arXiv 2512.22382, read in notes about the paper)."""
SAFE = 136_000_000
"""Parameters of a proxy that is large enough: a model of this size had the same best lr as one with 483 M
(arXiv 2512.22382, read in notes about the paper)."""
SMALL_FACTOR = 32
"""Largest ratio of target to proxy, in parameters, if fewer than `ENOUGH_LINEAGES` lineages (groups of published
runs) are near the target's size. In leaven's own measurement, tuning each module's values at 0.2 M parameters gained
0.120 nats at 0.2 M and 0.032 nats at 6.4 M (docs/log.md)."""
FARTHEST_PROXY = 100
"""Largest ratio of target to proxy, both in parameters and in tokens. In arXiv 2512.22382, the proxy has 1.6 B tokens
and the target 155 B."""
NARROWER, SHALLOWER = 16, 32
"""Largest ratios of target to proxy in width and in depth (arXiv 2512.22382, see scaling/tested_ranges.toml)."""
THINNEST, WIDEST = 16.0, 125.0
"""Range of d_model / n_layers of a proxy; it is widened if the target lies outside."""
LEAST_WIDTH, LEAST_DEPTH = 32, 2
"""Smallest width and number of blocks of a proxy; leaven's own runs were not narrower."""
TRIALS = (64, 48, 32, 24, 16)  # possible numbers of trials of a search
LEAST_SEQUENCES = 4
"""The batch of an advised proxy has at least this many sequences. Rounding a smaller batch to whole sequences would
change the number of steps too much."""
SHARE = 0.10
"""A search should cost at most this share of the target run."""
WORTH = 0.24
"""Largest known gain from tuning, as a share of the training tokens: at 7.2 B parameters, tuning lowered the loss as
much as training on 1.32 times the tokens, which saves 1 - 1 / 1.32 = 0.24 (arXiv 2512.22382). In leaven's own
measurement the factor was 1.09 (docs/log.md)."""
NEAR = 1.25
"""Largest factor between the size of a proxy that the user requests and the nearest possible size."""
ENOUGH_LINEAGES = 3
"""If published runs of at least this many lineages are near the target's size, their values are trusted, and a proxy
smaller than `SMALLEST` is not worth tuning."""


_Size = tuple[int, int, int]  # parameters, width and depth


class Proxy(ProxyRow):
    """A smaller model to tune instead of the target."""

    shape: ModelShape


@dataclass(frozen=True)
class TuningAdvice:
    proxy: Proxy | None  # None: do not tune
    reason: str


def choose_proxy(
    model: ModelShape, batch_tokens: int, tokens: int, lineages: int, size: int | None = None
) -> TuningAdvice:
    """Return the proxy to tune for a target, or the reason not to tune.

    If ``size`` is None, nine sizes are tried. The proxy is:

    - the largest one whose 64 trials together cost at most 10% of the target run (`SHARE`);
    - otherwise the smallest one, with fewer trials, if these cost at most 24% of the target run (`WORTH`);
    - otherwise none.

    Args:
        model, batch_tokens, tokens: shape, batch and run length of the target.
        lineages: number of lineages (groups of published runs) near the target's size.
        size: wanted number of parameters of the proxy, all experts included. Raise InputError if no possible proxy
            has about this size.
    """
    if size is not None:
        shapes = list(_smaller(model, attrgetter("params")))
        shape = _nearest(model, shapes, size) if shapes else None
        if shape is None or not 1 / NEAR <= shape.params / size <= NEAR:
            raise InputError(f"--proxy {format_quantity(size)}: {_no_shape(shapes, size)}")
        proxy = _proxy(model, shape, batch_tokens, tokens)
        return _advice(proxy, "requested", expensive=proxy.cost > WORTH)
    known, params = lineages >= ENOUGH_LINEAGES, model.params_active
    least = max(SMALLEST, params / FARTHEST_PROXY) if known else params / SMALL_FACTOR
    most = max(SAFE, 1.5 * least)
    shapes = [shape for shape in _smaller(model, attrgetter("params_active")) if shape[0] >= least]
    if not shapes:
        return _advice(None, "no shape", least=round(least), experts=model.experts)
    proxies = []
    for wanted in (most * (least / most) ** (n / 8) for n in range(9)):
        proxy = _proxy(model, _nearest(model, shapes, wanted), batch_tokens, tokens)
        if proxy.batch_tokens < LEAST_SEQUENCES * model.seq_len:
            continue
        if proxy.trials == TRIALS[0]:
            return _advice(proxy, "affordable")
        proxies.append(proxy)
    if not proxies:
        return _advice(None, "few sequences", sequences=batch_tokens // model.seq_len)
    smallest = min(proxies, key=lambda proxy: proxy.shape.params_active)
    if smallest.cost > WORTH:
        return replace(_advice(smallest, "too expensive", worth=WORTH, known=known), proxy=None)
    return _advice(
        smallest, "fewer trials", most=TRIALS[0], all=smallest.cost / smallest.trials * TRIALS[0], share=SHARE
    )


def _advice(proxy: Proxy | None, message: str, **facts: Any) -> TuningAdvice:
    if proxy:
        facts |= {"trials": proxy.trials, "proxy": proxy, "cost": proxy.cost}
        facts["spent"] = sentence("tuning", "cost", facts)
    return TuningAdvice(proxy, sentence("tuning", message, facts))


def trials_worth(each: float) -> int:
    """Return the number of trials on the proxy: the largest in `TRIALS` that costs at most `SHARE` of the target run.

    If even the smallest number costs more, return it. ``each`` is (cost of a trial) / (cost of the target run).
    """
    return next((trials for trials in TRIALS if trials * each <= SHARE), TRIALS[-1])


def _nearest(model: ModelShape, shapes: Iterable[_Size], params: float) -> ModelShape:
    """Return the shape in ``shapes`` nearest to ``model`` in proportions and to ``params`` in size."""

    def off(shape: _Size) -> float:
        # Too narrow counts twice as much as too shallow: scaling over width is exact only for large widths, but
        # scaling over depth works even from two blocks (CompleteP, arXiv 2505.01618).
        size, width, depth = shape
        narrower = math.log(model.d_model / width) - math.log(model.n_layers / depth)
        return abs(math.log(size / params)) + (narrower / 4 if narrower > 0 else -narrower / 8)

    _, width, depth = min(shapes, key=off)
    return _scaled(model, width, depth)


def _smaller(model: ModelShape, count: Callable[[ModelShape], int]) -> Iterator[_Size]:
    """Yield (parameters, width, depth) of every possible proxy of ``model``. ``count`` counts parameters."""
    unit = model.d_head * (model.n_heads // model.n_kv_heads)
    half, aspect = count(model) / 2, model.d_model / model.n_layers
    thinnest, widest = min(THINNEST, aspect / 2), max(WIDEST, aspect)
    shallowest = max(-(-model.n_layers // SHALLOWER), min(LEAST_DEPTH, model.n_layers))
    if model.experts:  # at least LEAST_DEPTH layers have experts
        shallowest = max(shallowest, min(model.experts.dense_layers + LEAST_DEPTH, model.n_layers))
    narrowest = max(LEAST_WIDTH, -(-model.d_model // NARROWER))
    for width in range(-(-narrowest // unit) * unit, model.d_model, unit):
        one, two = (count(_scaled(model, width, depth)) for depth in (shallowest, shallowest + 1))
        for depth in range(shallowest, model.n_layers + 1):
            size = one + (depth - shallowest) * (two - one)
            if size <= half and thinnest <= width / depth <= widest:
                yield size, width, depth


def _scaled(model: ModelShape, width: int, depth: int) -> ModelShape:
    """Return the model at another width and depth. d_ff / d_model is kept, up to rounding."""
    # d_expert / d_ff is kept, so d_ff must be a multiple of this number.
    unit = model.d_ff // math.gcd(model.d_ff, model.experts.d_expert) if model.experts else 1
    exact = model.d_ff * width % (model.d_model * unit) == 0
    step = math.lcm(32 if width >= 128 else 8, unit)
    d_ff = None if exact else max(round(model.d_ff * width / model.d_model / step), 1) * step
    return model.scaled(width, depth, d_ff=d_ff)


def _proxy(model: ModelShape, shape: ModelShape, batch_tokens: int, tokens: int) -> Proxy:
    params = shape.params_active
    smaller = model.params_active / params
    sequences = max(round(batch_tokens / smaller / shape.seq_len), 1)
    length = round(tokens / smaller)
    each = params * length / (model.params_active * tokens)
    trials = trials_worth(each)
    known = "safe" if params >= SAFE * 0.8 else "smallest" if params >= SMALLEST * 0.8 else "below"
    return Proxy(
        shape=shape,
        params=shape.params,
        params_active=params,
        tokens=length,
        batch_tokens=sequences * shape.seq_len,
        trials=trials,
        cost=trials * each,
        evidence=sentence("tuning", f"evidence: {known}", {"smallest": SMALLEST, "experts": model.experts}),
    )


def _no_shape(shapes: Iterable[_Size], size: float) -> str:
    sizes = sorted(params for params, *_ in shapes)
    below, above = [one for one in sizes if one < size], [one for one in sizes if one > size]
    near = [format_quantity(one) for one in (*below[-1:], *above[:1])]
    if not near:
        return "this model is too small to have a proxy; leave --proxy out"
    return (
        f"no proxy of this model has that size; the nearest possible: {' or '.join(near)} (a proxy is at most "
        f"{NARROWER} times narrower and {SHALLOWER} times shallower than the target)"
    )
