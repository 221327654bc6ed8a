"""From a corpus to token ids on disk: trained or given tokenizer, memory-mapped shards, a cache by content.

A cache folder is written beside its place and renamed into it, so it is whole or absent. One process at a
time writes to the cache; the others wait for it, and map what it wrote if it is theirs.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from leaven.data.corpus import Corpus, Meter, Progress, open_corpus
from leaven.recipe.errors import InputError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

FORMAT = 2
"""Raised whenever the same source would give other tokens or other files."""

END_OF_TEXT = "<|endoftext|>"
SHARD_TOKENS = 2**27
PIECE_CHARACTERS = 2**18
BATCH_CHARACTERS = 2**22
TRAINING_BYTES = 2**26
"""About how much text a BPE is trained on at most, to bound its time: 0.1 s a MB on two cores."""

_END_OF_TEXT_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]")


class ShardedTokens:
    """Shards laid end to end, read by slices (of step 1); a slice within a shard is a view of the file."""

    def __init__(self, shards: list[NDArray[Any]]) -> None:
        self._shards = shards
        self._starts = np.cumsum([0, *map(len, shards)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: slice, /) -> NDArray[Any]:
        start, stop, step = index.indices(len(self))
        assert step == 1
        first = int(np.searchsorted(self._starts, start, side="right")) - 1
        parts = []
        for shard, offset in zip(self._shards[first:], self._starts[first:], strict=False):
            if offset >= stop:
                break
            parts.append(shard[max(start - offset, 0) : stop - offset])
        return parts[0] if len(parts) == 1 else np.concatenate(parts or [np.zeros(0, dtype=np.uint16)])


@dataclass(frozen=True, eq=False)
class TokenSet:
    """The tokens of both splits. An end-of-text token follows every document.

    ``vocab_size`` is what the tokenizer really has, ``fingerprint`` a hash of the tokens of both splits. The
    bytes are of UTF-8 text, for losses in bits per byte.
    """

    train: ShardedTokens
    validation: ShardedTokens
    train_bytes: int
    validation_bytes: int
    vocab_size: int
    end_of_text: int
    fingerprint: str
    tokenizer_path: Path


def prepare(
    source: str,
    tokenizer: str,
    vocab_size: int,
    cache: Path | None = None,
    progress: Progress | None = None,
) -> TokenSet:
    """The tokens of a ``data.source``, from the cache where the same content was prepared before.

    ``tokenizer`` is ``bpe`` (byte-level, trained on the training documents to ``vocab_size`` tokens, or fewer
    where the text has no more pairs to merge) or the path of a ``tokenizer.json``. The cache is ``cache``,
    else ``$LEAVEN_CACHE``, else ``leaven`` in ``$XDG_CACHE_HOME`` or ``~/.cache``. ``progress`` is called
    with a stage (``reading``, ``tokenizer``, ``encoding``), bytes done and bytes in all.

    Raises:
        InputError: if the source, the tokenizer, the vocabulary or the cache folder will not do.
    """
    given = _given_tokenizer(tokenizer, vocab_size)
    corpus = open_corpus(source, progress)
    content = "bpe" if given is None else _hash(Path(tokenizer).expanduser().read_bytes())
    key = _hash(f"{FORMAT} {corpus.fingerprint} {content} {vocab_size}".encode())
    folder = (cache or _cache_folder()) / "tokens" / key
    try:
        if (found := _open(folder)) is not None:
            return found
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.with_name(".lock")):
            return _open(folder) or _build(folder, corpus, given, vocab_size, progress)
    except OSError as error:
        raise InputError(
            f"the cache folder {folder.parent} cannot be used ({error.strerror or error}); "
            "set LEAVEN_CACHE to a folder with room that can be written and locked"
        ) from None


def _cache_folder() -> Path:
    if folder := os.environ.get("LEAVEN_CACHE"):
        return Path(folder).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "leaven"


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock that ends with the process, however it ends."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _build(
    final: Path, corpus: Corpus, given: "Tokenizer | None", vocab_size: int, progress: Progress | None
) -> TokenSet:
    """Write a cache folder. Only the holder of the cache's lock comes here."""
    draft = final.with_name(".draft")
    # What a killed process left behind, and what did not pass for a whole cache.
    for remains in (draft, final):
        shutil.rmtree(remains, ignore_errors=True)
    draft.mkdir()
    try:
        with _parallel_tokenizers():
            tokenizer = given or _train(corpus, vocab_size, progress)
            _write(draft / "tokenizer.json", tokenizer.to_str(pretty=True).encode())
            index = _encode(corpus, tokenizer, draft, progress)
        _write(draft / "index.json", json.dumps(index, indent=1).encode())
        _sync(draft)
        draft.rename(final)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    _sync(final.parent)
    whole = _open(final)
    assert whole is not None
    return whole


