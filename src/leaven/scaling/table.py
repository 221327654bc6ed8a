"""The parameter table: what every parameter really gets. No other code decides any of these numbers.

value = rule(role, ratios) x base value x module multiplier x depth multiplier
"""

import math
from dataclasses import asdict, dataclass
from typing import Any

from leaven.recipe.hyperparameters import DepthProfile, Multipliers
from leaven.recipe.recipe import Recipe
from leaven.recipe.shape import Parameter, Role
from leaven.scaling.rules import RULES, Cell, Ratios, Rule

# What a parameter starts from besides its random part.
_GAINS = {Role.HIDDEN_NORM, Role.QK_NORM, Role.FINAL_NORM}
_BIASES = {Role.HIDDEN_BIAS, Role.FINAL_BIAS}
# A branch's multiplier is kept in the row of the matrix that ends the branch.
_BRANCH_ENDS = {"attention.out", "mlp.out"}


@dataclass(frozen=True)
class Row:
    """One parameter, resolved. It starts as ``init_mean`` plus a normal of ``init_std``; ``lr`` is its own peak.

    ``multiplier`` acts in the forward pass: on the branch that this matrix ends, or on the logits it makes.
    """

    name: str
    shape: tuple[int, ...]
    role: Role
    module: str
    layer: int | None
    init_mean: float
    init_std: float
    lr: float
    weight_decay: float
    beta1: float
    beta2: float
    eps: float
    multiplier: float


@dataclass(frozen=True)
class ParameterTable:
    rule: Rule
    ratios: Ratios
    rows: tuple[Row, ...]

    def __getitem__(self, name: str) -> Row:
        return next(row for row in self.rows if row.name == name)


def ratios(recipe: Recipe) -> Ratios:
    """Target over base, from the recipe's shape, batch and tokens and its ``[scaling].base``."""
    base = recipe.base
    return Ratios(
        width=recipe.model.d_model / base.width,
        depth=recipe.model.n_layers / base.depth,
        batch=recipe.batch.tokens / base.batch_tokens,
        tokens=recipe.data.tokens / base.tokens,
    )


def resolve(recipe: Recipe) -> ParameterTable:
    """The parameter table of a recipe, a row a parameter in the order of ``recipe.model.parameters()``."""
    rule = RULES[recipe.scaling.rule]
    at = ratios(recipe)
    return ParameterTable(rule, at, tuple(_row(recipe, rule, at, p) for p in recipe.model.parameters()))


def describe(recipe: Recipe, flops_per_token: float) -> dict[str, Any]:
    """The document of ``leaven show --json``."""
    table, model = resolve(recipe), recipe.model
    return {
        "scale": {
            "width": model.d_model,
            "depth": model.n_layers,
            "batch_tokens": recipe.batch.tokens,
            "tokens": recipe.data.tokens,
            "base": recipe.base.model_dump(),
        },
        "rule": table.rule.name,
        "ratios": asdict(table.ratios),
        "totals": {
            "params": model.params,
            "params_non_embedding": model.params_non_embedding,
            "flops_per_token": flops_per_token,
        },
        "parameters": [asdict(row) for row in table.rows],
    }


def _row(recipe: Recipe, rule: Rule, at: Ratios, parameter: Parameter) -> Row:
    base, scaling = recipe.hyperparameters, recipe.scaling
    cells = rule.roles[parameter.role]

    def factor(*texts: str) -> float:
        return math.prod(Cell(text).factor(at, scaling.alpha, scaling.token_exponent) for text in texts)

    def depth(profile: tuple[float, ...]) -> float:
        if parameter.layer is None:
            return 1.0
        return DepthProfile.at(profile, parameter.layer, recipe.model.n_layers)

    module = base.modules.get(parameter.module, Multipliers())
    init_std = base.init_std * module.init_std * depth(base.depth.init_std)
    multiplier = factor(cells.forward)
    if parameter.module in _BRANCH_ENDS and parameter.role is Role.HIDDEN_WEIGHT:
        multiplier *= base.residual * factor(rule.residual)
    half_life = factor(rule.half_life)
    return Row(
        name=parameter.name,
        shape=parameter.shape,
        role=parameter.role,
        module=parameter.module,
        layer=parameter.layer,
        init_mean=1.0 if parameter.role in _GAINS else 0.0,
        init_std=0.0 if parameter.role in _GAINS | _BIASES else init_std * math.sqrt(factor(cells.init_variance)),
        lr=base.lr * module.lr * depth(base.depth.lr) * factor(cells.lr, rule.lr),
        weight_decay=(
            base.weight_decay
            * module.weight_decay
            * depth(base.depth.weight_decay)
            * factor(cells.weight_decay, rule.weight_decay)
        ),
        beta1=base.beta1 ** (1 / half_life),
        beta2=base.beta2 ** (1 / half_life),
        eps=base.eps * module.eps * factor(cells.eps, rule.eps),
        multiplier=multiplier,
    )
