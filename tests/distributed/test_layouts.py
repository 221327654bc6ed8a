"""Losses, norms and parameters are those of one process, with every layout."""

from typing import Any

import numpy as np
import pytest
from tests.distributed.cases import assembled, train
from tests.distributed.conftest import SingleProcess
from tests.distributed.pool import Pool

from leaven.data.tokens import prepare
from leaven.recipe.recipe import Recipe

# Batches of 4, 6 and 8 sequences, which neither 3 ranks nor micro-batches of 3 divide evenly. Some modules have
# their own values, and clipping acts in every step.
COMMON: dict[str, Any] = {
    "model.n_layers": 2,
    "model.n_heads": 4,
    "model.n_kv_heads": 2,
    "model.d_head": 4,
    "model.seq_len": 16,
    "batch.tokens": 128,
    "batch.micro_batch": 3,
    "batch.ramp": {"start_tokens": 64, "increment_tokens": 32, "over_tokens": 128},
    "schedule.warmup_tokens": 64,
    "hyperparameters.grad_clip": 0.5,
    "hyperparameters.weight_decay": 0.1,
    "hyperparameters.modules": {"embedding": {"lr": 2.0}, "attention.query": {"lr": 0.5, "beta2": 2.0}},
    "hyperparameters.depth": {"lr": [1.0, 0.5]},
    "evaluation.tokens": 160,
}
TIED = {"model.tied_embeddings": True}
GPT = TIED | {
    "model.norm": "layernorm",
    "model.activation": "gelu",
    "model.positions": "learned",
    "model.bias": True,
    "model.qk_norm": False,
    "model.n_kv_heads": 4,
}
BLOOM = GPT | {"model.positions": "alibi", "model.embedding_norm": True}
SANDWICH = {
    "model.norm_placement": "sandwich",
    "model.attention_softcap": 1.0,
    "model.logit_softcap": 2.0,
    "model.window": 5,
    "model.global_every": 2,
}
# Key biases have gradients of nearly 0, which Adam would amplify with a smaller eps.
PARALLEL = {
    "model.parallel_branches": True,
    "model.attention_bias": "qkv",
    "model.rotary_fraction": 0.5,
    "hyperparameters.eps": 1e-5,
}
OLMO = {"model.norm_placement": "output", "model.qk_norm_whole": True}
PER_MODULE = {"hyperparameters.grad_clip": {"mode": "per-module", "limit": 0.1}}
RUNNING = {"hyperparameters.grad_clip": {"mode": "running", "limit": 0.9}}
AVERAGE = {"average": {"half_life_tokens": 100}}
Z_LOSS = {"hyperparameters.z_loss": 0.1}
ISOLATED = {"data.documents": "isolated"}
FULL = {"layout.recompute": "full"}
LARGER = {"batch.tokens": 256, "batch.ramp": {"start_tokens": 128, "increment_tokens": 64, "over_tokens": 256}}
SCALED = {"batch.ramp.rule": "scaled"}
FOUR_LAYERS = {"model.n_layers": 4}
MUON = {
    "hyperparameters.optimizer": "muon",
    "hyperparameters.muon": {"lr": 0.02, "match": "spectral"},
    "hyperparameters.modules": {"attention.query": {"lr": 0.5}},
}
EXPERTS: dict[str, Any] = {
    "model.n_kv_heads": 4,
    "model.experts": {
        "number": 4,
        "active": 2,
        "d_expert": 8,
        "shared": 1,
        "dense_layers": 1,
        "balance_loss": 0.1,
        "router_z_loss": 0.01,
    },
    "model.n_layers": 3,
    "hyperparameters.depth": {},
}
# Six experts are three for each of two expert-parallel ranks, which two ZeRO ranks cannot share evenly.
SIX_EXPERTS = EXPERTS | {"model.experts": EXPERTS["model.experts"] | {"number": 6}}
BIASED = EXPERTS | {
    "model.experts": {
        "number": 4,
        "active": 2,
        "d_expert": 8,
        "router": "sigmoid",
        "balance": "bias",
        "bias_step": 0.05,
    },
}
ONE = {"batch.micro_batch": 1}  # as many micro-batches as a pipeline of two needs


