"""The memory check: does a rank need as much memory as the planner says?

The planner computes the memory of a rank from formulas. The dry run (:mod:`leaven.verification.dry_run`) executes
training steps without data and records every allocation. Only the memory of tensors is compared.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import as_completed
from typing import Any

from leaven.documents.checks import MemoryCheckDocument, MemoryCheckRow
from leaven.errors import InputError
from leaven.planning.arrangement import Arrangement, parse_layout
from leaven.planning.memory import GIB, Memory, stage_memory
from leaven.planning.this_machine import cores
from leaven.planning.trainable import require_trainable
from leaven.planning.training_codes import LEAVEN_BF16, LEAVEN_FP32, TrainingCode
from leaven.recipe.layout import Layout
from leaven.recipe.recipe import Recipe
from leaven.training.micro_batch import even, rule_of_thumb
from leaven.training.trial import WorkerPool
from leaven.verification.dry_run import StepMemory, dry_run

LIMITS = {"between steps": 0.02, "peak": 0.05}  # allowed error of the planner, as a share of the dry run's memory
PARTS = ("weights", "gathered", "grads", "optimizer", "activations", "logits", "buffers")


def with_layout(recipe: Recipe, text: str) -> Recipe:
    """Return the recipe with the layout of a text such as ``tp=8,dp=4``. Without ``mbs``, the micro-batch stays."""
    layout, micro_batch = parse_layout(text)
    changes: dict[str, Any] = {"layout": layout.model_dump()}
    return recipe.replace(changes if micro_batch is None else changes | {"batch.micro_batch": micro_batch})


def rehearsal(recipe: Recipe) -> Recipe:
    """Return a recipe with few micro-batches per step, whose steps have the peak memory of the given recipe.

    It does not compile, load start weights or measure the noise scale. Raise InputError if it cannot be trained.
    """
    require_trainable(recipe, recipe.layout.ranks)
    layout, seq_len = recipe.layout, recipe.model.seq_len
    each = -(-recipe.batch.tokens // seq_len // layout.dp)
    size = even(each, rule_of_thumb(recipe, "cuda"))
    count = -(-each // size)
    if layout.schedule != "gpipe":  # which has all micro-batches in memory at once
        count = min(count, 2 * layout.pp)
    return recipe.replace(
        {
            "batch": {"tokens": layout.dp * size * count * seq_len, "micro_batch": size},
            "layout.compile": False,
            "start": {},
            "stability.noise_scale_every_tokens": None,
            "average": {"half_life_tokens": 1} if recipe.average else None,  # averaging from the first step on
        }
    )


def arrangement(recipe: Recipe) -> Arrangement:
    """Return a recipe's layout and micro-batches. Its ``batch.micro_batch`` must be a number, not "auto"."""
    size = recipe.batch.micro_batch
    assert isinstance(size, int)
    count = recipe.batch.tokens // recipe.model.seq_len // recipe.layout.dp // size
    return Arrangement(recipe.layout, size, count)


def ranks_to_check(layout: Layout, ranks: Iterable[int] | None = None, all_stages: bool = False) -> list[int]:
    """Return ``ranks``, sorted and without duplicates. Raise InputError for a rank outside the layout.

    By default, return the first rank of the first, second and last pipeline stage, or of ``all_stages``.
    """
    if ranks:
        beyond = [rank for rank in ranks if rank >= layout.ranks]
        if beyond:
            raise InputError(f"--rank {beyond[0]}: the layout has ranks 0 to {layout.ranks - 1}; give one of these")
        return sorted(set(ranks))
    of_a_stage, last = layout.ranks // layout.pp, layout.pp - 1
    return [of_a_stage * stage for stage in (range(layout.pp) if all_stages else sorted({0, min(1, last), last}))]


def check_memory(
    recipe: Recipe, ranks: Sequence[int], on_rank: Callable[[int, int], None] = lambda done, total: None
) -> MemoryCheckDocument:
    """Compare the planned memory of each rank in ``ranks`` with the memory of a dry run of this rank.

    The recipe must come from :func:`rehearsal`. ``on_rank`` is called with (finished ranks, all ranks).
    """
    how = arrangement(recipe)
    began = time.perf_counter()
    rows: dict[int, list[MemoryCheckRow]] = {}
    on_rank(0, len(ranks))
    # torch keeps meshes and the rank for the life of a process, so each process runs one rank only.
    for first in range(0, len(ranks), cores()):
        some = ranks[first : first + cores()]
        with WorkerPool(len(some)) as pool:
            pending = {pool.submit(dry_run, recipe, rank): rank for rank in some}
            for future in as_completed(pending):
                rank = pending[future]
                taken = future.result()
                stage = rank // (how.layout.ranks // how.layout.pp)
                rows[rank] = compare(rank, stage, stage_memory(recipe.model, how, stage, tensors(recipe)), taken)
                on_rank(len(rows), len(ranks))
    found = [row for rank in ranks for row in rows[rank]]
    return MemoryCheckDocument(
        passed=all(row.passed is not False for row in found),
        check="memory",
        subject=recipe.name,
        layout=how.to_json(),
        seconds=time.perf_counter() - began,
        rows=found,
    )


def tensors(recipe: Recipe) -> TrainingCode:
    """Return the planner's constants for leaven's trainer, without fixed memory and slack: only for tensors."""
    code = LEAVEN_FP32 if recipe.precision.compute == "fp32" else LEAVEN_BF16
    code = code.tensors_only().with_muon(recipe.hyperparameters.ns_steps)
    return code.averaging(recipe.average is not None).isolating(recipe.data.documents)


def compare(rank: int, stage: int, planned: Memory, taken: StepMemory) -> list[MemoryCheckRow]:
    """Return rows that compare the planned memory of a rank with its dry run.

    Only the totals get a verdict. The parts, such as the gradients, are not measured alike: the plan has the largest
    size of each part, and the dry run has the size at the moment when total memory is largest.
    """
    pairs = {
        "between steps": (planned.states, taken.stays.total()),
        "peak": (planned.total, taken.peak.total()),
    } | {part: (getattr(planned, part), taken.peak[part]) for part in PARTS}
    pairs["grads"] = (planned.grads + planned.accumulation, taken.peak["grads"])
    rows = []
    for part, (expected, found) in pairs.items():
        error, limit = (expected / found - 1 if found else None), LIMITS.get(part)
        passed = None if limit is None else error is not None and abs(error) <= limit
        sizes = {"planned_gib": expected / GIB, "dry_gib": found / GIB}
        rows.append(
            MemoryCheckRow(rank=rank, stage=stage, part=part, error=error, limit=limit, passed=passed, **sizes)
        )
    return rows
