"""Draw the metrics of runs, such as loss and learning rate, over the tokens of training."""

import math
from collections.abc import Sequence
from typing import Any

from leaven.views import charts, numbers
from leaven.views.charts import ACCENT, Figure, Point
from leaven.views.folders import RunView

LOSS = "loss, nats per token"
_AT = "<br>at %{x:.3~s} tokens<extra></extra>"  # the last line of a tooltip

Coloured = Sequence[tuple[RunView, str]]  # runs with the colours of their lines


def run_charts(*runs: RunView) -> dict[str, Figure | None]:
    """Return charts by name, such as ``loss``. A chart has lines for all runs. A chart without data is None."""
    coloured = list(zip(runs, colours(len(runs)), strict=True))
    last = max(run.tokens for run in runs)
    log = charts.log_axis(min(run.steps[0]["tokens"] for run in runs), last, numbers.tick, most=8)
    linear = charts.linear_axis(0, last, numbers.tick)
    return {
        "loss": _loss(coloured, log),
        "last": _second_half(coloured, last),
        "lr": _learning_rate(coloured, linear),
        "batch": _batch(coloured, linear),
        "gradient": _gradient(coloured, log),
        "noise": _noise_scale(coloured, log),
        "load": _load(coloured, linear),
    }


def colours(count: int) -> list[str]:
    """Return the colours of ``count`` runs in charts and tables. A single run has the page's accent colour."""
    return [ACCENT] if count == 1 else list(map(charts.hue, range(count)))


def _loss(runs: Coloured, x: Figure) -> Figure:
    faint, strong, dots = [], [], []
    for run, colour in runs:
        losses = _values(run, "loss")
        faint.append(charts.line(charts.thin(losses, 900), colour, 1, opacity=0.4 / len(runs)))
        strong.append(_line(run, colour, charts.thin(_smoothed(losses), 500), " nats per token"))
        dots += _validations(run, colour)
    return charts.figure("tokens consumed", LOSS, [*faint, *strong, *dots], x=x)


def _second_half(runs: Coloured, end: int) -> Figure:
    """Draw the losses of all runs from the middle of the longest run on. The y axis fits these losses."""
    lines, dots, seen = [], [], []
    for run, colour in runs:
        smoothed = [point for point in _smoothed(_values(run, "loss")) if point[0] >= end / 2]
        seen += [loss for tokens, loss in [*smoothed, *run.validation, *run.averaged] if tokens >= end / 2]
        lines.append(_line(run, colour, charts.thin(smoothed, 250, logarithmic=False), " nats per token", width=1.5))
        dots += _validations(run, colour, end / 2)
    room = (0.06 * (max(seen) - min(seen)) or 0.1) if seen else 0.0
    y = {"range": [min(seen) - room, max(seen) + room]} if seen else {}
    x = charts.linear_axis(end / 2, end, numbers.tick)
    return charts.figure("tokens consumed", LOSS, [*lines, *dots], x=x, y=y)


def _learning_rate(runs: Coloured, x: Figure) -> Figure:
    lines = [_line(run, colour, charts.thin(_values(run, "lr"), 500, logarithmic=False)) for run, colour in runs]
    y = {"rangemode": "tozero", "exponentformat": "e"}
    return charts.figure("tokens consumed", "learning rate of the hidden weights", lines, x=x, y=y)


def _batch(runs: Coloured, x: Figure) -> Figure:
    steps = [(run, colour, charts.corners(_values(run, "batch_tokens"))) for run, colour in runs]
    lines = [_line(run, colour, points, " tokens", ",.0f", shape="vh") for run, colour, points in steps]
    largest = max((batch for _, _, points in steps for _, batch in points), default=1.0)
    y = charts.linear_axis(0, largest, numbers.tick, most=4) | {"range": [0, 1.12 * largest]}
    return charts.figure("tokens consumed", "batch, tokens per step", lines, x=x, y=y)


def _gradient(runs: Coloured, x: Figure) -> Figure | None:
    lines = []
    for run, colour in runs:
        logarithms = [(tokens, math.log(norm)) for tokens, norm in _values(run, "grad_norm") if norm > 0]
        norms = [(tokens, math.exp(norm)) for tokens, norm in _smoothed(logarithms)]
        lines.append(_line(run, colour, charts.thin(norms, 500)))
    return _logarithmic("gradient norm, before clipping", lines, x, numbers.value)


def _noise_scale(runs: Coloured, x: Figure) -> Figure | None:
    lines = []
    for run, colour in runs:
        scales = charts.thin([point for point in _values(run, "noise_scale") if point[1] > 0], 500)
        measured = {tokens for tokens, _ in scales}
        batches = [point for point in _values(run, "batch_tokens") if point[0] in measured]
        lines.append(_line(run, colour, scales, " tokens"))
        lines.append(_line(run, colour, batches, " tokens a batch", dash="dot", shape="vh"))
    return _logarithmic("tokens", lines, x, numbers.quantity)


def _logarithmic(title: str, lines: Sequence[Figure], x: Figure, spell: charts.Spell) -> Figure | None:
    seen = [value for line in lines for value in line["y"]]
    if not seen:
        return None
    y = charts.log_axis(min(seen), max(seen), spell, pad=0.06)
    return charts.figure("tokens consumed", title, lines, x=x, y=y)


def _load(runs: Coloured, x: Figure) -> Figure | None:
    lines = []
    for run, colour in runs:
        if loads := charts.thin(_values(run, "max_load"), 500, logarithmic=False):
            lines.append(_line(run, colour, loads, " x the mean", ".2f"))
    y = {"rangemode": "tozero"}
    return charts.figure("tokens consumed", "highest load / mean load", lines, x=x, y=y) if lines else None


def _values(run: RunView, quantity: str) -> list[Point]:
    return [(step["tokens"], step[quantity]) for step in run.steps if step.get(quantity) is not None]


def _smoothed(points: Sequence[Point]) -> list[Point]:
    x = [tokens for tokens, _ in points]
    y = charts.smooth([math.log(tokens) for tokens in x], [value for _, value in points])
    return list(zip(x, map(float, y), strict=True))


def _line(
    run: RunView, colour: str, points: Sequence[Point], unit: str = "", spell: str = ".4~g", **style: Any
) -> Figure:
    hover = f"<b>%{{fullData.name}}</b><br>%{{y:{spell}}}{unit}{_AT}"
    return charts.line(points, colour, name=charts.text(run.title), hovertemplate=hover, **style)


def _validations(run: RunView, colour: str, start: float = 0) -> list[Figure]:
    """Return dots for validation losses from ``start`` tokens on. Open dots are losses of averaged weights."""
    drawn = []
    for points, what, symbol in (
        (run.validation, "", "circle"),
        (run.averaged, " of averaged weights", "circle-open"),
    ):
        late = [(tokens, loss) for tokens, loss in points if tokens >= start]
        hover = f"<b>%{{fullData.name}}</b>, validation{what}<br>%{{y:.4f}} nats per token{_AT}"
        if late or not what:
            name, marker = charts.text(run.title), {"symbol": symbol}
            drawn.append(charts.dots(late, colour, 7, marker=marker, name=name, hovertemplate=hover))
    return drawn
