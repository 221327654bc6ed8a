"""Export to nanotron, litgpt, DeepSpeed and torchtitan: keys and types of their sources, and their losses."""

import ast
import json
import math
import re
from itertools import product
from typing import Any

import pytest
import yaml
from tests.interop.configs.recipes import FAMILIES, LLAMA, PER_MODULE, rows_of, transferred

from leaven.interop.configs.export import TARGETS, export
from leaven.recipe.recipe import Recipe

# nanotron, config.py @00708b8 and models_config.py @025f314; None may stand where the source says Optional.
NANOTRON: dict[str, Any] = {
    "general": {"project": str, "run": str, "seed": int},
    "parallelism": {
        "dp": int, "tp": int, "pp": int, "pp_engine": {"1f1b", "afab"}, "tp_mode": {"ALL_REDUCE", "REDUCE_SCATTER"},
        "tp_linear_async_communication": bool, "recompute_layer": bool,
    },
    "model": {
        "dtype": {"float32", "bfloat16"},
        "init_method": {"std": float, "scaling_method": {"NONE", "NUM_LAYERS"}},
        "make_vocab_size_divisible_by": int,
        "model_config": {
            "is_llama_config": bool, "hidden_act": {"silu"}, "hidden_size": int, "intermediate_size": int,
            "max_position_embeddings": int, "num_attention_heads": int, "num_hidden_layers": int,
            "num_key_value_heads": int, "rms_norm_eps": float, "rope_theta": float, "rope_interleaved": bool,
            "tie_word_embeddings": bool, "vocab_size": int,
        },
    },
    "tokens": {
        "sequence_length": int, "train_steps": int, "micro_batch_size": int, "batch_accumulation_per_replica": int,
    },
    "optimizer": {
        "optimizer_factory": {
            "name": {"adamW"}, "adam_beta1": float, "adam_beta2": float, "adam_eps": float,
            "torch_adam_is_fused": bool,
        },
        "zero_stage": int, "weight_decay": float, "weight_decay_exclude_named_params": list,
        "clip_grad": (float, type(None)), "accumulate_grad_in_fp32": bool,
        "learning_rate_scheduler": {
            "learning_rate": float, "lr_warmup_steps": int, "lr_warmup_style": {"linear"},
            "lr_decay_style": {"linear", "cosine", "1-sqrt"}, "lr_decay_starting_step": int, "lr_decay_steps": int,
            "min_decay_lr": float,
        },
    },
}  # fmt: skip
# litgpt 0.5.13: config.py, args.py, the arguments of pretrain.setup.
LITGPT: dict[str, Any] = {
    "model_name": str, "out_dir": str, "devices": int, "seed": int,
    "precision": {"bf16-true", "bf16-mixed", "32-true"},
    "model_config": {
        "name": str, "block_size": int, "n_layer": int, "n_embd": int, "n_head": int, "n_query_groups": int,
        "head_size": int, "intermediate_size": int, "vocab_size": int, "padded_vocab_size": int,
        "norm_class_name": {"LayerNorm", "RMSNorm"}, "norm_eps": float, "norm_qk": bool, "parallel_residual": bool,
        "shared_attention_norm": bool, "rotary_percentage": float, "rope_base": int, "bias": bool, "attn_bias": bool,
        "mlp_class_name": {"GptNeoxMLP", "LLaMAMLP"}, "gelu_approximate": {"none", "tanh"},
        "attention_scores_scalar": int,
    },
    "train": {
        "global_batch_size": int, "micro_batch_size": int, "max_tokens": int, "max_seq_length": int,
        "lr_warmup_steps": int, "max_norm": (float, type(None)), "min_lr": float, "tie_embeddings": bool,
    },
    "optimizer": {
        "class_path": {"torch.optim.AdamW", "torch.optim.Adam"},
        "init_args": {"lr": float, "betas": list, "eps": float, "weight_decay": float},
    },
}  # fmt: skip


def fits(document: Any, schema: Any, path: str = "") -> None:
    if isinstance(schema, dict):
        assert isinstance(document, dict), path
        assert document.keys() <= schema.keys(), f"{path}: {document.keys() - schema.keys()}"
        for key, value in document.items():
            fits(value, schema[key], f"{path}.{key}")
    elif isinstance(schema, set):
        assert document in schema, path
    else:
        assert isinstance(document, schema), f"{path}: {document!r}"
        assert not (isinstance(document, bool) and schema is int), path


