"""The bounds within which each value of a recipe is searched, and the reasons for them (``BOUNDS``)."""

import math
from typing import NamedTuple

from pydantic import ValidationError

from leaven.catalogue.findings import CHECKS
from leaven.recipe.files import explain
from leaven.recipe.recipe import Recipe
from leaven.tuning import point
from leaven.tuning.point import BATCH, TOKENS, WARM_UP, WHOLE_RECIPE, quantity_of, recipe_at

LEAST_STEPS = 100  # the fewest steps of a run with a larger batch or fewer tokens
FINEST = 1 / 8  # octaves; a value that cannot move this far is not searched
_SEPARATE = 64.0  # the bound of a multiplier without a global value: from 1/64 to 64


class Bounds(NamedTuple):
    """The bounds of a searched value. For the multiplier of a module or depth point, they apply to the multiplier
    times the global value."""

    low: float  # in the unit of the value
    high: float
    near: float  # octaves or tenths to either side of the recipe: the initial box of a search
    scale: float  # twice the first step; the step is 0.5 for lr, init and residual, 1 for decay, eps and 1 - beta
    why: str  # the reason for the bounds, shown to the user
    of_run: bool = False  # low and high are shares of data.tokens
    natural: tuple[bool, bool] = (False, False)  # whether there is nothing beyond low, and beyond high


# Beyond these ranges of the betas, `leaven recipes check` warns.
_TRAINED = {check.hidden: check.trained for check in CHECKS if check.hidden and check.trained}
# "published": in the catalogue (leaven recipes); "own": found by benchmarks/tuning (docs/log.md).
BOUNDS = {
    "lr": Bounds(1e-6, 1.0, 3.0, 1.0, "published peaks: 1e-5 to 0.012; a step of Adam at 1 moves weights by about 1"),
    "init_std": Bounds(1e-4, 2.0, 3.0, 1.0, "published: 0.0006 to 0.08; embeddings up to 1"),
    "residual": Bounds(1 / 32, 8.0, 3.0, 1.0, "named inits divide by sqrt(2 n_layers): 1/32 at 512 blocks"),
    "weight_decay": Bounds(1e-4, 10.0, 4.0, 2.0, "published: 0.01 to 0.1, a hundred times less and more"),
    "beta1": Bounds(*_TRAINED["beta1"], 2.0, 2.0, "half-lives of 1 to 69 steps; published: 0.9, own: 0.53"),
    "beta2": Bounds(*_TRAINED["beta2"], 4.0, 2.0, "half-lives of 7 to 6,931 steps; published: 0.95 to 0.999"),
    "eps": Bounds(1e-15, 1e-4, 6.0, 2.0, "published: 1e-9 to 1e-5; it acts only where it comes near the gradients"),
    "warmup_tokens": Bounds(
        0.0, 0.5, 3.0, 2.0, "one batch to half of the run; published: 0.5% to 1%", True, (True, False)
    ),
    "batch.tokens": Bounds(
        0.0, 1 / LEAST_STEPS, 2.0, 1.0, f"one sequence to what leaves {LEAST_STEPS} steps", True, (True, False)
    ),
    "data.tokens": Bounds(1 / 8, 1.0, 2.0, 1.0, "where text is repeated: an earlier stop, never a longer run", True),
    "grad_clip": Bounds(0.01, 100.0, 3.0, 2.0, "published: 0.1 to 1; 100 is next to no clipping"),
    "dropout": Bounds(0.0, 0.5, 2.0, 1.0, "published: 0 to 0.1", False, (True, False)),
    "min_lr_ratio": Bounds(0.0, 1.0, 2.0, 1.0, "published: 0 to 0.1; 1 is no decay", False, (True, True)),
    "decay_ratio": Bounds(
        0.01, 1.0, 2.0, 1.0, "0.2 (Hägele et al. 2024), published: 0.4; 1 is all of the run", False, (False, True)
    ),
}  # fmt: skip


def bounds_of(path: str) -> Bounds:
    """Return the bounds of the value at a path."""
    return BOUNDS[path if path in BOUNDS else quantity_of(path)]


def reach(recipe: Recipe, path: str, side: int) -> tuple[float, str]:
    """Return how far a value may go down (``side`` 0) or up (1), as a distance from the recipe, and what limits it.

    The limit is a text for the user. It is empty at a natural limit, such as dropout 0.
    """
    bounds, run = bounds_of(path), recipe.data.tokens
    value = point.value_at(recipe, path)
    assert isinstance(value, float)
    globally = None if path in WHOLE_RECIPE else getattr(recipe.hyperparameters, quantity_of(path))
    low, high = (share * (run if bounds.of_run else 1) for share in (bounds.low, bounds.high))
    if path == WARM_UP:
        low = recipe.batch.tokens
    elif path == BATCH:
        low = recipe.model.seq_len
    elif path == TOKENS:
        low = max(low, LEAST_STEPS * recipe.batch.tokens, 2 * recipe.schedule.warmup_tokens)
    elif path not in WHOLE_RECIPE and globally is None:
        low, high = 1 / _SEPARATE, _SEPARATE
    elif globally is not None:
        value = globally**value if quantity_of(path).startswith("beta") else globally * value
    # The larger beta is fewer octaves of 1 - beta.
    which = 1 - side if quantity_of(path) in {"beta1", "beta2"} else side
    end, natural = (low, high)[which], bounds.natural[which]
    x = point.distance(path, value, end)
    x = max(x, 0.0) if side else min(x, 0.0)
    reached = _reached(recipe, path, x)
    if reached != x:
        return reached, f"beyond it: {why_invalid(recipe, path, reached + math.copysign(FINEST, x))}"
    return x, "" if natural else f"the bound, {end:,g}: {bounds.why}"


def _reached(recipe: Recipe, path: str, end: float) -> float:
    """Return ``end`` if the recipe is valid there. Otherwise return the multiple of 1/8 closest to ``end``, between 0
    and ``end``, at which the recipe is valid."""
    if not why_invalid(recipe, path, end):
        return end
    steps = math.floor(abs(end) / FINEST)
    while steps and why_invalid(recipe, path, math.copysign(steps * FINEST, end)):
        steps -= 1
    return math.copysign(steps * FINEST, end)


def why_invalid(recipe: Recipe, path: str, octaves: float) -> str | None:
    """Return the reason why the recipe is invalid with only the value at ``path`` moved, or None if it is valid."""
    try:
        recipe_at(recipe, {path: octaves})
    except ValidationError as error:
        return explain(error)
    except ValueError as error:
        return str(error)
    return None
