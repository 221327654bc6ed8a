"""Test the page of a plan: its charts and its text have the numbers of the plan."""

import plotly.graph_objects as go
import pytest
from planned import WAYS, planned

from leaven.planning.layouts import USABLE
from leaven.views import plan_charts
from leaven.views.plan_page import plan_page


@pytest.mark.parametrize("way", WAYS)
def test_the_page_and_its_memory_bars_have_the_numbers_of_the_plan(way):
    found = planned(way)
    document = found.document()
    page = plan_page(found, document, "rye-7b", "leaven plan rye.toml")
    for number in (f"{document.memory.gib:.1f} GiB", f"{document.speed.mfu:.1%}", str(found.chosen.arrangement)):
        assert number in page
    capacity = document.memory.capacity_gib
    chart = go.Figure(plan_charts.memory([stage.parts for stage in document.stages], capacity, USABLE * capacity))
    for rank, stage in enumerate(document.stages):
        assert sum(bar.x[rank] for bar in chart.data) == pytest.approx(stage.gib, abs=0.2)
    assert sorted(shape.x0 for shape in chart.layout.shapes) == [pytest.approx(USABLE * capacity), capacity]
