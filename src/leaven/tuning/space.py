"""What is searched: values of a recipe, each so many octaves around where the recipe has it.

``global`` has the values that hold for all modules. ``per-module`` has by module what matters first of what
Mlodozeniec et al. 2025 (arXiv 2512.22382) tuned so, lr, init_std and residual; of the lr two points over depth, which
brought less than module types, but something; and the rest of the optimiser globally: 25 to 35 values.
``per-module-full`` has every quantity by module and over depth, about 90. A lr of each layer and module apart brought
them next to nothing.

Where some values times c and others over c are the same model, the loss has a valley without a lowest point: none of
the values has an optimum or an importance of its own, and a search that follows each slope apart goes twice as far as
it should. So of such values ``per-module`` searches one less than there are.

- A global value beside its multipliers in all modules: the global one is not searched. All of them together move it,
  and a search of them starts at the best global values.
- A depth profile beside the multipliers of the blocks' modules, which set its mean: the middle point stays.
- init_std beside lr and residual, see :func:`_scaled_by_others`.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import NamedTuple

from pydantic import ValidationError

from leaven.recipe.errors import InputError
from leaven.recipe.files import explain
from leaven.recipe.recipe import Recipe, split_path
from leaven.recipe.shape import BRANCH_ENDS, ModelShape
from leaven.training.study_file import Dimension
from leaven.tuning import point
from leaven.tuning.point import BATCH, GLOBAL, QUANTITIES, WARM_UP, moved

SETS = ("global", "per-module", "per-module-full")
_FINEST = 1 / 8  # octave: a value that cannot move so far is not searched


class Reach(NamedTuple):
    """How far a value is searched to either side, and in which steps, in octaves."""

    octaves: float
    scale: float  # a first step is half of it: 0.5 for lr, init and residual, 1 for decay, eps and 1 - beta
    why: str


# "Published" is what the catalogue has (leaven recipes), "open runs" those of Step Law.
REACH = {
    "lr": Reach(
        3.0, 1.0, "open runs: half an octave costs 0.1% of the loss, 1.15 octaves 0.5%; modules' cliffs lie apart"
    ),
    "init_std": Reach(3.0, 1.0, "published: 0.004 to 0.08, around 0.02; embeddings up to 1"),
    "residual": Reach(3.0, 1.0, "named inits divide the branch ends by sqrt(2 n_layers): 3 octaves at 32 blocks"),
    "weight_decay": Reach(4.0, 2.0, "published: 0.01 to 0.1, which are 3.3 octaves"),
    "beta1": Reach(2.0, 2.0, "0.9 becomes 0.66 to 0.974; published: 0.9"),
    "beta2": Reach(4.0, 2.0, "0.95 becomes 0.44 to 0.9968; published: 0.95 to 0.999"),
    "eps": Reach(6.0, 2.0, "published: 1e-9 to 1e-5, mostly 1e-8; it acts only where it comes near the gradients"),
    "warmup_tokens": Reach(3.0, 2.0, "published, where told as a share of the run: 0.5% to 1%"),
    "tokens": Reach(2.0, 1.0, "open runs: two octaves cost 0.9% down and 1.3% up even with the lr found anew"),
}


@dataclass(frozen=True)
class Space:
    """``left_out`` are values that the space would have had: path and reason."""

    recipe: Recipe
    dimensions: tuple[Dimension, ...]
    left_out: tuple[tuple[str, str], ...] = ()

    @property
    def paths(self) -> tuple[str, ...]:
        return tuple(dimension.path for dimension in self.dimensions)

    @property
    def centre(self) -> dict[str, float]:
        return {dimension.path: dimension.centre for dimension in self.dimensions}

    @property
    def limits(self) -> dict[str, tuple[float, float]]:
        """Octaves, the lowest and the highest: what ``leaven.tuning.search`` takes."""
        return {dimension.path: (dimension.low, dimension.high) for dimension in self.dimensions}

    def values(self, octaves: Mapping[str, float]) -> dict[str, float]:
        """The recipe's values at a point."""
        return point.values(self.recipe, octaves)

    def without(self, path: str, reason: str) -> "Space":
        """The space with one value left out, if it has it."""
        if path not in self.paths:
            return self
        kept = tuple(dimension for dimension in self.dimensions if dimension.path != path)
        if not kept:
            raise InputError(f"--space {path}: {reason}; search other values")
        return replace(self, dimensions=kept, left_out=(*self.left_out, (path, reason)))

    def below(self, path: str, limit: float) -> "Space":
        """The space with one value, if it has it, kept below a limit, as it is in the recipe."""
        held = next((dimension for dimension in self.dimensions if dimension.path == path), None)
        if held is None:
            return self
        high = held.high
        while high > 0 and self.values({path: high})[path] >= limit:
            high = max(math.ceil(high / _FINEST - 1) * _FINEST, 0.0)
        kept = replace(held, high=high)
        return replace(self, dimensions=tuple(kept if each is held else each for each in self.dimensions))


