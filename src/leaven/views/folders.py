"""Read the folders of runs, studies, checks and demos for display. Errors name the file and say what to do."""

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from leaven.documents.checks import CheckDocument
from leaven.documents.runs import DemoDocument
from leaven.recipe.errors import InputError
from leaven.recipe.files import read_recipe
from leaven.recipe.recipe import Recipe
from leaven.training.run_folder import RETURNS, RunFolder
from leaven.tuning.study_document import UNDER_WAY, StudyDocument, StudyTrial

Kind = TypeVar("Kind", bound=BaseModel)


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


# A diverged run writes NaN, for which a chart has a gap.
Number = Annotated[float | None, BeforeValidator(_finite)]


class StoredEntry(BaseModel):
    """An entry of a file. Unknown keys, which newer versions may write, are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class StepMetrics(StoredEntry):
    """One line of metrics.jsonl. ``tokens`` is the number of tokens consumed up to and including this step. ``lr`` is
    the learning rate of hidden weights."""

    step: int
    tokens: int
    loss: Number = None
    lr: Number = None
    grad_norm: Number = None
    batch_tokens: Number = None
    tokens_per_second: Number = None
    noise_scale: Number = None


class RunEvent(StoredEntry):
    """One line of events.jsonl.

    A rollback or a manual rewind takes the run back from ``tokens`` to ``to_tokens``. The run then skips the data
    from ``skip_from`` to ``skip_to``. All four are numbers of tokens.
    """

    event: str
    tokens: int = 0
    time: Number = None  # seconds since the epoch
    loss: Number = None
    seconds: Number = None
    why: str | None = None
    to_tokens: int | None = None
    skip_from: int = 0
    skip_to: int = 0


@dataclass(frozen=True)
class RunView:
    """A training run. ``loss`` is the last validation loss, and ``validation`` contains all validation losses as
    (tokens, loss).

    ``stopped`` is the reason why an unfinished run ended, if it is known.
    """

    title: str
    recipe: Recipe
    steps: tuple[StepMetrics, ...]
    validation: tuple[tuple[int, float], ...]
    loss: float | None
    seconds: float | None
    finished: bool
    stopped: str | None = None
    returns: tuple[RunEvent, ...] = ()  # rollbacks and manual rewinds

    @property
    def tokens(self) -> int:
        return self.steps[-1].tokens

    @property
    def first_loss(self) -> float | None:
        return next((step.loss for step in self.steps if step.loss is not None), None)

    @property
    def tokens_per_second(self) -> float | None:
        """The median speed of the steps. Unlike a mean, it is hardly changed by slow first steps and pauses."""
        speeds = sorted(step.tokens_per_second for step in self.steps if step.tokens_per_second)
        return speeds[len(speeds) // 2] if speeds else None


class StudyView(StudyDocument):
    """A study (a search for hyperparameters) with its starting recipe and its best recipe."""

    centre: Recipe
    best_recipe: Recipe | None

    @property
    def seconds(self) -> float:
        return sum(trial.seconds or 0.0 for trial in self.trials)

    def count(self, state: str) -> int:
        return sum(trial.state == state for trial in self.trials)

    @property
    def under_way(self) -> bool:
        return any(trial.state in UNDER_WAY for trial in self.trials)

    @property
    def moved(self) -> bool:
        """Whether the best point differs from the start."""
        return any(coordinate.best for coordinate in self.coordinates)

    @property
    def best_trial(self) -> StudyTrial | None:
        return next((trial for trial in self.trials if self.best and trial.number == self.best.number), None)

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95% interval of the best loss, in nats per token.

        None if the interval is infinite, or if the best point was not run again with fresh seeds.
        """
        if self.best is None or not self.best.fresh:
            return None
        low, high = self.best.interval
        return (low, high) if math.isfinite(high - low) else None

    @property
    def unjudged(self) -> bool:
        """Whether the best point was run only once. Its loss is then the loss by which the search chose this
        point."""
        return self.best is not None and not self.best.fresh and self.best.runs == 1

    @property
    def fewer(self) -> dict[str, float] | None:
        """The point with the fewest changes that is as good as the best point, or None if it is the best point
        itself.

        The point maps the path of each value to its distance from the start, in octaves.
        """
        return None if self.best_trial and self.fewest_octaves == self.best_trial.octaves else self.fewest_octaves

    @property
    def start_loss(self) -> float | None:
        """The mean loss of the starting point over its seeds.

        If the starting point was not run, this is the loss of the first complete trial. None if there is none.
        """
        done = [trial for trial in self.trials if trial.loss is not None and trial.state == "complete"]
        at_start = [trial for trial in done if trial.octaves is not None and not any(trial.octaves.values())]
        losses = [trial.loss for trial in at_start or done[:1] if trial.loss is not None]
        return sum(losses) / len(losses) if losses else None


