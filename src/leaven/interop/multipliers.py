"""Installs the forward multipliers of a user's model as hooks, or folds them into the weights.

A forward multiplier is a constant factor on the output of a residual branch, on the logits or on the attention
logits. The attention logits are multiplied by changing the scale in the attention module, the others by a hook.

Folding multiplies these weights instead:

- residual branch: the norm on its output. Without such a norm, its last matrix.
- logits: the final norm. Without exactly one final norm, the unembedding.
- attention logits: the query norm. Without a query norm, the query matrix.
"""

import copy
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from leaven.distributed.pieces import cut, piece_of
from leaven.errors import InputError
from leaven.interop.roles import is_linear
from leaven.interop.structure import ModelStructure, bare_name, inspect_model, is_a, labelled, logit_scales, unwrapped
from leaven.recipe.shape import BRANCH_ENDS, Role
from leaven.scaling.table import GAINS, ParameterRow

# Names of attributes that a parametrized model gets.
ROWS = "leaven_rows"  # its parameter table
MUON = "leaven_muon"  # the settings of Muon, or None
LOGIT_SCALES = "leaven_logit_scales"  # (path of the module, attribute, old value) of each changed attention scale

Factors = dict[nn.Parameter, float | Tensor]
LogitScale = tuple[nn.Module, str, float]  # an attention module, its attribute, the value to set


# Install --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ScaleOutput:
    """A forward hook that scales a module's output. It is a class, because a closure cannot be pickled."""

    factor: float

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
        return output * self.factor


