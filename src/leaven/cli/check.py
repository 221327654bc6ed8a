"""Define the commands ``leaven check coordinates``, ``gradients`` and ``memory``. The other checks are in
check_runs.py."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from leaven.cli import next_commands
from leaven.cli.check_options import (
    OutputOption,
    SeedsOption,
    SourceOption,
    SubjectArgument,
    finish,
    is_factory,
    numbers,
    prepare_text,
    read_subject,
)
from leaven.cli.check_runs import COMMANDS
from leaven.cli.common import JsonOption, RecipeArgument, SetOption, group, load_recipe, print_document
from leaven.documents.checks import CheckDocument
from leaven.recipe.errors import InputError
from leaven.views.terminal.checks import memory_screen
from leaven.views.terminal.live import LiveScreen

if TYPE_CHECKING:
    from leaven.verification.size_check import SizeCheck

app = group()

WidthsOption = Annotated[
    str | None,
    typer.Option(
        metavar="LIST", help="Widths of the models, separated by commas.", show_default="64,128,256,512 or similar"
    ),
]
DepthsOption = Annotated[
    str | None,
    typer.Option(
        metavar="LIST", help="Numbers of layers of the models, separated by commas.", show_default="2,4,8,16"
    ),
]
FactorOption = Annotated[float, typer.Option(help="Multiply every lr by this number.")]
BatchOption = Annotated[int | None, typer.Option(min=1, help="Batch size in tokens.", show_default="512")]
AlphaOption = Annotated[
    float | None,
    typer.Option(min=0.5, max=1, help="For module:factory: the rule's exponent alpha.", show_default="1"),
]
HeadsOption = Annotated[
    bool, typer.Option("--grow-heads", help="Widen the model with larger heads instead of more heads.")
]


@app.command()
def coordinates(
    subject: SubjectArgument,
    widths: WidthsOption = None,
    depths: DepthsOption = None,
    steps: Annotated[
        int,
        typer.Option(
            min=1, help="Number of training steps, all on the same batch. With more than 3, the limits are wider."
        ),
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
    """Check that activations and their updates keep their size as width and depth grow (coordinate check).

    The check keeps the recipe's rule and its ratio of d_ff to d_model. It moves the base to the smallest width and
    depth. It also changes the initial values, so that small models already show the exponents of large models. The
    exponents do not depend on initial values.
    """
    from leaven.verification.coordinates import CoordinateCheck

    models = {"batch_tokens": batch_tokens, "source": source, "alpha": alpha, "grow_heads": grow_heads}
    options = models | {"steps": steps, "seeds": seeds, "lr_factor": lr_factor}
    document = _run(CoordinateCheck, subject, overrides, widths, depths, options)
    if document.passed and not is_factory(subject):
        path = Path(subject)
        following = next_commands.after_coordinates(path, load_recipe(path, overrides), overrides or ())
        document = document.model_copy(update={"next": following})
    finish(document, output, json_output)


@app.command()
def gradients(
    subject: SubjectArgument,
    widths: WidthsOption = None,
    depths: DepthsOption = None,
    steps: Annotated[
        int,
        typer.Option(
            min=1, help="Number of training steps. From 150 steps on, QK-norm gains that heads share are checked too."
        ),
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
    """Check that eps scales with the gradients, that every parameter is updated, and that the rule's values are
    exact.

    The rule's values are computed from the optimizer's settings at several widths, depths, batch sizes and lengths,
    without training. They are lr, lr x eps x entries, lr x weight decay x steps, and the half-lives of the betas.
    """
    from leaven.verification.gradients import GradientCheck

    models = {"batch_tokens": batch_tokens, "source": source, "alpha": alpha, "grow_heads": grow_heads}
    options = models | {"steps": steps, "seeds": seeds, "lr_factor": lr_factor}
    document = _run(GradientCheck, subject, overrides, widths, depths, options)
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
            show_default="one rank each of the first, second and last stage",
        ),
    ] = None,
    all_stages: Annotated[bool, typer.Option("--all-stages", help="Check one rank of every pipeline stage.")] = False,
    overrides: SetOption = None,
    json_output: JsonOption = False,
) -> None:
    """Compare the planned memory of a rank with the memory of two simulated training steps.

    The steps run the real model, layout and optimizer on one processor for any number of ranks, with tensors that
    have shapes but no data. The memory between steps may differ by 2%, and the peak by 5%.
    """
    from leaven.verification.memory import arrangement, check_memory, ranks_to_check, rehearsal, with_layout

    laid_out = load_recipe(recipe, overrides)
    if layout is not None:
        laid_out = with_layout(laid_out, layout)
    short = rehearsal(laid_out)
    wanted = ranks_to_check(short.layout, ranks, all_stages)
    with LiveScreen() as screen:
        screen.line(f"{arrangement(short)} · rank {', '.join(map(str, wanted))} of {short.layout.ranks}")
        check = check_memory(short, wanted, screen.counts("ranks"))
    print_document(check, memory_screen(check), json_output)
    if not check.passed:
        raise typer.Exit(1)


for command in COMMANDS:
    app.command()(command)


def _run(
    kind: "type[SizeCheck[Any]]",
    subject: str,
    overrides: list[str] | None,
    widths: str | None,
    depths: str | None,
    options: dict[str, Any],
) -> CheckDocument:
    if not 0 < options["lr_factor"] < math.inf:
        raise InputError(f"--lr-factor {options['lr_factor']:g} cannot be used; give a finite number above 0")
    wide = numbers(widths, "--widths", int) if widths else ()
    deep = numbers(depths, "--depths", int) if depths else ()
    given = read_subject(subject, overrides, {"--source": options["source"], "--alpha": options["alpha"]})
    check = kind.of(given, prepare_text, widths=wide, depths=deep, **options)
    with LiveScreen() as screen:
        return check.run(screen.counts("models"))
