"""Imports a recipe from a config.json of transformers and the training_args.json in the same folder.

A checkpoint of the Trainer has trainer_state.json in place of training_args.json. Its training_args.bin is not read:
reading a pickle runs its code.
"""

import math
import tomllib
from itertools import chain
from pathlib import Path
from typing import Any

from leaven.errors import InputError
from leaven.interop.configs.draft import Draft, Imported, Settings, as_number
from leaven.interop.huggingface_config import HuggingFaceModel, read_config, read_json
from leaven.recipe.shape import ModelShape

CONFIG, ARGUMENTS, STATE, PICKLE = "config.json", "training_args.json", "trainer_state.json", "training_args.bin"
TABLE = tomllib.loads((Path(__file__).parent / "targets/transformers_arguments.toml").read_text(encoding="utf-8"))
IGNORED = tuple(chain(*TABLE["ignored"].values()))
DEFAULT = "TrainingArguments' default of"  # how the reason of a default begins
# Values that TrainingArguments give and that change what is trained, except those that `Draft.finish` estimates.
GIVEN = [
    *("schedule.decay", "schedule.min_lr_ratio", "precision.compute"),
    *(
        row["path"]
        for row in TABLE["fields"].values()
        if row.get("path", "").startswith(("hyperparameters.", "data."))
    ),
]
GIVEN.remove("hyperparameters.lr")


def read(path: Path, name: str, ranks: int | None = None) -> Imported:
    """Convert a folder with config.json, and usually training_args.json, to a recipe called ``name``.

    ``path``: the folder or one of these files. ``ranks``: number of processes. Default: ``leaven.dp`` in config.json,
    which leaven's exports have, or 1.
    """
    config_path, arguments_path = _paths(path)
    draft = Draft(str(path))
    model = read_config(config_path)
    architecture, shape = model.architecture, model.shape
    read_model(draft, model)
    if architecture.scaled_branch_ends:
        for module in shape.branch_ends:
            why = f"{architecture.name} draws this matrix with initializer_range / sqrt(2 n_layers)"
            draft.set(f"hyperparameters.modules.{module}.init_std", 1 / math.sqrt(2 * shape.n_layers), why)
    if architecture.factors(shape, model.config):
        why = "leaven's models have no such factors, so a new run has other initial values"
        draft.unread.append(f"factors by which {architecture.name} multiplies the embedding or the logits: {why}")
    _training(draft, model, arguments_path, ranks)
    has = f"leaven reads {ARGUMENTS if arguments_path else CONFIG} instead"
    for file, values in (
        ("parameters.json", "settings of single parameters, and perhaps a schedule"),
        ("automodel.yaml", "all settings of the training"),
        ("tokenizer.json", "the model's tokenizer"),
    ):
        instead = "to use it, set data.tokenizer" if file == "tokenizer.json" else has
        draft.unread += [f"{file}: {values}; {instead}"] * (config_path.parent / file).exists()
    return draft.finish(name, shape)


def read_model(draft: Draft, model: HuggingFaceModel) -> None:
    """Set what config.json says about the model and its losses, and list what leaven's models do not have."""
    architecture, shape = model.architecture, model.shape
    draft.set_architecture(model, CONFIG)
    without = f"the bias on the logits that {architecture.name} also trains: leaven's models have none"
    draft.unread += [without] * architecture.logits_bias
    if model.further_tokens:
        draft.unread.append("layers for multi-token prediction: leaven has none")
    if shape.experts and shape.experts.balanced_by_loss:
        _balance_loss(draft, model.config, shape.n_layers - shape.experts.dense_layers, shape.experts.active)


def _training(draft: Draft, model: HuggingFaceModel, arguments_path: Path | None, ranks: int | None) -> None:
    """Set the draft's training values from ``arguments_path``, or without it from trainer_state.json and defaults."""
    shape = model.shape
    leaven = model.config.get("leaven")  # what an export of leaven adds
    if not isinstance(leaven, dict):
        longest = f"model.seq_len: {shape.seq_len:,} is used, the longest sequence of the model"
        draft.unknown.append(
            f"{longest}; if you train on shorter sequences, correct model.seq_len, batch, tokens and warm-up"
        )
    state_path, pickle_path = model.folder / STATE, model.folder / PICKLE
    if arguments_path is None and pickle_path.exists():
        draft.unread.append(
            f"{PICKLE}: leaven reads no pickles; write trainer.args.to_json_string() to {ARGUMENTS} in its folder"
        )
    by_trainer = arguments_path is not None or state_path.exists() or pickle_path.exists()
    exported = leaven.get("dp") if isinstance(leaven, dict) else None
    if ranks is not None:
        draft.set("layout.dp", ranks, "--ranks")
    elif by_trainer and isinstance(exported, int) and exported > 0:
        draft.set("layout.dp", exported, f"leaven.dp of {CONFIG}")
    elif by_trainer:
        draft.unknown.append(
            "layout.dp: 1 is used, so the batch may be too small; give the number of processes with --ranks N"
        )
    ranks = draft.values.get("layout.dp", 1)
    if arguments_path is not None:
        _arguments(draft, shape, read_json(arguments_path), ranks)
    elif by_trainer:
        if state_path.exists():
            _state(draft, shape.seq_len, read_json(state_path), ranks)
        _arguments(draft, shape, {}, ranks)
        defaults = [path for path, why in draft.why.items() if why.startswith(DEFAULT)]
        draft.unknown.append(f"{', '.join(defaults)}: {ARGUMENTS} is missing, so the Trainer's defaults are used")
    else:
        draft.unknown.append(f"{', '.join(GIVEN)}: leaven's defaults are used")
        draft.why |= dict.fromkeys(GIVEN, f"not in {draft.origin}: leaven's default")


