"""A right rule passes the short checks, and they catch every planted fault."""

from dataclasses import replace
from typing import Any

import pytest
from tests.verification.families import (
    DEPTHS,
    ENDS,
    HIDDEN,
    WIDTHS,
    Fault,
    PlantedModels,
    depth,
    failed,
    family,
    fault,
    times,
    width,
    zero,
    zero_if_wide,
)

from leaven.documents.checks import CheckDocument
from leaven.recipe.recipe import Recipe
from leaven.scaling.table import ParameterRow, ParameterTable, parameter_table
from leaven.verification.coordinates import CoordinateCheck
from leaven.verification.gradients import GradientCheck
from leaven.verification.small_models import EXPERT_DEPTHS

ALPHA = 0.5
STEPS = 6  # of gradient checks with a fault; wrong exponents show at the first step


pytestmark = pytest.mark.usefixtures("one_thread")


def coordinates(
    planted: Fault | None = None,
    widths: tuple[int, ...] = WIDTHS,
    depths: tuple[int, ...] = (2,),
    **more: Any,
) -> CheckDocument:
    return CoordinateCheck(family(planted, **more), widths, depths, seeds=1).run()


def gradients(
    planted: Fault | None = None,
    widths: tuple[int, ...] = WIDTHS,
    depths: tuple[int, ...] = (2,),
    steps: int = STEPS,
    **more: Any,
) -> CheckDocument:
    of = family(planted, start=GradientCheck.start, **more)
    return GradientCheck(of, widths, depths, seeds=1, steps=steps).run()


def test_a_right_rule_passes_the_coordinate_check() -> None:
    verdict = coordinates(depths=DEPTHS)
    assert verdict.passed, failed(verdict)
    logits = next(row for row in verdict.rows if (row.module, row.axis) == ("unembedding", "width"))
    # The first logits may fall as N^-1/2: they sum N entries of order 1 with weights of std 1/N.
    assert logits.parts["start"] == pytest.approx(-0.5, abs=0.05)


def test_a_right_rule_passes_the_gradient_check() -> None:
    verdict = gradients(depths=DEPTHS, steps=10)
    assert verdict.passed, failed(verdict)
    eps = {(row.module, row.axis): row.parts["eps"] for row in verdict.rows if "eps" in row.parts}
    assert eps["embedding", "width"] == pytest.approx(-1)
    assert eps["mlp.out", "depth"] == pytest.approx(-1)
    assert eps["unembedding", "width"] == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("check", [coordinates, gradients])
def test_a_right_rule_passes_with_tied_embeddings(check: Any) -> None:
    # With a tied matrix of 1/width the stream consists of branches only, and block gradients are off by L^0.75.
    verdict = check(widths=(64,), depths=DEPTHS, tied_embeddings=True)
    assert verdict.passed, failed(verdict)


def rule_twice(row: ParameterRow, recipe: Recipe) -> ParameterRow:
    base = parameter_table(recipe.replace({"scaling.base": None}))[row.name]
    squared = {}
    for name in ("lr", "eps", "weight_decay", "init_std", "multiplier"):
        once, alone = getattr(row, name), getattr(base, name)
        squared[name] = once**2 / alone if alone else once
    return replace(row, **squared)


# GPT-2's 1/sqrt(2L) at the end of a branch, on top of the branch's multiplier.
DEPTH_IN_INIT = fault(ENDS, init_std=times(lambda r: (2 * r.model.n_layers) ** -0.5))
HIDDEN_LR = fault((*HIDDEN, "norm.a", "norm.m", "norm.q", "norm.k"), lr=times(lambda r: depth(r) ** -0.5))
READOUT_LR = fault("unembedding", lr=lambda _, recipe: recipe.hyperparameters.lr)


@pytest.mark.parametrize(
    ("planted", "axis", "found"),
    [
        pytest.param(READOUT_LR, "width", {"unembedding"}, id="readout lr"),
        pytest.param(fault(multiplier=lambda *_: 1.0), "depth", {"residual"}, id="residual left out"),
        pytest.param(DEPTH_IN_INIT, "depth", {*ENDS}, id="depth in the init"),
        pytest.param(rule_twice, "width", {"attention.query", "mlp.in"}, id="rule twice"),
        pytest.param(HIDDEN_LR, "depth", {*ENDS}, id="lr of another alpha"),
    ],
)
def test_the_coordinate_check_names_the_fault(planted: Fault, axis: str, found: set[str]) -> None:
    sizes = ((64,), DEPTHS) if axis == "depth" else (WIDTHS, (2,))
    failing = failed(coordinates(planted, *sizes))
    assert found <= {module for module, _ in failing}
    assert {where for _, where in failing} == {axis}


