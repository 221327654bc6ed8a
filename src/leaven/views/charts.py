"""Build plotly charts and their parts (axes, lines, dots, labels) as plain dictionaries.

Colours are CSS variables, such as ``var(--ink)``, which page.js replaces with the colours of the light or dark theme.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import Any

import numpy as np
from numpy.typing import NDArray

from leaven.views import numbers

Figure = dict[str, Any]
Point = tuple[float, float]
Points = Iterable[tuple[float, float | None]]
Spell = Callable[[float], str]
Array = NDArray[np.float64]
MUTED, INK, PAPER = "var(--muted)", "var(--ink)", "var(--paper)"
ACCENT, BAD, UNSURE = "var(--transferred)", "var(--bad)", "var(--unsure)"

_AXIS = {
    "gridcolor": "var(--grid)",
    "linecolor": "var(--line)",
    "tickcolor": "var(--line)",
    "zeroline": False,
    "ticks": "outside",
    "ticklen": 4,
    "showline": True,
    "title": {"standoff": 8},
}
_HOVER = "%{hovertext}<extra></extra>"
TEMPLATE: Figure = {
    "layout": {
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
        # The title of a figure is the title of its y axis, written above the axis.
        "title": {
            "x": 0,
            "xref": "container",
            "y": 1,
            "yanchor": "top",
            "pad": {"t": 4},
            "font": {"size": 12, "color": MUTED},
        },
        "xaxis": _AXIS | {"showgrid": False},
        "yaxis": _AXIS | {"showline": False, "ticks": "", "automargin": True, "nticks": 6},
        "annotationdefaults": {"showarrow": False, "font": {"size": 12, "color": INK}},
    },
    "data": {
        "scatter": [{"hovertemplate": _HOVER, "marker": {"line": {"color": PAPER, "width": 1}}}],
        "bar": [{"hovertemplate": _HOVER, "marker": {"line": {"color": PAPER, "width": 0.5}}}],
    },
}


def text(written: str) -> str:
    """Escape a user's text for plotly, so that tags and %{...} are shown literally."""
    return escape(written, quote=False).replace("%{", "%&#123;")


def hue(number: int) -> str:
    """Return one of the nine categorical colours of the style sheet. The numbers 0 and 9 give the same colour."""
    return f"var(--hue-{number % 9 + 1})"


def figure(
    x_title: str,
    y_title: str,
    traces: Iterable[Figure],
    *,
    x: Figure | None = None,
    y: Figure | None = None,
    shapes: Iterable[Figure] = (),
    notes: Iterable[Figure] = (),
    **layout: Any,
) -> Figure:
    """Return a plotly chart of ``traces``. ``y_title`` is the title above the chart.

    ``x`` and ``y`` are settings of the axes, ``notes`` are annotations. The two titles are escaped. Pass all other
    text from a user through :func:`text` first.
    """
    axes = {"xaxis": {"title": {"text": text(x_title)}, **(x or {})}, "yaxis": y or {}}
    marks = {"shapes": list(shapes), "annotations": list(notes)}
    return {"data": list(traces), "layout": {"title": {"text": text(y_title)}, **axes, **marks, **layout}}


def line(
    points: Points,
    colour: str,
    width: float = 2,
    *,
    size: float = 0,
    dash: str = "solid",
    shape: str = "linear",
    **style: Any,
) -> Figure:
    """Return a line through ``points`` as a trace. A ``size`` above 0 adds dots of this size in pixels."""
    looks = {"color": colour, "width": width, "dash": dash, "shape": shape}
    if size:
        return _trace(points, "lines+markers", line=looks, **{"marker": {"color": colour, "size": size}} | style)
    return _trace(points, "lines", line=looks, **style)


def dots(points: Points, colour: str, size: float = 8, *, marker: Figure | None = None, **style: Any) -> Figure:
    """Return a trace of dots. ``marker`` adds keys of plotly's markers, such as ``symbol``."""
    return _trace(points, "markers", marker={"color": colour, "size": size} | (marker or {}), **style)


def _trace(points: Points, mode: str, **style: Any) -> Figure:
    if "hovertext" not in style and "hovertemplate" not in style:
        style["hoverinfo"] = "skip"
    x, y = zip(*points, strict=True) if (points := list(points)) else ((), ())
    return {"type": "scatter", "x": list(map(short, x)), "y": list(map(short, y)), "mode": mode, **style}


def short(value: float | None) -> float | None:
    """Return a float with six significant digits, to keep pages small. Integers and None stay."""
    return value if value is None or isinstance(value, int) else float(f"{value:.6g}")


