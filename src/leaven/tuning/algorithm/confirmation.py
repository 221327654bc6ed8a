"""Which point is the answer of a search.

1. The best few are run with fresh seeds: the lowest of many noisy losses was lucky. The lowest mean of these runs is
   chosen. A point that diverges with any seed is not chosen.
2. It must be better than the start by more than the noise, compared by the seeds that both were run with. Otherwise
   the start is the answer: nothing was found. What is not confirmed (3.) must be better by more than two and a half
   times the noise: once the noise is about one standard deviation of what is compared there.
3. The lowest of several means is lucky too, if less (of three equal ones, by 0.6 standard deviations of a run where
   each is of two). So what was chosen among several is run again, with seeds that chose nothing, and so is the start.
   These runs decide: by them, too, it must be better than the start by more than the noise, and they are
   its loss and its gain. What was run with fresh seeds alone needs no more.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from leaven.tuning.document import StudyTrial

RERUNS = 2  # that choose, of each of the best few
CONFIRMATIONS = 2  # of the one that was chosen among several, and of the start
ALONE = 2.5  # times the noise, by which what is not confirmed has to be better than the start

Point = tuple[float, ...]  # octaves from the start
Losses = Mapping[int, float]  # by seed


@dataclass(frozen=True)
class Confirmation:
    """The point that is the answer, and the runs that its loss is known by."""

    point: Point
    losses: tuple[float, ...]  # those that its loss is the mean of
    fresh: int  # how many of them had no part in choosing it: all or none
    gain: float | None  # how far it is below the start, by such runs; None without any

    @property
    def loss(self) -> float:
        return statistics.fmean(self.losses)


def confirm(trials: Sequence[StudyTrial], paths: Sequence[str], noise: float) -> Confirmation | None:
    """The answer after ``trials``, in nats per token as ``noise`` is; None if none of them ended with a loss."""
    runs = _Runs.of(trials, paths)
    chosen = runs.chosen(noise)
    if chosen is None:
        return None
    if confirmed := runs.confirming.get(chosen):
        better = gain(runs.start_again, confirmed) if runs.start_again else None
        if better is None or better > noise:
            return Confirmation(chosen, tuple(confirmed.values()), len(confirmed), better)
        chosen = runs.start
    elif runs.refuted(noise) or not runs.ahead(chosen, ALONE * noise):  # the next best is not believed unconfirmed
        chosen = runs.start
    if chosen == runs.start:
        losses = runs.start_again
        return Confirmation(chosen, tuple(losses.values()), len(losses), 0.0)
    losses = runs.candidates[chosen]
    if not runs.alone(chosen):
        return Confirmation(chosen, tuple(losses.values()), 0, None)
    better = gain(runs.at_start, losses) if runs.at_start else None
    return Confirmation(chosen, tuple(losses.values()), len(losses), better)


def to_confirm(trials: Sequence[StudyTrial], paths: Sequence[str], noise: float) -> Point | None:
    """What was chosen among several, to be run again beside the start; None if that is the start, or nothing."""
    runs = _Runs.of(trials, paths)
    chosen = runs.chosen(noise)
    return None if chosen is None or chosen == runs.start or runs.alone(chosen) else chosen


@dataclass(frozen=True)
class _Runs:
    """What decides: losses by seed, infinite for a divergence."""

    start: Point
    at_start: Losses  # before anything was chosen; none if a run diverged, unless there is nothing else
    start_again: Losses  # with the runs beside what was to be confirmed
    choosing: Mapping[Point, Losses]
    confirming: Mapping[Point, Losses]
    candidates: Mapping[Point, Losses]  # to choose from; none of their runs diverged

    @classmethod
    def of(cls, trials: Sequence[StudyTrial], paths: Sequence[str]) -> "_Runs":
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

        whole = min(RERUNS, max(map(len, choosing.values()), default=0))
        found = {point: losses for point, losses in choosing.items() if len(losses) >= whole and ends(point, losses)}
        sound = bool(again) and math.isfinite(sum(again.values()))
        if not choosing or not (found or sound):
            found = {
                point: losses for point, losses in searched.items() if point not in choosing and ends(point, losses)
            }
        if not sound:
            at_start = again = {seed: loss for seed, loss in again.items() if math.isfinite(loss) and not found}
        return cls(start, at_start, again, choosing, confirming, found)

    def alone(self, chosen: Point) -> bool:
        """Whether it was run with fresh seeds, and no other was."""
        return chosen in self.choosing and len(self.choosing) == 1

    def refuted(self, noise: float) -> set[Point]:
        """What was run again beside the start, and proved no better: with a smaller budget, say."""
        beside = [
            point
            for point, losses in self.confirming.items()
            if len(losses) >= CONFIRMATIONS and losses.keys() <= self.start_again.keys()
        ]
        return {point for point in beside if not gain(self.start_again, self.confirming[point]) > noise}

    def chosen(self, noise: float) -> Point | None:
        """By the runs that choose alone; what was refuted is out."""
        refuted = self.refuted(noise)
        means = {x: statistics.fmean(losses.values()) for x, losses in self.candidates.items() if x not in refuted}
        if not means:
            return self.start if self.at_start else None
        lowest = min(means, key=lambda point: (means[point], changes(point)))
        return lowest if self.ahead(lowest, noise) else self.start

    def ahead(self, chosen: Point, least: float) -> bool:
        """Whether it is below the start by more than ``least``, or the start has no runs to compare it with."""
        return chosen != self.start and (not self.at_start or gain(self.at_start, self.candidates[chosen]) > least)


def gain(start: Losses, there: Losses) -> float:
    """How far a point is below the start: by the seeds that both were run with, or else by the means of both."""
    if both := start.keys() & there.keys():
        return statistics.fmean(start[seed] - there[seed] for seed in sorted(both))
    return statistics.fmean(start.values()) - statistics.fmean(there.values())


def changes(point: Point) -> tuple[int, float]:
    """How much a point changes against the start: how many values, and by how many octaves in all."""
    return int(np.count_nonzero(point)), float(np.abs(point).sum())
