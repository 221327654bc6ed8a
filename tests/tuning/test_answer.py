"""The answer of a search against closed forms and brute force."""

import dataclasses
import itertools
import math
import warnings
from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pytest
from benchmarks._landscapes import landscape
from benchmarks.answers import judged, searched

from leaven.tuning.algorithm.answer import ELSEWHERE, advice_when_all_diverged, answer, finalists, front
from leaven.tuning.algorithm.confirmation import confirm, to_confirm
from leaven.tuning.algorithm.noise_estimate import GIVEN, floor
from leaven.tuning.algorithm.trust_region import Axes, region
from leaven.tuning.document import Answer, Best, Coordinate, Dimension, StudyDocument, StudyTrial
from leaven.tuning.service.results import ped_anova, reason
from leaven.views.terminal.study import answer_text as lines

PATHS = ("hyperparameters.lr", "hyperparameters.modules.embedding.lr", "hyperparameters.beta1", "hyperparameters.eps")
DIMENSIONS = tuple(Dimension(path, 0.01, -3.0, 3.0) for path in PATHS)
OPTIMUM = np.array([1.0, -0.5, 0.3, 0.0])
CURVATURE = np.array([1.0, 0.5, 1.5, 1.0])


def excess(x: np.ndarray) -> float:
    return float(((x - OPTIMUM) ** 2 * CURVATURE).sum() / 2)


def trial(number: int, x: Sequence[float], loss: float, **changes: object) -> StudyTrial:
    octaves = dict(zip(PATHS, map(float, x), strict=True))
    state = "complete" if math.isfinite(loss) else "diverged"
    made = StudyTrial(number, state, loss, octaves, 1.0, None, octaves=octaves, ended=float(number))
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]


def study(reruns: Sequence[Sequence[float]] = (), noise: float = 0.0) -> list[StudyTrial]:
    """Three seeds at the start, 60 trials around it of a parabola, and two seeds of some points."""
    rng = np.random.default_rng(0)
    points = [np.zeros(4)] * 3 + list(rng.normal(0, 0.7, (60, 4)))
    points += [np.array(x) for x in reruns for _ in range(2)]
    seeds = [0, 1, 2] + [0] * 60 + [1, 2] * len(reruns)
    purposes = ["search"] + ["noise"] * 2 + ["search"] * 60 + ["rerun"] * 2 * len(reruns)
    return [
        trial(i, x, 3.0 + excess(x) + noise * rng.normal(), seed=seed, purpose=purpose)
        for i, (x, seed, purpose) in enumerate(zip(points, seeds, purposes, strict=True))
    ]


def test_the_noise_is_of_points_with_several_seeds() -> None:
    runs = [
        ("a", 0, 1.0),
        ("a", 1, 3.0),
        ("a", 1, 3.0),
        ("b", 0, 5.0),
        ("c", 1, 2.0),
        ("c", 2, 2.5),
        ("c", 3, math.inf),
    ]
    noise, degrees = floor(runs)  # by hand: squares of 2 and of 0.125, a degree each
    assert noise == pytest.approx(math.sqrt((2 + 0.125) / 2))
    assert degrees == 2
    # Ten points with the same two seeds know no more of what a seed does to all of them than one.
    assert floor([(point, seed, float(seed)) for point in range(10) for seed in range(2)])[1] == 1
    # An objective that knows no seeds has noise of its own.
    assert floor([("a", 0, loss) for loss in (1.0, 2.0, 4.0)])[1] == 2
    assert floor([("a", 0, 1.0), ("b", 0, 2.0)]) == (None, 0)


def test_the_noise_at_the_start_counts_and_that_at_the_edge_of_a_cliff_does_not() -> None:
    start = [("start", seed, 4.4 + 0.03 * sign) for seed, sign in enumerate((1, -1, 1, -1, 0))]
    quiet = [(point, seed, 3.9 + 0.001 * seed) for point in "abc" for seed in (1, 2)]
    edge = [("edge", 1, 4.0), ("edge", 2, 4.3)]
    squares = 4 * 0.03**2 + 3 * 0.001**2 / 2  # about the means, with 4 + 3 degrees of freedom
    assert floor([*start, *quiet, *edge])[0] == pytest.approx(math.sqrt(squares / 7))


