"""Read the text of a recipe's sources document by document, and split the documents into training and validation.

A document's key is the path of its file within the source and the line or row, such as ``b/c.jsonl:7``. A hash of the
key decides whether the document is for training or validation. This usually does not change when files are added. A
part of a source is one file, or one split of a Hugging Face data set. The survey of a part has the counts and hashes
of its documents.
"""

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from leaven import storage
from leaven.data.hub import SCHEME
from leaven.data.readers import BrokenFile
from leaven.data.sources import TextPart, TokenPart, source_parts
from leaven.errors import InputError
from leaven.recipe.data import DataSource

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

VALIDATION_SHARE = 0.05

FORMAT = 4
"""Version of the cached surveys. Increase it when the same content would give a different :class:`Survey`."""

NAMED_FAULTS = 3
SAVE_EVERY_SECONDS = 30.0

OnProgress = Callable[[str, int, int], None]
"""A function that is called with the name of a stage, the number of bytes processed and the total number of bytes."""

REPORT_EVERY_BYTES = 2**20

AnyPart = TypeVar("AnyPart", TextPart, TokenPart)
AnySurvey = TypeVar("AnySurvey", bound="DataclassInstance")


class Meter:
    """Reports the progress of one stage, about every `REPORT_EVERY_BYTES` bytes and at the end."""

    def __init__(self, progress: OnProgress | None, stage: str, total: int) -> None:
        self._progress, self._stage, self._total = progress, stage, total
        self._done = self._next = 0

    def advance(self, n_bytes: int) -> None:
        self._done += n_bytes
        if self._progress and self._done >= self._next:
            self._progress(self._stage, self._done, self._total)
            self._next = self._done + REPORT_EVERY_BYTES

    def finish(self) -> None:
        if self._progress and self._next:
            self._progress(self._stage, self._total, self._total)


@dataclass(frozen=True)
class Survey:
    """Counts and hashes of the documents in one file or split of a source. Blank documents are left out."""

    documents: int
    bytes: int  # bytes of UTF-8 text
    digest: str  # hash of the line or row numbers and texts of all documents
    lowest: int  # smallest hash of a document's key
    highest: int  # largest hash of a document's key
    blank: int  # number of documents without text, such as rows whose text is null
    corrupt: int  # number of lines or rows that cannot be read
    broken: int  # 1 if the whole file or split cannot be used, else 0
    faults: tuple[str, ...]  # one line for each of the first few lines, rows or files that cannot be read


@dataclass(frozen=True)
class TextDocument:
    key: str  # such as b/c.jsonl:7; in a Hugging Face data set, name of the split and row, such as train:7
    text: str
    validation: bool  # True for a validation document, False for a training document


@dataclass(frozen=True)
class Corpus:
    """The documents of a source. Each call of :meth:`documents` reads the files again."""

    source: str
    parts: tuple[TextPart, ...]
    surveys: tuple[Survey, ...]  # one for each part
    skipped: str  # one line about documents and files that cannot be read or have no text; "" if there are none
    memory: Path | None = field(default=None, compare=False)  # file that caches the surveys; None if none does

    @property
    def n_documents(self) -> int:
        return sum(survey.documents for survey in self.surveys)

    @property
    def n_bytes(self) -> int:
        return sum(survey.bytes for survey in self.surveys)

    @property
    def fingerprint(self) -> str:
        content = blake2b(digest_size=16)
        for part, survey in zip(self.parts, self.surveys, strict=True):
            key = _encoded(part.key)
            content.update(f"{len(key)} {survey.digest} ".encode() + key)
        return content.hexdigest()

    def documents(self) -> Iterator[TextDocument]:
        """Yield the documents that have text, each marked as training or validation.

        A document belongs to validation if the hash of its key is in the lowest `VALIDATION_SHARE` of all
        possible hashes. If one split would be empty, it gets one document. A single document is cut in two.

        Raise InputError at the end of a file that has changed since the corpus was opened.
        """
        single = self.n_documents == 1
        lowest = min(survey.lowest for survey in self.surveys)
        highest = max(survey.highest for survey in self.surveys)
        for part, survey in zip(self.parts, self.surveys, strict=True):
            if survey.broken:
                continue
            digest, why = blake2b(digest_size=16), "its text is different"
            try:
                for place, text, _ in part.rows():
                    if not text or text.isspace():
                        continue
                    _add(digest, place, text.encode())
                    key = part.key + place
                    if single:
                        cut = max(int(len(text) * (1 - VALIDATION_SHARE)), 1)
                        cut = text.rfind("\n", 0, cut) + 1 or cut
                        yield TextDocument(key, text[:cut], validation=False)
                        yield TextDocument(key, text[cut:], validation=True)
                    else:
                        number = _key_hash(key)
                        under = number < VALIDATION_SHARE * 2**64
                        yield TextDocument(key, text, number == lowest or (under and number != highest))
            except BrokenFile as error:
                why = f"it {error}"
            if digest.hexdigest() != survey.digest:
                if self.memory is not None:  # remove the survey: it may be wrong, so the next command makes a new one
                    with suppress(OSError):
                        _write(self.memory, {key: of for key, of in _read(self.memory).items() if key != part.key})
                raise InputError(
                    f"{part.name} has changed since its first reading: {why}; run the same command again"
                )


