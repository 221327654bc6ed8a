"""Defines the callbacks that log a run and compute its validation loss. :mod:`.checkpoint` has the callback that
saves checkpoints, and :mod:`.spikes` the one that responds to spikes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from statistics import median
from typing import TYPE_CHECKING, Any

from leaven.planning.memory import GIB
from leaven.training.curves import Curves
from leaven.training.device import peak_memory, time_fixed_work
from leaven.training.loop import Callback
from leaven.training.step_metrics import Step

if TYPE_CHECKING:
    from leaven.training.trainer import RunTrainer


class RunCallback(Callback[Step]):
    """A callback of a run that has a run folder."""

    def __init__(self, trainer: "RunTrainer") -> None:
        self.trainer, self.training = trainer, trainer.training


class StepLog(RunCallback):
    """Logs the steps of a run.

    Before each step, it sends a heartbeat, and logs an event if the batch size has changed. After each step, it
    writes a line of metrics.jsonl and points of the curves for TensorBoard, W&B or trackio, and calls ``on_step``.
    """

    def __init__(self, trainer: "RunTrainer", writers: Sequence[str], on_step: Callable[[Step], None]) -> None:
        super().__init__(trainer)
        self._on_step = on_step
        self._writers = writers if trainer.group.is_first else ()
        self._curves: Curves | None = None
        self.batch_tokens = 0

    def before_step(self) -> None:
        if self.training.next_batch_tokens != self.batch_tokens:
            self.batch_tokens = self.training.next_batch_tokens
            self.trainer.event("ramp", **self.batch())
        self.trainer.group.heartbeat(f"in step {self.training.progress.step + 1}")

    def after_step(self, step: Step) -> None:
        line = asdict(step)
        if self.training.noise is None:
            del line["noise_scale"]
        self.trainer.run.record(line)
        if self._curves:
            self._curves.step(step)
        self._on_step(step)

    def batch(self) -> dict[str, int]:
        """Return the batch size in tokens and the number of sequences in each forward pass, for the log."""
        size, _ = self.training.forwards(self.batch_tokens // self.training.recipe.model.seq_len)
        return {"batch_tokens": self.batch_tokens, "micro_batch": size}

    def validation(self, values: dict[str, float | None]) -> None:
        if self._curves:
            self._curves.validation(self.training.progress.step, self.training.tokens, values)

    def restore(self, state: Mapping[str, Any]) -> None:
        run, training = self.trainer.run, self.training
        self.batch_tokens = training.next_batch_tokens
        run.truncate_metrics(training.progress.step)
        self.close()
        self._curves = Curves(self._writers, run.path, training.recipe, training.tokens, lost=self._lost)

    def close(self) -> None:
        if self._curves:
            self._curves.close()

    def _lost(self, writer: str, why: str) -> None:
        self.trainer.event("curves_lost", writer=writer, why=why)


class Validation(RunCallback):
    """Computes the validation loss at a fixed interval in tokens. If the run has several processes, it then compares
    their speed and memory, to find a slow process."""

    def __init__(self, trainer: "RunTrainer", bits_per_byte_factor: float | None) -> None:
        super().__init__(trainer)
        recipe = self.training.recipe
        self._every = recipe.evaluation.every_tokens or max(recipe.data.tokens // 10, 1)
        self._bits_per_byte_factor = bits_per_byte_factor
        self.owed = False  # whether a stop interrupted a validation

    def is_due(self, before: int, after: int) -> bool:
        return after // self._every > before // self._every

    def on_due(self) -> None:
        self.evaluate()

    def evaluate(self) -> dict[str, Any]:
        """Compute and log the validation loss. Return it in nats per token and in bits per byte."""
        trainer, training, factor = self.trainer, self.training, self._bits_per_byte_factor
        trainer.group.heartbeat(f"in the validation after step {training.progress.step}")
        self.owed = True
        loss = training.evaluate()
        self.owed = False
        values = {"loss": loss, "bits_per_byte": loss * factor if factor else None}
        trainer.event("validation", **values)
        if trainer.group.size > 1:
            self._compare_processes()
        trainer.log.validation(values)
        return values

    def state(self) -> dict[str, Any]:
        return {"owes_validation": True} if self.owed and not self.training.finished else {}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.owed = state.get("owes_validation", False)

    def _compare_processes(self) -> None:
        """Log which process is slowest at a fixed computation, and which process uses the most memory."""
        device = self.training.device
        measured = self.trainer.group.all_gather([time_fixed_work(device), peak_memory(device) / GIB])
        seconds, memory = zip(*measured, strict=True)
        slowest, fullest = seconds.index(max(seconds)), memory.index(max(memory))
        ratio = max(seconds) / median(seconds)
        self.trainer.profile.fullest(max(memory))
        self.trainer.event("ranks", slowest=slowest, times_the_median=ratio, fullest=fullest, memory_gib=max(memory))
