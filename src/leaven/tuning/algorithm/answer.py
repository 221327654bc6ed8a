"""The answer of a search: the best point and its interval, how flat the loss is around it, and which values matter.

The answer is a pure function of the trials. Points are compared by a surrogate fitted to all trials, which predicts
losses with standard deviations. Only runs with fresh seeds (seeds that the search did not use) choose the best point
and give its interval. The noise floor is pooled over all points that were run with several seeds.

Two points are called equal only with good evidence. Take a point P and a reference point Q. If P was not run, P is
*within the noise* of Q if the predicted loss of P plus one standard deviation (two if many multipliers move) exceeds
the loss of Q by less than the noise floor. If P was run, its measured and its predicted loss must both satisfy this.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from leaven.recipe.recipe import short_path
from leaven.recipe.units import format_number
from leaven.tuning.algorithm import divergence
from leaven.tuning.algorithm.confirmation import (
    ALONE,
    RERUNS,
    Confirmation,
    Losses,
    Point,
    changes,
    confirm,
    gain,
    interval_of_mean,
    noise_between_seeds,
)
from leaven.tuning.algorithm.outlook import best_pair, further_gain
from leaven.tuning.algorithm.prior import EarlierTrials
from leaven.tuning.algorithm.surrogate import FITTED, fitted_noise
from leaven.tuning.algorithm.trust_region import (
    DOWN,
    RISK,
    Axes,
    Features,
    Region,
    learning_rates,
    region,
    without_outliers,
)
from leaven.tuning.study_document import Answer, Best, Coordinate, Dimension, Outlook, SlicePoint, StudyTrial

Array = NDArray[np.float64]

MEASURED = 2  # degrees of freedom of a noise that is known well enough to judge a gain
SURE = 1.0  # standard deviations added to a predicted loss before points are called equal
TOGETHER = 2.0  # the same if many multipliers move, because the errors of the surrogate add up
SLICE = 21  # number of points of a slice
WIDE, FINE = 2.0, 1 / 32  # steps: half the width in which the flat region is searched, and the resolution
BEYOND = 0.5  # steps by which a slice extends beyond the values that were tried
ELSEWHERE = "lower the recipe's learning rate, which is not searched, to half or a quarter"


def answer(
    trials: Sequence[StudyTrial],
    dimensions: Sequence[Dimension],
    noise: float | None = None,
    *,
    over: bool = False,
    by_surrogate: bool = True,
    optunas: Callable[[Array, Array], Array] = lambda points, losses: np.zeros(points.shape[1]),
    earlier: EarlierTrials | None = None,
) -> Answer:
    """Return the answer of a search from its ``trials``.

    The importance of a value is computed at the best point. Only this value is changed, to each setting that the
    trials tried, and the standard deviation of the predicted losses is taken. The importance is this standard
    deviation divided by the sum of those of all values. This is first-order fANOVA with the surrogate in place of a
    random forest. Optuna's importance (PED-ANOVA) is also reported. If the number of values is close to the number of
    trials, Optuna's hardly correlates with the true importance (docs/concepts/search.md).

    Args:
        noise: standard deviation of the loss between runs of one point; by default measured from the trials.
        over: whether the search has ended. Before its end, the answer has a best point only if points have been run
            again with fresh seeds.
        by_surrogate: how points without fresh runs are compared: by the surrogate's predictions if true, by their
            losses if false.
        optunas: a function that returns Optuna's importances (D,) for points (n, D) and losses (n,).
        earlier: trials of an earlier search that informed this one.
    """
    axes = Axes.of(dimensions, earlier)
    seen, paths = _look(trials, axes, noise), list(axes.limits)
    if not np.isfinite(seen.losses).any():
        advice = advice_when_all_diverged(trials, dimensions) if len(seen.trials) else ""
        return Answer(noise_floor=seen.noise, noise_runs=seen.degrees, advice=advice)
    over = over or any(trial.purpose == "rerun" for trial in seen.trials)
    confirmed = _confirmed(seen, paths, by_surrogate=by_surrogate) if over else None
    point = seen.region.predicted if confirmed is None else np.array(confirmed.point)
    fewer = _fewest(seen, point)
    best, fewest, near = None, None, fewer
    if confirmed is not None:
        best = _best(seen, confirmed.point, confirmed.losses, confirmed.fresh)
        fewest, near = _fewest_measured(seen, confirmed.point, best)
    return Answer(
        best=best,
        octaves=dict(zip(paths, point.tolist(), strict=True)),
        noise_floor=seen.noise,
        noise_runs=seen.degrees,
        coordinates=_coordinates(seen, dimensions, point, optunas(seen.points, seen.losses)),
        fewest=fewest,
        fewest_octaves=dict(zip(paths, near.tolist(), strict=True)),
        fewest_cost=_cost(seen, near, point)[0],
        idle=tuple(path for path, x in zip(paths, fewer, strict=True) if x == 0) if fewer.any() else (),
        gain=confirmed.gain if confirmed is not None else None,
        informed=seen.region.surrogate.informed if axes.expected or axes.earlier else None,
        outlook=_outlook(seen, axes, point) if confirmed is not None and by_surrogate else None,
        dimensions=tuple(dimensions),
    )


def _outlook(seen: "_Seen", axes: Axes, point: Array) -> Outlook:
    searched = np.array([trial.purpose == "search" for trial in seen.trials])
    gain = further_gain(seen.region, axes, seen.points, seen.losses, searched=searched, best=point)
    count, paths, flops = len(seen.trials), list(axes.limits), sum(trial.flops for trial in seen.trials)
    pair = best_pair(seen.region, seen.points, point, seen.floor)
    if pair is None or not np.isfinite(seen.losses[~seen.points.any(1)]).any():  # nothing is gained over a divergence
        return Outlook(count, flops, gain)
    return Outlook(count, flops, gain, (paths[pair[0]], paths[pair[1]]), pair[2])


def best_point(
    trials: Sequence[StudyTrial], axes: Axes, noise: float | None, *, by_surrogate: bool
) -> Confirmation | None:
    """Return the best point of a search that has ended, or None if no trial finished. The arguments are those of
    :func:`answer`."""
    return _confirmed(_look(trials, axes, noise), list(axes.limits), by_surrogate=by_surrogate)


def in_doubt(trials: Sequence[StudyTrial], axes: Axes, noise: float | None) -> bool:
    """Return whether the predicted gain over the start is too small to be accepted without confirmation."""
    seen = _look(trials, axes, noise)
    start = seen.predicted.get((0.0,) * len(axes.limits), math.inf)
    return start - min(seen.predicted.values(), default=math.inf) <= ALONE * seen.floor


def _confirmed(seen: "_Seen", paths: Sequence[str], *, by_surrogate: bool) -> Confirmation | None:
    if not by_surrogate or not np.isfinite(seen.losses).any():
        return confirm(seen.trials, paths, seen.noise)
    return confirm(seen.trials, paths, None if seen.noise is None else seen.floor, seen.predicted)


@dataclass(frozen=True)
class _Seen:
    """The trials with a result, in the order of their results, and their trust region."""

    trials: tuple[StudyTrial, ...]
    points: Array  # (n, D), octaves
    losses: Array  # (n,), infinite for a divergence
    region: Region
    noise: float | None  # nats, between runs of one point; None if unknown
    degrees: int  # degrees of freedom of the noise
    floor: float  # nats; a difference of losses counts if it is larger

    @cached_property
    def predicted(self) -> dict[Point, float]:
        """The predicted losses of the points that were run, up to a constant. Outliers and diverged points are left
        out.

        The surrogate's prediction for a point is corrected by the residuals of the runs at this point: the part of
        their mean that is not noise between seeds is added.
        """
        ended = np.isfinite(without_outliers(self.losses))
        points = self.points[ended]
        fitted = self.region.belief(points)
        rest = self.losses[ended] - fitted
        own = 1.0 if self.noise is None else 1 - min(self.floor / self.region.surrogate.noise, 1.0) ** 2
        by_point: dict[Point, list[float]] = {}
        for x, loss in zip(points, fitted + own * (rest - rest.mean()), strict=True):
            by_point.setdefault(tuple(x.tolist()), []).append(float(loss))
        return {x: statistics.fmean(found) for x, found in by_point.items()}


def _look(trials: Sequence[StudyTrial], axes: Axes, noise: float | None) -> _Seen:
    paths = list(axes.limits)
    ended = [trial for trial in trials if trial.state in {"complete", "diverged", "stopped"} and trial.octaves]
    ended.sort(key=lambda trial: (trial.ended or 0.0, trial.number))
    losses = [math.inf if trial.state == "diverged" or trial.loss is None else trial.loss for trial in ended]
    measured, degrees = noise_between_seeds(ended, paths, noise)
    points = np.array([[(trial.octaves or {}).get(path, 0.0) for path in paths] for trial in ended])
    points, results = points.reshape(-1, len(paths)), np.array(losses)
    columns = Features(np.zeros(len(paths)), axes.scale, axes.levels).of(points)
    floor = _floor(measured, degrees, columns, results)
    return _Seen(tuple(ended), points, results, region(axes, points, results, floor), measured, degrees, floor)


def _floor(noise: float | None, degrees: int, columns: Array, losses: Array) -> float:
    """Return the noise above which a difference of losses counts.

    With at least ``MEASURED`` degrees of freedom, it is the measured noise. With fewer, the measured noise may be far
    too small. Then a noise is fitted to the losses, and the result is the measured noise or the geometric mean of
    the measured and the fitted noise, whichever is larger. Without a measurement, the result is the fitted noise.
    """
    ended = np.isfinite(without_outliers(losses))
    if noise == 0 or degrees >= MEASURED or not 0 < ended.sum() <= FITTED:
        return noise or 0.0
    fitted = fitted_noise(columns[ended], losses[ended])
    return fitted if noise is None else max(noise, math.sqrt(noise * fitted))


def _rerun(seen: _Seen) -> dict[Point, Losses]:
    """Return the losses by seed of every point that has ``RERUNS`` or more fresh runs, if none of these diverged.

    All runs of the start count as fresh, because the start was not chosen by its losses.
    """
    found: dict[Point, dict[int, float]] = {}
    for run, x, loss in zip(seen.trials, seen.points, seen.losses, strict=True):
        if run.state != "stopped" and (run.purpose == "rerun" or not x.any()):
            found.setdefault(tuple(x.tolist()), {})[run.seed] = float(loss)
    return {x: losses for x, losses in found.items() if len(losses) >= RERUNS and math.isfinite(sum(losses.values()))}


def _fewest_measured(seen: _Seen, point: Point, best: Best) -> tuple[Best, Array]:
    """Return the rerun point that equals the best ``point`` within the noise and changes the fewest values.

    It is returned as a Best and in octaves (D,). It may be the best point itself.
    """
    rerun = _rerun(seen)
    mine = rerun.get(point, {0: best.loss})  # its run during the search, if it has no other
    equal = [
        x
        for x, losses in rerun.items()
        if gain(losses, mine) <= seen.floor and _cost(seen, np.array(x), np.array(point))[0] <= seen.floor
    ]
    nearest = min([point, *equal], key=changes)
    if nearest == point:
        return best, np.array(point)
    losses = list(rerun[nearest].values())
    return _best(seen, nearest, losses, len(losses)), np.array(nearest)


def _best(seen: _Seen, point: Point, losses: Sequence[float], fresh: int) -> Best:
    number = min(run.number for run, x in zip(seen.trials, seen.points, strict=True) if tuple(x) == point)
    around = (
        interval_of_mean(losses, seen.noise, seen.degrees)
        if fresh and seen.noise is not None
        else (-math.inf, math.inf)
    )
    return Best(number, statistics.fmean(losses), around, fresh, len(losses))


def _coordinates(seen: _Seen, dimensions: Sequence[Dimension], best: Array, theirs: Array) -> tuple[Coordinate, ...]:
    tried = seen.points[np.isfinite(seen.losses)].T
    spread = seen.region.along(best, tried)[0].std(1)
    shares = spread / (spread.sum() or 1.0)
    gains, doubts = (part[:, 0] for part in seen.region.along(best, np.zeros((len(best), 1))))
    scale, low, high = seen.region.features.scale[:, None], seen.region.low[:, None], seen.region.high[:, None]
    around = best[:, None] + scale * np.arange(-WIDE, WIDE + FINE / 2, FINE)
    mean, deviation = seen.region.along(best, around)
    equal = (mean + SURE * deviation <= seen.floor) & (around >= low) & (around <= high)
    equal &= _risks(seen, best, around) <= max(RISK, float(seen.region.risk(best)))
    ends = [np.maximum(tried.min(1, keepdims=True) - BEYOND * scale, low)]
    ends += [np.minimum(tried.max(1, keepdims=True) + BEYOND * scale, high)]
    sliced = ends[0] + (ends[1] - ends[0]) * np.linspace(0, 1, SLICE)
    curves = [sliced, *seen.region.along(best, sliced), _risks(seen, best, sliced)]
    middle = around.shape[1] // 2
    found = []
    for i in np.argsort(-shares, kind="stable"):
        if levels := len(dimensions[i].levels):
            # A slice over all levels; only the best level counts as flat.
            every = np.tile(np.arange(SLICE) % levels, (len(best), 1)).astype(float)
            for curve, values in zip(
                curves, (every, *seen.region.along(best, every), _risks(seen, best, every)), strict=True
            ):
                curve[i] = values[i]
            equal[i] = False
        below, above = np.flatnonzero(~equal[i, :middle]), np.flatnonzero(~equal[i, middle + 1 :])
        first = below[-1] + 1 if len(below) else 0
        last = middle + (above[0] if len(above) else middle)
        points = tuple(
            SlicePoint(*map(float, values))
            for values in zip(*(curve[i, : levels or SLICE] for curve in curves), strict=True)
        )
        end = _end(dimensions[i], float(best[i]))
        found.append(
            Coordinate(
                path=dimensions[i].path,
                best=float(best[i]),
                flat=(float(around[i, first]), float(around[i, last])),
                gain=float(gains[i]),
                gain_deviation=float(doubts[i]),
                importance=float(shares[i]),
                worth=bool(gains[i] - SURE * doubts[i] > seen.floor),
                slice=points,
                at_end=bool(end),
                end=end,
                optuna_importance=float(theirs[i]),
            )
        )
    return tuple(found)


def _end(dimension: Dimension, best: float) -> str:
    """Return the name of the bound that the best value has reached, or an empty string if it is within its bounds."""
    if best == 0 or min(best - dimension.low, dimension.high - best) >= FINE * dimension.scale:
        return ""
    return dimension.ends[best > 0]


def _risks(seen: _Seen, best: Array, x: Array) -> Array:
    """Return the risks of divergence, (D, m). Element (i, j) is the risk at ``best`` with its value i set to
    ``x[i, j]``."""
    d = len(best)
    return np.array([seen.region.risk(np.where(np.arange(d) == i, x[i][:, None], best)) for i in range(d)])


def finalists(
    trials: Sequence[StudyTrial], axes: Axes, noise: float | None, *, by_surrogate: bool = True
) -> list[dict[str, float]]:
    """Return the candidates for runs with fresh seeds, the most promising first. A point has octaves by path.

    In a trust-region search, trials are ranked by the corrected predictions of :attr:`_Seen.predicted`. The order of
    the candidates is:

    1. the best trial;
    2. the point with the lowest predicted loss, with only those of its changes that are worth more than the noise;
    3. the same point with all its changes (it may never have been run, like the point of 2.);
    4. the other trials;
    5. outliers, to which the surrogate was not fitted.

    In other searches (``by_surrogate`` is false), trials are ranked by their losses. The list is empty if every trial
    diverged.
    """
    seen = _look(trials, axes, noise)
    ended = np.isfinite(seen.losses)
    if not ended.any():
        return []
    points = seen.points[ended]
    if by_surrogate:
        predicted, outliers = seen.predicted, ~np.isfinite(without_outliers(seen.losses))
        ranked = [
            x for x in sorted(predicted, key=lambda x: predicted[x]) if any(x)
        ]  # the start has its runs already
        lowest = seen.region.predicted
        # Last the outliers, which the surrogate was not fitted to.
        points = np.vstack(
            [
                *ranked[:1],
                _fewest(seen, lowest),
                lowest,
                *ranked[1:],
                seen.points[np.isfinite(seen.losses) & outliers],
            ]
        )
    else:
        points = points[np.argsort(seen.losses[ended], kind="stable")]
    distinct = dict.fromkeys(tuple(point.tolist()) for point in points)
    return [dict(zip(axes.limits, point, strict=True)) for point in distinct]


def _fewest(seen: _Seen, best: Array) -> Array:
    """Simplify the point ``best``: reset its values to the start one by one, beginning with the value that costs
    least.

    A value is reset only if the point then stays within the noise of ``best`` and is not likely to diverge.
    """
    paths = np.array(best)
    start = np.zeros((len(best), 1))
    costs, deviations = (part[:, 0] for part in seen.region.along(best, start))
    for i in np.argsort(costs + SURE * deviations, kind="stable"):
        back = np.where(np.arange(len(best)) == i, 0.0, paths)
        if _within_noise(seen, back, best):
            paths = back
    return paths


def _within_noise(seen: _Seen, x: Array, best: Array) -> bool:
    cost, deviation = _cost(seen, x, best)
    safe = float(seen.region.risk(x)) <= max(RISK, float(seen.region.risk(best)))
    return safe and cost + TOGETHER * deviation <= seen.floor


def _cost(seen: _Seen, x: Array, best: Array) -> tuple[float, float]:
    """Return the predicted loss at ``x`` minus that at ``best``, and the standard deviation of the difference."""
    here, there = seen.region.belief(np.array([x, best]))
    return float(here - there), float(seen.region.deviation(x[None], best)[0])


def advice_when_all_diverged(
    trials: Sequence[StudyTrial], dimensions: Sequence[Dimension], elsewhere: str = ELSEWHERE
) -> str:
    """Return one line of advice on which value to lower, for a search whose trials all diverged.

    The usual cause is the learning rate, so the advice is to start from half of the lowest rate that was tried. If no
    learning rate is searched, the advice is the text ``elsewhere``.

    The only other evidence is how long each run lasted. So a divergence model is fitted in which a run counts as
    diverged only if it is shorter than half of the longest run. The model shows which value made runs diverge
    soonest; the advice names this value if it is not a learning rate.
    """
    diverged = [trial for trial in trials if trial.state == "diverged"]
    points = np.array([[(trial.octaves or {}).get(d.path, 0.0) for d in dimensions] for trial in diverged])
    rates = learning_rates([d.path for d in dimensions])
    start = "the start's too" if (~points.any(1)).any() else "but none was of the start"
    found = f"all {len(diverged)} trials diverged, {start}" if len(diverged) > 1 else "the only trial diverged"
    advice = elsewhere
    if rates.any():
        lowered = max(-points[:, rates].max(1).min(), 0.0)  # octaves that the search has tried already
        factor = 2.0 ** (lowered + 1)
        names, value = "the learning rates", ""
        if rates.sum() == 1:
            rate = dimensions[int(np.argmax(rates))]
            names = short_path(rate.path)
            value = f", {format_number(float(rate.centre) / factor)}" if rate.centre else ""
        tried = f" (1/{2**lowered:.3g} of it diverged)" if lowered >= DOWN else ""
        advice = f"start from {names} at 1/{factor:.3g} of what it was{value} or lower{tried}"
    tokens = np.array([trial.tokens for trial in diverged])
    early = divergence.fit(points, tokens < tokens.max() / 2)
    if early.slopes.any():
        down, i = divmod(int(np.argmax(early.slopes)), len(dimensions))
        if not rates[i]:
            moved = "another" if dimensions[i].levels else "lowered" if down else "raised"
            advice += f"; runs diverged soonest where {short_path(dimensions[i].path)} was {moved}"
    return f"{found}: {advice}"
