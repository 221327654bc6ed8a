"""The noise between seeds (the standard deviation of the loss at one point), and confidence intervals of means."""

import math
import statistics
from collections.abc import Hashable, Iterable, Sequence

from leaven.tuning.study_document import StudyTrial

# Two-sided 95% quantiles of Student's t by degrees of freedom.
_T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306)
_Z95 = 1.959964
WILD = 5.0  # a point whose spread is above this times the median spread of all points is left out of the noise
FEWEST_DEGREES = 2  # the fewest degrees of freedom with which a measured noise decides about gains and pruning
GIVEN = 10**6  # degrees of freedom of a noise that the user gives


def t95(degrees: int) -> float:
    """Return the two-sided 95% quantile of Student's t (Abramowitz and Stegun 26.7.5)."""
    if degrees <= len(_T95):
        return _T95[degrees - 1]
    z, n = _Z95, degrees
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)
    return z + (z**3 + z) / (4 * n) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2) + third


def pooled(groups: Iterable[Sequence[float]]) -> tuple[float | None, int]:
    """Return the pooled standard deviation within groups, and its degrees of freedom; (None, 0) without repeats."""
    repeats = [group for group in groups if len(group) > 1]
    degrees = sum(len(group) - 1 for group in repeats)
    if not degrees:
        return None, 0
    return math.sqrt(sum(statistics.variance(group) * (len(group) - 1) for group in repeats) / degrees), degrees


def pooled_noise(trials: Iterable[tuple[Hashable, int, float]]) -> tuple[float | None, int]:
    """Return the noise, pooled over repeated points, and its degrees of freedom; (None, 0) if no point is repeated.

    A trial is (point, seed, loss). With several seeds, the degrees of freedom are at most (number of seeds) - 1,
    because trials with equal seeds share init, data order and a part of the noise.

    Losses vary much more near the divergence boundary. So if three or more points are repeated, those with a standard
    deviation above ``WILD`` times the median are left out, except the points with the most trials, if they have at
    least three.
    """
    points: dict[Hashable, set[tuple[int, float]]] = {}
    for point, seed, loss in trials:
        if math.isfinite(loss):
            points.setdefault(point, set()).add((seed, loss))
    repeated = [(ran, statistics.stdev(loss for _, loss in ran)) for ran in points.values() if len(ran) > 1]
    most = WILD * statistics.median(spread for _, spread in repeated) if len(repeated) > 2 else math.inf
    longest = max((len(ran) for ran, _ in repeated), default=0)
    kept = [ran for ran, spread in repeated if spread <= most or most == 0 or len(ran) == longest > 2]
    seeds = {seed for ran in kept for seed, _ in ran}
    noise, degrees = pooled([loss for _, loss in sorted(ran)] for ran in kept)
    return noise, min(degrees, len(seeds) - 1) if len(seeds) > 1 else degrees


def noise_between_seeds(
    trials: Iterable[StudyTrial], paths: Sequence[str], given: float | None = None
) -> tuple[float | None, int]:
    """Return the noise between seeds and its degrees of freedom. The noise is ``given``, or else measured.

    It is measured on points that ran several times. Trials with the purpose "search" count only at the start point:
    other points run again because their loss in the search was low, so that loss is biased.
    """
    if given is not None:
        return given, GIVEN
    return pooled_noise(
        (tuple(trial.octaves[path] for path in paths), trial.seed, trial.loss)
        for trial in trials
        if trial.octaves is not None
        and trial.state == "complete"
        and trial.loss is not None
        and not (trial.purpose == "search" and any(trial.octaves.values()))
    )


def interval_of_mean(values: Sequence[float], noise: float | None, degrees: int) -> tuple[float, float]:
    """Return the 95% confidence interval of the mean of ``values``; (-inf, inf) if ``noise`` is None or ``values`` is
    empty. ``noise`` is the standard deviation of one value, measured with ``degrees`` degrees of freedom."""
    if noise is None or not values:
        return -math.inf, math.inf
    mean, margin = statistics.fmean(values), t95(degrees) * noise / math.sqrt(len(values))
    return mean - margin, mean + margin
