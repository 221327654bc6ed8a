"""Find the best value of a swept hyperparameter, its confidence interval, and the cost of using another value.

Losses are in nats, values are log2.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

POINTS = 3
"""Points near the lowest that the parabola is fitted to. Loss curves are steeper on one side than on the other: with
five points of a grid of octaves the vertex drifted by half an octave although the lowest point stayed
(docs/log.md)."""


@dataclass(frozen=True)
class LossGrid:
    """The losses at three or more values of a hyperparameter."""

    octaves: Array  # log2 of the values, (values,)
    losses: Array  # nats, (values, seeds)

    @classmethod
    def of(cls, losses: Mapping[float, Sequence[float]]) -> "LossGrid":
        lrs = sorted(losses)
        return cls(np.log2(np.asarray(lrs)), np.asarray([losses[lr] for lr in lrs], dtype=float))

    @property
    def noise(self) -> float | None:
        """Standard deviation of the loss between seeds, pooled over the values near the best; None for one seed."""
        if self.losses.shape[1] < 2:
            return None
        near = _near(self.losses.mean(1))
        return float(np.sqrt(self.losses[near].var(axis=1, ddof=1).mean()))

    @property
    def edge(self) -> int:
        """-1 or 1 if the lowest loss is at the first or last value, so that the optimum may lie outside; else 0."""
        if not np.isfinite(self.losses).all():
            return 0
        place = int(self.losses.mean(1).argmin())
        return -(place == 0) + (place == len(self.octaves) - 1)

    @property
    def lowest(self) -> float:
        """The loss at the optimum."""
        return self.loss_at(self.optimum())

    def optimum(self) -> float:
        """log2 of the best value: the vertex of a parabola through the mean losses near the lowest."""
        a, b, _ = self._parabola(self.losses.mean(1))
        return min(max(-b / (2 * a), float(self.octaves[0])), float(self.octaves[-1]))

    def loss_at(self, octave: float) -> float:
        """Return the loss at a value, on the parabola through the three nearest mean losses."""
        near = _around(int(np.abs(self.octaves - octave).argmin()), len(self.octaves))
        a, b, c = _through(self.octaves[near], self.losses.mean(1)[near])
        return a * octave**2 + b * octave + c

    def resampled(self, random: np.random.Generator) -> Array:
        """Return a bootstrap sample: seeds drawn with replacement, independently for each value.

        Deviations from the mean of n drawn values are too small by sqrt((n - 1) / n), about 30% at two seeds, and are
        scaled up accordingly.
        """
        count, seeds = self.losses.shape
        drawn = np.take_along_axis(self.losses, random.integers(seeds, size=(count, seeds)), axis=1)
        means = self.losses.mean(1, keepdims=True)
        return np.asarray(means + (drawn - means) * np.sqrt(seeds / max(seeds - 1, 1)))

    def _parabola(self, means: Array) -> tuple[float, float, float]:
        near = _near(means)
        a, b, c = _through(self.octaves[near], means[near])
        if a <= 0:  # not convex: use the lowest point itself
            best = self.octaves[int(means.argmin())]
            return 1.0, -2 * float(best), 0.0
        return a, b, c


@dataclass(frozen=True)
class Shift:
    """The shift of the optimum between two scales, with 95% intervals over seeds (of width 0 for one seed)."""

    octaves: float  # the shift
    low: float
    high: float
    regret: float  # nats; what the base's best value costs at the target
    regret_low: float
    regret_high: float


def shift(base: LossGrid, target: LossGrid, draws: int = 1000) -> Shift:
    """Return the shift from the base's optimum to the target's; both have values in the same coordinates."""
    random = np.random.default_rng(0)
    moved, regret = _moved(base, target)
    drawn = [
        _moved(LossGrid(base.octaves, base.resampled(random)), LossGrid(target.octaves, target.resampled(random)))
        for _ in range(draws)
    ]
    (low, regret_low), (high, regret_high) = np.percentile(drawn, [2.5, 97.5], axis=0)
    return Shift(moved, float(low), float(high), regret, float(regret_low), float(regret_high))


@dataclass(frozen=True)
class Estimate:
    """A number with its 95% interval over seeds, which is None for one seed."""

    value: float
    low: float | None
    high: float | None


def exponent(valleys: Mapping[float, LossGrid], draws: int = 1000) -> Estimate:
    """Return the exponent of the optimum: the least-squares slope of its log2 over log2 of the ratio of scales."""
    ratios = np.log2(list(valleys))
    ratios -= ratios.mean()

    def fitted(found: Iterable[LossGrid]) -> float:
        return float(ratios @ [valley.optimum() for valley in found] / (ratios @ ratios))

    return estimate(fitted, list(valleys.values()), draws)


def estimate(of: Callable[[Sequence[LossGrid]], float], valleys: Sequence[LossGrid], draws: int = 1000) -> Estimate:
    """Return a function of some loss grids with its bootstrap interval over their seeds."""
    value = of(valleys)
    if any(valley.losses.shape[1] < 2 for valley in valleys):
        return Estimate(value, None, None)
    random = np.random.default_rng(0)
    drawn = [of([LossGrid(valley.octaves, valley.resampled(random)) for valley in valleys]) for _ in range(draws)]
    low, high = np.percentile(drawn, [2.5, 97.5])
    return Estimate(value, float(low), float(high))


def _moved(base: LossGrid, target: LossGrid) -> tuple[float, float]:
    """Return the shift and the regret, without intervals."""
    best, own = base.optimum(), target.optimum()
    return own - best, max(target.loss_at(best) - target.loss_at(own), 0.0)


def _through(x: Array, y: Array) -> tuple[float, float, float]:
    """Return the coefficients of the parabola through three points, highest power first."""
    (x0, x1, x2), (y0, y1, y2) = x.tolist(), y.tolist()
    slope = (y1 - y0) / (x1 - x0)
    a = ((y2 - y1) / (x2 - x1) - slope) / (x2 - x0)
    b = slope - a * (x0 + x1)
    return a, b, y0 - (a * x0 + b) * x0


def _near(means: Array) -> slice:
    return _around(int(means.argmin()), len(means))


def _around(place: int, available: int) -> slice:
    """Return the slice of `POINTS` indices around an index, shifted where it would exceed the range."""
    first = min(max(place - POINTS // 2, 0), max(available - POINTS, 0))
    return slice(first, first + POINTS)
