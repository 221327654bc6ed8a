"""Mix the streams of several sources. Sample n of a mixture depends only on n, not on the samples read before."""

from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import lcm

import numpy as np
from numpy.typing import NDArray

from leaven.data.stream import Stream, numbered


@dataclass(frozen=True, eq=False)
class Mixture:
    """A mixture of several streams. Of the first n samples, each stream contributes its share of n, give or take at
    most one sample."""

    streams: tuple[Stream, ...]  # all with the same seq_len
    proportions: tuple[Fraction, ...]  # share of each stream; the shares add up to 1
    skip: tuple[tuple[int, int], ...] = ()  # ranges of sample numbers to leave out, as in Stream

    def batch(self, first: int, count: int) -> NDArray[np.int64]:
        """Return samples ``first`` to ``first + count - 1`` as in Stream.batch, [count, seq_len + 1] token ids."""
        sources, numbers = place(numbered(first, count, self.skip), self.proportions)
        rows = np.empty((count, self.streams[0].seq_len + 1), dtype=np.int64)
        for source, stream in enumerate(self.streams):
            rows[sources == source] = stream.samples(numbers[sources == source])
        return rows


def place(n: NDArray[np.int64], proportions: tuple[Fraction, ...]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """For each sample number in ``n``, return the index of the source that the sample comes from, and the number of
    the sample within that source."""
    order, ranks, quotas = _period(proportions)
    periods, places = np.divmod(n, len(order))
    return order[places], periods * quotas[order[places]] + ranks[places]


@lru_cache(maxsize=16)
def _period(
    proportions: tuple[Fraction, ...],
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return one period of the repeating pattern of sources.

    The three arrays are: the source of each sample in the period, the number of each sample within its source, and
    the number of samples from each source.

    The length of the period is the common denominator of the proportions, so each source has a whole number of
    samples in a period. The order follows Tijdeman 1980, "The chairman assignment problem". For each sample, the
    algorithm considers the sources that are at least 1/(2k - 2) samples behind their share, where k is the number of
    sources, and picks the one whose deadline comes first. Then the number of samples that a source has contributed
    to the first n always differs from its share of n by at most 1 - 1/(2k - 2).
    """
    size, k = lcm(*(share.denominator for share in proportions)), len(proportions)
    quotas = [int(share * size) for share in proportions]
    slack = max(2 * k - 2, 1)
    order = np.empty(size, dtype=np.int64)
    ranks = np.empty(size, dtype=np.int64)
    counts = [0] * k
    # A source with c of its q samples has the deadline (c + 1 - 1/slack) size / q. Fractions keep this exact.
    due = [Fraction(size * (slack - 1), slack * quota) for quota in quotas]
    for n in range(size):
        behind = (i for i in range(k) if slack * ((n + 1) * quotas[i] - size * counts[i]) >= size)
        source = min(behind, key=due.__getitem__)
        order[n], ranks[n] = source, counts[source]
        counts[source] += 1
        due[source] = Fraction(size * (slack * (counts[source] + 1) - 1), slack * quotas[source])
    return order, ranks, np.array(quotas)
