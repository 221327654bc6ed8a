"""Define search spaces: the searched values of a recipe and how far each may move.

The user gives a space by the name of a set (``SETS``) or by the paths of values. docs/concepts/spaces.md
lists the values of each set. ``per-module`` has lr, init_std and residual of each module, which mattered
most to Mlodozeniec et al. 2025 (arXiv 2512.22382).

Some pairs of values are redundant: multiplying the first by c and dividing the second by c gives the same model.
So neither has a single best value. ``per-module`` therefore leaves out:

- The global lr, init_std and residual, because each module has a multiplier for them. To tune the global values,
  search the set ``global`` first, and start the ``per-module`` search at its best point.
- The middle point of a depth profile, because the multipliers of modules already scale all blocks together.
- The init_std of some modules (:func:`_scaled_by_others`).
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path
from typing import ClassVar, Self

from leaven.catalogue.expectations import expectations
from leaven.catalogue.findings import Case
from leaven.errors import InputError
from leaven.recipe.files import read_recipe, render
from leaven.recipe.recipe import Difference, Recipe, differences, flatten, short_path, split_path
from leaven.recipe.shape import BRANCH_ENDS, ModelShape
from leaven.scaling.table import adamw_rows
from leaven.tuning import point
from leaven.tuning.algorithm.surrogate import EarlierTrials
from leaven.tuning.algorithm.trust_region import Axes
from leaven.tuning.bounds import FINEST, bounds_of, reach, why_fixed, why_invalid
from leaven.tuning.point import Value
from leaven.tuning.study_document import Dimension

SETS = ("global", "global-full", "per-module", "per-module-full")


@dataclass(frozen=True, kw_only=True)
class SearchSpace(ABC):
    """A search space: the searched values and their ranges. Subclasses turn a point into values."""

    dimensions: tuple[Dimension, ...]
    left_out: tuple[tuple[str, str], ...] = ()  # path and reason of values that are not searched
    earlier: EarlierTrials | None = None  # trials of an earlier study, as points of this space

    kind: ClassVar[str]  # what messages call the file with the start point: recipe or command file

    @property
    @abstractmethod
    def name(self) -> str:
        """The name of a study over this space."""

    @property
    @abstractmethod
    def why(self) -> Mapping[str, str]:
        """The reasons for the values at the start, by path."""

    @property
    @abstractmethod
    def seed(self) -> int:
        """The seed of the search. Trials with fresh seeds add 1, 2, ... to it."""

    @abstractmethod
    def values(self, octaves: Mapping[str, float]) -> dict[str, Value]:
        """Return the values at a point, by path. ``octaves`` has their distances from the start point."""

    @abstractmethod
    def placeholders(self, octaves: Mapping[str, float], seed: int) -> dict[str, Value]:
        """Return the values of a trial's placeholders ``{name}``, by name. Raise ValueError if they are invalid."""

    @abstractmethod
    def text_at(self, octaves: Mapping[str, float], reasons: Mapping[str, str]) -> str:
        """Return the recipe or command file at ``octaves`` as text, with ``reasons`` added to its ``[why]``."""

    @abstractmethod
    def changes_since(self, path: Path) -> list[Difference]:
        """Return the differences between the file at ``path`` and this space's recipe or command file, without keys
        that hardly affect losses, such as ``why``."""

    @property
    def axes(self) -> Axes:
        return Axes.of(self.dimensions, self.earlier)

    @property
    def paths(self) -> tuple[str, ...]:
        return tuple(dimension.path for dimension in self.dimensions)

    @property
    def limits(self) -> Mapping[str, tuple[float, float] | range]:
        """The range or the levels of each value, as in the argument ``space`` of ``leaven.tuning.search``."""
        return self.axes.limits

    @property
    def scales(self) -> Mapping[str, float]:
        """The typical distance of the best value from the start point of the search, by path."""
        return self.axes.scales

    @property
    def near(self) -> Mapping[str, tuple[float, float]]:
        """The range of each value at the start of a search, by path."""
        return self.axes.near

    def knowing(self, expected: Mapping[str, tuple[float, float]], earlier: EarlierTrials | None) -> Self:
        """Return the space with prior knowledge: (distance from the start to the expected optimum, standard
        deviation), in octaves, by path, and the trials of an earlier search."""
        informed = tuple(replace(each, expected=expected.get(each.path)) for each in self.dimensions)
        return replace(self, dimensions=informed, earlier=earlier)

    def within_near(self) -> Self:
        """Return the space limited to the box in which a search begins. A grid search stays in this box."""
        kept = [
            replace(d, low=d.near[0], high=d.near[1], near=None, ends=("the end of the grid",) * 2) if d.near else d
            for d in self.dimensions
        ]
        return replace(self, dimensions=tuple(kept))


