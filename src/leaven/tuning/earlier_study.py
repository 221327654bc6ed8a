"""Read the trials of an earlier study, which a new search uses as prior knowledge (``--from-study``).

The new search may have another model size, or search other values. Both recipes must have the same base (the scale at
which hyperparameters apply unchanged) and the same scaling rule, so that equal hyperparameters mean the same at every
size. Each trial becomes a point of the new search: for each value, the distance from the recipe of the new search.

- The distance of a module's multiplier includes the distance of the global value, because a study that doubled the
  global lr has doubled the lr of every module. So global values of the earlier study inform a search by module.
- The warm-up is compared as a share of the run's tokens.
- Batch and tokens are chosen for each model size, and no rule scales them. So their distance is measured from the
  start of the earlier study. But if a study chose the batch or tokens of the new recipe, the distance of this value
  is measured from the best point of the earlier study.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from pydantic import ValidationError

from leaven.recipe.errors import InputError
from leaven.recipe.files import read_recipe
from leaven.recipe.recipe import Recipe, split_path
from leaven.scaling.transfer import searched_paths
from leaven.tuning.algorithm.prior import EarlierTrials
from leaven.tuning.point import BATCH, CHOICES, TOKENS, WARM_UP, distance, levels, recipe_at, value_at
from leaven.tuning.space import Space
from leaven.tuning.study_document import StudyDocument

LEAST = 4  # the fewest finished trials that an earlier study must have
MEASURED = 4  # the fewest degrees of freedom of a noise that the new search takes over


def earlier_trials(folder: Path, space: Space) -> tuple[EarlierTrials, float | None]:
    """Return (trials, noise): the finished trials of the study in ``folder`` as points of ``space``, and the standard
    deviation of the loss between seeds in this study. The noise is None if too few runs measured it.

    The first columns of the points are the distances of the values of ``space``. The other columns are the distances,
    divided by their scales, of the numbers that only the earlier study searched.

    Raises:
        InputError: if the folder has no readable study, if that study has another base or scaling rule or too few
            finished trials, or if it has a value of 0 that the new search moves.
    """
    what, recipe = f"--from-study {folder}", space.recipe
    document, centre = _read(folder, what)
    if (centre.base, centre.scaling.rule) != (recipe.base, recipe.scaling.rule):
        raise InputError(
            f"{what}: its recipe has another base or scaling rule, so equal values mean something else; "
            "make both recipes with leaven transfer from one base"
        )
    others = [d for d in document.dimensions if d.path not in space.paths and d.path not in CHOICES]
    ended = [trial for trial in document.trials if trial.state == "complete" and trial.loss is not None]
    if len(ended) < LEAST:
        raise InputError(
            f"{what}: only {len(ended)} of its trials are finished, at least {LEAST} are needed; wait for more, "
            "or leave --from-study out"
        )
    rows = []
    try:
        for trial in ended:
            there = recipe_at(centre, trial.octaves or {})
            since = {path: (trial.octaves or {}).get(path, 0.0) for path in (BATCH, TOKENS)}
            for path in since.keys() & searched_paths(recipe):
                since[path] -= document.octaves.get(path, 0.0)
            own = [_octaves(path, there, space, since) for path in space.paths]
            rows.append([*own, *(_octaves(other.path, there, space, since) / other.scale for other in others)])
    except (ValueError, ArithmeticError, AttributeError, KeyError, TypeError) as error:
        raise InputError(
            f"{what}: its trials cannot be compared with this recipe ({error}); usual cause: a value that is 0 or "
            "missing in one of the two recipes; leave --from-study out"
        ) from None
    noise = document.noise_floor if document.noise_runs >= MEASURED else None
    return EarlierTrials(np.array(rows), np.array([trial.loss for trial in ended], float), noise), noise


def _read(folder: Path, what: str) -> tuple[StudyDocument, Recipe]:
    try:
        document = StudyDocument.model_validate(json.loads((folder / "study.json").read_text(encoding="utf-8")))
    except OSError:
        raise InputError(f"{what}: no study.json there; give the folder of a leaven tune --study") from None
    except (ValueError, ValidationError):
        raise InputError(
            f"{what}: its study.json is damaged; run its leaven tune command again to write it"
        ) from None
    return document, read_recipe(folder / "centre.toml")


def _octaves(path: str, there: Recipe, space: Space, since: Mapping[str, float]) -> float:
    """Return the distance from the value at ``path`` in ``space.recipe`` to the value in ``there``, the recipe of a
    trial.

    ``since`` has the distances of ``batch.tokens`` and ``data.tokens`` by path.
    """
    here = space.recipe
    if path in since:
        return since[path]
    if path == WARM_UP:
        share, own_share = (of.schedule.warmup_tokens / of.data.tokens for of in (there, here))
        return math.log2(share / own_share)
    if path in CHOICES:
        return float(levels(here, path).index(str(value_at(there, path))))
    to, own = value_at(there, path), value_at(here, path)
    if to == own or to is None or own is None:  # None: a named init sets the init_std
        octaves = 0.0
    elif path.startswith(("hyperparameters.modules.", "hyperparameters.depth.")):
        octaves = math.log2(float(to) / float(own))  # for a beta, the multiplier is an exponent
    else:
        octaves = distance(path, float(own), float(to))
    globally = f"hyperparameters.{split_path(path)[-1]}"
    if path.startswith("hyperparameters.modules.") and globally not in space.paths:
        octaves += _octaves(globally, there, space, since)
    return octaves
