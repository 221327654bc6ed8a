"""What a larger budget would gain, and which two values to search if there is money for a few runs only.

What is left to gain is the median, over quadratics drawn from the posterior of the surrogate, of the loss at the best
point above the quadratic's minimum in the trust region. With few values (``DESIGNED``) that is too much, because the
prior has one typical curvature and expects as much in directions that are flat. But there the search itself says how
fast it converges, so at most as much is left as the second half of its trials has gained.

After n trials a regression leaves a regret of about 1 / n, so as many trials again gain half of what is left. On
landscapes with a known optimum the mean of this estimate is right for 9 and 25 values, and several times too high for
2 to 4; for a single search it is a guess (docs/concepts/search.md).
"""

import itertools

import numpy as np
from numpy.typing import NDArray

from leaven.tuning.algorithm.trust_region import DESIGNED, TRUST, Array, Axes, Region, region

DRAWS = 48
LEAST = 8  # trials of the search; half of fewer say nothing
CANDIDATES = 12  # values among which the best pair is searched: those with the largest gains alone


def further_gain(
    now: Region, axes: Axes, points: Array, losses: Array, *, searched: NDArray[np.bool_], best: Array
) -> float | None:
    """Return the expected gain in nats of as many trials again, or None after too few trials.

    Args:
        now: the trust region after trials at ``points`` (n, D) with ``losses`` (n,).
        searched: (n,), which trials were proposed by the search.
        best: the best point (D,).
    """
    first = np.flatnonzero(searched)
    first = first[: len(first) // 2]
    if 2 * len(first) < LEAST or not np.isfinite(losses[first]).any():
        return None
    here, rng, left = now.features.of(best), np.random.default_rng(len(points)), []
    number = now.features.level == 0
    low = np.where(number, np.maximum(here - TRUST, now.features.of(now.low)), here)
    high = np.where(number, np.minimum(here + TRUST, now.features.of(now.high)), here)
    for _ in range(DRAWS):
        drawn = now.surrogate.draw(rng)
        there = drawn.minimum(here, low, high)
        at_best, at_minimum = drawn(np.array([here, there]))
        left.append(at_best - at_minimum)
    most = float(np.median(left))
    if len(best) <= DESIGNED:
        half = region(axes, points[first], losses[first], now.surrogate.noise)
        before, after = now.belief(np.array([half.predicted, best]))
        most = min(most, float(before - after))
    return max(most, 0.0) / 2


def best_pair(now: Region, best: Array) -> tuple[int, int, float] | None:
    """Return the two values that bring the most of the predicted gain if only they move, and its share.

    The others stay at the start. The result is None if nothing is gained, or fewer than three values are searched.
    """
    d = len(best)
    start, end = now.belief(np.array([np.zeros(d), best]))
    if d < 3 or not start > end:
        return None
    features = now.features
    zero, low, high = features.of(np.zeros(d)), features.of(now.low), features.of(now.high)
    far = np.abs(features.of(best)) + TRUST  # not where no trial has been
    low, high = np.maximum(low, -far), np.minimum(high, far)

    def gain(*values: int) -> float:
        free = np.isin(features.owner, values) & (features.level == 0)
        there = now.surrogate.mean.minimum(zero, np.where(free, low, zero), np.where(free, high, zero))
        reached = features.point(there)
        if now.risk(reached[None])[0] > max(float(now.risk(best[None])[0]), 0.5):
            return 0.0
        return float(start - now.belief(reached[None])[0])

    alone = sorted((i for i in range(d) if not now.features.levels[i]), key=gain, reverse=True)[:CANDIDATES]
    pairs = {pair: gain(*pair) for pair in itertools.combinations(alone, 2)}
    if not pairs:
        return None
    pair = max(pairs, key=lambda each: pairs[each])
    return (*pair, min(max(pairs[pair] / float(start - end), 0.0), 1.0))
