"""One device's share of a run: a step is a function of the recipe, the tokens and the state."""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from leaven.data.documents import isolated
from leaven.distributed.pieces import Place
from leaven.distributed.pipeline import MicroBatch
from leaven.distributed.sharded import ShardedModel
from leaven.distributed.world import ALONE, World
from leaven.interop.weights import require_start, start_from
from leaven.model.initialise import name_seed
from leaven.model.kernels import subtract_
from leaven.model.loss import IGNORED
from leaven.model.transformer import Transformer
from leaven.planning.flops import flops_per_token
from leaven.planning.memory import GIB
from leaven.planning.trainable import require_trainable
from leaven.recipe.recipe import Recipe
from leaven.scaling.table import ramp_factors, resolve
from leaven.training.checkpoint import Checkpoint, Progress
from leaven.training.clipping import Clipper
from leaven.training.machine import keep_freed_memory
from leaven.training.micro_batch import even, rule_of_thumb
from leaven.training.noise import FirstPart, NoiseScale
from leaven.training.optimiser import MOMENTS, Optimiser
from leaven.training.precision import DTYPES, LossScale
from leaven.training.rewind import Rewind, lr_factor, skipped
from leaven.training.saved_tensors import part
from leaven.training.spikes import Limits
from leaven.training.step import Issued, Step
from leaven.training.throughput import known_peak, peak_memory

if TYPE_CHECKING:
    from leaven.data.tokens import TokenSet


class Diverged(RuntimeError):
    """The loss is no longer a number."""


class Interrupted(Exception):
    """Asked to stop in the middle of a step or an evaluation, which is given up."""


