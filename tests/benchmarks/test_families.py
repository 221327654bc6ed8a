"""Test checks of models of transformers: families pass, planted faults are found, and the docs have all families."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from benchmarks.families import (
    BEGIN,
    CHECKS,
    DEPTH,
    DEPTHS,
    END,
    FAMILIES,
    FAULTS,
    FAULTS_OF_EXPERTS,
    PAGE,
    WIDTH,
    WIDTHS,
    checked,
    failures,
    found,
)

SLOW = pytest.mark.slow  # in more families


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])


@pytest.mark.long
@pytest.mark.parametrize("name", ["olmo2", pytest.param("gemma3", marks=SLOW)])
def test_a_family_passes(name: str) -> None:
    document = checked(name, "coordinates", widths=WIDTHS, depths=DEPTHS, seeds=1)
    assert document.passed, [row for row in document.rows if row.passed is False]


@pytest.mark.long
@pytest.mark.parametrize("name", ["olmo2", pytest.param("gemma3", marks=SLOW)])
def test_a_multiplier_before_the_norm_is_found(name: str) -> None:
    document = checked(name, "coordinates", "multiplier", widths=(WIDTH,), depths=DEPTHS, seeds=1)
    assert {row.axis for row in document.rows if row.passed is False} == {"depth"}


@pytest.mark.long
@pytest.mark.parametrize("name", ["olmo2", pytest.param("gemma3", marks=SLOW)])
def test_a_readout_that_is_not_scaled_is_found(name: str) -> None:
    document = checked(name, "coordinates", "readout", widths=WIDTHS, depths=(DEPTH,), seeds=1)
    assert "lm_head" in {row.module for row in document.rows if row.passed is False}


@pytest.mark.long
@pytest.mark.parametrize("name", ["mixtral", pytest.param("deepseek3", marks=SLOW)])
def test_a_sum_over_experts_is_not_measured_after_their_multipliers(name: str) -> None:
    document = checked(name, "coordinates", widths=(WIDTH,), depths=DEPTHS, seeds=1)
    assert {row.module for row in document.rows if row.module.startswith("model.layers.mlp")} >= {
        "model.layers.mlp.gate",
        "model.layers.mlp.experts",
    }
    assert "model.layers.mlp" not in {row.module for row in document.rows}


@pytest.mark.long
@pytest.mark.parametrize(("fault", "module"), [("router", "gate"), ("experts", "experts")])
def test_faults_of_experts_are_found(fault: str, module: str) -> None:
    document = checked("mixtral", "coordinates", fault, widths=WIDTHS, depths=(DEPTH,), seeds=1)
    assert f"model.layers.mlp.{module}" in {row.module for row in document.rows if row.passed is False}


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "fault", "axis", "module"),
    [
        ("mistral", "multiplier", "depth", "model.layers.self_attn.q_proj"),
        pytest.param("mixtral", "experts", "width", "model.layers.mlp.experts.down_proj", marks=SLOW),
    ],
)
def test_gradients_fails_with_a_fault_and_passes_without_it(name: str, fault: str, axis: str, module: str) -> None:
    assert not failures(name, "gradients", "", axis, 1)
    assert (module, axis) in failures(name, "gradients", fault, axis, 1)


@SLOW
@pytest.mark.parametrize(("name", "fault"), [(name, fault) for name in FAMILIES for fault in FAMILIES[name].faults])
def test_the_page_has_the_checks_that_find_a_fault(name: str, fault: str) -> None:
    cells = page()[FAMILIES[name].title]
    assert cells[4 + [*FAULTS, *FAULTS_OF_EXPERTS].index(fault)] == ", ".join(found(name, fault))


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[tuple[str, int], set[str]]]:
    """The modules that fail, by fault and seeds, in checks that train nothing."""
    failing: dict[tuple[str, int], set[str]] = {}

    def planned_check(name: str, check: str, fault: str, *, seeds: int, **sizes: object) -> SimpleNamespace:
        rows = [SimpleNamespace(module="other", axis="width", passed=True)]
        rows += [SimpleNamespace(module=each, axis="width", passed=False) for each in failing[fault, seeds]]
        return SimpleNamespace(rows=rows)

    monkeypatch.setattr("benchmarks.families.checked", planned_check)
    failures.cache_clear()
    yield failing
    failures.cache_clear()


@pytest.mark.parametrize("fault", [*FAULTS, *FAULTS_OF_EXPERTS])
def test_a_row_that_fails_without_the_fault_too_does_not_find_it(
    planned: dict[tuple[str, int], set[str]], fault: str
) -> None:
    planned |= {("", 1): {"gate"}, (fault, 1): {"gate"}, ("", 3): {"gate"}, (fault, 3): {"gate"}}
    assert found("olmoe", fault) == []


@pytest.mark.parametrize("seeds", [1, 3])
def test_a_fault_is_found_by_a_row_that_passes_without_it(
    planned: dict[tuple[str, int], set[str]], seeds: int
) -> None:
    planned |= {("", 1): {"gate"}, ("router", 1): {"gate"}, ("", 3): set(), ("router", 3): set()}
    planned["router", seeds] |= {"gate", "experts"}
    assert found("olmoe", "router") == [*CHECKS]


def page() -> dict[str, list[str]]:
    """Return the cells of each family's row in the table of the docs, by the title of the family."""
    table = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    rows = [line.strip("| ").split(" | ") for line in table.strip().splitlines()[2:]]
    return {row[0]: row for row in rows}


def test_the_page_has_every_family_and_every_check_passed() -> None:
    rows = page()
    assert rows.keys() == {family.title for family in FAMILIES.values()}
    for family in FAMILIES.values():
        assert all(cell.startswith("passed") for cell in rows[family.title][2:4])
        assert "none" not in " ".join(rows[family.title])
