"""The directions of docs/concepts/spaces.md along which a model does not change."""

import pytest

from leaven.data.tokens import prepare
from leaven.recipe.recipe import Recipe
from leaven.training.engine import Training
from leaven.tuning.point import recipe_at

# Without what breaks the symmetries a little: decay goes with the lr, clipping and eps with the gradients.
EXACT = {"weight_decay": 0.0, "grad_clip": 0.0, "eps": 1e-20}
STEPS = 6


def along(*octaves: tuple[str, float]) -> dict[str, float]:
    return {f"hyperparameters.modules.{path}": x for path, x in octaves}


@pytest.fixture
def exact(tiny: Recipe) -> Recipe:
    return tiny.replace({f"hyperparameters.{name}": value for name, value in EXACT.items()})


def losses(recipe: Recipe) -> list[float]:
    training = Training(recipe, prepare(recipe.data, recipe.model.vocab_size), "cpu")
    return [training.step().loss for _ in range(STEPS)]


AGAINST_VALUE = (("out.residual", 1), ("value.init_std", -1), ("value.lr", -1))
VALLEYS = {
    "a query's norm": along(("attention.query.init_std", 1), ("attention.query.lr", 1)),
    "residual against mlp.out": along(("mlp.out.residual", 1), ("mlp.out.init_std", -1), ("mlp.out.lr", -1)),
    "residual against value": along(*((f"attention.{at}", x) for at, x in AGAINST_VALUE)),
    "residual against in": along(("mlp.out.residual", 1), ("mlp.in.init_std", -1), ("mlp.in.lr", -1)),
    "the whole stream": along(
        *(("embedding.init_std", 1), ("embedding.lr", 1)), ("attention.out.residual", 1), ("mlp.out.residual", 1)
    ),
}


@pytest.mark.parametrize("valley", VALLEYS)
def test_along_a_valley_training_is_the_same(exact: Recipe, valley: str) -> None:
    way = VALLEYS[valley]
    start = losses(exact)
    assert losses(recipe_at(exact, way)) == pytest.approx(start, abs=1e-5)
    # Without the last change, training differs.
    assert losses(recipe_at(exact, dict([*way.items()][:-1])))[-1] != pytest.approx(start[-1], abs=1e-4)


@pytest.mark.parametrize("activation", ["relu", "squared_relu"])
def test_relus_are_homogeneous(exact: Recipe, activation: str) -> None:
    relu, power = exact.replace({"model.activation": activation}), 2 if "squared" in activation else 1
    way = along(("mlp.out.residual", power), ("mlp.in.init_std", -1), ("mlp.in.lr", -1))
    assert losses(recipe_at(relu, way)) == pytest.approx(losses(relu), abs=1e-5)


def test_a_global_value_and_all_its_multipliers_form_a_valley(exact: Recipe) -> None:
    every = along(*((f"{module}.lr", -1.0) for module in exact.model.modules))
    assert losses(recipe_at(exact, {"hyperparameters.lr": 1.0} | every)) == losses(exact)
