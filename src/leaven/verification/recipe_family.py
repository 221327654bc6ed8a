"""The models and training runs of a check, made from a recipe at any width and depth."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from hashlib import blake2b

from pydantic import ValidationError

from leaven.data.tokens import TokenSet
from leaven.model.initialise import build_model
from leaven.recipe.data import Data
from leaven.recipe.errors import InputError
from leaven.recipe.files import explain
from leaven.recipe.recipe import NOT_NUMBERS, Recipe
from leaven.scaling.cells import TensorRatios
from leaven.scaling.rules import RULES
from leaven.scaling.table import ParameterTable, exponents, parameter_table
from leaven.scaling.transfer import transfer
from leaven.training.early_stopping import divergence_limit
from leaven.training.engine import check_trainable
from leaven.training.optimizer import Optimizer
from leaven.training.outcome import Outcome
from leaven.training.trial import train_trial
from leaven.verification.batches import Batches, corpus
from leaven.verification.model_instance import (
    ModelInstance,
    Quantity,
    RunScale,
    RunSetting,
    ScaleAxis,
    own_label,
)

Prepare = Callable[[Data, int], TokenSet]
"""A function from (data, vocabulary size) to the tokenised data, such as :func:`leaven.data.tokens.prepare`."""


@dataclass(frozen=True)
class RecipeFamily:
    """A recipe and its transfers to other widths and depths, with the same methods as
    :class:`leaven.verification.foreign.ForeignFamily`, which makes models with a user's factory."""

    recipe: Recipe
    batches: Batches  # for checks of a few steps; training runs read the recipe's own data
    table: Callable[[Recipe], ParameterTable] = parameter_table  # must be `parameter_table` for training runs
    grow_heads: bool = False  # widen by larger heads instead of more heads
    unit = "base value"  # of RunSetting.value
    takes_ratios = True  # whether its models can have another batch or duration

    @property
    def name(self) -> str:
        return self.recipe.name

    @property
    def rule(self) -> str:
        return self.recipe.scaling.rule

    @property
    def alpha(self) -> float:
        """The exponent alpha with which the rule multiplies residual branches by depth^-alpha. 1 if the rule has
        none."""
        scaling = self.recipe.scaling
        return scaling.alpha if "alpha" in RULES[scaling.rule].residual.text else 1.0

    @property
    def tokens(self) -> int:  # in a training run
        return self.recipe.data.tokens

    @property
    def batch_tokens(self) -> int:
        return self.recipe.batch.tokens

    @property
    def vocab_size(self) -> int:
        return self.recipe.model.vocab_size

    def value(self, quantity: Quantity) -> float:
        """Return the recipe's value of a quantity.

        Raises:
            InputError: if the recipe has no value for this quantity, or the value is 0 and cannot be swept.
        """
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
        """Return the exponent by which the rule scales a base value with the batch or duration. It is 0 for width and
        depth, over which the rule scales each tensor differently."""
        scaling = self.recipe.scaling
        cell = RULES[scaling.rule].columns.get(quantity)
        if cell is None or axis not in ("batch", "tokens"):
            return 0.0
        at = TensorRatios(**{axis: 2.0})
        return round(math.log2(cell.factor(at, exponents(scaling))), 12)

    def build(self, scale: RunScale, seed: int) -> ModelInstance:
        """Return a new model at a scale, with its optimizer and batches. The batch and tokens of the scale change
        only the settings of the optimizer.

        Raises:
            InputError: if the recipe cannot have this width and depth.
        """
        recipe = self._at(scale)
        table = self.table(recipe)
        model = build_model(recipe.model, table, seed)
        optimizer = Optimizer.build(dict(model.named_parameters()), table.rows, recipe.hyperparameters.optimizer)
        return ModelInstance(model, optimizer.adam, self.batches, seed, own_label)

    def trial(self, setting: RunSetting) -> "RecipeTrial":
        """Return a training run that can be executed in any process.

        Raises:
            InputError: if the recipe is invalid with this setting.
        """
        assert self.table is parameter_table, "training runs use the recipe's own table"
        recipe, scale = self.recipe, setting.scale
        changes: dict[str, object] = {
            f"hyperparameters.{setting.quantity}": setting.value,
            "data.seed": recipe.data.seed + setting.seed,
            "start": {},  # from scratch at every scale: start weights have a fixed shape
        }
        if not setting.ruled:
            # With its own batch and duration as base, the rule changes nothing else.
            changes["scaling.base.batch_tokens"] = round(recipe.base.batch_tokens * scale.batch)
            changes["scaling.base.tokens"] = round(recipe.base.tokens * scale.tokens)
        try:
            return RecipeTrial(self._at(scale).replace(changes))
        except ValidationError as error:
            raise InputError(f"{setting.quantity} {setting.value:g}: {explain(error)}") from None

    def _at(self, scale: RunScale) -> Recipe:
        shape = self.recipe.model
        return transfer(
            self.recipe,
            width=scale.width,
            depth=scale.depth,
            batch_tokens=round(self.batch_tokens * scale.batch),
            tokens=round(self.tokens * scale.tokens),
            d_head=scale.width // shape.n_heads if self.grow_heads else None,
            n_kv_heads=shape.n_kv_heads if self.grow_heads else None,
        )


@dataclass(frozen=True)
class RecipeTrial:
    """A training run of a recipe."""

    recipe: Recipe

    @property
    def key(self) -> str:
        """A hash of everything in the recipe that affects the loss. Names and reasons do not affect the loss."""
        document = self.recipe.model_dump(mode="json", exclude=NOT_NUMBERS)
        return blake2b(json.dumps(document, sort_keys=True).encode(), digest_size=12).hexdigest()

    @property
    def cost(self) -> float:
        return self.recipe.model.params * self.recipe.data.tokens

    def run(self) -> Outcome:
        outcome = train_trial(self.recipe)
        return replace(outcome, loss=min(outcome.loss, divergence_limit(self.recipe.model.vocab_size)))


def recipe_models(recipe: Recipe, prepare: Prepare) -> RecipeFamily:
    """Return the models of a recipe for a check that trains them in complete runs.

    Raises:
        InputError: if the recipe cannot be trained.
    """
    tokens, seq_len = prepare(recipe.data, recipe.model.vocab_size), recipe.model.seq_len
    check_trainable(recipe, tokens)
    return RecipeFamily(recipe, corpus(tokens, seq_len, recipe.batch.tokens // seq_len))
