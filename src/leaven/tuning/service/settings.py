"""The settings of a study. The command that creates the study checks and stores them. Every command that joins the
study compares its own settings with them."""

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
from optuna.samplers import BaseSampler
from optuna.storages import BaseStorage

from leaven.recipe.errors import InputError
from leaven.recipe.recipe import Recipe, differences
from leaven.training.run_folder import describe_changes
from leaven.tuning.algorithm.prior import EarlierTrials
from leaven.tuning.algorithm.trust_region import Axes
from leaven.tuning.service.samplers import METHODS, sampler

ABOUT = "leaven:about"  # an attribute of a study: recipe, space, method and so on, by name
EXPECTED, EARLIER = "expected", "earlier"
OPTIONS = {EXPECTED: "--prior (or expected)", EARLIER: "--from-study (or earlier)"}
LONGEST = 512  # characters of a study's name, in Optuna's tables
PATIENCE, POLL = 5.0, 0.02  # seconds to wait for that attribute of a new study, and between looks

Settings = Mapping[str, Any]


def check_method(method: str) -> None:
    """Raise InputError if ``method`` is not the name of a search method."""
    if method not in METHODS:
        close = get_close_matches(str(method), METHODS, n=1, cutoff=0.5)
        hint = f"did you mean {close[0]}? " if close else ""
        raise InputError(f"method {method!s:.60}: {hint}there are {', '.join(METHODS)}")


def check_informed(method: str, axes: Axes) -> None:
    """Raise InputError if the axes have knowledge from before the search that the method does not use."""
    if method != "trust-region" and (axes.expected or axes.earlier):
        raise InputError(
            f"method {method} uses no knowledge from before the search; leave that out, or use method trust-region"
        )


def check_name(name: str) -> None:
    """Raise InputError if the name of a study does not fit in every kind of store."""
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
    shared: Settings = MappingProxyType({}),
) -> tuple[optuna.Study, Axes, float | None]:
    """Return the study called ``name``, its axes and its noise. If there is no such study, create it.

    A new study gets this command's settings and knowledge. The axes of a stored study have the knowledge with which
    it was created.

    Args:
        what: the name of the study in messages.
        instead: what to do if the study has other settings, in messages.
        own_noise: whether ``noise`` must equal the noise of the stored study. If false, a study that was created with
            the trials of an earlier one keeps its stored noise.
        recipe: the recipe that all commands on the study must share.
        shared: further settings that all commands on the study must share.

    Raises:
        InputError: if the study was created by another program, with other settings, or without knowledge of a kind
            that this command gives.
    """
    here = _search_settings(method, axes, seed, noise) | dict(shared)
    whole = here | _knowledge(axes) | ({"recipe": recipe.model_dump(mode="json")} if recipe is not None else {})
    study, there = _load_or_create(store, name, sampler(method, axes, seed), whole, what)
    if recipe is not None and "recipe" in there:
        check_recipe(Recipe.model_validate(there["recipe"]), recipe, what)
    if EARLIER in there and not own_noise:
        here["noise"] = noise = there["noise"]
    _check_same(there, here, what, instead)
    return study, _with_stored_knowledge(axes, there, what), noise


def _search_settings(method: str, axes: Axes, seed: int, noise: float | None) -> dict[str, Any]:
    """Return the settings that all commands on a study must share."""
    space = {
        name: ["choice", len(limits), axes.start[name]] if isinstance(limits, range) else [*limits, axes.start[name]]
        for name, limits in axes.limits.items()
    }
    near = {"near": {name: list(both) for name, both in axes.near.items()}} if axes.near else {}
    scales = dict(zip(axes.limits, axes.scale.tolist(), strict=True))
    return {"method": method, "space": space, "scales": scales, "seed": seed, "noise": noise, **near}


def _knowledge(axes: Axes) -> dict[str, Any]:
    """Return what is known before a search, to be stored with the study.

    A resumed search reads it from the store, because laws and the earlier study may have changed in between.
    """
    found: dict[str, Any] = (
        {EXPECTED: {name: list(both) for name, both in axes.expected.items()}} if axes.expected else {}
    )
    if axes.earlier is not None:
        points, losses = axes.earlier.points.tolist(), axes.earlier.losses.tolist()
        found[EARLIER] = {"points": points, "losses": losses, "noise": axes.earlier.noise}
    return found


def _with_stored_knowledge(axes: Axes, there: Settings, what: str) -> Axes:
    """Return the axes with the knowledge with which the study was created, even if this command gives none.

    Raises:
        InputError: if this command gives knowledge of a kind that the study was created without.
    """
    for given, key in ((axes.expected, EXPECTED), (axes.earlier, EARLIER)):
        if given and key not in there:
            raise InputError(f"{what} was created without {OPTIONS[key]}; leave that out, or use another study")
    earlier = there.get(EARLIER)
    if earlier is not None:
        earlier = EarlierTrials(np.array(earlier["points"]), np.array(earlier["losses"]), earlier["noise"])
    expected = {name: (low, high) for name, (low, high) in there.get(EXPECTED, {}).items()}
    return replace(axes, expected=expected, earlier=earlier)


def _load_or_create(
    store: BaseStorage, name: str, sampler: BaseSampler, here: Settings, what: str
) -> tuple[optuna.Study, dict[str, Any]]:
    """Return the study called ``name`` and its settings. If there is none, create it with the settings ``here``.

    The study is looked up first, because a failed attempt to create it adds a line to a journal. If several commands
    start at once, one of them creates the study and then writes its settings. If that command dies in between,
    another writes the settings. All commands use the settings that are stored in the end.

    Raises:
        InputError: if the study was created by another program.
    """
    arguments: dict[str, Any] = {"study_name": name, "storage": store, "sampler": sampler}
    try:
        study = optuna.load_study(**arguments)
    except KeyError:
        with suppress(DuplicatedStudyError):  # another was quicker
            optuna.create_study(**arguments).set_user_attr(ABOUT, dict(here))
        study = optuna.load_study(**arguments)

    def used() -> bool:
        return bool(study.user_attrs or study.get_trials(deepcopy=False))

    until = time.monotonic() + PATIENCE
    while ABOUT not in study.user_attrs and not used() and time.monotonic() < until:
        time.sleep(POLL)
    if ABOUT not in study.user_attrs:
        if used():
            raise InputError(
                f"{what} was created by an older version of leaven or by another program; use another name or folder"
            )
        study.set_user_attr(ABOUT, dict(here))
    return study, dict(study.user_attrs[ABOUT])


def _check_same(there: Settings, here: Settings, what: str, instead: str) -> None:
    """Check that the settings of a stored study equal those of this command.

    Raises:
        InputError: if the settings differ; the message says how.
    """
    for key, value in here.items():
        if key not in there:
            raise InputError(f"{what} was created by another program, because it has no {key}; {instead}")
        if there[key] != value:
            raise InputError(f"{what} has another {key}: {_difference(there[key], value)}; {instead}")


def _difference(there: Any, here: Any) -> str:
    there, here = ("none" if value is None else value for value in (there, here))
    if not (isinstance(there, dict) and isinstance(here, dict)):
        return f"{there} there, {here} here"
    parts = [f"{n} {there[n]} there, {here[n]} here" for n in there if n in here and there[n] != here[n]]
    for kept, other, where in ((there, here, "there"), (here, there, "here")):
        alone = [n for n in kept if n not in other]
        parts += [f"{', '.join(alone)} only {where}"] if alone else []
    return "; ".join(parts)
