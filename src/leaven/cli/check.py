"""leaven check coordinates|gradients|transfer|equivalence RECIPE"""

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from leaven.cli._common import JsonOption, SetOption, console, emit_json, errors, load, stopping
from leaven.cli._screens import CountScreen, TextScreen
from leaven.recipe.errors import InputError
from leaven.recipe.recipe import Recipe

if TYPE_CHECKING:
    from leaven.verification.family import Family
    from leaven.verification.verdict import Verdict

app = typer.Typer(help="Is it true? Checks of a rule on small models, minutes each; exit code 1 if one fails.")

SubjectArgument = Annotated[
    str, typer.Argument(metavar="RECIPE", help="A recipe file, or module:factory for a model of yours.")
]
RecipePath = Annotated[Path, typer.Argument(metavar="RECIPE", help="A recipe file (TOML).", show_default=False)]
WidthsOption = Annotated[str, typer.Option(metavar="LIST", help="Widths, with commas.")]
DepthsOption = Annotated[str, typer.Option(metavar="LIST", help="Depths, with commas.")]
SeedsOption = Annotated[int, typer.Option(min=1, help="Seeds of initialisation and data.")]
FactorOption = Annotated[float, typer.Option(min=0, help="Multiplies every lr.")]
BatchOption = Annotated[int, typer.Option(min=1, help="Tokens a step, of a recipe.")]
HeadsOption = Annotated[bool, typer.Option("--grow-heads", help="Widen by larger heads instead of more of them.")]
OutputOption = Annotated[
    Path | None,
    typer.Option("--output", "-o", metavar="FILE.html", help="Write the picture here.", show_default=False),
]
RunOption = Annotated[Path, typer.Option(metavar="DIR", help="Keeps every run; the same again goes on.")]
WorkersOption = Annotated[int | None, typer.Option(min=1, help="Processes of one thread each (one a core).")]


@app.command("coordinates")
def coordinates_(
    subject: SubjectArgument,
    widths: WidthsOption = "64,128,256,512",
    depths: DepthsOption = "2,4,8,16",
    steps: Annotated[int, typer.Option(min=1, help="Steps on one batch.")] = 10,
    seeds: SeedsOption = 3,
    lr_factor: FactorOption = 1.0,
    batch_tokens: BatchOption = 512,
    grow_heads: HeadsOption = False,
    output: OutputOption = None,
    overrides: SetOption = None,
    json_output: JsonOption = False,
) -> None:
    """Do outputs, and their changes, keep their size over width and depth?

    A recipe keeps its rule and its proportions, but starts from initial values that are near the limit of large
    models, with its base at the smallest width and depth: exponents do not depend on them, how soon they show does.
    """
    from leaven.verification.coordinates import HIDDEN_STD, coordinates

    sizes = numbers(widths, "--widths", int), numbers(depths, "--depths", int)
    family, rule = _family(subject, overrides, sizes, HIDDEN_STD, batch_tokens, grow_heads)
    with CountScreen("models") as screen:
        verdict = coordinates(family, *sizes, steps=steps, seeds=seeds, lr_factor=lr_factor, on_member=screen.update)
    _finish(verdict, rule, output, json_output)


@app.command("gradients")
def gradients_(
    subject: SubjectArgument,
    widths: WidthsOption = "64,128,256,512",
    depths: DepthsOption = "2,4,8,16",
    steps: Annotated[int, typer.Option(min=1, help="Steps; from 150 on, shared QK gains are judged too.")] = 20,
    seeds: SeedsOption = 3,
    lr_factor: FactorOption = 0.125,
    batch_tokens: BatchOption = 512,
    grow_heads: HeadsOption = False,
    output: OutputOption = None,
    overrides: SetOption = None,
    json_output: JsonOption = False,
) -> None:
    """Does eps move with the gradient it is added to, and lr x decay keep its pace?"""
    from leaven.verification.gradients import HIDDEN_STD, gradients

    sizes = numbers(widths, "--widths", int), numbers(depths, "--depths", int)
    family, rule = _family(subject, overrides, sizes, HIDDEN_STD, batch_tokens, grow_heads)
    with CountScreen("models") as screen:
        verdict = gradients(family, *sizes, steps=steps, seeds=seeds, lr_factor=lr_factor, on_member=screen.update)
    _finish(verdict, rule, output, json_output)


