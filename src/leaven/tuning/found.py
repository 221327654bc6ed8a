"""The answer of a search."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from optuna.trial import FrozenTrial

from leaven.training.outcome import Rival
from leaven.tuning import noise
from leaven.tuning.ledger import FINALIST, Run, purpose, seed
from leaven.tuning.plan import NothingFound, Plan
from leaven.tuning.trust_region import finished, loss_of


@dataclass(frozen=True)
class Trial:
    number: int
    params: dict[str, float]  # log2 multipliers
    loss: float  # infinite where it diverged; where it was stopped, what was expected of it
    finalist: int | None = None  # which of the best few it is a rerun of
    purpose: str = "search"  # search | noise | rerun
    seed: int = 0


@dataclass(frozen=True)
class Found:
    """The answer of a search."""

    params: dict[str, float]  # log2 multipliers
    loss: float  # the mean of the answer's reruns; of its only run where there are none
    interval: tuple[float, float]  # of 95%, by the noise of all repeated points; infinite where none was repeated
    noise: float | None  # between runs of one point
    stalled: bool  # it stopped before its budget was used, having gained less than the noise for some rounds
    trials: tuple[Trial, ...]  # in the order of their results


def found(plan: Plan, runs: Sequence[Run], now: float, stopped: bool) -> Found:
    """What the runs come to.

    Raises:
        NothingFound: if no point ended, or every one that was run again diverged.
    """
    whole = [run for run in runs if run.complete]
    judging = [run for run in runs if plan.judges(run) and run.finished]
    points: dict[tuple[float, ...], list[float]] = {}
    for run in judging or whole:
        points.setdefault(tuple(run.last.params.values()), []).append(loss_of(run.last))
    if not points:
        raise NothingFound("every run diverged, the start's too; start from lower learning rates")
    # A finalist that diverges in a rerun has an infinite mean.
    best = min(points, key=lambda point: statistics.fmean(points[point]))
    loss = statistics.fmean(points[best])
    if not math.isfinite(loss):
        raise NothingFound("every point that was run again diverged; start from lower learning rates")
    between, degrees = floor(runs, plan.noise)
    around = (-math.inf, math.inf) if between is None else noise.interval(points[best], between, degrees)
    searched = [run for run in runs if not plan.judges(run)]
    return Found(
        params=next(dict(run.last.params) for run in runs if tuple(run.last.params.values()) == best),
        loss=loss,
        interval=around,
        noise=between,
        stalled=not stopped and plan.budget.room(searched, now),
        trials=tuple(trial(ended, plan.budget.label) for ended in finished(plan.study)),
    )


def trial(ended: FrozenTrial, label: str) -> Trial:
    of, which = ended.user_attrs.get(FINALIST, ("", None))
    finalist = which if of == label else None
    return Trial(ended.number, dict(ended.params), loss_of(ended), finalist, purpose(ended), seed(ended))


def floor(runs: Sequence[Run], given: float | None = None) -> tuple[float | None, int]:
    """The noise between runs of one point, and its degrees of freedom; None and 0 where no point was repeated."""
    if given is not None:
        return given, noise.GIVEN
    whole = [run.last for run in runs if run.complete]
    return noise.floor((tuple(last.params.values()), seed(last), loss_of(last)) for last in whole)


def rival(runs: Sequence[Run], given: float | None) -> Rival | None:
    """The best run of the search, for others to be compared with, once it is known how far seeds lie apart."""
    between, _ = floor(runs, given)
    curves = [run.last for run in runs if run.complete and seed(run.origin) == 0 and "curve" in run.last.user_attrs]
    if between is None or not curves:
        return None
    best = min(curves, key=loss_of)
    return Rival(
        tuple((int(tokens), float(loss)) for tokens, loss in best.user_attrs["curve"]), loss_of(best), between
    )
