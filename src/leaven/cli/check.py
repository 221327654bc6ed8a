"""leaven check coordinates|gradients|transfer|equivalence|memory RECIPE"""

import math
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from leaven.cli._common import (
    JsonOption,
    SetOption,
    console,
    count_option,
    emit_json,
    errors,
    load,
    stopping,
)
from leaven.cli._screens import CountScreen, TextScreen
from leaven.cli.check_memory import memory
from leaven.recipe.errors import InputError
from leaven.recipe.recipe import Recipe

if TYPE_CHECKING:
    from leaven.data.tokens import TokenSet
    from leaven.verification.family import Family, Start
    from leaven.verification.foreign import ForeignFamily
    from leaven.verification.verdict import Verdict

app = typer.Typer(help="Is it true? Checks of a rule on small models, minutes each; exit code 1 if one fails.")
app.command("memory")(memory)

SubjectArgument = Annotated[
    str, typer.Argument(metavar="RECIPE", help="A recipe file, or module:factory for a model of yours.")
]
WidthsOption = Annotated[str, typer.Option(metavar="LIST", help="Widths, with commas.")]
DepthsOption = Annotated[str, typer.Option(metavar="LIST", help="Depths, with commas.")]
SeedsOption = Annotated[int, typer.Option(min=1, help="Seeds of initialisation and data.")]
FactorOption = Annotated[float, typer.Option(help="Multiplies every lr.")]
BatchOption = Annotated[int | None, typer.Option(min=1, help="Tokens a step (512).", show_default=False)]
SourceOption = Annotated[
    str | None,
    typer.Option(metavar="TEXT", help="Text for module:factory (python-stdlib): as data.source, or made-up."),
]
AlphaOption = Annotated[
    float | None, typer.Option(min=0.5, max=1, help="alpha of a factory's rule (1).", show_default=False)
]
HeadsOption = Annotated[bool, typer.Option("--grow-heads", help="Widen by larger heads instead of more of them.")]
OutputOption = Annotated[
    Path | None,
    typer.Option("--output", "-o", metavar="FILE.html", help="Write the picture here.", show_default=False),
]
LongBatchOption = Annotated[
    int | None, typer.Option(min=1, help="Tokens a step of module:factory (512).", show_default=False)
]
TokensOption = Annotated[
    int | None, count_option("Tokens of a run of module:factory (131,072; equivalence 524,288).")
]
BATCH_TOKENS = 512
EQUIVALENCE_TOKENS = 524_288  # 256 steps of a batch x 4
RunOption = Annotated[Path, typer.Option(metavar="DIR", help="Keeps every run; the same again goes on.")]
WorkersOption = Annotated[int | None, typer.Option(min=1, help="Processes of one thread each (one a core).")]


@app.command("coordinates")
def coordinates_(
    subject: SubjectArgument,
    widths: WidthsOption = "64,128,256,512",
    depths: DepthsOption = "2,4,8,16",
    steps: Annotated[int, typer.Option(min=1, help="Steps on one batch; beyond 3 the limits are wider.")] = 3,
    seeds: SeedsOption = 3,
    lr_factor: FactorOption = 1.0,
    batch_tokens: BatchOption = None,
    source: SourceOption = None,
    alpha: AlphaOption = None,
    grow_heads: HeadsOption = False,
    output: OutputOption = None,
    overrides: SetOption = None,
    json_output: JsonOption = False,
) -> None:
    """Do outputs, and their changes, keep their size over width and depth?

    A recipe keeps its rule and its proportions, but starts from initial values that are near the limit of large
    models, with its base at the smallest width and depth: exponents do not depend on them, how soon they show does.
    """
    from leaven.verification.coordinates import START, coordinates

    sizes = numbers(widths, "--widths", int), numbers(depths, "--depths", int)
    _above_0(lr_factor, "--lr-factor")
    family = _short(subject, overrides, sizes, START, batch_tokens, source, alpha, grow_heads)
    with CountScreen("models") as screen:
        verdict = coordinates(family, *sizes, steps=steps, seeds=seeds, lr_factor=lr_factor, on_member=screen.update)
    _finish(verdict, output, json_output)


