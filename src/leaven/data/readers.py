"""Read text files document by document: a .txt file, a line of a .jsonl file, or a row of a .parquet file."""

import io
import os
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

from leaven import storage
from leaven.errors import InputError

SUFFIXES = (".txt", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}

LONGEST_LINE, LARGEST_TEXT = 2**27, 2**32
"""Largest size of a line, and of a .txt file, in bytes. Both are read whole into memory."""

SETTLED_NS = 2 * 10**9
"""A file that changed less than this many ns ago may change again without a new modification time."""

_ROWS = 256  # rows whose texts are decoded at a time

# The set, number, count, hash and ending of names such as train-00002-of-00003.parquet. Shards that `datasets` has
# uploaded to the Hub have a hash, as in train-00002-of-00003-0123456789abcdef.parquet.
_SHARD = re.compile(r"(.*[-._])(\d{5,6})-of-(\d{5,6})(-[0-9a-f]{16})?(\..+)", re.DOTALL)

FileStamp = list[int | str]
"""A value that changes when the content of a file changes."""


def file_stamp(path: Path) -> FileStamp | None:
    """Return a value that changes with the content of a file, or None if the file is missing or has just changed."""
    try:
        found = path.stat()
    except OSError:
        return None
    if max(found.st_mtime_ns, found.st_ctime_ns) > time.time_ns() - SETTLED_NS:
        return None
    # Unlike the modification time, the change time cannot be set by a user.
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]


def missing_shards(source: str, files: Iterable[Path], pattern: str = "*") -> Iterator[str]:
    """Yield a note if names such as train-00002-of-00003.parquet show that files are missing.

    Such files may be in several folders. But if two folders have a file with the same number, each folder must have
    all files. Numbers begin at 0, or at 1 if there is a file 00003-of-00003. Files whose names do not match
    ``pattern`` may be missing.
    """
    sets: dict[tuple[str, str, str, str], dict[Path, set[int]]] = {}
    for path in files:
        if match := _SHARD.fullmatch(path.name):
            before, number, count, hash, ending = match.groups()
            key = (before, count, "-*" if hash else "", ending)
            sets.setdefault(key, {}).setdefault(path.parent, set()).add(int(number))
    missing = []
    for (before, count, hash, ending), folders in sets.items():
        together = set[int]().union(*folders.values())
        spread = len(folders) > 1 and len(together) == sum(map(len, folders.values()))
        for folder, numbers in {Path(): together}.items() if spread else folders.items():
            first = int(int(count) in numbers)
            away = (number for number in range(first, first + int(count)) if number not in numbers)
            names = (f"{before}{number:0{len(count)}}-of-{count}{hash}{ending}" for number in away)
            present: set[str] = set()
            for name in (name for name in names if fnmatch(name, pattern)):
                present = present or _shards_in(folders if spread else [folder])
                if name not in present:
                    missing.append(str(folder / name))
                    break
    if missing:
        yield (
            f"data.source {source!r}: the names of the files show that some are missing, such as {missing[0]}; if a "
            "download was interrupted, repeat it; to use only some files, name them, such as train-0000[0-2]-*"
        )


def _shards_in(folders: Iterable[Path]) -> set[str]:
    """Return the names of all files in ``folders``, with "*" in place of the hash in a shard's name."""
    names = (name for folder in folders if folder.is_dir() for name in os.listdir(folder))
    return {_SHARD.sub(lambda m: f"{m[1]}{m[2]}-of-{m[3]}{'-*' if m[4] else ''}{m[5]}", name) for name in names}


class TextRow(NamedTuple):
    """A document of a file, or a line or row that cannot be read."""

    place: str  # ":7" for line or row 7, counted from 1; "" if the whole file is one document
    text: str = ""
    fault: str = ""  # why the line or row cannot be read; "" if it can be read


class BrokenFile(Exception):
    """Raised if a whole file or split cannot be used. Callers put the file's name before the message."""


