"""Store token ids on disk in memory-mapped shards, with an index of their sizes and checksums.

A shard contains the tokens of `SHARD_BATCHES` batches of text in two files, one for training and one for validation.
Each file is written under a temporary name, synced and renamed; then a line is added to ``shards.jsonl``. So a
process that is killed loses only the shard that it was writing. ``index.json`` is written last; a folder without it
is unfinished.
"""

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from leaven import storage
from leaven.data.corpus import Corpus, Meter
from leaven.data.pool import PieceBatch, encoding, processes_for
from leaven.data.tokenizer import Encoded, Encoder, pieces

SPLITS = ("train", "validation")
BATCH_CHARACTERS = 2**22
SHARD_BATCHES = 32


class ShardedTokens:
    """Concatenated shards, which can be indexed with slices of step 1. A slice within one shard is a view of the
    memory-mapped file."""

    def __init__(self, shards: list[NDArray[Any]]) -> None:
        self.shards = shards
        self._starts = np.cumsum([0, *map(len, shards)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: slice, /) -> NDArray[Any]:
        start, stop, step = index.indices(len(self))
        assert step == 1
        first = int(np.searchsorted(self._starts, start, side="right")) - 1
        parts = []
        for shard, offset in zip(self.shards[first:], self._starts[first:], strict=False):
            if offset >= stop:
                break
            parts.append(shard[max(start - offset, 0) : stop - offset])
        return parts[0] if len(parts) == 1 else np.concatenate(parts or [np.zeros(0, dtype=np.uint16)])


@dataclass(frozen=True)
class ShardFile:
    """The record of one file of a shard."""

    tokens: int
    documents: int  # number of documents that end in this file
    bytes: int  # of UTF-8 text
    blake2b: str  # checksum of the file


@dataclass(frozen=True)
class Shards:
    """The tokens of a source."""

    train: ShardedTokens
    validation: ShardedTokens
    train_bytes: int  # of UTF-8 text
    validation_bytes: int
    fingerprint: str  # hash of the tokens of both splits; it does not depend on the size of shards
    notes: tuple[str, ...]  # lines about files that were rebuilt


def shards(folder: Path, corpus: Corpus, encoder: Encoder, meter: Meter, processes: int | None) -> Shards:
    """Return the tokens of a corpus from the shards in ``folder``. Shards that are missing or damaged are first
    encoded and written.

    Raises:
        OSError: if the folder cannot be written; finished shards are kept.
    """
    found, _ = _open(folder, encoder.dtype)
    if found is not None:
        return found
    folder.mkdir(parents=True, exist_ok=True)
    with storage.lock(folder / ".lock"):
        found, damage = _open(folder, encoder.dtype)
        if found is None:
            damage |= _build(folder, corpus, encoder, meter, processes or processes_for(corpus.n_bytes))
            found, _ = _open(folder, encoder.dtype)
    assert found is not None
    return replace(found, notes=tuple(f"{file} {why}; it was rebuilt" for file, why in damage.items()))


def _open(folder: Path, dtype: np.dtype[Any]) -> tuple[Shards | None, dict[Path, str]]:
    """Open the shards in a folder. Return them, and for each damaged file a phrase that says what is wrong with it.

    The shards are None if the folder is unfinished or damaged.
    """
    path = folder / "index.json"
    try:
        index = json.loads(path.read_bytes())
        written = path.stat().st_mtime_ns
        records = [{split: ShardFile(**record[split]) for split in SPLITS} for record in index["shards"]]
        fingerprint = index["fingerprint"]
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None, {}
    damage, newest = {}, 0
    for number, record in enumerate(records):
        for split in SPLITS:
            file = _file(folder, split, number)
            touched = file.stat().st_mtime_ns if file.exists() else 0
            # Sizes are always compared. Checksums are compared only for files modified after the index was written.
            if why := _fault(file, record[split], dtype, checksum=touched >= written):
                damage[file] = why
            newest = max(newest, touched)
    if damage:
        return None, damage
    if newest >= written:  # modified after the index, but the checksums match
        with suppress(PermissionError):  # the cache belongs to another user
            os.utime(path, ns=(newest + 1, newest + 1))
    train, validation = (
        ShardedTokens([_map(_file(folder, split, n), record[split], dtype) for n, record in enumerate(records)])
        for split in SPLITS
    )
    sizes = {split: sum(record[split].bytes for record in records) for split in SPLITS}
    return Shards(train, validation, sizes["train"], sizes["validation"], fingerprint, ()), {}


def _fault(file: Path, record: ShardFile, dtype: np.dtype[Any], *, checksum: bool) -> str:
    """Return a phrase that says what is wrong with a file of a shard, or "" if nothing is wrong."""
    size = record.tokens * dtype.itemsize
    if not file.exists():
        return "was missing"
    if (found := file.stat().st_size) != size:
        return f"had {found:,} of {size:,} bytes"
    if checksum and _checksum(_map(file, record, dtype)) != record.blake2b:
        return "had a wrong checksum"
    return ""


def _build(folder: Path, corpus: Corpus, encoder: Encoder, meter: Meter, processes: int) -> dict[Path, str]:
    """Write the missing shards of a folder, and then its index. The caller must hold the lock of the folder.

    Return the files that were complete before and are damaged now, each with a phrase that says what is wrong.
    """
    records, damage = _finished(folder, encoder.dtype)
    for remains in (*folder.glob(".*.tmp"), folder / "index.json"):
        remains.unlink(missing_ok=True)
    count = 0

    def work() -> Iterator[tuple[int, PieceBatch]]:
        nonlocal count
        for number, batch in enumerate(_batches(corpus)):
            shard = number // SHARD_BATCHES
            count = shard + 1
            if shard in records:
                meter.advance(sum(len(piece.text.encode()) for piece in batch))
            else:
                yield shard, batch

    with encoding(encoder, processes) as encode:
        for shard, done in groupby(encode(work()), key=lambda result: result[0]):
            with ExitStack() as files:
                written = {
                    split: _ShardWriter(files.enter_context(storage.replacing(_file(folder, split, shard))))
                    for split in SPLITS
                }
                for _, sides in done:
                    for split, encoded in zip(SPLITS, sides, strict=True):
                        written[split].write(encoded)
                    meter.advance(sum(encoded.bytes for encoded in sides))
            records[shard] = {split: written[split].record() for split in SPLITS}
            line = {"shard": shard} | {split: asdict(records[shard][split]) for split in SPLITS}
            storage.append_json(folder / "shards.jsonl", line, sync=True)
    parts = [
        (split, _map(_file(folder, split, shard), records[shard][split], encoder.dtype))
        for split in SPLITS
        for shard in range(count)
    ]
    index = {
        "source": corpus.source,
        "vocab_size": encoder.vocab_size,
        "end_of_text": encoder.end_of_text,
        "dtype": encoder.dtype.name,
        "fingerprint": _fingerprint(parts),
        "shards": [{split: asdict(records[shard][split]) for split in SPLITS} for shard in range(count)],
    }
    storage.write(folder / "index.json", json.dumps(index, indent=1).encode())
    return damage


def _finished(folder: Path, dtype: np.dtype[Any]) -> tuple[dict[int, dict[str, ShardFile]], dict[Path, str]]:
    """Find the shards that are complete. Return their records by shard number, and the damaged files, each with a
    phrase that says what is wrong."""
    records: dict[int, dict[str, ShardFile]] = {}
    for entry in storage.read_json_lines(folder / "shards.jsonl").documents:
        with suppress(KeyError, TypeError):
            records[entry["shard"]] = {split: ShardFile(**entry[split]) for split in SPLITS}
    damage = {}
    for shard, record in list(records.items()):
        for split in SPLITS:
            file = _file(folder, split, shard)
            if why := _fault(file, record[split], dtype, checksum=True):
                damage[file] = why
                records.pop(shard, None)
    return records, damage


class _ShardWriter:
    """A writer of one file of a shard. It also counts and hashes what it writes."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._hash = blake2b(digest_size=16)
        self._tokens = self._documents = self._bytes = 0

    def write(self, encoded: Encoded) -> None:
        raw = encoded.ids.tobytes()
        self._file.write(raw)
        self._hash.update(raw)
        self._tokens += len(encoded.ids)
        self._documents += encoded.documents
        self._bytes += encoded.bytes

    def record(self) -> ShardFile:
        return ShardFile(self._tokens, self._documents, self._bytes, self._hash.hexdigest())


def _batches(corpus: Corpus) -> Iterator[PieceBatch]:
    """Yield the pieces of a corpus in batches that are large enough to keep all cores busy."""
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


def _file(folder: Path, split: str, shard: int) -> Path:
    return folder / f"{split}-{shard:05d}.bin"


def _map(file: Path, record: ShardFile, dtype: np.dtype[Any]) -> NDArray[Any]:
    # An empty file cannot be mapped.
    return np.memmap(file, dtype=dtype, mode="r") if record.tokens else np.zeros(0, dtype)


def _checksum(tokens: NDArray[Any]) -> str:
    return blake2b(tokens.data, digest_size=16).hexdigest()


def _fingerprint(parts: list[tuple[str, NDArray[Any]]]) -> str:
    """Return a hash of the tokens of both splits. The tokens are hashed as one sequence of 32-bit numbers for each
    split, so it does not matter where they are cut into shards."""
    hashes = {split: blake2b(digest_size=16) for split in SPLITS}
    for split, tokens in parts:
        for first in range(0, len(tokens), 2**20):
            hashes[split].update(tokens[first : first + 2**20].astype("<u4").data)
    return blake2b(b"".join(hashes[split].digest() for split in SPLITS), digest_size=16).hexdigest()
