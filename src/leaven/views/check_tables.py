"""A check in words: its tables with a verdict a row, and the conclusion. The screen and the page draw these.

Both are made of the check's document, the plain data of ``leaven check --json``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from leaven.views import numbers

Check = Mapping[str, Any]

SLOPES = ("coordinates", "gradients")
SWEEPS = ("transfer", "duration", "batch", "decay", "init")
_SHORT = {"regret": "regret, nats", "noise": "noise of seeds"}
_INTERVALS = {"shift": ("low", "high"), "regret": ("regret, low", "regret, high")}
"""The ends of a part's interval, which stand in its own column."""


@dataclass(frozen=True)
class CheckTable:
    """One axis of a check, or a whole sweep, or what was measured beside it."""

    axis: str
    title: str
    heads: tuple[str, ...]  # the first column is text, the others numbers
    rows: tuple[tuple[str, ...], ...]
    verdicts: tuple[str, ...]  # by row, in a word; empty where nothing is judged
    notes: tuple[str, ...]  # by row: why, or what may be wrong
    passed: tuple[bool | None, ...]  # by row


def check_tables(check: Check) -> list[CheckTable]:
    """The tables of a check, the judged ones first."""
    by_axis: dict[str, list[Mapping[str, Any]]] = {}
    for row in check["rows"]:
        by_axis.setdefault("best value" if check["check"] in SWEEPS else row["axis"], []).append(row)
    tables = []
    for axis, rows in by_axis.items():
        columns = _columns(check, rows)
        cells = tuple((_first(check, row), *(_cell(check, row, part) for part in columns)) for row in rows)
        tables.append(
            CheckTable(
                axis,
                _title(check, axis, rows),
                ("scales" if check["check"] in SWEEPS else "module", *columns.values()),
                cells,
                tuple(map(_verdict, rows)),
                tuple(row["note"] for row in rows),
                tuple(row["passed"] for row in rows),
            )
        )
    if measured := check.get("measured"):
        heads = ("", "measured", "95% interval", "by the rule")
        notes = tuple(each["note"] for each in measured)
        none = (None,) * len(measured)
        cells = tuple(map(_measured, measured))
        tables.append(CheckTable("measured", "measured, not judged", heads, cells, ("",) * len(none), notes, none))
    return tables


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
    if check["check"] in SWEEPS:
        worst = max(failed, key=lambda row: row.get("beyond") or 0.0)["axis"]
    return f"FAILED: {len(failed)} of {len(judged)} lines, {worst} most{advice}"


def _columns(check: Check, rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """The heads of a table's number columns by part, in order."""
    steps = check["settings"].get("steps")
    known = {"start": "at step 0", "end": f"at step {steps}", "decay": "lr x decay"}
    ends = set()
    if check["check"] in SWEEPS:
        known, ends = _SHORT, {end for pair in _INTERVALS.values() for end in pair}
    return {part: known.get(part, part) for row in rows for part in row["parts"] if part not in ends}


def _first(check: Check, row: Mapping[str, Any]) -> str:
    return str(row["axis"] if check["check"] in SWEEPS else row["module"])


def _title(check: Check, axis: str, rows: Sequence[Mapping[str, Any]]) -> str:
    settings = check["settings"]
    if axis == "bookkeeping":
        return (
            "exponents that have to be 0, read off the optimiser without a step: the worst over width, depth, both, "
            "batch and tokens (lr: that it has in batch or tokens)"
        )
    steps = f"{settings['steps']} steps, " if "steps" in settings else ""
    against = f" against {axis}" if check["check"] in SLOPES else ""
    limits = sorted({row["limit"] for row in rows if row["limit"] is not None})
    limit = " or ".join(f"{value:.2g}" for value in limits)
    return f"{check['quantity']}{against} (limit {limit}; {steps}{settings['seeds']} seeds)"


def _cell(check: Check, row: Mapping[str, Any], part: str) -> str:
    """A number of a row, with its interval where it has one."""
    parts, slopes = row["parts"], check["check"] in SLOPES
    value = parts.get(part)
    if value is None:
        return numbers.NONE
    told = f"{value:.2f}" if slopes else numbers.value(value)
    low, high = (parts.get(end) for end in _INTERVALS.get(part, ("", "")))
    if slopes or low is None or high is None:
        return told
    ends = (numbers.value(round(end, 4)) for end in (low, high))
    return f"{told} ({' to '.join(ends)})"


def _verdict(row: Mapping[str, Any]) -> str:
    if row["passed"] is None:
        return "not judged"
    return "passed" if row["passed"] else "undecided" if row.get("undecided") else "FAILED"


def _measured(each: Mapping[str, Any]) -> tuple[str, ...]:
    ends = each["low"], each["high"]
    interval = numbers.NONE if None in ends else " to ".join(f"{end:.3f}" for end in ends)
    value, expected = ("" if each[key] is None else f"{each[key]:.3f}" for key in ("value", "expected"))
    return each["name"], value or numbers.NONE, interval, expected
