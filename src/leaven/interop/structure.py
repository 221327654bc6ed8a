"""Inspects a torch model: its parameters, modules and blocks, and the matching parameters of a smaller model."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import cast

from torch import nn

from leaven.errors import InputError

_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module"}  # torch.compile and checkpointing add them to names
# Names of attributes of modules: the head dimension, the scale of query . key, and a factor on an embedding's output.
_HEAD_DIM = ("head_dim", "head_size", "d_head", "attention_head_size", "qk_head_dim")
_LOGIT_SCALE = ("scaling", "scale", "softmax_scale")
_EMBEDDING_SCALE = ("scalar_embed_scale", "embed_scale")
NO_BLOCKS = "no nn.ModuleList or nn.Sequential contains all blocks and nothing else"
EXPERTS = "experts"  # name of the module that contains the routed experts of a block, as in transformers


@dataclass(frozen=True, eq=False)
class ParameterSite:
    """A parameter of a torch model and its position: name, modules and block."""

    name: str
    label: str  # the name with "*" in place of the block's number
    stack: str  # the path of the list of blocks that contains the parameter; "" outside the blocks
    layer: int | None  # the block's number; None outside the blocks
    parameter: nn.Parameter
    owners: tuple[nn.Module, ...]  # the modules that contain the parameter; several if it is tied
    after_blocks: bool  # whether it is outside the blocks and registered after the first of them
    experts: nn.Module | None  # for a parameter of routed experts: the module that contains all of them
    base_shape: tuple[int, ...] = ()  # shape of the matching parameter in the smaller model; `matched` sets it

    @property
    def owner(self) -> nn.Module:
        return self.owners[0]

    @property
    def embedding_scale(self) -> float:
        """The factor on the output of an embedding, from an attribute such as ``embed_scale``, or 1."""
        found = _first(self.owner, _EMBEDDING_SCALE, float)
        return float(getattr(*found)) if found else 1.0

    @property
    def path(self) -> tuple[str, ...]:
        """The path of the parameter's module, split at the dots, with "*" for the block's number."""
        return tuple(self.label.split(".")[:-1])

    @property
    def is_bias(self) -> bool:
        return self.name.endswith(".bias")

    @property
    def shape(self) -> tuple[int, ...]:
        """(fan out, fan in) for a matrix, (experts, fan out, fan in) for experts, even if the transpose is stored."""
        shape = tuple(self.parameter.shape)
        if len(shape) == 3 and getattr(self.experts, "is_transposed", False):
            return (shape[0], *shape[:0:-1])
        return shape[::-1] if is_a(self.owner, "Conv1D") else shape

    @property
    def beside_experts(self) -> tuple[str, ...]:
        """For a routed expert: the path of the MoE module, which contains the experts and their router."""
        return self.path[: self.path.index(EXPERTS)]

    @property
    def n_experts(self) -> int:
        listed = isinstance(self.experts, nn.ModuleList | nn.ModuleDict)
        return len(cast(nn.ModuleList, self.experts)) if listed else self.shape[0]


@dataclass(frozen=True)
class ModelStructure:
    """The facts about a model's structure that the scaling rules depend on."""

    sites: tuple[ParameterSite, ...]  # all parameters
    stacks: Mapping[str, int]  # number of blocks of each list of blocks, by the path of the list
    width: int  # d_model, read from the first embedding
    vocabularies: frozenset[int]  # num_embeddings of the embeddings outside the blocks
    head_dims: frozenset[int]  # head dimensions that attention modules have as an attribute


def is_a(module: nn.Module, name: str) -> bool:
    """Return whether a module's class or a base class has this name. FSDP2 replaces classes by subclasses."""
    return any(kind.__name__ == name for kind in type(module).__mro__)


def unwrapped(model: nn.Module, argument: str) -> nn.Module:
    """Return a model without the wrapper of torch.compile, if any. ``argument`` names the model in messages."""
    inner = getattr(model, "_orig_mod", model)
    if not isinstance(inner, nn.Module):
        raise InputError(f"{argument} is {inner!r:.60}; give an nn.Module")
    return inner


def inspect_model(model: nn.Module) -> ModelStructure:
    """Return the structure of a model. The width is that of the first ``nn.Embedding`` outside the blocks."""
    stacks = _stacks(model)
    found: dict[int, list[tuple[str, nn.Module, nn.Parameter]]] = defaultdict(list)
    experts: dict[str, nn.Module] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if path.endswith(f".{EXPERTS}"):
            experts.setdefault(bare_name(path), module)
        for kind, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            found[id(parameter)].append((bare_name(f"{path}.{kind}" if path else kind), module, parameter))
    sites: list[ParameterSite] = []
    for places in found.values():
        name, _, parameter = places[0]
        label, stack, layer = _label(name, stacks)
        for other, _, _ in places:
            if _label(other, stacks)[1:] != (stack, layer):
                raise InputError(
                    f"{name} and {other} are the same parameter, but the rules assume that blocks do not share "
                    "weights (depth is the number of blocks); give every block its own weights"
                )
        after = layer is None and any(site.layer is not None for site in sites)
        owners = tuple(owner for _, owner, _ in places)
        before, inside, _ = name.partition(f".{EXPERTS}.")
        routed = experts.get(f"{before}.{EXPERTS}") if inside and layer is not None else None
        sites.append(ParameterSite(name, label, stack, layer, parameter, owners, after, routed))
    embeddings = [s.owner for s in sites if s.layer is None and isinstance(s.owner, nn.Embedding)]
    if not embeddings:
        raise InputError(
            f"{type(model).__name__} has no nn.Embedding outside its blocks, so its width is unknown; give a model "
            "that embeds its tokens with an nn.Embedding"
        )
    heads = (_first(module, _HEAD_DIM, int) for module in model.modules())
    return ModelStructure(
        sites=tuple(sites),
        stacks={path: len(keys) for path, keys in stacks.items()},
        width=embeddings[0].embedding_dim,
        vocabularies=frozenset(embedding.num_embeddings for embedding in embeddings),
        head_dims=frozenset(getattr(module, name) for module, name in filter(None, heads)),
    )


