"""The trial log: read the runs of a study from its store, and compute how much of the budget they used.

Each trial is created with its owner and its ``job``, a name for the work it does. There is no queue: the next job
follows from the existing trials, so a crash cannot lose it. If two commands create a trial for the same job at once,
the trial with the lower number runs and the other is a duplicate; every Optuna store numbers trials in order.

A run whose process died is retried once, by a trial with the job ``retry:NUMBER``. If the retry dies too, the run has
failed. A trial that its owner released (Ctrl-C) does not count as dead.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from leaven.recipe.errors import InputError
from leaven.training.outcome import curve_of
from leaven.tuning.algorithm.confirmation import CONFIRMATIONS, RERUNS
from leaven.tuning.algorithm.trust_region import Array, Axes
from leaven.tuning.study_document import StudyTrial, covered

# User attributes of a trial, next to the fields of an Outcome.
PURPOSE, SEED, RETRY_OF, FINALIST, DIVERGED = "purpose", "seed", "retry_of", "finalist", "diverged"
OWNER, JOB, FINAL, RELEASED, CONFIRMS = "owner", "job", "final", "released", "confirms"
BEGAN, ENDED = "began", "ended"  # Unix time by the owner's clock, seconds
EXPECTED = "expected"  # the predicted final loss of a pruned trial
LIVES = 2  # attempts of a run whose process dies
RESERVED = 1 / 8  # the largest share of the budget that is reserved for confirmation (confirmation.py)
FEW = 24  # runs: a smaller budget runs one finalist once
# (points that are run again with fresh seeds, runs of each): the forms of a confirmation, from cheap to expensive
FINALS = ((0, 0), (1, 1), (1, RERUNS), (2, RERUNS), (3, RERUNS))


@dataclass(frozen=True)
class TrialRequest:
    """A run to start."""

    purpose: str  # search | noise | rerun
    name: str  # name of the job
    seed: int = 0
    point: dict[str, float] | None = None  # log2 multipliers; None if the study's Optuna sampler proposes them
    attributes: tuple[tuple[str, Any], ...] = ()  # further user attributes of the trial


@dataclass(frozen=True)
class Evaluation:
    """A run, with its retry if there was one."""

    origin: FrozenTrial  # the first attempt
    last: FrozenTrial  # the last attempt, which counts
    deaths: int  # attempts whose process died

    @property
    def running(self) -> bool:
        return self.last.state is TrialState.RUNNING

    @property
    def finished(self) -> bool:
        """Whether the run has a result: it has a loss, diverged, or was pruned."""
        return self.last.state in {TrialState.COMPLETE, TrialState.PRUNED}

    @property
    def complete(self) -> bool:
        """Whether the run has a final loss: it neither diverged nor was pruned."""
        return self.last.state is TrialState.COMPLETE and not self.last.user_attrs.get(DIVERGED)

    @property
    def failed(self) -> bool:
        """Whether both the run's process and its retry's process died."""
        return self.last.state is TrialState.FAIL and self.deaths >= LIVES

    @property
    def lost(self) -> bool:
        """Whether the run's process died and the run should be retried."""
        return self.last.state is TrialState.FAIL and self.deaths < LIVES

    @property
    def retry(self) -> TrialRequest:
        """The request that retries the run."""
        kept = [(key, self.origin.user_attrs[key]) for key in (FINALIST, CONFIRMS) if key in self.origin.user_attrs]
        return TrialRequest(
            purpose=purpose_of(self.origin),
            name=f"retry:{self.last.number}",
            seed=seed_of(self.origin),
            point=dict(self.origin.params),
            attributes=((RETRY_OF, self.origin.number), *kept),
        )

    def record(self, axes: Axes) -> StudyTrial:
        """Return the run for the study's document, without the recipe's values, which study.py adds."""
        last, ran = self.last, self.last.user_attrs
        state = "failed" if self.failed else "waiting" if self.lost else "running"
        if self.finished:
            state = "diverged" if ran.get(DIVERGED) else "stopped" if ran.get("stopped") else "complete"
        seconds, tokens = ran.get("seconds"), ran.get("tokens", 0)
        drawn = len(last.params) == len(axes.start)
        return StudyTrial(
            number=last.number,
            state=state,
            loss=loss_of(last) if state in {"complete", "stopped"} else None,
            values={},
            seconds=seconds,
            tokens_per_second=tokens / seconds if seconds else None,
            octaves=dict(zip(axes.start, axes.octaves(last.params).tolist(), strict=True)) if drawn else None,
            purpose=purpose_of(last),
            confirms=bool(self.origin.user_attrs.get(CONFIRMS)),
            seed=seed_of(last),
            tokens=tokens,
            flops=ran.get("flops", 0.0),
            curve=curve_of(ran.get("curve", ())),
            branches=curve_of(ran.get("branches", ())),
            worker=ran.get("worker"),
            ended=ran.get(ENDED),
        )


def purpose_of(trial: FrozenTrial) -> str:
    return str(trial.user_attrs.get(PURPOSE, "search"))


def seed_of(trial: FrozenTrial) -> int:
    return int(trial.user_attrs.get(SEED, 0))


