import re
from pathlib import Path
from typing import Any

import pytest

from leaven.errors import InputError
from leaven.interop.configs.export import export
from leaven.recipe.files import parse_recipe, read_recipe, render, write_recipe
from leaven.recipe.hyperparameters import Multipliers
from leaven.recipe.recipe import Recipe, differences
from leaven.scaling.transfer import transfer
from leaven.training.integrity import require_run_of
from leaven.training.run_folder import RunFolder
from leaven.tuning.bounds import BOUNDS
from leaven.tuning.point import recipe_at
from leaven.tuning.space import SETS, space
from leaven.tuning.study_document import Dimension
from leaven.verification.recipe_family import RecipeTrial

LLAMA = (
    *("embedding", "norm.attention", "norm.query", "norm.key", "attention.query", "attention.key", "attention.value"),
    *("attention.out", "norm.mlp", "mlp.gate", "mlp.in", "mlp.out", "norm.final", "unembedding"),
)
GAINS = ("norm.attention", "norm.query", "norm.key", "norm.mlp", "norm.final")


def dimension(recipe: Recipe, path: str) -> Dimension:
    return space(recipe, path).dimensions[0]


def ends(recipe: Recipe, path: str) -> list[Any]:
    found = dimension(recipe, path)
    return [space(recipe, path).values({path: x})[path] for x in (found.low, found.high)]


@pytest.fixture
def deep(tiny: Recipe) -> Recipe:
    return tiny.replace({"model.n_layers": 5})


def modules(*names: str, quantity: str) -> set[str]:
    return {f"hyperparameters.modules.{name}.{quantity}" for name in names}


def test_global_values(tiny: Recipe) -> None:
    names = ("lr", "init_std", "weight_decay", "beta1", "beta2", "eps", "residual")
    around = space(tiny, "global")
    assert set(around.paths) == {f"hyperparameters.{n}" for n in names} | {"schedule.warmup_tokens", "batch.tokens"}
    assert around.dimensions[0].centre == 0.01
    assert around.near["hyperparameters.lr"] == (-3, 3)
    assert around.left_out == ()
    # Steps of half an octave for lr, init and residual, of one for decay, eps and 1 - beta: twice as far.
    wide = {dimension.path for dimension in around.dimensions if dimension.scale == 2 * around.dimensions[0].scale}
    assert {f"hyperparameters.{n}" for n in ("weight_decay", "beta1", "beta2", "eps")} <= wide
    assert not {f"hyperparameters.{n}" for n in ("lr", "init_std", "residual")} & wide


def test_per_module_has_lr_init_and_residual_by_module_and_the_rest_globally(deep: Recipe) -> None:
    expected = (
        modules(*LLAMA, quantity="lr")
        | modules("embedding", "mlp.gate", "unembedding", quantity="init_std")  # the others: test_valleys.py
        | modules("attention.out", "mlp.out", quantity="residual")
        | {"hyperparameters.depth.lr[0]", "hyperparameters.depth.lr[2]"}
        | {f"hyperparameters.{name}" for name in ("weight_decay", "beta1", "beta2", "eps")}
    )
    around = space(deep, "per-module")
    assert set(around.paths) == expected
    assert len(around.paths) == len(expected) == 25
    assert {each.centre for each in around.dimensions} == {1.0, 0.1, 0.9, 0.95, 1e-8}
    plain = deep.replace({"model.qk_norm": False})
    without = set(space(plain, "per-module").paths) - set(around.paths)
    assert without == modules("attention.query", "attention.key", quantity="init_std")
    changes = {"model.norm": "layernorm", "model.activation": "gelu", "model.positions": "learned"}
    gpt = deep.replace(changes | {"model.bias": True})
    matrices = {"positions", *LLAMA} - {"mlp.gate", *GAINS}
    every = set(space(gpt, "per-module").paths)
    assert modules(*matrices, quantity="init_std") | modules("biases", quantity="lr") < every
    assert len(space(gpt, "per-module").paths) == 32


