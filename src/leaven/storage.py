"""Write and lock files so that they survive kills, power cuts and full disks.

If the new content of a file cannot be written, the old file stays. Outside /dev and /proc, no function writes
through a link to a file, because somebody else may have made the link. Functions for a path that a user has typed
raise InputError.
"""

import errno
import json
import math
import os
import re
import shutil
import socket
import stat
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from glob import escape
from hashlib import blake2b, file_digest
from io import BufferedReader, FileIO
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, BinaryIO, cast

from leaven.errors import InputError

LARGEST = 2**30  # bytes; default limit of :func:`read` on the size of a file
PAGE = b"<!doctype html"  # how an HTML page of leaven begins

# A URL, whose :// becomes :/ in a path, or password= as in the login of a database. C:/ of Windows is no URL.
_ADDRESS = re.compile(r"\w{2}:/|password\s*=", re.IGNORECASE)

_PAGE_SEAL = b"\n<!-- digest "  # before the digest at the end of a page

FULL = {errno.ENOSPC, errno.EDQUOT}  # error numbers of a disk or quota that is full

_AWAY = """EIO ESTALE ENOTCONN ETIMEDOUT ENODEV ESHUTDOWN EHOSTDOWN EHOSTUNREACH ENETDOWN ENETUNREACH ECONNABORTED
    ECONNREFUSED ECONNRESET EREMOTEIO ENOLINK ECOMM"""
AWAY = {getattr(errno, name) for name in _AWAY.split() if hasattr(errno, name)}
"""Error numbers of a disk that is temporarily unreachable, for example a network disk."""

DENIED = {errno.EACCES, errno.EPERM, errno.EROFS, getattr(errno, "EKEYEXPIRED", errno.EACCES)}
"""Error numbers of a write without permission, for example because a Kerberos ticket has expired."""

EMPTY_LOCK_SECONDS = 10.0
"""On a disk without flock, :func:`lock` raises InputError if a lock file stays empty for this many seconds."""


def expanded(path: Path | str) -> Path:
    """Return ``path`` with ~ or ~NAME replaced by the home folder. Raise InputError for an unknown home folder."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise InputError(f"{path}: this home folder is not known; set HOME, or give a path without ~") from None


def open_file(path: Path | str) -> BufferedReader:
    """Open a regular file for reading. Raise OSError for other files: reading a pipe or a device may never end."""
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except ValueError:  # the path contains NUL or half of a surrogate pair
        raise FileNotFoundError(errno.ENOENT, "no file can have this name", str(path)) from None
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "a pipe or a device, not a regular file", str(path))


def read(path: Path | str, most: float = LARGEST) -> bytes:
    """Return the content of a regular file. Raise OSError if it cannot be read, or has more than ``most`` bytes."""
    with open_file(path) as file:
        if os.fstat(file.fileno()).st_size > most:
            raise OSError(errno.EINVAL, f"larger than {most:,} bytes", str(path))
        return file.read()


def require_target(path: Path, advice: str) -> None:
    """Raise InputError with ``advice`` if ``path`` or a folder above it is a link whose target is missing."""
    for each in () if os.path.exists(path) else (path, *path.parents):
        if os.path.islink(each) and not os.path.exists(each):
            raise InputError(
                f"{each} is a link to {os.readlink(each)}, which is missing (is its disk mounted?); {advice}"
            )


def require_file(path: Path | str) -> None:
    """Raise OSError if a path is not a readable regular file. Call this before a library opens the path."""
    open_file(path).close()


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Yield a temporary file, open for writing. It replaces ``path`` when the ``with`` block ends without an error.

    A device or a pipe at ``path`` is written directly. Raise OSError if nobody reads the pipe.
    """
    if is_device(path):
        descriptor = os.open(path, os.O_WRONLY | os.O_TRUNC | getattr(os, "O_NONBLOCK", 0))
        os.set_blocking(descriptor, True)
        with os.fdopen(descriptor, "wb") as file:
            yield file
        return
    _remove_leftovers(path)
    temporary = _temporary(path)
    try:
        with open_to_write(temporary, os.O_CREAT | os.O_TRUNC) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def is_device(path: Path) -> bool:
    """Return whether a path is a device, a pipe, or a link in /dev or /proc, such as /dev/stdout."""
    if path.is_symlink():  # elsewhere, somebody else may have made the link
        return any(path.absolute().is_relative_to(folder) for folder in ("/dev", "/proc"))
    return path.exists() and not (path.is_file() or path.is_dir())


