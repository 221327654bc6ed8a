"""The tensors of a model that starts from a published init."""

import math

import pytest

from leaven.model.initialise import build_model
from leaven.recipe.init_std import INITS
from leaven.recipe.recipe import Recipe
from leaven.scaling.table import resolve


@pytest.mark.parametrize("init", INITS)
def test_initial_values_are_those_of_a_published_init(tiny: Recipe, init: str) -> None:
    shape = {"d_model": 64, "n_heads": 8, "n_kv_heads": 8, "d_ff": 160, "n_layers": 3}
    recipe = tiny.replace(
        {f"model.{key}": value for key, value in shape.items()}
        | {"hyperparameters.init": init, "hyperparameters.init_std": None}
        | {"hyperparameters.modules": {"mlp.out": {"init_std": 2.0}}}
    )
    values = dict(build_model(recipe.model, resolve(recipe), seed=3).named_parameters())
    for parameter in recipe.model.parameters():
        if len(parameter.shape) == 2:
            tuned = 2.0 if parameter.module == "mlp.out" else 1.0
            expected = tuned * INITS[init].std(parameter, 3, gated=True)
            tensor = values[parameter.name]
            tolerance = 5 / math.sqrt(2 * tensor.numel())
            assert tensor.std().item() == pytest.approx(expected, rel=tolerance), parameter.name
