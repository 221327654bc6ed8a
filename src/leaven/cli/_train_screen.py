"""What a person watches while a run trains, or several side by side; and what is said when one ends."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich.text import Text

from leaven.cli._screens import Screen
from leaven.recipe.recipe import Recipe
from leaven.recipe.units import format_quantity, format_seconds
from leaven.views.numbers import value
from leaven.views.terminal import learning_rate

SLOW = 1.5
"""Times the median of the ranks, above which a rank is said to be slow."""

if TYPE_CHECKING:
    from leaven.training.step import Step
    from leaven.training.trainer import Summary


class TrainScreen(Screen):
    """A row each validation, one every ``log_every`` steps if that is set, at least one a minute, and one each event.

    On a terminal every step is seen too, in a row that changes above the bar.
    """

    # The first nine, 78 characters in all, are a line on the narrowest terminal; the others where there is room. The
    # noise scale, if it is measured, takes the place of the MFU on the narrowest.
    COLUMNS = (
        ("tokens", 7),
        ("loss", 6),
        ("validation", 10),
        ("lr", 7),
        ("|grad|", 7),
        ("|update|", 8),
        ("batch", 6),
        ("tok/s", 6),
        ("MFU", 5),
        ("memory", 8),
        ("noise", 6),
        ("TFLOP/s", 7),
        ("left", 11),
    )
    ALWAYS = 9
    LONGEST_SILENCE = 60.0  # seconds

    def __init__(self, recipe: Recipe, log_every: int | None = None) -> None:
        super().__init__()
        self._recipe = recipe
        self._log_every = log_every
        self._task = self._progress.add_task(recipe.name, total=recipe.data.tokens, left="")
        self._already: int | None = None
        self._last: Step | None = None
        self._waiting: Step | None = None  # asked for, and said with its validation if one comes
        self._spoken = time.monotonic()
        self._noise_scale: float | None = None
        self._columns = self._fitting(measured=recipe.stability.noise_scale_every_tokens is not None)

    def _fitting(self, measured: bool) -> tuple[tuple[str, int], ...]:
        """The columns that there is room for, the noise scale in its place or not at all."""
        columns = [column for column in self.COLUMNS if column[0] != "noise"]
        if measured:
            columns.insert(self.ALWAYS - 1, next(column for column in self.COLUMNS if column[0] == "noise"))
        kept = columns[: self.ALWAYS]
        room = self._progress.console.width - sum(width + 2 for _, width in kept) + 2
        for column in columns[self.ALWAYS :]:
            if (room := room - 2 - column[1]) >= 0:
                kept.append(column)
        return tuple(kept)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._say_waiting()
        super().__exit__(kind, error, traceback)

    def step(self, step: "Step") -> None:
        if self._already is None:
            self._already = step.tokens - step.batch_tokens
            self.row(self._cells([title for title, _ in self._columns]))
        self._say_waiting()
        self._last = step
        self._noise_scale = step.noise_scale or self._noise_scale
        row = Text(self._row(step, ""), style="dim")
        self._progress.above = lambda: (row,)
        self._progress.update(self._task, completed=step.tokens, left=self._time_left(step))
        asked = self._log_every is not None and step.step % self._log_every == 0
        if asked or time.monotonic() - self._spoken > self.LONGEST_SILENCE:
            self._waiting = step

    def event(self, event: str, values: dict[str, Any]) -> None:
        if event not in {"validation", "checkpoint", "ranks"}:  # of the others mostly nothing is said
            self._say_waiting()
        at = f"at {format_quantity(values['tokens'])} tokens"
        match event:
            case "start" | "resume":
                self._begin(event, at, values)
            case "micro_batch":
                self.row(f"  micro-batch {values['micro_batch']}, {values['why']}")
            case "layout":
                said = ", ".join(f"{each['path']} {each['before']} -> {each['after']}" for each in values["changes"])
                self.row(f"  {said} {at}: the same sums in another order, so losses differ in their last bits")
            case "validation" if self._last is not None:
                self._say(self._last, f"{values['loss']:.4f}")
            case "rollback" | "skip":
                self._say_trouble(event, at, values)
            case "checkpoint_failed":
                self.row(f"  checkpoint {at} is not saved: {values['why']}; the run goes on, older ones stay")
            case "unwritten":
                self.row(f"  nothing can be written {at}: {values['why']}; the run goes on and writes it later")
            case "ramp" if values["batch_tokens"] == self._recipe.batch.tokens:
                self.row(
                    f"  batch is at its full {format_quantity(values['batch_tokens'])} tokens {at}, "
                    f"micro-batch {values['micro_batch']}"
                )
            case "ranks" if values["times_the_median"] > SLOW:
                self.row(
                    f"  rank {values['slowest']} takes {values['times_the_median']:.1f} times as long as the others "
                    "for the same work; all wait for it"
                )
            case "curves_lost":
                self.row(f"  curves of {values['writer']} end {at}: {values['why']}")
        for name in values.get("damaged_checkpoints", ()):
            self.row(f"  checkpoint {name} is damaged and was passed over")

    def _begin(self, event: str, at: str, values: dict[str, Any]) -> None:
        if event == "resume":
            self.row(f"  resumed {at}")
        for source, epochs in values.get("epochs", {}).items():
            self.row(f"  {epochs:.3g} epochs of {source}")
        if values.get("mfu_convention"):
            self.row(f"  MFU: {values['mfu_convention']}")

    def _say_trouble(self, event: str, at: str, values: dict[str, Any]) -> None:
        if event == "skip":
            self.row(
                f"  step {values['step']:,} left out {at}: loss {values['loss']:.3f}, "
                f"gradient norm {value(values['grad_norm'])}"
            )
            return
        lower = f", lr x{values['lr']:g}" if values["lr"] < 1 else ""
        self.row(f"  trouble {at}: {values['why']}")
        self.row(
            f"  rolled back to {format_quantity(values['from_tokens'])} tokens, data left out from "
            f"{format_quantity(values['skip_from'])} to {format_quantity(values['skip_to'])}{lower}, "
            f"attempt {values['attempt']} of {values['attempts']}"
        )

    def _say_waiting(self) -> None:
        if self._waiting is not None:
            self._say(self._waiting, "")

    def _say(self, step: "Step", validation: str) -> None:
        self._waiting = None
        self._spoken = time.monotonic()
        self.row(self._row(step, validation))

    def _time_left(self, step: "Step") -> str:
        return self._left(step.tokens, self._recipe.data.tokens, self._already or 0)

    def _row(self, step: "Step", validation: str) -> str:
        cells = {
            "tokens": format_quantity(step.tokens),
            "loss": _fixed(step.loss, 3),
            "validation": validation,
            "lr": learning_rate(step.lr, 3),
            "|grad|": _fixed(step.grad_norm, 3),
            "|update|": _fixed(step.update_norm, 4),
            "batch": format_quantity(step.batch_tokens),
            "tok/s": format_quantity(step.tokens_per_second),
            "MFU": f"{step.mfu:.1%}" if step.mfu is not None else "-",
            "memory": f"{step.memory_gib:.3g} GiB",
            "noise": format_quantity(self._noise_scale) if self._noise_scale is not None else "-",
            "TFLOP/s": f"{step.tflops:.3g}",
            "left": self._time_left(step).removesuffix(" left"),
        }
        return self._cells([cells[title] for title, _ in self._columns])

    def _cells(self, cells: Sequence[str]) -> str:
        return "  ".join(f"{cell:>{width}}" for cell, (_, width) in zip(cells, self._columns, strict=True))


class RunsScreen(Screen):
    """Runs of other processes, side by side: a bar each, and a row each validation, read from their folders."""

    COLUMNS = (("run", 11), ("tokens", 7), ("loss", 6), ("validation", 10), ("lr", 7), ("batch", 6), ("tok/s", 6))

    def __init__(self, runs: Mapping[str, Path], tokens: int) -> None:
        from leaven.training.run_folder import RunFolder

        super().__init__()
        self._tokens = tokens
        self._folders = {name: RunFolder(folder) for name, folder in runs.items()}
        self._tasks = {name: self._progress.add_task(f"{name:<11}", total=tokens, left="") for name in runs}
        # Validations of an earlier start have been shown then.
        self._shown = {name: len(self._validations(name)) for name in runs}
        self._already = {name: self._consumed(name) for name in runs}
        self._cells([title for title, _ in self.COLUMNS])

    def look(self) -> None:
        """Read the folders again: move the bars, print what is new."""
        for name, folder in self._folders.items():
            tokens = self._consumed(name)
            left = self._left(tokens, self._tokens, self._already[name])
            self._progress.update(self._tasks[name], completed=tokens, left=left)
            validations = self._validations(name)
            steps = (
                {line["tokens"]: line for line in folder.metrics()} if len(validations) > self._shown[name] else {}
            )
            for event in validations[self._shown[name] :]:
                if (step := steps.get(event["tokens"])) is not None:
                    self._cells(
                        (
                            name,
                            format_quantity(step["tokens"]),
                            "nan" if step["loss"] is None else _fixed(step["loss"], 3),
                            "nan" if event["loss"] is None else f"{event['loss']:.4f}",
                            learning_rate(step["lr"], 3),
                            format_quantity(step["batch_tokens"]),
                            format_quantity(step["tokens_per_second"]),
                        )
                    )
            self._shown[name] = len(validations)

    def _consumed(self, name: str) -> int:
        lines = self._folders[name].metrics()
        return int(lines[-1]["tokens"]) if lines else 0

    def _validations(self, name: str) -> list[dict[str, Any]]:
        return [event for event in self._folders[name].events() if event["event"] == "validation"]

    def _cells(self, cells: Sequence[str]) -> None:
        self.row("  ".join(f"{cell:>{width}}" for cell, (_, width) in zip(cells, self.COLUMNS, strict=True)))


def _fixed(number: float, digits: int) -> str:
    return f"{number:.{digits}f}" if abs(number) < 100 else value(number)


def advice(folder: Path) -> str:
    """What to do about a run that stopped in trouble: its rollbacks, and the command to take it back by hand."""
    from leaven.training.run_folder import RunFolder

    run = RunFolder(folder)
    lines = [
        f"  rolled back at {format_quantity(event['tokens'])} tokens, data left out from "
        f"{format_quantity(event['skip_from'])} to {format_quantity(event['skip_to'])}: {event['why']}"
        for event in run.rollbacks()
    ]
    there = sorted(int(path.name.rpartition("-")[2]) for path in run.checkpoints.glob("tokens-*"))
    if there:
        lines.append(
            f"the last checkpoints are at {', '.join(f'{tokens:,}' for tokens in there)} tokens; to go on from one "
            f"with a lower lr: --rewind-to {there[0]} --set hyperparameters.lr=..."
        )
    return "\n".join(lines)


def summary_line(summary: "Summary", folder: Path) -> str:
    bits = f" ({summary.bits_per_byte:.4f} bits per byte)" if summary.bits_per_byte is not None else ""
    noise = f"gradient noise scale {format_quantity(summary.noise_scale)} tokens\n" if summary.noise_scale else ""
    return (
        f"{summary.loss:.4f} nats per token{bits} on validation after {format_quantity(summary.tokens)} tokens, "
        f"{summary.steps:,} steps, {format_seconds(summary.seconds)}\n{noise}run folder {folder}"
    )
