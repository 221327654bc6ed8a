"""Orders the lines of metrics.jsonl by step. Compares the lines of metrics.jsonl and events.jsonl with the digests
that a checkpoint or the finish event stores."""

import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from typing import Any

from leaven import storage

NumberedLine = tuple[int, dict[str, Any]]  # number of a line, from 1, and its JSON object
EVENTS = "events"  # key of the digest of events.jsonl in the state of a checkpoint and in the finish event
MOST_RANGES = 3  # a message lists at most this many ranges of missing steps


@dataclass(frozen=True)
class LinesDigest:
    """The number and the digest of the lines of metrics.jsonl or events.jsonl, stored in a checkpoint or the finish
    event."""

    lines: int  # number of lines
    blake2b: str  # digest of the lines


def lines_digest(document: Any) -> LinesDigest | None:
    """Read a digest from JSON, such as {"lines": 5, "blake2b": "..."}. Return None if a value is missing."""
    try:
        return LinesDigest(operator.index(document["lines"]), document["blake2b"])
    except (TypeError, KeyError):
        return None


def digest(lines: Iterable[bytes]) -> "blake2b":
    """Return a hash object of some lines. Its ``update`` method adds further lines."""
    return blake2b(b"".join(lines), digest_size=16)


def in_order(lines: Iterable[NumberedLine]) -> tuple[list[NumberedLine], list[int]]:
    """Return the lines of metrics.jsonl in order of steps, and the numbers of damaged lines.

    If a step was repeated, only its last line counts. Lines without a step are left out. A line whose step does not
    fit between its neighbours is damaged.
    """
    with_step = [(number, line) for number, line in lines if isinstance(line.get("step"), int)]
    steps = [line["step"] for _, line in with_step]
    found, damaged = list[NumberedLine](), list[int]()
    for (number, line), following in zip(with_step, [*steps[1:], math.inf], strict=False):
        before = found[-1][1]["step"] if found else -math.inf
        if before < following and not before < line["step"] < following:
            damaged.append(number)
            continue
        while found and found[-1][1]["step"] >= line["step"]:
            found.pop()
        found.append((number, line))
    return found, damaged


def kept_metrics(lines: Sequence[bytes], step: int, written: LinesDigest | None) -> tuple[int, str | None]:
    """Return (count, fault): how many lines of metrics.jsonl belong to the steps up to ``step``, and what is wrong
    with them, such as "steps 3 to 5 are missing", or None.

    ``written`` is the digest of these lines when they were written. Without it, changed values are not found.
    """
    if written is not None and digest(lines[: written.lines]).hexdigest() == written.blake2b:
        return written.lines, None
    found, _ = in_order(enumerate((storage.json_object(line) or {} for line in lines), start=1))
    known = {line["step"]: number for number, line in found if 0 < line["step"] <= step}
    kept = max(known.values(), default=0)
    while kept < min(step, len(lines)) and storage.json_object(lines[kept]) is None:
        kept += 1  # a damaged line of a step that will not be repeated stays
    missing = [(low + 1, high - 1) for low, high in pairwise((0, *known, step + 1)) if high - low > 1]
    if missing:
        return kept, f"{_in_words(missing)} missing"
    return kept, None if written is None else f"its values up to step {step:,} have been changed"


def _in_words(ranges: Sequence[tuple[int, int]]) -> str:
    """Return ascending ranges of steps, each (first, last), in words, such as "steps 3 to 5 and 9 are". After
    ``MOST_RANGES`` ranges, the remaining steps are only counted, such as "steps 1, 3, 5 and 7 others are"."""
    sizes = [last - first + 1 for first, last in ranges]
    parts = [f"{first:,} to {last:,}" if first < last else f"{first:,}" for first, last in ranges[:MOST_RANGES]]
    if len(ranges) > MOST_RANGES:
        parts.append(f"{sum(sizes[MOST_RANGES:]):,} others")
    listed = ", ".join(parts[:-1]) + (" and " if len(parts) > 1 else "") + parts[-1]
    return f"step {listed} is" if sizes == [1] else f"steps {listed} are"
