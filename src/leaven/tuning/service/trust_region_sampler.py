"""leaven's trust region as an Optuna sampler: ``from leaven.tuning import TrustRegionSampler``. It needs no torch."""

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.samplers import BaseSampler, RandomSampler
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from leaven.errors import InputError
from leaven.tuning.algorithm.surrogate import FITTED, fitted_noise
from leaven.tuning.algorithm.trust_region import RADIUS, SPREADS, Array, Axes, Features, region
from leaven.tuning.service.search_loop import HUGE

STEPS = 6  # steps (typical distances of an optimum from the start) into which the range of a number is divided
FEWEST = 5  # the fewest trials to which the noise is fitted
NUMBERS = FloatDistribution | IntDistribution

Space = dict[str, BaseDistribution]


class TrustRegionSampler(BaseSampler):
    """Propose points near the best point so far, in any Optuna study of one objective.

        study = optuna.create_study(sampler=TrustRegionSampler(start={"lr": 1e-3}, seed=0))
        study.optimize(objective, n_trials=60)

    The first trial is the start. The algorithm (``algorithm/trust_region.py``) expects the optimum about one
    step away from the start in each numeric parameter. A step is a sixth of the parameter's range, but at
    least the ``step`` of its distribution. With ``log=True``, the range is measured in octaves (powers of
    two).

    - A trial counts as diverged if it failed, or if its value is infinite or beyond +-1e50. As long as all
      trials have diverged, each new trial has lower learning rates. Learning rates are the parameters named ``lr``,
      ``learning_rate``, ``max_lr`` or ``peak_lr``; without such a name, those named ``*.lr``.
    - The value of a pruned trial is its last reported value. It is limited to the range from the median of the
      completed trials to the worst of them.
    - If only some trials have a parameter, or if its range changes, its first value is the start, and later
      values are drawn at random.
    - A sampler does not know the number of trials. So, unlike :func:`leaven.tuning.search`, it uses no
      trials to measure the noise or to confirm the best point.

    A proposal depends only on the seed, the number of its trial and the other trials of the study. So with
    the same seed, a study can be resumed in another process.

    Args:
        start: values of the start, by name. Missing values are those of the study's first trial, for example
            from ``study.enqueue_trial``. Without this trial, they are the middle of the range, or the first
            choice.
        noise: standard deviation of the objective between runs of one point; by default fitted to the
            trials.
        seed: makes proposals reproducible; by default random.

    Raises:
        InputError: if an argument is invalid, if a value of ``start`` is outside its range, if a range is
            infinitely wide, or if the study has several objectives.
    """

    def __init__(
        self, start: Mapping[str, Any] | None = None, *, noise: float | None = None, seed: int | None = None
    ) -> None:
        if start is not None and not isinstance(start, Mapping):
            raise InputError(f"start = {start!r:.60}: give a dict of values by name")
        if noise is not None and not (isinstance(noise, Real) and 0 <= noise < math.inf):
            raise InputError(f"noise = {noise!r:.60}: give a finite number of at least 0")
        if seed is not None and not (isinstance(seed, Integral) and seed >= 0):
            raise InputError(f"seed = {seed!r:.60}: give an integer of at least 0")
        self._start, self._noise = dict(start or {}), noise
        self._compared = False  # whether the names in ``start`` were compared with those of a trial
        self._seed = np.random.SeedSequence(seed).entropy

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> Space:
        _check(study)
        trials = study.get_trials(deepcopy=False)
        # A trial that was pruned or has failed may not have asked for all parameters.
        states = TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL
        of_state = ([each.distributions for each in trials if each.state is state] for state in states)
        spaces = next(([space for space in spaces if space] for spaces in of_state if any(spaces)), [])
        return {
            name: limits
            for name, limits in (spaces[0] if spaces else {}).items()
            if not limits.single() and all(space.get(name) == limits for space in spaces)
        }

    def sample_relative(self, study: optuna.Study, trial: FrozenTrial, search_space: Space) -> dict[str, Any]:
        if not search_space:
            return {}
        axis_of = {name: AxisOfDistribution.of(name, limits) for name, limits in search_space.items()}
        trials = [
            each
            for each in study.get_trials(deepcopy=False)
            if all(each.distributions.get(name) == limits for name, limits in search_space.items())
        ]
        first = trials[0].params if trials else {}
        start = {name: axis.start(self._start, first) for name, axis in axis_of.items()}
        axes = Axes({name: axis.limits for name, axis in axis_of.items()}, start=start)
        result_of = _losses(trials, -1.0 if study.direction == StudyDirection.MAXIMIZE else 1.0)
        had = [{name: each.params[name] for name in axis_of} for each in trials if each.number in result_of]
        points = [axes.octaves({name: axis.at(params[name]) for name, axis in axis_of.items()}) for params in had]
        x, losses = np.array(points).reshape(-1, len(axis_of)), np.array(list(result_of.values()))
        noise = _fitted_noise(axes, x, losses) if self._noise is None else self._noise
        here, rng = region(axes, x, losses, noise), self._rng(trial)
        for spread in SPREADS:
            point = here.proposal(rng)
            drawn = axes.params(point + spread * rng.normal(size=len(point)) * (axes.levels == 0))
            proposal = {name: axis.value(drawn[name]) for name, axis in axis_of.items()}
            if proposal not in had:
                return proposal
        return {}  # sample_independent draws a random point

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        _check(study)
        rng, axis = self._rng(trial, param_name), AxisOfDistribution.of(param_name, param_distribution)
        earlier = [
            each.state
            for each in study.get_trials(deepcopy=False)
            if each.number < trial.number and (param_name in each.distributions or each.state is TrialState.RUNNING)
        ]
        if not earlier:
            return axis.value(axis.start(self._start, {}))
        if not isinstance(axis.limits, range) and set(earlier) == {TrialState.RUNNING}:
            # Trials that run in parallel with the first one begin near it.
            return axis.value(axis.start(self._start, {}) + RADIUS * rng.normal())
        return RandomSampler(int(rng.integers(2**32))).sample_independent(
            study, trial, param_name, param_distribution
        )

    def after_trial(
        self, study: optuna.Study, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None
    ) -> None:
        unknown = ", ".join(self._start.keys() - trial.params)
        first, self._compared = bool(trial.params) and not self._compared, self._compared or bool(trial.params)
        if first and unknown:
            warnings.warn(f"start has {unknown}, but the objective has {', '.join(trial.params)}", stacklevel=2)

    def _rng(self, trial: FrozenTrial, name: str = "") -> np.random.Generator:
        return np.random.default_rng([self._seed, trial.number, *name.encode()])


