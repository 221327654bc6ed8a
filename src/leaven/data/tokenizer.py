"""The tokenizer: trained on the training documents, or given as a file; and what a text's pieces become with it."""

import math
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from leaven.data.corpus import Corpus, Meter, OnProgress
from leaven.data.hub import SCHEME, fetch_tokenizer
from leaven.recipe.errors import InputError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END_OF_TEXT = "<|endoftext|>"
PIECE_CHARACTERS = 2**18
TRAINING_BYTES = 2**26
"""About how much text a BPE is trained on at most, to bound its time: 0.1 s a MB on two cores."""

_END_OF_TEXT_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]")
_BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")


class TextPiece(NamedTuple):
    """A part of a document, of one side of the split, and whether the document ends with it."""

    validation: bool
    text: str
    last: bool


class Encoded(NamedTuple):
    """Token ids of one side of some pieces, the documents that end in them, and their bytes of UTF-8."""

    ids: NDArray[Any]
    documents: int
    bytes: int


@dataclass(frozen=True)
class Encoder:
    """Pieces to token ids. An end-of-text token follows every document."""

    tokenizer: "Tokenizer"

    @cached_property
    def vocab_size(self) -> int:
        # Ids may have holes: the size of the embedding is what counts.
        return max(self.tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype("<u2" if self.vocab_size <= 2**16 else "<u4")

    @cached_property
    def end_of_text(self) -> int:
        for name in _END_OF_TEXT_NAMES:
            if (token := self.tokenizer.token_to_id(name)) is not None:
                return token
        raise InputError(f"the tokenizer has no end-of-text token; add one of {', '.join(_END_OF_TEXT_NAMES)} to it")

    def encode(self, pieces: Sequence[TextPiece]) -> tuple[Encoded, Encoded]:
        """The training side and the validation side of some pieces."""
        # Text that spells a special token is text.
        self.tokenizer.encode_special_tokens = True
        encodings = self.tokenizer.encode_batch_fast([piece.text for piece in pieces], add_special_tokens=False)
        ids: tuple[list[int], list[int]] = ([], [])
        documents, n_bytes, end = [0, 0], [0, 0], self.end_of_text
        for piece, encoding in zip(pieces, encodings, strict=True):
            ids[piece.validation].extend(encoding.ids)
            if piece.last:
                ids[piece.validation].append(end)
            documents[piece.validation] += piece.last
            n_bytes[piece.validation] += len(piece.text.encode())
        train, validation = (
            Encoded(np.array(ids[side], dtype=self.dtype), documents[side], n_bytes[side]) for side in (0, 1)
        )
        return train, validation


def given_tokenizer(tokenizer: str, vocab_size: int) -> "Tokenizer | None":
    """The tokenizer of a file or of the Hub, or None for one to be trained.

    Raises:
        InputError: if it cannot be had, has more tokens than ``vocab_size``, or no end-of-text token.
    """
    if tokenizer == "bpe":
        if vocab_size < 257:
            raise InputError(f"vocab_size {vocab_size} is too small for bpe: 256 bytes and {END_OF_TEXT} need 257")
        return None
    path = fetch_tokenizer(tokenizer) if tokenizer.startswith(SCHEME) else Path(tokenizer).expanduser()
    try:
        raw = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"data.tokenizer {tokenizer!r} cannot be read ({getattr(error, 'strerror', None) or error}); "
            "give bpe, the path of a tokenizer.json, or hf://org/model"
        ) from None
    library = _library()
    try:
        given: Tokenizer = library.Tokenizer.from_str(raw)
    except Exception as error:  # tokenizers raises no narrower class
        raise InputError(f"data.tokenizer {tokenizer!r} is no tokenizer.json ({error})") from None
    encoder = Encoder(given)
    if encoder.vocab_size > vocab_size:
        raise InputError(
            f"data.tokenizer {tokenizer!r} has {encoder.vocab_size:,} tokens, more than vocab_size {vocab_size:,}; "
            f"set vocab_size = {encoder.vocab_size:_} or more"
        )
    _ = encoder.end_of_text
    # A file may ask for every text to be cut or filled to one length.
    given.no_truncation()
    given.no_padding()
    return given


