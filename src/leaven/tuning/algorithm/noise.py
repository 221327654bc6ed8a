"""The noise floor: how far runs of one point lie apart, and what that leaves of a mean."""

import math
import statistics
from collections.abc import Hashable, Iterable, Sequence

from leaven.tuning.document import StudyTrial

# Two-sided 95% quantiles of Student's t by degrees of freedom.
_T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306)
_Z95 = 1.959964
WILD = 5.0  # times the median spread
GIVEN = 10**6  # degrees of freedom of a noise that is known


def t95(degrees: int) -> float:
    """Student's quantile: a table, and beyond it its expansion in 1 / degrees (Abramowitz and Stegun 26.7.5)."""
    if degrees <= len(_T95):
        return _T95[degrees - 1]
    z, n = _Z95, degrees
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)
    return z + (z**3 + z) / (4 * n) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2) + third


def pooled(groups: Iterable[Sequence[float]]) -> tuple[float | None, int]:
    """The standard deviation within groups, and its degrees of freedom; None and 0 where no group has two."""
    repeats = [group for group in groups if len(group) > 1]
    degrees = sum(len(group) - 1 for group in repeats)
    if not degrees:
        return None, 0
    return math.sqrt(sum(statistics.variance(group) * (len(group) - 1) for group in repeats) / degrees), degrees


def floor(runs: Iterable[tuple[Hashable, int, float]]) -> tuple[float | None, int]:
    """The noise of runs (point, seed, loss), pooled over all points that were run again, and its degrees of freedom.

    What ended with the same loss at the same point from the same seed is the same run and counts once; divergences
    count not at all. Runs of one seed share init and data, and with them a part of their noise that no number of
    points makes better known: where several seeds were run, there are no more degrees of freedom than these have.
    """
    points: dict[Hashable, set[tuple[int, float]]] = {}
    for point, seed, loss in runs:
        if math.isfinite(loss):
            points.setdefault(point, set()).add((seed, loss))
    repeated = _of_a_kind([ran for ran in points.values() if len(ran) > 1])
    seeds = {seed for ran in repeated for seed, _ in ran}
    noise, degrees = pooled([loss for _, loss in sorted(ran)] for ran in repeated)
    return noise, min(degrees, len(seeds) - 1) if len(seeds) > 1 else degrees


def between(
    trials: Iterable[StudyTrial], paths: Sequence[str], given: float | None = None
) -> tuple[float | None, int]:
    """The noise of trials at points in ``paths``, unless it is given, and its degrees of freedom.

    The search's own run of a point that was run again is left out: it was run again because it was low. Those of the
    start are not. What was stopped has no loss of its own.
    """
    if given is not None:
        return given, GIVEN
    return floor(
        (tuple(trial.octaves[path] for path in paths), trial.seed, trial.loss)
        for trial in trials
        if trial.octaves is not None
        and trial.state == "complete"
        and trial.loss is not None
        and not (trial.purpose == "search" and any(trial.octaves.values()))
    )


def _of_a_kind(repeated: list[set[tuple[int, float]]]) -> list[set[tuple[int, float]]]:
    """The points without those whose runs lie much further apart than at others.

    Those are at the divergence boundary, where it is not seeds that make the noise. Of one noise for all, one in 150
    would be left out (of three points with two runs and one with three). The point with most runs, the start, stays:
    it was run to know the noise, and where seeds make less of it at better points, that of few runs would be too low.
    """
    spreads = [statistics.stdev(loss for _, loss in ran) for ran in repeated]
    most = WILD * statistics.median(spreads) if len(spreads) > 2 else math.inf
    runs = max(map(len, repeated), default=0)
    return [
        ran
        for ran, spread in zip(repeated, spreads, strict=True)
        if spread <= most or most == 0 or len(ran) == runs > 2
    ]


def interval(values: Sequence[float], noise: float, degrees: int) -> tuple[float, float]:
    """The 95% interval of the mean of ``values``, whose noise was found with so many degrees of freedom."""
    mean, margin = statistics.fmean(values), t95(degrees) * noise / math.sqrt(len(values))
    return mean - margin, mean + margin
