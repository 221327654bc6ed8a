"""transformers: a folder with config.json, training_args.json, parameters.json and prepare.py.

Sources: transformers 5.23 (``training_args.py``, ``optimization.py``, ``trainer.py``, the models' configuration
files). A plain model has no multipliers, so they are folded into what its weights start from, and into lr, eps and
decay of each. ``TrainingArguments`` knows one lr and one decay: what each parameter starts from and gets is in
parameters.json, under the model's own names, and prepare.py (which needs no leaven) applies it::

    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained("FOLDER"))
    optimizer = prepare(model, "FOLDER/parameters.json")
    Trainer(model, arguments, train_dataset=..., optimizers=(optimizer, None))

The schedules of ``optimization.py`` multiply each group's own lr. ``cosine_warmup_with_min_lr`` is at the end of each
step where leaven is; the others are at its beginning.
"""

import json
from pathlib import Path
from typing import Any

from leaven.interop.architectures import Architecture
from leaven.interop.configs import formats
from leaven.interop.configs import vocabulary as v
from leaven.interop.configs.losses import common_notes, of_clip, of_floor, of_ramp, of_start, rounding_notes
from leaven.interop.configs.vocabulary import Export, Given, Loss, Wanted
from leaven.interop.families import ARCHITECTURES, LLAMA, QWEN3
from leaven.recipe.recipe import Recipe
from leaven.recipe.shape import ModelShape

TARGET = "transformers"
FUSED = "query, key and value are one tensor in this architecture, which gets what the query would"
REASONS = dict.fromkeys(v.QUANTITIES, FUSED) | {"init_std": "unreachable", "multiplier": "a plain model has none"}
SCHEDULES = {
    "cosine": "cosine_warmup_with_min_lr",
    "linear": "polynomial",
    "wsd": "warmup_stable_decay",
    "inverse_sqrt": "inverse_sqrt",
    "constant": "constant_with_warmup",
}


def export(recipe: Recipe) -> Export:
    """Four files; with ``optimizers=(prepare(...), None)`` the Trainer's own run is the recipe's."""
    architecture, shape, losses = nearest(recipe.model)
    wanted = Wanted.of(recipe)
    parameters, given = _parameters(architecture, shape, wanted)
    losses += v.compare(wanted, given, REASONS, plain=True)
    losses += of_start(recipe) + of_ramp(recipe, "the Trainer") + of_clip(wanted, folded=wanted.rescaled)
    losses += _warm_up(recipe) + of_floor(wanted, TARGET)
    if recipe.data.documents == "isolated":
        losses.append(Loss("data.documents", "isolated", "documents are as your data set packs them"))
    notes = [*common_notes(wanted), *rounding_notes(wanted), *_notes(wanted)]
    config = architecture.config(shape) | {
        "initializer_range": wanted.hidden.init_std,
        "use_cache": False,
        # Keys that a config class does not know become attributes; TrainingArguments refuse them.
        # The batch of TrainingArguments is one process's: `leaven import` reads here how many there are.
        "leaven": {"lost": [loss.text for loss in losses], "notes": notes, "dp": recipe.layout.dp},
    }
    document = {"optimizer": recipe.hyperparameters.optimizer, "parameters": parameters}
    files = {
        "config.json": formats.json_text(config),
        "training_args.json": formats.json_text(_arguments(wanted)),
        "parameters.json": formats.json_text(document),
        "prepare.py": Path(__file__).with_name("prepare.py").read_text(encoding="utf-8"),
    }
    return Export(files, tuple(losses), tuple(notes))


def nearest(shape: ModelShape) -> tuple[Architecture, ModelShape, list[Loss]]:
    """The architecture that loses least of a shape, and the shape that it makes of it.

    Weights without biases can go into an architecture that has them, as zeros; a training would move them.
    """
    tried = []
    for architecture in ARCHITECTURES:
        changes = architecture.misfits(shape)
        if architecture.holds.get("bias") == (True, False) and not shape.bias:
            changes["bias"] = True
        tried.append((len(changes), changes, architecture))
    _, changes, architecture = min(tried, key=lambda each: each[0])
    losses = [
        Loss(f"model.{key}", getattr(shape, key), f"would be {json.dumps(value)}: all that {architecture.name} has")
        for key, value in changes.items()
    ]
    if shape.dropout and architecture in (LLAMA, QWEN3):
        losses.append(Loss("model.dropout", shape.dropout, f"{architecture.name} has it on attention weights only"))
    if shape.dropout and architecture.model_type == "bloom":
        losses.append(Loss("model.dropout", shape.dropout, f"{architecture.name} has none on what enters block 0"))
    return architecture, ModelShape.model_validate(shape.model_dump() | changes), losses


