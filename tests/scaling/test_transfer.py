import math
import random

import pytest
from tests.errors import refused

from leaven.catalogue.terms import read
from leaven.errors import InputError
from leaven.recipe.batch import Ramp
from leaven.recipe.recipe import Average, Recipe, differences
from leaven.scaling.table import parameter_table
from leaven.scaling.tested_ranges import unlike, untuned
from leaven.scaling.transfer import _increments, searched_paths, transfer, transfer_like


def test_only_shape_budget_and_base_change(tiny: Recipe) -> None:
    big = transfer(tiny, width=32, depth=4, batch_tokens=512, tokens=81_920)
    changed = {path for path, _, _ in differences(tiny, big)}
    assert {path.split(".")[0] for path in changed} == {"model", "data", "batch", "schedule", "scaling"}
    assert big.hyperparameters == tiny.hyperparameters
    assert big.scaling.base == tiny.base
    assert big.schedule.warmup_tokens / big.data.tokens == tiny.schedule.warmup_tokens / tiny.data.tokens
    # A reason for each value that changed, and for those that did not have to.
    reasons = {path for path in changed if path != "scaling.base" and not path.startswith("scaling.base.")}
    assert big.why.keys() == reasons | {"hyperparameters", "hyperparameters.grad_clip", "scaling.base"}


def test_a_transfer_without_sizes_only_states_the_base(tiny: Recipe) -> None:
    assert sorted(path for path, _, _ in differences(tiny, transfer(tiny))) == [
        f"scaling.base.{key}" for key in ("batch_tokens", "depth", "tokens", "width")
    ]


def test_changed_proportions_are_stated_in_the_base_and_scaled_by_tensor(tiny: Recipe) -> None:
    """Twice the width; heads twice as large, as many of them; d_ff x 3, kv heads as they were (so half the group)."""
    big = transfer(tiny, width=32, d_ff=96, d_head=16, n_kv_heads=2)
    assert (big.model.n_heads, big.model.n_kv_heads, big.model.d_head, big.model.d_ff) == (2, 2, 16, 96)
    assert big.base_shape == tiny.model
    assert (big.base.d_ff, big.base.d_head, big.base.n_kv_heads) == (32, 8, 1)
    assert "d_ff / d_model 2 -> 3" in big.why["model.d_ff"]
    small, large = parameter_table(tiny), parameter_table(big)

    def moved(name: str) -> tuple[float, ...]:
        before, after = small[f"layers.0.{name}.weight"], large[f"layers.0.{name}.weight"]
        values = ("init_std", "lr", "weight_decay", "eps")
        return tuple(getattr(after, value) / getattr(before, value) for value in values)

    # fan in x 2 and fan out x 3; x 3 and x 2; key and value from 8 to 32 rows: fan out x 4
    assert moved("mlp.in") == pytest.approx((1 / math.sqrt(2), 1 / 2, 2, 1 / 3))
    assert moved("mlp.out") == pytest.approx((1 / math.sqrt(3), 1 / 3, 3, 1 / 2))
    assert moved("attention.key") == pytest.approx((1 / math.sqrt(2), 1 / 2, 2, 1 / 4))
    assert moved("attention.query") == pytest.approx((1 / math.sqrt(2), 1 / 2, 2, 1 / 2))
    assert large["layers.0.norm.query.weight"].eps == pytest.approx(tiny.hyperparameters.eps / 2)
    assert small.attention_scale == pytest.approx(1 / math.sqrt(8))
    assert large.attention_scale == pytest.approx(math.sqrt(8) / 16)
    back = transfer(big, width=16, d_ff=32, d_head=8, n_kv_heads=1)
    assert parameter_table(back).rows == small.rows
    assert back.base.d_ff is None  # the proportions are the target's own again
    further = transfer(big, width=64)  # proportions of the big one, base still the small one
    assert (further.model.d_ff, further.base_shape) == (192, tiny.model)


def test_two_transfers_with_changed_proportions_equal_one(tiny: Recipe) -> None:
    once = transfer(tiny, width=64, depth=6, d_ff=96, tokens=163_840)
    twice = transfer(transfer(tiny, width=32, d_head=16), width=64, depth=6, d_ff=96, d_head=8, tokens=163_840)
    assert once.model == twice.model
    assert parameter_table(once).rows == parameter_table(twice).rows


def test_a_ramp_starts_at_its_share_of_another_batch(tiny: Recipe) -> None:
    length = tiny.model.seq_len
    ramp = {"start_tokens": 32 * length, "increment_tokens": 32 * length, "over_tokens": 2_000}
    batch = {"tokens": 1536 * length, "ramp": ramp}
    recipe = tiny.replace({"batch": batch, "data.tokens": 200 * 1536 * length})
    moved = transfer(recipe, batch_tokens=1000 * length)
    found = Ramp(start_tokens=20 * length, increment_tokens=20 * length, over_tokens=2_000)
    assert moved.batch.ramp == found  # 21 of 1,000 are nearest to 32 of 1,536, but no other number divides 979
    assert moved.why["batch.ramp"] == (
        "the ramp keeps its share of the run; in whole sequences, it starts at 2.00% of the batch (before: 2.08%) "
        "and has 49 increments (before: 47)"
    )


