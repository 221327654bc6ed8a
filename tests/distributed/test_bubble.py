"""Order of passes, bubble and live micro-batches of each pipeline schedule."""

from fractions import Fraction

import pytest
from benchmarks.bubble import MICRO_BATCHES, RANKS, SCHEDULES, MeasuredPass, alive, order, small, theory, traced
from tests.distributed.pool import Pool

from leaven.planning.schedule import order as planned
from leaven.recipe.recipe import Recipe


@pytest.mark.parametrize("name", SCHEDULES)
def test_bubble_is_that_of_theory(name: str, ranks: Pool, tiny: Recipe) -> None:
    recipe = small(tiny, SCHEDULES[name])
    passes = ranks(RANKS, traced, recipe, 0.0)
    found, expected = order(passes), theory(recipe.layout)
    if recipe.layout.schedule == "zero-bubble":
        assert 0 < found < expected
    else:
        assert found == Fraction(expected).limit_denominator(1000)
    for rank, mine in enumerate(passes):  # what was run is what the planner draws and counts
        seen = [(each.kind, each.stage, each.micro_batch) for each in mine]
        assert seen == planned(recipe.layout, rank, MICRO_BATCHES)


def test_1f1b_holds_as_many_micro_batches_as_there_are_stages_ahead(ranks: Pool, tiny: Recipe) -> None:
    passes = ranks(RANKS, traced, small(tiny, SCHEDULES["1f1b"]), 0.0)
    assert [alive(rank) for rank in passes] == [4, 3, 2, 1]
    passes = ranks(RANKS, traced, small(tiny, SCHEDULES["gpipe"]), 0.0)
    assert [alive(rank) for rank in passes] == RANKS * [MICRO_BATCHES]


def test_order_of_a_pipeline_by_hand() -> None:
    """Two ranks, two micro-batches, GPipe: F F . B B against . F F B B by the second, 9 slots of which 3 are idle."""

    def rank(stage: int) -> list[MeasuredPass]:
        kinds = [("forward", 0), ("forward", 1), ("backward", 0), ("backward", 1)]
        return [MeasuredPass(stage, micro_batch, kind, 0, 0) for kind, micro_batch in kinds]

    assert order([rank(0), rank(1)]) == Fraction(3, 9)
