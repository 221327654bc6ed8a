"""Sweeps: is the best value of a hyperparameter at one scale also the best at other scales?

The checks transfer (over width and depth), duration, batch, decay and init all use sweeps. They train models over
a grid of values of one hyperparameter, with some seeds each, at two or more scales. Values are in base coordinates,
so under a right rule the optima of all scales are equal. A sweep measures three numbers (compare Kalra and Barkeshli
2026, arXiv 2605.21486): the shift of the optimum in octaves, with a bootstrap interval; the regret, which is how much
worse in nats the base's best value is at the other scale; and the noise between seeds. A flat optimum shifts easily
at no cost, and at a steep optimum a small shift is expensive. So both shift and regret are judged. They are judged by
the ends of their intervals, so that a check does not pass by noise:

- passed: the upper end of the regret is within its limit; or both ends of the shift and the lower end of the regret
  are within their limits;
- failed: even the lower end of the regret is above its limit, or both ends of the shift are beyond its limit;
- undecided (does not pass): anything else.

A grid whose optimum is at its edge is extended by one step at that scale, up to :data:`EXTENSIONS` times.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np

from leaven.documents.checks import CheckDocument, MeasuredRow, VerdictCurve, VerdictRow
from leaven.recipe.errors import InputError
from leaven.verification.model_instance import Quantity, RunScale, RunSetting, ScaleAxis
from leaven.verification.optimum import LossGrid, estimate, exponent, shift
from leaven.verification.runs import RunStore
from leaven.verification.subject import ModelFamily
from leaven.verification.verdict import curve, verdict

REGRET_LIMIT = 0.01
"""Nats per token. Losses of published scaling laws are given to a hundredth."""

EXTENSIONS = 3
"""Steps by which a grid grows on either side."""

AXES: tuple[ScaleAxis, ...] = ("width", "depth", "batch", "tokens")


@dataclass(frozen=True)
class SweptValue:
    """A hyperparameter that a check sweeps."""

    key: Quantity
    label: str  # in tables and messages
    option: str  # command-line option for the grid
    octaves: tuple[int, ...]  # the default grid around the family's own value
    shift_limit: float  # allowed shift in octaves: half a step of the default grid

    def grid(self, family: ModelFamily) -> list[float]:
        """Return the default grid."""
        return [family.value(self.key) * 2.0**octave for octave in self.octaves]


SWEPT: Mapping[Quantity, SweptValue] = {
    "lr": SweptValue("lr", "lr", "--lrs", (-2, -1, 0, 1, 2), 0.5),
    # The loss hardly depends on the decay: steps of a factor 4 show a minimum where steps of 2 show noise.
    "weight_decay": SweptValue("weight_decay", "weight decay", "--decays", (-4, -2, 0, 2, 4), 1.0),
    "init_std": SweptValue("init_std", "init std", "--stds", (-2, -1, 0, 1, 2), 0.5),
}


def sweep(
    check: str,
    family: ModelFamily,
    quantity: Quantity,
    scales: Sequence[RunScale],
    grid: Sequence[float],
    *,
    store: RunStore,
    seeds: int = 3,
) -> tuple[CheckDocument, dict[RunScale, LossGrid]]:
    """Run or resume a sweep. Return its document and the losses at each scale.

    The first scale is the base of the comparison; ``grid`` has values in the family's unit.

    Raises:
        InputError: if there are fewer than two scales or three values, a scale does not fit, or the folder is in use.
        ChecksStopped: if the runs were stopped; finished runs are in the store's folder.
    """
    swept, scales, values = SWEPT[quantity], list(dict.fromkeys(scales)), sorted(set(grid))
    if len(scales) < 2 or len(values) < 3:
        raise InputError(f"this check needs at least two scales and three values of {swept.label} ({swept.option})")
    losses = _extended(family, swept, dict.fromkeys(scales, values), store, seeds)
    names = labels(scales)
    base = scales[0]
    document = verdict(
        check,
        family.name,
        f"shift of the best {swept.label} in octaves; regret of the base's best in nats per token",
        [_row(swept, {names[base]: losses[base], names[scale]: losses[scale]}, seeds) for scale in scales[1:]],
        curves=list(_curves(swept, losses, names)),
        settings={
            "rule": family.rule,
            "scales": list(names.values()),
            swept.option.removeprefix("--"): values,
            "unit": family.unit,
            "seeds": seeds,
            "tokens": family.tokens,
            "batch_tokens": family.batch_tokens,
        },
        measured=_exponents(family, swept, losses),
    )
    return document, losses


def labels(scales: Sequence[RunScale]) -> dict[RunScale, str]:
    """Return short names that distinguish the scales: ``64x4``, ``tokens x2``."""

    def label(scale: RunScale) -> str:
        parts = [f"{scale.width}x{scale.depth}"] if len({(s.width, s.depth) for s in scales}) > 1 else []
        for axis in ("batch", "tokens"):
            if len({getattr(s, axis) for s in scales}) > 1:
                parts.append(f"{axis} x{getattr(scale, axis):g}")
        return " ".join(parts)

    return {scale: label(scale) for scale in scales}


def _extended(
    family: ModelFamily, swept: SweptValue, grids: Mapping[RunScale, list[float]], store: RunStore, seeds: int
) -> dict[RunScale, LossGrid]:
    """Return the losses at each scale, on grids that were extended until they contain the optimum."""
    losses = losses_of(family, swept, grids, store, seeds)
    for _ in range(EXTENSIONS):
        wider = {scale: _wider(family, swept, scale, grids[scale], losses[scale]) for scale in grids}
        if wider == grids:
            break
        grids = wider
        losses = losses_of(family, swept, grids, store, seeds)
    return losses


def _wider(
    family: ModelFamily, swept: SweptValue, scale: RunScale, grid: list[float], losses: LossGrid
) -> list[float]:
    """Return the grid with one more value at the edge where the optimum is, if that value is valid."""
    if not losses.edge:
        return grid
    value = grid[0] ** 2 / grid[1] if losses.edge < 0 else grid[-1] ** 2 / grid[-2]
    try:
        family.trial(RunSetting(scale, value, 0, swept.key))
    except InputError:
        return grid
    return sorted([*grid, value])


def losses_of(
    family: ModelFamily, swept: SweptValue, grids: Mapping[RunScale, Sequence[float]], store: RunStore, seeds: int
) -> dict[RunScale, LossGrid]:
    """Train all runs and return the losses on the grid of each scale."""
    runs = {
        (scale, value, seed): family.trial(RunSetting(scale, value, seed, swept.key))
        for scale, grid in grids.items()
        for value in grid
        for seed in range(seeds)
    }
    outcome = store.run(runs.values())
    return {
        scale: LossGrid.of(
            {value: [outcome(runs[scale, value, seed]).loss for seed in range(seeds)] for value in grid}
        )
        for scale, grid in grids.items()
    }


def along(losses: Mapping[RunScale, LossGrid], axis: ScaleAxis) -> dict[RunScale, LossGrid]:
    """Return the losses at the base (the first scale) and at the scales that differ from it only along ``axis``."""
    base = next(iter(losses))
    others = [name for name in AXES if name != axis]
    return {s: grid for s, grid in losses.items() if all(getattr(s, name) == getattr(base, name) for name in others)}


def _exponents(family: ModelFamily, swept: SweptValue, losses: Mapping[RunScale, LossGrid]) -> list[MeasuredRow]:
    """Return the measured exponent of the best value over each axis, including the rule's own exponent."""
    found = []
    for axis in AXES:
        on_axis = along(losses, axis)
        if len(on_axis) < 2 or not all(grid.finite for grid in on_axis.values()):
            continue
        ruled = family.exponent(swept.key, axis)
        fitted = exponent({getattr(scale, axis): grid for scale, grid in on_axis.items()})
        low, high = (None if end is None else end + ruled for end in (fitted.low, fitted.high))
        name = f"exponent of the best {swept.label} over {axis}"
        if axis in ("width", "depth") or family.rule is None:
            name += f", {family.unit}"
        note = ""
        if low is not None and high is not None:
            note = "the rule's is inside" if low <= ruled <= high else "the rule's is OUTSIDE"
        found.append(
            MeasuredRow(name=name, value=fitted.value + ruled, low=low, high=high, expected=ruled, note=note)
        )
    return found


