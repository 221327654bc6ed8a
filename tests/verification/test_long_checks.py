"""Test the verdicts of the checks transfer and equivalence on known losses, and how runs are saved and resumed."""

import errno
import json
import math
import os
import random
import sys
from collections.abc import Callable, Sequence
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import pytest
from tests.verification.families import SMALL, WIDE, pretend

from leaven import storage
from leaven.data.tokens import prepare
from leaven.documents.checks import CheckDocument
from leaven.errors import InputError
from leaven.recipe.recipe import Recipe
from leaven.training.outcome import Outcome
from leaven.verification import runs
from leaven.verification.equivalence import equivalence
from leaven.verification.model_instance import RunSetting
from leaven.verification.recipe_family import RecipeFamily, RecipeTrial, recipe_models
from leaven.verification.runs import RunStore
from leaven.verification.sweep import sweep

GRID = [0.0025, 0.005, 0.01, 0.02, 0.04]
pytestmark = pytest.mark.usefixtures("in_this_process")


def transfer(
    recipe: Recipe, loss: Callable[[Recipe], float], lrs: Sequence[float] = GRID, seeds: int = 3
) -> CheckDocument:
    return sweep("transfer", RecipeFamily(recipe), "lr", (SMALL, WIDE), lrs, store=pretend(loss), seeds=seeds)[0]


def parabola(recipe: Recipe, best: float) -> float:
    return 3.0 + 0.1 * math.log2(recipe.hyperparameters.lr / best) ** 2 + 0.001 * recipe.data.seed


def test_a_best_lr_that_falls_with_width_fails(tiny: Recipe) -> None:
    (row,) = transfer(tiny, lambda recipe: parabola(recipe, 0.01 * 16 / recipe.model.d_model)).rows
    assert (row.passed, row.undecided) == (False, False)
    assert (row.slope, row.parts["regret"]) == (pytest.approx(-1), pytest.approx(0.1))


def test_larger_models_are_not_trained_if_the_base_has_its_optimum_outside_the_grid(tiny: Recipe) -> None:
    widths = set()

    def loss(recipe: Recipe) -> float:
        widths.add(recipe.model.d_model)
        return parabola(recipe, 0.5)

    (row,) = transfer(tiny, loss).rows
    assert (row.passed, row.undecided, widths) == (False, True, {16})
    assert row.note.endswith("is at the edge of the grid; give --lrs around 0.64")


def noisy(shift: float, noise: float, curvature: float) -> Callable[[Recipe], float]:
    """Return parabolas whose best lr moves by ``shift`` octaves at width 32, with noise in each run."""

    def loss(recipe: Recipe) -> float:
        best = 0.01 * 2.0 ** (shift * (recipe.model.d_model > 16))
        octaves = math.log2(recipe.hyperparameters.lr / best)
        own = random.Random(f"{recipe.data.seed} {recipe.model.d_model} {recipe.hyperparameters.lr}").gauss(0, noise)
        return 3.0 + curvature * octaves**2 + own

    return loss


def test_noise_larger_than_the_difference_does_not_pass(tiny: Recipe) -> None:
    # The noise is far larger than the effect of two octaves, so three seeds cannot decide.
    for number in range(2):
        moved = tiny.replace({"data.seed": 100 * number})
        assert not transfer(moved, noisy(-2, 0.07, 0.02), [0.00125, *GRID]).passed
    for seeds in (1, 3):
        assert transfer(tiny, noisy(0, 0.07, 0.02), seeds=seeds).rows[0].undecided


def test_a_flat_minimum_may_shift(tiny: Recipe) -> None:
    (row,) = transfer(tiny, noisy(-1, 0.0005, 0.004)).rows
    assert row.passed
    assert row.parts["high"] < -0.5
    assert row.parts["regret, high"] <= 0.01


