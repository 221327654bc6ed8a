"""leaven show RECIPE"""

from leaven.cli._common import JsonOption, RecipeArgument, SetOption, console, emit_json, load
from leaven.planning.flops import flops_per_token
from leaven.report.terminal import parameter_table
from leaven.scaling.table import describe, resolve


def show(recipe: RecipeArgument, overrides: SetOption = None, json_output: JsonOption = False) -> None:
    """Print what every parameter gets: shape, role, init std, lr, weight decay, betas, eps, multiplier."""
    loaded = load(recipe, overrides)
    if json_output:
        emit_json(describe(loaded, flops_per_token(loaded.model)))
    else:
        console.print(parameter_table(resolve(loaded), loaded))
