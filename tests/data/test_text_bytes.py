"""Bytes of text by token, compared with the text."""

import math
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from leaven.data.tokenizer import bits_per_byte_factor, bytes_by_token
from leaven.data.tokens import prepare
from leaven.recipe.data import Data

TEXT = "Käse und 東京, naïve café ☕🧀 … def f(x):\n    return x * 2  # ×2\n"


def test_the_bytes_of_all_tokens_add_up_to_the_text(tmp_path: Path) -> None:
    """The tokenizer splits characters of several bytes; end-of-text has no bytes."""
    for number in range(40):
        (tmp_path / f"{number}.txt").write_text(TEXT * 3 + f"{number} <|endoftext|>\n", encoding="utf-8")
    tokens = prepare(Data(source=f"{tmp_path}/*.txt", tokens=1), 300)
    counts = bytes_by_token(tokens.tokenizer_path)
    for split, n_bytes in ((tokens.train, tokens.train_bytes), (tokens.validation, tokens.validation_bytes)):
        assert counts[split[:]].sum() == n_bytes
    assert counts[tokens.end_of_text] == 0


@pytest.mark.parametrize("rare", [True, False], ids=["bytes of rare characters", "metaspace"])
def test_sentencepiece_tokens(tmp_path: Path, rare: bool) -> None:
    """The tokenizer puts one space in front of the text."""
    decoders = tokenizers.decoders
    vocabulary = {token: number for number, token in enumerate(["▁", "b", "i", "g", "é", "▁b", "ig", "▁big"])}
    if rare:
        vocabulary |= {f"<0x{byte:02X}>": len(vocabulary) + byte for byte in range(256)}
    merges = [("▁", "b"), ("i", "g"), ("▁b", "ig")]
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges, byte_fallback=rare))
    made.add_special_tokens(["</s>"])
    made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence(parts) if rare else decoders.Metaspace()
    made.save(str(tmp_path / "tokenizer.json"))
    text = "big bigé  gib" + (" 東京" if rare else "")
    counts = bytes_by_token(tmp_path / "tokenizer.json")
    assert counts[made.encode(text).ids].sum() == len(text.encode()) + 1


def test_bits_per_byte_of_a_uniform_guess(tmp_path: Path) -> None:
    """ln V nats per token of b bytes are log2 V / b bits per byte; None where tokens do not determine the text."""
    trained = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "b": 1, "ab": 2, "</s>": 3}, [("a", "b")]))
    trained.decoder = tokenizers.decoders.ByteLevel()
    trained.add_special_tokens(["</s>"])
    path = tmp_path / "tokenizer.json"
    trained.save(str(path))
    factor = bits_per_byte_factor(path, np.array([[2, 2], [0, 3]]))
    assert math.log(4) * factor == pytest.approx(2 * 4 / 5)
    assert bits_per_byte_factor(path, np.array([[3]])) is None
    trained.decoder = tokenizers.decoders.WordPiece()
    trained.save(str(path))
    assert bits_per_byte_factor(path, np.array([[2]])) is None
