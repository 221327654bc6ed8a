"""Open the store of a study: an Optuna storage in a file or on a server. Calls are repeated while the store is
unreachable.

A connection may break just after a call has changed the store. A repeated call could then do its work twice. So a
repeated creation of a trial first looks for a trial with the call's unique id (the ticket). A repeated call may end a
trial that has ended, if the result is equal. All other calls can be repeated without harm.
"""

import errno
import json
import os
import random
import re
import time
import uuid
from abc import update_abstractmethods
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from copy import copy
from functools import partialmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optuna.exceptions import StorageInternalError, UpdateFinishedTrialError
from optuna.storages import BaseStorage, InMemoryStorage, JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from optuna.trial import FrozenTrial, TrialState, create_trial

from leaven import storage
from leaven.errors import InputError
from leaven.storage import is_full

if TYPE_CHECKING:
    from sqlalchemy.engine import URL, ExceptionContext

FIRST_PAUSE, LONGEST_PAUSE = 0.1, 10.0  # seconds between attempts
LOOK_SECONDS = 1.0  # between calls of ``waited`` in a pause
# How long SQLite, or a call of a journal, waits for a lock before ``waited`` is called. SQLite waits in C, where no
# signal is handled.
BUSY_SECONDS = 1.0
LOCK_SECONDS = 3.0
OPENINGS = 20  # attempts to open a new database while other processes create its tables
NEW_DATABASE = 2**20  # bytes; a new database with its tables and journal takes less
SECOND_LOOK = 1.0  # seconds until a damaged line of a journal is read again
GRACE_SECONDS = 3  # an older lock of Optuna counts as left by a killed process
# The first bytes of a journal, whose first record creates a study (op code 0), and of a database.
RECORD, SQLITE = b'{"op_code":0,', b"SQLite format 3"
_SCHEMA = re.compile("no such (table|column)|malformed|could not decode", re.IGNORECASE)  # in errors of SQLite
# Operations of a journal on a running trial: create it; set a value, an intermediate loss, an attribute.
RUNNING = {4, 5, 7, 8}
READ_ONLY = "25006"  # the error code of a PostgreSQL server that was made a standby, or whose disk is nearly full
TICKET = "leaven:ticket"  # a system attribute of every trial: the id of the call that created the trial

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
    waited: Callable[[float], None] = lambda seconds: None,
    patience_seconds: float = 300,
) -> BaseStorage:
    """Return the Optuna storage at ``where``. It retries calls while the server or file is unreachable.

    Args:
        where: the path of an Optuna journal file, ``sqlite:///FILE``, ``postgresql://USER@HOST/DATABASE``, an Optuna
            storage, or None for a storage in memory.
        waited: called about every second during retries, with the seconds since the call began. An exception that it
            raises ends the retries.
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
        store, name = where, type(where).__name__
    elif not isinstance(where, os.PathLike | str):
        raise InputError(f"storage = {where!r:.60}: give the path of an Optuna journal file, or sqlite:///FILE")
    elif isinstance(where, os.PathLike) or "://" not in where:
        store, name = open_journal(Path(where).absolute()), str(where)
    else:
        url = _url(where)
        store, name = _database(url, waited, patience_seconds), _name(url)
    return Patient(store, name, waited, patience_seconds)  # type: ignore[abstract]  # update_abstractmethods


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
        raise InputError(f"{scheme}://: not a valid URL; give postgresql://USER@HOST:PORT/DATABASE") from None
    if scheme == "sqlite":
        file = Path(url.database or "")
        if not url.database or url.database == ":memory:" or url.database.startswith("file:"):
            raise InputError(
                f"{where}: the URL does not name a database file; give sqlite:///FILE, or sqlite:////FILE for an "
                "absolute path"
            )
        if file.is_dir() or not file.parent.is_dir():
            fault = "a folder; give a file" if file.is_dir() else f"there is no folder {file.parent}; create it"
            raise InputError(f"{where}: {fault}")
        return url
    if scheme in {"postgresql", "postgresql+psycopg"}:
        # Options in the URL override those of POSTGRESQL.
        return url.set(drivername="postgresql+psycopg", query={**POSTGRESQL, **url.query})
    raise InputError(
        f"{scheme}://: not a supported store; give the path of a journal, sqlite:///FILE or postgresql://USER@HOST/DATABASE"
    )


def _name(url: "URL") -> str:
    """Return a URL as text for messages: with ``***`` for the password, and without the options after "?"."""
    port = (url.port or 5432) if url.host else None
    plain = url.set(drivername=url.get_backend_name(), port=port, query={})
    return plain.render_as_string(hide_password=True)


def _database(url: "URL", waited: Callable[[float], None], patience_seconds: float) -> BaseStorage:
    """Open Optuna's storage in a database. Retry while another process creates the tables or locks the file."""
    from optuna.storages import RDBStorage, _CachedStorage
    from optuna.storages._rdb import models
    from sqlalchemy import event
    from sqlalchemy.exc import IntegrityError, SQLAlchemyError
    from sqlalchemy.orm import Session

    class Database(RDBStorage):
        """Optuna's RDBStorage with two changes. If the first attempt to create a trial succeeded, a retry returns
        this trial. If a trial that was in the database is missing, LookupError is raised."""

        def _get_trials(
            self, study_id: int, states: Any, included_trial_ids: set[int], trial_id_greater_than: int
        ) -> list[FrozenTrial]:
            # Those that ran when Optuna last read them, and the last one that had ended, which Optuna would not read.
            known = {*included_trial_ids, trial_id_greater_than} - {-1}
            trials = super()._get_trials(study_id, states, known, trial_id_greater_than)
            if known - {trial._trial_id for trial in trials}:
                raise LookupError(LOST)
            return trials

        def _get_prepared_new_trial(
            self, study_id: int, template_trial: FrozenTrial | None, session: Session
        ) -> models.TrialModel:
            assert template_trial is not None
            attribute = models.TrialSystemAttributeModel
            ticket = json.dumps(template_trial.system_attrs[TICKET])
            created = session.query(models.TrialModel).join(attribute)
            created = created.filter(attribute.key == TICKET, attribute.value_json == ticket)
            return created.first() or super()._get_prepared_new_trial(study_id, template_trial, session)

    lite = url.drivername == "sqlite"
    file = Path(url.database or "")
    if lite and not file.exists() and is_full(file.parent, NEW_DATABASE):
        # SQLite would leave an empty file, which must not be removed, because another command may have opened it.
        raise InputError(f"{_name(url)} cannot be created: its disk is full; make room, or use another folder")
    options: dict[str, Any] = {"connect_args": {"timeout": BUSY_SECONDS}} if lite else {"pool_pre_ping": True}
    text = url.render_as_string(hide_password=False).replace("{", "{{").replace("}", "}}")  # Optuna formats it
    began, left = time.monotonic(), OPENINGS
    while True:
        try:
            storage = Database(text, engine_kwargs=options)
            break
        except ImportError:
            raise InputError("the driver for PostgreSQL is missing; run pip install 'leaven[postgresql]'") from None
        except (SQLAlchemyError, StorageInternalError) as error:
            raced = isinstance(error, IntegrityError) or "already exists" in str(error)
            left -= raced
            if not left or not (raced or "is locked" in str(error)):
                raise InputError(f"{_name(url)} cannot be opened: {_reason(error)}") from None
            passed = time.monotonic() - began
            if passed > patience_seconds:
                raise StoreGone(
                    f"{_name(url)} has been locked for {passed:.0f} seconds; run the same command again later"
                ) from None
        except RuntimeError as error:  # Optuna refuses tables of another version
            raise InputError(f"{_name(url)}: {error}") from None
        waited(passed)
        time.sleep(random.uniform(0.05, 0.5))
    if lite:
        # Optuna reads rows and then changes them in one transaction, which must lock the file from the beginning.
        event.listen(storage.engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN IMMEDIATE"))
        event.listen(storage.engine, "connect", _begin_nothing)
        event.listen(storage.engine, "handle_error", _leave_moved_file)
        storage.engine.dispose()
    else:
        event.listen(storage.engine, "handle_error", _leave_read_only)
    # Without the cache, every read of a study reads all of its rows: 2,000 for 60 trials of 30 values.
    return _CachedStorage(storage)


def _leave_read_only(context: "ExceptionContext") -> None:
    """Close a connection after a read-only error. A new connection may be able to write."""
    if getattr(context.original_exception, "sqlstate", None) == READ_ONLY:
        context.is_disconnect = True


def _leave_moved_file(context: "ExceptionContext") -> None:
    """Drop the connection after an error if its SQLite file was moved and a new file has the old name.

    The next connection then opens the new file.
    """
    moved = getattr(context.original_exception, "sqlite_errorname", None) == "SQLITE_READONLY_DBMOVED"
    if moved and context.engine is not None and exists(str(context.engine.url)):
        context.is_disconnect = True


def _begin_nothing(connection: Any, record: object) -> None:
    """Keep sqlite3 from beginning a transaction itself."""
    connection.isolation_level = None


def _causes(error: BaseException | None) -> list[BaseException]:
    causes = []
    while error is not None:
        causes.append(error)
        error = error.__cause__ or error.__context__
    return causes


def _kind(error: Exception) -> str:
    """Return what an error of a store means.

    - "away": the store cannot be used now: it is unreachable, locked, full or read-only.
    - "damaged": the content of the store cannot be read. A damaged page gives a plain DatabaseError, a damaged
      schema an OperationalError, a damaged cell a LookupError or a ValueError.
    - "clash": a new row contradicts the rows of a database.
    - "refused": the database refuses the call, for example because a permission is missing.
    - "": any other error, such as a wrong call.
    """
    from sqlalchemy import exc

    causes = _causes(error)
    if isinstance(error, OSError):  # of a journal
        return "away"
    if any(
        type(cause) in {exc.DatabaseError, LookupError}
        or (isinstance(cause, ValueError) and not isinstance(cause, InputError))
        or (isinstance(cause, exc.OperationalError) and _SCHEMA.search(str(cause.orig)) is not None)
        for cause in causes
    ):
        return "damaged"
    if any(
        isinstance(cause, exc.OperationalError | exc.InterfaceError | exc.TimeoutError)
        or getattr(cause, "sqlstate", None) == READ_ONLY
        for cause in causes
    ):
        return "away"
    if any(isinstance(cause, exc.IntegrityError) for cause in causes):
        return "clash"
    of_database = any(isinstance(cause, exc.DBAPIError) for cause in causes)
    return "refused" if of_database and isinstance(error, StorageInternalError | exc.DBAPIError) else ""


def _reason(error: Exception) -> str:
    """Return an error's message as one line. Prefer the message of the database driver."""
    cause = next((cause for cause in _causes(error) if hasattr(cause, "orig")), error)
    if isinstance(cause, KeyError) and "does not exist" in str(cause):  # of Optuna, for a row that existed
        return LOST
    message = str(getattr(cause, "orig", cause)).strip() or type(cause).__name__
    return message.splitlines()[0]


def open_journal(path: Path) -> JournalStorage:
    """Return Optuna's JournalStorage in the file ``path``, which is created if it does not exist. Raise InputError if
    the file cannot be created or read, is not a journal, or has a damaged line."""
    if path.is_dir():
        raise InputError(f"{path}: a folder; give the file of a journal, such as {path / 'journal.log'}")
    if not path.parent.is_dir():
        raise InputError(f"{path}: there is no folder {path.parent}; create it")
    try:
        storage.require_plain_file(path)
        if path.exists():
            with storage.open_file(path) as file:
                first = file.readline()
            if first.startswith(SQLITE):
                raise InputError(f"{path}: an SQLite database; give sqlite:///{path}")
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
        "give another one"
    )


