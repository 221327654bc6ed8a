"""How far the planner is off on an accelerator, by what runs on it took.

The factor is the weighted median of measured over predicted. Where there are runs that are near (within 4 times the
parameters, the same kinds of parallelism, recomputation, compiled or not) they alone count, else all within 16 times:
a small model, which waits for launches, says nothing of a large one. A run counts 1 / (1 + doublings of the
parameters between + kinds that differ), and the newest hundred do. What was predicted is computed anew, so that a
planner that has learnt since is held against the same measurements.
"""

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise

from leaven.planning.history import Record, predicted, processor
from leaven.planning.plan import Calibration, Plan
from leaven.recipe.layout import Layout

NEAR, FAR = 4.0, 16.0
NEWEST = 100
"""Runs that count at most: what was measured long ago was of other versions."""


def calibration(
    records: Iterable[Record], accelerator: str, params: int, layout: Layout, compute: str
) -> Calibration | None:
    """What the records of an accelerator, and of the same dtype, say of a model of so many parameters in a layout;
    None if nothing. Those of a processor count on one of its kind."""
    found, device = [], processor() if accelerator == "cpu" else None
    for record in records:
        mine = record.accelerator == accelerator and device in {None, record.device}
        ratio = max(record.model.params, params) / min(record.model.params, params)
        if mine and record.compute == compute and record.measured is not None and ratio <= FAR:
            differ = len(_kinds(record.layout) ^ _kinds(layout))
            found.append((ratio <= NEAR and not differ, 1 / (1 + math.log2(ratio) + differ), record))
    if any(near for near, _, _ in found):
        found = [each for each in found if each[0]]
    times, memories = [], []
    found = found[-NEWEST:]
    for _, weight, record in found:
        # Of an accelerator that the table has no more, what was predicted then.
        said = predicted(record.model, record.arrangement, accelerator, compute) or record.predicted
        took = record.measured
        if said is None or took is None:
            continue
        times.append((took.step_seconds / said.step_seconds, weight))
        if took.memory_gib is not None and said.memory_gib is not None:
            memories.append((took.memory_gib / said.memory_gib, weight))
    if not times:
        return None
    ratios = [ratio for ratio, _ in times]
    memory = weighted_median(memories) if memories else None
    here = len(found) == 1 and found[0][2].by == "measurement"
    return Calibration(weighted_median(times), memory, len(times), min(ratios), max(ratios), here)


def calibrated(plan: Plan, records: Sequence[Record], compute: str) -> Plan:
    """A plan in this dtype with what the records of its accelerator say of its speed, its length and its memory."""
    layout, model = plan.arrangement.layout, plan.job.model
    found = calibration(records, plan.cluster.accelerator.name, model.params, layout, compute)
    return plan if found is None else plan.but(calibration=found)


def weighted_median(values: list[tuple[float, float]]) -> float:
    """Of (value, weight): below it and above it is at most half of the weight; between two such, their mean.

    >>> weighted_median([(1.0, 1.0), (9.0, 1.0)]), weighted_median([(1.0, 1.0), (2.0, 1.0), (9.0, 1.5)])
    (5.0, 2.0)
    """
    values = sorted(values)
    half, below = sum(weight for _, weight in values) / 2, 0.0
    for (value, weight), (following, _) in pairwise(values):
        below += weight
        if math.isclose(below, half):
            return (value + following) / 2
        if below > half:
            return value
    return values[-1][0]


def _kinds(layout: Layout) -> set[str]:
    """What of a layout a time depends on in another way than the planner may know."""
    kinds = {
        "dp": layout.dp > 1,
        "tp": layout.tp > 1,
        "pp": layout.pp > 1,
        "cp": layout.cp > 1,
        "zero 3": layout.zero == 3,
        "recompute": layout.recompute == "full",
        "compile": layout.compile,
    }
    return {kind for kind, there in kinds.items() if there}
