"""The surrogate: a Bayesian quadratic regression of the loss on all finished trials.

A search that only asks whether a trial beat the best learns one bit from each trial. A regression learns as much from
a bad trial as from a good one. With x in steps from the start (octaves divided by the scale of each value),

    y = a + sum_i b_i x_i + sum_i h_i x_i^2 / 2 + noise,      b_i ~ N(0, (h t)^2),   h_i ~ N(h, h^2),

where h is the typical curvature. t is the typical distance of an optimum from the start: 1 step. The minimum stays at
the start along directions in which no trial has moved. h and the noise maximise the evidence (the likelihood with a,
b and h_i integrated out). This is a Gaussian process with a quadratic kernel and a mean function; Rasmussen and
Williams 2006, sections 2.7 and 5.4.1.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

_FAR = 1.0  # t, steps
_FLATTEST = 0.5  # share of h: the least curvature that a minimum is computed with


@dataclass(frozen=True)
class Quadratic:
    """The function sum_i b_i x_i + sum_i h_i x_i^2 / 2."""

    slope: Array  # b, (D,)
    bend: Array  # h, (D,)
    least: float  # the least curvature that a minimum is computed with

    @property
    def minimum(self) -> Array:
        """The point (D,) where the function is lowest."""
        return np.asarray(-self.slope / np.maximum(self.bend, self.least))

    @property
    def at_one(self) -> Array:
        """The function (D,) at each unit vector, where a single x_i is 1: the effect of a level of a choice."""
        return self.slope + self.bend / 2


@dataclass(frozen=True)
class Surrogate:
    """The posterior distribution of the quadratic given the finished trials, made by ``fit``."""

    points: Array  # (n, D), octaves
    curvature: float  # h, loss per octave squared
    noise: float  # of the loss: between seeds, and deviations from a quadratic
    _weights: Array  # (n,), the inverse covariance times the residuals, with the constant projected out
    _inverse: Array  # (n, n), the inverse covariance, with the constant projected out

    def value(self, x: Array) -> Array:
        """Return the posterior mean of the loss at points (m, D), up to the constant ``a``, (m,)."""
        slope, bend = self.mean.slope, self.mean.bend
        return np.asarray(x @ slope + x**2 @ bend / 2)

    def deviation(self, x: Array, base: Array) -> Array:
        """Return the posterior standard deviation (m,) of the change in loss from ``base`` (D,) to points (m, D)."""
        apart = np.hstack([x - base, (x**2 - base**2) / 2])
        prior = np.repeat([(self.curvature * _FAR) ** 2, self.curvature**2], len(base))
        shared = (apart * prior) @ np.hstack([self.points, self.points**2 / 2]).T  # (m, n)
        variance = apart**2 @ prior - np.sum(shared @ self._inverse * shared, 1)
        return np.asarray(np.sqrt(np.maximum(variance, 0.0)))

    def along(self, base: Array, x: Array) -> tuple[Array, Array]:
        """Return the mean and standard deviation of the change in loss when one column of ``base`` is replaced.

        Element (i, j) of both results (D, m) is for ``base`` (D,) with its column i set to ``x[i, j]``.
        """
        mean, (slopes, both, bends) = self.mean, self._covariance
        u, w = x - base[:, None], (x**2 - base[:, None] ** 2) / 2
        change = mean.slope[:, None] * u + mean.bend[:, None] * w
        variance = slopes[:, None] * u**2 + 2 * both[:, None] * u * w + bends[:, None] * w**2
        return change, np.sqrt(np.maximum(variance, 0.0))

    @cached_property
    def mean(self) -> Quadratic:
        """The posterior mean of the quadratic."""
        slope, bend = self._update(self._weights)
        return self._quadratic(slope, self.curvature + bend)

    def draw(self, rng: np.random.Generator) -> Quadratic:
        """Return a quadratic drawn from the posterior by Matheron's rule, for Thompson sampling."""
        n, d = self.points.shape
        slope = rng.normal(0.0, self.curvature * _FAR, d)
        bend = rng.normal(0.0, self.curvature, d)
        seen = self.points @ slope + self.points**2 @ bend / 2 + rng.normal(0.0, self.noise, n)
        more_slope, more_bend = self._update(self._weights - self._inverse @ seen)
        return self._quadratic(slope + more_slope, self.curvature + bend + more_bend)

    @cached_property
    def _covariance(self) -> tuple[Array, Array, Array]:
        """The posterior variance of b_i, the covariance of b_i and h_i, and the variance of h_i, (D,) each."""
        halves = self.points**2 / 2
        first, second = (self.curvature * _FAR) ** 2, self.curvature**2
        by_points, by_halves = self._inverse @ self.points, self._inverse @ halves
        slopes = first - first**2 * np.sum(self.points * by_points, 0)
        both = -first * second * np.sum(self.points * by_halves, 0)
        return slopes, both, second - second**2 * np.sum(halves * by_halves, 0)

    def _update(self, weights: Array) -> tuple[Array, Array]:
        """Return what the trials add to the prior means of b and of h."""
        slope = (self.curvature * _FAR) ** 2 * (self.points.T @ weights)
        return slope, self.curvature**2 / 2 * ((self.points**2).T @ weights)

    def _quadratic(self, slope: Array, bend: Array) -> Quadratic:
        return Quadratic(slope, bend, _FLATTEST * self.curvature)


def fit(points: Array, losses: Array, noise: float = 0.0) -> Surrogate:
    """Return the surrogate fitted to trials at ``points`` (n, D) with finite ``losses`` (n,).

    ``noise`` is the standard deviation of the loss between seeds; the fitted noise is at least as large.
    """
    n, d = points.shape
    squares = points**2
    spread = float(np.std(losses)) or noise or 1.0
    least = max(noise, 1e-3 * spread)
    noises = least * 2.0 ** np.arange(0, np.log2(max(spread / least, 1)) + 0.5, 0.5)
    # Steps of one octave change the loss by about h sqrt(D).
    curvatures = spread / np.sqrt(d) * 2.0 ** np.arange(-6, 6.1, 0.5)[:, None]
    centred, half = losses - losses.mean(), squares.sum(1) / 2 - squares.sum() / 2 / n
    # Without noise the prior covariance of trials is curvature^2 times the product of these features with themselves:
    # at most 2 D directions of it are more than noise, however many trials there are.
    features = np.hstack([_FAR * points, squares / 2])
    vectors, roots, _ = np.linalg.svd(features - features.mean(0), full_matrices=False)
    rest = centred - curvatures * half  # (curvatures, n): left for slopes and bends to explain
    along = rest @ vectors
    beyond = rest - along @ vectors.T
    scales = ((curvatures * roots) ** 2)[:, None] + noises[:, None] ** 2  # (curvatures, noises, at most 2 D)
    # The constant vector is projected out of everything: it adds log(noise^2) to the sum, and no more.
    evidence = (len(roots) - n + 1) * np.log(noises) - 0.5 * (beyond**2).sum(1)[:, None] / noises**2
    evidence = evidence - 0.5 * (np.log(scales) + along[:, None] ** 2 / scales).sum(2)
    i, k = np.unravel_index(np.argmax(evidence), evidence.shape)
    found = float(noises[k])
    weights = beyond[i] / found**2 + vectors @ (along[i] / scales[i, k])
    less = 1 / scales[i, k] - 1 / found**2  # difference from the precision of noise alone
    inverse = np.eye(n) / found**2 + (vectors * less) @ vectors.T - 1 / (n * found**2)
    return Surrogate(points, float(curvatures[i, 0]), found, weights, inverse)
