"""Read the losses that a command reports: in text, JSON lines, TensorBoard event files, or an offline run of W&B
(Weights & Biases). Files are read while they are written, so an incomplete last line or record is ignored."""

import json
import math
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from leaven import storage
from leaven.errors import InputError
from leaven.training.outcome import Curve
from leaven.tuning.command import LossSource

Losses = Iterator[tuple[int | None, float]]  # (step, loss) in the order in which they were written
MOST_NAMES = 20  # names of values that a message lists
_BLOCK, _HEADER = 32768, 7  # bytes of a block and of a record's header in the log of W&B
_FULL, _FIRST, _LAST = 1, 2, 4  # types of records there


def read_losses(source: LossSource, where: Path, *, complete: bool) -> Curve:
    """Return the losses that a command has reported, by increasing step.

    The steps are multiplied by ``tokens_per_step`` if it is known. Losses without steps are numbered from 1. If a
    step has several losses, the last one counts, or the first one that is not finite. The result is empty if there
    is no loss.

    Args:
        where: the file or folder of the source.
        complete: whether the command has ended. Otherwise the last line of a text is ignored if it has no end.

    Raises:
        InputError: if a loss or its step is not a number, or the file cannot be read after the command has ended.
    """
    if source.pattern is not None:
        found = _of_text(re.compile(source.expression, re.MULTILINE), where, complete)
    else:
        found = _of_rows(source, where)
    times, curve = source.tokens_per_step or 1, dict[int, float]()
    try:
        for number, (step, loss) in enumerate(found, 1):
            at = times * (number if step is None else step)
            before = curve.pop(at, loss)  # the last loss of a step counts, at its place in the order
            curve[at] = loss if math.isfinite(before) else before
    except OSError as error:
        if not complete:
            return ()
        raise InputError(f"{where}: {error.strerror}; correct the path of the losses in the command file") from None
    return tuple(curve.items())


def why_none(source: LossSource, where: Path) -> str:
    """Return the reason why a command that has ended has no losses."""
    keys = set[str]() if source.key is None else {key for _, row in _rows(source, where) for key in row}
    if source.key in keys:
        return f"reported no loss: every {source.key} in {where} is null"
    names = ", ".join(sorted(keys)[:MOST_NAMES])
    return f"reported no loss: loss.key = {source.key!r} is none of {names}" if names else "reported no loss"


def _of_text(pattern: re.Pattern[str], file: Path, complete: bool) -> Losses:
    text = file.read_bytes().decode(errors="replace").replace("\r", "\n") if file.is_file() else ""
    for found in pattern.finditer(text if complete else text[: text.rfind("\n") + 1]):
        step = found.groupdict().get("step")
        if found["loss"] is not None:  # the pattern may have an alternative without a loss
            yield int(re.sub("[,_]", "", step)) if step else None, float(found["loss"])


def _of_rows(source: LossSource, where: Path) -> Losses:
    for step, row in _rows(source, where):
        if (loss := row.get(str(source.key))) is None:  # loggers write null for a value that a step does not have
            continue
        if source.step is not None and not (isinstance(step, int | float) and math.isfinite(step)):
            raise InputError(
                f"{where}: a line with {source.key} has the step {source.step} = {step!r:.60}, not a number; name "
                f"another one of {', '.join(list(row)[:MOST_NAMES])} with loss.step"
            )
        try:
            yield step if step is None else int(step), float(loss)
        except (TypeError, ValueError, OverflowError):
            raise InputError(
                f"{where}: {source.key} is {loss!r:.60}, not a number; name another key with loss.key"
            ) from None


def _rows(source: LossSource, where: Path) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield (step, values by name) of everything that was logged at once."""
    if source.jsonl is not None:
        return ((line.get(source.step or ""), line) for line in storage.read_json_lines(where).documents)
    return _of_tensorboard(str(source.key), where) if source.tensorboard is not None else _of_wandb(where)


def _of_tensorboard(key: str, folder: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    from tensorboard.util.tensor_util import make_ndarray

    for file in sorted(folder.rglob("*tfevents*")):
        for event in EventFileLoader(str(file)).Load():
            for value in event.summary.value:
                if value.HasField("tensor"):
                    yield event.step, {value.tag: make_ndarray(value.tensor).tolist() if value.tag == key else None}


def _of_wandb(folder: Path) -> Iterator[tuple[Any, dict[str, Any]]]:
    for file in sorted(folder.rglob("*.wandb")):
        for record in log_records(file.read_bytes()):
            for field, history in _fields(record):
                if field != 2 or not isinstance(history, bytes):  # Record.history
                    continue
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
