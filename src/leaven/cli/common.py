"""Define what several verbs share: options, reading a recipe, printing a document and stopping at Ctrl-C."""

import json
import os
import re
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
RunArgument = Annotated[
    Path, typer.Argument(metavar="RUN", help="The run folder that leaven train wrote.", show_default=False)
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override a value of the recipe, e.g. --set hyperparameters.lr=0.002. Repeatable.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]


def device_option(default: str) -> Any:
    """An option for the device. ``default``: in words, where none is chosen."""
    return typer.Option(
        metavar="cuda|mps|cpu",
        envvar="LEAVEN_DEVICE",
        help="The device to compute on.",
        show_default=default,
        callback=lambda name: os.environ.update({"LEAVEN_DEVICE": name} if name else {}),  # for workers too
    )


DeviceOption = Annotated[str | None, device_option("the best of this machine")]


def count_option(help: str, default: str | bool = False) -> Any:
    """Return an option for a count, for example 7B, 64k or 32_768. ``default`` describes a default that is not a
    fixed number."""
    return typer.Option(parser=_count, metavar="COUNT", help=help, show_default=default)


def _count(text: str) -> int:
    try:
        return parse_quantity(text)
    except InputError as error:  # typer would rewrite the message of a ValueError
        raise typer.BadParameter(str(error)) from None


TokensOption = Annotated[
    int | None,
    count_option("Use the checkpoint that was written at this number of tokens.", "the newest complete checkpoint"),
]


def require_alone(what: str, others: Mapping[str, object]) -> None:
    """Raise InputError if the option ``what`` was given together with one of ``others``, which are values by name."""
    given = [name for name, value in others.items() if value is not None]
    if given:
        raise InputError(f"{what} cannot be combined with {given[0]}; leave {given[0]} out")


def recipe_name(file: Path, default: str) -> str:
    """Return the name of a recipe in a file: the file's name without spaces and special characters."""
    return re.sub(r"^\W+|[^\w.\-]+", "-", file.stem).strip("-.") or default


def group() -> typer.Typer:
    """Return the typer app of a command that has subcommands. Without a subcommand, the command prints its help."""
    return typer.Typer(add_completion=False, invoke_without_command=True, callback=_help)


def _help(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def load_recipe(recipe: Path, overrides: list[str] | None) -> Recipe:
    """Read a recipe file with :func:`leaven.recipe.files.read_recipe`, which checks it.

    Raises:
        InputError: if the file cannot be read. For the id of a published run, the message says how to show that run.
    """
    if not recipe.exists() and (RUNS / f"{recipe}.toml").is_file():
        raise InputError(
            f"{recipe} is a published run, not a recipe file; to see it, type: leaven recipes show {recipe}"
        )
    return read_recipe(recipe, overrides or ())


def print_document(
    document: Document | Sequence[Document], screen: Iterable[RenderableType], json_output: bool
) -> None:
    """Print a document as JSON, or print its screen and then the commands to type next.

    In JSON, infinite numbers and NaN become null.
    """
    if json_output:
        data = document.dump() if isinstance(document, Document) else [each.dump() for each in document]
        typer.echo(json.dumps(finite(data), indent=2, ensure_ascii=False))
        return
    for part in chain(screen, next_lines(getattr(document, "next", ()))):
        console.print(part)


@contextmanager
def stop_on_signal() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether Ctrl-C or SIGTERM has arrived. A second Ctrl-C stops at once."""
    requested = False

    def request(number: int, frame: FrameType | None) -> None:
        nonlocal requested
        if requested:
            raise KeyboardInterrupt
        requested = True
        errors.print("stopping at the next safe point; press Ctrl-C again to stop at once")

    before = {number: signal.signal(number, request) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: requested
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def prepare_tokens(recipe: Recipe) -> Any:
    """Call :func:`leaven.data.tokens.prepare` with a progress bar: tokenise a recipe's text, or read its tokens from
    the cache."""
    from leaven.data.tokens import prepare
    from leaven.views.terminal.live import LiveScreen

    with LiveScreen() as screen:
        tokens = prepare(recipe.data, recipe.model.vocab_size, progress=screen.text)
        screen.notes(tokens)
    return tokens
