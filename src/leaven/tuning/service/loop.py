"""The loop of a search: runs what the plan asks for in threads, and writes the results to the store."""

import math
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import replace
from typing import Any, cast

import optuna
from optuna.exceptions import UpdateFinishedTrialError
from optuna.storages import BaseStorage
from optuna.trial import TrialState, create_trial

from leaven.recipe.errors import InputError
from leaven.training.outcome import Outcome
from leaven.tuning.service import trial_log
from leaven.tuning.service.interface import Proposal, SearchObserver, TrialReleased, WorkerDied
from leaven.tuning.service.leases import Leases
from leaven.tuning.service.plan import Plan
from leaven.tuning.service.samplers import distributions
from leaven.tuning.service.stores import StoreGone
from leaven.tuning.service.trial_log import EXPECTED, Evaluation, TrialRequest, finished, loss_of

Objective = Callable[[Any], float | Outcome]  # of a Proposal, which is a dict[str, float]

HUGE = 1e50  # the largest loss and noise: their fourth powers must be finite in the surrogate
NEVER_ENDED = 1e6  # the score of a divergence before there is any finite loss
LOOK = 0.5  # seconds between reads of the store for trials of other commands


class SearchLoop:
    """Runs what the plan asks for in threads, and writes the results to the store."""

    def __init__(  # noqa: PLR0917 - one of each
        self,
        plan: Plan,
        store: BaseStorage,
        leases: Leases,
        objective: Objective,
        workers: int,
        stop: Callable[[], bool],
        watch: SearchObserver | None,
    ) -> None:
        self._plan, self._study, self._store, self._leases = plan, plan.study, store, leases
        self._objective, self._stop, self._watch = objective, stop, watch
        self._pool, self._free = ThreadPoolExecutor(workers), list(reversed(range(workers)))
        self._pending: dict[Future[float | Outcome], Proposal] = {}
        self._error: Exception | None = None  # raised by the objective
        self._ended: list[int] = []  # trials that have ended since the last call of ``watch.ended``
        self._begun = 0  # jobs of all commands, at the last read of the store

    def run(self) -> list[Evaluation]:
        """Run until the plan has no more runs and no command is running one, or until ``stop``. Returns all runs."""
        try:
            while True:
                runs = self._look()
                stopping = self._error is not None or self._stop()
                job = self._plan.next(runs, time.time()) if self._free and not stopping else None
                if job is not None:
                    self._begin(job, runs)
                elif self._ended:  # after all workers have work again, because the callback may be slow
                    if self._watch is not None:
                        self._watch.ended(self._ended)
                    self._ended = []
                elif self._pending:
                    for future in wait(self._pending, LOOK, FIRST_COMPLETED).done:
                        self._end(self._pending.pop(future), future)
                elif stopping or not any(run.running for run in runs):
                    break
                else:
                    time.sleep(LOOK)  # other commands are running trials
        except BaseException as error:
            self._pool.shutdown(wait=False, cancel_futures=True)
            if not isinstance(error, StoreGone):
                for proposal in self._pending.values():
                    self._give_back(proposal)
            raise
        self._pool.shutdown()
        if self._error is not None:
            raise self._error
        return runs

    def _look(self) -> list[Evaluation]:
        """Return all runs, after closing the trials of dead processes."""
        trials = self._study.get_trials(deepcopy=False)
        running = {t.number: t.user_attrs.get(trial_log.OWNER) for t in trials if t.state is TrialState.RUNNING}
        dead = self._leases.dead({owner for owner in running.values() if owner is not None})
        taken = [number for number, owner in running.items() if owner in dead]
        for number in taken:
            self._close(number)
        if taken:
            trials = self._study.get_trials(deepcopy=False)
        self._begun = trial_log.begun(trials)
        return trial_log.runs(trials, len(self._plan.axes.start))

    def _begin(self, job: TrialRequest, runs: list[Evaluation]) -> None:
        created = self._created(job)
        if created is None:
            return
        number, point = created
        best = self._plan.baseline(runs, point) if job.purpose == "search" else None
        origin = int(dict(job.attributes).get(trial_log.RETRY_OF, number))
        proposal = Proposal(point, number, job.seed, origin, best, worker=self._free.pop())
        self._pending[self._pool.submit(self._objective, proposal)] = proposal
        if self._watch is not None:
            self._watch.asked(proposal)

    def _created(self, job: TrialRequest) -> tuple[int, dict[str, float]] | None:
        """Create the trial of a job. Returns its number and point, or None if another command has the job."""
        about = {
            trial_log.OWNER: self._leases.node,
            trial_log.PURPOSE: job.purpose,
            trial_log.SEED: job.seed,
            trial_log.BEGAN: time.time(),
            # Two commands that have read the same trials choose the same name, and only one of them runs the job.
            trial_log.JOB: job.name or f"search:{self._begun}",
            **dict(job.attributes),
        }
        limits = self._plan.axes.limits
        drawn = job.point or {}
        # In one call, so that a trial never exists without the name of its job.
        template = create_trial(
            state=TrialState.RUNNING,
            params=drawn,
            distributions=distributions(self._plan.axes) if drawn else {},
            user_attrs=about,
        )
        name = self._study.study_name
        trial_id = self._store.create_new_trial(self._store.get_study_id_from_name(name), template)
        number = self._store.get_trial_number_from_id(trial_id)
        if trial_log.void(number, self._study.get_trials(deepcopy=False)):
            self._close(number)
            return None
        if job.point is not None:
            return number, job.point
        # A new Study object, because Optuna caches the trials in it.
        asked = optuna.Trial(optuna.Study(name, self._store, sampler=self._study.sampler), trial_id)
        try:
            return number, {name: float(_suggested(asked, name, both)) for name, both in limits.items()}
        except UpdateFinishedTrialError:  # another command took this process for dead and closed the trial
            return None

    def _end(self, proposal: Proposal, future: "Future[float | Outcome]") -> None:
        self._free.append(proposal.worker)
        try:
            outcome = _outcome(future.result())
        except WorkerDied:
            self._close(proposal.number)
        except TrialReleased:
            self._give_back(proposal)
        except Exception as error:
            self._give_back(proposal)
            self._error = error
        except BaseException:  # SystemExit, say
            self._give_back(proposal)
            raise
        else:
            with suppress(UpdateFinishedTrialError):  # another command took this process for dead and retries the run
                self._tell(proposal.number, outcome)

    def _tell(self, number: int, outcome: Outcome) -> None:
        about = {key: getattr(outcome, key) for key in ("tokens", "flops", "seconds", "branches", "worker")}
        about |= {"curve": [point for point in outcome.curve if math.isfinite(point[1])]}
        about |= {trial_log.DIVERGED: outcome.diverged, "stopped": outcome.stopped}
        about |= {EXPECTED: outcome.loss} if outcome.stopped else {}
        trial_id = self._trial_id(number)
        for key, value in about.items():
            if value:
                self._store.set_trial_user_attr(trial_id, key, value)
        self._store.set_trial_user_attr(trial_id, trial_log.ENDED, time.time())
        loss, state = outcome.loss, TrialState.COMPLETE
        if outcome.diverged:
            # Optuna's samplers need a finite number: the worst finite loss, so that it does not dominate the others.
            losses = [loss_of(other) for other in finished(self._study)]
            loss = max(filter(math.isfinite, losses), default=NEVER_ENDED)
        if outcome.stopped:
            # Optuna's samplers use the last intermediate value of a pruned trial, and its step.
            self._store.set_trial_intermediate_value(trial_id, len(outcome.curve), loss)
            state = TrialState.PRUNED
        # Not Optuna's tell, which first checks that the trial is running: another command may close it in between.
        self._store.set_trial_state_values(trial_id, state, [loss])
        self._ended.append(number)

    def _trial_id(self, number: int) -> int:
        study = self._store.get_study_id_from_name(self._study.study_name)
        return self._store.get_trial_id_from_study_id_trial_number(study, number)

    def _close(self, number: int) -> None:
        """Set a trial to failed, unless another command has ended it."""
        with suppress(UpdateFinishedTrialError):
            self._store.set_trial_state_values(self._trial_id(number), TrialState.FAIL)

    def _give_back(self, proposal: Proposal) -> None:
        with suppress(UpdateFinishedTrialError):
            self._store.set_trial_user_attr(self._trial_id(proposal.number), trial_log.RELEASED, True)
        self._close(proposal.number)


def _suggested(asked: optuna.Trial, name: str, limits: tuple[float, float] | range) -> Any:
    if isinstance(limits, range):
        return asked.suggest_categorical(name, [float(level) for level in limits])
    return asked.suggest_float(name, *limits)


def _outcome(result: object) -> Outcome:
    """Return the result of an objective as an Outcome; a loss beyond ``HUGE`` counts as a divergence.

    Raises:
        InputError: if it is not a number.
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
