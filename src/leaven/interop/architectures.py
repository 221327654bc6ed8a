"""Describes Hugging Face architectures: the model shapes that they support, their config.json, and their tensors.

``architectures.toml`` also describes the models of Megatron-LM and torchtitan.
"""

import json
import math
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from leaven.errors import InputError
from leaven.recipe.experts import Experts
from leaven.recipe.recipe import set_path
from leaven.recipe.shape import ModelShape, Role
from leaven.scaling.table import GAINS

Config = dict[str, Any]
# Keys of [model.experts] that change training only, not what the model computes.
TRAINING_ONLY = frozenset({"balance_loss", "bias_step", "router_z_loss"})
# For values of ``experts.balance`` that use biases of the router: the value without these biases.
WITHOUT_BIASES = {"bias": "none", "both": "loss"}
# How much a change of these keys counts in `nearest`. A change of any other key counts 1.
_LARGE = {"experts": 1_000, "norm_placement": 10, "parallel_branches": 10}


@dataclass(frozen=True)
class Stored:
    """A tensor in another library's model. It holds one or more of leaven's tensors, or one expert's matrix."""

    name: str
    parts: Mapping[str, tuple[int, ...]]  # shapes of leaven's tensors by name
    # number of groups of rows in each part; a group belongs to one key head or to one expert. The tensor has group 0
    # of every part first, then group 1 of every part, ...
    heads: int = 1
    transposed: bool = False  # whether the file stores a matrix as (fan in, fan out)
    expert: int | None = None  # number of the expert if this is the matrix of one; leaven's tensor has all experts
    paired: int = 0  # the head dimension for queries, keys and their norms with ``paired_rotary``; otherwise 0

    @property
    def of_router_bias(self) -> bool:
        """Whether the tensor has biases that a router adds to expert scores. Such biases are always in fp32."""
        return next(iter(self.parts)).endswith("router.bias")

    @property
    def shape(self) -> tuple[int, ...]:
        rows, rest = sum(shape[0] for shape in self.parts.values()), next(iter(self.parts.values()))[1:]
        return (*rest, rows) if self.transposed else (rows, *rest)

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Architecture:
    """A model class of transformers, Megatron-LM or torchtitan. Only transformers uses a config.json."""

    name: str
    model_type: str
    blocks: str  # path of the list of blocks in the model, such as model.layers
    # by key of a recipe's [model], such as norm or experts.router: the supported values. A config.json that does not
    # state the value has the first of them.
    holds: Mapping[str, list[Any]]
    # by key of [model]: the keys of config.json that state its value; none if the value follows from other keys
    keys: Mapping[str, list[str]]
    defaults: Config  # values of keys that are missing in config.json
    ends: Mapping[str, str]  # paths of modules outside the blocks, by leaven's name of the module
    block: Mapping[str, str]  # paths of modules inside a block, by leaven's name of the module
    # by key of [model] that several keys of config.json state: why their values must be equal, for messages
    limits: Mapping[str, str] = field(default_factory=dict)
    # paths of router and experts inside a block, by leaven's name; {} stands for the number of an expert
    experts: Mapping[str, str] = field(default_factory=dict)
    router_bias: str | None = None  # path of the biases that a router adds to the scores of experts, if it has any
    # by key of [model], and then by leaven's value: the words for this value in config.json, such as
    # activation: {swiglu: [silu, swish]}. An export writes the first word.
    words: Mapping[str, Mapping[str, list[Any]]] = field(default_factory=dict)
    required: Config = field(default_factory=dict)  # more keys of config.json, each with its only supported value
    absent: Sequence[str] = ()  # keys of config.json that must be null or missing
    # other names that transformers reads for keys -> the names in ``keys``: its attribute_map, in either direction
    aliases: Mapping[str, str] = field(default_factory=dict)
    heads_together: bool = False  # a fused matrix has query, key and value of head 0 first, then those of head 1
    conv1d: bool = False  # whether matrices of a block have the shape (fan in, fan out)
    scaled_branch_ends: bool = False  # branches end in a matrix of std initializer_range / sqrt(2 n_layers)
    offset_gains: bool = False  # whether norms multiply by 1 + weight: leaven's gain is 1 + the stored weight
    scaled_embedding: bool = False  # whether the model multiplies the output of its embedding by sqrt(d_model)
    logits_bias: bool = False  # whether the unembedding has a bias, unlike leaven's: an export writes 0
    logit_scale: str | None = None  # key of config.json whose value multiplies the logits; an export writes 1
    paired_rotary: bool = False  # rotary positions pair entries 2i and 2i + 1; leaven's pair i and i + d_head / 2
    buffers: Sequence[str] = ("rotary_emb.inv_freq",)  # name endings; older transformers saved them as weights

    def whole_name(self, name: str) -> str:
        """Return the full name of a tensor. Older checkpoints leave out the first part, such as ``model.``."""
        prefix = self.blocks.partition(".")[0] + "."
        return name if name.startswith((prefix, self.ends["unembedding"])) else prefix + name

    def misfits(self, shape: ModelShape) -> dict[str, Any]:
        """Return the keys of ``shape`` whose values this architecture does not support, each with a supported value.

        The entry ``experts: None`` means that only one of the two, shape or architecture, has experts.
        """
        values = self._values(shape)
        if bool(self.experts) != bool(shape.experts):
            values = {key: value for key, value in values.items() if not key.startswith("experts.")}
        follows, found = implied(shape.n_heads, shape.d_model), {}
        for key, value in values.items():
            held = self.holds.get(key)
            if held is None and key in self.words:
                held = list(self.words[key])
            if held is None and key not in self.keys:
                held = [follows.get(key, field_of(key).default)]
            if held is not None and value not in held:
                found[key] = held[0]
        first: dict[str, str] = {}  # for each key of config.json, the first of leaven's keys that it contains
        for ours, several in self.keys.items():
            for theirs in several:
                other = first.setdefault(theirs, ours)
                if values.get(ours) != values.get(other):
                    found[ours] = values[other]
        return found | ({"experts": None} if bool(self.experts) != bool(shape.experts) else {})

    def _values(self, shape: ModelShape) -> dict[str, Any]:
        """Return ``shape`` as {key of [model]: value}. For keys in ``self.words``, "none" replaces None."""
        values = shape_values(shape)
        return values | {key: "none" for key in self.words if values[key] is None}

    def config(self, shape: ModelShape) -> Config:
        """Return the config.json for a model shape, with the rotary keys of transformers versions 4 and 5."""
        values = self._values(shape)
        values |= {key: words[values[key]][0] for key, words in self.words.items()}
        written = {theirs: values[ours] for ours, several in self.keys.items() for theirs in several}
        if "mlp_only_layers" in written:
            written["mlp_only_layers"] = list(range(written["mlp_only_layers"]))
        if "layer_types" in written:
            written["layer_types"] = layer_types(shape.n_layers, shape.global_every if shape.window else 1)
            written["sliding_window"] = shape.window or shape.seq_len  # transformers refuses null
        if shape.positions == "rope":
            rotary = {"rope_type": "default", "rope_theta": shape.rope_theta}
            if "rotary_fraction" in self.keys:
                rotary["partial_rotary_factor"] = shape.rotary_fraction
            written["rope_parameters"] = rotary
        # Some classes have a padding token by default, and transformers does not train its embedding.
        written["pad_token_id"] = None
        if self.logit_scale:
            written[self.logit_scale] = 1.0
        return {"architectures": [self.name], "model_type": self.model_type} | written | self.required

    def factors(self, shape: ModelShape, config: Config) -> dict[str, float]:
        """Return the factors in ``leaven's weight = factor x (stored weight + offset)``, by leaven's name.

        Some architectures multiply the output of the embedding by a constant a, or the logits by a constant b. leaven
        multiplies the embedding's weights by a, and the unembedding's by b. If one matrix is both, it is multiplied
        by a, and the gain of the final norm by b / a. Factors of 1 are left out.
        """
        embedding = math.sqrt(shape.d_model) if self.scaled_embedding else 1.0
        logits = 1.0
        if self.logit_scale:
            stated = config.get(self.logit_scale)
            logits = float(self.defaults[self.logit_scale] if stated is None else stated)
        readout = (
            {"norm.final.weight": logits / embedding} if shape.tied_embeddings else {"unembedding.weight": logits}
        )
        return {name: factor for name, factor in ({"embedding.weight": embedding} | readout).items() if factor != 1}

    def offsets(self, shape: ModelShape) -> dict[str, float]:
        """Return the offsets of stored weights, by leaven's name: 1.0 for each gain that is stored as gain - 1."""
        return {each.name: 1.0 for each in shape.parameters() if self.offset_gains and each.role in GAINS}

    def tensors(self, shape: ModelShape) -> Iterator[Stored]:
        """Yield the tensors of a checkpoint. They include biases if the shape or this architecture has biases."""
        if True in self.holds.get("bias", ()):
            shape = shape.model_copy(update={"bias": True})
        places: dict[str, dict[str, tuple[int, ...]]] = {}
        paths = {**self.block, **self.experts}
        for parameter in shape.parameters():
            module, _, kind = parameter.name.rpartition(".")
            if parameter.layer is None:
                place = self.ends[module]
            else:
                place = f"{self.blocks}.{parameter.layer}.{paths[module.split('.', 2)[2]]}"
            places.setdefault(f"{place}.{kind}", {})[parameter.name] = parameter.shape
            if self.router_bias and parameter.role is Role.ROUTER:
                bias = f"{self.blocks}.{parameter.layer}.{self.router_bias}"
                places[bias] = {f"{module}.bias": parameter.shape[:1]}
        if self.logits_bias:
            places[f"{self.ends['unembedding']}.bias"] = {"unembedding.bias": (shape.vocab_size,)}
        for name, parts in places.items():
            first = next(iter(parts.values()))
            if len(first) == 3:  # in a checkpoint, each expert has its own matrices
                of_one = {part: size[1:] for part, size in parts.items()}
                yield from (Stored(name.format(expert), of_one, expert=expert) for expert in range(first[0]))
                continue
            fused = self.heads_together and any(".attention.query." in part for part in parts)
            turned = self.conv1d and name.startswith(self.blocks) and len(first) == 2
            rotated = self.paired_rotary and re.search(r"\.(query|key)\.", next(iter(parts)))
            yield Stored(
                name,
                parts,
                heads=shape.n_kv_heads if fused else 1,
                transposed=turned,
                paired=shape.d_head if rotated else 0,
            )

    def parameters(self, shape: ModelShape) -> Iterator[Stored]:
        """Yield the trainable parameters of a model that transformers 5 has loaded. Router biases are not trainable.

        Unlike the checkpoint, the model has two tensors per layer for all experts. ``gate_up_proj`` has the gate and
        the input matrix of expert 0, then those of expert 1, and so on. ``down_proj`` has the output matrices.
        """
        for stored in self.tensors(shape):
            if stored.expert is None and not stored.of_router_bias:
                yield replace(stored, name=stored.name.replace(".block_sparse_moe.", ".mlp."))
            elif stored.expert == 0 and ".experts.out." in next(iter(stored.parts)):
                layer = next(iter(stored.parts)).split(".")[1]
                whole = {each.name: each.shape for each in shape.parameters() if each.role is Role.EXPERT_WEIGHT}
                mine = {name: size for name, size in whole.items() if name.startswith(f"layers.{layer}.")}
                ends = {name: mine.pop(name) for name in stored.parts}
                (number, *_) = next(iter(ends.values()))
                place = f"{self.blocks}.{layer}.mlp.experts"
                yield Stored(f"{place}.gate_up_proj", mine, heads=number)
                yield Stored(f"{place}.down_proj", ends)


