"""Any torch model under a rule: AdamW groups, forward multipliers and, where an init is given, initial values."""

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any

import torch
from pydantic import ValidationError
from torch import nn

from leaven.distributed.pieces import piece_of
from leaven.interop.multipliers import ROWS, install, multipliers, rescale_attention
from leaven.interop.roles import Classification, Classifier
from leaven.interop.structure import (
    ModelStructure,
    ParameterSite,
    counterparts,
    depth_ratio,
    inspect_model,
    unwrapped,
)
from leaven.model.initialise import fill
from leaven.model.transformer import Transformer
from leaven.recipe.errors import InputError
from leaven.recipe.files import explain
from leaven.recipe.hyperparameters import Hyperparameters
from leaven.recipe.init_std import require_one_rule
from leaven.recipe.recipe import Scaling
from leaven.recipe.shape import Parameter, Role
from leaven.scaling.apply import factors, tensor_ratios
from leaven.scaling.cells import Ratios, TensorRatios
from leaven.scaling.rules import RULES
from leaven.scaling.table import ParameterRow, exponents, optimiser_groups, resolve_row

_SAME = Ratios()
_UNUSED_STD = 1.0  # of hyperparameters without init_std, where nothing is initialised


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
    """Put a model under a rule, once: installs its forward multipliers and returns its groups for AdamW.

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

    Call it on the model as it will be trained: after ``fully_shard`` and ``to_empty``, for both put new parameters in
    the place of the old. If parameters were replaced later, :func:`groups` returns them again. What had been
    compiled before is compiled again.

    Given ``init_std`` (or a named ``init``) it draws the initial values too: every parameter that is trained is
    overwritten. Without one the values stay the caller's, as for a model with trained weights.

    **Multipliers are no part of the state dict.** Weights loaded into another model of the same class compute
    something else until it is parametrized with the same arguments, so the state dict warns when it is first taken.
    :func:`leaven.save_folded` writes a model that ``from_pretrained`` reads as it is, and :func:`leaven.fold` makes
    this one plain.

    The rules are for pre-norm decoders. What a model itself multiplies by a power of its width is not seen and has
    to be switched off (Gemma, whose embedding is times sqrt(width), is refused by name); gains are taken to be
    neutral at 1, so initial values are not for norms that multiply by 1 + gain. A branch's multiplier acts where the
    matrix that ends it is called as a module, so a fused kernel that takes only the weights goes around it; that of
    the logits acts on the final norm's output. Initial values of the caller's own should have: hidden weights a
    variance in proportion to 1 / fan in, the unembedding's to 1 / fan in squared, and no smaller ends of branches in
    deep models.

    Args:
        model: The target; its width and depth over those of ``base`` are read off the two.
        base: A smaller model of the same family, at which the hyperparameters were found. It may be on the meta
            device, and its values are not looked at.
        hyperparameters: In base coordinates. With ``init_std`` or ``init`` new initial values are drawn; a
            ``leaven.Hyperparameters`` always has one. ``optimizer`` has to be adamw, and a recipe's ``grad_clip`` is
            left to the caller's loop.
        ratios: Of batch and tokens, target over base.
        rule: One of ``leaven.scaling.rules.RULES``.
        alpha, token_exponent, scale_decay_with_depth: As in ``[scaling]`` of a recipe.
        head_ratio: Of the head dimension. Where it grows, the attention modules' logit scale is multiplied in place;
            1.0 leaves it alone. Read off the models' attention modules by default, where they keep it.
        roles: Role by name or glob, for parameters that are refused or taken for something else.
        modules: What a parameter is tuned as, by name or glob; ``attention.out`` and ``mlp.out`` end a branch.
        initialise: Whether new initial values are drawn for all parameters that are trained (``requires_grad``), each
            from ``seed`` and its name alone. Follows from ``hyperparameters`` by default. False with a
            ``leaven.Hyperparameters`` keeps the model's values; with a dict leave ``init_std`` out instead.
        seed: Of the initial values.

    Returns:
        Groups with module, param_names, params, peak_lr, lr, betas, eps and weight_decay; each parameter in one.

    Raises:
        InputError: in one line that names the parameter or value at fault. The model is then unchanged.
    """
    target, base_model = unwrapped(model, "parametrize: model"), unwrapped(base, "parametrize: base")
    _refuse_a_second_time(target)
    _refuse_multipliers_of_its_own(target)
    structure, base_structure = inspect_model(target), inspect_model(base_model)
    initialise = _initialises(hyperparameters, initialise)
    scaling, tuned = _validated(
        hyperparameters,
        initialise,
        rule=rule,
        alpha=alpha,
        token_exponent=token_exponent,
        scale_decay_with_depth=scale_decay_with_depth,
    )
    ratios_at = _ratios(ratios, structure, base_structure)
    counterpart_of = counterparts(structure, base_structure)
    classified = Classifier(
        structure, base_structure, counterpart_of, _tied_by_hand(target) | dict(roles or {}), modules or {}
    ).classify()
    head = (
        _head_ratio(structure, base_structure, classified)
        if head_ratio is None
        else _positive("head_ratio", head_ratio)
    )
    _require_a_readout(structure, {name: kind.role for name, kind in classified.items()})

    chosen, free = RULES[scaling.rule], exponents(scaling)
    gated = any(kind.module == "mlp.gate" for kind in classified.values())
    rows: list[ParameterRow] = []
    for site in structure.sites:
        kind = classified[site.name]
        parameter = Parameter(site.name, site.shape, kind.role, kind.module, site.layer)
        scales = tensor_ratios(kind.role, site.shape, counterpart_of[site.name].shape, ratios_at, head)
        n_layers = 1 if site.layer is None else structure.stacks[site.stack]
        rows.append(
            resolve_row(parameter, scales, rule=chosen, free=free, base=tuned, n_layers=n_layers, gated=gated)
        )
    try:
        if initialise:
            wider = any(site.shape != counterpart_of[site.name].shape for site in structure.sites)
            require_one_rule(tuned.init, scaling.rule, wider=wider, deeper=ratios_at.depth != 1)
        tuned.require_modules({row.module: row.role for row in rows})
    except ValueError as error:
        raise InputError(str(error)) from None
    attention = factors(chosen, Role.HIDDEN_WEIGHT, TensorRatios(head=head), free).attention
    hooks, scales_of_attention = multipliers(target, structure, rows), rescale_attention(target, structure, attention)
    if initialise:
        _initialise(structure, rows, seed)
    install(target, hooks, scales_of_attention)
    setattr(target, ROWS, tuple(rows))
    return groups(target)


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """The groups of a model that :func:`parametrize` has been called on, with the parameters it has now.

    Raises:
        InputError: if it has not been called, or the parameters have other names since.
    """
    target = unwrapped(model, "groups: model")
    rows: tuple[ParameterRow, ...] | None = getattr(target, ROWS, None)
    if rows is None:
        raise InputError(f"this {type(target).__name__} has no groups yet; call leaven.parametrize on it")
    parameters = {site.name: site.parameter for site in inspect_model(target).sites}
    odd = sorted(parameters.keys() ^ {row.name for row in rows})
    if odd:
        raise InputError(
            f"{odd[0]} came or went since leaven.parametrize was called; call it once the model is whole"
        )
    found = optimiser_groups(rows)
    for group in found:
        group["params"] = [parameters[name] for name in group["param_names"]]
    return found


