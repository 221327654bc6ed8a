"""Compare a recipe with the published runs, report each value outside their range, and name runs with usual values.

To add a check, write its limits and its message in ``checks.toml``, a function in ``quantities.py`` that computes
what is compared, and a test in ``tests/catalogue`` with a fault that the check finds.
"""

import math
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from leaven.catalogue.findings import quantities
from leaven.catalogue.findings.case import VOTES, Bounds, Case, CheckedRow, Suggestion, farthest, ratio
from leaven.catalogue.findings.quantities import CheckLimits, Reading
from leaven.catalogue.messages import filled
from leaven.catalogue.neighbours import first_of_each
from leaven.catalogue.run import PublishedRun
from leaven.catalogue.terms import reader
from leaven.documents.catalogue import FindingRow, Severity
from leaven.recipe.recipe import Recipe

__all__ = [
    "CHECKS",
    "Case",
    "Check",
    "CheckedRow",
    "FindingRow",
    "Severity",
    "Suggestion",
    "farthest",
    "find",
    "findings",
]

SEVERITIES: tuple[Severity, ...] = ("far outside", "outside", "note")
_ROUNDING = 1.02  # published values are rounded
_MEASURED = re.compile(r"(\S+: )?study ")  # start of the reason that `leaven tune` writes


@dataclass(frozen=True)
class Check:
    """A check of ``checks.toml``: the value that it compares, its limits, and the message of its findings."""

    name: str
    reads: str  # the values of a recipe that the check reads
    path: str  # path of the value to which a finding refers
    message: str | Sequence[str]  # templates, see `leaven.catalogue.messages`
    usual: Bounds | None = None
    outside: Bounds | None = None
    far: Bounds | None = None
    trained: Bounds | None = None  # beyond this range even a value that a search found is outside
    source: str = "the published runs"  # evidence in addition to the runs that a finding names
    hidden: str | None = None  # compare this quantity of the hidden matrices, for example beta1
    value: str | None = None  # or compare the recipe's value at this path
    run: str | None = None  # with the value at this path in a published run
    wanted: Sequence[float] = ()  # suggested values for the hidden matrices
    set: Sequence[Suggestion] = ()  # suggested changes of the recipe, by path
    far_from_runs: Literal["note", "skip"] | None = None  # if no run is near in size: at most a note, or no check

    def read(self, case: Case) -> Reading | None:
        """Return the quantity that this check compares, or None if the recipe has none.

        If `quantities` has a function with the check's name, that function reads the quantity, and the entry in
        ``checks.toml`` fills in what the function leaves out.
        """
        far = not case.neighbours
        if far and self.far_from_runs == "skip":
            return None
        function = getattr(quantities, re.sub(r"\W", "_", self.name), None)
        reading: Reading | None = function(case) if function else Reading()
        if reading is None:
            return None
        completed: dict[str, Any] = {"sure": reading.sure and not (far and self.far_from_runs == "note")}
        if reading.value is None and self.hidden:
            completed |= self._hidden(case, self.hidden, reading.facts or {})
        elif reading.value is None and self.value:
            completed["value"] = reader(self.value)(case.recipe)
        if reading.of_run is None:
            completed["of_run"] = reader(self.run) if self.run else lambda run: None
        if not reading.suggestions:
            wanted = [case.at_base(self.hidden or "", value) for value in self.wanted]
            completed["suggestions"] = [*wanted, *self.set]
        return replace(reading, **completed)

    def _hidden(self, case: Case, quantity: str, facts: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the value of the hidden matrices, or of the module that is farthest beyond `trained`, and facts."""
        value = case.hidden(quantity)
        if self.trained is None:
            return {"value": value}
        where, row = "the hidden matrices have", farthest(case.rows, quantity, self.trained)
        if row is None:
            return {"value": value, "facts": {**facts, "where": where}}
        if (own := getattr(row, quantity)) != value:
            where = f"{row.module} has"
        least, most = self.trained
        return {"value": own, "facts": {**facts, "where": where, "least": least, "most": most}}

    def untried(self, value: float | None) -> bool:
        """Return whether a value is beyond the range in which runs have trained well."""
        return self.trained is not None and value is not None and not self.trained[0] <= value <= self.trained[1]

    def distance(self, value: float) -> float:
        """Return the number that is compared with limits: 1 / (1 - beta) steps for a beta, else the value itself."""
        if self.hidden not in ("beta1", "beta2"):
            return value
        return 1 / (1 - value) if value < 1 else math.inf  # a rule may round a beta to 1

    @property
    def limits(self) -> CheckLimits | None:
        return CheckLimits(self.usual, self.outside, self.far) if self.usual and self.outside and self.far else None


_FILE = Path(__file__).with_name("checks.toml")
CHECKS = tuple(Check(**entry) for entry in tomllib.loads(_FILE.read_text(encoding="utf-8"))["check"])


def findings(
    recipe: Recipe, rows_of: Callable[[Recipe], Sequence[CheckedRow]], corpus_tokens: int | None = None
) -> list[FindingRow]:
    """Return the findings of all checks, the most severe first, with only the suggestions that work.

    Every suggestion is tried. It is kept if it removes its finding and causes no new fault; suggestions that cause
    the fewest notes come first. ``rows_of`` returns the rows of a recipe's parameter table. ``corpus_tokens`` is the
    number of tokens in the text, or None if it is unknown; then the run is assumed to be one epoch.
    """
    found = _all(Case(recipe, rows_of(recipe), corpus_tokens))
    known = {one.check: one.severity for one in found}

    def added_notes(suggestion: Suggestion, check: str) -> int | None:
        """Return how many findings of severity ``note`` a suggestion adds. Return None if the finding of ``check``
        is still there, or if the suggestion adds a more severe finding."""
        try:
            changed = recipe.replace(suggestion)
        except ValueError:  # the changed recipe is invalid, or the shape of its base is
            return None
        left = {one.check: one.severity for one in _all(Case(changed, rows_of(changed), corpus_tokens))}
        worse = [severity for name, severity in left.items() if _rank(severity) < _rank(known.get(name))]
        return None if check in left or any(severity != "note" for severity in worse) else len(worse)

    def tried(one: FindingRow) -> FindingRow:
        notes = [(count, each) for each in one.mends if (count := added_notes(each, one.check)) is not None]
        return one.model_copy(update={"mends": [each for _, each in sorted(notes, key=lambda pair: pair[0])]})

    return [tried(one) for one in sorted(found, key=lambda one: _rank(one.severity))]


def _rank(severity: Severity | None) -> int:
    return len(SEVERITIES) if severity is None else SEVERITIES.index(severity)


def _all(case: Case) -> list[FindingRow]:
    found = [(check, one) for check in CHECKS if (one := find(check, case))]
    for n, (check, one) in enumerate(found):
        if _MEASURED.match(case.recipe.why.get(one.path, "")):  # a measured value is a note, not a fault
            severity = one.severity if check.untried(one.value) else "note"
            says = f"{one.says}; a search found this value, see [why]"
            found[n] = check, one.model_copy(update={"severity": severity, "says": says})
    return [one for _, one in found]


def find(check: Check, case: Case) -> FindingRow | None:
    """Return a check's finding in a recipe, or None if the value is usual. Suggestions are included without
    testing that they help."""
    reading = check.read(case)
    if reading is None:
        return None
    value, limits = reading.value, reading.limits or check.limits
    (low, high), factor, did_so = reading.bounds, reading.factor, reading.did_so
    severity: Severity = "note"
    alike: list[str] = []
    usual: list[PublishedRun] = []
    if limits and value is not None:
        low, high = limits.usual

        def within(value: float, bounds: tuple[float, float]) -> bool:
            """Return whether a value is within bounds, with a tolerance because published values are rounded."""
            least, most = map(check.distance, bounds)
            return (least if least <= 0 else least / _ROUNDING) <= check.distance(value) <= most * _ROUNDING

        if within(value, limits.usual):
            return None
        above = value > high
        beyond = (value, math.inf) if above else (-math.inf, value)
        valued = [(run, own) for run in case.runs if reading.of_run and (own := reading.of_run(run)) is not None]
        did_so = [run for run, own in valued if within(own, beyond)]
        alike = [run.id for run in did_so if run.id in case.alike]
        usual = first_of_each(run for run, own in valued if within(own, limits.usual))[:VOTES]
        factor = ratio(check.distance(value), check.distance(high if above else low))
        if not alike and reading.sure and not within(value, limits.outside):
            severity = "outside" if within(value, limits.far) else "far outside"
        elif check.untried(value):
            severity = "outside"
    facts = {"value": value, "low": low, "high": high} | dict(reading.facts or {})
    return FindingRow(
        check=check.name,
        path=reading.path or check.path,
        severity=severity,
        value=value,
        low=low,
        high=high,
        factor=factor,
        says="; ".join(filled(check.message, facts)),
        runs=list(dict.fromkeys(run.id for run in (usual if reading.runs is None else reading.runs))),
        did_so=[run.id for run in did_so],
        alike=alike,
        mends=[dict(each) for each in reading.suggestions],
        source=check.source,
    )
