"""The charts of a search: its trials in order, their curves, loss against cost, and who did what when."""

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from leaven.views import numbers, points
from leaven.views.curves import smooth, thin
from leaven.views.figures import INK, MUTED, PAPER, figure, log_axis, plotly
from leaven.views.story import Study
from leaven.views.trial_marks import BEST, MARKS, NOISE, Mark, by_kind, edge, hover, window

if TYPE_CHECKING:
    import plotly.graph_objects as go


def search(study: Study) -> "go.Figure":
    """Trials in the order they were started, the lowest so far as a line, the noise as a band round the answer.

    The answer, a mean over fresh seeds, stands with its interval behind the last trial: it is no lucky seed.
    """
    go = plotly()
    chart = figure("trial", "loss, nats per token")
    low, high = window(study)
    top = edge(study)
    first, last = study.trials[0].number, study.trials[-1].number
    room = 0.03 * max(last - first, 1) + 0.2
    best = study.best
    if best and study.noise_floor:
        at = {"y0": best.loss - study.noise_floor, "y1": best.loss + study.noise_floor}
        chart.add_hrect(**at, fillcolor="var(--band)", line_width=0, layer="below")
    if study.start_loss is not None and low <= study.start_loss <= top:
        chart.add_hline(y=study.start_loss, line={"color": NOISE, "width": 1, "dash": "dot"}, layer="below")
        place = {"x": 1, "xref": "paper", "xanchor": "right", "y": study.start_loss, "yanchor": "bottom"}
        chart.add_annotation(**place, text="the start", showarrow=False, font={"size": 11, "color": NOISE})
    leaders, lowest = [], math.inf
    for trial in study.trials:
        if trial.state == "complete" and trial.purpose == "search" and (trial.loss or math.inf) < lowest:
            lowest = trial.loss or math.inf
            leaders.append((trial.number, lowest))
    if leaders:
        line = {"color": BEST, "width": 2, "shape": "hv"}
        x, y = [number for number, _ in leaders] + [last], [loss for _, loss in leaders] + [lowest]
        chart.add_trace(go.Scatter(x=x, y=[min(v, top) for v in y], mode="lines", line=line, hoverinfo="skip"))
    for name, trials in by_kind(study).items():
        y = [top if trial.loss is None or name == "diverged" else min(trial.loss, top) for trial in trials]
        MARKS[name].on(chart, [trial.number for trial in trials], y, [hover(trial, study) for trial in trials])
    if best:
        _answer(chart, study, last + 1.2 * room)
    places = [place for place in numbers.linear_ticks(first, max(last, first + 1), 10) if place == int(place)]
    chart.update_xaxes(range=[first - room, last + 2 * room], tickvals=places)
    chart.update_yaxes(range=[low - 0.06 * (high - low), top + 0.02 * (high - low)])
    return chart


def _answer(chart: "go.Figure", study: Study, x: float) -> None:
    assert study.best is not None
    bar = None
    judged = f"fresh seeds: {study.best.fresh}"
    if not study.best.fresh:
        judged = "the lowest of the search; expect worse" if study.unjudged else "of runs that chose it"
    said = f"<b>the answer</b><br>{numbers.loss(study.best.loss)} nats per token<br>{judged}"
    if study.interval:
        low, high = study.interval
        said += f"<br>95%: {low:.4f} to {high:.4f}"
        up, down = [high - study.best.loss], [study.best.loss - low]
        bar = {"type": "data", "symmetric": False, "array": up, "arrayminus": down, "color": BEST, "width": 4}
    marker = {"symbol": "diamond", "size": 9, "color": BEST}
    answer = plotly().Scatter(
        x=[x], y=[study.best.loss], error_y=bar, mode="markers", marker=marker, hovertext=[said],
        hovertemplate="%{hovertext}<extra></extra>", cliponaxis=False,
    )  # fmt: skip
    chart.add_trace(answer)


