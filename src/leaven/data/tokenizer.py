"""Train or load a tokenizer, and encode text with it."""

import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from unicodedata import normalize

import numpy as np
from numpy.typing import NDArray

from leaven import storage
from leaven.data.corpus import Corpus, Meter, OnProgress, TextDocument
from leaven.data.hub import SCHEME, fetch_tokenizer
from leaven.errors import InputError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END_OF_TEXT = "<|endoftext|>"
PIECE_CHARACTERS = 2**18
LONGEST_WORD = 2**12
"""Maximum number of characters of a word or of consecutive white space; longer ones are split. The time to train a
BPE grows with the square of this length."""
TRAINING_BYTES = 2**26
"""Approximate limit on the bytes of text on which a BPE is trained. Training takes 0.1 s per MB on two cores."""

_END_OF_TEXT_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]")
_PROBES = {  # a text, and texts without one detail; if one gives the same words, the tokenizer removes the detail
    "capitals": ("Ab", "ab"),
    "accents": ("\N{LATIN SMALL LETTER E WITH ACUTE}", "e"),
    "full-width letters": ("\N{FULLWIDTH LATIN CAPITAL LETTER A}", "A"),
    "spaces": ("a b", "ab"),
    "repeated spaces": ("a  b", "a b"),
    "spaces at the ends of a text": ("  a  ", "a"),
    "line ends": ("a\nb", "a b", "ab"),
    "tabs": ("a\tb", "a b", "ab"),
    "punctuation": ("a-b", "ab"),
    "digits": ("1", "2"),
}
_BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")
_LONG_WORD = re.compile(rf"(?<!\S)\S{{{LONGEST_WORD + 1},}}|(?<!\s)\s{{{LONGEST_WORD + 1},}}")


class TextPiece(NamedTuple):
    """A piece of a document's text. Pieces are encoded separately."""

    validation: bool  # whether the document belongs to validation
    text: str
    last: bool  # whether this is the last piece of the document


class Encoded(NamedTuple):
    """The token ids of the pieces of one split: training or validation."""

    ids: NDArray[Any]
    documents: int  # number of documents that end in these pieces
    bytes: int  # bytes of UTF-8 text in these pieces


