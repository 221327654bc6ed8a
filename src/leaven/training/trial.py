"""Trains one trial until it is done, diverges or is pruned (cannot beat the best trial so far).

A trial of several durations trains the longest run (the trunk). For each shorter duration, it trains
only the cooldown. With the wsd schedule (warm-up, stable lr, cooldown), runs of different durations are
identical until the shortest starts its cooldown (Hägele et al. 2024, arXiv 2405.18392).
"""

import json
import math
import os
import shutil
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from leaven import storage
from leaven.data.pool import exit_with_parent, new_processes, signals_blocked
from leaven.data.tokens import TokenSet, prepare
from leaven.errors import InputError, shown
from leaven.interop.weights import tensors_fingerprint, weights_fingerprint
from leaven.planning.flops import flops_per_token
from leaven.planning.this_machine import VISIBLE
from leaven.recipe.recipe import Recipe
from leaven.recipe.schedule import Schedule
from leaven.scaling.table import parameter_table
from leaven.training.checkpoint import NotSaved, read_checkpoint, write_checkpoint
from leaven.training.early_stopping import DivergenceMonitor, Pruned, Pruning, comparable
from leaven.training.engine import Training
from leaven.training.loop import Callback, Diverged, Loop, StepResult
from leaven.training.outcome import Baseline, Curve, Outcome, curve_of, this_process
from leaven.training.run_folder import WRONG_TYPES, checkpoint_name, checkpoints

if TYPE_CHECKING:
    from leaven.training.stack import TrialStack

Result = TypeVar("Result")

TRIAL = "trial"  # key in the state of a trial's checkpoint: the name of its folder


def train_trial(
    recipe: Recipe,
    *,
    baseline: Baseline | None = None,
    checkpoint: Path | None = None,
    durations: Sequence[int] = (),
    checkpoint_seconds: float = 60,
    inputs: str | None = None,
) -> Outcome:
    """Train a recipe until it is done, diverges or is pruned. Return the outcome.

    Args:
        baseline: the best trial so far, with the same schedule. The trial is pruned if it cannot reach the
            baseline's loss. A baseline of another duration is ignored.
        checkpoint: a folder. Every ``checkpoint_seconds``, a checkpoint is saved there. The same trial
            resumes from it bit for bit. The caller removes the folder once the outcome is saved.
        durations: several durations to train, in tokens. Shorter runs branch off from the longest run.
        inputs: the expected :func:`fingerprint_of` the text and the start weights. None: any.

    Raises:
        InputError: if the recipe or the durations cannot be trained, the text or start weights have another
            fingerprint, or the checkpoint was not written by this trial.
    """
    tokens = same_tokens(recipe, inputs)
    *branches, trunk = branches_of(recipe, durations, tokens) or [recipe]
    training = Training(trunk, tokens)
    at_once = trunk.stability.on_spike != "off"
    monitor = DivergenceMonitor(trunk.model.vocab_size, trunk.data.tokens, at_once)
    cooldowns = Cooldowns(training, monitor, branches)
    callbacks: list[Callback] = [cooldowns, monitor]
    if baseline is not None and comparable(baseline, trunk.data.tokens):
        callbacks.append(Pruning(monitor, baseline, trunk.schedule.warmup_tokens))
    if checkpoint is not None:
        folder = checkpoint_folder(checkpoint, (trunk, *branches), tokens)
        saving = TrialCheckpoint(training, folder, checkpoint_seconds, callbacks, trunk)
        saving.resume()
        callbacks = [*callbacks, saving]
    loss, stopped = math.inf, False
    with suppress(Diverged):
        try:
            Loop(training, callbacks).run()
            loss = training.evaluate()
            if durations and math.isfinite(loss):
                cooldowns.ended = (*cooldowns.ended, (training.tokens, loss))
        except Pruned as pruned:
            loss, stopped = pruned.expected, True
    trained = training.tokens + cooldowns.cooled
    return Outcome(
        loss=loss if math.isfinite(loss) else math.inf,
        tokens=trained,
        flops=trained * flops_per_token(trunk.model),
        seconds=training.progress.seconds,
        curve=monitor.curve,
        stopped=stopped,
        branches=cooldowns.ended,
        worker=this_process(),
    )


def same_tokens(recipe: Recipe, inputs: str | None) -> TokenSet:
    """Return the tokens of a recipe's text. Raise InputError if ``inputs``, the fingerprint of the text and the
    [start] weights when the command began, is given and no longer theirs."""
    tokens = prepare(recipe.data, recipe.model.vocab_size)
    if inputs is not None and fingerprint_of(recipe, tokens) != inputs:
        raise InputError(
            "the text, or the weights of [start], have changed since this command began, so its trials could not be "
            "compared; restore them, and run the same command again to resume"
        )
    return tokens


