"""Show the results of commands that write files: ``leaven new``, ``export`` and ``demo``."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import RenderableType

from leaven.documents.planning import NewRecipe
from leaven.documents.runs import ConfigDocument, DemoDocument, WeightsDocument
from leaven.recipe.recipe import Recipe
from leaven.recipe.units import format_quantity, format_seconds
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


def demo_summary(demo: DemoDocument) -> Iterator[RenderableType]:
    """Yield at most ten lines: the result, its cost and the report."""
    yield demo.verdict
    mine = next((arm.loss for arm in demo.arms if arm.key == "transferred"), None)
    width = max([12, *(len(arm.title) for arm in demo.arms)])
    for n, arm in enumerate(demo.arms):
        loss = "no run     " if arm.loss is None else f"{arm.loss:.4f}"
        behind = arm.key != "transferred" and arm.loss is not None and mine is not None
        gap = f"{arm.loss - mine:+.4f}" if behind and arm.loss is not None and mine is not None else ""
        yield f"{arm.title:<{width}} {loss}  {gap:<8}{'' if n else 'nats per token'}".rstrip()
    facts = []
    if demo.parts:
        parts = (f"{part.name} {format_seconds(part.seconds)}" for part in demo.parts)
        facts.append(("time", [f"{format_seconds(sum(part.seconds for part in demo.parts))} in all", *parts]))
    if (text := demo.text) is not None:
        learned = f"{format_quantity(text.train_tokens)} tokens to train on"
        facts.append(
            ("text", [f"{text.source}: {text.bytes / 1e6:.1f} MB", learned, f"vocabulary {text.vocab_size:,}"])
        )
    moved = [f"{what} {format_quantity(a)} -> {format_quantity(b)}" for what, (a, b) in demo.moved.items()]
    facts += [("scale", moved)] if moved else []
    yield Facts([*facts, ("report", [demo.report])])
