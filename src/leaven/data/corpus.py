"""Read the text of a recipe's source, document by document, and split it into training and validation.

The split depends only on the key of a document (its path below the source, and its line or row). Adding a document
therefore moves no other document between the splits, and no document is in both.
"""

import os
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from leaven.data.hub import SCHEME, SourcePart, open_split
from leaven.data.readers import SUFFIXES, Fault, File, suffix
from leaven.data.survey import NAMED_FAULTS, Survey, SurveyCache, Tally, encode_key, key_place
from leaven.recipe.data import DataSource
from leaven.recipe.errors import InputError

VALIDATION_SHARE = 0.05

# Tests are half of the standard library (of 33 MB in Python 3.11), and many distributions ship Python without them.
# Leaving them out is faster and makes machines agree. The encodings are tables that a model learns at once; they
# happened to be half of the validation text.
_NOT_LIBRARY = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "encodings"}
_MAGIC = frozenset("*?[")

OnProgress = Callable[[str, int, int], None]
"""Called with a stage, the bytes done and the bytes in all."""

REPORT_EVERY_BYTES = 2**20


class Meter:
    """A progress meter of one stage, which reports at most once every `REPORT_EVERY_BYTES`."""

    def __init__(self, progress: OnProgress | None, stage: str, total: int) -> None:
        self._progress, self._stage, self._total = progress, stage, total
        self._before = self._next = 0

    def at(self, done: int) -> None:
        """Report that ``done`` bytes have been processed since the last call of :meth:`advance`."""
        if self._progress and self._before + done >= self._next:
            self._progress(self._stage, min(self._before + done, self._total), self._total)
            self._next = self._before + done + REPORT_EVERY_BYTES

    def advance(self, done: int) -> None:
        """Add ``done`` bytes to the total that has been processed."""
        self._before += done
        self.at(0)

    def finish(self) -> None:
        """Report that the stage is complete, if it was started."""
        if self._progress and self._next:
            self._progress(self._stage, self._total, self._total)


@dataclass(frozen=True)
class TextDocument:
    """One document of a source."""

    key: str  # path below the source, and line or row
    text: str
    validation: bool  # which split it belongs to


@dataclass(frozen=True)
class Corpus:
    """The documents of a source. Each pass over them reads from disk, in the order of their keys."""

    source: str
    parts: tuple[SourcePart, ...]
    surveys: tuple[Survey, ...]  # one for each part
    n_documents: int  # that are not blank
    n_bytes: int  # UTF-8 bytes of these documents
    fingerprint: str  # hash of all keys and texts
    lowest: int  # smallest hash of a key
    highest: int  # largest hash of a key
    skipped: str  # a line about what could not be read, or ""

    def documents(self) -> Iterator[TextDocument]:
        """Yield every document, each marked as training or validation.

        A document belongs to validation if the hash of its key is in the lowest `VALIDATION_SHARE` of all hashes. The
        document with the lowest hash always belongs to validation, and the document with the highest hash to
        training, so neither split is empty. A corpus of one document is cut in two: its last `VALIDATION_SHARE` of
        characters, from the start of a line if possible, are validation.

        Raises:
            InputError: if the content of a part has changed since the corpus was opened.
        """
        for part, survey in zip(self.parts, self.surveys, strict=True):
            if survey.broken:
                continue
            tally = Tally()
            why = "its text differs"
            for row in part.rows():
                if isinstance(row, Fault):
                    why = f"{row.where} {row.why}"
                elif row[1] and not row[1].isspace():
                    tally.add(*row)
                    yield from self._split(part.key + row[0], row[1])
            if tally.digest != survey.digest:
                raise InputError(f"{part.key} changed while it was read ({why}); run the same command again")

    def _split(self, key: str, text: str) -> Iterator[TextDocument]:
        if self.n_documents == 1:
            cut = max(int(len(text) * (1 - VALIDATION_SHARE)), 1)
            cut = text.rfind("\n", 0, cut) + 1 or cut
            yield TextDocument(key, text[:cut], validation=False)
            yield TextDocument(key, text[cut:], validation=True)
        else:
            place = key_place(key)
            under = place < VALIDATION_SHARE * 2**64
            yield TextDocument(key, text, place == self.lowest or (under and place != self.highest))


def open_corpora(
    sources: Sequence[DataSource],
    corrupt_share: float,
    memory: Path | None = None,
    progress: OnProgress | None = None,
) -> list[Corpus]:
    """Open a corpus for each source. Every part of it is read once, to find its size and fingerprint.

    A source is ``python-stdlib`` (the modules of the running Python's standard library without its tests); a path
    or glob to ``.txt`` (one document per file), ``.jsonl``, ``.jsonl.gz``, ``.jsonl.zst`` (one per line) or
    ``.parquet`` (one per row); or ``hf://org/dataset`` (:mod:`leaven.data.hub`). Blank documents are left out.
    Results are cached in the folder ``memory`` and reused until a part changes.

    Raises:
        InputError: if a source has no readable text, or if more than ``corrupt_share`` of its documents or of its
            files cannot be read.
        OSError: if ``memory`` cannot be written.
    """
    parts = [_parts(source) for source in sources]
    meter = Meter(progress, "reading", sum(part.size for some in parts for part in some))
    corpora = [
        _survey(source, tuple(some), corrupt_share, memory, meter)
        for source, some in zip(sources, parts, strict=True)
    ]
    meter.finish()
    return corpora


