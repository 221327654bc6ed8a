"""The trials of a study in a store (an Optuna storage): create, record and read them.

A command is one running search. Any number of commands on any machines can share a study, and a repeated
command resumes it. A trial is one training of a point with one seed. In the store it is one Optuna
trial, plus one for each retry. In this file, an Optuna trial is called an attempt.

- Each attempt has two user attributes from the beginning: ``owner`` is the id of its command, and
  ``job`` is a name for the work, such as ``search:12``. There is no queue: the next job follows from the
  existing attempts, so a crash cannot lose a job. If there are two attempts for the same job, the attempt with the
  lower number runs, and the other one is marked as failed. This happens if two commands create an attempt at the same
  time, or if a command creates it again after its connection broke.
- If the process of attempt NUMBER dies, a new attempt with the job ``retry:NUMBER`` runs the trial again. If two
  attempts at a trial have died, the trial has failed. An attempt that Ctrl-C ends is retried, too, but does not count
  as died.
- If many trials of a command fail in a row, its machine may be broken. The command then adds to each of these trials
  an ended attempt with the attribute ``given_back``. The earlier failures of the trial no longer count, and it runs
  again. This happens only once for a trial.
- A diverged trial has the user attribute ``diverged``, and leaven counts its loss as infinite. Optuna's
  samplers need a finite loss, so the store has the worst finite loss so far, or 1e6 if there is none.
- An attempt with a result has a digest, and so have the settings of the study. A wrong digest shows that
  another program has changed a value or deleted a line.
"""

import json
import math
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution
from optuna.exceptions import UpdateFinishedTrialError
from optuna.samplers import BaseSampler
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, TrialState, create_trial

from leaven import storage
from leaven.errors import InputError
from leaven.training.outcome import Curve, Outcome, curve_of
from leaven.tuning.algorithm.trust_region import RESULTS, Axes
from leaven.tuning.study_document import PRUNED, StudyTrial

ABOUT = "leaven:about"  # an attribute of a study: its settings (recipe, space, method and so on) by name
ID = "id"  # the setting with the random id of a study, which is also in its study.json

# Names of user attributes of an attempt: fields of an Outcome, and others.
OUTCOME = ("tokens", "flops", "seconds", "branches", "worker", "stopped")
PURPOSE, SEED, RETRY_OF, FINALIST, DIVERGED = "purpose", "seed", "retry_of", "finalist", "diverged"
OWNER, JOB, FINAL, RELEASED, CONFIRMS = "owner", "job", "final", "released", "confirms"
GIVEN_BACK = "given_back"
BEGAN, ENDED = "began", "ended"  # Unix time by the owner's clock, seconds
PREDICTED = "expected"  # the predicted final loss of a pruned trial
LAST_BEAT = "last_beat"  # when an attempt without a result ended: the last heartbeat of a dead owner, Unix time
DIGEST = "digest"  # of an attempt with a result (a user attribute), or of the settings (in ABOUT)
WITH_RESULT = (TrialState.COMPLETE, TrialState.PRUNED)
RESTORE = "restore the store from a backup, or use another study"
POINTS = 256  # the most points of a curve that the store keeps; a command may log 100,000
LIVES = 2  # a trial has failed after so many attempts whose process died
NEVER_ENDED = 1e6  # the stored loss of a diverged trial before there is any finite loss

Params = dict[str, float]  # log2 multipliers by name


@dataclass(frozen=True)
class TrialRequest:
    purpose: str  # search | noise | rerun
    job: str  # unique name of the work, such as search:12; the work has begun if a trial has this job
    seed: int = 0
    point: Params | None = None  # None if Optuna's sampler proposes it
    attributes: Mapping[str, Any] = field(default_factory=dict)  # further user attributes of the attempt


