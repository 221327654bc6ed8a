"""The result of a check: rows with limits, a verdict, and the measured points behind it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

Number = float | None


@dataclass(frozen=True)
class CheckRow:
    """One judged module, parameter or pair of scales."""

    module: str
    axis: str
    slope: Number  # the judged number that came closest to failing, or failed most (see Verdict.quantity)
    limit: Number
    passed: bool | None  # None: measured, but not judged
    parts: Mapping[str, Number] = field(default_factory=dict)  # all numbers of the row by column
    note: str = ""  # the usual cause of a failure, or why there is no verdict
    beyond: float = 0.0  # how far slope lies outside its limit
    undecided: bool = False  # neither passed nor, within the measured noise, failed


@dataclass(frozen=True)
class CheckCurve:
    """The points behind a row, for the chart."""

    module: str
    axis: str
    quantity: str
    x: tuple[float, ...]
    y: tuple[Number, ...]  # mean over seeds
    low: tuple[Number, ...] = ()  # minimum over seeds
    high: tuple[Number, ...] = ()  # maximum over seeds


@dataclass(frozen=True)
class MeasuredValue:
    """A number that was measured and is not judged."""

    name: str
    value: Number
    low: Number  # end of the 95% interval; None for one seed
    high: Number
    expected: Number = None  # by the rule, if it predicts this number
    note: str = ""


@dataclass(frozen=True)
class Verdict:
    """The result of a check."""

    check: str  # its name on the command line
    subject: str  # the recipe's name, or module:factory
    quantity: str  # what the judged numbers are
    rows: tuple[CheckRow, ...]
    curves: tuple[CheckCurve, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    measured: tuple[MeasuredValue, ...] = ()
    advice: str = ""  # the options to give for a clearer result

    @property
    def passed(self) -> bool:
        judged = [row.passed for row in self.rows if row.passed is not None]
        return bool(judged) and all(judged)

    @property
    def failed(self) -> tuple[CheckRow, ...]:
        return tuple(row for row in self.rows if row.passed is False)

    @property
    def fault(self) -> str | None:
        """The module that failed most clearly, or None."""
        return max(self.failed, key=lambda row: (not row.undecided, row.beyond)).module if self.failed else None

    def document(self) -> dict[str, Any]:
        """Return the fields of a :class:`leaven.documents.checks.CheckDocument`."""
        return {"passed": self.passed, "fault": self.fault} | asdict(self)


def conclusive(row: CheckRow, sizes: Sequence[float], seeds: int) -> CheckRow:
    """Return the row, marked undecided if it failed with only two sizes and one seed, which may be noise."""
    if row.passed is not False or seeds > 1 or len(sizes) > 2 or not math.isfinite(row.beyond):
        return row
    return replace(row, undecided=True, note=f"inconclusive: two sizes and one seed cannot tell ({row.note})")


def more_sizes(widths: Sequence[int], depths: Sequence[int]) -> str:
    """Return the options to give where two sizes and one seed were too few."""
    options = ["--seeds 3"]
    for option, sizes in (("--widths", sorted(set(widths))), ("--depths", sorted(set(depths)))):
        if len(sizes) == 2:
            options.append(f"{option} {sizes[0]},{sizes[1]},{2 * sizes[1]}")
    return f"Give more: {' '.join(options)}"


def slope(x: Sequence[float], y: Sequence[float]) -> Number:
    """Return b of the least-squares fit log2 y = a + b log2 x; None if a y is not positive and finite."""
    values = np.asarray(y, dtype=float)
    if not (np.isfinite(values).all() and (values > 0).all()):
        return None
    return float(np.polyfit(np.log2(np.asarray(x, dtype=float)), np.log2(values), 1)[0])


def geometric_mean(values: Sequence[float]) -> float:
    """Return the geometric mean over seeds; 0 if a value is 0, NaN if a value is not finite."""
    array = np.asarray(values, dtype=float)
    if not np.isfinite(array).all():
        return math.nan
    return float(np.exp(np.log(array).mean())) if (array > 0).all() else 0.0


def curve(
    module: str, axis: str, quantity: str, x: Sequence[float], by_seed: Sequence[Sequence[float]]
) -> CheckCurve:
    """Make a curve from values by scale and seed."""

    def plain(values: Sequence[float]) -> tuple[Number, ...]:
        return tuple(value if math.isfinite(value) else None for value in values)

    means = [geometric_mean(values) for values in by_seed]
    low, high = [min(values) for values in by_seed], [max(values) for values in by_seed]
    return CheckCurve(module, axis, quantity, tuple(map(float, x)), plain(means), plain(low), plain(high))
