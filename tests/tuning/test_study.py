"""Studies: every trial is accounted for, whatever is killed."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import optuna
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from leaven.data.tokens import TokenSet, prepare
from leaven.recipe.errors import InputError
from leaven.recipe.files import read_recipe
from leaven.recipe.recipe import Recipe
from leaven.tuning.space import space
from leaven.tuning.study import FINALISTS, SEEDS, Study

SHORT = ["--set", "data.tokens=2048", "--set", "schedule.warmup_tokens=256"]


def tune(recipe: Path, study: Path, trials: int, *more: str) -> list[str]:
    verb = [sys.executable, "-m", "leaven", "tune", str(recipe), "--study", str(study), "--trials", str(trials)]
    return [*verb, "--workers", "2", "--json", *SHORT, *more]


def journal(folder: Path) -> list[optuna.trial.FrozenTrial]:
    storage = JournalStorage(JournalFileBackend(str(folder / "journal.log")))
    return optuna.load_study(study_name=None, storage=storage).trials


def test_a_study_from_the_command_line(tiny_file: Path, tmp_path: Path) -> None:
    done = subprocess.run(tune(tiny_file, tmp_path / "study", 5), capture_output=True, text=True, check=True)
    document = json.loads(done.stdout)
    assert set(document) == {"best", "trials", "failed", "noise_floor"}
    assert document["trials"] == 5
    low, high = document["best"]["interval"]
    assert low < document["best"]["loss"] < high
    assert document["noise_floor"] > 0
    best = read_recipe(document["best"]["recipe"])
    assert best.scaling.base == best.base
    assert "study tiny, trial" in best.why["hyperparameters.lr"]
    kept = json.loads((tmp_path / "study" / "study.json").read_text())
    assert kept["trials"][0]["values"] == space(read_recipe(tiny_file, SHORT[1::2]), "global").centre  # the start
    again = subprocess.run(tune(tiny_file, tmp_path / "study", 5), capture_output=True, text=True, check=True)
    assert json.loads(again.stdout) == document


def test_killed_with_9_and_run_again_it_goes_on_where_it_was(tiny_file: Path, tmp_path: Path) -> None:
    study = tmp_path / "study"
    process = subprocess.Popen(tune(tiny_file, study, 8), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not (study / "study.json").exists() or len(complete(study)) < 3:
        assert process.poll() is None, "it ended before it could be killed"
        time.sleep(0.01)
    process.kill()
    process.wait()
    before = {trial.number: trial for trial in complete(study)}
    lost = [trial for trial in journal(study) if trial.state is optuna.trial.TrialState.RUNNING]
    done = subprocess.run(tune(tiny_file, study, 8), capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["trials"] == 8
    after = {trial.number: trial for trial in complete(study)}
    assert len(after) == 8
    assert all(after[number].value == trial.value for number, trial in before.items())
    # What was running when the kill came was run again with the same values, as far as they had been drawn.
    for trial in lost:
        assert any(other.params.items() >= trial.params.items() for other in after.values())


def complete(folder: Path) -> list[optuna.trial.FrozenTrial]:
    return [trial for trial in journal(folder) if trial.state is optuna.trial.TrialState.COMPLETE]


def test_a_killed_worker_costs_no_trial(tiny_file: Path, tmp_path: Path) -> None:
    study = tmp_path / "study"
    command = tune(tiny_file, study, 6, "--set", "data.tokens=8192")
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    while not (study / "study.json").exists():
        assert process.poll() is None
        time.sleep(0.01)
    worker = workers_of(process.pid)[0]
    os.kill(worker, signal.SIGKILL)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    document = json.loads(out)
    assert (document["trials"], document["failed"]) == (6, 0)
    assert len(complete(study)) == 6


def workers_of(parent: int) -> list[int]:
    """Training processes started by a study: its children that hold torch, not multiprocessing's resource tracker."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text().rpartition(")")[2].split()
                line = (entry / "cmdline").read_bytes().decode().replace("\0", " ")
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(stat[1]) == parent and "spawn_main" in line:
                found.append(int(entry.name))
    return found


def test_workers_go_when_the_study_is_killed(tiny_file: Path, tmp_path: Path) -> None:
    command = tune(tiny_file, tmp_path / "study", 8, "--set", "data.tokens=10M")
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not (workers := workers_of(process.pid)):
        assert process.poll() is None
        time.sleep(0.02)
    process.kill()
    process.wait()
    deadline = time.monotonic() + 30
    while any(alive(worker) for worker in workers):
        assert time.monotonic() < deadline, "a worker outlived its study"
        time.sleep(0.1)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in {"Z", "X"}
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_ctrl_c_exits_with_75_and_says_how_to_go_on(tiny_file: Path, tmp_path: Path) -> None:
    command = tune(tiny_file, tmp_path / "study", 50)
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    while not (tmp_path / "study" / "study.json").exists():
        assert process.poll() is None
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the workers too
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 75
    assert "the same command goes on from there" in errors
    assert "Traceback" not in errors


def test_ctrl_c_while_workers_start_is_quiet(tiny_file: Path, tmp_path: Path) -> None:
    command = tune(tiny_file, tmp_path / "study", 50)
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    while not workers_of(process.pid):
        assert process.poll() is None
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 75
    assert "Traceback" not in errors


@pytest.fixture
def tokens(tiny: Recipe) -> TokenSet:
    return prepare(tiny.data, tiny.model.vocab_size)


