"""Compares the recipe of a run with the recipe that is to resume it. This module does not import torch."""

from typing import Any

from leaven.recipe.recipe import Difference, Recipe, differences, rearrangement

# The values that --rewind-to may change, because every step reads them from the recipe. Other keys define the model,
# the data or the initial values; the batch sizes determine at which token count a step starts.
SECTIONS = ("schedule", "stability", "evaluation")
HYPERPARAMETERS = ("lr", "weight_decay", "beta1", "beta2", "eps", "grad_clip")


def changes_of(there: Recipe, here: Recipe) -> list[Difference]:
    """Return the differences between two recipes that prevent a run of one from being resumed with the other.
    Differences in layout and micro-batch do not count."""
    free = rearrangement(there, here)
    return [change for change in differences(there, here) if change not in free]


def changeable(path: str) -> bool:
    """Return whether --rewind-to can change the recipe's value at a dotted path."""
    section, *keys = path.split(".")
    if section == "hyperparameters" and keys[0] in {"modules", "depth"}:
        return keys[-1] in HYPERPARAMETERS
    return section in SECTIONS or (section == "hyperparameters" and keys[0] in HYPERPARAMETERS)


def describe_changes(changes: list[Difference]) -> str:
    """Return the values of a run or study that a new recipe changes, as one line with the old and the new value."""
    return "; ".join(f"{path} was {brief(before)}, is now {brief(now)}" for path, before, now in changes)


def recorded_changes(changes: list[Difference], recipe: Recipe) -> dict[str, Any]:
    """Return the values of the event that records these changes of a run's recipe. ``recipe`` is the new recipe."""
    listed = [{"path": path, "before": before, "after": after} for path, before, after in changes]
    return {"changes": listed, "recipe": recipe.model_dump(mode="json", exclude_none=True)}


def brief(value: Any) -> str:
    """Return a value of a recipe as text."""
    return "not set" if value is None else f"{value}"