def shape_values(shape: ModelShape) -> dict[str, Any]:
    """Return the values of a shape by key, such as ``experts.number``, without ``TRAINING_ONLY`` keys."""
    values = shape.added_defaults() | shape.model_dump()
    if shape.attention_bias == ("all" if shape.bias else "none"):
        values["attention_bias"] = None
    if (experts := values.pop("experts")) is not None:
        values |= {f"experts.{key}": value for key, value in experts.items() if key not in TRAINING_ONLY}
    return values


def changed(shape: ModelShape, changes: Mapping[str, Any]) -> ModelShape:
    """Return a copy of a shape with other values for the keys in ``changes``, such as ``experts.number``."""
    values = shape.model_dump()
    for key, value in changes.items():
        set_path(values, key, value)
    return ModelShape.model_validate(values)


def field_of(key: str) -> Any:
    """Return the pydantic field of a key of [model], such as ``d_model`` or ``experts.number``."""
    return (Experts if key.startswith("experts.") else ModelShape).model_fields[key.removeprefix("experts.")]


def layer_types(layers: int, global_every: int) -> list[str]:
    """Return ``layer_types`` of config.json: full attention in every n-th layer, else a sliding window."""
    return [
        "full_attention" if global_every and (n + 1) % global_every == 0 else "sliding_attention"
        for n in range(layers)
    ]


