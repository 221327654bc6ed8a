"""Measured step times and memory in plan.json and the calibration history. No test compares two times."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.training.conftest import made_up

from leaven.data.tokens import TokenSet
from leaven.planning import calibration as planning
from leaven.planning.calibration import CalibrationRecord, history
from leaven.planning.this_machine import processor
from leaven.recipe.recipe import Recipe
from leaven.training.engine import Training
from leaven.training.measured import WARM_UP, RunProfile
from leaven.training.run_folder import RunFolder
from leaven.training.trainer import train


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One thread, and a history of the test's own."""
    torch.set_num_threads(1)
    folder = tmp_path / "history"
    monkeypatch.setattr(planning, "cache_folder", lambda: folder)
    return folder


@pytest.fixture
def tiny(tiny: Recipe) -> Recipe:
    """Of twenty steps."""
    return tiny.replace({"data.tokens": 5_120, "stability.checkpoint_every_tokens": 2_560})


def rows(folder: Path) -> list[dict[str, Any]]:
    return list(json.loads((folder / "plan.json").read_text())["rows"])


def seen(folder: Path) -> int:
    return len(RunFolder(folder).metrics())


def test_a_run_records_prediction_and_measurement(
    tiny: Recipe, tokens: TokenSet, tmp_path: Path, alone: Path
) -> None:
    train(tiny, tokens, tmp_path / "run")
    (row,) = rows(tmp_path / "run")
    assert (row["device"], row["accelerator"], row["threads"]) == (processor(), "cpu", 1)
    assert (row["batch_tokens"], row["micro_batch"], row["grad_accumulation"]) == (256, 8, 1)
    assert (row["compute"], row["layout"]["compile"], row["params"]) == ("fp32", False, tiny.model.params)
    assert row["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert row["steps"] == tiny.steps - WARM_UP
    assert row["predicted"]["memory_gib"] > 0
    ratio = row["measured_over_predicted"]
    assert math.isfinite(ratio["step_seconds"])
    assert ratio["step_seconds"] == pytest.approx(row["measured"]["step_seconds"] / row["predicted"]["step_seconds"])
    held = row["measured"]["memory_gib"]  # None where this process had as much before, and has grown by nothing
    assert ratio["memory_gib"] == (held and pytest.approx(held / row["predicted"]["memory_gib"]))
    (remembered,) = history(alone)
    assert remembered == CalibrationRecord.model_validate_json(json.dumps(row))


def test_the_start_with_more_steps_is_kept(tiny: Recipe, tokens: TokenSet, tmp_path: Path, alone: Path) -> None:
    folder = tmp_path / "run"
    train(tiny, tokens, folder, stop=lambda: seen(folder) >= 14)
    (first,) = rows(folder)
    assert first["steps"] == 14 - WARM_UP
    assert len(history(alone)) == 1
    train(tiny, tokens, folder)  # six more
    assert rows(folder) == [first]
    assert [each.steps for each in history(alone)] == [14 - WARM_UP]  # three are too few


def test_each_batch_size_of_a_ramp_has_a_row(tiny: Recipe, tokens: TokenSet, tmp_path: Path, alone: Path) -> None:
    recipe = tiny.replace(
        {"batch.ramp": dict(start_tokens=64, increment_tokens=96, over_tokens=1_280), "batch.micro_batch": 2}
    )
    train(recipe, tokens, tmp_path / "run")
    found = rows(tmp_path / "run")
    assert [(row["batch_tokens"], row["grad_accumulation"]) for row in found] == [(64, 1), (160, 3), (256, 4)]
    assert sum(row["steps"] for row in found) == recipe.steps - 3 * WARM_UP
    assert [each.batch_tokens for each in history(alone)] == [256]


def test_errors_of_the_profile_do_not_stop_a_run(
    tiny: Recipe, tokens: TokenSet, tmp_path: Path, alone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A planner at fault, a folder in the file's place, a damaged one, and a history that cannot be written."""
    alone.write_text("in the way")
    monkeypatch.setattr(planning, "step_time", lambda *arguments: 1 / 0)
    folder = tmp_path / "run"
    train(tiny, tokens, folder, stop=lambda: seen(folder) >= 14)
    (row,) = rows(folder)
    assert row["predicted"] is None
    assert row["measured"]["step_seconds"] > 0
    for damaged in ("", "{", "[]", '{"rows": 3}', '{"rows": [{"by": "run"}]}'):
        (folder / "plan.json").write_text(damaged)
        assert RunProfile(RunFolder(folder), Training(tiny, tokens), 0, True)._before == []
    (folder / "plan.json").unlink()
    (folder / "plan.json").mkdir()
    assert train(tiny, tokens, folder).finished
    assert alone.read_text() == "in the way"


def test_the_median_excludes_the_first_steps(tiny: Recipe, tokens: TokenSet, tmp_path: Path) -> None:
    """By hand: the first three take long, and one of the others does."""
    measured = RunProfile(run := RunFolder(tmp_path), Training(tiny, tokens), 2**30, False)
    for number, seconds in enumerate([9.0, 9.0, 9.0, 0.5, 0.25, 8.0, 0.5, 0.25, 0.5]):
        measured.after_step(made_up(number + 1, tokens_per_second=256 / seconds, memory_gib=3.0))
    measured.write()
    row = next(row for row in rows(run.path) if row["batch_tokens"] == 256)
    assert (row["measured"]["step_seconds"], row["steps"]) == (0.5, 6)
    assert row["measured"]["memory_gib"] == pytest.approx(3.0 - 1.0)
    measured.highest_memory = 4.5  # of another process
    measured.write()
    assert rows(run.path)[0]["measured"]["memory_gib"] == pytest.approx(4.5 - 1.0)
