"""Open the store of a study: an Optuna storage in a file or on a server. Calls are repeated while the store is
unreachable.

If a connection breaks just after a call has changed the store, the repeated call makes the same change again.
:class:`~leaven.tuning.service.stored_study.StoredStudy` allows for this: if a call creates two Optuna trials, only
the first counts, and if it ends a trial twice, the trial keeps its result.
"""

import errno
import json
import os
import random
import re
import time
from abc import update_abstractmethods
from collections.abc import Callable, Generator
from contextlib import suppress
from functools import partialmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optuna.exceptions import StorageInternalError
from optuna.storages import BaseStorage, InMemoryStorage, JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock

from leaven import storage
from leaven.errors import InputError

if TYPE_CHECKING:
    from sqlalchemy.engine import URL

FIRST_PAUSE, LONGEST_PAUSE = 0.1, 10.0  # seconds between attempts
LOOK_SECONDS = 1.0  # between calls of ``waited`` in a pause
# How long SQLite, or a call of a journal, waits for a lock before ``waited`` is called. SQLite waits in C, where no
# signal is handled.
BUSY_SECONDS = 1.0
LOCK_SECONDS = 3.0
SECOND_LOOK = 1.0  # seconds until a damaged line of a journal is read again
GRACE_SECONDS = 3  # an older lock of Optuna counts as left by a killed process
RECORD = b'{"op_code":0,'  # the first bytes of a journal, whose first record creates a study
_SCHEMA = re.compile("no such (table|column)|malformed|could not decode", re.IGNORECASE)  # in errors of SQLite
# Operations of a journal on a running trial: create it; set a value, an intermediate loss, an attribute.
RUNNING = {4, 5, 7, 8}
READ_ONLY = "25006"  # the error code of a PostgreSQL server that was made a standby, or whose disk is nearly full
NEW_DATABASE = 2**20  # bytes; a new database with its tables and journal takes less
# The errors with which Optuna reads damaged content.
DAMAGE = (AssertionError, AttributeError, LookupError, TypeError, ValueError)

# Without these options, libpq waits for hours for a server that was switched off, and a command that is suspended
# within a transaction, or whose machine fails, blocks the other commands.
POSTGRESQL = {
    "client_encoding": "utf8",  # without this, a database with the encoding SQL_ASCII sends bytes
    "connect_timeout": "10",
    "keepalives_idle": "30",
    "keepalives_interval": "10",
    "keepalives_count": "3",
    "tcp_user_timeout": "60000",
    "options": "-c idle_in_transaction_session_timeout=60s -c tcp_keepalives_idle=30 -c tcp_keepalives_interval=10",
}

LOST = "it has lost trials; an older copy may have replaced it"


class StoreGone(RuntimeError):
    """The store is unreachable, or the results cannot be written. Repeating the command resumes the study."""


def open_store(
    where: str | Path | BaseStorage | None,
    waited: Callable[[float, str], None] = lambda seconds, cause: None,
    patience_seconds: float = 300,
) -> BaseStorage:
    """Return the Optuna storage at ``where``. It retries calls while the server or file is unreachable.

    Args:
        where: the path of an Optuna journal file, ``sqlite:///FILE``, ``postgresql://USER@HOST/DATABASE``, an Optuna
            storage, or None for a storage in memory.
        waited: called about every second during retries, with the seconds since the call began and the cause of the
            last failure. An exception that it raises ends the retries.
        patience_seconds: how long a call is retried. After that, the call raises StoreGone.

    Raises:
        InputError: if ``where`` is not a supported store, or cannot be opened.
        StoreGone: if an SQLite database is locked for longer than ``patience_seconds`` while it is opened.
    """
    if where is None:
        return InMemoryStorage()
    if isinstance(where, BaseStorage):
        if isinstance(where, Patient):
            return where
        return Patient(where, type(where).__name__, waited, patience_seconds)  # type: ignore[abstract]
    if not isinstance(where, os.PathLike | str):
        raise InputError(f"storage = {where!r:.60}: give the path of an Optuna journal file, or sqlite:///FILE")
    if isinstance(where, os.PathLike) or "://" not in where:
        journal = open_journal(Path(where).absolute())
        return Patient(journal, str(where), waited, patience_seconds)  # type: ignore[abstract]
    url = _url(where)
    store, reconnect = _database(url, waited, patience_seconds)
    return Patient(store, _name(url), waited, patience_seconds, reconnect)  # type: ignore[abstract]