def fingerprint_of(recipe: Recipe, tokens: TokenSet) -> str:
    """Return a fingerprint of a trial's text and tokenizer, and of its start weights if it has any."""
    start = recipe.start.folder
    return _fingerprint(recipe, tokens) + ("" if start is None else f" {tensors_fingerprint(start)}")


def _fingerprint(recipe: Recipe, tokens: TokenSet) -> str:
    start = recipe.start.folder
    return tokens.fingerprint if start is None else f"{tokens.fingerprint} {weights_fingerprint(start)}"


def checkpoint_folder(folder: Path, recipes: Sequence[Recipe], tokens: TokenSet) -> Path:
    """Return the subfolder of ``folder`` for the checkpoints of trials with these recipes and tokens."""
    values = [each.model_dump(mode="json", exclude={"name", "why"}) for each in recipes]
    # Without the hash of the tensors, so that a folder of an earlier version is found; same_tokens compares the hash.
    computed_from = json.dumps([values, _fingerprint(recipes[0], tokens)], sort_keys=True).encode()
    return folder / storage.digest(computed_from, 12)


def branches_of(recipe: Recipe, durations: Sequence[int], tokens: TokenSet) -> list[Recipe]:
    """Return a copy of the recipe for each of ``durations`` (in tokens), sorted and without repeats. Raise
    InputError if a duration cannot be trained, or if the durations cannot share one run."""
    schedule, batches, found = recipe.schedule, recipe.batches, list[Recipe]()
    if durations and schedule.decay != "wsd":
        raise InputError(
            f'durations: with decay = "{schedule.decay}", several durations cannot share one run; '
            'set schedule.decay = "wsd"'
        )
    for duration in sorted(set(durations)):
        prefix = f"durations: {duration:,} tokens"
        if duration <= schedule.warmup_tokens:
            raise InputError(
                f"{prefix} do not exceed the warm-up of {schedule.warmup_tokens:,}; use longer durations"
            )
        steps = batches.first_step_at(duration)
        if (end := batches.tokens_at_step(steps)) != duration:
            before = batches.tokens_at_step(steps - 1)
            raise InputError(f"{prefix} are not a whole number of batches; take {before:,} or {end:,}")
        most, source = max((epochs, name) for name, epochs in tokens.epochs(duration).items())
        if most > 1:
            raise InputError(
                f"{prefix} read {source} {most:.3g} times, which makes durations hard to compare; use shorter "
                "durations or more text"
            )
        found.append(recipe.replace({"data.tokens": duration}))
    tables = map(parameter_table, found)
    if len({(table.rows, table.attention_scale, table.beta2) for table in tables}) > 1:
        raise InputError(
            f"durations: rule {recipe.scaling.rule} gives each duration other hyperparameters, so the durations "
            "cannot share one run; train each duration separately, or remove scaling.base and set "
            "[hyperparameters] to the values that leaven show prints for the longest duration"
        )
    return found


def cooldown_start(schedule: Schedule, duration: int) -> float:
    """Return the token count at which the cooldown of a wsd schedule starts in a run of ``duration`` tokens."""
    return duration - min(schedule.decay_ratio * duration, duration - schedule.warmup_tokens)


class Cooldowns(Callback):
    """Trains the cooldowns of the shorter durations within the run of the longest duration (the trunk). After each
    cooldown, the trunk continues from the state in which the cooldown began."""

    def __init__(self, training: Training, monitor: DivergenceMonitor, branches: Sequence[Recipe]) -> None:
        self._training, self._monitor, self._branches = training, monitor, list(branches)  # those not trained yet
        self.ended: Curve = ()  # tokens and validation loss of durations that did not diverge
        self.cooled = 0  # tokens trained in cooldowns

    def before_step(self) -> None:
        end = self._training.tokens + self._training.next_batch_tokens
        while self._branches and end > cooldown_start(self._branches[0].schedule, self._branches[0].data.tokens):
            self._cool_down(self._branches.pop(0))

    def _cool_down(self, branch: Recipe) -> None:
        training, trunk = self._training, self._training.recipe
        monitor = replace(self._monitor, tokens=branch.data.tokens)  # judged by the duration of the branch
        here = training.checkpoint().copied()
        training.recipe = branch
        with suppress(Diverged):
            Loop(training, [monitor]).run()
            loss = training.evaluate()
            if math.isfinite(loss):
                self.ended = (*self.ended, (branch.data.tokens, loss))
        self.cooled += training.tokens - here.progress.tokens
        seconds = training.progress.seconds
        training.recipe = trunk
        training.restore(here)
        training.progress = replace(here.progress, seconds=seconds)

    def state(self) -> dict[str, Any]:
        return {"ended": self.ended, "cooled": self.cooled, "left": len(self._branches)}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.ended, self.cooled = curve_of(state["ended"]), state["cooled"]
        self._branches = self._branches[len(self._branches) - state["left"] :]


