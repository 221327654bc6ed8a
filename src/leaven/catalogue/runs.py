"""Read the published training runs: one TOML file for each run in ``runs/``, with the sources of all values.

To add a run, add a file with the tables of :mod:`leaven.catalogue.groups`; its name is the run's id. Files with a
table ``[tuning]`` are runs of leaven itself, small models whose hyperparameters can be transferred.
"""

import difflib
import tomllib
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

from leaven.catalogue.run import PublishedRun
from leaven.documents.catalogue import DifferenceRow
from leaven.recipe.errors import InputError
from leaven.recipe.recipe import differing

FOLDER = Path(__file__).parent / "runs"


def load_runs() -> tuple[PublishedRun, ...]:
    """Return all published runs, from the smallest to the largest."""
    return tuple(run for run in _load(FOLDER) if run.tuning is None)


def own_runs() -> tuple[PublishedRun, ...]:
    """Return the small runs that leaven tuned itself, from the smallest to the largest."""
    return tuple(run for run in _load(FOLDER) if run.tuning is not None)


def find_run(id: str) -> PublishedRun:
    """Return the run with this id: a published run, or a run that leaven tuned itself.

    Raises:
        InputError: if there is no such run; the message names the ids most similar to ``id``.
    """
    path = FOLDER / f"{id}.toml"
    known = sorted(file.stem for file in FOLDER.glob("*.toml"))
    if id not in known:
        raise InputError(f"no published run {id!r}; did you mean {listed(closest(id, known))}?")
    return _read(path)


def closest(name: str, known: Iterable[str]) -> list[str]:
    """Return the three known names most similar to ``name``."""
    return difflib.get_close_matches(name.lower(), sorted(known), n=3, cutoff=0.0)


def listed(names: Sequence[str]) -> str:
    return ", ".join(names[:-1]) + (" or " if names[:-1] else "") + names[-1]


def diff(run_a: PublishedRun, run_b: PublishedRun) -> list[DifferenceRow]:
    """Return the values in which two runs differ, one row for each dotted path; an unknown value is None."""
    return [
        DifferenceRow(path=path, a=own, b=other)
        for path, own, other in differing(run_a.flat(), run_b.flat())
        if path != "id"
    ]


@cache  # the checks of a single recipe load the runs hundreds of times
def _load(folder: Path) -> tuple[PublishedRun, ...]:
    return tuple(sorted((_read(path) for path in folder.glob("*.toml")), key=lambda run: (run.params_total, run.id)))


@cache
def _read(path: Path) -> PublishedRun:
    try:
        return PublishedRun.model_validate(tomllib.loads(path.read_text(encoding="utf-8")) | {"id": path.stem})
    except ValueError as error:  # not TOML, or a wrong value
        error.add_note(f"the wrong file is {path.name}; leaven.catalogue.groups lists the allowed tables and keys")
        raise
