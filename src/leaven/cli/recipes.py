"""leaven recipes: the published runs."""

from typing import Annotated, Any

import typer

from leaven.catalogue.runs import Run, diff, find_run, load_runs, nearest
from leaven.cli._catalogue import diff_table, nearest_table, run_lines, run_table
from leaven.cli._common import JsonOption, console, count_option, emit_json

app = typer.Typer(help="Published runs; every value names its source.")


@app.callback(invoke_without_command=True)
def _help(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command("list")
def list_runs(json_output: JsonOption = False) -> None:
    """All published runs, from the smallest to the largest."""
    runs = load_runs()
    if json_output:
        emit_json([_summary(run) for run in runs])
    else:
        console.print(run_table(runs))


@app.command()
def show(id: Annotated[str, typer.Argument(metavar="ID")], json_output: JsonOption = False) -> None:
    """One run, every group with its source."""
    run = find_run(id)
    if json_output:
        emit_json(run.model_dump(exclude_none=True))
        return
    for line in run_lines(run, console.width):
        console.print(line)


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
    console.print(nearest_table(found))
    console.print("distance in octaves of parameters; an octave of tokens counts as an eighth", style="dim")


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
    else:
        console.print(diff_table(a, b, rows))


def _summary(run: Run) -> dict[str, Any]:
    return {
        "id": run.id,
        "params": run.params_total,
        "tokens": run.tokens,
        "peak_lr": run.peak_lr,
        "batch_tokens": run.batch_tokens,
        "source": "; ".join(run.schedule.sources),
    }
