"""Determine the answer of a search: the best point and its loss.

A point is one setting of all searched values. A search begins at the start point. The noise is the standard deviation
of the loss between seeds.

1. The lowest of many noisy losses is partly luck. So a search ends with final trials: the best few points (the
   finalists) run with fresh seeds. The finalist with the lowest mean loss is chosen. (One trial of a single finalist
   only measures it; predicted losses decide.) A finalist that diverges with any seed cannot be chosen. Without final
   trials, a trust-region search compares predicted losses, and other searches compare measured losses.
2. The gain is the loss of the start minus the loss of the chosen point, over the seeds that both were run with. If
   the start has the lower loss, the answer is the start.
3. The lowest of several means is partly luck, too. Example: of three equally good points with two trials each, the
   lowest mean is on average 0.6 times the noise too low. So with several finalists, the chosen finalist and the start
   run again with new seeds: the confirmation trials. Their losses are reported. A single finalist needs none, because
   it is not chosen from several means.
4. The answer is the point with the lowest expected loss, however small the gain: if small gains were ignored, short
   searches under noise would lose much of what they find (docs/concepts/search.md). A gain that may be luck is
   marked as in doubt. It is in doubt if it is at most the noise in the confirmation trials or, without
   confirmation trials, at most 2.5 times the noise.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from leaven.documents.runs import Outlook
from leaven.recipe.recipe import short_path
from leaven.recipe.units import format_number
from leaven.tuning.algorithm.noise import FEWEST_DEGREES, interval_of_mean, noise_between_seeds
from leaven.tuning.algorithm.sensitivity import best_pair, coordinates, cost_of, fewest_changes, further_gain
from leaven.tuning.algorithm.surrogate import FITTED, MODEL_ERROR, EarlierTrials, fit_divergence, fitted_noise
from leaven.tuning.algorithm.trust_region import (
    DOWN,
    Axes,
    Features,
    Region,
    learning_rates,
    loss_of,
    region,
    results,
    without_outliers,
)
from leaven.tuning.study_document import PRUNED, Answer, Best, Dimension, StudyTrial

Array = NDArray[np.float64]

RERUNS = 2  # trials with fresh seeds of each of the best few points
CONFIRMATIONS = 2  # confirmation trials of the chosen point, and of the start
ALONE = 2.5  # times the noise: a gain without confirmation trials that is at most this is in doubt
ELSEWHERE = "lower the recipe's learning rate, which is not searched, to half or a quarter"

Point = tuple[float, ...]  # octaves from the start point
Losses = Mapping[int, float]  # of the trials at one point, by seed


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

    Args:
        noise: standard deviation of the loss between seeds; by default measured from the trials.
        over: whether the search has ended. If false, there is a best point only after a final trial (see the top of
            this file) has ended.
        by_surrogate: without final trials, rank points by predicted loss, not by measured loss.
        optunas: returns Optuna's importances (D,) for points (n, D) and losses (n,); by default 0.
        earlier: trials of an earlier search, used as prior knowledge.
    """
    axes = Axes.of(dimensions, earlier)
    seen, paths = FittedTrials.of(trials, axes, noise), list(axes.limits)
    if not np.isfinite(seen.losses).any():
        advice = advice_when_all_diverged(trials, dimensions) if len(seen.trials) else ""
        return Answer(noise_floor=seen.noise, noise_runs=seen.degrees, advice=advice, dimensions=tuple(dimensions))
    over = over or any(trial.purpose == "rerun" for trial in seen.trials)
    chosen = seen.chosen(by_surrogate=by_surrogate) if over else None
    point = seen.region.predicted if chosen is None else np.array(chosen.point)
    fewer = fewest_changes(seen.region, point, seen.floor)
    best, fewest, near, outlook = None, None, fewer, None
    if chosen is not None:
        best = seen.best(chosen.point, chosen.losses, chosen.fresh)
        fewest, near = _fewest_measured(seen, chosen.point, best)
        if by_surrogate and axes.not_in([axes.params(point) for point in seen.points], axes.start):
            outlook = _outlook(seen, axes, point)
    return Answer(
        best=best,
        octaves=dict(zip(paths, point.tolist(), strict=True)),
        noise_floor=seen.noise,
        noise_runs=seen.degrees,
        coordinates=coordinates(
            seen.region,
            seen.points,
            seen.losses,
            seen.floor,
            dimensions=dimensions,
            best=point,
            optunas=optunas(seen.points, seen.losses),
        ),
        fewest=fewest,
        fewest_octaves=dict(zip(paths, near.tolist(), strict=True)),
        fewest_cost=cost_of(seen.region, near, point)[0],
        idle=tuple(path for path, x in zip(paths, fewer, strict=True) if x == 0) if fewer.any() else (),
        gain=chosen.gain if chosen is not None else None,
        in_doubt=chosen is not None and chosen.in_doubt,
        informed=seen.region.surrogate.informed if axes.expected or axes.earlier else None,
        outlook=outlook,
        dimensions=tuple(dimensions),
    )


