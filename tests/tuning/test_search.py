"""Spaces and the trust region, as pure functions."""

import numpy as np
import optuna
import pytest

from leaven.recipe.errors import InputError
from leaven.recipe.recipe import Recipe
from leaven.tuning.space import moved, space
from leaven.tuning.trust_region import NARROWEST, START, WIDEST, TrustRegionSampler, region


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


def test_the_region_follows_the_best_grows_with_success_and_shrinks_with_failure() -> None:
    centre = {"a": 1.0, "b": 1.0}
    assert region(centre, []).radius == START
    first = region(centre, [({"a": 2.0, "b": 1.0}, 5.0)])
    assert (first.values, first.radius) == ({"a": 2.0, "b": 1.0}, START)  # where it starts is no success
    better = region(centre, [(centre, 5.0), ({"a": 3.0, "b": 1.0}, 4.0)])
    assert better.values["a"] == 3.0
    assert better.radius > START
    worse = region(centre, [(centre, 5.0), *([({"a": 9.0, "b": 9.0}, 6.0)] * 4)])
    assert worse.values == centre
    assert worse.radius < START
    assert region(centre, [(centre, 5.0), *([(centre, 6.0)] * 1000)]).radius == NARROWEST
    assert region(centre, [(centre, float(-i)) for i in range(100)]).radius == WIDEST


def bowl(values: dict[str, float], centre: dict[str, float]) -> float:
    """A curved valley in log2 with its minimum one and a half octaves off, and a cliff beyond two octaves of lr."""
    x = np.array([np.log2(values[path] / centre[path]) for path in centre])
    if x[0] > 2:
        return 20.0
    target = np.array([1.5, -1.0, 1.0, 0.5])
    return float(((x - target) ** 2 * np.array([1, 0.3, 0.3, 0.1])).sum() + 0.2 * (x[0] - 1.5) * (x[1] + 1))


def search(tiny: Recipe, seed: int, trials: int) -> float:
    around = space(tiny, "global")
    study = optuna.create_study(sampler=TrustRegionSampler(around, seed))
    study.enqueue_trial(around.centre)
    for _ in range(trials):
        trial = study.ask()
        values = {d.path: trial.suggest_float(d.path, d.low, d.high, log=True) for d in around.dimensions}
        assert all(d.low <= values[d.path] <= d.high for d in around.dimensions)
        study.tell(trial, bowl(values, around.centre))
    return study.best_value


def test_it_finds_its_way_down_a_valley_with_a_cliff(tiny: Recipe) -> None:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    around = space(tiny, "global")
    start = bowl(around.centre, around.centre)
    found = [search(tiny, seed, 40) for seed in range(5)]
    assert np.median(found) < start / 10
    random = []
    for seed in range(5):
        study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=seed))
        for _ in range(40):
            trial = study.ask()
            values = {d.path: trial.suggest_float(d.path, d.low, d.high, log=True) for d in around.dimensions}
            study.tell(trial, bowl(values, around.centre))
        random.append(study.best_value)
    assert np.median(found) < np.median(random)


def test_the_same_results_in_the_same_order_give_the_same_proposals(tiny: Recipe) -> None:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    assert search(tiny, 3, 12) == search(tiny, 3, 12)
    assert search(tiny, 3, 12) != search(tiny, 4, 12)
