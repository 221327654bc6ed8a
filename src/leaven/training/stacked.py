"""Trials of one shape and different hyperparameters, trained as one model.

A GPU takes hardly longer over the products of many small models than over those of one: what takes its time is to be
told what to do. On a processor it is the arithmetic, and stacking brings nothing (docs/log.md).

A trial comes to what it would come to by itself, but for the order of sums: its parameters, batches, schedule,
clipping and moments are its own, and what becomes no number in one stays there.
"""

import json
import math
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from leaven.data.documents import isolated
from leaven.distributed.pipeline import MicroBatch
from leaven.model.stacked import StackedTransformer
from leaven.planning.flops import flops_per_token
from leaven.recipe.errors import out_of_memory
from leaven.recipe.recipe import Recipe
from leaven.scaling.table import ramp_factors, resolve
from leaven.training.course import Course
from leaven.training.engine import Interrupted, check_trainable
from leaven.training.machine import keep_freed_memory
from leaven.training.micro_batch import even, rule_of_thumb
from leaven.training.outcome import Outcome, Rival
from leaven.training.precision import DTYPES
from leaven.training.rival import comparable, expected, hopeless_against
from leaven.training.stacked_optimiser import StackedAdam, StackedClipper, StackedParameters

if TYPE_CHECKING:
    from leaven.data.tokens import TokenSet

READ_EVERY = 16
"""Steps between looks at the losses, for which the device is waited for."""


def stack_key(recipe: Recipe) -> str | None:
    """Recipes of one key can be one stack; None where a recipe cannot be in any: on many devices, in fp16 (a loss
    scale skips the steps of all), with dropout (masks would be others than those of a run by itself), or from
    given weights."""
    if recipe.layout.ranks > 1 or recipe.precision.compute == "fp16" or recipe.model.dropout or recipe.start.weights:
        return None
    parts = recipe.model_dump(mode="json", include={"model", "data", "batch", "precision", "evaluation"})
    del parts["data"]["seed"]
    if recipe.batch.rule == "scaled":  # what it makes of the ramp is then the same for all
        parts["scaling"] = recipe.scaling.model_dump(exclude={"base"})
    return json.dumps([parts, recipe.hyperparameters.optimizer, resolve(recipe).attention_scale], sort_keys=True)


def stackable(a: Recipe, b: Recipe) -> bool:
    return stack_key(a) is not None and stack_key(a) == stack_key(b)


def train_stack(
    recipes: Sequence[Recipe],
    tokens: "TokenSet",
    device: str,
    rivals: Sequence[Rival | None],
    stop: Callable[[], bool] = lambda: False,
) -> list[Outcome]:
    """Train recipes of one :func:`stack_key` as one model, each as far as it takes to see that it diverges or is out
    of reach of its rival; as two, one after the other, where memory does not do for one.

    Raises:
        InputError: if they cannot be trained.
        Interrupted: if ``stop`` says so, which is asked between steps.
    """
    try:
        return _train(recipes, tokens, device, rivals, stop)
    except RuntimeError as error:
        if not out_of_memory(error) or len(recipes) == 1:
            raise
    torch.cuda.empty_cache()
    half = (len(recipes) + 1) // 2
    return [
        outcome
        for part in (slice(half), slice(half, None))
        for outcome in train_stack(recipes[part], tokens, device, rivals[part], stop)
    ]


def _train(
    recipes: Sequence[Recipe],
    tokens: "TokenSet",
    device: str,
    rivals: Sequence[Rival | None],
    stop: Callable[[], bool],
) -> list[Outcome]:
    began = time.perf_counter()
    stack = TrialStack(recipes, tokens, device)
    trials = [_Trial(recipe, rival) for recipe, rival in zip(recipes, rivals, strict=True)]
    running = list(range(len(trials)))  # which of them the stack's are

    def share() -> None:
        nonlocal began
        now = time.perf_counter()
        for number in running:
            trials[number].seconds += (now - began) / len(running)
        began = now

    while running and not stack.finished:
        steps = []
        for _ in range(READ_EVERY):
            if stop():
                raise Interrupted
            if not stack.finished:
                steps.append((stack.batch_tokens, stack.step()))
        losses = torch.stack([step for _, step in steps]).tolist()  # waits for the device
        share()
        for (batch_tokens, _), step in zip(steps, losses, strict=True):
            for number, loss in zip(running, step, strict=True):
                trials[number].take_in(loss, batch_tokens)
        going = [place for place, number in enumerate(running) if not trials[number].over]
        if len(going) < len(running):
            running = [running[place] for place in going]
            if running:
                stack.keep(going)
    for number, loss in zip(running, stack.evaluate() if running else (), strict=True):
        trials[number].loss = loss
    share()
    return [trial.outcome() for trial in trials]


