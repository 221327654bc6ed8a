"""The values of matrices that Muon updates: against the spectral condition, and what a recipe may say."""

import math
from typing import Any

import pytest
from pydantic import ValidationError

from leaven.errors import InputError
from leaven.recipe.files import parse_recipe, render
from leaven.recipe.recipe import Recipe
from leaven.recipe.shape import Role
from leaven.scaling.table import ParameterTable, optimizer_groups, parameter_table
from leaven.scaling.transfer import transfer

SPECTRAL: dict[str, Any] = {"match": "spectral", "lr": 0.02, "weight_decay": 0.2}


def with_muon(recipe: Recipe, **muon: Any) -> Recipe:
    return recipe.replace({"hyperparameters.optimizer": "muon", "hyperparameters.muon": muon})


def matrices(table: ParameterTable) -> dict[str, Any]:
    return {row.module: row for row in table.rows if row.role is Role.HIDDEN_WEIGHT}


@pytest.mark.parametrize("muon", [SPECTRAL, {}], ids=["spectral", "adamw_rms"])
@pytest.mark.parametrize("rule", ["mup", "completep", "complete-d-p"])
def test_the_largest_singular_value_of_a_step_fits_the_shape(tiny: Recipe, rule: str, muon: dict[str, Any]) -> None:
    """It is lr x match, and stays proportional to sqrt(out / in), also for a d_ff out of proportion."""
    base = with_muon(tiny, **muon).replace({"scaling.rule": rule})
    small = matrices(parameter_table(base))
    for wide in (transfer(base, width=64), transfer(base, width=64, d_ff=48)):
        for module, row in matrices(parameter_table(wide)).items():
            (out, into), before = row.shape, small[module]
            condition = math.sqrt(out / into) / math.sqrt(before.shape[0] / before.shape[1])
            assert row.lr * row.match == pytest.approx(before.lr * before.match * condition), module
            assert row.lr * row.weight_decay == pytest.approx(before.lr * before.weight_decay)
    at_fixed_proportions = matrices(parameter_table(transfer(base, width=64)))["mlp.out"].lr / small["mlp.out"].lr
    assert at_fixed_proportions == pytest.approx(1.0 if muon else 0.5)


def test_depth_batch_and_tokens_are_those_of_adam(tiny: Recipe) -> None:
    base = with_muon(tiny, **SPECTRAL).replace({"scaling.alpha": 0.5, "scaling.scale_decay_with_depth": True})
    large = matrices(parameter_table(transfer(base, depth=8, batch_tokens=1024, tokens=16 * 10_240)))["mlp.in"]
    assert large.lr == pytest.approx(0.02 * 4**-0.5 * (4 / 16) ** 0.5)
    assert large.lr * large.weight_decay * 16 / 4 == pytest.approx(0.02 * 0.2)  # x steps
    assert (large.beta1, large.beta2, large.eps) == (0.95, 0.0, 0.0)
    assert parameter_table(base)["embedding.weight"].beta1 == 0.9


def test_the_standard_rule_changes_nothing(tiny: Recipe) -> None:
    base = with_muon(tiny).replace({"scaling.rule": "standard"})
    large = matrices(parameter_table(transfer(base, width=64, depth=8)))
    assert {(row.lr, row.weight_decay) for row in large.values()} == {(0.01, 0.1)}
    assert large["mlp.in"].match == pytest.approx(0.2 * math.sqrt(128))


def test_the_rest_has_the_values_of_adamw(tiny: Recipe) -> None:
    changes = {"hyperparameters.modules": {"mlp.out": {"lr": 2.0, "beta1": 2.0}, "embedding": {"lr": 3.0}}}
    table = parameter_table(with_muon(tiny, **SPECTRAL).replace(changes))
    plain = parameter_table(tiny.replace(changes))
    for row, other in zip(table.rows, plain.rows, strict=True):
        if row.role is not Role.HIDDEN_WEIGHT:
            assert row == other
    found = matrices(table)["mlp.out"]
    assert (found.lr, found.beta1) == (0.04, pytest.approx(0.95**2))
    groups = {group["module"]: group for group in optimizer_groups(table.rows)}
    assert groups["mlp.out"].keys() ^ groups["embedding"].keys() == {"momentum", "match", "betas", "eps"}


def test_a_recipe_with_muon_is_written_and_read(tiny: Recipe, tiny_text: str) -> None:
    assert "muon" not in tiny.hyperparameters.model_dump()  # so that hashes of earlier recipes stay
    recipe = with_muon(tiny, **SPECTRAL)
    for template in ("", tiny_text):
        assert parse_recipe(render(recipe, template), "tiny.toml") == recipe
    assert recipe.without_muon == tiny
    assert tiny.replace({"hyperparameters.optimizer": "muon"}) == with_muon(tiny)  # also with the same hash


MUON = {"hyperparameters.optimizer": "muon"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hyperparameters.muon": {"momentum": 0.9}}, r'no effect with optimizer = "adamw".*hyperparameters\.muon='),
        (MUON | {"hyperparameters.muon": {"match": "spectral"}}, r"muon\.lr: missing"),
        (MUON | {"hyperparameters.muon": {"lr": 20.0}}, r"muon\.lr x muon\.weight_decay = 2 erases"),
        (MUON | {"hyperparameters.modules": {"mlp.in": {"eps": 2.0}}}, r"Muon updates mlp\.in, and has no eps"),
    ],
)
def test_values_without_effect_are_refused(tiny: Recipe, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        tiny.replace(changes)


def test_a_short_run_is_refused_because_of_adam_alone(tiny: Recipe) -> None:
    recipe = with_muon(tiny).replace({"hyperparameters.beta1": 0.8})
    with pytest.raises(InputError, match=r"lowers beta1 from 0\.8 to"):
        transfer(recipe, tokens=256)
    assert matrices(parameter_table(transfer(recipe, tokens=5_120)))["mlp.in"].beta1 == 0.95
