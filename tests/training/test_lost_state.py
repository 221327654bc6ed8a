"""A run with missing or changed files does not start again from 0, and copies are not used as checkpoints."""

import errno
import json
import os
import re
import shutil
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import reduce
from operator import getitem
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import typer
from safetensors.torch import load_file, save_file
from tests.errors import refused
from tests.training.conftest import losses

from leaven import storage
from leaven.cli.train import _exit_if_stopped_on_purpose
from leaven.data.tokens import TokenSet, prepare
from leaven.documents import sealed
from leaven.errors import InputError
from leaven.recipe.files import read_recipe, render, write_recipe
from leaven.recipe.recipe import Recipe
from leaven.training import checkpoint
from leaven.training.checkpoint import Checkpoint, _fingerprint
from leaven.training.integrity import faults, require_tokenizer
from leaven.training.load import export_run, load_run
from leaven.training.metrics import Step
from leaven.training.rewind import ManualRewind, Rewind, rewinds_of
from leaven.training.run_folder import OWNER, RunFolder, checkpoints, read_state, tokens_of
from leaven.training.run_lines import RunLines
from leaven.training.trainer import train
from leaven.views.folders import read_run


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of runs that all tests share: whole and stopped."""
    return tmp_path_factory.mktemp("trained")


@pytest.fixture
def recipe(tiny: Recipe) -> Recipe:
    return tiny.replace({"stability.checkpoint_every_tokens": 1_024, "stability.keep": 3})


@pytest.fixture
def run(recipe: Recipe, tokens: TokenSet, trained: Path, tmp_path: Path) -> RunFolder:
    """A run that was stopped after at least 28 of its 40 steps."""
    stopped = RunFolder(trained / "stopped")
    if not stopped.path.exists():
        assert not train(recipe, tokens, stopped.path, stop=lambda: len(stopped.metrics()) >= 28).finished
    shutil.copytree(stopped.path, tmp_path / "run")
    return RunFolder(tmp_path / "run")


@pytest.fixture
def expected(trained: Path, recipe: Recipe, tokens: TokenSet) -> list[float]:
    """Return the losses of an uninterrupted run."""
    if not (trained / "whole").exists():
        train(recipe, tokens, trained / "whole")
    return losses(trained / "whole")


def moved(folder: Path) -> None:
    folder.rename(folder.with_name("moved"))  # unlike deleting, one operation, even while a checkpoint is written


def files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("empty", [False, True])
@pytest.mark.parametrize("without", [(), ("metrics.jsonl",), ("events.jsonl",)])
def test_a_run_without_its_checkpoints_does_not_start_again(
    run: RunFolder, recipe: Recipe, tokens: TokenSet, without: tuple[str, ...], empty: bool
) -> None:
    shutil.rmtree(run.checkpoints)
    if empty:
        run.checkpoints.mkdir()
    for name in without:
        (run.path / name).unlink()
    before = files(run.path)
    with pytest.raises(InputError, match=r"has no checkpoints, but .*bring back .*or start again with another --run"):
        train(recipe, tokens, run.path)
    assert files(run.path) == before


@pytest.mark.parametrize(
    "text", ["line one of my thesis\n", "one line without an end", '{"title": "of another program"}\n']
)
@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl"])
def test_a_run_does_not_write_through_a_link_or_over_other_text(
    recipe: Recipe, tokens: TokenSet, tmp_path: Path, name: str, text: str
) -> None:
    run, thesis = RunFolder(tmp_path / "run"), tmp_path / "thesis.txt"
    run.path.mkdir()
    write_recipe(recipe, run.recipe_file)
    thesis.write_text(text)
    (run.path / name).symlink_to(thesis)
    with pytest.raises(InputError, match=rf"{name}: this is a link to .*thesis.txt; replace it with the file"):
        train(recipe, tokens, run.path)
    (run.path / name).unlink()
    shutil.copy(thesis, run.path / name)
    with pytest.raises(InputError, match=rf"has no checkpoints, but {name} has lines that leaven cannot read"):
        train(recipe, tokens, run.path)
    assert (run.path / name).read_text() == thesis.read_text() == text


@pytest.mark.parametrize(("events", "left"), [(0, "plan.json"), (1, "metrics.jsonl"), (0, "tensorboard")])
def test_the_first_event_alone_does_not_start_a_run_again(
    recipe: Recipe, tokens: TokenSet, tmp_path: Path, events: int, left: str
) -> None:
    """The run has one other file, and no events or the first one."""
    folder, short = tmp_path / "run", recipe.replace({"data.tokens": 1_024})
    train(short, tokens, folder, log_to="tensorboard")
    rewrite(folder / "events.jsonl", lambda lines: lines[:events])
    for path in folder.iterdir():
        if path.name not in {"recipe.toml", "tokenizer.json", "events.jsonl", left}:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    before = files(folder)
    with pytest.raises(InputError, match=rf"has no checkpoints, but {left}.* says that the run has"):
        train(short, tokens, folder)
    assert files(folder) == before


def test_a_restart_by_torchrun_does_not_start_again_if_the_folder_is_gone(
    recipe: Recipe, tokens: TokenSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def attempt(start: str, number: int) -> None:
        errors = tmp_path / start / f"attempt_{number}" / "0" / "error.json"
        errors.parent.mkdir(parents=True)
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(errors))

    short = recipe.replace({"data.tokens": 1_024})
    attempt("first", 0)
    train(short, tokens, tmp_path / "run")
    shutil.rmtree(tmp_path / "run")
    attempt("first", 1)
    with pytest.raises(InputError, match=r"was deleted or moved since torchrun started; bring it back"):
        train(short, tokens, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    (tmp_path / "run").mkdir()
    write_recipe(short, tmp_path / "run" / "recipe.toml")
    with pytest.raises(InputError, match="no checkpoints, but the run had saved one before torchrun restarted it"):
        train(short, tokens, tmp_path / "run")
    attempt("second", 0)
    assert train(short, tokens, tmp_path / "run").finished


def test_a_finished_run_without_checkpoints_still_has_its_result(
    run: RunFolder, recipe: Recipe, tokens: TokenSet
) -> None:
    result = train(recipe, tokens, run.path)
    shutil.rmtree(checkpoints(run.checkpoints)[-1])
    assert read_run(run.path).gaps.endswith("when the run finished: tokens-000000000010240 is missing")
    shutil.rmtree(run.checkpoints)
    assert read_run(run.path).gaps == ""
    with pytest.warns(UserWarning, match="checkpoints is not as the run wrote it: no checkpoint is there"):
        assert train(recipe, tokens, run.path).loss == result.loss


@pytest.mark.long
def test_a_run_that_was_killed_before_its_first_checkpoint_starts_again(
    run: RunFolder, recipe: Recipe, tokens: TokenSet, expected: list[float]
) -> None:
    shutil.rmtree(run.checkpoints)
    rewrite(run.path / "events.jsonl", lambda lines: [line for line in lines if line["event"] == "start"])
    run.metrics_file.unlink()
    (run.checkpoints / ".tokens-000000000000000.x.tmp").mkdir(parents=True)  # left by the kill
    assert train(recipe, tokens, run.path).finished
    assert losses(run.path) == expected


def test_a_run_does_not_train_before_its_first_checkpoint_is_saved(
    recipe: Recipe, tokens: TokenSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise checkpoint.NotSaved("no space left")

    run, short, told = RunFolder(tmp_path / "run"), recipe.replace({"data.tokens": 1_024}), list[str]()
    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "write_checkpoint", fails)
        with pytest.raises(InputError, match="checkpoint not saved: no space left; correct this"):
            train(short, tokens, run.path, on_event=lambda event, values: told.append(event))
    assert told == ["start"]  # no word that the run continues
    assert not run.metrics()
    assert train(short, tokens, run.path).finished


def test_a_failed_save_does_not_let_a_run_start_again(
    recipe: Recipe, tokens: TokenSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, write = RunFolder(tmp_path / "run"), checkpoint.write_checkpoint

    def fails(folder: Path, saved: Checkpoint, *rest: Any) -> Path:
        if saved.progress.tokens:
            raise checkpoint.NotSaved("no space left")
        return write(folder, saved, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "write_checkpoint", fails)
        assert train(recipe, tokens, run.path, stop=lambda: len(run.metrics()) >= 20).unsaved
    shutil.rmtree(run.checkpoints, ignore_errors=True)
    rewrite(run.path / "events.jsonl", lambda lines: [each for each in lines if each["event"] != "checkpoint"])
    before = files(run.path)
    with pytest.raises(InputError, match=r"but metrics.jsonl says that the run has trained 2\d steps"):
        train(recipe, tokens, run.path)
    assert files(run.path) == before


def rewrite(path: Path, change: "Change") -> None:
    lines = change([json.loads(line) for line in path.read_text().splitlines()])
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def test_a_missing_newest_checkpoint_is_named(
    run: RunFolder, recipe: Recipe, tokens: TokenSet, expected: list[float]
) -> None:
    newest = checkpoints(run.checkpoints)[-1]
    shutil.rmtree(newest)
    train(recipe, tokens, run.path)
    (resumed,) = [event for event in run.events() if event["event"] == "resume"]
    assert resumed["missing_checkpoint"] == newest.name
    assert losses(run.path) == expected


@pytest.mark.parametrize("kind", ["rewind", "rollback"])
def test_a_checkpoint_to_which_a_run_returned_is_named_if_it_is_gone(run: RunFolder, kind: str) -> None:
    """The run was killed right after the event."""
    older, target, newest = checkpoints(run.checkpoints)[-3:]
    at = tokens_of(target)
    event = {"event": kind, "why": "", "asked": {}, "from_tokens": at, "tokens": tokens_of(newest)}
    event["earlier_rewinds"] = []
    rewrite(run.path / "events.jsonl", lambda lines: [*lines, event | Rewind(at, at, at).document()])
    assert load_run(run.path).tokens == at
    shutil.rmtree(target)
    loaded = load_run(run.path)
    assert (loaded.tokens, loaded.skipped) == (tokens_of(older), {target.name: "missing"})


@pytest.mark.long
def test_a_rewind_whose_event_is_lost_is_not_forgotten(run: RunFolder, recipe: Recipe, tokens: TokenSet) -> None:
    whole = run.path.with_name("whole")
    train(recipe, tokens, run.path, rewind=ManualRewind(6_144, 512), stop=lambda: run.metrics()[-1]["step"] >= 34)
    shutil.copytree(run.path, whole)
    rewrite(run.path / "events.jsonl", lambda lines: [line for line in lines if line["event"] != "rewind"])
    *_, target, _ = checkpoints(run.checkpoints)
    back = ManualRewind(tokens_of(target), 256)
    back.go(run, recipe)
    back.go(RunFolder(whole), recipe)
    assert rewinds_of(run) == rewinds_of(RunFolder(whole))
    assert [each.to_tokens for each in rewinds_of(run)] == [6_144, tokens_of(target)]
    for folder in (run.path, whole):
        assert train(recipe, tokens, folder, rewind=back).finished
    assert losses(run.path) == losses(whole)


@pytest.mark.long
def test_the_recipe_of_a_rewind_whose_event_is_lost_is_in_the_checkpoint(
    run: RunFolder, recipe: Recipe, tokens: TokenSet
) -> None:
    ManualRewind(6_144).go(run, recipe.replace({"hyperparameters.lr": 0.008}))  # an earlier event with a recipe
    lower = recipe.replace({"hyperparameters.lr": 0.003})
    older = (run.path / "events.jsonl").read_bytes()
    back = ManualRewind(5_120)
    train(lower, tokens, run.path, rewind=back, stop=lambda: run.metrics()[-1]["step"] >= 34)
    (run.path / "events.jsonl").write_bytes(older)
    assert RunFolder(run.path).recipe().hyperparameters.lr == 0.003
    export_run(load_run(run.path), run.path.with_name("exported"))
    assert "| validation loss | not measured |" in (run.path.with_name("exported") / "README.md").read_text()
    with pytest.raises(InputError, match=r"hyperparameters.lr was 0.003, is now 0.008"):
        train(recipe.replace({"hyperparameters.lr": 0.008}), tokens, run.path)
    assert train(lower, tokens, run.path).finished


def test_a_run_that_has_lost_its_recipe_says_how_to_go_on(run: RunFolder, recipe: Recipe, tokens: TokenSet) -> None:
    kept = run.recipe_file.rename(run.path.with_name("kept.toml"))
    with pytest.raises(InputError, match=r"has lost its recipe.toml; copy the run's original recipe to"):
        train(recipe, tokens, run.path)
    shutil.copy(kept, run.recipe_file)
    assert train(recipe, tokens, run.path).finished


def test_lines_that_a_stop_on_a_full_disk_loses_are_named(
    recipe: Recipe, tokens: TokenSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append, steps, told = storage.append, list[int](), list[str]()

    def full(path: Path, line: bytes) -> None:
        if path.name == "metrics.jsonl":
            raise OSError(errno.ENOSPC, "No space left on device")
        append(path, line)

    monkeypatch.setattr(storage, "append", full)
    train(
        recipe,
        tokens,
        tmp_path / "run",
        on_step=lambda step: steps.append(step.step),
        on_event=lambda event, values: told.append(event),
        stop=lambda: len(steps) >= 3,
    )
    assert told[-1] == "lines_lost"


def test_comments_of_a_recipe_in_its_run_folder_stay(recipe: Recipe, tokens: TokenSet, tmp_path: Path) -> None:
    mine = "# why this lr\n" + render(recipe)
    (tmp_path / "recipe.toml").write_text(mine)
    train(recipe.replace({"batch.micro_batch": 2}), tokens, tmp_path, stop=lambda: True)
    kept = (tmp_path / "recipe.toml").read_text()
    assert kept.startswith("# why this lr\n")
    assert "micro_batch = 2" in kept


def test_a_text_may_be_moved_after_a_rewind_that_changed_the_recipe(
    run: RunFolder, recipe: Recipe, tokens: TokenSet
) -> None:
    slower = recipe.replace({"hyperparameters.lr": 0.005})
    ManualRewind(6_144).go(run, slower)
    moved = slower.replace({"data.source": "/mnt/elsewhere/*.txt"})
    tokens = replace(tokens, data=moved.data)
    with refused("use another --run, or, if the text was only moved, write its new path in", "recipe.toml"):
        train(moved, tokens, run.path)
    write_recipe(moved, run.recipe_file)
    assert train(moved, tokens, run.path).finished
    assert read_recipe(run.recipe_file).data.source == "/mnt/elsewhere/*.txt"


def test_lines_are_on_the_disk_before_the_checkpoint_that_needs_no_repeat(
    recipe: Recipe, tokens: TokenSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced, sync = list[str](), storage.sync_file

    def recorded(path: Path) -> None:
        synced.append(path.name)
        sync(path)

    monkeypatch.setattr(storage, "sync_file", recorded)
    monkeypatch.setattr(checkpoint, "sync_file", recorded)
    train(recipe.replace({"data.tokens": 1_024}), tokens, tmp_path / "run")
    assert synced[0] == "events.jsonl"  # the start, before plan.json
    last = len(synced) - 1 - synced[::-1].index("state.json")
    before = synced[:last][-1 - synced[:last][::-1].index("state.json") :]
    assert {"metrics.jsonl", "events.jsonl"} <= {*before}
    assert "events.jsonl" in synced[last:]  # the finish


@pytest.mark.long
@pytest.mark.parametrize("older", [True, False])
@pytest.mark.parametrize("name", ["events.jsonl", "metrics.jsonl"])
def test_lines_that_are_lost_while_a_run_trains_are_named(
    recipe: Recipe, tokens: TokenSet, tmp_path: Path, name: str, older: bool
) -> None:
    """At step 5, the file is removed or replaced by an old copy. The command, the next one and the report say so."""
    run, short, told = RunFolder(tmp_path / "run"), recipe.replace({"data.tokens": 3_072}), list[str]()

    def on_step(step: Step) -> None:
        if step.step == 1:
            shutil.copy(run.path / name, tmp_path)
        if step.step == 5:
            (run.path / name).unlink()
            if older:
                shutil.copy(tmp_path / name, run.path)

    def on_event(event: str, values: dict[str, Any]) -> None:
        if "changed" in event:
            assert values["file"] == name
            assert re.fullmatch(r"\d+ lines instead of \d+", values["why"])
            told.append(f"{event} {values['tokens']}")

    assert train(short, tokens, run.path, on_step=on_step, on_event=on_event).finished
    assert told == ["finished_file_changed 3072"]
    assert name in next(faults(run))
    assert train(short, tokens, run.path, on_event=on_event).finished
    assert told == ["finished_file_changed 3072"] * 2


def test_lines_that_a_crash_and_a_disk_have_touched_are_not_lost(
    run: RunFolder, recipe: Recipe, tokens: TokenSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash has cut the files, and then lines are written with an error, or only later."""
    os.truncate(run.events_file, run.events_file.stat().st_size - 1)
    with run.metrics_file.open("a") as file:
        file.write('{"st')
    append, told, calls = storage.append, list[str](), list[Path]()

    def fails(path: Path, line: bytes) -> None:
        calls.append(path)
        if len(calls) % 3:
            append(path, line)
        if len(calls) % 3 != 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(storage, "append", fails)
    train(recipe, tokens, run.path, on_event=lambda event, values: told.append(event))
    train(recipe, tokens, run.path, on_event=lambda event, values: told.append(event))
    assert "unwritten" in told
    assert not [event for event in told if "changed" in event]
    assert len(run.metrics_file.read_text().splitlines()) == 40


