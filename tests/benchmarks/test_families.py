"""Test checks of models of transformers: families pass, planted faults are found, and the docs have all families."""

from pathlib import Path

import pytest
from benchmarks.families import BEGIN, DEPTH, DEPTHS, END, FAMILIES, PAGE, WIDTH, WIDTHS, checked

SLOW = pytest.mark.slow  # the same fault in a second family


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])


@pytest.mark.parametrize("name", ["olmo2", pytest.param("gemma3", marks=SLOW)])
def test_a_family_passes(name: str) -> None:
    document = checked(name, "coordinates", widths=WIDTHS, depths=DEPTHS, seeds=1)
    assert document.passed, [row for row in document.rows if row.passed is False]


@pytest.mark.parametrize("name", ["olmo2", pytest.param("gemma3", marks=SLOW)])
def test_a_multiplier_before_the_norm_is_found(name: str) -> None:
    document = checked(name, "coordinates", "multiplier", widths=(WIDTH,), depths=DEPTHS, seeds=1)
    assert {row.axis for row in document.rows if row.passed is False} == {"depth"}


@pytest.mark.parametrize("name", ["olmo2", pytest.param("gemma3", marks=SLOW)])
def test_a_readout_that_is_not_scaled_is_found(name: str) -> None:
    document = checked(name, "coordinates", "readout", widths=WIDTHS, depths=(DEPTH,), seeds=1)
    assert "lm_head" in {row.module for row in document.rows if row.passed is False}


@pytest.mark.parametrize("name", ["mixtral", pytest.param("deepseek3", marks=SLOW)])
def test_a_sum_over_experts_is_not_measured_after_their_multipliers(name: str) -> None:
    document = checked(name, "coordinates", widths=(WIDTH,), depths=DEPTHS, seeds=1)
    assert {row.module for row in document.rows if row.module.startswith("model.layers.mlp")} >= {
        "model.layers.mlp.gate",
        "model.layers.mlp.experts",
    }
    assert "model.layers.mlp" not in {row.module for row in document.rows}


@pytest.mark.parametrize(("fault", "module"), [("router", "gate"), ("experts", "experts")])
def test_faults_of_experts_are_found(fault: str, module: str) -> None:
    document = checked("mixtral", "coordinates", fault, widths=WIDTHS, depths=(DEPTH,), seeds=1)
    assert f"model.layers.mlp.{module}" in {row.module for row in document.rows if row.passed is False}


def test_the_page_has_every_family_and_every_check_passed() -> None:
    table = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    rows = [line.split(" | ") for line in table.strip().splitlines()[2:]]
    assert {row[0].removeprefix("| ") for row in rows} == {family.title for family in FAMILIES.values()}
    assert all(cell.startswith("passed") for row in rows for cell in row[2:4])
    assert "none" not in table