@pytest.mark.parametrize("bad", [math.nan, math.inf, 99.0])
def test_a_value_with_a_diverged_run_is_left_out(bad: float, tiny: Recipe) -> None:
    """One of three runs at the last value has diverged, so the grid is extended halfway to this value.

    A loss of 99 is above the divergence limit.
    """

    def loss(recipe: Recipe) -> float:
        diverges = recipe.hyperparameters.lr >= GRID[3] and recipe.data.seed == 1
        return bad if diverges else noisy(0, 0.0001, 0.1)(recipe)

    verdict = transfer(tiny, loss, GRID[:4])
    assert verdict.passed
    assert verdict.settings["left out"] == ["16x2, lr 0.02", "32x2, lr 0.02"]
    (lrs,) = {tuple(curve.x) for curve in verdict.curves if curve.quantity == "loss"}
    assert lrs == pytest.approx([0.0025, 0.005, 0.01, 0.01 * 2**0.5])


def test_too_few_values_without_a_diverged_run_are_undecided(tiny: Recipe) -> None:
    (row,) = transfer(tiny, lambda r: math.inf if r.hyperparameters.lr > 0.006 else 3.0).rows
    assert row.undecided
    assert row.note.endswith("an optimum needs three; give --lrs below 0.0025")


def test_a_best_value_that_costs_too_much_fails_also_at_the_edge(tiny: Recipe) -> None:
    # At width 32, the best lr is 2^-8 of that at width 16, further than the grid is extended.
    (row,) = transfer(tiny, noisy(-8, 0.001, 0.03), [0.005, 0.01, 0.02]).rows
    assert (row.passed, row.undecided) == (False, False)
    assert row.note.endswith("nats above its minimum, and the best lr of 32x2 is at or beyond the edge of the grid")
    (row,) = transfer(tiny, noisy(-8, 0.00001, 0.00005), [0.005, 0.01, 0.02]).rows
    assert row.undecided  # the cost is small within the grid, and may be small beyond it
    assert "give --lrs around" in row.note


def test_an_impossible_lr_is_an_error(tiny: Recipe) -> None:
    with pytest.raises(InputError, match="lr 20: .*erases a weight"):
        transfer(tiny, lambda recipe: 3.0, [1, 5, 20])


def moves(recipe: Recipe) -> bool:
    return recipe.batch.tokens != recipe.base.batch_tokens


@pytest.mark.parametrize(
    ("with_rule", "without", "passed"),
    [(0.0, 0.3, True), (0.3, 0.3, False), (0.0, 0.0, False)],
    ids=["right rule", "wrong rule", "no effect without the rule either"],
)
def test_equivalence(tiny: Recipe, with_rule: float, without: float, passed: bool) -> None:
    def loss(recipe: Recipe) -> float:
        off = recipe.batch.tokens != tiny.batch.tokens
        return 3.0 + 0.001 * recipe.data.seed + off * (with_rule if moves(recipe) else without)

    assert equivalence(RecipeFamily(long(tiny)), SMALL, [0.25, 4], pretend(loss)).passed is passed


def long(recipe: Recipe) -> Recipe:
    return recipe.replace({"data.tokens": 200 * 4 * recipe.batch.tokens})


def test_a_fault_does_not_widen_its_own_limit(tiny: Recipe) -> None:
    # At batch x 4, the loss is one nat too high on average, and differs between seeds.
    def loss(recipe: Recipe) -> float:
        off = recipe.batch.tokens > tiny.batch.tokens
        return 3.0 + 0.001 * recipe.data.seed + off * (2.0 if recipe.data.seed % 3 == 1 else 0.5)

    row, _ = equivalence(RecipeFamily(long(tiny)), SMALL, [0.25, 4], pretend(loss)).rows
    assert row.passed is False
    assert row.limit is not None
    assert row.limit < 0.1


