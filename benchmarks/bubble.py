"""Measure how long pipeline ranks are idle and compare with theory: `PYTHONPATH=src python -m benchmarks.bubble`.

Runs torch's pipeline schedules in several processes on this machine. The stages are tiny and sleep: a forward pass
for one unit of time, a backward pass for two, each half of a backward pass (zero-bubble) for one. A rank's bubble is
the share of a step in which the rank is idle; the mean over ranks is printed. "clock" is measured. "order" replays
the same passes without overhead: a pass starts when its rank is free and its inputs are ready.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from typing import Any
from unittest.mock import patch

import torch
from tests.conftest import TINY
from tests.distributed.pool import Pool

from leaven.distributed.pipeline import LeanStage
from leaven.distributed.process_group import join_process_group
from leaven.distributed.sharded_model import ShardedModel
from leaven.planning.arrangement import bubble
from leaven.recipe.files import parse_recipe
from leaven.recipe.layout import Layout
from leaven.recipe.recipe import Recipe
from leaven.scaling.table import parameter_table

RANKS, MICRO_BATCHES = 4, 8
FORWARD = 0.1  # seconds of a forward pass through the layers of one rank


@dataclass(frozen=True)
class MeasuredPass:
    """The computation of one stage for one micro-batch, with its start and end in seconds."""

    stage: int
    micro_batch: int
    kind: str  # forward, backward, or a half of backward: "input" (gradients of inputs), "weight" (of weights)
    start: float
    end: float

    @property
    def duration(self) -> int:
        """The duration in forward passes; for the first stage, torch runs the whole backward pass in "weight"."""
        if self.stage == 0:
            return {"forward": 1, "backward": 2, "input": 0, "weight": 2}[self.kind]
        return {"forward": 1, "backward": 2, "input": 1, "weight": 1}[self.kind]

    @property
    def needs(self) -> list[tuple[int, int, str]]:
        """The passes that this pass waits for."""
        if self.kind == "forward":
            return [(self.stage - 1, self.micro_batch, "forward")]
        if self.kind == "weight":
            return [(self.stage, self.micro_batch, "input")]
        return [(self.stage + 1, self.micro_batch, kind) for kind in ("backward", "input")]


def traced(recipe: Recipe, forward: float) -> list[MeasuredPass]:
    """Return the passes of this process in the second step."""
    seen: list[MeasuredPass] = []

    @contextmanager
    def asleep(stage: LeanStage, micro_batch: int, kind: str) -> Iterator[None]:
        start = time.monotonic()  # the same clock for all processes of a machine
        yield
        it = MeasuredPass(stage.stage_index, micro_batch, kind, start, 0)
        time.sleep(max(0.0, start + it.duration * forward / recipe.layout.stages_per_rank - time.monotonic()))
        seen.append(MeasuredPass(it.stage, micro_batch, kind, start, time.monotonic()))

    class Sleeping(LeanStage):
        def forward_one_chunk(self, fwd_chunk_id: int, *arguments: Any, **named: Any) -> Any:
            with asleep(self, fwd_chunk_id, "forward"):
                return super().forward_one_chunk(fwd_chunk_id, *arguments, **named)

        def backward_one_chunk(self, bwd_chunk_id: int, *arguments: Any, **named: Any) -> None:
            with asleep(self, bwd_chunk_id, "backward" if named.get("full_backward", True) else "input"):
                super().backward_one_chunk(bwd_chunk_id, *arguments, **named)

        def backward_weight_one_chunk(self, bwd_chunk_id: int, *arguments: Any, **named: Any) -> None:
            with asleep(self, bwd_chunk_id, "weight"):
                super().backward_weight_one_chunk(bwd_chunk_id, *arguments, **named)

    device, layout = torch.device("cpu"), recipe.layout
    with join_process_group(layout, device) as group, patch("leaven.distributed.pipeline.LeanStage", Sleeping):
        table = parameter_table(recipe)
        model = ShardedModel(
            recipe.model, table, seed=0, dtype=torch.float32, device=device, layout=layout, group=group
        )
        tokens = torch.zeros(1, recipe.model.seq_len, dtype=torch.int64)
        for _ in range(2):
            seen.clear()
            group.barrier()
            model.forward_backward(MICRO_BATCHES * [(tokens, tokens, None)], 1.0)
    return seen


def clock(ranks: Sequence[Sequence[MeasuredPass]]) -> float:
    """Return the measured bubble."""
    span = max(each.end for rank in ranks for each in rank) - min(each.start for rank in ranks for each in rank)
    return 1 - sum(each.end - each.start for rank in ranks for each in rank) / (span * len(ranks))


def order(ranks: Sequence[Sequence[MeasuredPass]]) -> Fraction:
    """Return the bubble of a replay of the passes without overhead."""
    ended: dict[tuple[int, int, str], int] = {}
    there = {(each.stage, each.micro_batch, each.kind) for rank in ranks for each in rank}
    free, left = [0] * len(ranks), [list(rank) for rank in ranks]
    while any(left):
        number = next(  # a rank whose next pass has all its inputs
            number for number, passes in enumerate(left) if passes and not (there & {*passes[0].needs}) - ended.keys()
        )
        now = left[number].pop(0)
        free[number] = max([free[number], *(ended.get(need, 0) for need in now.needs)]) + now.duration
        ended[now.stage, now.micro_batch, now.kind] = free[number]
    busy = sum(each.duration for rank in ranks for each in rank)
    return 1 - Fraction(busy, max(free) * len(ranks))


def alive(passes: Sequence[MeasuredPass]) -> int:
    """Return the largest number of a rank's forward passes that wait for their backward pass."""
    most = now = 0
    for each in passes:
        now += {"forward": 1, "backward": -1, "input": 0, "weight": -1}[each.kind]
        most = max(most, now)
    return most


SCHEDULES = {
    "gpipe": {"layout.schedule": "gpipe"},
    "1f1b": {"layout.schedule": "1f1b"},
    "interleaved": {"layout.schedule": "interleaved", "layout.stages_per_rank": 2},
    "zero-bubble": {"layout.schedule": "zero-bubble"},
    "zero-bubble, 2 stages": {"layout.schedule": "zero-bubble", "layout.stages_per_rank": 2},
}


def small(recipe: Recipe, changes: dict[str, Any]) -> Recipe:
    return recipe.replace({"layout.pp": RANKS, "model.n_layers": 2 * RANKS} | changes)


def theory(layout: Layout) -> float:
    return bubble(MICRO_BATCHES, layout.pp, layout.stages_per_rank)


def main() -> None:
    pool = Pool()
    base = parse_recipe(TINY, "recipe.toml")
    print(f"{RANKS} ranks, {MICRO_BATCHES} micro-batches, {FORWARD * 1e3:.0f} ms a forward pass of a rank's layers")
    print(f"{'schedule':<24}{'clock':>8}{'order':>8}{'(p-1)/(vm+p-1)':>16}{'alive on rank 0':>17}")
    for name, changes in SCHEDULES.items():
        recipe = small(base, changes)
        ranks = pool(RANKS, traced, recipe, FORWARD)
        print(
            f"{name:<24}{clock(ranks):>8.1%}{float(order(ranks)):>8.1%}{theory(recipe.layout):>16.1%}"
            f"{alive(ranks[0]):>17}"
        )
    pool.close()


if __name__ == "__main__":
    main()
