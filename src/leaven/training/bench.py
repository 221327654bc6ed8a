"""Measures the speed of training steps by micro-batch and global batch. Suggests a micro-batch and
the first batch size of a ramp."""

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from leaven.documents.planning import BenchChoice, BenchDocument, BenchSpeed, RampStart
from leaven.planning.flops import utilisation
from leaven.planning.memory import GIB
from leaven.recipe.recipe import Recipe
from leaven.training.checkpoint import Progress
from leaven.training.device import (
    device_peak,
    mfu_convention,
    peak_memory,
    reset_peak_memory,
    unless_out_of_memory,
)
from leaven.training.engine import Training
from leaven.training.micro_batch import fitting, require_memory

if TYPE_CHECKING:
    from leaven.data.tokens import TokenSet

STEPS = 3  # optimizer steps of a measurement; the first is a warm-up and is not measured


def batches_of(recipe: Recipe) -> list[int]:
    """Return the global batch sizes to measure, in sequences: the recipe's / 64, 32, ..., 1, rounded up."""
    sequences = recipe.batch.tokens // recipe.model.seq_len
    return sorted({-(-sequences // 2**n) for n in range(7)})


def micro_batches_of(recipe: Recipe) -> list[int]:
    """Return the micro-batches to measure, in sequences: powers of two below the recipe's batch, and the batch."""
    sequences = recipe.batch.tokens // recipe.model.seq_len
    return sorted({min(2**n, sequences) for n in range(sequences.bit_length() + 1)})


def bench(
    recipe: Recipe,
    tokens: "TokenSet",
    micro_batches: list[int],
    global_batches: list[int],
    *,
    limit_seconds: float,
    share: float = 1.0,
    on_row: Callable[[int, int], None] = lambda done, total: None,
    stop: Callable[[], bool] = lambda: False,
) -> BenchDocument:
    """Measure the speed of training steps for all pairs of a global batch and a micro-batch that fits into it and
    into memory. Return the speeds, and the suggestions of :func:`choose`.

    Args:
        micro_batches: in sequences, like ``global_batches``.
        limit_seconds: no pair is begun after this time, but at least one pair is measured.
        share: the suggested ramp starts at the smallest batch that reaches this fraction of the highest speed.
        on_row: called with (pairs done, all pairs), before each pair and at the end.
        stop: polled before each pair. No further pair is measured once it returns True.

    Raises:
        InputError: if the recipe cannot be trained here, or not even the smallest micro-batch fits into memory.
    """
    began = time.perf_counter()
    constant: dict[str, Any] = {"batch.ramp": None, "batch.stages": [], "batch.stages_rule": None}
    recipe = recipe.replace(constant | {"batch.micro_batch": 1})
    require_memory(recipe)
    training = Training(recipe, tokens)
    training.telemetry.peak = peak = device_peak(training.device, recipe.precision.compute)
    allowed = fitting(recipe, training.device, micro_batches)
    too_large = [size for size in micro_batches if size not in allowed]
    cells = [(size, batch) for batch in sorted(global_batches) for size in allowed if size <= batch]
    rows: list[BenchSpeed] = []
    whole, unfinished = True, None
    for done, (size, batch) in enumerate(cells):
        on_row(done, len(cells))
        if stop() or (rows and time.perf_counter() - began > limit_seconds):
            whole, unfinished = False, batch if rows and rows[-1].global_batch == batch else None
            break
        if size in too_large:
            continue
        row = _measure(training, size, batch)
        if row is None:
            too_large += [other for other in allowed if other >= size]
        else:
            rows.append(row)
    on_row(len(cells), len(cells))
    return BenchDocument(
        rows=rows,
        choose=choose([row for row in rows if row.global_batch != unfinished], share, recipe.model.seq_len),
        too_large=sorted(too_large),
        whole=whole,
        unfinished=unfinished,
        mfu_convention=mfu_convention(peak),
    )


def choose(rows: Sequence[BenchSpeed], share: float, seq_len: int) -> BenchChoice | None:
    """Return the fastest micro-batch at the largest global batch, and the start of a ramp: the smallest global
    batch that reaches ``share`` of the highest speed. Return None without rows. The ``rows`` must be in
    ascending order of the global batch."""
    fastest: dict[int, BenchSpeed] = {}  # by global batch
    for row in rows:
        if row.global_batch not in fastest or row.tokens_per_second > fastest[row.global_batch].tokens_per_second:
            fastest[row.global_batch] = row
    if not fastest:
        return None
    peak = max(row.tokens_per_second for row in fastest.values())
    start = next(row for row in fastest.values() if row.tokens_per_second >= share * peak)
    ramp_start = RampStart(
        global_batch=start.global_batch,
        batch_tokens=start.global_batch * seq_len,
        micro_batch=start.micro_batch,
        share_of_peak=start.tokens_per_second / peak,
    )
    return BenchChoice(micro_batch=[*fastest.values()][-1].micro_batch, share=share, ramp_start=ramp_start)


def _measure(training: Training, micro_batch: int, batch: int) -> BenchSpeed | None:
    """Return the speed of the fastest step after the warm-up, or None if memory runs out."""
    tokens = batch * training.recipe.model.seq_len
    training.recipe = training.recipe.replace({"batch.tokens": tokens, "batch.micro_batch": micro_batch})
    training.progress = Progress()
    reset_peak_memory(training.device)
    steps = unless_out_of_memory(
        lambda: [training.issue()() for _ in range(STEPS)], training.device, training.sharded.drop_gradients
    )
    if steps is None:
        return None
    step = max(steps[1:], key=lambda step: step.tokens_per_second)
    assert step.mfu is not None
    return BenchSpeed(
        micro_batch=micro_batch,
        global_batch=batch,
        tokens_per_second=step.tokens_per_second,
        tflops=step.tflops,
        peak_gib=peak_memory(training.device) / GIB,
        **utilisation(training.recipe.model, training.recipe.layout.recompute, step.mfu),
    )
