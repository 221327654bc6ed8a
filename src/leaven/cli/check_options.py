"""Define the options of `leaven check`, and functions with which its commands read their input and print their
result."""

import math
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from leaven.cli.common import load_recipe, print_document
from leaven.documents.checks import CheckDocument
from leaven.recipe.errors import InputError
from leaven.recipe.files import write_text
from leaven.recipe.recipe import Recipe
from leaven.views.terminal.checks import check_screen
from leaven.views.terminal.live import LiveScreen

if TYPE_CHECKING:
    from leaven.data.tokens import TokenSet
    from leaven.recipe.data import Data
    from leaven.verification.model_instance import RunScale

SubjectArgument = Annotated[
    str, typer.Argument(metavar="RECIPE", help="A recipe file (TOML), or module:factory for your own torch model.")
]
SeedsOption = Annotated[int, typer.Option(min=1, help="Number of random seeds for initialisation and data.")]
SourceOption = Annotated[
    str | None,
    typer.Option(
        metavar="TEXT",
        help="For module:factory: the text to train on, written as data.source in a recipe, or made-up for random "
        "tokens.",
        show_default="python-stdlib",
    ),
]
OutputOption = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        metavar="FILE.html",
        help="Write an HTML page with charts to this file.",
        show_default=False,
    ),
]


def numbers(text: str, option: str, kind: Callable[[str], Any]) -> list[Any]:
    """Return the positive numbers in a list that is separated by commas."""
    try:
        values = [kind(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or not all(0 < value < math.inf for value in values):
        raise InputError(
            f"{option} {text} is not a list of positive numbers; give numbers above 0, separated by commas"
        )
    return values


def scale_of(text: str, option: str) -> "RunScale":
    """Return the model size that a text WIDTHxDEPTH gives."""
    from leaven.verification.model_instance import RunScale

    width, _, depth = text.strip().partition("x")
    if not (width.isdigit() and depth.isdigit() and int(width) and int(depth)):
        raise InputError(f"{option} {text} is not a size; give WIDTHxDEPTH, e.g. 64x4")
    return RunScale(int(width), int(depth))


def is_factory(subject: str) -> bool:
    """Return whether ``subject`` is ``module:factory`` and not a recipe file."""
    return ":" in subject and not Path(subject).exists()


def read_subject(subject: str, overrides: list[str] | None, factory_options: dict[str, object]) -> Recipe | str:
    """Read the recipe that ``subject`` names, or return ``subject`` unchanged if it is ``module:factory``.

    Raises:
        InputError: if a recipe is given with options that are only for factories, or a factory is given with
            ``--set``.
    """
    if is_factory(subject):
        if overrides:
            raise InputError(f"--set applies only to recipes, not to {subject}; change the factory")
        return subject
    for option, value in factory_options.items():
        if value is not None:
            raise InputError(
                f"{option} applies only to module:factory; for a recipe use --set, e.g. --set data.tokens=1M"
            )
    return load_recipe(Path(subject), overrides)


def prepare_text(data: "Data", vocab_size: int) -> "TokenSet":
    """Tokenise text with a progress bar, or read its tokens from the cache."""
    from leaven.data.tokens import prepare

    with LiveScreen() as screen:
        tokens = prepare(data, vocab_size, progress=screen.text)
        screen.notes(tokens)
    return tokens


def finish(document: CheckDocument, output: Path | None, json_output: bool, following: str | None = None) -> None:
    """Print the result of a check and the ``following`` command, and write a page about it. Exit with code 1 if the
    check failed."""
    from leaven.views.check_page import check_page

    if output is not None:
        write_text(output, check_page(document))
    more = [f"wrote {output}"] if output is not None else []
    more += [following] if following else []
    print_document(document, chain(check_screen(document), more), json_output)
    if not document.passed:
        raise typer.Exit(1)
