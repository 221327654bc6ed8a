"""Trains a recipe in a run folder.

What ``leaven train`` does from start to end:

1. The recipe is read and checked (``recipe/files.py``), and its text is tokenised or read from the cache
   (``data/tokens.py``). Sample n of the token stream depends only on the seed and n, so the stream has no state to
   save.
2. :func:`train` checks the run folder, builds the run's state (``engine.py``) and chooses the micro-batch; a
   resumed run keeps the one it has. Initial values are drawn from the parameter table and the seed. The table also
   gives each parameter its lr: base lr x multiplier of its module x multiplier of its depth x factor of the scaling
   rule (``scaling/table.py``). For example, complete-d-p gives a hidden matrix the factor I^-1 L^(alpha-1) B^(1/2)
   D^-t, where I, L, B and D are the ratios of its fan in, the depth, the batch and the tokens to those of the base
   model.
3. If the folder has a checkpoint, the run continues from the newest whole one (``checkpoint.py``).
4. :class:`RunTrainer` takes optimizer steps (``Training.issue`` in ``engine.py``, which ends in AdamW's step in
   ``optimizer.py``). In each step, the lr of every parameter is multiplied by the schedule at the tokens trained
   after this step, and by the factor of recent rewinds. The loop (``loop.py``) reads the result of a step only
   after it has started the next one, so that the device never waits.
5. Callbacks act around the steps. The step log (``step_metrics.py``) writes one line to metrics.jsonl with loss,
   lr, norms and speed. ``RunProfile`` compares time and memory with the plan and writes plan.json. Validation is in
   this file, checkpoints are in ``checkpoint.py``. The spike guard (``spikes.py``) rolls back to an earlier
   checkpoint, skips the steps or ends the run. ``run_folder.py`` determines what data a rewind skips and how it
   lowers the lr.
6. :class:`RunTrainer` returns the result as a ``TrainDocument``. ``leaven train`` prints its validation loss,
   tokens, steps and time, and the commands to type next.
"""

import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NoReturn

from leaven.data.tokenizer import bits_per_byte_factor
from leaven.distributed.process_group import SINGLE_PROCESS, ProcessGroup
from leaven.documents.runs import TrainDocument
from leaven.planning.flops import utilisation
from leaven.planning.memory import GIB
from leaven.recipe.errors import InputError, Settled, out_of_memory
from leaven.recipe.recipe import Difference, Recipe, rearrangement
from leaven.training.checkpoint import Checkpoint, Checkpoints, Progress, checkpoints, read_checkpoint, tokens_of
from leaven.training.device import (
    default_device,
    device_peak,
    held_memory,
    mfu_convention,
    peak_memory,
    reset_peak_memory,
    time_fixed_work,
)
from leaven.training.engine import StopRequested, Training
from leaven.training.loop import Callback, Diverged, Loop
from leaven.training.measured import RunProfile
from leaven.training.micro_batch import as_started, by_rule_of_thumb, choose_micro_batch, require_memory
from leaven.training.run_folder import ManualRewind, Rewind, RunFolder, logged
from leaven.training.spikes import SpikeGuard
from leaven.training.step_metrics import Step, StepLog

if TYPE_CHECKING:
    from leaven.data.tokens import TokenSet