def write(path: Path, content: bytes) -> None:
    """Create or replace a file. After a crash, it contains either all of the old content or all of the new."""
    with replacing(path) as file:
        file.write(content)


def place_folder(temporary: Path, final: Path) -> None:
    """Sync the files in ``temporary``, then rename this folder to ``final``, which must be new or empty."""
    sync_folder(temporary)
    if final.is_dir():
        final.rmdir()
    temporary.rename(final)
    sync_folder(final.parent)


def require_plain_file(path: Path) -> None:
    """Raise InputError if ``path`` is a link, a folder, a pipe or a device."""
    with suppress(OSError):
        mode = path.lstat().st_mode
        if stat.S_ISLNK(mode):
            raise InputError(f"{path}: this is a link to {os.readlink(path)}; replace it with the file itself")
        if not stat.S_ISREG(mode):
            kind = "a folder" if stat.S_ISDIR(mode) else "a pipe or a device"
            raise InputError(f"{path}: this is {kind}; move it away, because leaven writes a file there")


def open_to_write(path: Path, flags: int = 0, buffering: int = -1, *, separate: bool = True) -> BinaryIO:
    """Open a file to read and write it in place. Raise InputError for a link, a folder, a pipe or a device.

    With ``separate``, a file with hard links is first replaced by a copy; its other names keep the old content. Use
    False for a file that another process may have locked. ``flags`` are further flags of :func:`os.open`.
    """
    require_plain_file(path)
    if separate and path.exists() and (there := path.stat()).st_nlink > 1:
        with open_file(path) as shared, replacing(path) as own:
            shutil.copyfileobj(shared, own)
            # A user who is not root may keep the group but not the owner. Windows has neither.
            for owner, group in ((-1, there.st_gid), (there.st_uid, -1)):
                with suppress(OSError, AttributeError):
                    os.fchown(own.fileno(), owner, group)
            with suppress(OSError, AttributeError):
                os.fchmod(own.fileno(), stat.S_IMODE(there.st_mode))
    no_link = getattr(os, "O_NOFOLLOW", 0)  # in case somebody makes a link just now
    flags |= os.O_RDWR | no_link | getattr(os, "O_BINARY", 0)
    return os.fdopen(os.open(path, flags, 0o666), "r+b", buffering)


def write_text(path: Path | str, text: str) -> None:
    """Write a text with :func:`write`. Raise InputError if that fails, or if ``path`` is a folder or a link."""
    path = Path(path)
    try:
        if path.is_dir() or not path.name:
            raise InputError(f"{path}: this is a folder; give the name of a file")
        if path.is_symlink() and not is_device(path):
            raise InputError(f"{path}: this is a link to {os.readlink(path)}; give the name of the file itself")
        write(path, text.encode())
    except UnicodeEncodeError as error:
        there = ascii(text[max(0, error.start - 20) : error.end])
        raise InputError(
            f"{path}: cannot be written: the last character of the text {there} is not valid Unicode; change the "
            "value or the file name that contains this text"
        ) from None
    except OSError as error:
        unread = "a pipe that nobody reads" if error.errno == errno.ENXIO else error.strerror
        raise InputError(f"{path}: cannot be written: {unread}") from None


def digest(content: bytes | BufferedReader, size: int = 8) -> str:
    """Return the BLAKE2b hash of bytes, or of an open file, as 2 x ``size`` hexadecimal digits."""
    if isinstance(content, bytes):
        return blake2b(content, digest_size=size).hexdigest()
    return file_digest(content, lambda: blake2b(digest_size=size)).hexdigest()


def require_page(path: Path) -> None:
    """Raise InputError if leaven must not write an HTML page to ``path``.

    The name must end in .html. A file there must be empty, or a page that nobody edited after leaven wrote it. A pipe
    or a device is allowed.
    """
    if is_device(path):
        return
    there = _content(path) if path.is_file() else b""
    page, seal, found = there.replace(b"\r\n", b"\n").rpartition(_PAGE_SEAL)  # a copy may have other line ends
    if there and not (seal and found == digest(page).encode() + b" -->\n"):
        raise InputError(f"{path} was not written by leaven, or was edited since; rename it, or give another name")
    if path.suffix.lower() != ".html":
        raise InputError(f"{path}: give a name that ends in .html, such as report.html")


