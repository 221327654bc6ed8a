"""The methods of a search by name: our own, and Optuna's."""

import itertools
import math
import warnings
from collections.abc import Callable
from difflib import get_close_matches
from typing import Any

import numpy as np
import optuna
from numpy.typing import NDArray
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution
from optuna.samplers import BaseSampler
from optuna.trial import FrozenTrial

from leaven.recipe.errors import InputError
from leaven.tuning.ledger import finished, loss_of, turn
from leaven.tuning.trust_region import START, Axes, TrustRegionSampler

Array = NDArray[np.float64]

METHODS = ("trust-region", "random", "grid", "tpe", "cma", "gp")

BEST, EDGE = 4, 1 / 4  # where so many of the best trials lie in this part of the box at one end, it is extended
LEAST = 3 * BEST  # trials: of fewer the best are anybody
FURTHER = 1 / 2  # of its first width, by which an end moves


def check_method(method: str) -> None:
    """Refuse a method that there is not."""
    if method not in METHODS:
        close = get_close_matches(str(method), METHODS, n=1, cutoff=0.5)
        hint = f"did you mean {close[0]}? " if close else ""
        raise InputError(f"method {method!s:.60}: {hint}there are {', '.join(METHODS)}")


def sampler(method: str, axes: Axes, seed: int, noise: float | None = None) -> BaseSampler:
    """The sampler of a method, Optuna's with what suits many dimensions and few trials.

    CMA-ES is separable, since some hundreds of trials do not teach a covariance of 90 dimensions, and starts where
    the trust region does and as wide. The points of a grid are jobs (``plan.py``); what is asked for beyond them is
    random.
    """
    if method == "trust-region":
        return TrustRegionSampler(axes, seed, noise)

    def optunas(seed: int) -> BaseSampler:
        match method:
            case "tpe":
                return optuna.samplers.TPESampler(seed=seed, multivariate=True, constant_liar=True)
            case "gp":
                return optuna.samplers.GPSampler(seed=seed)
            case "cma":
                with warnings.catch_warnings():
                    # Optuna 6 is to drop where it starts and how wide.
                    warnings.simplefilter("ignore", FutureWarning)
                    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
                    return optuna.samplers.CmaEsSampler(
                        x0=dict(axes.start),
                        sigma0=START / (2 * _farthest(axes)),  # as a part of the box
                        seed=seed,
                        use_separable_cma=int((axes.levels == 0).sum()) > 1,
                    )
            case _:
                return optuna.samplers.RandomSampler(seed=seed)

    return _SeededAnew(optunas, seed, axes, everywhere=method == "cma")


