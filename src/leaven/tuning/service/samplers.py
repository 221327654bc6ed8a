"""The methods of a search as Optuna samplers, so that Optuna's stores and dashboard can be used."""

import warnings
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import Any

import numpy as np
import optuna
from numpy.typing import NDArray
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution
from optuna.samplers import BaseSampler
from optuna.trial import FrozenTrial

from leaven.recipe.errors import InputError
from leaven.tuning.algorithm.boxes import box
from leaven.tuning.algorithm.trust_region import START, Axes, Region
from leaven.tuning.service.trial_log import finished, loss_of, seed_of, turn

Array = NDArray[np.float64]
Distributions = dict[str, BaseDistribution]

FEWEST = 10  # trials for PED-ANOVA, whose best tenth has to be one trial at least
METHODS = ("trust-region", "random", "grid", "tpe", "cma", "gp")


def check_method(method: str) -> None:
    """Raise InputError if there is no such method."""
    if method not in METHODS:
        close = get_close_matches(str(method), METHODS, n=1, cutoff=0.5)
        hint = f"did you mean {close[0]}? " if close else ""
        raise InputError(f"method {method!s:.60}: {hint}there are {', '.join(METHODS)}")


def sampler(method: str, axes: Axes, seed: int, noise: float | None = None) -> BaseSampler:
    """Return the sampler of a method; Optuna's samplers are set up for many dimensions and few trials.

    CMA-ES is separable, since some hundreds of trials do not teach a covariance of 90 dimensions, and starts where
    the trust region does and as wide. The points of a grid are requests (``plan.py``); beyond them it is random.
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

    return SeededSampler(optunas, seed, axes, everywhere=method == "cma")


def distributions(axes: Axes) -> Distributions:
    """Return the space as Optuna distributions."""
    return {
        name: CategoricalDistribution([float(level) for level in limits])
        if isinstance(limits, range)
        else FloatDistribution(*limits)
        for name, limits in axes.limits.items()
    }


def region_of(trials: Sequence[FrozenTrial], axes: Axes, noise: float | None = None) -> Region:
    """Return the trust region after the finished trials of a study."""
    return axes.region(*_seen(trials, axes), noise, np.array([seed_of(trial) for trial in trials], np.int64))


def _seen(trials: Sequence[FrozenTrial], axes: Axes) -> tuple[Array, Array]:
    points = np.array([axes.octaves(trial.params) for trial in trials]).reshape(-1, len(axes.limits))
    return points, np.array([loss_of(trial) for trial in trials])


class TrustRegionSampler(BaseSampler):
    """The trust-region search (``algorithm/trust_region.py``)."""

    def __init__(self, axes: Axes, seed: int, noise: float | None = None) -> None:
        self._axes, self._seed, self._noise = axes, seed, noise
        self._known: tuple[list[object], Region] | None = None

    def region(self, study: optuna.Study) -> Region:
        """Return the trust region of a study.

        It is cached until another trial ends, because every free worker needs it, and it takes seconds after 2,000
        trials of 90 values.
        """
        trials = finished(study)
        results = [study.study_name, *(trial.number for trial in trials)]
        if self._known is None or self._known[0] != results:
            self._known = results, region_of(trials, self._axes, self._noise)
        return self._known[1]

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> Distributions:
        return distributions(self._axes)

    def sample_relative(self, study: optuna.Study, trial: FrozenTrial, search_space: Distributions) -> dict[str, Any]:
        rng = np.random.default_rng([self._seed, turn(trial)])
        return self._axes.values(self.region(study).proposal(rng))

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        raise AssertionError(f"{param_name} is not in the search space")


class SeededSampler(BaseSampler):
    """An Optuna sampler that is seeded for each proposal by its index in the search and samples a growing box.

    With one random stream, two commands with the same seed, or one that resumes, would repeat proposals. The store
    has the whole space; the sampler is given the box, which is a function of the finished trials. With ``everywhere``
    the box covers the whole space, symmetric around the start, for a method (CMA-ES) that stays near the start by
    itself. CMA-ES does not support choices: half of its proposals take the best trial's choices, the others random
    ones.
    """

    def __init__(self, make: Callable[[int], BaseSampler], seed: int, axes: Axes, *, everywhere: bool) -> None:
        self._make, self._seed, self._axes, self._everywhere = make, seed, axes, everywhere
        self._number, self._sampler = -1, make(seed)

    def _of(self, trial: FrozenTrial) -> BaseSampler:
        if trial.number != self._number:
            seed = np.random.SeedSequence([self._seed, turn(trial)]).generate_state(1)[0]
            self._number, self._sampler = trial.number, self._make(int(seed))
        return self._sampler

    def _box(self, study: optuna.Study) -> Distributions:
        axes = self._axes
        if self._everywhere:
            far = _farthest(axes)
            return {
                name: FloatDistribution(axes.start[name] - far * scale, axes.start[name] + far * scale)
                for name, scale in zip(axes.start, axes.scale.tolist(), strict=True)
            }
        low, high = map(axes.values, box(*_seen(finished(study), axes), axes))
        return {
            name: limits if isinstance(limits, CategoricalDistribution) else FloatDistribution(low[name], high[name])
            for name, limits in distributions(axes).items()
        }

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> Distributions:
        if self._everywhere:
            whole = distributions(self._axes).items()
            return {name: limits for name, limits in whole if isinstance(limits, FloatDistribution)}
        return self._of(trial).infer_relative_search_space(study, trial)

    def sample_relative(self, study: optuna.Study, trial: FrozenTrial, search_space: Distributions) -> dict[str, Any]:
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
        limits = self._axes.limits[name]
        return value if isinstance(limits, range) else float(np.clip(value, *limits))


def _farthest(axes: Axes) -> float:
    """Return the steps from the start to the farthest bound of the space."""
    low, high = axes.ends
    return float((np.maximum(-low, high) / axes.scale).max())


def ped_anova(points: Array, losses: Array) -> Array:
    """Return PED-ANOVA importances (D,) that sum to 1, for ``points`` (n, D) with ``losses`` (n,).

    They compare the distribution of the best tenth of the trials along each value with that of all trials
    (Watanabe et al. 2023, arXiv 2304.10255); diverged trials have an infinite loss. Optuna's other two methods need
    scikit-learn. All 0 if there are too few trials.
    """
    names = [str(i) for i in range(points.shape[1])]
    ended = losses[np.isfinite(losses)]
    if len(ended) < FEWEST or not points.any():
        return np.zeros(len(names))
    reach = float(np.abs(points).max())
    box = dict.fromkeys(names, optuna.distributions.FloatDistribution(-reach, reach))
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study()
    optuna.logging.set_verbosity(verbosity)
    study.add_trials(
        optuna.trial.create_trial(
            value=float(min(loss, ended.max())),
            params=dict(zip(names, x.tolist(), strict=True)),
            distributions={**box},
        )
        for x, loss in zip(points, losses, strict=True)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)  # until Optuna 5
        # Where the losses are all alike, the best tenth are all there are.
        warnings.filterwarnings("ignore", "Target and region quantiles select the same set of trials")
        shares = optuna.importance.get_param_importances(
            study, evaluator=optuna.importance.PedAnovaImportanceEvaluator()
        )
    return np.array([shares[name] for name in names])
