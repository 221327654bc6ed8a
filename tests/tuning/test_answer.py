"""The answer of a search against closed forms and brute force."""

import dataclasses
import itertools
import math
import re
from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pytest

from leaven.recipe.recipe import Recipe
from leaven.tuning.algorithm.answer import (
    ELSEWHERE,
    ChosenPoint,
    FittedTrials,
    Point,
    advice_when_all_diverged,
    answer,
    choose,
    point_to_confirm,
)
from leaven.tuning.algorithm.noise import pooled_noise
from leaven.tuning.algorithm.trust_region import Axes, region
from leaven.tuning.point import BATCH, WARM_UP
from leaven.tuning.service.samplers import ped_anova
from leaven.tuning.service.study_folder import reason
from leaven.tuning.space import space
from leaven.tuning.study_document import Answer, Dimension, StudyDocument, StudyTrial, front

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


def test_the_noise_is_pooled_over_points_with_several_seeds() -> None:
    losses = {("a", 0): 1.0, ("a", 1): 3.0, ("b", 0): 5.0, ("c", 1): 2.0, ("c", 2): 2.5, ("c", 3): math.inf}
    runs = [(point, seed, loss) for (point, seed), loss in losses.items()]
    noise, degrees = pooled_noise([*runs, ("a", 1, 3.0)])  # the same run twice; squares of 2 and 0.125, a degree each
    assert noise == pytest.approx(math.sqrt((2 + 0.125) / 2))
    assert degrees == 2
    # Ten points with the same two seeds share the seeds' effect: one degree.
    assert pooled_noise([(point, seed, float(seed)) for point in range(10) for seed in range(2)])[1] == 1
    # An objective without seeds has noise of its own.
    assert pooled_noise([("a", 0, loss) for loss in (1.0, 2.0, 4.0)])[1] == 2
    assert pooled_noise([("a", 0, 1.0), ("b", 0, 2.0)]) == (None, 0)


def test_the_spread_of_a_point_at_the_divergence_boundary_is_not_noise() -> None:
    start = [("start", seed, 4.4 + 0.03 * sign) for seed, sign in enumerate((1, -1, 1, -1, 0))]
    quiet = [(point, seed, 3.9 + 0.001 * seed) for point in "abc" for seed in (1, 2)]
    edge = [("edge", 1, 4.0), ("edge", 2, 4.3)]
    squares = 4 * 0.03**2 + 3 * 0.001**2 / 2  # about the means, with 4 + 3 degrees of freedom
    assert pooled_noise([*start, *quiet, *edge])[0] == pytest.approx(math.sqrt(squares / 7))


def test_flat_regions_gains_and_slices_of_a_parabola_are_its_closed_forms() -> None:
    found = answer(study([OPTIMUM]), DIMENSIONS, 0.02, optunas=ped_anova)
    assert found.outlook is not None
    np.testing.assert_array_equal([found.octaves[path] for path in PATHS], OPTIMUM)
    by_path = {each.path: each for each in found.coordinates}
    for i, path in enumerate(PATHS):
        each = by_path[path]
        half = math.sqrt(2 * 0.02 / CURVATURE[i])
        # Noise and the error of the model make the region narrower, never wider.
        assert OPTIMUM[i] - half <= each.flat[0] == pytest.approx(OPTIMUM[i] - half, abs=0.12)
        assert OPTIMUM[i] + half >= each.flat[1] == pytest.approx(OPTIMUM[i] + half, abs=0.12)
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


