"""Applies a scaling rule to a torch model: parameter groups, forward multipliers and, if wanted, initial values.

``structure.py`` finds blocks and parameters, ``roles.py`` classifies each parameter, ``tracing.py`` finds norms on
the outputs of residual branches, and ``multipliers.py`` installs and folds forward multipliers.
"""

import math
import warnings
from collections.abc import Mapping
from dataclasses import replace
from numbers import Real
from typing import Any

import torch
from pydantic import ValidationError
from torch import nn
from torch.distributed.tensor import DTensor

from leaven.distributed.pieces import piece_of
from leaven.errors import InputError
from leaven.interop.multipliers import (
    LOGIT_SCALES,
    MUON,
    ROWS,
    install,
    multipliers,
    require_hooks,
    rescale_attention,
    uninstall,
)
from leaven.interop.roles import Classifier
from leaven.interop.structure import ModelStructure, depth_ratio, inspect_model, matched, unwrapped
from leaven.interop.tracing import is_offset
from leaven.model.initialisation import fill
from leaven.model.transformer import Transformer
from leaven.recipe.files import explain
from leaven.recipe.hyperparameters import Hyperparameters, Muon
from leaven.recipe.init_std import require_one_rule
from leaven.recipe.recipe import Scaling
from leaven.recipe.shape import Parameter, Role
from leaven.scaling.apply import factors, tensor_ratios
from leaven.scaling.cells import Ratios, TensorRatios
from leaven.scaling.rules import RULES
from leaven.scaling.table import ParameterRow, optimizer_groups, parameter_row

_SAME = Ratios()


