"""Step times and memory of runs and of ``leaven plan --measure``, in plan.json and the calibration history. No test
compares two times."""

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.training.conftest import made_up

from leaven.data.tokens import TokenSet
from leaven.errors import InputError
from leaven.model.transformer import Stage
from leaven.planning import calibration as planning
from leaven.planning.calibration import CalibrationRecord, StepCost, history
from leaven.planning.this_machine import processor
from leaven.recipe.recipe import Recipe
from leaven.training import profiling
from leaven.training.engine import Training
from leaven.training.profiling import TIMED_STEPS, UNTIMED_STEPS, WARM_UP, RunProfile, measure
from leaven.training.run_folder import IDENTITY, RunFolder
from leaven.training.trainer import train
from leaven.views.terminal.training import TrainScreen


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "history"
    monkeypatch.setattr(planning, "cache_folder", lambda: folder)
    monkeypatch.setattr(profiling, "best_matmul", lambda *arguments: 1e11)
    return folder


@pytest.fixture
def tiny(tiny: Recipe) -> Recipe:
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
    held = row["measured"]["memory_gib"]  # None if this process had used as much memory before
    assert ratio["memory_gib"] == (held and pytest.approx(held / row["predicted"]["memory_gib"]))
    (remembered,) = history()
    identity = json.loads((tmp_path / "run" / "plan.json").read_text())[IDENTITY]
    assert remembered == CalibrationRecord.model_validate_json(json.dumps(row | {"run": identity}))


def test_the_start_with_more_steps_is_kept(tiny: Recipe, tokens: TokenSet, tmp_path: Path, alone: Path) -> None:
    folder = tmp_path / "run"
    train(tiny, tokens, folder, stop=lambda: seen(folder) >= 14)
    (first,) = rows(folder)
    assert first["steps"] == 14 - WARM_UP
    assert len(history()) == 1
    train(tiny, tokens, folder)  # six more
    assert rows(folder) == [first]
    assert [each.steps for each in history()] == [14 - WARM_UP]  # three are too few


def test_rows_of_another_run_are_dropped(tiny: Recipe, tokens: TokenSet, tmp_path: Path) -> None:
    other, run = tmp_path / "other", tmp_path / "run"
    train(tiny.replace({"batch.micro_batch": 2}), tokens, other)
    train(tiny, tokens, run, stop=lambda: seen(run) >= 4)
    shutil.copy(other / "plan.json", run)
    train(tiny, tokens, run)
    assert [row["micro_batch"] for row in rows(run)] == [8]


def test_each_batch_size_of_a_ramp_has_a_row(tiny: Recipe, tokens: TokenSet, tmp_path: Path, alone: Path) -> None:
    recipe = tiny.replace(
        {"batch.ramp": dict(start_tokens=64, increment_tokens=96, over_tokens=1_280), "batch.micro_batch": 2}
    )
    train(recipe, tokens, tmp_path / "run")
    found = rows(tmp_path / "run")
    assert [(row["batch_tokens"], row["grad_accumulation"]) for row in found] == [(64, 1), (160, 3), (256, 4)]
    assert sum(row["steps"] for row in found) == recipe.steps - 3 * WARM_UP
    assert [each.batch_tokens for each in history()] == [256]