def test_too_few_steps_are_refused(tiny: Recipe, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has 10 steps.*204,800 tokens"):
        equivalence(RecipeFamily(tiny), SMALL, [0.25, 4], RunStore(tmp_path))


@pytest.fixture
def trials(tiny: Recipe) -> list[RecipeTrial]:
    """Return three short runs that differ in the seed."""
    short = tiny.replace({"data.tokens": 512, "schedule.warmup_tokens": 128})
    return [RecipeTrial(short.replace({"data.seed": seed})) for seed in range(3)]


@pytest.mark.parametrize("replaced", [False, True])
def test_a_check_whose_folder_is_deleted_ends_with_one_line(
    trials: list[RecipeTrial], tmp_path: Path, replaced: bool
) -> None:
    folder = tmp_path / "check"

    def on_run(done: int, total: int) -> None:
        if done == 1:  # as when a disk is unmounted, which leaves the folder that it was mounted on
            folder.rename(tmp_path / "moved")
            if replaced:
                folder.mkdir()

    with pytest.raises(InputError, match=r"check was deleted or moved while"), RunStore(folder, 1, on_run) as store:
        store.run(trials)
    assert (list(folder.iterdir()) if replaced else folder.exists()) in ([], False)


def test_finished_runs_are_not_repeated(trials: list[RecipeTrial], tmp_path: Path) -> None:
    counted: list[tuple[int, int]] = []
    with RunStore(tmp_path, 1) as store:
        store.run(trials[:1])
    with (tmp_path / runs.LINES).open("a") as file:
        file.write('{"key": "torn')
    with RunStore(tmp_path, 1, lambda done, total: counted.append((done, total))) as store:
        outcome = store.run(trials)
    assert (counted[0], counted[-1]) == ((1, 3), (3, 3))
    kept = (tmp_path / runs.LINES).read_text()
    recipe = trials[0].recipe
    with RunStore(tmp_path, 1) as store:
        again = store.run([*trials, RecipeTrial(recipe.replace({"name": "other"}))])
    assert [again(trial) for trial in trials] == [outcome(trial) for trial in trials]
    assert (tmp_path / runs.LINES).read_text() == kept
    with RunStore(tmp_path, 1, stop=lambda: True) as store, pytest.raises(runs.ChecksStopped, match="3 of 4"):
        store.run([*trials, RecipeTrial(recipe.replace({"data.seed": 9}))])


def test_runs_on_another_text_are_refused(trials: list[RecipeTrial], tmp_path: Path) -> None:
    recipe = trials[0].recipe
    own = RecipeTrial(recipe, text=prepare(recipe.data, recipe.model.vocab_size).fingerprint)
    with RunStore(tmp_path, 1) as store:
        store.run([own])
    before = (tmp_path / runs.LINES).read_bytes()
    with RunStore(tmp_path, 1) as store, pytest.raises(InputError, match="has runs on another text: the files of"):
        store.run([RecipeTrial(recipe, text="other")])
    with RunStore(tmp_path, 1) as store:
        store.run([own])
    assert (tmp_path / runs.LINES).read_bytes() == before


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EACCES])
def test_finished_runs_wait_for_room_on_the_disk(
    trials: list[RecipeTrial], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    """Or for a permission, such as a Kerberos ticket that has expired."""
    append, tries, notes = storage.append_json, list[int](), list[str]()

    def full(path: Path, line: Any) -> None:
        tries.append(1)
        if 2 <= len(tries) <= 4:
            raise OSError(error, os.strerror(error))
        append(path, line)

    monkeypatch.setattr(storage, "append_json", full)
    with RunStore(tmp_path, 1, note=notes.append) as store:
        store.run(trials)
    assert len((tmp_path / runs.LINES).read_text().splitlines()) == 3
    (note,) = notes
    assert note.startswith(f"caution: {tmp_path / runs.LINES}: {os.strerror(error)}; finished runs stay")


@pytest.mark.skipif(sys.platform != "linux", reason="finds the name of a file in /proc")
def test_a_line_whose_flush_failed_is_written_once(
    trials: list[RecipeTrial], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries, fsync = list[int](), os.fsync

    def fails(descriptor: int) -> None:
        if Path(f"/proc/self/fd/{descriptor}").resolve().name == runs.LINES:
            tries.append(descriptor)
            if len(tries) < 3:
                raise OSError(errno.EIO, "Input/output error")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fails)
    with RunStore(tmp_path, 1) as store:
        store.run(trials[:1])
    assert len(tries) >= 3
    assert len((tmp_path / runs.LINES).read_text().splitlines()) == 1


def test_finished_runs_are_saved_if_another_fails(
    trials: list[RecipeTrial], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append, away = storage.append_json, [True]

    def stale(path: Path, line: Any) -> None:
        if away:
            raise OSError(errno.ESTALE, "Stale file handle")
        append(path, line)

    def dies(trial: RecipeTrial) -> Outcome:
        away.clear()  # the disk is back
        raise BrokenProcessPool

    monkeypatch.setattr(storage, "append_json", stale)
    first, last = sorted(trials[:2], key=lambda trial: (trial.cost, trial.key), reverse=True)
    run = RecipeTrial.run
    monkeypatch.setattr(RecipeTrial, "run", lambda trial: dies(trial) if trial.key == last.key else run(trial))
    with pytest.raises(BrokenProcessPool), RunStore(tmp_path, 1) as store:
        store.run([first, last])
    assert [json.loads(line)["key"] for line in (tmp_path / runs.LINES).read_text().splitlines()] == [first.key]


@pytest.mark.parametrize("harm", ["\0", '"loss": 1', '"loss": null, "x": ', '"loss": 1e999, "loss": "x", "y": '])
def test_runs_that_were_changed_are_named_and_trained_again(
    trials: list[RecipeTrial], tmp_path: Path, harm: str
) -> None:
    lines, notes = tmp_path / runs.LINES, list[str]()
    with RunStore(tmp_path, 1) as store:
        first = store.run(trials)
    *kept, last = lines.read_text().splitlines(keepends=True)
    lines.write_text("".join([*kept, last.replace('"loss": ', harm)]))
    for _ in range(2):
        with RunStore(tmp_path, 1, note=notes.append) as store:
            again = store.run(trials)
            assert [again(trial).loss for trial in trials] == [first(trial).loss for trial in trials]
    assert notes == [f"caution: lines of {lines} are damaged or changed and do not count: 1"]


def test_a_check_does_not_write_into_the_folder_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").touch()
    with pytest.raises(InputError, match="is the folder of a run"), RunStore(tmp_path, 1) as store:
        store.run([])
    assert [path.name for path in tmp_path.iterdir()] == ["events.jsonl"]


@pytest.mark.parametrize("text", ["a note without its newline", '{"run": 1}\nnot whole'])
def test_a_check_does_not_append_to_text_of_something_else(tmp_path: Path, text: str) -> None:
    (tmp_path / runs.LINES).write_text(text)
    with pytest.raises(InputError, match="has lines that are no runs of a check"), RunStore(tmp_path, 1) as store:
        store.run([])
    assert (tmp_path / runs.LINES).read_text() == text


@pytest.mark.parametrize("content", [None, "", "\0" * 4_000, "junk\n"])
def test_a_check_that_has_lost_its_runs_does_not_start_again(
    trials: list[RecipeTrial], tmp_path: Path, content: str | None
) -> None:
    (tmp_path / "check.json").write_text("{}")
    if content is not None:
        (tmp_path / runs.LINES).write_text(content)
    with (
        pytest.raises(InputError, match=r"runs.jsonl has no readable runs; bring this file back"),
        RunStore(tmp_path, 1) as store,
    ):
        store.run(trials)
    assert not (tmp_path / runs.LINES).exists() or (tmp_path / runs.LINES).read_text() == content


def test_runs_of_a_check_train_on_the_text_with_which_it_began(tiny: Recipe, corpus: Path) -> None:
    text = prepare(tiny.data, tiny.model.vocab_size).fingerprint
    family = recipe_models(tiny, prepare)
    assert (family.text, family.trial(RunSetting(SMALL, 0.04)).text) == (text, text)
    with pytest.raises(InputError, match="the text, or the weights of .start., have changed since"):
        RecipeTrial(tiny, text="another").run()


def test_a_swept_lr_moves_that_of_muon_by_the_same_factor(tiny: Recipe) -> None:
    muon = {"match": "spectral", "lr": 0.02}
    family = RecipeFamily(tiny.replace({"hyperparameters.optimizer": "muon", "hyperparameters.muon": muon}))
    trial = family.trial(RunSetting(SMALL, 0.04)).recipe.hyperparameters  # the recipe has 0.01
    assert (trial.lr, trial.of_matrices("lr")) == (0.04, pytest.approx(0.08))
    assert family.trial(RunSetting(SMALL, 0.04)).key != RecipeFamily(tiny).trial(RunSetting(SMALL, 0.04)).key
