"""A small recipe with synthetic text, and faults to plant in its parameter table."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from leaven.documents.checks import CheckDocument, VerdictRow
from leaven.recipe.files import read_recipe
from leaven.recipe.recipe import Recipe
from leaven.scaling.table import ParameterRow, ParameterTable, parameter_table
from leaven.verification.batches import synthetic
from leaven.verification.coordinates import CoordinateCheck
from leaven.verification.recipe_family import RecipeFamily
from leaven.verification.small_models import CheckStart, calibrated, calibrated_table

PROXY = Path(__file__).parent / "proxy.toml"
WIDTHS, DEPTHS = (64, 128, 256), (2, 4, 8)

Fault = Callable[[ParameterRow, Recipe], ParameterRow]


def family(
    fault: Fault | None = None,
    *,
    start: CheckStart = CoordinateCheck.start,
    rule: str = "complete-d-p",
    alpha: float = 1.0,
    tied_embeddings: bool = False,
    **more: bool,
) -> RecipeFamily:
    """Return the proxy with a vocabulary of 256 and sequences of 32; ``fault`` changes its table's rows."""
    small = ["model.vocab_size=256", "model.seq_len=32", f"model.tied_embeddings={str(tied_embeddings).lower()}"]
    recipe = read_recipe(PROXY, [*small, f"scaling.rule={rule}", f"scaling.alpha={alpha}"])
    recipe = calibrated(recipe, min(WIDTHS), min(DEPTHS), start)

    def planted(moved: Recipe) -> ParameterTable:
        table = calibrated_table(moved)
        return replace(table, rows=tuple(fault(row, moved) if fault else row for row in table.rows))

    return RecipeFamily(recipe, synthetic(256, 32, 8), planted, **more)


def failed(document: CheckDocument) -> list[VerdictRow]:
    return [row for row in document.rows if row.passed is False]


def readout_lr_unscaled(row: ParameterRow, recipe: Recipe) -> ParameterRow:
    return replace(row, lr=recipe.hyperparameters.lr) if row.module == "unembedding" else row


def embedding_eps_unscaled(row: ParameterRow, recipe: Recipe) -> ParameterRow:
    return replace(row, eps=recipe.hyperparameters.eps) if row.module == "embedding" else row


def residual_left_out(row: ParameterRow, recipe: Recipe) -> ParameterRow:
    return replace(row, multiplier=1.0)


def depth_in_the_init_as_well(row: ParameterRow, recipe: Recipe) -> ParameterRow:
    """Apply GPT-2's 1/sqrt(2L) to the last matrix of a branch, on top of the branch's multiplier."""
    ends = row.module in {"attention.out", "mlp.out"}
    return replace(row, init_std=row.init_std / math.sqrt(2 * recipe.model.n_layers)) if ends else row


def decay_unscaled(row: ParameterRow, recipe: Recipe) -> ParameterRow:
    return replace(row, weight_decay=recipe.hyperparameters.weight_decay) if row.weight_decay else row


def rule_applied_twice(row: ParameterRow, recipe: Recipe) -> ParameterRow:
    base = _base_row(row, recipe)
    squared = {}
    for name in ("lr", "eps", "weight_decay", "init_std", "multiplier"):
        once, alone = getattr(row, name), getattr(base, name)
        squared[name] = once**2 / alone if alone else once
    return replace(row, **squared)


def alpha_1_multiplier(row: ParameterRow, recipe: Recipe) -> ParameterRow:
    """Use the branch multiplier of alpha 1 with the lrs and eps of the recipe's own alpha."""
    depth = recipe.model.n_layers / recipe.base.depth
    ends = row.module in {"attention.out", "mlp.out"}
    return replace(row, multiplier=row.multiplier * depth ** (recipe.scaling.alpha - 1)) if ends else row


def hidden_lr_of_alpha_one_half(row: ParameterRow, recipe: Recipe) -> ParameterRow:
    depth = recipe.model.n_layers / recipe.base.depth
    return replace(row, lr=row.lr * depth**-0.5) if row.layer is not None else row


def _base_row(row: ParameterRow, recipe: Recipe) -> ParameterRow:
    return parameter_table(recipe.replace({"scaling.base": None}))[row.name]