def test_a_call_in_python_warns_of_what_is_lost_and_of_nothing_else(
    run: RunFolder, recipe: Recipe, tokens: TokenSet, tmp_path: Path
) -> None:
    newest = checkpoints(run.checkpoints)[-1]
    shutil.rmtree(newest)
    rewrite(run.metrics_file, lambda lines: lines[:4] + lines[9:])
    shutil.copytree(run.path, tmp_path / "copy")
    with pytest.warns(UserWarning, match="is not as the run wrote it") as seen:
        train(recipe, tokens, run.path)
    changed, missing = (str(each.message) for each in seen)
    assert changed.startswith(f"{run.path}: metrics.jsonl is not as the run wrote it: 23 lines instead of 24 (found ")
    assert changed.endswith(" tokens); the run continues")
    assert missing == f"{run.path}: checkpoint {newest.name} is missing; the steps up to it are trained again"
    assert {each.filename for each in seen} == {__file__}
    with warnings.catch_warnings(action="error"):
        train(recipe, tokens, run.path)
        train(recipe, tokens, tmp_path / "copy", on_event=lambda event, values: None)


def test_a_call_in_python_warns_of_text_that_is_skipped(tiny: Recipe, tmp_path: Path) -> None:
    good = "".join(json.dumps({"text": f"line {number} of the text"}) + "\n" for number in range(2_000))
    (tmp_path / "a.jsonl").write_text(good + '{"text": "this line is cu\n' + '{"text": ""}\n')
    recipe = tiny.replace({"data.source": f"{tmp_path}/*.jsonl", "data.tokens": 1_024})
    tokens = prepare(recipe.data, recipe.model.vocab_size)
    with pytest.warns(UserWarning, match="were skipped: ") as seen:
        train(recipe, tokens, tmp_path / "run")
    (warning,) = seen
    assert str(warning.message) == tokens.notes[0]
    assert "1 of 2,001 documents of data.source" in tokens.notes[0]
    assert "no text in 1 of 2,001 documents" in tokens.notes[0]
    assert warning.filename == __file__
    with warnings.catch_warnings(action="error"):
        train(recipe, tokens, tmp_path / "run", on_event=lambda event, values: None)


