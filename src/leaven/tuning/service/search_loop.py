"""Run a search: ask the plan (``search_plan.py``) for a trial, run it in a thread, and store its result.

Several commands may run the same search at once. If a command dies, the others take over its trials:

1. Whenever a command reads the trials, it closes the running attempts of dead commands. A command is dead if its
   process on this machine has ended, or if it has sent no heartbeat for a minute (``leases.py``).
2. The trials of the closed attempts then wait for a retry (:attr:`StoredTrial.retry`). The plan asks for retries
   first.
3. A retry is a new attempt with a new number. ``Proposal.origin`` is the number of the trial's first attempt.
   Checkpoints are named by it, so a retry finds the checkpoints of earlier attempts.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, cast

from leaven.errors import InputError
from leaven.training.outcome import Baseline, Outcome, curve_of
from leaven.tuning.service.leases import LEASE_SECONDS, Leases
from leaven.tuning.service.samplers import SeededSampler
from leaven.tuning.service.search_plan import SearchPlan, by_surrogate
from leaven.tuning.service.stored_study import OWNER, RETRY_OF, StoredStudy, StoredTrial, TrialRequest
from leaven.tuning.service.stores import StoreGone

HUGE = 1e50  # the largest loss: the surrogate computes its fourth power, which must be finite
# The functions that convert the fields of an Outcome to Python's own types.
KINDS: dict[str, Callable[[Any], Any]] = {
    "loss": float,
    "tokens": int,
    "flops": float,
    "seconds": float,
    "curve": curve_of,
    "branches": curve_of,
    "stopped": bool,
}
STORE_POLL = 0.5  # seconds between reads of the store while trials run
# A command ends if so many of its trials, or of one of its workers, fail in a row. Its machine is then probably
# broken: a disk or a GPU is away. Values may be the cause, too: if a fifth of all points fail, most searches of 64
# trials have two failed trials in a row, but fewer than one in ten has four.
FAILURES = 4


class Proposal(dict[str, float]):
    """A trial's point, passed to the objective: a log2 multiplier or an index of a level for each name.

    A proposal also has these attributes:

    - ``number``: the number of this attempt at the trial. Each retry of the trial has a new number.
    - ``seed``: 0 in the search, so that all trials share init and data order; 1, 2, ... if a trial repeats a point.
    - ``origin``: the number of the trial's first attempt. Name checkpoints by ``origin``, so that a retry finds them.
    - ``baseline``: the best trial so far with the same levels of all choices. Prune by its curve and loss. None: do
      not prune.
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


class WorkerDied(Exception):
    """Raised by an objective if the process that computed the loss has died. The trial is retried once. The message
    says how it died, such as "ended with exit code 1"."""


class TrialReleased(Exception):
    """Raised by an objective that stops without a result, for example at Ctrl-C. The trial is retried later."""


Objective = Callable[[Any], float | Outcome]  # the argument is a Proposal, which is a dict[str, float]
Objectives = Callable[[Sequence[Proposal]], Sequence[float | Outcome]]  # the proposals that a worker runs at once


