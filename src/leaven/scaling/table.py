"""The parameter table: init std, lr, weight decay, betas, eps and forward multiplier of every parameter.

A value is the product of the hyperparameter, the factor of the scaling rule, the module's multiplier, and the
multiplier for the block's depth. Adam's betas have their own formula: :meth:`leaven.scaling.apply.Factors.beta`.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from leaven.recipe.hyperparameters import DepthProfile, Hyperparameters, Multipliers
from leaven.recipe.init_std import INITS
from leaven.recipe.recipe import Recipe, Scaling
from leaven.recipe.shape import BRANCH_ENDS, ModelShape, Parameter, Role
from leaven.scaling.apply import AT_BASE, Factors, factors, tensor_ratios
from leaven.scaling.cells import Ratios, TensorRatios
from leaven.scaling.rules import RULES, Rule

# Roles whose initial mean is 1.
GAINS = {Role.EMBEDDING_NORM, Role.HIDDEN_NORM, Role.OUTPUT_NORM, Role.QK_NORM, Role.FINAL_NORM}
_LAYER = re.compile(r"layers\.\d+\.")


@dataclass(frozen=True, kw_only=True)
class ParameterRow(Parameter):
    """A parameter with its values: initial distribution, optimizer settings, forward multiplier."""

    init_mean: float  # initial values are normal with this mean
    init_std: float
    lr: float  # at the peak of the schedule
    # 0 for a parameter that Adam updates. For a matrix that Muon updates: the factor ``Muon.matching`` on its steps.
    # For such a matrix, beta1 is the momentum, and beta2 and eps are 0.
    match: float = 0.0
    weight_decay: float
    beta1: float
    beta2: float
    eps: float
    # Factor on the output in the forward pass. It is 1 except for the last matrices of branches, the unembedding, and
    # tied embeddings. If a norm follows the last matrix of a branch, the factor is applied after the norm.
    multiplier: float
    ratios: TensorRatios = field(compare=False)  # ratios to the base, from which the rule computed the values


@dataclass(frozen=True)
class ParameterTable:
    rule: Rule
    ratios: Ratios  # ratios of the run to its base
    rows: tuple[ParameterRow, ...]
    attention_scale: float  # factor on the dot products of queries and keys
    beta2: float  # beta2 of a module without multipliers
    router_losses: tuple[float, float] = (0.0, 0.0)  # scaled coefficients of a router's balance loss and z-loss

    def __getitem__(self, name: str) -> ParameterRow:
        return next(row for row in self.rows if row.name == name)

    @property
    def multipliers(self) -> dict[str, float]:
        return {row.name: row.multiplier for row in self.rows}


def ratios(recipe: Recipe) -> Ratios:
    base = recipe.base
    return Ratios(
        width=recipe.model.d_model / base.width,
        depth=recipe.model.n_layers / base.depth,
        batch=recipe.batch.tokens / base.batch_tokens,
        tokens=recipe.data.tokens / base.tokens,
    )


def parameter_table(recipe: Recipe) -> ParameterTable:
    """Return the parameter table of a recipe, in the order of ``recipe.model.parameters()``."""
    rule, at, model = RULES[recipe.scaling.rule], ratios(recipe), recipe.model
    base_shapes = {label(parameter.name): parameter.shape for parameter in recipe.base_shape.parameters()}
    head = model.d_head / recipe.base_shape.d_head
    rows = []
    for parameter in model.parameters():
        scales = tensor_ratios(parameter.role, parameter.shape, base_shapes[label(parameter.name)], at, head)
        rows.append(
            parameter_row(
                parameter,
                scales,
                scaling=recipe.scaling,
                base=recipe.hyperparameters,
                n_layers=model.n_layers,
                gated=model.gated,
            )
        )
    shared = factors(rule, Role.HIDDEN_WEIGHT, rows[0].ratios, recipe.scaling)
    losses = (0.0, 0.0)
    if model.experts:
        balance = model.experts.balance_loss if model.experts.balanced_by_loss else 0.0
        losses = (balance * shared.residual, model.experts.router_z_loss * shared.residual)
    return ParameterTable(
        rule,
        at,
        tuple(rows),
        attention_scale=1 / math.sqrt(model.d_head) * shared.attention,
        beta2=shared.beta(recipe.hyperparameters.beta2),
        router_losses=losses,
    )


def adamw_rows(recipe: Recipe) -> tuple[ParameterRow, ...]:
    """Return a row with AdamW's values for each parameter, then a row with Muon's values for each matrix of Muon."""
    by_muon = parameter_table(recipe).rows if recipe.hyperparameters.muon else ()
    return (*parameter_table(recipe.without_muon).rows, *(row for row in by_muon if row.match))


def ramp_factors(recipe: Recipe, step: int) -> tuple[Factors, float]:
    """Return (factors, ratio of half-lives) at ``step``, counted from 0, of a run with a batch ramp.

    The factors convert hyperparameters for the full batch to hyperparameters for the batch of the step. They are 1
    if ``batch.rule`` is "fixed". The ratio is (half-life of Adam's moments) / (half-life at the previous step), both
    in steps.
    """

    def at(step: int) -> Factors:
        batch = recipe.batches.batch_at(recipe.batches.tokens_at_step(step))
        if recipe.batch.rule == "fixed" or batch == recipe.batch.tokens:
            return AT_BASE
        share = TensorRatios(batch=batch / recipe.batch.tokens)
        return factors(RULES[recipe.scaling.rule], Role.HIDDEN_WEIGHT, share, recipe.scaling)

    now, before = at(step), at(max(step - 1, 0))
    return now, now.half_life / before.half_life


def parameter_row(
    parameter: Parameter, at: TensorRatios, *, scaling: Scaling, base: Hyperparameters, n_layers: int, gated: bool
) -> ParameterRow:
    """Return the row of one parameter of any model. ``at``: its ratios to the base. ``base``: the base's values."""
    role = parameter.role
    module = base.modules.get(parameter.module, Multipliers())
    muon, match = base.muon_of(role), 0.0
    if muon is not None:
        out, into = parameter.shape[-2:]
        match = muon.matching(out, into)
        at = replace(at, match=match / muon.matching(out / at.fan_out, into / at.fan_in))
    moved = factors(RULES[scaling.rule], role, at, scaling, muon is not None)

    def multiplier(quantity: str) -> float:
        own: float = getattr(module, quantity)
        if parameter.layer is None:
            return own
        return own * DepthProfile.at(getattr(base.depth, quantity), parameter.layer, n_layers)

    forward = moved.forward
    if parameter.module in BRANCH_ENDS:
        forward *= base.residual * multiplier("residual") * moved.residual
    lr, decay = base.lr, base.weight_decay if role.is_matrix or base.decay_norm_and_bias else 0.0
    beta1, beta2 = moved.beta(base.beta1, multiplier("beta1")), moved.beta(base.beta2, multiplier("beta2"))
    eps = base.eps * multiplier("eps") * moved.eps
    if muon is not None:
        lr, decay = base.of_matrices("lr"), base.of_matrices("weight_decay")
        beta1, beta2, eps = float(muon.momentum ** multiplier("beta1")), 0.0, 0.0
    std = 0.0  # of gains and biases
    if role.is_matrix:
        # With a named init, moved.init_std is 1: `leaven.recipe.init_std.require_one_rule` refuses other recipes.
        named = INITS.get(base.init)
        start = named.std(parameter, n_layers, gated) if named else base.init_std or 0.0
        std = start * multiplier("init_std") * moved.init_std
    return ParameterRow(
        **vars(parameter),
        init_mean=1.0 if role in GAINS else 0.0,
        init_std=std,
        lr=lr * multiplier("lr") * moved.lr,
        weight_decay=decay * multiplier("weight_decay") * moved.weight_decay,
        beta1=beta1,
        beta2=beta2,
        eps=eps,
        multiplier=forward,
        match=match,
        ratios=at,
    )


def optimizer_groups(
    rows: Sequence[ParameterRow], parameters: Mapping[str, Any] | None = None
) -> list[dict[str, Any]]:
    """Return parameter groups for ``torch.optim``. Rows of the same module with equal values share a group.

    Each group has the options of its optimizer (Muon or AdamW), and the keys module, param_names and peak_lr. With
    ``parameters`` (by name), each group also has the key params. Raise ValueError if the names of ``parameters`` and
    ``rows`` differ, or if ``rows`` has a name twice.
    """
    groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        by_muon = {"momentum": row.beta1, "match": row.match}
        by_adam = {"betas": (row.beta1, row.beta2), "eps": row.eps}
        values = {"peak_lr": row.lr, "lr": row.lr} | (by_muon if row.match else by_adam)
        values |= {"weight_decay": row.weight_decay}
        group: dict[str, Any] = {"module": row.module, "param_names": [], **values}
        groups.setdefault((row.module, *values.values()), group)["param_names"].append(row.name)
    if parameters is not None:
        names = {row.name for row in rows}
        if len(names) != len(rows):
            raise ValueError("the parameter table lists a parameter twice")
        if odd := sorted(parameters.keys() ^ names):
            raise ValueError(f"parameters not in both model and table: {', '.join(odd)}; use one recipe for both")
        for group in groups.values():
            group["params"] = [parameters[name] for name in group["param_names"]]
    return list(groups.values())


def folding(shape: ModelShape, table: ParameterTable) -> Mapping[str, float]:
    """Return the factors, by parameter name, that fold the multipliers of the forward pass into the parameters.

    Factors of 1 are left out. Each multiplier is folded into the weights (and biases) of one module:

    - Multiplier of a branch: the norm on the branch's output. Without this norm, the last matrix of the branch.
    - Attention scale x sqrt(d_head): the query norm. Without this norm, the query matrix.
    - Multiplier of the logits: the unembedding. With tied embeddings, the final norm.
    """
    rows = table.multipliers
    places = {"norm.final": rows.pop("embedding.weight")} if shape.tied_embeddings else {}
    if not shape.tied_embeddings:
        places["unembedding"] = rows.pop("unembedding.weight")
    for layer in range(shape.n_layers):
        query = "norm.query" if shape.qk_norm else "attention.query"
        places[f"layers.{layer}.{query}"] = table.attention_scale / (1 / math.sqrt(shape.d_head))
        for end in BRANCH_ENDS:
            if f"layers.{layer}.{end}.weight" in rows:
                behind = f"norm.{end.replace('.', '_')}" if shape.norm_placement != "pre" else end
                places[f"layers.{layer}.{behind}"] = rows.pop(f"layers.{layer}.{end}.weight")
    assert all(multiplier == 1 for multiplier in rows.values()), "a multiplier would be lost"
    names = {parameter.name for parameter in shape.parameters()}
    both = {f"{place}.{kind}": factor for place, factor in places.items() for kind in ("weight", "bias")}
    return {name: factor for name, factor in both.items() if name in names and factor != 1}


def label(name: str) -> str:
    """Return a parameter's name without its block: ``mlp.out.weight`` for ``layers.3.mlp.out.weight``."""
    return _LAYER.sub("", name)
