"""The base class of all parts of a recipe."""

from pydantic import BaseModel, ConfigDict


class Part(BaseModel):
    """A part of a recipe. It is immutable, refuses unknown keys, and does not convert strings to numbers."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, defer_build=True)
