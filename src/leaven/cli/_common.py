"""What the verbs share: how a recipe is given, where output goes, and how JSON is printed."""

import json
import math
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from leaven.recipe.files import read_recipe
from leaven.recipe.recipe import Recipe
from leaven.recipe.units import parse_quantity

# Results go to standard output; progress, warnings and errors to standard error, so that --json stays one document.
console = Console(highlight=False)
errors = Console(stderr=True, highlight=False, soft_wrap=True)

RecipeArgument = Annotated[Path, typer.Argument(metavar="RECIPE", help="A recipe file (TOML).", show_default=False)]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a value, e.g. --set hyperparameters.lr=0.002."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
Quantity = Annotated[int, typer.Option(parser=parse_quantity, metavar="COUNT")]


def load(recipe: Path, overrides: list[str] | None) -> Recipe:
    return read_recipe(recipe, overrides or ())


def emit_json(document: Any) -> None:
    """One JSON document on standard output; what is not a finite number becomes null."""
    typer.echo(json.dumps(_finite(document), indent=2, ensure_ascii=False, default=str))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
