"""Confirmation runs, which decide which point is the answer of a search, and the noise between seeds.

1. The best few points (the finalists) are run again with fresh seeds, which the search did not use, because the
   lowest of many noisy losses is partly luck. The point with the lowest mean of these runs is chosen. A point that
   diverges with any seed cannot be chosen. If there is only one finalist and it diverges, the points of the search
   are compared by their predicted losses, as in 2.
2. The chosen point must be better than the start by more than the noise, over the seeds that both were run with.
   Otherwise the start is the answer: the search found nothing better. Without confirmation runs (3.) the point must
   be better by 2.5 times the noise, because the noise is only about one standard deviation of the difference then.
   Without any runs with fresh seeds, the point with the lowest predicted loss is chosen in the same way.
3. The lowest of several means is partly luck, too: for three equal points with two runs each, it is too low by 0.6
   standard deviations of a run. So a point chosen among several is run again with new seeds, and so is the start.
   These confirmation runs decide: in them, too, the point must be better than the start by more than the noise. The
   reported loss and gain come from these runs. If only one point was run with fresh seeds, it needs no confirmation.
"""

import math
import statistics
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from leaven.tuning.study_document import StudyTrial

RERUNS = 2  # runs with fresh seeds of each of the best few points
CONFIRMATIONS = 2  # further runs of the chosen point, and of the start
ALONE = 2.5  # times the noise: the least gain over the start of a point without confirmation runs

Point = tuple[float, ...]  # octaves from the start
Losses = Mapping[int, float]  # by seed


@dataclass(frozen=True)
class Confirmation:
    """The point that is the answer of a search, and the losses of the runs at this point."""

    point: Point
    losses: tuple[float, ...]  # nats; the reported loss is their mean
    fresh: int  # how many of these losses were not used to choose the point: all or none
    gain: float | None  # nats below the start, measured with runs not used to choose the point; None without any

    @property
    def loss(self) -> float:
        return statistics.fmean(self.losses)


def confirm(
    trials: Sequence[StudyTrial],
    paths: Sequence[str],
    noise: float | None,
    predicted: Mapping[Point, float] = MappingProxyType({}),
) -> Confirmation | None:
    """Return the answer of a search from its ``trials``, or None if no trial finished.

    ``predicted`` has the predicted losses of points; by default the measured losses are used. ``noise`` is the
    standard deviation of the loss between seeds. 0 means that seeds have no effect, so that every run measures the
    loss of its point exactly. None means that the noise is unknown: differences are compared with 0, but no run is
    taken to be exact.
    """
    exact, noise = noise == 0, noise or 0.0
    runs = _Runs.of(trials, paths, predicted)
    chosen = runs.chosen(noise)
    if chosen is None:
        return None
    if confirmed := runs.confirming.get(chosen):
        better = gain(runs.start_again, confirmed) if runs.start_again else None
        if better is None or better > noise:
            return Confirmation(chosen, tuple(confirmed.values()), len(confirmed), better)
        chosen = runs.start
    elif runs.refuted(noise) or not runs.ahead(chosen, ALONE * noise):  # the next best point has no confirmation runs
        chosen = runs.start
    if chosen == runs.start:
        losses = runs.start_again
        return Confirmation(chosen, tuple(losses.values()), len(losses), 0.0)
    losses = runs.candidates[chosen]
    if not (exact or runs.alone(chosen)):
        return Confirmation(chosen, tuple(losses.values()), 0, None)
    better = gain(runs.at_start, losses) if runs.at_start else None
    return Confirmation(chosen, tuple(losses.values()), len(losses), better)


def to_confirm(trials: Sequence[StudyTrial], paths: Sequence[str], noise: float | None) -> Point | None:
    """Return the chosen point if it needs confirmation runs, or None."""
    runs = _Runs.of(trials, paths)
    chosen = runs.chosen(noise or 0.0)
    return None if chosen is None or chosen == runs.start or runs.alone(chosen) else chosen


