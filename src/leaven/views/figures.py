"""The charts of runs: loss, its last stretch, batch and lr, gradient norm. Colours are CSS variables of the page.

A figure names a colour ``var(--ink)``; the page's script puts in what the theme says, and again when it changes. So
one figure is right in light, in dark and on paper.
"""

import math
from collections.abc import Callable, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from leaven.recipe.errors import InputError
from leaven.views import numbers
from leaven.views.curves import corners, smooth, thin
from leaven.views.story import Run, Step

if TYPE_CHECKING:
    import plotly.graph_objects as go

COLOURS = {
    "transferred": "var(--transferred)",
    "copied": "var(--copied)",
    "untuned": "var(--untuned)",
    "run": "var(--transferred)",
}
MUTED, INK, PAPER = "var(--muted)", "var(--ink)", "var(--paper)"


def plotly() -> Any:
    """plotly's figures, imported when a page is written."""
    try:
        import plotly.graph_objects as go
    except ImportError:
        raise InputError("a report needs plotly: pip install 'leaven[train]'") from None
    return go


def text(written: str) -> str:
    """A person's words inside a figure, where plotly would take a tag for mark-up and %{...} for a value."""
    return escape(written, quote=False).replace("%{", "%&#123;")


def figure(x_title: str, y_title: str, **layout: Any) -> "go.Figure":
    """An empty chart in the page's style. The y title lies above the axis, where it is read without a turned head."""
    go = plotly()
    chart = go.Figure()
    axis = {
        "gridcolor": "var(--grid)",
        "linecolor": "var(--line)",
        "tickcolor": "var(--line)",
        "zeroline": False,
        "ticks": "outside",
        "ticklen": 4,
        "showline": True,
    }
    settings: dict[str, Any] = {
        "template": go.layout.Template(),
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": "var(--sans)", "size": 12, "color": MUTED},
        "hoverlabel": {
            "bgcolor": "var(--surface)",
            "bordercolor": "var(--line)",
            "font": {"family": "var(--sans)", "color": INK, "size": 12},
            "align": "left",
        },
        "hovermode": "closest",
        "showlegend": False,
        "margin": {"l": 48, "r": 14, "t": 26, "b": 44},
        "xaxis": axis | {"title": {"text": x_title, "standoff": 8}, "showgrid": False},
        "yaxis": axis | {"showline": False, "ticks": "", "automargin": True, "nticks": 6},
    }
    chart.update_layout(settings)
    chart.update_layout(layout)
    name_axis(chart, y_title)
    return chart


def name_axis(chart: "go.Figure", title: str, y: float = 1.0) -> None:
    chart.add_annotation(
        text=title, xref="paper", yref="paper", x=0, y=y, xshift=-chart.layout.margin.l, yshift=8,
        xanchor="left", yanchor="bottom", showarrow=False, font={"size": 12, "color": MUTED},
    )  # fmt: skip


def log_axis(
    chart: "go.Figure",
    axis: str,
    low: float,
    high: float,
    label: Callable[[float], str],
    *,
    most: int = 6,
    pad: float = 0.02,
) -> None:
    """A logarithmic axis from low to high with round ticks in the project's own spelling."""
    room = (math.log10(high) - math.log10(low)) * pad or 0.05
    places, labels = numbers.log_ticks(low * 10**-room, high * 10**room, label, most)
    chart.update_layout(
        {
            axis: {
                "type": "log",
                "range": [math.log10(low) - room, math.log10(high) + room],
                "tickvals": places,
                "ticktext": labels,
            }
        }
    )


def _tokens_axis(chart: "go.Figure", runs: Sequence[Run]) -> None:
    first = min(run.steps[0].tokens for run in runs)
    log_axis(chart, "xaxis", first, max(run.tokens for run in runs), numbers.tick, most=8)


def _known(run: Run, quantity: str) -> list[Step]:
    return [step for step in run.steps if getattr(step, quantity) is not None]


def _drawn(runs: Sequence[Run]) -> list[Run]:
    """The order of drawing: the transferred run comes last and so lies on top."""
    return sorted(runs, key=lambda run: run.key == "transferred")


