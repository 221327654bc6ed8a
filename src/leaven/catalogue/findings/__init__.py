"""Compare a recipe with published runs and report unusual values, for ``leaven recipes check``.

``checks.toml`` has the limits and the message of each check. If the compared value must be computed,
`training_checks` or `model_checks` has a function with the name of the check.
"""

import math
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from leaven.catalogue.findings import model_checks, training_checks
from leaven.catalogue.findings.case import VOTES, Case, Check, Suggestion
from leaven.catalogue.messages import filled
from leaven.catalogue.neighbours import first_of_each, ratio
from leaven.documents.catalogue import FindingRow, Severity
from leaven.recipe.recipe import Recipe

__all__ = ["CHECKS", "Case", "combined", "find", "findings"]

_SEVERITIES: tuple[Severity, ...] = get_args(Severity)  # the worst first
_ROUNDING = 1.02  # published values are rounded
_MEASURED = re.compile(r"(\S+: )?study ")  # the reasons that `leaven tune` writes begin like this
_FILE = Path(__file__).with_name("checks.toml")
CHECKS = tuple(Check(**entry) for entry in tomllib.loads(_FILE.read_text(encoding="utf-8"))["check"])


def findings(
    recipe: Recipe, rows_of: Callable[[Recipe], Sequence[Any]], corpus_tokens: int | None = None
) -> list[FindingRow]:
    """Return the findings of all checks, the most severe first, each with changes of the recipe that remove it.

    Each suggested change is tried on the recipe. It is kept only if it removes the finding, makes no other finding
    more severe, and adds no findings except notes (the mildest). The changes that add the fewest notes come first.

    Args:
        rows_of: a function that returns the rows of a recipe's parameter table.
        corpus_tokens: tokens in the training text. If None, the run is assumed to be one epoch.
    """

    def found_in(recipe: Recipe) -> dict[str, FindingRow]:
        case = Case(recipe, rows_of(recipe), corpus_tokens)
        return {check.name: one for check in CHECKS if (one := find(check, case))}

    def rank(one: FindingRow | None) -> int:
        return _SEVERITIES.index(one.severity) if one else len(_SEVERITIES)

    def added_notes(suggestion: Suggestion, name: str) -> int | None:
        """Return the number of notes that a suggestion adds, or None if the suggestion is rejected."""
        try:
            left = found_in(recipe.replace(suggestion))
        except ValueError:  # the changed recipe or the shape of its base is invalid
            return None
        worse = [one for one in left.values() if rank(one) < rank(found.get(one.check))]
        return None if name in left or any(one.severity != "note" for one in worse) else len(worse)

    found, tried = found_in(recipe), []
    for one in sorted(found.values(), key=rank):
        notes = [(count, each) for each in one.mends if (count := added_notes(each, one.check)) is not None]
        mends = [each for _, each in sorted(notes, key=lambda pair: pair[0])]
        tried.append(one.model_copy(update={"mends": mends}))
    return tried


def combined(recipe: Recipe, found: Sequence[FindingRow]) -> Suggestion:
    """Return the merged first suggestions of all findings that are more severe than a note.

    ``found`` is sorted, the most severe finding first. If two findings suggest different values, the more severe one
    decides. If the merged changes do not make a valid recipe, return only those of the most severe finding.
    """
    each = [one.mends[0] for one in found if one.severity != "note" and one.mends]
    changes = {path: value for suggestion in reversed(each) for path, value in suggestion.items()}
    try:
        recipe.replace(changes)
    except ValueError:
        return each[0]
    return changes


def find(check: Check, case: Case) -> FindingRow | None:
    """Return what a check finds, or None if it finds nothing. The suggested changes are not yet tried."""
    read = _read(check, case)
    if read is None:
        return None
    fixed = [end for end in read.usual if not isinstance(end, str)]  # the others are computed from published values
    if read.value is not None and len(fixed) == 2 and _within(check, read.value, fixed):
        return None
    valued = [(run, own) for run in case.runs if (own := read.of_run(run)) is not None]
    known = [own for _, own in valued]
    facts = ({"least": min(known), "most": max(known)} if known else {}) | read.facts
    value, low, high, factor = read.value, None, None, None
    severity: Severity = "note"
    alike: list[str] = []
    runs = list(read.runs or ())
    if value is not None and read.usual:
        usual, outside, far = (
            tuple(_end(end, facts) for end in ends) for ends in (read.usual, read.outside, read.far)
        )
        if _within(check, value, usual):
            return None
        low, high = usual
        beyond = (value, math.inf) if value > high else (-math.inf, value)
        did_so = [run.id for run, own in valued if _within(check, own, beyond)]
        alike = [id for id in did_so if id in case.alike]
        if read.runs is None:
            runs = first_of_each(run for run, own in valued if _within(check, own, usual))[:VOTES]
        factor = ratio(_distance(check, value), _distance(check, high if value > high else low))
        if not alike and read.sure and not _within(check, value, outside):
            severity = "outside" if _within(check, value, far) else "far outside"
        elif check.untried(value):
            severity = "outside"
    else:
        did_so = [run.id for run, own in valued if own]
    says = "; ".join(filled(read.message, facts | {"value": value, "low": low, "high": high}))
    if _MEASURED.match(case.recipe.why.get(read.path, "")):  # a measured value is a note, not a fault
        severity = severity if check.untried(value) else "note"
        says = f"{says}; a search found this value, see [why]"
    return FindingRow(
        check=check.name,
        path=read.path,
        severity=severity,
        value=value,
        low=low,
        high=high,
        factor=factor,
        says=says,
        runs=list(dict.fromkeys(run.id for run in runs)),
        did_so=did_so,
        alike=alike,
        mends=[dict(each) for each in read.suggestions],
        source=check.source,
    )


def _read(check: Check, case: Case) -> Check | None:
    if not case.neighbours and check.far_from_runs == "skip":
        return None
    read: Check | None = check.read(case)
    name = re.sub(r"\W", "_", check.name)
    function = getattr(training_checks, name, None) or getattr(model_checks, name, None)
    return function(read, case) if function else read


def _end(written: float | str, facts: Mapping[str, float]) -> float:
    """Return a limit of ``checks.toml`` as a number. ``1.5 most / 2`` means 1.5 x ``facts["most"]`` / 2."""
    if not isinstance(written, str):
        return written
    product, _, divisor = written.partition(" / ")
    factor, _, name = product.rpartition(" ")
    return float(factor or 1) * facts[name] / float(divisor or 1)


def _distance(check: Check, value: float) -> float:
    """Return the number that is compared with limits: 1 / (1 - beta) for a beta of Adam, else ``value``."""
    if check.hidden not in ("beta1", "beta2"):
        return value
    return 1 / (1 - value) if value < 1 else math.inf  # a rule may round a beta to 1


def _within(check: Check, value: float, bounds: Sequence[float]) -> bool:
    least, most = (_distance(check, bound) for bound in bounds)
    return (least if least <= 0 else least / _ROUNDING) <= _distance(check, value) <= most * _ROUNDING
