"""Find the best value of a swept hyperparameter, its confidence interval, and the cost of using another value.

Losses are in nats per token. Hyperparameter values are in octaves (log2). In array shapes, "..." is an
optional dimension of bootstrap samples.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri, stdtrit

from leaven.documents.checks import MeasuredRow
from leaven.verification.verdict import difference

Array = NDArray[np.float64]

POINTS = 3
"""Number of points around the lowest loss to which a parabola is fitted. Loss curves are steeper on one side: with
five points an octave apart, the vertex was half an octave off (docs/log.md)."""

DRAWS = 1000  # bootstrap samples


@dataclass(frozen=True)
class LossGrid:
    """The losses at the values of a hyperparameter. Values with a diverged run are only in ``diverged``."""

    octaves: Array  # (values,), log2 of the values
    runs: tuple[Mapping[Hashable, float], ...]  # for each value, the losses by seed
    means: Array  # (..., values), mean loss at each value; seed effects are removed if seeds differ by value
    diverged: Array  # log2 of the values at which a run diverged

    @classmethod
    def of(cls, losses: Mapping[float, Mapping[Hashable, float] | Sequence[float]]) -> "LossGrid":
        """Return the grid of ``losses[value][seed]``. The loss of a diverged run is NaN or infinite."""
        runs: dict[float, Mapping[Hashable, float]] = {
            value: of if isinstance(of, Mapping) else {seed: loss for seed, loss in enumerate(of)}
            for value, of in sorted(losses.items())
        }
        kept = {value: of for value, of in runs.items() if np.isfinite(list(of.values())).all()}
        found = tuple(kept.values())
        means = _Runs.of(found, paired=True).means if found else np.zeros(0)
        return cls(np.log2(list(kept)), found, means, np.log2([value for value in runs if value not in kept]))

    @property
    def has_optimum(self) -> bool:
        return len(self.octaves) >= POINTS

    @property
    def noise(self) -> float | None:
        """Standard deviation of the loss over seeds, near the best value. None if each value there has one run."""
        near = [list(self.runs[place].values()) for place in self._points(self.means.argmin(-1))]
        freedom = [len(losses) - 1 for losses in near]
        if not any(freedom):
            return None
        variances = [np.var(losses, ddof=1) if len(losses) > 1 else 0.0 for losses in near]
        return float(np.sqrt(np.average(variances, weights=freedom)))

    @property
    def edge(self) -> int:
        """Where the lowest mean loss is: -1 at the first value of the grid, 1 at the last value, 0 between them."""
        place = int(self.means.argmin())
        return -(place == 0) + (place == len(self.octaves) - 1)

    @property
    def following(self) -> float:
        """The next value to try, beyond the edge of the grid with the lowest loss. If values beyond this edge
        diverged, it is halfway, in octaves, between the edge and the nearest of them. Otherwise, it is one more step
        of the grid."""
        last, before = self.octaves[[0, 1] if self.edge < 0 else [-1, -2]].tolist()
        there = [octave for octave in self.diverged.tolist() if (octave - last) * self.edge > 0]
        nearest = min(there, key=lambda octave: abs(octave - last), default=None)
        return float(2 ** (2 * last - before if nearest is None else (last + nearest) / 2))

    @property
    def lowest(self) -> Array:
        return self.loss_at(self.optimum())

    def optimum(self) -> Array:
        """Return log2 of the best value: the vertex of a parabola around the lowest mean loss.

        It is clipped to the grid. If the parabola has no minimum, return the grid value with the lowest mean loss.
        """
        place = self.means.argmin(-1)
        a, b, _ = self._parabola(place)
        with np.errstate(divide="ignore", invalid="ignore"):
            vertex = -b / (2 * a)
        convex = np.where(a <= 0, self.octaves[place], vertex)
        return np.clip(convex, self.octaves[0], self.octaves[-1])

    def loss_at(self, octave: Array) -> Array:
        """Return the loss (...) at ``octave`` (...), from a parabola around the nearest grid value."""
        a, b, c = self._parabola(np.abs(self.octaves - np.expand_dims(octave, -1)).argmin(-1))
        return np.asarray(a * octave**2 + b * octave + c)

    def _points(self, place: NDArray[np.int64]) -> NDArray[np.int64]:
        first = np.clip(place - POINTS // 2, 0, max(len(self.octaves) - POINTS, 0))
        return np.asarray(np.expand_dims(first, -1) + np.arange(POINTS))

    def _parabola(self, place: NDArray[np.int64]) -> tuple[Array, Array, Array]:
        """Return (a, b, c) of a x^2 + b x + c through the mean losses around each index ``place``, x in octaves."""
        near = self._points(place)
        x0, x1, x2 = np.moveaxis(self.octaves[near], -1, 0)
        y0, y1, y2 = np.moveaxis(np.take_along_axis(self.means, near, -1), -1, 0)
        slope = (y1 - y0) / (x1 - x0)
        a = ((y2 - y1) / (x2 - x1) - slope) / (x2 - x0)
        b = slope - a * (x0 + x1)
        return a, b, y0 - (a * x0 + b) * x0


@dataclass(frozen=True)
class Estimate:
    """A number with its 95% interval over seeds. With only one seed, the ends of the interval are None."""

    value: float
    low: float | None
    high: float | None

    @property
    def ends(self) -> tuple[float, float]:
        """The ends of the interval. With one seed, both are the value itself."""
        return (self.value if self.low is None else self.low, self.value if self.high is None else self.high)

    def row(self, name: str, note: str, expected: float | None = None) -> MeasuredRow:
        return MeasuredRow(name=name, value=self.value, low=self.low, high=self.high, expected=expected, note=note)


@dataclass(frozen=True)
class _Runs:
    """A least-squares fit to the N runs of a grid: loss = effect of the value + effect of the seed + noise.

    Effects of seeds are fitted only if ``paired`` is set and the runs determine these effects. Otherwise they are 0.
    """

    value: NDArray[np.int64]  # (N,), index of the value of each run
    weights: Array  # (values, N); weights @ losses = means
    means: Array  # (values,), mean losses without the effects of seeds
    noise: Array  # (N,), residuals, scaled to the variance of the noise; NaN for a residual that is always 0
    degrees: int  # degrees of freedom of the noise

    @classmethod
    def of(cls, runs: Sequence[Mapping[Hashable, float]], *, paired: bool) -> "_Runs":
        value = np.repeat(np.arange(len(runs)), [len(of) for of in runs])
        losses = np.array([loss for of in runs for loss in of.values()])
        seeds = [seed for of in runs for seed in of]
        columns = (value[:, np.newaxis] == np.arange(len(runs))).astype(float)
        if paired and all(seeds.count(seed) > 1 for seed in seeds):
            of_seed = np.array([[seed == name for name in dict.fromkeys(seeds)] for seed in seeds], dtype=float)
            both = np.hstack([columns, of_seed[:, :-1] - of_seed[:, -1:]])  # the effects of seeds sum to 0
            if np.linalg.matrix_rank(both) == both.shape[1]:
                columns = both
        inverse = np.linalg.pinv(columns)
        fitted = inverse @ losses
        freedom = 1 - (columns * inverse.T).sum(1)  # variance of a residual / variance of the noise
        with np.errstate(divide="ignore", invalid="ignore"):
            noise = np.where(freedom > 1e-9, (losses - columns @ fitted) / np.sqrt(freedom), np.nan)
        return cls(value, inverse[: len(runs)], fitted[: len(runs)], noise, len(losses) - columns.shape[1])

    def pools(self) -> list[Array]:
        """Return the residuals to draw from for each compared value: its own, or all if it has fewer than two."""
        known = np.isfinite(self.noise)
        own = [self.noise[known & (self.value == value)] for value in range(len(self.weights))]
        return [pool if len(pool) > 1 else self.noise[known] for pool in own]


def estimate(
    of: Callable[[Sequence[LossGrid]], Array], grids: Sequence[LossGrid], *, paired: bool = False
) -> Estimate:
    """Return ``of(grids)`` with its 95% bootstrap interval over seeds.

    Each bootstrap sample changes the losses by residuals of a fit, drawn at random. The residuals are scaled up to
    the variance of the noise. They are also multiplied by the ratio of the 97.5% quantiles of Student's t and the
    normal distribution, because there are few runs. The ends of the interval are None if a grid has no residuals,
    for example with one run for each value.

    With ``paired``, the mean effect of a seed does not count as noise. This is valid if ``of`` depends only on
    differences of losses within each grid.
    """
    value = float(of(grids))
    fits = [_Runs.of(grid.runs, paired=paired) for grid in grids]
    pools = [pool for fit in fits for pool in fit.pools()]
    if not all(len(pool) for pool in pools):
        return Estimate(value, None, None)
    counts = [len(runs) for grid in grids for runs in grid.runs]
    highs = np.array([len(pool) for pool in pools])[:, np.newaxis]
    drawn = np.random.default_rng(0).integers(highs, size=(DRAWS, len(pools), max(counts)))
    noise = [pool[drawn[:, place, :count]] for place, (pool, count) in enumerate(zip(pools, counts, strict=True))]
    sampled, first = [], 0
    for grid, fit in zip(grids, fits, strict=True):
        following = first + len(grid.runs)
        deviations = np.concatenate(noise[first:following], axis=1) @ fit.weights.T
        deviations *= stdtrit(fit.degrees, 0.975) / ndtri(0.975)
        sampled.append(replace(grid, means=grid.means + deviations))
        first = following
    low, high = np.percentile(of(sampled), [2.5, 97.5])
    return Estimate(value, float(low), float(high))


def shift(base: LossGrid, target: LossGrid) -> tuple[Estimate, Estimate]:
    """Return the shift of the best value in octaves, and the regret in nats. sweep.py defines both."""

    def regret(grids: Sequence[LossGrid]) -> Array:
        return np.maximum(difference(grids[1].loss_at(grids[0].optimum()), grids[1].lowest), 0.0)

    octaves = estimate(lambda grids: difference(grids[1].optimum(), grids[0].optimum()), [base, target], paired=True)
    return octaves, estimate(regret, [base, target], paired=True)


def exponent(grids: Mapping[float, LossGrid]) -> Estimate:
    """Return the least-squares slope of log2 (best value) over log2 (size)."""
    ratios = np.log2(list(grids))
    ratios -= ratios.mean()

    def fitted(found: Sequence[LossGrid]) -> Array:
        return np.asarray(np.stack([grid.optimum() for grid in found], -1) @ ratios / (ratios @ ratios))

    return estimate(fitted, list(grids.values()), paired=True)