def _survey(
    source: DataSource, parts: tuple[SourcePart, ...], corrupt_share: float, memory: Path | None, meter: Meter
) -> Corpus:
    name = source.source
    at = name if name.startswith(SCHEME) else os.path.abspath(name)
    known = SurveyCache(memory and memory / f"{_hash(f'{at} {source.text}')}.json")
    surveys = []
    for part in parts:
        size = part.size
        surveys.append(known.survey(part, lambda done, size=size: meter.at(min(done, size))))  # type: ignore[misc]
        meter.advance(size)
    skipped = _skipped(name, surveys, corrupt_share)
    n_documents = sum(survey.documents for survey in surveys)
    if not n_documents:
        raise InputError(f"data.source {name!r} contains no text; {skipped or 'name files with text in them'}")
    known.save()
    content = blake2b(digest_size=16)
    for part, survey in zip(parts, surveys, strict=True):
        key = encode_key(part.key)
        content.update(f"{len(key)} {survey.digest} ".encode() + key)
    return Corpus(
        name,
        parts,
        tuple(surveys),
        n_documents,
        sum(survey.bytes for survey in surveys),
        content.hexdigest(),
        min(survey.lowest for survey in surveys),
        max(survey.highest for survey in surveys),
        skipped,
    )


def _skipped(source: str, surveys: list[Survey], corrupt_share: float) -> str:
    """Return a line that counts and names the documents and files that could not be read, or "".

    Raises:
        InputError: if more than ``corrupt_share`` of the documents or of the files could not be read.
    """
    corrupt, broken = sum(survey.corrupt for survey in surveys), sum(survey.broken for survey in surveys)
    if not corrupt and not broken:
        return ""
    lines = corrupt + sum(survey.documents for survey in surveys)
    counted = ((corrupt, lines, "documents"), (broken, len(surveys), "files"))
    counts = " and ".join(f"{count:,} of {total:,} {what}" for count, total, what in counted if count)
    faults = [fault for survey in surveys for fault in survey.faults]
    unreadable = f"{counts} of data.source {source!r} cannot be read"
    if any(count > corrupt_share * total for count, total, _ in counted):
        raise InputError(
            f"{unreadable}; repair them or raise [data] corrupt_share from {corrupt_share:g}: {faults[0]}"
        )
    named = "; ".join([*faults[:NAMED_FAULTS], *["..."] * (corrupt + broken > NAMED_FAULTS)])
    return f"{unreadable} and are skipped: {named}"


def _parts(source: DataSource) -> list[SourcePart]:
    """Return the files or the split that a source names. A file's key is its path below the folders without
    wildcards."""
    if source.source.startswith(SCHEME):
        return [open_split(source.source, source.text)]
    return [File(key, path, source.text) for key, path in _files(source.source)]


def _files(source: str) -> list[tuple[str, Path]]:
    if source == "python-stdlib":
        return _standard_library()
    path = Path(source).expanduser()
    if os.path.isdir(path):
        raise InputError(f"data.source {source!r} is a folder; name the files in it, for example '{source}/**/*.txt'")
    if os.path.exists(path):
        found = [(path.name, path)]
    elif _MAGIC & set(source):
        found = _matches(path)
        if not found:
            raise InputError(f"data.source {source!r} matches no file; check the pattern and the working folder")
    else:
        raise InputError(
            f"data.source {source!r} is not a file; give python-stdlib, hf://org/dataset, "
            f"or a path or glob to {', '.join(SUFFIXES)} files"
        )
    for _, file in found:
        if suffix(file) not in SUFFIXES:
            raise InputError(f"{file}: leaven reads {', '.join(SUFFIXES)} files; convert it or narrow data.source")
    return found


BYTES_PER_TOKEN = 3.75
"""Measured with a BPE of some thousand tokens: 10.7 MB of python-stdlib are 2.86 M tokens (docs/log.md)."""
_UNPACKED = {".gz": 3.0, ".zst": 3.0, ".parquet": 2.0}


def estimated_tokens(source: str) -> int | None:
    """Estimate the number of tokens of a source from the size of its files. None for a data set on the Hub.

    Raises:
        InputError: if the source names no file.
    """
    if source.startswith(SCHEME):
        return None
    size = sum(path.stat().st_size * _UNPACKED.get(path.suffix, 1.0) for _, path in _files(source))
    if not size:
        raise InputError(f"data.source {source!r} is empty; give files with text in them")
    return max(round(size / BYTES_PER_TOKEN), 1)


def _matches(pattern: Path) -> list[tuple[str, Path]]:
    import glob

    fixed = next(index for index, part in enumerate(pattern.parts) if _MAGIC & set(part))
    root = Path(*pattern.parts[:fixed])
    paths = (Path(name) for name in glob.glob(str(pattern), recursive=True))
    return sorted((path.relative_to(root).as_posix(), path) for path in paths if path.is_file())


def _standard_library() -> list[tuple[str, Path]]:
    root = Path(sysconfig.get_paths()["stdlib"])
    found = []
    for folder, inner, names in os.walk(root):
        inner[:] = [name for name in inner if name not in _NOT_LIBRARY]
        paths = (Path(folder, name) for name in names if name.endswith(".py"))
        found += [(path.relative_to(root).as_posix(), path) for path in paths]
    if not found:
        raise InputError(f"this Python has no library sources below {root}; give a path to text as data.source")
    return sorted(found)


def _hash(text: str) -> str:
    return blake2b(text.encode(errors="surrogateescape"), digest_size=16).hexdigest()
