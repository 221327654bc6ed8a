import math

import numpy as np
import pytest
from studied import replace

from leaven.views import figures, numbers, searches
from leaven.views.curves import corners, smooth, thin
from leaven.views.folders import read_demo
from leaven.views.html import Html, element, script_json


@pytest.fixture(scope="module")
def demo(demo_folder):
    return read_demo(demo_folder)


@pytest.fixture(scope="module")
def runs(demo):
    return [arm.run for arm in demo.arms]


def test_smoothing_leaves_a_straight_line_alone_up_to_its_ends():
    x = np.sort(np.random.default_rng(0).uniform(0, 10, 300))
    assert smooth(x, 3 - 2 * x) == pytest.approx(3 - 2 * x, abs=1e-8)


def test_smoothing_finds_the_curve_under_the_noise():
    rng = np.random.default_rng(1)
    x = np.log(np.arange(1, 2001))
    truth = 2 + 4 * np.exp(-x / 2)
    error = smooth(x, truth + rng.normal(0, 0.05, len(x))) - truth
    assert np.abs(error[200:]).max() < 0.03


def test_thinning_keeps_first_and_last():
    kept = thin(list(range(1, 100_000)), 300)
    assert kept[0] == 0
    assert kept[-1] == 99_998
    assert len(kept) <= 300


def test_corners_are_enough_to_draw_steps():
    assert corners([4, 4, 4, 8, 8, 16]) == [0, 2, 3, 4, 5]


def test_loss_has_every_run_as_step_line_smooth_line_and_dots(runs):
    chart = figures.loss(runs)
    assert chart.layout.xaxis.type == "log"
    modes = [(trace.legendgroup, trace.mode) for trace in chart.data]
    assert sorted(modes) == sorted((run.key, mode) for run in runs for mode in ("lines", "lines", "markers"))
    dots = next(t for t in chart.data if t.mode == "markers" and t.legendgroup == "transferred")
    assert dots.y[-1] == runs[0].loss


def test_batch_is_drawn_as_the_recipe_has_it(runs):
    chart = figures.schedule(runs[:1])
    batch = next(trace for trace in chart.data if trace.yaxis == "y2")
    assert set(batch.y) == {size for _, size in runs[0].recipe.batches.sizes}


def test_the_search_has_its_diverged_trials_at_the_upper_edge(demo):
    chart = searches.search(demo.study)
    crosses = next(trace for trace in chart.data if trace.marker.symbol == "x-thin")
    assert list(crosses.x) == [4, 9]
    low, high = chart.layout.yaxis.range
    assert all(low + 0.9 * (high - low) < y <= high for y in crosses.y)
    band = chart.layout.shapes[0]
    assert (band.y0 + band.y1) / 2 == pytest.approx(demo.study.best.loss)
    assert (band.y1 - band.y0) / 2 == pytest.approx(demo.study.noise_floor)


def test_a_study_that_has_moved_nothing_yet_is_drawn_too(demo):
    trials = tuple(replace(trial, values={"hyperparameters.weight_decay": 0.1}) for trial in demo.study.trials)
    study = replace(demo.study, trials=trials, best=None, noise_floor=None)
    assert searches.search(study).data


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


def test_text_is_escaped_everywhere():
    assert element("p", "<b>", Html("<i></i>"), title='"x"') == '<p title="&quot;x&quot;">&lt;b&gt;<i></i></p>'
    assert "<" not in script_json({"a": "</script><!--"})
    assert figures.text("<b>%{x}</b>") == "&lt;b&gt;%&#123;x}&lt;/b&gt;"


def test_a_noise_scale_is_drawn_where_it_was_measured_beside_the_batch(runs):
    assert figures.noise_scale(runs) is None
    steps = tuple(
        step.model_copy(update={"noise_scale": 1000.0 + n if n % 3 == 0 else None})
        for n, step in enumerate(runs[0].steps)
    )
    chart = figures.noise_scale([replace(runs[0], steps=steps), runs[1]])
    scales, batches = chart.data
    assert list(scales.y) == [step.noise_scale for step in steps if step.noise_scale]
    assert set(batches.y) <= {step.batch_tokens for step in steps}
    assert (scales.legendgroup, batches.line.dash) == (runs[0].key, "dot")
    low, high = chart.layout.yaxis.range
    values = [*scales.y, *batches.y]
    assert low <= math.log10(min(values)) < math.log10(max(values)) <= high