def _balance_loss(draft: Draft, config: dict[str, Any], layers: int, active: int) -> None:
    """Set the balance loss. ``layers``: those with experts. ``active``: the experts that a token uses."""
    if not config.get("output_router_logits") or "router_aux_loss_coef" not in config:
        draft.unknown.append(f"model.experts.balance_loss: {CONFIG} uses no balance loss; leaven's default is used")
        return
    coefficient = as_number(config["router_aux_loss_coef"], f"{draft.origin}: router_aux_loss_coef")
    why = f"(router_aux_loss_coef of {CONFIG}) x (active experts) / (layers with experts), for the same loss"
    draft.set("model.experts.balance_loss", float(f"{coefficient * active / layers:.12g}"), why)


def _paths(path: Path) -> tuple[Path, Path | None]:
    """Return the paths of config.json and training_args.json, or None for a missing training_args.json.

    ``path`` is a model's folder or one of the two files; a config.json may have another name.
    """
    if not path.exists():
        raise InputError(f"{path}: no such file; give the config.json of a model, or its folder")
    config = path / CONFIG if path.is_dir() else path.with_name(CONFIG) if path.name == ARGUMENTS else path
    if not config.exists():
        raise InputError(
            f"{path}: no {CONFIG} with the shape of a model is there; give the config.json of a model, or its folder"
        )
    arguments = config.with_name(ARGUMENTS)
    return config, arguments if arguments.exists() else None


def _arguments(draft: Draft, shape: ModelShape, document: dict[str, Any], ranks: int) -> None:
    """Set recipe values from TrainingArguments or their defaults, unless trainer_state.json has set them."""
    for key in [key for key, value in document.items() if value is None]:
        del document[key]
        if key == "max_grad_norm":
            document[key] = 0  # no clipping
        elif TABLE["fields"].get(key, {}).get("kind") in {"count", "number"} and TABLE["fields"][key].get("default"):
            raise InputError(f"{draft.origin}: {key} is null; write a number, or remove it for transformers' default")
    if "activation_checkpointing" in document:  # the new name, in transformers 5, of gradient_checkpointing
        document["gradient_checkpointing"] = document.pop("activation_checkpointing")
    if isinstance(path := document.get("accelerator_config"), str):  # of a JSON file, which may be elsewhere
        draft.unread.append(f"accelerator_config {path}: this file may change the batch size")
        del document["accelerator_config"]
    given = Settings(
        draft,
        draft.origin,
        TABLE["fields"],
        default=f"{DEFAULT} {{}}, not in {ARGUMENTS}",
        suffix=f" of {ARGUMENTS}",
        given=document,
    )
    if given["optim"] not in TABLE["optimizers"]:
        raise InputError(f"{draft.origin}: optim {given['optim']}: leaven supports only adamw and adam")
    if given["learning_rate"] <= 0:  # the floor of the schedule is divided by it
        raise InputError(f"{draft.origin}: learning_rate {given['learning_rate']:g} must be above 0")
    if "batch.tokens" not in draft.values:
        _batch(given, shape.seq_len, ranks)
    given.put_all()
    batch = draft.values["batch.tokens"]
    if given["max_steps"] > 0:
        draft.set("data.tokens", given["max_steps"] * batch, f"{given.why('max_steps')} x batch")
    elif "data.tokens" not in draft.values:
        draft.guess_tokens(shape)  # before the schedule, which may need it
    if given["bf16"] and given["fp16"]:
        raise InputError(f"{draft.origin}: bf16 and fp16 are two precisions; remove one")
    given.put("precision.compute", "bf16" if given["bf16"] else "fp16" if given["fp16"] else "fp32", "bf16", "fp16")
    warmup = given["warmup_steps"] or given["warmup_ratio"]
    if given["warmup_ratio"] >= 1 and not given["warmup_steps"]:
        raise InputError(
            f"{draft.origin}: warmup_ratio {given['warmup_ratio']:g} is a share of the run in transformers 4, but a "
            "number of steps in transformers 5; write warmup_steps instead"
        )
    # A warm-up below 1 is a share of the run, as in transformers 5.
    tokens = warmup * (batch if warmup >= 1 else draft.values["data.tokens"])
    given.put("schedule.warmup_tokens", round(tokens), "warmup_steps", "warmup_ratio")
    _schedule(given)
    known = {*TABLE["fields"], *(["num_train_epochs"] if given["max_steps"] > 0 else [])}
    draft.unread += [
        key for key, value in given.given.items() if value and key not in known and not key.startswith(IGNORED)
    ]