def test_the_best_is_chosen_and_measured_by_fresh_seeds() -> None:
    lucky = np.array([0.2, 0.2, 0.2, 0.2])
    trials = study([OPTIMUM, lucky])
    trials += [trial(100, lucky, 2.0)]  # a low loss with the seed of the search
    found = answer(trials, DIMENSIONS, 0.02)
    assert (found.best.loss, found.best.number) == (pytest.approx(3.0), 63)
    # Runs that chose it between two points do not measure it. Two more runs do.
    assert (found.best.fresh, found.best.interval, found.gain) == (0, (-math.inf, math.inf), None)
    confirmed = [trial(70 + k, OPTIMUM, 3.01, purpose="rerun", confirms=True, seed=k) for k in (3, 4)]
    best = answer([*trials, *confirmed], DIMENSIONS, 0.02).best
    assert (best.fresh, best.loss) == (2, pytest.approx(3.01))
    assert best.interval == pytest.approx((3.01 - 1.96 * 0.02 / 2**0.5, 3.01 + 1.96 * 0.02 / 2**0.5), rel=1e-3)
    # The gain is over the start's runs with the same seeds.
    at_start = [trial(80 + k, [0, 0, 0, 0], 3.5 + k / 100, purpose="rerun", confirms=True, seed=k) for k in (3, 4)]
    assert answer([*trials, *confirmed, *at_start], DIMENSIONS, 0.02).gain == pytest.approx(0.535 - 0.01)
    # A small gain is in doubt, and if the start is better, the other finalist is the answer.
    at_start = [dataclasses.replace(run, loss=3.02) for run in at_start]
    assert answer([*trials, *confirmed, *at_start], DIMENSIONS, 0.02).in_doubt
    at_start = [dataclasses.replace(run, loss=3.0) for run in at_start]
    refuted = answer([*trials, *confirmed, *at_start], DIMENSIONS, 0.02)
    assert set(refuted.octaves.values()) == {0.2}
    assert (refuted.best.fresh, refuted.gain) == (0, None)
    # A seed that raises every loss alike does not change the gain.
    shifted = [dataclasses.replace(run, loss=(run.loss or 0) + run.seed) for run in study([OPTIMUM])]
    assert answer(shifted, DIMENSIONS, 0.02).gain == pytest.approx(excess(np.zeros(4)))
    # One rerun is not enough, nor is a point that diverged with one of its seeds.
    trials += [trial(101, [0.9, -0.5, 0.3, 0], 2.5, purpose="rerun", seed=1)]
    trials += [trial(102, [0.8, -0.5, 0.3, 0], 2.5 + k, purpose="rerun", seed=1 + k) for k in (0, math.inf)]
    assert answer(trials, DIMENSIONS, 0.02).best == found.best


def test_without_reruns_there_is_no_best_but_a_predicted_point() -> None:
    found = answer([run for run in study() if run.purpose == "search"], DIMENSIONS)
    assert (found.best, found.noise_floor, found.fewest, found.gain, found.outlook) == (None,) * 5
    np.testing.assert_allclose([found.octaves[path] for path in PATHS], OPTIMUM, atol=0.05)
    assert len(found.coordinates) == 4


@pytest.mark.parametrize("noise", [0.01, 0.1, 2.0])
def test_the_fewest_changes_are_those_of_brute_force(noise: float) -> None:
    trials = study()
    _, fewest, promise, *_ = map(np.array, finalists(trials, noise))
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


def confirmed_with(losses: dict[tuple[float, ...], dict[int, float]]) -> tuple[list[StudyTrial], ChosenPoint]:
    """Return three seeds at the start with the runs of other points, and their confirmation. Seeds 1 and 2 choose,
    seeds 3 and 4 confirm."""
    runs = [(0.0, seed, 3.0) for seed in range(3)]
    runs += [(x[0], seed, loss) for x, by_seed in losses.items() for seed, loss in by_seed.items()]
    trials = [
        trial(i, [x, 0, 0, 0], loss, seed=k, purpose="rerun" if i > 2 else "search", confirms=k > 2)
        for i, (x, k, loss) in enumerate(runs)
    ]
    found = choose(trials, PATHS, 0.02)
    assert found is not None
    return trials, found


