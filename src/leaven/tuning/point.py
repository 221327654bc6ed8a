"""Convert points of a search space to recipes.

A point maps the path of each searched value to a distance. The distance says how far the value is from the recipe's
value. Example: ``{"hyperparameters.lr": 1.0}`` doubles the lr. The recipe is the start of the search: all its
distances are 0. The code calls distances ``octaves``, whatever their unit. Optuna and the store of a study call them
``params``.

Most distances are in octaves: a distance of 1 doubles the value. Some values have further rules:

- ``beta1``, ``beta2`` and Muon's momentum: at distance x, beta becomes ``beta ** 2^x``. So a distance of 1 halves the
  half-life. Multipliers of a beta, in modules and depth profiles, are exponents of the global beta. A distance of 1
  doubles such an exponent.
- ``schedule.warmup_tokens`` and ``data.tokens`` are rounded to whole tokens.
- ``batch.tokens`` is rounded to whole sequences. A batch ramp and batch stages are scaled in proportion. A larger
  batch means fewer steps, because ``data.tokens`` stays the same.
- When ``batch.tokens`` or ``data.tokens`` changes, the scaling rule adapts lr, betas, eps and weight decay, as in
  :func:`leaven.scaling.transfer.transfer`.
- ``hyperparameters.depth.lr[2]`` is an entry of a depth profile. A profile with one entry is first replaced by three
  equal entries, or by one for each block if the model has fewer than three blocks.

Two kinds of values have distances in other units:

- A value in ``TENTHS``, such as dropout, may be 0. Its distance is in tenths: a distance of 1 adds 0.1.
- A categorical value (``CHOICES``), such as ``schedule.decay``, is a name. Its distance is the index of the name in
  :func:`levels`, where the recipe's own name is first.
"""

import math
import re
from collections.abc import Mapping
from typing import Any

from leaven.recipe.hyperparameters import DepthProfile, Multipliers
from leaven.recipe.recipe import Recipe, split_path
from leaven.scaling.transfer import moved_batch

QUANTITIES = tuple(Multipliers.model_fields)
WARM_UP, BATCH, TOKENS = "schedule.warmup_tokens", "batch.tokens", "data.tokens"
CLIP, DROPOUT, DECAY = "hyperparameters.grad_clip", "model.dropout", "schedule.decay"
FLOOR, COOLDOWN, OPTIMIZER = "schedule.min_lr_ratio", "schedule.decay_ratio", "hyperparameters.optimizer"
GLOBAL = (*(f"hyperparameters.{quantity}" for quantity in QUANTITIES), WARM_UP, BATCH)
OTHERS = (CLIP, DROPOUT, FLOOR, COOLDOWN, DECAY, OPTIMIZER)
"""The values that the set ``global-full`` adds to the set ``global``."""
MUON = ("hyperparameters.muon.lr", "hyperparameters.muon.weight_decay", "hyperparameters.muon.momentum")
"""Values of Muon. Its lr and weight decay are searched only if the recipe sets them; otherwise they follow those of
AdamW."""
WHOLE_RECIPE = (*GLOBAL, *OTHERS, *MUON, TOKENS)
BETAS = ("beta1", "beta2", "momentum")
POINTS = 3  # points of a searched depth profile: enough for a tilt and a bend
TENTHS = {DROPOUT: 1.0, FLOOR: 1.0}
"""{path: maximum} of values that may be 0. A search moves them in units of 0.1, because octaves cannot reach 0."""
CHOICES = {DECAY: ("cosine", "linear", "wsd"), OPTIMIZER: ("adamw", "adam")}
"""The levels of each choice, by path. ``schedule.decay`` has only the decays that end at min_lr_ratio."""

_POINT = re.compile(r"hyperparameters\.depth\.(\w+)\[(\d+)\]")

Value = float | str


def searchable(recipe: Recipe) -> tuple[str, ...]:
    """Return the paths that a search space may name. Unset values and multipliers without effect are left out."""
    paths = [path for path in WHOLE_RECIPE if value_at(recipe, path) is not None]
    roles, refusal = recipe.model.roles, recipe.hyperparameters.refusal
    for quantity in QUANTITIES:
        modules = (module for module in roles if refusal(roles, module, quantity) is None)
        paths += [f"hyperparameters.modules.{module}.{quantity}" for module in modules]
    return tuple(paths + [path for quantity in QUANTITIES for path in depth_points(recipe, quantity)])


def depth_points(recipe: Recipe, quantity: str) -> list[str]:
    """Return the paths, such as ``hyperparameters.depth.lr[0]``, of the profile's points that affect a block."""
    n_layers, points = recipe.model.n_layers, len(_profile(recipe, quantity))
    found = []
    for point in range(points):
        only = tuple(2.0 if other == point else 1.0 for other in range(points))
        if any(DepthProfile.at(only, layer, n_layers) != 1 for layer in range(n_layers)):
            found.append(f"hyperparameters.depth.{quantity}[{point}]")
    return found


def _profile(recipe: Recipe, quantity: str) -> tuple[float, ...]:
    stated: tuple[float, ...] = getattr(recipe.hyperparameters.depth, quantity)
    return stated if len(stated) > 1 else stated * min(POINTS, recipe.model.n_layers)