def test_a_second_study_in_the_folder_is_refused_while_the_first_works(
    tiny: Recipe, tokens: TokenSet, tiny_file: Path, tmp_path: Path
) -> None:
    short = tiny.replace({"data.tokens": 2048, "schedule.warmup_tokens": 256})
    with Study(tmp_path / "study", short, space(short, "global"), "trust-region", tokens):
        second = subprocess.run(tune(tiny_file, tmp_path / "study", 4), capture_output=True, text=True, check=False)
    assert second.returncode == 2
    assert "is in use by another process" in second.stderr


def test_divergence_is_a_finite_result_and_no_best(tiny: Recipe, tokens: TokenSet, tmp_path: Path) -> None:
    wild = tiny.replace({"hyperparameters.lr": 1e20, "hyperparameters.weight_decay": 1e-30, "data.tokens": 2048})
    with Study(tmp_path / "study", wild, space(wild, "hyperparameters.lr"), "random", tokens) as study:
        state = study.run(2, 1)
        assert [trial.state for trial in state.trials] == ["diverged", "diverged"]
        assert all(trial.loss is not None and trial.loss < 100 for trial in state.trials)
        assert state.best is None
        assert study.document(state)["failed"] == 2


def test_a_point_that_is_no_recipe_counts_as_diverged(tiny: Recipe, tokens: TokenSet, tmp_path: Path) -> None:
    """lr x weight_decay above 1 is no recipe; a search may well ask for it."""
    edge = tiny.replace({"hyperparameters.lr": 0.9, "hyperparameters.weight_decay": 1.0, "data.tokens": 1024})
    edge = edge.replace({"schedule.warmup_tokens": 256})
    around = space(edge, "hyperparameters.lr")
    wide = replace(around, dimensions=(replace(around.dimensions[0], high=3.0),))
    with Study(tmp_path / "study", edge, wide, "random", tokens) as study:
        state = study.run(6, 1)
    beyond = [trial for trial in state.trials if trial.values["hyperparameters.lr"] >= 1]
    assert beyond
    assert {trial.state for trial in beyond} == {"diverged"}
    assert len(state.trials) == 6


def test_a_worker_killed_among_the_finalists_costs_nothing(tiny: Recipe, tokens: TokenSet, tmp_path: Path) -> None:
    short = tiny.replace({"data.tokens": 4096})
    killed: list[int] = []

    def kill_once(done: int, total: int) -> None:
        if not killed:
            killed.append(workers_of(os.getpid())[0])
            os.kill(killed[0], signal.SIGKILL)

    with Study(tmp_path / "study", short, space(short, "hyperparameters.lr"), "random", tokens) as study:
        state = study.run(2, 1, on_rerun=kill_once)
    assert killed
    assert state.best is not None


def test_the_winner_is_judged_on_fresh_seeds_alone(tiny: Recipe, tokens: TokenSet, tmp_path: Path) -> None:
    short = tiny.replace({"data.tokens": 2048})
    with Study(tmp_path / "study", short, space(short, "hyperparameters.lr"), "random", tokens) as study:
        state = study.run(3, 2)
        seen = study.reruns
    assert state.best is not None
    assert len(seen) == FINALISTS * SEEDS
    fresh = [loss for key, loss in seen.items() if key.startswith(f"{state.best.number}:")]
    assert {key.partition(":")[2] for key in seen} == {"1", "2", "3"}  # the search itself ran with seed 0
    assert state.best.loss == pytest.approx(sum(fresh) / SEEDS)
    low, high = state.best.interval
    assert (low + high) / 2 == pytest.approx(state.best.loss)
    # Pooled over two finalists of three seeds: four degrees of freedom, t = 2.776.
    assert state.noise_floor is not None
    assert high - state.best.loss == pytest.approx(2.776 * state.noise_floor / 3**0.5, rel=2e-3)


def test_a_journal_torn_by_a_full_disk_is_mended(tiny: Recipe, tokens: TokenSet, tmp_path: Path) -> None:
    short = tiny.replace({"data.tokens": 2048})
    around = space(short, "hyperparameters.lr")
    with Study(tmp_path / "study", short, around, "random", tokens) as study:
        study.run(2, 1)
    with (tmp_path / "study" / "journal.log").open("ab") as journal:
        journal.write(b'{"op_code": 4, "worker_')
    with Study(tmp_path / "study", short, around, "random", tokens) as study:
        assert len(study.run(3, 1).trials) == 3


def test_a_study_of_something_else_is_refused(tiny: Recipe, tokens: TokenSet, tmp_path: Path) -> None:
    around = space(tiny, "global")
    with Study(tmp_path / "study", tiny, around, "random", tokens):
        pass
    other = tiny.replace({"hyperparameters.lr": 0.02})
    with pytest.raises(InputError, match="is of another recipe: hyperparameters.lr 0.01 there, 0.02 here"):
        Study(tmp_path / "study", other, space(other, "global"), "random", tokens)
    for changed in (
        Study(tmp_path / "study", tiny, space(tiny, "hyperparameters.lr"), "random", tokens),
        Study(tmp_path / "study", tiny, around, "tpe", tokens),
        Study(tmp_path / "study", tiny, around, "random", replace(tokens, fingerprint="other")),
    ):
        with pytest.raises(InputError, match="was begun with (space|method|text)"), changed:
            pass
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    with pytest.raises(InputError, match="is not empty and holds no study"):
        Study(tmp_path / "full", tiny, around, "random", tokens)
    with pytest.raises(InputError, match="a file; give a folder"):
        Study(tmp_path / "full" / "x", tiny, around, "random", tokens)
    with pytest.raises(InputError, match="method best: there are trust-region, random, tpe"):
        Study(tmp_path / "new", tiny, around, "best", tokens)
    assert not (tmp_path / "new").exists()
