"""Each warning on a case computed by hand, and no warning within the tested ranges."""

import pytest

from leaven.recipe.recipe import Recipe, RuleName
from leaven.scaling.tested_ranges import TESTED, dropped, replaced, unlike, unlike_training, warnings
from leaven.scaling.transfer import transfer, transfer_like
from leaven.tuning.point import CHOICES
from leaven.tuning.space import SETS, space


def about(recipe: Recipe) -> dict[str, tuple[float, float]]:
    return {warning.about: (warning.value, warning.limit) for warning in warnings(recipe)}


def test_the_base_and_a_near_target_have_no_warnings(tiny: Recipe) -> None:
    assert set(TESTED) == set(RuleName.__args__)
    assert about(tiny) == {}
    assert about(transfer(tiny, width=32, depth=4, tokens=40_960)) == {}


@pytest.mark.parametrize(
    ("value", "others"),
    [
        ({"scaling.alpha": 0.5}, {"scaling.rule": "mup"}),
        ({"scaling.token_exponent": 0.3}, {"scaling.rule": "completep"}),
        ({"scaling.scale_decay_with_depth": True}, {"scaling.alpha": 1.0}),
        ({"schedule.decay_ratio": 0.3}, {"schedule.decay": "linear"}),
        ({"schedule.min_lr_ratio": 0.3}, {"schedule.decay": "constant"}),
    ],
)
def test_a_value_without_effect(tiny: Recipe, value: dict[str, object], others: dict[str, object]) -> None:
    effective = {"scaling.rule": "complete-d-p", "scaling.alpha": 0.5, "schedule.decay": "wsd"}
    assert "without effect" not in about(tiny.replace(effective | value))
    (path, number), *_ = value.items()
    (message,) = (each.message for each in warnings(tiny.replace(effective | value | others)) if path in each.message)
    assert f"{path} = {number}" in message


def test_a_default_that_would_be_invalid_is_not_needed(tiny: Recipe) -> None:
    warmed = tiny.replace({"schedule.decay": "inverse_sqrt", "schedule.warmup_tokens": 1_024})
    assert "without effect" not in about(warmed)


def test_ratios_beyond_what_was_tested(tiny: Recipe) -> None:
    found = about(transfer(tiny, width=16 * 32, depth=2 * 33, batch_tokens=2_048))
    assert found["width ratio"] == (32, 16)
    assert found["depth ratio"] == (33, 32)
    assert found["batch ratio"] == (8, 4)
    assert about(transfer(tiny.replace({"scaling.rule": "mup"}), width=32, depth=4)) == {"depth ratio": (2, 1)}
    message = warnings(transfer(tiny.replace({"scaling.rule": "completep"}), tokens=20_480))[0].message
    assert "tokens x2: completep has no rule for tokens" in message


def test_muon_far_from_the_batch_or_the_tokens_of_the_base(tiny: Recipe) -> None:
    muon = tiny.replace({"hyperparameters.optimizer": "muon"})
    assert about(transfer(muon, width=32, depth=4, batch_tokens=1_024, tokens=40_960)) == {}
    found = about(transfer(muon, batch_tokens=1_280, tokens=10_240 * 5))
    assert (found["muon batch"], found["muon tokens"]) == ((5, 4), (5, 4))
    other_rule = {"scaling.rule": "completep"}
    assert not any("muon" in name for name in about(transfer(muon.replace(other_rule), tokens=10_240 * 5)))


def test_norms_on_outputs_far_from_the_base(tiny: Recipe) -> None:
    normed = tiny.replace({"model.norm_placement": "output"})
    assert about(transfer(normed, width=32, depth=4)) == {}
    wide, deep = transfer(normed, width=64, depth=4), transfer(normed, width=32, depth=8)
    assert (about(wide)["output norms width"], about(deep)["output norms depth"]) == ((4, 2), (4, 2))
    (message,) = (each.message for each in warnings(wide) if each.about == "output norms width")
    assert "the best lr was measured to change as width^-0.22, here x0.74" in message
    half = transfer(normed.replace({"scaling.alpha": 0.5}), width=32, depth=8)
    assert not any("output norms" in name for name in [*about(half), *about(transfer(tiny, width=64, depth=8))])