def test_flat_regions_gains_and_slices_of_a_parabola_are_its_closed_forms() -> None:
    found = answer(study([OPTIMUM]), DIMENSIONS, 0.02, optunas=ped_anova)
    np.testing.assert_array_equal([found.octaves[path] for path in PATHS], OPTIMUM)
    by_path = {each.path: each for each in found.coordinates}
    for i, path in enumerate(PATHS):
        each = by_path[path]
        half = math.sqrt(2 * 0.02 / CURVATURE[i])
        # The noise that is taken for granted leaves some doubt, which makes the region narrower, never wider.
        assert OPTIMUM[i] - half <= each.flat[0] == pytest.approx(OPTIMUM[i] - half, abs=0.07)
        assert OPTIMUM[i] + half >= each.flat[1] == pytest.approx(OPTIMUM[i] + half, abs=0.07)
        assert each.gain == pytest.approx(CURVATURE[i] * OPTIMUM[i] ** 2 / 2, abs=0.01)
        assert each.worth == (i != 3)
        assert len(each.slice) == 21
        for point in each.slice:
            rise = CURVATURE[i] * (point.octaves - OPTIMUM[i]) ** 2 / 2
            assert point.loss == pytest.approx(rise, abs=0.05 + 3 * point.deviation)
        assert max(point.risk for point in each.slice) < 0.05
    assert sum(each.importance for each in found.coordinates) == pytest.approx(1)
    shares = [each.importance for each in found.coordinates]
    assert shares == sorted(shares, reverse=True)
    assert sum(each.optuna_importance for each in found.coordinates) == pytest.approx(1)
    assert Answer.model_validate_json(found.model_dump_json()).coordinates == found.coordinates


def test_importance_is_how_much_the_loss_varies_over_what_was_tried() -> None:
    trials = study([OPTIMUM])
    tried = np.array([list((run.octaves or {}).values()) for run in trials])
    spread = ((tried - OPTIMUM) ** 2 * CURVATURE / 2).std(0)
    by_path = {each.path: each.importance for each in answer(trials, DIMENSIONS, 0.001).coordinates}
    np.testing.assert_allclose([by_path[path] for path in PATHS], spread / spread.sum(), atol=0.01)


def test_a_flat_region_ends_at_a_cliff() -> None:
    trials = [
        dataclasses.replace(run, state="diverged", loss=9.0) if run.octaves and run.octaves[PATHS[3]] > 0.2 else run
        for run in study([OPTIMUM])
    ]
    flat = next(each.flat for each in answer(trials, DIMENSIONS, 1.0).coordinates if each.path == PATHS[3])
    assert flat[0] < -0.8
    assert flat[1] < 0.5


def test_the_best_is_chosen_by_fresh_seeds_alone_and_compared_with_the_start_seed_by_seed() -> None:
    lucky = np.array([0.2, 0.2, 0.2, 0.2])
    trials = study([OPTIMUM, lucky])
    trials += [trial(100, lucky, 2.0)]  # the search's own seed was kind to it
    found = answer(trials, DIMENSIONS, 0.02)
    assert found.best is not None
    assert found.best.loss == pytest.approx(3.0)
    assert found.best.number == 63  # its first run
    # Its runs chose it between two, and are no measure of it. Two more are.
    assert (found.best.fresh, found.best.interval) == (0, (-math.inf, math.inf))
    confirmed = [trial(70 + k, OPTIMUM, 3.01, purpose="rerun", confirms=True, seed=k) for k in (3, 4)]
    best = answer([*trials, *confirmed], DIMENSIONS, 0.02).best
    assert best is not None
    assert (best.fresh, best.loss) == (2, pytest.approx(3.01))
    assert best.interval == pytest.approx((3.01 - 1.96 * 0.02 / 2**0.5, 3.01 + 1.96 * 0.02 / 2**0.5), rel=1e-3)
    assert found.gain is None
    # With the same seeds the start is run, too, and the gain is of these runs alone.
    at_start = [trial(80 + k, [0, 0, 0, 0], 3.5 + k / 100, purpose="rerun", confirms=True, seed=k) for k in (3, 4)]
    gained = answer([*trials, *confirmed, *at_start], DIMENSIONS, 0.02)
    assert gained.gain == pytest.approx(0.535 - 0.01)
    # What they do not confirm is none.
    at_start = [dataclasses.replace(run, loss=3.02) for run in at_start]
    refuted = answer([*trials, *confirmed, *at_start], DIMENSIONS, 0.02)
    assert set(refuted.octaves.values()) == {0.0}
    assert (refuted.gain, refuted.idle) == (0.0, ())
    assert found.noise_runs == GIVEN
    # A seed that raises every loss alike does not change that difference.
    alone = study([OPTIMUM])
    shifted = [dataclasses.replace(run, loss=(run.loss or 0) + run.seed) for run in alone]
    assert answer(shifted, DIMENSIONS, 0.02).gain == pytest.approx(excess(np.zeros(4)))
    # One rerun is not enough, nor is a point that diverged with one of its seeds.
    trials += [trial(101, [0.9, -0.5, 0.3, 0], 2.5, purpose="rerun", seed=1)]
    trials += [trial(102, [0.8, -0.5, 0.3, 0], 2.5 + k, purpose="rerun", seed=1 + k) for k in (0, math.inf)]
    assert answer(trials, DIMENSIONS, 0.02).best == found.best


