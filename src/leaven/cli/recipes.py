"""leaven recipes: the published runs, and a recipe beside them."""

import csv
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from leaven.catalogue.findings import CHECKS, Case, findings
from leaven.catalogue.groups import NormPlacement, Optimizer
from leaven.catalogue.neighbours import nearest, size_ratio
from leaven.catalogue.run import Kind, PublishedRun, Stack
from leaven.catalogue.runs import diff, find_run, load_runs, own_runs
from leaven.catalogue.selection import Condition, Range, select
from leaven.catalogue.terms import L2_DECAY, diff_in_terms, terms
from leaven.cli import _next
from leaven.cli._catalogue import MARKED, diff_table, nearest_table, run_lines, run_table, stack
from leaven.cli._common import JsonOption, RecipeArgument, SetOption, console, count_option, emit_json, errors, load
from leaven.cli._findings import finding_lines
from leaven.data.corpus import estimated_tokens
from leaven.recipe.errors import InputError
from leaven.recipe.recipe import Recipe
from leaven.recipe.units import format_number, format_quantity
from leaven.scaling.table import resolve

app = typer.Typer(help="Published runs; every value names its source.")
CsvOption = Annotated[bool, typer.Option("--csv", help="Print comma-separated values and nothing else.")]
RangeOption = Annotated[str | None, typer.Option(metavar="A..B", help="For example 1B..10B; ..10B and 1B.. are open")]


@app.callback(invoke_without_command=True)
def _help(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command("list")
def list_runs(
    params: RangeOption = None,
    tokens: RangeOption = None,
    kind: Annotated[str | None, typer.Option(help="dense, moe or vlm.")] = None,
    optimizer: Annotated[str | None, typer.Option(help="For example adamw.")] = None,
    family: Annotated[str | None, typer.Option(help="For example Pythia.")] = None,
    where: Annotated[
        list[str] | None,
        typer.Option(metavar="PATH=VALUE", help="E.g. schedule.shape=cosine; also != < <= > >=. May be repeated."),
    ] = None,
    json_output: JsonOption = False,
    csv_output: CsvOption = False,
) -> None:
    """Published runs and the bases that leaven tuned itself, from the smallest to the largest."""
    _one_format(json_output, csv_output)
    named = {"kind": kind, "optimizer": optimizer, "family": family}
    conditions = [Condition(path, "=", text) for path, text in named.items() if text is not None]
    runs = select(
        (*own_runs(), *load_runs()),
        params=None if params is None else Range.parse(params),
        tokens=None if tokens is None else Range.parse(tokens),
        conditions=[*conditions, *map(Condition.parse, where or ())],
    )
    if json_output:
        emit_json([_summary(run) for run in runs])
    elif csv_output:
        _emit_csv([_summary(run) for run in runs])
    elif not runs:
        console.print("no published run is so")
    else:
        console.print(run_table(runs))
        _say_marked(runs)


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
    params: Annotated[int | None, count_option("Parameters, e.g. 7B.")] = None,
    tokens: Annotated[int | None, count_option("Training tokens, e.g. 2T.")] = None,
    like: Annotated[
        Path | None, typer.Option(metavar="RECIPE", help="Stack, and size where it is not given, of this recipe.")
    ] = None,
    norm_placement: Annotated[NormPlacement | None, typer.Option(help="Such runs first.")] = None,
    qk_norm: Annotated[bool | None, typer.Option("--qk-norm/--no-qk-norm", help="Such runs first.")] = None,
    optimizer: Annotated[Optimizer | None, typer.Option(help="Such runs first.")] = None,
    kind: Annotated[Kind, typer.Option(help="Experts are another kind than dense models.")] = "dense",
    factor: Annotated[float, typer.Option(help="How many times larger or smaller a run may be.")] = 4.0,
    limit: Annotated[int, typer.Option(min=1, help="How many runs.")] = 5,
    json_output: JsonOption = False,
    csv_output: CsvOption = False,
) -> None:
    """The runs nearest in stack, size and duration; of each lineage first its closest."""
    _one_format(json_output, csv_output)
    recipe = load(like, None) if like else None
    if recipe is not None:
        params = recipe.model.params if params is None else params
        tokens = recipe.data.tokens if tokens is None else tokens
    if params is None or tokens is None:
        raise InputError("nearest to what? give --params and --tokens, or --like RECIPE")
    own = Stack("pre", recipe.model.qk_norm, recipe.hyperparameters.optimizer) if recipe else Stack()
    asked = Stack(
        norm_placement or own.norm_placement,
        own.qk_norm if qk_norm is None else qk_norm,
        optimizer or own.optimizer,
    )
    found = nearest(params, tokens, limit=limit, factor=factor, stack=asked, kind=kind)
    if json_output or csv_output:
        rows = [_summary(run) | _nearness(run, away, params, factor, asked) for run, away in found]
        (emit_json if json_output else _emit_csv)(rows)
        return
    console.print(nearest_table(found))
    for said in _cautions([run for run, _ in found], params, factor, asked):
        console.print(said)
    if recipe is not None and terms(recipe)["hyperparameters.optimizer"] == L2_DECAY:
        console.print("adam in the recipe adds its decay to the gradient (L2); in papers it can be AdamW's name")
    console.print("distance in octaves of parameters; an octave of tokens counts as an eighth", style="dim")


