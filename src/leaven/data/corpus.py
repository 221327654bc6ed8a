"""Where text comes from: a source named in a recipe, read document by document and split by document.

The split is a function of a document's key (its path below the source, and its line or row), not of its
place: adding a document moves no other one to the other side, and no document is on both.
"""

import json
import os
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from leaven.recipe.errors import InputError

VALIDATION_SHARE = 0.05
SUFFIXES = (".txt", ".jsonl", ".parquet")

# Tests are most of the standard library's bytes (half of 33 MB in Python 3.11), and many distributions ship
# Python without them: leaving them out is quicker and makes two machines more alike. The encodings are code pages,
# tables that a model learns at once; by chance they were half of the validation text.
_NOT_LIBRARY = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "encodings"}
_MAGIC = frozenset("*?[")

Progress = Callable[[str, int, int], None]
"""Called with a stage, the bytes done and the bytes in all."""


class Meter:
    """One stage of a progress callback, which is called no more than once a MiB."""

    def __init__(self, progress: Progress | None, stage: str, total: int) -> None:
        self._progress, self._stage, self._total = progress, stage, total
        self._next = 0

    def at(self, done: int) -> None:
        if self._progress and done >= self._next:
            self._progress(self._stage, min(done, self._total), self._total)
            self._next = done + 2**20

    def finish(self) -> None:
        if self._progress:
            self._progress(self._stage, self._total, self._total)


@dataclass(frozen=True)
class Document:
    key: str
    text: str
    validation: bool


@dataclass(frozen=True)
class Corpus:
    """The documents of a source, file by file in the order of their paths; read each time, never held.

    ``n_documents`` and ``n_bytes`` (of UTF-8) count what is not blank. ``fingerprint`` is a hash of all keys
    and texts. ``lowest`` and ``highest`` are the extreme hashes of the keys: see :meth:`documents`.
    """

    source: str
    files: tuple[tuple[str, Path], ...]
    n_documents: int
    n_bytes: int
    fingerprint: str
    lowest: int
    highest: int

    def documents(self) -> Iterator[Document]:
        """Every document with its side of the split.

        Validation is where the hash of the key falls under `VALIDATION_SHARE`. The document with the lowest
        hash always belongs to it and the one with the highest never, so that no side is empty. A corpus of
        one document is cut in two: its last `VALIDATION_SHARE`, counted in characters and moved back to the
        start of a line where it has lines, is validation.
        """
        for key, text in _texts(self.files):
            if self.n_documents == 1:
                cut = _cut(text)
                yield Document(key, text[:cut], validation=False)
                yield Document(key, text[cut:], validation=True)
            else:
                place = _place(key)
                under = place < VALIDATION_SHARE * 2**64
                yield Document(key, text, place == self.lowest or (under and place != self.highest))


def open_corpus(source: str, progress: Progress | None = None) -> Corpus:
    """The corpus of a ``data.source``, read once from end to end to know its size and fingerprint.

    A source is ``python-stdlib`` (the modules of the running Python's standard library without its tests),
    or a path or glob to ``.txt`` (a document a file), ``.jsonl`` (a document a line, key ``text``) or
    ``.parquet`` (a document a row, column ``text``). Bytes that are no UTF-8 become U+FFFD. Blank documents
    are left out.

    Raises:
        InputError: if the source names no readable text.
    """
    files = tuple(_files(source))
    meter = Meter(progress, "reading", sum(path.stat().st_size for _, path in files))
    n_documents = n_bytes = highest = 0
    lowest = 2**64
    content = blake2b(digest_size=16)
    for key, text in _texts(files):
        raw = text.encode()
        name = _encode_key(key)
        content.update(f"{len(name)} {len(raw)} ".encode() + name)
        content.update(raw)
        n_documents += 1
        n_bytes += len(raw)
        place = _place(key)
        lowest, highest = min(lowest, place), max(highest, place)
        meter.at(n_bytes)
    if not n_documents:
        raise InputError(f"data.source {source!r} holds no text; name files with text in them")
    meter.finish()
    return Corpus(source, files, n_documents, n_bytes, content.hexdigest(), lowest, highest)


