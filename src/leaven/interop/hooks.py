"""Forward multipliers on a foreign model, as forward hooks: no name in the state dict changes.

torch.compile traces hooks that are there at the first forward, and FSDP2 runs them as they are. A multiplier of
exactly 1 installs nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from leaven.interop.anatomy import Anatomy, Site, logit_scales
from leaven.interop.roles import is_linear
from leaven.recipe.errors import InputError
from leaven.recipe.shape import BRANCH_ENDS, Role
from leaven.scaling.table import Row

_READOUTS = {Role.UNEMBEDDING, Role.TIED_EMBEDDING}


@dataclass(frozen=True)
class ScaleOutput:
    """A forward hook. A class, not a closure, so that the model can still be pickled."""

    factor: float

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
        return output * self.factor


@dataclass(frozen=True)
class ScaleInput:
    """A forward pre-hook: scales what a readout reads, hence its logits, but not its bias."""

    factor: float

    def __call__(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (inputs[0] * self.factor, *inputs[1:])


@dataclass(frozen=True)
class Multiplier:
    """One hook to install."""

    module: nn.Module
    hook: ScaleOutput | ScaleInput

    def install(self) -> None:
        if isinstance(self.hook, ScaleInput):
            self.module.register_forward_pre_hook(self.hook)
        else:
            self.module.register_forward_hook(self.hook)


def multipliers(model: nn.Module, anatomy: Anatomy, rows: Sequence[Row]) -> list[Multiplier]:
    """The hooks for all multipliers of the rows that are not 1; nothing is installed yet.

    Raises:
        InputError: naming the parameter whose module's forward is never called, so that no hook can act.
    """
    sites = {site.name: site for site in anatomy.sites}
    attention = [module for module in model.modules() if isinstance(module, nn.MultiheadAttention)]
    found = []
    for row in rows:
        if row.multiplier == 1.0:
            continue
        site = sites[row.name]
        if row.role in _READOUTS:
            found.append(_logits(site, row, sites, rows))
        elif row.module in BRANCH_ENDS:
            if not is_linear(site.owner) or any(site.owner is module.out_proj for module in attention):
                raise InputError(
                    f"{row.name} ends a branch, but its {type(site.owner).__name__} is never called as a module, so "
                    f"no hook can multiply the branch by {row.multiplier:g}; use an attention made of linears"
                )
            found.append(Multiplier(site.owner, ScaleOutput(row.multiplier)))
    return found


def _logits(site: Site, row: Row, sites: dict[str, Site], rows: Sequence[Row]) -> Multiplier:
    """On the final norm's output, which every way to the logits reads: losses that never form them (and leaven's own
    model) take the readout's weight without calling its module. Without a final norm, on what that module reads."""
    final = [other for other in rows if other.role is Role.FINAL_NORM]
    if len(final) == 1:
        return Multiplier(sites[final[0].name].owner, ScaleOutput(row.multiplier))
    linear = next((owner for owner in site.owners if is_linear(owner)), None)
    if linear is None:
        raise InputError(
            f"{row.name} makes the logits without a module, and there is no one final norm ahead of it to carry "
            f"their multiplier {row.multiplier:g}; make the logits with an nn.Linear that shares the weight"
        )
    return Multiplier(linear, ScaleInput(row.multiplier))


def rescale_attention(model: nn.Module, anatomy: Anatomy, factor: float) -> list[tuple[nn.Module, str, float]]:
    """The new value of each attention module's scale of query . key: module, attribute, value.

    Raises:
        InputError: if the rule moves the scale and the modules keep no number for it.
    """
    if factor == 1.0:
        return []
    found, blocks = logit_scales(model), sum(anatomy.stacks.values())
    if len(found) != blocks:
        raise InputError(
            f"the head dimension grows, and {len(found)} of {blocks} blocks keep their logit scale as `scaling` or "
            f"`scale`; multiply it by {factor:g} yourself and pass head_ratio=1.0"
        )
    return [(module, name, getattr(module, name) * factor) for module, name in found]
