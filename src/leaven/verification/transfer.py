"""The transfer check: is the lr that was best for the small model best for the big one?

The loss over a grid of lrs at two or more scales, some seeds each. An lr is given in base coordinates, so under a
true rule the valleys lie above each other. Three numbers (compare Kalra and Barkeshli 2026, arXiv 2605.21486): how
far the optimum moved in octaves with a bootstrap interval, what the small model's best lr costs the big one in nats,
and the noise between seeds beside both. A flat valley moves easily at no cost, a steep one costs with little
movement; so both are judged, by the ends of their intervals, for noise is no pass:

- passed: the regret is at most its limit even at the upper end; or the shift lies within its limit at both ends, and
  the regret is not above its limit at the lower one;
- failed: the regret is above its limit at the lower end too, or both ends of the shift lie beyond its limit;
- undecided, which is no pass: anything else. More seeds make intervals narrower.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from leaven.recipe.errors import InputError
from leaven.verification.family import Family, Setting
from leaven.verification.optimum import Valley, shift
from leaven.verification.runs import keep, run_all
from leaven.verification.verdict import Curve, Row, Verdict, curve

MODULE = "best lr, octaves"
SHIFT_LIMIT = 0.5
"""Octaves, half of a grid step of a factor 2: less is not told apart from none on such a grid."""

REGRET_LIMIT = 0.01
"""Nats per token. Losses of published scaling laws are given to a hundredth."""

Scale = tuple[int, int]
"""Width and depth."""


def transfer(
    family: Family,
    scales: Sequence[Scale],
    lrs: Sequence[float],
    folder: Path,
    *,
    seeds: int = 3,
    workers: int = 2,
    on_run: Callable[[int, int], None] = lambda done, total: None,
    stop: Callable[[], bool] = lambda: False,
) -> Verdict:
    """Run the check, or go on with it. The first scale is the base of the comparison; lrs are in the family's unit.

    Raises:
        InputError: if there are fewer than two scales or three lrs, a scale does not fit, or the folder is in use.
        Stopped: if ``stop`` said so; what has ended is in the folder.
    """
    if len(set(scales)) < 2 or len(set(lrs)) < 3:
        raise InputError("a transfer check needs two scales (--scales 64x4,128x4) and three lrs (--lrs) at least")
    grid = sorted(set(lrs))

    runs = {
        (scale, lr, seed): family.trial(Setting(*scale, lr, seed))
        for scale in scales
        for lr in grid
        for seed in range(seeds)
    }
    outcome = run_all(runs.values(), folder, workers, on_run=on_run, stop=stop)
    losses = {
        scale: {lr: [outcome(runs[scale, lr, seed]).loss for seed in range(seeds)] for lr in grid} for scale in scales
    }
    valleys = {scale: Valley.of(losses[scale]) for scale in scales}
    rows: list[Row] = []
    for scale in scales[1:]:
        rows.append(_row(scales[0], scale, valleys[scales[0]], valleys[scale]))
    verdict = Verdict(
        check="transfer",
        subject=family.name,
        quantity="shift of the best lr in octaves; regret of the base's best lr in nats per token",
        rows=tuple(rows),
        curves=tuple(_curve(scale, losses[scale], grid) for scale in scales),
        settings={
            "rule": family.rule,
            "scales": [name(scale) for scale in scales],
            "lrs": grid,
            "lr": family.lr_unit,
            "seeds": seeds,
            "tokens": family.tokens,
        },
    )
    return keep(verdict, folder)


def name(scale: Scale) -> str:
    return f"{scale[0]}x{scale[1]}"


def _curve(scale: Scale, losses: dict[float, list[float]], grid: Sequence[float]) -> Curve:
    return curve(name(scale), "lr", "loss", grid, [losses[lr] for lr in grid])


def _row(base: Scale, target: Scale, small: Valley, big: Valley) -> Row:
    axis = f"{name(base)} -> {name(target)}"
    for scale, valley in ((base, small), (target, big)):
        lost = 2 ** valley.octaves[~np.isfinite(valley.losses).all(1)]
        if lost.size:
            note = f"a loss of {name(scale)} is no number, at lr {lost[0]:.3g}"
            return Row(MODULE, axis, None, SHIFT_LIMIT, False, {}, note, math.inf)
    found = shift(small, big)
    parts = {
        "best lr, base": 2 ** small.optimum(),
        "best lr, target": 2 ** big.optimum(),
        "shift": found.octaves,
        "low": found.low,
        "high": found.high,
        "regret": found.regret,
        "regret, low": found.regret_low,
        "regret, high": found.regret_high,
        "noise": big.noise,
    }
    edges = [name(scale) for scale, valley in ((base, small), (target, big)) if valley.at_the_edge]
    if edges:
        note = f"undecided: the best lr of {' and '.join(edges)} is at the edge of the grid: widen --lrs"
        return Row(MODULE, axis, found.octaves, SHIFT_LIMIT, False, parts, note, undecided=True)
    if big.noise is None or small.noise is None:
        note = "undecided: one seed has no interval; more --seeds"
        return Row(MODULE, axis, found.octaves, SHIFT_LIMIT, False, parts, note, undecided=True)
    costly, cheap = found.regret_low > REGRET_LIMIT, found.regret_high <= REGRET_LIMIT
    near = found.low >= -SHIFT_LIMIT and found.high <= SHIFT_LIMIT
    far = found.low > SHIFT_LIMIT or found.high < -SHIFT_LIMIT
    if cheap or (near and not costly):
        return Row(MODULE, axis, found.octaves, SHIFT_LIMIT, True, parts)
    beyond = max(abs(found.octaves) - SHIFT_LIMIT, 0.0)
    if costly or far:
        note = f"the best lr moves by a factor of {2**found.octaves:.2g}, the base's costs {found.regret:.2g} nats"
        return Row(MODULE, axis, found.octaves, SHIFT_LIMIT, False, parts, note, beyond)
    note = "undecided: the noise between seeds hides it; more --seeds"
    return Row(MODULE, axis, found.octaves, SHIFT_LIMIT, False, parts, note, beyond, undecided=True)
