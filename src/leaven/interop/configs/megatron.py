"""Megatron-LM: an argument list as a bash array.

Sources (NVIDIA/Megatron-LM, 2026): ``megatron/training/arguments.py`` and ``training/config/training_config.py``
@008e9cd (flags), ``training/argument_utils.py`` @0035795 (activations: gelu is the tanh form only where it is fused
with a bias), ``core/transformer/transformer_config.py`` @002526d (init, muP), ``core/optimizer/__init__.py`` @0044db1
(what is decayed, decoupled lr, muP's lr and eps), ``core/models/gpt/gpt_model.py`` @007562f (init of the output
layer), ``core/num_microbatches_calculator.py`` (batch), ``core/optimizer_param_scheduler.py`` of megatron-core 0.16.1
(schedules; they count samples).

``--rampup-batch-size`` is still parsed and read by nothing since pull request 4411 (April 2026): a ramp is written
as ``--step-batch-size-schedule``, which takes tokens where ``--seq-length`` is known, and which does not go together
with ``--global-batch-size``.

There are two ways to give lrs: one ``--lr`` (with ``--decoupled-lr`` for embedding and output layer together), and
``--use-mup`` in the form of Table 8 of Yang et al. 2022. That is written which loses less.
"""

import math
import shlex
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from leaven.interop.configs import formats
from leaven.interop.configs import vocabulary as v
from leaven.interop.configs.losses import common_notes, of_clip, of_ramp_rule, of_start
from leaven.interop.configs.vocabulary import Export, Given, Loss, Wanted
from leaven.recipe.recipe import Recipe
from leaven.recipe.shape import BRANCH_ENDS, ModelShape, Role

Flags = dict[str, Any]
"""By name without dashes; True is a flag without a value."""

TARGET = "Megatron"
HOLDS: Mapping[str, tuple[Any, ...]] = {
    "positions": ("rope", "learned"),
    "activation": ("gelu", "swiglu", "squared_relu"),
    "qk_norm_per_head": (False,),
    "embedding_norm": (False,),
}
REASONS = {
    "init_mean": "gains start at 1",
    "init_std": "--init-method-std for all matrices, over sqrt(2 L) for those that end a branch (no flag for that), "
    "and --embedding-init-method-std",
    "lr": "one --lr, and --decoupled-lr for embedding and output layer together; with --use-mup matrices have "
    "1 / width of it",
    "weight_decay": "one --weight-decay for matrices, none for gains and biases",
    "beta1": "one --adam-beta1",
    "beta2": "one --adam-beta2",
    "eps": "one --adam-eps; with --use-mup hidden matrices have 1 / width of it",
    "multiplier": "none without --use-mup, and 1 / width on the logits with it",
}
DECAYS = {
    "cosine": "cosine",
    "linear": "linear",
    "wsd": "WSD",
    "inverse_sqrt": "inverse-square-root",
    "constant": "constant",
}
SEED_FOR_0 = 1234  # Megatron's default; it takes seeds above 0 only
SHARDING = {2: "optim_grads", 3: "optim_grads_params"}


def export(recipe: Recipe) -> Export:
    """The argument list of a recipe, for ``pretrain_gpt.py``."""
    wanted = Wanted.of(recipe)
    shape, losses = v.fitted(recipe.model, HOLDS, TARGET)
    if shape.norm == "layernorm" and not shape.bias:
        losses.append(Loss("model.bias", False, "layer norms would have biases: Megatron's always do"))
    if shape.activation == "gelu" and not shape.bias:
        losses.append(
            Loss("model.activation", "gelu", "would be the exact one: the tanh form comes with biases only")
        )
    candidates = [_standard(wanted)] + ([_mup(wanted)] if recipe.base.width < shape.d_model else [])
    groups, given, scale = min(candidates, key=lambda each: v.weight(_unlike(wanted, each[1], each[2])))
    losses += _unlike(wanted, given, scale)
    losses += of_start(recipe) + of_ramp_rule(recipe, TARGET) + of_clip(wanted, folded=wanted.unlike(given))
    if not wanted.decoupled:
        why = "would be adamw: no argument turns off decoupled_weight_decay of OptimizerConfig"
        losses.append(Loss("hyperparameters.optimizer", "adam", why))
    if recipe.hyperparameters.decay_norm_and_bias:
        losses.append(Loss("hyperparameters.decay_norm_and_bias", True, "gains and biases would not be decayed"))
    flags = (
        _model(shape, recipe)
        | groups
        | _optimiser(wanted)
        | _batch(wanted)
        | _schedule(wanted, groups)
        | _layout(recipe)
    )
    notes = [*common_notes(wanted, given), *_notes(wanted, flags)]
    return Export({"": _text(recipe.name, flags, losses, notes)}, tuple(losses), tuple(notes))


