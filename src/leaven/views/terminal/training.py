"""Show a training run live in the terminal, and its result at the end."""

import string
import time
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from leaven.documents.runs import TrainDocument
from leaven.recipe.recipe import Recipe
from leaven.recipe.units import format_quantity, format_seconds
from leaven.training.integrity import faults_in
from leaven.training.run_folder import RunFolder, checkpoints, tokens_of
from leaven.views import numbers
from leaven.views.tables import Column
from leaven.views.terminal.live import LiveScreen

if TYPE_CHECKING:
    from leaven.training.metrics import Step

SLOW = 1.5  # a rank is reported as slow if it takes more than this many times as long as the median rank
LONGEST_SILENCE = 60.0  # seconds; the next step gets a row if the last row is older

# The messages of events, by the name of the event. :q formats a count, such as 2.5 M, and :v any other number. The
# messages about lost or damaged files are in :func:`faults_in`.
EVENTS = {
    "emulated": "caution: this device only emulates {compute}, so matrix products take {emulated:.1f} times as long "
    "as in fp32; to train faster, start a new run with --set precision.compute=fp32",
    "resume": "resumed at {tokens:q} tokens",
    "micro_batch": "micro-batch {micro_batch}, {why}",
    "skip": "step {step:,} at {tokens:q} tokens was skipped: loss {loss:.3f}, gradient norm {grad_norm:v}",
    "rollback": "anomaly at {tokens:q} tokens: {why}\n"
    "  rolled back to {from_tokens:q} tokens, skipping the data from {skip_from:q} to {skip_to:q}{lower}, "
    "attempt {attempt} of {attempts}",
    "full_batch": "at {tokens:q} tokens, the batch has reached its full size of {batch_tokens:q} tokens, with "
    "micro-batch {micro_batch}",
    "slow_rank": "rank {slowest} takes {times_the_median:.1f} times as long as the other ranks, which wait for it",
    "layout": "{changed} at {tokens:q} tokens: sums are computed in another order, {effect}",
}
# The masks of dropout depend on which sequences and tensors a rank has in a micro-batch.
OF_MASKS = {"batch.micro_batch", *(f"layout.{degree}" for degree in ("dp", "tp", "pp", "ep", "stages_per_rank"))}
MASKS = "and dropout draws other masks, so losses differ as between seeds"


class _Quantities(string.Formatter):
    """A formatter with two more formats for :data:`EVENTS`: :q for a quantity such as ``2.50 M``, :v for a value."""

    def format_field(self, value: Any, format_spec: str) -> str:
        if format_spec == "q":
            return format_quantity(value)
        return numbers.value(value) if format_spec == "v" else super().format_field(value, format_spec)