FolderView = DemoDocument | StudyView | RunView | CheckDocument
KINDS = {"demo.json": "demo", "study.json": "study", "metrics.jsonl": "run", "check.json": "check"}
"""The kind of a folder, by the file that it contains. The first file that exists decides."""


def read_folder(folder: Path) -> FolderView:
    """Return the contents of a folder for display.

    Raises:
        InputError: if the folder is not that of a run, study, check or demo, if it has no data yet, or if one of its
            files is broken.
    """
    if not folder.exists():
        store = "; the results of a study in a database are in studies/NAME or in the folder of leaven tune --out"
        raise InputError(f"{folder}: no such folder{store if re.match(r'[a-z+]+:/', str(folder)) else ''}")
    if not folder.is_dir():
        raise InputError(f"{folder} is a file; give the folder of a run, a study, a check or a demo")
    readers: dict[str, Callable[[Path], FolderView]] = {
        "demo": read_demo,
        "study": read_study,
        "run": read_run,
        "check": lambda folder: _document(folder / "check.json", CheckDocument),
    }
    for file, kind in KINDS.items():
        if (folder / file).exists():
            return readers[kind](folder)
    if (folder / "runs.jsonl").exists():
        raise InputError(
            f"the check in {folder} has not finished; run the same leaven check command again to resume it"
        )
    if not any(folder.iterdir()):
        raise InputError(f"{folder} is empty; give the folder of a run, a study, a check or a demo")
    raise InputError(
        f"{folder} contains no run (metrics.jsonl), study (study.json), check (check.json) or demo (demo.json); "
        f"give the folder that leaven train --run, leaven tune --study, leaven check --run or leaven demo wrote"
    )


def read_run(folder: Path) -> RunView:
    """Return the run in a folder. Its title is the name of the recipe."""
    recipe, written = read_recipe(folder / "recipe.toml"), RunFolder(folder)
    steps = [_valid(StepMetrics, line, folder / "metrics.jsonl") for line in written.metrics()]
    if not steps:
        raise InputError(f"{folder / 'metrics.jsonl'}: no steps yet; wait for the first step, or give another folder")
    events = [_valid(RunEvent, line, folder / "events.jsonl") for line in written.events()]
    validation: dict[int, float] = {}
    for event in events:
        if event.event == "validation" and event.loss is not None:
            validation[event.tokens] = event.loss
        elif event.to_tokens is not None:  # the run went back, so later validations do not count
            validation = {tokens: loss for tokens, loss in validation.items() if tokens <= event.to_tokens}
    end = written.finish()
    finish = _valid(RunEvent, end, folder / "events.jsonl") if end else None
    stop = events[-1].why if events and events[-1].event == "stop" else None
    points = tuple(sorted(validation.items()))
    last = points[-1][1] if points else None
    return RunView(
        title=recipe.name,
        recipe=recipe,
        steps=tuple(steps),
        validation=points,
        loss=finish.loss if finish and finish.loss is not None else last,
        seconds=finish.seconds if finish and finish.seconds is not None else _elapsed(events),
        finished=finish is not None,
        stopped=None if finish else stop,
        returns=tuple(event for event in events if event.event in RETURNS),
    )


def _elapsed(events: list[RunEvent]) -> float | None:
    """Return how many seconds a run has trained, without the pauses between a stop and a resume.

    After each start or resume, the time from the first to the last event counts. These times are added up.
    """
    total, begun = 0.0, None
    last: float | None = None
    for event in events:
        if event.time is None:
            continue
        if event.event in {"start", "resume"} or begun is None:
            total += (last - begun) if begun is not None and last is not None else 0.0
            begun = event.time
        last = event.time
    return None if begun is None or last is None else total + last - begun


def read_study(folder: Path) -> StudyView:
    state = _document(folder / "study.json", StudyDocument)
    if not state.trials:
        raise InputError(f"{folder / 'study.json'}: no trials yet; run leaven tune first")
    best = folder / "best.toml"
    in_order = tuple(sorted(state.trials, key=lambda trial: trial.number))
    return StudyView(
        **vars(state) | {"trials": in_order},
        centre=read_recipe(folder / "centre.toml"),
        best_recipe=read_recipe(best) if best.exists() else None,
    )


def read_demo(folder: Path) -> DemoDocument:
    """Return the document of a demo, finished or not."""
    return _document(folder / "demo.json", DemoDocument)


def _document(path: Path, kind: type[Kind]) -> Kind:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise InputError(f"{path} is not JSON; write it again with the command that made the folder") from None
    return _valid(kind, document, path)


def _valid(kind: type[Kind], value: Any, path: Path) -> Kind:
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        fault = error.errors()[0]
        where = ".".join(str(key) for key in fault["loc"]) or "the document"
        if fault["type"] == "missing":
            raise InputError(
                f"{path}: {where} is missing; write the file again with the command that made it"
            ) from None
        raise InputError(f"{path}: {where}: {fault['msg'][0].lower()}{fault['msg'][1:]}") from None
