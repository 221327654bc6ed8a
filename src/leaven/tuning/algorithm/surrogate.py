"""Fit two models to the trials of a search: the surrogate predicts losses, the divergence model predicts
divergences.

The surrogate is a Bayesian quadratic regression of the loss. Diverged trials and outliers
(``trust_region.py``) are left out. The model is

    y = a + sum_i b_i x_i + sum_i h_ii x_i^2 / 2 + sum_{i<j} h_ij x_i x_j + error,

    b_i ~ N(0, h^2),   h_ii ~ N(h, h^2),   h_ij ~ N(0, (r h)^2),   error ~ N(0, noise^2 + (k (y - lowest))^2),

where y is the loss of a trial, h is the typical curvature, noise is the standard deviation of the loss
between seeds, and lowest is the lowest loss. A numeric value has one column x_i: its distance from the
start point in steps (a step is the typical distance of an optimum). A choice, such as the optimizer, has a
column of 0 or 1 for each level except the start's. This prior expects the optimum about one step from the
start point along each column. In directions in which no trial has moved, the minimum stays at the start
point. r is 8 / D^2 for D columns, but at most 1/2. With more than ``MOST_WITH_INTERACTIONS`` columns, the
h_ij are 0: a search has too few trials for so many pairs.

The loss is quadratic only near the optimum, so a loss far above the lowest one says little about the
optimum. Therefore the error grows with the difference from the lowest loss; k is ``MODEL_ERROR``. h
maximises the evidence (the likelihood with a, b and h_ij integrated out). The noise is not
fitted, because after few trials the most likely noise is often too large and would hide the optimum. It
is given, or measured on trials that repeat a point with another seed (``noise.py``). The model is a
Gaussian process with a quadratic kernel and a mean function (Rasmussen and Williams 2006, sections 2.1, 2.7
and 5.4.1). docs/log.md compares the constants with other settings.

Prior knowledge gives further priors of the coefficients, from two sources. The prior with the highest
evidence is used, so the search drops knowledge that its trials contradict. H is the matrix of h_ij.

- An *expectation* from laws and published runs says that the optimum of value i is m_i +- w_i steps from
  the start point. The slope at the optimum is 0, so b = -H m + e, with e_i ~ N(0, (w_i h)^2) and unknown
  H.
- For an *earlier search*, of another model size or other values, the prior is the posterior of that search's
  surrogate. The losses of two searches differ, so (d h)^2 is added to the variance of each coefficient.
  There is one prior for each d in ``DIFFERENCES``.

The divergence model is a logistic regression on all values together, because the highest possible learning
rate of a module depends on the other modules (Mlodozeniec et al. 2025, arXiv 2512.22382). Increases and
decreases of a value have separate coefficients:

    log odds of divergence = c + sum_i up_i max(x_i, 0)^2 + down_i max(-x_i, 0)^2,      up, down >= 0.

An exponential prior keeps a coefficient at 0 unless the coefficient helps to explain a divergence.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

FLATTEST = 0.5  # the least curvature along each value that is used to compute a minimum, as a share of h
MODEL_ERROR = 0.1  # k in the error of a trial
MOST_WITH_INTERACTIONS = 12
LOWER_HALF = 1.7  # standard deviation of normally distributed losses / that of their lower half
LEAST_NOISE = 1e-3  # the least noise that is assumed, as a share of the standard deviation of the losses
FITTED = 64  # the most trials to which a noise is fitted, because the time grows with the cube of their number
SWEEPS = 100  # the most sweeps of the coordinate descent
DIFFERENCES = 0.3, 0.8  # standard deviations between the coefficients of two searches, in units of h
QUIET = -4.0  # prior mean of c, the log odds of divergence at the start: about one run in fifty
_SPARSE = 0.3  # rate of the exponential prior of the divergence model
_STEPS = 60  # iterations of the fit of the divergence model


@dataclass(frozen=True)
class Quadratic:
    """A quadratic function of x (D,), sum_i slope_i x_i + sum_ij hessian_ij x_i x_j/2."""

    slope: Array  # (D,)
    hessian: Array  # (D, D)
    least: float  # :meth:`minimum` raises smaller diagonal entries of the hessian to this

    def __call__(self, x: Array) -> Array:
        """Return the values (m,) of the function at points (m, D)."""
        return np.asarray(x @ self.slope + np.sum(x @ self.hessian * x, 1) / 2)

    def minimum(self, start: Array, low: Array, high: Array) -> Array:
        """Return the point (D,) between ``low`` and ``high`` that coordinate descent from ``start`` finds."""
        x = np.clip(start, low, high)
        gradient = self.slope + self.hessian @ x
        bend = np.maximum(np.diag(self.hessian), self.least)
        for _ in range(SWEEPS):
            before = x.copy()
            for i in range(len(x)):
                moved = min(max(x[i] - gradient[i] / bend[i], low[i]), high[i])
                gradient += self.hessian[:, i] * (moved - x[i])
                x[i] = moved
            if np.abs(x - before).max(initial=0.0) < 1e-6:
                break
        return x

    def effects(self, x: Array) -> Array:
        """Return, for each column, the effect of raising it from 0 to 1 while the others stay at ``x``."""
        bend = np.diag(self.hessian)
        return np.asarray(self.slope + self.hessian @ x - bend * x + bend / 2)


@dataclass(frozen=True)
class Prior:
    """A normal prior of the surrogate's P coefficients (:func:`_features`), in units of the typical curvature h."""

    mean: Array  # (P,)
    root: Array  # the matrix R, (P, P): the covariance is R R^T

    @classmethod
    def plain(cls, d: int) -> "Prior":
        """Return the uninformed prior for ``d`` searched columns."""
        size = _size(d)
        return cls(np.where(np.arange(size) // d == 1, 1.0, 0.0), np.eye(size))  # 1 for the curvatures h_ii


@dataclass(frozen=True)
class Surrogate:
    """The posterior of a quadratic loss model, given the finished trials.

    Its P coefficients (:func:`_features`) have mean ``_mean`` and covariance h^2 R (1 - V diag(1 - s^2) V^T)
    R^T. h is ``curvature``, R is ``_root``, V is ``_directions`` and s is ``_left``.
    """

    curvature: float  # the typical curvature h, loss per step squared
    noise: float  # the assumed standard deviation of the loss between seeds
    informed: bool  # whether the prior that was used (the one with the highest evidence) has earlier knowledge
    _mean: Array  # (P,)
    _root: Array  # R, (P, P)
    _directions: Array  # V, (P, at most n): orthonormal combinations of features that the trials have measured
    _left: Array  # (at most n,): ratio of the posterior to the prior standard deviation along each direction
    _columns: int  # D

    def value(self, x: Array) -> Array:
        """Return the predicted losses at points ``x`` (m, D), minus the predicted loss at 0."""
        return np.asarray(_features(x) @ self._mean)

    def deviation(self, x: Array, base: Array) -> Array:
        """Return the standard deviation of the change in loss from ``base`` (D,) to each point of ``x`` (m, D)."""
        apart = (_features(x) - _features(base[None])) @ self._root
        known = (apart @ self._directions) ** 2 @ (1 - self._left**2)
        return np.asarray(self.curvature * np.sqrt(np.maximum(np.sum(apart**2, 1) - known, 0.0)))

    @property
    def mean(self) -> Quadratic:
        return self._quadratic(self._mean)

    def draw(self, rng: np.random.Generator) -> Quadratic:
        """Return a quadratic drawn from the posterior, for Thompson sampling."""
        drawn = rng.normal(0.0, self.curvature, len(self._mean))
        known = self._directions @ ((1 - self._left) * (self._directions.T @ drawn))
        return self._quadratic(self._mean + self._root @ (drawn - known))

    def as_prior(self) -> Prior:
        """Return this posterior as a prior for another search."""
        known = np.eye(len(self._mean)) - (self._directions * (1 - self._left)) @ self._directions.T
        return Prior(self._mean / self.curvature, self._root @ known)

    def _quadratic(self, coefficients: Array) -> Quadratic:
        d = self._columns
        hessian = np.diag(coefficients[d : 2 * d])
        if len(coefficients) > 2 * d:
            i, j = np.triu_indices(d, 1)
            hessian[i, j] = hessian[j, i] = interaction(d) * coefficients[2 * d :]
        return Quadratic(coefficients[:d], hessian, FLATTEST * self.curvature)


def _size(d: int) -> int:
    """Return P, the number of coefficients for ``d`` columns."""
    return 2 * d + (d * (d - 1) // 2 if d <= MOST_WITH_INTERACTIONS else 0)


def interaction(d: int) -> float:
    """Return the prior standard deviation of the h_ij of ``d`` columns, relative to the typical curvature h."""
    return min(0.5, 8 / d**2)


def _features(x: Array) -> Array:
    """Return the terms of the surrogate's quadratic at points ``x`` (m, D), as (m, P), scaled so that each
    coefficient has the prior standard deviation h."""
    terms, d = [x, x**2 / 2], x.shape[1]
    if d <= MOST_WITH_INTERACTIONS:
        i, j = np.triu_indices(d, 1)
        terms.append(interaction(d) * x[:, i] * x[:, j])
    return np.hstack(terms)


def fit_surrogate(points: Array, losses: Array, noise: float = 0.0, knowledge: Sequence[Prior] = ()) -> Surrogate:
    """Return the surrogate fitted to trials at ``points`` (n, D) with finite ``losses`` (n,), with the prior of the
    highest evidence: the plain one or one of ``knowledge``. ``noise``: standard deviation of a loss; 0 if unknown."""
    d = points.shape[1]
    spread = float(np.std(losses)) or noise or 1.0
    noise = max(noise, LEAST_NOISE * spread)
    # Each row is divided by the standard deviation of its error, so that all errors have the same size.
    weights = 1 / np.hypot(noise, MODEL_ERROR * (losses - losses.min()))
    constant = weights / np.linalg.norm(weights)

    def whitened(values: Array) -> Array:
        """Return ``values`` with scaled rows, and with the constant term of the model projected out."""
        scaled = (values.T * weights).T
        return np.asarray(scaled - np.multiply.outer(constant, constant @ scaled))

    features = whitened(_features(points))
    # Steps of one octave change the loss by about h sqrt(D).
    curvatures = spread / np.sqrt(d) * 2.0 ** np.arange(-6, 6.1, 0.5)
    found: list[tuple[float, Surrogate]] = []
    for prior in (*knowledge, Prior.plain(d)):
        vectors, roots, directions = np.linalg.svd(features @ prior.root, full_matrices=False)
        # (curvatures, n): the losses minus the prediction of the prior mean
        rest = whitened(losses) - curvatures[:, None] * (features @ prior.mean)
        along = rest @ vectors
        beyond = rest - along @ vectors.T
        scales = (curvatures[:, None] * roots) ** 2 + 1
        evidence = -0.5 * ((beyond**2).sum(1) + (np.log(scales) + along**2 / scales).sum(1))
        i = int(np.argmax(evidence))
        h, left = float(curvatures[i]), 1 / np.sqrt(scales[i])
        mean = h * prior.mean + h**2 * prior.root @ directions.T @ (roots * along[i] / scales[i])
        informed = len(found) < len(knowledge)
        surrogate = Surrogate(h, noise, informed, mean, prior.root, directions.T, left, d)
        found.append((float(evidence[i]), surrogate))
    return max(found, key=lambda pair: pair[0])[1]  # of equal ones the first, which has knowledge


def fitted_noise(points: Array, losses: Array) -> float:
    """Return the most likely standard deviation of the noise in ``losses`` (n,) at ``points`` (n, D). It is at most
    `LOWER_HALF` times the standard deviation of the lower half of the losses. The fit takes about 100 n^3 operations.
    """
    n, d = points.shape
    spread = float(np.std(losses))
    if spread == 0:
        return 0.0
    features = _features(points)
    gram, half, ones = features @ features.T, np.sum(points**2, 1) / 2, np.ones(n)
    best, found = -np.inf, spread
    for noise in spread * 2.0 ** np.arange(-10, 0.1):
        errors = np.hypot(noise, MODEL_ERROR * (losses - losses.min()))
        for h in (0.0, *(spread / np.sqrt(d) * 2.0 ** np.arange(-6, 6.1))):
            covariance = h**2 * gram + np.diag(errors**2)
            rest = np.stack([losses - h * half, ones])
            sums = rest @ np.linalg.solve(covariance, rest.T)  # the constant a has a flat prior
            misfit = sums[0, 0] - sums[0, 1] ** 2 / sums[1, 1]
            evidence = -0.5 * (np.linalg.slogdet(covariance)[1] + np.log(sums[1, 1]) + misfit)
            if evidence > best:
                best, found = float(evidence), float(noise)
    return min(found, LOWER_HALF * float(np.std(np.sort(losses)[: (n + 1) // 2])))


@dataclass(frozen=True, eq=False)
class EarlierTrials:
    """The finished trials of an earlier search. Their points are distances from the start of the new search."""

    # (n, D + E): first the D values of the new search, in octaves; then E values that only the earlier search has, in
    # steps
    points: Array
    losses: Array  # (n,), finite
    noise: float | None  # standard deviation of the loss between seeds; None if unknown


def prior_of_expectations(centre: Array, width: Array) -> Prior:
    """Return the prior that expects the optimum ``centre`` +- ``width`` steps from the start point, both (D,)."""
    plain, d = Prior.plain(len(centre)), len(centre)
    mean, root = plain.mean.copy(), plain.root.copy()
    mean[:d] = -centre
    root[np.arange(d), np.arange(d)] = width
    root[np.arange(d), d + np.arange(d)] = -centre
    if len(mean) > 2 * d:
        i, j = np.triu_indices(d, 1)
        pair = 2 * d + np.arange(len(i))
        root[i, pair], root[j, pair] = -interaction(d) * centre[j], -interaction(d) * centre[i]
    return Prior(mean, root)


def priors_of_earlier(columns: Array, losses: Array, noise: float | None, d: int) -> list[Prior]:
    """Return priors from an earlier search, one for each of ``DIFFERENCES``. The new search has the first ``d`` of
    its ``columns`` (n, D + E). ``noise``, the standard deviation of its ``losses`` (n,), is fitted if None."""
    if noise is None:  # a noise of 0 would make the priors far too narrow
        lowest = np.argsort(losses)[:FITTED]
        noise = fitted_noise(columns[lowest], losses[lowest])
    posterior = fit_surrogate(columns, losses, noise).as_prior()
    e = columns.shape[1]
    indices = [np.arange(d), e + np.arange(d)]  # slopes, curvatures and interactions of the first d columns
    if e <= MOST_WITH_INTERACTIONS:
        indices.append(2 * e + np.flatnonzero(np.triu_indices(e, 1)[1] < d))
    kept = np.concatenate(indices)
    plain = Prior.plain(d)
    mean, covariance = plain.mean.copy(), plain.root.copy()
    ratio = np.ones(len(kept))
    if len(kept) > 2 * d:
        ratio[2 * d :] = interaction(e) / interaction(d)
    rows = posterior.root[kept] * ratio[:, None]
    mean[: len(kept)] = posterior.mean[kept] * ratio
    covariance[: len(kept), : len(kept)] = rows @ rows.T
    size = np.eye(len(mean))
    return [Prior(mean, np.asarray(np.linalg.cholesky(covariance + each**2 * size))) for each in DIFFERENCES]


@dataclass(frozen=True)
class DivergenceModel:
    """The probability that a trial diverges, as a function of its point."""

    level: float  # c, the log odds of divergence at the start
    slopes: Array  # (2 D,), log odds per squared distance: first of increases (up), then of decreases (down)

    def risk(self, x: Array) -> Array:
        """Return the probability that a trial at points (..., D) diverges."""
        return np.asarray(1 / (1 + np.exp(-self.level - _squares(x) @ self.slopes)))

    def shorten(self, x: Array, safe: Array, most: float) -> Array:
        """Return ``x`` (D,) with its risky values moved towards ``safe`` (D,), at most 95% of the way, until the risk
        is at most ``most``."""
        d = len(x)
        parts = (_squares(x) - _squares(safe)) * self.slopes
        to_blame = parts[:d] + parts[d:] > 0
        for share in 0.85 ** np.arange(20):
            shortened = np.where(to_blame, safe + share * (x - safe), x)
            if self.risk(shortened) <= most:
                break
        return shortened


def fit_divergence(points: Array, diverged: NDArray[np.bool_]) -> DivergenceModel:
    """Fit the divergence model to trials at ``points`` (n, D). ``diverged`` (n,) marks diverged trials."""
    features = _squares(points)
    slopes = np.zeros(features.shape[1])
    used = (features[diverged] > 0).any(0)
    if not diverged.any():
        return DivergenceModel(QUIET, slopes)
    some = features[:, used]
    # Proximal gradient with Nesterov's momentum (Beck and Teboulle 2009); the rate is one over the largest curvature.
    rate = 1 / (1 + 0.25 * (np.linalg.norm(some, 2) ** 2 + len(points)))
    slope, level, momentum = np.zeros(some.shape[1]), QUIET, 1.0
    ahead, ahead_level = slope, level
    for _ in range(_STEPS):
        error = 1 / (1 + np.exp(-ahead_level - some @ ahead)) - diverged
        slope_was, level_was, momentum_was = slope, level, momentum
        slope = np.maximum(ahead - rate * (some.T @ error + _SPARSE), 0.0)
        level = ahead_level - rate * (error.sum() + 0.5 * (ahead_level - QUIET))
        momentum = (1 + np.sqrt(1 + 4 * momentum**2)) / 2
        push = (momentum_was - 1) / momentum
        ahead, ahead_level = slope + push * (slope - slope_was), level + push * (level - level_was)
    slopes[used] = slope
    return DivergenceModel(float(level), slopes)


def _squares(x: Array) -> Array:
    return np.concatenate([np.maximum(x, 0.0), np.maximum(-x, 0.0)], axis=-1) ** 2
