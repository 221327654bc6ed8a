"""Join a study in a store, or create it.

A study has the settings (recipe, space, method and so on) with which it was created. A command with other settings is
refused, because its trials could not be compared with those in the store.
"""

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any

import numpy as np
import optuna
from optuna.exceptions import DuplicatedStudyError
from optuna.storages import BaseStorage

from leaven.recipe.errors import InputError
from leaven.recipe.recipe import Recipe, differences
from leaven.training.recipe_changes import describe_changes
from leaven.tuning.algorithm.surrogate import EarlierTrials
from leaven.tuning.algorithm.trust_region import Axes
from leaven.tuning.service.samplers import METHODS, SeededSampler

ABOUT = "leaven:about"  # an attribute of a study: its settings (recipe, space, method and so on) by name
EXPECTED, EARLIER = "expected", "earlier"  # the settings with knowledge from before the search
OPTIONS = {EXPECTED: "--prior (or expected)", EARLIER: "--from-study (or earlier)"}
LONGEST = 512  # characters of a study's name in Optuna's tables
PATIENCE = 5.0  # seconds to wait for the settings of a study that another command has just created


def check_search(method: str, axes: Axes, name: str) -> None:
    """Raise InputError if the method does not exist or ignores the prior knowledge in ``axes``, or if the name of the
    study is empty or too long for a store."""
    if method not in METHODS:
        close = get_close_matches(str(method), METHODS, n=1, cutoff=0.5)
        hint = f"did you mean {close[0]}? " if close else ""
        raise InputError(f"method {method!s:.60}: unknown; {hint}choose from {', '.join(METHODS)}")
    if method != "trust-region" and (axes.expected or axes.earlier):
        raise InputError(
            f"method {method} uses no knowledge from before the search; leave {' and '.join(OPTIONS.values())} out, "
            "or use method trust-region"
        )
    if not (isinstance(name, str) and 0 < len(name) <= LONGEST):
        raise InputError(f"the study's name is {name!r:.60}; give it a text of 1 to {LONGEST} characters")


def check_recipe(there: Recipe, here: Recipe, what: str) -> None:
    """Raise InputError if the recipe of a study (``there``) differs from the recipe of this command (``here``)."""
    if changes := differences(there, here):
        raise InputError(f"{what} has another recipe: {describe_changes(changes)}; use another --study")


def join_study(
    store: BaseStorage,
    name: str,
    what: str,
    instead: str,
    *,
    method: str,
    axes: Axes,
    seed: int,
    noise: float | None,
    own_noise: bool = True,
    recipe: Recipe | None = None,
    shared: Mapping[str, Any] = MappingProxyType({}),
) -> tuple[optuna.Study, Axes, float | None]:
    """Return (study, axes, noise) of the study called ``name``. If it does not exist, create it.

    A new study gets this command's settings and prior knowledge. A stored study keeps the prior knowledge with which
    it was created, even if scaling laws or the earlier study would give other knowledge now. The returned axes
    contain the knowledge of the stored study.

    Args:
        what: the name of the study in messages.
        instead: what to do if the study has other settings, in messages.
        own_noise: if true, ``noise`` must equal the noise of the stored study. If false, a stored study that was
            created with the trials of an earlier study keeps its noise, and this noise is returned.
        recipe: the recipe that all commands on the study must share.
        shared: further settings that all commands on the study must share.

    Raises:
        InputError: if the study was created by another program, with other settings, or without the kind of prior
            knowledge that this command gives.
    """
    here: dict[str, Any] = {
        "method": method,
        "space": {
            key: ["choice", len(limits), axes.start[key]] if isinstance(limits, range) else [*limits, axes.start[key]]
            for key, limits in axes.limits.items()
        },
        "scales": dict(zip(axes.limits, axes.scale.tolist(), strict=True)),
        "seed": seed,
        "noise": noise,
    }
    if axes.near:
        here["near"] = {key: list(both) for key, both in axes.near.items()}
    here |= shared
    created = dict(here)
    if axes.expected:
        created[EXPECTED] = {key: list(both) for key, both in axes.expected.items()}
    if axes.earlier is not None:
        created[EARLIER] = {"points": axes.earlier.points.tolist(), "losses": axes.earlier.losses.tolist()}
        created[EARLIER]["noise"] = axes.earlier.noise
    if recipe is not None:
        created["recipe"] = recipe.model_dump(mode="json")
    study = optuna_study(store, name, SeededSampler(method, axes, seed), created, what)
    there = study.user_attrs[ABOUT]
    if recipe is not None and "recipe" in there:
        check_recipe(Recipe.model_validate(there["recipe"]), recipe, what)
    if EARLIER in there and not own_noise:
        here["noise"] = noise = there["noise"]
    for key, value in here.items():
        if key not in there:
            raise InputError(f"{what} has no {key}, so another program created it; {instead}")
        if there[key] != value:
            raise InputError(f"{what} has another {key}: {_difference(there[key], value)}; {instead}")
    for key, option in OPTIONS.items():
        if key in created and key not in there:
            raise InputError(f"{what} was created without {option}; leave this option out, or use another study")
    expected = {key: (low, high) for key, (low, high) in there.get(EXPECTED, {}).items()}
    earlier = there.get(EARLIER)
    if earlier is not None:
        earlier = EarlierTrials(np.array(earlier["points"]), np.array(earlier["losses"]), earlier["noise"])
    return study, replace(axes, expected=expected, earlier=earlier), noise


def optuna_study(
    store: BaseStorage, name: str, sampler: optuna.samplers.BaseSampler, settings: dict[str, Any], what: str
) -> optuna.Study:
    """Return the Optuna study called ``name``. If it does not exist, create it with these ``settings``.

    If several commands start at once, one of them creates the study and then writes its settings. If that command
    dies before it has written the settings, another command writes its own settings. The study is looked up before it
    is created, because a failed attempt to create it would add a line to the file of a journal storage.
    """

    def load() -> optuna.Study:
        return optuna.load_study(study_name=name, storage=store, sampler=sampler)

    try:
        study = load()
    except KeyError:
        with suppress(DuplicatedStudyError):  # another command was quicker
            optuna.create_study(study_name=name, storage=store).set_user_attr(ABOUT, settings)
        study = load()
    until = time.monotonic() + PATIENCE
    while not study.user_attrs and not study.get_trials(deepcopy=False) and time.monotonic() < until:
        time.sleep(0.02)
    if ABOUT not in study.user_attrs:
        if study.user_attrs or study.get_trials(deepcopy=False):
            raise InputError(
                f"{what} was created by an older version of leaven or by another program; use another name or folder"
            )
        study.set_user_attr(ABOUT, settings)
    return study


def _difference(there: Any, here: Any) -> str:
    there, here = ("none" if value is None else value for value in (there, here))
    if not (isinstance(there, dict) and isinstance(here, dict)):
        return f"{there} in the study, {here} in this command"
    parts = [
        f"{n} {there[n]} in the study, {here[n]} in this command" for n in there if n in here and there[n] != here[n]
    ]
    for kept, other, where in ((there, here, "in the study"), (here, there, "in this command")):
        alone = [n for n in kept if n not in other]
        parts += [f"{', '.join(alone)} only {where}"] if alone else []
    return "; ".join(parts)
