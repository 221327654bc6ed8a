"""Minimise any Python function: ``from leaven.tuning import search``. This module does not need torch."""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Protocol

import numpy as np
import optuna
from optuna.storages import BaseStorage
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from leaven.errors import InputError
from leaven.training.outcome import Outcome
from leaven.tuning.algorithm.noise import interval_of_mean
from leaven.tuning.algorithm.surrogate import EarlierTrials
from leaven.tuning.algorithm.trust_region import Axes, loss_of, results
from leaven.tuning.service.leases import LEASE_SECONDS
from leaven.tuning.service.search_loop import HUGE, Objective, Proposal, SearchLoop
from leaven.tuning.service.search_plan import Budget, NothingFound, SearchPlan, check_search, known_trials
from leaven.tuning.service.stores import open_store
from leaven.tuning.service.study_settings import join_study, unused_knowledge

OCTAVES = 1000.0  # the largest log2 multiplier, because 2**1024 overflows
FINEST = 1e-9  # octaves, the smallest scale
MOST = 10**12  # the largest count of trials or workers


class SearchObserver(Protocol):
    """Callbacks of a search, called when a trial starts and when trials have ended."""

    def started(self, proposal: Proposal, /) -> None: ...
    def ended(self, numbers: Sequence[int], /) -> None: ...


@dataclass(frozen=True)
class SearchTrial:
    """A trial that completed, diverged or was pruned."""

    number: int
    params: dict[str, float]  # log2 multipliers by name
    loss: float  # infinite if the trial diverged; the predicted loss if it was pruned
    finalist: int | None = None  # index of the finalist (one of the best points) that this trial reruns
    # search | noise (the start, other seeds) | rerun (fresh seeds: the best points, and the start to confirm a gain)
    purpose: str = "search"
    seed: int = 0  # 0 in the search; 1, 2, ... in trials that repeat a point


@dataclass(frozen=True)
class SearchResult:
    params: dict[str, float]  # log2 multipliers of the best point, by name
    loss: float  # mean loss of the fresh trials at the best point, or of all trials there if ``fresh`` is 0
    interval: tuple[float, float]  # 95% interval of the loss; infinite if ``fresh`` is 0 or the noise is unknown
    fresh: int  # number of trials at the best point that were not used to choose it
    in_doubt: bool  # whether its gain over the start may be luck
    noise: float | None  # standard deviation of the loss between trials of one point; None if it was not measured
    stalled: bool  # whether the search stopped early because several rounds gained less than the noise
    trials: tuple[SearchTrial, ...]  # the trials with a result, in the order in which they ended