MORE: list[dict[str, Any]] = [
    PER_MODULE,
    {"schedule.decay": "wsd", "layout.dp": 4, "layout.zero": 3, "hyperparameters.grad_clip": 0.0},
    {"schedule.decay": "inverse_sqrt", "hyperparameters.optimizer": "adam", "precision.compute": "fp16"},
    {"schedule.decay": "constant", "precision.compute": "bf16", "schedule.warmup_tokens": 0},
]


# Every family as it is, and the changes in a family with and in one without biases and learned positions
@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "more"), [*((family, {}) for family in FAMILIES), *product(("llama", "gpt2"), MORE)]
)
def test_keys_and_types_are_the_targets(tiny: Recipe, family: str, more: dict[str, Any]) -> None:
    recipe = tiny.replace(FAMILIES[family] | more)
    fits(yaml.safe_load(export("nanotron", recipe).files[""]), NANOTRON)
    fits(yaml.safe_load(export("litgpt", recipe).files[""]), LITGPT)
    json.loads(export("deepspeed", recipe).files[""])
    ast.parse(export("torchtitan", recipe).files[""])


@pytest.mark.parametrize("name", TARGETS)
def test_losses_are_written_into_the_file(tiny: Recipe, name: str) -> None:
    ramp = {"start_tokens": 64, "increment_tokens": 64, "over_tokens": 3_000}
    lossy = PER_MODULE | {
        "batch.ramp": ramp,
        "hyperparameters.grad_clip": {"mode": "running", "limit": 1.0},
        "hyperparameters.z_loss": 1e-4,
    }
    exported = export(name, transferred(tiny.replace(lossy)).replace({"start.weights": "wheat"}))
    assert {"start.weights": "wheat", "hyperparameters.z_loss": 1e-4}.items() <= {
        loss.key: loss.value for loss in exported.losses
    }.items()
    everything = json.dumps(list(exported.files.values()))
    for loss in exported.losses:
        assert json.dumps(json.dumps(loss.text))[3:-3] in everything or json.dumps(loss.text)[1:-1] in everything


@pytest.mark.parametrize("name", ["megatron", "nanotron", "litgpt", "torchtitan", "transformers"])
def test_clipping_is_a_loss_if_multipliers_are_folded(tiny: Recipe, name: str) -> None:
    """At three times the depth of the base a branch, and the gradient of its weights, is multiplied by 1/3."""
    plain, deep = (tiny.replace(LLAMA), transferred(tiny.replace(LLAMA)))
    for recipe, lost in ((plain, False), (deep, True), (deep.replace({"hyperparameters.grad_clip": 0.0}), False)):
        keys = {loss.key for loss in export(name, recipe).losses}
        assert ("hyperparameters.grad_clip" in keys) is lost


def test_nanotron_loses_nothing_of_a_plain_llama(tiny: Recipe) -> None:
    plain = tiny.replace(LLAMA)
    assert export("nanotron", plain).losses == []
    ends = {"init_std": 1 / math.sqrt(2 * plain.model.n_layers)}
    scaled = plain.replace({"hyperparameters.modules": {"attention.out": ends, "mlp.out": ends}})
    for recipe, method in ((plain, "NONE"), (scaled, "NUM_LAYERS")):
        assert export("nanotron", recipe).losses == []
        assert (
            yaml.safe_load(export("nanotron", recipe).files[""])["model"]["init_method"]["scaling_method"] == method
        )
    for more, lost in (
        ({"model.qk_norm": True}, "model.qk_norm"),
        ({"hyperparameters.modules": {"embedding": {"lr": 2.0}}}, "lr of embedding"),
        ({"schedule.decay": "inverse_sqrt"}, "schedule.decay"),
        ({"precision.compute": "fp16"}, "precision.compute"),
        ({"hyperparameters.optimizer": "adam"}, "hyperparameters.optimizer"),
    ):
        assert [loss.key for loss in export("nanotron", plain.replace(more)).losses] == [lost]