def test_errors_of_the_profile_do_not_stop_a_run(
    tiny: Recipe, tokens: TokenSet, tmp_path: Path, alone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planner fails, plan.json is damaged or a folder, and the calibration history cannot be written."""
    alone.write_text("in the way")
    monkeypatch.setattr(planning, "step_time", lambda *arguments: 1 / 0)
    folder = tmp_path / "run"
    train(tiny, tokens, folder, stop=lambda: seen(folder) >= 14)
    (row,) = rows(folder)
    assert row["predicted"] is None
    assert row["measured"]["step_seconds"] > 0
    for damaged in ("", "{", "[]", '{"rows": 3}', '{"rows": [{"by": "run"}]}'):
        (folder / "plan.json").write_text(damaged)
        run = RunFolder(folder)
        run.identity = "started"
        assert len(RunProfile(run, Training(tiny, tokens), 0, True).write()) == len(rows(folder)) == 1
    (folder / "plan.json").unlink()
    (folder / "plan.json").mkdir()
    assert train(tiny, tokens, folder).finished
    assert alone.read_text() == "in the way"


def test_a_step_time_that_cannot_be_added_to_the_history_is_named(
    tiny: Recipe, tokens: TokenSet, tmp_path: Path, alone: Path
) -> None:
    alone.mkdir()
    (alone / "history.jsonl").symlink_to("nowhere")
    told: list[str] = []
    screen = TrainScreen(tiny)
    screen.line = lambda text: told.append(str(text))  # type: ignore[method-assign]
    assert train(tiny, tokens, tmp_path / "run", on_event=screen.event).finished
    assert told[-1].startswith("  the step time of this run is not saved")
    assert told[-1].endswith("history.jsonl: this is a link to nowhere; replace it with the file itself")


def test_the_median_excludes_the_first_steps(tiny: Recipe, tokens: TokenSet, tmp_path: Path) -> None:
    """The first three steps and one later step are slow."""
    run = RunFolder(tmp_path)
    run.identity = "started"
    profile = RunProfile(run, Training(tiny, tokens), 2**30, False)
    for number, seconds in enumerate([9.0, 9.0, 9.0, 0.5, 0.25, 8.0, 0.5, 0.25, 0.5]):
        profile.after_step(made_up(number + 1, tokens_per_second=256 / seconds, memory_gib=3.0))
    profile.write()
    row = next(row for row in rows(run.path) if row["batch_tokens"] == 256)
    assert (row["measured"]["step_seconds"], row["steps"]) == (0.5, 6)
    assert row["measured"]["memory_gib"] == pytest.approx(3.0 - 1.0)
    profile.highest_memory = 4.5  # of another process
    profile.write()
    assert rows(run.path)[0]["measured"]["memory_gib"] == pytest.approx(4.5 - 1.0)


def test_a_recipe_is_measured_without_its_text(tiny: Recipe, alone: Path) -> None:
    recipe = tiny.replace(
        {
            "data.source": "/nowhere/*.txt",
            "layout": {"dp": 4, "zero": 1, "recompute": "full"},
            "batch.ramp": dict(start_tokens=64, increment_tokens=64, over_tokens=2_000),
            "stability.noise_scale_every_tokens": 256,
        }
    )
    calls: list[tuple[int, int]] = []
    found = measure(recipe, "cpu", on_step=lambda done, total: calls.append((done, total)))
    assert calls == [(n + 1, UNTIMED_STEPS + TIMED_STEPS) for n in range(UNTIMED_STEPS + TIMED_STEPS)]
    assert found.layers == (2,)
    assert found.matmul_tflops == 0.1
    record = found.record
    assert (record.by, record.accelerator, record.model) == ("measurement", "cpu", tiny.model)
    assert (record.layout.ranks, record.layout.zero, record.layout.recompute) == (1, 0, "full")
    assert (record.batch_tokens, record.micro_batch, record.grad_accumulation) == (64, 1, 2)  # a rank's share
    assert record.measured.step_seconds > 0
    assert record.predicted is not None
    assert history() == [record]
    assert sorted(path.name for path in alone.iterdir()) == [".history.lock", "history.jsonl"]


def test_a_deep_model_is_cut_and_its_layers_added(tiny: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step takes 2 seconds plus 3 for each layer, and holds 1 GiB plus 0.5 for each layer: 38 seconds and 7 GiB for
    12 layers."""
    taken = []

    def steps(recipe: Recipe, *arguments: Any) -> StepCost | None:
        n = recipe.model.n_layers
        taken.append(n)
        return StepCost(step_seconds=2 + 3 * n, memory_gib=1 + n / 2) if n < 7 else None  # out of memory

    monkeypatch.setattr(profiling, "_measure_steps", steps)
    found = measure(tiny.replace({"model.n_layers": 12}), "cpu")
    assert taken == [12, 3, 6]
    assert found.layers == (3, 6)
    assert found.record.model.n_layers == 12
    assert found.record.measured.step_seconds == pytest.approx(38)
    assert found.record.measured.memory_gib == pytest.approx(7)


def test_a_slow_or_large_model_is_cut_before_it_is_tried(tiny: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tiny.replace({"model.n_layers": 12})
    monkeypatch.setattr(profiling, "best_matmul", lambda *arguments: 1.0)  # FLOP/s
    found = measure(deep, "cpu")
    assert found.layers == (1, 2)
    monkeypatch.setattr(profiling, "best_matmul", lambda *arguments: 1e11)
    room = profiling.needed_memory(deep.replace({"model.n_layers": 5}), 8, "cpu") + 4 * deep.model.params / 2
    monkeypatch.setattr(profiling, "free_memory", lambda device: room / profiling.SHARE["cpu"])
    found = measure(deep, "cpu")
    assert found.layers in {(2, 4), (2, 5), (3, 6)}
    monkeypatch.setattr(profiling, "free_memory", lambda device: 100)
    with pytest.raises(InputError, match=r"not even 2 layers of this model fit .* use a smaller model or a shorter"):
        measure(deep, "cpu")


def test_out_of_memory_at_any_depth_is_one_line(tiny: Recipe, alone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any) -> torch.Tensor:
        raise MemoryError

    monkeypatch.setattr(Stage, "forward", full)
    with pytest.raises(InputError, match="not even 2 layers"):
        measure(tiny, "cpu")
    assert not alone.exists()


def test_stopped_at_any_moment_nothing_is_written(tiny: Recipe, alone: Path) -> None:
    for after in (0, 1, 4):
        asked: Iterator[int] = iter(range(100))
        assert measure(tiny, "cpu", stop=lambda asked=asked, after=after: next(asked) >= after) is None
    assert not alone.exists()
