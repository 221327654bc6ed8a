"""The base class of all parts of a recipe."""

from pydantic import BaseModel, ConfigDict


class Part(BaseModel):
    """A frozen part of a recipe. Unknown keys are refused, and strings are not converted to numbers."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
