"""Make small models and their initial values from a recipe of any size, for checks that train a few steps.

Without --widths, a check trains models of widths of about 64 to 512. Small widths suffice, because a scaling
rule has the same exponents at all sizes if models keep their proportions. Proportions that are impossible at
these widths are changed.
"""

from dataclasses import dataclass, replace
from typing import Any

from leaven.data.sources import source_parts
from leaven.errors import InputError
from leaven.model.initialisation import build_model
from leaven.recipe.hyperparameters import Multipliers
from leaven.recipe.recipe import Recipe
from leaven.recipe.shape import ModelShape, Role
from leaven.scaling.rules import RULES
from leaven.scaling.table import ParameterTable, optimizer_groups, parameter_table
from leaven.scaling.transfer import transfer
from leaven.training.optimizer import Optimizer
from leaven.verification.batches import Batches
from leaven.verification.model_instance import ModelInstance, RunScale, own_labels
from leaven.verification.recipe_family import RecipeFamily

WIDTH, TIMES = 64, (1, 2, 4, 8)  # the smallest width, and the widths as multiples of it
DEPTHS = (2, 4, 8, 16)
EXPERT_DEPTHS = (4, 8, 16)
"""Depths of models with experts. Depth 2 is left out, because it would bias a check over depth: the input of the
middle block's MLP changes more at depth 2 than at depth 8 (slope -0.22). At depth 2, three quarters of all branches
come before this MLP, in deep models about half, and experts change more in a step than dense MLPs."""

# The largest sequence length of small models and, if leaven trains the tokenizer, their largest vocabulary.
VOCABULARY, SEQ_LEN = 4096, 256
LARGEST_GROUP = 8  # the most query heads per kv head if the recipe does not fit width 64: eight heads of dimension 8


