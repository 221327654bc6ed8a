"""Which source the n-th sample of a mixture is from, and which of that source's samples it is: functions of n."""

from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import lcm

import numpy as np
from numpy.typing import NDArray

from leaven.data.stream import Stream, numbered


@dataclass(frozen=True, eq=False)
class Mixture:
    """Streams of one ``seq_len``, interleaved: each has its proportion of any first n samples, to within one.

    ``skip`` are stretches of the mixture's samples that are passed over, as in :class:`Stream`.
    """

    streams: tuple[Stream, ...]
    proportions: tuple[Fraction, ...]
    skip: tuple[tuple[int, int], ...] = ()

    def sample(self, n: int) -> NDArray[np.int64]:
        """Sample n, ``seq_len + 1`` token ids: inputs are all but the last, targets all but the first."""
        row: NDArray[np.int64] = self.batch(n, 1)[0]
        return row

    def batch(self, first: int, count: int) -> NDArray[np.int64]:
        """Samples ``first`` to ``first + count - 1``, [count, seq_len + 1]."""
        sources, numbers = place(numbered(first, count, self.skip), self.proportions)
        rows = np.empty((count, self.streams[0].seq_len + 1), dtype=np.int64)
        for source, stream in enumerate(self.streams):
            rows[sources == source] = stream.samples(numbers[sources == source])
        return rows


def place(n: NDArray[np.int64], proportions: tuple[Fraction, ...]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The source of each sample n, and its number among that source's samples."""
    order, ranks, quotas = _period(proportions)
    periods, places = np.divmod(n, len(order))
    return order[places], periods * quotas[order[places]] + ranks[places]


@lru_cache(maxsize=16)
def _period(
    proportions: tuple[Fraction, ...],
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """The sources of the samples of one period, each sample's number among its source's, and samples by source.

    The period is the common denominator of the proportions, so every source has its whole number of samples in it.
    Within it they are in the order of Tijdeman 1980, "The chairman assignment problem", which keeps every source's
    count within 1 - 1/(2k - 2) of its proportion of any prefix, k sources: of those that are behind by at least
    1/(2k - 2), the next sample is of the one that would be the first to be too far behind.
    """
    size, k = lcm(*(share.denominator for share in proportions)), len(proportions)
    quotas = [int(share * size) for share in proportions]
    slack = max(2 * k - 2, 1)
    order = np.empty(size, dtype=np.int64)
    ranks = np.empty(size, dtype=np.int64)
    counts = [0] * k
    # In whole numbers: a source with c samples of its quota q is due at (c + 1 - 1/slack) size / q.
    due = [Fraction(size * (slack - 1), slack * quota) for quota in quotas]
    for n in range(size):
        behind = (i for i in range(k) if slack * ((n + 1) * quotas[i] - size * counts[i]) >= size)
        source = min(behind, key=due.__getitem__)
        order[n], ranks[n] = source, counts[source]
        counts[source] += 1
        due[source] = Fraction(size * (slack * (counts[source] + 1) - 1), slack * quotas[source])
    return order, ranks, np.array(quotas)
