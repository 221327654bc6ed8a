"""A starter recipe while it is derived: each value is decided once, with its evidence, in numbered steps.

Evidence is data (votes, bounds, facts). The sentences are in ``catalogue/messages.toml``.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from leaven.catalogue.laws import evaluate
from leaven.catalogue.messages import parts, sentence
from leaven.catalogue.neighbours import Neighbours, Votes, middle
from leaven.catalogue.run import PublishedRun
from leaven.catalogue.starter.proxy import TuningAdvice
from leaven.documents.catalogue import LawRow
from leaven.documents.planning import DerivationRow
from leaven.recipe.recipe import Recipe, set_path
from leaven.recipe.shape import ModelShape


@dataclass(frozen=True)
class LawVotes(Votes):
    """The values of laws, and how many of the laws apply within their fitted range."""

    inside: int

    @property
    def count(self) -> int:
        return len(self.by)

    @property
    def weight(self) -> float:
        """Weight of the laws against the neighbours: 1/2 if all are inside their range, 1/4 if none is."""
        return (1 + self.inside / self.count) / 4


@dataclass(frozen=True)
class StarterScale:
    """A scale (model and tokens) at which values are chosen, and the evidence there."""

    near: Neighbours
    model: ModelShape
    tokens: int
    gpus: int = 1  # the batch must divide over them

    @property
    def reference(self) -> PublishedRun | None:
        return self.near.reference

    @property
    def tokens_per_parameter(self) -> float:
        return self.tokens / self.model.params

    @cached_property
    def laws(self) -> list[LawRow]:
        """The values of each law at this scale, one form of each law."""
        model = self.model
        found = evaluate(model.params, self.tokens, params_non_embedding=model.params_non_embedding)
        return [law for law in found if law.form_of is None]

    def evidence(
        self, laws: Mapping[str, float], of_run: Callable[[PublishedRun], float | None], own: float | None
    ) -> "Evidence":
        """Return the values of laws, by their names, and of neighbours; ``own`` is the reference's value, if it has
        one."""
        inside = sum(law.in_range is True for law in self.laws if law.law in laws)
        if own and self.reference:
            runs = Votes(own, {self.reference.id: own})
        else:
            runs = self.near.middle({run.id: value for run in self.near.runs if (value := of_run(run))})
        named = [f"{law.law}: {law.source}" for law in self.laws if law.law in laws]
        return Evidence(LawVotes(middle(laws).value, laws, inside), runs, (*named, *self.near.sources(runs.by)))


@dataclass(frozen=True)
class Evidence:
    """The values of laws and of published runs for one quantity."""

    laws: LawVotes
    runs: Votes
    sources: tuple[str, ...]

    @property
    def middle(self) -> float:
        """The weighted middle of laws and runs, in logarithms."""
        weight = self.laws.weight
        return math.exp(weight * math.log(self.laws.value) + (1 - weight) * math.log(self.runs.value))

    @property
    def spread(self) -> float:
        """The factor between the largest and the smallest value."""
        return max(self.laws.high, self.runs.high) / min(self.laws.low, self.runs.low)


@dataclass(frozen=True)
class Decision:
    """One value of a starter recipe and its evidence."""

    path: str  # of the recipe
    value: Any
    facts: Mapping[str, Any]  # votes, bounds and numbers, by their names in the message
    message: str  # key of its message

    @property
    def reason(self) -> str:
        return sentence("reasons", self.message, self.facts)


def derivation_step(
    number: int,
    title: str,
    lines: Sequence[str],
    values: Mapping[str, Any] | None = None,
    sources: Sequence[str] = (),
) -> DerivationRow:
    """Return a step of the derivation.

    ``values`` are the values that it set, by path; ``lines`` its reasons; ``sources`` the runs and laws it used.
    """
    once = list(dict.fromkeys(sources))
    return DerivationRow(
        step=number, title=title, values=dict(values or {}), lines=list(lines), reason="; ".join(lines), sources=once
    )


@dataclass
class StarterDraft:
    """The decisions so far, the steps, and the factors by which sources of uncertain values differ."""

    reference: str | None = None  # id of the run whose values are used
    document: dict[str, Any] = field(default_factory=dict)
    decisions: dict[str, Decision] = field(default_factory=dict)
    steps: list[DerivationRow] = field(default_factory=list)
    spreads: dict[str, float] = field(default_factory=dict)
    _open: dict[str, Any] = field(default_factory=dict)

    def decide(self, path: str, value: Any, message: str | None = None, **facts: Any) -> None:
        """Set a value. ``message`` is the key of its reason, by default its path."""
        set_path(self.document, path, value)
        known = {"value": value, "reference": self.reference} | facts
        self.decisions[path] = Decision(path, value, known, message or path)
        self._open[path] = value

    def amend(self, path: str, **facts: Any) -> None:
        """Add facts to a decision."""
        decision = self.decisions[path]
        self.decisions[path] = replace(decision, facts={**decision.facts, **facts})

    def weigh(self, title: str, path: str, value: Any, evidence: Evidence, message: str, **facts: Any) -> None:
        """Set a value between laws and published runs, and close its step."""
        self.spreads[title] = evidence.spread
        self.decide(path, value, message, laws=evidence.laws, runs=evidence.runs, **facts)
        self.step(title, evidence.sources, message)

    def step(self, title: str, sources: Sequence[str] = (), message: str | None = None, **facts: Any) -> None:
        """Close a step: it holds the values decided since the previous one.

        The fields of its lines are ``facts``, else the facts of these decisions (of the first that has one), else
        values of the recipe.
        """
        known: dict[str, Any] = dict(self.document)
        for path in reversed(self._open):
            known |= self.decisions[path].facts
        lines = parts("steps", message or title, known | {"reference": self.reference} | facts)
        self.steps.append(derivation_step(len(self.steps) + 1, title, lines, self._open, sources))
        self._open = {}

    @property
    def why(self) -> dict[str, str]:
        """The reason of each value, by its path."""
        return {path: decision.reason for path, decision in self.decisions.items()}

    def recipe(self) -> Recipe:
        """Return the recipe of the decisions.

        Raises:
            ValidationError: if the values cannot be combined.
        """
        return Recipe.model_validate(self.document | {"why": self.why})


@dataclass(frozen=True)
class Derivation:
    """A recipe, how it was derived, and whether to tune a proxy of it first."""

    recipe: Recipe
    steps: tuple[DerivationRow, ...]
    tuning: TuningAdvice

    def add(self, title: str, lines: Sequence[str]) -> "Derivation":
        """Return the derivation with one more step, which sets no value."""
        return replace(self, steps=(*self.steps, derivation_step(len(self.steps) + 1, title, lines)))
