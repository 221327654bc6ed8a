"""The screen of a check: tables with the verdict last, and the points behind it.

It is made of the check's document, the plain data of ``leaven check --json``.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from leaven.views import numbers

Check = Mapping[str, Any]

_SLOPES = ("coordinates", "gradients")
_SWEEPS = ("transfer", "duration", "batch", "decay", "init")


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
