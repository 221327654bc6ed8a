"""What charts are made of: smoothing, thinning, ticks, numbers as they are written; the charts of runs."""

import math
from dataclasses import replace

import numpy as np
import plotly.graph_objects as go
import pytest

from leaven.views import charts, numbers
from leaven.views.charts import corners, smooth, thin
from leaven.views.folders import read_demo
from leaven.views.run_charts import run_charts


@pytest.fixture(scope="module")
def runs(demo_folder):
    return [arm.run for arm in read_demo(demo_folder).arms]


def test_smoothing_leaves_a_straight_line_alone_up_to_its_ends():
    x = np.sort(np.random.default_rng(0).uniform(0, 10, 300))
    assert smooth(x, 3 - 2 * x) == pytest.approx(3 - 2 * x, abs=1e-8)


def test_smoothing_finds_the_curve_under_the_noise():
    rng = np.random.default_rng(1)
    x = np.log(np.arange(1, 2001))
    truth = 2 + 4 * np.exp(-x / 2)
    error = smooth(x, truth + rng.normal(0, 0.05, len(x))) - truth
    assert np.abs(error[200:]).max() < 0.03


def test_thinning_keeps_first_and_last_and_corners_are_enough_to_draw_steps():
    kept = thin(list(range(1, 100_000)), 300)
    assert (kept[0], kept[-1]) == (0, 99_998)
    assert len(kept) <= 300
    assert corners([4, 4, 4, 8, 8, 16]) == [0, 2, 3, 4, 5]


@pytest.mark.parametrize(("low", "high"), [(1e-4, 3e-2), (0.9, 1.1), (4_096, 2e9), (0.031, 0.042), (2, 2.02)])
def test_ticks_are_few_round_and_inside(low, high):
    places, labels = numbers.log_ticks(low, high, numbers.value)
    assert 2 <= len(places) <= 7
    assert all(low * 0.999 <= place <= high * 1.001 for place in places)
    assert len(set(labels)) == len(labels)


@pytest.mark.parametrize(
    ("number", "written"),
    [(0.004, "0.004"), (2.83e-4, "2.83e-4"), (1e-8, "1e-8"), (0.9, "0.9"), (0.99365, "0.9937"), (0, "0"), (1.0, "1"),
     (2048.0, "2048"), (30_000, "3e4")],
)  # fmt: skip
def test_values_are_written_as_a_recipe_would(number, written):
    assert numbers.value(number) == written
    assert math.isclose(float(written), number, rel_tol=1e-3)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_written_as_python_reads_it(number):
    assert str(float(numbers.value(number))) == str(number)


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0, "0 s"), (3.21e-3, "3.21 ms"), (0.0999999, "100 ms"), (0.9999, "1.00 s"), (1234.5, "1,230 s")],
)  # fmt: skip
def test_durations_have_three_digits(seconds, said):
    assert numbers.duration(seconds) == said


def test_text_in_a_chart_is_neither_mark_up_nor_a_value():
    assert charts.text("<b>%{x}</b>") == "&lt;b&gt;%&#123;x}&lt;/b&gt;"


def test_a_run_is_drawn_with_its_last_loss_and_its_batches(runs):
    drawn = {name: go.Figure(figure) for name, figure in run_charts(runs).items() if figure}
    dots = next(t for t in drawn["loss"].data if t.mode == "markers" and t.legendgroup == "transferred")
    assert dots.y[-1] == pytest.approx(runs[0].loss, rel=1e-5)
    batch = next(t for t in drawn["batch"].data if t.legendgroup == "transferred")
    assert set(batch.y) == {size for _, size in runs[0].recipe.batches.sizes}


def test_a_noise_scale_is_drawn_where_it_was_measured_beside_the_batch(runs):
    assert run_charts(runs)["noise"] is None
    steps = tuple(
        step.model_copy(update={"noise_scale": 1000.0 + n if n % 3 == 0 else None})
        for n, step in enumerate(runs[0].steps)
    )
    chart = go.Figure(run_charts([replace(runs[0], steps=steps), runs[1]])["noise"])
    scales, batches = chart.data
    assert list(scales.y) == [step.noise_scale for step in steps if step.noise_scale]
    assert set(batches.y) <= {step.batch_tokens for step in steps}
    assert (scales.legendgroup, batches.line.dash) == (runs[0].key, "dot")
    low, high = chart.layout.yaxis.range
    values = [*scales.y, *batches.y]
    assert low <= math.log10(min(values)) < math.log10(max(values)) <= high
