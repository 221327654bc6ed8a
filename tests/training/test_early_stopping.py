"""Divergence and pruning on made-up curves."""

import math

import pytest

from leaven.training.early_stopping import DivergenceMonitor, comparable, expected, gap, should_prune
from leaven.training.outcome import Baseline, Curve

UNIFORM = math.log(256)


@pytest.mark.parametrize(
    ("losses", "lost"),
    [
        ([5.0] * 1024, False),
        ([5.0] * 500 + [9.0] + [5.0] * 523, False),  # one odd batch
        ([90.0] * 8 + [5.0] * 1016, False),  # a large init
        ([5.0] * 500 + [UNIFORM + 0.9] * 524, False),
        ([5.0] * 500 + [UNIFORM + 1.1] * 524, True),
        ([5.0] * 500 + [400.0], True),
        ([5.0] * 1023 + [math.nan], True),
        ([math.inf], True),
        ([5.0] * 10 + [1e3] * 10 + [UNIFORM] * 1004, True),  # its softmax saturated
        ([5.0] * 10 + [1e3] * 10 + [UNIFORM - 0.1] * 1004, False),
        ([UNIFORM] * 1024, False),  # too low a learning rate
    ],
)
def test_a_run_that_stays_worse_than_a_uniform_guess_has_diverged(losses: list[float], lost: bool) -> None:
    monitor = DivergenceMonitor(256, 1024 * 128)
    assert any([monitor.has_diverged(loss, 128) for loss in losses]) is lost


def test_the_last_large_batch_alone_is_the_mean() -> None:
    monitor = DivergenceMonitor(256, 1024)
    assert [monitor.has_diverged(loss, 256) for loss in (9.0, 9.0, 5.0)] == [False, True, False]


BEST: Curve = tuple((point * 100, 6 * math.exp(-3 * point / 32) + 2) for point in range(1, 33))
BASELINE = Baseline(BEST, 2.4, noise=0.01)


def behind(by: float, points: int) -> Curve:
    return tuple((tokens, loss + by) for tokens, loss in BEST[:points])


def pruned_at(by: float) -> int | None:
    """Return the point at which a trial is pruned that is always ``by`` nats behind, or None."""
    return next((points for points in range(1, 33) if should_prune(behind(by, points), BASELINE)), None)


def test_trials_further_behind_are_pruned_sooner() -> None:
    points = [pruned_at(by) for by in (100.0, 1.5, 0.5, 0.1)]
    assert None not in points
    assert points == sorted(set(points))
    assert points[0] >= 8  # a quarter of the run


def test_trials_within_the_noise_or_ahead_are_never_pruned() -> None:
    assert pruned_at(0.03) is None
    assert pruned_at(-0.5) is None
    noisy = Baseline(BEST, 2.4, noise=1.0)
    assert not any(should_prune(behind(1.5, points), noisy) for points in range(1, 33))


def test_one_bad_interval_does_not_prune() -> None:
    odd = (*BEST[:19], (BEST[19][0], BEST[19][1] + 1.5))
    assert not should_prune(odd, BASELINE)
    assert should_prune(behind(1.5, 20), BASELINE)


def test_a_run_of_other_batches_is_compared_at_its_own_tokens() -> None:
    shifted = tuple((tokens - 50, 6 * math.exp(-3 * (tokens - 50) / 3200) + 2) for tokens, _ in BEST[:20])
    assert gap(shifted, BASELINE) == pytest.approx(0, abs=0.01)
    assert comparable(BASELINE, 3_190)
    assert not comparable(BASELINE, 1_600)
    assert not comparable(Baseline((), 2.0, 0.01), 3_200)


def test_the_expected_loss_lies_between_baseline_and_gap() -> None:
    assert expected(BEST[:20], BASELINE) == pytest.approx(2.4)
    near, far = expected(behind(0.5, 20), BASELINE), expected(behind(1.0, 20), BASELINE)
    assert 2.4 < near < 2.9
    assert near < far < 3.4