def space(recipe: Recipe, which: str | None = None) -> Space:
    """A space around the recipe. The values that it has not, or that are 0, are left out; by name they are refused.

    Args:
        which: with commas between: one of ``SETS``, paths, patterns of paths with ``*``. ``recipe`` is what its
            ``[tuning]`` says. Without, that, and ``global`` where there is none.

    Raises:
        InputError: if a path is nothing to search, or there is no recipe as far away as ``[tuning]`` says.
    """
    tuning = recipe.tuning
    if which is None:
        which = "recipe" if tuning else "global"
    if which == "recipe":
        if tuning is None:
            raise InputError(f"--space recipe: it has no [tuning]; write one, or take {', '.join(SETS)}")
        asked = [("[tuning] space =", name) for name in (tuning.space or "").split(",") if tuning.space]
        asked += [("[tuning.octaves]", pattern) for pattern in tuning.octaves]
    else:
        asked = [("--space", name) for name in which.split(",")]
    known = point.searchable(recipe)
    ends = {
        path: both
        for pattern, both in (tuning.octaves if tuning else {}).items()
        for path in _paths(recipe, known, "[tuning.octaves]", pattern.replace('"', ""))
    }
    found: dict[str, Dimension] = {}
    left_out: dict[str, str] = {}
    for origin, name in ((origin, name.strip().replace('"', "")) for origin, name in asked):
        for path in _paths(recipe, known, origin, name):
            if reason := _nothing(recipe, path):
                left_out[path] = reason
            else:
                found[path] = _dimension(recipe, path, ends.get(path))
            if path == name and path in left_out:
                raise InputError(f"{origin} {path}: {left_out[path]}")
    if not found:
        raise InputError(f"--space {which}: nothing is left to search; {next(iter(left_out.values()))}")
    return Space(recipe, tuple(found.values()), tuple(left_out.items()))


