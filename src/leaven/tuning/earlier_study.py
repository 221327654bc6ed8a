"""Read the trials of an earlier study, which a new search uses as prior knowledge (``--from-study``).

The two studies may differ in model size and searched values, but their recipes must have the same scaling rule and
base. Then equal hyperparameters mean the same at every size. Each trial becomes a point of the new search. The point
has, for each searched value, the distance from the value in the new recipe to the value in the trial. There are three
special cases:

- The multiplier of a module, such as the lr of the embedding: if the new search does not search the global value,
  the distance of the global value is added. For example, twice the global lr adds 1 octave to the lr of each module.
- The warm-up is compared as a share of the run's tokens.
- The batch size and the run's tokens have no scaling rule. So their distances are measured from the start of the
  earlier study, or from its best point for a value that ``leaven tune`` chose in the new recipe.

If both studies run a command, values of the same name are compared. At least one name must be in both.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from leaven.errors import InputError
from leaven.recipe.files import read_recipe
from leaven.recipe.recipe import Difference, Recipe, effective_differences, split_path
from leaven.recipe.units import listed
from leaven.scaling.cells import Ratios
from leaven.scaling.table import parameter_table
from leaven.scaling.tested_ranges import unlike, unlike_training
from leaven.scaling.transfer import FREE_FIELDS, MINOR_FIELDS, searched_paths
from leaven.tuning.algorithm.surrogate import EarlierTrials
from leaven.tuning.command import CommandFile, CommandSpace, command_space, is_command_file
from leaven.tuning.point import (
    BATCH,
    CHOICES,
    DROPOUT,
    TOKENS,
    WARM_UP,
    Value,
    distance,
    levels,
    quantity_of,
    recipe_at,
    value_at,
    value_like,
)
from leaven.tuning.space import SearchSpace, Space
from leaven.tuning.study_document import Dimension, StudyDocument, StudyTrial, read_document

PointOf = Callable[[StudyTrial, Sequence[Dimension]], list[float]]

LEAST = 4  # the fewest finished trials that an earlier study must have
# Values that two studies may have of their own (sizes, order of the text, checkpoints), and values that `unlike` and
# `unlike_training` of `leaven.scaling.tested_ranges` compare.
_COMPARED: tuple[str, ...] = (BATCH, TOKENS, "scaling.base", "scaling.token_exponent_interval", "batch.micro_batch")
_COMPARED += ("model.experts.d_expert", "data.source", "data.documents", "data.seed", "data.corrupt_share")
_COMPARED += ("schedule.", "stability.", "evaluation.", "model.vocab_size", "model.seq_len", DROPOUT)
_COMPARED += tuple(f"model.{size}" for size in FREE_FIELDS - MINOR_FIELDS)
EARLIER_DEGREES = 4  # the fewest degrees of freedom with which the noise of an earlier study is used


def earlier_trials(folder: Path, space: SearchSpace) -> tuple[EarlierTrials, float | None]:
    """Return the completed trials of the study in ``folder`` as points of ``space``, and the study's noise, or None
    if too few trials measured it. Raise InputError if the study is damaged, has fewer than ``LEAST`` trials, or
    cannot be compared with ``space``."""
    what = f"--from-study {folder}"
    document = _read(folder, what)
    if isinstance(space, Space):
        point_of = _compare_recipes(folder, space, document, what)
    elif isinstance(space, CommandSpace) and is_command_file(folder / "centre.toml"):
        point_of = partial(_point_of_command, space)
    else:
        raise InputError(f"{what}: this study has no command file, unlike the new search; leave --from-study out")
    if isinstance(space, CommandSpace) and not set(space.paths) & {d.path for d in document.dimensions}:
        raise InputError(
            f"{what}: this study searched {listed([d.path for d in document.dimensions], 'and')}, and none of these "
            "values is in the command file; rename a value of the file to its name in this study, or leave "
            "--from-study out"
        )
    if isinstance(space, Space) and len(_not_searched(space, {d.path for d in document.dimensions})) == len(
        space.paths
    ):
        raise InputError(f"{what}: this study searched none of these values; leave --from-study out")
    others = [d for d in document.dimensions if d.path not in space.paths and d.path not in CHOICES]
    ended = [trial for trial in document.trials if trial.state == "complete" and trial.loss is not None]
    if len(ended) < LEAST:
        raise InputError(
            f"{what}: only {len(ended)} of its trials are finished, at least {LEAST} are needed; wait for more, "
            "or leave --from-study out"
        )
    try:
        rows = [point_of(trial, others) for trial in ended]
    except InputError:
        raise
    except (ValueError, ArithmeticError, AttributeError, KeyError, TypeError) as error:
        raise InputError(
            f"{what}: its trials cannot be compared with this {space.kind} ({error}); usual cause: a value that is 0 "
            f"or missing in one of the two {space.kind}s; leave --from-study out"
        ) from None
    noise = document.noise_floor if document.noise_runs >= EARLIER_DEGREES else None
    return EarlierTrials(np.array(rows), np.array([trial.loss for trial in ended], float), noise), noise


def unlike_earlier(folder: Path, space: SearchSpace) -> list[str]:
    """Return warnings about differences between the new search and the study in ``folder``."""
    what, before = f"--from-study {folder}", {d.path for d in read_document(folder).dimensions}
    if isinstance(space, Space):
        there, here = read_recipe(folder / "centre.toml"), space.recipe
        searched = before | set(space.paths)
        found = [*unlike(dict(there.model), here), *unlike_training(there, here)]
        messages = [one.message for one in found if one.about != "dropout" or DROPOUT not in searched]
        if others := [f"{path} {old} (here {now})" for path, old, now in _other_values(there, here, searched)]:
            messages.append(f"its recipe has {listed(others, 'and')}, so losses and best values may differ")
        if missing := _not_searched(space, before):
            messages.append(f"it did not search {listed(missing, 'and')}, so it says nothing about these values")
        return [f"{what}: {message}" for message in messages]
    messages = []
    if isinstance(space, CommandSpace):
        file, earlier = space.file, command_space(folder / "centre.toml").file
        if (file.command, file.loss) != (earlier.command, earlier.loss):
            messages = [f"{what}: its command or source of losses differs, so losses and noise may not be comparable"]
    if missing := sorted(set(space.paths) - before):
        messages.append(
            f"{what}: it did not search {listed(missing, 'and')}, so its trials count as trials at the start value; "
            "if a name was changed since, use the old name here"
        )
    return messages


def _other_values(there: Recipe, here: Recipe, searched: set[str]) -> list[Difference]:
    """Return the differences between two recipes that may change the loss, without ``searched`` values, sizes that
    the rule scales, and values of which `unlike` and `unlike_training` warn."""
    scaled = any(parameter_table(recipe).ratios != Ratios() for recipe in (there, here))
    starts = {recipe.start.folder.absolute() for recipe in (there, here) if recipe.start.folder}
    known = (*_COMPARED, *(() if scaled else ("scaling.",)), *(("start.",) if len(starts) <= 1 else ()))
    profiles = {path.partition("[")[0] for path in searched}
    return [
        each
        for each in effective_differences(there, here)
        if each[0] not in profiles and not each[0].startswith(known)
    ]


def _not_searched(space: SearchSpace, searched: set[str]) -> list[str]:
    """Return the paths of a space about which an earlier study of the paths ``searched`` says nothing. The global
    values of that study are also those of modules."""
    return [path for path in space.paths if not {path, f"hyperparameters.{quantity_of(path)}"} & searched]


def _compare_recipes(folder: Path, space: Space, document: StudyDocument, what: str) -> PointOf:
    """Return a function that converts a trial of the earlier study in ``folder`` to distances from ``space.recipe``.
    Raise InputError if the two recipes differ in base or scaling rule."""
    recipe, centre = space.recipe, read_recipe(folder / "centre.toml")
    if (centre.base, centre.scaling.rule) != (recipe.base, recipe.scaling.rule):
        raise InputError(
            f"{what}: its recipe has another base or scaling rule, so its values cannot be compared; "
            "make both recipes with leaven transfer from one base"
        )

    def point_of(trial: StudyTrial, others: Sequence[Dimension]) -> list[float]:
        require_start(document, centre, what)
        there = recipe_at(centre, trial.octaves or {})
        since = {path: (trial.octaves or {}).get(path, 0.0) for path in (BATCH, TOKENS)}
        for path in since.keys() & searched_paths(recipe):
            since[path] -= document.octaves.get(path, 0.0)
        own = [_octaves(path, there, space, since) for path in space.paths]
        return [*own, *(_octaves(other.path, there, space, since) / other.scale for other in others)]

    return point_of


def require_start(document: StudyDocument, start: Recipe | CommandFile, what: str) -> None:
    """Raise InputError if a study did not begin at ``start``, which was read from the study's centre.toml."""
    for each in document.dimensions:
        value = start_of(start, each.path)
        if value != each.centre:
            raise InputError(
                f"{what}: {each.path} is {value} in centre.toml, but the study began at {each.centre}; "
                "remove this file and run the study's leaven tune command again to write a new one"
            )