def test_a_moved_ramp_keeps_its_shares_as_far_as_whole_sequences_allow() -> None:
    """The first batch is off by at most half an increment, often by less than one sequence, but has one sequence at
    least. The size of an increment is off by a quarter, or is one of the two whole sizes next to its share."""
    draw, near = random.Random(0), 0
    for _ in range(2_000):
        start, increment, increments = (draw.randint(1, draw.choice((4, 40, 400))) for _ in range(3))
        full = start + increment * increments
        sequences = draw.randint(2, 2 * full)
        count, size = _increments(sequences, start / full, increments)
        first, wanted, ideal = sequences - count * size, sequences * start / full, sequences * increment / full
        assert 1 <= first < sequences
        assert abs(first - wanted) <= max(size / 2 if wanted >= size / 2 else size, 1)
        near += abs(first - wanted) <= 1
        assert 0.79 * ideal - 1 <= size <= 1.26 * ideal + 1
        if sequences == full:
            assert (count, size) == (increments, increment)
    assert near > 1_500


def test_ramps_and_intervals_keep_their_share(tiny: Recipe) -> None:
    ramp = {"start_tokens": 64, "increment_tokens": 64, "over_tokens": 2_000}
    recipe = tiny.replace({"batch.ramp": ramp, "stability.checkpoint_every_tokens": 1_000})
    recipe = recipe.replace({"average": {"half_life_tokens": 500, "last": 0.9}})
    big = transfer(recipe, batch_tokens=1024, tokens=40_960)
    assert big.average == Average(half_life_tokens=2_000, last=0.9)
    assert big.batch.ramp == Ramp(start_tokens=256, increment_tokens=256, over_tokens=8_000)
    assert big.stability.checkpoint_every_tokens == 4_000
    small = transfer(recipe, batch_tokens=32)
    assert small.batch.ramp is None  # one sequence: nothing left to ramp
    assert small.why["batch.ramp"].startswith("dropped: a batch of one sequence")
    flat = recipe.replace({"batch.ramp.start_tokens": recipe.batch.tokens})
    assert transfer(flat, batch_tokens=1024).batch.sizes == ((0, 1024),)
    assert "batch.ramp" not in transfer(recipe, width=32).why
    stages = [{"from_tokens": 0, "tokens": 64}, {"from_tokens": 500, "tokens": 256}]
    staged = transfer(tiny.replace({"batch": {"tokens": 256, "stages": stages}}), batch_tokens=512, tokens=20_480)
    sizes = [(stage.from_tokens, stage.tokens) for stage in staged.batch.stages]
    assert sizes == [(0, 128), (1_000, 512)]


# To the scale of another recipe -------------------------------------------------------------------------------------


@pytest.fixture
def target(tiny: Recipe) -> Recipe:
    """A recipe that differs from the proxy in shape, batch, ramp, length, layout and seed."""
    base = {"width": 16, "depth": 2, "batch_tokens": 256, "tokens": 10_240}
    return tiny.replace(
        {
            "name": "target",
            "model": tiny.model.scaled(64, 5).model_dump() | {"seq_len": 64},
            "data.tokens": 163_840,
            "data.seed": 3,
            "batch": {"tokens": 1_024, "ramp": {"start_tokens": 256, "increment_tokens": 256, "over_tokens": 20_000}},
            "schedule.warmup_tokens": 5_000,
            "scaling.base": base,
            "layout.dp": 2,
            "stability.keep": 5,
            "evaluation.tokens": 2_048,
            "why": {"batch.tokens": "mine", "hyperparameters.lr": "published"},
        }
    )


def test_transfer_like_keeps_everything_of_the_target_but_tuned_values(tiny: Recipe, target: Recipe) -> None:
    tuned = tiny.replace(
        {
            "hyperparameters.lr": 0.02,
            "hyperparameters.modules": {"embedding": {"lr": 4.0}},
            "scaling.base": tiny.base.model_dump(),
            "why": {"hyperparameters.lr": "study tiny, trial 7 of 64"},
        }
    )
    big = transfer_like(tuned, target)
    assert {path.split(".")[0] for path, _, _ in differences(target, big)} == {"hyperparameters"}
    assert big.hyperparameters == tuned.hyperparameters
    assert (big.layout, big.name, big.base) == (target.layout, "target", tiny.base)
    assert big.why["hyperparameters.lr"] == "study tiny, trial 7 of 64"
    assert big.why["batch.tokens"] == "mine"
    # The same as by sizes: what a parameter gets is the rule's.
    by_sizes = transfer(tuned, width=64, depth=5, batch_tokens=1_024, tokens=163_840)
    assert parameter_table(big).rows == parameter_table(by_sizes).rows