def search(  # noqa: PLR0917 - the first ones are natural by position
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
    expected: Mapping[str, tuple[float, float]] | None = None,
    earlier: EarlierTrials | None = None,
    flops: float | None = None,
    hours: float | None = None,
    run_flops: float | None = None,
    noise: float | None = None,
    stop_at_noise: bool = True,
    storage: BaseStorage | Path | str | None = None,
    name: str = "leaven",
    stop: Callable[[], bool] = lambda: False,
    watch: SearchObserver | None = None,
    lease_seconds: float = LEASE_SECONDS,
) -> SearchResult:
    """Minimise ``objective`` within a budget of trials, FLOPs or hours. Return the best point and its loss.

        result = search(lambda x: (x["lr"] - 1) ** 2, {"lr": (-3, 3)}, trials=30)
        result.params["lr"], result.interval

    The first trial is at the start. With at least 12 trials and no ``noise`` given, one or two more trials at the
    start measure the noise. The last trials run the best points with fresh seeds; their losses decide which point is
    best. A small budget, or ``noise`` 0, may leave out these last trials. Optuna's dashboard can show the search.

    Args:
        objective: a function that takes log2 multipliers by name (a :class:`Proposal`) and returns a loss or an
            :class:`leaven.training.outcome.Outcome`. A log2 multiplier of 1 doubles a value. A loss that is infinite,
            nan or beyond +-1e50 is a divergence. The objective is called from ``workers`` threads.
        space: (lowest, highest) log2 multiplier by name, within -1000 and 1000; ``range(n)`` for a choice of n
            levels: the objective gets a level's index. While every trial diverges, values named ``lr``,
            ``learning_rate``, ``max_lr`` or ``peak_lr`` are lowered; if there are none, those named ``*.lr``.
        start: log2 multipliers at which the search starts, by name; default 0.
        trials: number of trials, including those that repeat a point; None if the budget is ``flops`` or ``hours``.
        flops, hours, run_flops: see :class:`leaven.tuning.service.search_plan.Budget`.
        method: ``trust-region``, ``random``, ``grid``, ``tpe``, ``cma`` or ``gp``.
            A grid has at most 100,000 points.
        seed: the random seed of the proposals.
        workers: number of threads, each of which runs one trial at a time.
        scales: octaves (units of log2) from the start point to a typical optimum, by name; default 1.
        near: the box in which the search begins: (lowest, highest) octaves from the start, by name; default the whole
            space. The box grows while the best points lie at its edge, except with ``grid``.
        expected: (distance of the expected optimum from the start, its standard deviation), in octaves, by name. Only
            for ``trust-region``, which ignores an expectation that the trials contradict.
        earlier: trials of an earlier search over the same values, for example for a smaller model, as octaves from
            the start of this search. Used like ``expected``.
        noise: standard deviation of the loss between trials of one point, if known.
        stop_at_noise: stop a trust-region search when several rounds have gained less than the noise.
        storage: an Optuna storage, its URL, or the path of an Optuna journal file; default in memory. The same call
            resumes a stored study, even while other processes work on it. Give another ``name`` if the objective has
            changed, because stored results still count.
        name: the name of the study in its storage.
        stop: a function that is called repeatedly. Once it returns true, no further trial starts. In a notebook,
            prefer this to an interrupt, which lets running calls of ``objective`` continue.
        watch: callbacks for the start and end of each trial of this call, called from the calling thread.
        lease_seconds: time without a heartbeat after which the trials of another machine are retried.

    Raises:
        InputError: if an argument is invalid, if the stored study has other settings, if the objective does not
            return a loss, or if it raises ``WorkerDied`` for four trials in a row.
        NothingFound: if no trial finished with a finite loss.
        StoreGone: if the storage is unreachable for 300 seconds.
    """
    given = SearchArguments.of(
        objective=objective,
        space=space,
        start=start or {},
        scales=scales or {},
        near=near or {},
        expected=expected or {},
        earlier=earlier,
        trials=trials,
        flops=flops,
        hours=hours,
        run_flops=run_flops,
        noise=noise,
        seed=seed,
        workers=workers,
        lease_seconds=lease_seconds,
    )
    axes, seed, noise = given.axes, given.seed, given.noise
    check_search(method, axes, name)
    budget = Budget(given.trials, given.flops, given.hours, given.run_flops)
    known_trials(axes, method, budget, noise)  # raises for a grid above the budget, before anything is written
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    stored = join_study(
        open_store(storage),
        name,
        f"the stored study {name}",
        "give it another name",
        method=method,
        axes=axes,
        seed=seed,
        noise=noise,
    )
    for line in unused_knowledge(axes, stored.axes):
        warnings.warn(line, stacklevel=2)
    plan = SearchPlan(stored.axes, method, seed, budget, noise, stop_at_noise)

    called: list[int] = []  # numbers of the trials of this call

    def of_one(proposals: Sequence[Proposal]) -> list[float | Outcome]:
        called.extend(each.number for each in proposals)
        return [objective(each) for each in proposals]

    with SearchLoop(plan, stored, of_one, given.workers, stop, given.lease_seconds) as loop:
        for event in loop:
            if watch is not None:
                watch.started(event) if isinstance(event, Proposal) else watch.ended(event)
    ran = loop.trials
    if ran and not called and not stop():
        warnings.warn(
            f"this call ran no trial, because the stored study {name} already has all of its {len(ran)} trials; if "
            "the objective has changed since then, give the study another name",
            stacklevel=2,
        )
    chosen, (noise, degrees) = plan.chosen(ran), plan.noise_of(ran)
    if chosen is None:
        raise NothingFound(plan.why_nothing(ran))
    ended, _, _ = results(ran, stored.axes)
    found = [
        SearchTrial(
            number=trial.number,
            params=dict(trial.params),
            loss=loss_of(trial),
            finalist=trial.finalist if trial.final_of == budget.label else None,
            purpose=trial.purpose,
            seed=trial.seed,
        )
        for trial in ended
    ]
    return SearchResult(
        params=plan.params_of(ran, chosen.point),
        loss=chosen.loss,
        interval=interval_of_mean(chosen.losses if chosen.fresh else (), noise, degrees),
        fresh=chosen.fresh,
        in_doubt=chosen.in_doubt,
        noise=noise,
        stalled=not stop() and plan.ended_early(ran, stored.now()),
        trials=tuple(found),
    )