@dataclass(frozen=True)
class Encoder:
    """Encodes pieces of text into token ids, with an end-of-text token after every document."""

    tokenizer: "Tokenizer"

    @cached_property
    def vocab_size(self) -> int:
        # The embedding has rows up to the largest id, although ids may be unused.
        return max(self.tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype("<u2" if self.vocab_size <= 2**16 else "<u4")

    @cached_property
    def end_of_text(self) -> int:
        """Id of the end-of-text token: the first special token in :attr:`named_ends`, or item 0 if none is special.

        For example, ``</s>`` is not a special token in Gemma's tokenizer: it is the HTML tag.
        """
        added: dict[int, Any] = self.tokenizer.get_added_tokens_decoder()
        return next((id for id in self.named_ends if id in added and added[id].special), self.named_ends[0])

    @cached_property
    def named_ends(self) -> list[int]:
        found = [id for name in _END_OF_TEXT_NAMES if (id := self.tokenizer.token_to_id(name)) is not None]
        if not found:
            known = ", ".join(_END_OF_TEXT_NAMES)
            raise InputError(f"the tokenizer has no end-of-text token; add one of {known} to it")
        return found

    @cached_property
    def has_all_bytes(self) -> bool:
        """Return whether the tokenizer has a token for each byte, and so tokens for any text."""
        document, vocabulary = json.loads(self.tokenizer.to_str()), self.tokenizer.get_vocab()
        if "ByteLevel" in json.dumps([document["normalizer"], document["pre_tokenizer"]]):
            return vocabulary.keys() >= set(_library().pre_tokenizers.ByteLevel.alphabet())
        each = {f"<0x{byte:02X}>" for byte in range(256)}
        return bool(document["model"].get("byte_fallback")) and vocabulary.keys() >= each

    @cached_property
    def not_kept(self) -> list[str]:
        """The details of a text, such as capitals, that normalizer or pre-tokenizer remove."""
        normalizer, splitter = self.tokenizer.normalizer, self.tokenizer.pre_tokenizer

        def words(text: str) -> list[str]:
            text = normalizer.normalize_str(text) if normalizer else text
            return [word for word, _ in splitter.pre_tokenize_str(text)] if splitter else [text]

        with _refusing("cannot encode the text"):
            return [kind for kind, (text, *others) in _PROBES.items() if words(text) in map(words, others)]

    def lost_word(self, texts: Iterable[str]) -> str | None:
        """Return the first word of ``texts`` that the tokens do not give back, or None.

        White space and the Unicode form of letters may differ. Return None for tokenizers that are not byte-level,
        because their tokens give back only a part of the text.
        """
        if not (self.has_all_bytes and '"ByteLevel"' in _decoder(self.tokenizer)):
            return None
        self.tokenizer.encode_special_tokens = True
        for text in texts:
            with _refusing("cannot encode the text"):
                ids = self.tokenizer.encode(text, add_special_tokens=False).ids
                decoded = self.tokenizer.decode(ids, skip_special_tokens=False)
            if "\N{REPLACEMENT CHARACTER}" in decoded:  # added tokens of one letter, which decode to a byte
                continue
            kept, at = "".join(normalize("NFC", decoded).split()), 0
            for word in normalize("NFC", text).split():
                if not kept.startswith(word, at):
                    return word
                at += len(word)
        return None

    def encode(self, pieces: Sequence[TextPiece]) -> tuple[Encoded, Encoded]:
        """Return the tokens of the training pieces, and the tokens of the validation pieces."""
        self.tokenizer.encode_special_tokens = True  # as ordinary text, if a document contains them
        texts = [piece.text for piece in pieces]
        with _refusing("cannot encode the text"):
            encodings = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        ids: tuple[list[int], list[int]] = ([], [])
        documents, n_bytes, end = [0, 0], [0, 0], self.end_of_text
        for piece, encoding in zip(pieces, encodings, strict=True):
            ids[piece.validation].extend(encoding.ids)
            if piece.last:
                ids[piece.validation].append(end)
            documents[piece.validation] += piece.last
            n_bytes[piece.validation] += len(piece.text.encode())
        train, validation = (
            Encoded(np.array(ids[side], dtype=self.dtype), documents[side], size) for side, size in enumerate(n_bytes)
        )
        return train, validation


@contextmanager
def _refusing(why: str) -> Iterator[None]:
    """Turn errors of the library tokenizers into an InputError with the reason ``why``."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # a panic of its Rust code is no Exception
        raise InputError(f"data.tokenizer {why} ({error}); give bpe, or another tokenizer.json") from None


def given_tokenizer(tokenizer: str, vocab_size: int) -> "Tokenizer | None":
    """Load a tokenizer from a file or from the Hub. Return None for "bpe", which is trained on the text.

    Raise InputError if it cannot be loaded, does not fit ``vocab_size``, or has no end-of-text token.
    """
    if tokenizer == "bpe":
        if vocab_size < 257:
            raise InputError(
                f"vocab_size {vocab_size} is too small for bpe; set 257 or more (256 bytes and {END_OF_TEXT})"
            )
        return None
    path = fetch_tokenizer(tokenizer) if tokenizer.startswith(SCHEME) else storage.expanded(tokenizer)
    try:
        raw = storage.read(path).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"data.tokenizer {tokenizer!r} cannot be read ({getattr(error, 'strerror', None) or error}); "
            "give bpe, the path of a tokenizer.json, or hf://org/model"
        ) from None
    library = _library()
    with _refusing(f"{tokenizer!r} is not a tokenizer.json"):
        given: Tokenizer = library.Tokenizer.from_str(raw)
    if getattr(given.model, "dropout", None):
        raise InputError(
            f"data.tokenizer {tokenizer!r} has BPE dropout, so tokens would be random; set dropout to null in it"
        )
    encoder = Encoder(given)
    if encoder.vocab_size > vocab_size:
        raise InputError(
            f"data.tokenizer {tokenizer!r} has {encoder.vocab_size:,} tokens, more than vocab_size {vocab_size:,}; "
            f"set vocab_size = {encoder.vocab_size:_} or more"
        )
    _ = encoder.end_of_text
    given.no_truncation()
    given.no_padding()
    return given


def train_tokenizer(corpora: Sequence[Corpus], vocab_size: int, progress: OnProgress | None) -> "Tokenizer":
    """Train a byte-level BPE of ``vocab_size`` tokens, or of fewer if there are not enough pairs to merge."""
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
    """Yield training text for a tokenizer: from each of n sources, at most about `TRAINING_BYTES` / n bytes.
    The weights of the sources do not matter. So mixtures of the same sources have the same tokenizer, and
    their losses can be compared."""
    for corpus in corpora:
        stride = -(-corpus.n_bytes * len(corpora) // TRAINING_BYTES)
        number = 0
        for document in corpus.documents():
            for piece in pieces(document):
                if not piece.validation:
                    if number % stride == 0:
                        yield piece.text
                    number += 1
                meter.advance(len(piece.text.encode()))


def first_texts(corpora: Sequence[Corpus]) -> Iterator[str]:
    """Yield text from the beginning of each source, in all at most `PIECE_CHARACTERS`."""
    for corpus in corpora:
        left = PIECE_CHARACTERS // len(corpora)
        for piece in chain.from_iterable(map(pieces, corpus.documents())):
            yield piece.text[:left]
            left -= len(piece.text)
            if left <= 0:
                break


def pieces(document: TextDocument) -> Iterator[TextPiece]:
    """Yield a document in pieces that end at line ends if possible. Small pieces can be encoded in parallel, and
    limit memory: encoding needs 100 bytes for each token."""
    text, start = document.text, 0
    while len(text) - start > PIECE_CHARACTERS:
        stop = text.rfind("\n", start, start + PIECE_CHARACTERS) + 1 or start + PIECE_CHARACTERS
        for part in _without_long_words(text[start:stop]):
            yield TextPiece(document.validation, part, last=False)
        start = stop
    *parts, end = _without_long_words(text[start:])
    for part in parts:
        yield TextPiece(document.validation, part, last=False)
    yield TextPiece(document.validation, end, last=True)


def _without_long_words(text: str) -> Iterator[str]:
    """Yield a text in pieces, so that no word or run of white space is longer than `LONGEST_WORD` characters."""
    # The search for long runs takes as long as encoding. Every long run fills at least one of these short stretches,
    # so if none is filled, the search is left out.
    short = LONGEST_WORD // 2
    stretches = (text[at : at + short] for at in range(0, len(text) - short + 1, short))
    start = 0
    if any(len(stretch.split(None, 1)) < 2 for stretch in stretches):
        for run in _LONG_WORD.finditer(text):
            for stop in range(run.start() + LONGEST_WORD, run.end(), LONGEST_WORD):
                yield text[start:stop]
                start = stop
    yield text[start:]


@contextmanager
def parallel_tokenizers() -> Iterator[None]:
    """Let the package ``tokenizers`` use all cores inside the ``with`` block, and one thread afterwards.

    After the block, the process may be forked, and a fork may hang if several threads exist. If the user has set
    TOKENIZERS_PARALLELISM, its value applies inside the block and afterwards.
    """
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = before or "true"
    try:
        yield
    finally:
        os.environ["TOKENIZERS_PARALLELISM"] = before or "false"


def bytes_by_token(tokenizer: Path) -> NDArray[np.int64] | None:
    """Return an array with the number of UTF-8 bytes of each token id. Special tokens have 0 bytes. Return None if
    the tokenizer is neither byte-level nor from SentencePiece."""
    with _refusing("is not a whole tokenizer.json"):
        given: Tokenizer = _library().Tokenizer.from_file(str(tokenizer))
    decoder = _decoder(given)
    vocabulary: dict[str, int] = given.get_vocab(with_added_tokens=False)
    if '"ByteLevel"' in decoder:
        lengths = {number: len(token) for token, number in vocabulary.items()}  # each character represents one byte
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


def _decoder(tokenizer: "Tokenizer") -> str:
    return tokenizer.decoder.__getstate__().decode() if tokenizer.decoder else ""


def bits_per_byte_factor(tokenizer: Path | None, targets: NDArray[np.int64]) -> float | None:
    """Return the factor that converts the mean loss over ``targets``, in nats per token, to bits per byte. Return
    None if the number of bytes is unknown or 0. End-of-text tokens have no bytes."""
    counts = None if tokenizer is None else bytes_by_token(tokenizer)
    n_bytes = 0 if counts is None else int(counts[targets].sum())
    return targets.size / n_bytes / math.log(2) if n_bytes else None


def _library() -> Any:
    try:
        import tokenizers
    except ImportError:
        raise InputError(
            "tokens and bits per byte need the package tokenizers; run: pip install 'leaven[train]'"
        ) from None
    return tokenizers
