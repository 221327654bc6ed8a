"""What the values of a starter are for, and how laws and neighbours are weighed and told."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

from leaven.catalogue.laws import LawResult, evaluate
from leaven.catalogue.run import Run
from leaven.catalogue.votes import Neighbours, Said
from leaven.recipe.shape import ModelShape


@dataclass(frozen=True)
class Setting:
    """A scale that values are chosen for."""

    near: Neighbours
    model: ModelShape
    tokens: int
    gpus: int  # the batch divides over so many

    @property
    def lead(self) -> Run | None:
        return self.near.lead

    @property
    def tokens_per_parameter(self) -> float:
        return self.tokens / self.model.params

    @cached_property
    def laws(self) -> list[LawResult]:
        """What each law says here, one form of each."""
        model = self.model
        found = evaluate(model.params, self.tokens, params_non_embedding=model.params_non_embedding)
        return [law for law in found if law.form_of is None]

    def law_sources(self, names: Iterable[str]) -> list[str]:
        wanted = set(names)
        return [f"{law.law}: {law.source}" for law in self.laws if law.law in wanted]

    def inside(self, laws: Said) -> int:
        """How many of the laws are asked within the range they were fitted on."""
        return sum(law.in_range is True for law in self.laws if law.law in laws.by)

    def between(self, laws: Said, near: Said) -> float:
        """Between the middles of laws and neighbours, in the logarithm: see :meth:`weight`."""
        weight = self.weight(laws)
        return math.exp(weight * math.log(laws.value) + (1 - weight) * math.log(near.value))

    def weight(self, laws: Said) -> float:
        """Of the laws against the neighbours: a half where all are inside their range, a quarter where none is."""
        return (1 + self.inside(laws) / len(laws.by)) / 4

    def heard(self, laws: Said) -> str:
        return f"{self.inside(laws)} of {len(laws.by)} inside their range, weight {self.weight(laws):.2g}"


def said_range(said: Said, show: Callable[[float], str]) -> str:
    """``0.00045 (0.0001 .. 0.002)``: middle, lowest, highest."""
    return f"{show(said.value)} ({show(said.low)} .. {show(said.high)})"


def short(value: float) -> str:
    return f"{value:.2g}"
