"""The parameter table for people: equal rows over layers as one, base beside target, and the reason of each value."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from leaven.recipe.errors import InputError
from leaven.recipe.recipe import Recipe
from leaven.recipe.shape import Role
from leaven.report.numbers import value
from leaven.scaling.rules import Cell, Rule
from leaven.scaling.table import ParameterTable, Row, resolve
from leaven.scaling.transfer import transfer

QUANTITIES = ("init_std", "lr", "weight_decay", "beta1", "beta2", "eps", "multiplier")
LAYER = re.compile(r"layers\.\d+\.")


@dataclass(frozen=True)
class Group:
    """Parameters of one name that are equal over neighbouring layers; ``base`` is the same at base scale."""

    label: str
    first: int | None
    last: int | None
    row: Row
    base: Row | None

    @property
    def layers(self) -> str:
        if self.first is None:
            return ""
        return f"{self.first}" if self.first == self.last else f"{self.first}-{self.last}"


def label(row: Row) -> str:
    """``layers.3.attention.query.weight`` is attention.query: what a person tunes by."""
    return LAYER.sub("", row.name).removesuffix(".weight")


def groups(table: ParameterTable, base: ParameterTable | None = None) -> list[Group]:
    """The table's rows in the order of the forward pass, neighbouring layers with equal values as one."""
    twins = dict(_twins(table, base)) if base else {}
    found: dict[str, list[Group]] = {}
    for row in table.rows:
        twin = twins.get(row.name)
        runs = found.setdefault(label(row), [])
        if runs and _alike(runs[-1].row, row) and _alike(runs[-1].base, twin):
            runs[-1] = replace(runs[-1], last=row.layer)
        else:
            runs.append(Group(label(row), row.layer, row.layer, row, twin))
    return [group for runs in found.values() for group in runs]


def _alike(a: Row | None, b: Row | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.shape == b.shape and all(getattr(a, quantity) == getattr(b, quantity) for quantity in QUANTITIES)


def _twins(table: ParameterTable, base: ParameterTable) -> Iterator[tuple[str, Row]]:
    """Each row's name with the base row of the same name at the nearest relative depth."""
    by_label: dict[str, list[Row]] = {}
    for row in base.rows:
        by_label.setdefault(label(row), []).append(row)
    depth = 1 + max((row.layer or 0 for row in table.rows), default=0)
    for row in table.rows:
        candidates = by_label.get(label(row))
        if candidates:
            last = len(candidates) - 1
            position = (row.layer or 0) / (depth - 1) if depth > 1 else 0.0
            yield row.name, candidates[round(position * last)]


def at_base(recipe: Recipe) -> Recipe | None:
    """The recipe at the scale its hyperparameters were found at; None if that is its own, or cannot be built."""
    base = recipe.base
    own = (recipe.model.d_model, recipe.model.n_layers, recipe.batch.tokens, recipe.data.tokens)
    if own == (base.width, base.depth, base.batch_tokens, base.tokens):
        return None
    try:
        return transfer(
            recipe, width=base.width, depth=base.depth, batch_tokens=base.batch_tokens, tokens=base.tokens
        )
    except InputError:
        return None


def reason(recipe: Recipe, table: ParameterTable, row: Row, quantity: str) -> str:
    """How the value follows from the one in base coordinates: ``m_N^-1 m_L^(alpha-1) = 0.25``.

    m_N, m_L, m_B and m_D are target / base of width, depth, batch and tokens.
    """
    cells = _cells(table.rule, row, quantity)
    factor = 1.0
    for cell in cells:
        factor *= Cell(cell).factor(table.ratios, recipe.scaling.alpha, recipe.scaling.token_exponent)
    moving = [cell for cell in cells if cell != "1"]
    if not moving:
        return "does not move with scale"
    if "0" in moving:
        return "switched off for this role"
    formula = re.sub(r"\b([NLBD])\b", r"m_\1", " ".join(moving))
    if quantity == "init_std":
        return f"sqrt of variance factor {formula} = {value(factor**0.5)}"
    if quantity in {"beta1", "beta2"}:
        return f"half-life in steps x {formula} = {value(factor)}; beta^(1 / {value(factor)})"
    return f"{formula} = {value(factor)}"


def _cells(rule: Rule, row: Row, quantity: str) -> tuple[str, ...]:
    cells = rule.roles[row.role]
    match quantity:
        case "init_std":
            return (cells.init_variance,)
        case "lr":
            return (cells.lr, rule.lr)
        case "weight_decay":
            return (cells.weight_decay, rule.weight_decay)
        case "eps":
            return (cells.eps, rule.eps)
        case "beta1" | "beta2":
            return (rule.half_life,)
        case _:
            # A branch's factor is kept in the matrix that ends the branch.
            ends_branch = row.role is Role.HIDDEN_WEIGHT and row.module.endswith(".out")
            return (cells.forward, rule.residual) if ends_branch else (cells.forward,)


def tables(recipe: Recipe, base: Recipe | None) -> tuple[ParameterTable, ParameterTable | None]:
    """Resolved tables of a recipe and of the one it is shown beside."""
    return resolve(recipe), resolve(base) if base else None