@dataclass(frozen=True, kw_only=True)
class StoredTrial(StudyTrial):
    """A trial of a search, from its last attempt in the store. ``values`` is empty; :meth:`document` fills it in."""

    params: Params  # log2 multipliers of the searched values; whole numbers are rounded first
    origin: int  # number of the first attempt
    job: str | None = None  # job of the first attempt
    final_of: str = ""  # in a final trial, the budget that it belongs to, such as "64 trials"; empty in others
    finalist: int | None = None  # in a final trial, the index of the finalist
    finals: tuple[int, int] | None = None  # in the first final trial: (number of finalists, trials of each)
    # The (begin, end) of its attempts, Unix time by the clocks of their owners. The end of a running one is None.
    spans: tuple[tuple[float, float | None], ...] = ()

    @property
    def has_result(self) -> bool:
        return self.state in RESULTS

    @property
    def retry(self) -> TrialRequest:
        attributes: dict[str, Any] = {RETRY_OF: self.origin}
        if self.final_of:
            attributes |= {FINALIST: [self.final_of, self.finalist]}
        if self.confirms:
            attributes |= {CONFIRMS: True}
        return TrialRequest(self.purpose, f"retry:{self.number}", self.seed, dict(self.params), attributes)

    def document(self, values: dict[str, Any]) -> StudyTrial:
        own = {each.name: getattr(self, each.name) for each in fields(StudyTrial)}
        return StudyTrial(**own | {"values": values})


