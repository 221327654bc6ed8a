"""Describes Hugging Face architectures: the model shapes that they support, their config.json, and their tensors.

The data is in ``architectures.toml``. :func:`read_config` reads the config.json of a model's folder.
"""

import json
import math
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from leaven import storage
from leaven.errors import InputError
from leaven.recipe.files import explain
from leaven.recipe.shape import ModelShape

Config = dict[str, Any]
Model = TypeVar("Model", bound=BaseModel)
# For each type of a key in config.json: its name in messages, and a function that tests whether a value has this
# type.
_KINDS: dict[type, tuple[str, Callable[[Any], bool]]] = {
    int: ("a count above 0", lambda value: type(value) is int and value > 0),
    float: ("a finite number", lambda value: type(value) in {int, float} and abs(value) <= sys.float_info.max),
    bool: ("true or false", lambda value: type(value) is bool),
    str: ("a word", lambda value: type(value) is str),
    dict: ("a table", lambda value: type(value) is dict),
}
_PARTIAL = "config.json: partial rotary positions: leaven rotates whole heads (rotary_pct = 1)"


@dataclass(frozen=True)
class Stored:
    """A tensor in a Hugging Face checkpoint: one of leaven's tensors, or several stacked along the first
    dimension."""

    name: str
    parts: Mapping[str, tuple[int, ...]]  # shapes of leaven's tensors by name
    # if the parts are stacked head by head (all parts of head 0, then all parts of head 1, ...): the number of heads;
    # with fewer keys than queries, of groups of heads that share a key
    heads: int = 1
    transposed: bool = False  # whether the file stores a matrix as (fan in, fan out)

    @property
    def shape(self) -> tuple[int, ...]:
        rows, rest = sum(shape[0] for shape in self.parts.values()), next(iter(self.parts.values()))[1:]
        return (*rest, rows) if self.transposed else (rows, *rest)

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Architecture:
    """A model class of the transformers library."""

    name: str
    model_type: str
    blocks: str  # path of the list of blocks in the model, such as model.layers
    # supported values of a recipe's [model] keys; the first is the model's value if config.json does not state it
    holds: Mapping[str, list[Any]]
    # for each key of [model], the keys of config.json that contain its value; empty if other keys imply the value
    keys: Mapping[str, list[str]]
    defaults: Config  # values of keys that are missing in config.json
    ends: Mapping[str, str]  # paths of leaven's modules outside the blocks, by leaven's name
    block: Mapping[str, str]  # paths of leaven's modules inside a block, by leaven's name
    # for each of leaven's activations, its names in config.json; an export writes the first
    words: Mapping[str, list[str]] = field(default_factory=dict)
    required: Config = field(default_factory=dict)  # other keys of config.json, each with its only supported value
    # whether the fused matrix of query, key and value stores all rows of head 0, then all rows of head 1, ...
    heads_together: bool = False
    conv1d: bool = False  # whether matrices of a block have the shape (fan in, fan out)
    # whether the last matrix of each branch has the initial std initializer_range / sqrt(2 n_layers)
    scaled_branch_ends: bool = False
    # name endings of buffers that older versions of transformers saved with the weights
    buffers: Sequence[str] = ("rotary_emb.inv_freq",)

    def whole_name(self, name: str) -> str:
        """Return the full name of a checkpoint's tensor.

        In older checkpoints, names lack their first part, such as ``model.``.
        """
        prefix = self.blocks.partition(".")[0] + "."
        return name if name.startswith((prefix, self.ends["unembedding"])) else prefix + name

    def misfits(self, shape: ModelShape) -> dict[str, Any]:
        """Return the keys of a model shape whose values this architecture does not support.

        Each key is mapped to a supported value.
        """
        implied, found = _implied(shape.n_heads, shape.d_model), {}
        for key, value in (shape.added_defaults() | shape.model_dump()).items():
            default = implied.get(key, ModelShape.model_fields[key].default)
            held = self.holds.get(key, (default,))
            if key not in self.keys and value not in held:
                found[key] = held[0]
            if key == "activation" and key in self.keys and value not in self.words:
                found[key] = next(iter(self.words))
        return found

    def config(self, shape: ModelShape) -> Config:
        """Return the config.json for a model shape.

        Versions 4 and 5 of transformers have different keys for rotary positions. The result has the keys of both
        versions.
        """
        values = shape.model_dump()
        written = {theirs: values[ours] for ours, several in self.keys.items() for theirs in several}
        written |= {theirs: self.words[shape.activation][0] for theirs in self.keys.get("activation", ())}
        if shape.positions == "rope":
            rotary = {"rope_type": "default", "rope_theta": shape.rope_theta}
            if "rotary_pct" in self.defaults:
                written["rotary_pct"] = rotary["partial_rotary_factor"] = 1.0
            written["rope_parameters"] = rotary
        return {"architectures": [self.name], "model_type": self.model_type} | written | self.required

    def given(self, config: Config) -> Config:
        """Return a config.json with defaults for missing keys, after checking the types of the known keys.

        Raises:
            InputError: if a value has the wrong type; the message names its key.
        """
        given = self.defaults | {key: value for key, value in config.items() if value is not None}
        for key in (theirs for ours in _implied(1, 1) for theirs in self.keys.get(ours, ())):
            if config.get(key, ...) is None:  # null: the value follows from other keys; a missing key has the default
                given.pop(key, None)
        kinds = {key: ModelShape.model_fields[ours].annotation for ours, keys in self.keys.items() for key in keys}
        kinds |= {"initializer_range": float, "rope_parameters": dict, "rope_scaling": dict, "sliding_window": int}
        for key, kind in kinds.items():
            if key in given:
                _require(key, given[key], kind)
        return given

    def shape(self, config: Config) -> ModelShape:
        """Return the model shape that a config.json describes.

        Raises:
            InputError: if leaven's transformer does not support the value of a key.
        """
        given = self.given(config)
        for key, expected in self.required.items():
            if given.get(key, expected) != expected:
                raise InputError(
                    f"config.json: {key} = {given[key]!r}: leaven supports {self.name} only with {expected!r}"
                )
        values = {key: held[0] for key, held in self.holds.items()}
        for ours, several in self.keys.items():
            stated = {theirs: given[theirs] for theirs in several if theirs in given}
            if len(set(stated.values())) > 1:
                listed = ", ".join(f"{key} = {value!r}" for key, value in stated.items())
                raise InputError(
                    f"config.json: {listed}: leaven has a single value for these keys ({ours}); make them equal"
                )
            if stated:
                values[ours] = next(iter(stated.values()))
        if "window" in self.keys:
            values["window"] = self._window(config, values["seq_len"])
        if "activation" in self.keys:
            theirs = values["activation"]
            values["activation"] = next((ours for ours, words in self.words.items() if theirs in words), None)
            if values["activation"] is None:
                known = ", ".join(word for words in self.words.values() for word in words)
                raise InputError(f"config.json: activation {theirs!r}: leaven supports {self.name} only with {known}")
        if self.holds["positions"] == ["rope"]:
            values["rope_theta"] = self._theta(given)
        values |= {key: float(values[key]) for key in ("norm_eps", "dropout")}
        values = _implied(values["n_heads"], values["d_model"]) | values
        if "d_attention" in self.keys and values["n_heads"] * values["d_head"] != values["d_model"]:
            values["d_attention"] = values["n_heads"] * values["d_head"]
        return validated(ModelShape, values, "config.json: not a shape that leaven supports")

    def _window(self, config: Config, seq_len: int) -> int | None:
        """Return the sliding window, or None if it is null or not shorter than a sequence."""
        window = config.get("sliding_window", self.defaults["sliding_window"])  # null is no window, a missing key is
        return window if window is not None and window < seq_len else None

    def _theta(self, given: Config) -> float:
        """Return the theta of the rotary positions, which transformers 4 and 5 write under different keys."""
        both = [given.get(key, {}) for key in ("rope_scaling", "rope_parameters")]
        for stated in both:
            kind = stated.get("rope_type", stated.get("type", "default"))
            if kind != "default":
                raise InputError(
                    f"config.json: rope_type {kind!r}: leaven supports only the default rotary positions"
                )
            if stated.get("partial_rotary_factor", 1) != 1:
                raise InputError(_PARTIAL)
        stated = both[0] or both[1]  # the old spelling replaces the new one, as in transformers
        if "partial_rotary_factor" not in stated and given.get("rotary_pct", 1) != 1:
            raise InputError(_PARTIAL)
        theta = stated.get("rope_theta")
        if theta is None:
            theta = given[self.keys["rope_theta"][0]]
        _require("rope_theta", theta, float)
        return float(theta)

    def tensors(self, shape: ModelShape) -> Iterator[Stored]:
        """Yield the tensors of a checkpoint, including biases that this architecture always has."""
        if True in self.holds.get("bias", ()):
            shape = shape.model_copy(update={"bias": True})
        places: dict[str, dict[str, tuple[int, ...]]] = {}
        for parameter in shape.parameters():
            module, _, kind = parameter.name.rpartition(".")
            if parameter.layer is None:
                place = self.ends[module]
            else:
                place = f"{self.blocks}.{parameter.layer}.{self.block[module.split('.', 2)[2]]}"
            places.setdefault(f"{place}.{kind}", {})[parameter.name] = parameter.shape
        for name, parts in places.items():
            fused = self.heads_together and any(".attention.query." in part for part in parts)
            matrix = len(next(iter(parts.values()))) == 2
            turned = self.conv1d and name.startswith(self.blocks) and matrix
            yield Stored(name, parts, heads=shape.n_kv_heads if fused else 1, transposed=turned)


