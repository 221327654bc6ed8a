"""Studies on a real PostgreSQL server that is stopped meanwhile."""

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import optuna
import pytest
from optuna.study import StudyDirection
from optuna.trial import TrialState

from leaven.errors import InputError
from leaven.tuning import search
from leaven.tuning.service import stores
from leaven.tuning.service.stores import StoreGone, open_store

FOUND = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"))
PROGRAMS = FOUND[-1].parent if FOUND else Path()
pytestmark = [
    pytest.mark.skipif(not FOUND, reason="no PostgreSQL server (Debian: postgresql)"),
    pytest.mark.xdist_group("postgresql"),
]


class Server:
    """A server with its data under /tmp: it refuses to run as root, and another user cannot read pytest's folders."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._as: list[str] = []
        if os.getuid() == 0:
            user = pwd.getpwnam("postgres")
            os.chown(folder, user.pw_uid, user.pw_gid)
            self._as = ["--reuid", str(user.pw_uid), "--regid", str(user.pw_gid), "--clear-groups"]
        self._run("initdb", "-D", "data", "-U", "leaven", "-A", "trust", "-E", "UTF8", "--no-locale", "-N").wait()
        self.start()

    def _run(self, program: str, *options: str) -> "subprocess.Popen[bytes]":
        # The server ends with the tests.
        command = ["setpriv", "--pdeathsig", "QUIT", *self._as, str(PROGRAMS / program), *options]
        with (self.folder / "log").open("ab") as log:
            return subprocess.Popen(command, cwd=self.folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def start(self) -> None:
        options = ["listen_addresses=", f"unix_socket_directories={self.folder}", "fsync=off"]
        self._server = self._run("postgres", "-D", "data", *[part for option in options for part in ("-c", option)])
        while subprocess.run([PROGRAMS / "pg_isready", "-q", "-h", self.folder], check=False).returncode:
            assert self._server.poll() is None, (self.folder / "log").read_text()
            time.sleep(0.01)

    def stop(self) -> None:
        """Stop like pg_ctl stop -m immediate: connections break, and the next start recovers from the log."""
        self._server.send_signal(signal.SIGQUIT)
        self._server.wait()

    def database(self, name: str, *options: str) -> str:
        subprocess.run([PROGRAMS / "createdb", "-h", self.folder, "-U", "leaven", *options, name], check=True)
        return f"postgresql://leaven@/{name}?host={self.folder}"

    def execute(self, name: str, statements: str) -> None:
        command = [PROGRAMS / "psql", "-h", self.folder, "-U", "leaven", "-q", "-c", statements, name]
        subprocess.run(command, check=True)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    folder = Path(tempfile.mkdtemp(prefix="leaven-postgresql-", dir="/tmp"))
    server = Server(folder)
    try:
        yield server
    finally:
        server.stop()
        shutil.rmtree(folder)


@pytest.mark.long
def test_a_study_outlives_a_restart_of_its_database(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server stops during the fourth trial and comes back after three failed attempts."""
    monkeypatch.setattr(stores, "FIRST_PAUSE", 0.01)
    noticed: list[float] = []
    called: list[dict[str, float]] = []

    def waited(seconds: float, cause: str) -> None:
        noticed.append(seconds)
        if len(noticed) == 3:
            server.stop()  # the thread of the trial may still wait for the end
            server.start()

    def objective(point: dict[str, float]) -> float:
        called.append(dict(point))
        if len(called) == 4:
            server.stop()
        return (point["lr"] - 1) ** 2

    url = server.database("restart")
    limits = {"lr": (-3.0, 3.0), "beta1": (-1.0, 1.0)}
    found = search(objective, limits, trials=10, workers=2, noise=0.01, storage=open_store(url, waited))
    assert len(noticed) >= 3
    trials = optuna.load_study(study_name="leaven", storage=open_store(url)).trials
    assert [trial.number for trial in trials] == list(range(10))
    assert {trial.state for trial in trials} == {TrialState.COMPLETE}
    assert [trial.value for trial in trials] == [(trial.params["lr"] - 1) ** 2 for trial in trials]
    assert sorted(map(str, called)) == sorted(str(trial.params) for trial in trials)
    assert len(found.trials) == 10


def test_a_database_that_stays_away(server: Server) -> None:
    url = server.database("away")
    store = open_store(url, patience_seconds=0.3)
    study = store.create_new_study([StudyDirection.MINIMIZE], "s")
    server.stop()
    try:
        with pytest.raises(StoreGone, match="postgresql://leaven@/away has been unreachable for 0 seconds") as gone:
            store.get_all_trials(study)
        with pytest.raises(InputError, match="postgresql://leaven@/away cannot be opened: .*No such file"):
            open_store(url)
    finally:
        server.start()
    assert "\n" not in str(gone.value)
    assert store.get_all_trials(study) == []


@pytest.mark.parametrize("encoding", ["SQL_ASCII", "LATIN1"])  # initdb chooses the first if LANG is C
def test_the_encoding_of_a_database(server: Server, encoding: str) -> None:
    url = server.database(encoding.lower(), "-E", encoding, "-T", "template0")
    assert len(search(lambda x: x["lr"] ** 2, {"lr": (-3.0, 3.0)}, trials=2, noise=0.01, storage=url).trials) == 2
    if encoding == "LATIN1":
        with pytest.raises(InputError, match="postgresql://leaven@/latin1 cannot be used: .* has no equivalent"):
            open_store(url).create_new_study([StudyDirection.MINIMIZE], "模型")


@pytest.mark.long
def test_a_database_that_may_not_be_written(server: Server) -> None:
    url = server.database("unwritable")
    study = open_store(url).create_new_study([StudyDirection.MINIMIZE], "s")
    server.execute("unwritable", "CREATE ROLE guest LOGIN; GRANT SELECT ON ALL TABLES IN SCHEMA public TO guest")
    with pytest.raises(InputError, match="postgresql://guest@/unwritable cannot be used: permission denied for"):
        open_store(url.replace("leaven@", "guest@")).set_study_user_attr(study, "a", 1)
    read_only = "ALTER DATABASE unwritable {} default_transaction_read_only".format
    server.execute("postgres", read_only("SET") + " = on")  # of new connections
    store = open_store(url, lambda *_: server.execute("postgres", read_only("RESET")))
    store.set_study_user_attr(study, "a", 1)
    assert store.get_study_user_attrs(study) == {"a": 1}


@pytest.mark.kills
def test_outages_of_the_server_lose_and_repeat_nothing(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server stops three times while three commands run trials."""
    monkeypatch.setattr(stores, "FIRST_PAUSE", 0.01)
    url, done = server.database("again"), threading.Event()
    study = optuna.create_study(storage=open_store(url), study_name="s")
    ended: list[int] = []

    def command() -> None:
        mine = optuna.load_study(study_name="s", storage=open_store(url), sampler=optuna.samplers.RandomSampler())
        while not done.is_set():
            trial = mine.ask()
            trial.set_user_attr("x", trial.suggest_float("x", 0, 1))
            mine.tell(trial, trial.params["x"])
            ended.append(trial.number)

    threads = [threading.Thread(target=command) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(3):
        before = len(ended)
        while len(ended) < before + 10:
            time.sleep(0.01)
        server.stop()
        server.start()
    done.set()
    for thread in threads:
        thread.join()
    assert {trial.state for trial in study.trials} == {TrialState.COMPLETE}
    assert [trial.number for trial in study.trials] == sorted(ended)
    assert all(trial.value == trial.params["x"] == trial.user_attrs["x"] for trial in study.trials)
