"""The passes of a pipeline compared with torch's order and with closed forms of bubble and passes in flight."""

import itertools
from fractions import Fraction
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from leaven.planning.arrangement import Arrangement, bubble
from leaven.planning.hardware import parse_cluster
from leaven.planning.schedule import Timeline, order, simulate, timeline
from leaven.planning.stages import in_flight
from leaven.planning.timing import step_time
from leaven.recipe.layout import Layout
from leaven.recipe.shape import ModelShape

KINDS = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("zero-bubble", 1), ("zero-bubble", 2)]
SIZES = [(2, 2), (4, 16), (8, 8), (5, 15)]
schedules = pytest.mark.parametrize(("schedule", "v"), KINDS)
sizes = pytest.mark.parametrize(("p", "m"), SIZES)


def even(layout: Layout, micro_batches: int) -> Timeline:
    """Simulate equal stages: a forward pass takes 1, a backward pass 2. Integers give exact results."""
    stages = layout.pp * layout.stages_per_rank
    return simulate(layout, micro_batches, [1] * stages, [2] * stages)


def idle(step: Timeline) -> Fraction:
    busy = sum(each.end - each.start for passes in step.ranks for each in passes)
    return 1 - Fraction(busy, step.end * len(step.ranks))


@schedules
@sizes
def test_the_simulated_bubble_equals_the_closed_form(schedule: str, v: int, p: int, m: int) -> None:
    step = even(Layout(pp=p, schedule=schedule, stages_per_rank=v), m)
    # Narayanan et al. 2021; in zero-bubble the gradients of weights fill the bubble: (p - 1)(t_F + t_B - t_W) of Qi
    # et al. 2023, Table 2 (ZB-H1), where all three are 1.
    expected = Fraction(p - 1, (3 if schedule == "zero-bubble" else 1) * v * m + p - 1)
    assert idle(step) == expected
    assert step.bubble == pytest.approx(float(expected))
    if schedule != "zero-bubble":
        assert step.bubble == pytest.approx(bubble(m, p, v))


@schedules
@sizes
def test_micro_batches_in_flight_equal_those_that_memory_counts(schedule: str, v: int, p: int, m: int) -> None:
    layout = Layout(pp=p, schedule=schedule, stages_per_rank=v)
    step = even(layout, m)
    assert [step.in_flight(rank) / v for rank in range(p)] == [in_flight(layout, rank, m) for rank in range(p)]


@schedules
@sizes
def test_the_order_is_the_one_that_torch_runs(schedule: str, v: int, p: int, m: int) -> None:
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    names = {
        "gpipe": "ScheduleGPipe",
        "1f1b": "Schedule1F1B",
        "interleaved": "ScheduleInterleaved1F1B",
        "zero-bubble": "ScheduleInterleavedZeroBubble",
    }
    stages = [
        SimpleNamespace(
            stage_index=p * turn, num_stages=p * v, group_size=p, group_rank=0, group=None, is_last=False,
            is_first=turn == 0, has_backward=True, device="cpu", submod=Mock(),
            stage_index_to_group_rank={stage: stage % p for stage in range(p * v)},
        )
        for turn in range(v)
    ]  # fmt: skip
    alone = schedule in {"gpipe", "1f1b"}
    made = getattr(schedules, names[schedule])(stages[0] if alone else stages, n_microbatches=m, loss_fn=Mock())
    if made.__dict__.get("pipeline_order") is None:
        pytest.skip("this torch does not say in what order it runs the schedule")
    words = {"FORWARD": "forward", "FULL_BACKWARD": "backward", "BACKWARD_INPUT": "input"}
    words |= {"BACKWARD_WEIGHT": "weight"}
    layout = Layout(pp=p, schedule=schedule, stages_per_rank=v)
    for rank in range(p):
        theirs = [
            (words[action.computation_type.name], action.stage_index, action.microbatch_index)
            for action in made.pipeline_order[rank]
            if action is not None and action.computation_type.name in words
        ]
        if schedule == "1f1b" and rank == p - 1:
            # torch 2.13 reports the last rank's forward passes counted from 1, and runs them counted from 0.
            theirs = [(kind, stage, i - (kind == "forward")) for kind, stage, i in theirs]
        assert order(layout, rank, m) == theirs


@schedules
def test_no_pass_begins_before_what_it_needs_and_a_rank_does_one_at_a_time(schedule: str, v: int) -> None:
    p, m = 4, 8
    layout = Layout(pp=p, schedule=schedule, stages_per_rank=v)
    forward = [1 + 0.1 * stage for stage in range(p * v)]
    backward = [2.5 + 0.3 * (stage % 3) for stage in range(p * v)]
    step = simulate(layout, m, forward, backward)
    every = {(each.kind, each.stage, each.micro_batch): each for passes in step.ranks for each in passes}
    half = "input" if schedule == "zero-bubble" else "backward"
    assert len(every) == p * v * m * (3 if half == "input" else 2)
    for (kind, stage, micro_batch), each in every.items():
        if kind == "forward" and stage:
            assert each.start >= every["forward", stage - 1, micro_batch].end
        if kind == half:
            assert each.start >= every["forward", stage, micro_batch].end
            if stage < p * v - 1:
                assert each.start >= every[half, stage + 1, micro_batch].end
        if kind == "weight":
            assert each.start >= every["input", stage, micro_batch].end
    for rank, passes in enumerate(step.ranks):
        assert all(each.stage % p == rank for each in passes)
        assert all(before.end <= after.start for before, after in itertools.pairwise(passes))
        worked = sum(each.end - each.start for each in passes)
        assert worked == pytest.approx(m * sum((*forward[rank::p], *backward[rank::p])))


def test_the_slowest_stage_sets_the_pace() -> None:
    """1F1B by hand: the last of three stages takes twice as long, so the step is its work after one forward each of
    the others, and the way back: 1 + 1 + 5 x 6 + 2 + 2."""
    step = simulate(Layout(pp=3), 5, [1, 1, 2], [2, 2, 4])
    assert step.end == 36
    last = step.ranks[-1]
    assert all(before.end == after.start for before, after in itertools.pairwise(last))


SHAPE = ModelShape(
    n_layers=64, d_model=4096, n_heads=32, n_kv_heads=32, d_head=128, d_ff=16_384, vocab_size=512, seq_len=2048
)


@pytest.mark.parametrize("recompute", ["none", "full"])
@schedules
def test_the_simulated_bubble_of_even_stages_equals_that_of_step_time(schedule: str, v: int, recompute: str) -> None:
    cluster = parse_cluster("32xA100-80GB")
    shape = SHAPE if v != 3 else SHAPE.model_copy(update={"n_layers": 60})
    layout = Layout(tp=8, pp=4, schedule=schedule, stages_per_rank=v, recompute=recompute)
    how = Arrangement(layout, 1, 12)
    step, time = timeline(shape, how, cluster), step_time(shape, how, cluster)
    worked = sum(each.end - each.start for passes in step.ranks for each in passes)
    assert worked == pytest.approx(4 * (time.compute + time.tensor_parallel + time.pipeline), rel=0.02)
    said = time.bubble / (time.compute + time.tensor_parallel + time.pipeline + time.bubble)
    assert step.bubble == pytest.approx(said, abs=0.005)
