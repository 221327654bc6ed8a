"""Writes the lines of metrics.jsonl and events.jsonl, and compares them with saved digests. Does not import torch."""

import json
import operator
import time
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from typing import Any

from leaven import storage
from leaven.documents import sealed
from leaven.errors import InputError
from leaven.recipe.files import finite
from leaven.training.run_folder import IDENTITY, RETURNS, RunFolder, in_order

EVENTS = "events"  # key of the digest of events.jsonl in the state of a checkpoint and in the finish event
_MISSING = "missing"  # the last word of a message about missing steps
MOST_RANGES = 3  # a message lists at most this many ranges of missing steps


@dataclass(frozen=True)
class LinesDigest:
    """The number and the digest of the lines of metrics.jsonl or events.jsonl."""

    lines: int  # number of lines
    blake2b: str  # digest of the lines


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

    def truncate_metrics(self, step: int, written: LinesDigest | None = None) -> str | None:
        """Remove from metrics.jsonl the lines after ``step``, whose steps are trained again, and a torn last line.

        Return what is wrong with the remaining lines, such as missing steps (see :func:`kept_metrics`), or None.
        """
        waiting = self._waiting_for(self._run.metrics_file)
        self._waiting = deque((path, line) for path, line in self._waiting if path != self._run.metrics_file)
        if not self._run.writes:
            return None
        on_disk = self._run.lines_of(self._run.metrics_file)
        lines = [*on_disk, *waiting]
        kept, difference = kept_metrics(lines, step, written)
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

    def changes(self, step: int) -> dict[str, str]:
        """Return {file name: how its lines up to ``step`` differ from the lines that the run wrote}. Each change is
        returned only once. A file is read only if its size is wrong."""
        found: dict[str, str] = {}
        for path, lines in self._lines.items() if self._run.writes else ():
            waiting = self._waiting_for(path)
            with suppress(OSError, InputError):  # the disk is away
                if (path.stat().st_size if path.exists() else 0) + sum(map(len, waiting)) == lines.size:
                    continue
                there, written = [*self._run.lines_of(path), *waiting], lines.written()
                metrics = path == self._run.metrics_file
                why = kept_metrics(there, step, written)[1] if metrics else changed_events(there, written)
                if why is not None:
                    found[path.name], lines.size = why, sum(map(len, there))
        return found

    def _waiting_for(self, path: Path) -> list[bytes]:
        return [line for each, line in self._waiting if each == path]


class _Lines:
    """The number, size and digest of the lines that a file should have."""

    def __init__(self, lines: Sequence[bytes]) -> None:
        self.count, self.size, self.digest = len(lines), sum(map(len, lines)), digest(lines)

    def add(self, line: bytes) -> None:
        self.count, self.size = self.count + 1, self.size + len(line)
        self.digest.update(line)

    def written(self) -> LinesDigest:
        return LinesDigest(self.count, self.digest.hexdigest())


def lines_digest(document: Any) -> LinesDigest | None:
    """Read a digest from JSON, such as {"lines": 5, "blake2b": "..."}. Return None if a value is missing."""
    try:
        return LinesDigest(operator.index(document["lines"]), document["blake2b"])
    except (TypeError, KeyError):
        return None


def digest(lines: Iterable[bytes]) -> "blake2b":
    """Return a hash object of some lines. Its ``update`` method adds further lines."""
    return blake2b(b"".join(lines), digest_size=16)


def kept_metrics(lines: Sequence[bytes], step: int, written: LinesDigest | None) -> tuple[int, str | None]:
    """Return (count, fault). ``count`` is how many of the first ``lines`` belong to steps up to ``step``. ``fault``
    says what is wrong with these lines, such as "steps 3 to 5 are missing". It is None if nothing is wrong.

    ``written``: the count and digest that these lines had when they were written, if known.
    """
    if written is not None and digest(lines[: written.lines]).hexdigest() == written.blake2b:
        return written.lines, None
    found, _ = in_order(enumerate((storage.json_object(line) or {} for line in lines), start=1))
    known = {line["step"]: number for number, line in found if 0 < line["step"] <= step}
    kept = max(known.values(), default=0)
    while kept < min(step, len(lines)) and storage.json_object(lines[kept]) is None:
        kept += 1  # a damaged line of a step that will not be repeated stays
    if (missing := missing_steps(known, step)) is not None:
        return kept, missing
    return kept, None if written is None else f"its values up to step {step:,} have been changed"


def missing_steps(known: Iterable[int], last: int) -> str | None:
    """Return which steps from 1 to ``last`` are not ``known``, such as "steps 3 to 5 are missing", or None.

    ``known`` has ascending steps from 1 to ``last``.
    """
    missing = [(low + 1, high - 1) for low, high in pairwise((0, *known, last + 1)) if high - low > 1]
    return f"{_in_words(missing)} {_MISSING}" if missing else None


def is_missing_steps(fault: str) -> bool:
    """Return whether a fault of metrics.jsonl comes from :func:`missing_steps`."""
    return fault.endswith(_MISSING)


def changed_events(lines: Sequence[bytes], written: LinesDigest | None) -> str | None:
    """Return what is wrong if ``lines`` of events.jsonl do not begin with the ``written`` lines, or None.

    Without ``written``, only an empty file is wrong.
    """
    if not lines:
        return "its lines are missing"
    if written is None or digest(lines[: written.lines]).hexdigest() == written.blake2b:
        return None
    if len(lines) < written.lines:
        return f"it had {written.lines:,} lines and now has {len(lines):,}"
    return f"its first {written.lines:,} lines have been changed"


def _in_words(ranges: Sequence[tuple[int, int]]) -> str:
    """Return ascending (first, last) ranges of steps in words, such as "steps 3 to 5 and 9 are"."""
    sizes = [last - first + 1 for first, last in ranges]
    parts = [f"{first:,} to {last:,}" if first < last else f"{first:,}" for first, last in ranges[:MOST_RANGES]]
    if len(ranges) > MOST_RANGES:
        parts.append(f"{sum(sizes[MOST_RANGES:]):,} others")
    listed = ", ".join(parts[:-1]) + (" and " if len(parts) > 1 else "") + parts[-1]
    return f"step {listed} is" if sizes == [1] else f"steps {listed} are"


def _json_line(document: dict[str, Any]) -> bytes:
    return json.dumps(finite(document)).encode() + b"\n"
