"""Prepare a recipe and the published runs for the checks, and compose the changes that a check suggests.

Values of the recipe are compared after the scaling rule has been applied to them, because a published run states the
values that were applied to its matrices.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from statistics import median
from typing import Any, Protocol

from leaven.catalogue.laws import batches, evaluate
from leaven.catalogue.neighbours import neighbours, size_ratio
from leaven.catalogue.run import PublishedRun, Stack
from leaven.catalogue.runs import load_runs
from leaven.recipe.recipe import Recipe
from leaven.recipe.shape import BRANCH_ENDS, Role

OfRun = Callable[[PublishedRun], float | None]
Bounds = tuple[float, float]
Suggestion = Mapping[str, Any]
"""Values to set, by path; None removes a value."""

VOTES = 5
"""A finding names at most this many lineages."""
# A run within all these factors of the recipe is alike. A value that a run alike has is reported as a note only.
_ALIKE = {"params": 1.25, "lr": 1.25, "batch": 1.5}


class CheckedRow(Protocol):
    """A row of the resolved parameter table: the values of one parameter that a check can read."""

    @property
    def role(self) -> Role: ...
    @property
    def module(self) -> str: ...
    @property
    def init_std(self) -> float: ...
    @property
    def lr(self) -> float: ...
    @property
    def weight_decay(self) -> float: ...
    @property
    def beta1(self) -> float: ...
    @property
    def beta2(self) -> float: ...
    @property
    def eps(self) -> float: ...
    @property
    def multiplier(self) -> float: ...


def farthest(rows: Sequence[CheckedRow], quantity: str, bounds: Bounds) -> CheckedRow | None:
    """Return the row whose value is farthest outside the bounds, or None if all are inside."""
    low, high = bounds

    def beyond(row: CheckedRow) -> float:
        value: float = getattr(row, quantity)
        return max(low - value, value - high)

    worst = max(rows, key=beyond)
    return worst if beyond(worst) > 0 else None


@dataclass(frozen=True)
class Case:
    """The recipe to check, the rows of its parameter table, and the number of tokens in its text, if known."""

    recipe: Recipe
    rows: Sequence[CheckedRow]
    corpus_tokens: int | None = None

    @cached_property
    def params(self) -> int:
        return self.recipe.model.params

    @cached_property
    def tokens(self) -> int:
        return self.recipe.data.tokens

    @cached_property
    def batch(self) -> int:
        return self.recipe.batch.tokens

    @cached_property
    def runs(self) -> tuple[PublishedRun, ...]:
        """Return the dense runs with a learning rate of Adam or AdamW, the nearest in size first."""
        known = (run for run in load_runs() if run.kind == "dense" and run.lr_comparable)
        return tuple(sorted(known, key=lambda run: size_ratio(run, self.params)))

    @cached_property
    def neighbours(self) -> tuple[PublishedRun, ...]:
        """Return the nearest run of up to five lineages near the recipe's size, runs with the same stack first.

        Nothing is returned if no run is within a factor of 4 of the size.
        """
        return neighbours(self.params, self.tokens, qk_norm=self.recipe.model.qk_norm).close[:VOTES]

    @cached_property
    def alike(self) -> frozenset[str]:
        """Return the ids of runs that have nearly this recipe's size, lr and batch, and the same stack."""
        stack = Stack("pre", self.recipe.model.qk_norm, "adamw")
        return frozenset(
            run.id
            for run in self.runs
            if stack.fits(run.stack)
            and size_ratio(run, self.params) <= _ALIKE["params"]
            and ratio(run.peak_lr or 0.0, self.hidden("lr")) <= _ALIKE["lr"]
            and (run.batch_tokens is None or ratio(run.batch_tokens, self.batch) <= _ALIKE["batch"])
        )

    def hidden(self, quantity: str) -> float:
        """Return the median of a quantity over the matrices of all blocks: single modules may differ on purpose."""
        values: list[float] = [getattr(row, quantity) for row in self.rows if row.role is Role.HIDDEN_WEIGHT]
        return median(values)

    @cached_property
    def init_std(self) -> float:
        """Return the median init std of the matrices that read the residual stream, or 0 if all start from zeros."""
        reads = [row for row in self.rows if row.role is Role.HIDDEN_WEIGHT and row.module not in BRANCH_ENDS]
        return median([row.init_std for row in reads if row.init_std] or [0.0])

    @cached_property
    def residual_std(self) -> float:
        """Return the root mean square init std of the matrices that write to the residual stream.

        Each std is multiplied by the multiplier of its branch.
        """
        ends = [(row.init_std * row.multiplier) ** 2 for row in self.rows if row.module in BRANCH_ENDS]
        return math.sqrt(sum(ends) / len(ends))

    @property
    def as_trained(self) -> dict[str, float]:
        """Return the hyperparameters that the scaling rule gives to the hidden matrices, by their paths in a
        recipe."""
        quantities = ("lr", "weight_decay", "beta1", "beta2", "eps")
        hidden = {f"hyperparameters.{name}": self.hidden(name) for name in quantities}
        return hidden | {"hyperparameters.init_std": self.init_std}

    def near(self, of_run: OfRun) -> list[float]:
        """Return the neighbours' values of a quantity, sorted; neighbours that do not publish it are left out."""
        return sorted(found for run in self.neighbours if (found := of_run(run)) is not None)

    def published(self, of_run: OfRun) -> Bounds:
        """Return the smallest and the largest value of a quantity in the published runs."""
        known = [found for run in self.runs if (found := of_run(run)) is not None]
        return min(known), max(known)

    def at_base(self, quantity: str, wanted: float, to: Callable[[float], float] = round) -> Suggestion:
        """Return a suggestion: the value to write so that the hidden matrices get ``wanted`` after the scaling rule.

        ``to`` rounds the value to two digits: ``math.ceil`` or ``math.floor`` if ``wanted`` ends a range that the
        value must not leave.
        """
        path = f"hyperparameters.{quantity}"
        base: float = getattr(self.recipe.hyperparameters, quantity)
        actual = self.hidden(quantity)
        if quantity.startswith("beta"):  # a rule raises it to a power
            beta = base ** (math.log(wanted) / math.log(actual)) if 0 < actual < 1 else wanted
            return {path: float(f"{beta:.3g}") if beta < 0.9 else round(1 - float(f"{1 - beta:.3g}"), 12)}
        if not actual:
            return {path: wanted}
        exact = base * wanted / actual
        unit = 10.0 ** (math.floor(math.log10(exact)) - 1)
        return {path: float(f"{to(round(exact / unit, 6)) * unit:.2g}")}

    def sequences(self, tokens: float) -> int:
        """Return ``tokens`` rounded to a whole number of sequences, at least one."""
        seq_len = self.recipe.model.seq_len
        return max(round(tokens / seq_len), 1) * seq_len

    def with_batch(self, tokens: float) -> Suggestion:
        """Return a suggestion for a constant batch of about ``tokens`` tokens; it removes the ramp or the stages."""
        spec = self.recipe.batch
        gone: dict[str, Any] = {"batch.ramp": None} if spec.ramp else {"batch.stages": []} if spec.stages else {}
        if spec.stages_rule:
            gone["batch.stages_rule"] = None
        return {"batch.tokens": self.sequences(tokens)} | gone

    def with_tokens(self, tokens: int) -> Suggestion:
        """Return a suggestion for a run of ``tokens`` tokens.

        If the warm-up is longer than that run, it is shortened to 1% of the run.
        """
        longer = self.recipe.schedule.warmup_tokens > tokens
        return {"data.tokens": tokens} | ({"schedule.warmup_tokens": tokens // 100} if longer else {})


@cache
def critical_batches(params: float, tokens: float, non_embedding: float | None = None) -> dict[str, float]:
    """Return the critical batches in tokens that laws predict, by the names of the laws."""
    return batches(evaluate(params, tokens, params_non_embedding=non_embedding), "critical")


def ratio(a: float, b: float) -> float:
    """Return the factor between two values, at least 1; infinite if exactly one of them is 0."""
    return 1.0 if a == b else math.inf if not a or not b else max(a / b, b / a)