@dataclass(frozen=True)
class StoredStudy:
    """A study in an Optuna storage (``store``)."""

    store: BaseStorage
    study: optuna.Study
    axes: Axes  # with the prior knowledge of the stored study
    noise: float | None  # standard deviation of the loss between seeds, if it was known before the search
    what: str = "the stored study"  # what messages call the study
    _clock: float = field(default_factory=lambda: time.time() - time.monotonic())  # added to monotonic()

    def now(self) -> float:
        """Return the Unix time in seconds. It does not jump if the clock is set while this command runs."""
        return self._clock + time.monotonic()

    @cached_property
    def id(self) -> int:
        return self.store.get_study_id_from_name(self.study.study_name)

    @cached_property
    def random_id(self) -> str:
        return str(self.study.user_attrs[ABOUT][ID])

    @cached_property
    def _log(self) -> "TrialLog":
        return TrialLog(self.axes)

    def read(self) -> "TrialLog":
        """Return all attempts and trials. Raise InputError if another program has changed or removed an attempt."""
        log, attempts = self._log, self.study.get_trials(deepcopy=False)  # in the order of their numbers
        # Optuna returns another object for an attempt that has changed.
        new = {at: attempt for at, attempt in enumerate(attempts) if log.attempts.get(at) is not attempt}
        if lost := [at for at in new if new[at].number != at] or range(len(attempts), len(log.attempts)):
            raise InputError(f"{self.what} has lost trial {lost[0]}; {RESTORE}")
        for number, attempt in new.items():
            if _replaces(attempt, log.attempts.get(number, attempt)):
                raise InputError(f"{self.what} has lost trial {number}; {RESTORE}")
            about, job = attempt.user_attrs, str(attempt.user_attrs.get(JOB, ""))
            # The job search:N is created when there are at least N jobs. In a journal without the line that created
            # an attempt, all later attempts have other numbers.
            if job.startswith("search:") and job not in log.jobs and int(job.removeprefix("search:")) > log.started:
                raise InputError(f"{self.what} has lost a trial before trial {number}; {RESTORE}")
            ended = OWNER in about and attempt.state in WITH_RESULT
            if ended and about.get(DIGEST) != _digest_of(attempt, attempt.state, attempt.values):
                raise InputError(
                    f"trial {number} of {self.what} was changed after it had ended, or an older version wrote it; "
                    f"{RESTORE}"
                )
            log.add(attempt)
        return log

    @property
    def trials(self) -> list[StoredTrial]:
        return list(self.read().trials.values())

    def create(self, request: TrialRequest, owner: str, sampler: BaseSampler | None) -> tuple[int, Params] | None:
        """Start the requested trial, at a point that ``sampler`` draws if the request has none. Return (number,
        point), or None if another command starts the trial of ``request.job`` first, or closes this trial because it
        believes that this process is dead."""
        trial_id = self._add(request, TrialState.RUNNING, {OWNER: owner, BEGAN: self.now()})
        log, created = self.read(), self.store.get_trial_number_from_id(trial_id)
        number = log.jobs[request.job]
        if number != created:  # a duplicate
            self.close(created)
            if log.attempts[number].user_attrs[OWNER] != owner:
                return None
            trial_id = self._trial_id(number)
        if request.point is not None:
            return number, request.point
        # A new Study object, because Optuna caches trials in a Study.
        study = optuna.Study(self.study.study_name, self.store, sampler=sampler)
        trial, point = optuna.Trial(study, trial_id), {}
        with suppress(UpdateFinishedTrialError):  # another command took this process for dead and closed the attempt
            for key, limits in self.axes.limits.items():
                if isinstance(limits, range):
                    point[key] = float(trial.suggest_categorical(key, [float(level) for level in limits]))
                else:
                    point[key] = trial.suggest_float(key, *limits)
            return number, point
        return None

    def _add(self, request: TrialRequest, state: TrialState, attributes: Mapping[str, Any]) -> int:
        # A template creates the attempt in one call, so that none exists without the name of its job.
        template = create_trial(
            state=state,
            params=request.point or {},
            distributions=distributions(self.axes) if request.point else {},
            user_attrs={PURPOSE: request.purpose, SEED: request.seed, JOB: request.job}
            | {**request.attributes, **attributes},
        )
        return self.store.create_new_trial(self.id, template)

    def give_back(self, numbers: Collection[int], owner: str) -> int:
        """Allow one more attempt for each trial that failed or whose process died, but only once per trial. Return
        the number of these trials. This only adds entries of the command ``owner`` to the store; the attempts start
        later. ``numbers`` has the number of each trial's last attempt."""
        log = self.read()
        before = {each.user_attrs[RETRY_OF] for each in log.attempts.values() if GIVEN_BACK in each.user_attrs}
        trials = [trial for trial in log.trials.values() if trial.number in numbers]
        again = [trial for trial in trials if trial.origin not in before]
        for trial in again:
            self._add(trial.retry, TrialState.FAIL, {OWNER: owner, RELEASED: True, GIVEN_BACK: True})
        return len(again)

    def record(self, number: int, outcome: Outcome) -> bool:
        """Write the outcome of an attempt. Return False if another command has marked the attempt as failed."""
        about = {key: getattr(outcome, key) for key in OUTCOME}
        about |= {"curve": thinned(outcome.curve), DIVERGED: outcome.diverged}
        about |= {PREDICTED: outcome.loss} if outcome.stopped else {}
        trial_id = self._trial_id(number)
        loss, state = outcome.loss, TrialState.PRUNED if outcome.stopped else TrialState.COMPLETE
        try:
            for key, value in about.items():
                if value:
                    self.store.set_trial_user_attr(trial_id, key, value)
            self.store.set_trial_user_attr(trial_id, ENDED, self.now())
            if outcome.diverged:
                # Optuna's samplers need a finite number: the worst loss, so that it does not dominate the others.
                loss = max((trial.loss for trial in self.trials if trial.loss is not None), default=NEVER_ENDED)
            if outcome.stopped:
                # Optuna's samplers use the last intermediate value of a pruned trial, and its step.
                self.store.set_trial_intermediate_value(trial_id, len(outcome.curve), loss)
            digest = _digest_of(self.store.get_trial(trial_id), state, [loss])
            self.store.set_trial_user_attr(trial_id, DIGEST, digest)
            # Not Optuna's tell, which checks the trial before it writes: another command may close it in between.
            self.store.set_trial_state_values(trial_id, state, [loss])
        except UpdateFinishedTrialError:  # or this command did it, and then its connection broke
            return self.store.get_trial(trial_id).state is state
        return True

    def close(self, number: int, *, released: bool = False, ended: float | None = None) -> None:
        """Mark an attempt as failed, unless it has ended already. Its process counts as dead unless it was
        ``released``. ``ended`` is the last heartbeat of the attempt's command, Unix time; by default now."""
        with suppress(UpdateFinishedTrialError):
            # Not as ENDED, which the digest covers: the owner may be alive and write its result just now.
            self.store.set_trial_user_attr(self._trial_id(number), LAST_BEAT, self.now() if ended is None else ended)
            if released:
                self.store.set_trial_user_attr(self._trial_id(number), RELEASED, True)
            self.store.set_trial_state_values(self._trial_id(number), TrialState.FAIL)

    def _trial_id(self, number: int) -> int:
        return self.store.get_trial_id_from_study_id_trial_number(self.id, number)