def test_nothing_was_run_again_yet() -> None:
    found = answer([run for run in study() if run.purpose == "search"], DIMENSIONS)
    assert (found.best, found.noise_floor, found.fewest, found.gain) == (None, None, None, None)
    np.testing.assert_allclose([found.octaves[path] for path in PATHS], OPTIMUM, atol=0.05)
    assert len(found.coordinates) == 4
    assert lines(answer([], DIMENSIONS)) == []


@pytest.mark.parametrize("noise", [0.01, 0.03, 0.1, 0.3, 2.0])
def test_the_fewest_changes_are_those_of_brute_force(noise: float) -> None:
    trials = study()
    _, fewest, promise, *_ = (np.array(list(x.values())) for x in finalists(trials, Axes.of(DIMENSIONS), noise))
    points = np.array([list((run.octaves or {}).values()) for run in trials])
    now = region(Axes.of(DIMENSIONS), points, np.array([run.loss for run in trials]), noise)
    equal = []
    for kept in itertools.product([0.0, 1.0], repeat=4):
        x = promise * kept
        cost = now.belief(np.array([x]))[0] - now.belief(np.array([promise]))[0]
        if cost + 2 * now.deviation(x[None], promise)[0] <= noise:
            equal.append(x)
    assert np.count_nonzero(fewest) == min(map(np.count_nonzero, equal))
    assert any(np.array_equal(fewest, x) for x in equal)
    # Its expected cost is the truth's, and that is below the noise.
    assert excess(fewest) <= noise


def judged_with(losses: dict[tuple[float, ...], dict[int, float]]) -> list[StudyTrial]:
    """Three seeds at the start, and the runs of others: of seeds 1 and 2 to choose, of 3 and 4 to confirm."""
    runs = [(0.0, seed, 3.0) for seed in range(3)] + [
        (x[0], k, loss) for x, of in losses.items() for k, loss in of.items()
    ]
    return [
        trial(i, [x, 0, 0, 0], loss, seed=k, purpose="rerun" if i > 2 else "search", confirms=k > 2)
        for i, (x, k, loss) in enumerate(runs)
    ]


def test_what_was_refuted_stands_in_nobodys_way() -> None:
    lucky, better, start = (1.0, 0.0, 0.0, 0.0), (2.0, 0.0, 0.0, 0.0), (0.0, 0.0, 0.0, 0.0)
    known = {lucky: {1: 2.8, 2: 2.8, 3: 3.1, 4: 3.1}, start: {3: 3.0, 4: 3.0}}
    trials = judged_with(known)
    said = confirm(trials, PATHS, 0.02)
    assert said is not None
    assert (said.point, to_confirm(trials, PATHS, 0.02)) == (start, None)
    # With a larger budget another is judged, a little worse by the runs that choose, and believed once confirmed.
    trials = judged_with({**known, better: {1: 2.9, 2: 2.9}})
    said = confirm(trials, PATHS, 0.02)
    assert said is not None
    assert (said.point, to_confirm(trials, PATHS, 0.02)) == (start, better)
    said = confirm(judged_with({**known, better: {1: 2.9, 2: 2.9, 3: 2.91, 4: 2.91}}), PATHS, 0.02)
    assert said is not None
    assert (said.point, said.loss, said.fresh, said.gain) == (better, 2.91, 2, pytest.approx(0.09))


