"""The published runs near a size and their values: the one notion of a neighbour, for starters and findings.

A lineage (runs that copied one another's learning rate) has one vote, its nearest run. Values are keyed by the paths
of a recipe (:mod:`leaven.catalogue.terms`). A middle is a median of logarithms: half and twice are equally far.
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
from leaven.catalogue.terms import terms
from leaven.documents.catalogue import NearRun
from leaven.recipe.errors import InputError

FACTOR = 4.0
"""Runs within this factor of a size are near it; others say little about its lr and batch."""
NEAREST = 3
"""Minimum number of lineages that vote, however far away: one lineage alone decides nothing."""
EDGE = 1.5
"""If fewer than `NEAREST` lineages are within `FACTOR`, weights reach 0 at this factor beyond the farthest voter."""
LEAST_WEIGHT = 1e-6
"""Weight of a vote at the edge; not 0, so that a single vote still counts."""
# An octave of tokens counts as an eighth of one of parameters: published choices hardly depend on the tokens.
_TOKEN_WEIGHT = 0.125


def size_ratio(run: PublishedRun, params: int) -> float:
    """Return the factor between the sizes of a run and of a model, at least 1."""
    return max(run.params_total / params, params / run.params_total)


def of_size(params: int) -> list[PublishedRun]:
    """Return the dense runs within `FACTOR` of a size, with any optimizer, from small to large."""
    return [run for run in load_runs() if run.kind == "dense" and size_ratio(run, params) <= FACTOR]


def first_of_each(
    runs: Iterable[PublishedRun], group: Callable[[PublishedRun], str] = lambda run: run.lineage.name
) -> list[PublishedRun]:
    """Return the first run of each lineage (or other group), in their order."""
    first: dict[str, PublishedRun] = {}
    for run in runs:
        first.setdefault(group(run), run)
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
    """Return the runs nearest in stack, size and duration, with their distance in octaves of parameters.

    Only runs within ``factor`` of the size, those with the same stack first; if there are none, the nearest of all.
    First comes the best run of each lineage, then the others, each in that order. Runs whose learning rate means
    something else are left out (:attr:`PublishedRun.lr_comparable`); a stack with another optimizer selects the
    learning rates of that optimizer.

    Raises:
        InputError: if there are no parameters or no tokens, or no run of this kind has a learning rate to compare.
    """
    if params <= 0 or tokens <= 0:
        raise InputError(f"cannot find neighbours of {params} parameters and {tokens} tokens; both must be above 0")
    if not factor >= 1:  # nor nan
        raise InputError(f"a factor of {factor:g} excludes every size; give at least 1, for example 4")
    stack = stack or Stack()
    optimizers = same_lr_meaning(stack.optimizer or "adamw")
    found = [
        (run, math.hypot(math.log2(run.params_total / params), _TOKEN_WEIGHT * math.log2(run.tokens / tokens)))
        for run in load_runs()
        if run.kind == kind and run.comparable_lr(optimizers) and run.tokens
    ]
    if not found:
        raise InputError(f"no published {kind} run with {listed(optimizers)} has a learning rate to compare")
    within = [pair for pair in found if size_ratio(pair[0], params) <= factor]
    ranked = sorted(within or found, key=lambda pair: (bool(within) and not stack.fits(pair[0].stack), pair[1]))
    best = {run.id for run in first_of_each(run for run, _ in ranked)}
    return sorted(ranked, key=lambda pair: pair[0].id not in best)[:limit]


def near_run(run: PublishedRun, distance: float, params: int, factor: float, wanted: Stack) -> NearRun:
    """Return the row of ``leaven recipes nearest``, at a distance from a model of ``params`` parameters."""
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
    """A value chosen from several (their middle, or the most frequent one), and the value of each voter."""

    value: Any
    by: Mapping[str, Any]  # run id or name of a law -> its value

    @property
    def low(self) -> float:
        return float(min(self.by.values()))

    @property
    def high(self) -> float:
        return float(max(self.by.values()))


def most_common(by: Mapping[str, Any]) -> Votes | None:
    """Return the most frequent value, the first if several are equally frequent; None without votes."""
    return Votes(Counter(by.values()).most_common(1)[0][0], by) if by else None


def middle(by: Mapping[str, float], weights: Mapping[str, float] | None = None) -> Votes:
    """Return the median of the logarithms, weighted if weights are given.

    The weighted median is where half of the weight is below. Each vote sits at the middle of its own weight, with
    linear interpolation between votes, so equal weights give the ordinary median and a vote with weight 0 changes
    nothing.
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
    """The nearest run of each lineage to a size. A ``reference`` decides every value it publishes, the others the
    rest."""

    params: int
    ranked: tuple[PublishedRun, ...]  # all lineages: those within `FACTOR` first, of these those of the same stack
    reference: PublishedRun | None = None

    @cached_property
    def close(self) -> tuple[PublishedRun, ...]:
        """The runs within `FACTOR` of the size, as ranked."""
        return tuple(run for run in self.ranked if size_ratio(run, self.params) <= FACTOR)

    @cached_property
    def runs(self) -> tuple[PublishedRun, ...]:
        """The runs that vote, the nearest in size first: those within `FACTOR`, at least `NEAREST`."""
        by_size = sorted(self.ranked, key=lambda run: size_ratio(run, self.params))
        return tuple(by_size[: max(len(self.close), NEAREST)])

    @cached_property
    def table(self) -> dict[str, PublishedRun]:
        return {run.id: run for run in (*self.runs, *([self.reference] if self.reference else []))}

    @cached_property
    def _terms(self) -> dict[str, dict[str, Any]]:
        return {id: terms(run) for id, run in self.table.items()}

    def values(self, what: str | Callable[[PublishedRun], Any]) -> dict[str, Any]:
        """Return values by run id, for a path of a recipe or a function.

        If the reference has a value, only that is returned.
        """
        known = {
            id: value
            for id, run in self.table.items()
            if (value := self._terms[id].get(what) if isinstance(what, str) else what(run)) is not None
        }
        if self.reference and self.reference.id in known:
            return {self.reference.id: known[self.reference.id]}
        return known

    def middle(self, by: Mapping[str, float]) -> Votes:
        """Return the weighted middle of values by run id."""
        return middle(by, self.weights(by))

    def most(self, path: str) -> Votes | None:
        """Return the most frequent value; if several are equally frequent, that of the nearest run."""
        return most_common(self.values(path))

    def weights(self, ids: Iterable[str]) -> dict[str, float]:
        """Return the weights of votes by run id.

        A weight is 1 at the model's size and falls to 0 with the logarithm of the size ratio, so that no value jumps
        when a lineage enters. Weights are equal with a reference, or if no run is within `FACTOR`.
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
        """Return each run with the source of its learning rate."""
        return [f"{id}: {'; '.join(self.table[id].lr_sources)}" for id in ids if id in self.table]


def neighbours(
    params: int, tokens: int, *, qk_norm: bool | None = None, reference: PublishedRun | None = None
) -> Neighbours:
    """Return the published dense runs near a size that have a comparable learning rate.

    Runs with AdamW, pre-norm and the given QK-norm come first.
    """
    stack = Stack("pre", qk_norm, "adamw")
    ranked = [run for factor in (FACTOR, math.inf) for run, _ in nearest(params, tokens, factor=factor, stack=stack)]
    return Neighbours(params, tuple(first_of_each(ranked)), reference)
