"""The transfer check: is the lr that was best for the small model best for the big one?

The loss over a grid of lrs at two or more scales, some seeds each. An lr is given in base coordinates, so under a
true rule the valleys lie above each other. Three numbers (compare Kalra and Barkeshli 2026, arXiv 2605.21486): how
far the optimum moved in octaves with a bootstrap interval, what the small model's best lr costs the big one in nats,
and the noise between seeds beside both. A flat valley moves easily at no cost, a steep one costs with little
movement; so both are judged.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from leaven.recipe.errors import InputError
from leaven.recipe.recipe import Recipe
from leaven.scaling.transfer import transfer as moved
from leaven.verification.optimum import Valley, shift
from leaven.verification.runs import run_all
from leaven.verification.verdict import Curve, Row, Verdict, curve

SHIFT_LIMIT = 0.5
"""Octaves, half of a grid step of a factor 2: less is not told apart from none on such a grid."""

REGRET_LIMIT = 0.01
"""Nats per token, or twice the noise of a mean over seeds where that is more. Losses of published scaling laws are
given to a hundredth."""

Scale = tuple[int, int]
"""Width and depth."""


def transfer(
    recipe: Recipe,
    scales: Sequence[Scale],
    lrs: Sequence[float],
    folder: Path,
    *,
    seeds: int = 3,
    workers: int = 2,
    on_run: Callable[[int, int], None] = lambda done, total: None,
    stop: Callable[[], bool] = lambda: False,
) -> Verdict:
    """Run the check, or go on with it. The first scale is the base of the comparison.

    Raises:
        InputError: if there are fewer than two scales or three lrs, a scale does not fit, or the folder is in use.
        Stopped: if ``stop`` said so; what has ended is in the folder.
    """
    if len(set(scales)) < 2 or len(set(lrs)) < 3:
        raise InputError("a transfer check needs two scales (--scales 64x4,128x4) and three lrs (--lrs) at least")
    grid = sorted(set(lrs))

    def member(scale: Scale, lr: float, seed: int) -> Recipe:
        width, depth = scale
        big = moved(recipe, width=width, depth=depth)
        return big.replace({"hyperparameters.lr": lr, "data.seed": recipe.data.seed + seed})

    every = {(s, lr, seed): member(s, lr, seed) for s in scales for lr in grid for seed in range(seeds)}
    outcome = run_all(every.values(), folder, workers, on_run=on_run, stop=stop)
    losses = {
        scale: {lr: [outcome(every[scale, lr, seed]).loss for seed in range(seeds)] for lr in grid}
        for scale in scales
    }
    valleys = {scale: Valley.of(losses[scale]) for scale in scales}
    rows: list[Row] = []
    for scale in scales[1:]:
        rows += _rows(scales[0], scale, valleys[scales[0]], valleys[scale], seeds)
    return Verdict(
        check="transfer",
        subject=recipe.name,
        quantity="shift of the best lr in octaves; regret of the base's best lr in nats per token",
        rows=tuple(rows),
        curves=tuple(_curve(scale, losses[scale], grid) for scale in scales),
        settings={
            "rule": recipe.scaling.rule,
            "scales": [name(scale) for scale in scales],
            "lrs": grid,
            "seeds": seeds,
            "tokens": recipe.data.tokens,
        },
    )


def name(scale: Scale) -> str:
    return f"{scale[0]}x{scale[1]}"


def _curve(scale: Scale, losses: dict[float, list[float]], grid: Sequence[float]) -> Curve:
    return curve(name(scale), "lr", "loss", grid, [losses[lr] for lr in grid])


def _rows(base: Scale, target: Scale, small: Valley, big: Valley, seeds: int) -> list[Row]:
    found = shift(small, big)
    axis = f"{name(base)} -> {name(target)}"
    edges = [name(scale) for scale, valley in ((base, small), (target, big)) if valley.at_the_edge]
    outside = f"the best lr of {' and '.join(edges)} is at the edge of the grid: widen --lrs" if edges else ""
    # An interval on both sides of 0 says that seeds alone would move the optimum as much.
    certain = found.low > 0 or found.high < 0
    far = abs(found.octaves) > SHIFT_LIMIT and certain
    noise = big.noise
    regret_limit = max(REGRET_LIMIT, 2 * noise / seeds**0.5) if noise is not None else REGRET_LIMIT
    parts = {
        "best lr, base": 2 ** small.optimum(),
        "best lr, target": 2 ** big.optimum(),
        "shift": found.octaves,
        "low": found.low,
        "high": found.high,
        "regret": found.regret,
        "noise": noise,
    }
    moved_note = f"the best lr moves by a factor of {2**found.octaves:.2g}" if far else ""
    costly = found.regret > regret_limit
    return [
        Row(
            "best lr, octaves",
            axis,
            found.octaves,
            SHIFT_LIMIT,
            not far and not edges,
            parts,
            outside or moved_note,
            max(abs(found.octaves) - SHIFT_LIMIT, 0.0),
        ),
        Row(
            "regret, nats",
            axis,
            found.regret,
            regret_limit,
            not costly,
            parts,
            "the base's best lr is not the target's" if costly else "",
            max(found.regret - regret_limit, 0.0),
        ),
    ]
