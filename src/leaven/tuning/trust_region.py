"""Trust-region random search: Gaussian steps in octaves around the best point so far.

Per-module landscapes are nearly convex but bounded by cliffs of divergence, on which random search over a box and
Gaussian processes do badly and neighbours of the incumbent do well (Mlodozeniec et al. 2025, arXiv 2512.22382). The
radius grows with a success and shrinks when a round of failures says that the region is too wide. Both radius and
incumbent are functions of the finished trials in their order; a proposal is one of those, the seed and its number.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, FloatDistribution
from optuna.samplers import BaseSampler
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from leaven.tuning.space import Space

START, WIDEST, NARROWEST = 0.7, 2.0, 0.2  # octaves, standard deviation of a step
GROW, SHRINK = 1.5, 0.7
CHANGED = 0.5  # chance of each coordinate to move at all


@dataclass(frozen=True)
class Region:
    """Where to look next: around ``values`` (by path), steps of ``radius`` octaves."""

    values: Mapping[str, float]
    radius: float


def region(centre: Mapping[str, float], finished: Sequence[tuple[Mapping[str, float], float]]) -> Region:
    """The region after the finished trials, given as (values, loss) in the order in which they ended."""
    best, values, radius, failures = float("inf"), dict(centre), START, 0
    for tried, loss in finished:
        if loss < best:
            # The first result is where the search starts from: it says nothing about the radius.
            radius = min(radius * GROW, WIDEST) if best < float("inf") else radius
            best, values, failures = loss, dict(tried), 0
        else:
            failures += 1
            if failures == max(len(centre), 4):
                radius, failures = max(radius * SHRINK, NARROWEST), 0
    return Region(values, radius)


class TrustRegionSampler(BaseSampler):
    """The search as an Optuna sampler, so that any Optuna store and dashboard takes its studies."""

    def __init__(self, space: Space, seed: int) -> None:
        self._space = space
        self._seed = seed

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return {d.path: FloatDistribution(d.low, d.high, log=True) for d in self._space.dimensions}

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        ended = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        ended = sorted(ended, key=lambda done: (done.datetime_complete, done.number))
        around = region(self._space.centre, [(done.params, float(done.value or 0.0)) for done in ended])
        rng = np.random.default_rng([self._seed, trial.number])
        steps = rng.normal(0.0, around.radius, len(self._space.dimensions))
        moves = rng.random(len(steps)) < CHANGED
        moves[rng.integers(len(steps))] = True
        return {
            d.path: float(np.clip(around.values[d.path] * 2 ** (step if moves_it else 0.0), d.low, d.high))
            for d, step, moves_it in zip(self._space.dimensions, steps, moves, strict=True)
        }

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        raise AssertionError(f"{param_name} is not in the search space")


def sampler(method: str, space: Space, seed: int) -> optuna.samplers.BaseSampler:
    """The sampler of a method's name: ``trust-region``, ``random`` or ``tpe``."""
    match method:
        case "random":
            return optuna.samplers.RandomSampler(seed=seed)
        case "tpe":
            return optuna.samplers.TPESampler(seed=seed, multivariate=True, constant_liar=True)
        case _:
            return TrustRegionSampler(space, seed)
