"""Define tables and labelled lines. Tables are shown in the terminal and on pages, and labelled lines in the
terminal.

In the terminal, a row is one line. Names and numbers are never shortened; free text is shortened with an ellipsis.
The least important columns are dropped first.
"""

import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from rich.console import Console, ConsoleOptions
from rich.text import Text

LEAST = 30  # a column of free text with less space than this is dropped, in characters
LABEL = 11  # width of the labels, in characters

Cell = str | Text
Fact = tuple[str, Sequence[Cell]]


@dataclass(frozen=True)
class Column:
    """A column of a table."""

    header: str
    cell: Callable[[Any], Cell] = str  # for `Table.of`: returns the cell of an item
    unit: str = ""  # printed below the header
    align: Literal["left", "right", "point"] = "right"  # point: at the decimal points
    drop: int = 0  # columns with the highest number are dropped first; 0: never dropped
    free: bool = False  # free text, which may be shortened
    width: int = 0  # for `RowByRow`: width in characters


@dataclass(frozen=True)
class Table:
    """A table with one line per row. ``notes`` are printed in full below their rows.

    In the terminal, a table that is too wide first drops columns, then narrows the gaps between columns, and then
    moves columns with the same value in all rows to a line below the table.
    """

    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    notes: Sequence[Sequence[str]] = ()  # the notes of each row

    @classmethod
    def of(
        cls,
        columns: Sequence[Column],
        items: Iterable[Any],
        notes: Callable[[Any], Sequence[str]] | None = None,
    ) -> "Table":
        """Return a table with a row for each item."""
        items = list(items)
        rows = [[column.cell(item) for column in columns] for item in items]
        return cls(columns, rows, [notes(item) for item in items] if notes else ())

    @cached_property
    def _cells(self) -> list[Sequence[Cell]]:
        """The cells of each column. If a column is aligned at decimal points, its numbers are padded accordingly."""
        by_column = [[row[i] for row in self.rows] for i in range(len(self.columns))]
        return [
            at_point([str(cell) for cell in cells]) if column.align == "point" else cells
            for column, cells in zip(self.columns, by_column, strict=True)
        ]

    @cached_property
    def _natural(self) -> list[int]:
        """The width that each column needs for its header, its unit and its longest cell."""
        return [
            max(map(len, (column.header, column.unit, *cells)))
            for column, cells in zip(self.columns, self._cells, strict=True)
        ]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        kept, gap, same = self._fit(options.max_width)
        widths = self._widths(kept, gap, options.max_width)
        for part in ("header", "unit"):
            titles = [getattr(column, part) for column in self.columns]
            if any(titles[i] for i in kept):
                yield self._line(titles, widths, gap, "dim")
        for r in range(len(self.rows)):
            yield self._line([cells[r] for cells in self._cells], widths, gap)
            if self.notes:
                for line in joined(self.notes[r], options.max_width - 4):
                    yield Text(" " * 4 + line.plain, style="dim")
        if same:
            values = ", ".join(f"{self.columns[i].header} {str(self._cells[i][0]).strip()}" for i in same)
            yield Text(f"all rows: {values}")

    def _fit(self, width: int) -> tuple[list[int], int, list[int]]:
        """Return (columns in the table, gap between them, columns on the line below the table), for a table of at
        most ``width`` characters."""
        kept = list(range(len(self.columns)))
        while self._least(kept, 2) > width and any(self.columns[i].drop for i in kept):
            kept.remove(max(kept, key=lambda i: self.columns[i].drop))
        gap = 2 if self._least(kept, 2) <= width else 1
        same: list[int] = []
        alike = [i for i in kept if self.columns[i].align == "point" and len(set(self._cells[i])) == 1]
        while self._least(kept, gap) > width and alike:
            same.append(alike.pop(0))
            kept.remove(same[-1])
        return kept, gap, same

    def _least(self, kept: list[int], gap: int) -> int:
        return sum(map(self._narrowest, kept)) + gap * (len(kept) - 1)

    def _narrowest(self, i: int) -> int:
        column, natural = self.columns[i], self._natural[i]
        if not column.free:
            return natural
        return max(len(column.header), min(natural, LEAST) if column.drop else 0)

    def _widths(self, kept: list[int], gap: int, width: int) -> dict[int, int]:
        widths = {i: self._natural[i] for i in kept}
        free = sorted((i for i in kept if self.columns[i].free), key=lambda i: widths[i])
        left = width - gap * (len(kept) - 1) - sum(widths[i] for i in kept if i not in free)
        for n, i in enumerate(free):
            widths[i] = max(len(self.columns[i].header), min(widths[i], left // (len(free) - n)))
            left -= widths[i]
        return widths

    def _line(self, cells: Sequence[Cell], widths: dict[int, int], gap: int, style: str = "") -> Text:
        aligned = [_aligned(cells[i], width, self.columns[i].align == "left") for i, width in widths.items()]
        line = Text(" " * gap).join(aligned)
        line.rstrip()
        line.style = style
        return line


class RowByRow:
    """A table whose rows are printed one at a time in columns of fixed width. The last column may be free text.

    Columns that do not fit are dropped.
    """

    def __init__(self, columns: Sequence[Column], width: int) -> None:
        self.columns = list(columns)
        while sum(column.width + 2 for column in self.columns) - 2 > width:
            last = max(self.columns, key=lambda column: column.drop)
            if not last.drop:
                break
            self.columns.remove(last)
        left = width - sum(column.width + 2 for column in self.columns if not column.free)
        self.widths = {c.header: max(left, len(c.header)) if c.free else c.width for c in self.columns}

    @property
    def header(self) -> Text:
        return self.line({column.header: column.header for column in self.columns})

    def line(self, cells: Mapping[str, Cell]) -> Text:
        """Return a row. ``cells`` maps the header of each column to its cell. Cells whose column is not shown are
        left out."""
        aligned = []
        for column in self.columns:
            cell, width = cells.get(column.header, ""), self.widths[column.header]
            aligned.append(_aligned(cell, width if column.free else max(width, len(cell)), column.align == "left"))
        line = Text("  ").join(aligned)
        line.rstrip()
        return line


class Facts:
    """Labelled lines, for example ``layout   dp 64 · tp 1 · pp 1``. A line that is too long is wrapped between its
    parts."""

    def __init__(self, facts: Sequence[Fact]) -> None:
        self._facts = facts
        self._indent = 2 + max(len(label) for label, _ in facts)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        room = options.max_width - self._indent
        for label, parts in self._facts:
            for n, line in enumerate(joined(parts, room)):
                yield Text((label if n == 0 else "").ljust(self._indent)) + line


def joined(parts: Sequence[Cell], room: int) -> list[Text]:
    """Join parts with dots into lines of at most ``room`` characters. A part that is longer than a line is wrapped
    between words."""
    lines: list[Text] = []
    for part in parts:
        text = Text(part) if isinstance(part, str) else part
        if lines and len(lines[-1]) + 3 + len(text) <= room:
            lines[-1] = lines[-1] + Text(" · ") + text
        elif len(text) <= room:
            lines.append(text)
        else:
            lines += map(Text, folded(text.plain, room))
    return lines


def folded(text: str, width: int, indent: int = 0) -> list[str]:
    """Wrap text to lines of ``width - indent`` characters. Words and ids are never broken."""
    return textwrap.wrap(text, max(width - indent, 20), break_long_words=False, break_on_hyphens=False)


def _aligned(cell: Cell, width: int, left: bool) -> Text:
    text = Text(cut(cell, width)) if isinstance(cell, str) else cell.copy()
    text.truncate(width, overflow="ellipsis")
    if left:
        text.pad_right(width - len(text))
    else:
        text.pad_left(width - len(text))
    return text


def cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1].rstrip() + "…"


def at_point(cells: Sequence[str]) -> list[str]:
    """Pad numbers so that their decimal points are aligned.

    A number without a decimal point is aligned as if the point were at its end, or before its exponent (``1e-8``) or
    mark (``16*``).
    """
    split = [next((n for n, sign in enumerate(cell) if sign in ".e*"), len(cell)) for cell in cells]
    before = max(split, default=0)
    after = max((len(cell) - n for cell, n in zip(cells, split, strict=True)), default=0)
    return [" " * (before - n) + cell + " " * (after - len(cell) + n) for cell, n in zip(cells, split, strict=True)]


def under(label: str, lines: Sequence[Sequence[Cell]]) -> list[Fact]:
    """Return several lines with one label. The label is printed only before the first line."""
    return [("" if n else label, line) for n, line in enumerate(lines)]