class Training:
    """Model, optimiser and position in the stream of one run: on one device, or this process's share of it."""

    def __init__(self, recipe: Recipe, tokens: "TokenSet", device: str | None = None, world: World = ALONE) -> None:
        check_trainable(recipe, tokens, world)
        self.recipe = recipe
        self.device = torch.device(device) if device else default_device()
        if self.device.type == "cpu":
            keep_freed_memory()
        self.world, self.dtype = world, DTYPES[recipe.precision.compute]
        table = resolve(recipe)
        self.sharded = ShardedModel(
            recipe.model,
            table,
            seed=recipe.data.seed,
            dtype=self.dtype,
            device=self.device,
            layout=recipe.layout,
            world=world,
        )
        if recipe.start.folder is not None:
            start_from(self.sharded.pieces, recipe.model, table, recipe.start.folder)
        leaves = {held.row.name: held.leaf for held in self.sharded.held}
        self.optimiser = Optimiser.build(leaves, self.sharded.rows, recipe.hyperparameters.optimizer)
        self.text = tokens.fingerprint
        self.epochs = tokens.epochs(recipe.data.tokens)
        self.clipper = Clipper.build(recipe.hyperparameters.grad_clip, self.sharded, table)
        self.loss_scale = LossScale.build(self.device) if recipe.precision.compute == "fp16" else None
        self.noise = NoiseScale.build(recipe.stability.noise_scale_every_tokens, self.device)
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
        self._modules = list(dict.fromkeys(row.module for row in table.rows))
        owners = [self._modules.index(row.module) for row in table.rows]
        self._owners = torch.tensor(owners, device=self.device)

    @property
    def model(self) -> Transformer:
        """Of one device."""
        return self.sharded.stages[0].model

    @property
    def finished(self) -> bool:
        return self.progress.step >= self.recipe.steps

    def go_on(self) -> None:
        """Asked before every forward: raise Interrupted if ``stop`` says so. Of many processes each would say so at a
        forward of its own: they are asked between steps."""
        if self.world is ALONE and self.stop():
            raise Interrupted

    def give_up(self) -> None:
        """After Interrupted: as it was after the last step that was issued."""
        self.sharded.drop_gradients()
        self.sharded.train(True)

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
        micro_batches, counted = self._of_batch(done.tokens // seq_len, batch_tokens // seq_len)
        if recipe.model.dropout:
            # Masks are a function of (seed, step): a resumed run draws the same ones. No two processes share one.
            torch.manual_seed(name_seed(recipe.data.seed, "dropout", done.step, *self.world.distinct))
        scale = None if self.loss_scale is None else self.loss_scale.value
        share = 1 / counted if scale is None else scale / counted
        first, measured = None, self.noise
        if measured is not None and measured.due(done.tokens, tokens):
            first, micro_batches = self._first_of(micro_batches)
        loss = self.sharded.total(self.sharded.forward_backward(micro_batches, share, first.look if first else None))
        if scale is not None:
            loss /= scale
        ramp, longer = ramp_factors(recipe, done.step)
        if longer != 1:  # here and not earlier: a step that is given up leaves the state as it was
            self.clipper.recount(longer)
            self.optimiser.recount(longer)
        grad_norm = self.clipper(scale, ramp)
        noise_scale = torch.full_like(loss, torch.nan)
        if measured is not None and first is not None:
            noise_scale = measured.add(first.targets, first.mean_norm(share), counted, grad_norm)
        finite = loss.isfinite() & grad_norm.isfinite()
        limits = limits or Limits()
        applied = (loss < limits.loss) & (grad_norm < limits.grad_norm)  # false of what is no number
        before = [leaf.detach().clone() for leaf in self.sharded.leaves]
        multiplier = recipe.schedule.multiplier(tokens, recipe.data.tokens) * lr_factor(self.rewinds, tokens)
        self.optimiser.step(multiplier, ~applied, ramp)
        if self.loss_scale is not None:
            self.loss_scale.update(finite)
        with torch.no_grad():
            subtract_(before, self.sharded.leaves)
            updates, sizes = map(self._per_module, self.sharded.norms(before, self.sharded.leaves))
        shown_scale = torch.ones_like(loss) if scale is None else scale
        told = (loss, grad_norm, updates.norm(), applied, shown_scale, noise_scale)
        head = torch.stack([value.double() for value in told])
        self.progress = Progress(done.step + 1, tokens, done.seconds)
        values, ready = self._to_host(torch.cat((head, updates.double(), sizes.double())))
        return Issued(
            step=done.step + 1,
            tokens=tokens,
            lr=self._shown_lr * multiplier * ramp.lr,
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
        loss, grad_norm, update_norm, applied, scale, noise_scale, *by_module = issued.values.tolist()
        speed = issued.batch_tokens / seconds
        flops = speed * self._flops_per_token / self.world.size  # of one device
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
            noise_scale=noise_scale if math.isfinite(noise_scale) else None,
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

    def evaluate(self) -> float:
        """Mean validation loss in nats per token, over the same windows at every call."""
        began = time.perf_counter()
        micro_batches, counted = self._of_windows(torch.from_numpy(self.validation))
        loss = self.sharded.total(self.sharded.forward(micro_batches))
        self.progress = replace(self.progress, seconds=self.progress.seconds + time.perf_counter() - began)
        return float(loss) / counted

    def validation_targets(self) -> NDArray[np.int64]:
        """The tokens that the validation loss is the mean over, (targets,)."""
        targets, inputs = self.validation[:, 1:], self.validation[:, :-1]
        return targets[inputs != self._end_of_text] if self._end_of_text is not None else targets.ravel()

    def _counted(self, windows: Tensor, sequences: int) -> int:
        """The targets of a batch of so many sequences that count in the loss, of which this process has ``windows``:
        not those that another document begins with."""
        if self._end_of_text is None:
            return sequences * self.recipe.model.seq_len
        mine = int((windows[:, :-1] != self._end_of_text).sum())
        return int(self.world.sum_(torch.tensor(float(mine if self.world.reads_first else 0), dtype=torch.float64)))

    def _of_batch(self, first: int, sequences: int) -> tuple[Iterator[MicroBatch], int]:
        """What this process feeds to the model of samples ``first`` to ``first + sequences - 1``, and how many
        targets count in the whole batch. It reads no others."""
        start, count = self._slice(sequences)
        windows = torch.from_numpy(self.stream.batch(first + start, max(count, 1)))
        return self._micro_batches(windows, count, sequences), self._counted(windows[:count], sequences)

    def _of_windows(self, windows: Tensor) -> tuple[Iterator[MicroBatch], int]:
        """As :meth:`_of_batch`, of windows that are there."""
        start, count = self._slice(len(windows))
        mine = windows[start : start + max(count, 1)] if count else windows[:1]
        return self._micro_batches(mine, count, len(windows)), self._counted(mine[:count], len(windows))

    def _first_of(self, micro_batches: Iterator[MicroBatch]) -> tuple[FirstPart, Iterator[MicroBatch]]:
        """What the noise scale needs to know of the first micro-batch, and all of them."""
        first = next(micro_batches)
        targets = (first[1] != IGNORED).sum().double()
        if self.world is not ALONE:
            targets = self.world.sum_(targets if self.world.reads_first else torch.zeros_like(targets))
        return FirstPart(self.sharded, targets), chain([first], micro_batches)

    def _slice(self, sequences: int) -> tuple[int, int]:
        """Which of a batch's sequences are this process's: first and number. The last processes may have fewer, or
        none."""
        each = -(-sequences // self.world.dp)
        start = min(self.world.dp_rank * each, sequences)
        return start, min(each, sequences - start)

    def _micro_batches(self, windows: Tensor, count: int, sequences: int) -> Iterator[MicroBatch]:
        """What each forward gets of the first ``count`` windows. All have one size, and all processes as many: they
        are filled up with sequences whose targets do not count."""
        size, forwards = self.forwards(sequences)
        filled = torch.cat((windows[:count], windows[:1].expand(size * forwards - count, -1)))
        for number, chunk in enumerate(torch.split(filled, size)):
            self.go_on()
            yield self.micro_batch_of(chunk, min(max(count - number * size, 0), size))

    def micro_batch_of(self, windows: Tensor, count: int) -> MicroBatch:
        """On the device; only targets of the first ``count`` windows (sequences, seq_len + 1) count."""
        inputs, targets, documents = windows[:, :-1], windows[:, 1:].clone(), None
        if self._end_of_text is not None:
            documents, targets = isolated(windows, self._end_of_text)
            documents = self._on_device(documents)
        targets[count:] = IGNORED
        return self._on_device(inputs), self._on_device(targets), documents

    def forwards(self, sequences: int) -> tuple[int, int]:
        """Sequences of each forward of a batch of so many, and forwards. A compiled model sees one size wherever it
        can: a new one costs more than the padding."""
        each = -(-sequences // self.world.dp)
        size = min(self.micro_batch, each) if self.recipe.layout.compile else even(each, self.micro_batch)
        return size, self.sharded.schedulable(-(-each // size))

    def _on_device(self, tokens: Tensor) -> Tensor:
        if self.device.type == "cuda":
            return tokens.contiguous().pin_memory().to(self.device, non_blocking=True)
        return tokens

    def checkpoint(self) -> Checkpoint:
        """What this process owns of the run. The step counts of the optimiser go with the first element of theirs;
        what is of no parameter with the first process."""
        model: dict[str, Tensor] = {}
        optimizer: dict[str, Tensor] = {}
        places: dict[str, Place] = {}
        moments = self.optimiser.state_dict()
        for piece in self.sharded.pieces:
            here = {kind: moments[kind, piece.name] for kind in MOMENTS if (kind, piece.name) in moments}
            if piece.owned:
                model[piece.name] = piece.local
                first = not any(piece.offset)
                optimizer |= {f"{kind}.{piece.name}": value for kind, value in here.items() if value.dim() or first}
            if not piece.whole:
                names = (f"{kind}.{piece.name}" for kind, value in here.items() if value.dim())
                places |= dict.fromkeys((piece.name, *names), piece.place)
        if self.world.first:
            optimizer |= self.clipper.state_dict()
            if self.loss_scale is not None:
                optimizer |= self.loss_scale.state_dict()
            if self.noise is not None:
                optimizer |= self.noise.state_dict()
        return Checkpoint(self.progress, model, optimizer, places=places)

    @torch.no_grad()
    def restore(self, checkpoint: Checkpoint) -> None:
        """Take up what was saved, by whatever layout."""
        moments = {}
        for held in self.sharded.held:
            name, piece = held.row.name, held.piece
            held.leaf.copy_(part(checkpoint.model, name, piece))
            for kind in MOMENTS:
                if f"{kind}.{name}" in checkpoint.optimizer:
                    moments[kind, name] = part(checkpoint.optimizer, f"{kind}.{name}", piece)
        self.optimiser.load_state_dict(moments)
        self.clipper.load_state_dict(checkpoint.optimizer)
        if self.loss_scale is not None:
            self.loss_scale.load_state_dict(checkpoint.optimizer)
        if self.noise is not None:
            self.noise.load_state_dict(checkpoint.optimizer)
        self.progress = checkpoint.progress

    def follow(self, rewinds: tuple[Rewind, ...]) -> None:
        """Leave out of the stream what the run's returns left out, and lower the lr as they did."""
        self.rewinds = rewinds
        seq_len = self.recipe.model.seq_len
        skip = tuple((start // seq_len, end // seq_len) for start, end in skipped(rewinds))
        self.stream = replace(self.stream, skip=skip)


def default_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def check_trainable(recipe: Recipe, tokens: "TokenSet", world: World = ALONE) -> None:
    """Raise InputError for what would stop a training before its first step."""
    require_trainable(recipe, world.size)
    if recipe.start.folder is not None:
        require_start(recipe.model, recipe.start.folder)
    tokens.stream(recipe.model.seq_len, recipe.data.seed)
    tokens.validation_windows(recipe.model.seq_len, recipe.evaluation.tokens)
