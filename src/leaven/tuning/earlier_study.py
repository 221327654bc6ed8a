"""Read the trials of an earlier study, as knowledge for a search of another size or space (``--from-study``).

The two studies must share their base and scaling rule: then equal hyperparameters mean the same at every size. The
trials become points of this search: each value is written as a distance from the recipe of this search.

- For the multiplier of a module, the distance includes that of the global value: a study that doubled the global lr
  has doubled the lr of every module. So the global values of the earlier study inform a search by module.
- For the warm-up, the distance is that of its share of the run.
- Batch and tokens are chosen for a size, not scaled by a rule. Their distance is measured in the earlier study, from
  its start. If a study chose the batch or tokens of this recipe, the distance is measured from the best point of the
  earlier study.
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

LEAST = 4  # finished trials; fewer say too little
MEASURED = 4  # degrees of freedom from which a noise is taken over as known


def earlier_trials(folder: Path, space: Space) -> tuple[EarlierTrials, float | None]:
    """Return the finished trials of the study in ``folder``, and its noise if it is known.

    The trials are at points of ``space``. After the values of ``space``, each point has the numbers that only the
    earlier study searched, in steps of their own scale.

    Raises:
        InputError: if the folder has no study that can be read, or one with another base or rule or with too few
            finished trials, or with a value of 0 that this search moves.
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
        raise InputError(f"{what}: it has {len(ended)} finished trials, fewer than {LEAST}; wait, or leave it out")
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
            f"{what}: its trials cannot be compared with this recipe ({error}); a value of 0, or one that the other "
            "recipe lacks, has no distance; leave it out"
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
    """Return the distance of the value at ``path`` from ``space.recipe`` to ``there``, the recipe of a trial.

    ``since`` has the distances of batch and tokens.
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
    if to == own or to is None or own is None:  # None: an init_std that a named init sets
        octaves = 0.0
    elif path.startswith(("hyperparameters.modules.", "hyperparameters.depth.")):
        octaves = math.log2(float(to) / float(own))  # of a multiplier; for a beta, of an exponent
    else:
        octaves = distance(path, float(own), float(to))
    globally = f"hyperparameters.{split_path(path)[-1]}"
    if path.startswith("hyperparameters.modules.") and globally not in space.paths:
        octaves += _octaves(globally, there, space, since)
    return octaves
