"""Export to Megatron: its flags, their types, and the values that it computes from them."""

import math
from itertools import product
from typing import Any

import pytest
from tests.interop.configs.recipes import FAMILIES, MIXTURES, NEOX, PER_MODULE, WINDOWED, megatron_like, transferred

from leaven.documents.runs import LossRow
from leaven.interop.configs.export import export
from leaven.interop.configs.megatron_arguments import parse_arguments
from leaven.recipe.recipe import Recipe
from leaven.scaling.table import parameter_table

# Flags with the type of their value (None: a switch), from arguments.py @008e9cd and the dataclasses that it makes
# flags of (training_config.py, transformer_config.py, optimizer_config.py).
FLAGS: dict[str, Any] = {
    "num-layers": int, "hidden-size": int, "ffn-hidden-size": int, "num-attention-heads": int, "kv-channels": int,
    "group-query-attention": None, "num-query-groups": int, "seq-length": int, "max-position-embeddings": int,
    "position-embedding-type": {"learned_absolute", "rope"}, "rotary-base": int, "rotary-percent": float,
    "window-size": str, "window-attn-skip-freq": int, "add-qkv-bias": None,
    "normalization": {"LayerNorm", "RMSNorm"}, "norm-epsilon": float, "swiglu": None, "squared-relu": None,
    "no-bias-gelu-fusion": None, "qk-layernorm": None, "disable-bias-linear": None,
    "untie-embeddings-and-output-weights": None, "vocab-size": int, "make-vocab-size-divisible-by": int,
    "attention-dropout": float, "hidden-dropout": float, "init-method-std": float, "embedding-init-method-std": float,
    "use-mup": None, "mup-base-hidden-size": int, "mup-base-head-dim": float,
    "optimizer": {"adam"}, "lr": float, "decoupled-lr": float, "min-lr": float, "decoupled-min-lr": float,
    "weight-decay": float, "adam-beta1": float, "adam-beta2": float, "adam-eps": float, "clip-grad": float,
    "lr-decay-style": {"constant", "linear", "cosine", "inverse-square-root", "WSD"}, "lr-decay-samples": int,
    "lr-warmup-samples": int, "lr-wsd-decay-style": {"minus_sqrt"}, "lr-wsd-decay-samples": int,
    "micro-batch-size": int, "global-batch-size": int, "step-batch-size-schedule": str, "train-samples": int,
    "seed": int, "bf16": None, "fp16": None, "reset-position-ids": None, "reset-attention-mask": None,
    "eod-mask-loss": None, "tensor-model-parallel-size": int, "pipeline-model-parallel-size": int,
    "context-parallel-size": int,
    "num-virtual-stages-per-pipeline-rank": int, "use-distributed-optimizer": None, "use-megatron-fsdp": None,
    "num-experts": int, "moe-router-topk": int, "moe-ffn-hidden-size": int,
    "moe-shared-expert-intermediate-size": int, "moe-layer-freq": str, "moe-router-pre-softmax": None,
    "moe-router-score-function": {"softmax", "sigmoid"}, "moe-router-topk-scaling-factor": float,
    "moe-router-load-balancing-type": {"seq_aux_loss", "none"}, "moe-aux-loss-coeff": float,
    "moe-z-loss-coeff": float, "moe-router-enable-expert-bias": None, "moe-router-bias-update-rate": float,
    "moe-router-dtype": {"fp32"}, "moe-token-dispatcher-type": {"alltoall"}, "moe-grouped-gemm": None,
    "expert-model-parallel-size": int,
    "data-parallel-sharding-strategy": {"no_shard", "optim", "optim_grads", "optim_grads_params"},
    "recompute-granularity": {"full", "selective"}, "recompute-method": {"uniform"}, "recompute-num-layers": int,
}  # fmt: skip


def flags_of(recipe: Recipe) -> dict[str, Any]:
    """Return the exported flags as argparse reads them, by the table above."""
    read = {}
    for name, words in parse_arguments(export("megatron", recipe).files[""], "args").flags.items():
        kind = FLAGS[name]
        if kind is None:
            assert words == []
            read[name] = True
        elif isinstance(kind, set):
            assert words[0] in kind
            read[name] = words[0]
        else:
            assert len(words) == 1, f"--{name} {words}"
            read[name] = kind(words[0])
    return read


def keys(losses: list[LossRow]) -> list[str]:
    return [loss.key for loss in losses]


DEGREES = {"layout.dp": 4, "layout.tp": 2, "layout.pp": 2, "layout.cp": 2}
LAYOUT = DEGREES | {"layout.zero": 3, "layout.recompute": "full"}
INTERLEAVED = {"layout.pp": 2, "layout.schedule": "interleaved", "layout.stages_per_rank": 2, "layout.zero": 1}
RAMP = {"start_tokens": 64, "increment_tokens": 64, "over_tokens": 3_000}
SIGMOID = {"number": 4, "active": 2, "d_expert": 32, "router": "sigmoid"}
WSD = {"schedule.decay": "wsd", "precision.compute": "fp16", "data.documents": "isolated"}


