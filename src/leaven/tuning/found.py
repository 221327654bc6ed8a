"""What ``search`` returns, and what it hands to trials on the way: the best so far, to compare themselves with."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from optuna.trial import FrozenTrial

from leaven.training.outcome import Rival, curve_of
from leaven.tuning import noise
from leaven.tuning.ledger import FINALIST, Run, finished, loss_of, purpose, seed
from leaven.tuning.plan import NothingFound, Plan

SURE = 2  # degrees of freedom of the noise from which on it gives trials up


@dataclass(frozen=True)
class Result:
    """A trial that has a result."""

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
    loss: float  # the mean of runs that had no part in choosing it, where there are any (judging.py)
    interval: tuple[float, float]  # of 95%, by the noise of all repeated points; infinite without such runs
    fresh: int  # how many these runs are
    noise: float | None  # between runs of one point
    stalled: bool  # it stopped before its budget was used, having gained less than the noise for some rounds
    trials: tuple[Result, ...]  # in the order of their results


def found(plan: Plan, runs: Sequence[Run], now: float, stopped: bool) -> Found:
    """What the runs come to.

    Raises:
        NothingFound: if no point ended with a loss.
    """
    said = plan.verdict(runs)
    if said is None:
        raise NothingFound(plan.nothing(runs))
    between, degrees = plan.between(runs)
    around = (-math.inf, math.inf)
    if between is not None and said.fresh:
        around = noise.interval(said.losses, between, degrees)
    searched = [run for run in runs if not plan.judges(run)]
    return Found(
        params=plan.params(runs, said.point),
        loss=said.loss,
        interval=around,
        fresh=said.fresh,
        noise=between,
        stalled=not stopped and plan.budget.room(searched, now),
        trials=tuple(_result(ended, plan.budget.label) for ended in finished(plan.study)),
    )


def _result(ended: FrozenTrial, label: str) -> Result:
    of, which = ended.user_attrs.get(FINALIST, ("", None))
    finalist = which if of == label else None
    return Result(ended.number, dict(ended.params), loss_of(ended), finalist, purpose(ended), seed(ended))


def rival(plan: Plan, runs: Sequence[Run]) -> Rival | None:
    """The best run of the search, for others to be compared with, once it is known how far seeds lie apart."""
    between, degrees = plan.between(runs)
    curves = [run.last for run in runs if run.complete and seed(run.origin) == 0 and "curve" in run.last.user_attrs]
    if between is None or degrees < SURE or not curves:
        return None
    best = min(curves, key=loss_of)
    return Rival(curve_of(best.user_attrs["curve"]), loss_of(best), between)