def colour(run: Run) -> str:
    return COLOURS.get(run.key, "var(--other)")


def _line(chart: "go.Figure", run: Run, x: Sequence[float], y: Sequence[float], unit: str, **style: Any) -> None:
    go = plotly()
    line = {"color": colour(run), "width": 2} | style.pop("line", {})
    chart.add_trace(
        go.Scatter(
            x=list(x),
            y=[float(f"{value:.6g}") for value in y],
            name=text(run.title),
            legendgroup=run.key,
            mode="lines",
            line=line,
            customdata=[numbers.quantity(place) for place in x],
            hovertemplate=f"<b>%{{fullData.name}}</b><br>%{{y:.4~g}}{unit}<br>"
            "at %{customdata} tokens<extra></extra>",
            **style,
        )
    )


def _dots(chart: "go.Figure", run: Run, points: Sequence[tuple[int, float]]) -> None:
    go = plotly()
    chart.add_trace(
        go.Scatter(
            x=[tokens for tokens, _ in points],
            y=[loss for _, loss in points],
            name=text(run.title),
            legendgroup=run.key,
            mode="markers",
            marker={"color": colour(run), "size": 7, "line": {"color": PAPER, "width": 1.5}},
            customdata=[numbers.quantity(tokens) for tokens, _ in points],
            hovertemplate="<b>%{fullData.name}</b>, validation<br>%{y:.4f} nats per token<br>"
            "at %{customdata} tokens<extra></extra>",
        )
    )


def _smoothed(run: Run, quantity: str) -> tuple[list[float], list[float]]:
    steps = _known(run, quantity)
    tokens = [float(step.tokens) for step in steps]
    return tokens, list(smooth([math.log(place) for place in tokens], [getattr(step, quantity) for step in steps]))


def loss(runs: Sequence[Run]) -> "go.Figure":
    """Loss over tokens, on a logarithmic axis: every step faint, smoothed as a line, validation as dots."""
    chart = figure("tokens consumed", "loss, nats per token")
    _tokens_axis(chart, runs)
    for run in _drawn(runs):
        steps = _known(run, "loss")
        raw = [steps[i] for i in thin([step.tokens for step in steps], 900)]
        faint = {"line": {"width": 1}, "opacity": 0.4, "hoverinfo": "skip"}
        _line(chart, run, [step.tokens for step in raw], [step.loss or 0.0 for step in raw], "", **faint)
        chart.data[-1].update(customdata=None, hovertemplate=None)
    for run in _drawn(runs):
        tokens, line = _smoothed(run, "loss")
        kept = thin(tokens, 500)
        _line(chart, run, [tokens[i] for i in kept], [line[i] for i in kept], " nats per token")
    for run in _drawn(runs):
        _dots(chart, run, run.validation)
    return chart


def last_stretch(runs: Sequence[Run]) -> "go.Figure":
    """The second half of the runs, closer: there the losses differ by hundredths."""
    chart = figure("tokens consumed", "loss, nats per token")
    half = max(run.tokens for run in runs) / 2
    seen: list[float] = []
    for run in _drawn(runs):
        tokens, line = _smoothed(run, "loss")
        kept = [i for i in thin(tokens, 500, logarithmic=False) if tokens[i] >= half]
        points = [point for point in run.validation if point[0] >= half]
        seen += [line[i] for i in kept] + [value for _, value in points]
        _line(chart, run, [tokens[i] for i in kept], [line[i] for i in kept], " nats per token", line={"width": 1.5})
        _dots(chart, run, points)
    end = max(run.tokens for run in runs)
    _linear_tokens(chart, "xaxis", half, end)
    if seen:
        room = 0.06 * (max(seen) - min(seen)) or 0.1
        chart.update_yaxes(range=[min(seen) - room, max(seen) + room])
    return chart


def _linear_tokens(chart: "go.Figure", axis: str, low: float, high: float) -> None:
    places = numbers.linear_ticks(low, high)
    room = 0.02 * (high - low)
    labels = [numbers.tick(place) for place in places]
    chart.update_layout({axis: {"range": [low - room, high + room], "tickvals": places, "ticktext": labels}})