def _content(path: Path) -> bytes:
    try:
        return read(path)
    except OSError as error:
        raise InputError(f"{path}: exists and cannot be read: {error.strerror}; give another name") from None


def write_page(path: Path, html: str) -> None:
    """Write an HTML page and its digest. Raise InputError if leaven must not write to ``path`` (`require_page`)."""
    require_page(path)
    content = html.encode(errors="backslashreplace")  # half a surrogate pair is not UTF-8
    seal = digest(content.replace(b"\r\n", b"\n"))
    write_text(path, f"{content.decode()}{_PAGE_SEAL.decode()}{seal} -->\n")


def require_folder_name(path: Path) -> None:
    """Raise InputError if a path is a URL, a database login (with a password), or not UTF-8."""
    try:
        path.as_posix().encode()
    except UnicodeEncodeError:
        raise InputError(f"{path}: the path is not UTF-8; rename the folder, or give another one") from None
    if _ADDRESS.search(path.as_posix()):
        raise InputError(
            "the path of the folder is a URL or the login of a database; give the path of a folder on this machine"
        )


def is_full(folder: Path, size: int = 2**16) -> bool:
    """Return whether a disk or quota is too full for ``size`` more bytes in a folder."""
    try:
        with TemporaryFile(dir=folder) as file:
            file.write(bytes(size))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return error.errno in FULL
    return False


def may_pass(error: str) -> bool:
    """Return whether an error may be temporary: its message names a full, missing or unwritable disk."""
    return any(os.strerror(number) in error for number in FULL | AWAY | DENIED)


def require_writable(path: Path) -> None:
    """Raise InputError if the user has no permission to write or create a folder, or if its name cannot be used."""
    require_folder_name(path)
    there = next((folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists()), path)
    if there.is_dir() and not os.access(there, os.W_OK | os.X_OK):
        raise InputError(f"{there}: cannot be written; use another folder, or give your user write permission")