@app.command("gradients")
def gradients_(
    subject: SubjectArgument,
    widths: WidthsOption = "64,128,256,512",
    depths: DepthsOption = "2,4,8,16",
    steps: Annotated[int, typer.Option(min=1, help="Steps; from 150 on, shared QK gains are judged too.")] = 20,
    seeds: SeedsOption = 3,
    lr_factor: FactorOption = 0.125,
    batch_tokens: BatchOption = None,
    source: SourceOption = None,
    alpha: AlphaOption = None,
    grow_heads: HeadsOption = False,
    output: OutputOption = None,
    overrides: SetOption = None,
    json_output: JsonOption = False,
) -> None:
    """Does eps move with the gradient it is added to, does every parameter move, and do the books balance?

    The books are exact, read off the optimiser without a step, over width, depth, batch and tokens: lr x eps x
    entries, lr x decay x steps, the half-lives of the betas, the lr.
    """
    from leaven.verification.gradients import START, gradients

    sizes = numbers(widths, "--widths", int), numbers(depths, "--depths", int)
    _above_0(lr_factor, "--lr-factor")
    family = _short(subject, overrides, sizes, START, batch_tokens, source, alpha, grow_heads)
    with CountScreen("models") as screen:
        verdict = gradients(family, *sizes, steps=steps, seeds=seeds, lr_factor=lr_factor, on_member=screen.update)
    _finish(verdict, output, json_output)


@app.command("transfer")
def transfer_(
    subject: SubjectArgument,
    run: RunOption,
    scales: Annotated[str, typer.Option(metavar="LIST", help="WIDTHxDEPTH, with commas; the first is the base.")],
    lrs: Annotated[
        str | None,
        typer.Option(metavar="LIST", help="Base lrs, or multiples of a factory's lr (its own x 1/4 to x 4)."),
    ] = None,
    seeds: SeedsOption = 3,
    tokens: TokensOption = None,
    batch_tokens: LongBatchOption = None,
    source: SourceOption = None,
    workers: WorkersOption = None,
    output: OutputOption = None,
    overrides: SetOption = None,
    json_output: JsonOption = False,
) -> None:
    """Is the lr that was best for the small model best for the big one?"""
    from leaven.verification.transfer import transfer

    pairs = [_scale(text, "--scales") for text in scales.split(",")]
    family = _long(subject, overrides, pairs[0], tokens, batch_tokens, source)
    grid = numbers(lrs, "--lrs", float) if lrs else [family.lr * 2.0**octave for octave in range(-2, 3)]
    check = partial(transfer, family, pairs, grid, run, seeds=seeds)
    _finish(_carried_out(check, workers, run), output, json_output)


@app.command("equivalence")
def equivalence_(
    subject: SubjectArgument,
    run: RunOption,
    batch_ratios: Annotated[str, typer.Option(metavar="LIST", help="Batches, as multiples of its own.")] = (
        "0.25,0.5,2,4"
    ),
    scale: Annotated[
        str | None,
        typer.Option(metavar="WIDTHxDEPTH", help="Of the model (a recipe's own).", show_default=False),
    ] = None,
    seeds: SeedsOption = 3,
    tokens: TokensOption = None,
    batch_tokens: LongBatchOption = None,
    source: SourceOption = None,
    workers: WorkersOption = None,
    output: OutputOption = None,
    overrides: SetOption = None,
    json_output: JsonOption = False,
) -> None:
    """Does another batch at the same data give the same final loss under the rule, and another one without it?

    The rule is a limit of many steps with noisy gradients: small batches, and 200 steps at least of the largest.
    """
    from leaven.verification.equivalence import equivalence

    ratios = numbers(batch_ratios, "--batch-ratios", float)
    pair = _scale(scale, "--scale") if scale else _own_scale(subject, overrides)
    if tokens is None and _is_entry(subject):
        tokens = EQUIVALENCE_TOKENS
    family = _long(subject, overrides, pair, tokens, batch_tokens, source)
    check = partial(equivalence, family, pair, ratios, run, seeds=seeds)
    _finish(_carried_out(check, workers, run), output, json_output)


