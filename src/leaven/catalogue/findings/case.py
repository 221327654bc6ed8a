"""The classes of ``recipes check``: :class:`Check` is one check, :class:`Case` is the recipe to check.

If a value differs between parameters, as lr does after the scaling rule, a check usually compares the median over the
hidden weights (the matrices in blocks).
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import fmean, median
from typing import Any, Literal

from leaven.catalogue.neighbours import neighbours, ratio, size_ratio
from leaven.catalogue.runs import PublishedRun, Stack, load_runs
from leaven.catalogue.starter.draft import RunSize
from leaven.catalogue.terms import read
from leaven.recipe.hyperparameters import Muon
from leaven.recipe.recipe import Recipe
from leaven.recipe.shape import BRANCH_ENDS, Role

OfRun = Callable[[PublishedRun], Any]  # returns a number or None; for a check without limits, a truth value
Bounds = tuple[float, float]
Suggestion = Mapping[str, Any]
"""Values to set, by path; None removes a value."""

VOTES = 5
"""A recipe is compared with at most this many published runs, and a finding names at most this many as examples."""
# A run with the recipe's norms and within all these factors counts as alike. If a run that is alike has the unusual
# value, too, the finding is only a note, except beyond `Check.trained`.
_ALIKE = {"params": 1.25, "lr": 1.25, "batch": 1.5}


def farthest(rows: Sequence[Any], quantity: str, bounds: Bounds) -> Any:
    """Return the row of a parameter table that is farthest outside the bounds, or None if all are inside."""
    low, high = bounds

    def beyond(row: Any) -> float:
        value: float = getattr(row, quantity)
        return max(low - value, value - high)

    worst = max(rows, key=beyond)
    return worst if beyond(worst) > 0 else None


@dataclass(frozen=True, kw_only=True)
class Check:
    """A check of ``checks.toml``, with the values that it compares for one recipe.

    The fields before ``value`` are from the file. :meth:`read` sets ``value`` and later fields for a recipe. Then the
    function with the check's name, if there is one, may change them. A check without limits gives a note whenever it
    applies.
    """

    name: str
    reads: str  # the values of a recipe on which the check depends, for the documentation
    path: str  # dotted path of the recipe's value that a finding is about
    message: str | Sequence[str]  # templates, see `leaven.catalogue.messages`
    usual: Sequence[float | str] = ()  # a value beyond this range gives a note
    outside: Sequence[float | str] = (-math.inf, math.inf)  # a value beyond this range is outside
    far: Sequence[float | str] = (-math.inf, math.inf)  # a value beyond this range is far outside
    otherwise: Mapping[str, Any] = field(default_factory=dict)  # replaces usual, outside, far for some recipes
    trained: Bounds | None = None  # beyond this range a value is "outside", even if a search found it
    source: str = "the published runs"  # evidence in addition to the runs that a finding names
    hidden: str | None = None  # the compared quantity of the hidden weights, for example beta1
    setting: str | None = None  # instead of hidden: path of the compared value in the recipe
    run: str | None = None  # path of the compared value in a published run
    wanted: Sequence[float] = ()  # suggested values for the hidden weights
    set: Sequence[Suggestion] = ()  # suggested changes of the recipe, by path
    far_from_runs: Literal["note", "skip"] | None = None  # if no run is near in size: at most a note, or no check

    value: float | None = None  # the compared value of the recipe
    of_run: OfRun = lambda run: None  # returns the compared value of a published run
    suggestions: Sequence[Suggestion] = ()  # changes of the recipe, the best first
    # More fields for the message, besides `value`, the usual range `low` and `high`, and the smallest and largest
    # published values `least` and `most`.
    facts: dict[str, Any] = field(default_factory=dict)
    runs: Iterable[PublishedRun] | None = None  # runs that the finding names; None: nearest runs with a usual value
    sure: bool = True  # whether the limits hold at this size; if not, a finding is a note at most

    def read(self, case: "Case") -> "Check":
        value, facts = None, {}
        if self.hidden:
            value, facts["where"] = case.hidden(self.hidden), "the hidden weights have"
        elif self.setting:
            value = read(case.recipe, self.setting)
        if self.hidden and self.trained and (row := farthest(case.rows, self.hidden, self.trained)):
            facts["trained"] = f"{self.trained[0]:g} to {self.trained[1]:g}"
            if (own := getattr(row, self.hidden)) != value:
                value, facts["where"] = own, f"{row.module} has"
        return replace(
            self,
            value=value,
            of_run=lambda run: read(run, self.run) if self.run else None,
            suggestions=[*(case.at_base(self.hidden or "", value) for value in self.wanted), *self.set],
            facts=facts,
            sure=bool(case.neighbours) or self.far_from_runs != "note",
        )

    def untried(self, value: float | None) -> bool:
        return self.trained is not None and value is not None and not self.trained[0] <= value <= self.trained[1]


@dataclass(frozen=True)
class Case:
    """A recipe to check, with the published runs and laws for its size."""

    recipe: Recipe
    # Rows of its parameter table with AdamW, and of matrices that Muon updates: `leaven.scaling.table.adamw_rows`.
    table: Sequence[Any]
    corpus_tokens: int | None = None  # tokens in its training text, if known

    @cached_property
    def rows(self) -> list[Any]:
        """Return the parameter table as if AdamW updated every parameter."""
        return [row for row in self.table if not row.match]

    def muon(self, quantity: str) -> float | None:
        """Return the median of a quantity over Muon's matrices, or None if Muon updates none.

        The lr and the weight decay are first converted to those of Muon with ``match = "adamw_rms"``, so that they
        can be compared with AdamW's (arXiv 2502.16982).
        """
        power = {"lr": 1, "weight_decay": -1}.get(quantity, 0)
        of_adamw = Muon(match="adamw_rms")
        rows = [row for row in self.table if row.match]
        values = [getattr(row, quantity) * (row.match / of_adamw.matching(*row.shape[-2:])) ** power for row in rows]
        return median(values) if values else None

    @cached_property
    def params(self) -> int:
        return self.recipe.model.params_active

    @cached_property
    def tokens(self) -> int:
        return self.recipe.data.tokens

    @cached_property
    def batch(self) -> int:
        return self.recipe.batch.tokens

    @cached_property
    def size(self) -> RunSize:
        model = self.recipe.model
        near = neighbours(
            self.params,
            self.tokens,
            qk_norm=model.qk_norm,
            norm_placement=model.norm_placement,
            experts=bool(model.experts),
        )
        return RunSize(near, model, self.tokens)

    @cached_property
    def runs(self) -> tuple[PublishedRun, ...]:
        kinds = {"dense", "moe"} if self.recipe.model.experts else {"dense"}
        known = (run for run in load_runs() if run.kind in kinds and run.lr_comparable)
        return tuple(sorted(known, key=lambda run: size_ratio(run, self.params)))

    @cached_property
    def neighbours(self) -> tuple[PublishedRun, ...]:
        """Return at most `VOTES` published runs, one of each lineage, within a factor of 4 of the model's size."""
        return self.size.near.close[:VOTES]

    @cached_property
    def alike(self) -> frozenset[str]:
        stack = Stack(self.recipe.model.norm_placement, self.recipe.model.qk_norm, "adamw")
        return frozenset(
            run.id
            for run in self.runs
            if stack.fits(run.stack)
            and size_ratio(run, self.params) <= _ALIKE["params"]
            and ratio(run.peak_lr or 0.0, self.hidden("lr")) <= _ALIKE["lr"]
            and (run.batch_tokens is None or ratio(run.batch_tokens, self.batch) <= _ALIKE["batch"])
        )

    def hidden(self, quantity: str) -> float:
        """Return the median of a quantity, such as ``lr``, over the hidden weights."""
        values: list[float] = [getattr(row, quantity) for row in self.rows if row.role is Role.HIDDEN_WEIGHT]
        return median(values)

    @cached_property
    def init_std(self) -> float:
        """Return the median init std of the hidden weights, without the last matrix of each residual branch, or 0."""
        stds: list[float] = [
            row.init_std
            for row in self.rows
            if row.role is Role.HIDDEN_WEIGHT and row.module not in BRANCH_ENDS and row.init_std
        ]
        return median(stds or [0.0])

    @cached_property
    def residual_stds(self) -> dict[str, float]:
        """Return, for each module that ends a residual branch, the RMS over layers of init std x multiplier."""
        squares: dict[str, list[float]] = {}
        for row in self.rows:
            if row.module in BRANCH_ENDS:
                squares.setdefault(row.module, []).append((row.init_std * row.multiplier) ** 2)
        return {module: math.sqrt(fmean(each)) for module, each in squares.items()}

    @property
    def as_trained(self) -> dict[str, float]:
        """Return hyperparameters by path, after the scaling rule. Each is a median over the hidden matrices."""
        quantities = ("lr", "weight_decay", "beta1", "beta2", "eps")
        hidden = {f"hyperparameters.{name}": self.hidden(name) for name in quantities}
        return hidden | {"hyperparameters.init_std": self.init_std}

    def near(self, of_run: OfRun) -> list[float]:
        return sorted(found for run in self.neighbours if (found := of_run(run)) is not None)

    def published(self, of_run: OfRun) -> Bounds:
        """Return the lowest and the highest value of ``of_run`` for the published :attr:`runs`. Ignore None."""
        known = [found for run in self.runs if (found := of_run(run)) is not None]
        return min(known), max(known)

    def at_base(self, quantity: str, wanted: float, to: Callable[[float], float] = round) -> Suggestion:
        """Return {path: new value} of a hyperparameter, for a median over the hidden weights of about ``wanted``.

        ``to`` rounds the new value to two digits: ``math.floor`` down, ``math.ceil`` up. Betas ignore ``to``.
        """
        path = f"hyperparameters.{quantity}"
        base: float = getattr(self.recipe.hyperparameters, quantity)
        actual = self.hidden(quantity)
        if quantity.startswith("beta"):  # the scaling rule raises a beta to a power
            beta = base ** (math.log(wanted) / math.log(actual)) if 0 < actual < 1 else wanted
            return {path: float(f"{beta:.3g}") if beta < 0.9 else round(1 - float(f"{1 - beta:.3g}"), 12)}
        if not actual:
            return {path: wanted}
        exact = base * wanted / actual
        unit = 10.0 ** (math.floor(math.log10(exact)) - 1)
        return {path: float(f"{to(round(exact / unit, 6)) * unit:.2g}")}

    def sequences(self, tokens: float) -> int:
        """Return ``tokens`` rounded to a multiple of the sequence length, at least one sequence."""
        seq_len = self.recipe.model.seq_len
        return max(round(tokens / seq_len), 1) * seq_len

    def with_batch(self, tokens: float) -> Suggestion:
        """Return the changes that give the recipe a constant batch of about ``tokens`` tokens."""
        spec = self.recipe.batch
        gone: dict[str, Any] = {"batch.ramp": None} if spec.ramp else {"batch.stages": []} if spec.stages else {}
        if spec.stages_rule:
            gone["batch.stages_rule"] = None
        return {"batch.tokens": self.sequences(tokens)} | gone

    def with_tokens(self, tokens: int) -> Suggestion:
        """Return changes that set the run length to ``tokens``, and a warm-up longer than that to 1% of it."""
        longer = self.recipe.schedule.warmup_tokens > tokens
        return {"data.tokens": tokens} | ({"schedule.warmup_tokens": tokens // 100} if longer else {})
