"""Compute how much each searched value adds to the gain of the best point, and the expected gain of more trials.

The possible gain is the loss at the best point minus the lowest loss within ``TRUST`` steps of this point (see
trust_region.py for steps). It is estimated as the median over quadratics drawn from the surrogate's posterior. For up
to ``DESIGNED`` searched values, this median is too high, so the estimate is limited to the predicted gain from the
second half of the trials.

After n trials, the possible gain is about proportional to 1 / n. So n more trials are expected to gain half of
it. docs/concepts/search.md says how accurate this is.
"""

import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from leaven.tuning.algorithm.trust_region import DESIGNED, RISK, Array, Axes, Region, region
from leaven.tuning.study_document import Coordinate, Dimension, SlicePoint

SURE = 1.0  # standard deviations that are added to a predicted difference of losses, if one value moves
TOGETHER = 2.0  # the same if many values move, because the errors of the surrogate add up
SLICE = 21  # number of points of a slice
WIDE, FINE = 2.0, 1 / 32  # the flat region is searched within WIDE steps of the best point, on a grid of FINE steps
BEYOND = 0.5  # steps by which a slice extends beyond the values that were tried
DRAWS = 48  # quadratics drawn from the posterior
LEAST = 8  # the fewest trials of the search from which a further gain is estimated
# The fewest trials for each value from which a pair is named. With 16 trials of 9 values, pairs brought only half of
# the predicted share of the gain.
PER_VALUE = 3
CANDIDATES = 12  # the best pair is searched among so many values: those with the largest gains alone


def cost_of(now: Region, x: Array, best: Array) -> tuple[float, float]:
    """Return the difference of the predicted losses, ``x`` minus ``best``, and its standard deviation."""
    here, there = now.belief(np.array([x, best]))
    return float(here - there), float(now.deviation(x[None], best)[0])


def fewest_changes(now: Region, best: Array, floor: float) -> Array:
    """Return ``best`` with some values reset to the start. Values are tried in order of the predicted cost of the
    reset. A reset is kept if ``now`` predicts that all resets so far cost at most ``floor`` nats in total, and
    divergence does not become likely."""
    found, most = np.array(best), max(RISK, float(now.risk(best)))
    costs, deviations = (part[:, 0] for part in now.along(best, np.zeros((len(best), 1))))
    for i in np.argsort(costs + SURE * deviations, kind="stable"):
        back = np.where(np.arange(len(best)) == i, 0.0, found)
        cost, deviation = cost_of(now, back, best)
        if float(now.risk(back)) <= most and cost + TOGETHER * deviation <= floor:
            found = back
    return found


def coordinates(
    now: Region,
    points: Array,
    losses: Array,
    floor: float,
    *,
    dimensions: Sequence[Dimension],
    best: Array,
    optunas: Array,
) -> tuple[Coordinate, ...]:
    """Return one :class:`Coordinate` for each of the D searched values, the most important first.

    The importance of a value is the standard deviation of the predicted loss if it varies as in the trials at
    ``points`` (n, D) with ``losses`` (n,) and all others stay at ``best`` (D,), scaled to the sum 1. Differences of
    losses below ``floor`` (nats) do not count. ``optunas`` has Optuna's importances (D,).
    """
    tried = points[np.isfinite(losses)].T
    spread = now.along(best, tried)[0].std(1)
    shares = spread / (spread.sum() or 1.0)
    gains, doubts = (part[:, 0] for part in now.along(best, np.zeros((len(best), 1))))
    scale, low, high = now.features.scale[:, None], now.low[:, None], now.high[:, None]
    around = best[:, None] + scale * np.arange(-WIDE, WIDE + FINE / 2, FINE)
    mean, deviation = now.along(best, around)
    equal = (mean + SURE * deviation <= floor) & (around >= low) & (around <= high)
    equal &= now.risk_along(best, around) <= max(RISK, float(now.risk(best)))
    first = np.maximum(tried.min(1, keepdims=True) - BEYOND * scale, low)
    last = np.minimum(tried.max(1, keepdims=True) + BEYOND * scale, high)
    sliced = first + (last - first) * np.linspace(0, 1, SLICE)
    for i, dimension in enumerate(dimensions):
        if levels := len(dimension.levels):
            # A slice over all levels; only the best level counts as flat.
            sliced[i] = np.arange(SLICE) % levels
            equal[i] = False
    curves = (sliced, *now.along(best, sliced), now.risk_along(best, sliced))
    middle = around.shape[1] // 2
    found = []
    for i in np.argsort(-shares, kind="stable"):
        dimension, x = dimensions[i], float(best[i])
        below, above = np.flatnonzero(~equal[i, :middle]), np.flatnonzero(~equal[i, middle + 1 :])
        lower, upper = below[-1] + 1 if len(below) else 0, middle + (above[0] if len(above) else middle)
        within = min(x - dimension.low, dimension.high - x) >= FINE * dimension.scale
        end = "" if x == 0 or within else dimension.ends[dimension.upper(x)]
        slices = zip(*(curve[i, : len(dimension.levels) or SLICE] for curve in curves), strict=True)
        found.append(
            Coordinate(
                path=dimension.path,
                best=x,
                flat=(float(around[i, lower]), float(around[i, upper])),
                gain=float(gains[i]),
                gain_deviation=float(doubts[i]),
                importance=float(shares[i]),
                worth=bool(gains[i] - SURE * doubts[i] > floor),
                slice=tuple(SlicePoint(*map(float, values)) for values in slices),
                at_end=bool(end),
                end=end,
                optuna_importance=float(optunas[i]),
            )
        )
    return tuple(found)


