"""What a search found out."""

from collections.abc import Sequence
from dataclasses import dataclass

from leaven.training.study_file import Best, Coordinate, Dimension, Front, Trial


@dataclass(frozen=True)
class Answer:
    coordinates: tuple[Coordinate, ...] = ()
    fewest: Best | None = None
    fewest_octaves: dict[str, float] | None = None
    lines: tuple[str, ...] = ()


def answer(trials: Sequence[Trial], dimensions: Sequence[Dimension], noise: float | None = None) -> Answer:
    return Answer()


def front(trials: Sequence[Trial]) -> tuple[Front, ...]:
    return ()


def advice_when_all_diverged(trials: Sequence[Trial], dimensions: Sequence[Dimension]) -> str:
    return "no trial reached the end; lower hyperparameters.lr in the recipe"
