"""What ``leaven tune`` searches; it changes nothing in training."""

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, PlainSerializer, model_validator

from leaven.recipe.base import Part

Octaves = Annotated[float, Field(ge=-64, le=64)]  # a factor of 2^64 is more than any hyperparameter needs


def _both_sides(value: Any) -> Any:
    """Validate the octaves of a path; a plain number is the reach in both directions."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = (-value, value)
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise ValueError('write "path" = 2, octaves in both directions, or "path" = [-1, 3]; the path in quotes')
    low, high = value
    if isinstance(low, int | float) and isinstance(high, int | float) and not low < 0 < high:
        raise ValueError(
            f"{low:g} to {high:g} octaves; 0 is the recipe's own value: the first must be below 0, the second above"
        )
    return (low, high)


def _written(ends: tuple[float, float]) -> Any:
    return ends[1] if ends[0] == -ends[1] else ends


Ends = Annotated[tuple[Octaves, Octaves], BeforeValidator(_both_sides), PlainSerializer(_written)]


class Tuning(Part):
    """What ``leaven tune`` searches. ``--space`` replaces ``space``; ``octaves`` still sets how far."""

    space: str | None = Field(default=None, min_length=1)  # as ``--space`` takes it
    # How far each value is searched, in octaves from the recipe's value, or in tenths if it may be 0 (dropout,
    # min_lr_ratio). Keys are paths of the recipe, or patterns with ``*``; the last that matches holds. They are
    # searched in addition to ``space``.
    octaves: dict[str, Ends] = {}

    @model_validator(mode="after")
    def _says_something(self) -> "Tuning":
        if self.space is None and not self.octaves:
            raise ValueError('it is empty; write space = "per-module", or a table octaves, or take it out')
        return self
