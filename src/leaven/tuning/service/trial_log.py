"""The trial log: what the trials in a store amount to, each run counted once whatever was killed.

A run begins with a trial that is created with all that is known of it: its owner, and its ``job``, a name for what
it does. Nothing is ever queued: what is to be done next follows from the trials that are there, so no crash can lose
it. Two commands may create the same job at once. The trial with the lowest number does it, and the other one is
void: numbers are given out in order by every Optuna store.

A run whose process died is done once more, by a trial with the job ``retry:`` and the number of the one that was
lost. If that is lost too, the run has failed. A trial that its owner gave back (Ctrl-C) is not held against the run.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

# User attributes of a trial, next to the fields of an Outcome.
PURPOSE, SEED, RETRY_OF, FINALIST, DIVERGED = "purpose", "seed", "retry_of", "finalist", "diverged"
OWNER, JOB, FINALISTS, RELEASED, CONFIRMS = "owner", "job", "finalists", "released", "confirms"
BEGAN, ENDED = "began", "ended"  # seconds since 1970, by the owner's clock
EXPECTED = "expected"  # the loss expected of a trial that was stopped early (pruned, to Optuna)
LIVES = 2  # attempts of a run that may die


@dataclass(frozen=True)
class TrialRequest:
    """A run to be done, at a point in octaves; without one the sampler is asked."""

    purpose: str  # search | noise | rerun
    name: str | None = None  # None where there are no two alike
    seed: int = 0
    point: dict[str, float] | None = None
    attributes: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class Evaluation:
    """A run, in one attempt or more."""

    origin: FrozenTrial
    last: FrozenTrial  # the attempt that counts
    deaths: int

    @property
    def running(self) -> bool:
        return self.last.state is TrialState.RUNNING

    @property
    def finished(self) -> bool:
        """With a result, be it a divergence."""
        return self.last.state in {TrialState.COMPLETE, TrialState.PRUNED}

    @property
    def complete(self) -> bool:
        """With a loss of its own: neither diverged nor stopped."""
        return self.last.state is TrialState.COMPLETE and not self.last.user_attrs.get(DIVERGED)

    @property
    def failed(self) -> bool:
        """Its process died, and so did that of its retry."""
        return self.last.state is TrialState.FAIL and self.deaths >= LIVES

    @property
    def lost(self) -> bool:
        """To be retried."""
        return self.last.state is TrialState.FAIL and self.deaths < LIVES

    @property
    def retry(self) -> TrialRequest:
        assert self.lost
        kept = [(key, self.origin.user_attrs[key]) for key in (FINALIST, CONFIRMS) if key in self.origin.user_attrs]
        return TrialRequest(
            purpose=purpose_of(self.origin),
            name=f"retry:{self.last.number}",
            seed=seed_of(self.origin),
            point=dict(self.origin.params),
            attributes=((RETRY_OF, self.origin.number), *kept),
        )


def purpose_of(trial: FrozenTrial) -> str:
    return str(trial.user_attrs.get(PURPOSE, "search"))


def seed_of(trial: FrozenTrial) -> int:
    return int(trial.user_attrs.get(SEED, 0))


def turn(trial: FrozenTrial) -> int:
    """Which proposal of the search a trial is: a number that no void trial and no retry before it changes."""
    job = trial.user_attrs.get(JOB, "")
    return int(job.removeprefix("search:")) if job.startswith("search:") else trial.number


def runs(trials: Sequence[FrozenTrial], dimensions: int) -> list[Evaluation]:
    """The runs that trials of a space of so many ``dimensions`` amount to, in the order of their first numbers.

    A trial that lost its process before all its values were drawn is left out, as is one without an owner.
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


def void(number: int, trials: Sequence[FrozenTrial]) -> bool:
    """Whether another trial does what the one of this number was created for."""
    job = trials[number].user_attrs.get(JOB)
    return job is not None and _jobs(trials)[job].number != number


def begun(trials: Sequence[FrozenTrial]) -> int:
    """How many jobs there are, retries left out: a number that no void trial and no retry changes."""
    return sum(not job.startswith("retry:") for job in _jobs(trials))


def _jobs(trials: Sequence[FrozenTrial]) -> dict[str, FrozenTrial]:
    jobs: dict[str, FrozenTrial] = {}
    for trial in trials:
        job = trial.user_attrs.get(JOB)
        if job is not None and (job not in jobs or trial.number < jobs[job].number):
            jobs[job] = trial
    return jobs


def _followed(origin: FrozenTrial, jobs: dict[str, FrozenTrial]) -> Evaluation:
    last, deaths = origin, 0
    while last.state is TrialState.FAIL:
        deaths += not last.user_attrs.get(RELEASED, False)
        following = jobs.get(f"retry:{last.number}")
        if following is None:
            break
        last = following
    return Evaluation(origin, last, deaths)


def finished(study: Study) -> list[FrozenTrial]:
    """The trials with a result, in the order of their results; those that were stopped have an expected one.

    In a study that commands work on, what others put there (their own ask and tell) counts for nothing, as in
    ``runs``: it has no owner. The order is by the clocks of the machines, in seconds since 1970; Optuna's own are in
    the local time of each.
    """
    trials = study.get_trials(deepcopy=False)
    if any(OWNER in trial.user_attrs for trial in trials):
        trials = [trial for trial in trials if OWNER in trial.user_attrs]
    stopped = [t for t in trials if t.state is TrialState.PRUNED and EXPECTED in t.user_attrs]
    ended = stopped + [trial for trial in trials if trial.state is TrialState.COMPLETE]
    return sorted(ended, key=lambda trial: (_ended(trial), trial.number))


def _ended(trial: FrozenTrial) -> float:
    assert trial.datetime_complete is not None
    return float(trial.user_attrs.get(ENDED, trial.datetime_complete.timestamp()))


def loss_of(trial: FrozenTrial) -> float:
    """What a trial with a result came to: infinite if it diverged, whatever it was scored."""
    if trial.user_attrs.get(DIVERGED):
        return math.inf
    loss = trial.value if trial.state is TrialState.COMPLETE else trial.user_attrs[EXPECTED]
    assert loss is not None
    return float(loss)