class _SeededAnew(BaseSampler):
    """One of Optuna's samplers, seeded anew for each proposal, in a box that grows while the best lie at its end.

    They draw from a stream of their own: two commands with one seed, or one that goes on, would propose the same.
    The store has the whole space, and the sampler is given the box, a function of the trials that have ended. With
    ``everywhere`` it is as wide as the whole space from the beginning, as many steps to every side, for a method that
    stays near the start by itself, and knows no choices: these are the best trial's in one of two proposals, and else
    random.
    """

    def __init__(self, make: Callable[[int], BaseSampler], seed: int, axes: Axes, *, everywhere: bool) -> None:
        self._make, self._seed, self._axes, self._everywhere = make, seed, axes, everywhere
        self._number, self._sampler = -1, make(seed)

    def _of(self, trial: FrozenTrial) -> BaseSampler:
        if trial.number != self._number:
            seed = np.random.SeedSequence([self._seed, turn(trial)]).generate_state(1)[0]
            self._number, self._sampler = trial.number, self._make(int(seed))
        return self._sampler

    def _box(self, study: optuna.Study) -> dict[str, BaseDistribution]:
        axes = self._axes
        if self._everywhere:
            far = _farthest(axes)
            return {
                name: FloatDistribution(axes.start[name] - far * scale, axes.start[name] + far * scale)
                for name, scale in zip(axes.start, axes.scale.tolist(), strict=True)
            }
        trials = finished(study)
        points = np.array([axes.octaves(trial.params) for trial in trials]).reshape(-1, len(axes.start))
        ends = box(points, np.array([loss_of(trial) for trial in trials]), axes)
        low, high = axes.values(ends[0]), axes.values(ends[1])
        return {
            name: limits if isinstance(limits, CategoricalDistribution) else FloatDistribution(low[name], high[name])
            for name, limits in axes.distributions.items()
        }

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        if self._everywhere:
            whole = self._axes.distributions.items()
            return {name: limits for name, limits in whole if isinstance(limits, FloatDistribution)}
        return self._of(trial).infer_relative_search_space(study, trial)

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        limits = self._box(study)
        drawn = self._of(trial).sample_relative(study, trial, {name: limits[name] for name in search_space})
        return {name: self._inside(name, value) for name, value in drawn.items()}

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        limits = param_distribution if self._everywhere else self._box(study)[param_name]
        drawn = self._of(trial).sample_independent(study, trial, param_name, limits)
        if self._everywhere and isinstance(limits, CategoricalDistribution) and (trials := finished(study)):
            rng = np.random.default_rng([self._seed, turn(trial), list(self._axes.start).index(param_name)])
            return min(trials, key=loss_of).params[param_name] if rng.random() < 1 / 2 else drawn
        return self._inside(param_name, drawn)

    def _inside(self, name: str, value: float) -> float:
        limits = self._axes.distributions[name]
        return (
            value if isinstance(limits, CategoricalDistribution) else float(np.clip(value, limits.low, limits.high))
        )


def _farthest(axes: Axes) -> float:
    """Steps from the start to the farthest end of the space."""
    return float((np.maximum(-axes.low, axes.high) / axes.scale).max())


def box(points: Array, losses: Array, axes: Axes) -> tuple[Array, Array]:
    """The part of the space that a method samples after trials at ``points`` (n, D), in the order of their results.

    It begins ``near`` the start. An end moves out where the ``BEST`` trials all lie in the outer part of the box
    there: by chance one end in 256 has them. Returns the lowest and the highest octaves, (D,) each.
    """
    low, high = axes.box
    further = FURTHER * (high - low)
    if (low <= axes.low).all() and (high >= axes.high).all():
        return low, high
    for n in range(LEAST, len(points) + 1):
        order = np.argsort(losses[:n], kind="stable")[:BEST]
        if not math.isfinite(losses[order[-1]]):
            continue
        best, edge = points[order], EDGE * (high - low)
        lower, higher = (best <= low + edge).all(0), (best >= high - edge).all(0)
        low = np.where(lower, np.maximum(low - further, axes.low), low)
        high = np.where(higher, np.minimum(high + further, axes.high), high)
    return low, high


def grid(axes: Axes, trials: int) -> list[dict[str, float]]:
    """The points of the finest grid that so many trials can do, nearest to the start first.

    Raises:
        InputError: if two points along each dimension are too many already.
    """
    numbers = int((axes.levels == 0).sum())
    chosen = math.prod(int(levels) for levels in axes.levels if levels)
    if 2**numbers * chosen > trials:
        least = f"2^{numbers}" if chosen == 1 else f"{2**numbers * chosen}"
        raise InputError(
            f"a grid over {len(axes.start)} values has at least {least} points, and there are {trials} trials "
            "for it; search fewer values, or with another method"
        )
    fine = max(k for k in range(2, trials + 1) if k**numbers * chosen <= trials) if numbers else 2
    low, high = axes.box
    counts = [int(levels) or fine for levels in axes.levels]
    lines = [np.linspace(*ends) for ends in zip(low, high, counts, strict=True)]
    points = itertools.product(*lines)
    return [axes.values(np.array(x)) for x in sorted(points, key=lambda x: float(np.sum(np.square(x))))]
