"""Render the HTML page of a check, with charts, tables of verdicts, and settings."""

from itertools import cycle
from typing import Any

from leaven.documents.checks import CheckDocument, VerdictCurve
from leaven.views import charts, numbers
from leaven.views.charts import BAD, MUTED, UNSURE, Figure, Point, Points
from leaven.views.checks import SLOPES, check_tables, conclusion
from leaven.views.render import render

_COLOURS = ("var(--transferred)", "var(--copied)", "var(--untuned)", "var(--other)")
QUARTERS = [0.0, 0.25, 0.5, 0.75, 1.0]
# By the name of the check: the quantities that have a chart, and the titles of the charts.
_SLOPES = {
    "coordinates": {"change": "change of the output", "end": "output after the steps"},
    "gradients": {"start": "gradient over eps at the start", "end": "gradient over eps after the steps"},
}


def check_page(check: CheckDocument) -> str:
    draw = _slopes if check.check in SLOPES else _collapse if check.check == "collapse" else _losses
    drawn, sections = draw(check)
    return render(
        "check.html.j2",
        drawn,
        kind="check",
        title=f"{check.check} of {check.subject}",
        conclusion=conclusion(check),
        tables=check_tables(check),
        settings=[
            f"{key} = {numbers.setting(value)}" for key, value in check.settings.items() if value not in (None, [])
        ],
        **{"slopes": [], "losses": None, "collapse": None} | sections,
    )


def _slopes(check: CheckDocument) -> tuple[dict[str, Figure | None], dict[str, Any]]:
    """Return the charts of a coordinate or gradient check, and the template variables of their sections.

    A curve of gradients is divided by Adam's eps at each size, so it is flat if the rule scales eps correctly.
    """
    wanted = _SLOPES[check.check]
    drawn: dict[str, Figure | None] = {}
    sections = []
    for axis in dict.fromkeys(curve.axis for curve in check.curves):
        rows = [row for row in check.rows if row.axis == axis and row.passed is False]
        failed = {row.module: UNSURE if row.undecided else BAD for row in rows}
        curves = {(curve.module, curve.quantity): curve for curve in check.curves if curve.axis == axis}
        sections.append((axis, [(f"{axis}-{quantity}", title) for quantity, title in wanted.items()]))
        for quantity in wanted:
            lines = [
                (curve.module, points)
                for curve in curves.values()
                if curve.quantity == quantity and (points := _relative(curve, curves.get((curve.module, "eps"))))
            ]
            lines.sort(key=lambda line: line[0] in failed)  # failed modules are drawn over the others
            traces = [_line(module, points, failed.get(module, MUTED)) for module, points in lines]
            x, y = [x for _, line in lines for x, _ in line] or [1, 2], [y for _, line in lines for _, y in line]
            x_axis = charts.measured_axis(x, numbers.tick)
            y_axis = charts.log_axis(min([*y, 0.5]), max([*y, 2.0]), numbers.value, pad=0.06)
            figure = charts.figure(axis, "relative to the smallest model", traces, x=x_axis, y=y_axis)
            drawn[f"{axis}-{quantity}"] = figure
    return drawn, {"slopes": sections}


def _relative(curve: VerdictCurve, eps: VerdictCurve | None) -> list[Point]:
    """Divide a curve by ``eps`` and by its first value. Return [] if a log axis cannot show a value: 0 or missing."""
    divisors = eps.y if eps else [None] * len(curve.y)
    values = [y / e if y and e else y for y, e in zip(curve.y, divisors, strict=True)]
    known = [value for value in values if value]
    return [(x, y / known[0]) for x, y in zip(curve.x, known, strict=True)] if len(known) == len(values) else []


