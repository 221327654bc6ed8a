"""Show ``leaven recipes list``, ``nearest``, ``show`` and ``diff`` in the terminal."""

from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from leaven.catalogue.groups import PublishedGroup
from leaven.catalogue.run import PublishedRun
from leaven.documents.catalogue import DifferenceRow, NearRun, RecipeDifference, RunSummary
from leaven.documents.runs import ComparedValue
from leaven.recipe.units import format_number, format_quantity
from leaven.views import numbers
from leaven.views.tables import Column, Table, folded

_MARK = "*"  # mark of a learning rate that is not comparable
_RUN = Column("run", lambda run: run.id, align="left")
_SIZE = (
    Column("params", lambda run: format_quantity(run.params)),
    Column("active", lambda run: format_quantity(run.params_active) if _sparse(run) else ""),
)
_VALUES = (
    Column("tokens", lambda run: numbers.quantity(run.tokens)),
    Column("peak lr", lambda run: numbers.scientific(run.peak_lr, 3) + _MARK * _marked(run), align="point"),
    Column("batch", lambda run: numbers.quantity(run.batch_tokens), unit="tokens"),
    Column("decay", lambda run: run.decay or numbers.NONE, align="left", drop=2),
)


def _source(drop: int) -> Column:
    return Column("source of the lr", lambda run: run.source, align="left", drop=drop, free=True)


def _sparse(run: RunSummary) -> bool:
    return run.params_active != run.params


def _marked(run: RunSummary) -> bool:
    return run.peak_lr is not None and not run.lr_comparable


def _sizes(runs: Sequence[RunSummary]) -> tuple[Column, ...]:
    """Return the columns of model sizes. Active parameters have a column only if a run is a mixture of experts."""
    return _SIZE if any(map(_sparse, runs)) else _SIZE[:1]


def list_screen(runs: Sequence[RunSummary]) -> Iterator[RenderableType]:
    if not runs:
        yield "no published run matches"
        return
    yield Table.of((_RUN, *_sizes(runs), *_VALUES, _source(3)), runs)
    if any(map(_marked, runs)):
        note = f"{_MARK} not comparable with the others: muP, or an optimizer other than Adam(W)"
        yield Text(note, style="dim")


def nearest_screen(
    runs: Sequence[NearRun], params: int, factor: float, stack: str, l2: bool
) -> Iterator[RenderableType]:
    """Yield the nearest runs, and how they differ from the requested model.

    ``params``, ``factor`` and ``stack`` were requested. ``l2`` says whether the requested recipe has adam with L2
    decay.
    """
    columns = (
        _RUN,
        Column("distance", lambda run: f"{run.distance:.2f}", unit="octaves"),
        *_sizes(runs),
        *_VALUES,
        Column("stack", lambda run: run.stack, align="left", drop=3),
        Column("lineage", lambda run: run.lineage, align="left", drop=1),
        _source(4),
    )
    yield Table.of(columns, runs)
    nearest = runs[0]
    if not nearest.within_factor:
        side = "larger" if nearest.params > params else "smaller"
        yield (
            f"no published run is within a factor of {factor:g} of {format_quantity(params)} parameters: "
            f"{nearest.id} is {format_number(nearest.size_ratio)}x {side}"
        )
    same = sum(run.same_stack for run in runs)
    if same < len(runs):
        yield f"{same or 'none'} of these {len(runs)} have the requested stack: {stack}"
    if l2:
        yield "the recipe's adam adds its decay to the gradient (L2); papers sometimes call AdamW adam"
    yield Text("distance in octaves of parameters; an octave of tokens counts as an eighth", style="dim")


def diff_screen(a: str, b: str, rows: Sequence[DifferenceRow]) -> Iterator[RenderableType]:
    """Yield the values in which two runs or recipes differ. Values that apply to only one of them are listed last."""
    columns = (
        Column("value", lambda row: row.path, align="left"),
        Column(a, lambda row: " | ".join(value_lines(row.a)), align="left", free=True),
        Column(b, lambda row: " | ".join(value_lines(row.b)), align="left", free=True),
    )
    alone = [row for row in rows if isinstance(row, RecipeDifference) and not row.counterpart]
    both = [row for row in rows if row not in alone]
    if not rows:
        yield "no difference"
    if both:
        yield Table.of(columns, both)
    if alone:
        yield "\nwithout a counterpart on the other side"
        yield Table.of(columns, alone)
    if any(isinstance(row, RecipeDifference) for row in rows):
        note = "lr, init std, decay, betas and eps of a recipe: median of its hidden matrices, after the rule"
        yield Text(note, style="dim")


def run_screen(run: PublishedRun, width: int) -> Iterator[RenderableType]:
    """Yield all values of a run. The sources of a group of values are above the group; if a value has other sources,
    they are below the value."""
    yield Text(f"{run.id}  {run.family}, {run.organisation}, {run.date}, {run.status}")
    size = f"{format_quantity(run.params_total)} parameters"
    active = f", {format_quantity(run.params_active)} active" if run.params_active != run.params_total else ""
    yield Text(f"{run.kind}, {size}{active}, {numbers.quantity(run.tokens)} tokens")
    flat = run.flat()
    left = 2 + max(map(len, flat)) + 2
    for name in dict.fromkeys(path.partition(".")[0] for path in flat if "." in path):
        group: PublishedGroup = getattr(run, name)
        yield Text()
        yield Text(f"{name} (known from: {group.confidence})", style="dim")
        yield from _sources(group.sources, width, 4)
        for path, value in flat.items():
            if not path.startswith(f"{name}."):
                continue
            lines = [line for part in value_lines(value) for line in folded(part, width, left)]
            for n, line in enumerate(lines):
                yield Text(f"  {path if n == 0 else '':<{left - 2}}{line}")
            own = group.provenance(path.split(".")[1])
            if own is not group:
                yield from _sources((f"known from: {own.confidence}", *own.sources), width, 6)
    for event in run.instabilities:
        yield Text()
        yield Text(f"instability (known from: {event.confidence})", style="dim")
        yield from _sources(event.sources, width, 4)
        for label, text in (("what", event.what), ("action", event.action), ("outcome", event.outcome)):
            for n, line in enumerate(folded(text, width, 11) if text else ()):
                yield Text(f"  {label if n == 0 else '':<9}{line}")
    if run.notes:
        yield Text()
    for note in run.notes:
        for n, line in enumerate(folded(note, width, 2)):
            yield Text(("- " if n == 0 else "  ") + line)


def value_lines(value: Any) -> list[str]:
    """Return the lines of text of a value. A list has one line for each item."""
    match value:
        case None:
            return [numbers.NONE]
        case bool():
            return ["true" if value else "false"]
        case int() | float():
            return [f"{value:,}" if isinstance(value, int) else f"{value:.6g}"]
        case dict():
            return [", ".join(f"{key} {inner}" for key, inner in value.items())]
        case list() | tuple():
            return [line for inner in value for line in value_lines(inner)]
        case _:
            return [str(value)]


def value_rows(different: Sequence[ComparedValue]) -> list[list[str]]:
    """Return the rows of a table of values that differ between runs: the path, and the value of each run."""
    return [[row.path, *(" | ".join(value_lines(value)) for value in row.values)] for row in different]


def _sources(sources: Sequence[str], width: int, indent: int) -> Iterator[Text]:
    for source in sources:
        for n, line in enumerate(folded(source, width, indent + 2)):
            yield Text(" " * (indent if n == 0 else indent + 2) + line, style="dim")
