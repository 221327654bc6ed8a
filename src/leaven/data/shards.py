"""Store token ids on disk in shards, with an index of their sizes and checksums.

A shard has the tokens of `SHARD_BATCHES` batches of text, in one file for training and one for
validation. Finished shards are listed in ``shards.jsonl``, so a killed process loses only one shard.
When all shards are finished, ``index.json`` is written.

At the start of a run, the size of each file is compared with the index. Missing and truncated shards are written
again. The content of a file is compared with its checksums when it is read.
"""

import json
import operator
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from leaven import storage
from leaven.data.corpus import Corpus, Meter
from leaven.data.file_tokens import BlockChecksums, FileTokens, checksums_fit
from leaven.data.pool import PieceBatch, encode_in_order
from leaven.data.stream import Tokens
from leaven.data.tokenizer import Encoder, pieces
from leaven.documents import digest_of

SPLITS = ("train", "validation")
BATCH_CHARACTERS = 2**22
SHARD_BATCHES = 32
BLOCKS = "blocks"  # key of the checksums of blocks
COUNTS = ("tokens", "documents", "bytes")  # keys of the counts of a file
DIGEST = "digest"  # key of the hash of all other keys of an index
KEY = "key"  # key of the name of the folder, a hash of text and tokenizer
TEXT = "text"  # key of the hash of a shard's text in shards.jsonl
ADVICE = "remove it and run the same command again, which writes it again from the text"


