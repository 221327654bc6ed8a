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

A region is a function of the finished trials in their order, and a proposal of the region, the seed and its number:
any process can make it from the store, whoever ran the trials.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from optuna.distributions import BaseDistribution, FloatDistribution
from optuna.samplers import BaseSampler
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from leaven.tuning import bowl, cliffs
from leaven.tuning.noise import pooled

Array = NDArray[np.float64]

TRUST = 1.0  # octaves
START, WIDEST, NARROWEST = 0.5, 1.2, 0.4  # the radius, as a part of what is not known
GROW, SHRINK = 1.1, 0.97  # still where one in four succeeds: 1.1 * 0.97^3 = 1
CHANGED = 0.5  # chance of each multiplier to move at all
FARTHEST = 1.5  # octaves, of one multiplier in one step: draws have long tails
RISK = 0.1  # the chance of divergence that a proposal may have
OUTLIER = 10.0  # times the way from the median down to the lowest loss: what is that far above it fell off a cliff
ROUNDS = 3  # without a gain beyond the noise, and it stops

DIVERGED = "diverged"  # a trial's attribute


@dataclass(frozen=True)
class Axes:
    """The searched values in octaves from the start; a distribution without ``log`` is of octaves itself."""

    start: Mapping[str, float]
    distributions: Mapping[str, FloatDistribution]

    @classmethod
    def of(cls, limits: Mapping[str, tuple[float, float]]) -> "Axes":
        """Axes of log2 multipliers around a start at 0."""
        return cls(dict.fromkeys(limits, 0.0), {name: FloatDistribution(*both) for name, both in limits.items()})

    @property
    def low(self) -> Array:
        return self.octaves({name: d.low for name, d in self.distributions.items()})

    @property
    def high(self) -> Array:
        return self.octaves({name: d.high for name, d in self.distributions.items()})

    def octaves(self, values: Mapping[str, float]) -> Array:
        return np.array(
            [
                np.log2(values[name] / self.start[name]) if d.log else values[name] - self.start[name]
                for name, d in self.distributions.items()
            ]
        )

    def values(self, octaves: Array) -> dict[str, float]:
        steps = zip(self.distributions.items(), octaves, strict=True)
        return {
            name: float(np.clip(self.start[name] * 2**x if d.log else self.start[name] + x, d.low, d.high))
            for (name, d), x in steps
        }


@dataclass(frozen=True)
class Region:
    """Where to look next, in octaves from the start."""

    incumbent: Array  # (D,)
    radius: float
    bowl: bowl.Bowl
    cliffs: cliffs.Cliffs
    since: int  # trials since the incumbent became it
    low: Array  # (D,), of the space
    high: Array

    @property
    def promise(self) -> Array:
        """The point that the bowl holds to be best, of those to be trusted."""
        return self._within(np.zeros(len(self.incumbent)))

    def proposal(self, rng: np.random.Generator) -> Array:
        """The point to try next."""
        step = np.clip(self.radius * (self.bowl.draw(rng) - self.bowl.bottom), -FARTHEST, FARTHEST)
        moves = rng.random(len(step)) < CHANGED
        moves[rng.integers(len(step))] = True
        return self._within(moves * step)

    def stalled(self) -> bool:
        """Whether ``ROUNDS`` rounds gained less than the noise, and the bowl does not promise more.

        A round is half as many trials as multipliers, which is what it takes to look along them all.
        """
        here, there = self.bowl.value(np.array([self.incumbent, self.promise]))
        quiet = self.since >= ROUNDS * max(10, len(self.incumbent) // 2)
        return bool(quiet and here - there < self.bowl.noise)

    def _within(self, step: Array) -> Array:
        trusted = self.incumbent + np.clip(self.bowl.bottom - self.incumbent, -TRUST, TRUST)
        return self.cliffs.shorten(np.clip(trusted + step, self.low, self.high), self.incumbent, RISK)


def region(points: Array, losses: Array, low: Array, high: Array, noise: float | None = None) -> Region:
    """The region after trials at ``points`` (n, D), in their order, with ``losses`` (n,) infinite for divergence.

    Without ``noise`` it is estimated from trials of one point, and from what the bowl cannot follow.
    """
    ended = np.isfinite(_without_outliers(losses))
    walls = cliffs.fit(points, ~ended)
    if not ended.any():
        # Nothing is known but what diverges: as if the start had some loss.
        shape = bowl.fit(np.zeros((1, points.shape[1])), np.zeros(1))
        return Region(np.zeros(len(low)), max(START * SHRINK ** len(points), NARROWEST), shape, walls, 0, low, high)
    noise = _repeated(points[ended], losses[ended]) if noise is None else noise
    shape = bowl.fit(points[ended], losses[ended], noise)
    believed = np.where(ended, shape.value(points), np.inf)
    # A trial that got away at the edge is no place to stay.
    believed = np.where(walls.risk(points) > max(RISK, float(walls.risk(points[ended]).min())), np.inf, believed)
    incumbent, lowest, radius = int(np.argmax(np.isfinite(believed))), np.inf, START
    for j, value in enumerate(believed):
        radius = float(np.clip(radius * (GROW if value < lowest else SHRINK), NARROWEST, WIDEST))
        lowest = min(lowest, value)
        if value < believed[incumbent] - shape.noise:
            incumbent = j
    return Region(points[incumbent], radius, shape, walls, len(points) - 1 - incumbent, low, high)


def _without_outliers(losses: Array) -> Array:
    """Infinite for what got away with a loss that no bowl holds: squares of it would drown all others."""
    finite = losses[np.isfinite(losses)]
    if len(finite) < 10:
        return losses
    median = np.median(finite)
    return np.where(losses > median + OUTLIER * (median - finite.min()), np.inf, losses)


def _repeated(points: Array, losses: Array) -> float:
    """The noise of trials of one point; 0 if there is no point with two."""
    groups: dict[bytes, list[float]] = {}
    for point, loss in zip(points, losses, strict=True):
        groups.setdefault(point.tobytes(), []).append(float(loss))
    return pooled(groups.values())[0] or 0.0


def finished(study: Study) -> list[FrozenTrial]:
    """The trials with a result, in the order of their results; of those that were stopped, what was expected of it."""
    trials = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED))
    return sorted(trials, key=lambda trial: (trial.datetime_complete, trial.number))


def loss_of(trial: FrozenTrial) -> float:
    """What a trial with a result came to: infinite if it diverged, whatever it was scored."""
    assert trial.value is not None
    return np.inf if trial.user_attrs.get(DIVERGED) else trial.value


def region_of(study: Study, axes: Axes, noise: float | None = None) -> Region:
    """The region of a study as it stands."""
    trials = finished(study)
    points = np.array([axes.octaves(trial.params) for trial in trials]).reshape(-1, len(axes.start))
    return region(points, np.array([loss_of(trial) for trial in trials]), axes.low, axes.high, noise)


class TrustRegionSampler(BaseSampler):
    """The search as an Optuna sampler, so that any Optuna store and dashboard takes its studies."""

    def __init__(self, axes: Axes, seed: int, noise: float | None = None) -> None:
        self._axes, self._seed, self._noise = axes, seed, noise

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return dict(self._axes.distributions)

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        rng = np.random.default_rng([self._seed, trial.number])
        return self._axes.values(region_of(study, self._axes, self._noise).proposal(rng))

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        raise AssertionError(f"{param_name} is not in the search space")