def schedule(runs: Sequence[Run]) -> "go.Figure":
    """Batch and learning rate over tokens, one above the other."""
    chart = figure(
        "tokens consumed", "learning rate of the hidden weights", margin={"l": 52, "r": 14, "t": 26, "b": 44}
    )
    ink = {key: chart.layout.xaxis[key] for key in ("linecolor", "tickcolor", "showgrid", "zeroline", "showline")}
    chart.update_layout(
        yaxis={"domain": [0.56, 1.0], "rangemode": "tozero", "exponentformat": "e"},
        yaxis2=chart.layout.yaxis.to_plotly_json() | {"domain": [0.0, 0.40], "rangemode": "tozero", "anchor": "x"},
        xaxis=ink | {"anchor": "y2"},
    )
    name_axis(chart, "batch, tokens a step", y=0.40)
    for run in _drawn(runs):
        steps = _known(run, "lr")
        kept = [steps[i] for i in thin([step.tokens for step in steps], 400, logarithmic=False)]
        _line(chart, run, [step.tokens for step in kept], [step.lr or 0.0 for step in kept], "")
        steps = _known(run, "batch_tokens")
        sizes = [steps[i] for i in corners([step.batch_tokens for step in steps])]
        flat = {"yaxis": "y2", "line": {"shape": "vh"}}
        _line(
            chart,
            run,
            [step.tokens for step in sizes],
            [step.batch_tokens or 0.0 for step in sizes],
            " tokens",
            **flat,
        )
        chart.data[-1].update(hovertemplate=chart.data[-1].hovertemplate.replace(".4~g", ",.0f"))
    _linear_tokens(chart, "xaxis", 0, max(run.tokens for run in runs))
    largest = max((step.batch_tokens or 0.0 for run in runs for step in run.steps), default=1.0)
    places = numbers.linear_ticks(0, largest * 1.02, most=4)
    chart.update_layout(
        yaxis2={
            "tickvals": places,
            "ticktext": [numbers.tick(place) for place in places],
            "range": [0, largest * 1.12],
        }
    )
    return chart


def noise_scale(runs: Sequence[Run]) -> "go.Figure | None":
    """The gradient noise scale as it was measured, and the batch, dotted; None where none was measured."""
    runs = [run for run in runs if any(step.noise_scale for step in run.steps)]
    if not runs:
        return None
    chart = figure("tokens consumed", "tokens")
    _tokens_axis(chart, runs)
    low, high = math.inf, 0.0
    for run in _drawn(runs):
        steps = _known(run, "noise_scale")
        kept = [steps[i] for i in thin([float(step.tokens) for step in steps], 500)]
        scales = [step.noise_scale or 1.0 for step in kept]
        batches = [step.batch_tokens or 1.0 for step in kept]
        low, high = min(low, *scales, *batches), max(high, *scales, *batches)
        places = [float(step.tokens) for step in kept]
        _line(chart, run, places, scales, " tokens")
        _line(chart, run, places, batches, " tokens a batch", line={"dash": "dot", "shape": "vh"})
    log_axis(chart, "yaxis", low, high, numbers.quantity, pad=0.06)
    return chart


def gradient(runs: Sequence[Run]) -> "go.Figure | None":
    """Gradient norm over tokens, smoothed; None where no run has written any."""
    runs = [run for run in runs if any(step.grad_norm for step in run.steps)]
    if not runs:
        return None
    chart = figure("tokens consumed", "gradient norm, before clipping")
    _tokens_axis(chart, runs)
    low, high = math.inf, 0.0
    for run in _drawn(runs):
        steps = [step for step in run.steps if step.grad_norm]
        tokens = [float(step.tokens) for step in steps]
        logs = smooth([math.log(place) for place in tokens], [math.log(step.grad_norm or 1.0) for step in steps])
        kept = thin(tokens, 500)
        norms = [math.exp(logs[i]) for i in kept]
        low, high = min(low, *norms), max(high, *norms)
        _line(chart, run, [tokens[i] for i in kept], norms, "")
    log_axis(chart, "yaxis", low, high, numbers.value, pad=0.06)
    return chart
