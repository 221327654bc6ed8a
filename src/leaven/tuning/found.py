"""What ``search`` returns, and what it hands to trials on the way: the best so far, to compare themselves with."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from optuna.distributions import CategoricalDistribution
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
    loss: float  # the mean of runs that had no part in choosing it, where there are any (confirmation.py)
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
    said = plan.confirmation(runs)
    if said is None:
        raise NothingFound(plan.nothing(runs))
    between, degrees = plan.between(runs)
    around = (-math.inf, math.inf)
    if between is not None and said.fresh:
        around = noise.interval(said.losses, between, degrees)
    searched = [run for run in runs if not plan.is_rerun(run)]
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


def rival(plan: Plan, runs: Sequence[Run], point: Mapping[str, float]) -> Rival | None:
    """The best run of the search, for a run at a point to be compared with, once it is known how far seeds lie apart.

    Curves of other choices (of a schedule, say) have another course, and say nothing of it.
    """
    choices = [
        name for name, limits in plan.axes.distributions.items() if isinstance(limits, CategoricalDistribution)
    ]
    between, degrees = plan.between(runs)
    alike = (run for run in runs if all(run.origin.params.get(name) == point[name] for name in choices))
    curves = [run.last for run in alike if run.complete and seed(run.origin) == 0 and "curve" in run.last.user_attrs]
    if between is None or degrees < SURE or not curves:
        return None
    best = min(curves, key=loss_of)
    return Rival(curve_of(best.user_attrs["curve"]), loss_of(best), between)
