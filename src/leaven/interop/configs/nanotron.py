"""nanotron: the YAML of ``run_train.py --config-file FILE``.

Source: huggingface/nanotron ``src/nanotron/config/config.py`` @00708b8, ``models_config.py`` @025f314,
``scaling/parametrization.py`` @056c058, ``helpers.py`` (2025; the repository has been at rest since). Version 0.4 on
the package index (2024) has another form. One group but for a pattern of what is not decayed; the ends of branches
(its row-parallel layers) start at std / sqrt(2 L), or, with ``scaling_method: NONE``, as the rest.
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

TARGET = "nanotron"
HOLDS: Mapping[str, tuple[Any, ...]] = {
    "positions": ("rope",),
    "norm": ("rmsnorm",),
    "activation": ("swiglu",),
    "qk_norm": (False,),
    "qk_norm_per_head": (False,),
    "embedding_norm": (False,),
    "d_attention": (None,),
    "bias": (False,),
    "dropout": (0.0,),
}
REASONS = dict.fromkeys(v.QUANTITIES, "one value for all parameters") | {
    "init_mean": "gains start at 1",
    "init_std": "one for all, over sqrt(2 L) for the ends of branches if so chosen",
    "weight_decay": "one for all, and none for what a pattern names",
    "multiplier": "it has none",
}
STYLES = {"cosine": "cosine", "linear": "linear", "wsd": "1-sqrt"}
GAINS = [".*layernorm.*", ".*layer_norm.*"]
SCALINGS = {"NUM_LAYERS": True, "NONE": False}


def export(recipe: Recipe) -> Export:
    """One YAML file; losses and notes are comments, for the parser refuses keys that it does not know."""
    wanted = Wanted.of(recipe)
    shape, losses = v.fitted(recipe.model, HOLDS, TARGET)
    given = {method: _given(wanted, scaled) for method, scaled in SCALINGS.items()}
    tried = {method: v.compare(wanted, each, REASONS) for method, each in given.items()}
    method = min(tried, key=lambda each: v.weight(tried[each]))
    losses += tried[method]
    if not math.isclose(wanted.table.attention_scale, 1 / math.sqrt(recipe.model.d_head), rel_tol=v.SAME):
        why = "would be 1 / sqrt(d_head)"
        losses.append(Loss("attention scale", wanted.table.attention_scale, why))
    losses += of_start(recipe) + of_ramp(recipe, TARGET) + of_clip(wanted, folded=wanted.unlike(given[method]))
    losses += of_schedule(recipe, TARGET, [*STYLES, "constant"], "cosine")
    if not wanted.decoupled:
        losses.append(Loss("hyperparameters.optimizer", "adam", "would be adamw"))
    if recipe.data.documents == "isolated":
        losses.append(Loss("data.documents", "isolated", "would be packed"))
    if recipe.precision.compute == "fp16":
        losses.append(Loss("precision.compute", "fp16", "would be bf16: it has no loss scale"))
    notes = [*common_notes(wanted, given[method]), *rounding_notes(wanted)]
    notes.append("its first step is at lr 0, leaven's at that of the end of the step: the schedule is one step later")
    if recipe.layout.zero > 1:
        notes.append(f"zero {recipe.layout.zero}: nanotron has 0 and 1")
    if recipe.layout.cp > 1:
        notes.append(f"cp {recipe.layout.cp}: not written, so the ranks are dp x tp x pp")
    text = f"# {recipe.name}, written by leaven: torchrun ... run_train.py --config-file THIS_FILE; add data_stages\n"
    text += formats.commented(losses, notes) + formats.yaml(_document(wanted, shape, method))
    return Export({"": text}, tuple(losses), tuple(notes))


def _given(wanted: Wanted, scaled: bool) -> dict[str, Given]:
    recipe = wanted.recipe
    base = replace(wanted.hidden, multiplier=1.0)
    decay = base.weight_decay if recipe.hyperparameters.decay_norm_and_bias else 0.0
    given = {}
    for row in wanted.table.rows:
        if not row.role.is_matrix:
            given[row.name] = replace(base, init_mean=row.init_mean, init_std=0.0, weight_decay=decay)
        elif row.module in BRANCH_ENDS and scaled:
            given[row.name] = replace(base, init_std=base.init_std / math.sqrt(2 * recipe.model.n_layers))
        else:
            given[row.name] = base
    return given


def _document(wanted: Wanted, shape: ModelShape, method: str) -> dict[str, Any]:
    recipe, hidden, layout = wanted.recipe, wanted.hidden, wanted.recipe.layout
    hyper = recipe.hyperparameters
    return {
        "general": {"project": "leaven", "run": recipe.name, "seed": recipe.data.seed},
        "parallelism": {
            "dp": layout.dp,
            "tp": layout.tp,
            "pp": layout.pp,
            "pp_engine": "afab" if layout.schedule == "gpipe" else "1f1b",
            "tp_mode": "REDUCE_SCATTER",
            "tp_linear_async_communication": True,
            "recompute_layer": layout.recompute == "full",
        },
        "model": {
            "dtype": "float32" if recipe.precision.compute == "fp32" else "bfloat16",
            "init_method": {"std": hidden.init_std, "scaling_method": method},
            "make_vocab_size_divisible_by": 1,
            "model_config": {
                "is_llama_config": True,
                "hidden_act": "silu",
                "hidden_size": shape.d_model,
                "intermediate_size": shape.d_ff,
                "max_position_embeddings": shape.seq_len,
                "num_attention_heads": shape.n_heads,
                "num_hidden_layers": shape.n_layers,
                "num_key_value_heads": shape.n_kv_heads,
                "rms_norm_eps": shape.norm_eps,
                "rope_theta": shape.rope_theta,
                "rope_interleaved": False,
                "tie_word_embeddings": shape.tied_embeddings,
                "vocab_size": shape.vocab_size,
            },
        },
        "tokens": {
            "sequence_length": shape.seq_len,
            "train_steps": wanted.steps,
            "micro_batch_size": wanted.micro_batch,
            "batch_accumulation_per_replica": wanted.accumulate,
        },
        "optimizer": {
            "optimizer_factory": {
                "name": "adamW",
                "adam_beta1": hidden.beta1,
                "adam_beta2": hidden.beta2,
                "adam_eps": hidden.eps,
                "torch_adam_is_fused": True,
            },
            "zero_stage": min(layout.zero, 1),
            "weight_decay": hidden.weight_decay,
            "weight_decay_exclude_named_params": [] if hyper.decay_norm_and_bias else GAINS,
            "clip_grad": hyper.grad_clip.limit or None,
            "accumulate_grad_in_fp32": True,
            "learning_rate_scheduler": _schedule(wanted),
        },
    }


def _schedule(wanted: Wanted) -> dict[str, Any]:
    """Its floor is a learning rate: right, since all parameters have the same."""
    schedule, lr = wanted.recipe.schedule, wanted.hidden.lr
    warmup = wanted.in_steps(schedule.warmup_tokens)
    cooldown = wanted.in_steps(wanted.cooldown_tokens) if schedule.decay == "wsd" else wanted.steps - warmup
    return {
        "learning_rate": lr,
        "lr_warmup_steps": warmup,
        "lr_warmup_style": "linear",
        "lr_decay_style": STYLES.get(schedule.decay, "cosine"),
        "lr_decay_starting_step": wanted.steps - cooldown,
        "lr_decay_steps": cooldown,
        "min_decay_lr": lr if schedule.decay == "constant" else lr * schedule.min_lr_ratio,
    }