@dataclass(frozen=True)
class ScaleInput:
    """A forward pre-hook that scales the unembedding's input, so the bias of the logits is not scaled."""

    factor: float

    def __call__(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (inputs[0] * self.factor, *inputs[1:])


Hook = tuple[nn.Module, ScaleOutput | ScaleInput]


def multipliers(
    model: nn.Module, structure: ModelStructure, rows: Sequence[ParameterRow], output_norms: Mapping[str, str]
) -> list[Hook]:
    """Return the hooks for all multipliers other than 1, without installing them.

    A branch's multiplier scales the output of the branch's last matrix, or of the module ``experts`` if one tensor
    has all experts. If the branch ends in a norm, which would undo this, the multiplier scales the norm's output.
    ``output_norms`` maps paths of such norms, such as ``layers.*.post_norm``, to ``attention`` or ``mlp``.

    The logits' multiplier scales the output of the final norm, because fused losses do not call the unembedding.
    Without exactly one final norm, the multiplier scales the input of the unembedding. Raise InputError if no hook
    can apply a multiplier.
    """
    sites, behind = {site.name: site for site in structure.sites}, labelled(model, output_norms)
    final_norms = [sites[row.name].owner for row in rows if row.role is Role.FINAL_NORM]
    uncalled = [module.out_proj for module in model.modules() if isinstance(module, nn.MultiheadAttention)]
    found: list[Hook] = []
    ending: dict[nn.Module, ParameterRow] = {}  # by norm: the first row whose branch ends in the norm
    for row in rows:
        site, factor = sites[row.name], row.multiplier
        branch = (site.stack, row.layer or 0, row.module.partition(".")[0])
        if row.module in BRANCH_ENDS and (norm := behind.get(branch)):
            first = ending.setdefault(norm, row)
            if first.multiplier != factor:
                raise InputError(
                    f"{row.name} and {first.name} have different multipliers, but the same norm follows both; give "
                    f"the modules {row.module} and {first.module} the same residual multiplier"
                )
            continue
        if factor == 1.0:
            continue
        if row.role in {Role.UNEMBEDDING, Role.TIED_EMBEDDING}:
            linear = next((owner for owner in site.owners if is_linear(owner)), None)
            if len(final_norms) == 1:
                found.append((final_norms[0], ScaleOutput(factor)))
            elif linear is not None:
                found.append((linear, ScaleInput(factor)))
            else:
                raise InputError(
                    f"no hook can multiply the logits by {factor:g}: the model has no final norm or several, and no "
                    f"linear module computes the logits from {row.name}; compute the logits with an nn.Linear that "
                    "shares the weight"
                )
        elif row.role is Role.EXPERT_WEIGHT and site.experts is not None:
            found.append((site.experts, ScaleOutput(factor)))
        elif row.module in BRANCH_ENDS:
            if not is_linear(site.owner) or any(site.owner is module for module in uncalled):
                raise InputError(
                    f"{row.name} ends a residual branch, but its {type(site.owner).__name__} is not an nn.Linear "
                    f"that the model calls, so no hook can multiply the branch by {factor:g}; use nn.Linear modules"
                )
            found.append((site.owner, ScaleOutput(factor)))
    return found + [(norm, ScaleOutput(row.multiplier)) for norm, row in ending.items() if row.multiplier != 1.0]


def rescale_attention(
    model: nn.Module, base: nn.Module, structure: ModelStructure, head: float, factor: float
) -> list[LogitScale]:
    """Return new attention scales as (attention module, attribute, scale), or [] if ``factor`` is 1.

    The attention logits are scale x (query . key). ``factor`` is the scaling rule's factor on them. ``head`` is
    (head dimension of ``model``) / (head dimension of ``base``).

    - If ``model`` and ``base`` each have one scale for all layers, the new scale is ``factor`` x (scale in ``base``)
      / sqrt(``head``). The scale in ``model`` is not used, because it may be a constant (Gemma 2).
    - Otherwise, each layer's new scale is ``factor`` x its old scale.

    Raise InputError if a block's scale is not found.
    """
    if factor == 1.0:
        return []
    found, blocks = logit_scales(model), sum(structure.stacks.values())
    if len(found) != blocks:
        raise InputError(
            f"the head dimension differs from the base's, but only {len(found)} of {blocks} blocks have the scale of "
            f"the attention logits in an attribute `scaling`, `scale` or `softmax_scale`; multiply the scale by "
            f"{factor:g} yourself and pass head_ratio=1.0"
        )
    present, of_base = ({getattr(*scale) for scale in scales} for scales in (found, logit_scales(base)))
    if len(present) == len(of_base) == 1:
        factor *= next(iter(of_base)) * head**-0.5 / next(iter(present))
    return [(module, name, getattr(module, name) * factor) for module, name in found]


@dataclass(eq=False)
class WarnOfMultipliers:
    """A state-dict hook that warns the user once that the state dict does not contain the multipliers."""

    multipliers: int
    warned: bool = False

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        if not self.warned:
            self.warned = True
            warnings.warn(
                f"this state dict lacks the {self.multipliers} multipliers that leaven.parametrize put on the "
                f"{type(module).__name__}. A model with these weights and without the multipliers computes wrong "
                "outputs. leaven.save_folded(model, FOLDER) saves a model that from_pretrained loads correctly.",
                stacklevel=2,
            )


def install(model: nn.Module, hooks: Sequence[Hook], scales: Sequence[LogitScale]) -> None:
    """Install the hooks, set the attention scales, and make ``state_dict`` warn of missing multipliers."""
    for module, hook in hooks:
        if isinstance(hook, ScaleInput):
            module.register_forward_pre_hook(hook)
        else:
            module.register_forward_hook(hook)
    paths = {module: path for path, module in model.named_modules()}
    setattr(model, LOGIT_SCALES, tuple((paths[module], name, getattr(module, name)) for module, name, _ in scales))
    for module, name, value in scales:
        setattr(module, name, value)
    if count := len(hooks) + len(scales):
        model.register_state_dict_post_hook(WarnOfMultipliers(count))  # type: ignore[no-untyped-call]
        if "torch._dynamo" in sys.modules:
            torch.compiler.reset()  # compiled graphs do not contain the new hooks


def require_hooks(model: nn.Module) -> None:
    """Raise InputError if a parametrized model has lost hooks that `install` added."""
    modules = [(*module._forward_hooks.values(), *module._forward_pre_hooks.values()) for module in model.modules()]
    found = sum(isinstance(hook, ScaleOutput | ScaleInput) for hooks in modules for hook in hooks)
    counts = [hook.multipliers for hook in model._state_dict_hooks.values() if isinstance(hook, WarnOfMultipliers)]
    gone = sum(counts) - len(getattr(model, LOGIT_SCALES, ())) - found
    if gone > 0:
        raise InputError(
            f"{gone} of the multipliers of this {type(model).__name__} are gone, because modules were replaced after "
            "leaven.parametrize; make a new model, replace its modules, and then call leaven.parametrize on it"
        )


def uninstall(model: nn.Module) -> None:
    """Undo :func:`install`, even if it was interrupted. Also delete the attributes ROWS, MUON and LOGIT_SCALES."""
    for module in model.modules():
        for hooks in (module._forward_hooks, module._forward_pre_hooks, module._state_dict_hooks):
            for key, hook in list(hooks.items()):
                if isinstance(hook, ScaleOutput | ScaleInput | WarnOfMultipliers):
                    del hooks[key]
        for path, name, before in vars(module).get(LOGIT_SCALES, ()):
            setattr(module.get_submodule(path), name, before)
        for mark in (ROWS, MUON, LOGIT_SCALES):
            vars(module).pop(mark, None)


# Fold into the weights --------------------------------------------------------------------------------------


def refuse_half_folded(model: nn.Module, *_: object) -> None:
    """Raise InputError. :func:`fold` installs this hook on all modules of a model while it multiplies the weights. If
    ``fold`` is interrupted, the hook stays, so that the half-folded model cannot be used."""
    raise InputError(
        f"leaven.fold was interrupted on this {type(model).__name__}, so some of its weights have their multipliers "
        "and others do not; load the weights again into a new model"
    )


@torch.no_grad()
def fold(model: nn.Module) -> nn.Module:
    """Fold a parametrized model's multipliers into its weights, in place, and return the model.

    The outputs stay the same up to rounding. Do not train the folded model with the old parameter groups: their lr,
    eps and weight decay are wrong for the new weights. If folding is interrupted, later
    calls of the model raise InputError.

    Raises:
        InputError: if the model is not parametrized, or a multiplier cannot be folded. No weight has changed then.
    """
    target = unwrapped(model, "fold")
    for module in target.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # after a forward pass, FSDP2 may keep whole parameters for a while
    factors, offset = _factors(target)
    marks = [module.register_forward_pre_hook(refuse_half_folded, prepend=True) for module in target.modules()]
    for module in target.modules():
        marks.append(module.register_state_dict_pre_hook(refuse_half_folded))  # type: ignore[no-untyped-call]
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()  # compiled graphs contain the multipliers, and not the marks
    for parameter, factor in factors.items():
        if isinstance(factor, Tensor):
            piece = piece_of("", parameter)  # the whole parameter, or this process's shard
            piece.local.mul_(cut(factor.expand(parameter.shape), piece.offset, piece.local.shape))
        else:
            parameter.mul_(factor).add_(factor - 1 if parameter in offset else 0.0)
    uninstall(target)
    for mark in marks:
        mark.remove()
    return model


@torch.no_grad()
def save_folded(model: nn.Module, folder: Path | str, *, overwrite: bool = False, **options: Any) -> None:
    """Save a parametrized Hugging Face model so that ``from_pretrained`` gives the same logits.

    The model in memory does not change. ``options`` are passed to ``save_pretrained``. A model that is already in the
    folder is replaced. A warning says so, unless ``overwrite`` is true.

    Raises:
        InputError: if the model is not parametrized, has no ``save_pretrained`` or is sharded over processes, if a
            multiplier cannot be folded, or if ``folder`` is a file.
    """
    target: Any = unwrapped(model, "save_folded")
    if not hasattr(target, "save_pretrained"):
        raise InputError(
            f"{type(target).__name__} has no save_pretrained; call leaven.fold on a copy, and save its state dict"
        )
    sharded = any(isinstance(module, FSDPModule) for module in target.modules())
    if sharded or any(isinstance(parameter, DTensor) for parameter in target.parameters()):
        raise InputError(
            "the model is sharded over processes; call leaven.fold on it and save it as you save sharded models"
        )
    path = Path(folder)
    several = dist.is_initialized() and dist.get_world_size() > 1  # each of them may save the model here
    has_model = (path / "config.json").exists() or any(path.glob("model*.safetensors*"))
    if path.is_file():
        raise InputError(f"{path} exists already; give another name")
    factors, offset = _factors(target)
    guards = {hook: hook.warned for hook in target._state_dict_hooks.values() if isinstance(hook, WarnOfMultipliers)}
    for hook in guards:
        hook.warned = True  # not needed here: this state dict is folded
    held = target.state_dict(keep_vars=True)  # the parameters themselves, under whatever names wrappers give them
    for hook, warned in guards.items():
        hook.warned = warned
    state = {bare_name(name): value.detach() if isinstance(value, Tensor) else value for name, value in held.items()}
    for name, value in held.items():
        if isinstance(value, nn.Parameter) and value in factors:
            state[bare_name(name)] = value * factors[value] + (factors[value] - 1 if value in offset else 0)
    target.save_pretrained(folder, state_dict=state, **options)
    if has_model and not overwrite and not several:  # after saving: a filter may turn the warning into an error
        warnings.warn(
            f"{path} had a model, which was replaced; pass overwrite=True to replace it without this warning",
            stacklevel=2,
        )


def _factors(target: nn.Module) -> tuple[Factors, set[nn.Parameter]]:
    """Return the factor on each parameter that folding changes, and the norm weights w with a gain of 1 + w.

    To multiply a gain 1 + w by f, set the weight w to f w + f - 1.
    """
    if refuse_half_folded in target._forward_pre_hooks.values():
        refuse_half_folded(target)
    rows: tuple[ParameterRow, ...] | None = getattr(target, ROWS, None)
    if rows is None:
        raise InputError(f"{type(target).__name__} has no multipliers to fold; call leaven.parametrize on it first")
    require_hooks(target)
    sites = {site.parameter: site for site in inspect_model(target).sites}
    named = {row.name: row for row in rows}
    known = {parameter: named[site.name] for parameter, site in sites.items() if site.name in named}
    offset = {parameter for parameter, row in known.items() if row.role in GAINS and row.init_mean == 0}
    modules = {parameter: known[parameter].module if parameter in known else "" for parameter in sites}
    factors: Factors = {}

    def multiply(module: nn.Module, parameters: Iterable[nn.Parameter], factor: float | Tensor) -> None:
        for parameter in parameters:
            if any(owner is not module for owner in sites[parameter].owners):
                raise InputError(
                    f"{sites[parameter].name} is shared with another module, which would change if a multiplier were "
                    "folded into the parameter; untie the two modules"
                )
            factors[parameter] = factors.get(parameter, 1.0) * factor

    for module in target.modules():
        roles = {known[parameter].role for parameter in module.parameters() if parameter in known}
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
            if isinstance(hook, ScaleInput):
                _require_scalable(module, offset, by_input=True)
                multiply(module, [cast(nn.Parameter, module.weight)], hook.factor)
            elif isinstance(hook, ScaleOutput) and Role.EXPERT_WEIGHT in roles:
                for end in (each for each in module.parameters() if modules[each] == "mlp.experts.out"):
                    multiply(sites[end].owner, [end], hook.factor)
            elif isinstance(hook, ScaleOutput):
                _require_scalable(module, offset)
                multiply(module, module.parameters(recurse=False), hook.factor)
    for path, attribute, scale in getattr(target, LOGIT_SCALES):
        attention = target.get_submodule(path)
        factor = getattr(attention, attribute) / scale
        for owner, parameter, share in _queries(attention, path, modules, factor):
            if is_linear(owner):
                _require_scalable(owner, offset)
            multiply(owner, [parameter], share)
    return factors, offset


def _require_scalable(module: nn.Module, offset: set[nn.Parameter], *, by_input: bool = False) -> None:
    """Raise InputError unless doubling a module's parameters doubles its output. With ``by_input``, doubling the
    weight must have the same effect as doubling the input.

    A copy of the module is run to find out. These modules pass without a run: plain linear modules, norms with a
    gain of 1 + w (their weights are in ``offset``), and modules with sharded or meta-device parameters.
    """
    parameters = list(module.parameters(recurse=False))
    if not parameters:
        raise InputError(
            f"a multiplier on the output of a {type(module).__name__} cannot be folded, because this module has no "
            "gain; use a norm with a gain"
        )
    if (
        type(module).forward is nn.Linear.forward  # a subclass may do anything with its weight
        or offset & set(parameters)
        or any(isinstance(each, DTensor) or each.is_meta for each in parameters)
    ):
        return
    probe = copy.deepcopy(module).eval().cpu().double()
    probe._forward_hooks.clear()
    x = torch.randn(1, 2, parameters[0].shape[0 if is_a(module, "Conv1D") else -1], dtype=torch.float64)
    try:
        doubled = probe(2 * x) if by_input else 2 * probe(x)
        for parameter in [cast(nn.Parameter, probe.weight)] if by_input else probe.parameters():
            parameter.mul_(2)
        scalable = torch.allclose(probe(x), doubled)
    except Exception:  # from the user's own code, for example because it takes another argument
        scalable = False
    if not scalable:
        raise InputError(
            f"a multiplier cannot be folded into a {type(module).__name__}, whose output is not known to be "
            "proportional to its parameters; fold it yourself into another matrix or gain"
        )


def _queries(
    attention: nn.Module, path: str, modules: Mapping[nn.Parameter, str], factor: float
) -> Iterator[tuple[nn.Module, nn.Parameter, float | Tensor]]:
    """Yield (module, parameter, factor) for parameters of the query norm or, without a norm, the query matrix.

    If query, key and value are one matrix, the factor is a vector: ``factor`` for queries, 1 for keys and values.
    """
    inside: dict[str, list[nn.Module]] = {}
    for module in attention.modules():
        for parameter in module.parameters(recurse=False):
            inside.setdefault(modules[parameter], []).append(module)
    for name in ("norm.query", "attention.query"):
        if name in inside:
            for module in inside[name]:
                yield from ((module, parameter, factor) for parameter in module.parameters(recurse=False))
            return
    (fused,) = inside.get("attention.query_key_value", [attention])
    if is_a(fused, "Conv1D"):  # GPT-2: queries, keys, values
        heads = 1
    elif is_a(attention, "GPTNeoXAttention"):  # queries, keys and values of each head
        heads = cast(int, fused.out_features) // (3 * cast(int, attention.head_size))
    else:
        raise InputError(
            f"{path}: the scale of the attention logits was changed for larger heads, but it is unknown which part "
            f"of the fused matrix of a {type(attention).__name__} has the queries; parametrize with head_ratio=1.0"
        )
    for parameter in fused.parameters(recurse=False):
        column = parameter.ndim == 2 and not is_a(fused, "Conv1D")
        size = parameter.shape[0 if column else -1] // (3 * heads)
        by_output = torch.ones(heads, 3, size, dtype=parameter.dtype, device=parameter.device)
        by_output[:, 0] = factor
        yield fused, parameter, by_output.flatten()[:, None] if column else by_output.flatten()
