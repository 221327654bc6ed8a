"""A search over any Python function: `from leaven.tuning import search`. Needs no torch."""

import math
import statistics
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import optuna
from optuna.distributions import FloatDistribution
from optuna.storages import BaseStorage, JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from leaven.recipe.errors import InputError
from leaven.tuning.methods import check_method, grid, sampler
from leaven.tuning.noise import interval, pooled
from leaven.tuning.trust_region import DIVERGED, Axes, finished, loss_of, region_of

Objective = Callable[[dict[str, float]], float]

REPEATS = 3  # of the start, where the noise is not given
FINALISTS, RERUNS = 3, 2  # the best few are judged by runs of their own: the lowest of many noisy losses was lucky
FINALIST = "finalist"  # an attribute of the trials that judge the best few: of how many trials, and which it is
GIVEN = 10**6  # degrees of freedom of a noise that is known
NEVER_ENDED = 1e6  # what a divergence scores before there is any finite loss


@dataclass(frozen=True)
class Trial:
    number: int
    params: dict[str, float]  # log2 multipliers
    loss: float  # infinite where it diverged
    finalist: int | None  # which of the best few it is a rerun of


@dataclass(frozen=True)
class Found:
    """The answer of a search."""

    params: dict[str, float]  # log2 multipliers
    loss: float  # the mean of the answer's reruns; of its only run where there are none
    interval: tuple[float, float]  # of 95%, by the noise of all repeated points; infinite where none was repeated
    noise: float | None  # between runs of one point
    stalled: bool  # it stopped before ``trials``, having gained less than the noise for some rounds
    trials: tuple[Trial, ...]  # in the order of their results