class Journal(JournalFileBackend):
    """Optuna's journal in a file. The file stays readable after an interrupted write.

    Reads and writes raise InputError if the file is now the journal of another study. They raise OSError if the file
    is missing, has an unreadable line, or is shorter than before. A retry after an OSError may succeed.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self._first = b""  # the first line, once there is one; it has a random id

    def _require_same(self) -> None:
        """Raise InputError if the journal of another study has replaced the file.

        Raise OSError if the file is missing or lacks lines that were read before.
        """
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
            _remove_dead_link(Path(optunas._lock_file))
            optunas.acquire()
            try:
                self._require_same()
                # This may remove an incomplete line. No reader has used it, because Optuna reads complete lines only.
                storage.append(path, lines, sync=sync, create=False)
            finally:
                with suppress(RuntimeError):  # this process was suspended, and another process removed the lock
                    optunas.release()


def _remove_dead_link(lock: Path) -> None:
    """Remove Optuna's lock if it stays a dangling symlink: JournalFileOpenLock would wait for it forever."""
    with suppress(OSError):  # the lock was released
        made, until = os.lstat(lock), time.monotonic() + GRACE_SECONDS
        while lock.is_symlink() and not lock.exists() and os.path.samestat(os.lstat(lock), made):
            if time.monotonic() > until:
                lock.unlink()
            time.sleep(FIRST_PAUSE)


