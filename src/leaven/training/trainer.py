"""The training loop: a step is a function of the recipe, the tokens and the state; everything else watches it."""

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from leaven.data.stream import Stream, validation_windows
from leaven.model.initialise import build_model, name_seed
from leaven.planning.flops import flops_per_token
from leaven.recipe.errors import InputError
from leaven.recipe.files import read_recipe
from leaven.recipe.recipe import Recipe
from leaven.scaling.table import resolve
from leaven.training.board import Board
from leaven.training.checkpoint import Checkpoint, Progress, read_checkpoint, write_checkpoint
from leaven.training.clipping import Clipper
from leaven.training.optimiser import Optimiser
from leaven.training.run_folder import RunFolder
from leaven.training.throughput import peak_flops

if TYPE_CHECKING:
    from leaven.data.tokens import TokenSet


class Diverged(RuntimeError):
    """The loss is no longer a number."""


@dataclass(frozen=True)
class Step:
    """A line of metrics.jsonl. ``tokens`` are those consumed once the step is done; ``lr`` is the hidden weights'
    (mlp.out of the first block); norms are over all parameters; ``mfu`` is null where the device's peak is unknown.
    """

    step: int
    tokens: int
    loss: float
    lr: float
    grad_norm: float
    update_norm: float
    batch_tokens: int
    tokens_per_second: float
    mfu: float | None


@dataclass(frozen=True)
class Summary:
    """How a run ended. ``loss`` is the validation loss in nats per token, null while the run is not finished."""

    loss: float | None
    tokens: int
    steps: int
    seconds: float
    mfu: float | None
    rollbacks: int
    finished: bool