def test_beyond_the_critical_batch(tiny: Recipe) -> None:
    """Kaplan 2e8 L^-4.76, Power Lines 2048 x 0.0471 D^0.462, Zhang 512 x 22.91 (D/1e6)^0.47: the middle one."""
    big = transfer(tiny, batch_tokens=32_768, tokens=65_536)
    value, limit = about(big)["critical batch"]
    assert value == 32_768
    power_lines = 2048 * 0.0471 * 65_536**0.462
    zhang = 512 * 22.91 * (65_536 / 1e6) ** 0.47
    loss = 1.69 + 406.4 / big.model.params**0.34 + 410.7 / 65_536**0.28
    kaplan = 2e8 * loss ** (-1 / 0.21)
    assert limit == pytest.approx(sorted((power_lines, zhang, kaplan))[1])


def test_far_from_the_tokens_per_parameter_of_the_base(tiny: Recipe) -> None:
    value, limit = about(transfer(tiny, tokens=51_200))["tokens per parameter"]
    assert value == pytest.approx(51_200 / tiny.model.params)
    assert limit == pytest.approx(4 * 10_240 / tiny.model.params)
    told = warnings(transfer(tiny, tokens=51_200))[0]
    assert "multiply weight decay by 2.3" in told.message  # 5^0.527


def test_an_eps_near_the_size_of_the_gradient(tiny: Recipe) -> None:
    assert "eps" not in about(tiny.replace({"hyperparameters.eps": 1e-4}))
    large = tiny.replace({"hyperparameters.eps": 2e-3})
    value, limit = about(large)["eps"]
    assert value == pytest.approx(2e-3 * tiny.model.params**0.5)  # a norm of 1 over all parameters
    assert limit == 0.1


def test_betas_out_of_range(tiny: Recipe) -> None:
    found = about(transfer(tiny, tokens=10_240 * 16))
    assert found["beta1"] == (pytest.approx(0.9 ** (1 / 16)), 0.99)
    assert "beta2" not in found
    assert about(transfer(tiny, batch_tokens=2_048))["beta1"] == (pytest.approx(0.9**8), 0.5)
    assert about(transfer(tiny, batch_tokens=2_048))["beta2"] == (pytest.approx(0.95**8), 0.9)


