import pytest

from leaven.recipe.errors import InputError
from leaven.recipe.recipe import Recipe, differences
from leaven.scaling.transfer import transfer


def test_only_shape_budget_and_base_change(tiny: Recipe) -> None:
    big = transfer(tiny, width=32, depth=4, batch_tokens=512, tokens=81_920)
    changed = {path for path, _, _ in differences(tiny, big)}
    assert {path.split(".")[0] for path in changed} == {"model", "data", "batch", "schedule", "scaling"}
    assert big.hyperparameters == tiny.hyperparameters
    assert big.scaling.base == tiny.base
    assert big.schedule.warmup_tokens / big.data.tokens == tiny.schedule.warmup_tokens / tiny.data.tokens
    assert {"model", "data.tokens", "batch.tokens", "hyperparameters"} <= big.why.keys()


def test_nothing_asked_changes_nothing_but_pins_the_base(tiny: Recipe) -> None:
    assert sorted(path for path, _, _ in differences(tiny, transfer(tiny))) == [
        *(f"scaling.base.{key}" for key in ("batch_tokens", "depth", "tokens", "width")),
    ]


def test_ramps_and_intervals_keep_their_share(tiny: Recipe) -> None:
    ramp = {"start_tokens": 64, "increment_tokens": 64, "over_tokens": 2_000}
    recipe = tiny.replace({"batch.ramp": ramp, "stability.checkpoint_every_tokens": 1_000})
    big = transfer(recipe, batch_tokens=1024, tokens=40_960)
    assert big.batch.ramp is not None
    assert big.batch.ramp.model_dump() == {"start_tokens": 256, "increment_tokens": 256, "over_tokens": 8_000}
    assert big.stability.checkpoint_every_tokens == 4_000
    small = transfer(recipe, batch_tokens=32)
    assert small.batch.ramp is None  # one sequence: nothing left to ramp
    stages = [{"from_tokens": 0, "tokens": 64}, {"from_tokens": 500, "tokens": 256}]
    staged = transfer(tiny.replace({"batch": {"tokens": 256, "stages": stages}}), batch_tokens=512, tokens=20_480)
    assert [stage.model_dump() for stage in staged.batch.stages] == [
        {"from_tokens": 0, "tokens": 128},
        {"from_tokens": 1_000, "tokens": 512},
    ]


def test_bad_scales_are_refused(tiny: Recipe) -> None:
    with pytest.raises(InputError, match="--width: width 24 is not a multiple of .* 16 or 32 is"):
        transfer(tiny, width=24)
    with pytest.raises(InputError, match="--batch-tokens 100 is no whole number of sequences of 32; 96 or 128 is"):
        transfer(tiny, batch_tokens=100)