def search(  # noqa: PLR0917 - in the order in which one thinks of them
    objective: Objective,
    space: Mapping[str, tuple[float, float]],
    start: Mapping[str, float] | None = None,
    trials: int = 100,
    method: str = "trust-region",
    seed: int = 0,
    workers: int = 1,
    *,
    noise: float | None = None,
    stop_at_noise: bool = True,
    storage: BaseStorage | Path | str | None = None,
    name: str = "leaven",
) -> Found:
    """Search for the lowest value of ``objective`` in ``trials`` runs of it, reruns included.

        found = search(lambda x: (x["lr"] - 1) ** 2, {"lr": (-3, 3)}, trials=30)
        found.params["lr"], found.interval

    The first runs are at the start, three of them to measure the noise where it is not given. The last are reruns
    of the best few, which alone decide between them. Optuna's pruning and dashboards see an ordinary study.

    Args:
        objective: takes log2 multipliers by name and gives a loss; infinite or nan is a divergence. With
            ``workers`` it is called from so many threads.
        space: the lowest and the highest log2 multiplier, by name.
        start: log2 multipliers that are right as far as one knows; 0 for those that are not given.
        method: one of ``leaven.tuning.methods.METHODS``.
        noise: the standard deviation of the loss between runs of one point, if it is known.
        stop_at_noise: stop a trust-region search when some rounds have gained less than the noise.
        storage: an Optuna storage, its URL, or the file of a journal; in memory without. The same call goes on with
            what is there; one process at a time, for a trial that it leaves running is not told from a lost one.
        name: of the study in its storage.

    Raises:
        InputError: if the space, the start, the method or the number of trials is wrong, the stored study is of
            another space, or every run diverged.
    """
    check_method(method)
    axes = _axes(space, start or {})
    if trials < 1 or workers < 1:
        raise InputError(f"trials = {trials} and workers = {workers}: at least 1 of each")
    judged = _judged(trials)
    points = grid(axes, trials - judged) if method == "grid" else []
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(
        study_name=name,
        storage=_storage(storage),
        sampler=sampler(method, axes, seed, noise),
        load_if_exists=True,
    )
    _same(study, axes, method)
    if not study.get_trials(deepcopy=False):
        repeats = REPEATS if noise is None else 1
        for point in points or [dict(axes.start)] * min(repeats, trials):
            study.enqueue_trial(point)
    running = _Running(study, axes, objective, workers)

    def stalled() -> bool:
        return method == "trust-region" and stop_at_noise and region_of(study, axes, noise).stalled()

    if not any(trial.user_attrs.get(FINALIST, [0])[0] == trials for trial in study.get_trials(deepcopy=False)):
        running.until(trials - judged, stalled)
        for which, params in enumerate(_finalists(study, axes, method, noise)[: judged // RERUNS]):
            for _ in range(RERUNS):
                study.enqueue_trial(params, user_attrs={FINALIST: [trials, which]})
    waiting = study.get_trials(deepcopy=False, states=(TrialState.WAITING,))
    running.until(len(finished(study)) + len(waiting), lambda: False)
    return _found(study, trials, noise)


def _axes(space: Mapping[str, tuple[float, float]], start: Mapping[str, float]) -> Axes:
    if not space:
        raise InputError("the space is empty; give it at least one name with its lowest and highest log2 multiplier")
    for name, (low, high) in space.items():
        if not (math.isfinite(low) and math.isfinite(high) and low < high):
            raise InputError(f"space of {name}: {low} to {high}; the lowest first, both finite, and apart")
    for name in start:
        if name not in space:
            raise InputError(f"start of {name}: it is not in the space, which has {', '.join(space)}")
    begin = {name: float(start.get(name, 0.0)) for name in space}
    for name, (low, high) in space.items():
        if not low <= begin[name] <= high:
            raise InputError(f"start of {name}: {begin[name]:g} is outside its space, {low:g} to {high:g}")
    return Axes(begin, {name: FloatDistribution(float(low), float(high)) for name, (low, high) in space.items()})


def _storage(storage: BaseStorage | Path | str | None) -> BaseStorage | str | None:
    if isinstance(storage, Path) or (isinstance(storage, str) and "://" not in storage):
        return JournalStorage(JournalFileBackend(str(storage)))
    return storage


def _same(study: optuna.Study, axes: Axes, method: str) -> None:
    """Refuse a stored study of something else; say what a new one is of."""
    limits = {name: [d.low, d.high, axes.start[name]] for name, d in axes.distributions.items()}
    for key, here in {"method": method, "space": limits}.items():
        there = study.user_attrs.get(key)
        if there is None:
            study.set_user_attr(key, here)
        elif there != here:
            difference = f"{there} there, {here} here"
            if isinstance(there, dict):
                names = [n for n in {**there, **limits} if there.get(n) != limits.get(n)]
                difference = "; ".join(f"{n} {there.get(n)} there, {limits.get(n)} here" for n in names)
            raise InputError(
                f"the stored study {study.study_name} is of another {key}: {difference}; give it another name"
            )


def _judged(trials: int) -> int:
    """How many of the trials are reruns of the best few: at most a quarter."""
    return min(FINALISTS, trials // 4 // RERUNS) * RERUNS


class _Running:
    """Runs trials in threads, and tells the study their losses in the order in which they end."""

    def __init__(self, study: optuna.Study, axes: Axes, objective: Objective, workers: int) -> None:
        self._study, self._axes, self._objective, self._workers = study, axes, objective, workers

    def until(self, ended: int, enough: Callable[[], bool]) -> None:
        """Run until so many trials have ended, or until it is ``enough``."""
        pending: dict[Future[float], optuna.Trial] = {}
        with ThreadPoolExecutor(self._workers) as pool:
            while True:
                stopping = enough()
                done = len(finished(self._study))
                while not stopping and len(pending) < self._workers and done + len(pending) < ended:
                    trial = self._study.ask(dict(self._axes.distributions))
                    pending[pool.submit(self._objective, dict(trial.params))] = trial
                if not pending:
                    return
                for future in wait(pending, return_when=FIRST_COMPLETED).done:
                    self._tell(pending.pop(future), future.result())

    def _tell(self, trial: optuna.Trial, loss: float) -> None:
        if not math.isfinite(loss):
            # Optuna's methods want a number: the worst that did not diverge, so as not to drown the others.
            losses = [loss_of(other) for other in finished(self._study)]
            trial.set_user_attr(DIVERGED, True)
            loss = max(filter(math.isfinite, losses), default=NEVER_ENDED)
        self._study.tell(trial, loss)


def _finalists(study: optuna.Study, axes: Axes, method: str, noise: float | None) -> list[dict[str, float]]:
    """Points to choose the answer from, the likeliest first.

    Of a trust region they are what the bowl promises, and then the trials in the order of what it holds of them.
    Other methods have only the losses.
    """
    trials = [trial for trial in finished(study) if math.isfinite(loss_of(trial))]
    points = {tuple(trial.params.items()): trial.params for trial in sorted(trials, key=loss_of)}
    if not points:
        raise InputError("every run diverged, the start's too; start from lower learning rates")
    if method != "trust-region":
        return list(points.values())
    now = region_of(study, axes, noise)
    believed = now.bowl.value(np.array([axes.octaves(params) for params in points.values()]))
    ranked = [params for _, params in sorted(zip(believed, points.values(), strict=True), key=lambda pair: pair[0])]
    return [axes.values(now.promise), axes.values(now.incumbent), *ranked]


def _found(study: optuna.Study, asked: int, noise: float | None) -> Found:
    trials = tuple(
        Trial(trial.number, dict(trial.params), loss_of(trial), which if of == asked else None)
        for trial in finished(study)
        for of, which in [trial.user_attrs.get(FINALIST, (0, 0))]
    )
    stalled = sum(trial.finalist is None for trial in trials) < asked - _judged(asked)
    runs: dict[tuple[float, ...], list[float]] = {}
    judged: dict[tuple[float, ...], list[float]] = {}
    for trial in trials:
        point = tuple(trial.params.values())
        runs.setdefault(point, []).append(trial.loss)
        if trial.finalist is not None:
            judged.setdefault(point, []).append(trial.loss)
    # A finalist that diverges in a rerun has an infinite mean, and one that was never rerun has its only loss.
    best = min(judged or runs, key=lambda point: statistics.fmean((judged or runs)[point]))
    values = (judged or runs)[best]
    if not math.isfinite(statistics.fmean(values)):
        raise InputError("every point that was run again diverged; start from lower learning rates")
    measured, degrees = pooled([loss for loss in losses if math.isfinite(loss)] for losses in runs.values())
    floor, degrees = (measured, degrees) if noise is None else (noise, GIVEN)
    around = (-math.inf, math.inf) if floor is None else interval(values, floor, degrees)
    params = next(trial.params for trial in trials if tuple(trial.params.values()) == best)
    return Found(params, statistics.fmean(values), around, floor, stalled, trials)