def _implied(heads: int, width: int) -> dict[str, int]:
    """Return the sizes that a config.json may leave out, computed from the number of heads and the width."""
    return {"n_kv_heads": heads, "d_head": width // heads, "d_ff": 4 * width}


def _require(key: str, value: Any, kind: Any) -> None:
    wanted, fits = _KINDS.get(kind, _KINDS[str])  # a Literal is a word
    if not fits(value):
        raise InputError(f"config.json: {key} = {value!r} must be {wanted}")


def validated(kind: type[Model], values: Mapping[str, Any], problem: str) -> Model:
    """Return an instance of the recipe class ``kind``, such as ``ModelShape``, with these values.

    Raises:
        InputError: if the values are not valid. The message begins with ``problem``.
    """
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise InputError(f"{problem}: {explain(error)}") from None


_TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
_TABLES: dict[str, Any] = {}
for _table in _TABLE["architecture"]:
    _TABLES[_table["name"]] = _TABLES.get(_table.pop("like", None), {}) | _table
ARCHITECTURES = tuple(Architecture(**table) for table in _TABLES.values())
MEGATRON = Architecture(**_TABLE["megatron"])


def module_names() -> Mapping[str, set[str]]:
    """Map each of leaven's modules, such as ``attention.out``, to its names elsewhere, such as ``o_proj``."""
    names = {module: set(several) for module, several in _TABLE["names"].items()}
    for architecture in ARCHITECTURES:
        for module, path in [*architecture.block.items(), *architecture.ends.items()]:
            fused = architecture.block.get("attention.query") == architecture.block.get("attention.key") == path
            names.setdefault("attention.query_key_value" if fused else module, set()).add(path.rpartition(".")[2])
    return names


def nearest(shape: ModelShape, trained: bool = False) -> tuple[Architecture, dict[str, Any]]:
    """Return the architecture that represents a model shape with the fewest changes, and the changes.

    The changes map keys of the shape to new values. A model without biases can be stored with biases of 0. If the
    stored model will be ``trained``, these biases count as a change, because training changes the zeros.
    """
    changes = []
    for architecture in ARCHITECTURES:
        misfits = architecture.misfits(shape)
        if trained and architecture.holds.get("bias") == [True, False] and not shape.bias:
            misfits["bias"] = True
        changes.append((architecture, misfits))
    return min(changes, key=lambda each: len(each[1]))


def holding(shape: ModelShape) -> Architecture:
    """Return an architecture that can represent a model shape.

    Raises:
        InputError: if no architecture can represent the shape. The message names the nearest architecture, and the
            keys to change.
    """
    architecture, misfits = nearest(shape)
    if misfits:
        changes = ", ".join(f"{key} = {json.dumps(value)}" for key, value in misfits.items() if value is not None)
        removed = ", ".join(key for key, value in misfits.items() if value is None)  # TOML has no null
        steps = [f"set [model] {changes}"] * bool(changes) + [f"remove {removed}"] * bool(removed)
        raise InputError(
            "no Hugging Face architecture that leaven writes can represent this model; for the nearest one, "
            f"{architecture.name}, {' and '.join(steps)}"
        )
    return architecture


@dataclass(frozen=True)
class HuggingFaceModel:
    """A model that the config.json of a folder describes."""

    folder: Path
    architecture: Architecture
    config: Config  # the contents of config.json
    shape: ModelShape


def read_config(path: Path) -> HuggingFaceModel:
    """Return the model that the config.json at ``path`` describes.

    Raises:
        InputError: if the file cannot be read, or leaven's transformer does not support the model.
    """
    config = read_json(path)
    try:
        architecture = _named(config)
        return HuggingFaceModel(path.parent, architecture, config, architecture.shape(config))
    except InputError as error:
        raise InputError(f"{path.parent}/{error}") from None


def _named(config: Config) -> Architecture:
    names = config.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise InputError(f"config.json: architectures = {names!r} must be a list of names")
    for architecture in ARCHITECTURES:
        if architecture.name in names or (not names and config.get("model_type") == architecture.model_type):
            return architecture
    stated = ", ".join(names) or config.get("model_type", "none")
    known = ", ".join(architecture.name for architecture in ARCHITECTURES)
    raise InputError(f"config.json: architecture {stated} is not supported; leaven reads {known}")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file in a model's folder, and return its object.

    Raises:
        InputError: if the file is missing or damaged, or is not a JSON object.
    """
    try:
        document = json.loads(storage.read(path))
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; give a folder that save_pretrained of transformers wrote") from None
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: cannot be read as JSON ({error})") from None
    if not isinstance(document, dict):
        raise InputError(f"{path}: not a JSON object")
    return document
