"""Endless streams of training samples, and mixtures of the streams of several sources.

Sample n depends only on the sources, their proportions, the window length, the seed and n. So a stream has no state
to save: ranks and resumed runs read samples by their numbers. Shapes: N samples, T = seq_len.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import isqrt, lcm
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from leaven.errors import InputError

_ROUNDS = 8
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class Tokens(Protocol):
    """The token ids of documents, one document after the other. A numpy array satisfies this protocol."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: slice, /) -> NDArray[Any]: ...


@dataclass(frozen=True, eq=False)
class Stream:
    """An endless stream of windows of ``seq_len + 1`` tokens, in a new random order in each epoch.
    Windows begin ``seq_len`` tokens apart, so the last token of a window is the first token of the next window.
    Raise InputError if the tokens do not fill one window."""

    tokens: Tokens
    seq_len: int
    seed: int
    skip: tuple[tuple[int, int], ...] = ()  # ranges [start, end) of sample numbers to leave out, disjoint and sorted

    def __post_init__(self) -> None:
        _ = self.samples_per_epoch

    @property
    def samples_per_epoch(self) -> int:
        return _count_windows(self.tokens, self.seq_len, "training")

    def batch(self, first: int, count: int) -> NDArray[np.int64]:
        """Return samples ``first`` to ``first + count - 1`` of those not in ``skip``, [count, seq_len + 1]."""
        return self.samples(numbered(first, count, self.skip))

    def samples(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the samples with these ``numbers``, [N, seq_len + 1]. The field ``skip`` has no effect."""
        epochs, places = np.divmod(numbers.astype(np.uint64), np.uint64(self.samples_per_epoch))
        return _gather(self.tokens, self.seq_len, permute(places, self.samples_per_epoch, self.seed, epochs))


@dataclass(frozen=True, eq=False)
class Mixture:
    """A mixture of streams. For any n, the first n samples contain n x (share of the stream) samples of each stream,
    with an error below 1. The samples that ``skip`` leaves out count among the n."""

    streams: tuple[Stream, ...]  # all with the same seq_len
    proportions: tuple[Fraction, ...]  # share of each stream; the shares add up to 1
    skip: tuple[tuple[int, int], ...] = ()  # ranges of the mixture's sample numbers to leave out, as in `Stream`

    def batch(self, first: int, count: int) -> NDArray[np.int64]:
        """Return samples ``first`` to ``first + count - 1`` of those not in ``skip``, [count, seq_len + 1]."""
        sources, numbers = place(numbered(first, count, self.skip), self.proportions)
        rows = np.empty((count, self.streams[0].seq_len + 1), dtype=np.int64)
        for source, stream in enumerate(self.streams):
            rows[sources == source] = stream.samples(numbers[sources == source])
        return rows


def place(n: NDArray[np.int64], proportions: tuple[Fraction, ...]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """For each sample number in ``n``, return the index of its source and the sample's number in this source."""
    order, ranks, quotas = _period(proportions)
    periods, places = np.divmod(n, len(order))
    return order[places], periods * quotas[order[places]] + ranks[places]


@lru_cache(maxsize=16)
def _period(proportions: tuple[Fraction, ...]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return the source of each sample in a period, its index in this source, and the samples per source.

    The order of the sources repeats after each period. The number of samples from a source is always within 1 - e
    of its share, where e = 1/(2k - 2) for k sources (Tijdeman 1980, "The chairman assignment problem"). Each sample
    comes from a source that would fall at least e samples behind its share without this sample. If there are several
    such sources, it comes from the source that would be the first to fall 1 - e samples behind.
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


def numbered(first: int, count: int, skip: Sequence[tuple[int, int]]) -> NDArray[np.int64]:
    """Return ``count`` entries, from index ``first``, of the list 0, 1, 2, ... without the half-open ranges ``skip``.
    For example, ``numbered(1, 2, skip=[(1, 5)])`` is [5, 6]."""
    numbers = np.arange(first, first + count)
    for start, end in skip:
        numbers[numbers >= start] += end - start
    return numbers


def validation_windows(tokens: Tokens, seq_len: int, limit_tokens: int) -> NDArray[np.int64]:
    """Return N evenly spaced windows, [N, T + 1], where T is ``seq_len``. N is at most ``limit_tokens`` / T,
    but at least 1. Raise InputError if the tokens do not fill one window."""
    available = _count_windows(tokens, seq_len, "validation")
    count = min(available, max(limit_tokens // seq_len, 1))
    return _gather(tokens, seq_len, np.arange(count, dtype=np.uint64) * np.uint64(available) // np.uint64(count))


def permute(places: NDArray[np.uint64], size: int, seed: int, epochs: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the shuffled position of each ``places[i]`` in epoch ``epochs[i]``. Positions are below ``size``.
    An epoch's permutation is a Feistel network on Z_a x Z_b, with a x b >= ``size``. Positions outside the range pass
    through the network again (Black and Rogaway 2002, "Ciphers with arbitrary finite domains")."""
    a = isqrt(size - 1) + 1
    b = -(-size // a)
    key = _mix(np.array([seed & 0xFFFFFFFFFFFFFFFF], dtype=np.uint64) + _GOLDEN)
    keys = _mix(key ^ _mix(epochs + _GOLDEN))
    result = _feistel(places, keys, np.uint64(a), np.uint64(b))
    while (outside := np.flatnonzero(result >= size)).size:
        result[outside] = _feistel(result[outside], keys[outside], np.uint64(a), np.uint64(b))
    return result


def _feistel(places: NDArray[np.uint64], keys: NDArray[np.uint64], a: np.uint64, b: np.uint64) -> NDArray[np.uint64]:
    right, left = np.divmod(places, a)
    for number in range(_ROUNDS):
        keys = keys + _GOLDEN
        if number % 2:
            right = (right + _mix(_mix(left ^ keys) + keys) % b) % b
        else:
            left = (left + _mix(_mix(right ^ keys) + keys) % a) % a
    return left + a * right


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the output of SplitMix64 for each state (Steele, Lea and Flood 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _gather(tokens: Tokens, seq_len: int, windows: NDArray[np.uint64]) -> NDArray[np.int64]:
    rows_NT = np.empty((len(windows), seq_len + 1), dtype=np.int64)
    for row, window in zip(rows_NT, windows.tolist(), strict=True):
        row[:] = tokens[window * seq_len : (window + 1) * seq_len + 1]
    return rows_NT


def _count_windows(tokens: Tokens, seq_len: int, split: str) -> int:
    count = (len(tokens) - 1) // seq_len
    if count < 1:
        raise InputError(
            f"the {split} split has {len(tokens):,} tokens, but a window needs seq_len + 1 = {seq_len + 1:,}; "
            + (f"set seq_len to {len(tokens) - 1:,} or less, or add text" if len(tokens) > 1 else "add text")
        )
    return count
