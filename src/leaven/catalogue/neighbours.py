"""Combine the values of a model's neighbours, the published runs nearest in size.

Runs of one lineage copied their learning rates from each other, so only the most similar run of each lineage counts
(see :func:`neighbours`). The value of a run is called its vote.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from statistics import median
from typing import Any

from leaven.catalogue.groups import NormPlacement
from leaven.catalogue.runs import Kind, PublishedRun, Stack, load_runs, same_lr_meaning
from leaven.catalogue.terms import term
from leaven.documents.catalogue import NearRun
from leaven.errors import InputError
from leaven.recipe.units import listed

FACTOR = 4.0
"""A run is near if its size is within this factor of the model's. Other runs say little about lr and batch."""
NEAREST = 3
"""At least this many runs vote, each from another lineage. If fewer are near, runs of other sizes vote, too."""
EDGE = 1.5
"""If fewer than `NEAREST` runs are near: (size ratio at which weights are nearly 0) / (ratio of the farthest run)."""
ALIKE = 2.0
"""Shared experts and dense layers are chosen from similar published mixtures of experts. A mixture is similar if its
experts per token, and its ratio of experts in a layer to experts per token, are within this factor of the model's."""
LEAST_WEIGHT = 1e-6
"""Smallest weight of a vote; it is not 0, so that a single vote still counts."""
# Weight of log2(tokens) in a distance, in which log2(parameters) has weight 1. It is small, because published values
# hardly depend on the tokens.
_TOKEN_WEIGHT = 0.125


def ratio(a: float, b: float) -> float:
    return 1.0 if a == b else math.inf if not a or not b else max(a / b, b / a)


def size_ratio(run: PublishedRun, params: int) -> float:
    """Return the larger of ``params`` and the active parameters of ``run``, divided by the smaller."""
    return ratio(run.params_active, params)


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
    used: bool = False,
) -> list[tuple[PublishedRun, float]]:
    """Return the published runs nearest to a model, each with its distance.

    A factor of 2 in size is a distance of 1, and a factor of 2 in tokens is a distance of 1/8. Only runs whose size
    is within ``factor`` of the model's are returned, sorted by fit to ``kind``, then by fit to ``stack``, then by
    distance. If there are none, all runs are returned, sorted by distance. After sorting, the first run of each
    lineage moves to the front. Raise InputError for invalid arguments, or if no run has an lr that can be compared.

    Args:
        limit: the largest number of runs to return.
        stack: the wanted norm placement, QK-norm and optimizer (by default AdamW).
        used: whether ``params`` counts only the parameters that a token uses. If so, dense runs are returned, too.
    """
    if params <= 0 or tokens <= 0:
        raise InputError(f"cannot find neighbours of {params} parameters and {tokens} tokens; both must be above 0")
    if not factor >= 1:  # also true for nan
        raise InputError(f"a factor of {factor:g} excludes every size; give at least 1, for example 4")
    stack = stack or Stack()
    optimizers = same_lr_meaning(stack.optimizer or "adamw")
    size: Callable[[PublishedRun], int] = attrgetter("params_active" if used else "params_total")
    kinds = {kind, "dense"} if used else {kind}
    found = [
        (run, math.hypot(math.log2(size(run) / params), _TOKEN_WEIGHT * math.log2(run.tokens / tokens)))
        for run in load_runs()
        if run.kind in kinds and run.comparable_lr(optimizers) and run.tokens
    ]
    if not found:
        raise InputError(
            f"no published {kind} run with {listed(optimizers)} has a learning rate that can be compared; "
            "give another optimizer"
        )
    ranked = sorted(found, key=lambda pair: pair[1])
    if within := [pair for pair in ranked if ratio(size(pair[0]), params) <= factor]:
        ranked = sorted(within, key=lambda pair: (pair[0].kind != kind, not stack.fits(pair[0].stack)))
    best = {run.id for run in first_of_each(run for run, _ in ranked)}
    return sorted(ranked, key=lambda pair: pair[0].id not in best)[:limit]


def near_run(run: PublishedRun, distance: float, params: int, factor: float, wanted: Stack) -> NearRun:
    """Return the row of ``leaven recipes nearest`` for a run at ``distance`` from a model with ``params``."""
    apart = ratio(run.params_total, params)
    return NearRun(
        **run.summary().model_dump(),
        distance=distance,
        size_ratio=apart,
        within_factor=apart <= factor,
        same_stack=wanted.fits(run.stack),
        stack=run.stack.text,
    )


@dataclass(frozen=True)
class Votes:
    """The values of several published runs or laws, and the value chosen from them."""

    value: Any  # the chosen value: the median or the most frequent value
    by: Mapping[str, Any]  # the value of each run or law, by its id or name

    @property
    def low(self) -> float:
        return float(min(self.by.values()))

    @property
    def high(self) -> float:
        return float(max(self.by.values()))


def most_common(by: Mapping[str, Any]) -> Votes | None:
    """Return the values ``by`` of runs or laws, and the most frequent of them (the first, if several are)."""
    return Votes(Counter(by.values()).most_common(1)[0][0], by) if by else None


