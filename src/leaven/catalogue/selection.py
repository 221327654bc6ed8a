"""Select runs with the filters of `leaven recipes list`: ``--params 1B..10B``, ``--where schedule.shape=cosine``."""

import math
import operator
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from leaven.catalogue.runs import PublishedRun, closest
from leaven.errors import InputError
from leaven.recipe.units import listed, parse_quantity

_OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_CONDITION = re.compile(r"\s*([\w.]+)\s*(!=|<=|>=|=|<|>)\s*(\S.*?)\s*")
# Properties of a run that a condition can name, besides the paths of its file.
_PROPERTIES = (
    "tokens",
    "batch_tokens",
    "peak_lr",
    "optimizer",
    "decay",
    "min_lr_ratio",
    "warmup_fraction",
    "init_std",
    "residual_init_std",
)


class Condition(NamedTuple):
    """A condition such as ``optim.beta2 >= 0.99``. A run without the value meets no condition, even with
    ``!=``."""

    path: str  # path of the value in a run
    operator: str  # = != < <= > or >=
    text: str  # the value to compare with


def parse_condition(written: str) -> Condition:
    """Parse a condition such as ``schedule.shape=cosine``, or raise InputError."""
    match = _CONDITION.fullmatch(written)
    if match is None:
        raise InputError(
            f"{written!r} is not a condition; write PATH, one of = != < <= > >= and a value, "
            "for example schedule.shape=cosine"
        )
    return Condition(*match.groups())


def parse_range(path: str, written: str) -> list[Condition]:
    """Parse a range such as ``1B..10B`` or ``1B..``, ends included. Raise InputError if it is invalid."""
    low, dots, high = (part.strip() for part in written.partition(".."))
    if not dots or not (low or high):
        raise InputError(f"{written!r} is not a range; write for example 1B..10B, ..10B or 1B..")
    ends = {name: parse_quantity(end) for name, end in ((">=", low), ("<=", high)) if end}
    if len(ends) == 2 and ends[">="] > ends["<="]:
        raise InputError(f"the range {written!r} is empty; write the smaller end first: {high}..{low}")
    return [Condition(path, name, str(end)) for name, end in ends.items()]


def select(runs: Sequence[PublishedRun], conditions: Iterable[Condition]) -> list[PublishedRun]:
    """Return the runs that meet all conditions, in the given order. Raise InputError for a wrong condition."""
    known = {run.id: values(run) for run in runs}
    kept = list(runs)
    for condition in conditions:
        path, compare = condition.path, _OPERATORS[condition.operator]
        found = {id: own[path] for id, own in known.items() if path in own}
        if not found:
            paths = {each for own in known.values() for each in own}
            raise InputError(
                f"no published run has a value {path!r}; did you mean {listed(_closest_paths(path, paths))}?"
            )
        wanted = _wanted(condition, list(found.values()))
        met = {id for id, own in found.items() if compare(own.lower() if isinstance(own, str) else own, wanted)}
        kept = [run for run in kept if run.id in met]
    return kept


def _wanted(condition: Condition, values: Sequence[Any]) -> Any:
    """Convert a condition's text to the type of the runs' ``values``, or raise InputError."""
    path, operator, text = condition
    match values[0]:
        case bool():
            if text.lower() not in ("true", "false") or operator not in ("=", "!="):
                raise InputError(f"{path} is true or false; write {path}=true or {path}=false")
            return text.lower() == "true"
        case int() | float():
            try:
                number = float(text)
            except ValueError:
                return parse_quantity(text)
            if math.isnan(number):
                raise InputError(f"{text} cannot be compared; write {path}{operator}NUMBER")
            return number
        case str():
            if operator == "=" and text.lower() not in map(str.lower, values):
                raise InputError(f"no run has {path} {text!r}; did you mean {listed(closest(text, set(values)))}?")
            return text.lower()
    raise InputError(f"{path} is a list, which cannot be compared; leave this condition out")


def values(run: PublishedRun) -> dict[str, Any]:
    """Return a run's values by the dotted paths that conditions use, such as ``schedule.shape``."""
    own = {name: getattr(run, name) for name in _PROPERTIES}
    return run.flat() | {name: value for name, value in own.items() if value is not None}


def _closest_paths(path: str, known: set[str]) -> list[str]:
    """Return up to three known paths similar to ``path``, such as ``schedule.shape`` for ``shape``."""
    if "." in path:
        return closest(path, known)
    keys = closest(path, {one.rpartition(".")[2] for one in known})
    return [one for key in keys for one in sorted(known) if one.rpartition(".")[2] == key][:3]