def open_corpora(
    sources: Sequence[DataSource],
    corrupt_share: float,
    memory: Path | None = None,
    progress: OnProgress | None = None,
    parts: Sequence[tuple[TextPart, ...]] | None = None,
) -> list[Corpus]:
    """Return the corpus of each source of text. Each part is read once, to count and hash its documents.

    Args:
        corrupt_share: largest allowed share of unreadable documents, and of unreadable files, in a source.
        memory: folder that caches the counts and hashes of unchanged parts; by default, nothing is cached.
        parts: the parts of each source; by default those of :func:`source_parts`.

    Raises:
        InputError: if a source has no readable text, or more than ``corrupt_share`` is unreadable.
        OSError: if ``memory`` cannot be written.
    """
    parts = parts or [source_parts(source).texts for source in sources]
    meter = Meter(progress, "reading", sum(part.size for some in parts for part in some))
    corpora = []
    for source, some in zip(sources, parts, strict=True):
        path = memory and surveys_file(memory, source.source, source.text)
        surveys = cached_surveys(some, path, meter, _survey, _cached)
        skipped = _skipped(source.source, surveys, corrupt_share)
        if not any(survey.documents for survey in surveys):
            raise InputError(
                f"data.source {source.source!r} contains no text; {skipped or 'give files that contain text'}"
            )
        skipped = "; ".join(filter(None, [skipped, *_without_text(source, some, surveys)]))
        corpora.append(Corpus(source.source, some, tuple(surveys), skipped, path))
    meter.finish()
    return corpora


def surveys_file(folder: Path, source: str, *options: str) -> Path:
    """Return the file in ``folder`` for the cached surveys (counts and hashes) of ``source`` with ``options``."""
    at = source if source.startswith(SCHEME) else os.path.abspath(source)
    return folder / f"{storage.digest(_encoded(' '.join([at, *options])), 16)}.json"


def cached_surveys(
    parts: Sequence[AnyPart],
    path: Path | None,
    meter: Meter,
    survey: Callable[[AnyPart, Meter], AnySurvey],
    cached: Callable[[AnyPart, dict[str, Any]], AnySurvey],
) -> list[AnySurvey]:
    """Return the survey (counts and hashes) of each part. ``path``, if given, caches surveys of unchanged parts.

    Args:
        survey: reads a part and returns the survey (a data class).
        cached: makes a survey from cached values. After KeyError, TypeError or ValueError, the part is read again.
    """
    known = {} if path is None else _read(path)
    surveys: list[AnySurvey] = []
    changed, saved = False, time.monotonic()
    for part in parts:
        stamp, found = part.stamp(), None
        with suppress(KeyError, TypeError, ValueError):
            if stamp is not None and known[part.key]["stamp"] == stamp:
                found = cached(part, known[part.key]["survey"])
                meter.advance(part.size)
        if found is None:
            found, changed = survey(part, meter), True
        surveys.append(found)
        known[part.key] = {"stamp": stamp, "survey": asdict(found)}
        if path is not None and changed and (part is parts[-1] or time.monotonic() - saved > SAVE_EVERY_SECONDS):
            _write(path, known)
            changed, saved = False, time.monotonic()
    return surveys


def _read(path: Path) -> dict[str, Any]:
    try:
        document: Any = storage.json_object(storage.read(path))
        known = dict(document["parts"])
        valid = document["format"] == FORMAT and document["blake2b"] == _digest(known)
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return known if valid else {}


