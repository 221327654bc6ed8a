"""Compare the planned memory of a step with the memory that it takes, in one process.

For all layouts: `python -m benchmarks.memory`.
"""

import pytest
from benchmarks.memory import MODEL, predicted, taken

from leaven.data.tokens import prepare
from leaven.recipe.recipe import Recipe


@pytest.mark.long
@pytest.mark.parametrize("changes", [{}, {"precision.compute": "fp32", "layout.recompute": "full"}], ids=str)
def test_predicted_is_what_a_step_takes(changes: dict[str, str], tiny: Recipe) -> None:
    recipe = tiny.replace(MODEL | {"model.n_layers": 2, "batch.tokens": 1024, "data.tokens": 8192} | changes)
    states, rest = taken(recipe, prepare(recipe.data, recipe.model.vocab_size))
    tensors = sum(1 for _ in recipe.model.parameters())
    assert states == 12 * recipe.model.params + 4 * tensors  # Adam stores the number of steps for each tensor
    assert predicted(recipe, 0).total == pytest.approx(states + rest, rel=0.1)
