"""The arguments of ``search``, validated before anything runs."""

import math
from collections.abc import Callable
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from leaven.recipe.errors import InputError
from leaven.tuning.algorithm.trust_region import Axes

OCTAVES = 1000.0  # the largest log2 multiplier: 2**1024 overflows
FINEST = 1e-9  # octaves, the smallest scale
HUGE = 1e50  # the largest loss and noise: their fourth powers must be finite in the surrogate
MOST = 10**12  # the largest count of trials or workers


def _limits(limits: Any) -> Any:
    """Return validated limits: (low, high) as floats, or the range of a choice."""
    if isinstance(limits, range):
        if limits.start or limits.step != 1 or len(limits) < 2:
            raise ValueError("give range(n) with at least 2 levels")
        return limits
    try:
        low, high = map(float, limits if not isinstance(limits, str) else ())
    except (TypeError, ValueError):  # not a pair of numbers
        low = high = math.nan
    if not -OCTAVES <= low < high <= OCTAVES:
        raise ValueError(
            f"give the lowest and the highest log2 multiplier, within {-OCTAVES:g} and {OCTAVES:g}, as in (-3, 3), "
            "or a range(n) for a choice of n"
        )
    return low, high


def _noise(noise: float) -> float:
    if noise and not 1 / HUGE <= noise <= HUGE:
        raise ValueError(f"give 0, or from {1 / HUGE:g} to {HUGE:g}")
    return noise


Limits = Annotated[Any, AfterValidator(_limits)]
Count = Annotated[int, Field(ge=1, le=MOST)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class SearchArguments(BaseModel):
    """The arguments of ``search`` whose type and range are checked. See ``search`` for what they mean."""

    model_config = ConfigDict(frozen=True)

    objective: Callable[..., Any]
    space: dict[str, Limits] = Field(min_length=1)
    start: dict[str, float]
    scales: dict[str, Annotated[float, Field(ge=FINEST, le=OCTAVES)]]
    near: dict[str, Limits]
    trials: Count | None
    flops: Positive | None
    hours: Positive | None
    run_flops: Positive | None
    noise: Annotated[float, AfterValidator(_noise)] | None
    seed: Annotated[int, Field(ge=0)]
    workers: Count
    lease_seconds: Positive

    @classmethod
    def of(cls, **given: Any) -> "SearchArguments":
        """Return the validated arguments.

        Raises:
            InputError: ``trials = 0: input should be greater than or equal to 1``.
        """
        try:
            return cls(**given)
        except ValidationError as error:
            fault = error.errors()[0]
            message = fault["msg"].removeprefix("Value error, ")
            where = ".".join(str(key) for key in fault["loc"] if key != "[key]")
            raise InputError(
                f"{where} = {fault['input']!r:.60}: {message[0].lower()}{message[1:]}" if where else message
            ) from None

    @model_validator(mode="after")
    def _within_the_space(self) -> "SearchArguments":
        for what, named in (("start", self.start), ("scales", self.scales), ("near", self.near)):
            for name in named:
                if name not in self.space:
                    raise ValueError(f"{what}.{name}: not in the space, which has {', '.join(self.space)}")
        for name, limits in self.space.items():
            at = self.start.get(name, 0.0)
            if isinstance(limits, range) and name in self.near:
                raise ValueError(f"near.{name}: this value is a choice, which has no box; remove it from near")
            if isinstance(limits, range) and at not in limits:
                raise ValueError(f"start.{name} = {at}: give one of its levels, 0 to {len(limits) - 1}")
            if isinstance(limits, tuple) and not limits[0] <= at <= limits[1]:
                raise ValueError(f"start.{name} = {at}: give a number from {limits[0]:g} to {limits[1]:g}")
        return self

    @property
    def axes(self) -> Axes:
        start = {name: self.start.get(name, 0.0) for name in self.space}
        return Axes(self.space, self.scales, self.near, start)
