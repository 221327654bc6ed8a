"""Compare a recipe's parameter table with the settings of another trainer (an export target).

Settings that differ are lost in the export. Before the comparison, all output multipliers except that of tied
embeddings are folded into other settings. A matrix W with multiplier c becomes the matrix c W without a multiplier.
Both train alike if lr is multiplied by c, and eps and weight decay are divided by c. With ``adam``, weight decay is
part of the gradient, and is divided by c^2.
"""

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

from leaven.documents.runs import LossRow
from leaven.errors import InputError
from leaven.recipe.base import Part
from leaven.recipe.recipe import Recipe
from leaven.recipe.shape import ModelShape, Role
from leaven.scaling.table import folding, parameter_table

SAME = 1e-6  # relative difference up to which two numbers count as equal
# Relative difference up to which two initial stds count as equal: recipes have factors such as 1 / sqrt(2 n_layers)
# with four digits, and the std of a million random numbers varies by 0.07%.
SAME_START = 1e-3


@dataclass(frozen=True)
class ParameterSettings:
    init_mean: float
    init_std: float
    lr: float  # peak learning rate
    weight_decay: float
    beta1: float
    beta2: float
    eps: float
    multiplier: float = 1.0  # constant factor on the output of the matrix

    def folded(self, factor: float, decoupled: bool) -> "ParameterSettings":
        """Return the settings after the multiplier ``factor`` is folded into the weight. The model trains as before.

        ``decoupled`` says whether weight decay is separate from the gradient, as in AdamW. The field ``multiplier``
        does not change.
        """
        return replace(
            self,
            init_mean=self.init_mean * factor,
            init_std=self.init_std * factor,
            lr=self.lr * factor,
            eps=self.eps / factor,
            weight_decay=self.weight_decay / (factor if decoupled else factor**2),
        )


QUANTITIES = tuple(field.name for field in fields(ParameterSettings))


