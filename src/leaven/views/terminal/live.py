"""Show the progress of a command on standard error: rows that stay, and status lines and progress bars below them.

If standard error is not a terminal, only the rows are printed.
"""

from collections.abc import Callable, Iterable, Sequence

from rich.console import RenderableType
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.text import Text

from leaven.recipe.units import format_seconds
from leaven.views.tables import Cell, Column, RowByRow
from leaven.views.terminal import console

LONG = 600.0  # seconds over which the speed of a progress bar is measured


class LiveScreen(Progress):
    """A live screen: rows of a table, lines of text between them, and progress bars that disappear at the end.

    ``above`` returns the status lines above the bars; rich calls it in another thread.
    """

    above: Callable[[], Iterable[RenderableType]] | None = None

    def __init__(self, columns: Sequence[Column] = ()) -> None:
        bars = (TextColumn("{task.description}"), BarColumn(32), TextColumn("{task.fields[left]}"))
        shown = console.errors.is_terminal
        super().__init__(*bars, console=console.errors, transient=True, disable=not shown, speed_estimate_period=LONG)
        self.table = RowByRow(columns, self.console.width)
        self._headed = False
        self._bars: dict[str, TaskID] = {}

    def get_renderables(self) -> Iterable[RenderableType]:
        if self.above is not None:
            yield from self.above()
        yield from super().get_renderables()

    def line(self, text: str | Text) -> None:
        self.console.print(text, soft_wrap=True)

    def row(self, cells: Sequence[Cell]) -> None:
        if not self._headed:
            self._headed = True
            self.line(Text(self.table.header.plain, style="dim"))
        self.line(self.table.line(cells))

    def bar(self, name: str, done: float, total: float | None, left: str | None = None) -> str:
        """Update the progress bar ``name``. Return the text beside it: ``left``, by default the remaining time."""
        if name not in self._bars:
            self._bars[name] = self.add_task(name, total=total, completed=int(done), left="")
        task = self._bars[name]
        self.update(task, completed=done, total=total)
        if left is None:
            remaining = next(each.time_remaining for each in self.tasks if each.id == task)
            left = "done" if remaining == 0 else f"{format_seconds(remaining)} left" if remaining else ""
        self.update(task, left=left)
        return left

    def counts(self, what: str) -> Callable[[int, int], None]:
        """Show a progress bar, and return a callback (done, total) that updates the bar."""
        self.bar(what, 0, None, "")

        def update(done: int, total: int) -> None:
            self.bar(what, done, total)

        return update

    def text(self, stage: str, done: int, total: int) -> None:
        """Show how many bytes of the input have been read or tokenised."""
        self.bar(stage, done, total, f"{done / 1e6:.0f} of {total / 1e6:.0f} MB")
