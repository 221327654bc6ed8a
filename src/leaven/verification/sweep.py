"""Sweeps: is the best value of a hyperparameter at one scale also the best at other scales?

The checks transfer, duration, batch, decay and init use sweeps. A sweep trains models at two or more scales, on a
grid of values of one hyperparameter, with several seeds for each value. The first scale is the base. The grid has
values for the base, and the scaling rule converts them to other scales. So if the rule is right, the same value of
the grid is the best at all scales. Runs of other programs are compared in the same way (logged_runs.py).

For each other scale, a sweep measures two numbers (compare Kalra and Barkeshli 2026, arXiv 2605.21486):

- The shift is the distance in octaves from the best value of the base to the best value of the other scale. For
  example, best lrs of 0.01 and 0.005 are a shift of -1.
- The regret is the cost of the base's best value at the other scale: the loss at this value minus the lowest loss, in
  nats.

A flat optimum shifts easily at no cost, and at a steep optimum a small shift is expensive. So both are judged. A
check must not pass because of noise, so their 95% bootstrap intervals are compared with the limits:

- The scale passes if the upper end of the regret is within its limit. It also passes if both ends of the shift and
  the lower end of the regret are within their limits.
- Otherwise, it fails if the regret's whole interval is above its limit, or the shift's whole interval is beyond its
  limit.
- In all other cases it is undecided, which does not count as passed. With one seed there is no interval.

A value with a diverged run is left out of the grid of its scale. If the base's best value diverges at the other
scale, the check fails. If it is outside the grid of the other scale, the regret is extrapolated, so the check cannot
pass.

If the best value of a scale is at the edge of its grid, the grid is extended, up to :data:`EXTENSIONS` times. If the
base's best value is then still at the edge, the check is undecided, and the other scales are not trained.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, get_args

from leaven.documents.checks import REGRET_LIMIT, CheckDocument, MeasuredRow, VerdictCurve, VerdictRow
from leaven.errors import InputError
from leaven.training.early_stopping import divergence_limit
from leaven.verification.foreign import ModelFamily
from leaven.verification.model_instance import Quantity, RunScale, RunSetting, ScaleAxis
from leaven.verification.optimum import Estimate, LossGrid, estimate, exponent, shift
from leaven.verification.runs import RunStore
from leaven.verification.verdict import curve, verdict

EXTENSIONS = 3  # the largest number of times that a grid is extended
AXES: tuple[ScaleAxis, ...] = get_args(ScaleAxis)


@dataclass(frozen=True)
class SweptValue:
    """A hyperparameter that a check sweeps."""

    key: str
    option: str  # command-line option for the grid
    octaves: tuple[int, ...]  # the default grid: log2 of (value / value of the recipe or factory)
    shift_limit: float  # allowed change of the best value, in octaves: half a step of the grid
    more_seeds: str = "--seeds"  # in messages, how to get more seeds; a number follows

    @property
    def label(self) -> str:
        return self.key.replace("_", " ")


SWEPT: Mapping[Quantity, SweptValue] = {
    "lr": SweptValue("lr", "--lrs", (-2, -1, 0, 1, 2), 0.5),
    # The loss hardly depends on the decay: steps of a factor 4 show a minimum where steps of 2 show noise.
    "weight_decay": SweptValue("weight_decay", "--decays", (-4, -2, 0, 2, 4), 1.0),
    "init_std": SweptValue("init_std", "--stds", (-2, -1, 0, 1, 2), 0.5),
}


def sweep(
    check: str,
    family: ModelFamily,
    quantity: Quantity,
    scales: Sequence[RunScale],
    grid: Sequence[float] | None = None,
    *,
    store: RunStore,
    seeds: int = 3,
) -> tuple[CheckDocument, dict[RunScale, LossGrid]]:
    """Run or resume a sweep. Return its document and the losses at each trained scale.

    The first scale is the base. ``grid`` has the values to try at the base. If ``family`` is made by a user's
    factory function, the grid has multiples of the factory's own value.

    Raises:
        InputError: for fewer than two scales or three values, or if a scale or the folder of ``store`` is unusable.
        ChecksStopped: if the runs were stopped.
    """
    swept, scales = SWEPT[quantity], list(dict.fromkeys(scales))
    values = sorted(set(grid or (family.value(quantity) * 2.0**octave for octave in swept.octaves)))
    if len(scales) < 2 or len(values) < 3:
        raise InputError(f"this check needs at least two scales and three values of {swept.label} ({swept.option})")
    base, *others = scales
    _, losses = extended(family, quantity, {base: values}, store, seeds)
    if losses[base].has_optimum and not losses[base].edge:  # else every row is undecided, whatever the others show
        losses |= extended(family, quantity, dict.fromkeys(others, values), store, seeds)[1]
    names = labels(scales)
    settings = {
        "rule": family.rule,
        "scales": list(names.values()),
        swept.option.removeprefix("--"): values,
        "unit": family.unit,
        "seeds": seeds,
        "tokens": family.tokens,
        "batch_tokens": family.batch_tokens,
    }
    ruled = {axis: family.exponent(quantity, axis) for axis in AXES}
    return compare(check, family.name, swept, losses, names=names, ruled=ruled, settings=settings), losses


def compare(
    check: str,
    subject: str,
    swept: SweptValue,
    losses: Mapping[RunScale, LossGrid],
    *,
    names: Mapping[RunScale, str],
    ruled: Mapping[ScaleAxis, float],
    settings: Mapping[str, Any],
) -> CheckDocument:
    """Return the document that compares the best values at all scales with the best value at the base.

    The base is the first scale in ``names``. ``ruled`` has the exponent that the scaling rule gives to the value
    along each axis. ``settings`` must contain "rule" and "unit".
    """
    base, *others = names
    return verdict(
        check,
        subject,
        f"shift of the best {swept.label}, in octaves; regret with the base's best {swept.label}, in nats per token",
        [_row(swept, names[base], losses[base], names[scale], losses.get(scale)) for scale in others],
        curves=list(_curves(swept, losses, names)),
        settings={
            **settings,
            "left out": [
                f"{names[scale]}, {swept.key} {2**octave:g}"
                for scale, grid in losses.items()
                for octave in grid.diverged.tolist()
            ],
        },
        measured=_exponents(swept, losses, ruled, settings),
    )


def labels(scales: Sequence[RunScale]) -> dict[RunScale, str]:
    """Name each scale by what differs between scales, e.g. ``64x4 batch x2``. ``64x4`` is width x depth."""

    def label(scale: RunScale) -> str:
        parts = [f"{scale.width}x{scale.depth}"] if len({(s.width, s.depth) for s in scales}) > 1 else []
        for axis in ("batch", "tokens"):
            if len({getattr(s, axis) for s in scales}) > 1:
                parts.append(f"{axis} x{getattr(scale, axis):g}")
        return " ".join(parts)

    return {scale: label(scale) for scale in scales}


def _wider(
    family: ModelFamily, quantity: Quantity, scale: RunScale, grid: list[float], losses: LossGrid
) -> list[float]:
    """Return the grid. If its best value is at an edge, add one value beyond this edge, unless that is invalid."""
    if not losses.has_optimum or not losses.edge:
        return grid
    value = losses.following
    try:
        family.trial(RunSetting(scale, value, quantity=quantity))
    except InputError:
        return grid
    return sorted([*grid, value])


def extended(
    family: ModelFamily, quantity: Quantity, grids: Mapping[RunScale, Sequence[float]], store: RunStore, seeds: int
) -> tuple[dict[RunScale, list[float]], dict[RunScale, LossGrid]]:
    """Train on the grid of each scale, and extend grids whose best value is at an edge. Return (grids, losses)."""
    extending = {scale: list(grid) for scale, grid in grids.items()}
    losses = losses_of(family, quantity, extending, store, seeds)
    for _ in range(EXTENSIONS):
        wider = {scale: _wider(family, quantity, scale, grid, losses[scale]) for scale, grid in extending.items()}
        if wider == extending:
            break
        extending = wider
        losses = losses_of(family, quantity, extending, store, seeds)
    return extending, losses


def losses_of(
    family: ModelFamily, quantity: Quantity, grids: Mapping[RunScale, Sequence[float]], store: RunStore, seeds: int
) -> dict[RunScale, LossGrid]:
    """Train the runs that have no result yet. Return the losses on the grid of each scale."""
    settings = {
        (scale, value): RunSetting(scale, value, quantity=quantity) for scale, grid in grids.items() for value in grid
    }
    found = store.losses(family, settings, seeds)
    limit = divergence_limit(family.vocab_size)
    ended = {key: [loss if loss < limit else math.inf for loss in losses] for key, losses in found.items()}
    return {scale: LossGrid.of({value: ended[scale, value] for value in grid}) for scale, grid in grids.items()}


def along(losses: Mapping[RunScale, LossGrid], axis: ScaleAxis) -> dict[RunScale, LossGrid]:
    """Return the losses at the base (the first scale) and at scales that differ from the base only in ``axis``."""
    base = next(iter(losses))
    others = [name for name in AXES if name != axis]
    return {s: grid for s, grid in losses.items() if all(getattr(s, name) == getattr(base, name) for name in others)}


def _exponents(
    swept: SweptValue,
    losses: Mapping[RunScale, LossGrid],
    ruled: Mapping[ScaleAxis, float],
    settings: Mapping[str, Any],
) -> list[MeasuredRow]:
    """Return a row for each axis: the measured exponent of the best value over the axis, and the rule's exponent.

    An axis is left out if it has fewer than two scales, or if one of its scales has no optimum. A grid's values are
    relative to the rule's value, so the measured exponent is the rule's exponent plus the exponent fitted to the
    grids.
    """
    found = []
    for axis in AXES:
        on_axis = along(losses, axis)
        if len(on_axis) < 2 or not all(grid.has_optimum for grid in on_axis.values()):
            continue
        by_rule = ruled.get(axis, 0.0)
        fitted = exponent({getattr(scale, axis): grid for scale, grid in on_axis.items()})
        known = not any(grid.edge for grid in on_axis.values())  # beyond an edge, the best value is not known
        low, high = (end + by_rule if known and end is not None else None for end in (fitted.low, fitted.high))
        name = f"exponent of the best {swept.label} over {axis}"
        if axis in ("width", "depth") or settings["rule"] is None:
            name += f", {settings['unit']}"
        note = ""
        if low is not None and high is not None:
            whose = "the rule's exponent" if ruled else "0, which means no change,"
            note = f"{whose} is {'inside' if low <= by_rule <= high else 'OUTSIDE'} the 95% interval"
        elif not known:
            note = f"no interval: a best {swept.label} is at the edge of its grid"
        found.append(Estimate(fitted.value + by_rule, low, high).row(name, note, expected=by_rule))
    return found


def _curves(
    swept: SweptValue, losses: Mapping[RunScale, LossGrid], names: Mapping[RunScale, str]
) -> Iterator[VerdictCurve]:
    """Yield the loss curve and the minimum of each scale, and the best values along each axis."""
    best: dict[RunScale, tuple[float, float, float]] = {}
    for scale, grid in losses.items():
        by_seed = [list(runs.values()) for runs in grid.runs]
        drawn = curve(names[scale], swept.key, "loss", (2**grid.octaves).tolist(), by_seed)
        yield drawn.model_copy(update={"y": grid.means.tolist()})
        if grid.has_optimum:
            found = estimate(lambda grids: grids[0].optimum(), [grid], paired=True)
            low, high = found.ends
            best[scale] = 2**found.value, 2**low, 2**high
            y = [float(grid.lowest)]
            yield VerdictCurve(
                module=names[scale], axis=swept.key, quantity="optimum", x=[best[scale][0]], y=y, low=y, high=y
            )
    for axis in AXES:
        scales = sorted((scale for scale in along(losses, axis) if scale in best), key=lambda s: getattr(s, axis))
        if len(scales) > 1:
            middle, low_ends, high_ends = zip(*(best[scale] for scale in scales), strict=True)
            yield VerdictCurve(
                module=f"best {swept.label}",
                axis=axis,
                quantity="best",
                x=[float(getattr(scale, axis)) for scale in scales],
                y=list(middle),
                low=list(low_ends),
                high=list(high_ends),
            )


def _row(swept: SweptValue, base_name: str, base: LossGrid, name: str, target: LossGrid | None) -> VerdictRow:
    """Return the row that compares the scale ``name`` with the base. ``target`` is None for a scale without runs."""
    limit, label = swept.shift_limit, swept.label
    row = partial(VerdictRow, module=f"best {label}, octaves", axis=f"{base_name} -> {name}", limit=limit)
    unjudged = partial(row, slope=None, passed=False, undecided=True, beyond=0.0)
    if target is None:
        return unjudged(note=f"undecided: {name} was not trained, because {_no_optimum(swept, {base_name: base})}")
    if len(base.octaves) and (best := base.octaves[base.means.argmin()]) in target.diverged:
        note = f"the base's best {label}, {2**best:.3g}, diverges at {name}"
        return row(slope=None, passed=False, note=note, beyond=math.inf)
    no_optimum = _no_optimum(swept, {base_name: base, name: target})
    if not (base.has_optimum and target.has_optimum):
        return unjudged(note=f"undecided: {no_optimum}")
    octaves, regret = shift(base, target)
    (low, high), (cheapest, dearest) = octaves.ends, regret.ends
    parts = {
        f"best {label}, base": 2 ** base.optimum(),
        f"best {label}, target": 2 ** target.optimum(),
        "shift": octaves.value,
        "low": low,
        "high": high,
        "regret": regret.value,
        "regret, low": cheapest,
        "regret, high": dearest,
        "noise": target.noise,
    }
    # Outside the target's grid the regret is extrapolated, and runs may diverge there.
    inside = bool(target.octaves[0] <= base.optimum() <= target.octaves[-1])
    beyond = max(abs(octaves.value) - limit, 0.0)
    cost = f"with the base's best {label}, the loss of {name} is {regret.value:.2g} nats above its minimum"
    failure, doubt = "", ""  # why the row fails, and why it is undecided
    if target.edge and not base.edge and inside and octaves.low is not None and cheapest > REGRET_LIMIT:
        # If there is a better value beyond the edge, the regret is even larger.
        failure = f"{cost}, and the best {label} of {name} is at or beyond the edge of the grid"
    elif no_optimum:
        doubt, beyond = no_optimum, 0.0
    elif octaves.low is None:
        doubt, beyond = f"no interval with only one seed; give {swept.more_seeds} 3", 0.0
    elif dearest <= REGRET_LIMIT or (low >= -limit and high <= limit and cheapest <= REGRET_LIMIT):
        beyond = 0.0
        if not inside:
            doubt = f"the base's best {label} is outside the grid of {name}; "
            doubt += f"give {swept.option} around {2 ** base.optimum():.3g}"
    elif cheapest <= REGRET_LIMIT and low <= limit and high >= -limit:
        seeds = max(len(runs) for grid in (base, target) for runs in grid.runs)
        doubt = f"the difference is within the noise between seeds; give {swept.more_seeds} {2 * seeds}"
    else:
        failure = f"the best {label} changes by a factor of {2**octaves.value:.2g}; {cost}"
    note = f"undecided: {doubt}" if doubt else failure
    return row(slope=octaves.value, parts=parts, passed=not note, undecided=bool(doubt), note=note, beyond=beyond)


def _no_optimum(swept: SweptValue, grids: Mapping[str, LossGrid]) -> str:
    """Say why the best value is unknown at one of the scales, and what to type. Return "" if all are known."""
    for name, grid in grids.items():
        if not grid.has_optimum:
            count, lowest = len(grid.octaves), 2 ** min([*grid.octaves, *grid.diverged])
            few = f"{name} has {count} values of {swept.label} without a diverged run, and an optimum needs three"
            return f"{few}; give {swept.option} below {lowest:.3g}"
    edges = [name for name, grid in grids.items() if grid.edge]
    if not edges:
        return ""
    following = grids[edges[0]].following
    where = f"the best {swept.label} of {' and '.join(edges)} is at the edge of the grid"
    return f"{where}; give {swept.option} around {following:.3g}"
