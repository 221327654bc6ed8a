"""Trust-region search: propose points near the best point so far.

The loss over per-module multipliers is nearly convex inside a region that ends where runs diverge. On such a loss,
random search over a box and Gaussian processes fail, and proposals near the best point work (Mlodozeniec et al. 2025,
arXiv 2512.22382).

A point assigns a number or a level to every searched hyperparameter. Hyperparameters with levels, such as the
optimizer, are called choices. Distances are in octaves: one octave doubles a multiplier. One step of a hyperparameter
is ``scale`` octaves, the typical distance of an optimum from the start.

1. Two models are fitted to the trials (``surrogate.py``). The surrogate, a quadratic regression, predicts the loss.
   The divergence model predicts where runs diverge. A loss far above the median (``OUTLIER``) counts as a divergence.
2. The incumbent is the best point so far. At first, it is the first trial with a finite loss. Another trial replaces
   it if its predicted loss is lower by more than the noise, and a run at its point is unlikely to diverge.
3. A proposal is the surrogate's minimum within ``TRUST`` steps of the incumbent along each hyperparameter, plus a
   random move. The move is half of the way from the minimum of the posterior mean to the minimum of a surrogate drawn
   from the posterior. So a hyperparameter whose optimum is known hardly moves, one with little effect moves far, and
   simultaneous proposals differ. The last proposal of a search has no random move.
4. If at most ``DESIGNED`` hyperparameters are searched, each of the first proposals moves only one number, by about a
   step.
5. In each proposal, about half of the choices, at random, explore: they take a level that has never been run or, if
   all their levels have been run, the best level of the drawn surrogate. The other choices take the best level of the
   posterior mean.
6. If the proposal is likely to diverge, its risky numbers are moved back towards the incumbent, and its risky choices
   keep the incumbent's level.
7. While all trials diverge, each divergence lowers the learning rates by a quarter of an octave and brings the
   proposals closer together. If no learning rate is searched, the proposals spread further out instead. If the start
   diverged, the models later measure distances from the first trial that finished, not from the start.

Proposals stay in a box around the start (``near``). The box always reaches at least one step beyond the incumbent, up
to the bounds of the space. So the box grows while the best point lies at its edge.

The noise is the standard deviation of the loss between seeds. All trials of a search share a seed, so their losses
vary by less than the noise. But an improvement that holds for one seed only is useless. So the surrogate assumes at
least the noise between seeds.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from leaven.tuning.algorithm.noise import pooled_noise
from leaven.tuning.algorithm.surrogate import (
    DivergenceModel,
    EarlierTrials,
    Prior,
    Quadratic,
    Surrogate,
    fit_divergence,
    fit_surrogate,
    prior_of_expectations,
    priors_of_earlier,
)
from leaven.tuning.study_document import PRUNED, Dimension, StudyTrial

Array = NDArray[np.float64]

TRUST = 1.0  # steps along each value from the incumbent, within which the surrogate is minimised
RADIUS = 0.5  # the random move of a proposal, as a share of the difference of the two minima in item 3
# A proposal that repeats a point, as at an end of the space, is moved at random, by a normal distribution with these
# standard deviations (steps) in turn, until it is new.
SPREADS = np.linspace(0, 2 * RADIUS, 10)
WIDEST = 1.2  # the largest such share while all trials diverge
DESIGNED = 5  # if at most so many values are searched, each of them is first moved alone
DESIGN = 0.8, 1.2  # steps: the range of these first moves
EXPLORED = 0.5  # probability that a choice explores its levels in a proposal
FARTHEST = 1.5  # steps: in place of TRUST for the two minima of a random move; drawn surrogates have far minima
RISK = 0.1  # the highest accepted probability that a proposal diverges
OUTLIER = 10.0  # a loss further above the median than this times (median - lowest) counts as diverged
DOWN = 0.25  # octaves by which a divergence lowers the learning rates before any trial has finished
CLOSER, CLOSEST = 0.9, 0.05  # factor on the radius per divergence before a trial has finished; smallest radius
QUIET_ROUNDS = 3  # rounds of max(10, D // 2) trials without a gain above the noise after which a search stops
RESULTS = ("complete", "diverged", PRUNED)  # states of trials with a result

Ran = TypeVar("Ran", bound=StudyTrial)


@dataclass(frozen=True)
class Axes:
    """The bounds, scale and start of each searched hyperparameter, by name. A point has two forms:

    - ``params`` (Optuna's word), in stores and objectives: a dict of numbers by name, see ``tuning/point.py``.
    - ``octaves``, in the search algorithm: an array (D,) of distances from the start, in the order of the names.
      For a choice with n levels, the distance is (index of the level - index of the start's level) modulo n.
    """

    limits: Mapping[str, tuple[float, float] | range]  # (lowest, highest) log2 multiplier; range(n) for a choice
    # The distance of a typical optimum from the start point, octaves; default 1.
    scales: Mapping[str, float] = field(default_factory=dict)
    # The initial box: (lowest, highest) distance from the start point, octaves.
    near: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    # The params of the start, for all names in the order of ``limits``; default 0.
    start: Mapping[str, float] = field(default_factory=dict)
    # Where laws expect the optimum: (distance from the start point, octaves; its standard deviation).
    expected: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    earlier: EarlierTrials | None = None  # trials of an earlier search
    # The values that are rounded to whole numbers when they are run.
    whole: Mapping[str, Dimension] = field(default_factory=dict)

    @classmethod
    def of(cls, dimensions: Sequence[Dimension], earlier: EarlierTrials | None = None) -> "Axes":
        """Return the axes of ``dimensions``. On every axis, the start of the search is at 0."""
        return cls(
            {d.path: range(len(d.levels)) if d.levels else (d.low, d.high) for d in dimensions},
            {d.path: d.scale for d in dimensions},
            {d.path: d.near for d in dimensions if d.near},
            expected={d.path: d.expected for d in dimensions if d.expected},
            earlier=earlier,
            whole={d.path: d for d in dimensions if d.whole},
        )

    def __post_init__(self) -> None:
        object.__setattr__(self, "start", dict.fromkeys(self.limits, 0.0) | dict(self.start))

    @property
    def ends(self) -> tuple[Array, Array]:
        """The bounds of the search space: (lowest, highest), each (D,), octaves from the start."""
        both = [
            (0.0, len(limits) - 1.0) if isinstance(limits, range) else (limits[0] - at, limits[1] - at)
            for limits, at in zip(self.limits.values(), self.start.values(), strict=True)
        ]
        low, high = np.array(both, float).reshape(-1, 2).T
        return low, high

    @property
    def box(self) -> tuple[Array, Array]:
        """The bounds of the first proposals: (lowest, highest), each (D,), octaves from the start."""
        low, high = self.ends
        given = [self.near.get(name, ends) for name, *ends in zip(self.start, low, high, strict=True)]
        near_low, near_high = np.array(given, float).reshape(-1, 2).T
        return np.maximum(low, near_low), np.minimum(high, near_high)

    @cached_property
    def levels(self) -> NDArray[np.int_]:
        """The number of levels of the choice on each axis, (D,). It is 0 on a numeric axis."""
        return np.array([len(limits) if isinstance(limits, range) else 0 for limits in self.limits.values()])

    @property
    def scale(self) -> Array:
        return np.array([self.scales.get(name, 1.0) for name in self.limits], float)

    @cached_property
    def knowledge(self) -> list[Prior]:
        """The priors of the surrogate from laws and from an earlier search."""
        features = Features(np.zeros(len(self.limits)), self.scale, self.levels)
        found = []
        if self.earlier is not None:
            d = len(self.limits)
            columns = features.of(self.earlier.points[:, :d])
            with_others = np.hstack([columns, self.earlier.points[:, d:]])
            found += priors_of_earlier(with_others, self.earlier.losses, self.earlier.noise, columns.shape[1])
        if self.expected:
            both = np.array([self.expected.get(name, (0.0, self.scales.get(name, 1.0))) for name in self.limits])
            steps = (both / self.scale[:, None])[features.owner]
            found.append(prior_of_expectations(*np.where(features.level[:, None] == 0, steps, (0.0, 1.0)).T))
        return found

    def octaves(self, params: Mapping[str, float]) -> Array:
        away = np.array([params[name] - start for name, start in self.start.items()])
        return np.where(self.levels > 0, away % np.maximum(self.levels, 1), away)

    def params(self, octaves: Array) -> dict[str, float]:
        found = {}
        for (name, limits), x in zip(self.limits.items(), octaves, strict=True):
            at = self.start[name] + float(x)
            found[name] = float(round(at) % len(limits)) if isinstance(limits, range) else float(np.clip(at, *limits))
        return self.rounded(found)

    def rounded(self, params: Mapping[str, float]) -> dict[str, float]:
        """Return ``params`` as a trial uses them: those in ``whole`` are rounded."""
        return {name: self.whole[name].rounded(x) if name in self.whole else x for name, x in params.items()}

    def not_in(self, tried: Sequence[Mapping[str, float]], params: Mapping[str, float]) -> list[dict[str, float]]:
        """Return the untried points that need the fewest changes to ``params``, or [] if all points have been tried.
        A change moves a whole number by 1, or sets a choice to another level. If a hyperparameter is continuous, or
        if all are choices, return ``[params]``, even if it has been tried."""
        if not self.whole or any(
            not levels and name not in self.whole for name, levels in zip(self.limits, self.levels, strict=True)
        ):
            return [dict(params)]
        had = {tuple(each[name] for name in self.limits) for each in tried}
        layer, seen = {tuple(params[name] for name in self.limits)}, set[tuple[float, ...]]()
        while layer and not layer - had:
            seen |= layer
            layer = {other for point in layer for other in self._neighbours(point)} - seen
        return [dict(zip(self.limits, point, strict=True)) for point in sorted(layer - had)]

    def _neighbours(self, point: tuple[float, ...]) -> Iterable[tuple[float, ...]]:
        for i, (name, levels) in enumerate(zip(self.limits, self.levels, strict=True)):
            others = range(levels) if levels else [self.whole[name].rounded(point[i], more) for more in (-1, 1)]
            for other in others:
                yield (*point[:i], float(other), *point[i + 1 :])


@dataclass(frozen=True)
class Features:
    """Convert points to the F input columns of the surrogate and of the divergence model.

    A number has one column: its distance from ``origin`` in octaves, divided by ``scale``. A choice with n levels
    has n - 1 columns, one for each level except level 0 (the start): 1 if the point has this level, else 0.
    """

    origin: Array  # (D,), octaves
    scale: Array  # (D,), octaves per unit of a column
    levels: NDArray[np.int_]  # (D,), the number of levels; 0 for a number

    @cached_property
    def owner(self) -> NDArray[np.int_]:
        """For each of the F columns, the index of its hyperparameter."""
        return np.repeat(np.arange(len(self.levels)), np.where(self.levels > 0, self.levels - 1, 1))

    @cached_property
    def level(self) -> NDArray[np.int_]:
        """For each of the F columns, the level of the choice at which the column is 1; 0 for a number's column."""
        return np.concatenate([np.arange(1, levels) if levels else [0] for levels in self.levels]).astype(int)

    def of(self, x: Array) -> Array:
        """Convert points (..., D) to columns (..., F)."""
        owner, level = self.owner, self.level
        steps = (x[..., owner] - self.origin[owner]) / self.scale[owner]
        return np.where(level > 0, x[..., owner] == level, steps)

    def point(self, columns: Array) -> Array:
        """Convert ``columns`` (F,) to a point (D,)."""
        owner, level = self.owner, self.level
        x = np.zeros(len(self.levels))
        number = level == 0
        x[owner[number]] = self.origin[owner[number]] + self.scale[owner[number]] * columns[number]
        chosen = ~number & (columns > 0.5)
        x[owner[chosen]] = level[chosen]
        return x


@dataclass(frozen=True)
class Region:
    """The trust region: proposes points near the best point so far, and predicts losses. Points are in octaves."""

    incumbent: Array  # (D,), the best point so far
    radius: float  # a proposal's random move is this factor x the difference of the two minima (item 3 above)
    surrogate: Surrogate  # predicts the loss from the columns of ``features``
    divergence: DivergenceModel  # predicts divergence from the same columns
    since: int  # number of trials that ended after the incumbent
    low: Array  # (D,), the lower ends of the box
    high: Array  # (D,), the upper ends of the box
    features: Features  # converts points to columns; its origin is the start, or the first finished trial (item 7)
    never: NDArray[np.bool_]  # (F,), whether a column of ``features`` is 0 in all trials so far

    @property
    def predicted(self) -> Array:
        """The point (D,) of the trust region with the lowest predicted loss, moved away from likely divergences."""
        mean = self.surrogate.mean
        return self._within(self.lowest(mean, self._levels(mean), self.incumbent))

    def proposal(self, rng: np.random.Generator, *, last: bool = False) -> Array:
        """Return a point (D,) to try. With ``last``, return :attr:`predicted`."""
        if last:
            return self.predicted
        d, number = len(self.incumbent), self.features.level == 0
        unmoved = np.flatnonzero(self.never & number)
        if d <= DESIGNED and len(unmoved):
            wanted = self.features.of(self.incumbent)
            step = rng.choice([-1.0, 1.0]) * rng.uniform(*DESIGN)  # random, so simultaneous proposals differ
            wanted[rng.choice(unmoved)] += step * self.radius / RADIUS
            return self._within(wanted)
        mean, drawn = self.surrogate.mean, self.surrogate.draw(rng)
        explored = (rng.random(d) < EXPLORED) | (np.arange(d) == rng.integers(d))
        levels = np.where(explored, self._levels(drawn, unseen_first=True), self._levels(mean))
        there, here = (self.lowest(each, levels, self.incumbent, FARTHEST) for each in (drawn, mean))
        return self._within(self.lowest(mean, levels, self.incumbent) + self.radius * (there - here))

    def stalled(self) -> bool:
        """Return whether ``QUIET_ROUNDS`` rounds had no new incumbent, and the predicted gain is below the noise."""
        here, there = self.belief(np.array([self.incumbent, self.predicted]))
        quiet = self.since >= QUIET_ROUNDS * max(10, len(self.incumbent) // 2)
        return bool(quiet and here - there < self.surrogate.noise)

    def belief(self, x: Array) -> Array:
        """Return the predicted losses (m,) at points (m, D), up to a constant."""
        return self.surrogate.value(self.features.of(x))

    def deviation(self, x: Array, base: Array) -> Array:
        """Return the standard deviation of the predicted change in loss from ``base`` to each point in ``x``."""
        return self.surrogate.deviation(self.features.of(x), self.features.of(base))

    def along(self, base: Array, x: Array) -> tuple[Array, Array]:
        """Return the mean and the standard deviation of the change in loss, both (D, m), if one value of ``base``
        (D,) changes. In element (i, j), ``x[i, j]`` replaces ``base[i]``."""
        there = _replaced(base, x).reshape(-1, len(base))
        mean = self.belief(there) - self.belief(base[None])
        return mean.reshape(x.shape), self.deviation(there, base).reshape(x.shape)

    def risk(self, x: Array) -> Array:
        """Return the probability that a trial at points (..., D) diverges."""
        return self.divergence.risk(self.features.of(x))

    def risk_along(self, base: Array, x: Array) -> Array:
        """Return the probabilities of divergence (D, m) if, in element (i, j), ``x[i, j]`` replaces ``base[i]``."""
        return self.risk(_replaced(base, x))

    def _levels(self, quadratic: Quadratic, *, unseen_first: bool = False) -> Array:
        """Return the level of each choice at which ``quadratic`` is lowest, (D,), and 0 on a numeric axis. With
        ``unseen_first``, prefer levels that no trial has used."""
        found, lowest = np.zeros(len(self.incumbent)), np.zeros(len(self.incumbent))
        here = np.where(self.features.level == 0, self.features.of(self.incumbent), 0.0)
        effects = quadratic.effects(here)
        if unseen_first:
            effects = effects - (2 * np.abs(effects).max() + 1) * self.never
        for owner, level, effect in zip(self.features.owner, self.features.level, effects, strict=True):
            if level and effect < lowest[owner]:
                found[owner], lowest[owner] = level, effect
        return found

    def lowest(self, quadratic: Quadratic, levels: Array, around: Array, reach: float = TRUST) -> Array:
        """Return the columns (F,) of the point at which ``quadratic`` is lowest, with the choices of ``levels`` (D,).
        Numbers vary within the box of the trust region, by at most ``reach`` steps from ``around`` (D,)."""
        number = self.features.level == 0
        here, fixed = self.features.of(around), self.features.of(levels)
        low = np.where(number, np.maximum(here - reach, self.features.of(self.low)), fixed)
        high = np.where(number, np.minimum(here + reach, self.features.of(self.high)), fixed)
        return quadratic.minimum(here, low, high)

    def _within(self, wanted: Array) -> Array:
        """Return the point (D,) for the columns ``wanted`` (F,), limited to the region's box. If divergence is likely
        there, move the numbers that raise the risk towards the incumbent, and set such choices to its levels."""
        here, number = self.features.of(self.incumbent), self.features.level == 0
        low, high = self.features.of(self.low), self.features.of(self.high)
        wanted = np.where(number, np.clip(wanted, low, high), wanted)
        safe = self.divergence.shorten(wanted, here, RISK)
        # A choice cannot move in part, so it keeps the incumbent's level.
        refused = ~number & (safe != wanted)
        keeps = np.isin(self.features.owner, self.features.owner[refused])
        found = self.features.point(np.where(keeps, here, safe))
        return np.asarray(np.clip(found, self.low, self.high))


def _replaced(base: Array, x: Array) -> Array:
    """Return copies of ``base`` (D,), as (D, m, D). In copy [i, j], ``x[i, j]`` replaces value i. ``x`` is (D, m)."""
    own = np.eye(len(base), dtype=bool)[:, None]
    return np.where(own, x[..., None], base)


def region(
    axes: Axes,
    points: Array,
    losses: Array,
    noise: float | None = None,
    seeds: NDArray[np.int64] | None = None,
) -> Region:
    """Return the trust region after trials, given in the order in which they ended.

    Args:
        points: (n, D).
        losses: (n,), in nats; infinite where a trial diverged.
        noise: standard deviation of the loss between seeds. Default: estimated from repeated points, or 0.
        seeds: (n,), one for each trial, to estimate the noise. Default: all are equal.
    """
    (low, high), (near_low, near_high), scale = axes.ends, axes.box, axes.scale
    seeds = np.zeros(len(points), np.int64) if seeds is None else seeds
    ended = np.isfinite(without_outliers(losses))
    if not ended.any():
        return _region_while_all_diverge(axes, len(points))
    at_start = ~points.any(1)
    left = at_start.any() and not (at_start & ended).any()
    features = Features(points[np.argmax(ended)] if left else np.zeros(len(low)), scale, axes.levels)
    seen = features.of(points)
    if noise is None:
        noise = pooled_noise(zip(map(np.ndarray.tobytes, seen), seeds, losses, strict=True))[0] or 0.0
    knowledge = () if left else axes.knowledge  # only if distances are from the start, as they are in the knowledge
    surrogate = fit_surrogate(seen[ended], losses[ended], noise, knowledge)
    divergence = fit_divergence(seen, ~ended)
    believed = np.where(ended, surrogate.value(seen), np.inf)
    # A trial that finished where runs are likely to diverge cannot be the incumbent, because its neighbours diverge.
    most = max(RISK, float(divergence.risk(seen[ended]).min()))
    believed = np.where(divergence.risk(seen) > most, np.inf, believed)
    incumbent = int(np.argmax(np.isfinite(believed)))
    for j, value in enumerate(believed):
        if value < believed[incumbent] - surrogate.noise:
            incumbent = j
    since, best = len(points) - 1 - incumbent, points[incumbent]
    low = np.maximum(low, np.minimum(near_low, best - scale))
    high = np.minimum(high, np.maximum(near_high, best + scale))
    return Region(best, RADIUS, surrogate, divergence, since, low, high, features, np.asarray(~seen.any(0)))


def _region_while_all_diverge(axes: Axes, tried: int) -> Region:
    (low, high), rates = axes.ends, learning_rates(list(axes.limits))
    lowered = np.clip(-DOWN * tried * rates, low, high)
    features = Features(lowered, axes.scale, axes.levels)
    nowhere = np.zeros((1, len(features.owner)))
    nothing, quiet = fit_surrogate(nowhere, np.zeros(1)), fit_divergence(nowhere, np.zeros(1, bool))
    radius = radius_of(axes, np.full(tried, np.inf))
    return Region(lowered, radius, nothing, quiet, 0, low, high, features, np.asarray(~nowhere.any(0)))


def radius_of(axes: Axes, losses: Array) -> float:
    """Return ``Region.radius`` after trials with ``losses`` (n,). Each proposal's random move is multiplied by it."""
    if np.isfinite(without_outliers(losses)).any():
        return RADIUS
    tried, closer = len(losses), learning_rates(list(axes.limits)).any()
    return float(np.clip(RADIUS * CLOSER ** (tried if closer else -tried), CLOSEST, WIDEST))


def results(trials: Iterable[Ran], axes: Axes) -> tuple[list[Ran], Array, Array]:
    """Return the trials with a result in the order of their end, and their points (n, D) and losses (n,)."""
    found = [trial for trial in trials if trial.state in RESULTS and trial.octaves is not None]
    found.sort(key=lambda trial: (trial.ended or 0.0, trial.number))
    points = [[(trial.octaves or {}).get(path, 0.0) for path in axes.limits] for trial in found]
    losses = np.array([loss_of(trial) for trial in found])
    return found, np.array(points).reshape(len(found), len(axes.limits)), losses


def loss_of(trial: StudyTrial) -> float:
    """Return the loss of a trial: infinite if it diverged or has no loss, an estimate if it was pruned."""
    return math.inf if trial.state == "diverged" or trial.loss is None else trial.loss


def without_outliers(losses: Array) -> Array:
    """Replace losses far above the median (``OUTLIER``) by infinity, if at least 10 losses are finite."""
    finite = losses[np.isfinite(losses)]
    if len(finite) < 10:
        return losses
    median = np.median(finite)
    return np.where(losses > median + OUTLIER * (median - finite.min()), np.inf, losses)


RATES = ("lr", "learning_rate", "max_lr", "peak_lr")  # names of the global learning rate


def learning_rates(names: Sequence[str]) -> NDArray[np.bool_]:
    """Return a mask (D,) over ``names``: the learning rates to lower after a divergence. These are the global lr or,
    if it is not searched, the lrs of modules and depths."""
    keys = [name.rpartition(".") for name in names]
    everywhere = np.array([key in RATES and folder in {"", "hyperparameters"} for folder, _, key in keys])
    return everywhere if everywhere.any() else np.array([key.partition("[")[0] == "lr" for _, _, key in keys])
