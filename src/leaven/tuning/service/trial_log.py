"""The trial log: read the runs of a study from its store. ``search_loop.py`` says how trials become runs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from leaven.training.outcome import curve_of
from leaven.tuning.algorithm.trust_region import Array, Axes
from leaven.tuning.study_document import StudyTrial

# User attributes of a trial, next to the fields of an Outcome.
PURPOSE, SEED, RETRY_OF, FINALIST, DIVERGED = "purpose", "seed", "retry_of", "finalist", "diverged"
OWNER, JOB, FINAL, RELEASED, CONFIRMS = "owner", "job", "final", "released", "confirms"
BEGAN, ENDED = "began", "ended"  # Unix time by the owner's clock, seconds
EXPECTED = "expected"  # the predicted final loss of a pruned trial
LIVES = 2  # attempts of a run whose process dies


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
        """Return this run as a StudyTrial, the form of study.json. Its ``values`` are empty; study.py adds them."""
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
    """Return the index of a run of the search, from the name of its job. It counts all runs of the study before it,
    but not duplicates and retries. Any other trial has its number as the index."""
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
    """Return the trial of each job, by the name of the job. It is the trial with the lowest number."""
    jobs: dict[str, FrozenTrial] = {}
    for trial in trials:
        job = trial.user_attrs.get(JOB)
        if job is not None and (job not in jobs or trial.number < jobs[job].number):
            jobs[job] = trial
    return jobs


def is_duplicate(number: int, trials: Sequence[FrozenTrial]) -> bool:
    """Return whether a trial with a lower number has the same job. This happens if two commands create a trial for
    the job at once."""
    job = trials[number].user_attrs.get(JOB)
    return job is not None and _jobs(trials)[job].number != number


def count_jobs(trials: Sequence[FrozenTrial]) -> int:
    """Return the number of distinct jobs, not counting retries: the index of the next run."""
    return sum(not job.startswith("retry:") for job in _jobs(trials))


def finished(study: Study) -> list[FrozenTrial]:
    """Return the trials with a result, in the order in which they ended. A pruned trial has a result if it has a
    predicted loss.

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