def test_what_nothing_confirms_has_to_be_better_by_two_and_a_half_times_the_noise() -> None:
    alone, start = (1.0, 0.0, 0.0, 0.0), (0.0, 0.0, 0.0, 0.0)
    for gained, point in ((0.045, start), (0.055, alone)):
        said = confirm(judged_with({alone: {1: 3 - gained, 2: 3 - gained}}), PATHS, 0.02)
        assert said is not None
        assert said.point == point
    both: dict[tuple[float, ...], dict[int, float]] = {alone: {1: 2.97, 2: 2.97}, (2.0, 0.0, 0.0, 0.0): {1: 3, 2: 3}}
    assert to_confirm(judged_with(both), PATHS, 0.02) == alone
    # Nor does another that was judged beside it, with a larger budget say, make it any surer.
    said = confirm(judged_with(both), PATHS, 0.02)
    assert said is not None
    assert said.point == start


def test_a_run_that_chose_is_never_called_fresh() -> None:
    """The start diverges with a seed, and the only one that was judged with another."""
    trials = judged_with({(1.0, 0.0, 0.0, 0.0): {1: math.inf, 2: 2.9}})
    trials[1] = dataclasses.replace(trials[1], state="diverged", loss=math.inf)
    trials.append(trial(9, [2.0, 0, 0, 0], 2.9))
    said = confirm(trials, PATHS, 0.02)
    assert said is not None
    assert (said.point, said.losses, said.fresh) == ((2.0, 0.0, 0.0, 0.0), (2.9,), 0)


def test_half_a_confirmation_does_not_change_what_is_confirmed() -> None:
    lucky = (1.0, 0.0, 0.0, 0.0)
    others: dict[tuple[float, ...], dict[int, float]] = {(2.0, 0.0, 0.0, 0.0): {1: 2.95, 2: 2.95}}
    half = {**others, lucky: {1: 2.9, 2: 2.9, 3: 3.3}, (0.0, 0.0, 0.0, 0.0): {3: 2.5}}
    assert to_confirm(judged_with(half), PATHS, 0.02) == lucky


def test_the_fewest_changes_are_measured() -> None:
    near = [1.0, -0.5, 0.0, 0.0]  # costs 0.0675
    trials = study([OPTIMUM, near], 0.0)
    found = answer(trials, DIMENSIONS, 0.1)
    assert found.best is not None
    assert found.fewest is not None
    assert found.fewest_octaves == dict(zip(PATHS, near, strict=True))
    assert found.fewest.loss - found.best.loss == pytest.approx(0.0675)
    assert found.fewest_cost == pytest.approx(0.0675, abs=0.01)
    assert found.idle == (PATHS[1], PATHS[3])  # the second costs 0.0625, and the two together less than the noise
    assert (
        "fewest     2 of 4 changed, 1.5 octaves in all, equal to the best within noise; expected +0.06"
        in "\n".join(lines(found))
    )
    # Where its runs say otherwise, they are believed.
    worse = [dataclasses.replace(run, loss=(run.loss or 0) + 0.1) if run.number >= 65 else run for run in trials]
    assert answer(worse, DIMENSIONS, 0.1).fewest_octaves == found.octaves
    # The start has runs of its own.
    assert set((answer(trials, DIMENSIONS, 2.0).fewest_octaves or {}).values()) == {0.0}


def test_finalists_are_the_incumbent_the_fewest_the_promise_and_the_best_trials() -> None:
    trials = study()
    found = [np.array(list(x.values())) for x in finalists(trials, Axes.of(DIMENSIONS), 0.1)]
    assert found[0].tolist() in [list((run.octaves or {}).values()) for run in trials]
    assert np.count_nonzero(found[1]) < 4  # of two finalists, all that 32 trials pay, it is one
    np.testing.assert_allclose(found[2], OPTIMUM, atol=0.05)
    assert len({tuple(x) for x in found}) == len(found)
    losses = [excess(x) for x in found[3:10]]
    assert losses == pytest.approx(sorted(losses), abs=0.01)
    by_loss = finalists(trials, Axes.of(DIMENSIONS), 0.1, by_surrogate=False)
    assert by_loss[0] == min(trials, key=lambda run: run.loss or math.inf).octaves
    assert finalists([trial(0, [0, 0, 0, 0], math.inf)], Axes.of(DIMENSIONS), None) == []


