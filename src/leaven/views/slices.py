"""The landscape along each value through the best point, with where runs diverge."""

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from leaven.tuning.document import Coordinate, Dimension
from leaven.views import numbers, points
from leaven.views.figures import MUTED, PAPER, plotly
from leaven.views.html import Html, element
from leaven.views.searches import small_figure
from leaven.views.story import Study
from leaven.views.trial_marks import BAD, BEST

if TYPE_CHECKING:
    import plotly.graph_objects as go

MOST = 12  # panels
SEEN = 0.05  # chance of divergence below which a panel does not show it
BLAMED = 0.15  # chance of divergence from which a value may have been the reason


def scale(study: Study) -> tuple[float, float]:
    """Down to where and up to where panels show, in nats above the best: one for all, so that they compare.

    The best was run, and need not be the bottom of what all trials together say: downwards it is as far as any panel
    goes below the best, but no farther than upwards.
    """
    gains = [abs(coordinate.gain) for coordinate in study.coordinates if math.isfinite(coordinate.gain)]
    losses = [
        point.loss for coordinate in study.coordinates for point in coordinate.slice if math.isfinite(point.loss)
    ]
    wanted = max(2.5 * max(gains, default=0.0), 8 * (study.noise_floor or 0.0), 1e-3)
    height = min(wanted, max(losses, default=wanted)) or wanted
    return max(min([0.0, *losses]), -height), height


def panel(study: Study, coordinate: Coordinate, frame: tuple[float, float]) -> "go.Figure":
    """Loss above the best over one value, in nats, the value in factors of the start, in a ``frame`` of ``scale``.

    The line is what all trials together say, its band one standard deviation; grey is flat within the noise; the red
    hill is the chance of divergence, of the panel's whole height; crosses are trials that diverged, ticks those that
    ended.
    """
    go = plotly()
    chart = small_figure(yaxis2={"overlaying": "y", "range": [0, 1], "visible": False, "fixedrange": True})
    dimension = next(d for d in study.dimensions if d.path == coordinate.path)
    low, high = _limits(dimension, coordinate)
    depth, height = frame
    chart.add_vrect(
        x0=max(coordinate.flat[0], low),
        x1=min(coordinate.flat[1], high),
        fillcolor="var(--shade-band)",
        line_width=0,
        layer="below",
    )
    chart.add_vline(x=0, line={"color": MUTED, "width": 1, "dash": "dot"}, layer="below")
    inside = [point for point in coordinate.slice if math.isfinite(point.loss + point.deviation)]
    x = [round(point.octaves, 3) for point in inside]
    if any(point.risk > SEEN for point in inside):
        hill = {"fill": "tozeroy", "fillcolor": "var(--risk)", "line": {"width": 0}, "hoverinfo": "skip"}
        chart.add_trace(
            go.Scatter(x=x, y=[round(point.risk, 3) for point in inside], yaxis="y2", mode="lines", **hill)
        )
    above = [round(min(point.loss + point.deviation, 3 * height), 5) for point in inside]
    below = [round(min(point.loss - point.deviation, 3 * height), 5) for point in inside]
    band = {"mode": "lines", "line": {"width": 0}, "hoverinfo": "skip"}
    chart.add_trace(go.Scatter(x=x, y=above, **band))
    chart.add_trace(go.Scatter(x=x, y=below, fill="tonexty", fillcolor="var(--band)", **band))
    said = [
        f"<b>{points.change(dimension, point.octaves)}</b>"
        f"<br>{numbers.delta(point.loss)} ± {point.deviation:.4f} nats"
        + (f"<br>{point.risk:.0%} diverge" if point.risk > 0.005 else "")
        for point in inside
    ]
    chart.add_trace(
        go.Scatter(
            x=x, y=[round(min(max(point.loss, depth), 3 * height), 5) for point in inside], mode="lines",
            line={"color": BEST, "width": 2}, hovertext=said, hovertemplate="%{hovertext}<extra></extra>",
        )
    )  # fmt: skip
    room = height - depth
    _trials(chart, study, coordinate, depth - 0.15 * room, height)
    marker = {"color": BEST, "size": 9, "line": {"color": PAPER, "width": 1.5}}
    chart.add_trace(go.Scatter(x=[coordinate.best], y=[0.0], mode="markers", marker=marker, hoverinfo="skip"))
    every = next(step for step in (1, 2, 4, 8, 16) if (high - low) / step <= 3.5)
    places = [place for place in range(math.ceil(low), math.floor(high) + 1) if place % every == 0]
    chart.update_xaxes(
        range=[low, high],
        tickvals=places,
        ticktext=[points.change(dimension, place) for place in places],
        tickangle=0,
    )
    chart.update_layout(yaxis={"range": [depth - 0.18 * room, height + 0.08 * room], "nticks": 4})
    return chart


