"""Print results to standard output, and progress, warnings and errors to standard error."""

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.text import Text

NO_TERMINAL = 120  # characters; width of output to a file or a pipe


def _console(stderr: bool) -> Console:
    # The consoles do not break lines: tables fit the width, and the terminal wraps sentences.
    made = Console(stderr=stderr, highlight=False, markup=False, emoji=False, soft_wrap=True)
    if not made.is_terminal:
        made.width = NO_TERMINAL
    return made


console = _console(stderr=False)
errors = _console(stderr=True)


def warn(messages: Iterable[str], label: str = "warning") -> None:
    for message in messages:
        errors.print(Text.assemble((f"{label}: ", "bold yellow"), message))


def say_damaged(names: Iterable[str]) -> None:
    warn(f"checkpoint {name} is damaged; the checkpoint before it is used" for name in names)


def next_lines(commands: Sequence[str]) -> list[str]:
    """Return the lines that show the commands to type next."""
    return [f"{'' if number else 'next':<11}{command}" for number, command in enumerate(commands)]
