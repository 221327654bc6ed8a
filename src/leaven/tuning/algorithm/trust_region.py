"""Trust-region search: steps in octaves around the best point so far, as far as the trials can be trusted.

Per-module landscapes are nearly convex but end where runs diverge, on which random search over a box and
Gaussian processes fail and neighbours of the incumbent do not (Mlodozeniec et al. 2025, arXiv 2512.22382).
Comparing one noisy trial with the best of many soon accepts nothing, and a radius that shrinks with every failure
ends at its floor. So:

1. All trials that ended are fitted by a quadratic surrogate (``surrogate.py``), those that diverged by a model of the
   divergence boundary (``divergence.py``).
2. The incumbent is the first trial, and then whichever the surrogate holds to be better by more than the noise.
3. A proposal is the minimum of the surrogate, at most ``TRUST`` octaves from the incumbent along each multiplier, and
   a step along a random half of the multipliers. The step is the radius times what the surrogate does not know: the
   way from its minimum to that of one drawn from the posterior. So what is settled is left alone, what hardly matters
   moves far, and proposals made at once differ. A choice that is among that half takes a level that was never run, if
   there is one, and else the best by the drawn surrogate; the others are at their best by the mean.
4. Multipliers that bring the proposal over the divergence boundary are shortened, and choices that do are undone.
5. The radius grows when a trial is the best yet by the surrogate and shrinks when not: it stands still at one in
   four.
6. Until a trial ends without divergence there is no surrogate, and no boundary is known.
   Each divergence brings the learning rates a quarter of an octave down and the proposals closer together; without
   learning rates it looks ever farther. The first trial that ends takes the place of the start.

All this is in steps, of as many octaves as the scale of a multiplier; a region takes and gives octaves. Proposals
stay within a box around the start (``near``), which reaches at least a step beyond the incumbent: so it is extended
while the best lies at its end, up to the bounds of the space, and is a function of the trials as all else.

Trials of a search share one seed, and with it init and data, so differences between them are less noisy than runs of
other seeds are (``noise``, the floor). But what is better with one seed only is no answer, so the floor remains the
least noise that the surrogate assumes, and the least gain that moves the incumbent. It costs next to nothing
(docs/search.md).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from leaven.tuning.algorithm.divergence import DivergenceModel
from leaven.tuning.algorithm.divergence import fit as fit_divergence
from leaven.tuning.algorithm.noise import floor
from leaven.tuning.algorithm.surrogate import Surrogate
from leaven.tuning.algorithm.surrogate import fit as fit_surrogate
from leaven.tuning.document import Dimension

Array = NDArray[np.float64]

TRUST = 1.0  # octaves
START, WIDEST, NARROWEST = 0.5, 1.2, 0.4  # the radius, as a part of what is not known
GROW, SHRINK = 1.1, 0.97  # still where one in four succeeds: 1.1 * 0.97^3 = 1
CHANGED = 0.5  # chance of each multiplier to move at all
FARTHEST = 1.5  # octaves, of one multiplier in one step: draws have long tails
RISK = 0.1  # the chance of divergence that a proposal may have
OUTLIER = 10.0  # times the way from the median down to the lowest loss: what is that far above it diverged
DOWN = 0.25  # octaves of learning rate for each divergence, as long as there is nothing else
CLOSER, CLOSEST = 0.9, 0.05  # times the radius, likewise, and its least
ROUNDS = 3  # without a gain beyond the noise, and it stops


@dataclass(frozen=True)
class Axes:
    """The searched values by name: how far each may go, in which steps, and where the search starts.

    Stores and objectives have log2 multipliers, and the numbers of levels where a value is a choice (``values``). The
    models have what these are away from the start (``octaves``, an array (D,) in the order of the names); of a choice
    the start's level is 0 and the others follow in a circle.
    """

    limits: Mapping[str, tuple[float, float] | range]  # lowest and highest log2 multiplier, or the levels of a choice
    scales: Mapping[str, float] = field(default_factory=dict)  # octaves to a typical optimum; 1 where not given
    near: Mapping[str, tuple[float, float]] = field(default_factory=dict)  # octaves: the box to begin in
    start: Mapping[str, float] = field(default_factory=dict)  # of all names, in the order of ``limits``

    @classmethod
    def of(cls, dimensions: Sequence[Dimension]) -> "Axes":
        """Of a space around a recipe, which has its start at 0."""
        return cls(
            {d.path: range(len(d.levels)) if d.levels else (d.low, d.high) for d in dimensions},
            {d.path: d.scale for d in dimensions},
            {d.path: d.near for d in dimensions if d.near},
        )

    def __post_init__(self) -> None:
        object.__setattr__(self, "start", dict.fromkeys(self.limits, 0.0) | dict(self.start))

    @property
    def ends(self) -> tuple[Array, Array]:
        """How far the values may go: the lowest and the highest octaves from the start, (D,) each."""
        both = [
            (0.0, len(limits) - 1.0) if isinstance(limits, range) else (limits[0] - at, limits[1] - at)
            for limits, at in zip(self.limits.values(), self.start.values(), strict=True)
        ]
        low, high = np.array(both, float).reshape(-1, 2).T
        return low, high

    @property
    def box(self) -> tuple[Array, Array]:
        """Where a search begins: the lowest and the highest octaves, (D,) each."""
        low, high = self.ends
        given = [self.near.get(name, ends) for name, *ends in zip(self.start, low, high, strict=True)]
        near_low, near_high = np.array(given, float).reshape(-1, 2).T
        return np.maximum(low, near_low), np.minimum(high, near_high)

    @property
    def levels(self) -> NDArray[np.int_]:
        """How many levels a choice has, (D,); 0 of a number."""
        return np.array([len(limits) if isinstance(limits, range) else 0 for limits in self.limits.values()])

    @property
    def scale(self) -> Array:
        return np.array([self.scales.get(name, 1.0) for name in self.limits], float)

    def octaves(self, values: Mapping[str, float]) -> Array:
        away = np.array([values[name] - start for name, start in self.start.items()])
        return np.where(self.levels > 0, away % np.maximum(self.levels, 1), away)

    def values(self, octaves: Array) -> dict[str, float]:
        found = {}
        for (name, limits), x in zip(self.limits.items(), octaves, strict=True):
            at = self.start[name] + float(x)
            found[name] = float(round(at) % len(limits)) if isinstance(limits, range) else float(np.clip(at, *limits))
        return found

    def region(
        self, points: Array, losses: Array, noise: float | None = None, seeds: NDArray[np.int64] | None = None
    ) -> "Region":
        """The trust region after trials; see :func:`region`."""
        low, high = self.ends
        return region(
            points,
            losses,
            low,
            high,
            noise,
            seeds=seeds,
            scale=self.scale,
            levels=self.levels,
            near=self.box,
            rates=learning_rates(list(self.limits)),
        )


@dataclass(frozen=True)
class Features:
    """What the models see of a point: a column for each number, and one for each level of a choice but the first.

    A number is in steps of its ``scale`` from the ``origin``; the column of a level is 1 at the level, else 0.
    """

    origin: Array  # (D,), octaves
    scale: Array  # (D,), octaves of a step
    levels: NDArray[np.int_]  # (D,), 0 of a number

    @property
    def owner(self) -> NDArray[np.int_]:
        """Whose column it is, (F,)."""
        return np.repeat(np.arange(len(self.levels)), np.where(self.levels > 0, self.levels - 1, 1))

    @property
    def level(self) -> NDArray[np.int_]:
        """Of which level, (F,); 0 of a number."""
        return np.concatenate([np.arange(1, levels) if levels else [0] for levels in self.levels]).astype(int)

    def of(self, x: Array) -> Array:
        """Of points (..., D): (..., F)."""
        owner, level = self.owner, self.level
        steps = (x[..., owner] - self.origin[owner]) / self.scale[owner]
        return np.where(level > 0, x[..., owner] == level, steps)

    def point(self, columns: Array) -> Array:
        """The point (D,) with these columns (F,)."""
        owner, level = self.owner, self.level
        x = np.zeros(len(self.levels))
        number = level == 0
        x[owner[number]] = self.origin[owner[number]] + self.scale[owner[number]] * columns[number]
        chosen = ~number & (columns > 0.5)
        x[owner[chosen]] = level[chosen]
        return x


@dataclass(frozen=True)
class Region:
    """Where to look next, in octaves from the start."""

    incumbent: Array  # (D,)
    radius: float
    surrogate: Surrogate  # of features, as the divergence model
    divergence: DivergenceModel
    since: int  # trials since the incumbent became it
    low: Array  # (D,), of the box
    high: Array
    features: Features  # around the start, or what takes its place
    never: NDArray[np.bool_]  # (F,), columns that are 0 in all trials

    @property
    def predicted(self) -> Array:
        """The point that the surrogate holds to be best, of those to be trusted, (D,)."""
        still = np.zeros(len(self.features.owner))
        return self._within(still, self._lowest(self.surrogate.mean.at_one))

    def proposal(self, rng: np.random.Generator) -> Array:
        """The point to try next, (D,)."""
        drawn, d = self.surrogate.draw(rng), len(self.incumbent)
        steps = np.clip(self.radius * (drawn.minimum - self.surrogate.mean.minimum), -FARTHEST, FARTHEST)
        moves = rng.random(d) < CHANGED
        moves[rng.integers(d)] = True
        first = 2 * np.abs(drawn.at_one).max() + 1  # so much in favour of a level that was never run
        explored = self._lowest(drawn.at_one - first * self.never)
        levels = np.where(moves, explored, self._lowest(self.surrogate.mean.at_one))
        return self._within(moves[self.features.owner] * steps, levels)

    def stalled(self) -> bool:
        """Whether ``ROUNDS`` rounds gained less than the noise, and the surrogate predicts no more.

        A round is half as many trials as multipliers, which is what it takes to look along them all.
        """
        here, there = self.belief(np.array([self.incumbent, self.predicted]))
        quiet = self.since >= ROUNDS * max(10, len(self.incumbent) // 2)
        return bool(quiet and here - there < self.surrogate.noise)

    def belief(self, x: Array) -> Array:
        """The loss that all trials together hold of points (m, D), up to a constant: (m,)."""
        return self.surrogate.value(self.features.of(x))

    def deviation(self, x: Array, base: Array) -> Array:
        """The standard deviation of that, less that of ``base`` (D,)."""
        return self.surrogate.deviation(self.features.of(x), self.features.of(base))

    def along(self, base: Array, x: Array) -> tuple[Array, Array]:
        """The loss where each value alone moves from ``base`` (D,) to each of ``x`` (D, m), less ``base``'s.

        The mean and the standard deviation, (D, m) each.
        """
        owner, number = self.features.owner, self.features.level == 0
        here = self.features.of(base)
        columns = np.where(number[:, None], self.features.of(x.T).T, here[:, None])
        means, deviations = self.surrogate.along(here, columns)
        mean, deviation = np.zeros(x.shape), np.zeros(x.shape)
        mean[owner[number]], deviation[owner[number]] = means[number], deviations[number]
        for i in np.flatnonzero(self.features.levels):
            there = np.tile(base, (x.shape[1], 1))
            there[:, i] = x[i]
            mean[i] = self.belief(there) - self.belief(base[None])
            deviation[i] = self.deviation(there, base)
        return mean, deviation

    def risk(self, x: Array) -> Array:
        """The chance that a run at points (..., D) diverges."""
        return self.divergence.risk(self.features.of(x))

    def _lowest(self, effects: Array) -> Array:
        """The level of each choice with the lowest of the ``effects`` (F,), and of 0 at the start's: (D,)."""
        found, lowest = np.zeros(len(self.incumbent)), np.zeros(len(self.incumbent))
        for owner, level, effect in zip(self.features.owner, self.features.level, effects, strict=True):
            if level and effect < lowest[owner]:
                found[owner], lowest[owner] = level, effect
        return found

    def _within(self, step: Array, levels: Array) -> Array:
        """A step (F,) from the surrogate's minimum, with the choices at ``levels`` (D,), as far as it is safe."""
        here, number = self.features.of(self.incumbent), self.features.level == 0
        trusted = here + np.clip(self.surrogate.mean.minimum - here, -TRUST, TRUST)
        low, high = self.features.of(self.low), self.features.of(self.high)
        wanted = np.where(number, np.clip(trusted + step, low, high), self.features.of(levels))
        safe = self.divergence.shorten(wanted, here, RISK)
        # Part of the way to another level is no level: the choice stays.
        refused = ~number & (safe != wanted)
        keeps = np.isin(self.features.owner, self.features.owner[refused])
        found = self.features.point(np.where(keeps, here, safe))
        return np.asarray(np.clip(found, self.low, self.high))