def _unlike(wanted: Wanted, given: Mapping[str, Given], scale: float) -> list[Loss]:
    losses = v.compare(wanted, given, REASONS)
    if not math.isclose(scale, wanted.table.attention_scale, rel_tol=v.SAME):
        ours = wanted.table.attention_scale
        said, instead = v.told_apart([ours], [scale])
        losses.append(Loss("attention scale", said, f"would be {instead}: no flag for it without --use-mup"))
    return losses


# Groups -----------------------------------------------------------------------------------------------------------


def _standard(wanted: Wanted) -> tuple[Flags, dict[str, Given], float]:
    """One value of each for all, but for the std of embeddings and the lr of both ends."""
    hidden, rows = wanted.hidden, wanted.rows
    ends = {row.name: rows[row.name] for row in wanted.table.rows if row.module in {"embedding", "unembedding"}}
    lrs = {given.lr for given in ends.values()}
    lr = hidden.lr
    decoupled = lrs.pop() if len(lrs) == 1 else lr
    embedding = next(iter(ends.values())).init_std
    flags: Flags = {"lr": lr, "init-method-std": hidden.init_std, "adam-eps": hidden.eps}
    if decoupled != lr:
        flags["decoupled-lr"] = decoupled
    if embedding != hidden.init_std:
        flags["embedding-init-method-std"] = embedding
    base = replace(hidden, multiplier=1.0)
    given = {}
    for row in wanted.table.rows:
        mine = replace(base, lr=decoupled) if row.name in ends else base
        given[row.name] = _start(replace(mine, init_mean=0.0), row.role, row.module, wanted, embedding)
    return flags, given, 1 / math.sqrt(wanted.recipe.model.d_head)


def _mup(wanted: Wanted) -> tuple[Flags, dict[str, Given], float]:
    """``--use-mup``: ``m`` is width / base width; the values are those of what does not move, the embedding's."""
    shape, base = wanted.recipe.model, wanted.recipe.base_shape
    m = shape.d_model / base.d_model
    rows = wanted.rows
    embedding, hidden = rows["embedding.weight"], wanted.hidden
    flags: Flags = {
        "use-mup": True,
        "mup-base-hidden-size": base.d_model,
        "mup-base-head-dim": base.d_head,
        "lr": embedding.lr,
        "init-method-std": hidden.init_std * math.sqrt(m),
        "embedding-init-method-std": embedding.init_std,
        "adam-eps": hidden.eps * m,
    }
    vector = replace(hidden, init_mean=0.0, lr=embedding.lr, eps=hidden.eps * m, multiplier=1.0)
    matrix = replace(vector, lr=embedding.lr / m, eps=hidden.eps)
    given = {}
    for row in wanted.table.rows:
        mine = matrix if row.role is Role.HIDDEN_WEIGHT else vector
        if row.role in {Role.UNEMBEDDING, Role.TIED_EMBEDDING}:
            mine = replace(mine, multiplier=1 / m, init_std=embedding.init_std)
            given[row.name] = mine
        else:
            given[row.name] = _start(mine, row.role, row.module, wanted, embedding.init_std)
    return flags, given, math.sqrt(base.d_head) / shape.d_head


