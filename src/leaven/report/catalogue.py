"""The page of the published runs: lr, batch, tokens and init std against size, each point with its source."""

import math
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from leaven.catalogue.groups import Group
from leaven.catalogue.laws import evaluate
from leaven.catalogue.runs import Run, load_runs
from leaven.recipe.files import write_text
from leaven.report import chapters, figures, numbers
from leaven.report.figures import MUTED, PAPER
from leaven.report.html import Html, element, join
from leaven.report.shell import document
from leaven.report.tables import scroll

TOKENS_PER_PARAMETER = 20.0  # where the laws are drawn
ASPECT = 80.0  # d_model / n_layers where the rules for the init, functions of the width, are drawn
HUES = 9  # of the style sheet; the lineages with the most runs get one each
OTHERS = "others"
BAND_FACTOR = 2.5  # the band at a size is made of the runs within this factor of it
_GRID = 48


@dataclass(frozen=True)
class Line:
    """A law: x and y where it is drawn solid, and where it is stretched beyond its fit."""

    name: str
    points: Sequence[tuple[float, float, bool]]  # size, value, inside the fitted range


@dataclass(frozen=True)
class Quantity:
    """What one chart shows of a run, where its file says it, and the lines that are drawn with it."""

    key: str
    title: str
    told: str
    unit: str
    of_run: Callable[[Run], float | None]
    group: Callable[[Run], Group | None]
    field: str
    spell: Callable[[float | None], str]
    lines: Callable[[Sequence[float]], list[Line]]


def write_catalogue(out: Path) -> Path:
    """The page, as one HTML file.

    Raises:
        InputError: if plotly is missing, or the file cannot be written.
    """
    figures.plotly()
    write_text(out, page(load_runs()))
    return out


def page(runs: Sequence[Run]) -> str:
    hues, made = _hues(runs), chapters.Sheet()
    lineages = Counter(run.lineage.name for run in runs)
    (most, copies), *_ = lineages.most_common(1)
    smallest, largest = (numbers.quantity(end(run.params_total for run in runs)) for end in (min, max))
    verdict = (
        f"{len(runs)} published runs of {smallest} to {largest} parameters, in {len(lineages)} lineages: {copies} of "
        f"them took their learning rate over from {most}, and are one opinion."
    )
    kicker = element("p", "leaven · catalogue", class_="kicker")
    head = element("header", kicker, element("h1", "Published runs"), element("p", verdict, class_="verdict"))
    key = (
        "A colour is a lineage: whose learning rate a run took over; press one to hide it. A circle is a run with "
        "Adam(W), a diamond one under muP, a square one with another optimizer: their learning rates mean something "
        "else. Hollow: experts, at their total size. The band holds the middle half of the lineages, each with one "
        f"vote, at sizes within a factor of {BAND_FACTOR:g}, among the circles. Hover or tap a point for its source."
    )
    made.sections.append(element("section", element("p", key, class_="told"), _legend(runs, hues)))
    charts = [_chart(made, quantity, runs, hues) for quantity in QUANTITIES]
    for pair in (charts[:2], charts[2:]):
        made.sections.append(element("section", *pair, class_="pair even"))
    told = (
        "Every value is in leaven recipes show ID with its own source; here is that of the learning rate. How it is "
        "known: file (read there), secondary (in notes on it), paper-memory (from memory)."
    )
    made.section("All runs", told, _table(runs), class_="broad")
    return document("Published runs · leaven", element("main", head, *made.sections), made.charts)


def _hues(runs: Sequence[Run]) -> dict[str, str]:
    """The lineages that have a colour of their own, those with the most runs first."""
    count = Counter(run.lineage.name for run in runs)
    largest = [name for name, _ in count.most_common(HUES) if count[name] > 1]
    return {name: f"var(--hue-{n})" for n, name in enumerate(largest, start=1)}


def _group(run: Run, hues: dict[str, str]) -> str:
    return run.lineage.name if run.lineage.name in hues else OTHERS


def _legend(runs: Sequence[Run], hues: dict[str, str]) -> Html:
    count = Counter(_group(run, hues) for run in runs)
    rest = len({run.lineage.name for run in runs} - set(hues))
    return element(
        "div",
        *(
            element(
                "button",
                element("i", class_="swatch", style=f"background:{hues.get(name, MUTED)}"),
                f"{rest} more lineages" if name == OTHERS else name,
                element("b", str(count[name])),
                type="button",
                data_group=name,
                aria_pressed="true",
            )
            for name in (*hues, OTHERS)
            if count[name]
        ),
        class_="legend",
    )


def symbol(run: Run) -> str:
    if run.schedule is not None and "muP" in (run.schedule.parametrisation or ""):
        shape = "diamond"
    elif run.optimizer in ("adam", "adamw", None):
        shape = "circle"
    else:
        shape = "square"
    return f"{shape}-open" if run.kind == "moe" else shape


def _chart(made: chapters.Sheet, quantity: Quantity, runs: Sequence[Run], hues: dict[str, str]) -> Html:
    figure, drawn = scatter(quantity, runs, hues)
    names = [
        element("span", element("b", n), f" {line.name}{',' if n < len(drawn) else ''}")
        for n, line in enumerate(drawn, start=1)
    ]
    return element(
        "div",
        element("h3", quantity.title),
        element("p", quantity.told, class_="told"),
        made.chart(quantity.key, figure, f"{quantity.title} against size", "tall"),
        element("p", [(name, " ") for name in names], class_="told lines") if names else None,
    )


def scatter(quantity: Quantity, runs: Sequence[Run], hues: dict[str, str]) -> tuple[Any, list[Line]]:
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
        chart.add_trace(_dots(quantity, [point for point in points if _group(point[0], hues) == name], name, hues))
    return chart, drawn


