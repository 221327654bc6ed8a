"""Documents of ``leaven check``."""

from typing import Any

from leaven.documents import Document, Entry, Number, Sealed

REGRET_LIMIT = 0.01
"""The largest accepted regret of a sweep, in nats. The regret of a model size is its loss with the value that is best
for the base, minus its lowest loss. Published scaling laws predict losses to about this accuracy."""


class VerdictRow(Entry):
    module: str  # module or parameter; in a sweep, the hyperparameter whose best value is compared
    axis: str  # what grows, e.g. width; in a sweep, two scales: 64x4 -> 256x4; "bookkeeping" if nothing was trained
    slope: float | None  # the judged number, e.g. an exponent; of several, the one farthest beyond its limit
    limit: float | None  # largest allowed distance of slope from its correct value (usually 0) or range
    passed: bool | None  # null if the row is measured but not judged
    parts: dict[str, float | None] = {}  # all numbers of the row by column
    note: str = ""  # the usual cause of a failure, or why the row is not judged
    beyond: float | None = 0.0  # how far slope is beyond limit, or 0; null if the row failed without a number
    undecided: bool = False  # whether the noise is too large to tell passed from failed


class VerdictCurve(Entry):
    module: str  # module or parameter; in a sweep, the model size
    axis: str  # name of the quantity x
    quantity: str  # name of the quantity y
    x: list[Number]
    y: list[float | None]  # mean over seeds
    low: list[float | None] = []  # minimum over seeds
    high: list[float | None] = []  # maximum over seeds


class MeasuredRow(Entry):
    name: str  # what was measured
    value: float | None
    low: float | None  # lower end of the 95% interval of value; null with one seed
    high: float | None  # upper end of the 95% interval of value
    expected: float | None = None  # the value that the scaling rule predicts; null if there is no prediction
    note: str = ""  # how value compares with expected


class CheckDocument(Sealed, Document, schema="check/1"):
    """The result of ``leaven check NAME``, for every check except memory."""

    passed: bool  # whether at least one row passed, and none failed or is undecided
    fault: str | None  # module of the worst failed row, or else of the worst undecided row; null if there are none
    check: str  # name of the check on the command line
    subject: str  # name of the checked recipe, or the checked module:factory
    quantity: str  # what the judged numbers are
    rows: list[VerdictRow]
    curves: list[VerdictCurve]  # the measurements from which the entries of rows are computed
    settings: dict[str, Any]
    measured: list[MeasuredRow] = []  # numbers that are not judged
    advice: str = ""  # a sentence with the options that would give a clearer result
    options: list[str] = []  # the options in advice, such as "--seeds 3"
    next: list[str] = []  # commands to type next
    runs: int | None = None  # number of finished runs in the folder --run; null if the check keeps no runs


class MemoryCheckRow(Entry):
    rank: int
    stage: int  # pipeline stage of the rank
    part: str  # "between steps", "peak", or the name of a part of the peak memory
    planned_gib: float
    dry_gib: float  # measured in the dry run, which simulates two training steps
    error: float | None  # planned_gib / dry_gib - 1
    limit: float | None  # largest absolute value of error that passes
    passed: bool | None  # null for parts of the peak, which are not judged


class MemoryCheckDocument(Document, schema="check-memory/1"):
    """The result of ``leaven check memory``: planned memory compared with memory of simulated training steps."""

    passed: bool  # whether every judged row is within its limit
    check: str  # always memory
    subject: str  # name of the recipe
    layout: dict[str, Any]
    seconds: float  # how long the check took
    rows: list[MemoryCheckRow]