@app.command("diff")
def diff_runs(
    a: Annotated[str, typer.Argument(metavar="A")],
    b: Annotated[str, typer.Argument(metavar="B")],
    json_output: JsonOption = False,
) -> None:
    """The values in which two runs differ; A and B are published runs, or recipe files (.toml)."""
    left, right = _run_or_recipe(a), _run_or_recipe(b)
    if isinstance(left, PublishedRun) and isinstance(right, PublishedRun):
        rows = diff(left, right)
        if json_output:
            emit_json([{"path": path, "a": in_a, "b": in_b} for path, in_a, in_b in rows])
        else:
            console.print(diff_table(a, b, rows) if rows else "no difference")
        return
    found = diff_in_terms(left, right, _as_trained)
    if json_output:
        emit_json([{"path": row.path, "a": row.a, "b": row.b, "counterpart": row.counterpart} for row in found])
        return
    if not found:
        console.print("no difference")
        return
    one, other = (of.id if isinstance(of, PublishedRun) else of.name for of in (left, right))
    console.print(diff_table(one, other, [row[:3] for row in found if row.counterpart]))
    alone = [row[:3] for row in found if not row.counterpart]
    if alone:
        console.print("\nwithout a counterpart on the other side")
        console.print(diff_table(one, other, alone))
    console.print(
        "of a recipe: lr, init std, decay, betas and eps as its hidden matrices get them (the median)", style="dim"
    )


@app.command()
def check(
    recipe: RecipeArgument,
    overrides: SetOption = None,
    corpus_tokens: Annotated[
        int | None, count_option("Tokens of the text, e.g. 25B. Default: its local files at 3.75 bytes a token.")
    ] = None,
    json_output: JsonOption = False,
) -> None:
    """Where a recipe leaves the range of published runs, which of them say so, and what to set; 1 if it does."""
    read = load(recipe, overrides)
    if corpus_tokens is not None and corpus_tokens < 1:
        raise InputError("a text of no tokens has no epochs; give --corpus-tokens above 0, for example 25B")
    found = findings(read, lambda one: resolve(one).rows, corpus_tokens or _text_tokens(read))
    passed = all(one.severity == "note" for one in found)
    following = _next.after_check(recipe, read, overrides or ()) if passed else []
    if json_output:
        emit_json(
            {
                "name": read.name,
                "params": read.model.params,
                "tokens": read.data.tokens,
                "passed": passed,
                "checks": [check.name for check in CHECKS],
                "findings": [one.to_json() for one in found],
                "next": following,
            }
        )
    else:
        chosen = set(read.why) - {override.partition("=")[0].strip() for override in overrides or ()}
        for line in finding_lines(read, found, len(CHECKS), console.width, chosen):
            console.print(line)
        _next.say(following)
    if not passed:
        raise typer.Exit(1)


def _text_tokens(recipe: Recipe) -> int | None:
    """About how many tokens the recipe's files hold; None where they are elsewhere, or a stand-in."""
    names = [source.source for source in recipe.data.sources]
    if "python-stdlib" in names:
        return None
    try:
        sizes = [estimated_tokens(name) for name in names]
    except InputError as error:
        errors.print(Text.assemble(("warning: ", "bold yellow"), f"{error}; epochs are not checked"))
        return None
    known = [size for size in sizes if size is not None]
    return sum(known) if len(known) == len(names) else None


def _summary(run: PublishedRun) -> dict[str, Any]:
    return {
        "id": run.id,
        "params": run.params_total,
        "tokens": run.tokens,
        "peak_lr": run.peak_lr,
        "batch_tokens": run.batch_tokens,
        "source": "; ".join(run.lr_sources),
        "params_active": run.params_active,
        "kind": run.kind,
        "optimizer": run.optimizer,
        "decay": run.decay,
        "lineage": run.lineage.name,
        "lr_comparable": run.lr_comparable,
    }


def _nearness(run: PublishedRun, distance: float, params: int, factor: float, asked: Stack) -> dict[str, Any]:
    ratio = size_ratio(run, params)
    return {
        "distance": distance,
        "size_ratio": ratio,
        "within_factor": ratio <= factor,
        "same_stack": asked.fits(run.stack),
    }


def _one_format(json_output: bool, csv_output: bool) -> None:
    if json_output and csv_output:
        raise InputError("one document is printed: take --json or --csv")


def _emit_csv(rows: list[dict[str, Any]]) -> None:
    """As a spreadsheet reads it; what is not known is empty."""
    if rows:
        writer = csv.DictWriter(sys.stdout, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def _cautions(runs: list[PublishedRun], params: int, factor: float, asked: Stack) -> list[str]:
    said = []
    ratio = size_ratio(runs[0], params)
    if ratio > factor:
        side = "larger" if runs[0].params_total > params else "smaller"
        said.append(
            f"no published run is within a factor of {factor:g} of {format_quantity(params)} parameters: "
            f"{runs[0].id} is {format_number(ratio)}x {side}"
        )
    same = [run for run in runs if asked.fits(run.stack)]
    if len(same) < len(runs):
        said.append(f"{len(same) or 'none'} of these {len(runs)} of the stack asked for: {stack(asked)}")
    return said


def _say_marked(runs: list[PublishedRun]) -> None:
    if any(run.peak_lr is not None and not run.lr_comparable for run in runs):
        console.print(MARKED, style="dim")


def _run_or_recipe(written: str) -> PublishedRun | Recipe:
    return load(Path(written), None) if written.endswith(".toml") else find_run(written)


def _as_trained(recipe: Recipe) -> dict[str, Any]:
    """A recipe's values as check judges them; by themselves they are in base coordinates."""
    case = Case(recipe, resolve(recipe).rows)
    quantities = ("lr", "weight_decay", "beta1", "beta2", "eps")
    return {f"hyperparameters.{name}": case.hidden(name) for name in quantities} | {
        "hyperparameters.init_std": case.init_std
    }
