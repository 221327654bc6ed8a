"""Published runs and recipes in the same terms."""

from typing import Any

import pytest

from leaven.catalogue.runs import find_run
from leaven.catalogue.terms import diff_in_terms, terms, without_counterpart
from leaven.recipe.recipe import Recipe


@pytest.fixture
def recipe() -> Recipe:
    """BLOOM 176B as a recipe of leaven."""
    model = {"n_layers": 70, "d_model": 14336, "n_heads": 112, "n_kv_heads": 112, "d_head": 128, "d_ff": 57344}
    model |= {"vocab_size": 250_880, "seq_len": 2048, "norm": "layernorm", "activation": "gelu", "positions": "alibi"}
    model |= {"tied_embeddings": True, "embedding_norm": True, "bias": True, "dropout": 0.1}
    ramp = {"start_tokens": 393_216, "increment_tokens": 32_768, "over_tokens": 20_000_000_000}
    return Recipe.model_validate(
        {
            "name": "bloom",
            "model": model,
            "data": {"source": "text", "tokens": 366_000_000_000},
            "batch": {"tokens": 4_194_304, "ramp": ramp, "micro_batch": 2},
            "schedule": {"warmup_tokens": 374_999_040, "decay": "cosine", "min_lr_ratio": 0.1},
            "hyperparameters": {"lr": 6e-5, "init_std": 0.0048},
            "precision": {"compute": "bf16"},
            "layout": {"dp": 8, "tp": 4, "pp": 12, "zero": 1},
        }
    )


def test_a_recipe_that_copies_a_run_has_no_difference(recipe: Recipe) -> None:
    found = diff_in_terms(find_run("bloom-176b"), recipe)
    # Values that the run does not publish, and values that a recipe cannot express.
    assert {row.path for row in found if row.counterpart} == {"hyperparameters.decay_norm_and_bias"}
    assert {row.path for row in found if not row.counterpart} == {
        "data.tokens_planned",
        "schedule.decay_samples",
        "schedule.decay_tokens",
        "init.kind",
        "init.residual_scaling",
        "precision.grad_accumulation",
    }


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("data.documents", "isolated"),
        ("data.seed", 3),
        ("data.tokenizer", "x.json"),
        ("batch.ramp.rule", "scaled"),
        ("batch.ramp.increment_tokens", 16_384),
        ("stability.on_spike", "stop"),
        ("evaluation.tokens", 5),
        ("hyperparameters.modules.embedding.lr", 4.0),
    ],
)
def test_every_value_that_can_change_a_loss_is_a_difference_of_two_recipes(
    path: str, value: Any, recipe: Recipe
) -> None:
    (row,) = diff_in_terms(recipe, recipe.replace({path: value}))
    assert row.path == path
    assert not diff_in_terms(recipe, recipe.replace({"layout.pp": 6, "name": "other"}))[1:]  # of pp alone


def test_another_kind_of_clipping_is_not_shown_as_none(recipe: Recipe) -> None:
    running = recipe.replace({"hyperparameters.grad_clip": {"mode": "running", "limit": 0.5}})
    found = {row.path: row.b for row in diff_in_terms(recipe, running)}
    assert found["hyperparameters.grad_clip.mode"] == "running"
    assert found["hyperparameters.grad_clip.limit"] == 0.5


def test_values_without_a_counterpart_are_listed_separately(recipe: Recipe) -> None:
    of_run = {row.path for row in diff_in_terms(find_run("deepseek-v3"), recipe) if not row.counterpart}
    assert "arch.kv_lora_rank" in of_run
    assert not {"arch.norm_placement", "arch.gated", "schedule.shape_note"} & of_run  # as in a recipe; free text
    tuned = recipe.replace({"hyperparameters.modules": {"embedding": {"lr": 4.0}}})
    alone: dict[str, Any] = dict(without_counterpart(tuned))
    assert alone == {"hyperparameters.modules.embedding.lr": 4.0}


def test_experts_are_compared(recipe: Recipe) -> None:
    experts = {"number": 64, "active": 4, "d_expert": 1024}
    sparse = recipe.replace({"model.experts": experts, "model.bias": False})
    found = {row.path: (row.a, row.b) for row in diff_in_terms(find_run("olmoe-1b-7b"), sparse)}
    assert found["model.experts.active"] == (8, 4)
    assert found["model.experts.router_z_loss"] == (0.001, 0.0)
    equal = {"model.experts.number", "model.experts.balance_loss", "optim.moe_load_balance_loss"}
    assert not equal & found.keys()
    by_bias = sparse.replace({"model.experts.balance": "bias"})
    assert "model.experts.balance_loss" not in terms(by_bias)  # not used
    assert terms(by_bias)["model.experts.bias_step"] == 0.001


def test_adam_with_a_decay_is_l2_in_a_recipe(recipe: Recipe) -> None:
    """leaven's adam adds the decay to the gradient; in papers adam may mean AdamW."""
    adam = recipe.replace({"hyperparameters.optimizer": "adam"})
    assert terms(adam)["hyperparameters.optimizer"] == "adam, L2 decay"
    assert terms(adam.replace({"hyperparameters.weight_decay": 0.0}))["hyperparameters.optimizer"] == "adam"
