"""Show the results of ``leaven recipes list``, ``nearest``, ``show`` and ``diff`` in the terminal."""

from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from leaven.catalogue.groups import Provenance, PublishedGroup
from leaven.catalogue.runs import PublishedRun
from leaven.documents.catalogue import DifferenceRow, NearRun, RecipeDifference, RunSummary
from leaven.recipe.units import format_number, format_quantity
from leaven.views import numbers
from leaven.views.tables import Column, Fact, Facts, Table, under

_MARK = "*"  # mark of a learning rate that is not comparable
_RUN = Column("run", lambda run: run.id, align="left")
_SIZE = Column("params", lambda run: format_quantity(run.params))
_ACTIVE = Column("active", lambda run: format_quantity(run.params_active) if _sparse(run) else "")
_VALUES = (
    Column("tokens", lambda run: numbers.quantity(run.tokens)),
    Column("peak lr", lambda run: numbers.scientific(run.peak_lr, 3) + _MARK * _marked(run), align="point"),
    Column("batch", lambda run: numbers.quantity(run.batch_tokens), unit="tokens"),
    Column("decay", lambda run: run.decay or numbers.NONE, align="left", drop=2),
)
_SOURCE = Column("source of the lr", lambda run: run.source, align="left", drop=4, free=True)


def _sparse(run: RunSummary) -> bool:
    return run.params_active != run.params


def _marked(run: RunSummary) -> bool:
    return run.peak_lr is not None and not run.lr_comparable


def _sizes(runs: Sequence[RunSummary]) -> tuple[Column, ...]:
    return (_SIZE, _ACTIVE) if any(map(_sparse, runs)) else (_SIZE,)


def list_screen(runs: Sequence[RunSummary]) -> Iterator[RenderableType]:
    if not runs:
        yield "no published run matches"
        return
    yield Table.of((_RUN, *_sizes(runs), *_VALUES, _SOURCE), runs)
    if any(map(_marked, runs)):
        yield Text(f"{_MARK} not comparable with the others: muP, or an optimizer other than Adam(W)", style="dim")


def nearest_screen(
    runs: Sequence[NearRun], params: int, factor: float, stack: str, l2: bool
) -> Iterator[RenderableType]:
    """Yield a table of the nearest runs, and how they differ from the request.

    ``stack`` is the requested norms and optimizer. With ``l2``, the recipe's adam adds weight decay to the gradient.
    """
    columns = (
        _RUN,
        Column("distance", lambda run: f"{run.distance:.2f}", unit="octaves"),
        *_sizes(runs),
        *_VALUES,
        Column("stack", lambda run: run.stack, align="left", drop=3),
        Column("lineage", lambda run: run.lineage, align="left", drop=1),
        _SOURCE,
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
        yield f"{same or 'none'} of these {len(runs)} runs have the requested norms and optimizer: {stack}"
    if l2:
        yield "the recipe's adam adds weight decay to the gradient (L2); papers sometimes call AdamW adam"
    yield Text("distance in octaves (factors of 2) of parameters; an octave of tokens counts as 1/8", style="dim")


def diff_screen(a: str, b: str, rows: Sequence[DifferenceRow]) -> Iterator[RenderableType]:
    """Yield the values in which two runs or recipes differ, and then those that only one of them can have."""
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
        yield "\nvalues that only a recipe, or only a published run, can have"
        yield Table.of(columns, alone)
    if any(isinstance(row, RecipeDifference) for row in rows):
        note = "a recipe's lr, init std, decay, betas and eps: medians over the hidden weights after its scaling rule"
        yield Text(note, style="dim")


def run_screen(run: PublishedRun) -> Iterator[RenderableType]:
    """Yield all values of a run in groups. Each group begins with its sources."""
    yield Text(f"{run.id}  {run.family}, {run.organisation}, {run.date}, {run.status}")
    size = f"{format_quantity(run.params_total)} parameters"
    active = f", {format_quantity(run.params_active)} active" if run.params_active != run.params_total else ""
    yield Text(f"{run.kind}, {size}{active}, {numbers.quantity(run.tokens)} tokens")
    flat = run.flat()
    for name in dict.fromkeys(path.partition(".")[0] for path in flat if "." in path):
        group: PublishedGroup = getattr(run, name)
        yield from _sources(name, group)
        facts: list[Fact] = []
        for path, value in flat.items():
            if path.startswith(f"{name}."):
                facts += under(f"  {path}", value_lines(value))
                own = group.provenance(path.split(".")[1])
                if own is not group:
                    facts += _dim(f"known from: {own.confidence}", *own.sources)
        yield Facts(*facts, indent=4 + max(map(len, flat)))
    for event in run.instabilities:
        yield from _sources("instability", event)
        lines = (("what", event.what), ("action", event.action), ("outcome", event.outcome))
        yield Facts(*((f"  {label}", text) for label, text in lines if text), indent=11)
    if run.notes:
        yield ""
        yield Facts(*(("-", note) for note in run.notes), indent=2)


def _sources(name: str, group: Provenance) -> Iterator[RenderableType]:
    yield ""
    yield Text(f"{name} (known from: {group.confidence})", style="dim")
    yield Facts(*_dim(*group.sources), indent=4)


def _dim(*lines: str) -> list[Fact]:
    return [("", Text(line, style="dim")) for line in lines]


def value_lines(value: Any) -> list[str]:
    """Return a value as lines, one for each item of a list."""
    return list(map(numbers.setting, value)) if isinstance(value, list | tuple) else [numbers.setting(value)]
