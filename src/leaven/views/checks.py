"""The screen and the page of a check: tables with the verdict last, and the points behind it.

Both are made of the check's document, the plain data of ``leaven check --json``.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from leaven.recipe.files import write_text
from leaven.views import chapters, figures, numbers
from leaven.views.html import element, join
from leaven.views.shell import document

Check = Mapping[str, Any]

_SLOPES = ("coordinates", "gradients")
_SWEEPS = ("transfer", "duration", "batch", "decay", "init")
_LINES = ("var(--transferred)", "var(--copied)", "var(--untuned)", "var(--other)")


_SHORT = {"regret": "regret, nats", "noise": "noise of seeds"}
_INTERVALS = {"shift": ("low", "high"), "regret": ("regret, low", "regret, high")}
"""The ends of a part's interval, which stand in its own column."""


def _columns(check: Check, rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """The heads of a table's number columns by part, in order."""
    steps = check["settings"].get("steps")
    known = {"start": "at step 0", "end": f"at step {steps}", "decay": "lr x decay"}
    ends = set()
    if check["check"] in _SWEEPS:
        known, ends = _SHORT, {end for pair in _INTERVALS.values() for end in pair}
    return {part: known.get(part, part) for row in rows for part in row["parts"] if part not in ends}


def _groups(check: Check) -> dict[str, list[Mapping[str, Any]]]:
    """The rows of each table: one an axis, or one for a whole sweep."""
    if check["check"] in _SWEEPS:
        return {"best value": list(check["rows"])}
    by_axis: dict[str, list[Mapping[str, Any]]] = {}
    for row in check["rows"]:
        by_axis.setdefault(row["axis"], []).append(row)
    return by_axis


def _first(check: Check, row: Mapping[str, Any]) -> str:
    """What stands first in a row."""
    return str(row["axis"] if check["check"] in _SWEEPS else row["module"])


def _title(check: Check, axis: str, rows: Sequence[Mapping[str, Any]]) -> str:
    settings = check["settings"]
    if axis == "bookkeeping":
        return (
            "exponents that have to be 0, read off the optimiser without a step: the worst over width, depth, both, "
            "batch and tokens (lr: that it has in batch or tokens)"
        )
    steps = f"{settings['steps']} steps, " if "steps" in settings else ""
    against = f" against {axis}" if check["check"] in _SLOPES else ""
    limits = sorted({row["limit"] for row in rows if row["limit"] is not None})
    limit = " or ".join(f"{value:.2g}" for value in limits)
    return f"{check['quantity']}{against} (limit {limit}; {steps}{settings['seeds']} seeds)"


def _number(value: float | None, slopes: bool) -> str:
    if value is None:
        return numbers.NONE
    return f"{value:.2f}" if slopes else numbers.value(value)


def _cell(check: Check, row: Mapping[str, Any], part: str) -> str:
    """A number of a row, with its interval where it has one."""
    parts, slopes = row["parts"], check["check"] in _SLOPES
    told = _number(parts.get(part), slopes)
    low, high = (parts.get(end) for end in _INTERVALS.get(part, ("", "")))
    if check["check"] in _SLOPES or low is None or high is None:
        return told
    ends = (numbers.value(round(end, 4)) for end in (low, high))
    return f"{told} ({' to '.join(ends)})"


def _verdict(row: Mapping[str, Any]) -> tuple[str, str]:
    """A row's last word and its style."""
    if row["passed"] is None:
        return f"not judged: {row['note']}", "dim"
    if row["passed"]:
        return row["note"] or "passed", "green"
    return row["note"] or "FAILED", "red"


def terminal(check: Check) -> list[Table]:
    """The tables of a check, the judged ones first."""
    made = []
    for axis, rows in _groups(check).items():
        columns = _columns(check, rows)
        table = _table(_title(check, axis, rows))
        table.add_column("scales" if check["check"] in _SWEEPS else "module", no_wrap=True)
        for head in columns.values():
            table.add_column(head, justify="right", no_wrap=check["check"] in _SLOPES)
        table.add_column("verdict", min_width=28 if check["check"] in _SWEEPS else None)
        for row in rows:
            told, style = _verdict(row)
            table.add_row(_first(check, row), *(_cell(check, row, part) for part in columns), Text(told, style))
        made.append(table)
    if check.get("measured"):
        table = _table(_MEASURED)
        for head, justify in zip(_MEASURED_HEADS, ("left", "right", "right", "right", "left"), strict=True):
            table.add_column(head, justify=justify)  # type: ignore[arg-type]
        for each in check["measured"]:
            table.add_row(*_measured(each))
        made.append(table)
    return made


_MEASURED = "measured, not judged"
_MEASURED_HEADS = ("", "measured", "95% interval", "by the rule", "")


def _measured(each: Mapping[str, Any]) -> tuple[str, ...]:
    ends = each["low"], each["high"]
    interval = numbers.NONE if None in ends else " to ".join(f"{end:.3f}" for end in ends)
    told = ("" if each[key] is None else f"{each[key]:.3f}" for key in ("value", "expected"))
    value, expected = told
    return each["name"], value or numbers.NONE, interval, expected, each["note"]


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", title_style="", box=None, pad_edge=False, header_style="dim")


def conclusion(check: Check) -> str:
    """The verdict in one line."""
    failed = [row for row in check["rows"] if row["passed"] is False]
    judged = [row for row in check["rows"] if row["passed"] is not None]
    if not judged:
        return "FAILED: nothing could be judged"
    if not failed:
        return f"passed: {len(judged)} of {len(judged)} lines"
    if all(row.get("undecided") for row in failed):
        told = f"UNDECIDED: {len(failed)} of {len(judged)} lines, {failed[0]['axis']} first; that is no pass"
        return f"{told}. {check['advice']}" if check.get("advice") else told
    rule = check["settings"].get("rule")
    advice = f'. The rule in the recipe is "{rule}"' if rule else ""
    if rule not in {None, "complete-d-p"}:
        advice += "; try --set scaling.rule=complete-d-p"
    worst = check["fault"]
    if check["check"] in _SWEEPS:
        worst = max(failed, key=lambda row: row.get("beyond") or 0.0)["axis"]
    return f"FAILED: {len(failed)} of {len(judged)} lines, {worst} most{advice}"


def write_check(check: Check, out: Path) -> Path:
    """The page of a check.

    Raises:
        InputError: if plotly is missing, or the file cannot be written.
    """
    write_text(out, page(check))
    return out


def page(check: Check) -> str:
    """The HTML of a check; plotly has to be there."""
    figures.plotly()
    made = chapters.Sheet()
    name = f"{check['check']} of {check['subject']}"
    kicker = element("p", "leaven · check", class_="kicker")
    header = element("header", kicker, element("h1", name), element("p", conclusion(check), class_="verdict"))
    draw = _slopes if check["check"] in _SLOPES else _losses
    draw(made, check)
    for axis, rows in _groups(check).items():
        made.section(axis.capitalize(), _title(check, axis, rows), _html_table(check, rows), class_="broad")
    if check.get("measured"):
        made.section("Measured", "Beside what is judged.", _html_measured(check["measured"]), class_="broad")
    settings = "\n".join(f"{key} = {_told(value)}" for key, value in check["settings"].items() if value is not None)
    made.section("Settings", None, element("pre", element("code", settings), class_="scroll", tabindex="0"))
    return document(f"{name} · leaven check", element("main", header, *made.sections), made.charts)


def _told(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _html_table(check: Check, rows: Sequence[Mapping[str, Any]]) -> Any:
    columns = _columns(check, rows)
    first = "scales" if check["check"] in _SWEEPS else "module"
    heads = [element("th", head) for head in (first, *columns.values(), "verdict")]
    styles = {True: "good", False: "bad", None: None}
    body = [
        element(
            "tr",
            element("td", _first(check, row)),
            *(element("td", _cell(check, row, part), class_="num") for part in columns),
            element("td", _verdict(row)[0], class_=styles[row["passed"]]),
        )
        for row in rows
    ]
    return element(
        "div", element("table", element("thead", element("tr", heads)), element("tbody", body)), class_="scroll"
    )


def _html_measured(measured: Sequence[Mapping[str, Any]]) -> Any:
    heads = [element("th", head) for head in _MEASURED_HEADS]
    classes = (None, "num", "num", "num", None)
    body = [
        element(
            "tr", *(element("td", cell, class_=kind) for cell, kind in zip(_measured(each), classes, strict=True))
        )
        for each in measured
    ]
    return element(
        "div", element("table", element("thead", element("tr", heads)), element("tbody", body)), class_="scroll"
    )


def _slopes(made: chapters.Sheet, check: Check) -> None:
    """Each line over size, as a multiple of its first point; a gradient as a multiple of its eps as well."""
    told = {
        "change": "how far the output moved",
        "end": "the output after the steps" if check["check"] == "coordinates" else "gradient over eps, later",
        "start": "gradient over eps, at the start",
    }
    wanted = ("change", "end") if check["check"] == "coordinates" else ("start", "end")
    for axis, rows in _groups(check).items():
        failed = {row["module"] for row in rows if row["passed"] is False}
        curves = {(c["module"], c["quantity"]): c for c in check["curves"] if c["axis"] == axis}
        if not curves:  # a table alone
            continue
        boxes = []
        for quantity in wanted:
            chart = figures.figure(axis, "multiple of the smallest model's")
            lines = [
                (module, curve["x"], _relative(curve, curves.get((module, "eps"))))
                for (module, of), curve in curves.items()
                if of == quantity
            ]
            lines = [(module, x, y) for module, x, y in lines if y]
            for module, x, y in sorted(lines, key=lambda line: line[0] in failed):
                _line(chart, module, x, y, "var(--bad)" if module in failed else figures.MUTED)
            if lines:
                span = [value for _, _, y in lines for value in y]
                figures.log_axis(chart, "xaxis", min(lines[0][1]), max(lines[0][1]), numbers.tick)
                figures.log_axis(chart, "yaxis", min([*span, 0.5]), max([*span, 2.0]), numbers.value, pad=0.06)
            box = made.chart(f"{axis}-{quantity}", chart, f"{told[quantity]} over {axis}")
            boxes.append(element("div", element("h3", told[quantity].capitalize()), box))
        flat = "A flat line keeps its size; what fails is drawn in colour."
        made.sections.append(element("section", element("h2", f"Over {axis}"), element("p", flat, class_="told")))
        made.sections.append(element("section", *boxes, class_="pair"))


def _relative(curve: Mapping[str, Any], eps: Mapping[str, Any] | None) -> list[float]:
    values = [
        y / e if e else y for y, e in zip(curve["y"], eps["y"] if eps else [None] * len(curve["y"]), strict=True)
    ]
    if any(not value for value in values):
        return []
    return [float(f"{value / values[0]:.4g}") for value in values]


_VALUES = {"lr": "lr", "weight_decay": "weight decay", "init_std": "init std", "batch": "batch"}


def _losses(made: chapters.Sheet, check: Check) -> None:
    """Loss over lr, decay, init std or batch, a line a scale or arm; bars from the best seed to the worst, a star at
    each optimum. Beside it the optimum over what was moved."""
    curves = [curve for curve in check["curves"] if curve["quantity"] == "loss"]
    stars = {curve["module"]: curve for curve in check["curves"] if curve["quantity"] == "optimum"}
    name = _VALUES[curves[0]["axis"]]
    unit = "multiple of its own" if name == "batch" else check["settings"].get("unit", "base value")
    chart = figures.figure(f"{name}, {unit}", "final loss, nats")
    for curve, colour in zip(curves, _cycle(len(curves)), strict=True):
        _line(chart, curve["module"], curve["x"], curve["y"], colour, error_y=_bars(curve, colour))
        if star := stars.get(curve["module"]):
            shape = {"color": colour, "size": 12, "symbol": "star"}
            _line(chart, f"best for {curve['module']}", star["x"], star["y"], colour, marker=shape)
    x = [value for curve in curves for value in curve["x"]]
    figures.log_axis(chart, "xaxis", min(x), max(x), numbers.value)
    legend = [
        join(element("span", "― ", style=f"color:{colour}"), f"{curve['module']}  ")
        for curve, colour in zip(curves, _cycle(len(curves)), strict=True)
    ]
    made.section(
        f"Loss over {name}",
        "Means over seeds, with bars from the lowest to the highest."
        + (" A star is the optimum of a parabola through the three lowest." if stars else ""),
        element("p", *legend),
        made.chart("losses", chart, f"loss over {name}", "tall"),
    )
    for curve in check["curves"]:
        if curve["quantity"] == "best":
            _best(made, curve, f"best {name}, {unit}")


def _best(made: chapters.Sheet, curve: Mapping[str, Any], title: str) -> None:
    """The best value over an axis, with the 95% interval of each."""
    axis = curve["axis"]
    chart = figures.figure(axis, title)
    _line(chart, title, curve["x"], curve["y"], _LINES[0], error_y=_bars(curve, _LINES[0]))
    _line(chart, "as at the base", [min(curve["x"]), max(curve["x"])], [curve["y"][0]] * 2, figures.MUTED)
    figures.log_axis(chart, "xaxis", min(curve["x"]), max(curve["x"]), numbers.value)
    span = [*curve["low"], *curve["high"]]
    figures.log_axis(chart, "yaxis", min(span) / 1.5, max(span) * 1.5, numbers.value)
    told = "With 95% intervals over seeds. A flat line is what the rule says."
    made.section(f"Over {axis}", told, made.chart(f"best-{axis}", chart, f"{title} over {axis}"))


def _bars(curve: Mapping[str, Any], colour: str) -> dict[str, Any]:
    return {
        "type": "data",
        "symmetric": False,
        "array": [high - y for high, y in zip(curve["high"], curve["y"], strict=True)],
        "arrayminus": [y - low for low, y in zip(curve["low"], curve["y"], strict=True)],
        "color": colour,
        "thickness": 1,
    }


def _cycle(count: int) -> list[str]:
    return [_LINES[number % len(_LINES)] for number in range(count)]


def _line(chart: Any, name: str, x: Sequence[float], y: Sequence[float], colour: str, **style: Any) -> None:
    go = figures.plotly()
    chart.add_trace(
        go.Scatter(
            x=list(x),
            y=list(y),
            name=figures.text(name),
            mode="lines+markers",
            line={"color": colour, "width": 1.5},
            hovertemplate="<b>%{fullData.name}</b><br>%{y:.4~g} at %{x:.4~g}<extra></extra>",
            **({"marker": {"color": colour, "size": 5}} | style),
        )
    )
