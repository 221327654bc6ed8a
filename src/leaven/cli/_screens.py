"""What a person watches while a verb works: rows that stay, and a bar with the time left where there is a terminal.

Everything goes to standard error. Without a terminal the same rows are printed without a bar.
"""

import time
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, Progress, TaskID, TextColumn

from leaven.cli._common import errors
from leaven.recipe.recipe import Recipe
from leaven.recipe.units import format_quantity, format_seconds

if TYPE_CHECKING:
    from leaven.training.trainer import Step, Summary
    from leaven.tuning.study import Study, StudyState, Trial


class Screen:
    """A bar that is gone when the work is done; rows printed above it stay."""

    def __init__(self) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(32), TextColumn("{task.fields[left]}"))
        self._progress = Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal)
        self._began = time.monotonic()

    def __enter__(self) -> Any:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._progress.stop()

    def row(self, text: str) -> None:
        self._progress.console.print(text, soft_wrap=True)

    def _left(self, done: float, total: float, already: float = 0.0) -> str:
        """The time left at the pace since the screen opened; ``already`` was done before that."""
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


class TrainScreen(Screen):
    """A row each validation, at least one a minute, and one each event."""

    HEADER = "  tokens     loss    validation  lr        |grad|    |update|  batch     tok/s     MFU"
    LONGEST_SILENCE = 60.0  # seconds

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self._recipe = recipe
        self._task = self._progress.add_task(recipe.name, total=recipe.data.tokens, left="")
        self._already: int | None = None
        self._last: Step | None = None
        self._spoken = time.monotonic()

    def step(self, step: "Step") -> None:
        total = self._recipe.data.tokens
        if self._already is None:
            self._already = step.tokens - step.batch_tokens
        self._last = step
        left = self._left(step.tokens, total, self._already)
        self._progress.update(self._task, completed=step.tokens, left=left)
        if time.monotonic() - self._spoken > self.LONGEST_SILENCE:
            self._say(step, "")

    def event(self, event: str, values: dict[str, Any]) -> None:
        at = f"at {format_quantity(values['tokens'])} tokens"
        match event:
            case "start" | "resume":
                if event == "resume":
                    self.row(f"  resumed {at}")
                self.row(self.HEADER)
            case "validation" if self._last is not None:
                self._say(self._last, f"{values['loss']:.4f}")
            case "ramp" if values["batch_tokens"] == self._recipe.batch.tokens:
                self.row(f"  batch is at its full {format_quantity(values['batch_tokens'])} tokens {at}")
        for name in values.get("damaged_checkpoints", ()):
            self.row(f"  checkpoint {name} is damaged and was passed over")

    def _say(self, step: "Step", validation: str) -> None:
        self._spoken = time.monotonic()
        mfu = f"{step.mfu:.1%}" if step.mfu is not None else "-"
        self.row(
            f"  {format_quantity(step.tokens):<9}{step.loss:7.3f}    {validation:<10}  {step.lr:8.2e}  "
            f"{step.grad_norm:7.3f}   {step.update_norm:8.4f}  {format_quantity(step.batch_tokens):<8}  "
            f"{format_quantity(step.tokens_per_second):<8}  {mfu}"
        )


class TuneScreen(Screen):
    """A row a trial."""

    HEADER = "  trial  loss     against best  tok/s     what changed against the start"

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
        self.row(f"  {trial.number:5d}  {self._verdict(trial)}  {changes(trial.values, self._centre)}")
        self._best = best.loss

    def _verdict(self, trial: "Trial") -> str:
        if trial.state != "complete" or trial.loss is None:
            return f"{trial.state:<30}"
        against = f"{trial.loss - self._best:+.4f}" if self._best is not None else ""
        star = "*" if self._best is None or trial.loss < self._best else " "
        speed = format_quantity(trial.tokens_per_second or 0)
        return f"{trial.loss:.4f}   {against:>7} {star}    {speed:<8}"

    def rerun(self, done: int, total: int) -> None:
        self._progress.update(self._task, description="other seeds", completed=done, total=total, left="")
        if done in {0, total}:
            self.row(f"  the best again with other seeds: {done} of {total} runs")


def changes(values: dict[str, float], centre: dict[str, float]) -> str:
    """What a point changes, largest first: ``embedding.lr x1.41, init_std x0.84``."""
    factors = {path: value / centre[path] for path, value in values.items()}
    moved = sorted(factors.items(), key=lambda item: -abs(item[1] - 1 / item[1]))
    names = [
        f"{path.removeprefix('hyperparameters.').removeprefix('modules.')} x{factor:.2f}"
        for path, factor in moved
        if f"{factor:.2f}" != "1.00"
    ]
    return ", ".join(names) or "nothing: the start"


def best_lines(state: "StudyState", folder: Path) -> list[str]:
    """The answer of a study in a few lines."""
    if state.best is None or state.noise_floor is None:
        return []
    low, high = state.best.interval
    diverged = sum(trial.state == "diverged" for trial in state.trials)
    return [
        f"best      trial {state.best.number} of {len(state.trials)} ({diverged} diverged)",
        f"loss      {state.best.loss:.4f} nats per token, 95% interval {low:.4f} to {high:.4f}",
        f"noise     {state.noise_floor:.4f} nats between seeds; smaller differences mean nothing",
        f"recipe    {folder / 'best.toml'} (each value with its reason under [why])",
    ]


def summary_line(summary: "Summary", folder: Path) -> str:
    return (
        f"{summary.loss:.4f} nats per token on validation after {format_quantity(summary.tokens)} tokens, "
        f"{summary.steps:,} steps, {format_seconds(summary.seconds)}: {folder}"
    )