def log_axis(low: float, high: float, spell: Spell, *, most: int = 6, pad: float = 0.02, **more: Any) -> Figure:
    """Return a log axis with up to ``most`` ticks. The margin at each end is ``pad`` times the length of the axis."""
    room = (math.log10(high) - math.log10(low)) * pad or 0.05
    places, labels = numbers.log_ticks(low * 10**-room, high * 10**room, spell, most)
    ends = [math.log10(low) - room, math.log10(high) + room]
    return {"type": "log", "range": ends, "tickvals": places, "ticktext": labels, **more}


def measured_axis(values: Iterable[float], spell: Spell) -> Figure:
    """Return a logarithmic axis with ticks at ``values``. At most 8 values get a tick."""
    places = sorted(set(values))
    shown = places[:: -(-len(places) // 8)]
    return log_axis(places[0], places[-1], spell, tickvals=shown, ticktext=list(map(spell, shown)))


def linear_axis(low: float, high: float, spell: Spell, *, most: int = 6, pad: float = 0.02) -> Figure:
    """Return a linear axis. The arguments are as in :func:`log_axis`."""
    places, room = numbers.linear_ticks(low, high, most), pad * (high - low)
    return {"range": [low - room, high + room], "tickvals": places, "ticktext": list(map(spell, places))}


def mark_line(axis: str, at: float, colour: str = INK, dash: str = "dot", **more: Any) -> Figure:
    """Return a line across the chart where ``axis`` (x or y) is ``at``. By default, it is behind the traces."""
    looks = {"color": colour, "width": 1, "dash": dash}
    return {"type": "line", "line": looks, "layer": "below", **_across(axis, at, at), **more}


def mark_band(axis: str, low: float, high: float, colour: str) -> Figure:
    """Return a band across the chart from ``low`` to ``high`` on ``axis`` (x or y), behind everything else."""
    return {"type": "rect", "fillcolor": colour, "line": {"width": 0}, "layer": "below", **_across(axis, low, high)}


def _across(axis: str, low: float, high: float) -> Figure:
    other = "y" if axis == "x" else "x"
    return {f"{axis}0": low, f"{axis}1": high, f"{other}ref": "paper", f"{other}0": 0, f"{other}1": 1}


def bars(
    low: Sequence[float | None],
    middle: Sequence[float | None],
    high: Sequence[float | None],
    colour: str,
    **more: Any,
) -> Figure:
    ends = {"array": list(map(_minus, high, middle)), "arrayminus": list(map(_minus, middle, low))}
    return {"type": "data", "symmetric": False, **ends, "color": colour, **more}


def _minus(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a - b


def smooth(x: Sequence[float], y: Sequence[float], share: float = 0.06) -> Array:
    """Return the values ``y``, smoothed: each is replaced by the value of a line fitted to its neighbours.

    Point i has about ``share`` * i neighbours on each side, but at least 2: on a logarithmic axis, later points are
    closer together. Unlike a moving average, the line does not lag where the curve falls.
    """
    u, v = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
    n = len(u)
    if n < 3:
        return v
    u, shift = u - u.mean(), v.mean()
    v = v - shift
    index = np.arange(n)
    half = np.maximum(2, (index * share).astype(int))
    low, high = np.maximum(index - half, 0), np.minimum(index + half + 1, n)

    def window(values: Array) -> Array:
        total: Array = np.concatenate(([0.0], np.cumsum(values)))
        means: Array = (total[high] - total[low]) / (high - low)
        return means

    mean_u, mean_v = window(u), window(v)
    spread = window(u * u) - mean_u**2
    slope = np.divide(window(u * v) - mean_u * mean_v, spread, out=np.zeros(n), where=spread > 1e-12)
    line: Array = mean_v + slope * (u - mean_u) + shift
    return line


def thin(points: Sequence[Point], most: int, *, logarithmic: bool = True) -> list[Point]:
    """Return at most ``most`` points, with both ends, evenly spaced on a log or linear axis."""
    if len(points) <= most:
        return list(points)
    x = np.array([x for x, _ in points])
    places = np.log(np.maximum(x, 1)) if logarithmic else x
    wanted = np.linspace(places[0], places[-1], most)
    return [points[i] for i in np.unique(np.minimum(np.searchsorted(places, wanted), len(x) - 1))]


def corners(points: Sequence[Point]) -> list[Point]:
    """Return the ends of a step function, and the points before and after each of its changes."""
    last = len(points) - 1
    return [
        (x, y) for i, (x, y) in enumerate(points) if i in {0, last} or y != points[i - 1][1] or y != points[i + 1][1]
    ]
