"""Where documents begin and end in windows of tokens.

Shape legend: B sequences, T = seq_len.
"""

from torch import Tensor

IGNORED = -100
"""The target that torch's cross-entropy does not count."""


def isolated(windows: Tensor, end_of_text: int) -> tuple[Tensor, Tensor]:
    """Of windows [B, T + 1]: each input's document, numbered from 0 in its window, and the targets, both [B, T].

    A document includes the end-of-text token after it. What that token predicts is the start of another document,
    which nothing before it tells: that target is `IGNORED`.
    """
    ends_BT = windows[:, :-1] == end_of_text
    documents_BT = ends_BT.cumsum(1) - ends_BT.long()
    return documents_BT, windows[:, 1:].masked_fill(ends_BT, IGNORED)
