"""Initial stds of a recipe beside those of published initialisations."""

import math

import pytest

from leaven.recipe.init_std import COMPARED
from leaven.recipe.recipe import Recipe
from leaven.scaling.describe import ModuleStart, _nearest, describe, starts
from leaven.scaling.table import parameter_table
from leaven.scaling.transfer import transfer


def test_one_entry_for_each_module_or_two_if_its_blocks_differ(tiny: Recipe) -> None:
    recipe = transfer(tiny, depth=5)
    table = parameter_table(recipe)
    found = {(start.module, start.layers): start for start in starts(recipe, table)}
    assert [layers for module, layers in found if module == "attention.query"] == ["0-4"]
    assert [layers for module, layers in found if module == "attention.out"] == ["0", "4"]
    for (module, layers), start in found.items():
        name = f"layers.{layers.partition('-')[0]}.{module}.weight" if layers else f"{module}.weight"
        assert start.std == table[name].init_std
        assert list(start.published) == list(COMPARED)
    last = found["attention.out", "4"].published
    assert last["mitchell"] == pytest.approx(1 / math.sqrt(2 * 16 * 5))
    assert last["gpt2"] == pytest.approx(0.02 / math.sqrt(10))


def test_matrices_of_experts_are_compared_but_no_gains(tiny: Recipe) -> None:
    experts = {"number": 4, "active": 2, "d_expert": 16, "shared": 1, "dense_layers": 1}
    recipe = tiny.replace({"model.experts": experts, "model.qk_norm_per_head": True, "model.n_layers": 3})
    found = {start.module: start for start in starts(recipe, parameter_table(recipe))}
    assert {module for module in found if module.startswith("mlp.")} == {
        *("mlp.gate", "mlp.in", "mlp.out", "mlp.router"),
        *(f"mlp.{kind}.{side}" for kind in ("experts", "shared") for side in ("gate", "in", "out")),
    }
    assert found["mlp.experts.out"].published["fan-in"] == pytest.approx(16**-0.5)  # one expert, not all of them
    assert not any("norm" in module for module in found)
    assert found["mlp.experts.gate"].layers == "1-2"  # the first layer is dense


def test_the_document_states_which_init_applies(tiny: Recipe) -> None:
    named = tiny.replace({"hyperparameters.init": "mt-nlg", "hyperparameters.init_std": None})
    assert describe(tiny, 0).init["name"] == "rule"
    found = describe(named, 0).init
    assert found["name"] == "mt-nlg"
    assert found["usual_std"] == pytest.approx(math.sqrt(1 / 48))
    assert all(start["std"] == start["published"]["mt-nlg"] for start in found["starts"])
    assert found["nearest"][0] == {"init": "mt-nlg", "octaves": 0}


def test_the_nearest_init_is_the_one_with_the_smallest_mean_of_octaves() -> None:
    """The distances are 0, 1 and 2 octaves from gpt2, and 3, 2 and 1 from the others. A std of 0 has no distance."""
    stds = {name: [1.0] * 4 if name == "gpt2" else [8.0] * 4 for name in COMPARED}
    found = [
        ModuleStart(f"m{n}", "", std, {name: each[n] for name, each in stds.items()})
        for n, std in enumerate([1.0, 2.0, 4.0, 0.0])
    ]
    first, second, *_ = _nearest(found)
    assert first == {"init": "gpt2", "octaves": pytest.approx(1)}
    assert second["octaves"] == pytest.approx(2)
