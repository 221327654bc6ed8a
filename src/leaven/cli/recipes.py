"""leaven recipes: the published runs, and a recipe beside them."""

import csv
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import RenderableType

from leaven.catalogue.findings import CHECKS, Case, findings
from leaven.catalogue.groups import NormPlacement, Optimizer
from leaven.catalogue.neighbours import nearest
from leaven.catalogue.run import Kind, PublishedRun, Stack
from leaven.catalogue.runs import diff, find_run, load_runs, own_runs
from leaven.catalogue.selection import Condition, Range, select
from leaven.catalogue.summaries import near_run, summary
from leaven.catalogue.terms import L2_DECAY, diff_in_terms, terms
from leaven.cli import next_commands
from leaven.cli.common import JsonOption, RecipeArgument, SetOption, count_option, group, hand_over, load
from leaven.data.corpus import estimated_tokens
from leaven.documents import Document
from leaven.documents.catalogue import (
    DifferenceRow,
    PublishedRunDocument,
    RecipeCheck,
)
from leaven.recipe.errors import InputError
from leaven.recipe.recipe import Recipe
from leaven.scaling.table import resolve
from leaven.views.terminal.catalogue import diff_screen, list_screen, nearest_screen, run_screen
from leaven.views.terminal.console import console, warn
from leaven.views.terminal.findings import findings_screen

app = group()
CsvOption = Annotated[bool, typer.Option("--csv", help="Print comma-separated values and nothing else.")]
RangeOption = Annotated[str | None, typer.Option(metavar="A..B", help="For example 1B..10B; ..10B and 1B.. are open")]


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
    _rows([summary(run) for run in runs], list_screen(runs), json_output, csv_output)


@app.command()
def show(id: Annotated[str, typer.Argument(metavar="ID")], json_output: JsonOption = False) -> None:
    """One run, every group with its source."""
    run = find_run(id)
    hand_over(PublishedRunDocument(**run.model_dump(exclude_none=True)), run_screen(run, console.width), json_output)


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
    rows = [near_run(run, away, params, factor, asked) for run, away in found]
    l2 = recipe is not None and terms(recipe)["hyperparameters.optimizer"] == L2_DECAY
    _rows(rows, nearest_screen(found, params, factor, asked, l2), json_output, csv_output)


@app.command("diff")
def diff_runs(
    a: Annotated[str, typer.Argument(metavar="A")],
    b: Annotated[str, typer.Argument(metavar="B")],
    json_output: JsonOption = False,
) -> None:
    """The values in which two runs differ; A and B are published runs, or recipe files (.toml)."""
    left, right = _run_or_recipe(a), _run_or_recipe(b)
    rows: Sequence[DifferenceRow]
    if isinstance(left, PublishedRun) and isinstance(right, PublishedRun):
        rows = diff(left, right)
    else:
        rows = diff_in_terms(left, right, lambda recipe: Case(recipe, resolve(recipe).rows).as_trained)
    one, other = (of.id if isinstance(of, PublishedRun) else of.name for of in (left, right))
    hand_over(rows, diff_screen(one, other, rows), json_output)


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
    following = next_commands.after_check(recipe, read, overrides or ()) if passed else []
    document = RecipeCheck(
        name=read.name,
        params=read.model.params,
        tokens=read.data.tokens,
        passed=passed,
        checks=[check.name for check in CHECKS],
        findings=found,
        next=following,
    )
    chosen = set(read.why) - {override.partition("=")[0].strip() for override in overrides or ()}
    hand_over(document, findings_screen(document, console.width, chosen), json_output)
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
        warn([f"{error}; epochs are not checked"])
        return None
    known = [size for size in sizes if size is not None]
    return sum(known) if len(known) == len(names) else None


def _one_format(json_output: bool, csv_output: bool) -> None:
    if json_output and csv_output:
        raise InputError("one document is printed: take --json or --csv")


def _rows(rows: Sequence[Document], screen: Iterator[RenderableType], json_output: bool, csv_output: bool) -> None:
    """Rows as a document, as a screen, or as a spreadsheet reads them: what is not known is empty."""
    if not csv_output:
        hand_over(rows, screen, json_output)
    elif rows:
        plain = [row.model_dump() for row in rows]
        writer = csv.DictWriter(sys.stdout, list(plain[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(plain)


def _run_or_recipe(written: str) -> PublishedRun | Recipe:
    return load(Path(written), None) if written.endswith(".toml") else find_run(written)