def parametrize(
    model: nn.Module,
    *,
    base: nn.Module,
    hyperparameters: Hyperparameters | Mapping[str, Any],
    ratios: Ratios = _SAME,
    rule: str = "complete-d-p",
    alpha: float = 1.0,
    token_exponent: float = 0.5,
    scale_decay_with_depth: bool = False,
    head_ratio: float | None = None,
    roles: Mapping[str, str] | None = None,
    modules: Mapping[str, str] | None = None,
    initialise: bool | None = None,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Apply a scaling rule to a model: install its forward multipliers and return its parameter groups.

    >>> import leaven, torch
    >>> from torch import nn
    >>> class Block(nn.Module):
    ...     def __init__(self, width):
    ...         super().__init__()
    ...         self.mlp_norm = nn.LayerNorm(width)
    ...         self.mlp = nn.ModuleDict({"up": nn.Linear(width, 4 * width), "down": nn.Linear(4 * width, width)})
    ...     def forward(self, x):
    ...         return x + self.mlp["down"](self.mlp["up"](self.mlp_norm(x)).relu())
    >>> class Model(nn.Module):
    ...     def __init__(self, width, depth):
    ...         super().__init__()
    ...         self.embedding = nn.Embedding(100, width)
    ...         self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
    ...         self.norm = nn.LayerNorm(width)
    ...         self.unembedding = nn.Linear(width, 100)
    ...     def forward(self, tokens):
    ...         x = self.embedding(tokens)
    ...         for block in self.blocks:
    ...             x = block(x)
    ...         return self.unembedding(self.norm(x))
    >>> model = Model(width=64, depth=6)
    >>> groups = leaven.parametrize(
    ...     model,
    ...     base=Model(width=16, depth=2),
    ...     hyperparameters={"lr": 0.01, "init_std": 0.1, "weight_decay": 0.1},
    ...     ratios=leaven.Ratios(batch=2, tokens=8),
    ... )
    >>> for group in groups:
    ...     print(f"{group['module']:12} {group['lr']:.5f} {group['weight_decay']:.2f} {group['eps']:.1e}")
    embedding    0.00500 0.05 5.0e-09
    norm.mlp     0.00500 0.00 1.7e-09
    biases       0.00500 0.00 1.7e-09
    mlp.in       0.00125 0.20 1.7e-09
    mlp.out      0.00125 0.20 1.7e-09
    norm.final   0.00500 0.00 5.0e-09
    biases       0.00500 0.00 5.0e-09
    unembedding  0.00125 0.20 2.0e-08
    biases       0.00500 0.00 2.0e-08
    >>> optimizer = torch.optim.AdamW(groups)

    Call this function once, on the model as it will be trained: after modules are replaced (as for float8), after
    ``fully_shard`` and after ``to_empty``. If parameters are replaced later, ``leaven.interop.parametrize.groups``
    returns new groups.

    **The state dict does not contain the multipliers.** A model that loads a state dict gives wrong
    outputs until this model is parametrized with the same arguments. :func:`leaven.save_folded` saves a model that
    ``from_pretrained`` loads correctly. :func:`leaven.fold` folds the multipliers into the weights of the model
    itself.

    The rules are for decoders, dense or with mixtures of experts:

    - Norms on branch outputs are found by running a copy of ``base`` on a few tokens. If ``base`` needs more than
      token ids, list all norms of the blocks in ``modules``. Call norms on branch outputs
      ``norm.attention_out`` and ``norm.mlp_out``.
    - A block's routed experts are in a module ``experts``. It is a list of MLPs, or has a tensor (experts, fan out,
      fan in) for each matrix. The router is a matrix ``gate`` or ``router`` beside this module. ``base`` must have
      the same number of experts.
    - The coefficient of a balance loss is not scaled. If the rule scales with depth, multiply the coefficient by
      (depth of the model / depth of the base)^-alpha.
    - Remove factors that the model's own code derives from its width, such as 1 / width on the logits. Only a factor
      on the embedding may stay, as ``embed_scale`` or ``scalar_embed_scale`` of the embedding's module.
    - A multiplier acts when a module is called. A fused kernel that reads the weight without calling the module skips
      the multiplier.
    - If you initialise the model yourself, the variance must be proportional to 1 / fan in for all hidden weights,
      and to 1 / (fan in)^2 for the unembedding.

    Args:
        model: The model to train.
        base: A smaller model of the same family, for which the hyperparameters were tuned. It may be on the meta
            device.
        hyperparameters: The hyperparameters of the base, with the keys of a recipe's ``[hyperparameters]``.
            ``optimizer`` is adamw or muon. Clip gradients in your own loop, and add a z-loss there.
        ratios: The model's batch size and number of training tokens, each divided by the base's.
        rule: The name of a rule in ``leaven.scaling.rules.RULES``.
        alpha, token_exponent, scale_decay_with_depth: As in ``[scaling]`` of a recipe.
        head_ratio: The head dimension of the model divided by that of the base. By default it is read from the
            attention modules. If it is not 1, some rules change the scale of the attention logits.
        roles: Roles by parameter name or glob pattern, for parameters that are refused or classified wrongly.
        modules: The names under which parameters are tuned, such as ``attention.query``, by parameter name or glob
            pattern. ``attention.out`` and ``mlp.out`` are the last matrices of branches.
        initialise: Whether to draw initial values. By default they are drawn if ``hyperparameters`` has ``init_std``
            or ``init``, or is a ``leaven.Hyperparameters``.
        seed: Seed of the initial values. The random numbers depend only on the seed and the parameter's name.

    Returns:
        Parameter groups with the keys module, param_names, params, peak_lr, lr, betas, eps and weight_decay. With
        ``optimizer`` muon, pass them to ``leaven.MuonWithAdamW``. Groups of matrices inside the blocks then have
        momentum, match, nesterov and ns_steps in place of betas and eps. Muon treats a fused matrix as one matrix.

    Raises:
        InputError: if the model or an argument is not supported. The model is then unchanged.
    """
    target, base_model = unwrapped(model, "parametrize: model"), unwrapped(base, "parametrize: base")
    _require_no_multipliers(target, base_model)
    uninstall(target)  # remove what an interrupted call has left
    structure, base_structure = inspect_model(target), inspect_model(base_model)
    try:
        stated = {"alpha": alpha, "token_exponent": token_exponent, "scale_decay_with_depth": scale_decay_with_depth}
        scaling = Scaling.model_validate({"rule": rule} | stated)
        tuned, initialise = _tuned(hyperparameters, initialise)
    except ValidationError as error:
        raise InputError(f"parametrize: {explain(error, Hyperparameters)}") from None
    if tuned.muon and any(isinstance(site.parameter, DTensor) for site in structure.sites):
        raise InputError(
            "parametrize: optimizer is muon, which needs whole matrices, but the model is sharded over processes; "
            "leave optimizer out"
        )
    ratios_at = _ratios(ratios, structure, base_structure, scaling.rule)
    structure = matched(structure, base_structure)
    given_roles = dict(roles or {})
    if isinstance(target, Transformer) and target.shape.tied_embeddings:
        # leaven's own model has no module from which the use of its embedding for the logits can be seen.
        given_roles = {"embedding.weight": Role.TIED_EMBEDDING} | given_roles
    classifier = Classifier(structure, base_structure, base_model, given_roles, modules or {})
    classified = classifier.classify()
    if head_ratio is None:
        head = _head_ratio(structure, base_structure, classified)
    else:
        head = _positive("head_ratio", "head dimension", head_ratio)
    _require_readout(classified)
    gated = any(kind.module in {"mlp.gate", "mlp.experts.gate"} for kind in classified.values())
    rows: list[ParameterRow] = []
    in_base = {site.label: site for site in base_structure.sites}
    for site in structure.sites:
        parameter = classified[site.name]
        scales = tensor_ratios(parameter.role, site.shape, site.base_shape, ratios_at, head)
        n_layers = 1 if site.layer is None else structure.stacks[site.stack]
        row = parameter_row(parameter, scales, scaling=scaling, base=tuned, n_layers=n_layers, gated=gated)
        like = in_base[site.label]
        if row.init_mean and is_offset(like.owner):
            row = replace(row, init_mean=0.0)
        rows.append(_with_embedding_scale(row, site.embedding_scale / like.embedding_scale))
    try:
        if initialise:
            wider = any(site.shape != site.base_shape for site in structure.sites)
            require_one_rule(tuned.init, scaling.rule, wider=wider, deeper=ratios_at.depth != 1)
        tuned.require_modules({row.module: row.role for row in rows})
    except ValueError as error:
        raise InputError(str(error)) from None
    attention = factors(RULES[scaling.rule], Role.HIDDEN_WEIGHT, TensorRatios(head=head), scaling).attention
    hooks = multipliers(target, structure, rows, classifier.output_norms)
    logit_scales = rescale_attention(target, base_model, structure, head, attention)
    if initialise:
        _initialise(structure, rows, seed)
    install(target, hooks, logit_scales)
    vars(target).update({MUON: tuned.muon, ROWS: tuple(rows)})  # last, because it marks the model as parametrized
    return groups(target)


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Return the parameter groups of a parametrized model, with its current parameters.

    Raise InputError if it is not parametrized, or if a parameter was added or removed, or a module with multipliers
    was replaced, since then.
    """
    target = unwrapped(model, "groups: model")
    rows: tuple[ParameterRow, ...] | None = getattr(target, ROWS, None)
    if rows is None:
        raise InputError(f"this {type(target).__name__} has no groups yet; call leaven.parametrize on it")
    parameters = {site.name: site.parameter for site in inspect_model(target).sites}
    if odd := sorted(parameters.keys() ^ {row.name for row in rows}):
        raise InputError(
            f"{odd[0]} was added or removed after leaven.parametrize; call leaven.parametrize on the complete model"
        )
    require_hooks(target)
    found = optimizer_groups(rows, parameters)
    muon: Muon | None = getattr(target, MUON)
    for group in found:
        if muon and "match" in group:
            group |= {"nesterov": muon.nesterov, "ns_steps": muon.ns_steps}
    return found


