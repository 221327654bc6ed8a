"""A stack of trials honours or refuses every setting of a recipe that changes what a trial trains."""

from collections.abc import Iterator
from typing import Any, get_args

import numpy as np
import pytest

from leaven.recipe.base import Part
from leaven.recipe.recipe import Recipe
from leaven.training.stack import SETTINGS, refusal, train_stack
from leaven.training.trial import train_trial

HYPER = "hyperparameters."
# For each setting that a stack honours: another value, and the other settings that this value needs.
HONOURED: dict[str, dict[str, Any]] = {
    "model.n_layers": {"model.n_layers": 1},
    "model.d_model": {"model.d_model": 24, "model.d_attention": 16},
    "model.d_attention": {"model.d_attention": 32, "model.n_heads": 4},
    "model.n_heads": {"model.n_heads": 4, "model.d_head": 4},
    "model.n_kv_heads": {"model.n_kv_heads": 2},
    "model.d_head": {"model.d_head": 16, "model.n_heads": 1},
    "model.d_ff": {"model.d_ff": 40},
    "model.vocab_size": {"model.vocab_size": 300},
    "model.seq_len": {"model.seq_len": 64},
    "model.rope_theta": {"model.rope_theta": 100.0},
    "model.norm_eps": {"model.norm_eps": 0.1},
    "model.qk_norm": {"model.qk_norm": False},
    "model.tied_embeddings": {"model.tied_embeddings": True},
    "data.tokens": {"data.tokens": 3_000},
    "data.seed": {"data.seed": 7},
    "batch.tokens": {"batch.tokens": 96},
    "schedule.warmup_tokens": {"schedule.warmup_tokens": 0},
    "schedule.decay": {"schedule.decay": "inverse_sqrt"},
    "schedule.min_lr_ratio": {"schedule.min_lr_ratio": 0.0},
    "schedule.decay_ratio": {"schedule.decay": "wsd", "schedule.decay_ratio": 0.7},
    f"{HYPER}lr": {f"{HYPER}lr": 0.03},
    f"{HYPER}init": {f"{HYPER}init": "depth-scaled", f"{HYPER}init_std": None},
    f"{HYPER}init_std": {f"{HYPER}init_std": 0.3},
    f"{HYPER}weight_decay": {f"{HYPER}weight_decay": 5.0},
    f"{HYPER}decay_norm_and_bias": {f"{HYPER}decay_norm_and_bias": True, f"{HYPER}weight_decay": 5.0},
    f"{HYPER}beta1": {f"{HYPER}beta1": 0.0},
    f"{HYPER}beta2": {f"{HYPER}beta2": 0.999999},
    f"{HYPER}eps": {f"{HYPER}eps": 1e-3},
    f"{HYPER}residual": {f"{HYPER}residual": 0.3},
    f"{HYPER}grad_clip.limit": {f"{HYPER}grad_clip": 0.1},
    f"{HYPER}modules": {
        f"{HYPER}modules": {
            "embedding": {"lr": 3.0, "init_std": 0.5, "weight_decay": 4.0, "beta1": 2.0, "beta2": 0.5, "eps": 9.0},
            "norm.key": {"lr": 4.0, "beta1": 0.5},
            "norm.final": {"lr": 4.0},
            "mlp.out": {"residual": 2.0, "init_std": 0.0},
            "unembedding": {"lr": 0.2, "init_std": 3.0},
        }
    },
    **{
        f"{HYPER}depth.{quantity}": {f"{HYPER}depth": {quantity: [0.3, 1.5, 3.0]}}
        for quantity in ("lr", "init_std", "weight_decay", "beta1", "beta2", "residual")
    },
    f"{HYPER}depth.eps": {f"{HYPER}depth": {"eps": [3e4, 1e3, 1e5]}},
    "precision.compute": {"precision.compute": "bf16"},
    "evaluation.tokens": {"evaluation.tokens": 1_100},
}
_BASE = {"width": 8, "depth": 1, "batch_tokens": 128, "tokens": 8_000, "d_head": 4}
HONOURED |= {
    f"scaling.base.{key}": {"scaling.base": {**_BASE, key: value}}
    for key, value in {**_BASE, "depth": 4, "d_ff": 20, "n_kv_heads": 1}.items()
}
HONOURED |= {
    f"scaling.{key}": {"scaling.base": {**_BASE, "depth": 4}, f"scaling.{key}": value}
    for key, value in {"rule": "mup", "alpha": 0.5, "token_exponent": 0.1}.items()
}
HONOURED["scaling.scale_decay_with_depth"] = {**HONOURED["scaling.alpha"], "scaling.scale_decay_with_depth": True}
# A value of each setting that a stack refuses.
REFUSED: dict[str, dict[str, Any]] = {
    "model.norm": {"model.norm": "layernorm"},
    "model.activation": {"model.activation": "gelu"},
    "model.positions": {"model.positions": "alibi"},
    "model.qk_norm_per_head": {"model.qk_norm_per_head": True},
    "model.embedding_norm": {"model.embedding_norm": True},
    "model.bias": {"model.bias": True},
    "model.dropout": {"model.dropout": 0.1},
    "model.norm_placement": {"model.norm_placement": "output"},
    "model.parallel_branches": {"model.parallel_branches": True},
    "model.qk_norm_whole": {"model.qk_norm_whole": True},
    "model.rotary_fraction": {"model.rotary_fraction": 0.5},
    "model.attention_bias": {"model.attention_bias": "qkv"},
    "model.attention_softcap": {"model.attention_softcap": 30.0},
    "model.logit_softcap": {"model.logit_softcap": 30.0},
    "model.window": {"model.window": 8},
    "model.global_every": {"model.window": 8, "model.global_every": 2},
    "model.experts": {"model.experts": {"number": 4, "active": 2, "d_expert": 16}},
    f"{HYPER}optimizer": {f"{HYPER}optimizer": "adam"},
    f"{HYPER}grad_clip.mode": {f"{HYPER}grad_clip": {"mode": "running"}},
    f"{HYPER}z_loss": {f"{HYPER}z_loss": 1e-4},
    f"{HYPER}muon": {f"{HYPER}optimizer": "muon"},
    "batch.ramp": {"batch.ramp": {"start_tokens": 64, "increment_tokens": 64, "over_tokens": 512}},
    "batch.stages": {"batch.stages": [{"from_tokens": 0, "tokens": 256}]},
    "batch.stages_rule": {
        "batch.stages": [{"from_tokens": 0, "tokens": 128}, {"from_tokens": 256, "tokens": 256}],
        "batch.stages_rule": "scaled",
    },
    "data.documents": {"data.documents": "isolated", "data.end_of_text": 0},
    "start.weights": {"start.weights": "somewhere"},
    "stability.on_spike": {"stability.on_spike": "off"},
    "precision.compute": {"precision.compute": "fp16"},
}
# Settings that do not change what a trial trains, or change only its tokens, which a stack reads as any trial does.
ELSEWHERE = {
    *("name", "why", "tuning", "average"),
    *(f"data.{key}" for key in ("source", "tokenizer", "end_of_text", "corrupt_share")),
    *("batch.micro_batch", "layout", "evaluation.every_tokens", "scaling.token_exponent_interval"),
    *(f"stability.{key}" for key in ("max_rollbacks", "rollback_lr", "rollback_lr_tokens", "keep")),
    *(f"stability.{key}" for key in ("checkpoint_every_tokens", "keep_every_tokens", "noise_scale_every_tokens")),
}
PARTS = ("model", "data", "start", "batch", "schedule", "hyperparameters", "scaling", "precision", "stability")


