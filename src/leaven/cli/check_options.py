"""Options of `leaven check`, and how its commands read their subject and print their result."""

import math
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from leaven.cli.common import hand_over, load
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
SeedsOption = Annotated[int, typer.Option(min=1, help="Number of random seeds, for initialisation and data.")]
SourceOption = Annotated[
    str | None,
    typer.Option(
        metavar="TEXT",
        help="For module:factory, the text, as data.source in a recipe, or made-up.",
        show_default="python-stdlib",
    ),
]
OutputOption = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        metavar="FILE.html",
        help="Write an HTML page with the chart to this file.",
        show_default=False,
    ),
]


def numbers(text: str, option: str, kind: Callable[[str], Any]) -> list[Any]:
    """Return the positive numbers of a list with commas."""
    try:
        values = [kind(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or not all(0 < value < math.inf for value in values):
        raise InputError(f"{option} {text}: give numbers above 0, separated by commas")
    return values


def scale_of(text: str, option: str) -> "RunScale":
    """Return a scale given as WIDTHxDEPTH."""
    from leaven.verification.model_instance import RunScale

    width, _, depth = text.strip().partition("x")
    if not (width.isdigit() and depth.isdigit() and int(width) and int(depth)):
        raise InputError(f"{option} {text}: give a size as WIDTHxDEPTH, e.g. 64x4")
    return RunScale(int(width), int(depth))


def is_factory(subject: str) -> bool:
    """Return whether it is ``module:factory`` and not a recipe file."""
    return ":" in subject and not Path(subject).exists()


def read_subject(subject: str, overrides: list[str] | None, factory_options: dict[str, object]) -> Recipe | str:
    """Read a recipe, or return ``module:factory`` unchanged.

    Raises:
        InputError: if a recipe has options that are only for factories, or a factory has ``--set``.
    """
    if is_factory(subject):
        if overrides:
            raise InputError(f"{subject}: --set is for recipes; change the factory")
        return subject
    for option, value in factory_options.items():
        if value is not None:
            raise InputError(
                f"{option} is only for module:factory; change a recipe with --set, e.g. --set data.tokens=1M"
            )
    return load(Path(subject), overrides)


def prepare_text(data: "Data", vocab_size: int) -> "TokenSet":
    """Tokenise text, or read its tokens from the cache, with a progress bar."""
    from leaven.data.tokens import prepare

    with LiveScreen() as screen:
        tokens = prepare(data, vocab_size, progress=screen.text)
        screen.notes(tokens)
    return tokens


def finish(document: CheckDocument, output: Path | None, json_output: bool, following: str | None = None) -> None:
    """Print the result and the ``following`` command, write its page, and exit with 1 unless it passed."""
    from leaven.views.check_page import check_page

    if output is not None:
        write_text(output, check_page(document))
    more = [f"wrote {output}"] if output is not None else []
    more += [following] if following else []
    hand_over(document, chain(check_screen(document), more), json_output)
    if not document.passed:
        raise typer.Exit(1)
