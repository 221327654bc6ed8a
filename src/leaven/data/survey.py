"""Count and hash the documents of each part of a corpus, which is a file or a split of a data set. The results are
cached until the part changes."""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from leaven.data.hub import SourcePart
from leaven.data.readers import Fault
from leaven.storage import write

FORMAT = 1
"""Version of the cache file. Increase it when the same content would give a different result."""

NAMED_FAULTS = 3
SAVE_EVERY_SECONDS = 30.0

# A second write within this time may not change the modification time.
_SETTLED_NS = 2 * 10**9


@dataclass(frozen=True)
class Survey:
    """The counts and hashes of the documents of one part, which is a file or a split. Blank documents are left
    out."""

    documents: int
    bytes: int  # of UTF-8 text
    digest: str  # hash of the places and texts of all documents
    lowest: int  # smallest hash of a key
    highest: int  # largest hash of a key
    corrupt: int  # number of lines or rows that cannot be read
    # 1 if the file cannot be read to its end, else 0. Its text is not used, because all of it may be wrong: the
    # checksum of a gzip file is at the end of the file.
    broken: int
    faults: tuple[str, ...]  # the first few faults, one line each


class Tally:
    """A running count of documents and bytes, and a running hash of the documents' places and texts."""

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
    """Read a part from beginning to end, and return its counts and hashes. ``on_bytes`` is called with the number of
    bytes of text read so far."""
    tally = Tally()
    corrupt = highest = 0
    lowest = 2**64
    faults: list[str] = []
    for row in part.rows():
        if isinstance(row, Fault):
            # A file name may be invalid UTF-8, but messages must be valid.
            line = f"{row.where} {row.why}".encode(errors="replace").decode()
            if row.whole:
                return Survey(0, 0, "", 2**64, 0, corrupt=0, broken=1, faults=(line,))
            corrupt += 1
            if len(faults) < NAMED_FAULTS:
                faults.append(line)
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
    """Return the hash of a document's key as a number in [0, 2^64)."""
    return int.from_bytes(blake2b(encode_key(key), digest_size=8).digest(), "big")


def encode_key(key: str) -> bytes:
    # A file name may not be valid UTF-8.
    return key.encode(errors="surrogateescape")


class SurveyCache:
    """A file that caches the surveys of a source's parts, which are files or splits.

    A part is surveyed again if its entry in the cache cannot be read, or if the entry says that the part was broken.
    A broken part may have been repaired without a change of its stamp (its size and times).
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._known = _read(path) if path else {}
        self._seen: dict[str, dict[str, Any]] = {}
        self._changed = False
        self._saved = time.monotonic()

    def survey(self, part: SourcePart, on_bytes: Callable[[int], None]) -> Survey:
        """Return the survey of a part, from the cache if the part has the same stamp as when it was cached.

        The cache is not used if the part had been changed only seconds before it was cached: a second change right
        after the first may leave the stamp the same.
        """
        stamp, now = part.stamp(), time.time_ns()
        if (found := self._cached(part.key, stamp)) is None:
            found, self._changed = survey(part, on_bytes), True
        settled = stamp is not None and all(not isinstance(n, int) or n < now - _SETTLED_NS for n in stamp)
        self._seen[part.key] = {"stamp": stamp, "settled": settled, "survey": asdict(found)}
        if time.monotonic() - self._saved > SAVE_EVERY_SECONDS:
            self.save()
        return found

    def _cached(self, key: str, stamp: list[int | str] | None) -> Survey | None:
        try:
            known = self._known[key]
            if stamp is None or known["stamp"] != stamp or not known["settled"]:
                return None
            found = Survey(**known["survey"] | {"faults": tuple(known["survey"]["faults"])})
            return None if found.broken else found
        except (KeyError, TypeError):
            return None

    def save(self) -> None:
        """Write the cache file if a part was surveyed since the last call.

        Raises:
            OSError: if the file cannot be written.
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
