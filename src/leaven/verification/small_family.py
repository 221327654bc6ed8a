"""Derive small models from a recipe of any size, for checks of a few steps.

The exponents of a rule do not depend on the sizes where they are measured, as long as proportions are kept. So a
check without --widths measures at 64 to 512. If the recipe does not fit such widths, its head dimension is reduced
and its d_ff rounded. The vocabulary and sequence length are reduced, since large ones only take more time.
"""

from dataclasses import dataclass
from typing import Any

from leaven.recipe.recipe import Recipe
from leaven.recipe.shape import ModelShape

WIDTH, TIMES = 64, (1, 2, 4, 8)
DEPTHS = (2, 4, 8, 16)
VOCABULARY, SEQ_LEN = 4096, 256
"""Upper limits. No rule depends on either size."""

LARGEST_GROUP = 8
"""Heads per kv head: with a head dimension of 8 this makes a width of 64."""


@dataclass(frozen=True)
class SmallFamily:
    """Small models of a recipe."""

    recipe: Recipe  # with the smallest width
    widths: tuple[int, ...]
    changed: tuple[str, ...]  # what differs from the original recipe, one text each


def small_family(recipe: Recipe) -> SmallFamily:
    """Return small models of a recipe at the default widths."""
    shape = _fitted(recipe.model)
    sizes: dict[str, Any] = {"seq_len": min(shape.seq_len, SEQ_LEN)}
    if recipe.data.tokenizer == "bpe":  # another tokenizer's vocabulary is its own
        sizes["vocab_size"] = min(shape.vocab_size, VOCABULARY)
    shape = shape.model_copy(update=sizes)
    sizes_before_after = {
        "d_head": (recipe.model.d_head, shape.d_head),
        "d_ff / d_model": (recipe.model.d_ff / recipe.model.d_model, shape.d_ff / shape.d_model),
        "heads per kv head": (_group(recipe.model), _group(shape)),
        "vocab_size": (recipe.model.vocab_size, shape.vocab_size),
        "seq_len": (recipe.model.seq_len, shape.seq_len),
    }
    changed = tuple(
        f"{name} {before:,.5g} -> {after:,.5g}"
        for name, (before, after) in sizes_before_after.items()
        if before != after
    )
    sequences = max(recipe.batch.tokens // recipe.model.seq_len, 16)
    recipe = recipe.replace(
        {
            "model": shape.model_dump(),
            "batch": {"tokens": sequences * shape.seq_len},
            "scaling.base": None,
            "start": {},
            "hyperparameters.init": "rule",
            "hyperparameters.init_std": 1.0,  # each check has its own
        }
    )
    return SmallFamily(recipe, tuple(shape.d_model * times for times in TIMES), changed)


def _fitted(shape: ModelShape) -> ModelShape:
    """Return the shape at width 64, or at a nearby width with similar proportions if it does not fit 64."""
    try:
        return shape.scaled(WIDTH, DEPTHS[0])
    except ValueError:
        pass
    group = min(_group(shape), LARGEST_GROUP)
    d_head = min(shape.d_head, 1 << (max(WIDTH // group, 8).bit_length() - 1))
    d_head -= d_head % 2 if d_head > 1 else 0
    width = max(round(WIDTH / (group * d_head)), 1) * group * d_head
    ratio = (shape.d_attention or shape.d_model) / shape.d_model
    heads = max(round(ratio * width / (group * d_head)), 1) * group
    changes = {
        "n_layers": DEPTHS[0],
        "d_model": width,
        "d_attention": heads * d_head if shape.d_attention else None,
        "n_heads": heads,
        "n_kv_heads": heads // group,
        "d_head": d_head,
        "d_ff": max(round(shape.d_ff * width / shape.d_model), 1),
    }
    return ModelShape.model_validate(shape.model_dump() | changes)


def _group(shape: ModelShape) -> int:
    return shape.n_heads // shape.n_kv_heads
