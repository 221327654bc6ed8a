"""Every law at published points.

The side-by-side points were computed without this code and are rounded to two digits, so laws are compared within 5%.
"""

import math
import re

import pytest
import torch

from leaven.catalogue.laws import (
    LAWS,
    REPLICATION,
    Point,
    Power,
    critical_batch,
    evaluate,
    find_law,
    lr_at_batch,
    power_lines_tau,
)
from leaven.catalogue.runs import find_run
from leaven.documents.catalogue import LawRow
from leaven.recipe.recipe import Recipe
from leaven.scaling.table import parameter_table
from leaven.scaling.transfer import transfer

CHINCHILLA = find_law("Chinchilla 2022 loss")
KAPLAN_LR, KAPLAN_BATCH = find_law("Kaplan 2020 learning rate"), find_law("Kaplan 2020 critical batch")
DEEPSEEK, MINICPM, STEP_LAW = map(find_law, ("DeepSeek LLM 2024", "MiniCPM 2024", "Step Law 2025"))
SMALL, ONE, SEVEN, LONG = (125e6, 2.5e9), (1e9, 20e9), (7e9, 140e9), (7e9, 2e12)
TO_TWO_DIGITS = 0.05


def result(law: str, point: tuple[float, float]) -> LawRow:
    (found,) = (r for r in evaluate(*point) if r.law == law)
    return found


@pytest.mark.parametrize(
    ("law", "lrs"),
    [
        ("Kaplan 2020 learning rate", (6.4e-4, 3.5e-4, 7.7e-5, 7.7e-5)),
        ("DeepSeek LLM 2024", (1.6e-3, 9.6e-4, 5.9e-4, 4.3e-4)),
        ("Step Law 2025", (2.3e-3, 1.0e-3, 4.5e-4, 1.0e-3)),
        ("Porian 2024", (4.5e-3, 2.1e-3, 1.1e-3, 1.1e-3)),
    ],
)
def test_learning_rates_side_by_side(law: str, lrs: tuple[float, ...]) -> None:
    for point, lr in zip((SMALL, ONE, SEVEN, LONG), lrs, strict=True):
        assert result(law, point).lr == pytest.approx(lr, rel=TO_TWO_DIGITS)


@pytest.mark.parametrize(
    ("law", "millions"),
    [
        ("Kaplan 2020 critical batch", (0.62, 2.2, 4.9, 7.0)),
        ("DeepSeek LLM 2024", (0.28, 1.1, 3.9, 9.2)),
        ("Step Law 2025", (0.14, 0.44, 1.3, 6.1)),
        ("Porian 2024", (0.37, 1.6, 6.3, 6.3)),
        ("Power Lines 2025", (0.25, 0.55, 1.2, 3.2)),
        ("Zhang 2024 critical batch", (0.46, 1.2, 3.1, 10.7)),
    ],
)
def test_batches_side_by_side(law: str, millions: tuple[float, ...]) -> None:
    for point, batch in zip((SMALL, ONE, SEVEN, LONG), millions, strict=True):
        assert result(law, point).batch_tokens == pytest.approx(batch * 1e6, rel=TO_TWO_DIGITS)


@pytest.mark.parametrize(("params", "lr", "batch"), [(6.9e9, 4.2e-4, 2304 * 4096), (67.4e9, 3.2e-4, 4608 * 4096)])
def test_deepseeks_law_gives_the_values_of_its_models(params: float, lr: float, batch: int) -> None:
    found = result("DeepSeek LLM 2024", (params, 2e12))
    assert found.lr == pytest.approx(lr, rel=0.02)
    assert found.batch_tokens == pytest.approx(batch, rel=0.03)


def test_minicpm_batch_in_closed_form() -> None:
    at_loss_ten = Point(1, 1, 1, 10)  # 10^6.24 = 1,737,801
    assert MINICPM.batch.at(at_loss_ten) == pytest.approx(1.21e9 / 1_737_801, rel=1e-6)
    assert result("MiniCPM 2024", SMALL).lr is None


