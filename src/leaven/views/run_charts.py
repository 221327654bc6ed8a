"""Draw the charts of one or more runs over tokens: loss, the second half of the loss, learning rate, batch size,
gradient norm and noise scale."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from leaven.views import charts, numbers
from leaven.views.charts import ACCENT, PAPER, Figure, corners, smooth, thin
from leaven.views.folders import RunView

LOSS = "loss, nats per token"

Points = list[tuple[float, float]]  # (tokens consumed, value)
Coloured = Sequence[tuple[RunView, str]]  # runs with the colours of their lines


def run_charts(*runs: RunView) -> dict[str, Figure | None]:
    """Return a mapping from the name of each chart to the chart, which has the lines of all runs. The chart is None
    if no run has recorded its quantity."""
    coloured = list(zip(runs, colours(len(runs)), strict=True))
    return {
        "loss": _loss(coloured),
        "last": _second_half(coloured),
        "lr": _over_tokens(coloured, "lr", "learning rate of the hidden weights", _evenly, y={"exponentformat": "e"}),
        "batch": _batch(coloured),
        "gradient": _gradient(coloured),
        "noise": _noise_scale(coloured),
    }


def colours(count: int) -> list[str]:
    """Return the colours of ``count`` runs in charts and tables. A single run has the accent colour of the page."""
    return [ACCENT] if count == 1 else list(map(charts.hue, range(count)))


def _loss(runs: Coloured) -> Figure:
    """Draw the loss over tokens. The loss of the steps is a faint line, the smoothed loss is a strong line, and
    validation losses are dots."""
    faint, strong, dots = [], [], []
    for run, colour in runs:
        found = _points(run, "loss")
        kept = [found[i] for i in thin([x for x, _ in found], 900)]
        faint.append(charts.line([x for x, _ in kept], [y for _, y in kept], colour, 1, opacity=0.4 / len(runs)))
        strong.append(_line((run, colour), _log_spaced(_smoothed(found)), " nats per token"))
        dots.append(_dots(run, colour, run.validation))
    return charts.figure("tokens consumed", LOSS, [*faint, *strong, *dots], x=_log_tokens(runs))


def _second_half(runs: Coloured) -> Figure:
    """Draw the loss over the second half of the longest run, where it changes by hundredths."""
    end = max(run.tokens for run, _ in runs)
    lines, dots, seen = [], [], []
    for run, colour in runs:
        line = [point for point in _evenly(_smoothed(_points(run, "loss"))) if point[0] >= end / 2]
        late = [(float(tokens), loss) for tokens, loss in run.validation if tokens >= end / 2]
        seen += [loss for _, loss in line + late]
        lines.append(_line((run, colour), line, " nats per token", width=1.5))
        dots.append(_dots(run, colour, late))
    room = (0.06 * (max(seen) - min(seen)) or 0.1) if seen else 0.0
    y = {"range": [min(seen) - room, max(seen) + room]} if seen else {}
    x = charts.linear_axis(end / 2, end, numbers.tick)
    return charts.figure("tokens consumed", LOSS, [*lines, *dots], x=x, y=y)


def _over_tokens(
    runs: Coloured, quantity: str, title: str, keep: Callable[[Points], Points], *, y: Figure, **style: Any
) -> Figure:
    """Draw a scheduled quantity over tokens. Both axes begin at 0."""
    lines = [_line((run, colour), keep(_points(run, quantity)), **style) for run, colour in runs]
    x = charts.linear_axis(0, max(run.tokens for run, _ in runs), numbers.tick)
    return charts.figure("tokens consumed", title, lines, x=x, y={"rangemode": "tozero"} | y)


def _batch(runs: Coloured) -> Figure:
    largest = max((step.batch_tokens or 0.0 for run, _ in runs for step in run.steps), default=1.0)
    axis = charts.linear_axis(0, largest, numbers.tick, most=4) | {"range": [0, 1.12 * largest]}
    style = {"unit": " tokens", "spell": ",.0f", "shape": "vh"}
    return _over_tokens(
        runs, "batch_tokens", "batch, tokens per step",
        lambda points: [points[i] for i in corners([y for _, y in points])], y=axis, **style,
    )  # fmt: skip


def _gradient(runs: Coloured) -> Figure | None:
    lines, seen = [], []
    for run, colour in runs:
        found = [(x, math.log(y)) for x, y in _points(run, "grad_norm") if y > 0]
        norms = _log_spaced([(x, math.exp(y)) for x, y in _smoothed(found)])
        seen += [y for _, y in norms]
        lines.append(_line((run, colour), norms))
    if not seen:
        return None
    y = charts.log_axis(min(seen), max(seen), numbers.value, pad=0.06)
    return charts.figure("tokens consumed", "gradient norm, before clipping", lines, x=_log_tokens(runs), y=y)


def _noise_scale(runs: Coloured) -> Figure | None:
    """Draw the measured noise scale, and the batch size as a dotted line."""
    lines, seen = [], []
    for run, colour in runs:
        scales = _log_spaced([(x, y) for x, y in _points(run, "noise_scale") if y > 0])
        at = {x for x, _ in scales}
        batches = [(x, y) for x, y in _points(run, "batch_tokens") if x in at]
        seen += [y for _, y in scales + batches]
        lines.append(_line((run, colour), scales, " tokens"))
        lines.append(_line((run, colour), batches, " tokens a batch", dash="dot", shape="vh"))
    if not seen:
        return None
    y = charts.log_axis(min(seen), max(seen), numbers.quantity, pad=0.06)
    return charts.figure("tokens consumed", "tokens", lines, x=_log_tokens(runs), y=y)


def _points(run: RunView, quantity: str) -> Points:
    found = ((step.tokens, getattr(step, quantity)) for step in run.steps)
    return [(float(tokens), value) for tokens, value in found if value is not None]


def _smoothed(points: Points) -> Points:
    x = [x for x, _ in points]
    return list(zip(x, map(float, smooth([math.log(at) for at in x], [y for _, y in points])), strict=True))


def _log_spaced(points: Points) -> Points:
    return [points[i] for i in thin([x for x, _ in points], 500)]


def _evenly(points: Points) -> Points:
    return [points[i] for i in thin([x for x, _ in points], 500, logarithmic=False)]


def _log_tokens(runs: Coloured) -> Figure:
    first, last = min(run.steps[0].tokens for run, _ in runs), max(run.tokens for run, _ in runs)
    return charts.log_axis(first, last, numbers.tick, most=8)


def _line(
    of: tuple[RunView, str], points: Points, unit: str = "", spell: str = ".4~g", width: float = 2, **style: Any
) -> Figure:
    run, colour = of
    hover = f"<b>%{{fullData.name}}</b><br>%{{y:{spell}}}{unit}<br>at %{{customdata}} tokens<extra></extra>"
    x, y = [x for x, _ in points], [y for _, y in points]
    style |= {"customdata": list(map(numbers.quantity, x)), "hovertemplate": hover}
    return charts.line(x, y, colour, width, name=charts.text(run.title), **style)


def _dots(run: RunView, colour: str, points: Sequence[tuple[float, float]]) -> Figure:
    return charts.scatter(
        [tokens for tokens, _ in points],
        [loss for _, loss in points],
        "markers",
        name=charts.text(run.title),
        marker={"color": colour, "size": 7, "line": {"color": PAPER, "width": 1.5}},
        customdata=[numbers.quantity(tokens) for tokens, _ in points],
        hovertemplate="<b>%{fullData.name}</b>, validation<br>%{y:.4f} nats per token<br>at %{customdata} tokens"
        "<extra></extra>",
    )
