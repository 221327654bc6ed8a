"""Imports a recipe from a configuration of torchtitan, a TOML or JSON file.

Up to 0.2.2, torchtitan reads a TOML file, which names a model by its flavor. From 0.3.0 on, its option
``--debug.save_config_file`` saves a JSON file, which describes every module and parameter group.
"""

import math
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import chain
from pathlib import Path
from statistics import NormalDist
from typing import Any

from leaven.errors import InputError
from leaven.interop.configs.compare import ParameterSettings
from leaven.interop.configs.draft import Draft, Imported, Settings, as_number
from leaven.interop.configs.per_parameter import TORCHTITAN_NAMES
from leaven.recipe.files import read_text
from leaven.recipe.shape import ModelShape
from leaven.storage import foreign_json

TABLE = tomllib.loads((Path(__file__).parent / "targets/torchtitan_keys.toml").read_text(encoding="utf-8"))
SAVE = "run torchtitan with --debug.save_config_file config.json and give that file"
QKV = ("attention.query", "attention.key", "attention.value")
# For each module, the path of its initial values in a saved file. In the file, query norm and key norm share their
# initial values, and so do key matrix and value matrix.
SAVED = TORCHTITAN_NAMES | {
    "attention.key": "attention.qkv_linear.wkv",
    "attention.value": "attention.qkv_linear.wkv",
    "norm.query": "attention.qk_norm",
    "norm.key": "attention.qk_norm",
}


def read(path: Path, name: str, ranks: int | None = None) -> Imported:
    """Convert a TOML or JSON file to a recipe called ``name``. ``ranks`` is the number of processes, if known."""
    document, draft = _document(path), Draft(str(path))
    spec = document.pop("model_spec", None)
    given = _settings(document, draft, saved=spec is not None)
    if spec is None:
        _flavor(given)
    else:
        _saved_model(spec, document, given)
    given.put_all()
    shape = draft.shape()
    _batch(given, shape.seq_len, ranks)
    _schedule(given)
    return draft.finish(name, shape)


def _document(path: Path) -> dict[str, Any]:
    if path.suffix == ".py":
        raise InputError(f"{path}: leaven does not run Python files; {SAVE}")
    text = read_text(path)
    try:
        document = foreign_json(text) if text.lstrip().startswith("{") else tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: cannot be read as TOML or JSON ({error}); {SAVE}") from None
    model = document.get("model")
    if "model_spec" not in document and not (isinstance(model, dict) and {"name", "flavor"} <= model.keys()):
        raise InputError(
            f"{path}: not a configuration of torchtitan: it has no model_spec, and no name and flavor under [model]; "
            f"{SAVE}"
        )
    return document


def _settings(document: Mapping[str, Any], draft: Draft, *, saved: bool) -> Settings:
    """Return the settings that leaven reads, by name such as ``optimizer.lr``.

    All other keys are added to ``draft.unread``, except those that have no meaning in a recipe. ``saved``: whether
    torchtitan saved the document. Raise InputError if the old and the new name of a key have different values, or if
    clipping makes all gradients 0.
    """
    given = Settings(draft, draft.origin, TABLE["keys"], default="torchtitan's default of {}")
    for stated, value in _leaves(document):
        name = TABLE["aliases"].get(stated, stated)
        if value in (None, [], "") or (saved and name.startswith("optimizer.param_groups")):
            continue
        if name in TABLE["keys"]:
            if name == "training.max_norm" and value == 0:
                raise InputError(
                    f"{draft.origin}: {name} 0 makes all gradients 0 in torchtitan; to turn clipping off, use inf"
                )
            # without clipping, the limit is infinite in torchtitan and 0 in leaven
            number = 0.0 if name == "training.max_norm" and value == math.inf else value
            if name in given and given.given[name] != number:
                other = next(old for old, new in TABLE["aliases"].items() if new == name)
                raise InputError(f"{draft.origin}: {name} and {other} have different values; remove one")
            given.given[name] = number
        elif not _changes_nothing(name, value, TABLE["usual"]):
            draft.unread.append(stated)
    if given["optimizer.early_step_in_backward"]:
        draft.set("hyperparameters.grad_clip", 0.0, "optimizer.early_step_in_backward steps before torchtitan clips")
        draft.unread.append("optimizer.early_step_in_backward: torchtitan then takes a step after each micro-batch")
    return given


