"""The loop of a search: it runs the trials that the plan (``search_plan.py``) asks for in threads, and writes their
results to the store.

All runs are trials of one Optuna study, whether they measure the noise, search, or confirm the best points. So any
number of commands on any machines can share a study, and the call that resumes a search is the same as the call that
starts one:

- Each trial is created with its owner (a command) and its ``job``, a name for the work that it does. There is no
  queue: the next job follows from the existing trials, so a crash cannot lose it. If two commands create a trial for
  the same job at once, the trial with the lower number runs and the other is a duplicate; every Optuna store numbers
  trials in order.
- Every command counts up a heartbeat in the store. A command of another machine whose heartbeat has not changed for
  ``lease_seconds`` is dead (``leases.py``). Other commands retry its trials.
- A run whose process died is retried once, by a trial with the job ``retry:NUMBER``. If the retry dies too, the run
  has failed. A trial that its owner released (Ctrl-C) does not count as dead.
- A run that diverged is stored with the worst finite loss so far, for Optuna's samplers, and with a mark; leaven
  reads its loss as infinite (``trial_log.py``).
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
from leaven.tuning.service import trial_log
from leaven.tuning.service.leases import Leases
from leaven.tuning.service.samplers import distributions
from leaven.tuning.service.search_plan import SearchPlan
from leaven.tuning.service.stores import StoreGone
from leaven.tuning.service.trial_log import EXPECTED, Evaluation, TrialRequest, finished, loss_of

HUGE = 1e50  # the largest loss: its fourth power must be finite in the surrogate
NEVER_ENDED = 1e6  # the score of a divergence before there is any finite loss
POLL = 0.5  # seconds between reads of the store for trials of other commands


class Proposal(dict[str, float]):
    """The argument of an objective: a dict of log2 multipliers by name, with attributes.

    - ``number``: the number of the trial.
    - ``seed``: 0 during the search, so that all trials share init and data order; 1, 2, ... in runs that measure the
      noise or confirm the best points.
    - ``origin``: the number of the first trial of this run. It differs from ``number`` if this trial is a retry. Use
      it to name checkpoints, so that a retry finds them.
    - ``baseline``: the best finished trial with a curve, for an objective that prunes; None in runs that must finish.
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
    """An error that an objective raises if its process died. The run is retried once."""


class TrialReleased(Exception):
    """An error that an objective raises to stop early. The next command runs the trial again."""


class SearchObserver(Protocol):
    """Callbacks of a search, called when a trial starts and when trials have ended."""

    def started(self, proposal: Proposal, /) -> None: ...
    def ended(self, numbers: Sequence[int], /) -> None: ...


Objective = Callable[[Any], float | Outcome]  # of a Proposal, which is a dict[str, float]


class SearchLoop:
    """The loop of a search: it starts the runs of the plan in threads and writes their results to the store."""

    def __init__(  # noqa: PLR0917 - one of each
        self,
        plan: SearchPlan,
        store: BaseStorage,
        objective: Objective,
        workers: int,
        stop: Callable[[], bool],
        watch: SearchObserver | None,
        lease_seconds: float,
    ) -> None:
        self._plan, self._study, self._store = plan, plan.study, store
        self._leases = Leases(store, store.get_study_id_from_name(plan.study.study_name), lease_seconds)
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
            return self._run()

    def _run(self) -> list[Evaluation]:
        try:
            while True:
                runs = self._look()
                stopping = self._error is not None or self._stop()
                request = self._plan.next(runs, self._turn, time.time()) if self._free and not stopping else None
                if request is not None:
                    self._begin(request, runs)
                elif self._ended:  # after all workers have work again, because the callback may be slow
                    if self._watch is not None:
                        self._watch.ended(self._ended)
                    self._ended = []
                elif self._pending:
                    for future in wait(self._pending, POLL, FIRST_COMPLETED).done:
                        self._end(self._pending.pop(future), future)
                elif stopping or not any(run.running for run in runs):
                    break
                else:
                    time.sleep(POLL)  # other commands are running trials
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
        """Close the trials of dead processes, then return all runs."""
        trials = self._study.get_trials(deepcopy=False)
        running = {t.number: t.user_attrs.get(trial_log.OWNER) for t in trials if t.state is TrialState.RUNNING}
        dead = self._leases.dead({owner for owner in running.values() if owner is not None})
        taken = [number for number, owner in running.items() if owner in dead]
        for number in taken:
            self._close(number)
        if taken:
            trials = self._study.get_trials(deepcopy=False)
        self._turn = trial_log.count_jobs(trials)
        return trial_log.runs(trials, len(self._plan.axes.start))

    def _begin(self, request: TrialRequest, runs: list[Evaluation]) -> None:
        created = self._create(request)
        if created is None:
            return
        number, point = created
        best = self._plan.baseline(runs, point) if request.purpose == "search" else None
        origin = int(dict(request.attributes).get(trial_log.RETRY_OF, number))
        proposal = Proposal(point, number, request.seed, origin, best, worker=self._free.pop())
        self._pending[self._pool.submit(self._objective, proposal)] = proposal
        if self._watch is not None:
            self._watch.started(proposal)

    def _create(self, request: TrialRequest) -> tuple[int, dict[str, float]] | None:
        """Create the trial of a request, and return its number and point.

        Return None if another command already runs a trial for the same job, or has closed this one.
        """
        about = {
            trial_log.OWNER: self._leases.node,
            trial_log.PURPOSE: request.purpose,
            trial_log.SEED: request.seed,
            trial_log.BEGAN: time.time(),
            # Two commands that have read the same trials choose the same name, and only one of them runs the job.
            trial_log.JOB: request.name,
            **dict(request.attributes),
        }
        drawn = request.point or {}
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
        if trial_log.is_duplicate(number, self._study.get_trials(deepcopy=False)):
            self._close(number)
            return None
        if request.point is not None:
            return number, request.point
        # A new Study object, because Optuna caches the trials in it.
        trial = optuna.Trial(optuna.Study(name, self._store, sampler=self._study.sampler), trial_id)
        point = {}
        try:
            for key, limits in self._plan.axes.limits.items():
                if isinstance(limits, range):
                    point[key] = float(trial.suggest_categorical(key, [float(level) for level in limits]))
                else:
                    point[key] = trial.suggest_float(key, *limits)
        except UpdateFinishedTrialError:  # another command took this process for dead and closed the trial
            return None
        return number, point

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
                self._record(proposal.number, outcome)

    def _record(self, number: int, outcome: Outcome) -> None:
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
        """Mark a trial as failed, unless another command has ended it."""
        with suppress(UpdateFinishedTrialError):
            self._store.set_trial_state_values(self._trial_id(number), TrialState.FAIL)

    def _give_back(self, proposal: Proposal) -> None:
        with suppress(UpdateFinishedTrialError):
            self._store.set_trial_user_attr(self._trial_id(proposal.number), trial_log.RELEASED, True)
        self._close(proposal.number)


def _outcome(result: object) -> Outcome:
    """Return the result of an objective as an Outcome. A loss above ``HUGE`` or below -``HUGE`` becomes infinite,
    which means a divergence.

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
