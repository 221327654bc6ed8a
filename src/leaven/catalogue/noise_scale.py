"""Gradient noise scale and critical batch: how to measure them, and what a batch costs in steps and tokens.

After McCandlish et al. 2018, arXiv 1812.06162. A gradient over B tokens is the true gradient G plus noise with a mean
square of tr(Sigma) / B, so E|G_B|^2 = |G|^2 + tr(Sigma) / B. Measurements at two batch sizes give both unknowns
(appendix A.1). B_simple = tr(Sigma) / |G|^2 is the batch at which noise and signal are equal. It is close to the
critical batch if the Hessian is close to a multiple of the identity. It describes only the current weights and grows
as the loss falls. The ratio of two unbiased estimates is biased, and a single estimate may be negative: average both
estimates over many pairs, then divide.
"""

import math
from typing import Any


def squared_gradient(small: Any, small_squared: Any, big: Any, big_squared: Any) -> Any:
    """Return an unbiased estimate of |G|^2 from the squared gradient norms of a small and a big batch.

    ``small`` and ``big`` are the two batches in tokens. All arguments may be numbers, arrays or tensors.
    """
    return (big * big_squared - small * small_squared) / (big - small)


def gradient_noise(small: Any, small_squared: Any, big: Any, big_squared: Any) -> Any:
    """Return an unbiased estimate of tr(Sigma), the gradient noise of one token.

    The arguments are those of :func:`squared_gradient`.
    """
    return (small_squared - big_squared) / (1 / small - 1 / big)


def tokens_over_least(batch: float, critical: float) -> float:
    """Return the tokens needed to reach a loss at batch B, relative to the smallest batch.

    They are E / E_min = 1 + B / B_crit. Together with :func:`steps_over_least`: (S / S_min - 1) (E / E_min - 1) = 1
    (section 2.3), and B_crit = E_min / S_min.
    """
    return 1 + batch / critical


def steps_over_least(batch: float, critical: float) -> float:
    """Return the steps needed to reach a loss at batch B, relative to the largest batch.

    They are S / S_min = 1 + B_crit / B.
    """
    return 1 + critical / batch


def surge_lr(batch: float, noise: float) -> float:
    """Return the best lr of Adam at batch B, relative to the best lr at B_noise.

    It is 2 / (sqrt(B_noise / B) + sqrt(B / B_noise)). Below B_noise the lr grows about as sqrt(B), above B_noise it
    falls (Li et al. 2024, arXiv 2405.14578).
    """
    ratio = math.sqrt(noise / batch)
    return 2 / (ratio + 1 / ratio)
