"""What a folder holds: a run, a study or a demo, read into frozen objects. Nothing is computed that is not in it."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from leaven.recipe.errors import InputError
from leaven.recipe.files import read_recipe
from leaven.recipe.recipe import Recipe


Kind = TypeVar("Kind", bound=BaseModel)


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


# A diverged run writes NaN; a chart has a gap there.
Number = Annotated[float | None, BeforeValidator(_finite)]


class _Entry(BaseModel):
    """Newer writers may add keys; a reader of old pages ignores them."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class Step(_Entry):
    """One line of metrics.jsonl. ``tokens`` are those consumed after the step, ``lr`` is that of hidden weights."""

    step: int
    tokens: int
    loss: Number = None
    lr: Number = None
    grad_norm: Number = None
    batch_tokens: Number = None
    tokens_per_second: Number = None


class Trial(_Entry):
    number: int
    state: Literal["complete", "diverged", "failed", "running"]
    loss: Number = None
    values: dict[str, float | int | bool | str] = {}
    seconds: Number = None
    tokens_per_second: Number = None


class Best(_Entry):
    number: int
    loss: float
    interval: tuple[float, float] | None = None


class Part(_Entry):
    """One part of a demo and how long it took."""

    name: str
    seconds: float


class Corpus(_Entry):
    source: str
    bytes: int
    documents: int
    train_tokens: int
    validation_tokens: int
    vocab_size: int


class Machine(_Entry):
    processor: str
    cores: int
    memory_gib: float
    python: str
    torch: str
    platform: str
    leaven: str


