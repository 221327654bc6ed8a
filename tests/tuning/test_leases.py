import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import optuna
import pytest
from hypothesis import given
from hypothesis import strategies as st
from optuna.distributions import FloatDistribution
from optuna.storages import InMemoryStorage
from optuna.trial import FrozenTrial, TrialState, create_trial

from benchmarks import kills_of_studies
from leaven.tuning.algorithm.trust_region import Axes
from leaven.tuning.service import stored_study
from leaven.tuning.service.leases import Leases, gone, node
from leaven.tuning.service.search_loop import SearchLoop
from leaven.tuning.service.search_plan import Budget, SearchPlan, busy
from leaven.tuning.service.stores import StoreGone, open_store

AXES = Axes({"a": (0.0, 1e9)})
STRANGER = "elsewhere:another-boot:1:2:0"


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_command_on_another_machine_is_dead_after_a_lease_without_heartbeat() -> None:
    store, clock = InMemoryStorage(), Clock()
    study = store.create_new_study([optuna.study.StudyDirection.MINIMIZE])
    leases = Leases(store, study, 60.0, clock)

    def look(seconds: float, beat: int | None = None) -> set[str]:
        clock.now += seconds
        if beat is not None:
            store.set_study_system_attr(study, f"beat:{STRANGER}", beat)
        return leases.dead({STRANGER, leases.node})

    assert look(0, beat=7) == set()
    assert [look(14) for _ in range(4)] == [set()] * 4  # 56 seconds
    assert look(3, beat=8) == set()
    # A pause of this process does not count.
    assert look(100_000) == set()
    assert [look(14) for _ in range(3)] == [set()] * 3
    assert look(14) == {STRANGER}


def test_a_killed_process_of_this_machine_is_gone_at_once() -> None:
    neighbour = subprocess.Popen(["sleep", "60"])
    owner = node(neighbour.pid)
    try:
        assert not gone(owner)
        *rest, start, number = owner.split(":")
        assert gone(":".join([*rest, str(int(start) - 1), number]))  # an earlier process of that number
        assert not gone(STRANGER)
        neighbour.kill()  # a zombie now
        while not gone(owner):
            pass
    finally:
        neighbour.kill()
        neighbour.wait()
    assert gone(owner)


def test_a_hidden_process_of_another_user_is_not_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(pid: int, signal: int) -> None:
        raise PermissionError

    owner = node(1)
    monkeypatch.setattr("leaven.tuning.service.leases._started", lambda pid: "")  # as with /proc mounted hidepid=2
    monkeypatch.setattr(os, "kill", refused)
    assert not gone(owner)


def test_an_earlier_search_of_this_process_is_gone() -> None:
    store = InMemoryStorage()
    study = store.create_new_study([optuna.study.StudyDirection.MINIMIZE])
    with Leases(store, study, 60.0) as leases:
        assert not gone(leases.node)
    assert gone(leases.node)


def test_heartbeats_go_on_after_one_failed() -> None:
    class Shaky(InMemoryStorage):
        beats = 0

        def set_study_system_attr(self, study_id: int, key: str, value: Any) -> None:
            self.beats += 1
            if self.beats == 1:
                raise StoreGone("away for long")
            super().set_study_system_attr(study_id, key, value)

    store = Shaky()
    study = store.create_new_study([optuna.study.StudyDirection.MINIMIZE])
    with Leases(store, study, 0.01) as leases:
        while store.beats < 3:
            assert leases._thread.is_alive()
    assert not leases._thread.is_alive()
    assert store.get_study_system_attrs(study)[f"beat:{leases.node}"] == pytest.approx(time.time(), abs=60)


def trial(number: int, state: TrialState, **attributes: Any) -> FrozenTrial:
    drawn = not attributes.pop("half", False)
    made = create_trial(
        state=TrialState.RUNNING,
        params={"a": float(number)} if drawn else {},
        distributions={"a": FloatDistribution(0, 1e9)} if drawn else {},
        user_attrs={"owner": STRANGER, **attributes},
    )
    made.number, made.state = number, state
    return made