def _start(given: Given, role: Role, module: str, wanted: Wanted, embedding: float) -> Given:
    """What Megatron starts a parameter from, and whether it decays it."""
    if not role.is_matrix:
        gain = module.startswith("norm.") and not role.endswith("bias")
        return replace(given, init_mean=1.0 if gain else 0.0, init_std=0.0, weight_decay=0.0)
    if role in {Role.EMBEDDING, Role.TIED_EMBEDDING}:
        return replace(given, init_std=embedding)
    if module in BRANCH_ENDS:
        return replace(given, init_std=given.init_std / math.sqrt(2 * wanted.recipe.model.n_layers))
    return given


# Flags ------------------------------------------------------------------------------------------------------------


def _model(shape: ModelShape, recipe: Recipe) -> Flags:
    flags: Flags = {
        "num-layers": shape.n_layers,
        "hidden-size": shape.d_model,
        "ffn-hidden-size": shape.d_ff,
        "num-attention-heads": shape.n_heads,
        "kv-channels": shape.d_head,
        "seq-length": shape.seq_len,
        "max-position-embeddings": shape.seq_len,
        "position-embedding-type": "rope" if shape.positions == "rope" else "learned_absolute",
        "normalization": "RMSNorm" if shape.norm == "rmsnorm" else "LayerNorm",
        "norm-epsilon": shape.norm_eps,
        "attention-dropout": shape.dropout,
        "hidden-dropout": shape.dropout,
        "vocab-size": shape.vocab_size,
        "make-vocab-size-divisible-by": _vocabulary_multiple(shape.vocab_size, recipe.layout.tp),
    }
    if shape.n_kv_heads != shape.n_heads:
        flags |= {"group-query-attention": True, "num-query-groups": shape.n_kv_heads}
    if shape.positions == "rope":
        flags |= {"rotary-base": round(shape.rope_theta)}
    for flag, there in {
        "swiglu": shape.activation == "swiglu",
        "squared-relu": shape.activation == "squared_relu",
        "no-bias-gelu-fusion": shape.activation == "gelu" and not shape.bias,
        "qk-layernorm": shape.qk_norm,
        "disable-bias-linear": not shape.bias,
        "untie-embeddings-and-output-weights": not shape.tied_embeddings,
    }.items():
        if there:
            flags[flag] = True
    if recipe.data.documents == "isolated":
        flags |= {"reset-position-ids": True, "reset-attention-mask": True, "eod-mask-loss": True}
    return flags


def _vocabulary_multiple(vocab_size: int, tp: int) -> int:
    """What Megatron pads the vocabulary to, times tp, such that it does not."""
    return math.gcd(vocab_size, 128 * tp) // tp or 1


def _optimiser(wanted: Wanted) -> Flags:
    hyper, hidden = wanted.recipe.hyperparameters, wanted.hidden
    flags: Flags = {
        "optimizer": "adam",
        "weight-decay": hidden.weight_decay,
        "adam-beta1": hidden.beta1,
        "adam-beta2": hidden.beta2,
        "clip-grad": hyper.grad_clip.limit,
    }
    precision = wanted.recipe.precision.compute
    return flags | ({} if precision == "fp32" else {precision: True})


