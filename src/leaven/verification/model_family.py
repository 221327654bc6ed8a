"""Families: one model at any width and depth, with its optimiser and its data. Checks see a model as a family only.

A recipe is a family. So is a factory of yours, ``module:factory``; see :mod:`leaven.verification.foreign`.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from pydantic import ValidationError
from torch import Tensor, nn

from leaven.model.initialise import build_model
from leaven.recipe.errors import InputError
from leaven.recipe.files import explain
from leaven.recipe.recipe import NOT_NUMBERS, Recipe
from leaven.recipe.shape import Role
from leaven.scaling.cells import TensorRatios
from leaven.scaling.rules import RULES
from leaven.scaling.table import ParameterTable, exponents, resolve
from leaven.scaling.transfer import transfer
from leaven.training.early_stopping import divergence_limit
from leaven.training.optimiser import Optimiser
from leaven.training.outcome import Outcome
from leaven.training.trial import train_trial
from leaven.verification.activation_recorder import tensor_of
from leaven.verification.batches import Batches, TokenBatch
from leaven.verification.runs import CheckTrial


@dataclass(frozen=True)
class ModelInstance:
    """One model of a family. ``label`` gives the line that a module or parameter stands in, None for no line."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batch: Callable[[int], TokenBatch]
    label: Callable[[str], str | None]

    def loss(self, step: int) -> Tensor:
        """Mean cross-entropy in nats of the batch of a step."""
        return self.loss_of(self.batch(step))

    def loss_of(self, batch: TokenBatch) -> Tensor:
        """Mean cross-entropy in nats of any batch."""
        inputs, targets = batch
        logits = self.logits(inputs)
        return F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten().to(logits.device))

    def logits(self, inputs: Tensor) -> Tensor:
        found = tensor_of(self.model(inputs.to(next(self.model.parameters()).device)))
        assert found is not None, "the model gives no tensor"
        return found

    def scale_lr(self, factor: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] *= factor


Quantity = Literal["lr", "weight_decay", "init_std"]
"""A hyperparameter whose best value a check of whole runs looks for."""

ScaleAxis = Literal["width", "depth", "batch", "tokens"]


@dataclass(frozen=True)
class RunScale:
    """The scale of a run. ``batch`` and ``tokens`` are multiples of the family's own."""

    width: int
    depth: int
    batch: float = 1.0
    tokens: float = 1.0


@dataclass(frozen=True)
class RunSetting:
    """One whole run of a family: ``quantity`` has ``value``, in the family's unit.

    ``batch`` and ``tokens`` are multiples of the family's own. Without ``ruled`` nothing else moves with them.
    """

    width: int
    depth: int
    value: float
    seed: int
    batch: float = 1.0
    tokens: float = 1.0
    ruled: bool = True
    quantity: Quantity = "lr"


