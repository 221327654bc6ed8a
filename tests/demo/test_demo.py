"""Test the demo with small models: its result, its folder, kills and Ctrl-C."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.demo import small_demo

from leaven import demo
from leaven.demo import SIZES, paired, run_demo
from leaven.documents import sealed
from leaven.documents.runs import DemoDocument
from leaven.errors import InputError
from leaven.recipe.files import read_recipe
from leaven.recipe.recipe import differences
from leaven.scaling.table import parameter_table
from leaven.training.trial import train_trial
from leaven.verification.runs import ChecksStopped

COMMAND = [sys.executable, small_demo.__file__, "demo", "--workers", "2", "--run"]


@pytest.fixture
def small(in_this_process: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the demo so small that it takes seconds, and run it in this process."""
    for name in ("base_recipe", "SIZES"):
        monkeypatch.setattr(demo, name, getattr(demo, name))
    monkeypatch.setattr(demo, "SIZES", dict(SIZES))
    small_demo.shrink()


def run(folder: Path, stop: Callable[[], bool] = lambda: False, **options: Any) -> DemoDocument:
    return run_demo(folder, **{"size": None, "source": None, "workers": 1, "stop": stop} | options)


def losses(document: DemoDocument) -> dict[tuple[str, int, float, int], float]:
    return {(run.rule, run.width, run.lr, run.seed): run.loss for run in document.runs}


@pytest.mark.long
@pytest.mark.usefixtures("small")
def test_a_demo_stopped_half_way_and_run_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    polls = iter([False] * 5)
    with pytest.raises(ChecksStopped):
        run(tmp_path, stop=lambda: next(polls, True))
    finished = (tmp_path / "runs/runs.jsonl").read_text()
    assert 0 < len(finished.splitlines()) < 14
    announced = capsys.readouterr().err
    assert "14 runs of 1.02 k tokens of tiny-shakespeare with 1 processes (size full; leaven demo" in announced

    done = run(tmp_path)
    assert capsys.readouterr().err == ""  # announced once
    assert (tmp_path / "runs/runs.jsonl").read_text().startswith(finished)  # not run again
    result = done.result
    assert result is not None
    assert len(done.runs) == 3 * 2 + 3 * 2 + 2
    at = losses(done)
    by_lr = {lr: at["complete-d-p", 48, lr, 0] + at["complete-d-p", 48, lr, 1] for lr in done.lrs}
    assert result.lr == min(by_lr, key=lambda lr: by_lr[lr])
    assert result.copied == [at["standard", 96, result.lr, seed] for seed in (0, 1)]
    assert result.moved == [at["complete-d-p", 96, result.lr, seed] for seed in (0, 1)]
    assert (tmp_path / "report.html").stat().st_size < 5_000_000
    assert json.loads((tmp_path / "demo.json").read_text())["runs"] == done.dump()["runs"]

    copied, moved = (read_recipe(tmp_path / f"{name}.toml") for name in ("copied", "moved"))
    assert [path for path, _, _ in differences(copied, moved)] == ["scaling.rule"]
    hidden = "layers.0.mlp.in.weight"
    assert parameter_table(copied)[hidden].lr == result.lr
    assert parameter_table(moved)[hidden].lr == pytest.approx(result.lr / 2)
    # The recipes in the folder give the same losses outside of the demo.
    assert train_trial(moved).loss == result.moved[0]
    assert train_trial(copied.replace({"data.seed": 1})).loss == result.copied[1]

    with (tmp_path / "base.toml").open("a") as file:
        file.write("# my notes\n")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert run(tmp_path) == done
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    with pytest.raises(InputError, match=r"contains a demo with --size full; leave out --size to resume it"):
        run(tmp_path, size="quick")
    assert_not_started_without_its_runs(tmp_path)


