"""leaven transfer RECIPE"""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from leaven.cli._common import JsonOption, RecipeArgument, SetOption, console, count_option, emit_json, load, warn
from leaven.planning.flops import flops_per_token
from leaven.planning.tested_ground import dropped, warnings
from leaven.recipe.files import read_text, write_recipe
from leaven.report.terminal import parameter_table
from leaven.scaling.describe import describe
from leaven.scaling.table import resolve
from leaven.scaling.transfer import transfer


def transfer_(
    recipe: RecipeArgument,
    width: Annotated[int | None, count_option("Target d_model.")] = None,
    depth: Annotated[int | None, count_option("Target number of layers.")] = None,
    batch_tokens: Annotated[int | None, count_option("Target global batch in tokens.")] = None,
    tokens: Annotated[int | None, count_option("Target duration in tokens, e.g. 20B.")] = None,
    d_ff: Annotated[int | None, count_option("Target d_ff; without it d_ff / d_model is kept.")] = None,
    d_head: Annotated[int | None, count_option("Target head dimension; without it heads are added.")] = None,
    kv_heads: Annotated[int | None, count_option("Target kv heads; without it heads per kv head are kept.")] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write the big recipe here.")] = None,
    overrides: SetOption = None,
    json_output: JsonOption = False,
) -> None:
    """Take a recipe to another width, depth, batch or duration; says where it leaves tested ground."""
    small = load(recipe, overrides)
    big = transfer(
        small,
        width=width,
        depth=depth,
        batch_tokens=batch_tokens,
        tokens=tokens,
        d_ff=d_ff,
        d_head=d_head,
        n_kv_heads=kv_heads,
    )
    found = [*dropped(small, big), *warnings(big)]
    warn(found)
    if output is not None:
        write_recipe(big, output, template=read_text(recipe))
    if json_output:
        emit_json(describe(big, flops_per_token(big.model)) | {"warnings": [asdict(warning) for warning in found]})
        return
    console.print(parameter_table(resolve(big), big))
    if output is not None:
        console.print(f"wrote {output}")