def small_figure(**layout: Any) -> "go.Figure":
    """A chart of a panel: no titles, what they would say stands above all panels."""
    chart = figure("", "", margin={"l": 44, "r": 12, "t": 8, "b": 26})
    chart.layout.annotations = ()
    hover = {"font": {"family": "var(--sans)", "color": INK, "size": 12}}
    chart.update_layout(font={"color": MUTED, "size": 11}, hoverlabel=hover)
    return chart.update_layout(layout)


Curves = dict[int, list[tuple[int, float]]]  # by the trial's number


def known_curves(study: Study) -> Curves:
    """The curves with something to draw."""
    curves = {
        trial.number: [(tokens, loss) for tokens, loss in trial.curve if tokens > 0 and math.isfinite(loss)]
        for trial in study.trials
    }
    return {number: curve for number, curve in curves.items() if len(curve) > 1}


def against_best(study: Study) -> Curves:
    """The curves less that of the best trial at the same tokens; nothing where that has none."""
    known = known_curves(study)
    best = known.get(study.best.number) if study.best else None
    if best is None:
        return {}
    x, y = np.array(best, dtype=float).T
    ahead = {}
    for number, curve in known.items():
        shared = [(tokens, loss) for tokens, loss in curve if x[0] <= tokens <= x[-1]]
        level = np.interp(np.log([max(tokens, 1) for tokens, _ in shared]), np.log(x), y)
        above = smooth([math.log(tokens) for tokens, _ in shared], [loss for _, loss in shared] - level, 0.15)
        ahead[number] = [(tokens, float(loss)) for (tokens, _), loss in zip(shared, above, strict=True)]
    return {number: curve for number, curve in ahead.items() if len(curve) > 1}


def curves(study: Study, known: Curves, title: str) -> "go.Figure":
    """Training loss of every trial over tokens, the best strong, stopped and diverged ones to where they came."""
    go = plotly()
    chart = figure("tokens consumed", title)
    most = 60 if len(known) <= 150 else 30
    best = study.best.number if study.best else None
    for name, trials in by_kind(study).items():
        drawn = [(trial, known[trial.number]) for trial in trials if trial.number in known and trial.number != best]
        if not drawn:
            continue
        x, y = _joined([[curve[i] for i in thin([tokens for tokens, _ in curve], most)] for _, curve in drawn])
        line = {"color": MARKS[name].colour, "width": 1}
        faint = max(0.5 * min(1.0, 50 / len(drawn)), 0.12)
        chart.add_trace(go.Scatter(x=x, y=y, mode="lines", line=line, opacity=faint, hoverinfo="skip"))
        if name in {"stopped", "diverged"}:
            ends = [curve[-1] for _, curve in drawn]
            said = [hover(trial, study) for trial, _ in drawn]
            MARKS[name].on(chart, [tokens for tokens, _ in ends], [loss for _, loss in ends], said)
    if best in known:
        x, y = [tokens for tokens, _ in known[best]], [round(loss, 5) for _, loss in known[best]]
        strong = {"color": BEST, "width": 2.5}
        whose = f"<b>trial {best}, the best</b><br>%{{y:.4f}} nats per token<extra></extra>"
        chart.add_trace(go.Scatter(x=x, y=y, mode="lines", line=strong, hovertemplate=whose))
    end = max(curve[-1][0] for curve in known.values())
    log_axis(chart, "xaxis", min(curve[0][0] for curve in known.values()), end, numbers.tick, most=6)
    losses = sorted(loss for curve in known.values() for tokens, loss in curve if tokens > 0.02 * end)
    low, high = losses[int(0.005 * len(losses))], losses[min(int(0.98 * len(losses)), len(losses) - 1)]
    room = 0.05 * (high - low) or 0.1
    chart.update_yaxes(range=[low - room, high + room])
    return chart


def _joined(curves: Iterable[Iterable[tuple[int, float]]]) -> tuple[list[float | None], list[float | None]]:
    """Many lines as one trace, with gaps between them: hundreds of traces are slow to draw."""
    x: list[float | None] = []
    y: list[float | None] = []
    for curve in curves:
        for tokens, loss in curve:
            x.append(tokens)
            y.append(float(f"{loss:.5g}"))
        x.append(None)
        y.append(None)
    return x, y


SAME = 1.02  # costs that differ by no more are the same


