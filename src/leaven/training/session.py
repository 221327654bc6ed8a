"""One stretch of a run in its folder, between a start and a stop."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from leaven.distributed.process_group import SINGLE_PROCESS, ProcessGroup
from leaven.recipe.errors import InputError
from leaven.recipe.recipe import Difference
from leaven.training.callbacks import (
    Announcements,
    Checkpoints,
    MetricsWriter,
    OnStep,
    SpikeGuard,
    Validation,
)
from leaven.training.checkpoint import Checkpoint, read_checkpoint
from leaven.training.engine import StopRequested, Training
from leaven.training.loop import Callback, Diverged, Loop
from leaven.training.rewind import Rewind
from leaven.training.run_folder import RunFolder
from leaven.training.run_profile import RunProfile
from leaven.training.step import Step
from leaven.training.throughput import mfu_convention


class Session:
    """A run folder, a training that continues from its newest checkpoint, and the callbacks of its loop."""

    def __init__(
        self,
        run: RunFolder,
        training: Training,
        on_step: Callable[[Step], None],
        on_event: Callable[[str, dict[str, Any]], None],
        *,
        profile: RunProfile,
        log_to: Sequence[str],
        bits_per_byte_factor: float | None,
        group: ProcessGroup = SINGLE_PROCESS,
    ) -> None:
        self.run, self.training, self.group, self.profile, self._on_event = run, training, group, profile, on_event
        self.rewinds = run.rewinds()
        self.unsaved: str | None = None  # why a run that was stopped could not be saved
        self.damaged: list[Path] = []  # checkpoints that were passed over
        self._no_room: str | None = None
        announcements = Announcements(self)
        self.metrics = MetricsWriter(self, log_to)
        self.validation = Validation(self, bits_per_byte_factor)
        self.checkpoints = Checkpoints(self)
        self.spikes = SpikeGuard(self)
        screen = OnStep(self, on_step)
        # The guard is last: what is to be written of a step is there before the run goes back.
        self.callbacks: list[Callback[Step]] = [
            announcements, self.metrics, profile, screen, self.validation, self.checkpoints, self.spikes
        ]  # fmt: skip
        self.loop = Loop(training, self.callbacks, lookahead=True)
        found = self._newest(self.rewinds)
        self._restore(found)
        self.event(
            "start" if found is None else "resume",
            device=str(training.device),
            text=training.text,
            epochs=training.epochs,
            damaged_checkpoints=[path.name for path in self.damaged],
            **announcements.batch(),
            mfu_convention=mfu_convention(training.peak) if training.peak else None,
            peak_tflops=training.peak.flops / 1e12 if training.peak else None,
        )
        profile.write()
        if found is None:
            self.checkpoints.save()

    def train(self, stop: Callable[[], bool]) -> dict[str, Any] | None:
        """Train until done or stopped. Returns the loss and bits per byte of the last validation, or None if stopped;
        ``unsaved`` then says why the run could not be saved."""
        self.training.stop = stop
        try:
            if self.validation.owed:
                self.validation.evaluate()
            ended = self.validation.evaluate() if self.loop.run(stop) else None
        except StopRequested:
            self.training.abandon_step()
            self.loop.read()
            ended = None
        error = self.checkpoints.save_last()
        if ended is None:
            self.unsaved = error
            self.event("stop", why="interrupted")
            return None
        if error is not None:
            raise InputError(
                f"{self.run.checkpoints}: checkpoint not saved: {error}; make room and run the same command again"
            )
        if not math.isfinite(ended["loss"]):
            self.fail({"why": f"the validation loss is {ended['loss']:g}: the run is lost"})
        self.event("finish", **ended, seconds=self.training.progress.seconds)
        self.run.written()
        return ended

    def rearrange(self, changes: list[Difference]) -> None:
        """Log that the run continues with another layout or micro-batch, and keep that."""
        training = self.training
        training.recipe = self.run.rearrange(training.recipe, changes, training.tokens)
        told = [{"path": path, "before": before, "after": after} for path, before, after in changes]
        self.event("layout", changes=told, recipe=training.recipe.model_dump(mode="json", exclude_none=True))

    def close(self) -> None:
        for callback in self.callbacks:
            callback.close()

    @property
    def good_tokens(self) -> int:
        """The tokens trained before the first step that is suspicious still."""
        since = self.spikes.guard.since if self.spikes.guard else None
        return self.training.tokens if since is None else self.training.recipe.batches.tokens_at_step(since - 1)

    def roll_back(self, rewind: Rewind, told: dict[str, Any]) -> None:
        """Continue from the newest checkpoint that the rewind does not undo. The seconds spent stay spent."""
        found = self._newest((*self.rewinds, rewind))
        if found is None:
            self.fail(told | {"why": f"{told['why']}; no checkpoint is left to go back to"})
        # The decision is made once this line is on the disk: killed from here on, the run resumes the same way.
        self.run.event("rollback", **told)
        self.rewinds = (*self.rewinds, rewind)
        seconds = self.training.progress.seconds
        self._restore(found)
        self.training.progress = replace(found.progress, seconds=seconds)
        names = [path.name for path in self.damaged]
        self._on_event("rollback", told | {"from_tokens": found.progress.tokens, "damaged_checkpoints": names})

    def fail(self, told: dict[str, Any]) -> NoReturn:
        """Log why the run is lost, and end it."""
        self.event("stop", **told)
        raise Diverged(told["why"])

    def event(self, name: str, **values: Any) -> None:
        """Log an event, and tell whoever watches."""
        values = {"step": self.training.progress.step, "tokens": self.training.tokens} | values
        self.run.event(name, **values)
        self._on_event(name, values)
        if self.run.unwritten != self._no_room:
            self._no_room = self.run.unwritten
            if self._no_room is not None:
                self._on_event("unwritten", values | {"why": self._no_room})

    def _newest(self, rewinds: tuple[Rewind, ...]) -> Checkpoint | None:
        """The newest whole checkpoint that these rewinds have not undone; ``damaged`` are those passed over.

        Raises:
            InputError: if none of them is whole. Nothing has been touched: what they hold may still be saved.
        """
        found, damaged = read_checkpoint(self.run.checkpoints, rewinds, group=self.group)
        if found is None and damaged:
            raise InputError(
                f"{self.run.checkpoints}: every checkpoint is damaged ({', '.join(path.name for path in damaged)}); "
                "put a whole one back, or begin anew with another --run"
            )
        self.damaged = damaged
        return found

    def _restore(self, found: Checkpoint | None) -> None:
        """Continue from a checkpoint, in memory and in the folder; from the start without."""
        if found is not None:
            self.rewinds = max(self.rewinds, found.rewinds, key=len)
            self.training.restore(found)
        self.training.follow(self.rewinds)
        for callback in self.callbacks:
            callback.restore(found.state if found is not None else {})