@dataclass(frozen=True, kw_only=True)
class Space(SearchSpace):
    """A search space around a recipe."""

    recipe: Recipe

    kind = "recipe"

    @property
    def name(self) -> str:
        return self.recipe.name

    @property
    def why(self) -> Mapping[str, str]:
        return self.recipe.why

    @property
    def seed(self) -> int:
        return self.recipe.data.seed

    def values(self, octaves: Mapping[str, float]) -> dict[str, Value]:
        return point.values(self.recipe, octaves)

    def recipe_at(self, octaves: Mapping[str, float], seed: int | None = None) -> Recipe:
        """Return the recipe at a point, with ``seed`` if given. A moved batch or duration also moves lr and others
        (``point.py``). Raise ValueError if the values cannot be combined."""
        return point.recipe_at(self.recipe, octaves, seed)

    def placeholders(self, octaves: Mapping[str, float], seed: int) -> dict[str, Value]:
        """Return the numbers, texts and booleans of the recipe at a point, by path and by short path: a value at
        ``hyperparameters.lr`` is also at ``lr``."""
        recipe = self.recipe_at(octaves, seed)
        found = {
            path: value
            for path, value in flatten(recipe.model_dump(mode="json", exclude={"why"})).items()
            if isinstance(value, int | float | str)
        }
        paths = {*point.searchable(recipe), *self.paths} - found.keys()
        found |= {path: value for path in paths if (value := point.value_at(recipe, path)) is not None}
        return found | {short_path(path): value for path, value in found.items()}

    def text_at(self, octaves: Mapping[str, float], reasons: Mapping[str, str]) -> str:
        changes = (
            {"scaling.base": self.recipe.base.model_dump(), "why": {**self.recipe.why, **reasons}} if reasons else {}
        )
        return render(self.recipe_at(octaves).replace(changes))

    def changes_since(self, path: Path) -> list[Difference]:
        return differences(read_recipe(path), self.recipe)

    def without(self, path: str, reason: str) -> "Space":
        """Return the space without ``path``; ``reason`` is for the user. Raise InputError if no value is left."""
        if path not in self.paths:
            return self
        kept = tuple(dimension for dimension in self.dimensions if dimension.path != path)
        if not kept:
            raise InputError(f"--space {path}: {reason}; search other values")
        return replace(self, dimensions=kept, left_out=(*self.left_out, (path, reason)))

    def below(self, path: str, limit: float) -> "Space":
        """Return a space whose values of ``path`` are below ``limit``. The start point always stays in the space."""
        held = next((dimension for dimension in self.dimensions if dimension.path == path), None)
        if held is None:
            return self
        high = held.high
        while high > 0 and float(self.values({path: high})[path]) >= limit:
            high = max(math.ceil(high / FINEST - 1) * FINEST, 0.0)
        ends = held.ends if high == held.high else (held.ends[0], f"it stays below {limit:,g}")
        kept = replace(held, high=high, near=held.near and (held.near[0], min(held.near[1], high)), ends=ends)
        return replace(self, dimensions=tuple(kept if each is held else each for each in self.dimensions))

    def with_laws(self) -> "Space":
        """Return the space with prior knowledge from scaling laws and published runs. Raise InputError if they
        predict none of the searched values."""
        expected = expectations(Case(self.recipe, adamw_rows(self.recipe)))
        known = {  # the deviation is at least half of the scale, because published runs often copied one another
            each.path: (min(max(found.octaves, each.low), each.high), max(found.deviation, each.scale / 2))
            for each in self.dimensions
            if (found := expected.get(each.path)) is not None
        }
        if not known:
            raise InputError(
                f"--prior laws: laws predict only {', '.join(expected)}, and the study searches none of these; leave "
                "out --prior"
            )
        return self.knowing(known, self.earlier)


