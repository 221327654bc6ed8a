"""Define the documents of ``leaven check``."""

from typing import Any

from leaven.documents import Document, Entry, Number


class VerdictRow(Entry):
    module: str  # module or parameter; or the quantity whose best value is compared
    axis: str  # width, depth, batch, tokens or bookkeeping; or the two scales that are compared
    slope: float | None  # the judged number that came closest to failing or failed most
    limit: float | None  # the largest size of this number that passes
    passed: bool | None  # null if it is measured but not judged
    parts: dict[str, float | None] = {}  # all numbers of the row by column
    note: str = ""  # the usual cause of a failure, or why there is no verdict
    beyond: float | None = 0.0  # how far the slope is outside its limit
    undecided: bool = False  # whether the noise is too large to tell passed from failed


class VerdictCurve(Entry):
    module: str  # as in the rows, or the scale
    axis: str  # what x is
    quantity: str  # what y is
    x: list[Number]
    y: list[float | None]  # mean over seeds
    low: list[float | None] = []  # minimum over seeds
    high: list[float | None] = []  # maximum over seeds


class MeasuredRow(Entry):
    name: str  # what was measured
    value: float | None
    low: float | None  # lower end of the 95% interval; null with one seed
    high: float | None  # upper end of this interval
    expected: float | None = None  # value that the rule predicts; null if it predicts none
    note: str = ""  # how the number compares with the rule


class CheckDocument(Document, schema="check/1"):
    """The result of ``leaven check coordinates|gradients|transfer|duration|batch|decay|init|equivalence``."""

    passed: bool  # whether at least one row was judged and none failed
    fault: str | None  # the module that failed most clearly
    check: str  # name of the check on the command line
    subject: str  # name of the recipe, or module:factory
    quantity: str  # what the judged numbers are
    rows: list[VerdictRow]
    curves: list[VerdictCurve]  # the points behind the rows
    settings: dict[str, Any]
    measured: list[MeasuredRow] = []  # numbers that are not judged
    advice: str = ""  # the options to give for a clearer result
    next: list[str] = []  # commands; only of a coordinate check of a recipe that passed


class MemoryCheckRow(Entry):
    rank: int
    stage: int  # stage of the pipeline
    part: str  # between steps, peak, or a part of the peak
    planned_gib: float
    dry_gib: float  # measured in the dry run
    error: float | None  # planned_gib / dry_gib - 1
    limit: float | None  # largest error that passes
    passed: bool | None  # null for parts of the peak, which are not judged


class MemoryCheckDocument(Document, schema="check-memory/1"):
    """The result of ``leaven check memory``: planned memory compared with that of a dry run."""

    passed: bool  # whether every judged row is within its limit
    check: str  # always memory
    subject: str  # name of the recipe
    layout: dict[str, Any]
    seconds: float  # how long the check took
    rows: list[MemoryCheckRow]
