"""The spike detector on made-up steps."""

import json
import math
from collections.abc import Iterable
from itertools import pairwise

import numpy as np
import pytest
from tests.training.conftest import made_up

from leaven.training.metrics import Step
from leaven.training.spikes import ALLOWANCE, LEVEL, LIMIT, PATIENCE, Anomaly, Limits, QuantityMonitor, SpikeDetector

CALM = 2 * LEVEL


def step(
    number: int, loss: float = 3.0, grad: float = 0.5, update: float = 0.2, lr: float = 1.0, skipped: bool = False
) -> Step:
    return made_up(number, loss=loss, lr=lr, grad_norm=grad, update_norm=update * lr, skipped=skipped)


def noisy(count: int, seed: int = 0) -> Iterable[Step]:
    """Yield the steps of a healthy run: a falling loss, a warm-up, and norms that drift by a factor of two."""
    draw = np.random.default_rng(seed).standard_normal((count, 3))
    for n, (a, b, c) in enumerate(draw.tolist(), 1):
        yield step(
            n,
            loss=2.0 + 6 / (1 + n / 40) + 0.1 * a,
            grad=math.exp(0.3 * b - 0.7 * n / count),
            update=math.exp(0.05 * c + 0.7 * n / count),
            lr=min(n / 100, 1.0) * 1e-3,
        )


def first_anomaly(guard: SpikeDetector, steps: Iterable[Step]) -> Anomaly | None:
    return next((anomaly for anomaly in map(guard.observe, steps) if anomaly), None)


def test_normal_noise_is_not_an_anomaly() -> None:
    assert not any(first_anomaly(SpikeDetector(), noisy(1_000, seed)) for seed in range(3))


def test_deviations_are_those_of_an_independent_computation() -> None:
    values = np.random.default_rng(1).gumbel(size=400)
    watch = QuantityMonitor(floor=1e-9)
    total, distances, level = 0.0, [], []
    for n, value in enumerate(values.tolist()):
        _, deviations = watch.add(n, value)
        if len(distances) >= LEVEL:
            expected = (value - np.median(level[-LEVEL:])) / (1.4826 * np.median(distances[-128:]))
            assert deviations == pytest.approx(expected)
            total = max(0.0, total + min(expected, 12.0) - ALLOWANCE)
        if total == 0:
            if len(level) >= LEVEL:
                distances.append(abs(value - np.median(level[-LEVEL:])))
            level.append(value)
        assert watch.total == pytest.approx(total)
    assert len(level) < 400, "no value was beyond the allowance: nothing was tested"


def test_a_few_outliers_are_an_anomaly_and_one_is_not() -> None:
    guard = SpikeDetector()
    assert not first_anomaly(guard, noisy(200))
    assert not first_anomaly(guard, [step(201, loss=9.0, grad=50.0, lr=1e-3, update=2.0)])
    assert guard.since == 201
    assert not first_anomaly(guard, (step(n, loss=3.0, grad=0.5, update=2.0, lr=1e-3) for n in range(202, 210)))
    assert guard.since is None
    anomaly = first_anomaly(guard, (step(n, loss=9.0, grad=0.5, update=2.0, lr=1e-3) for n in range(210, 220)))
    assert (anomaly.onset, anomaly.step) == (210, 212)
    assert "loss" in anomaly.why
    assert anomaly.numbers["loss"]["value"] == 9.0
    assert anomaly.numbers["loss"]["sum"] >= LIMIT


def test_an_update_norm_that_doubles_is_an_anomaly() -> None:
    guard = SpikeDetector()
    assert not first_anomaly(guard, (step(n, lr=n * 1e-5) for n in range(1, CALM + 60)))  # it grows with the lr alone
    anomaly = first_anomaly(guard, (step(n, update=0.4, lr=n * 1e-5) for n in range(CALM + 60, CALM + 100)))
    assert anomaly.onset == CALM + 60
    # ln 2 is 6.9 of the floor's deviations, 2.9 above the allowance: nine steps to the limit.
    assert anomaly.step == CALM + 60 + 8
    assert "update norm" in anomaly.why
    assert anomaly.numbers["update_norm"]["value"] == pytest.approx(2 * anomaly.numbers["update_norm"]["median"])


@pytest.mark.parametrize("odd", [{"loss": math.nan}, {"grad": math.inf}, {"loss": math.inf}])
def test_a_loss_or_gradient_that_is_not_finite_is_an_anomaly_at_once(odd: dict[str, float]) -> None:
    guard = SpikeDetector()
    assert not first_anomaly(guard, noisy(200))
    guard.observe(step(201, loss=30.0))
    anomaly = guard.observe(step(202, **odd, skipped=True))
    assert anomaly.onset == 201  # it was suspicious before


@pytest.mark.parametrize("skipping", [False, True])
def test_an_update_that_is_not_finite_is_an_anomaly_at_once(skipping: bool) -> None:
    for odd in (math.nan, math.inf):
        guard = SpikeDetector(skipping)
        assert not first_anomaly(guard, noisy(200))
        anomaly = guard.observe(step(201, update=odd, lr=1e-3))
        assert (anomaly.onset, anomaly.step) == (201, 201)
        assert all(math.isfinite(value) for value in guard.watches["update_norm"].values)


def test_a_restored_detector_continues_identically() -> None:
    steps = [*noisy(150), *(step(n, loss=4.5, grad=0.6, update=2.0, lr=1e-3) for n in range(151, 190))]
    for skipping in (False, True):
        one, other = SpikeDetector(skipping), SpikeDetector(skipping)
        for at, each in enumerate(steps):
            if at % 7 == 0:
                saved, other = json.loads(json.dumps(other.state_dict())), SpikeDetector(skipping)
                other.load_state_dict(saved)
            assert one.observe(each) == other.observe(each)
            assert (one.since, one.limits(each.step + 1)) == (other.since, other.limits(each.step + 1))


def test_limits_are_fixed_two_steps_ahead() -> None:
    """So the decision is the same whether the loop has read the last step or is one step behind."""
    steps = list(noisy(150))
    prompt, behind = SpikeDetector(skipping=True), SpikeDetector(skipping=True)
    for before, last in pairwise(steps):
        behind.observe(before)
        if last.step == 2:
            prompt.observe(before)
        prompt.observe(last)
        assert prompt.limits(last.step + 1) == behind.limits(last.step + 1)
    watch = QuantityMonitor(floor=0.05)
    for each in steps[:149]:
        watch.add(each.step, each.loss)
    middle, spread = watch.usual()
    assert prompt.limits(151).loss == middle + 6 * spread
    assert SpikeDetector(skipping=True).limits(1) == Limits(math.inf, math.inf)


def test_too_many_skipped_steps_are_an_anomaly() -> None:
    guard = SpikeDetector(skipping=True)
    assert not first_anomaly(guard, noisy(150))
    gone = (step(n, loss=9.0, skipped=True) for n in range(151, 300))
    anomaly = first_anomaly(guard, gone)
    assert (anomaly.onset, anomaly.step) == (151, 150 + PATIENCE)