class Training:
    """Model, optimiser and position in the stream of one run on one device."""

    def __init__(self, recipe: Recipe, tokens: "TokenSet", device: str | None = None) -> None:
        check_trainable(recipe, tokens)
        self.recipe = recipe
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        table = resolve(recipe)
        self.model = build_model(recipe.model, table, recipe.data.seed, self.device)
        self.optimiser = Optimiser.build(self.model, table, recipe.hyperparameters.optimizer)
        self.text = tokens.fingerprint
        self.clipper = Clipper.build(recipe.hyperparameters.grad_clip, self.model, table)
        self.stream = Stream(tokens.train, recipe.model.seq_len, recipe.data.seed)
        self.validation = validation_windows(tokens.validation, recipe.model.seq_len, recipe.evaluation.tokens)
        self.progress = Progress()
        self.micro_batch = micro_batch(recipe, self.device.type)
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu"
        self._peak_flops = peak_flops(name, recipe.precision.compute)
        self._flops_per_token = flops_per_token(recipe.model)
        self._shown_lr = table["layers.0.mlp.out.weight"].lr

    @property
    def finished(self) -> bool:
        return self.progress.step >= self.recipe.steps

    def step(self) -> Step:
        """One optimiser step.

        Raises:
            Diverged: if the loss or the gradient is not finite; the parameters are those of the step before.
        """
        began = time.perf_counter()
        recipe, done = self.recipe, self.progress
        seq_len = recipe.model.seq_len
        batch_tokens = recipe.batches.batch_at(done.tokens)
        windows = torch.from_numpy(self.stream.batch(done.tokens // seq_len, batch_tokens // seq_len))
        if recipe.model.dropout:
            # Masks are a function of (seed, step): a resumed run draws the same ones.
            torch.manual_seed(name_seed(recipe.data.seed, "dropout", done.step))
        loss = torch.zeros((), device=self.device)
        for chunk in torch.split(windows, self.micro_batch):
            share = self._loss_sum(chunk) / batch_tokens
            share.backward()  # type: ignore[no-untyped-call]
            loss += share.detach()
        parameters = list(self.model.parameters())
        grad_norm = self.clipper()
        if recipe.stability.on_spike == "stop" and not (math.isfinite(float(loss)) and math.isfinite(grad_norm)):
            raise Diverged(f"loss {float(loss):g}, gradient norm {grad_norm:g} at step {done.step + 1}")
        before = [parameter.detach().clone() for parameter in parameters]
        tokens = done.tokens + batch_tokens
        multiplier = recipe.schedule.multiplier(tokens, recipe.data.tokens)
        self.optimiser.step(multiplier)
        moved = torch.stack([(after.detach() - old).norm() for after, old in zip(parameters, before, strict=True)])
        update_norm = float(moved.norm())
        seconds = time.perf_counter() - began
        self.progress = Progress(done.step + 1, tokens, done.seconds + seconds)
        speed = batch_tokens / seconds
        return Step(
            step=self.progress.step,
            tokens=tokens,
            loss=float(loss),
            lr=self._shown_lr * multiplier,
            grad_norm=grad_norm,
            update_norm=update_norm,
            batch_tokens=batch_tokens,
            tokens_per_second=speed,
            mfu=speed * self._flops_per_token / self._peak_flops if self._peak_flops else None,
        )

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean validation loss in nats per token, over the same windows at every call."""
        began = time.perf_counter()
        self.model.eval()
        windows = torch.from_numpy(self.validation)
        total = math.fsum(float(self._loss_sum(chunk)) for chunk in torch.split(windows, self.micro_batch))
        self.model.train()
        self.progress = replace(self.progress, seconds=self.progress.seconds + time.perf_counter() - began)
        return total / (len(windows) * self.recipe.model.seq_len)

    def _loss_sum(self, windows: Tensor) -> Tensor:
        """Cross-entropy in nats, summed over all tokens of windows (sequences, seq_len + 1)."""
        windows = windows.to(self.device, non_blocking=True)
        bf16 = self.recipe.precision.compute == "bf16"
        with torch.autocast(self.device.type, torch.bfloat16, enabled=bf16):
            logits = self.model(windows[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten(), reduction="sum")

    def checkpoint(self) -> Checkpoint:
        optimizer = self.optimiser.state_dict() | self.clipper.state_dict()
        return Checkpoint(self.progress, self.model.state_dict(), optimizer)

    def restore(self, checkpoint: Checkpoint) -> None:
        self.model.load_state_dict(checkpoint.model)
        self.optimiser.load_state_dict(checkpoint.optimizer)
        self.clipper.load_state_dict(checkpoint.optimizer)
        self.progress = checkpoint.progress


def train(
    recipe: Recipe,
    tokens: "TokenSet",
    folder: Path,
    *,
    on_step: Callable[[Step], None] = lambda step: None,
    on_event: Callable[[str, dict[str, Any]], None] = lambda event, values: None,
    stop: Callable[[], bool] = lambda: False,
    tensorboard: bool = False,
) -> Summary:
    """Train a recipe in a run folder, from its newest whole checkpoint if it has one.

    ``stop`` is asked between steps; when it says so, a checkpoint is written and the summary is not ``finished``.
    The same losses come out, to the last bit on one device, however often the run is stopped or killed.

    Raises:
        InputError: if the folder holds another recipe, is in use, or cannot be written.
        Diverged: if the loss is no longer a number and ``on_spike`` is ``stop``.
    """
    recipe = resolved(recipe, folder)
    run = RunFolder(folder)
    run.check(recipe)
    run.check_text(tokens.fingerprint)
    ended = _ended(run)
    if ended is not None:
        return ended
    training = Training(recipe, tokens)  # before anything is written: what cannot be trained leaves no folder
    with run.opened(recipe):
        session = _Session(run, training, on_event, tensorboard)
        while not training.finished and not stop():
            on_step(session.step())
        loss = session.close()
        return _summary(run, training.progress, loss)


class _Session:
    """One stretch of a run between a start and a stop: what is written, and when."""

    def __init__(
        self,
        run: RunFolder,
        training: Training,
        on_event: Callable[[str, dict[str, Any]], None],
        tensorboard: bool,
    ) -> None:
        self.run, self.training, self._on_event = run, training, on_event
        found, damaged = read_checkpoint(run.checkpoints)
        if found is not None:
            training.restore(found)
        run.rewind(training.progress.step)
        self._saved_step = training.progress.step
        self._batch_tokens = self._next_batch()
        tenth = max(training.recipe.data.tokens // 10, 1)
        self._save_every = training.recipe.stability.checkpoint_every_tokens or tenth
        self._evaluate_every = training.recipe.evaluation.every_tokens or tenth
        self._board = Board(run.path, training.progress.tokens) if tensorboard else None
        names = [path.name for path in damaged]
        self._event(
            "resume" if found else "start",
            device=str(training.device),
            text=training.text,
            damaged_checkpoints=names,
        )

    def step(self) -> Step:
        """One step, and what is due after it."""
        training, before = self.training, self.training.progress.tokens
        if self._next_batch() != self._batch_tokens:
            self._batch_tokens = self._next_batch()
            self._event("ramp", batch_tokens=self._batch_tokens)
        try:
            step = training.step()
        except Diverged as error:
            self._event("stop", why=str(error))
            raise
        self.run.record(asdict(step))
        if self._board:
            self._board.step(step)
        if step.tokens // self._evaluate_every > before // self._evaluate_every and not training.finished:
            self._evaluate()
        if step.tokens // self._save_every > before // self._save_every and not training.finished:
            self._save()
        return step

    def close(self) -> float | None:
        """Save, and evaluate if the run is done: its validation loss, or None if it was stopped."""
        loss = self._evaluate() if self.training.finished else None
        if self.training.progress.step > self._saved_step:
            self._save()
        if loss is None:
            self._event("stop", why="interrupted")
        else:
            self._event("finish", loss=loss, seconds=self.training.progress.seconds)
        if self._board:
            self._board.close()
        return loss

    def _next_batch(self) -> int:
        return self.training.recipe.batches.batch_at(self.training.progress.tokens)

    def _evaluate(self) -> float:
        loss = self.training.evaluate()
        self._event("validation", loss=loss)
        if self._board:
            self._board.validation(self.training.progress.tokens, loss)
        return loss

    def _save(self) -> None:
        path = write_checkpoint(self.run.checkpoints, self.training.checkpoint())
        self._saved_step = self.training.progress.step
        self._event("checkpoint", path=path.name)

    def _event(self, name: str, **values: Any) -> None:
        progress = self.training.progress
        values = {"step": progress.step, "tokens": progress.tokens} | values
        self.run.event(name, **values)
        self._on_event(name, values)


def resolved(recipe: Recipe, folder: Path) -> Recipe:
    """The recipe with every "auto" replaced: by what a run in this folder has, else by what it comes to here.

    A run keeps its micro-batch wherever it is resumed, since the order of a sum is part of its bits.
    """
    if recipe.batch.micro_batch != "auto":
        return recipe
    before = RunFolder(folder).recipe_file
    if before.exists():
        begun = read_recipe(before)
        return recipe.replace({"batch.micro_batch": begun.batch.micro_batch, "why": recipe.why | begun.why})
    size = micro_batch(recipe, "cuda" if torch.cuda.is_available() else "cpu")
    why = {"batch.micro_batch": f"auto: about {size * recipe.model.seq_len:,} tokens a forward"}
    return recipe.replace({"batch.micro_batch": size, "why": recipe.why | why})


def micro_batch(recipe: Recipe, device_type: str) -> int:
    """Sequences a forward. On a CPU about 2,048 tokens keep the activations of small models in the cache (measured:
    docs/log.md); on an accelerator about 16,384 keep it busy. A batch that does not divide ends in a smaller one."""
    if recipe.batch.micro_batch != "auto":
        return recipe.batch.micro_batch
    tokens = 2_048 if device_type == "cpu" else 16_384
    return max(1, min(tokens, recipe.batch.tokens) // recipe.model.seq_len)


def check_trainable(recipe: Recipe, tokens: "TokenSet") -> None:
    """Raise InputError for what would stop a training before its first step."""
    require_one_device(recipe)
    Stream(tokens.train, recipe.model.seq_len, recipe.data.seed)
    validation_windows(tokens.validation, recipe.model.seq_len, recipe.evaluation.tokens)


def require_one_device(recipe: Recipe) -> None:
    """Raise InputError if the recipe's layout is not one device."""
    layout = recipe.layout
    if layout.ranks > 1 or layout.zero or layout.recompute != "none":
        raise InputError(
            '[layout] training runs on one device so far: set dp = tp = pp = 1, zero = 0, recompute = "none" '
            "(leaven plan takes any layout)"
        )


def _ended(run: RunFolder) -> Summary | None:
    """The summary of a run that has finished before."""
    finish = run.finish()
    if finish is None:
        return None
    return _summary(run, Progress(finish["step"], finish["tokens"], finish["seconds"]), finish["loss"])


def _summary(run: RunFolder, progress: Progress, loss: float | None) -> Summary:
    mfus = sorted(line["mfu"] for line in run.metrics() if line["mfu"] is not None)
    return Summary(
        loss=loss,
        tokens=progress.tokens,
        steps=progress.step,
        seconds=progress.seconds,
        mfu=mfus[len(mfus) // 2] if mfus else None,
        rollbacks=0,
        finished=loss is not None,
    )
