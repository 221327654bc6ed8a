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
    """The matrices of a module that start alike."""

    module: str
    layers: str  # the blocks they are in; "" outside the blocks
    std: float  # this recipe's, multipliers and rule included
    published: dict[str, float]  # each init's own, by name


def starts(recipe: Recipe, table: ParameterTable) -> list[ModuleStart]:
    """One entry a module; two, for its first and its last block, where blocks differ."""
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
    """How far a published init is from the recipe's."""

    init: str
    octaves: float  # mean over the modules that are not 0 in either


def distances(found: Sequence[ModuleStart]) -> list[Distance]:
    """Distances of all published inits, the nearest first."""
    away = []
    for name in COMPARED:
        pairs = [(start.std, start.published[name]) for start in found if start.std and start.published[name]]
        if pairs:
            away.append(Distance(name, fmean(abs(math.log2(own / theirs)) for own, theirs in pairs)))
    return sorted(away, key=lambda each: each.octaves)


def matrices(table: ParameterTable) -> Iterator[ParameterRow]:
    """The rows that start from random numbers; gains, biases and gains per head do not."""
    return (row for row in table.rows if len(row.shape) == 2 and not row.init_mean)


def usual_std(width: int) -> float:
    """sqrt(1 / (3 d)): what MT-NLG 530B and BLOOM-176B started from, the measure of what is large."""
    return math.sqrt(1 / (3 * width))


def init_reason(recipe: Recipe) -> str:
    """Which initialisation applies, and where it is from."""
    tuned = recipe.hyperparameters
    if tuned.init == "rule":
        return f"rule: init_std {tuned.init_std:g} at the base, moved by {recipe.scaling.rule}"
    return f"{tuned.init}: a function of this shape, moved by no rule ({INITS[tuned.init].source})"


def describe_starts(recipe: Recipe, table: ParameterTable) -> dict[str, Any]:
    """Plain data: which init applies, and all published ones, the nearest first."""
    found = starts(recipe, table)
    return {
        "name": recipe.hyperparameters.init,
        "why": init_reason(recipe),
        "usual_std": usual_std(recipe.model.d_model),
        "nearest": [asdict(each) for each in distances(found)],
        "starts": [asdict(start) for start in found],
        "published": {name: {"std": init.text, "source": init.source} for name, init in COMPARED.items()},
    }
