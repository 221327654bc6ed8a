"""State that is missing is not taken for state that never was, and no copy is taken for a checkpoint."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.training.conftest import losses

from leaven.data.tokens import TokenSet
from leaven.errors import InputError
from leaven.recipe.recipe import Recipe
from leaven.training.load import load_run
from leaven.training.run_folder import RunFolder, checkpoints
from leaven.training.trainer import train


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("whole") / "run"


@pytest.fixture
def recipe(tiny: Recipe) -> Recipe:
    return tiny.replace({"stability.checkpoint_every_tokens": 1_024, "stability.keep": 3})


@pytest.fixture
def run(recipe: Recipe, tokens: TokenSet, tmp_path: Path) -> RunFolder:
    """A run that was stopped after at least 20 of its 40 steps."""
    folder = RunFolder(tmp_path / "run")
    assert not train(recipe, tokens, folder.path, stop=lambda: len(folder.metrics()) >= 20).finished
    return folder


@pytest.fixture
def expected(whole: Path, recipe: Recipe, tokens: TokenSet) -> list[float]:
    """The losses of an undisturbed run."""
    if not whole.exists():
        train(recipe, tokens, whole)
    return losses(whole)


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


def test_a_finished_run_without_checkpoints_still_has_its_result(
    run: RunFolder, recipe: Recipe, tokens: TokenSet
) -> None:
    result = train(recipe, tokens, run.path)
    shutil.rmtree(run.checkpoints)
    assert train(recipe, tokens, run.path).loss == result.loss


def test_a_run_that_was_killed_before_its_first_checkpoint_starts_again(
    run: RunFolder, recipe: Recipe, tokens: TokenSet, expected: list[float]
) -> None:
    shutil.rmtree(run.checkpoints)
    rewrite(run.path / "events.jsonl", lambda lines: [line for line in lines if line["event"] == "start"])
    rewrite(run.path / "metrics.jsonl", lambda lines: lines[:3])
    assert train(recipe, tokens, run.path).finished
    assert losses(run.path) == expected


def rewrite(path: Path, change: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]) -> None:
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
    assert (loaded.tokens, loaded.damaged) == (int(there[-1].name.rpartition("-")[2]), (copy.name,))
    assert train(recipe, tokens, run.path).finished
    assert losses(run.path) == expected
