"""The initialisations side by side for the terminal: a line an init, the recipe's own first."""

from collections.abc import Sequence

from rich.console import Group

from leaven.recipe.init_std import COMPARED, INITS
from leaven.recipe.recipe import Recipe
from leaven.scaling.starts import ModuleStart, distances, init_reason, starts, usual_std
from leaven.scaling.table import ParameterTable
from leaven.views import numbers
from leaven.views.terminal import Column, Columns, Facts

OWN = "this recipe"
# Of what starts alike in nearly all inits one module is shown; --json has every module.
SHOWN = (
    ("embedding", 0),
    ("attention.query", 0),
    ("attention.value", 2),
    ("attention.out", 0),
    ("mlp.gate", 1),
    ("mlp.in", 0),
    ("mlp.out", 0),
    ("unembedding", 0),
)


def init_table(table: ParameterTable, recipe: Recipe) -> Group:
    """Which init applies, what every matrix starts from, and what the published ones would give it."""
    found = starts(recipe, table)
    there = [(module, drop) for module, drop in SHOWN if any(start.module == module for start in found)]
    columns = (
        Column("std", "of", align="left"),
        Column("block", align="left"),
        *(Column(*module.partition(".")[::2], align="point", drop=drop) for module, drop in there),
    )
    rows = [
        (name if n == 0 else "", block, *(_cell(found, module, name, n) for module, _ in there))
        for name in (OWN, *COMPARED)
        for n, block in enumerate(_blocks(found, name, recipe.model.n_layers))
    ]
    width = recipe.model.d_model
    usual = f"sqrt(1 / (3 d)) is {numbers.value(usual_std(width))} at d {width:,}"
    near = [f"{each.init} {each.octaves:.2g} octaves" for each in distances(found)[:3]]
    formulas = [f"{name} {init.text}" for name, init in COMPARED.items()]
    only = f"only to compare with: {', '.join(name for name in COMPARED if name not in INITS)}"
    return Group(
        Facts([("init", (init_reason(recipe), usual))]),
        Columns(columns, rows),
        Facts(
            [
                ("nearest", (*near, "the mean over all matrices")),
                ("formulas", (*formulas, only)),
                ("letters", ("d width", "L layers", "l layer from 0", "f fan in", "o fan out")),
            ]
        ),
    )


def _of(start: ModuleStart, name: str) -> float:
    return start.std if name == OWN else start.published[name]


def _blocks(found: Sequence[ModuleStart], name: str, n_layers: int) -> tuple[str, ...]:
    """One line for all blocks, or one for the first and one for the last where they differ."""
    for module in {start.module for start in found}:
        if len({_of(start, name) for start in found if start.module == module}) > 1:
            return "0", str(n_layers - 1)
    return ("all",)


def _cell(found: Sequence[ModuleStart], module: str, name: str, line: int) -> str:
    """Of the first block's line, or the last's; what is outside the blocks stands in the first."""
    there = [start for start in found if start.module == module]
    if line and not there[0].layers:
        return ""
    return numbers.value(_of(there[-1 if line else 0], name))
