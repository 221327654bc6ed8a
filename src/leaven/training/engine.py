"""One device's share of a run: a step is a function of the recipe, the tokens and the state."""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from leaven.data.documents import isolated
from leaven.interop.weights import require_start, start_from
from leaven.model.initialise import build_model, name_seed
from leaven.model.kernels import norms, subtract_
from leaven.model.loss import IGNORED, cross_entropy
from leaven.planning.flops import flops_per_token
from leaven.planning.memory import GIB
from leaven.recipe.errors import InputError
from leaven.recipe.recipe import Recipe
from leaven.scaling.table import resolve
from leaven.training.checkpoint import Checkpoint, Progress
from leaven.training.clipping import Clipper
from leaven.training.machine import keep_freed_memory
from leaven.training.micro_batch import even, rule_of_thumb
from leaven.training.optimiser import Optimiser
from leaven.training.precision import DTYPES, LossScale
from leaven.training.rewind import Rewind, lr_factor, skipped
from leaven.training.spikes import Limits
from leaven.training.throughput import known_peak, peak_memory

if TYPE_CHECKING:
    from leaven.data.tokens import TokenSet


MicroBatch = tuple[Tensor, Tensor, Tensor | None]
"""Inputs, targets and, where documents do not see each other, the document of each input: (sequences, seq_len)."""


class Diverged(RuntimeError):
    """The loss is no longer a number."""


class Interrupted(Exception):
    """Asked to stop in the middle of a step or an evaluation, which is given up."""


@dataclass(frozen=True)
class Step:
    """A line of metrics.jsonl. ``tokens`` are those consumed once the step is done; ``lr`` is the hidden weights'
    (mlp.out of the first block); norms are over all parameters; ``tflops`` are those of the model, ``mfu`` is their
    share of the device's peak, null where that is unknown; ``memory_gib`` is the most that was held so far.

    ``skipped``: loss or gradient were not finite or not below the limits, and the parameters are those of the step
    before. ``loss_scale`` is that of the step, null where there is none; ``modules`` holds the norms of update and
    parameters of each module, over all blocks.
    """

    step: int
    tokens: int
    loss: float
    lr: float
    grad_norm: float
    update_norm: float
    batch_tokens: int
    tokens_per_second: float
    tflops: float
    mfu: float | None
    memory_gib: float
    skipped: bool
    loss_scale: float | None
    modules: dict[str, tuple[float, float]]

    @property
    def diverged(self) -> bool:
        """Whether it was skipped for what is no number, and not for a loss scale that was too large."""
        overflow = not math.isfinite(self.grad_norm) and self.loss_scale in {None, 1.0}
        return self.skipped and (not math.isfinite(self.loss) or overflow)


@dataclass(frozen=True)
class Issued:
    """A step that the device may still be working on; ``values`` are what it will have measured."""

    step: int
    tokens: int
    lr: float
    batch_tokens: int
    seconds: float  # of handing it over; on a processor it is done by then
    values: Tensor
    started: torch.cuda.Event | None
    ready: torch.cuda.Event | None
    read: "Callable[[Issued], Step]"

    def result(self) -> Step:
        """Wait for it, and for nothing that was issued since. Call once, in the order of the steps."""
        if self.ready is not None:
            self.ready.synchronize()
        return self.read(self)


