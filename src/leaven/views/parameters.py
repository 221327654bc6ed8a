"""Prepare the table of every parameter's init std, lr and other values for display.

The base is the scale (width, depth, batch, tokens) for which a recipe states its hyperparameters. A scaling rule
converts them to the target, the scale of the recipe's own run.
"""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TypeVar

from leaven.documents.runs import ParameterValues
from leaven.errors import InputError
from leaven.recipe.init_std import INITS
from leaven.recipe.recipe import Recipe
from leaven.recipe.shape import BRANCH_ENDS
from leaven.scaling.cells import Cell
from leaven.scaling.rules import Rule
from leaven.scaling.table import ParameterRow, ParameterTable, label
from leaven.scaling.transfer import transfer
from leaven.views.numbers import value

HEADERS = {
    "init_std": "init std",
    "lr": "peak lr",
    "weight_decay": "weight decay",
    "beta1": "β1",
    "beta2": "β2",
    "eps": "ε",
    "multiplier": "multiplier",
}
"""The column headers of the displayed values of a parameter, by field of the row."""
# Letters in the formulas of a rule that :func:`reason` shows with another subscript: I^-1 as m_in^-1.
_SUBSCRIPTS = {"I": "in", "O": "out", "H": "head", "M": "match"}
# A row of the parameter table, or of the document of ``leaven show``.
AnyRow = TypeVar("AnyRow", ParameterRow, ParameterValues)


@dataclass(frozen=True)
class LayerGroup:
    """A row of a displayed table: one parameter in the layers from ``first`` to ``last``."""

    label: str  # name of the parameter without its layer
    first: int | None  # None for a parameter outside the layers, such as the embedding
    last: int | None
    row: Any  # the values in the layer ``first``: a ParameterRow or ParameterValues

    @property
    def layers(self) -> str:
        if self.first is None:
            return ""
        return f"{self.first}" if self.first == self.last else f"{self.first}-{self.last}"


def by_label(rows: Iterable[AnyRow]) -> dict[str, list[AnyRow]]:
    """Return the rows grouped by parameter: ``layers.3.attention.query.weight`` is in ``attention.query``."""
    found: dict[str, list[AnyRow]] = {}
    for row in rows:
        found.setdefault(label(row.name).removesuffix(".weight"), []).append(row)
    return found


def groups(rows: Iterable[AnyRow]) -> list[LayerGroup]:
    """Group the rows of a parameter table: neighbouring layers with equal values become one group."""
    found = []
    for name, members in by_label(rows).items():
        for _, alike in groupby(members, key=lambda row: [getattr(row, field) for field in ("shape", *HEADERS)]):
            layers = list(alike)
            found.append(LayerGroup(name, layers[0].layer, layers[-1].layer, layers[0]))
    return found


def at_base(recipe: Recipe) -> Recipe | None:
    """Return the recipe scaled to its base, or None if it is at the base or cannot be scaled."""
    base = recipe.base
    own = (recipe.model.d_model, recipe.model.n_layers, recipe.batch.tokens, recipe.data.tokens)
    if own == (base.width, base.depth, base.batch_tokens, base.tokens):
        return None
    try:
        return transfer(
            recipe,
            width=base.width,
            depth=base.depth,
            batch_tokens=base.batch_tokens,
            tokens=base.tokens,
            d_ff=base.d_ff,
            d_head=base.d_head,
            n_kv_heads=base.n_kv_heads,
        )
    except InputError:
        return None


def reason(recipe: Recipe, table: ParameterTable, row: ParameterRow, quantity: str) -> str:
    """Return the reason for a parameter's ``quantity`` (a key of ``HEADERS``), such as ``m_in^-1 = 0.25``.

    Each m is a ratio target / base: m_in of the fan in, m_out of the fan out, m_head of the head dimension, m_L of
    the depth, m_B of the batch size, m_D of the tokens, and m_match of Muon's factor on the update.
    """
    init = recipe.hyperparameters.init
    if quantity == "init_std" and init != "rule" and row.init_std:
        return f"{init}: {INITS[init].formula(row, recipe.model.gated).text}"
    cells = _cells(table.rule, row, quantity)
    factor = math.prod(cell.factor(row.ratios, recipe.scaling) for cell in cells)
    if quantity == "weight_decay" and not (row.role.is_matrix or recipe.hyperparameters.decay_norm_and_bias):
        return "gains and biases have no weight decay (decay_norm_and_bias)"
    moving = [cell.text for cell in cells if cell.text != "1"]
    if not moving:
        return "Muon does not use it" if row.match and quantity in {"beta2", "eps"} else "does not change with scale"
    formula = re.sub(r"\b[IOHLBDM]\b", lambda match: f"m_{_SUBSCRIPTS.get(match[0], match[0])}", " ".join(moving))
    if quantity == "init_std":
        return f"square root of the variance factor {formula} = {value(factor**0.5)}"
    if quantity in {"beta1", "beta2"}:
        return (
            f"the half-life in steps is multiplied by {formula} = {value(factor)}, so the value is beta^(1 / "
            f"{value(factor)})"
        )
    return f"{formula} = {value(factor)}"


def _cells(rule: Rule, row: ParameterRow, quantity: str) -> tuple[Cell, ...]:
    """Return the cells whose product is the factor on ``quantity``; for init_std, on the variance, for betas, on the
    half-life."""
    match quantity:
        case "init_std":
            return rule.of("init_variance", row.role)
        case "beta1" | "beta2" | "eps" if row.match:  # of Muon
            return ()
        case "lr" | "weight_decay" | "eps":
            return rule.of(quantity, row.role, bool(row.match))
        case "beta1" | "beta2":
            return (rule.half_life,)
        case _:
            # The factor of a residual branch is applied after the last matrix of the branch.
            forward = rule.of("forward", row.role)
            return (*forward, rule.residual) if row.module in BRANCH_ENDS else forward