def _losses(check: CheckDocument) -> tuple[dict[str, Figure | None], dict[str, Any]]:
    curves = [curve for curve in check.curves if curve.quantity == "loss"]
    stars = {curve.module: curve for curve in check.curves if curve.quantity == "optimum"}
    name = curves[0].axis.replace("_", " ")
    unit = "as a multiple of the recipe's" if name == "batch" else check.settings.get("unit", "base value")
    traces, legend = [], []
    for curve, colour in zip(curves, cycle(_COLOURS)):
        traces.append(_curve(curve.module, curve, colour))
        legend.append((curve.module, colour))
        if star := stars.get(curve.module):
            marker = {"color": colour, "size": 12, "symbol": "star"}
            traces.append(_line(f"best for {curve.module}", zip(star.x, star.y, strict=True), colour, marker=marker))
    axis = charts.measured_axis((value for curve in curves for value in curve.x), numbers.value)
    drawn: dict[str, Figure | None] = {"losses": charts.figure(f"{name}, {unit}", "final loss, nats", traces, x=axis)}
    best = [curve for curve in check.curves if curve.quantity == "best"]
    limit = next((row.limit for row in check.rows if row.limit is not None), None)
    base = stars.get(next(iter(check.settings.get("scales", ())), ""))
    level = base.x[0] if base else None
    drawn |= {f"best-{curve.axis}": _best(curve, f"best {name}, {unit}", level, limit) for curve in best}
    axes = [curve.axis for curve in best]
    section = {"name": name, "stars": bool(stars), "legend": legend, "best": axes, "limit": limit}
    return drawn, {"losses": section}


def _collapse(check: CheckDocument) -> tuple[dict[str, Figure | None], dict[str, Any]]:
    """Return charts of the normalised losses and of their deviations from the first size, and template variables."""
    colours = dict(zip(check.settings["scales"], cycle(_COLOURS)))
    drawn: dict[str, Figure | None] = {}
    for quantity, title in (("normalised", "normalised loss"), ("deviation", "share of the loss decrease")):
        curves = [curve for curve in check.curves if curve.quantity == quantity]
        if not curves:
            return {}, {}
        traces = [_curve(curve.module, curve, colours[curve.module.split(" -> ")[-1]]) for curve in curves]
        marks = []
        if quantity == "deviation":
            limits = {row.limit for row in check.rows if row.limit is not None}
            marks = [charts.mark_line("y", sign * limit, BAD) for limit in limits for sign in (-1, 1)]
        # Curves are compared after the first quarter of the run.
        axis = {"range": [0, 1.03], "tickvals": QUARTERS, "ticktext": [f"{share:.0%}" for share in QUARTERS]}
        drawn[quantity] = charts.figure(curves[0].axis, title, traces, x=axis, shapes=marks)
    return drawn, {"collapse": list(colours.items())}


def _best(curve: VerdictCurve, title: str, level: float | None, limit: float | None) -> Figure:
    """Draw the best value over a scale such as width. Red lines are ``limit`` octaves around ``level``."""
    limits = [level * 2**octaves for octaves in (-limit, limit)] if level is not None and limit is not None else []
    known = [value for value in (*curve.low, *curve.y, *curve.high, *limits) if value is not None]
    x = charts.measured_axis(curve.x, numbers.value)
    y = charts.log_axis(min(known) / 1.5, max(known) * 1.5, numbers.value)
    marks = [charts.mark_line("y", end, BAD) for end in limits]
    if level is not None:
        marks.append(charts.mark_line("y", level, MUTED))
    return charts.figure(curve.axis, title, [_curve(title, curve, _COLOURS[0])], x=x, y=y, shapes=marks)


def _curve(name: str, curve: VerdictCurve, colour: str) -> Figure:
    bars = charts.bars(curve.low, curve.y, curve.high, colour, thickness=1)
    return _line(name, zip(curve.x, curve.y, strict=True), colour, error_y=bars)


def _line(name: str, points: Points, colour: str, **style: Any) -> Figure:
    hover = "<b>%{fullData.name}</b><br>%{y:.4~g} at %{x:.4~g}<extra></extra>"
    return charts.line(points, colour, 1.5, size=5, name=charts.text(name), hovertemplate=hover, **style)
