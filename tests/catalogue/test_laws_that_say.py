"""Laws that give exponents or a form only, and the critical batch from memory, against what was published."""

import re

import pytest
import torch

from leaven.catalogue.law_table import (
    BJORCK,
    CEREBRAS,
    COMPLETE_D,
    MOONLIGHT,
    MUON_HYPERP,
    POWER_LINES_CRITICAL,
    WANG_AITCHISON,
)
from leaven.catalogue.laws import evaluate, power_lines_tau
from leaven.catalogue.runs import find_run
from leaven.recipe.recipe import Recipe
from leaven.scaling.table import resolve
from leaven.scaling.transfer import transfer


def exponents(text: str) -> dict[str, float]:
    return {axis: float(power) for axis, power in re.findall(r"([NDB])\^(-?[0-9.]+[0-9])", text)}


def test_power_lines_critical_batch_in_closed_form() -> None:
    """0.0471 D^0.462 sequences of 2048: 2,704.6 of them at 20B tokens (ln 20e9 = 23.71900), as the exponent says
    1.89737 times as many at 80B."""
    found = [
        result.batch_tokens
        for tokens in (20e9, 80e9)
        for result in evaluate(1e9, tokens)
        if result.law == POWER_LINES_CRITICAL.name
    ]
    assert found == pytest.approx([2_704.6 * 2048, 1.89737 * 2_704.6 * 2048], rel=1e-4)


@pytest.mark.parametrize(("run", "width", "lr"), [("1.3b", 2048, 7.5e-4), ("2.7b", 2560, 6e-4)])
def test_cerebras_gpt_trained_its_hidden_matrices_with_what_its_form_says(run: str, width: int, lr: float) -> None:
    """Of the configurations of its muP models: the lr of the base, and the width that it is of."""
    found = find_run(f"cerebras-gpt-{run}-mup")
    assert found.arch.d_model == width
    base, base_width = map(float, re.findall(r"[0-9.e-]+(?= |$)", CEREBRAS.says)[:2])
    assert (found.schedule.peak_lr, found.init.mup_base_d_model) == (base, base_width)
    assert base * base_width / width == pytest.approx(lr)


def test_the_rule_of_complete_d_p_moves_lr_as_the_law_says(tiny: Recipe) -> None:
    told = exponents(COMPLETE_D.says)
    recipe = tiny.replace({"scaling.rule": "complete-d-p"})
    name, batch, tokens = "layers.0.mlp.in.weight", recipe.batch.tokens, recipe.data.tokens
    for axis, moved in (
        ("B", transfer(recipe, batch_tokens=4 * batch)),
        ("D", transfer(recipe, tokens=4 * tokens)),
    ):
        assert resolve(moved)[name].lr / resolve(recipe)[name].lr == pytest.approx(4 ** told[axis])


def test_published_exponents() -> None:
    """Bjorck's one exponent is that of its 760M and 1.3B; HyperP finds the same of tokens for Muon."""
    assert exponents(BJORCK.says) == {"N": -0.23, "D": -0.32}
    assert "-0.32 at 760M and 1.3B" in BJORCK.conditions
    assert exponents(MUON_HYPERP.says) == {"D": -0.32, "B": 0.56}
    assert MUON_HYPERP.source == "arXiv 2603.28743"


def test_timescale_that_is_constant_agrees_with_power_lines_at_one_ratio_of_tokens() -> None:
    """Power Lines finds that it falls with tokens a parameter, and with nothing else."""
    assert WANG_AITCHISON.says.endswith("is constant")
    assert power_lines_tau(1e8, 2e9) == pytest.approx(power_lines_tau(1e9, 20e9))
    assert power_lines_tau(1e9, 80e9) < power_lines_tau(1e9, 20e9)


@pytest.mark.parametrize("size", [(64, 16), (16, 64), (32, 32)])
def test_moonlights_factor_gives_every_matrix_adamws_rms(size: tuple[int, int]) -> None:
    """Muon's update is U V^T; min(rows, cols) singular values of 1 have an RMS of 1 / sqrt(max(rows, cols)), and
    AdamW's usual RMS is 0.2."""
    (factor,) = map(float, re.findall(r"x ([0-9.]+) sqrt\(max\(rows, cols\)\)", MOONLIGHT.says))
    u, _, v = torch.linalg.svd(torch.randn(size, dtype=torch.float64), full_matrices=False)
    rms = float((u @ v).square().mean().sqrt())
    assert factor * max(size) ** 0.5 * rms == pytest.approx(0.2)
