"""Writes the lines of metrics.jsonl and events.jsonl, and compares them with saved digests. Does not import torch."""

import json
import operator
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from leaven import storage
from leaven.documents import sealed
from leaven.errors import InputError
from leaven.recipe.files import finite
from leaven.training.run_folder import IDENTITY, RETURNS, RunFolder

METRICS = "metrics"  # key of the digest of metrics.jsonl in the state of a checkpoint and in the finish event
EVENTS = "events"  # key of the digest of events.jsonl there


@dataclass(frozen=True)
class LinesDigest:
    """The number and the digest of the lines of metrics.jsonl or events.jsonl."""

    lines: int
    blake2b: str


class RunLines:
    """Writes the lines of metrics.jsonl and events.jsonl. A line that cannot be written is kept in memory and written
    later. If ``run.writes`` is False, nothing is written."""

    def __init__(self, run: RunFolder) -> None:
        self._run = run
        self.unwritten: str | None = None  # why lines are kept in memory; None if all are written
        self.no_room = False  # whether lines are kept because a disk is full, away or may not be written
        self._waiting: deque[tuple[Path, bytes]] = deque()  # (file, line) of the lines that are kept in memory
        # The lines that each file should have. Those of metrics.jsonl are unknown until :meth:`truncate_metrics`.
        self._lines = {run.metrics_file: _Lines(()), run.events_file: _Lines(run.lines_of(run.events_file))}

    def record(self, line: dict[str, Any]) -> None:
        """Append a line to metrics.jsonl. Numbers that are not finite become null."""
        first = not self.metrics_digest().lines and self._run.identity
        self._append(self._run.metrics_file, _json_line({IDENTITY: self._run.identity} | line if first else line))

    def event(self, event: str, **values: Any) -> None:
        """Append a line to events.jsonl, with the time in seconds since 1970."""
        line = finite({"event": event, **values, "time": round(time.time(), 3)})
        self._append(self._run.events_file, _json_line(sealed(line) if event == "finish" else line))
        if event in {*RETURNS, "start", "finish"} and self.unwritten is None:
            self.sync()  # before the run rolls back, or plan.json says that it has begun

    def sync(self) -> None:
        """Flush events and metrics to the disk, so that a power cut does not lose them."""
        for file in (self._run.events_file, self._run.metrics_file):
            with suppress(OSError):
                if self._run.writes:
                    storage.sync_file(file)

    def _append(self, path: Path, line: bytes) -> None:
        self._lines[path].add(line)
        if not self._run.writes:
            return
        self._run.require_there()
        self._waiting.append((path, line))
        self.write_waiting()

    def write_waiting(self) -> None:
        """Write the lines that are in memory. If a line cannot be written, keep it and the lines after it."""
        while self._waiting:
            path, line = self._waiting[0]
            try:
                if self.unwritten is None or not storage.ends_with(path, json.loads(line)):
                    storage.append(path, line)
            except OSError as error:
                self.unwritten = error.strerror or str(error)
                self.no_room = error.errno in storage.FULL | storage.AWAY | storage.DENIED
                return
            self._waiting.popleft()
        self.unwritten, self.no_room = None, False

    def require_written(self) -> None:
        """Write the lines that are still in memory. Raise InputError if a line cannot be written."""
        self.write_waiting()
        if self.unwritten is not None:
            count = f"{len(self._waiting):,} line{'s' * (len(self._waiting) > 1)} of metrics or events"
            raise InputError(
                f"{self._waiting[0][0]}: cannot be written: {self.unwritten}; so {count} could not be saved; remove "
                "the cause, such as a full disk, and run the same command again"
            )

    def truncate_metrics(self, step: int, written: LinesDigest | None) -> str | None:
        """Remove from metrics.jsonl the lines after ``step`` and an incomplete last line. Return the difference
        (:func:`changed_lines`) from ``written``, the checkpoint's digest of the lines up to ``step``."""
        waiting = [line for path, line in self._waiting if path == self._run.metrics_file]
        self._waiting = deque((path, line) for path, line in self._waiting if path != self._run.metrics_file)
        if not self._run.writes:
            return None
        on_disk = self._run.lines_of(self._run.metrics_file)
        lines = [*on_disk, *waiting]
        difference = changed_lines(lines, written)
        kept = written.lines if written and difference is None else _lines_up_to(step, lines)
        size = sum(map(len, lines[: min(kept, len(on_disk))]))
        if self._run.metrics_file.exists() and size < self._run.metrics_file.stat().st_size:
            with storage.open_to_write(self._run.metrics_file) as file:
                file.truncate(size)  # in place, which works even on a full disk
        self._waiting.extend((self._run.metrics_file, line) for line in lines[len(on_disk) : kept])
        self._lines[self._run.metrics_file] = _Lines(lines[:kept])
        return difference

    def metrics_digest(self) -> LinesDigest:
        """Return number and digest of all lines of metrics.jsonl, including lines still in memory."""
        return self._lines[self._run.metrics_file].written()

    def events_digest(self) -> LinesDigest:
        """Return the number and the digest of the lines of events.jsonl, including unwritten lines."""
        return self._lines[self._run.events_file].written()


class _Lines:
    def __init__(self, lines: Sequence[bytes]) -> None:
        self.count, self.digest = len(lines), blake2b(b"".join(lines), digest_size=16)

    def add(self, line: bytes) -> None:
        self.count += 1
        self.digest.update(line)

    def written(self) -> LinesDigest:
        return LinesDigest(self.count, self.digest.hexdigest())


def lines_digest(document: Any) -> LinesDigest | None:
    """Read a digest from JSON, such as {"lines": 5, "blake2b": "..."}. Return None if a value is missing."""
    try:
        return LinesDigest(operator.index(document["lines"]), document["blake2b"])
    except (TypeError, KeyError):
        return None


def changed_lines(lines: Sequence[bytes], written: LinesDigest | None, *, complete: bool = False) -> str | None:
    """Return how ``lines`` differ from those with the digest ``written``, if known. Additional lines at the end count
    as a difference only if ``complete``."""
    if written is None:
        return None
    compared = lines if complete else lines[: written.lines]
    if _Lines(compared).written() == written:
        return None
    if len(compared) != written.lines:
        return f"{len(compared):,} lines instead of {written.lines:,}"
    return f"its first {written.lines:,} lines have been changed"


def _lines_up_to(step: int, lines: Sequence[bytes]) -> int:
    """Return the number of ``lines`` up to the last line of the steps 1 to ``step``. A line that names no step, such
    as a damaged line, belongs to the step of the line before it."""
    kept = at = 0
    for number, line in enumerate(lines, start=1):
        found = (storage.json_object(line) or {}).get("step")
        at = found if isinstance(found, int) else at
        kept = number if 0 < at <= step else kept
    return kept


def _json_line(document: dict[str, Any]) -> bytes:
    return json.dumps(finite(document)).encode() + b"\n"
