"""Readers of the logs of other programs: TensorBoard event files, and offline runs of W&B (Weights &
Biases).

Readers raise :class:`LogDamaged` if the file is damaged. Another program may be writing the last record.
If this record is incomplete, readers leave it out and pass a message to their argument ``cut``.
"""

import json
import os
import re
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leaven import storage
from leaven.errors import InputError

if TYPE_CHECKING:
    from tensorboard.compat.proto.summary_pb2 import Summary

_BLOCK, _HEADER = 32768, 7  # bytes of a block and of a record's header in a W&B file
_FULL, _FIRST, _LAST = 1, 2, 4  # types of records in a W&B file
EVENTS = "tfevents"  # part of the name of every TensorBoard event file
OF_HPARAMS = "a result of add_hparams; such results are read only if their name begins with hparam/"  # for messages
_BFLOAT16 = 14  # DT_BFLOAT16 of TensorFlow


class LogDamaged(InputError):
    """Raised when a log is damaged, or incomplete because it was still being written."""

    def __init__(self, file: Path | str, at: int, why: str) -> None:
        super().__init__(f"{file} is damaged at byte {at:,}: {why}; remove the file, or copy it again")


@dataclass(frozen=True)
class EventFile:
    """A TensorBoard event file, read for one of its tags."""

    path: Path
    tags: set[str]  # of all numbers and tensors
    points: list[tuple[int, Any]]  # (step, value) for each value of the tag
    times: list[float]  # when each of ``points`` was written, in seconds since 1970
    of_hparams: bool  # whether ``SummaryWriter.add_hparams`` of PyTorch wrote it: it has results, and no loss curve
    left_out: bool  # whether it does not count because its results, also one named as the loss, may be placeholders
    cut: str  # a message if the file ends within a record, or else ""


def read_event_file(file: Path, tag: str) -> EventFile:
    """Return all tags of a TensorBoard event file, and the values of ``tag``. If a tensor is not a scalar, its value
    is a text with its shape.

    A file of ``add_hparams`` begins with a description of an experiment. The description names all results in the
    file, and each result is there once. ``left_out`` is true for such a file if ``tag`` does not begin with hparam/.
    """
    from google.protobuf.message import DecodeError
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    tags, points, times, cut = set[str](), list[tuple[int, Any]](), list[float](), list[str]()
    results, of_hparams = set[str](), False
    for at, record in _tensorboard_records(file, cut.append):
        try:
            event = Event.FromString(record)
            for value in event.summary.value:
                if not tags and value.tag == "_hparams_/experiment":
                    data = HParamsPluginData.FromString(value.metadata.plugin_data.content)
                    results, of_hparams = {metric.name.tag for metric in data.experiment.metric_infos}, True
                if value.WhichOneof("value") in {"simple_value", "tensor"}:
                    of_hparams = of_hparams and value.tag in results - tags
                    tags.add(value.tag)
                    if value.tag == tag:
                        points.append((event.step, _scalar(value)))
                        times.append(event.wall_time)
        except (DecodeError, ValueError) as error:
            raise LogDamaged(file, at, f"the record cannot be read ({error})") from None
    left_out = of_hparams and not tag.startswith("hparam/")
    return EventFile(file, tags, points, times, of_hparams, left_out, "".join(cut))


def read_event_files(files: Iterable[Path], tag: str) -> list[EventFile]:
    """Return the TensorBoard files that are not ignored (``EventFile.left_out``), sorted by the times and counters in
    their names."""
    found = [read_event_file(file, tag) for file in sorted(files, key=by_event_name)]
    return [file for file in found if not file.left_out]


def is_only_result(folder: Path, tag: str) -> bool:
    """Return whether an ignored TensorBoard file (``EventFile.left_out``) in or below ``folder`` has ``tag``."""
    files = (read_event_file(file, tag) for file in folder.rglob(f"*{EVENTS}*"))
    return any(file.left_out and file.points for file in files)


def by_event_name(file: Path) -> tuple[list[str | int], Path]:
    """Return a sort key for TensorBoard event files: the numbers in their names, such as the time and a counter."""
    parts = re.split(r"([0-9]+)", file.name)
    return [int(part) if part.isdecimal() else part for part in parts], file


def _tensorboard_records(file: Path, cut: Callable[[str], object]) -> Iterator[tuple[int, bytes]]:
    """Yield (position of the first byte, content) for each record of a TensorBoard event file.

    A record has four parts: length (8 bytes), checksum of the length (4), content, checksum of the content (4). A
    crash can fill the end of the file with zeros. A record that ends in such zeros is incomplete, not damaged.
    """
    from tensorboard.summary.writer.record_writer import masked_crc32c

    with storage.open_file(file) as log:
        at, end = 0, os.fstat(log.fileno()).st_size
        while at < end:
            header = log.read(12)
            size, after = int.from_bytes(header[:8], "little"), at + len(header)
            wrong = len(header) == 12 and masked_crc32c(header[:8]) != int.from_bytes(header[8:], "little")
            content = b""
            if not wrong and (after := at + 12 + size + 4) <= end:
                content = log.read(size)
                wrong = masked_crc32c(content) != int.from_bytes(log.read(4), "little")
            if wrong:
                log.seek(at)
                written = at + len(log.read().rstrip(b"\0"))
                if written >= after:
                    raise LogDamaged(file, at, "a checksum is wrong")
            if wrong or after > end or len(header) < 12:
                cut(f"{file.name} is cut within the record at byte {at:,}")
                return
            yield at, content
            at = after


