"""leaven check coordinates|gradients|transfer|duration|batch|decay|init|equivalence|memory RECIPE"""

from typing import Annotated

import typer

from leaven.cli.check_runs import COMMANDS
from leaven.cli.check_subject import (
    OutputOption,
    SeedsOption,
    SourceOption,
    SubjectArgument,
    above_0,
    finish,
    short,
)
from leaven.cli.common import JsonOption, RecipeArgument, SetOption, group, hand_over, load
from leaven.documents.checks import MemoryCheckDocument
from leaven.views.terminal.checks import memory_screen
from leaven.views.terminal.live import LiveScreen

app = group()

WidthsOption = Annotated[
    str | None,
    typer.Option(metavar="LIST", help="Widths, with commas (64,128,256,512, or near).", show_default=False),
]
DepthsOption = Annotated[
    str | None, typer.Option(metavar="LIST", help="Depths, with commas (2,4,8,16).", show_default=False)
]
FactorOption = Annotated[float, typer.Option(help="Multiplies every lr.")]
BatchOption = Annotated[int | None, typer.Option(min=1, help="Tokens a step (512).", show_default=False)]
AlphaOption = Annotated[
    float | None, typer.Option(min=0.5, max=1, help="alpha of a factory's rule (1).", show_default=False)
]
HeadsOption = Annotated[bool, typer.Option("--grow-heads", help="Widen by larger heads instead of more of them.")]


@app.command("coordinates")
def coordinates_(
    subject: SubjectArgument,
    widths: WidthsOption = None,
    depths: DepthsOption = None,
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

    above_0(lr_factor, "--lr-factor")
    family, wide, deep, changed = short(
        subject, overrides, widths, depths, START, batch_tokens, source, alpha, grow_heads
    )
    with LiveScreen() as screen:
        verdict = coordinates(
            family, wide, deep, steps=steps, seeds=seeds, lr_factor=lr_factor, on_member=screen.counts("models")
        )
    finish(verdict, output, json_output, changed=changed)


@app.command("gradients")
def gradients_(
    subject: SubjectArgument,
    widths: WidthsOption = None,
    depths: DepthsOption = None,
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
    """Does eps move with the gradient it is added to, does every parameter move, and is the bookkeeping right?

    The bookkeeping is exact, read off the optimiser without a step, over width, depth, batch and tokens: lr x eps x
    entries, lr x decay x steps, the half-lives of the betas, the lr.
    """
    from leaven.verification.gradients import START, gradients

    above_0(lr_factor, "--lr-factor")
    family, wide, deep, changed = short(
        subject, overrides, widths, depths, START, batch_tokens, source, alpha, grow_heads
    )
    with LiveScreen() as screen:
        verdict = gradients(
            family, wide, deep, steps=steps, seeds=seeds, lr_factor=lr_factor, on_member=screen.counts("models")
        )
    finish(verdict, output, json_output, changed=changed)


@app.command()
def memory(
    recipe: RecipeArgument,
    layout: Annotated[
        str | None,
        typer.Option(
            metavar="KEY=VALUE,...",
            help="e.g. tp=8,pp=12,dp=4,zero=1,mbs=2,recompute=full (the recipe's own).",
            show_default=False,
        ),
    ] = None,
    ranks: Annotated[
        list[int] | None,
        typer.Option("--rank", min=0, help="This one, also several times (one of the first, second and last stage)."),
    ] = None,
    all_stages: Annotated[bool, typer.Option("--all-stages", help="One rank of every stage.")] = False,
    overrides: SetOption = None,
    json_output: JsonOption = False,
) -> None:
    """Is the memory that is planned what a rank takes?

    The model, its layout, the optimiser and two steps are those of a training, of any number of ranks, on one
    processor and without their memory: tensors have shapes and no values. What stays between steps may
    be 2% off, the peak 5%.
    """
    from leaven.verification.memory import check_memory, looked_at, rehearsal, with_layout

    laid_out = load(recipe, overrides)
    if layout is not None:
        laid_out = with_layout(laid_out, layout)
    rehearsed = rehearsal(laid_out)
    wanted = looked_at(rehearsed.how.layout, ranks, all_stages)
    with LiveScreen() as screen:
        screen.line(f"{rehearsed.how} · rank {', '.join(map(str, wanted))} of {rehearsed.how.layout.ranks}")
        check = check_memory(rehearsed, wanted, screen.counts("ranks"))
    document = MemoryCheckDocument(**check.document())
    hand_over(document, memory_screen(document), json_output)
    if not check.passed:
        raise typer.Exit(1)


for command in COMMANDS:
    app.command()(command)