def assert_not_started_without_its_runs(folder: Path) -> None:
    shutil.rmtree(folder / "runs")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(InputError, match=r"contains a demo, but not its runs; bring back .*runs.jsonl"):
        run(folder)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_the_interval_is_students() -> None:
    mean, half = paired([5.0, 6.0, 7.0], [4.0, 4.0, 4.0])
    assert mean == 2.0
    assert half == pytest.approx(4.303 * 1.0 / 3**0.5)  # standard deviation 1, 2 degrees of freedom


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").touch()
    with pytest.raises(InputError, match="does not contain a demo"):
        run(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_a_folder_that_cannot_be_written_is_refused_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)  # root may write anywhere
    monkeypatch.setattr(demo, "prepare", None)
    with pytest.raises(InputError, match=f"{tmp_path}: cannot be written; use another folder"):
        run(tmp_path / "new" / "demo")


@pytest.mark.usefixtures("small")
def test_a_demo_without_its_runs_does_not_start_again(tmp_path: Path) -> None:
    polls = iter([False] * 5)
    with pytest.raises(ChecksStopped):
        run(tmp_path, size="quick", stop=lambda: next(polls, True))
    killed = tmp_path / "killed"  # before it wrote demo.json
    (killed / "runs").mkdir(parents=True)
    with pytest.raises(ChecksStopped):
        run(killed, size="quick", stop=lambda: True)
    begun = json.loads((tmp_path / "demo.json").read_text()) | {"runs": [], "seconds": 0.0}
    (tmp_path / "demo.json").write_text(json.dumps(sealed(begun)))  # as if it was killed
    assert_not_started_without_its_runs(tmp_path)


@pytest.mark.usefixtures("small")
def test_a_demo_whose_folder_is_deleted_ends_with_one_line(tmp_path: Path) -> None:
    folder, polls = tmp_path / "demo", iter(range(100))

    def stop() -> bool:
        if next(polls) == 3:
            shutil.rmtree(folder)
        return False

    with pytest.raises(InputError, match=r"demo folder .*demo was deleted or moved while it was used"):
        run(folder, size="quick", stop=stop)
    assert not folder.exists()


def started(folder: Path, runs: int) -> "subprocess.Popen[str]":
    """Start a demo and wait until ``runs`` of its runs have ended."""
    process = subprocess.Popen(
        [*COMMAND, str(folder)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    lines = folder / "runs/runs.jsonl"
    while not (lines.exists() and lines.read_bytes().count(b"\n") >= runs):
        assert process.poll() is None
        time.sleep(0.01)
    return process


@pytest.mark.kills
def test_a_killed_demo_resumes_and_its_losses_are_those_of_another_order(tmp_path: Path) -> None:
    process = started(tmp_path / "killed", 3)
    process.kill()
    process.communicate()
    finished = (tmp_path / "killed/runs/runs.jsonl").read_bytes()
    again = subprocess.run([*COMMAND, str(tmp_path / "killed")], capture_output=True, text=True, check=True)
    whole = finished[: finished.rindex(b"\n") + 1]
    assert (tmp_path / "killed/runs/runs.jsonl").read_bytes().startswith(whole)
    assert "nats lower" in again.stdout or "nats HIGHER" in again.stdout
    assert f"page  {tmp_path / 'killed/report.html'}" in again.stdout
    assert "leaven show --rule complete-d-p" in again.stdout
    one = ["1" if word == "2" else word for word in COMMAND]  # worker
    alone = [*one, str(tmp_path / "alone"), "--json"]
    other = json.loads(subprocess.run(alone, capture_output=True, text=True, check=True).stdout)
    mine = json.loads((tmp_path / "killed/demo.json").read_text())
    assert mine["result"] == other["result"]
    assert [run | {"seconds": 0} for run in mine["runs"]] == [run | {"seconds": 0} for run in other["runs"]]


@pytest.mark.kills
def test_ctrl_c_is_75_and_a_second_demo_in_the_folder_is_refused(tmp_path: Path) -> None:
    process = started(tmp_path, 1)
    os.killpg(process.pid, signal.SIGSTOP)  # otherwise it might end before the second demo starts
    second = subprocess.run([*COMMAND, str(tmp_path)], capture_output=True, text=True, check=False)
    assert second.returncode == 2
    assert "in use by another process" in second.stderr
    os.killpg(process.pid, signal.SIGINT)
    os.killpg(process.pid, signal.SIGCONT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 75
    assert "run the same command again to resume" in errors
    assert "Traceback" not in errors
