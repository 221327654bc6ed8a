"""leaven show RECIPE, leaven show --rule NAME"""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from leaven.cli import _next
from leaven.cli._common import JsonOption, SetOption, console, emit_json, load, warn
from leaven.planning.flops import flops_per_token
from leaven.recipe.errors import InputError
from leaven.recipe.recipe import Recipe
from leaven.scaling.describe import describe
from leaven.scaling.rules import RULES
from leaven.scaling.table import resolve
from leaven.scaling.tested_ranges import warnings
from leaven.views.rules import rule_table
from leaven.views.starts import init_table
from leaven.views.terminal import parameter_notes, parameter_table


def show(
    recipe: Annotated[
        Path | None, typer.Argument(metavar="[RECIPE]", help="A recipe file (TOML).", show_default=False)
    ] = None,
    rule: Annotated[
        str | None, typer.Option(metavar="NAME", help=f"Print a scaling rule instead: {', '.join(RULES)}.")
    ] = None,
    overrides: SetOption = None,
    json_output: JsonOption = False,
) -> None:
    """Print what every parameter gets: shape, role, init std, lr, weight decay, betas, eps, multiplier.

    Then the initialisation that applies beside the published ones, and what the optimizer does with weight decay.
    """
    if rule is not None:
        _show_rule(rule, json_output)
    elif recipe is None:
        raise InputError("leaven show takes a recipe file, or --rule NAME for a scaling rule")
    else:
        _show_recipe(load(recipe, overrides), json_output, _next.after_show(recipe, overrides or ()))


def _show_recipe(recipe: Recipe, json_output: bool, following: list[str]) -> None:
    table, found = resolve(recipe), warnings(recipe)
    warn(found)
    if json_output:
        told = {"warnings": [asdict(warning) for warning in found], "next": following}
        emit_json(describe(recipe, flops_per_token(recipe.model)) | told)
        return
    console.print(parameter_table(table, recipe))
    console.print(parameter_notes(table, recipe))
    console.print(init_table(table, recipe))
    _next.say(following)


def _show_rule(name: str, json_output: bool) -> None:
    if name not in RULES:
        raise InputError(f"--rule {name}: no such rule; there are {', '.join(RULES)}")
    if json_output:
        emit_json(RULES[name].document())
        return
    console.print(rule_table(RULES[name]))
