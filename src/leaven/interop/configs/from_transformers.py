"""Make a recipe from transformers' config.json and the training_args.json beside it.

The optimizer of transformers decays matrices but not gains and biases; so does leaven by default.
"""

import json
import math
from pathlib import Path
from typing import Any

from leaven.interop.architectures import GPT2, named
from leaven.interop.configs.draft import Draft, Imported
from leaven.recipe.errors import InputError
from leaven.recipe.shape import BRANCH_ENDS

CONFIG, ARGUMENTS = "config.json", "training_args.json"
SAME: dict[str, str] = {  # keys of TrainingArguments that are a number of a recipe
    "learning_rate": "hyperparameters.lr",
    "weight_decay": "hyperparameters.weight_decay",
    "adam_beta1": "hyperparameters.beta1",
    "adam_beta2": "hyperparameters.beta2",
    "adam_epsilon": "hyperparameters.eps",
    "max_grad_norm": "hyperparameters.grad_clip",
}
DEFAULTS: dict[str, Any] = {  # of TrainingArguments of transformers 5.23
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "learning_rate": 5e-5,
    "lr_scheduler_type": "linear",
    "warmup_steps": 0,
    "weight_decay": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "max_grad_norm": 1.0,
    "seed": 42,
    "bf16": False,
    "fp16": False,
    "gradient_checkpointing": False,
    "torch_compile": False,
    "max_steps": -1,
}
OPTIMIZERS = {"adamw_torch", "adamw_torch_fused", "adamw_apex_fused", "adamw_hf"}
KNOWN = {*DEFAULTS, "lr_scheduler_kwargs", "optim", "output_dir", "warmup_ratio", "per_gpu_train_batch_size"}
# Prefixes of keys that say how the run is watched and kept: nothing that is computed depends on them.
ASIDE = ("log", "save", "eval", "report", "push", "hub", "dataloader", "disable", "run_name", "do_", "load_best")


def read(path: Path, name: str, ranks: int | None = None) -> Imported:
    """Return the recipe from a folder, or from one of its two files together with the other.

    ``ranks`` is the number of processes of the run; a folder that leaven exported states it.

    Raises:
        InputError: if a file cannot be read, or a recipe cannot represent a value.
    """
    config_path, arguments_path = _files(path)
    draft = Draft(str(path))
    config = _json(config_path)
    try:
        architecture = named(config)
        shape = architecture.shape(config)
    except InputError as error:
        raise InputError(f"{config_path.parent}/{error}") from None
    draft.set_architecture(architecture, config, shape, CONFIG)
    if architecture is GPT2:
        for module in BRANCH_ENDS:
            key = f"hyperparameters.modules.{module}.init_std"
            draft.set(key, 1 / math.sqrt(2 * shape.n_layers), "GPT-2 starts these at 1 / sqrt(2 L) of it")
    if arguments_path is not None:
        exported = config.get("leaven", {}).get("dp") if isinstance(config.get("leaven"), dict) else None
        if ranks is not None:
            draft.set("layout.dp", ranks, "--ranks")
        elif isinstance(exported, int) and exported > 0:
            draft.set("layout.dp", exported, f"leaven.dp of {CONFIG}")
        else:
            line = "layout.dp: the number of processes, here 1, whose batch and tokens these are: --ranks N"
            draft.unknown.append(line)
        _arguments(draft, shape.seq_len, _json(arguments_path), draft.values.get("layout.dp", 1))
    if (config_path.parent / "parameters.json").exists():
        draft.unread.append("parameters.json: values of single parameters; the recipe has those of TrainingArguments")
    return draft.finish(name, shape)


def _files(path: Path) -> tuple[Path, Path | None]:
    """Read config.json and, if it exists, training_args.json."""
    if not path.exists():
        raise InputError(f"{path}: no such file; give config.json of a model, or the folder that holds it")
    folder, config, arguments = (path if path.is_dir() else path.parent), None, None
    if path.is_file():
        document = _json(path)
        if not {"model_type", "architectures"} & document.keys() and KNOWN & document.keys():
            arguments = path
        else:
            config = path
    config, arguments = config or folder / CONFIG, arguments or folder / ARGUMENTS
    if not config.exists():
        raise InputError(f"{path}: no shape in it, and no {CONFIG} beside it; give a folder with {CONFIG}")
    return config, arguments if arguments.exists() else None


