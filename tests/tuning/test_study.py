"""Studies: trials, results and stores survive killed processes."""

import errno
import json
import math
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import psutil
import pytest
import torch
from tests.errors import refused
from typer.testing import CliRunner

from leaven.cli import INTERRUPTED, app
from leaven.data.tokens import TokenSet, prepare
from leaven.documents import is_sealed, sealed
from leaven.errors import InputError
from leaven.planning.flops import flops_per_token
from leaven.recipe.files import read_recipe, write_recipe
from leaven.recipe.recipe import Recipe
from leaven.scaling.transfer import transfer_like
from leaven.training import device
from leaven.training.checkpoint import Checkpoint, Progress, read_checkpoint, write_checkpoint
from leaven.training.load import export_run, load_run
from leaven.training.run_folder import RunFolder, tokens_of
from leaven.training.trainer import train
from leaven.tuning.algorithm.noise import GIVEN
from leaven.tuning.command import command_space
from leaven.tuning.service import recipe_study
from leaven.tuning.service import study as service_study
from leaven.tuning.service.command_study import CommandStudy
from leaven.tuning.service.recipe_study import Study
from leaven.tuning.service.stores import Journal, StoreGone, open_store
from leaven.tuning.service.study_folder import StudyFolder, write_results
from leaven.tuning.space import Space, space
from leaven.tuning.study_document import Best, Coordinate, StudyDocument, StudyTrial
from leaven.views.folders import read_study
from leaven.views.study_page import tune_command

SHORT = {"data.tokens": 1024, "schedule.warmup_tokens": 128}
LR, BEST = "hyperparameters.lr", Path("best.toml")

Make = Callable[..., Study]  # the fixture ``study``


class Screen:
    def __init__(self, on_asked: Callable[[int], None] = lambda number: None) -> None:
        self.on_asked, self.seen = on_asked, list[StudyTrial]()

    def started(self, number: int, worker: str) -> None:
        self.on_asked(number)

    def ended(self, state: StudyDocument) -> None:
        self.seen = [trial for trial in state.trials if trial.state != "running"]

    def note(self, text: str) -> None:
        raise AssertionError(text)


@pytest.fixture
def short(tiny: Recipe) -> Recipe:
    return tiny.replace(SHORT)


@pytest.fixture
def tokens(tiny: Recipe) -> TokenSet:
    return prepare(tiny.data, tiny.model.vocab_size)


@pytest.fixture
def study(short: Recipe, tokens: TokenSet, tmp_path: Path) -> Make:
    def make(method: str = "random", recipe: Recipe = short, which: str = LR, **more: object) -> Study:
        return Study(tmp_path / "study", recipe, space(recipe, which), method, tokens, **more)  # type: ignore[arg-type]

    return make


def tune(recipe: Path, where: Path | str, trials: int, *more: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "leaven", "tune", str(recipe), "--study", str(where), "--trials", str(trials)]
    command += ["--workers", "1", "--json", *(f"--set={key}={value}" for key, value in SHORT.items()), *more]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def saved(folder: Path) -> list[dict[str, object]]:
    file = folder / "study.json"
    return list(json.loads(file.read_text())["trials"]) if file.exists() else []


def until(done: Callable[[], object], *processes: "subprocess.Popen[str]") -> None:
    """Wait until ``done`` returns true, while the processes are alive."""
    while not done():
        for process in processes:
            assert process.poll() is None, f"it ended before: {process.communicate()}"
        time.sleep(0.02)


def workers_of(parent: int) -> list[int]:
    """Training processes of a study: its children that hold torch, not multiprocessing's resource tracker."""
    found = []
    with suppress(psutil.NoSuchProcess):
        for child in psutil.Process(parent).children():
            with suppress(psutil.NoSuchProcess):  # it has just ended
                if "spawn_main" in " ".join(child.cmdline()):
                    found.append(child.pid)
    return found


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() not in {psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD}
    except psutil.NoSuchProcess:
        return False


def accounted(trials: tuple[StudyTrial, ...], count: int) -> None:
    """Check that each run is there once: the start with its seeds, the search, and the finalists with theirs."""
    assert len(trials) == count
    assert len({trial.number for trial in trials}) == count
    assert {trial.state for trial in trials} <= {"complete", "diverged", "pruned"}
    assert sorted(trial.seed for trial in trials if trial.purpose == "noise") == [1, 2]
    runs = Counter((tuple((trial.octaves or {}).values()), trial.seed) for trial in trials)
    assert set(runs.values()) == {1}


MANY = 400  # trials, more than any test waits for


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.kills
def test_a_killed_command_of_two_on_one_folder_loses_no_trial(tiny_file: Path, study: Make, tmp_path: Path) -> None:
    folder = tmp_path / "study"
    one, other = (tune(tiny_file, folder, MANY, "--space", LR, "--method", "random") for _ in range(2))
    try:
        until(lambda: len(saved(folder)) > 3 and workers_of(one.pid) and workers_of(other.pid), one, other)
        orphans = workers_of(one.pid)
        os.kill(one.pid, signal.SIGKILL)
        before = len(saved(folder))
        until(lambda: len(saved(folder)) > before + 2, other)
        os.killpg(other.pid, signal.SIGINT)
        out, errors = other.communicate(timeout=60)
    finally:
        for process in (one, other):
            process.kill()
            process.communicate()
    assert other.returncode == INTERRUPTED, errors
    document = json.loads(out)
    assert {"best", "trials", "failed", "noise_floor", "next"} <= set(document)
    assert (document["best"], document["failed"]) == (None, 0)
    until(lambda: not any(map(alive, orphans)))
    with study() as same:
        trials = len(same.state().trials) + 6
        state = same.run(trials, 1)
        accounted(state.trials, trials)
        assert same.run(trials, 1).summary(BEST) == state.summary(BEST)
    assert state.best is not None
    low, high = state.best.interval
    assert low < state.best.loss < high


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.kills
def test_ctrl_c_exits_with_75_and_the_next_command_resumes(tiny_file: Path, study: Make, tmp_path: Path) -> None:
    process = tune(tiny_file, tmp_path / "study", MANY, "--space", LR, "--method", "random")
    try:
        until(lambda: saved(tmp_path / "study"), process)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the workers too
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == INTERRUPTED
    assert "run the same command again to resume" in errors
    assert "Traceback" not in errors
    assert "running" not in {trial["state"] for trial in saved(tmp_path / "study")}  # given back, and waiting
    screen = Screen()
    with study() as same:
        before = [trial for trial in same.state().trials if trial.state == "complete"]
        trials = len(before) + 24  # a budget that measures the noise with two runs more of the start
        accounted(same.run(trials, 2, screen=screen).trials, trials)
    assert len(screen.seen) == trials


