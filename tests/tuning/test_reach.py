"""Searches reach optima outside of the first box, at 0 and among choices."""

import math
from collections.abc import Callable

import numpy as np
import pytest
from optuna.storages import InMemoryStorage

from leaven.recipe.recipe import Recipe
from leaven.training.outcome import Outcome
from leaven.tuning import search
from leaven.tuning.algorithm.trust_region import Axes
from leaven.tuning.point import values
from leaven.tuning.service.samplers import BEST, LEAST, box
from leaven.tuning.service.search import SearchResult
from leaven.tuning.service.search_loop import Proposal
from leaven.tuning.service.search_plan import METHODS
from leaven.tuning.space import Space, space

Objective = Callable[[dict[str, float]], float]


def found_in(
    around: Space, objective: Objective, method: str = "trust-region", trials: int = 60, **more: object
) -> SearchResult:
    limits = {"scales": around.scales, "near": around.near, "noise": 1e-3, "stop_at_noise": False}
    return search(objective, around.limits, None, trials, method, **{**limits, **more})  # type: ignore[arg-type]


def half_life(beta: float) -> float:
    return math.log2(math.log(0.5) / math.log(beta))


def planted(recipe: Recipe, **optimum: float) -> Objective:
    """A loss whose lowest point has these hyperparameters; it rises by 0.1 an octave squared and then linearly."""

    def loss(octaves: dict[str, float]) -> float:
        there = values(recipe, {f"hyperparameters.{name}": octaves[f"hyperparameters.{name}"] for name in optimum})
        away = [
            half_life(float(there[f"hyperparameters.{name}"])) - half_life(best)
            if name.startswith("beta")
            else math.log2(float(there[f"hyperparameters.{name}"]) / best)
            for name, best in optimum.items()
        ]
        return 3.0 + sum(0.2 * (math.sqrt(1 + x * x) - 1) for x in away)

    return loss


def test_an_optimum_outside_of_the_first_box_is_found(tiny: Recipe) -> None:
    """beta1 0.52 to 0.95 is 3.7 octaves, and residual 1 to 1/20 is 4.3: both outside of the first box."""
    start = tiny.replace({"hyperparameters.beta1": 0.52})
    around = space(start, "global")
    assert around.near["hyperparameters.beta1"] == (-2, pytest.approx(0.08, abs=0.01))
    assert around.near["hyperparameters.residual"] == (-3, 3)
    found = found_in(around, planted(start, beta1=0.95, residual=1 / 20))
    there = around.values(found.params)
    assert abs(half_life(float(there["hyperparameters.beta1"])) - half_life(0.95)) < 1
    assert abs(math.log2(20 * float(there["hyperparameters.residual"]))) < 1
    assert found.loss < 3.06


def test_the_box_grows_only_where_the_best_points_are_at_its_end() -> None:
    axes = Axes({"a": (-8.0, 8.0), "b": (-8.0, 2.5)}, near={"a": (-2.0, 2.0), "b": (-2.0, 2.0)})
    rng = np.random.default_rng(0)
    points = rng.uniform(-2, 2, (40, 2))
    towards_a = box(points, -points[:, 0], axes)
    assert towards_a[0].tolist() == [-2, -2]
    assert towards_a[1][0] > 2 == towards_a[1][1]
    inside = box(points, (points**2).sum(1), axes)
    assert [end.tolist() for end in inside] == [[-2, -2], [2, 2]]
    # It grows up to the end of the space.
    beyond = np.concatenate([points, np.tile([0.0, 2.5], (40, 1)) + rng.uniform(-0.1, 0, (40, 2))])
    assert box(beyond, -beyond[:, 1], axes)[1].tolist() == [2, 2.5]
    # Divergences and too few trials do not move it.
    assert box(points, np.full(40, np.inf), axes)[1].tolist() == [2, 2]
    assert box(points[: LEAST - 1], -points[: LEAST - 1, 0], axes)[1].tolist() == [2, 2]
    assert BEST < LEAST


def chosen(octaves: dict[str, float]) -> float:
    """wsd and adam are best, and the lr an octave up."""
    decay, optimizer = (octaves[name] for name in ("schedule.decay", "hyperparameters.optimizer"))
    values = {0: 0.1, 1: 0.2, 2: 0.0}[round(decay)] + 0.1 * (optimizer == 0)
    return 3.0 + values + 0.1 * (octaves["hyperparameters.lr"] - 1) ** 2


@pytest.mark.parametrize("method", [pytest.param("gp", marks=pytest.mark.slow), *(m for m in METHODS if m != "gp")])
def test_the_best_of_choices_is_found(tiny: Recipe, method: str) -> None:
    around = space(tiny, "hyperparameters.lr,schedule.decay,hyperparameters.optimizer")
    found = found_in(around, chosen, method, trials=40)
    there = around.values(found.params)
    assert (there["schedule.decay"], there["hyperparameters.optimizer"]) == ("wsd", "adam")
    assert {trial.params["schedule.decay"] for trial in found.trials} == {0.0, 1.0, 2.0}


@pytest.mark.parametrize("method", ["trust-region", "random", "tpe"])
def test_an_interrupted_search_proposes_the_same_points(tiny: Recipe, method: str) -> None:
    start = tiny.replace({"hyperparameters.beta1": 0.52})
    around = space(start, "hyperparameters.beta1,schedule.decay")
    loss, calls, store = planted(start, beta1=0.98), [], InMemoryStorage()
    whole = found_in(around, loss, method, trials=30)

    def recorded(octaves: dict[str, float]) -> float:
        calls.append(octaves)
        return loss(octaves)

    stopped = found_in(around, recorded, method, 30, stop=lambda: len(calls) >= 20, storage=store)
    assert (len(calls), len(stopped.trials), stopped.stalled) == (20, 20, False)
    parts = found_in(around, loss, method, 30, storage=store)
    assert [trial.params for trial in parts.trials] == [trial.params for trial in whole.trials]
    assert parts.params == whole.params
    first = around.near["hyperparameters.beta1"][0]
    assert min(trial.params["hyperparameters.beta1"] for trial in parts.trials) < first


def test_a_run_is_pruned_against_runs_with_the_same_choices(tiny: Recipe) -> None:
    """A wsd run is behind a cosine run until it cools down."""
    around, seen = space(tiny, "hyperparameters.lr,schedule.decay"), []

    def loss(proposal: Proposal) -> Outcome:
        level = proposal["schedule.decay"]
        if proposal.baseline is not None:
            seen.append((level, proposal.baseline.curve[0][1]))
        return Outcome(chosen({**proposal, "hyperparameters.optimizer": 0.0}), curve=((1, level), (2, 3.0)))

    search(loss, around.limits, trials=40)
    assert len({level for level, _ in seen}) > 1
    assert all(level == of for level, of in seen)
