"""How trials are drawn: a mark a kind, the key that tells them apart, and what they say when pointed at."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from leaven.tuning.document import StudyTrial
from leaven.views import numbers, points
from leaven.views.figures import MUTED, PAPER, plotly, text
from leaven.views.html import Html, element
from leaven.views.story import Study

if TYPE_CHECKING:
    import plotly.graph_objects as go

BEST, BAD, NOISE, RERUN = "var(--transferred)", "var(--bad)", "var(--copied)", "var(--hue-5)"
STOPPED = "var(--hue-6)"


@dataclass(frozen=True)
class Mark:
    """How a kind of trial is drawn, and what the key above a chart calls it."""

    told: str
    symbol: str
    colour: str
    size: int = 8
    line: float = 0.0
    opacity: float = 1.0

    def on(self, chart: "go.Figure", x: Sequence[float], y: Sequence[float], hover: Sequence[str]) -> None:
        """Draw the mark at points of a chart, each of which says its ``hover`` when pointed at."""
        edge = {"color": self.colour if self.line else PAPER, "width": self.line or 1.0}
        marker = {
            "symbol": self.symbol,
            "color": self.colour,
            "size": self.size,
            "opacity": self.opacity,
            "line": edge,
        }
        chart.add_trace(
            plotly().Scatter(
                x=list(x),
                y=[float(f"{value:.6g}") for value in y],
                mode="markers",
                marker=marker,
                cliponaxis=False,
                hovertext=list(hover),
                hovertemplate="%{hovertext}<extra></extra>",
            )
        )

    @property
    def picture(self) -> Html:
        """The same mark in a line of text."""
        stroke = {"stroke": self.colour, "stroke_width": 1.7, "fill": "none"}
        solid = {"fill": self.colour}
        drawn: dict[str, tuple[str, dict[str, Any]]] = {
            "circle": ("circle", {"cx": 7, "cy": 7, "r": 4} | solid),
            "circle-open": ("circle", {"cx": 7, "cy": 7, "r": 4} | stroke),
            "diamond": ("path", {"d": "M7 2L12 7L7 12L2 7Z"} | solid),
            "diamond-open": ("path", {"d": "M7 2L12 7L7 12L2 7Z"} | stroke),
            "triangle-down-open": ("path", {"d": "M2.5 4H11.5L7 11.5Z"} | stroke),
            "triangle-up": ("path", {"d": "M2.5 11H11.5L7 3Z"} | solid),
            "x-thin": ("path", {"d": "M3 3L11 11M11 3L3 11"} | stroke),
            "line": ("path", {"d": "M0 7H14"} | stroke),
        }
        tag, attributes = drawn[self.symbol]
        return element(
            "svg", element(tag, **attributes), width=14, height=14, viewBox="0 0 14 14", aria_hidden="true"
        )


MARKS = {
    "complete": Mark("ended", "circle", MUTED, 8, opacity=0.75),
    "beyond": Mark("ended above the chart", "triangle-up", MUTED, 9),
    "stopped": Mark("stopped early, at the loss expected of it", "triangle-down-open", STOPPED, 9, 1.7),
    "diverged": Mark("diverged or failed", "x-thin", BAD, 9, 2.0),
    "noise": Mark("the start again, other seeds", "circle-open", NOISE, 8, 1.7),
    "rerun": Mark("the best few again, other seeds", "diamond-open", RERUN, 9, 1.7),
    "best": Mark("best", "circle", BEST, 12),
}


def by_kind(study: Study) -> dict[str, list[StudyTrial]]:
    """Trials by their mark, in the order in which they are drawn; those that still run have none."""
    found: dict[str, list[StudyTrial]] = {name: [] for name in MARKS}
    top = edge(study)
    for trial in study.trials:
        name = _kind(trial, study, top)
        if name is not None:
            found[name].append(trial)
    return {name: trials for name, trials in found.items() if trials}


def _kind(trial: StudyTrial, study: Study, top: float) -> str | None:
    if trial.state in {"diverged", "failed"}:
        return "diverged"
    if trial.loss is None:
        return None
    if study.best and trial.number == study.best.number:
        return "best"  # which may have been run first among the reruns, where all trials together pointed
    if trial.purpose != "search":
        return "noise" if points.at_start(trial) else trial.purpose
    if trial.state == "stopped":
        return "stopped"
    return "beyond" if trial.loss > top else "complete"


def key(study: Study) -> Html:
    """What the marks and lines of the chart of trials are."""
    entries = [(MARKS[name], len(trials)) for name, trials in by_kind(study).items() if name != "best"]
    marks = [element("span", mark.picture, f"{mark.told} ({count})") for mark, count in entries]
    lines = []
    if study.best:
        lines += [element("span", Mark("", "line", BEST).picture, "lowest so far")]
        lines += [
            element("span", Mark("", "diamond", BEST).picture, "the answer" + (", 95%" if study.interval else ""))
        ]
    return element("p", marks, lines, class_="key")


def window(study: Study) -> tuple[float, float]:
    """The losses a chart shows: the start's, and all but the far outliers, which stand at the upper edge instead."""
    losses = sorted(trial.loss for trial in study.trials if trial.state == "complete" and trial.loss is not None)
    if not losses:
        return 0.0, 1.0
    low, median = losses[0], losses[len(losses) // 2]
    floor = study.noise_floor or 0.0
    high = min(losses[-1], median + 4 * max(median - low, floor, 1e-3))
    high = max(high, (study.start_loss or high) + 2 * floor)
    if study.best:
        # Its whole interval, but for one that says nothing: that would press all else into a line.
        below = study.interval[0] if study.interval else study.best.loss
        low = min(low, study.best.loss - 1.5 * floor, max(below, study.best.loss - (high - low)))
    return low, max(high, low + 1e-3)


def edge(study: Study) -> float:
    """The loss at which diverged trials and those above the window are drawn."""
    low, high = window(study)
    return high + 0.10 * (high - low)


def hover(trial: StudyTrial, study: Study) -> str:
    """What a trial says of itself: its loss, and what it changes."""
    lines = [f"<b>trial {trial.number}</b>"]
    if trial.loss is not None:
        lines.append(f"{numbers.loss(trial.loss)} nats per token{' expected' if trial.state == 'stopped' else ''}")
    if trial.state != "complete":
        lines.append(f"{trial.state} {points.share(trial, study)}".strip())
    return "<br>".join([*lines, *(text(part) for part in points.told(trial, study, 150).split(", "))])
