"""A recipe as it is read from another trainer's configuration: values, each with the key it stands under there."""

from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from leaven.interop.likely import TOKENS_PER_PARAMETER, likely_batch, likely_lr
from leaven.recipe.errors import InputError
from leaven.recipe.files import explain
from leaven.recipe.recipe import Recipe, set_path
from leaven.recipe.shape import ModelShape


@dataclass(frozen=True)
class Imported:
    """``unknown`` is what the file does not tell, and what stands for it; ``unread`` what it says that no recipe
    holds."""

    recipe: Recipe
    unknown: tuple[str, ...]
    unread: tuple[str, ...]


@dataclass
class Draft:
    """Values by dotted path with their reasons, filled key by key."""

    origin: str
    values: dict[str, Any] = field(default_factory=dict)
    why: dict[str, str] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)

    def set(self, path: str, value: Any, why: str) -> None:
        self.values[path] = value
        self.why[path] = why

    def set_shape(self, shape: ModelShape, reasons: dict[str, str]) -> None:
        for key, value in shape.model_dump(exclude_none=True).items():
            self.values[f"model.{key}"] = value
            if key in reasons:
                self.why[f"model.{key}"] = reasons[key]

    def guess(self, path: str, value: Any, why: str) -> None:
        """A value that the file does not tell and a recipe has to have."""
        self.set(path, value, f"not told by {self.origin}: {why}")
        self.unknown.append(f"{path}: {why}")

    def finish(self, name: str, shape: ModelShape) -> Imported:
        """The recipe; duration, batch and lr are guessed where they are not there.

        Raises:
            InputError: if the values make no recipe.
        """
        if "data.tokens" not in self.values:
            tokens = TOKENS_PER_PARAMETER * shape.params
            self.guess("data.tokens", tokens, f"{TOKENS_PER_PARAMETER} a parameter, as a run from scratch takes")
        tokens = self.values["data.tokens"]
        if "batch.tokens" not in self.values:
            self.guess("batch.tokens", *likely_batch(shape, tokens))
        if "hyperparameters.lr" not in self.values:
            self.guess("hyperparameters.lr", *likely_lr(shape, tokens))
        self.unknown.append("data.source: any text of your own; the default stands there")
        document: dict[str, Any] = {"name": name, "why": self.why}
        for path, value in self.values.items():
            set_path(document, path, value)
        # What a configuration writes in seven digits makes a plain model: no rule moves anything at its own scale.
        document.setdefault("scaling", {"rule": "standard"})
        try:
            recipe = Recipe.model_validate(document)
        except ValidationError as error:
            raise InputError(f"{self.origin}: no recipe of leaven's: {explain(error)}") from None
        return Imported(recipe, tuple(self.unknown), tuple(self.unread))