def test_a_run_goes_on_with_its_own_tokenizer(run: RunFolder, recipe: Recipe, tokens: TokenSet) -> None:
    """The cache is gone, and another version of tokenizers would train another one."""
    advice = r'if only the tokenizer has changed, write tokenizer = ".*json" both in your recipe and in .*recipe.toml'
    with pytest.raises(InputError, match=advice):
        train(recipe, replace(tokens, fingerprint="other"), run.path)
    own = recipe.replace({"data.tokenizer": str(run.tokenizer_file)})
    write_recipe(own, run.recipe_file)
    assert train(own, prepare(own.data, own.model.vocab_size), run.path).finished


def test_a_finished_run_makes_its_tokenizer_again(run: RunFolder, recipe: Recipe, tokens: TokenSet) -> None:
    for _ in range(2):
        run.tokenizer_file.unlink()
        assert train(recipe, tokens, run.path).finished
    assert load_run(run.path).tokenizer


def test_a_stop_of_an_earlier_torchrun_does_not_keep_this_one_from_restarting(
    run: RunFolder, recipe: Recipe, tokens: TokenSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def attempt(number: int) -> None:
        (tmp_path / f"attempt_{number}" / "0").mkdir(parents=True)
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / f"attempt_{number}" / "0" / "error.json"))

    attempt(0)  # it fails before it has resumed the run
    attempt(1)
    _exit_if_stopped_on_purpose(run)
    assert not train(recipe, tokens, run.path, stop=lambda: True).finished
    attempt(2)
    with pytest.raises(typer.Exit):
        _exit_if_stopped_on_purpose(run)


def test_a_rewind_that_only_a_later_one_knows_is_not_forgotten(run: RunFolder, recipe: Recipe) -> None:
    *_, target, _ = checkpoints(run.checkpoints)
    for skip in (256, 512):
        ManualRewind(tokens_of(target), skip).go(run, recipe)
    before = rewinds_of(run)
    assert len(before) == 2
    rewrite(run.path / "events.jsonl", lambda lines: [each for each in lines if each.get("earlier_rewinds") != []])
    assert rewinds_of(run) == before


def test_a_rewind_whose_event_is_lost_is_not_done_twice(run: RunFolder, recipe: Recipe, tokens: TokenSet) -> None:
    older = (run.path / "events.jsonl").read_bytes()
    back = ManualRewind(6_144, 512)
    summary = train(recipe, tokens, run.path, rewind=back)
    (run.path / "events.jsonl").write_bytes(older)
    assert back.done(run, recipe)
    before = files(run.path)
    back.go(run, recipe)  # as a second command does, which has checked before the first one rewound
    assert files(run.path) == before
    assert not ManualRewind(6_144, 256).done(run, recipe)
    assert train(recipe, tokens, run.path, rewind=back).loss == summary.loss
    assert len(rewinds_of(run)) == 1


def test_the_last_line_of_the_metrics_counts_without_its_end(
    run: RunFolder, recipe: Recipe, tokens: TokenSet, expected: list[float]
) -> None:
    metrics = run.path / "metrics.jsonl"
    os.truncate(metrics, metrics.stat().st_size - 1)
    train(recipe, tokens, run.path)
    assert not [event for event in run.events() if event["event"] == "file_changed"]
    assert (losses(run.path), len(metrics.read_text().splitlines())) == (expected, len(expected))


@pytest.mark.long
def test_a_run_whose_start_weights_are_gone_resumes(
    run: RunFolder, recipe: Recipe, tokens: TokenSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export_run(load_run(run.path), tmp_path / "weights")
    started = recipe.replace({"start.weights": str(tmp_path / "weights")})
    child = RunFolder(tmp_path / "child")
    assert not train(started, tokens, child.path, stop=lambda: len(child.metrics()) >= 20).finished
    shutil.copytree(child.path, tmp_path / "whole")
    train(started, tokens, tmp_path / "whole")
    shutil.rmtree(tmp_path / "weights")
    result = train(started, tokens, child.path)
    assert losses(child.path) == losses(tmp_path / "whole")
    shutil.rmtree(child.checkpoints)
    assert train(started, tokens, child.path) == result.model_copy(update={"saved_tokens": 0})
    with pytest.raises(InputError, match="no such folder"):
        train(started, tokens, tmp_path / "new")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="named pipes")
def test_a_pipe_in_place_of_the_metrics_is_refused(run: RunFolder, recipe: Recipe, tokens: TokenSet) -> None:
    metrics = run.path / "metrics.jsonl"
    metrics.unlink()
    os.mkfifo(metrics)
    before = files(run.path)
    with pytest.raises(InputError, match=r"metrics.jsonl: this is a pipe or a device"):
        train(recipe, tokens, run.path)
    assert files(run.path) == before


def test_an_older_checkpoint_is_not_loaded_without_a_word(run: RunFolder) -> None:
    *_, older, newest = checkpoints(run.checkpoints)
    assert load_run(run.path).skipped == {}
    shutil.rmtree(newest)
    loaded = load_run(run.path)
    assert (loaded.tokens, loaded.skipped) == (tokens_of(older), {newest.name: "missing"})
    assert load_run(run.path, tokens_of(older)).skipped == {}  # this checkpoint was requested


@pytest.mark.long
@pytest.mark.parametrize("name", ["{newest}.bak", "tokens-best", "tokens-zzz-1", "tokens-99999999999999999999"])
def test_copies_of_checkpoints_are_ignored(
    run: RunFolder, recipe: Recipe, tokens: TokenSet, name: str, expected: list[float]
) -> None:
    there = checkpoints(run.checkpoints)
    copy = run.checkpoints / name.format(newest=there[-1].name)
    shutil.copytree(there[0], copy)
    before = files(copy)
    assert checkpoints(run.checkpoints) == there
    assert load_run(run.path).tokens == int(there[-1].name.rpartition("-")[2])
    assert train(recipe, tokens, run.path).finished
    assert losses(run.path) == expected
    assert files(copy) == before


def test_a_copy_under_the_name_of_another_checkpoint_is_damaged(
    run: RunFolder, recipe: Recipe, tokens: TokenSet, expected: list[float]
) -> None:
    there = checkpoints(run.checkpoints)
    copy = run.checkpoints / f"tokens-{9_000:015d}"
    shutil.copytree(there[0], copy)
    loaded = load_run(run.path)
    assert (loaded.tokens, loaded.skipped) == (int(there[-1].name.rpartition("-")[2]), {copy.name: "damaged"})
    assert train(recipe, tokens, run.path).finished
    assert losses(run.path) == expected


def test_lost_events_are_reported_and_the_text_is_still_known(
    run: RunFolder, recipe: Recipe, tokens: TokenSet, expected: list[float]
) -> None:
    (run.path / "events.jsonl").unlink()
    with pytest.raises(InputError, match="was trained on other text"):
        train(recipe, replace(tokens, fingerprint="other"), run.path)
    train(recipe, tokens, run.path)
    (event,) = [event for event in run.events() if event["event"] == "file_changed"]
    assert (event["file"], event["why"].split(" of ")[0]) == ("events.jsonl", "0 lines instead")
    assert losses(run.path) == expected


