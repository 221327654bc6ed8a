"""Render the page of the published runs: peak lr, batch size, tokens and init std against model size.

Colours show the largest lineages: groups of runs that copied one another's learning rate.
"""

import math
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median, quantiles

import numpy as np
from markupsafe import Markup, escape

from leaven.catalogue.laws import evaluate
from leaven.catalogue.runs import PublishedRun
from leaven.catalogue.terms import read
from leaven.views import charts, numbers
from leaven.views.charts import MUTED, Figure
from leaven.views.render import render

TOKENS_PER_PARAMETER = 20.0  # lines of scaling laws are drawn for runs with this ratio
ASPECT = 80.0  # d_model / n_layers of the models for which lines of init std are drawn
HUES = 9  # number of lineages with their own colour: the lineages with the most runs
OTHERS = "others"
BAND_FACTOR = 2.5  # the band at a size is computed from runs at most this many times larger or smaller
_GRID = 48  # number of sizes at which lines and the band are computed

LinePoint = tuple[float, float, bool]  # size, value, whether the size is inside the fitted range


@dataclass(frozen=True)
class CatalogueChart:
    key: str
    title: str
    note: str  # text below the title
    unit: str  # title of the y axis
    hover: str  # pattern of the value in a point's tooltip
    path: str  # path of the value in a run, such as ``schedule.peak_lr``
    lines: Callable[[Sequence[float]], dict[str, list[LinePoint]]]  # takes sizes, returns each line's points


def _laws(sizes: Sequence[float], predicted: str) -> dict[str, list[LinePoint]]:
    found: dict[str, list[LinePoint]] = {}
    for size in sizes:
        for result in evaluate(size, TOKENS_PER_PARAMETER * size):
            value = getattr(result, predicted)
            if value and result.form_of is None:
                found.setdefault(result.law, []).append((size, value, result.in_range is True))
    return found


def _inits(sizes: Sequence[float]) -> dict[str, list[LinePoint]]:
    """Return a line for each init rule, for models of 12 n_layers d_model^2 parameters and the shape `ASPECT`."""
    rules: dict[str, Callable[[float], float]] = {
        "fan-in, 1 / sqrt(d)": lambda d: d**-0.5,
        "small-init, sqrt(2 / (5 d))": lambda d: math.sqrt(2 / (5 * d)),
        "MT-NLG, sqrt(1 / (3 d))": lambda d: math.sqrt(1 / (3 * d)),
        "GPT-2, 0.02": lambda d: 0.02,
    }
    return {
        name: [(size, std((size * ASPECT / 12) ** (1 / 3)), True) for size in sizes] for name, std in rules.items()
    }


_AT_20 = f"at {TOKENS_PER_PARAMETER:g} tokens per parameter; dotted outside their fitted range"
CHARTS = (
    CatalogueChart(
        key="lr", title="Peak learning rate", note=f"Thin lines: laws {_AT_20}.", unit="peak lr",
        hover="peak lr {}", path="schedule.peak_lr", lines=partial(_laws, predicted="lr"),
    ),
    CatalogueChart(
        key="batch", title="Batch", note="The batch size at the end of the run. Thin lines: optimal and critical "
        f"batch sizes by laws {_AT_20}.",
        unit="tokens per step", hover="batch {} tokens", path="batch.global_batch_tokens",
        lines=partial(_laws, predicted="batch_tokens"),
    ),
    CatalogueChart(
        key="tokens", title="Duration", note="Tokens of the whole run. Thin line: the compute-optimal number by "
        "Chinchilla.",
        unit="tokens", hover="{} tokens", path="data.tokens_total",
        lines=lambda sizes: {"Chinchilla, 20 tokens per parameter": [(size, 20 * size, True) for size in sizes]},
    ),
    CatalogueChart(
        key="init", title="Init std", note="The std of matrices that read the residual stream. Thin lines: rules "
        f"that depend on the width, at d_model = {ASPECT:g} n_layers.",
        unit="standard deviation", hover="init std {}", path="init.std", lines=_inits,
    ),
)  # fmt: skip


def catalogue_page(runs: Sequence[PublishedRun]) -> str:
    """Return the page of the published runs as HTML."""
    hues = hues_of(runs)
    drawn = {chart.key: scatter(chart, runs, hues) for chart in CHARTS}
    lineages = Counter(run.lineage.name for run in runs)
    members = Counter(group_of(run, hues) for run in runs)
    names = {name: name for name in hues} | {OTHERS: f"{len(lineages.keys() - hues.keys())} more lineages"}
    return render(
        "catalogue.html.j2",
        {key: figure for key, (figure, _) in drawn.items()},
        kind="catalogue",
        title="Published runs",
        runs=runs,
        sizes=[run.params_total for run in runs],
        lineages=lineages,
        legend=[(names[n], hues.get(n, MUTED), n, str(members[n])) for n in names if members[n]],
        quantities=CHARTS,
        lines={key: lines for key, (_, lines) in drawn.items()},
        band_factor=BAND_FACTOR,
        linked=linked,
    )


def hues_of(runs: Sequence[PublishedRun]) -> dict[str, str]:
    """Return the colour of each of the `HUES` largest lineages, by name. A lineage of one run has no colour."""
    count = Counter(run.lineage.name for run in runs)
    largest = [name for name, _ in count.most_common(HUES) if count[name] > 1]
    return {name: charts.hue(n) for n, name in enumerate(largest)}


