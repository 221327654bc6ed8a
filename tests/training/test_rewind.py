"""Rewinds and skipped data, compared with sets of tokens."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from leaven.data.stream import Stream
from leaven.recipe.batch import BatchSchedule
from leaven.recipe.recipe import Stability
from leaven.training.rewind import Rewind, changed_values, lr_factor, position, skipped, undone
from leaven.training.run_folder import RunFolder
from leaven.training.spikes import WINDOW, Anomaly, oldest_checkpoint, rollback

STRETCHES = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=5)


def left_out(stretches: list[tuple[int, int]]) -> tuple[Rewind, ...]:
    return tuple(Rewind(0, start, start + length) for start, length in stretches)


@given(STRETCHES)
def test_skipped_intervals_are_a_union_and_positions_count_the_rest(stretches: list[tuple[int, int]]) -> None:
    rewinds = left_out(stretches)
    gone = {token for start, length in stretches for token in range(start, start + length)}
    assert [token for start, end in skipped(rewinds) for token in range(start, end)] == sorted(gone)
    rest = [token for token in range(300) if token not in gone]
    assert [position(rewinds, tokens) for tokens in range(100)] == rest[:100]


@given(STRETCHES)
def test_the_stream_skips_intervals(stretches: list[tuple[int, int]]) -> None:
    rewinds = left_out(stretches)
    stream = Stream(np.arange(97), 4, seed=3)
    shorter = Stream(np.arange(97), 4, seed=3, skip=skipped(rewinds))
    whole = stream.batch(0, 300)
    assert np.array_equal(shorter.batch(0, 70), whole[[position(rewinds, n) for n in range(70)]])


def anomaly(onset: int, step: int) -> Anomaly:
    return Anomaly(onset, step, "", {})


STEADY = BatchSchedule(((0, 10),))


def test_each_attempt_rewinds_further_and_skips_more() -> None:
    """A step has ten tokens. Each time, three steps show the anomaly, right after the skipped data."""
    stability = Stability(rollback_lr=0.5, rollback_lr_tokens=1_000)
    # Steps 101 to 103 of the stream, and three more.
    first = rollback((), anomaly(101, 103), STEADY, stability, 0)
    assert first == Rewind(1_000, 1_000, 1_060, 0.5, 1_000, attempt=1, found_step=103)
    # Steps 101 to 103 are now 107 to 109 of the stream: 12 after them, 9 before.
    second = rollback((first,), anomaly(101, 103), STEADY, stability, 0)
    assert second == Rewind(910, 910, 1_090 + 120, 0.5, 1_000, attempt=2, found_step=103)
    # Steps 92 to 94 are 122 to 124 of the stream: 48 after them, 45 before.
    third = rollback((first, second), anomaly(92, 94), STEADY, stability, 0)
    assert third == Rewind(460, 460, 1_240 + 480, 0.5, 1_000, attempt=3, found_step=94)
    rewinds = (first, second, third)
    assert rollback(rewinds, anomaly(94 + WINDOW, 300), STEADY, stability, 0).attempt == 4
    assert rollback(rewinds, anomaly(94 + WINDOW + 1, 300), STEADY, stability, 0).attempt == 1
    manual = Rewind(0, 0, 0)
    assert rollback((*rewinds, manual), anomaly(101, 103), STEADY, stability, 0).attempt == 1
    assert rollback((first,), anomaly(101, 103), STEADY, stability, 990).to_tokens == 990


def test_a_rewind_ends_at_a_step_while_the_batch_grows() -> None:
    ramp = BatchSchedule(((0, 10), (50, 20), (200, 40)))
    rewind = rollback((), anomaly(8, 9), ramp, Stability(), 0)
    assert rewind.to_tokens == ramp.tokens_at_step(7) == 50 + 2 * 20
    assert rewind.skip_to - rewind.skip_from == 2 * 20 + 2 * 20


def test_the_lr_is_lowered_and_rises_back() -> None:
    rewinds = (Rewind(100, 0, 0, lr=0.5, lr_tokens=100), Rewind(150, 0, 0, lr=0.5, lr_tokens=100))
    assert [lr_factor(rewinds[:1], tokens) for tokens in (99, 100, 125, 150, 200, 900)] == [1, 1, 0.625, 0.75, 1, 1]
    assert lr_factor(rewinds, 175) == 0.875 * 0.625
    assert lr_factor((Rewind(100, 0, 0),), 120) == 1


def test_states_after_the_target_of_a_rewind_are_undone() -> None:
    rewinds = (Rewind(100, 0, 0), Rewind(80, 0, 0))
    assert [undone(tokens, rewinds) for tokens in (80, 81, 100, 101)] == [False, True, True, True]
    assert [undone(tokens, rewinds[1:]) for tokens in (80, 81)] == [False, True]
    assert not undone(1_000, rewinds[2:])


def test_the_oldest_checkpoint_follows_from_the_schedule_alone() -> None:
    """A step has ten tokens, a checkpoint is due every 40, and two are kept: those at 80 and 120 when step 13 is
    read."""
    two = Stability(keep=2)

    def oldest(found: Anomaly, *before: Rewind, stability: Stability = two) -> int:
        return oldest_checkpoint(before, found, STEADY, stability, 40)

    assert oldest(anomaly(3, 3)) == 0
    assert oldest(anomaly(13, 13)) == 80
    assert oldest(anomaly(12, 12)) == 40  # the checkpoint at 120 is written after step 12 is read
    assert oldest(anomaly(6, 13)) == 40  # the last good one
    assert oldest(anomaly(13, 13), stability=Stability(keep=1)) == 120
    assert oldest(anomaly(13, 13), stability=Stability(keep=1, keep_every_tokens=60)) == 80
    # After the rewind to 90 there is only the checkpoint at 80 until step 12.
    back = Rewind(90, 90, 200, attempt=1, found_step=13)
    assert oldest(anomaly(11, 11), back) == 80
    assert oldest(anomaly(17, 17), back) == 120
    # A manual rewind goes to an existing checkpoint, scheduled or not.
    assert oldest(anomaly(11, 11), back, Rewind(50, 50, 50)) == 50


def _rewound(to_tokens: int, **changes: tuple[float, float]) -> dict[str, Any]:
    changed = [{"path": path, "before": before, "after": after} for path, (before, after) in changes.items()]
    return {"event": "rewind", "to_tokens": to_tokens, "changes": changed}


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([_rewound(512)], []),
        ([{"event": "rollback", "to_tokens": 512}], []),
        ([_rewound(512, lr=(0.1, 0.2))], ["lr 0.1 up to 512 tokens and then 0.2"]),
        ([_rewound(0, lr=(0.1, 0.2))], []),  # all steps have the new lr
        ([_rewound(512, lr=(0.1, 0.2)), _rewound(512, lr=(0.2, 0.1))], []),
        ([_rewound(512, lr=(0.1, 0.2)), _rewound(256)], ["lr 0.1 up to 256 tokens and then 0.2"]),
        ([_rewound(512, lr=(0.1, 0.2)), _rewound(0)], []),
        (
            [_rewound(512, lr=(0.1, 0.2)), _rewound(768, lr=(0.2, 0.3))],
            ["lr 0.1 up to 512 tokens and then 0.2 up to 768 tokens and then 0.3"],
        ),
        ([_rewound(512, **{"evaluation.tokens": (1, 2), "stability.keep": (1, 2)})], []),
        ([{"event": "rewind", "to_tokens": 512, "changes": [5]}], []),  # damaged
    ],
)
def test_values_that_a_rewind_changed_within_a_run(
    tmp_path: Path, events: list[dict[str, Any]], expected: list[str]
) -> None:
    run = RunFolder(tmp_path)
    run.events_file.write_text("".join(f"{json.dumps(event)}\n" for event in events))
    assert changed_values(run) == expected