@app.command("transfer")
def transfer_(
    recipe: RecipePath,
    run: RunOption,
    scales: Annotated[str, typer.Option(metavar="LIST", help="WIDTHxDEPTH, with commas; the first is the base.")],
    lrs: Annotated[str | None, typer.Option(metavar="LIST", help="Base lrs (the recipe's x 1/4 to x 4).")] = None,
    seeds: SeedsOption = 3,
    workers: WorkersOption = None,
    output: OutputOption = None,
    overrides: SetOption = None,
    json_output: JsonOption = False,
) -> None:
    """Is the lr that was best for the small model best for the big one?"""
    from leaven.verification.transfer import transfer

    loaded = load(recipe, overrides)
    lr = loaded.hyperparameters.lr
    grid = numbers(lrs, "--lrs", float) if lrs else [lr * 2.0**octave for octave in range(-2, 3)]
    pairs = [_scale(text) for text in scales.split(",")]
    check = partial(transfer, loaded, pairs, grid, run, seeds=seeds)
    _finish(_long(loaded, workers, run, check), loaded.scaling.rule, output, json_output)


@app.command("equivalence")
def equivalence_(
    recipe: RecipePath,
    run: RunOption,
    batch_ratios: Annotated[str, typer.Option(metavar="LIST", help="Batches, as multiples of the recipe's.")] = (
        "0.25,0.5,2,4"
    ),
    seeds: SeedsOption = 3,
    workers: WorkersOption = None,
    output: OutputOption = None,
    overrides: SetOption = None,
    json_output: JsonOption = False,
) -> None:
    """Does another batch at the same data give the same final loss under the rule, and another one without it?"""
    from leaven.verification.equivalence import equivalence

    loaded = load(recipe, overrides)
    ratios = numbers(batch_ratios, "--batch-ratios", float)
    check = partial(equivalence, loaded, ratios, run, seeds=seeds)
    _finish(_long(loaded, workers, run, check), loaded.scaling.rule, output, json_output)


def numbers(text: str, option: str, kind: Callable[[str], Any]) -> list[Any]:
    """A list of positive numbers with commas between them."""
    try:
        values = [kind(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or any(value <= 0 for value in values):
        raise InputError(f"{option} {text}: give numbers above 0 with commas between them")
    return values


def _scale(text: str) -> tuple[int, int]:
    width, _, depth = text.strip().partition("x")
    if not (width.isdigit() and depth.isdigit()):
        raise InputError(f"--scales {text}: write a scale as WIDTHxDEPTH, e.g. 64x4,256x4")
    return int(width), int(depth)


def _family(
    subject: str,
    overrides: list[str] | None,
    sizes: tuple[list[int], list[int]],
    hidden_std: float,
    batch_tokens: int,
    grow_heads: bool,
) -> "tuple[Family, str | None]":
    """What is checked, and the rule of a recipe."""
    from leaven.data.tokens import prepare
    from leaven.verification.family import RecipeFamily, calibrated, corpus, foreign

    if all(len(set(axis)) < 2 for axis in sizes):
        raise InputError("a slope needs two sizes: give more --widths or --depths")
    if ":" in subject and not Path(subject).exists():
        if overrides or grow_heads:
            raise InputError(f"{subject}: --set and --grow-heads are for recipes; change the factory")
        return foreign(subject), None
    recipe = calibrated(load(Path(subject), overrides), min(sizes[0]), min(sizes[1]), hidden_std)
    with TextScreen() as text:
        tokens = prepare(recipe.data.source, recipe.data.tokenizer, recipe.model.vocab_size, progress=text.update)
    batches = corpus(recipe, tokens, batch_tokens)
    return RecipeFamily(recipe, batches, grow_heads=grow_heads), recipe.scaling.rule


def _long(recipe: Recipe, workers: int | None, run: Path, check: "Callable[..., Verdict]") -> "Verdict":
    """A check of whole training runs: it can be stopped, and goes on."""
    from leaven.data.tokens import prepare
    from leaven.training.trainer import check_trainable
    from leaven.verification.runs import Stopped

    with stopping() as stop:
        with TextScreen() as text:
            tokens = prepare(recipe.data.source, recipe.data.tokenizer, recipe.model.vocab_size, progress=text.update)
        check_trainable(recipe, tokens)
        try:
            with CountScreen("runs") as screen:
                return check(workers=workers or os.cpu_count() or 1, on_run=screen.update, stop=stop)
        except Stopped as stopped:
            errors.print(f"stopped: {stopped}; the same command goes on from there ({run})")
            raise typer.Exit(75) from None


def _finish(verdict: "Verdict", rule: str | None, output: Path | None, json_output: bool) -> None:
    """Print the verdict, draw it, and leave with code 1 if it is no."""
    from leaven.report.checks import conclusion, terminal, write_check

    if rule is not None:
        verdict = replace(verdict, settings={"rule": rule} | dict(verdict.settings))
    document = verdict.document()
    if output is not None:
        write_check(document, output)
    if json_output:
        emit_json(document)
    else:
        for table in terminal(document):
            console.print(table)
            console.print()
        console.print(conclusion(document))
        if output is not None:
            console.print(f"wrote {output}")
    if not verdict.passed:
        raise typer.Exit(1)
