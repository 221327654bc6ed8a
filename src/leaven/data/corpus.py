"""Read the text of a recipe's source document by document, and split the documents into training and validation.

Whether a document is used for training or for validation depends only on its key, which consists of its path below
the source and its line or row. Therefore no document is in both splits, and adding a document does not move another
document between them. :meth:`Corpus.documents` states the exceptions for corpora of very few documents.
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

# Tests are half of the standard library (33 MB in Python 3.11), and many distributions ship Python without them.
# Without them, reading is faster and all machines have the same text. The encodings are tables that a model
# learns at once; half of the validation text would consist of them.
_NOT_LIBRARY = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "encodings"}
_MAGIC = frozenset("*?[")

SHAKESPEARE = Path(__file__).with_name("shakespeare.jsonl.gz")
"""1.1 MB of Shakespeare's plays, the same text on every machine, in 133 documents of whole speeches. The plays are in
the public domain; the selection is that of "tinyshakespeare" (Karpathy 2015, github.com/karpathy/char-rnn)."""

OnProgress = Callable[[str, int, int], None]
"""A function that is called with the name of a stage, the number of bytes processed and the total number of bytes."""

REPORT_EVERY_BYTES = 2**20


class Meter:
    """A progress meter for one stage. It reports progress at most once every `REPORT_EVERY_BYTES` bytes."""

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
        """Report that the stage is complete, if any progress was reported."""
        if self._progress and self._next:
            self._progress(self._stage, self._total, self._total)


@dataclass(frozen=True)
class TextDocument:
    """One document of a source."""

    key: str  # path below the source, followed by the line or row
    text: str
    validation: bool  # whether it belongs to validation, not to training


@dataclass(frozen=True)
class Corpus:
    """The documents of a source. Each call of :meth:`documents` reads them again, file by file and line by line."""

    source: str
    parts: tuple[SourcePart, ...]
    surveys: tuple[Survey, ...]  # one for each part
    n_documents: int  # number of documents that are not blank
    n_bytes: int  # number of UTF-8 bytes of these documents
    fingerprint: str  # hash of all keys and texts
    lowest: int  # smallest hash of a key
    highest: int  # largest hash of a key
    skipped: str  # one line that says what could not be read, or ""

    def documents(self) -> Iterator[TextDocument]:
        """Yield every document, marked as training or validation.

        A document belongs to validation if the hash of its key is in the lowest `VALIDATION_SHARE` of the range of
        hashes. The document with the lowest hash always belongs to validation, and the document with the highest hash
        always belongs to training, so neither split is empty. If the corpus has only one document, it is cut in two:
        the last `VALIDATION_SHARE` of its characters, from the start of a line if possible, is used for validation.

        Raises:
            InputError: if the content of a part has changed since the corpus was opened.
        """
        for part, survey in zip(self.parts, self.surveys, strict=True):
            if survey.broken:
                continue
            tally = Tally()
            why = "its text is different"
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
    """Open a corpus for each source. A source is one of:

    - ``python-stdlib``: the modules of the running Python's standard library, without its tests;
    - ``tiny-shakespeare``: the plays that come with leaven (`SHAKESPEARE`);
    - a path or glob: a ``.txt`` file is one document; in ``.jsonl``, ``.jsonl.gz`` and ``.jsonl.zst`` files each
      line is a document, and in ``.parquet`` files each row;
    - ``hf://org/dataset``: see :mod:`leaven.data.hub`.

    Every file or split is read once, to count its documents and to hash its text. The results are cached in the
    folder ``memory`` and reused until the file or split changes. Blank documents are left out.

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
        raise InputError(f"data.source {name!r} contains no text; {skipped or 'give files that contain text'}")
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
    """Return a line that counts the documents and files that could not be read and names the first few, or "" if all
    could be read.

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
            f"{unreadable}; repair them, or raise corrupt_share in [data] above {corrupt_share:g}: {faults[0]}"
        )
    named = "; ".join([*faults[:NAMED_FAULTS], *["..."] * (corrupt + broken > NAMED_FAULTS)])
    return f"{unreadable} and were skipped: {named}"


def _parts(source: DataSource) -> list[SourcePart]:
    """Return the parts of a source: its files, or one split of a data set.

    The key of a file that a pattern matches is its path below the last folder before the first wildcard:
    ``b/c.txt`` for the file ``/a/b/c.txt`` and the pattern ``/a/*/*.txt``.
    """
    if source.source.startswith(SCHEME):
        return [open_split(source.source, source.text)]
    return [File(key, path, source.text) for key, path in _files(source.source)]


def _files(source: str) -> list[tuple[str, Path]]:
    if source == "python-stdlib":
        return _standard_library()
    if source == "tiny-shakespeare":
        return [(SHAKESPEARE.name, SHAKESPEARE)]
    path = Path(source).expanduser()
    if os.path.isdir(path):
        raise InputError(
            f"data.source {source!r} is a folder; give a pattern of the files in it, for example '{source}/**/*.txt'"
        )
    if os.path.exists(path):
        found = [(path.name, path)]
    elif _MAGIC & set(source):
        found = _matches(path)
        if not found:
            raise InputError(
                f"data.source {source!r} matches no file; check the pattern, which is relative to the current folder"
            )
    else:
        raise InputError(
            f"data.source {source!r} does not exist; give python-stdlib, tiny-shakespeare, hf://org/dataset, "
            f"or a path or glob to {', '.join(SUFFIXES)} files"
        )
    for _, file in found:
        if suffix(file) not in SUFFIXES:
            raise InputError(f"{file} is not a {', '.join(SUFFIXES)} file; convert it or exclude it from data.source")
    return found


BYTES_PER_TOKEN = 3.75
"""Typical number of bytes of a token. With a BPE of a few thousand tokens, 10.7 MB of python-stdlib became 2.86 M
tokens (docs/log.md)."""
_UNPACKED = {".gz": 3.0, ".zst": 3.0, ".parquet": 2.0}


def estimated_tokens(source: str) -> int | None:
    """Estimate the number of tokens of a source from the size of its files. Return None for an hf:// source.

    Raises:
        InputError: if the source does not name any file, or only empty files.
    """
    if source.startswith(SCHEME):
        return None
    size = sum(path.stat().st_size * _UNPACKED.get(path.suffix, 1.0) for _, path in _files(source))
    if not size:
        raise InputError(f"data.source {source!r} is empty; give files that contain text")
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
        raise InputError(
            f"this Python has no source code of its standard library in {root}; set data.source to the path of a text"
        )
    return sorted(found)


def _hash(text: str) -> str:
    return blake2b(text.encode(errors="surrogateescape"), digest_size=16).hexdigest()
