"""Defines the callbacks of a run: step log, validation and checkpoints. The spike guard is in :mod:`.spikes`.

Checkpoints are written in a thread while training continues.
"""

import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from leaven.distributed.exchange import Exchange
from leaven.distributed.process_group import SINGLE_PROCESS, ProcessGroup
from leaven.planning.memory import GIB
from leaven.training.checkpoint import (
    UNFINISHED,
    Checkpoint,
    NotSaved,
    Progress,
    checkpoints,
    tokens_of,
    write_checkpoint,
)
from leaven.training.curves import Curves
from leaven.training.device import peak_memory, time_fixed_work
from leaven.training.loop import Callback
from leaven.training.spikes import (
    checkpoints_to_keep,
    first_in_each_interval,
)
from leaven.training.step_metrics import Step

if TYPE_CHECKING:
    from leaven.training.trainer import RunTrainer


class RunCallback(Callback[Step]):
    """A callback of a run that has a run folder."""

    def __init__(self, trainer: "RunTrainer") -> None:
        self.trainer, self.training = trainer, trainer.training


class StepLog(RunCallback):
    """Writes metrics.jsonl and curves for TensorBoard, W&B or trackio, calls ``on_step`` after each step, sends a
    heartbeat before each step, and logs when the batch grows."""

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
    """Computes the validation loss at an interval in tokens. It then compares the speed and memory of processes, to
    find a slow one."""

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
        """Return the validation loss in nats per token and in bits per byte."""
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