def middle(by: Mapping[str, float], weights: Mapping[str, float] | None = None) -> Votes:
    """Return the values ``by`` and exp(median of their logarithms). ``by`` maps each run or law to its value.

    With ``weights``, the median is weighted: it is interpolated to where the cumulative weight is half of the total.
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
    """The neighbours of a model: the most similar run of each lineage (runs that copied one another's lr)."""

    params: int  # size of the model: the parameters that a token uses
    ranked: tuple[PublishedRun, ...]  # one run of each lineage; runs within `FACTOR` in size first
    reference: PublishedRun | None = None  # the run of ``--from``; for the values that it publishes, only it counts
    experts: bool = False  # whether the model has experts; then runs with experts vote, too

    @cached_property
    def close(self) -> tuple[PublishedRun, ...]:
        return tuple(run for run in self.ranked if size_ratio(run, self.params) <= FACTOR)

    @cached_property
    def runs(self) -> tuple[PublishedRun, ...]:
        """Return the runs of :attr:`close`, nearest in size first. If they are fewer than `NEAREST`, return the
        `NEAREST` runs that are nearest in size."""
        by_size = sorted(self.ranked, key=lambda run: size_ratio(run, self.params))
        return tuple(by_size[: max(len(self.close), NEAREST)])

    def of_size(self) -> list[PublishedRun]:
        """Return all runs within `FACTOR` of the model's size, with any optimizer, from small to large."""
        kinds = {"dense", "moe"} if self.experts else {"dense"}
        near = [run for run in load_runs() if run.kind in kinds and size_ratio(run, self.params) <= FACTOR]
        return sorted(near, key=lambda run: run.params_active)

    @cached_property
    def table(self) -> dict[str, PublishedRun]:
        return {run.id: run for run in (*self.runs, *([self.reference] if self.reference else []))}

    def values(self, what: str | Callable[[PublishedRun], Any]) -> dict[str, Any]:
        """Return the neighbours' values by run id. If the reference run publishes a value, return only this.

        ``what`` is the path of a recipe value such as ``hyperparameters.lr``, or a function of a run.
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
        """Return the values ``by`` and their median in log space, weighted by :meth:`weights`."""
        return middle(by, self.weights(by))

    def most(self, path: str) -> Votes | None:
        """Return the neighbours' values at ``path`` and the most frequent value, or None if no value is known."""
        return most_common(self.values(path))

    def weights(self, ids: Iterable[str]) -> dict[str, float]:
        """Return the weight of each run's vote, by run id.

        The weight falls from 1 at the model's size to nearly 0 at the size ratio `FACTOR`, or at a larger ratio (see
        `EDGE`) if fewer than `NEAREST` runs are near. If no run is near, or if there is a reference run, all weights
        are 1.
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
        """Return a line for each neighbour in ``ids``: its id and the sources of its lr."""
        return [f"{id}: {'; '.join(self.table[id].lr_sources)}" for id in ids if id in self.table]


def mixtures(params: int, alike: tuple[int, int] | None = None, reference: PublishedRun | None = None) -> Neighbours:
    """Return published mixtures of experts, with any optimizer: of each lineage the nearest in size, nearest first.

    Args:
        params: the number of parameters that a token uses.
        alike: (experts in a layer, experts per token) of the model. If given, a run's ratio of these two numbers, and
            its experts per token, must be within the factor `ALIKE` of the model's.
        reference: the run given with ``--from``. Other runs count only for values that it does not publish.
    """

    def fits(run: PublishedRun) -> bool:
        number, active = run.arch.n_experts, run.arch.experts_per_token
        if alike is None or not (number and active):
            return alike is None
        return max(ratio(number / active, alike[0] / alike[1]), ratio(active, alike[1])) <= ALIKE

    runs = (run for run in load_runs() if run.kind == "moe" and fits(run))
    nearest_first = sorted(runs, key=lambda run: size_ratio(run, params))
    return Neighbours(params, tuple(first_of_each(nearest_first)), reference, experts=True)


def neighbours(
    params: int,
    tokens: int,
    *,
    qk_norm: bool | None = None,
    norm_placement: NormPlacement = "pre",
    reference: PublishedRun | None = None,
    experts: bool = False,
) -> Neighbours:
    """Return the neighbours of a model: the most similar run of each lineage with an lr comparable to AdamW's.

    Runs whose size is within the factor `FACTOR` of the model's come first, then all others. Each of these two groups
    is in the order of :func:`nearest`.

    Args:
        params: number of parameters that a token uses.
        qk_norm: whether the model has QK-norm; None ignores QK-norm.
        reference: the run given with ``--from``. Other runs count only for values that it does not publish.
        experts: whether the model is a mixture of experts. If so, dense runs are neighbours, too.
    """
    stack = Stack(norm_placement, qk_norm, "adamw")
    kind: Kind = "moe" if experts else "dense"
    ranked = [
        run
        for factor in (FACTOR, math.inf)
        for run, _ in nearest(params, tokens, factor=factor, stack=stack, kind=kind, used=experts)
    ]
    return Neighbours(params, tuple(first_of_each(ranked)), reference, experts)