@pytest.mark.kills
def test_ctrl_c_while_workers_start_is_quiet(tiny_file: Path, tmp_path: Path) -> None:
    process = tune(tiny_file, tmp_path / "study", MANY)
    until(lambda: workers_of(process.pid), process)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == INTERRUPTED
    assert "Traceback" not in errors


@pytest.mark.kills
def test_a_killed_worker_costs_no_trial(study: Make) -> None:
    def kill(number: int) -> None:
        if number == 0:  # whose worker takes seconds to start
            until(lambda: workers_of(os.getpid()))
            os.kill(workers_of(os.getpid())[0], signal.SIGKILL)

    with study() as opened:
        state = opened.run(4, 1, screen=Screen(kill))
    assert [(trial.number, trial.purpose) for trial in state.trials] == [(number, "search") for number in range(1, 5)]
    assert (state.summary(BEST).trials, state.summary(BEST).failed) == (4, 0)


@pytest.mark.kills
def test_the_trial_of_a_killed_worker_resumes_from_its_checkpoint(
    study: Make, tiny: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recipe_study, "CHECKPOINT_SECONDS", 0.0)
    endless = tiny.replace(SHORT | {"data.tokens": 2_560_000})
    folder, seen = tmp_path / "study" / "checkpoints", list[Progress]()

    def kill(number: int) -> None:
        """Wait for a checkpoint; kill the first worker, and mark the seconds of its checkpoint to recognise it."""
        own, before = f"000000-{number:06d}", seen[-1].tokens if seen else 0
        until(lambda: any(tokens_of(kept) > before for kept in folder.glob(f"{own}/*/tokens-*")))
        (kept,) = folder.glob(f"{own}/*")
        if not seen:
            (worker,) = filter(alive, workers_of(os.getpid()))
            os.kill(worker, signal.SIGKILL)
            until(lambda: not alive(worker))
        found, _ = read_checkpoint(kept)
        assert found is not None
        seen.append(found.progress)
        if len(seen) == 1:
            write_checkpoint(kept, Checkpoint(**vars(found) | {"progress": replace(found.progress, seconds=1e6)}))

    with study(recipe=endless) as opened:
        state = opened.run(1, 1, screen=Screen(kill), stop=lambda: len(seen) == 2)
    assert seen[0].tokens < seen[1].tokens
    assert seen[0].seconds < 1e6 < seen[1].seconds
    assert [trial.state for trial in state.trials] == ["waiting"]
    assert list(folder.glob("000000-000001"))


def dying_pool(before: Callable[[Path], object]) -> type[nullcontext[Any]]:
    """Return a stand-in for WorkerPool. Its worker calls ``before`` with the checkpoint folder, and dies."""

    class Pool(nullcontext[Any]):
        def __init__(self, workers: int, device: str | None = None) -> None: ...

        def __enter__(self) -> "Pool":
            return self

        def submit(self, *_: object, checkpoint: Path, **__: object) -> "Future[Any]":
            before(checkpoint)
            future: Future[Any] = Future()
            future.set_exception(BrokenProcessPool())
            return future

    return Pool


