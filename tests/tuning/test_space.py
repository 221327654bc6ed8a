"""What can be searched, and a point of it as a recipe."""

import pytest

from leaven.recipe.errors import InputError
from leaven.recipe.recipe import Recipe
from leaven.tuning.space import moved, space


def test_spaces_lie_around_the_recipe(tiny: Recipe) -> None:
    whole = space(tiny, "global")
    assert whole.centre["hyperparameters.lr"] == 0.01
    lr = whole.dimensions[0]
    assert (lr.low, lr.high) == (0.01 / 8, 0.01 * 8)
    modules = space(tiny, "per-module")
    assert set(whole.paths) < set(modules.paths)
    assert modules.centre["hyperparameters.modules.attention.query.lr"] == 1.0
    assert len(modules.dimensions) == len(whole.dimensions) + len(tiny.model.modules)
    listed = space(tiny, "hyperparameters.lr, hyperparameters.modules.mlp.in.init_std")
    assert listed.paths == ("hyperparameters.lr", "hyperparameters.modules.mlp.in.init_std")


def test_a_named_init_leaves_no_init_std_to_search(tiny: Recipe) -> None:
    named = tiny.replace({"hyperparameters.init": "mitchell", "hyperparameters.init_std": None})
    assert set(space(tiny, "global").paths) - set(space(named, "global").paths) == {"hyperparameters.init_std"}
    assert space(named, "hyperparameters.modules.mlp.in.init_std").dimensions[0].centre == 1.0
    with pytest.raises(InputError, match='init = "mitchell" sets every standard deviation itself'):
        space(named, "hyperparameters.init_std")


@pytest.mark.parametrize(
    "path",
    [
        "hyperparameters.speed",
        "model.d_model",
        "hyperparameters.modules.mlp.inn.lr",
        "hyperparameters.beta1",
        "",
    ],
)
def test_what_cannot_be_searched_is_refused(tiny: Recipe, path: str) -> None:
    with pytest.raises(InputError, match="not a value to search; there are hyperparameters.lr"):
        space(tiny, path)


@pytest.mark.parametrize("path", ["embedding.residual", "norm.mlp.init_std", "norm.mlp.weight_decay"])
def test_what_multiplies_nothing_is_not_searched(tiny: Recipe, path: str) -> None:
    with pytest.raises(InputError, match="has no|is not decayed"):
        space(tiny, f"hyperparameters.modules.{path}")


def test_the_betas_of_a_module_and_the_residual_of_a_branch_can_be_searched(tiny: Recipe) -> None:
    paths = "modules.embedding.beta2", "modules.mlp.out.residual"
    around = space(tiny, ",".join(f"hyperparameters.{path}" for path in paths))
    assert list(around.centre.values()) == [1.0, 1.0]
    for dimension in around.dimensions:
        moved(tiny, {dimension.path: dimension.high}, seed=1)  # a valid recipe, at either end
        moved(tiny, {dimension.path: dimension.low}, seed=1)


def test_zero_cannot_be_searched_by_factors(tiny: Recipe) -> None:
    with pytest.raises(InputError, match="it is 0 in the recipe"):
        space(tiny.replace({"hyperparameters.weight_decay": 0.0}), "global")


def test_a_point_becomes_a_recipe(tiny: Recipe) -> None:
    values = {"hyperparameters.lr": 0.02, "hyperparameters.modules.attention.query.lr": 0.5}
    there = moved(tiny, values, seed=7)
    assert there.hyperparameters.lr == 0.02
    assert there.hyperparameters.modules["attention.query"].lr == 0.5
    assert there.data.seed == 7
    assert moved(tiny, {}) == tiny
