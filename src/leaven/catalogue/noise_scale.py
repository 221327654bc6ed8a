"""Gradient noise scale and critical batch: what a batch costs in steps and tokens, and how to measure it.

McCandlish et al. 2018, arXiv 1812.06162. A gradient over B tokens is G + noise with mean |noise|^2 = tr(Sigma) / B,
so E|G_B|^2 = |G|^2 + tr(Sigma) / B: two batch sizes give both unknowns (appendix A.1). B_simple = tr(Sigma) / |G|^2
is the batch at which noise and signal are equal. It is near the critical batch if the Hessian is near a multiple of
the identity; it is a local quantity and grows as the loss falls. A ratio of two unbiased estimates is biased, and
each estimate may be negative: average each of them first.
"""

import math
from collections.abc import Iterable
from statistics import fmean
from typing import Any


def squared_gradient(small: Any, small_squared: Any, big: Any, big_squared: Any) -> Any:
    """Return an unbiased estimate of |G|^2 from |G_small|^2 and |G_big|^2 of batches of ``small`` and ``big`` tokens.

    The inputs may be numbers, arrays or tensors.
    """
    return (big * big_squared - small * small_squared) / (big - small)


def gradient_noise(small: Any, small_squared: Any, big: Any, big_squared: Any) -> Any:
    """Return an unbiased estimate of tr(Sigma) of one token; arguments as :func:`squared_gradient`."""
    return (small_squared - big_squared) / (1 / small - 1 / big)


def noise_scale(small: float, big: float, squares: Iterable[tuple[float, float]]) -> float | None:
    """Return B_simple in tokens from pairs (|G_small|^2, |G_big|^2): the ratio of the averages of the two estimates.

    None if the estimate of |G|^2 is not above 0: there are too few pairs for the noise.
    """
    pairs = list(squares)
    signal = fmean(squared_gradient(small, each, big, whole) for each, whole in pairs)
    noise = fmean(gradient_noise(small, each, big, whole) for each, whole in pairs)
    return noise / signal if signal > 0 else None


def tokens_over_least(batch: float, critical: float) -> float:
    """Return E / E_min = 1 + B / B_crit: tokens that a batch needs for a loss, relative to the smallest batch.

    With :func:`steps_over_least`, (S / S_min - 1) (E / E_min - 1) = 1 (section 2.3); B_crit = E_min / S_min.
    """
    return 1 + batch / critical


def steps_over_least(batch: float, critical: float) -> float:
    """Return S / S_min = 1 + B_crit / B: steps that a batch needs for a loss, relative to the largest batch."""
    return 1 + critical / batch


def sgd_lr(batch: float, noise: float) -> float:
    """Return the best lr of SGD at a batch, relative to the largest batch: 1 / (1 + B_noise / B). Section 2.2."""
    return 1 / (1 + noise / batch)


def surge_lr(batch: float, noise: float) -> float:
    """Return the best lr of Adam at a batch, relative to its peak at B_noise: 2 / (sqrt(B_noise / B) + sqrt(B /
    B_noise)).

    Below B_noise lr ~ sqrt(B), above it lr falls. Li et al. 2024, arXiv 2405.14578.
    """
    ratio = math.sqrt(noise / batch)
    return 2 / (ratio + 1 / ratio)
