"""leaven new OUT --from-weights DIR"""

import re
from pathlib import Path
from typing import Annotated

import typer

from leaven.cli._common import JsonOption, console, count_option, emit_json
from leaven.recipe.errors import InputError
from leaven.recipe.files import write_recipe
from leaven.recipe.units import format_quantity


def new(
    output: Annotated[Path, typer.Argument(metavar="OUT.toml", help="The recipe to write.", show_default=False)],
    from_weights: Annotated[
        Path, typer.Option(metavar="DIR", help="A model in Hugging Face's format to start from.", show_default=False)
    ],
    tokens: Annotated[int | None, count_option("Duration in tokens, e.g. 2B (20 a parameter).")] = None,
    source: Annotated[str, typer.Option(help=r"The text: see \[data] source of a recipe.")] = "python-stdlib",
    json_output: JsonOption = False,
) -> None:
    """Write a recipe, with a reason for every value."""
    from leaven.interop.adopt import adopt
    from leaven.interop.weights import read_plain

    if output.exists():
        raise InputError(f"{output}: there is something already; give another name")
    plain = read_plain(from_weights)
    # A recipe's name is a word; a file's may be anything.
    name = re.sub(r"^\W+|[^\w.\-]+", "-", output.stem).strip("-") or "new"
    recipe = adopt(plain, name, source=source, tokens=tokens)
    write_recipe(recipe, output)
    shape, found = recipe.model, plain.architecture.name
    if json_output:
        emit_json({"path": str(output), "architecture": found, "params": shape.params, "tokens": recipe.data.tokens})
        return
    lines = {
        "shape": f"L {shape.n_layers}  d {shape.d_model}  heads {shape.n_heads}x{shape.d_head}  d_ff {shape.d_ff}  "
        f"vocab {shape.vocab_size:,}   {format_quantity(shape.params)} params",
        "weights": f"{from_weights}   {found}",
        "duration": f"{format_quantity(recipe.data.tokens)} tokens   {recipe.why['data.tokens']}",
        "batch": f"{format_quantity(recipe.batch.tokens)} tokens   {recipe.why['batch.tokens']}",
        "lr": f"{recipe.hyperparameters.lr:g} peak   {recipe.why['hyperparameters.lr']}",
    }
    for what, said in lines.items():
        console.print(f"{what:<10} {said}")
    console.print(f"wrote {output} ({len(recipe.why)} values with their reason under [why])")