def _paths(recipe: Recipe, known: Iterable[str], origin: str, name: str) -> list[str]:
    """What a name stands for: a set, a pattern, a path."""
    if not name:
        raise InputError(f"{origin}: an empty name; give {', '.join(SETS)}, or paths with commas between")

    def by_module(*quantities: str) -> list[str]:
        modules = [path for path in known if path.startswith("hyperparameters.modules.")]
        return [path for quantity in quantities for path in modules if path.endswith(f".{quantity}")]

    def over_depth(*quantities: str) -> list[str]:
        points = [point.depth_points(recipe, quantity) for quantity in quantities]
        return [path for each in points for path in each if path != each[len(each) // 2]]

    match name:
        case "global":
            return list(GLOBAL)
        case "per-module":
            rest = [f"hyperparameters.{quantity}" for quantity in ("weight_decay", "beta1", "beta2", "eps")]
            others = _scaled_by_others(recipe.model)
            own = [path for path in by_module("init_std") if split_path(path)[2] not in others]
            return [*by_module("lr"), *own, *by_module("residual"), *over_depth("lr"), *rest]
        case "per-module-full":
            return [*by_module(*QUANTITIES), *over_depth(*QUANTITIES)]
    found = [path for path in known if fnmatchcase(path, name.replace("[", "[[]"))] if "*" in name else [name]
    if not found or not set(found) <= {*known, *GLOBAL}:
        raise InputError(f"{origin} {name}: {_refusal(recipe, known, name)}")
    return found


def _scaled_by_others(model: ModelShape) -> set[str]:
    """The modules whose init_std other searched values stand in for.

    With Adam a matrix with init_std and lr times c stays the same matrix times c; only eps, clipping and decay see a
    difference (``tests/tuning/test_valleys.py`` trains along these valleys). What follows undoes the factor: a norm
    for queries and keys, and the branch's residual for its last matrix and for what goes into that linearly. What is
    given up is to decay these modules apart from the others. Biases would have to be scaled along.
    """
    if model.bias:
        return set()
    linear = {"mlp.in"} if model.activation != "gelu" else set()  # the gated side, or homogeneous as relu is
    normed = {"attention.query", "attention.key"} if model.qk_norm else set()
    return {*BRANCH_ENDS, "attention.value"} | linear | normed


def _refusal(recipe: Recipe, known: Iterable[str], path: str) -> str:
    """Why a path is nothing to search in a recipe."""
    keys = split_path(path)
    of_module = path.startswith("hyperparameters.modules.") and len(keys) == 4 and keys[3] in QUANTITIES
    if of_module and (reason := recipe.hyperparameters.refusal(recipe.model.roles, keys[2], keys[3])):
        return reason
    if close := get_close_matches(path, [*SETS, *known], 1, 0.8):
        return f"not a value to search; did you mean {close[0]}?"
    return (
        f"not a value to search; there are {', '.join(SETS)}; {WARM_UP}, {BATCH}, hyperparameters.Q, "
        f"hyperparameters.modules.M.Q and hyperparameters.depth.Q[0] with Q one of {', '.join(QUANTITIES)} and M one "
        f"of {', '.join(recipe.model.modules)}"
    )


def _nothing(recipe: Recipe, path: str) -> str | None:
    """Why there are no octaves around a value."""
    value, quantity = point.value_at(recipe, path), _quantity(path)
    if value is None:
        return (
            f'init = "{recipe.hyperparameters.init}" sets every standard deviation itself; search '
            "hyperparameters.modules.MODULE.init_std, or write an init_std"
        )
    if value == 0:
        return "it is 0 in the recipe, and a search goes by factors; set it above 0"
    if path not in GLOBAL and getattr(recipe.hyperparameters, quantity) == 0:
        return f"hyperparameters.{quantity} is 0 in the recipe, and so is every multiple of it; set it above 0"
    for end in (-_FINEST, _FINEST):
        if reason := _no_recipe(recipe, path, end):
            return f"there is no recipe {end:+g} octaves from here: {reason}"
    return None


def _dimension(recipe: Recipe, path: str, ends: tuple[float, float] | None) -> Dimension:
    """One searched value: as far as the recipe says, or as far as the usual, if there is a recipe so far away."""
    reach = REACH[_quantity(path)]
    low, high = ends or (_reached(recipe, path, -reach.octaves), _reached(recipe, path, reach.octaves))
    for end in ends or ():
        if reason := _no_recipe(recipe, path, end):
            raise InputError(f"[tuning.octaves] {path}: {end:+g} octaves are no recipe: {reason}")
    value = point.value_at(recipe, path)
    assert value is not None
    if ends and all(point.values(recipe, {path: end})[path] == value for end in ends):
        raise InputError(
            f"[tuning.octaves] {path}: from {low:+g} to {high:+g} octaves it stays {value:g}, for it moves in whole "
            f"{'sequences' if path == BATCH else 'tokens'}; give it more octaves"
        )
    return Dimension(path, value, low, high, reach.scale)


def _quantity(path: str) -> str:
    return path.rpartition(".")[2].partition("[")[0]


def _reached(recipe: Recipe, path: str, end: float) -> float:
    """The end, or the farthest from 0 on the way to it at which there is a recipe."""
    while end and _no_recipe(recipe, path, end):
        end -= math.copysign(_FINEST, end)
    return end


def _no_recipe(recipe: Recipe, path: str, octaves: float) -> str | None:
    try:
        moved(recipe, {path: octaves})
    except ValidationError as error:
        return explain(error)
    except ValueError as error:
        return str(error)
    return None
