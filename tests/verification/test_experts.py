"""Checks of a recipe with experts: the right rule passes, and faults of the router are found."""

from typing import Any

import pytest
from tests.verification.families import PROXY, WIDTHS, Fault, PlantedModels, failed, fault, times, width

from leaven.recipe.files import read_recipe
from leaven.verification.batches import synthetic
from leaven.verification.coordinates import CoordinateCheck
from leaven.verification.gradients import GradientCheck
from leaven.verification.small_models import calibrated

pytestmark = pytest.mark.usefixtures("one_thread")


def check(of: type[CoordinateCheck | GradientCheck], planted: Fault | None = None) -> Any:
    small = read_recipe(PROXY, ["model.vocab_size=256", "model.seq_len=32"])
    recipe = small.replace({"model.experts": {"number": 8, "active": 2, "d_expert": 64, "shared": 1}})
    models = PlantedModels(calibrated(recipe, 64, 2, of.start), synthetic(256, 32, 8), fault=planted)
    return of(models, WIDTHS, (2,), seeds=1, **({"steps": 6} if of is GradientCheck else {})).run()


@pytest.mark.parametrize("of", [CoordinateCheck, GradientCheck])
def test_the_right_rule_passes(of: type[CoordinateCheck | GradientCheck]) -> None:
    verdict = check(of)
    assert verdict.passed, failed(verdict)


def test_the_gradient_of_a_router_falls_less_than_the_width_grows() -> None:
    rows = {row.module: row for row in check(GradientCheck).rows if row.axis == "width"}
    row = rows["mlp.router"]
    assert row.passed
    assert "the gradient of a router may fall with the width by up to 0.5 more" in row.note
    assert not rows["mlp.experts.in"].note
    assert row.parts["eps"] == pytest.approx(0.0)
    assert -0.65 < (row.parts["start"] or 0.0) < -0.15


@pytest.mark.parametrize(
    ("of", "planted"),
    [
        (CoordinateCheck, fault("mlp.router", lr=times(width))),
        (GradientCheck, fault("mlp.router", eps=times(lambda recipe: 1 / width(recipe)))),
        (GradientCheck, fault("mlp.router", eps=times(width))),
    ],
    ids=["lr", "eps falls", "eps grows"],
)
def test_faults_of_a_router_are_found(of: type[CoordinateCheck | GradientCheck], planted: Fault) -> None:
    assert ("mlp.router", "width") in failed(check(of, planted))
