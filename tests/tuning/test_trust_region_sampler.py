"""The trust region as a sampler in plain Optuna studies."""

import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
from optuna.storages import JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend
from optuna.testing.pytest_samplers import BasicSamplerTestCase, RelativeSamplerTestCase, SingleOnlySamplerTestCase
from optuna.trial import TrialState

from leaven.errors import InputError
from leaven.tuning import TrustRegionSampler
from leaven.tuning.algorithm.surrogate import fitted_noise
from leaven.tuning.algorithm.trust_region import Axes, region
from leaven.tuning.service.trust_region_sampler import FEWEST, STEPS

Objective = Callable[[optuna.Trial], float]


class TestOptunasCases(BasicSamplerTestCase, RelativeSamplerTestCase, SingleOnlySamplerTestCase):
    """The cases with which Optuna tests its own samplers."""

    @pytest.fixture
    def sampler(self) -> Callable[[], optuna.samplers.BaseSampler]:
        return TrustRegionSampler


def study_of(objective: Objective, trials: int, sampler: Any = None, **options: Any) -> optuna.Study:
    study = optuna.create_study(sampler=sampler or TrustRegionSampler(seed=0), **options)
    study.optimize(objective, trials)
    return study


def bowl(trial: optuna.Trial) -> float:
    """Lowest at lr = 2^-9, width = 48 and the second optimizer."""
    lr, width = trial.suggest_float("lr", 2.0**-12, 1.0, log=True), trial.suggest_int("width", 16, 64, step=16)
    better = trial.suggest_categorical("optimizer", ["sgd", "adam"]) == "adam"
    return (math.log2(lr) + 9) ** 2 / 4 + ((width - 48) / 16) ** 2 - better


def params(study: optuna.Study) -> list[dict[str, Any]]:
    return [trial.params for trial in study.trials]


def test_the_first_trial_is_the_start() -> None:
    middle = {"lr": 2.0**-6, "width": 48, "optimizer": "sgd"}  # between 32 and 48
    assert params(study_of(bowl, 1)) in ([middle], [middle | {"width": 32}])
    given = {"lr": 0.25, "optimizer": "adam"}
    assert params(study_of(bowl, 1, TrustRegionSampler(given)))[0].items() >= given.items()


def test_a_trial_that_failed_before_its_values_were_drawn_is_not_the_first() -> None:
    def objective(trial: optuna.Trial) -> float:
        if trial.number < 2:
            raise FileNotFoundError("no data")
        return bowl(trial)

    study = optuna.create_study(sampler=TrustRegionSampler({"optimizer": "adam"}, seed=0))
    study.optimize(objective, 8, catch=FileNotFoundError)
    whole = params(study_of(bowl, 1, TrustRegionSampler({"optimizer": "adam"})))
    assert params(study)[:3] == [{}, {}, *whole]
    assert study.best_value < study.trials[2].value


@pytest.mark.parametrize("noise", [0.1, None])
def test_proposals_are_those_of_the_trust_region(noise: float | None) -> None:
    def objective(trial: optuna.Trial) -> float:
        a, b = trial.suggest_float("a", 2.0**-12, 1.0, log=True), trial.suggest_float("b", -30.0, 30.0)
        return (math.log2(a) + 9) ** 2 / 4 + (b / 10 - 1) ** 2

    study = optuna.create_study(sampler=TrustRegionSampler(noise=noise, seed=3))
    study.enqueue_trial({"a": 2.0**-5, "b": -10.0})
    study.optimize(objective, 12)
    # In steps: two octaves of a, ten of b.
    steps = np.array([[math.log2(x["a"]) / 2, x["b"] / 10] for x in params(study)])
    axes = Axes({"a": (-6.0, 0.0), "b": (-3.0, 3.0)}, start={"a": -2.5, "b": -1.0})
    losses = np.array([trial.value for trial in study.trials])
    assert STEPS == 6
    for k in range(1, 12):
        x = steps[:k] - steps[0]
        fitted = fitted_noise(x, losses[:k]) if noise is None and k >= FEWEST else noise
        here = region(axes, x, losses[:k], fitted)
        expected = here.proposal(np.random.default_rng([3, k])) + steps[0]
        assert steps[k] == pytest.approx(expected, abs=1e-9)


def test_numbers_steps_and_choices_reach_the_optimum() -> None:
    study = study_of(bowl, 24, TrustRegionSampler(seed=1))
    assert study.best_params["width"] == 48
    assert study.best_params["optimizer"] == "adam"
    assert math.log2(study.best_params["lr"]) == pytest.approx(-9, abs=0.3)


def test_maximising_is_minimising_the_negative() -> None:
    up = study_of(lambda trial: -bowl(trial), 12, direction="maximize")
    assert params(up) == params(study_of(bowl, 12))