def standard(tiny: Recipe, d: int, **more: object) -> Recipe:
    """Without a base, at a width."""
    shape = {"d_model": d, "d_head": 16, "n_heads": d // 16, "n_kv_heads": d // 16, "d_ff": 4 * d}
    model = {f"model.{key}": value for key, value in shape.items()}
    return tiny.replace(model | {"scaling.rule": "standard"} | more)


def test_an_init_as_large_as_that_of_the_104b_run_that_failed(tiny: Recipe) -> None:
    at = {"hyperparameters.init_std": 0.02}
    value, limit = about(standard(tiny, 11_600, **at))["init"]
    assert value == 0.02
    assert value / limit * 3 == pytest.approx(0.02 / (1 / 34_800) ** 0.5)  # sqrt(1 / (3 x 11,600))
    told = next(warning for warning in warnings(standard(tiny, 11_600, **at)) if warning.about == "init")
    assert "is 3.7 x sqrt(1 / (3 d)) = 0.00536" in told.message
    assert "init" not in about(standard(tiny, 5_120, **at))  # OLMo 2 13B
    assert "init" not in about(standard(tiny, 11_600, **{"hyperparameters.init_std": 0.006}))
    named = {"hyperparameters.init": "gpt2", "hyperparameters.init_std": None}
    assert about(standard(tiny, 14_336, **named))["init"][0] == 0.02
    assert "init" not in about(standard(tiny, 14_336, **named | {"hyperparameters.init": "mt-nlg"}))


def test_large_initial_logits(tiny: Recipe) -> None:
    """0.144 at width 256: the final norm gives an RMS of 1, and each logit sums 256 products."""
    base = standard(tiny, 256, **{"hyperparameters.init_std": 0.02})
    large = base.replace({"hyperparameters.modules": {"unembedding": {"init_std": 7.2}}})
    value, limit = about(large)["init of the logits"]
    assert value == pytest.approx(0.144 * 16)  # 2.3
    assert limit == 1.5
    assert "init" not in about(large)  # no block starts large
    told = next(warning.message for warning in warnings(large) if warning.about == "init of the logits")
    assert "RMS 2.3, so the first loss is 2.7 above ln(vocab_size)" in told
    tied = base.replace({"model.tied_embeddings": True, "hyperparameters.modules": {"embedding": {"init_std": 7.2}}})
    assert about(tied)["init of the logits"][0] == pytest.approx(0.144 * 16)
    for width, std in ((5_120, 0.02), (12_288, 0.006), (256, 1 / 16)):  # OLMo 2 13B, GPT-3 175B, OpenELM's
        assert "init of the logits" not in about(standard(tiny, width, **{"hyperparameters.init_std": std}))
    assert "init of the logits" in about(standard(tiny, 11_600, **{"hyperparameters.init_std": 0.02}))
    # A rule that divides the logits by the width keeps them at the size they have at the base.
    small = base.replace({"scaling.rule": "completep", "scaling.base": None, "hyperparameters.init_std": 0.08})
    assert "init of the logits" not in about(transfer(small, width=4_096))


def test_adam_with_l2_decay_under_a_rule_for_adamw(tiny: Recipe) -> None:
    adam = tiny.replace({"hyperparameters.optimizer": "adam"})
    assert "optimizer" not in about(adam)
    assert about(transfer(adam, width=32))["optimizer"] == (2.0, 1.0)  # decay x m_N, for AdamW
    assert "optimizer" not in about(transfer(tiny, width=32))
    assert "optimizer" not in about(transfer(adam.replace({"scaling.rule": "standard"}), width=32))
    assert "optimizer" not in about(transfer(adam.replace({"hyperparameters.weight_decay": 0.0}), width=32))


def test_sizes_that_no_rule_scales_with(tiny: Recipe) -> None:
    longer = tiny.replace({"model.seq_len": 64})
    known: dict[str, int | None] = {"vocab_size": 320, "seq_len": 32}
    assert unlike(known, tiny) == []
    assert unlike({"vocab_size": None, "seq_len": None}, longer) == []
    (one,) = unlike(known, longer)
    assert (one.about, one.value, one.limit) == ("seq_len", 64, 32)
    (one,) = unlike(known, tiny.replace({"model.vocab_size": 640}))
    assert (one.about, one.value, one.limit) == ("vocab_size", 640, 320)
    assert "a vocabulary of 320, and this one has 640" in one.message


def test_a_schedule_with_another_mean_lr(tiny: Recipe) -> None:
    tuned = tiny.replace({"schedule": {"decay": "wsd", "min_lr_ratio": 0.0, "decay_ratio": 0.2}})
    (one,) = unlike_training(tuned, tiny.replace({"schedule": {"decay": "linear", "min_lr_ratio": 0.0}}))
    # Shares of the peak: a triangle, and 1 until the cooldown, whose 1 - sqrt(p) has the mean 1/3.
    assert (one.about, one.value, one.limit) == (
        "schedule",
        pytest.approx(0.5),
        pytest.approx(0.8 + 0.2 / 3, abs=0.01),
    )
    assert "(wsd) whose mean lr is 87% of the peak, and with the schedule here (linear) it is 50%" in one.message
    assert unlike_training(tuned, tuned.replace({"data.tokens": 10 * tuned.data.tokens})) == []
    (one,) = unlike_training(tuned, tuned.replace({"data.documents": "isolated"}))
    assert one.message.startswith("the values are from packed documents, and this run has isolated ones")
    (one,) = unlike_training(tuned, tuned.replace({"model.dropout": 0.1}))
    assert one.message.startswith("the values are from a dropout of 0, and this run has 0.1")
    weights = tuned.replace({"start.weights": "model"})
    (one,), (other,) = unlike_training(tuned, weights), unlike_training(weights, tuned)
    assert one.message.startswith("the values are from a run from random weights, and this run starts from [start]")
    assert other.message.startswith("the values are from a run from [start] weights, and this run starts from random")


def test_start_weights_that_a_transfer_leaves_out_are_named(tiny: Recipe) -> None:
    weights = tiny.replace({"start.weights": "model"})
    (one,) = dropped(weights, transfer(weights, width=32))
    assert one.message.startswith("[start] weights are left out, because the new model has another shape")
    assert dropped(weights, transfer(weights, tokens=81_920)) == []


def test_values_of_a_target_that_no_study_searched_are_named(tiny: Recipe) -> None:
    tuned = tiny.replace({"hyperparameters.lr": 0.02, "why": {"hyperparameters.lr": "study tiny, trial 3"}})
    target = tiny.replace({"hyperparameters.lr": 0.5, "scaling.base": tiny.base.model_dump()})
    assert replaced(target, tuned, transfer_like(tuned, target)) == []
    changes = {"grad_clip": 0.3, "z_loss": 1e-4, "optimizer": "muon", "depth": {"lr": [1.0, 2.0]}}
    own = target.replace({f"hyperparameters.{key}": value for key, value in changes.items()})
    (one,) = replaced(own, tuned, transfer_like(tuned, own.replace({"scaling.token_exponent": 0.3})))
    assert "hyperparameters.optimizer muon by adamw" in one.message
    assert "hyperparameters.depth.lr [1, 2] by none" in one.message
    (one,) = replaced(own := target.replace({"scaling.token_exponent": 0.3}), tuned, transfer_like(tuned, own))
    assert "of the study's recipe: scaling.token_exponent 0.3 by 0.5; to train" in one.message
    (one,) = replaced(own := target.replace({"hyperparameters.grad_clip": 0.3}), tuned, transfer_like(tuned, own))
    assert "recipe: hyperparameters.grad_clip 0.3 by 1; to train" in one.message


@pytest.mark.parametrize("which", [*SETS, "hyperparameters.depth.lr[0]"])
def test_values_that_a_study_searched_do_not_count_as_replaced(tiny: Recipe, which: str) -> None:
    around = space(tiny, which)
    point = {path: 0.5 for path in around.paths if path not in CHOICES}
    tuned = around.recipe_at(point).replace(
        {"why": dict.fromkeys(around.paths, "study tiny, trial 3; as at the start")}
    )
    target = tiny.replace({"scaling.base": tiny.base.model_dump()})
    assert replaced(target, tuned, transfer_like(tuned, target)) == []


def test_values_of_a_target_that_a_study_cannot_have_searched_are_named(tiny: Recipe) -> None:
    """A search moves only the limit of clipping, and never chooses or leaves Muon."""
    why = {f"hyperparameters.{name}": "study tiny, trial 3" for name in ("grad_clip", "optimizer")}
    tuned = tiny.replace({"why": why, "scaling.base": tiny.base.model_dump()})
    muon = {"hyperparameters.optimizer": "muon", "hyperparameters.muon": {"lr": 0.03}}
    for changes, named in (
        ({"hyperparameters.grad_clip": {"mode": "per-module", "limit": 0.3}}, "grad_clip.mode per-module by global"),
        (muon, "hyperparameters.optimizer muon by adamw"),
        ({"hyperparameters.grad_clip": 0.3, "hyperparameters.optimizer": "adam"}, None),
    ):
        target = tiny.replace(changes)
        found = [each.message for each in replaced(target, tuned, transfer_like(tuned, target))]
        assert (named in found[0]) if named else found == []
