"""Chooses the micro-batch: the largest number of sequences in one forward pass.

A run in a single process with at least 1,000 steps measures passes of several sizes. Other runs use a rule of thumb.
"""

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from leaven.errors import InputError
from leaven.model.kernels import prefers_causal_attention, probabilities_kept
from leaven.model.loss import CHUNK_ELEMENTS, CHUNK_ELEMENTS_ELSEWHERE
from leaven.planning.arrangement import Arrangement
from leaven.planning.blueprint import blueprint
from leaven.planning.memory import GIB, mask_bytes, stage_memory
from leaven.planning.training_codes import LEAVEN_BF16
from leaven.recipe.layout import Layout
from leaven.recipe.recipe import Recipe
from leaven.recipe.units import format_quantity
from leaven.training.device import (
    default_device,
    free_memory,
    peak_memory,
    reset_peak_memory,
    unless_out_of_memory,
    wait,
)
from leaven.training.run_folder import RunFolder

if TYPE_CHECKING:
    from leaven.training.engine import Training

RULE_TOKENS = {"cpu": 2_048, "cuda": 16_384}
"""Tokens of a forward pass by rule of thumb: few on a CPU, so that the activations of small models stay in the cache
(measured: docs/log.md)."""

TIMED_STEPS = 1_000  # runs of fewer steps are not timed, because timing costs about eight steps
ROUNDS = 3  # timed passes of a candidate, after one that is not counted
LIMIT_SECONDS = 60.0
"""Timing stops before a candidate that would probably bring the total time above this limit."""

WORTH = 0.02
"""The choice is the smallest micro-batch that is at most this share slower than the fastest. A smaller micro-batch
saves memory."""

ACTIVATION_BYTES = {"fp32": 8, "bf16": 6, "fp16": 6}
"""Bytes per activation element in the planner's formula, for an uncompiled forward pass. They were measured on a CPU
over four shapes (docs/log.md), and include copies and, with autocast, a residual stream and norms in fp32."""

SHARE = {"cpu": 0.8, "cuda": 1.5, "mps": 0.8}
"""Largest (memory that a micro-batch needs by the planner's formula) / (free memory). It is above 1 on CUDA, where
running out of memory only raises an error. On a CPU and on mps, this may crash the process or the system."""


@dataclass(frozen=True)
class Timing:
    micro_batch: int  # sequences
    tokens_per_second: float
    peak_gib: float  # peak memory use


@dataclass(frozen=True)
class Choice:
    micro_batch: int  # sequences
    why: str  # the reason, which is written into the recipe
    timings: tuple[Timing, ...] = ()  # from small to large micro-batches
    too_large: tuple[int, ...] = ()  # sizes that ran out of memory, or do not fit by the planner's formula
    seconds: float = 0.0  # time that the choice took


