"""One value of the published runs against size: a point a run, the middle half of the lineages, numbered lines."""

import math
import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby
from statistics import median, quantiles
from typing import Any

from leaven.catalogue.run import PublishedRun
from leaven.views import figures, numbers
from leaven.views.catalogue_quantities import Line, Quantity
from leaven.views.figures import MUTED, PAPER

HUES = 9  # of the style sheet; the lineages with the most runs get one each
OTHERS = "others"
BAND_FACTOR = 2.5  # the band at a size is made of the runs within this factor of it
_GRID = 48


def hues_of(runs: Sequence[PublishedRun]) -> dict[str, str]:
    """The lineages that have a colour of their own, those with the most runs first."""
    count = Counter(run.lineage.name for run in runs)
    largest = [name for name, _ in count.most_common(HUES) if count[name] > 1]
    return {name: f"var(--hue-{n})" for n, name in enumerate(largest, start=1)}


def group_of(run: PublishedRun, hues: dict[str, str]) -> str:
    return run.lineage.name if run.lineage.name in hues else OTHERS


def symbol(run: PublishedRun) -> str:
    if run.schedule is not None and "muP" in (run.schedule.parametrisation or ""):
        shape = "diamond"
    elif run.optimizer in ("adam", "adamw", None):
        shape = "circle"
    else:
        shape = "square"
    return f"{shape}-open" if run.kind == "moe" else shape


def scatter(quantity: Quantity, runs: Sequence[PublishedRun], hues: dict[str, str]) -> tuple[Any, list[Line]]:
    """The chart and the lines on it, in the order of their numbers."""
    go = figures.plotly()
    points = [(run, value) for run in runs if (value := quantity.of_run(run))]
    sizes, values = [run.params_total for run, _ in points], [value for _, value in points]
    low, high = min(values) / 1.25, max(values) * 1.25
    chart = figures.figure("parameters", quantity.unit, margin={"l": 52, "r": 26, "t": 26, "b": 44})
    figures.log_axis(chart, "xaxis", min(sizes) / 1.2, max(sizes) * 1.2, numbers.tick)
    figures.log_axis(chart, "yaxis", low, high, numbers.tick if low > 1 else numbers.value, most=8)
    chart.update_layout(yaxis={"automargin": False, "showgrid": True})
    edge = band([(run, value) for run, value in points if run.lr_comparable])
    if edge:
        around = [(x, y) for x, y, _ in edge] + [(x, y) for x, _, y in reversed(edge)]
        chart.add_trace(
            go.Scatter(
                x=[_short(x) for x, _ in around], y=[_short(y) for _, y in around], fill="toself", mode="lines",
                line={"width": 0}, fillcolor="var(--shade-band)", hoverinfo="skip", legendgroup="band",
            )
        )  # fmt: skip
    grid = [min(sizes) * (max(sizes) / min(sizes)) ** (n / (_GRID - 1)) for n in range(_GRID)]
    drawn = [line for line in quantity.lines(grid) if any(low <= y <= high for _, y, _ in line.points)]
    ends = []
    for line in drawn:
        inside = [point for point in line.points if low <= point[1] <= high]
        ends.append(inside[-1][:2])
        for fitted, stretch in _stretches(inside):
            chart.add_trace(
                go.Scatter(
                    x=[_short(x) for x, _ in stretch], y=[_short(y) for _, y in stretch], mode="lines",
                    line={"color": MUTED, "width": 1, "dash": "solid" if fitted else "dot"}, name=line.name,
                    hovertemplate=f"{figures.text(line.name)}{'' if fitted else ', beyond its fit'}<br>%{{y:.3~g}}"
                    "<extra></extra>", legendgroup="laws",
                )
            )  # fmt: skip
    for n, (x, y) in enumerate(_apart(ends, math.log10(high / low)), start=1):
        chart.add_annotation(
            x=math.log10(x), y=math.log10(y), text=str(n), showarrow=False, xanchor="left", xshift=3,
            font={"size": 11, "color": MUTED},
        )  # fmt: skip
    for name in (OTHERS, *hues):
        chart.add_trace(_dots(quantity, [point for point in points if group_of(point[0], hues) == name], name, hues))
    return chart, drawn