def loss_of(trial: FrozenTrial) -> float:
    """Return the loss of a trial with a result: infinite if it diverged, predicted if it was pruned."""
    if trial.user_attrs.get(DIVERGED):
        return math.inf
    loss = trial.value if trial.state is TrialState.COMPLETE else trial.user_attrs[EXPECTED]
    assert loss is not None
    return float(loss)


def run_index(trial: FrozenTrial) -> int:
    """Return the index of a run among all runs, without duplicates and retries. Runs of the start come first."""
    job = trial.user_attrs.get(JOB, "")
    return int(job.removeprefix("search:")) if job.startswith("search:") else trial.number


def runs(trials: Sequence[FrozenTrial], dimensions: int) -> list[Evaluation]:
    """Return the runs, ordered by the number of each run's first trial.

    ``dimensions`` is the number of searched values. Trials whose process died before all values were drawn, and
    trials without an owner, are left out.
    """
    jobs = _jobs(trials)
    found = []
    for trial in sorted(trials, key=lambda trial: trial.number):
        job = trial.user_attrs.get(JOB)
        is_one = job is None or (jobs[job] is trial and not job.startswith("retry:"))
        drawn = len(trial.params) == dimensions or trial.state is TrialState.RUNNING
        if is_one and drawn and OWNER in trial.user_attrs:
            found.append(_followed(trial, jobs))
    return found


def _followed(origin: FrozenTrial, jobs: dict[str, FrozenTrial]) -> Evaluation:
    """Return the run that began with the trial ``origin``, including its retries."""
    last, deaths = origin, 0
    while last.state is TrialState.FAIL:
        deaths += not last.user_attrs.get(RELEASED, False)
        following = jobs.get(f"retry:{last.number}")
        if following is None:
            break
        last = following
    return Evaluation(origin, last, deaths)


def _jobs(trials: Sequence[FrozenTrial]) -> dict[str, FrozenTrial]:
    """Return, by job, the trial with the lowest number."""
    jobs: dict[str, FrozenTrial] = {}
    for trial in trials:
        job = trial.user_attrs.get(JOB)
        if job is not None and (job not in jobs or trial.number < jobs[job].number):
            jobs[job] = trial
    return jobs


def is_duplicate(number: int, trials: Sequence[FrozenTrial]) -> bool:
    """Return whether a trial repeats a job that a trial with a lower number has. Two commands may ask at once."""
    job = trials[number].user_attrs.get(JOB)
    return job is not None and _jobs(trials)[job].number != number


def count_jobs(trials: Sequence[FrozenTrial]) -> int:
    """Return the number of distinct jobs, not counting retries: the index of the next run."""
    return sum(not job.startswith("retry:") for job in _jobs(trials))


def finished(study: Study) -> list[FrozenTrial]:
    """Return the trials with a result, in the order in which they ended; pruned trials have a predicted loss.

    If any trial has an owner, trials without an owner (from another program) are left out, as in ``runs``. The order
    is by Unix time, because Optuna records the local time of each machine.
    """
    trials = study.get_trials(deepcopy=False)
    if any(OWNER in trial.user_attrs for trial in trials):
        trials = [trial for trial in trials if OWNER in trial.user_attrs]
    ended = [t for t in trials if t.state is TrialState.PRUNED and EXPECTED in t.user_attrs]
    ended += [trial for trial in trials if trial.state is TrialState.COMPLETE]

    def end(trial: FrozenTrial) -> float:
        assert trial.datetime_complete is not None
        return float(trial.user_attrs.get(ENDED, trial.datetime_complete.timestamp()))

    return sorted(ended, key=lambda trial: (end(trial), trial.number))


def points_and_losses(trials: Sequence[FrozenTrial], axes: Axes) -> tuple[Array, Array]:
    """Return the points (n, D) of trials with a result, in octaves, and their losses (n,)."""
    points = np.array([axes.octaves(trial.params) for trial in trials]).reshape(-1, len(axes.limits))
    return points, np.array([loss_of(trial) for trial in trials])


@dataclass(frozen=True)
class Budget:
    """The limits shared by all commands of a study. The first limit reached ends the search; running trials
    finish."""

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
        """The number of runs that the budget allows, as far as it is known before the first run; else infinity."""
        flops = self.flops / self.run_flops if self.flops and self.run_flops else math.inf
        return min(self.trials or math.inf, flops)

    def finals(self, runs: Sequence[Evaluation], now: float) -> tuple[int, int]:
        """Return the number of finalists, and of the runs of each, for which both the reserved budget and the
        remaining budget suffice."""
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
        """Yield each limit, how much of it is used, and how much one run costs."""
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
    """Return how many runs a confirmation takes, with ``each`` runs of every finalist."""
    return finalists * each + (2 * CONFIRMATIONS if finalists > 1 else 0)  # of the chosen point and of the start


def busy(runs: Sequence[Evaluation], now: float) -> float:
    """Return the seconds in which at least one run was active. A run without an end counts until ``now``."""

    def end(run: Evaluation) -> float:
        died = run.last.datetime_complete
        return now if run.running or died is None else died.timestamp()

    began = [run for run in runs if BEGAN in run.last.user_attrs]
    return covered((run.last.user_attrs[BEGAN], float(run.last.user_attrs.get(ENDED, end(run)))) for run in began)