def train(
    recipe: Recipe,
    tokens: "TokenSet",
    folder: Path,
    *,
    on_step: Callable[[Step], None] = lambda step: None,
    on_event: Callable[[str, dict[str, Any]], None] = lambda event, values: None,
    stop: Callable[[], bool] = lambda: False,
    log_to: Sequence[str] = (),
    back: ManualRewind | None = None,
    group: ProcessGroup = SINGLE_PROCESS,
    history: bool = True,
) -> TrainDocument:
    """Train a recipe in a run folder. If the folder has whole checkpoints, continue from the newest one.

    On one device, the losses are bit-identical no matter how often the run is stopped or killed. Every process of a
    ``group`` must call this with the same arguments.

    Args:
        on_step: called with the metrics of each step, once it is done.
        on_event: called with the name and values of each line of events.jsonl.
        stop: polled before every forward pass of a single process, and between the steps of several processes. When
            it returns True, the current step is abandoned, the state before that step is saved, and the result is not
            ``finished``.
        log_to: writers of curves (:data:`leaven.training.step_metrics.WRITERS`).
        back: a manual rewind to do first. It is done only once: if the call is repeated, the run resumes.
        history: whether to add step times to the calibration history. Set it to False for runs that share a machine.

    Raises:
        InputError: if the folder contains a run of another recipe, is in use, or cannot be written.
        Diverged: if an anomaly occurs and ``on_spike`` is ``stop``, if rolling back does not help, or if too many
            steps in a row are skipped.
    """
    run, recipe, back = check(recipe, folder, back)
    run.check_text(tokens.fingerprint)
    finish = run.finish() if back is None else None
    if finish is not None:
        return _summary(run, Progress(finish["step"], finish["tokens"], finish["seconds"]), finish)
    if recipe.batch.micro_batch == "auto":
        require_memory(recipe)
        if group is not SINGLE_PROCESS:  # timing that ran out of memory on one device would block the others
            recipe = by_rule_of_thumb(recipe)
    memory_before, choice = held_memory(default_device()), None
    # Nothing is written up to here, so that a recipe that cannot be trained leaves no folder.
    training = Training(recipe, tokens, group=group)
    training.stop = stop
    if recipe.batch.micro_batch == "auto":
        try:
            choice = choose_micro_batch(training)
        except StopRequested:
            return _summary(run, training.progress, None, "before its first step")
        training.set_micro_batch(choice.micro_batch, choice.why)
    training.peak = device_peak(training.device, recipe.precision.compute)
    factor = bits_per_byte_factor(tokens.tokenizer_path, training.validation_targets())
    moved = rearrangement(run.recipe(), training.recipe) if run.recipe_file.exists() else []
    with _no_folder_of_a_failed_start(run), _opened(run, training.recipe, back, group):
        run.keep_tokenizer(tokens.tokenizer_path)
        reset_peak_memory(training.device)  # timing may have used more than training does
        profile = RunProfile(run, training, memory_before, history)
        trainer = RunTrainer(run, training, on_step, on_event, profile, log_to, factor)
        try:
            trainer.start(tokens)
            if moved:
                trainer.rearrange(moved)
            if choice is not None:
                trainer.event("micro_batch", **asdict(choice))
            finish = trainer.train(lambda: group.any(stop()))
        finally:
            for callback in trainer.callbacks:
                callback.close()
        return _summary(run, training.progress, finish, trainer.unsaved)