def small_recipe(recipe: Recipe) -> tuple[Recipe, tuple[str, ...]]:
    """Return the recipe with a width near 64, and a text such as "d_head 128 -> 64" for each changed proportion.

    The init_std of the new recipe is a placeholder, which :func:`calibrated` replaces.
    """
    shape = _fitted(recipe.model)
    sizes: dict[str, Any] = {"seq_len": min(shape.seq_len, SEQ_LEN)}
    if shape.experts:
        # The MLP of the first block reads mostly the embedding. So the MLP's output changes mostly because the MLP's
        # weights change, and in small models this change falls with the width (slopes from -0.15 to -0.18).
        sizes["experts"] = shape.experts.model_copy(update={"dense_layers": 0})
    # The vocabulary of another tokenizer, or of token ids, has a fixed size.
    if recipe.data.tokenizer == "bpe" and not any(source_parts(each).ids for each in recipe.data.sources):
        sizes["vocab_size"] = min(shape.vocab_size, VOCABULARY)
    shape = shape.model_copy(update=sizes)
    before, after = _proportions(recipe.model), _proportions(shape)
    changed = tuple(
        f"{name} {before[name]:,.5g} -> {after[name]:,.5g}" for name in before if before[name] != after[name]
    )
    sequences = max(recipe.batch.tokens // recipe.model.seq_len, 16)
    recipe = recipe.replace(
        {
            "model": shape.model_dump(),
            "batch": {"tokens": sequences * shape.seq_len},
            "scaling.base": None,
            "start": {},
            "hyperparameters.init": "rule",
            "hyperparameters.init_std": 1.0,  # replaced by `calibrated`
        }
    )
    return recipe, changed


def _fitted(shape: ModelShape) -> ModelShape:
    """Return the shape at width 64 and depth 2. If this is impossible, use a width near 64 and other heads."""
    try:
        return shape.scaled(WIDTH, DEPTHS[0])
    except ValueError:
        pass
    group = min(shape.n_heads // shape.n_kv_heads, LARGEST_GROUP)
    d_head = min(shape.d_head, 1 << (max(WIDTH // group, 8).bit_length() - 1))
    d_head -= d_head % 2 if d_head > 1 else 0
    width = max(round(WIDTH / (group * d_head)), 1) * group * d_head
    ratio = (shape.d_attention or shape.d_model) / shape.d_model
    heads = max(round(ratio * width / (group * d_head)), 1) * group
    changes = {
        "n_layers": DEPTHS[0],
        "d_model": width,
        "d_attention": heads * d_head if shape.d_attention else None,
        "n_heads": heads,
        "n_kv_heads": heads // group,
        "d_head": d_head,
        "d_ff": max(round(shape.d_ff * width / shape.d_model), 1),
    }
    return ModelShape.model_validate(shape.model_dump() | changes)


def _proportions(shape: ModelShape) -> dict[str, float]:
    return {
        "d_head": shape.d_head,
        "d_ff / d_model": shape.d_ff / shape.d_model,
        "heads per kv head": shape.n_heads // shape.n_kv_heads,
        "dense layers": shape.experts.dense_layers if shape.experts else 0,
        "vocab_size": shape.vocab_size,
        "seq_len": shape.seq_len,
    }


@dataclass(frozen=True)
class CheckStart:
    """Settings with which the small models of a check behave like large models."""

    hidden: float  # standard deviation of hidden weights, times sqrt(width)
    residual: float  # multiplier of the residual branches
    embedding_lr: float = 1.0  # multiplies the lr of the embedding


def calibrated(recipe: Recipe, width: int, depth: int, start: CheckStart) -> Recipe:
    """Return the recipe with the settings in ``start``, and with ``width`` and ``depth`` as its base.

    These settings let small models change with size as large models do:

    - The embedding and learned positions start at RMS 1. With a smaller RMS, the residual stream of a model with two
      layers would be mostly outputs of branches. The sum of these outputs changes with the depth: as L^(1/2 - alpha)
      in L layers, if the rule multiplies each branch by L^-alpha. Gradients inside blocks would then have wrong
      exponents.
    - The unembedding starts at RMS 1/width. With a larger RMS, the first gradient of the final norm's gain would fall
      as 1/width^2 instead of 1/width, and the logits would stay near their initial values for longer. For tied
      embeddings, see :meth:`SmallModels.table`.
    - Routers start at RMS 1/width. With a larger RMS, their logits would fall towards 0 as the width grows, and the
      mixture of experts would depend on the width.

    Raise InputError if the model cannot have this width and depth.
    """
    try:
        recipe.model.scaled(width, depth)
    except ValueError as error:
        raise InputError(f"--widths: {error}; or leave --widths out to use widths that fit this recipe") from None
    std = start.hidden * width**-0.5
    starts = {"embedding": 1.0, "positions": 1.0, "unembedding": 1 / width, "mlp.router": 1 / width}
    changes: dict[str, object] = {
        f"hyperparameters.modules.{module}.init_std": starts.get(module, std) / std for module in recipe.model.modules
    }
    changes |= {"hyperparameters.init_std": std, "hyperparameters.residual": start.residual}
    lr = recipe.hyperparameters.modules.get("embedding", Multipliers()).lr
    changes["hyperparameters.modules.embedding.lr"] = lr * start.embedding_lr
    base = {"width": width, "depth": depth, "batch_tokens": recipe.batch.tokens, "tokens": recipe.data.tokens}
    return recipe.replace(changes | {"hyperparameters.init": "rule", "scaling.base": base})


@dataclass(frozen=True)
class SmallModels(RecipeFamily):
    """The models of a :func:`calibrated` recipe at any scale, for checks of a few steps."""

    batches: Batches
    grow_heads: bool = False  # wider models have larger heads instead of more heads
    takes_ratios = True  # whether the rule can adapt to another batch or duration

    @property
    def alpha(self) -> float:
        """The alpha of a rule that multiplies residual branches by depth^-alpha; 1 for other rules."""
        scaling = self.recipe.scaling
        return scaling.alpha if "alpha" in RULES[scaling.rule].residual.text else 1.0

    def table(self, recipe: Recipe) -> ParameterTable:
        """Return the parameter table of ``recipe``. With tied embeddings, the logits are divided by the base's width.

        A tied matrix starts at RMS 1, like an embedding. An untied unembedding starts at RMS 1/width. The division
        makes up for this difference. The divisor is the same at every scale.
        """
        table = parameter_table(recipe)
        rows = tuple(
            replace(row, multiplier=row.multiplier / recipe.base.width) if row.role is Role.TIED_EMBEDDING else row
            for row in table.rows
        )
        return replace(table, rows=rows)

    def build(self, scale: RunScale, seed: int) -> ModelInstance:
        """Return a new model with its optimizer. Batch and tokens of ``scale`` change only the optimizer's settings:
        every model is trained on the same batches."""
        shape = self.recipe.model
        recipe = transfer(
            self.recipe,
            width=scale.width,
            depth=scale.depth,
            batch_tokens=round(self.recipe.batch.tokens * scale.batch),
            tokens=round(self.recipe.data.tokens * scale.tokens),
            d_head=scale.width // shape.n_heads if self.grow_heads else None,
            n_kv_heads=shape.n_kv_heads if self.grow_heads else None,
        )
        table = self.table(recipe)
        model = build_model(recipe.model, table, seed)
        optimizer = Optimizer.build(
            optimizer_groups(table.rows, dict(model.named_parameters())), recipe.hyperparameters
        )
        return ModelInstance(model, optimizer.adam, self.batches, seed, own_labels(model))
