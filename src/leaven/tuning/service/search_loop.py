"""Run a search: join its study in a store, run the trials that the plan (``search_plan.py``) asks for in threads, and
write their results to the store.

All runs are trials of one Optuna study, whether they measure the noise, search, or confirm the best points. So any
number of commands on any machines can share a study, and the call that resumes a search is the same as the call that
starts one:

- The command that creates the study stores its settings. Every command that joins the study compares its own settings
  with the stored ones (:func:`join_study`).
- Each trial is created with its owner (a command) and its ``job``, a name for the work that it does. There is no
  queue: the next job follows from the existing trials, so a crash cannot lose a job. If two commands create a trial
  for the same job at once, the trial with the lower number runs and the other one is closed as a duplicate.
- Every command counts up a heartbeat in the store. A command of another machine whose heartbeat has not changed for
  ``lease_seconds`` is dead (``leases.py``), and other commands retry its trials.
- A run whose process died is retried once, by a trial with the job ``retry:NUMBER``. If the retry dies too, the run
  has failed. A trial that its owner released (Ctrl-C) does not count as dead.
- A run that diverged is stored with a mark, and with the worst finite loss so far for Optuna's samplers. leaven reads
  its loss as infinite (``trial_log.py``).
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import replace
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any, Protocol, cast

import numpy as np
import optuna
from optuna.exceptions import DuplicatedStudyError, UpdateFinishedTrialError
from optuna.storages import BaseStorage
from optuna.trial import TrialState, create_trial

from leaven.recipe.errors import InputError
from leaven.recipe.recipe import Recipe, differences
from leaven.training.outcome import Baseline, Outcome
from leaven.training.run_folder import describe_changes
from leaven.tuning.algorithm.prior import EarlierTrials
from leaven.tuning.algorithm.trust_region import Axes
from leaven.tuning.service.leases import Leases
from leaven.tuning.service.samplers import METHODS, SeededSampler, distributions
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

ABOUT = "leaven:about"  # an attribute of a study: its settings (recipe, space, method and so on) by name
EXPECTED, EARLIER = "expected", "earlier"  # the settings with knowledge from before the search
OPTIONS = {EXPECTED: "--prior (or expected)", EARLIER: "--from-study (or earlier)"}
LONGEST = 512  # characters of a study's name in Optuna's tables
PATIENCE = 5.0  # seconds to wait for the settings of a study that another command has just created


class Proposal(dict[str, float]):
    """The argument of an objective: a dict of log2 multipliers by name, with attributes.

    - ``number``: the number of the trial.
    - ``seed``: 0 in the search, so that all trials share init and data order; 1, 2, ... in runs that measure noise or
      confirm the best points.
    - ``origin``: the number of the first trial of this run, which differs from ``number`` in a retry. Use ``origin``
      to name checkpoints, so that a retry finds them.
    - ``baseline``: the best finished trial with a curve, for an objective that prunes; None if this run must finish.
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
    """The error that an objective raises if its process died. The run is retried once."""


class TrialReleased(Exception):
    """The error that an objective raises to give its trial back. The trial is run again later."""


class SearchObserver(Protocol):
    """Callbacks of a search, called when a trial starts and when trials have ended."""

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

        This ends when the plan is complete and no command is running a trial, or when ``stop`` has returned true and
        the trials of this command have ended.
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
        """Close the trials of dead commands, then return all runs."""
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
        """Create the trial of a request, and return its number and point.

        Return None if another command already runs a trial for the same job, or has closed the new trial.
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
            if not isinstance(error, Exception):  # SystemExit, say
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
        """Mark a trial as failed if no other command has ended it. A ``released`` trial does not count as a death."""
        with suppress(UpdateFinishedTrialError):
            if released:
                self._store.set_trial_user_attr(self._trial_id(number), RELEASED, True)
            self._store.set_trial_state_values(self._trial_id(number), TrialState.FAIL)


def _outcome(result: object) -> Outcome:
    """Return the result of an objective as an Outcome. A loss beyond +-``HUGE`` becomes infinite, a divergence.

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


def check_search(method: str, axes: Axes, name: str) -> None:
    """Raise InputError if the method does not exist or ignores the prior knowledge in ``axes``, or if the name of the
    study is empty or too long for a store."""
    if method not in METHODS:
        close = get_close_matches(str(method), METHODS, n=1, cutoff=0.5)
        hint = f"did you mean {close[0]}? " if close else ""
        raise InputError(f"method {method!s:.60}: {hint}there are {', '.join(METHODS)}")
    if method != "trust-region" and (axes.expected or axes.earlier):
        raise InputError(
            f"method {method} uses no knowledge from before the search; leave {' and '.join(OPTIONS.values())} out, "
            "or use method trust-region"
        )
    if not (isinstance(name, str) and 0 < len(name) <= LONGEST):
        raise InputError(f"the study's name is {name!r:.60}; give it a text of 1 to {LONGEST} characters")


