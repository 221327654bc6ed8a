"""Studies over a command: another trainer reports its losses, and its failures mean something."""

import errno
import json
import math
import os
import re
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import time
import tracemalloc
import zlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from io import BytesIO
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.errors import refused
from tests.tuning.bigram import train
from typer.testing import CliRunner

from leaven import storage
from leaven.cli import app
from leaven.cli.common import stop_on_signal
from leaven.errors import InputError
from leaven.recipe.files import read_recipe
from leaven.training.outcome import Baseline
from leaven.training.run_logs import log_records, wandb_rows
from leaven.tuning import search
from leaven.tuning.command import Command, LossSource, SearchedValue, command_space, fill, text_of
from leaven.tuning.earlier_study import unlike_earlier
from leaven.tuning.service import command_study, processes
from leaven.tuning.service.command_study import CommandStudy, CommandTrainer
from leaven.tuning.service.losses import read_losses, why_none
from leaven.tuning.service.search_loop import Proposal, TrialReleased, WorkerDied
from leaven.tuning.service.stores import StoreGone
from leaven.tuning.study_document import StudyDocument
from leaven.views.folders import read_study
from leaven.views.study_page import study_page

PYTHON = f"{sys.executable} -S -E"
BIGRAM = f"{PYTHON} {Path(__file__).with_name('bigram.py')}"
SPACE = """
[space]
lr = {start = 0.1, low = 0.001, high = 100}
weight_decay = {start = 0.01, low = 1e-4, high = 1}
"""
PATTERN = "loss.pattern = 'iter {step}: val loss {loss}'\n"
# Seconds of a sleep that only this test process starts, so that tests of other workers are not taken for its own.
SLEEP = f"sleep {6 + os.getpid() / 1e8:.8f}"
ONE = "[space]\nlr = {start = 0.1, low = 0.01, high = 1}\n"

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Return a function that writes a command file in the current folder. Commands are looked at more often."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command_study, "COMMAND_POLL", 0.05)

    def file(command: str, more: str = PATTERN, space: str = SPACE, name: str = "tiny.toml") -> Path:
        Path(name).write_text(f"command = '''\n{command}'''\n{more}{space}")
        return Path(name)

    return file


def tune(*words: object, code: int = 0) -> str:
    """Return what ``leaven tune`` printed. It must have the exit code ``code``; an InputError has 2."""
    result = CliRunner().invoke(app, ["tune", *map(str, words)])
    if not isinstance(result.exception, InputError | SystemExit | None):
        raise result.exception
    refused = isinstance(result.exception, InputError)
    printed = str(result.exception) if refused else result.output
    assert (2 if refused else result.exit_code) == code, printed
    assert not (refused and "\n" in printed)
    return printed


def document(folder: str = "study") -> StudyDocument:
    return StudyDocument.model_validate_json(Path(folder, "study.json").read_bytes())


def all_wait(number: int) -> str:
    """Return a shell command that waits until ``number`` trials have each written a line to the file ``ran``."""
    return f"until [ $(wc -l < ran) -ge {number} ]; do sleep 0.02; done"


def trainer(file: Path, **more: object) -> Any:
    """Return a CommandTrainer for a command file. It collects the notes to the user in ``notes``."""
    space, notes = command_space(file), list[str]()
    given = {"devices": [None], "works": False, "stop": lambda: False, "note": notes.append} | more
    made = CommandTrainer(space.file, space, Path("trials"), **given)  # type: ignore[arg-type]
    made.notes = notes
    return made


@pytest.mark.long
def test_a_study_over_a_command_is_the_search_over_the_same_function(write: Write) -> None:
    file = write(f"{BIGRAM} --lr={{lr}} --weight_decay={{weight_decay}} --seed={{seed}}")
    printed = tune(file, "--study", "study", "--trials", 16)
    assert "caution" not in printed
    space, study = command_space(file), document()

    def objective(point: Proposal) -> float:
        *_, (_, loss) = train(**space.values(point), seed=point.seed)  # type: ignore[arg-type]
        return loss

    found = search(objective, space.limits, trials=16, seed=space.seed)
    assert [trial.octaves for trial in study.trials] == [trial.params for trial in found.trials]
    assert [trial.loss for trial in study.trials] == [trial.loss for trial in found.trials]
    assert study.octaves == found.params
    assert study.best is not None
    assert study.best.loss == found.loss < study.trials[0].loss - 0.5  # type: ignore[operator]
    best = command_space(Path("study/best.toml"))  # a command file that starts at the best values
    start = {each.path: each.centre for each in best.dimensions}
    assert start == space.values(study.octaves)
    assert "trial" in best.file.why["lr"]
    command = f"{BIGRAM} --lr={text_of(start['lr'])} --weight_decay={text_of(start['weight_decay'])} --seed=0"
    assert study.best_command == command
    assert command in printed
    assert command in study_page(read_study(Path("study"))).replace("&#39;", "'")
    assert not Path("study/best").exists()  # the command reads no file
    with pytest.raises(InputError, match="study/best.toml: this is a command file, not a recipe"):
        read_recipe("study/best.toml")
    first = subprocess.run(study.best_command, shell=True, capture_output=True, text=True, check=True)
    assert float(first.stdout.split()[-1]) == next(
        trial.loss for trial in study.trials if trial.octaves == study.octaves
    )


@pytest.mark.parametrize(
    ("command", "more"),
    [
        (f"{BIGRAM} --weight_decay {{weight_decay}} --seed {{seed}}", PATTERN + 'environment.LR = "{lr}"\n'),
        (f"{BIGRAM} --config {{config}}", PATTERN + 'config = "base.json"\n'),
        (
            f"{BIGRAM} --lr {{lr}} --weight_decay {{weight_decay}} --seed {{seed}} --out_dir {{out}}",
            'loss = {jsonl = "{out}/log.jsonl", key = "val", step = "iter"}\n',
        ),
        (
            f"{BIGRAM} --lr {{lr}} --weight_decay {{weight_decay}} --seed {{seed}} > {{out}}/printed",
            "loss = {pattern = 'iter {step}: val loss {loss}', file = \"{out}/printed\"}\n",
        ),
    ],
    ids=["environment", "config", "jsonl", "file"],
)
def test_every_way_of_values_and_losses_gives_the_same_losses(write: Write, command: str, more: str) -> None:
    Path("base.json").write_text('{"lr": {lr}, "weight_decay": {weight_decay}, "seed": {seed}, "text": "{as it is}"}')
    file = write(command, more)
    with trainer(file) as run:
        outcome = run(Proposal({"lr": 1.0, "weight_decay": 0.0}, 3, seed=5))
    losses = tuple(train(lr=0.2, weight_decay=0.01, seed=5))
    # A source without steps in this order would be numbered from 1.
    assert outcome.curve == losses
    assert outcome.loss == losses[-1][1]
    assert not outcome.stopped


def test_a_command_with_the_values_of_a_recipe(write: Write, tiny_file: Path) -> None:
    command = f"{BIGRAM} --lr {{lr}} --weight_decay {{weight_decay}} --seed {{seed}}"
    words = ("--command", command, "--loss", "iter {step}: val loss {loss}", "--trials", 4, "--study", "study")
    tune(tiny_file, *words, "--space", "hyperparameters.lr")
    study, start = document(), read_recipe(tiny_file)
    decay = start.hyperparameters.weight_decay
    for trial in study.trials:
        *_, (_, loss) = train(trial.values["hyperparameters.lr"], decay, start.data.seed + trial.seed)  # type: ignore[arg-type]
        assert trial.loss == loss
    assert read_recipe(Path("study/best.toml")).hyperparameters.weight_decay == decay
    assert "--command" in study_page(read_study(Path("study")))
    assert tune(tiny_file, *words, code=2).startswith("the command has no {init_std}")
    # {recipe} has all values; modules and the sizes of the model are placeholders, too.
    command = (
        "echo {embedding.lr} {model.d_model} {batch.tokens} >> seen; sed -n 's/^lr = /iter 1: val loss /p' {recipe}"
    )
    words = ("--command", command, *words[2:6], "--study", "other", "--space", "hyperparameters.lr")
    tune(tiny_file, *words)
    best = subprocess.run(document("other").best_command, shell=True, capture_output=True, text=True, check=True)
    assert float(best.stdout.split()[-1]) == document("other").best.loss  # type: ignore[union-attr]
    for trial in document("other").trials:
        assert trial.loss == trial.values["hyperparameters.lr"]
    assert set(Path("seen").read_text().splitlines()) == {f"1.0 {start.model.d_model} {start.batch.tokens}"}


ROW = """echo '{"loss": 3, "i": 1, "n": null}' > {out}/a; : {lr} {seed}"""
FAILS = "sh -c 'echo ready; echo broken: no GPU; exit 3' {lr} {seed}"


@pytest.mark.parametrize(
    ("command", "more", "error"),
    [
        (FAILS, "", "the first run of the command ended with exit code 3; .*ready | broken: no GPU"),
        ("echo all is well {lr} {seed}", "", "reported no loss; .*all is well"),
        ("sleep 60 {lr} {seed}", "timeout_seconds = 0.1\n", "took longer than timeout_seconds = 0.1"),
        ("kill -9 $$ {lr} {seed}", "", "was killed by signal 9"),
        (ROW, "loss = {jsonl = '{out}/a', key = 'los'}\n", "no loss: loss.key = 'los' is none of i, loss, n"),
        (ROW, "loss = {jsonl = '{out}/a', key = 'n'}\n", "/out/a: the last n is null, which may mean NaN; change"),
        (
            ROW,
            "loss = {jsonl = '{out}/a', key = 'loss', step = 'it'}\n",
            "/out/a: in a line with loss, the step (it) is None, not a valid number; set loss.step to another key",
        ),
        (
            """echo '{"loss": 9, "loss": 3}' > {out}/a; : {lr} {seed}""",
            "loss = {jsonl = '{out}/a', key = 'loss'}\n",
            '/out/a: line 1: one JSON object has the key "loss" 2 times; keep one',
        ),
        (ROW, "loss = {jsonl = '{out}', key = 'l'}\n", "/out: Is a directory; correct the path of"),
    ],
    ids=["crash", "no loss", "timeout", "signal", "key", "null", "step", "twice", "folder"],
)
def test_a_command_that_fails_at_the_start_ends_the_search(write: Write, command: str, more: str, error: str) -> None:
    loss = "" if "loss" in more else PATTERN
    file = write(command.replace("{lr}", "; : {lr}") if "sleep" in command else command, loss + more, ONE)
    began = time.monotonic()
    printed = tune(file, "--study", "study", "--trials", 12, code=2)
    for part in error.split(".*"):
        assert part in printed
    assert time.monotonic() - began < 30
    assert [trial.state for trial in document_of_store(file)] == ["waiting"]  # the same command tries again


def document_of_store(file: Path) -> tuple[object, ...]:
    with CommandStudy(Path("study"), command_space(file).file, command_space(file), "trust-region") as study:
        return study.state().trials


