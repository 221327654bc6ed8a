"""Filters of `leaven recipes list`: ``--params 1B..10B``, ``--where schedule.shape=cosine``."""

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
# Properties of a run in leaven's own terms, beside the paths of its file.
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
    """A path, an operator and a value as text: ``optim.beta2 >= 0.99``.

    A run whose value is not known meets no condition on it, not even ``!=``.
    """

    path: str
    operator: str
    text: str

    @classmethod
    def parse(cls, written: str) -> "Condition":
        """Parse a condition.

        Raises:
            InputError: if the text is not a condition.
        """
        match = _CONDITION.fullmatch(written)
        if match is None:
            raise InputError(
                f"{written!r} is not a condition; write PATH, one of = != < <= > >= and a value, "
                "for example schedule.shape=cosine"
            )
        return cls(*match.groups())


@dataclass(frozen=True)
class Range:
    """From ``low`` to ``high``, both included; None where it is open."""

    low: int | None
    high: int | None

    @classmethod
    def parse(cls, written: str) -> "Range":
        """``1B..10B``, ``..10B`` or ``1B..``.

        Raises:
            InputError: if the text is no range, or an empty one.
        """
        low, dots, high = written.partition("..")
        if not dots or not (low.strip() or high.strip()):
            raise InputError(f"{written!r} is no range; write for example 1B..10B, ..10B or 1B..")
        made = cls(*(parse_quantity(end) if end.strip() else None for end in (low, high)))
        if made.low is not None and made.high is not None and made.low > made.high:
            raise InputError(f"nothing lies in {written!r}; the smaller end comes first: {high}..{low}")
        return made

    def holds(self, value: int | None) -> bool:
        if value is None:
            return False
        return (self.low is None or value >= self.low) and (self.high is None or value <= self.high)


def select(
    runs: Sequence[PublishedRun],
    *,
    params: Range | None = None,
    tokens: Range | None = None,
    conditions: Iterable[Condition] = (),
) -> list[PublishedRun]:
    """Return the runs that meet all conditions, in their order.

    Raises:
        InputError: if a condition names a path, or compares with a value, that no run has.
    """
    known = [(run, values(run)) for run in runs]
    kept = [run for run in runs if (not params or params.holds(run.params_total))]
    kept = [run for run in kept if (not tokens or tokens.holds(run.tokens))]
    for condition in conditions:
        met = _meeting(condition, known)
        kept = [run for run in kept if run.id in met]
    return kept


def values(run: PublishedRun) -> dict[str, Any]:
    """Return every value that a condition can name, by its path."""
    own = {name: getattr(run, name) for name in _PROPERTIES}
    return run.flat() | {name: value for name, value in own.items() if value is not None}


def _meeting(condition: Condition, known: Sequence[tuple[PublishedRun, dict[str, Any]]]) -> set[str]:
    """Return the ids of the runs that meet a condition."""
    found = {run.id: own[condition.path] for run, own in known if condition.path in own}
    if not found:
        raise InputError(
            f"no published run has a value {condition.path!r}; "
            f"did you mean {listed(_closest_paths(condition.path, {path for _, own in known for path in own}))}?"
        )
    wanted = _wanted(condition, list(found.values()))
    compare = _OPERATORS[condition.operator]
    return {id for id, value in found.items() if compare(_folded(value), wanted)}


def _wanted(condition: Condition, present: Sequence[Any]) -> Any:
    """Return the value of a condition, in the type that the runs have at that path."""
    path, text, sample = condition.path, condition.text, present[0]
    if isinstance(sample, bool):
        if text.lower() not in ("true", "false") or condition.operator not in ("=", "!="):
            raise InputError(f"{path} is true or false; write {path}=true or {path}=false")
        return text.lower() == "true"
    if isinstance(sample, int | float):
        try:
            number = float(text)
        except ValueError:
            return parse_quantity(text)
        if math.isnan(number):
            raise InputError(f"nothing is above, below or equal to {text}; write {path}{condition.operator}NUMBER")
        return number
    if isinstance(sample, str):
        if condition.operator == "=" and _folded(text) not in map(_folded, present):
            raise InputError(f"no run has {path} {text!r}; did you mean {listed(closest(text, set(present)))}?")
        return _folded(text)
    raise InputError(f"{path} is a list; no operator compares it")


def _folded(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


def _closest_paths(path: str, known: set[str]) -> list[str]:
    """Return the three known paths most similar to an unknown one; in any group if it names no group."""
    if "." in path:
        return closest(path, known)
    by_last: dict[str, list[str]] = {}
    for one in sorted(known):
        by_last.setdefault(one.rpartition(".")[2], []).append(one)
    return [one for last in closest(path, by_last) for one in by_last[last]][:3]