def _leaves(document: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of all values that are not objects.

    Keys contain no list index: all objects in a list, such as the blocks of a model, have the same keys.
    """
    found: list[tuple[str, Any]] = list(document.items())
    for key, value in found:  # which grows
        if isinstance(value, dict):
            found += [(f"{key}.{part}", each) for part, each in value.items()]
        elif isinstance(value, list) and any(isinstance(each, dict) for each in value):
            found += [(key, each) for each in value]
        else:
            yield key, value


def _changes_nothing(name: str, value: Any, usual: Mapping[str, Sequence[Any]]) -> bool:
    """Return whether a key can be skipped: it has no effect on a recipe, or other code reads it.

    ``usual`` maps patterns of keys to the values with which these keys have no effect.
    """
    if any(fnmatchcase(f"{name}.", f"{pattern}.") for pattern in chain(*TABLE["ignored"].values())):
        return True
    return value in next((values for pattern, values in usual.items() if fnmatchcase(name, pattern)), (None, [], ""))


def _flavor(given: Settings) -> None:
    """Set the model, its init and the handling of documents from the keys name and flavor of [model]."""
    draft = given.draft
    name, flavor = given["model.name"], given["model.flavor"]
    flavors = TABLE["flavors"].get(name)
    if flavors is None:
        raise InputError(
            f"{draft.origin}: model.name {name}: leaven reads {' and '.join(TABLE['flavors'])}; give the config of "
            "one of these models"
        )
    # A flavor such as 8B_flex has attention that stops at the start of a document.
    plain, _, masked = flavor.partition("_")
    if plain not in flavors or plain == "all" or masked not in {"", "flex", "varlen", "flex_attn", "varlen_attn"}:
        known = ", ".join(each for each in flavors if each != "all")
        raise InputError(
            f"{draft.origin}: model.flavor {flavor}: leaven knows {known}; for torchtitan 0.3 or later, {SAVE}"
        )
    why = f"{name} {flavor} of torchtitan 0.2.2"
    for key, value in (flavors["all"] | flavors[plain]).items():
        draft.set(f"model.{key}", value, why)
    draft.set("data.documents", "isolated" if masked else "packed", why)
    draft.set("hyperparameters.init", "depth-scaled", why)
    draft.set("hyperparameters.decay_norm_and_bias", True, "torchtitan 0.2 decays all parameters")
    if name == "llama3":
        draft.unread.append("scaled rotary positions of llama3: leaven supports only plain ones")


def _saved_model(spec: Any, document: Mapping[str, Any], given: Settings) -> None:
    """Set the recipe's model, the settings of its parameters and layout.recompute from the sections model_spec,
    optimizer and activation_checkpoint. Raise InputError if leaven cannot read them."""
    draft = given.draft
    name = spec.get("name") if isinstance(spec, dict) else None
    if not isinstance(name, str) or name not in TABLE["flavors"]:
        raise InputError(
            f"{draft.origin}: model_spec.name {name}: leaven reads {' and '.join(TABLE['flavors'])}; give the config "
            "of one of these models"
        )
    try:
        model = spec["model"]
        blocks = model["layers"]
        if any(block["moe"] for block in blocks):
            raise InputError(f"{draft.origin}: model_spec.model.layers: leaven does not import torchtitan's experts")
        first = _block_shape(blocks[0])
        for number, block in enumerate(blocks):
            for key, value in _block_shape(block).items():
                if value != first[key]:
                    raise InputError(
                        f"{draft.origin}: model_spec.model.layers: {key} is {first[key]} in block 0 and {value} in "
                        f"block {number}; in leaven all blocks have the same shape"
                    )
        shape = {
            "n_layers": len(blocks),
            "d_model": model["dim"],
            "vocab_size": model["vocab_size"],
            "norm_eps": float(model["norm"]["eps"]),
            "tied_embeddings": model["enable_weight_tying"],
        } | first
        if shape["n_heads"] * shape["d_head"] != shape["d_model"]:
            shape["d_attention"] = shape["n_heads"] * shape["d_head"]
        for key, value in shape.items():
            draft.set(f"model.{key}", value, "model_spec")
        given.put("model.seq_len", given["training.seq_len"], "training.seq_len")
        draft.set("data.documents", "isolated", "torchtitan's language models do not attend across documents")
        groups = document["optimizer"]["param_groups"]
        _parameters(draft, draft.shape(), model, groups)
        usual = {
            **TABLE["usual"],
            "model_spec.*.eps": [shape["norm_eps"]],
            "*.attention.head_dim": [None, shape["d_head"]],
            "*.inner_attention.window_size": [[(shape["window"] or 0) - 1, 0], [-1, -1]],
        }
        leaves = _leaves({"model_spec": spec, "param_groups": groups})
        lines = {f"{key} {str(value)[:60]}": (key, value) for key, value in leaves}
        draft.unread += [line for line, leaf in lines.items() if not _changes_nothing(*leaf, usual)]
    except InputError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, re.error) as error:
        raise InputError(
            f"{draft.origin}: not a file of torchtitan 0.3 ({type(error).__name__}: {error}); {SAVE}"
        ) from None
    policy = document.get("activation_checkpoint")
    if not isinstance(policy, dict | None):
        raise InputError(f"{draft.origin}: activation_checkpoint {policy!r} must be an object or null")
    recompute = "none" if policy is None else "selective" if len(policy) > 3 else "full"  # full has three settings
    draft.set("layout.recompute", recompute, "activation_checkpoint")


def _block_shape(block: Mapping[str, Any]) -> dict[str, Any]:
    attention = block["attention"]
    left, *_ = (attention.get("inner_attention") or {}).get("window_size") or [-1]
    return {
        "n_heads": attention["n_heads"],
        "n_kv_heads": attention["n_kv_heads"] or attention["n_heads"],
        "d_head": attention["qkv_linear"]["head_dim"],
        "d_ff": block["feed_forward"]["w1"]["out_features"],
        "rope_theta": float(attention["rope"]["theta"]),
        "qk_norm": attention["qk_norm"] is not None,
        "window": None if left < 0 else left + 1,  # in leaven, the window includes the token itself
    }


def _parameters(draft: Draft, shape: ModelShape, model: dict[str, Any], groups: Sequence[dict[str, Any]]) -> None:
    """Set the hyperparameters from the initial values of a saved model and from its parameter groups."""
    # torch's Adam with decoupled decay is its AdamW
    names = {
        "AdamW" if group["optimizer_kwargs"].get("decoupled_weight_decay") else group["optimizer_name"]
        for group in groups
    }
    kinds = TABLE["keys"]["optimizer.name"]["values"]
    if len(names) != 1 or not names <= kinds.keys():
        raise InputError(f"{draft.origin}: optimizer_name {', '.join(sorted(names))}: give one, AdamW or Adam")
    draft.set("hyperparameters.optimizer", kinds[names.pop()], "optimizer_name")
    settings: dict[str, ParameterSettings] = {}
    fused = "wqkv" in model["layers"][0]["attention"]["qkv_linear"]
    for parameter in shape.parameters():
        place = TORCHTITAN_NAMES[parameter.module]
        if parameter.module in QKV and fused:
            place = "attention.qkv_linear.wqkv"
        full = f"{place}.weight" if parameter.layer is None else f"layers.{parameter.layer}.{place}.weight"
        group = next((each for each in groups if re.search(each["pattern"], full)), None)
        if group is None:
            raise InputError(f"{draft.origin}: optimizer.param_groups: no pattern matches {full}")
        values = group["optimizer_kwargs"]
        # The defaults are those of torch's AdamW and Adam.
        beta1, beta2 = values.get("betas", (0.9, 0.999))
        lr, eps = values.get("lr", 1e-3), values.get("eps", 1e-8)
        decay = values.get("weight_decay", 1e-2 if group["optimizer_name"] == "AdamW" else 0.0)
        where = model if parameter.layer is None else model["layers"][parameter.layer]
        mean, std = _start(draft, _init_of(where, parameter.module, tied=shape.tied_embeddings, fused=fused), full)
        settings[parameter.name] = ParameterSettings(
            mean, std, *(as_number(each, f"{draft.origin}: {full}") for each in (lr, decay, beta1, beta2, eps))
        )
    if fused:
        draft.unknown.append(f"init_std of {', '.join(QKV)}: not saved for a fused wqkv; that of mlp.gate is used")
    draft.set_parameters(settings, shape, "param_init", "param_groups")


def _init_of(where: dict[str, Any], module: str, *, tied: bool, fused: bool) -> str:
    """Return how torchtitan initialises the weight of ``module``, as text such as ``<function ones_ at 0x7f>``.

    ``where``: the saved model, or the module's layer in it. ``fused``: queries, keys and values are one matrix.
    """
    place = SAVED[module]
    if module == "embedding" and tied:
        place = "lm_head"
    elif module in QKV and fused:
        place = "feed_forward.w1"
    for key in place.split("."):
        where = where[key]
    return str(where["param_init"]["weight"])


def _start(draft: Draft, text: str, name: str) -> tuple[float, float]:
    """Return the mean and std of an initialisation function from its repr, ``partial(<function normal_>, std=1)``."""
    kinds = ("normal_", "trunc_normal_", "ones_", "zeros_", "constant_")
    kind = next((each for each in kinds if f"function {each}" in text), None)
    stated = {key: float(value) for key, value in re.findall(r"(\w+)=([\d.e+-]+)", text)}
    if kind is None:
        raise InputError(f"{draft.origin}: param_init of {name} is {text}, which leaven cannot read")
    mean, std = stated.get("mean", 0.0), stated.get("std", 1.0)
    if kind == "trunc_normal_" and std:
        cut = _truncated(mean, std, stated.get("a", -2.0), stated.get("b", 2.0))
        if max(abs(cut[0] - mean), abs(cut[1] - std)) > 0.02 * std:  # a cut at 3 stds lowers the std by 1.3%
            place = re.sub(r"layers\.\d+\.", "", name)
            line = f"truncated initial values of {place}: leaven draws normal values with the same mean and std"
            draft.unread += [line] * (line not in draft.unread)
            return cut
    if kind in {"normal_", "trunc_normal_"}:
        return mean, std
    return {"ones_": 1.0, "zeros_": 0.0}.get(kind, stated.get("val", 0.0)), 0.0


def _truncated(mean: float, std: float, low: float, high: float) -> tuple[float, float]:
    """Return the mean and std of normal values that are drawn again until they are between ``low`` and ``high``."""
    unit, a, b = NormalDist(), (low - mean) / std, (high - mean) / std
    inside = unit.cdf(b) - unit.cdf(a)
    shift = (unit.pdf(a) - unit.pdf(b)) / inside
    return mean + std * shift, std * math.sqrt(1 + (a * unit.pdf(a) - b * unit.pdf(b)) / inside - shift**2)


def _batch(given: Settings, seq_len: int, ranks: int | None) -> None:
    """Set the data-parallel layout, the pipeline schedule, the batch and the number of tokens."""
    draft = given.draft
    replicas, shards = (given[f"parallelism.data_parallel_{kind}_degree"] for kind in ("replicate", "shard"))
    each = math.prod(draft.values[f"layout.{degree}"] for degree in ("tp", "pp", "cp"))
    if shards != -1 and shards < 1:
        label = given.label("parallelism.data_parallel_shard_degree")
        raise InputError(f"{label} {shards} must be at least 1, or -1 for all remaining ranks")
    dp, why = replicas * max(shards, 1), "data_parallel_replicate_degree x data_parallel_shard_degree"
    if ranks is not None:
        if ranks % (each * replicas) or (shards > 0 and ranks != each * dp):
            some = "a multiple of " if shards < 0 else ""
            raise InputError(
                f"--ranks {ranks}: the parallel degrees in {draft.origin} need {some}{each * dp} processes"
            )
        dp, why = ranks // each, f"--ranks {ranks} / (tp x pp x cp)"
    elif shards < 0:
        draft.unknown.append(f"layout.dp: {dp} is used; give the number of processes with --ranks N")
    draft.set("layout.dp", dp, why)
    if shards != 1 and dp > 1:
        reshard = "parallelism.fsdp_reshard_after_forward"
        by_default = 2 if draft.values["layout.pp"] > 1 else 3
        given.put("layout.zero", given.choice(reshard) or by_default, reshard)
        given.put("layout.dp_replicate", replicas, "parallelism.data_parallel_replicate_degree")
    pipeline = given["parallelism.pipeline_parallel_schedule"]
    if draft.values["layout.pp"] > 1:
        draft.set("layout.schedule", "gpipe" if pipeline == "GPipe" else "1f1b", pipeline)
        if pipeline not in {"1F1B", "GPipe"}:
            draft.unread.append(f"pipeline_parallel_schedule {pipeline}: written as 1f1b, which computes the same")
    # Versions after 0.3.0 state the batch in tokens.
    in_tokens, in_sequences = "training.num_tokens_per_train_step", "training.global_batch_size"
    if given[in_tokens] > 0:
        batch, why = given[in_tokens], given.why(in_tokens)
    elif given[in_sequences] > 0:
        batch, why = given[in_sequences] * seq_len, f"{given.why(in_sequences)} x seq_len"
    else:
        batch, why = draft.values["batch.micro_batch"] * dp * seq_len, f"local_batch_size x {dp} x seq_len"
    draft.set("batch.tokens", batch, why)
    draft.set("data.tokens", given["training.steps"] * batch, f"{given.why('training.steps')} x batch")
    if given["training.dtype"] != "float32":
        draft.unread.append(f"training.dtype {given['training.dtype']}: leaven keeps weights and moments in fp32")


def _schedule(given: Settings) -> None:
    """Set warm-up and decay. The decay becomes ``wsd`` if its type is sqrt or if it follows a plateau."""
    draft = given.draft
    steps, batch = given["training.steps"], draft.values["batch.tokens"]
    warmup = min(given["lr_scheduler.warmup_steps"], steps)
    given.put("schedule.warmup_tokens", warmup * batch, "lr_scheduler.warmup_steps")
    if "lr_scheduler.total_steps" in given and given["lr_scheduler.total_steps"] != steps:
        total = given["lr_scheduler.total_steps"]
        draft.unread.append(f"lr_scheduler.total_steps {total:,}: leaven's schedule ends with the run")
    kind = given.choice("lr_scheduler.decay_type")
    left = steps - warmup
    falling = left
    if "lr_scheduler.decay_ratio" in given:
        falling = min(round(steps * given["lr_scheduler.decay_ratio"]), left)
    why = given.why("lr_scheduler.decay_type", "lr_scheduler.decay_ratio")
    if not falling:
        draft.set("schedule.decay", "constant", why)
    elif falling == left and kind != "sqrt":
        draft.set("schedule.decay", kind, why)
    else:
        draft.set("schedule.decay", "wsd", why)
        draft.set("schedule.decay_ratio", falling / steps, why)
        if kind != "sqrt":
            draft.unread.append(
                f"lr_scheduler.decay_type {kind}: after a plateau, leaven's lr falls as 1 - sqrt(p), p from 0 to 1"
            )
