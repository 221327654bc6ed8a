"""Full training runs of a recipe at other scales, for checks."""

import json
import math
from dataclasses import dataclass, field, replace

from pydantic import ValidationError

from leaven import storage
from leaven.errors import InputError
from leaven.recipe.files import explain
from leaven.recipe.recipe import NOT_NUMBERS, Recipe
from leaven.scaling.cells import TensorRatios
from leaven.scaling.rules import RULES
from leaven.scaling.transfer import transfer
from leaven.training.early_stopping import divergence_limit
from leaven.training.engine import check_trainable
from leaven.training.outcome import Outcome
from leaven.training.trial import train_trial
from leaven.verification.batches import Prepare
from leaven.verification.model_instance import Quantity, RunScale, RunSetting, ScaleAxis


@dataclass(frozen=True)
class RecipeFamily:
    """The training runs of a recipe at any scale."""

    recipe: Recipe
    text: str | None = field(default=None, kw_only=True)  # fingerprint that the tokens must have; None: any
    unit = "base value"  # a RunSetting.value is the value in the recipe, before scaling

    @property
    def name(self) -> str:
        return self.recipe.name

    @property
    def rule(self) -> str:
        return self.recipe.scaling.rule

    @property
    def tokens(self) -> int:  # in a training run
        return self.recipe.data.tokens

    @property
    def batch_tokens(self) -> int:
        return self.recipe.batch.tokens

    @property
    def sequences(self) -> int:  # in a batch
        return self.recipe.batch.tokens // self.recipe.model.seq_len

    @property
    def vocab_size(self) -> int:
        return self.recipe.model.vocab_size

    def params(self, scale: RunScale) -> int:
        return transfer(self.recipe, width=scale.width, depth=scale.depth).model.params

    def value(self, quantity: Quantity) -> float:
        """Return the recipe's value of a hyperparameter. Raise InputError if the value is 0 or has no effect."""
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
        """Return the rule's exponent of a hyperparameter along batch or tokens; 0 along width and depth."""
        scaling = self.recipe.scaling
        cell = RULES[scaling.rule].columns.get(quantity)
        if cell is None or axis not in ("batch", "tokens"):
            return 0.0
        return round(math.log2(cell.factor(TensorRatios(**{axis: 2.0}), scaling)), 12)

    def trial(self, setting: RunSetting) -> "RecipeTrial":
        """Return the training run of a setting. Raise InputError if the scale or the value is not valid."""
        recipe, scale = self.recipe, setting.scale
        batch_tokens, tokens = round(self.batch_tokens * scale.batch), round(self.tokens * scale.tokens)
        moved = transfer(recipe, width=scale.width, depth=scale.depth, batch_tokens=batch_tokens, tokens=tokens)
        changes: dict[str, object] = {
            f"hyperparameters.{setting.quantity}": setting.value,
            "data.seed": recipe.data.seed + setting.seed,
            "start": {},  # from scratch, because start weights have a fixed shape
        }
        own = getattr(recipe.hyperparameters.muon, setting.quantity, None)
        if own is not None:  # keep the ratio of Muon's value to AdamW's
            before = getattr(recipe.hyperparameters, setting.quantity)
            changes[f"hyperparameters.muon.{setting.quantity}"] = own * setting.value / before
        if not setting.ruled:
            # With this batch and run length as base, the rule changes nothing.
            changes["scaling.base.batch_tokens"] = round(recipe.base.batch_tokens * scale.batch)
            changes["scaling.base.tokens"] = round(recipe.base.tokens * scale.tokens)
        try:
            return RecipeTrial(moved.replace(changes), text=self.text)
        except ValidationError as error:
            raise InputError(f"{setting.quantity} {setting.value:g}: {explain(error)}") from None


@dataclass(frozen=True)
class RecipeTrial:
    """A training run of a recipe. ``text`` is the fingerprint that the recipe's tokens must have; None allows any."""

    recipe: Recipe
    text: str | None = field(default=None, kw_only=True)

    @property
    def key(self) -> str:
        """A hash of everything in the recipe that affects the loss."""
        document = self.recipe.model_dump(mode="json", exclude=NOT_NUMBERS)
        return storage.digest(json.dumps(document, sort_keys=True).encode(), 12)

    @property
    def cost(self) -> float:
        return self.recipe.model.params * self.recipe.data.tokens

    def run(self) -> Outcome:
        outcome = train_trial(self.recipe, inputs=self.text)
        return replace(outcome, loss=min(outcome.loss, divergence_limit(self.recipe.model.vocab_size)))


def recipe_models(recipe: Recipe, prepare: Prepare) -> RecipeFamily:
    """Return a recipe's training runs on the tokens from ``prepare``. Raise InputError if it cannot be trained."""
    tokens = prepare(recipe.data, recipe.model.vocab_size)
    check_trainable(recipe, tokens)
    return RecipeFamily(recipe, text=tokens.fingerprint)
