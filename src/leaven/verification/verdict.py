"""What every check returns: rows with a limit each, a verdict, and the points that the verdict was read from."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

Number = float | None


@dataclass(frozen=True)
class CheckRow:
    """One thing that was judged.

    ``slope`` is the judged number that came closest to failing, or failed most: an exponent against ``axis``, or what
    ``quantity`` of the verdict says. ``parts`` are all numbers of the row by column. ``passed`` is None for what was
    measured and cannot be judged yet; ``note`` says why, or what may be wrong. ``beyond`` is how far ``slope`` lies
    outside of what is allowed. ``undecided`` is a row that did not pass and, by what was measured, did not fail.
    """

    module: str
    axis: str
    slope: Number
    limit: Number
    passed: bool | None
    parts: Mapping[str, Number] = field(default_factory=dict)
    note: str = ""
    beyond: float = 0.0
    undecided: bool = False


@dataclass(frozen=True)
class CheckCurve:
    """Points behind a row, to draw: ``y`` over ``x`` (mean over seeds), ``low`` and ``high`` over seeds."""

    module: str
    axis: str
    quantity: str
    x: tuple[float, ...]
    y: tuple[Number, ...]
    low: tuple[Number, ...] = ()
    high: tuple[Number, ...] = ()


@dataclass(frozen=True)
class MeasuredValue:
    """A number that was measured beside what is judged, with its 95% interval (none with one seed).

    ``expected`` is what the rule has, where it says something.
    """

    name: str
    value: Number
    low: Number
    high: Number
    expected: Number = None
    note: str = ""


@dataclass(frozen=True)
class Verdict:
    """A check's answer. ``fault`` names the module that failed most clearly, if any did.

    ``advice`` is a line that says what to type next.
    """

    check: str
    subject: str
    quantity: str
    rows: tuple[CheckRow, ...]
    curves: tuple[CheckCurve, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    measured: tuple[MeasuredValue, ...] = ()
    advice: str = ""

    @property
    def passed(self) -> bool:
        judged = [row.passed for row in self.rows if row.passed is not None]
        return bool(judged) and all(judged)

    @property
    def failed(self) -> tuple[CheckRow, ...]:
        return tuple(row for row in self.rows if row.passed is False)

    @property
    def fault(self) -> str | None:
        return max(self.failed, key=lambda row: (not row.undecided, row.beyond)).module if self.failed else None

    def document(self) -> dict[str, Any]:
        """Plain data, as ``--json`` prints and the report draws it."""
        return {"passed": self.passed, "fault": self.fault} | asdict(self)


def conclusive(row: CheckRow, sizes: Sequence[float], seeds: int) -> CheckRow:
    """The row, or an undecided one where it failed by a slope of two sizes and one seed: that may be noise."""
    if row.passed is not False or seeds > 1 or len(sizes) > 2 or not math.isfinite(row.beyond):
        return row
    return replace(row, undecided=True, note=f"inconclusive: two sizes and one seed cannot tell ({row.note})")


def more_sizes(widths: Sequence[int], depths: Sequence[int]) -> str:
    """What to type for a verdict where two sizes and one seed were too few."""
    options = ["--seeds 3"]
    for option, sizes in (("--widths", sorted(set(widths))), ("--depths", sorted(set(depths)))):
        if len(sizes) == 2:
            options.append(f"{option} {sizes[0]},{sizes[1]},{2 * sizes[1]}")
    return f"Give more: {' '.join(options)}"


def slope(x: Sequence[float], y: Sequence[float]) -> Number:
    """The exponent b of the least-squares fit log2 y = a + b log2 x; None where y has no logarithm."""
    values = np.asarray(y, dtype=float)
    if not (np.isfinite(values).all() and (values > 0).all()):
        return None
    return float(np.polyfit(np.log2(np.asarray(x, dtype=float)), np.log2(values), 1)[0])


def geometric_mean(values: Sequence[float]) -> float:
    """Over seeds; 0 if one of them is 0, not a number if one is not."""
    array = np.asarray(values, dtype=float)
    if not np.isfinite(array).all():
        return math.nan
    return float(np.exp(np.log(array).mean())) if (array > 0).all() else 0.0


def curve(
    module: str, axis: str, quantity: str, x: Sequence[float], by_seed: Sequence[Sequence[float]]
) -> CheckCurve:
    """A curve from values by scale and seed."""

    def plain(values: Sequence[float]) -> tuple[Number, ...]:
        return tuple(value if math.isfinite(value) else None for value in values)

    means = [geometric_mean(values) for values in by_seed]
    low, high = [min(values) for values in by_seed], [max(values) for values in by_seed]
    return CheckCurve(module, axis, quantity, tuple(map(float, x)), plain(means), plain(low), plain(high))
