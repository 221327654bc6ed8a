"""The page of a plan: its pictures hold the plan's own numbers, and its tables say them without a script."""

import re
from html import unescape

import plotly.graph_objects as go
import pytest
from planned import WAYS, planned

from leaven.documents.planning import Price
from leaven.planning.layouts import USABLE
from leaven.views import plan_charts
from leaven.views.numbers import costs
from leaven.views.plan_page import plan_page

PRICE = Price(amount=2.5, currency="$")


def words(html: str) -> str:
    return unescape(re.sub(r"<[^>]+>", " ", html.partition("<body>")[2].partition("<noscript>")[0]))


@pytest.mark.parametrize("way", WAYS)
def test_the_text_of_the_page_has_the_plans_numbers(way):
    found = planned(way)
    document = found.document(price=PRICE)
    said = " ".join(words(plan_page(found, document, "rye-7b", "leaven plan rye.toml")).split())
    for part in (
        f"The run {'fits' if document.memory.fits else 'does not fit'} in memory",
        f"{document.memory.gib:.1f} GiB",
        f"{document.speed.mfu:.1%}",
        *costs(document.cost),
        str(found.chosen.arrangement),
        *(f"{choice.steps:,}" for choice in document.ramp.choices),
        "dense bf16 peak",
    ):
        assert part in said


@pytest.mark.parametrize("way", ["alone", "1f1b"])
def test_memory_bars_add_up_to_the_plan(way):
    found = planned(way)
    stages = found.document().stages
    chart = go.Figure(plan_charts.memory([stage.parts for stage in stages], 80, USABLE * 80))
    for rank, stage in enumerate(stages):
        assert sum(bar.x[rank] for bar in chart.data) == pytest.approx(stage.gib, abs=0.2)
    assert max(bar.marker.color for bar in chart.data)
    assert sorted(shape.x0 for shape in chart.layout.shapes) == [68, 80]
    assert "80 GiB: capacity" in [note.text for note in chart.layout.annotations]
