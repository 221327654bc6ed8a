"""The file of a study without a server: Optuna's journal, for processes on many machines, killed at any time."""

import errno
import json
from collections.abc import Generator
from contextlib import suppress
from pathlib import Path
from typing import Any

from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock

from leaven import storage
from leaven.recipe.errors import InputError

LOCK_SECONDS = 30  # for which a lock is waited for; who holds it for so long was suspended, or has lost its disk
GRACE_SECONDS = 3  # after which Optuna's lock is that of a process that was killed while it wrote
RECORD, SQLITE = b'{"op_code":', b"SQLite format 3"  # how a journal and a database begin


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
    except (KeyError, TypeError, AttributeError, AssertionError):  # records that are not Optuna's
        raise InputError(f"{path}: no journal of Optuna's; give another file") from None


def _check(path: Path) -> None:
    with path.open("rb") as file:
        first = file.readline()
    if first.startswith(SQLITE):
        raise InputError(f"{path}: an SQLite database; give sqlite:///{path}")
    if first[: len(RECORD)] != RECORD[: len(first)]:
        raise InputError(f"{path}: no journal of Optuna's; give another file")
    if damaged := storage.read_json_lines(path).damaged:
        number = damaged[0]
        raise InputError(f"{path}: line {number} is damaged; keep what is before it: head -n {number - 1}")


class Journal(JournalFileBackend):
    """Optuna's file of lines, where a line that a kill or a full disk left torn harms nobody.

    The file is made here and never again: an unmounted disk must not get a second one.
    """

    def read_logs(self, log_number_from: int) -> Generator[dict[str, Any], None, None]:
        try:
            yield from super().read_logs(log_number_from)
        except ValueError as error:  # a network disk's stale page, or a torn line was cut off meanwhile: ask again
            raise OSError(errno.EIO, "a line cannot be read", self._file_path) from error

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        path = Path(self._file_path)
        path.stat()  # with its disk away there is nothing to lock
        lines = "".join(json.dumps(log, separators=(",", ":")) + "\n" for log in logs).encode()
        # The first lock is free at once when its holder dies; Optuna's own is for a dashboard that writes.
        with storage.lock(path.with_name(f"{path.name}.flock"), LOCK_SECONDS):
            optunas = JournalFileOpenLock(self._file_path, GRACE_SECONDS)
            optunas.acquire()
            try:
                # No reader has taken a torn line that is cut off here: to Optuna a line is one when it has its end.
                storage.append(path, lines, sync=True, create=False)
            finally:
                with suppress(RuntimeError):  # another took this process, asleep perhaps, for dead
                    optunas.release()