def test_per_module_full_has_every_value_with_an_effect(deep: Recipe) -> None:
    around = space(deep, "per-module-full")
    weights = set(LLAMA) - set(GAINS)
    expected = modules("attention.out", "mlp.out", quantity="residual")
    for quantity in ("lr", "beta1", "beta2", "eps"):
        expected |= modules(*LLAMA, quantity=quantity)
    for quantity in ("init_std", "weight_decay"):
        expected |= modules(*weights, quantity=quantity)
    for quantity in ("lr", "init_std", "weight_decay", "beta1", "beta2", "eps", "residual"):
        expected |= {f"hyperparameters.depth.{quantity}[{point}]" for point in (0, 2)}
    assert set(around.paths) == expected
    assert len(around.paths) == len(expected) == 90
    decayed = deep.replace({"hyperparameters.decay_norm_and_bias": True})
    more = set(space(decayed, "per-module-full").paths) - expected
    assert more == modules(*GAINS, quantity="weight_decay")


def test_only_points_of_a_depth_profile_that_affect_a_block_are_searched(tiny: Recipe) -> None:
    def points(recipe: Recipe) -> list[str]:
        paths = (path for path in space(recipe, "per-module").paths if "depth" in path)
        return [path.removeprefix("hyperparameters.depth.") for path in paths]

    # One block has its own multipliers already.
    counts = {1: [], 2: ["lr[0]"], 3: ["lr[0]", "lr[2]"]}
    assert {n: points(tiny.replace({"model.n_layers": n})) for n in counts} == counts
    stated = tiny.replace({"model.n_layers": 9, "hyperparameters.depth.lr": (1.0, 1.1, 1.2, 1.1, 0.9)})
    assert points(stated) == [f"lr[{i}]" for i in (0, 1, 3, 4)]
    starts = {each.path: each.centre for each in space(stated, "per-module").dimensions}
    assert starts["hyperparameters.depth.lr[4]"] == 0.9
    assert points(stated.replace({"model.n_layers": 3})) == ["lr[0]", "lr[4]"]


def test_paths_and_patterns_with_commas(deep: Recipe) -> None:
    listed = space(deep, 'hyperparameters.lr, hyperparameters.modules."mlp.in".init_std,hyperparameters.depth.lr[1]')
    assert listed.paths == tuple(
        f"hyperparameters.{name}" for name in ("lr", "modules.mlp.in.init_std", "depth.lr[1]")
    )
    assert len(space(deep, "hyperparameters.depth.lr[*]").paths) == 3
    assert set(space(deep, "global,batch.tokens,hyperparameters.modules.mlp.*.eps").paths) == {
        *space(deep, "global").paths,
        *modules("mlp.gate", "mlp.in", "mlp.out", quantity="eps"),
    }


@pytest.mark.parametrize("which", SETS)
def test_the_paths_of_a_space_give_the_same_space(deep: Recipe, which: str) -> None:
    around = space(deep, which)
    assert space(deep, ",".join(around.paths)).dimensions == around.dimensions


def test_a_named_init_has_no_init_std_to_search(tiny: Recipe) -> None:
    named = tiny.replace({"hyperparameters.init": "mitchell", "hyperparameters.init_std": None})
    assert [path for path, _ in space(named, "global").left_out] == ["hyperparameters.init_std"]
    assert space(named, "hyperparameters.modules.mlp.in.init_std").dimensions[0].centre == 1.0


STILL = {"hyperparameters.weight_decay": 0.0, "schedule.warmup_tokens": 0}
MUON = {"hyperparameters.optimizer": "muon"}
ONE_SEQUENCE = {"batch.tokens": 32, "data.tokens": 320, "schedule.warmup_tokens": 0}


def test_values_of_0_are_left_out_of_a_set(tiny: Recipe) -> None:
    still = tiny.replace(STILL)
    assert set(dict(space(still, "global").left_out)) == {"hyperparameters.weight_decay", "schedule.warmup_tokens"}
    # A multiplier of 0 has no effect either.
    full, whole = space(still, "per-module-full"), space(tiny, "per-module-full")
    assert {path for path, _ in full.left_out} == set(whole.paths) - set(full.paths)
    assert all("weight_decay" in path for path, _ in full.left_out)


