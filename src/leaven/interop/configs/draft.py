"""A recipe out of somebody else's files: values, each with the key that it has there, and guesses for the rest."""

from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from leaven.catalogue.laws import evaluate
from leaven.catalogue.neighbours import nearest
from leaven.interop.architectures import Architecture
from leaven.recipe.errors import InputError
from leaven.recipe.files import explain
from leaven.recipe.recipe import Recipe, set_path
from leaven.recipe.shape import ModelShape
from leaven.recipe.units import format_quantity

TOKENS_PER_PARAMETER = 20


@dataclass(frozen=True)
class Imported:
    """A recipe that was read from files."""

    recipe: Recipe
    unknown: tuple[str, ...]  # values that are missing in the files, and what was assumed
    unread: tuple[str, ...]  # keys of the files that no recipe can represent


@dataclass
class Draft:
    """A recipe under construction: values by dotted path."""

    origin: str  # the file or folder, for messages
    values: dict[str, Any] = field(default_factory=dict)
    why: dict[str, str] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)

    def set(self, path: str, value: Any, why: str) -> None:
        self.values[path] = value
        self.why[path] = why

    def set_architecture(
        self, architecture: Architecture, config: dict[str, Any], shape: ModelShape, file: str
    ) -> None:
        """Set the shape and the initial std from a config.json; ``file`` is its name in the reasons."""

        def origin(*keys: str) -> str:
            there = [key for key in keys if config.get(key) is not None]
            return (
                f"{' and '.join(there)} of {file}" if there else f"what a {architecture.name} has: {file} is silent"
            )

        for key, value in shape.model_dump(exclude_none=True).items():
            self.values[f"model.{key}"] = value
        for key, theirs in architecture.keys.items():
            if theirs:
                more = ("rope_scaling", "rope_parameters") if key == "rope_theta" else ()
                self.why[f"model.{key}"] = origin(*theirs, *more)
        self.why |= {f"model.{key}": f"what a {architecture.name} is" for key in architecture.holds}
        std = float(architecture.given(config)["initializer_range"])
        self.set("hyperparameters.init_std", std, origin("initializer_range"))

    def shape(self) -> ModelShape:
        """Return the shape from the values under ``model``.

        Raises:
            InputError: if they are not a valid shape.
        """
        values = {path.removeprefix("model."): value for path, value in self.values.items() if path[:6] == "model."}
        try:
            shape = ModelShape.model_validate(values)
        except ValidationError as error:
            raise InputError(f"{self.origin}: not a shape that leaven supports: {explain(error)}") from None
        return shape

    def guess(self, path: str, value: Any, why: str) -> None:
        """Set a value that a recipe needs and that is missing in the files."""
        self.set(path, value, f"not in {self.origin}: {why}")
        self.unknown.append(f"{path}: {why}")

    def finish(self, name: str, shape: ModelShape) -> Imported:
        """Return the recipe, with estimates for a missing duration, batch or lr.

        Raises:
            InputError: if the values are not a valid recipe.
        """
        if "data.tokens" not in self.values:
            tokens = TOKENS_PER_PARAMETER * shape.params
            self.guess("data.tokens", tokens, f"{TOKENS_PER_PARAMETER} a parameter, as a run from scratch takes")
        tokens = self.values["data.tokens"]
        if "batch.tokens" not in self.values:
            self.guess("batch.tokens", *likely_batch(shape, tokens))
        if "hyperparameters.lr" not in self.values:
            self.guess("hyperparameters.lr", *likely_lr(shape, tokens))
        self.unknown.append("data.source: any text of your own; the default is used")
        # A configuration describes a model at its own scale, where no rule changes anything.
        self.values.setdefault("scaling.rule", "standard")
        return Imported(self.recipe(name), tuple(self.unknown), tuple(self.unread))

    def recipe(self, name: str) -> Recipe:
        """Return the recipe with the values set so far.

        Raises:
            InputError: if they are not a valid recipe.
        """
        document: dict[str, Any] = {"name": name, "why": self.why}
        for path, value in self.values.items():
            set_path(document, path, value)
        try:
            return Recipe.model_validate(document)
        except ValidationError as error:
            raise InputError(f"{self.origin}: not a valid recipe: {explain(error)}") from None


def likely_batch(shape: ModelShape, tokens: int) -> tuple[int, str]:
    """Return the batch in tokens by the step law, rounded to whole sequences, and the reason."""
    laws = evaluate(shape.params, tokens, params_non_embedding=shape.params_non_embedding)
    step_law = next(law for law in laws if law.law == "Step Law 2025")
    assert step_law.batch_tokens is not None
    scale = f"{format_quantity(shape.params)} parameters, {format_quantity(tokens)} tokens"
    outside = "" if step_law.in_range else f"; a factor of {step_law.extrapolation:.3g} outside its range"
    batch = max(round(step_law.batch_tokens / shape.seq_len), 1) * shape.seq_len
    return batch, f"{step_law.law} at {scale}, in whole sequences{outside}"


def likely_lr(shape: ModelShape, tokens: int) -> tuple[float, str]:
    """Return the peak lr of the published run nearest in size, and the reason."""
    for neighbour, _ in nearest(shape.params, tokens, limit=99):
        if neighbour.peak_lr is not None:
            return neighbour.peak_lr, f"the peak of {neighbour.id}, the published run nearest in size"
    raise AssertionError("no published run tells its lr")