@pytest.mark.parametrize(
    ("family", "more"),
    [*((family, {}) for family in FAMILIES), *product(("qwen3", "gpt2"), (PER_MODULE, LAYOUT, INTERLEAVED, WSD))],
)
def test_flags_and_types_are_megatrons(tiny: Recipe, family: str, more: dict[str, Any]) -> None:
    recipe = tiny.replace(FAMILIES[family] | {"model.n_layers": 4} | more)
    flags = flags_of(recipe)
    assert ("global-batch-size" in flags) != ("step-batch-size-schedule" in flags)
    assert "rampup-batch-size" not in flags


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "neox", *MIXTURES])
def test_a_recipe_like_megatrons_own_loses_nothing(tiny: Recipe, family: str) -> None:
    recipe = megatron_like(tiny.replace((FAMILIES | MIXTURES)[family]))
    assert export("megatron", recipe).losses == []
    flags = flags_of(recipe)
    shape = recipe.model
    assert (flags["lr"], flags["init-method-std"], flags["weight-decay"]) == (0.01, 0.1, 0.1)
    assert flags["train-samples"] == flags["lr-decay-samples"] == 10_240 // 32
    assert flags["lr-warmup-samples"] == 1_024 // 32
    assert flags["min-lr"] == 0.001
    assert math.prod((flags["num-layers"], flags["hidden-size"])) == shape.n_layers * shape.d_model
    assert flags["vocab-size"] % flags["make-vocab-size-divisible-by"] == 0  # no padding


def test_windows_partial_rotary_positions_and_attention_biases(tiny: Recipe) -> None:
    recipe = megatron_like(tiny.replace(WINDOWED))
    assert export("megatron", recipe).losses == []
    flags = flags_of(recipe)
    assert (flags["window-size"], flags["window-attn-skip-freq"], flags["rotary-percent"]) == ("7,0", 2, 0.5)
    assert flags["add-qkv-bias"]
    # Megatron has biases in all linear layers, or only those
    for bias, attention in ((True, "qkv"), (False, "all")):
        other = tiny.replace(NEOX | {"model.bias": bias, "model.attention_bias": attention})
        assert "model.attention_bias" in keys(export("megatron", other).losses)


def test_flags_of_experts(tiny: Recipe) -> None:
    """Coefficients of losses are those of the recipe, also under a rule, which scales them with the branches."""
    mixtral, qwen3, deepseek, both = (flags_of(megatron_like(tiny.replace(each))) for each in MIXTURES.values())
    assert (mixtral["num-experts"], mixtral["moe-router-topk"], mixtral["moe-ffn-hidden-size"]) == (4, 2, 32)
    assert (mixtral["moe-router-load-balancing-type"], mixtral["moe-aux-loss-coeff"]) == ("seq_aux_loss", 0.01)
    assert not {"moe-router-pre-softmax", "moe-layer-freq", "moe-z-loss-coeff"} & mixtral.keys()
    assert qwen3["moe-router-pre-softmax"]
    assert qwen3["moe-z-loss-coeff"] == 0.001
    assert "--moe-layer-freq '([0]*1+[1]*1)'\n" in export("megatron", tiny.replace(MIXTURES["qwen3-moe"])).files[""]
    assert (deepseek["moe-shared-expert-intermediate-size"], deepseek["moe-router-topk-scaling-factor"]) == (64, 2.5)
    assert deepseek["moe-router-enable-expert-bias"]
    assert deepseek["moe-router-load-balancing-type"] == "none"
    assert both["moe-router-enable-expert-bias"]
    assert both["moe-aux-loss-coeff"] == 1e-4
    parallel = tiny.replace(MIXTURES["mixtral"] | {"layout.dp": 4, "layout.ep": 2})
    assert flags_of(parallel)["expert-model-parallel-size"] == 2
    deep = transferred(tiny.replace(MIXTURES["mixtral"]))
    assert flags_of(deep)["moe-aux-loss-coeff"] == pytest.approx(0.01 * 1 / 3)
    assert "use-mup" not in flags_of(deep)


def test_losses_have_key_value_and_reason(tiny: Recipe) -> None:
    assert all(loss.key and loss.why for loss in export("megatron", tiny.replace(PER_MODULE)).losses)
    for name, change in LOST.items():
        assert name.partition(",")[0] in keys(export("megatron", tiny.replace(change)).losses), name