def _open(folder: Path) -> TokenSet | None:
    """What a cache folder holds, or None if it is not there or not whole."""
    try:
        index = json.loads((folder / "index.json").read_bytes())
        if _hash((folder / "tokenizer.json").read_bytes()) != index["tokenizer"]:
            return None
        train, validation = (_map(folder, split, index) for split in ("train", "validation"))
        return TokenSet(
            train,
            validation,
            train_bytes=index["splits"]["train"]["bytes"],
            validation_bytes=index["splits"]["validation"]["bytes"],
            vocab_size=index["vocab_size"],
            end_of_text=index["end_of_text"],
            fingerprint=index["fingerprint"],
            tokenizer_path=folder / "tokenizer.json",
        )
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def _map(folder: Path, split: str, index: dict[str, Any]) -> ShardedTokens:
    dtype = np.dtype(index["dtype"]).newbyteorder("<")
    shards: list[NDArray[Any]] = []
    for number, length in enumerate(index["splits"][split]["shards"]):
        path = _shard(folder, split, number)
        if path.stat().st_size != length * dtype.itemsize:
            raise ValueError(f"{path} is truncated")
        shards.append(np.memmap(path, dtype=dtype, mode="r"))
    return ShardedTokens(shards)


def _shard(folder: Path, split: str, number: int) -> Path:
    return folder / f"{split}-{number:05d}.bin"


def _given_tokenizer(tokenizer: str, vocab_size: int) -> "Tokenizer | None":
    """The tokenizer of a file, or None for one to be trained."""
    if tokenizer == "bpe":
        if vocab_size < 257:
            raise InputError(f"vocab_size {vocab_size} is too small for bpe: 256 bytes and {END_OF_TEXT} need 257")
        return None
    if tokenizer.startswith("hf://"):
        raise InputError(
            f"data.tokenizer {tokenizer!r}: tokenizers are not fetched from the Hub yet; "
            "download its tokenizer.json and give the path"
        )
    try:
        raw = Path(tokenizer).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"data.tokenizer {tokenizer!r} cannot be read ({getattr(error, 'strerror', None) or error}); "
            "give bpe or the path of a tokenizer.json"
        ) from None
    library = _library()
    try:
        given: Tokenizer = library.Tokenizer.from_str(raw)
    except Exception as error:  # tokenizers raises no narrower class
        raise InputError(f"data.tokenizer {tokenizer!r} is no tokenizer.json ({error})") from None
    size = _vocab_size(given)
    if size > vocab_size:
        raise InputError(
            f"data.tokenizer {tokenizer!r} has {size:,} tokens, more than vocab_size {vocab_size:,}; "
            f"set vocab_size = {size:_} or more"
        )
    _end_of_text(given)
    # A file may ask for every text to be cut or filled to one length.
    given.no_truncation()
    given.no_padding()
    return given


def _library() -> Any:
    try:
        import tokenizers
    except ImportError:
        raise InputError("turning text into tokens needs tokenizers; pip install 'leaven[train]'") from None
    return tokenizers


def _vocab_size(tokenizer: "Tokenizer") -> int:
    # Ids may have holes: the size of the embedding is what counts.
    return max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1


def _end_of_text(tokenizer: "Tokenizer") -> int:
    for name in _END_OF_TEXT_NAMES:
        if (token := tokenizer.token_to_id(name)) is not None:
            return token
    raise InputError(f"the tokenizer has no end-of-text token; add one of {', '.join(_END_OF_TEXT_NAMES)} to it")


@contextmanager
def _parallel_tokenizers() -> Iterator[None]:
    """All cores inside, one thread after: a process that forks after using the threads would hang on them."""
    asked = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = asked or "true"
    try:
        yield
    finally:
        os.environ["TOKENIZERS_PARALLELISM"] = asked or "false"


