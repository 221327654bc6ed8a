"""Read the folders of runs, studies, checks and demos for display."""

import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from leaven import storage
from leaven.documents.checks import CheckDocument
from leaven.documents.runs import DemoDocument
from leaven.errors import InputError
from leaven.recipe.files import read_recipe
from leaven.recipe.recipe import Recipe
from leaven.training.run_folder import RETURNS, RunFolder, finish_of
from leaven.tuning import point
from leaven.tuning.command import CommandFile, command_space, is_command_file
from leaven.tuning.point import Value
from leaven.tuning.study_document import StudyDocument, StudyTrial
from leaven.views.points import at_start

Kind = TypeVar("Kind", bound=BaseModel)


@dataclass(frozen=True)
class RunView:
    """A training run as it is displayed. Infinite numbers and NaN in its files are None."""

    title: str
    recipe: Recipe
    steps: Sequence[dict[str, Any]]  # lines of metrics.jsonl; ``tokens`` are the tokens up to the end of the step
    validation: Sequence[tuple[int, float]]  # (tokens, loss)
    loss: float | None  # the last validation loss
    seconds: float | None  # training time
    finished: bool
    stopped: str | None  # the reason why an unfinished run stopped; None if there is no record
    returns: Sequence[dict[str, Any]]  # events of events.jsonl that set the run back: rollbacks and manual rewinds
    damaged: int = 0  # lines of metrics.jsonl that are damaged; their steps are missing in ``steps``
    averaged: Sequence[tuple[int, float]] = ()  # (tokens, validation loss of the averaged weights)
    changed: Mapping[str, str] = field(default_factory=dict)  # files changed after the run finished, and how

    @property
    def tokens(self) -> int:
        tokens: int = self.steps[-1]["tokens"]
        return tokens

    @property
    def tokens_per_second(self) -> float | None:
        """The median speed of the steps, because a mean would count slow first steps and pauses."""
        speeds = sorted(speed for step in self.steps if (speed := step.get("tokens_per_second")))
        return speeds[len(speeds) // 2] if speeds else None

    @property
    def gaps(self) -> str:
        """What is missing or changed in the files of the run, as text; empty if nothing is."""
        found = [f"{file} is not as it was when the run finished: {why}" for file, why in self.changed.items()]
        if self.damaged:
            lines = "one damaged line" if self.damaged == 1 else f"{self.damaged} damaged lines"
            found.insert(0, f"{lines} of metrics.jsonl {'was' if self.damaged == 1 else 'were'} skipped")
        return "; ".join(found)


class StudyView(StudyDocument):
    """A study (a search for hyperparameters) as it is displayed."""

    centre: Recipe | CommandFile  # the recipe or the command file from which the search started
    best_recipe: Recipe | None  # None also if the search started from a command file
    folder: str = "."  # the study's folder, relative to the folder in which its commands run

    def values(self, octaves: Mapping[str, float]) -> dict[str, Value]:
        """Return the values, by path, at these distances from the start."""
        of = self.centre
        return point.values(of, octaves) if isinstance(of, Recipe) else of.values(octaves)

    @property
    def best_trial(self) -> StudyTrial | None:
        return next((trial for trial in self.trials if self.best and trial.number == self.best.number), None)

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95% interval of the best loss in nats per token, or None if no runs with fresh seeds were made."""
        return self.best.interval if self.best is not None and math.isfinite(self.best.interval[0]) else None

    @property
    def start_loss(self) -> float | None:
        """The mean loss of the trials with the starting values, or else the loss of the first complete trial."""
        done = [trial for trial in self.trials if trial.loss is not None and trial.state == "complete"]
        losses = [trial.loss for trial in list(filter(at_start, done)) or done[:1] if trial.loss is not None]
        return sum(losses) / len(losses) if losses else None


FolderView = DemoDocument | StudyView | RunView | CheckDocument
KINDS = {"demo.json": "demo", "study.json": "study", "metrics.jsonl": "run", "check.json": "check"}
"""The kind of a folder, by the first of these files that the folder contains."""
LARGEST_NUMBER = 1e100  # of metrics and events; larger ones overflow when they are squared
_BACK = ("tokens", "to_tokens", "skip_from", "skip_to")
EVENT_KEYS = {"validation": ("tokens",), "rollback": (*_BACK, "why"), "rewind": _BACK}
"""The keys that an event of events.jsonl must have. An event that lacks one is ignored."""


def read_folder(folder: Path) -> FolderView:
    """Return the contents of a folder for display.

    Raises:
        InputError: if the folder contains no run, study, check or demo, or no data yet, or a broken file. The message
            names the file and says what to do.
    """
    if not folder.exists():
        store = "; give the folder of the study's results: studies/NAME, or the folder given to leaven tune --out"
        raise InputError(f"{folder}: no such folder{store if re.match(r'[a-z+]+:/', str(folder)) else ''}")
    if not folder.is_dir():
        raise InputError(f"{folder} is a file; give the folder of a run, a study, a check or a demo")
    readers: dict[str, Callable[[Path], FolderView]]
    readers = {"demo": read_demo, "study": read_study, "run": read_run, "check": read_check}
    for file, kind in KINDS.items():
        if (folder / file).exists():
            return readers[kind](folder)
    if (folder / "runs.jsonl").exists():
        raise InputError(
            f"the check in {folder} has not finished; run the same leaven check command again to resume it"
        )
    raise InputError(
        f"{folder} contains no run (metrics.jsonl), study (study.json), check (check.json) or demo (demo.json); "
        f"give the folder that leaven train --run, leaven tune --study, leaven check --run or leaven demo wrote"
    )


@contextmanager
def consistent(*folders: Path) -> Iterator[None]:
    """Raise InputError where a page cannot be made of what the files of folders say.

    The files have the right form, but somebody may have changed them: a trial without a searched value, or a number
    that is too large for a chart.
    """
    try:
        yield
    except InputError:
        raise
    except (ArithmeticError, LookupError, RecursionError, StopIteration, TypeError, ValueError) as error:
        raise InputError(
            f"{', '.join(map(str, folders))}: cannot be shown ({type(error).__name__}: {error}); if nobody has "
            "changed the files, this is a bug: run the command again with LEAVEN_DEBUG=1 and report what it prints"
        ) from error


def read_run(folder: Path) -> RunView:
    """Return the run in a folder. The run's title is the name of the recipe."""
    recipe, written = read_recipe(folder / "recipe.toml"), RunFolder(folder)
    metrics = written.read_metrics()
    steps = [line for line in map(_numbers, metrics.documents) if (line.get("tokens") or 0) > 0 and "loss" in line]
    if not steps:
        raise InputError(f"{folder / 'metrics.jsonl'}: no steps yet; wait for the first step, or give another folder")
    logged = written.read_events()
    events = [
        line
        for line in map(_numbers, logged)
        if all(line.get(key) is not None for key in EVENT_KEYS.get(line["event"], ()))
    ]
    validations: dict[int, dict[str, Any]] = {}
    for event in events:
        if event["event"] == "validation":
            validations[event["tokens"]] = event
        elif event["event"] in RETURNS:  # the run returned to an earlier checkpoint; later validations do not count
            validations = {tokens: each for tokens, each in validations.items() if tokens <= event["to_tokens"]}
    points, averaged = (
        [(tokens, event[key]) for tokens, event in sorted(validations.items()) if event.get(key) is not None]
        for key in ("loss", "averaged_loss")
    )
    finish = finish_of(logged)
    end = _numbers(finish or {})
    loss, seconds = end.get("loss"), end.get("seconds")
    return RunView(
        title=recipe.name,
        recipe=recipe,
        steps=steps,
        validation=points,
        loss=loss if loss is not None else points[-1][1] if points else None,
        seconds=seconds if seconds is not None else _elapsed(events),
        finished=finish is not None,
        stopped=events[-1].get("why") if events and events[-1]["event"] == "stop" else None,
        returns=[event for event in events if event["event"] in RETURNS],
        damaged=len(metrics.damaged),
        averaged=averaged,
        changed=written.changed_since(finish) if finish is not None else {},
    )


def _numbers(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers and texts of a line of metrics.jsonl or events.jsonl, and None in place of other values."""

    def plain(key: str, value: Any) -> Any:
        if isinstance(value, str) and key in {"event", "why"}:
            return value
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return value if number and abs(value) <= LARGEST_NUMBER else None  # neither infinite nor NaN

    return {key: plain(key, value) for key, value in line.items()}


def _elapsed(events: Sequence[dict[str, Any]]) -> float | None:
    """Return how many seconds a run has trained, without the pauses between a stop and a resume."""
    times = [(event["event"], event["time"]) for event in events if event.get("time") is not None]
    spent = (after - before for (_, before), (event, after) in pairwise(times) if event not in {"start", "resume"})
    return sum(spent) if times else None


def read_study(folder: Path) -> StudyView:
    state = _document(folder / "study.json", StudyDocument)
    if not state.trials:
        raise InputError(f"{folder / 'study.json'}: no trials yet; run leaven tune first")
    best, centre = folder / "best.toml", folder / "centre.toml"
    of_file = is_command_file(centre)
    in_order = tuple(sorted(state.trials, key=lambda trial: trial.number))
    return StudyView(
        **vars(state) | {"trials": in_order},
        centre=command_space(centre).file if of_file else read_recipe(centre),
        best_recipe=read_recipe(best) if best.exists() and not of_file else None,
        folder=os.path.relpath(os.path.realpath(folder), os.path.realpath(folder / state.command_folder)),
    )


def read_demo(folder: Path) -> DemoDocument:
    """Return the document of a demo, finished or not."""
    return _document(folder / "demo.json", DemoDocument)


def read_check(folder: Path) -> CheckDocument:
    return _document(folder / "check.json", CheckDocument)


def _document(path: Path, kind: type[Kind]) -> Kind:
    try:
        return kind.model_validate_json(storage.read(path))
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    except ValidationError as error:
        fault = error.errors()[0]
        where = "".join(f"{key}: " for key in fault["loc"])
        raise InputError(
            f"{path}: {where}{fault['msg'][0].lower()}{fault['msg'][1:]}; to write the file again, run the command "
            "that wrote it"
        ) from None