def _dots(quantity: Quantity, points: Sequence[tuple[Run, float]], name: str, hues: dict[str, str]) -> Any:
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


def hover(quantity: Quantity, run: Run, value: float) -> str:
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


def band(points: Iterable[tuple[Run, float]]) -> list[tuple[float, float, float]]:
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


def _law_lines(pick: str) -> Callable[[Sequence[float]], list[Line]]:
    """What each law says at 20 tokens a parameter; another form of the same law is no other."""

    def lines(sizes: Sequence[float]) -> list[Line]:
        said: dict[str, list[tuple[float, float, bool]]] = {}
        for size in sizes:
            for result in evaluate(size, TOKENS_PER_PARAMETER * size):
                value = getattr(result, pick)
                if value and result.form_of is None:
                    said.setdefault(result.law, []).append((size, value, result.in_range))
        return [Line(name, points) for name, points in said.items()]

    return lines


def _chinchilla(sizes: Sequence[float]) -> list[Line]:
    return [Line("Chinchilla, 20 tokens a parameter", [(size, 20 * size, True) for size in sizes])]


def _inits(sizes: Sequence[float]) -> list[Line]:
    """N = 12 L d^2 without embeddings, so d = (N x aspect / 12)^(1/3)."""
    widths = [(size, (size * ASPECT / 12) ** (1 / 3)) for size in sizes]
    rules: dict[str, Callable[[float], float]] = {
        "fan-in, 1 / sqrt(d)": lambda d: d**-0.5,
        "small-init, sqrt(2 / (5 d))": lambda d: math.sqrt(2 / (5 * d)),
        "MT-NLG, sqrt(1 / (3 d))": lambda d: math.sqrt(1 / (3 * d)),
        "GPT-2, 0.02": lambda d: 0.02,
    }
    return [Line(name, [(size, std(d), True) for size, d in widths]) for name, std in rules.items()]


_AT_20 = f"at {TOKENS_PER_PARAMETER:g} tokens a parameter; dotted beyond their fit"
QUANTITIES = (
    Quantity(
        "lr", "Peak learning rate", f"Thin lines: laws {_AT_20}.", "peak lr", lambda run: run.peak_lr,
        lambda run: run.schedule, "peak_lr", lambda value: f"peak lr {numbers.value(value)}", _law_lines("lr"),
    ),
    Quantity(
        "batch", "Batch", f"The final one. Thin lines: optimal and critical ones by laws {_AT_20}.", "tokens a step",
        lambda run: run.batch_tokens, lambda run: run.batch, "global_batch_tokens",
        lambda value: f"batch {numbers.quantity(value)} tokens", _law_lines("batch_tokens"),
    ),
    Quantity(
        "tokens", "Duration", "Tokens consumed. The thin line: what Chinchilla found compute-optimal.", "tokens",
        lambda run: run.tokens, lambda run: run.data, "tokens_total",
        lambda value: f"{numbers.quantity(value)} tokens", _chinchilla,
    ),
    Quantity(
        "init", "Init std",
        f"Of the matrices that read the residual stream. Thin lines: rules of the width, at d_model = {ASPECT:g} "
        "n_layers.", "standard deviation", lambda run: run.init_std, lambda run: run.init, "std",
        lambda value: f"init std {numbers.value(value)}", _inits,
    ),
)  # fmt: skip

_COLUMNS = ("run", "parameters", "tokens", "peak lr", "batch", "init std", "optimizer", "lineage", "source of the lr")
_NUMBERS = range(1, 6)


def _table(runs: Sequence[Run]) -> Html:
    heads = [
        element("th", element("button", name, type="button"), scope="col", class_="number" if n in _NUMBERS else None)
        for n, name in enumerate(_COLUMNS)
    ]
    rows = [element("tr", element("th", run.id, scope="row"), *_cells(run)) for run in runs]
    return scroll(
        element(
            "table", element("thead", element("tr", *heads)), element("tbody", *rows), class_="catalogue sortable"
        ),
        "all published runs",
    )


def _cells(run: Run) -> list[Html]:
    counts = ((run.params_total, numbers.quantity), (run.tokens, numbers.quantity), (run.peak_lr, numbers.value))
    shown = (*counts, (run.batch_tokens, numbers.quantity), (run.init_std, numbers.value))
    marked = "" if run.lr_comparable or run.peak_lr is None else "*"
    known = run.schedule.provenance("peak_lr") if run.schedule and run.peak_lr else None
    return [
        *(
            element("td", spell(value), marked if n == 2 else None, class_="number", data_v=f"{value or 0:g}")
            for n, (value, spell) in enumerate(shown)
        ),
        element("td", run.optimizer or numbers.NONE),
        element("td", run.lineage.name),
        element("td", [(linked(source), Html("<br>")) for source in known.sources], f"known from: {known.confidence}")
        if known
        else element("td", numbers.NONE),
    ]


_LINKED = re.compile(r"arXiv (\d{4}\.\d{4,5})|^([\w.-]+/[\w.-]+): ")


def linked(source: str) -> Html:
    """A source whose arXiv number or repository is a link; the page itself asks no other host for anything."""

    def anchor(found: re.Match[str]) -> Html:
        paper, repository = found.groups()
        to = f"https://arxiv.org/abs/{paper}" if paper else f"https://github.com/{repository}"
        return element("a", found.group().removesuffix(": "), href=to, rel="noreferrer")

    made: list[Any] = []
    at = 0
    for found in _LINKED.finditer(source):
        made += [source[at : found.start()], anchor(found), ": " if found.group(2) else ""]
        at = found.end()
    return join(*made, source[at:])


def _short(value: float) -> float:
    return float(f"{value:.5g}")
