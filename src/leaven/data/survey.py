"""What a part of a corpus holds, found by reading it once, and remembered while the part does not change."""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from leaven.data.readers import Fault, SourcePart
from leaven.storage import write

FORMAT = 1
"""Raised whenever the same content would be surveyed otherwise."""

NAMED_FAULTS = 3
SAVE_EVERY_SECONDS = 30.0

# Of a file that was written to a moment ago, the next write may leave the same stamp.
_SETTLED_NS = 2 * 10**9


@dataclass(frozen=True)
class Survey:
    """The documents of a part that are not blank, their bytes (of UTF-8), a hash of their places and texts, and the
    extreme hashes of their keys. ``corrupt`` counts lines or rows that cannot be read, ``faults`` names the first
    few. ``broken`` is 1 for a file that cannot be read to its end, which then holds no document: what came before may
    be wrong as well, as in a gzip file, whose checksum is at its end."""

    documents: int
    bytes: int
    digest: str
    lowest: int
    highest: int
    corrupt: int
    broken: int
    faults: tuple[str, ...]


class Tally:
    """Counts documents and their bytes, and hashes their places and texts."""

    def __init__(self) -> None:
        self.documents = self.bytes = 0
        self._digest = blake2b(digest_size=16)

    def add(self, place: str, text: str) -> None:
        raw = text.encode()
        self._digest.update(f"{len(place)} {len(raw)} {place}".encode())
        self._digest.update(raw)
        self.documents += 1
        self.bytes += len(raw)

    @property
    def digest(self) -> str:
        return self._digest.hexdigest()


def survey(part: SourcePart, on_bytes: Callable[[int], None]) -> Survey:
    """Read a part from end to end; ``on_bytes`` is called with the bytes of text so far."""
    tally = Tally()
    corrupt = highest = 0
    lowest = 2**64
    faults: list[str] = []
    for row in part.rows():
        if isinstance(row, Fault):
            # A file name need not be UTF-8, what is printed must.
            said = f"{row.where} {row.why}".encode(errors="replace").decode()
            if row.whole:
                return Survey(0, 0, "", 2**64, 0, corrupt=0, broken=1, faults=(said,))
            corrupt += 1
            if len(faults) < NAMED_FAULTS:
                faults.append(said)
            continue
        place, text = row
        if not text or text.isspace():
            continue
        tally.add(place, text)
        at = key_place(part.key + place)
        lowest, highest = min(lowest, at), max(highest, at)
        on_bytes(tally.bytes)
    return Survey(tally.documents, tally.bytes, tally.digest, lowest, highest, corrupt, 0, tuple(faults))


def key_place(key: str) -> int:
    """Where the hash of a document's key falls in [0, 2^64)."""
    return int.from_bytes(blake2b(encode_key(key), digest_size=8).digest(), "big")


def encode_key(key: str) -> bytes:
    # A file name need not be UTF-8.
    return key.encode(errors="surrogateescape")


class SurveyCache:
    """The surveys of a source's parts in a file, if there is one; what cannot be read there is surveyed again.

    So is a broken part: it may be whole again, with the stamp it had.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._known = _read(path) if path else {}
        self._seen: dict[str, dict[str, Any]] = {}
        self._changed = False
        self._saved = time.monotonic()

    def survey(self, part: SourcePart, on_bytes: Callable[[int], None]) -> Survey:
        """The survey of a part: as remembered if its stamp is the same and had settled then, else made."""
        stamp, now = part.stamp(), time.time_ns()
        if (found := self._remembered(part.key, stamp)) is None:
            found, self._changed = survey(part, on_bytes), True
        settled = stamp is not None and all(not isinstance(n, int) or n < now - _SETTLED_NS for n in stamp)
        self._seen[part.key] = {"stamp": stamp, "settled": settled, "survey": asdict(found)}
        if time.monotonic() - self._saved > SAVE_EVERY_SECONDS:
            self.save()
        return found

    def _remembered(self, key: str, stamp: list[int | str] | None) -> Survey | None:
        try:
            known = self._known[key]
            if stamp is None or known["stamp"] != stamp or not known["settled"]:
                return None
            found = Survey(**known["survey"] | {"faults": tuple(known["survey"]["faults"])})
            return None if found.broken else found
        except (KeyError, TypeError):
            return None

    def save(self) -> None:
        """Write the file anew if something was surveyed.

        Raises:
            OSError: if it cannot be written.
        """
        self._saved = time.monotonic()
        if not self._changed or self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write(self._path, json.dumps({"format": FORMAT, "parts": {**self._known, **self._seen}}).encode())
        self._changed = False


def _read(path: Path) -> Mapping[str, Any]:
    try:
        document = json.loads(path.read_bytes())
        return document["parts"] if document["format"] == FORMAT else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}
