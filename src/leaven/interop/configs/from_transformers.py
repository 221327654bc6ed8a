"""Imports a recipe from a config.json of transformers and the training_args.json in the same folder.

A checkpoint of the Trainer has trainer_state.json in place of training_args.json. training_args.bin is not read: it
is a pickle, and reading a pickle runs its code.

``targets/transformers_arguments.toml`` contains the fields of TrainingArguments, their defaults and the corresponding
keys of a recipe.
"""

import math
import tomllib
from pathlib import Path
from typing import Any

from leaven.errors import InputError
from leaven.interop.configs.draft import Draft, Imported, Settings, as_number
from leaven.interop.huggingface_config import read_config, read_json

CONFIG, ARGUMENTS, STATE, PICKLE = "config.json", "training_args.json", "trainer_state.json", "training_args.bin"
TABLE = tomllib.loads((Path(__file__).parent / "targets/transformers_arguments.toml").read_text(encoding="utf-8"))


def read(path: Path, name: str, ranks: int | None = None) -> Imported:
    """Convert a folder with config.json, and usually training_args.json, to a recipe called ``name``.

    ``path`` is the folder or one of these files. ``ranks`` is the number of processes of the run. If ``ranks`` is
    None, the number is read from config.json, where an export of leaven writes it, or 1 is assumed.
    """
    config_path, arguments_path = _paths(path)
    draft = Draft(str(path))
    model = read_config(config_path)
    architecture, shape = model.architecture, model.shape
    draft.set_architecture(model, CONFIG)
    if architecture.scaled_branch_ends:
        for module in shape.branch_ends:
            why = f"{architecture.name} draws this matrix with initializer_range / sqrt(2 n_layers)"
            draft.set(f"hyperparameters.modules.{module}.init_std", 1 / math.sqrt(2 * shape.n_layers), why)
    if architecture.factors(shape, model.config):
        why = "leaven has none, so a new run starts from other values"
        draft.unread.append(f"factors of {architecture.name} on the embedding or the logits: {why}")
    without = f"the bias on the logits that {architecture.name} also trains: leaven's models have none"
    draft.unread += [without] * architecture.logits_bias
    if shape.experts and shape.experts.balanced_by_loss:
        _balance_loss(draft, model.config, shape.n_layers - shape.experts.dense_layers, shape.experts.active)
    state_path = config_path.parent / STATE
    if arguments_path is None and (config_path.parent / PICKLE).exists():
        draft.unread.append(f"{PICKLE}, a pickle: write trainer.args.to_json_string() to {ARGUMENTS} beside it")
    if arguments_path is not None or state_path.exists():
        leaven = model.config.get("leaven")
        exported = leaven.get("dp") if isinstance(leaven, dict) else None
        if ranks is not None:
            draft.set("layout.dp", ranks, "--ranks")
        elif isinstance(exported, int) and exported > 0:
            draft.set("layout.dp", exported, f"leaven.dp of {CONFIG}")
        else:
            draft.unknown.append(
                "layout.dp: 1 is used; give the number of processes with --ranks N, as the batch grows with it"
            )
        ranks = draft.values.get("layout.dp", 1)
        if arguments_path is not None:
            _arguments(draft, shape.seq_len, read_json(arguments_path), ranks)
        else:
            _state(draft, shape.seq_len, read_json(state_path), ranks)
    if (config_path.parent / "parameters.json").exists():
        draft.unread.append(f"parameters.json: values of single parameters; the recipe has the values of {ARGUMENTS}")
    return draft.finish(name, shape)


def _balance_loss(draft: Draft, config: dict[str, Any], layers: int, active: int) -> None:
    """Set the coefficient of the balance loss, if the config.json turns this loss on.

    ``layers`` is the number of layers with experts, ``active`` the number of experts that a token uses.
    """
    if not config.get("output_router_logits") or "router_aux_loss_coef" not in config:
        draft.unknown.append(f"model.experts.balance_loss: {CONFIG} uses no balance loss; leaven's default is used")
        return
    coefficient = as_number(config["router_aux_loss_coef"], f"{draft.origin}: router_aux_loss_coef")
    why = f"router_aux_loss_coef of {CONFIG} x active experts / layers with experts, to give the same loss"
    draft.set("model.experts.balance_loss", float(f"{coefficient * active / layers:.12g}"), why)


def _paths(path: Path) -> tuple[Path, Path | None]:
    """Return (file of the model's shape, file of the training arguments or None if there is none).

    ``path`` is the folder of both files or one of the files. If it is a file, this file may have any name.
    """
    if not path.exists():
        raise InputError(f"{path}: no such file; give the config.json of a model, or its folder")
    folder, config, arguments = path if path.is_dir() else path.parent, CONFIG, ARGUMENTS
    if path.is_file():  # its keys tell which of the two files it is
        document = read_json(path)
        if not {"model_type", "architectures"} & document.keys() and TABLE["fields"].keys() & document.keys():
            arguments = path.name
        else:
            config = path.name
    if not (folder / config).exists():
        raise InputError(
            f"{path}: no {CONFIG} with the shape of a model is there; give the config.json of a model, or its folder"
        )
    return folder / config, folder / arguments if (folder / arguments).exists() else None


