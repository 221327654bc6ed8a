"""Transfer and equivalence: runs are kept and not run twice; the verdict follows from the losses."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from leaven.recipe.errors import InputError
from leaven.recipe.recipe import Recipe
from leaven.training.worker import Outcome
from leaven.verification import equivalence as equivalence_module
from leaven.verification import runs
from leaven.verification import transfer as transfer_module
from leaven.verification.equivalence import equivalence
from leaven.verification.transfer import transfer

GRID = [0.0025, 0.005, 0.01, 0.02, 0.04]


def pretend(monkeypatch: pytest.MonkeyPatch, loss: Callable[[Recipe], float]) -> None:
    def run_all(recipes, folder, workers, **more):  # type: ignore[no-untyped-def]
        return lambda recipe: Outcome(loss(recipe), False, recipe.data.tokens, 1.0, 0)

    monkeypatch.setattr(transfer_module, "run_all", run_all)
    monkeypatch.setattr(equivalence_module, "run_all", run_all)


def bowl(recipe: Recipe, best: float) -> float:
    return 3.0 + 0.1 * math.log2(recipe.hyperparameters.lr / best) ** 2 + 0.001 * recipe.data.seed


def test_valleys_above_each_other_pass(tiny: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, lambda recipe: bowl(recipe, 0.01))
    verdict = transfer(tiny, [(16, 2), (32, 2)], GRID, tmp_path)
    assert verdict.passed
    assert all(row.parts["shift"] == pytest.approx(0, abs=1e-9) for row in verdict.rows)


def test_a_best_lr_that_falls_with_width_fails(tiny: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, lambda recipe: bowl(recipe, 0.01 * 16 / recipe.model.d_model))
    verdict = transfer(tiny, [(16, 2), (32, 2)], GRID, tmp_path)
    octaves, regret = verdict.rows
    assert not verdict.passed
    assert octaves.slope == pytest.approx(-1)
    assert regret.slope == pytest.approx(0.1)


def test_a_grid_that_misses_the_optimum_is_no_pass(
    tiny: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, lambda recipe: bowl(recipe, 0.5))
    verdict = transfer(tiny, [(16, 2), (32, 2)], GRID, tmp_path)
    assert not verdict.passed
    assert "edge of the grid" in verdict.rows[0].note


def test_one_scale_or_two_lrs_are_refused(tiny: Recipe, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="two scales"):
        transfer(tiny, [(16, 2)], GRID, tmp_path)
    with pytest.raises(InputError, match="three lrs"):
        transfer(tiny, [(16, 2), (32, 2)], GRID[:2], tmp_path)


def moves(recipe: Recipe) -> bool:
    return recipe.batch.tokens != recipe.base.batch_tokens


@pytest.mark.parametrize(
    ("with_rule", "without", "passed"),
    [(0.0, 0.3, True), (0.3, 0.3, False), (0.0, 0.0, False)],
    ids=["as it should", "the rule does not hold", "nothing to see"],
)
def test_equivalence(
    tiny: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_rule: float, without: float, passed: bool
) -> None:
    def loss(recipe: Recipe) -> float:
        off = recipe.batch.tokens != tiny.batch.tokens
        return 3.0 + 0.001 * recipe.data.seed + off * (with_rule if moves(recipe) else without)

    pretend(monkeypatch, loss)
    assert equivalence(tiny, [0.25, 4], tmp_path).passed is passed


def test_what_has_run_is_not_run_again(tiny: Recipe, tmp_path: Path) -> None:
    short = tiny.replace({"data.tokens": 1024, "schedule.warmup_tokens": 256})
    counted: list[tuple[int, int]] = []
    seeds = [short.replace({"data.seed": seed}) for seed in range(3)]
    runs.run_all(seeds[:1], tmp_path, 1)
    with (tmp_path / runs.LINES).open("a") as file:
        file.write('{"key": "torn')
    outcome = runs.run_all(seeds, tmp_path, 2, on_run=lambda done, total: counted.append((done, total)))
    assert counted[0] == (1, 3)
    assert counted[-1] == (3, 3)
    kept = (tmp_path / runs.LINES).read_text()
    again = runs.run_all([*seeds, short.replace({"name": "other"})], tmp_path, 2)
    assert [again(recipe) for recipe in seeds] == [outcome(recipe) for recipe in seeds]
    assert (tmp_path / runs.LINES).read_text() == kept
    with pytest.raises(runs.Stopped, match="3 of 4"):
        runs.run_all([*seeds, short.replace({"data.seed": 9})], tmp_path, 1, stop=lambda: True)
