"""The structure of a torch model: its parameters with modules and blocks, and their counterparts in a smaller one."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from torch import nn

from leaven.recipe.errors import InputError

# What torch.compile and activation checkpointing put into the names of what they wrap.
_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module"}
_HEAD_DIM = ("head_dim", "head_size", "d_head", "attention_head_size")
_LOGIT_SCALE = ("scaling", "scale", "softmax_scale")


@dataclass(frozen=True, eq=False)
class ParameterSite:
    """A parameter and where it is in its model."""

    name: str
    label: str  # the name with a star for the number of its block
    layer: int | None  # the number of its block, None outside of the blocks
    parameter: nn.Parameter
    owners: tuple[nn.Module, ...]  # the modules that hold it, more than one where it is tied
    after_blocks: bool  # whether it is registered after all blocks

    @property
    def owner(self) -> nn.Module:
        return self.owners[0]

    @property
    def stack(self) -> str:
        """The path of the list that its block is in."""
        return self.label.partition(".*.")[0]

    @property
    def path(self) -> tuple[str, ...]:
        """The module's name without its block, in parts."""
        return tuple(self.label.split(".")[:-1])

    @property
    def is_bias(self) -> bool:
        return self.name.endswith(".bias")

    @property
    def shape(self) -> tuple[int, ...]:
        """(fan out, fan in) for a matrix, whichever way its module stores it."""
        shape = tuple(self.parameter.shape)
        return shape[::-1] if is_a(self.owner, "Conv1D") else shape


@dataclass(frozen=True)
class ModelStructure:
    """What the rules need to know of a model."""

    sites: tuple[ParameterSite, ...]
    stacks: Mapping[str, int]  # lists of blocks: the number of blocks by path
    width: int
    vocabularies: frozenset[int]  # rows of the embeddings
    head_dims: frozenset[int]  # of the attention modules that keep theirs


def is_a(module: nn.Module, name: str) -> bool:
    """By name, for classes of libraries that need not be installed; FSDP2 puts a class of its own before them."""
    return any(kind.__name__ == name for kind in type(module).__mro__)


def unwrapped(model: nn.Module, argument: str) -> nn.Module:
    """The model inside what torch.compile returns; ``argument`` names it in the error."""
    inner = getattr(model, "_orig_mod", model)
    if not isinstance(inner, nn.Module):
        raise InputError(f"{argument} is {inner!r:.60}; it has to be an nn.Module")
    return inner


def inspect_model(model: nn.Module) -> ModelStructure:
    """The structure of a model, in one walk over its modules.

    Raises:
        InputError: if blocks share weights, or no ``nn.Embedding`` is outside them to read the width from.
    """
    stacks = _stacks(model)
    found: dict[int, list[tuple[str, nn.Module, nn.Parameter]]] = defaultdict(list)
    for path, module in model.named_modules(remove_duplicate=False):
        for kind, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            found[id(parameter)].append((_plain(f"{path}.{kind}" if path else kind), module, parameter))
    sites: list[ParameterSite] = []
    for places in found.values():
        name, _, parameter = places[0]
        label, layer = _label(name, stacks)
        for other, _, _ in places:
            if _block(other, stacks) != _block(name, stacks):
                raise InputError(
                    f"{name} and {other} are one parameter, and the rules take each block to have its own: "
                    "what moves with depth is counted in blocks; give every block its own weights"
                )
        after = layer is None and any(site.layer is not None for site in sites)
        sites.append(ParameterSite(name, label, layer, parameter, tuple(owner for _, owner, _ in places), after))
    embeddings = [s.owner for s in sites if s.layer is None and isinstance(s.owner, nn.Embedding)]
    if not embeddings:
        raise InputError(f"{type(model).__name__} has no nn.Embedding outside its blocks to read the width from")
    heads = (_first(module, _HEAD_DIM, int) for module in model.modules())
    return ModelStructure(
        sites=tuple(sites),
        stacks={path: size for path, (size, _) in stacks.items()},
        width=embeddings[0].embedding_dim,
        vocabularies=frozenset(embedding.num_embeddings for embedding in embeddings),
        head_dims=frozenset(getattr(module, name) for module, name in filter(None, heads)),
    )


