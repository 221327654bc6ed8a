"""The trial log: the runs of a study, computed from the trials in its store.

Each trial is created with its owner and its ``job``, a name for what it does. There is no queue: the next job
follows from the existing trials, so a crash cannot lose it. Two commands may create a trial for the same job at once.
Then the trial with the lowest number runs and the other one is void; every Optuna store numbers trials in order.

A run whose process died is retried once, by a trial with the job ``retry:NUMBER``. If that dies too, the run has
failed. A trial that its owner released (Ctrl-C) does not count as a death.
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
BEGAN, ENDED = "began", "ended"  # Unix time by the owner's clock, seconds
EXPECTED = "expected"  # the predicted final loss of a pruned trial
LIVES = 2  # attempts of a run whose process dies


@dataclass(frozen=True)
class TrialRequest:
    """A run to start."""

    purpose: str  # search | noise | rerun
    name: str | None = None  # of the job; None for a proposal of the search
    seed: int = 0
    point: dict[str, float] | None = None  # log2 multipliers; None to ask the sampler
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
        """Whether it has a result: a loss, a divergence, or pruned."""
        return self.last.state in {TrialState.COMPLETE, TrialState.PRUNED}

    @property
    def complete(self) -> bool:
        """Whether it has a final loss: neither diverged nor pruned."""
        return self.last.state is TrialState.COMPLETE and not self.last.user_attrs.get(DIVERGED)

    @property
    def failed(self) -> bool:
        """Whether both its process and that of its retry died."""
        return self.last.state is TrialState.FAIL and self.deaths >= LIVES

    @property
    def lost(self) -> bool:
        """Whether its process died and it should be retried."""
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
    """Return the index of a proposal in the search, not counting void trials and retries."""
    job = trial.user_attrs.get(JOB, "")
    return int(job.removeprefix("search:")) if job.startswith("search:") else trial.number


def runs(trials: Sequence[FrozenTrial], dimensions: int) -> list[Evaluation]:
    """Return the runs, in the order of the numbers of their first trials.

    ``dimensions``: of the space. Trials whose process died before all values were drawn, and trials without an owner,
    are left out.
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
    """Whether another trial with a lower number has the same job."""
    job = trials[number].user_attrs.get(JOB)
    return job is not None and _jobs(trials)[job].number != number


def begun(trials: Sequence[FrozenTrial]) -> int:
    """Return the number of distinct jobs without retries."""
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
    """Return the trials with a result, in the order of their results; pruned trials have a predicted loss.

    If any trial has an owner, trials without one (added by another program) are left out, as in ``runs``. The order
    is by Unix time, because Optuna's own times are local to each machine.
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
    """Return the loss of a trial with a result: infinite if it diverged, predicted if it was pruned."""
    if trial.user_attrs.get(DIVERGED):
        return math.inf
    loss = trial.value if trial.state is TrialState.COMPLETE else trial.user_attrs[EXPECTED]
    assert loss is not None
    return float(loss)
