"""Measures throughput by micro-batch and global batch with real steps, and suggests where a batch ramp should
start."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from leaven.planning.memory import GIB
from leaven.recipe.recipe import Recipe
from leaven.training.checkpoint import Progress
from leaven.training.device import (
    Utilisation,
    device_peak,
    mfu_convention,
    peak_memory,
    reset_peak_memory,
    unless_out_of_memory,
    utilisation,
)
from leaven.training.engine import Training
from leaven.training.micro_batch import fitting, require_memory

if TYPE_CHECKING:
    from leaven.data.tokens import TokenSet

STEPS = 3
"""Steps of a measurement; the first one is not counted."""


@dataclass(frozen=True)
class BenchMeasurement:
    """The measurement of one pair of batch sizes."""

    micro_batch: int  # sequences
    global_batch: int  # sequences
    tokens_per_second: float
    tflops: float
    mfu: float
    peak_gib: float  # most memory held, on a CPU by the whole process


@dataclass(frozen=True)
class Bench:
    """All measurements of a recipe on a device."""

    recipe: Recipe
    convention: str  # of MFU
    rows: tuple[BenchMeasurement, ...]  # in the order of the global batch, then of the micro-batch
    too_large: tuple[int, ...]  # micro-batches that do not fit
    whole: bool  # False if a stop or the time limit ended it early
    unfinished: int | None = None  # the global batch at which it ended; its fastest micro-batch may be missing

    def best(self, global_batch: int) -> BenchMeasurement:
        """Return the fastest micro-batch of a global batch."""
        return max(
            (row for row in self.rows if row.global_batch == global_batch), key=lambda row: row.tokens_per_second
        )

    @property
    def global_batches(self) -> list[int]:
        """The measured global batches, in sequences."""
        return list(dict.fromkeys(row.global_batch for row in self.rows))

    def choose(self, share: float) -> dict[str, Any] | None:
        """Return the fastest micro-batch at the largest batch, and the smallest batch with this share of its speed;
        None if no batch was measured with all micro-batches."""
        fastest = [self.best(size) for size in self.global_batches if size != self.unfinished]
        if not fastest:
            return None
        peak = max(row.tokens_per_second for row in fastest)
        start = next(row for row in fastest if row.tokens_per_second >= share * peak)
        return {
            "micro_batch": fastest[-1].micro_batch,
            "share": share,
            "ramp_start": {
                "global_batch": start.global_batch,
                "batch_tokens": start.global_batch * self.recipe.model.seq_len,
                "micro_batch": start.micro_batch,
                "share_of_peak": start.tokens_per_second / peak,
            },
        }

    def utilisation(self, row: BenchMeasurement) -> Utilisation:
        """Return the utilisation of a measurement under all conventions."""
        return utilisation(self.recipe, row.mfu)


def batches_of(recipe: Recipe, most: int = 7) -> list[int]:
    """Return the global batches to measure, in sequences: the recipe's, halved (rounded up) up to six times."""
    sequences = recipe.batch.tokens // recipe.model.seq_len
    return sorted({-(-sequences // 2**n) for n in range(most)})


def micro_batches_of(recipe: Recipe) -> list[int]:
    """Return the micro-batches to measure: powers of two up to the recipe's batch, and that."""
    sequences = recipe.batch.tokens // recipe.model.seq_len
    return sorted({min(2**n, sequences) for n in range(sequences.bit_length() + 1)})


def bench(
    recipe: Recipe,
    tokens: "TokenSet",
    micro_batches: list[int],
    global_batches: list[int],
    *,
    limit_seconds: float,
    on_row: Callable[[int, int], None] = lambda done, total: None,
    stop: Callable[[], bool] = lambda: False,
) -> Bench:
    """Return the speed of a few real steps at every micro-batch up to every global batch. Writes nothing.

    Raises:
        InputError: if not even the smallest micro-batch fits.
    """
    began = time.perf_counter()
    constant: dict[str, Any] = {"batch.ramp": None, "batch.stages": [], "batch.stages_rule": None}
    recipe = recipe.replace(constant | {"batch.micro_batch": 1})
    require_memory(recipe)
    training = Training(recipe, tokens)
    training.peak = device_peak(training.device, recipe.precision.compute)
    allowed = fitting(recipe, training.device, micro_batches)
    too_large = [size for size in micro_batches if size not in allowed]
    cells = [(size, batch) for batch in sorted(global_batches) for size in allowed if size <= batch]
    rows: list[BenchMeasurement] = []
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
    return Bench(recipe, mfu_convention(training.peak), tuple(rows), tuple(sorted(too_large)), whole, unfinished)


def _measure(training: Training, micro_batch: int, batch: int) -> BenchMeasurement | None:
    """Return the fastest of a few steps from the start of the data, or None if they run out of memory."""
    training.recipe = training.recipe.replace({"batch.tokens": batch * training.recipe.model.seq_len})
    training.micro_batch = micro_batch
    training.progress = Progress()
    reset_peak_memory(training.device)
    steps = unless_out_of_memory(
        lambda: [training.issue().result() for _ in range(STEPS)], training.device, training.sharded.drop_gradients
    )
    if steps is None:
        return None
    step = max(steps[1:], key=lambda step: step.tokens_per_second)
    assert step.mfu is not None
    held = peak_memory(training.device) / GIB
    return BenchMeasurement(micro_batch, batch, step.tokens_per_second, step.tflops, step.mfu, held)
