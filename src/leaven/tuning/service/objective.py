"""A search over any Python function: `from leaven.tuning import search`. Needs no torch.

All runs are trials of one Optuna study: those that measure the noise, those of the search, and those that confirm the
best points. The next run follows from the trials in the store (``plan.py``), each run counts once (``trial_log.py``),
and other commands retry the trials of a dead one (``leases.py``). So any number of commands on any machines can share
a study, and to resume is the same as to start.
"""

import math
import sys
import time
from collections.abc import Callable, Mapping
from numbers import Integral, Real
from pathlib import Path
from typing import Any, NamedTuple

import optuna
from optuna.storages import BaseStorage

from leaven.recipe.errors import InputError
from leaven.tuning.algorithm.trust_region import Axes
from leaven.tuning.service.agreement import agree, begin, check_name
from leaven.tuning.service.budget import Budget
from leaven.tuning.service.interface import Found, SearchObserver
from leaven.tuning.service.leases import Leases
from leaven.tuning.service.loop import HUGE, Objective, SearchLoop
from leaven.tuning.service.plan import Plan, first
from leaven.tuning.service.samplers import check_method, sampler
from leaven.tuning.service.stores import open_store


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
    flops: float | None = None,
    hours: float | None = None,
    run_flops: float | None = None,
    noise: float | None = None,
    stop_at_noise: bool = True,
    storage: BaseStorage | Path | str | None = None,
    name: str = "leaven",
    stop: Callable[[], bool] = lambda: False,
    watch: SearchObserver | None = None,
    lease_seconds: float = 60.0,
) -> Found:
    """Minimise ``objective`` with at most ``trials`` calls.

        found = search(lambda x: (x["lr"] - 1) ** 2, {"lr": (-3, 3)}, trials=30)
        found.params["lr"], found.interval

    The first three runs are at the start and measure the noise, unless it is given. The last ones run the best points
    again with fresh seeds, and only these decide which is best. Optuna's dashboard shows it as an ordinary study.

    Args:
        objective: takes log2 multipliers by name (a :class:`leaven.tuning.service.interface.Proposal`) and returns a
            loss or an :class:`leaven.training.outcome.Outcome`. A loss that is infinite, nan or beyond +-1e50 is a
            divergence. It is called from ``workers`` threads.
        space: lowest and highest log2 multiplier by name, within -1000 and 1000, or ``range(n)`` for a choice of n
            levels, which the objective gets as a number. While every run diverges, values named ``lr`` or ``*.lr``
            are lowered.
        start: log2 multipliers to start from; default 0.
        trials: number of runs, including reruns. None if the budget is ``flops`` or ``hours``; see
            :class:`leaven.tuning.service.budget.Budget` for these and ``run_flops``.
        method: one of ``leaven.tuning.service.samplers.METHODS``.
        scales: octaves from the start to a typical optimum; default 1.
        near: the initial box, in octaves from the start; default the whole space. All methods except ``grid`` extend
            it while the best points lie at its edge.
        noise: standard deviation of the loss between runs of one point, if known.
        stop_at_noise: stop a trust-region search when some rounds have gained less than the noise.
        storage: an Optuna storage, its URL, or the file of a journal; default in memory. The same call resumes a
            stored study, also while other commands work on it.
        name: of the study in its storage.
        stop: polled; once it returns true no run starts, and the answer is based on the finished ones.
        watch: called when a run of this call starts or ends, from the calling thread.
        lease_seconds: how long a process of another machine may be silent before its runs are retried here.

    Raises:
        InputError: if an argument is invalid, the stored study has another space, method, seed or noise, or the
            objective does not return a loss.
        NothingFound: if every run diverged, or none finished.
        StoreGone: if the storage became unreachable and did not come back.
    """
    check_method(method)
    check_name(name)
    check(objective=objective, space=space, start=start, scales=scales, near=near)
    check(trials=trials, flops=flops, hours=hours)
    check(run_flops=run_flops, noise=noise, seed=seed, workers=workers, lease_seconds=lease_seconds)
    axes = _axes(space, start or {}, scales or {}, near or {})
    budget = Budget(trials, flops, hours, run_flops)
    first(axes, method, budget, noise)  # a grid that is too fine is refused before anything is written
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    store, here, what = open_store(storage), about(method, axes, seed, noise), f"the stored study {name}"
    study, there = begin(store, name, sampler(method, axes, seed, noise), here, what)
    agree(there, here, what, "give it another name")
    plan = Plan(study, axes, method, budget, noise, stop_at_noise)
    with Leases(store, store.get_study_id_from_name(name), lease_seconds) as leases:
        loop = SearchLoop(plan, store, leases, objective, workers, stop, watch)
        return plan.found(loop.run(), time.time(), stop())