def test_searched_warm_up_and_batch_move_with_the_scale(tiny: Recipe, target: Recipe) -> None:
    why = {"schedule.warmup_tokens": "study tiny, trial 3"}
    why["batch.tokens"] = "study tiny, trial 3; the start's 256 changes the loss by +0.01"
    changes = {"schedule.warmup_tokens": 2_048, "batch.tokens": 512, "schedule.min_lr_ratio": 0.3, "why": why}
    big = transfer_like(tiny.replace(changes | {"scaling.base": tiny.base.model_dump()}), target)
    assert big.schedule.warmup_tokens == 163_840 // 5  # a fifth of the run, as in the proxy
    assert (big.batch.tokens, big.batch.ramp and big.batch.ramp.start_tokens) == (2_048, 512)
    assert big.schedule.min_lr_ratio == target.schedule.min_lr_ratio  # was not searched
    decay = {
        "schedule.decay": "wsd",
        "schedule.decay_ratio": 0.3,
        "why": why | {"schedule.decay": "study tiny, trial 3"},
    }
    assert transfer_like(tiny.replace(changes | decay), target).schedule.decay_ratio == 0.3
    also = changes | {"why": why | {"schedule.min_lr_ratio": "study tiny, trial 3"}}
    assert transfer_like(tiny.replace(also), target).schedule.min_lr_ratio == 0.3


def test_a_ramp_that_moves_with_a_searched_batch_has_a_reason(tiny: Recipe, target: Recipe) -> None:
    seq_len = target.model.seq_len
    ramp = {"start_tokens": 4 * seq_len, "increment_tokens": 4 * seq_len, "over_tokens": 1_000}
    climbing = target.replace({"batch": {"tokens": 8 * seq_len, "ramp": ramp}})
    tokens = tiny.batch.tokens
    why = f"study tiny, trial 3 of 9; the start's {tokens:,} costs 0.01"
    moved = transfer_like(tiny.replace({"batch.tokens": 2 * tokens, "why": {"batch.tokens": why}}), climbing)
    assert moved.batch.tokens == 16 * seq_len
    assert moved.why["batch.ramp"].startswith("the ramp keeps its share of the run; in whole sequences")


def test_a_number_of_tokens_that_the_study_left_at_its_start_is_the_targets(tiny: Recipe, target: Recipe) -> None:
    target = target.replace({"schedule.warmup_tokens": 16_385, "why": {"schedule.warmup_tokens": "5%"}})
    tuned = tiny.replace({"scaling.base": tiny.base.model_dump()})
    searched = ("schedule.warmup_tokens", "batch.tokens", "hyperparameters.lr")
    why = dict.fromkeys(searched, "study tiny, trial 3; as at the start")
    big = transfer_like(tuned.replace({"why": why}), target)
    assert (big.schedule, big.batch, big.why["schedule.warmup_tokens"]) == (target.schedule, target.batch, "5%")
    assert "batch.tokens" not in big.why


@pytest.mark.parametrize(("path", "at"), [("batch.tokens", 128), ("data.tokens", 5_120)])
def test_the_start_of_a_study_is_read_from_its_reason(tiny: Recipe, target: Recipe, path: str, at: int) -> None:
    """The study may have had another batch and length than the base, and any number of steps."""
    base = {"scaling.base": tiny.base.model_dump()}
    why = f"study tiny, trial 3; the start's {at:,} changes the loss by +0.01"
    tuned = tiny.replace(base | {path: 3 * at, "why": {path: why}})
    big = transfer_like(tuned, target)
    assert read(big, path) == 3 * read(target, path)
    assert big.why[path].endswith(f"at this size, the start has {read(target, path):,}")
    # The transferred recipe can be transferred again.
    again = target.replace({"data.tokens": 2 * target.data.tokens, "batch.tokens": 2_048})
    assert read(transfer_like(big, again), path) == 3 * read(again, path)
    kept = transfer_like(
        tiny.replace(base | {path: at, "why": {path: "study tiny, trial 3; as at the start"}}), target
    )
    assert read(kept, path) == read(target, path)
    with refused(f'[why] "{path}" does not contain the value at which the study began'):
        transfer_like(tuned.replace({"why": {path: "study tiny, trial 3"}}), target)