def train_tokenizer(corpora: Sequence[Corpus], vocab_size: int, progress: OnProgress | None) -> "Tokenizer":
    """A byte-level BPE of the training documents, to ``vocab_size`` tokens or as many as there are pairs to merge."""
    library = _library()
    meter = Meter(progress, "tokenizer", sum(corpus.n_bytes for corpus in corpora))
    tokenizer: Tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(library.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    with parallel_tokenizers():
        tokenizer.train_from_iterator(training_sample(corpora, meter), trainer)
    meter.finish()
    return tokenizer


def training_sample(corpora: Sequence[Corpus], meter: Meter) -> Iterator[str]:
    """Pieces of the training documents. Each source gives up to an equal share of `TRAINING_BYTES`, every k-th piece
    where it holds more, whatever its weight: mixtures of the same sources have the same tokenizer, and their losses
    compare."""
    for corpus in corpora:
        stride = -(-corpus.n_bytes * len(corpora) // TRAINING_BYTES)
        number = done = 0
        for document in corpus.documents():
            if document.validation:
                continue
            for piece, _ in pieces(document.text):
                if number % stride == 0:
                    yield piece
                number += 1
                done += len(piece.encode())
                meter.at(done)
        meter.advance(corpus.n_bytes)


def pieces(text: str) -> Iterator[tuple[str, bool]]:
    """A text in pieces, of whole lines where it has lines, and whether a piece is the last.

    One long text would be one job for one core, and its encoding takes a hundred bytes a token.
    """
    start = 0
    while len(text) - start > PIECE_CHARACTERS:
        stop = text.rfind("\n", start, start + PIECE_CHARACTERS) + 1 or start + PIECE_CHARACTERS
        yield text[start:stop], False
        start = stop
    yield text[start:], True


@contextmanager
def parallel_tokenizers() -> Iterator[None]:
    """All cores inside, one thread after: a process that forks after using the threads would hang on them."""
    asked = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = asked or "true"
    try:
        yield
    finally:
        os.environ["TOKENIZERS_PARALLELISM"] = asked or "false"


def bytes_by_token(tokenizer: Path) -> NDArray[np.int64] | None:
    """UTF-8 bytes by token id of a tokenizer.json; special tokens, end-of-text among them, have none.

    Exact for byte-level tokenizers, and up to the space that some put before a text for those that write spaces
    as "▁" (SentencePiece). None for any other: their tokens do not say what text they came from.
    """
    given: Tokenizer = _library("bits per byte need").Tokenizer.from_file(str(tokenizer))
    decoder = given.decoder.__getstate__().decode() if given.decoder else ""
    vocabulary: dict[str, int] = given.get_vocab(with_added_tokens=False)
    if '"ByteLevel"' in decoder:
        lengths = {number: len(token) for token, number in vocabulary.items()}  # a character stands for a byte
    elif "▁" in decoder:
        lengths = {
            number: 1 if _BYTE.fullmatch(token) else len(token.replace("▁", " ").encode())
            for token, number in vocabulary.items()
        }
    else:
        return None
    added: dict[int, Any] = given.get_added_tokens_decoder()
    lengths |= {number: 0 if token.special else len(token.content.encode()) for number, token in added.items()}
    counts = np.zeros(max(lengths) + 1, dtype=np.int64)
    counts[list(lengths)] = list(lengths.values())
    return counts


def bits_per_byte_factor(tokenizer: Path, targets: NDArray[np.int64]) -> float | None:
    """What a mean loss over these targets, in nats per token, is multiplied by for bits per byte of their text.

    An end of text costs nats and has no bytes. None where the tokenizer does not tell bytes.
    """
    counts = bytes_by_token(tokenizer)
    n_bytes = 0 if counts is None else int(counts[targets].sum())
    return targets.size / n_bytes / math.log(2) if n_bytes else None


def _library(what: str = "turning text into tokens needs") -> Any:
    try:
        import tokenizers
    except ImportError:
        raise InputError(f"{what} tokenizers; pip install 'leaven[train]'") from None
    return tokenizers
