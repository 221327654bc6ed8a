"""The n-th sample of an endless stream: a pure function of a source's tokens, the window length, the seed and n.

There is no state to save or to fast-forward: every rank of any layout reads the samples it needs by number, and a
resumed run continues with the next number.

Shape legend: N samples, T = seq_len.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isqrt
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from leaven.recipe.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

_ROUNDS = 8
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class Tokens(Protocol):
    """A sequence of token ids in which documents follow each other. A numpy array satisfies this protocol."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: slice, /) -> NDArray[Any]: ...


@dataclass(frozen=True, eq=False)
class Stream:
    """Windows of ``seq_len`` tokens in random order, with a different order in each epoch.

    Window w is tokens ``w * seq_len`` to ``(w + 1) * seq_len`` inclusive. Its last token is only a target, and is
    also the first input of window w + 1. An epoch contains every window once. Tokens at the end of the corpus that do
    not fill a window are left out.

    Raises:
        InputError: if the tokens do not fill one window.
    """

    tokens: Tokens
    seq_len: int
    seed: int
    skip: tuple[tuple[int, int], ...] = ()  # half-open ranges of samples to leave out, disjoint and in order

    def __post_init__(self) -> None:
        _count_windows(self.tokens, self.seq_len, "training")

    @property
    def samples_per_epoch(self) -> int:
        return (len(self.tokens) - 1) // self.seq_len

    def batch(self, first: int, count: int) -> NDArray[np.int64]:
        """Return samples ``first`` to ``first + count - 1``, [count, seq_len + 1] token ids.

        Inputs are all but the last token of a row, targets all but the first.
        """
        return self.samples(numbered(first, count, self.skip))

    def samples(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the samples with these ``numbers``, [N, seq_len + 1], without applying ``skip``."""
        epochs, places = np.divmod(numbers.astype(np.uint64), np.uint64(self.samples_per_epoch))
        return _gather(self.tokens, self.seq_len, permute(places, self.samples_per_epoch, self.seed, epochs))


def numbered(first: int, count: int, skip: Sequence[tuple[int, int]]) -> NDArray[np.int64]:
    """Return the numbers of ``count`` samples from the ``first`` on, counting only samples that ``skip`` does not
    leave out."""
    numbers = np.arange(first, first + count)
    for start, end in skip:
        numbers[numbers >= start] += end - start
    return numbers


def validation_windows(tokens: Tokens, seq_len: int, limit_tokens: int) -> NDArray[np.int64]:
    """Return windows spread evenly over the tokens, [N, T + 1]: at most ``limit_tokens`` in total, but at least one
    window.

    Raises:
        InputError: if the tokens do not fill one window.
    """
    available = _count_windows(tokens, seq_len, "validation")
    count = min(available, max(limit_tokens // seq_len, 1))
    return _gather(tokens, seq_len, np.arange(count, dtype=np.uint64) * np.uint64(available) // np.uint64(count))


def permute(places: NDArray[np.uint64], size: int, seed: int, epochs: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the image of each place in [0, size) under the permutation of its epoch, without computing other images.

    The permutation is a Feistel network on Z_a x Z_b, with a x b just above ``size``. It is applied again until the
    image is below ``size``: the generalized-Feistel and cycle-walking methods of Black and Rogaway 2002, "Ciphers
    with arbitrary finite domains". It shuffles but is not secure: the round function is a mixer, not a cipher.
    """
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
    """Return SplitMix64's output for each state (Steele, Lea and Flood 2014)."""
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
            f"the {split} split has {len(tokens):,} tokens, a window needs seq_len + 1 = {seq_len + 1:,}; "
            + (f"set seq_len to {len(tokens) - 1:,} at most or add text" if len(tokens) > 1 else "add text")
        )
    return count


IGNORED = -100
"""The target that torch's cross-entropy does not count."""


def isolated(windows: "Tensor", end_of_text: int) -> "tuple[Tensor, Tensor]":
    """Return the document number of each input (from 0 within its window) and the targets, both [B, T].

    ``windows`` is [B, T + 1]. A document includes the end-of-text token after it. The target after that token is the
    start of an unrelated document, so it is set to `IGNORED`.
    """
    ends_BT = windows[:, :-1] == end_of_text
    documents_BT = ends_BT.cumsum(1) - ends_BT.long()
    return documents_BT, windows[:, 1:].masked_fill(ends_BT, IGNORED)