def group_of(run: PublishedRun, hues: dict[str, str]) -> str:
    return run.lineage.name if run.lineage.name in hues else OTHERS


def symbol(run: PublishedRun) -> str:
    """Return plotly's symbol: diamond for muP, circle for Adam(W) or unknown, square otherwise; open for MoE."""
    if run.schedule is not None and "muP" in (run.schedule.parametrisation or ""):
        shape = "diamond"
    elif run.optimizer in ("adam", "adamw", None):
        shape = "circle"
    else:
        shape = "square"
    return f"{shape}-open" if run.kind == "moe" else shape


def scatter(quantity: CatalogueChart, runs: Sequence[PublishedRun], hues: dict[str, str]) -> tuple[Figure, list[str]]:
    """Return a scatter plot of published runs over the parameters that a token uses, and the laws that it shows."""
    points = [(run, value) for run in runs if (value := read(run, quantity.path))]
    sizes, values = [run.params_active for run, _ in points], [value for _, value in points]
    low, high = min(values) / 1.25, max(values) * 1.25
    edge = band([(run, value) for run, value in points if run.lr_comparable])
    outline = [(x, lower) for x, lower, _ in edge] + [(x, upper) for x, _, upper in reversed(edge)]
    traces = [charts.line(outline, MUTED, 0, fill="toself", fillcolor="var(--shade-band)")]
    names = []
    for name, line in quantity.lines(np.geomspace(min(sizes), max(sizes), _GRID).tolist()).items():
        inside = [point for point in line if low <= point[1] <= high]
        if not inside:
            continue
        names.append(name)
        hover = f"{charts.text(name)}<br>%{{y:.3~g}}<extra></extra>"
        for dash in ("dot", "solid"):  # the solid line covers the dotted line inside the fitted range
            drawn = [(x, y) for x, y, fitted in inside if fitted or dash == "dot"]
            traces.append(charts.line(drawn, MUTED, 1, dash=dash, name=name, hovertemplate=hover))
    for name in (OTHERS, *hues):
        members = [(run, value) for run, value in points if group_of(run, hues) == name]
        colour = hues.get(name, MUTED)
        marker = {"opacity": 0.85, "symbol": [symbol(run) for run, _ in members]}
        places = [(run.params_active, value) for run, value in members]
        hovers = [hover_text(quantity, run, value) for run, value in members]
        traces.append(charts.dots(places, colour, 9, legendgroup=name, marker=marker, hovertext=hovers))
    figure = charts.figure(
        "parameters that a token uses",
        quantity.unit,
        traces,
        x=charts.log_axis(min(sizes) / 1.2, max(sizes) * 1.2, numbers.tick),
        y=charts.log_axis(low, high, numbers.tick if low > 1 else numbers.value, most=8, automargin=False),
        margin={"l": 52, "r": 26, "t": 26, "b": 44},
    )
    return figure, names


def hover_text(quantity: CatalogueChart, run: PublishedRun, value: float) -> str:
    shown, size = numbers.quantity(value) if value >= 1 else numbers.value(value), numbers.quantity(run.params_active)
    lines = [f"{quantity.hover.format(shown)}, {size} parameters", f"lineage {run.lineage.name}"]
    if run.kind == "moe":
        lines.append(f"experts, {numbers.quantity(run.params_total)} in total")
    if "square" in symbol(run):
        lines.append(f"with {run.optimizer}")
    if run.schedule and run.schedule.parametrisation:
        lines.append(run.schedule.parametrisation)
    group, field = quantity.path.split(".")
    if values := getattr(run, group):
        known = values.provenance(field)
        lines += [f"{source} ({known.confidence})" for source in known.sources]
    wrapped = [line for part in lines for line in textwrap.wrap(part, 46, break_on_hyphens=False)]
    return "<br>".join([f"<b>{charts.text(run.id)}</b>", *map(charts.text, wrapped)])


def band(points: Sequence[tuple[PublishedRun, float]]) -> list[tuple[float, float, float]]:
    """Return the quartiles of values at a grid of model sizes: (size, lower quartile, upper quartile).

    At each size, a lineage has one value: the median over its runs within a factor of `BAND_FACTOR` of the size.
    Sizes with fewer than four lineages are left out.
    """
    sizes = [run.params_active for run, _ in points]
    edge = []
    for size in np.geomspace(min(sizes), max(sizes), _GRID).tolist() if sizes else ():
        votes: dict[str, list[float]] = {}
        for run, value in points:
            if 1 / BAND_FACTOR <= run.params_active / size <= BAND_FACTOR:
                votes.setdefault(run.lineage.name, []).append(math.log(value))
        if len(votes) >= 4:
            lower, _, upper = quantiles(map(median, votes.values()), n=4, method="inclusive")
            edge.append((size, math.exp(lower), math.exp(upper)))
    return edge


def linked(source: str) -> Markup:
    """Return a source as HTML, with links to arXiv papers and GitHub repositories."""
    text = str(escape(source))
    text = re.sub(r"arXiv (\d{4}\.\d{4,5})", r'<a href="https://arxiv.org/abs/\1" rel="noreferrer">\g<0></a>', text)
    text = re.sub(r"^([\w.-]+/[\w.-]+): ", r'<a href="https://github.com/\1" rel="noreferrer">\1</a>: ', text)
    return Markup(text)
