"""Find the published runs near a model's size, its neighbours, and combine their values.

Starters and findings use the same neighbours. A lineage is a group of runs that copied one another's learning rate;
it has one vote, the vote of its nearest run. Values are keyed by the paths of a recipe
(:mod:`leaven.catalogue.terms`). The middle of several values is the median of their logarithms: half a value and
twice the value are equally far from it.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import Any

from leaven.catalogue.run import Kind, PublishedRun, Stack, same_lr_meaning
from leaven.catalogue.runs import listed, load_runs
from leaven.catalogue.terms import term
from leaven.documents.catalogue import NearRun
from leaven.recipe.errors import InputError

FACTOR = 4.0
"""A run within this factor of a size is near it. Runs farther away say little about lr and batch at that size."""
NEAREST = 3
"""At least this many lineages vote, however far away they are, so that no lineage decides alone."""
EDGE = 1.5
"""If fewer than `NEAREST` lineages are within `FACTOR`, weights reach 0 at this factor beyond the farthest voter."""
LEAST_WEIGHT = 1e-6
"""Weight of a vote at the edge; not 0, so that a single vote still counts."""
# In a distance, twice the tokens count an eighth of twice the parameters: published choices hardly depend on tokens.
_TOKEN_WEIGHT = 0.125


def ratio(a: float, b: float) -> float:
    """Return the factor between two values, at least 1; infinite if exactly one of them is 0."""
    return 1.0 if a == b else math.inf if not a or not b else max(a / b, b / a)


def size_ratio(run: PublishedRun, params: int) -> float:
    """Return the factor between the sizes of a run and of a model, at least 1."""
    return ratio(run.params_total, params)


def of_size(params: int) -> list[PublishedRun]:
    """Return the dense runs within `FACTOR` of a size, with any optimizer, from small to large."""
    return [run for run in load_runs() if run.kind == "dense" and size_ratio(run, params) <= FACTOR]


def first_of_each(runs: Iterable[PublishedRun]) -> list[PublishedRun]:
    """Return the first run of each lineage, in the order of ``runs``."""
    first: dict[str, PublishedRun] = {}
    for run in runs:
        first.setdefault(run.lineage.name, run)
    return list(first.values())


def nearest(
    params: int,
    tokens: int,
    *,
    limit: int | None = None,
    factor: float = FACTOR,
    stack: Stack | None = None,
    kind: Kind = "dense",
) -> list[tuple[PublishedRun, float]]:
    """Return the published runs nearest to a model, each with its distance in octaves of parameters.

    Only runs within ``factor`` of the size are returned; if there are none, all runs are. The nearest run of each
    lineage comes first, then the other runs. In both parts, runs with the same stack precede others, and nearer runs
    (in size and in duration) precede runs farther away. Runs whose learning rate cannot be compared are left out
    (:attr:`PublishedRun.lr_comparable`). If ``stack`` names an optimizer other than Adam, only runs with that
    optimizer are compared.

    Raises:
        InputError: if ``params`` or ``tokens`` is not above 0, if ``factor`` is below 1, or if no run of this kind
            has a learning rate that can be compared.
    """
    if params <= 0 or tokens <= 0:
        raise InputError(f"cannot find neighbours of {params} parameters and {tokens} tokens; both must be above 0")
    if not factor >= 1:  # also true for nan
        raise InputError(f"a factor of {factor:g} excludes every size; give at least 1, for example 4")
    stack = stack or Stack()
    optimizers = same_lr_meaning(stack.optimizer or "adamw")
    found = [
        (run, math.hypot(math.log2(run.params_total / params), _TOKEN_WEIGHT * math.log2(run.tokens / tokens)))
        for run in load_runs()
        if run.kind == kind and run.comparable_lr(optimizers) and run.tokens
    ]
    if not found:
        raise InputError(
            f"no published {kind} run with {listed(optimizers)} has a learning rate that can be compared"
        )
    within = [pair for pair in found if size_ratio(pair[0], params) <= factor]
    ranked = sorted(within or found, key=lambda pair: (bool(within) and not stack.fits(pair[0].stack), pair[1]))
    best = {run.id for run in first_of_each(run for run, _ in ranked)}
    return sorted(ranked, key=lambda pair: pair[0].id not in best)[:limit]


def near_run(run: PublishedRun, distance: float, params: int, factor: float, wanted: Stack) -> NearRun:
    """Return the row of ``leaven recipes nearest`` for a published run.

    ``distance`` is the run's distance, in octaves of parameters, from a model of ``params`` parameters.
    """
    ratio = size_ratio(run, params)
    return NearRun(
        **run.summary().model_dump(),
        distance=distance,
        size_ratio=ratio,
        within_factor=ratio <= factor,
        same_stack=wanted.fits(run.stack),
        stack=run.stack.text,
    )


@dataclass(frozen=True)
class Votes:
    """The values of several voters (runs or laws), and the value chosen from them: their middle or the most
    frequent."""

    value: Any
    by: Mapping[str, Any]  # run id or name of a law -> its value

    @property
    def low(self) -> float:
        return float(min(self.by.values()))

    @property
    def high(self) -> float:
        return float(max(self.by.values()))


def most_common(by: Mapping[str, Any]) -> Votes | None:
    """Choose the most frequent value of several votes, or return None if there are no votes.

    If several values are equally frequent, the first is chosen.
    """
    return Votes(Counter(by.values()).most_common(1)[0][0], by) if by else None


def middle(by: Mapping[str, float], weights: Mapping[str, float] | None = None) -> Votes:
    """Choose the middle of several votes: the median of the logarithms, weighted if ``weights`` is given.

    The weighted median has half of the weight below it. Each vote is placed at the middle of its own weight, and the
    values between votes are interpolated linearly. So equal weights give the ordinary median, and a vote with weight
    0 changes nothing.
    """
    if weights is None:
        return Votes(math.exp(median(map(math.log, by.values()))), by)
    ordered = sorted((math.log(value), weights[who]) for who, value in by.items())
    total, below = sum(weight for _, weight in ordered), 0.0
    stands: list[tuple[float, float]] = []
    for value, weight in ordered:
        stands.append((below + weight / 2 - total / 2, value))
        below += weight
    left = max((stand for stand in stands if stand[0] <= 0), default=stands[0])
    right = min((stand for stand in stands if stand[0] > 0), default=stands[-1])
    share = -left[0] / (right[0] - left[0]) if right[0] > left[0] else 0.0
    return Votes(math.exp(left[1] + min(max(share, 0), 1) * (right[1] - left[1])), by)


@dataclass(frozen=True)
class Neighbours:
    """The nearest run of each lineage to a size.

    A ``reference`` run alone decides every value that it publishes; the neighbours decide the others.
    """

    params: int
    ranked: tuple[PublishedRun, ...]  # runs within `FACTOR` first, and among these the runs with the same stack
    reference: PublishedRun | None = None

    @cached_property
    def close(self) -> tuple[PublishedRun, ...]:
        """Return the runs within `FACTOR` of the size, in the order of ``ranked``."""
        return tuple(run for run in self.ranked if size_ratio(run, self.params) <= FACTOR)

    @cached_property
    def runs(self) -> tuple[PublishedRun, ...]:
        """Return the runs that vote, the nearest in size first.

        These are all runs within a factor of `FACTOR` of the size, or the nearest `NEAREST` runs if there are fewer.
        """
        by_size = sorted(self.ranked, key=lambda run: size_ratio(run, self.params))
        return tuple(by_size[: max(len(self.close), NEAREST)])

    @cached_property
    def table(self) -> dict[str, PublishedRun]:
        return {run.id: run for run in (*self.runs, *([self.reference] if self.reference else []))}

    def values(self, what: str | Callable[[PublishedRun], Any]) -> dict[str, Any]:
        """Return the known values of the runs that vote, by run id.

        If the reference run has a value, only its value is returned. ``what`` is a path of a recipe, or a function of
        a run.
        """
        known = {
            id: value
            for id, run in self.table.items()
            if (value := term(run, what) if isinstance(what, str) else what(run)) is not None
        }
        if self.reference and self.reference.id in known:
            return {self.reference.id: known[self.reference.id]}
        return known

    def middle(self, by: Mapping[str, float]) -> Votes:
        """Return the weighted middle of values, which are keyed by run id; nearer runs have more weight."""
        return middle(by, self.weights(by))

    def most(self, path: str) -> Votes | None:
        """Return the most frequent value at a path; if several are equally frequent, the value of the nearest run."""
        return most_common(self.values(path))

    def weights(self, ids: Iterable[str]) -> dict[str, float]:
        """Return the weight of each run's vote, by run id.

        A weight is 1 at the model's size and falls to 0 linearly with the logarithm of the size ratio. So no value
        jumps when a lineage enters the range. All weights are equal if there is a reference, or if no run is within
        `FACTOR`.
        """
        if self.reference or not self.close:
            return dict.fromkeys(ids, 1.0)
        enough = len(self.close) >= NEAREST
        reach = FACTOR if enough else max(EDGE * size_ratio(self.runs[-1], self.params), FACTOR)
        return {
            id: max(1 - math.log(size_ratio(self.table[id], self.params)) / math.log(reach), LEAST_WEIGHT)
            for id in ids
        }

    def sources(self, ids: Iterable[str]) -> list[str]:
        """Return one line for each run: its id and the sources of its learning rate."""
        return [f"{id}: {'; '.join(self.table[id].lr_sources)}" for id in ids if id in self.table]


def neighbours(
    params: int, tokens: int, *, qk_norm: bool | None = None, reference: PublishedRun | None = None
) -> Neighbours:
    """Return the published runs near a size, one of each lineage: its nearest dense run whose optimizer has learning
    rates that are comparable to AdamW's.

    Runs with AdamW, pre-norm and the given QK-norm precede the others.
    """
    stack = Stack("pre", qk_norm, "adamw")
    ranked = [run for factor in (FACTOR, math.inf) for run, _ in nearest(params, tokens, factor=factor, stack=stack)]
    return Neighbours(params, tuple(first_of_each(ranked)), reference)
