"""Measuring a few steps on this machine. No test compares two times."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from leaven.model.transformer import Stage
from leaven.planning import calibration as planning
from leaven.planning.calibration import StepCost, history
from leaven.recipe.errors import InputError
from leaven.recipe.recipe import Recipe
from leaven.training import measured
from leaven.training.measured import TIMED_STEPS, UNTIMED_STEPS, measure


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One thread, and a history of the test's own."""
    torch.set_num_threads(1)
    monkeypatch.setattr(planning, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(measured, "best_matmul", lambda *arguments: 1e11)
    return tmp_path


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
    assert found is not None
    assert calls == [(n + 1, UNTIMED_STEPS + TIMED_STEPS) for n in range(UNTIMED_STEPS + TIMED_STEPS)]
    assert found.layers == (2,)
    assert found.matmul_tflops == 0.1
    record = found.record
    assert (record.by, record.accelerator, record.model) == ("measurement", "cpu", tiny.model)
    assert (record.layout.ranks, record.layout.zero, record.layout.recompute) == (1, 0, "full")
    assert (record.batch_tokens, record.micro_batch, record.grad_accumulation) == (64, 1, 2)  # a rank's share
    assert record.measured is not None
    assert record.measured.step_seconds == found.step_seconds[0] > 0
    assert record.predicted is not None
    assert history() == [record]
    assert sorted(path.name for path in alone.iterdir()) == [".history.lock", "history.jsonl"]


def test_a_deep_model_is_cut_and_its_layers_added(tiny: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that take 2 seconds and 3 a layer, and hold 1 GiB and half of one a layer: of 12 layers, 38 and 7."""
    taken = []

    def steps(recipe: Recipe, *arguments: Any) -> StepCost | None:
        n = recipe.model.n_layers
        taken.append(n)
        return StepCost(step_seconds=2 + 3 * n, memory_gib=1 + n / 2) if n < 7 else None  # out of memory

    monkeypatch.setattr(measured, "_measure_steps", steps)
    found = measure(tiny.replace({"model.n_layers": 12}), "cpu")
    assert taken == [12, 3, 6]
    assert found is not None
    assert (found.layers, found.step_seconds) == ((3, 6), (11, 20))
    assert found.record.model.n_layers == 12
    assert found.record.measured is not None
    assert found.record.measured.step_seconds == pytest.approx(38)
    assert found.record.measured.memory_gib == pytest.approx(7)


def test_a_slow_or_large_model_is_cut_before_it_is_tried(tiny: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tiny.replace({"model.n_layers": 12})
    monkeypatch.setattr(measured, "best_matmul", lambda *arguments: 1.0)  # FLOP/s
    found = measure(deep, "cpu")
    assert found is not None
    assert found.layers == (1, 2)
    monkeypatch.setattr(measured, "best_matmul", lambda *arguments: 1e11)
    room = measured.needed_memory(deep.replace({"model.n_layers": 5}), 8, "cpu") + 4 * deep.model.params / 2
    monkeypatch.setattr(measured, "free_memory", lambda device: room / measured.SHARE["cpu"])
    found = measure(deep, "cpu")
    assert found is not None
    assert found.layers in {(2, 4), (2, 5), (3, 6)}
    monkeypatch.setattr(measured, "free_memory", lambda device: 100)
    with pytest.raises(InputError, match=r"not even 2 layers of this model fit .* use a smaller model or a shorter"):
        measure(deep, "cpu")


def test_out_of_memory_at_any_depth_is_one_line(tiny: Recipe, alone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any) -> torch.Tensor:
        raise MemoryError

    monkeypatch.setattr(Stage, "forward", full)
    with pytest.raises(InputError, match="not even 2 layers"):
        measure(tiny, "cpu")
    assert list(alone.iterdir()) == []


def test_stopped_at_any_moment_nothing_is_written(tiny: Recipe, alone: Path) -> None:
    for after in (0, 1, 4):
        asked: Iterator[int] = iter(range(100))
        assert measure(tiny, "cpu", stop=lambda asked=asked, after=after: next(asked) >= after) is None
    assert list(alone.iterdir()) == []
