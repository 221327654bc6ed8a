"""The parameter table against values computed by hand; multipliers of 1 change nothing."""

import math

import pytest

from leaven.recipe.hyperparameters import DepthProfile, Multipliers
from leaven.recipe.recipe import Recipe
from leaven.scaling.table import parameter_table
from leaven.scaling.transfer import transfer


def test_twice_wider_three_times_deeper_four_times_longer_by_hand(tiny: Recipe) -> None:
    table = parameter_table(transfer(tiny, width=32, depth=6, tokens=40_960))
    hidden, embedding = table["layers.3.mlp.out.weight"], table["embedding.weight"]
    readout, gain = table["unembedding.weight"], table["layers.0.norm.mlp.weight"]
    q = 1 / 4
    assert hidden.lr == pytest.approx(0.01 / 2 * math.sqrt(q))
    assert hidden.init_std == pytest.approx(0.1 / math.sqrt(2))
    assert hidden.weight_decay == pytest.approx(0.1 * 2 * math.sqrt(q))
    assert hidden.eps == pytest.approx(1e-8 / 2 / 3 / math.sqrt(q))
    assert hidden.multiplier == pytest.approx(1 / 3)
    assert table["layers.3.mlp.in.weight"].multiplier == 1.0
    assert embedding.lr == pytest.approx(0.01 * math.sqrt(q))
    assert embedding.init_std == 0.1
    assert embedding.weight_decay == pytest.approx(0.1 * math.sqrt(q))
    assert readout.init_std == pytest.approx(0.1 / 2)
    assert readout.eps == pytest.approx(1e-8 / math.sqrt(q))
    assert gain.lr == pytest.approx(0.01 * math.sqrt(q))
    assert gain.weight_decay == 0
    # Half-lives four times as long in steps: the same share of the run.
    assert math.log(0.5) / math.log(readout.beta2) == pytest.approx(4 * math.log(0.5) / math.log(0.95))


def test_multipliers_of_one_change_nothing_to_the_last_bit(tiny: Recipe) -> None:
    ones = {module: dict.fromkeys(Multipliers.model_fields, 1.0) for module in tiny.model.modules}
    profile = dict.fromkeys(DepthProfile.model_fields, (1.0, 1.0, 1.0))
    for recipe in (tiny, transfer(tiny, width=48, depth=6, batch_tokens=768, tokens=71_680)):
        neutral = recipe.replace({"hyperparameters.modules": ones, "hyperparameters.depth": profile})
        assert parameter_table(neutral).rows == parameter_table(recipe).rows


def test_a_depth_profile_is_linear_in_the_logarithm() -> None:
    profile = (0.25, 4.0, 1.0)
    assert DepthProfile.at(profile, 1, 5) == pytest.approx(1)  # halfway between 1/4 and 4
    assert DepthProfile.at(profile, 3, 5) == pytest.approx(2)
    assert [DepthProfile.at(profile, layer, 5) for layer in (0, 2, 4)] == list(profile)  # to the last bit
    assert DepthProfile.at(profile, 0, 1) == 0.25
    for layers in (2, 3, 7, 48):  # half the multiplier everywhere is half the multiplier at every depth
        for layer in range(layers):
            halved = DepthProfile.at(tuple(each / 2 for each in profile), layer, layers)
            assert halved == pytest.approx(DepthProfile.at(profile, layer, layers) / 2)