@dataclass(frozen=True)
class File:
    key: str  # path of the file below the source; the key of each document in the file begins with this path
    path: Path
    text: str = "text"  # JSON key or parquet column of the text; ignored for .txt

    @property
    def name(self) -> str:
        return str(self.path)

    @property
    def size(self) -> int:
        return self.path.stat().st_size if self.path.exists() else 0

    def stamp(self) -> FileStamp | None:
        return file_stamp(self.path)

    def rows(self) -> Iterator[TextRow]:
        """Yield the documents, and the lines or rows that cannot be read, in the order of the file.

        Raise BrokenFile if the whole file cannot be used, and InputError if the package pyarrow is missing.
        """
        try:
            storage.require_file(self.path)
            if self.path.name.endswith(".parquet"):
                yield from _parquet_rows(self.path, self.text)
            elif self.path.suffix == ".py":  # the standard library: users cannot repair invalid UTF-8 there
                yield TextRow("", storage.read(self.path).decode("utf-8-sig", errors="replace"))
            elif self.path.name.endswith(".txt"):  # a file named exactly .txt has no suffix
                content = storage.read(self.path, LARGEST_TEXT)
                if b"\0" in content:  # left by a crash or an unfinished download
                    raise BrokenFile("contains NUL bytes, which no text has; write it again or leave it out")
                yield TextRow("", content.decode("utf-8-sig"))
            else:
                with _open_lines(self.path) as lines:
                    for number, line in enumerate(iter(lambda: lines.readline(LONGEST_LINE + 1), b""), start=1):
                        if len(line) > LONGEST_LINE:
                            raise ValueError(
                                f"line {number} has more than {LONGEST_LINE:,} bytes; split this document"
                            )
                        if line.strip():
                            yield _json_row(f":{number}", line, self.text)
        except InputError:
            raise
        except (OSError, ValueError, NotImplementedError) as error:
            if isinstance(error, UnicodeDecodeError) and self.path.name.endswith(".txt"):
                raise BrokenFile(f"is not UTF-8 ({error})") from None
            reason = (isinstance(error, OSError) and error.strerror) or str(error).partition("\n")[0]
            advice = "; write it again or leave it out" if self.path.name.endswith(".parquet") else ""
            raise BrokenFile(f"cannot be read to its end ({reason}){advice}") from None


def _open_lines(path: Path) -> Any:
    if path.suffix not in COMPRESSIONS:
        return path.open("rb")
    if not path.stat().st_size:  # pyarrow reads it as an empty text, without an error
        raise ValueError("it has 0 bytes, so it is not a compressed file")
    # gzip.open would skip NUL bytes between the members of a file, which a crash or an unfinished download leaves.
    # pyarrow gets an open file, because it opens no path that is not UTF-8.
    stream = _pyarrow(path).input_stream(path.open("rb"), compression=COMPRESSIONS[path.suffix])
    return io.BufferedReader(stream, 2**20)


def _json_row(place: str, line: bytes, text: str) -> TextRow:
    try:
        row = storage.foreign_json(line.decode("utf-8-sig"), (text,))
    except UnicodeDecodeError as error:
        return TextRow(place, fault=f"is not UTF-8 ({error})")
    except InputError as error:
        return TextRow(place, fault=f"can be read in two ways ({error})")
    except (ValueError, RecursionError) as error:
        return TextRow(place, fault=f"is not JSON ({error}); write one JSON object per line")
    found = row.get(text, row) if isinstance(row, dict) else row
    if found is not None and not isinstance(found, str):
        how = f'write {{"{text}": "..."}} on every line, or name the key: source = [{{ source = ..., text = "KEY" }}]'
        return TextRow(place, fault=f'has no text under the key "{text}"; {how}')
    try:
        (found or "").encode()
    except UnicodeEncodeError as error:  # JSON can contain half of a surrogate pair
        return TextRow(place, fault=f"is not UTF-8 ({error})")
    return TextRow(place, found or "")


def _parquet_rows(path: Path, text: str) -> Iterator[TextRow]:
    _pyarrow(path)
    from pyarrow import parquet

    with parquet.ParquetFile(path, page_checksum_verification=True) as file:
        require_text_column(file.schema_arrow, text)
        yield from column_rows(rows.column(text) for rows in file.iter_batches(batch_size=_ROWS, columns=[text]))


def require_text_column(schema: Any, text: str) -> None:
    """Raise BrokenFile if an Arrow schema has no column of strings that is named ``text``."""
    from pyarrow import types

    if text not in schema.names:
        columns = ", ".join(schema.names)
        raise BrokenFile(f"has no column {text}, only {columns}; name one: source = [{{ source = ..., text = ... }}]")
    if schema.names.count(text) > 1:
        raise BrokenFile(f"has {schema.names.count(text)} columns {text}; rename or remove all but one")
    kind = schema.field(text).type
    if not (types.is_string(kind) or types.is_large_string(kind) or str(kind) == "string_view"):
        hint = "; to train on lists of token ids in parquet files, give their folder as hf:///folder"
        hint *= types.is_list(kind) and types.is_integer(kind.value_type)
        raise BrokenFile(f"has {kind} in column {text}, not strings (text) or lists of integers (token ids){hint}")


def column_rows(chunks: Iterable[Any]) -> Iterator[TextRow]:
    """Yield the rows of a column of strings. ``chunks`` are the Arrow arrays that make up the column."""
    import pyarrow

    number = 0
    for chunk in chunks:
        # Rows are decoded one by one, because some may be invalid UTF-8.
        binary = pyarrow.large_binary() if pyarrow.types.is_large_string(chunk.type) else pyarrow.binary()
        for raw in chunk.cast(binary).to_pylist():
            number += 1
            try:
                yield TextRow(f":{number}", (raw or b"").decode("utf-8-sig"))
            except UnicodeDecodeError as error:
                yield TextRow(f":{number}", fault=f"is not UTF-8 ({error})")


def _pyarrow(path: Path) -> Any:
    try:
        import pyarrow
    except ImportError:
        raise InputError(f"{path} needs the package pyarrow; run: pip install 'leaven[train]'") from None
    return pyarrow