def changed_time(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    lines[1]["time"] += 1
    return lines


@pytest.mark.long
@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda lines: lines[:3], r"3 lines instead of \d+"),
        (lambda lines: lines[:1] + lines[4:], r"\d+ lines instead of \d+"),
        (changed_time, r"its first \d+ lines have been changed"),
    ],
)
def test_events_that_were_changed_are_reported_once(
    run: RunFolder, recipe: Recipe, tokens: TokenSet, expected: list[float], change: "Change", why: str
) -> None:
    rewrite(run.path / "events.jsonl", change)
    train(recipe, tokens, run.path, stop=lambda: len(losses(run.path)) > 30)
    train(recipe, tokens, run.path)
    (event,) = [event for event in run.events() if event["event"] == "file_changed"]
    assert event["file"] == "events.jsonl"
    assert re.fullmatch(why, event["why"])
    assert losses(run.path) == expected


FINISH = {"event": "finish", "step": 40, "tokens": 10_240, "seconds": 1.0, "loss": 2.0}


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ({"event": "rollback", "step": 3}, "the event rollback in line {number} has no tokens"),
        ({"event": "finish"}, "the event finish in line {number} has no step"),
        ({"event": "finish", "step": True}, "the event finish in line {number} has a wrong step"),
        ({"event": "stop"}, "the event stop in line {number} has no why"),
        (FINISH | {"loss": None}, "the event finish in line {number} has a wrong loss"),
        (FINISH | {"bits_per_byte": "x"}, "the event finish in line {number} has a wrong bits_per_byte"),
        ({"event": "layout", "bits_per_byte": [1]}, "the event layout in line {number} has a wrong bits_per_byte"),
        ({"event": "start", "mfu_convention": 1}, "the event start in line {number} has a wrong mfu_convention"),
        ({"event": "rewind", "recipe": {"a": 1}}, "its last recipe is damaged"),
        ({"event": "layout", "recipe": {"a": 1}}, "its last recipe is damaged"),
    ],
)
def test_an_event_without_the_values_that_a_resume_needs_is_one_line(
    run: RunFolder, recipe: Recipe, tokens: TokenSet, line: dict[str, Any], says: str
) -> None:
    rewrite(run.path / "events.jsonl", lambda lines: [*lines, line])
    number, before = len(run.read_events()), files(run.path)
    for read in (lambda: train(recipe, tokens, run.path), lambda: load_run(run.path)):
        with pytest.raises(InputError, match=rf"events.jsonl: {says.format(number=number)}; restore the file"):
            read()
    assert files(run.path) == before


def test_a_line_of_the_events_that_is_no_event_does_not_count(run: RunFolder) -> None:
    before = run.events()
    rewrite(run.path / "events.jsonl", lambda lines: [*lines, {"peak_tflops": "x"}])
    assert run.events() == before
    rewrite(run.path / "events.jsonl", lambda lines: [*lines, {"event": "stop", "why": "x", "step": 10**400}])
    assert run.events() == before


def test_a_run_whose_checkpoints_are_all_undone_by_a_rewind_is_neither_loaded_nor_started_again(
    run: RunFolder, recipe: Recipe, tokens: TokenSet
) -> None:
    rewind = {"event": "rewind", "tokens": 7_168, "asked": {}, "earlier_rewinds": []}
    rewind |= Rewind(to_tokens=1, skip_from=0, skip_to=0).document()
    rewrite(run.path / "events.jsonl", lambda lines: [*lines, rewind])
    before = files(run.path)
    for read in (lambda: train(recipe, tokens, run.path), lambda: load_run(run.path)):
        with pytest.raises(
            InputError, match=r"undone by a rewind, according to events.jsonl: tokens-.*7168.*; restore one from"
        ):
            read()
    assert files(run.path) == before


def test_metrics_without_their_values_do_not_end_a_run(run: RunFolder, recipe: Recipe, tokens: TokenSet) -> None:
    rewrite(run.path / "metrics.jsonl", lambda lines: [{"step": line["step"], "tflops": "x"} for line in lines])
    assert train(recipe, tokens, run.path).finished
    assert train(recipe, tokens, run.path).finished


def test_a_folder_with_the_name_of_a_temporary_file_is_left_alone(
    run: RunFolder, recipe: Recipe, tokens: TokenSet, tmp_path: Path
) -> None:
    for folder in (run.path, tmp_path / "new"):
        (folder / ".recipe.toml.y.tmp").mkdir(parents=True)
    assert train(recipe, tokens, run.path).finished
    assert (run.path / ".recipe.toml.y.tmp").is_dir()
    with pytest.raises(InputError, match="is not empty and holds no recipe"):
        train(recipe, tokens, tmp_path / "new")


@pytest.mark.long
def test_checkpoints_of_another_run_are_refused(
    run: RunFolder, recipe: Recipe, tokens: TokenSet, tmp_path: Path
) -> None:
    other = recipe.replace({"hyperparameters.lr": 0.02})
    train(other, tokens, tmp_path / "other")
    shutil.copytree(run.path, tmp_path / "copy")
    shutil.rmtree(run.checkpoints)
    shutil.copytree(tmp_path / "other" / "checkpoints", run.checkpoints)
    rewind = ManualRewind(10_240)
    for name in ("events.jsonl", "metrics.jsonl"):  # each alone knows its run
        before = files(run.path)
        for read in (
            lambda: train(recipe, tokens, run.path),
            lambda: train(recipe, tokens, run.path, rewind=rewind),
            lambda: load_run(run.path),
        ):
            with pytest.raises(InputError, match=rf"{name} and .*checkpoints belong to different runs; restore"):
                read()
        assert "belong to different runs" in read_run(run.path).gaps
        assert files(run.path) == before
        (run.path / name).unlink()
    assert train(recipe, tokens, tmp_path / "copy").finished  # a copy of the whole folder is the same run


def test_the_folder_of_a_run_may_have_a_line_break_in_its_name(
    recipe: Recipe, tokens: TokenSet, tmp_path: Path
) -> None:
    assert train(recipe, tokens, tmp_path / "a\n5").finished


def test_two_new_runs_do_not_share_a_folder_of_checkpoints(recipe: Recipe, tokens: TokenSet, tmp_path: Path) -> None:
    first, second = RunFolder(tmp_path / "first"), RunFolder(tmp_path / "second")
    other, elsewhere = recipe.replace({"hyperparameters.lr": 0.002}), tmp_path / "elsewhere"
    elsewhere.mkdir()
    for run, each in ((first, recipe), (second, other)):
        run.path.mkdir()
        write_recipe(each, run.recipe_file)
        run.checkpoints.symlink_to(elsewhere)

    def on_step(step: Step) -> None:
        if step.step == 20:
            with pytest.raises(InputError, match=f"is a link to the checkpoints of {first.path};"):
                train(other, tokens, second.path)
            # As if both had begun at once.
            (elsewhere / ".run").write_text(f"{second.path}\n{second.path.stat().st_ino}")

    with pytest.raises(InputError, match=f"is a link to the checkpoints of {second.path};"):
        train(recipe, tokens, first.path, on_step=on_step)


def ctrl_c(step: Step) -> None:
    """Press Ctrl-C, which another program repeats at once."""
    if step.step == 5:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)


@pytest.fixture
def handler() -> Iterator[Any]:
    """Python's handler of Ctrl-C, also where the tests run in the background, which ignores Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield signal.default_int_handler
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_in_python_saves_the_run_first(
    recipe: Recipe, tokens: TokenSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, handler: Any
) -> None:
    run = RunFolder(tmp_path / "run")
    told = pytest.warns(UserWarning, match=r"run: stopped at 1,\d+ tokens, saved; the same call resumes the run")
    with told, pytest.raises(KeyboardInterrupt):
        train(recipe, tokens, run.path, on_step=ctrl_c)
    assert signal.getsignal(signal.SIGINT) == handler
    assert run.events()[-1]["event"] == "stop"
    assert tokens_of(checkpoints(run.checkpoints)[-1]) in {1_280, 1_536}  # the step that was under way may be read
    monkeypatch.setattr("leaven.training.trainer.AGAIN_AFTER", -1.0)  # later
    with pytest.raises(KeyboardInterrupt):  # the second one does not wait
        train(recipe, tokens, run.path, on_step=lambda step: [signal.raise_signal(signal.SIGINT) for _ in "12"])
    assert run.events()[-1]["event"] != "stop"


def test_ctrl_c_stops_a_run_whose_signal_handler_raises_nothing(
    recipe: Recipe, tokens: TokenSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a notebook cell with await, whose handler cancels a task."""
    seen: list[int] = []

    def cancel(number: int, frame: FrameType | None) -> None:
        seen.append(number)

    before = signal.signal(signal.SIGINT, cancel)
    try:
        with pytest.warns(UserWarning, match="saved; the same call resumes the run"):
            assert not train(recipe, tokens, tmp_path / "run", on_step=ctrl_c).finished
        # Without a warning: the caller has asked for the stop, as the command line does.
        assert not train(recipe, tokens, tmp_path / "caller", on_step=ctrl_c, stop=lambda: bool(seen[2:])).finished
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(seen) == 4


