import subprocess
from typing import Any

import optuna
from hypothesis import given
from hypothesis import strategies as st
from optuna.distributions import FloatDistribution
from optuna.storages import InMemoryStorage
from optuna.trial import FrozenTrial, TrialState, create_trial

from leaven.tuning.algorithm.trust_region import Axes
from leaven.tuning.service import stored_study
from leaven.tuning.service.leases import Leases, gone, node
from leaven.tuning.service.stores import StoreGone

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
    assert store.get_study_system_attrs(study)[f"beat:{leases.node}"] >= 3


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
def test_every_run_is_counted_once(history: list[tuple[str, int]]) -> None:  # noqa: PLR0912 - one an event
    """Compare with a model of all events: deaths, releases, retries and two trials for one job."""
    trials: list[FrozenTrial] = []
    runs: dict[int, dict[str, Any]] = {}  # by the number that a run began with

    def begin(**attributes: Any) -> int:
        trials.append(trial(len(trials), TrialState.RUNNING, **attributes))
        return len(trials) - 1

    def choose(among: list[int], which: int) -> int | None:
        return among[which % len(among)] if among else None

    for action, which in history:
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
            again = next(run for run in stored_study.runs_of(trials, AXES) if run.origin == chosen).retry
            assert again.attributes["retry_of"] == chosen
            number = begin(job=again.name, **again.attributes)
            runs[chosen] |= {"last": number, "state": "running"}
            if action == "retry twice":
                twin = begin(job=again.name, **again.attributes)
                assert stored_study.jobs_of(trials)[again.name].number == number < twin
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
    counted = stored_study.runs_of(trials, AXES)
    assert [run.origin for run in counted] == sorted(runs)
    for run in counted:
        known = runs[run.origin]
        assert run.number == known["last"]
        assert run.state == known["state"]
