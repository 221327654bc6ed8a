"""Define the command ``leaven demo``."""

from pathlib import Path
from typing import Annotated

import typer

from leaven.cli.common import DeviceOption, JsonOption, hand_over, stopping
from leaven.recipe.errors import InputError
from leaven.views.terminal.console import errors
from leaven.views.terminal.files import demo_summary

app = typer.Typer(add_completion=False)


@app.command()
def demo(
    run: Annotated[Path, typer.Option(help="The folder to write everything to.")] = Path("runs/demo"),
    size: Annotated[
        str, typer.Option(help="full: about ten minutes on two cores. tiny: one minute, for tests only.")
    ] = "full",
    source: Annotated[
        str, typer.Option(help=r"The text to train on, as \[data] source in a recipe: a file, a glob, hf://...")
    ] = "python-stdlib",
    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes that run trials.", show_default="one per core, at most 4")
    ] = None,
    device: DeviceOption = None,
    json_output: JsonOption = False,
) -> None:
    from leaven.demo.demo import SIZES, Demo, DemoStopped
    from leaven.planning.this_machine import cores

    if size not in SIZES:
        raise InputError(f"--size {size}: choose from {', '.join(SIZES)}")
    with stopping() as stop:
        try:
            # With more than four workers most trials start before any has ended: that is random search.
            made = Demo(run, size, source, workers or min(cores(), 4), stop).run()
        except DemoStopped:
            errors.print(f"stopped; run it again to resume ({run})")
            raise typer.Exit(75) from None
    hand_over(made, demo_summary(made), json_output)
