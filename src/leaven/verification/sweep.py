"""Sweeps: is the best value of a hyperparameter at one scale also the best at others?

The checks transfer (over width and depth), duration, batch, decay and init all work like this. They train models over
a grid of values of one hyperparameter, with some seeds each, at two or more scales. Values are in base coordinates,
so under a right rule the optima of all scales are equal. Three numbers (compare Kalra and Barkeshli 2026, arXiv
2605.21486): how far the optimum moves in octaves with a bootstrap interval, what the base's best value costs the
target in nats, and the noise between seeds. A flat optimum shifts easily at no cost, and in a steep one a small shift
is expensive. So both are judged by the ends of their intervals, since noise must not pass:

- passed: the regret is at most its limit even at the upper end; or the shift lies within its limit at both ends, and
  the regret is not above its limit at the lower one;
- failed: the regret is above its limit at the lower end too, or both ends of the shift lie beyond its limit;
- undecided (does not pass): anything else.

A grid whose optimum is at its edge is extended by one step at that scale, up to :data:`EXTENSIONS` times.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from leaven.recipe.errors import InputError
from leaven.verification.model_family import ModelFamily, Quantity, RunScale, RunSetting, ScaleAxis
from leaven.verification.optimum import LossGrid, estimate, exponent, shift
from leaven.verification.runs import RunStore
from leaven.verification.verdict import CheckCurve, CheckRow, MeasuredValue, Verdict, curve

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
    option: str  # of the command line, for the grid
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
) -> tuple[Verdict, dict[RunScale, LossGrid]]:
    """Run a sweep, or resume it. The first scale is the base of the comparison; values are in the family's unit.

    Returns the verdict, which is not saved yet, and the losses behind it.

    Raises:
        InputError: if there are fewer than two scales or three values, a scale does not fit, or the folder is in use.
        ChecksStopped: if the store was asked to stop; finished runs are in its folder.
    """
    swept, scales = SWEPT[quantity], list(dict.fromkeys(scales))
    if len(scales) < 2 or len(set(grid)) < 3:
        raise InputError(f"this check needs two scales and three values of {swept.label} ({swept.option}) at least")
    grids = {scale: sorted(set(grid)) for scale in scales}
    valleys = _extended(family, swept, grids, store, seeds)
    names = labels(scales)
    base = scales[0]
    verdict = Verdict(
        check=check,
        subject=family.name,
        quantity=f"shift of the best {swept.label} in octaves; regret of the base's best in nats per token",
        rows=tuple(
            _row(swept, {names[base]: valleys[base], names[scale]: valleys[scale]}, seeds) for scale in scales[1:]
        ),
        curves=tuple(_curves(swept, valleys, names)),
        settings={
            "rule": family.rule,
            "scales": list(names.values()),
            swept.option.removeprefix("--"): sorted(set(grid)),
            "unit": family.unit,
            "seeds": seeds,
            "tokens": family.tokens,
            "batch_tokens": family.batch_tokens,
        },
        measured=tuple(_exponents(family, swept, valleys)),
    )
    return verdict, valleys


def transfer(
    family: ModelFamily, scales: Sequence[tuple[int, int]], lrs: Sequence[float], store: RunStore, *, seeds: int = 3
) -> Verdict:
    """Check that the lr that is best at the first width and depth is best at the others; see :func:`sweep`."""
    sizes = [RunScale(*pair) for pair in scales]
    return store.keep(sweep("transfer", family, "lr", sizes, lrs, store=store, seeds=seeds)[0])


def batch(
    family: ModelFamily,
    scale: tuple[int, int],
    ratios: Sequence[float],
    lrs: Sequence[float],
    store: RunStore,
    *,
    seeds: int = 3,
) -> Verdict:
    """Check that the lr that is best at one batch is best at others, for as many tokens; see :func:`sweep`."""
    scales = [RunScale(*scale, batch=ratio) for ratio in (1.0, *ratios)]
    return store.keep(sweep("batch", family, "lr", scales, lrs, store=store, seeds=seeds)[0])


def decay(
    family: ModelFamily,
    scales: Sequence[tuple[int, int]],
    durations: Sequence[float],
    decays: Sequence[float],
    store: RunStore,
    *,
    seeds: int = 3,
) -> Verdict:
    """Check that the weight decay that is best at the first scale is best at others and in longer runs; see
    :func:`sweep`."""
    every = [*(RunScale(*pair) for pair in scales), *(RunScale(*scales[0], tokens=ratio) for ratio in durations)]
    return store.keep(sweep("decay", family, "weight_decay", every, decays, store=store, seeds=seeds)[0])


def init(
    family: ModelFamily, scales: Sequence[tuple[int, int]], stds: Sequence[float], store: RunStore, *, seeds: int = 3
) -> Verdict:
    """Check that the init std that is best at the first scale is best at the others; see :func:`sweep`."""
    sizes = [RunScale(*pair) for pair in scales]
    return store.keep(sweep("init", family, "init_std", sizes, stds, store=store, seeds=seeds)[0])


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
    """Return the losses at each scale, over grids that were extended until they contain the optimum."""
    for extension in range(EXTENSIONS + 1):
        valleys = losses_of(family, swept, grids, store, seeds)
        if extension == EXTENSIONS:
            break
        wider = {scale: _wider(family, swept, scale, grids[scale], valleys[scale]) for scale in grids}
        if wider == grids:
            break
        grids = wider
    return valleys


def _wider(
    family: ModelFamily, swept: SweptValue, scale: RunScale, grid: list[float], grid_losses: LossGrid
) -> list[float]:
    """Return the grid with one more step at the edge where the optimum is, if that value is valid."""
    if not grid_losses.edge:
        return grid
    value = grid[0] ** 2 / grid[1] if grid_losses.edge < 0 else grid[-1] ** 2 / grid[-2]
    try:
        family.trial(setting(swept, scale, value, 0))
    except InputError:
        return grid
    return sorted([*grid, value])


def losses_of(
    family: ModelFamily, swept: SweptValue, grids: Mapping[RunScale, Sequence[float]], store: RunStore, seeds: int
) -> dict[RunScale, LossGrid]:
    """Train all runs and return the losses over each scale's grid."""
    runs = {
        (scale, value, seed): family.trial(setting(swept, scale, value, seed))
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


def setting(swept: SweptValue, scale: RunScale, value: float, seed: int, *, ruled: bool = True) -> RunSetting:
    """Return the setting of one run."""
    return RunSetting(
        scale.width, scale.depth, value, seed, scale.batch, scale.tokens, ruled=ruled, quantity=swept.key
    )


def along(valleys: Mapping[RunScale, LossGrid], axis: ScaleAxis) -> dict[RunScale, LossGrid]:
    """Return the base (the first) and the scales that differ from it in this axis only."""
    base = next(iter(valleys))
    others = [name for name in AXES if name != axis]
    return {s: v for s, v in valleys.items() if all(getattr(s, name) == getattr(base, name) for name in others)}


def _exponents(family: ModelFamily, swept: SweptValue, valleys: Mapping[RunScale, LossGrid]) -> list[MeasuredValue]:
    """Return the measured exponent of the best value over each axis, including the rule's own exponent."""
    found = []
    for axis in AXES:
        on_axis = along(valleys, axis)
        if len(on_axis) < 2 or not all(np.isfinite(grid_losses.losses).all() for grid_losses in on_axis.values()):
            continue
        ruled = family.exponent(swept.key, axis)
        fitted = exponent({getattr(scale, axis): grid_losses for scale, grid_losses in on_axis.items()})
        low, high = (None if end is None else end + ruled for end in (fitted.low, fitted.high))
        name = f"exponent of the best {swept.label} over {axis}"
        if axis in ("width", "depth") or family.rule is None:
            name += f", {family.unit}"
        note = ""
        if low is not None and high is not None:
            note = "the rule's is inside" if low <= ruled <= high else "the rule's is OUTSIDE"
        found.append(MeasuredValue(name, fitted.value + ruled, low, high, ruled, note))
    return found


def _curves(
    swept: SweptValue, valleys: Mapping[RunScale, LossGrid], names: Mapping[RunScale, str]
) -> Iterator[CheckCurve]:
    """Yield the loss over the values, the optimum of each scale, and the best value over each axis."""
    best: dict[RunScale, tuple[float, float, float]] = {}
    for scale, grid_losses in valleys.items():
        yield curve(names[scale], swept.key, "loss", (2**grid_losses.octaves).tolist(), grid_losses.losses.tolist())
        if np.isfinite(grid_losses.losses).all():
            found = estimate(lambda valleys: valleys[0].optimum(), [grid_losses])
            ends = [found.value if end is None else end for end in (found.low, found.high)]
            best[scale] = 2**found.value, 2 ** ends[0], 2 ** ends[1]
            lowest = (grid_losses.lowest,)
            yield CheckCurve(names[scale], swept.key, "optimum", best[scale][:1], lowest, lowest, lowest)
    for axis in AXES:
        scales = sorted((scale for scale in along(valleys, axis) if scale in best), key=lambda s: getattr(s, axis))
        if len(scales) > 1:
            x = tuple(float(getattr(scale, axis)) for scale in scales)
            y, low, high = zip(*(best[scale] for scale in scales), strict=True)
            yield CheckCurve(f"best {swept.label}", axis, "best", x, y, low, high)


def _row(swept: SweptValue, pair: Mapping[str, LossGrid], seeds: int) -> CheckRow:
    """Judge two scales, given by name; the first is the base."""
    module, axis, limit = f"best {swept.label}, octaves", " -> ".join(pair), swept.shift_limit
    small, big = pair.values()
    for name, grid_losses in pair.items():
        lost = 2 ** grid_losses.octaves[~np.isfinite(grid_losses.losses).all(1)]
        if lost.size:
            note = f"a loss of {name} is not finite, at {swept.label} {lost[0]:.3g}"
            return CheckRow(module, axis, None, limit, False, {}, note, math.inf)
    found = shift(small, big)
    parts = {
        f"best {swept.label}, base": 2 ** small.optimum(),
        f"best {swept.label}, target": 2 ** big.optimum(),
        "shift": found.octaves,
        "low": found.low,
        "high": found.high,
        "regret": found.regret,
        "regret, low": found.regret_low,
        "regret, high": found.regret_high,
        "noise": big.noise,
    }
    edges = [name for name, grid_losses in pair.items() if grid_losses.edge]
    if edges:
        note = f"undecided: the best {swept.label} of {' and '.join(edges)} is at the edge of the extended grid; "
        note += f"give {swept.option} {_round_the_edge(pair[edges[0]])}"
        return CheckRow(module, axis, found.octaves, limit, False, parts, note, undecided=True)
    if seeds < 2:
        note = "undecided: one seed has no interval; give --seeds 3"
        return CheckRow(module, axis, found.octaves, limit, False, parts, note, undecided=True)
    costly, cheap = found.regret_low > REGRET_LIMIT, found.regret_high <= REGRET_LIMIT
    near = found.low >= -limit and found.high <= limit
    far = found.low > limit or found.high < -limit
    if cheap or (near and not costly):
        return CheckRow(module, axis, found.octaves, limit, True, parts)
    beyond = max(abs(found.octaves) - limit, 0.0)
    if costly or far:
        note = f"the best {swept.label} changes by a factor of {2**found.octaves:.2g}; "
        note += f"the base's best value costs {found.regret:.2g} nats"
        return CheckRow(module, axis, found.octaves, limit, False, parts, note, beyond)
    note = f"undecided: the difference is within the noise between seeds; give --seeds {2 * seeds}"
    return CheckRow(module, axis, found.octaves, limit, False, parts, note, beyond, undecided=True)


def _round_the_edge(grid_losses: LossGrid) -> str:
    """Return a grid of five values centred at the edge, as the text of an option."""
    values = (2**grid_losses.octaves).tolist()
    steps = [high / low for low, high in pairwise(values)]
    step, edge = (steps[0], values[0]) if grid_losses.edge < 0 else (steps[-1], values[-1])
    return ",".join(f"{edge * step**power:.3g}" for power in range(-2, 3))