class TrainScreen(LiveScreen):
    """The live screen of a training run: a table of steps, a line for each event in `EVENTS`, and the current step.

    It prints a row at each validation, every ``log_every`` steps, and after a minute without a row.
    """

    def __init__(self, recipe: Recipe, log_every: int | None = None) -> None:
        measured = recipe.stability.noise_scale_every_tokens is not None
        # 80 characters have space for nine columns. With a column for the noise scale, MFU becomes optional.
        self._columns = [
            Column("tokens", lambda step: format_quantity(step.tokens), width=7),
            Column("loss", lambda step: _fixed(step.loss, 3), width=6),
            Column("validation", lambda step: self._validation, width=10),
            Column("lr", lambda step: numbers.scientific(step.lr, 3), width=7),
            Column("|grad|", lambda step: _fixed(step.grad_norm, 3), width=7),
            Column("|update|", lambda step: _fixed(step.update_norm, 4), width=8),
            Column("batch", lambda step: format_quantity(step.batch_tokens), width=6),
            Column("tok/s", lambda step: format_quantity(step.tokens_per_second), width=6),
            Column("MFU", lambda step: f"{step.mfu:.1%}" if step.mfu is not None else "-", width=5, drop=measured),
            Column("memory", lambda step: f"{step.memory_gib:.3g} GiB", width=9, drop=2),
            Column(
                "TFLOP/s", lambda step: _fixed(step.tflops, 1 if (step.tflops or 0) >= 10 else 4), width=7, drop=3
            ),
            Column("left", lambda step: self._left.removesuffix(" left"), width=11, drop=4),
        ]
        if measured:
            noise = Column("noise", lambda step: format_quantity(self._noise) if self._noise else "-", width=6)
            self._columns.insert(8, noise)
        super().__init__(self._columns)
        self._recipe = recipe
        self._log_every = log_every
        self._last: Step | None = None
        self._waiting: Step | None = None  # a step to print, with its validation loss if a validation follows
        self._spoken = time.monotonic()
        self._noise: float | None = None  # the latest noise scale
        self._validation, self._left = "", ""
        self.bar(recipe.name, 0, recipe.data.tokens, "")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._say_waiting()
        super().__exit__(kind, error, traceback)

    def step(self, step: "Step") -> None:
        if self._last is None:
            self.bar(self._recipe.name, step.tokens - step.batch_tokens, self._recipe.data.tokens)
        self._say_waiting()
        self._last = step
        self._noise = step.noise_scale or self._noise
        self._left = self.bar(self._recipe.name, step.tokens, self._recipe.data.tokens)
        row = self.table.line([column.cell(step) for column in self._columns])
        row.style = "dim"
        self.above = lambda: (row,)
        asked = self._log_every is not None and step.step % self._log_every == 0
        if asked or time.monotonic() - self._spoken > LONGEST_SILENCE:
            self._waiting = step

    def event(self, event: str, values: dict[str, Any]) -> None:
        if event not in {"validation", "checkpoint", "ranks"}:  # frequent events, most of which print nothing
            self._say_waiting()
        fields = dict(values)
        match event:
            case "start" if values.get("emulated"):
                event, fields["compute"] = "emulated", self._recipe.precision.compute
            case "validation" if self._last is not None:
                self._say(self._last, f"{values['loss']:.4f}")
            case "ramp" if values["batch_tokens"] == self._recipe.batch.tokens:
                event = "full_batch"
            case "ranks" if values["times_the_median"] > SLOW:
                event = "slow_rank"
            case "rollback":
                fields["lower"] = f", lr x{values['lr']:g}" if values["lr"] < 1 else ""
            case "layout":
                changes = (f"{each['path']} {each['before']} -> {each['after']}" for each in values["changes"])
                fields["changed"] = ", ".join(changes)
                masked = self._recipe.model.dropout and {each["path"] for each in values["changes"]} & OF_MASKS
                fields["effect"] = MASKS if masked else "so losses may differ in the last bits"
        if event in EVENTS:
            self.line(f"  {_Quantities().vformat(EVENTS[event], (), fields)}")
        for source, epochs in values.get("epochs", {}).items():
            self.line(f"  {epochs:.3g} epochs of {source}")
        for source, rest in values.get("left_over", {}).items():
            self.line(f"  the last {rest:,} tokens of {source} are not trained: they do not fill a sequence")
        if values.get("mfu_convention"):
            self.line(f"  MFU: {values['mfu_convention']}")
        for fault in faults_in(event, values):
            self.line(f"  {fault}")

    def _say_waiting(self) -> None:
        if self._waiting is not None:
            self._say(self._waiting)

    def _say(self, step: "Step", validation: str = "") -> None:
        self._waiting, self._spoken = None, time.monotonic()
        self._validation = validation
        self.row([column.cell(step) for column in self._columns])
        self._validation = ""


def _fixed(number: float, digits: int) -> str:
    return f"{number:.{digits}f}" if abs(number) < 100 else numbers.value(number)


def advice(folder: Path) -> str:
    """Return a text for a run that stopped at an anomaly: its rollbacks, its checkpoints, and how to rewind it."""
    run = RunFolder(folder)
    lines = [
        f"  rolled back at {format_quantity(event['tokens'])} tokens, skipping the data from "
        f"{format_quantity(event['skip_from'])} to {format_quantity(event['skip_to'])}: {event['why']}"
        for event in run.rollbacks()
    ]
    there = [tokens_of(path) for path in checkpoints(run.checkpoints)]
    if there:
        lines.append(
            f"there are checkpoints at {', '.join(f'{tokens:,}' for tokens in there)} tokens; to continue from a "
            f"checkpoint with a lower lr, add --rewind-to {there[0]} --set hyperparameters.lr=..."
        )
    return "\n".join(lines)


def trained(summary: TrainDocument, folder: Path) -> list[str]:
    bits = f" ({summary.bits_per_byte:.4f} bits per byte)" if summary.bits_per_byte is not None else ""
    more = []
    if summary.averaged_loss is not None:
        averaged = f"{summary.averaged_loss:.4f} nats per token with the averaged weights"
        more.append(f"{averaged} (export them with --averaged)")
    if summary.noise_scale:
        more.append(f"gradient noise scale {format_quantity(summary.noise_scale)} tokens")
    return [
        f"{summary.loss:.4f} nats per token{bits} on validation after {format_quantity(summary.tokens)} tokens, "
        f"{summary.steps:,} steps, {format_seconds(summary.seconds)}",
        *more,
        f"run folder {folder}",
    ]


def stopped(summary: TrainDocument) -> str:
    saved = "saved; run the same command again to resume"
    if summary.unsaved is not None:
        again = f"run the same command again to resume from {summary.saved_tokens:,} tokens"
        saved = f"not saved ({summary.unsaved}); {again}"
    return f"stopped at {summary.tokens:,} tokens, {saved}"
