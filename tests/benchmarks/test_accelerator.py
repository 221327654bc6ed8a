"""Test that the script for a GPU runs, on tiny models: a step, a part, and one that is stopped at its limit."""

import json
from pathlib import Path

import pytest
from benchmarks.accelerator import main, recipes, step_row
from benchmarks.performance import gpu_tables

from benchmarks import accelerator
from leaven.distributed.process_group import SINGLE_PROCESS


def test_a_row_of_a_step() -> None:
    recipe = recipes(rehearse=True)["350m"].replace({"layout.compile": False})
    row = step_row(recipe, SINGLE_PROCESS, profiled=True)
    assert row["micro_batch"] == 8
    assert row["tokens_per_second"] == pytest.approx(256 / row["step_seconds"])
    assert sum(row["shares"].values()) == pytest.approx(1)
    assert row["shares"]["products"] > 0
    assert row["planned_step_seconds"] > 0


@pytest.mark.long
def test_rows_of_a_part_become_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--rehearse", "--part", "fp8"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["product"] for row in rows[:3]] == ["64 x 64 x 64", "64 x 64 x 192", "64 x 192 x 64"]
    where = {"device": "a GPU", "torch": "2.11", "date": "2026-11-29", "error": "stopped at its limit of 30 s"}
    table = gpu_tables({"fp8": where | {"rows": rows}})
    assert "Incomplete: stopped at its limit of 30 s" in table
    assert "| 1.2b | 64 x 64 x 192 |" in table


def test_a_part_that_reaches_its_limit_is_stopped_and_the_next_one_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(accelerator.PARTS, "waits", (accelerator.waits, 0.2))
    file = tmp_path / "gpu.json"
    assert main(["--rehearse", "--parts", "waits", "fp8", "--seconds", "0.3", "--out", str(file)]) == 1
    errors = [part["error"] for part in json.loads(file.read_text())["parts"].values()]
    assert errors == ["stopped at its limit of 0.2 s", "stopped at its limit of 0.1 s"]
