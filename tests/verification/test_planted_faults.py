"""Test that right rules pass the checks coordinates and gradients, and that these checks find every planted fault.

The models are dense, have norms on the outputs of branches, parallel branches or experts, or are trained with Muon.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
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
from leaven.model.transformer import Block
from leaven.recipe.recipe import Recipe
from leaven.scaling.table import ParameterRow, ParameterTable, parameter_table
from leaven.verification.coordinates import CoordinateCheck
from leaven.verification.gradients import GradientCheck
from leaven.verification.small_models import EXPERT_DEPTHS

ALPHA = 0.5
OUTPUTS = ("norm.attention_out", "norm.mlp_out")
MATRICES = ("attention.", "mlp.")
Sizes = tuple[tuple[int, ...], tuple[int, ...]]  # widths and depths
WIDE: Sizes = (WIDTHS, (2,))
DEEP: Sizes = ((64,), DEPTHS)
PAIR = (64, 128)


def model(*values: str) -> tuple[str, ...]:
    return tuple(f"model.{value}" for value in values)


EXPERTS = model("experts.number=4", "experts.active=2", "experts.d_expert=64")
SHARED = (*EXPERTS, *model("experts.number=8", "experts.shared=1"))
SPECTRAL = ("hyperparameters.optimizer=muon", "hyperparameters.muon.match=spectral", "hyperparameters.muon.lr=0.02")
ADAMW_RMS = ("hyperparameters.optimizer=muon",)
OLMO = model("window=8", "norm_placement=output", "qk_norm_whole=true", "global_every=4")
GEMMA = (
    *model("window=8", "norm_placement=sandwich", "global_every=2", "activation=geglu", "qk_norm=false"),
    *model("attention_softcap=50.0", "logit_softcap=30.0"),
)
GPT_J = (
    *model("norm=layernorm", "activation=gelu", "bias=true", "attention_bias=none", "parallel_branches=true"),
    *model("rotary_fraction=0.5", "qk_norm=false"),
)

pytestmark = pytest.mark.usefixtures("one_thread")
SLOW = pytest.mark.slow  # another case has the kind of fault, or another check has the family


def check(
    of: type[CoordinateCheck | GradientCheck],
    planted: Fault | None = None,
    widths: tuple[int, ...] = WIDTHS,
    depths: tuple[int, ...] = (2,),
    steps: int = 3,  # of gradient checks; wrong exponents show at the first step
    overrides: tuple[str, ...] = (),
    **more: Any,
) -> CheckDocument:
    start = of.start_normed if any("norm_placement" in each for each in overrides) else of.start
    models = family(planted, start=start, overrides=overrides, **more)
    return of(models, widths, depths, seeds=1, **({"steps": steps} if of is GradientCheck else {})).run()


coordinates, gradients = partial(check, CoordinateCheck), partial(check, GradientCheck)
Check = Callable[..., CheckDocument]

# A family whose coordinates are compared over depth has its gradients compared over width, and the reverse.
RIGHT: dict[str, tuple[Check, dict[str, Any]]] = {
    "coordinates": (coordinates, {"depths": DEPTHS}),
    "gradients": (gradients, {"depths": DEPTHS}),
    # If the tied matrix started at 1/width, gradients inside blocks would be wrong by a factor of L^0.75.
    "coordinates, tied": (coordinates, {"widths": (64,), "depths": DEPTHS, "tied_embeddings": True}),
    "gradients, tied": (gradients, {"widths": (64,), "depths": DEPTHS, "tied_embeddings": True}),
    # A block's own weights move as depth^(alpha-1); modules that read the stream are flat.
    "coordinates, alpha": (coordinates, {"widths": (64,), "depths": DEPTHS, "alpha": ALPHA}),
    "gradients, alpha": (gradients, {"widths": (64,), "depths": DEPTHS, "alpha": ALPHA}),
    "coordinates, olmo 3": (coordinates, {"widths": (64,), "depths": DEPTHS, "overrides": OLMO}),
    "gradients, olmo 3": (gradients, {"depths": DEPTHS, "overrides": OLMO}),
    "coordinates, gemma 2": (coordinates, {"depths": DEPTHS, "overrides": GEMMA, "tied_embeddings": True}),
    "gradients, gemma 2": (gradients, {"depths": DEPTHS, "overrides": GEMMA, "tied_embeddings": True}),
    "coordinates, gpt-j": (coordinates, {"overrides": GPT_J}),
    "gradients, gpt-j": (gradients, {"widths": (64,), "depths": DEPTHS, "overrides": GPT_J}),
    "coordinates, experts": (coordinates, {"widths": (64,), "depths": EXPERT_DEPTHS, "overrides": EXPERTS}),
    "gradients, experts": (gradients, {"overrides": EXPERTS}),
    "coordinates, shared experts": (coordinates, {"overrides": SHARED}),
    "gradients, shared experts": (gradients, {"overrides": SHARED}),
    "coordinates, muon": (coordinates, {"widths": PAIR, "depths": DEPTHS, "overrides": SPECTRAL}),
    "gradients, muon": (gradients, {"overrides": SPECTRAL}),
    "coordinates, adamw_rms": (coordinates, {"depths": DEPTHS, "overrides": ADAMW_RMS}),
}


@cache
def right(name: str) -> CheckDocument:
    of, options = RIGHT[name]
    return of(**({"steps": 4} | options))


RIGHT_SLOW = {
    "coordinates, tied",
    "gradients, tied",
    "coordinates, gemma 2",
    "gradients, gemma 2",
    "coordinates, gpt-j",
}
RIGHT_SLOW |= {"coordinates, shared experts", "coordinates, adamw_rms", "gradients, experts", "gradients, gpt-j"}


@pytest.mark.long
@pytest.mark.xdist_group("right rules")  # one worker, because the next test uses what it caches
@pytest.mark.parametrize("name", [pytest.param(each, marks=[SLOW] * (each in RIGHT_SLOW)) for each in RIGHT])
def test_a_right_rule_passes(name: str) -> None:
    assert right(name).passed, failed(right(name))


def parts(name: str, module: str, axis: str) -> dict[str, float | None]:
    (row,) = (row for row in right(name).rows if (row.module, row.axis) == (module, axis))
    return row.parts


@pytest.mark.xdist_group("right rules")
def test_exponents_under_a_right_rule() -> None:
    # The first logits may fall as N^-1/2: they sum N entries of order 1 with weights of std 1/N.
    assert parts("coordinates", "unembedding", "width")["start"] == pytest.approx(-0.5, abs=0.05)
    for module, axis, exponent in (("embedding", "width", -1), ("mlp.out", "depth", -1), ("unembedding", "width", 0)):
        assert parts("gradients", module, axis)["eps"] == pytest.approx(exponent, abs=1e-9)
    alpha = parts("gradients, alpha", "mlp.out", "depth")
    assert (alpha["eps"], alpha["decay"]) == (pytest.approx(-0.5), pytest.approx(-0.5))  # as in the published rules
    for module in OUTPUTS:
        for axis in ("width", "depth"):
            norm = parts("gradients, olmo 3", module, axis)
            assert (norm["eps"], norm["start"]) == (pytest.approx(-1), pytest.approx(-1, abs=0.15))
    router = parts("gradients, shared experts", "mlp.router", "width")
    assert router["eps"] == pytest.approx(0)
    assert -0.65 < (router["start"] or 0.0) < -0.15
    assert parts("gradients, muon", "mlp.in", "width")["eps"] is None  # Muon has no eps; its decay is judged
    assert parts("gradients, muon", "mlp.in", "bookkeeping")["lr x decay x steps"] == pytest.approx(0, abs=1e-9)


def test_output_norms_at_alpha_one_half() -> None:
    """The matrices before these norms move as depth^(alpha-1), and the norms pass this on."""
    rows = {row.module: row for row in coordinates(None, *DEEP, alpha=ALPHA, overrides=OLMO).rows}
    for module in OUTPUTS:
        assert rows[module].passed
        assert -0.7 < (rows[module].parts["change"] or 0.0) < -0.2


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
# The branch multiplier of alpha 1, with the lrs and eps of the recipe's own alpha.
ALPHA_1 = fault(ENDS, multiplier=times(lambda recipe: depth(recipe) ** (recipe.scaling.alpha - 1)))
UNSCALED_LR = fault(MATRICES, lr=times(lambda r: width(r) ** 0.5))
HALF_LR = fault(MATRICES, lr=times(lambda r: width(r) ** -0.5))
WIDTH_LR = fault(MATRICES, lr=times(lambda r: 1 / width(r)))
DEPTH_LR = fault(MATRICES, lr=times(lambda r: depth(r) ** -0.5))
MATRIX_LR = fault(MATRICES, lr=times(width))
MATRIX_INIT = fault(MATRICES, init_std=times(lambda r: width(r) ** 0.5))
EXPERT_BRANCH = fault("mlp.experts.out", multiplier=times(depth))
ROUTER_EPS_FALLS = fault("mlp.router", eps=times(lambda r: 1 / width(r)))
ROUTER_DECAY = fault("mlp.router", weight_decay=times(lambda r: 1 / width(r)))


# The check, the overrides, the fault, the sizes, and modules that must fail.
FAULTS: dict[str, tuple[Check, tuple[str, ...], Fault, Sizes, set[str]]] = {
    "readout lr": (coordinates, (), READOUT_LR, WIDE, {"unembedding"}),
    "residual left out": (coordinates, (), fault(multiplier=lambda *_: 1.0), DEEP, {"residual"}),
    "depth in the init": (coordinates, (), DEPTH_IN_INIT, DEEP, {*ENDS}),
    "rule twice": (coordinates, (), rule_twice, WIDE, {"attention.query", "mlp.in"}),
    "lr of another alpha": (coordinates, (), HIDDEN_LR, DEEP, {*ENDS}),
    "muon: lr not scaled": (coordinates, ADAMW_RMS, UNSCALED_LR, WIDE, {"attention.query"}),
    "muon: lr of Adam's rule": (coordinates, ADAMW_RMS, HALF_LR, WIDE, {"attention.query"}),
    "muon: lr scaled twice": (coordinates, SPECTRAL, WIDTH_LR, WIDE, {"attention.query"}),
    "muon: lr of another alpha": (coordinates, SPECTRAL, DEPTH_LR, DEEP, {"mlp.out"}),
    "output norm: readout lr": (coordinates, OLMO, READOUT_LR, WIDE, {"unembedding"}),
    "before output norm: lr": (coordinates, OLMO, MATRIX_LR, WIDE, {*OUTPUTS, "mlp.out", "residual"}),
    "before output norm: init": (coordinates, OLMO, MATRIX_INIT, WIDE, {*OUTPUTS}),
    "output norm: lr": (gradients, OLMO, fault(OUTPUTS, lr=times(depth)), DEEP, {*OUTPUTS}),
    "output norm: eps": (gradients, OLMO, fault(OUTPUTS, eps=times(width)), WIDE, {*OUTPUTS}),
    "router lr": (coordinates, EXPERTS, fault("mlp.router", lr=times(width)), WIDE, {"mlp.router"}),
    "router eps falls": (gradients, EXPERTS, ROUTER_EPS_FALLS, WIDE, {"mlp.router"}),
    "router eps": (gradients, EXPERTS, fault("mlp.router", eps=times(width)), WIDE, {"mlp.router"}),
    "router decay": (gradients, EXPERTS, ROUTER_DECAY, (PAIR, (2,)), {"mlp.router"}),
    "expert lr": (coordinates, EXPERTS, fault("mlp.experts", lr=times(width)), (WIDTHS, (4,)), {"mlp.experts"}),
    "experts: branch": (coordinates, EXPERTS, EXPERT_BRANCH, ((64,), EXPERT_DEPTHS), {"residual"}),
    "expert eps": (gradients, EXPERTS, fault("mlp.experts", eps=times(width)), WIDE, {"mlp.experts.out"}),
}
FAULTS_SLOW = {"muon: lr of Adam's rule", "muon: lr scaled twice", "output norm: readout lr", "router eps"}
FAULTS_SLOW |= {"before output norm: init"}


@pytest.mark.long
@pytest.mark.parametrize("name", [pytest.param(each, marks=[SLOW] * (each in FAULTS_SLOW)) for each in FAULTS])
def test_a_planted_fault_is_found(name: str) -> None:
    of, overrides, planted, sizes, found = FAULTS[name]
    assert found <= {module for module, _ in failed(of(planted, *sizes, overrides=overrides))}


@pytest.mark.long
def test_a_multiplier_before_the_output_norm_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def before(block: Block, branch: str, y_BTD: torch.Tensor) -> torch.Tensor:
        multiplier = getattr(block, f"{branch}_multiplier")
        normed: torch.Tensor = block.norm[f"{branch}_out"](y_BTD * multiplier)
        return normed / multiplier  # the block multiplies by it again

    monkeypatch.setattr(Block, "_output", before)
    found = failed(coordinates(None, *DEEP, overrides=OLMO))
    assert found["residual", "depth"].note.startswith("GROWS with depth")
    assert {*OUTPUTS, "attention.out"} <= {module for module, _ in failed(gradients(None, *DEEP, overrides=OLMO))}


@pytest.mark.long
def test_the_multiplier_of_another_alpha_is_found() -> None:
    found = failed(coordinates(ALPHA_1, *DEEP, alpha=ALPHA))
    assert {"norm.attention", "norm.mlp", "residual"} <= {module for module, _ in found}
    found = failed(gradients(ALPHA_1, *DEEP, alpha=ALPHA))
    assert {"attention.query", "attention.out", "mlp.in", "mlp.out"} <= {module for module, _ in found}
    assert all("eps GROWS relative to the gradient" in row.note for row in found.values())


@pytest.mark.long
@pytest.mark.parametrize("overrides", [(), pytest.param(OLMO, marks=SLOW)], ids=["dense", "olmo 3"])
def test_at_alpha_below_1_gradients_finds_an_lr_of_the_key_that_is_constant_in_depth(
    overrides: tuple[str, ...],
) -> None:
    constant = fault("attention.key", lr=times(lambda recipe: depth(recipe) ** (1 - recipe.scaling.alpha)))
    found = failed(gradients(constant, *DEEP, alpha=ALPHA, overrides=overrides))
    assert found.keys() == {("attention.key", "bookkeeping")}
    # What reads the key may move by this much, so its outputs do not show the fault.
    assert not failed(coordinates(constant, *DEEP, alpha=ALPHA, overrides=overrides))


def test_embedding_eps_unscaled() -> None:
    verdict = gradients(fault("embedding", eps=lambda _, recipe: recipe.hyperparameters.eps))
    assert failed(verdict).keys() == {("embedding", "width"), ("embedding", "bookkeeping")}


@pytest.mark.parametrize(
    ("overrides", "modules", "unaffected"),
    [
        ((), {"attention.query", "mlp.out", "unembedding"}, "embedding"),
        pytest.param(ADAMW_RMS, {"attention.query", "mlp.out"}, "embedding", marks=SLOW),
    ],
)
def test_only_the_gradient_check_sees_unscaled_weight_decay(
    overrides: tuple[str, ...], modules: set[str], unaffected: str
) -> None:
    unscaled = fault(weight_decay=lambda right, recipe: right and recipe.hyperparameters.weight_decay)
    failing = failed(gradients(unscaled, overrides=overrides))
    assert {axis for _, axis in failing} == {"width", "bookkeeping"}
    rows = {module: row for (module, axis), row in failing.items() if axis == "width"}
    assert modules <= rows.keys()
    assert unaffected not in rows
    assert all("lr x decay FALLS" in row.note for row in rows.values())
    assert overrides or coordinates(unscaled).passed


@pytest.mark.long
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
    assert failed(coordinates(grow_heads=True)).keys() == (set() if divided_by_d else {("attention.logits", "width")})


@pytest.mark.long
@pytest.mark.parametrize(
    ("planted", "module"),
    [
        pytest.param(fault(lr=zero), "embedding", id="nothing is trained"),
        pytest.param(fault(lr=zero_if_wide), "embedding", id="nothing is trained when wide", marks=SLOW),
        pytest.param(fault(HIDDEN, lr=zero), "mlp.in", id="no hidden weight is trained", marks=SLOW),
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