class _Trial:
    """One trial of a stack, as :func:`leaven.training.trial.train_trial` would judge it."""

    def __init__(self, recipe: Recipe, rival: Rival | None) -> None:
        self.recipe, self.course = recipe, Course(recipe.model.vocab_size, recipe.data.tokens)
        self.rival = rival if rival is not None and comparable(rival, recipe.data.tokens) else None
        self.loss, self.seconds = math.inf, 0.0
        self.diverged = self.stopped = False

    @property
    def over(self) -> bool:
        return self.diverged or self.stopped

    def take_in(self, loss: float, batch_tokens: int) -> None:
        """A step; nothing counts that was done after the end."""
        if self.over:
            return
        points = len(self.course.curve)
        self.diverged = self.course.lost(loss, batch_tokens)
        if self.diverged or self.rival is None or len(self.course.curve) == points:
            return
        if self.course.done > self.recipe.schedule.warmup_tokens and hopeless_against(self.course.curve, self.rival):
            self.stopped, self.loss = True, expected(self.course.curve, self.rival)

    def outcome(self) -> Outcome:
        return Outcome(
            loss=self.loss if math.isfinite(self.loss) else math.inf,
            tokens=self.course.done,
            flops=self.course.done * flops_per_token(self.recipe.model),
            seconds=self.seconds,
            curve=self.course.curve,
            stopped=self.stopped,
            worker=f"{socket.gethostname()}:{os.getpid()}",
        )


