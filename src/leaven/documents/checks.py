"""Documents of ``leaven check``."""

from typing import Any

from leaven.documents import Document, Entry, Number


class VerdictRow(Entry):
    module: str
    axis: str
    slope: float | None  # the judged number that came closest to failing, or failed most
    limit: float | None
    passed: bool | None  # null: measured, and not judged
    parts: dict[str, float | None]  # all numbers of the row by column
    note: str
    beyond: float | None  # how far slope lies outside of what is allowed
    undecided: bool  # neither passed nor, by what was measured, failed


class VerdictCurve(Entry):
    module: str
    axis: str
    quantity: str
    x: list[Number]
    y: list[float | None]  # mean over seeds
    low: list[float | None]
    high: list[float | None]


class MeasuredRow(Entry):
    name: str
    value: float | None
    low: float | None  # end of the 95% interval; null with one seed
    high: float | None
    expected: float | None  # by the rule
    note: str


class CheckDocument(Document, schema="check/1"):
    """``leaven check coordinates|gradients|transfer|duration|batch|decay|init|equivalence``."""

    passed: bool
    fault: str | None  # the module that failed most clearly
    check: str
    subject: str
    quantity: str
    rows: list[VerdictRow]
    curves: list[VerdictCurve]  # the points behind the rows
    settings: dict[str, Any]
    measured: list[MeasuredRow]  # beside what is judged
    advice: str  # what to type for a clearer answer


class MemoryCheckRow(Entry):
    rank: int
    stage: int
    part: str
    planned_gib: float
    dry_gib: float
    error: float | None  # planned / found - 1
    limit: float | None
    passed: bool | None  # null for parts of the peak, which are not judged


class MemoryCheckDocument(Document, schema="check-memory/1"):
    """``leaven check memory``."""

    passed: bool
    check: str
    subject: str
    layout: dict[str, Any]
    seconds: float
    rows: list[MemoryCheckRow]
