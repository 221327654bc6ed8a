"""The next run of a search, as a function of the runs so far.

1. Runs whose process died are retried.
2. The starting point is run with several seeds, which measures the noise. A grid search then runs its points.
3. The search proposes points until only the part of the budget that is reserved for confirmation is left, or until
   several rounds gained less than the noise.
4. When the search is over, the best few points (the finalists) are run again with fresh seeds. The first of these
   trials stores the list of finalists, which all commands use.
5. The best finalist and the start are run again to confirm the gain (confirmation.py).
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import optuna

from leaven.recipe.errors import InputError
from leaven.training.outcome import Baseline, curve_of
from leaven.tuning.algorithm.answer import advice_when_all_diverged, best_point, finalists, in_doubt
from leaven.tuning.algorithm.confirmation import (
    CONFIRMATIONS,
    RERUNS,
    Confirmation,
    noise_between_seeds,
    to_confirm,
)
from leaven.tuning.algorithm.trust_region import Axes, Region, region
from leaven.tuning.service.samplers import grid
from leaven.tuning.service.trial_log import (
    BEGAN,
    CONFIRMS,
    ENDED,
    FINAL,
    FINALIST,
    JOB,
    Evaluation,
    TrialRequest,
    finished,
    loss_of,
    points_and_losses,
    seed_of,
)
from leaven.tuning.study_document import Dimension, StudyTrial, covered

REPEATS = {24: 3, 12: 2, 0: 1}  # runs of the start by the least budget, unless the noise is given
SMALL = 16  # runs: a smaller budget confirms only a gain that would not be accepted otherwise
SURE = 2  # least degrees of freedom of the noise before runs are pruned
DEATHS, DIVERGENCES = 8, 100  # the search ends after so many without a finished run

RESERVED = 1 / 8  # the largest share of the budget that is reserved for confirmation (confirmation.py)
FEW = 24  # runs: a smaller budget runs one finalist once
# (points that are run again with fresh seeds, runs of each): the forms of a confirmation, from cheap to expensive
FINALS = ((0, 0), (1, 1), (1, RERUNS), (2, RERUNS), (3, RERUNS))

Point = dict[str, float]


@dataclass(frozen=True)
class Budget:
    """The limits of a search, which all commands of a study share. The search ends when the first of the limits is
    reached; trials that are running then are finished."""

    trials: int | None = None  # runs of any purpose
    flops: float | None = None  # FLOPs of all runs
    hours: float | None = None  # in which at least one run was active: pauses do not count, parallel runs count once
    run_flops: float | None = None  # FLOPs of one run; if unknown, the first run starts alone: it may use everything

    def __post_init__(self) -> None:
        if not self._given:
            raise InputError("the search has no budget; give trials, flops or hours")
        for name, limit in self._given.items():
            if not 0 < limit < math.inf:
                raise InputError(f"{name} = {limit}: give a finite number above 0")

    @property
    def _given(self) -> dict[str, float]:
        limits = {"trials": self.trials, "flops": self.flops, "hours": self.hours}
        return {name: limit for name, limit in limits.items() if limit is not None}

    @property
    def label(self) -> str:
        """A text that distinguishes the confirmation runs of this budget from the runs of a later, larger budget."""
        return ", ".join(f"{limit:g} {name}" for name, limit in self._given.items())

    @property
    def size(self) -> float:
        """The number of runs that the budget allows, or infinity if that is not known before the first run."""
        flops = self.flops / self.run_flops if self.flops and self.run_flops else math.inf
        return min(self.trials or math.inf, flops)

    def finals(self, runs: Sequence[Evaluation], now: float) -> tuple[int, int]:
        """Return how many finalists to run again, and how many times each.

        It is the most expensive form of a confirmation that both the reserved and the remaining budget allow.
        """
        affordable = min(min(RESERVED * limit, limit - used) / cost for limit, used, cost in self._limits(runs, now))
        return max(final for final in self._finals if runs_to_confirm(*final) <= max(affordable, 0))

    @property
    def _finals(self) -> tuple[tuple[int, int], ...]:
        return FINALS[:2] if self.size < FEW else FINALS

    def reserved(self, runs: Sequence[Evaluation] = (), now: float = 0.0) -> int:
        """Return how many runs are reserved for confirmation."""
        affordable = min(RESERVED * limit / cost for limit, _, cost in self._limits(runs, now))
        costs = {runs_to_confirm(*final) for final in self._finals}
        if any(run.origin.user_attrs.get(FINALIST, [self.label])[0] != self.label for run in runs):
            costs.add(
                runs_to_confirm(1, RERUNS) + 2 * CONFIRMATIONS
            )  # beside those that a smaller budget has confirmed
        return max(cost for cost in costs if cost <= affordable)

    def left(self, runs: Sequence[Evaluation], now: float) -> float:
        """Return how many more runs the budget allows."""
        return min((limit - used) / cost for limit, used, cost in self._limits(runs, now))

    def _limits(self, runs: Sequence[Evaluation], now: float) -> Iterator[tuple[float, float, float]]:
        """Yield for each limit: the limit, how much of it is used, and how much of it one run costs."""
        if self.trials is not None:
            yield self.trials, len(runs), 1
        if self.flops is not None:
            spent = [float(run.last.user_attrs.get("flops", 0.0)) for run in runs if run.finished]
            whole = [flops for flops in spent if flops > 0]
            if not whole and any(run.complete for run in runs):
                raise InputError(
                    "the budget is in FLOPs, but the objective returns no FLOPs; set the budget in trials or hours"
                )
            cost = max([*whole, self.run_flops or 0.0]) or self.flops
            # A run that died has no count of FLOPs and may have cost as much as one that finished.
            yield self.flops, sum(spent) + cost * sum(not run.finished for run in runs), cost
        if self.hours is not None:
            hours = busy(runs, now) / 3600
            yield self.hours, hours, max(hours / max(len(runs), 1), 1e-300)


def runs_to_confirm(finalists: int, each: int) -> int:
    """Return how many runs it takes to rerun the finalists, ``each`` times every one, and to confirm the best of
    them."""
    return finalists * each + (2 * CONFIRMATIONS if finalists > 1 else 0)  # of the chosen point and of the start


def busy(runs: Sequence[Evaluation], now: float) -> float:
    """Return the seconds in which at least one run was active. A run without an end counts until ``now``."""

    def end(run: Evaluation) -> float:
        died = run.last.datetime_complete
        return now if run.running or died is None else died.timestamp()

    began = [run for run in runs if BEGAN in run.last.user_attrs]
    return covered((run.last.user_attrs[BEGAN], float(run.last.user_attrs.get(ENDED, end(run)))) for run in began)


class NothingFound(InputError):
    """The error of a search in which no run finished with a finite loss."""


def known_runs(axes: Axes, method: str, budget: Budget, noise: float | None = None) -> list[TrialRequest]:
    """Return the runs whose points are known before the search: runs of the start and of a grid.

    Raises:
        InputError: if the grid has more points than the budget has trials, or the budget has no number of trials.
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


