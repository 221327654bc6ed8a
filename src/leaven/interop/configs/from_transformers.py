"""A recipe from transformers: config.json, and training_args.json beside it.

Defaults are those of ``TrainingArguments`` of transformers 5.23; its optimizer decays matrices and not gains and
biases, which is leaven's default too.
"""

import json
import math
from pathlib import Path
from typing import Any

from leaven.interop.architectures import Architecture
from leaven.interop.configs.draft import Draft, Imported
from leaven.interop.families import GPT2, named
from leaven.recipe.errors import InputError
from leaven.recipe.shape import BRANCH_ENDS, ModelShape

CONFIG, ARGUMENTS = "config.json", "training_args.json"
DEFAULTS: dict[str, Any] = {
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
# Of how the run is watched and kept: nothing that is computed depends on it.
ASIDE = ("log", "save", "eval", "report", "push", "hub", "dataloader", "disable", "run_name", "do_", "load_best")


def read(path: Path, name: str, ranks: int | None = None) -> Imported:
    """The recipe in a folder, or in one of the two files; the one beside it is read too.

    ``ranks`` is the number of processes that the run was started with; a folder that leaven exported says it itself.

    Raises:
        InputError: naming what cannot be read, or what no recipe holds.
    """
    config, arguments = _files(path)
    draft = Draft(str(path))
    said = _json(config)
    try:
        architecture = named(said)
        shape = architecture.shape(said)
    except InputError as error:
        raise InputError(f"{config.parent}/{error}") from None
    _model(draft, architecture, shape, said)
    if arguments is not None:
        _arguments(draft, shape, _json(arguments), arguments.name, _ranks(draft, said, ranks))
    if (config.parent / "parameters.json").exists():
        draft.unread.append("parameters.json: values of single parameters; the recipe has those of TrainingArguments")
    return draft.finish(name, shape)


def _files(path: Path) -> tuple[Path, Path | None]:
    if not path.exists():
        raise InputError(f"{path}: no such file; give config.json of a model, or the folder that holds it")
    folder = path if path.is_dir() else path.parent
    config = path if path.is_file() and not _is_arguments(_json(path)) else folder / CONFIG
    arguments = path if path.is_file() and config != path else folder / ARGUMENTS
    if not config.exists():
        raise InputError(f"{path}: no shape in it, and no {CONFIG} beside it; give a folder with {CONFIG}")
    return config, arguments if arguments.exists() else None


def _is_arguments(document: dict[str, Any]) -> bool:
    return not {"model_type", "architectures"} & document.keys() and bool(KNOWN & document.keys())


def _json(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read as JSON ({error})") from None
    if not isinstance(document, dict):
        raise InputError(f"{path}: no JSON object")
    return document


def _ranks(draft: Draft, said: dict[str, Any], asked: int | None) -> int:
    """Processes that share a batch: as asked, else as leaven's own export says, else 1, which is listed."""
    own = said.get("leaven")
    exported = own.get("dp") if isinstance(own, dict) else None
    if asked is not None:
        draft.set("layout.dp", asked, "--ranks")
    elif isinstance(exported, int) and exported > 0:
        draft.set("layout.dp", exported, f"leaven.dp of {CONFIG}")
    else:
        draft.unknown.append(
            "layout.dp: the number of processes, here 1, whose batch and tokens these are: --ranks N"
        )
    return int(draft.values.get("layout.dp", 1))


def _model(draft: Draft, architecture: Architecture, shape: ModelShape, said: dict[str, Any]) -> None:
    given = architecture.given(said)

    def origin(*keys: str) -> str:
        there = [key for key in keys if said.get(key) is not None]
        return f"{' and '.join(there)} of {CONFIG}" if there else f"{architecture.name}; {CONFIG} is silent"

    stated = {key: theirs for key, theirs in architecture.keys.items() if theirs}
    if "rope_theta" in stated:
        stated["rope_theta"] += ("rope_scaling", "rope_parameters")
    reasons = {key: origin(*theirs) for key, theirs in stated.items()}
    draft.set_shape(shape, reasons | {key: f"what a {architecture.name} is" for key in architecture.holds})
    draft.set("hyperparameters.init_std", float(given["initializer_range"]), origin("initializer_range"))
    if architecture is GPT2:
        scaled = 1 / math.sqrt(2 * shape.n_layers)
        for module in BRANCH_ENDS:
            draft.set(
                f"hyperparameters.modules.{module}.init_std", scaled, "GPT-2 starts these at 1 / sqrt(2 L) of it"
            )


def _arguments(draft: Draft, shape: ModelShape, said: dict[str, Any], file: str, ranks: int) -> None:
    def value(key: str) -> Any:
        return said[key] if said.get(key) is not None else DEFAULTS.get(key)

    def why(*keys: str) -> str:
        there = [key for key in keys if said.get(key) is not None]
        return f"{' and '.join(there)} of {file}" if there else f"TrainingArguments' default; {file} is silent"

    def number(key: str) -> float:
        found = value(key)
        if isinstance(found, bool) or not isinstance(found, int | float):
            raise InputError(f"{draft.origin}: {key} = {found!r}: has to be a number")
        return found

    def count(key: str) -> int:
        if number(key) != int(number(key)):
            raise InputError(f"{draft.origin}: {key} = {value(key)!r}: has to be a whole number")
        return int(number(key))

    _refuse_others(draft, said)
    each = count("per_device_train_batch_size") * count("gradient_accumulation_steps")
    batch = each * ranks * shape.seq_len
    draft.set(
        "batch.tokens",
        batch,
        f"{why('per_device_train_batch_size', 'gradient_accumulation_steps')} x max_position_embeddings x "
        f"{ranks} processes",
    )
    draft.set("batch.micro_batch", count("per_device_train_batch_size"), why("per_device_train_batch_size"))
    if count("max_steps") > 0:
        draft.set("data.tokens", count("max_steps") * batch, f"{why('max_steps')} x batch")
    for path, key in {
        "hyperparameters.lr": "learning_rate",
        "hyperparameters.weight_decay": "weight_decay",
        "hyperparameters.beta1": "adam_beta1",
        "hyperparameters.beta2": "adam_beta2",
        "hyperparameters.eps": "adam_epsilon",
        "hyperparameters.grad_clip": "max_grad_norm",
    }.items():
        draft.set(path, float(number(key)), why(key))
    draft.set("data.seed", count("seed"), why("seed"))
    compute = "bf16" if value("bf16") else "fp16" if value("fp16") else "fp32"
    draft.set("precision.compute", compute, why("bf16", "fp16"))
    for path, key, yes, no in (
        ("layout.recompute", "gradient_checkpointing", "full", "none"),
        ("layout.compile", "torch_compile", True, False),
    ):
        draft.set(path, yes if value(key) else no, why(key))
    warmup = number("warmup_steps")
    if said.get("warmup_ratio") and not warmup:
        warmup = number("warmup_ratio")
    # Below 1 it is a share of the run, as transformers 5 reads it.
    tokens = warmup * batch if warmup >= 1 or not warmup else warmup * draft.values.get("data.tokens", 0)
    draft.set("schedule.warmup_tokens", round(tokens), why("warmup_steps", "warmup_ratio"))
    _schedule(draft, str(value("lr_scheduler_type")), said.get("lr_scheduler_kwargs") or {}, why("lr_scheduler_type"))
    draft.unread += [key for key in said if key not in KNOWN and not key.startswith(ASIDE) and said[key] is not None]


def _refuse_others(draft: Draft, said: dict[str, Any]) -> None:
    optimizer = said.get("optim", "adamw_torch")
    if optimizer not in OPTIMIZERS:
        raise InputError(f"{draft.origin}: optim = {optimizer!r}: leaven has adamw and adam")


def _schedule(draft: Draft, kind: str, settings: Any, why: str) -> None:
    if not isinstance(settings, dict):
        raise InputError(f"{draft.origin}: lr_scheduler_kwargs = {settings!r}: has to be a table")
    decay: str
    floor, peak = 0.0, draft.values["hyperparameters.lr"]
    match kind:
        case "cosine" | "linear":
            decay = kind
        case "cosine_with_min_lr" | "cosine_warmup_with_min_lr":
            decay = "cosine"
            floor = settings.get("min_lr_rate") or (settings.get("min_lr") or 0.0) / peak
        case "polynomial" if settings.get("power", 1.0) == 1.0:
            decay, floor = "linear", settings.get("lr_end", 1e-7) / peak
        case "constant" | "constant_with_warmup":
            decay = "constant"
        case "inverse_sqrt":
            decay = "inverse_sqrt"
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
