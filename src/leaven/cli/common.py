"""Defines what several commands share, such as options, printing a document and stopping at Ctrl-C."""

import codecs
import json
import math
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import RenderableType
from rich.markup import escape

from leaven.catalogue.runs import FOLDER as RUNS
from leaven.cli import INTERRUPTED, parameter_name
from leaven.documents import Document
from leaven.errors import AGAIN_AFTER, STOPPING, InputError
from leaven.recipe.files import finite, read_recipe
from leaven.recipe.recipe import BY_REWIND, Recipe
from leaven.recipe.units import listed, parse_quantity
from leaven.views.terminal.console import console, echo, errors, next_lines, warn

if TYPE_CHECKING:
    from leaven.data.tokens import TokenSet
    from leaven.recipe.data import Data


def option(help: str, default: str | bool = True, names: str = "", **more: Any) -> Any:
    """Return an option of a command for typer. ``more`` are arguments of `typer.Option`.

    ``names``, such as ``"--output -o"``, are the option's names; by default, typer derives one from the parameter.
    ``default`` is the text that ``--help`` shows as the default: True for the default value itself, False for none.
    """
    return typer.Option(*names.split(), help=escape(help), show_default=default, **more)


def argument(metavar: str, help: str, default: str | bool = True) -> Any:
    """Return an argument of a command for typer. ``default`` is as in :func:`option`."""
    return typer.Argument(metavar=metavar, help=escape(help), show_default=default)


RecipeArgument = Annotated[Path, argument("RECIPE", "A recipe file (TOML).")]
RunArgument = Annotated[Path, argument("RUN", "The run folder that leaven train wrote.")]
SetOption = Annotated[
    list[str] | None,
    option(
        "Override a value of the recipe, e.g. --set hyperparameters.lr=0.002. KEY= removes a value. Repeatable.",
        metavar="KEY=VALUE",
        names="--set",
    ),
]
ShareOption = Annotated[
    float,
    option(
        "Lowest acceptable speed at the start of a batch ramp, as a share of the full speed (0 to 1).",
        metavar="SHARE",
        min=0.01,
        max=1,
    ),
]
JsonOption = Annotated[bool, option("Print one JSON document instead of text.", names="--json")]


def device_option(default: str) -> Any:
    """Return the option ``--device``. ``--help`` shows ``default`` as its default."""
    return option(
        "The device to compute on.",
        default=default,
        metavar="cuda|mps|cpu",
        envvar="LEAVEN_DEVICE",  # worker processes inherit it
        callback=lambda name: os.environ.update({"LEAVEN_DEVICE": name} if name else {}),
    )


DeviceOption = Annotated[str | None, device_option("the best of this machine")]


def parsed_option(parse: Callable[[str], Any], metavar: str, help: str, default: str | bool = True) -> Any:
    def parser(text: str) -> Any:
        try:
            return parse(text)
        except InputError as error:  # typer would change the message of any other exception
            raise typer.BadParameter(str(error)) from None

    return typer.Option(parser=parser, metavar=metavar, help=escape(help), show_default=default)


def list_option(parse: Callable[[str], Any], help: str, default: str | bool = True, metavar: str = "LIST") -> Any:
    """Return an option for values separated by commas, each read by ``parse``."""
    return parsed_option(lambda text: [parse(part) for part in text.split(",")], metavar, help, default)


