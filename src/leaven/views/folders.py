"""Read the folders of runs, studies, checks and demos for display."""

import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from leaven import storage
from leaven.documents import DIGEST
from leaven.documents.checks import CheckDocument
from leaven.documents.runs import DemoDocument
from leaven.errors import InputError
from leaven.recipe.files import read_recipe
from leaven.recipe.recipe import Recipe
from leaven.training.integrity import faults
from leaven.training.run_folder import RETURNS, RunFolder, finish_of
from leaven.tuning import point
from leaven.tuning.command import CommandFile, command_space, is_command_file
from leaven.tuning.earlier_study import require_start
from leaven.tuning.point import Value
from leaven.tuning.study_document import StudyDocument, StudyTrial, edited
from leaven.views.points import at_start

Kind = TypeVar("Kind", bound=BaseModel)


@dataclass(frozen=True)
class RunView:
    """A training run for display. A number that charts cannot show, such as NaN, is None."""

    title: str
    recipe: Recipe
    steps: Sequence[dict[str, Any]]  # lines of metrics.jsonl; ``tokens`` are the tokens up to the end of the step
    validation: Sequence[tuple[int, float]]  # (tokens, loss)
    loss: float | None  # the last validation loss
    seconds: float | None  # training time
    finished: bool
    stopped: str | None  # the reason why the run stopped; None if the last event is not a stop
    returns: Sequence[dict[str, Any]]  # events of events.jsonl that set the run back: rollbacks and manual rewinds
    folder: RunFolder
    skipped: Sequence[str] = ()  # sentences about damaged lines of metrics.jsonl and events.jsonl
    averaged: Sequence[tuple[int, float]] = ()  # (tokens, validation loss of the averaged weights)

    @property
    def tokens(self) -> int:
        return int(self.steps[-1]["tokens"])

    @property
    def tokens_per_second(self) -> float | None:
        """The median speed of the steps, in tokens per second. A mean would count slow first steps and pauses."""
        speeds = sorted(speed for step in self.steps if (speed := step.get("tokens_per_second")))
        return speeds[len(speeds) // 2] if speeds else None

    @cached_property
    def gaps(self) -> str:
        """Faults in the run's files as text, or "". The files are read on first use."""
        return "; ".join([*self.skipped, *faults(self.folder)])


class StudyView(StudyDocument):
    """A study (a search for hyperparameters) for display."""

    centre: Recipe | CommandFile  # the recipe or the command file from which the search started
    best_recipe: Recipe | None = None  # of best.toml; None if this is missing or edited, or of a command file
    gap: str = ""  # why best.toml is not shown, or ""
    folder: str = "."  # the study's folder, relative to the folder in which its commands run

    def values(self, octaves: Mapping[str, float]) -> dict[str, Value]:
        """Return hyperparameters by path. ``octaves`` has their distances from the starting values."""
        start = self.centre
        return point.values(start, octaves) if isinstance(start, Recipe) else start.values(octaves)

    @property
    def best_trial(self) -> StudyTrial | None:
        return next((trial for trial in self.trials if self.best and trial.number == self.best.number), None)

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95% interval of the best loss, in nats per token, or None if it is not known."""
        return self.best.interval if self.best is not None and math.isfinite(self.best.interval[0]) else None

    @property
    def start_loss(self) -> float | None:
        """The mean loss of the complete trials at the start point, or else the loss of the first complete trial."""
        done = [trial for trial in self.trials if trial.loss is not None and trial.state == "complete"]
        losses = [trial.loss for trial in list(filter(at_start, done)) or done[:1] if trial.loss is not None]
        return sum(losses) / len(losses) if losses else None


FolderView = DemoDocument | StudyView | RunView | CheckDocument
KINDS = {"demo.json": "demo", "study.json": "study", "metrics.jsonl": "run", "check.json": "check"}
"""The kind of a folder, by the first of these files that the folder contains."""
LARGEST_NUMBER = 1e100  # charts show 0 and numbers from 1e-100 to 1e100; their squares and quotients do not overflow
_AGAIN = "to write the file again, run the command that wrote it"
WHOLE = ("tokens", "to_tokens", "batch_tokens", "skip_from", "skip_to")  # keys whose values must be integers
_BACK = ("tokens", "to_tokens", "skip_from", "skip_to")
EVENT_KEYS = {"validation": ("tokens",), "rollback": (*_BACK, "why"), "rewind": _BACK}
"""The keys that an event of events.jsonl must have. An event that lacks one is ignored."""


def read_folder(folder: Path) -> FolderView:
    """Return the contents of a folder for display. Raise InputError if it has no results or a damaged file."""
    if not folder.exists():
        store = "; give the folder of the study's results: studies/NAME, or the folder given to leaven tune --out"
        raise InputError(f"{folder}: no such folder{store if re.match(r'[a-z+]+:/', str(folder)) else ''}")
    if not folder.is_dir():
        raise InputError(f"{folder} is a file; give the folder of a run, a study, a check or a demo")
    readers: dict[str, Callable[[Path], FolderView]]
    readers = {"demo": read_demo, "study": read_study, "run": read_run, "check": read_check}
    for file, kind in KINDS.items():
        if os.path.lexists(folder / file):  # exists is false for a link to a missing disk
            return readers[kind](folder)
    if (folder / "runs.jsonl").exists():
        raise InputError(
            f"the check in {folder} has not finished; run the same leaven check command again to resume it"
        )
    raise InputError(
        f"{folder} contains no run (metrics.jsonl), study (study.json), check (check.json) or demo (demo.json); "
        f"give the folder that leaven train --run, leaven tune --study, leaven check --run or leaven demo wrote"
    )


def read_run(folder: Path) -> RunView:
    written = RunFolder(folder)
    recipe = written.recipe()
    metrics = written.read_metrics()
    steps = [line for line in map(_numbers, metrics.documents) if (line.get("tokens") or 0) > 0 and "loss" in line]
    if not steps:
        raise InputError(f"{folder / 'metrics.jsonl'}: no steps yet; wait for the first step, or give another folder")
    logged = written.read_events()
    skipped = (metrics.skipped(written.metrics_file.name), written.event_lines().skipped(written.events_file.name))
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
    returns = [event for event in events if event["event"] in RETURNS]
    return RunView(
        title=recipe.name,
        recipe=recipe,
        steps=steps,
        validation=points,
        loss=loss if loss is not None else points[-1][1] if points else None,
        seconds=seconds if seconds is not None else _seconds_of(steps, returns),
        finished=finish is not None,
        stopped=events[-1].get("why") if events and events[-1]["event"] == "stop" else None,
        returns=returns,
        skipped=[*filter(None, skipped)],
        averaged=averaged,
        folder=written,
    )


def _numbers(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return a line of metrics.jsonl or events.jsonl, with None in place of values that charts cannot draw."""

    def plain(key: str, value: Any) -> Any:
        if isinstance(value, str) and key in {"event", "why"}:
            return value
        number = isinstance(value, int if key in WHOLE else int | float) and not isinstance(value, bool)
        return value if number and _drawable(value) else None

    return {key: plain(key, value) for key, value in line.items()}


def _seconds_of(steps: Sequence[dict[str, Any]], returns: Sequence[dict[str, Any]]) -> float | None:
    """Return the seconds of an unfinished run: up to its last return, with the steps that were undone, and of the
    steps since. Unlike times of events, they do not change if the clock is set."""
    before, since = (returns[-1].get("seconds"), returns[-1]["to_tokens"]) if returns else (None, 0)
    timed = [step for step in steps if step.get("batch_tokens") and step.get("tokens_per_second")]
    new = [step for step in timed if before is None or step["tokens"] > since]
    if before is None and not timed:
        return None
    return float((before or 0.0) + sum(step["batch_tokens"] / step["tokens_per_second"] for step in new))


def _drawable(number: float) -> bool:
    if isinstance(number, int):
        return abs(number) < 2**63
    return number == 0 or 1 / LARGEST_NUMBER <= abs(number) <= LARGEST_NUMBER


def read_study(folder: Path) -> StudyView:
    path = folder / "study.json"
    state = _document(path, StudyDocument)
    if not state.trials:
        raise InputError(f"{path}: no trial has ended yet; wait for the first, or start the search with leaven tune")
    best, centre = folder / "best.toml", folder / "centre.toml"
    of_file = is_command_file(centre)
    start = command_space(centre).file if of_file else read_recipe(centre)
    require_start(state, start, str(folder))
    view = StudyView(
        **vars(state) | {"trials": tuple(sorted(state.trials, key=lambda trial: trial.number))},
        centre=start,
        folder=os.path.relpath(os.path.realpath(folder), os.path.realpath(folder / state.command_folder)),
    )
    if state.best is None or of_file or not os.path.lexists(best):
        return view
    try:
        storage.require_target(best, "bring it back")
    except InputError as error:
        return view.model_copy(update={"gap": str(error)})
    recipe = read_recipe(best)
    if edited(best):
        gap = "best.toml is not shown, because it was edited after leaven tune wrote it"
        return view.model_copy(update={"gap": gap})
    return view.model_copy(update={"best_recipe": recipe})


def read_demo(folder: Path) -> DemoDocument:
    again = "restore it, or start the demo in another folder with --run"
    return _document(folder / "demo.json", DemoDocument, again)


def read_check(folder: Path) -> CheckDocument:
    return _document(folder / "check.json", CheckDocument)


def _document(path: Path, kind: type[Kind], again: str = _AGAIN) -> Kind:
    """Return the document in a file. Raise InputError if it is unreadable, was edited, or cannot be drawn."""
    try:
        content = storage.read(path)
        document = kind.model_validate_json(content)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = "".join(f"{key}: " for key in first["loc"])
        raise InputError(f"{path}: {where}{first['msg'][0].lower()}{first['msg'][1:]}; {again}") from None
    if DIGEST not in json.loads(content):
        raise InputError(f"{path}: its digest ({DIGEST}) is missing; {again}")
    if (fault := next(_undrawable(document.model_dump(), ""), None)) is not None:
        raise InputError(f"{path}: {fault}; {again}")
    return document


def _undrawable(value: Any, where: str) -> Iterator[str]:
    if isinstance(value, dict | list | tuple):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            if key != "interval":  # an unknown interval is infinite
                yield from _undrawable(inner, f"{where}{key}: ")
    elif isinstance(value, int | float) and not _drawable(value):
        yield f"{where}{value:.3g} is too large or too close to 0 to be shown"
