"""Readers of the logs of other programs: TensorBoard event files, and offline runs of W&B (Weights & Biases).

An incomplete last record is ignored, because another program may be writing the file.
"""

import json
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from leaven import storage
from leaven.errors import InputError

_BLOCK, _HEADER = 32768, 7  # bytes of a block and of a record's header in a W&B file
_FULL, _FIRST, _LAST = 1, 2, 4  # types of records in a W&B file


def tensorboard_rows(file: Path, tag: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (step, {tag of the value: value}) for each value in a TensorBoard event file. If the tag of a value is
    not ``tag``, yield None in place of the value."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    from tensorboard.util.tensor_util import make_ndarray

    for event in EventFileLoader(str(file)).Load():
        for value in event.summary.value:
            if value.HasField("tensor"):
                yield event.step, {value.tag: make_ndarray(value.tensor).tolist() if value.tag == tag else None}


def wandb_rows(file: Path) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield (step, values by name) for each row of the history in the file of an offline run of W&B.

    Raises:
        InputError: if the file is damaged.
    """
    for record in log_records(storage.read(file), str(file)):
        try:
            histories = [_row(content) for field, content in _fields(record) if field == 2]  # Record.history
        except (ValueError, IndexError, RecursionError) as error:
            why = "a value is nested too deeply" if isinstance(error, RecursionError) else str(error)
            raise InputError(
                f"{file} has a record that cannot be read ({why}); remove it, or copy it again"
            ) from None
        for row in histories:
            yield row.get("_step"), row


def _row(history: int | bytes) -> dict[str, Any]:
    """Return the values of a HistoryRecord by name."""
    items = _fields(history) if isinstance(history, bytes) else ()
    return dict(_item(item) for number, item in items if number == 1 and isinstance(item, bytes))


def _item(item: bytes) -> tuple[str, Any]:
    """Return the name and value of a HistoryItem. The name joins nested keys with dots."""
    keys, value = [], None
    for field, content in _fields(item):
        if isinstance(content, bytes):
            if field == 16:  # value_json
                value = json.loads(content)
            else:  # key or nested_key
                keys.append(content.decode())
    return ".".join(keys), value


def log_records(log: bytes, name: str) -> Iterator[bytes]:
    """Yield the records of a log in LevelDB's format, which W&B uses. ``name`` is the file name, for messages.

    Source: https://github.com/google/leveldb/blob/main/doc/log_format.md. W&B differs in two points: the file begins
    with a header of 7 bytes, and the checksums are plain CRC-32.

    Raises:
        InputError: if a checksum is wrong.
    """
    at, parts = _HEADER, b""
    while at + _HEADER <= len(log):
        if _BLOCK - at % _BLOCK < _HEADER:  # the rest of a block is padding
            at += _BLOCK - at % _BLOCK
            continue
        checksum, size, kind = struct.unpack_from("<IHB", log, at)
        at += _HEADER
        content = log[at : at + size]
        if len(content) < size:
            return
        if zlib.crc32(content, zlib.crc32(bytes([kind]))) != checksum:
            raise InputError(f"{name} is damaged at byte {at - _HEADER:,}; remove it, or copy it again")
        parts = content if kind in {_FULL, _FIRST} else parts + content
        at += size
        if kind in {_FULL, _LAST}:
            yield parts


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield (field number, content) for each field of a protobuf message.

    Source: https://protobuf.dev/programming-guides/encoding.
    """
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at, value, shift = at + 1, value | (byte & 0x7F) << shift, shift + 7
            if byte < 0x80:
                return value

    while at < len(message):
        number, kind = divmod(varint(), 8)
        if kind == 0:
            yield number, varint()
            continue
        size = {1: 8, 5: 4}.get(kind) or varint()
        yield number, message[at : at + size]
        at += size
