"""The charts of a search: trials in order, and loss over each hyperparameter that was varied."""

import math
from typing import TYPE_CHECKING, Any

from leaven.report import numbers
from leaven.report.figures import INK, MUTED, PAPER, figure, log_axis, plotly, text
from leaven.report.story import Study
from leaven.training.study_file import Trial

if TYPE_CHECKING:
    import plotly.graph_objects as go

BEST = "var(--transferred)"


def short(path: str) -> str:
    """``hyperparameters.modules.attention.query.lr`` is attention.query.lr to somebody who reads a chart."""
    return path.removeprefix("hyperparameters.").removeprefix("modules.").replace('"', "")


def window(study: Study) -> tuple[float, float]:
    """The losses a chart shows: all but the far outliers, which stand at the upper edge instead."""
    losses = sorted(trial.loss for trial in study.trials if trial.state == "complete" and trial.loss is not None)
    if not losses:
        return 0.0, 1.0
    low, median = losses[0], losses[len(losses) // 2]
    floor = study.noise_floor or 0.0
    high = min(losses[-1], median + 4 * max(median - low, floor, 1e-3))
    low = min(low, low - floor)
    return low, max(high, low + 1e-3)


def edge(study: Study) -> float:
    """The loss at which diverged trials and those above the window are drawn."""
    low, high = window(study)
    return high + 0.10 * (high - low)


def beyond(study: Study) -> int:
    """How many trials completed with a loss above the window."""
    return sum((trial.loss or 0.0) > edge(study) for trial in _complete(study))


def _complete(study: Study) -> list[Trial]:
    return [trial for trial in study.trials if trial.state == "complete" and trial.loss is not None]


def _lost(study: Study) -> list[Trial]:
    return [trial for trial in study.trials if trial.state in {"diverged", "failed"}]


def _hover(trial: Trial, path: str | None) -> str:
    """What a trial says of itself: its loss, and its values or the one of a panel."""
    loss = f"{numbers.loss(trial.loss)} nats per token" if trial.state == "complete" else trial.state
    values = list(trial.values.items()) if path is None else [(path, trial.values[path])]
    lines = [f"<b>trial {trial.number}</b>", loss]
    lines += [f"{text(short(name))} {numbers.value(value)}" for name, value in values[:8]]
    if len(values) > 8:
        lines.append(f"and {len(values) - 8} more")
    return "<br>".join(lines)


def _marks(chart: "go.Figure", study: Study, x: dict[int, Any], size: int, path: str | None) -> None:
    """Trials as dots, those above the window as triangles at its edge, diverged ones as crosses, the best last."""
    go = plotly()
    top = edge(study)
    complete = [trial for trial in _complete(study) if trial.number in x]
    best = study.best.number if study.best else None
    kinds = (
        (
            [t for t in complete if (t.loss or 0) <= top and t.number != best],
            {"color": MUTED, "size": size, "opacity": 0.75},
        ),
        ([t for t in complete if (t.loss or 0) > top], {"color": MUTED, "size": size + 1, "symbol": "triangle-up"}),
        (
            [t for t in _lost(study) if t.number in x],
            {
                "color": "var(--bad)",
                "size": size + 1,
                "symbol": "x-thin",
                "line": {"color": "var(--bad)", "width": 2},
            },
        ),
        (
            [t for t in complete if t.number == best],
            {"color": BEST, "size": size + 4, "line": {"color": PAPER, "width": 1.5}},
        ),
    )
    for trials, marker in kinds:
        if trials:
            chart.add_trace(
                go.Scatter(
                    x=[x[trial.number] for trial in trials],
                    y=[min(trial.loss, top) if trial.loss is not None else top for trial in trials],
                    mode="markers",
                    marker=marker,
                    cliponaxis=False,
                    hovertext=[_hover(trial, path) for trial in trials],
                    hovertemplate="%{hovertext}<extra></extra>",
                )
            )


def search(study: Study) -> "go.Figure":
    """Trials in the order they were started, the best so far as a line, the noise floor as a band round the best."""
    go = plotly()
    chart = figure("trial", "loss, nats per token")
    low, high = window(study)
    top = edge(study)
    last = study.trials[-1].number
    if study.best and study.noise_floor:
        chart.add_hrect(
            y0=study.best.loss - study.noise_floor,
            y1=study.best.loss + study.noise_floor,
            fillcolor="var(--band)",
            line_width=0,
            layer="below",
        )
    leaders, lowest = [], math.inf
    for trial in _complete(study):
        lowest = min(lowest, trial.loss or math.inf)
        leaders.append((trial.number, lowest))
    if leaders:
        chart.add_trace(
            go.Scatter(
                x=[number for number, _ in leaders] + [last],
                y=[min(loss, top) for _, loss in leaders] + [lowest],
                mode="lines",
                line={"color": BEST, "width": 2, "shape": "hv"},
                hoverinfo="skip",
            )
        )
    _marks(chart, study, {trial.number: trial.number for trial in study.trials}, 8, None)
    first = study.trials[0].number
    room = 0.03 * max(last - first, 1) + 0.2
    places = [place for place in numbers.linear_ticks(first, max(last, first + 1), 10) if place == int(place)]
    chart.update_xaxes(range=[first - room, last + room], tickvals=places)
    chart.update_yaxes(range=[low - 0.06 * (high - low), top + 0.02 * (high - low)])
    return chart


def by_value(study: Study, path: str) -> "go.Figure | None":
    """Loss over one hyperparameter, every trial a dot; None if no trial says what value it had."""
    chart = figure("", "", margin={"l": 44, "r": 12, "t": 8, "b": 26})
    chart.layout.annotations = ()
    low, high = window(study)
    top = edge(study)
    values = {trial.number: trial.values[path] for trial in study.trials if path in trial.values}
    if not values:
        return None
    low_value, high_value = min(values.values()), max(values.values())
    if high_value > low_value:
        log_axis(chart, "xaxis", low_value, high_value, numbers.value, most=4, pad=0.06)
    else:
        chart.update_xaxes(nticks=4)
    _marks(chart, study, values, 7, path)
    if study.best and study.best.number in values:
        chart.add_vline(x=values[study.best.number], line={"color": BEST, "width": 1, "dash": "dot"}, layer="below")
    chart.update_yaxes(range=[low - 0.06 * (high - low), top + 0.03 * (high - low)], nticks=4)
    chart.update_layout(
        font={"color": MUTED, "size": 11}, hoverlabel={"font": {"family": "var(--sans)", "color": INK, "size": 12}}
    )
    return chart
