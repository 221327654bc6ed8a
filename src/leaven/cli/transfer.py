"""Defines the command ``leaven transfer``."""

from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import typer

from leaven.cli import next_commands
from leaven.cli.common import (
    JsonOption,
    RecipeArgument,
    SetOption,
    count_option,
    load_recipe,
    option,
    print_document,
    require_alone,
    require_new,
)
from leaven.errors import InputError
from leaven.planning.flops import flops_per_token
from leaven.recipe.files import read_recipe, read_text, write_recipe
from leaven.recipe.recipe import Recipe, flatten
from leaven.scaling.describe import describe
from leaven.scaling.tested_ranges import dropped, replaced, unlike, unlike_training, untuned, warnings
from leaven.scaling.transfer import taken_paths, transfer_like
from leaven.scaling.transfer import transfer as scaled
from leaven.views.terminal.console import warn
from leaven.views.terminal.recipe import transfer_screen


def transfer(
    context: typer.Context,
    recipe: RecipeArgument,
    width: Annotated[int | None, count_option("Target width (d_model).", "unchanged")] = None,
    depth: Annotated[int | None, count_option("Target number of layers.", "unchanged")] = None,
    batch_tokens: Annotated[int | None, count_option("Target global batch size in tokens.", "unchanged")] = None,
    tokens: Annotated[int | None, count_option("Target length of the run in tokens, e.g. 20B.", "unchanged")] = None,
    d_ff: Annotated[
        int | None, count_option("Target d_ff (width of the MLP).", "same ratio to d_model as in RECIPE")
    ] = None,
    d_head: Annotated[
        int | None, count_option("Target head dimension (d_head).", "unchanged; heads are added instead")
    ] = None,
    kv_heads: Annotated[
        int | None, count_option("Target number of key-value heads.", "same ratio to query heads as in RECIPE")
    ] = None,
    like: Annotated[
        Path | None,
        option(
            "Copy the tables [hyperparameters] and [scaling] of RECIPE into this recipe, and other values only if "
            "the study searched them. A searched batch size or number of tokens is multiplied as in the study.",
            metavar="TARGET.toml",
        ),
    ] = None,
    output: Annotated[
        Path | None, option("The recipe file to write.", "print the table only", names="-o --output")
    ] = None,
    force: Annotated[bool, option("Overwrite the output file if it exists.", names="--force")] = False,
    overrides: SetOption = None,
    json_output: JsonOption = False,
) -> None:
    sizes: dict[str, Any] = {
        "width": width,
        "depth": depth,
        "batch_tokens": batch_tokens,
        "tokens": tokens,
        "d_ff": d_ff,
        "d_head": d_head,
        "n_kv_heads": kv_heads,
    }
    if like is None and not any(sizes.values()):
        raise InputError(
            "no target is given; type --width, --depth, --batch-tokens or --tokens, or --like TARGET.toml"
        )
    if like is not None:
        require_alone(context, "--like", "width depth batch_tokens tokens d_ff d_head kv_heads")
    if output is not None:
        for file in (recipe, like or recipe):
            if output.exists() and file.exists() and output.samefile(file):
                raise InputError(f"-o {output} is an input file of this command; give another name")
        require_new(output, force)
    small = load_recipe(recipe, overrides if like is None else None)
    if like is None:
        before = small
        big = scaled(small, **sizes)
        warn(_scaled(_paths(overrides), small, big))
    else:
        before = load_recipe(like, overrides)
        taken = {"hyperparameters", "scaling", *taken_paths(small, before)}
        for path in _paths(overrides):
            if path.startswith(("hyperparameters.", "scaling.")) or any(
                f"{each}.".startswith(f"{path}.") for each in taken
            ):
                raise InputError(
                    f"--set {path} cannot be used, because --like takes this value from {recipe}; change it there"
                )
        big = transfer_like(small, before)
    from leaven.tuning.study_document import edited, worth_at

    tuned = read_recipe(recipe).model  # without --set, which may change the vocabulary or the sequence length
    found = [*dropped(before, big), *unlike(dict(tuned), big), *warnings(big)]
    if like is not None:
        found = [*untuned(small), *replaced(before, small, big), *unlike_training(small, big), *found]
    if edited(recipe):
        warn([f"{recipe} was edited after leaven tune wrote it, so the reasons in [why] may not fit the values"])
    if output is not None:
        write_recipe(big, output, template=read_text(like or recipe))
    warn(each.message for each in found)
    shown = describe(big, flops_per_token(big.model), found, worth_at(recipe, big))
    wrote = [f"wrote {output}"] if output is not None else []
    name = next_commands.beside(like, next_commands.TUNED) if like is not None else Path(f"{big.name}-big.toml")
    following = next_commands.after_writing(output, big, name)
    print_document(shown, chain(transfer_screen(shown), wrote), json_output, following)


def _paths(overrides: list[str] | None) -> list[str]:
    return [item.partition("=")[0].strip() for item in overrides or ()]


def _scaled(paths: list[str], small: Recipe, big: Recipe) -> list[str]:
    given, now = (flatten(recipe.model_dump(mode="json")) for recipe in (small, big))
    return [
        f"--set {path} applies before the transfer: it sets {value}, and the new recipe has {now.get(path)}"
        for path, value in given.items()
        if value != now.get(path) and any(f"{path}.".startswith(f"{each}.") for each in paths)
    ]
