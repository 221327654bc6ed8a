"""Render the page of a check. It has charts, tables in which each row is judged, measured values and settings."""

from collections.abc import Iterable, Sequence
from itertools import cycle
from typing import Any

from leaven.documents.checks import CheckDocument, VerdictCurve
from leaven.views import charts, numbers
from leaven.views.charts import BAD, MUTED, Figure
from leaven.views.checks import SLOPES, check_tables, conclusion
from leaven.views.render import render

_COLOURS = ("var(--transferred)", "var(--copied)", "var(--untuned)", "var(--other)")
_VALUES = {"lr": "lr", "weight_decay": "weight decay", "init_std": "init std", "batch": "batch"}
_SLOPES = {
    "coordinates": {"change": "change of the output", "end": "output after the steps"},
    "gradients": {"start": "gradient over eps at the start", "end": "gradient over eps after the steps"},
}


def check_page(check: CheckDocument) -> str:
    """Return the page of a check as HTML."""
    drawn, sections = _slopes(check) if check.check in SLOPES else _losses(check)
    return render(
        "check.html.j2",
        drawn,
        kind="check",
        title=f"{check.check} of {check.subject}",
        conclusion=conclusion(check),
        tables=check_tables(check),
        settings=[f"{key} = {_setting(value)}" for key, value in check.settings.items() if value is not None],
        **{"slopes": [], "losses": None} | sections,
    )


def _setting(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _slopes(check: CheckDocument) -> tuple[dict[str, Figure | None], dict[str, Any]]:
    """Draw charts over model size with a curve for each module. The values of a curve are divided by its first value.
    Gradients are also divided by eps."""
    wanted = _SLOPES[check.check]
    drawn: dict[str, Figure | None] = {}
    sections = []
    for axis in dict.fromkeys(row.axis for row in check.rows):
        failed = {row.module for row in check.rows if row.axis == axis and row.passed is False}
        curves = {(curve.module, curve.quantity): curve for curve in check.curves if curve.axis == axis}
        if not curves:  # this axis has only a table
            continue
        sections.append((axis, [(f"{axis}-{quantity}", title) for quantity, title in wanted.items()]))
        for quantity in wanted:
            lines = [
                (module, curve.x, y)
                for (module, of), curve in curves.items()
                if of == quantity and (y := _relative(curve, curves.get((module, "eps"))))
            ]
            lines.sort(key=lambda line: line[0] in failed)
            traces = [_line(module, x, y, BAD if module in failed else MUTED) for module, x, y in lines]
            x_axis, y_axis = {}, {}
            if lines:
                y = [value for _, _, values in lines for value in values]
                x_axis = charts.log_axis(min(lines[0][1]), max(lines[0][1]), numbers.tick)
                y_axis = charts.log_axis(min([*y, 0.5]), max([*y, 2.0]), numbers.value, pad=0.06)
            figure = charts.figure(axis, "relative to the smallest model", traces, x=x_axis, y=y_axis)
            drawn[f"{axis}-{quantity}"] = figure
    return drawn, {"slopes": sections}


def _relative(curve: VerdictCurve, eps: VerdictCurve | None) -> list[float]:
    """Return the values of a curve divided by its first value. If ``eps`` is given, each value is first divided by
    eps.

    Return an empty list if a value is 0 or not finite, because a logarithmic axis cannot show it.
    """
    divisors = eps.y if eps else [None] * len(curve.y)
    values = [y / e if y and e else y for y, e in zip(curve.y, divisors, strict=True)]
    known = [value for value in values if value]
    return [value / known[0] for value in known] if len(known) == len(values) else []


def _losses(check: CheckDocument) -> tuple[dict[str, Figure | None], dict[str, Any]]:
    """Draw the loss over the swept lr, weight decay, init std or batch size.

    The chart has a line for each model, with a star at the best value. The models differ in width, depth, batch or
    tokens. For each of these that the check fitted, another chart shows the best value over it.
    """
    curves = [curve for curve in check.curves if curve.quantity == "loss"]
    stars = {curve.module: curve for curve in check.curves if curve.quantity == "optimum"}
    name = _VALUES[curves[0].axis]
    unit = "as a multiple of the recipe's" if name == "batch" else check.settings.get("unit", "base value")
    traces, legend = [], []
    for curve, colour in zip(curves, cycle(_COLOURS)):
        traces.append(_line(curve.module, curve.x, curve.y, colour, error_y=_bars(curve, colour)))
        legend.append((curve.module, colour))
        if star := stars.get(curve.module):
            marker = {"color": colour, "size": 12, "symbol": "star"}
            traces.append(_line(f"best for {curve.module}", star.x, star.y, colour, marker=marker))
    x = [value for curve in curves for value in curve.x]
    axis = charts.log_axis(min(x), max(x), numbers.value)
    drawn: dict[str, Figure | None] = {"losses": charts.figure(f"{name}, {unit}", "final loss, nats", traces, x=axis)}
    best = [curve for curve in check.curves if curve.quantity == "best"]
    drawn |= {f"best-{curve.axis}": _best(curve, f"best {name}, {unit}") for curve in best}
    axes = [curve.axis for curve in best]
    return drawn, {"losses": {"name": name, "stars": bool(stars), "legend": legend, "best": axes}}


def _best(curve: VerdictCurve, title: str) -> Figure:
    """Draw the best value of the hyperparameter over the width, depth, batch or duration, with 95% intervals."""
    level = _line("equal to the base", [min(curve.x), max(curve.x)], [curve.y[0]] * 2, MUTED)
    line = _line(title, curve.x, curve.y, _COLOURS[0], error_y=_bars(curve, _COLOURS[0]))
    x = charts.log_axis(min(curve.x), max(curve.x), numbers.value)
    y = charts.log_axis(min(_known(curve.low)) / 1.5, max(_known(curve.high)) * 1.5, numbers.value)
    return charts.figure(curve.axis, title, [line, level], x=x, y=y)


def _known(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _bars(curve: VerdictCurve, colour: str) -> Figure:
    return charts.bars(curve.low, curve.y, curve.high, colour, thickness=1)


def _line(name: str, x: Iterable[float], y: Iterable[float | None], colour: str, **style: Any) -> Figure:
    hover = "<b>%{fullData.name}</b><br>%{y:.4~g} at %{x:.4~g}<extra></extra>"
    marker = style.pop("marker", {"color": colour, "size": 5})
    line = charts.line(x, y, colour, 1.5, name=charts.text(name), hovertemplate=hover, marker=marker, **style)
    return line | {"mode": "lines+markers"}
