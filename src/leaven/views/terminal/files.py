"""Show the results of commands that write files: ``leaven new`` and ``export``."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import RenderableType

from leaven.documents.planning import NewRecipe
from leaven.documents.runs import ConfigDocument, WeightsDocument
from leaven.recipe.recipe import Recipe
from leaven.recipe.units import format_quantity
from leaven.views.tables import LABEL, Facts


def wrote(path: Path, recipe: Recipe) -> str:
    return f"wrote {path} ({len(recipe.why)} values with their reason under [why])"


def derived(document: NewRecipe, files: Sequence[tuple[Path, Recipe]] = ()) -> Iterator[RenderableType]:
    """Yield the screen of ``leaven new``: a line for each step, and then the files."""
    yield Facts([(f"{step.step} {step.title}", step.lines) for step in document.steps])
    for path, recipe in files:
        yield wrote(path, recipe)


def adopted(path: Path, recipe: Recipe, weights: Path, architecture: str) -> Iterator[RenderableType]:
    """Yield the screen of ``leaven new --from-weights``: the model, and the values that were chosen for it."""
    shape, why = recipe.model, recipe.why
    heads = f"heads {shape.n_heads}x{shape.d_head}  d_ff {shape.d_ff}  vocab {shape.vocab_size:,}"
    lines = {
        "shape": f"L {shape.n_layers}  d {shape.d_model}  {heads}   {format_quantity(shape.params)} params",
        "weights": f"{weights}   {architecture}",
        "duration": f"{format_quantity(recipe.data.tokens)} tokens   {why['data.tokens']}",
        "batch": f"{format_quantity(recipe.batch.tokens)} tokens   {why['batch.tokens']}",
        "lr": f"{recipe.hyperparameters.lr:g} peak   {why['hyperparameters.lr']}",
    }
    for label, text in lines.items():
        yield f"{label:<{LABEL}}{text}"
    yield wrote(path, recipe)


def exported_weights(export: WeightsDocument, params: int, dtype: str) -> Iterator[RenderableType]:
    yield (
        f"wrote {export.path}: {export.architecture}, {format_quantity(params)} parameters in {dtype}, from the "
        f"checkpoint at {export.tokens:,} tokens"
    )


def exported_config(export: ConfigDocument) -> Iterator[RenderableType]:
    for loss in export.lost:
        value = f"{loss.value:.12g}" if isinstance(loss.value, float) else f"{loss.value}"
        yield f"lost   {loss.key} = {value}: {loss.why}"
    for note in export.notes:
        yield f"note   {note}"
    yield f"wrote {export.path}"
