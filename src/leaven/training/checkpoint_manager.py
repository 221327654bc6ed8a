"""Writes checkpoints while training continues, and removes checkpoints that are no longer needed."""

import shutil
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from leaven.distributed.exchange import Exchange
from leaven.distributed.process_group import SINGLE_PROCESS, ProcessGroup
from leaven.training.checkpoint import (
    UNFINISHED,
    Checkpoint,
    NotSaved,
    Progress,
    checkpoints,
    tokens_of,
    write_checkpoint,
)
from leaven.training.rewind import checkpoints_to_keep, first_in_each_interval

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