def _batch(wanted: Wanted) -> Flags:
    recipe = wanted.recipe
    seq_len = recipe.model.seq_len
    flags: Flags = {"micro-batch-size": wanted.micro_batch}
    if len(recipe.batch.sizes) == 1:
        flags["global-batch-size"] = wanted.sequences
    else:
        # Where the recipe's own steps change their size, which is a whole number of sequences.
        stages = [f"{each.first_token}:{each.batch_tokens // seq_len}" for each in recipe.batches.segments]
        flags["step-batch-size-schedule"] = " ".join(stages)
    return flags | {"train-samples": -(-recipe.data.tokens // seq_len), "seed": recipe.data.seed or SEED_FOR_0}


def _schedule(wanted: Wanted, groups: Flags) -> Flags:
    recipe, schedule = wanted.recipe, wanted.recipe.schedule
    seq_len = recipe.model.seq_len
    flags: Flags = {
        "lr-decay-style": DECAYS[schedule.decay],
        "lr-decay-samples": -(-recipe.data.tokens // seq_len),
        "lr-warmup-samples": round(schedule.warmup_tokens / seq_len),
        "min-lr": groups["lr"] * schedule.min_lr_ratio,
    }
    if "decoupled-lr" in groups:
        flags["decoupled-min-lr"] = groups["decoupled-lr"] * schedule.min_lr_ratio
    if schedule.decay == "wsd":
        flags |= {"lr-wsd-decay-style": "minus_sqrt", "lr-wsd-decay-samples": round(wanted.cooldown_tokens / seq_len)}
    return flags


def _layout(recipe: Recipe) -> Flags:
    layout = recipe.layout
    flags: Flags = {
        "tensor-model-parallel-size": layout.tp,
        "pipeline-model-parallel-size": layout.pp,
    }
    if layout.cp > 1:
        flags["context-parallel-size"] = layout.cp
    if layout.zero == 1:
        flags["use-distributed-optimizer"] = True
    elif layout.zero:
        flags |= {"use-megatron-fsdp": True, "data-parallel-sharding-strategy": SHARDING[layout.zero]}
        flags["use-distributed-optimizer"] = True
    if layout.stages_per_rank > 1:
        flags["num-virtual-stages-per-pipeline-rank"] = layout.stages_per_rank
    if layout.recompute == "full":
        flags |= {"recompute-granularity": "full", "recompute-method": "uniform", "recompute-num-layers": 1}
    elif layout.recompute == "selective":
        flags["recompute-granularity"] = "selective"
    return flags


def _notes(wanted: Wanted, flags: Flags) -> list[str]:
    recipe, notes = wanted.recipe, []
    if not recipe.data.seed:
        notes.append(f"--seed {SEED_FOR_0} is data.seed = 0: Megatron wants a seed above 0, and this is its default")
    if "step-batch-size-schedule" in flags:
        notes.append(
            "a current Megatron-LM parses --rampup-batch-size and ignores it (pull request 4411): the ramp is "
            "--step-batch-size-schedule, in tokens, and --global-batch-size must not stand beside it"
        )
    if "embedding-init-method-std" in flags:
        notes.append(
            "--embedding-init-method-std: its help says that embeddings are not decayed then; older versions do so, "
            "core/optimizer of 2026 decays them"
        )
    if recipe.model.vocab_size % recipe.layout.tp:
        notes.append(f"the vocabulary is padded to a multiple of tp = {recipe.layout.tp}")
    if recipe.model.positions == "rope" and recipe.model.rope_theta != flags["rotary-base"]:
        notes.append(f"--rotary-base is a whole number: rope_theta {recipe.model.rope_theta:g}")
    if recipe.layout.schedule in {"gpipe", "zero-bubble"}:
        notes.append(f"pipeline schedule {recipe.layout.schedule}: 1F1B here, which changes no number")
    if recipe.layout.dp > 1:
        notes.append(f"dp {recipe.layout.dp} follows from the number of processes: {recipe.layout.ranks}")
    notes.append(
        "warm-up: Megatron takes its first step at lr 0, leaven at that of the end of the step: one step later"
    )
    return notes


def _text(name: str, flags: Flags, losses: list[Loss], notes: list[str]) -> str:
    head = (
        f"# {name}, written by leaven; with --data-path and a tokenizer:\n"
        '# torchrun ... pretrain_gpt.py "${MEGATRON_ARGS[@]}" ...\n'
    )
    lines = [f"    --{flag}" + ("" if value is True else f" {_word(value)}") for flag, value in flags.items()]
    return head + formats.commented(losses, notes) + "MEGATRON_ARGS=(\n" + "\n".join(lines) + "\n)\n"


def _word(value: Any) -> str:
    return shlex.quote(value) if isinstance(value, str) else repr(formats.digits(value))