def _limits(limits: Any) -> Any:
    """Return valid limits: (low, high) as floats, or ``range(n)`` for n levels. Raise ValueError for other values."""
    if isinstance(limits, range):
        if limits.start or limits.step != 1 or len(limits) < 2:
            raise ValueError("give range(n) with at least 2 levels")
        return limits
    try:
        low, high = map(float, limits if not isinstance(limits, str) else ())
    except (TypeError, ValueError):  # not a pair of numbers
        low = high = math.nan
    if not -OCTAVES <= low < high <= OCTAVES:
        raise ValueError(
            f"give the lowest and the highest log2 multiplier, between {-OCTAVES:g} and {OCTAVES:g}, such as (-3, 3);"
            " for a choice of n levels, give range(n)"
        )
    return low, high


def _noise(noise: float) -> float:
    if noise and not 1 / HUGE <= noise <= HUGE:
        raise ValueError(f"give 0, or a number from {1 / HUGE:g} to {HUGE:g}")
    return noise


Limits = Annotated[Any, AfterValidator(_limits)]
Count = Annotated[int, Field(ge=1, le=MOST)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class SearchArguments(BaseModel):
    """Checks types and ranges of the arguments of :func:`search`, which explains them."""

    model_config = ConfigDict(frozen=True, arbitrary_types_allowed=True)

    objective: Callable[..., Any]
    space: dict[str, Limits] = Field(min_length=1)
    start: dict[str, float]
    scales: dict[str, Annotated[float, Field(ge=FINEST, le=OCTAVES)]]
    near: dict[str, Limits]
    expected: dict[str, tuple[Annotated[float, Field(allow_inf_nan=False)], Positive]]
    earlier: EarlierTrials | None
    trials: Count | None
    flops: Positive | None
    hours: Positive | None
    run_flops: Positive | None
    noise: Annotated[float, AfterValidator(_noise)] | None
    seed: Annotated[int, Field(ge=0)]
    workers: Count
    lease_seconds: Positive

    @classmethod
    def of(cls, **given: Any) -> "SearchArguments":
        """Return the validated arguments. Raise InputError with the name and value of the first invalid argument."""
        try:
            return cls(**given)
        except ValidationError as error:
            fault = error.errors()[0]
            message = fault["msg"].removeprefix("Value error, ")
            where = ".".join(str(key) for key in fault["loc"] if key != "[key]")
            raise InputError(
                f"{where} = {fault['input']!r:.60}: {message[0].lower()}{message[1:]}" if where else message
            ) from None

    @model_validator(mode="after")
    def _within_the_space(self) -> "SearchArguments":
        known = ("start", self.start), ("scales", self.scales), ("near", self.near), ("expected", self.expected)
        for what, named in known:
            for name in named:
                if name not in self.space:
                    raise ValueError(f"{what}.{name}: not a name in space, which has {', '.join(self.space)}")
        if self.earlier is not None:
            points, losses = np.asarray(self.earlier.points), np.asarray(self.earlier.losses)
            right = points.ndim == 2 and losses.shape == points.shape[:1] and points.shape[1:] >= (len(self.space),)
            if not (right and len(losses) and np.isfinite(points).all() and np.isfinite(losses).all()):
                raise ValueError(
                    "earlier: give finite points of shape (n, D), in octaves from the start point, and finite losses "
                    "of shape (n,); D must be at least the number of names in space"
                )
        for name, limits in self.space.items():
            at = self.start.get(name, 0.0)
            if isinstance(limits, range) and name in self.near:
                raise ValueError(f"near.{name}: near is for numbers, but {name} is a choice; remove it from near")
            if isinstance(limits, range) and at not in limits:
                raise ValueError(f"start.{name} = {at}: give the index of a level, 0 to {len(limits) - 1}")
            if isinstance(limits, tuple) and not limits[0] <= at <= limits[1]:
                raise ValueError(f"start.{name} = {at}: give a number from {limits[0]:g} to {limits[1]:g}")
        return self

    @property
    def axes(self) -> Axes:
        start = {name: self.start.get(name, 0.0) for name in self.space}
        return Axes(self.space, self.scales, self.near, start, self.expected, self.earlier)
