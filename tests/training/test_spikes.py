"""The guard on numbers alone: what is trouble, when it began, and what is not."""

import json
import math
from collections.abc import Iterable
from itertools import pairwise

import numpy as np
import pytest

from leaven.training.spikes import ALLOWANCE, LEVEL, LIMIT, PATIENCE, Anomaly, Limits, QuantityMonitor, SpikeDetector
from leaven.training.step import Step

CALM = 2 * LEVEL


def step(
    number: int, loss: float = 3.0, grad: float = 0.5, update: float = 0.2, lr: float = 1.0, skipped: bool = False
) -> Step:
    return Step(
        step=number,
        tokens=256 * number,
        loss=loss,
        lr=lr,
        grad_norm=grad,
        update_norm=update * lr,
        batch_tokens=256,
        tokens_per_second=1.0,
        tflops=1.0,
        mfu=None,
        memory_gib=1.0,
        skipped=skipped,
        loss_scale=None,
        modules={},
    )


def noisy(count: int, seed: int = 0) -> Iterable[Step]:
    """A run as it should be: a falling loss, a warm-up, norms that drift by a factor of two."""
    draw = np.random.default_rng(seed).standard_normal((count, 3))
    for n, (a, b, c) in enumerate(draw.tolist(), 1):
        yield step(
            n,
            loss=2.0 + 6 / (1 + n / 40) + 0.1 * a,
            grad=math.exp(0.3 * b - 0.7 * n / count),
            update=math.exp(0.05 * c + 0.7 * n / count),
            lr=min(n / 100, 1.0) * 1e-3,
        )


def told(guard: SpikeDetector, steps: Iterable[Step]) -> Anomaly | None:
    return next((trouble for trouble in map(guard.observe, steps) if trouble), None)


def test_noise_is_no_trouble() -> None:
    assert not any(told(SpikeDetector(), noisy(1_000, seed)) for seed in range(8))


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


def test_one_odd_batch_is_no_trouble_and_a_few_are() -> None:
    guard = SpikeDetector()
    assert not told(guard, noisy(200))
    assert not told(guard, [step(201, loss=9.0, grad=50.0, lr=1e-3, update=2.0)])
    assert guard.since == 201
    assert not told(guard, (step(n, loss=3.0, grad=0.5, update=2.0, lr=1e-3) for n in range(202, 210)))
    assert guard.since is None
    trouble = told(guard, (step(n, loss=9.0, grad=0.5, update=2.0, lr=1e-3) for n in range(210, 220)))
    assert trouble is not None
    assert (trouble.onset, trouble.step) == (210, 212)
    assert "loss" in trouble.why
    assert trouble.numbers["loss"]["value"] == 9.0
    assert trouble.numbers["loss"]["sum"] >= LIMIT


def test_an_update_norm_that_doubles_is_trouble_before_loss_and_gradient_move() -> None:
    guard = SpikeDetector()
    assert not told(guard, (step(n, lr=n * 1e-5) for n in range(1, CALM + 60)))  # it grows with the lr alone
    trouble = told(guard, (step(n, update=0.4, lr=n * 1e-5) for n in range(CALM + 60, CALM + 100)))
    assert trouble is not None
    assert trouble.onset == CALM + 60
    # ln 2 is 6.9 of the floor's deviations, 2.9 above the allowance: nine steps to the limit.
    assert trouble.step == CALM + 60 + 8
    assert "update norm" in trouble.why
    assert trouble.numbers["update_norm"]["value"] == pytest.approx(2 * trouble.numbers["update_norm"]["median"])


@pytest.mark.parametrize("odd", [{"loss": math.nan}, {"grad": math.inf}, {"loss": math.inf}])
def test_what_is_no_number_is_trouble_at_once_even_in_the_first_step(odd: dict[str, float]) -> None:
    trouble = SpikeDetector().observe(step(1, **odd, skipped=True))
    assert trouble is not None
    assert (trouble.onset, trouble.step) == (1, 1)
    guard = SpikeDetector()
    assert not told(guard, noisy(200))
    guard.observe(step(201, loss=30.0))
    trouble = guard.observe(step(202, **odd, skipped=True))
    assert trouble is not None
    assert trouble.onset == 201  # it was suspicious before


@pytest.mark.parametrize("odd", [math.nan, math.inf])
@pytest.mark.parametrize("skipping", [False, True])
def test_an_update_that_is_no_number_is_trouble_at_once(odd: float, skipping: bool) -> None:
    for calm in (0, 200):
        guard = SpikeDetector(skipping)
        assert not told(guard, noisy(calm))
        trouble = guard.observe(step(calm + 1, update=odd, lr=1e-3))
        assert trouble is not None
        assert (trouble.onset, trouble.step) == (calm + 1, calm + 1)
        assert f"update norm {odd}" in trouble.why
        assert all(math.isfinite(value) for value in guard.watches["update_norm"].values)


def test_a_guard_that_was_saved_goes_on_as_if_it_had_not_been() -> None:
    steps = [*noisy(150), *(step(n, loss=4.5, grad=0.6, update=2.0, lr=1e-3) for n in range(151, 190))]
    for skipping in (False, True):
        one, other = SpikeDetector(skipping), SpikeDetector(skipping)
        for at, each in enumerate(steps):
            if at % 7 == 0:
                saved, other = json.loads(json.dumps(other.state_dict())), SpikeDetector(skipping)
                other.load_state_dict(saved)
            assert one.observe(each) == other.observe(each)
            assert (one.since, one.limits(each.step + 1)) == (other.since, other.limits(each.step + 1))


def test_the_limits_of_a_step_are_known_two_steps_before_it() -> None:
    """So that a loop decides alike whether it has read the last step or is one behind."""
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


def test_skipping_gives_up_on_a_run_that_does_not_come_back() -> None:
    guard = SpikeDetector(skipping=True)
    assert not told(guard, noisy(150))
    gone = (step(n, loss=9.0, skipped=True) for n in range(151, 300))
    trouble = told(guard, gone)
    assert trouble is not None
    assert (trouble.onset, trouble.step) == (151, 150 + PATIENCE)