def settings() -> Iterator[str]:
    """Yield the paths of all settings of a recipe."""
    opened = {*PARTS, "evaluation", f"{HYPER}grad_clip", f"{HYPER}depth", "scaling.base"}

    def of(part: type[Part], prefix: str) -> Iterator[str]:
        for name, field in part.model_fields.items():
            path = prefix + name
            if path in opened:
                kinds = (field.annotation, *get_args(field.annotation))
                kind = next(kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Part))
                yield from of(kind, f"{path}.")
            else:
                yield path

    yield from of(Recipe, "")


def test_every_setting_is_honoured_or_refused_or_no_part_of_a_trial() -> None:
    assert set(settings()) == {*HONOURED, *REFUSED, *ELSEWHERE}
    assert not {*HONOURED, *REFUSED} & ELSEWHERE


@pytest.fixture
def short(tiny: Recipe) -> Recipe:
    return tiny.replace({"data.tokens": 1_280, "schedule.warmup_tokens": 512})


@pytest.fixture(scope="module")
def losses_before() -> list[float]:
    return []


@pytest.fixture
def before(short: Recipe, losses_before: list[float]) -> float:
    """The loss without another value, trained once."""
    if not losses_before:
        losses_before.append(train_trial(short).loss)
    return losses_before[0]


@pytest.mark.parametrize("path", REFUSED)
def test_a_stack_refuses(short: Recipe, path: str) -> None:
    assert refusal(short) is None
    said = refusal(short.replace(REFUSED[path])) or ""
    assert said.partition(" = ")[0] in SETTINGS
    if path in SETTINGS:
        assert said.startswith(next(iter(REFUSED[path])))


def test_no_refusal_is_untested() -> None:
    assert set(SETTINGS) - {"start.folder"} <= set(REFUSED)


@pytest.mark.long
@pytest.mark.parametrize("path", HONOURED)
def test_a_stack_honours(short: Recipe, before: float, path: str) -> None:
    recipe = short.replace(HONOURED[path])
    assert refusal(recipe) is None
    stacked, alone = train_stack([recipe], 2)[0], train_trial(recipe)
    assert alone.loss != before
    low = recipe.precision.compute == "bf16"
    assert stacked.loss == pytest.approx(alone.loss, abs=2e-3 if low else 1e-5)
    losses = np.array([[loss for _, loss in outcome.curve] for outcome in (stacked, alone)])
    assert losses[0] == pytest.approx(losses[1], abs=5e-3 if low else 3e-5)


def test_a_beta_next_to_1(short: Recipe) -> None:
    recipe = short.replace({f"{HYPER}beta2": 1 - 1e-9, f"{HYPER}beta1": 1 - 1e-9})
    assert train_stack([recipe], 1)[0].loss == pytest.approx(train_trial(recipe).loss, abs=1e-4)