def test_a_second_run_with_dropout_in_the_same_process_is_refused(
    recipe: Recipe, tokens: TokenSet, tmp_path: Path
) -> None:
    recipe, refusals = recipe.replace({"model.dropout": 0.1}), list[str]()

    def other(step: object) -> None:
        with pytest.raises(InputError, match="another run of this process trains with dropout") as refused:
            train(recipe, tokens, tmp_path / "other")
        refusals.append(str(refused.value))

    def on_step(step: object) -> None:
        thread = threading.Thread(target=other, args=(step,))
        thread.start()
        thread.join()

    train(recipe, tokens, tmp_path / "run", on_step=on_step, stop=lambda: bool(refusals))
    assert refusals
    assert not (tmp_path / "other").exists()
    assert train(recipe, tokens, tmp_path / "run").finished


def test_a_run_in_another_thread_leaves_ctrl_c_to_the_main_thread(
    recipe: Recipe, tokens: TokenSet, tmp_path: Path
) -> None:
    handlers, results = [], []
    thread = threading.Thread(
        target=lambda: results.append(
            train(
                recipe,
                tokens,
                tmp_path / "run",
                on_step=lambda step: handlers.append(signal.getsignal(signal.SIGINT)),
                stop=lambda: len(handlers) > 2,
            )
        )
    )
    thread.start()
    thread.join()
    assert set(handlers) == {signal.getsignal(signal.SIGINT)}
    assert [result.finished for result in results] == [False]


