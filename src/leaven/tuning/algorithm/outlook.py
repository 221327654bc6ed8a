"""Predict what a larger budget would gain, and which two values to search with a budget of a few runs.

What is left to gain is the median, over quadratics drawn from the posterior of the surrogate, of the loss at the best
point above the quadratic's minimum in the trust region. With few values (``DESIGNED``) that is too much, because the
prior has one typical curvature and expects as much in directions that are flat. But there the search itself says how
fast it converges, so at most as much is left as the second half of its trials has gained.

After n trials a regression leaves a regret of about 1 / n, so as many trials again gain half of what is left. On
landscapes with a known optimum the mean of this estimate is within a factor of two for 9 and 25 values, and several
times too high for 2 to 4; for a single search it is a guess (docs/concepts/search.md).
"""

import itertools

import numpy as np
from numpy.typing import NDArray

from leaven.tuning.algorithm.trust_region import DESIGNED, RISK, TRUST, Array, Axes, Region, region

DRAWS = 48
LEAST = 8  # trials of the search; half of fewer say nothing
PER_VALUE = 3  # trials: with 16 trials of 9 values the pair brought half of what was said
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
        there = now.divergence.shorten(drawn.minimum(here, low, high), here, RISK)
        at_best, at_minimum = drawn(np.array([here, there]))
        left.append(at_best - at_minimum)
    most = float(np.median(left))
    if len(best) <= DESIGNED:
        half = region(axes, points[first], losses[first], now.surrogate.noise)
        before, after = now.belief(np.array([half.predicted, best]))
        most = min(most, float(before - after))
    return max(most, 0.0) / 2


def best_pair(now: Region, points: Array, best: Array, noise: float) -> tuple[int, int, float] | None:
    """Return the two values that bring the most of the predicted gain if only they move, and their share of it.

    The others stay at the start, choices too. The result is None if fewer than three values are searched, if there
    are fewer than ``PER_VALUE`` trials for each, or if the gain is not above the noise.

    Args:
        points: (n, D), the trials. The two values stay between the settings that were tried.
        best: the best point (D,).
        noise: standard deviation of the loss between seeds.
    """
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
