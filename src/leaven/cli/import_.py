"""Defines the command ``leaven import config``."""

from pathlib import Path
from typing import Annotated, Literal

from leaven.cli import next_commands
from leaven.cli.common import JsonOption, argument, group, option, print_document, recipe_name, require_new
from leaven.documents.runs import ImportDocument
from leaven.errors import InputError
from leaven.recipe.files import read_text, render, write_recipe
from leaven.views.terminal.console import echo, say_unread
from leaven.views.terminal.files import wrote

app = group()


@app.command()
def config(
    file: Annotated[
        Path,
        argument(
            "FILE",
            "For megatron, a script or a list of flags. For transformers, config.json or its folder. For "
            "torchtitan, its TOML file or the JSON file that it saves.",
        ),
    ],
    source: Annotated[
        Literal["transformers", "megatron", "torchtitan"],
        option("The format of FILE: transformers, megatron or torchtitan.", metavar="SOURCE", names="--from"),
    ],
    output: Annotated[
        Path | None, option("The recipe file to write.", "print it", metavar="OUT.toml", names="-o --output")
    ] = None,
    ranks: Annotated[
        int | None, option("Number of processes of the run. FILE does not contain this number.", metavar="N", min=1)
    ] = None,
    json_output: JsonOption = False,
) -> None:
    """Convert another training code's configuration to a recipe. A comment names the flag or key of each value.

    The command lists values that FILE does not give and settings that a recipe cannot contain.
    """
    from leaven.interop.configs import from_megatron, from_torchtitan, from_transformers

    if output is not None:
        require_new(output)
    if file.is_dir() and source != "transformers":
        what = "the script or the list of flags" if source == "megatron" else "torchtitan's TOML or JSON file"
        raise InputError(f"{file}: this is a folder; give the path of {what}")
    name = recipe_name(output or file.resolve(), "imported")
    if source == "megatron":
        found = from_megatron.read(read_text(file), str(file), name, ranks)
    elif source == "torchtitan":
        found = from_torchtitan.read(file, name, ranks)
    else:
        found = from_transformers.read(file, name, ranks)
    if output is not None:
        write_recipe(found.recipe, output)
    document = ImportDocument(
        path=str(output) if output is not None else None,
        unknown=found.unknown,
        unread=found.unread,
        recipe=found.recipe.model_dump(mode="json"),
    )
    if output is not None or json_output:
        following = next_commands.after_writing(output, found.recipe, Path(f"{name}.toml"))
        print_document(document, [wrote(output, found.recipe)] if output is not None else [], json_output, following)
    else:
        echo(render(found.recipe), newline=False)  # so that `> OUT.toml` writes a valid recipe
    if not json_output:
        say_unread(found.unknown, found.unread)
