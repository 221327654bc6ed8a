"""The settings of a stored study: written by the command that creates it, checked by every command that joins."""

import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import optuna
from optuna.exceptions import DuplicatedStudyError
from optuna.samplers import BaseSampler
from optuna.storages import BaseStorage

from leaven.recipe.errors import InputError

ABOUT = "leaven:about"  # an attribute of a study: recipe, space, method and so on, by name
LONGEST = 512  # characters of a study's name, in Optuna's tables
PATIENCE, LOOK = 5.0, 0.02  # seconds to wait for that attribute of a new study, and between looks

About = Mapping[str, Any]


def check_name(name: str) -> None:
    """Check the name of a study.

    Raises:
        InputError: if some store cannot hold it.
    """
    if not (isinstance(name, str) and 0 < len(name) <= LONGEST):
        raise InputError(f"the study's name is {name!r:.60}; give it a text of 1 to {LONGEST} characters")


def begin(
    store: BaseStorage, name: str, sampler: BaseSampler, here: About, what: str
) -> tuple[optuna.Study, dict[str, Any]]:
    """Return the study with that name and its settings; creates it with the settings ``here`` if there is none.

    It is looked up first, because in a journal even a failed attempt to create it adds a line. If several commands
    start at once, one creates the study and writes its settings. If that one dies between the two, another writes
    them; all use what is stored in the end.

    Raises:
        InputError: if the study was created by another program.
    """
    one: dict[str, Any] = {"study_name": name, "storage": store, "sampler": sampler}
    try:
        study = optuna.load_study(**one)
    except KeyError:
        with suppress(DuplicatedStudyError):  # another was quicker
            optuna.create_study(**one).set_user_attr(ABOUT, dict(here))
        study = optuna.load_study(**one)
    until = time.monotonic() + PATIENCE
    while ABOUT not in study.user_attrs and not _begun(study) and time.monotonic() < until:
        time.sleep(LOOK)
    if ABOUT not in study.user_attrs:
        if _begun(study):
            raise InputError(f"{what} was created by an older version or another program; use another name or folder")
        study.set_user_attr(ABOUT, dict(here))
    return study, dict(study.user_attrs[ABOUT])


def _begun(study: optuna.Study) -> bool:
    return bool(study.user_attrs or study.get_trials(deepcopy=False))


def agree(there: About, here: About, what: str, instead: str) -> None:
    """Check that the settings of a stored study equal those of this command.

    Raises:
        InputError: if not; the message says how they differ.
    """
    for key, value in here.items():
        if key not in there:
            raise InputError(f"{what} was created by another program: it has no {key}; {instead}")
        if there[key] != value:
            raise InputError(f"{what} has another {key}: {_difference(there[key], value)}; {instead}")


def _difference(there: Any, here: Any) -> str:
    if not (isinstance(there, dict) and isinstance(here, dict)):
        return f"{there} there, {here} here"
    parts = [f"{n} {there[n]} there, {here[n]} here" for n in there if n in here and there[n] != here[n]]
    for kept, other, where in ((there, here, "there"), (here, there, "here")):
        alone = [n for n in kept if n not in other]
        parts += [f"{', '.join(alone)} only {where}"] if alone else []
    return "; ".join(parts)
