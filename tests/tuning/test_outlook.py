"""What a larger budget gains, and which two values matter, on landscapes with a known optimum."""

import numpy as np
import pytest
from benchmarks._landscapes import Landscape, landscape

from leaven.tuning import search
from leaven.tuning.algorithm.sensitivity import best_pair, further_gain
from leaven.tuning.algorithm.trust_region import Axes, Region, region
from leaven.tuning.service.search import SearchResult
from leaven.tuning.service.search_loop import Proposal

D = 9
NAMES = [f"{'lr' if i % 3 == 0 else 'v'}.{i}" for i in range(D)]
AXES = Axes(dict.fromkeys(NAMES, (-3.0, 3.0)))


def searched(land: Landscape, seed: int, trials: int) -> SearchResult:
    def loss(x: Proposal) -> float:
        octaves = np.array([x[name] for name in NAMES])
        noise = np.random.default_rng([seed, x.seed, *np.abs(octaves * 1e6).astype(int)])
        return land.trial(octaves, noise)

    return search(loss, AXES.limits, trials=trials, seed=seed, stop_at_noise=False)


def after(found: SearchResult) -> tuple[Region, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    points = np.array([AXES.octaves(trial.params) for trial in found.trials])
    losses = np.array([trial.loss for trial in found.trials])
    proposed = np.array([trial.purpose == "search" for trial in found.trials])
    return region(AXES, points, losses, found.noise), points, losses, proposed, AXES.octaves(found.params)


@pytest.mark.long
def test_the_expected_gain_of_twice_the_trials_is_within_a_factor_of_three_on_average() -> None:
    trials, expected, gained = 24, [], []
    for seed in range(5):
        land = landscape(D, seed)
        now, points, losses, proposed, best = after(searched(land, seed, trials))
        gain = further_gain(now, AXES, points, losses, searched=proposed, best=best)
        expected.append(gain)
        twice = AXES.octaves(searched(land, seed, 2 * trials).params)
        gained.append(land.loss(best) - land.loss(twice))
    assert 1 / 3 < np.mean(expected) / np.mean(gained) < 3


def test_too_few_trials_say_nothing() -> None:
    now, points, losses, proposed, best = after(searched(landscape(D, 0), 0, 6))
    assert further_gain(now, AXES, points, losses, searched=proposed, best=best) is None


def test_the_best_pair_is_the_two_values_that_matter() -> None:
    def loss(x: Proposal) -> float:
        return (x["lr.0"] - 1) ** 2 + (x["v.5"] + 1) ** 2 + 0.02 * sum((x[name] - 0.5) ** 2 for name in NAMES)

    now, points, _, _, best = after(search(loss, AXES.limits, trials=60, noise=0.0, stop_at_noise=False))
    pair = best_pair(now, points, best, 0.0)
    assert {NAMES[i] for i in pair[:2]} == {"lr.0", "v.5"}
    assert 0.5 < pair[2] <= 1
    assert best_pair(now, points, np.zeros(D), 0.0) is None  # nothing is gained
    assert best_pair(now, points, best, 10.0) is None  # nothing above the noise
    assert best_pair(now, points[: 3 * D - 1], best, 0.0) is None  # too few trials


def test_a_gain_beyond_the_divergence_boundary_is_none() -> None:
    """The loss falls along the first value until it diverges."""

    def loss(x: Proposal) -> float:
        at = x["lr.0"]
        return float("inf") if at > 0.6 else -0.5 * at + 0.3 * sum(x[name] ** 2 for name in NAMES[1:])

    now, points, losses, proposed, best = after(search(loss, AXES.limits, trials=40, noise=0.01, stop_at_noise=False))
    gain = further_gain(now, AXES, points, losses, searched=proposed, best=best)
    assert gain < 0.06  # at most 0.5 (0.6 - best) is left, and the others' 0.3 x^2
