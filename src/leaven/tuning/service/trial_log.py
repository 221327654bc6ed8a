"""The trial log: read the runs of a search from the trials in its store.

A run is one training at one point with one seed. It has one trial in the store, and another one for each retry.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from optuna.trial import FrozenTrial, TrialState

from leaven.training.outcome import curve_of
from leaven.tuning.algorithm.trust_region import RESULTS, Axes, Region, region, results
from leaven.tuning.study_document import StudyTrial

# Names of user attributes of a trial. Others are the fields of an Outcome.
PURPOSE, SEED, RETRY_OF, FINALIST, DIVERGED = "purpose", "seed", "retry_of", "finalist", "diverged"
OWNER, JOB, FINAL, RELEASED, CONFIRMS = "owner", "job", "final", "released", "confirms"
BEGAN, ENDED = "began", "ended"  # Unix time by the owner's clock, seconds
PREDICTED = "expected"  # the predicted final loss of a pruned trial
LIVES = 2  # attempts of a run before it has failed

Params = dict[str, float]  # log2 multipliers by name


@dataclass(frozen=True)
class TrialRequest:
    """A run that the search plan asks to start."""

    purpose: str  # search | noise | rerun
    name: str  # name of the job; a run was started already if a trial with this job exists
    seed: int = 0
    point: Params | None = None  # None if the study's Optuna sampler proposes it
    attributes: Mapping[str, Any] = field(default_factory=dict)  # further user attributes of the trial


@dataclass(frozen=True, kw_only=True)
class Evaluation(StudyTrial):
    """A run of a search, which may have had several attempts (each attempt is a trial in the store).

    The fields inherited from :class:`StudyTrial` are those of the last attempt. ``values`` is empty until
    :meth:`Study.state` fills it.
    """

    params: Params  # log2 multipliers
    origin: int  # trial number of the first attempt
    job: str | None = None  # name of the request that started the first attempt
    budget: str = ""  # label of the budget for which this run reruns or confirms a finalist; empty for other runs
    finalist: int | None = None  # index of the finalist that this run reruns
    finals: tuple[int, int] | None = None  # (number of finalists, runs of each); only in the first rerun
    began: float | None = None  # Unix time at which the last attempt began
    until: float | None = None  # Unix time at which the last attempt ended or was found dead

    @property
    def finished(self) -> bool:
        """Whether the run has a result: it completed, diverged, or was pruned."""
        return self.state in RESULTS

    @property
    def retry(self) -> TrialRequest:
        """The request that retries the run."""
        attributes: dict[str, Any] = {RETRY_OF: self.origin}
        if self.budget:
            attributes |= {FINALIST: [self.budget, self.finalist]}
        if self.confirms:
            attributes |= {CONFIRMS: True}
        return TrialRequest(self.purpose, f"retry:{self.number}", self.seed, dict(self.params), attributes)


def runs_of(trials: Sequence[FrozenTrial], axes: Axes) -> list[Evaluation]:
    """Return the runs, ordered by the number of each run's first trial.

    Trials whose process died before the sampler had drawn all values are left out. So are trials without an owner,
    which another program made.
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
        found.append(_evaluation(trial, last, deaths, axes))
    return found


def _evaluation(origin: FrozenTrial, last: FrozenTrial, deaths: int, axes: Axes) -> Evaluation:
    """Return the run with the first attempt ``origin`` and the last attempt ``last``. ``deaths`` is the number of
    attempts whose process died."""
    ran, state, loss = last.user_attrs, "running", None
    if last.state is TrialState.FAIL:
        state = "failed" if deaths >= LIVES else "waiting"
    elif last.state in {TrialState.COMPLETE, TrialState.PRUNED}:
        state = "complete" if last.state is TrialState.COMPLETE else "stopped"
        loss = ran.get(PREDICTED) if last.value is None else last.value
        if ran.get(DIVERGED):
            state, loss = "diverged", None
    seconds, tokens = ran.get("seconds"), ran.get("tokens", 0)
    drawn = len(last.params) == len(axes.start)
    until = ran.get(ENDED)
    if until is None and state != "running" and last.datetime_complete:
        until = last.datetime_complete.timestamp()
    budget, finalist = origin.user_attrs.get(FINALIST, ("", None))
    return Evaluation(
        number=last.number,
        state=state,
        loss=loss,
        values={},
        seconds=seconds,
        tokens_per_second=tokens / seconds if seconds else None,
        octaves=dict(zip(axes.start, axes.octaves(last.params).tolist(), strict=True)) if drawn else None,
        purpose=str(ran.get(PURPOSE, "search")),
        confirms=bool(ran.get(CONFIRMS)),
        seed=int(ran.get(SEED, 0)),
        tokens=tokens,
        flops=float(ran.get("flops", 0.0)),
        curve=curve_of(ran.get("curve", ())),
        branches=curve_of(ran.get("branches", ())),
        worker=ran.get("worker"),
        ended=ran.get(ENDED),
        params=last.params,
        origin=origin.number,
        job=origin.user_attrs.get(JOB),
        budget=budget,
        finalist=finalist,
        finals=origin.user_attrs.get(FINAL),
        began=ran.get(BEGAN),
        until=until,
    )


def jobs_of(trials: Sequence[FrozenTrial]) -> dict[str, FrozenTrial]:
    """Return the trial of each job by the job's name, which is a user attribute of the trial.

    If two commands created a trial for the same job at once, the trial with the lowest number counts.
    """
    jobs: dict[str, FrozenTrial] = {}
    for trial in sorted(trials, key=lambda trial: trial.number):
        if JOB in trial.user_attrs:
            jobs.setdefault(trial.user_attrs[JOB], trial)
    return jobs


def region_of(runs: Sequence[Evaluation], axes: Axes, noise: float | None = None) -> Region:
    """Return the trust region that follows from ``runs``. Runs without a result are ignored."""
    ended, points, losses = results(runs, axes)
    return region(axes, points, losses, noise, np.array([run.seed for run in ended], np.int64))