ACTIONS = st.sampled_from(["search", "half", "noise", "end", "stop", "die", "give back", "retry", "retry twice"])


@given(st.lists(st.tuples(ACTIONS, st.integers(0, 50)), max_size=60))
def test_every_run_is_counted_once(history: list[tuple[str, int]]) -> None:  # noqa: PLR0912, PLR0915 - one an event
    """Compare with a model of all events: deaths, releases, retries and two trials for one job."""
    trials: list[FrozenTrial] = []
    runs: dict[int, dict[str, Any]] = {}  # by the number that a run began with
    jobs, log = dict[str, int](), stored_study.TrialLog(AXES)  # the log is told of each change alone

    def begin(**attributes: Any) -> int:
        trials.append(trial(len(trials), TrialState.RUNNING, **attributes))
        if "job" in attributes:
            jobs.setdefault(attributes["job"], len(trials) - 1)
        return len(trials) - 1

    def choose(among: list[int], which: int) -> int | None:
        return among[which % len(among)] if among else None

    for action, which in history:
        before = len(trials)
        running = [t.number for t in trials if t.state is TrialState.RUNNING]
        lost = [n for n, run in runs.items() if run["state"] == "waiting"]
        of = {run["last"]: run for run in runs.values()}
        chosen = choose(lost if action.startswith("retry") else running, which)
        if action == "search":
            number = begin()
            runs[number] = {"last": number, "state": "running", "deaths": 0}
        elif action == "half":
            trials[begin(half=True)].state = TrialState.FAIL
        elif action == "noise":
            name = f"start:{which % 3}"
            first = not any(t.user_attrs.get("job") == name for t in trials)
            number = begin(job=name, purpose="noise", seed=which % 3)
            if first:
                runs[number] = {"last": number, "state": "running", "deaths": 0}
        elif chosen is None:
            continue
        elif action.startswith("retry"):
            again = next(run for run in stored_study.trials_of(trials, AXES) if run.origin == chosen).retry
            assert again.attributes["retry_of"] == chosen
            number = begin(job=again.job, **again.attributes)
            runs[chosen] |= {"last": number, "state": "running"}
            if action == "retry twice":
                begin(job=again.job, **again.attributes)
        elif action in {"end", "stop"}:
            trials[chosen].state = TrialState.COMPLETE if action == "end" else TrialState.PRUNED
            if chosen in of:
                of[chosen]["state"] = "complete" if action == "end" else "pruned"
        else:
            trials[chosen].state = TrialState.FAIL
            if action == "give back":
                trials[chosen].user_attrs["released"] = True
            if chosen in of:
                of[chosen]["deaths"] += action == "die"
                of[chosen]["state"] = "failed" if of[chosen]["deaths"] == 2 else "waiting"
        for each in [*trials[before:], *(trials[n] for n in running)]:
            log.add(each)
    counted = stored_study.trials_of(trials, AXES)
    assert list(log.trials.values()) == counted
    assert log.jobs == jobs
    assert log.started == len({job for job in jobs if not job.startswith("retry:")})
    assert [run.origin for run in counted] == sorted(runs)
    for run in counted:
        known = runs[run.origin]
        assert run.number == known["last"]
        assert run.state == known["state"]


COMMAND = """
import os, random, sys, time
from leaven.tuning.service import leases, search_loop, stores
from leaven.tuning.service.search import search

if __name__ == "__main__":
    folder, name, skew, slow = sys.argv[1], sys.argv[2], float(sys.argv[3]), float(sys.argv[4])
    real, draw = time.time, random.Random(name)
    time.time = lambda: real() + skew
    leases.machine = lambda: name  # each command has a machine of its own
    search_loop.STORE_POLL = 0.05
    def slowly(method):
        def call(self, *arguments):
            time.sleep(draw.uniform(0, slow))
            return method(self, *arguments)
        return call
    for method in ("read_logs", "append_logs"):
        setattr(stores.Journal, method, slowly(getattr(stores.Journal, method)))
    def objective(x):
        with open(f"{folder}/calls", "a") as file:
            print(name, x.origin, x.number, file=file)
        time.sleep(0.05)
        return x["a"] ** 2
    open(f"{folder}/{name}.ready", "w").close()
    while not os.path.exists(f"{folder}/go"):
        time.sleep(0.01)
    found = search(objective, {"a": (-3.0, 3.0)}, trials=14, method="random", workers=2, lease_seconds=1.0,
                   storage=f"{folder}/journal.log", hours=0.2)
    print(len(found.trials), found.params["a"], found.loss)
"""