def start_of(start: Recipe | CommandFile, path: str) -> Value | None:
    """Return the value at ``path`` in a recipe or command file, or None if missing."""
    try:
        return value_at(start, path) if isinstance(start, Recipe) else start.space[path].dimension(path).centre
    except (AttributeError, LookupError):
        return None


def _point_of_command(space: CommandSpace, trial: StudyTrial, others: Sequence[Dimension]) -> list[float]:
    """Return the distances of an earlier study's trial from the start point: for ``space`` (0 for a value that the
    trial lacks), then for ``others``, which only the earlier study searched, each divided by its ``scale``."""
    own = [
        space.file.space[path].distance(trial.values[path]) if path in trial.values else 0.0 for path in space.paths
    ]
    return [*own, *((trial.octaves or {})[other.path] / other.scale for other in others)]


def _read(folder: Path, what: str) -> StudyDocument:
    try:
        return read_document(folder)
    except OSError:
        raise InputError(
            f"{what}: no study.json in this folder; give the folder of a study; to resume a study that began with "
            "--from-study, leave this option out"
        ) from None
    except ValueError:
        raise InputError(
            f"{what}: its study.json is damaged; run the leaven tune command of that study again to rewrite it"
        ) from None


def _octaves(path: str, there: Recipe, space: Space, since: Mapping[str, float]) -> float:
    """Return the distance from the value at ``path`` in ``space.recipe`` to that in ``there``, in the unit of the
    value; for a choice, the index of the level that ``there`` has. ``since`` has known distances, by path."""
    here = space.recipe
    if path in since:
        return since[path]
    if path == WARM_UP:
        share, own_share = (of.schedule.warmup_tokens / of.data.tokens for of in (there, here))
        return math.log2(share / own_share)
    if path in CHOICES:
        return float(levels(here, path).index(str(value_at(there, path))))
    like = here if path in space.paths else there
    to, own = value_like(there, path, like), value_like(here, path, like)
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