class RunTrainer:
    """Trains a run in its folder, from one start to the next stop. It starts from the newest checkpoint."""

    def __init__(  # noqa: PLR0917
        self,
        run: RunFolder,
        training: Training,
        on_step: Callable[[Step], None],
        on_event: Callable[[str, dict[str, Any]], None],
        profile: RunProfile,
        log_to: Sequence[str],
        bits_per_byte_factor: float | None,
    ) -> None:
        self.run, self.training, self.profile, self._on_event = run, training, profile, on_event
        self.group = training.group
        self.rewinds = run.rewinds()
        self.unsaved: str | None = None  # why a stopped run could not be saved
        self.damaged: list[Path] = []  # damaged checkpoints that are newer than the loaded one
        self._unwritten: str | None = None  # why lines could not be written to the disk
        self.log = StepLog(self, log_to, on_step)
        self.validation = Validation(self, bits_per_byte_factor)
        self.checkpoints = Checkpoints(self)
        self.spikes = SpikeGuard(self)
        # The guard is last: everything about a step is written before the run rolls back.
        self.callbacks: list[Callback] = [self.log, profile, self.validation, self.checkpoints, self.spikes]
        self.loop = Loop(training, self.callbacks, lookahead=True)

    def start(self, tokens: "TokenSet") -> None:
        """Continue from the newest checkpoint, or start a new run. A new run saves a checkpoint before its first
        step, so that it can always roll back."""
        found = self._newest(self.rewinds)
        self._restore(found)
        peak = self.training.peak
        self.event(
            "start" if found is None else "resume",
            device=str(self.training.device),
            text=tokens.fingerprint,
            epochs=tokens.epochs(self.training.recipe.data.tokens),
            damaged_checkpoints=[path.name for path in self.damaged],
            **self.log.batch(),
            mfu_convention=mfu_convention(peak) if peak else None,
            peak_tflops=peak.flops / 1e12 if peak else None,
        )
        self.profile.write()
        if found is None:
            self.checkpoints.save()

    def train(self, stop: Callable[[], bool]) -> dict[str, Any] | None:
        """Train until the run is done or stopped. Return the loss and the bits per byte of the last validation, or
        None if stopped. If the stopped run could not be saved, :attr:`unsaved` is the reason."""
        self.training.stop = stop
        try:
            if self.validation.owed:
                self.validation.evaluate()
            result = self.validation.evaluate() if self.loop.run(stop) else None
        except StopRequested:
            self.training.abandon_step()
            self.loop.read()
            result = None
        error = self.checkpoints.save_last()
        if result is None:
            self.unsaved = error
            self.event("stop", why="interrupted")
            return None
        if error is not None:
            raise InputError(
                f"{self.run.checkpoints}: checkpoint not saved: {error}; make room and run the same command again"
            )
        if not math.isfinite(result["loss"]):
            self.fail({"why": f"the validation loss is {result['loss']:g}: the run has diverged"})
        self.event("finish", **result, seconds=self.training.progress.seconds)
        self.run.require_written()
        return result

    def rearrange(self, changes: list[Difference]) -> None:
        """Log that the run continues with another layout or micro-batch, and write the changes into its recipe."""
        training = self.training
        training.recipe = self.run.change_recipe(training.recipe, changes, f"{training.tokens:,} tokens")
        self.event("layout", **logged(changes, training.recipe))

    @property
    def good_tokens(self) -> int:
        """The number of tokens trained before the first step that may belong to an anomaly. If there is no such step,
        the number of tokens trained so far."""
        since = self.spikes.detector.since if self.spikes.detector else None
        return self.training.tokens if since is None else self.training.recipe.batches.tokens_at_step(since - 1)

    def roll_back(self, rewind: Rewind, values: dict[str, Any]) -> None:
        """Continue from the newest checkpoint that the rewind does not undo. The run keeps its count of seconds."""
        found = self._newest((*self.rewinds, rewind))
        if found is None:
            self.fail(values | {"why": f"{values['why']}; no checkpoint is left to go back to"})
        # The rollback is final once this line is on the disk: if the run is killed later, it resumes rolled back.
        self.run.event("rollback", **values)
        self.rewinds = (*self.rewinds, rewind)
        seconds = self.training.progress.seconds
        self._restore(found)
        self.training.progress = replace(found.progress, seconds=seconds)
        names = [path.name for path in self.damaged]
        self._on_event("rollback", values | {"from_tokens": found.progress.tokens, "damaged_checkpoints": names})

    def fail(self, values: dict[str, Any]) -> NoReturn:
        """Log why the run failed, and end it by raising Diverged."""
        self.event("stop", **values)
        raise Diverged(values["why"])

    def event(self, name: str, **values: Any) -> None:
        """Write an event to the run folder and pass it to ``on_event``."""
        values = {"step": self.training.progress.step, "tokens": self.training.tokens} | values
        self.run.event(name, **values)
        self._on_event(name, values)
        if self.run.unwritten != self._unwritten:
            self._unwritten = self.run.unwritten
            if self._unwritten is not None:
                self._on_event("unwritten", values | {"why": self._unwritten})

    def _newest(self, rewinds: tuple[Rewind, ...]) -> Checkpoint | None:
        """Return the newest undamaged checkpoint that these rewinds have not undone, or None. Set ``damaged`` to the
        newer checkpoints, which are damaged.

        Raises:
            InputError: if all checkpoints are damaged. Nothing has been changed, so the user may still be able to
                repair them.
        """
        found, damaged = read_checkpoint(self.run.checkpoints, rewinds, group=self.group)
        if found is None and damaged:
            raise InputError(
                f"{self.run.checkpoints}: every checkpoint is damaged ({', '.join(path.name for path in damaged)}); "
                "restore an undamaged copy, or start again with another --run"
            )
        self.damaged = damaged
        return found

    def _restore(self, found: Checkpoint | None) -> None:
        """Restore the training and its callbacks from a checkpoint, or to the start if ``found`` is None."""
        if found is not None:
            self.rewinds = max(self.rewinds, found.rewinds, key=len)
            self.training.restore(found)
        self.training.follow(self.rewinds)
        for callback in self.callbacks:
            callback.restore(found.state if found is not None else {})