def _require_no_multipliers(model: nn.Module, base: nn.Module) -> None:
    if vars(base).get(LOGIT_SCALES):
        raise InputError(
            "parametrize: leaven.parametrize has changed the attention scales of this base; give a new model of its "
            "size"
        )
    for module in model.modules():
        if hasattr(module, ROWS):
            raise InputError(
                f"this {type(model).__name__} is parametrized already, and a rule must not be applied twice; to get "
                "its parameter groups, call leaven.interop.parametrize.groups(model)"
            )
        if isinstance(module, Transformer) and module.has_multipliers:
            raise InputError(
                "this Transformer was built with its recipe's multipliers; build it with Transformer(shape)"
            )


def _require_readout(classified: Mapping[str, Parameter]) -> None:
    if not any(kind.role in {Role.UNEMBEDDING, Role.TIED_EMBEDDING} for kind in classified.values()):
        first = next(name for name, kind in classified.items() if kind.role is Role.EMBEDDING)
        raise InputError(
            f"found no parameter that computes the logits; if {first} also does this, pass "
            f"roles={{{first!r}: 'tied_embedding'}}; otherwise parametrize the model together with its head"
        )


def _with_embedding_scale(row: ParameterRow, c: float) -> ParameterRow:
    """Return the row of an embedding, corrected for a factor on the output of its module, such as sqrt(width).

    With the result, AdamW trains the model as if the factor were the base's. ``c`` is (this factor) / (the base's).
    """
    if c == 1 or row.role not in {Role.EMBEDDING, Role.TIED_EMBEDDING}:
        return row
    return replace(
        row,
        init_std=row.init_std / c,
        lr=row.lr / c,
        eps=row.eps * c,
        weight_decay=row.weight_decay * c,
        multiplier=row.multiplier * (c if row.role is Role.TIED_EMBEDDING else 1.0),
    )