def _limits(whole: Dimension, coordinate: Coordinate) -> tuple[float, float]:
    places = [point.octaves for point in coordinate.slice]
    room = 0.02 * (max(places) - min(places)) + 0.02
    return max(whole.low, min(places)) - room, min(whole.high, max(places)) + room


def _trials(chart: "go.Figure", study: Study, coordinate: Coordinate, lower: float, upper: float) -> None:
    """Where trials have been along one value: ticks at the lower edge, and crosses at the upper for diverged ones.

    Crosses are faint where this value is not held to be the reason.
    """
    places, risk = [p.octaves for p in coordinate.slice], [p.risk for p in coordinate.slice]
    path = coordinate.path

    def draw(places: set[float], y: float, marker: dict[str, Any]) -> None:
        if places:  # a place that many trials share is one mark
            style = {"mode": "markers", "marker": marker, "hoverinfo": "skip", "cliponaxis": False}
            chart.add_trace(plotly().Scatter(x=sorted(places), y=[y] * len(places), **style))

    def where(state: str) -> set[float]:
        trials = [trial for trial in study.trials if trial.state == state and trial.purpose == "search"]
        return {round(trial.octaves[path], 2) for trial in trials if trial.octaves}

    draw(where("complete"), lower, {"symbol": "line-ns-open", "size": 7, "color": MUTED, "opacity": 0.5})
    lost = where("diverged")
    blamed = {at for at in lost if risk and np.interp(at, places, risk) > BLAMED}
    cross = {"symbol": "x-thin", "size": 7, "line": {"color": BAD, "width": 1.6}}
    draw(lost - blamed, upper, cross | {"opacity": 0.3})
    draw(blamed, upper, cross)


def strip(coordinate: Coordinate, dimension: Dimension) -> Html:
    """A line of text high: what was searched, what is flat, where most runs diverge, start and best."""
    low, high = dimension.box
    places = [coordinate.best, *coordinate.flat, *(point.octaves for point in coordinate.slice)]
    low, high = max(min(low, *places), dimension.low), min(max(high, *places), dimension.high)
    span = high - low

    def at(octaves: float) -> str:
        return f"{100 * (min(max(octaves, low), high) - low) / span:.4g}%"

    def width(first: float, last: float) -> str:
        return f"{100 * max(min(last, high) - max(first, low), 0.0) / span:.4g}%"

    lost = [point.octaves for point in coordinate.slice if point.risk > 0.5]
    sides = [[o for o in lost if o < coordinate.best], [o for o in lost if o > coordinate.best]]
    best, first, last, lowest, highest = (
        points.change(dimension, to) for to in (coordinate.best, *coordinate.flat, low, high)
    )
    told = f"best {best}, against the start; flat from {first} to {last}; shown from {lowest} to {highest}"
    return element(
        "div",
        [
            element("i", class_="lost", style=f"left:{at(min(side))};width:{width(min(side), max(side))}")
            for side in sides
            if side
        ],
        element("i", class_="flat", style=f"left:{at(coordinate.flat[0])};width:{width(*coordinate.flat)}"),
        element("i", class_="from", style=f"left:{at(0.0)}"),
        element("i", class_="best", style=f"left:{at(coordinate.best)}"),
        class_="strip",
        title=told,
        role="img",
        aria_label=told,
    )