@pytest.mark.parametrize("kind", ["journal", "rdb"])
def test_a_resumed_study_continues_as_if_not_interrupted(tmp_path: Path, kind: str) -> None:
    for _ in range(2):
        file = tmp_path / "study"
        storage = (
            JournalStorage(JournalFileBackend(str(file))) if kind == "journal" else RDBStorage(f"sqlite:///{file}")
        )
        study_of(bowl, 5, storage=storage, study_name="s", load_if_exists=True)
    stored = optuna.load_study(study_name="s", storage=storage)
    assert params(stored) == params(study_of(bowl, 10))


@pytest.mark.long
def test_better_than_random_on_a_noisy_quadratic() -> None:
    def regret(sampler: optuna.samplers.BaseSampler, seed: int) -> float:
        rng = np.random.default_rng(seed)
        optimum = rng.normal(size=4)

        def loss(x: dict[str, float]) -> float:
            return float(np.sum((np.array([x[f"x{i}"] for i in range(4)]) - optimum) ** 2))

        def objective(trial: optuna.Trial) -> float:
            return loss({f"x{i}": trial.suggest_float(f"x{i}", -3, 3) for i in range(4)}) + 0.2 * rng.normal()

        return loss(study_of(objective, 20, sampler).best_params)

    ours = [regret(TrustRegionSampler(seed=seed), seed) for seed in range(10)]
    others = [regret(optuna.samplers.RandomSampler(seed=seed), seed) for seed in range(10)]
    assert sum(np.array(ours) < others) >= 8
    assert np.median(ours) < np.median(others) / 3


@pytest.mark.parametrize("bad", [math.inf, math.nan, -math.inf, 1e300, None])
def test_a_divergence_is_avoided(bad: float | None) -> None:
    def objective(trial: optuna.Trial) -> Any:
        lr = math.log2(trial.suggest_float("lr", 2.0**-6, 1.0, log=True))
        if lr > -2.7:  # the loss falls up to there
            if bad is None:
                raise RuntimeError("out of memory")
            return bad
        return -lr

    study = optuna.create_study(sampler=TrustRegionSampler(seed=0))
    study.optimize(objective, 20, catch=RuntimeError)
    beyond = [math.log2(trial.params["lr"]) > -2.7 for trial in study.trials]
    assert 1 <= sum(beyond) <= 6
    assert math.log2(min(trial.params["lr"] for trial in study.trials)) > -6


def test_while_everything_diverges_the_learning_rate_falls() -> None:
    def objective(trial: optuna.Trial) -> float:
        lr = math.log2(trial.suggest_float("lr", 2.0**-12, 1.0, log=True))
        trial.suggest_float("other", 0.0, 1.0)
        return -lr if lr < -8 else math.nan

    study = optuna.create_study(sampler=TrustRegionSampler(seed=0))
    study.optimize(lambda trial: 1 / trial.number and objective(trial), 12, catch=ZeroDivisionError)
    lr = [math.log2(trial.params["lr"]) for trial in study.trials[1:]]
    first = next(i for i, x in enumerate(lr) if x < -8)
    assert 2 <= first < len(lr) - 1
    assert all(-10 < x < -4.5 for x in lr[: first + 1])


def test_a_pruned_trial_counts_as_one_of_the_worse_half() -> None:
    """A report at an early step is far from every final loss, and is no divergence."""

    def two(trial: optuna.Trial) -> float:
        return trial.suggest_float("x", -3.0, 3.0) ** 2 + abs(trial.suggest_float("y", -3.0, 3.0) + 1)

    def points(of_some: Objective) -> list[dict[str, Any]]:
        def objective(trial: optuna.Trial) -> float:
            loss = two(trial)
            return of_some(trial) if 10 <= trial.number < 13 else loss

        return params(study_of(objective, 14))

    def pruned(trial: optuna.Trial, report: float) -> float:
        trial.report(report, step=1)
        raise optuna.TrialPruned

    losses = [trial.value for trial in study_of(two, 10).trials]
    assert points(lambda trial: pruned(trial, 1e6)) == points(lambda _: max(losses))
    assert points(lambda trial: pruned(trial, -1e6)) == points(lambda _: float(np.median(losses)))
    assert points(lambda trial: pruned(trial, math.nan)) == points(lambda _: math.inf)


def test_parallel_trials_begin_near_the_start_and_differ() -> None:
    together = threading.Barrier(4, timeout=60)

    def objective(trial: optuna.Trial) -> float:
        x = [trial.suggest_float(f"x{i}", -3.0, 3.0) for i in range(3)]
        if trial.number < 4:
            together.wait()
        return float(np.sum(np.square(x)))

    study = optuna.create_study(sampler=TrustRegionSampler(seed=0))
    study.optimize(objective, 12, n_jobs=4)
    points = [tuple(trial.params.values()) for trial in study.trials]
    assert points[0] == (0.0, 0.0, 0.0)
    assert len(set(points)) == 12
    assert np.linalg.norm(points[1:4]) < 3  # half a step along each of nine values is 1.5, in the whole range 5
    assert {trial.state for trial in study.trials} == {TrialState.COMPLETE}