def _pieces(text: str) -> Iterator[tuple[str, bool]]:
    """A text in pieces, of whole lines where it has lines, and whether a piece is the last.

    One long text would be one job for one core, and its encoding takes a hundred bytes a token.
    """
    start = 0
    while len(text) - start > PIECE_CHARACTERS:
        stop = text.rfind("\n", start, start + PIECE_CHARACTERS) + 1 or start + PIECE_CHARACTERS
        yield text[start:stop], False
        start = stop
    yield text[start:], True


def _train(corpus: Corpus, vocab_size: int, progress: Progress | None) -> "Tokenizer":
    """A byte-level BPE of the training documents; of every k-th piece where they exceed `TRAINING_BYTES`."""
    library = _library()
    stride = -(-corpus.n_bytes // TRAINING_BYTES)
    meter = Meter(progress, "tokenizer", corpus.n_bytes)

    def sample() -> Iterator[str]:
        number = done = 0
        for document in corpus.documents():
            if document.validation:
                continue
            for piece, _ in _pieces(document.text):
                if number % stride == 0:
                    yield piece
                number += 1
                done += len(piece.encode())
                meter.at(done)

    tokenizer: Tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(library.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sample(), trainer)
    meter.finish()
    return tokenizer


class _Writer:
    """One split on its way to disk, in shards of `SHARD_TOKENS` that are synced when full."""

    def __init__(self, folder: Path, split: str, dtype: str) -> None:
        self._folder, self._split, self._dtype = folder, split, np.dtype(dtype).newbyteorder("<")
        self._file: Any = None
        self.hash = blake2b(digest_size=16)
        self.shards: list[int] = []
        self.documents = self.bytes = 0

    def write(self, ids: list[int]) -> None:
        tokens = np.array(ids, dtype=self._dtype)
        self.hash.update(tokens.astype("<u4").tobytes())
        while len(tokens):
            if self._file is None:
                self._file = _shard(self._folder, self._split, len(self.shards)).open("wb")
                self.shards.append(0)
            room = SHARD_TOKENS - self.shards[-1]
            self._file.write(tokens[:room])
            self.shards[-1] += len(tokens[:room])
            if self.shards[-1] == SHARD_TOKENS:
                self.close()
            tokens = tokens[room:]

    def close(self) -> None:
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._file = None


def _encode(corpus: Corpus, tokenizer: "Tokenizer", folder: Path, progress: Progress | None) -> dict[str, Any]:
    """Write the shards of both splits; the index that describes them."""
    size, end_of_text = _vocab_size(tokenizer), _end_of_text(tokenizer)
    dtype = "uint16" if size <= 2**16 else "uint32"
    splits = {split: _Writer(folder, split, dtype) for split in ("train", "validation")}
    meter = Meter(progress, "encoding", corpus.n_bytes)
    # Text that spells a special token is text.
    tokenizer.encode_special_tokens = True
    for batch in _batches(corpus):
        encodings = tokenizer.encode_batch_fast([piece for _, piece, _ in batch], add_special_tokens=False)
        for encoding, (split, piece, last) in zip(encodings, batch, strict=True):
            writer = splits[split]
            writer.write(encoding.ids + [end_of_text] * last)
            writer.documents += last
            writer.bytes += len(piece.encode())
        meter.at(sum(writer.bytes for writer in splits.values()))
    for writer in splits.values():
        writer.close()
    meter.finish()
    return {
        "format": FORMAT,
        "source": corpus.source,
        "dtype": dtype,
        "vocab_size": size,
        "end_of_text": end_of_text,
        "tokenizer": _hash((folder / "tokenizer.json").read_bytes()),
        "fingerprint": _hash(b"".join(writer.hash.digest() for writer in splits.values())),
        "splits": {
            split: {"shards": writer.shards, "documents": writer.documents, "bytes": writer.bytes}
            for split, writer in splits.items()
        },
    }


def _batches(corpus: Corpus) -> Iterator[list[tuple[str, str, bool]]]:
    """(split, piece, whether the document ends with it), in groups large enough to keep all cores busy."""
    batch: list[tuple[str, str, bool]] = []
    characters = 0
    for document in corpus.documents():
        split = "validation" if document.validation else "train"
        for piece, last in _pieces(document.text):
            batch.append((split, piece, last))
            characters += len(piece)
            if characters >= BATCH_CHARACTERS:
                yield batch
                batch, characters = [], 0
    yield batch


def _write(path: Path, raw: bytes) -> None:
    with path.open("wb") as file:
        file.write(raw)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _hash(raw: bytes) -> str:
    return blake2b(raw, digest_size=16).hexdigest()