@dataclass(frozen=True)
class AxisOfDistribution:
    """Converts the values of an Optuna distribution to positions on an axis of the trust region, and back."""

    name: str
    distribution: BaseDistribution
    limits: tuple[float, float] | range  # the ends of the axis, in steps of ``unit``; range(n) for n choices
    unit: float = 1.0  # length of a step, in octaves if the distribution is logarithmic

    @classmethod
    def of(cls, name: str, distribution: BaseDistribution) -> "AxisOfDistribution":
        if isinstance(distribution, CategoricalDistribution):
            return cls(name, distribution, range(len(distribution.choices)))
        assert isinstance(distribution, NUMBERS)
        low, high, step = distribution.low, distribution.high, distribution.step or 0.0
        if distribution.log:
            low, high, step = math.log2(low), math.log2(high), math.log2(low + step) - math.log2(low)
        if not high - low < math.inf:
            limits = f"{distribution.low:g} to {distribution.high:g}"
            raise InputError(f"{name}: the range {limits} is too wide for a float; give a narrower one")
        unit = max((high - low) / STEPS, step) or 1.0
        return cls(name, distribution, (low / unit, high / unit), unit)

    def start(self, given: Mapping[str, Any], first: Mapping[str, Any]) -> float:
        """Return the position of the start on this axis: of the value in ``given`` (InputError if the objective does
        not allow it), else in the trial ``first``, else of the middle of the range or the first choice."""
        if self.name not in given:
            middle = 0.0 if isinstance(self.limits, range) else sum(self.limits) / 2
            return self.at(first[self.name]) if self.name in first else self.at(self.value(middle))
        try:
            found = self.at(given[self.name])
            if isinstance(self.limits, range) or self._allows(found, given[self.name]):
                return found
        except ValueError:  # not a number, or not a choice
            pass
        to = self.distribution
        allowed = f"{to.low:g} to {to.high:g}" if isinstance(to, NUMBERS) else getattr(to, "choices", ())
        steps = f" in steps of {to.step:g}" if isinstance(to, NUMBERS) and to.step else ""
        raise InputError(f"start: {self.name} = {given[self.name]!r:.60}; the objective allows {allowed}{steps}")

    def _allows(self, at: float, value: Any) -> bool:
        step, low, high = getattr(self.distribution, "step", None), self.limits[0], self.limits[-1]
        return low <= at <= high and (not step or abs(self.value(at) - float(value)) <= 1e-8 * step)

    def at(self, value: Any) -> float:
        """Return the position of a value on the axis, in steps of ``unit``. The position of a choice is its index."""
        number = float(self.distribution.to_internal_repr(value))
        return math.log2(number) / self.unit if getattr(self.distribution, "log", False) else number / self.unit

    def value(self, at: float) -> Any:
        """Return the value of the distribution that is nearest to the position ``at`` on the axis."""
        to = self.distribution
        if not isinstance(to, NUMBERS):
            return to.to_external_repr(round(at))
        number = 2.0 ** (at * self.unit) if to.log else at * self.unit
        if to.step:
            number = to.low + to.step * round((number - to.low) / to.step)
        return to.to_external_repr(min(max(number, to.low), to.high))


