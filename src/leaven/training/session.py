"""The training loop: steps, what is due between them, and what is done about trouble."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any, NoReturn

from leaven.distributed.world import ALONE, World
from leaven.planning.memory import GIB
from leaven.recipe.errors import InputError
from leaven.recipe.recipe import Difference
from leaven.training.checkpoint import Checkpoint, read_checkpoint
from leaven.training.engine import Diverged, Interrupted, Training
from leaven.training.gauge import Gauge
from leaven.training.keeper import Keeper
from leaven.training.metrics import Curves
from leaven.training.rewind import Rewind, oldest_checkpoint, rollback
from leaven.training.run_folder import RunFolder
from leaven.training.spikes import Guard, Trouble, left_out
from leaven.training.step import Issued, Step
from leaven.training.throughput import errand, mfu_convention, peak_memory


class Session:
    """One stretch of a run between a start and a stop: what is written, when, and what is done about trouble.

    A step is read when the next one has been handed to the device, so that the device never waits. What is due after
    a step waits until it has been read.
    """

    def __init__(
        self,
        run: RunFolder,
        training: Training,
        on_step: Callable[[Step], None],
        on_event: Callable[[str, dict[str, Any]], None],
        *,
        gauge: Gauge,
        log_to: Sequence[str],
        bits_per_byte_factor: float | None,
        world: World = ALONE,
    ) -> None:
        self._world = world
        self.run, self.training, self._on_step, self._on_event = run, training, on_step, on_event
        recipe = training.recipe
        tenth = max(recipe.data.tokens // 10, 1)
        self._save_every = recipe.stability.checkpoint_every_tokens or tenth
        self._evaluate_every = recipe.evaluation.every_tokens or tenth
        keep, keep_every = recipe.stability.keep, recipe.stability.keep_every_tokens
        self._gauge = gauge
        self._keeper = Keeper(run.checkpoints, self._save_every, keep, keep_every, world=world)
        self._rewinds = run.rewinds()
        self._guard: Guard | None = None
        self._ahead: Issued | None = None
        self._log_to, self._bits_per_byte_factor = log_to if world.first else (), bits_per_byte_factor
        self._curves: Curves | None = None
        self._no_room: str | None = None
        self._owes_validation = False
        self._batch_tokens = self._saved_step = 0
        self.unsaved: str | None = None
        found, damaged = self._newest(self._rewinds)
        self._take_up(found, damaged)
        self.event(
            "start" if found is None else "resume",
            device=str(training.device),
            text=training.text,
            epochs=training.epochs,
            damaged_checkpoints=[path.name for path in damaged],
            **self._batch(),
            mfu_convention=mfu_convention(training.peak) if training.peak else None,
            peak_tflops=training.peak.flops / 1e12 if training.peak else None,
        )
        self._gauge.write()
        if found is None:
            self._save()

    def train(self, stop: Callable[[], bool]) -> dict[str, Any] | None:
        """To the end or to a stop: loss and bits per byte of the validation of a run that is done, None of one that
        was stopped; ``unsaved`` then says why it could not be saved."""
        self.training.stop = stop
        try:
            if self._owes_validation:
                self._evaluate()
            while not stop():
                if not self.training.finished:
                    self._advance()
                elif self._hear(None):  # the last step may take the run back
                    break
            self._hear(None)
            ended = self._evaluate() if self.training.finished else None
        except Interrupted:
            self.training.give_up()
            self._hear(None)
            ended = None
        self._checkpoint_written(wait=True)  # all processes come to the same: each has heard what became of it
        if self.training.progress.step != self._saved_step:
            self._save()
        error = self._checkpoint_written(wait=True)
        if ended is None:
            self.unsaved = error
            self.event("stop", why="interrupted")
            return None
        if error is not None:
            raise InputError(
                f"{self.run.checkpoints}: checkpoint not saved: {error}; make room and run the same command again"
            )
        if not math.isfinite(ended["loss"]):
            self._stop({"why": f"the validation loss is {ended['loss']:g}: the run is lost"})
        self.event("finish", **ended, seconds=self.training.progress.seconds)
        self.run.written()
        return ended

    def rearrange(self, changes: list[Difference]) -> None:
        """Tell that the run goes on with another layout or micro-batch, and keep that."""
        training = self.training
        training.recipe = self.run.rearrange(training.recipe, changes, training.progress.tokens)
        told = [{"path": path, "before": before, "after": after} for path, before, after in changes]
        self.event("layout", changes=told, recipe=training.recipe.model_dump(mode="json", exclude_none=True))

    def close(self) -> None:
        self._keeper.close()
        self._gauge.close()
        if self._curves:
            self._curves.close()

    def _advance(self) -> None:
        """Issue a step, read the one before, and do what is due."""
        training, before = self.training, self.training.progress
        if self._next_batch() != self._batch_tokens:
            self._batch_tokens = self._next_batch()
            self.event("ramp", **self._batch())
        self._world.sign(f"in step {before.step + 1}")
        issued = training.issue(self._guard.limits(before.step + 1) if self._guard else None)
        if not self._hear(issued) or training.finished:
            return
        evaluate, save = (
            training.progress.tokens // every > before.tokens // every
            for every in (self._evaluate_every, self._save_every)
        )
        if (evaluate or save) and self._hear(None):
            if evaluate:
                self._evaluate()
            if save:
                self._save()

    def _hear(self, issued: Issued | None) -> bool:
        """Read the step before the one that was issued now, if any; whether the run goes on from there."""
        ahead, self._ahead = self._ahead, issued
        if ahead is None:
            return True
        step = ahead.result()
        line = asdict(step)
        if self.training.noise is None:
            del line["noise_scale"]
        self.run.record(line)
        if self._curves:
            self._curves.step(step)
        self._gauge.step(step)
        trouble = self._guard.observe(step) if self._guard else None
        self._on_step(step)
        self._checkpoint_written(wait=False)
        if trouble is not None:
            self._ahead = None
            self._decide(trouble)
        elif self._guard and left_out(step):
            told = {key: getattr(step, key) for key in ("step", "tokens", "loss", "grad_norm")}
            self.event("skip", **told, limits=asdict(self._guard.limits(step.step)))
        return trouble is None

    def _decide(self, trouble: Trouble) -> None:
        """Go back, or stop."""
        self._checkpoint_written(wait=True)
        recipe = self.training.recipe
        oldest = oldest_checkpoint(self._rewinds, trouble, recipe.batches, recipe.stability, self._save_every)
        rewind = rollback(self._rewinds, trouble, recipe.batches, recipe.stability, oldest)
        tokens, limit = recipe.batches.tokens_at_step(trouble.step), recipe.stability.max_rollbacks
        told: dict[str, Any] = {"step": trouble.step, "tokens": tokens, "why": trouble.why}
        told |= {"onset": trouble.onset, "numbers": trouble.numbers}
        if recipe.stability.on_spike != "rollback":
            self._stop(told)
        if rewind.attempt > limit:
            self._stop(told | {"why": f"{trouble.why}; {limit} rollbacks did not pass it"})
        told |= asdict(rewind) | {"attempts": limit}
        found, damaged = self._newest((*self._rewinds, rewind))
        if found is None:
            self._stop(told | {"why": f"{trouble.why}; no checkpoint is left to go back to"})
        # The decision is made once this line is on the disk. Killed from here on, the run takes up the same state.
        self.run.event("rollback", **told)
        self._rewinds = (*self._rewinds, rewind)
        seconds = self.training.progress.seconds
        self._take_up(found, damaged)
        self.training.progress = replace(found.progress, seconds=seconds)
        names = [path.name for path in damaged]
        self._on_event("rollback", told | {"from_tokens": found.progress.tokens, "damaged_checkpoints": names})

    def _stop(self, told: dict[str, Any]) -> NoReturn:
        self.event("stop", **told)
        raise Diverged(told["why"])

    def _newest(self, rewinds: tuple[Rewind, ...]) -> tuple[Checkpoint | None, list[Path]]:
        """The newest whole checkpoint that these returns have not undone, and the damaged ones passed over.

        Raises:
            InputError: if none of them is whole. Nothing has been touched: what they hold may still be saved.
        """
        found, damaged = read_checkpoint(self.run.checkpoints, rewinds, world=self._world)
        if found is None and damaged:
            raise InputError(
                f"{self.run.checkpoints}: every checkpoint is damaged ({', '.join(path.name for path in damaged)}); "
                "put a whole one back, or begin anew with another --run"
            )
        return found, damaged

    def _take_up(self, found: Checkpoint | None, damaged: Sequence[Path]) -> None:
        """Be where a checkpoint is, in memory and in the folder."""
        training, on_spike = self.training, self.training.recipe.stability.on_spike
        self._guard = None if on_spike == "off" else Guard(skipping=on_spike == "skip")
        if found is not None:
            self._rewinds = max(self._rewinds, found.rewinds, key=len)
            training.restore(found)
            if self._guard and "guard" in found.state:
                self._guard.load_state_dict(found.state["guard"])
        # A stop may have come in the middle of it.
        self._owes_validation = found is not None and found.state.get("owes_validation", False)
        training.follow(self._rewinds)
        progress = training.progress
        self._keeper.clear(progress.tokens, damaged)
        self.run.rewind(progress.step)
        self._saved_step = progress.step if found is not None else -1
        self._batch_tokens = self._next_batch()
        if self._curves:
            self._curves.close()
        self._curves = Curves(self._log_to, self.run.path, training.recipe, progress.tokens, lost=self._curves_lost)

    def _next_batch(self) -> int:
        return self.training.recipe.batches.batch_at(self.training.progress.tokens)

    def _batch(self) -> dict[str, int]:
        size, _ = self.training.forwards(self._batch_tokens // self.training.recipe.model.seq_len)
        return {"batch_tokens": self._batch_tokens, "micro_batch": size}

    def _curves_lost(self, writer: str, why: str) -> None:
        self.event("curves_lost", writer=writer, why=why)

    def _evaluate(self) -> dict[str, Any]:
        self._world.sign(f"in the validation after step {self.training.progress.step}")
        self._owes_validation = True
        loss, factor = self.training.evaluate(), self._bits_per_byte_factor
        self._owes_validation = False
        values = {"loss": loss, "bits_per_byte": loss * factor if factor else None}
        self.event("validation", **values)
        if self._world.size > 1:
            self._compare_processes()
        if self._curves:
            self._curves.validation(self.training.progress.step, self.training.progress.tokens, values)
        return values

    def _compare_processes(self) -> None:
        """Which of them is slowest at the same work, and which holds most: all wait for the slowest."""
        device = self.training.device
        everyone = self._world.everyone([errand(device), peak_memory(device) / GIB])
        seconds, memory = zip(*everyone, strict=True)
        slowest, fullest = seconds.index(max(seconds)), memory.index(max(memory))
        ratio = max(seconds) / median(seconds)
        self._gauge.fullest(max(memory))
        self.event("ranks", slowest=slowest, times_the_median=ratio, fullest=fullest, memory_gib=max(memory))

    def _save(self) -> None:
        self._checkpoint_written(wait=True)
        training, since = self.training, self._guard.since if self._guard else None
        good = training.progress.tokens if since is None else training.recipe.batches.tokens_at_step(since - 1)
        state: dict[str, Any] = {"guard": self._guard.state_dict()} if self._guard else {}
        if self._owes_validation and not training.finished:
            state["owes_validation"] = True
        self._keeper.save(replace(training.checkpoint(), state=state, rewinds=self._rewinds), good)
        self._saved_step = training.progress.step

    def _checkpoint_written(self, wait: bool) -> str | None:
        """Tell what became of the last checkpoint, once; why it is not there."""
        saved = self._keeper.outcome(wait)
        if saved is None:
            return None
        at = {"step": saved.progress.step, "tokens": saved.progress.tokens}
        if saved.path is not None:
            self.event("checkpoint", **at, path=saved.path.name)
            self._gauge.write()
        else:
            self._saved_step = -1
            self.event("checkpoint_failed", **at, why=saved.error)
        return saved.error

    def event(self, name: str, **values: Any) -> None:
        progress = self.training.progress
        values = {"step": progress.step, "tokens": progress.tokens} | values
        self.run.event(name, **values)
        self._on_event(name, values)
        if self.run.unwritten != self._no_room:
            self._no_room = self.run.unwritten
            if self._no_room is not None:
                self._on_event("unwritten", values | {"why": self._no_room})