def implied(heads: int, width: int) -> dict[str, int]:
    """Return the sizes that a config.json may leave out, computed from the number of heads and the width."""
    return {"n_kv_heads": heads, "d_head": width // heads, "d_ff": 4 * width}


_TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def _with_like(table: Config, known: Mapping[str, Config]) -> Config:
    """Return an architecture's ``table`` with missing entries copied from another architecture.

    The entry ``like`` names it, and the entry ``without`` lists entries that are not copied.
    """
    base, without = known.get(table.pop("like", ""), {}), table.pop("without", ())
    inner = {
        name: {
            key: entry for key, entry in (inherited | table.get(name, {})).items() if f"{name}.{key}" not in without
        }
        for name, inherited in base.items()
        if isinstance(inherited, dict)
    }
    return base | table | inner


_TABLES: dict[str, Config] = {}
for _table in _TABLE["architecture"]:
    _TABLES[_table["name"]] = _with_like(_table, _TABLES)
REFUSED: Mapping[str, str] = _TABLE["refused"]
ARCHITECTURES = tuple(Architecture(**table) for table in _TABLES.values())
MEGATRON = Architecture(**_TABLE["megatron"])
TORCHTITAN = Architecture(**_TABLE["torchtitan"])

_FUSED = {
    ("attention.query", "attention.key", "attention.value"): "attention.query_key_value",
    ("mlp.gate", "mlp.in"): "mlp.gate_in",
}


def module_names() -> Mapping[str, set[str]]:
    """Return the names that other libraries give to leaven's modules, such as ``o_proj`` for ``attention.out``."""
    names = {module: set(several) for module, several in _TABLE["names"].items()}
    for architecture in ARCHITECTURES:
        for module, path in [*architecture.block.items(), *architecture.ends.items()]:
            several = tuple(each for each, other in architecture.block.items() if other == path)
            names.setdefault(_FUSED.get(several, module), set()).add(path.rpartition(".")[2])
    return names


def nearest(shape: ModelShape, trained: bool = False) -> tuple[Architecture, dict[str, Any]]:
    """Return the architecture that can represent a shape after the fewest changes, and {key: new value} of these.

    Some changes count more than others (`_LARGE`). An architecture that always has biases can represent a shape
    without biases: biases of 0 have no effect. But training would change these biases. So if the model will be
    ``trained``, ``bias = true`` is one of the changes.
    """
    changes = []
    for architecture in ARCHITECTURES:
        misfits = architecture.misfits(shape)
        if trained and architecture.holds.get("bias") == [True, False] and not shape.bias:
            misfits["bias"] = True
        if trained and shape.experts and "experts.balance" in misfits:
            misfits["experts.balance"] = WITHOUT_BIASES[shape.experts.balance]
        changes.append((architecture, misfits))
    return min(changes, key=lambda each: sum(_LARGE.get(key, 1) for key in each[1]))


def holding(shape: ModelShape) -> Architecture:
    """Return an architecture that can represent a model shape, or raise InputError if there is none."""
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
