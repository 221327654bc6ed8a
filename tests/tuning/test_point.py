import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leaven.recipe.files import parse_recipe, render
from leaven.scaling.table import ParameterTable, parameter_table
from leaven.tuning.point import recipe_at, value_like, values
from leaven.tuning.space import space

RECIPE = parse_recipe(
    """
name = "deep"
data = { source = "python-stdlib", tokens = 10_240 }
schedule = { warmup_tokens = 1_024, decay = "wsd" }

[model]
n_layers = 5
d_model = 16
n_heads = 2
n_kv_heads = 1
d_head = 8
d_ff = 32
vocab_size = 320
seq_len = 32
qk_norm = true

[batch]
tokens = 512
ramp = { start_tokens = 128, increment_tokens = 128, over_tokens = 4_096 }

[hyperparameters]
lr = 0.1
init_std = 0.1
modules = { "mlp.in" = { lr = 1.3, weight_decay = 0.7 } }
depth = { lr = [1.1] }

[scaling]
base = { width = 8, depth = 2, batch_tokens = 256, tokens = 5_120, d_head = 4 }
""",
    "deep.toml",
)
EVERYTHING = "global-full,per-module,per-module-full,hyperparameters.depth.*"
AROUND = space(RECIPE, EVERYTHING)
START = {each.path: each.centre for each in AROUND.dimensions}
LIMITS = {
    # Rounded: a recipe has no numbers below 1e-40, and a search does not come near them.
    path: (
        st.sampled_from([float(level) for level in ends])
        if isinstance(ends, range)
        else st.floats(*ends).map(lambda distance: round(distance, 9))
    )
    for path, ends in AROUND.limits.items()
}
POINTS = st.fixed_dictionaries({}, optional=LIMITS)
NUMBERS = [d for d in AROUND.dimensions if d.unit != "choice" and d.path != "batch.tokens"]


def column(table: ParameterTable, quantity: str) -> dict[str, float]:
    return {row.name: getattr(row, quantity) for row in table.rows}


def test_distance_0_is_exactly_the_recipe() -> None:
    nowhere = dict.fromkeys(AROUND.paths, 0.0)
    assert recipe_at(RECIPE, nowhere) == recipe_at(RECIPE, {}) == RECIPE
    assert values(RECIPE, nowhere) == START == AROUND.values(nowhere)
    other = recipe_at(RECIPE, {}, seed=7)
    assert other.data.seed == 7
    assert other.replace({"data.seed": RECIPE.data.seed}) == RECIPE


@pytest.mark.long
@settings(max_examples=40)
@given(POINTS)
def test_a_point_in_the_space_is_a_valid_recipe_unless_the_decay_is_too_large(octaves: dict[str, Any]) -> None:
    stated: dict[str, Any] = values(RECIPE, octaves)
    decoupled = stated.get("hyperparameters.optimizer", "adamw") == "adamw"
    if decoupled and stated.get("hyperparameters.lr", 0.1) * stated.get("hyperparameters.weight_decay", 0.1) >= 1:
        with pytest.raises(ValueError, match="lr x weight_decay"):
            recipe_at(RECIPE, octaves)
        return
    there = recipe_at(RECIPE, octaves)
    assert parse_recipe(render(there, render(RECIPE)), "x") == there
    assert values(there, dict.fromkeys(octaves, 0.0)) == stated
    for row in parameter_table(there).rows:
        numbers = (row.lr, row.init_std, row.weight_decay, row.eps, row.multiplier)
        assert all(math.isfinite(number) and number >= 0 for number in numbers)
        assert 0 < row.beta1 < 1
        assert 0 < row.beta2 < 1


@given(st.sampled_from(NUMBERS), st.data())
def test_a_value_moves_by_its_distance_and_nothing_else_moves(dimension, data: st.DataObject) -> None:
    octaves = data.draw(st.floats(dimension.low, dimension.high))
    now = values(RECIPE, {dimension.path: octaves})[dimension.path]
    if dimension.path.startswith("hyperparameters.beta"):
        # The half-life in steps, ln 2 / -ln beta, is divided by 2^x.
        assert math.log(dimension.centre) / math.log(now) == pytest.approx(2**-octaves)
    elif dimension.path == "schedule.warmup_tokens":
        assert now == pytest.approx(dimension.centre * 2**octaves, abs=0.5)
    elif dimension.unit == "tenth":
        assert now == pytest.approx(dimension.centre + octaves / 10)
    else:
        assert now / dimension.centre == pytest.approx(2**octaves)
    others = {path: 0.0 for path in AROUND.paths if path != dimension.path}
    there = values(recipe_at(RECIPE, {dimension.path: octaves}), others)
    assert there == {path: START[path] for path in others}