def test_what_ended_far_above_all_others_is_the_last_finalist() -> None:
    """The bowl leaves it out, and so says nothing of it, however low it would be there."""
    near = [trial(k, OPTIMUM + 0.02 * np.eye(4)[k % 4] * k, 3.0 + 1e-4 * k) for k in range(20)]
    far = trial(20, [-2.9, 2.9, -2.9, 2.9], 3.9)
    assert finalists([*near, far], Axes.of(DIMENSIONS), 0.01)[-1] == far.octaves


def test_a_stopped_trial_counts_in_the_bowl_and_not_in_the_noise() -> None:
    trials = study([OPTIMUM])
    expected = [dataclasses.replace(run, state="stopped") if 10 <= run.number < 40 else run for run in trials]
    assert answer(expected, DIMENSIONS, 0.02).coordinates == answer(trials, DIMENSIONS, 0.02).coordinates
    again = trial(200, [0, 0, 0, 0], 99.0, state="stopped", seed=7)
    assert answer([*trials, again], DIMENSIONS).noise_floor == answer(trials, DIMENSIONS).noise_floor


def test_the_lines_are_aligned_and_say_all() -> None:
    text = lines(answer(study([OPTIMUM]), DIMENSIONS, 0.02))
    assert text[0] == "best       3.0000 nats per token, 95% interval 2.9723 to 3.0277, -0.6300 against the start"
    assert text[1] == "           the mean of 2 runs that were not used to choose it"
    assert text[2] == "noise      0.0200 nats, standard deviation between seeds (given)"
    rows = text[3:7]
    assert rows[0].split() == ["mattered", "change", "as", "good", "between", "gain", "importance"]
    assert len({len(row) for row in rows}) == 1
    assert {row.split()[0] for row in rows[1:]} == {"lr", "embedding.lr", "beta1"}
    assert ["lr", "x2.00"] in [row.split()[:2] for row in rows]
    assert text[-3:] == [
        "fewest     no point with fewer changes that was run is equal to the best within noise",
        "not worth  1 of 4: at the start they cost less than the noise together",
        "           eps",
    ]


def said_of(gains: dict[str, tuple[float, float, bool]], degrees: int = 2) -> Answer:
    """An answer an octave up in all of ``gains``: the gain, its deviation, and whether it surely is one."""
    coordinates = tuple(
        Coordinate(path, 1.0, (-5.55, 1.0), gain, 0.5, worth, gain_deviation=deviation)
        for path, (gain, deviation, worth) in gains.items()
    )
    octaves = dict.fromkeys(gains, 1.0)
    best = Best(5, 3.5, (3.4, 3.6), 2, 2)
    return Answer(
        best=best,
        octaves=octaves,
        noise_floor=0.03,
        noise_runs=degrees,
        coordinates=coordinates,
        fewest=best,
        fewest_octaves=octaves,
        fewest_cost=0.0,
        gain=0.7,
        dimensions=DIMENSIONS,
    )


def of_study(found: Answer) -> StudyDocument:
    """A study of 64 trials with that answer."""
    trials = (trial(0, [0.0] * 4, 3.0),) * 64
    return StudyDocument(**vars(found), name="wheat", method="trust-region", space=PATHS, trials=trials)


