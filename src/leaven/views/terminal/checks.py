"""A check in the terminal: its tables, what was changed for it, and the conclusion."""

from collections.abc import Iterator

from rich.console import RenderableType
from rich.text import Text

from leaven.documents.checks import CheckDocument, MemoryCheckDocument
from leaven.recipe.units import format_seconds
from leaven.views.check_tables import Check, check_tables, conclusion
from leaven.views.terminal.tables import Cell, Column, Columns, Facts

_STYLES = {True: "green", False: "red", None: "dim"}


def check_screen(check: CheckDocument) -> Iterator[RenderableType]:
    yield from tables(check.dump())
    if changed := check.settings.get("changed for the check"):
        yield f"checked on small models; changed for that: {', '.join(changed)}"
    yield conclusion(check.dump())


def tables(check: Check) -> Iterator[RenderableType]:
    """The tables with a verdict for each row, and each distinct note once below its table."""
    for table in check_tables(check):
        first, *heads = table.heads
        columns = [Column(first, align="left"), *(Column(head) for head in heads), Column("verdict", align="left")]
        judged = zip(table.rows, table.verdicts, table.passed, strict=True)
        rows: list[tuple[Cell, ...]] = []
        for row, verdict, passed in judged:
            rows.append((*row, Text(verdict, _STYLES[passed])))
        notes: dict[str, list[str]] = {}
        for row, note in zip(table.rows, table.notes, strict=True):
            if note:
                notes.setdefault(note, []).append(row[0])
        yield table.title
        yield Columns(columns, rows)
        if notes:
            yield Facts([("", (f"{note}:", ", ".join(names))) for note, names in notes.items()])
        yield ""


def memory_screen(check: MemoryCheckDocument) -> Iterator[RenderableType]:
    columns = (
        Column("rank"),
        Column("stage"),
        Column("part", align="left"),
        Column("planned", "GiB"),
        Column("dry run", "GiB"),
        Column("off", "GiB"),
        Column("verdict", align="left"),
    )
    rows = []
    for row in check.rows:
        judged = row.passed is not None
        first = row.part == check.rows[0].part
        off = f"{row.error:+.1%}" if judged and row.error is not None else f"{row.planned_gib - row.dry_gib:+.3f}"
        word = "" if not judged else f"within {row.limit:.0%}" if row.passed else f"FAILED: over {row.limit:.0%}"
        rows.append(
            (
                str(row.rank) if first else "",
                str(row.stage) if first else "",
                row.part if judged else f"  {row.part}",
                f"{row.planned_gib:.3f}",
                f"{row.dry_gib:.3f}",
                off,
                Text(word, _STYLES[row.passed]),
            )
        )
    yield Columns(columns, rows)
    verdicts = [row.passed for row in check.rows if row.passed is not None]
    failed = verdicts.count(False)
    told = f"FAILED: {failed}" if failed else f"passed: {len(verdicts)}"
    yield f"{told} of {len(verdicts)} lines, {format_seconds(check.seconds)}"