def test_the_three_forms_of_zhang_agree_at_its_own_model() -> None:
    """151M parameters at 20 tokens each: one run, three fits."""
    forms = [r.batch_tokens for r in evaluate(151e6, 3.07e9) if r.law.startswith("Zhang 2024")]
    assert len(forms) == 3
    assert forms == pytest.approx([500e3] * 3, rel=0.03)
    # N in millions is part of it: in units, the form in N gives thousands of times more than the run has.
    assert Power(coefficient=93.20, params=0.47, unit=512).at(Point(151e6, 3.07e9, 1, 1)) > 3e8


def test_kaplans_batch_doubles_when_the_loss_falls_by_13_percent() -> None:
    """Section 5.1; the summary has 1 to 2 million tokens for the largest models, with losses of 2.7 to 3."""
    batch = KAPLAN_BATCH.batch
    assert batch.at(Point(1, 1, 1, 0.865 * 3)) / batch.at(Point(1, 1, 1, 3)) == pytest.approx(2, rel=0.01)
    assert 1e6 < batch.at(Point(1, 1, 1, 3.0)) < batch.at(Point(1, 1, 1, 2.7)) < 2e6


def test_kaplans_lr_reaches_zero_at_twelve_billion_parameters() -> None:
    assert KAPLAN_LR.lr.at(Point(1.2e10, 1, 1, 1)) == pytest.approx(1e-6, abs=1e-6)  # exp(3.239e-3 / 1.395e-4)
    assert KAPLAN_LR.lr.at(Point(1.22e10, 1, 1, 1)) is None


def test_porians_two_forms_agree_at_108_million_parameters() -> None:
    exact, rounded = result("Porian 2024", (108e6, 2e9)), result("Porian 2024, rounded", (108e6, 2e9))
    assert rounded.lr == pytest.approx(0.0047)
    assert rounded.batch_tokens == pytest.approx(160 * 2048)
    assert exact.lr == pytest.approx(rounded.lr, rel=0.02)
    assert exact.batch_tokens == pytest.approx(rounded.batch_tokens, rel=0.03)
    assert rounded.form_of == "Porian 2024"


@pytest.mark.parametrize(
    ("params", "tokens", "loss"), [(70e9, 1.4e12, 1.936), (280e9, 300e9, 1.993)], ids=["Chinchilla", "Gopher"]
)
def test_chinchilla_loss_of_the_two_models_it_compared(params: float, tokens: float, loss: float) -> None:
    assert CHINCHILLA.loss.loss(params, tokens) == pytest.approx(loss, abs=1e-3)


# Table 4 and, for 1e21 FLOPs, table 1 of arXiv 2502.05172: m, mu, n and nu of E experts, and the best size
JOINT = {
    1: (30.3640, -0.1817, 53.9838, -0.1965, 5.7e9, 29.3e9),
    2: (27.7982, -0.1780, 66.8401, -0.2065, 5.0e9, 33e9),
    4: (24.8462, -0.1731, 87.7022, -0.2192, 4.4e9, 38e9),
    8: (21.8330, -0.1676, 119.9126, -0.2338, 3.8e9, 44.3e9),
    16: (19.0159, -0.1617, 167.5073, -0.2494, 3.3e9, 51.2e9),
    32: (16.5424, -0.1557, 234.6726, -0.2652, 2.85e9, 58.4e9),
}


@pytest.mark.parametrize("experts", JOINT)
def test_the_joint_law_has_the_coefficients_and_best_sizes_that_its_paper_prints(experts: int) -> None:
    m, mu, n, nu, params, tokens = JOINT[experts]
    joint = find_law("Ludziejewski 2025 loss").loss_of_experts
    law = joint.of(experts)
    assert (law.a, law.b) == (pytest.approx(m, rel=3e-3), pytest.approx(n, rel=3e-3))  # its constants are rounded
    assert (-law.alpha, -law.beta) == (pytest.approx(mu, abs=2e-4), pytest.approx(nu, abs=2e-4))
    best = law.optimal_params(1e21)
    assert (best, 1e21 / 6 / best) == (pytest.approx(params, rel=0.02), pytest.approx(tokens, rel=0.02))


