"""Parameters that never change, at all sizes or at some, fail the checks."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from tests.verification.families import failed, family

from leaven.recipe.recipe import Recipe
from leaven.recipe.shape import Role
from leaven.scaling.table import ParameterRow, ratios
from leaven.verification.coordinates import CoordinateCheck
from leaven.verification.gradients import GradientCheck


def wide(recipe: Recipe) -> bool:
    return ratios(recipe).width > 1


FAULTS: dict[str, tuple[Callable[[ParameterRow, Recipe], ParameterRow], str]] = {
    "nothing is trained": (lambda row, recipe: replace(row, lr=0.0), "embedding"),
    "nothing is trained when wide": (lambda row, recipe: replace(row, lr=0.0) if wide(recipe) else row, "embedding"),
    "no hidden weight is trained": (
        lambda row, recipe: replace(row, lr=0.0) if row.role is Role.HIDDEN_WEIGHT else row,
        "mlp.in",
    ),
    "a gain is not trained": (
        lambda row, recipe: replace(row, lr=0.0) if row.module == "norm.mlp" else row,
        "norm.mlp",
    ),
    "a readout of 0 is not trained": (
        lambda row, recipe: replace(row, lr=0.0, init_std=0.0) if row.module == "unembedding" else row,
        "unembedding",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_untrained_parameters_fail_every_check(name: str) -> None:
    fault, module = FAULTS[name]
    of = (64, 128), (2,)
    for verdict in (
        CoordinateCheck(family(fault), *of, seeds=1).run(),
        GradientCheck(family(fault, start=GradientCheck.start), *of, seeds=1, steps=2).run(),
    ):
        assert not verdict.passed
        assert "never change" in {row.module: row.note for row in failed(verdict) if row.axis == "width"}[module]


def test_an_output_or_decay_of_0_at_some_sizes_fails() -> None:
    def value(row: ParameterRow, recipe: Recipe) -> ParameterRow:
        return replace(row, init_std=0.0) if row.module == "attention.value" and wide(recipe) else row

    def undecayed(row: ParameterRow, recipe: Recipe) -> ParameterRow:
        return replace(row, weight_decay=0.0) if wide(recipe) else row

    rows = {row.module: row for row in failed(CoordinateCheck(family(value), (64, 128), (2,), seeds=1).run())}
    assert rows["attention.value"].note == "start is 0 at some sizes only"
    checked = family(undecayed, start=GradientCheck.start)
    found = {
        (row.module, row.axis): row for row in failed(GradientCheck(checked, (64, 128), (2,), seeds=1, steps=2).run())
    }
    assert found["mlp.in", "width"].note == "lr x decay is 0 at some sizes only"


def test_a_gain_lr_that_grows_with_width_fails() -> None:
    def fault(row: ParameterRow, recipe: Recipe) -> ParameterRow:
        return replace(row, lr=row.lr * ratios(recipe).width) if row.module == "norm.mlp" else row

    checked = family(fault, start=GradientCheck.start)
    found = {
        (row.module, row.axis): row for row in failed(GradientCheck(checked, (64, 128), (2,), seeds=1, steps=2).run())
    }
    row = found["norm.mlp", "width"]
    assert row.undecided  # two sizes, one seed
    assert "its change GROWS with width" in row.note


def test_a_fault_only_where_width_and_depth_both_grow() -> None:
    def fault(row: ParameterRow, recipe: Recipe) -> ParameterRow:
        both = wide(recipe) and ratios(recipe).depth > 1
        return replace(row, multiplier=4 * row.multiplier) if row.module == "mlp.out" and both else row

    verdict = CoordinateCheck(family(fault), (64, 256), (2, 4), seeds=1).run()
    assert {row.axis for row in failed(verdict)} == {"width at depth 4"}
    assert verdict.fault == "residual"