@dataclass
class SearchLoop:
    """Runs the trials of a :class:`SearchPlan` in threads, and writes their results to the store.

        with SearchLoop(...) as loop:
            for event in loop:
                ...

    An event is the :class:`Proposal` of a new trial, or a list of the numbers of trials that have ended. If the
    ``with`` block ends with an exception, the running trials are retried later.

    The iterator raises InputError if ``FAILURES`` trials in a row fail, or if the objective does not return a loss.
    If the objective raises an exception, the iterator raises it too, except WorkerDied and TrialReleased.
    """

    plan: SearchPlan
    stored: StoredStudy
    objectives: Objectives
    workers: int  # number of threads
    stop: Callable[[], bool]  # returns whether the user stops the search
    lease_seconds: float = LEASE_SECONDS
    stack: int = 1  # number of trials that a thread runs at once
    ready: Callable[[], bool] = lambda: True  # returns whether a trial may begin
    trials: list[StoredTrial] = field(default_factory=list, init=False)  # all of the study, as last read

    def __post_init__(self) -> None:
        plan, stored = self.plan, self.stored
        self._sampler = None if by_surrogate(plan.method) else SeededSampler(plan.method, plan.axes, plan.seed)
        self._leases = Leases(stored.store, stored.id, self.lease_seconds, now=stored.now)
        self._pool, self._free = ThreadPoolExecutor(self.workers), list(reversed(range(self.workers)))
        self._next: list[Proposal] = []  # proposals collected for the next free thread
        self._pending: dict[Future[Sequence[float | Outcome]], list[Proposal]] = {}
        self._error: Exception | None = None  # raised by the objective
        self._ended: list[int] = []  # numbers of trials that have ended since the last event
        self._failed: list[Sequence[Proposal]] = []  # calls of the objective that failed since one worked
        self._of_workers: dict[int, list[Sequence[Proposal]]] = {}  # the same calls, by worker
        self._failure = ""  # the message of the last failed call

    def __enter__(self) -> "SearchLoop":
        self._leases.__enter__()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self._pool.shutdown(wait=error is None, cancel_futures=error is not None)
            if error is not None and not isinstance(error, StoreGone):
                for proposal in chain(self._next, *self._pending.values()):
                    self.stored.close(proposal.number, released=True)
        finally:
            self._leases.__exit__()

    def __iter__(self) -> "Iterator[Proposal | list[int]]":
        turn = 0
        while True:
            if self._free:
                turn = self._read_trials()
            stopping, request = self._error is not None or self.stop(), None
            if self._free and not stopping:
                request = self.plan.next(self.trials, turn, self.stored.now())
            waits = request is not None and not self.ready()
            if request is not None and not waits:
                if (proposal := self._begin(request)) is not None:
                    yield proposal
            elif self._next:  # the plan gives no further trial now, so start the collected ones
                self._submit()
            elif self._ended:  # after all workers have got work, because handling the event may be slow
                ended, self._ended = self._ended, []
                yield ended
            elif self._pending:
                self._wait()
            elif not waits and (stopping or not any(trial.state == "running" for trial in self.trials)):
                # At the end of a search, fewer than FAILURES trials may be left, each with two failed attempts. So
                # attempts count here. If the user stops the command, any failed trial is given back.
                enough = stopping or len(self._failed) >= FAILURES
                if self._error is None and enough and any(trial.has_result for trial in self.trials):
                    self._give_back(self._failed, fails=not stopping)
                break
            else:
                time.sleep(STORE_POLL)  # a trial may not begin yet, or other commands are running trials
        if self._error is not None:
            raise self._error

    def _read_trials(self) -> int:
        """Close the attempts of dead commands, then read all trials. Return how many trials were started."""
        log = self.stored.read()
        attempts = log.attempts.items()
        running = {number: a.user_attrs.get(OWNER) for number, a in attempts if not a.state.is_finished()}
        dead = self._leases.dead({owner for owner in running.values() if owner is not None})
        for number, owner in running.items():
            if owner in dead:
                self.stored.close(number, ended=self._leases.clocks[str(owner)])
        if dead:
            self.stored.read()
        # Times of a trial are by the clock of its owner, which may differ from this machine's.
        clocks = {number: self._leases.clocks.get(str(owner)) for number, owner in running.items()}
        self.trials = [
            replace(trial, spans=(*trial.spans[:-1], (trial.spans[-1][0], clocks.get(trial.number))))
            if trial.state == "running" and trial.spans
            else trial
            for trial in log.trials.values()
        ]
        return log.started

    def _begin(self, request: TrialRequest) -> Proposal | None:
        """Create the trial of a request and queue it for a worker. Return its proposal, or None if another command
        runs this trial or has declared this command dead."""
        if (created := self.stored.create(request, self._leases.node, self._sampler)) is None:
            return None
        number, point = created
        best = self.plan.baseline(self.trials, point) if request.purpose == "search" else None
        origin = int(request.attributes.get(RETRY_OF, number))
        proposal = Proposal(point, number, request.seed, origin, best, worker=self._free[-1])
        self._next.append(proposal)
        if len(self._next) == self.stack:
            self._submit()
        return proposal

    def _submit(self) -> None:
        proposals, self._next = self._next, []
        self._free.pop()  # the worker of these proposals
        self._pending[self._pool.submit(self.objectives, proposals)] = proposals

    def _wait(self) -> None:
        """Handle the calls of the objective that end within ``STORE_POLL``. If none ends, read the store."""
        done = wait(self._pending, STORE_POLL, FIRST_COMPLETED).done
        for future in done:
            self._end(self._pending[future], future)
            del self._pending[future]  # only now, so that an error in ``_end`` releases the trials
        if not done:
            self._read_trials()

    def _end(self, proposals: Sequence[Proposal], future: "Future[Sequence[float | Outcome]]") -> None:
        self._free.append(proposals[0].worker)
        try:
            outcomes = [_outcome(result) for result in future.result()]
        except WorkerDied as died:
            for proposal in proposals:
                self.stored.close(proposal.number, released=self._error is not None)
            if self._error is None:
                of_worker = self._of_workers.setdefault(proposals[0].worker, [])
                self._failed.append(proposals)
                of_worker.append(proposals)
                self._failure = f"trial {proposals[0].number} {str(died) or 'died'}"
                # While an earlier call still runs, its result may show that the machine works. But the GPU of this
                # worker may be broken.
                if next(iter(self._pending)) is future and _without_retries(self._failed) >= FAILURES:
                    self._give_back(self._failed)
                elif _without_retries(of_worker) >= FAILURES:
                    self._give_back(of_worker)
        except BaseException as error:
            for proposal in proposals:
                self.stored.close(proposal.number, released=True)
            if not isinstance(error, Exception):  # for example SystemExit
                raise
            if not isinstance(error, TrialReleased):
                self._error = error
        else:
            self._failed.clear()
            self._of_workers.pop(proposals[0].worker, None)
            for proposal, outcome in zip(proposals, outcomes, strict=True):
                if self.stored.record(proposal.number, outcome):
                    self._ended.append(proposal.number)

    def _give_back(self, calls: Sequence[Sequence[Proposal]], *, fails: bool = True) -> None:
        """Allow one more attempt for the failed trials of ``calls``, but only once per trial. With ``fails``, end
        this search with an InputError if an attempt was allowed."""
        numbers = {proposal.number for call in calls for proposal in call}
        if numbers and self.stored.give_back(numbers, self._leases.node) and fails:
            self._error = InputError(
                f"{len(calls)} attempts in a row failed on this machine: {self._failure}; correct the cause, and run "
                "the same command again to repeat the failed trials"
            )
        self._failed.clear()
        self._of_workers.clear()


def _without_retries(calls: Sequence[Sequence[Proposal]]) -> int:
    return len({call[0].origin for call in calls})


def _outcome(result: object) -> Outcome:
    """Convert an objective's result to an Outcome. A loss that is nan or beyond +-1e50 becomes infinite."""
    outcome = result if isinstance(result, Outcome) else Outcome(cast(float, result))
    about = {name: _converted(outcome, name, kind) for name, kind in KINDS.items()}
    return replace(outcome, **about | {"loss": about["loss"] if abs(about["loss"]) <= HUGE else math.inf})


def _converted(outcome: Outcome, name: str, kind: Callable[[Any], Any]) -> Any:
    value = getattr(outcome, name)
    if value is None and name != "loss":
        value = getattr(Outcome(0.0), name)
    try:
        if isinstance(value, str | bytes) or (name == "loss" and isinstance(value, bool)):
            raise TypeError
        return kind(value)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        if name == "loss" and isinstance(error, OverflowError):  # an int that is too large for a float
            return math.inf
        of = "" if name == "loss" else f" as {name} of an Outcome"
        raise InputError(
            f"the objective returned {value!r:.60}{of}; return a loss (a number) or an Outcome of numbers"
        ) from None
