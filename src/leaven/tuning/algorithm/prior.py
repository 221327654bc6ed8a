"""Converts knowledge from before a search to priors of the surrogate's coefficients (``surrogate.Prior``).

The surrogate (``surrogate.py``) is a quadratic regression of the loss. b is its slope at the start of the search, H
the matrix of its curvatures, and h the typical curvature. A step is the typical distance of an optimum from the
start.

- An *expectation* from laws and published runs says that the optimum of value i is m_i +- w_i steps from the start.
  The slope at the optimum is 0, so b = -H m + e, with e_i ~ N(0, (w_i h)^2) and unknown H.
- An *earlier search*, of another model size or other values, gives the posterior of its own surrogate. The losses of
  two searches differ, so (d h)^2 is added to the variance of each coefficient. Each d in ``DIFFERENCES`` gives a
  prior. The surrogate then uses the prior with the highest evidence.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from leaven.tuning.algorithm.surrogate import (
    FITTED,
    MOST_WITH_INTERACTIONS,
    Array,
    Prior,
    fit,
    fitted_noise,
    interaction,
)

DIFFERENCES = 0.3, 0.8  # standard deviations between the coefficients of two searches, in units of h


@dataclass(frozen=True, eq=False)
class EarlierTrials:
    """The finished trials of an earlier search.

    A column of ``points`` has the distances of one value from the recipe of the new search. The first D columns are
    the values of the new search, in octaves. The last E columns are the values that only the earlier search varied,
    in steps (octaves divided by the typical distance of an optimum from the start).
    """

    points: Array  # (n, D + E)
    losses: Array  # (n,), finite
    noise: float | None  # standard deviation of the loss between seeds; None if unknown


def of_expectations(centre: Array, width: Array) -> Prior:
    """Return the prior under which the optimum is at ``centre`` (D,) +- ``width`` (D,), in steps from the start."""
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


def of_earlier(columns: Array, losses: Array, noise: float | None, d: int) -> list[Prior]:
    """Return the priors that follow from the trials of an earlier search, one prior for each of ``DIFFERENCES``.

    The trials are at ``columns`` (n, D + E), with ``losses`` (n,). The new search has only the first ``d`` = D
    columns. If ``noise`` is None, it is fitted to the lowest losses. With a noise of 0, the priors would be far too
    narrow.
    """
    if noise is None:
        lowest = np.argsort(losses)[:FITTED]
        noise = fitted_noise(columns[lowest], losses[lowest])
    posterior = fit(columns, losses, noise).as_prior()
    kept = _kept(columns.shape[1], d)
    plain = Prior.plain(d)
    mean, covariance = plain.mean.copy(), plain.root.copy()
    ratio = np.ones(len(kept))
    if len(kept) > 2 * d:
        ratio[2 * d :] = interaction(columns.shape[1]) / interaction(d)
    rows = posterior.root[kept] * ratio[:, None]
    mean[: len(kept)] = posterior.mean[kept] * ratio
    covariance[: len(kept), : len(kept)] = rows @ rows.T
    size = np.eye(len(mean))
    return [Prior(mean, np.asarray(np.linalg.cholesky(covariance + each**2 * size))) for each in DIFFERENCES]


def _kept(columns: int, d: int) -> NDArray[np.int_]:
    """Return the indices of the coefficients (slopes, curvatures, interactions) that concern only the first ``d`` of
    the ``columns`` columns."""
    kept = [np.arange(d), columns + np.arange(d)]
    if columns <= MOST_WITH_INTERACTIONS:
        _, j = np.triu_indices(columns, 1)
        kept.append(2 * columns + np.flatnonzero(j < d))
    return np.concatenate(kept)