INTERLEAVED: dict[str, Any] = {"schedule": "interleaved", "stages_per_rank": 2}
ZERO_BUBBLE: dict[str, Any] = {"schedule": "zero-bubble", "stages_per_rank": 2}


def layout(dp: int = 1, tp: int = 1, pp: int = 1, zero: int = 0, **more: Any) -> dict[str, Any]:
    values = {"dp": dp, "tp": tp, "pp": pp, "zero": zero} | more
    return {f"layout.{key}": value for key, value in values.items()}


def same(found: dict[str, float]) -> None:
    # Parameters amplify: Adam divides gradients that are nearly 0 by their own size.
    assert max(found["loss"], found["validation"], found["norm"]) < 1e-12, found
    assert found["parameter"] < 1e-10, found


def differences(
    ranks: Pool,
    single_process: SingleProcess,
    recipe: Recipe,
    changes: dict[str, Any],
    steps: int = 2,  # and one more after the validation: batches of 4, 6 and 8 sequences
    dtype: str = "float64",
) -> dict[str, float]:
    """Return the largest differences from one process: losses and validation (nats), norms (relative), parameters."""
    plain = {key: value for key, value in changes.items() if not key.startswith("layout.")}
    one = single_process(recipe.replace(COMMON | plain), steps, dtype)
    laid_out = recipe.replace(COMMON | changes)
    tokens = prepare(laid_out.data, laid_out.model.vocab_size)
    many = ranks(laid_out.layout.ranks, train, laid_out, tokens, steps, dtype)
    for rank in many[1:]:  # the same bits on all ranks, because decisions depend on them
        assert all(
            rank[key] == many[0][key]
            for key in ("losses", "z_losses", "loads", "grad_norms", "update_norms", "modules")
        )
        assert rank["validation"] == many[0]["validation"]
        assert rank["averaged"] == many[0]["averaged"]
    first, expected = many[0], assembled([one])
    found = assembled(many)
    assert found.keys() == expected.keys()
    norms = [(first[key], one[key]) for key in ("grad_norms", "update_norms")]
    return {
        "loss": max(
            float(np.abs(np.subtract(first[key], one[key])).max()) for key in ("losses", "z_losses", "loads")
        ),
        "validation": max(abs(first[key] - one[key]) for key in ("validation", "averaged")),
        "norm": max(float(np.abs(np.divide(mine, theirs) - 1).max()) for mine, theirs in norms),
        "parameter": max(float(np.abs(found[name] - expected[name]).max()) for name in found),
    }


