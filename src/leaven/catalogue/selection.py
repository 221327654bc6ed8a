"""Select runs with the filters of `leaven recipes list`: ``--params 1B..10B``, ``--where schedule.shape=cosine``."""

import math
import operator
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from leaven.catalogue.run import PublishedRun
from leaven.catalogue.runs import closest, listed
from leaven.recipe.errors import InputError
from leaven.recipe.units import parse_quantity

_OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_CONDITION = re.compile(r"\s*([\w.]+)\s*(!=|<=|>=|=|<|>)\s*(\S.*?)\s*")
# Properties of a run that a condition can name although they are not paths of its file.
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


@dataclass(frozen=True)
class Condition:
    """A condition such as ``optim.beta2 >= 0.99``.

    A run without that value never meets the condition, not even with ``!=``.
    """

    path: str
    operator: str
    text: str  # the value to compare with

    def matches(self, values: Sequence[Any]) -> list[bool]:
        """Return for each of the runs' values whether it meets the condition.

        Raises:
            InputError: if the condition's text cannot be compared with these values.
        """
        wanted, compare = self._wanted(values), _OPERATORS[self.operator]
        return [compare(value.lower() if isinstance(value, str) else value, wanted) for value in values]

    def _wanted(self, values: Sequence[Any]) -> Any:
        """Return the condition's text, converted to the type of the runs' values."""
        path, text = self.path, self.text
        match values[0]:
            case bool():
                if text.lower() not in ("true", "false") or self.operator not in ("=", "!="):
                    raise InputError(f"{path} is true or false; write {path}=true or {path}=false")
                return text.lower() == "true"
            case int() | float():
                try:
                    number = float(text)
                except ValueError:
                    return parse_quantity(text)
                if math.isnan(number):
                    raise InputError(f"{text} cannot be compared; write {path}{self.operator}NUMBER")
                return number
            case str():
                if self.operator == "=" and text.lower() not in map(str.lower, values):
                    raise InputError(
                        f"no run has {path} {text!r}; did you mean {listed(closest(text, set(values)))}?"
                    )
                return text.lower()
        raise InputError(f"{path} is a list, which cannot be compared; leave this condition out")


def parse_condition(written: str) -> Condition:
    """Parse a condition such as ``schedule.shape=cosine``.

    Raises:
        InputError: if the text is not a condition.
    """
    match = _CONDITION.fullmatch(written)
    if match is None:
        raise InputError(
            f"{written!r} is not a condition; write PATH, one of = != < <= > >= and a value, "
            "for example schedule.shape=cosine"
        )
    return Condition(*match.groups())


def parse_range(path: str, written: str) -> list[Condition]:
    """Parse ``1B..10B``, ``..10B`` or ``1B..`` as conditions on a path; both ends are included.

    Raises:
        InputError: if the text is not a range, or if the range is empty.
    """
    low, dots, high = (part.strip() for part in written.partition(".."))
    if not dots or not (low or high):
        raise InputError(f"{written!r} is not a range; write for example 1B..10B, ..10B or 1B..")
    ends = {name: parse_quantity(end) for name, end in ((">=", low), ("<=", high)) if end}
    if len(ends) == 2 and ends[">="] > ends["<="]:
        raise InputError(f"the range {written!r} is empty; write the smaller end first: {high}..{low}")
    return [Condition(path, name, str(end)) for name, end in ends.items()]


def select(runs: Sequence[PublishedRun], conditions: Iterable[Condition]) -> list[PublishedRun]:
    """Return the runs that meet all conditions, in the given order.

    Raises:
        InputError: if no run has the path of a condition, or the value that it requires.
    """
    known = {run.id: values(run) for run in runs}
    kept = {run.id for run in runs}
    for condition in conditions:
        path = condition.path
        found = {id: own[path] for id, own in known.items() if path in own}
        if not found:
            paths = {each for own in known.values() for each in own}
            raise InputError(
                f"no published run has a value {path!r}; did you mean {listed(_closest_paths(path, paths))}?"
            )
        matches = condition.matches(list(found.values()))
        kept &= {id for id, met in zip(found, matches, strict=True) if met}
    return [run for run in runs if run.id in kept]


def values(run: PublishedRun) -> dict[str, Any]:
    """Return every value of a run that a condition can name, by its path."""
    own = {name: getattr(run, name) for name in _PROPERTIES}
    return run.flat() | {name: value for name, value in own.items() if value is not None}


def _closest_paths(path: str, known: set[str]) -> list[str]:
    """Return the three known paths most similar to ``path``, in any group if ``path`` names none."""
    if "." in path:
        return closest(path, known)
    by_last: dict[str, list[str]] = {}
    for one in sorted(known):
        by_last.setdefault(one.rpartition(".")[2], []).append(one)
    return [one for last in closest(path, by_last) for one in by_last[last]][:3]