def quantity_of(path: str) -> str:
    """Return the quantity that a path ends with: ``lr`` for ``hyperparameters.depth.lr[2]``."""
    return path.rpartition(".")[2].partition("[")[0]


def levels(recipe: Recipe, path: str) -> tuple[str, ...]:
    """Return the levels of the choice (categorical value) at ``path``. The recipe's level is first."""
    own = str(value_at(recipe, path))
    return (own, *(level for level in CHOICES[path] if level != own))


def value_at(recipe: Recipe, path: str) -> Value | None:
    """Return the recipe's value at a searchable path, or its default (perhaps None). Numbers are floats."""
    if point := _POINT.fullmatch(path):
        return _profile(recipe, point[1])[int(point[2])]
    if path == CLIP:
        return recipe.hyperparameters.grad_clip.limit
    *outer, last = split_path(path)
    if path in MUON:
        value = getattr(recipe.hyperparameters.muon, last, None)
    elif outer[1:]:
        value = getattr(recipe.hyperparameters.modules.get(outer[2], Multipliers()), last)
    else:
        value = getattr(getattr(recipe, outer[0]), last)
    return value if value is None or isinstance(value, str) else float(value)


def value_like(recipe: Recipe, path: str, like: Recipe) -> Value | None:
    """Return the value of ``recipe`` at a path that is searchable in ``like``. At a point of a depth profile,
    interpolate the profile of ``recipe`` at the depth that this point has in ``like``."""
    if point := _POINT.fullmatch(path):
        return DepthProfile.at(_profile(recipe, point[1]), int(point[2]), len(_profile(like, point[1])))
    return value_at(recipe, path)


def distance(path: str, value: float, to: float) -> float:
    """Return the distance from ``value`` to ``to``, in the unit of ``path``: see :func:`moved`."""
    return distance_in(_unit(path), value, to)


def _unit(path: str) -> str:
    return "tenth" if path in TENTHS else "beta" if quantity_of(path) in BETAS else "octave"


def moved(unit: str, value: float, x: float) -> float:
    """Return ``value`` moved by the distance ``x``, measured in ``unit``.

    With x = 1, the unit "octave" turns 0.5 into 1, "tenth" turns 0.5 into 0.6, and "beta" turns 0.9 into 0.81.
    """
    match unit:
        case "tenth":
            return value + x / 10
        case "beta":
            return math.pow(value, math.exp2(x))
        case _:
            return value * math.exp2(x)


def distance_in(unit: str, value: float, to: float) -> float:
    """Return the distance x, measured in ``unit``, for which ``moved(unit, value, x)`` is ``to``."""
    match unit:
        case "tenth":
            return 10 * (to - value)
        case "beta":
            return math.log2(math.log(to) / math.log(value))
        case _:
            return math.log2(to / value)


def values(recipe: Recipe, octaves: Mapping[str, float]) -> dict[str, Value]:
    """Return new values by path, at the distances ``octaves`` from the recipe's values. Raise ValueError if a batch
    rounds to 0 sequences, or to 1 in a recipe with a batch ramp."""
    return {path: _moved_value(recipe, path, x) for path, x in octaves.items()}


def _moved_value(recipe: Recipe, path: str, x: float) -> Value:
    if path in CHOICES:
        return levels(recipe, path)[round(x)]
    value = value_at(recipe, path)
    assert isinstance(value, float), f"{path} cannot be searched"
    # A multiplier of a beta is an exponent, which doubles in an octave.
    found = moved(_unit(path) if path in WHOLE_RECIPE else "octave", value, x)
    match path:
        case "model.dropout" | "schedule.min_lr_ratio":
            return min(max(found, 0.0), TENTHS[path])
        case "schedule.warmup_tokens" | "data.tokens":
            return max(round(found), 1)
        case "schedule.decay_ratio":
            return min(found, 1.0)
        case "batch.tokens":
            sequences = round(found / recipe.model.seq_len)
            if not sequences:
                raise ValueError(f"a batch of {found:.0f} tokens is rounded to 0 sequences")
            if sequences == 1 and recipe.batch.ramp and len(recipe.batch.sizes) > 1:
                raise ValueError(f"a batch of {found:.0f} tokens is rounded to 1 sequence, so it cannot have a ramp")
            return sequences * recipe.model.seq_len
        case _:
            return found


def recipe_at(recipe: Recipe, octaves: Mapping[str, float], seed: int | None = None) -> Recipe:
    """Return the recipe at a point, with ``seed`` as its ``data.seed`` if given. Raise ValueError if the values are
    invalid together, such as a warm-up longer than the run."""
    changes: dict[str, Any] = {} if seed is None else {"data.seed": seed}
    for path, value in values(recipe, {path: x for path, x in octaves.items() if x != 0}).items():
        if point := _POINT.fullmatch(path):
            whole = f"hyperparameters.depth.{point[1]}"
            profile = changes.get(whole, _profile(recipe, point[1]))
            changes[whole] = tuple(value if i == int(point[2]) else old for i, old in enumerate(profile))
        elif path == BATCH:
            changes["batch"] = moved_batch(recipe, int(value))
        elif path == CLIP:
            changes[path] = recipe.hyperparameters.grad_clip.model_copy(update={"limit": value}).model_dump()
        else:
            changes[path] = value
    if changes.keys() & {"batch", TOKENS}:
        changes["scaling.base"] = recipe.base.model_dump()
    return recipe.replace(changes)
