"""Find the best value of a swept hyperparameter, its confidence interval, and the cost of using another value.

Losses are in nats per token. Values of the hyperparameter are given as their log2, in octaves. In the shapes of
arrays, "..." stands for optional leading dimensions. They contain bootstrap samples, which are computed all at once.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from leaven.documents.checks import MeasuredRow
from leaven.verification.verdict import difference

Array = NDArray[np.float64]

POINTS = 3
"""A parabola is fitted to this number of points around the lowest loss. More points are worse, because loss curves
are steeper on one side than on the other. With five points an octave apart, the vertex moved by half an octave
although the lowest point stayed the same (docs/log.md)."""

DRAWS = 1000  # bootstrap samples


@dataclass(frozen=True)
class LossGrid:
    """The losses at three or more values of a hyperparameter."""

    octaves: Array  # (values,), log2 of the values
    losses: Array  # (..., values, seeds)

    @classmethod
    def of(cls, losses: Mapping[float, Sequence[float]]) -> "LossGrid":
        """Make a grid from a mapping of each value to the losses of all seeds."""
        values = sorted(losses)
        return cls(np.log2(np.asarray(values)), np.asarray([losses[value] for value in values], dtype=float))

    @property
    def means(self) -> Array:
        """The mean losses over seeds, an array of shape (..., values)."""
        return np.asarray(self.losses.mean(-1))

    @property
    def finite(self) -> bool:
        return bool(np.isfinite(self.losses).all())

    @property
    def noise(self) -> float | None:
        """The standard deviation of the loss between seeds, or None for one seed.

        The variance is averaged over the `POINTS` values of the hyperparameter around the lowest mean loss.
        """
        if self.losses.shape[1] < 2:
            return None
        near = self._points(self.means.argmin(-1))
        return float(np.sqrt(self.losses[near].var(axis=1, ddof=1).mean()))

    @property
    def edge(self) -> int:
        """-1 if the lowest mean loss is at the first value of the grid, 1 if at the last, 0 if at a value between.

        At the first or last value, the optimum may be outside the grid. If a loss is not finite, the result is 0.
        """
        if not self.finite:
            return 0
        place = int(self.means.argmin())
        return -(place == 0) + (place == len(self.octaves) - 1)

    @property
    def lowest(self) -> Array:
        """The loss that the fitted parabola predicts for the best value, an array of shape (...)."""
        return self.loss_at(self.optimum())

    def optimum(self) -> Array:
        """Return log2 of the best value of the hyperparameter, as an array of shape (...).

        The best value is the vertex of a parabola through the mean losses around the lowest one, clipped to the grid.
        If the parabola has no minimum, the best value is the grid value with the lowest mean loss.
        """
        place = self.means.argmin(-1)
        a, b, _ = self._parabola(place)
        with np.errstate(divide="ignore", invalid="ignore"):
            vertex = -b / (2 * a)
        convex = np.where(a <= 0, self.octaves[place], vertex)
        return np.clip(convex, self.octaves[0], self.octaves[-1])

    def loss_at(self, octave: Array) -> Array:
        """Return the predicted loss at ``octave``, the log2 of a value of the hyperparameter.

        The prediction is a parabola through the mean losses around the nearest grid value. ``octave`` and the
        returned loss have the shape (...).
        """
        a, b, c = self._parabola(np.abs(self.octaves - np.expand_dims(octave, -1)).argmin(-1))
        return np.asarray(a * octave**2 + b * octave + c)

    def _points(self, place: NDArray[np.int64]) -> NDArray[np.int64]:
        first = np.clip(place - POINTS // 2, 0, max(len(self.octaves) - POINTS, 0))
        return np.asarray(np.expand_dims(first, -1) + np.arange(POINTS))

    def _parabola(self, place: NDArray[np.int64]) -> tuple[Array, Array, Array]:
        """Return (a, b, c) of a x^2 + b x + c through the mean losses around each index in ``place``."""
        near = self._points(place)
        x0, x1, x2 = np.moveaxis(self.octaves[near], -1, 0)
        y0, y1, y2 = np.moveaxis(np.take_along_axis(self.means, near, -1), -1, 0)
        slope = (y1 - y0) / (x1 - x0)
        a = ((y2 - y1) / (x2 - x1) - slope) / (x2 - x0)
        b = slope - a * (x0 + x1)
        return a, b, y0 - (a * x0 + b) * x0


@dataclass(frozen=True)
class Estimate:
    """A number with its 95% interval over seeds. The ends of the interval are None if there is only one seed."""

    value: float
    low: float | None
    high: float | None

    @property
    def ends(self) -> tuple[float, float]:
        """The ends of the interval. If there is only one seed, both ends are the value itself."""
        return (self.value if self.low is None else self.low, self.value if self.high is None else self.high)

    def row(self, name: str, note: str, expected: float | None = None) -> MeasuredRow:
        """Return the row of a document that shows this number."""
        return MeasuredRow(name=name, value=self.value, low=self.low, high=self.high, expected=expected, note=note)


def estimate(of: Callable[[Sequence[LossGrid]], Array], grids: Sequence[LossGrid]) -> Estimate:
    """Return ``of(grids)`` with its 95% bootstrap interval over seeds.

    The bootstrap draws seeds with replacement, independently for each value of the hyperparameter. The deviations of
    the losses from their mean are scaled up, because with n seeds they are too small by sqrt((n - 1) / n).
    """
    value, seeds = float(of(grids)), grids[0].losses.shape[1]
    if seeds < 2:
        return Estimate(value, None, None)
    counts = [len(grid.octaves) for grid in grids]
    drawn = np.random.default_rng(0).integers(seeds, size=(DRAWS, sum(counts), seeds))
    sampled = []
    for grid, indices in zip(grids, np.split(drawn, np.cumsum(counts)[:-1], axis=1), strict=True):
        means = grid.losses.mean(1, keepdims=True)
        losses = np.take_along_axis(grid.losses[np.newaxis], indices, axis=2)
        sampled.append(replace(grid, losses=means + (losses - means) * np.sqrt(seeds / (seeds - 1))))
    low, high = np.percentile(of(sampled), [2.5, 97.5])
    return Estimate(value, float(low), float(high))


def shift(base: LossGrid, target: LossGrid) -> tuple[Estimate, Estimate]:
    """Compare the optima of two scales, and return (shift, regret).

    The shift is the distance in octaves from the best value of ``base`` to that of ``target``. The regret is the loss
    in nats that the base's best value costs at ``target``, compared with the best value there.
    """

    def regret(grids: Sequence[LossGrid]) -> Array:
        best = grids[0].optimum()
        return np.maximum(difference(grids[1].loss_at(best), grids[1].lowest), 0.0)

    octaves = estimate(lambda grids: difference(grids[1].optimum(), grids[0].optimum()), [base, target])
    return octaves, estimate(regret, [base, target])


def exponent(grids: Mapping[float, LossGrid]) -> Estimate:
    """Return the exponent with which the best value grows over the size of the scale.

    ``grids`` maps the size of each scale (such as its width) to its losses. The exponent is the least-squares slope
    of log2 of the best value over log2 of the size.
    """
    ratios = np.log2(list(grids))
    ratios -= ratios.mean()

    def fitted(found: Sequence[LossGrid]) -> Array:
        return np.asarray(np.stack([grid.optimum() for grid in found], -1) @ ratios / (ratios @ ratios))

    return estimate(fitted, list(grids.values()))
