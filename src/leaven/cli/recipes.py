"""Defines the commands ``leaven recipes list``, ``show``, ``nearest``, ``diff`` and ``check``."""

import csv
import sys
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Annotated

import typer
from rich.console import RenderableType

from leaven.catalogue.groups import NormPlacement, Optimizer
from leaven.catalogue.neighbours import near_run, nearest
from leaven.catalogue.runs import Kind, PublishedRun, Stack, diff, find_run, load_runs, own_runs
from leaven.catalogue.selection import Condition, parse_condition, parse_range, select
from leaven.catalogue.terms import L2_DECAY, diff_in_terms, terms
from leaven.cli.common import (
    JsonOption,
    RecipeArgument,
    SetOption,
    argument,
    count_option,
    group,
    load_recipe,
    option,
    print_document,
)
from leaven.documents import Document
from leaven.documents.catalogue import DifferenceRow, PublishedRunDocument, RecipeCheck
from leaven.errors import InputError
from leaven.recipe.recipe import Recipe
from leaven.views.terminal.catalogue import diff_screen, list_screen, nearest_screen, run_screen
from leaven.views.terminal.console import console, warn
from leaven.views.terminal.findings import findings_screen

app = group()
CsvOption = Annotated[bool, option("Print comma-separated values instead of a table.", names="--csv")]
ParamsRange = Annotated[str | None, option("Only runs of this size, e.g. 1B..10B, ..10B or 1B..", metavar="A..B")]
TokensRange = Annotated[
    str | None, option("Only runs of this length in tokens, e.g. 1T..5T, ..5T or 1T..", metavar="A..B")
]


@app.command("list")
def list_runs(
    params: ParamsRange = None,
    tokens: TokensRange = None,
    kind: Annotated[str | None, option("Only runs of this kind: dense, moe or vlm.")] = None,
    optimizer: Annotated[str | None, option("Only runs with this optimizer, e.g. adamw.")] = None,
    family: Annotated[str | None, option("Only runs of this family, e.g. Pythia.")] = None,
    where: Annotated[
        list[str] | None,
        option(
            "Only runs with this value, e.g. schedule.shape=cosine. Other operators: != < <= > >=. Repeatable.",
            metavar="PATH=VALUE",
        ),
    ] = None,
    json_output: JsonOption = False,
    csv_output: CsvOption = False,
) -> None:
    """List training runs in two groups: small runs that were tuned with leaven, then published runs.

    Each group is sorted by size.
    """
    named = {"kind": kind, "optimizer": optimizer, "family": family}
    conditions = [Condition(path, "=", text) for path, text in named.items() if text is not None]
    for path, ends in (("params_total", params), ("tokens", tokens)):
        conditions += parse_range(path, ends) if ends is not None else []
    runs = select((*own_runs(), *load_runs()), [*conditions, *map(parse_condition, where or ())])
    rows = [run.summary() for run in runs]
    _rows(rows, list_screen(rows), json_output, csv_output)


@app.command()
def show(
    id: Annotated[str, argument("ID", "The id of a published run (see leaven recipes list), e.g. olmo-7b.")],
    json_output: JsonOption = False,
) -> None:
    """Print all values of one published run, with their sources."""
    run = find_run(id)
    print_document(PublishedRunDocument(**run.model_dump(exclude_none=True)), run_screen(run), json_output)


@app.command("nearest")
def nearest_runs(
    params: Annotated[
        int | None, count_option("Size of the model, embeddings included, e.g. 7B.", "of --like")
    ] = None,
    tokens: Annotated[int | None, count_option("Length of the run in tokens, e.g. 2T.", "of --like")] = None,
    like: Annotated[
        Path | None,
        option("List runs that are similar to this recipe in size, norms and optimizer.", metavar="RECIPE"),
    ] = None,
    norm_placement: Annotated[
        NormPlacement | None, option("Put runs with this placement of norms at the top of the list.")
    ] = None,
    qk_norm: Annotated[
        bool | None,
        option("Put runs with (or without) QK-norm at the top of the list.", names="--qk-norm/--no-qk-norm"),
    ] = None,
    optimizer: Annotated[Optimizer | None, option("Put runs with this optimizer at the top of the list.")] = None,
    kind: Annotated[
        Kind,
        option(
            "Only runs of models of this kind. A --like recipe with experts is compared by all its parameters with "
            "--kind moe, and otherwise by the parameters that a token uses."
        ),
    ] = "dense",
    factor: Annotated[
        float,
        option(
            "Only runs of models that are at most this many times larger or smaller than yours. If there are none, "
            "runs of any size."
        ),
    ] = 4.0,
    limit: Annotated[int, option("How many runs to list.", min=1)] = 5,
    json_output: JsonOption = False,
    csv_output: CsvOption = False,
) -> None:
    """List the published runs that are most similar to a model.

    The most similar run of each lineage (a group of runs that inherited one learning rate) comes first. The other
    runs follow. Within both parts, matching norms and optimizer decide the order, and then nearness in size and
    length. If no run is within --factor, only size and length decide the order. Runs of unknown length are left
    out. So are runs whose learning rate cannot be compared, as with muP.
    """
    recipe = load_recipe(like, None) if like else None
    if recipe is not None:
        size = recipe.model.params if kind == "moe" else recipe.model.params_active
        params = size if params is None else params
        tokens = recipe.data.tokens if tokens is None else tokens
    if params is None or tokens is None:
        raise InputError("no size is given; type --params COUNT --tokens COUNT, or --like RECIPE")
    own = Stack("pre", recipe.model.qk_norm, recipe.hyperparameters.optimizer) if recipe else Stack()
    wanted = Stack(
        norm_placement or own.norm_placement, own.qk_norm if qk_norm is None else qk_norm, optimizer or own.optimizer
    )
    found = nearest(params, tokens, limit=limit, factor=factor, stack=wanted, kind=kind)
    rows = [near_run(run, away, params, factor, wanted) for run, away in found]
    l2 = recipe is not None and terms(recipe)["hyperparameters.optimizer"] == L2_DECAY
    _rows(rows, nearest_screen(rows, params, factor, wanted.text, l2), json_output, csv_output)