class TrialCheckpoint(Callback):
    """Saves a trial every ``every_seconds`` seconds in ``folder`` (see :func:`checkpoint_folder`). If this fails, it
    warns, and training continues."""

    def __init__(
        self,
        training: "Training | TrialStack",
        folder: Path,
        every_seconds: float,
        callbacks: Sequence[Callback],
        recipe: Recipe | None = None,
    ) -> None:
        self._training, self._folder, self._every, self._callbacks = training, folder, every_seconds, callbacks
        self._recipe = recipe
        self._last = time.monotonic()

    def resume(self) -> None:
        """Continue from this trial's checkpoint, if there is one. Raise InputError if it cannot be restored. Ignore
        others with a warning: damaged, of another trial, or with other parameters."""
        found, damaged = read_checkpoint(self._folder, recipe=self._recipe)
        ignored = {path: "it is damaged, or has other parameters than this trial" for path in damaged}
        if found is not None and found.state.get(TRIAL) != self._folder.name:
            ignored[self._folder / checkpoint_name(found.progress.tokens)] = "it belongs to another trial"
            found = None
        for path, why in ignored.items():
            warnings.warn(shown(f"checkpoint {path} is ignored: {why}"), stacklevel=2)
        if found is None:
            return
        try:
            self._training.restore(found)
            for callback in self._callbacks:
                callback.restore(found.state)
        except (AssertionError, *WRONG_TYPES):
            raise InputError(
                f"{self._folder}: its checkpoint was not written by this trial; remove this folder"
            ) from None

    def after_step(self, step: StepResult) -> None:
        if self._training.finished or time.monotonic() - self._last < self._every:
            return
        state: dict[str, Any] = {TRIAL: self._folder.name}
        for callback in self._callbacks:
            state |= callback.state()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            kept = write_checkpoint(self._folder, self._training.checkpoint(state))
            for other in checkpoints(self._folder):
                if other != kept:
                    shutil.rmtree(other, ignore_errors=True)
        except (NotSaved, OSError) as error:
            # The same text for every trial of a study, so that a worker shows it once (stacks: once a stack).
            folder = self._folder.parent.parent
            warnings.warn(
                f"no checkpoint of a trial can be saved in {folder} ({getattr(error, 'strerror', None) or error}); "
                "after a kill, the trial begins again",
                stacklevel=2,
            )
        self._last = time.monotonic()


def initialise_worker(device: str | None = None) -> None:
    if device is not None:  # CUDA reads this when it is first used
        os.environ[VISIBLE] = device
    torch.set_num_threads(1)
    exit_with_parent()


class WorkerPool:
    """A context manager with a pool of worker processes. ``device`` is their ``CUDA_VISIBLE_DEVICES``. After a
    worker dies, the next :meth:`submit` starts new workers."""

    def __init__(self, workers: int, device: str | None = None) -> None:
        self._workers, self._device = workers, device
        self._executor = self._new()
        self._lock = threading.Lock()  # threads may still submit while the ``with`` block ends
        self._left = False

    def _new(self) -> ProcessPoolExecutor:
        return new_processes(self._workers, initialise_worker, self._device)

    def submit(self, function: Callable[..., Result], *arguments: object, **named: object) -> "Future[Result]":
        with self._lock, signals_blocked():  # the executor may start a process
            try:
                return self._executor.submit(function, *arguments, **named)
            except BrokenProcessPool:
                if self._left:
                    raise
                self._end()
                self._executor = self._new()
                return self._executor.submit(function, *arguments, **named)

    def _end(self) -> None:
        for process in list((self._executor._processes or {}).values()):
            process.kill()  # they block SIGTERM, which the executor may send
        # Wait for the executor's thread: if it closes its pipe only while Python exits, Python 3.11 may write to the
        # closed pipe and print a traceback.
        self._executor.shutdown(cancel_futures=True)

    def __enter__(self) -> "WorkerPool":
        return self

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            self._left = True
            self._end()
