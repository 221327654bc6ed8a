"""The page of the published runs: every point with its source, laws where the laws are, one vote a lineage."""

import re

import plotly.graph_objects as go
import pytest

from leaven.catalogue.runs import find_run, load_runs
from leaven.catalogue.terms import read
from leaven.views.catalogue_page import CHARTS, CatalogueChart, band, hues_of, scatter

RUNS = load_runs()
BY_KEY = {quantity.key: quantity for quantity in CHARTS}


@pytest.mark.parametrize("quantity", CHARTS, ids=lambda quantity: quantity.key)
def test_every_known_value_is_a_point_with_its_source(quantity: CatalogueChart) -> None:
    chart, _ = scatter(quantity, RUNS, hues_of(RUNS))
    drawn = {
        re.match("<b>(.*?)</b>", hover)[1]: (x, y, hover)  # type: ignore[index]
        for trace in go.Figure(chart).data
        if trace.hovertext is not None
        for x, y, hover in zip(trace.x, trace.y, trace.hovertext, strict=True)
    }
    known = {run.id: (run.params_active, value) for run in RUNS if (value := read(run, quantity.path))}
    assert {id: point[:2] for id, point in drawn.items()} == {id: pytest.approx(point) for id, point in known.items()}
    for id, (_, _, said) in drawn.items():
        group, field = quantity.path.split(".")
        known = getattr(find_run(id), group).provenance(field)
        flowing = said.replace("<br>", " ").replace("&amp;", "&")
        for source in known.sources:
            assert re.sub(r"\s", "", source) in re.sub(r"\s", "", flowing)
        assert f"({known.confidence})" in flowing


def test_a_law_is_drawn_at_20_tokens_a_parameter_and_dotted_beyond_its_fit() -> None:
    chart, drawn = scatter(BY_KEY["lr"], RUNS, {})
    assert "Step Law 2025" in drawn
    found = {}
    for trace in go.Figure(chart).data:
        if trace.name == "Step Law 2025":
            for x, y in zip(trace.x, trace.y, strict=True):
                assert y == pytest.approx(1.79 * x**-0.713 * (20 * x) ** 0.307, rel=1e-3)
            found[trace.line.dash] = (min(trace.x), max(trace.x))
    lowest, highest = found["solid"]
    assert lowest >= 2e9 / 20 * 0.8  # its tokens begin at 2 B
    assert highest <= 1e9
    assert found["dot"][1] > 1e11


def test_a_lineage_has_one_vote_in_the_band() -> None:
    """Four lineages at the same size, one of them with ten runs."""
    four = {run.lineage.name: run for run in RUNS}
    names = ["llama", "smollm", "olmo2", "dclm"]
    same = [four[name].model_copy(update={"params_active": 10**9}) for name in names]
    values = [1e-4, 2e-4, 4e-4, 8e-4]
    points = [*zip(same, values, strict=True), *[(same[0], 1e-4)] * 9]
    low, high = band(points)[0][1:]
    # Quartiles of four votes, in the logarithm: a quarter of the way between the outer two, inwards.
    assert low == pytest.approx(1e-4 * 2**0.75)
    assert high == pytest.approx(8e-4 / 2**0.75)
    assert band(points[:3]) == []
    assert band([]) == []
