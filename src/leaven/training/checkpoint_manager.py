"""Saves the checkpoints of a run in a thread while training continues, and chooses which of them are kept."""

import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leaven.distributed.exchange import Exchange
from leaven.distributed.process_group import SINGLE_PROCESS, ProcessGroup
from leaven.training.checkpoint import UNFINISHED, Checkpoint, NotSaved, Progress, write_checkpoint
from leaven.training.loop import Callback
from leaven.training.run_folder import checkpoints, tokens_of

if TYPE_CHECKING:
    from leaven.training.step_metrics import Step
    from leaven.training.trainer import RunTrainer

GIVE_UP = 5.0
""":meth:`CheckpointManager.close` waits this many seconds for other processes. If a checkpoint is still being written
then, the training has failed, and the other processes may be gone."""


@dataclass(frozen=True)
class Saved:
    """The result of writing a checkpoint."""

    progress: Progress  # position of the run that is saved in the checkpoint
    path: Path | None = None  # folder of the checkpoint; None if it could not be written
    error: str | None = None  # why the checkpoint could not be written; None if it was written


class CheckpointManager:
    """Writes checkpoints in a thread, one at a time, and removes checkpoints that are no longer needed.

    The first checkpoint in each interval of ``every_tokens`` is a scheduled checkpoint. The newest ``keep`` scheduled
    checkpoints are kept. A stopped run writes an additional checkpoint, which is not scheduled and not counted. So a
    stopped run can roll back as far as an uninterrupted run.

    Every process of a run has a manager and calls the same methods at the same steps, from its main thread. All
    processes take part in the constructor and in :meth:`clear`. Only the first process moves and removes folders.
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
        """Start writing a copy of the checkpoint.

        ``good_tokens`` is the token count up to which the run shows no loss spike. The newest scheduled checkpoint at
        or before this count is always kept, so that the run can return to it.
        """
        assert self._writing is None, "call outcome() first"
        self._writing = self._thread.submit(self._write, checkpoint.copied(), good_tokens)

    def outcome(self, wait: bool) -> Saved | None:
        """Return the result of the last save. Return None if the save is unfinished or its result was already
        returned. With ``wait``, all processes get the result in the same call; otherwise some processes may get it
        earlier than others.

        Raises:
            ProcessLost: if the first process does not report the result.
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
            for path in self._folder.glob(UNFINISHED):
                shutil.rmtree(path, ignore_errors=True)
            for path in damaged:
                with suppress(OSError):
                    path.replace(path.with_name(f"damaged-{path.name}"))
            for path in checkpoints(self._folder):
                if tokens_of(path) > after_tokens and path not in damaged:
                    shutil.rmtree(path, ignore_errors=True)
        self._group.barrier()

    def _write(self, checkpoint: Checkpoint, good_tokens: int) -> Saved:
        def tidy() -> None:
            there = checkpoints(self._folder)
            due = first_in_each_interval([tokens_of(path) for path in there], self._every)
            stay = checkpoints_to_keep(due, good_tokens, self._keep, self._keep_every)
            for path in there[:-1]:
                if tokens_of(path) not in stay:
                    shutil.rmtree(path, ignore_errors=True)

        try:
            path = write_checkpoint(self._folder, checkpoint, self._exchange, tidy)
        except NotSaved as error:
            return Saved(checkpoint.progress, error=str(error))
        return Saved(checkpoint.progress, path)


def checkpoints_to_keep(due: Sequence[int], good_tokens: int, keep: int, keep_every_tokens: int | None) -> list[int]:
    """Return the token counts of the checkpoints to keep, in ascending order.

    ``due`` are the token counts of all scheduled checkpoints, in ascending order. The function keeps the newest
    ``keep`` checkpoints, the last checkpoint at or before ``good_tokens``, and the first checkpoint in each interval
    of ``keep_every_tokens`` except the interval that starts at 0.
    """
    stay = {*due[-keep:], *[tokens for tokens in due if tokens <= good_tokens][-1:]}
    if keep_every_tokens is not None:
        stay |= {tokens for tokens in first_in_each_interval(due, keep_every_tokens) if tokens >= keep_every_tokens}
    return sorted(stay)


def first_in_each_interval(there: Sequence[int], every_tokens: int) -> list[int]:
    """Return the lowest token count in each interval of ``every_tokens`` tokens. ``there`` are the token counts, in
    ascending order."""
    return sorted({tokens // every_tokens: tokens for tokens in reversed(there)}.values())


class Checkpoints(Callback):
    """Callback that saves a checkpoint at a fixed interval in tokens, while training continues."""

    every_tokens: int

    def __init__(self, trainer: "RunTrainer") -> None:
        self.trainer, self.training = trainer, trainer.training
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

    def after_step(self, step: "Step") -> None:
        self.log_outcome(wait=False)

    def on_due(self) -> None:
        self.save()

    def save(self) -> None:
        """Wait until the previous checkpoint is written, then start writing a new one."""
        self.log_outcome(wait=True)
        training = self.training
        state = {key: value for each in self.trainer.callbacks for key, value in each.state().items()}
        self._manager.save(training.checkpoint(state), self.trainer.spikes.good_tokens)
        self._saved_step = training.progress.step

    def save_last(self) -> str | None:
        """Save the current state, unless it is saved already. Return the error if saving failed, else None."""
        self.log_outcome(wait=True)  # afterwards all processes have the same saved step
        if self.training.progress.step != self._saved_step:
            self.save()
        return self.log_outcome(wait=True)

    def log_outcome(self, wait: bool) -> str | None:
        """Log the result of the last save, once. Return the error if saving failed, else None. Without ``wait``, a
        save that is unfinished is logged by a later call."""
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