def _refuse_a_second_time(model: nn.Module) -> None:
    if any(hasattr(module, ROWS) for module in model.modules()):
        raise InputError(
            f"this {type(model).__name__} has its multipliers already, and a rule applied twice is another rule; "
            "leaven.interop.torch_models.groups returns its groups again"
        )
    for module in model.modules():
        if isinstance(module, Transformer) and module.has_multipliers:
            raise InputError(
                "this Transformer was built with its recipe's multipliers; build it with Transformer(shape)"
            )


def _refuse_multipliers_of_its_own(model: nn.Module) -> None:
    """By name, for the multiplication stands in a forward."""
    kind = next((type(module).__name__ for module in model.modules() if "Gemma" in type(module).__name__), None)
    if kind is not None:
        raise InputError(
            f"{kind} multiplies its embedding by sqrt(width), on top of which no rule holds; parametrize a model "
            "without it, e.g. a Llama"
        )


def _initialises(hyperparameters: Any, wanted: bool | None) -> bool:
    """Whether initial values are drawn: where the hyperparameters say which, unless the caller says otherwise."""
    if not isinstance(hyperparameters, Mapping):
        return wanted is not False
    stated = [key for key in ("init_std", "init") if hyperparameters.get(key) is not None]
    if wanted is False and stated:
        raise InputError(
            f"parametrize: {stated[0]} is given and initialise=False, which keeps the model's values; leave out "
            f"{stated[0]}, or initialise=False"
        )
    return bool(stated) if wanted is None else wanted