def region(
    points: Array,
    losses: Array,
    low: Array,
    high: Array,
    noise: float | None = None,
    *,
    seeds: NDArray[np.int64] | None = None,
    scale: Array | None = None,
    levels: NDArray[np.int_] | None = None,
    near: tuple[Array, Array] | None = None,
    rates: NDArray[np.bool_] | None = None,
) -> Region:
    """The region after trials at ``points`` (n, D), in their order, with ``losses`` (n,) infinite for divergence.

    Args:
        noise: between seeds; without it, that of points that were run again, and what the surrogate cannot follow.
        seeds: (n,), of the trials; without, all have the same.
        scale: (D,), octaves of a step; 1 without.
        levels: (D,), how many a choice has, and 0 of a number; without, all are numbers.
        near: (D,) each, the box in which the search begins; the whole space without.
        rates: (D,), which multipliers to lower as long as everything diverges.
    """
    d = len(low)
    scale = np.ones(d) if scale is None else scale
    levels = np.zeros(d, int) if levels is None else levels
    seeds = np.zeros(len(points), np.int64) if seeds is None else seeds
    ended = np.isfinite(without_outliers(losses))
    if not ended.any():
        lowered = np.zeros(d, bool) if rates is None else rates
        return _while_all_diverge(len(points), low, high, scale, levels, lowered)
    at_start = ~points.any(1)
    left = at_start.any() and not (at_start & ended).any()
    features = Features(points[np.argmax(ended)] if left else np.zeros(d), scale, levels)
    seen = features.of(points)
    if noise is None:
        noise = floor(zip(map(Array.tobytes, seen), seeds, losses, strict=True))[0] or 0.0
    surrogate, divergence = fit_surrogate(seen[ended], losses[ended], noise), fit_divergence(seen, ~ended)
    believed = np.where(ended, surrogate.value(seen), np.inf)
    # A trial that survived beyond the divergence boundary is no incumbent: its neighbours diverge.
    most = max(RISK, float(divergence.risk(seen[ended]).min()))
    believed = np.where(divergence.risk(seen) > most, np.inf, believed)
    incumbent, lowest, radius = int(np.argmax(np.isfinite(believed))), np.inf, START
    for j, value in enumerate(believed):
        radius = float(np.clip(radius * (GROW if value < lowest else SHRINK), NARROWEST, WIDEST))
        lowest = min(lowest, value)
        if value < believed[incumbent] - surrogate.noise:
            incumbent = j
    since, best = len(points) - 1 - incumbent, points[incumbent]
    if near is not None:
        low = np.maximum(low, np.minimum(near[0], best - scale))
        high = np.minimum(high, np.maximum(near[1], best + scale))
    return Region(best, radius, surrogate, divergence, since, low, high, features, np.asarray(~seen.any(0)))


