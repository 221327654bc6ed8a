"""Read the trials of an earlier study, as knowledge for a search of another size or space (``--from-study``).

The two studies must share their base and scaling rule: then equal hyperparameters mean the same at every size. Batch,
tokens and warm-up are not scaled by a rule; they count from the start of their own study.

A value by module counts as trained, together with the global value: a study that doubled the global lr has doubled
the lr of every module. So the global values of the earlier study inform a search by module.
"""

import json
from pathlib import Path

import numpy as np
from pydantic import ValidationError

from leaven.recipe.errors import InputError
from leaven.recipe.files import read_recipe
from leaven.recipe.recipe import Recipe, split_path
from leaven.tuning.algorithm.prior import EarlierTrials
from leaven.tuning.point import BATCH, CHOICES, TOKENS, WARM_UP, Value, distance, recipe_at, value_at
from leaven.tuning.space import Space
from leaven.tuning.study_document import StudyDocument

LEAST = 4  # finished trials, fewer say too little
MEASURED = 2  # degrees of freedom from which a noise is used again
_OF_THE_RUN = (BATCH, TOKENS, WARM_UP)


def earlier_trials(folder: Path, space: Space) -> tuple[EarlierTrials, float | None]:
    """Return the finished trials of the study in ``folder``, at points of ``space``, and its noise if it is known.

    Values that only the earlier study searched follow those of ``space``, in steps of their own scale.

    Raises:
        InputError: if the folder has no study, or one with another base, rule or search method for a choice, or with
            too few finished trials.
    """
    document, centre = _read(folder)
    what, recipe = f"--from-study {folder}", space.recipe
    if (centre.base, centre.scaling.rule) != (recipe.base, recipe.scaling.rule):
        raise InputError(
            f"{what}: its recipe has another base or scaling rule, so equal values mean something else; "
            "make both recipes with leaven transfer from one base"
        )
    others = [d for d in document.dimensions if d.path not in space.paths and d.path not in CHOICES]
    ended = [trial for trial in document.trials if trial.state == "complete" and trial.loss is not None]
    if len(ended) < LEAST:
        raise InputError(f"{what}: it has {len(ended)} finished trials, fewer than {LEAST}; wait, or leave it out")
    rows = []
    for trial in ended:
        octaves = trial.octaves or {}
        there = recipe_at(centre, octaves)
        own = [_octaves(path, octaves, there, recipe, space) for path in space.paths]
        rows.append([*own, *(octaves[other.path] / other.scale for other in others)])
    noise = document.noise_floor if document.noise_runs >= MEASURED else None
    losses = np.array([trial.loss for trial in ended], float)
    return EarlierTrials(np.array(rows), losses, document.noise_floor or 0.0), noise


def _read(folder: Path) -> tuple[StudyDocument, Recipe]:
    try:
        document = StudyDocument.model_validate(json.loads((folder / "study.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, ValidationError):
        raise InputError(f"--from-study {folder}: no study; give the folder of a leaven tune --study") from None
    return document, read_recipe(folder / "centre.toml")


def _octaves(path: str, octaves: dict[str, float], there: Recipe, here: Recipe, space: Space) -> float:
    """Return how far the value at ``path`` is from the recipe ``here`` in an earlier trial: the recipe ``there``, at
    a point of its own study. A choice is a level of ``space``."""
    if path in _OF_THE_RUN:
        return octaves.get(path, 0.0)
    to, own = _as_trained(there, path, space), _as_trained(here, path, space)
    if path in CHOICES:
        levels = next(d.levels for d in space.dimensions if d.path == path)
        return float(levels.index(str(to))) if to in levels else 0.0
    if to is None or own is None:
        return 0.0
    return distance(path, float(own), float(to))


def _as_trained(recipe: Recipe, path: str, space: Space) -> Value | None:
    """Return the value at a path; for a value by module times the global value, if that is not searched itself."""
    value, keys = value_at(recipe, path), split_path(path)
    globally = f"hyperparameters.{keys[-1]}"
    if keys[1:2] != ["modules"] or globally in space.paths or value is None:
        return value
    whole = value_at(recipe, globally)
    if whole is None:
        return value
    return float(whole) ** float(value) if keys[-1].startswith("beta") else float(whole) * float(value)
