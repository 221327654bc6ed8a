"""Read what other programs have logged: TensorBoard event files, and offline runs of W&B (Weights & Biases).

Files are read while they are written, so an incomplete last record is ignored.
"""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_BLOCK, _HEADER = 32768, 7  # bytes of a block and of a record's header in the log of W&B
_FULL, _FIRST, _LAST = 1, 2, 4  # types of records there


def tensorboard_rows(file: Path, tag: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (step, values by tag) of everything in an event file of TensorBoard. Values of other tags are None."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    from tensorboard.util.tensor_util import make_ndarray

    for event in EventFileLoader(str(file)).Load():
        for value in event.summary.value:
            if value.HasField("tensor"):
                yield event.step, {value.tag: make_ndarray(value.tensor).tolist() if value.tag == tag else None}


def wandb_rows(file: Path) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield (step, values by name) of everything that was logged at once, from the file of an offline run of W&B."""
    for record in log_records(file.read_bytes()):
        for field, history in _fields(record):
            if field == 2 and isinstance(history, bytes):  # Record.history
                row = dict(
                    _item(item) for number, item in _fields(history) if number == 1 and isinstance(item, bytes)
                )
                yield row.get("_step"), row


def _item(item: bytes) -> tuple[str, Any]:
    """Return name and value of a HistoryItem, whose nested keys are joined by dots."""
    keys, value = [], None
    for field, content in _fields(item):
        if isinstance(content, bytes):
            if field == 16:  # value_json
                value = json.loads(content)
            else:  # key or nested_key
                keys.append(content.decode())
    return ".".join(keys), value


def log_records(log: bytes) -> Iterator[bytes]:
    """Yield the records of a log in LevelDB's format, which W&B uses.

    Source: https://github.com/google/leveldb/blob/main/doc/log_format.md. W&B writes a header of 7 bytes first.
    """
    at, parts = _HEADER, b""
    while at + _HEADER <= len(log):
        if _BLOCK - at % _BLOCK < _HEADER:  # the rest of a block is padding
            at += _BLOCK - at % _BLOCK
            continue
        _, size, kind = struct.unpack_from("<IHB", log, at)
        at += _HEADER
        if at + size > len(log):
            return
        parts = log[at : at + size] if kind in {_FULL, _FIRST} else parts + log[at : at + size]
        at += size
        if kind in {_FULL, _LAST}:
            yield parts


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield (number, content) of the fields of a protobuf message.

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