def _files(source: str) -> list[tuple[str, Path]]:
    """The files of a source with their keys: the path below the part of the source that has no wildcard."""
    if source == "python-stdlib":
        return _standard_library()
    if source.startswith("hf://"):
        raise InputError(
            f"data.source {source!r}: data sets are not fetched from the Hub yet; "
            "export it to .jsonl or .parquet and give the path"
        )
    path = Path(source).expanduser()
    if path.is_dir():
        raise InputError(
            f"data.source {source!r} is a folder; say which files in it, for example '{source}/**/*.txt'"
        )
    if path.exists():
        found = [(path.name, path)]
    elif _MAGIC & set(source):
        found = _matches(path)
        if not found:
            raise InputError(f"data.source {source!r} matches no file; check the pattern and the working folder")
    else:
        raise InputError(
            f"data.source {source!r} is no file; give python-stdlib, or a path or glob to {_listed(SUFFIXES)} files"
        )
    for _, file in found:
        if file.suffix not in SUFFIXES:
            raise InputError(f"{file}: leaven reads {_listed(SUFFIXES)} files; convert it or narrow data.source")
    return found


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


def _texts(files: tuple[tuple[str, Path], ...]) -> Iterator[tuple[str, str]]:
    """(key, text) of every document that is not blank."""
    for key, path in files:
        try:
            for place, text in _READERS[path.suffix](path):
                if text and not text.isspace():
                    yield f"{key}{place}", text
        except OSError as error:
            reason = error.strerror or str(error).partition("\n")[0]
            raise InputError(f"{path} cannot be read ({reason}); mend it or leave it out") from None


def _read_whole(path: Path) -> Iterator[tuple[str, str]]:
    yield "", path.read_bytes().decode("utf-8-sig", errors="replace")


def _read_lines(path: Path) -> Iterator[tuple[str, str]]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode("utf-8-sig", errors="replace"))
            except ValueError as error:
                raise InputError(f"{path}:{number} is not JSON ({error}); write one object a line") from None
            text = row.get("text") if isinstance(row, dict) else None
            if not isinstance(text, str):
                raise InputError(f'{path}:{number} has no text; write {{"text": "..."}} on every line')
            # JSON can escape half of a surrogate pair, which is no character and has no UTF-8.
            yield f":{number}", text.encode(errors="replace").decode()


def _read_columns(path: Path) -> Iterator[tuple[str, str]]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise InputError(f"{path}: .parquet needs pyarrow; pip install 'leaven[train]'") from None
    try:
        with parquet.ParquetFile(path) as file:
            schema = file.schema_arrow
            if "text" not in schema.names:
                raise InputError(f"{path} has no column text, only {_listed(schema.names)}; rename one of them")
            kind = schema.field("text").type
            if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
                raise InputError(f"{path}: column text is {kind}, not string; cast it")
            number = 0
            for rows in file.iter_batches(batch_size=256, columns=["text"]):
                for text in rows.column(0).to_pylist():
                    number += 1
                    yield f":{number}", text or ""
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        reason = str(error).partition("\n")[0]
        raise InputError(f"{path} cannot be read as parquet ({reason}); write it again or leave it out") from None


_READERS = {".txt": _read_whole, ".py": _read_whole, ".jsonl": _read_lines, ".parquet": _read_columns}


def _cut(text: str) -> int:
    cut = max(int(len(text) * (1 - VALIDATION_SHARE)), 1)
    return text.rfind("\n", 0, cut) + 1 or cut


def _encode_key(key: str) -> bytes:
    # A file name need not be UTF-8.
    return key.encode(errors="surrogateescape")


def _place(key: str) -> int:
    """Where a key falls in [0, 2^64)."""
    return int.from_bytes(blake2b(_encode_key(key), digest_size=8).digest(), "big")


def _listed(names: tuple[str, ...] | list[str]) -> str:
    return ", ".join(names)
