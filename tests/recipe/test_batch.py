"""Batch ramps: batches add up to the tokens, steps and tokens invert each other, a published ramp is reproduced."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from leaven.recipe.batch import Batch, BatchSchedule, BatchStage, Ramp


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    kind = draw(st.sampled_from(["constant", "ramp", "stages"]))
    if kind == "constant":
        return Batch(tokens=draw(st.integers(1, 10_000)))
    if kind == "ramp":
        start, increment, increments = (draw(st.integers(1, high)) for high in (500, 200, 30))
        over = draw(st.integers(1, 100_000))
        ramp = Ramp(start_tokens=start, increment_tokens=increment, over_tokens=over)
        return Batch(tokens=start + increment * increments, ramp=ramp)
    starts = draw(st.lists(st.integers(1, 50_000), unique=True, max_size=6).map(sorted))
    sizes = draw(st.lists(st.integers(1, 2_000), min_size=len(starts) + 1, max_size=len(starts) + 1))
    stages = tuple(BatchStage(from_tokens=t, tokens=size) for t, size in zip([0, *starts], sizes, strict=True))
    return Batch(tokens=sizes[-1], stages=stages)


@given(batches(), st.integers(0, 400))
def test_the_batches_of_all_steps_add_up_to_the_tokens_consumed(batch: Batch, steps: int) -> None:
    schedule, consumed = BatchSchedule(batch.sizes), 0
    for step in range(steps):
        assert schedule.tokens_at_step(step) == consumed
        consumed += schedule.batch_at(consumed)
    assert schedule.tokens_at_step(steps) == consumed


@given(batches(), st.integers(0, 10**6))
def test_first_step_at_inverts_tokens_at_step(batch: Batch, n: int) -> None:
    schedule = BatchSchedule(batch.sizes)
    assert schedule.first_step_at(schedule.tokens_at_step(n)) == n
    step = schedule.first_step_at(n)  # n as tokens
    assert schedule.tokens_at_step(step) >= n
    assert step == 0 or schedule.tokens_at_step(step - 1) < n


@given(batches().filter(lambda batch: not batch.stages), st.integers(0, 10**6), st.integers(0, 10**6))
def test_a_ramp_never_falls_and_ends_at_the_full_batch(batch: Batch, a: int, b: int) -> None:
    schedule = BatchSchedule(batch.sizes)
    early, late = sorted((a, b))
    assert schedule.batch_at(early) <= schedule.batch_at(late)
    assert schedule.batch_at(0) == (batch.ramp.start_tokens if batch.ramp else batch.tokens)
    if batch.ramp:
        assert schedule.batch_at(batch.ramp.over_tokens) == batch.tokens
        increments = (batch.tokens - batch.ramp.start_tokens) // batch.ramp.increment_tokens
        if increments <= batch.ramp.over_tokens:
            assert schedule.batch_at(batch.ramp.over_tokens - 1) < batch.tokens


def test_the_ramp_of_bloom_ends_after_9_765_625_samples() -> None:
    """--rampup-batch-size 192 16 9_765_625: the third number is the length of the whole ramp.

    The log of the run agrees: 2048 at 9,841,584 samples (bigscience, train/tr11-176B-ml/chronicles.md).
    """
    ramp = Ramp(start_tokens=192 * 2048, increment_tokens=16 * 2048, over_tokens=9_765_625 * 2048)
    schedule = BatchSchedule(Batch(tokens=2048 * 2048, ramp=ramp).sizes)
    assert len(schedule.sizes) == 116 + 1
    assert schedule.sizes[1][0] / 2048 == pytest.approx(9_765_625 / 116, abs=1)
    assert schedule.batch_at(9_841_584 * 2048) == 2048 * 2048
    assert schedule.batch_at(9_765_624 * 2048) == (2048 - 16) * 2048


RAMP = {"start_tokens": 50, "increment_tokens": 50, "over_tokens": 10}


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"tokens": 100, "ramp": RAMP | {"start_tokens": 200}}, "tokens is only 100"),
        ({"tokens": 100, "ramp": RAMP | {"increment_tokens": 15}}, "whole number of"),
        ({"tokens": 100, "stages": [{"from_tokens": 5, "tokens": 100}]}, "start at 0"),
        ({"tokens": 100, "stages": [{"from_tokens": 0, "tokens": 50}]}, "make them equal"),
        ({"tokens": 100, "ramp": RAMP, "stages": [{"from_tokens": 0, "tokens": 100}]}, "not both"),
    ],
)
def test_impossible_batches_are_refused(batch: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Batch.model_validate(batch)
