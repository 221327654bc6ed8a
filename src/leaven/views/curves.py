"""From thousands of steps to a line on a screen: a smooth one that does not lag, and few enough points."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def smooth(x: Sequence[float], y: Sequence[float], share: float = 0.06) -> Array:
    """A straight line fitted round every point, over ``share`` of the points before it on both sides.

    The window grows with the distance from the start because a loss is drawn over the logarithm of tokens. A local
    line, unlike a moving mean, is not late where the curve falls nor wrong at its end.
    """
    u, v = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
    n = len(u)
    if n < 3:
        return v
    u, shift = u - u.mean(), v.mean()
    v = v - shift
    index = np.arange(n)
    half = np.maximum(2, (index * share).astype(int))
    low, high = np.maximum(index - half, 0), np.minimum(index + half + 1, n)

    def window(values: Array) -> Array:
        total: Array = np.concatenate(([0.0], np.cumsum(values)))
        means: Array = (total[high] - total[low]) / (high - low)
        return means

    mean_u, mean_v = window(u), window(v)
    spread = window(u * u) - mean_u**2
    slope = np.divide(window(u * v) - mean_u * mean_v, spread, out=np.zeros(n), where=spread > 1e-12)
    line: Array = mean_v + slope * (u - mean_u) + shift
    return line


def thin(x: Sequence[float], most: int, logarithmic: bool = True) -> list[int]:
    """Indices of at most ``most`` points, evenly spaced along the axis, the last one always."""
    if len(x) <= most:
        return list(range(len(x)))
    places = np.log(np.maximum(x, 1)) if logarithmic else np.asarray(x, dtype=float)
    wanted = np.linspace(places[0], places[-1], most)
    return [int(i) for i in np.unique(np.minimum(np.searchsorted(places, wanted), len(x) - 1))]


def corners(values: Sequence[float | None]) -> list[int]:
    """Indices where a step function begins or ends a level: all that a line through its points needs."""
    last = len(values) - 1
    return [i for i, v in enumerate(values) if i in {0, last} or v != values[i - 1] or v != values[i + 1]]