def even(sequences: int, micro_batch: int) -> int:
    """Return the number of sequences in a pass when a batch is split evenly into as few passes as possible.

    A pass has at most ``micro_batch`` sequences. The last pass may have fewer sequences than the others.

    >>> even(12, 8), even(7, 4), even(5, 8)
    (6, 4, 5)
    """
    forwards = -(-sequences // micro_batch)
    return -(-sequences // forwards)


def rule_of_thumb(recipe: Recipe, device_type: str) -> int:
    """Return the recipe's micro-batch. If it is "auto", choose one without a measurement."""
    if recipe.batch.micro_batch != "auto":
        return recipe.batch.micro_batch
    tokens = RULE_TOKENS.get(device_type, RULE_TOKENS["cuda"])
    return max(1, min(tokens // recipe.model.seq_len, _largest_micro_batch(recipe)))


def _largest_micro_batch(recipe: Recipe) -> int:
    """Return the largest size of a micro-batch, in sequences, with which each data-parallel rank has enough
    micro-batches in a step. Enough is one, or ``pp`` in a pipeline; twice as many if the run measures the noise
    scale. Return 1 if no size gives enough."""
    layout, batch = recipe.layout, recipe.batch.tokens
    if layout.pp > 1:  # needs ``pp`` micro-batches also at the smallest batch of a ramp
        batch = recipe.batch.smallest_tokens // layout.pp
    if recipe.stability.noise_scale_every_tokens is not None:
        batch //= 2
    return max(1, batch // layout.dp // recipe.model.seq_len)


def as_started(recipe: Recipe, run: RunFolder) -> Recipe:
    """Return ``recipe`` with the micro-batch of ``run``, if it has started, in place of "auto": another one would
    change the last bits of the loss. But if it is too large for the pipeline of ``recipe``, reduce it."""
    if recipe.batch.micro_batch != "auto" or not run.recipe_file.exists():
        return recipe
    begun = run.recipe()
    size = begun.batch.micro_batch
    if size != "auto" and recipe.layout.pp > 1:  # the run may have started without a pipeline, which limits the size
        size = min(size, _largest_micro_batch(recipe))
    return recipe.replace({"batch.micro_batch": size, "why": recipe.why | begun.why})


def by_rule_of_thumb(recipe: Recipe) -> Recipe:
    size = rule_of_thumb(recipe, default_device().type)
    tokens = size * recipe.model.seq_len
    return with_micro_batch(recipe, size, f"auto: about {tokens:,} tokens a forward pass, not timed")


def with_micro_batch(recipe: Recipe, size: int, why: str) -> Recipe:
    return recipe.replace({"batch.micro_batch": size, "why": recipe.why | {"batch.micro_batch": why}})


def needed_memory(recipe: Recipe, micro_batch: int, device_type: str) -> float:
    """Estimate the bytes that training on one device needs in addition to the weights."""
    shape, lower = recipe.model, recipe.precision.compute != "fp32"
    code = replace(
        LEAVEN_BF16.with_muon(recipe.hyperparameters.ns_steps),
        compute_copy=2 if lower else 0,
        element=ACTIVATION_BYTES[recipe.precision.compute],
        residual=ACTIVATION_BYTES[recipe.precision.compute],
        logit=12,
        logits_at_once=CHUNK_ELEMENTS.get(device_type, CHUNK_ELEMENTS_ELSEWHERE),
        # Attention with dropout has no fused kernel on a CPU.
        flash_attention=not (shape.dropout and device_type == "cpu"),
        fixed_gib=0,
        masks=False,
    ).averaging(recipe.average is not None)
    recompute = recipe.layout.recompute
    # Two micro-batches a step, whose forward passes find gradients in memory.
    arrangement = Arrangement(Layout(recompute=recompute), micro_batch, 2)
    memory = stage_memory(shape, arrangement, 0, code)
    # `ACTIVATION_BYTES` is a factor for activations; an element of a mask has its own size.
    masked = replace(code, masks=True, element=2 if lower else 4).isolating(recipe.data.documents)
    windows_alone = shape.positions != "alibi" and not (masked.isolated or shape.dropout)
    without = prefers_causal_attention(device_type) and windows_alone  # the kernel needs no mask
    masks = 0.0 if without else mask_bytes(blueprint(shape), arrangement, 0, masked)
    probabilities = 0
    if device_type == "cpu" and code.flash_attention and not shape.attention_softcap:
        layers = 1 if recompute == "full" else shape.n_layers
        probabilities = layers * micro_batch * shape.n_heads * probabilities_kept(shape.seq_len)
    return memory.total - memory.weights + masks + (2 if lower else 4) * probabilities


def require_memory(recipe: Recipe) -> None:
    """Raise InputError if the planner expects that not even one sequence fits into memory."""
    fitting(recipe, default_device(), [1], weights=LEAVEN_BF16.weights * recipe.model.params)


def fitting(recipe: Recipe, device: torch.device, candidates: list[int], weights: float = 0.0) -> list[int]:
    """Return the candidates that fit into memory by the planner's formula, in the given order. ``weights`` are the
    bytes of weights that are not allocated yet. Raise InputError if not even the smallest candidate fits."""
    free, share = free_memory(device), SHARE[device.type]
    needed = {size: needed_memory(recipe, size, device.type) + weights for size in candidates}
    if min(needed.values()) > share * free:
        raise InputError(
            f"training needs about {min(needed.values()) / GIB:.3g} GiB even with a micro-batch of {min(candidates)}"
            f", but only {share * free / GIB:.3g} GiB may be used on {device} ({share:.0%} of {free / GIB:.3g} GiB "
            "free); use a smaller model or a shorter [model] seq_len"
        )
    return [size for size in candidates if needed[size] <= share * free]


def choose_micro_batch(training: "Training") -> Choice:
    """Choose the micro-batch of a new run by timing, or by a rule of thumb if the run is short. Raise InputError if
    no micro-batch fits into memory, and StopRequested if the training was asked to stop."""
    began, recipe, device = time.perf_counter(), training.recipe, training.device
    sequences = recipe.batch.tokens // recipe.model.seq_len
    powers = {even(sequences, 2**n) for n in range(sequences.bit_length() + 1)}  # the largest is the whole batch
    everything = sorted(size for size in powers if size <= _largest_micro_batch(recipe))
    candidates = fitting(recipe, device, everything)
    choice = (_largest_that_runs if recipe.steps < TIMED_STEPS else _fastest)(training, candidates)
    if choice is None:
        raise InputError(
            f"out of memory with a micro-batch of 1 on {device}, which has {free_memory(device) / GIB:.1f} GiB "
            "free; use a smaller model or a shorter [model] seq_len"
        )
    tried = f"; out of memory with {', '.join(map(str, choice.too_large))}" if choice.too_large else ""
    ruled_out = tuple(size for size in everything if size > candidates[-1])
    return replace(
        choice,
        why=f"auto: {choice.why}{tried}",
        too_large=choice.too_large + ruled_out,
        seconds=time.perf_counter() - began,
    )


def _largest_that_runs(training: "Training", candidates: list[int]) -> Choice | None:
    """Return the first micro-batch that fits into memory, or None: try the smaller of ``candidates[-1]`` and
    :func:`rule_of_thumb`, then half of it, and so on."""
    size = min(rule_of_thumb(training.recipe, training.device.type), candidates[-1])
    too_large: list[int] = []
    while time_passes(training, size) is None:
        too_large.append(size)
        size //= 2
        if size == 0:
            return None
    tokens = size * training.recipe.model.seq_len
    why = f"about {tokens:,} tokens a forward pass, not timed because the run has under {TIMED_STEPS:,} steps"
    return Choice(size, why, too_large=tuple(too_large))


def _fastest(training: "Training", candidates: list[int]) -> Choice | None:
    """Return the smallest candidate that is about as fast as the fastest, or None if no candidate fits."""
    began, recipe = time.perf_counter(), training.recipe
    sequences = recipe.batch.tokens // recipe.model.seq_len
    timings: list[Timing] = []
    too_large: tuple[int, ...] = ()
    seconds_per_sequence = 0.0
    for size in candidates:
        if timings and time.perf_counter() - began + (1 + ROUNDS) * size * seconds_per_sequence > LIMIT_SECONDS:
            break
        reset_peak_memory(training.device)
        times = []
        for _ in range(1 + ROUNDS):
            seconds = time_passes(training, size)
            if seconds is None:
                break
            times.append(seconds)
        if len(times) <= ROUNDS:
            too_large = (size,)
            break
        best = min(times[1:])  # the first step is a warm-up
        seconds_per_sequence = best / size
        speed = sequences * recipe.model.seq_len / (-(-sequences // size) * best)
        timings.append(Timing(size, speed, peak_memory(training.device) / GIB))
    if not timings:
        return None
    enough = max(timing.tokens_per_second for timing in timings) * (1 - WORTH)
    chosen = next(timing.micro_batch for timing in timings if timing.tokens_per_second >= enough)
    speeds = ", ".join(f"{t.micro_batch}: {format_quantity(t.tokens_per_second)}" for t in timings)
    eager = ", timed uncompiled" if recipe.layout.compile else ""
    return Choice(chosen, f"fastest of {speeds} tokens/s{eager}", tuple(timings), too_large)


def time_passes(training: "Training", size: int) -> float | None:
    """Return the seconds of a forward and a backward pass over ``size`` sequences, or None if memory runs out. The
    state of the run does not change. Raise StopRequested if the training was asked to stop."""
    training.check_stop()
    device, seq_len = training.device, training.recipe.model.seq_len
    numbers = torch.from_numpy(training.stream.batch(training.progress.tokens // seq_len, size))
    scale = 1.0 if training.loss_scale is None else training.loss_scale.value

    def work() -> float:
        if size * seq_len < training.recipe.batch.tokens:
            for parameter in training.model.parameters():
                parameter.grad = torch.zeros_like(parameter)
        wait(device)
        began = time.perf_counter()
        with (
            torch.random.fork_rng([device] if device.type == "cuda" else []),
            torch.compiler.set_stance("force_eager"),
        ):
            moments = None if training.optimizer.adam.state else _reserve(training, 2)
            training.sharded.forward_backward([training.micro_batch_of(numbers, size)], scale / (size * seq_len))
            wait(device)
            _reserve(training, 1)  # a step keeps a copy of the weights, to measure the update
            del moments
        return time.perf_counter() - began

    return unless_out_of_memory(work, device, training.sharded.drop_gradients)


def _reserve(training: "Training", copies: int) -> torch.Tensor | None:
    """Allocate CUDA memory for ``copies`` copies of the parameters, to see whether it is available. On other devices,
    return None: there, allocated memory takes no space until it is written."""
    if training.device.type != "cuda":
        return None
    n_parameters = sum(parameter.numel() for parameter in training.sharded.local_parameters)
    return torch.empty(copies * n_parameters, device=training.device)