class Training:
    """Model, optimiser and position in the stream of one run on one device."""

    def __init__(self, recipe: Recipe, tokens: "TokenSet", device: str | None = None) -> None:
        check_trainable(recipe, tokens)
        self.recipe = recipe
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        if self.device.type == "cpu":
            keep_freed_memory()
        table = resolve(recipe)
        self.model = build_model(recipe.model, table, recipe.data.seed, self.device)
        if recipe.start.folder is not None:
            start_from(self.model, recipe.model, table, recipe.start.folder)
        self.optimiser = Optimiser.build(self.model, table, recipe.hyperparameters.optimizer)
        self.text = tokens.fingerprint
        self.epochs = tokens.epochs(recipe.data.tokens)
        self.clipper = Clipper.build(recipe.hyperparameters.grad_clip, self.model, table)
        self.dtype = DTYPES[recipe.precision.compute]
        self.loss_scale = LossScale.build(self.device) if recipe.precision.compute == "fp16" else None
        self.stream = tokens.stream(recipe.model.seq_len, recipe.data.seed)
        self.validation = tokens.validation_windows(recipe.model.seq_len, recipe.evaluation.tokens)
        self._end_of_text = tokens.end_of_text if recipe.data.documents == "isolated" else None
        self.progress = Progress()
        self.rewinds: tuple[Rewind, ...] = ()
        self.micro_batch = rule_of_thumb(recipe, self.device.type)
        self.stop: Callable[[], bool] = lambda: False
        self.peak = known_peak(self.device, recipe.precision.compute)
        self._flops_per_token = flops_per_token(recipe.model)
        self._shown_lr = table["layers.0.mlp.out.weight"].lr
        # In the order of the table, as the clipper has them.
        self._parameters = self.clipper.parameters
        self._modules = list(dict.fromkeys(row.module for row in table.rows))
        owners = [self._modules.index(row.module) for row in table.rows]
        self._owners = torch.tensor(owners, device=self.device)
        if recipe.layout.compile:
            for block in self.model.layers:
                block.compile()

    @property
    def finished(self) -> bool:
        return self.progress.step >= self.recipe.steps

    def go_on(self) -> None:
        """Asked before every forward: raise Interrupted if ``stop`` says so."""
        if self.stop():
            raise Interrupted

    def give_up(self) -> None:
        """After Interrupted: as it was after the last step that was issued."""
        self.optimiser.adam.zero_grad(set_to_none=True)
        self.model.train()

    def step(self) -> Step:
        """One optimiser step.

        Raises:
            Diverged: if the loss or the gradient is not finite, and not for a loss scale that was too large; the
                parameters are those of the step before.
        """
        step = self.issue().result()
        if step.diverged and self.recipe.stability.on_spike != "off":
            raise Diverged(f"loss {step.loss:g}, gradient norm {step.grad_norm:g} at step {step.step}")
        return step

    def issue(self, limits: Limits | None = None) -> Issued:
        """Hand one optimiser step to the device without waiting for it. A step whose loss or gradient is not finite,
        or not below the limits, is skipped by the device itself: parameters and moments stay as they were."""
        began, started = time.perf_counter(), self._mark()
        recipe, done = self.recipe, self.progress
        seq_len = recipe.model.seq_len
        batch_tokens = recipe.batches.batch_at(done.tokens)
        tokens = done.tokens + batch_tokens
        windows = torch.from_numpy(self.stream.batch(done.tokens // seq_len, batch_tokens // seq_len))
        if recipe.model.dropout:
            # Masks are a function of (seed, step): a resumed run draws the same ones.
            torch.manual_seed(name_seed(recipe.data.seed, "dropout", done.step))
        scale = None if self.loss_scale is None else self.loss_scale.value
        counted = self._counted(windows)
        share = 1 / counted if scale is None else scale / counted
        loss = torch.zeros((), device=self.device)
        for chunk in self._micro_batches(windows):
            part = self._loss(chunk, share)
            part.backward()  # type: ignore[no-untyped-call]
            loss += part.detach()
        if scale is not None:
            loss /= scale
        grad_norm = self.clipper(scale)
        finite = loss.isfinite() & grad_norm.isfinite()
        limits = limits or Limits()
        applied = (loss < limits.loss) & (grad_norm < limits.grad_norm)  # false of what is no number
        before = [parameter.detach().clone() for parameter in self._parameters]
        multiplier = recipe.schedule.multiplier(tokens, recipe.data.tokens) * lr_factor(self.rewinds, tokens)
        self.optimiser.step(multiplier, skip=~applied)
        if self.loss_scale is not None:
            self.loss_scale.update(finite)
        with torch.no_grad():
            subtract_(before, self._parameters)
            updates, sizes = self._per_module(norms(before)), self._per_module(norms(self._parameters))
        shown_scale = torch.ones_like(loss) if scale is None else scale
        head = torch.stack([value.double() for value in (loss, grad_norm, updates.norm(), applied, shown_scale)])
        self.progress = Progress(done.step + 1, tokens, done.seconds)
        values, ready = self._to_host(torch.cat((head, updates.double(), sizes.double())))
        return Issued(
            step=done.step + 1,
            tokens=tokens,
            lr=self._shown_lr * multiplier,
            batch_tokens=batch_tokens,
            seconds=time.perf_counter() - began,
            values=values,
            started=started,
            ready=ready,
            read=self._read,
        )

    def _read(self, issued: Issued) -> Step:
        seconds = issued.seconds
        if issued.started is not None and issued.ready is not None:
            seconds = issued.started.elapsed_time(issued.ready) / 1000
        self.progress = replace(self.progress, seconds=self.progress.seconds + seconds)
        loss, grad_norm, update_norm, applied, scale, *by_module = issued.values.tolist()
        speed = issued.batch_tokens / seconds
        flops = speed * self._flops_per_token
        norms_by_module = zip(by_module[: len(self._modules)], by_module[len(self._modules) :], strict=True)
        return Step(
            step=issued.step,
            tokens=issued.tokens,
            loss=loss,
            lr=issued.lr,
            grad_norm=grad_norm,
            update_norm=update_norm,
            batch_tokens=issued.batch_tokens,
            tokens_per_second=speed,
            tflops=flops / 1e12,
            mfu=flops / self.peak.flops if self.peak else None,
            memory_gib=peak_memory(self.device) / GIB,
            skipped=not applied,
            loss_scale=scale if self.loss_scale is not None else None,
            modules=dict(zip(self._modules, norms_by_module, strict=True)),
        )

    def _to_host(self, values: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
        """A copy that is complete once the event has passed: a plain read would wait for all that is issued since."""
        if not values.is_cuda:
            return values, None
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        host.copy_(values, non_blocking=True)
        return host, self._mark()

    def _mark(self) -> torch.cuda.Event | None:
        """A place in the queue of the device."""
        if self.device.type != "cuda":
            return None
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _per_module(self, sizes: Tensor) -> Tensor:
        """2-norms by module from those by parameter."""
        return sizes.new_zeros(len(self._modules)).index_add_(0, self._owners, sizes**2).sqrt()

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean validation loss in nats per token, over the same windows at every call."""
        began = time.perf_counter()
        self.model.eval()
        windows = torch.from_numpy(self.validation)
        total = math.fsum(float(self._loss(chunk)) for chunk in self._micro_batches(windows))
        self.model.train()
        self.progress = replace(self.progress, seconds=self.progress.seconds + time.perf_counter() - began)
        return total / self._counted(windows)

    def validation_targets(self) -> NDArray[np.int64]:
        """The tokens that the validation loss is the mean over, (targets,)."""
        targets, inputs = self.validation[:, 1:], self.validation[:, :-1]
        return targets[inputs != self._end_of_text] if self._end_of_text is not None else targets.ravel()

    def _counted(self, windows: Tensor) -> int:
        """The targets of windows that count in the loss: not those that another document begins with."""
        inputs = windows[:, :-1]
        return inputs.numel() - (0 if self._end_of_text is None else int((inputs == self._end_of_text).sum()))

    def _micro_batches(self, windows: Tensor) -> Iterator["MicroBatch"]:
        """What each forward gets. All have one size: the last is filled up with sequences whose targets do not
        count."""
        size = self.forward_size(len(windows))
        for chunk in torch.split(windows, size):
            self.go_on()
            missing = size - len(chunk)
            filled = torch.cat((chunk, chunk[:1].expand(missing, -1))) if missing else chunk
            yield self.micro_batch_of(filled, len(chunk))

    def micro_batch_of(self, windows: Tensor, count: int) -> MicroBatch:
        """On the device; only targets of the first ``count`` windows (sequences, seq_len + 1) count."""
        inputs, targets, documents = windows[:, :-1], windows[:, 1:].clone(), None
        if self._end_of_text is not None:
            documents, targets = isolated(windows, self._end_of_text)
            documents = self._on_device(documents)
        targets[count:] = IGNORED
        return self._on_device(inputs), self._on_device(targets), documents

    def forward_size(self, sequences: int) -> int:
        """Sequences of each forward of a batch. A compiled model sees one size wherever it can: a new one costs more
        than the padding."""
        if self.recipe.layout.compile:
            return min(self.micro_batch, sequences)
        return even(sequences, self.micro_batch)

    def _on_device(self, tokens: Tensor) -> Tensor:
        if self.device.type == "cuda":
            return tokens.contiguous().pin_memory().to(self.device, non_blocking=True)
        return tokens

    def _loss(self, micro_batch: "MicroBatch", factor: Tensor | float = 1.0) -> Tensor:
        """Cross-entropy in nats, summed over the targets that count, times a factor."""
        inputs, targets, documents = micro_batch
        lower = self.dtype != torch.float32
        with torch.autocast(self.device.type, self.dtype, enabled=lower):
            hidden = self.model.hidden(inputs, documents)
        return cross_entropy(
            hidden.flatten(0, 1),
            self.model.readout,
            targets.flatten(),
            multiplier=self.model.logit_multiplier,
            factor=factor,
            compute=self.dtype if lower else None,
        )

    def checkpoint(self) -> Checkpoint:
        optimizer = self.optimiser.state_dict() | self.clipper.state_dict()
        if self.loss_scale is not None:
            optimizer |= self.loss_scale.state_dict()
        return Checkpoint(self.progress, self.model.state_dict(), optimizer)

    def restore(self, checkpoint: Checkpoint) -> None:
        self.model.load_state_dict(checkpoint.model)
        self.optimiser.load_state_dict(checkpoint.optimizer)
        self.clipper.load_state_dict(checkpoint.optimizer)
        if self.loss_scale is not None:
            self.loss_scale.load_state_dict(checkpoint.optimizer)
        self.progress = checkpoint.progress

    def follow(self, rewinds: tuple[Rewind, ...]) -> None:
        """Leave out of the stream what the run's returns left out, and lower the lr as they did."""
        self.rewinds = rewinds
        seq_len = self.recipe.model.seq_len
        skip = tuple((start // seq_len, end // seq_len) for start, end in skipped(rewinds))
        self.stream = replace(self.stream, skip=skip)


def check_trainable(recipe: Recipe, tokens: "TokenSet") -> None:
    """Raise InputError for what would stop a training before its first step."""
    require_one_device(recipe)
    if recipe.start.folder is not None:
        require_start(recipe.model, recipe.start.folder)
    tokens.stream(recipe.model.seq_len, recipe.data.seed)
    tokens.validation_windows(recipe.model.seq_len, recipe.evaluation.tokens)


def require_one_device(recipe: Recipe) -> None:
    """Raise InputError if the recipe's layout is not one device."""
    layout = recipe.layout
    if layout.ranks > 1 or layout.zero or layout.recompute != "none":
        raise InputError(
            '[layout] training runs on one device so far: set dp = tp = pp = 1, zero = 0, recompute = "none" '
            "(leaven plan takes any layout)"
        )