def _tuned(given: Hyperparameters | Mapping[str, Any], wanted: bool | None) -> tuple[Hyperparameters, bool]:
    """Validate arguments of :func:`parametrize`. Return the hyperparameters, and whether to draw initial values."""
    if isinstance(given, Hyperparameters):
        tuned, initialise = given, wanted is not False
        if given.grad_clip.limit and given.grad_clip != Hyperparameters.model_fields["grad_clip"].default:
            warnings.warn(
                f"parametrize: grad_clip {given.grad_clip.limit:g} ({given.grad_clip.mode}) is not applied, because "
                "parameter groups do not clip; clip in your loop, e.g. with torch.nn.utils.clip_grad_norm_",
                stacklevel=3,
            )
    elif isinstance(given, Mapping):
        if "grad_clip" in given:
            raise InputError(
                "parametrize: grad_clip: parameter groups do not clip; leave it out and clip in your loop, e.g. with "
                "torch.nn.utils.clip_grad_norm_"
            )
        stated = [key for key in ("init_std", "init") if given.get(key) is not None]
        if wanted is False and stated:
            raise InputError(
                f"parametrize: {stated[0]} is given, but initialise=False keeps the model's values; leave out "
                f"{stated[0]} or initialise=False"
            )
        initialise = bool(stated) if wanted is None else wanted
        # Hyperparameters need an init; without new initial values, nothing uses it.
        unused = {} if initialise or "init" in given else {"init_std": 1.0}
        tuned = Hyperparameters.model_validate(unused | dict(given))
    else:
        raise InputError(
            f"parametrize: hyperparameters is {given!r:.60}; give a dict, as in {{'lr': 0.01}}, or a "
            "leaven.Hyperparameters"
        )
    if tuned.z_loss:
        raise InputError(
            f"parametrize: z_loss is {tuned.z_loss:g}, but parameter groups add nothing to the loss; set z_loss to 0 "
            "and add z_loss x (logsumexp of the logits)^2 to your loss"
        )
    factors_of_init = [f"modules.{name}.init_std" for name, each in tuned.modules.items() if each.init_std != 1]
    factors_of_init += ["depth.init_std"] * any(factor != 1 for factor in tuned.depth.init_std)
    if factors_of_init and not initialise and isinstance(given, Mapping):
        raise InputError(
            f"parametrize: {factors_of_init[0]} is given, but the model keeps its initial values; leave out "
            f"{factors_of_init[0]}, or give init_std or init and leave out initialise=False"
        )
    if tuned.optimizer == "adam":
        raise InputError(
            "parametrize: optimizer is adam, but the groups are for AdamW or Muon, which have decoupled decay; leave "
            "optimizer out, or set it to muon"
        )
    return tuned, initialise


def _positive(name: str, size: str, value: Any) -> float:
    number = float(value) if isinstance(value, Real) else math.nan
    if not 0 < number < math.inf:
        raise InputError(
            f"parametrize: {name} is {value!r}; give a finite number above 0: ({size} of the model) / ({size} of "
            "the base)"
        )
    return number


def _ratios(given: Ratios, model: ModelStructure, base: ModelStructure, rule: str) -> Ratios:
    """Return the ratios model / base: width and depth from the models, batch and tokens from ``given``."""
    if not isinstance(given, Ratios):
        raise InputError(f"parametrize: ratios is {given!r:.60}; give leaven.Ratios(batch=..., tokens=...)")
    stated = {axis: _positive(f"ratios.{axis}", axis, value) for axis, value in vars(given).items()}
    read = Ratios(model.width / base.width, depth_ratio(model, base), stated["batch"], stated["tokens"])
    for axis in ("width", "depth"):
        found = getattr(read, axis)
        if stated[axis] not in {1.0, found}:
            raise InputError(
                f"ratios: {axis} is {stated[axis]:g}, but {axis} of model / {axis} of base is {found:g}; "
                f"leave {axis} out"
            )
    if not RULES[rule].columns and (read.batch, read.tokens) != (1, 1):
        warnings.warn(f"ratios: {rule} has no rule for batch and tokens, so they change nothing", stacklevel=3)
    return read


def _head_ratio(model: ModelStructure, base: ModelStructure, classified: Mapping[str, Parameter]) -> float:
    if len(model.head_dims) > 1 or len(base.head_dims) > 1:
        dims = ", ".join(map(str, sorted(model.head_dims | base.head_dims)))
        raise InputError(f"the attention modules have different head dimensions ({dims}); pass head_ratio")
    if model.head_dims and base.head_dims:
        return next(iter(model.head_dims)) / next(iter(base.head_dims))
    attention = next((name for name, kind in classified.items() if kind.module.startswith("attention.")), None)
    if attention is not None:
        raise InputError(
            f"{attention}: its attention module has no attribute head_dim; pass head_ratio = (head dimension of the "
            "model) / (head dimension of the base), which is 1.0 if they are equal"
        )
    return 1.0


@torch.no_grad()
def _initialise(structure: ModelStructure, rows: list[ParameterRow], seed: int) -> None:
    """Draw initial values of the trainable parameters. A shard gets its part of the values of the whole tensor."""
    parameters = {site.name: site.parameter for site in structure.sites}
    trained = [row for row in rows if parameters[row.name].requires_grad]
    for row in trained:
        if parameters[row.name].is_meta:
            raise InputError(f"{row.name} is on the meta device and has no values to initialise; call to_empty first")
    for row in trained:
        piece = piece_of(row.name, parameters[row.name])
        fill(piece.local, row.name, row.init_mean, row.init_std, seed, shape=piece.shape, offset=piece.offset)