def _outlook(seen: "FittedTrials", axes: Axes, point: Array) -> Outlook:
    searched = np.array([trial.purpose == "search" for trial in seen.trials])
    gain = further_gain(seen.region, axes, seen.points, seen.losses, searched=searched, best=point)
    count, paths, flops = len(seen.trials), list(axes.limits), sum(trial.flops for trial in seen.trials)
    pair = best_pair(seen.region, seen.points, point, seen.floor)
    # If the start diverged, there is no gain over the start of which the pair could bring a share.
    if pair is None or not np.isfinite(seen.losses[~seen.points.any(1)]).any():
        return Outlook(trials=count, flops=flops, gain=gain)
    two = (paths[pair[0]], paths[pair[1]])
    return Outlook(trials=count, flops=flops, gain=gain, pair=two, pair_share=pair[2])


def _fewest_measured(seen: "FittedTrials", point: Point, best: Best) -> tuple[Best, Array]:
    """Return (loss, octaves (D,)) of the point that differs least from the start, but is as good as ``point``: its
    mean loss and its predicted loss are at most ``seen.floor`` nats higher. Candidates are the start and repeated
    points with at least ``RERUNS`` losses, all finite."""
    fresh: dict[Point, dict[int, float]] = {}
    for trial, x, loss in zip(seen.trials, seen.points, seen.losses, strict=True):
        if trial.state != PRUNED and (trial.purpose == "rerun" or not x.any()):
            fresh.setdefault(tuple(x.tolist()), {})[trial.seed] = float(loss)
    rerun = {
        x: by_seed for x, by_seed in fresh.items() if len(by_seed) >= RERUNS and math.isfinite(sum(by_seed.values()))
    }
    mine = rerun.get(point, {0: best.loss})  # without fresh trials: the reported loss
    equal = [
        x
        for x, by_seed in rerun.items()
        if gain(by_seed, mine) <= seen.floor and cost_of(seen.region, np.array(x), np.array(point))[0] <= seen.floor
    ]
    nearest = min([point, *equal], key=changes)
    if nearest == point:
        return best, np.array(point)
    losses = list(rerun[nearest].values())
    return seen.best(nearest, losses, len(losses)), np.array(nearest)


