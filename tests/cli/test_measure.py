"""What a plan is calibrated by on the command line."""

import os
import signal
from pathlib import Path

import pytest
import torch
import typer

from leaven.cli.plan import by_measurement
from leaven.planning import calibration as planning
from leaven.planning.plan import plan_recipe
from leaven.recipe.recipe import Recipe


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One thread, and a history of the test's own."""
    torch.set_num_threads(1)
    monkeypatch.setattr(planning, "cache_folder", lambda: tmp_path)
    return tmp_path


def test_measured_once_and_then_by_the_history(tiny: Recipe, capsys: pytest.CaptureFixture[str]) -> None:
    bare = plan_recipe(tiny, "cpu")
    assert by_measurement(bare, tiny, "cpu", measure=False, history=True) is bare
    now = by_measurement(bare, tiny, "cpu", measure=True, history=True)
    assert now.calibration is not None
    assert now.speed.step_seconds == pytest.approx(bare.speed.step_seconds * now.calibration.time)
    assert "best matmul" in capsys.readouterr().err
    assert by_measurement(bare, tiny, "cpu", measure=False, history=True).calibration == now.calibration
    assert by_measurement(bare, tiny, "cpu", measure=False, history=False) is bare


def test_ctrl_c_is_75_and_leaves_nothing(
    tiny: Recipe, alone: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from leaven.training.engine import Training

    issue = Training.issue

    def interrupted(self: Training, *arguments: object) -> object:
        os.kill(os.getpid(), signal.SIGINT)
        return issue(self)

    monkeypatch.setattr(Training, "issue", interrupted)
    with pytest.raises(typer.Exit) as ended:
        by_measurement(plan_recipe(tiny, "cpu"), tiny, "cpu", measure=True, history=True)
    assert ended.value.exit_code == 75
    assert "nothing is written" in capsys.readouterr().err
    assert list(alone.iterdir()) == []
