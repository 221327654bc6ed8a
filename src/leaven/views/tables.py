"""Define tables for the terminal and for pages, and labelled lines for the terminal.

If a table is too wide for the terminal, columns are left out and free text is shortened. Names and numbers are never
shortened.
"""

import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rich.console import Console, ConsoleOptions
from rich.text import Text

LEAST = 30  # characters; an optional column of free text is left out if it would be narrower than this
LABEL = 11  # width of the labels, in characters

Cell = str | Text
Fact = tuple[Cell, Cell | Sequence[Cell]]  # a label, and the text beside it or its parts


@dataclass(frozen=True)
class Column:
    header: str
    cell: Callable[[Any], Cell] = str  # returns the cell of an item
    unit: str = ""  # printed below the header
    align: Literal["left", "right", "point"] = "right"  # point aligns numbers at their decimal points
    drop: int = 0  # 0: always shown. Above 0: optional; the column with the highest number is left out first
    free: bool = False  # whether the cells are free text, which may be shortened
    width: int = 0  # width in characters; only tables that are printed row by row (`RowByRow`) use it


@dataclass(frozen=True)
class Table:
    """A table whose rows are known before it is printed.

    If it is too wide, it drops optional columns, narrows the gaps, and moves constant columns to a line below it.
    """

    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    notes: Sequence[Sequence[str]] = ()  # the notes of each row; they are printed in full below the row

    @classmethod
    def of(
        cls, columns: Sequence[Column], items: Iterable[Any], notes: Callable[[Any], Sequence[str]] | None = None
    ) -> "Table":
        """Return a table with a row for each item. ``notes`` returns an item's notes."""
        items = list(items)
        rows = [[column.cell(item) for column in columns] for item in items]
        return cls(columns, rows, [notes(item) for item in items] if notes else ())

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        columns, width = self.columns, options.max_width
        cells = [[row[i] for row in self.rows] for i in range(len(columns))]
        cells = [at_point(found) if c.align == "point" else found for c, found in zip(columns, cells, strict=True)]
        natural = [max(map(len, (c.header, c.unit, *found))) for c, found in zip(columns, cells, strict=True)]
        least = [
            max(len(c.header), min(each, LEAST) if c.drop else 0) if c.free else each
            for c, each in zip(columns, natural, strict=True)
        ]
        kept, gap, same = list(range(len(columns))), 2, list[int]()
        optional = sorted((i for i in kept if columns[i].drop), key=lambda i: columns[i].drop)
        points = [i for i in reversed(kept) if columns[i].align == "point" and i not in optional]
        constant = [i for i in points if len(set(cells[i])) == 1]
        while sum(least[i] + gap for i in kept) - gap > width and (optional or gap > 1 or constant):
            if optional:
                kept.remove(optional.pop())
            elif gap > 1:
                gap = 1
            else:
                same.append(constant.pop())
                kept.remove(same[-1])
        left = width - sum(gap + (0 if columns[i].free else natural[i]) for i in kept) + gap
        widths = dict(zip(kept, (natural[i] for i in kept), strict=True))
        free = sorted((i for i in kept if columns[i].free), key=lambda i: natural[i])
        for n, i in enumerate(free):  # the columns of free text share the space that is left
            widths[i] = max(len(columns[i].header), min(natural[i], left // (len(free) - n)))
            left -= widths[i]

        def line(texts: Sequence[Cell], style: str = "") -> Text:
            aligned = [_aligned(texts[i], width, columns[i].align == "left") for i, width in widths.items()]
            return _joined_cells(aligned, gap, style)

        for titles in ([column.header for column in columns], [column.unit for column in columns]):
            if any(titles[i] for i in kept):
                yield line(titles, "dim")
        for r in range(len(self.rows)):
            yield line([found[r] for found in cells])
            for note in joined(self.notes[r], width - 4) if self.notes else ():
                yield Text(" " * 4 + note.plain, style="dim")
        if same:
            yield Text(f"all rows: {', '.join(f'{columns[i].header} {str(cells[i][0]).strip()}' for i in same)}")


class RowByRow:
    """A table that is printed row by row, in columns of fixed width, without optional columns that do not fit."""

    def __init__(self, columns: Sequence[Column], width: int) -> None:
        self._columns = columns
        kept = dict(enumerate(columns))
        while sum(column.width + 2 for column in kept.values()) - 2 > width:
            last = max(kept, key=lambda i: kept[i].drop)
            if not kept[last].drop:
                break
            del kept[last]
        left = width - sum(column.width + 2 for column in kept.values() if not column.free)
        self.widths = {i: max(left, len(c.header)) if c.free else c.width for i, c in kept.items()}

    @property
    def header(self) -> Text:
        return self.line([column.header for column in self._columns])

    def line(self, cells: Sequence[Cell]) -> Text:
        """Return a row as text. ``cells`` has a cell for every column, even for columns left out."""
        aligned = []
        for i, width in self.widths.items():
            room = width if self._columns[i].free else max(width, len(cells[i]))
            aligned.append(_aligned(cells[i], room, self._columns[i].align == "left"))
        return _joined_cells(aligned, 2)


class Facts:
    """Labelled lines, such as ``layout   dp 64 · tp 1``. ``indent`` is the width of the column of labels."""

    def __init__(self, *facts: Fact, indent: int = 0) -> None:
        self._facts = facts
        self._indent = indent or 2 + max(len(label) for label, _ in facts)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        for label, parts in self._facts:
            head: Cell = label
            for line in joined(parts, options.max_width - self._indent):
                yield Text.assemble(head, " " * (self._indent - len(head)), line)
                head = ""


def joined(parts: Cell | Sequence[Cell], room: int) -> list[Text]:
    """Join parts with `` · `` into lines of at most ``room`` characters. Longer parts are wrapped between words."""
    lines: list[Text] = []
    for part in [parts] if isinstance(parts, str | Text) else parts:
        text = Text(part) if isinstance(part, str) else part
        if lines and len(lines[-1]) + 3 + len(text) <= room:
            lines[-1] = lines[-1] + Text(" · ") + text
        elif len(text) <= room:
            lines.append(text)
        else:
            wrapped = textwrap.wrap(text.plain, max(room, 20), break_long_words=False, break_on_hyphens=False)
            lines += (Text(line, text.style) for line in wrapped)
    return lines


def _aligned(cell: Cell, width: int, left: bool) -> Text:
    text = Text(cut(cell, width)) if isinstance(cell, str) else cell.copy()
    text.align("left" if left else "right", width)
    return text


def _joined_cells(cells: Sequence[Text], gap: int, style: str = "") -> Text:
    line = Text(" " * gap).join(cells)
    line.rstrip()
    line.style = style
    return line


def cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1].rstrip() + "…"


def at_point(cells: Sequence[Cell]) -> list[Cell]:
    """Pad numbers with spaces so that their decimal points are aligned."""
    ends = [len(re.split("[.e*]", str(cell), maxsplit=1)[0]) for cell in cells]
    before = max(ends, default=0)
    after = max((len(cell) - end for cell, end in zip(cells, ends, strict=True)), default=0)
    return [f"{'':{before - end}}{cell}".ljust(before + after) for cell, end in zip(cells, ends, strict=True)]


def under(label: Cell, lines: Sequence[Cell]) -> list[Fact]:
    """Return facts with one label for several lines. Only the first line has the label."""
    return [("" if n else label, line) for n, line in enumerate(lines)]