def number_above_0(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise InputError(f"{text!r} is not a number above 0")
    return value


def count_above_0(text: str) -> int:
    count = parse_quantity(text)
    if count < 1:
        raise InputError(f"{text} is not above 0; give 1 or more")
    return count


def count_option(help: str, default: str | bool = True, parse: Callable[[str], int] = count_above_0) -> Any:
    """Return an option for a count, for example 7B, 64k or 32_768."""
    return parsed_option(parse, "COUNT", help, default)


TokensOption = Annotated[
    int | None,
    count_option(
        "Use the checkpoint that was written at this number of tokens.",
        "the newest complete checkpoint",
        parse=parse_quantity,  # 0 is the checkpoint of the initial weights
    ),
]


def require_alone(context: typer.Context, option: str, others: str) -> None:
    """Raise InputError if the user typed, beside ``option``, an option in ``others``, such as ``"params tokens"``."""
    for param in context.command.params:
        source = context.get_parameter_source(str(param.name))
        if param.name in others.split() and source is not None and source.name == "COMMANDLINE":
            raise InputError(f"{option} cannot be combined with {parameter_name(param)}; leave one of them out")


def require_new(path: Path, force: bool | None = None) -> None:
    """Raise InputError if ``path`` is a folder, is in a folder that does not exist, or is a file that exists.

    With ``force``, the file may exist. ``force`` is None if the command has no option ``--force``.
    """
    if path.is_dir():
        raise InputError(f"{path} is a folder; give the name of a file")
    if not path.parent.exists():
        raise InputError(f"the folder {path.parent} of {path} does not exist; create it, or give another name")
    if path.is_file() and not force:
        overwrite = "" if force is None else ", or add --force to overwrite it"
        raise InputError(f"{path} exists; give another name{overwrite}")


def recipe_name(file: Path, default: str) -> str:
    """Return the file's stem with hyphens for special characters, or ``default`` if nothing is left."""
    return re.sub(r"^\W+|[^\w.\-]+", "-", file.stem).strip("-.") or default


def group() -> typer.Typer:
    """Return the typer app of a new command with subcommands. Without a subcommand, the command prints its help."""
    return typer.Typer(add_completion=False, invoke_without_command=True, callback=_help)


def _help(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def load_recipe(recipe: Path, overrides: list[str] | None) -> Recipe:
    """Load a recipe file. Raise InputError with a hint if ``recipe`` is no file, but the id of a published run."""
    if not recipe.exists() and (RUNS / f"{recipe}.toml").is_file():
        raise InputError(
            f"{recipe} is a published run, not a recipe file; to see it, type: leaven recipes show {recipe}"
        )
    read = read_recipe(recipe, overrides or ())
    if changed := [path for path, why in read.why.items() if BY_REWIND in why]:
        said = f"{listed(changed, 'and')}, which --rewind-to changed during that run (see [why])"
        warn([f"{recipe} belongs to a run that began with other values of {said}"])
    return read


def print_document(
    document: Document | Sequence[Document],
    screen: Iterable[RenderableType],
    json_output: bool,
    following: Sequence[str] = (),
) -> None:
    """Print a document as JSON, or its ``screen`` as text. ``following`` are the commands to type next."""
    if json_output:
        data: Any = [each.dump() for each in document] if isinstance(document, Sequence) else document.dump()
        if following:
            data["next"] = list(following)
        # Other encodings than UTF-8 lack characters, which are then written as JSON escapes.
        ascii_only = codecs.lookup(sys.stdout.encoding or "ascii").name != "utf-8"
        echo(json.dumps(finite(data), indent=2, ensure_ascii=ascii_only))  # infinite numbers and NaN become null
        return
    for part in chain(screen, next_lines(following)):
        console.print(part)


@contextmanager
def stop_on_signal() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether Ctrl-C, SIGTERM or SIGHUP has arrived.

    A Ctrl-C more than `AGAIN_AFTER` seconds after the first signal raises KeyboardInterrupt. Other repeats are
    ignored: torchrun, schedulers and terminals may send several signals.
    """
    requested: float | None = None  # time.monotonic() of the first signal

    def request(number: int, frame: FrameType | None) -> None:
        nonlocal requested
        now, first = time.monotonic(), requested is None
        requested = now if requested is None else requested
        if number == signal.SIGINT and now > requested + AGAIN_AFTER:
            raise KeyboardInterrupt
        with suppress(RuntimeError):  # the signal has interrupted another write to this stream
            if first:
                errors.print(STOPPING)

    hang_up = getattr(signal, "SIGHUP", None)
    numbers = [signal.SIGINT, signal.SIGTERM]
    if hang_up is not None and signal.getsignal(hang_up) is not signal.SIG_IGN:  # ignored under nohup
        numbers.append(hang_up)
    before = {number: signal.signal(number, request) for number in numbers}
    try:
        yield lambda: requested is not None
    finally:
        for number, handler in before.items():
            # A scheduler may repeat SIGTERM until the command has ended. Repeats must not change the exit code.
            if requested is None or number == signal.SIGINT:
                signal.signal(number, handler)


def exit_interrupted(message: str) -> NoReturn:
    errors.print(message)
    raise typer.Exit(INTERRUPTED)


def prepare_text(data: "Data", vocab_size: int, recipe: "Recipe | None" = None) -> "TokenSet":
    """Return the tokens of a text. Show progress, and print notes and, with ``recipe``, cautions about [start]."""
    from leaven.data.tokens import prepare
    from leaven.views.terminal.live import LiveScreen

    with LiveScreen() as screen:
        tokens = prepare(data, vocab_size, progress=screen.text)
        for note in tokens.notes:
            screen.line(f"  {note}")
        if recipe is not None and recipe.start.weights:
            from leaven.interop.weights import start_cautions

            for caution in start_cautions(recipe, tokens.tokenizer_path, tokens.end_of_text):
                screen.line(f"  caution: {caution}")
    return tokens
