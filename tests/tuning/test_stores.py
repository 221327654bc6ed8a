"""Stores return what Optuna's own do, also if a disk, file or server goes away meanwhile."""

import errno
import json
import os
import resource
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing, nullcontext
from dataclasses import replace
from functools import partialmethod
from pathlib import Path
from typing import Any
from wsgiref.util import setup_testing_defaults

import optuna
import pytest
from optuna.distributions import FloatDistribution
from optuna.exceptions import UpdateFinishedTrialError
from optuna.storages import BaseStorage, InMemoryStorage
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState, create_trial
from optuna_dashboard import wsgi
from tests.errors import refused

from leaven.errors import InputError
from leaven.training.outcome import Outcome
from leaven.tuning import search
from leaven.tuning.service import stores
from leaven.tuning.service.search_loop import Proposal
from leaven.tuning.service.stores import StoreGone, open_store

FILES = {"journal": "study.log", "sqlite": "sqlite:///study.db"}
METHODS = [name for name in vars(BaseStorage) if not name.startswith("_")]


@pytest.fixture(params=FILES.values(), ids=FILES)
def where(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    return str(request.param)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    monkeypatch.setattr(stores, "FIRST_PAUSE", 0.0)
    monkeypatch.setattr(stores, "SECOND_LOOK", 0.0)


def a_bit_of_everything(store: BaseStorage) -> list[Any]:
    """A study with all that a trial can have, as read back from its store."""
    study = optuna.create_study(storage=store, study_name="s", sampler=optuna.samplers.RandomSampler(seed=0))
    study.set_user_attr("space", {"lr": [-3, 3]})
    study.enqueue_trial({"x": 0.25}, user_attrs={"purpose": "noise"})

    def objective(trial: optuna.Trial) -> float:
        x = trial.suggest_float("x", -3, 3) + trial.suggest_categorical("c", (0, 1))
        trial.set_user_attr("curve", [[1, x], [2, x * x]])
        trial.report(x, 1)
        if trial.number == 3:
            raise optuna.TrialPruned
        if trial.number == 4:
            raise ArithmeticError
        return x * x

    study.optimize(objective, n_trials=6, catch=ArithmeticError)
    number = store.get_study_id_from_name("s")
    last = store.get_trial_id_from_study_id_trial_number(number, 5)
    with pytest.raises(UpdateFinishedTrialError):
        store.set_trial_state_values(last, TrialState.COMPLETE, [0.5])
    with pytest.raises(UpdateFinishedTrialError):
        store.set_trial_user_attr(last, "late", 1)
    with pytest.raises(KeyError):
        store.get_study_id_from_name("none")
    store.remove_session()
    return [
        *map(plain, study.trials),
        plain(study.best_trial),
        study.user_attrs,
        store.get_study_name_from_id(number),
        store.get_study_directions(number),
        [store.get_n_trials(number, state) for state in TrialState],
        [other.study_name for other in store.get_all_studies()],
        [store.get_trial_number_from_id(last), store.get_trial_param(last, "x"), store.get_trial_params(last)],
        store.get_trial_user_attrs(last),
    ]


def plain(trial: FrozenTrial) -> tuple[Any, ...]:
    about = trial.params, trial.user_attrs, trial.system_attrs
    return (trial.number, trial.state, trial.values, trial.intermediate_values, *about)


def test_a_store_returns_the_same_as_optunas_own(where: str) -> None:
    assert a_bit_of_everything(open_store(where)) == a_bit_of_everything(InMemoryStorage())


def breaking(inner: BaseStorage, before: bool) -> BaseStorage:
    """Return a store whose connection breaks once in every call: before the call, or after it."""
    broken: set[str] = set()

    def call(self: object, name: str, *args: Any, **kwargs: Any) -> Any:
        breaks = name not in broken
        broken.symmetric_difference_update({name})
        if breaks and before:
            raise ConnectionResetError(errno.ECONNRESET, "connection lost")
        answer = getattr(inner, name)(*args, **kwargs)
        if breaks:
            raise ConnectionResetError(errno.ECONNRESET, "connection lost")
        return answer

    made = type("Breaking", (BaseStorage,), {name: partialmethod(call, name) for name in METHODS})()
    assert isinstance(made, BaseStorage)
    return made


@pytest.mark.parametrize("before", [True, False])
def test_a_connection_that_breaks_in_every_call_loses_and_repeats_nothing(before: bool) -> None:
    class Existing(InMemoryStorage):
        """Returns the existing study when it is created again."""

        def create_new_study(self, directions: Any, study_name: str | None = None) -> int:
            try:
                return super().create_new_study(directions, study_name)
            except optuna.exceptions.DuplicatedStudyError:
                return self.get_study_id_from_name(str(study_name))

    def objective(x: Proposal) -> Outcome:
        calls.append((dict(x), x.seed))
        return Outcome(x["a"] ** 2, curve=((1, 2.0), (2, 1.0)), stopped=len(calls) == 5)

    calls: list[tuple[dict[str, float], int]] = []
    seen: list[float] = []
    store = breaking(Existing(), before)
    found = [
        search(objective, {"a": (-3.0, 2.0)}, trials=24, method="random", storage=storage)
        for storage in (None, open_store(store, waited=lambda seconds, _: seen.append(seconds)))
    ]
    assert len(seen) > 70
    assert calls[:24] == calls[24:]
    assert len({(*x.items(), seed) for x, seed in calls[24:]}) == 24
    for whole, broken in zip(found[0].trials, found[1].trials, strict=True):
        assert replace(broken, number=whole.number) == whole


def test_many_commands_create_a_store_at_once(where: str) -> None:
    start, errors = threading.Barrier(3), list[BaseException]()

    def command() -> None:
        try:
            start.wait()
            study = optuna.create_study(storage=open_store(where), study_name="s", load_if_exists=True)
            for _ in range(2):
                study.tell(study.ask({"x": FloatDistribution(0, 1)}), 1.0)
        except BaseException as error:
            errors.append(error)
            start.abort()

    threads = [threading.Thread(target=command) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    study = optuna.load_study(study_name="s", storage=open_store(where))
    assert [trial.number for trial in study.trials] == list(range(6))


def begun(where: str, **options: Any) -> tuple[BaseStorage, int]:
    store = open_store(where, **options)
    return store, store.create_new_study([StudyDirection.MINIMIZE], "s")


def test_only_the_end_of_a_trial_waits_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, study = begun(str(tmp_path / "study.log"))
    flushed: list[int] = []
    monkeypatch.setattr(os, "fsync", flushed.append)
    trial = store.create_new_trial(study)
    store.set_trial_user_attr(trial, "loss curve", [[1, 2.0]])
    assert not flushed
    store.set_trial_state_values(trial, TrialState.COMPLETE, [2.0])
    assert len(flushed) == 1


@pytest.mark.parametrize("where", ["{}/study.log", "sqlite:///{}/study.db"], ids=["journal", "sqlite"])
def test_a_disk_that_goes_away_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """The folder is an empty mount point meanwhile: no second store may be created there."""
    monkeypatch.setattr("optuna.storages._rdb.storage.random.random", lambda: 0.0)  # the seconds until it retries
    disk, away = tmp_path / "disk", tmp_path / "away"
    disk.mkdir()
    seen: list[float] = []

    def back(seconds: float, cause: str) -> None:
        seen.append(seconds)
        if len(seen) == 4:
            assert list(disk.iterdir()) == []
            disk.rmdir()
            away.rename(disk)

    store, study = begun(where.format(disk), waited=back)
    store.create_new_trial(study)
    disk.rename(away)
    disk.mkdir()
    store.create_new_trial(study)
    assert [trial.number for trial in store.get_all_trials(study)] == [0, 1]
    assert seen == sorted(seen)


def test_a_journal_that_an_older_copy_has_replaced_is_away(tmp_path: Path) -> None:
    path = tmp_path / "study.log"
    store, study = begun(str(path), patience_seconds=0.1)
    older = path.read_bytes()
    store.create_new_trial(study)
    path.write_bytes(older)
    with pytest.raises(StoreGone, match="an older copy has replaced the file"):
        store.create_new_trial(study)
    assert path.read_bytes() == older


def test_a_journal_of_another_study_in_its_place_is_not_written(tmp_path: Path) -> None:
    folder = tmp_path / "study"
    folder.mkdir()
    path = folder / "journal.log"
    store, study = begun(str(path), patience_seconds=0.1)
    trial = store.create_new_trial(study)
    moved = folder.rename(tmp_path / "moved")
    with pytest.raises(StoreGone):
        store.create_new_trial(study)
    folder.mkdir()
    other, _ = begun(str(path))
    for _ in range(3):
        other.create_new_trial(study)
    before = path.read_bytes()
    calls: list[Callable[[], object]] = [
        lambda: store.set_trial_user_attr(trial, "seconds", 1.0),
        lambda: store.set_trial_state_values(trial, TrialState.COMPLETE, [1.0]),
        lambda: store.get_all_trials(study),
    ]
    for call in calls:
        with pytest.raises(InputError, match="journal.log is now the journal of another study, so this command"):
            call()
    assert path.read_bytes() == before
    path.write_bytes((moved / "journal.log").read_bytes())  # a copy of its own
    store.set_trial_state_values(trial, TrialState.COMPLETE, [1.0])
    assert store.get_trial(trial).value == 1.0


def test_a_line_that_cannot_be_read_for_a_moment_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While other machines write, a network disk may show zeros in place of a line."""
    path = tmp_path / "study.log"
    whole: list[bytes] = []

    def zeros() -> None:
        whole.append(path.read_bytes())
        *before, last = whole[-1].splitlines(keepends=True)
        path.write_bytes(b"".join(before) + bytes(len(last) - 1) + b"\n")

    store, study = begun(str(path), waited=lambda *_: path.write_bytes(whole[-1]))
    open_store(path).create_new_trial(study)
    zeros()
    assert len(store.get_all_trials(study)) == 1
    zeros()
    monkeypatch.setattr("time.sleep", lambda *_: path.write_bytes(whole[-1]))
    assert len(open_store(path).get_all_trials(study)) == 1


@pytest.mark.filterwarnings("ignore:flock not supported")
def test_the_lock_of_another_machine_on_a_disk_without_flock_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    def released(seconds: float, cause: str) -> None:
        lock.unlink()

    monkeypatch.setattr("fcntl.flock", missing)
    monkeypatch.setattr(stores, "LOCK_SECONDS", 0.1)
    lock = tmp_path / "study.log.flock"
    store, study = begun(str(tmp_path / "study.log"), waited=released)
    lock.write_text("12741\nnode17\n4592\n")
    store.create_new_trial(study)
    lock.touch()
    with pytest.raises(InputError, match="remove the file if no process uses"):
        store.create_new_trial(study)


def test_a_full_disk_is_waited_for_and_leaves_no_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "study.log"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    torn: list[bytes] = []

    def room(seconds: float, cause: str) -> None:
        torn.append(path.read_bytes())
        resource.setrlimit(resource.RLIMIT_FSIZE, before)

    store, study = begun(str(path), waited=room)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 20, before[1]))
    try:
        store.create_new_trial(study)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [len(content.rpartition(b"\n")[2]) for content in torn] == [0]
    assert len(open_store(path).get_all_trials(study)) == 1
    assert all(json.loads(line) for line in path.read_text().splitlines())


def test_a_full_disk_gets_no_empty_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fails)
    with refused("study.db cannot be created: its disk is full; make room"):
        open_store(f"sqlite:///{tmp_path / 'study.db'}")
    assert not any(tmp_path.iterdir())


def test_a_wrong_call_of_a_store_is_not_called_damage(where: str) -> None:
    store, study = begun(where)
    with pytest.raises(TypeError):
        store.set_study_user_attr(study, "a", object())


def test_the_next_write_cuts_off_a_torn_last_line(tmp_path: Path) -> None:
    path = tmp_path / "study.log"
    first, study = begun(str(path))
    with path.open("ab") as file:
        file.write(b'{"op_code":4,"worker_')
    second = open_store(path)
    second.create_new_trial(study)
    first.create_new_trial(study)
    assert len(second.get_all_trials(study)) == len(open_store(path).get_all_trials(study)) == 2


def test_the_lock_of_a_killed_process_is_free(tmp_path: Path) -> None:
    path = tmp_path / "study.log"
    store, study = begun(str(path))
    hold = "from leaven import storage; from pathlib import Path; import sys, time\n"
    hold += "with storage.lock(Path(sys.argv[1])): print(flush=True); time.sleep(60)"
    other = subprocess.Popen([sys.executable, "-c", hold, f"{path}.flock"], stdout=subprocess.PIPE)
    other.stdout.readline()
    waits = threading.Thread(target=store.create_new_trial, args=(study,))
    waits.start()
    waits.join(0.2)
    assert waits.is_alive()
    other.kill()
    waits.join(10)
    other.wait()
    other.stdout.close()
    assert len(store.get_all_trials(study)) == 1


def test_a_lock_that_leads_nowhere_is_named(tmp_path: Path) -> None:
    path = tmp_path / "study.log"
    store, study = begun(str(path), patience_seconds=0.1)
    (tmp_path / "study.log.lock").symlink_to("nowhere")
    lock = (
        "another program holds the lock .*study.log.lock, a symbolic link; if that program has ended, remove the link"
    )
    with pytest.raises(StoreGone, match=lock):
        store.create_new_trial(study)


@pytest.mark.parametrize("lasts", [True, False])
def test_a_database_that_is_locked_when_it_is_opened_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lasts: bool
) -> None:
    monkeypatch.setattr(stores, "BUSY_SECONDS", 0.01)
    where = f"sqlite:///{tmp_path / 'study.db'}"
    _, study = begun(where)
    other = sqlite3.connect(tmp_path / "study.db", isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    with nullcontext() if not lasts else pytest.raises(StoreGone, match=r"study.db has been locked for \d+ seconds"):
        store = open_store(where, lambda *_: lasts or other.execute("COMMIT"), 0.1 if lasts else 300)  # type: ignore[arg-type, return-value]
        assert not store.get_all_trials(study)
    other.close()


def test_a_user_who_stops_is_heard_while_a_call_pauses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "FIRST_PAUSE", 60.0)
    monkeypatch.setattr(stores, "LOOK_SECONDS", 0.01)
    path = tmp_path / "study.log"

    def waited(seconds: float, cause: str) -> None:
        if seconds > 0.05:
            raise StoreGone("stopped")

    store, study = begun(str(path), waited=waited)
    path.unlink()
    began = time.monotonic()
    with pytest.raises(StoreGone, match="stopped"):
        store.create_new_trial(study)
    assert time.monotonic() - began < 10


def test_a_locked_database_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "BUSY_SECONDS", 0.01)
    other = sqlite3.connect(tmp_path / "study.db", isolation_level=None, check_same_thread=False)
    seen: list[float] = []

    def unlock(seconds: float, cause: str) -> None:
        seen.append(seconds)
        if len(seen) == 3:
            other.execute("COMMIT")

    store, study = begun(f"sqlite:///{tmp_path / 'study.db'}", waited=unlock)
    other.execute("BEGIN IMMEDIATE")
    store.set_study_user_attr(study, "method", "random")
    other.close()
    assert store.get_study_user_attrs(study) == {"method": "random"}
    assert len(seen) == 3


def test_a_trial_whose_creation_was_done_but_not_confirmed_runs_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Optuna repeats a creation by itself."""
    store, calls, lost = open_store(f"sqlite:///{tmp_path / 'study.db'}"), list[Proposal](), list[object]()
    dialect = store._store._backend.engine.dialect  # type: ignore[attr-defined]
    commit = dialect.do_commit

    def unconfirmed(connection: Any) -> None:
        commit(connection)
        if calls and len(lost) < 3:
            lost.append(connection)
            raise sqlite3.OperationalError("disk I/O error")

    def objective(x: Proposal) -> float:
        calls.append(x)
        return 1.0

    monkeypatch.setattr(dialect, "do_commit", unconfirmed)
    monkeypatch.setattr("optuna.storages._rdb.storage.random.random", lambda: 0.0)  # the seconds until it retries
    found = search(objective, {"a": (-3.0, 3.0)}, trials=5, method="random", storage=store)
    assert len(found.trials) == len(calls) == 5
    assert len(lost) == 3


def is_damaged(path: Path) -> None:
    begun(str(path))
    path.write_bytes(path.read_bytes() + b"\0\0\n" + path.read_bytes())


def has_a_damaged_trial(path: Path) -> None:
    begun(str(path))
    trial = {"op_code": 4, "worker_id": "w", "study_id": 0, "datetime_start": None, "distributions": {"x": "["}}
    path.write_text(path.read_text() + json.dumps(trial) + "\n")


@pytest.mark.parametrize(
    ("prepare", "where", "message"),
    [
        (lambda path: path.write_text("notes"), "{}", "not a journal of Optuna"),
        (lambda path: path.write_text('{"op_code":0}\n'), "{}", "not a journal of Optuna"),
        (has_a_damaged_trial, "{}", "not a journal of Optuna, or a line is missing or was changed; restore"),
        (lambda path: execute(path, "CREATE TABLE t (x)"), "{}", "not a journal of Optuna.*; .* or sqlite:///FILE"),
        (is_damaged, "{}", "line 2 is damaged; restore the file from a backup, or keep .* head -n 1"),
        (os.mkfifo, "{}", "this is a pipe or a device; move it away"),
        (Path.mkdir, "{}", "a folder; give a file in it, such as /.*study.log"),
        (Path.mkdir, "sqlite:///{}", "a folder; give a file in it, such as sqlite:////.*study.db"),
        (None, "sqlite:///{}/study.db", "there is no folder"),
        (None, "sqlite:///file:some.db?uri=true", "give sqlite:///FILE"),
        (lambda path: path.write_text("notes"), "sqlite:///{}", "cannot be opened: file is not a database"),
        (
            None,
            "mysql://user:secret@host/x",
            "mysql is not a supported store; give the path of a journal, sqlite.* or postgresql://USER@HOST",
        ),
        (
            None,
            "postgresql://user:secret@host:port/x",
            "^postgresql: not a valid URL; give postgresql://USER@HOST:PORT/DATABASE$",
        ),
        (None, "postgresql:///user:secret@host", "^postgresql: no host is given; give postgresql://USER@HOST"),
        (None, "postgresql://user:secret@127.0.0.1:1/x", r"//user:\*\*\*@127.0.0.1:1/x cannot be opened: "),
        (None, "postgresql://user@127.0.0.1:1/x?nonsense=1", "cannot be opened: .*nonsense"),
        (
            lambda path: sys.modules.update(psycopg=None),
            "postgresql://user@127.0.0.1:1/x",
            r"pip install 'leaven\[postgresql\]'",
        ),
    ],
)
def test_what_is_not_a_store_is_refused(
    prepare: Callable[[Path], object] | None,
    where: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", sys.modules.get("psycopg") or __import__("psycopg"))
    if prepare:
        prepare(tmp_path / "x")
    with pytest.raises(InputError, match=message) as found:
        open_store(where.format(tmp_path / "x"))
    assert "secret" not in str(found.value)
    assert "\n" not in str(found.value)


def execute(database: Path, statement: str) -> None:
    with closing(sqlite3.connect(database)) as opened, opened:
        opened.execute(statement)


def test_tables_of_another_version_are_refused(tmp_path: Path) -> None:
    begun(f"sqlite:///{tmp_path / 'study.db'}")
    execute(tmp_path / "study.db", "UPDATE alembic_version SET version_num = 'v9.9.9'")
    with pytest.raises(InputError, match="no longer compatible with the table schema"):
        open_store(f"sqlite:///{tmp_path / 'study.db'}")


@pytest.mark.parametrize("page", [1, 3])  # of the tables' schema, and of the trials
def test_a_damaged_page_of_a_database_is_one_line(tmp_path: Path, page: int) -> None:
    where = tmp_path / "study.db"
    begun(f"sqlite:///{where}")[0].remove_session()
    content = bytearray(where.read_bytes())
    content[page * 4096 : (page + 1) * 4096] = bytes(4096)
    where.write_bytes(content)

    with refused("study.db ", "malformed"):
        store = open_store(f"sqlite:///{where}")
        store.get_all_trials(store.get_study_id_from_name("s"))


def test_a_trial_that_was_removed_in_part_is_one_line(tmp_path: Path) -> None:
    where = tmp_path / "study.db"
    store, study = begun(f"sqlite:///{where}")
    template = create_trial(state=TrialState.RUNNING, params={"x": 0.5}, distributions={"x": FloatDistribution(0, 1)})
    trial = store.create_new_trial(study, template)
    execute(where, "DELETE FROM trials")
    with refused("study.db is damaged", "; restore it from a backup"):
        store.set_trial_user_attr(trial, "a", 1)
    with refused("study.db cannot be used: UNIQUE constraint failed"):
        open_store(f"sqlite:///{where}").create_new_trial(study, template)


def test_optunas_dashboard_opens_a_study_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "study.log"
    a_bit_of_everything(open_store(path))
    before, application = path.read_bytes(), wsgi(str(path))

    def get(url: str) -> Any:
        environment: dict[str, Any] = {}
        setup_testing_defaults(environment)
        return json.loads(b"".join(application(environment | {"PATH_INFO": url}, lambda *_: None)))

    (study,) = get("/api/studies")["study_summaries"]
    assert study["study_name"] == "s"
    trials = get(f"/api/studies/{study['study_id']}")["trials"]
    assert [trial["state"] for trial in trials] == ["Complete"] * 3 + ["Pruned", "Fail", "Complete"]
    assert {attribute["key"] for attribute in trials[0]["user_attrs"]} == {"purpose", "curve"}
    assert path.read_bytes() == before