def further_gain(
    now: Region, axes: Axes, points: Array, losses: Array, *, searched: NDArray[np.bool_], best: Array
) -> float | None:
    """Return the expected gain in nats from doubling the number of trials, or None if unknown. ``now`` is the trust
    region after trials at ``points`` (n, D) with ``losses`` (n,). ``searched`` (n,) is false for repeated points.
    ``best`` is the best point (D,)."""
    first = np.flatnonzero(searched)
    first = first[: len(first) // 2]
    if 2 * len(first) < LEAST or not np.isfinite(losses[first]).any():
        return None
    here, rng, left = now.features.of(best), np.random.default_rng(len(points)), []
    for _ in range(DRAWS):
        drawn = now.surrogate.draw(rng)
        there = now.divergence.shorten(now.lowest(drawn, best, best), here, RISK)
        at_best, at_minimum = drawn(np.array([here, there]))
        left.append(at_best - at_minimum)
    most = float(np.median(left))
    if len(best) <= DESIGNED:
        half = region(axes, points[first], losses[first], now.surrogate.noise)
        before, after = now.belief(np.array([half.predicted, best]))
        most = min(most, float(before - after))
    return max(most, 0.0) / 2


def best_pair(now: Region, points: Array, best: Array, noise: float) -> tuple[int, int, float] | None:
    """Return (i, j, share): the indices of the two numeric values whose change from the start is predicted to gain
    most within the range of ``points`` (n, D), and their gain / the gain of moving all numeric values to ``best``
    (D,), at most 1. Return None if there are too few numeric values or trials, or if moving all to ``best`` gains at
    most ``noise``."""
    features, number, d = now.features, now.features.level == 0, len(best)
    zero, there = features.of(np.zeros(d)), np.where(number, features.of(best), 0.0)
    if int(number.sum()) < 3 or len(points) < PER_VALUE * d:
        return None

    def loss(columns: Array) -> float:
        return float(now.surrogate.value(columns[None])[0])

    gained = loss(zero) - loss(there)
    if not gained > noise:
        return None
    seen = features.of(points)
    low, high = seen.min(0), seen.max(0)

    def gain(*owners: int) -> float:
        free = np.isin(features.owner, owners) & number
        found = now.surrogate.mean.minimum(zero, np.where(free, low, zero), np.where(free, high, zero))
        return loss(zero) - loss(now.divergence.shorten(found, zero, RISK))

    alone = sorted(features.owner[number].tolist(), key=gain, reverse=True)[:CANDIDATES]
    pair = max(itertools.combinations(alone, 2), key=lambda two: gain(*two))
    return (*pair, min(gain(*pair) / gained, 1.0))
