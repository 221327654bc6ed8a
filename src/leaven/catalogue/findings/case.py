"""A recipe beside the published runs: what one check sees, and how far out is called far.

What is compared is what the recipe's matrices really get, after its scaling rule: a published value is that too.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import Any, Literal, NamedTuple, Protocol

from leaven.catalogue.run import Stack
from leaven.catalogue.runs import Run, load_runs, nearest, size_ratio
from leaven.recipe.recipe import Recipe
from leaven.recipe.shape import BRANCH_ENDS, Role

Severity = Literal["far outside", "outside", "note"]
Value = Callable[[Run], float | None]
Bounds = tuple[float, float]
Mend = Mapping[str, Any]

SIZE_FACTOR = 4.0  # a run of another size says little about lr and batch
VOTES = 5
# Runs within these factors (in batch where it is known) are alike: what one of them did is no mistake here.
_ALIKE = {"params": 1.25, "lr": 1.25, "batch": 1.5}
_ROUNDING = 1.02  # published values are rounded


class Row(Protocol):
    """What one parameter gets: a row of the resolved parameter table."""

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
class Finding:
    """A value of a recipe outside ``low`` .. ``high``, by ``factor`` (None where no number can say how far).

    ``runs`` say so, ``did_so`` are runs that were as far out and succeeded; of those ``alike`` have the size, lr,
    batch and stack of the recipe, which makes a note of it. ``mends``: each of them mends it, the best first; what to
    set, by path (None takes a value out).
    """

    path: str
    severity: Severity
    value: float | None
    low: float | None
    high: float | None
    factor: float | None
    says: str
    runs: tuple[str, ...] = ()
    did_so: tuple[str, ...] = ()
    alike: tuple[str, ...] = ()
    mends: tuple[Mend, ...] = ()
    check: str = ""
    source: str = ""


class Limits(NamedTuple):
    """Beyond ``usual`` is a note, beyond ``outside`` and ``far`` what they say; each lies within the next."""

    usual: Bounds
    outside: Bounds
    far: Bounds


@dataclass(frozen=True)
class Case:
    """A recipe, the rows of its parameter table, and how many tokens its text has, if that is known."""

    recipe: Recipe
    rows: Sequence[Row]
    corpus_tokens: int | None = None

    @cached_property
    def params(self) -> int:
        return self.recipe.model.params

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        """Dense runs whose learning rate is one of Adam(W), the nearest in size first."""
        known = (run for run in load_runs() if run.kind == "dense" and run.lr_comparable)
        return tuple(sorted(known, key=lambda run: size_ratio(run, self.params)))

    @cached_property
    def stack(self) -> Stack:
        return Stack("pre", self.recipe.model.qk_norm, "adamw")

    @cached_property
    def neighbours(self) -> tuple[Run, ...]:
        """The nearest run of each lineage, at most five, same stack first; none if none is within a factor of 4."""
        everything, tokens = len(load_runs()), self.recipe.data.tokens
        ranked = nearest(self.params, tokens, limit=everything, factor=SIZE_FACTOR, stack=self.stack)
        near = [run for run, _ in ranked if size_ratio(run, self.params) <= SIZE_FACTOR]
        return tuple(one_a_lineage(near)[:VOTES])

    @cached_property
    def alike(self) -> frozenset[str]:
        """Runs that are this recipe in size, lr, batch and stack."""
        recipe, lr = self.recipe, self.hidden("lr")
        return frozenset(
            run.id
            for run in self.runs
            if self.stack.fits(run.stack)
            and size_ratio(run, self.params) <= _ALIKE["params"]
            and ratio(run.peak_lr or 0.0, lr) <= _ALIKE["lr"]
            and (run.batch_tokens is None or ratio(run.batch_tokens, recipe.batch.tokens) <= _ALIKE["batch"])
        )

    def hidden(self, quantity: str) -> float:
        """The median over the matrices of the blocks: a search moves single modules on purpose."""
        values: list[float] = [getattr(row, quantity) for row in self.rows if row.role is Role.HIDDEN_WEIGHT]
        return median(values)

    @cached_property
    def init_std(self) -> float:
        """Of the matrices that read the residual stream and start from random numbers; 0 if none does."""
        reads = [row for row in self.rows if row.role is Role.HIDDEN_WEIGHT and row.module not in BRANCH_ENDS]
        return median([row.init_std for row in reads if row.init_std] or [0.0])

    @cached_property
    def residual_std(self) -> float:
        """Of those that write to it, over the blocks (root mean square), their branch's multiplier included."""
        ends = [(row.init_std * row.multiplier) ** 2 for row in self.rows if row.module in BRANCH_ENDS]
        return math.sqrt(sum(ends) / len(ends))

    def near(self, of_run: Value) -> list[float]:
        """What the neighbours have, in order."""
        return _known(self.neighbours, of_run)

    def published(self, of_run: Value) -> Bounds:
        """The smallest and the largest published value."""
        known = _known(self.runs, of_run)
        return known[0], known[-1]

    def at_base(self, quantity: str, wanted: float, to: Callable[[float], float] = round) -> float:
        """What to write at the base so that the hidden matrices get ``wanted``, in two digits; ``to`` is
        ``math.ceil`` or ``math.floor`` where wanted is the end of a range and the value must lie inside."""
        base: float = getattr(self.recipe.hyperparameters, quantity)
        actual = self.hidden(quantity)
        if quantity.startswith("beta"):  # a rule raises it to a power
            beta = base ** (math.log(wanted) / math.log(actual)) if 0 < actual < 1 else wanted
            return float(f"{beta:.3g}") if beta < 0.9 else round(1 - float(f"{1 - beta:.3g}"), 12)
        if not actual:
            return wanted
        exact = base * wanted / actual
        unit = 10.0 ** (math.floor(math.log10(exact)) - 1)
        return float(f"{to(round(exact / unit, 6)) * unit:.2g}")

    def sequences(self, tokens: float) -> int:
        """Tokens of the nearest whole number of sequences, at least one."""
        seq_len = self.recipe.model.seq_len
        return max(round(tokens / seq_len), 1) * seq_len

    def with_batch(self, tokens: float) -> Mend:
        """A batch of about so many tokens; a ramp or stages to another size go with it."""
        spec = self.recipe.batch
        gone: dict[str, Any] = {"batch.ramp": None} if spec.ramp else {"batch.stages": []} if spec.stages else {}
        if spec.stages_rule:
            gone["batch.stages_rule"] = None
        return {"batch.tokens": self.sequences(tokens)} | gone

    def judge(
        self,
        path: str,
        value: float,
        of_run: Value,
        limits: Limits,
        says: str,
        *,
        mends: Iterable[Mend] = (),
        among: Iterable[Run] | None = None,
        scale: Callable[[float], float] = lambda value: value,
        sure: bool = True,
    ) -> Iterator[Finding]:
        """A finding if the value is not the usual one. ``among``: the runs that say so, else all whose value is
        usual; ``scale`` says in what the distance is counted, as 1 / (1 - beta). Where the limits are not ``sure``
        for this size, a note is all there is."""
        low, high = limits.usual

        def within(value: float, bounds: Bounds) -> bool:
            """As far as published values are exact."""
            least, most = map(scale, bounds)
            return (least if least <= 0 else least / _ROUNDING) <= scale(value) <= most * _ROUNDING

        if within(value, limits.usual):
            return
        severity: Severity = (
            "far outside"
            if not within(value, limits.far)
            else "outside"
            if not within(value, limits.outside)
            else "note"
        )
        above = value > high
        beyond = (value, math.inf) if above else (-math.inf, value)
        valued = [(run, found) for run in self.runs if (found := of_run(run)) is not None]
        did_so = [run.id for run, found in valued if within(found, beyond)]
        same = [id for id in did_so if id in self.alike]
        usual = [run for run, found in valued if within(found, limits.usual)]
        yield Finding(
            path=path,
            severity="note" if same or not sure else severity,
            value=value,
            low=low,
            high=high,
            factor=ratio(scale(value), scale(high if above else low)),
            says=says,
            runs=tuple(run.id for run in (one_a_lineage(usual)[:VOTES] if among is None else among)),
            did_so=tuple(did_so),
            alike=tuple(same),
            mends=tuple(mends),
        )


def told(path: str) -> Value:
    """What a run's file has at a path: ``optim.beta2``."""
    group, _, name = path.partition(".")

    def of_run(run: Run) -> float | None:
        value: float | None = getattr(getattr(run, group), name, None)
        return value

    return of_run


def one_a_lineage(runs: Iterable[Run]) -> list[Run]:
    """The first of each lineage, in their order."""
    first: dict[str, Run] = {}
    for run in runs:
        first.setdefault(run.lineage.name, run)
    return list(first.values())


def ratio(a: float, b: float) -> float:
    """How far apart two values are, as a factor of at least 1; infinite against 0."""
    return 1.0 if a == b else math.inf if not a or not b else max(a / b, b / a)


def upward(usual: float, outside: float, far: float) -> Limits:
    """Limits for what cannot be too small."""
    return Limits((-math.inf, usual), (-math.inf, outside), (-math.inf, far))


def _known(runs: Iterable[Run], of_run: Value) -> list[float]:
    return sorted(found for run in runs if (found := of_run(run)) is not None)
