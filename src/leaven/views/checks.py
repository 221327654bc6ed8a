"""Build the tables and the conclusion of a check, which both the terminal and the page show."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.text import Text

from leaven.documents.checks import REGRET_LIMIT, CheckDocument, VerdictRow
from leaven.views import numbers
from leaven.views.tables import Cell, Column, Table

SLOPES = ("coordinates", "gradients")  # checks that judge how values grow with the size of the model
SWEEPS = ("transfer", "duration", "batch", "decay", "init")  # checks that compare best values with those of a base
PAIRS = (*SWEEPS, "collapse")  # checks that compare other scales with a base
STYLES = {True: "green", False: "red", None: "dim"}  # the style of a verdict
UNDECIDED = "yellow"
# The numbers that have an interval, with the names of the interval's ends. A cell shows a number and its interval.
_INTERVALS = {
    "shift": ("low", "high"),
    "regret": ("regret, low", "regret, high"),
    "deviation": ("deviation, low", "deviation, high"),
}
_MEASURED = (
    Column("", lambda row: row.name, align="left"),
    Column("measured", lambda row: numbers.NONE if row.value is None else numbers.fixed(row.value, 3)),
    Column("95% interval", lambda row: numbers.NONE if row.low is None else _to(row.low, row.high)),
    Column("by the rule", lambda row: "" if row.expected is None else f"{row.expected:.3f}"),
)


def _to(low: float, high: float) -> str:
    return f"{numbers.fixed(low, 3)} to {numbers.fixed(high, 3)}"


@dataclass(frozen=True)
class CheckTable:
    """A table of a check: its verdicts, or measured numbers without a verdict."""

    name: str
    title: str
    table: Table  # if the table has verdicts, they are the last column
    notes: Sequence[str]  # the note of each row, or ""


def check_tables(check: CheckDocument) -> list[CheckTable]:
    """Return the tables of a check. Measured values without a verdict, if any, are in the last table."""
    pairs = check.check in PAIRS
    together = "loss curves" if check.check == "collapse" else "best value"
    by_axis: dict[str, list[VerdictRow]] = {}
    for row in check.rows:
        by_axis.setdefault(together if pairs else row.axis, []).append(row)
    tables = []
    for axis, rows in by_axis.items():
        columns = [
            Column("scales", lambda row: row.axis, align="left")
            if pairs
            else Column("module", lambda row: row.module, align="left"),
            *(Column(header, _part(check, part)) for part, header in _headers(check, rows).items()),
            Column("verdict", _verdict, align="left"),
        ]
        notes = [row.note for row in rows]
        tables.append(CheckTable(axis, _title(check, axis, rows), Table.of(columns, rows), notes))
    if check.measured:
        notes = [row.note for row in check.measured]
        tables.append(CheckTable("measured", "measured, not judged", Table.of(_MEASURED, check.measured), notes))
    return tables


def conclusion(check: CheckDocument) -> str:
    failed = [row for row in check.rows if row.passed is False]
    judged = [row for row in check.rows if row.passed is not None]
    if not judged:
        return "FAILED: nothing could be judged"
    if not failed:
        return f"passed: {len(judged)} of {len(judged)} rows"
    if all(row.undecided for row in failed):
        undecided = (
            f"UNDECIDED: {len(failed)} of {len(judged)} rows; first: {failed[0].axis}; this does not count as passed"
        )
        return f"{undecided}. {check.advice}" if check.advice else undecided
    rule = check.settings.get("rule")
    advice = f'. The rule in the recipe is "{rule}"' if rule else ""
    if rule not in {None, "complete-d-p"}:
        advice += "; try --set scaling.rule=complete-d-p"
    worst = check.fault
    if check.check in PAIRS:
        worst = max(failed, key=lambda row: row.beyond or 0.0).axis
    unsure = sum(row.undecided for row in failed)
    besides = f" and {unsure} undecided" if unsure else ""
    return f"FAILED: {len(failed) - unsure}{besides} of {len(judged)} rows; worst: {worst}{advice}"


def _headers(check: CheckDocument, rows: Sequence[VerdictRow]) -> dict[str, str]:
    known = {"start": "at step 0", "end": f"at step {check.settings.get('steps')}", "decay": "lr x decay"}
    ends = set()
    if check.check in PAIRS:
        known = {
            "shift": "shift, octaves",
            "regret": "regret, nats",
            "noise": "noise of seeds",
            "at": "at this share of the run",
        }
        ends = {end for pair in _INTERVALS.values() for end in pair}
    return {part: known.get(part, part) for row in rows for part in row.parts if part not in ends}


def _title(check: CheckDocument, axis: str, rows: Sequence[VerdictRow]) -> str:
    settings = check.settings
    if axis == "bookkeeping":
        return (
            "exponents with which the optimizer's settings change with the scale, computed without training. Each is "
            "the worst of five: over width, over depth, over both, over batch and over tokens. For lr, only batch "
            "and tokens count. The correct exponent is usually 0; for lr, it is 0.5 over batch and -0.5 to 0 over "
            "tokens"
        )
    steps = f"{settings['steps']} steps, " if "steps" in settings else ""
    against = f" against {axis}" if check.check in SLOPES else ""
    limits = sorted({row.limit for row in rows if row.limit is not None})
    limit = " or ".join(f"{value:.2g}" for value in limits)
    seeds = f"{settings['seeds']} seed{'' if settings['seeds'] == 1 else 's'}"
    if check.check in SWEEPS:
        nats = f"{REGRET_LIMIT:g} nats"
        return (
            f"{check.quantity} ({seeds}; 95% intervals). A row passes if the upper end of its regret interval is "
            f"at most {nats}. It also passes if the lower end is at most {nats} and both ends of its shift interval "
            f"are within {limit} octaves"
        )
    return f"{check.quantity}{against} (limit {limit}; {steps}{seeds})"


def _part(check: CheckDocument, part: str) -> Callable[[VerdictRow], str]:
    slopes = check.check in SLOPES

    def cell(row: VerdictRow) -> str:
        value = row.parts.get(part)
        if value is None:
            return numbers.NONE
        shown = numbers.fixed(value, 2) if slopes else numbers.value(value)
        low, high = (row.parts.get(end) for end in _INTERVALS.get(part, ("", "")))
        if slopes or low is None or high is None:
            return shown
        ends = (numbers.value(round(end, 4)) for end in (low, high))
        return f"{shown} ({' to '.join(ends)})"

    return cell


def _verdict(row: VerdictRow) -> Cell:
    if row.passed is None:
        return Text("not judged", STYLES[None])
    if row.undecided:
        return Text("undecided", UNDECIDED)
    return Text("passed" if row.passed else "FAILED", STYLES[row.passed])