def test_a_command_that_fails_elsewhere_is_run_twice_and_then_left_out(write: Write) -> None:
    file = write("echo iter 1: val loss 3; test {lr} = 0.1 || { echo too large; exit 7; }; : {seed}", PATTERN, ONE)
    printed = tune(file, "--study", "study", "--trials", 2, "--noise", 0.01, "--method", "random")
    assert [trial.state for trial in document().trials] == ["complete", "failed"]
    assert "trial 1 ended with exit code 7; the last lines of its output" in printed
    assert "iter 1: val loss 3 | too large" in printed
    assert "1 of 2 trials: no attempt gave a result" in " ".join(printed.split())
    assert len(list(Path("study/trials").iterdir())) == 3  # each attempt has a folder


def test_the_output_of_a_trial_is_not_written_through_a_link(write: Write) -> None:
    replaced = "ln -sf $PWD/thesis {out}/../output.log; exit 1"
    command = f"echo iter 1: val loss 3; if test -e thesis; then {replaced}; fi; : {{lr}} {{seed}}"
    file = write(command, f"resume = true\nprune = false\n{PATTERN}", ONE)
    tune(file, "--study", "study", "--trials", 1, "--noise", 0.01)
    Path("thesis").write_text("line one of my thesis")
    printed = tune(file, "--study", "study", "--trials", 2, "--noise", 0.01, code=2)
    assert "output.log was replaced while the trial's command ran" in printed
    assert "output.log: this is a link to" in tune(file, "--study", "study", "--trials", 2, "--noise", 0.01, code=2)
    assert Path("thesis").read_text() == "line one of my thesis"


@pytest.mark.parametrize("more", ["", "resume = true\nprune = false\n"])
def test_a_trial_does_not_get_the_files_of_one_that_the_store_has_lost(write: Write, more: str) -> None:
    command = "test -e {out}/log || echo iter 1: val loss 3 > {out}/log; cat {out}/log; : {lr} {seed}"
    file = write(command, more + PATTERN, ONE)
    lost = Path("study/trials/000000")
    (lost / "out").mkdir(parents=True)
    (lost / "out" / "log").write_text("iter 1: val loss 2")
    tune(file, "--study", "study", "--trials", 1, "--noise", 0.01, code=2)  # of no study
    shutil.move("study", "lost")
    tune(file, "--study", "study", "--trials", 1, "--noise", 0.01)
    shutil.copytree("lost/trials/000000", "study/trials/000001")
    Path("study/trials/000001.1").symlink_to("away")  # to a disk that is not mounted
    assert "000001 was left by a trial" in tune(file, "--study", "study", "--trials", 2, "--noise", 0.01)
    assert [trial.loss for trial in document().trials] == [3, 3]
    assert Path("study/trials/000001.2/out/log").read_text() == "iter 1: val loss 2"


def test_a_trial_that_would_resume_does_not_begin_again_without_a_word(write: Write) -> None:
    file = write("echo iter 1: val loss {lr}; : {seed}", f"resume = true\nprune = false\n{PATTERN}", ONE)
    # An empty folder is that of a disk which is not mounted, unless other machines have folders of their own.
    for made, one_folder in ((True, True), (False, True), (True, False)):
        lost = made and one_folder
        if made:
            Path("trials").mkdir()
            Path("trials", "NOT_MOUNTED").touch()
        with (
            trainer(file, one_folder=one_folder) as run,
            refused("000004", "mount its disk, or type mkdir") if lost else nullcontext(),
        ):
            run(Proposal({"lr": 0.0}, 6, origin=4))
        shutil.rmtree("trials")
    assert run.notes == [
        "trials/000004, the folder of an earlier attempt at this trial, is gone; the trial begins again"
    ]


def test_only_the_end_of_a_large_output_is_read(write: Write) -> None:
    output = write("echo {lr} {seed}").with_name("output.log")
    output.write_bytes(b"begin")
    os.truncate(output, 2**26)
    with output.open("ab") as file:
        file.write(b"\nout of memory\n")
    run = trainer(Path("tiny.toml"), works=True)
    tracemalloc.start()
    run._failure(Proposal({"lr": 0.0}, 1), output, "failed")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert run.notes[0].endswith("| out of memory")
    assert peak < 2**22
    output.write_bytes(b"10%\rloss is nan\r\nend")  # a progress bar
    assert command_study._end_of(output, 100).splitlines() == ["10%", "loss is nan", "end"]
    assert "\r" not in command_study._end_of(output, 100)


