"""Compares the recipe of a run with the recipe with which the run is to be resumed. This module does not import
torch."""

from typing import Any

from leaven.recipe.recipe import Difference, Recipe, differences, rearrangement

# The values that --rewind-to may change, because every step reads them from the recipe. Other keys define the model,
# the data or the initial values; the batch sizes determine at which token count a step starts.
SECTIONS = ("schedule", "stability", "evaluation")
HYPERPARAMETERS = ("lr", "weight_decay", "beta1", "beta2", "eps", "grad_clip")


def changes_of(there: Recipe, here: Recipe) -> list[Difference]:
    """Return the differences that prevent a run of the recipe ``there`` from being resumed with the recipe ``here``.
    Differences in the parallel layout and the micro-batch size do not prevent it, so they are left out."""
    free = rearrangement(there, here)
    return [change for change in differences(there, here) if change not in free]


def changeable(path: str) -> bool:
    """Return whether the value at a dotted path of the recipe may change when a run goes back to an earlier
    checkpoint (``--rewind-to``)."""
    section, *keys = path.split(".")
    if section == "hyperparameters" and keys[0] in {"modules", "depth"}:
        return keys[-1] in HYPERPARAMETERS
    return section in SECTIONS or (section == "hyperparameters" and keys[0] in HYPERPARAMETERS)


def describe_changes(changes: list[Difference]) -> str:
    """Return one line of text that lists changes of a recipe, each with its old and its new value."""
    return "; ".join(f"{path} was {brief(before)}, is now {brief(now)}" for path, before, now in changes)


def recorded_changes(changes: list[Difference], recipe: Recipe) -> dict[str, Any]:
    """Return the fields ``changes`` and ``recipe`` of an event in events.jsonl that records a change of the run's
    recipe. The argument ``recipe`` is the new recipe."""
    listed = [{"path": path, "before": before, "after": after} for path, before, after in changes]
    return {"changes": listed, "recipe": recipe.model_dump(mode="json", exclude_none=True)}


def brief(value: Any) -> str:
    """Return a value of a recipe as text: "not set" for None."""
    return "not set" if value is None else f"{value}"
