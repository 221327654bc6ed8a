"""What every matrix of a recipe starts from, beside what each published initialisation would give it."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any

from leaven.recipe.init_std import COMPARED, INITS
from leaven.recipe.recipe import Recipe
from leaven.recipe.shape import Parameter
from leaven.scaling.table import ParameterTable, Row


@dataclass(frozen=True)
class Start:
    """The matrices of a module in the blocks ``layers``, which start alike ("" outside the blocks).

    ``std`` is this recipe's, multipliers and rule included; ``published`` is each init's own, by name.
    """

    module: str
    layers: str
    std: float
    published: dict[str, float]


def starts(recipe: Recipe, table: ParameterTable) -> list[Start]:
    """A line a module; one for its first block and one for its last where blocks differ."""
    by_module: dict[str, list[Row]] = {}
    for row in matrices(table):
        by_module.setdefault(row.module, []).append(row)
    found: list[Start] = []
    for rows in by_module.values():
        lines = [_start(recipe, row) for row in rows]
        if len({(line.std, *line.published.values()) for line in lines}) > 1:
            found += (lines[0], lines[-1])
        else:
            layers = f"0-{lines[-1].layers}" if len(lines) > 1 else lines[0].layers
            found.append(replace(lines[0], layers=layers))
    return found


def _start(recipe: Recipe, row: Row) -> Start:
    parameter = Parameter(row.name, row.shape, row.role, row.module, row.layer)
    shape = recipe.model
    published = {name: init.std(parameter, shape.n_layers, shape.gated) for name, init in COMPARED.items()}
    return Start(row.module, "" if row.layer is None else str(row.layer), row.init_std, published)


@dataclass(frozen=True)
class Distance:
    """How far a published init is from the recipe's: octaves, the mean over ``starts`` that are not 0 in either."""

    init: str
    octaves: float


def distances(found: Sequence[Start]) -> list[Distance]:
    """Of every published init, the nearest first."""
    away = []
    for name in COMPARED:
        pairs = [(start.std, start.published[name]) for start in found if start.std and start.published[name]]
        if pairs:
            away.append(Distance(name, fmean(abs(math.log2(own / theirs)) for own, theirs in pairs)))
    return sorted(away, key=lambda each: each.octaves)


def matrices(table: ParameterTable) -> Iterator[Row]:
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
    """As plain data: which init applies, and all of them side by side, the nearest first."""
    found = starts(recipe, table)
    return {
        "name": recipe.hyperparameters.init,
        "why": init_reason(recipe),
        "usual_std": usual_std(recipe.model.d_model),
        "nearest": [asdict(each) for each in distances(found)],
        "starts": [asdict(start) for start in found],
        "published": {name: {"std": init.text, "source": init.source} for name, init in COMPARED.items()},
    }
