"""leaven check coordinates, gradients and memory; the others are in check_runs.py"""

import math
from typing import TYPE_CHECKING, Annotated

import typer

from leaven.cli.check_options import (
    OutputOption,
    SeedsOption,
    SourceOption,
    SubjectArgument,
    finish,
    numbers,
    prepare_text,
    read_subject,
)
from leaven.cli.check_runs import COMMANDS
from leaven.cli.common import JsonOption, RecipeArgument, SetOption, group, hand_over, load
from leaven.recipe.errors import InputError
from leaven.views.terminal.checks import memory_screen
from leaven.views.terminal.live import LiveScreen

if TYPE_CHECKING:
    from leaven.verification.small_models import CheckStart
    from leaven.verification.subject import SmallModels

app = group()

WidthsOption = Annotated[
    str | None,
    typer.Option(metavar="LIST", help="Widths, separated by commas.", show_default="64,128,256,512 or near"),
]
DepthsOption = Annotated[
    str | None, typer.Option(metavar="LIST", help="Depths, separated by commas.", show_default="2,4,8,16")
]
FactorOption = Annotated[float, typer.Option(help="Multiply every lr by this.")]
BatchOption = Annotated[int | None, typer.Option(min=1, help="Batch size in tokens.", show_default="512")]
AlphaOption = Annotated[
    float | None, typer.Option(min=0.5, max=1, help="For module:factory, alpha of the rule.", show_default="1")
]
HeadsOption = Annotated[
    bool, typer.Option("--grow-heads", help="Widen the model by larger heads instead of more heads.")
]


@app.command()
def coordinates(
    subject: SubjectArgument,
    widths: WidthsOption = None,
    depths: DepthsOption = None,
    steps: Annotated[
        int, typer.Option(min=1, help="Training steps, all on one batch; with more than 3 the limits are wider.")
    ] = 3,
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
    """Check that activations and their changes keep their size as width and depth grow (coordinate check).

    The recipe keeps its rule and proportions. Its base moves to the smallest width and depth, and its initial values
    to ones where the exponents of large models show early; the exponents themselves do not depend on them.
    """
    from leaven.verification.coordinates import CoordinateCheck

    models = _small_models(
        CoordinateCheck.start, subject, overrides, widths, depths, batch_tokens, source, alpha, grow_heads
    )
    factor = _above_0(lr_factor)
    check = CoordinateCheck(models.family, models.widths, models.depths, steps, seeds, factor, models.changed)
    with LiveScreen() as screen:
        document = check.run(screen.counts("models"))
    finish(document, output, json_output)


@app.command()
def gradients(
    subject: SubjectArgument,
    widths: WidthsOption = None,
    depths: DepthsOption = None,
    steps: Annotated[
        int, typer.Option(min=1, help="Training steps; from 150 on, QK gains shared by heads are checked, too.")
    ] = 20,
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
    """Check that eps scales with the gradients, every parameter is updated, and the rule's values are exact.

    The last part is computed from the optimizer's settings over width, depth, batch and tokens, without training: lr,
    lr x eps x entries, lr x weight decay x steps, and the half-lives of the betas.
    """
    from leaven.verification.gradients import GradientCheck

    models = _small_models(
        GradientCheck.start, subject, overrides, widths, depths, batch_tokens, source, alpha, grow_heads
    )
    factor = _above_0(lr_factor)
    check = GradientCheck(models.family, models.widths, models.depths, steps, seeds, factor, models.changed)
    with LiveScreen() as screen:
        document = check.run(screen.counts("models"))
    finish(document, output, json_output)


@app.command()
def memory(
    recipe: RecipeArgument,
    layout: Annotated[
        str | None,
        typer.Option(
            metavar="KEY=VALUE,...",
            help="The layout to check, e.g. tp=8,pp=12,dp=4,zero=1,mbs=2,recompute=full.",
            show_default="the recipe's",
        ),
    ] = None,
    ranks: Annotated[
        list[int] | None,
        typer.Option(
            "--rank",
            min=0,
            help="Check this rank. Repeatable.",
            show_default="one each of the first, second and last stage",
        ),
    ] = None,
    all_stages: Annotated[bool, typer.Option("--all-stages", help="Check one rank of every pipeline stage.")] = False,
    overrides: SetOption = None,
    json_output: JsonOption = False,
) -> None:
    """Check the planned memory of a rank against two simulated training steps.

    The steps run the real model, layout and optimizer of any number of ranks on one processor, with tensors that have
    shapes but no data. Memory kept between steps may differ by 2%, the peak by 5%.
    """
    from leaven.verification.memory import arrangement, check_memory, ranks_to_check, rehearsal, with_layout

    laid_out = load(recipe, overrides)
    if layout is not None:
        laid_out = with_layout(laid_out, layout)
    short = rehearsal(laid_out)
    wanted = ranks_to_check(short.layout, ranks, all_stages)
    with LiveScreen() as screen:
        screen.line(f"{arrangement(short)} · rank {', '.join(map(str, wanted))} of {short.layout.ranks}")
        check = check_memory(short, wanted, screen.counts("ranks"))
    hand_over(check, memory_screen(check), json_output)
    if not check.passed:
        raise typer.Exit(1)


for command in COMMANDS:
    app.command()(command)


def _small_models(
    start: "CheckStart",
    subject: str,
    overrides: list[str] | None,
    widths: str | None,
    depths: str | None,
    batch_tokens: int | None,
    source: str | None,
    alpha: float | None,
    grow_heads: bool,
) -> "SmallModels":
    from leaven.verification.subject import small_models

    wide = numbers(widths, "--widths", int) if widths else ()
    deep = numbers(depths, "--depths", int) if depths else ()
    return small_models(
        read_subject(subject, overrides, {"--source": source, "--alpha": alpha}),
        start,
        prepare_text,
        widths=wide,
        depths=deep,
        batch_tokens=batch_tokens,
        source=source,
        alpha=alpha,
        grow_heads=grow_heads,
    )


def _above_0(lr_factor: float) -> float:
    if not 0 < lr_factor < math.inf:
        raise InputError(f"--lr-factor {lr_factor:g}: give a number above 0")
    return lr_factor