def exists(where: str | Path) -> bool:
    """Return whether the file of a store exists and is not empty. A database on a server counts as existing."""
    file = Path(where)
    if "://" in str(where):
        url = _url(str(where))
        if url.drivername != "sqlite":
            return True
        file = Path(url.database or "")
    return file.is_file() and file.stat().st_size > 0


def _url(where: str) -> "URL":
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError

    scheme = where.partition("://")[0]
    try:
        url = make_url(where)
    except (ArgumentError, ValueError):
        raise InputError(f"{scheme}: not a valid URL; give postgresql://USER@HOST:PORT/DATABASE") from None
    if scheme == "sqlite":
        if not url.database or url.database == ":memory:" or url.database.startswith("file:"):
            raise InputError(
                f"{where}: the URL does not name a database file; give sqlite:///FILE, or sqlite:////FILE for an "
                "absolute path"
            )
        _require_place(Path(url.database), f"sqlite:///{Path(url.database) / 'study.db'}")
        return url
    if scheme in {"postgresql", "postgresql+psycopg"}:
        # After three slashes, the login would be the name of the database, which messages show.
        if not url.host and "@" in (url.database or ""):
            raise InputError(f"{scheme}: no host is given; give postgresql://USER@HOST:PORT/DATABASE")
        # Options in the URL override those of POSTGRESQL.
        return url.set(drivername="postgresql+psycopg", query={**POSTGRESQL, **url.query})
    raise InputError(
        f"{scheme} is not a supported store; give the path of a journal, sqlite:///FILE or postgresql://USER@HOST/DATABASE"
    )


def _require_place(file: Path, example: str) -> None:
    """Raise InputError if ``file`` is a folder or its parent folder is missing. ``example`` is for the message."""
    if file.is_dir():
        raise InputError(f"{file}: a folder; give a file in it, such as {example}")
    if not file.parent.is_dir():
        raise InputError(f"{file}: there is no folder {file.parent}; create it")


def _name(url: "URL") -> str:
    """Return a URL as text for messages: with ``***`` for the password, and without the options after "?"."""
    port = (url.port or 5432) if url.host else None
    plain = url.set(drivername=url.get_backend_name(), port=port, query={})
    return plain.render_as_string(hide_password=True)


