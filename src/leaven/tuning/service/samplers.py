"""The search methods that use Optuna's samplers, and PED-ANOVA, with which Optuna measures importances."""

import math
import warnings
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution
from optuna.samplers import BaseSampler
from optuna.trial import FrozenTrial

from leaven.tuning.algorithm.trust_region import RADIUS, Array, Axes, results
from leaven.tuning.service.stored_study import JOB, StoredTrial, distributions, trials_of

Distributions = dict[str, BaseDistribution]

# Samplers draw points from a part of the space, the box. An end of the box moves outwards when the best 4 trials all
# lie in the quarter of the box next to this end. With random losses, the probability of this is 1/256.
BEST, EDGE = 4, 1 / 4
LEAST = 3 * BEST  # the fewest trials before an end moves
FURTHER = 1 / 2  # an end moves by this share of the initial width of the box
FEWEST = 10  # the fewest trials for PED-ANOVA, so that the best tenth has at least one trial


def box(points: Array, losses: Array, axes: Axes) -> tuple[Array, Array]:
    """Return the box from which Optuna's sampler draws the next point: (lower ends, upper ends), each (D,).
    It starts as ``axes.box`` and grows while the best points lie at its ends. ``points`` (n, D), in octaves, and
    ``losses`` (n,) are in the order in which trials ended."""
    (low, high), (lowest, highest) = axes.box, axes.ends
    further = FURTHER * (high - low)
    if (low <= lowest).all() and (high >= highest).all():
        return low, high
    for n in range(LEAST, len(points) + 1):
        order = np.argsort(losses[:n], kind="stable")[:BEST]
        if not math.isfinite(losses[order[-1]]):
            continue
        best, edge = points[order], EDGE * (high - low)
        lower, higher = (best <= low + edge).all(0), (best >= high - edge).all(0)
        low = np.where(lower, np.maximum(low - further, lowest), low)
        high = np.where(higher, np.minimum(high + further, highest), high)
    return low, high


class SeededSampler(BaseSampler):
    """The sampler of all search methods except ``trust-region``. It wraps a sampler of Optuna.

    Optuna's sampler draws only from a box in the search space. The box grows during the search (:func:`box`). The
    distributions in Optuna's storage have the whole range of each value. Each proposal has its own random seed. So
    commands that share a search draw different proposals, and a resumed search does not repeat its proposals. Method
    ``grid`` draws random points once its grid is complete.

    Method ``cma`` (CMA-ES) is an exception: it stays near the start by itself. Its box is symmetric around the start,
    contains the space and does not grow. Proposals outside the space are clipped. The covariance matrix is diagonal,
    because a few hundred trials do not determine a full matrix. CMA-ES cannot sample a choice, so a choice gets the
    level of the best trial or, with probability 1/2, a random level.
    """

    def __init__(self, method: str, axes: Axes, seed: int) -> None:
        self._method, self._axes, self._seed = method, axes, seed
        self._everywhere = method == "cma"
        self._number, self._sampler = -1, self._optunas(0)  # replaced at the first draw

    def _optunas(self, seed: int) -> BaseSampler:
        match self._method:
            case "tpe":
                return optuna.samplers.TPESampler(seed=seed, multivariate=True, constant_liar=True)
            case "gp":
                return optuna.samplers.GPSampler(seed=seed)
            case "cma":
                with warnings.catch_warnings():
                    # Optuna 6 will remove x0 and sigma0.
                    warnings.simplefilter("ignore", FutureWarning)
                    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
                    return optuna.samplers.CmaEsSampler(
                        x0=dict(self._axes.start),
                        sigma0=RADIUS / (2 * _farthest(self._axes)),  # share of the box
                        seed=seed,
                        use_separable_cma=int((self._axes.levels == 0).sum()) > 1,
                        warn_independent_sampling=False,  # choices are left to sample_independent
                    )
            case _:
                return optuna.samplers.RandomSampler(seed=seed)

    def _of(self, trial: FrozenTrial) -> BaseSampler:
        if trial.number != self._number:
            seed = np.random.SeedSequence([self._seed, job_index(trial)]).generate_state(1)[0]
            self._number, self._sampler = trial.number, self._optunas(int(seed))
        return self._sampler

    def _results(self, study: optuna.Study) -> tuple[list[StoredTrial], Array, Array]:
        return results(trials_of(study.get_trials(deepcopy=False), self._axes), self._axes)

    def _box(self, study: optuna.Study) -> Distributions:
        axes = self._axes
        if self._everywhere:
            far = _farthest(axes)
            return {
                name: FloatDistribution(axes.start[name] - far * scale, axes.start[name] + far * scale)
                for name, scale in zip(axes.start, axes.scale.tolist(), strict=True)
            }
        _, points, losses = self._results(study)
        low, high = map(axes.params, box(points, losses, axes))
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
        if self._everywhere and isinstance(limits, CategoricalDistribution):
            trials, _, losses = self._results(study)
            rng = np.random.default_rng([self._seed, job_index(trial), list(self._axes.start).index(param_name)])
            return trials[int(np.argmin(losses))].params[param_name] if trials and rng.random() < 1 / 2 else drawn
        return self._inside(param_name, drawn)

    def _inside(self, name: str, value: float) -> float:
        limits = self._axes.limits[name]
        return value if isinstance(limits, range) else float(np.clip(value, *limits))


def job_index(trial: FrozenTrial) -> int:
    """Return N if the trial's user attribute ``job`` is ``search:N``, else the trial's number."""
    job = trial.user_attrs.get(JOB, "")
    return int(job.removeprefix("search:")) if job.startswith("search:") else trial.number


def _farthest(axes: Axes) -> float:
    """Return the largest distance from the start to a bound of a searched value, in units of the value's scale."""
    low, high = axes.ends
    return float((np.maximum(-low, high) / axes.scale).max())


def ped_anova(points: Array, losses: Array) -> Array:
    """Return the PED-ANOVA importances (D,) of the values, from trials at ``points`` (n, D) with ``losses`` (n,): how
    much a value's distribution in the best tenth differs from that in all trials (Watanabe et al. 2023, arXiv
    2304.10255). They sum to 1, or are 0 with fewer than ``FEWEST`` finite losses."""
    names = [str(i) for i in range(points.shape[1])]
    ended = losses[np.isfinite(losses)]
    if len(ended) < FEWEST or not points.any():
        return np.zeros(len(names))
    reach = float(np.abs(points).max())
    study = optuna.create_study()
    study.add_trials(
        optuna.trial.create_trial(
            value=float(min(loss, ended.max())),
            params=dict(zip(names, x.tolist(), strict=True)),
            distributions={name: FloatDistribution(-reach, reach) for name in names},
        )
        for x, loss in zip(points, losses, strict=True)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)  # until Optuna 5
        # If all losses are alike, all trials are the best tenth.
        warnings.filterwarnings("ignore", "Target and region quantiles select the same set of trials")
        shares = optuna.importance.get_param_importances(
            study, evaluator=optuna.importance.PedAnovaImportanceEvaluator()
        )
    return np.array([shares[name] for name in names])
