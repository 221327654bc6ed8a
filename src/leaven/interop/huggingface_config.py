"""Reads the config.json of a model in Hugging Face's format: its architecture and its shape."""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from leaven import storage
from leaven.errors import InputError
from leaven.interop.architectures import ARCHITECTURES, REFUSED, Architecture, Config, field_of, implied, layer_types
from leaven.recipe.files import validated
from leaven.recipe.shape import MAX_LAYERS, ModelShape

# By type of a value in config.json: the name of the type in messages, and a function that tests a value.
_KINDS: dict[type, tuple[str, Callable[[Any], bool]]] = {
    int: ("a count above 0", lambda value: type(value) is int and value > 0),
    float: ("a finite number", lambda value: type(value) in {int, float} and abs(value) <= sys.float_info.max),
    bool: ("true or false", lambda value: type(value) is bool),
    str: ("a word", lambda value: type(value) is str),
    dict: ("a table", lambda value: type(value) is dict),
    list: ("a list", lambda value: type(value) is list),
}
# Optional keys of [model]. null in config.json means that the model has no window or soft cap. If the key is missing
# there, the default of the architecture applies.
_OPTIONAL = ("window", "attention_softcap", "logit_softcap")


@dataclass(frozen=True)
class HuggingFaceModel:
    """A model that the config.json of a folder describes."""

    folder: Path
    architecture: Architecture
    config: Config  # the contents of config.json
    shape: ModelShape

    @property
    def further_tokens(self) -> bool:
        """Whether the checkpoint may have layers for multi-token prediction, which leaven does not read."""
        return bool(given_keys(self.architecture, self.config).get("num_nextn_predict_layers"))


def read_config(path: Path) -> HuggingFaceModel:
    """Return the model that a config.json describes, or raise InputError if leaven does not support it."""
    config = read_json(path)
    try:
        architecture = _named(config)
        return HuggingFaceModel(path.parent, architecture, config, shape_of(architecture, config))
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def _named(config: Config) -> Architecture:
    names, kind = config.get("architectures"), config.get("model_type")
    names = [] if names is None else names
    if kind is not None:
        _require("model_type", kind, str)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise InputError(f"architectures = {names!r} must be a list of names")
    for architecture in ARCHITECTURES:
        if architecture.name in names and kind not in {None, architecture.model_type}:
            raise InputError(
                f"architectures has {architecture.name}, whose model_type is {architecture.model_type}, "
                f"but model_type is {kind}; correct one"
            )
        if architecture.name in names or (not names and kind == architecture.model_type):
            return architecture
    if not (stated := ", ".join(names) or kind):
        raise InputError(
            "has neither architectures nor model_type, so it is not a model's config.json; give the model's "
            "config.json, and if this file has the arguments of a Trainer, rename it to training_args.json"
        )
    for name in names:
        if name in REFUSED:
            raise InputError(f"{name} has {REFUSED[name]}, which leaven cannot represent")
    known = ", ".join(architecture.name for architecture in ARCHITECTURES)
    raise InputError(f"architecture {stated} is not supported; leaven reads {known}")


def given_keys(architecture: Architecture, config: Config) -> Config:
    """Return a config.json with current key names. A missing or null key gets the architecture's default.

    Null keys for the window, the softcaps and the sizes in `implied` get no default. Raise InputError if a known key
    has a value of the wrong type, or if a key and its alias have different values.
    """
    stated: Config = {}
    for key, value in config.items():
        name = architecture.aliases.get(key, key)
        if value is None:
            continue
        if name in stated and stated[name] != value:
            other = next(old for old in config if old != key and architecture.aliases.get(old, old) == name)
            raise InputError(f"{other} = {stated[name]!r} and {key} = {value!r} mean the same; remove one")
        stated[name] = value
    given = architecture.defaults | stated
    for key in (theirs for ours in (*implied(1, 1), *_OPTIONAL) for theirs in architecture.keys.get(ours, ())):
        if config.get(key, ...) is None:  # null replaces the default, a missing key does not
            given.pop(key, None)
    annotations = {key: field_of(ours).annotation for ours, keys in architecture.keys.items() for key in keys}
    kinds = {key: next(iter(get_args(kind)), kind) for key, kind in annotations.items()}
    kinds |= {
        key: type(words[0])
        for ours, each in architecture.words.items()
        for words in each.values()
        for key in architecture.keys[ours]
    }
    kinds |= {"initializer_range": float, "rope_parameters": dict, "rope_scaling": dict, "mlp_only_layers": list}
    kinds |= {"layer_types": list} | ({architecture.logit_scale: float} if architecture.logit_scale else {})
    for key, kind in kinds.items():
        if key in given and not (given[key] == 0 and key in architecture.keys.get("experts.dense_layers", ())):
            _require(key, given[key], kind)
    return given