LUCKY, BETTER, START = (1.0, 0.0, 0.0, 0.0), (2.0, 0.0, 0.0, 0.0), (0.0, 0.0, 0.0, 0.0)


def test_a_refuted_point_makes_room_for_the_next() -> None:
    known = {LUCKY: {1: 2.8, 2: 2.8, 3: 3.1, 4: 3.1}, START: {3: 3.0, 4: 3.0}}
    trials, found = confirmed_with(known)
    assert (found.point, point_to_confirm(trials, PATHS)) == (START, None)
    # Another finalist is the answer, in doubt if its gain is small, and is confirmed next.
    for loss, in_doubt in ((2.96, True), (2.9, False)):
        trials, found = confirmed_with({**known, BETTER: {1: loss, 2: loss}})
        assert (found.point, found.in_doubt, point_to_confirm(trials, PATHS)) == (BETTER, in_doubt, BETTER)
    _, found = confirmed_with({**known, BETTER: {1: 2.9, 2: 2.9, 3: 2.91, 4: 2.91}})
    assert (found.point, found.loss, found.fresh, found.gain) == (BETTER, 2.91, 2, pytest.approx(0.09))


@pytest.mark.parametrize(("loss", "in_doubt"), [(2.97, False), (2.99, True)])
def test_a_confirmed_gain_is_in_doubt_up_to_the_noise(loss: float, *, in_doubt: bool) -> None:
    beside = {BETTER: {1: 3.0, 2: 3.0}, START: {3: 3.0, 4: 3.0}}
    _, found = confirmed_with({LUCKY: {1: 2.8, 2: 2.8, 3: loss, 4: loss}, **beside})
    assert (found.point, found.gain, found.in_doubt) == (LUCKY, pytest.approx(3.0 - loss), in_doubt)


@pytest.mark.parametrize(("gained", "in_doubt"), [(0.055, False), (0.045, True)])
def test_a_gain_without_confirmation_is_in_doubt_up_to_two_and_a_half_times_the_noise(
    gained: float, *, in_doubt: bool
) -> None:
    trials, found = confirmed_with({LUCKY: {1: 3 - gained, 2: 3 - gained}})
    assert (found.point, found.fresh, found.in_doubt) == (LUCKY, 2, in_doubt)
    assert point_to_confirm(trials, PATHS) is None  # a single finalist was not chosen by its trials
    # A second finalist beside it: its trials have chosen it.
    trials, found = confirmed_with({LUCKY: {1: 3 - gained, 2: 3 - gained}, BETTER: {1: 3.0, 2: 3.0}})
    assert (found.point, found.fresh, found.gain, found.in_doubt) == (LUCKY, 0, None, in_doubt)
    assert point_to_confirm(trials, PATHS) == LUCKY
    unknown, exact = choose(trials, PATHS, None), choose(trials, PATHS, 0.0)
    assert unknown is not None
    assert exact is not None
    assert (unknown.in_doubt, exact.in_doubt) == (True, False)


def test_one_fresh_trial_measures_the_only_finalist_but_does_not_refute_it() -> None:
    trials, _ = confirmed_with({LUCKY: {1: 3.01}})
    for predicted, point, gained in ((2.9, LUCKY, -0.01), (3.1, START, 0.0)):
        found = choose(trials, PATHS, 0.02, {START: 3.0, LUCKY: predicted})
        assert found is not None
        assert (found.point, found.gain, found.in_doubt) == (point, pytest.approx(gained), point == LUCKY)
    trials, _ = confirmed_with({LUCKY: {1: 3.01, 2: 3.01}})
    found = choose(trials, PATHS, 0.02, {START: 3.0, LUCKY: 2.9})
    assert found is not None
    assert found.point == START


def test_the_start_is_the_answer_if_its_loss_is_lower() -> None:
    _, found = confirmed_with({LUCKY: {1: 3.001, 2: 3.001}})
    assert (found.point, found.gain, found.in_doubt) == (START, 0.0, False)