def test_more_experts_lower_the_loss_of_one_law_alone() -> None:
    dense, mixture = ({row.law: row.loss for row in evaluate(1e9, 2e10, experts=e) if row.loss} for e in (1, 16))
    assert mixture["Ludziejewski 2025 loss"] < dense["Ludziejewski 2025 loss"]
    assert {law for law in dense if dense[law] != mixture[law]} == {"Ludziejewski 2025 loss"}


@pytest.mark.parametrize(("experts", "factor"), [(1, 1.0), (32, 1.0), (128, 4.0)])
def test_the_law_of_mixtures_was_fitted_to_32_experts_at_most(experts: int, factor: float) -> None:
    rows = {row.law: row for row in evaluate(1e9, 2e10, experts=experts)}
    mixture = rows.pop("Ludziejewski 2025 loss")
    assert (mixture.of_experts, mixture.in_range, mixture.extrapolation) == (True, factor == 1, factor)
    assert [(each.axis, each.side, each.factor) for each in mixture.beyond] == [("E", "above", 4.0)] * (factor > 1)
    assert not any(row.of_experts for row in rows.values())
    # Laws that do not depend on experts have no range of them.
    assert not any(each.axis == "E" for law, row in rows.items() if "Ludziejewski" not in law for each in row.beyond)


def test_the_replication_differs_in_the_irreducible_loss() -> None:
    """E is 1.8172 and not 1.69 (arXiv 2404.10102). The two laws agree within 3% over Chinchilla's own runs."""
    replication = find_law("Besiroglu 2024 loss").loss
    assert replication == REPLICATION  # the file has it twice: with the laws and with the optimal sizes
    assert replication.loss(1e30, 1e30) == pytest.approx(1.8172)
    for point in ((400e6, 8e9), (1e9, 20e9), (10e9, 200e9)):
        assert replication.loss(*point) == pytest.approx(CHINCHILLA.loss.loss(*point), rel=0.03)


def test_laws_without_constants_have_no_values() -> None:
    """The constant of Bjorck 2024 cannot be recovered from the paper."""
    silent = {row.law: row for row in evaluate(*ONE) if row.says}
    assert silent.keys() >= {"Bjorck 2024", "Hagele 2024 WSD", "Complete(d)P 2025"}
    for row in silent.values():
        assert (row.lr, row.batch_tokens, row.loss, row.tau) == (None, None, None, None)
    assert "D^-0.32" in silent["Bjorck 2024"].says


@pytest.mark.parametrize(("run", "width", "lr"), [("1.3b", 2048, 7.5e-4), ("2.7b", 2560, 6e-4)])
def test_the_law_of_cerebras_gpt_gives_the_lr_of_its_models(run: str, width: int, lr: float) -> None:
    """The configurations of its muP models have the lr and the width of the base."""
    found = find_run(f"cerebras-gpt-{run}-mup")
    assert found.arch.d_model == width
    base, base_width = map(float, re.findall(r"[0-9.e-]+(?= |$)", find_law("Cerebras-GPT 2023 muP").says)[:2])
    assert (found.schedule.peak_lr, found.init.mup_base_d_model) == (base, base_width)
    assert base * base_width / width == pytest.approx(lr)


def test_the_complete_d_p_rule_has_the_exponents_of_the_law(tiny: Recipe) -> None:
    says = find_law("Complete(d)P 2025").says
    assert says == "lr ~ B^0.5 D^-0.5"
    recipe = tiny.replace({"scaling.rule": "complete-d-p"})
    name, batch, tokens = "layers.0.mlp.in.weight", recipe.batch.tokens, recipe.data.tokens
    more_batch, more_tokens = transfer(recipe, batch_tokens=4 * batch), transfer(recipe, tokens=4 * tokens)
    for moved, exponent in ((more_batch, 0.5), (more_tokens, -0.5)):
        ratio = parameter_table(moved)[name].lr / parameter_table(recipe)[name].lr
        assert ratio == pytest.approx(4**exponent)


