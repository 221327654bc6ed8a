"""Create a study in a store with the settings of this command, or join an existing study with equal settings.

A command is one running search. The settings are for example recipe, space and method. A command with other settings
is refused, because its trials could not be compared. The prior knowledge of an existing study replaces the command's.
"""

import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
import optuna
from optuna.exceptions import DuplicatedStudyError
from optuna.storages import BaseStorage

from leaven.errors import InputError
from leaven.recipe.recipe import Recipe, differences, differing
from leaven.training.run_folder import describe_changes
from leaven.tuning.algorithm.surrogate import EarlierTrials
from leaven.tuning.algorithm.trust_region import Axes
from leaven.tuning.service.stored_study import ABOUT, DIGEST, ID, RESTORE, StoredStudy, digest_of_json

EXPECTED, EARLIER = "expected", "earlier"  # the settings that are prior knowledge
OPTIONS = {EXPECTED: "--prior (or expected)", EARLIER: "--from-study (or earlier)"}
LISTED = 3  # the most settings that a message about different settings lists
PATIENCE = 5.0  # seconds to wait for the settings of a study that another command has just created


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
) -> StoredStudy:
    """Return the study ``name``, or create it with the given settings.

    An existing study keeps its own prior knowledge (expected optima, and trials of an earlier study).

    Args:
        what: the name of the study in messages.
        instead: what the user can do if the study has other settings, such as "give it another name".
        own_noise: whether the user gave ``noise``. If false, a study that uses trials of an earlier study keeps its
            stored noise.
        recipe, shared: the recipe and further settings that all commands on the study must share.

    Raises:
        InputError: if another program or an older version created the study, if the study has other settings, if it
            was created without prior knowledge that ``axes`` has, or if its stored settings were changed or damaged.
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
    created = here | {ID: uuid.uuid4().hex}
    if axes.expected:
        created[EXPECTED] = {key: list(both) for key, both in axes.expected.items()}
    if (known := axes.earlier) is not None:
        created[EARLIER] = {"points": known.points.tolist(), "losses": known.losses.tolist(), "noise": known.noise}
    if recipe is not None:
        created["recipe"] = recipe.model_dump(mode="json")
    study = _load_or_create(store, name, created | {DIGEST: digest_of_json(created)}, what)
    there = _settings(study, what)
    try:
        stored = there.get("recipe") and Recipe.model_validate(there["recipe"])
        expected = {key: (optimum, deviation) for key, (optimum, deviation) in there.get(EXPECTED, {}).items()}
        of = there.get(EARLIER)
        earlier = of and EarlierTrials(np.array(of["points"]), np.array(of["losses"]), of["noise"])
    except ValueError:  # the recipe of another version
        raise InputError(f"{what} has a recipe that this version cannot read; {RESTORE}") from None
    if recipe is not None and stored is not None and (changes := differences(stored, recipe)):
        raise InputError(f"{what} has another recipe: {describe_changes(changes)}; use another --study")
    if EARLIER in there and not own_noise:
        here["noise"] = noise = there["noise"]
    keys = [*here, "near"]  # a call without a box does not continue in the box of the study
    if changes := differing({key: there.get(key) for key in keys}, {key: here.get(key) for key in keys}):
        more = f"; and {len(changes) - LISTED} more" if len(changes) > LISTED else ""
        raise InputError(f"{what} has other settings: {describe_changes(changes[:LISTED])}{more}; {instead}")
    for key, option in OPTIONS.items():
        if key in created and key not in there:
            raise InputError(f"{what} was created without {option}; leave it out to resume, or use another study")
    earlier = _reordered(earlier, list(there["space"]), list(axes.limits))
    return StoredStudy(store, study, replace(axes, expected=expected, earlier=earlier), noise, what)


def unused_knowledge(given: Axes, stored: Axes) -> list[str]:
    """Return a line for each kind of prior knowledge in ``given`` that differs from that of the stored study."""
    unused = {
        EXPECTED: bool(given.expected) and given.expected != stored.expected,
        EARLIER: given.earlier is not None
        and stored.earlier is not None
        # The earlier study may have more trials by now.
        and not np.array_equal(given.earlier.losses[: len(stored.earlier.losses)], stored.earlier.losses),
    }
    return [
        f"{OPTIONS[key]} has other content than when the study was created; the study still uses the old content"
        for key, different in unused.items()
        if different
    ]


def _settings(study: optuna.Study, what: str) -> dict[str, Any]:
    """Return the stored settings of a study. Raise InputError if they do not match their digest."""
    found = study.user_attrs[ABOUT]
    if not isinstance(found, dict) or found.pop(DIGEST, None) != digest_of_json(found):
        raise InputError(
            f"{what}: the stored settings were changed, or an older version of leaven wrote them; {RESTORE}"
        )
    return found


def _reordered(earlier: EarlierTrials | None, stored: Sequence[str], names: Sequence[str]) -> EarlierTrials | None:
    """Return ``earlier`` with columns in the order of ``names``, not of ``stored``. Other columns stay last."""
    if earlier is None:
        return None
    columns = [stored.index(name) for name in names] + list(range(len(names), earlier.points.shape[1]))
    return replace(earlier, points=earlier.points[:, columns])


def _load_or_create(store: BaseStorage, name: str, settings: dict[str, Any], what: str) -> optuna.Study:
    """Return the Optuna study ``name``. If it does not exist, or stays empty for ``PATIENCE`` seconds, in which
    another command may be creating it, store ``settings`` in it. Raise InputError if an older version of leaven or
    another program created it."""
    try:
        study = optuna.load_study(study_name=name, storage=store)
    except KeyError:
        with suppress(DuplicatedStudyError):  # another command has created it
            optuna.create_study(study_name=name, storage=store).set_user_attr(ABOUT, settings)
        study = optuna.load_study(study_name=name, storage=store)
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