def _curves(
    swept: SweptValue, losses: Mapping[RunScale, LossGrid], names: Mapping[RunScale, str]
) -> Iterator[VerdictCurve]:
    """Yield the loss over the values, the optimum of each scale, and the best value over each axis."""
    best: dict[RunScale, tuple[float, float, float]] = {}
    for scale, grid in losses.items():
        yield curve(names[scale], swept.key, "loss", (2**grid.octaves).tolist(), grid.losses.tolist())
        if grid.finite:
            found = estimate(lambda grids: grids[0].optimum(), [grid])
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


def _row(swept: SweptValue, pair: Mapping[str, LossGrid], seeds: int) -> VerdictRow:
    """Return the verdict on two scales, given by name; the first is the base."""
    limit = swept.shift_limit
    row = partial(VerdictRow, module=f"best {swept.label}, octaves", axis=" -> ".join(pair), limit=limit)
    base, target = pair.values()
    for name, grid in pair.items():
        if not grid.finite:
            value = 2 ** grid.octaves[~np.isfinite(grid.losses).all(1)][0]
            note = f"a loss of {name} is not finite, at {swept.label} {value:.3g}"
            return row(slope=None, passed=False, note=note, beyond=math.inf)
    octaves, regret = shift(base, target)
    low, high = octaves.ends
    row = partial(
        row,
        slope=octaves.value,
        parts={
            f"best {swept.label}, base": 2 ** base.optimum(),
            f"best {swept.label}, target": 2 ** target.optimum(),
            "shift": octaves.value,
            "low": low,
            "high": high,
            "regret": regret.value,
            "regret, low": regret.ends[0],
            "regret, high": regret.ends[1],
            "noise": target.noise,
        },
    )
    edges = [name for name, grid in pair.items() if grid.edge]
    if edges:
        note = f"undecided: the best {swept.label} of {' and '.join(edges)} is at the edge of the extended grid; "
        note += f"give {swept.option} {_around_edge(pair[edges[0]])}"
        return row(passed=False, note=note, undecided=True)
    if seeds < 2:
        return row(passed=False, note="undecided: one seed has no interval; give --seeds 3", undecided=True)
    costly, cheap = regret.ends[0] > REGRET_LIMIT, regret.ends[1] <= REGRET_LIMIT
    near = low >= -limit and high <= limit
    far = low > limit or high < -limit
    if cheap or (near and not costly):
        return row(passed=True)
    beyond = max(abs(octaves.value) - limit, 0.0)
    if costly or far:
        note = f"the best {swept.label} changes by a factor of {2**octaves.value:.2g}; "
        note += f"the base's best value costs {regret.value:.2g} nats"
        return row(passed=False, note=note, beyond=beyond)
    note = f"undecided: the difference is within the noise between seeds; give --seeds {2 * seeds}"
    return row(passed=False, note=note, beyond=beyond, undecided=True)


def _around_edge(grid_losses: LossGrid) -> str:
    """Return a grid of five values centred at the edge, as the text of an option."""
    values = (2**grid_losses.octaves).tolist()
    steps = [high / low for low, high in pairwise(values)]
    step, edge = (steps[0], values[0]) if grid_losses.edge < 0 else (steps[-1], values[-1])
    return ",".join(f"{edge * step**power:.3g}" for power in range(-2, 3))
