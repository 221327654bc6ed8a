"""How far the values of a recipe may move in a search. :data:`BOUNDS` has the limits and their reasons."""

import math
from dataclasses import dataclass

from pydantic import ValidationError

from leaven.catalogue.findings import CHECKS
from leaven.recipe.files import explain
from leaven.recipe.recipe import Recipe, split_path
from leaven.tuning import point
from leaven.tuning.point import BATCH, BETAS, CHOICES, TOKENS, WARM_UP, WHOLE_RECIPE, quantity_of, recipe_at

LEAST_STEPS = 100  # the fewest steps of a run with a larger batch or fewer tokens
FINEST = 1 / 8  # octaves: a value that cannot move this far is not searched
_SEPARATE = 64.0  # the bound of a multiplier without a global value: from 1/64 to 64


@dataclass(frozen=True)
class Bounds:
    """The bounds of a searched value. For a multiplier, they limit the multiplied value, such as lr x multiplier."""

    low: float  # the lowest value, in the unit of the recipe
    high: float  # the highest value
    near: float  # a search begins within this distance of the recipe's value, in octaves or tenths (steps of 0.1)
    scale: float  # octaves or tenths from the recipe to a typical optimum
    why: str  # the reason for the bounds, shown to the user
    of_run: bool = False  # whether low and high are shares of data.tokens
    natural: tuple[bool, bool] = (False, False)  # whether values below low, and above high, are impossible


# The ranges with which runs have trained well; beyond them `leaven recipes check` warns.
_TRAINED = {check.hidden: check.trained for check in CHECKS if check.hidden and check.trained}
# "published": in the runs that `leaven recipes` lists; "leaven's benchmarks": docs/log.md.
BOUNDS = {
    "lr": Bounds(
        1e-6, 1.0, 3.0, 1.0, "published peaks: 1e-5 to 0.012; at lr 1, an Adam step moves weights by about 1"
    ),
    "init_std": Bounds(1e-4, 2.0, 3.0, 1.0, "published: 0.0006 to 0.08; embeddings up to 1"),
    "residual": Bounds(
        1 / 32, 8.0, 3.0, 1.0, "some published inits divide by sqrt(2 n_layers), which is 32 at 512 layers"
    ),
    "hyperparameters.muon.lr": Bounds(
        1e-5, 1.0, 3.0, 1.0, 'usual: with match = "spectral" 0.02, with match = "adamw_rms" the lr of AdamW'
    ),
    "momentum": Bounds(0.5, 0.999, 2.0, 2.0, "half-lives of 1 to 693 steps; published momentum: 0.95"),
    "weight_decay": Bounds(1e-4, 10.0, 4.0, 2.0, "published: 0.01 to 0.1; the bounds are 100 times lower and higher"),
    "beta1": Bounds(
        *_TRAINED["beta1"], 2.0, 2.0, "half-lives of 1 to 69 steps; published beta1: 0.9; leaven's benchmarks: 0.53"
    ),
    "beta2": Bounds(*_TRAINED["beta2"], 4.0, 2.0, "half-lives of 7 to 6,931 steps; published beta2: 0.95 to 0.999"),
    "eps": Bounds(1e-15, 1e-4, 6.0, 2.0, "published: 1e-9 to 1e-5; it matters only where gradients are that small"),
    "warmup_tokens": Bounds(
        0.0, 0.5, 3.0, 2.0, "one batch to half of the run; published: 0.5% to 1%", True, (True, False)
    ),
    "batch.tokens": Bounds(
        0.0, 1 / LEAST_STEPS, 2.0, 1.0,
        f"one sequence to a batch with which the run has {LEAST_STEPS} steps", True, (True, False),
    ),
    "data.tokens": Bounds(1 / 8, 1.0, 2.0, 1.0, "a run on repeated text may be shortened, never lengthened", True),
    "grad_clip": Bounds(0.01, 100.0, 3.0, 2.0, "published: 0.1 to 1; 100 hardly ever clips"),
    "dropout": Bounds(0.0, 0.5, 2.0, 1.0, "published: 0 to 0.1", False, (True, False)),
    "min_lr_ratio": Bounds(0.0, 1.0, 2.0, 1.0, "published: 0 to 0.1; 1 is no decay", False, (True, True)),
    "decay_ratio": Bounds(
        0.01, 1.0, 2.0, 1.0, "Hägele et al. 2024: 0.2; published runs: 0.4; 1 is the whole run", False, (False, True)
    ),
}  # fmt: skip


def why_fixed(recipe: Recipe, path: str) -> str | None:
    """Return why the value at a path cannot move within its bounds, or None if it can."""
    if path in CHOICES or any(reach(recipe, path, side)[0] for side in (0, 1)):
        return None
    return f"{point.value_at(recipe, path):g} cannot move within its bounds: {bounds_of(path).why}"


def bounds_of(path: str) -> Bounds:
    return BOUNDS[path if path in BOUNDS else quantity_of(path)]


def _multiplied(recipe: Recipe, path: str) -> str:
    """Return the path of the Adam or Muon value that the multiplier at ``path`` multiplies."""
    (_, kind, *rest), quantity = split_path(path), quantity_of(path)
    if kind == "modules" and (muon := recipe.hyperparameters.muon_of(recipe.model.roles[rest[0]])):
        own = "momentum" if quantity == "beta1" else quantity
        if getattr(muon, own, None) is not None:
            return f"hyperparameters.muon.{own}"
    return f"hyperparameters.{quantity}"


def reach(recipe: Recipe, path: str, side: int) -> tuple[float, str]:
    """Return (limit, reason): how far the value at a path may move from the recipe's value, and why no further.

    ``side`` is 0 for the lower end of the search range, where the limit is at most 0, and 1 for the upper end. The
    limit is a distance as in ``point.distance``. The reason is empty if no value exists beyond the limit, such as a
    dropout below 0.
    """
    of = path if path in WHOLE_RECIPE else _multiplied(recipe, path)
    bounds, run = bounds_of(of), recipe.data.tokens
    value = point.value_at(recipe, path)
    assert isinstance(value, float)
    globally = None if of == path else point.value_at(recipe, of)
    assert globally is None or isinstance(globally, float)
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
    # A beta becomes smaller when its distance grows.
    which = 1 - side if quantity_of(path) in BETAS else side
    end, natural = (low, high)[which], bounds.natural[which]
    x = point.distance(path, value, end)
    x = max(x, 0.0) if side else min(x, 0.0)
    if not why_invalid(recipe, path, x):
        return x, "" if natural else f"the bound, {end:,g}: {bounds.why}"
    # Of the multiples of 1/8 with a valid recipe, take the one nearest to the bound.
    steps = math.floor(abs(x) / FINEST)
    while steps and why_invalid(recipe, path, math.copysign(steps * FINEST, x)):
        steps -= 1
    beyond = why_invalid(recipe, path, math.copysign((steps + 1) * FINEST, x))
    return math.copysign(steps * FINEST, x), f"beyond it, the recipe is invalid: {beyond}"


def why_invalid(recipe: Recipe, path: str, octaves: float) -> str | None:
    """Return why moving the value at ``path`` by ``octaves`` makes a recipe invalid, or None if it does not."""
    try:
        recipe_at(recipe, {path: octaves})
    except ValidationError as error:
        return explain(error)
    except ValueError as error:
        return str(error)
    return None
