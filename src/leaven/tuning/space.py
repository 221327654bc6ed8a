"""What is searched: values of a recipe, each over some octaves around the centre."""

from collections.abc import Mapping
from dataclasses import dataclass

from leaven.recipe.errors import InputError
from leaven.recipe.hyperparameters import Multipliers
from leaven.recipe.recipe import Recipe, split_path

# Octaves to either side of the centre. The landscape is flat near the optimum (half an octave of lr costs about 0.1%
# of the loss) and falls off a cliff far above it, so the box is wide and the search starts in its middle.
_REACH = {"lr": 3.0, "init_std": 2.0, "weight_decay": 3.0, "residual": 1.5, "eps": 6.0, "beta1": 2.0, "beta2": 2.0}
_MODULES_ONLY = ("beta1", "beta2")  # as multipliers of 1 - beta; the betas themselves have no octaves around them
_GLOBAL = ("lr", "init_std", "weight_decay", "residual")


@dataclass(frozen=True)
class Dimension:
    """One searched value, on a log scale: ``centre`` times 2 to the power of -reach to +reach."""

    path: str
    centre: float
    reach: float

    @property
    def low(self) -> float:
        return self.centre * 2**-self.reach

    @property
    def high(self) -> float:
        return self.centre * 2**self.reach


@dataclass(frozen=True)
class Space:
    dimensions: tuple[Dimension, ...]

    @property
    def paths(self) -> tuple[str, ...]:
        return tuple(dimension.path for dimension in self.dimensions)

    @property
    def centre(self) -> dict[str, float]:
        return {dimension.path: dimension.centre for dimension in self.dimensions}


def space(recipe: Recipe, which: str) -> Space:
    """``global``, ``per-module`` (global and one lr multiplier a module), or paths with commas between them.

    Raises:
        InputError: if a path is no searchable value of the recipe, or is 0, around which there are no octaves.
    """
    paths = [f"hyperparameters.{name}" for name in _GLOBAL if getattr(recipe.hyperparameters, name) is not None]
    if which == "per-module":
        paths += [f"hyperparameters.modules.{module}.lr" for module in recipe.model.modules]
    elif which != "global":
        paths = [path.strip() for path in which.split(",")]
    return Space(tuple(_dimension(recipe, path) for path in paths))


def _dimension(recipe: Recipe, path: str) -> Dimension:
    keys = split_path(path)
    centre: float | None = None
    if keys[:2] == ["hyperparameters", "modules"] and len(keys) == 4 and keys[2] in recipe.model.modules:
        centre = getattr(recipe.hyperparameters.modules.get(keys[2], Multipliers()), keys[3], None)
    elif keys[0] == "hyperparameters" and keys[-1] not in _MODULES_ONLY and len(keys) == 2:
        centre = getattr(recipe.hyperparameters, keys[1], None)
    reach = _REACH.get(keys[-1])
    if path == "hyperparameters.init_std" and centre is None:
        raise InputError(
            f'--space {path}: init = "{recipe.hyperparameters.init}" sets every standard deviation itself; search '
            "hyperparameters.modules.MODULE.init_std, or write an init_std"
        )
    if len(keys) == 4 and centre is not None:
        probe = {keys[2]: Multipliers.model_validate({keys[3]: 2.0})}
        try:
            recipe.hyperparameters.model_copy(update={"modules": probe}).require_modules(recipe.model.roles)
        except ValueError as error:
            raise InputError(f"--space {path}: {error}") from None
    if centre is None or reach is None:
        known = ", ".join(f"hyperparameters.{name}" for name in _REACH if name not in _MODULES_ONLY)
        raise InputError(
            f"--space {path}: not a value to search; there are {known}, and "
            f"hyperparameters.modules.MODULE.{'|'.join(Multipliers.model_fields)} "
            f"with MODULE one of {', '.join(recipe.model.modules)}"
        )
    if centre == 0:
        raise InputError(f"--space {path}: it is 0 in the recipe, and a search goes by factors; set it above 0")
    return Dimension(path, float(centre), reach)


def moved(recipe: Recipe, values: Mapping[str, float], seed: int | None = None) -> Recipe:
    """The recipe at a point of the space, and with another seed if one is given."""
    changes: dict[str, float] = dict(values)
    return recipe.replace(changes | ({} if seed is None else {"data.seed": seed}))
