"""From a folder of a run, a study, a check or a demo to a story. Errors name the file and say what to do."""

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import ValidationError

from leaven.recipe.errors import InputError
from leaven.recipe.files import read_recipe
from leaven.training.run_folder import RETURNS, RunFolder
from leaven.tuning.document import StudyDocument
from leaven.views.story import Arm, Corpus, Demo, Entry, Machine, Number, Part, Return, Run, Step, Story, Study

Kind = TypeVar("Kind")


def read_story(folder: Path) -> "Story | CheckFile":
    """What the folder holds.

    Raises:
        InputError: if it is no run, study, check or demo folder, holds nothing yet, or one of its files is broken.
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
        return _document(folder / "check.json", CheckFile.model_validate)
    if (folder / "runs.jsonl").exists():
        raise InputError(f"{folder}: runs of a check that has not ended; the same leaven check goes on with them")
    if not any(folder.iterdir()):
        raise InputError(f"{folder}: empty; give the folder of a run, a study, a check or a demo")
    raise InputError(
        f"{folder}: no run (metrics.jsonl), study (study.json), check (check.json) or demo (demo.json) in it; "
        f"give the folder that leaven train --run, leaven tune --study, leaven check --run or leaven demo wrote"
    )


def read_run(folder: Path, title: str | None = None, key: str = "run") -> Run:
    """The run in a folder, with its recipe's name for a title if none is given."""
    recipe, written = read_recipe(folder / "recipe.toml"), RunFolder(folder)
    steps = [_valid(Step.model_validate, line, folder / "metrics.jsonl") for line in written.metrics()]
    if not steps:
        raise InputError(f"{folder / 'metrics.jsonl'}: no steps yet; wait for the first, or give another folder")
    path, lines = folder / "events.jsonl", written.events()
    events = [_valid(_Event.model_validate, line, path) for line in lines]
    returns = [_valid(Return.model_validate, line, path) for line in lines if line["event"] in RETURNS]
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
    return Run(
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


class _Event(Entry):
    event: str
    tokens: int = 0
    time: Number = None
    loss: Number = None
    seconds: Number = None
    why: str | None = None
    to_tokens: int | None = None


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
    state = _document(folder / "study.json", StudyDocument.model_validate)
    if not state.trials:
        raise InputError(f"{folder / 'study.json'}: no trials yet; run leaven tune first")
    best = folder / "best.toml"
    in_order = tuple(sorted(state.trials, key=lambda trial: trial.number))
    return Study(
        **vars(state) | {"trials": in_order},
        centre=read_recipe(folder / "centre.toml"),
        best_recipe=read_recipe(best) if best.exists() else None,
    )


class _CheckRow(Entry):
    module: str
    axis: str
    limit: Number = None
    passed: bool | None
    parts: dict[str, Number]
    note: str = ""
    undecided: bool = False


class _CheckCurve(Entry):
    module: str
    axis: Literal["lr", "weight_decay", "init_std", "width", "depth", "batch", "tokens"]
    quantity: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]


class _MeasuredValue(Entry):
    name: str
    value: Number = None
    low: Number = None
    high: Number = None
    expected: Number = None
    note: str = ""


class CheckFile(Entry):
    """What a check of whole runs keeps beside them, as far as it is drawn: what ``leaven check --json`` prints."""

    check: Literal["transfer", "duration", "batch", "decay", "init", "equivalence"]
    subject: str
    quantity: str
    fault: str | None = None
    rows: tuple[_CheckRow, ...]
    curves: tuple[_CheckCurve, ...]
    measured: tuple[_MeasuredValue, ...] = ()
    settings: dict[str, Any]


class _ArmLink(Entry):
    key: str
    title: str
    run: str
    loss: Number = None
    why: str = ""


class _StudyLink(Entry):
    study: str


class _DemoFile(Entry):
    name: str
    verdict: str = "The demo is not finished: the same command goes on with it."
    size: str | None = None
    source: str | None = None
    arms: tuple[_ArmLink, ...] = ()
    proxy: _StudyLink | None = None
    target: str | None = None
    parts: tuple[Part, ...] = ()
    corpus: Corpus | None = None
    machine: Machine | None = None


def read_demo(folder: Path) -> Demo:
    if not (folder / "demo.json").exists():
        raise InputError(f"{folder}: no demo.json in it; give the folder that leaven demo wrote")
    document = _document(folder / "demo.json", _DemoFile.model_validate)
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
        command=_command(document),
        parts=document.parts,
        corpus=document.corpus,
        machine=document.machine,
    )


def _command(document: _DemoFile) -> str:
    options = (("--run", "."), ("--size", document.size), ("--source", document.source))
    return shlex.join(["leaven", "demo", *(word for option in options if option[1] for word in option if word)])


def _arm(folder: Path, entry: _ArmLink) -> Arm:
    begun = RunFolder(folder / entry.run).metrics()
    run = read_run(folder / entry.run, entry.title, entry.key) if begun else None
    # The last validation of a run that broke off is no final loss: it is not compared with any.
    loss = entry.loss if entry.loss is not None else (run.loss if run and run.finished else None)
    return Arm(entry.key, entry.title, entry.why, loss, entry.run, run)


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
