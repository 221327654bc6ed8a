"""Draw the charts of runs over tokens: loss, the second half of the loss, learning rate, batch size, gradient norm
and noise scale."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from leaven.views import charts, numbers
from leaven.views.charts import PAPER, Figure, corners, smooth, thin
from leaven.views.folders import RunView

COLOURS = {
    "transferred": "var(--transferred)",
    "copied": "var(--copied)",
    "untuned": "var(--untuned)",
    "run": "var(--transferred)",
}
OTHER = "var(--other)"
LOSS = "loss, nats per token"

Points = list[tuple[float, float]]  # (tokens consumed, value)


def run_charts(runs: Sequence[RunView]) -> dict[str, Figure | None]:
    """Return charts by name. A chart is None if no run has written its quantity."""
    drawn = sorted(runs, key=lambda run: run.key == "transferred")  # the transferred run is drawn on top
    return {
        "loss": _loss(drawn),
        "last": _second_half(drawn),
        "lr": _over_tokens(drawn, "lr", "learning rate of the hidden weights", _evenly, y={"exponentformat": "e"}),
        "batch": _batch(drawn),
        "gradient": _gradient(drawn),
        "noise": _noise_scale(drawn),
    }


def _loss(runs: Sequence[RunView]) -> Figure:
    """Draw the loss: the loss of every step as a faint line, the smoothed loss as a strong line, and validation
    losses as dots."""
    faint, lines = [], []
    for run in runs:
        found = _points(run, "loss")
        kept = [found[i] for i in thin([x for x, _ in found], 900)]
        colour = COLOURS.get(run.key, OTHER)
        x, y = [x for x, _ in kept], [y for _, y in kept]
        faint.append(charts.line(x, y, colour, 1, opacity=0.4, legendgroup=run.key))
        lines.append(_line(run, _log_spaced(_smoothed(found)), " nats per token"))
    return charts.figure(
        "tokens consumed", LOSS, [*faint, *lines, *(_dots(run, run.validation) for run in runs)], x=_log_tokens(runs)
    )


def _second_half(runs: Sequence[RunView]) -> Figure:
    """Draw the loss over the second half of the runs, where runs differ by hundredths."""
    end = max(run.tokens for run in runs)
    traces, seen = [], []
    for run in runs:
        line = [point for point in _evenly(_smoothed(_points(run, "loss"))) if point[0] >= end / 2]
        dots = [(float(tokens), loss) for tokens, loss in run.validation if tokens >= end / 2]
        seen += [loss for _, loss in line + dots]
        traces += [_line(run, line, " nats per token", width=1.5), _dots(run, dots)]
    room = (0.06 * (max(seen) - min(seen)) or 0.1) if seen else 0.0
    y = {"range": [min(seen) - room, max(seen) + room]} if seen else {}
    return charts.figure("tokens consumed", LOSS, traces, x=charts.linear_axis(end / 2, end, numbers.tick), y=y)


def _over_tokens(
    runs: Sequence[RunView], quantity: str, title: str, keep: Callable[[Points], Points], *, y: Figure, **style: Any
) -> Figure:
    """Draw a scheduled quantity over tokens. Both axes begin at 0."""
    lines = [_line(run, keep(_points(run, quantity)), **style) for run in runs]
    x = charts.linear_axis(0, max(run.tokens for run in runs), numbers.tick)
    return charts.figure("tokens consumed", title, lines, x=x, y={"rangemode": "tozero"} | y)


def _batch(runs: Sequence[RunView]) -> Figure:
    largest = max((step.batch_tokens or 0.0 for run in runs for step in run.steps), default=1.0)
    axis = charts.linear_axis(0, largest, numbers.tick, most=4) | {"range": [0, 1.12 * largest]}
    style = {"unit": " tokens", "spell": ",.0f", "shape": "vh"}
    return _over_tokens(
        runs, "batch_tokens", "batch, tokens per step",
        lambda points: [points[i] for i in corners([y for _, y in points])], y=axis, **style,
    )  # fmt: skip


def _gradient(runs: Sequence[RunView]) -> Figure | None:
    lines = {
        run.key: _log_spaced([(x, math.exp(y)) for x, y in _smoothed([(x, math.log(y)) for x, y in found])])
        for run in runs
        if (found := [(x, y) for x, y in _points(run, "grad_norm") if y > 0])
    }
    if not lines:
        return None
    norms = [norm for line in lines.values() for _, norm in line]
    traces = [_line(run, lines[run.key]) for run in runs if run.key in lines]
    y = charts.log_axis(min(norms), max(norms), numbers.value, pad=0.06)
    return charts.figure("tokens consumed", "gradient norm, before clipping", traces, x=_log_tokens(runs), y=y)


def _noise_scale(runs: Sequence[RunView]) -> Figure | None:
    """Draw the measured noise scale, and the batch size as a dotted line."""
    traces, seen = [], []
    for run in runs:
        scales = _log_spaced([(x, y) for x, y in _points(run, "noise_scale") if y > 0])
        if scales:
            at = {x for x, _ in scales}
            batches = [(x, y) for x, y in _points(run, "batch_tokens") if x in at]
            traces += [_line(run, scales, " tokens"), _line(run, batches, " tokens a batch", dash="dot", shape="vh")]
            seen += [y for _, y in scales + batches]
    if not traces:
        return None
    y = charts.log_axis(min(seen), max(seen), numbers.quantity, pad=0.06)
    return charts.figure("tokens consumed", "tokens", traces, x=_log_tokens(runs), y=y)


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


def _log_tokens(runs: Sequence[RunView]) -> Figure:
    first, last = min(run.steps[0].tokens for run in runs), max(run.tokens for run in runs)
    return charts.log_axis(first, last, numbers.tick, most=8)


def _line(
    run: RunView, points: Points, unit: str = "", spell: str = ".4~g", width: float = 2, **style: Any
) -> Figure:
    hover = f"<b>%{{fullData.name}}</b><br>%{{y:{spell}}}{unit}<br>at %{{customdata}} tokens<extra></extra>"
    x, y = [x for x, _ in points], [y for _, y in points]
    style |= {"customdata": list(map(numbers.quantity, x)), "hovertemplate": hover, "legendgroup": run.key}
    return charts.line(x, y, COLOURS.get(run.key, OTHER), width, name=charts.text(run.title), **style)


def _dots(run: RunView, points: Sequence[tuple[float, float]]) -> Figure:
    return charts.scatter(
        [tokens for tokens, _ in points],
        [loss for _, loss in points],
        "markers",
        name=charts.text(run.title),
        legendgroup=run.key,
        marker={"color": COLOURS.get(run.key, OTHER), "size": 7, "line": {"color": PAPER, "width": 1.5}},
        customdata=[numbers.quantity(tokens) for tokens, _ in points],
        hovertemplate="<b>%{fullData.name}</b>, validation<br>%{y:.4f} nats per token<br>at %{customdata} tokens"
        "<extra></extra>",
    )
