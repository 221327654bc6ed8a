"""Show the results of commands that write files: ``leaven new``, ``export``, and ``report`` for several runs."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import RenderableType
from rich.text import Text

from leaven.documents.planning import NewRecipe
from leaven.documents.runs import ComparisonDocument, ConfigDocument, WeightsDocument
from leaven.recipe.recipe import Recipe
from leaven.recipe.units import format_quantity, format_seconds
from leaven.views import numbers
from leaven.views.tables import LABEL, Column, Facts, Table
from leaven.views.terminal.catalogue import value_lines

_COMPARED = (
    Column("run", lambda run: run.path, align="left"),
    Column("loss", lambda run: numbers.loss(run.loss), "nats/token"),
    Column("difference", lambda run: numbers.delta(run.difference), "nats/token"),
    Column("fewer tokens", lambda run: numbers.NONE if run.speedup is None else numbers.ratio(run.speedup), drop=1),
    Column("tokens", lambda run: numbers.quantity(run.tokens)),
    Column("time", lambda run: numbers.seconds(run.seconds), drop=2),
    Column("speed", lambda run: numbers.quantity(run.tokens_per_second), "tokens/s", drop=3),
    Column("rollbacks", lambda run: str(run.rollbacks), drop=4),
)


def wrote(path: Path, recipe: Recipe) -> str:
    return f"wrote {path} ({len(recipe.why)} values with their reason under [why])"


def derived(document: NewRecipe, files: Sequence[tuple[Path, Recipe]]) -> Iterator[RenderableType]:
    """Yield how ``leaven new`` chose each value, the training time if --time was given, and the written files."""
    yield Facts(*((f"{step.step} {step.title}", step.lines) for step in document.steps))
    if fit := document.fit:
        tuning = "; tuning the proxy takes additional time" if document.proxy else ""
        yield f"training takes about {format_seconds(fit.seconds)} on {fit.cluster}, by the planned speed{tuning}"
        if fit.text_tokens is not None:
            yield (
                f"the text has about {format_quantity(fit.text_tokens)} tokens, too few for the given time; "
                "more text allows a larger model"
            )
    for path, recipe in files:
        yield wrote(path, recipe)


def adopted(path: Path, recipe: Recipe, weights: Path, architecture: str) -> Iterator[RenderableType]:
    """Yield the lines of ``leaven new --from-weights``: the model and the chosen values."""
    shape, why = recipe.model, recipe.why
    sizes = f"heads {shape.n_heads}x{shape.d_head}  d_ff {shape.d_ff}  vocab {shape.vocab_size:,}"
    if experts := shape.experts:
        sizes += f"  experts {experts.active} of {experts.number}x{experts.d_expert}"
    used = f", {format_quantity(shape.params_active)} active" if shape.experts else ""
    lines = {
        "shape": f"L {shape.n_layers}  d {shape.d_model}  {sizes}   {format_quantity(shape.params)} params{used}",
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
    texts = [("lost", loss.text) for loss in export.lost] + [("note", note) for note in export.notes]
    yield Facts(*texts, indent=LABEL)
    yield f"wrote {export.path}"


def comparison_tables(document: ComparisonDocument) -> tuple[Table, Table]:
    """Return a table with a row for each run, and a table of differing values with a column for each run."""
    heads = [Column("value", align="left")]
    heads += [Column(run.path, align="left", free=True) for run in document.runs]
    rows = [[row.path, *(" | ".join(value_lines(value)) for value in row.values)] for row in document.different]
    return Table.of(_COMPARED, document.runs), Table(heads, rows)


def comparison_screen(document: ComparisonDocument) -> Iterator[RenderableType]:
    """Yield a row for each run of ``leaven report RUN RUN...``, and the values that differ."""
    runs, different = comparison_tables(document)
    yield runs
    if different.rows:
        yield ""
        yield different
    else:
        yield "the recipes are the same"
    for warning in document.warnings:
        yield Text(f"attention: {warning}", style="yellow")
    yield f"wrote {document.path}"
