"""What a person watches while a verb works: rows that stay, and a bar with the time left where there is a terminal.

Everything goes to standard error. Without a terminal the same rows are printed without a bar.
"""

import time
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.text import Text

from leaven.cli._common import errors
from leaven.recipe.units import format_seconds

if TYPE_CHECKING:
    from leaven.data.tokens import TokenSet


class Bars(Progress):
    """Bars below rows that change: ``above`` is asked for them whenever the bars are drawn, in a thread of rich."""

    above: Callable[[], Iterable[RenderableType]] | None = None

    def get_renderables(self) -> Iterable[RenderableType]:
        if self.above is not None:
            yield from self.above()
        yield from super().get_renderables()


class Screen:
    """A bar that is gone when the work is done; rows printed above it stay."""

    def __init__(self) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(32), TextColumn("{task.fields[left]}"))
        self._progress = Bars(*columns, console=errors, transient=True, disable=not errors.is_terminal)
        self._began = time.monotonic()

    def __enter__(self) -> Any:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._progress.stop()

    def row(self, text: str | Text) -> None:
        self._progress.console.print(text, soft_wrap=True)

    def _left(self, done: float, total: float, already: float = 0.0) -> str:
        """The time left at the pace since the screen opened; ``already`` was done before that."""
        if done >= total:
            return "done"
        spent = time.monotonic() - self._began
        if done <= already or spent < 1:
            return ""
        return f"{format_seconds(spent * (total - done) / (done - already))} left"


class TextScreen(Screen):
    """Reading, tokenising: bars by stage, in bytes."""

    def __init__(self) -> None:
        super().__init__()
        self._stages: dict[str, TaskID] = {}

    def update(self, stage: str, done: int, total: int) -> None:
        if stage not in self._stages:
            self._stages[stage] = self._progress.add_task(stage, left="")
        share = f"{done / 1e6:.0f} of {total / 1e6:.0f} MB"
        self._progress.update(self._stages[stage], completed=done, total=total, left=share)

    def notes(self, tokens: "TokenSet") -> None:
        """What was skipped, and what had to be made again."""
        for note in tokens.notes:
            self.row(f"  {note}")


class CountScreen(Screen):
    """A bar of things that are done one by one."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self._task = self._progress.add_task(what, total=None, left="")
        self._already: int | None = None

    def update(self, done: int, total: int) -> None:
        if self._already is None:
            self._already = done
        left = self._left(done, total, self._already)
        self._progress.update(self._task, completed=done, total=total, left=left)
