"""leaven check coordinates|gradients|transfer|duration|batch|decay|init|equivalence|memory RECIPE"""

from typing import Annotated

import typer

from leaven.cli._common import JsonOption, SetOption
from leaven.cli._screens import CountScreen
from leaven.cli.check_memory import memory
from leaven.cli.check_runs import COMMANDS
from leaven.cli.check_subject import (
    OutputOption,
    SeedsOption,
    SourceOption,
    SubjectArgument,
    above_0,
    finish,
    short,
    with_settings,
)

app = typer.Typer(help="Is it true? Checks of a rule on small models, minutes each; exit code 1 if one fails.")

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
    with CountScreen("models") as screen:
        verdict = coordinates(
            family, wide, deep, steps=steps, seeds=seeds, lr_factor=lr_factor, on_member=screen.update
        )
    finish(with_settings(verdict, changed), output, json_output)


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
    with CountScreen("models") as screen:
        verdict = gradients(
            family, wide, deep, steps=steps, seeds=seeds, lr_factor=lr_factor, on_member=screen.update
        )
    finish(with_settings(verdict, changed), output, json_output)


for command in COMMANDS:
    app.command()(command)
app.command("memory")(memory)