def test_embedding_eps_unscaled() -> None:
    verdict = gradients(fault("embedding", eps=lambda _, recipe: recipe.hyperparameters.eps))
    assert failed(verdict).keys() == {("embedding", "width"), ("embedding", "bookkeeping")}


def test_only_the_gradient_check_sees_unscaled_weight_decay() -> None:
    unscaled = fault(weight_decay=lambda right, recipe: right and recipe.hyperparameters.weight_decay)
    failing = failed(gradients(unscaled))
    assert {axis for _, axis in failing} == {"width", "bookkeeping"}
    rows = {module: row for (module, axis), row in failing.items() if axis == "width"}
    assert {"attention.query", "mlp.out", "unembedding"} <= rows.keys()
    assert "embedding" not in rows
    assert all("lr x decay FALLS" in row.note for row in rows.values())
    assert coordinates(unscaled).passed


def test_the_standard_rule_fails() -> None:
    verdict = coordinates(depths=DEPTHS, rule="standard")
    assert {axis for _, axis in failed(verdict)} == {"width", "depth", "width at depth 8"}


def by_the_root(models: PlantedModels, recipe: Recipe) -> ParameterTable:
    return replace(parameter_table(recipe), attention_scale=recipe.model.d_head**-0.5)


@pytest.mark.parametrize("divided_by_d", [True, False])
def test_attention_divided_by_the_root_of_a_growing_head(divided_by_d: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training aligns query and key, and their product becomes of order d, so it has to be divided by d."""
    if not divided_by_d:
        monkeypatch.setattr(PlantedModels, "table", by_the_root)
    verdict = coordinates(grow_heads=True)
    assert verdict.passed is divided_by_d, failed(verdict)
    if not divided_by_d:
        assert failed(verdict).keys() == {("attention.logits", "width")}


# The branch multiplier of alpha 1, with the lrs and eps of the recipe's own alpha.
ALPHA_1 = fault(ENDS, multiplier=times(lambda recipe: depth(recipe) ** (recipe.scaling.alpha - 1)))


def test_coordinates_at_alpha_one_half() -> None:
    """The rule makes a block's own weights move as depth^(alpha-1); modules that read the stream have to be flat."""
    verdict = coordinates(None, (64,), DEPTHS, alpha=ALPHA)
    assert verdict.passed, failed(verdict)
    mixed = coordinates(ALPHA_1, (64,), DEPTHS, alpha=ALPHA)
    assert {"norm.mlp", "norm.key"} <= {module for module, _ in failed(mixed)}


def test_gradients_at_alpha_one_half() -> None:
    verdict = gradients(None, (64,), DEPTHS, alpha=ALPHA)
    assert verdict.passed, failed(verdict)
    rows = {row.module: row for row in verdict.rows}
    assert rows["mlp.out"].parts["eps"] == pytest.approx(-0.5)
    assert rows["mlp.out"].parts["decay"] == pytest.approx(-0.5)  # the published rules leave it so
    faults = failed(gradients(ALPHA_1, (64,), DEPTHS, alpha=ALPHA))
    assert {"attention.query", "attention.out", "mlp.in", "mlp.out"} <= {module for module, _ in faults}
    assert all("eps GROWS against the gradient" in row.note for row in faults.values())


# Two widths, one seed -------------------------------------------------------------------------------------------

PAIR = (64, 128)


@pytest.mark.parametrize(
    ("planted", "module"),
    [
        pytest.param(fault(lr=zero), "embedding", id="nothing is trained"),
        pytest.param(fault(lr=zero_if_wide), "embedding", id="nothing is trained when wide"),
        pytest.param(fault(HIDDEN, lr=zero), "mlp.in", id="no hidden weight is trained"),
        pytest.param(fault("norm.mlp", lr=zero), "norm.mlp", id="a gain is not trained"),
        pytest.param(fault("unembedding", lr=zero, init_std=zero), "unembedding", id="a readout of 0"),
    ],
)
def test_untrained_parameters_fail_every_check(planted: Fault, module: str) -> None:
    for verdict in (coordinates(planted, PAIR), gradients(planted, PAIR, steps=2)):
        assert not verdict.passed
        assert "never change" in failed(verdict)[module, "width"].note


def test_an_output_or_decay_of_0_at_some_sizes_fails() -> None:
    rows = failed(coordinates(fault("attention.value", init_std=zero_if_wide), PAIR))
    assert rows["attention.value", "width"].note == "start is 0 at some sizes only"
    rows = failed(gradients(fault(weight_decay=zero_if_wide), PAIR, steps=2))
    assert rows["mlp.in", "width"].note == "lr x decay is 0 at some sizes only"


def test_a_gain_lr_that_grows_with_width_fails() -> None:
    row = failed(gradients(fault("norm.mlp", lr=times(width)), PAIR, steps=2))["norm.mlp", "width"]
    assert row.undecided  # two sizes, one seed
    assert "its change GROWS with width" in row.note


def test_a_fault_only_where_width_and_depth_both_grow() -> None:
    both = fault("mlp.out", multiplier=times(lambda r: 4.0 if width(r) > 1 < depth(r) else 1.0))
    verdict = coordinates(both, (64, 256), (2, 4))
    assert {axis for _, axis in failed(verdict)} == {"width at depth 4"}
    assert verdict.fault == "residual"


MUON = {
    "spectral": [
        "hyperparameters.optimizer=muon",
        "hyperparameters.muon.match=spectral",
        "hyperparameters.muon.lr=0.02",
    ],
    "adamw_rms": ["hyperparameters.optimizer=muon"],
}
MATRICES = ("attention.", "mlp.")


@pytest.mark.parametrize("match", ["spectral", pytest.param("adamw_rms", marks=pytest.mark.slow)])
def test_a_right_rule_passes_with_muon(match: str) -> None:
    verdict = coordinates(depths=DEPTHS, overrides=MUON[match])
    assert verdict.passed, failed(verdict)
    verdict = gradients(overrides=MUON[match])
    assert verdict.passed, failed(verdict)
    judged = {(row.module, row.axis): row for row in verdict.rows}
    assert judged["mlp.in", "width"].passed  # of its decay, because Muon has no eps
    assert judged["mlp.in", "width"].parts["eps"] is None
    assert judged["mlp.in", "bookkeeping"].parts["lr x decay x steps"] == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize(
    ("match", "planted", "sizes", "found"),
    [
        ("adamw_rms", fault(MATRICES, lr=times(lambda r: width(r) ** 0.5)), (WIDTHS, (2,)), "attention.query"),
        ("adamw_rms", fault(MATRICES, lr=times(lambda r: width(r) ** -0.5)), (WIDTHS, (2,)), "attention.query"),
        ("spectral", fault(MATRICES, lr=times(lambda r: 1 / width(r))), (WIDTHS, (2,)), "attention.query"),
        ("spectral", fault(MATRICES, lr=times(lambda r: depth(r) ** -0.5)), ((64,), DEPTHS), "mlp.out"),
    ],
    ids=["lr of AdamW as it is", "lr of Adam's rule", "lr of Adam's rule, spectral", "lr of another alpha"],
)
def test_the_coordinate_check_names_a_fault_with_muon(
    match: str, planted: Fault, sizes: tuple[tuple[int, ...], tuple[int, ...]], found: str
) -> None:
    failing = failed(coordinates(planted, *sizes, overrides=MUON[match]))
    assert found in {module for module, _ in failing}
    assert "embedding" not in {module for module, _ in failing}


def test_the_gradient_check_sees_the_decay_of_muon() -> None:
    unscaled = fault("mlp.in", weight_decay=lambda _, recipe: recipe.hyperparameters.weight_decay)
    failing = failed(gradients(unscaled, overrides=MUON["adamw_rms"]))
    assert failing.keys() == {("mlp.in", "width"), ("mlp.in", "bookkeeping")}
    assert "lr x decay FALLS" in failing["mlp.in", "width"].note


EXPERTS = ["model.experts.number=4", "model.experts.active=2", "model.experts.d_expert=64"]


def test_a_right_rule_passes_with_experts() -> None:
    verdict = coordinates(depths=EXPERT_DEPTHS, overrides=EXPERTS)
    assert verdict.passed, failed(verdict)
    verdict = gradients(depths=DEPTHS, overrides=EXPERTS)
    assert verdict.passed, failed(verdict)


@pytest.mark.parametrize(
    ("check", "planted", "sizes", "module"),
    [
        (coordinates, fault("mlp.router", lr=times(lambda r: width(r) ** 0.5)), (WIDTHS, (4,)), "mlp.router"),
        (coordinates, fault("mlp.experts", lr=times(width)), (WIDTHS, (4,)), "mlp.experts"),
        (coordinates, fault("mlp.experts.out", multiplier=times(depth)), ((64,), EXPERT_DEPTHS), "residual"),
        (gradients, fault("mlp.experts", eps=times(width)), (WIDTHS, (2,)), "mlp.experts.out"),
        (gradients, fault("mlp.router", eps=times(depth)), ((64,), (2, 4)), "mlp.router"),
        (
            gradients,
            fault("mlp.router", weight_decay=times(lambda r: 1 / width(r))),
            (PAIR, (2,)),
            "mlp.router",
        ),
    ],
    ids=["router lr", "expert lr", "branch", "expert eps", "router eps", "router decay"],
)
def test_the_checks_name_a_fault_of_experts(
    check: Any, planted: Fault, sizes: tuple[tuple[int, ...], tuple[int, ...]], module: str
) -> None:
    assert module in {found for found, _ in failed(check(planted, *sizes, overrides=EXPERTS))}
