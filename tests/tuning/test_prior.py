"""Knowledge from before a search: against the equations of a regression, and in searches where it is wrong."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from benchmarks.small_budgets import made_up

from leaven.catalogue.expectations import expectations
from leaven.catalogue.findings.case import Case
from leaven.data.tokens import prepare
from leaven.recipe.errors import InputError
from leaven.recipe.files import write_recipe
from leaven.recipe.recipe import Recipe
from leaven.scaling.table import resolve
from leaven.tuning import search
from leaven.tuning.algorithm.prior import DIFFERENCES, EarlierTrials, of_earlier, of_expectations
from leaven.tuning.algorithm.surrogate import fit
from leaven.tuning.earlier_study import earlier_trials
from leaven.tuning.point import BATCH, recipe_at
from leaven.tuning.service.study import Study
from leaven.tuning.space import space
from leaven.tuning.study_document import StudyDocument, StudyTrial

OPTIMUM = np.array([1.0, -0.5])
LR, DECAY = "hyperparameters.lr", "hyperparameters.weight_decay"


def bowl(x: np.ndarray) -> np.ndarray:
    return 3 + np.asarray(((x - OPTIMUM) ** 2).sum(-1)) / 2


def test_an_expectation_that_the_trials_contradict_is_dropped() -> None:
    points = np.random.default_rng(1).uniform(-1, 1, (6, 2))
    right, wrong = (of_expectations(centre, np.full(2, 0.3)) for centre in (OPTIMUM, -OPTIMUM))
    plain = fit(points, bowl(points), 0.01)
    assert fit(points, bowl(points), 0.01, [right]).informed
    after = fit(points, bowl(points), 0.01, [wrong])
    assert not after.informed
    assert after.mean.slope == pytest.approx(plain.mean.slope)
    # Before any trial has moved, nothing contradicts it, and the minimum is where it is expected.
    before = fit(np.zeros((1, 2)), np.array([3.0]), 0.01, [right])
    assert before.mean.minimum(np.zeros(2), np.full(2, -3.0), np.full(2, 3.0)) == pytest.approx(OPTIMUM)


def test_the_prior_of_an_earlier_search_is_its_posterior_with_differences() -> None:
    """The covariance of a Bayesian regression with unit errors is (1 + F^T F)^-1; the third column is dropped."""
    points = np.random.default_rng(2).uniform(-1, 1, (9, 3))
    losses, noise = bowl(points[:, :2]) + 0.3 * points[:, 2], 0.05
    found = fit(points, losses, noise)
    i, j = np.triu_indices(3, 1)
    rows = np.hstack([points, points**2 / 2, 0.5 * points[:, i] * points[:, j]]) * found.curvature
    rows, target = (
        (values.T / np.hypot(noise, 0.1 * (losses - losses.min()))).T
        for values in (np.hstack([rows, np.ones((9, 1))]), losses)
    )
    inverse = np.linalg.inv(rows.T @ rows + np.diag([1.0] * 9 + [0.0]))
    start = np.r_[np.zeros(3), np.ones(3), np.zeros(4)]
    mean = start + inverse @ rows.T @ (target - rows @ start)
    kept = [0, 1, 3, 4, 6]  # slopes and curvatures of the first two columns, and their interaction
    prior, _ = of_earlier(points, losses, noise, 2)
    assert prior.mean == pytest.approx(mean[kept], abs=1e-9)
    covariance = inverse[np.ix_(kept, kept)] + DIFFERENCES[0] ** 2 * np.eye(5)
    assert prior.root @ prior.root.T == pytest.approx(covariance, abs=1e-9)


def regrets(knowledge: Callable[[int], dict[str, object]]) -> float:
    """The mean regret of searches of 8 trials over 4 values, as a share of the start's."""
    found = []
    for seed in range(8):
        truth = made_up("bowl", 4, seed)
        best = search(
            lambda x, truth=truth: truth(np.array(list(x.values()))),  # type: ignore[misc]
            {name: (-3, 3) for name in "abcd"},
            trials=8,
            seed=seed,
            noise=0.0,
            **knowledge(seed),  # type: ignore[arg-type]
        )
        found.append(min(truth(np.array(list(best.params.values()))), 1.0))
    return float(np.mean(found))


def earlier(seed: int, function: Callable[[np.ndarray], float]) -> dict[str, object]:
    names = {name: (-3, 3) for name in "abcd"}
    trials = search(
        lambda x: function(np.array(list(x.values()))), names, trials=16, seed=seed + 50, noise=0.0
    ).trials
    points = np.array([list(trial.params.values()) for trial in trials])
    return {"earlier": EarlierTrials(points, np.array([trial.loss for trial in trials]), 0.0)}


def test_an_earlier_search_helps_if_it_was_alike_and_hardly_harms_if_it_was_not() -> None:
    without = regrets(lambda seed: {})
    shift = np.random.default_rng(0).normal(0, 0.3, 4)
    alike = regrets(lambda seed: earlier(seed, lambda x: 2 * made_up("bowl", 4, seed)(x + shift)))
    unlike = regrets(lambda seed: earlier(seed, made_up("bowl", 4, seed + 1000)))
    assert alike < 0.6 * without
    assert unlike < 2 * without


