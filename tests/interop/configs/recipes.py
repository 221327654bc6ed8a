"""Small recipes of the families that targets support, and changes that some targets cannot express."""

from typing import Any

from leaven.interop.architectures import ARCHITECTURES, TORCHTITAN
from leaven.recipe.recipe import Recipe
from leaven.scaling.table import parameter_table
from leaven.scaling.transfer import transfer

LLAMA = {"model.qk_norm": False}
QWEN3: dict[str, Any] = {}
GPT2 = {
    "model.qk_norm": False,
    "model.norm": "layernorm",
    "model.positions": "learned",
    "model.activation": "gelu",
    "model.bias": True,
    "model.tied_embeddings": True,
    "model.n_kv_heads": 2,
    "model.dropout": 0.1,
}
NEOX = GPT2 | {"model.positions": "rope", "model.tied_embeddings": False}
BLOOM = GPT2 | {"model.positions": "alibi", "model.embedding_norm": True, "model.d_ff": 64, "model.dropout": 0.0}
# what Megatron has beside the families
WINDOWS: dict[str, Any] = {"model.window": 8, "model.global_every": 2}
WINDOWED = LLAMA | WINDOWS | {"model.rotary_fraction": 0.5, "model.attention_bias": "qkv"}
FAMILIES = {"llama": LLAMA, "qwen3": QWEN3, "gpt2": GPT2, "neox": NEOX, "bloom": BLOOM}
_EXPERTS = {"number": 4, "active": 2, "d_expert": 32}
MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": LLAMA | {"model.d_ff": 32, "model.experts": _EXPERTS},
    "qwen3-moe": QWEN3 | {"model.experts": _EXPERTS | {"dense_layers": 1, "normalise": False, "router_z_loss": 1e-3}},
    "deepseek": QWEN3
    | {
        "model.experts": _EXPERTS
        | {"router": "sigmoid", "balance": "bias", "shared": 2, "dense_layers": 1, "weight_scale": 2.5}
    },
    "deepseek-v3": LLAMA
    | {"model.experts": _EXPERTS | {"router": "sigmoid", "shared": 1, "balance": "both", "balance_loss": 1e-4}},
}

PER_MODULE = {
    "hyperparameters.modules": {
        "embedding": {"lr": 4.0, "init_std": 2.0},
        "attention.query": {"lr": 0.5, "init_std": 1.4},
        "mlp.out": {"weight_decay": 0.3, "eps": 10.0, "beta2": 2.0},
    },
    "hyperparameters.depth": {"lr": [1.0, 1.5], "init_std": [1.0, 0.5]},
}


def megatron_like(recipe: Recipe) -> Recipe:
    """Return the recipe with the initial values of Megatron at the ends of branches."""
    ends = {"init_std": 1 / (2 * recipe.model.n_layers) ** 0.5}
    return recipe.replace({"hyperparameters.modules": dict.fromkeys(recipe.model.branch_ends, ends)})


def transferred(recipe: Recipe, rule: str = "complete-d-p") -> Recipe:
    """Return the recipe at four times the width and three times the depth of its base, so that it has multipliers."""
    return transfer(recipe.replace({"scaling.rule": rule}), width=64, depth=6)


def rows_of(recipe: Recipe, model_type: str) -> dict[str, list[Any]]:
    """Return the rows of the recipe's table for each tensor of an architecture."""
    architecture = next(each for each in (*ARCHITECTURES, TORCHTITAN) if each.model_type == model_type)
    table = {row.name: row for row in parameter_table(recipe).rows}
    return {
        each.name: [table[part] for part in each.parts if part in table]
        for each in architecture.tensors(recipe.model)
    }
