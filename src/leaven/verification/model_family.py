"""Model families: a model at any width and depth, with its optimiser and data. Checks use models through this
interface.

:class:`RecipeFamily` is made from a recipe, :class:`leaven.verification.foreign.ForeignFamily` from a user's factory.
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
    """One model of a family."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batch: Callable[[int], TokenBatch]  # the batch of a step
    label: Callable[[str], str | None]  # name of a module or parameter -> its label in tables; None leaves it out

    def loss(self, step: int) -> Tensor:
        """Return the mean cross-entropy of the batch of a step, in nats."""
        return self.loss_of(self.batch(step))

    def loss_of(self, batch: TokenBatch) -> Tensor:
        """Return the mean cross-entropy of a batch, in nats."""
        inputs, targets = batch
        logits = self.logits(inputs)
        return F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten().to(logits.device))

    def logits(self, inputs: Tensor) -> Tensor:
        found = tensor_of(self.model(inputs.to(next(self.model.parameters()).device)))
        assert found is not None, "the model returns no tensor"
        return found

    def scale_lr(self, factor: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] *= factor


Quantity = Literal["lr", "weight_decay", "init_std"]
"""A hyperparameter that a check sweeps."""

ScaleAxis = Literal["width", "depth", "batch", "tokens"]


@dataclass(frozen=True)
class RunScale:
    """The scale of a run."""

    width: int
    depth: int
    batch: float = 1.0  # multiple of the family's own
    tokens: float = 1.0  # multiple of the family's own


@dataclass(frozen=True)
class RunSetting:
    """One training run of a family."""

    width: int
    depth: int
    value: float  # of ``quantity``, in the family's unit
    seed: int
    batch: float = 1.0  # multiple of the family's own
    tokens: float = 1.0  # multiple of the family's own
    ruled: bool = True  # whether the rule adapts hyperparameters to the batch and tokens
    quantity: Quantity = "lr"


class ModelFamily(Protocol):
    """A model at any width and depth."""

    @property
    def name(self) -> str: ...

    @property
    def rule(self) -> str | None:
        """The scaling rule, or None if the factory applies its own."""
        ...

    @property
    def alpha(self) -> float:
        """The depth exponent of the rule; 1 if it has none."""
        ...

    @property
    def unit(self) -> str:
        """The unit of :attr:`RunSetting.value`."""
        ...

    @property
    def tokens(self) -> int:
        """Of a training run."""
        ...

    @property
    def batch_tokens(self) -> int:
        """Of a training step."""
        ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def takes_ratios(self) -> bool:
        """Whether its models can have another batch or duration."""
        ...

    def value(self, quantity: Quantity) -> float:
        """Return the family's own value of a quantity.

        Raises:
            InputError: if a check cannot change this quantity.
        """
        ...

    def exponent(self, quantity: Quantity, axis: ScaleAxis) -> float:
        """Return the exponent by which the rule scales a base value with the batch or duration.

        0 for width and depth, where each tensor has its own exponent.
        """
        ...

    def build(self, width: int, depth: int, seed: int, *, batch: float = 1.0, tokens: float = 1.0) -> ModelInstance:
        """Return a new model of this width and depth with its optimiser and batches.

        ``batch`` and ``tokens`` are multiples of the family's own; they only affect the optimiser.

        Raises:
            InputError: if the family cannot have this size.
        """
        ...

    def trial(self, setting: RunSetting) -> CheckTrial:
        """Return a training run that can be executed in any process.

        Raises:
            InputError: if the setting is not possible.
        """
        ...


@dataclass(frozen=True)
class RecipeFamily:
    """A recipe and its transfers to other widths and depths."""

    recipe: Recipe
    batches: Batches  # for checks of a few steps; training runs read the recipe's own data
    table: Callable[[Recipe], ParameterTable] = resolve  # must be `resolve` for training runs
    grow_heads: bool = False  # widen by larger heads instead of more heads

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
                f"{quantity} is 0, so it cannot be swept; set it, e.g. --set hyperparameters.{quantity}=0.1"
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
        assert self.table is resolve, "training runs use the recipe's own table"
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
            "start": {},  # from scratch at every scale: start weights have a fixed shape
        }
        if not setting.ruled:
            # With its own batch and duration as base, the rule changes nothing else.
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
    """A recipe as a training run."""

    recipe: Recipe

    @property
    def key(self) -> str:
        """A hash of everything that affects the loss; names and reasons do not."""
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
    """Initial values for a short check."""

    hidden: float  # std of hidden weights, times sqrt(width)
    residual: float  # multiplier of the branches


def calibrated(recipe: Recipe, width: int, depth: int, start: CheckStart) -> Recipe:
    """Return the recipe with its base at a width and depth, and with initial values close to the large-model limit.

    The exponents depend on neither, but with them small models already show the exponents of large ones. The
    embedding starts at RMS 1 and the readout at 1/width (a tied one by its multiplier: :func:`calibrated_table`).
    With a small embedding, the stream at depth 2 consists mostly of branches, whose sum falls with depth as L^(1/2 -
    alpha), and the gradients inside blocks have the same error. With a large readout, the gradient of the final
    norm's gain is of order N^-2 at first, and the logits keep their initial values for longer.

    Raises:
        InputError: if the width does not fit the recipe.
    """
    try:
        recipe.model.scaled(width, depth)
    except ValueError as error:
        raise InputError(f"--widths: {error}; or leave --widths out to use widths that fit this recipe") from None
    std = start.hidden * width**-0.5
    starts = {"embedding": 1.0, "positions": 1.0, "unembedding": 1 / width}
    changes: dict[str, object] = {
        f"hyperparameters.modules.{module}.init_std": starts.get(module, std) / std for module in recipe.model.modules
    }
    changes |= {"hyperparameters.init_std": std, "hyperparameters.residual": start.residual}
    base = {"width": width, "depth": depth, "batch_tokens": recipe.batch.tokens, "tokens": recipe.data.tokens}
    return recipe.replace(changes | {"hyperparameters.init": "rule", "scaling.base": base})


def calibrated_table(recipe: Recipe) -> ParameterTable:
    """Return the parameter table of a :func:`calibrated` recipe.

    A tied matrix cannot start at 1 for the embedding and at 1/width for the readout. It starts at 1, and its forward
    multiplier is divided by the base's width at every scale, which changes no exponent.
    """
    table = resolve(recipe)
    rows = tuple(
        replace(row, multiplier=row.multiplier / recipe.base.width) if row.role is Role.TIED_EMBEDDING else row
        for row in table.rows
    )
    return replace(table, rows=rows)


def plain_label(name: str) -> str:
    """Return a dotted name without layer numbers and ``.weight``, so that all layers share a label."""
    first, *rest = name.split(".")
    parts = [first, *(part for part in rest if not part.isdigit())]
    return ".".join(parts[:-1] if parts[-1] == "weight" else parts) or "output"


def _own_label(name: str) -> str:
    """Label leaven's own modules: the output of a block is "residual", the output of the model "unembedding"."""
    plain = plain_label(name)
    named = {"output": "unembedding", "layers": "residual"}
    return named.get(plain, plain.removeprefix("layers."))