def test_nanotrons_schedule_is_the_recipes(tiny: Recipe) -> None:
    """The phases of its helpers.py, compared at the middle of the decay."""
    for decay in ("cosine", "linear", "wsd"):
        recipe = tiny.replace(LLAMA | {"schedule.decay": decay})
        said = yaml.safe_load(export("nanotron", recipe).files[""])["optimizer"]["learning_rate_scheduler"]
        assert said["lr_decay_starting_step"] + said["lr_decay_steps"] == recipe.steps
        half = said["lr_decay_starting_step"] + said["lr_decay_steps"] // 2
        progress = (half - said["lr_decay_starting_step"]) / said["lr_decay_steps"]
        shape = {
            "cosine": (1 + math.cos(math.pi * progress)) / 2,
            "linear": 1 - progress,
            "1-sqrt": 1 - math.sqrt(progress),
        }[said["lr_decay_style"]]
        theirs = said["min_decay_lr"] + (said["learning_rate"] - said["min_decay_lr"]) * shape
        ours = recipe.schedule.multiplier(half * recipe.batch.tokens, recipe.data.tokens)
        assert theirs == pytest.approx(0.01 * ours)


def test_litgpt_does_not_lose_an_init_equal_to_its_own(tiny: Recipe) -> None:
    d, depth = tiny.model.d_model, tiny.model.n_layers
    ends = {"init_std": 1 / math.sqrt(d) / depth / math.sqrt(2 / 5 / d)}
    start = {
        "hyperparameters.init_std": math.sqrt(2 / 5 / d),
        "hyperparameters.modules": {"attention.out": ends, "mlp.out": ends},
        "hyperparameters.decay_norm_and_bias": True,
    }
    assert export("litgpt", tiny.replace(start)).losses == []
    keys = [loss.key for loss in export("litgpt", tiny).losses]
    assert [key.split(" of ")[0] for key in keys] == ["init_std", "init_std", "weight_decay"]


def test_litgpt_says_that_exported_weights_have_the_attention_scale_already(tiny: Recipe) -> None:
    def noted(recipe: Recipe) -> bool:
        return any("remove attention_scores_scalar" in note for note in export("litgpt", recipe).notes)

    wider_heads = {"width": 16, "depth": 2, "batch_tokens": 256, "tokens": 10_240, "d_head": 2}
    assert noted(tiny.replace({"scaling.base": wider_heads}))
    assert not noted(tiny)


def test_deepspeed_gets_adam_mode_and_warmup_type(tiny: Recipe) -> None:
    exported = export("deepspeed", tiny.replace({"hyperparameters.optimizer": "adam", "layout.dp": 2}))
    document = json.loads(exported.files[""])
    assert document["optimizer"] == {
        "type": "Adam",
        "params": {"lr": 0.01, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1, "adam_w_mode": False},
    }
    assert document["scheduler"]["params"]["warmup_type"] == "linear"
    batch, micro = document["train_batch_size"], document["train_micro_batch_size_per_gpu"]
    assert batch == micro * document["gradient_accumulation_steps"] * 2
    groups = next(note for note in exported.notes if "parameter groups" in note)
    assert "leaven.parametrize(...)" not in groups  # which refuses Adam
    assert "model_parameters = groups of your own" in groups


@pytest.mark.parametrize("name", ["litgpt", "deepspeed", "torchtitan", "nanotron", "automodel"])
def test_a_schedule_that_is_late_is_in_the_notes(tiny: Recipe, name: str) -> None:
    notes = export(name, tiny.replace({"schedule.decay": "linear"})).notes
    assert any(re.search(r"(one|two) (micro-batch|steps?) late", note) for note in notes)


def test_torchtitan_patterns_give_every_parameter_its_settings(tiny: Recipe) -> None:
    """The first matching pattern of the file wins, as in torchtitan's optimizer."""
    recipe = tiny.replace(PER_MODULE | {"model.n_layers": 3})
    tree = ast.parse(export("torchtitan", recipe).files[""])
    assigned = [
        node for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "GROUPS"
    ]
    groups = eval(ast.unparse(assigned[0].value))
    for name, (row,) in rows_of(recipe, "torchtitan").items():
        settings = next(settings for pattern, settings in groups if re.search(pattern, name))
        assert settings["lr"] == pytest.approx(row.lr)
        assert settings["weight_decay"] == pytest.approx(row.weight_decay)
        assert settings["eps"] == pytest.approx(row.eps)
        assert settings["betas"] == pytest.approx((row.beta1, row.beta2))
