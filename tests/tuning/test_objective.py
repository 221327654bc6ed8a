"""``search`` on Python functions: every method, divergence, noise, storage, and what bad input gets."""

import itertools
import math
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from benchmarks._landscapes import FLOOR, landscape

from leaven.recipe.errors import InputError
from leaven.tuning import search
from leaven.tuning.methods import METHODS

SPACE = {"a": (-3.0, 3.0), "b": (-2.0, 4.0)}


def bowl(x: dict[str, float]) -> float:
    return 2.0 + (x["a"] - 1) ** 2 + 0.3 * (x["b"] + 0.5) ** 2


class Noisy:
    """The bowl with noise, and a cliff where b passes 1."""

    def __init__(self, sd: float, seed: int = 0) -> None:
        self.sd, self.rng, self.calls = sd, np.random.default_rng(seed), 0

    def __call__(self, x: dict[str, float]) -> float:
        self.calls += 1
        return math.nan if x["b"] > 1 else bowl(x) + self.rng.normal(0.0, self.sd)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_gets_below_the_start(method: str) -> None:
    if method in {"cma", "gp"}:
        pytest.importorskip({"cma": "cmaes", "gp": "scipy"}[method])
    objective = Noisy(0.01)
    found = search(objective, SPACE, trials=18 if method == "gp" else 24, method=method, seed=2)
    assert objective.calls == len(found.trials) <= 24
    assert bowl(found.params) < bowl({"a": 0, "b": 0}) - 0.1
    assert found.params["b"] <= 1
    assert found.interval[0] < found.loss < found.interval[1]
    assert found.noise == pytest.approx(0.01, rel=1.5)
    reruns = [trial.loss for trial in found.trials if trial.finalist is not None and trial.params == found.params]
    assert found.loss == pytest.approx(np.mean(reruns))


def test_it_is_light() -> None:
    look = "import sys; from leaven.tuning import search; print({'torch', 'scipy', 'plotly'} & set(sys.modules))"
    assert (
        subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True).stdout == "set()\n"
    )


def test_the_same_seed_and_results_give_the_same_trials() -> None:
    runs = [search(Noisy(0.01), SPACE, trials=20, seed=seed) for seed in (3, 3, 4)]
    assert runs[0] == runs[1]
    assert runs[0].trials != runs[2].trials


def test_without_noise_it_stops_at_the_optimum_and_says_so() -> None:
    found = search(bowl, SPACE, trials=200)
    assert found.stalled
    assert len(found.trials) < 100
    assert found.params == pytest.approx({"a": 1.0, "b": -0.5}, abs=1e-3)
    assert found.noise == 0
    assert not search(bowl, SPACE, trials=30, stop_at_noise=False).stalled


def test_nothing_but_noise_is_no_better_than_the_start() -> None:
    """Where there is nothing to find it stops, and the answer's interval holds the start's loss."""
    rng = np.random.default_rng(0)
    found = search(lambda x: 2.0 + rng.normal(0, 0.01), SPACE, trials=200, noise=0.01)
    assert found.stalled
    assert len(found.trials) < 100
    assert found.interval[0] < 2.0 < found.interval[1]


@pytest.mark.parametrize("method", ["trust-region", "random"])
def test_the_start_is_the_first_trial(method: str) -> None:
    found = search(bowl, SPACE, {"b": 1.0}, trials=8, method=method)
    assert [trial.params for trial in found.trials[:3]] == [{"a": 0.0, "b": 1.0}] * 3  # to measure the noise
    given = search(bowl, SPACE, {"b": 1.0}, trials=8, method=method, noise=0.1)
    assert given.trials[1].params != given.trials[0].params
    low, high = given.interval
    assert high - low == pytest.approx(2 * 1.96 * 0.1 / math.sqrt(2), rel=1e-3)


def test_one_trial_is_the_start_and_has_no_interval() -> None:
    found = search(bowl, SPACE, trials=1)
    assert (found.params, found.noise, found.interval) == ({"a": 0.0, "b": 0.0}, None, (-math.inf, math.inf))


def test_workers_run_at_once() -> None:
    first = threading.Barrier(4)
    calls = itertools.count()

    def objective(x: dict[str, float]) -> float:
        if next(calls) < 4:
            first.wait(timeout=60)  # each waits for the three others: one after the other they would never end
        return bowl(x)

    found = search(objective, SPACE, trials=24, workers=4, noise=0.01, stop_at_noise=False)
    assert len(found.trials) == 24
    assert len({trial.number for trial in found.trials}) == 24
    assert bowl(found.params) < 2.2


