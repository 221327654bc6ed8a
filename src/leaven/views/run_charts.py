"""Draw the charts of a run over tokens: loss, the second half of the loss, learning rate, batch size, gradient norm
and noise scale."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from leaven.views import charts, numbers
from leaven.views.charts import ACCENT, PAPER, Figure, corners, smooth, thin
from leaven.views.folders import RunView

LOSS = "loss, nats per token"

Points = list[tuple[float, float]]  # (tokens consumed, value)


def run_charts(run: RunView) -> dict[str, Figure | None]:
    """Return charts by name. A chart is None if the run has not written its quantity."""
    return {
        "loss": _loss(run),
        "last": _second_half(run),
        "lr": _over_tokens(run, "lr", "learning rate of the hidden weights", _evenly, y={"exponentformat": "e"}),
        "batch": _batch(run),
        "gradient": _gradient(run),
        "noise": _noise_scale(run),
    }


def _loss(run: RunView) -> Figure:
    """Draw the loss: the loss of every step as a faint line, the smoothed loss as a strong line, and validation
    losses as dots."""
    found = _points(run, "loss")
    kept = [found[i] for i in thin([x for x, _ in found], 900)]
    faint = charts.line([x for x, _ in kept], [y for _, y in kept], ACCENT, 1, opacity=0.4)
    strong = _line(run, _log_spaced(_smoothed(found)), " nats per token")
    return charts.figure("tokens consumed", LOSS, [faint, strong, _dots(run, run.validation)], x=_log_tokens(run))


def _second_half(run: RunView) -> Figure:
    """Draw the loss over the second half of the run, where it changes by hundredths."""
    end = run.tokens
    line = [point for point in _evenly(_smoothed(_points(run, "loss"))) if point[0] >= end / 2]
    dots = [(float(tokens), loss) for tokens, loss in run.validation if tokens >= end / 2]
    seen = [loss for _, loss in line + dots]
    room = (0.06 * (max(seen) - min(seen)) or 0.1) if seen else 0.0
    y = {"range": [min(seen) - room, max(seen) + room]} if seen else {}
    traces = [_line(run, line, " nats per token", width=1.5), _dots(run, dots)]
    return charts.figure("tokens consumed", LOSS, traces, x=charts.linear_axis(end / 2, end, numbers.tick), y=y)


def _over_tokens(
    run: RunView, quantity: str, title: str, keep: Callable[[Points], Points], *, y: Figure, **style: Any
) -> Figure:
    """Draw a scheduled quantity over tokens. Both axes begin at 0."""
    line = _line(run, keep(_points(run, quantity)), **style)
    x = charts.linear_axis(0, run.tokens, numbers.tick)
    return charts.figure("tokens consumed", title, [line], x=x, y={"rangemode": "tozero"} | y)


def _batch(run: RunView) -> Figure:
    largest = max((step.batch_tokens or 0.0 for step in run.steps), default=1.0)
    axis = charts.linear_axis(0, largest, numbers.tick, most=4) | {"range": [0, 1.12 * largest]}
    style = {"unit": " tokens", "spell": ",.0f", "shape": "vh"}
    return _over_tokens(
        run, "batch_tokens", "batch, tokens per step",
        lambda points: [points[i] for i in corners([y for _, y in points])], y=axis, **style,
    )  # fmt: skip


def _gradient(run: RunView) -> Figure | None:
    found = [(x, math.log(y)) for x, y in _points(run, "grad_norm") if y > 0]
    if not found:
        return None
    norms = _log_spaced([(x, math.exp(y)) for x, y in _smoothed(found)])
    y = charts.log_axis(min(y for _, y in norms), max(y for _, y in norms), numbers.value, pad=0.06)
    title = "gradient norm, before clipping"
    return charts.figure("tokens consumed", title, [_line(run, norms)], x=_log_tokens(run), y=y)


def _noise_scale(run: RunView) -> Figure | None:
    """Draw the measured noise scale, and the batch size as a dotted line."""
    scales = _log_spaced([(x, y) for x, y in _points(run, "noise_scale") if y > 0])
    if not scales:
        return None
    at = {x for x, _ in scales}
    batches = [(x, y) for x, y in _points(run, "batch_tokens") if x in at]
    traces = [_line(run, scales, " tokens"), _line(run, batches, " tokens a batch", dash="dot", shape="vh")]
    seen = [y for _, y in scales + batches]
    y = charts.log_axis(min(seen), max(seen), numbers.quantity, pad=0.06)
    return charts.figure("tokens consumed", "tokens", traces, x=_log_tokens(run), y=y)


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


def _log_tokens(run: RunView) -> Figure:
    return charts.log_axis(run.steps[0].tokens, run.tokens, numbers.tick, most=8)


def _line(
    run: RunView, points: Points, unit: str = "", spell: str = ".4~g", width: float = 2, **style: Any
) -> Figure:
    hover = f"<b>%{{fullData.name}}</b><br>%{{y:{spell}}}{unit}<br>at %{{customdata}} tokens<extra></extra>"
    x, y = [x for x, _ in points], [y for _, y in points]
    style |= {"customdata": list(map(numbers.quantity, x)), "hovertemplate": hover}
    return charts.line(x, y, ACCENT, width, name=charts.text(run.title), **style)


def _dots(run: RunView, points: Sequence[tuple[float, float]]) -> Figure:
    return charts.scatter(
        [tokens for tokens, _ in points],
        [loss for _, loss in points],
        "markers",
        name=charts.text(run.title),
        marker={"color": ACCENT, "size": 7, "line": {"color": PAPER, "width": 1.5}},
        customdata=[numbers.quantity(tokens) for tokens, _ in points],
        hovertemplate="<b>%{fullData.name}</b>, validation<br>%{y:.4f} nats per token<br>at %{customdata} tokens"
        "<extra></extra>",
    )
