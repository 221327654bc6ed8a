"""Draw the charts of a study: trials in order, loss curves, slices through the best point, cost, and a timeline of
the workers."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from leaven.tuning.study_document import Coordinate, StudyTrial
from leaven.views import charts, numbers, points
from leaven.views.charts import ACCENT, BAD, MUTED, PAPER, Figure, smooth, thin
from leaven.views.folders import StudyView


@dataclass(frozen=True)
class TrialMark:
    """The symbol, colour and legend label of a kind of trial."""

    label: str
    symbol: str  # symbol of plotly; the macro `mark` in search.html.j2 draws the same symbol in text
    colour: str
    size: int = 8
    line: float = 0.0  # line width of open symbols
    opacity: float = 1.0

    def on(self, x: Sequence[float], y: Sequence[float], hover: Sequence[str]) -> Figure:
        """Return a trace that draws points with this mark."""
        edge = {"color": self.colour if self.line else PAPER, "width": self.line or 1.0}
        looks = {"symbol": self.symbol, "color": self.colour, "size": self.size, "opacity": self.opacity}
        return charts.scatter(x, y, "markers", marker=looks | {"line": edge}, cliponaxis=False, hovertext=list(hover))


MARKS = {
    "complete": TrialMark("ended", "circle", MUTED, 8, opacity=0.75),
    "beyond": TrialMark("ended above the chart", "triangle-up", MUTED, 9),
    "stopped": TrialMark("stopped early, at its predicted loss", "triangle-down-open", "var(--hue-6)", 9, 1.7),
    "diverged": TrialMark("diverged or failed", "x-thin", BAD, 9, 2.0),
    "noise": TrialMark("the start again, other seeds", "circle-open", "var(--copied)", 8, 1.7),
    "rerun": TrialMark("the best few again, other seeds", "diamond-open", "var(--hue-5)", 9, 1.7),
    "best": TrialMark("best", "circle", ACCENT, 12),
}
BLAMED = 0.15  # from this probability of divergence on, a value may have been the reason
SEEN = 0.05  # a slice does not show lower probabilities of divergence
PANELS = 12  # largest number of slices
SAME = 1.02  # costs that differ by at most this factor count as equal


def by_kind(study: StudyView) -> dict[str, list[StudyTrial]]:
    """Return a mapping from each kind of trial, such as ``diverged``, to its trials. The kinds are in the order in
    which they are drawn. Trials that are still running are left out."""
    found: dict[str, list[StudyTrial]] = {name: [] for name in MARKS}
    _, _, top = window(study)
    for trial in study.trials:
        if trial.state in {"diverged", "failed"}:
            found["diverged"].append(trial)
        elif trial.loss is None:
            continue
        elif study.best and trial.number == study.best.number:
            found["best"].append(trial)  # even if its first run was a rerun
        elif trial.purpose != "search":
            found["noise" if points.at_start(trial) else trial.purpose].append(trial)
        elif trial.state == "stopped":
            found["stopped"].append(trial)
        else:
            found["beyond" if trial.loss > top else "complete"].append(trial)
    return {name: trials for name, trials in found.items() if trials}


def window(study: StudyView) -> tuple[float, float, float]:
    """Return (lowest loss, highest loss, top) of a chart. Outliers and diverged trials are drawn at the height
    ``top``.

    The range contains the loss of the starting point and all losses that are not far outliers.
    """
    losses = sorted(trial.loss for trial in study.trials if trial.state == "complete" and trial.loss is not None)
    if not losses:
        return 0.0, 1.0, 1.1
    low, median = losses[0], losses[len(losses) // 2]
    floor = study.noise_floor or 0.0
    high = min(losses[-1], median + 4 * max(median - low, floor, 1e-3))
    high = max(high, (study.start_loss or high) + 2 * floor)
    if study.best:
        # Show the whole interval, unless it is so wide that everything else would shrink to a line.
        below = study.interval[0] if study.interval else study.best.loss
        low = min(low, study.best.loss - 1.5 * floor, max(below, study.best.loss - (high - low)))
    high = max(high, low + 1e-3)
    return low, high, high + 0.10 * (high - low)


def hover(trial: StudyTrial, study: StudyView) -> str:
    """Return the tooltip of a trial, with its loss and its changes."""
    lines = [f"<b>trial {trial.number}</b>"]
    if trial.loss is not None:
        lines.append(f"{numbers.loss(trial.loss)} nats per token{' predicted' if trial.state == 'stopped' else ''}")
    if trial.state != "complete":
        lines.append(f"{trial.state} {points.share(trial, study)}".strip())
    return "<br>".join([*lines, *(charts.text(part) for part in points.summary(trial, study, 150).split(", "))])


def search(study: StudyView) -> Figure:
    """Draw the loss of all trials in order. A line shows the lowest loss so far.

    The answer of the study is drawn to the right of the last trial, with its interval. It is the mean loss of the
    best point over fresh seeds, if there are any. A band around it shows the noise between seeds.
    """
    low, high, top = window(study)
    first, last = study.trials[0].number, study.trials[-1].number
    room = 0.03 * max(last - first, 1) + 0.2
    best, start, traces, shapes, notes = study.best, study.start_loss, [], [], []
    if best and study.noise_floor:
        shapes.append(
            charts.mark_band("y", best.loss - study.noise_floor, best.loss + study.noise_floor, "var(--band)")
        )
    if start is not None and low <= start <= top:
        colour = MARKS["noise"].colour
        shapes.append(charts.mark_line("y", start, colour, "dot", layer="below"))
        place = {"x": 1, "xref": "paper", "xanchor": "right", "y": start, "yanchor": "bottom"}
        notes.append({**place, "text": "the start", "font": {"size": 11, "color": colour}})
    lowest: list[tuple[int, float]] = []
    for trial in study.trials:
        if trial.state == "complete" and trial.purpose == "search" and trial.loss is not None:
            lowest.append((trial.number, min(trial.loss, lowest[-1][1] if lowest else math.inf)))
    if lowest:
        x, y = [number for number, _ in lowest] + [last], [min(loss, top) for _, loss in [*lowest, lowest[-1]]]
        traces.append(charts.line(x, y, ACCENT, shape="hv"))
    for name, trials in by_kind(study).items():
        y = [top if trial.loss is None or name == "diverged" else min(trial.loss, top) for trial in trials]
        hovers = [hover(trial, study) for trial in trials]
        traces.append(MARKS[name].on([trial.number for trial in trials], y, hovers))
    if best:
        judged = f"fresh seeds: {best.fresh}"
        if not best.fresh:
            judged = (
                "the lowest loss of the search; expect a higher loss"
                if study.unjudged
                else "mean of the runs by which it was chosen"
            )
        hovers = [f"<b>the answer</b><br>{numbers.loss(best.loss)} nats per token<br>{judged}"]
        answer = TrialMark("", "diamond", ACCENT, 9).on([last + 1.2 * room], [best.loss], hovers)
        if study.interval:
            answer["hovertext"][0] += "<br>95%: {:.4f} to {:.4f}".format(*study.interval)
            low_end, high_end = study.interval
            answer["error_y"] = charts.bars([low_end], [best.loss], [high_end], ACCENT, width=4)
        traces.append(answer)
    return charts.figure(
        "trial",
        "loss, nats per token",
        traces,
        x=charts.whole_numbers(first, last) | {"range": [first - room, last + 2 * room]},
        y={"range": [low - 0.06 * (high - low), top + 0.02 * (high - low)]},
        shapes=shapes,
        notes=notes,
    )


def slices(study: StudyView) -> list[tuple[Coordinate, Figure]]:
    """Draw a chart for each of the most important values, with the predicted loss as this value changes. All charts
    have the same y axis, in nats above the best point."""
    shown = [coordinate for coordinate in study.coordinates if coordinate.slice][:PANELS]
    frame = slice_frame(study)
    return [(coordinate, slice_chart(study, coordinate, frame)) for coordinate in shown]


def slice_frame(study: StudyView) -> tuple[float, float]:
    """Return the range of the y axis of slices, in nats above the best point.

    The surrogate is the model that predicts the loss. Its minimum may be below the loss of the best point, so a slice
    may go below 0. The axis includes these parts, but extends at most as far down as up.
    """
    gains = [abs(coordinate.gain) for coordinate in study.coordinates if math.isfinite(coordinate.gain)]
    losses = [
        point.loss for coordinate in study.coordinates for point in coordinate.slice if math.isfinite(point.loss)
    ]
    wanted = max(2.5 * max(gains, default=0.0), 8 * (study.noise_floor or 0.0), 1e-3)
    height = min(wanted, max(losses, default=wanted)) or wanted
    return max(min([0.0, *losses]), -height), height


def slice_chart(study: StudyView, coordinate: Coordinate, frame: tuple[float, float]) -> Figure:
    """Draw the predicted loss over one value, in nats above the best point. The x axis shows the change from the
    start.

    The line is the prediction of the surrogate, and the band around it is one standard deviation. In the grey region,
    the loss is flat within the noise. The red hill is the probability of divergence, which is 1 at the top. Crosses
    are trials that diverged. Ticks are trials that completed. ``frame`` is the range of the y axis.
    """
    dimension = study.dimension(coordinate.path)
    (depth, height), colour = frame, MARKS["diverged"].colour
    bottom, top = depth - 0.18 * (height - depth), height + 0.08 * (height - depth)
    inside = [point for point in coordinate.slice if math.isfinite(point.loss + point.deviation)]
    places, risks = [point.octaves for point in coordinate.slice], [point.risk for point in coordinate.slice]
    room = 0.02 * (max(places) - min(places)) + 0.02
    low, high = max(dimension.low, min(places)) - room, min(dimension.high, max(places)) + room
    x = [round(point.octaves, 3) for point in inside]
    traces = []

    def outline(y: Iterable[float], **fill: Any) -> None:
        traces.append(charts.line(x, y, MUTED, 0, **fill))

    if any(point.risk > SEEN for point in inside):
        outline([bottom] * len(x))
        hill = [bottom + point.risk * (top - bottom) for point in inside]
        outline(hill, fill="tonexty", fillcolor="var(--risk)")
    outline([min(point.loss + point.deviation, 3 * height) for point in inside])
    below = [min(point.loss - point.deviation, 3 * height) for point in inside]
    outline(below, fill="tonexty", fillcolor="var(--band)")
    hovers = [
        f"<b>{points.change(dimension, point.octaves)}</b>"
        f"<br>{numbers.delta(point.loss)} ± {point.deviation:.4f} nats"
        + (f"<br>{point.risk:.0%} diverge" if point.risk > 0.005 else "")
        for point in inside
    ]
    y = [min(max(point.loss, depth), 3 * height) for point in inside]
    traces.append(charts.line(x, y, ACCENT, hovertext=hovers))

    def trials(places: Iterable[float], y: float, **marker: Any) -> None:
        if at := sorted(set(places)):  # trials at the same place share one mark
            traces.append(charts.scatter(at, [y] * len(at), "markers", marker=marker, cliponaxis=False))

    at = {
        state: {
            round(trial.octaves[coordinate.path], 2)
            for trial in study.trials
            if trial.octaves and trial.state == state and trial.purpose == "search"
        }
        for state in ("complete", "diverged")
    }
    blamed = {place for place in at["diverged"] if np.interp(place, places, risks) > BLAMED}
    cross = {"symbol": "x-thin", "size": 7, "line": {"color": colour, "width": 1.6}}
    trials(at["complete"], depth - 0.15 * (height - depth), symbol="line-ns-open", size=7, color=MUTED, opacity=0.5)
    trials(at["diverged"] - blamed, height, **cross, opacity=0.3)  # these probably diverged because of another value
    trials(blamed, height, **cross)
    best = {"color": ACCENT, "size": 9, "line": {"color": PAPER, "width": 1.5}}
    traces.append(charts.scatter([coordinate.best], [0.0], "markers", marker=best))
    every = next(step for step in (1, 2, 4, 8, 16) if (high - low) / step <= 3.5)
    ticks = [place for place in range(math.ceil(low), math.floor(high) + 1) if place % every == 0]
    labels = [points.change(dimension, place) for place in ticks]
    return charts.figure(
        "",
        "",
        traces,
        x={"range": [low, high], "tickvals": ticks, "ticktext": labels, "tickangle": 0},
        y={"range": [bottom, top], "nticks": 4},
        shapes=[
            charts.mark_band("x", max(coordinate.flat[0], low), min(coordinate.flat[1], high), "var(--shade-band)"),
            charts.mark_line("x", 0, MUTED, "dot", layer="below"),
        ],
        margin={"l": 44, "r": 12, "t": 8, "b": 26},
        font={"size": 11},
    )


Curves = dict[int, list[tuple[float, float]]]  # points (tokens, loss) by the number of the trial


def known_curves(study: StudyView) -> Curves:
    """Return the loss curves of all trials that have at least two points."""
    curves = {
        trial.number: [(float(tokens), loss) for tokens, loss in trial.curve if tokens > 0 and math.isfinite(loss)]
        for trial in study.trials
    }
    return {number: curve for number, curve in curves.items() if len(curve) > 1}


def against_best(study: StudyView) -> Curves:
    """Return how far the loss curve of each trial is above the curve of the best trial at the same tokens."""
    known = known_curves(study)
    best = known.get(study.best.number) if study.best else None
    if best is None:
        return {}
    x, y = np.array(best).T
    ahead = {}
    for number, curve in known.items():
        shared = [(tokens, loss) for tokens, loss in curve if x[0] <= tokens <= x[-1]]
        level = np.interp(np.log([max(tokens, 1) for tokens, _ in shared]), np.log(x), y)
        above = smooth([math.log(tokens) for tokens, _ in shared], [loss for _, loss in shared] - level, 0.15)
        ahead[number] = [(tokens, float(loss)) for (tokens, _), loss in zip(shared, above, strict=True)]
    return {number: curve for number, curve in ahead.items() if len(curve) > 1}


def curves(study: StudyView, known: Curves, title: str) -> Figure:
    """Draw the loss curves of all trials over tokens, with the best trial highlighted. Stopped and diverged trials
    end early."""
    most = 60 if len(known) <= 150 else 30
    best = study.best.number if study.best else None
    traces = []
    for name, trials in by_kind(study).items():
        drawn = [(trial, known[trial.number]) for trial in trials if trial.number in known and trial.number != best]
        if not drawn:
            continue
        # All lines are one trace with gaps, because hundreds of traces are slow to draw.
        x: list[float | None] = []
        y: list[float | None] = []
        for _, curve in drawn:
            kept = [curve[i] for i in thin([tokens for tokens, _ in curve], most)]
            x += [*(tokens for tokens, _ in kept), None]
            y += [*(float(f"{loss:.5g}") for _, loss in kept), None]
        faint = max(0.5 * min(1.0, 50 / len(drawn)), 0.12)
        traces.append(charts.line(x, y, MARKS[name].colour, 1, opacity=faint))
        if name in {"stopped", "diverged"}:
            ends = [curve[-1] for _, curve in drawn]
            hovers = [hover(trial, study) for trial, _ in drawn]
            traces.append(MARKS[name].on([tokens for tokens, _ in ends], [loss for _, loss in ends], hovers))
    if best in known:
        whose = f"<b>trial {best}, the best</b><br>%{{y:.4f}} nats per token<extra></extra>"
        tokens_at, losses_at = [tokens for tokens, _ in known[best]], [loss for _, loss in known[best]]
        traces.append(charts.line(tokens_at, losses_at, ACCENT, 2.5, hovertemplate=whose))
    first, end = min(curve[0][0] for curve in known.values()), max(curve[-1][0] for curve in known.values())
    losses = sorted(loss for curve in known.values() for tokens, loss in curve if tokens > 0.02 * end)
    low, high = losses[int(0.005 * len(losses))], losses[min(int(0.98 * len(losses)), len(losses) - 1)]
    room = 0.05 * (high - low) or 0.1
    x_axis = charts.log_axis(first, end, numbers.tick)
    return charts.figure("tokens consumed", title, traces, x=x_axis, y={"range": [low - room, high + room]})


def front(study: StudyView) -> Figure | None:
    """Draw the loss over the cost of training. Each trial has a dot at each of its durations. The Pareto front is a
    line with steps.

    Return None if all trials have the same duration, up to rounding to whole batches.
    """
    tokens = [one.tokens for one in study.front]
    if len(tokens) < 2 or max(tokens) <= SAME * min(tokens):
        return None
    counted = all(one.flops for one in study.front)

    def label(number: int, loss: float, tokens: int) -> str:
        return f"<b>trial {number}</b><br>{loss:.4f} nats per token<br>{numbers.quantity(tokens)} tokens"

    ends = [
        (trial.flops * at / trial.tokens if counted else at, loss, label(trial.number, loss, at))
        for trial in study.trials
        for at, loss in trial.branches or ((trial.tokens, trial.loss),)
        if trial.state == "complete" and trial.tokens and loss is not None
    ]
    steps = sorted((one.flops if counted else one.tokens, one.loss, one) for one in study.front)
    x, y = [float(cost) for cost, _, _ in steps], [loss for _, loss, _ in steps]
    marker = {"color": ACCENT, "size": 10, "line": {"color": PAPER, "width": 1.5}}
    hovers = [label(one.number, one.loss, one.tokens) for _, _, one in steps]
    line = charts.line(x, y, ACCENT, shape="hv", hovertext=hovers) | {"mode": "lines+markers", "marker": marker}
    traces = [MARKS["complete"].on(*zip(*ends, strict=True)), line]
    if study.best and study.best.fresh and study.best_trial and study.best_trial.tokens:
        whole = max((at for at, _ in study.best_trial.branches), default=study.best_trial.tokens)
        cost = study.best_trial.flops * whole / study.best_trial.tokens if counted else whole
        answer = ["<b>the answer</b>, mean over fresh seeds"]
        traces.append(TrialMark("", "diamond", ACCENT, 12).on([cost], [study.best.loss], answer))
    costs = [*x, *(cost for cost, _, _ in ends)]
    axis = charts.log_axis(min(costs), max(costs), numbers.value if counted else numbers.tick, pad=0.06)
    title = "training FLOPs" if counted else "tokens"
    return charts.figure(title, "validation loss, nats per token", traces, x=axis)


def timeline(study: StudyView) -> Figure | None:
    """Draw a row for each worker. A bar in this row shows a trial from its start to its end. Return None if the times
    of trials are not known."""
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
    traces = []
    for name, trials in by_kind(study).items():
        shown = [trial for trial in trials if trial.number in ran]
        times = [ran[trial.number] for trial in shown]
        traces.append(
            {
                "type": "bar",
                "orientation": "h",
                "y": [names[trial.worker or ""] for trial in shown],
                "x": [round((ended - begun) / seconds, 3) for begun, ended in times],
                "base": [round((begun - begin) / seconds, 3) for begun, _ in times],
                "marker": {"color": MARKS[name].colour, "opacity": 0.65, "line": {"color": PAPER, "width": 1}},
                "hovertext": [hover(trial, study) for trial in shown],
            }
        )
    rows = {"type": "category", "categoryorder": "array", "categoryarray": list(names.values())}
    return charts.figure(
        f"{unit} since the first trial began",
        "",
        [trace for trace in traces if trace["y"]],
        x={"showgrid": True, "range": [-0.01 * span / seconds, 1.01 * span / seconds]},
        y={**rows, "autorange": "reversed", "showgrid": False, "nticks": 0},
        bargap=0.25,
        barmode="overlay",
    )
