"""Documents of ``leaven check``."""

from typing import Any

from leaven.documents import Document, Entry, Number


class VerdictRow(Entry):
    module: str  # module or parameter; or the quantity whose best value is compared
    axis: str  # width, depth, batch, tokens or bookkeeping; or the two scales that are compared
    slope: float | None  # the judged number that came closest to failing, or failed most
    limit: float | None  # on the size of that number
    passed: bool | None  # null: measured, and not judged
    parts: dict[str, float | None] = {}  # all numbers of the row by column
    note: str = ""  # the usual cause of a failure, or why there is no verdict
    beyond: float | None = 0.0  # how far slope lies outside its limit
    undecided: bool = False  # neither passed nor, within the measured noise, failed


class VerdictCurve(Entry):
    module: str  # as in the rows, or the scale
    axis: str  # of x
    quantity: str  # of y
    x: list[Number]
    y: list[float | None]  # mean over seeds
    low: list[float | None] = []  # minimum over seeds
    high: list[float | None] = []  # maximum over seeds


class MeasuredRow(Entry):
    name: str  # what was measured
    value: float | None
    low: float | None  # end of the 95% interval; null with one seed
    high: float | None
    expected: float | None = None  # by the rule; null if it does not predict this number
    note: str = ""  # how the number compares with the rule


class CheckDocument(Document, schema="check/1"):
    """``leaven check coordinates|gradients|transfer|duration|batch|decay|init|equivalence``."""

    passed: bool  # at least one row was judged and none failed
    fault: str | None  # the module that failed most clearly
    check: str  # its name on the command line
    subject: str  # the recipe's name, or module:factory
    quantity: str  # what the judged numbers are
    rows: list[VerdictRow]
    curves: list[VerdictCurve]  # the points behind the rows
    settings: dict[str, Any]
    measured: list[MeasuredRow] = []  # numbers that are not judged
    advice: str = ""  # the options to give for a clearer result


class MemoryCheckRow(Entry):
    rank: int
    stage: int  # of the pipeline
    part: str  # between steps, peak, or a part of the peak
    planned_gib: float
    dry_gib: float  # measured in the dry run
    error: float | None  # planned / measured - 1
    limit: float | None  # on the error
    passed: bool | None  # null for parts of the peak, which are not judged


class MemoryCheckDocument(Document, schema="check-memory/1"):
    """``leaven check memory``."""

    passed: bool  # no judged row is beyond its limit
    check: str  # memory
    subject: str  # the recipe's name
    layout: dict[str, Any]
    seconds: float  # that the check took
    rows: list[MemoryCheckRow]