def test_what_is_not_known_is_not_said_to_be_small() -> None:
    """A gain of five times the noise with a large deviation, and a loss: neither gained less than the noise."""
    told = "\n".join(lines(said_of({PATHS[0]: (0.1428, 0.1942, False), PATHS[1]: (0.4, 0.1, True)})))
    assert told.endswith("\nunsure     1 not known to have gained more than the noise, 0.1428")
    found = said_of({PATHS[0]: (0.1428, 0.194, False), PATHS[1]: (-0.2, 0.02, False), PATHS[3]: (0.4, 0.1, True)})
    assert lines(found)[-1] == "unsure     2 not known to have gained more than the noise, -0.0572 together"
    values = dict.fromkeys(PATHS, 0.008)
    said = {path: reason(path, of_study(found), SimpleNamespace(values=lambda _: values)) for path in found.octaves}
    costs = "0.008 at the start costs "
    assert said[PATHS[0]].endswith(costs + "+0.1428 +-0.1940, not known to be more than the noise")
    assert said[PATHS[1]].endswith(costs + "-0.2000 +-0.0200, not known to be more than the noise")
    assert said[PATHS[3]].endswith(costs + "+0.4000 +-0.1000")


def test_of_gains_nothing_is_said_where_the_start_is_the_best() -> None:
    at_start = [trial(k, [0, 0, 0, 0], 3.0 + k / 100, seed=k, purpose="noise" if k else "search") for k in range(2)]
    for count in (1, 2):
        told = "\n".join(lines(answer(at_start[:count], DIMENSIONS, over=True)))
        assert "the start itself: nothing else was run" in told
        assert "gained" not in told
    worse = [trial(3 + k, x, 3.5, seed=0) for k, x in enumerate(np.eye(4))]
    told = "\n".join(lines(answer([*at_start, *worse], DIMENSIONS, over=True)))
    assert "the start itself: nothing was found" in told
    assert "gained" not in told


def test_what_is_best_at_the_end_of_its_range_is_named() -> None:
    trials = study([OPTIMUM])
    narrow = (dataclasses.replace(DIMENSIONS[0], high=1.0), dataclasses.replace(DIMENSIONS[1], low=-0.51))
    found = answer(trials, (*narrow, *DIMENSIONS[2:]), 0.02)
    assert {each.path for each in found.coordinates if each.at_end} == set(PATHS[:2])
    told = "\n".join(lines(found))
    assert "lr: the end of the space\n           the optimum may lie beyond; to search farther, set" in told
    assert f'"{PATHS[0]}" = [-3, 3]' in told
    assert f'"{PATHS[1]}" = [-3, 3]' in told
    # Where nothing can lie beyond, nothing is said.
    natural = tuple(dataclasses.replace(d, ends=("", "")) for d in narrow)
    assert not [each for each in answer(trials, (*natural, *DIMENSIONS[2:]), 0.02).coordinates if each.at_end]
    assert "at the end" not in "\n".join(lines(answer(trials, DIMENSIONS, 0.02)))


def test_why_says_the_study_the_interval_and_how_far_it_may_be_moved() -> None:
    found = answer(study([OPTIMUM]), DIMENSIONS, 0.02)

    def values(octaves: object) -> dict[str, float]:
        assert isinstance(octaves, dict)
        return {path: 0.01 * 2**x for path, x in octaves.items()} | {PATHS[2]: 1 - 0.1 * 2 ** octaves[PATHS[2]]}

    said = reason(PATHS[0], of_study(found), SimpleNamespace(values=values))
    assert said.startswith(
        "study wheat, trial 63 (trust-region, 64 trials); validation loss 3.0000, 95% interval 2.9723 to"
    )
    assert "; as good between 0.01" in said
    assert "; 0.01 at the start costs +0.5" in said
    ends = reason(PATHS[2], of_study(found), SimpleNamespace(values=values)).split("as good between ")[1]
    low, high = ends.split(";")[0].split(" and ")
    assert float(low) < 1 - 0.1 * 2**0.3 < float(high)
    assert reason(PATHS[3], of_study(found), SimpleNamespace(values=values)).endswith("; as at the start")


def test_the_recipe_of_the_fewest_changes_says_why() -> None:
    near = [1.0, -0.5, 0.0, 0.0]
    found = answer(study([OPTIMUM, near]), DIMENSIONS, 0.1)
    assert found.fewer == dict(zip(PATHS, near, strict=True))
    values = dict.fromkeys(PATHS, 0.01)
    at = SimpleNamespace(values=lambda _: values)
    moved, left = (reason(path, of_study(found), at, fewest=True) for path in (PATHS[0], PATHS[3]))
    begin = "study wheat, trial 65 (trust-region, 64 trials); validation loss 3.0675, 95% interval "
    assert moved.startswith(begin)
    assert moved.endswith("; the fewest changes that are as good within the noise; 0.01 at the start")
    assert left == moved.removesuffix("0.01 at the start") + "as at the start"


