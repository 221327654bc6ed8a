"""leaven demo"""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated, Any

import typer

from leaven.cli._common import JsonOption, console, emit_json, errors, stopping
from leaven.cli._screens import TextScreen
from leaven.cli._train_screen import RunsScreen
from leaven.cli._tune_screen import TuneScreen
from leaven.recipe.errors import InputError


class _Watcher:
    def part(self, text: str) -> None:
        errors.print(text, soft_wrap=True)

    def text(self) -> AbstractContextManager[Any]:
        return TextScreen()

    def tuning(self, study: Any, trials: int, workers: int) -> AbstractContextManager[Any]:
        return TuneScreen(study.state(), trials, workers)

    def training(self, runs: Mapping[str, Path], recipe: Any) -> AbstractContextManager[Any]:
        return RunsScreen(runs, recipe.data.tokens)


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
    """All of it on this machine, on real text: tune a little model, transfer, train a bigger one, report."""
    from leaven.demo.demo import SIZES, Demo, Interrupted
    from leaven.training.machine import cores
    from leaven.views.terminal import demo_summary

    if size not in SIZES:
        raise InputError(f"--size {size}: there are {', '.join(SIZES)}")
    with stopping() as stop:
        try:
            # More workers would propose most trials before any has ended: a random search.
            report = Demo(run, size, source, workers or min(cores(), 4), _Watcher(), stop).walk()
        except Interrupted:
            errors.print(f"stopped; the same command goes on from there ({run})")
            raise typer.Exit(75) from None
    if json_output:
        emit_json({"report": str(report)})
    else:
        for line in demo_summary(run):
            console.print(line, soft_wrap=True)
