"""Writes the model card (README.md) of an exported model: recipe, reasons, loss and licence of the data."""

from collections.abc import Iterable, Mapping
from typing import Any

from leaven import __version__
from leaven.interop.configs.export import environment
from leaven.recipe.recipe import Recipe, flatten
from leaven.recipe.units import format_quantity

STDLIB_LICENCE = "PSF-2.0 (the source code of Python's standard library)"


def model_card(
    recipe: Recipe,
    text: str,
    *,
    architecture: str,
    tokens: int,
    dtype: str,
    events: Iterable[Mapping[str, Any]],
    licence: str | None = None,
) -> str:
    """Return the model card of a run's checkpoint as Markdown.

    Args:
        text: the text of the recipe file.
        architecture: the name of the model's class in transformers.
        tokens: the number of tokens that the checkpoint was trained on.
        dtype: the dtype of the exported weights.
        events: the events of the run; the card shows the last validation loss at or before the checkpoint.
        licence: the licence of the data.
    """
    measured = [each for each in events if each["event"] == "validation" and each["tokens"] <= tokens]
    if licence is None and [source.source for source in recipe.data.sources] == ["python-stdlib"]:
        licence = STDLIB_LICENCE
    return (
        environment("")
        .get_template("model_card.md.j2")
        .render(
            recipe=recipe,
            text=text.strip(),
            architecture=architecture,
            tokens=tokens,
            finished=tokens >= recipe.data.tokens,
            dtype=dtype,
            validation=measured[-1] if measured else None,
            licence=licence,
            version=__version__,
            values=flatten(recipe.model_dump()),
            quantity=format_quantity,
            cell=_cell,
        )
    )


def _cell(value: object) -> str:
    """Return a value as text for a cell of a Markdown table: on one line, with ``|`` escaped."""
    return " ".join(str(value).split()).replace("|", "\\|")
