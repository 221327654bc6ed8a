"""leaven recipes: the published runs."""

from typing import Annotated, Any

import typer
from rich.table import Table

from leaven.catalogue.runs import Run, diff, find_run, load_runs, nearest
from leaven.cli._common import JsonOption, console, count_option, emit_json
from leaven.recipe.units import format_quantity

app = typer.Typer(help="Published runs, every value with its source.", no_args_is_help=True)


@app.command("list")
def list_runs(json_output: JsonOption = False) -> None:
    """All published runs, from the smallest to the largest."""
    runs = load_runs()
    if json_output:
        emit_json([_summary(run) for run in runs])
        return
    table = _table()
    for run in runs:
        table.add_row(*_cells(run))
    console.print(table)


@app.command()
def show(id: Annotated[str, typer.Argument(metavar="ID")], json_output: JsonOption = False) -> None:
    """One run, every group with its source."""
    run = find_run(id)
    if json_output:
        emit_json(run.model_dump(exclude_none=True))
        return
    console.print(f"{run.id}  {run.family}, {run.organisation}, {run.date}, {run.status}")
    table = Table("value", "", "source", "how known", box=None, pad_edge=False)
    for path, value in run.flat().items():
        name, _, field = path.partition(".")
        if field:
            provenance = getattr(run, name).provenance(field.partition(".")[0])
            table.add_row(path, str(value), "; ".join(provenance.sources), provenance.confidence)
    console.print(table)
    for note in run.notes:
        console.print(f"- {note}")


@app.command("nearest")
def nearest_runs(
    params: Annotated[int, count_option("Parameters, e.g. 7B.")],
    tokens: Annotated[int, count_option("Training tokens, e.g. 2T.")],
    limit: Annotated[int, typer.Option(min=1, help="How many runs.")] = 5,
    json_output: JsonOption = False,
) -> None:
    """The runs nearest in size and duration; of each lineage first its closest."""
    found = nearest(params, tokens, limit=limit)
    if json_output:
        emit_json([_summary(run) | {"distance": distance, "lineage": run.lineage.name} for run, distance in found])
        return
    table = _table("lineage", "octaves away")
    for run, distance in found:
        table.add_row(*_cells(run), run.lineage.name, f"{distance:.2f}")
    console.print(table)


@app.command("diff")
def diff_runs(
    a: Annotated[str, typer.Argument(metavar="A")],
    b: Annotated[str, typer.Argument(metavar="B")],
    json_output: JsonOption = False,
) -> None:
    """The values in which two runs differ."""
    rows = diff(find_run(a), find_run(b))
    if json_output:
        emit_json([{"path": path, "a": left, "b": right} for path, left, right in rows])
        return
    table = Table("value", a, b, box=None, pad_edge=False)
    for path, left, right in rows:
        table.add_row(path, *("-" if value is None else str(value) for value in (left, right)))
    console.print(table)


def _summary(run: Run) -> dict[str, Any]:
    return {
        "id": run.id,
        "params": run.params_total,
        "tokens": run.tokens,
        "peak_lr": run.peak_lr,
        "batch_tokens": run.batch_tokens,
        "source": "; ".join(run.schedule.sources),
    }


def _table(*more: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("run", "params", "tokens", "peak lr", "batch, tokens", "decay", "source of the lr", *more):
        table.add_column(name, overflow="fold")
    return table


def _cells(run: Run) -> tuple[str, ...]:
    return (
        run.id,
        format_quantity(run.params_total),
        format_quantity(run.tokens),
        f"{run.peak_lr:.1e}",
        format_quantity(run.batch_tokens),
        run.decay,
        "; ".join(run.schedule.sources),
    )
