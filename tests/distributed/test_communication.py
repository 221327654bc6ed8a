"""Bytes sent in a step, against theory."""

from typing import Any

import pytest
from benchmarks.communication import LAYOUTS, SHAPE, counted, theory
from tests.distributed.pool import Pool

from leaven.data.tokens import prepare
from leaven.recipe.recipe import Recipe

# The others have these features.
SLOW = {"dp 2 pp 2 zero 0", "dp 2 pp 2 zero 1", "dp 2 pp 2 zero 3", "dp 2 zero 1", "tp 2 pp 2"}
SLOW |= {"dp 2 zero 3", "tp 2"}


@pytest.mark.long
@pytest.mark.parametrize(
    "changes", [pytest.param(LAYOUTS[name], id=name, marks=[pytest.mark.slow] * (name in SLOW)) for name in LAYOUTS]
)
def test_a_step_sends_the_bytes_of_theory(changes: dict[str, Any], ranks: Pool, tiny: Recipe) -> None:
    recipe = tiny.replace(SHAPE | changes)
    tokens = prepare(recipe.data, recipe.model.vocab_size)
    found = ranks(recipe.layout.ranks, counted, recipe, tokens)
    assert found == [theory(recipe, rank) for rank in range(recipe.layout.ranks)]


def test_theory_gives_the_bytes_of_the_zero_paper(tiny: Recipe) -> None:
    """With one micro-batch in a step, ZeRO 0 to 2 send 2 Psi, and ZeRO 3 sends 3 Psi. Here ZeRO 3 sends less, because
    it gathers embeddings, unembedding and norms only once."""
    one = tiny.replace(SHAPE | {"batch.micro_batch": 4, "layout.dp": 2})
    sizes = {parameter.name: 4 * parameter.size for parameter in one.model.parameters()}
    psi = sum(sizes.values())
    once = sum(
        size for name, size in sizes.items() if ("attention" not in name and "mlp" not in name) or "norm" in name
    )
    own = 2 * (4 + 24 * len(sizes))  # sums of the trainer, which are counted too
    for zero, expected in enumerate((2 * psi, 2 * psi, 2 * psi, 3 * psi - once)):
        count = theory(one.replace({"layout.zero": zero}), 0)
        assert sum(size for _, size in count.values()) - own == expected
