"""Initial standard deviations of a recipe, compared with published initialisations."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any

from leaven.recipe.init_std import COMPARED, INITS
from leaven.recipe.recipe import Recipe
from leaven.recipe.shape import Parameter
from leaven.scaling.table import ParameterRow, ParameterTable


@dataclass(frozen=True)
class ModuleStart:
    """The matrices of a module with the same initial standard deviation."""

    module: str
    layers: str  # the blocks they are in; "" outside the blocks
    std: float  # of this recipe, after multipliers and rule
    published: dict[str, float]  # std under each published init, by name


def starts(recipe: Recipe, table: ParameterTable) -> list[ModuleStart]:
    """Return one entry for each module, or two (first and last block) if its blocks differ."""
    by_module: dict[str, list[ParameterRow]] = {}
    for row in matrices(table):
        by_module.setdefault(row.module, []).append(row)
    found: list[ModuleStart] = []
    for rows in by_module.values():
        lines = [_start(recipe, row) for row in rows]
        if len({(line.std, *line.published.values()) for line in lines}) > 1:
            found += (lines[0], lines[-1])
        else:
            layers = f"0-{lines[-1].layers}" if len(lines) > 1 else lines[0].layers
            found.append(replace(lines[0], layers=layers))
    return found


def _start(recipe: Recipe, row: ParameterRow) -> ModuleStart:
    parameter = Parameter(row.name, row.shape, row.role, row.module, row.layer)
    shape = recipe.model
    published = {name: init.std(parameter, shape.n_layers, shape.gated) for name, init in COMPARED.items()}
    return ModuleStart(row.module, "" if row.layer is None else str(row.layer), row.init_std, published)


@dataclass(frozen=True)
class Distance:
    """The distance of a published init from the recipe's."""

    init: str
    octaves: float  # mean over the modules where neither std is 0


def distances(found: Sequence[ModuleStart]) -> list[Distance]:
    """Return the distances of all published inits, nearest first."""
    away = []
    for name in COMPARED:
        pairs = [(start.std, start.published[name]) for start in found if start.std and start.published[name]]
        if pairs:
            away.append(Distance(name, fmean(abs(math.log2(own / theirs)) for own, theirs in pairs)))
    return sorted(away, key=lambda each: each.octaves)


def matrices(table: ParameterTable) -> Iterator[ParameterRow]:
    """Yield the rows with random initial values: all but gains and biases."""
    return (row for row in table.rows if len(row.shape) == 2 and not row.init_mean)


def usual_std(width: int) -> float:
    """Return sqrt(1 / (3 d)), the initial std of MT-NLG 530B and BLOOM-176B, as the reference for large values."""
    return math.sqrt(1 / (3 * width))


def init_reason(recipe: Recipe) -> str:
    """Return which initialisation applies, and its source."""
    tuned = recipe.hyperparameters
    if tuned.init == "rule":
        return f"rule: init_std {tuned.init_std:g} at the base, moved by {recipe.scaling.rule}"
    return f"{tuned.init}: a function of this shape, moved by no rule ({INITS[tuned.init].source})"


def describe_starts(recipe: Recipe, table: ParameterTable) -> dict[str, Any]:
    """Return the init that applies and all published ones, nearest first, for the document."""
    found = starts(recipe, table)
    return {
        "name": recipe.hyperparameters.init,
        "why": init_reason(recipe),
        "usual_std": usual_std(recipe.model.d_model),
        "nearest": [asdict(each) for each in distances(found)],
        "starts": [asdict(start) for start in found],
        "published": {name: {"std": init.text, "source": init.source} for name, init in COMPARED.items()},
    }
