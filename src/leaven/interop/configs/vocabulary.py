"""What a target has to express of a recipe, and what of it is lost.

A target says what it would give every parameter (:class:`Given`); what differs from the recipe's table is lost, and
nobody has to remember to say so. Two forms of the same training are no difference: a matrix whose output is
multiplied by c trains as one that is c times as large does, at c times the lr, eps / c and decay / c (the decay of
``adam``, which joins the gradient, by c squared). So both sides are compared with their multipliers folded in.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from leaven.recipe.errors import InputError
from leaven.recipe.recipe import Recipe
from leaven.recipe.shape import ModelShape, Role
from leaven.scaling.folding import folding
from leaven.scaling.table import ParameterTable, resolve

SAME = 1e-6
"""Relative difference up to which two numbers are one, as written in seven digits or computed in another order."""
SAME_START = 1e-3
"""The same for standard deviations of initial values: recipes write factors such as 1 / sqrt(2 L) in four digits, and
the values that a matrix of a million numbers is drawn as spread by 0.07% themselves."""


@dataclass(frozen=True)
class Loss:
    """A value of the recipe that a target does not take over: what the recipe says, and what happens instead.

    ``modules`` is the number of those that lose it.
    """

    key: str
    value: Any
    why: str
    modules: int = 1

    @property
    def text(self) -> str:
        value = f"{self.value:.12g}" if isinstance(self.value, float) else f"{self.value}"
        return f"{self.key} = {value}: {self.why}"


@dataclass(frozen=True)
class Export:
    """Files by name, one under "" where the target takes a single one; what is lost; what else to know."""

    files: Mapping[str, str]
    losses: tuple[Loss, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Given:
    """What a parameter gets: ``multiplier`` acts on the output of the matrix."""

    init_mean: float
    init_std: float
    lr: float
    weight_decay: float
    beta1: float
    beta2: float
    eps: float
    multiplier: float = 1.0

    def folded(self, factor: float, decoupled: bool) -> "Given":
        """As it would have to be with ``factor`` in the parameter itself, for the same training."""
        return replace(
            self,
            init_mean=self.init_mean * factor,
            init_std=self.init_std * factor,
            lr=self.lr * factor,
            eps=self.eps / factor,
            weight_decay=self.weight_decay / (factor if decoupled else factor**2),
        )


QUANTITIES = ("init_mean", "init_std", "lr", "weight_decay", "beta1", "beta2", "eps", "multiplier")


@dataclass(frozen=True)
class Wanted:
    """A recipe with its table, in the terms of the targets: sequences, optimiser steps, micro-batches."""

    recipe: Recipe
    table: ParameterTable

    @classmethod
    def of(cls, recipe: Recipe) -> "Wanted":
        return cls(recipe, resolve(recipe))

    @property
    def decoupled(self) -> bool:
        return self.recipe.hyperparameters.optimizer == "adamw"

    @property
    def rows(self) -> dict[str, Given]:
        """The table as it is."""
        return {
            row.name: Given(**{quantity: getattr(row, quantity) for quantity in QUANTITIES})
            for row in self.table.rows
        }

    @property
    def plain(self) -> dict[str, Given]:
        """The table of a model without multipliers that trains the same, but for a clip of the gradients."""
        factors = folding(self.recipe.model, self.table)
        return {
            name: replace(given.folded(factors.get(name, 1.0), self.decoupled), multiplier=1.0)
            for name, given in self.rows.items()
        }

    @property
    def rescaled(self) -> bool:
        """Whether folding changes any gradient."""
        return bool(folding(self.recipe.model, self.table))

    def unlike(self, given: Mapping[str, Given]) -> bool:
        """Whether a matrix has another multiplier in the target, so that its weights have to take it in."""
        return any(
            not math.isclose(row.multiplier, given[row.name].multiplier, rel_tol=SAME)
            for row in self.table.rows
            if row.name in given
        )

    @property
    def hidden(self) -> Given:
        """What most matrices inside the blocks get: the values for a target that has one of each."""
        return _most(
            given
            for row, given in zip(self.table.rows, self.rows.values(), strict=True)
            if row.role is Role.HIDDEN_WEIGHT
        )

    @property
    def sequences(self) -> int:
        return self.recipe.batch.tokens // self.recipe.model.seq_len

    @property
    def steps(self) -> int:
        """Of the full batch: what a target without a ramp takes."""
        return -(-self.recipe.data.tokens // self.recipe.batch.tokens)

    def in_steps(self, tokens: float) -> int:
        return round(tokens / self.recipe.batch.tokens)

    @property
    def cooldown_tokens(self) -> int:
        """The last tokens of ``wsd``."""
        recipe = self.recipe
        left = recipe.data.tokens - recipe.schedule.warmup_tokens
        return min(round(recipe.schedule.decay_ratio * recipe.data.tokens), left)

    @property
    def micro_batch(self) -> int:
        """Sequences of one forward pass of a rank: at most the recipe's, such that it divides every batch.

        Raises:
            InputError: if a batch does not divide over the data-parallel ranks.
        """
        recipe = self.recipe
        dp, asked = recipe.layout.dp, recipe.batch.micro_batch
        share = 0
        for _, tokens in recipe.batch.sizes:
            sequences = tokens // recipe.model.seq_len
            if sequences % dp:
                raise InputError(
                    f"a batch of {sequences} sequences does not divide over {dp} data-parallel ranks, as every "
                    "target wants; set layout.dp to a divisor"
                )
            share = math.gcd(share, sequences // dp)
        most = 1 if asked == "auto" else asked
        return max(size for size in range(1, most + 1) if share % size == 0)

    @property
    def accumulate(self) -> int:
        return self.sequences // self.recipe.layout.dp // self.micro_batch


def _most(candidates: Iterable[Given]) -> Given:
    counts: dict[Given, int] = {}
    for given in candidates:
        counts[given] = counts.get(given, 0) + 1
    return max(counts, key=lambda given: counts[given])


def compare(
    wanted: Wanted, given: Mapping[str, Given], reasons: Mapping[str, str], *, plain: bool = False
) -> list[Loss]:
    """What of the table a target does not give, a loss for each quantity and value.

    ``reasons`` says for a quantity what the target has of it. With ``plain`` it is compared with the table of a model
    without multipliers. A parameter that is not in ``given`` is not in the target's model; its shape says so.
    """
    ours = wanted.plain if plain else wanted.rows
    found: dict[tuple[str, str, str], list[str]] = {}
    for quantity in QUANTITIES:
        modules: dict[str, list[tuple[float, float]]] = {}
        for row in wanted.table.rows:
            if row.name not in given:
                continue
            tied = row.role is Role.TIED_EMBEDDING
            pair = [side if tied else _folded(side, wanted) for side in (ours[row.name], given[row.name])]
            left, right = (getattr(side, quantity) for side in pair)
            modules.setdefault(row.module, []).append((left, right))
        for module, values in modules.items():
            same = SAME_START if quantity == "init_std" else SAME
            if any(not math.isclose(left, right, rel_tol=same, abs_tol=1e-300) for left, right in values):
                found.setdefault((quantity, *told_apart(*zip(*values, strict=True))), []).append(module)
    return [
        Loss(f"{quantity} of {', '.join(modules)}", ours_, f"would be {theirs}: {reasons[quantity]}", len(modules))
        for (quantity, ours_, theirs), modules in found.items()
    ]


def weight(losses: Iterable[Loss]) -> int:
    """How much is lost, to choose between two ways."""
    return sum(loss.modules for loss in losses)


def _folded(given: Given, wanted: Wanted) -> Given:
    return replace(given.folded(given.multiplier, wanted.decoupled), multiplier=1.0)


def told_apart(ours: Iterable[float], theirs: Iterable[float]) -> tuple[str, str]:
    """Two ranges of values in as many digits, from four on, as it takes to see that they differ."""
    ours, theirs = list(ours), list(theirs)
    for digits in (4, 6, 8, 12, 17):
        said = _range(ours, digits), _range(theirs, digits)
        if said[0] != said[1]:
            break
    return said


def _range(values: Sequence[float], digits: int) -> str:
    low, high = (f"{value:.{digits}g}" for value in (min(values), max(values)))
    return low if low == high else f"{low} .. {high}"


def fitted(shape: ModelShape, holds: Mapping[str, tuple[Any, ...]], target: str) -> tuple[ModelShape, list[Loss]]:
    """The nearest shape that a target's model has, and what is lost on the way.

    ``holds`` has the values that a key may have; the first one is taken where the recipe's is none of them.
    """
    losses, changes = [], {}
    for key, held in holds.items():
        value = getattr(shape, key)
        if value not in held:
            changes[key] = held[0]
            said = " or ".join(_said(each) for each in held)
            losses.append(Loss(f"model.{key}", value, f"would be {_said(held[0])}: {target} has {said} only"))
    if "d_attention" in changes:
        if shape.d_model % shape.n_heads:
            raise InputError(
                f"{target} has heads of d_model / n_heads = {shape.d_model} / {shape.n_heads} only, no whole number; "
                "choose another target"
            )
        changes["d_head"] = shape.d_model // shape.n_heads
    return (ModelShape.model_validate(shape.model_dump() | changes) if changes else shape), losses


def _said(value: Any) -> str:
    return json.dumps(value) if isinstance(value, bool) else "d_model" if value is None else f"{value}"