def _parameters(
    architecture: Architecture, shape: ModelShape, wanted: Wanted
) -> tuple[dict[str, dict[str, Any]], dict[str, Given]]:
    """What each of their tensors starts from and gets, and what that is for each of ours."""
    plain = wanted.plain
    fallback = Given(
        0.0, 0.0, wanted.hidden.lr, 0.0, *(getattr(wanted.hidden, key) for key in ("beta1", "beta2", "eps"))
    )
    parameters: dict[str, dict[str, Any]] = {}
    given = {}
    for stored in architecture.tensors(shape):
        parts = [plain.get(name, fallback) for name in stored.parts]
        first = parts[0]
        parameters[stored.name] = {
            "init_mean": first.init_mean,
            "init_std": [part.init_std for part in parts] if len(parts) > 1 else first.init_std,
            "lr": first.lr,
            "betas": [first.beta1, first.beta2],
            "eps": first.eps,
            "weight_decay": first.weight_decay,
        }
        if len(parts) > 1:
            rows = [each[0] for each in stored.shapes]
            parameters[stored.name] |= {"rows": rows, "heads": stored.heads, "transposed": stored.transposed}
        for name, part in zip(stored.parts, parts, strict=True):
            if name in plain:  # the start of each part is its own
                given[name] = Given(
                    first.init_mean, part.init_std, first.lr, first.weight_decay, first.beta1, first.beta2, first.eps
                )
    return parameters, given


def _arguments(wanted: Wanted) -> dict[str, Any]:
    """``TrainingArguments``; the values of groups are those of most matrices, for who leaves prepare.py out."""
    recipe, hidden = wanted.recipe, wanted.hidden
    schedule, layout = recipe.schedule, recipe.layout
    arguments: dict[str, Any] = {
        "output_dir": recipe.name,
        "max_steps": wanted.steps,
        "per_device_train_batch_size": wanted.micro_batch,
        "gradient_accumulation_steps": wanted.accumulate,
        "learning_rate": hidden.lr,
        "lr_scheduler_type": SCHEDULES[schedule.decay],
        "warmup_steps": wanted.in_steps(schedule.warmup_tokens),
        "optim": "adamw_torch",
        "weight_decay": hidden.weight_decay,
        "adam_beta1": hidden.beta1,
        "adam_beta2": hidden.beta2,
        "adam_epsilon": hidden.eps,
        "max_grad_norm": recipe.hyperparameters.grad_clip.limit,
        "bf16": recipe.precision.compute == "bf16",
        "fp16": recipe.precision.compute == "fp16",
        "seed": recipe.data.seed,
        "gradient_checkpointing": layout.recompute != "none",
        "torch_compile": layout.compile,
    }
    match schedule.decay:
        case "cosine":
            arguments["lr_scheduler_kwargs"] = {"min_lr_rate": schedule.min_lr_ratio}
        case "linear":
            end = schedule.min_lr_ratio * hidden.lr
            arguments["lr_scheduler_kwargs"] = {"lr_end": end, "power": 1.0}
        case "wsd":
            arguments["lr_scheduler_kwargs"] = {
                "num_decay_steps": wanted.in_steps(wanted.cooldown_tokens),
                "decay_type": "1-sqrt",
                "min_lr_ratio": schedule.min_lr_ratio,
            }
        case _:
            pass
    return arguments


def _warm_up(recipe: Recipe) -> list[Loss]:
    schedule = recipe.schedule
    if schedule.decay != "wsd" or not schedule.min_lr_ratio or not schedule.warmup_tokens:
        return []
    floor = f"{schedule.min_lr_ratio:g} of the peak"
    return [
        Loss("schedule.warmup_tokens", schedule.warmup_tokens, f"would start from {floor}: its wsd has one floor")
    ]


def _notes(wanted: Wanted) -> list[str]:
    recipe, notes = wanted.recipe, []
    if recipe.schedule.decay != "cosine" and recipe.schedule.warmup_tokens:
        notes.append(
            "the first step is at lr 0, leaven's at that of the end of the step: the schedule is one step later"
        )
    if recipe.layout.tp * recipe.layout.pp > 1 or recipe.layout.zero:
        notes.append("tp, pp and zero are left to accelerate, FSDP or DeepSpeed: leaven export config --to deepspeed")
    if recipe.layout.dp > 1:
        notes.append(f"start {recipe.layout.dp} processes: the batch is for dp = {recipe.layout.dp}")
    if recipe.model.qk_norm_per_head:
        notes.append("qk_norm_per_head: this architecture shares the gains of queries and keys")
    return notes
