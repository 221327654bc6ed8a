"""Test the checks duration, batch, decay and init on losses with a known optimum."""

import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tests.verification.families import SMALL, WIDE, pretend

from leaven.documents.checks import CheckDocument, MeasuredRow
from leaven.recipe.recipe import Recipe
from leaven.verification.duration import duration, measured_exponent
from leaven.verification.recipe_family import RecipeFamily
from leaven.verification.sweep import sweep

LRS = [0.0025, 0.005, 0.01, 0.02, 0.04]


def losses(tiny: Recipe, exponent: float, batch_cost: float, noise: float = 0.0005) -> Callable[[Recipe], float]:
    """Return losses whose best lr is proportional to tokens^exponent; twice the tokens gain 0.1 nats."""

    def loss(recipe: Recipe) -> float:
        longer, larger = recipe.data.tokens / tiny.data.tokens, recipe.batch.tokens / tiny.batch.tokens
        ruled = recipe.data.tokens / recipe.base.tokens
        lr = recipe.hyperparameters.lr * ruled**-recipe.scaling.token_exponent
        octaves = math.log2(lr / (0.01 * longer**exponent))
        own = random.Random(f"{recipe.data.seed} {longer} {larger} {recipe.hyperparameters.lr}").gauss(0, noise)
        return 3 + 0.05 * octaves**2 - 0.1 * math.log2(longer) + batch_cost * math.log2(larger) + own

    return loss


def value(verdict: CheckDocument, start: str) -> MeasuredRow:
    return next(each for each in verdict.measured if each.name.startswith(start))


def test_duration_measures_the_exponent_and_its_interval(tiny: Recipe, tmp_path: Path) -> None:
    store = pretend(losses(tiny, -0.2, 0.01))
    verdict = duration(RecipeFamily(tiny), SMALL, [1, 2, 4], LRS, store)
    found = value(verdict, "exponent")
    assert found.value == pytest.approx(-0.2, abs=0.02)
    assert found.expected == -0.5
    assert found.note == "the rule's exponent is OUTSIDE the 95% interval"
    assert not verdict.passed  # at tokens x4, the lr by the rule is 0.6 octaves too low, which costs 0.018 nats
    changes = measured_exponent(verdict, tmp_path)
    assert changes is not None
    low, high = changes["scaling.token_exponent_interval"]  # type: ignore[misc]
    assert low < 0.2 < high
    # For each doubling of the tokens, the lr is 0.3 octaves too low under the rule, and 0.2 too high if unchanged.
    assert value(verdict, "tokens x4, nothing moved").value == pytest.approx(0.05 * (0.4**2 - 0.6**2), abs=0.002)
    assert value(verdict, "tokens x4, lr left alone").value == pytest.approx(0.05 * (0.4**2 - 0.6**2), abs=0.002)


@pytest.mark.parametrize(
    ("cost", "noise", "note"),
    [(0.01, 0.0005, "limited by noise"), (0.09, 0.0005, "limited by optimisation"), (0.0585, 0.02, "undecided")],
)
def test_a_right_exponent_passes_and_twice_the_batch_shows_what_limits_the_base(
    tiny: Recipe, cost: float, noise: float, note: str
) -> None:
    # At the critical batch, twice the batch costs 0.585 times the gain of twice the tokens, which is 0.1 here.
    verdict = duration(RecipeFamily(tiny), SMALL, [2, 4], LRS, pretend(losses(tiny, -0.5, cost, noise)))
    assert verdict.passed == (noise < 0.01)  # with much noise, the regret may be above its limit
    assert all(row.passed or row.undecided for row in verdict.rows)
    assert value(verdict, "exponent").note == "the rule's exponent is inside the 95% interval"
    found = value(verdict, "cost of doubling the batch")
    assert found.value == pytest.approx(cost / 0.1, abs=1.5 * noise / 0.1)
    assert found.note.startswith(note)


@pytest.mark.parametrize("section", ["batch", "data"], ids=["twice the batch", "longer runs"])
def test_runs_that_diverge_are_named(tiny: Recipe, section: str) -> None:
    def loss(recipe: Recipe) -> float:
        larger = getattr(recipe, section).tokens > getattr(tiny, section).tokens
        return math.inf if larger else losses(tiny, -0.5, 0.01)(recipe)

    verdict = duration(RecipeFamily(tiny), SMALL, [2], LRS, pretend(loss))
    cost = value(verdict, "cost of doubling the batch")
    assert cost.value is None
    assert cost.note == ("twice the batch diverges" if section == "batch" else "too many runs diverged")
    arms = {row.note for row in verdict.measured if row.name.startswith("tokens x2, ")}
    assert (arms == {"a run diverged"}) == (section == "data")


