"""A recipe while it is derived: every value is set once, with its reason, in numbered steps."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from leaven.catalogue.starter.proxy import TuningAdvice
from leaven.recipe.recipe import Recipe, set_path


@dataclass(frozen=True)
class Step:
    """One step: the values it set by their paths, what a person reads, and the runs and laws it stands on."""

    number: int
    title: str
    said: tuple[str, ...]
    values: Mapping[str, Any]
    sources: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "step": self.number,
            "title": self.title,
            "values": dict(self.values),
            "reason": "; ".join(self.said),
            "sources": list(self.sources),
        }


@dataclass(frozen=True)
class Unsure:
    """What the sources disagree about: by which factor, and what to do."""

    about: str
    spread: float
    remedy: str


@dataclass
class Draft:
    """Values and reasons by path, and the steps so far."""

    document: dict[str, Any] = field(default_factory=dict)
    why: dict[str, str] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    unsure: list[Unsure] = field(default_factory=list)
    _open: dict[str, Any] = field(default_factory=dict)

    def set(self, path: str, value: Any, reason: str) -> None:
        set_path(self.document, path, value)
        self.why[path] = reason
        self._open[path] = value

    def step(self, title: str, said: Sequence[str], sources: Sequence[str] = ()) -> None:
        """Close a step: it holds what was set since the one before."""
        once = tuple(dict.fromkeys(sources))
        self.steps.append(Step(len(self.steps) + 1, title, tuple(said), self._open, once))
        self._open = {}

    def recipe(self) -> Recipe:
        """
        Raises:
            ValidationError: if the values do not go together.
        """
        return Recipe.model_validate(self.document | {"why": self.why})


@dataclass(frozen=True)
class Derivation:
    """A recipe, how it came about, and whether to tune a proxy of it first."""

    recipe: Recipe
    steps: tuple[Step, ...]
    tuning: TuningAdvice

    def add(self, title: str, said: Sequence[str], sources: Sequence[str] = ()) -> "Derivation":
        """The derivation with one more step, which sets no value."""
        step = Step(len(self.steps) + 1, title, tuple(said), {}, tuple(dict.fromkeys(sources)))
        return replace(self, steps=(*self.steps, step))

    def to_json(self) -> dict[str, Any]:
        return {
            "params": self.recipe.model.params,
            "tokens": self.recipe.data.tokens,
            "steps": [step.to_json() for step in self.steps],
        }