class Validation(Callback):
    """Computes the validation loss at a fixed interval in tokens. If the run has several processes, it then compares
    their speed and memory, to find a slow process."""

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


@contextmanager
def _opened(run: RunFolder, recipe: Recipe, back: ManualRewind | None, group: ProcessGroup) -> Iterator[None]:
    """Wait until every process has read the run folder. Then do the rewind ``back``, if any, and lock the folder in
    the first process, which alone writes to it."""
    group.barrier()
    run.writes = group.is_first
    with ExitStack() as stack:
        refused: str | None = None
        try:
            if back is not None and group.is_first:
                back.go(run, recipe)
            if group.is_first:
                stack.enter_context(run.opened(recipe))
        except InputError as error:
            refused = str(error)
        refused = group.broadcast(refused)
        if refused is not None:
            raise Settled(refused)
        yield


@contextmanager
def _no_folder_of_a_failed_start(run: RunFolder) -> Iterator[None]:
    """Remove the folder of a new run if memory runs out before the end of its first step."""
    new = not run.path.exists()
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if new and run.writes and out_of_memory(error) and not run.metrics():
            shutil.rmtree(run.path, ignore_errors=True)
        raise


def check(
    recipe: Recipe, folder: Path, back: ManualRewind | None = None
) -> tuple[RunFolder, Recipe, ManualRewind | None]:
    """Check a recipe and a rewind against a folder. Return the run folder, the recipe with which the run will be
    trained, and the rewind. The rewind is None if it has been done already.

    Raises:
        InputError: if the folder cannot be used for this run, or the rewind is not possible.
    """
    run, recipe = RunFolder(folder), as_started(recipe, folder)
    if back is not None and not back.done(run, recipe):
        back.check(run, recipe)
        return run, recipe, back
    run.check(recipe)
    return run, recipe, None


def _summary(
    run: RunFolder, progress: Progress, finish: dict[str, Any] | None, unsaved: str | None = None
) -> TrainDocument:
    """Return the result of a run so far, summed over all its starts."""
    # Each start may have measured another peak; the speed of all steps is divided by the latest.
    starts = [event for event in run.events() if event.get("peak_tflops")]
    metrics = run.metrics()
    speeds = [line["tflops"] for line in metrics]
    noise = [line["noise_scale"] for line in metrics if line.get("noise_scale") is not None]
    used: dict[str, Any] = dict.fromkeys(("mfu", "mfu_causal", "hfu"))
    if starts and speeds:
        recipe = run.recipe()
        mfu = median(speeds) / starts[-1]["peak_tflops"]
        used = utilisation(recipe.model, recipe.layout.recompute, mfu)
    return TrainDocument(
        loss=finish["loss"] if finish else None,
        tokens=progress.tokens,
        steps=progress.step,
        seconds=progress.seconds,
        rollbacks=len(run.rollbacks()),
        finished=finish is not None,
        bits_per_byte=finish.get("bits_per_byte") if finish else None,
        **used,
        mfu_convention=starts[-1]["mfu_convention"] if starts else None,
        unsaved=unsaved,
        saved_tokens=max(map(tokens_of, checkpoints(run.checkpoints)), default=0),
        noise_scale=noise[-1] if noise else None,
    )