LOST: dict[str, dict[str, Any]] = {
    "model.positions": {"model.positions": "alibi"},
    "model.activation": {"model.activation": "relu"},
    "model.activation, in its tanh form without biases": NEOX | {"model.bias": False},
    "batch.ramp.rule": {"batch.ramp": RAMP | {"rule": "scaled"}, "scaling.rule": "complete-d-p"},
    "model.qk_norm_per_head": {"model.qk_norm_per_head": True},
    "model.embedding_norm": {"model.embedding_norm": True},
    "model.bias": {"model.norm": "layernorm"},
    "model.norm_placement": {"model.norm_placement": "output"},
    "model.parallel_branches": {"model.parallel_branches": True},
    "model.logit_softcap": {"model.logit_softcap": 30.0},
    "model.attention_bias": {"model.attention_bias": "all"},
    "hyperparameters.optimizer": {"hyperparameters.optimizer": "adam"},
    "hyperparameters.grad_clip.mode": {"hyperparameters.grad_clip": {"mode": "per-module", "limit": 1.0}},
    "hyperparameters.z_loss": {"hyperparameters.z_loss": 1e-4},
    "average": {"average": {"last": 0.2}},
    "model.experts.normalise": {"model.experts": SIGMOID | {"normalise": False}},
    "model.experts.balance": {"model.experts": SIGMOID | {"router": "softmax", "balance": "bias"}},
    "hyperparameters.decay_norm_and_bias": {"hyperparameters.decay_norm_and_bias": True},
}


def test_decoupled_lr_for_embedding_and_output_layer(tiny: Recipe) -> None:
    both = {"embedding": {"lr": 4.0}, "unembedding": {"lr": 4.0}}
    recipe = megatron_like(tiny)
    modules = {name: each.model_dump() for name, each in recipe.hyperparameters.modules.items()}
    recipe = recipe.replace({"hyperparameters.modules": modules | both})
    assert export("megatron", recipe).losses == []
    flags = flags_of(recipe)
    assert (flags["decoupled-lr"], flags["decoupled-min-lr"], flags["lr"]) == (0.04, 0.004, 0.01)
    one = recipe.replace({"hyperparameters.modules": modules | {"embedding": {"lr": 4.0}}})
    assert keys(export("megatron", one).losses) == ["lr of embedding"]


def test_a_ramp_becomes_a_step_batch_size_schedule(tiny: Recipe) -> None:
    recipe = megatron_like(tiny.replace({"batch.ramp": RAMP}))
    exported = export("megatron", recipe)
    assert exported.losses == []
    assert any("ignores it" in note and "pull request 4411" in note for note in exported.notes)
    stages = [tuple(map(int, each.split(":"))) for each in flags_of(recipe)["step-batch-size-schedule"].split()]
    consumed, sizes = 0, []
    for _ in range(recipe.steps):  # as Megatron computes it: the last stage whose threshold is reached
        size = next(size for tokens, size in reversed(stages) if consumed >= tokens // 32)
        sizes.append(size * 32)
        consumed += size
    ours = [
        recipe.batches.tokens_at_step(step + 1) - recipe.batches.tokens_at_step(step) for step in range(len(sizes))
    ]
    assert sizes == ours


def test_use_mup_is_chosen_if_it_loses_less(tiny: Recipe) -> None:
    """Table 8 of Yang et al.; only the eps of the readout differs (1 there, 1 / m in Megatron's form)."""
    recipe = transferred(megatron_like(tiny), rule="mup")
    depth = recipe.model.n_layers
    ends = {"init_std": 1 / math.sqrt(2 * depth)}
    recipe = recipe.replace({"hyperparameters.modules": {"attention.out": ends, "mlp.out": ends}})
    flags = flags_of(recipe)
    assert (flags["use-mup"], flags["mup-base-hidden-size"], flags["lr"]) == (True, 16, 0.01)
    assert flags["init-method-std"] == pytest.approx(0.1)
    table = parameter_table(recipe)
    assert table["layers.0.mlp.in.weight"].lr == pytest.approx(0.01 / 4)
    assert {key.split(" of ")[0] for key in keys(export("megatron", recipe).losses)} <= {
        "eps",
        "weight_decay",
        "hyperparameters.grad_clip",  # the readout has a multiplier there
    }


def test_seed_0_becomes_megatrons_default(tiny: Recipe) -> None:
    exported = export("megatron", tiny)
    assert flags_of(tiny)["seed"] == 1234
    assert any("data.seed = 0 is written as --seed 1234" in note for note in exported.notes)
    assert flags_of(tiny.replace({"data.seed": 7}))["seed"] == 7


def test_initial_stds_are_compared_with_a_tolerance(tiny: Recipe) -> None:
    def starting(relative: float) -> Recipe:
        ends = {"init_std": relative / (2 * tiny.model.n_layers) ** 0.5}
        return tiny.replace({"hyperparameters.modules": {"attention.out": ends, "mlp.out": ends}})

    near = export("megatron", starting(1.0003))
    assert near.losses == []
    assert any(note.startswith("init_std of attention.out, mlp.out differs") for note in near.notes)
    assert not any(note.startswith("init_std") for note in export("megatron", starting(1)).notes)
    (loss,) = export("megatron", starting(1.002)).losses
    assert loss.key == "init_std of attention.out, mlp.out"