def _write(path: Path, parts: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {"format": FORMAT, "blake2b": _digest(parts), "parts": parts}
    storage.write(path, json.dumps(document).encode())


def _digest(parts: dict[str, Any]) -> str:
    return storage.digest(json.dumps(parts).encode(), 16)


def _cached(_: TextPart, values: dict[str, Any]) -> Survey:
    """Return the cached survey. Raise ValueError if it found the part broken, so that the part is read again."""
    if values["broken"]:
        raise ValueError
    return Survey(**values | {"faults": tuple(values["faults"])})


def _survey(part: TextPart, meter: Meter) -> Survey:
    digest = blake2b(digest_size=16)
    documents = n_bytes = blank = corrupt = highest = 0
    lowest, left = 2**64, part.size
    faults: list[str] = []
    try:
        for place, text, fault in part.rows():
            if fault:
                corrupt += 1
                if len(faults) < NAMED_FAULTS:
                    faults.append(_line(f"{part.name}{place} {fault}"))
            elif text and not text.isspace():
                raw = text.encode()
                _add(digest, place, raw)
                documents, n_bytes = documents + 1, n_bytes + len(raw)
                number = _key_hash(part.key + place)
                lowest, highest = min(lowest, number), max(highest, number)
                advanced = min(len(raw), left)  # text is longer than its compressed file
                meter.advance(advanced)
                left -= advanced
            else:
                blank += 1
    except BrokenFile as error:  # earlier documents may be wrong, too: a gzip file has its checksum at the end
        return Survey(0, 0, "", 2**64, 0, blank=0, corrupt=0, broken=1, faults=(_line(f"{part.name} {error}"),))
    finally:
        meter.advance(left)
    return Survey(documents, n_bytes, digest.hexdigest(), lowest, highest, blank, corrupt, 0, tuple(faults))


def _skipped(source: str, surveys: Sequence[Survey], corrupt_share: float) -> str:
    """Return a line about unreadable documents and files, or "". Raise InputError if there are too many."""
    corrupt, broken = sum(survey.corrupt for survey in surveys), sum(survey.broken for survey in surveys)
    if not corrupt and not broken:
        return ""
    lines = corrupt + sum(survey.documents for survey in surveys)
    counted = ((corrupt, lines, "documents"), (broken, len(surveys), "files"))
    counts = " and ".join(f"{count:,} of {total:,} {what}" for count, total, what in counted if count)
    faults = [fault for survey in surveys for fault in survey.faults]
    unreadable = f"{counts} of data.source {source!r} cannot be read"
    if any(count > corrupt_share * total for count, total, _ in counted):
        more = f", or raise corrupt_share in [data] above {corrupt_share:g}" * (lines > corrupt)
        raise InputError(f"{unreadable}; repair them{more}: {faults[0]}")
    named = "; ".join([*faults[:NAMED_FAULTS], *["..."] * (corrupt + broken > NAMED_FAULTS)])
    return f"{unreadable} and were skipped: {named}"


def _without_text(source: DataSource, parts: Sequence[TextPart], surveys: Sequence[Survey]) -> Iterator[str]:
    """Yield a warning if files have no text, and a warning if other files contain documents without text."""
    name, found = f"data.source {source.source!r}", [*zip(parts, surveys, strict=True)]
    empty = [part for part, survey in found if not (survey.documents or survey.faults)]
    if empty and source.source != "python-stdlib":  # an empty module is common
        yield _line(f"{name}: no text in {len(empty):,} of {len(parts):,} files, such as {empty[0].name}")
    some = [(part, survey) for part, survey in found if survey.documents and survey.blank]
    if some:
        blank = sum(survey.blank for _, survey in some)
        total = blank + sum(survey.documents for survey in surveys)
        yield _line(f"{name}: no text in {blank:,} of {total:,} documents, such as in {some[0][0].name}")


def _add(digest: Any, place: str, raw: bytes) -> None:
    digest.update(f"{len(place)} {len(raw)} {place}".encode())
    digest.update(raw)


def _key_hash(key: str) -> int:
    """Return the hash of a document's key as a number in [0, 2^64)."""
    return int.from_bytes(blake2b(_encoded(key), digest_size=8).digest(), "big")


def _encoded(key: str) -> bytes:
    return key.encode(errors="surrogateescape")  # a file name can be invalid UTF-8


def _line(message: str) -> str:
    return message.encode(errors="replace").decode()  # a file name can be invalid UTF-8, but messages must be valid