CASES = {
    "dp2 zero2": layout(dp=2, zero=2) | RUNNING | SCALED | AVERAGE,
    "dp2 zero3": layout(dp=2, zero=3) | GPT | AVERAGE,
    "dp3 zero1": layout(dp=3, zero=1) | ISOLATED | Z_LOSS,
    "dp4 zero3 on two nodes": layout(dp=4, zero=3, dp_replicate=2) | ONE,
    "tp2 bloom": layout(tp=2) | BLOOM | FULL | AVERAGE,
    "tp2 sandwich": layout(tp=2) | SANDWICH | {"model.qk_norm_per_head": True} | ISOLATED,
    "tp2 parallel": layout(tp=2) | PARALLEL | {"model.norm_placement": "output"},
    "dp2 zero3 olmo": layout(dp=2, zero=3) | OLMO,
    "pp2": layout(pp=2) | Z_LOSS,
    "pp2 interleaved": layout(pp=2, **INTERLEAVED) | TIED | FOUR_LAYERS,
    "pp2 zero-bubble": layout(pp=2, **ZERO_BUBBLE) | FOUR_LAYERS,
    "dp2 pp2 zero2 gpipe": layout(dp=2, pp=2, zero=2, schedule="gpipe") | ONE | Z_LOSS | PER_MODULE,
    "dp2 pp2 zero3 interleaved": layout(dp=2, pp=2, zero=3, **INTERLEAVED) | TIED | ONE | FOUR_LAYERS | AVERAGE,
    "dp2 tp2 zero1": layout(dp=2, tp=2, zero=1) | TIED | PER_MODULE | Z_LOSS,
    "dp2 tp2 pp2 zero1": layout(dp=2, tp=2, pp=2, zero=1) | TIED | PER_MODULE | ONE | Z_LOSS,
    "dp2 tp2 pp2 zero1 sandwich": layout(dp=2, tp=2, pp=2, zero=1) | SANDWICH | TIED | ONE,
    "tp4": layout(tp=4) | GPT,
    "pp4": layout(pp=4) | TIED | ISOLATED | ONE | FOUR_LAYERS,
    "dp2 pp2 zero1 zero-bubble": layout(dp=2, pp=2, zero=1, **ZERO_BUBBLE) | ONE | FOUR_LAYERS,
    "dp4 pp2 zero3 on two nodes": layout(dp=4, pp=2, zero=3, dp_replicate=2) | ONE | LARGER,
    "muon dp2": layout(dp=2) | MUON | SCALED,
    "muon dp3 zero1": layout(dp=3, zero=1) | MUON | ISOLATED,
    "muon tp2": layout(tp=2) | GPT | MUON,
    "muon dp4 zero3 on two nodes": layout(dp=4, zero=3, dp_replicate=2) | ONE | MUON,
    "muon dp2 tp2 pp2 zero2": layout(dp=2, tp=2, pp=2, zero=2) | TIED | PER_MODULE | ONE | MUON,
    "muon dp2 pp2 zero3 interleaved": layout(dp=2, pp=2, zero=3, **INTERLEAVED) | ONE | FOUR_LAYERS | MUON,
    "experts dp2": layout(dp=2) | EXPERTS | AVERAGE,
    "experts dp3 zero3": layout(dp=3, zero=3) | BIASED | ISOLATED,
    "experts tp2": layout(tp=2) | EXPERTS | FULL | {"model.parallel_branches": True},
    "experts pp2 interleaved": layout(pp=2, **INTERLEAVED) | BIASED | FOUR_LAYERS | ONE,
    "experts dp2 pp2": layout(dp=2, pp=2) | EXPERTS | ONE,
    "experts dp2 ep2": layout(dp=2, ep=2) | EXPERTS | AVERAGE,
    "experts dp2 ep2 zero2": layout(dp=2, ep=2, zero=2) | BIASED | FULL,
    "experts dp4 ep2 zero3": layout(dp=4, ep=2, zero=3) | SIX_EXPERTS | AVERAGE,
    "experts dp4 ep4 zero3 on two nodes": layout(dp=4, ep=4, zero=3, dp_replicate=2) | BIASED | ONE,
    "experts dp2 ep2 tp2 zero1": layout(dp=2, ep=2, tp=2, zero=1) | EXPERTS | PER_MODULE,
    "experts dp2 ep2 tp2 pp2 zero2": layout(dp=2, ep=2, tp=2, pp=2, zero=2) | BIASED | ONE,
    "experts muon dp2 ep2 zero2": layout(dp=2, ep=2, zero=2) | EXPERTS | MUON,
    "experts muon dp2 tp2 zero3": layout(dp=2, tp=2, zero=3) | EXPERTS | MUON | ONE,
}
SLOW = {"tp4", "pp4", "dp2 pp2 zero1 zero-bubble", "dp4 pp2 zero3 on two nodes"}
SLOW |= {"experts dp4 ep4 zero3 on two nodes", "experts dp2 ep2 zero2", "experts muon dp2 tp2 zero3"}
SLOW |= {"muon dp2", "muon dp4 zero3 on two nodes", "muon dp2 pp2 zero3 interleaved"}
SLOW |= {"pp2", "pp2 interleaved", "experts dp2", "experts dp2 ep2 tp2 zero1"}
SLOW |= {"muon dp2 tp2 pp2 zero2", "dp2 tp2 pp2 zero1 sandwich", "experts dp2 pp2"}
SLOW |= {"experts dp2 ep2", "dp2 tp2 pp2 zero1"}
SLOW |= {"experts dp2 ep2 tp2 pp2 zero2"}  # of which test_resharding.py has the losses
"""Cases for `make test-slow`: larger numbers of ranks, and products of features that the other cases have."""


