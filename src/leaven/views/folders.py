"""View models of the folders of runs, studies, checks and demos. Errors name the file and say what to do."""

import json
import math
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from leaven.documents.checks import CheckDocument
from leaven.recipe.errors import InputError
from leaven.recipe.files import read_recipe
from leaven.recipe.recipe import Recipe
from leaven.training.run_folder import RETURNS, RunFolder
from leaven.tuning.document import UNDER_WAY, StudyDocument, StudyTrial

Kind = TypeVar("Kind")


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


# A diverged run writes NaN; a chart has a gap there.
Number = Annotated[float | None, BeforeValidator(_finite)]


class StoredEntry(BaseModel):
    """An entry of a file. Unknown keys, from newer versions, are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class StepMetrics(StoredEntry):
    """One line of metrics.jsonl. ``tokens`` are those consumed after the step, ``lr`` is that of hidden weights."""

    step: int
    tokens: int
    loss: Number = None
    lr: Number = None
    grad_norm: Number = None
    batch_tokens: Number = None
    tokens_per_second: Number = None
    noise_scale: Number = None


class DemoPart(StoredEntry):
    """One part of a demo and how long it took."""

    name: str
    seconds: float


class DemoText(StoredEntry):
    source: str
    bytes: int
    documents: int | None = None
    train_tokens: int
    validation_tokens: int
    vocab_size: int


class DemoMachine(StoredEntry):
    processor: str | None = None
    cores: int | None = None
    memory_gib: float | None = None
    python: str | None = None
    torch: str | None = None
    platform: str | None = None
    leaven: str | None = None


class RunReturn(StoredEntry):
    """A rollback or manual rewind (``event``) of a run, in tokens: from ``tokens`` back to ``to_tokens``. The
    stream from ``skip_from`` to ``skip_to`` is skipped afterwards."""

    event: str
    tokens: int
    to_tokens: int
    skip_from: int
    skip_to: int
    why: str | None = None


@dataclass(frozen=True)
class RunView:
    """A training run. ``loss`` is the last validation loss, ``validation`` all of them as (tokens, loss).

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
    returns: tuple[RunReturn, ...] = ()
    key: str = "run"

    @property
    def tokens(self) -> int:
        return self.steps[-1].tokens

    @property
    def first_loss(self) -> float | None:
        return next((step.loss for step in self.steps if step.loss is not None), None)

    @property
    def tokens_per_second(self) -> float | None:
        """The median over the steps, so that slow first steps and pauses do not matter."""
        speeds = sorted(step.tokens_per_second for step in self.steps if step.tokens_per_second)
        return speeds[len(speeds) // 2] if speeds else None


class StudyView(StudyDocument):
    """A study, with the recipe it started from and the best one."""

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
        """The 95% interval of the best loss; None if it is infinite or without fresh runs."""
        if self.best is None or not self.best.fresh:
            return None
        low, high = self.best.interval
        return (low, high) if math.isfinite(high - low) else None

    @property
    def unjudged(self) -> bool:
        """Whether the best point has no fresh runs: its loss is that of the run by which it was chosen."""
        return self.best is not None and not self.best.fresh and self.best.runs == 1

    @property
    def fewer(self) -> dict[str, float] | None:
        """The point with the fewest changes, in octaves by path; None if that is the best point."""
        return None if self.best_trial and self.fewest_octaves == self.best_trial.octaves else self.fewest_octaves

    @property
    def start_loss(self) -> float | None:
        """The mean loss of the start over its seeds, or the loss of the first trial if the start was not run."""
        done = [trial for trial in self.trials if trial.loss is not None and trial.state == "complete"]
        at_start = [trial for trial in done if trial.octaves is not None and not any(trial.octaves.values())]
        losses = [trial.loss for trial in at_start or done[:1] if trial.loss is not None]
        return sum(losses) / len(losses) if losses else None


@dataclass(frozen=True)
class ArmView:
    """One of the runs that a demo compares. ``run`` is None before its first step."""

    key: str
    title: str
    why: str
    loss: float | None
    folder: str
    run: RunView | None


@dataclass(frozen=True)
class DemoView:
    name: str
    verdict: str
    arms: tuple[ArmView, ...]
    study: StudyView | None
    study_folder: str
    target: Recipe | None
    target_path: str
    command: str
    parts: tuple[DemoPart, ...]
    corpus: DemoText | None
    machine: DemoMachine | None

    @property
    def seconds(self) -> float:
        return sum(part.seconds for part in self.parts)

    @property
    def transferred(self) -> ArmView | None:
        return next((arm for arm in self.arms if arm.key == "transferred"), None)

    @property
    def rival(self) -> ArmView | None:
        """The best of the other arms."""
        others = [arm for arm in self.arms if arm.key != "transferred" and arm.loss is not None]
        return min(others, key=lambda arm: arm.loss or 0.0, default=None)

    @property
    def gain(self) -> float | None:
        """How many nats the transferred arm is better than the best other one (below 0: worse)."""
        mine, rival = self.transferred, self.rival
        if mine is None or mine.loss is None or rival is None or rival.loss is None:
            return None
        return rival.loss - mine.loss


FolderView = DemoView | StudyView | RunView | CheckDocument


def read_folder(folder: Path) -> FolderView:
    """Return the view model of a folder.

    Raises:
        InputError: if it is not the folder of a run, study, check or demo, has no data yet, or a file is broken.
    """
    if not folder.exists():
        store = re.match(r"[a-z+]+:/", str(folder))
        hint = (
            "; what is known of a study in a store is in studies/NAME, or where leaven tune --out said"
            if store
            else ""
        )
        raise InputError(f"{folder}: no such folder{hint}")
    if not folder.is_dir():
        raise InputError(f"{folder}: a file; give the folder of a run, a study, a check or a demo")
    if (folder / "demo.json").exists():
        return read_demo(folder)
    if (folder / "study.json").exists():
        return read_study(folder)
    if (folder / "metrics.jsonl").exists():
        return read_run(folder)
    if (folder / "check.json").exists():
        return _document(folder / "check.json", CheckDocument.model_validate)
    if (folder / "runs.jsonl").exists():
        raise InputError(f"{folder}: runs of a check that has not ended; the same leaven check goes on with them")
    if not any(folder.iterdir()):
        raise InputError(f"{folder}: empty; give the folder of a run, a study, a check or a demo")
    raise InputError(
        f"{folder}: no run (metrics.jsonl), study (study.json), check (check.json) or demo (demo.json) in it; "
        f"give the folder that leaven train --run, leaven tune --study, leaven check --run or leaven demo wrote"
    )


def read_run(folder: Path, title: str | None = None, key: str = "run") -> RunView:
    """Return the run in a folder; its title is by default the recipe's name."""
    recipe, written = read_recipe(folder / "recipe.toml"), RunFolder(folder)
    steps = [_valid(StepMetrics.model_validate, line, folder / "metrics.jsonl") for line in written.metrics()]
    if not steps:
        raise InputError(f"{folder / 'metrics.jsonl'}: no steps yet; wait for the first, or give another folder")
    path, lines = folder / "events.jsonl", written.events()
    events = [_valid(_Event.model_validate, line, path) for line in lines]
    returns = [_valid(RunReturn.model_validate, line, path) for line in lines if line["event"] in RETURNS]
    validation: dict[int, float] = {}
    for event in events:
        if event.event == "validation" and event.loss is not None:
            validation[event.tokens] = event.loss
        elif event.to_tokens is not None:  # what lies behind it is undone
            validation = {tokens: loss for tokens, loss in validation.items() if tokens <= event.to_tokens}
    end = written.finish()
    finish = _valid(_Event.model_validate, end, folder / "events.jsonl") if end else None
    stop = events[-1].why if events and events[-1].event == "stop" else None
    points = tuple(sorted(validation.items()))
    last = points[-1][1] if points else None
    return RunView(
        title=title or recipe.name,
        recipe=recipe,
        steps=tuple(steps),
        validation=points,
        loss=finish.loss if finish and finish.loss is not None else last,
        seconds=finish.seconds if finish and finish.seconds is not None else _elapsed(events),
        finished=finish is not None,
        stopped=None if finish else stop,
        returns=tuple(returns),
        key=key,
    )


class _Event(StoredEntry):
    event: str
    tokens: int = 0
    time: Number = None
    loss: Number = None
    seconds: Number = None
    why: str | None = None
    to_tokens: int | None = None


def _elapsed(events: list[_Event]) -> float | None:
    """Return the sum of the seconds between the first and the last event of each start or resume, without pauses."""
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
    state = _document(folder / "study.json", StudyDocument.model_validate)
    if not state.trials:
        raise InputError(f"{folder / 'study.json'}: no trials yet; run leaven tune first")
    best = folder / "best.toml"
    in_order = tuple(sorted(state.trials, key=lambda trial: trial.number))
    return StudyView(
        **vars(state) | {"trials": in_order},
        centre=read_recipe(folder / "centre.toml"),
        best_recipe=read_recipe(best) if best.exists() else None,
    )


class _ArmLink(StoredEntry):
    key: str
    title: str
    run: str
    loss: Number = None
    why: str = ""


class _StudyLink(StoredEntry):
    study: str


class _DemoFile(StoredEntry):
    name: str
    verdict: str = "The demo is not finished: the same command goes on with it."
    size: str | None = None
    source: str | None = None
    arms: tuple[_ArmLink, ...] = ()
    proxy: _StudyLink | None = None
    target: str | None = None
    parts: tuple[DemoPart, ...] = ()
    corpus: DemoText | None = None
    machine: DemoMachine | None = None


def read_demo(folder: Path) -> DemoView:
    if not (folder / "demo.json").exists():
        raise InputError(f"{folder}: no demo.json in it; give the folder that leaven demo wrote")
    document = _document(folder / "demo.json", _DemoFile.model_validate)
    arms = tuple(_arm(folder, entry) for entry in document.arms)
    study_folder = document.proxy.study if document.proxy else ""
    has_study = bool(study_folder) and (folder / study_folder / "study.json").exists()
    has_target = document.target is not None and (folder / document.target).exists()
    if not has_study and not any(arm.run for arm in arms):
        raise InputError(f"{folder / 'demo.json'}: neither a study nor a run in it yet; run leaven demo again")
    return DemoView(
        name=document.name,
        verdict=document.verdict,
        arms=arms,
        study=read_study(folder / study_folder) if has_study else None,
        study_folder=study_folder,
        target=read_recipe(folder / str(document.target)) if has_target else None,
        target_path=document.target or "",
        command=_command(document),
        parts=document.parts,
        corpus=document.corpus,
        machine=document.machine,
    )


def _command(document: _DemoFile) -> str:
    options = (("--run", "."), ("--size", document.size), ("--source", document.source))
    return shlex.join(["leaven", "demo", *(word for option in options if option[1] for word in option if word)])


def _arm(folder: Path, entry: _ArmLink) -> ArmView:
    begun = RunFolder(folder / entry.run).metrics()
    run = read_run(folder / entry.run, entry.title, entry.key) if begun else None
    # The last validation of a run that broke off is no final loss: it is not compared with any.
    loss = entry.loss if entry.loss is not None else (run.loss if run and run.finished else None)
    return ArmView(entry.key, entry.title, entry.why, loss, entry.run, run)


def _document(path: Path, validate: Callable[[Any], Kind]) -> Kind:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise InputError(f"{path}: not JSON; write it again with the verb that made the folder") from None
    return _valid(validate, document, path)


def _valid(validate: Callable[[Any], Kind], value: Any, path: Path) -> Kind:
    try:
        return validate(value)
    except ValidationError as error:
        raise InputError(f"{path}: {_explain(error)}") from None


def _explain(error: ValidationError) -> str:
    fault = error.errors()[0]
    where = ".".join(str(key) for key in fault["loc"]) or "the document"
    if fault["type"] == "missing":
        return f"{where} is missing; write the file again with the verb that made it"
    return f"{where}: {fault['msg'][0].lower()}{fault['msg'][1:]}"
