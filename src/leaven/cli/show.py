"""leaven show RECIPE, leaven show --rule NAME"""

from pathlib import Path
from typing import Annotated

import typer

from leaven.cli._common import JsonOption, SetOption, console, emit_json, load
from leaven.planning.flops import flops_per_token
from leaven.recipe.errors import InputError
from leaven.report.rules import rule_table
from leaven.report.terminal import parameter_notes, parameter_table
from leaven.scaling.rules import RULES
from leaven.scaling.table import describe, resolve


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
    """Print what every parameter gets: shape, role, init std, lr, weight decay, betas, eps, multiplier."""
    if rule is not None:
        _show_rule(rule, json_output)
    elif recipe is None:
        raise InputError("leaven show takes a recipe file, or --rule NAME for a scaling rule")
    elif json_output:
        loaded = load(recipe, overrides)
        emit_json(describe(loaded, flops_per_token(loaded.model)))
    else:
        loaded = load(recipe, overrides)
        console.print(parameter_table(resolve(loaded), loaded))
        console.print(parameter_notes(resolve(loaded), loaded))


def _show_rule(name: str, json_output: bool) -> None:
    if name not in RULES:
        raise InputError(f"--rule {name}: no such rule; there are {', '.join(RULES)}")
    if json_output:
        emit_json(RULES[name].document())
        return
    console.print(rule_table(RULES[name]))