def matched(model: ModelStructure, base: ModelStructure) -> ModelStructure:
    """Return ``model`` with base shapes: each parameter gets the shape of its counterpart in ``base``. In a list of
    blocks, the counterpart is in the block at the nearest relative depth. Raise InputError if a counterpart is
    missing or has another number of dimensions."""
    by_label: dict[str, list[ParameterSite]] = defaultdict(list)
    for site in base.sites:
        by_label[site.label].append(site)
    known = {site.label for site in model.sites}
    unlisted = "" if model.stacks else f" ({NO_BLOCKS}; put them in one)"
    for whose, its_sites, others in (("base", base.sites, known), ("model", model.sites, by_label)):
        if odd := next((site for site in its_sites if site.label not in others), None):
            raise InputError(
                f"{odd.name} exists only in the {whose}{unlisted}; give a base of the same family "
                "that ties the same weights and has the same number of experts"
            )
    sites = []
    for site in model.sites:
        like = min(by_label[site.label], key=lambda other: abs(_depth(other, base) - _depth(site, model)))
        if like.parameter.ndim != site.parameter.ndim:
            raise InputError(
                f"{site.name} has shape {site.shape}, but {like.shape} in the base; give a base of the same family"
            )
        sites.append(replace(site, base_shape=like.shape))
    return replace(model, sites=tuple(sites))


def depth_ratio(model: ModelStructure, base: ModelStructure) -> float:
    """Return (number of blocks of the model) / (number of blocks of the base), or 1 without blocks."""
    found = {path: size / base.stacks[path] for path, size in model.stacks.items() if path in base.stacks}
    if len(set(found.values())) > 1:
        listed = ", ".join(f"{path} x{ratio:g}" for path, ratio in found.items())
        raise InputError(
            f"the lists of blocks are deeper than in the base by different factors: {listed}; give a base where the "
            "factors are equal"
        )
    return next(iter(found.values()), 1.0)


def logit_scales(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """Return (module, attribute) for each attention module that has the scale of query . key as an attribute."""
    attention = (module for module in model.modules() if _first(module, _HEAD_DIM, int))
    return [scale for module in attention if (scale := _first(module, _LOGIT_SCALE, float))]


def labelled(model: nn.Module, labels: Mapping[str, str]) -> dict[tuple[str, int, str], nn.Module]:
    """Return the modules in ``labels``, by (path of the list of blocks, number of the block, name).

    ``labels`` maps a path to the module's name. "*" stands for the block's number, as in ``layers.*.mlp``.
    """
    stacks, found = _stacks(model), {}
    for path, module in model.named_modules():
        label, stack, layer = _label(bare_name(path), stacks)
        if label in labels and layer is not None:
            found[stack, layer, labels[label]] = module
    return found


def label_of(model: nn.Module, path: str) -> str:
    """Return a module's path with "*" in place of the block's number."""
    return _label(bare_name(path), _stacks(model))[0]


def _first(module: nn.Module, names: tuple[str, ...], kind: type) -> tuple[nn.Module, str] | None:
    return next(((module, name) for name in names if isinstance(vars(module).get(name), kind)), None)


def bare_name(name: str) -> str:
    """Return the name of a parameter or module without parts that wrappers add, such as ``_orig_mod``."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _stacks(model: nn.Module) -> dict[str, list[str]]:
    """Return the keys of the blocks in each list of blocks, by the path of the list.

    A list of blocks is an ``nn.ModuleList``, or an ``nn.Sequential`` of one type. All members have submodules.
    """
    stacks: dict[str, list[str]] = {}
    for path, module in model.named_modules():
        plain = bare_name(path)
        members = dict(module.named_children())  # each module once, even if the list contains it twice
        listed = isinstance(module, nn.ModuleList) or (
            isinstance(module, nn.Sequential) and len({type(member) for member in members.values()}) == 1
        )
        nested = any(plain.startswith(f"{outer}.") for outer in stacks)
        if plain and members and listed and not nested and all(any(m.children()) for m in members.values()):
            if len(members) < len(cast(nn.ModuleList | nn.Sequential, module)):
                raise InputError(
                    f"{plain} contains a block twice, but the scaling rules assume separate weights; use a "
                    "separate block at every position"
                )
            stacks[plain] = list(members)
    return stacks


def _label(name: str, stacks: Mapping[str, list[str]]) -> tuple[str, str, int | None]:
    """Return the `label`, `stack` and `layer` of a name, as in `ParameterSite`."""
    for path, keys in stacks.items():
        if name.startswith(f"{path}."):
            key, _, rest = name.removeprefix(f"{path}.").partition(".")
            return f"{path}.*.{rest}", path, keys.index(key)
    return name, "", None


def _depth(site: ParameterSite, model: ModelStructure) -> float:
    """Return the relative depth of a parameter's block, from 0 (first) to 1 (last), and 0 outside the blocks."""
    return 0.0 if site.layer is None else site.layer / max(model.stacks[site.stack] - 1, 1)
