"""The collapse check: are the loss curves of models of several sizes equal after normalisation?

Qiu et al. 2025 (arXiv 2507.02119) trained models of different sizes, each to its compute-optimal length, with well
scaled hyperparameters. Their loss curves become one curve after this normalisation:

    l(x) = (L(x T) - L0) / (L(T) - L0)

T is the length of a run, x the share of the run that is done, and L0 the irreducible loss, the same for all sizes.
Bergsma et al. 2025 (arXiv 2509.25087) found the same for language models with equal tokens per parameter. Curves do
not collapse if hyperparameters are scaled wrongly.

The first size is the base. If the normalised curves of another size and of the base are equal, then

    L(x T) - L(T) = r (L_base(x T) - L_base(T)),    r = (L(T) - L0) / (L_base(T) - L0)

The deviation at x is the left side minus the right side, divided by L(:data:`FROM` T) - L(T), the fall of the
loss after the first quarter of the run. The check judges the largest deviation after this quarter.

By default, the check fits L0: the value from 0 to the lowest final loss with the least sum of squared
deviations. (Qiu et al. fit L0 to the final losses of many sizes; two or three sizes do not determine it.) On three of
four families of their curves, this L0 is within 2% of theirs (docs/log.md).

Curves are averaged over intervals of the run, because the loss of one step is noisy. A bootstrap over seeds gives a
band. With 95% probability, the band contains the true deviations at all x. If a size has only one run, the bootstrap
draws from the noise within its curve. Then the band is too narrow, because seeds do not vary.

The check passes if the band of every size is within :data:`LIMIT` everywhere. It fails in three cases: the whole band
of a size is beyond the limit at some x; a run diverged; or the loss of a size other than the base does not fall
after the first quarter. Otherwise it is undecided.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from leaven.documents.checks import CheckDocument, VerdictCurve, VerdictRow
from leaven.errors import InputError
from leaven.training.early_stopping import divergence_limit
from leaven.verification.foreign import CheckTrial, ModelFamily
from leaven.verification.model_instance import RunScale, RunSetting
from leaven.verification.optimum import DRAWS, Array, Estimate
from leaven.verification.runs import RunStore
from leaven.verification.sweep import labels
from leaven.verification.verdict import difference, verdict

FROM = 0.25  # share of a run after which curves are compared; before, they depend on warm-up and initial values
# Limit on the deviation, as a share of the loss decrease. 28 pairs of published curves that collapse deviate by
# 0.4% to 3.1%; with their bands, by up to 4.5% (docs/log.md).
LIMIT = 0.05
# The largest number of intervals into which curves are divided. If the shortest curve has fewer points than this, all
# curves are divided into as many intervals as it has points.
INTERVALS = 16
LEAST_POINTS = 8  # a curve with fewer points is refused
AXIS = "share of the run"
BLOCKS = 4  # number of blocks in an interval; the mean losses of the blocks show the noise of a single run

Points = Sequence[tuple[float, float]]
"""The points of a loss curve: (time in steps or tokens, loss in nats per token), in the order of time."""


def collapse(
    subject: str, runs: Mapping[str, Sequence[Points]], irreducible: float | None, settings: Mapping[str, Any]
) -> CheckDocument:
    """Check whether the loss curves of all sizes are equal after normalisation.

    ``runs`` has the loss curves of all seeds, by size; the first size is the base. A diverged run has a loss that is
    not finite. ``irreducible`` is L0 in nats per token, by default fitted. ``subject`` and ``settings`` are for
    messages and the document. Raise InputError if there are fewer than two sizes, a curve cannot be used, or L0 is
    not below all final losses.
    """
    base, *others = runs
    if not others:
        raise InputError(f"{subject} has curves of one size only ({base}); a check of collapse compares two or more")
    seeds = sorted({len(several) for several in runs.values()})
    document = partial(
        verdict,
        "collapse",
        subject,
        "largest deviation from the base's normalised loss curve, as a share of the loss decrease",
        settings={
            "scales": list(runs),
            "seeds": seeds[0] if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}",
            "compared after this share of a run": FROM,
            **settings,
        },
    )
    row = {
        name: partial(VerdictRow, module="normalised loss curve", axis=f"{base} -> {name}", limit=LIMIT)
        for name in others
    }
    diverged = [name for name in runs if any(not math.isfinite(loss) for points in runs[name] for _, loss in points)]
    if diverged:
        note = f"a run of {' and '.join(diverged)} diverged"
        return document([row[n](slope=None, passed=False, note=note, beyond=math.inf) for n in others], curves=[])
    count = min(INTERVALS, *(len(points) for several in runs.values() for points in several))
    if count < LEAST_POINTS:
        raise InputError(f"{subject}: a curve has {count} points; give curves with {LEAST_POINTS} points or more")
    for name, several in runs.items():
        ends = sorted({points[-1][0] for points in several})
        if len(ends) > 1:
            raise InputError(
                f"{subject}: curves of {name} have the lengths {ends[0]:g} and {ends[-1]:g}; give runs of one length"
            )
        if (start := max(points[0][0] for points in several)) > FROM * ends[0]:
            raise InputError(
                f"{subject}: a curve of {name} starts at {start:g} and ends at {ends[0]:g}, so its first part is "
                "missing; give the whole curve"
            )
    by_seed = [np.array([_interval_means(points, count) for points in several]) for several in runs.values()]
    curves = np.stack([several.mean(0) for several in by_seed])
    lowest = curves[:, -1].min()
    if lowest <= 0:
        raise InputError(f"{subject}: a final loss is {lowest:.4g}; give losses in nats per token, which are above 0")
    if irreducible is not None and not irreducible < lowest:
        raise InputError(f"--irreducible {irreducible:g}: give less than {lowest:.4g}, the lowest final loss")

    def level(of: Array) -> Array:
        return _fitted_level(of) if irreducible is None else np.full(of.shape[:-2], irreducible)

    samples = _samples(list(runs.values()), by_seed)
    fitted = level(curves)
    found = deviations(curves, fitted)
    bands = np.full(len(others), math.nan)  # half of the width
    measured = Estimate(float(fitted), None, None)
    if samples is not None:
        levels = level(samples)
        bands = np.percentile(np.abs(deviations(samples, levels) - found).max(-1), 95, axis=0)
        if irreducible is None:
            measured = Estimate(float(fitted), *map(float, np.percentile(levels, [2.5, 97.5])))
    note = "given" if irreducible is not None else "fitted" if fitted > 0 else "fitted: 0 is the lowest possible"
    shares = (np.arange(count) + 0.5) / count
    compared = shares[-found.shape[-1] :]
    rows, drawn = [], []
    for name, of_seeds in zip(runs, by_seed, strict=True):
        normalised = (of_seeds - fitted) / (of_seeds.mean(0)[-1] - fitted)
        drawn.append(_curve(name, "normalised", shares, normalised.min(0), normalised.mean(0), normalised.max(0)))
    for name, errors, band, of_seeds in zip(others, found, bands, by_seed[1:], strict=True):
        rows.append(_judged(row[name], compared, errors, float(band), of_seeds))
        drawn.append(_curve(f"{base} -> {name}", "deviation", compared, errors - band, errors, errors + band))
    return document(rows, curves=drawn, measured=[measured.row("irreducible loss, nats per token", note)])


def collapse_of_family(
    family: ModelFamily,
    sizes: Sequence[RunScale],
    store: RunStore,
    *,
    seeds: int = 3,
    irreducible: float | None = None,
) -> CheckDocument:
    """Run or resume the collapse check of a family at several sizes.

    Batch and tokens grow with the number of parameters, so all sizes have the same number of steps. Raise InputError
    if the sizes, the folder or a curve cannot be used, and ChecksStopped if the runs were stopped.
    """
    sizes = list(dict.fromkeys(sizes))
    names = labels(sizes)
    trials = {
        names[size]: [family.trial(RunSetting(scale, family.value("lr"), seed=seed)) for seed in range(seeds)]
        for size, scale in zip(sizes, grown(family, sizes), strict=True)
    }
    outcome = store.run(trial for several in trials.values() for trial in several)
    limit = divergence_limit(family.vocab_size)

    def points(trial: CheckTrial) -> Points:
        ended = outcome(trial)
        return ended.curve if ended.loss < limit else [(ended.tokens, math.nan)]

    return collapse(
        family.name,
        {name: list(map(points, several)) for name, several in trials.items()},
        irreducible,
        {"rule": family.rule, "tokens": family.tokens, "batch_tokens": family.batch_tokens},
    )


def grown(family: ModelFamily, sizes: Sequence[RunScale]) -> list[RunScale]:
    """Return the sizes with batch and tokens in proportion to the parameters, rounded to whole sequences."""
    base, sequences = family.params(sizes[0]), family.sequences
    ratios = [max(round(family.params(size) / base * sequences), 1) / sequences for size in sizes]
    return [replace(size, batch=ratio, tokens=ratio) for size, ratio in zip(sizes, ratios, strict=True)]


def deviations(curves: Array, irreducible: Array) -> Array:
    """Return the deviations from the base, which is the first size, as defined at the top of this file.

    ``curves`` has the shape (..., sizes, intervals). ``irreducible`` (...) is the loss L0. The result has the shape
    (..., sizes - 1, intervals after the first quarter of the run).
    """
    ends = curves[..., -1:]
    falls = curves[..., int(FROM * curves.shape[-1]) :] - ends
    reducible = ends - irreducible[..., None, None]
    ratios = reducible[..., 1:, :] / reducible[..., :1, :]
    with np.errstate(divide="ignore", invalid="ignore"):  # a curve that does not fall divides by 0
        return np.asarray(difference(falls[..., 1:, :], ratios * falls[..., :1, :]) / falls[..., 1:, :1])


def _fitted_level(curves: Array) -> Array:
    """Return the L0 (...) of least squared :func:`deviations` of ``curves`` (..., sizes, intervals), on a grid."""
    lowest = curves[..., -1].min(-1)

    def best(distances: Array) -> Array:
        errors = [(deviations(curves, lowest - distance) ** 2).sum((-1, -2)) for distance in distances]
        return np.asarray(np.take_along_axis(distances, np.argmin(errors, 0)[np.newaxis], 0)[0])

    steps = np.geomspace(1e-3, 1, 40)
    rough = best(np.multiply.outer(steps, lowest))
    step = steps[1] / steps[0]
    return np.asarray(lowest - best(np.minimum(np.multiply.outer(np.geomspace(1 / step, step, 40), rough), lowest)))


def _interval_means(points: Points, count: int) -> Array:
    """Return the mean loss in ``count`` equal intervals of a run, with linear interpolation between points."""
    time, loss = np.asarray(points, dtype=float).T
    time, loss = np.insert(time, 0, 0.0), np.insert(loss, 0, loss[0])
    area = np.insert(np.cumsum((loss[1:] + loss[:-1]) / 2 * np.diff(time)), 0, 0.0)
    ends = np.linspace(0, time[-1], count + 1)
    # Within a segment, the area is quadratic in time.
    at = np.interp(ends, time, loss)
    left = np.clip(np.searchsorted(time, ends, "right") - 1, 0, len(time) - 1)
    areas = area[left] + (loss[left] + at) / 2 * (ends - time[left])
    return np.asarray(np.diff(areas) / np.diff(ends))


def _samples(runs: Sequence[Sequence[Points]], by_seed: Sequence[Array]) -> Array | None:
    """Return bootstrap samples of each size's mean loss curve, (draws, sizes, time intervals).

    At a size with several runs, seeds are drawn with replacement. At a size with one run, blocks of its points are
    drawn (:func:`_blocks`). Return None if there are too few points for blocks.

    Deviations from a mean of n seeds, or from a line fitted to n blocks, are too small. They are multiplied by
    sqrt(n / (n - 1)) for seeds, and by sqrt(n / (n - 2)) for blocks.
    """
    random, drawn = np.random.default_rng(0), []
    for several, means in zip(runs, by_seed, strict=True):
        seeds, mean = len(means), means.mean(0)
        if seeds > 1:
            deviating = means[random.integers(seeds, size=(DRAWS, seeds))].mean(1) - mean
            drawn.append(mean + deviating * math.sqrt(seeds / (seeds - 1)))
            continue
        blocks = _blocks(several[0], len(mean))
        if blocks is None:
            return None
        chosen = random.integers(BLOCKS, size=(DRAWS, *blocks.shape))
        deviating = np.take_along_axis(blocks[np.newaxis], chosen, 2).mean(2)
        drawn.append(mean + deviating * math.sqrt(BLOCKS / (BLOCKS - 2)))
    return np.stack(drawn, axis=1)


def _blocks(points: Points, count: int) -> Array | None:
    """Fit a line to the curve in each of ``count`` equal time intervals, and return the mean residuals in blocks.

    The result is (``count``, `BLOCKS`): the blocks of each interval; None if an interval has too few points.
    """
    time, loss = np.asarray(points, dtype=float).T
    place = np.minimum((time / time[-1] * count).astype(int), count - 1)
    found = []
    for interval in range(count):
        t, y = time[place == interval], loss[place == interval]
        if len(y) < 2 * BLOCKS:
            return None
        rest = y - np.polyval(np.polyfit(t, y, 1), t)
        found.append([part.mean() for part in np.array_split(rest, BLOCKS)])
    return np.array(found)


def _judged(row: Callable[..., VerdictRow], shares: Array, errors: Array, band: float, by_seed: Array) -> VerdictRow:
    """Return the verdict on one size: whether its normalised loss curve coincides with the base's curve.

    ``errors`` are the deviations from the base's curve at ``shares`` of the run, with the 95% interval ``errors`` +-
    ``band``. ``band`` is NaN if unknown. ``by_seed`` has the losses of this size (seeds, points). ``row`` is
    VerdictRow with some fields set.
    """
    worst = int(np.abs(errors).argmax())
    largest = float(abs(errors[worst]))
    low, high = max(largest - band, 0.0), largest + band
    compared = by_seed[:, -len(errors) :]
    fall = compared[:, 0].mean() - compared[:, -1].mean()
    parts: dict[str, float | None] = {
        "deviation": largest,
        "deviation, low": None if math.isnan(band) else low,
        "deviation, high": None if math.isnan(band) else high,
        "at": float(shares[worst]),
        "noise": float(compared.std(0, ddof=1).mean() / fall) if len(compared) > 1 else None,
    }
    judged = partial(row, slope=float(errors[worst]), parts=parts, beyond=max(largest - LIMIT, 0.0))
    one = "; the interval has only the noise within a run, not the noise between seeds" if len(compared) == 1 else ""
    if fall <= 0:
        return judged(passed=False, note="the loss does not fall after the first quarter of the run")
    if math.isnan(band):
        few = "too few points in a curve to estimate the noise; give more seeds, or curves with more points"
        return judged(passed=False, undecided=True, note=f"undecided: {few}")
    if high <= LIMIT:
        return judged(passed=True, note=one.removeprefix("; "))
    if low > LIMIT:
        where = "above" if errors[worst] > 0 else "below"
        note = f"at {shares[worst]:.0%} of the run, the loss is {where} the base's normalised curve{one}"
        return judged(passed=False, note=note)
    note = f"undecided: the limit is within the noise; give more seeds{one}"
    return judged(passed=False, undecided=True, note=note)


def _curve(name: str, quantity: str, shares: Array, *values: Array) -> VerdictCurve:
    """Return a curve over ``shares``. ``values`` has three arrays of y: lower ends, middles and upper ends."""
    low, high = ([] if np.isnan(each).any() else each.tolist() for each in values[::2])
    y = [each if math.isfinite(each) else None for each in values[1].tolist()]
    return VerdictCurve(module=name, axis=AXIS, quantity=quantity, x=shares.tolist(), y=y, low=low, high=high)
