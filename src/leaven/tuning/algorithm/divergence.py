"""The divergence model: a logistic regression that predicts where runs diverge.

The threshold above which a run diverges differs by orders of magnitude between modules, and depends on the other
modules (Mlodozeniec et al. 2025, arXiv 2512.22382). So a box around the start cannot describe where runs diverge.
With x_i the distance of the i-th value from the start, increases and decreases have separate coefficients:

    log odds of divergence = c + sum_i up_i max(x_i, 0)^2 + down_i max(-x_i, 0)^2,      up, down >= 0,

An exponential prior keeps a coefficient at 0 unless it helps to explain a divergence. So the model attributes
divergence to the changes that diverged trials have and finished trials do not.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

QUIET = -4.0  # prior mean of c: at the start one run in fifty diverges
_SPARSE = 0.3  # rate of the exponential prior
_STEPS = 60  # of the fit


@dataclass(frozen=True)
class DivergenceModel:
    """A fitted divergence model, made by ``fit``."""

    level: float  # c, the log odds of divergence at the start
    slopes: Array  # (2 D,), log odds per squared distance: first of increases (up), then of decreases (down)

    def risk(self, x: Array) -> Array:
        """Return the probability that a run at points (..., D) diverges."""
        return np.asarray(1 / (1 + np.exp(-self.level - _features(x) @ self.slopes)))

    def shorten(self, x: Array, safe: Array, most: float) -> Array:
        """Return ``x`` (D,) with lower risk: the values that raise the probability of divergence are moved towards
        ``safe`` (D,) until that probability is at most ``most``."""
        d = len(x)
        parts = (_features(x) - _features(safe)) * self.slopes
        to_blame = parts[:d] + parts[d:] > 0
        for share in 0.85 ** np.arange(20):
            shortened = np.where(to_blame, safe + share * (x - safe), x)
            if self.risk(shortened) <= most:
                break
        return shortened


def fit(points: Array, diverged: NDArray[np.bool_]) -> DivergenceModel:
    """Return the divergence model fitted to trials at ``points`` (n, D), by maximum a posteriori. ``diverged`` (n,)
    marks the trials that diverged."""
    features = _features(points)
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


def _features(x: Array) -> Array:
    return np.concatenate([np.maximum(x, 0.0), np.maximum(-x, 0.0)], axis=-1) ** 2
