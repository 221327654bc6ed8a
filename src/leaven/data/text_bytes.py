"""How many bytes of text a token stands for: what turns nats per token into bits per byte."""

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from leaven.recipe.errors import InputError

_BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")


def bytes_by_token(tokenizer: Path) -> NDArray[np.int64] | None:
    """UTF-8 bytes by token id of a tokenizer.json; special tokens, end-of-text among them, have none.

    Exact for byte-level tokenizers, and up to the space that some put before a text for those that write spaces
    as "▁" (SentencePiece). None for any other: their tokens do not say what text they came from.
    """
    try:
        import tokenizers
    except ImportError:
        raise InputError("bits per byte need tokenizers; pip install 'leaven[train]'") from None
    library = tokenizers.Tokenizer.from_file(str(tokenizer))
    decoder = library.decoder.__getstate__().decode() if library.decoder else ""
    vocabulary: dict[str, int] = library.get_vocab(with_added_tokens=False)
    if '"ByteLevel"' in decoder:
        lengths = {number: len(token) for token, number in vocabulary.items()}  # a character stands for a byte
    elif "▁" in decoder:
        lengths = {number: _sentencepiece(token) for token, number in vocabulary.items()}
    else:
        return None
    added: dict[int, Any] = library.get_added_tokens_decoder()
    lengths |= {number: 0 if token.special else len(token.content.encode()) for number, token in added.items()}
    counts = np.zeros(max(lengths) + 1, dtype=np.int64)
    counts[list(lengths)] = list(lengths.values())
    return counts


def _sentencepiece(token: str) -> int:
    return 1 if _BYTE.fullmatch(token) else len(token.replace("▁", " ").encode())


def bits_per_byte_factor(tokenizer: Path, targets: NDArray[np.int64]) -> float | None:
    """What a mean loss over these targets, in nats per token, is multiplied by for bits per byte of their text.

    An end of text costs nats and has no bytes. None where the tokenizer does not tell bytes.
    """
    counts = bytes_by_token(tokenizer)
    n_bytes = 0 if counts is None else int(counts[targets].sum())
    return targets.size / n_bytes / math.log(2) if n_bytes else None