@dataclass(frozen=True)
class _Runs:
    """The losses of a search, grouped by the purpose of the run, then by point and seed. A diverged run has an
    infinite loss."""

    start: Point
    at_start: Losses  # runs of the start during the search; empty if one diverged and other points did not
    start_again: Losses  # the same, and the runs of the start during confirmation
    choosing: Mapping[Point, Losses]  # runs of the best few points with fresh seeds
    confirming: Mapping[Point, Losses]  # confirmation runs
    candidates: Mapping[Point, Losses]  # points that can be chosen: none of their runs diverged
    predicted: Mapping[Point, float]  # losses of points, used if no point has usable runs with fresh seeds

    @classmethod
    def of(
        cls,
        trials: Sequence[StudyTrial],
        paths: Sequence[str],
        predicted: Mapping[Point, float] = MappingProxyType({}),
    ) -> "_Runs":
        searched: dict[Point, dict[int, float]] = {}
        choosing: dict[Point, dict[int, float]] = {}
        confirming: dict[Point, dict[int, float]] = {}
        for trial in trials:
            if trial.octaves is not None and trial.state in {"complete", "diverged"}:
                into = confirming if trial.confirms else choosing if trial.purpose == "rerun" else searched
                loss = math.inf if trial.state == "diverged" or trial.loss is None else trial.loss
                into.setdefault(tuple(trial.octaves[path] for path in paths), {})[trial.seed] = loss
        start: Point = (0.0,) * len(paths)
        at_start = searched.pop(start, {})
        again = at_start | confirming.pop(start, {})

        def ends(point: Point, losses: Losses) -> bool:
            return math.isfinite(sum({**losses, **confirming.get(point, {})}.values()))

        # A finalist counts once it has as many fresh runs as the others, all of them finite.
        whole = min(RERUNS, max(map(len, choosing.values()), default=0))
        found = {point: losses for point, losses in choosing.items() if len(losses) >= whole and ends(point, losses)}
        sound = bool(again) and math.isfinite(sum(again.values()))
        # One finalist that diverged says little about the others; if several did, only the start is safe.
        rerun = bool(found) or (sound and len(choosing) > 1)
        if not rerun:  # the points of the search are compared
            found = {
                point: losses for point, losses in searched.items() if point not in choosing and ends(point, losses)
            }
        if not sound:  # a start that diverged with some seed counts only if no other point does
            at_start = again = {seed: loss for seed, loss in again.items() if math.isfinite(loss) and not found}
        return cls(start, at_start, again, choosing, confirming, found, {} if rerun else predicted)

    def alone(self, chosen: Point) -> bool:
        """Return whether this is the only point that was run with fresh seeds."""
        return chosen in self.choosing and len(self.choosing) == 1

    def refuted(self, noise: float) -> set[Point]:
        """Return the points whose confirmation runs have ended and are not better than the start by more than
        ``noise``."""
        beside = [
            point
            for point, losses in self.confirming.items()
            if len(losses) >= CONFIRMATIONS and losses.keys() <= self.start_again.keys()
        ]
        return {point for point in beside if not gain(self.start_again, self.confirming[point]) > noise}

    def chosen(self, noise: float) -> Point | None:
        """Return the point with the lowest mean or predicted loss, without the points that :meth:`refuted` returns.

        Return the start if this point is not better by more than ``noise``, or if there is no such point. Return
        None if the start has no run either.
        """
        refuted = self.refuted(noise)
        means = {
            x: self.predicted.get(x, statistics.fmean(losses.values()))
            for x, losses in self.candidates.items()
            if x not in refuted
        }
        if not means:
            return self.start if self.at_start else None
        lowest = min(means, key=lambda point: (means[point], changes(point)))
        return lowest if self.ahead(lowest, noise) else self.start

    def ahead(self, chosen: Point, least: float) -> bool:
        """Return whether the loss at ``chosen`` is below the start's by more than ``least`` nats.

        If the start has no runs to compare with, the result is true for every other point.
        """
        if chosen == self.start or not self.at_start:
            return chosen != self.start
        if chosen in self.predicted and self.start in self.predicted:
            return self.predicted[self.start] - self.predicted[chosen] > least
        return gain(self.at_start, self.candidates[chosen]) > least


