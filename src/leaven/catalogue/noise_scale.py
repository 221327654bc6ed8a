"""Gradient noise scale and critical batch: how to measure them, and what a batch costs in steps and tokens.

After McCandlish et al. 2018, arXiv 1812.06162. A gradient over B tokens is the true gradient G plus noise: E|G_B|^2 =
|G|^2 + tr(Sigma) / B. Squared norms at two batch sizes give estimates of |G|^2 and tr(Sigma) (appendix A.1). The
noise scale tr(Sigma) / |G|^2 estimates the critical batch. A single estimate of |G|^2 or tr(Sigma) may be negative.
So average each of the two over many pairs of batches, and then divide.
"""

import math
from typing import Any


def squared_gradient(small: Any, small_squared: Any, big: Any, big_squared: Any) -> Any:
    """Return an unbiased estimate of |G|^2 from the squared gradient norms of a small and a big batch.

    ``small`` and ``big`` are batch sizes in tokens. All arguments may be numbers, arrays or tensors.
    """
    return (big * big_squared - small * small_squared) / (big - small)


def gradient_noise(small: Any, small_squared: Any, big: Any, big_squared: Any) -> Any:
    """Return an unbiased estimate of tr(Sigma) from the squared gradient norms of a small and a big batch.

    tr(Sigma): variance of a token's gradient, summed over all parameters. Arguments: see :func:`squared_gradient`.
    """
    return (small_squared - big_squared) / (1 / small - 1 / big)


def tokens_over_least(batch: float, critical: float) -> float:
    """Return (tokens to reach a loss at ``batch``) / (tokens at a tiny batch): McCandlish 2018, section 2.3."""
    return 1 + batch / critical


def steps_over_least(batch: float, critical: float) -> float:
    """Return (steps to reach a loss at ``batch``) / (steps at a huge batch): McCandlish 2018, section 2.3."""
    return 1 + critical / batch


def surge_lr(batch: float, noise: float) -> float:
    """Return (best lr of Adam at ``batch``) / (best lr at ``noise``, the noise scale). See arXiv 2405.14578."""
    ratio = math.sqrt(noise / batch)
    return 2 / (ratio + 1 / ratio)
