"""What a person watches while a study searches, and its answer."""

from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text

from leaven.cli._screens import Screen
from leaven.recipe.units import format_quantity
from leaven.report.terminal import cut

if TYPE_CHECKING:
    from leaven.training.study_file import StudyState, Trial
    from leaven.tuning.study import Study


class TuneScreen(Screen):
    """A row a trial."""

    HEADER = "trial      loss  against best   tok/s  what changed against the start"
    INDENT = HEADER.index("what")

    def __init__(self, study: "Study", trials: int) -> None:
        super().__init__()
        self._centre = study.space.centre
        self._trials = trials
        self._ended = self._already = sum(trial.state != "running" for trial in study.state().trials)
        self._task = self._progress.add_task("trials", total=trials, completed=self._ended, left="")
        self._best: float | None = None
        if self._already:
            self.row(f"  {self._already} of {trials} trials are done; going on")

    def trial(self, trial: "Trial", best: "Trial") -> None:
        if self._best is None:
            self.row(self.HEADER)
        self._ended += 1
        self._progress.update(
            self._task, completed=self._ended, left=self._left(self._ended, self._trials, self._already)
        )
        said = Text.assemble(f"{trial.number:5d}  ", self._verdict(trial))
        said.pad_right(self.INDENT - len(said))
        self.row(said + changes(trial.values, self._centre, self._progress.console.width - self.INDENT))
        self._best = best.loss

    def _verdict(self, trial: "Trial") -> Text:
        if trial.state != "complete" or trial.loss is None:
            return Text(f"{trial.state:>8}", style="red")
        star = "*" if self._best is None or trial.loss < self._best else " "
        delta = Text(f"{'':>12}  ")
        if self._best is not None:
            delta = Text(f"{trial.loss - self._best:+10.4f} {star}  ", style="green" if star == "*" else "red")
        return Text.assemble(f"{trial.loss:8.4f}  ", delta, f"{format_quantity(trial.tokens_per_second or 0):>6}")

    def rerun(self, done: int, total: int) -> None:
        self._progress.update(self._task, description="other seeds", completed=done, total=total, left="")
        if done in {0, total}:
            self.row(f"  the best again with other seeds: {done} of {total} runs")


def changes(values: dict[str, float], centre: dict[str, float], room: int) -> str:
    """What a point changes, largest first, as many as there is room for: ``embedding.lr x1.41, …``."""
    factors = {path: now / centre[path] for path, now in values.items()}
    moved = sorted(factors.items(), key=lambda item: -abs(item[1] - 1 / item[1]))
    names = [
        f"{path.removeprefix('hyperparameters.').removeprefix('modules.')} x{factor:.2f}"
        for path, factor in moved
        if f"{factor:.2f}" != "1.00"
    ]
    said = ", ".join(names)
    while len(said) > room and len(names) > 1:
        names.pop()
        said = ", ".join([*names, "…"])
    return cut(said, room) or "nothing: the start"


def best_lines(state: "StudyState", folder: Path) -> list[str]:
    """The answer of a study in a few lines."""
    if state.best is None or state.noise_floor is None:
        return []
    low, high = state.best.interval
    diverged = sum(trial.state == "diverged" for trial in state.trials)
    return [
        f"best      trial {state.best.number} of {len(state.trials)} ({diverged} diverged)",
        f"loss      {state.best.loss:.4f} nats per token, 95% interval {low:.4f} to {high:.4f}",
        f"noise     {state.noise_floor:.4f} nats, standard deviation between seeds (the trials share one)",
        f"recipe    {folder / 'best.toml'} (each value with its reason under [why])",
    ]