@dataclass(frozen=True)
class FittedTrials:
    """The trials with a result, in the order in which they ended, and the trust region fitted to them."""

    trials: tuple[StudyTrial, ...]
    paths: tuple[str, ...]  # paths of the searched values in the recipe
    points: Array  # (n, D), octaves
    losses: Array  # (n,), infinite for a divergence
    region: Region
    noise: float | None  # nats, between trials of one point; None if unknown
    degrees: int  # degrees of freedom of the noise
    floor: float  # nats; smaller differences of losses do not count

    @classmethod
    def of(cls, trials: Sequence[StudyTrial], axes: Axes, given: float | None) -> "FittedTrials":
        """Fit the trust region to the trials with a result. The noise is ``given``, or else measured.

        ``floor`` is the noise. If only a few repeats measured it, and a fit to the losses gives a larger noise,
        ``floor`` is the geometric mean of both. If the noise is unknown, ``floor`` is fitted, or 0 without a fit.
        """
        paths = tuple(axes.limits)
        ended, points, losses = results(trials, axes)
        noise, degrees = noise_between_seeds(ended, paths, given)
        floor, sound = noise or 0.0, np.isfinite(without_outliers(losses))
        if noise != 0 and degrees < FEWEST_DEGREES and 0 < sound.sum() <= FITTED:
            columns = Features(np.zeros(len(paths)), axes.scale, axes.levels).of(points)
            fitted = fitted_noise(columns[sound], losses[sound])
            floor = fitted if noise is None else max(noise, math.sqrt(noise * fitted))
        now = region(axes, points, losses, floor)
        return cls(tuple(ended), paths, points, losses, now, noise, degrees, floor)

    @cached_property
    def predicted(self) -> dict[Point, float]:
        """The predicted loss of each evaluated point, up to a constant. Outliers and diverged points are left out.

        It is s + share x (m - s). s is the surrogate's prediction, and m is the mean of the point's measured losses.
        The share is 0 if the noise explains the surrogate's errors, and near 1 if they are much larger than the
        noise. If the noise is unknown, the share is 1.
        """
        ended = np.isfinite(without_outliers(self.losses))
        points = self.points[ended]
        fitted = self.region.belief(points)
        rest = self.losses[ended] - fitted
        own = 1.0
        if self.noise is not None:
            least = self.region.surrogate.noise
            weights = 1 / (least**2 + (MODEL_ERROR * (self.losses[ended] - self.losses[ended].min())) ** 2)
            error = math.sqrt(np.average((rest - np.average(rest, weights=weights)) ** 2, weights=weights))
            # The noise may be larger than measured: likely up to 3 times with one degree of freedom, twice with two.
            largest = (1 + 2 / max(self.degrees, 1)) * self.noise
            own = 1 - min(self.floor / least, largest / max(error, least), 1.0) ** 2
        by_point: dict[Point, list[float]] = {}
        for x, loss in zip(points, fitted + own * (rest - rest.mean()), strict=True):
            by_point.setdefault(tuple(x.tolist()), []).append(float(loss))
        return {x: statistics.fmean(found) for x, found in by_point.items()}

    def chosen(self, *, by_surrogate: bool) -> "ChosenPoint | None":
        """Return the best point of an ended search, or None if no trial finished. See :func:`answer`."""
        if not by_surrogate or not np.isfinite(self.losses).any():
            return choose(self.trials, self.paths, self.noise)
        return choose(self.trials, self.paths, None if self.noise is None else self.floor, self.predicted)

    def best(self, point: Point, losses: Sequence[float], fresh: int) -> Best:
        number = min(trial.number for trial, x in zip(self.trials, self.points, strict=True) if tuple(x) == point)
        interval = interval_of_mean(losses if fresh else (), self.noise, self.degrees)
        return Best(number, statistics.fmean(losses), interval, fresh, len(losses))

    def finalists(self, *, by_surrogate: bool) -> list[Point]:
        """Return the candidates for final trials, the best first, or [] if no loss is finite.

        Without ``by_surrogate``, they are the points with a finite loss, ordered by measured loss. With it, they are:
        the evaluated point with the lowest predicted loss, the surrogate's minimum with some values reset to the
        start (:func:`fewest_changes`), this minimum itself, the other evaluated points by predicted loss, and
        outliers.
        """
        ended = np.isfinite(self.losses)
        if not ended.any():
            return []
        if by_surrogate:
            # The start is left out, because it has several trials already.
            ranked = [x for x in sorted(self.predicted, key=lambda x: self.predicted[x]) if any(x)]
            lowest, outliers = self.region.predicted, ended & ~np.isfinite(without_outliers(self.losses))
            fewest = fewest_changes(self.region, lowest, self.floor)
            points = np.vstack([*ranked[:1], fewest, lowest, *ranked[1:], self.points[outliers]])
        else:
            points = self.points[ended][np.argsort(self.losses[ended], kind="stable")]
        return list(dict.fromkeys(tuple(point.tolist()) for point in points))


@dataclass(frozen=True)
class ChosenPoint:
    point: Point
    losses: tuple[float, ...]  # nats; the reported loss is their mean
    fresh: int  # number of these losses that were not used to choose the point: all or 0
    # Loss of the start minus that of the point, nats, in trials not used to choose the point; None without them.
    gain: float | None
    in_doubt: bool = False  # whether the gain may be luck

    @property
    def loss(self) -> float:
        return statistics.fmean(self.losses)


