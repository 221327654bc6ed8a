"""``leaven recipes list``, ``nearest``, ``show`` and ``diff`` in the terminal."""

from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from leaven.catalogue.groups import PublishedGroup
from leaven.catalogue.neighbours import size_ratio
from leaven.catalogue.run import PublishedRun, Stack
from leaven.documents.catalogue import DifferenceRow, RecipeDifference
from leaven.recipe.units import format_number, format_quantity
from leaven.views.terminal.tables import Column, Columns, count, folded, learning_rate

RUN = (
    Column("tokens"),
    Column("peak lr", align="point"),
    Column("batch", "tokens"),
    Column("decay", align="left", drop=2),
)
SOURCE = Column("source of the lr", align="left", drop=3, free=True)
MARK = "*"  # behind a learning rate that means something else
MARKED = f"{MARK} no lr to compare with the others: muP, or another optimizer than Adam(W)"


def list_screen(runs: Sequence[PublishedRun]) -> Iterator[RenderableType]:
    if not runs:
        yield "no published run matches"
        return
    yield run_table(runs)
    if any(run.peak_lr is not None and not run.lr_comparable for run in runs):
        yield Text(MARKED, style="dim")


def nearest_screen(
    found: Sequence[tuple[PublishedRun, float]], params: int, factor: float, asked: Stack, l2: bool
) -> Iterator[RenderableType]:
    """The nearest runs, and how they differ from the request. ``l2``: the recipe's adam has L2 decay."""
    yield nearest_table(found)
    runs = [run for run, _ in found]
    ratio = size_ratio(runs[0], params)
    if ratio > factor:
        side = "larger" if runs[0].params_total > params else "smaller"
        yield (
            f"no published run is within a factor of {factor:g} of {format_quantity(params)} parameters: "
            f"{runs[0].id} is {format_number(ratio)}x {side}"
        )
    same = sum(asked.fits(run.stack) for run in runs)
    if same < len(runs):
        yield f"{same or 'none'} of these {len(runs)} of the stack asked for: {asked.text}"
    if l2:
        yield "adam in the recipe adds its decay to the gradient (L2); in papers it can be AdamW's name"
    yield Text("distance in octaves of parameters; an octave of tokens counts as an eighth", style="dim")


def diff_screen(a: str, b: str, rows: Sequence[DifferenceRow]) -> Iterator[RenderableType]:
    """The values in which two runs or recipes differ; values that only one side can have are below."""
    alone = [row for row in rows if isinstance(row, RecipeDifference) and not row.counterpart]
    both = [row for row in rows if row not in alone]
    if not rows:
        yield "no difference"
    if both:
        yield diff_table(a, b, both)
    if alone:
        yield "\nwithout a counterpart on the other side"
        yield diff_table(a, b, alone)
    if any(isinstance(row, RecipeDifference) for row in rows):
        note = "lr, init std, decay, betas and eps of a recipe: median of its hidden matrices, after the rule"
        yield Text(note, style="dim")


def run_table(runs: Sequence[PublishedRun]) -> Columns:
    rows = [(run.id, *_sizes(run, runs), *_cells(run), _source(run)) for run in runs]
    return Columns((Column("run", align="left"), *_size_columns(runs), *RUN, SOURCE), rows)


def nearest_table(found: Sequence[tuple[PublishedRun, float]]) -> Columns:
    """The nearest runs with their distance in octaves of parameters."""
    runs = [run for run, _ in found]
    columns = (
        Column("run", align="left"),
        Column("distance", "octaves"),
        *_size_columns(runs),
        *RUN,
        Column("stack", align="left", drop=3),
        Column("lineage", align="left", drop=1),
        Column("source of the lr", align="left", drop=4, free=True),
    )
    rows = [
        (run.id, f"{away:.2f}", *_sizes(run, runs), *_cells(run), run.stack.text, run.lineage.name, _source(run))
        for run, away in found
    ]
    return Columns(columns, rows)


def diff_table(a: str, b: str, rows: Sequence[DifferenceRow]) -> Columns:
    columns = (
        Column("value", align="left"),
        Column(a, align="left", free=True),
        Column(b, align="left", free=True),
    )
    return Columns(
        columns, [(row.path, " | ".join(value_lines(row.a)), " | ".join(value_lines(row.b))) for row in rows]
    )


def run_screen(run: PublishedRun, width: int) -> Iterator[RenderableType]:
    """All values of one run: the sources of a group are above its values, an exception is below its value."""
    yield Text(f"{run.id}  {run.family}, {run.organisation}, {run.date}, {run.status}")
    size = f"{format_quantity(run.params_total)} parameters"
    active = f", {format_quantity(run.params_active)} active" if run.params_active != run.params_total else ""
    yield Text(f"{run.kind}, {size}{active}, {count(run.tokens)} tokens")
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
    for trouble in run.instabilities:
        yield Text()
        yield Text(f"instability (known from: {trouble.confidence})", style="dim")
        yield from _sources(trouble.sources, width, 4)
        for label, text in (("what", trouble.what), ("action", trouble.action), ("outcome", trouble.outcome)):
            for n, line in enumerate(folded(text, width, 11) if text else ()):
                yield Text(f"  {label if n == 0 else '':<9}{line}")
    if run.notes:
        yield Text()
    for note in run.notes:
        for n, line in enumerate(folded(note, width, 2)):
            yield Text(("- " if n == 0 else "  ") + line)


def value_lines(value: Any) -> list[str]:
    """The text of a value of a run; a list gives one line for each item."""
    match value:
        case None:
            return ["-"]
        case bool():
            return ["true" if value else "false"]
        case int():
            return [f"{value:,}"]
        case dict():
            return [", ".join(f"{key} {inner}" for key, inner in value.items())]
        case list() | tuple():
            return [line for inner in value for line in value_lines(inner)]
        case _:
            return [str(value)]


def _size_columns(runs: Sequence[PublishedRun]) -> tuple[Column, ...]:
    return (Column("params"), Column("active")) if _sparse(runs) else (Column("params"),)


def _sizes(run: PublishedRun, among: Sequence[PublishedRun]) -> tuple[str, ...]:
    """All parameters, and the active ones if these are fewer."""
    total, active = format_quantity(run.params_total), format_quantity(run.params_active)
    return (total, active if _sparse([run]) else "") if _sparse(among) else (total,)


def _sparse(runs: Sequence[PublishedRun]) -> bool:
    return any(run.params_active != run.params_total for run in runs)


def _cells(run: PublishedRun) -> tuple[str, ...]:
    mark = MARK if run.peak_lr is not None and not run.lr_comparable else ""
    return (
        count(run.tokens),
        learning_rate(run.peak_lr, 3) + mark,
        count(run.batch_tokens),
        run.decay or "-",
    )


def _source(run: PublishedRun) -> str:
    return "; ".join(run.lr_sources)


def _sources(sources: Sequence[str], width: int, indent: int) -> Iterator[Text]:
    for source in sources:
        for n, line in enumerate(folded(source, width, indent + 2)):
            yield Text(" " * (indent if n == 0 else indent + 2) + line, style="dim")
