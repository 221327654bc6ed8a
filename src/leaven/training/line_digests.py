"""Compares the lines of metrics.jsonl and events.jsonl with their digests in a checkpoint or in the finish event."""

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from typing import Any

from leaven import storage

EVENTS = "events"  # key of the digest of events.jsonl in the state of a checkpoint and in the finish event
MOST_RANGES = 3  # a message lists at most this many ranges of missing steps


@dataclass(frozen=True)
class LinesDigest:
    """The number and digest of lines of metrics.jsonl or events.jsonl, as a checkpoint or the finish event stores
    them."""

    lines: int  # number of lines
    blake2b: str  # digest of the lines


def lines_digest(document: Any) -> LinesDigest | None:
    """Return the digest in a JSON document, or None if it has none."""
    try:
        return LinesDigest(operator.index(document["lines"]), document["blake2b"])
    except (TypeError, KeyError):
        return None


def digest(lines: Iterable[bytes]) -> "blake2b":
    """Return a hash object of some lines. Its ``update`` method adds more."""
    return blake2b(b"".join(lines), digest_size=16)


def kept_metrics(lines: Sequence[bytes], step: int, written: LinesDigest | None) -> tuple[int, str | None]:
    """Return how many lines of metrics.jsonl belong to the steps up to ``step``, and what is wrong with them, such as
    "steps 3 to 5 are missing", or None.

    ``written`` is the digest of these lines when they were written. Without it, only missing steps are found.
    """
    if written is not None and digest(lines[: written.lines]).hexdigest() == written.blake2b:
        return written.lines, None
    documents = [storage.json_object(line) or {} for line in lines]
    steps = [each["step"] if isinstance(each.get("step"), int) else None for each in documents]
    # Keep the first n lines. A kept line of a step after ``step`` is a contradiction, and so is a removed line of a
    # step up to ``step``. Choose the n with the fewest: then a damaged step number removes no other lines.
    contradictions = [sum(found is not None and found <= step for found in steps)]
    for found in steps:
        contradictions.append(contradictions[-1] + (0 if found is None else 1 if found > step else -1))
    kept = min(range(len(lines) + 1), key=lambda cut: (contradictions[cut], cut != step, cut))
    known = sorted({found for found in steps[:kept] if found is not None and 0 < found <= step})
    missing = [(low + 1, high - 1) for low, high in pairwise((0, *known, step + 1)) if high - low > 1]
    if missing:
        return kept, f"{_in_words(missing)} missing"
    return kept, None if written is None else f"its values up to step {step:,} have been changed"


def _in_words(ranges: Sequence[tuple[int, int]]) -> str:
    """Return ascending ranges of steps, each (first, last), in words, such as "steps 3 to 5 and 9 are". Only the
    first ``MOST_RANGES`` ranges are named. Of the others, the text has the number of steps."""
    sizes = [last - first + 1 for first, last in ranges]
    parts = [f"{first:,} to {last:,}" if first < last else f"{first:,}" for first, last in ranges[:MOST_RANGES]]
    if len(ranges) > MOST_RANGES:
        parts.append(f"{sum(sizes[MOST_RANGES:]):,} others")
    listed = ", ".join(parts[:-1]) + (" and " if len(parts) > 1 else "") + parts[-1]
    return f"step {listed} is" if sizes == [1] else f"steps {listed} are"
