"""What the verbs share: options, how a recipe is read, and how a document is handed over."""

import json
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
from rich.console import RenderableType

from leaven.catalogue.runs import FOLDER as RUNS
from leaven.documents import Document
from leaven.recipe.errors import InputError
from leaven.recipe.files import finite, read_recipe
from leaven.recipe.recipe import Recipe
from leaven.recipe.units import parse_quantity
from leaven.views.terminal.console import console, errors, next_lines

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


def group() -> typer.Typer:
    """Verbs of one name; without one of them it prints its help."""
    return typer.Typer(add_completion=False, invoke_without_command=True, callback=_help)


def _help(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


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


def hand_over(document: Document | Sequence[Document], screen: Iterable[RenderableType], json_output: bool) -> None:
    """Print one JSON document on standard output, or the screen and the commands to type next.

    A number that is not finite becomes null.
    """
    if json_output:
        data = document.dump() if isinstance(document, Document) else [each.dump() for each in document]
        typer.echo(json.dumps(finite(data), indent=2, ensure_ascii=False))
        return
    for part in chain(screen, next_lines(getattr(document, "next", ()))):
        console.print(part)


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


def prepared(recipe: Recipe) -> Any:
    """The tokens of a recipe's text, with a bar while they are made."""
    from leaven.data.tokens import prepare
    from leaven.views.terminal.live import LiveScreen

    with LiveScreen() as screen:
        tokens = prepare(recipe.data, recipe.model.vocab_size, progress=screen.text)
        screen.notes(tokens)
    return tokens
