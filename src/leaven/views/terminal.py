"""Tables and summaries for the terminal; the verbs print what these return.

Tables know the width they are printed at. A row is a line: names are never broken, numbers never left out; free text
ends in an ellipsis, and what says least goes first.
"""

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console, ConsoleOptions, Group
from rich.text import Text

from leaven.recipe.recipe import Recipe
from leaven.recipe.units import format_quantity, format_seconds
from leaven.scaling.table import ParameterTable, clip_reason, optimizer_reason, ramp_reason
from leaven.views import numbers
from leaven.views.folders import read_demo
from leaven.views.parameters import QUANTITIES, groups
from leaven.views.story import Demo

LEAST = 30  # free text of fewer characters than this says too little to be worth its column


@dataclass(frozen=True)
class Column:
    """A column, ``unit`` below its header.

    ``drop``: columns go where there is no room for them, the highest first; 0 stays. ``free``: text that may be cut.
    """

    header: str
    unit: str = ""
    align: Literal["left", "right", "point"] = "right"
    drop: int = 0
    free: bool = False


class Columns:
    """Rows under headers, a line each; ``notes`` are told in full below their rows, folded where need be.

    A table too wide for its terminal drops columns, then narrows its gaps, then tells below the table, once, what is
    the same in all rows.
    """

    def __init__(
        self, columns: Sequence[Column], rows: Sequence[Sequence[str]], notes: Sequence[Sequence[str]] = ()
    ) -> None:
        self._columns = columns
        by_column = [[row[i] for row in rows] for i in range(len(columns))]
        self._cells = [
            at_point(cells) if column.align == "point" else cells
            for column, cells in zip(columns, by_column, strict=True)
        ]
        self._notes = notes
        self._natural = [
            max(map(len, (column.header, column.unit, *cells)))
            for column, cells in zip(columns, self._cells, strict=True)
        ]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        kept, gap, same = self._fit(options.max_width)
        widths = self._widths(kept, gap, options.max_width)
        for part in ("header", "unit"):
            titles = [getattr(column, part) for column in self._columns]
            if any(titles[i] for i in kept):
                yield Text(self._line(titles, widths, gap), style="dim")
        for r in range(len(self._cells[0])):
            yield Text(self._line([cells[r] for cells in self._cells], widths, gap))
            if self._notes:
                for line in joined(self._notes[r], options.max_width - 4):
                    yield Text(" " * 4 + line.plain, style="dim")
        if same:
            told = ", ".join(f"{self._columns[i].header} {self._cells[i][0].strip()}" for i in same)
            yield Text(f"all rows: {told}")

    def _fit(self, width: int) -> tuple[list[int], int, list[int]]:
        """The columns that are shown, the gap between them, and those told below."""
        kept = list(range(len(self._columns)))
        while self._least(kept, 2) > width and any(self._columns[i].drop for i in kept):
            kept.remove(max(kept, key=lambda i: self._columns[i].drop))
        gap = 2 if self._least(kept, 2) <= width else 1
        same: list[int] = []
        alike = [i for i in kept if self._columns[i].align == "point" and len(set(self._cells[i])) == 1]
        while self._least(kept, gap) > width and alike:
            same.append(alike.pop(0))
            kept.remove(same[-1])
        return kept, gap, same

    def _least(self, kept: list[int], gap: int) -> int:
        return sum(map(self._narrowest, kept)) + gap * (len(kept) - 1)

    def _narrowest(self, i: int) -> int:
        column, natural = self._columns[i], self._natural[i]
        if not column.free:
            return natural
        return max(len(column.header), min(natural, LEAST) if column.drop else 0)

    def _widths(self, kept: list[int], gap: int, width: int) -> dict[int, int]:
        widths = {i: self._natural[i] for i in kept}
        free = sorted((i for i in kept if self._columns[i].free), key=lambda i: widths[i])
        left = width - gap * (len(kept) - 1) - sum(widths[i] for i in kept if i not in free)
        for n, i in enumerate(free):
            widths[i] = max(len(self._columns[i].header), min(widths[i], left // (len(free) - n)))
            left -= widths[i]
        return widths

    def _line(self, cells: list[str], widths: dict[int, int], gap: int) -> str:
        line = []
        for i, width in widths.items():
            cell = cut(cells[i], width)
            line.append(cell.ljust(width) if self._columns[i].align == "left" else cell.rjust(width))
        return (" " * gap).join(line).rstrip()


class Facts:
    """A label and what it says, folded between the parts: ``layout   dp 64 · tp 1 · pp 1``."""

    def __init__(self, facts: Sequence[tuple[str, Sequence[str | Text]]]) -> None:
        self._facts = facts
        self._indent = 2 + max(len(label) for label, _ in facts)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        room = options.max_width - self._indent
        for label, parts in self._facts:
            for n, line in enumerate(joined(parts, room)):
                yield Text((label if n == 0 else "").ljust(self._indent)) + line


def joined(parts: Sequence[str | Text], room: int) -> list[Text]:
    """Parts with dots between them in lines of at most ``room``; a part that is longer is folded between words."""
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
    """Text in lines that fit ``width`` after ``indent``; words and ids stay whole."""
    return textwrap.wrap(text, max(width - indent, 20), break_long_words=False, break_on_hyphens=False)


def cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1].rstrip() + "…"


def at_point(cells: Sequence[str]) -> list[str]:
    """Numbers one below the other at their points: ``0.004``, ``2.83e-4`` and ``1e-8``."""
    split = [next((n for n, sign in enumerate(cell) if sign in ".e"), len(cell)) for cell in cells]
    before = max(split, default=0)
    after = max((len(cell) - n for cell, n in zip(cells, split, strict=True)), default=0)
    return [" " * (before - n) + cell + " " * (after - len(cell) + n) for cell, n in zip(cells, split, strict=True)]


def learning_rate(lr: float | None, digits: int = 2) -> str:
    """One below the other, all alike: ``3.5e-4``."""
    if lr is None:
        return "-"
    mantissa, _, exponent = f"{lr:.{digits - 1}e}".partition("e")
    return f"{mantissa}e{int(exponent)}"


PARAMETER_COLUMNS = (
    Column("module", align="left"),
    Column("layers", align="left"),
    Column("shape", "(out, in)", drop=1),
    Column("role", align="left", drop=2),
    Column("init", "std", align="point"),
    Column("lr", "(a step)", align="point"),
    Column("decay", "(x lr)", align="point"),
    Column("beta1", align="point"),
    Column("beta2", align="point"),
    Column("eps", align="point"),
    Column("multiplier", "(forward)", align="point"),
)


def parameter_table(table: ParameterTable, recipe: Recipe) -> Group:
    """The resolved parameter table, neighbouring layers with equal values as one line.

    ``lr`` is a parameter's own peak, ``decay`` is per step and lr, both as the optimiser gets them.
    """
    at, model = table.ratios, recipe.model
    scale = (f"width x{at.width:.3g}", f"depth x{at.depth:.3g}", f"batch x{at.batch:.3g}", f"tokens x{at.tokens:.3g}")
    head = Facts(
        [
            (recipe.name, (f"{format_quantity(model.params)} parameters", f"rule {table.rule.name}")),
            ("", (f"{' '.join(scale)} of the base",)),
        ]
    )
    rows = [
        (
            group.label,
            group.layers,
            " x ".join(f"{size:,}" for size in group.row.shape),
            str(group.row.role).replace("_", " "),
            *(numbers.value(getattr(group.row, quantity)) for quantity in QUANTITIES),
        )
        for group in groups(table)
    ]
    return Group(head, Columns(PARAMETER_COLUMNS, rows))


def parameter_notes(table: ParameterTable, recipe: Recipe) -> Facts:
    """What belongs to no parameter: where they start if not as the table says, the scale of the attention logits, the
    optimizer's way with decay, and clipping."""
    scale = f"query . key x {numbers.value(table.attention_scale)}"
    weights = recipe.start.weights
    start = [("start", (f"from the weights in {weights}, not from init std",))] if weights else []
    choices = [("optimizer", (optimizer_reason(recipe),)), ("clip", (clip_reason(recipe),))]
    if (ramp := ramp_reason(recipe)) is not None:
        choices.append(("ramp", (ramp,)))
    return Facts([*start, ("attention", (scale,)), *choices])


def demo_summary(folder: Path, report: Path | None = None) -> list[str]:
    """At most ten lines on a demo: what came out, what it cost, where to read on.

    ``report`` is the page's path, report.html in the folder if none is given and it is there.

    Raises:
        InputError: if the folder holds no demo.
    """
    demo = read_demo(folder)
    lines = [demo.verdict, *_losses(demo)]
    if demo.parts:
        parts = " · ".join(f"{part.name} {format_seconds(part.seconds)}" for part in demo.parts)
        lines.append(f"time         {format_seconds(demo.seconds)}: {parts}")
    if demo.corpus:
        text = demo.corpus
        lines.append(
            f"text         {text.source}: {numbers.text_size(text.bytes, text.documents)}, "
            f"{format_quantity(text.train_tokens)} tokens to train on, vocabulary {text.vocab_size:,}"
        )
    lines += _scales(demo)
    report = report or next(iter(folder.glob("report.html")), None)
    if report:
        lines.append(f"report       {report}")
    return lines[:10]


def _losses(demo: Demo) -> list[str]:
    mine = demo.transferred.loss if demo.transferred else None
    lines: list[str] = []
    width = max([12, *(len(arm.title) for arm in demo.arms)])
    for arm in demo.arms:
        loss = "no run     " if arm.loss is None else f"{arm.loss:.4f}"
        behind = ""
        if arm.key != "transferred" and arm.loss is not None and mine is not None:
            behind = f"{arm.loss - mine:+.4f}"
        unit = "nats per token" if not lines else ""
        lines.append(f"{arm.title:<{width}} {loss}  {behind:<8}{unit}".rstrip())
    return lines


def _scales(demo: Demo) -> list[str]:
    if demo.target is None:
        return []
    proxy = demo.study.centre if demo.study else None
    large = demo.target
    small = proxy or large
    moved = (
        f"{format_quantity(small.model.params)} -> {format_quantity(large.model.params)} parameters",
        f"width {small.model.d_model} -> {large.model.d_model}",
        f"depth {small.model.n_layers} -> {large.model.n_layers}",
        f"batch {format_quantity(small.batch.tokens)} -> {format_quantity(large.batch.tokens)}",
        f"tokens {format_quantity(small.data.tokens)} -> {format_quantity(large.data.tokens)}",
    )
    return [f"scale        {' · '.join(moved)}"]