def _arguments(draft: Draft, seq_len: int, document: dict[str, Any], ranks: int) -> None:
    """Set recipe values from the fields of TrainingArguments. Missing fields have their defaults."""
    given = Settings(
        draft,
        draft.origin,
        TABLE["fields"],
        default=f"TrainingArguments' default of {{}}, not in {ARGUMENTS}",
        suffix=f" of {ARGUMENTS}",
        given={key: value for key, value in document.items() if value is not None},
    )
    if given["optim"] not in TABLE["optimizers"]:
        raise InputError(f"{draft.origin}: optim {given['optim']}: leaven supports only adamw and adam")
    if given["learning_rate"] <= 0:  # the floor of the schedule is divided by it
        raise InputError(f"{draft.origin}: learning_rate {given['learning_rate']:g} must be above 0")
    given.put_all()
    batch = given["per_device_train_batch_size"] * given["gradient_accumulation_steps"] * ranks * seq_len
    factors = given.why("per_device_train_batch_size", "gradient_accumulation_steps")
    draft.set("batch.tokens", batch, f"{factors} x max_position_embeddings x {ranks} processes")
    if given["max_steps"] > 0:
        draft.set("data.tokens", given["max_steps"] * batch, f"{given.why('max_steps')} x batch")
    compute = "bf16" if given["bf16"] else "fp16" if given["fp16"] else "fp32"
    given.put("precision.compute", compute, "bf16", "fp16")
    warmup = given["warmup_steps"] or given["warmup_ratio"]
    # A warm-up below 1 is a share of the run, as in transformers 5.
    tokens = warmup * (batch if warmup >= 1 else draft.values.get("data.tokens", 0))
    given.put("schedule.warmup_tokens", round(tokens), "warmup_steps", "warmup_ratio")
    _schedule(given)
    known = {*TABLE["fields"], *(["num_train_epochs"] if given["max_steps"] > 0 else [])}
    draft.unread += [
        key
        for key, value in given.given.items()
        if value and key not in known and not key.startswith(tuple(TABLE["ignored"]))
    ]


def _state(draft: Draft, seq_len: int, document: dict[str, Any], ranks: int) -> None:
    """Set the batch, the number of tokens and the lr from a trainer_state.json."""
    fields = {key: {"kind": "count", "min": 1} for key in ("max_steps", "train_batch_size")}
    given = Settings(draft, f"{draft.origin}: {STATE}", fields, default="", suffix=f" of {STATE}", given=document)
    batch = given["train_batch_size"] * ranks * seq_len
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
    """Set the decay, the final lr and the share of a cooldown from lr_scheduler_type and lr_scheduler_kwargs."""
    draft = given.draft
    kind, options, why = given["lr_scheduler_type"], given["lr_scheduler_kwargs"], given.why("lr_scheduler_type")
    floor, peak = 0.0, draft.values["hyperparameters.lr"]
    where = f"{draft.origin}: lr_scheduler_kwargs"
    options = {key: value for key, value in options.items() if value is not None}
    for key in ("min_lr", "min_lr_rate", "power", "lr_end", "min_lr_ratio", "num_decay_steps"):
        options |= {key: as_number(options[key], f"{where}: {key}")} if key in options else {}
    match kind:
        case "cosine" | "linear" | "inverse_sqrt":
            decay = kind
        case "constant" | "constant_with_warmup":
            decay = "constant"
        case "cosine_with_min_lr" | "cosine_warmup_with_min_lr":
            decay = "cosine"
            floor = options.get("min_lr_rate") or options.get("min_lr", 0.0) / peak
        case "polynomial" if options.get("power", 1.0) == 1.0:
            decay, floor = "linear", options.get("lr_end", 1e-7) / peak
        case "warmup_stable_decay" if options.get("decay_type") == "1-sqrt":
            decay, floor = "wsd", options.get("min_lr_ratio", 0.0)
            tokens = options.get("num_decay_steps", 0) * draft.values["batch.tokens"]
            if tokens and "data.tokens" in draft.values:
                draft.set("schedule.decay_ratio", tokens / draft.values["data.tokens"], "num_decay_steps / max_steps")
        case _:
            raise InputError(
                f"{draft.origin}: lr_scheduler_type {kind} {options or ''}: leaven does not have this schedule"
            )
    draft.set("schedule.decay", decay, why)
    draft.set("schedule.min_lr_ratio", float(f"{floor:.12g}"), f"{why}, lr_scheduler_kwargs")
