"""The file of a study without a server: Optuna's journal, for processes of many machines that are killed at any time.

Optuna's own backend appends under a lock file. Here a line that a kill or a full disk left torn is cut off by whoever
appends next, and the lock of a killed process of this machine is taken at once.
"""

import errno
import json
import os
import random
import time
import uuid
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from leaven.recipe.errors import InputError
from leaven.storage import append
from leaven.tuning import processes

GRACE_SECONDS = (
    30.0  # after which a lock of another machine that never changes is that of a dead process; as Optuna's
)
RECORD = b'{"op_code":'  # how every line begins


def open_journal(path: Path) -> JournalStorage:
    """The journal in a file, which is made if there is none.

    Raises:
        InputError: if the file cannot be made or read, or is something else.
    """
    if path.is_dir():
        raise InputError(f"{path}: a folder; give the file of a journal, such as {path / 'journal.log'}")
    if not path.parent.is_dir():
        raise InputError(f"{path}: there is no folder {path.parent}")
    try:
        if path.exists():
            _check(path)
        return JournalStorage(Journal(str(path)))
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None
    except (KeyError, TypeError, AttributeError, AssertionError):  # records that are none of Optuna's
        raise InputError(f"{path}: no journal of Optuna's; give another file") from None


def _check(path: Path) -> None:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.startswith(b"SQLite format 3"):
                raise InputError(f"{path}: an SQLite database; give sqlite:///{path}")
            if number == 1 and line[: len(RECORD)] != RECORD[: len(line)]:
                raise InputError(f"{path}: no journal of Optuna's; give another file")
            try:
                json.loads(line)
            except ValueError:
                if line.endswith(b"\n"):
                    raise InputError(
                        f"{path}: line {number} is damaged; keep what is before it: head -n {number - 1}"
                    ) from None


class Journal(JournalFileBackend):
    """Optuna's file of lines. It is made here and never again: an unmounted disk must not get a second one."""

    def read_logs(self, log_number_from: int) -> Generator[dict[str, Any], None, None]:
        try:
            yield from super().read_logs(log_number_from)
        except ValueError as error:  # a network disk's stale page, or a torn line was cut off meanwhile: ask again
            raise OSError(errno.EIO, "a line cannot be read", self._file_path) from error

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        lines = "".join(json.dumps(log, separators=(",", ":")) + "\n" for log in logs).encode()
        with _locked(Path(f"{self._file_path}.lock")):
            # No reader has taken a torn line that is cut off here: to Optuna a line is one when it has its end.
            append(Path(self._file_path), lines, sync=True, create=False)


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Hold a file made with O_EXCL, which is atomic on NFS 3 and later and on disks without symbolic links.

    It has the name of Optuna's lock, so that a dashboard's and ours exclude each other. By default Optuna's is a link
    to the journal, by a path that may lead nowhere from elsewhere; a dead process's is then waited for without end.
    """
    mine = f"{processes.identity(os.getpid())} {uuid.uuid4()}"
    pause, seen, since = 0.001, "", time.monotonic()
    while True:
        try:
            made = os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
            break
        except FileExistsError:
            owner = _owner(file)
            if owner != seen:
                seen, since = owner, time.monotonic()
            if _dead(owner) or time.monotonic() - since > GRACE_SECONDS:
                _break(file, owner)
            time.sleep(pause * random.uniform(0.5, 1.5))
            pause = min(2 * pause, 0.05)
    try:
        with suppress(OSError):  # a full disk may have room for a name, and none for what is in it
            os.write(made, mine.encode())
        yield
    finally:
        os.close(made)
        # No error here undoes what was written. Whoever took this process for dead has the lock now.
        with suppress(OSError):
            if _owner(file) in {mine, ""}:
                file.unlink()


def _owner(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""


def _break(file: Path, owner: str) -> None:
    aside = Path(f"{file}.{uuid.uuid4()}")
    with suppress(OSError):
        file.rename(aside)
        if aside.read_text() != owner:  # another was quicker, and it is his new one
            os.link(aside, file)
        aside.unlink()


def _dead(owner: str) -> bool:
    return processes.gone(owner.split(maxsplit=1)[0]) if owner else False
