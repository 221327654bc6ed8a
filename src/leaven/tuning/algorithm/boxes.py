"""Points for methods without a surrogate: the box that random methods sample, and the points of a grid."""

import itertools
import math

import numpy as np

from leaven.recipe.errors import InputError
from leaven.tuning.algorithm.trust_region import Array, Axes

BEST, EDGE = 4, 1 / 4  # an end is extended when the best 4 trials all lie in the outer quarter of the box there
LEAST = 3 * BEST  # trials before the first extension
FURTHER = 1 / 2  # of the initial width: how far an end moves


def box(points: Array, losses: Array, axes: Axes) -> tuple[Array, Array]:
    """Return the lower and upper ends (D,) of the box to sample, in octaves, after trials at ``points`` (n, D).

    It begins as ``axes.box``. An end moves outwards when the best ``BEST`` trials all lie in the outer quarter there,
    which happens by chance at one end in 256. Points and losses are in the order of their results.
    """
    (low, high), (lowest, highest) = axes.box, axes.ends
    further = FURTHER * (high - low)
    if (low <= lowest).all() and (high >= highest).all():
        return low, high
    for n in range(LEAST, len(points) + 1):
        order = np.argsort(losses[:n], kind="stable")[:BEST]
        if not math.isfinite(losses[order[-1]]):
            continue
        best, edge = points[order], EDGE * (high - low)
        lower, higher = (best <= low + edge).all(0), (best >= high - edge).all(0)
        low = np.where(lower, np.maximum(low - further, lowest), low)
        high = np.where(higher, np.minimum(high + further, highest), high)
    return low, high


def grid(axes: Axes, trials: int) -> list[dict[str, float]]:
    """Return the points of the finest grid that has at most ``trials`` points, nearest to the start first.

    Raises:
        InputError: if even two points along each dimension are more than ``trials``.
    """
    numbers = int((axes.levels == 0).sum())
    chosen = math.prod(int(levels) for levels in axes.levels if levels)
    if 2**numbers * chosen > trials:
        least = f"2^{numbers}" if chosen == 1 else f"{2**numbers * chosen}"
        raise InputError(
            f"a grid over {len(axes.start)} values has at least {least} points, and the budget is {trials} trials; "
            "search fewer values, give more trials, or use another method"
        )
    fine = max(k for k in range(2, trials + 1) if k**numbers * chosen <= trials) if numbers else 2
    low, high = axes.box
    counts = [int(levels) or fine for levels in axes.levels]
    lines = [np.linspace(*ends) for ends in zip(low, high, counts, strict=True)]
    points = itertools.product(*lines)
    return [axes.values(np.array(x)) for x in sorted(points, key=lambda x: float(np.sum(np.square(x))))]