def choose(
    trials: Sequence[StudyTrial],
    paths: Sequence[str],
    noise: float | None,
    predicted: Mapping[Point, float] = MappingProxyType({}),
) -> ChosenPoint | None:
    """Return the point that a search chooses from its ``trials``, or None if no trial finished.

    Args:
        noise: standard deviation of the loss between seeds. If None, it is unknown, and a gain that is not confirmed
            is in doubt. If 0, one trial gives the exact loss of a point.
        predicted: predicted losses by point, which rank the points of the search. They are ignored once several
            trials with fresh seeds can be compared.
    """
    found = _LossesByPurpose.of(trials, paths, predicted)
    chosen = found.best()
    if chosen is None:
        return None
    if confirmed := found.confirming.get(chosen):
        better = gain(found.start_again, confirmed) if found.start_again else None
        if better is None or better > 0:
            in_doubt = better is not None and (noise is None or better <= noise)
            return ChosenPoint(chosen, tuple(confirmed.values()), len(confirmed), better, in_doubt)
        chosen = found.start
    if chosen == found.start:
        losses = found.start_again
        return ChosenPoint(chosen, tuple(losses.values()), len(losses), 0.0)
    losses = found.candidates[chosen]
    if not (noise == 0 or found.is_only_finalist(chosen)):
        in_doubt = bool(found.at_start) and (noise is None or not found.ahead(chosen, ALONE * noise))
        return ChosenPoint(chosen, tuple(losses.values()), 0, None, in_doubt)
    better = gain(found.at_start, losses) if found.at_start else None
    in_doubt = noise != 0 and better is not None and (noise is None or better <= ALONE * noise)
    return ChosenPoint(chosen, tuple(losses.values()), len(losses), better, in_doubt)


def point_to_confirm(trials: Sequence[StudyTrial], paths: Sequence[str]) -> Point | None:
    """Return the best point, if it needs confirmation trials: not the start, and not the only finalist."""
    found = _LossesByPurpose.of(trials, paths)
    best = found.best()
    return None if best is None or best == found.start or found.is_only_finalist(best) else best


@dataclass(frozen=True)
class _LossesByPurpose:
    """The losses of a search's trials, by the purpose of the trial. The loss of a diverged trial is infinite."""

    start: Point
    at_start: Losses  # trials of the start in the search; empty if the start diverged and another point can be chosen
    start_again: Losses  # ``at_start`` and the confirmation trials of the start
    choosing: Mapping[Point, Losses]  # trials of the finalists with fresh seeds
    confirming: Mapping[Point, Losses]  # confirmation trials
    candidates: Mapping[Point, Losses]  # points that can be chosen: none of their trials diverged
    predicted: Mapping[Point, float]  # predicted losses; empty if trials with fresh seeds decide

    @classmethod
    def of(
        cls,
        trials: Sequence[StudyTrial],
        paths: Sequence[str],
        predicted: Mapping[Point, float] = MappingProxyType({}),
    ) -> "_LossesByPurpose":
        searched: dict[Point, dict[int, float]] = {}
        choosing: dict[Point, dict[int, float]] = {}
        confirming: dict[Point, dict[int, float]] = {}
        for trial in trials:
            if trial.octaves is not None and trial.state in {"complete", "diverged"}:
                into = confirming if trial.confirms else choosing if trial.purpose == "rerun" else searched
                into.setdefault(tuple(trial.octaves[path] for path in paths), {})[trial.seed] = loss_of(trial)
        start: Point = (0.0,) * len(paths)
        at_start = searched.pop(start, {})
        again = at_start | confirming.pop(start, {})

        def ends(point: Point, losses: Losses) -> bool:
            return math.isfinite(sum({**losses, **confirming.get(point, {})}.values()))

        # A finalist counts once it has as many fresh trials as the others, all of them finite.
        whole = min(RERUNS, max(map(len, choosing.values()), default=0))
        found = {point: losses for point, losses in choosing.items() if len(losses) >= whole and ends(point, losses)}
        sound = bool(again) and math.isfinite(sum(again.values()))
        # If one finalist diverged, other points may still be chosen; if several diverged, only the start is safe.
        rerun = bool(found) or (sound and len(choosing) > 1)
        if not rerun:  # the points of the search are compared
            found = {
                point: losses for point, losses in searched.items() if point not in choosing and ends(point, losses)
            }
        if not sound:  # a start that diverged with some seed is used only if there is no other candidate
            at_start = again = {seed: loss for seed, loss in again.items() if math.isfinite(loss) and not found}
        # One trial of one finalist measures it, but is too noisy to decide against the predicted losses.
        decided = rerun and (len(choosing) > 1 or whole >= RERUNS)
        return cls(start, at_start, again, choosing, confirming, found, {} if decided else predicted)

    def is_only_finalist(self, point: Point) -> bool:
        return point in self.choosing and len(self.choosing) == 1

    @cached_property
    def refuted(self) -> set[Point]:
        """The points whose complete confirmation trials gain nothing over the start."""
        beside = [
            point
            for point, losses in self.confirming.items()
            if len(losses) >= CONFIRMATIONS and losses.keys() <= self.start_again.keys()
        ]
        return {point for point in beside if not gain(self.start_again, self.confirming[point]) > 0}

    def best(self) -> Point | None:
        """Return the candidate with the lowest loss, or the start if it has a lower one; None if none has a loss."""
        means = {
            x: self.predicted.get(x, statistics.fmean(losses.values()))
            for x, losses in self.candidates.items()
            if x not in self.refuted
        }
        if not means:
            return self.start if self.at_start else None
        lowest = min(means, key=lambda point: (means[point], changes(point)))
        return lowest if self.ahead(lowest) else self.start

    def ahead(self, point: Point, least: float = 0.0) -> bool:
        """Return whether the loss of ``point`` is more than ``least`` nats below the loss of the start: predicted
        losses if both have one, otherwise measured losses. If the start has no loss, every other point is ahead."""
        if point == self.start or not self.at_start:
            return point != self.start
        if point in self.predicted and self.start in self.predicted:
            return self.predicted[self.start] - self.predicted[point] > least
        return gain(self.at_start, self.candidates[point]) > least