class Checkpoints(RunCallback):
    """Saves a checkpoint at a fixed interval in tokens, while training continues."""

    def __init__(self, trainer: "RunTrainer") -> None:
        super().__init__(trainer)
        recipe, stability = self.training.recipe, self.training.recipe.stability
        self.every_tokens = stability.checkpoint_every_tokens or max(recipe.data.tokens // 10, 1)
        self._manager = CheckpointManager(
            trainer.run.checkpoints,
            self.every_tokens,
            stability.keep,
            stability.keep_every_tokens,
            group=trainer.group,
        )
        self._saved_step = -1

    def after_step(self, step: Step) -> None:
        self.log_outcome(wait=False)

    def is_due(self, before: int, after: int) -> bool:
        return after // self.every_tokens > before // self.every_tokens

    def on_due(self) -> None:
        self.save()

    def save(self) -> None:
        """Wait until the previous checkpoint is written, then start writing a new one."""
        self.log_outcome(wait=True)
        training = self.training
        state = {key: value for each in self.trainer.callbacks for key, value in each.state().items()}
        checkpoint = replace(training.checkpoint(), state=state, rewinds=self.trainer.rewinds)
        self._manager.save(checkpoint, self.trainer.good_tokens)
        self._saved_step = training.progress.step

    def save_last(self) -> str | None:
        """Save the current state, unless it is saved already. Return the error if saving failed, else None."""
        self.log_outcome(wait=True)  # afterwards all processes know the same
        if self.training.progress.step != self._saved_step:
            self.save()
        return self.log_outcome(wait=True)

    def log_outcome(self, wait: bool) -> str | None:
        """Log the result of the last save, once. Return the error if saving failed, else None."""
        saved = self._manager.outcome(wait)
        if saved is None:
            return None
        at = {"step": saved.progress.step, "tokens": saved.progress.tokens}
        if saved.path is not None:
            self.trainer.event("checkpoint", **at, path=saved.path.name)
            self.trainer.profile.write()
        else:
            self._saved_step = -1
            self.trainer.event("checkpoint_failed", **at, why=saved.error)
        return saved.error

    def restore(self, state: Mapping[str, Any]) -> None:
        self._manager.clear(self.training.tokens, self.trainer.damaged)
        self._saved_step = self.training.progress.step

    def close(self) -> None:
        self._manager.close()


GIVE_UP = 5.0
"""Seconds for which :meth:`CheckpointManager.close` waits for other processes. A checkpoint is still being written at
that point only if the training has failed, and then the others may be gone."""


@dataclass(frozen=True)
class Saved:
    """The result of writing a checkpoint."""

    progress: Progress  # of the run in the checkpoint
    path: Path | None = None  # its folder; None if it could not be written
    error: str | None = None  # why it could not be written


class CheckpointManager:
    """Writes checkpoints in a thread, one at a time, and removes checkpoints that are no longer needed.

    ``keep`` is the number of scheduled checkpoints to keep; the scheduled checkpoint of an interval of
    ``every_tokens`` is the first one in it. An additional checkpoint, written when the run is stopped, does not
    count, so that a stopped run can roll back as far as an uninterrupted run.

    Every process of a run has a manager and calls the same methods at the same steps, from its main thread. The
    constructor and :meth:`clear` are collective. Only the first process moves and removes folders.
    """

    def __init__(
        self,
        folder: Path,
        every_tokens: int,
        keep: int,
        keep_every_tokens: int | None,
        *,
        group: ProcessGroup = SINGLE_PROCESS,
        timeout: timedelta = timedelta(minutes=30),
    ) -> None:
        self._folder, self._every, self._keep, self._keep_every = folder, every_tokens, keep, keep_every_tokens
        self._group, self._exchange = group, Exchange(group, timeout)
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[Saved] | None = None

    def save(self, checkpoint: Checkpoint, good_tokens: int) -> None:
        """Start writing a copy of the checkpoint. The newest scheduled checkpoint at or before ``good_tokens`` is
        always kept."""
        assert self._writing is None, "call outcome() first"
        self._writing = self._thread.submit(self._write, checkpoint.copied(), good_tokens)

    def outcome(self, wait: bool) -> Saved | None:
        """Return the result of the last save. Return None if the save is unfinished or its result was already
        returned. With ``wait``, all processes get the result in the same call; otherwise some processes may get it
        earlier than others.

        Raises:
            NoReply: if the first process does not report the result.
        """
        if self._writing is None or not (wait or self._writing.done()):
            return None
        saved, self._writing = self._writing.result(), None
        return saved

    def close(self) -> None:
        """Wait for a write in progress, and end the thread."""
        self._exchange.shorten_timeout(GIVE_UP)
        self._thread.shutdown()

    def clear(self, after_tokens: int, damaged: Sequence[Path] = ()) -> None:
        """Prepare the folder for a run that continues from ``after_tokens`` trained tokens: rename damaged
        checkpoints, and remove unfinished checkpoints and checkpoints after ``after_tokens``.

        Call :meth:`outcome` first. All processes wait for each other before and after, so that no process reads or
        writes a checkpoint in the meantime.
        """
        self._group.barrier()
        if self._group.is_first:
            self._clear(after_tokens, damaged)
        self._group.barrier()

    def _clear(self, after_tokens: int, damaged: Sequence[Path]) -> None:
        for path in self._folder.glob(UNFINISHED):
            shutil.rmtree(path, ignore_errors=True)
        for path in damaged:
            with suppress(OSError):
                path.replace(path.with_name(f"damaged-{path.name}"))
        for path in checkpoints(self._folder):
            if tokens_of(path) > after_tokens and path not in damaged:
                shutil.rmtree(path, ignore_errors=True)

    def _write(self, checkpoint: Checkpoint, good_tokens: int) -> Saved:
        def tidy() -> None:
            for old in self._superfluous(good_tokens):
                shutil.rmtree(old, ignore_errors=True)

        try:
            path = write_checkpoint(self._folder, checkpoint, self._exchange, tidy)
        except NotSaved as error:
            return Saved(checkpoint.progress, error=str(error))
        return Saved(checkpoint.progress, path)

    def _superfluous(self, good_tokens: int) -> list[Path]:
        there = checkpoints(self._folder)
        due = first_in_each_interval([tokens_of(path) for path in there], self._every, -1)
        stay = checkpoints_to_keep(due, good_tokens, self._keep, self._keep_every)
        return [path for path in there[:-1] if tokens_of(path) not in stay]