def test_every_quantity_is_rule_times_module_times_depth(tiny: Recipe) -> None:
    """The factors of rule, module and depth multiply: they are additive in the logarithm."""
    types = {"lr": 3.0, "init_std": 0.5, "weight_decay": 4.0, "eps": 2.0}
    types |= {"beta1": 0.25, "beta2": 2.0, "residual": 0.7}
    depth = {quantity: (1.0, 1.5) for quantity in types}
    big = transfer(tiny, width=32, depth=4, tokens=40_960)
    both = big.replace({"hyperparameters.modules": {"mlp.out": types}, "hyperparameters.depth": depth})
    plain, full = parameter_table(big), parameter_table(both)
    for layer in range(4):
        name = f"layers.{layer}.mlp.out.weight"
        at_depth = 1.5 ** (layer / 3)
        for quantity, factor in types.items():
            of = "multiplier" if quantity == "residual" else quantity
            before, after = getattr(plain[name], of), getattr(full[name], of)
            if quantity.startswith("beta"):  # the half-life is divided
                before, after = math.log(before), math.log(after)
            assert after / before == pytest.approx(factor * at_depth), quantity
        # 1 - beta is multiplied, to first order.
        row = full[name]
        assert 1 - row.beta2 == pytest.approx((1 - plain[name].beta2) * 2.0 * at_depth, rel=0.05)
        assert full[f"layers.{layer}.attention.out.weight"].multiplier == pytest.approx(0.5**1 * at_depth)
    assert full["embedding.weight"] == plain["embedding.weight"]


def test_gains_and_biases_are_decayed_if_requested_with_multipliers_by_module(tiny: Recipe) -> None:
    layered = {"model.norm": "layernorm", "model.bias": True, "hyperparameters.decay_norm_and_bias": True}
    big = transfer(tiny.replace(layered), width=32, depth=4, tokens=40_960)
    vectors = {row.module for row in parameter_table(big).rows if not row.role.is_matrix}
    assert {"norm.mlp", "norm.final", "biases"} <= vectors
    decays = {"norm.mlp": {"weight_decay": 3.0}, "biases": {"weight_decay": 0.0}}
    changed = big.replace({"hyperparameters.modules": decays})
    decay = {row.module: row.weight_decay for row in parameter_table(changed).rows}
    assert decay["norm.final"] == pytest.approx(0.1 * math.sqrt(1 / 4))  # Table 1: Rest, and the token column
    assert decay["norm.mlp"] == pytest.approx(3 * decay["norm.final"])
    assert decay["biases"] == 0


@pytest.mark.parametrize(
    ("module", "quantity", "says"),
    [
        ("norm.mlp", "weight_decay", "norm.mlp is not decayed; .*decay_norm_and_bias = true"),
        ("biases", "weight_decay", "biases is not decayed"),
        ("norm.query", "init_std", "norm.query has no init_std"),
        ("biases", "init_std", "biases has no init_std"),
        ("embedding", "residual", "embedding has no residual multiplier; only the last matrix of a residual branch"),
    ],
)
def test_a_multiplier_without_effect_is_refused(tiny: Recipe, module: str, quantity: str, says: str) -> None:
    biased = tiny.replace({"model.norm": "layernorm", "model.bias": True})
    with pytest.raises(ValueError, match=says):
        biased.replace({f"hyperparameters.modules.{module}.{quantity}": 2.0})


@pytest.mark.parametrize("quantity", ["lr", "init_std", "weight_decay", "beta1", "beta2", "eps", "residual"])
def test_every_accepted_multiplier_changes_the_table(tiny: Recipe, quantity: str) -> None:
    recipe = tiny.replace({"model.norm": "layernorm", "model.bias": True, "model.positions": "learned"})
    for module in recipe.model.modules:
        try:
            changed = recipe.replace({f"hyperparameters.modules.{module}.{quantity}": 2.0})
        except ValueError:
            continue
        assert parameter_table(changed).rows != parameter_table(recipe).rows, module


@pytest.mark.parametrize("per_head", [False, True])
def test_qk_gains_shared_or_per_head(tiny: Recipe, per_head: bool) -> None:
    recipe = tiny.replace({"model.qk_norm_per_head": per_head})
    small, large = (parameter_table(r)["layers.0.norm.key.weight"] for r in (recipe, transfer(recipe, width=64)))
    assert large.shape == ((4, 8) if per_head else (8,))
    assert large.init_mean == 1.0
    assert large.eps / small.eps == (1 / 4 if per_head else 1)