def test_values_of_some_trials_are_random_and_the_others_are_searched() -> None:
    def objective(trial: optuna.Trial) -> float:
        x = trial.suggest_float("x", -3.0, 3.0)
        if trial.number % 2:
            trial.suggest_float("sometimes", 0.0, 1.0)
        trial.suggest_float("wider", 0.0, 1.0 + trial.number)
        return (x - 2.2) ** 2

    study = study_of(objective, 20, TrustRegionSampler(noise=0, seed=0))
    assert study.best_params["x"] == pytest.approx(2.2, abs=0.02)
    drawn = [trial.params["sometimes"] for trial in study.trials if trial.number % 2]
    assert max(drawn) - min(drawn) > 0.5


def test_new_points_near_the_best_are_tried_before_points_are_repeated() -> None:
    def objective(trial: optuna.Trial) -> float:
        return -trial.suggest_int("n", 0, 60) - trial.suggest_float("x", 0, 60)

    points = [tuple(trial.params.values()) for trial in study_of(objective, 30).trials]
    assert (60, 60.0) in points
    assert len(set(points)) == 30
    assert sum(n + x > 90 for n, x in points) >= 20


def test_every_choice_of_a_small_space_is_tried() -> None:
    def objective(trial: optuna.Trial) -> float:
        return sum(trial.suggest_categorical(name, [0, 1, 2]) for name in "ab")

    assert len({tuple(trial.params.values()) for trial in study_of(objective, 25).trials}) == 9


def test_bad_input_gets_one_line() -> None:
    with pytest.raises(InputError, match=r"^noise = -1: give a finite number of at least 0$"):
        TrustRegionSampler(noise=-1)
    with pytest.raises(InputError, match=r"^seed = -1: give an integer of at least 0$"):
        TrustRegionSampler(seed=-1)
    for bad in ({"noise": "a"}, {"seed": 1.5}, {"seed": "x"}, {"start": [1]}, {"start": []}, {"start": "abc"}):
        with pytest.raises(InputError, match=rf"^{next(iter(bad))} = .*: give a"):
            TrustRegionSampler(**bad)
    TrustRegionSampler(noise=np.float32(0), seed=np.int64(3))
    for low, high in ((-1e308, 1e308), (0, math.inf)):
        with pytest.raises(InputError, match=r"^x: the range .* to .* is too wide"):
            study_of(lambda trial: trial.suggest_float("x", low, high), 1)  # noqa: B023
    with pytest.raises(InputError, match=r"^start: lr = 3; the objective allows 0.000244141 to 1$"):
        study_of(bowl, 1, TrustRegionSampler({"lr": 3}))
    with pytest.raises(InputError, match=r"^start: lr = 'high'; the objective allows"):
        study_of(bowl, 1, TrustRegionSampler({"lr": "high"}))
    with pytest.raises(InputError, match=r"^start: optimizer = 'lion'; the objective allows \('sgd', 'adam'\)$"):
        study_of(bowl, 1, TrustRegionSampler({"optimizer": "lion"}))
    with pytest.raises(InputError, match=r"^start: width = 40; the objective allows 16 to 64 in steps of 16$"):
        study_of(bowl, 1, TrustRegionSampler({"width": 40}))
    with pytest.warns(UserWarning, match="start has lrr, but the objective has lr, width, optimizer"):
        study_of(bowl, 1, TrustRegionSampler({"lrr": 0.1}))
    with pytest.raises(InputError, match=r"for one objective, but the study has 2; use another sampler, such as"):
        study_of(bowl, 1, directions=["minimize", "maximize"])


def test_a_trial_pruned_before_its_last_value_removes_no_value() -> None:
    def objective(trial: optuna.Trial) -> float:
        x = trial.suggest_float("x", -3, 3)
        if trial.number == 1:
            raise optuna.TrialPruned
        return x**2 + trial.suggest_float("y", -3, 3) ** 2

    study = study_of(objective, 3)
    sampler = TrustRegionSampler(seed=0)
    assert set(sampler.infer_relative_search_space(study, study.trials[-1])) == {"x", "y"}


def test_a_seed_determines_the_proposals() -> None:
    first = params(study_of(bowl, 12, TrustRegionSampler(seed=5)))
    assert params(study_of(bowl, 12, TrustRegionSampler(seed=5))) == first
    assert params(study_of(bowl, 12, TrustRegionSampler(seed=6))) != first
    assert params(study_of(bowl, 12, TrustRegionSampler())) != params(study_of(bowl, 12, TrustRegionSampler()))


def test_a_name_of_the_start_that_the_objective_lacks_is_named_though_the_first_trial_is_pruned() -> None:
    def pruned_at_first(trial: optuna.Trial) -> float:
        value = trial.suggest_float("lr", 1e-5, 1e-1, log=True)
        if trial.number == 0:
            raise optuna.TrialPruned
        return value

    with pytest.warns(UserWarning, match="start has learning_rate, but the objective has lr") as said:
        study_of(pruned_at_first, 3, TrustRegionSampler({"learning_rate": 1e-3}))
    assert len([each for each in said if "start has" in str(each.message)]) == 1
