"""leaven import: from other people's formats."""

import re
from pathlib import Path
from typing import Annotated

import typer

from leaven.cli import _next
from leaven.cli._common import JsonOption, console, emit_json, errors
from leaven.recipe.errors import InputError
from leaven.recipe.files import read_text, render, write_recipe

app = typer.Typer(help="From other people's formats.")


@app.callback(invoke_without_command=True)
def _help(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
def config(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", help="A script or list of flags; config.json, or the folder of it.", show_default=False
        ),
    ],
    source: Annotated[
        str, typer.Option("--from", metavar="SOURCE", help="transformers or megatron.", show_default=False)
    ],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="OUT.toml", help="The recipe to write (printed).")
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Processes of the run: neither format says so.", show_default=False),
    ] = None,
    json_output: JsonOption = False,
) -> None:
    """Read another trainer's configuration as a recipe, with the flag or key that each value is from.

    What it does not tell, and what no recipe holds, is listed.
    """
    from leaven.interop.configs import from_megatron, from_transformers

    if source not in _next.IMPORTED:
        raise InputError(f"--from {source}: there are {', '.join(_next.IMPORTED)}")
    if output is not None and output.exists():
        raise InputError(f"{output}: there is something already; give another name")
    # A recipe's name is a word; a file's may be anything.
    name = re.sub(r"^\W+|[^\w.\-]+", "-", (output or file.resolve()).stem).strip("-.") or "imported"
    if source == "megatron":
        found = from_megatron.read(read_text(file), str(file), name, ranks)
    else:
        found = from_transformers.read(file, name, ranks)
    if output is not None:
        write_recipe(found.recipe, output)
    following = _next.after_import(output, found.recipe)
    if json_output:
        path = str(output) if output is not None else None
        recipe = found.recipe.model_dump(mode="json")
        document = {"path": path, "unknown": found.unknown, "unread": found.unread, "recipe": recipe}
        emit_json(document | {"next": following})
        return
    for line in found.unknown:
        errors.print(f"unknown   {line}")
    if found.unread:
        errors.print(f"not read  {', '.join(found.unread)}")
    if output is None:
        typer.echo(render(found.recipe), nl=False)  # a recipe that a shell can redirect: nothing else goes there
    else:
        console.print(f"wrote {output} ({len(found.recipe.why)} values with their reason under [why])")
        _next.say(following)