def make_folder(path: Path) -> None:
    """Create a folder and its parents, or raise InputError."""
    require_folder_name(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        if path.is_symlink():
            raise InputError(
                f"{path}: a link to {os.readlink(path)}, which is not a folder; mount its disk, or use another folder"
            ) from None
        file = next((each for each in path.parents if each.is_file()), path)
        raise InputError(f"{file}: a file of this name exists where a folder is needed; use another name") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be created: {error.strerror}; use another folder") from None


def require_free(path: Path, *, device: bool = False) -> None:
    """Raise InputError if ``path`` is in use: a file, a folder with files, the current folder or a disk's root."""
    require_folder_name(path)
    if device and is_device(path):
        return
    current = path.exists() and path.samefile(os.curdir)
    if current or os.path.ismount(os.path.realpath(path)):
        what = "current folder" if current else "root of a disk"
        raise InputError(
            f"{path} is the {what}, which cannot be replaced; give a new folder in it, such as {path / 'model'}"
        )
    if os.path.lexists(path) and (not path.is_dir() or any(path.iterdir())):
        raise InputError(f"{path} exists already; give another name")


@contextmanager
def written_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder, which is renamed to ``path`` if the ``with`` block ends without an error.

    An empty folder at ``path`` keeps its permissions and group. Raise InputError if ``path`` is not free
    (:func:`require_free`) or cannot be written.
    """
    require_free(path)
    final = Path(os.path.realpath(path))
    make_folder(final.parent)
    _remove_leftovers(final)
    temporary = _temporary(final)
    try:
        temporary.mkdir()
        if final.is_dir():
            with suppress(PermissionError):  # a group of others, or a disk without groups
                if (group := final.stat().st_gid) != temporary.stat().st_gid:
                    os.chown(temporary, -1, group)
            shutil.copystat(final, temporary)
        yield temporary
        for folder, _, names in os.walk(temporary):
            for name in names:
                sync_file(Path(folder, name))
            sync_folder(Path(folder))
        place_folder(temporary, final)
    except (OSError, UnicodeEncodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise InputError(f"{path}: cannot be written: {why}; nothing was written") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def share(path: Path) -> None:
    """Give a file the permissions of a new file. Some libraries create files that only their owner can read."""
    new = _temporary(path)
    with new.open("xb") as file:
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
    new.unlink()
    path.chmod(mode)


def sync_file(path: Path) -> None:
    """Flush the content of a file to the disk."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Flush the file names in a folder to the disk, if the system and the disk can do this."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(descriptor)


@cache
def _machine() -> str:
    """Return a hash of the host name and, on Linux, of the process namespace, which differs between containers."""
    named = socket.gethostname()
    with suppress(OSError):
        named += os.readlink("/proc/self/ns/pid")
    return digest(named.encode(), 4)


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.{_machine()}-{os.getpid()}.tmp")


def _remove_leftovers(path: Path) -> None:
    """Remove temporary files for ``path`` that killed processes of this machine have left."""
    for left in path.parent.glob(f".{escape(path.name)}.{_machine()}-*.tmp"):
        from psutil import pid_exists  # slow to import

        name = left.name.removesuffix(".tmp").rpartition("-")[2]
        if not (name.isascii() and name.isdecimal()):
            continue  # not ours
        pid = int(name)
        if pid == os.getpid() or not pid_exists(pid):  # an earlier, killed process may have had the same id
            with suppress(OSError):
                shutil.rmtree(left) if left.is_dir() else left.unlink()


def append(path: Path, lines: bytes, *, sync: bool = False, create: bool = True) -> None:
    """Append complete lines to a file. The caller must hold a lock.

    A last line that a crash has cut off is removed first. After an error, the file may have some of ``lines``, but no
    incomplete line. With ``sync``, the lines survive a power cut. If ``create`` is false, the file must exist.
    """
    with open_to_write(path, os.O_APPEND | (os.O_CREAT if create else 0), buffering=0) as opened:
        file = cast(FileIO, opened)
        tail = _torn(file)
        if json_object(tail) is not None:  # only its newline is missing
            lines = b"\n" + lines
        elif tail:
            file.truncate(_end(file) - len(tail))
        before = _end(file)
        try:
            while lines:
                lines = lines[file.write(lines) :]
        except OSError:
            with suppress(OSError):
                file.truncate(max(before, _end(file) - len(_torn(file))))
            raise
        if sync:
            os.fsync(file.fileno())


def append_json(path: Path, document: Mapping[str, Any]) -> None:
    """Append a JSON object as one line, and sync it to disk. The caller must hold a lock."""
    append(path, json.dumps(document).encode() + b"\n", sync=True)


def ends_with(path: Path, document: Mapping[str, Any]) -> bool:
    """Return whether a file ends with ``document`` as a line. A failed append may have written it."""
    line = json.dumps(document).encode() + b"\n"
    with suppress(FileNotFoundError), open_file(path) as file:
        file.seek(-min(len(line), file.seek(0, os.SEEK_END)), os.SEEK_END)
        return file.read() == line
    return False


def _end(file: FileIO) -> int:
    return file.seek(0, os.SEEK_END)


def _torn(file: FileIO) -> bytes:
    """Return the bytes after the last newline of a file."""
    tail, start = b"", _end(file)
    while start and b"\n" not in tail:
        size = min(start, 2**16)
        start = file.seek(start - size)
        tail = file.read(size) + tail
        if tail.endswith(b"\n"):
            return b""
    return tail.rpartition(b"\n")[2]


@dataclass(frozen=True)
class JsonLines:
    documents: list[dict[str, Any]]  # the JSON objects, in order
    damaged: list[int]  # line numbers (from 1) of complete, non-empty lines that are not JSON objects
    numbers: list[int]  # the line number of each entry of ``documents``
    torn: bool = False  # whether an incomplete last line was ignored

    def skipped(self, file: Path | str) -> str:
        """Return a sentence that counts the damaged lines of ``file``, or "" if there are none."""
        if not self.damaged:
            return ""
        first, last = self.damaged[0], self.damaged[-1]
        if first == last:
            return f"line {first} of {file} is damaged and was skipped"
        return f"{len(self.damaged)} damaged lines of {file}, from line {first} to {last}, were skipped"


def read_json_lines(path: Path, decode: Callable[[bytes], Any] = json.loads) -> JsonLines:
    """Return the content of a file with one JSON object per line. A missing file counts as an empty file.

    An incomplete last line is ignored and sets ``torn``. ``decode`` returns the value of a line or raises ValueError;
    an InputError of it ends the reading.
    """
    documents: list[dict[str, Any]] = []
    damaged: list[int] = []
    numbers: list[int] = []
    try:
        *lines, tail = read(path, math.inf).split(b"\n")
    except FileNotFoundError:
        lines, tail = [], b""
    for number, line in enumerate([*lines, tail], start=1):
        try:
            document = json_object(line, decode)
        except InputError as error:
            raise InputError(f"{path}: line {number}: {error}") from None
        if document is not None:
            documents.append(document)
            numbers.append(number)
        elif line.strip() and number <= len(lines):
            damaged.append(number)
    return JsonLines(documents, damaged, numbers, torn=bool(tail.strip()) and document is None)


def json_object(line: bytes, decode: Callable[[bytes], Any] = json.loads) -> dict[str, Any] | None:
    """Return the JSON object in a line, or None if the line is not one JSON object."""
    try:
        value = decode(line)
    except InputError:
        raise
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def foreign_json(text: str | bytes, keys: Collection[str] | None = None) -> Any:
    """Return the value of a JSON text that another program wrote.

    Raise InputError if an object has a key more than once, and ValueError if the text is not JSON. With ``keys``,
    only these keys of the outermost object count.
    """
    pairs: list[tuple[str, Any]] = []

    def each_once(found: list[tuple[str, Any]]) -> dict[str, Any]:
        nonlocal pairs
        pairs = found  # at the end, those of the outermost object
        if keys is None:
            _require_once(found, None)
        return dict(found)

    if isinstance(text, bytes):
        text = text.decode(json.detect_encoding(text))
    value = json.JSONDecoder(object_pairs_hook=each_once).decode(text)
    if keys is not None and isinstance(value, dict):
        _require_once(pairs, keys)
    return value


def _require_once(pairs: Sequence[tuple[str, Any]], keys: Collection[str] | None) -> None:
    if len(dict(pairs)) < len(pairs):
        for name, number in Counter(name for name, _ in pairs).items():
            if number > 1 and (keys is None or name in keys):
                raise InputError(f"one JSON object has the key {json.dumps(name)} {number} times; keep one")


@contextmanager
def lock(path: Path, seconds: float = -1) -> Iterator[None]:
    """Hold a lock file during the ``with`` block, so that other processes and threads wait.

    A killed process releases its lock, except on a disk without flock.

    Raises:
        TimeoutError: if the lock is not free after ``seconds``. A negative number means no limit.
        OSError: if the lock file cannot be made. The error names the lock file, or else its folder.
        InputError: if ``path`` is a link, a folder, a pipe or a device. Also on a disk without flock, if the lock
            is not free and may be left over: with ``seconds`` 0, or if the lock file stays empty.
    """
    from filelock import FileLock, SoftFileLock  # slow to import

    require_plain_file(path)
    held, empty = FileLock(path, timeout=seconds), False
    try:
        try:
            held.acquire(timeout=EMPTY_LOCK_SECONDS if seconds < 0 else seconds)
        except TimeoutError:
            # Without flock, filelock takes any lock file for a lock. Its own files name their process. An empty file
            # was left by flock, or another machine holds it.
            with suppress(FileNotFoundError):  # released just now
                empty = path.stat().st_size == 0
            if isinstance(held, SoftFileLock) and (seconds >= 0 or empty):
                advice = (
                    f"{path}: this lock file may be left over, because its disk has no flock; remove the file if no "
                    "process uses this folder"
                )
                raise (InputError if empty or not seconds else TimeoutError)(advice) from None
            if seconds >= 0:
                raise
            held.acquire()
    except NotImplementedError:  # an older version of filelock, on a disk without flock
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK), str(path)) from None
    except OSError as error:
        if error.errno is None:
            raise
        at_fault = path if path.exists() else path.parent
        raise OSError(error.errno, os.strerror(error.errno), str(at_fault)) from None
    try:
        yield
    finally:
        held.release()