@pytest.mark.parametrize("size", [(64, 16), (16, 64), (32, 32)])
def test_moonlights_factor_gives_every_matrix_adamws_rms(size: tuple[int, int]) -> None:
    """Muon's update is U V^T, which has an RMS of 1 / sqrt(max(rows, cols)). AdamW's usual RMS is 0.2."""
    (factor,) = map(float, re.findall(r"x ([0-9.]+) sqrt\(max\(rows, cols\)\)", find_law("Moonlight Muon 2025").says))
    u, _, v = torch.linalg.svd(torch.randn(size, dtype=torch.float64), full_matrices=False)
    rms = float((u @ v).square().mean().sqrt())
    assert factor * max(size) ** 0.5 * rms == pytest.approx(0.2)


def test_power_lines_timescale() -> None:
    # tau = 1.084 at one token a parameter; at 20 (0.2236, worked out by hand: ln 20 = 2.9957)
    assert power_lines_tau(1e9, 1e9) == pytest.approx(1.084)
    assert power_lines_tau(1e9, 20e9) == pytest.approx(0.2236, rel=1e-3)


def test_the_factor_outside_the_fitted_range() -> None:
    step = result("Step Law 2025", ONE)
    assert step.in_range
    assert step.extrapolation == 1
    far = result("Step Law 2025", LONG)
    assert not far.in_range
    assert far.extrapolation == pytest.approx(20)  # 2T tokens against 100B
    assert [(each.axis, each.side) for each in far.beyond] == [("D", "above"), ("N", "above")]
    assert far.beyond[1].factor == pytest.approx(7)  # 7B against 1B
    (below,) = result("MiniCPM 2024", (3e6, 1e9)).beyond
    assert (below.axis, below.side, below.factor) == ("N", "below", pytest.approx(3))
    assert result("DeepSeek LLM 2024", ONE).extrapolation == pytest.approx(6)  # 1.2e20 against 2e19 FLOPs
    assert not result("Porian 2024", (500e6, 500e9)).in_range  # far from compute-optimal


def test_laws_without_embeddings_use_the_smaller_count() -> None:
    whole = {r.law: r for r in evaluate(124e6, 10e9)}
    body = {r.law: r for r in evaluate(124e6, 10e9, params_non_embedding=85e6)}
    assert body["Step Law 2025"].lr == pytest.approx(1.79 * 85e6**-0.713 * 10e9**0.307)
    changed = {name for name in whole if whole[name].lr != body[name].lr}
    assert changed == {law.name for law in LAWS if law.params_definition == "non-embedding" and law.lr}


def test_the_lr_of_a_law_at_another_batch() -> None:
    results = evaluate(*ONE)
    noise = critical_batch(results)
    assert noise == pytest.approx(2.2e6, rel=TO_TWO_DIGITS)  # of 1.2, 2.2 and 5.5 million
    step = result("Step Law 2025", ONE)
    moved = lr_at_batch(step, 4 * step.batch_tokens, noise)
    assert moved.ratio == pytest.approx(4)
    assert moved.square_root == pytest.approx(2 * step.lr)
    assert moved.linear == pytest.approx(4 * step.lr)
    assert moved.own == pytest.approx(4**0.31 * step.lr)
    assert step.lr < moved.surge < moved.square_root  # 442k and 1.77M are both below the peak
    kaplan = lr_at_batch(result("Kaplan 2020 learning rate", ONE), 2**20, noise)
    assert (kaplan.ratio, kaplan.own) == (2, None)  # it was fitted at half a million tokens
    assert lr_at_batch(result("Power Lines 2025", ONE), 1e6, noise) is None


def test_power_lines_critical_batch_in_closed_form() -> None:
    """0.0471 D^0.462 sequences of 2048: 2,704.6 of them at 20B tokens (ln 20e9 = 23.71900), as the exponent says
    1.89737 times as many at 80B."""
    found = [result("Power Lines 2025 critical batch", (1e9, tokens)).batch_tokens for tokens in (20e9, 80e9)]
    assert found == pytest.approx([2_704.6 * 2048, 1.89737 * 2_704.6 * 2048], rel=1e-4)


def test_what_a_gain_is_worth_in_tokens() -> None:
    law, tokens, times = REPLICATION, 2e10, 1.5
    gained = law.loss(1e9, tokens) - law.loss(1e9, times * tokens)
    assert law.worth_in_tokens(tokens, gained) == pytest.approx(times)
    assert law.worth_in_tokens(tokens, law.b / tokens**law.beta) == math.inf