def gain(start: Losses, there: Losses) -> float:
    """Return the mean loss of ``start`` minus that of ``there``. If both share any seeds, use only these seeds."""
    if both := start.keys() & there.keys():
        return statistics.fmean(start[seed] - there[seed] for seed in sorted(both))
    return statistics.fmean(start.values()) - statistics.fmean(there.values())


def changes(point: Point) -> tuple[int, float]:
    """Return how many values of a point differ from the start, and the sum of their absolute distances."""
    return int(np.count_nonzero(point)), float(np.abs(point).sum())


def advice_when_all_diverged(
    trials: Sequence[StudyTrial], dimensions: Sequence[Dimension], elsewhere: str = ELSEWHERE
) -> str:
    """Return one line of advice for a search whose trials all diverged, such as to start from a lower learning rate.
    ``elsewhere`` is the advice if no learning rate is searched."""
    diverged = [trial for trial in trials if trial.state == "diverged"]
    points = np.array([[(trial.octaves or {}).get(d.path, 0.0) for d in dimensions] for trial in diverged])
    rates = learning_rates([d.path for d in dimensions])
    start = "including the start" if (~points.any(1)).any() else "but the start was not tried"
    found = f"all {len(diverged)} trials diverged, {start}" if len(diverged) > 1 else "the only trial diverged"
    advice = elsewhere
    if rates.any():
        lowered = max(-points[:, rates].max(1).min(), 0.0)  # octaves that the search has tried already
        factor = 2.0 ** (lowered + 1)
        names, share = "the learning rates", f"1/{factor:.3g} of"
        value = f"{share} their old values or lower"
        if rates.sum() == 1:
            rate = dimensions[int(np.argmax(rates))]
            names, value = short_path(rate.path), f"{share} its old value or lower"
            if rate.centre:
                value = f"{format_number(float(rate.centre) / factor)} or lower, {share} its old value"
        tried = f" (1/{2**lowered:.3g} diverged, too)" if lowered >= DOWN else ""
        advice = f"start from {names} at {value}{tried}"
    tokens = np.array([trial.tokens for trial in diverged])
    early = fit_divergence(points, tokens < tokens.max() / 2)
    if early.slopes.any():
        down, i = divmod(int(np.argmax(early.slopes)), len(dimensions))
        if not rates[i]:
            moved = "changed" if dimensions[i].levels else "lowered" if down else "raised"
            advice += f"; runs diverged earliest where {short_path(dimensions[i].path)} was {moved}"
    return f"{found}: {advice}"