def test_a_run_goes_on_if_a_folder_above_it_is_renamed(
    recipe: Recipe, tokens: TokenSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").mkdir()
    monkeypatch.chdir(tmp_path / "a")

    def on_step(step: Step) -> None:
        if step.step == 20:
            (tmp_path / "a").rename(tmp_path / "b")

    assert train(recipe, tokens, Path("run"), on_step=on_step).finished


@pytest.mark.long
@pytest.mark.parametrize("harm", [moved, shutil.rmtree])
def test_checkpoints_that_the_user_removes_do_not_stop_later_ones(
    recipe: Recipe, tokens: TokenSet, tmp_path: Path, harm: Callable[[Path], None]
) -> None:
    run = RunFolder(tmp_path / "run")

    def on_step(step: Step) -> None:
        if step.step == 20:
            while any(path.name.endswith(".tmp") for path in run.checkpoints.iterdir()):
                time.sleep(0.01)
            harm(run.checkpoints)

    assert train(recipe, tokens, run.path, on_step=on_step).finished
    assert checkpoints(run.checkpoints)[-1].name == f"tokens-{recipe.data.tokens:015d}"


def test_checkpoints_are_not_saved_in_the_place_of_a_folder_that_is_away(
    recipe: Recipe, tokens: TokenSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if its disk had been unmounted, and mounted again while the run waits at its end."""
    run, seen, claim = RunFolder(tmp_path / "run"), list[str](), RunFolder.claim_checkpoints

    def on_another_disk(self: RunFolder) -> None:
        claim(self)
        self._claimed = -1

    monkeypatch.setattr(RunFolder, "claim_checkpoints", on_another_disk)

    def on_step(step: Step) -> None:
        if step.step == 20:
            run.checkpoints.rename(tmp_path / "away")
            run.checkpoints.mkdir()

    def on_event(event: str, values: dict[str, Any]) -> None:
        seen.append(event)
        if event == "waits":
            assert checkpoints(run.checkpoints) == []
            run.checkpoints.rmdir()
            (tmp_path / "away").rename(run.checkpoints)

    assert train(recipe, tokens, run.path, on_step=on_step, on_event=on_event).finished
    assert seen.count("waits") == 1
    assert "checkpoint_failed" in seen
    assert checkpoints(run.checkpoints)[-1].name == f"tokens-{recipe.data.tokens:015d}"


@pytest.mark.parametrize("error", ["ESHUTDOWN", "EHOSTDOWN", "ECONNABORTED"])
def test_a_network_disk_that_is_away_at_the_end_is_waited_for(
    recipe: Recipe, tokens: TokenSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: str
) -> None:
    short, sync, seen = recipe.replace({"data.tokens": 1_024}), storage.sync_file, list[str]()
    monkeypatch.setattr("leaven.training.trainer.SHORT_PAUSE", 0)

    def fails(path: Path) -> None:
        if "1024" in path.parent.name and "waits" not in seen:
            raise OSError(number := getattr(errno, error), os.strerror(number))
        sync(path)

    monkeypatch.setattr(checkpoint, "sync_file", fails)
    assert train(short, tokens, tmp_path, on_event=lambda event, values: seen.append(event)).finished
    assert seen.count("waits") == 1


def test_a_call_in_python_warns_once_that_it_waits(
    recipe: Recipe, tokens: TokenSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("leaven.training.trainer.SHORT_PAUSE", 0)
    write, failed = checkpoint.write_checkpoint, list[int]()

    def full(folder: Path, saved: Checkpoint, *more: Any) -> Path:
        if saved.progress.tokens and len(failed) < 4:
            failed.append(1)
            raise checkpoint.NotSaved(os.strerror(errno.ENOSPC))
        return write(folder, saved, *more)

    monkeypatch.setattr(checkpoint, "write_checkpoint", full)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("default")
        assert train(recipe.replace({"data.tokens": 1_024}), tokens, tmp_path).finished
    not_saved, waits = (str(each.message) for each in seen)
    assert not_saved.startswith(f"{tmp_path}: the checkpoint at 1.02 k tokens is not saved: No space left")
    assert waits.startswith(
        f"{tmp_path}: the run is done, but its last checkpoint or log lines cannot be written yet"
    )


def test_a_newer_checkpoint_that_a_network_disk_shows_late_changes_nothing(
    run: RunFolder, recipe: Recipe, tokens: TokenSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    newest, before = checkpoints(run.checkpoints)[-1], files(run.path)

    def early(*arguments: Any, **more: Any) -> Any:
        newest.rename(tmp_path / "not yet")
        try:
            return checkpoint.read_checkpoint(*arguments, **more)
        finally:
            (tmp_path / "not yet").rename(newest)

    with monkeypatch.context() as patched:
        patched.setattr("leaven.training.trainer.read_checkpoint", early)
        with pytest.raises(InputError, match="appeared after the checkpoints were listed"):
            train(recipe, tokens, run.path)
    assert files(run.path) == before


def test_a_copy_with_a_link_does_not_change_the_checkpoints_of_the_original(
    run: RunFolder, recipe: Recipe, tokens: TokenSet, tmp_path: Path
) -> None:
    train(recipe, tokens, run.path)
    elsewhere, copy = tmp_path / "elsewhere", RunFolder(tmp_path / "copy")
    run.checkpoints.rename(elsewhere)
    run.checkpoints.symlink_to(elsewhere)
    assert train(recipe, tokens, run.path).finished
    shutil.copytree(run.path, copy.path, symlinks=True)
    before = files(elsewhere)
    for rewind in (None, ManualRewind(9_216)):
        with refused(f"is a link to the checkpoints of {run.path}; if no", f"if {copy.path} is a copy of another"):
            train(recipe, tokens, copy.path, rewind=rewind)
    assert files(elsewhere) == before
    copy.checkpoints.unlink()
    shutil.copytree(elsewhere, copy.checkpoints)
    assert train(recipe, tokens, copy.path, rewind=ManualRewind(9_216)).finished
    assert files(elsewhere) == before
    moved = run.path.rename(tmp_path / "moved")
    with pytest.raises(InputError, match=rf"{run.path}, which may have been moved; if no .* type: echo > \S*$"):
        train(recipe, tokens, moved, rewind=ManualRewind(9_216))
    (elsewhere / ".run").write_text("\n")  # as the message says
    assert train(recipe, tokens, moved, rewind=ManualRewind(9_216)).finished


def test_a_link_to_checkpoints_of_an_unknown_run_is_not_rewound(
    run: RunFolder, recipe: Recipe, tokens: TokenSet, tmp_path: Path
) -> None:
    """The checkpoints were moved with ``mv run/checkpoints/* elsewhere``, which leaves .run behind."""
    elsewhere, copy, lower = tmp_path / "elsewhere", tmp_path / "copy", recipe.replace({"hyperparameters.lr": 0.002})
    run.checkpoints.rename(elsewhere)
    (elsewhere / ".run").unlink()
    run.checkpoints.symlink_to(elsewhere)
    shutil.copytree(run.path, copy, symlinks=True)
    before = files(elsewhere)
    with refused("is a link to checkpoints without .run, the file that names their run; if no other run or study"):
        train(lower, tokens, copy, rewind=ManualRewind(6_144))
    assert files(elsewhere) == before
    (elsewhere / ".run").write_text("\n")  # as the message says
    train(lower, tokens, copy, rewind=ManualRewind(6_144), stop=lambda: True)
    assert files(elsewhere) != before


def test_checkpoints_whose_disk_was_full_at_the_start_are_not_saved_in_the_place_of_a_folder_that_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, content: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    run = RunFolder(tmp_path)
    RunFolder(tmp_path).claim_checkpoints()
    monkeypatch.setattr(storage, "write", full)
    (run.checkpoints / ".run").write_bytes(os.fsencode(tmp_path / "before") + b"\n")
    run.claim_checkpoints()
    assert (run.checkpoints / ".run").exists()
    run.require_claimed()
    run.checkpoints.rename(tmp_path / "away")
    run.checkpoints.symlink_to("/proc")  # another disk
    with pytest.raises(OSError, match="mount the disk of this folder again"):
        run.require_claimed()


def test_a_link_to_missing_checkpoints_is_named(
    run: RunFolder, recipe: Recipe, tokens: TokenSet, tmp_path: Path
) -> None:
    shutil.rmtree(run.checkpoints)
    for path in (run.events_file, run.metrics_file, run.plan_file):
        path.unlink()
    run.checkpoints.symlink_to(tmp_path / "missing")
    before = files(run.path)
    with refused(f"{run.checkpoints} is a link to {tmp_path / 'missing'}, which is missing (is its disk mounted?)"):
        train(recipe, tokens, run.path)
    assert files(run.path) == before


def test_a_lock_file_that_is_removed_is_made_again(recipe: Recipe, tokens: TokenSet, tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")

    def on_step(step: Step) -> None:
        if step.step == 3:
            (run.path / ".lock").unlink()
        if step.step == 5:
            with pytest.raises(InputError, match="is in use by another process"), RunFolder(run.path).locked():
                pass

    assert train(recipe.replace({"data.tokens": 2_048}), tokens, run.path, on_step=on_step).finished


@pytest.mark.long
@pytest.mark.parametrize(("tokens_to", "lr"), [(8_192, 0.002), (9_216, 0.002), (9_216, 0.01)])
def test_files_of_one_copy_beside_the_checkpoints_of_another_are_refused(
    run: RunFolder, recipe: Recipe, tokens: TokenSet, tmp_path: Path, tokens_to: int, lr: float
) -> None:
    """The copies are rewound to different places, or with different values of the recipe."""
    train(recipe, tokens, run.path)
    other = RunFolder(tmp_path / "other")
    shutil.copytree(run.path, other.path)
    changed = recipe.replace({"hyperparameters.lr": lr})
    train(recipe.replace({"hyperparameters.lr": 0.004}), tokens, run.path, rewind=ManualRewind(9_216))
    train(changed, tokens, other.path, rewind=ManualRewind(tokens_to))
    for name in ("events.jsonl", "metrics.jsonl", "recipe.toml", "plan.json"):
        shutil.copy(other.path / name, run.path)
    before = files(run.path)
    for read in (lambda: train(changed, tokens, run.path), lambda: load_run(run.path)):
        with pytest.raises(InputError, match="belong to different copies of a run|was changed after the checkpoint"):
            read()
    assert files(run.path) == before


def test_a_finish_beside_the_checkpoints_of_a_rewound_copy_is_named(
    run: RunFolder, recipe: Recipe, tokens: TokenSet, tmp_path: Path
) -> None:
    train(recipe, tokens, run.path)
    shutil.copytree(run.path, tmp_path / "copy")
    train(recipe, tokens, tmp_path / "copy", rewind=ManualRewind(9_216, 256))
    shutil.copytree(tmp_path / "copy" / "checkpoints", run.checkpoints, dirs_exist_ok=True)
    told: list[str] = []
    train(recipe, tokens, run.path, on_event=lambda event, values: told.append(f"{event} {values['file']}"))
    assert told == ["finished_file_changed events.jsonl"]
    assert "events.jsonl is not as it was when the run finished: " in read_run(run.path).gaps
    loaded = load_run(run.path)
    assert "events.jsonl is not as it was when the run finished: " in str(loaded.changed)
    assert not loaded.events


def test_the_finish_of_another_run_does_not_end_a_run(
    run: RunFolder, recipe: Recipe, tokens: TokenSet, tmp_path: Path
) -> None:
    train(recipe, tokens, tmp_path / "other")
    shutil.copy(tmp_path / "other" / "events.jsonl", run.path)
    with pytest.raises(InputError, match=r"events.jsonl and .*metrics.jsonl belong to different runs"):
        train(recipe, tokens, run.path)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "change", "why"),
    [
        ("metrics.jsonl", lambda lines: lines[:-4], "36 lines instead of 40"),
        ("metrics.jsonl", lambda lines: [], "0 lines instead of 40"),
        ("metrics.jsonl", lambda lines: [*lines, lines[-1] | {"loss": 1.0}], "41 lines instead of 40"),
        ("events.jsonl", lambda lines: lines[-1:], r"1 lines instead of \d+"),
    ],
)
def test_files_that_were_changed_after_the_end_of_a_run_are_reported(
    run: RunFolder, recipe: Recipe, tokens: TokenSet, name: str, change: "Change", why: str
) -> None:
    result = train(recipe, tokens, run.path)
    told: list[tuple[str, dict[str, Any]]] = []
    train(recipe, tokens, run.path, on_event=lambda event, values: told.append((event, values)))
    assert told == []
    assert not read_run(run.path).gaps
    rewrite(run.path / name, change)
    again = train(recipe, tokens, run.path, on_event=lambda event, values: told.append((event, values)))
    assert (again.loss, again.finished) == (result.loss, True)
    ((event, values),) = told
    assert (event, values["file"]) == ("finished_file_changed", name)
    assert re.fullmatch(why, values["why"])
    if name == "events.jsonl" or len(losses(run.path)) > 0:  # a report needs a step
        assert read_run(run.path).gaps == f"{run.path / name} is not as it was when the run finished: {values['why']}"


@pytest.mark.parametrize("tail", [b"", b'{"ev', b'{"event": "odd"}'])
def test_events_after_the_checkpoint_and_a_torn_line_are_no_change(
    run: RunFolder, recipe: Recipe, tokens: TokenSet, tail: bytes
) -> None:
    with (run.path / "events.jsonl").open("ab") as file:
        file.write(tail)
    train(recipe, tokens, run.path, stop=lambda: len(losses(run.path)) > 30)
    train(recipe, tokens, run.path)
    assert "file_changed" not in {event["event"] for event in run.events()}


def changed_step(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    lines[6]["step"] = 97
    return lines


def lower_step(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    lines[-1]["step"] = 2
    return lines


def changed_loss(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    lines[6]["loss"] += 1e-9
    return lines


Change = Callable[[list[dict[str, Any]]], list[dict[str, Any]]]
HARM: list[tuple[Change | None, str]] = [
    (lambda lines: lines[:9], "9 lines instead of {step}"),
    (lambda lines: lines[:3] + lines[5:7] + lines[8:], "{left} lines instead of {step}"),
    (lambda lines: [], "0 lines instead of {step}"),
    (None, "0 lines instead of {step}"),  # no file
    (changed_step, "its first {step} lines have been changed"),
    (lower_step, "its first {step} lines have been changed"),
    (changed_loss, "its first {step} lines have been changed"),
]


@pytest.mark.long
@pytest.mark.parametrize(("change", "why"), HARM)
def test_metrics_that_were_changed_are_reported_once(
    run: RunFolder,
    recipe: Recipe,
    tokens: TokenSet,
    expected: list[float],
    change: Change | None,
    why: str,
) -> None:
    file = run.path / "metrics.jsonl"
    step = run.metrics()[-1]["step"]
    if change is None:
        file.unlink()
    else:
        rewrite(file, change)
    intact = {line["step"]: line for line in run.metrics() if line["step"] <= step}
    train(recipe, tokens, run.path, stop=lambda: len(losses(run.path)) > len(intact) + 2)
    train(recipe, tokens, run.path)
    (event,) = [event for event in run.events() if event["event"] == "file_changed"]
    assert event["why"] == why.format(step=step, left=step - 3)
    assert (event["step"], event["tokens"]) == (step, 256 * step)
    there = {line["step"]: line["loss"] for line in run.metrics()}
    # No other line is removed: all earlier steps are still there, and the steps after the checkpoint.
    assert there.keys() == {*intact, *range(step + 1, 41)}
    assert run.metrics()[-1]["step"] == 40
    assert all(there[number] == loss for number, loss in enumerate(expected, 1) if number > step)


@pytest.mark.parametrize(
    ("name", "change", "why"),
    [
        ("metrics.jsonl", lambda lines: lines[:3] + lines[6:], r"\d+ lines instead of \d+"),
        ("metrics.jsonl", changed_loss, r"its first \d+ lines have been changed"),
        ("events.jsonl", lambda lines: lines[:3], r"3 lines instead of \d+"),
    ],
)
def test_lines_that_were_lost_before_a_resume_are_a_fault_of_the_finished_run(
    run: RunFolder, recipe: Recipe, tokens: TokenSet, name: str, change: Change, why: str
) -> None:
    """The digests in the finish event are those of the changed file."""
    rewrite(run.path / name, change)
    assert train(recipe, tokens, run.path).finished
    (fault,) = faults(run)
    assert re.fullmatch(f"{run.path / name} is not as the run wrote it: {why} \\(found at .* k tokens\\)", fault)
    assert read_run(run.path).gaps == load_run(run.path).changed == fault


@pytest.mark.parametrize("diverged", [False, True])
def test_missing_steps_that_no_digest_covers_are_named(run: RunFolder, diverged: bool) -> None:
    if diverged:  # it has trained beyond its newest checkpoint
        shutil.rmtree(checkpoints(run.checkpoints)[-1])
    else:
        shutil.rmtree(run.checkpoints)
    assert not list(faults(run))
    gap = run.metrics()[-1]["step"] - 1
    rewrite(run.metrics_file, lambda lines: [line for line in lines if line["step"] != gap])
    assert list(faults(run)) == [f"{run.metrics_file} is not as the run wrote it: step {gap} is missing"]
    lines = run.metrics_file.read_bytes().splitlines(keepends=True)
    run.metrics_file.write_bytes(b"".join([*lines[: gap - 2], b"damaged\n", *lines[gap - 1 :]]))
    assert list(faults(run)) == [
        f"{run.metrics_file} is not as the run wrote it: 2 steps are missing, the first is step {gap - 1}"
    ]
    run.metrics_file.write_bytes(b"".join([*lines[: gap - 1], b"damaged\n", *lines[gap - 1 :]]))
    assert not list(faults(run))  # the report counts damaged lines


def test_an_undone_checkpoint_that_a_backup_restores_is_no_fault(
    run: RunFolder, recipe: Recipe, tokens: TokenSet, tmp_path: Path
) -> None:
    newest = checkpoints(run.checkpoints)[-1]
    back = ManualRewind(5_120, 512)
    shutil.copytree(newest, tmp_path / newest.name)
    train(recipe, tokens, run.path, rewind=back, stop=lambda: 24 <= run.metrics()[-1]["step"] < 28)
    shutil.copytree(tmp_path / newest.name, newest)
    assert tokens_of(checkpoints(run.checkpoints)[-2]) < tokens_of(newest)
    assert not list(faults(run))


def test_missing_steps_that_a_rewind_repeats_are_no_fault(run: RunFolder, recipe: Recipe, tokens: TokenSet) -> None:
    back, step = tokens_of(checkpoints(run.checkpoints)[-2]), run.metrics()[-1]["step"]
    rewrite(run.metrics_file, lambda lines: [line for line in lines if line["tokens"] != back + 256])
    assert not train(recipe, tokens, run.path, stop=lambda: True).finished
    assert [fault.rpartition(": ")[2] for fault in faults(run)] == [f"{step - 1} lines instead of {step}"]
    assert train(recipe, tokens, run.path, rewind=ManualRewind(back)).finished
    assert not list(faults(run))


@pytest.mark.long
@pytest.mark.parametrize("step", [20, 24])
def test_changed_values_that_a_rewind_repeats_are_no_fault(
    run: RunFolder, recipe: Recipe, tokens: TokenSet, step: int
) -> None:
    """A rewind compares the lines that it keeps with its checkpoint."""
    assert {tokens_of(path) // 256 for path in checkpoints(run.checkpoints)} >= {20, 24}

    def change(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
        lines[21]["loss"] += 1e-9  # of step 22
        return lines

    rewrite(run.metrics_file, change)
    assert not train(recipe, tokens, run.path, stop=lambda: True).finished
    assert "lines have been changed" in next(faults(run))
    assert train(recipe, tokens, run.path, rewind=ManualRewind(256 * step)).finished
    found = [fault.rpartition(": ")[2] for fault in faults(run)]
    assert found == ([] if step == 20 else ["its first 24 lines have been changed (found at 6.14 k tokens)"])


def test_lines_after_the_checkpoint_are_dropped_without_a_word(
    run: RunFolder, recipe: Recipe, tokens: TokenSet, expected: list[float]
) -> None:
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 30}\n{"step": 2}\n{"st')
    train(recipe, tokens, run.path)
    assert "file_changed" not in {event["event"] for event in run.events()}
    assert losses(run.path) == expected


def test_lines_that_a_full_disk_kept_in_memory_belong_to_the_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    run = RunFolder(tmp_path)
    written, lines = RunLines(run), [{"step": step, "loss": 1.0} for step in range(1, 7)]
    for line in lines[:2]:
        written.record(line)
    with monkeypatch.context() as patched:
        patched.setattr(storage, "append", fails)
        for line in lines[2:4]:
            written.record(line)
        at_four = written.metrics_digest()
        for line in lines[4:]:
            written.record(line)
    assert written.truncate_metrics(4, at_four) is None  # a rollback
    written.record({"step": 5, "loss": 2.0})
    assert [line["step"] for line in run.metrics()] == [1, 2, 3, 4, 5]
    assert RunLines(RunFolder(tmp_path)).truncate_metrics(4, at_four) is None
    assert RunFolder(tmp_path).metrics() == lines[:4]


def replaced(folder: Path) -> None:
    """Move the folder away. Another command starts a run in a new folder of the same name."""
    moved(folder)
    folder.mkdir()
    (folder / ".lock").touch()


@pytest.mark.long
@pytest.mark.parametrize("harm", [moved, replaced])
@pytest.mark.parametrize("at", [20, 40])
def test_a_run_whose_folder_is_deleted_ends_and_writes_nothing(
    recipe: Recipe, tokens: TokenSet, tmp_path: Path, harm: Callable[[Path], None], at: int
) -> None:
    folder = tmp_path / "run"

    def on_step(step: Step) -> None:
        if step.step == at:
            while tokens_of(checkpoints(folder / "checkpoints")[-1]) < (at - 4) * 256:  # it is still being written
                time.sleep(0.01)
            harm(folder)

    with pytest.raises(InputError, match=r"run folder .* was deleted or moved while it was used; bring it back"):
        train(recipe, tokens, folder, on_step=on_step)
    assert not any(path.is_file() and path.name != ".lock" for path in folder.rglob("*"))


@pytest.mark.long
def test_a_shard_truncated_under_a_running_training_ends_it_with_one_line(recipe: Recipe, tmp_path: Path) -> None:
    def prepared() -> TokenSet:
        return prepare(recipe.data, recipe.model.vocab_size, tmp_path / "cache")

    def harm(step: Step) -> None:
        if step.step == 20:
            (file,) = (tmp_path / "cache" / "tokens").glob("*/train-00000.bin")
            os.truncate(file, 1_000)

    run = RunFolder(tmp_path / "run")
    with pytest.raises(InputError, match=r"train-00000.bin has been truncated to 1,000 of .*; remove it and run"):
        train(recipe, prepared(), run.path, on_step=harm)
    # What was trained since the last checkpoint is saved.
    assert read_state(checkpoints(run.checkpoints)[-1])["step"] == run.metrics()[-1]["step"] >= 20
    again = prepared()
    assert again.notes  # rebuilt
    train(recipe, again, run.path)
    train(recipe, again, tmp_path / "whole")
    assert losses(run.path) == losses(tmp_path / "whole")


@pytest.mark.parametrize("content", ["", "{}", "another"])
def test_a_tokenizer_that_did_not_make_the_token_ids_is_refused_before_the_first_checkpoint(
    recipe: Recipe, tokens: TokenSet, tmp_path: Path, content: str
) -> None:
    run, ours = RunFolder(tmp_path), tokens.tokenizer_path
    assert ours is not None
    write_recipe(recipe, run.recipe_file)
    words = ours.read_text()
    run.tokenizer_file.write_text(words.replace('"a"', '"\\u00e4"', 1) if content == "another" else content)
    before = files(tmp_path)
    with pytest.raises(InputError, match=r"tokenizer.json is not the tokenizer of the text; remove it"):
        train(recipe, tokens, tmp_path)
    assert files(tmp_path) == before
    run.tokenizer_file.write_text(json.dumps(json.loads(words)))  # as another version of tokenizers writes it
    require_tokenizer(run, ours)


def test_an_error_of_training_is_not_hidden_by_one_of_closing(
    recipe: Recipe, tokens: TokenSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stops(*_: Any) -> None:
        raise RuntimeError("out of memory")

    def fails(*_: Any) -> None:
        raise OSError(5, "Input/output error")

    closed: list[str] = []
    monkeypatch.setattr("leaven.training.checkpoint.checkpoints_to_keep", fails)
    monkeypatch.setattr("leaven.training.spikes.SpikeGuard.close", lambda guard: closed.append("guard"))
    with pytest.raises(RuntimeError, match="out of memory"):
        train(recipe, tokens, tmp_path / "run", on_step=stops)
    assert closed == ["guard"]


def test_the_tokenizer_of_another_run_is_refused(run: RunFolder, recipe: Recipe, tokens: TokenSet) -> None:
    before = run.tokenizer_file.read_text()
    run.tokenizer_file.write_text(before.replace('"a"', '"\\u00e4"', 1))
    for read in (
        lambda: train(recipe, tokens, run.path),
        lambda: train(recipe, tokens, run.path, rewind=ManualRewind(6_144)),
        lambda: load_run(run.path),
    ):
        with pytest.raises(InputError, match=r"tokenizer.json is not the tokenizer with which the run was trained"):
            read()
    assert "tokenizer.json is not the tokenizer" in read_run(run.path).gaps
    run.tokenizer_file.write_text(json.dumps(json.loads(before)))  # the same tokenizer, formatted in another way
    assert load_run(run.path).tokens
    assert read_run(run.path).gaps == ""
    assert train(recipe, tokens, run.path).finished


@pytest.mark.parametrize("name", ["tokenizer.json", "metrics.jsonl"])
def test_a_report_of_a_run_names_a_file_that_cannot_be_read(
    recipe: Recipe, tokens: TokenSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    run, read = RunFolder(tmp_path / "run"), storage.read
    train(recipe.replace({"data.tokens": 1_024}), tokens, run.path)
    view = read_run(run.path)

    def fails(path: Path, *rest: Any) -> bytes:
        if path.name == name:
            raise OSError(5, "Input/output error")
        return read(path, *rest)

    monkeypatch.setattr(storage, "read", fails)
    assert f"{name}: cannot be read: Input/output error" in view.gaps


@pytest.mark.parametrize(
    ("path", "value"), [("model.norm_eps", 0.01), ("hyperparameters.lr", 0.5), ("stability.keep", 7)]
)
def test_a_recipe_that_was_changed_after_the_checkpoint_is_refused(
    run: RunFolder, recipe: Recipe, tokens: TokenSet, path: str, value: float
) -> None:
    changed = recipe.replace({path: value})
    write_recipe(changed, run.recipe_file)
    before = files(run.path)
    why = rf"recipe.toml was changed after the checkpoint: {path} was .*, is now {value}; change it back"
    for read in (
        lambda: train(changed, tokens, run.path),
        lambda: train(changed, tokens, run.path, rewind=ManualRewind(6_144)),
        lambda: load_run(run.path),
    ):
        with pytest.raises(InputError, match=why):
            read()
    assert re.search(why, read_run(run.path).gaps)
    assert files(run.path) == before
    write_recipe(recipe, run.recipe_file)
    assert read_run(run.path).gaps == ""


def test_a_recipe_that_was_edited_after_a_rewind_is_refused(
    run: RunFolder, recipe: Recipe, tokens: TokenSet, tmp_path: Path
) -> None:
    slower = recipe.replace({"hyperparameters.lr": 0.005})
    train(slower, tokens, run.path, rewind=ManualRewind(6_144))
    write_recipe(recipe.replace({"hyperparameters.lr": 0.5}), run.recipe_file)
    why = r"recipe.toml was changed after the checkpoint: hyperparameters.lr was 0.005, is now 0.5; change it back"
    for read in (lambda: train(slower, tokens, run.path), lambda: load_run(run.path)):
        with pytest.raises(InputError, match=why):
            read()
    assert re.search(why, read_run(run.path).gaps)
    write_recipe(recipe, run.recipe_file)  # as after a kill between the event and the file
    assert read_run(run.path).recipe.hyperparameters.lr == 0.005
    assert read_run(run.path).gaps == ""
    export_run(load_run(run.path), tmp_path / "exported")
    assert "lr = 0.005" in (tmp_path / "exported" / "README.md").read_text()


def test_a_recipe_changed_by_a_rewind_or_a_moved_text_belongs_to_the_checkpoints(
    run: RunFolder, recipe: Recipe, tokens: TokenSet
) -> None:
    moved_text = recipe.replace({"data.source": "/mnt/elsewhere/*.txt"})
    write_recipe(moved_text, run.recipe_file)
    assert load_run(run.path).recipe == moved_text
    slower = moved_text.replace({"hyperparameters.lr": 0.005})
    tokens = replace(tokens, data=slower.data)

    def kill(step: Step) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(slower, tokens, run.path, rewind=ManualRewind(6_144), on_step=kill)
    assert load_run(run.path).recipe.hyperparameters.lr == 0.005
    assert read_run(run.path).gaps == ""
    assert train(slower, tokens, run.path).finished
    assert load_run(run.path).recipe.hyperparameters.lr == 0.005


def seal(
    checkpoint: Path,
    change: "Callable[[dict[str, Any]], object]" = lambda state: None,
) -> None:
    """Write the digests of a checkpoint again, after its files were changed, in the format of several processes."""
    state = read_state(checkpoint)
    state["files"] = {name: _fingerprint(checkpoint / name) for name in state["files"]}
    tensors: dict[str, Any] = {}
    for kind in ("model", "optimizer"):
        read = load_file(checkpoint / f"{kind}.safetensors")
        tensors[kind] = {
            name: {
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "shape": list(tensor.shape),
                "blocks": [[f"{kind}.safetensors", [0] * tensor.dim(), list(tensor.shape)]],
            }
            for name, tensor in read.items()
        }
    state |= {"format": 3, "tensors": tensors}
    change(state)
    (checkpoint / "state.json").write_text(json.dumps(sealed(state)))


EMBEDDING = ("tensors", "model", "embedding.weight")


@pytest.mark.long
@pytest.mark.parametrize(
    ("at", "value"),
    [
        ((*EMBEDDING, "blocks", 0, 0), "/dev/zero"),
        ((*EMBEDDING, "blocks", 0, 0), "pipe"),
        ((*EMBEDDING, "blocks"), []),
        ((*EMBEDDING, "dtype"), "load"),
        (EMBEDDING, {"dtype": "float32", "shape": [10**7, 10**4], "blocks": []}),
        (("files", ".."), {"bytes": 1, "blake2b": ""}),
        (("files", "../../metrics.jsonl"), {"bytes": 0, "blake2b": ""}),
        (("seconds",), "x"),
        (("state", "run"), []),
    ],
)
def test_a_sealed_checkpoint_with_a_wrong_state_is_damaged(
    run: RunFolder, recipe: Recipe, tokens: TokenSet, at: tuple[Any, ...], value: Any
) -> None:
    newest = checkpoints(run.checkpoints)[-1]
    if hasattr(os, "mkfifo"):
        os.mkfifo(newest / "pipe")
    seal(newest)
    loaded = load_run(run.path)
    assert loaded.tokens == tokens_of(newest)
    newest.rename(newest.with_name("gone"))
    assert len(dict(loaded.weights)) == len(loaded.weights)  # they stay readable, as those of one process do
    newest.with_name("gone").rename(newest)
    seal(newest, lambda state: reduce(getitem, at[:-1], state).__setitem__(at[-1], value))
    require_damaged(newest, run, recipe, tokens)


def require_damaged(newest: Path, run: RunFolder, recipe: Recipe, tokens: TokenSet) -> None:
    assert load_run(run.path).skipped == {newest.name: "damaged"}
    assert train(recipe, tokens, run.path, stop=lambda: True).tokens > tokens_of(checkpoints(run.checkpoints)[0])
    assert newest.with_name(f"damaged-{newest.name}").exists()


NAME = "embedding.weight"


@pytest.mark.parametrize(
    ("kind", "name", "change", "format_of_many"),
    [
        ("model", NAME, None, False),
        ("model", NAME, None, True),
        ("model", "more", torch.clone, True),
        ("model", NAME, lambda tensor: tensor[:7].contiguous(), False),
        ("model", NAME, torch.Tensor.long, True),
        ("model", NAME, lambda tensor: tensor.to(torch.float8_e4m3fn), False),
        ("optimizer", f"exp_avg.{NAME}", None, True),
    ],
    ids=["missing", "missing, of many", "extra", "smaller", "integers", "eight bits", "no moment"],
)
def test_a_sealed_checkpoint_with_other_tensors_is_damaged(
    run: RunFolder,
    recipe: Recipe,
    tokens: TokenSet,
    kind: str,
    name: str,
    change: Callable[[torch.Tensor], torch.Tensor] | None,
    format_of_many: bool,
) -> None:
    """A tensor is changed or, without ``change``, removed."""
    newest = checkpoints(run.checkpoints)[-1]
    file = newest / f"{kind}.safetensors"
    tensors = load_file(file)
    tensor = tensors.pop(name, torch.zeros(3))
    if change is not None:
        tensors[name] = change(tensor)
    save_file(tensors, file)
    seal(newest, (lambda state: None) if format_of_many else (lambda state: state.pop("tensors")))
    require_damaged(newest, run, recipe, tokens)


def test_a_call_in_python_warns_of_start_weights_as_the_command_does(
    tiny: Recipe, tokens: TokenSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("leaven.training.trainer.start_cautions", lambda of, *_: [f"zeros in {of.start.folder}"])
    recipe = tiny.replace({"start.weights": str(tmp_path)})
    with pytest.warns(UserWarning, match=f"zeros in {tmp_path}") as seen, pytest.raises(InputError):
        train(recipe, tokens, tmp_path / "run")
    assert seen[0].filename == __file__


def test_checkpoints_of_another_run_in_place_of_a_runs_own_are_not_written_to(tmp_path: Path) -> None:
    """As if a disk was mounted there while the run trains. A copied folder names the run that it was copied from."""
    run, other = RunFolder(tmp_path / "run"), RunFolder(tmp_path / "other")
    for each in (run, other):
        each.checkpoints.mkdir(parents=True)
    (run.checkpoints / OWNER).write_text(f"{tmp_path}/copied\n")
    run.claim_checkpoints()
    other.claim_checkpoints()
    run.require_claimed()
    (run.checkpoints / OWNER).write_text(f"{tmp_path}/copied\n")  # could not be replaced on a full disk
    run.require_claimed()
    shutil.copy(other.checkpoints / OWNER, run.checkpoints / OWNER)
    with pytest.raises(OSError, match=f"these are the checkpoints of {other.path}; mount the disk of this run again"):
        run.require_claimed()
