"""litgpt: the YAML of ``litgpt pretrain --config FILE``.

Source: litgpt 0.5.13 (``config.py``, ``args.py``, ``pretrain.py``). Init, schedule and groups are in its code: every
matrix starts at sqrt(2 / (5 d)), those that end a branch at 1 / (L sqrt(d)); warm-up and cosine; one group, gains
and biases decayed with the rest.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from leaven.interop.configs import formats
from leaven.interop.configs import vocabulary as v
from leaven.interop.configs.losses import common_notes, of_clip, of_ramp, of_schedule, of_start, rounding_notes
from leaven.interop.configs.vocabulary import Export, Given, Loss, Wanted
from leaven.recipe.recipe import Recipe
from leaven.recipe.shape import BRANCH_ENDS, ModelShape

TARGET = "litgpt"
HOLDS: Mapping[str, tuple[Any, ...]] = {
    "positions": ("rope",),
    "activation": ("swiglu", "gelu"),
    "embedding_norm": (False,),
    "qk_norm_per_head": (False,),
    "dropout": (0.0,),
}
ONE_GROUP = "one value for all parameters"
REASONS = dict.fromkeys(v.QUANTITIES, ONE_GROUP) | {
    "init_mean": "gains start at 1",
    "init_std": "it has its own, sqrt(2 / (5 d)) and 1 / (L sqrt(d)) for the ends of branches",
    "weight_decay": f"{ONE_GROUP}, gains and biases too",
    "multiplier": "it has none",
}
PRECISIONS = {"fp32": "32-true", "bf16": "bf16-mixed"}


def export(recipe: Recipe) -> Export:
    """One YAML file; losses and notes are comments, for the parser refuses keys that it does not know."""
    wanted = Wanted.of(recipe)
    shape, losses = v.fitted(recipe.model, HOLDS, TARGET)
    if shape.norm == "layernorm" and not shape.bias:
        losses.append(Loss("model.bias", False, "layer norms would have biases"))
    given = _given(wanted)
    losses += v.compare(wanted, given, REASONS) + _attention(wanted)
    losses += of_start(recipe) + of_ramp(recipe, TARGET) + of_clip(wanted, folded=wanted.unlike(given))
    losses += of_schedule(recipe, TARGET, ("cosine",), "cosine")
    if recipe.data.documents == "isolated":
        losses.append(Loss("data.documents", "isolated", "would be packed"))
    if recipe.precision.compute not in PRECISIONS:
        losses.append(Loss("precision.compute", recipe.precision.compute, "would be bf16: pretrain has no fp16"))
    notes = [*common_notes(wanted, given), *rounding_notes(wanted)]
    notes.append("layout: more than one device is FSDP (HYBRID_SHARD), tp and pp are not there")
    text = f"# {recipe.name}, written by leaven: litgpt pretrain --config THIS_FILE --data ...\n"
    text += formats.commented(losses, notes) + formats.yaml(_document(wanted, shape))
    return Export({"": text}, tuple(losses), tuple(notes))


def _given(wanted: Wanted) -> dict[str, Given]:
    shape = wanted.recipe.model
    base = replace(wanted.hidden, multiplier=1.0)
    given = {}
    for row in wanted.table.rows:
        if not row.role.is_matrix:
            given[row.name] = replace(base, init_mean=row.init_mean, init_std=0.0)
        elif row.module in BRANCH_ENDS:
            given[row.name] = replace(base, init_std=1 / math.sqrt(shape.d_model) / shape.n_layers)
        else:
            given[row.name] = replace(base, init_std=math.sqrt(2 / 5 / shape.d_model))
    return given


def _scalar(wanted: Wanted) -> float:
    """What the attention logits are divided by the root of: a whole number there."""
    return 1 / wanted.table.attention_scale**2


def _attention(wanted: Wanted) -> list[Loss]:
    scalar = _scalar(wanted)
    if math.isclose(scalar, round(scalar), rel_tol=v.SAME):
        return []
    why = f"would be 1 / sqrt({round(scalar)}): it takes a whole number"
    return [Loss("attention scale", wanted.table.attention_scale, why)]


def _document(wanted: Wanted, shape: ModelShape) -> dict[str, Any]:
    recipe, hidden = wanted.recipe, wanted.hidden
    model: dict[str, Any] = {
        "name": recipe.name,
        "block_size": shape.seq_len,
        "n_layer": shape.n_layers,
        "n_embd": shape.d_model,
        "n_head": shape.n_heads,
        "n_query_groups": shape.n_kv_heads,
        "head_size": shape.d_head,
        "intermediate_size": shape.d_ff,
        "vocab_size": shape.vocab_size,
        "padded_vocab_size": shape.vocab_size,
        "norm_class_name": "RMSNorm" if shape.norm == "rmsnorm" else "LayerNorm",
        "norm_eps": shape.norm_eps,
        "norm_qk": shape.qk_norm,
        "parallel_residual": False,
        "shared_attention_norm": False,
        "rotary_percentage": 1.0,
        "rope_base": round(shape.rope_theta),
        "bias": shape.bias,
        "attn_bias": shape.bias,
        "mlp_class_name": "LLaMAMLP" if shape.gated else "GptNeoxMLP",
        "gelu_approximate": "tanh",
    }
    if round(_scalar(wanted)) != shape.d_head:
        model["attention_scores_scalar"] = round(_scalar(wanted))
    return {
        "model_name": recipe.name,
        "model_config": model,
        "out_dir": f"out/{recipe.name}",
        "precision": PRECISIONS.get(recipe.precision.compute, "bf16-mixed"),
        "train": {
            "global_batch_size": wanted.sequences,
            "micro_batch_size": wanted.micro_batch,
            "max_tokens": recipe.data.tokens,
            "max_seq_length": shape.seq_len,
            "lr_warmup_steps": wanted.in_steps(recipe.schedule.warmup_tokens),
            "max_norm": recipe.hyperparameters.grad_clip.limit or None,
            "min_lr": recipe.schedule.min_lr_ratio * hidden.lr,
            "tie_embeddings": shape.tied_embeddings,
        },
        "optimizer": {
            "class_path": "torch.optim.AdamW" if wanted.decoupled else "torch.optim.Adam",
            "init_args": {
                "lr": hidden.lr,
                "betas": [hidden.beta1, hidden.beta2],
                "eps": hidden.eps,
                "weight_decay": hidden.weight_decay,
            },
        },
        "devices": recipe.layout.dp,
        "seed": recipe.data.seed,
    }
