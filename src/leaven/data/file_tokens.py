"""Read token ids from files. The first read of a block of `BLOCK` bytes verifies its checksum.

Files are read with ``pread``, because reading a memory map of a truncated file ends the process with
SIGBUS. ``datasets`` maps Arrow files into memory, so leaven checks their sizes before each read.
"""

import os
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from leaven.errors import InputError

BLOCK = 2**18
"""Number of bytes with one checksum. Larger blocks slow down the first steps of a run. Smaller blocks need a larger
index."""
MOST_OPEN = 128  # largest number of files that are held open
ADVICE = "restore it, or write it again"

_seek = Lock()


class BlockChecksums:
    """Computes the CRC-32 of each block of a file from the bytes that are written to it."""

    def __init__(self) -> None:
        self._blocks: list[int] = []
        self._current, self._room = 0, BLOCK

    def update(self, data: Any) -> None:
        rest = memoryview(data).cast("B")
        while len(rest):
            part, rest = rest[: self._room], rest[self._room :]
            self._current, self._room = crc32(part, self._current), self._room - len(part)
            if not self._room:
                self._blocks.append(self._current)
                self._current, self._room = 0, BLOCK

    def hexdigest(self) -> str:
        """Return eight hexadecimal digits for each block of the bytes so far; the last block may be incomplete."""
        last = [self._current] if self._room < BLOCK else []
        return np.array(self._blocks + last, "<u4").tobytes().hex()


def checksums_fit(checksums: Any, n_bytes: int) -> bool:
    """Return whether ``checksums`` has the form of the checksums of ``n_bytes`` bytes."""
    right = isinstance(checksums, str) and len(checksums) == checksums_size(n_bytes)
    return right and set(checksums) <= set("0123456789abcdef")


