"""Computes the validation loss of a run at a fixed interval in tokens."""

from collections.abc import Mapping
from statistics import median
from typing import TYPE_CHECKING, Any

from leaven.planning.memory import GIB
from leaven.training.device import peak_memory, time_fixed_work
from leaven.training.loop import Callback

if TYPE_CHECKING:
    from leaven.training.trainer import RunTrainer


class Validation(Callback):
    """Computes the validation loss at a fixed interval in tokens. In a run with several processes, the speed and
    memory use of the processes are compared after each validation, which shows a slow process."""

    def __init__(self, trainer: "RunTrainer", bits_per_byte_factor: float | None) -> None:
        self.trainer, self.training = trainer, trainer.training
        recipe = self.training.recipe
        self.every_tokens = recipe.evaluation.every_tokens or max(recipe.data.tokens // 10, 1)
        self._bits_per_byte_factor = bits_per_byte_factor
        self.owed = False  # whether a stop interrupted a validation

    def on_due(self) -> None:
        self.evaluate()

    def evaluate(self) -> dict[str, Any]:
        """Compute and log the validation loss. Return it as ``loss``, in nats per token, and as ``bits_per_byte``."""
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
        """Log which process takes longest for a matmul of fixed size, and which process uses the most memory."""
        device = self.training.device
        measured = self.trainer.group.all_gather([time_fixed_work(device), peak_memory(device) / GIB])
        seconds, memory = zip(*measured, strict=True)
        slowest, fullest = seconds.index(max(seconds)), memory.index(max(memory))
        ratio = max(seconds) / median(seconds)
        self.trainer.profile.highest_memory = max(memory)
        self.trainer.event("ranks", slowest=slowest, times_the_median=ratio, fullest=fullest, memory_gib=max(memory))
