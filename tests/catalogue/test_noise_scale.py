"""The estimators of gradient noise, and the trade-off of steps against tokens."""

import pytest

from leaven.catalogue.noise_scale import (
    gradient_noise,
    squared_gradient,
    steps_over_least,
    surge_lr,
    tokens_over_least,
)

SIGNAL, NOISE = 4.0, 800.0  # |G|^2 and tr(Sigma): a noise scale of 200
SMALL, BIG = 25, 100


def test_the_estimates_are_exact_on_expected_squares() -> None:
    """E|G_B|^2 = |G|^2 + tr(Sigma) / B."""
    small, big = SIGNAL + NOISE / SMALL, SIGNAL + NOISE / BIG
    assert squared_gradient(SMALL, small, BIG, big) == pytest.approx(SIGNAL)
    assert gradient_noise(SMALL, small, BIG, big) == pytest.approx(NOISE)


@pytest.mark.parametrize("batch", [1e4, 1e6, 3e7])
def test_steps_and_tokens_trade_off(batch: float) -> None:
    steps, tokens = steps_over_least(batch, 1e6), tokens_over_least(batch, 1e6)
    assert (steps - 1) * (tokens - 1) == pytest.approx(1)
    # Tokens are steps x batch, and at B_crit = E_min / S_min both are twice the minimum.
    assert tokens / steps == pytest.approx(batch / 1e6)
    assert steps_over_least(1e6, 1e6) == tokens_over_least(1e6, 1e6) == 2


def test_the_lr_over_the_batch() -> None:
    assert surge_lr(1e6, 1e6) == pytest.approx(1)
    assert surge_lr(4e3, 1e6) / surge_lr(1e3, 1e6) == pytest.approx(2, rel=5e-3)  # square root far below
    assert surge_lr(4e6, 1e6) == pytest.approx(0.8) == pytest.approx(surge_lr(2.5e5, 1e6))  # and falling above