@pytest.mark.parametrize("noise", [None, 0.02])
def test_nothing_is_in_doubt_if_the_start_diverged(noise: float | None) -> None:
    found = choose([trial(0, START, math.inf), trial(1, LUCKY, 3.0)], PATHS, noise)
    assert found is not None
    assert (found.point, found.in_doubt) == (LUCKY, False)


def test_if_the_only_finalist_diverges_the_next_best_point_is_the_answer() -> None:
    trials, _ = confirmed_with({LUCKY: {1: 2.8}})
    diverged = {"state": "diverged", "loss": math.inf}
    trials = [dataclasses.replace(run, **diverged) if run.purpose == "rerun" else run for run in trials]
    trials.append(trial(9, BETTER, 2.9))
    found = choose(trials, PATHS, 0.02)
    assert (found.point, found.fresh, found.gain) == (BETTER, 0, None)
    # Two finalists that diverge show that it is not safe there.
    trials.append(dataclasses.replace(trial(10, [3.0, 0, 0, 0], 2.9, seed=1, purpose="rerun"), state="diverged"))
    found = choose(trials, PATHS, 0.02)
    assert found.point == START


def test_a_run_that_chose_is_not_fresh() -> None:
    """The start and the only finalist both diverge with one seed."""
    trials, _ = confirmed_with({LUCKY: {1: math.inf, 2: 2.9}})
    trials[1] = dataclasses.replace(trials[1], state="diverged", loss=math.inf)
    trials.append(trial(9, BETTER, 2.9))
    found = choose(trials, PATHS, 0.02)
    assert (found.point, found.losses, found.fresh) == (BETTER, (2.9,), 0)


def test_the_fewest_changes_are_measured() -> None:
    near = [1.0, -0.5, 0.0, 0.0]  # costs 0.0675
    trials = study([OPTIMUM, near], 0.0)
    found = answer(trials, DIMENSIONS, 0.1)
    assert found.fewer == found.fewest_octaves == dict(zip(PATHS, near, strict=True))
    assert found.fewest.loss - found.best.loss == pytest.approx(0.0675)
    assert found.fewest_cost == pytest.approx(0.0675, abs=0.01)
    assert found.idle == (PATHS[3],)  # with the second, which costs 0.0625, the loss may be above the noise
    # If its runs say otherwise, they count.
    worse = [dataclasses.replace(run, loss=(run.loss or 0) + 0.1) if run.number >= 65 else run for run in trials]
    assert answer(worse, DIMENSIONS, 0.1).fewest_octaves == found.octaves
    assert set((answer(trials, DIMENSIONS, 2.0).fewest_octaves or {}).values()) == {0.0}


def finalists(trials: list[StudyTrial], noise: float | None, *, by_surrogate: bool = True) -> list[Point]:
    return FittedTrials.of(trials, Axes.of(DIMENSIONS), noise).finalists(by_surrogate=by_surrogate)


def test_finalists_are_the_best_trial_the_fewest_changes_the_prediction_and_the_other_trials() -> None:
    trials = study()
    found = [np.array(x) for x in finalists(trials, 0.1)]
    assert found[0].tolist() in [list((run.octaves or {}).values()) for run in trials]
    assert np.count_nonzero(found[1]) < 4
    np.testing.assert_allclose(found[2], OPTIMUM, atol=0.05)
    assert len({tuple(x) for x in found}) == len(found)
    losses = [excess(x) for x in found[3:10]]
    assert losses == pytest.approx(sorted(losses), abs=0.01)
    by_loss = finalists(trials, 0.1, by_surrogate=False)
    assert list(by_loss[0]) == list((min(trials, key=lambda run: run.loss or math.inf).octaves or {}).values())
    assert finalists([trial(0, [0, 0, 0, 0], math.inf)], None) == []