@pytest.mark.parametrize(
    ("changes", "path", "message"),
    [
        ({}, "model.d_model", r"not a value to search; give a set \(global"),
        ({}, "per_module", "not a value to search; did you mean per-module"),
        ({}, "recipe", r"the recipe has no \[tuning\]"),
        ({}, "global, ,per-module", "an empty name; give global, global-full, per-module"),
        ({}, "hyperparameters.modules.embedding.residual", "has no"),
        ({}, "hyperparameters.modules.mlp.inn.lr", "did you mean mlp.in"),
        (STILL, "schedule.warmup_tokens", "--space schedule.warmup_tokens: it is 0 in the recipe, .* set it above 0"),
        (STILL, "hyperparameters.modules.mlp.in.weight_decay", "weight_decay is 0 in the recipe, and every multiple"),
        (STILL, "hyperparameters.modules.*.weight_decay", "nothing is left to search"),
        ({"hyperparameters.grad_clip": 0.0}, "hyperparameters.grad_clip", "it is 0 in the recipe"),
        (ONE_SEQUENCE, "batch.tokens", "batch.tokens: 32 cannot move within its bounds: one sequence"),
        (
            {"hyperparameters.init": "mitchell", "hyperparameters.init_std": None},
            *("hyperparameters.init_std", 'init = "mitchell" sets every standard deviation itself'),
        ),
        ({}, "schedule.decay_ratio", 'decay = "cosine" has no cooldown; set schedule.decay = "wsd"'),
        ({"schedule.decay": "constant"}, "schedule.min_lr_ratio", 'decay = "constant" does not decay'),
        ({}, "hyperparameters.muon.lr", "the optimizer is not Muon; set hyperparameters.optimizer"),
        (MUON, "hyperparameters.muon.lr", "it equals hyperparameters.lr; set it in the recipe, or search"),
        (MUON, "hyperparameters.optimizer", "separately"),
        (MUON, "hyperparameters.modules.mlp.out.beta2", "Muon updates mlp.out, and has no beta2"),
    ],
)
def test_what_cannot_be_searched_is_refused(tiny: Recipe, changes: dict[str, Any], path: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as refused:
        space(tiny.replace(changes), path)
    assert "\n" not in str(refused.value)


def test_a_range_ends_where_recipes_become_invalid(tiny: Recipe) -> None:
    edge = tiny.replace({"hyperparameters.lr": 0.5})
    decay, lr = (dimension(edge, f"hyperparameters.{name}") for name in ("weight_decay", "lr"))
    assert (decay.high, lr.high) == (4.25, 1.0)  # 0.1 x 2^4.25 x 0.5 = 0.95; lr 1
    assert decay.ends[1].startswith("beyond it, the recipe is invalid: ")
    assert "lr x weight_decay" in decay.ends[1]
    assert lr.ends[1].startswith("the bound, 1: ")
    assert dimension(edge.replace({"hyperparameters.weight_decay": 1.0}), "hyperparameters.lr").high == 0.875
    whole = edge.replace({"schedule.warmup_tokens": edge.data.tokens})
    assert "longer than the run" in dict(space(whole, "global").left_out)["schedule.warmup_tokens"]


@pytest.mark.parametrize("quantity", ["lr", "init_std", "weight_decay", "beta1", "beta2", "eps", "residual"])
def test_a_range_goes_to_the_bounds_wherever_the_recipe_is(tiny: Recipe, quantity: str) -> None:
    """Also the product of a global value and a module's multiplier stays within the bounds."""
    bounds, path = BOUNDS[quantity], f"hyperparameters.{quantity}"
    for start in (0.9 * bounds.low + 0.1 * bounds.high, 0.3 * bounds.low + 0.7 * bounds.high):
        recipe = tiny.replace({"hyperparameters.weight_decay": 1e-3, path: start})
        module = f"hyperparameters.modules.mlp.out.{quantity}"
        for own in (path, module):
            low, high = (resolved(recipe, own, quantity, x) for x in sorted(space(recipe, own).limits[own]))
            if quantity not in {"lr", "weight_decay"}:  # whose product ends first
                assert sorted((low, high)) == pytest.approx([bounds.low, bounds.high])
            assert all(bounds.low * (1 - 1e-9) <= end <= bounds.high * (1 + 1e-9) for end in (low, high))


def resolved(recipe: Recipe, path: str, quantity: str, x: float) -> float:
    """Return the value of mlp.out at a point: the global value times the module's multiplier."""
    hyper = recipe_at(recipe, {path: x}).hyperparameters
    of_all, multiplier = getattr(hyper, quantity), getattr(hyper.modules.get("mlp.out", Multipliers()), quantity)
    return float(of_all**multiplier if quantity.startswith("beta") else of_all * multiplier)


def test_a_value_beyond_its_bounds_is_searched_towards_them(tiny: Recipe) -> None:
    fast = tiny.replace({"hyperparameters.beta1": 0.2})
    found = dimension(fast, "hyperparameters.beta1")
    assert found.high == 0
    assert ends(fast, "hyperparameters.beta1") == pytest.approx([0.99, 0.2])
    assert found.near == (-2, 0)


def test_values_that_may_be_0_move_in_tenths(tiny: Recipe) -> None:
    found = dimension(tiny, "model.dropout")
    assert (found.low, found.high, found.unit, found.ends[0]) == (0, 5, "tenth", "")
    assert recipe_at(tiny, {"model.dropout": 1.5}).model.dropout == pytest.approx(0.15)
    some = tiny.replace({"model.dropout": 0.3})
    assert ends(some, "model.dropout") == pytest.approx([0, 0.5])
    assert recipe_at(some, {"model.dropout": dimension(some, "model.dropout").low}) == tiny
    assert ends(tiny, "schedule.min_lr_ratio") == [0, 1]
    limited = with_table(tiny, octaves={"model.dropout": [-1, 2.5]})
    assert ends(limited, "model.dropout") == [0, 0.25]


def test_values_without_effect_are_left_out_of_a_set(tiny: Recipe) -> None:
    assert dict(space(tiny, "global-full").left_out).keys() == {"schedule.decay_ratio"}
    wsd = tiny.replace({"schedule.decay": "wsd", "schedule.decay_ratio": 0.5})
    assert ends(wsd, "schedule.decay_ratio") == pytest.approx([0.01, 1])


def test_a_choice_is_between_levels(tiny: Recipe) -> None:
    found = dimension(tiny, "schedule.decay")
    assert found.levels == ("cosine", "linear", "wsd")
    assert space(tiny, "schedule.decay").limits == {"schedule.decay": range(3)}
    assert recipe_at(tiny, {"schedule.decay": 2.0}).schedule.decay == "wsd"
    assert recipe_at(tiny, {"hyperparameters.optimizer": 1.0}).hyperparameters.optimizer == "adam"
    linear = tiny.replace({"schedule.decay": "linear"})
    assert dimension(linear, "schedule.decay").levels == ("linear", "cosine", "wsd")
    assert dimension(tiny.replace({"schedule.decay": "inverse_sqrt"}), "schedule.decay").levels[0] == "inverse_sqrt"


def test_a_shorter_run_has_the_values_that_the_rule_gives_it(tiny: Recipe) -> None:
    long = tiny.replace({"data.tokens": 409_600})
    assert ends(long, "data.tokens") == [51_200, 409_600]
    there = recipe_at(long, {"data.tokens": -1.0})
    assert (there.data.tokens, there.base.tokens) == (204_800, 409_600)


def test_a_value_is_kept_below_a_limit(tiny: Recipe) -> None:
    around = space(tiny, "hyperparameters.lr,schedule.warmup_tokens")
    path, centre = "schedule.warmup_tokens", tiny.schedule.warmup_tokens
    usual = around.limits[path][1]
    for limit in (centre + 1, 1.25 * centre, 2 * centre, 3 * centre):
        high = around.below(path, limit).limits[path][1]
        assert around.values({path: high})[path] < limit
        assert high == usual or around.values({path: high + 1 / 8})[path] >= limit
    assert around.below(path, 100 * centre) == around
    assert around.below("batch.tokens", 1) == around


def with_table(recipe: Recipe, **table: Any) -> Recipe:
    return recipe.replace({"tuning": table})


def test_a_tuning_table_sets_the_space_and_its_limits(deep: Recipe) -> None:
    far = {"hyperparameters.modules.*.lr": 1.5, "hyperparameters.modules.mlp.in.lr": [-1, 2], "hyperparameters.lr": 2}
    recipe = with_table(deep, space="per-module", octaves=far)
    around = space(recipe)
    assert set(around.paths) == {*space(deep, "per-module").paths, "hyperparameters.lr"}
    assert around.limits["hyperparameters.modules.embedding.lr"] == (-1.5, 1.5)
    assert around.limits["hyperparameters.modules.mlp.in.lr"] == (-1, 2)  # the last that fits
    assert around.near["hyperparameters.modules.mlp.gate.init_std"] == (-3, 3)
    assert space(recipe, "recipe") == around
    # --space sets the values, the table their limits.
    assert space(recipe, "global").limits == space(deep, "global").limits | {"hyperparameters.lr": (-2, 2)}
    assert space(recipe, ",".join(around.paths)) == around
    assert space(with_table(deep, octaves={"batch.tokens": 1})).limits == {"batch.tokens": (-1, 1)}
    assert space(with_table(deep, space="global, hyperparameters.depth.lr[0]")).paths[-1].endswith("lr[0]")
    assert space(deep) == space(deep, "global")


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("[tuning]", "this table is empty; write space"),
        ('[tuning]\nspace = "gobal"', r"\[tuning\] space = gobal: not a value to search; did you mean global"),
        ('[tuning.octaves]\n"hyperparameters.lrr" = 2', r"octaves\] hyperparameters.lrr: not a value .* mean"),
        (
            '[tuning.octaves]\n"hyperparameters.lr" = [2, 1]',
            "the range 2 to 1 octaves must begin below 0",
        ),
        ("[tuning.octaves]\nhyperparameters.lr = 2", "quote the path"),
        ('[tuning.octaves]\n"schedule.warmup_tokens" = 4', r"\+4 octaves \(warmup_tokens 16,384 is longer"),
        ('[tuning.octaves]\n"batch.tokens" = [-6, 1]', "a batch of 4 tokens is rounded to 0 sequences"),
        ('[tuning.octaves]\n"hyperparameters.lr" = [-1, 12]', r"\+12 octaves .*lr x weight_decay"),
        ('[tuning.octaves]\n"batch.tokens" = 1e-5', r"from -1e-05 to \+1e-05 octaves the value stays"),
        (
            '[tuning.octaves]\n"schedule.decay" = 1',
            r"\[tuning.octaves\] schedule.decay: this value is a choice and has no range in octaves",
        ),
    ],
)
def test_an_invalid_tuning_table_is_refused(tiny_text: str, table: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as refused:
        space(parse_recipe(f"{tiny_text}\n{table}\n", "tiny.toml"))
    assert "\n" not in str(refused.value)


def test_a_tuning_table_is_written_and_overridden(deep: Recipe, tmp_path: Path) -> None:
    far = {"hyperparameters.modules.*.lr": 1.5, "hyperparameters.depth.lr[2]": [-1, 2], "hyperparameters.lr": 2}
    recipe = with_table(deep, space="per-module", octaves=far)
    assert parse_recipe(render(recipe), "x") == recipe
    assert parse_recipe(render(recipe, render(deep)), "x") == recipe
    assert parse_recipe(render(deep, render(recipe)), "x") == deep
    path = tmp_path / "recipe.toml"
    path.write_text(render(recipe))
    assert '"hyperparameters.lr" = 2' in path.read_text()
    changed = read_recipe(path, ["tuning.octaves.hyperparameters.lr=[-1, 0.5]", "tuning.space=global"])
    assert changed.tuning.octaves["hyperparameters.lr"] == (-1, 0.5)
    assert changed.tuning.space == "global"


def test_the_tuning_table_does_not_change_a_run_or_an_export(deep: Recipe, tmp_path: Path) -> None:
    recipe = with_table(deep, space="per-module")
    assert differences(recipe, deep) == []
    write_recipe(deep, tmp_path / "recipe.toml")
    require_run_of(RunFolder(tmp_path), recipe)  # raises for another recipe
    assert RecipeTrial(recipe).key == RecipeTrial(deep).key
    assert export("megatron", recipe) == export("megatron", deep)
    assert transfer(recipe, width=32).tuning == recipe.tuning


def test_clipping_keeps_its_form(tiny: Recipe) -> None:
    running = tiny.replace({"hyperparameters.grad_clip": {"mode": "running", "limit": 2.0}})
    clip = recipe_at(running, {"hyperparameters.grad_clip": -1.0}).hyperparameters.grad_clip
    assert (clip.mode, clip.limit) == ("running", 1.0)
    assert ends(tiny, "hyperparameters.grad_clip") == pytest.approx([0.01, 100])


def test_muon_has_values_of_its_own(tiny: Recipe) -> None:
    own = "hyperparameters.muon."
    shared = tiny.replace(MUON)
    assert [path for path in space(shared, "global").paths if "muon" in path] == [f"{own}momentum"]
    assert ends(shared, f"{own}momentum") == pytest.approx([0.999, 0.5])
    faster = recipe_at(shared, {f"{own}momentum": 1.0, "hyperparameters.lr": 1.0}).hyperparameters
    assert (faster.muon.momentum, faster.of_matrices("lr")) == (pytest.approx(0.95**2), pytest.approx(0.02))
    apart = shared.replace({"hyperparameters.muon": {"lr": 0.02, "match": "spectral"}})
    assert {f"{own}lr", f"{own}momentum"} < set(space(apart, "per-module").paths)
    # A multiplier of a module is bounded by the value that it multiplies.
    multiplier = "hyperparameters.modules.mlp.out."
    assert ends(apart, f"{multiplier}lr") == pytest.approx([1e-5 / 0.02, 1 / 0.02])
    assert ends(shared, f"{multiplier}lr") == ends(tiny, f"{multiplier}lr")
    assert [0.95**end for end in ends(apart, f"{multiplier}beta1")] == pytest.approx([0.999, 0.5])
    assert not any("muon" in path for name in SETS for path in space(tiny, name).paths)


def test_the_docs_state_the_bounds_of_every_value() -> None:
    page = Path("docs/concepts/spaces.md").read_text()
    rows = re.findall(r"^\| `(.+?)` \| ([\d.e-]+)[^|]* \| ([\d.e-]+)[^|]* \| ±(\d+) \| (.*) \|$", page, re.MULTILINE)
    stated = {name: (float(low), float(high), float(near), why) for name, low, high, near, why in rows}
    assert stated == {name: (each.low, each.high, each.near, each.why) for name, each in BOUNDS.items()}


def test_a_search_does_not_lower_the_batch_until_its_ramp_is_gone(tiny: Recipe) -> None:
    seq_len = tiny.model.seq_len
    ramp = {"start_tokens": seq_len, "increment_tokens": seq_len, "over_tokens": 10 * seq_len}
    climbing = tiny.replace({"batch": {"tokens": 4 * seq_len, "ramp": ramp}})
    for recipe, sequences in ((climbing, 2), (climbing.replace({"batch.ramp": None}), 1)):
        (batch,) = space(recipe, "batch.tokens").dimensions
        lowest = recipe_at(recipe, {batch.path: batch.low}).batch
        assert lowest.tokens == sequences * seq_len
        assert (lowest.ramp is None) == (recipe.batch.ramp is None)
    with pytest.raises(InputError, match="1 sequence, so it cannot have a ramp"):
        space(climbing.replace({"tuning": {"octaves": {"batch.tokens": 2}}}))


def test_initial_values_are_not_searched_if_training_starts_from_weights(tiny: Recipe) -> None:
    found = space(tiny.replace({"start.weights": "model"}), "global")
    assert "hyperparameters.init_std" not in found.paths
    assert dict(found.left_out)["hyperparameters.init_std"].startswith("training starts from the [start] weights")