def numbers(text: str, option: str, kind: Callable[[str], Any]) -> list[Any]:
    """A list of positive numbers with commas between them."""
    try:
        values = [kind(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or not all(0 < value < math.inf for value in values):
        raise InputError(f"{option} {text}: give numbers above 0 with commas between them")
    return values


def _above_0(value: float, option: str) -> None:
    if not 0 < value < math.inf:
        raise InputError(f"{option} {value:g}: give a number above 0")


def _scale(text: str, option: str) -> tuple[int, int]:
    width, _, depth = text.strip().partition("x")
    if not (width.isdigit() and depth.isdigit() and int(width) and int(depth)):
        raise InputError(f"{option} {text}: write a scale as WIDTHxDEPTH, e.g. 64x4")
    return int(width), int(depth)


def _own_scale(subject: str, overrides: list[str] | None) -> tuple[int, int]:
    if _is_entry(subject):
        raise InputError(f"{subject}: say which member, e.g. --scale 64x4")
    model = load(Path(subject), overrides).model
    return model.d_model, model.n_layers


def _is_entry(subject: str) -> bool:
    """Whether it is module:factory."""
    return ":" in subject and not Path(subject).exists()


def _short(
    subject: str,
    overrides: list[str] | None,
    sizes: tuple[list[int], list[int]],
    start: "Start",
    batch_tokens: int | None,
    source: str | None,
    alpha: float | None,
    grow_heads: bool,
) -> "Family":
    """What is checked within some steps."""
    from leaven.verification.family import RecipeFamily, calibrated
    from leaven.verification.samples import corpus

    if all(len(set(axis)) < 2 for axis in sizes):
        raise InputError("a slope needs two sizes: give more --widths or --depths")
    if _is_entry(subject):
        if grow_heads:
            raise InputError(f"{subject}: --grow-heads is for recipes; change the factory")
        family = _foreign(subject, overrides, (min(sizes[0]), min(sizes[1])), None, batch_tokens, source)
        return replace(family, alpha=alpha or family.alpha)
    recipe = _recipe(subject, overrides, {"--source": source, "--alpha": alpha})
    recipe = calibrated(recipe, min(sizes[0]), min(sizes[1]), start)
    seq_len = recipe.model.seq_len
    batches = corpus(_tokens(recipe), seq_len, max((batch_tokens or BATCH_TOKENS) // seq_len, 1))
    return RecipeFamily(recipe, batches, grow_heads=grow_heads)


def _long(
    subject: str,
    overrides: list[str] | None,
    scale: tuple[int, int],
    tokens: int | None,
    batch_tokens: int | None,
    source: str | None,
) -> "Family":
    """What is checked by whole runs."""
    from leaven.training.engine import check_trainable
    from leaven.verification.family import RecipeFamily
    from leaven.verification.samples import corpus

    if _is_entry(subject):
        return _foreign(subject, overrides, scale, tokens, batch_tokens, source)
    recipe = _recipe(subject, overrides, {"--tokens": tokens, "--batch-tokens": batch_tokens, "--source": source})
    tokens_of_text = _tokens(recipe)
    check_trainable(recipe, tokens_of_text)
    seq_len = recipe.model.seq_len
    return RecipeFamily(recipe, corpus(tokens_of_text, seq_len, recipe.batch.tokens // seq_len))


def _recipe(subject: str, overrides: list[str] | None, given: dict[str, object]) -> Recipe:
    for option, value in given.items():
        if value is not None:
            raise InputError(
                f"{option} is for module:factory; a recipe says it itself: --set data.tokens=..., and so on"
            )
    return load(Path(subject), overrides)


def _tokens(recipe: Recipe) -> "TokenSet":
    from leaven.data.tokens import prepare

    with TextScreen() as text:
        tokens = prepare(recipe.data, recipe.model.vocab_size, progress=text.update)
        text.notes(tokens)
    return tokens


def _foreign(
    subject: str,
    overrides: list[str] | None,
    scale: tuple[int, int],
    tokens: int | None,
    batch_tokens: int | None,
    source: str | None,
) -> "ForeignFamily":
    from leaven.data.tokens import prepare
    from leaven.verification.foreign import MADE_UP, foreign, text_of

    if overrides:
        raise InputError(f"{subject}: --set is for recipes; change the factory")
    family = foreign(subject, *scale, source=source, batch_tokens=batch_tokens, tokens=tokens)
    if family.source is not None and family.source != MADE_UP:
        with TextScreen() as text:
            text.notes(prepare(text_of(family.source), family.vocab_size, progress=text.update))
    return family


def _carried_out(check: "Callable[..., Verdict]", workers: int | None, run: Path) -> "Verdict":
    """The verdict of whole training runs, which can be stopped and go on."""
    from leaven.verification.runs import Stopped

    with stopping() as stop, CountScreen("runs") as screen:
        try:
            return check(workers=workers or os.cpu_count() or 1, on_run=screen.update, stop=stop)
        except Stopped as stopped:
            errors.print(f"stopped: {stopped}; the same command goes on from there ({run})")
            raise typer.Exit(75) from None


def _finish(verdict: "Verdict", output: Path | None, json_output: bool) -> None:
    """Print the verdict, draw it, and leave with code 1 if it is no."""
    from leaven.report.checks import conclusion, terminal, write_check

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