def _dots(quantity: Quantity, points: Sequence[tuple[PublishedRun, float]], name: str, hues: dict[str, str]) -> Any:
    colour = hues.get(name, MUTED)
    return figures.plotly().Scatter(
        x=[run.params_total for run, _ in points],
        y=[value for _, value in points],
        mode="markers",
        legendgroup=name,
        marker={
            "color": colour,
            "size": 9,
            "opacity": 0.85,
            "symbol": [symbol(run) for run, _ in points],
            "line": {"color": [colour if run.kind == "moe" else PAPER for run, _ in points], "width": 1},
        },
        customdata=[hover(quantity, run, value) for run, value in points],
        hovertemplate="%{customdata}<extra></extra>",
    )


def hover(quantity: Quantity, run: PublishedRun, value: float) -> str:
    """Id, value, lineage and source of a point."""
    group = quantity.group(run)
    known = group.provenance(quantity.field) if group else None
    said = [
        f"{quantity.spell(value)}, {numbers.quantity(run.params_total)} parameters",
        f"lineage {run.lineage.name}",
    ]
    if run.kind == "moe":
        said.append(f"experts, {numbers.quantity(run.params_active)} active")
    special = run.schedule.parametrisation if run.schedule else None
    said += [f"with {run.optimizer}"] if "square" in symbol(run) else []
    said += [special] if special else []
    if known:
        said += [f"{source} ({known.confidence})" for source in known.sources]
    lines = [line for part in said for line in textwrap.wrap(part, 46, break_on_hyphens=False)]
    return "<br>".join([f"<b>{figures.text(run.id)}</b>", *map(figures.text, lines)])


def band(points: Iterable[tuple[PublishedRun, float]]) -> list[tuple[float, float, float]]:
    """(size, lower quartile, upper quartile) over the sizes at which at least four lineages have a vote."""
    points = sorted(points, key=lambda point: point[0].params_total)
    if not points:
        return []
    first, last = points[0][0].params_total, points[-1][0].params_total
    edge = []
    for n in range(_GRID):
        size = first * (last / first) ** (n / (_GRID - 1))
        votes: dict[str, list[float]] = {}
        for run, value in points:
            if 1 / BAND_FACTOR <= run.params_total / size <= BAND_FACTOR:
                votes.setdefault(run.lineage.name, []).append(math.log(value))
        if len(votes) >= 4:
            lower, _, upper = quantiles(map(median, votes.values()), n=4, method="inclusive")
            edge.append((size, math.exp(lower), math.exp(upper)))
    return edge


def _stretches(points: Sequence[tuple[float, float, bool]]) -> list[tuple[bool, list[tuple[float, float]]]]:
    """Runs of points inside and outside of the fit, each beginning where the one before ends."""
    made: list[tuple[bool, list[tuple[float, float]]]] = []
    for fitted, together in groupby(points, key=lambda point: point[2]):
        before = [made[-1][1][-1]] if made else []
        made.append((fitted, before + [(x, y) for x, y, _ in together]))
    return made


def _apart(ends: Sequence[tuple[float, float]], decades: float) -> list[tuple[float, float]]:
    """Places for the labels of lines, moved up where two would lie on one another."""
    least = 10 ** (0.045 * decades)
    placed: dict[int, tuple[float, float]] = {}
    for n in sorted(range(len(ends)), key=lambda n: ends[n][1]):
        x, y = ends[n]
        near = [other for at, other in placed.values() if abs(math.log10(at / x)) < 0.15]
        placed[n] = (x, max([y, *(other * least for other in near)]))
    return [placed[n] for n in range(len(ends))]


def _short(value: float) -> float:
    return float(f"{value:.5g}")