def test_a_run_whose_workers_die_fails_and_each_retry_gets_its_checkpoint(
    tiny_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[list[str]] = []  # files that each attempt found

    def leave(checkpoint: Path) -> None:
        checkpoint.mkdir(parents=True, exist_ok=True)
        left.append([file.name for file in checkpoint.iterdir()])
        (checkpoint / f"{3:024x}").touch()
        shutil.copytree(checkpoint, f"{checkpoint}.bak")

    monkeypatch.setattr(recipe_study, "WorkerPool", dying_pool(leave))
    options = ["--study", str(tmp_path / "study"), "--trials", "2", "--workers", "1", "--space", LR]
    done = CliRunner().invoke(app, ["tune", str(tiny_file), *options])
    assert (done.exit_code, "diverged" in done.output) == (1, False)
    assert "no trial ended: 2 died at every attempt" in done.stderr
    assert [trial["state"] for trial in saved(tmp_path / "study")] == ["failed"] * 2
    assert left == [[], [f"{3:024x}"], [], [f"{3:024x}"]]
    copies = {file.name for file in (tmp_path / "study" / "checkpoints").glob("[!.]*")}
    assert copies == {f"{name}.bak" for name in ("000000-000000", "000000-000001", "000002-000002", "000002-000003")}


class Notes(Screen):
    """A screen that collects the lines to the user."""

    def __init__(self) -> None:
        super().__init__()
        self.lines = list[str]()

    def note(self, text: str) -> None:
        self.lines.append(text)


def test_a_copy_with_a_link_to_checkpoints_leaves_those_of_the_original(
    study: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopping, found = threading.Event(), list[list[str]]()

    def leave(checkpoint: Path) -> None:
        found.append([file.name for file in checkpoint.iterdir()])
        (checkpoint / f"{3:024x}").touch()
        stopping.set()

    def attempt() -> list[str]:
        stopping.clear()
        notes = Notes()
        with study() as opened:
            opened.run(1, 1, screen=notes, stop=stopping.is_set)
        return notes.lines

    monkeypatch.setattr(recipe_study, "WorkerPool", dying_pool(leave))
    folder, copy = tmp_path / "study", tmp_path / "copy"
    (tmp_path / "scratch").mkdir()
    folder.mkdir()
    (folder / "checkpoints").symlink_to(tmp_path / "scratch")
    assert attempt() == []
    shutil.copytree(folder, copy, symlinks=True)
    with refused(f"is a link to the checkpoints of {folder}; if no other run", f"if {copy} is a copy of another"):
        RunFolder(copy).claim_checkpoints()
    with refused(f"is a link to the checkpoints of {folder}; if no other run"):
        StudyFolder(copy, "").remove_checkpoints([])
    (copy / "checkpoints").unlink()  # as the message says
    shutil.copytree(tmp_path / "scratch", copy / "checkpoints")
    RunFolder(copy).claim_checkpoints()
    assert attempt() == []
    assert found == [[], [f"{3:024x}"]]
    shutil.rmtree(tmp_path / "scratch")  # or its disk is not mounted
    monkeypatch.setattr(recipe_study, "WorkerPool", dying_pool(lambda checkpoint: stopping.set()))
    (line,) = attempt()
    assert "begins again" in line


@pytest.mark.usefixtures("in_this_process")
def test_checkpoints_of_another_program_are_no_study_and_stay(study: Make, tmp_path: Path) -> None:
    folder = tmp_path / "study" / "checkpoints"
    other = folder / "000000-001000" / "model.pt"
    other.parent.mkdir(parents=True)
    other.touch()
    with pytest.raises(InputError, match="is not empty and contains no study"):
        study()
    shutil.move(folder, tmp_path / "scratch")
    folder.symlink_to(tmp_path / "scratch-that-is-empty")
    with study() as opened:
        folder.unlink()
        shutil.move(tmp_path / "scratch", folder)
        (folder / "000000-000000" / f"{3:024x}").mkdir(parents=True)
        opened.run(1, 1)
    assert [path.name for path in folder.iterdir()] == ["000000-001000"]
    assert other.exists()


def test_a_worker_that_is_killed_while_leaven_stops_does_not_count(
    study: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopping = threading.Event()
    monkeypatch.setattr(recipe_study, "WorkerPool", dying_pool(lambda folder: stopping.set()))
    for _ in range(2):  # a trial has failed after two deaths
        stopping.clear()
        with study() as opened:
            state = opened.run(1, 1, stop=stopping.is_set)
        assert [trial.state for trial in state.trials] == ["waiting"]


@pytest.mark.usefixtures("in_this_process")
def test_an_interrupted_command_keeps_the_best_of_an_earlier_one(study: Make, tmp_path: Path) -> None:
    asked: list[int] = []
    with study() as opened:
        best = opened.run(4, 1).best
        assert best is not None
        state = opened.run(MANY, 1, screen=Screen(asked.append), stop=lambda: len(asked) > 1)
    assert len(state.trials) < MANY
    assert state.best is not None
    assert (state.best.number, state.best.loss) == (best.number, best.loss)
    assert json.loads((tmp_path / "study" / "study.json").read_text())["best"]["loss"] == best.loss


@pytest.mark.usefixtures("in_this_process")
def test_a_command_that_stops_repeats_a_failed_call_of_the_store(
    study: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    append, asked, failed = Journal.append_logs, list[int](), list[int]()

    def failing_once(self: Journal, logs: list[dict[str, Any]]) -> None:
        if len(asked) > 1 and threading.current_thread() is threading.main_thread() and not failed:
            failed.append(1)
            raise OSError(errno.EIO, "a line cannot be read")
        append(self, logs)

    monkeypatch.setattr(Journal, "append_logs", failing_once)
    with study() as opened:
        state = opened.run(MANY, 1, screen=Screen(asked.append), stop=lambda: len(asked) > 1)
    assert failed
    assert "running" not in {trial.state for trial in state.trials}


@pytest.mark.usefixtures("in_this_process")
def test_study_json_has_no_infinities(study: Make, tmp_path: Path) -> None:
    def refuse(name: str) -> None:
        raise AssertionError(name)

    with study() as opened:
        opened.run(1, 1)
    document = json.loads((tmp_path / "study" / "study.json").read_text(), parse_constant=refuse)
    assert document["best"]["interval"] == [None, None]
    best = read_study(tmp_path / "study").best
    assert best is not None
    assert best.interval == (-math.inf, math.inf)


@pytest.mark.long
@pytest.mark.usefixtures("in_this_process")
def test_the_document_has_every_trial_and_the_recipe_its_reasons(study: Make, tmp_path: Path) -> None:
    screen = Screen()
    with study("trust-region", which=f"{LR},hyperparameters.init_std") as opened:
        flops = flops_per_token(opened.space.recipe.model) * opened.space.recipe.data.tokens
        state = opened.run(None, 1, flops=16 * flops, screen=screen)
    assert 15 * flops < sum(trial.flops for trial in state.trials) <= 16 * flops * (1 + 1e-9)
    purposes = Counter(trial.purpose for trial in state.trials)
    assert (purposes["noise"], purposes["rerun"]) == (1, 1)
    assert sorted(screen.seen, key=lambda trial: trial.number) == list(state.trials)
    first = state.trials[0]
    assert first.values == {each.path: each.centre for each in opened.space.dimensions}
    assert first.octaves == {LR: 0.0, "hyperparameters.init_std": 0.0}
    assert first.curve
    assert first.worker
    assert state.best is not None
    at_best = [trial for trial in state.trials if trial.octaves == state.octaves]
    # If the start is the answer, all of its runs count.
    counted = [t for t in at_best if t.purpose == "rerun" or not any(state.octaves.values())]
    assert state.best.loss == pytest.approx(sum(t.loss or 0 for t in counted) / len(counted))
    low, high = state.best.interval
    assert low < state.best.loss < high
    assert state.noise_floor is not None
    assert state.noise_floor > 0
    assert state.radius is not None
    assert {each.path for each in state.coordinates} == set(state.space)
    assert state.fewest_octaves is not None
    assert state.front
    assert not list((tmp_path / "study").glob("checkpoints/[!.]*"))
    best = read_recipe(tmp_path / "study" / "best.toml")
    assert best.scaling.base == best.base
    assert "study tiny, trial" in best.why[LR]


def answer_at(around: Space, octaves: dict[str, float], **more: Any) -> StudyDocument:
    return StudyDocument(
        best=Best(3, 2.0, (1.9, 2.1), 2, 2),
        octaves=octaves,
        coordinates=tuple(Coordinate(path, x, (x, x), 0.1, 0.5, worth=True) for path, x in octaves.items()),
        dimensions=around.dimensions,
        name="tiny",
        method="random",
        space=around.paths,
        trials=(),
        **more,
    )


def test_the_fewest_changes_are_a_recipe_of_their_own(short: Recipe, tmp_path: Path) -> None:
    init = "hyperparameters.init_std"
    noted = short.replace({"why": {LR: "from Bob", init: "as Ada said"}})
    around, fewest = space(noted, f"{LR},{init}"), {LR: 1.0, init: 0.0}
    state = answer_at(around, {LR: 1.0, init: -1.0}, fewest=Best(3, 2.0, (1.9, 2.1), 2, 2), fewest_octaves=fewest)
    write_results(tmp_path, around, state)
    written = [read_recipe(tmp_path / f"{name}.toml") for name in ("best", "fewest")]
    start = short.hyperparameters
    assert [recipe.hyperparameters.lr / start.lr for recipe in written] == [2, 2]
    assert [recipe.hyperparameters.init_std for recipe in written] == [start.init_std / 2, start.init_std]
    assert written[1].why[init].endswith("as at the start; as Ada said")  # the user's reason for this value
    assert "Bob" not in written[1].why[LR]
    write_results(tmp_path, around, state.model_copy(update={"fewest_octaves": state.octaves}))
    assert not (tmp_path / "fewest.toml").exists()


def test_the_start_of_a_search_over_several_studies_is_known_in_a_transfer(short: Recipe, tmp_path: Path) -> None:
    """Batches of 16,384 and 32,768 tokens are not rounded in the reasons, which `transfer_like` reads."""
    batch = 1_024 * short.model.seq_len // 2
    first = short.replace({"batch.tokens": batch, "data.tokens": 200 * batch})
    target = first.replace({"batch.tokens": 4 * batch, "data.tokens": 800 * batch})

    def answer(start: Recipe, octaves: float) -> Recipe:
        around = space(start, "batch.tokens")
        write_results(tmp_path, around, answer_at(around, {"batch.tokens": octaves}))
        return read_recipe(tmp_path / "best.toml")

    found = answer(first, 1.0)
    assert found.batch.tokens == 2 * batch
    assert transfer_like(found, target).batch.tokens == 8 * batch
    for octaves in (0.0, -1.0, 1.0):
        again = answer(found, octaves)
        assert again.batch.tokens == 2 * batch * 2**octaves
        assert transfer_like(again, target).batch.tokens == 8 * batch * 2**octaves
        assert transfer_like(again, transfer_like(found, target)).batch.tokens == 8 * batch * 2**octaves
    fewest = {"fewest": Best(3, 2.0, (1.9, 2.1), 2, 2), "fewest_octaves": {LR: 0.0, "batch.tokens": -1.0}}
    around = space(first, f"{LR},batch.tokens")
    write_results(tmp_path, around, answer_at(around, {LR: 1.0, "batch.tokens": 1.0}, **fewest))
    assert transfer_like(read_recipe(tmp_path / "fewest.toml"), target).batch.tokens == 2 * batch


def interrupted(note: str) -> None:
    raise InterruptedError(note)


def test_an_edited_best_toml_stays_until_there_is_another_answer(short: Recipe, tmp_path: Path) -> None:
    around, notes = space(short, LR), list[str]()
    answers = [answer_at(around, {LR: x}) for x in (1.0, 0.5)]
    best, fewest = tmp_path / "best.toml", tmp_path / "fewest.toml"
    write_results(tmp_path, around, answers[0], notes.append)
    text = best.read_text()
    edited = text + "# decided with Anna"
    best.write_text(edited)
    fewest.write_text("# mine")
    write_results(tmp_path, around, answers[0], notes.append)
    assert best.read_text() == edited
    write_results(tmp_path, around, answers[0].model_copy(update={"method": "gp"}), notes.append)  # another reason
    assert best.read_text() == edited
    write_results(tmp_path, around, answers[1], notes.append)
    assert (tmp_path / "best.toml.1").read_text() == edited
    stays = f"{best} was edited, so it is not overwritten"
    assert [note.partition(";")[0] for note in notes] == [stays, stays, f"{best} was edited"]
    write_results(tmp_path, around, answers[0], notes.append)
    assert (best.read_text(), fewest.read_text(), len(notes)) == (text, "# mine", 3)
    # A file that the best command reads, and a link to a recipe that is kept elsewhere.
    config, kept = tmp_path / "best" / "config" / "base.yaml", tmp_path / "kept.toml"
    best.rename(kept)
    best.symlink_to(kept)
    kept.write_text("# in git")
    for inputs in ({"best/config/base.yaml": "lr: 1"}, {"best/config/base.yaml": "lr: 1, of a newer version"}):
        write_results(tmp_path, around, answers[0], notes.append, inputs)
        config.write_text("# with Ben")
    write_results(tmp_path, around, answers[0], notes.append, inputs)
    assert (config.read_text(), best.is_symlink()) == ("# with Ben", True)
    write_results(tmp_path, around, answers[1], notes.append, inputs)
    assert (config.read_text(), kept.read_text()) == ("lr: 1, of a newer version", "# in git")
    assert (config.with_name("base.yaml.1").read_text(), best.is_symlink()) == ("# with Ben", False)
    # A link to a disk that is away is not replaced, and a kill leaves nothing renamed without a line.
    away = tmp_path / "best.toml.3"
    away.symlink_to(tmp_path / "away")
    best.write_text("# again")
    with pytest.raises(InterruptedError):
        write_results(tmp_path, around, answers[0], interrupted)
    assert best.read_text() == "# again"
    write_results(tmp_path, around, answers[0], notes.append)
    assert away.is_symlink()
    assert (tmp_path / "best.toml.4").read_text() == "# again"


@pytest.mark.usefixtures("in_this_process")
def test_advice_if_all_diverged_is_printed_once_and_in_the_document(tiny_file: Path, tmp_path: Path) -> None:
    wild = [f"--set={LR}=1e19", "--set=hyperparameters.weight_decay=1e-30", "--set=data.tokens=2048"]
    options = ["--study", str(tmp_path / "study"), "--trials", "4", "--workers", "1", "--space", LR]
    done = CliRunner().invoke(app, ["tune", str(tiny_file), *options, *wild])
    assert (done.exit_code, done.stdout) == (1, "")
    advice = done.stderr.splitlines()[-1]
    assert advice.startswith("all 4 trials diverged, including the start: start from lr at ")
    assert done.stderr.count(advice) == 1
    document = json.loads((tmp_path / "study" / "study.json").read_text())
    assert (document["advice"], document["best"]) == (advice, None)
    assert [(trial["state"], trial["loss"]) for trial in document["trials"]] == [("diverged", None)] * 4


@pytest.mark.usefixtures("in_this_process")
def test_a_given_noise_is_not_measured_and_belongs_to_the_study(study: Make, tmp_path: Path) -> None:
    with study("trust-region", noise=0.5) as opened:
        state = opened.run(12, 1)
    assert {trial.purpose for trial in state.trials} == {"search"}
    assert state.best is not None
    assert state.in_doubt == any(state.octaves.values())
    # The page's command has the noise, without which the study would refuse it.
    page = read_study(tmp_path / "study")
    assert "--noise 0.5" in tune_command(page, "centre.toml", ".")
    assert (state.noise_floor, state.noise_runs) == (0.5, GIVEN)


@pytest.mark.usefixtures("in_this_process")
def test_a_point_that_is_not_a_recipe_counts_as_diverged(study: Make, tiny: Recipe) -> None:
    """A search may propose lr x weight_decay above 1, which is not a valid recipe."""
    edge = tiny.replace({LR: 0.9, "hyperparameters.weight_decay": 1.0, **SHORT, "data.tokens": 1024})
    opened = study("grid", recipe=edge)  # of -3, -1, 1 and 3 octaves
    opened.space = replace(opened.space, dimensions=(replace(opened.space.dimensions[0], high=3.0),))
    with opened:
        state = opened.run(5, 1)
    beyond = [trial for trial in state.trials if (trial.octaves or {})[LR] > 0.2]
    assert [trial.state for trial in beyond] == ["diverged"] * 2
    assert len(state.trials) == 5


def test_a_store_that_stays_away_is_exit_code_75_and_one_line(
    tiny_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: object, **__: object) -> None:
        raise StoreGone("the store has been unreachable for 300 seconds")

    monkeypatch.setattr(Study, "run", away)
    done = CliRunner().invoke(app, ["tune", str(tiny_file), "--study", str(tmp_path / "study")])
    assert done.exit_code == INTERRUPTED
    assert done.stderr.splitlines()[-1] == "the store has been unreachable for 300 seconds"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--hours", "0"], "hours = 0.0: give a finite number above 0"),
        (["--out", "results"], "--out is only for a --study that is a URL; remove --out"),
        (["--study", ""], "--study has an empty value; is a shell variable empty?"),
        (["--flops", "1e3"], r"--flops 1000 is too small, because one trial takes \S+ FLOPs"),
        (["--method", "grid", "--flops", "1e12"], "method grid: the number of trials decides how fine the grid is"),
        (["--method", "grid", "--space", "global", "--trials", "60"], "9 hyperparameters has at least 2\\^9"),
        (["--method", "grid", "--trials", "1000000000000"], "the grid has more than 100,000 points"),
    ],
)
def test_bad_options_write_nothing(options: list[str], said: str, tiny_file: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=said):
        CliRunner().invoke(
            app, ["tune", str(tiny_file), "--study", str(tmp_path / "study"), *options], catch_exceptions=False
        )
    assert not (tmp_path / "study").exists()


def test_every_worker_that_trains_on_a_gpu_has_one(
    tiny_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[object] = []

    def run(*_: object, devices: object, **__: object) -> StudyDocument:
        given.append(devices)
        raise StoreGone("gone")

    monkeypatch.setattr(Study, "run", run)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    verb = ["tune", str(tiny_file), "--study", str(tmp_path / "study")]
    CliRunner().invoke(app, [*verb, "--workers", "9"])  # this machine has no GPU
    monkeypatch.setattr(device, "default_device", lambda: torch.device("cuda"))
    for workers in ("2", "auto"):
        CliRunner().invoke(app, [*verb, "--workers", workers])
    CliRunner().invoke(app, verb)
    assert given == [(), ("0", "1"), tuple("01234567"), ()]


@pytest.mark.usefixtures("in_this_process")
def test_durations_are_compared_and_the_longest_is_the_loss(study: Make, tiny: Recipe) -> None:
    wsd = tiny.replace({"schedule.decay": "wsd", **SHORT})
    with study(recipe=wsd, durations=(512, 1024)) as opened:
        state = opened.run(1, 1)
    (trial,) = state.trials
    assert [tokens for tokens, _ in trial.branches] == [512, 1024]
    assert trial.loss == trial.branches[-1][1]


def test_the_answer_is_for_the_longest_duration(
    tiny: Recipe, tiny_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Recipe] = []

    def run(study: Study, *_: object, **__: object) -> StudyDocument:
        opened.append(read_recipe(study.out / "centre.toml"))
        raise StoreGone("gone")

    monkeypatch.setattr(Study, "run", run)
    sets = ["--set", "schedule.decay=wsd", "--durations", "2048,4096"]
    printed = CliRunner().invoke(app, ["tune", str(tiny_file), "--study", str(tmp_path / "study"), *sets]).output
    assert f"data.tokens {tiny.data.tokens:,} is replaced by 4,096, the longest of --durations" in printed
    (centre,) = opened
    assert (centre.data.tokens, centre.base.tokens) == (4096, 4096) != (tiny.data.tokens, tiny.base.tokens)


def tree(folder: Path) -> dict[Path, bytes | None]:
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("other settings: method was random, is now tpe; give the same settings, or", {"method": "tpe"}),
    ("other settings: space.* was not set, is now .*; and 21 more; give", {"which": "global"}),
    ("another recipe: hyperparameters.lr was 0.01, is now 0.02", {"change": {LR: 0.02}}),
    ("contains the study tiny, not big; use another --study", {"change": {"name": "big"}}),
    ("other settings: text was .*, is now x", {"text": "x"}),
    ("other settings: noise was not set, is now 0.5", {"noise": 0.5}),
    ("other settings: durations", {"store": "wsd.db", "out": "wsd", "change": {"schedule.decay": "wsd"}}),
    ('durations: with decay = "cosine", several durations cannot share one run', {"durations": (1024, 2048)}),
    ("other settings: method", {"method": "tpe", "out": "new", "store": "kept.db"}),
    ("another recipe: data.seed", {"change": {"data.seed": 3}, "out": "new", "store": "kept.db"}),
    ("has a study, but the store of .* does not have it", {"out": "ended", "store": "new.db"}),
    ("has a study, but the store of .* does not have it", {"out": "ended", "store": "empty.db"}),
    ("has a study, but the store of .* does not have it", {"out": "ended", "store": "blank.db"}),
    ("has a study, but the store of .* does not have it", {"out": "ended"}),
    ("contains the study leaven, not tiny; use another --study", {"out": "leaven"}),
    ("not a journal of Optuna", {"out": "notes"}),
    ("is not empty and contains no study; use another folder", {"out": "full"}),
    ("full/x is a file; give a folder", {"out": "full/x/study", "store": "new.db"}),
    ("there is no folder .*none", {"out": "new", "store": "none/new.db"}),
    ("method best: unknown; choose from trust-region, random", {"method": "best", "out": "new"}),
]


def test_a_study_that_does_not_fit_writes_nothing(short: Recipe, tokens: TokenSet, tmp_path: Path) -> None:
    def of(
        out: str = "study",
        method: str = "random",
        which: str = LR,
        change: dict[str, Any] = {},  # noqa: B006 - it is read
        text: str = tokens.fingerprint,
        store: str | None = None,
        **more: Any,
    ) -> Study:
        recipe, where = short.replace(change), store and f"sqlite:///{tmp_path / store}"
        around, there = space(recipe, which), replace(tokens, fingerprint=text)
        return Study(tmp_path / out, recipe, around, method, there, where, **more)

    for out, store in (("study", None), ("kept", "kept.db")):
        with of(out, store=store):
            pass
    with of("wsd", store="wsd.db", change={"schedule.decay": "wsd"}, durations=(512, 1024)):
        pass
    for folder in ("full", "leaven", "notes", "ended"):
        (tmp_path / folder).mkdir()
    for name, content in (("full/x", ""), ("notes/journal.log", "notes"), ("empty.db", "")):
        (tmp_path / name).write_text(content)
    open_store(f"sqlite:///{tmp_path}/blank.db").remove_session()  # a database without studies
    optuna.create_study(study_name="leaven", storage=open_store(tmp_path / "leaven" / "journal.log"))
    write_recipe(short, tmp_path / "ended" / "centre.toml")
    (tmp_path / "ended" / "study.json").write_text(
        json.dumps({"trials": [{"number": n, "state": "complete"} for n in range(2)]})
    )
    before = tree(tmp_path)
    for said, asked in REFUSED:
        with pytest.raises(InputError, match=said) as refused, of(**asked):
            pass
        assert "\n" not in str(refused.value)
        assert tree(tmp_path) == before


def lose_ended_trials(folder: Path) -> None:
    """Cut the journal before its last trial began, as a backup of an earlier time would."""
    journal = folder / "journal.log"
    lines = journal.read_bytes().splitlines(keepends=True)
    began = [index for index, line in enumerate(lines) if json.loads(line)["op_code"] == 4]  # CREATE_TRIAL
    journal.write_bytes(b"".join(lines[: began[-1]]))


def cut_settings(folder: Path) -> None:
    """Cut the journal within the line of the settings, and damage study.json."""
    journal = folder / "journal.log"
    created, settings, *_ = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(created + settings[:300])
    (folder / "study.json").write_text("[[[")


@pytest.mark.long
@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize(
    ("lose", "said"),
    [
        (cut_settings, "does not have it"),
        (lambda folder: (folder / "journal.log").unlink(), "does not have it"),
        (lambda folder: [(folder / name).unlink() for name in ("journal.log", "study.json")], "does not have it"),
        (lambda folder: (folder / "journal.log").write_bytes(b""), "does not have it"),
        (lose_ended_trials, "has lost 1 of them"),
    ],
    ids=["cut settings", "no journal", "neither", "empty", "cut"],
)
def test_a_study_that_has_lost_its_trials_does_not_start_again(
    study: Make, tmp_path: Path, lose: Callable[[Path], object], said: str
) -> None:
    with study() as first:
        first.run(3, 1)
    folder = tmp_path / "study"
    lose(folder)
    before = tree(folder)
    with pytest.raises(InputError, match=f"{said}.*restore the store"), study():
        pass
    assert tree(folder) == before


@pytest.mark.usefixtures("in_this_process")
def test_a_study_whose_journal_was_cut_before_a_damaged_line_goes_on(
    study: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("leaven.tuning.service.stores.SECOND_LOOK", 0.0)
    with study() as first:
        first.run(2, 1)
    folder = tmp_path / "study"
    lose_ended_trials(folder)
    journal = folder / "journal.log"
    journal.write_bytes(journal.read_bytes() + b"x\n{}\n")
    with pytest.raises(InputError, match=r"is damaged; .* keep only the lines before it: head -n (\d+)$") as damaged:
        study().__enter__()
    kept = int(str(damaged.value).split()[-1])
    journal.write_bytes(b"".join(journal.read_bytes().splitlines(keepends=True)[:kept]))
    with pytest.raises(InputError, match="has lost 1 of them") as lost:
        study().__enter__()
    command = re.search("or type (mv .*) to go on without them$", str(lost.value))
    assert command is not None
    subprocess.run(command[1], shell=True, check=True)
    with study() as again:
        again.run(2, 1)
    assert [trial["state"] for trial in saved(folder)] == ["complete"] * 2


def swap_the_journal(folder: Path, other: Path) -> None:
    shutil.copy(other / "journal.log", folder / "journal.log")


def write_as_a_copy(folder: Path, other: Path) -> None:
    """Write study.json with the losses of a copy of the study, which went on by itself."""
    document = json.loads((folder / "study.json").read_text())
    document["trials"][0]["loss"] += 1.0
    (folder / "study.json").write_text(json.dumps(sealed(document)))


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (swap_the_journal, "belongs to the study .*, but --study .* contains the study"),
        (write_as_a_copy, "has the loss .* for trial 0, but --study .* has .* a copy of the study"),
    ],
)
def test_results_of_another_study_are_not_overwritten(
    study: Make, tmp_path: Path, change: Callable[[Path, Path], None], said: str
) -> None:
    for copied in (True, False):
        with study() as opened:
            opened.run(2, 1)
        if copied:
            (tmp_path / "study").rename(tmp_path / "other")
    change(tmp_path / "study", tmp_path / "other")
    before = tree(tmp_path)
    with pytest.raises(InputError, match=f"study.json {said}.*; give the store that belongs") as error, study():
        pass
    assert "\n" not in str(error.value)
    assert tree(tmp_path) == before


@pytest.mark.usefixtures("in_this_process")
def test_a_result_that_another_attempt_would_replace_is_noticed(study: Make, tmp_path: Path) -> None:
    """The other copy of the study has retried a trial, which has a result in this folder."""
    with study() as opened:
        opened.run(2, 1)
    journal, results = tmp_path / "study" / "journal.log", tmp_path / "study" / "study.json"
    before = results.read_text()
    lines = journal.read_bytes().splitlines(keepends=True)
    drawn = [index for index, line in enumerate(lines) if json.loads(line)["op_code"] == 5]  # SET_TRIAL_PARAM
    journal.write_bytes(b"".join(lines[: drawn[-1] + 1]))
    results.unlink()
    with study() as opened:
        assert [trial.number for trial in opened.run(2, 1).trials] == [0, 2]
    changed = json.loads(before)
    changed["trials"][1]["loss"] += 1.0
    results.write_text(json.dumps(sealed(changed)))
    with refused("has the loss", "for trial 1, but"), study():
        pass
    results.write_text(before)  # the same loss as that of the retry
    with study():
        pass


@pytest.mark.usefixtures("in_this_process")
def test_two_studies_do_not_share_a_folder(study: Make, tmp_path: Path) -> None:
    """Each has a store of its own, and none of them has a result yet."""
    results, (one, two) = tmp_path / "study" / "study.json", (f"sqlite:///{tmp_path / n}.db" for n in ("one", "two"))
    with study(store=two):
        pass
    (tmp_path / "study").rename(tmp_path / "other")
    with study(store=one) as opened:
        with pytest.raises(InputError, match="belongs to the study"), study(store=two):
            pass
        results.write_text(results.read_text().replace(json.loads(results.read_text())["id"], "another"))
        before = tree(tmp_path / "study")
        with refused("belongs to the study another"):
            opened.run(1, 1)
    assert tree(tmp_path / "study") == before


@pytest.mark.usefixtures("in_this_process")
def test_checkpoints_of_a_study_that_has_replaced_the_folder_are_kept(study: Make, tmp_path: Path) -> None:
    folder = tmp_path / "study"
    with study(store=f"sqlite:///{tmp_path / 'one.db'}") as opened:
        opened.run(1, 1)
        folder.rename(tmp_path / "moved")
        with study(store=f"sqlite:///{tmp_path / 'two.db'}"):
            (folder / "checkpoints" / "000000-000000" / f"{3:024x}").mkdir(parents=True)
        before = tree(folder)
        with refused("study.json belongs to the study"):
            opened.run(1, 1)
    assert tree(folder) == before


@pytest.mark.usefixtures("in_this_process")
def test_a_study_without_its_centre_toml_goes_on(study: Make, tmp_path: Path) -> None:
    centre = tmp_path / "study" / "centre.toml"
    with study() as first:
        first.run(1, 1)
    before = centre.read_bytes()
    centre.unlink()
    with study() as again:
        assert len(again.run(2, 1).trials) == 2
    assert centre.read_bytes() == before


def test_a_damaged_centre_toml_says_to_remove_it(study: Make, tmp_path: Path) -> None:
    with study():
        pass
    (tmp_path / "study" / "centre.toml").write_text("")
    with pytest.raises(
        InputError, match="name: missing.*; if this file is damaged, remove it and run the same command again"
    ):
        study()


def test_a_study_of_another_kind_is_not_called_damaged(study: Make, tmp_path: Path) -> None:
    with study():
        pass
    (tmp_path / "late.toml").write_text(
        "command = ': {lr} {seed}'\nloss.pattern = 'loss {loss}'\n[space]\nlr = {start = 1, low = 1, high = 2}"
    )
    around = command_space(tmp_path / "late.toml")
    with pytest.raises(
        InputError, match="study belongs to a study that tunes a recipe; use another --study or --out$"
    ):
        CommandStudy(tmp_path / "study", around.file, around, "random")


def test_a_store_that_is_locked_at_the_start_is_told_and_can_be_left(
    study: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_study, "NOTE_AFTER", 0.1)
    url, told, stopped = f"sqlite:///{tmp_path / 'study.db'}", list[str](), list[bool]()
    with study(store=url):
        pass
    other = sqlite3.connect(tmp_path / "study.db", isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")

    def note(text: str) -> None:
        told.append(text)
        stopped.append(True)

    with (
        pytest.raises(StoreGone, match=r"^stopped after the store had been unreachable for \d+ s; run the same"),
        study(store=url).reporting_to(note, lambda: bool(stopped)),
    ):
        pass
    other.close()
    (line,) = told
    assert re.fullmatch(r"the store has been unreachable for \d+ s \(database is locked\); waiting", line)


def test_a_database_in_its_own_folder_is_the_study(study: Make, tmp_path: Path) -> None:
    """Another command has just made it, or was killed before it wrote centre.toml."""
    (tmp_path / "study").mkdir()
    for name in ("x.db", "x.db-journal"):
        (tmp_path / "study" / name).touch()
    with study(store=f"sqlite:///{tmp_path / 'study' / 'x.db'}"):
        pass
    (tmp_path / "study" / "centre.toml").unlink()
    (tmp_path / "study" / "study.json").unlink()
    with pytest.raises(InputError, match="is not empty and contains no study"):
        study()


@pytest.mark.parametrize("name", [".git", "wheat.txt"])
def test_a_folder_with_other_files_is_not_a_study(study: Make, tmp_path: Path, name: str) -> None:
    """A server has no files in the folder, so a name like that of its database means nothing."""
    (tmp_path / "study").mkdir()
    (tmp_path / "study" / name).touch()
    with refused("is not empty and contains no study"):
        study(store="postgresql://me@host/wheat")


def test_another_study_in_the_journal_locks_nobody_out(study: Make, tmp_path: Path) -> None:
    with study():
        pass
    optuna.create_study(study_name="notebook", storage=open_store(tmp_path / "study" / "journal.log"))
    with study():
        pass


def test_a_journal_of_another_user_is_one_line(study: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with study():
        pass
    monkeypatch.setattr("os.access", lambda path, mode: Path(path).suffix != ".flock")
    with (
        pytest.raises(
            InputError, match=r"journal.log.flock: you have no permission to read and write it; its owner can type"
        ),
        study(),
    ):
        pass


@pytest.mark.usefixtures("in_this_process")
def test_a_text_that_changes_while_a_study_runs_ends_it(study: Make) -> None:
    with study() as opened:
        opened._fingerprint = "of the text when the command began"
        with pytest.raises(InputError, match="the text, or the weights of .start., have changed since this command"):
            opened.run(1, 1)


@pytest.mark.usefixtures("in_this_process")
def test_trials_begin_with_the_same_weights(short: Recipe, tokens: TokenSet, tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    train(short, tokens, tmp_path / "run")
    export_run(load_run(tmp_path / "run"), weights)
    recipe = short.replace({"start.weights": str(weights)})

    def study() -> Study:
        return Study(tmp_path / "study", recipe, space(recipe, LR), "random", tokens)

    with study() as opened:
        opened.run(1, 1)
        [file] = weights.glob("*.safetensors")
        content = file.read_bytes()
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(InputError, match="the weights of .start., have changed since this command began"):
            opened.run(2, 1)
    with pytest.raises(InputError, match="has other settings: weights was"):
        study().__enter__()
    file.write_bytes(content)
    with study() as opened:
        assert len(opened.run(2, 1).trials) == 2


def with_other_seconds(document: dict[str, Any]) -> str:
    """Changed, but no digest is made again."""
    document["trials"][0]["seconds"] += 1.0
    return json.dumps(document)


def before_a_failed_trial_was_given_back(document: dict[str, Any]) -> str:
    """The trial has a result since, but the command was killed before it wrote study.json."""
    document["trials"][0] |= {"state": "failed", "loss": None}
    return json.dumps(sealed(document))


@pytest.mark.long
@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize(
    "damaged",
    [
        lambda document: "[" * 100_000,
        with_other_seconds,
        before_a_failed_trial_was_given_back,
    ],
)
def test_a_study_with_damaged_results_goes_on(
    study: Make, tmp_path: Path, damaged: Callable[[dict[str, Any]], str]
) -> None:
    with study() as first:
        first.run(2, 1)
    results = tmp_path / "study" / "study.json"
    results.write_text(damaged(json.loads(results.read_text())))
    with study() as again:
        assert len(again.run(3, 1).trials) == 3
    assert is_sealed(json.loads(results.read_text()))


def test_a_folder_in_which_nothing_can_be_written_is_refused_before_the_store_is_made(
    short: Recipe, tokens: TokenSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: not (Path(path) == tmp_path and mode & os.W_OK))  # as root
    with pytest.raises(InputError, match=f"{tmp_path}: cannot be written; use another folder"):
        Study(tmp_path / "out", short, space(short, LR), "random", tokens, f"sqlite:///{tmp_path}/new.db")
    assert tree(tmp_path) == {}


@pytest.mark.usefixtures("in_this_process")
def test_trials_go_on_while_results_cannot_be_written(
    study: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, text: str) -> None:
        raise InputError(f"{path}: cannot be written: No space left on device")

    class NotedScreen(Screen):
        def note(self, text: str) -> None:
            self.notes = text

    screen = NotedScreen()
    with study() as opened, monkeypatch.context() as patched:
        patched.setattr("leaven.tuning.service.study_folder.write_text", full)
        with pytest.raises(StoreGone, match="No space left on device; the trials are in the store"):
            opened.run(2, 1, screen=screen)
    assert "No space left" in screen.notes
    assert saved(tmp_path / "study") == []
    with study() as opened:
        assert len(opened.run(2, 1).trials) == 2
    assert len(saved(tmp_path / "study")) == 2


@pytest.mark.usefixtures("in_this_process")
def test_choices_and_dropout_are_searched_and_written(study: Make, tmp_path: Path) -> None:
    searched = ("schedule.decay", "hyperparameters.optimizer", "model.dropout", "hyperparameters.grad_clip")
    with study("trust-region", which=",".join(searched)) as opened:
        state = opened.run(10, 1)
    assert len({trial.values["schedule.decay"] for trial in state.trials}) > 1
    assert len({trial.values["hyperparameters.optimizer"] for trial in state.trials}) == 2
    assert max(float(trial.values["model.dropout"]) for trial in state.trials) > 0
    assert read_study(tmp_path / "study").dimensions == state.dimensions
    best = read_recipe(tmp_path / "study" / "best.toml")
    at_best = opened.space.values(state.octaves)
    assert (best.schedule.decay, best.hyperparameters.optimizer) == tuple(at_best[path] for path in searched[:2])
    assert best.hyperparameters.grad_clip.limit == pytest.approx(at_best[searched[3]])
    assert all(best.why[path].startswith("study tiny, trial") for path in searched)
    # The slice of a choice has all its levels.
    decay = next(each for each in state.coordinates if each.path == "schedule.decay")
    assert [point.octaves for point in decay.slice] == [0, 1, 2]


def test_more_tokens_are_searched_only_where_text_is_repeated(
    short: Recipe, tokens: TokenSet, tmp_path: Path
) -> None:
    long = short.replace({"batch.tokens": 32, "data.tokens": 8_192, "schedule.warmup_tokens": 64})
    around = space(long, "data.tokens")
    with pytest.raises(InputError, match="--space data.tokens: no text is repeated, .* --durations"):
        Study(tmp_path / "study", long, around, "random", tokens)
    assert not (tmp_path / "study").exists()
    often = long.replace({"data.tokens": 40 * sum(len(source.train) for source in tokens.sources)})
    Study(tmp_path / "study", often, space(often, "data.tokens"), "random", tokens)


def test_trials_with_averaged_weights_are_compared_by_their_weights(study: Make, short: Recipe) -> None:
    notes, averaged = Notes(), short.replace({"average": {"last": 0.5}})
    with study(recipe=averaged) as opened:
        opened.run(1, 1, screen=notes, stop=lambda: True)
    assert any(line.startswith("caution: trials are compared by the loss of their weights") for line in notes.lines)


def test_checkpoints_of_another_study_in_place_of_a_studys_own_are_not_removed(tmp_path: Path) -> None:
    for name in ("mine", "other"):
        (tmp_path / name / "checkpoints").mkdir(parents=True)
        RunFolder(tmp_path / name).claim_checkpoints()
    StudyFolder(tmp_path / "mine", "").remove_checkpoints([])
    (tmp_path / "mine/checkpoints").rename(tmp_path / "away")
    shutil.copytree(tmp_path / "other/checkpoints", tmp_path / "mine/checkpoints")
    with pytest.raises(InputError, match=f"has the checkpoints of {tmp_path}/other; bring back those of this study"):
        StudyFolder(tmp_path / "mine", "").remove_checkpoints([])
