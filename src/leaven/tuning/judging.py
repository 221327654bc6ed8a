"""Which point is the answer of a search.

1. The best few are run with fresh seeds: the lowest of many noisy losses was lucky. The lowest mean of these runs is
   chosen. A point that diverges with any seed is none.
2. It must be better than the start by more than the noise, compared by the seeds that both were run with. Otherwise
   the start is the answer: nothing was found.
3. The lowest of several means is lucky too, if less (of three equal ones, by 0.6 standard deviations of a run where
   each is of two). So what was chosen among several is run again, with seeds that chose nothing, and those runs are
   its loss. What was run with fresh seeds alone needs no more.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from leaven.training.study_file import Trial

RERUNS = 2  # that choose, of each of the best few
CONFIRMATIONS = 2  # of the one that was chosen among several

Point = tuple[float, ...]  # octaves from the start
Losses = Mapping[int, float]  # by seed


@dataclass(frozen=True)
class Verdict:
    point: Point
    losses: tuple[float, ...]  # those that its loss is the mean of
    fresh: int  # how many of them had no part in choosing it: all or none

    @property
    def loss(self) -> float:
        return statistics.fmean(self.losses)


def verdict(trials: Sequence[Trial], paths: Sequence[str], noise: float) -> Verdict | None:
    """The answer after ``trials``, in nats per token as ``noise`` is; None if none of them ended with a loss."""
    start: Point = (0.0,) * len(paths)
    searched: dict[Point, dict[int, float]] = {}
    choosing: dict[Point, dict[int, float]] = {}
    confirming: dict[Point, dict[int, float]] = {}
    for trial in trials:
        if trial.octaves is not None and trial.state in {"complete", "diverged"}:
            into = confirming if trial.confirms else choosing if trial.purpose == "rerun" else searched
            loss = math.inf if trial.state == "diverged" or trial.loss is None else trial.loss
            into.setdefault(tuple(trial.octaves[path] for path in paths), {})[trial.seed] = loss
    at_start = {seed: loss for seed, loss in searched.get(start, {}).items() if math.isfinite(loss)}
    whole = min(RERUNS, max(map(len, choosing.values()), default=0))
    candidates = {
        point: losses
        for point, losses in choosing.items()
        if len(losses) >= whole and math.isfinite(sum({**losses, **confirming.get(point, {})}.values()))
    }
    if not choosing or not (candidates or at_start):
        candidates = {
            point: losses
            for point, losses in searched.items()
            if point not in choosing and math.isfinite(sum({**losses, **confirming.get(point, {})}.values()))
        }
    if not candidates and not at_start:
        return None
    if not candidates:
        return Verdict(start, tuple(at_start.values()), len(at_start))
    chosen = min(candidates, key=lambda point: (statistics.fmean(candidates[point].values()), changes(point)))
    if at_start and not gain(at_start, candidates[chosen]) > noise:
        return Verdict(start, tuple(at_start.values()), len(at_start))
    if chosen in confirming:
        losses = tuple(confirming[chosen].values())
        return Verdict(chosen, losses, len(losses))
    losses = tuple(candidates[chosen].values())
    alone = chosen in choosing and len(choosing) == 1
    return Verdict(chosen, losses, len(losses) if alone else 0)


def gain(start: Losses, there: Losses) -> float:
    """How far a point is below the start: by the seeds that both were run with, or else by the means of both."""
    if both := start.keys() & there.keys():
        return statistics.fmean(start[seed] - there[seed] for seed in sorted(both))
    return statistics.fmean(start.values()) - statistics.fmean(there.values())


def changes(point: Point) -> tuple[int, float]:
    """How much a point changes against the start: how many values, and by how many octaves in all."""
    return int(np.count_nonzero(point)), float(np.abs(point).sum())
