"""The noise floor: the standard deviation of the loss between runs of one point, and intervals of means."""

import math
import statistics
from collections.abc import Hashable, Iterable, Sequence

from leaven.tuning.study_document import StudyTrial

# Two-sided 95% quantiles of Student's t by degrees of freedom.
_T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306)
_Z95 = 1.959964
WILD = 5.0  # times the median spread: points above it are left out of the noise
GIVEN = 10**6  # degrees of freedom of a noise that the user gives


def t95(degrees: int) -> float:
    """Return the two-sided 95% quantile of Student's t (Abramowitz and Stegun 26.7.5)."""
    if degrees <= len(_T95):
        return _T95[degrees - 1]
    z, n = _Z95, degrees
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)
    return z + (z**3 + z) / (4 * n) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2) + third


def pooled(groups: Iterable[Sequence[float]]) -> tuple[float | None, int]:
    """Return the pooled standard deviation within groups and its degrees of freedom; (None, 0) without repeats."""
    repeats = [group for group in groups if len(group) > 1]
    degrees = sum(len(group) - 1 for group in repeats)
    if not degrees:
        return None, 0
    return math.sqrt(sum(statistics.variance(group) * (len(group) - 1) for group in repeats) / degrees), degrees


def pooled_noise(runs: Iterable[tuple[Hashable, int, float]]) -> tuple[float | None, int]:
    """Return the noise of runs (point, seed, loss), pooled over repeated points, and its degrees of freedom.

    Runs with equal point, seed and loss are the same run and count once; divergences do not count. Runs with one seed
    share init and data order, and so a part of their noise, which more points do not average out. So with several
    seeds the degrees of freedom are at most the number of seeds minus one.
    """
    points: dict[Hashable, set[tuple[int, float]]] = {}
    for point, seed, loss in runs:
        if math.isfinite(loss):
            points.setdefault(point, set()).add((seed, loss))
    repeated = _of_a_kind([ran for ran in points.values() if len(ran) > 1])
    seeds = {seed for ran in repeated for seed, _ in ran}
    noise, degrees = pooled([loss for _, loss in sorted(ran)] for ran in repeated)
    return noise, min(degrees, len(seeds) - 1) if len(seeds) > 1 else degrees


def noise_between_seeds(
    trials: Iterable[StudyTrial], paths: Sequence[str], given: float | None = None
) -> tuple[float | None, int]:
    """Return the noise of trials and its degrees of freedom. ``given`` is the noise that the user gave, or None.

    ``paths`` are the searched values. The first run of a finalist is left out, because the point was chosen as a
    finalist for its low loss. All runs of the start count. Pruned trials have no final loss and do not count.
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


def _of_a_kind(repeated: list[set[tuple[int, float]]]) -> list[set[tuple[int, float]]]:
    """Return the repeated points, without the points whose runs differ much more than the runs at other points.

    The points that are left out are at the divergence boundary, where the spread is not noise between seeds. If all
    points had equal noise, one point in 150 would be left out (for three points with two runs and one with three).
    The point with the most runs always stays: it is the start, which was repeated to measure the noise.
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
    """Return the 95% interval of the mean of ``values``. ``degrees``: the degrees of freedom of ``noise``."""
    mean, margin = statistics.fmean(values), t95(degrees) * noise / math.sqrt(len(values))
    return mean - margin, mean + margin