def space(recipe: Recipe, which: str | None = None) -> Space:
    """Return a search space around a recipe.

    The ranges in ``[tuning.octaves]`` apply to any space. Sets and patterns leave out values that cannot be
    searched.

    Args:
        which: ``"recipe"`` (what ``[tuning]`` lists), or sets (``SETS``), paths and patterns such as ``*.lr``,
            separated by commas. Default: ``"recipe"`` if there is a ``[tuning]``, otherwise ``"global"``.

    Raises:
        InputError: if a path or ``[tuning]`` is invalid, a pattern matches no path, or no value is left to
            search.
    """
    tuning = recipe.tuning
    if which is None:
        which = "recipe" if tuning else "global"
    if which == "recipe":
        if tuning is None:
            raise InputError(f"--space recipe: the recipe has no [tuning]; write one, or give {', '.join(SETS)}")
        requested = [("[tuning] space =", name) for name in (tuning.space or "").split(",") if tuning.space]
        requested += [("[tuning.octaves]", pattern) for pattern in tuning.octaves]
    else:
        requested = [("--space", name) for name in which.split(",")]
    known = point.searchable(recipe)
    ends = {
        path: both
        for pattern, both in (tuning.octaves if tuning else {}).items()
        for path in _paths(recipe, known, "[tuning.octaves]", pattern.replace('"', ""))
    }
    if choice := next((path for path in tuning.octaves if path in point.CHOICES), None) if tuning else None:
        raise InputError(
            f"[tuning.octaves] {choice}: this value is a choice and has no range in octaves; move its path to "
            "[tuning] space"
        )
    found: dict[str, Dimension] = {}
    left_out: dict[str, str] = {}
    for origin, name in ((origin, name.strip().replace('"', "")) for origin, name in requested):
        for path in _paths(recipe, known, origin, name):
            if reason := _why_not_searched(recipe, path) or (None if path in ends else why_fixed(recipe, path)):
                left_out[path] = reason
            else:
                found[path] = _dimension(recipe, path, ends.get(path))
            if path == name and path in left_out:
                raise InputError(f"{origin} {path}: {left_out[path]}")
    if not found:
        raise InputError(f"--space {which}: nothing is left to search; {next(iter(left_out.values()))}")
    return Space(recipe=recipe.of_new_run, dimensions=tuple(found.values()), left_out=tuple(left_out.items()))