def _scalar(value: "Summary.Value") -> Any:
    """Return a value's number, or its tensor's shape as text. Raise ValueError if the tensor cannot be read."""
    from tensorboard.util.tensor_util import make_ndarray

    if value.WhichOneof("value") == "simple_value":
        return value.simple_value
    shape = [dimension.size for dimension in value.tensor.tensor_shape.dim]
    if any(size < 0 for size in shape):
        raise ValueError(f"a tensor has the shape {shape[:8]}, with a negative size")
    # Check the shape before the tensor is made: a small record may state a shape that does not fit into memory.
    if any(size != 1 for size in shape):
        return f"a tensor of shape {shape[:8]}"
    try:
        if value.tensor.dtype == _BFLOAT16:  # the upper half of an fp32 number; make_ndarray does not read it
            upper = value.tensor.tensor_content or struct.pack("<H", value.tensor.half_val[0])
            return struct.unpack("<f", b"\0\0" + upper)[0]
        return make_ndarray(value.tensor).item()
    except (ArithmeticError, KeyError, IndexError, TypeError, struct.error):
        raise ValueError(f"a tensor has the type {value.tensor.dtype}, which cannot be read") from None


def wandb_rows(
    file: Path, cut: Callable[[str], object] = lambda message: None
) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield (step, values by name) for each history row in the file of an offline W&B run."""
    from google.protobuf.message import DecodeError

    for at, record in log_records(storage.read(file), str(file), cut):
        try:
            items = _wandb_record().FromString(record).history.item
            row = {
                ".".join([item.key] if item.key else item.nested_key): json.loads(item.value_json) for item in items
            }
        except (DecodeError, ValueError, RecursionError) as error:
            why = "a value is nested too deeply" if isinstance(error, RecursionError) else str(error)
            raise LogDamaged(file, at, f"the record cannot be read ({why})") from None
        if row:
            yield row.get("_step"), row


@cache
def _wandb_record() -> Any:
    """Return the protobuf class of a W&B record, with only the fields that leaven reads. Source:
    https://github.com/wandb/wandb/blob/main/wandb/proto/wandb_internal.proto."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format

    text = """
        name: "leaven_wandb.proto" package: "leaven_wandb" syntax: "proto3"
        message_type { name: "Record"
          field { name: "history" number: 2 type: TYPE_MESSAGE label: LABEL_OPTIONAL type_name: "History" } }
        message_type { name: "History"
          field { name: "item" number: 1 type: TYPE_MESSAGE label: LABEL_REPEATED type_name: "Item" } }
        message_type { name: "Item"
          field { name: "key" number: 1 type: TYPE_STRING label: LABEL_OPTIONAL }
          field { name: "nested_key" number: 2 type: TYPE_STRING label: LABEL_REPEATED }
          field { name: "value_json" number: 16 type: TYPE_STRING label: LABEL_OPTIONAL } }
    """
    pool = descriptor_pool.DescriptorPool()
    pool.Add(text_format.Parse(text, descriptor_pb2.FileDescriptorProto()))
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("leaven_wandb.Record"))


def log_records(
    log: bytes, name: str, cut: Callable[[str], object] = lambda message: None
) -> Iterator[tuple[int, bytes]]:
    """Yield (position of the first byte, content) for each record of a log in LevelDB's format, which W&B uses.

    Source: https://github.com/google/leveldb/blob/main/doc/log_format.md. In W&B, the file begins with a header of 7
    bytes, and the checksums are plain CRC-32. ``name`` is the name of the log in messages.
    """
    at, first, parts = _HEADER, _HEADER, list[bytes]()
    while at < len(log):
        if _BLOCK - at % _BLOCK < _HEADER:  # the rest of a block is padding
            at += _BLOCK - at % _BLOCK
            continue
        header, begin = log[at : at + _HEADER], at + _HEADER
        checksum, size, kind = struct.unpack("<IHB", header.ljust(_HEADER, b"\0"))
        if begin + size > len(log):
            break
        content = log[begin : begin + size]
        if zlib.crc32(content, zlib.crc32(bytes([kind]))) != checksum:
            if len(log.rstrip(b"\0")) < max(begin + size, at + 1):  # a crash may leave zeros at the end of a file
                break
            raise LogDamaged(name, at, "a checksum is wrong")
        if kind in {_FULL, _FIRST}:
            first, parts = at, []
        parts.append(content)
        at = begin + size
        if kind in {_FULL, _LAST}:
            yield first, b"".join(parts)
            first, parts = at, []
    if at < len(log) or parts:
        cut(f"{Path(name).name} is cut within the record at byte {first if parts else at:,}")
