"""Make the models that a check trains, from a recipe or from a user's factory function (``module:factory``)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from leaven.recipe.errors import InputError
from leaven.recipe.recipe import Recipe
from leaven.training.engine import check_trainable
from leaven.verification.batches import corpus
from leaven.verification.foreign import BATCH_TOKENS, ForeignFamily, Prepare, foreign
from leaven.verification.model_instance import RunScale
from leaven.verification.recipe_family import RecipeFamily
from leaven.verification.small_models import (
    DEPTHS,
    TIMES,
    WIDTH,
    CheckStart,
    calibrated,
    calibrated_table,
    small_recipe,
)

ModelFamily = RecipeFamily | ForeignFamily
"""A model at any width and depth, with its optimizer and data."""


@dataclass(frozen=True)
class SmallModels:
    """The models of a check that trains for a few steps."""

    family: ModelFamily
    widths: Sequence[int]
    depths: Sequence[int]
    changed: Sequence[str]  # what differs from the user's recipe


def small_models(
    subject: Recipe | str,
    start: CheckStart,
    prepare: Prepare,
    *,
    widths: Sequence[int] = (),
    depths: Sequence[int] = (),
    batch_tokens: int | None = None,
    source: str | None = None,
    alpha: float | None = None,
    grow_heads: bool = False,
) -> SmallModels:
    """Return the models of a recipe or factory for a check that trains for a few steps.

    If no widths are given, widths that fit the recipe are chosen. ``source`` and ``alpha`` are only for factories,
    and ``grow_heads`` is only for recipes.

    Raises:
        InputError: if there are fewer than two sizes, or a size does not fit the recipe or factory.
    """
    wide, deep = widths or [WIDTH * times for times in TIMES], depths or DEPTHS
    if all(len(set(axis)) < 2 for axis in (wide, deep)):
        raise InputError("a slope needs at least two sizes; give more --widths or --depths")
    if isinstance(subject, str):
        if grow_heads:
            raise InputError(f"{subject}: --grow-heads is for recipes; change the factory")
        scale = RunScale(min(wide), min(deep))
        family = foreign(subject, scale, prepare, source=source, batch_tokens=batch_tokens)
        return SmallModels(replace(family, alpha=alpha or family.alpha), wide, deep, ())
    recipe, changed = subject, tuple[str, ...]()
    if not widths:
        recipe, changed = small_recipe(recipe)
        wide = [recipe.model.d_model * times for times in TIMES]
    recipe = calibrated(recipe, min(wide), min(deep), start)
    seq_len = recipe.model.seq_len
    tokens = prepare(recipe.data, recipe.model.vocab_size)
    batches = corpus(tokens, seq_len, max((batch_tokens or BATCH_TOKENS) // seq_len, 1))
    return SmallModels(RecipeFamily(recipe, batches, calibrated_table, grow_heads), wide, deep, changed)


def recipe_models(recipe: Recipe, prepare: Prepare) -> RecipeFamily:
    """Return the models of a recipe for a check that trains them in complete runs.

    Raises:
        InputError: if the recipe cannot be trained.
    """
    tokens, seq_len = prepare(recipe.data, recipe.model.vocab_size), recipe.model.seq_len
    check_trainable(recipe, tokens)
    return RecipeFamily(recipe, corpus(tokens, seq_len, recipe.batch.tokens // seq_len))
