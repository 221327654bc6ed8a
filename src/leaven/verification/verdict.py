"""Make the document of a check from its judged rows and its curves."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from leaven.documents.checks import CheckDocument, VerdictCurve, VerdictRow


@dataclass(frozen=True)
class Exponent:
    """A measured exponent, and the range of exponents that a correct rule gives."""

    what: str  # what changes with this exponent
    value: float
    low: float  # lowest exponent under a correct rule
    high: float  # highest exponent under a correct rule
    limit: float  # how far outside this range the exponent may be

    @property
    def outside(self) -> float:
        return max(self.value - self.high, self.low - self.value)

    @property
    def beyond(self) -> float:
        """How far ``value`` is outside the range, minus ``limit``. The check fails if this is above 0."""
        return self.outside - self.limit


def verdict(check: str, subject: str, quantity: str, rows: Sequence[VerdictRow], **more: Any) -> CheckDocument:
    """Return the document of a check. The check passes if at least one row passed, and none failed or is undecided.

    The field ``fault`` names the module of the worst failed, or else undecided, row. ``more`` are further fields.
    """
    failed = [row for row in rows if row.passed is False]
    return CheckDocument(
        passed=not failed and any(row.passed for row in rows),
        fault=max(failed, key=lambda row: (not row.undecided, row.beyond)).module if failed else None,
        check=check,
        subject=subject,
        quantity=quantity,
        rows=list(rows),
        **more,
    )


def slope(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Return the least-squares slope of log2 y over log2 x, or None if a y is not positive or not finite."""
    values = np.asarray(y, dtype=float)
    if not (np.isfinite(values).all() and (values > 0).all()):
        return None
    return float(np.polyfit(np.log2(np.asarray(x, dtype=float)), np.log2(values), 1)[0])


def difference(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return a - b, but 0 where a and b differ only by rounding errors."""
    return np.where(np.isclose(a, b, rtol=1e-12, atol=1e-12), 0.0, a - b)


def geometric_mean(values: Sequence[float]) -> float:
    """Return the geometric mean, which is 0 if a value is 0, and NaN if a value is not finite."""
    array = np.asarray(values, dtype=float)
    if not np.isfinite(array).all():
        return math.nan
    return float(np.exp(np.log(array).mean())) if (array > 0).all() else 0.0


def curve(
    module: str, axis: str, quantity: str, x: Sequence[float], by_seed: Sequence[Sequence[float]]
) -> VerdictCurve:
    """Return a curve of the geometric mean, minimum and maximum over seeds. Non-finite values become None."""
    drawn = {"y": map(geometric_mean, by_seed), "low": map(min, by_seed), "high": map(max, by_seed)}
    finite = {name: [v if math.isfinite(v) else None for v in values] for name, values in drawn.items()}
    return VerdictCurve(module=module, axis=axis, quantity=quantity, x=list(map(float, x)), **finite)
