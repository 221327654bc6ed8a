"""leaven demo"""

from pathlib import Path
from typing import Annotated

import typer

from leaven.cli.common import JsonOption, hand_over, stopping
from leaven.recipe.errors import InputError
from leaven.views.terminal.console import errors
from leaven.views.terminal.files import demo_summary

app = typer.Typer(add_completion=False)


@app.command()
def demo(
    run: Annotated[Path, typer.Option(help="Where everything goes.")] = Path("runs/demo"),
    size: Annotated[
        str, typer.Option(help="full: about ten minutes on two cores; tiny: a minute, for tests.")
    ] = "full",
    source: Annotated[str, typer.Option(help=r"The text: see \[data] source of a recipe.")] = "python-stdlib",
    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes that tune (one a core, four at most).")
    ] = None,
    json_output: JsonOption = False,
) -> None:
    from leaven.demo.demo import SIZES, Demo, DemoStopped
    from leaven.training.device import cores

    if size not in SIZES:
        raise InputError(f"--size {size}: there are {', '.join(SIZES)}")
    with stopping() as stop:
        try:
            # More workers would propose most trials before any has ended: a random search.
            made = Demo(run, size, source, workers or min(cores(), 4), stop).walk()
        except DemoStopped:
            errors.print(f"stopped; run it again to resume ({run})")
            raise typer.Exit(75) from None
    hand_over(made, demo_summary(made), json_output)
