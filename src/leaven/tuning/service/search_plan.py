"""Decide which trial of a search is next, from the budget and the trials so far (``stored_study.py``).

The next trial is the first of these that is still to do:

1. The retry of a trial whose process died or was stopped.
2. Trials of the start (the point of the recipe itself) with several seeds. They measure the noise: the standard
   deviation of the loss between seeds. In a grid search, the points of the grid follow.
3. Proposals of the search. They end when the rest of the budget is reserved for final trials, or when several rounds
   gained less than the noise.
4. Final trials of the best few points (the finalists), with fresh seeds. The first of them stores the number of
   finalists, so that all commands that run this search use the same number.
5. With several finalists: confirmation trials, which compare the best finalist with the start on the same seeds
   (``algorithm/answer.py``).
"""

import itertools
import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from leaven.errors import InputError, suggestion
from leaven.training.outcome import Baseline
from leaven.tuning.algorithm.answer import (
    CONFIRMATIONS,
    RERUNS,
    ChosenPoint,
    FittedTrials,
    advice_when_all_diverged,
    point_to_confirm,
)
from leaven.tuning.algorithm.noise import FEWEST_DEGREES, noise_between_seeds
from leaven.tuning.algorithm.trust_region import RESULTS, RISK, SPREADS, Axes, Region, loss_of, region, results
from leaven.tuning.service.stored_study import CONFIRMS, FINAL, FINALIST, Params, StoredTrial, TrialRequest
from leaven.tuning.service.study_settings import OPTIONS
from leaven.tuning.study_document import PRUNED, Dimension, covered

METHODS = ("trust-region", "random", "grid", "tpe", "cma", "gp")
# At most 1/12 of the trials should run at once, because they are proposed without knowing each other's losses. With
# more at once, the answer of a trust-region search of 48 trials is clearly worse (benchmarks/parallel_trials.py).
LEAST_ROUNDS = 12
TWO_AT_ONCE = 16  # trials: with so many, two at once were within two standard errors of one at a time
LONGEST = 512  # characters of a study's name in Optuna's tables
RESERVED = 1 / 8  # the largest share of the budget that is reserved for final trials
FEW = 24  # trials: a smaller budget has one final trial at most
# The final trials that a search may have, from cheap to expensive: (number of finalists, trials of each).
FINALS = ((0, 0), (1, 1), (1, RERUNS), (2, RERUNS), (3, RERUNS))
# Number of trials of the start: 3 if the budget has at least 24 trials, 2 if it has at least 12, otherwise 1. If the
# user gives the noise, there is 1.
REPEATS = {24: 3, 12: 2, 0: 1}
SMALL = 16  # trials: a smaller budget has no final trial, because a trial more of the search improves the answer more
# As long as no trial is complete, a search ends after DEATHS failed trials if no trial has a result, and after
# DIVERGENCES trials with a result.
DEATHS, DIVERGENCES = 8, 100
# The most points of a grid: ten times the trials of the largest searches that leaven is made for. All points are
# listed again for each trial, which takes 1 s with so many.
GRID_POINTS = 100_000
# The trust region is fitted again once this share of the trials is new: up to 2,000 trials after each of them. A fit
# to 10,000 trials of 8 values takes 0.05 s, which would be half the cost of a trial.
REFITTED = 1 / 1000


def most_at_once(trials: int) -> float:
    """Return how many of ``trials`` may run at once without making the search clearly worse."""
    return max(2 if trials >= TWO_AT_ONCE else 1, trials / LEAST_ROUNDS)


