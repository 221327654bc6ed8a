"""Defines the command ``leaven show``."""

from pathlib import Path
from typing import Annotated

import typer

from leaven.cli import next_commands
from leaven.cli.common import JsonOption, SetOption, argument, load_recipe, option, print_document, require_alone
from leaven.errors import InputError
from leaven.planning.flops import flops_per_token
from leaven.recipe.recipe import RuleName
from leaven.scaling.describe import describe
from leaven.scaling.rules import RULES
from leaven.scaling.tested_ranges import warnings
from leaven.views.terminal.console import warn
from leaven.views.terminal.recipe import recipe_screen, rule_table


def show(
    context: typer.Context,
    recipe: Annotated[Path | None, argument("RECIPE", "A recipe file (TOML).")] = None,
    rule: Annotated[
        RuleName | None, option(f"Print this scaling rule instead of a recipe: {', '.join(RULES)}.", metavar="NAME")
    ] = None,
    overrides: SetOption = None,
    json_output: JsonOption = False,
) -> None:
    """Compare the init stds with published initialisations, and say how the optimizer applies weight decay.

    With --rule, print a scaling rule instead.
    """
    if rule is not None:
        require_alone(context, "--rule", "recipe overrides")
        document = RULES[rule].document()
        print_document(document, rule_table(document), json_output)
        return
    if recipe is None:
        raise InputError("RECIPE is missing; type: leaven show RECIPE, or leaven show --rule NAME")
    loaded = load_recipe(recipe, overrides)
    found = warnings(loaded)
    warn(each.message for each in found)
    shown = describe(loaded, flops_per_token(loaded.model), found)
    print_document(shown, recipe_screen(shown), json_output, next_commands.after_show(recipe, overrides or ()))