class ModelFamily(Protocol):
    """``alpha`` is the depth exponent of the rule, 1 where it has none. ``tokens`` are those of a whole run,
    ``batch_tokens`` those of a step."""

    @property
    def name(self) -> str: ...

    @property
    def rule(self) -> str | None: ...

    @property
    def alpha(self) -> float: ...

    @property
    def unit(self) -> str:
        """Of the values of a :class:`RunSetting`."""
        ...

    @property
    def tokens(self) -> int: ...

    @property
    def batch_tokens(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def takes_ratios(self) -> bool:
        """Whether it has models of another batch or duration."""
        ...

    def value(self, quantity: Quantity) -> float:
        """The family's own value.

        Raises:
            InputError: if a check cannot move this quantity.
        """
        ...

    def exponent(self, quantity: Quantity, axis: ScaleAxis) -> float:
        """The power of the batch or the duration by which the rule moves a base value; 0 in width and depth, where
        the power is each tensor's own."""
        ...

    def build(self, width: int, depth: int, seed: int, *, batch: float = 1.0, tokens: float = 1.0) -> ModelInstance:
        """A fresh model of this width and depth, and its first batches; ``batch`` and ``tokens`` are multiples of the
        family's own, for the optimiser.

        Raises:
            InputError: if the family has no such model.
        """
        ...

    def trial(self, setting: RunSetting) -> CheckTrial:
        """A whole run, to be run anywhere.

        Raises:
            InputError: if the family has no such run.
        """
        ...


@dataclass(frozen=True)
class RecipeFamily:
    """A recipe and all its transfers in width and depth: wider by more heads, or by larger ones with ``grow_heads``.

    ``table`` gives a recipe's parameter table; whole runs have the recipe's own, and its own batches.
    """

    recipe: Recipe
    batches: Batches
    table: Callable[[Recipe], ParameterTable] = resolve
    grow_heads: bool = False

    @property
    def name(self) -> str:
        return self.recipe.name

    @property
    def rule(self) -> str:
        return self.recipe.scaling.rule

    @property
    def alpha(self) -> float:
        scaling = self.recipe.scaling
        return scaling.alpha if "alpha" in RULES[scaling.rule].residual.text else 1.0

    @property
    def unit(self) -> str:
        return "base value"

    @property
    def tokens(self) -> int:
        return self.recipe.data.tokens

    @property
    def batch_tokens(self) -> int:
        return self.recipe.batch.tokens

    @property
    def vocab_size(self) -> int:
        return self.recipe.model.vocab_size

    @property
    def takes_ratios(self) -> bool:
        return True

    def value(self, quantity: Quantity) -> float:
        hyperparameters = self.recipe.hyperparameters
        if quantity == "init_std" and hyperparameters.init != "rule":
            raise InputError(
                f'the recipe starts from init = "{hyperparameters.init}", which has no init_std; '
                "type --set hyperparameters.init=rule --set hyperparameters.init_std=0.05 or another value"
            )
        value: float = getattr(hyperparameters, quantity)
        if not value:
            raise InputError(
                f"{quantity} is 0, so there is nothing to move; set it: --set hyperparameters.{quantity}=0.1"
            )
        return value

    def exponent(self, quantity: Quantity, axis: ScaleAxis) -> float:
        scaling = self.recipe.scaling
        cell = RULES[scaling.rule].columns.get(quantity)
        if cell is None or axis not in ("batch", "tokens"):
            return 0.0
        at = TensorRatios(**{axis: 2.0})
        return round(math.log2(cell.factor(at, exponents(scaling))), 12)

    def build(self, width: int, depth: int, seed: int, *, batch: float = 1.0, tokens: float = 1.0) -> ModelInstance:
        moved = self._moved(width, depth, round(self.recipe.batch.tokens * batch), round(self.tokens * tokens))
        table = self.table(moved)
        model = build_model(moved.model, table, seed)
        optimiser = Optimiser.build(dict(model.named_parameters()), table.rows, moved.hyperparameters.optimizer)
        return ModelInstance(model, optimiser.adam, partial(self.batches, seed), _own_label)

    def trial(self, setting: RunSetting) -> "RecipeTrial":
        assert self.table is resolve, "a whole run has its recipe's own table"
        recipe = self.recipe
        moved = self._moved(
            setting.width,
            setting.depth,
            round(recipe.batch.tokens * setting.batch),
            round(recipe.data.tokens * setting.tokens),
        )
        changes: dict[str, object] = {
            f"hyperparameters.{setting.quantity}": setting.value,
            "data.seed": recipe.data.seed + setting.seed,
            "start": {},  # from scratch at every scale: weights to start from are of one shape
        }
        if not setting.ruled:
            # With its own batch and duration as base, nothing but these moves.
            changes["scaling.base.batch_tokens"] = round(recipe.base.batch_tokens * setting.batch)
            changes["scaling.base.tokens"] = round(recipe.base.tokens * setting.tokens)
        try:
            return RecipeTrial(moved.replace(changes))
        except ValidationError as error:
            raise InputError(f"{setting.quantity} {setting.value:g}: {explain(error)}") from None

    def _moved(self, width: int, depth: int, batch_tokens: int, tokens: int | None = None) -> Recipe:
        shape = self.recipe.model
        return transfer(
            self.recipe,
            width=width,
            depth=depth,
            batch_tokens=batch_tokens,
            tokens=tokens,
            d_head=width // shape.n_heads if self.grow_heads else None,
            n_kv_heads=shape.n_kv_heads if self.grow_heads else None,
        )


@dataclass(frozen=True)
class RecipeTrial:
    """A recipe as a whole run."""

    recipe: Recipe

    @property
    def key(self) -> str:
        """The same for two recipes that compute the same losses: names, reasons and the like are left out."""
        document = self.recipe.model_dump(mode="json", exclude=NOT_NUMBERS)
        return blake2b(json.dumps(document, sort_keys=True).encode(), digest_size=12).hexdigest()

    @property
    def cost(self) -> float:
        return self.recipe.model.params * self.recipe.data.tokens

    def run(self) -> Outcome:
        outcome = train_trial(self.recipe)
        return replace(outcome, loss=min(outcome.loss, divergence_limit(self.recipe.model.vocab_size)))


@dataclass(frozen=True)
class CheckStart:
    """Where a check of some steps starts: hidden weights at ``hidden`` / sqrt(width), branches times ``residual``."""

    hidden: float
    residual: float


def calibrated(recipe: Recipe, width: int, depth: int, start: CheckStart) -> Recipe:
    """The recipe with its base at a width and depth, and with initial values that are near the limit of large models.

    Exponents depend on neither, but how soon they show does. Here the embedding starts at RMS 1 and the readout at
    1/width (one that is tied by its multiplier: :func:`calibrated_table`). With a small embedding the stream at depth
    2 is nearly all branches, whose sum falls with depth as L^(1/2 - alpha), and the gradients inside the blocks are
    off by as much. With a large readout the gain of the final norm has a gradient of order N^-2 first, and the logits
    stay initial for longer.

    Raises:
        InputError: if the recipe has no model of this width.
    """
    try:
        recipe.model.scaled(width, depth)
    except ValueError as error:
        raise InputError(f"--widths: {error}; or leave --widths out, for widths that fit this recipe") from None
    std = start.hidden * width**-0.5
    starts = {"embedding": 1.0, "positions": 1.0, "unembedding": 1 / width}
    changes: dict[str, object] = {
        f"hyperparameters.modules.{module}.init_std": starts.get(module, std) / std for module in recipe.model.modules
    }
    changes |= {"hyperparameters.init_std": std, "hyperparameters.residual": start.residual}
    base = {"width": width, "depth": depth, "batch_tokens": recipe.batch.tokens, "tokens": recipe.data.tokens}
    return recipe.replace(changes | {"hyperparameters.init": "rule", "scaling.base": base})


def calibrated_table(recipe: Recipe) -> ParameterTable:
    """The parameter table of a :func:`calibrated` recipe.

    A tied matrix cannot start at 1 for the embedding and at 1/width for the readout. It starts at 1, and its forward
    multiplier is divided by the base's width, at every scale, which changes no exponent.
    """
    table = resolve(recipe)
    rows = tuple(
        replace(row, multiplier=row.multiplier / recipe.base.width) if row.role is Role.TIED_EMBEDDING else row
        for row in table.rows
    )
    return replace(table, rows=rows)


def plain_label(name: str) -> str:
    """A dotted name without its inner numbers: all layers stand in one line; ``.weight`` is left out."""
    first, *rest = name.split(".")
    parts = [first, *(part for part in rest if not part.isdigit())]
    return ".".join(parts[:-1] if parts[-1] == "weight" else parts) or "output"


def _own_label(name: str) -> str:
    """As a person names leaven's own modules: a block's output is the residual stream, the model's the logits."""
    plain = plain_label(name)
    named = {"output": "unembedding", "layers": "residual"}
    return named.get(plain, plain.removeprefix("layers."))