def test_knowledge_is_for_the_trust_region() -> None:
    with pytest.raises(InputError, match="method random uses no knowledge from before the search"):
        search(lambda x: x["a"], {"a": (-1, 1)}, method="random", trials=4, expected={"a": (0.5, 0.5)})
    with pytest.raises(InputError, match=r"expected\.b: not in the space"):
        search(lambda x: x["a"], {"a": (-1, 1)}, trials=4, expected={"b": (0.5, 0.5)})


def test_expectations_are_distances_from_the_values_as_trained(tiny: Recipe) -> None:
    def found(recipe: Recipe) -> dict[str, float]:
        every = expectations(Case(recipe, resolve(recipe).rows))
        return {path: each.octaves for path, each in every.items()}

    first, doubled = found(tiny), found(tiny.replace({LR: 2 * tiny.hyperparameters.lr}))
    assert {LR, BATCH, DECAY} <= first.keys()
    assert doubled[LR] == pytest.approx(first[LR] - 1)
    assert doubled[BATCH] == pytest.approx(first[BATCH])
    informed = space(tiny, f"{LR},{BATCH}").expecting(expectations(Case(tiny, resolve(tiny).rows)))
    for each in informed.dimensions:
        assert each.expected is not None
        assert each.low <= each.expected[0] <= each.high
        assert each.expected[1] >= each.scale / 2


@pytest.fixture
def folder(tiny: Recipe, tmp_path: Path) -> Path:
    """A study of lr and batch at the tiny recipe, with five trials."""
    where = tmp_path / "earlier"
    where.mkdir()
    searched = space(tiny, f"{LR},{BATCH}")
    trials = tuple(
        StudyTrial(number, "complete", 3.0 + number, {}, 1.0, 1.0, octaves={LR: x, BATCH: y})
        for number, (x, y) in enumerate([(0.0, 0.0), (1.0, 0.0), (-1.0, 1.0), (0.5, -0.5), (2.0, 0.0)])
    )
    document = StudyDocument(
        name="earlier",
        method="trust-region",
        space=searched.paths,
        dimensions=searched.dimensions,
        trials=trials,
        noise_floor=0.02,
        noise_runs=4,
    )
    (where / "study.json").write_text(document.model_dump_json())
    write_recipe(tiny, where / "centre.toml")
    return where


def test_earlier_trials_are_points_of_the_new_space(folder: Path, tiny: Recipe) -> None:
    trials, noise = earlier_trials(folder, space(tiny, f"{DECAY},{LR}"))
    assert noise == 0.02
    assert trials.points[:, 0] == pytest.approx(np.zeros(5))  # the decay was not searched
    assert trials.points[:, 1] == pytest.approx([0, 1, -1, 0.5, 2])
    assert trials.points[:, 2] == pytest.approx([0, 0, 1, -0.5, 0])  # the batch is not searched now
    # A recipe with twice the lr starts an octave higher.
    higher, _ = earlier_trials(folder, space(tiny.replace({LR: 2 * tiny.hyperparameters.lr}), LR))
    assert higher.points[:, 0] == pytest.approx(np.array([0, 1, -1, 0.5, 2]) - 1)
    # The global lr moves the lr of every module.
    modules, _ = earlier_trials(folder, space(tiny, "hyperparameters.modules.*.lr"))
    lrs = modules.points[:, :-2]
    assert lrs.shape[1] > 3
    assert lrs == pytest.approx(np.tile([[0.0], [1.0], [-1.0], [0.5], [2.0]], lrs.shape[1]))
    assert trials.digest != higher.digest


def test_an_earlier_study_that_says_nothing_is_refused(folder: Path, tiny: Recipe, tmp_path: Path) -> None:
    searched = space(tiny, LR)
    with pytest.raises(InputError, match=r"no study\.json there; give the folder of a leaven tune --study"):
        earlier_trials(tmp_path, searched)
    base = tiny.base.model_dump() | {"tokens": 2 * tiny.base.tokens}
    with pytest.raises(InputError, match="another base or scaling rule"):
        earlier_trials(folder, space(recipe_at(tiny.replace({"scaling.base": base}), {}), LR))
    document = json.loads((folder / "study.json").read_text())
    (folder / "study.json").write_text(json.dumps(document | {"trials": document["trials"][:3]}))
    with pytest.raises(InputError, match="3 finished trials, fewer than 4"):
        earlier_trials(folder, searched)


@pytest.mark.usefixtures("in_this_process")
def test_a_study_keeps_its_knowledge(folder: Path, tiny: Recipe, tmp_path: Path) -> None:
    short = tiny.replace({"data.tokens": 1024, "schedule.warmup_tokens": 128})
    write_recipe(short, folder / "centre.toml")
    tokens = prepare(short.data, short.model.vocab_size)

    def study(from_study: Path | None) -> Study:
        return Study(tmp_path / "study", short, space(short, LR), "trust-region", tokens, from_study=from_study)

    with study(folder) as opened:
        state = opened.run(6, 1)
    # The noise of the earlier study is used, so that no run measures it.
    assert not [trial for trial in state.trials if trial.purpose == "noise"]
    assert state.noise_floor == 0.02
    with pytest.raises(InputError, match="another noise"), study(None):
        pass