@app.command("diff")
def diff_runs(
    a: Annotated[str, argument("A", "The id of a published run, or a recipe file (.toml).")],
    b: Annotated[str, argument("B", "The id or recipe file (.toml) to compare with.")],
    json_output: JsonOption = False,
) -> None:
    """Print the values in which two published runs or recipes differ."""
    left, right = _run_or_recipe(a), _run_or_recipe(b)
    rows: Sequence[DifferenceRow]
    if isinstance(left, PublishedRun) and isinstance(right, PublishedRun):
        rows = diff(left, right)
    else:
        from leaven.catalogue.findings import Case
        from leaven.scaling.table import adamw_rows

        rows = diff_in_terms(left, right, lambda recipe: Case(recipe, adamw_rows(recipe)).as_trained)
    first, second = (side.id if isinstance(side, PublishedRun) else side.name for side in (left, right))
    print_document(rows, diff_screen(first, second, rows), json_output)


@app.command()
def check(
    recipe: RecipeArgument,
    overrides: SetOption = None,
    corpus_tokens: Annotated[
        int | None,
        count_option("Size of the text in tokens, e.g. 25B.", "estimated from the local files"),
    ] = None,
    json_output: JsonOption = False,
) -> None:
    """Compare a recipe with published runs, value by value.

    For each unusual value, the command names published runs and says what to set. The exit code is 1 if a value is
    marked OUTSIDE or FAR OUTSIDE. It is 0 if all findings are notes.
    """
    from leaven.catalogue.findings import CHECKS, combined, findings
    from leaven.cli import next_commands
    from leaven.data.sources import text_tokens
    from leaven.scaling.table import adamw_rows
    from leaven.scaling.tested_ranges import without_effect

    read = load_recipe(recipe, overrides)
    of_text = corpus_tokens
    if not of_text:
        try:
            of_text = text_tokens(read.data, read.model.vocab_size)
        except InputError as error:
            warn([f"{error}; the number of epochs is not checked"])
    warn(each.message for each in without_effect(read))
    found = findings(read, adamw_rows, of_text)
    passed = all(one.severity == "note" for one in found)
    if passed:
        following = next_commands.after_check(recipe, read, overrides or ())
    else:
        following = next_commands.after_findings(combined(read, found))
    document = RecipeCheck(
        name=read.name,
        params=read.model.params,
        params_active=read.model.params_active,
        tokens=read.data.tokens,
        passed=passed,
        checks=[check.name for check in CHECKS],
        findings=found,
    )
    chosen = set(read.why) - {override.partition("=")[0].strip() for override in overrides or ()}
    screen = chain(findings_screen(document, console.width, chosen), next_commands.why_hardware(read, following))
    print_document(document, screen, json_output, following)
    if not passed:
        raise typer.Exit(1)


def _rows(rows: Sequence[Document], screen: Iterator[RenderableType], json_output: bool, csv_output: bool) -> None:
    if csv_output and json_output:
        raise InputError("--csv cannot be combined with --json; leave one of them out")
    if not csv_output:
        print_document(rows, screen, json_output)
    elif rows:
        plain = [row.model_dump() for row in rows]
        writer = csv.DictWriter(sys.stdout, list(plain[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(plain)


def _run_or_recipe(written: str) -> PublishedRun | Recipe:
    return load_recipe(Path(written), None) if written.endswith(".toml") else find_run(written)
