"""Print results to standard output, and progress, warnings and errors to standard error.

Control characters in file names, recipes and messages of other programs are made visible.
"""

import errno
import os
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import IO, Any, cast

from rich.console import Console
from rich.segment import Segment
from rich.text import Text

from leaven.errors import shown
from leaven.views.tables import LABEL

NO_TERMINAL = 120  # characters; width of output to a file or a pipe


class _Stream:
    """A standard stream that becomes the null device if nobody reads it any more, as after ``| head``.

    The command goes on, and keeps its exit code. If ``forgiving``, other errors, such as a full disk, are ignored.
    """

    def __init__(self, stream: IO[str], *, forgiving: bool) -> None:
        self._stream, self._forgiving = stream, forgiving

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> Any:
        return self._do(self._stream.write, text)

    def flush(self) -> None:
        self._do(self._stream.flush)

    def _do(self, function: Callable[..., Any], *arguments: str) -> Any:
        try:
            return function(*arguments)
        except OSError as error:
            gone = error.errno in {errno.EPIPE, errno.EIO, errno.ENXIO, errno.ECONNRESET}
            if gone and not stat.S_ISREG(os.fstat(self._stream.fileno()).st_mode):  # a file has no reader that ends
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
            elif not self._forgiving:
                raise


class SafeConsole(Console):
    """A console that hides passwords and makes control characters visible."""

    @property
    def file(self) -> IO[str]:
        return cast(IO[str], _Stream(super().file, forgiving=self.stderr))

    @file.setter
    def file(self, new_file: IO[str]) -> None:
        self._file = new_file

    def render(self, *arguments: Any, **options: Any) -> Iterable[Segment]:
        for text, style, control in super().render(*arguments, **options):
            yield Segment(text if control else shown(text), style, control)


def _console(stderr: bool) -> Console:
    # The consoles do not break lines: tables fit the width, and the terminal wraps sentences.
    made = SafeConsole(stderr=stderr, highlight=False, markup=False, emoji=False, soft_wrap=True)
    if not made.is_terminal:
        made.width = NO_TERMINAL
    return made


console = _console(stderr=False)
errors = _console(stderr=True)


def echo(text: str, newline: bool = True, *, raw: bool = False) -> None:
    """Print a text, such as JSON or TOML, to standard output without styles. ``raw``: with its control characters."""
    console.file.write((text if raw else shown(text)) + "\n" * newline)
    console.file.flush()


def warn(messages: Iterable[str], label: str = "warning") -> None:
    for message in messages:
        errors.print(Text.assemble((f"{label}: ", "bold yellow"), " ".join(message.split())))


def say_skipped(checkpoints: Mapping[str, str], changed: str | None = None) -> None:
    """Warn about ``checkpoints`` that were not used, {name: reason}, and print ``changed`` as a warning."""
    warn(f"checkpoint {name} is {why}; the checkpoint before it is used" for name, why in checkpoints.items())
    if changed is not None:
        warn([changed])


def say_unread(unknown: Iterable[str], unread: Sequence[str]) -> None:
    """Print what the files of another program do not say, and what of them a recipe cannot contain."""
    for line in unknown:
        errors.print(f"unknown   {line}")
    if unread:
        errors.print(f"ignored   {', '.join(unread)}")


def next_lines(commands: Sequence[str]) -> list[str]:
    """Return the lines that show the commands to type next, and how to choose other GPUs for ``leaven plan``."""
    lines = [f"{'' if number else 'next':<{LABEL}}{command}" for number, command in enumerate(commands)]
    if any(command.startswith("leaven plan ") and " --gpus " in command for command in commands):
        lines.insert(0, f"{'hardware':<{LABEL}}for other GPUs, change --gpus; leaven hardware lists the names")
    return lines
