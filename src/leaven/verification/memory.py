"""Is what the planner says of memory what a rank takes?

The planner counts; the dry run (:mod:`leaven.verification.dry_run`) does what a training does and looks. Both leave out
what no tensor is: the context, the kernels, the holes of an allocator.
"""

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import as_completed
from dataclasses import asdict, dataclass, replace
from typing import Any

from leaven.planning.arrangement import Arrangement
from leaven.planning.memory import GIB, LEAVEN_BF16, Implementation, Memory, stage_memory
from leaven.planning.trainable import require_trainable
from leaven.recipe.layout import Layout
from leaven.recipe.recipe import Recipe
from leaven.training.machine import cores
from leaven.training.micro_batch import even, rule_of_thumb
from leaven.training.worker import Pool
from leaven.verification.dry_run import Taken, dry_run

LIMITS = {"between steps": 0.02, "peak": 0.05}
"""How far the planner may be off, as a share of what the dry run finds."""

PARTS = ("weights", "gathered", "grads", "optimizer", "activations", "logits", "buffers")
_OF_PLANNER = {"accumulation": "grads"}


@dataclass(frozen=True)
class Row:
    """A part of a rank's memory; ``error`` is planned / found - 1. Parts of the peak are told and not judged: the
    planner adds up what is there at one time or another, the dry run what is there together."""

    rank: int
    stage: int
    part: str
    planned_gib: float
    dry_gib: float
    error: float | None
    limit: float | None = None
    passed: bool | None = None


@dataclass(frozen=True)
class MemoryCheck:
    """The rows, and what was looked at: a layout, its micro-batches, and how long it took."""

    subject: str
    arrangement: Arrangement
    rows: tuple[Row, ...]
    seconds: float

    @property
    def passed(self) -> bool:
        return all(row.passed is not False for row in self.rows)

    def document(self) -> dict[str, Any]:
        return {
            "passed": self.passed,
            "check": "memory",
            "subject": self.subject,
            "layout": self.arrangement.to_json(),
            "seconds": self.seconds,
            "rows": [asdict(row) for row in self.rows],
        }


def check_memory(
    recipe: Recipe, ranks: Iterable[int] | None = None, on_rank: Callable[[int, int], None] = lambda done, total: None
) -> MemoryCheck:
    """The planner against dry runs of the first, second and last rank of the pipeline, or of the ranks given: each in
    a process of its own.

    Raises:
        InputError: if the recipe cannot be trained in its layout.
    """
    rehearsed, how = rehearsal(recipe)
    layout = how.layout
    of_a_stage = layout.dp * layout.tp
    wanted = sorted(set(ranks if ranks is not None else (0, of_a_stage * min(1, layout.pp - 1), layout.ranks - of_a_stage)))
    rows: dict[int, list[Row]] = {}
    seconds = 0.0
    with Pool(min(cores(), len(wanted))) as pool:
        pending = {pool.submit(dry_run, rehearsed, rank): rank for rank in wanted}
        on_rank(0, len(wanted))
        for future in as_completed(pending):
            rank, taken = pending[future], future.result()
            stage = rank // of_a_stage
            rows[rank] = compare(rank, stage, stage_memory(recipe.model, how, stage, tensors(recipe)), taken)
            seconds += taken.seconds
            on_rank(len(rows), len(wanted))
    return MemoryCheck(recipe.name, how, tuple(row for rank in wanted for row in rows[rank]), seconds)


def rehearsal(recipe: Recipe) -> tuple[Recipe, Arrangement]:
    """A recipe of the same memory whose steps are short, and how they are arranged.

    Micro-batches beyond those that fill a pipeline twice find nothing new, unless all of them are in flight; nor does
    a corpus, a start or a ramp.

    Raises:
        InputError: if the recipe cannot be trained in its layout.
    """
    require_trainable(recipe, recipe.layout.ranks)
    layout, seq_len = recipe.layout, recipe.model.seq_len
    each = -(-recipe.batch.tokens // seq_len // layout.dp)
    size = even(each, rule_of_thumb(recipe, "cuda"))
    count = -(-each // size)
    if layout.schedule != "gpipe":
        count = min(count, 2 * layout.pp)
    short = recipe.replace(
        {
            "batch": {"tokens": layout.dp * size * count * seq_len, "micro_batch": size},
            "layout.compile": False,
            "start": {},
            "stability.noise_scale_every_tokens": None,
        }
    )
    return short, Arrangement(layout, size, count)


def tensors(recipe: Recipe) -> Implementation:
    """leaven's own trainer without what is no tensor."""
    code = replace(LEAVEN_BF16, fixed_gib=0.0, slack=0.0)
    return code if recipe.precision.compute != "fp32" else replace(code, compute_copy=0, element=4, logit=8)


def compare(rank: int, stage: int, planned: Memory, taken: Taken) -> list[Row]:
    """The judged rows first, then the parts of the peak."""
    rows = [
        _row(rank, stage, "between steps", planned.states, taken.stays.total()),
        _row(rank, stage, "peak", planned.total, taken.peak.total()),
    ]
    said: dict[str, float] = dict.fromkeys(PARTS, 0.0)
    for part, size in vars(planned).items():
        part = _OF_PLANNER.get(part, part)
        if part in said:
            said[part] += size
    return rows + [_row(rank, stage, part, size, taken.peak[part]) for part, size in said.items()]


def _row(rank: int, stage: int, part: str, planned: float, found: float) -> Row:
    error, limit = (planned / found - 1 if found else None), LIMITS.get(part)
    passed = None if limit is None else error is not None and abs(error) <= limit
    return Row(rank, stage, part, planned / GIB, found / GIB, error, limit, passed)
