"""Show a check in the terminal: its tables, the changes to the recipe for the check, and the conclusion."""

from collections.abc import Iterator

from rich.console import RenderableType
from rich.text import Text

from leaven.documents.checks import CheckDocument, MemoryCheckDocument, MemoryCheckRow
from leaven.recipe.units import format_seconds
from leaven.views import numbers
from leaven.views.checks import STYLES, check_tables, conclusion
from leaven.views.tables import Column, Facts, Table

_DIFFERENCES = {  # by the key of the settings
    "changed for the check": "changed for the small models of the check",
    "left out": "left out, because a run diverged",
    "columns not used": "columns not used",
    "files not read": "files not read",
}


def check_screen(check: CheckDocument) -> Iterator[RenderableType]:
    """Yield the tables of a check, each followed by its notes, and then the conclusion."""
    for shown in check_tables(check):
        notes: dict[str, list[str]] = {}
        for row, note in zip(shown.table.rows, shown.notes, strict=True):
            if note:
                notes.setdefault(note, []).append(str(row[0]))
        yield shown.title
        yield shown.table
        if notes:
            yield Facts(*(("", f"{note}: {', '.join(names)}") for note, names in notes.items()))
        yield ""
    for key, words in _DIFFERENCES.items():
        if listed := check.settings.get(key):
            yield f"{words}: {'; '.join(listed)}"
    yield conclusion(check)


def memory_screen(check: MemoryCheckDocument) -> Iterator[RenderableType]:
    """Yield a table that compares the planned and the simulated memory of each rank, and then the conclusion."""
    first = check.rows[0].part
    unit, scale = ("MiB", 1024) if max(row.planned_gib for row in check.rows) < 0.1 else ("GiB", 1)

    def off(row: MemoryCheckRow) -> str:
        if row.passed is None or row.error is None:
            return numbers.fixed(scale * (row.planned_gib - row.dry_gib), 3, "+")
        return f"{row.error:+.1%}"

    def verdict(row: MemoryCheckRow) -> Text:
        if row.passed is None:
            return Text()
        return Text(f"{'within' if row.passed else 'FAILED: over'} {row.limit:.0%}", STYLES[row.passed])

    columns = (
        Column("rank", lambda row: str(row.rank) if row.part == first else ""),
        Column("stage", lambda row: str(row.stage) if row.part == first else ""),
        Column("part", lambda row: row.part if row.passed is not None else f"  {row.part}", align="left"),
        Column("planned", lambda row: f"{scale * row.planned_gib:.3f}", unit=unit),
        Column("dry run", lambda row: f"{scale * row.dry_gib:.3f}", unit=unit),
        Column("off", off, unit=f"% or {unit}"),
        Column("verdict", verdict, align="left"),
    )
    yield Table.of(columns, check.rows)
    verdicts = [row.passed for row in check.rows if row.passed is not None]
    failed = verdicts.count(False)
    count = f"FAILED: {failed}" if failed else f"passed: {len(verdicts)}"
    yield f"{count} of {len(verdicts)} rows, {format_seconds(check.seconds)}"
