"""Order of passes, bubble and live micro-batches of each pipeline schedule."""

from fractions import Fraction

import pytest
from benchmarks.bubble import MICRO_BATCHES, RANKS, SCHEDULES, alive, order, small, theory, traced
from tests.distributed.pool import Pool

from leaven.planning.schedule import order as planned
from leaven.recipe.recipe import Recipe

# The number of micro-batches whose activations each rank holds.
ALIVE = {"1f1b": [4, 3, 2, 1], "gpipe": RANKS * [MICRO_BATCHES]}


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    # Two more tests have the zero-bubble schedule.
    [pytest.param(name, marks=[pytest.mark.slow] * (name == "zero-bubble")) for name in SCHEDULES],
)
def test_order_bubble_and_live_micro_batches_are_those_planned(name: str, ranks: Pool, tiny: Recipe) -> None:
    recipe = small(tiny, SCHEDULES[name])
    recipe = recipe.replace({"model.n_layers": RANKS * recipe.layout.stages_per_rank})
    passes = ranks(RANKS, traced, recipe, 0.0)
    found, expected = order(passes), theory(recipe.layout)
    if recipe.layout.schedule == "zero-bubble":
        assert 0 < found < expected
    else:
        assert found == Fraction(expected).limit_denominator(1000)
    for rank, mine in enumerate(passes):
        seen = [(each.kind, each.stage, each.micro_batch) for each in mine]
        assert seen == planned(recipe.layout, rank, MICRO_BATCHES)
    if name in ALIVE:
        assert [alive(rank) for rank in passes] == ALIVE[name]
