"""Draw the charts of a study: trials in order, loss curves, slices through the best point, and cost.

A point is a set of hyperparameter values. The start is the point from which the search began. The surrogate is a
model that is fitted to the trials and predicts the loss of a point.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from leaven.tuning.study_document import PRUNED, Coordinate, StudyTrial
from leaven.views import charts, numbers, points
from leaven.views.charts import ACCENT, BAD, MUTED, Figure, Point
from leaven.views.folders import StudyView


@dataclass(frozen=True)
class TrialMark:
    label: str
    symbol: str  # plotly's name of the symbol; the macro `mark` in search.html.j2 draws it in legends
    colour: str
    size: int = 9
    line: float = 1.7  # line width of open symbols, or of the edge of filled ones

    def on(self, at: Sequence[Point], hover: Sequence[str]) -> Figure:
        looks = {"symbol": self.symbol, "line": {"width": self.line}}
        return charts.dots(at, self.colour, self.size, marker=looks, cliponaxis=False, hovertext=hover)


MARKS = {
    "complete": TrialMark("ended", "circle", MUTED, 8, 1.0),
    PRUNED: TrialMark("pruned, at its predicted loss", "triangle-down-open", "var(--hue-6)"),
    "diverged": TrialMark("diverged or failed", "x-thin-open", BAD),
    "noise": TrialMark("the start again, other seeds", "circle-open", "var(--copied)", 8),
    "rerun": TrialMark("the best few again, other seeds", "diamond-open", "var(--hue-5)"),
    "best": TrialMark("best", "circle", ACCENT, 12, 1.0),
}
ANSWER = TrialMark("the answer", "diamond", ACCENT, 10, 1.0)
SEEN = 0.05  # a slice shows the probability of divergence only if the largest probability is above this
PANELS = 12  # largest number of slices
SAME = 1.02  # numbers of tokens that differ by at most this factor count as equal


def by_kind(study: StudyView) -> dict[str, list[StudyTrial]]:
    """Return the trials that have ended, grouped by kind (a key of `MARKS`). Failed trials count as diverged."""
    found: dict[str, list[StudyTrial]] = {name: [] for name in MARKS}
    for trial in study.trials:
        if trial.state in {"diverged", "failed"}:
            found["diverged"].append(trial)
        elif trial.loss is None:
            continue
        elif study.best and trial.number == study.best.number:
            found["best"].append(trial)  # whatever its purpose was
        elif trial.purpose != "search":
            found["noise" if points.at_start(trial) else trial.purpose].append(trial)
        else:
            found[trial.state].append(trial)
    return {name: trials for name, trials in found.items() if trials}


def window(study: StudyView) -> tuple[float, float]:
    """Return the lowest and highest loss on the axis of the search chart. Higher losses are drawn at its edge."""
    losses = sorted(trial.loss for trial in study.trials if trial.state == "complete" and trial.loss is not None)
    low, median = losses[0], losses[len(losses) // 2]
    floor = study.noise_floor or 0.0
    high = min(losses[-1], median + 4 * max(median - low, floor, 1e-3))
    high = max(high, (study.start_loss or high) + 2 * floor)
    if study.best:
        below, above = study.interval or (study.best.loss, study.best.loss)
        low, high = min(low, study.best.loss - 1.5 * floor, below), max(high, above)
    return low, high + 0.1 * max(high - low, 1e-3)


def hover(trial: StudyTrial, study: StudyView) -> str:
    lines = [f"<b>trial {trial.number}</b>"]
    if trial.loss is not None:
        lines.append(f"{numbers.loss(trial.loss)} nats per token{' predicted' if trial.state == PRUNED else ''}")
    if trial.state != "complete":
        lines.append(charts.text(f"{trial.state} {points.share(trial, study)}".strip()))
    return "<br>".join([*lines, *(charts.text(part) for part in points.summary(trial, study, 150).split(", "))])


def search(study: StudyView) -> Figure:
    """Draw the losses of all trials in order, the lowest loss so far as a line, and the best point at the right."""
    low, top = window(study)
    first, last = study.trials[0].number, study.trials[-1].number
    room, ticks = 0.03 * max(last - first, 1) + 0.2, numbers.linear_ticks(first, max(last, first + 1), 10)
    best, start, shapes = study.best, study.start_loss, []
    if best and study.noise_floor:
        shapes.append(
            charts.mark_band("y", best.loss - study.noise_floor, best.loss + study.noise_floor, "var(--band)")
        )
    if start is not None and low <= start <= top:
        colour = MARKS["noise"].colour
        label = {"text": "the start", "textposition": "end", "font": {"size": 11, "color": colour}}
        shapes.append(charts.mark_line("y", start, colour, label=label))
    searched = [
        (trial.number, trial.loss)
        for trial in study.trials
        if trial.state == "complete" and trial.purpose == "search" and trial.loss is not None
    ]
    lowest = np.minimum.accumulate([top, *(loss for _, loss in searched)])[1:]
    steps = [*zip([number for number, _ in searched], lowest, strict=True)]
    traces = [charts.line([*steps, *((last, loss) for _, loss in steps[-1:])], ACCENT, shape="hv")]
    for name, trials in by_kind(study).items():
        losses = [math.inf if trial.loss is None or name == "diverged" else trial.loss for trial in trials]
        at = [(trial.number, min(loss, top)) for trial, loss in zip(trials, losses, strict=True)]
        traces.append(MARKS[name].on(at, [hover(trial, study) for trial in trials]))
    if best:
        text = f"<b>the answer</b><br>{numbers.loss(best.loss)} nats per token<br>fresh seeds: {best.fresh}"
        answer = ANSWER.on([(last + 1.2 * room, best.loss)], [text])
        if study.interval:
            answer["error_y"] = charts.bars([study.interval[0]], [best.loss], [study.interval[1]], ACCENT, width=4)
        traces.append(answer)
    return charts.figure(
        "trial",
        "loss, nats per token",
        traces,
        x={"range": [first - room, last + 2 * room], "tickvals": [n for n in ticks if n == int(n)]},
        y={"range": [low - 0.05 * (top - low), top + 0.02 * (top - low)]},
        shapes=shapes,
    )


def slices(study: StudyView) -> list[tuple[Coordinate, Figure]]:
    """Draw the predicted loss over each of the most important hyperparameters, all with the same y axis."""
    losses = [p.loss for each in study.coordinates for p in each.slice]
    largest = max((abs(each.gain) for each in study.coordinates), default=0.0)
    wanted = max(2.5 * largest, 8 * (study.noise_floor or 0.0), 1e-3)
    height = min(wanted, max(losses, default=wanted)) or wanted
    depth = max(min([0.0, *losses]), -height)
    shown = [coordinate for coordinate in study.coordinates if coordinate.slice][:PANELS]
    return [(coordinate, _slice(study, coordinate, depth, height)) for coordinate in shown]


def _slice(study: StudyView, coordinate: Coordinate, depth: float, height: float) -> Figure:
    """Draw the predicted loss over one hyperparameter, in nats above the loss of the best point.

    The chart reaches from ``depth`` <= 0 to ``height``. The band is one standard deviation on each side.
    """
    dimension = study.dimension(coordinate.path)
    bottom, top = depth - 0.18 * (height - depth), height + 0.08 * (height - depth)
    x = [round(p.octaves, 3) for p in coordinate.slice]
    room = 0.02 * (x[-1] - x[0]) + 0.02
    low, high = max(dimension.low, x[0]) - room, min(dimension.high, x[-1]) + room

    def between(first: Sequence[float], second: Sequence[float], colour: str) -> list[Figure]:
        lines = [[(at, min(y, 3 * height)) for at, y in zip(x, ys, strict=True)] for ys in (first, second)]
        return [charts.line(lines[0], MUTED, 0), charts.line(lines[1], MUTED, 0, fill="tonexty", fillcolor=colour)]

    traces = []
    if any(p.risk > SEEN for p in coordinate.slice):
        hill = [bottom + p.risk * (top - bottom) for p in coordinate.slice]
        traces += between([bottom] * len(x), hill, "var(--risk)")
    above, below = ([p.loss + sign * p.deviation for p in coordinate.slice] for sign in (1, -1))
    traces += between(above, below, "var(--band)")
    hovers = [
        f"<b>{charts.text(points.change(dimension, p.octaves))}</b><br>"
        f"{numbers.delta(p.loss)} ± {p.deviation:.4f} nats" + (f"<br>{p.risk:.0%} diverge" if p.risk > 0.005 else "")
        for p in coordinate.slice
    ]
    line = [(at, min(max(p.loss, depth), 3 * height)) for at, p in zip(x, coordinate.slice, strict=True)]
    traces.append(charts.line(line, ACCENT, hovertext=hovers))
    for state, y, colour, symbol in (
        ("complete", depth - 0.15 * (height - depth), MUTED, "line-ns-open"),
        ("diverged", height, MARKS["diverged"].colour, "x-thin-open"),
    ):
        at = {  # trials with the same value share one mark
            round(trial.octaves[coordinate.path], 2)
            for trial in study.trials
            if trial.octaves and trial.state == state and trial.purpose == "search"
        }
        looks = {"symbol": symbol, "opacity": 0.5}
        traces.append(charts.dots([(place, y) for place in sorted(at)], colour, 7, marker=looks, cliponaxis=False))
    traces.append(charts.dots([(coordinate.best, 0.0)], ACCENT, 9))
    every = 2 ** math.ceil(math.log2(max((high - low) / 3.5, 1)))
    ticks = [place for place in range(math.ceil(low), math.floor(high) + 1) if place % every == 0]
    labels = [charts.text(points.change(dimension, place)) for place in ticks]
    return charts.figure(
        "",
        "",
        traces,
        x={"range": [low, high], "tickvals": ticks, "ticktext": labels, "tickangle": 0},
        y={"range": [bottom, top], "nticks": 4},
        shapes=[
            charts.mark_band("x", max(coordinate.flat[0], low), min(coordinate.flat[1], high), "var(--shade-band)"),
            charts.mark_line("x", 0, MUTED),
        ],
        margin={"l": 44, "r": 12, "t": 8, "b": 26},
        font={"size": 11},
    )


Curves = Mapping[int, Sequence[Point]]  # points (tokens, loss) by the number of the trial


def known_curves(study: StudyView) -> Curves:
    """Return the loss curves by trial number, without points at 0 tokens and curves of fewer than two points."""
    curves = {trial.number: [point for point in trial.curve if point[0] > 0] for trial in study.trials}
    return {number: curve for number, curve in curves.items() if len(curve) > 1}


def curves(study: StudyView, known: Curves, title: str) -> Figure:
    most = 60 if len(known) <= 150 else 30
    traces = []
    for name, trials in by_kind(study).items():
        drawn = [(trial, known[trial.number]) for trial in trials if trial.number in known]
        if name == "best":
            whose = f"<b>trial {trials[0].number}, the best</b><br>%{{y:.4f}} nats per token<extra></extra>"
            traces += [charts.line(curve, ACCENT, 2.5, hovertemplate=whose) for _, curve in drawn]
            continue
        # All lines are one trace with gaps, because hundreds of traces are slow to draw.
        lines = [point for _, curve in drawn for point in [*charts.thin(curve, most), (curve[-1][0], None)]]
        faint = max(0.5 * min(1.0, 50 / max(len(drawn), 1)), 0.12)
        traces.append(charts.line(lines, MARKS[name].colour, 1, opacity=faint))
        if name in {PRUNED, "diverged"}:
            ends, hovers = [curve[-1] for _, curve in drawn], [hover(trial, study) for trial, _ in drawn]
            traces.append(MARKS[name].on(ends, hovers))
    first, end = min(curve[0][0] for curve in known.values()), max(curve[-1][0] for curve in known.values())
    losses = [loss for curve in known.values() for tokens, loss in curve if tokens > 0.02 * end]
    low, high = np.quantile(losses, [0.005, 0.98]).tolist()
    room = 0.05 * (high - low) or 0.1
    x_axis = charts.log_axis(first, end, numbers.tick)
    over = "tokens consumed" if study.progress == "tokens" else study.progress
    return charts.figure(over, title, traces, x=x_axis, y={"range": [low - room, high + room]})


def front(study: StudyView) -> Figure | None:
    """Draw final losses over tokens, with the Pareto front. Return None if the front has a single run length."""
    tokens = [one.tokens for one in study.front]
    if len(tokens) < 2 or max(tokens) <= SAME * min(tokens):
        return None

    def label(number: int, loss: float, tokens: int) -> str:
        return f"<b>trial {number}</b><br>{loss:.4f} nats per token<br>{numbers.quantity(tokens)} tokens"

    ends = [
        (trial.number, loss, at)
        for trial in study.trials
        for at, loss in trial.branches or ((trial.tokens, trial.loss),)
        if trial.state == "complete" and at and loss is not None
    ]
    steps = sorted((one.tokens, one.loss, label(one.number, one.loss, one.tokens)) for one in study.front)
    dots = MARKS["complete"].on([(at, loss) for _, loss, at in ends], [label(*end) for end in ends])
    hovers = [text for _, _, text in steps]
    line = charts.line([(at, loss) for at, loss, _ in steps], ACCENT, shape="hv", size=10, hovertext=hovers)
    traces = [dots, line]
    if study.best and study.best.fresh and study.best_trial:
        whole = max((at for at, _ in study.best_trial.branches), default=study.best_trial.tokens)
        traces.append(ANSWER.on([(whole, study.best.loss)], ["<b>the answer</b>, mean over fresh seeds"]))
    lengths = [*tokens, *(at for _, _, at in ends)]
    axis = charts.log_axis(min(lengths), max(lengths), numbers.tick, pad=0.06)
    return charts.figure("tokens", "validation loss, nats per token", traces, x=axis)