def _check(study: optuna.Study) -> None:
    if len(study.directions) > 1:
        raise InputError(
            f"TrustRegionSampler is for one objective, but the study has {len(study.directions)}; use another "
            "sampler, such as optuna.samplers.NSGAIISampler"
        )


def _fitted_noise(axes: Axes, points: Array, losses: Array) -> float | None:
    """Return the noise, fitted to the trials with the lowest losses, or None if fewer than ``FEWEST`` are finite."""
    lowest = np.argsort(losses, kind="stable")[: min(FITTED, int(np.isfinite(losses).sum()))]
    columns = Features(np.zeros(points.shape[1]), axes.scale, axes.levels).of(points[lowest])
    return fitted_noise(columns, losses[lowest]) if len(lowest) >= FEWEST else None


def _losses(trials: Sequence[FrozenTrial], sign: float) -> dict[int, float]:
    """Return {trial number: loss} of the trials with a result: ``sign`` x value, or infinite if a trial failed or
    diverged. The loss of a pruned trial is moved into the range from the median to the highest completed loss."""
    found = {}
    for trial in trials:
        if trial.state is TrialState.FAIL or trial.value is not None:
            value = math.inf if trial.value is None else trial.value
            found[trial.number] = sign * value if abs(value) <= HUGE else math.inf
        elif trial.state is TrialState.PRUNED and trial.intermediate_values:
            found[trial.number] = math.inf  # the last report was nan
    completed = [found[each.number] for each in trials if each.state is TrialState.COMPLETE]
    completed = [loss for loss in completed if loss < math.inf]
    for trial in trials:
        if completed and trial.state is TrialState.PRUNED and found.get(trial.number, math.inf) < math.inf:
            found[trial.number] = float(np.clip(found[trial.number], np.median(completed), max(completed)))
    return found