def _while_all_diverge(  # noqa: PLR0917 - the arguments of region
    tried: int, low: Array, high: Array, scale: Array, levels: NDArray[np.int_], rates: NDArray[np.bool_]
) -> Region:
    """The region after so many trials, all of which diverged: point 6 above."""
    lowered = np.clip(-DOWN * tried * rates, low, high)
    features = Features(lowered, scale, levels)
    nowhere = np.zeros((1, len(features.owner)))
    nothing, quiet = fit_surrogate(nowhere, np.zeros(1)), fit_divergence(nowhere, np.zeros(1, bool))
    radius = float(np.clip(START * CLOSER ** (tried if rates.any() else -tried), CLOSEST, WIDEST))
    return Region(lowered, radius, nothing, quiet, 0, low, high, features, np.asarray(~nowhere.any(0)))


def without_outliers(losses: Array) -> Array:
    """Infinite for what got away with a loss that no surrogate holds: squares of it would drown all others."""
    finite = losses[np.isfinite(losses)]
    if len(finite) < 10:
        return losses
    median = np.median(finite)
    return np.where(losses > median + OUTLIER * (median - finite.min()), np.inf, losses)


def learning_rates(names: Sequence[str]) -> NDArray[np.bool_]:
    """Which names are the learning rate to lower: the global one, or else those of modules and of depth, (D,)."""
    keys = [name.rpartition(".") for name in names]
    everywhere = np.array([key == "lr" and folder in {"", "hyperparameters"} for folder, _, key in keys])
    return everywhere if everywhere.any() else np.array([key.partition("[")[0] == "lr" for _, _, key in keys])
