"""The state of a run and its optimizer step (:meth:`Training.issue`). The step depends only on recipe,
tokens and state."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from leaven.distributed.pieces import Place
from leaven.distributed.pipeline import MicroBatch
from leaven.distributed.process_group import SINGLE_PROCESS, ProcessGroup
from leaven.distributed.sharded_model import ShardedModel
from leaven.errors import InputError, TextUnreadable
from leaven.interop.weights import require_start, router_biases, start_from
from leaven.model.initialisation import name_seed
from leaven.model.kernels import widened
from leaven.model.loss import IGNORED, isolated
from leaven.model.transformer import Transformer
from leaven.planning.trainable import require_trainable
from leaven.recipe.recipe import Recipe
from leaven.scaling.table import optimizer_groups, parameter_table, ramp_factors
from leaven.training.average import AVERAGE, WeightAverage
from leaven.training.checkpoint import Checkpoint, Progress
from leaven.training.checkpoint_tensors import part
from leaven.training.device import DTYPES, default_device, keep_freed_memory, require_device
from leaven.training.load_balance import LoadBalance
from leaven.training.loop import Diverged, passes
from leaven.training.metrics import Step, Telemetry
from leaven.training.micro_batch import even, rule_of_thumb
from leaven.training.muon import on_one_process
from leaven.training.optimizer import MOMENTS, Clipper, LossScale, NoiseScale, Optimizer
from leaven.training.rewind import Rewind, lr_factor, skipped
from leaven.training.spikes import Limits

if TYPE_CHECKING:
    from leaven.data.tokens import TokenSet


class StopRequested(Exception):
    """Raised by :meth:`Training.check_stop` when the user has requested a stop."""


@dataclass
class TrainingBatch:
    """The batch of an optimizer step, with the micro-batches that this process feeds to the model."""

    tokens: int  # number of tokens in the batch of all processes
    targets: int  # number of target tokens, over all processes, that count in the loss
    micro_batches: Iterator[MicroBatch]  # the micro-batches of this process


class Training:
    """The state of a run in one of its processes: model, optimizer and position in the data."""

    def __init__(
        self,
        recipe: Recipe,
        tokens: "TokenSet",
        device: str | None = None,
        group: ProcessGroup = SINGLE_PROCESS,
        *,
        resumes: bool = False,
    ) -> None:
        """Build the model, the optimizer and the data stream. With ``resumes``, do not read the weights of [start],
        because a checkpoint will replace them."""
        start = None if resumes else recipe.start.folder
        check_trainable(recipe, tokens, group, resumes)
        self.recipe, self.resumes = recipe, resumes
        self.device = torch.device(device) if device else default_device()
        require_device(recipe, self.device)
        if self.device.type == "cpu":
            keep_freed_memory()
        self.group = group
        table = parameter_table(recipe)
        self.sharded = ShardedModel(
            recipe.model,
            table,
            seed=recipe.data.seed,
            dtype=DTYPES[recipe.precision.compute],
            device=self.device,
            layout=recipe.layout,
            group=group,
            z_loss=recipe.hyperparameters.z_loss,
        )
        if start is not None:
            start_from(self.sharded.pieces, recipe.model, table, start)
        stored = self.sharded.parameters
        groups = optimizer_groups([each.row for each in stored], {each.row.name: each.local for each in stored})
        self.optimizer = Optimizer.build(groups, recipe.hyperparameters, **self._muon_arguments())
        self.clipper = Clipper.build(recipe.hyperparameters.grad_clip, self.sharded, table)
        self.loss_scale = LossScale.build(self.device) if recipe.precision.compute == "fp16" else None
        self.noise = NoiseScale.build(recipe.stability.noise_scale_every_tokens, self.sharded)
        self.load_balance = LoadBalance.build(recipe.model, self.sharded)
        if start is not None and self.load_balance is not None and self.load_balance.bias_step:
            self.load_balance.bias_LE.copy_(router_biases(recipe.model, start))
        stateful = (self.clipper, self.loss_scale, self.noise, self.load_balance)
        self._stateful = [part for part in stateful if part is not None]
        self.average = WeightAverage(self.sharded) if recipe.average else None
        self.stream = tokens.stream(recipe.model.seq_len, recipe.data.seed)
        self.validation = tokens.validation_windows(recipe.model.seq_len, recipe.evaluation.tokens)
        self._end_of_text = tokens.end_of_text if recipe.data.documents == "isolated" else None
        self.progress = Progress()
        self.rewinds: tuple[Rewind, ...] = ()
        self.stop: Callable[[], bool] = lambda: False
        self.telemetry = Telemetry(recipe, table, self.sharded)
        self.limits = Limits()  # on loss and gradient norm, set by the spike guard for the next step

    def _muon_arguments(self) -> dict[str, Any]:
        """Return the arguments of MuonWithAdamW that depend on the precision and the layout; {} without Muon."""
        if not self.recipe.hyperparameters.ns_steps:
            return {}
        whole = self.sharded.whole_matrices()
        lower = self.recipe.precision.compute != "fp32"
        return {"dtype": torch.bfloat16 if lower else None, "on_whole": whole.map if whole else on_one_process}

    @property
    def model(self) -> Transformer:
        """The model of a run in a single process."""
        return self.sharded.stages[0].model

    @property
    def tokens(self) -> int:
        return self.progress.tokens

    @property
    def next_batch_tokens(self) -> int:
        return self.recipe.batches.batch_at(self.progress.tokens)

    @property
    def finished(self) -> bool:
        return self.progress.step >= self.recipe.steps

    @property
    def micro_batch(self) -> int:
        """The largest number of sequences in a forward pass."""
        return rule_of_thumb(self.recipe, self.device.type)

    def check_stop(self) -> None:
        """Raise StopRequested if ``stop()`` is true. Do nothing with several processes: they check between steps."""
        if self.group is SINGLE_PROCESS and self.stop():
            raise StopRequested

    def abandon_step(self) -> None:
        """Undo a step or an evaluation that an exception has interrupted."""
        self.sharded.drop_gradients()
        self.sharded.train(True)

    def step(self) -> Step:
        """Take one optimizer step, and return its metrics. Raise Diverged if the step diverges and ``on_spike`` is
        not ``off``."""
        step = self.issue()()
        if step.diverged and self.recipe.stability.on_spike != "off":
            raise Diverged(f"loss {step.loss:g}, gradient norm {step.grad_norm:g} at step {step.step}")
        return step

    def issue(self) -> Callable[[], Step]:
        """Start an optimizer step on the device. Return a function that waits for the step and returns its metrics.

        Call the returned functions in the order of their steps. The step changes the weights only if its loss
        and its gradient norm are finite and below :attr:`limits`. Raise TextUnreadable if the batch cannot be read,
        and StopRequested in the same cases as :meth:`check_stop`.
        """
        self.telemetry.begin()
        recipe, start, scale = self.recipe, self.progress, self.loss_scale.value if self.loss_scale else None
        batch = self._batch_at(start.tokens)
        tokens = start.tokens + batch.tokens
        noise = self._noise_of(batch)
        self._seed_dropout()
        factor = (1 if scale is None else scale) / batch.targets
        losses = self.sharded.forward_backward(batch.micro_batches, factor, noise.after_first if noise else None)
        loss = self.sharded.total(losses)
        if scale is not None:
            loss = loss / scale
        z_loss = self.sharded.total_z_loss()
        loads, *routed = self.load_balance.measure() if self.load_balance else (None, None, None)

        # The state changes only from here on: a step that is abandoned earlier leaves no trace.
        ramp, longer = ramp_factors(recipe, start.step)
        if longer != 1:  # the half-life of the moments has changed with the batch size
            self.clipper.recount(longer)
            self.optimizer.recount(longer)
        grad_norm = self.clipper.unscale_and_clip(scale, ramp)
        noise_scale = noise.after_all(batch.targets, grad_norm, scale) if noise else None
        applied = (loss < self.limits.loss) & (grad_norm < self.limits.grad_norm)  # False for nan
        self.telemetry.remember_parameters()
        multiplier = recipe.schedule.multiplier(tokens, recipe.data.tokens) * lr_factor(self.rewinds, tokens)
        self.optimizer.step(multiplier, skip=~applied, ramp=ramp)
        if self.load_balance and loads is not None:
            self.load_balance.update(loads, applied)
        if self.loss_scale is not None:
            self.loss_scale.update(loss.isfinite() & grad_norm.isfinite())
        if self.average and recipe.average:
            share = recipe.average.share(start.tokens, tokens, recipe.data.tokens)
            if share:
                self.average.add(share)
        self.progress = Progress(start.step + 1, tokens, start.seconds)

        of_tokens = [None if value is None else value / batch.targets for value in (z_loss, routed[0])]
        measured = (loss, grad_norm, applied, scale, noise_scale, *of_tokens, routed[1])
        read = self.telemetry.measure_later(self.progress, batch.tokens, multiplier * ramp.lr, measured)

        def result() -> Step:
            step = read()
            self.progress = replace(self.progress, seconds=self.progress.seconds + step.seconds)
            return step

        return result

    def _noise_of(self, batch: TrainingBatch) -> NoiseScale | None:
        if self.noise is None or not passes(self.noise.every, self.tokens, self.tokens + batch.tokens):
            return None
        self.noise.first_targets = self._first_targets(batch)
        return self.noise

    def _seed_dropout(self) -> None:
        """Seed the dropout masks by seed, step and rank, so that a resumed run draws the same masks."""
        if self.recipe.model.dropout:
            ranks = () if self.group is SINGLE_PROCESS else (self.group.rank,)
            torch.manual_seed(name_seed(self.recipe.data.seed, "dropout", self.progress.step, *ranks))

    def _first_targets(self, batch: TrainingBatch) -> Tensor:
        """Return the number of targets that count in the loss, over the first micro-batch of every process, a scalar.
        A sample that several processes read counts once."""
        first = next(batch.micro_batches)
        batch.micro_batches = chain([first], batch.micro_batches)
        targets = widened((first[1] != IGNORED).sum())
        if self.group is SINGLE_PROCESS:
            return targets
        return self.group.all_reduce_(targets if self.group.is_first_reader else torch.zeros_like(targets))

    def evaluate(self, averaged: bool = False) -> float:
        """Return the mean validation loss in nats per token. If ``averaged``, use averaged weights, if any."""
        began = time.perf_counter()
        windows = torch.from_numpy(self.validation)
        start, count = self._own_sequences(len(windows))
        batch = self._batch(windows[start : start + max(count, 1)] if count else windows[:1], count, len(windows))
        average = self.average if averaged and self.average and self.average.begun else None
        with average.in_model() if average else nullcontext():
            loss = self.sharded.total(self.sharded.forward(batch.micro_batches))
        self.progress = replace(self.progress, seconds=self.progress.seconds + time.perf_counter() - began)
        return float(loss) / batch.targets

    def validation_targets(self) -> NDArray[np.int64]:
        """Return the target tokens that count in the validation loss."""
        targets, inputs = self.validation[:, 1:], self.validation[:, :-1]
        return targets[inputs != self._end_of_text] if self._end_of_text is not None else targets.ravel()

    def _batch_at(self, tokens: int) -> TrainingBatch:
        seq_len, batch_tokens = self.recipe.model.seq_len, self.recipe.batches.batch_at(tokens)
        sequences = batch_tokens // seq_len
        start, count = self._own_sequences(sequences)
        try:
            windows = torch.from_numpy(self.stream.batch(tokens // seq_len + start, max(count, 1)))
        except InputError as error:
            raise TextUnreadable(str(error)) from None
        return self._batch(windows, count, sequences)

    def _batch(self, windows: Tensor, count: int, sequences: int) -> TrainingBatch:
        """Return a batch of ``sequences`` samples over all processes. Ours are the first ``count`` of ``windows``."""
        tokens = targets = sequences * self.recipe.model.seq_len
        if self._end_of_text is not None:
            mine = (windows[:count, :-1] != self._end_of_text).sum().double()
            targets = int(self.group.all_reduce_(mine if self.group.is_first_reader else torch.zeros_like(mine)))
        return TrainingBatch(tokens, targets, self._micro_batches(windows, count, sequences))

    def _own_sequences(self, sequences: int) -> tuple[int, int]:
        """Return the range of a batch's sequences that this process reads, as (first, number)."""
        each = -(-sequences // self.group.dp)
        start = min(self.group.dp_rank * each, sequences)
        return start, min(each, sequences - start)

    def _micro_batches(self, windows: Tensor, count: int, sequences: int) -> Iterator[MicroBatch]:
        """Yield the first ``count`` of ``windows`` in micro-batches, as many and as large as on all other processes.
        To fill them, the first window is repeated; the copies do not count in the loss."""
        size, micro_batches = self.split(sequences)
        filled = torch.cat((windows[:count], windows[:1].expand(size * micro_batches - count, -1)))
        for number, chunk in enumerate(torch.split(filled, size)):
            self.check_stop()
            yield self.micro_batch_of(chunk, min(max(count - number * size, 0), size))

    def micro_batch_of(self, windows: Tensor, count: int) -> MicroBatch:
        """Make a micro-batch of ``windows`` (sequences, seq_len + 1). Only the first ``count`` have a loss."""
        inputs, targets, documents = windows[:, :-1], windows[:, 1:].clone(), None
        if self._end_of_text is not None:
            documents, targets = isolated(windows, self._end_of_text)
            documents = self._on_device(documents)
        targets[count:] = IGNORED
        return self._on_device(inputs), self._on_device(targets), documents

    def split(self, sequences: int) -> tuple[int, int]:
        """Return (sequences per micro-batch, micro-batches per process) for a batch of ``sequences`` sequences. A
        compiled model keeps its micro-batch if possible: padding costs less than compiling for another size."""
        each = -(-sequences // self.group.dp)
        size = min(self.micro_batch, each) if self.recipe.layout.compile else even(each, self.micro_batch)
        return size, self.sharded.schedulable(-(-each // size))

    def _on_device(self, tokens: Tensor) -> Tensor:
        if self.device.type == "cuda":
            return tokens.contiguous().pin_memory().to(self.device, non_blocking=True)
        return tokens.to(self.device)

    def checkpoint(self, state: Mapping[str, Any] | None = None) -> Checkpoint:
        """Return what this process saves in a checkpoint. ``state`` contains the values of the callbacks."""
        model: dict[str, Tensor] = {}
        optimizer: dict[str, Tensor] = {}
        places: dict[str, Place] = {}
        moments = self.optimizer.state_dict() | (self.average.state_dict() if self.average else {})
        for piece in self.sharded.pieces:
            here = {kind: moments[kind, piece.name] for kind in (*MOMENTS, AVERAGE) if (kind, piece.name) in moments}
            if piece.owned:
                model[piece.name] = piece.local
                first = not any(piece.offset)
                optimizer |= {f"{kind}.{piece.name}": value for kind, value in here.items() if value.dim() or first}
            if not piece.whole:
                names = (f"{kind}.{piece.name}" for kind, value in here.items() if value.dim())
                places |= dict.fromkeys((piece.name, *names), Place(piece.shape, piece.offset))
        if self.group.is_first:
            for stateful in self._stateful:
                optimizer |= stateful.state_dict()
        return Checkpoint(self.progress, model, optimizer, state or {}, self.rewinds, places)

    @torch.no_grad()
    def restore(self, checkpoint: Checkpoint) -> None:
        """Restore the state from a checkpoint, which may have been saved with another layout."""
        moments = {}
        for each in self.sharded.parameters:
            name, piece = each.row.name, each.piece
            each.local.copy_(part(checkpoint.model, name, piece))
            for kind in (*MOMENTS, AVERAGE):
                if f"{kind}.{name}" in checkpoint.optimizer:
                    moments[kind, name] = part(checkpoint.optimizer, f"{kind}.{name}", piece)
        self.optimizer.load_state_dict(moments)
        if self.average:
            self.average.load_state_dict(moments)
        for stateful in self._stateful:
            stateful.load_state_dict(checkpoint.optimizer)
        self.progress = checkpoint.progress

    def follow(self, rewinds: tuple[Rewind, ...]) -> None:
        """From now on, skip data and lower the lr as these rewinds require."""
        self.rewinds = rewinds
        seq_len = self.recipe.model.seq_len
        skip = tuple((start // seq_len, end // seq_len) for start, end in skipped(rewinds))
        self.stream = replace(self.stream, skip=skip)


def check_trainable(
    recipe: Recipe, tokens: "TokenSet", group: ProcessGroup = SINGLE_PROCESS, resumes: bool = False
) -> None:
    """Raise InputError if the processes of ``group`` cannot train ``recipe`` on ``tokens``. With ``resumes``, the
    weights of [start] are not checked."""
    require_trainable(recipe, group.size)
    if recipe.start.folder is not None and not resumes:
        require_start(recipe.model, recipe.start.folder)
    if recipe.data.documents == "isolated" and tokens.end_of_text is None:
        raise InputError(
            'documents = "isolated" needs the id of the token that ends documents; set end_of_text in [data]'
        )
    tokens.stream(recipe.model.seq_len, recipe.data.seed)
    tokens.validation_windows(recipe.model.seq_len, recipe.evaluation.tokens)
