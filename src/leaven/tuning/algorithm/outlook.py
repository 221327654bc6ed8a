"""Predict what a larger budget would gain, and which two values to search with a budget of a few runs.

The gain that is still possible is estimated with quadratics that are drawn from the posterior of the surrogate. Each
quadratic says how far the loss at the best point is above its own minimum in the trust region. The estimate is the
median of these differences. With few values (at most ``DESIGNED``) it is too high: the prior has one typical
curvature for all values, and expects the same gain from values that have little effect. But with few values, the
search itself shows how fast it converges. So the estimate is then limited to what the second half of the trials has
gained.

After n trials, the regret of a regression is about 1 / n. So n further trials gain half of the gain that is still
possible. On landscapes with a known optimum, the mean of this estimate is within a factor of two of the true gain for
9 and 25 values, and several times too high for 2 to 4 values. For a single search it is a guess
(docs/concepts/search.md).
"""

import itertools

import numpy as np
from numpy.typing import NDArray

from leaven.tuning.algorithm.trust_region import DESIGNED, RISK, TRUST, Array, Axes, Region, region

DRAWS = 48
LEAST = 8  # trials of the search; with fewer, half of them say nothing
PER_VALUE = 3  # trials: with 16 trials of 9 values, the pair brought only half of the predicted share
CANDIDATES = 12  # values among which the best pair is searched: those with the largest gains alone


def further_gain(
    now: Region, axes: Axes, points: Array, losses: Array, *, searched: NDArray[np.bool_], best: Array
) -> float | None:
    """Return the gain in nats that is expected if as many trials are run again. Return None after too few trials.

    Args:
        now: the trust region after trials at ``points`` (n, D) with ``losses`` (n,).
        searched: (n,), whether a trial belongs to the search itself, not to the measurement of noise or the reruns.
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
    """Find the two numbers that together bring the largest share of the predicted gain if only they are moved.

    All other values stay at the start, choices too. Return the indices of the two, and the share (at most 1). Return
    None if fewer than three numbers are searched, if there are fewer than ``PER_VALUE`` trials for each value, or if
    the gain is not above the noise.

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