def test_a_grid_is_extended_where_the_optimum_lies_outside(tiny: Recipe) -> None:
    store = pretend(lambda recipe: losses(tiny, 0, 0)(recipe) + 0.0 * recipe.data.seed)
    verdict = duration(RecipeFamily(tiny), SMALL, [4], [0.00125, 0.0025, 0.005], store)
    assert not any(row.undecided for row in verdict.rows)
    grids = {curve.module: curve.x for curve in verdict.curves if curve.quantity == "loss"}
    # The grid ends one step beyond the optimum: 0.01 at the base, 0.02 at x4, where the rule halves the lr.
    assert [max(grid) for grid in grids.values()] == pytest.approx([0.02, 0.04])


def test_one_seed_is_undecided(tiny: Recipe, tmp_path: Path) -> None:
    verdict = duration(RecipeFamily(tiny), SMALL, [2], LRS, pretend(losses(tiny, -0.5, 0)), seeds=1)
    assert verdict.rows[0].undecided
    assert verdict.rows[0].note.endswith("--seeds 3")
    assert measured_exponent(verdict, tmp_path) is None


def test_no_exponent_is_written_if_a_best_lr_is_at_the_edge_of_its_grid(tiny: Recipe, tmp_path: Path) -> None:
    verdict = duration(RecipeFamily(tiny), SMALL, [2], LRS, pretend(losses(tiny, 6, 0)))  # x2: 6 octaves higher
    found = value(verdict, "exponent")
    assert found.low is None
    assert found.note == "no interval: a best lr is at the edge of its grid"
    assert measured_exponent(verdict, tmp_path) is None


def test_batch_measures_its_exponent(tiny: Recipe) -> None:
    def loss(recipe: Recipe) -> float:
        larger = recipe.batch.tokens / tiny.batch.tokens
        lr = recipe.hyperparameters.lr * larger**0.5
        return 3 + 0.05 * math.log2(lr / (0.01 * larger**0.25)) ** 2 + 0.0001 * recipe.data.seed

    scales = [replace(SMALL, batch=ratio) for ratio in (1, 0.5, 2)]
    verdict, _ = sweep("batch", RecipeFamily(tiny), "lr", scales, LRS, store=pretend(loss))
    found = value(verdict, "exponent of the best lr over batch")
    assert (found.value, found.expected) == (pytest.approx(0.25), 0.5)
    assert [row.axis for row in verdict.rows] == ["batch x1 -> batch x0.5", "batch x1 -> batch x2"]


def test_decay_and_init_are_swept_in_base_coordinates(tiny: Recipe) -> None:
    def loss(recipe: Recipe) -> float:
        values, wider = recipe.hyperparameters, recipe.model.d_model / 16
        decay = math.log2(values.weight_decay / (0.1 * wider))
        return 3 + 0.02 * decay**2 + 0.1 * math.log2(values.init_std / 0.1) ** 2 + 0.0001 * recipe.data.seed

    store = pretend(loss)
    decays = [0.1 * 4.0**power for power in (-2, -1, 0, 1, 2)]
    scales = [SMALL, WIDE, replace(SMALL, tokens=4)]
    decay, _ = sweep("decay", RecipeFamily(tiny), "weight_decay", scales, decays, store=store)
    assert [row.axis for row in decay.rows] == [
        "16x2 tokens x1 -> 32x2 tokens x1",
        "16x2 tokens x1 -> 16x2 tokens x4",
    ]
    assert [row.slope for row in decay.rows] == pytest.approx([1, 0])
    assert value(decay, "exponent of the best weight decay over width").value == pytest.approx(1)
    assert value(decay, "exponent of the best weight decay over tokens").expected == pytest.approx(-0.5)
    init, _ = sweep("init", RecipeFamily(tiny), "init_std", [SMALL, WIDE], [0.05, 0.1, 0.2], store=store)
    assert init.passed


def test_a_gain_of_more_tokens_within_the_noise_is_not_divided_by(tiny: Recipe) -> None:
    verdict = duration(RecipeFamily(tiny), SMALL, [2], LRS, pretend(losses(tiny, -0.5, 0.05, 0.2)))
    found = value(verdict, "cost of doubling the batch")
    assert found.value is not None
    assert (found.low, found.high) == (None, None)
    assert found.note.startswith("no interval: more tokens may not lower the loss")