def test_a_pruned_trial_counts_in_the_surrogate_and_not_in_the_noise() -> None:
    trials = study([OPTIMUM])
    expected = [dataclasses.replace(run, state="pruned") if 10 <= run.number < 40 else run for run in trials]
    assert answer(expected, DIMENSIONS, 0.02).coordinates == answer(trials, DIMENSIONS, 0.02).coordinates
    again = trial(200, [0, 0, 0, 0], 99.0, state="pruned", seed=7)
    assert answer([*trials, again], DIMENSIONS).noise_floor == answer(trials, DIMENSIONS).noise_floor


def document_of(found: Answer) -> StudyDocument:
    trials = (trial(0, [0.0] * 4, 3.0),) * 64
    return StudyDocument(**vars(found), name="wheat", method="trust-region", space=PATHS, trials=trials)


def test_a_best_value_at_the_end_of_its_range_is_named() -> None:
    trials = study([OPTIMUM])
    narrow = (dataclasses.replace(DIMENSIONS[0], high=1.0), dataclasses.replace(DIMENSIONS[1], low=-0.51))
    found = answer(trials, (*narrow, *DIMENSIONS[2:]), 0.02)
    assert {each.path for each in found.coordinates if each.at_end} == set(PATHS[:2])
    # A best value just above a lower limit of 0 is at that limit, and not at the upper one.
    assert [Dimension("x", 1.0, 0.0, 4.0).upper(x) for x in (0.03, 3.97)] == [False, True]
    # A natural limit, beyond which nothing lies, is not named.
    natural = tuple(dataclasses.replace(d, ends=("", "")) for d in narrow)
    assert not [each for each in answer(trials, (*natural, *DIMENSIONS[2:]), 0.02).coordinates if each.at_end]


def test_a_reason_has_the_study_and_the_flat_region() -> None:
    found = answer(study([OPTIMUM]), DIMENSIONS, 0.02)

    def values(octaves: dict[str, float]) -> dict[str, float]:
        return {path: 0.01 * 2**x for path, x in octaves.items()} | {PATHS[2]: 1 - 0.1 * 2 ** octaves[PATHS[2]]}

    beta = reason(PATHS[2], document_of(found), SimpleNamespace(values=values))
    assert beta.startswith("study wheat, trial 63 (trust-region, 64 trials); validation loss 3.0000")
    low, high = beta.split(", the loss is equal within the noise")[0].split("from ")[-1].split(" to ")
    assert float(low) < 1 - 0.1 * 2**0.3 < float(high)  # although beta falls where its distance rises


@pytest.mark.parametrize("centre", [3, 50, 1_234, 40_000])
def test_ends_of_a_flat_region_of_whole_numbers_lie_inside(centre: int) -> None:
    dimensions = (dataclasses.replace(DIMENSIONS[0], centre=float(centre), whole=True), *DIMENSIONS[1:])
    found = answer(study([OPTIMUM]), dimensions, 0.02)
    document = document_of(found).model_copy(update={"dimensions": dimensions})
    exact = [centre * 2**x for x in next(each.flat for each in found.coordinates if each.path == PATHS[0])]
    said = reason(
        PATHS[0], document, SimpleNamespace(values=lambda at: {p: round(centre * 2**x) for p, x in at.items()})
    )
    match = re.search(r"from ([\d,]+) to ([\d,]+), the loss is equal within the noise", said)
    assert match is not None
    assert [int(end.replace(",", "")) for end in match.groups()] == [math.ceil(exact[0]), math.floor(exact[1])]


