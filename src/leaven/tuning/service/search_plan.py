"""Read the runs of a search from the trials in its store, and decide the next run from them.

A run is one training at one point with one seed. It has several trials in the store if its process died. The next run
is the first of these:

1. the retry of a run whose process died;
2. the start with several seeds, to measure the noise (the standard deviation of the loss between seeds); in a grid
   search, then the points of the grid;
3. the next proposal of the search, until only the budget that is reserved for confirmation is left, or until several
   rounds gained less than the noise;
4. one of the best few points (the finalists), again, with a fresh seed; the first of these trials stores how many
   finalists there are, and all commands use this number;
5. the best finalist or the start, again, to confirm the gain (``algorithm/answer.py``).
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from optuna.trial import FrozenTrial, TrialState

from leaven.recipe.errors import InputError
from leaven.training.outcome import Baseline, curve_of
from leaven.tuning.algorithm.answer import (
    CONFIRMATIONS,
    Confirmation,
    advice_when_all_diverged,
    best_point,
    finalists,
    in_doubt,
    to_confirm,
)
from leaven.tuning.algorithm.noise import noise_between_seeds
from leaven.tuning.algorithm.trust_region import Array, Axes, Region, region
from leaven.tuning.service.budget import Budget
from leaven.tuning.study_document import Dimension, StudyTrial

# Names of user attributes of a trial. Others are the fields of an Outcome.
PURPOSE, SEED, RETRY_OF, FINALIST, DIVERGED = "purpose", "seed", "retry_of", "finalist", "diverged"
OWNER, JOB, FINAL, RELEASED, CONFIRMS = "owner", "job", "final", "released", "confirms"
BEGAN, ENDED = "began", "ended"  # Unix time by the owner's clock, seconds
PREDICTED = "expected"  # the predicted final loss of a pruned trial
LIVES = 2  # attempts of a run before it has failed

# Least size of the budget: runs of the start. If the user gives the noise, the start is run once.
REPEATS = {24: 3, 12: 2, 0: 1}
SMALL = 16  # runs: a smaller budget confirms only gains that are not accepted without confirmation
SURE = 2  # the fewest degrees of freedom of the noise with which runs are pruned
# A search without a complete run ends after so many failed runs if no other run ended, or so many diverged runs.
DEATHS, DIVERGENCES = 8, 100

Params = dict[str, float]  # log2 multipliers by name


@dataclass(frozen=True)
class TrialRequest:
    """A run to start."""

    purpose: str  # search | noise | rerun
    name: str  # of the job, by which commands find out whether the run was started already
    seed: int = 0
    point: Params | None = None  # None if the study's Optuna sampler proposes it
    attributes: Mapping[str, Any] = field(default_factory=dict)  # further user attributes of the trial


@dataclass(frozen=True)
class Evaluation:
    """A run, with its retry if there was one."""

    origin: FrozenTrial  # the first attempt
    last: FrozenTrial  # the last attempt, which counts
    deaths: int  # attempts whose process died
    axes: Axes  # of the search

    @cached_property
    def state(self) -> str:
        """The state of the run, as in :class:`StudyTrial`."""
        if self.last.state is TrialState.FAIL:
            return "failed" if self.deaths >= LIVES else "waiting"
        if self.last.state not in {TrialState.COMPLETE, TrialState.PRUNED}:
            return "running"
        if self.last.user_attrs.get(DIVERGED):
            return "diverged"
        return "complete" if self.last.state is TrialState.COMPLETE else "stopped"

    @property
    def finished(self) -> bool:
        """Whether the run has a result: it has a loss, diverged, or was pruned."""
        return self.state in {"complete", "diverged", "stopped"}

    @property
    def loss(self) -> float:
        """The loss of a run with a result: infinite if it diverged, predicted if it was pruned."""
        if self.state == "diverged":
            return math.inf
        return float(self.last.user_attrs[PREDICTED] if self.last.value is None else self.last.value)

    @property
    def rerun_for(self) -> str:
        """The label of the budget for which this run reruns or confirms a finalist; empty for other runs."""
        return str(self.origin.user_attrs.get(FINALIST, [""])[0])

    @property
    def finalist(self) -> int | None:
        """The index of the finalist that this run reruns."""
        index: int | None = self.origin.user_attrs.get(FINALIST, ["", None])[1]
        return index

    @property
    def began(self) -> float | None:
        """When the last attempt began, in Unix time."""
        return self.last.user_attrs.get(BEGAN)

    @property
    def ended(self) -> float | None:
        """When the last attempt ended or was found dead, in Unix time."""
        if ENDED in self.last.user_attrs or self.state == "running":
            return self.last.user_attrs.get(ENDED)
        return self.last.datetime_complete.timestamp() if self.last.datetime_complete else None

    @property
    def retry(self) -> TrialRequest:
        """The request that retries the run."""
        known = self.origin.user_attrs
        attributes = {RETRY_OF: self.origin.number}
        attributes |= {key: known[key] for key in (FINALIST, CONFIRMS) if key in known}
        return TrialRequest(
            self.record.purpose, f"retry:{self.last.number}", self.record.seed, dict(self.origin.params), attributes
        )

    @cached_property
    def record(self) -> StudyTrial:
        """This run as a StudyTrial, the form of study.json, with empty ``values`` (study.py adds them)."""
        ran, names = self.last.user_attrs, self.axes.start
        seconds, tokens = ran.get("seconds"), ran.get("tokens", 0)
        drawn = len(self.last.params) == len(names)
        return StudyTrial(
            number=self.last.number,
            state=self.state,
            loss=self.loss if self.state in {"complete", "stopped"} else None,
            values={},
            seconds=seconds,
            tokens_per_second=tokens / seconds if seconds else None,
            octaves=dict(zip(names, self.axes.octaves(self.last.params).tolist(), strict=True)) if drawn else None,
            purpose=str(ran.get(PURPOSE, "search")),
            confirms=bool(ran.get(CONFIRMS)),
            seed=int(ran.get(SEED, 0)),
            tokens=tokens,
            flops=float(ran.get("flops", 0.0)),
            curve=curve_of(ran.get("curve", ())),
            branches=curve_of(ran.get("branches", ())),
            worker=ran.get("worker"),
            ended=ran.get(ENDED),
        )


def runs_of(trials: Sequence[FrozenTrial], axes: Axes) -> list[Evaluation]:
    """Return the runs, ordered by the number of each run's first trial.

    Trials whose process died before all values were drawn, and trials without an owner (from another program), are
    left out.
    """
    jobs = jobs_of(trials)
    found = []
    for trial in sorted(trials, key=lambda trial: trial.number):
        job = trial.user_attrs.get(JOB)
        begins = job is None or (jobs[job] is trial and not job.startswith("retry:"))
        drawn = len(trial.params) == len(axes.start) or trial.state is TrialState.RUNNING
        if not (begins and drawn and OWNER in trial.user_attrs):
            continue
        last, deaths = trial, 0
        while last.state is TrialState.FAIL:
            deaths += not last.user_attrs.get(RELEASED, False)
            following = jobs.get(f"retry:{last.number}")
            if following is None:
                break
            last = following
        found.append(Evaluation(trial, last, deaths, axes))
    return found


def jobs_of(trials: Sequence[FrozenTrial]) -> dict[str, FrozenTrial]:
    """Return the trial of each job, by the name of the job.

    If two commands created a trial for the same job at once, the trial with the lowest number counts.
    """
    jobs: dict[str, FrozenTrial] = {}
    for trial in sorted(trials, key=lambda trial: trial.number):
        if JOB in trial.user_attrs:
            jobs.setdefault(trial.user_attrs[JOB], trial)
    return jobs


def records(runs: Sequence[Evaluation]) -> list[StudyTrial]:
    """Return the runs in the form of study.json."""
    return [run.record for run in runs]


def ended_runs(runs: Sequence[Evaluation]) -> list[Evaluation]:
    """Return the runs with a result, in the order in which they ended."""
    return sorted((run for run in runs if run.finished), key=lambda run: (run.ended or 0.0, run.last.number))


def points_and_losses(ended: Sequence[Evaluation], axes: Axes) -> tuple[Array, Array]:
    """Return the points (n, D) of runs with a result, in octaves, and their losses (n,)."""
    points = np.array([axes.octaves(run.last.params) for run in ended]).reshape(-1, len(axes.limits))
    return points, np.array([run.loss for run in ended])


def region_of(runs: Sequence[Evaluation], axes: Axes, noise: float | None = None) -> Region:
    """Return the trust region after the runs with a result."""
    ended = ended_runs(runs)
    return region(
        axes, *points_and_losses(ended, axes), noise, np.array([run.record.seed for run in ended], np.int64)
    )


class NothingFound(InputError):
    """The error of a search in which no run finished with a finite loss."""


def known_runs(axes: Axes, method: str, budget: Budget, noise: float | None = None) -> list[TrialRequest]:
    """Return the runs that are known before the search: those of the start and of a grid.

    Raises:
        InputError: if the smallest grid has more points than the budget has trials, or the budget has no number of
            trials.
    """
    repeats = next(times for least, times in REPEATS.items() if budget.size >= least) if noise is None else 1
    requests = [TrialRequest("noise" if k else "search", f"start:{k}", k, dict(axes.start)) for k in range(repeats)]
    if method == "grid":
        if budget.trials is None:
            raise InputError(
                "method grid: the number of trials decides how fine the grid is; give a number of trials"
            )
        points = grid(axes, budget.trials - budget.reserved() - repeats)
        requests += [TrialRequest("search", f"grid:{list(x.values())}", 0, x) for x in points if x != axes.start]
    return requests


def grid(axes: Axes, trials: int) -> list[Params]:
    """Return the points of the finest grid that has at most ``trials`` points, the points nearest to the start first.

    Raises:
        InputError: if even a grid of two points along each dimension has more than ``trials`` points.
    """
    numbers = int((axes.levels == 0).sum())
    chosen = math.prod(int(levels) for levels in axes.levels if levels)
    if 2**numbers * chosen > trials:
        least = f"2^{numbers}" if chosen == 1 else f"{2**numbers * chosen}"
        raise InputError(
            f"a grid over {len(axes.start)} hyperparameters has at least {least} points, but the budget is {trials} "
            "trials; search fewer hyperparameters, give more trials, or use another method"
        )
    fine = max(k for k in range(2, trials + 1) if k**numbers * chosen <= trials) if numbers else 2
    low, high = axes.box
    counts = [int(levels) or fine for levels in axes.levels]
    lines = [np.linspace(*ends) for ends in zip(low, high, counts, strict=True)]
    points = itertools.product(*lines)
    return [axes.params(np.array(x)) for x in sorted(points, key=lambda x: float(np.sum(np.square(x))))]


@dataclass
class SearchPlan:
    """The plan of a search: decides the next run from the runs so far."""

    axes: Axes
    method: str
    seed: int
    budget: Budget
    noise: float | None  # nats, the standard deviation between runs of one point, if the user gave it
    stop_at_noise: bool  # whether to stop when some rounds gained less than the noise
    # The last trust region, and the numbers of its trials.
    _known: tuple[list[int], Region] | None = field(default=None, init=False)

    def next(self, runs: Sequence[Evaluation], turn: int, now: float) -> TrialRequest | None:
        """Return the next run, or None if the search is complete or must wait for a running trial.

        ``turn`` is the index of the next proposal of the search.

        Raises:
            NothingFound: if every run has diverged or died.
        """
        states = [run.state for run in runs]
        if "waiting" in states:
            return runs[states.index("waiting")].retry
        ended, died = sum(run.finished for run in runs), states.count("failed")
        if "complete" not in states and (ended >= DIVERGENCES or (died >= DEATHS and not ended)):
            if "running" in states:
                return None
            raise NothingFound(self._nothing(runs))
        begun = {run.origin.user_attrs.get(JOB) for run in runs}
        for known in known_runs(self.axes, self.method, self.budget, self.noise):
            if known.name not in begun and self.budget.left(runs, now) >= 1:
                return known
        stored = [
            run.origin.user_attrs[FINAL]
            for run in runs
            if run.rerun_for == self.budget.label and FINAL in run.origin.user_attrs
        ]
        if not stored:
            trusts = self.method == "trust-region"  # an Optuna sampler proposes the points of other methods
            stalled = trusts and self.stop_at_noise and self._region(runs).stalled()
            if self._room(runs, now) and not stalled:
                point = None
                if trusts:
                    rng, last = np.random.default_rng([self.seed, turn]), not self._room(runs, now, more=2)
                    point = self.axes.params(self._region(runs).proposal(rng, last=last))
                return TrialRequest("search", f"search:{turn}", point=point)
            if "running" in states or not self._confirms(runs):
                return None
        few, each = stored[0] if stored else self.budget.finals(runs, now)
        request = self._rerun(runs, few, each, now)
        choosing = any(run.state == "running" and not run.record.confirms for run in runs)
        if request is None and not choosing:
            request = next((rerun for rerun in self._confirming(runs, now) if rerun.name not in begun), None)
        return request

    def _region(self, runs: Sequence[Evaluation]) -> Region:
        """Return the trust region, which is cached until another trial ends: with 2,000 trials of 90 values it takes
        seconds to compute."""
        numbers = [run.last.number for run in ended_runs(runs)]
        if self._known is None or self._known[0] != numbers:
            self._known = numbers, region_of(runs, self.axes, self.noise)
        return self._known[1]

    def _room(self, runs: Sequence[Evaluation], now: float, more: int = 1) -> bool:
        """Return whether the budget allows ``more`` runs besides those that are reserved for confirmation."""
        return self.budget.left(runs, now) >= more + (self.budget.reserved(runs, now) if self._confirms(runs) else 0)

    def _confirms(self, runs: Sequence[Evaluation]) -> bool:
        """Return whether to make runs with fresh seeds, because they may change the answer or measure its loss.

        The result is false if all runs diverged, if there is no noise, or if the best point is still the start. Under
        a small budget it is also false if the gain is accepted without such runs, or if the noise is unknown.
        """
        noise, _ = self.noise_of(runs)
        if noise == 0 or (any(run.finished for run in runs) and not any(run.state == "complete" for run in runs)):
            return False
        if self.method != "trust-region":
            return True
        if not self._region(runs).incumbent.any():
            return False
        return self.budget.size >= SMALL or (noise is not None and in_doubt(records(runs), self.axes, self.noise))

    def _rerun(self, runs: Sequence[Evaluation], few: int, each: int, now: float) -> TrialRequest | None:
        """Return the next run of a finalist with a fresh seed: ``few`` finalists get ``each`` runs.

        The next best point takes the place of a finalist that diverges. Return None if all these runs have been
        started, if the budget is used, or if there are no more points.
        """
        reruns: dict[int | None, list[Evaluation]] = {}
        for run in runs:
            if run.rerun_for == self.budget.label and not run.record.confirms:
                reruns.setdefault(run.finalist, []).append(run)
        sound, which = 0, 0
        while sound < few:
            mine = reruns.get(which, [])
            diverged = any(run.state in {"diverged", "stopped"} for run in mine)
            if len(mine) < each and not diverged:
                if self.budget.left(runs, now) < 1:
                    return None
                had = [run.origin.params for found in reruns.values() for run in found]
                points = [mine[0].origin.params] if mine else [x for x in self._finalists(runs) if x not in had]
                if not points:
                    return None
                others = [run for run in runs if run.rerun_for != self.budget.label or run.record.confirms]
                seed = _fresh(others, points[0], each)[len(mine)]
                attributes = {FINALIST: [self.budget.label, which]} | ({} if reruns else {FINAL: [few, each]})
                name = f"rerun:{self.budget.label}:{which}:{len(mine)}"
                return TrialRequest("rerun", name, seed, dict(points[0]), attributes)
            sound, which = sound + (not diverged), which + 1
        return None

    def _finalists(self, runs: Sequence[Evaluation]) -> list[Params]:
        """Return the points that may be finalists, the most promising first, without the start and pruned points."""
        trials = records(runs)
        excluded = [trial.octaves for trial in trials if trial.state == "stopped"]
        excluded.append(dict.fromkeys(self.axes.start, 0.0))
        points = finalists(trials, self.axes, self.noise, by_surrogate=self.method == "trust-region")
        if not points:
            raise NothingFound(self._nothing(runs))
        return [self.axes.params(np.array(list(point.values()))) for point in points if point not in excluded]

    def _confirming(self, runs: Sequence[Evaluation], now: float) -> Iterator[TrialRequest]:
        """Yield confirmation runs of the chosen point and of the start, with the same seeds for both."""
        point = to_confirm(records(runs), list(self.axes.start), self.noise_of(runs)[0])
        if point is None or self.budget.left(runs, now) < 1:
            return
        attributes = {FINALIST: [self.budget.label, None], CONFIRMS: True}
        others = [run for run in runs if not run.record.confirms]
        at, start = self.params_of(runs, point), dict(self.axes.start)
        for seed in _fresh(others, at, CONFIRMATIONS):
            yield TrialRequest("rerun", f"confirm:{list(point)}:{seed}", seed, at, attributes)
            if seed not in _seeds(others, start):
                yield TrialRequest("rerun", f"confirm:start:{seed}", seed, start, attributes)

    def noise_of(self, runs: Sequence[Evaluation]) -> tuple[float | None, int]:
        """Return the noise between runs of one point, and its degrees of freedom."""
        return noise_between_seeds(records(runs), list(self.axes.start), self.noise)

    def params_of(self, runs: Sequence[Evaluation], point: tuple[float, ...]) -> Params:
        """Return the log2 multipliers of the run at ``point``, which is in octaves."""
        return next(
            dict(run.last.params)
            for run in runs
            if run.finished and tuple(self.axes.octaves(run.last.params).tolist()) == point
        )

    def baseline(self, runs: Sequence[Evaluation], point: Mapping[str, float]) -> Baseline | None:
        """Return the best run so far, for pruning a run at ``point`` that falls behind its loss curve.

        Only runs with the same choices can be compared, because a choice (such as the schedule) changes the shape of
        the loss curve. Return None if there is no such run, or while too few runs measure the noise.
        """
        choices = [name for name, limits in self.axes.limits.items() if isinstance(limits, range)]
        noise, degrees = self.noise_of(runs)
        curves = [
            run
            for run in runs
            if run.state == "complete"
            and run.record.seed == 0
            and "curve" in run.last.user_attrs
            and all(run.origin.params.get(name) == point[name] for name in choices)
        ]
        if noise is None or degrees < SURE or not curves:
            return None
        best = min(curves, key=lambda run: run.loss)
        return Baseline(best.record.curve, best.loss, noise)

    def chosen(self, runs: Sequence[Evaluation]) -> Confirmation:
        """Return the best point of a search that has ended, and the losses of its runs.

        Raises:
            NothingFound: if no run finished.
        """
        found = best_point(records(runs), self.axes, self.noise, by_surrogate=self.method == "trust-region")
        if found is None:
            raise NothingFound(self._nothing(runs))
        return found

    def ended_early(self, runs: Sequence[Evaluation], now: float) -> bool:
        """Return whether a search that has ended, and was not stopped, has budget left: it stopped early because
        several rounds gained less than the noise."""
        return self._room([run for run in runs if run.rerun_for != self.budget.label], now)

    def _nothing(self, runs: Sequence[Evaluation]) -> str:
        """Return the reason why the search has no answer."""
        trials = records(runs)
        states = [trial.state for trial in trials]
        if "stopped" in states:
            return f"no run finished: {states.count('stopped')} were pruned, {states.count('diverged')} diverged"
        if "diverged" in states:
            named = [
                Dimension(name, 0.0, 0.0, 0.0, levels=("",) * n)
                for name, n in zip(self.axes.limits, self.axes.levels, strict=True)
            ]
            return advice_when_all_diverged(trials, named, "give a start at which the objective is finite")
        if "failed" in states:
            return f"no run ended: {states.count('failed')} died, each of them twice; possible cause: out of memory"
        return "stopped before any run ended; run it again to resume"


def _fresh(others: Sequence[Evaluation], point: Params, count: int) -> list[int]:
    """Return the ``count`` lowest seeds, from 1, with which ``point`` has not been run among the runs ``others``."""
    had = {0} | _seeds(others, point)
    return list(itertools.islice((k for k in itertools.count(1) if k not in had), count))


def _seeds(runs: Sequence[Evaluation], point: Params) -> set[int]:
    return {run.record.seed for run in runs if run.origin.params == point}