def steps_before_validation(name: str) -> int:
    """A step with tensor or pipeline parallelism takes long. Quick cases have batches of 4 and 6 sequences only."""
    slow_steps = CASES[name]["layout.tp"] * CASES[name]["layout.pp"] > 1
    return 1 if slow_steps and name not in SLOW else 2


@pytest.mark.long
@pytest.mark.parametrize(
    ("changes", "steps"),
    [
        pytest.param(CASES[name], steps_before_validation(name), id=name, marks=[pytest.mark.slow] * (name in SLOW))
        for name in CASES
    ],
)
def test_losses_norms_and_parameters_are_those_of_one_process(
    changes: dict[str, Any], steps: int, ranks: Pool, single_process: SingleProcess, tiny: Recipe
) -> None:
    found = differences(ranks, single_process, tiny, changes, steps)
    same(found)


SHARED = layout(dp=2, tp=2, zero=2) | ONE
STAGES = layout(dp=2, pp=2, zero=2) | ONE


# Tensor-parallel ranks round partial sums to the compute dtype.
@pytest.mark.long
@pytest.mark.parametrize(
    ("compute", "limit", "laid_out"),
    [
        ("bf16", 2e-2, layout(tp=2)),
        ("fp16", 2e-2, STAGES),
        pytest.param("bf16", 2e-2, SHARED | MUON, marks=pytest.mark.slow),
    ],
    ids=["bf16 tp", "fp16 pp", "bf16 tp muon"],
)
def test_lower_precision_differs_by_its_rounding(
    compute: str, limit: float, laid_out: dict[str, Any], ranks: Pool, single_process: SingleProcess, tiny: Recipe
) -> None:
    changes = laid_out | {"precision.compute": compute}
    found = differences(ranks, single_process, tiny, changes, dtype="float32")
    assert found["loss"] < limit, found


@pytest.mark.slow
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("family", ["llama", "tied", "gpt", "bloom"])
@pytest.mark.parametrize(
    "degrees", [(2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (2, 1, 2), (1, 2, 2), (2, 2, 2)], ids=str
)
def test_every_product_of_degrees(
    degrees: tuple[int, int, int], family: str, zero: int, ranks: Pool, single_process: SingleProcess, tiny: Recipe
) -> None:
    changes = {"llama": {}, "tied": TIED, "gpt": GPT, "bloom": BLOOM}[family] | layout(*degrees, zero) | ONE
    found = differences(ranks, single_process, tiny, changes)
    same(found)


@pytest.mark.slow  # the compiler takes a minute and more for each
@pytest.mark.parametrize(
    "changes",
    [
        layout(dp=2, zero=3),
        layout(tp=2),
        layout(pp=2),
        layout(dp=2, tp=2, zero=2),
        layout(dp=2, tp=2, zero=1) | {"layout.recompute": "full"},
    ],
    ids=str,
)
def test_compiled_layouts_are_the_same_model(
    changes: dict[str, Any], ranks: Pool, single_process: SingleProcess, tiny: Recipe
) -> None:
    found = differences(ranks, single_process, tiny, changes | {"layout.compile": True})
    same(found)