def _paths(recipe: Recipe, known: Iterable[str], origin: str, name: str) -> list[str]:
    """Return the paths that ``name`` (a set, a pattern or a path) selects. ``origin`` is where the user wrote it."""
    if not name:
        raise InputError(f"{origin}: an empty name; give {', '.join(SETS)}, or paths separated by commas")

    def by_module(*quantities: str) -> list[str]:
        modules = [path for path in known if path.startswith("hyperparameters.modules.")]
        return [path for quantity in quantities for path in modules if path.endswith(f".{quantity}")]

    def over_depth(*quantities: str) -> list[str]:
        points = [point.depth_points(recipe, quantity) for quantity in quantities]
        return [path for each in points for path in each if path != each[len(each) // 2]]

    of_muon = [path for path in point.MUON if path in known]
    match name:
        case "global":
            return [*point.GLOBAL, *of_muon]
        case "global-full":
            return [*point.GLOBAL, *of_muon, *point.OTHERS]
        case "per-module":
            rest = [f"hyperparameters.{quantity}" for quantity in ("weight_decay", "beta1", "beta2", "eps")]
            others = _scaled_by_others(recipe.model)
            own = [path for path in by_module("init_std") if split_path(path)[2] not in others]
            return [*by_module("lr"), *own, *by_module("residual"), *over_depth("lr"), *rest, *of_muon]
        case "per-module-full":
            return [*by_module(*point.QUANTITIES), *over_depth(*point.QUANTITIES)]
    found = [path for path in known if fnmatchcase(path, name.replace("[", "[[]"))] if "*" in name else [name]
    if not found or not set(found) <= {*known, *point.WHOLE_RECIPE}:
        raise InputError(f"{origin} {name}: {_refusal(recipe, known, name)}")
    return found


def _scaled_by_others(model: ModelShape) -> set[str]:
    """Return the modules whose init_std need not be searched, because searching other values has the same effect.

    With Adam, if the init_std and lr of a matrix are multiplied by c, the matrix stays c times as large throughout
    the training, except for effects of eps, clipping and decay (``tests/tuning/test_valleys.py`` shows this). So it
    is enough to search the lr of two kinds of matrices:

    - Queries and keys with QK-norm. The norm removes c, so only the ratio of init_std and lr matters.
    - Matrices for which c multiplies the output of their branch. The residual multiplier does the same.

    The result is empty for models with biases, because c does not multiply the biases.
    """
    if model.bias or model.has_bias("attention.query"):
        return set()
    linear = {"mlp.in"} if model.activation != "gelu" else set()  # relu and a gate pass a factor on
    normed = {"attention.query", "attention.key"} if model.qk_norm else set()
    return {*BRANCH_ENDS, "attention.value"} | linear | normed


def _refusal(recipe: Recipe, known: Iterable[str], path: str) -> str:
    """Return why ``path`` cannot be searched, and what to type instead, such as a path of ``known``."""
    keys = split_path(path)
    of_module = path.startswith("hyperparameters.modules.") and len(keys) == 4 and keys[3] in point.QUANTITIES
    if of_module and (reason := recipe.hyperparameters.refusal(recipe.model.roles, keys[2], keys[3])):
        return reason
    if close := get_close_matches(path, [*SETS, *known], 1, 0.8):
        return f"not a value to search; did you mean {close[0]}?"
    values = ", ".join((point.WARM_UP, point.BATCH, *point.OTHERS, point.TOKENS))
    return (
        f"not a value to search; give a set ({', '.join(SETS)}), or a value: {values}, hyperparameters.Q, "
        "hyperparameters.modules.M.Q or hyperparameters.depth.Q[0], "
        f"where Q is one of {', '.join(point.QUANTITIES)}, and M is one of {', '.join(recipe.model.modules)}"
    )


def _why_not_searched(recipe: Recipe, path: str) -> str | None:
    value, quantity, decay = point.value_at(recipe, path), point.quantity_of(path), recipe.schedule.decay
    reason = None
    if path in point.MUON and value is None:
        reason = (
            f"the recipe does not set it, so it equals hyperparameters.{quantity}; set it in the recipe, or search "
            f"hyperparameters.{quantity}, which then changes both"
            if recipe.hyperparameters.optimizer == "muon"
            else 'the optimizer is not Muon; set hyperparameters.optimizer = "muon"'
        )
    elif quantity == "init_std" and recipe.start.weights:
        reason = "training starts from the [start] weights, so no initial values are drawn"
    elif path == point.OPTIMIZER and value == "muon":
        reason = "a search compares only adamw and adam; tune a recipe with muon and a recipe with adamw separately"
    elif value is None:
        reason = (
            f'init = "{recipe.hyperparameters.init}" sets every standard deviation itself; search '
            'hyperparameters.modules.MODULE.init_std, or set init = "rule" and an init_std'
        )
    elif path == point.COOLDOWN and decay != "wsd":
        reason = f'decay = "{decay}" has no cooldown; set schedule.decay = "wsd"'
    elif path == point.FLOOR and decay == "constant":
        reason = 'decay = "constant" does not decay; set schedule.decay to another value'
    elif value == 0 and path not in point.TENTHS:
        reason = "it is 0 in the recipe, and a search multiplies it by factors; set it above 0"
    elif path not in point.WHOLE_RECIPE and getattr(recipe.hyperparameters, quantity) == 0:
        reason = f"hyperparameters.{quantity} is 0 in the recipe, and every multiple of 0 is 0; set it above 0"
    elif path not in point.CHOICES:
        for end in (-FINEST, FINEST):
            if invalid := why_invalid(recipe, path, end):
                reason = reason or f"the recipe is invalid if this value changes by {end:+g} octaves: {invalid}"
    return reason


def _dimension(recipe: Recipe, path: str, ends: tuple[float, float] | None) -> Dimension:
    """Return the dimension of a searched value. ``ends`` is its range in ``[tuning.octaves]``, if given."""
    value = point.value_at(recipe, path)
    if isinstance(value, str):
        levels = point.levels(recipe, path)
        return Dimension(path, value, 0.0, len(levels) - 1.0, unit="choice", levels=levels, ends=("", ""))
    bounds, unit = bounds_of(path), "tenth" if path in point.TENTHS else "octave"
    assert value is not None
    if ends is None:
        (low, below), (high, above) = (reach(recipe, path, side) for side in (0, 1))
        near = max(low, -bounds.near), min(high, bounds.near)
        return Dimension(path, value, low, high, bounds.scale, unit, near=near, ends=(below, above))
    for end in ends:
        if reason := why_invalid(recipe, path, end):
            raise InputError(
                f"[tuning.octaves] {path}: the recipe is invalid if this value moves by {end:+g} octaves ({reason}); "
                "give a smaller range"
            )
    if all(point.values(recipe, {path: end})[path] == value for end in ends):
        raise InputError(
            f"[tuning.octaves] {path}: from {ends[0]:+g} to {ends[1]:+g} octaves the value stays {value:g}, "
            f"because it is a whole number of {'sequences' if path == point.BATCH else 'tokens'}; give a wider range"
        )
    low, high = ends
    if unit == "tenth":  # stay within the values that a recipe may have
        low = max(low, point.distance(path, value, 0.0))
        high = min(high, point.distance(path, value, point.TENTHS[path]))
    return Dimension(path, value, low, high, bounds.scale, unit, ends=("the limit of [tuning.octaves]",) * 2)