# The exceptions by which a method of a storage shows that its database is damaged; KeyError for all other methods.
DAMAGE: dict[str, tuple[type[Exception], ...]] = {
    "get_all_trials": (AssertionError, AttributeError, LookupError, TypeError),
    "get_study_id_from_name": (),  # leaven and Optuna ask for names that may not exist
}


class Patient(BaseStorage):
    """A storage whose calls are retried while the store is unreachable."""

    def __init__(
        self, store: BaseStorage, name: str, waited: Callable[[float], None], patience_seconds: float
    ) -> None:
        self._store, self._name, self._waited, self._patience = store, name, waited, patience_seconds

    def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        try:
            return self._until_done(lambda again: getattr(self._store, method)(*args, **kwargs))
        except DAMAGE.get(method, (KeyError,)) as error:
            raise self._damage(error) from error

    def _until_done(self, call: Callable[[bool], Any]) -> Any:
        """Return the result of ``call(again)``, which is repeated while the store is unreachable.

        ``again`` is False at first, and True in repeats, because an earlier call may have reached the store. Raise
        StoreGone if the store stays unreachable for ``patience_seconds``, and InputError if it is damaged or refuses
        the call. Other errors of ``call`` are raised unchanged.
        """
        since, pause, again = time.monotonic(), FIRST_PAUSE, False
        while True:
            try:
                return call(again)
            except Exception as error:
                kind = _kind(error)
                if kind == "damaged":
                    raise self._damage(error) from error
                if kind == "refused":
                    raise InputError(f"{self._name} cannot be used: {_reason(error)}") from error
                if kind != "away":
                    raise
                now = time.monotonic()
                if now - since >= self._patience:
                    raise StoreGone(
                        f"{self._name} has been unreachable for {now - since:.0f} seconds ({_reason(error)}); "
                        "run the same command again when it is back, to resume"
                    ) from error
            # Random, so that not all commands return to a server at once.
            until = min(since + self._patience, now + pause * random.uniform(0.5, 1.5))
            self._waited(now - since)
            while (left := until - time.monotonic()) > 0:
                time.sleep(min(left, LOOK_SECONDS))
                self._waited(time.monotonic() - since)
            pause, again = min(2 * pause, LONGEST_PAUSE), True

    def _damage(self, error: Exception) -> InputError:
        return InputError(
            f"{self._name} is damaged ({_reason(error)}); restore it from a backup, or use another study"
        )

    def create_new_trial(self, study_id: int, template_trial: FrozenTrial | None = None) -> int:
        template = create_trial(state=TrialState.RUNNING) if template_trial is None else copy(template_trial)
        ticket = str(uuid.uuid4())
        template.system_attrs = {**template.system_attrs, TICKET: ticket}

        def create(again: bool) -> int:
            if again:
                for trial in self._store.get_all_trials(study_id, deepcopy=False):
                    if trial.system_attrs.get(TICKET) == ticket:
                        return trial._trial_id
            return self._store.create_new_trial(study_id, template)

        try:
            return int(self._until_done(create))
        except Exception as error:
            if _kind(error) == "clash":  # a row of another trial was removed, and its other rows are still there
                raise self._damage(error) from error
            raise

    def set_trial_state_values(self, trial_id: int, state: TrialState, values: Sequence[float] | None = None) -> bool:
        def set_state(again: bool) -> bool:
            try:
                return self._store.set_trial_state_values(trial_id, state, values)
            except UpdateFinishedTrialError:
                trial = self._store.get_trial(trial_id)
                if again and trial.state is state and trial.values == (None if values is None else list(values)):
                    return True
                raise

        return bool(self._until_done(set_state))


for _method in vars(BaseStorage):
    if not _method.startswith("_") and _method not in vars(Patient):
        setattr(Patient, _method, partialmethod(Patient._call, _method))
update_abstractmethods(Patient)  # type: ignore[type-abstract]
