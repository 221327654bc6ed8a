"""What every matrix of a recipe starts from, beside what each published initialisation would give it."""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from leaven.recipe.init_std import INITS
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
    published = {name: init.std(parameter, shape.n_layers, shape.gated) for name, init in INITS.items()}
    return Start(row.module, "" if row.layer is None else str(row.layer), row.init_std, published)


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
    """As plain data: which init applies, and all of them side by side."""
    return {
        "name": recipe.hyperparameters.init,
        "why": init_reason(recipe),
        "usual_std": usual_std(recipe.model.d_model),
        "starts": [asdict(start) for start in starts(recipe, table)],
        "published": {name: {"std": init.text, "source": init.source} for name, init in INITS.items()},
    }
