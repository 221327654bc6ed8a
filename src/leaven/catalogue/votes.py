"""What published runs near a size say, a lineage having one vote: the value most of them have, or their middle.

Values go by the paths of a recipe (:mod:`leaven.catalogue.terms`). Middles are medians of logarithms: half and twice
are equally far.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import Any

from leaven.catalogue.run import Run, Stack
from leaven.catalogue.runs import load_runs, nearest, size_ratio
from leaven.catalogue.terms import terms

FACTOR = 4.0
"""Runs within this factor of a size are its neighbours."""
LEAST_WEIGHT = 1e-6
"""Of a vote at the edge, so that one that is alone still counts."""
NEAREST = 3
"""Lineages that vote at least, however far away they are: one lineage alone decides nothing."""
EDGE = 1.5
"""How far beyond the `NEAREST`-th lineage the reach ends where fewer are within `FACTOR`."""
OWN = "leaven"
"""The lineage of leaven's own tuned bases, which are no published runs and have no vote."""
_STACK = Stack(norm_placement="pre", optimizer="adamw")


@dataclass(frozen=True)
class Said:
    """One number made of many: the middle or the most frequent, and who said what."""

    value: Any
    by: Mapping[str, Any]  # run id or name of a law -> its value

    @property
    def low(self) -> float:
        return float(min(self.by.values()))

    @property
    def high(self) -> float:
        return float(max(self.by.values()))

    @property
    def spread(self) -> float:
        """The highest over the lowest."""
        return self.high / self.low if self.low else math.inf

    def told(self, show: Callable[[Any], str]) -> str:
        """``tinyllama-1.1b 0.1, dclm-3b-1x 0.033``"""
        return ", ".join(f"{who} {show(value)}" for who, value in self.by.items())

    def counted(self, show: Callable[[Any], str]) -> str:
        """``3 of 4 lineages (a, b, c); else d 0.033``"""
        agree = [who for who, value in self.by.items() if value == self.value]
        other = ", ".join(f"{who} {show(value)}" for who, value in self.by.items() if value != self.value)
        named = f"{len(agree)} of {len(self.by)} lineages ({', '.join(agree)})"
        return f"{named}; else {other}" if other else named


def middle(by: Mapping[str, float], weights: Mapping[str, float] | None = None) -> Said:
    """The median of the logarithms, of weighted votes the weighted one.

    That is where half of the weight is below, each vote standing at the middle of its own, in straight lines between
    them: equal weights give the ordinary median, and a vote that comes in with weight 0 moves nothing.
    """
    if weights is None:
        return Said(math.exp(median(map(math.log, by.values()))), by)
    ordered = sorted((math.log(value), weights[who]) for who, value in by.items())
    total, below = sum(weight for _, weight in ordered), 0.0
    stands: list[tuple[float, float]] = []
    for value, weight in ordered:
        stands.append((below + weight / 2 - total / 2, value))
        below += weight
    left = max((stand for stand in stands if stand[0] <= 0), default=stands[0])
    right = min((stand for stand in stands if stand[0] > 0), default=stands[-1])
    share = -left[0] / (right[0] - left[0]) if right[0] > left[0] else 0.0
    return Said(math.exp(left[1] + min(max(share, 0), 1) * (right[1] - left[1])), by)


