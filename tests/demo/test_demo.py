"""The demo at a tiny size, end to end, through the command line."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from leaven.catalogue.starter.request import StarterRequest
from leaven.catalogue.starter.starter import starter
from leaven.catalogue.starter.starter import untuned as untuned_of
from leaven.demo.demo import Demo, arms
from leaven.recipe.errors import InputError
from leaven.recipe.files import read_recipe
from leaven.recipe.recipe import Recipe, differences
from leaven.scaling.table import resolve
from leaven.training.run_folder import RunFolder


def demo(folder: Path, corpus: Path) -> list[str]:
    size = ["--size", "tiny", "--source", f"{corpus}/*.txt", "--workers", "2"]
    return [sys.executable, "-m", "leaven", "demo", "--run", str(folder), *size]


def test_all_of_it_killed_half_way_and_run_again(demo_taken_up, corpus: Path) -> None:
    folder, stdout = demo_taken_up.folder, demo_taken_up.stdout
    finished = demo_taken_up.before
    assert finished
    assert {path: RunFolder(path).metrics() for path in finished} == finished  # not run again

    state = json.loads((folder / "demo.json").read_text())
    assert [arm["key"] for arm in state["arms"]] == ["transferred", "copied", "untuned"]
    for arm in state["arms"]:
        finish = RunFolder(folder / arm["run"]).events()[-1]
        assert finish["event"] == "finish"
        assert arm["loss"] == finish["loss"]
        assert f"{arm['loss']:.4f}" in stdout
    assert [part["name"] for part in state["parts"]] == ["text", "tune", "transfer", "train", "report"]
    assert len(stdout.strip().splitlines()) <= 10
    assert str(folder / "report.html") in stdout.replace("\n", "")
    assert (folder / "report.html").stat().st_size < 5_000_000

    proxy, target = read_recipe(folder / "study" / "best.toml"), read_recipe(folder / "target.toml")
    assert target.model.d_model >= 2 * proxy.model.d_model
    assert target.model.n_layers >= 2 * proxy.model.n_layers
    assert target.data.tokens >= 4 * proxy.data.tokens
    runs = [read_recipe(folder / arm["run"] / "recipe.toml") for arm in state["arms"]]
    assert len({(run.model, run.data, run.batch) for run in runs}) == 1  # same model, tokens, batch and seed

    before = {arm["key"]: RunFolder(folder / arm["run"]).events() for arm in state["arms"]}
    again = subprocess.run([*demo(folder, corpus), "--json"], capture_output=True, text=True, check=True)
    assert json.loads(again.stdout)["report"] == str(folder / "report.html")
    assert {
        arm["key"]: RunFolder(folder / arm["run"]).events() for arm in state["arms"]
    } == before  # nothing done twice


def test_the_arms_differ_in_hyperparameters_alone(tiny: Recipe) -> None:
    from leaven.scaling.transfer import transfer

    target = transfer(tiny, width=32, depth=4, tokens=40_960)
    transferred, copied, untuned = (arm.recipe for arm in arms(target))
    assert [path for path, _, _ in differences(transferred, copied)] == ["scaling.rule"]
    hidden = "layers.0.mlp.in.weight"
    assert resolve(copied)[hidden].lr == tiny.hyperparameters.lr
    assert resolve(transferred)[hidden].lr == pytest.approx(tiny.hyperparameters.lr / 2 / 2)
    changed = {path.split(".")[0] for path, _, _ in differences(transferred, untuned)}
    assert changed <= {"hyperparameters", "schedule", "scaling"}
    assert {row.lr for row in resolve(untuned).rows} == {
        untuned.hyperparameters.lr
    }  # its own scale: nothing is moved
    assert "neighbours" in untuned.why["hyperparameters.lr"]


def test_the_untuned_arm_has_what_leaven_new_writes_for_its_size_and_batch() -> None:
    asked = StarterRequest("wheat", 300_000_000, 6_000_000_000, proxy=0)
    new = starter(asked).recipe
    plain = new.replace({"hyperparameters": {"lr": 1.0, "init_std": 1.0}, "schedule": {}})
    assert untuned_of(plain).hyperparameters == new.hyperparameters
    assert untuned_of(plain).schedule == new.schedule


def test_a_folder_of_something_else_is_refused(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "x").touch()
    run = Demo(tmp_path, "tiny", f"{corpus}/*.txt", 1, stop=lambda: False).run
    with pytest.raises(InputError, match="does not hold a demo"):
        run()
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


@pytest.mark.kills
def test_ctrl_c_is_75_and_a_second_demo_in_the_folder_is_refused(corpus: Path, tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    process = subprocess.Popen(
        demo(folder, corpus), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    while not (folder / "study" / "study.json").exists():
        assert process.poll() is None
        time.sleep(0.01)
    assert (folder / "demo.json").exists()  # killed here, the folder would still be known as a demo's
    os.killpg(process.pid, signal.SIGSTOP)  # on a slow machine it would be done before the second one has started
    second = subprocess.run(demo(folder, corpus), capture_output=True, text=True, check=False)
    assert second.returncode == 2
    assert "in use by another process" in second.stderr
    os.killpg(process.pid, signal.SIGINT)
    os.killpg(process.pid, signal.SIGCONT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 75
    assert "run it again to resume" in errors
    assert "Traceback" not in errors
