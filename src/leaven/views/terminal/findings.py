"""Show the result of ``leaven recipes check`` in the terminal: each finding, and then the conclusion."""

import math
import shlex
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from leaven.catalogue.runs import find_run
from leaven.documents.catalogue import FindingRow, RecipeCheck
from leaven.recipe.units import format_number, format_parameters, format_quantity, listed
from leaven.views.tables import Facts, under

_STYLES = {"far outside": "bold red", "outside": "red", "note": "dim"}
_LABEL = max(map(len, _STYLES)) + 2
_MOST = 4  # largest number of run ids in a line; --json has all of them


def findings_screen(check: RecipeCheck, width: int, chosen: Container[str] = ()) -> Iterator[RenderableType]:
    """Yield a title, the findings and the conclusion, for a terminal of ``width`` characters.

    Notes about the paths in ``chosen``, whose reason is in the recipe's [why], suggest no change.
    """
    size, tokens = format_parameters(check.params, check.params_active), format_quantity(check.tokens)
    yield Text(f"{check.name}  {size}, {tokens} tokens; values after applying the scaling rule")
    for one in check.findings:
        label = Text(one.severity if one.severity == "note" else one.severity.upper(), _STYLES[one.severity])
        lines = [f"{one.check}: {one.says}", *_evidence(one)]
        explained = one.severity == "note" and one.path in chosen
        if explained:
            lines.append("the reason for this value is in [why]")
        yield ""
        yield Facts(*under(label, lines), indent=_LABEL)
        if one.mends and not explained:
            yield from _to_type(one.mends[0], width)
    yield ""
    yield verdict(check.findings, len(check.checks))


def verdict(found: Sequence[FindingRow], checks: int) -> Text:
    notes = sum(one.severity == "note" for one in found)
    bad = {one.check for one in found if one.severity != "note"}
    noted = f", {notes} note{'s' if notes != 1 else ''}" if notes else ""
    if bad:
        return Text.assemble(
            ("FAILED", "bold red"), f": {len(bad)} of {checks} checks outside the published range{noted}"
        )
    return Text.assemble(("passed", "bold green"), f": {checks} checks, none outside the published range{noted}")


def written(value: Any) -> str:
    """Return a value as typed after ``--set KEY=``. For None, return "", which removes the value."""
    match value:
        case None:
            return ""
        case bool():
            return "true" if value else "false"
        case dict():
            return "{" + ", ".join(f"{key} = {written(inner)}" for key, inner in value.items()) + "}"
        case _:
            return f"{value}"


def _evidence(one: FindingRow) -> Iterator[str]:
    if one.factor is not None and math.isfinite(one.factor) and one.severity != "note":
        yield f"beyond {_range(one)} by a factor of {format_number(one.factor, 2)}"
    if one.runs:
        yield f"evidence: {_ids(one.runs)}; {one.source}"
    else:
        yield f"evidence: {one.source}"
    if one.alike:
        helped = {"succeeded-with-interventions": "succeeded, with interventions"}
        ends = sorted({helped.get(find_run(id).status, "succeeded") for id in one.alike})
        alike = "runs of similar size, lr, batch, norms and optimizer"
        yield f"{alike} that did the same and {' or '.join(ends)}: {_ids(one.alike)}"
    elif one.did_so:
        yield f"runs that did the same with another size, lr, batch, norms or optimizer: {_ids(one.did_so)}"


def _to_type(suggestion: Mapping[str, Any], width: int) -> Iterator[Text]:
    """Yield the ``--set`` options to type. A long line is broken between options with a backslash for the shell."""
    line = " " * _LABEL + "->"
    for path, to in suggestion.items():
        option = f" --set {path}={shlex.quote(written(to)) if to is not None else ''}"
        if len(line) + len(option) + 2 > width and not line.endswith("->"):
            yield Text(line + " \\")
            line = " " * (_LABEL + 2)
        line += option
    yield Text(line)


def _range(one: FindingRow) -> str:
    return " .. ".join(format_number(end) for end in (one.low, one.high) if end is not None and math.isfinite(end))


def _ids(ids: Sequence[str]) -> str:
    if len(ids) <= _MOST:
        return listed(ids, "and")
    return f"{', '.join(ids[:_MOST])} and {len(ids) - _MOST} more"
