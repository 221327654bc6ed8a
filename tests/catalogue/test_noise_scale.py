"""The estimators on a problem whose noise scale is known, and the trade-off of steps against tokens."""

import numpy as np
import pytest

from leaven.catalogue.noise_scale import (
    gradient_noise,
    noise_scale,
    sgd_lr,
    squared_gradient,
    steps_over_least,
    surge_lr,
    tokens_over_least,
)

DIMENSIONS, SIGNAL, NOISE = 50, 4.0, 800.0  # |G|^2 and tr(Sigma): a noise scale of 200
SMALL, BIG = 25, 100


def squares(pairs: int) -> list[tuple[float, float]]:
    """Return |G_small|^2 and |G_big|^2 of batches; the small one is the first quarter, as of four micro-batches."""
    rng = np.random.default_rng(0)
    gradient = np.full(DIMENSIONS, (SIGNAL / DIMENSIONS) ** 0.5)
    spread = np.linspace(0.5, 1.5, DIMENSIONS)  # not the same along every axis
    deviation = np.sqrt(spread / spread.sum() * NOISE)
    found = []
    for _ in range(pairs):
        each = gradient + deviation * rng.standard_normal((BIG, DIMENSIONS))
        found.append((float((each[:SMALL].mean(0) ** 2).sum()), float((each.mean(0) ** 2).sum())))
    return found


def test_the_estimates_are_exact_on_expected_squares() -> None:
    """E|G_B|^2 = |G|^2 + tr(Sigma) / B."""
    small, big = SIGNAL + NOISE / SMALL, SIGNAL + NOISE / BIG
    assert squared_gradient(SMALL, small, BIG, big) == pytest.approx(SIGNAL)
    assert gradient_noise(SMALL, small, BIG, big) == pytest.approx(NOISE)
    assert noise_scale(SMALL, BIG, [(small, big)]) == pytest.approx(NOISE / SIGNAL)


def test_a_ratio_of_averages_finds_the_noise_scale_of_a_known_problem() -> None:
    found = squares(2_000)
    assert noise_scale(SMALL, BIG, found) == pytest.approx(NOISE / SIGNAL, rel=0.05)
    assert np.mean([squared_gradient(SMALL, s, BIG, b) for s, b in found]) == pytest.approx(SIGNAL, rel=0.05)
    assert np.mean([gradient_noise(SMALL, s, BIG, b) for s, b in found]) == pytest.approx(NOISE, rel=0.02)


def test_without_a_signal_there_is_no_scale() -> None:
    assert noise_scale(1, 2, [(2.0, 0.9)]) is None


@pytest.mark.parametrize("batch", [1e4, 1e6, 3e7])
def test_steps_and_tokens_trade_off(batch: float) -> None:
    steps, tokens = steps_over_least(batch, 1e6), tokens_over_least(batch, 1e6)
    assert (steps - 1) * (tokens - 1) == pytest.approx(1)
    # Tokens are steps x batch, and at B_crit = E_min / S_min both are twice the minimum.
    assert tokens / steps == pytest.approx(batch / 1e6)
    assert steps_over_least(1e6, 1e6) == tokens_over_least(1e6, 1e6) == 2


def test_the_lr_over_the_batch() -> None:
    assert sgd_lr(1e6, 1e6) == pytest.approx(0.5)
    assert sgd_lr(2e3, 1e6) / sgd_lr(1e3, 1e6) == pytest.approx(2, rel=2e-3)  # linear far below
    assert surge_lr(1e6, 1e6) == pytest.approx(1)
    assert surge_lr(4e3, 1e6) / surge_lr(1e3, 1e6) == pytest.approx(2, rel=5e-3)  # square root far below
    assert surge_lr(4e6, 1e6) == pytest.approx(0.8) == pytest.approx(surge_lr(2.5e5, 1e6))  # and falling above