def _database(
    url: "URL", waited: Callable[[float, str], None], patience_seconds: float
) -> tuple[BaseStorage, Callable[[], object]]:
    """Return Optuna's storage in a database, and a function that closes its connections. Retry while another process
    creates the tables or locks the file."""
    from optuna.storages import RDBStorage, _CachedStorage
    from sqlalchemy import event
    from sqlalchemy.exc import IntegrityError, SQLAlchemyError

    lite = url.drivername == "sqlite"
    file = Path(url.database or "")
    if lite and not file.exists() and storage.is_full(file.parent, NEW_DATABASE):
        # SQLite would leave an empty file, which must not be removed, because another command may have opened it.
        raise InputError(f"{_name(url)} cannot be created: its disk is full; make room, or use another folder")
    options: dict[str, Any] = {"connect_args": {"timeout": BUSY_SECONDS}} if lite else {}
    text = url.render_as_string(hide_password=False).replace("{", "{{").replace("}", "}}")  # Optuna formats it
    began = time.monotonic()
    while True:
        try:
            database = RDBStorage(text, engine_kwargs=options)
            break
        except ImportError:
            raise InputError("the driver for PostgreSQL is missing; run pip install 'leaven[postgresql]'") from None
        except (SQLAlchemyError, StorageInternalError) as error:
            raced = isinstance(error, IntegrityError) or "already exists" in str(error)
            if not raced and "is locked" not in str(error):
                raise InputError(f"{_name(url)} cannot be opened: {_reason(error)}") from None
            passed = time.monotonic() - began
            if passed > patience_seconds:
                raise StoreGone(
                    f"{_name(url)} has been locked for {passed:.0f} seconds; run the same command again later"
                ) from None
            cause = _reason(error)
        except RuntimeError as error:  # Optuna refuses tables of another version
            raise InputError(f"{_name(url)}: {error}") from None
        waited(passed, cause)
        time.sleep(random.uniform(0.05, 0.5))
    if lite:
        # Optuna reads rows and then changes them in one transaction, which must lock the file from the beginning.
        event.listen(database.engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN IMMEDIATE"))
        event.listen(database.engine, "connect", _begin_nothing)
        event.listen(database.engine, "do_connect", _open_existing)
        database.engine.dispose()
    # Without the cache, every read of a study reads all of its rows: 2,000 for 60 trials of 30 values.
    return _CachedStorage(database), database.engine.dispose


def _begin_nothing(connection: Any, record: object) -> None:
    """Keep sqlite3 from beginning a transaction itself."""
    connection.isolation_level = None


def _open_existing(dialect: object, record: object, cargs: list[Any], cparams: dict[str, Any]) -> None:
    """Let sqlite3 raise an error, not create a database, if the file is missing, as on an unmounted disk."""
    if not cparams.get("uri"):
        cargs[0], cparams["uri"] = f"{Path(cargs[0]).as_uri()}?mode=rw", True


def _causes(error: BaseException | None) -> list[BaseException]:
    causes = []
    while error is not None:
        causes.append(error)
        error = error.__cause__ or error.__context__
    return causes


def _is_away(error: Exception) -> bool:
    """Return whether an error of a store says that it is unreachable, locked, full or read-only now."""
    from sqlalchemy import exc

    return isinstance(error, OSError) or any(
        isinstance(cause, exc.OperationalError | exc.InterfaceError | exc.TimeoutError)
        or getattr(cause, "sqlstate", None) == READ_ONLY
        for cause in _causes(error)
    )


def _is_damage(error: Exception) -> bool:
    """Return whether an error says that a page or the schema of a database is damaged."""
    from sqlalchemy import exc

    return any(
        type(cause) is exc.DatabaseError
        or (isinstance(cause, exc.OperationalError) and _SCHEMA.search(str(cause.orig)) is not None)
        for cause in _causes(error)
    )


def _reason(error: Exception) -> str:
    """Return an error's message as one line. Prefer the message of the database driver."""
    cause = next((cause for cause in _causes(error) if hasattr(cause, "orig")), error)
    if isinstance(cause, KeyError) and "does not exist" in str(cause):  # of Optuna, for a row that existed
        return LOST
    if isinstance(cause, OSError) and cause.strerror:
        return cause.strerror
    message = str(getattr(cause, "orig", cause)).strip() or type(cause).__name__
    return message.splitlines()[0]


def open_journal(path: Path) -> JournalStorage:
    """Return Optuna's JournalStorage in the file ``path``, which is created if it does not exist. Raise InputError if
    the file cannot be created or read, is not a journal, or has a damaged line."""
    _require_place(path, str(path / "study.log"))
    try:
        storage.require_plain_file(path)
        if path.exists():
            with storage.open_file(path) as file:
                first = file.readline()
            if first[: len(RECORD)] != RECORD[: len(first)]:
                raise _not_a_journal(path)
            if storage.read_json_lines(path).damaged:
                time.sleep(SECOND_LOOK)  # while others write, a network disk may show zeros for a moment
            if damaged := storage.read_json_lines(path).damaged:
                raise InputError(
                    f"{path}: line {damaged[0]} is damaged; restore the file from a backup, or keep only the lines "
                    f"before it: head -n {damaged[0] - 1}"
                )
        return JournalStorage(Journal(path))
    except InputError:
        raise
    except OSError as error:
        raise InputError(
            f"{path}: cannot be opened: {error.strerror}; make it readable and writable, or give another path"
        ) from None
    except (LookupError, TypeError, ValueError, AttributeError, AssertionError, RecursionError):
        raise _not_a_journal(path) from None


def _not_a_journal(path: Path) -> InputError:
    return InputError(
        f"{path}: not a journal of Optuna, or a line is missing or was changed; restore the file from a backup, or "
        "give another one, or sqlite:///FILE for a database"
    )


class Journal(JournalFileBackend):
    """Optuna's journal in a file, which stays readable after an interrupted write. Reads and writes raise InputError
    if the file is now the journal of another study, and OSError if it is missing, has an unreadable line, or is
    shorter than before. A retry after an OSError may succeed."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self._first = b""  # the first line, once there is one; it has a random id

    def _require_same(self) -> None:
        """Raise InputError if the journal of another study has replaced the file, and OSError if it is missing or
        lacks lines that were read before."""
        read = next(reversed(self._log_number_offset.values()))  # the end of the last complete line
        with storage.open_file(self._file_path) as file:
            first, size = file.readline(), os.fstat(file.fileno()).st_size
        whole = first.startswith(RECORD) and first.endswith(b"\n")
        if whole and self._first not in {b"", first}:
            raise InputError(
                f"{self._file_path} is now the journal of another study, so this command has ended; if you moved "
                "the study of this command, run the command again with the new folder of the study"
            )
        if size < read or (self._first and not whole):
            raise OSError(errno.EIO, "an older copy has replaced the file", self._file_path)
        self._first = first if whole else b""

    def read_logs(self, log_number_from: int) -> Generator[dict[str, Any], None, None]:
        self._require_same()
        try:
            yield from super().read_logs(log_number_from)
        except ValueError as error:  # old content of a network disk, or a line that was cut off: read again
            raise OSError(errno.EIO, "a line cannot be read", self._file_path) from error

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        path = Path(self._file_path)
        self._require_same()
        lines = "".join(json.dumps(log, separators=(",", ":")) + "\n" for log in logs).encode()
        # A power cut may lose lines of a running trial. The line that ends a trial flushes its other lines, too.
        sync = not all(log["op_code"] in RUNNING for log in logs)
        # Two locks: the operating system releases the first one when its holder dies. Optuna's dashboard only knows
        # the second one.
        with storage.lock(path.with_name(f"{path.name}.flock"), LOCK_SECONDS):
            optunas = JournalFileOpenLock(self._file_path, GRACE_SECONDS)
            if not Path(optunas._lock_file).exists() and Path(optunas._lock_file).is_symlink():
                # Optuna's dashboard holds its lock, or was killed. JournalFileOpenLock would wait for it forever.
                raise OSError(
                    errno.EAGAIN,
                    f"another program holds the lock {optunas._lock_file}, a symbolic link; if that program has "
                    "ended, remove the link",
                )
            optunas.acquire()
            try:
                self._require_same()
                # This may remove an incomplete line. No reader has used it, because Optuna reads complete lines only.
                storage.append(path, lines, sync=sync, create=False)
            finally:
                with suppress(RuntimeError):  # this process was suspended, and another process removed the lock
                    optunas.release()


class Patient(BaseStorage):
    """A storage that repeats a call while the store is unreachable. It calls ``reconnect`` before each repetition."""

    def __init__(
        self,
        store: BaseStorage,
        name: str,
        waited: Callable[[float, str], None],
        patience_seconds: float,
        reconnect: Callable[[], object] = lambda: None,
    ) -> None:
        self._store, self._name, self._waited, self._patience = store, name, waited, patience_seconds
        self._reconnect = reconnect

    def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the store, again and again while the store is unreachable. Raise StoreGone if it stays so
        for ``patience_seconds``, and InputError if it is damaged or refuses the call, for example because a
        permission is missing."""
        since, pause = time.monotonic(), FIRST_PAUSE
        while True:
            try:
                return getattr(self._store, method)(*args, **kwargs)
            except InputError:
                raise
            except Exception as error:
                from sqlalchemy.exc import DBAPIError

                # A KeyError says that a row is missing, but leaven and Optuna ask for names that may not exist.
                damage = DAMAGE if method.startswith("get_") else KeyError
                damaged = isinstance(error, damage) and method != "get_study_id_from_name"
                if damaged or _is_damage(error):
                    raise InputError(
                        f"{self._name} is damaged ({_reason(error)}); restore it from a backup, or use another study"
                    ) from error
                if not _is_away(error):
                    if isinstance(error, StorageInternalError | DBAPIError):
                        raise InputError(f"{self._name} cannot be used: {_reason(error)}") from error
                    raise
                now, cause = time.monotonic(), _reason(error)
                if now - since >= self._patience:
                    raise StoreGone(
                        f"{self._name} has been unreachable for {now - since:.0f} seconds ({cause}); "
                        "run the same command again when it is back, to resume"
                    ) from error
            # Random, so that not all commands return to a server at once.
            until = min(since + self._patience, now + pause * random.uniform(0.5, 1.5))
            self._waited(now - since, cause)
            while (left := until - time.monotonic()) > 0:
                time.sleep(min(left, LOOK_SECONDS))
                self._waited(time.monotonic() - since, cause)
            pause = min(2 * pause, LONGEST_PAUSE)
            self._reconnect()


for _method in vars(BaseStorage):
    if not _method.startswith("_") and _method not in vars(Patient):
        setattr(Patient, _method, partialmethod(Patient._call, _method))
update_abstractmethods(Patient)  # type: ignore[type-abstract]
