"""When a trial is given up, on curves that are made up."""

import math

import pytest

from leaven.training.outcome import Curve, Rival
from leaven.training.rival import comparable, expected, gap, hopeless_against

BEST: Curve = tuple((point * 100, 6 * math.exp(-3 * point / 32) + 2) for point in range(1, 33))
RIVAL = Rival(BEST, 2.4, noise=0.01)


def behind(by: float, points: int) -> Curve:
    return tuple((tokens, loss + by) for tokens, loss in BEST[:points])


def given_up(by: float) -> int | None:
    """The point at which a run is given up that is always behind by so much."""
    return next((points for points in range(1, 33) if hopeless_against(behind(by, points), RIVAL)), None)


def test_the_further_behind_the_sooner() -> None:
    points = [given_up(by) for by in (100.0, 1.5, 0.5, 0.1)]
    assert None not in points
    assert points == sorted(set(points))
    assert points[0] is not None
    assert points[0] >= 8  # a quarter of the run


def test_what_is_within_the_noise_or_ahead_is_never_given_up() -> None:
    assert given_up(0.03) is None
    assert given_up(-0.5) is None
    noisy = Rival(BEST, 2.4, noise=1.0)
    assert not any(hopeless_against(behind(1.5, points), noisy) for points in range(1, 33))


def test_one_bad_stretch_is_none() -> None:
    odd = (*BEST[:19], (BEST[19][0], BEST[19][1] + 1.5))
    assert not hopeless_against(odd, RIVAL)
    assert hopeless_against(behind(1.5, 20), RIVAL)


def test_a_run_of_other_batches_is_compared_at_its_own_tokens() -> None:
    shifted = tuple((tokens - 50, 6 * math.exp(-3 * (tokens - 50) / 3200) + 2) for tokens, _ in BEST[:20])
    assert gap(shifted, RIVAL) == pytest.approx(0, abs=0.01)
    assert comparable(RIVAL, 3_190)
    assert not comparable(RIVAL, 1_600)
    assert not comparable(Rival((), 2.0, 0.01), 3_200)


def test_what_is_expected_lies_between_the_rival_and_the_gap() -> None:
    assert expected(BEST[:20], RIVAL) == pytest.approx(2.4)
    near, far = expected(behind(0.5, 20), RIVAL), expected(behind(1.0, 20), RIVAL)
    assert 2.4 < near < 2.9
    assert near < far < 3.4
