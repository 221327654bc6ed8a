"""The initialisations side by side for the terminal: a line a module, a column an init."""

from rich.console import Group

from leaven.recipe.init_std import INITS
from leaven.recipe.recipe import Recipe
from leaven.report import numbers
from leaven.report.terminal import Column, Columns, Facts
from leaven.scaling.starts import init_reason, starts, usual_std
from leaven.scaling.table import ParameterTable


def init_table(table: ParameterTable, recipe: Recipe) -> Group:
    """Which init applies, what every matrix starts from, and what the published ones would give it."""
    # Long names in two lines: all columns fit a terminal of 80.
    titles = ["this recipe", *(name.replace("-", " ") if len(name) > 8 else name for name in INITS)]
    columns = (
        Column("std of", align="left"),
        Column("layers", align="left"),
        *(Column(first, second, align="point") for first, _, second in (title.partition(" ") for title in titles)),
    )
    rows = [
        (start.module, start.layers, *(numbers.value(std) for std in (start.std, *start.published.values())))
        for start in starts(recipe, table)
    ]
    width = recipe.model.d_model
    usual = f"sqrt(1 / (3 d)) is {numbers.value(usual_std(width))} at d {width:,}"
    formulas = [f"{name} {init.text}" for name, init in INITS.items()]
    return Group(
        Facts([("init", (init_reason(recipe), usual))]),
        Columns(columns, rows),
        Facts([("formulas", formulas), ("letters", ("d width", "L layers", "l layer from 0", "f fan in"))]),
    )
