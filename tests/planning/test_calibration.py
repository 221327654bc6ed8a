"""Factors on a plan, by hand."""

from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.planning.shapes import LLAMA_8B, SMALL
from tests.planning.test_history import record

from leaven.planning.calibration import calibration, weighted_median
from leaven.planning.hardware import find_accelerator
from leaven.planning.history import Cost, Record, predicted, processor
from leaven.recipe.layout import Layout
from leaven.recipe.shape import ModelShape

H100 = "H100-SXM-80GB"


def took(time: float, memory: float | None = None, **changes: object) -> Record:
    """A run that took so many times what the planner says of it now."""
    one = record(**changes)
    said = predicted(one.model, one.arrangement, find_accelerator("H100"))
    assert said is not None
    assert said.memory_gib is not None
    gib = None if memory is None else said.memory_gib * memory
    return one.model_copy(update={"measured": Cost(step_seconds=said.step_seconds * time, memory_gib=gib)})


def of(factor: float) -> ModelShape:
    """SMALL with so many times the layers."""
    return SMALL.model_copy(update={"n_layers": int(SMALL.n_layers * factor)})


def test_nothing_is_known_without_runs_of_this_accelerator_and_dtype() -> None:
    others = [
        took(2, accelerator="A100-SXM-80GB"),
        took(2, accelerator=None),
        took(2, compute="fp32"),
        record(measured=None),
        took(2, model=LLAMA_8B),  # 60 times the parameters
    ]
    assert calibration(others, H100, SMALL, Layout(), "bf16") is None
    assert calibration([], H100, SMALL, Layout(), "bf16") is None
    found = calibration([*others, took(1.25)], H100, SMALL, Layout(), "bf16")
    assert found is not None
    assert (found.time, found.runs, found.memory) == (pytest.approx(1.25), 1, None)


def test_the_middle_of_three_runs_and_how_far_they_are_apart() -> None:
    runs = [took(0.9, 1.1), took(1.3, 1.2), took(1.18, 1.0)]
    found = calibration(runs, H100, SMALL, Layout(), "bf16")
    assert found is not None
    assert found.time == pytest.approx(1.18)
    assert found.memory == pytest.approx(1.1)
    assert str(found) == "x1.18 by 3 runs on this accelerator (0.9 to 1.3)"


def test_near_runs_count_alone() -> None:
    far = [took(3, layout=Layout(dp=2, zero=1)), took(3, layout=Layout(compile=True)), took(3, model=of(8))]
    only = calibration(far, H100, SMALL, Layout(), "bf16")
    assert only is not None
    assert (only.time, only.runs) == (pytest.approx(3), 3)
    near = calibration([*far, took(1.1, model=of(2))], H100, SMALL, Layout(), "bf16")
    assert near is not None
    assert (near.time, near.runs) == (pytest.approx(1.1), 1)


def test_the_nearer_of_the_far_ones_weighs_more() -> None:
    """1 / (1 + 1 kind) against 1 / (1 + 3 kinds) twice, which is as much: between the two."""
    other = Layout(dp=2, zero=3, compile=True)
    tie = [took(1, layout=Layout(compile=True)), took(2, layout=other), took(2, layout=other)]
    found = calibration(tie, H100, SMALL, Layout(), "bf16")
    assert found is not None
    assert found.time == pytest.approx(1.5)
    nearer = calibration([*tie, took(1, layout=Layout(compile=True))], H100, SMALL, Layout(), "bf16")
    assert nearer is not None
    assert nearer.time == pytest.approx(1)


def test_a_planner_that_has_learnt_is_held_against_the_same_measurement() -> None:
    """What the record says was predicted is for people; where the accelerator is gone from the table, it counts."""
    wrong = took(1.5).model_copy(update={"predicted": Cost(step_seconds=1e9)})
    found = calibration([wrong], H100, SMALL, Layout(), "bf16")
    assert found is not None
    assert found.time == pytest.approx(1.5)
    unknown = record(accelerator="X9")
    found = calibration([unknown], "X9", SMALL, Layout(), "bf16")
    assert found is not None
    assert (found.time, found.memory) == (pytest.approx(1.5), pytest.approx(1.2))


def test_a_processor_is_calibrated_by_those_of_its_kind() -> None:
    theirs, mine = record(accelerator="cpu", device="an abacus"), record(accelerator="cpu", device=processor())
    assert calibration([theirs], "cpu", SMALL, Layout(), "bf16") is None
    assert calibration([theirs, mine], "cpu", SMALL, Layout(), "bf16") is not None


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=9))
def test_the_weighted_median_with_equal_weights_is_the_median(values: list[float]) -> None:
    assert weighted_median([(value, 1.0) for value in values]) == pytest.approx(median(values))


@given(st.lists(st.tuples(st.floats(0.01, 100), st.integers(1, 5)), min_size=1, max_size=9))
def test_a_weight_counts_as_so_many_values(values: list[tuple[float, int]]) -> None:
    many = [value for value, weight in values for _ in range(weight)]
    assert weighted_median([(value, float(weight)) for value, weight in values]) == pytest.approx(median(many))
