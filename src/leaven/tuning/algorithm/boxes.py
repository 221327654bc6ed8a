"""Points of methods that know no surrogate: the box that they sample, which grows, and those of a grid."""

import itertools
import math

import numpy as np

from leaven.recipe.errors import InputError
from leaven.tuning.algorithm.trust_region import Array, Axes

BEST, EDGE = 4, 1 / 4  # where so many of the best trials lie in this part of the box at one end, it is extended
LEAST = 3 * BEST  # trials, before which the best few say nothing
FURTHER = 1 / 2  # of its first width, by which an end moves


def box(points: Array, losses: Array, axes: Axes) -> tuple[Array, Array]:
    """The part of the space that a method samples after trials at ``points`` (n, D), in the order of their results.

    It begins ``near`` the start. An end moves out where the ``BEST`` trials all lie in the outer part of the box
    there: by chance one end in 256 has them. Returns the lowest and the highest octaves, (D,) each.
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
    """The points of the finest grid that so many trials can do, nearest to the start first.

    Raises:
        InputError: if two points along each dimension are too many already.
    """
    numbers = int((axes.levels == 0).sum())
    chosen = math.prod(int(levels) for levels in axes.levels if levels)
    if 2**numbers * chosen > trials:
        least = f"2^{numbers}" if chosen == 1 else f"{2**numbers * chosen}"
        raise InputError(
            f"a grid over {len(axes.start)} values has at least {least} points, and there are {trials} trials "
            "for it; search fewer values, or with another method"
        )
    fine = max(k for k in range(2, trials + 1) if k**numbers * chosen <= trials) if numbers else 2
    low, high = axes.box
    counts = [int(levels) or fine for levels in axes.levels]
    lines = [np.linspace(*ends) for ends in zip(low, high, counts, strict=True)]
    points = itertools.product(*lines)
    return [axes.values(np.array(x)) for x in sorted(points, key=lambda x: float(np.sum(np.square(x))))]