def test_a_study_goes_on_where_it_was(tmp_path: Path) -> None:
    storage = tmp_path / "study.log"
    whole = search(bowl, SPACE, trials=20, seed=2)
    calls = 0

    def failing(x: dict[str, float]) -> float:
        nonlocal calls
        calls += 1
        if calls > 7:
            raise OSError("the machine is gone")
        return bowl(x)

    with pytest.raises(OSError, match="gone"):
        search(failing, SPACE, trials=20, seed=2, storage=storage)
    objective = Noisy(0.0)
    found = search(objective, SPACE, trials=20, seed=2, storage=storage)
    assert objective.calls == 13
    assert found.trials[:7] == whole.trials[:7]
    again = search(objective, SPACE, trials=20, seed=2, storage=storage)
    assert (again, objective.calls) == (found, 13)
    more = search(objective, SPACE, trials=32, seed=2, storage=str(storage))
    assert objective.calls == 25
    assert {trial.finalist for trial in more.trials[20:26]} == {None}
    with pytest.raises(InputError, match=r"another space: b \[-2.0, 4.0, 0.0\] there, \[-2.0, 3.0, 0.0\] here"):
        search(bowl, SPACE | {"b": (-2, 3)}, trials=20, storage=storage)
    with pytest.raises(InputError, match="another method: trust-region there, random here"):
        search(bowl, SPACE, trials=20, method="random", storage=storage)


def test_divergence_everywhere_is_said() -> None:
    with pytest.raises(InputError, match="every run diverged, the start's too"):
        search(lambda x: math.inf, SPACE, trials=12)


def test_a_start_that_diverges_is_left() -> None:
    found = search(lambda x: math.inf if x["a"] > -0.1 else bowl(x), SPACE, trials=40)
    assert found.params["a"] <= -0.1
    assert math.isfinite(found.loss)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"method": "trust-regoin"}, "method trust-regoin: did you mean trust-region?"),
        ({"method": "x"}, "method x: there are trust-region, random, grid, tpe, cma, gp"),
        ({"space": {}}, "the space is empty"),
        ({"space": {"a": (1, -1)}}, "space of a: 1 to -1; the lowest first"),
        ({"space": {"a": (-math.inf, 1)}}, "space of a: -inf to 1"),
        ({"start": {"a": 4}}, "start of a: 4 is outside its space, -3 to 3"),
        ({"start": {"c": 0}}, "start of c: it is not in the space, which has a, b"),
        ({"space": {"a": (1, 2)}}, "start of a: 0 is outside its space, 1 to 2"),
        ({"trials": 0}, "trials = 0: above 0"),
        ({"workers": 0}, "workers = 0: at least 1"),
        ({"space": {str(i): (-1, 1) for i in range(9)}, "method": "grid"}, "a grid over 9 values has at least 2^9"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(change: dict[str, object], said: str) -> None:
    def never(x: dict[str, float]) -> float:
        raise AssertionError(x)

    with pytest.raises(InputError) as refused:
        search(never, **({"space": SPACE, "trials": 10} | change))  # type: ignore[arg-type]
    assert said in str(refused.value)


def test_a_grid_is_gone_through() -> None:
    found = search(bowl, {"a": (-3.0, 3.0), "b": (-2.0, 4.0)}, trials=34, method="grid")
    points = {tuple(trial.params.values()) for trial in found.trials if trial.finalist is None}
    assert points >= {(a, b) for a in np.linspace(-3, 3, 5) for b in np.linspace(-2, 4, 5)}
    assert bowl(found.params) == min(bowl({"a": a, "b": b}) for a, b in points)


def test_the_trust_region_beats_random_search_on_cliffs_and_noise() -> None:
    def left(method: str, seed: int) -> float:
        truth, rng = landscape(12, seed), np.random.default_rng(seed)
        space = {str(i): (-3.0, 3.0) for i in range(12)}
        found = search(
            lambda x: truth.trial(np.array(list(x.values())), rng), space, trials=40, method=method, seed=seed
        )
        return truth.loss(np.array(list(found.params.values()))) - FLOOR

    regions, randoms = ([left(method, seed) for seed in range(4)] for method in ("trust-region", "random"))
    assert np.median(regions) < np.median(randoms) / 2