@dataclass(frozen=True)
class Budget:
    """The limits of a search, shared by all commands of a study. At a limit, no further trial starts."""

    trials: int | None = None  # number of trials, including final trials
    flops: float | None = None  # total FLOPs of all trials
    hours: float | None = None  # time during which at least one trial is active; parallel trials count once
    run_flops: float | None = None  # FLOPs of one trial; if None but needed, the first trial runs alone to measure it

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

    @cached_property
    def label(self) -> str:
        """The limits as text, such as "100 trials". Final trials store this text as ``StoredTrial.final_of``."""
        return ", ".join(f"{limit:g} {name}" for name, limit in self._given.items())

    @property
    def size(self) -> float:
        """The number of trials that the budget allows; infinite if unknown in advance."""
        flops = self.flops / self.run_flops if self.flops and self.run_flops else math.inf
        return min(self.trials or math.inf, flops)

    @property
    def _allowed(self) -> tuple[tuple[int, int], ...]:
        return FINALS[:2] if self.size < FEW else FINALS

    def finals(self, trials: Sequence[StoredTrial], now: float) -> tuple[int, int]:
        """Return (finalists, trials of each): the most expensive entry of ``FINALS`` that costs at most the share
        ``RESERVED`` of the budget, and at most what is left at ``now`` (Unix time)."""
        limits = self._limits(trials, now)
        affordable = min(min(RESERVED * limit, limit - used) / cost for limit, used, cost in limits)
        return max(final for final in self._allowed if final_trials(*final) <= max(affordable, 0))

    def reserved(self, trials: Sequence[StoredTrial] = (), now: float = 0.0) -> int:
        """Return how many trials are reserved as final trials: at most the share ``RESERVED`` of the budget."""
        affordable = min(RESERVED * limit / cost for limit, _, cost in self._limits(trials, now))
        costs = {final_trials(*final) for final in self._allowed}
        if {trial.final_of for trial in trials} - {"", self.label}:
            # An earlier, smaller budget had finalists, too. So there are several even if this budget adds only one.
            costs.add(final_trials(1, RERUNS) + 2 * CONFIRMATIONS)
        return max(cost for cost in costs if cost <= affordable)

    def left(self, trials: Sequence[StoredTrial], now: float) -> float:
        """Return how many more trials the budget allows, not rounded."""
        return min((limit - used) / cost for limit, used, cost in self._limits(trials, now))

    def _limits(self, trials: Sequence[StoredTrial], now: float) -> Iterator[tuple[float, float, float]]:
        """Yield (limit, amount used, cost of one trial) for each limit, in the unit of the limit."""
        if self.trials is not None:
            yield self.trials, len(trials), 1
        if self.flops is not None:
            spent = [trial.flops for trial in trials if trial.has_result]
            whole = [flops for flops in spent if flops > 0]
            if not whole and any(trial.state == "complete" for trial in trials):
                raise InputError(
                    "the budget is in FLOPs, but the objective returns no FLOPs; set the budget in trials or hours"
                )
            cost = max([*whole, self.run_flops or 0.0]) or self.flops
            # The FLOPs of a trial whose process died are unknown, and may be as many as those of one with a result.
            yield self.flops, sum(spent) + cost * sum(not trial.has_result for trial in trials), cost
        if self.hours is not None:
            hours = busy(trials, now) / 3600
            yield self.hours, hours, max(hours / max(len(trials), 1), 1e-300)


def final_trials(finalists: int, each: int) -> int:
    """Return the number of final trials: ``each`` of every finalist, and confirmation trials of several."""
    return finalists * each + (2 * CONFIRMATIONS if finalists > 1 else 0)  # 2: the chosen point and the start


def busy(trials: Sequence[StoredTrial], now: float) -> float:
    """Return the seconds in which at least one trial was active, up to ``now`` (Unix time)."""
    return covered((began, now if end is None else end) for trial in trials for began, end in trial.spans)


class NothingFound(InputError):
    """Raised if no trial of a search finished with a finite loss."""


def by_surrogate(method: str) -> bool:
    """Return whether a search method uses leaven's surrogate, a quadratic model of the loss."""
    return method == "trust-region"


def check_search(method: str, axes: Axes, name: str) -> None:
    """Raise InputError if ``name`` or ``method`` is invalid, or ``method`` cannot use the priors in ``axes``."""
    if method not in METHODS:
        hint = suggestion(str(method), METHODS, f"choose from {', '.join(METHODS)}")
        raise InputError(f"method {method!s:.60}: unknown; {hint}")
    if not by_surrogate(method) and (axes.expected or axes.earlier):
        raise InputError(
            f"method {method} uses no knowledge from before the search; leave {' and '.join(OPTIONS.values())} out, "
            "or use method trust-region"
        )
    if not (isinstance(name, str) and 0 < len(name) <= LONGEST):
        raise InputError(f"the study's name is {name!r:.60}; give a name of 1 to {LONGEST} characters")


