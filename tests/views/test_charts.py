"""Test the parts of charts: smoothed curves, ticks, and numbers as text."""

import math

import numpy as np
import pytest

from leaven.views import numbers
from leaven.views.charts import smooth


def test_smoothing_keeps_a_straight_line():
    x = np.sort(np.random.default_rng(0).uniform(0, 10, 300))
    assert smooth(x, 3 - 2 * x) == pytest.approx(3 - 2 * x, abs=1e-8)


def test_smoothing_removes_noise():
    rng = np.random.default_rng(1)
    x = np.log(np.arange(1, 2001))
    truth = 2 + 4 * np.exp(-x / 2)
    error = smooth(x, truth + rng.normal(0, 0.05, len(x))) - truth
    assert np.abs(error[200:]).max() < 0.03


@pytest.mark.parametrize(("low", "high"), [(1e-4, 3e-2), (0.9, 1.1), (4_096, 2e9), (0.031, 0.042), (2, 2.02)])
def test_ticks_are_few_and_round(low, high):
    places, labels = numbers.log_ticks(low, high, numbers.value)
    assert 2 <= len(places) <= 7
    assert all(low * 0.999 <= place <= high * 1.001 for place in places)
    assert len(set(labels)) == len(labels)


@pytest.mark.parametrize(
    ("number", "written"),
    [(0.004, "0.004"), (2.83e-4, "2.83e-4"), (1e-8, "1e-8"), (0.9, "0.9"), (0.99365, "0.9937"), (0, "0"), (1.0, "1"),
     (2048.0, "2048"), (30_000, "3e4")],
)  # fmt: skip
def test_values_are_written_as_in_a_recipe(number, written):
    assert numbers.value(number) == written
    assert math.isclose(float(written), number, rel_tol=1e-3)


def test_a_number_that_rounds_to_0_has_no_sign():
    signed = [numbers.fixed(x, 3, "+") for x in (-5.33e-15, 0.0004, -0.0006, 0.002)]
    assert signed == ["0.000", "0.000", "-0.001", "+0.002"]
    assert [numbers.fixed(x, 2) for x in (-0.004, -0.014, 1.0)] == ["0.00", "-0.01", "1.00"]
