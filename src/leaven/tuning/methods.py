"""The methods of a search by name: our own, and Optuna's."""

import itertools
import warnings
from collections.abc import Callable
from difflib import get_close_matches
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler
from optuna.trial import FrozenTrial

from leaven.recipe.errors import InputError
from leaven.tuning.ledger import turn
from leaven.tuning.trust_region import START, Axes, TrustRegionSampler

METHODS = ("trust-region", "random", "grid", "tpe", "cma", "gp")


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
                    # Optuna 6 is to drop where it starts and how wide. The middle of the box need not be our start.
                    warnings.simplefilter("ignore", FutureWarning)
                    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
                    return optuna.samplers.CmaEsSampler(
                        x0=dict(axes.start),
                        sigma0=START / float((axes.high - axes.low).max()),  # as a part of the box
                        seed=seed,
                        use_separable_cma=len(axes.start) > 1,
                    )
            case _:
                return optuna.samplers.RandomSampler(seed=seed)

    return _Numbered(optunas, seed)


class _Numbered(BaseSampler):
    """One of Optuna's samplers, seeded anew for each proposal.

    They draw from a stream of their own: two commands with one seed, or one that goes on, would propose the same.
    """

    def __init__(self, make: Callable[[int], BaseSampler], seed: int) -> None:
        self._make, self._seed = make, seed
        self._number, self._sampler = -1, make(seed)

    def _of(self, trial: FrozenTrial) -> BaseSampler:
        if trial.number != self._number:
            seed = np.random.SeedSequence([self._seed, turn(trial)]).generate_state(1)[0]
            self._number, self._sampler = trial.number, self._make(int(seed))
        return self._sampler

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return self._of(trial).infer_relative_search_space(study, trial)

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        return self._of(trial).sample_relative(study, trial, search_space)

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        return self._of(trial).sample_independent(study, trial, param_name, param_distribution)


def grid(axes: Axes, trials: int) -> list[dict[str, float]]:
    """The points of the finest grid that so many trials can do, nearest to the start first.

    Raises:
        InputError: if two points along each dimension are too many already.
    """
    dimensions = len(axes.start)
    if 2**dimensions > trials:
        raise InputError(
            f"a grid over {dimensions} values has at least 2^{dimensions} points, and there are {trials} trials "
            "for it; search fewer values, or with another method"
        )
    levels = max(k for k in range(2, trials + 1) if k**dimensions <= trials)
    points = itertools.product(*np.linspace(axes.low, axes.high, levels).T)
    return [axes.values(np.array(x)) for x in sorted(points, key=lambda x: float(np.sum(np.square(x))))]