def test_a_full_disk_fails_no_trial(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    answers, begun = chain([True, False, True, True], repeat(False)), list[int]()

    def is_full(folder: Path) -> bool:
        begun.append(Path("study/journal.log").read_text().count('"op_code":4'))
        return next(answers)

    monkeypatch.setattr(command_study, "is_full", is_full)
    file = write("test -e tried || { touch tried; exit 1; }; echo iter 1: val loss 3; : {lr} {seed}", PATTERN, ONE)
    printed = tune(file, "--study", "study", "--trials", 1, "--noise", 0.01)
    assert [trial.state for trial in document().trials] == ["complete"]
    assert begun == [0, 0, 1, 1, 1, 2]  # no attempt waits, because its time would count as --hours
    assert "trial 0 ended with exit code 1; the disk of" in printed
    assert printed.count("the next trial waits, because the disk of study/trials is full; make room") == 2


@pytest.mark.parametrize("loss", ["", 'loss = {jsonl = "{out}/log", key = "loss"}\n'])
def test_a_disk_that_is_away_when_a_command_ends_is_waited_for(
    write: Write, monkeypatch: pytest.MonkeyPatch, loss: str
) -> None:
    log = "echo '{\"loss\": 2}' > {out}/log; echo iter 1: val loss 2"
    file = write(f"{log}; mv trials away; : {{lr}} {{seed}}", loss or PATTERN, ONE)
    run = trainer(file)

    def back(note: str) -> None:
        run.notes.append(note)
        Path("away").rename("trials")

    monkeypatch.setattr(run, "note", back)
    with run:
        assert run(Proposal({"lr": 0.0}, 0)).loss == 2
        assert "trial 0 has ended, but" in run.notes[0]
        monkeypatch.setattr(command_study, "AWAY_SECONDS", 0.0)
        monkeypatch.setattr(run, "note", lambda note: None)
        with pytest.raises(StoreGone, match=r"cannot be read \(No such file.*\); mount its disk, then run"):
            run(Proposal({"lr": 0.0}, 1))


@pytest.mark.parametrize("loss", ["", 'loss.jsonl = "{out}/log"\nloss.key = "loss"\n'])
def test_losses_of_another_study_in_the_place_of_the_folder_are_not_used(write: Write, loss: str) -> None:
    """Also those of a copy, which may not have all of them."""
    log = "echo '{\"loss\": 2}' > {out}/log; echo iter 1: val loss 2"
    file = write(f"{log}; mv trials away; cp -r away trials; : {{lr}} {{seed}}", loss or PATTERN, ONE)
    with (
        trainer(file, works=True) as run,
        pytest.raises(InputError, match="output.log was replaced while the trial's command"),
    ):
        run(Proposal({"lr": 0.0}, 0))


@pytest.mark.long
def test_a_command_whose_results_folder_is_another_study_now_ends(write: Write) -> None:
    """Its own store is in a database, where its trial runs again later."""
    begin, store = (
        "leaven tune other.toml --study sqlite:///other.db --out study --trials 1 --noise 0",
        Path("one.db"),
    )
    write("echo iter 1: val loss 9; : {lr} {seed}", PATTERN, ONE, "other.toml")
    replace = f"test -e away || {{ mv study away; {sys.executable} -m {begin}; }}"
    file = write(f"echo iter 1: val loss 3; {replace}; : {{lr}} {{seed}}", PATTERN, ONE)
    options = ("--study", f"sqlite:///{store.absolute()}", "--trials", 2, "--noise", 0.01)
    assert "output.log was replaced while the trial's command ran" in tune(file, *options, "--out", "study", code=2)
    assert [trial.loss for trial in document().trials] == [9.0]
    tune(file, *options, "--out", "away")
    assert [trial.loss for trial in document("away").trials] == [3.0, 3.0]


def test_a_log_on_a_disk_that_fails_over_is_waited_for(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    answers, real = chain([errno.ESTALE, errno.EIO], repeat(0)), command_study.read_losses

    def read(*words: object, complete: bool, **more: bool) -> object:
        def stale(path: Path) -> bytes:
            raise OSError(number, os.strerror(number), str(path))

        if complete and (number := next(answers)):
            with monkeypatch.context() as patched:
                patched.setattr(storage, "read", stale)
                return real(*words, complete=complete, **more)  # type: ignore[arg-type]
        return real(*words, complete=complete, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(command_study, "read_losses", read)
    with trainer(write("echo iter 1: val loss 2; : {lr} {seed}", PATTERN, ONE)) as run:
        assert run(Proposal({"lr": 0.0}, 0)).loss == 2


@pytest.mark.parametrize("loss", ["nan", "-inf", "1e60", "nan; echo iter 2: val loss 3", "inf; exit 1"])
def test_a_loss_that_is_not_finite_is_a_divergence(write: Write, loss: str) -> None:
    file = write(f"echo iter 1: val loss 3; echo iter 2: val loss {loss}; : {{lr}} {{seed}}", PATTERN, ONE)
    tune(file, "--study", "study", "--trials", 1, code=1)
    assert [trial.state for trial in document().trials] == ["diverged"]


def test_a_divergence_ends_the_command_and_may_be_a_text(write: Write) -> None:
    file = write("echo iter 1: val loss nan; sleep 60 & sleep 60; : {lr} {seed}", PATTERN, ONE)
    with trainer(file) as run:
        assert run(Proposal({"lr": 0.0}, 0)).diverged
    text = write("echo Loss is NaN, stopping; exit 1; : {lr} {seed}", PATTERN + 'diverged = "Loss is N[aA]N"\n', ONE)
    with trainer(text) as run:
        assert run(Proposal({"lr": 0.0}, 1)).diverged
    assert_no_process_left()


def assert_no_process_left() -> None:
    mine = psutil.Process().children(recursive=True)
    assert not [process for process in mine if process.is_running() and "sleep" in " ".join(process.cmdline())]
    assert not [each for each in psutil.process_iter(["cmdline"]) if SLEEP in " ".join(each.info["cmdline"] or ())]


def test_a_run_that_is_far_behind_the_best_is_pruned(write: Write) -> None:
    loop = "i=0; while [ $i -lt 40 ]; do i=$((i+1)); echo iter $i: val loss 9; done; sleep 60; : {lr} {seed}"
    best = Baseline(tuple((i, 5.0 - i / 50) for i in range(1, 101)), 3.0, 0.01)
    with trainer(write(loop, PATTERN, ONE)) as run:
        outcome = run(Proposal({"lr": 1.0}, 4, baseline=best))
    assert outcome.stopped
    assert outcome.loss > 4
    assert outcome.curve[-1] == (40, 9.0)
    kept = write(loop.replace("sleep 60", "sleep 0.3"), PATTERN + "prune = false\n", ONE)
    with trainer(kept) as run:
        assert not run(Proposal({"lr": 1.0}, 5, baseline=best)).stopped


def started(study: str, *words: object) -> "subprocess.Popen[str]":
    """Start ``leaven tune`` in a process of its own, and wait until its first command runs."""
    line = [sys.executable, "-m", "leaven", "tune", "tiny.toml", "--study", study, *map(str, words)]
    process = subprocess.Popen(line, stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + 60
    while not list(Path(study).glob("trials/*/out/runs")) and time.monotonic() < until:
        assert process.poll() is None, process.stderr and process.stderr.read()
        time.sleep(0.05)
    return process


# A launcher whose worker is in a session of its own, as those of torchrun are.
LAUNCHER = f"touch {{out}}/runs; setsid {SLEEP} & trap 'kill $!; exit 1' TERM; wait $!; sleep 60; : {{lr}} {{seed}}"


@pytest.mark.long
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_no_process_is_left_and_the_study_resumes(write: Write, how: signal.Signals) -> None:
    write("test -e go || { " + LAUNCHER + "; }; echo iter 1: val loss {lr}", PATTERN, ONE)
    process = started("study", "--trials", 3, "--workers", 2)
    process.send_signal(how)
    process.communicate(timeout=60)
    assert process.returncode == (75 if how is signal.SIGINT else -signal.SIGKILL)
    until = time.monotonic() + 12
    while how is signal.SIGKILL and time.monotonic() < until:  # the guard ends the commands
        try:
            assert_no_process_left()
            break
        except AssertionError:
            time.sleep(0.1)
    assert_no_process_left()
    Path("go").touch()
    printed = tune("tiny.toml", "--study", "study", "--trials", 3, "--workers", 2)
    assert "caution: 2 trials at once are more than 1/12 of all 3" in printed
    assert [trial.state for trial in document().trials] == ["complete"] * 3


# A trainer that takes half a second to save and end.
SAVES = f"""
echo printed; exec > {{out}}/elsewhere 2>&1; echo begun >> {{out}}/log
trap '(trap "" TERM; sleep 0.5; echo saved >> {{out}}/log); exit 1' TERM
test -e go || {{ touch {{out}}/runs; {SLEEP} & wait; }}
echo iter 1: val loss {{lr}} >> {{out}}/log; : {{seed}}
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("how", "resume"),
    [
        (signal.SIGINT, True),
        pytest.param(signal.SIGKILL, True, marks=pytest.mark.slow),
        (signal.SIGKILL, False),
    ],
)
def test_a_further_attempt_may_resume(write: Write, how: signal.Signals, resume: bool) -> None:
    loss = "loss = {pattern = 'iter {step}: val loss {loss}', file = \"{out}/log\"}\n"
    write(SAVES, loss + f"resume = {str(resume).lower()}\n", ONE)
    process = started("study", "--trials", 1)
    process.send_signal(how)
    process.wait(timeout=60)  # not until its guard has ended, too
    Path("go").touch()
    tune("tiny.toml", "--study", "study", "--trials", 1)
    last = sorted(Path("study/trials").iterdir())[-1]
    assert last.name == ("000000" if resume else "000001")
    before = ["begun", "saved"] if resume else []
    assert (last / "out" / "log").read_text().splitlines() == [*before, "begun", "iter 1: val loss 0.1"]
    assert (last / "output.log").read_text().split() == ["printed"] * (1 + resume)
    process.communicate(timeout=60)
    assert_no_process_left()


def test_losses_of_a_further_attempt_lie_between_those_of_the_first(write: Write) -> None:
    lines = "test -e {out}/saved && s='2 4 6' || s='1 3 5'; for i in $s; do echo iter $i: val loss $i; done"
    file = write(lines + "; test -e {out}/saved || { touch {out}/saved; exit 1; }; : {lr} {seed}", PATTERN, ONE)
    file.write_text("resume = true\n" + file.read_text())
    with trainer(file, works=True) as run:
        with pytest.raises(WorkerDied):
            run(Proposal({"lr": 0.0}, 4))
        copy, output = Path("copy.log"), Path("trials/000004/output.log")
        copy.hardlink_to(output)  # as by cp -al
        before = copy.read_text()
        outcome = run(Proposal({"lr": 0.0}, 6, origin=4))
    assert outcome.curve == tuple((step, float(step)) for step in range(1, 7))
    assert output.read_text().startswith(copy.read_text())
    assert copy.read_text() == before
    file.write_text(file.read_text().replace("{step}", ".*"))
    with pytest.raises(InputError, match=r"add \{step\} to loss\.pattern .*, or write prune = false"):
        command_space(file)


def test_the_cut_line_of_an_attempt_is_not_glued_to_the_next(write: Write) -> None:
    """Glued together, the two losses would be 2.iter, which is no number."""
    first = "test -e {out}/began || { printf 'iter 1: val loss 2.'; touch {out}/began; exit 1; }"
    file = write(f"{first}; echo iter 2: val loss 1.5; : {{lr}} {{seed}}", f"resume = true\n{PATTERN}", ONE)
    with trainer(file, works=True) as run:
        with pytest.raises(WorkerDied):
            run(Proposal({"lr": 0.0}, 4))
        assert run(Proposal({"lr": 0.0}, 6, origin=4)).curve == ((1, 2.0), (2, 1.5))


@pytest.mark.parametrize(
    ("again", "loss", "told"),
    [("echo done already", 2, True), ("echo iter 2: val loss 2", 2, False), ("echo iter 1: val loss 1", 1, False)],
)
def test_a_further_attempt_that_adds_no_loss_is_named(write: Write, again: str, loss: float, told: bool) -> None:
    first = "test -e {out}/began || { for i in 1 2; do echo iter $i: val loss $i; done; touch {out}/began; exit 1; }"
    file = write(f"{first}; {again}; : {{lr}} {{seed}}", f"resume = true\n{PATTERN}", ONE)
    with trainer(file, works=True) as run:
        with pytest.raises(WorkerDied):
            run(Proposal({"lr": 0.0}, 4))
        assert run(Proposal({"lr": 0.0}, 6, origin=4)).loss == loss
    added = "trial 6 ended with exit code 0, but reported no further loss; the last loss of an earlier attempt counts"
    assert run.notes[1:] == ([f"{added}; see trials/000004/output.log"] if told else [])


@pytest.mark.long
def test_a_job_of_a_cluster(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins for sbatch, which blocks and writes the output of the job to a file, and for scancel. The job
    ``waits`` is in the queue until it is cancelled, whatever becomes of sbatch."""
    stand_ins = {
        "sbatch": """[ "$1 $2" = "--parsable --wait" ] && out=${3#*=} && shift 3
            touch queue/42; sleep 0.5; echo "42;here"; touch said
            while [ $1 = waits -a -e queue/42 ]; do sleep 0.1; done
            [ $1 = waits ] || "$@" > $out; code=$?; rm -f queue/42; exit $code""",
        "scancel": "sleep 0.3; rm queue/$1",
    }
    Path("bin").mkdir()
    Path("queue").mkdir()
    for name, script in stand_ins.items():
        Path("bin", name).write_text(f"#!/bin/sh\n{script}\n")
        Path("bin", name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{Path('bin').absolute()}:{os.environ['PATH']}")
    submit = Path(__file__).parents[2] / "examples" / "another_trainer" / "submit.sh"
    loss = "loss = {pattern = 'val loss {loss}', file = \"{out}/log\"}\n"
    write(f"sh {submit} {{out}}/log {BIGRAM} --lr {{lr}} --weight_decay {{weight_decay}} --seed {{seed}}", loss)
    tune("tiny.toml", "--study", "study", "--trials", 2)
    *_, (_, lowest) = train(0.1, 0.01, 0)
    assert document().trials[0].loss == lowest
    with trainer(write(f"sh {submit} {{out}}/log sh -c 'exit 5' {{lr}} {{seed}}", loss, ONE), works=True) as run:
        with pytest.raises(WorkerDied):
            run(Proposal({"lr": 0.0}, 0))
        assert "ended with exit code 5" in run.notes[0]
    waits = write(f"sh {submit} {{out}}/log waits; : {{lr}} {{seed}}", loss, ONE)
    for until in (Path("queue/42"), Path("said")):  # while the job is being submitted, and afterwards
        Path("said").unlink(missing_ok=True)
        with trainer(waits, stop=until.exists) as run, pytest.raises(TrialReleased):
            run(Proposal({"lr": 0.0}, 1))
        assert not Path("queue/42").exists()


@pytest.mark.long
def test_the_examples_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    examples = Path(__file__).parents[2] / "examples"
    space = command_space(examples / "another_trainer" / "study.toml")
    space.file.check(space)
    values = space.placeholders(dict.fromkeys(space.paths, 0.0), 0) | {"seed": 0}
    line = space.file.filled(values).replace("python", sys.executable, 1) + " --max_iters 30"
    for name in ("prepare.py", "train.py"):
        shutil.copy(examples / "another_trainer" / name, tmp_path)
    subprocess.run([sys.executable, "prepare.py"], check=True, cwd=tmp_path)
    with (tmp_path / "output.log").open("wb") as output:
        subprocess.run(line, shell=True, check=True, stdout=output, cwd=tmp_path)
    steps, losses = zip(*read_losses(space.file.loss, tmp_path / "output.log", complete=True), strict=True)
    assert steps == (10, 20, 30)
    assert losses[-1] < losses[0] < 6
    (tmp_path / "leaven").write_text('#!/bin/sh\necho "$@"')
    (tmp_path / "leaven").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    array = ["bash", str(examples / "slurm_tune.sh"), "study.toml", "shared"]
    started = subprocess.run(array, capture_output=True, text=True, check=True)
    assert started.stdout == "tune study.toml --study shared --trials 64 --workers auto\n"


@pytest.mark.long
@pytest.mark.parametrize(
    ("more", "each", "alone"),
    [
        ("", ["0", "1", "2", "3", "4", "5", "6", "GPU-8"], "4,5,6,7,8"),
        ("devices = 2\n", ["0,1", "2,3", "4,5", "6,GPU-8"], "4,5"),
    ],
)
def test_every_worker_has_devices_of_its_own(
    write: Write, monkeypatch: pytest.MonkeyPatch, more: str, each: list[str], alone: str
) -> None:
    command = f"echo $CUDA_VISIBLE_DEVICES {{worker}} >> ran; {all_wait(len(each))}; echo iter 1: val loss {{lr}}"
    write(f"{command}; : {{seed}}", PATTERN + more, ONE)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,GPU-8")
    tune("tiny.toml", "--study", "study", "--trials", 16, "--workers", "auto", "--method", "random")
    assert set(Path("ran").read_text().splitlines()) == {f"{those} {i}" for i, those in enumerate(each)}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7,8")
    tune("tiny.toml", "--study", "one", "--trials", 1, "--method", "random")
    assert Path("ran").read_text().splitlines()[-1] == f"{alone} 0"
    for none in ("", "-1", "-1,0"):  # CUDA uses none of them, and not those after -1
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", none)
        printed = tune("tiny.toml", "--study", "other", "--workers", "auto", code=2)
        assert "--workers auto: at most 0 can run (GPUs here: 0, GPUs per worker: " in printed


@pytest.mark.parametrize(
    ("here", "devices", "workers", "error"),
    [
        ("0,1,2,3,4,5,6,7", 2, 5, "--workers 5: at most 4 can run (GPUs here: 8, GPUs per worker: 2)"),
        ("0,1,2,3,4,5,6,7", 1, 9, "--workers 9: at most 8 can run (GPUs here: 8, GPUs per worker: 1)"),
        ("0", 2, "auto", "--workers auto: at most 0 can run (GPUs here: 1, GPUs per worker: 2)"),
        ("", 2, 1, "--workers 1: at most 0 can run (GPUs here: 0, GPUs per worker: 2)"),
        ("0", 0, 1, "devices: input should be greater than 0"),
    ],
)  # fmt: skip
def test_more_workers_than_devices(
    write: Write, monkeypatch: pytest.MonkeyPatch, here: str, devices: int, workers: int | str, error: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", here)
    file = write("echo iter 1: val loss 3; : {lr} {seed}", PATTERN + f"devices = {devices}\n", ONE)
    printed = tune(file, "--study", "study", "--workers", workers, code=2)
    assert error in printed
    assert not Path("study").exists()
    # Without devices, a command gets none, so it may have more workers: jobs of a cluster need no GPU here.
    file = write("echo iter 1: val loss 3; : {lr} {seed}", PATTERN, ONE)
    tune(file, "--study", "study", "--trials", 1, "--workers", 9)


def test_a_command_ignores_no_signal_that_a_shell_does_not(write: Write) -> None:
    file = write("grep SigIgn: /proc/self/status; echo iter 1: val loss 3; : {lr} {seed}", PATTERN, ONE)
    with trainer(file) as run:
        run(Proposal({"lr": 0.0}, 0))
    ignored = int(Path("trials/000000/output.log").read_text().split()[1], 16)
    assert not ignored & (1 << signal.SIGPIPE - 1 | 1 << signal.SIGXFSZ - 1)


@pytest.mark.long
def test_an_earlier_study_informs_the_next(write: Write) -> None:
    command = f"{BIGRAM} --lr={{lr}} --weight_decay={{weight_decay}} --seed={{seed}}"
    write(command)
    tune("tiny.toml", "--study", "first", "--trials", 10)
    wide = SPACE.replace("lr = {start = 0.1", "lr = {start = 0.4")
    write(command, space=wide, name="wide.toml")
    tune("wide.toml", "--study", "second", "--trials", 4, "--from-study", "first")
    with CommandStudy(
        Path("third"), command_space(Path("wide.toml")).file, command_space(Path("wide.toml")), "trust-region",
        from_study=Path("first"),
    ) as study:  # fmt: skip
        earlier = study.space.earlier
    assert earlier is not None
    first = [trial.octaves for trial in document("first").trials]
    assert [point[0] for point in earlier.points] == pytest.approx([x["lr"] - 2 for x in first], abs=1e-4)  # type: ignore[index]
    # The columns are in the order of the command that began the study.
    swapped = replace(study.space, dimensions=study.space.dimensions[::-1], earlier=None)
    with CommandStudy(Path("third"), command_space(Path("wide.toml")).file, swapped, "trust-region") as again:
        assert again.space.earlier is not None
        assert again.space.earlier.points[:, ::-1].tolist() == earlier.points.tolist()


RUN = "run {lr} {seed}"
BAD = {
    "{sed} in the command names no known value; did you mean {seed}?": ("run {lr} {sed}", PATTERN, ONE),
    "the command has no {lr}, which is searched": ("run {seed}", PATTERN, ONE),
    "{x} in the command names no known value; searched: lr; to keep it as text, write {{x": ("run {x}", PATTERN, ONE),
    "the command has no {seed}": ("run {lr}", PATTERN, ONE),
    "several sources of a loss: pattern, jsonl; keep one": (
        RUN, "loss = {pattern = '{loss}', jsonl = 'a', key = 'b'}\n", ONE,
    ),
    "no source is given; give one of pattern, jsonl, tensorboard, wandb": (RUN, "loss = {key = 'b'}\n", ONE),
    "jsonl needs the name of the loss": (RUN, "loss.jsonl = 'b'\n", ONE),
    "the pattern has no {loss}": (RUN, "loss.pattern = 'loss ([0-9]+)'\n", ONE),
    "the pattern has {loss} twice": (RUN, "loss.pattern = 'a {loss}|b {loss}'\n", ONE),
    "is not a regular expression": (RUN, "loss.pattern = '({loss}'\n", ONE),
    "key has no effect with pattern": (RUN, "loss = {pattern = '{loss}', key = 'b'}\n", ONE),
    "the command does not read tiny.toml": (RUN, PATTERN + "config = 'tiny.toml'\n", ONE),
    'add config = "FILE"': (RUN + " {config}", PATTERN, ONE),
    "gone: no such file": (RUN + " {config}", PATTERN + "config = 'gone'\n", ONE),
    "start = 2 is not between low = 0.01 and high = 1": (RUN, PATTERN, ONE.replace("0.1,", "2,")),
    "low must be above 0": (RUN, PATTERN, ONE.replace("0.01", "0")),
    "start = 1 is a whole number, but low or high is not; write start = 1.0": (
        RUN, PATTERN, ONE.replace("0.1,", "1,"),
    ),
    "two choices are equal, or look alike in a command": (RUN, PATTERN, "[space]\nlr = {choices = [1, '1']}\n"),
    "[space.lr] choices: the text contains a NUL": (
        RUN, PATTERN, '[space]\nlr = {choices = [1, "a\\u0000"]}\n',
    ),
    "[environment] 'A=B' cannot be the name": (RUN, PATTERN + "environment.'A=B' = 'x'\n", ONE),
    "the losses are read from loss.txt, which all trials share": (
        RUN, "loss = {pattern = '{loss}', file = 'loss.txt'}\n", ONE,
    ),
    "the losses are read from {{out}}/log, which": (RUN, "loss = {jsonl = '{{out}}/log', key = 'a'}\n", ONE),
    "give start, low and high": (RUN, PATTERN, "[space]\nlr = {start = 2}\n"),
    "out cannot be the name of a value": ("run {out} {seed}", PATTERN, ONE.replace("lr", "out")),
    "[name] '../x' cannot be the name of a study; begin with a letter or a digit": (
        RUN, "name = '../x'\n" + PATTERN, ONE,
    ),
    "[space] nothing is searched; add a value": ("run {seed}", PATTERN, "[space]\n"),
}  # fmt: skip


@pytest.mark.parametrize("error", BAD)
def test_bad_input_is_one_line_and_nothing_is_written(write: Write, error: str) -> None:
    command, more, space = BAD[error]
    file = write(command, more, space)
    printed = tune(file, "--study", "study", "--trials", 4, code=2)
    assert error in printed
    assert not Path("study").exists()


def test_values_that_an_earlier_study_lacks_are_named(write: Write) -> None:
    command = f"{BIGRAM} --lr={{lr}} --weight_decay={{weight_decay}} --seed={{seed}}"
    tune(write(command), "--study", "first", "--trials", 4)
    other = write(
        command.replace("{weight_decay}", "{decay}"),
        space=SPACE.replace("weight_decay =", "decay ="),
        name="other.toml",
    )
    assert "--from-study first: it did not search decay, so its trials count as trials at the start value" in tune(
        other, "--study", "second", "--trials", 2, "--from-study", "first"
    )
    (caution,) = unlike_earlier(
        Path("first"), command_space(write(command, PATTERN.replace("val", "train"), name="x.toml"))
    )
    assert caution.startswith("--from-study first: its command or source of losses differs")
    assert unlike_earlier(Path("first"), command_space(write(command))) == []
    none = write(f"{BIGRAM} --lr={{rate}} --seed={{seed}}", space=ONE.replace("lr =", "rate ="), name="none.toml")
    printed = tune(none, "--study", "third", "--trials", 2, "--from-study", "first", code=2)
    assert "this study searched lr and weight_decay, and none of these values is in the command file" in printed
    assert not Path("third").exists()


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--flops", "1e18"], "a command file cannot be combined with --flops"),
        (["--command", "run"], "a command file cannot be combined with --command"),
        (["--from-study", "none"], "--from-study none: no study.json in this folder"),
    ],
)
def test_options_that_a_command_does_not_have(write: Write, words: list[str], error: str) -> None:
    assert error in tune(write("run {lr} {seed}", PATTERN, ONE), "--study", "study", *words, code=2)
    assert not Path("study").exists()


def test_a_changed_command_is_another_study(write: Write) -> None:
    command = "echo iter 1: val loss {lr}; : {seed}"
    tune(write(command, PATTERN, ONE), "--study", "study", "--trials", 1)
    timed = write(command, PATTERN + "timeout_seconds = 60\n", ONE)
    tune(timed, "--study", "study", "--trials", 2)  # a time limit may change
    printed = tune(write(command + " more", PATTERN, ONE), "--study", "study", "--trials", 3, code=2)
    assert "study has another command file: command was" in printed
    printed = tune(write(command.replace("; :", ";\n :"), PATTERN, ONE), "--study", "study", code=2)
    assert "command was ...loss·{lr};·:·{seed}..., is now ...loss·{lr};\\n·:·{seed}... (· is a space);" in printed
    Path("study/centre.toml").unlink()
    tune("tiny.toml", "--study", "study", "--trials", 3, "--set", "seed=4", code=2)


@pytest.mark.parametrize(
    ("value", "moves"),
    [
        (SearchedValue(start=32, low=8, high=256), {0.0: 32, 1.0: 64, 0.3: 39, -2.0: 8, 3.0: 256}),
        (SearchedValue(start=0.1, low=0.0, high=0.5, unit="tenth"), {0.0: 0.1, -1.0: 0.0, 4.0: 0.5, 0.5: 0.15}),
        (SearchedValue(start=0.9, low=0.5, high=0.99, unit="beta"), {0.0: 0.9, 1.0: 0.81, -1.0: 0.948683}),
        (SearchedValue(choices=["adamw", 2, 0.5, True]), {0.0: "adamw", 1.0: 2, 2.0: 0.5, 3.0: True}),
        (SearchedValue(start=0.9, low=0.5, high=0.99999999, unit="beta"), {}),  # after rounding, too
    ],
)
def test_values_move_by_their_unit(value: SearchedValue, moves: dict[float, float | str]) -> None:
    for octaves, there in moves.items():
        assert value.moved(octaves) == there
        assert type(value.moved(octaves)) is type(there)
    dimension = value.dimension("x")
    for end in (dimension.low, dimension.high):
        assert value.distance(value.moved(end)) == pytest.approx(end)
        assert value.choices or value.low <= value.moved(end) <= value.high  # type: ignore[operator]


def test_placeholders_are_filled_and_other_braces_stay() -> None:
    text = 'a {lr} ${lr} {{lr}} {"x":{lr}} {other} {attention.query.lr}'
    filled = fill(text, {"lr": 1e-5, "attention.query.lr": 2})
    assert filled == 'a 1.0e-05 ${lr} {lr} {"x":1.0e-05} {other} 2'
    assert [text_of(each) for each in (3, 0.5, 1.5e-07, 1e22, "a b")] == ["3", "0.5", "1.5e-07", "1.0e+22", "a b"]
    command = Command.model_validate({"command": "run {name}", "loss": {"pattern": "{loss}"}})
    assert command.filled({"name": "it's; rm"}) == """run 'it'"'"'s; rm'"""


def test_losses_are_read_while_they_are_written(tmp_path: Path) -> None:
    source = LossSource.model_validate({"pattern": "step {step}/9.*? loss={loss}"})
    file = tmp_path / "output.log"
    assert read_losses(source, file, complete=True) == ()
    file.write_bytes(
        b"\xff step 1,000/9 lr=1 loss=-3.5e-1\rstep 2_000/9 loss=.25\nstep 2_000/9 loss=nan\nstep 3/9 loss=12"
    )
    assert read_losses(source, file, complete=False)[0] == (1000, -0.35)
    partial, whole = (read_losses(source, file, complete=complete) for complete in (False, True))
    assert [step for step, _ in partial] == [1000, 2000]
    assert math.isnan(partial[1][1])  # the last loss of a step counts
    assert whole[-1] == (3, 12.0)
    file.write_text("step 1/9 loss=4\nstep 2/9 loss=3\nstep 1/9 loss=2\n")
    assert read_losses(source, file, complete=True) == ((2, 3.0), (1, 2.0))  # the last loss is that of the trial
    file.write_text("step 1000/9 loss=-.35")
    timed = source.model_copy(update={"tokens_per_step": 512})
    assert read_losses(timed, file, complete=True)[0] == (512000, -0.35)
    file.write_text("step 2/9 loss=nan\nstep 2/9 loss=2\n")
    assert math.isnan(read_losses(source, file, complete=True)[0][1])  # whether it was read before the second or not
    lines = tmp_path / "log.jsonl"
    lines.write_text('{"val": 3}\n{"other": 1}\n{"val": null, "at": {"x": 1}}\n{"val": 2.5}\n{"val": NaN}\n')
    source = LossSource.model_validate({"jsonl": "x", "key": "val"})
    found = read_losses(source, lines, complete=True)
    assert found[:2] == ((1, 3.0), (2, 2.5))
    assert math.isnan(found[2][1])
    for wrong, shown in (('"three"', "'three'"), ("false", "False"), ('"2_5"', "'2_5'")):
        lines.write_text(f'{{"val": {wrong}}}\n')
        with pytest.raises(InputError, match=f"val is {shown}, not a number; set loss.key"):
            read_losses(source, lines, complete=True)


@pytest.mark.parametrize(
    ("losses", "last"),
    [
        ([3, None, 2], 2.0),
        ([3, None, 2, math.nan, None], math.nan),  # it has diverged anyway
        ([3, 2, None], None),
        ([None, None], None),
    ],
)
def test_a_last_loss_of_null_may_be_nan(tmp_path: Path, losses: list[float | None], last: float | None) -> None:
    """JSON has no NaN, so many loggers write null. Others write null for a step without a loss."""
    log = tmp_path / "log.jsonl"
    log.write_text("".join(json.dumps({"loss": loss}) + "\n" for loss in losses) + '{"done": true}\n')
    source = LossSource.model_validate({"jsonl": "x", "key": "loss"})
    with refused("the last loss is null", "writes a NaN loss as NaN") if last is None else nullcontext():
        assert read_losses(source, log, complete=True)[-1][1] == pytest.approx(last, nan_ok=True)
    read_losses(source, log, complete=False)  # more may follow


@pytest.mark.parametrize(
    ("text", "losses"),
    [
        ("loss 3.25, next", [3.25]),
        ("loss 3.25. loss 3. loss .5 loss 1.5E-1; loss 2e5...", [3.25, 3.0, 0.5, 0.15, 2e5]),
        ("loss 2.345,0.5 loss 2.3) loss 2.3% loss 2.3\x1b[0m loss 2.3,acc", [2.345, 2.3, 2.3, 2.3, 2.3]),
        ("loss 2.3' loss 2.3|1 loss 2.3 1 loss 2.3/4 loss 2.3*", [2.3] * 5),
        ("loss nan, loss -inf loss Infinity. loss NaN", ["nan", "-inf", "inf", "nan"]),
        ("other 3 or loss", []),
        ("loss  9.9, loss    4.0870", [9.9, 4.087]),  # padded to a width
        ("loss: mse\nloss is low\nloss None\nloss 3.5\nloss 2.5", [3.5, 2.5]),  # another text before the last loss
        ("loss nan\nloss ****", ["nan"]),  # it has diverged anyway
        ("loss 1e-3,7 loss nan,0.1 loss -inf,2 loss +1e-05,0.1", [1e-3, "nan", "-inf", 1e-5]),  # columns
        ("loss=nan.0] loss nan* loss inf.0 loss 2".replace("=", " "), ["nan", "nan", "inf", 2.0]),
        *(
            (f"loss 1\nloss {text}", text)
            for text in (
                "1,234.5", "-1,234.5", "1,234", "3,25", "2,3.25", "2.30_5", "1_000.5", "1'234.5",
                "1\u202f234.5", "1.2.3", "1.#QNAN",
                "0x1.8p1", "2.3k", "2.3nats", "2.3D+01", "2.3E", "0.123+101", "1.234.567", "*****", "*", "--",
                "None", "null", "information", "nan_100", "\u221e",
            )
        ),
        *((f"loss 1\nloss {text}", "empty") for text in ("", "[2.3]", "(1,234.5)", '"2.3"', "| lr 1")),
        ("loss 1\nloss 'none'", "empty"),
        ("loss 1\nloss '2.3'", "'2.3"),
        ("loss 1\nloss improved from 2.9 to 2.5", "improved"),
    ],
)  # fmt: skip
def test_a_number_is_read_whole_or_not_at_all(tmp_path: Path, text: str, losses: list[float | str] | str) -> None:
    source = LossSource.model_validate({"pattern": "other|loss {loss}"})
    (tmp_path / "log").write_text(text)
    with refused(f"the last loss is {losses}, which is not a") if isinstance(losses, str) else nullcontext():
        found = [loss for _, loss in read_losses(source, tmp_path / "log", complete=True)]
        assert list(map(repr, found)) == [repr(float(loss)) for loss in losses]
    read_losses(source, tmp_path / "log", complete=False)  # another loss may follow


@pytest.mark.parametrize(
    ("pattern", "text", "last"),
    [
        ("loss.*{loss}", "loss = 12.5", "empty"),  # .* takes the number
        ("loss.*{loss}x", "loss = 12.5x", "empty"),
        (r"loss[^x]*(?=\d){loss}", "loss = 12.5", "5"),
        (r"loss\D*{loss}", "loss = 12.5", 12.5),
        ("loss {loss}.", "loss 12.5\n", "12."),  # the point stands for any character
        ("loss {loss}.", "loss 12.5.\n", 12.5),
        ("loss {loss},", "loss 1,234.5\n", "1"),
        ("{loss} nats", "3.5 nats\n2.5 nats", 2.5),
        ("loss {loss}nats", "loss 2.5nats", 2.5),
        ("loss '{loss}'", "loss '2.5'", 2.5),
        ("{loss}", "3.5\n\n2.5\n\n", 2.5),
        ("{loss}", "2.5\ndone\n", "done"),
        ("^{step},{loss}", "step,val,train\n100,2.345,7\n200,2.5,9\n", 2.5),
        ("^{step},[^,]*,{loss}", "step,train,val\n100,2.1,\n200,2.1,2.5\n", 2.5),
        ("^{step},[^,]*,{loss}", "step,train,val\n100,2.1,2.5\n200,2.1,\n", "empty"),
        (r"^{step},[^,]*,(?=[^,\n]){loss}", "step,train,val,lr\n100,2.1,2.5,1\n200,2.1,,1\n", 2.5),
        (r"^{step},[^,]*,(?=[^,\n]){loss}", "step,train,val\n100,2.1,2.5\n200,2.1,\n", 2.5),
        ("val loss(?! *None) {loss}", "step 1: val loss 2.5\nstep 2: val loss   None\n", 2.5),
        ("val{loss}", "val2.5\nval 5 of 10\n", "empty"),
        ("loss {loss}", "val loss 2.5\n*** loss *** done\n", "***"),
        ("val loss {loss}", "val loss 2.5\n*** loss *** done\n", 2.5),
    ],
)
def test_a_part_of_a_number_is_no_loss(tmp_path: Path, pattern: str, text: str, last: float | str) -> None:
    source = LossSource.model_validate({"pattern": pattern})
    (tmp_path / "log").write_text(text)
    with refused(f"the last loss is {last}, which is not") if isinstance(last, str) else nullcontext():
        assert read_losses(source, tmp_path / "log", complete=True)[-1][1] == last


@pytest.mark.parametrize("text", ["2.5nats", "nan_1", "-2.5_5", "2.3step 3 loss 2.2"])
def test_an_unreadable_number_in_the_middle_is_not_skipped(tmp_path: Path, text: str) -> None:
    (tmp_path / "log").write_text(f"loss 3\nloss: mse\nloss {text}\nloss 2.4\n")
    source = LossSource.model_validate({"pattern": "loss:? {loss}"})
    with refused(f"a loss is {text.partition(' ')[0]}, which is not a complete number", "as in {loss}nats"):
        read_losses(source, tmp_path / "log", complete=True)
    assert read_losses(source, tmp_path / "log", complete=False)[-1][1] == 2.4


@pytest.mark.parametrize(
    ("pattern", "rows", "found"),
    [
        ("^{step},{loss}", "70,nan,0.083", [(70, math.nan)]),
        ("^{step},{loss},", "2,inf,0.1\n3,2.0,0.1", [(2, math.inf), (3, 2.0)]),
        ("^{step},{loss}", "1,1e-3,7\n2,1e-05,0.1", [(1, 1e-3), (2, 1e-5)]),
        ("^{loss},{step}", "2.345,100,7\n2.300,200,7", [(100, 2.345), (200, 2.3)]),
        (r"^\d+,{loss},{step},", "7,2.345,100,7\n7,2.300,200,7", [(100, 2.345), (200, 2.3)]),
        (r"^\[{loss},{step}", "[2.345,100,7]\n[nan,200,7]", [(100, 2.345), (200, math.nan)]),
    ],
)
def test_columns_after_the_loss_are_no_part_of_it(
    tmp_path: Path, pattern: str, rows: str, found: list[tuple[int, float]]
) -> None:
    (tmp_path / "log").write_text(rows)
    source = LossSource.model_validate({"pattern": pattern})
    assert repr(list(read_losses(source, tmp_path / "log", complete=True))) == repr(found)


@pytest.mark.parametrize("pattern", ["^{loss},{step}", "^{loss},", "^({loss}),", r"^{loss}, ?{step}$"])
def test_a_loss_of_three_decimals_before_a_comma_is_read(tmp_path: Path, pattern: str) -> None:
    for begin in ("", "loss=", "(", "7 "):
        rows = "".join(f"{begin}{row}\n" for row in ("2.5,100", "2.41,200", "2.345,300"))
        (tmp_path / "log").write_text(rows)
        source = LossSource.model_validate({"pattern": pattern.replace("^", f"^{re.escape(begin)}")})
        assert [loss for _, loss in read_losses(source, tmp_path / "log", complete=True)] == [2.5, 2.41, 2.345]


@pytest.mark.parametrize(
    ("pattern", "text", "last"),
    [
        ("loss:{loss}", "loss:10.82\nloss: 9.90\n", 9.9),
        ("loss={loss}", "loss=10.82\nloss= 9.90\n", 9.9),
        ("loss:[ ]{loss}", "loss: 10.82\nloss:  9.90\n", 9.9),
        (r"loss:\s{loss}", "loss: 10.82\nloss:  9.90\n", 9.9),
        (r"\|{loss}\|", "|10.82|\n| 9.90|\n", 9.9),
        ("(?x) loss: {loss}", "loss:10.82\nloss: 9.90\n", 9.9),
        ("step:{step} loss {loss}", "step:100 loss 10.82\nstep: 99 loss 9.90\n", 9.9),
        ("loss: {loss} acc", "loss: 10.82 acc\nloss: 9.90  acc\n", 9.9),
        (r"loss: {loss} \|", "loss: 10.82 |\nloss: 9.90  |\n", 9.9),
        ("{step} {loss} at {step}", "9 10.82 at {step}\n10 9.90  at {step}\n", 9.9),
        ("loss{loss}", "loss10.82\nloss 9.90\n", "the last loss is empty, which is"),
        ("^{loss},{step}", "10.82,1\n 9.90,2\n", 9.9),
        ("^{step},{loss}", "100,9.80\n  7,9.90\n", 9.9),
        ("loss: (?:{loss}|none)", "loss: 10.82\nloss:  9.90\n", 9.9),
        (r"loss(?::|=){loss}", "loss:10.82\nloss: 9.90\n", 9.9),
        ("loss:\t{loss}", "loss:\t10.82\nloss:\t 9.90\n", 9.9),
        ("loss(?!.* old) {loss}", "loss 10.82\nloss 9.90 old\n", 10.82),
        ("loss {loss}(?! old)", "loss 10.82\nloss 9.90 old\n", "the last loss is 9.9, which is"),
        ("loss: {loss} acc", "loss: 10.82 acc\nloss: **** acc\n", "the last loss is ****, which is"),
        ("loss: {loss} acc", "loss: 10.82 acc\nloss: ****  acc\n", "the last loss is ****, which is"),
        ("loss:{loss}", "loss:10.82\nloss: ****\n", "the last loss is ****, which is"),
        ("loss:{loss}", "loss:10.82\nloss:\n", "the last loss is empty, which is"),
        ("loss:{loss}", "loss:10.82\nloss:\t9.90\n", "the last loss is empty, which is"),
    ],
)
def test_numbers_of_a_fixed_width_are_read(tmp_path: Path, pattern: str, text: str, last: float | str) -> None:
    source = LossSource.model_validate({"pattern": pattern})
    (tmp_path / "log").write_text(text)
    with refused(last) if isinstance(last, str) else nullcontext():
        assert read_losses(source, tmp_path / "log", complete=True)[-1][1] == last


@pytest.mark.parametrize("pattern", ["{loss}", "loss: {loss} acc", "({loss}) x", "loss: *{loss} *acc"])
def test_a_line_of_many_spaces_is_read_in_time(tmp_path: Path, pattern: str) -> None:
    source = LossSource.model_validate({"pattern": pattern})
    (tmp_path / "log").write_text(f"loss: {' ' * 9000}x\nloss: 2.5{' ' * 9000}x\nloss: 2.5 acc\n2.5 x\n2.5")
    began = time.monotonic()
    assert read_losses(source, tmp_path / "log", complete=True)[-1][1] == 2.5
    assert time.monotonic() - began < 20


def test_tensorboard_and_wandb_are_read(tmp_path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(tmp_path / "run") as writer:
        for step in (10, 20, 30):
            writer.add_scalar("val/loss", 4 - step / 16, step)
            writer.add_scalar("lr", 1.0, step)
        writer.add_scalar("val/loss", 1.75, 40, new_style=True)
    losses = ((10, 3.375), (20, 2.75), (30, 2.125), (40, 1.75))
    source = LossSource.model_validate({"tensorboard": "x", "key": "val/loss"})
    assert read_losses(source, tmp_path, complete=False) == losses
    assert read_losses(source, tmp_path / "none", complete=False) == ()
    wrong = source.model_copy(update={"key": "loss"})
    assert why_none(wrong, tmp_path) == "reported no loss: loss.key = 'loss' is none of lr, val/loss"
    # Written by wandb 0.31 in offline mode, with a text of 40,000 characters that spans two blocks.
    source = LossSource.model_validate({"wandb": "x", "key": "val/loss"})
    folder = Path(__file__).with_name("wandb")
    found = read_losses(source, folder, complete=False)
    assert found[:3] == ((0, 5.0), (10, 4.5), (20, 4.0))
    assert found[3][0] == 80
    assert math.isnan(found[3][1])
    nested = source.model_copy(update={"key": "nested.a"})
    # A block ends with padding if a record's header of 7 bytes does not fit.
    first, second = b"\0" * (32768 - 7 - 7 - 3), b"end"
    headers = [struct.pack("<IHB", zlib.crc32(b"\1" + content), len(content), 1) for content in (first, second)]
    log = b":W&B" + bytes(3) + headers[0] + first + bytes(3)
    assert list(log_records(log + headers[1] + second, "x")) == [(7, first), (32768, second)]
    assert list(log_records(log + headers[1] + second[:2], "x")) == [(7, first)]  # being written
    for cut in (bytes(4096), headers[1][:3] + bytes(90), headers[1] + b"e" + bytes(90)):  # zeros after a crash
        assert list(log_records(log + cut, "x")) == [(7, first)]
    with pytest.raises(InputError, match="x is damaged at byte 32,768"):
        list(log_records(log + headers[1] + b"And", "x"))
    assert read_losses(nested, folder, complete=False) == ((0, 0.0), (10, 1.0), (20, 2.0))
    record = b"[" * 20_000
    for tag in (b"\x82\x01", b"\x0a", b"\x12"):  # HistoryItem.value_json, HistoryRecord.item, Record.history
        record = tag + bytes([len(record) & 127 | 128, len(record) >> 7 & 127 | 128, len(record) >> 14]) + record
    header = struct.pack("<IHB", zlib.crc32(b"\1" + record), len(record), 1)
    (tmp_path / "deep.wandb").write_bytes(b":W&B" + bytes(3) + header + record)
    with pytest.raises(
        InputError, match=r"deep.wandb is damaged at byte 7: the record .* \(a value is nested too deep"
    ):
        list(wandb_rows(tmp_path / "deep.wandb"))


def wandb_log(*records: bytes) -> bytes:
    """Return the file of an offline run of W&B with records that fit into one block."""
    headers = [struct.pack("<IHB", zlib.crc32(b"\1" + record), len(record), 1) for record in records]
    return b":W&B" + bytes(3) + b"".join(header + record for header, record in zip(headers, records, strict=True))


def wandb_row(**values: bytes) -> bytes:
    """Return a record with a row of the history. ``values`` are texts in JSON."""

    def field(number: int, content: bytes) -> bytes:
        tag, size = number << 3 | 2, len(content)
        return b"".join(bytes([each & 127 | 128, each >> 7]) for each in (tag, size)) + content

    return field(2, b"".join(field(1, field(1, key.encode()) + field(16, value)) for key, value in values.items()))


def tfevents(rows: Sequence[tuple[int, float]], times: Iterable[float] = repeat(0.0)) -> bytes:
    """Return a TensorBoard event file with the given (step, loss) pairs, written at ``times``."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.record_writer import RecordWriter

    log = BytesIO()
    for (step, loss), written in zip(rows, times, strict=False):
        summary = Summary(value=[Summary.Value(tag="loss", simple_value=loss)])
        RecordWriter(log).write(Event(step=step, summary=summary, wall_time=written).SerializeToString())
    return log.getvalue()


LARGE = b"1" + b"0" * 400  # beyond a float


@pytest.mark.parametrize(
    ("kind", "content", "error"),
    [
        ("wandb", wandb_log(b"\xff" * 30), "a.wandb is damaged at byte 7: the record cannot be read"),
        ("wandb", wandb_log(b"\x12\xff\xff\x7fx"), "the record cannot be read"),
        ("wandb", wandb_log(b"\x12\xff"), "the record cannot be read"),
        ("wandb", wandb_log(wandb_row(_step=b"1", loss=LARGE)), "loss is 10+, not a number"),
        ("wandb", wandb_log(wandb_row(_step=LARGE, loss=b"3")), r"\(_step\) is 10+, not a valid number; correct"),
        ("wandb", wandb_log(wandb_row(_step=b"NaN", loss=b"3")), r"the step \(_step\) is nan, not a valid number"),
        ("jsonl", b'{"loss": %s, "at": 1}\n' % LARGE, "loss is 10+, not a number"),
        ("jsonl", b'{"loss": 3, "at": %s}\n' % LARGE, r"the step \(at\) is 10+, not a valid number; set loss.step"),
        ("pattern", b"step %s loss 3\n" % (LARGE * 20), "has the step 10+, which is too large"),
    ],
    ids=["varint", "field", "cut", "loss", "step", "step nan", "loss of jsonl", "step of jsonl", "step in text"],
)
def test_a_damaged_log_is_an_error_of_one_line(tmp_path: Path, kind: str, content: bytes, error: str) -> None:
    loss = {
        "wandb": {"wandb": "x", "key": "loss"},
        "jsonl": {"jsonl": "x", "key": "loss", "step": "at"},
        "pattern": {"pattern": "step {step} loss {loss}"},
    }[kind]
    file = tmp_path / "a.wandb"
    file.write_bytes(content)
    source = LossSource.model_validate(loss)
    with pytest.raises(InputError, match=error):
        read_losses(source, tmp_path if kind == "wandb" else file, complete=True)
    if "damaged" in error:  # it may still be written
        assert read_losses(source, tmp_path, complete=False) == ()


def test_a_trial_with_a_damaged_log_fails_and_the_study_goes_on(write: Write, tmp_path: Path) -> None:
    (tmp_path / "bad").write_bytes(wandb_log(b"\xff" * 30))
    (tmp_path / "good").write_bytes(wandb_log(wandb_row(_step=b"1", loss=b"3")))
    name = "$(test {lr} = 0.1 && echo good || echo bad)"
    command = f"cp {tmp_path}/{name} {{out}}/a.wandb; : {{seed}}"
    file = write(command, "loss = {wandb = '{out}', key = 'loss'}\n", ONE)
    printed = tune(file, "--study", "study", "--trials", 2, "--noise", 0.01, "--method", "random")
    assert [trial.state for trial in document().trials] == ["complete", "failed"]
    assert "trial 1 reported a loss that cannot be read: " in printed


QUOTABLE = "[space]\nopt = {choices = ['adamw', 'lion-8.bit']}\nn = {start = 1e-5, low = 1e-6, high = 1}\n"
SPACED = "[space]\nopt = {choices = ['adamw', 'a $(touch executed)']}\n"
# A choice that the shell would execute, if it were quoted twice.
EVIL = "a'b\"c $(touch executed) `touch executed` # \\ e"


def test_texts_are_quoted_once(write: Write) -> None:
    show = f"{PYTHON} -c 'import sys; print(sys.argv[1]); print(\"iter 1: val loss 1\")'"
    space = f"[space]\nopt = {{choices = ['''{EVIL}''', 'lion']}}\n"
    write(f"# isn't it\n{show} {{opt}} # {{seed}}", PATTERN, space)
    tune("tiny.toml", "--study", "my study", "--trials", 2, "--noise", 0)
    assert EVIL in Path("my study/trials/000000/output.log").read_text()
    assert not Path("executed").exists()
    # Numbers, and texts without special characters, may be anywhere.
    write("sh -c 'echo {opt} {n}' > \"{out}/log\"; cat {out}/log; : {seed}", "loss.pattern = '{loss}'\n", QUOTABLE)
    tune("tiny.toml", "--study", "study", "--trials", 2, "--noise", 0)
    printed = tune("tiny.toml", "--study", "a study", "--trials", 2, "--noise", 0, code=2)
    assert re.fullmatch(r"\{out\} is inside quotes, .* value '/.*/a study/best/out'; write \{out\} out.*", printed)
    assert not Path("a study").exists()


@pytest.mark.parametrize(
    "command",
    [
        "'{opt}'",
        '"{opt}"',
        '"isn\'t {opt}"',
        "'\\' '{opt}'",
        '"\\"{opt}"',
        "# {opt}",
        "# a # {opt}",
        "# a \\\n ' \n {opt} '",
        "\\{opt}",
        "`echo {opt}`",
        "$(echo {opt})",
        '"$(echo "{opt}")"',
        "${x:-{opt}}",
        "<<end\n{opt}\nend",
        "a#'\n{opt} '",
        "'{opt}' {opt}",
    ],
)
def test_a_text_inside_quotes_is_refused(write: Write, command: str) -> None:
    file = write(f"echo iter 1: val loss 1 {command}", PATTERN, SPACED)
    printed = tune(file, "--study", "study", "--noise", 0, code=2)
    assert "{opt} is inside quotes, a comment or a command substitution, where the shell would" in printed
    assert not Path("study").exists()
    assert not Path("executed").exists()


def test_the_best_command_has_its_environment_and_its_folder(write: Write) -> None:
    more = PATTERN + 'environment.LR = "{lr}"\nenvironment.TEXT = "it\'s {seed}; {{x}}"\n'
    write('cd . && echo "$LR $TEXT" > {out}/log; cat {out}/log; echo iter 1: val loss $LR', more, ONE)
    printed = tune("tiny.toml", "--study", "study", "--trials", 4, "--noise", 0)
    study = document()
    assert study.best_command in printed
    ran = subprocess.run(study.best_command, shell=True, capture_output=True, text=True, check=True)
    assert study.best is not None
    first, second = ran.stdout.splitlines()
    assert float(second.split()[-1]) == study.best.loss
    assert first == f"{second.split()[-1]} it's 0; {{x}}"
    assert Path("runs/tiny/log").exists()


def test_no_secret_of_a_command_file_is_printed_or_on_its_page(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    more = PATTERN + 'environment.WANDB_API_KEY = "hunter2"\n'
    training = 'test -n "$WANDB_API_KEY" && echo iter 1: val loss {lr}'
    write(f"{training}; : postgresql://u:hunter3@h/db", more, ONE)
    printed = tune("tiny.toml", "--study", "study", "--trials", 4, "--noise", 0)
    page = study_page(read_study(Path("study")))
    for text in (printed, page):
        assert "hunter" not in text
        assert "postgresql://u:***@h/db" in text
    monkeypatch.setenv("WANDB_API_KEY", "hunter2")
    assert subprocess.run(document().best_command, shell=True, check=False).returncode == 0
    monkeypatch.delenv("WANDB_API_KEY")
    unset = subprocess.run(document().best_command, shell=True, check=False, capture_output=True, text=True)
    assert unset.returncode
    assert "set it as in the command file" in unset.stderr


@pytest.mark.parametrize(
    ("name", "secret"),
    [
        *(
            (name, True)
            for name in ("HF_TOKEN", "TOKEN", "HFTOKEN", "WANDB_API_KEY", "OPENAI_KEY", "PGPASSWORD", "APIKEY")
        ),
        *((name, False) for name in ("PAD_TOKEN", "MAX_TOKEN", "MONKEY", "PWD", "SORT_KEY", "TOKENS")),
    ],
)
def test_secrets_of_an_environment_are_known_by_their_names(name: str, secret: bool) -> None:
    command = Command(command="x", loss=LossSource(pattern="a {loss}"), environment={name: "some text"})
    assert ("some text" not in command.line({})) == secret


def test_a_study_runs_its_command_in_one_folder(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    write("cat here; : {lr} {seed}", "loss.pattern = '{loss}'\n", ONE)
    Path("here").write_text("3")
    tune("tiny.toml", "--study", "my studies/a", "--trials", 1)
    monkeypatch.chdir("my studies/a")
    printed = tune("centre.toml", "--study", ".", "--trials", 2, code=2)
    assert "--study . has run its command in another folder so far; type cd ../.. first" in printed
    page = study_page(read_study(Path())).replace("&#39;", "'")
    lines = page.partition("Type these commands inside the folder.")[2].partition("</code>")[0].partition("<code>")[2]
    change, again, best, report = lines.splitlines()
    assert change == "cd ../.."
    assert best.startswith("cat here")
    assert report == "leaven report 'my studies/a' -o 'my studies/a/report.html'"
    monkeypatch.chdir("../..")
    assert shlex.split(again)[:2] == ["leaven", "tune"]
    tune(*shlex.split(again)[2:])
    # A project that was moved, or copied to another machine, goes on there.
    Path("elsewhere").mkdir()
    for name in ("my studies", "tiny.toml", "here"):
        Path(name).rename(Path("elsewhere", name))
    monkeypatch.chdir("elsewhere")
    tune("tiny.toml", "--study", Path("my studies/a").absolute(), "--trials", 2)


def test_commands_on_a_database_may_have_other_folders(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write("echo iter 1: val loss 3; : {lr} {seed}", PATTERN, ONE).absolute()
    store = f"sqlite:///{Path('store.db').absolute()}"
    for folder in ("one", "two/three"):
        Path(folder).mkdir(parents=True)
        with monkeypatch.context() as there:
            there.chdir(folder)
            printed = tune(file, "--study", store, "--out", Path("/", file.parent, "results"), "--trials", 1)
        # One machine with two folders may have two programs.
        assert ("on this machine, and its command now runs in" in printed) == (folder != "one")


@pytest.mark.parametrize("other", ['["lion", "adamw"]', '["adamw", "muon"]'])
def test_commands_on_a_database_have_the_same_values(write: Write, other: str) -> None:
    store = f"sqlite:///{Path('store.db').absolute()}"
    file = write("echo iter 1: val loss 3; : {opt} {seed}", PATTERN, '[space]\nopt.choices = ["adamw", "lion"]\n')
    tune(file, "--study", store, "--out", "a", "--trials", 2)
    file.write_text(file.read_text().replace('["adamw", "lion"]', other))
    assert "has other settings: values.opt" in tune(file, "--study", store, "--out", "b", "--trials", 4, code=2)


@pytest.mark.parametrize("config", ["output.log", "out", "recipe.toml", "config"])
def test_a_config_may_have_any_name(write: Write, config: str) -> None:
    Path(config).write_text("iter 1: val loss {lr}\n")
    write("test -d {out} && cat {config}; : {seed}", PATTERN + f"config = '{config}'\n", ONE)
    tune("tiny.toml", "--study", "study", "--trials", 2, "--noise", 0)
    assert [trial.loss for trial in document().trials] == [trial.values["lr"] for trial in document().trials]
    assert subprocess.run(document().best_command, shell=True, check=False).returncode == 0


@pytest.mark.parametrize(
    "start",
    [
        f"setsid {SLEEP} & sleep 0.5;",  # in a session of its own, and left alone by its parent
        f"(setsid sh -c '{SLEEP}; :' &) ; sleep 0.5;",
        f"setsid env -i {SLEEP} & sleep 60;",  # without the environment
        f"env -i {SLEEP} & sleep 0.5;",
        f"(setsid env -i {SLEEP} &) ; sleep 60;",
    ],
    ids=["own session", "no parent", "no environment, own session", "no environment", "neither"],
)
def test_what_a_command_leaves_running_is_ended(write: Write, start: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(f"{start} echo iter 1: val loss $PYTHONUNBUFFERED; : {{lr}} {{seed}}", PATTERN, ONE)
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    began = time.monotonic()
    with trainer(file, stop=lambda: time.monotonic() > began + 0.5) as run, suppress(TrialReleased):
        assert run(Proposal({"lr": 0.0}, 0)).loss == 1
    assert_no_process_left()


@pytest.mark.parametrize(
    "value",
    [
        SearchedValue(start=3, low=1, high=12),
        SearchedValue(start=2048, low=2, high=65536),
        SearchedValue(start=0, low=0, high=7, unit="tenth"),
    ],
)
def test_the_distance_of_a_whole_number_is_that_of_the_value_which_is_run(value: SearchedValue) -> None:
    dimension = value.dimension("x")
    for x in [dimension.low + i / 97 * (dimension.high - dimension.low) for i in range(98)]:
        rounded = dimension.rounded(x)
        assert value.moved(rounded) == value.moved(x)
        assert rounded == dimension.rounded(rounded) == value.distance(value.moved(x))
        above = dimension.rounded(x, 1)
        assert value.moved(above) == min(value.moved(x) + 1, value.high)  # type: ignore[operator, type-var]
    assert value.dimension("x").whole
    real = SearchedValue(start=3.0, low=1, high=12).dimension("x")
    assert real.rounded(0.123) == 0.123


WHOLE = "[space]\nn = {start = 3, low = 1, high = 12}\nm = {start = 40, low = 5, high = 400}\n"


@pytest.mark.long
@pytest.mark.parametrize("method", ["trust-region", "random"])
def test_a_search_over_whole_numbers_learns_from_what_was_run(write: Write, method: str) -> None:
    # A step function of what the search proposes.
    write("awk 'BEGIN {print \"iter 1: val loss\", (log({n}/8))^2 + (log({m}/20))^2 / 9}'; : {seed}", PATTERN, WHOLE)
    tune("tiny.toml", "--study", "study", "--trials", 16, "--noise", 0.001, "--method", method)
    study, space = document(), command_space(Path("tiny.toml")).file.space
    for trial in study.trials:
        ran = {name: space[name].distance(value) for name, value in trial.values.items()}
        assert trial.octaves == ran
    if method == "trust-region":
        points = [(*trial.values.values(), trial.seed) for trial in study.trials]
        assert len(set(points)) == len(points)
        assert study.best is not None
        best = next(trial.values for trial in study.trials if trial.octaves == study.octaves)
        assert best["n"] in {7, 8, 9}


def test_a_search_ends_when_all_whole_numbers_and_choices_were_run(write: Write) -> None:
    space = "[space]\nn = {start = 2, low = 1, high = 3}\nopt = {choices = ['a', 'b']}\n"
    write("test {opt} = a && echo iter 1: val loss {n} || echo iter 1: val loss 0.{n}", PATTERN, space)
    tune("tiny.toml", "--study", "study", "--trials", 30, "--noise", 0)
    assert sorted(tuple(trial.values.values()) for trial in document().trials) == [
        (n, opt) for n in (1, 2, 3) for opt in "ab"
    ]
    assert document().best.loss == 0.1  # type: ignore[union-attr]
    assert not document().stalled
    assert document().outlook is None  # there is nothing to run


def test_a_command_that_ends_while_leaven_stops_is_run_again(write: Write) -> None:
    """A scheduler sends SIGTERM to the command, too, which then saves and ends, perhaps with exit code 0."""
    for code in (0, 143):
        file = write(f"echo iter 1: val loss 3; touch stopped; exit {code}; : {{lr}} {{seed}}", PATTERN, ONE)
        with trainer(file, stop=Path("stopped").exists) as run, pytest.raises(TrialReleased):
            run(Proposal({"lr": 0.0}, code))


def test_a_trial_that_ended_on_a_full_disk_runs_again(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = chain([False, True], repeat(False))
    monkeypatch.setattr(command_study, "is_full", lambda folder: next(answers))
    file = write("echo x >> ran; echo iter 1: val loss $(wc -l < ran); : {lr} {seed}", PATTERN, ONE)
    printed = tune(file, "--study", "study", "--trials", 1, "--noise", 0.01)
    assert "trial 0 ended; the disk of" in printed
    assert [trial.loss for trial in document().trials] == [2.0]


def test_a_trainer_that_is_away_for_a_while_costs_a_study_no_trial(write: Write) -> None:
    file = write("sh disk/train.sh; : {lr} {seed}", PATTERN, ONE)
    Path("disk").mkdir()
    Path("disk", "train.sh").write_text("echo iter 1: val loss 3")
    study = (file, "--study", "study", "--noise", 0.01, "--workers", 4, "--trials")
    tune(*study, 1)
    Path("disk").rename("away")
    printed = tune(*study, 8, code=2)
    assert re.search(r"\d attempts in a row failed on this machine: trial \d reported no loss; .* open disk", printed)
    Path("away").rename("disk")
    tune(*study, 8)
    assert [trial.state for trial in document().trials] == ["complete"] * 8


def test_logs_of_several_attempts_are_in_order_of_steps_not_of_clocks(tmp_path: Path) -> None:
    rows = {
        "offline-2": [(1, 5), (2, 4)],
        "offline-1": [(1, 5), (2, 4), (3, 3)],
    }  # the first attempt's clock is ahead
    for name, found in rows.items():
        log = wandb_log(*(wandb_row(_step=b"%d" % step, loss=b"%d" % loss) for step, loss in found))
        (tmp_path / f"{name}.wandb").write_bytes(log)
    source = LossSource.model_validate({"wandb": "x", "key": "loss"})
    assert read_losses(source, tmp_path, complete=True, resumed=True)[-1] == (3, 3.0)


@pytest.mark.parametrize("kind", ["tensorboard", "wandb"])
def test_the_loss_is_that_of_the_last_stage(tmp_path: Path, kind: str) -> None:
    """The last stage has the first name, and begins again at step 1."""
    for stage, number, rows in (("pretrain", 1, [(1, 5), (9, 2)]), ("anneal", 2, [(1, 4), (2, 3)])):
        folder = tmp_path / stage
        if kind == "tensorboard":
            log, folder = tfevents(rows), tmp_path / "anneal"
            file = folder / f"events.out.tfevents.170000000{number}.host.9.0"
        else:
            log = wandb_log(*(wandb_row(_step=b"%d" % step, loss=b"%d" % loss) for step, loss in rows))
            file = folder / "wandb" / f"offline-run-20260101_00000{number}-abc" / "run-abc.wandb"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(log)
    source = LossSource.model_validate({kind: "x", "key": "loss"})
    assert read_losses(source, tmp_path, complete=True)[-1] == (2, 3.0)
    # Attempts may have been on machines with other clocks, so the highest step is taken for the last one ...
    assert read_losses(source, tmp_path, complete=True, resumed=True)[-1] == (9, 2.0)
    # ... unless the path of the losses is that of the last stage.
    if kind == "wandb":
        assert read_losses(source, tmp_path / "anneal", complete=True, resumed=True)[-1] == (2, 3.0)


def test_two_curves_of_one_name_are_refused(write: Write) -> None:
    """val is opened first, so that train has the later file and would decide."""
    for number, (folder, loss) in enumerate((("val", 1.0), ("train", 0.5))):
        Path("curves", folder).mkdir(parents=True)
        Path("curves", folder, f"events.out.tfevents.170000000{number}.host.9.0").write_bytes(tfevents([(3, loss)]))
    command = "cp -r curves/. {out}; : {lr} {seed}"
    study = ("--study", "study", "--trials", 1, "--noise", 0.01)
    printed = tune(write(command, 'loss = {tensorboard = "{out}", key = "loss"}\n', ONE), *study, code=2)
    assert re.search(r"/out/train and .*/out/val each have a curve loss, and it is unclear which is", printed)
    assert "or in one fixed log folder under {out}, and set loss.tensorboard to this folder" in printed
    file = write(command, 'loss = {tensorboard = "{out}/val", key = "loss"}\n', ONE)
    tune(file, "--study", "other", *study[2:])
    assert [trial.loss for trial in document("other").trials] == [1.0]


@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize(
    ("curves", "last"),  # steps and time of the first step by folder, and the last step
    [
        ({"rank0": ((1, 2, 3), 0), "rank1": ((1, 2, 3), 0)}, None),
        ({"train": ((1, 2, 3), 0), "": ((3,), 2)}, None),
        ({"fold0": ((1, 2, 3), 0), "fold1": ((1, 2, 3), 9)}, None),  # one after the other, but no attempts
        ({"pretrain": ((1, 2, 3), 0), "anneal": ((1, 2), 9)}, None),
        ({"Nov30_23-50-00_b": ((1, 2), 0), "Dec01_00-30-00_a": ((2, 3), 9)}, 3),
        ({"version_1": ((1, 2, 3), 9), "version_0": ((1, 2), 0)}, 3),  # the second attempt began again
        ({"c": ((1, 2), 0), "b": ((1,), 5), "a": ((2,), 9)}, 2),  # the last attempt only repeats the last step
    ],
)
def test_folders_of_tensorboard_are_attempts_or_refused(
    tmp_path: Path, curves: dict[str, tuple[Sequence[int], int]], last: int | None, resumed: bool
) -> None:
    for folder, (steps, began) in curves.items():
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        log = tfevents([(step, 10 * began + step) for step in steps], times=range(began + 1, began + 9))
        (tmp_path / folder / "events.out.tfevents.1700000000.host.9.0").write_bytes(log)
    source = LossSource.model_validate({"tensorboard": "{out}", "key": "loss"})
    with (
        refused("each have a curve loss, and it is unclear which is", "one fixed log folder under {out}")
        if last is None
        else nullcontext()
    ):
        losses = read_losses(source, tmp_path, complete=True, resumed=resumed)
        assert losses[-1] == (last, 90 + (last or 0))
    read_losses(source, tmp_path, complete=False, resumed=resumed)  # an attempt may yet get further


@pytest.mark.parametrize("name", [None, ".", "hparams"])
@pytest.mark.parametrize("when", ["before", "after", "each"])
def test_results_of_hyperparameters_are_no_points_of_the_curve(tmp_path: Path, name: str | None, when: str) -> None:
    """``add_hparams`` writes a file with a placeholder or a result under the name of the loss."""
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(tmp_path) as writer:
        for step in range(1, 4):
            if when == "each" or (when == "before" and step == 1):
                writer.add_hparams({"lr": 0.1}, {"loss": 0.0}, run_name=name)
            writer.add_scalar("loss", 4 - step, step)
        if when == "after":
            writer.add_hparams({"lr": 0.1}, {"loss": 0.5}, run_name=name)
    source = LossSource.model_validate({"tensorboard": "{out}", "key": "loss"})
    for complete in (False, True):
        assert read_losses(source, tmp_path, complete=complete) == ((1, 3.0), (2, 2.0), (3, 1.0))


def test_a_loss_only_among_the_results_of_hyperparameters_is_read(tmp_path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter
    from torch.utils.tensorboard.summary import hparams

    source = LossSource.model_validate({"tensorboard": "{out}", "key": "loss"})
    with SummaryWriter(tmp_path / "results") as writer:
        for loss in (3.0, 2.0):
            writer.add_hparams({"lr": 0.1}, {"loss": 0.0, "hparam/loss": loss})
            writer.add_scalar("other", 3.0, 1)
    assert read_losses(source, tmp_path / "results", complete=True) == ()
    message = "reported no loss: loss is only a result of add_hparams; such results are read only if"
    assert why_none(source, tmp_path / "results") == f"{message} their name begins with hparam/"
    named = source.model_copy(update={"key": "hparam/loss"})
    assert read_losses(named, tmp_path / "results", complete=True) == ((0, 2.0),)
    # Lightning writes hyperparameters and losses to one file; a later attempt may add a single loss.
    for attempt, steps in enumerate(([1, 2, 3], [4])):
        with SummaryWriter(tmp_path / "mixed", filename_suffix=f".{attempt}") as writer:
            for summary in hparams({"lr": 0.1}, {"hp_metric": -1}):  # type: ignore[no-untyped-call]
                writer._get_file_writer().add_summary(summary)
            for step in steps:
                writer.add_scalar("loss", 9 - step, step)
    assert read_losses(source, tmp_path / "mixed", complete=True)[-1] == (4, 5.0)


def test_the_tenth_event_file_follows_the_ninth(tmp_path: Path) -> None:
    for number in (9, 10):
        log = tfevents([(number, number)])
        (tmp_path / f"events.out.tfevents.1700000000.host.7.{number}").write_bytes(log)
    source = LossSource.model_validate({"tensorboard": "{out}", "key": "loss"})
    assert read_losses(source, tmp_path, complete=True)[-1] == (10, 10.0)


@pytest.mark.parametrize(
    "last",
    [
        '{"val": 2, "lr"{"val": 1}\n',
        '{"val": 2, "l',
        "\0" * 20,
        "\0" * 20 + '{"val": 2}\n',
        ' "val": 2}\n',
        'al": 2}\n',
        'INFO {"val": 2}\n',
    ],
    ids=["two in one", "cut", "zeros", "zeros before", "without its beginning", "without half", "with a prefix"],
)
def test_a_damaged_last_line_is_not_passed_over(tmp_path: Path, last: str) -> None:
    source = LossSource.model_validate({"jsonl": "x", "key": "val"})
    file = tmp_path / "log.jsonl"
    file.write_text('{"val": 3}\n' + last)
    assert read_losses(source, file, complete=False) == ((1, 3.0),)
    with pytest.raises(InputError, match="the last loss may be in a damaged line"):
        read_losses(source, file, complete=True)
    file.write_text('{"val": 3}\n{"val": 2, "lr"{\n{"val": 1}\nsaved "val"\n')  # only a point of the curve is lost
    assert read_losses(source, file, complete=True) == ((1, 3.0), (2, 1.0))


def test_a_process_that_cannot_be_ended_is_named(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(process: psutil.Process) -> None:
        raise psutil.AccessDenied(process.pid)  # that of another user, as after sudo

    file = write(f"{SLEEP}; : {{lr}} {{seed}}", PATTERN + "timeout_seconds = 0.1\n", ONE)
    with monkeypatch.context() as patched, trainer(file, works=True) as run:
        patched.setattr(processes, "GRACE_SECONDS", 0.1)
        patched.setattr(psutil.Process, "terminate", denied)
        patched.setattr(psutil.Process, "kill", denied)
        with pytest.raises(WorkerDied):
            run(Proposal({"lr": 0.0}, 0))
    assert "cannot be ended" in run.notes[0]
    for left in psutil.Process().children(recursive=True):
        left.kill()


def test_a_closed_terminal_stops_like_ctrl_c() -> None:
    with stop_on_signal() as stop:
        for _ in range(2):  # from the shell and from the system
            signal.raise_signal(signal.SIGHUP)  # os.kill may reach another thread first
        assert stop()
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with stop_on_signal() as stop:  # under nohup
        signal.raise_signal(signal.SIGHUP)
        assert not stop()
    signal.signal(signal.SIGHUP, before)