def _batch(given: Settings, seq_len: int, ranks: int) -> None:
    draft, accelerate = given.draft, given["accelerator_config"]
    field = "per_gpu_train_batch_size" if given["per_gpu_train_batch_size"] else "per_device_train_batch_size"
    sequences, accumulated = given[field], given["gradient_accumulation_steps"]
    factors = f"{given.why(field, 'gradient_accumulation_steps')} x max_position_embeddings"
    if accelerate.get("split_batches"):
        if sequences % ranks:
            raise InputError(
                f"{given.label(field)} {sequences} must be a multiple of the number of processes, {ranks}, "
                "because accelerator_config.split_batches divides the batch among the processes"
            )
        sequences //= ranks
        factors += "; accelerator_config.split_batches divides the batch among the processes"
    else:
        factors += f" x {ranks} processes"
    given.put("batch.micro_batch", sequences, field)
    draft.set("batch.tokens", sequences * accumulated * ranks * seq_len, factors)
    if accelerate.get("gradient_accumulation_kwargs"):
        draft.unread.append("gradient_accumulation_kwargs of accelerator_config")


def _state(draft: Draft, seq_len: int, document: dict[str, Any], ranks: int) -> None:
    fields = {key: {"kind": "count", "min": 1} for key in ("max_steps", "train_batch_size")}
    given = Settings(draft, f"{draft.origin}: {STATE}", fields, default="", suffix=f" of {STATE}", given=document)
    batch = given["train_batch_size"] * ranks * seq_len
    given.put("batch.micro_batch", given["train_batch_size"], "train_batch_size")
    draft.set("batch.tokens", batch, f"{given.why('train_batch_size')} x max_position_embeddings x {ranks} processes")
    draft.unknown.append(f"batch.tokens: {STATE} lacks gradient_accumulation_steps; 1 is used")
    draft.set("data.tokens", given["max_steps"] * batch, f"{given.why('max_steps')} x batch")
    history = document.get("log_history") or []
    if not isinstance(history, list) or not all(isinstance(entry, dict) for entry in history):
        raise InputError(f"{draft.origin}: {STATE}: log_history must be a list of objects, as the Trainer writes it")
    logged = [entry.get("learning_rate") for entry in history]
    lrs = [as_number(lr, f"{draft.origin}: {STATE}: learning_rate") for lr in logged if lr]
    if lrs:
        draft.set("hyperparameters.lr", max(lrs), f"the highest lr that {STATE} logged")


def _schedule(given: Settings) -> None:
    draft = given.draft
    kind, why, peak = given["lr_scheduler_type"], given.why("lr_scheduler_type"), draft.values["hyperparameters.lr"]
    schedule = TABLE["schedules"].get(kind)
    if schedule is None:
        raise InputError(f"{draft.origin}: lr_scheduler_type {kind}: leaven does not have this schedule")
    options = Settings(
        draft,
        draft.origin,
        schedule.get("options", {}),
        default="",
        prefix="lr_scheduler_kwargs.",
        given={key: value for key, value in given["lr_scheduler_kwargs"].items() if value is not None},
    )
    for name, row in options.table.items():
        if "only" in row and options[name] != row["only"]:
            raise InputError(f"{options.label(name)} {options[name]}: leaven supports {kind} only with {row['only']}")
    draft.unread += [f"lr_scheduler_kwargs.{name}" for name in options.given if name not in options.table]
    if kind == "constant":  # transformers has no warm-up with it
        draft.set("schedule.warmup_tokens", 0, why)
    warmup, batch, tokens = (draft.values[key] for key in ("schedule.warmup_tokens", "batch.tokens", "data.tokens"))
    if "timescale" in options and options["timescale"] * batch != warmup:
        timescale = f"lr_scheduler_kwargs.timescale {options['timescale']:g}"
        draft.unread.append(f"{timescale}: leaven uses the length of the warm-up instead")
    if schedule["decay"] == "wsd":
        cooldown = options["num_decay_steps"] * batch
        draft.set("schedule.decay_ratio", cooldown / tokens, "num_decay_steps / max_steps")
        if "num_stable_steps" in options and warmup + options["num_stable_steps"] * batch + cooldown != tokens:
            stable = f"lr_scheduler_kwargs.num_stable_steps {options['num_stable_steps']:g}"
            draft.unread.append(f"{stable}: in leaven, the cooldown always ends at the last step")
    units = {"min_lr_rate": 1, "min_lr_ratio": 1, "min_lr": peak, "lr_end": peak}
    floor = next((options[key] / unit for key, unit in units.items() if key in options.table and options[key]), 0.0)
    draft.set("schedule.decay", schedule["decay"], why)
    if schedule["decay"] != "constant":
        draft.set("schedule.min_lr_ratio", float(f"{floor:.12g}"), f"{why}, lr_scheduler_kwargs")
