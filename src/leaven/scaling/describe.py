"""A resolved recipe as plain data: what ``leaven show --json`` and ``leaven transfer --json`` print."""

from dataclasses import asdict
from typing import Any

from leaven.recipe.recipe import Recipe
from leaven.scaling.starts import describe_starts
from leaven.scaling.table import clip_reason, optimizer_reason, ramp_reason, resolve


def describe(recipe: Recipe, flops_per_token: float) -> dict[str, Any]:
    """The document of ``leaven show --json``."""
    table, model = resolve(recipe), recipe.model
    return {
        "name": recipe.name,
        "start": recipe.start.weights,
        "scale": {
            "width": model.d_model,
            "depth": model.n_layers,
            "batch_tokens": recipe.batch.tokens,
            "tokens": recipe.data.tokens,
            "base": recipe.base.model_dump(exclude_none=True),
        },
        "rule": table.rule.name,
        "ratios": asdict(table.ratios),
        "totals": {
            "params": model.params,
            "params_non_embedding": model.params_non_embedding,
            "flops_per_token": flops_per_token,
        },
        "attention_scale": table.attention_scale,
        "optimizer": {"name": recipe.hyperparameters.optimizer, "why": optimizer_reason(recipe)},
        "init": describe_starts(recipe, table),
        "clip": recipe.hyperparameters.grad_clip.model_dump() | {"why": clip_reason(recipe)},
        "ramp": {"rule": recipe.batch.rule, "why": ramp_reason(recipe)},
        "parameters": [asdict(row) for row in table.rows],
    }
