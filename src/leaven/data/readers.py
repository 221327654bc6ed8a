"""Read text files of several formats document by document, and report documents and files that cannot be read."""

import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from leaven.recipe.errors import InputError


@dataclass(frozen=True)
class Fault:
    """The reason why a document or a file cannot be read."""

    where: str  # file, and line or row
    why: str
    whole: bool = False  # whether the whole file is unusable, not only a line or row


TextRow = tuple[str, str] | Fault
"""A document's place in its file ("" or ":LINE") and its text, or the reason why it cannot be read."""


@dataclass(frozen=True)
class File:
    """A file of text."""

    key: str  # its path below the source; the keys of its documents begin with it
    path: Path
    text: str = "text"  # JSON key or parquet column of the text; ignored for .txt

    @property
    def size(self) -> int:
        """The number of bytes to read."""
        try:
            return self.path.stat().st_size
        except OSError:
            return 0

    def stamp(self) -> list[int | str] | None:
        """Return a value that changes when the content changes, or None if the file is missing."""
        try:
            found = self.path.stat()
        except OSError:
            return None
        # Unlike the modification time, the change time cannot be set by a user.
        return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]

    def rows(self) -> Iterator[TextRow]:
        """Yield documents and faults in the order of the file. If a fault makes the whole file unusable, it is the
        last."""
        try:
            yield from READERS[suffix(self.path)](self.path, self.text)
        except (OSError, EOFError, zlib.error) as error:
            reason = (isinstance(error, OSError) and error.strerror) or str(error).partition("\n")[0]
            yield Fault(str(self.path), f"cannot be read to its end ({reason})", whole=True)


def _read_whole(path: Path, text: str) -> Iterator[TextRow]:
    yield _decoded(str(path), "", path.read_bytes())


def _read_code(path: Path, text: str) -> Iterator[TextRow]:
    # This is the standard library, whose files users cannot repair.
    yield "", path.read_bytes().decode("utf-8-sig", errors="replace")


def _read_lines(path: Path, text: str) -> Iterator[TextRow]:
    with path.open("rb") as lines:
        yield from _json_rows(path, lines, text)


def _read_gzip_lines(path: Path, text: str) -> Iterator[TextRow]:
    with gzip.open(path) as lines:
        yield from _json_rows(path, lines, text)


def _read_zstandard_lines(path: Path, text: str) -> Iterator[TextRow]:
    pyarrow = _pyarrow(path)
    with pyarrow.input_stream(str(path), compression="zstd") as stream:
        yield from _json_rows(path, io.BufferedReader(stream, 2**20), text)


def _json_rows(path: Path, lines: "BinaryIO | gzip.GzipFile | io.BufferedReader", text: str) -> Iterator[TextRow]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        row = _decoded(f"{path}:{number}", f":{number}", line)
        yield row if isinstance(row, Fault) else _of_json(f"{path}:{number}", *row, text)


def _of_json(where: str, place: str, line: str, text: str) -> TextRow:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        return Fault(where, f"is not JSON ({error}); write one JSON object per line")
    found = row.get(text, row) if isinstance(row, dict) else row
    if found is None:
        found = ""
    if not isinstance(found, str):
        return Fault(
            where,
            f'has no text under the key "{text}"; write {{"{text}": "..."}} on every line, or set text to its key',
        )
    # JSON can contain half of a surrogate pair, which cannot be encoded as UTF-8.
    return place, found.encode(errors="replace").decode()


def _read_columns(path: Path, text: str) -> Iterator[TextRow]:
    pyarrow = _pyarrow(path)
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            schema = file.schema_arrow
            if (fault := missing_column(str(path), schema.names, schema, text)) is not None:
                yield fault
                return
            number = 0
            for rows in file.iter_batches(batch_size=256, columns=[text]):
                yield from column_rows(str(path), rows.column(0), number)
                number += len(rows)
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        reason = str(error).partition("\n")[0]
        yield Fault(str(path), f"cannot be read as parquet ({reason}); write it again or leave it out", whole=True)


def missing_column(where: str, names: list[str], schema: Any, text: str) -> Fault | None:
    """Check that an Arrow schema has a column of strings named ``text``. Return None if it has, or else a fault."""
    from pyarrow import types

    if text not in names:
        why = f"has no column {text}, only {', '.join(names)}; name one: source = [{{ source = ..., text = ... }}]"
        return Fault(where, why, whole=True)
    kind = schema.field(text).type
    if types.is_string(kind) or types.is_large_string(kind):
        return None
    return Fault(where, f"has {kind} in column {text}, not string; convert the column to string", whole=True)


def column_rows(where: str, column: Any, number: int) -> Iterator[TextRow]:
    """Yield the rows of one chunk of a text column. There are ``number`` rows before this chunk."""
    import pyarrow

    binary = pyarrow.large_binary() if pyarrow.types.is_large_string(column.type) else pyarrow.binary()
    # A column of strings may contain invalid UTF-8. Read as bytes, an invalid row does not affect the others.
    for index, raw in enumerate(column.cast(binary).to_pylist(), start=number + 1):
        yield _decoded(f"{where}:{index}", f":{index}", raw or b"")


def _decoded(where: str, place: str, raw: bytes) -> TextRow:
    try:
        return place, raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        return Fault(where, f"is not UTF-8 (byte {raw[error.start]:#x} at {error.start:,})", whole=not place)


def _pyarrow(path: Path) -> Any:
    try:
        import pyarrow
    except ImportError:
        raise InputError(
            f"{path}: {suffix(path)} needs the package pyarrow; run: pip install 'leaven[train]'"
        ) from None
    return pyarrow


READERS: dict[str, Callable[[Path, str], Iterator[TextRow]]] = {
    ".txt": _read_whole,
    ".jsonl": _read_lines,
    ".jsonl.gz": _read_gzip_lines,
    ".jsonl.zst": _read_zstandard_lines,
    ".parquet": _read_columns,
    ".py": _read_code,
}
SUFFIXES = tuple(name for name in READERS if name != ".py")


def suffix(path: Path) -> str:
    """Return the suffix of a file. Return "" if leaven cannot read files with this suffix."""
    return next((known for known in READERS if path.name.endswith(known)), "")
