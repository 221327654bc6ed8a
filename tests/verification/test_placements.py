"""Checks of recipes with norms on branch outputs and parallel branches: right rules pass, and faults are found."""

from typing import Any

import pytest
import torch
from tests.verification.families import (
    DEPTHS,
    PROXY,
    WIDTHS,
    Fault,
    PlantedModels,
    depth,
    failed,
    fault,
    times,
    width,
)

from leaven.model.transformer import Block
from leaven.recipe.files import read_recipe
from leaven.verification.batches import synthetic
from leaven.verification.coordinates import CoordinateCheck
from leaven.verification.gradients import GradientCheck
from leaven.verification.small_models import calibrated

FAMILIES: dict[str, dict[str, Any]] = {
    "olmo 3": {"norm_placement": "output", "qk_norm_whole": True, "window": 8, "global_every": 4},
    "gemma 2": {
        "norm_placement": "sandwich",
        "activation": "geglu",
        "tied_embeddings": True,
        "qk_norm": False,
        "attention_softcap": 50.0,
        "logit_softcap": 30.0,
        "window": 8,
        "global_every": 2,
    },
    "gpt-j": {
        "norm": "layernorm",
        "activation": "gelu",
        "bias": True,
        "attention_bias": "none",
        "parallel_branches": True,
        "rotary_fraction": 0.5,
        "qk_norm": False,
    },
}
OUTPUTS = ("norm.attention_out", "norm.mlp_out")


pytestmark = pytest.mark.usefixtures("one_thread")


def check(
    of: type[CoordinateCheck | GradientCheck], family: str, planted: Fault | None = None, *, wide: bool = True
) -> Any:
    """Return the check of a family over width and depth; with a fault, over the width or (not ``wide``) the depth."""
    changes = FAMILIES[family]
    small = read_recipe(PROXY, ["model.vocab_size=256", "model.seq_len=32"])
    recipe = small.replace({f"model.{key}": value for key, value in changes.items()})
    start = of.start_normed if "norm_placement" in changes else of.start
    models = PlantedModels(calibrated(recipe, 64, 2, start), synthetic(256, 32, 8), fault=planted)
    options: dict[str, Any] = {"steps": 10 if planted is None else 6} if of is GradientCheck else {}
    widths = WIDTHS if wide or planted is None else (64,)
    depths = DEPTHS if not wide or planted is None else (2,)
    return of(models, widths, depths, seeds=1, **options).run()


@pytest.mark.parametrize("of", [CoordinateCheck, GradientCheck])
@pytest.mark.parametrize("family", ["olmo 3", pytest.param("gemma 2", marks=pytest.mark.slow), "gpt-j"])
def test_right_rules_pass(family: str, of: type[CoordinateCheck | GradientCheck]) -> None:
    verdict = check(of, family)
    assert verdict.passed, failed(verdict)


def test_the_eps_of_a_norm_behind_a_branch_falls_with_width_and_depth() -> None:
    rows = {(row.module, row.axis): row for row in check(GradientCheck, "olmo 3").rows}
    for module in OUTPUTS:
        for axis in ("width", "depth"):
            parts = rows[module, axis].parts
            assert parts["eps"] == pytest.approx(-1)
            assert parts["start"] == pytest.approx(-1, abs=0.15)


def test_norms_behind_branches_at_alpha_one_half() -> None:
    """The rule makes the matrices before them move as depth^(alpha-1), and the norms pass this on."""
    recipe = read_recipe(PROXY, ["model.vocab_size=256", "model.seq_len=32", "scaling.alpha=0.5"])
    changed = recipe.replace({f"model.{key}": value for key, value in FAMILIES["olmo 3"].items()})
    models = PlantedModels(calibrated(changed, 64, 2, CoordinateCheck.start_normed), synthetic(256, 32, 8))
    verdict = CoordinateCheck(models, (64,), DEPTHS, seeds=1).run()
    rows = {row.module: row for row in verdict.rows}
    for module in OUTPUTS:
        assert rows[module].passed
        assert -0.7 < (rows[module].parts["change"] or 0.0) < -0.2


def test_a_multiplier_before_the_norm_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def before(block: Block, branch: str, y_BTD: torch.Tensor) -> torch.Tensor:
        multiplier = getattr(block, f"{branch}_multiplier")
        normed: torch.Tensor = block.norm[f"{branch}_out"](y_BTD * multiplier)
        return normed / multiplier  # the block multiplies by it again

    monkeypatch.setattr(Block, "_output", before)
    found = failed(check(CoordinateCheck, "olmo 3", fault(), wide=False))
    assert found["residual", "depth"].note.startswith("GROWS with depth")
    assert {*OUTPUTS, "attention.out"} <= {
        module for module, _ in failed(check(GradientCheck, "olmo 3", fault(), wide=False))
    }


@pytest.mark.parametrize(
    ("of", "planted", "wide", "found"),
    [
        pytest.param(
            CoordinateCheck,
            fault("unembedding", lr=lambda _, recipe: recipe.hyperparameters.lr),
            True,
            {"unembedding"},
            id="readout lr",
        ),
        pytest.param(
            CoordinateCheck,
            fault(("attention.", "mlp."), lr=times(width)),
            True,
            {*OUTPUTS, "mlp.out", "residual"},
            id="lr of the matrices before the norm",
        ),
        pytest.param(
            CoordinateCheck,
            fault(("attention.", "mlp."), init_std=times(lambda recipe: width(recipe) ** 0.5)),
            True,
            set(OUTPUTS),
            id="init of the matrices before the norm",
        ),
        pytest.param(GradientCheck, fault(OUTPUTS, lr=times(depth)), False, set(OUTPUTS), id="lr of the gain"),
        pytest.param(GradientCheck, fault(OUTPUTS, eps=times(width)), True, set(OUTPUTS), id="eps of the gain"),
    ],
)
def test_faults_at_a_norm_behind_a_branch(
    of: type[CoordinateCheck | GradientCheck], planted: Fault, wide: bool, found: set[str]
) -> None:
    assert found <= {module for module, _ in failed(check(of, "olmo 3", planted, wide=wide))}
