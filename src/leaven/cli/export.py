"""Defines the commands ``leaven export weights`` and ``leaven export config``."""

from pathlib import Path
from typing import Annotated, Literal

from leaven.cli import next_commands
from leaven.cli.common import (
    JsonOption,
    RecipeArgument,
    RunArgument,
    SetOption,
    TokensOption,
    argument,
    group,
    load_recipe,
    option,
    print_document,
)
from leaven.documents.runs import ConfigDocument, WeightsDocument
from leaven.errors import InputError
from leaven.storage import require_free
from leaven.views.terminal.console import say_skipped, warn
from leaven.views.terminal.files import exported_config, exported_weights

app = group()


@app.command()
def weights(
    run: RunArgument,
    folder: Annotated[Path, argument("DIR", "The folder to write; it must be new or empty.")],
    to: Annotated[
        Literal["huggingface"], option("The format to write. Only huggingface is supported.")
    ] = "huggingface",
    dtype: Annotated[
        Literal["fp32", "bf16", "fp16"], option("Number format of the weights: fp32, bf16 or fp16.")
    ] = "fp32",
    data_license: Annotated[
        str | None, option("The licence of the training data, for the model card.", "not stated", metavar="TEXT")
    ] = None,
    tokens: TokensOption = None,
    averaged: Annotated[
        bool, option("Write the averaged weights of a run that has [average] in its recipe.", names="--averaged")
    ] = False,
    json_output: JsonOption = False,
) -> None:
    """Write the model of a run as a folder that transformers can load, with multipliers folded into the weights.

    The README.md in the folder is a model card with the recipe, the reasons for its values, the validation loss and
    the data.
    """
    from leaven.interop.weights import not_exported
    from leaven.training.load import export_run, load_run

    loaded = load_run(run, tokens, averaged=averaged)
    say_skipped(loaded.skipped, loaded.changed)
    architecture = export_run(loaded, folder, dtype=dtype, licence=data_license)
    if (start := loaded.recipe.start.folder) is not None and (missing := not_exported(start)):
        warn([missing])
    document = WeightsDocument(
        path=str(folder), architecture=architecture.name, tokens=loaded.tokens, averaged=averaged
    )
    screen = exported_weights(document, loaded.recipe.model.params, dtype)
    print_document(document, screen, json_output, next_commands.after_export_weights(folder))


@app.command()
def config(
    recipe: RecipeArgument,
    to: Annotated[
        str,
        option(
            "The training code: megatron, megatron-module (sets every parameter), automodel, torchtitan, deepspeed, "
            "nanotron, transformers or litgpt.",
            metavar="TARGET",
        ),
    ],
    output: Annotated[
        Path | None,
        option(
            "The file to write, or the folder for targets with several files.",
            "named after the recipe",
            metavar="PATH",
            names="-o --output",
        ),
    ] = None,
    lossy: Annotated[
        bool, option("Write the file even if it cannot express some values. The file lists these values.")
    ] = False,
    overrides: SetOption = None,
    json_output: JsonOption = False,
) -> None:
    """Write a recipe and its resolved values as the configuration of another training code.

    If the other code cannot express some values, the command lists them. It then writes files only with --lossy.
    """
    from leaven.interop.configs.export import default_path, target, write
    from leaven.interop.configs.export import export as export_recipe

    known = target(to)  # raises for an unknown target
    read = load_recipe(recipe, overrides)
    path = output or Path(default_path(to, read.name))
    require_free(path, device="" in known.files)
    export = export_recipe(to, read)
    if export.losses and not lossy:
        warn((loss.text for loss in export.losses), "lost")
        count = f"{len(export.losses)} values" if len(export.losses) > 1 else "one value"
        raise InputError(
            f"{recipe}: {to} cannot express {count} (see the list above); add --lossy to write the other values"
        )
    write(export, path)
    document = ConfigDocument(path=str(path), lost=export.losses, notes=export.notes)
    print_document(document, exported_config(document), json_output)
