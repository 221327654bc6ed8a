"""What the verbs share: how a recipe is given, where output goes, and how JSON is printed."""

import json
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from leaven.catalogue.runs import FOLDER as RUNS
from leaven.recipe.errors import InputError
from leaven.recipe.files import finite, read_recipe
from leaven.recipe.recipe import Recipe
from leaven.recipe.units import parse_quantity
from leaven.scaling.tested_ranges import Caution

NO_TERMINAL = 120  # columns of what is piped or logged, whatever machine it runs on


def _console(stderr: bool) -> Console:
    made = Console(stderr=stderr, highlight=False, markup=False, soft_wrap=True)
    if not made.is_terminal:
        made.width = NO_TERMINAL
    return made


# Results go to standard output; progress, warnings and errors to standard error, so that --json stays one document.
# Neither breaks lines: tables know the width, and a sentence is for the terminal to wrap.
console = _console(stderr=False)
errors = _console(stderr=True)

RecipeArgument = Annotated[Path, typer.Argument(metavar="RECIPE", help="A recipe file (TOML).", show_default=False)]
RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.", show_default=False)]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a value, e.g. --set hyperparameters.lr=0.002."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]


def count_option(help: str) -> Any:
    """An option that takes a count as people write it: 7B, 64k, 32_768."""
    return typer.Option(parser=_count, metavar="COUNT", help=help, show_default=False)


def _count(text: str) -> int:
    try:
        return parse_quantity(text)
    except InputError as error:  # a ValueError, which typer would reword
        raise typer.BadParameter(str(error)) from None


TokensOption = Annotated[int | None, count_option("The checkpoint at this many tokens (the newest whole one).")]


def say_damaged(names: Iterable[str]) -> None:
    for name in names:
        errors.print(
            Text.assemble(("warning: ", "bold yellow"), f"checkpoint {name} is damaged; the one before it is used")
        )


def load(recipe: Path, overrides: list[str] | None) -> Recipe:
    """The recipe in a file.

    Raises:
        InputError: if it cannot be read; the name of a published run is told what it is.
    """
    if not recipe.exists() and (RUNS / f"{recipe}.toml").is_file():
        raise InputError(
            f"{recipe} is a published run: leaven recipes show {recipe}; this verb takes a recipe file (TOML)"
        )
    return read_recipe(recipe, overrides or ())


def emit_json(document: Any) -> None:
    """One JSON document on standard output; what is not a finite number becomes null."""
    typer.echo(json.dumps(finite(document), indent=2, ensure_ascii=False, default=str))


def warn(found: Iterable[Caution]) -> None:
    for warning in found:
        errors.print(Text.assemble(("warning: ", "bold yellow"), warning.message))


@contextmanager
def stopping() -> Iterator[Callable[[], bool]]:
    """Ctrl-C and SIGTERM ask to stop at the next safe point; a second Ctrl-C stops at once."""
    asked = False

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True
        errors.print("stopping at the next safe point (again: at once) ...")

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
