"""What ``search`` takes: what is none of it is refused in a line, before anything is run or written."""

import math
import sys
from collections.abc import Callable, Mapping
from numbers import Integral, Real
from typing import Any, NamedTuple

from leaven.recipe.errors import InputError
from leaven.tuning.trust_region import Axes

OCTAVES = 1000  # to either side: 2 to the power of 1024 is no number any more
FINEST = 1e-9  # octaves of a step, of which there are then 2e12 at most
HUGE = 1e50  # of a loss, and of its noise: the surrogate squares variances, so their fourth powers have to be numbers


class _Wanted(NamedTuple):
    kind: Any
    fits: Callable[[Any], bool]
    said: str


def _whole(least: int) -> _Wanted:
    return _Wanted(Integral, lambda n: least <= n <= sys.float_info.max, f"give a whole number, at least {least}")


def _number(low: float, high: float) -> _Wanted:
    return _Wanted(Real, lambda x: low <= x <= high, f"give a number from {low:g} to {high:g}")


# An int may be beyond all floats, and is not infinite.
_ABOVE_0 = _Wanted(Real, lambda x: 0 < x <= sys.float_info.max, "give a number above 0, and finite")
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
    """Refuse arguments that are not what ``ARGUMENTS`` says.

    Raises:
        InputError: ``trials = '8': give a whole number, at least 1``.
    """
    for name, value in given.items():
        if value is not None or name not in OPTIONAL:
            _check(name, value, ARGUMENTS[name])


def _check(what: str, value: object, wanted: _Wanted) -> None:
    if not (isinstance(value, wanted.kind) and wanted.fits(value)):
        raise InputError(f"{what} = {value!r:.60}: {wanted.said}")


def axes(
    space: Mapping[str, Any], start: Mapping[str, Any], scales: Mapping[str, Any], near: Mapping[str, Any]
) -> Axes:
    """The axes of a search.

    Raises:
        InputError: if limits, a start or a scale are wrong, or of a name that is not in the space.
    """
    limits = {name: _limits(name, both) for name, both in space.items()}
    for what, named in (("start", start), ("scale", scales), ("near", near)):
        for name in named:
            if name not in limits:
                raise InputError(f"{what} of {name}: it is not in the space, which has {', '.join(limits)}")
    for name in near:
        if isinstance(limits[name], range):
            raise InputError(f"near of {name}: a choice has no box; leave it out")
    begin = {name: start.get(name, 0.0) for name in limits}
    for name, at in begin.items():
        both = limits[name]
        _check(f"start of {name}", at, _level(both) if isinstance(both, range) else _number(*both))
    for name, scale in scales.items():
        _check(f"scale of {name}", scale, _number(FINEST, OCTAVES))
    return Axes.of(
        limits,
        {name: float(scale) for name, scale in scales.items()},
        {name: _limits(name, both, "near") for name, both in near.items()},
        {name: float(at) for name, at in begin.items()},
    )


def _level(levels: range) -> _Wanted:
    return _Wanted(Real, lambda x: x in levels, f"give one of its levels, 0 to {len(levels) - 1}")


def _limits(name: object, both: Any, what: str = "space") -> Any:
    if not isinstance(name, str):
        raise InputError(f"space of {name!r}: its name is text")
    if isinstance(both, range):
        if both.start or both.step != 1 or len(both) < 2:
            raise InputError(f"{what} of {name} = {both}: give range(n) with at least 2 levels")
        return both
    try:
        low, high = both
    except (TypeError, ValueError):  # not two of anything
        low = high = math.nan
    if not (all(isinstance(end, Real) for end in (low, high)) and -OCTAVES <= low < high <= OCTAVES):
        raise InputError(f"{what} of {name} = {both!r:.60}: give {_LIMITS}, as in (-3, 3), or {_CHOICE}")
    return float(low), float(high)
