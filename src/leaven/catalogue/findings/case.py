"""The recipe and the published runs as a check sees them, and suggestions that change a value.

The compared values are those that the matrices get after the scaling rule, as in a published run.
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
# Runs within these factors (in batch, if known) are alike: a value that one of them had is not a mistake.
_ALIKE = {"params": 1.25, "lr": 1.25, "batch": 1.5}


class CheckedRow(Protocol):
    """A row of the resolved parameter table: the values of one parameter."""

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


@dataclass(frozen=True)
class Case:
    """A recipe, the rows of its parameter table, and the tokens of its text, if known."""

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
        """Dense runs with a learning rate of Adam(W), the nearest in size first."""
        known = (run for run in load_runs() if run.kind == "dense" and run.lr_comparable)
        return tuple(sorted(known, key=lambda run: size_ratio(run, self.params)))

    @cached_property
    def neighbours(self) -> tuple[PublishedRun, ...]:
        """The nearest run of each lineage, at most five, those with the same stack first; empty if none is near this
        size."""
        return neighbours(self.params, self.tokens, qk_norm=self.recipe.model.qk_norm).close[:VOTES]

    @cached_property
    def alike(self) -> frozenset[str]:
        """Ids of runs with this recipe's size, lr, batch and stack."""
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
        """Return the median of a quantity over the matrices of the blocks: single modules may differ on purpose."""
        values: list[float] = [getattr(row, quantity) for row in self.rows if row.role is Role.HIDDEN_WEIGHT]
        return median(values)

    @cached_property
    def init_std(self) -> float:
        """Std of the matrices that read the residual stream and start from random numbers; 0 if there are none."""
        reads = [row for row in self.rows if row.role is Role.HIDDEN_WEIGHT and row.module not in BRANCH_ENDS]
        return median([row.init_std for row in reads if row.init_std] or [0.0])

    @cached_property
    def residual_std(self) -> float:
        """Root mean square std of the matrices that write to the residual stream, with their branch's multiplier."""
        ends = [(row.init_std * row.multiplier) ** 2 for row in self.rows if row.module in BRANCH_ENDS]
        return math.sqrt(sum(ends) / len(ends))

    @property
    def as_trained(self) -> dict[str, float]:
        """Hyperparameters by path as the hidden matrices get them; the recipe has them in base coordinates."""
        quantities = ("lr", "weight_decay", "beta1", "beta2", "eps")
        hidden = {f"hyperparameters.{name}": self.hidden(name) for name in quantities}
        return hidden | {"hyperparameters.init_std": self.init_std}

    def near(self, of_run: OfRun) -> list[float]:
        """Return the values of the neighbours, sorted."""
        return sorted(found for run in self.neighbours if (found := of_run(run)) is not None)

    def published(self, of_run: OfRun) -> Bounds:
        """Return the smallest and the largest published value."""
        known = [found for run in self.runs if (found := of_run(run)) is not None]
        return min(known), max(known)

    def at_base(self, quantity: str, wanted: float, to: Callable[[float], float] = round) -> Suggestion:
        """Return a suggestion that gives the hidden matrices ``wanted``: the value at the base, in two digits.

        ``to`` is ``math.ceil`` or ``math.floor`` if ``wanted`` is the end of a range and the value must lie inside.
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
        """Return the tokens of the nearest whole number of sequences, at least one."""
        seq_len = self.recipe.model.seq_len
        return max(round(tokens / seq_len), 1) * seq_len

    def with_batch(self, tokens: float) -> Suggestion:
        """Return a suggestion for a batch of about this many tokens, without the ramp or stages up to the old one."""
        spec = self.recipe.batch
        gone: dict[str, Any] = {"batch.ramp": None} if spec.ramp else {"batch.stages": []} if spec.stages else {}
        if spec.stages_rule:
            gone["batch.stages_rule"] = None
        return {"batch.tokens": self.sequences(tokens)} | gone

    def with_tokens(self, tokens: int) -> Suggestion:
        """Return a suggestion for a run of this many tokens, which also shortens a longer warm-up."""
        longer = self.recipe.schedule.warmup_tokens > tokens
        return {"data.tokens": tokens} | ({"schedule.warmup_tokens": tokens // 100} if longer else {})


@cache
def critical_batches(params: float, tokens: float, non_embedding: float | None = None) -> dict[str, float]:
    """Return the critical batch by each law, in tokens."""
    return batches(evaluate(params, tokens, params_non_embedding=non_embedding), "critical")


def ratio(a: float, b: float) -> float:
    """Return the factor between two values, at least 1; infinite if only one is 0."""
    return 1.0 if a == b else math.inf if not a or not b else max(a / b, b / a)