class ShardedTokens:
    """The tokens of several shards, one shard after the other. Index them with slices of step 1."""

    def __init__(self, shards: Sequence[Tokens]) -> None:
        self.shards = shards
        self._starts = np.cumsum([0, *map(len, shards)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: slice, /) -> NDArray[Any]:
        start, stop, step = index.indices(len(self))
        assert step == 1
        parts = [part[:] for part in self.between(start, max(start, stop))]
        return parts[0] if len(parts) == 1 else np.concatenate(parts or [np.zeros(0, dtype=np.uint16)])

    def between(self, start: int, stop: int) -> list[Tokens]:
        """Return the tokens from position ``start`` to ``stop - 1`` as one range per shard. Nothing is read yet."""
        first = int(np.searchsorted(self._starts, start, side="right")) - 1
        found: list[Tokens] = []
        for shard, offset in zip(self.shards[first:], self._starts[first:].tolist(), strict=False):
            if offset >= stop:
                break
            found.append(TokenRange(shard, max(start - offset, 0), min(stop - offset, len(shard))))
        return found


@dataclass(frozen=True)
class TokenRange:
    """A range of the tokens of a shard. Tokens are read when the range is indexed."""

    tokens: Tokens  # the shard
    start: int  # position of the first token of the range
    stop: int  # position after the last token

    def __len__(self) -> int:
        return self.stop - self.start

    def __getitem__(self, index: slice, /) -> NDArray[Any]:
        start, stop, step = index.indices(len(self))
        assert step == 1
        return self.tokens[self.start + start : self.start + max(start, stop)]


@dataclass(frozen=True)
class ShardFile:
    tokens: int  # number of tokens
    documents: int  # number of documents that end in this file
    bytes: int  # bytes of UTF-8 text that the tokens encode
    blocks: str = ""  # checksums of the file's blocks, from BlockChecksums; "" until the file is complete


ShardRecord = dict[str, ShardFile]
"""The files of a shard, by split: "train" or "validation"."""


@dataclass(frozen=True)
class Shards:
    """The tokens of a source."""

    train: ShardedTokens
    validation: ShardedTokens
    train_bytes: int  # bytes of UTF-8 text in the training split; 0 if the source has token ids
    validation_bytes: int
    fingerprint: str  # hash of the tokens of both splits; does not depend on the size of the shards
    notes: tuple[str, ...]  # lines for the user, for example about files that were rebuilt


def shards(folder: Path, corpus: Corpus, encoder: Encoder, meter: Meter, processes: int | None) -> Shards:
    """Return the tokens of a corpus. Missing and damaged shards in ``folder`` are written first.

    Raises:
        InputError: if the text changes while it is read, or a tokenising process cannot start or dies.
        OSError: if the folder cannot be read, or missing shards cannot be written.
    """
    found = _open(folder, corpus, encoder.dtype)
    if found is not None:
        return found
    damage: dict[Path, str] = {}
    folder.mkdir(parents=True, exist_ok=True)
    with storage.lock(folder / ".lock"):
        found = _open(folder, corpus, encoder.dtype)
        if found is None:
            damage = _build(folder, corpus, encoder, meter, processes)
            found = _open(folder, corpus, encoder.dtype)
    assert found is not None
    return replace(found, notes=tuple(f"{file} {why}; it was rebuilt" for file, why in damage.items()))


def _open(folder: Path, corpus: Corpus, dtype: np.dtype[Any]) -> Shards | None:
    path = folder / "index.json"
    try:
        index: dict[str, Any] = storage.json_object(storage.read(path)) or {}
        digest = index.pop(DIGEST)
        records = [_record(entry, dtype) for entry in index["shards"]]
        fingerprint, key = index["fingerprint"], index.get(KEY, folder.name)  # an earlier version wrote none
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
    # The folder may be a renamed copy of the tokens of another text or tokenizer.
    if digest != digest_of(index) or key != folder.name or not _has_all(records, corpus):
        return None
    if any(_damage(folder, shard, record, dtype) for shard, record in enumerate(records)):
        return None
    train, validation = (
        ShardedTokens([_tokens(folder, split, shard, record, dtype) for shard, record in enumerate(records)])
        for split in SPLITS
    )
    train_bytes, validation_bytes = (sum(record[split].bytes for record in records) for split in SPLITS)
    return Shards(train, validation, train_bytes, validation_bytes, fingerprint, ())


def _has_all(records: Sequence[ShardRecord], corpus: Corpus) -> bool:
    files = [file for record in records for file in record.values()]
    documents = corpus.n_documents + (corpus.n_documents == 1)  # a single document is cut in two
    return (sum(file.documents for file in files), sum(file.bytes for file in files)) == (documents, corpus.n_bytes)


def _build(folder: Path, corpus: Corpus, encoder: Encoder, meter: Meter, processes: int | None) -> dict[Path, str]:
    """Write missing and damaged shards, then the index. Write all shards if existing shards do not fit the
    text. Return why each file was rebuilt, such as "was missing". The caller must hold the folder's lock."""
    records: dict[int, ShardRecord] = {}
    known: dict[int, Any] = {}  # hash of the text from which each finished shard was made
    texts: dict[int, Any] = {}  # hash of the text that the corpus has now for each shard
    log = folder / "shards.jsonl"
    for entry in storage.read_json_lines(log).documents:
        with suppress(KeyError, TypeError, ValueError):
            shard = operator.index(entry["shard"])
            if entry.get(KEY, folder.name) != folder.name:
                continue
            known[shard], records[shard] = entry[TEXT], _record(entry, encoder.dtype)
    damage: dict[Path, str] = {}
    for shard, record in list(records.items()):
        if found := _damage(folder, shard, record, encoder.dtype):
            damage |= found
            del records[shard]
    log_used = bool(records)
    for remains in (*folder.glob(".*.tmp"), folder / "index.json"):
        remains.unlink(missing_ok=True)

    def missing() -> Iterator[tuple[int, PieceBatch]]:
        for number, batch in enumerate(_batches(corpus)):
            shard = number // SHARD_BATCHES
            text = texts.setdefault(shard, blake2b(digest_size=16))
            for piece in batch:
                text.update(b"%d%d%d:%s" % (piece.validation, piece.last, len(piece.text), piece.text.encode()))
            if shard in records:
                meter.advance(sum(len(piece.text.encode()) for piece in batch))
            else:
                yield shard, batch

    with closing(encode_in_order(encoder, missing(), corpus.n_bytes, processes)) as results:
        for shard, done in groupby(results, key=lambda result: result[0]):
            record = dict.fromkeys(SPLITS, ShardFile(0, 0, 0))
            with ExitStack() as stack:
                files = {
                    split: stack.enter_context(storage.replacing(_file(folder, split, shard))) for split in SPLITS
                }
                blocks = {split: BlockChecksums() for split in SPLITS}
                for _, sides in done:
                    for split, encoded in zip(SPLITS, sides, strict=True):
                        files[split].write(encoded.ids.data)
                        blocks[split].update(encoded.ids.data)
                        sums = record[split]
                        record[split] = ShardFile(
                            tokens=sums.tokens + len(encoded.ids),
                            documents=sums.documents + encoded.documents,
                            bytes=sums.bytes + encoded.bytes,
                        )
                    meter.advance(sum(encoded.bytes for encoded in sides))
            records[shard] = {split: replace(record[split], blocks=blocks[split].hexdigest()) for split in SPLITS}
            known[shard] = texts[shard].hexdigest()
            storage.append_json(log, {KEY: folder.name, "shard": shard, TEXT: known[shard]} | _entry(records[shard]))
    ordered = [records[shard] for shard in sorted(records)]
    # Shards of an earlier build that was stopped have another text if a source file changed meanwhile.
    other = any(known[shard] != text.hexdigest() for shard, text in texts.items())
    if log_used and (other or not _has_all(ordered, corpus)):  # write all shards again
        log.unlink()
        return damage | {log: "did not fit the text"} | _build(folder, corpus, encoder, meter, processes)
    index = {
        KEY: folder.name,
        "source": corpus.source,
        "vocab_size": encoder.vocab_size,
        "end_of_text": encoder.end_of_text,
        "dtype": encoder.dtype.name,
        "fingerprint": _fingerprint(folder, ordered, encoder.dtype),
        "shards": [_entry(record) for record in ordered],
    }
    storage.write(folder / "index.json", json.dumps(index | {DIGEST: digest_of(index)}, indent=1).encode())
    return damage


def _batches(corpus: Corpus) -> Iterator[PieceBatch]:
    """Yield pieces of documents, in batches of at least `BATCH_CHARACTERS` characters; the last may have fewer."""
    batch: PieceBatch = []
    characters = 0
    for document in corpus.documents():
        for piece in pieces(document):
            batch.append(piece)
            characters += len(piece.text)
            if characters >= BATCH_CHARACTERS:
                yield batch
                batch, characters = [], 0
    if batch:
        yield batch


def _entry(record: ShardRecord) -> dict[str, Any]:
    files = {split: {key: getattr(record[split], key) for key in COUNTS} for split in SPLITS}
    return files | {BLOCKS: {split: record[split].blocks for split in SPLITS}}


def _record(entry: dict[str, Any], dtype: np.dtype[Any]) -> ShardRecord:
    """Return the record of an index entry. Raise KeyError, TypeError or ValueError if the entry is damaged."""
    record = {}
    for split in SPLITS:
        tokens, documents, n_bytes = (operator.index(entry[split][key]) for key in COUNTS)
        record[split] = file = ShardFile(tokens, documents, n_bytes, entry[BLOCKS][split])
        if min(tokens, documents, n_bytes) < 0 or not checksums_fit(file.blocks, file.tokens * dtype.itemsize):
            raise ValueError
    return record


def _damage(folder: Path, shard: int, record: ShardRecord, dtype: np.dtype[Any]) -> dict[Path, str]:
    damage = {}
    for split in SPLITS:
        file, size = _file(folder, split, shard), record[split].tokens * dtype.itemsize
        if not file.exists():
            damage[file] = "was missing"
        elif (found := file.stat().st_size) != size:
            damage[file] = f"had {found:,} of {size:,} bytes"
    return damage


def _file(folder: Path, split: str, shard: int) -> Path:
    return folder / f"{split}-{shard:05d}.bin"


def _tokens(folder: Path, split: str, shard: int, record: ShardRecord, dtype: np.dtype[Any]) -> FileTokens:
    tokens = FileTokens(_file(folder, split, shard), dtype, record[split].tokens, advice=ADVICE)
    tokens.set_checksums(record[split].blocks)
    return tokens


def _fingerprint(folder: Path, records: list[ShardRecord], dtype: np.dtype[Any]) -> str:
    """Return a hash of the tokens of both splits. The sizes of shards and the dtype do not change it."""
    of_splits = blake2b(digest_size=16)
    for split in SPLITS:
        content = blake2b(digest_size=16)
        for shard, record in enumerate(records):
            tokens = _tokens(folder, split, shard, record, dtype)
            for first in range(0, len(tokens), 2**20):
                content.update(tokens[first : first + 2**20].astype("<u4").data)
        of_splits.update(content.digest())
    return of_splits.hexdigest()