def known_trials(axes: Axes, method: str, budget: Budget, noise: float | None = None) -> list[TrialRequest]:
    """Return the trials that do not depend on losses: at the start point and, for method ``grid``, at grid points.
    For a grid, raise InputError if the budget has no number of trials, or if it is too small or too large."""
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
    """Return the points of the finest grid with at most ``trials`` points. Points near the start come first.
    Raise InputError if even the coarsest grid is larger, or if this grid has more than ``GRID_POINTS`` points."""
    numbers = int((axes.levels == 0).sum())
    chosen = math.prod(int(levels) for levels in axes.levels if levels)
    if 2**numbers * chosen > trials:
        least = f"2^{numbers}" if chosen == 1 else f"{2**numbers * chosen}"
        raise InputError(
            f"a grid over {len(axes.start)} hyperparameters has at least {least} points, but the budget leaves "
            f"{trials} trials for it; search fewer hyperparameters, give more trials, or use another method"
        )
    # The integer root of the points. One level more than a grid may have is enough to refuse an even finer grid.
    levels = range(min(trials, GRID_POINTS + 1) + 1)
    fine = bisect_right(levels, trials // chosen, key=lambda k: k**numbers) - 1 if numbers else 2
    if fine**numbers * chosen > GRID_POINTS:
        raise InputError(
            f"the grid has more than {GRID_POINTS:,} points; give at most {GRID_POINTS:_} trials, search fewer "
            "hyperparameters, or use another method"
        )
    low, high = axes.box
    counts = [int(levels) or fine for levels in axes.levels]
    lines = [np.linspace(*ends) for ends in zip(low, high, counts, strict=True)]
    points = itertools.product(*lines)
    return [axes.params(np.array(x)) for x in sorted(points, key=lambda x: float(np.sum(np.square(x))))]


@dataclass
class SearchPlan:
    axes: Axes
    method: str
    seed: int
    budget: Budget
    noise: float | None  # nats, the standard deviation between trials of one point, if known before the search
    stop_at_noise: bool  # whether to stop when several rounds gained less than the noise
    # The last trust region, with the number of results from which it was computed. Results never change or disappear,
    # so an equal number means the same results.
    _known: tuple[int, Region] | None = field(default=None, init=False)

    @property
    def by_surrogate(self) -> bool:
        return by_surrogate(self.method)

    def next(self, trials: Sequence[StoredTrial], turn: int, now: float) -> TrialRequest | None:
        """Return the next trial, or None if the search is complete or must wait for a running trial. ``turn`` is the
        number of trials started so far, without retries. ``now`` is the Unix time."""
        states = [trial.state for trial in trials]
        if "waiting" in states:
            return trials[states.index("waiting")].retry
        ended, died = _ended(trials), states.count("failed")
        if "complete" not in states and (ended >= DIVERGENCES or (died >= DEATHS and not ended)):
            return None
        begun = {trial.job for trial in trials}
        for known in known_trials(self.axes, self.method, self.budget, self.noise):
            if known.job not in begun and self.budget.left(trials, now) >= 1:
                return known
        stored = [trial.finals for trial in trials if trial.final_of == self.budget.label and trial.finals]
        if not stored:
            stalled = self.by_surrogate and self.stop_at_noise and self._region(trials).stalled()
            room = self._room(trials, now)
            if room >= 1 and not stalled:
                point = self._proposed_point(trials, turn, last=room < 2) if self.by_surrogate else None
                if point is not None or not self.by_surrogate:
                    return TrialRequest("search", f"search:{turn}", point=point)
            if "running" in states or not self._needs_final_trials(trials):
                return None
        finalists, each = stored[0] if stored else self.budget.finals(trials, now)
        request = self._final_trial(trials, finalists, each, now)
        choosing = any(trial.state == "running" and not trial.confirms for trial in trials)
        if request is None and not choosing:
            request = next((each for each in self._confirmation_trials(trials, now) if each.job not in begun), None)
        return request

    def _proposed_point(self, trials: Sequence[StoredTrial], turn: int, *, last: bool) -> Params | None:
        """Return the point of the next trial, or None if all points of a finite space have been run. ``turn``, its
        number, seeds the random choices. The ``last`` trial of a search runs the lowest predicted loss."""
        region = self._region(trials)
        rng, tried = np.random.default_rng([self.seed, turn]), _searched(trials)
        point = self.axes.params(region.proposal(rng, last=last))
        if last and point in tried:  # too few trials for a prediction; running the point again would be useless
            point = self.axes.params(region.proposal(rng))
        for spread in SPREADS if (self.axes.levels == 0).any() else ():
            if point not in tried:
                break
            moved = region.proposal(rng) + spread * rng.normal(size=len(self.axes.levels)) * (self.axes.levels == 0)
            point = self.axes.params(np.clip(moved, region.low, region.high))
        new = self.axes.not_in(tried, point)

        def rank(params: Params) -> tuple[bool, float]:
            x = self.axes.octaves(params)[None]
            return bool(region.risk(x)[0] > RISK), float(region.belief(x)[0])

        return min(new, key=rank, default=None)

    def _region(self, trials: Sequence[StoredTrial]) -> Region:
        count = _ended(trials)
        count -= count % max(int(REFITTED * count), 1)
        if self._known is None or self._known[0] != count:
            ended, points, losses = results(trials, self.axes)
            seeds = np.array([trial.seed for trial in ended], np.int64)
            used = slice(count)
            self._known = count, region(self.axes, points[used], losses[used], self.noise, seeds[used])
        return self._known[1]

    def _fitted(self, trials: Sequence[StoredTrial]) -> FittedTrials:
        return FittedTrials.of(trials, self.axes, self.noise)

    def _room(self, trials: Sequence[StoredTrial], now: float) -> float:
        """Return the number of trials left in the budget, minus those reserved for the end. It may be a fraction."""
        reserved = self.budget.reserved(trials, now) if self._needs_final_trials(trials) else 0
        return self.budget.left(trials, now) - reserved

    def _needs_final_trials(self, trials: Sequence[StoredTrial]) -> bool:
        noise, _ = self.noise_of(trials)
        states = {trial.state for trial in trials}
        if noise == 0 or ("complete" not in states and states.intersection(RESULTS)):
            return False
        if not self.by_surrogate:
            return True
        return self.budget.size >= SMALL

    def _final_trial(self, trials: Sequence[StoredTrial], count: int, each: int, now: float) -> TrialRequest | None:
        """Return the next final trial, or None. ``count`` finalists get ``each`` trials apiece."""
        reruns: dict[int | None, list[StoredTrial]] = {}
        for trial in trials:
            if trial.final_of == self.budget.label and not trial.confirms:
                reruns.setdefault(trial.finalist, []).append(trial)
        sound, which = 0, 0
        while sound < count:
            mine = reruns.get(which, [])
            diverged = any(trial.state in {"diverged", PRUNED} for trial in mine)
            if len(mine) < each and not diverged:
                if self.budget.left(trials, now) < 1:
                    return None
                had = [trial.params for found in reruns.values() for trial in found]
                points = [mine[0].params] if mine else [x for x in self._finalists(trials) if x not in had]
                if not points:
                    return None
                others = [trial for trial in trials if trial.final_of != self.budget.label or trial.confirms]
                seed = _fresh(others, points[0], each)[len(mine)]
                attributes = {FINALIST: [self.budget.label, which]} | ({} if reruns else {FINAL: [count, each]})
                name = f"rerun:{self.budget.label}:{which}:{len(mine)}"
                return TrialRequest("rerun", name, seed, dict(points[0]), attributes)
            sound, which = sound + (not diverged), which + 1
        return None

    def _finalists(self, trials: Sequence[StoredTrial]) -> list[Params]:
        """Return the candidates for final trials, the best first, without the start point and pruned points."""
        excluded = {tuple((trial.octaves or {}).values()) for trial in trials if trial.state == PRUNED}
        excluded.add((0.0,) * len(self.axes.start))
        points = self._fitted(trials).finalists(by_surrogate=self.by_surrogate)
        if self.axes.whole:  # after rounding, two points may be the same
            points = list(
                dict.fromkeys(tuple(self.axes.octaves(self.axes.params(np.array(x))).tolist()) for x in points)
            )
        return [self.axes.params(np.array(point)) for point in points if point not in excluded]

    def _confirmation_trials(self, trials: Sequence[StoredTrial], now: float) -> Iterator[TrialRequest]:
        """Yield the trials that compare the best finalist with the start of the search, on the same seeds."""
        point = point_to_confirm(trials, list(self.axes.start))
        if point is None or self.budget.left(trials, now) < 1:
            return
        attributes = {FINALIST: [self.budget.label, None], CONFIRMS: True}
        others = [trial for trial in trials if not trial.confirms]
        at, start = self.params_of(trials, point), dict(self.axes.start)
        for seed in _fresh(others, at, CONFIRMATIONS):
            yield TrialRequest("rerun", f"confirm:{list(point)}:{seed}", seed, at, attributes)
            if seed not in _seeds(others, start):
                yield TrialRequest("rerun", f"confirm:start:{seed}", seed, start, attributes)

    def noise_of(self, trials: Sequence[StoredTrial]) -> tuple[float | None, int]:
        """Return the noise between seeds, or None if unknown, and its degrees of freedom."""
        return noise_between_seeds(trials, list(self.axes.start), self.noise)

    def params_of(self, trials: Sequence[StoredTrial], point: tuple[float, ...]) -> Params:
        """Return the log2 multipliers, by name, of the first trial with a result at ``point`` (octaves). There must
        be one."""
        return next(
            dict(trial.params)
            for trial in trials
            if trial.has_result and tuple((trial.octaves or {}).values()) == point
        )

    def baseline(self, trials: Sequence[StoredTrial], point: Mapping[str, float]) -> Baseline | None:
        """Return what pruning compares a new trial at ``point`` with, or None if it must not be pruned: the best
        completed trial with the same categorical values, because these change the curve."""
        choices = [name for name, limits in self.axes.limits.items() if isinstance(limits, range)]
        noise, degrees = self.noise_of(trials)
        curves = [
            trial
            for trial in trials
            if trial.state == "complete"
            and trial.seed == 0
            and trial.curve
            and all(trial.params.get(name) == point[name] for name in choices)
        ]
        if noise is None or degrees < FEWEST_DEGREES or not curves:
            return None
        best = min(curves, key=loss_of)
        return Baseline(best.curve, loss_of(best), noise)

    def chosen(self, trials: Sequence[StoredTrial]) -> ChosenPoint | None:
        """Return the point that a search chooses at its end (perhaps its start), or None."""
        return self._fitted(trials).chosen(by_surrogate=self.by_surrogate)

    def ended_early(self, trials: Sequence[StoredTrial], now: float) -> bool:
        """Return whether a search that was not stopped ended because its last rounds gained less than the noise: it
        still has untried points, and budget for another trial before the final trials."""
        # A plan without a cache, because these are other results.
        room = replace(self)._room([trial for trial in trials if trial.final_of != self.budget.label], now)
        return room >= 1 and bool(self.axes.not_in(_searched(trials), self.axes.start))

    def why_nothing(self, trials: Sequence[StoredTrial]) -> str:
        states = [trial.state for trial in trials]
        if PRUNED in states:
            return f"no trial finished: {states.count(PRUNED)} were pruned, {states.count('diverged')} diverged"
        if "diverged" in states:
            named = [
                Dimension(name, 0.0, 0.0, 0.0, levels=("",) * n)
                for name, n in zip(self.axes.limits, self.axes.levels, strict=True)
            ]
            return advice_when_all_diverged(trials, named, "give a start at which the objective is finite")
        if "failed" in states:
            return f"no trial ended: {states.count('failed')} died at every attempt; possible cause: out of memory"
        return "stopped before any trial ended; run it again to resume"


def _ended(trials: Sequence[StoredTrial]) -> int:
    return sum(trial.has_result for trial in trials)


def _searched(trials: Sequence[StoredTrial]) -> list[Params]:
    """Return the points of all trials with seed 0, in any state: the start, and those that the search proposed."""
    return [trial.params for trial in trials if trial.seed == 0]


def _fresh(others: Sequence[StoredTrial], point: Params, count: int) -> list[int]:
    """Return the ``count`` lowest seeds above 0 that no trial of ``others`` has used at ``point``."""
    had = {0} | _seeds(others, point)
    return list(itertools.islice((k for k in itertools.count(1) if k not in had), count))


def _seeds(trials: Sequence[StoredTrial], point: Params) -> set[int]:
    return {trial.seed for trial in trials if trial.params == point}