def _json(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read as JSON ({error})") from None
    if not isinstance(document, dict):
        raise InputError(f"{path}: not a JSON object")
    return document


def _arguments(draft: Draft, seq_len: int, given: dict[str, Any], ranks: int) -> None:
    """Set the values of TrainingArguments, or their defaults."""

    def value(key: str) -> Any:
        return given[key] if given.get(key) is not None else DEFAULTS[key]

    def why(*keys: str) -> str:
        there = [key for key in keys if given.get(key) is not None]
        return f"{' and '.join(there)} of {ARGUMENTS}" if there else f"TrainingArguments' default; not in {ARGUMENTS}"

    def number(key: str) -> float:
        found = value(key)
        if isinstance(found, bool) or not isinstance(found, int | float):
            raise InputError(f"{draft.origin}: {key} = {found!r}: has to be a number")
        return found

    def count(key: str) -> int:
        if number(key) != int(number(key)):
            raise InputError(f"{draft.origin}: {key} = {value(key)!r}: has to be a whole number")
        return int(number(key))

    optimizer = given.get("optim", "adamw_torch")
    if optimizer not in OPTIMIZERS:
        raise InputError(f"{draft.origin}: optim = {optimizer!r}: leaven has adamw and adam")
    micro_batch = count("per_device_train_batch_size")
    batch = micro_batch * count("gradient_accumulation_steps") * ranks * seq_len
    factors = why("per_device_train_batch_size", "gradient_accumulation_steps")
    draft.set("batch.tokens", batch, f"{factors} x max_position_embeddings x {ranks} processes")
    draft.set("batch.micro_batch", micro_batch, why("per_device_train_batch_size"))
    if count("max_steps") > 0:
        draft.set("data.tokens", count("max_steps") * batch, f"{why('max_steps')} x batch")
    for key, path in SAME.items():
        draft.set(path, float(number(key)), why(key))
    draft.set("data.seed", count("seed"), why("seed"))
    compute = "bf16" if value("bf16") else "fp16" if value("fp16") else "fp32"
    draft.set("precision.compute", compute, why("bf16", "fp16"))
    recompute = "full" if value("gradient_checkpointing") else "none"
    draft.set("layout.recompute", recompute, why("gradient_checkpointing"))
    draft.set("layout.compile", bool(value("torch_compile")), why("torch_compile"))
    warmup = number("warmup_steps") or given.get("warmup_ratio") or 0
    if isinstance(warmup, bool) or not isinstance(warmup, int | float):
        raise InputError(f"{draft.origin}: warmup_ratio = {warmup!r}: has to be a number")
    # Below 1 it is a share of the run, as transformers 5 reads it.
    tokens = warmup * (batch if warmup >= 1 else draft.values.get("data.tokens", 0))
    draft.set("schedule.warmup_tokens", round(tokens), why("warmup_steps", "warmup_ratio"))
    settings = given.get("lr_scheduler_kwargs") or {}
    if not isinstance(settings, dict):
        raise InputError(f"{draft.origin}: lr_scheduler_kwargs = {settings!r}: has to be a table")
    _schedule(draft, str(value("lr_scheduler_type")), settings, why("lr_scheduler_type"))
    draft.unread += [
        key for key in given if key not in KNOWN and not key.startswith(ASIDE) and given[key] is not None
    ]


def _schedule(draft: Draft, kind: str, settings: dict[str, Any], why: str) -> None:
    decay: str
    floor, peak = 0.0, draft.values["hyperparameters.lr"]
    match kind:
        case "cosine" | "linear" | "inverse_sqrt":
            decay = kind
        case "constant" | "constant_with_warmup":
            decay = "constant"
        case "cosine_with_min_lr" | "cosine_warmup_with_min_lr":
            decay = "cosine"
            floor = settings.get("min_lr_rate") or (settings.get("min_lr") or 0.0) / peak
        case "polynomial" if settings.get("power", 1.0) == 1.0:
            decay, floor = "linear", settings.get("lr_end", 1e-7) / peak
        case "warmup_stable_decay" if settings.get("decay_type") == "1-sqrt":
            decay, floor = "wsd", settings.get("min_lr_ratio", 0.0)
            tokens = settings.get("num_decay_steps", 0) * draft.values["batch.tokens"]
            if tokens and "data.tokens" in draft.values:
                draft.set("schedule.decay_ratio", tokens / draft.values["data.tokens"], "num_decay_steps / max_steps")
        case _:
            raise InputError(
                f"{draft.origin}: lr_scheduler_type = {kind!r} {settings or ''}: no schedule of leaven's"
            )
    draft.set("schedule.decay", decay, why)
    draft.set("schedule.min_lr_ratio", float(f"{floor:.12g}"), f"{why}, lr_scheduler_kwargs")