def check_recipe(there: Recipe, here: Recipe, what: str) -> None:
    """Raise InputError if the recipe of a study (``there``) differs from the recipe of this command (``here``)."""
    if changes := differences(there, here):
        raise InputError(f"{what} has another recipe: {describe_changes(changes)}; use another --study")


def join_study(
    store: BaseStorage,
    name: str,
    what: str,
    instead: str,
    *,
    method: str,
    axes: Axes,
    seed: int,
    noise: float | None,
    own_noise: bool = True,
    recipe: Recipe | None = None,
    shared: Mapping[str, Any] = MappingProxyType({}),
) -> tuple[optuna.Study, Axes, float | None]:
    """Return (study, axes, noise) of the study called ``name``, which is created if it does not exist.

    A new study gets this command's settings and prior knowledge. A stored study keeps the knowledge with which it was
    created, because laws and the earlier study may have changed since then; the returned axes contain it.

    Args:
        what: the name of the study in messages.
        instead: what to do if the study has other settings, in messages.
        own_noise: whether ``noise`` must equal the noise of the stored study. If false, a study that was created with
            the trials of an earlier study keeps its stored noise.
        recipe: the recipe that all commands on the study must share.
        shared: further settings that all commands on the study must share.

    Raises:
        InputError: if the study was created by another program, with other settings, or without the kind of prior
            knowledge that this command gives.
    """
    here: dict[str, Any] = {
        "method": method,
        "space": {
            key: ["choice", len(limits), axes.start[key]] if isinstance(limits, range) else [*limits, axes.start[key]]
            for key, limits in axes.limits.items()
        },
        "scales": dict(zip(axes.limits, axes.scale.tolist(), strict=True)),
        "seed": seed,
        "noise": noise,
    }
    if axes.near:
        here["near"] = {key: list(both) for key, both in axes.near.items()}
    here |= shared
    created = dict(here)
    if axes.expected:
        created[EXPECTED] = {key: list(both) for key, both in axes.expected.items()}
    if axes.earlier is not None:
        created[EARLIER] = {"points": axes.earlier.points.tolist(), "losses": axes.earlier.losses.tolist()}
        created[EARLIER]["noise"] = axes.earlier.noise
    if recipe is not None:
        created["recipe"] = recipe.model_dump(mode="json")
    study = optuna_study(store, name, SeededSampler(method, axes, seed), created, what)
    there = study.user_attrs[ABOUT]
    if recipe is not None and "recipe" in there:
        check_recipe(Recipe.model_validate(there["recipe"]), recipe, what)
    if EARLIER in there and not own_noise:
        here["noise"] = noise = there["noise"]
    for key, value in here.items():
        if key not in there:
            raise InputError(f"{what} was created by another program, because it has no {key}; {instead}")
        if there[key] != value:
            raise InputError(f"{what} has another {key}: {_difference(there[key], value)}; {instead}")
    for key, option in OPTIONS.items():
        if key in created and key not in there:
            raise InputError(f"{what} was created without {option}; leave this option out, or use another study")
    expected = {key: (low, high) for key, (low, high) in there.get(EXPECTED, {}).items()}
    earlier = there.get(EARLIER)
    if earlier is not None:
        earlier = EarlierTrials(np.array(earlier["points"]), np.array(earlier["losses"]), earlier["noise"])
    return study, replace(axes, expected=expected, earlier=earlier), noise


def optuna_study(
    store: BaseStorage, name: str, sampler: optuna.samplers.BaseSampler, settings: dict[str, Any], what: str
) -> optuna.Study:
    """Return the Optuna study called ``name``, which is created with these settings if it does not exist.

    The study is looked up first, because a failed attempt to create it adds a line to a journal. If several commands
    start at once, one of them creates the study and then writes its settings. If this command dies before it has
    written them, another command writes its own.
    """

    def load() -> optuna.Study:
        return optuna.load_study(study_name=name, storage=store, sampler=sampler)

    try:
        study = load()
    except KeyError:
        with suppress(DuplicatedStudyError):  # another command was quicker
            optuna.create_study(study_name=name, storage=store).set_user_attr(ABOUT, settings)
        study = load()
    until = time.monotonic() + PATIENCE
    while not study.user_attrs and not study.get_trials(deepcopy=False) and time.monotonic() < until:
        time.sleep(0.02)
    if ABOUT not in study.user_attrs:
        if study.user_attrs or study.get_trials(deepcopy=False):
            raise InputError(
                f"{what} was created by an older version of leaven or by another program; use another name or folder"
            )
        study.set_user_attr(ABOUT, settings)
    return study


def _difference(there: Any, here: Any) -> str:
    there, here = ("none" if value is None else value for value in (there, here))
    if not (isinstance(there, dict) and isinstance(here, dict)):
        return f"{there} there, {here} here"
    parts = [f"{n} {there[n]} there, {here[n]} here" for n in there if n in here and there[n] != here[n]]
    for kept, other, where in ((there, here, "there"), (here, there, "here")):
        alone = [n for n in kept if n not in other]
        parts += [f"{', '.join(alone)} only {where}"] if alone else []
    return "; ".join(parts)