def checksums_size(n_bytes: int) -> int:
    """Return the number of hexadecimal digits in the checksums of ``n_bytes`` bytes."""
    return 8 * -(-n_bytes // BLOCK)


class CheckedTokens:
    """Base class of token ids in files. Reading a slice verifies its checksums. Slices must have step 1."""

    def __init__(self, dtype: np.dtype[Any], count: int) -> None:
        self.dtype, self._count = dtype, count
        self.n_bytes = count * dtype.itemsize
        self.set_checksums("")

    def set_checksums(self, checksums: str) -> None:
        """Set the checksums, from :class:`BlockChecksums`, for later reads. "" turns the comparison off."""
        self._checksums: NDArray[np.uint32] = np.frombuffer(bytes.fromhex(checksums), "<u4")
        self._unread = np.ones(len(self._checksums), bool)  # the blocks that are not checked yet
        self._stamp: Any = None  # time stamps of the files at the last read

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: slice, /) -> NDArray[Any]:
        """Return the token ids in a slice. Raise InputError if the file is truncated, unreadable or damaged."""
        start, stop, step = index.indices(self._count)
        assert step == 1
        if start >= stop:
            return np.zeros(0, self.dtype)
        first, last = start * self.dtype.itemsize, stop * self.dtype.itemsize
        blocks = slice(first // BLOCK, -(-last // BLOCK))
        if len(self._checksums) and (stamp := self._stamp_now()) != self._stamp:
            self._unread[:], self._stamp = True, stamp
        if not self._unread[blocks].any():
            return np.frombuffer(self._read(first, last), self.dtype)
        begin = blocks.start * BLOCK
        raw = memoryview(self._read(begin, min(blocks.stop * BLOCK, self.n_bytes)))
        for block in range(blocks.start, blocks.stop):
            at = block * BLOCK - begin
            if crc32(raw[at : at + BLOCK]) != self._checksums[block]:
                raise InputError(self._damage(block * BLOCK, min((block + 1) * BLOCK, self.n_bytes)))
        self._unread[blocks] = False
        return np.frombuffer(raw[first - begin : last - begin], self.dtype)

    def _stamp_now(self) -> Any:
        raise NotImplementedError

    def _read(self, first: int, last: int) -> bytes:
        """Return the bytes ``first`` to ``last - 1``. Raise InputError if they cannot be read."""
        raise NotImplementedError

    def _damage(self, first: int, last: int) -> str:
        """Return the error message for a wrong checksum of the bytes ``first`` to ``last - 1``."""
        raise NotImplementedError


class FileTokens(CheckedTokens):
    """The token ids in a file, from the byte ``offset`` on. Error messages end with ``advice``."""

    def __init__(
        self, path: Path, dtype: np.dtype[Any], count: int, *, offset: int = 0, advice: str = ADVICE
    ) -> None:
        super().__init__(dtype, count)
        self.path, self._offset, self._advice = path, offset, advice

    def _damage(self, first: int, last: int) -> str:
        first, last = self._offset + first, self._offset + last
        return (
            f"{self.path} is damaged: its bytes {first:,} to {last:,} are not those that were written; {self._advice}"
        )

    def _stamp_now(self) -> Any:
        with suppress(OSError):
            found = os.fstat(_open(self).number)
            return found.st_mtime_ns, found.st_ctime_ns
        return self._stamp  # :meth:`_read` raises the error

    def _read(self, first: int, last: int) -> bytes:
        try:
            file = _open(self)
            raw = read_at(file.number, last - first, self._offset + first)
            size = os.fstat(file.number).st_size if len(raw) < last - first else None
        except OSError as error:
            raise InputError(f"{self.path}: cannot be read: {error.strerror or error}; {self._advice}") from None
        if size is not None:
            whole = self._offset + self.n_bytes
            raise InputError(f"{self.path} has been truncated to {size:,} of {whole:,} bytes; {self._advice}")
        return raw


@dataclass(frozen=True)
class MappedFile:
    """A file that another package has mapped into memory."""

    path: str
    size: int  # bytes when the file was opened

    def require_whole(self) -> None:
        """Raise InputError if the file has been truncated. Reading the missing part would end the process."""
        try:
            size = os.stat(self.path).st_size
        except OSError:
            return  # a file that was deleted can still be read
        if size < self.size:
            raise InputError(f"{self.path} has been truncated to {size:,} of {self.size:,} bytes; {ADVICE}")


class ArrayTokens(CheckedTokens):
    """The token ids in an array. ``files``: the memory-mapped files of the array."""

    def __init__(self, ids: NDArray[Any], files: tuple[MappedFile, ...]) -> None:
        super().__init__(ids.dtype, len(ids))
        self.ids, self.files = np.ascontiguousarray(ids), files

    def _damage(self, first: int, last: int) -> str:
        size, where = self.dtype.itemsize, ", ".join(file.path for file in self.files) or "a data set in memory"
        return f"{where}: token ids {first // size:,} to {last // size:,} are not those that were written; {ADVICE}"

    def _stamp_now(self) -> Any:
        with suppress(OSError):  # a file that was deleted can still be read
            return [os.stat(file.path).st_mtime_ns for file in self.files]
        return self._stamp

    def _read(self, first: int, last: int) -> bytes:
        for file in self.files:
            file.require_whole()
        return self.ids.view(np.uint8)[first:last].tobytes()


class _OpenFile:
    def __init__(self, path: Path) -> None:
        self.number = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))

    def __del__(self) -> None:
        if hasattr(self, "number"):
            os.close(self.number)


@lru_cache(MOST_OPEN)
def _open(tokens: FileTokens) -> _OpenFile:
    return _OpenFile(tokens.path)


def read_at(descriptor: int, size: int, position: int) -> bytes:
    """Return ``size`` bytes of an open file from ``position`` on, or fewer at the end of the file."""
    parts: list[bytes] = []
    while size:
        if hasattr(os, "pread"):
            part = os.pread(descriptor, size, position)
        else:  # Windows
            with _seek:
                os.lseek(descriptor, position, os.SEEK_SET)
                part = os.read(descriptor, size)
        if not part:
            break
        parts.append(part)
        size, position = size - len(part), position + len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)
