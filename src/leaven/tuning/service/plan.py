"""The next run of a search, as a function of the runs so far.

1. Runs whose process died are retried.
2. Runs of the start with several seeds measure the noise. A grid search then runs its points.
3. The search proposes points until only the reserved part of the budget is left, or until some rounds gained less
   than the noise.
4. When no run is left, the best few points (the finalists) are run again with fresh seeds. The first of these trials
   stores the list of finalists, which all commands follow.
5. The best finalist and the start get confirmation runs (confirmation.py).
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import optuna
from optuna.trial import FrozenTrial

from leaven.recipe.errors import InputError
from leaven.training.outcome import Baseline, curve_of
from leaven.tuning.algorithm import noise
from leaven.tuning.algorithm.advice import advice_when_all_diverged
from leaven.tuning.algorithm.answer import finalists
from leaven.tuning.algorithm.boxes import grid
from leaven.tuning.algorithm.confirmation import CONFIRMATIONS, RERUNS, Confirmation, confirm, to_confirm
from leaven.tuning.algorithm.trust_region import Axes
from leaven.tuning.document import Dimension, StudyTrial
from leaven.tuning.service.budget import Budget
from leaven.tuning.service.interface import Found, NothingFound, SearchTrial
from leaven.tuning.service.samplers import TrustRegionSampler
from leaven.tuning.service.trial_log import (
    CONFIRMS,
    DIVERGED,
    ENDED,
    FINALIST,
    FINALISTS,
    JOB,
    Evaluation,
    TrialRequest,
    finished,
    loss_of,
    purpose_of,
    seed_of,
)

REPEATS = 3  # runs of the start, unless the noise is given
SURE = 2  # least degrees of freedom of the noise before runs are pruned
DEATHS, DIVERGENCES = 8, 100  # the search ends after so many without a finished run

Point = dict[str, float]


def first(axes: Axes, method: str, budget: Budget, noise: float | None = None) -> list[TrialRequest]:
    """Return the runs whose points are known before the search: those of the start, and of a grid.

    Raises:
        InputError: if the grid has more points than the budget has trials, or no number of trials is given.
    """
    repeats = REPEATS if noise is None else 1
    jobs = [TrialRequest("noise" if k else "search", f"start:{k}", k, dict(axes.start)) for k in range(repeats)]
    if method == "grid":
        if budget.trials is None:
            raise InputError("method grid: the number of trials sets how fine the grid is; give a number of trials")
        points = grid(axes, budget.trials - budget.kept() - repeats)
        jobs += [TrialRequest("search", f"grid:{list(x.values())}", 0, x) for x in points if x != axes.start]
    return jobs


@dataclass(frozen=True)
class Plan:
    """Decides the next run of a search from the runs so far. It has no state of its own."""

    study: optuna.Study
    axes: Axes
    method: str
    budget: Budget
    noise: float | None  # nats between runs of one point, if the user has given it
    stop_at_noise: bool  # whether to stop when some rounds gained less than the noise

    def next(self, runs: Sequence[Evaluation], now: float) -> TrialRequest | None:
        """Return the next run, or None if there is none until a running one ends, or at all.

        Raises:
            NothingFound: if every run has diverged or died.
        """
        for run in runs:
            if run.lost:
                return run.retry
        finished, died = sum(run.finished for run in runs), sum(run.failed for run in runs)
        if not any(run.complete for run in runs) and (finished >= DIVERGENCES or (died >= DEATHS and not finished)):
            if any(run.running for run in runs):
                return None
            raise NothingFound(self.nothing(runs))
        begun = {run.origin.user_attrs.get(JOB) for run in runs}
        for known in first(self.axes, self.method, self.budget, self.noise):
            if known.name not in begun and self.budget.left(runs, now) >= 1:
                return known
        points = self.chosen(runs)
        if points is None:
            if self.budget.room(runs, now) and not self.stalled():
                return TrialRequest("search")  # no point: the study's sampler proposes it
            if any(run.running for run in runs):
                return None
            points = self._best(runs)[: self.budget.finalists(runs, now)]
        job = next((job for job in self._reruns(runs, points) if job.name not in begun), None)
        choosing = any(run.running and not run.origin.user_attrs.get(CONFIRMS) for run in runs)
        if job is None and not choosing:
            job = next((job for job in self._confirming(runs, now) if job.name not in begun), None)
        return job

    def stalled(self) -> bool:
        """Whether the search stops before its budget is used."""
        sampler = self.study.sampler
        return self.stop_at_noise and isinstance(sampler, TrustRegionSampler) and sampler.region(self.study).stalled()

    def is_rerun(self, run: Evaluation) -> bool:
        """Whether a run is a rerun or confirmation of a finalist of this budget."""
        return bool(run.origin.user_attrs.get(FINALIST, [""])[0] == self.budget.label)

    def chosen(self, runs: Sequence[Evaluation]) -> list[Point] | None:
        """Return the finalists, or None before they are chosen."""
        lists = (run.origin.user_attrs.get(FINALISTS) for run in runs if self.is_rerun(run))
        return next((points for points in lists if points is not None), None)

    def _reruns(self, runs: Sequence[Evaluation], points: Sequence[Point]) -> Iterator[TrialRequest]:
        for which, point in enumerate(points):
            others = [run for run in runs if not self.is_rerun(run) or run.origin.user_attrs.get(CONFIRMS)]
            for k, other in enumerate(_fresh(others, point, RERUNS)):
                attributes: tuple[tuple[str, object], ...] = ((FINALIST, [self.budget.label, which]),)
                if which == k == 0:
                    attributes += ((FINALISTS, list(points)),)
                yield TrialRequest("rerun", f"rerun:{self.budget.label}:{which}:{k}", other, point, attributes)

    def _confirming(self, runs: Sequence[Evaluation], now: float) -> Iterator[TrialRequest]:
        """Yields confirmation runs of the chosen point and of the start, with the same seeds."""
        point = to_confirm(self._records(runs), self._paths, self.between(runs)[0] or 0.0)
        if point is None or self.budget.left(runs, now) < 1:
            return
        attributes: tuple[tuple[str, object], ...] = ((FINALIST, [self.budget.label, None]), (CONFIRMS, True))
        others = [run for run in runs if not run.origin.user_attrs.get(CONFIRMS)]
        at, start = self.params(runs, point), dict(self.axes.start)
        for other in _fresh(others, at, CONFIRMATIONS):
            yield TrialRequest("rerun", f"confirm:{list(point)}:{other}", other, at, attributes)
            if other not in _seeds(others, start):
                yield TrialRequest("rerun", f"confirm:start:{other}", other, start, attributes)

    def confirmation(self, runs: Sequence[Evaluation]) -> Confirmation | None:
        """Return the answer so far."""
        return confirm(self._records(runs), self._paths, self.between(runs)[0] or 0.0)

    def between(self, runs: Sequence[Evaluation]) -> tuple[float | None, int]:
        """Return the noise between runs of one point, and its degrees of freedom."""
        return noise.between(self._records(runs), self._paths, self.noise)

    def _records(self, runs: Sequence[Evaluation]) -> list[StudyTrial]:
        return [record(run, self.axes) for run in runs]

    @property
    def _paths(self) -> list[str]:
        return list(self.axes.start)

    def params(self, runs: Sequence[Evaluation], point: tuple[float, ...]) -> Point:
        """Return the log2 multipliers with which a point, given in octaves, was run."""
        return next(
            dict(run.last.params)
            for run in runs
            if run.finished and tuple(self.axes.octaves(run.last.params).tolist()) == point
        )

    def _best(self, runs: Sequence[Evaluation]) -> list[Point]:
        """Return the finalists in log2 multipliers, the most promising first.

        Pruned trials are left out, and so is the start, which has been run with several seeds already.
        """
        trials, by_surrogate = self._records(runs), self.method == "trust-region"
        none = [trial.octaves for trial in trials if trial.state == "stopped"] + [dict.fromkeys(self.axes.start, 0.0)]
        points = finalists(trials, self.axes, self.noise, by_surrogate=by_surrogate)
        if not points:
            raise NothingFound(self.nothing(runs))
        return [self.axes.values(np.array(list(point.values()))) for point in points if point not in none]

    def found(self, runs: Sequence[Evaluation], now: float, stopped: bool) -> Found:
        """Return the result of the search.

        Raises:
            NothingFound: if no run finished.
        """
        chosen = self.confirmation(runs)
        if chosen is None:
            raise NothingFound(self.nothing(runs))
        between, degrees = self.between(runs)
        around = (-math.inf, math.inf)
        if between is not None and chosen.fresh:
            around = noise.interval(chosen.losses, between, degrees)
        searched = [run for run in runs if not self.is_rerun(run)]
        return Found(
            params=self.params(runs, chosen.point),
            loss=chosen.loss,
            interval=around,
            fresh=chosen.fresh,
            noise=between,
            stalled=not stopped and self.budget.room(searched, now),
            trials=tuple(map(self._result, finished(self.study))),
        )

    def _result(self, ended: FrozenTrial) -> SearchTrial:
        label, which = ended.user_attrs.get(FINALIST, ("", None))
        finalist = which if label == self.budget.label else None
        return SearchTrial(
            ended.number, dict(ended.params), loss_of(ended), finalist, purpose_of(ended), seed_of(ended)
        )

    def baseline(self, runs: Sequence[Evaluation], point: Mapping[str, float]) -> Baseline | None:
        """Return the best run so far, against which a run at ``point`` is pruned; None until the noise is measured.

        Only runs with the same choices are compared: with another schedule, say, a loss curve has another shape.
        """
        choices = [name for name, limits in self.axes.limits.items() if isinstance(limits, range)]
        between, degrees = self.between(runs)
        alike = (run for run in runs if all(run.origin.params.get(name) == point[name] for name in choices))
        ended = [run.last for run in alike if run.complete and seed_of(run.origin) == 0]
        curves = [trial for trial in ended if "curve" in trial.user_attrs]
        if between is None or degrees < SURE or not curves:
            return None
        best = min(curves, key=loss_of)
        return Baseline(curve_of(best.user_attrs["curve"]), loss_of(best), between)

    def nothing(self, runs: Sequence[Evaluation]) -> str:
        """Return the reason why there is no answer."""
        trials = self._records(runs)
        if stopped := sum(trial.state == "stopped" for trial in trials):
            diverged = sum(trial.state == "diverged" for trial in trials)
            return f"no run finished: {stopped} were pruned, {diverged} diverged"
        if any(run.finished for run in runs):
            named = [
                Dimension(name, 0.0, 0.0, 0.0, levels=("",) * n)
                for name, n in zip(self.axes.limits, self.axes.levels, strict=True)
            ]
            return advice_when_all_diverged(trials, named, "give it a start at which the objective is finite")
        if failed := sum(run.failed for run in runs):
            return f"no run ended: {failed} died, each of them twice; possible cause: out of memory"
        return "stopped before any run ended; run it again to resume"


def _fresh(others: Sequence[Evaluation], point: Point, count: int) -> list[int]:
    """Return the first ``count`` seeds, from 1, that a point has not been run with."""
    had = {0} | _seeds(others, point)
    return list(itertools.islice((k for k in itertools.count(1) if k not in had), count))


def _seeds(runs: Sequence[Evaluation], point: Point) -> set[int]:
    return {seed_of(run.origin) for run in runs if run.origin.params == point}


def record(run: Evaluation, axes: Axes) -> StudyTrial:
    """Return a run as a record of the study's document; ``values`` are still log2 multipliers."""
    last, ran = run.last, run.last.user_attrs
    state = "failed" if run.failed else "waiting" if run.lost else "running"
    if run.finished:
        state = "diverged" if ran.get(DIVERGED) else "stopped" if ran.get("stopped") else "complete"
    seconds, tokens = ran.get("seconds"), ran.get("tokens", 0)
    drawn = len(last.params) == len(axes.start)
    return StudyTrial(
        number=last.number,
        state=state,
        loss=loss_of(last) if state in {"complete", "stopped"} else None,
        values=dict(last.params),
        seconds=seconds,
        tokens_per_second=tokens / seconds if seconds else None,
        octaves=dict(zip(axes.start, axes.octaves(last.params).tolist(), strict=True)) if drawn else None,
        purpose=purpose_of(last),
        confirms=bool(run.origin.user_attrs.get(CONFIRMS)),
        seed=seed_of(last),
        tokens=tokens,
        flops=ran.get("flops", 0.0),
        curve=curve_of(ran.get("curve", ())),
        branches=curve_of(ran.get("branches", ())),
        worker=ran.get("worker"),
        ended=ran.get(ENDED),
    )
