"""Published runs as leaven's own models and recipes."""

import math
from collections.abc import Iterator
from typing import Any

from leaven.catalogue.runs import PublishedRun, load_runs
from leaven.catalogue.terms import terms
from leaven.recipe.recipe import Recipe
from leaven.recipe.shape import ModelShape

_POSITIONS = {"rotary": "rope", "learned": "learned", "alibi": "alibi"}


def model_shape(run: PublishedRun) -> ModelShape | None:
    """Return the run's model as leaven builds it, or None if leaven cannot build it."""
    arch, seq_len = run.arch, run.seq_len
    foreign = (
        run.kind != "dense",
        seq_len is None,
        arch.attention is not None,  # sliding, sparse, latent
        arch.layerwise_scaling is not None,
        arch.norm_placement != "pre",
        not arch.norm_affine,
        arch.norm_bias not in (None, arch.bias),
        arch.qkv_bias not in (None, arch.bias),
        arch.bias is None,
        arch.parallel_block,
        arch.rotary_pct != 1.0,
        arch.rotary_dims is not None,
        arch.qk_norm and arch.qk_norm_width != "head",
        arch.positional not in _POSITIONS,
        arch.positional_note is not None,
        arch.activation in ("geglu", "xielu"),
    )
    if any(foreign):
        return None
    head = arch.head_dim
    same = ("n_layers", "d_model", "n_heads", "n_kv_heads", "d_ff", "norm", "activation", "qk_norm")
    shape = {key: getattr(arch, key) for key in (*same, "tied_embeddings", "embedding_norm", "bias")}
    shape |= {
        "d_head": head,
        "d_attention": None if arch.n_heads * head == arch.d_model else arch.n_heads * head,
        "vocab_size": arch.vocab_padded or arch.vocab_size,
        "seq_len": seq_len,
        "positions": _POSITIONS[arch.positional or ""],
        **({"rope_theta": arch.rope_theta} if arch.rope_theta else {}),
    }
    return ModelShape.model_validate(shape)


def ramp(run: PublishedRun, batch: int, seq_len: int) -> dict[str, Any]:
    """Return the published ramp in one step, or a short one if it is not known whether there was one."""
    known, kind = terms(run), run.batch.rampup.kind if run.batch and run.batch.rampup else None
    if kind == "none":
        return {}
    start = round(known.get("batch.ramp.start_tokens", batch / 4) / seq_len) * seq_len
    over = known.get("batch.ramp.over_tokens", (run.tokens or 0) // 25)
    if start >= batch:
        return {}
    if kind == "stages":
        return {"stages": [{"from_tokens": 0, "tokens": start}, {"from_tokens": over, "tokens": batch}]}
    return {"ramp": {"start_tokens": start, "increment_tokens": batch - start, "over_tokens": over}}


def as_recipe(run: PublishedRun) -> Recipe | None:
    """Return a published run as a recipe, or None if leaven cannot build it; unpublished values are common ones."""
    shape = model_shape(run)
    if shape is None or not run.lr_comparable or not run.tokens:
        return None
    known = terms(run)
    batch = round((run.batch_tokens or 4_194_304) / shape.seq_len) * shape.seq_len
    std = run.init_std or math.sqrt(1 / (3 * shape.d_model))
    ends = (run.residual_init_std or std / math.sqrt(2 * shape.n_layers)) / std
    tuned = {
        key.removeprefix("hyperparameters."): value
        for key, value in known.items()
        if key.startswith("hyperparameters.") and not key.endswith(("optimizer", "init_std"))
    }
    document = {
        "name": run.id,
        "model": shape.model_dump() | {"dropout": known.get("model.dropout", 0.0)},
        "data": {"tokens": run.tokens},
        "batch": {"tokens": batch} | ramp(run, batch, shape.seq_len),
        "schedule": {
            "warmup_tokens": known.get("schedule.warmup_tokens", run.tokens // 100),
            "decay": known.get("schedule.decay", "cosine"),
            "min_lr_ratio": known.get("schedule.min_lr_ratio", 0.1),
        },
        "hyperparameters": tuned
        | {
            "lr": run.peak_lr,
            "init_std": std,
            "modules": {"attention.out": {"init_std": ends}, "mlp.out": {"init_std": ends}},
        },
        "scaling": {"rule": "standard"},
    }
    return Recipe.model_validate(document)


def published() -> Iterator[tuple[PublishedRun, Recipe]]:
    for run in load_runs():
        recipe = as_recipe(run)
        if recipe is not None:
            yield run, recipe