def about(method: str, axes: Axes, seed: int, noise: float | None) -> dict[str, Any]:
    """Return the settings of a search that all commands on a study must share."""

    space = {
        name: ["choice", len(limits), axes.start[name]] if isinstance(limits, range) else [*limits, axes.start[name]]
        for name, limits in axes.limits.items()
    }
    near = {"near": {name: list(both) for name, both in axes.near.items()}} if axes.near else {}
    return {
        "method": method,
        "space": space,
        "scales": dict(zip(axes.limits, axes.scale.tolist(), strict=True)),
        "seed": int(seed),
        "noise": None if noise is None else float(noise),
        **near,
    }


OCTAVES = 1000  # the largest log2 multiplier: 2**1024 overflows
FINEST = 1e-9  # octaves, the smallest scale


class _Wanted(NamedTuple):
    kind: Any
    fits: Callable[[Any], bool]
    said: str


def _whole(least: int) -> _Wanted:
    return _Wanted(Integral, lambda n: least <= n <= sys.float_info.max, f"give a whole number, at least {least}")


def _number(low: float, high: float) -> _Wanted:
    return _Wanted(Real, lambda x: low <= x <= high, f"give a number from {low:g} to {high:g}")


# An int may be beyond all floats, and is not infinite.
_ABOVE_0 = _Wanted(Real, lambda x: 0 < x <= sys.float_info.max, "give a finite number above 0")
_BY_NAME = _Wanted(Mapping, lambda given: True, "give a number by name, as in {'lr': 0.5}")
_LIMITS = f"the lowest and the highest log2 multiplier, within {-OCTAVES} and {OCTAVES}"
_CHOICE = "a range(n) for a choice of n"

ARGUMENTS = {
    "objective": _Wanted(Callable, lambda given: True, "give a function, which takes log2 multipliers by name"),
    "space": _Wanted(Mapping, bool, f"give names, each with {_LIMITS}, as in {{'lr': (-3, 3)}}, or {_CHOICE}"),
    "start": _BY_NAME,
    "scales": _BY_NAME,
    "near": _BY_NAME,
    "trials": _whole(1),
    "seed": _whole(0),
    "workers": _whole(1),
    "flops": _ABOVE_0,
    "hours": _ABOVE_0,
    "run_flops": _ABOVE_0,
    "noise": _Wanted(Real, lambda x: x == 0 or 1 / HUGE <= x <= HUGE, f"give 0, or from {1 / HUGE:g} to {HUGE:g}"),
    "lease_seconds": _ABOVE_0,
}
OPTIONAL = {"start", "scales", "near", "trials", "flops", "hours", "run_flops", "noise"}  # may be None


def check(**given: object) -> None:
    """Check arguments against ``ARGUMENTS``.

    Raises:
        InputError: ``trials = '8': give a whole number, at least 1``.
    """
    for name, value in given.items():
        if value is not None or name not in OPTIONAL:
            _check(name, value, ARGUMENTS[name])


def _check(what: str, value: object, wanted: _Wanted) -> None:
    if not (isinstance(value, wanted.kind) and wanted.fits(value)):
        raise InputError(f"{what} = {value!r:.60}: {wanted.said}")


def _axes(
    space: Mapping[str, Any], start: Mapping[str, Any], scales: Mapping[str, Any], near: Mapping[str, Any]
) -> Axes:
    """Return the axes of a search.

    Raises:
        InputError: if limits, a start, a scale or a box are invalid, or their name is not in the space.
    """
    limits = {name: _limits(name, both) for name, both in space.items()}
    for what, named in (("start", start), ("scale", scales), ("near", near)):
        for name in named:
            if name not in limits:
                raise InputError(f"{what} of {name}: it is not in the space, which has {', '.join(limits)}")
    for name in near:
        if isinstance(limits[name], range):
            raise InputError(f"near of {name}: it is a choice, which has no box; remove it from near")
    begin = {name: start.get(name, 0.0) for name in limits}
    for name, at in begin.items():
        both = limits[name]
        _check(f"start of {name}", at, _level(both) if isinstance(both, range) else _number(*both))
    for name, scale in scales.items():
        _check(f"scale of {name}", scale, _number(FINEST, OCTAVES))
    return Axes(
        limits,
        {name: float(scale) for name, scale in scales.items()},
        {name: _limits(name, both, "near") for name, both in near.items()},
        {name: float(at) for name, at in begin.items()},
    )


def _level(levels: range) -> _Wanted:
    return _Wanted(Real, lambda x: x in levels, f"give one of its levels, 0 to {len(levels) - 1}")


def _limits(name: object, both: Any, what: str = "space") -> Any:
    if not isinstance(name, str):
        raise InputError(f"space of {name!r}: give a name that is a string")
    if isinstance(both, range):
        if both.start or both.step != 1 or len(both) < 2:
            raise InputError(f"{what} of {name} = {both}: give range(n) with at least 2 levels")
        return both
    try:
        low, high = both
    except (TypeError, ValueError):  # not a pair
        low = high = math.nan
    if not (all(isinstance(end, Real) for end in (low, high)) and -OCTAVES <= low < high <= OCTAVES):
        raise InputError(f"{what} of {name} = {both!r:.60}: give {_LIMITS}, as in (-3, 3), or {_CHOICE}")
    return float(low), float(high)
