"""The page of a plan: its pictures hold the plan's own numbers, and its tables say them without a script."""

import re
from html import unescape

import plotly.graph_objects as go
import pytest
from planned import WAYS, planned

from leaven.documents.planning import Price
from leaven.planning.arrangement import bubble
from leaven.planning.layouts import USABLE
from leaven.planning.memory import GIB
from leaven.planning.schedule import simulate
from leaven.recipe.layout import Layout
from leaven.views import plan_charts
from leaven.views.numbers import costs
from leaven.views.plan_page import page

PRICE = Price(amount=2.5, currency="$")


def words(html: str) -> str:
    return unescape(re.sub(r"<[^>]+>", " ", html.partition("<body>")[2].partition("<noscript>")[0]))


@pytest.mark.parametrize("way", WAYS)
def test_a_page_says_the_numbers_of_its_plan_without_the_charts(way):
    found = planned(way)
    said = " ".join(words(page(found, found.document(price=PRICE), "rye-7b", "leaven plan rye.toml")).split())
    for part in (
        "It fits" if found.fits else "It does not fit",
        f"{found.memory.total / GIB:.1f} GiB",
        f"{found.speed.mfu:.1%}",
        *costs(found.cost(PRICE)),
        str(found.arrangement),
        *(f"{choice.steps:,}" for choice in found.ramp.choices),
        "dense bf16 peak",
    ):
        assert part in said


@pytest.mark.parametrize("way", ["alone", "1f1b"])
def test_bars_of_memory_add_up_to_what_a_rank_needs_and_lie_under_what_a_gpu_has(way):
    found = planned(way)
    chart = go.Figure(plan_charts.memory([memory.parts_gib for memory in found.stages], 80, USABLE * 80))
    along = "y" if len(found.stages) > 1 else "x"
    for rank, memory in enumerate(found.stages):
        assert sum(bar[along][rank] for bar in chart.data) == pytest.approx(memory.total / GIB, abs=0.2)
    assert max(bar.marker.color for bar in chart.data)
    assert sorted(shape[f"{along}0"] for shape in chart.layout.shapes) == [68, 80]
    assert "80 GiB: all of it" in [note.text for note in chart.layout.annotations]


def test_every_pass_of_a_short_step_is_a_box_where_it_is_done():
    layout = Layout(pp=4, schedule="interleaved", stages_per_rank=2)
    step = simulate(layout, 4, [1.0] * 8, [2.0] * 8)
    chart = go.Figure(plan_charts.passes(step, 2))
    boxes = {
        (kind.legendgroup, row, start, width)
        for kind in chart.data
        for row, start, width in zip(kind.y, kind.base, kind.x, strict=True)
    }
    assert boxes == {
        (each.kind, rank, each.start, each.end - each.start)
        for rank, passes in enumerate(step.ranks)
        for each in passes
    }
    assert {text for kind in chart.data for text in kind.text or ()} <= set("0123")
    assert len({opacity for kind in chart.data for opacity in kind.marker.opacity}) == 2


def test_of_a_long_step_both_ends_are_drawn_and_times_stay_true():
    p, m = 32, 512
    step = simulate(Layout(pp=p), m, [1.0] * p, [2.0] * p)
    assert step.bubble == pytest.approx(bubble(m, p))  # what is computed has no cap
    drawn = plan_charts.window(step)
    assert drawn.ranks[0] == 0
    assert drawn.ranks[-1] == p - 1
    assert len(set(drawn.ranks)) == plan_charts.RANKS
    chart = go.Figure(plan_charts.passes(step))
    assert sum(len(kind.x) for kind in chart.data) <= plan_charts.PASSES
    ends = [start + width for kind in chart.data for start, width in zip(kind.base, kind.x, strict=True)]
    assert max(ends) == pytest.approx(drawn.width, rel=1e-5)
    numbers = {int(told.split()[1].strip(",")) for kind in chart.data for told in kind.hovertext}
    assert {0, m - 1} <= numbers
    assert m // 2 not in numbers
    for place, label in zip(chart.layout.xaxis.tickvals, chart.layout.xaxis.ticktext, strict=True):
        assert drawn.place(float(label)) == pytest.approx(place, rel=1e-4)
    assert not any(drawn.head + 1e-9 < x < drawn.head + drawn.gap - 1e-9 for x in chart.layout.xaxis.tickvals)


def test_layouts_are_dots_with_their_words_and_none_lies_below_the_line():
    found = planned("1f1b")
    chart, drawn = plan_charts.layouts(found.candidates, found.pareto, found.chosen, 80, 68)
    line, *dots, ring = go.Figure(chart).data
    told = [said for trace in dots for said in trace.hovertext]
    assert len(told) == drawn == sum(len(trace.x) for trace in dots)
    assert any(str(found.candidates[0].arrangement).split(" · ")[4] in said for said in told)
    assert ring.x[0] == pytest.approx(found.time.step, rel=1e-5)
    front = list(zip(line.x, line.y, strict=True))
    trained = [(c.time.step, c.memory.total / GIB) for c in found.candidates if c.trained]
    assert front == sorted(front)
    for x, y in front:
        assert not any(a < x * 0.9999 and b < y * 0.9999 for a, b in trained)


def test_the_ramp_is_drawn_with_its_start():
    found = planned("1f1b")
    chart = go.Figure(plan_charts.ramp(found.ramp))
    (curve,) = chart.data
    assert list(curve.x) == [point.batch_tokens for point in found.ramp.points]
    assert curve.y[-1] == pytest.approx(found.speed.tflops_per_gpu, rel=1e-4)
    assert chart.layout.shapes[0].x0 == found.ramp.start.batch_tokens
    hollow = [symbol == "circle-open" for symbol in curve.marker.symbol]
    assert hollow == [point.grad_accumulation < 8 for point in found.ramp.points]
    assert any("start " in note.text for note in chart.layout.annotations)
