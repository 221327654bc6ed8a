"""A search over any Python function: `from leaven.tuning import search`. Needs no torch.

The one loop that asks and tells. All runs are trials of one Optuna study: those that measure the noise, the search,
and those that confirm the best few. What to do next follows from the trials in the store (``plan.py``), each run is
counted once (``ledger.py``), and what a dead command left is taken over (``leases.py``); so any number of commands on
any machines work on one study, and going on is the same as starting.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, cast

import optuna
from optuna.distributions import CategoricalDistribution, FloatDistribution
from optuna.exceptions import UpdateFinishedTrialError
from optuna.storages import BaseStorage
from optuna.trial import TrialState, create_trial

from leaven.recipe.errors import InputError
from leaven.training.outcome import Outcome
from leaven.tuning import ledger
from leaven.tuning.agreement import agree, begin, check_name
from leaven.tuning.arguments import HUGE, check
from leaven.tuning.arguments import axes as axes_of
from leaven.tuning.budget import Budget
from leaven.tuning.found import Found, found, rival
from leaven.tuning.leases import Leases
from leaven.tuning.ledger import EXPECTED, Job, Run, finished, loss_of
from leaven.tuning.methods import check_method, sampler
from leaven.tuning.plan import Plan, first
from leaven.tuning.proposal import Proposal
from leaven.tuning.stores import StoreGone, open_store
from leaven.tuning.trust_region import Axes

Objective = Callable[[Any], float | Outcome]  # of a Proposal, which is a dict[str, float]

NEVER_ENDED = 1e6  # what a divergence scores before there is any finite loss
LOOK = 0.5  # seconds between looks at what other commands do


class Lost(Exception):
    """Raised by an objective whose process died: the run is done once more."""


class Released(Exception):
    """Raised by an objective that was made to stop: the run is for the next command to do."""


class Watch(Protocol):
    """Who is told what happens."""

    def asked(self, proposal: Proposal, /) -> None: ...
    def ended(self, numbers: Sequence[int], /) -> None: ...


def search(  # noqa: PLR0917 - in the order in which one thinks of them
    objective: Objective,
    space: Mapping[str, tuple[float, float] | range],
    start: Mapping[str, float] | None = None,
    trials: int | None = 100,
    method: str = "trust-region",
    seed: int = 0,
    workers: int = 1,
    *,
    scales: Mapping[str, float] | None = None,
    near: Mapping[str, tuple[float, float]] | None = None,
    flops: float | None = None,
    hours: float | None = None,
    run_flops: float | None = None,
    noise: float | None = None,
    stop_at_noise: bool = True,
    storage: BaseStorage | Path | str | None = None,
    name: str = "leaven",
    stop: Callable[[], bool] = lambda: False,
    watch: Watch | None = None,
    lease_seconds: float = 60.0,
) -> Found:
    """Search for the lowest value of ``objective`` in ``trials`` runs of it, reruns included.

        found = search(lambda x: (x["lr"] - 1) ** 2, {"lr": (-3, 3)}, trials=30)
        found.params["lr"], found.interval

    The first runs are at the start, three of them to measure the noise where it is not given. The last are reruns
    of the best few, which alone decide between them. Optuna's dashboard sees an ordinary study.

    Args:
        objective: takes log2 multipliers by name (a :class:`leaven.tuning.proposal.Proposal`) and gives a loss, or
            an :class:`leaven.training.outcome.Outcome`; infinite, nan or beyond +-1e50 is a divergence. With
            ``workers`` it is called from so many threads.
        space: the lowest and the highest log2 multiplier by name, within -1000 and 1000; ``range(n)`` for a choice of
            n levels, which the objective gets by its number. As long as every run diverges, those that are called
            ``lr``, or end in ``.lr``, are lowered.
        start: log2 multipliers that are right as far as one knows; 0 for those that are not given.
        trials: None where ``flops`` or ``hours`` are the budget, of which, as of ``run_flops``, see
            :class:`leaven.tuning.budget.Budget`.
        method: one of ``leaven.tuning.methods.METHODS``.
        scales: how many octaves from the start an optimum typically is; 1 for those that are not given.
        near: the box in which a search begins, in octaves from the start; the whole space for those that are not
            given. All methods but ``grid`` extend it while the best lie at its end.
        noise: the standard deviation of the loss between runs of one point, if it is known.
        stop_at_noise: stop a trust-region search when some rounds have gained less than the noise.
        storage: an Optuna storage, its URL, or the file of a journal; in memory without. The same call goes on with
            what is there, also while others of it run.
        name: of the study in its storage.
        stop: asked now and then; once it says so, nothing new is begun, and the answer is of what there is.
        watch: is told of runs as this call begins and ends them, from its own thread.
        lease_seconds: for how long another machine's process may be silent before its runs are taken over.

    Raises:
        InputError: if an argument is not what it should be, or the stored study is of another space, method, seed or
            noise; or if the objective gives no loss.
        NothingFound: if every run diverged, or none ended.
        StoreGone: if the storage went away and did not come back.
    """
    check_method(method)
    check_name(name)
    check(objective=objective, space=space, start=start, scales=scales, near=near)
    check(trials=trials, flops=flops, hours=hours)
    check(run_flops=run_flops, noise=noise, seed=seed, workers=workers, lease_seconds=lease_seconds)
    axes = axes_of(space, start or {}, scales or {}, near or {})
    budget = Budget(trials, flops, hours, run_flops)
    first(axes, method, budget, noise)  # a grid that is too fine is refused before anything is written
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    store, here, what = open_store(storage), about(method, axes, seed, noise), f"the stored study {name}"
    study, there = begin(store, name, sampler(method, axes, seed, noise), here, what)
    agree(there, here, what, "give it another name")
    plan = Plan(study, axes, method, budget, noise, stop_at_noise)
    with Leases(store, store.get_study_id_from_name(name), lease_seconds) as leases:
        loop = _Loop(plan, store, leases, objective, workers, stop, watch)
        return found(plan, loop.run(), time.time(), stop())


def about(method: str, axes: Axes, seed: int, noise: float | None) -> dict[str, Any]:
    """What a search is of, for all commands to agree on."""

    def limits(name: str) -> list[Any]:
        d = axes.distributions[name]
        if isinstance(d, CategoricalDistribution):
            return ["choice", len(d.choices), axes.start[name]]
        return [d.low, d.high, axes.start[name]]

    near = {"near": {name: list(both) for name, both in axes.near.items()}} if axes.near else {}
    return {
        "method": method,
        "space": {name: limits(name) for name in axes.distributions},
        "scales": dict(zip(axes.start, axes.scale.tolist(), strict=True)),
        "seed": int(seed),
        "noise": None if noise is None else float(noise),
        **near,
    }


class _Loop:
    """Begins what the plan says is next, in threads, and tells the study how it ended."""

    def __init__(  # noqa: PLR0917 - one of each
        self,
        plan: Plan,
        store: BaseStorage,
        leases: Leases,
        objective: Objective,
        workers: int,
        stop: Callable[[], bool],
        watch: Watch | None,
    ) -> None:
        self._plan, self._study, self._store, self._leases = plan, plan.study, store, leases
        self._objective, self._stop, self._watch = objective, stop, watch
        self._pool, self._free = ThreadPoolExecutor(workers), list(reversed(range(workers)))
        self._pending: dict[Future[float | Outcome], Proposal] = {}
        self._error: Exception | None = None  # of the objective
        self._ended: list[int] = []  # that the watch has not been told of
        self._begun = 0  # jobs, here and elsewhere, at the last look

    def run(self) -> list[Run]:
        """Until there is nothing to do any more, here or elsewhere, or until asked to stop."""
        try:
            while True:
                runs = self._look()
                stopping = self._error is not None or self._stop()
                job = self._plan.next(runs, time.time()) if self._free and not stopping else None
                if job is not None:
                    self._begin(job, runs)
                elif self._ended:  # once all workers are at work again, for to tell may take its time
                    if self._watch is not None:
                        self._watch.ended(self._ended)
                    self._ended = []
                elif self._pending:
                    for future in wait(self._pending, LOOK, FIRST_COMPLETED).done:
                        self._end(self._pending.pop(future), future)
                elif stopping or not any(run.running for run in runs):
                    break
                else:
                    time.sleep(LOOK)  # others are at work
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

    def _look(self) -> list[Run]:
        """All runs, those of dead processes taken from them."""
        trials = self._study.get_trials(deepcopy=False)
        running = {t.number: t.user_attrs.get(ledger.OWNER) for t in trials if t.state is TrialState.RUNNING}
        dead = self._leases.dead({owner for owner in running.values() if owner is not None})
        taken = [number for number, owner in running.items() if owner in dead]
        for number in taken:
            self._close(number)
        if taken:
            trials = self._study.get_trials(deepcopy=False)
        self._begun = ledger.begun(trials)
        return ledger.runs(trials, len(self._plan.axes.start))

    def _begin(self, job: Job, runs: list[Run]) -> None:
        created = self._created(job)
        if created is None:
            return
        number, point = created
        best = rival(self._plan, runs, point) if job.purpose == "search" else None
        origin = int(dict(job.attributes).get(ledger.RETRY_OF, number))
        proposal = Proposal(point, number, job.seed, origin, best, worker=self._free.pop())
        self._pending[self._pool.submit(self._objective, proposal)] = proposal
        if self._watch is not None:
            self._watch.asked(proposal)

    def _created(self, job: Job) -> tuple[int, dict[str, float]] | None:
        """A trial for the job, its number and its point; None if another command does the job, or is to."""
        about = {
            ledger.OWNER: self._leases.node,
            ledger.PURPOSE: job.purpose,
            ledger.SEED: job.seed,
            ledger.BEGAN: time.time(),
            # Of two commands that have seen the same, one begins what is next.
            ledger.JOB: job.name or f"search:{self._begun}",
            **dict(job.attributes),
        }
        limits = self._plan.axes.distributions
        drawn = job.point or {}
        # All of it at once: a job is known by its name from the moment that it has a number.
        template = create_trial(
            state=TrialState.RUNNING,
            params=drawn,
            distributions={name: limits[name] for name in drawn},
            user_attrs=about,
        )
        name = self._study.study_name
        trial_id = self._store.create_new_trial(self._store.get_study_id_from_name(name), template)
        number = self._store.get_trial_number_from_id(trial_id)
        if ledger.void(number, self._study.get_trials(deepcopy=False)):
            self._close(number)
            return None
        if job.point is not None:
            return number, job.point
        # A study of its own: what Optuna's methods know of the trials is read once for each.
        asked = optuna.Trial(optuna.Study(name, self._store, sampler=self._study.sampler), trial_id)
        try:
            return number, {name: float(_suggested(asked, name, d)) for name, d in limits.items()}
        except UpdateFinishedTrialError:  # taken for dead in the middle of it
            return None

    def _end(self, proposal: Proposal, future: "Future[float | Outcome]") -> None:
        self._free.append(proposal.worker)
        try:
            outcome = _outcome(future.result())
        except Lost:
            self._close(proposal.number)
        except Released:
            self._give_back(proposal)
        except Exception as error:
            self._give_back(proposal)
            self._error = error
        except BaseException:  # SystemExit, say
            self._give_back(proposal)
            raise
        else:
            with suppress(UpdateFinishedTrialError):  # it was taken for dead: the run is another's by now
                self._tell(proposal.number, outcome)

    def _tell(self, number: int, outcome: Outcome) -> None:
        about = {key: getattr(outcome, key) for key in ("tokens", "flops", "seconds", "branches", "worker")}
        about |= {"curve": [point for point in outcome.curve if math.isfinite(point[1])]}
        about |= {ledger.DIVERGED: outcome.diverged, "stopped": outcome.stopped}
        about |= {EXPECTED: outcome.loss} if outcome.stopped else {}
        trial_id = self._trial_id(number)
        for key, value in about.items():
            if value:
                self._store.set_trial_user_attr(trial_id, key, value)
        self._store.set_trial_user_attr(trial_id, ledger.ENDED, time.time())
        loss, state = outcome.loss, TrialState.COMPLETE
        if outcome.diverged:
            # Optuna's methods want a number: the worst that did not diverge, so as not to drown the others.
            losses = [loss_of(other) for other in finished(self._study)]
            loss = max(filter(math.isfinite, losses), default=NEVER_ENDED)
        if outcome.stopped:
            # Optuna's methods look at what a pruned trial reported last, and at how many reports it was.
            self._store.set_trial_intermediate_value(trial_id, len(outcome.curve), loss)
            state = TrialState.PRUNED
        # Not Optuna's tell, which looks first whether the trial is running: another may end it in between.
        self._store.set_trial_state_values(trial_id, state, [loss])
        self._ended.append(number)

    def _trial_id(self, number: int) -> int:
        study = self._store.get_study_id_from_name(self._study.study_name)
        return self._store.get_trial_id_from_study_id_trial_number(study, number)

    def _close(self, number: int) -> None:
        """End a trial without a result; another may have done so."""
        with suppress(UpdateFinishedTrialError):
            self._store.set_trial_state_values(self._trial_id(number), TrialState.FAIL)

    def _give_back(self, proposal: Proposal) -> None:
        with suppress(UpdateFinishedTrialError):
            self._store.set_trial_user_attr(self._trial_id(proposal.number), ledger.RELEASED, True)
        self._close(proposal.number)


def _suggested(asked: optuna.Trial, name: str, limits: FloatDistribution | CategoricalDistribution) -> Any:
    if isinstance(limits, CategoricalDistribution):
        return asked.suggest_categorical(name, limits.choices)
    return asked.suggest_float(name, limits.low, limits.high)


def _outcome(result: object) -> Outcome:
    """What an objective gave. With a loss that is huge nothing can be worked out: it counts as a divergence.

    Raises:
        InputError: if it is no loss.
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
            f"the objective gave {outcome.loss!r:.60}; it gives a loss, which is a number, or an Outcome"
        ) from None
    return replace(outcome, loss=loss if abs(loss) <= HUGE else math.inf)