def shape_of(architecture: Architecture, config: Config) -> ModelShape:
    """Return the model shape of a config.json. Raise InputError if leaven does not support this shape."""
    given = given_keys(architecture, config)
    only = {"is_causal": True} | architecture.required | dict.fromkeys(architecture.absent)
    for key, expected in only.items():
        if given.get(key, expected) != expected:
            raise InputError(
                f"{key} = {json.dumps(given[key])}: leaven supports {architecture.name} only with "
                f"{json.dumps(expected)}"
            )
    values = {key: held[0] for key, held in architecture.holds.items()}
    for ours, several in architecture.keys.items():
        stated = {theirs: given[theirs] for theirs in several if theirs in given}
        if len(stated) > 1 and len(set(stated.values())) > 1:
            listed = ", ".join(f"{key} = {value!r}" for key, value in stated.items())
            limit = architecture.limits.get(ours, f"leaven has only one value, {ours}, for all of these keys")
            raise InputError(f"{listed}: {limit}, so leaven cannot represent this model")
        if stated:
            values[ours] = next(iter(stated.values()))
    if values.get("window", 0) >= values["seq_len"]:  # a window as long as a sequence changes nothing
        del values["window"]
    _set_global_layers(architecture, given, values)
    for ours, words in architecture.words.items():
        theirs = values[ours]
        values[ours] = next((mine for mine, several in words.items() if theirs in several), None)
        if values[ours] is None:
            known = ", ".join(str(word) for several in words.values() for word in several)
            raise InputError(f"{ours} {theirs!r}: leaven supports {architecture.name} only with {known}")
    if values.get("attention_bias") == "none":
        del values["attention_bias"]
    if architecture.holds["positions"] == ["rope"]:
        values |= _rotary(architecture, given)
    values |= {key: float(values[key]) for key in ("norm_eps", "dropout")}
    if architecture.experts:
        _nest_experts(values)
    values = implied(values["n_heads"], values["d_model"]) | values
    if "d_attention" in architecture.keys and values["n_heads"] * values["d_head"] != values["d_model"]:
        values["d_attention"] = values["n_heads"] * values["d_head"]
    return validated(ModelShape, values, "not a shape that leaven supports")


def _nest_experts(values: dict[str, Any]) -> None:
    """Replace the keys ``experts.KEY`` by one key ``experts`` with a table, and set ``d_ff`` if it is missing."""
    experts = {key.removeprefix("experts."): values.pop(key) for key in list(values) if key.startswith("experts.")}
    dense = experts.get("dense_layers", 0)
    if isinstance(dense, list):
        if dense != list(range(len(dense))):
            raise InputError(
                f"mlp_only_layers = {dense}: leaven supports layers without experts only as the first layers"
            )
        experts["dense_layers"] = len(dense)
    if "weight_scale" in experts:
        experts["weight_scale"] = float(experts["weight_scale"])
    values["experts"] = experts
    values.setdefault("d_ff", experts["d_expert"])  # no layer has an MLP of this size


def _rotary(architecture: Architecture, given: Config) -> dict[str, float]:
    """Return ``rope_theta`` and ``rotary_fraction``. transformers 4 and 5 store them under different keys."""
    both = [given.get(key, {}) for key in ("rope_scaling", "rope_parameters")]
    for stated in both:
        kind = stated.get("rope_type", stated.get("type", "default"))
        if kind != "default":
            raise InputError(f"rope_type {kind!r}: leaven supports only the default rotary positions")
    stated = both[0] or both[1]  # the old spelling replaces the new one, as in transformers
    theta = stated.get("rope_theta")
    if theta is None:
        theta = given[architecture.keys["rope_theta"][0]]
    old = architecture.keys.get("rotary_fraction", [""])[0]
    fraction = stated.get("partial_rotary_factor", given.get(old, 1.0))
    for key, value in (("rope_theta", theta), ("partial_rotary_factor", fraction)):
        _require(key, value, float)
    if not old and fraction != 1:
        raise InputError(f"partial_rotary_factor = {fraction:g}: leaven supports {architecture.name} only with 1")
    return {"rope_theta": float(theta), "rotary_fraction": float(fraction)}


def _set_global_layers(architecture: Architecture, given: Config, values: dict[str, Any]) -> None:
    """Convert ``global_every`` from a list of layer types to a number n: every n-th layer has no window."""
    if "global_every" not in architecture.keys:
        if "window" in values and any(kind != "sliding_attention" for kind in given.get("layer_types", ())):
            raise InputError(
                f"layer_types = {given['layer_types']}: leaven supports {architecture.name} only with a "
                "sliding window in all layers"
            )
        return
    if (layers := values["n_layers"]) > MAX_LAYERS:  # the length of the lists of types below
        raise InputError(f"{layers:,} layers; leaven supports at most {MAX_LAYERS:,}")
    types = values.pop("global_every", None) or layer_types(layers, 2)  # the default of Gemma 2
    every = next((n for n in range(layers + 1) if types[:layers] == layer_types(layers, n)), None)
    if every is None:
        raise InputError(
            f"layer_types = {types}: leaven has a sliding window in all layers, or in all but every n-th layer"
        )
    if every == 1:
        values.pop("window", None)
    if every > 1 and "window" in values:
        values["global_every"] = every


def _require(key: str, value: Any, kind: Any) -> None:
    wanted, fits = _KINDS.get(kind, _KINDS[str])  # a Literal is a word
    if not fits(value):
        raise InputError(f"{key} = {value!r} must be {wanted}")


def read_json(path: Path) -> dict[str, Any]:
    try:
        document = storage.foreign_json(storage.read(path))
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; give a folder that save_pretrained of transformers wrote") from None
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: cannot be read as JSON ({error})") from None
    if not isinstance(document, dict):
        raise InputError(f"{path}: not a JSON object")
    return document
