"""Where the best lr is, how sure that is, and what another one costs. Losses are in nats, lrs as log2."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

POINTS = 5
"""Points round the lowest that the parabola goes through: further off the valley is no parabola."""


@dataclass(frozen=True)
class Valley:
    """Losses over lrs: ``losses`` is (lrs, seeds), rows in the order of ``octaves``, log2 of the lrs."""

    octaves: Array
    losses: Array

    @classmethod
    def of(cls, losses: Mapping[float, Sequence[float]]) -> "Valley":
        lrs = sorted(losses)
        return cls(np.log2(np.asarray(lrs)), np.asarray([losses[lr] for lr in lrs], dtype=float))

    @property
    def noise(self) -> float | None:
        """Standard deviation of a loss between seeds, pooled over the lrs near the best; None of one seed."""
        if self.losses.shape[1] < 2:
            return None
        near = _near(self.losses.mean(1))
        return float(np.sqrt(self.losses[near].var(axis=1, ddof=1).mean()))

    @property
    def at_the_edge(self) -> bool:
        """Whether the lowest loss is the first or the last one: the optimum may lie outside."""
        return int(self.losses.mean(1).argmin()) in {0, len(self.octaves) - 1}

    def optimum(self, losses: Array | None = None) -> float:
        """log2 of the best lr: the vertex of a parabola through the mean losses near the lowest."""
        a, b, _ = self._parabola((self.losses if losses is None else losses).mean(1))
        low, high = self.octaves[0], self.octaves[-1]
        return float(np.clip(-b / (2 * a), low, high))

    def loss_at(self, octave: float) -> float:
        """The loss at an lr, on straight lines between the means that were measured."""
        return float(np.interp(octave, self.octaves, self.losses.mean(1)))

    def resampled(self, random: np.random.Generator) -> Array:
        """The losses with seeds drawn anew, with replacement, for each lr by itself."""
        count, seeds = self.losses.shape
        drawn = random.integers(seeds, size=(count, seeds))
        return np.take_along_axis(self.losses, drawn, axis=1)

    def _parabola(self, means: Array) -> tuple[float, float, float]:
        near = _near(means)
        a, b, c = np.polyfit(self.octaves[near], means[near], 2)
        if a <= 0:  # no valley: the lowest point itself
            best = self.octaves[int(means.argmin())]
            return 1.0, -2 * float(best), 0.0
        return float(a), float(b), float(c)


@dataclass(frozen=True)
class Shift:
    """The move of the optimum in octaves with its 95% interval over seeds, and the regret of not moving, in nats."""

    octaves: float
    low: float
    high: float
    regret: float


def shift(base: Valley, target: Valley, draws: int = 1000) -> Shift:
    """From the base's optimum to the target's, both lrs in the same coordinates.

    ``regret`` is what the base's best lr costs at the target, against the best that was measured there.
    """
    random = np.random.default_rng(0)
    moved = target.optimum() - base.optimum()
    resampled = [
        target.optimum(target.resampled(random)) - base.optimum(base.resampled(random)) for _ in range(draws)
    ]
    low, high = np.percentile(resampled, [2.5, 97.5])
    regret = target.loss_at(base.optimum()) - float(target.losses.mean(1).min())
    return Shift(moved, float(low), float(high), max(regret, 0.0))


def _near(means: Array) -> slice:
    """The lowest point and its neighbours, as many on both sides as there are."""
    count = min(POINTS, len(means))
    first = int(np.clip(int(means.argmin()) - count // 2, 0, len(means) - count))
    return slice(first, first + count)