def test_two_transfers_in_a_row_keep_what_a_study_found(tiny: Recipe, target: Recipe) -> None:
    why = {"schedule.warmup_tokens": "study tiny, trial 3; the start's 512 changes the loss by +0.01"}
    why["batch.tokens"] = "study tiny, trial 3; the start's 256 changes the loss by +0.01"
    changes = {
        "schedule.warmup_tokens": 2_048,
        "batch.tokens": 512,
        "scaling.base": tiny.base.model_dump(),
        "why": why,
    }
    tuned = tiny.replace(changes)
    direct = transfer_like(tuned, target)
    for sizes in ({"tokens": 2 * tuned.data.tokens}, {"width": 32, "batch_tokens": 1_024, "tokens": 40_960}):
        step = transfer(tuned, **sizes)
        assert searched_paths(step) == searched_paths(tuned)
        again = transfer_like(step, target)
        assert (again.schedule.warmup_tokens, again.batch.tokens) == (
            direct.schedule.warmup_tokens,
            direct.batch.tokens,
        )


def test_searched_values_are_those_whose_reasons_name_a_trial(tiny: Recipe) -> None:
    why = {"batch.tokens": "mine: study tiny-1.5, trial 3 (tpe)", "schedule.warmup_tokens": "study of warm-ups: 5%"}
    assert searched_paths(tiny.replace({"why": why})) == {"batch.tokens"}
    assert not untuned(tiny.replace({"why": why}))
    (warning,) = untuned(tiny)
    assert warning.message.startswith("no reason in [why] of the first recipe names a study")


@pytest.mark.parametrize(("field", "value"), [("norm", "layernorm"), ("activation", "relu"), ("qk_norm", False)])
def test_a_model_of_another_family_is_refused_with_the_field(
    tiny: Recipe, target: Recipe, field: str, value: object
) -> None:
    with pytest.raises(InputError, match=f"different families: model.{field} is"):
        transfer_like(tiny, target.replace({f"model.{field}": value}))


def test_another_vocabulary_changes_no_value_of_a_module(tiny: Recipe, target: Recipe) -> None:
    """No rule scales with the vocabulary, so each parameter gets the same values, and the caller warns (`unlike`)."""
    other = transfer_like(tiny, target.replace({"model.vocab_size": 640}))
    assert other.model.vocab_size == 640
    same = transfer_like(tiny, target)
    pairs = zip(parameter_table(other).rows, parameter_table(same).rows, strict=True)
    assert all((a.lr, a.init_std, a.eps, a.multiplier) == (b.lr, b.init_std, b.eps, b.multiplier) for a, b in pairs)
    assert [one.about for one in unlike(dict(target.model), other)] == ["vocab_size"]


def test_experts_of_another_number_are_refused_and_of_another_size_are_not(tiny: Recipe, target: Recipe) -> None:
    def with_experts(recipe: Recipe, **more: int) -> Recipe:
        return recipe.replace({"model.experts": {"number": 8, "active": 2, "d_expert": 16} | more})

    assert transfer_like(with_experts(tiny), with_experts(target, d_expert=64)).model.experts.d_expert == 64  # type: ignore[union-attr]
    with pytest.raises(InputError, match=r"different families: model\.experts\.number is 8 in .*, 4 in"):
        transfer_like(with_experts(tiny), with_experts(target, number=4))
    with pytest.raises(InputError, match=r"model\.experts\.active is 2 in .*, None in"):
        transfer_like(with_experts(tiny), target)


def test_proportions_of_the_proxy_are_stated_in_the_base_of_the_target(tiny: Recipe, target: Recipe) -> None:
    other = target.replace({"model.d_ff": 192})
    big = transfer_like(tiny, other)
    assert (big.base.d_ff, big.base_shape.d_ff) == (32, 32)
    by_sizes = transfer(tiny, width=64, depth=5, d_ff=192, batch_tokens=1_024, tokens=163_840)
    assert parameter_table(big).rows == parameter_table(by_sizes).rows


# Invalid sizes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ({"batch_tokens": 32_768}, "--tokens 10,240 is less than one batch of 32,768"),
        ({"depth": 20_000}, "--depth 20 k: the deepest published"),
        ({"tokens": 10**18}, "--tokens"),
        ({"width": 24}, "^width 24 does not give a whole number of .* give 16 or 32"),
        ({"n_kv_heads": 3}, "n_heads 2 is not a multiple of n_kv_heads 3; set n_kv_heads to 1 or 2"),
        ({"batch_tokens": 100}, "is not a multiple of the sequence length 32; give 96 or 128"),
    ],
)
def test_absurd_sizes_are_refused(tiny: Recipe, sizes: dict[str, int], says: str) -> None:
    with pytest.raises(InputError, match=says):
        transfer(tiny, **sizes)


def test_a_run_too_short_for_its_moments_is_refused(tiny: Recipe) -> None:
    long = tiny.replace({"data.tokens": 1_024_000_000})
    with pytest.raises(InputError, match=r"too few steps for Adam.*the rule lowers beta1 from 0.9 to"):
        transfer(long, tokens=256)