def front(study: Study) -> "go.Figure | None":
    """Loss against cost: every end of a trial as a dot, and those with no cheaper and better one as steps.

    None where all cost the same: of one duration, up to whole batches, there is nothing to choose from.
    """
    if len(study.front) < 2 or max(one.tokens for one in study.front) <= SAME * min(
        one.tokens for one in study.front
    ):
        return None
    counted = all(one.flops for one in study.front)
    chart = figure("training FLOPs" if counted else "tokens", "validation loss, nats per token")

    def told(number: int, loss: float, tokens: int) -> str:
        return f"<b>trial {number}</b><br>{loss:.4f} nats per token<br>{numbers.quantity(tokens)} tokens"

    ends = [
        (trial.flops * tokens / trial.tokens if counted else tokens, loss, told(trial.number, loss, tokens))
        for trial in study.trials
        for tokens, loss in trial.branches or ((trial.tokens, trial.loss),)
        if trial.state == "complete" and trial.tokens and loss is not None
    ]
    MARKS["complete"].on(chart, *zip(*ends, strict=True))
    steps = sorted((one.flops if counted else one.tokens, one.loss, one) for one in study.front)
    x, y = [cost for cost, _, _ in steps], [loss for _, loss, _ in steps]
    marker = {"color": BEST, "size": 10, "line": {"color": PAPER, "width": 1.5}}
    line = {"color": BEST, "width": 2, "shape": "hv"}
    said = [told(one.number, one.loss, one.tokens) for _, _, one in steps]
    style = {"mode": "lines+markers", "marker": marker, "line": line}
    hovered = {"hovertext": said, "hovertemplate": "%{hovertext}<extra></extra>"}
    chart.add_trace(plotly().Scatter(x=x, y=y, **style, **hovered))
    costs = [*x, *(cost for cost, _, _ in ends)]
    if study.best and study.best.fresh and study.best_trial and study.best_trial.tokens:
        whole = max((tokens for tokens, _ in study.best_trial.branches), default=study.best_trial.tokens)
        cost = study.best_trial.flops * whole / study.best_trial.tokens if counted else whole
        Mark("", "diamond", BEST, 12).on(chart, [cost], [study.best.loss], ["<b>the answer</b>, by fresh seeds"])
    log_axis(chart, "xaxis", min(costs), max(costs), numbers.value if counted else numbers.tick, pad=0.06)
    return chart


def timeline(study: Study) -> "go.Figure | None":
    """A row a worker, a bar a trial, from when to when it ran; None where the trials do not say."""
    ran = {
        trial.number: (trial.ended - trial.seconds, trial.ended)
        for trial in study.trials
        if trial.ended and trial.seconds and trial.worker
    }
    if not ran:
        return None
    names = points.workers(study)
    begin, end = min(begun for begun, _ in ran.values()), max(ended for _, ended in ran.values())
    span = end - begin
    unit, seconds = ("hours", 3600.0) if span > 2 * 3600 else ("minutes", 60.0) if span > 120 else ("seconds", 1.0)
    chart = figure(f"{unit} since the first trial began", "", bargap=0.25, barmode="overlay")
    for name, trials in by_kind(study).items():
        shown = [trial for trial in trials if trial.number in ran]
        if shown:
            times = [ran[trial.number] for trial in shown]
            bars = plotly().Bar(
                orientation="h",
                y=[names[trial.worker or ""] for trial in shown],
                x=[round((ended - begun) / seconds, 3) for begun, ended in times],
                base=[round((begun - begin) / seconds, 3) for begun, _ in times],
                marker={"color": MARKS[name].colour, "opacity": 0.65, "line": {"color": PAPER, "width": 1}},
                hovertext=[hover(trial, study) for trial in shown],
                hovertemplate="%{hovertext}<extra></extra>",
            )
            chart.add_trace(bars)
    rows = {"categoryorder": "array", "categoryarray": list(names.values())}
    chart.update_yaxes(autorange="reversed", showgrid=False, type="category", nticks=None, **rows)
    chart.update_xaxes(showgrid=True, range=[-0.01 * span / seconds, 1.01 * span / seconds])
    return chart