@dataclass(frozen=True)
class Run:
    """A training run. ``loss`` is the last validation loss, ``validation`` all of them as (tokens, loss)."""

    title: str
    recipe: Recipe
    steps: tuple[Step, ...]
    validation: tuple[tuple[int, float], ...]
    loss: float | None
    seconds: float | None
    finished: bool
    key: str = "run"

    @property
    def tokens(self) -> int:
        return self.steps[-1].tokens

    @property
    def tokens_per_second(self) -> float | None:
        """The median over the steps: the first ones and a pause on the machine do not count."""
        speeds = sorted(step.tokens_per_second for step in self.steps if step.tokens_per_second)
        return speeds[len(speeds) // 2] if speeds else None


@dataclass(frozen=True)
class Study:
    """A search. ``space`` are the dotted recipe paths that were varied, ``noise_floor`` is in nats."""

    name: str
    method: str
    space: tuple[str, ...]
    noise_floor: float | None
    best: Best | None
    trials: tuple[Trial, ...]
    centre: Recipe
    best_recipe: Recipe | None

    @property
    def seconds(self) -> float:
        return sum(trial.seconds or 0.0 for trial in self.trials)

    def count(self, state: str) -> int:
        return sum(trial.state == state for trial in self.trials)


@dataclass(frozen=True)
class Arm:
    """One of the runs that a demo compares. ``run`` is None where it never wrote a step."""

    key: str
    title: str
    why: str
    loss: float | None
    folder: str
    run: Run | None


@dataclass(frozen=True)
class Demo:
    name: str
    verdict: str
    arms: tuple[Arm, ...]
    study: Study | None
    study_folder: str
    target: Recipe | None
    target_path: str
    parts: tuple[Part, ...]
    corpus: Corpus | None
    machine: Machine | None

    @property
    def seconds(self) -> float:
        return sum(part.seconds for part in self.parts)

    @property
    def transferred(self) -> Arm | None:
        return next((arm for arm in self.arms if arm.key == "transferred"), None)

    @property
    def rival(self) -> Arm | None:
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


Story = Demo | Study | Run


def read_story(folder: Path) -> Story:
    """What the folder holds.

    Raises:
        InputError: if it is no run, study or demo folder, holds nothing yet, or one of its files is broken.
    """
    if not folder.exists():
        raise InputError(f"{folder}: no such folder")
    if not folder.is_dir():
        raise InputError(f"{folder}: a file; give the folder of a run, a study or a demo")
    if (folder / "demo.json").exists():
        return _demo(folder)
    if (folder / "study.json").exists():
        return read_study(folder)
    if (folder / "metrics.jsonl").exists():
        return read_run(folder)
    if not any(folder.iterdir()):
        raise InputError(f"{folder}: empty; give the folder of a run, a study or a demo")
    raise InputError(
        f"{folder}: no run (metrics.jsonl), study (study.json) or demo (demo.json) in it; "
        f"give the folder that leaven train --run, leaven tune --study or leaven demo wrote"
    )


def read_run(folder: Path, title: str | None = None, key: str = "run") -> Run:
    """The run in a folder, with its recipe's name for a title if none is given."""
    recipe = read_recipe(folder / "recipe.toml")
    steps: list[Step] = []
    for step in _lines(folder / "metrics.jsonl", Step):
        # A run that resumed from a checkpoint writes the steps after it again: the later line holds.
        while steps and steps[-1].step >= step.step:
            steps.pop()
        steps.append(step)
    if not steps:
        raise InputError(f"{folder / 'metrics.jsonl'}: no steps yet; wait for the first, or give another folder")
    events = list(_lines(folder / "events.jsonl", _Event)) if (folder / "events.jsonl").exists() else []
    validation = {
        event.tokens: event.loss for event in events if event.event == "validation" and event.loss is not None
    }
    finish = next((event for event in reversed(events) if event.event == "finish"), None)
    points = tuple(sorted(validation.items()))
    last = points[-1][1] if points else None
    return Run(
        title=title or recipe.name,
        recipe=recipe,
        steps=tuple(steps),
        validation=points,
        loss=finish.loss if finish and finish.loss is not None else last,
        seconds=finish.seconds if finish and finish.seconds is not None else _elapsed(events),
        finished=finish is not None,
        key=key,
    )


class _Event(_Entry):
    event: str
    tokens: int = 0
    time: Number = None
    loss: Number = None
    seconds: Number = None


def _elapsed(events: list[_Event]) -> float | None:
    """Seconds between first and last event of each start or resume, added up: a pause between them is no cost."""
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


def read_study(folder: Path) -> Study:
    document = _document(folder / "study.json", _StudyFile)
    if not document.trials:
        raise InputError(f"{folder / 'study.json'}: no trials yet; run leaven tune first")
    best = folder / "best.toml"
    return Study(
        name=document.name,
        method=document.method,
        space=document.space,
        noise_floor=document.noise_floor,
        best=document.best,
        trials=tuple(sorted(document.trials, key=lambda trial: trial.number)),
        centre=read_recipe(folder / "centre.toml"),
        best_recipe=read_recipe(best) if best.exists() else None,
    )


class _StudyFile(_Entry):
    name: str
    method: str = ""
    space: tuple[str, ...] = ()
    noise_floor: Number = None
    best: Best | None = None
    trials: tuple[Trial, ...] = ()


class _ArmEntry(_Entry):
    key: str
    title: str
    run: str
    loss: Number = None
    why: str = ""


class _StudyEntry(_Entry):
    study: str


class _DemoFile(_Entry):
    name: str
    verdict: str
    arms: tuple[_ArmEntry, ...] = ()
    proxy: _StudyEntry | None = None
    target: str | None = None
    parts: tuple[Part, ...] = ()
    corpus: Corpus | None = None
    machine: Machine | None = None


def _demo(folder: Path) -> Demo:
    document = _document(folder / "demo.json", _DemoFile)
    arms = tuple(_arm(folder, entry) for entry in document.arms)
    study_folder = document.proxy.study if document.proxy else ""
    has_study = bool(study_folder) and (folder / study_folder / "study.json").exists()
    has_target = document.target is not None and (folder / document.target).exists()
    if not has_study and not any(arm.run for arm in arms):
        raise InputError(f"{folder / 'demo.json'}: neither a study nor a run in it yet; run leaven demo again")
    return Demo(
        name=document.name,
        verdict=document.verdict,
        arms=arms,
        study=read_study(folder / study_folder) if has_study else None,
        study_folder=study_folder,
        target=read_recipe(folder / str(document.target)) if has_target else None,
        target_path=document.target or "",
        parts=document.parts,
        corpus=document.corpus,
        machine=document.machine,
    )


def _arm(folder: Path, entry: _ArmEntry) -> Arm:
    metrics = folder / entry.run / "metrics.jsonl"
    begun = metrics.exists() and b"\n" in metrics.read_bytes()[:65_536]
    run = read_run(folder / entry.run, entry.title, entry.key) if begun else None
    loss = entry.loss if entry.loss is not None else (run.loss if run else None)
    return Arm(entry.key, entry.title, entry.why, loss, entry.run, run)


def _document(path: Path, kind: type[Kind]) -> Kind:
    try:
        return kind.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise InputError(f"{path}: not JSON; write it again with the verb that made the folder") from None
    except ValidationError as error:
        raise InputError(f"{path}: {_explain(error)}") from None


def _lines(path: Path, kind: type[Kind]) -> Iterator[Kind]:
    """The lines of a log. The last one may be torn by a crash and is left out then; any other must be whole."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    for number, line in enumerate(lines, start=1):
        try:
            yield kind.model_validate(json.loads(line))
        except json.JSONDecodeError:
            if number < len(lines):
                raise InputError(f"{path}: line {number} is not JSON; remove that line") from None
        except ValidationError as error:
            raise InputError(f"{path}: line {number}: {_explain(error)}") from None


def _explain(error: ValidationError) -> str:
    fault = error.errors()[0]
    where = ".".join(str(key) for key in fault["loc"]) or "the document"
    if fault["type"] == "missing":
        return f"{where} is missing; write the file again with the verb that made it"
    return f"{where}: {fault['msg'][0].lower()}{fault['msg'][1:]}"