@dataclass(frozen=True)
class Neighbours:
    """Of each lineage the run nearest to a size, the nearest first.

    With a ``lead`` its own values come first, and the others are asked only where it is silent.
    """

    params: int
    runs: tuple[Run, ...]
    within: bool  # whether at least one run is within `FACTOR` of the size
    lead: Run | None = None
    reach: float = FACTOR  # the factor in size at which a vote has no weight left

    @cached_property
    def _terms(self) -> dict[str, dict[str, Any]]:
        return {run.id: terms(run) for run in (*self.runs, *([self.lead] if self.lead else []))}

    def values(self, path: str) -> dict[str, Any]:
        """Who says what; only the lead where it says something."""
        if self.lead and path in self._terms[self.lead.id]:
            return {self.lead.id: self._terms[self.lead.id][path]}
        return {run.id: self._terms[run.id][path] for run in self.runs if path in self._terms[run.id]}

    def of(self, value: Callable[[Run], Any]) -> dict[str, Any]:
        """As :meth:`values`, of what is no path of a recipe; None is silence."""
        if self.lead and value(self.lead) is not None:
            return {self.lead.id: value(self.lead)}
        return {run.id: said for run in self.runs if (said := value(run)) is not None}

    def weights(self, ids: Iterable[str]) -> dict[str, float]:
        """Of votes by run: 1 at the size, falling with the logarithm of the distance to 0 at ``reach``, so that no
        value jumps where a lineage comes in. Votes are equal with a lead, or where no run is within `FACTOR`.
        """
        equal = self.lead is not None or not self.within
        return {
            id: 1.0
            if equal
            else max(1 - math.log(size_ratio(self.table[id], self.params)) / math.log(self.reach), LEAST_WEIGHT)
            for id in ids
        }

    def middle(self, by: Mapping[str, float]) -> Said:
        """The weighted middle of what runs say."""
        return middle(by, self.weights(by))

    def most(self, path: str) -> Said | None:
        """The most frequent value; of equally frequent ones the one of the nearest run."""
        by = self.values(path)
        return Said(Counter(by.values()).most_common(1)[0][0], by) if by else None

    @property
    def distance(self) -> float:
        """The factor between the size and the nearest run's."""
        return size_ratio(self.runs[0], self.params)

    @property
    def lineages_within(self) -> int:
        """How many lineages have a run within `FACTOR` of the size."""
        return sum(size_ratio(run, self.params) <= FACTOR for run in self.runs)

    def sources(self, ids: Iterable[str]) -> list[str]:
        """Each run with where its learning rate stands."""
        return [f"{id}: {'; '.join(self.table[id].lr_sources)}" for id in ids if id in self.table]

    @property
    def table(self) -> dict[str, Run]:
        return {run.id: run for run in (*self.runs, *([self.lead] if self.lead else []))}


def neighbours(params: int, tokens: int, lead: Run | None = None) -> Neighbours:
    """The published dense runs with a comparable learning rate near a size: of each lineage its nearest run, those
    within `FACTOR` of the size or else the nearest `NEAREST`; pre-norm ones first."""
    near = [run for run, _ in nearest(params, tokens, limit=1_000, factor=FACTOR, stack=_STACK)]
    anywhere = [run for run, _ in nearest(params, tokens, limit=1_000, factor=math.inf, stack=_STACK)]
    first: dict[str, Run] = {}
    for run in (*near, *anywhere):
        if run.lineage.name != OWN:
            first.setdefault(run.lineage.name, run)
    by_size = sorted(first.values(), key=lambda run: size_ratio(run, params))
    within = sum(size_ratio(run, params) <= FACTOR for run in by_size)
    voters = by_size[: max(within, NEAREST)]
    reach = FACTOR if within >= NEAREST else EDGE * size_ratio(voters[-1], params)
    return Neighbours(params, tuple(voters), within > 0, lead, max(reach, FACTOR))


def batch_ramps(runs: Iterable[Run] | None = None) -> tuple[dict[str, float], dict[str, float]]:
    """Of the published batch ramps: the first batch as a share of the last, the length as a share of the run.

    A family has one vote, its largest run: a ramp belongs to whoever ran it, not to a table of learning rates.
    """
    starts: dict[str, tuple[str, float]] = {}
    lengths: dict[str, tuple[str, float]] = {}
    for run in runs or load_runs():  # from small to large, so that the largest stays
        said, ramp = terms(run), run.batch.rampup if run.batch else None
        if run.kind != "dense" or ramp is None or ramp.kind not in ("increments", "linear"):
            continue
        start, over = said.get("batch.ramp.start_tokens"), said.get("batch.ramp.over_tokens")
        if start and run.batch_tokens:
            starts[run.family] = run.id, start / run.batch_tokens
        if over and run.tokens:
            lengths[run.family] = run.id, over / run.tokens
        elif ramp.over_fraction_of_samples:
            lengths[run.family] = run.id, ramp.over_fraction_of_samples
    return dict(starts.values()), dict(lengths.values())


def ramp_votes(found: Sequence[Run]) -> dict[str, bool]:
    """Who grew the batch and who says that it did not, by run; the silent are left out."""
    return {run.id: grew for run in found if run.lr_comparable and (grew := run.batch_grew) is not None}