@dataclass
class SearchPlan:
    """The plan of a search, which decides the next run from the runs so far."""

    study: optuna.Study
    axes: Axes
    method: str
    seed: int
    budget: Budget
    noise: float | None  # nats between runs of one point, if the user has given it
    stop_at_noise: bool  # whether to stop when some rounds gained less than the noise
    _known: tuple[list[int], Region] | None = field(default=None, init=False)  # the last trust region

    def next(self, runs: Sequence[Evaluation], turn: int, now: float) -> TrialRequest | None:
        """Return the next run, or None if the search is complete or must wait for a running trial.

        ``turn`` is the index of the next proposal of the search.

        Raises:
            NothingFound: if every run has diverged or died.
        """
        for run in runs:
            if run.lost:
                return run.retry
        ended, died = sum(run.finished for run in runs), sum(run.failed for run in runs)
        if not any(run.complete for run in runs) and (ended >= DIVERGENCES or (died >= DEATHS and not ended)):
            if any(run.running for run in runs):
                return None
            raise NothingFound(self._nothing(runs))
        begun = {run.origin.user_attrs.get(JOB) for run in runs}
        for known in known_runs(self.axes, self.method, self.budget, self.noise):
            if known.name not in begun and self.budget.left(runs, now) >= 1:
                return known
        final = next((stored for run in runs if (stored := self._final(run)) is not None), None)
        if final is None:
            if self._room(runs, now) and not self._stalled():
                return TrialRequest("search", f"search:{turn}", point=self._proposal(turn, runs, now))
            if any(run.running for run in runs) or not self._confirms(runs):
                return None
            final = self.budget.finals(runs, now)
        request = self._rerun(runs, *final, now)
        choosing = any(run.running and not run.origin.user_attrs.get(CONFIRMS) for run in runs)
        if request is None and not choosing:
            request = next((rerun for rerun in self._confirming(runs, now) if rerun.name not in begun), None)
        return request

    def _proposal(self, turn: int, runs: Sequence[Evaluation], now: float) -> Point | None:
        """Return the trust region's proposal, or None for other methods, whose points an Optuna sampler proposes."""
        if self.method != "trust-region":
            return None
        rng, last = np.random.default_rng([self.seed, turn]), not self._room(runs, now, more=2)
        return self.axes.params(self._region().proposal(rng, last=last))

    def _region(self) -> Region:
        """Return the trust region after the finished trials.

        The region is cached until another trial ends. Every free worker needs it, and after 2,000 trials of 90 values
        it takes seconds to compute.
        """
        trials = finished(self.study)
        numbers = [trial.number for trial in trials]
        if self._known is None or self._known[0] != numbers:
            self._known = numbers, region_of(self.study, self.axes, self.noise)
        return self._known[1]

    def _room(self, runs: Sequence[Evaluation], now: float, more: int = 1) -> bool:
        """Return whether the budget allows ``more`` runs of the search."""
        return self.budget.left(runs, now) >= more + (self.budget.reserved(runs, now) if self._confirms(runs) else 0)

    def _confirms(self, runs: Sequence[Evaluation]) -> bool:
        """Return whether to make runs with fresh seeds, because they may change the answer or measure its loss.

        They are of no use if all runs diverged, if there is no noise, or if the trust region is still at the start. A
        small budget is not spent on them if the gain is accepted without them, or if the noise is unknown.
        """
        noise, _ = self.noise_of(runs)
        if noise == 0 or (any(run.finished for run in runs) and not any(run.complete for run in runs)):
            return False
        if self.method != "trust-region":
            return True
        if not self._region().incumbent.any():
            return False
        return self.budget.size >= SMALL or (
            noise is not None and in_doubt(self._records(runs), self.axes, self.noise)
        )

    def _stalled(self) -> bool:
        """Return whether the search stops early, because the trust region has stalled."""
        return self.stop_at_noise and self.method == "trust-region" and self._region().stalled()

    def _is_rerun(self, run: Evaluation) -> bool:
        """Return whether a run is a rerun or confirmation of a finalist of this budget."""
        return bool(run.origin.user_attrs.get(FINALIST, [""])[0] == self.budget.label)

    def _final(self, run: Evaluation) -> tuple[int, int] | None:
        """Return the number of finalists, and how many times each is run, if this run stores them. Otherwise return
        None. The first rerun of a finalist stores them."""
        stored = run.origin.user_attrs.get(FINAL) if self._is_rerun(run) else None
        return None if stored is None else (stored[0], stored[1])

    def _rerun(self, runs: Sequence[Evaluation], few: int, each: int, now: float) -> TrialRequest | None:
        """Return the next run of a finalist with a fresh seed. There are ``few`` finalists with ``each`` runs.

        A finalist that diverges cannot be the answer, and the next best point takes its place. Return None if all
        runs have been started, if the budget is used, or if there are no more points.
        """
        confirming = [run for run in runs if run.origin.user_attrs.get(CONFIRMS)]
        reruns: dict[int, list[Evaluation]] = {}
        for run in runs:
            if self._is_rerun(run) and run not in confirming:
                reruns.setdefault(run.origin.user_attrs[FINALIST][1], []).append(run)
        sound, which = 0, 0
        while sound < few:
            mine = reruns.get(which, [])
            diverged = any(run.finished and not run.complete for run in mine)
            if len(mine) < each and not diverged:
                if self.budget.left(runs, now) < 1:
                    return None
                had = [run.origin.params for found in reruns.values() for run in found]
                points = [mine[0].origin.params] if mine else [x for x in self._finalists(runs) if x not in had]
                if not points:
                    return None
                others = [run for run in runs if not self._is_rerun(run)] + confirming
                seed = _fresh(others, points[0], each)[len(mine)]
                attributes: tuple[tuple[str, object], ...] = ((FINALIST, [self.budget.label, which]),)
                if not reruns:
                    attributes += ((FINAL, [few, each]),)
                name = f"rerun:{self.budget.label}:{which}:{len(mine)}"
                return TrialRequest("rerun", name, seed, dict(points[0]), attributes)
            sound, which = sound + (not diverged), which + 1
        return None

    def _finalists(self, runs: Sequence[Evaluation]) -> list[Point]:
        """Return the log2 multipliers of the points that may be finalists, the most promising first.

        Pruned trials are left out, and the start is too, because it has been run with several seeds already.
        """
        trials, by_surrogate = self._records(runs), self.method == "trust-region"
        excluded = [trial.octaves for trial in trials if trial.state == "stopped"]
        excluded.append(dict.fromkeys(self.axes.start, 0.0))
        points = finalists(trials, self.axes, self.noise, by_surrogate=by_surrogate)
        if not points:
            raise NothingFound(self._nothing(runs))
        return [self.axes.params(np.array(list(point.values()))) for point in points if point not in excluded]

    def _confirming(self, runs: Sequence[Evaluation], now: float) -> Iterator[TrialRequest]:
        """Yield confirmation runs of the chosen point and of the start, with the same seeds for both."""
        point = to_confirm(self._records(runs), list(self.axes.start), self.noise_of(runs)[0])
        if point is None or self.budget.left(runs, now) < 1:
            return
        attributes: tuple[tuple[str, object], ...] = ((FINALIST, [self.budget.label, None]), (CONFIRMS, True))
        others = [run for run in runs if not run.origin.user_attrs.get(CONFIRMS)]
        at, start = self.params_of(runs, point), dict(self.axes.start)
        for seed in _fresh(others, at, CONFIRMATIONS):
            yield TrialRequest("rerun", f"confirm:{list(point)}:{seed}", seed, at, attributes)
            if seed not in _seeds(others, start):
                yield TrialRequest("rerun", f"confirm:start:{seed}", seed, start, attributes)

    def noise_of(self, runs: Sequence[Evaluation]) -> tuple[float | None, int]:
        """Return the noise between runs of one point, and its degrees of freedom."""
        return noise_between_seeds(self._records(runs), list(self.axes.start), self.noise)

    def _records(self, runs: Sequence[Evaluation]) -> list[StudyTrial]:
        return [run.record(self.axes) for run in runs]

    def params_of(self, runs: Sequence[Evaluation], point: tuple[float, ...]) -> Point:
        """Return the log2 multipliers with which a point, given in octaves, was run."""
        return next(
            dict(run.last.params)
            for run in runs
            if run.finished and tuple(self.axes.octaves(run.last.params).tolist()) == point
        )

    def baseline(self, runs: Sequence[Evaluation], point: Mapping[str, float]) -> Baseline | None:
        """Return the best run so far, with which a run at ``point`` is compared in order to prune it.

        Only runs with the same choices can be compared, because a choice (such as the schedule) changes the shape of
        the loss curve. Return None if there is no such run, or while the noise is not known well enough.
        """
        choices = [name for name, limits in self.axes.limits.items() if isinstance(limits, range)]
        noise, degrees = self.noise_of(runs)
        alike = (run for run in runs if all(run.origin.params.get(name) == point[name] for name in choices))
        ended = [run.last for run in alike if run.complete and seed_of(run.origin) == 0]
        curves = [trial for trial in ended if "curve" in trial.user_attrs]
        if noise is None or degrees < SURE or not curves:
            return None
        best = min(curves, key=loss_of)
        return Baseline(curve_of(best.user_attrs["curve"]), loss_of(best), noise)

    def chosen(self, runs: Sequence[Evaluation]) -> Confirmation:
        """Return the best point of a search that has ended, and the losses of its runs.

        Raises:
            NothingFound: if no run finished.
        """
        found = best_point(self._records(runs), self.axes, self.noise, by_surrogate=self.method == "trust-region")
        if found is None:
            raise NothingFound(self._nothing(runs))
        return found

    def ended_early(self, runs: Sequence[Evaluation], now: float) -> bool:
        """Return whether the search ended with budget left, because several rounds gained less than the noise.

        The result is right only if the user did not stop the search.
        """
        return self._room([run for run in runs if not self._is_rerun(run)], now)

    def _nothing(self, runs: Sequence[Evaluation]) -> str:
        """Return the reason why the search has no answer."""
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


def region_of(study: optuna.Study, axes: Axes, noise: float | None = None) -> Region:
    """Return the trust region after the finished trials of a study."""
    trials = finished(study)
    seeds = np.array([seed_of(trial) for trial in trials], np.int64)
    return region(axes, *points_and_losses(trials, axes), noise, seeds)


def _fresh(others: Sequence[Evaluation], point: Point, count: int) -> list[int]:
    """Return the ``count`` lowest seeds, from 1, with which ``point`` has not been run among the runs ``others``."""
    had = {0} | _seeds(others, point)
    return list(itertools.islice((k for k in itertools.count(1) if k not in had), count))


def _seeds(runs: Sequence[Evaluation], point: Point) -> set[int]:
    return {seed_of(run.origin) for run in runs if run.origin.params == point}
