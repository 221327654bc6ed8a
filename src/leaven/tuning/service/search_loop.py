"""Run a search: run each trial that the plan (``search_plan.py``) asks for in a thread, and write its result to the
store.

Every run is a trial of one Optuna study, whether it measures the noise, searches, or confirms the best points. So any
number of commands on any machines can share a study, and the call that resumes a search is the same as the call that
starts one:

- The command that creates the study stores its settings. Every command that joins the study compares its own settings
  with the stored ones (``join.py``).
- Each trial has two user attributes from the beginning: its ``owner``, the id of the command that runs it, and its
  ``job``, a name for its work, such as ``search:12``. There is no queue: the next job follows from the existing
  trials, so a crash cannot lose a job. If two commands create a trial for the same job at once, the trial with the
  lower number runs and the other one is closed as a duplicate.
- Every command keeps increasing a counter in the store, its heartbeat. A command of another machine whose heartbeat
  has not changed for ``lease_seconds`` is dead (``leases.py``), and other commands retry its trials.
- If the process of a run dies in trial NUMBER, the run is retried once, by a new trial with the job ``retry:NUMBER``.
  If the process of the retry dies too, the run has failed. If a command is stopped by Ctrl-C, it releases its trials.
  Released trials are run again in the same way, but do not count as deaths.
- A diverged run is marked by a user attribute. Optuna's samplers need a finite loss, so the store gets the worst
  finite loss so far. leaven itself counts the loss of a diverged run as infinite (``trial_log.py``).
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import replace
from typing import Any, Protocol, cast

import optuna
from optuna.exceptions import UpdateFinishedTrialError
from optuna.storages import BaseStorage
from optuna.trial import TrialState, create_trial

from leaven.recipe.errors import InputError
from leaven.training.outcome import Baseline, Outcome
from leaven.tuning.service.leases import Leases
from leaven.tuning.service.samplers import distributions
from leaven.tuning.service.search_plan import SearchPlan
from leaven.tuning.service.stores import StoreGone
from leaven.tuning.service.trial_log import (
    BEGAN,
    DIVERGED,
    ENDED,
    JOB,
    OWNER,
    PREDICTED,
    PURPOSE,
    RELEASED,
    RETRY_OF,
    SEED,
    Evaluation,
    TrialRequest,
    jobs_of,
    runs_of,
)

HUGE = 1e50  # the largest loss: the surrogate computes its fourth power, which must be finite
NEVER_ENDED = 1e6  # the stored loss of a diverged run before there is any finite loss
POLL = 0.5  # seconds between looks at the trials of this and of other commands


class Proposal(dict[str, float]):
    """The argument of an objective: a dict of log2 multipliers by name, with attributes.

    - ``number``: the number of the trial.
    - ``seed``: 0 in the search, so that all trials share init and data order; 1, 2, ... in runs that measure noise or
      confirm the best points.
    - ``origin``: the number of the first trial of this run, which differs from ``number`` in a retry. Use ``origin``
      to name checkpoints, so that a retry finds them.
    - ``baseline``: the loss curve of the best trial so far, with which an objective can decide to prune this run.
      None if this run must not be pruned.
    - ``worker``: the index of the calling thread, from 0. Concurrent calls have different indices.
    """

    def __init__(
        self,
        point: Mapping[str, float],
        number: int,
        seed: int = 0,
        origin: int | None = None,
        baseline: Baseline | None = None,
        *,
        worker: int = 0,
    ) -> None:
        super().__init__(point)
        self.number, self.seed, self.baseline, self.worker = number, seed, baseline, worker
        self.origin = number if origin is None else origin

    @property
    def rival(self) -> Baseline | None:
        """The former name of ``baseline``, for older objectives."""
        return self.baseline


class WorkerDied(Exception):
    """Raised by an objective to report that the process that computed the loss has died. The run is retried once."""


class TrialReleased(Exception):
    """Raised by an objective that stops without a result, for example at Ctrl-C. The run is started again later."""


class SearchObserver(Protocol):
    """Callbacks of a search: ``started`` is called when a trial starts, ``ended`` after trials have ended."""

    def started(self, proposal: Proposal, /) -> None: ...
    def ended(self, numbers: Sequence[int], /) -> None: ...


Objective = Callable[[Any], float | Outcome]  # of a Proposal, which is a dict[str, float]


class SearchLoop:
    """Starts the runs of a plan in threads and writes their results to the store."""

    def __init__(  # noqa: PLR0917 - one of each
        self,
        plan: SearchPlan,
        study: optuna.Study,
        store: BaseStorage,
        objective: Objective,
        workers: int,
        stop: Callable[[], bool],
        watch: SearchObserver | None,
        lease_seconds: float,
    ) -> None:
        self._plan, self._study, self._store = plan, study, store
        self._study_id = store.get_study_id_from_name(study.study_name)
        self._leases = Leases(store, self._study_id, lease_seconds)
        self._objective, self._stop, self._watch = objective, stop, watch
        self._pool, self._free = ThreadPoolExecutor(workers), list(reversed(range(workers)))
        self._pending: dict[Future[float | Outcome], Proposal] = {}
        self._error: Exception | None = None  # raised by the objective
        self._ended: list[int] = []  # trials that have ended since the last call of ``watch.ended``
        self._turn = 0  # index of the next proposal, at the last read of the store

    def run(self) -> list[Evaluation]:
        """Run the trials of the plan, and return all runs of the study.

        The method returns when the plan is complete and no command is running a trial, or when ``stop`` has returned
        true and the trials of this command have ended.
        """
        with self._leases:
            try:
                while True:
                    runs = self._look()
                    stopping = self._error is not None or self._stop()
                    request = self._plan.next(runs, self._turn, time.time()) if self._free and not stopping else None
                    if request is not None:
                        self._begin(request, runs)
                    elif self._ended:  # after all workers have got work, because the callback may be slow
                        if self._watch is not None:
                            self._watch.ended(self._ended)
                        self._ended = []
                    elif self._pending:
                        for future in wait(self._pending, POLL, FIRST_COMPLETED).done:
                            self._end(self._pending.pop(future), future)
                    elif stopping or not any(run.state == "running" for run in runs):
                        break
                    else:
                        time.sleep(POLL)  # other commands are running trials
            except BaseException as error:
                self._pool.shutdown(wait=False, cancel_futures=True)
                if not isinstance(error, StoreGone):
                    for proposal in self._pending.values():
                        self._close(proposal.number, released=True)
                raise
            self._pool.shutdown()
            if self._error is not None:
                raise self._error
            return runs

    def _look(self) -> list[Evaluation]:
        """Mark the running trials of dead commands as failed, then return all runs of the study."""
        trials = self._study.get_trials(deepcopy=False)
        running = {t.number: t.user_attrs.get(OWNER) for t in trials if t.state is TrialState.RUNNING}
        dead = self._leases.dead({owner for owner in running.values() if owner is not None})
        if taken := [number for number, owner in running.items() if owner in dead]:
            for number in taken:
                self._close(number)
            trials = self._study.get_trials(deepcopy=False)
        self._turn = sum(not job.startswith("retry:") for job in jobs_of(trials))
        return runs_of(trials, self._plan.axes)

    def _begin(self, request: TrialRequest, runs: list[Evaluation]) -> None:
        if (created := self._create(request)) is None:
            return
        number, point = created
        best = self._plan.baseline(runs, point) if request.purpose == "search" else None
        origin = int(request.attributes.get(RETRY_OF, number))
        proposal = Proposal(point, number, request.seed, origin, best, worker=self._free.pop())
        self._pending[self._pool.submit(self._objective, proposal)] = proposal
        if self._watch is not None:
            self._watch.started(proposal)

    def _create(self, request: TrialRequest) -> tuple[int, dict[str, float]] | None:
        """Create the trial of a request, and return its number and its point.

        Return None if another command already runs a trial for the same job, or if another command took this command
        for dead and closed the new trial.
        """
        # A template creates the trial in one call, so that no trial exists without the name of its job.
        template = create_trial(
            state=TrialState.RUNNING,
            params=request.point or {},
            distributions=distributions(self._plan.axes) if request.point else {},
            user_attrs={
                OWNER: self._leases.node,
                PURPOSE: request.purpose,
                SEED: request.seed,
                BEGAN: time.time(),
                # Two commands that have read the same trials choose the same name, and only one of them runs the job.
                JOB: request.name,
                **request.attributes,
            },
        )
        trial_id = self._store.create_new_trial(self._study_id, template)
        number = self._store.get_trial_number_from_id(trial_id)
        if jobs_of(self._study.get_trials(deepcopy=False))[request.name].number != number:  # a duplicate
            self._close(number)
            return None
        if request.point is not None:
            return number, request.point
        # A new Study object, because Optuna caches trials in a Study.
        study = optuna.Study(self._study.study_name, self._store, sampler=self._study.sampler)
        trial, point = optuna.Trial(study, trial_id), {}
        with suppress(UpdateFinishedTrialError):  # another command took this process for dead and closed the trial
            for key, limits in self._plan.axes.limits.items():
                if isinstance(limits, range):
                    point[key] = float(trial.suggest_categorical(key, [float(level) for level in limits]))
                else:
                    point[key] = trial.suggest_float(key, *limits)
            return number, point
        return None

    def _end(self, proposal: Proposal, future: "Future[float | Outcome]") -> None:
        self._free.append(proposal.worker)
        try:
            outcome = _outcome(future.result())
        except WorkerDied:
            self._close(proposal.number)
        except BaseException as error:
            self._close(proposal.number, released=True)
            if not isinstance(error, Exception):  # for example SystemExit
                raise
            if not isinstance(error, TrialReleased):
                self._error = error
        else:
            with suppress(UpdateFinishedTrialError):  # another command took this process for dead and retries the run
                self._record(proposal.number, outcome)

    def _record(self, number: int, outcome: Outcome) -> None:
        about = {key: getattr(outcome, key) for key in ("tokens", "flops", "seconds", "branches", "worker")}
        about |= {"curve": [point for point in outcome.curve if math.isfinite(point[1])]}
        about |= {DIVERGED: outcome.diverged, "stopped": outcome.stopped}
        about |= {PREDICTED: outcome.loss} if outcome.stopped else {}
        trial_id = self._trial_id(number)
        for key, value in about.items():
            if value:
                self._store.set_trial_user_attr(trial_id, key, value)
        self._store.set_trial_user_attr(trial_id, ENDED, time.time())
        loss, state = outcome.loss, TrialState.COMPLETE
        if outcome.diverged:
            # Optuna's samplers need a finite number: the worst finite loss, so that it does not dominate the others.
            others = runs_of(self._study.get_trials(deepcopy=False), self._plan.axes)
            loss = max((run.loss for run in others if run.loss is not None), default=NEVER_ENDED)
        if outcome.stopped:
            # Optuna's samplers use the last intermediate value of a pruned trial, and its step.
            self._store.set_trial_intermediate_value(trial_id, len(outcome.curve), loss)
            state = TrialState.PRUNED
        # Not Optuna's tell, which checks the trial before it writes: another command may close the trial in between.
        self._store.set_trial_state_values(trial_id, state, [loss])
        self._ended.append(number)

    def _trial_id(self, number: int) -> int:
        return self._store.get_trial_id_from_study_id_trial_number(self._study_id, number)

    def _close(self, number: int, *, released: bool = False) -> None:
        """Mark a trial as failed, unless it has ended already. ``released`` says that this command gave the trial up;
        then the trial does not count as one whose process died."""
        with suppress(UpdateFinishedTrialError):
            if released:
                self._store.set_trial_user_attr(self._trial_id(number), RELEASED, True)
            self._store.set_trial_state_values(self._trial_id(number), TrialState.FAIL)


def _outcome(result: object) -> Outcome:
    """Return the result of an objective as an Outcome. A nan loss or a loss beyond +-``HUGE`` becomes infinite, which
    marks a divergence.

    Raises:
        InputError: if the loss is not a number.
    """
    outcome = result if isinstance(result, Outcome) else Outcome(cast(float, result))
    try:
        if isinstance(outcome.loss, str | bytes):
            raise TypeError
        loss = float(outcome.loss)
    except OverflowError:  # of an int
        loss = math.inf
    except (TypeError, ValueError, RuntimeError):
        raise InputError(
            f"the objective returned {outcome.loss!r:.60}; return a loss (a number) or an Outcome"
        ) from None
    return replace(outcome, loss=loss if abs(loss) <= HUGE else math.inf)