def counterparts(model: ModelStructure, base: ModelStructure) -> dict[str, ParameterSite]:
    """The counterpart of each parameter in the base: the same label, in the block nearest in relative depth.

    Raises:
        InputError: naming the parameter that only one of the two has.
    """
    by_label: dict[str, list[ParameterSite]] = defaultdict(list)
    for site in base.sites:
        by_label[site.label].append(site)
    known = {site.label for site in model.sites}
    for site in base.sites:
        if site.label not in known:
            raise InputError(
                f"{site.name} is in the base and not in the model; give a base of the same family (tied weights tied)"
            )
    counterpart_of = {}
    for site in model.sites:
        if site.label not in by_label:
            raise InputError(
                f"{site.name} is in the model and not in the base; give a base of the same family (tied weights tied)"
            )
        like = min(by_label[site.label], key=lambda other: abs(_depth(other, base) - _depth(site, model)))
        if like.parameter.ndim != site.parameter.ndim:
            raise InputError(f"{site.name} has shape {site.shape}, but {like.shape} in the base")
        counterpart_of[site.name] = like
    return counterpart_of


def depth_ratio(model: ModelStructure, base: ModelStructure) -> float:
    """Blocks over blocks of the base; 1 if neither model has any."""
    found = {path: size / base.stacks[path] for path, size in model.stacks.items() if path in base.stacks}
    if len(set(found.values())) > 1:
        listed = ", ".join(f"{path} x{ratio:g}" for path, ratio in found.items())
        raise InputError(f"the stacks of blocks do not deepen together: {listed}; give a base where they do")
    return next(iter(found.values()), 1.0)


def logit_scales(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """The attention modules that keep the scale of query . key as a number, with the number's name."""
    attention = (module for module in model.modules() if _first(module, _HEAD_DIM, int))
    return [scale for module in attention if (scale := _first(module, _LOGIT_SCALE, float))]


def _first(module: nn.Module, names: tuple[str, ...], kind: type) -> tuple[nn.Module, str] | None:
    return next(((module, name) for name in names if isinstance(vars(module).get(name), kind)), None)


def _plain(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _stacks(model: nn.Module) -> dict[str, tuple[int, list[str]]]:
    """The outermost lists whose members are made of modules themselves: size and keys by path."""
    stacks: dict[str, tuple[int, list[str]]] = {}
    for path, module in model.named_modules():
        plain = _plain(path)
        members = list(module.children())  # each once
        listed = isinstance(module, nn.ModuleList) or (
            isinstance(module, nn.Sequential) and len({type(member) for member in members}) == 1
        )
        nested = any(plain.startswith(f"{outer}.") for outer in stacks)
        if plain and members and listed and not nested and all(any(member.children()) for member in members):
            if len(members) < len(cast(nn.ModuleList | nn.Sequential, module)):
                raise InputError(f"{plain} repeats a block, and the rules count a block that runs twice as one")
            stacks[plain] = (len(members), [key for key, _ in module.named_children()])
    return stacks


def _label(name: str, stacks: Mapping[str, tuple[int, list[str]]]) -> tuple[str, int | None]:
    for path, (_, keys) in stacks.items():
        if name.startswith(f"{path}."):
            key, _, rest = name.removeprefix(f"{path}.").partition(".")
            return f"{path}.*.{rest}", keys.index(key)
    return name, None


def _block(name: str, stacks: Mapping[str, tuple[int, list[str]]]) -> tuple[str, int] | None:
    label, layer = _label(name, stacks)
    return None if layer is None else (label.partition(".*.")[0], layer)


def _depth(site: ParameterSite, model: ModelStructure) -> float:
    if site.layer is None:
        return 0.0
    return site.layer / max(model.stacks[site.stack] - 1, 1)