@pytest.mark.parametrize(
    ("path", "value", "exact", "said"),
    [
        (BATCH, 288, (270, 350), "288 to 320"),  # sequences of 32 tokens
        (BATCH, 288, (289.3, 300), "288 to 288"),
        (BATCH, 288, (200, 287), "224 to 288"),
        (WARM_UP, 15, (14.6, 14.9), "15 to 15"),
        (WARM_UP, 14, (14.2, 14.4), "14 to 14"),
    ],
)
def test_a_flat_region_of_whole_values_has_the_chosen_value(
    path: str, value: int, exact: tuple[float, float], said: str, tiny: Recipe
) -> None:
    searched = space(tiny, path)
    start = searched.dimensions[0].centre
    found = answer(study([OPTIMUM]), DIMENSIONS, 0.02)
    low, high = (math.log2(end / start) for end in exact)
    coordinate = dataclasses.replace(found.coordinates[0], path=path, flat=(low, high))
    document = document_of(found).model_copy(
        update={
            "dimensions": searched.dimensions,
            "octaves": {path: math.log2(value / start)},
            "coordinates": (coordinate,),
        }
    )
    assert f"; from {said}, the loss is equal within the noise" in reason(path, document, searched)


def test_the_front_counts_branches_by_their_tokens_and_other_seeds_by_their_mean() -> None:
    long = {"tokens": 400, "flops": 4000.0, "branches": ((100, 3.0), (200, 2.8), (300, 2.9))}
    trials = [
        trial(0, [0, 0, 0, 0], 2.9, **long),
        trial(1, [1, 0, 0, 0], 2.7, tokens=400, flops=4000.0),
        trial(2, [2, 0, 0, 0], 2.4, tokens=400, flops=4000.0),
        trial(3, [2, 0, 0, 0], 2.8, tokens=400, flops=4000.0, seed=1),  # the mean of the two is 2.6
        trial(4, [3, 0, 0, 0], 2.0, tokens=50, flops=500.0, state="pruned"),
        trial(5, [3, 0, 0, 0], math.inf, tokens=10, flops=100.0),
        trial(6, [3, 0, 0, 1], 2.0),  # of no known cost
    ]
    found = [(point.number, point.tokens, point.flops, point.loss) for point in front(trials)]
    assert found == [(0, 100, 1000.0, 3.0), (0, 200, 2000.0, 2.8), (2, 400, 4000.0, pytest.approx(2.6))]


def test_advice_if_all_diverged_names_what_to_lower() -> None:
    gone = [trial(k, [-0.25 * k, 0, 0, 0], math.inf, tokens=100) for k in range(5)]
    advice = "all 5 trials diverged, including the start: start from lr at 0.0025 or lower, 1/4 of its old value"
    assert advice_when_all_diverged(gone, DIMENSIONS) == advice + " (1/2 diverged, too)"
    assert answer(gone, DIMENSIONS).advice == advice + " (1/2 diverged, too)"
    modules = tuple(Dimension(f"hyperparameters.modules.{name}.lr", 1.0, -3, 3) for name in ("embedding", "norm"))
    one = StudyTrial(0, "diverged", None, {}, None, None, octaves={d.path: 0.0 for d in modules}, tokens=5)
    advice = advice_when_all_diverged([one], modules)
    assert "start from the learning rates at 1/2 of their old values or lower" in advice
    assert advice_when_all_diverged(gone, DIMENSIONS[2:]).endswith(ELSEWHERE)
    assert advice_when_all_diverged(gone[:1], DIMENSIONS).startswith("the only trial diverged: start from lr at 0.0")
    # Runs with a small eps diverged first.
    points = np.random.default_rng(0).normal(0, 1, (30, 4))
    fast = [trial(k, x, math.inf, tokens=10 if x[3] < -0.5 else 100) for k, x in enumerate(points)]
    assert advice_when_all_diverged(fast, DIMENSIONS).endswith("; runs diverged earliest where eps was lowered")


def test_an_outlier_is_the_last_finalist() -> None:
    near = [trial(k, OPTIMUM + 0.02 * np.eye(4)[k % 4] * k, 3.0 + 1e-4 * k) for k in range(20)]
    far = trial(20, [-2.9, 2.9, -2.9, 2.9], 3.9)
    assert finalists([*near, far], 0.01)[-1] == (-2.9, 2.9, -2.9, 2.9)
