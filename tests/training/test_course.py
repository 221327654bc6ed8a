"""When a run counts as diverged."""

import math

import pytest

from leaven.training.course import Course

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
def test_a_run_is_lost_when_it_stays_worse_than_a_uniform_guess(losses: list[float], lost: bool) -> None:
    course = Course(256, 1024 * 128)
    assert any([course.lost(loss, 128) for loss in losses]) is lost


def test_the_last_large_batch_alone_is_the_mean() -> None:
    course = Course(256, 1024)
    assert [course.lost(loss, 256) for loss in (9.0, 9.0, 5.0)] == [False, True, False]