class ResolvedRecipe:
    """A recipe for export, with its parameter table, its batch in sequences and its length in steps."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.table = parameter_table(recipe)
        self.decoupled = recipe.hyperparameters.optimizer == "adamw"
        self.rows = {
            row.name: ParameterSettings(**{quantity: getattr(row, quantity) for quantity in QUANTITIES})
            for row in self.table.rows
        }
        self.folding = folding(recipe.model, self.table)
        self.sequences = recipe.batch.tokens // recipe.model.seq_len
        # The number of steps, if every step has the full batch: for a target without a batch ramp.
        self.steps = -(-recipe.data.tokens // recipe.batch.tokens)

    @cached_property
    def plain(self) -> dict[str, ParameterSettings]:
        """The settings of each parameter, by name, in a model without multipliers.

        That model trains like the recipe's model, except for gradient clipping.
        """
        return {
            name: replace(settings.folded(self.folding.get(name, 1.0), self.decoupled), multiplier=1.0)
            for name, settings in self.rows.items()
        }

    @cached_property
    def hidden(self) -> ParameterSettings:
        """The most frequent settings of hidden weights, for targets that have one lr for the whole model."""
        counts = Counter(self.rows[row.name] for row in self.table.rows if row.role is Role.HIDDEN_WEIGHT)
        return counts.most_common(1)[0][0]

    def in_steps(self, tokens: float) -> int:
        return round(tokens / self.recipe.batch.tokens)

    @property
    def cooldown_tokens(self) -> int:
        recipe = self.recipe
        left = recipe.data.tokens - recipe.schedule.warmup_tokens
        return min(round(recipe.schedule.decay_ratio * recipe.data.tokens), left)

    @cached_property
    def micro_batch(self) -> int:
        """The number of sequences in one forward pass of a data-parallel rank.

        With ``auto``, it is 1. Otherwise, it is the largest number up to the recipe's micro-batch that divides a
        rank's sequences at every batch size. Raise InputError if ``layout.dp`` does not divide a batch size.
        """
        recipe = self.recipe
        dp, wanted = recipe.layout.dp, recipe.batch.micro_batch
        share = 0
        for _, tokens in recipe.batch.sizes:
            sequences = tokens // recipe.model.seq_len
            if sequences % dp:
                raise InputError(
                    f"a batch of {sequences} sequences does not divide over {dp} data-parallel ranks, but every "
                    "target requires this; set layout.dp to a divisor of the number of sequences"
                )
            share = math.gcd(share, sequences // dp)
        return max(size for size in range(1, 1 + (1 if wanted == "auto" else wanted)) if share % size == 0)

    @property
    def accumulate(self) -> int:
        """The number of micro-batches that a data-parallel rank accumulates in a step, after any batch ramp."""
        return self.sequences // self.recipe.layout.dp // self.micro_batch


def compare(
    run: ResolvedRecipe,
    given: Mapping[str, ParameterSettings],
    attention_scale: float | None,
    reasons: Mapping[str, str],
    *,
    plain: bool,
) -> tuple[list[LossRow], int]:
    """Return what an export does not preserve, as (rows, number of differences).

    A row has one setting, such as lr, its value in the recipe, its value in the target, and all modules with these
    two values. Each module of a row counts as one difference. A different attention scale is one more row and
    difference.

    Args:
        given: the target's settings for each parameter to compare, by leaven's name of the parameter.
        attention_scale: the target's factor on query . key; None if it is folded into the weights.
        reasons: by setting, why the target cannot have the recipe's value; "*" stands for all other settings.
        plain: whether the target's model has no multipliers.
    """
    ours = run.plain if plain else run.rows
    pairs: dict[str, list[list[ParameterSettings]]] = {}  # (ours, theirs) of each parameter, by module
    for row in run.table.rows:
        if row.name in given:
            pair = [ours[row.name], given[row.name]]
            if row.role is not Role.TIED_EMBEDDING:
                pair = [replace(side.folded(side.multiplier, run.decoupled), multiplier=1.0) for side in pair]
            pairs.setdefault(row.module, []).append(pair)
    found: dict[tuple[str, str, str], list[str]] = {}
    for quantity in QUANTITIES:
        same = SAME_START if quantity == "init_std" else SAME
        for module, sides in pairs.items():
            values = [(getattr(left, quantity), getattr(right, quantity)) for left, right in sides]
            if any(not math.isclose(left, right, rel_tol=same, abs_tol=1e-300) for left, right in values):
                found.setdefault((quantity, *distinct_texts(*zip(*values, strict=True))), []).append(module)
    losses = [
        LossRow(
            key=f"{quantity} of {', '.join(modules)}",
            value=mine,
            why=f"would be {theirs}: {reasons.get(quantity, reasons.get('*'))}",
        )
        for (quantity, mine, theirs), modules in found.items()
    ]
    differences = sum(map(len, found.values()))
    scale = run.table.attention_scale
    if attention_scale is not None and not math.isclose(attention_scale, scale, rel_tol=SAME):
        mine, theirs = distinct_texts([scale], [attention_scale])
        why = f"would be {theirs}: {reasons['attention_scale']}"
        losses.append(LossRow(key="attention scale", value=mine, why=why))
        differences += 1
    return losses, differences


def distinct_texts(ours: Sequence[float], theirs: Sequence[float]) -> tuple[str, str]:
    """Write each list as text: "0.01", or "0.01 .. 0.02" for its lowest and highest number.

    Numbers have four digits, or more if the two texts would be equal.
    """

    def text(values: Sequence[float], digits: int) -> str:
        low, high = (f"{value:.{digits}g}" for value in (min(values), max(values)))
        return low if low == high else f"{low} .. {high}"

    digits = next((n for n in (4, 6, 8, 12) if text(ours, n) != text(theirs, n)), 17)
    return text(ours, digits), text(theirs, digits)


def as_written(value: Any) -> Any:
    """Return a value of a recipe as a user writes it, without keys that have default values."""
    return value.model_dump(exclude_defaults=True) if isinstance(value, Part) else value


def fitted(shape: ModelShape, holds: Mapping[str, Sequence[Any]], target: str) -> tuple[ModelShape, list[LossRow]]:
    """Return a model shape that the target supports, and a row for each replaced value.

    ``holds`` maps keys of ``[model]`` to lists of supported values:

    - A value that is not in its list is replaced by the first value of the list. ``["any"]`` allows every value. In
      the list of d_attention, "d_model" means None.
    - A key in ``ModelShape.added`` without a list gets its default. Other keys without a list do not change.
    - If ``holds`` is empty, nothing changes.

    Raise InputError if d_attention would become d_model, and d_model is not a multiple of n_heads.
    """
    changes = {
        key: default
        for key, default in ModelShape.added_defaults().items()
        if holds and key not in holds and getattr(shape, key) != default
    }
    losses = [
        LossRow(
            key=f"model.{key}",
            value=as_written(getattr(shape, key)),
            why=f"would be {'left out' if default is None else json.dumps(default)}: not supported by {target}",
        )
        for key, default in changes.items()
    ]
    for key, held in holds.items():
        value = getattr(shape, key)
        if held == ["any"]:
            continue
        if value is None:
            value = "d_model"
        if value not in held:
            changes[key] = None if held[0] == "d_model" else held[0]
            names = [json.dumps(each) if isinstance(each, bool) else f"{each}" for each in held]
            why = f"would be {names[0]}: {target} supports only {' or '.join(names)}"
            losses.append(LossRow(key=f"model.{key}", value=value, why=why))
    if "d_attention" in changes:
        if shape.d_model % shape.n_heads:
            raise InputError(
                f"{target} supports only heads of size d_model / n_heads, and {shape.d_model} / {shape.n_heads} is "
                "not a whole number; choose another target"
            )
        changes["d_head"] = shape.d_model // shape.n_heads
    return (ModelShape.model_validate(shape.model_dump() | changes) if changes else shape), losses
