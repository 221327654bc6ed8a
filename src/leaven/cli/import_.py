"""leaven import: from other people's formats."""

import re
from pathlib import Path
from typing import Annotated

import typer

from leaven.cli import next_commands
from leaven.cli.common import JsonOption, group, hand_over
from leaven.documents.runs import ImportDocument
from leaven.recipe.errors import InputError
from leaven.recipe.files import read_text, render, write_recipe
from leaven.views.terminal.console import errors
from leaven.views.terminal.files import wrote

app = group()


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

    if source not in next_commands.IMPORTED:
        raise InputError(f"--from {source}: there are {', '.join(next_commands.IMPORTED)}")
    if output is not None and output.exists():
        raise InputError(f"{output}: the file exists; give another name")
    # A recipe's name is a word; a file's may be anything.
    name = re.sub(r"^\W+|[^\w.\-]+", "-", (output or file.resolve()).stem).strip("-.") or "imported"
    if source == "megatron":
        found = from_megatron.read(read_text(file), str(file), name, ranks)
    else:
        found = from_transformers.read(file, name, ranks)
    if output is not None:
        write_recipe(found.recipe, output)
    document = ImportDocument(
        path=str(output) if output is not None else None,
        unknown=found.unknown,
        unread=found.unread,
        recipe=found.recipe.model_dump(mode="json"),
        next=next_commands.after_import(output, found.recipe),
    )
    if output is not None or json_output:
        screen = [] if output is None else [wrote(output, found.recipe)]
        hand_over(document, screen, json_output)
    else:
        typer.echo(render(found.recipe), nl=False)  # a recipe that a shell can redirect: nothing else goes there
    if not json_output:
        for line in found.unknown:
            errors.print(f"unknown   {line}")
        if found.unread:
            errors.print(f"not read  {', '.join(found.unread)}")
