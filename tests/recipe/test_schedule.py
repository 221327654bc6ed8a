"""Learning-rate schedules against closed forms: exact at the ends, never rising after the warm-up."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from leaven.recipe.schedule import Decay, Schedule

DECAYS = st.sampled_from(["cosine", "linear", "wsd", "inverse_sqrt", "constant"])
TO_THE_FLOOR = st.sampled_from(["cosine", "linear", "wsd"])
FLOORS = st.floats(0, 1)


@given(DECAYS, st.integers(1, 10**6), st.integers(1, 10**7), FLOORS)
def test_warm_up_is_linear_from_zero_to_the_peak(decay: Decay, warmup: int, rest: int, floor: float) -> None:
    schedule = Schedule(warmup_tokens=warmup, decay=decay, min_lr_ratio=floor)
    horizon = warmup + rest
    assert schedule.multiplier(0, horizon) == 0
    assert schedule.multiplier(warmup / 2, horizon) == pytest.approx(0.5)
    if decay != "wsd" or rest > 0.2 * horizon:
        assert schedule.multiplier(warmup, horizon) == 1


@given(TO_THE_FLOOR, st.integers(0, 10**6), st.integers(1, 10**7), FLOORS, st.integers(0, 10**6))
def test_the_end_is_the_floor_and_stays_there(decay: Decay, warmup: int, rest: int, floor: float, past: int) -> None:
    schedule = Schedule(warmup_tokens=warmup, decay=decay, min_lr_ratio=floor)
    horizon = warmup + rest
    assert schedule.multiplier(horizon, horizon) == pytest.approx(floor, abs=1e-12)
    assert schedule.multiplier(horizon + past, horizon) == pytest.approx(floor, abs=1e-12)


@given(DECAYS, st.integers(1, 1_000), st.integers(1, 10_000), FLOORS, st.data())
def test_after_the_warm_up_it_never_rises(
    decay: Decay, warmup: int, rest: int, floor: float, data: st.DataObject
) -> None:
    schedule = Schedule(warmup_tokens=warmup, decay=decay, min_lr_ratio=floor)
    early = data.draw(st.integers(warmup, warmup + rest))
    late = data.draw(st.integers(early, warmup + rest))
    assert schedule.multiplier(late, warmup + rest) <= schedule.multiplier(early, warmup + rest) + 1e-12


def test_values_against_closed_forms() -> None:
    cosine = Schedule(warmup_tokens=100, decay="cosine", min_lr_ratio=0.1)
    assert cosine.multiplier(100 + 450, 1_000) == pytest.approx(0.55)  # half way: the mean of 1 and 0.1
    assert cosine.multiplier(100 + 300, 1_000) == pytest.approx(0.1 + 0.9 * 0.75)  # a third: (1 + cos 60) / 2
    linear = Schedule(warmup_tokens=0, decay="linear", min_lr_ratio=0.0)
    assert linear.multiplier(250, 1_000) == pytest.approx(0.75)
    wsd = Schedule(warmup_tokens=0, decay="wsd", min_lr_ratio=0.0, decay_ratio=0.2)
    assert wsd.multiplier(800, 1_000) == 1
    assert wsd.multiplier(850, 1_000) == pytest.approx(1 - math.sqrt(0.25))
    rsqrt = Schedule(warmup_tokens=100, decay="inverse_sqrt", min_lr_ratio=0.2)
    assert rsqrt.multiplier(400, 10_000) == pytest.approx(0.5)
    assert rsqrt.multiplier(9_000, 10_000) == pytest.approx(0.2)
    assert Schedule(decay="constant").multiplier(10**9, 10) == 1


def test_inverse_sqrt_needs_a_warm_up() -> None:
    with pytest.raises(ValidationError, match="set warmup_tokens above 0"):
        Schedule(decay="inverse_sqrt", warmup_tokens=0)