def test_the_front_counts_branches_by_their_tokens_and_other_seeds_by_their_mean() -> None:
    long = {"tokens": 400, "flops": 4000.0, "branches": ((100, 3.0), (200, 2.8), (300, 2.9))}
    trials = [
        trial(0, [0, 0, 0, 0], 2.9, **long),
        trial(1, [1, 0, 0, 0], 2.7, tokens=400, flops=4000.0),
        trial(2, [2, 0, 0, 0], 2.4, tokens=400, flops=4000.0),
        trial(3, [2, 0, 0, 0], 2.8, tokens=400, flops=4000.0, seed=1),  # the mean of the two is 2.6
        trial(4, [3, 0, 0, 0], 2.0, tokens=50, flops=500.0, state="stopped"),
        trial(5, [3, 0, 0, 0], math.inf, tokens=10, flops=100.0),
        trial(6, [3, 0, 0, 1], 2.0),  # of no known cost
    ]
    found = [(point.number, point.tokens, point.flops, point.loss) for point in front(trials)]
    assert found == [(0, 100, 1000.0, 3.0), (0, 200, 2000.0, 2.8), (2, 400, 4000.0, pytest.approx(2.6))]


def test_advice_when_all_diverged_names_what_to_lower() -> None:
    gone = [trial(k, [-0.25 * k, 0, 0, 0], math.inf, tokens=100) for k in range(5)]
    said = "all 5 trials diverged, the start's too: start from lr at 1/4 of what it was, 0.0025 or lower"
    assert advice_when_all_diverged(gone, DIMENSIONS) == said + " (1/2 of it diverged)"
    assert lines(answer(gone, DIMENSIONS)) == [said + " (1/2 of it diverged)"]
    modules = tuple(Dimension(f"hyperparameters.modules.{name}.lr", 1.0, -3, 3) for name in ("embedding", "norm"))
    of_modules = [
        StudyTrial(
            0, "diverged", None, {}, None, None, octaves={dimension.path: 0.0 for dimension in modules}, tokens=5
        )
    ]
    assert "start from the learning rates at 1/2 of what it was or lower" in advice_when_all_diverged(
        of_modules, modules
    )
    assert advice_when_all_diverged(gone, DIMENSIONS[2:]).endswith(ELSEWHERE)
    assert advice_when_all_diverged(gone[:1], DIMENSIONS).startswith("the only trial diverged: start from lr at 1/2")
    # Those with a large eps^-1 went first.
    rng = np.random.default_rng(0)
    fast = [rng.normal(0, 1, 4) for _ in range(30)]
    said = advice_when_all_diverged(
        [trial(k, x, math.inf, tokens=10 if x[3] < -0.5 else 100) for k, x in enumerate(fast)], DIMENSIONS
    )
    assert said.endswith("; runs diverged soonest where eps was lowered")
    assert "but none was of the start" in said


def test_on_landscapes_what_is_said_is_mostly_true() -> None:
    """Few and small, so only what is far from chance; benchmarks/answers.py measures it."""
    runs = [judged(12, 60, seed, 0.5) for seed in range(3)]
    share = {key: np.mean([value for run in runs for value in run[key]]) for key in runs[0] if runs[0][key]}
    assert share["flat two"] > 0.85
    assert share["fewest two"] == 1
    assert share["small true"] > 0.7
    assert share["ours"] > 0.4
    assert share["interval"] == 1
    trials, _ = searched(landscape(12, 0), 60, 0, 0.5)
    assert len(trials) == 60
    assert len({(run.seed, *(run.octaves or {}).values()) for run in trials}) == 60


def test_losses_that_are_all_alike_are_no_reason_to_warn() -> None:
    """The best tenth of them are all there are, of which Optuna warns in the middle of the screen."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        shares = ped_anova(np.random.default_rng(0).normal(size=(20, 2)), np.full(20, 3.0))
    assert shares.tolist() == [0.5, 0.5]
