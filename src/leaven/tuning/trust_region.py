"""Trust-region search: steps in octaves around the best point so far, as far as the trials can be trusted.

Per-module landscapes are nearly convex but end in cliffs of divergence, on which random search over a box and
Gaussian processes fail and neighbours of the incumbent do not (Mlodozeniec et al. 2025, arXiv 2512.22382).
Comparing one noisy trial with the best of many soon accepts nothing, and a radius that shrinks with every failure
ends at its floor. So:

1. All trials that ended make a bowl (``bowl.py``); those that diverged make cliffs (``cliffs.py``).
2. The incumbent is the first trial, and then whichever the bowl holds to be better by more than the noise.
3. A proposal is the bottom of the bowl, at most ``TRUST`` octaves from the incumbent along each multiplier, and a
   step along a random half of the multipliers. The step is the radius times what the bowl does not know: the way
   from its bottom to that of a bowl drawn from the posterior. So what is settled is left alone, what hardly matters
   moves far, and proposals made at once differ.
4. Multipliers that bring the proposal over a cliff are shortened.
5. The radius grows when a trial is the best yet by the bowl and shrinks when not: it stands still at one in four.
6. Until a trial ends without divergence there is no bowl, and no cliff to be seen, for nothing is on this side of it.
   Each divergence brings the learning rates a quarter of an octave down and the proposals closer together; without
   learning rates it looks ever farther. The first trial that ends takes the place of the start.

All this is in steps, of as many octaves as the scale of a multiplier; a region takes and gives octaves.

Trials of a search share one seed, and with it init and data, so differences between them are less noisy than runs of
other seeds are (``noise``, the floor). But what is better with one seed only is no answer, so the floor remains the
least noise that the bowl assumes, and the least gain that moves the incumbent. It costs next to nothing
(docs/search.md).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from optuna.distributions import BaseDistribution, FloatDistribution
from optuna.samplers import BaseSampler
from optuna.study import Study
from optuna.trial import FrozenTrial

from leaven.tuning import bowl, cliffs
from leaven.tuning.ledger import finished, loss_of, seed, turn
from leaven.tuning.noise import floor

Array = NDArray[np.float64]

TRUST = 1.0  # octaves
START, WIDEST, NARROWEST = 0.5, 1.2, 0.4  # the radius, as a part of what is not known
GROW, SHRINK = 1.1, 0.97  # still where one in four succeeds: 1.1 * 0.97^3 = 1
CHANGED = 0.5  # chance of each multiplier to move at all
FARTHEST = 1.5  # octaves, of one multiplier in one step: draws have long tails
RISK = 0.1  # the chance of divergence that a proposal may have
OUTLIER = 10.0  # times the way from the median down to the lowest loss: what is that far above it fell off a cliff
DOWN = 0.25  # octaves of learning rate for each divergence, as long as there is nothing else
CLOSER, CLOSEST = 0.9, 0.05  # times the radius, likewise, and its least
ROUNDS = 3  # without a gain beyond the noise, and it stops


@dataclass(frozen=True)
class Axes:
    """The searched log2 multipliers by name: where a search starts, how far it may go, and in which steps.

    Stores and objectives have the multipliers themselves (``values``); bowl and cliffs have what they are away from
    the start (``octaves``, an array (D,) in the order of the names).

    ``scales``: how many octaves from the start an optimum typically is, by name; 1 where not given.
    """

    start: Mapping[str, float]
    distributions: Mapping[str, FloatDistribution]
    scales: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, limits: Mapping[str, tuple[float, float]], scales: Mapping[str, float]) -> "Axes":
        """Around a start at 0."""
        distributions = {name: FloatDistribution(*both) for name, both in limits.items()}
        return cls(dict.fromkeys(limits, 0.0), distributions, scales)

    @property
    def low(self) -> Array:
        return self.octaves({name: d.low for name, d in self.distributions.items()})

    @property
    def high(self) -> Array:
        return self.octaves({name: d.high for name, d in self.distributions.items()})

    @property
    def scale(self) -> Array:
        return np.array([self.scales.get(name, 1.0) for name in self.start], float)

    def octaves(self, values: Mapping[str, float]) -> Array:
        return np.array([values[name] - start for name, start in self.start.items()])

    def values(self, octaves: Array) -> dict[str, float]:
        return {
            name: float(np.clip(self.start[name] + x, d.low, d.high))
            for (name, d), x in zip(self.distributions.items(), octaves, strict=True)
        }


@dataclass(frozen=True)
class Region:
    """Where to look next, in octaves from the start."""

    incumbent: Array  # (D,)
    radius: float
    bowl: bowl.Bowl  # of steps, as the cliffs
    cliffs: cliffs.Cliffs
    since: int  # trials since the incumbent became it
    low: Array  # (D,), of the space
    high: Array
    origin: Array  # (D,), octaves: the start, or what takes its place
    scale: Array  # (D,), octaves of a step

    @property
    def promise(self) -> Array:
        """The point that the bowl holds to be best, of those to be trusted, (D,)."""
        return self._within(np.zeros(len(self.incumbent)))

    def proposal(self, rng: np.random.Generator) -> Array:
        """The point to try next, (D,)."""
        step = np.clip(self.radius * (self.bowl.draw(rng) - self.bowl.bottom), -FARTHEST, FARTHEST)
        moves = rng.random(len(step)) < CHANGED
        moves[rng.integers(len(step))] = True
        return self._within(moves * step)

    def stalled(self) -> bool:
        """Whether ``ROUNDS`` rounds gained less than the noise, and the bowl does not promise more.

        A round is half as many trials as multipliers, which is what it takes to look along them all.
        """
        here, there = self.belief(np.array([self.incumbent, self.promise]))
        quiet = self.since >= ROUNDS * max(10, len(self.incumbent) // 2)
        return bool(quiet and here - there < self.bowl.noise)

    def belief(self, x: Array) -> Array:
        """The loss that all trials together hold of points (m, D), up to a constant: (m,)."""
        return self.bowl.value(self._steps(x))

    def deviation(self, x: Array, base: Array) -> Array:
        """The standard deviation of that, less that of ``base`` (D,)."""
        return self.bowl.deviation(self._steps(x), self._steps(base))

    def along(self, base: Array, x: Array) -> tuple[Array, Array]:
        """The loss where each multiplier alone moves from ``base`` (D,) to each of ``x`` (D, m), less ``base``'s.

        The mean and the standard deviation, (D, m) each.
        """
        return self.bowl.along(self._steps(base), self._steps(x.T).T)

    def risk(self, x: Array) -> Array:
        """The chance that a run at points (..., D) diverges."""
        return self.cliffs.risk(self._steps(x))

    def _steps(self, x: Array) -> Array:
        return np.asarray((x - self.origin) / self.scale)

    def _within(self, step: Array) -> Array:
        here = self._steps(self.incumbent)
        trusted = here + np.clip(self.bowl.bottom - here, -TRUST, TRUST)
        inside = np.clip(trusted + step, self._steps(self.low), self._steps(self.high))
        found = self.origin + self.scale * self.cliffs.shorten(inside, here, RISK)
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
    rates: NDArray[np.bool_] | None = None,
) -> Region:
    """The region after trials at ``points`` (n, D), in their order, with ``losses`` (n,) infinite for divergence.

    Args:
        noise: between seeds; without it, it is that of points that were run again, and what the bowl cannot follow.
        seeds: (n,), of the trials; without, all have the same.
        scale: (D,), octaves of a step; 1 without.
        rates: (D,), which multipliers to lower as long as everything diverges.
    """
    scale = np.ones(len(low)) if scale is None else scale
    seeds = np.zeros(len(points), np.int64) if seeds is None else seeds
    ended = np.isfinite(without_outliers(losses))
    if not ended.any():
        return _without_ground(len(points), low, high, scale, np.zeros(len(low), bool) if rates is None else rates)
    at_start = ~points.any(1)
    left = at_start.any() and not (at_start & ended).any()
    origin = points[np.argmax(ended)] if left else np.zeros(len(low))
    octaves, points = points, (points - origin) / scale
    if noise is None:
        noise = floor(zip(map(Array.tobytes, points), seeds, losses, strict=True))[0] or 0.0
    shape, walls = bowl.fit(points[ended], losses[ended], noise), cliffs.fit(points, ~ended)
    believed = np.where(ended, shape.value(points), np.inf)
    # A trial that got away at the edge is no place to stay.
    believed = np.where(walls.risk(points) > max(RISK, float(walls.risk(points[ended]).min())), np.inf, believed)
    incumbent, lowest, radius = int(np.argmax(np.isfinite(believed))), np.inf, START
    for j, value in enumerate(believed):
        radius = float(np.clip(radius * (GROW if value < lowest else SHRINK), NARROWEST, WIDEST))
        lowest = min(lowest, value)
        if value < believed[incumbent] - shape.noise:
            incumbent = j
    since = len(points) - 1 - incumbent
    return Region(octaves[incumbent], radius, shape, walls, since, low, high, origin, scale)


def _without_ground(tried: int, low: Array, high: Array, scale: Array, rates: NDArray[np.bool_]) -> Region:
    """The region after so many trials, all of which diverged: point 6 above."""
    lowered = np.clip(-DOWN * tried * rates, low, high)
    nowhere = np.zeros((1, len(low)))
    nothing, quiet = bowl.fit(nowhere, np.zeros(1)), cliffs.fit(nowhere, np.zeros(1, bool))
    radius = float(np.clip(START * CLOSER ** (tried if rates.any() else -tried), CLOSEST, WIDEST))
    return Region(lowered, radius, nothing, quiet, 0, low, high, lowered, scale)


def without_outliers(losses: Array) -> Array:
    """Infinite for what got away with a loss that no bowl holds: squares of it would drown all others."""
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


def region_of(trials: Sequence[FrozenTrial], axes: Axes, noise: float | None = None) -> Region:
    """The region after the finished trials of a study, in the order of their results."""
    points = np.array([axes.octaves(trial.params) for trial in trials]).reshape(-1, len(axes.start))
    return region(
        points,
        np.array([loss_of(trial) for trial in trials]),
        axes.low,
        axes.high,
        noise,
        seeds=np.array([seed(trial) for trial in trials], np.int64),
        scale=axes.scale,
        rates=learning_rates(list(axes.start)),
    )


class TrustRegionSampler(BaseSampler):
    """The search as an Optuna sampler, so that any Optuna store and dashboard takes its studies."""

    def __init__(self, axes: Axes, seed: int, noise: float | None = None) -> None:
        self._axes, self._seed, self._noise = axes, seed, noise
        self._known: tuple[list[object], Region] | None = None

    def region(self, study: Study) -> Region:
        """The region of a study as it stands.

        Kept for as long as no other trial ends: all workers that are free ask for it, and whether to stop. After
        2,000 trials of 90 values it takes seconds.
        """
        trials = finished(study)
        results = [study.study_name, *(trial.number for trial in trials)]
        if self._known is None or self._known[0] != results:
            self._known = results, region_of(trials, self._axes, self._noise)
        return self._known[1]

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return dict(self._axes.distributions)

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        rng = np.random.default_rng([self._seed, turn(trial)])
        return self._axes.values(self.region(study).proposal(rng))

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        raise AssertionError(f"{param_name} is not in the search space")