def _validated(
    hyperparameters: Hyperparameters | Mapping[str, Any], initialise: bool, **scaling: Any
) -> tuple[Scaling, Hyperparameters]:
    try:
        checked = Scaling(**scaling)
        if isinstance(hyperparameters, Hyperparameters):
            tuned = hyperparameters
        elif isinstance(hyperparameters, Mapping):
            if "grad_clip" in hyperparameters:
                raise InputError(
                    "parametrize: grad_clip: groups clip nothing; leave it out and clip in your loop, e.g. with "
                    "torch.nn.utils.clip_grad_norm_"
                )
            values = dict(hyperparameters)
            if not initialise and "init" not in values:
                values.setdefault("init_std", _UNUSED_STD)
            tuned = Hyperparameters.model_validate(values)
        else:
            raise InputError(
                f"parametrize: hyperparameters is {hyperparameters!r:.60}; give a dict, as in {{'lr': 0.01}}, or a "
                "leaven.Hyperparameters"
            )
    except ValidationError as error:
        raise InputError(f"parametrize: {explain(error)}") from None
    if tuned.optimizer != "adamw":
        raise InputError(
            f"parametrize: optimizer is {tuned.optimizer}, and the groups are for AdamW, whose decay is decoupled; "
            "leave it out"
        )
    return checked, tuned


def _positive(name: str, value: Any) -> float:
    number = float(value) if isinstance(value, Real) else math.nan
    if not 0 < number < math.inf:
        raise InputError(f"parametrize: {name} is {value!r}; it is target over base, a number above 0")
    return number


def _ratios(given: Ratios, model: ModelStructure, base: ModelStructure) -> Ratios:
    if not isinstance(given, Ratios):
        raise InputError(f"parametrize: ratios is {given!r:.60}; give leaven.Ratios(batch=..., tokens=...)")
    stated = {axis: _positive(f"ratios.{axis}", value) for axis, value in vars(given).items()}
    read = Ratios(model.width / base.width, depth_ratio(model, base), stated["batch"], stated["tokens"])
    for axis in ("width", "depth"):
        found = getattr(read, axis)
        if stated[axis] not in {1.0, found}:
            raise InputError(f"ratios: {axis} is {stated[axis]:g}, but the two models say {found:g}; leave it out")
    return read


def _head_ratio(model: ModelStructure, base: ModelStructure, classified: Mapping[str, Classification]) -> float:
    if len(model.head_dims) > 1 or len(base.head_dims) > 1:
        dims = ", ".join(map(str, sorted(model.head_dims | base.head_dims)))
        raise InputError(f"the attention modules have different head dimensions ({dims}); pass head_ratio")
    if model.head_dims and base.head_dims:
        return next(iter(model.head_dims)) / next(iter(base.head_dims))
    attention = next((name for name, kind in classified.items() if kind.module.startswith("attention.")), None)
    if attention is not None:
        raise InputError(
            f"{attention} is of an attention that does not keep its head dimension (as head_dim), and the rule moves "
            "the logit scale where that grows; pass head_ratio, target over base: 1.0 where heads are added"
        )
    return 1.0


def _tied_by_hand(model: nn.Module) -> dict[str, str]:
    """leaven's own model reads the logits off its embedding without a module that would show it."""
    tied = isinstance(model, Transformer) and model.shape.tied_embeddings
    return {"embedding.weight": Role.TIED_EMBEDDING} if tied else {}


def _require_a_readout(structure: ModelStructure, roles: Mapping[str, Role]) -> None:
    if not {Role.UNEMBEDDING, Role.TIED_EMBEDDING} & set(roles.values()):
        first = next(site.name for site in structure.sites if roles[site.name] is Role.EMBEDDING)
        raise InputError(
            f"nothing makes the logits; if they are read off {first}, pass roles={{{first!r}: 'tied_embedding'}}, "
            "else parametrize the model together with its head"
        )


@torch.no_grad()
def _initialise(structure: ModelStructure, rows: list[ParameterRow], seed: int) -> None:
    sites = {site.name: site for site in structure.sites}
    trained = [row for row in rows if sites[row.name].parameter.requires_grad]
    for row in trained:
        if sites[row.name].parameter.is_meta:
            raise InputError(f"{row.name} is on the meta device and has no values to initialise; call to_empty first")
    for row in trained:
        _fill(sites[row.name], row, seed)


def _fill(site: ParameterSite, row: ParameterRow, seed: int) -> None:
    piece = piece_of(row.name, site.parameter)
    fill(piece.local, row.name, row.init_mean, row.init_std, seed, shape=piece.shape, offset=piece.offset)