def gain(start: Losses, there: Losses) -> float:
    """Return by how many nats the loss of a point (``there``) is below the loss of the start.

    The difference is averaged over the seeds that both were run with. Without common seeds, it is the difference of
    the two means.
    """
    if both := start.keys() & there.keys():
        return statistics.fmean(start[seed] - there[seed] for seed in sorted(both))
    return statistics.fmean(start.values()) - statistics.fmean(there.values())


def changes(point: Point) -> tuple[int, float]:
    """Return how many values a point changes, and the sum of these changes in octaves."""
    return int(np.count_nonzero(point)), float(np.abs(point).sum())


# Two-sided 95% quantiles of Student's t by degrees of freedom.
_T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306)
_Z95 = 1.959964
WILD = 5.0  # times the median spread: points above it are left out of the noise
GIVEN = 10**6  # degrees of freedom of a noise that the user gives


def t95(degrees: int) -> float:
    """Return the two-sided 95% quantile of Student's t with ``degrees`` degrees of freedom (Abramowitz and Stegun
    26.7.5)."""
    if degrees <= len(_T95):
        return _T95[degrees - 1]
    z, n = _Z95, degrees
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)
    return z + (z**3 + z) / (4 * n) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2) + third


def pooled(groups: Iterable[Sequence[float]]) -> tuple[float | None, int]:
    """Return the pooled standard deviation within groups and its degrees of freedom.

    If no group has two or more values, return (None, 0).
    """
    repeats = [group for group in groups if len(group) > 1]
    degrees = sum(len(group) - 1 for group in repeats)
    if not degrees:
        return None, 0
    return math.sqrt(sum(statistics.variance(group) * (len(group) - 1) for group in repeats) / degrees), degrees


def pooled_noise(runs: Iterable[tuple[Hashable, int, float]]) -> tuple[float | None, int]:
    """Return the noise of runs (point, seed, loss), pooled over repeated points, and its degrees of freedom.

    Runs with equal point, seed and loss are the same run and count once. Diverged runs do not count. Runs of
    different points with the same seed share init and data order, and therefore a part of their noise; running more
    points does not average this part out. So if there are several seeds, the degrees of freedom are at most the
    number of seeds minus one.
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
    """Return the noise between seeds and its degrees of freedom. ``given`` is the noise that the user gave, or None.

    ``paths`` are the searched values. Noise is measured at points that were run again. The run for which such a point
    was chosen during the search does not count, because the point was chosen for the low loss of that run. All runs
    of the start count. Pruned trials have no final loss and do not count.
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
    """Return the repeated points. A point is left out if its runs differ much more than the runs of other points do.

    Such a point is at the divergence boundary, where the spread is not noise between seeds. If all points had equal
    noise, one point in 150 would be left out (for three points with two runs and one with three). The point with the
    most runs, if it has more than two, always stays: it is the start, which was repeated to measure the noise.
    """
    spreads = [statistics.stdev(loss for _, loss in ran) for ran in repeated]
    most = WILD * statistics.median(spreads) if len(spreads) > 2 else math.inf
    runs = max(map(len, repeated), default=0)
    return [
        ran
        for ran, spread in zip(repeated, spreads, strict=True)
        if spread <= most or most == 0 or len(ran) == runs > 2
    ]


def interval_of_mean(values: Sequence[float], noise: float, degrees: int) -> tuple[float, float]:
    """Return the 95% interval of the mean of ``values``. ``noise`` is the standard deviation of one value, known with
    ``degrees`` degrees of freedom."""
    mean, margin = statistics.fmean(values), t95(degrees) * noise / math.sqrt(len(values))
    return mean - margin, mean + margin