class TrialStack:
    """Models, optimisers and the position in the stream of K trials of one :func:`stack_key`.

    Shapes: K trials, S seeds, B sequences of each trial (in the arguments of the model K x B), T positions.
    """

    def __init__(self, recipes: Sequence[Recipe], tokens: "TokenSet", device: str) -> None:
        first, tables = recipes[0], [resolve(recipe) for recipe in recipes]
        assert all(stackable(first, recipe) for recipe in recipes)
        check_trainable(first, tokens)
        self.recipe, self.device, self.dtype = first, torch.device(device), DTYPES[first.precision.compute]
        if self.device.type == "cpu":
            keep_freed_memory()
        multipliers = [{row.name: row.multiplier for row in table.rows} for table in tables]
        self.model = StackedTransformer(first.model, multipliers, tables[0].attention_scale, self.device)
        seeds = [recipe.data.seed for recipe in recipes]
        self.parameters = StackedParameters(self.model, tables, seeds, self.device)
        self.clipper = StackedClipper([recipe.hyperparameters.grad_clip for recipe in recipes], self.parameters)
        self.adam = StackedAdam(self.parameters, first.hyperparameters.optimizer)
        self.steps = self.done = 0
        ends = [first.batches.tokens_at_step(step + 1) for step in range(first.steps)]
        schedules = [[recipe.schedule.multiplier(end, recipe.data.tokens) for recipe in recipes] for end in ends]
        self._schedules = torch.tensor(schedules, dtype=torch.float64, device=self.device)  # (steps, K)
        self._streams = {seed: tokens.stream(first.model.seq_len, seed) for seed in seeds}
        self._seed_K = torch.tensor([list(self._streams).index(seed) for seed in seeds], device=self.device)
        self._validation = tokens.validation_windows(first.model.seq_len, first.evaluation.tokens)
        self._end_of_text = tokens.end_of_text if first.data.documents == "isolated" else None
        skips = [recipe.stability.on_spike == "off" for recipe in recipes]  # a step without a gradient, and goes on
        self._skips_K = torch.tensor(skips, device=self.device)
        self._alive_K = torch.ones(len(recipes), dtype=torch.bool, device=self.device)
        self._micro_batch = rule_of_thumb(first, self.device.type)  # halved when memory is full

    @property
    def finished(self) -> bool:
        return self.steps >= len(self._schedules)

    @property
    def batch_tokens(self) -> int:
        """Of the next step of each trial."""
        return self.recipe.batches.batch_at(self.done)

    def step(self) -> Tensor:
        """One optimiser step of all; the losses before it (K,), no number where a trial has diverged, which is left
        as it was from then on. The device is not waited for."""
        seq_len, batch_tokens = self.recipe.model.seq_len, self.batch_tokens
        first, count = self.done // seq_len, batch_tokens // seq_len
        windows_SBT = np.stack([stream.batch(first, count) for stream in self._streams.values()])
        loss_K = self._gradients(windows_SBT)
        ramp, longer = ramp_factors(self.recipe, self.steps)
        for part in (self.clipper, self.adam):
            part.recount(longer)
        factors_RK, norms_K = self.clipper(self.parameters.grad_norms(), ramp)
        finite_K = norms_K.isfinite()
        self._alive_K = self._alive_K & loss_K.isfinite() & (finite_K | self._skips_K)
        self.adam.step(self._schedules[self.steps], factors_RK, self._alive_K & finite_K, ramp)
        self.steps, self.done = self.steps + 1, self.done + batch_tokens
        return loss_K.masked_fill(~self._alive_K, torch.nan)

    @torch.no_grad()
    def evaluate(self) -> list[float]:
        """The mean validation loss of each trial, in nats per token."""
        windows_SBT, ones_K = self._validation[None], torch.ones_like(self._alive_K, dtype=torch.float64)
        loss_K = torch.zeros_like(ones_K)
        for inputs, targets, documents in self._micro_batches(windows_SBT, torch.zeros_like(self._seed_K)):
            loss_K += self.model.losses(inputs, targets, documents, ones_K, self.dtype)
        losses: list[float] = (loss_K / self._counted(windows_SBT)).tolist()
        return losses

    def keep(self, trials: Sequence[int]) -> None:
        """Go on with these alone."""
        index = torch.tensor(trials, device=self.device)
        for part in (self.model, self.parameters, self.clipper, self.adam):
            part.keep(index)
        self.parameters.hand_to(self.model)
        self._schedules = self._schedules[:, index]
        self._seed_K, self._skips_K, self._alive_K = self._seed_K[index], self._skips_K[index], self._alive_K[index]

    def _gradients(self, windows_SBT: NDArray[np.int64]) -> Tensor:
        """Compute them; the losses (K,)."""
        while True:
            self.parameters.zero_grad()
            factors_K = 1 / self._counted(windows_SBT)[self._seed_K]
            loss_K = torch.zeros_like(factors_K)
            try:
                for inputs, targets, documents in self._micro_batches(windows_SBT, self._seed_K):
                    part_K = self.model.losses(inputs, targets, documents, factors_K, self.dtype)
                    torch.autograd.backward(part_K.sum())
                    loss_K += part_K.detach()
                return loss_K
            except RuntimeError as error:
                if not out_of_memory(error) or self._micro_batch == 1:
                    raise
            self._micro_batch //= 2
            torch.cuda.empty_cache()

    def _counted(self, windows_SBT: NDArray[np.int64]) -> Tensor:
        """Targets of a batch that count in the loss, (S,)."""
        inputs = windows_SBT[..., :-1]
        counted = (inputs != (-1 if self._end_of_text is None else self._end_of_text)).sum((1, 2))
        return torch.from_numpy(counted).to(self.device, torch.float64, non_blocking=True)

    def _micro_batches(self, windows_SBT: NDArray[np.int64], seed_K: Tensor) -> Iterator[MicroBatch]:
        everything = torch.from_numpy(windows_SBT)
        if self.device.type == "cuda":
            everything = everything.pin_memory().to(self.device, non_blocking=True)
        for part_SBT in torch.split(everything, even(everything.shape[1], self._micro_batch), dim=1):
            windows_BT = part_SBT[seed_K].flatten(0, 1)
            if self._end_of_text is None:
                yield windows_BT[:, :-1], windows_BT[:, 1:].contiguous(), None
            else:
                documents, targets = isolated(windows_BT, self._end_of_text)
                yield windows_BT[:, :-1], targets, documents