@pytest.mark.long
@pytest.mark.parametrize("slow", [0.0, pytest.param(0.4, marks=pytest.mark.kills)])
def test_commands_with_other_clocks_share_a_slow_store_and_one_is_killed(tmp_path: Path, slow: float) -> None:
    """Clocks differ by an hour each, calls of the store take up to more than a quarter of the lease."""
    (tmp_path / "command.py").write_text(COMMAND)

    def start(name: str, skew: float) -> "subprocess.Popen[str]":
        arguments = [sys.executable, tmp_path / "command.py", tmp_path, name, str(skew), str(slow)]
        return subprocess.Popen(list(map(str, arguments)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def calls() -> list[list[str]]:
        file = tmp_path / "calls"
        return [line.split() for line in file.read_text().splitlines()] if file.exists() else []

    victim = start("ahead", 3_600.0)
    others = [start("here", 0.0), start("behind", -3_600.0)]
    while len(list(tmp_path.glob("*.ready"))) < 3:
        assert victim.poll() is None, victim.communicate()
        time.sleep(0.01)
    (tmp_path / "go").touch()
    while not any(name == "ahead" for name, _, _ in calls()):
        assert victim.poll() is None, victim.communicate()
        time.sleep(0.01)
    victim.kill()
    victim.communicate()
    results = [process.communicate(timeout=120) for process in others]
    assert len({output for output, _ in results}) == 1, results
    assert results[0][0].startswith("14 "), results
    study = optuna.load_study(study_name="leaven", storage=open_store(tmp_path / "journal.log"))
    runs = stored_study.trials_of(study.get_trials(), Axes({"a": (-3.0, 3.0)}))
    assert [run.state for run in runs] == ["complete"] * 14
    assert len({run.job for run in runs}) == 14


@pytest.mark.kills
@pytest.mark.parametrize("store", ["journal", "sqlite", "postgresql"])
def test_killed_commands_of_two_lose_no_trial(store: str) -> None:
    if store == "postgresql" and not kills_of_studies.FOUND:
        pytest.skip("no PostgreSQL server (Debian: postgresql)")
    assert kills_of_studies.main(6, store, seed=0) == 0


def test_hours_of_a_run_are_by_the_clock_of_its_own_machine() -> None:
    """A machine whose clock says 1970 dies; its hours are those that it ran, not 56 years."""
    store = InMemoryStorage()
    study = optuna.create_study(study_name="leaven", storage=store)
    axes = Axes({"a": (0.0, 1.0)})
    stored = stored_study.StoredStudy(store, study, axes, None)
    owner = {"owner": STRANGER, "began": 100.0, "job": "search:0"}
    drawn = {"params": {"a": 0.5}, "distributions": {"a": FloatDistribution(0, 1)}}
    study.add_trial(create_trial(state=TrialState.RUNNING, user_attrs=owner, **drawn))
    store.set_study_system_attr(stored.id, f"beat:{STRANGER}", 160.0)
    plan = SearchPlan(axes, "random", 0, Budget(hours=1.0), None, True)
    seen = []
    with SearchLoop(plan, stored, lambda _: [], 1, lambda: True, 0.05) as loop:
        loop._read_trials()
        seen.append(busy(loop.trials, time.time()))
        while loop.trials[0].state == "running":
            time.sleep(0.01)
            loop._read_trials()
        seen.append(busy(loop.trials, time.time()))
    assert seen == [60.0, 60.0]