@pytest.mark.parametrize("quantity", ["lr", "init_std", "weight_decay", "eps", "residual"])
def test_a_multiplier_moves_the_rows_of_its_module(quantity: str) -> None:
    module, of = "mlp.out", {"residual": "multiplier"}.get(quantity, quantity)
    there = recipe_at(RECIPE, {f"hyperparameters.modules.{module}.{quantity}": 1.5})
    before, after = parameter_table(RECIPE), parameter_table(there)
    for row in after.rows:
        factor = 2**1.5 if row.module == module else 1.0
        assert getattr(row, of) == pytest.approx(factor * getattr(before[row.name], of), rel=1e-12), row.name
    untouched = {"lr", "init_std", "weight_decay", "beta1", "beta2", "eps", "multiplier"} - {of}
    assert all(column(before, other) == column(after, other) for other in untouched)


@pytest.mark.parametrize("beta", ["beta1", "beta2"])
def test_a_multiplier_of_beta_moves_one_module(beta: str) -> None:
    there = recipe_at(RECIPE, {f"hyperparameters.modules.embedding.{beta}": 1.0})
    before, after = column(parameter_table(RECIPE), beta), column(parameter_table(there), beta)
    for name, was in before.items():
        expected = was**2 if name == "embedding.weight" else was
        assert after[name] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    # Blocks lie at depth 0, 1/4, 1/2, 3/4, 1; of three points the first moves the first half, linearly in octaves.
    ("point", "shares"),
    [(0, (1, 0.5, 0, 0, 0)), (1, (0, 0.5, 1, 0.5, 0)), (2, (0, 0, 0, 0.5, 1))],
)
def test_a_point_of_a_depth_profile_moves_the_blocks_near_it(point: int, shares: tuple[float, ...]) -> None:
    there = recipe_at(RECIPE, {f"hyperparameters.depth.lr[{point}]": 1.0})
    before, after = parameter_table(RECIPE), parameter_table(there)
    for row in after.rows:
        factor = 1.0 if row.layer is None else 2 ** shares[row.layer]  # twice the lr at the point itself
        assert row.lr == pytest.approx(factor * before[row.name].lr, rel=1e-12), row.name
    for other in ("init_std", "weight_decay", "beta1", "beta2", "eps", "multiplier"):
        assert column(before, other) == column(after, other)


@given(st.floats(-2, 2))
def test_a_batch_is_whole_sequences_and_its_ramp_moves_with_it(octaves: float) -> None:
    there = recipe_at(RECIPE, {"batch.tokens": octaves})
    batch, ramp = there.batch, there.batch.ramp
    assert batch.tokens == round(16 * 2**octaves) * 32
    assert there.data == RECIPE.data
    assert there.schedule == RECIPE.schedule
    assert ramp.over_tokens == 4_096
    # A quarter of the batch, up to the rounding of three increments to sequences.
    assert abs(ramp.start_tokens - batch.tokens / 4) <= 3 * 32
    assert [size % 32 for _, size in batch.sizes] == [0] * len(batch.sizes)


def test_stages_move_with_the_batch() -> None:
    stages = [{"from_tokens": 0, "tokens": 128}, {"from_tokens": 1_000, "tokens": 512}]
    there = recipe_at(RECIPE.replace({"batch": {"tokens": 512, "stages": stages}}), {"batch.tokens": -1.0})
    assert there.batch.sizes == ((0, 64), (1_000, 256))


def test_the_rule_moves_lr_and_betas_with_the_batch() -> None:
    plain = RECIPE.replace({"scaling.base": None, "scaling.rule": "complete-d-p"})
    there = recipe_at(plain, {"batch.tokens": 2.0})
    before, after = parameter_table(plain), parameter_table(there)
    assert there.batch.tokens == 4 * plain.batch.tokens
    assert there.base == plain.base
    for row in after.rows:
        # Complete(d)P, Table 1: lr grows as the root of the batch, the half-life in steps falls with it.
        assert row.lr == pytest.approx(2 * before[row.name].lr), row.name
        assert math.log(row.beta2) == pytest.approx(4 * math.log(before[row.name].beta2))
    common = plain.replace({"scaling.rule": "standard"})
    faster = parameter_table(recipe_at(common, {"batch.tokens": 2.0}))
    assert column(faster, "lr") == column(parameter_table(common), "lr")


def test_a_depth_profile_with_fewer_points_is_read_at_the_depths_of_another() -> None:
    few = RECIPE.replace({"model.n_layers": 2, "hyperparameters.depth.lr": (1.0, 4.0)})
    paths = [f"hyperparameters.depth.lr[{point}]" for point in range(3)]
    assert [value_like(few, path, RECIPE) for path in paths] == [1.0, 2.0, 4.0]
    assert [value_like(few, path, few) for path in paths[:2]] == [1.0, 4.0]