def thinned(curve: Curve) -> list[tuple[int, float]]:
    """Return a curve with at most ``POINTS`` points, all with a finite loss. The points before the last one are
    grouped, and each group becomes one point: its last step and its mean loss."""
    finite = [point for point in curve if math.isfinite(point[1])]
    before, last = finite[:-1], finite[-1:]
    size = max(-(-len(before) // (POINTS - 1)), 1)
    parts = [before[at : at + size] for at in range(0, len(before), size)]
    means = [(part[-1][0], math.fsum(loss for _, loss in part) / len(part)) for part in parts]
    return [*means, *last]


class TrialLog:
    """The attempts that were read from a store, and the trials to which they belong, without trials of other programs
    and trials that ended before their values were drawn."""

    def __init__(self, axes: Axes) -> None:
        self.attempts: dict[int, FrozenTrial] = {}  # by number
        self.jobs: dict[str, int] = {}  # the number of each job's attempt; of duplicates, the lowest number counts
        self.started = 0  # the number of jobs that are no retries
        self.trials: dict[int, StoredTrial] = {}  # by the number of the first attempt, in the order of these numbers
        self._axes = axes
        self._origins: dict[str, int] = {}  # by the job of a retry: the number of the first attempt

    def add(self, attempt: FrozenTrial) -> None:
        """Add an attempt that is new or has changed. New attempts must be added in the order of their numbers."""
        number, job = attempt.number, attempt.user_attrs.get(JOB)
        self.attempts[number] = attempt
        if job is not None and job not in self.jobs:
            self.jobs[job] = number
            self.started += not job.startswith("retry:")
        origin = self._origins[f"retry:{number}"] = self._origins.get(job or "", number)
        if trial := self._trial(self.attempts[origin]):
            self.trials[origin] = trial
        else:
            self.trials.pop(origin, None)

    def _trial(self, first: FrozenTrial) -> StoredTrial | None:
        job = first.user_attrs.get(JOB)
        begins = job is None or (self.jobs[job] == first.number and not job.startswith("retry:"))
        drawn = len(first.params) == len(self._axes.start) or first.state is TrialState.RUNNING
        if not (begins and drawn and OWNER in first.user_attrs):
            return None
        attempts = [first]
        while attempts[-1].state is TrialState.FAIL:
            if (retry := self.jobs.get(f"retry:{attempts[-1].number}")) is None:
                break
            attempts.append(self.attempts[retry])
        return _trial_of(attempts, self._axes)


def trials_of(attempts: Sequence[FrozenTrial], axes: Axes) -> list[StoredTrial]:
    """Return the trials to which ``attempts`` belong, in the order of their first attempts."""
    log = TrialLog(axes)
    for attempt in sorted(attempts, key=lambda attempt: attempt.number):
        log.add(attempt)
    return list(log.trials.values())


def _span(attempt: FrozenTrial) -> tuple[float, float | None] | None:
    """Return (begin, end) of an attempt in Unix time, or None if unknown. A running attempt's end is None."""
    ran = attempt.user_attrs
    end = ran.get(ENDED, ran.get(LAST_BEAT))
    if BEGAN not in ran or (end is None and attempt.state is not TrialState.RUNNING):
        return None
    return ran[BEGAN], end


def _trial_of(attempts: Sequence[FrozenTrial], axes: Axes) -> StoredTrial:
    """Return the trial with these ``attempts`` in order. All attempts before the last have failed."""
    first, last, deaths = attempts[0], attempts[-1], 0
    for attempt in attempts:
        deaths += RELEASED not in attempt.user_attrs
        if GIVEN_BACK in attempt.user_attrs:
            deaths = 0
    ran, state, loss = last.user_attrs, "running", None
    if last.state is TrialState.FAIL:
        state = "failed" if deaths >= LIVES else "waiting"
    elif last.state in WITH_RESULT:
        state = "complete" if last.state is TrialState.COMPLETE else PRUNED
        loss = ran.get(PREDICTED) if last.value is None else last.value
        if ran.get(DIVERGED):
            state, loss = "diverged", None
    seconds, tokens, params = ran.get("seconds"), ran.get("tokens", 0), axes.rounded(last.params)
    drawn = len(last.params) == len(axes.start)
    final_of, finalist = first.user_attrs.get(FINALIST, ("", None))
    return StoredTrial(
        number=last.number,
        state=state,
        loss=loss,
        seconds=seconds,
        tokens_per_second=tokens / seconds if tokens and seconds else None,
        octaves=dict(zip(axes.start, axes.octaves(params).tolist(), strict=True)) if drawn else None,
        purpose=str(ran.get(PURPOSE, "search")),
        confirms=bool(ran.get(CONFIRMS)),
        seed=int(ran.get(SEED, 0)),
        tokens=tokens,
        flops=float(ran.get("flops", 0.0)),
        curve=curve_of(ran.get("curve", ())),
        branches=curve_of(ran.get("branches", ())),
        worker=ran.get("worker"),
        ended=ran.get(ENDED, ran.get(LAST_BEAT)),
        params=params,
        origin=first.number,
        job=first.user_attrs.get(JOB),
        final_of=final_of,
        finalist=finalist,
        finals=first.user_attrs.get(FINAL),
        spans=tuple(span for attempt in attempts if (span := _span(attempt)) is not None),
    )


def _replaces(attempt: FrozenTrial, before: FrozenTrial) -> bool:
    """Return whether ``attempt`` is not the attempt ``before``, which had the same number at an earlier read."""
    earlier = before.state.is_finished() and not attempt.state.is_finished()
    return earlier or any(attempt.user_attrs.get(key) != before.user_attrs.get(key) for key in (OWNER, JOB, BEGAN))


def _digest_of(attempt: FrozenTrial, state: TrialState, values: Sequence[float] | None) -> str:
    """Return the digest of an attempt that ends with ``state`` and with ``values`` ([loss] or None)."""
    attributes = {key: value for key, value in attempt.user_attrs.items() if key not in {DIGEST, LAST_BEAT}}
    losses = [loss + 0.0 for loss in values or ()]  # SQLite stores -0.0 as 0.0
    # Keys are texts, except in a row that was changed.
    params, attributes = ({str(key): value for key, value in of.items()} for of in (attempt.params, attributes))
    return digest_of_json([attempt.number, state.name, losses, params, attributes])


def digest_of_json(document: Any) -> str:
    return storage.digest(json.dumps(document, sort_keys=True).encode())


def distributions(axes: Axes) -> dict[str, BaseDistribution]:
    """Return the Optuna distribution of each searched value, by name."""
    return {
        name: CategoricalDistribution([float(level) for level in limits])
        if isinstance(limits, range)
        else FloatDistribution(*limits)
        for name, limits in axes.limits.items()
    }
