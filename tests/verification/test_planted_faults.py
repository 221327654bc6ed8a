"""A right rule passes the short checks, and they catch every planted fault."""

from dataclasses import replace

import pytest
import torch
from tests.verification import families
from tests.verification.families import DEPTHS, WIDTHS, failed, family

from leaven.documents.checks import CheckDocument
from leaven.recipe.recipe import Recipe
from leaven.scaling.table import ParameterTable, parameter_table
from leaven.verification.coordinates import CoordinateCheck
from leaven.verification.gradients import GradientCheck
from leaven.verification.recipe_family import RecipeFamily


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def coordinate_check(of: RecipeFamily) -> CheckDocument:
    return CoordinateCheck(of, WIDTHS, DEPTHS, seeds=1).run()


STEPS = 6  # of gradient checks with a fault; wrong exponents show at the first step


def failing(verdict: CheckDocument) -> set[tuple[str, str]]:
    return {(row.module, row.axis) for row in failed(verdict)}


def test_a_right_rule_passes_the_coordinate_check():
    verdict = coordinate_check(family())
    assert verdict.passed, failed(verdict)
    logits = next(row for row in verdict.rows if (row.module, row.axis) == ("unembedding", "width"))
    # The first logits may fall as N^-1/2: they sum N entries of order 1 with weights of std 1/N.
    assert logits.parts["start"] == pytest.approx(-0.5, abs=0.05)


def test_a_right_rule_passes_the_gradient_check():
    verdict = GradientCheck(family(start=GradientCheck.start), WIDTHS, DEPTHS, seeds=1, steps=10).run()
    assert verdict.passed, failed(verdict)
    eps = {(row.module, row.axis): row.parts["eps"] for row in verdict.rows if "eps" in row.parts}
    assert eps["embedding", "width"] == pytest.approx(-1)
    assert eps["mlp.out", "depth"] == pytest.approx(-1)
    assert eps["unembedding", "width"] == pytest.approx(0, abs=1e-9)


def test_embedding_eps_unscaled():
    checked = family(families.embedding_eps_unscaled, start=GradientCheck.start)
    verdict = GradientCheck(checked, WIDTHS, (2,), seeds=1, steps=STEPS).run()
    assert failing(verdict) == {("embedding", "width"), ("embedding", "bookkeeping")}


@pytest.mark.parametrize(
    ("fault", "widths", "depths", "found"),
    [
        (families.readout_lr_unscaled, WIDTHS, (2,), {("unembedding", "width")}),
        (families.residual_left_out, (64,), DEPTHS, {("residual", "depth")}),
        (families.depth_in_the_init_as_well, (64,), DEPTHS, {("attention.out", "depth"), ("mlp.out", "depth")}),
        (families.rule_applied_twice, WIDTHS, (2,), {("attention.query", "width"), ("mlp.in", "width")}),
        (families.hidden_lr_of_alpha_one_half, (64,), DEPTHS, {("mlp.out", "depth"), ("attention.out", "depth")}),
    ],
    ids=["readout lr", "residual left out", "depth in the init", "rule twice", "lr of another alpha"],
)
def test_the_coordinate_check_names_the_fault(fault, widths, depths, found):
    verdict = CoordinateCheck(family(fault), widths, depths, seeds=1).run()
    assert found <= failing(verdict)
    assert {axis for _, axis in failing(verdict)} == {axis for _, axis in found}


def test_only_the_gradient_check_sees_unscaled_weight_decay():
    verdict = GradientCheck(
        family(families.decay_unscaled, start=GradientCheck.start), WIDTHS, (2,), seeds=1, steps=STEPS
    ).run()
    assert {axis for _, axis in failing(verdict)} == {"width", "bookkeeping"}
    rows = {row.module: row for row in failed(verdict) if row.axis == "width"}
    assert {"attention.query", "mlp.out", "unembedding"} <= rows.keys()
    assert "embedding" not in rows
    assert all("lr x decay FALLS" in row.note for row in rows.values())
    assert CoordinateCheck(family(families.decay_unscaled), WIDTHS, (2,), seeds=1).run().passed


def test_the_standard_rule_fails():
    verdict = coordinate_check(family(rule="standard"))
    assert {axis for _, axis in failing(verdict)} == {"width", "depth", "width at depth 8"}


@pytest.mark.parametrize("divided_by_d", [True, False])
def test_attention_divided_by_the_root_of_a_growing_head(divided_by_d: bool):
    """Training aligns query and key, and their product becomes of order d, so it has to be divided by d."""
    right = family(grow_heads=True)

    def by_the_root(recipe: Recipe) -> ParameterTable:
        return replace(parameter_table(recipe), attention_scale=recipe.model.d_head**-0.5)

    checked = right if divided_by_d else RecipeFamily(right.recipe, right.batches, by_the_root, grow_heads=True)
    verdict = CoordinateCheck(checked, WIDTHS, (2,), seeds=1).run()
    assert verdict.passed is divided_by_d, failed(verdict)
    if not divided_by_d:
        assert failing(verdict) == {("attention.logits", "width")}


ALPHA = 0.5


def test_coordinates_at_alpha_one_half():
    """The rule makes a block's own weights move as depth^(alpha-1); modules that read the stream have to be flat."""
    verdict = CoordinateCheck(family(alpha=ALPHA), (64,), DEPTHS, seeds=1).run()
    assert verdict.passed, failed(verdict)
    mixed = CoordinateCheck(family(families.alpha_1_multiplier, alpha=ALPHA), (64,), DEPTHS, seeds=1).run()
    assert {"norm.mlp", "norm.key"} <= {module for module, _ in failing(mixed)}


def test_gradients_at_alpha_one_half():
    right = family(start=GradientCheck.start, alpha=ALPHA)
    verdict = GradientCheck(right, (64,), DEPTHS, seeds=1, steps=STEPS).run()
    assert verdict.passed, failed(verdict)
    rows = {row.module: row for row in verdict.rows}
    assert rows["mlp.out"].parts["eps"] == pytest.approx(-0.5)
    assert rows["mlp.out"].parts["decay"] == pytest.approx(-0.5)  # the published rules leave it so
    mixed = family(families.alpha_1_multiplier, start=GradientCheck.start, alpha=ALPHA)
    faults = failed(GradientCheck(mixed, (64,), DEPTHS, seeds=1, steps=STEPS).run())
    assert {"attention.query", "attention.out", "mlp.in", "mlp.out"} <= {row.module for row in faults}
    assert all("eps GROWS against the gradient" in row.note for row in faults)
