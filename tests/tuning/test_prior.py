"""Knowledge from before a search: against the equations of a regression, and in searches where it is wrong."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.priors import optimum_of
from benchmarks.small_budgets import made_up
from click.testing import Result
from tests.errors import refused
from typer.testing import CliRunner

from leaven.catalogue.expectations import expectations
from leaven.catalogue.findings.case import Case
from leaven.cli import app
from leaven.data.tokens import prepare
from leaven.errors import InputError
from leaven.planning.flops import flops_per_token
from leaven.recipe.files import write_recipe
from leaven.recipe.recipe import Recipe
from leaven.scaling.table import parameter_table
from leaven.tuning import search
from leaven.tuning.algorithm.surrogate import (
    DIFFERENCES,
    EarlierTrials,
    fit_surrogate,
    prior_of_expectations,
    priors_of_earlier,
)
from leaven.tuning.earlier_study import earlier_trials, unlike_earlier
from leaven.tuning.point import BATCH, recipe_at
from leaven.tuning.service.recipe_study import Study, check_request
from leaven.tuning.space import space
from leaven.tuning.study_document import StudyDocument, StudyTrial

OPTIMUM = np.array([1.0, -0.5])
LR, DECAY = "hyperparameters.lr", "hyperparameters.weight_decay"


def bowl(x: np.ndarray) -> np.ndarray:
    return 3 + np.asarray(((x - OPTIMUM) ** 2).sum(-1)) / 2


def test_an_expectation_that_the_trials_contradict_is_dropped() -> None:
    points = np.random.default_rng(1).uniform(-1, 1, (6, 2))
    right, wrong = (prior_of_expectations(centre, np.full(2, 0.3)) for centre in (OPTIMUM, -OPTIMUM))
    plain = fit_surrogate(points, bowl(points), 0.01)
    assert fit_surrogate(points, bowl(points), 0.01, [right]).informed
    after = fit_surrogate(points, bowl(points), 0.01, [wrong])
    assert not after.informed
    assert after.mean.slope == pytest.approx(plain.mean.slope)
    # Before any trial has moved, nothing contradicts it, and the minimum is where it is expected.
    before = fit_surrogate(np.zeros((1, 2)), np.array([3.0]), 0.01, [right])
    assert before.mean.minimum(np.zeros(2), np.full(2, -3.0), np.full(2, 3.0)) == pytest.approx(OPTIMUM)


def test_the_prior_of_an_earlier_search_is_its_posterior_with_differences() -> None:
    """The covariance of a Bayesian regression with unit errors is (1 + F^T F)^-1; the third column is dropped."""
    points = np.random.default_rng(2).uniform(-1, 1, (9, 3))
    losses, noise = bowl(points[:, :2]) + 0.3 * points[:, 2], 0.05
    found = fit_surrogate(points, losses, noise)
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
    prior, _ = priors_of_earlier(points, losses, noise, 2)
    assert prior.mean == pytest.approx(mean[kept], abs=1e-9)
    covariance = inverse[np.ix_(kept, kept)] + DIFFERENCES[0] ** 2 * np.eye(5)
    assert prior.root @ prior.root.T == pytest.approx(covariance, abs=1e-9)


def regrets(knowledge: Callable[[int], dict[str, object]]) -> float:
    """The mean regret of searches of 8 trials over 4 values, as a share of the start's."""
    found = []
    for seed in range(8):
        truth = made_up("bowl", 4, seed)

        def objective(x: dict[str, float], truth: Callable[[np.ndarray], float] = truth) -> float:
            return truth(np.array(list(x.values())))

        space = {name: (-3, 3) for name in "abcd"}
        best = search(objective, space, trials=8, seed=seed, noise=0.0, **knowledge(seed))  # type: ignore[arg-type]
        found.append(min(truth(np.array(list(best.params.values()))), 1.0))
    return float(np.mean(found))


def test_an_expectation_moves_the_search_and_a_wrong_one_harms_little() -> None:
    def told(sign: float) -> Callable[[int], dict[str, object]]:
        def known(seed: int) -> dict[str, object]:
            optimum = optimum_of("bowl", 4, seed)
            return {"expected": {name: (sign * float(x), 0.3) for name, x in zip("abcd", optimum, strict=True)}}

        return known

    without = regrets(lambda seed: {})
    assert regrets(told(1.0)) < 0.4 * without
    assert regrets(told(-1.0)) < 1.5 * without


def test_knowledge_is_for_the_trust_region() -> None:
    with pytest.raises(InputError, match="method random uses no knowledge from before the search"):
        search(lambda x: x["a"], {"a": (-1, 1)}, method="random", trials=4, expected={"a": (0.5, 0.5)})
    with pytest.raises(InputError, match=r"expected\.b: not a name in space"):
        search(lambda x: x["a"], {"a": (-1, 1)}, trials=4, expected={"b": (0.5, 0.5)})
    with pytest.raises(InputError, match="earlier: give finite points"):
        search(lambda x: x["a"], {"a": (-1, 1)}, trials=4, earlier=EarlierTrials(np.zeros((4, 0)), np.zeros(4), 0.1))


def test_interactions_of_the_earlier_search_keep_their_size() -> None:
    """With five columns, of which four are searched now, interactions have another prior."""
    points = np.random.default_rng(3).uniform(-1, 1, (60, 5))
    losses = bowl(points[:, :2]) + 0.8 * points[:, 0] * points[:, 1]
    prior, _ = priors_of_earlier(points, losses, 0.001, 4)
    found = fit_surrogate(points[:1, :4], losses[:1], 0.001, [prior])
    share = found.mean.hessian / found.mean.hessian[0, 0]
    assert share[0, 1] == pytest.approx(0.8, abs=0.05)
    assert share[1, 1] == pytest.approx(1.0, abs=0.15)


def test_an_unknown_noise_is_fitted() -> None:
    rng = np.random.default_rng(4)
    points = rng.uniform(-1, 1, (12, 2))
    losses = bowl(points) + rng.normal(0, 0.3, 12)
    sure, unsure = (priors_of_earlier(points, losses, noise, 2)[0].root for noise in (0.0, None))
    assert np.linalg.det(unsure @ unsure.T) > 2 * np.linalg.det(sure @ sure.T)


def test_expectations_are_distances_from_the_values_as_trained(tiny: Recipe) -> None:
    def found(recipe: Recipe) -> dict[str, float]:
        every = expectations(Case(recipe, parameter_table(recipe).rows))
        return {path: each.octaves for path, each in every.items()}

    first, doubled = found(tiny), found(tiny.replace({LR: 2 * tiny.hyperparameters.lr}))
    assert {LR, BATCH, DECAY} <= first.keys()
    assert doubled[LR] == pytest.approx(first[LR] - 1)
    assert doubled[BATCH] == pytest.approx(first[BATCH])
    informed = space(tiny, f"{LR},{BATCH}").with_laws()
    for each in informed.dimensions:
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
    searched_for = {"space": searched.paths, "dimensions": searched.dimensions, "trials": trials}
    document = StudyDocument(name="earlier", method="trust-region", noise_floor=0.02, noise_runs=4, **searched_for)
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
    # Values that are not searched now count from this recipe too, in steps of their scale.
    decayed = tiny.replace({BATCH: 2 * tiny.batch.tokens, "why": {**tiny.why, BATCH: "study earlier, trial 1"}})
    best = json.loads((folder / "study.json").read_text()) | {"octaves": {LR: 0.0, BATCH: 1.0}}
    (folder / "study.json").write_text(json.dumps(best))
    after, _ = earlier_trials(folder, space(decayed.replace({"scaling.base": tiny.base.model_dump()}), LR))
    assert after.points[:, 1] == pytest.approx(np.array([0, 0, 1, -0.5, 0]) - 1)
    # The global lr moves the lr of every module.
    modules, _ = earlier_trials(folder, space(tiny, "hyperparameters.modules.*.lr"))
    lrs = modules.points[:, :-2]
    assert lrs.shape[1] > 3
    assert lrs == pytest.approx(np.tile([[0.0], [1.0], [-1.0], [0.5], [2.0]], lrs.shape[1]))


def test_an_earlier_study_of_a_shallower_model_is_compared_at_the_depths_of_its_points(
    folder: Path, tiny: Recipe
) -> None:
    depth = "hyperparameters.depth.lr"
    document = json.loads((folder / "study.json").read_text())
    shallow = tiny.replace({f"{depth}": (1.0, 1.0), "scaling.base": tiny.base.model_dump()})
    deep = shallow.replace({"model.n_layers": 4, f"{depth}": (1.0,)})
    searched = space(shallow, f"{depth}[1]")
    for number, trial in enumerate(document["trials"]):
        trial["octaves"] = {f"{depth}[1]": float(number)}
    written = StudyDocument(name="x", method="random", space=(), trials=(), dimensions=searched.dimensions)
    document["dimensions"] = json.loads(written.model_dump_json())["dimensions"]
    (folder / "study.json").write_text(json.dumps(document))
    write_recipe(shallow, folder / "centre.toml")
    trials, _ = earlier_trials(folder, space(deep, f"{depth}[0],{depth}[1],{depth}[2]"))
    assert trials.points[:, :3] == pytest.approx(np.outer(range(5), [0, 0.5, 1]))


def test_settings_that_change_what_values_mean_are_named(folder: Path, tiny: Recipe) -> None:
    def cautions(changes: dict[str, Any], which: str = LR) -> list[str]:
        return [line.partition(": ")[2] for line in unlike_earlier(folder, space(tiny.replace(changes), which))]

    said = "so losses and best values may differ"
    assert cautions({"hyperparameters.optimizer": "adam"}) == [
        f"its recipe has hyperparameters.optimizer adamw (here adam), {said}"
    ]
    others = {"hyperparameters.beta2": 0.9, "precision.compute": "bf16", "model.qk_norm": False}
    assert cautions(others | {"stability.keep": 3, "data.seed": 1, "model.n_layers": 4}) == [
        "its recipe has model.qk_norm True (here False), hyperparameters.beta2 0.95 (here 0.9) and "
        f"precision.compute fp32 (here bf16), {said}"
    ]
    assert cautions({"model.norm_eps": 1e-5, "model.rope_theta": 500_000.0, "model.d_ff": 128}) == [
        f"its recipe has model.norm_eps 1e-06 (here 1e-05) and model.rope_theta 10000.0 (here 500000.0), {said}"
    ]
    write_recipe(tiny.replace({"start.weights": "first"}), folder / "centre.toml")
    assert cautions({"start.weights": "second"}) == [f"its recipe has start.weights first (here second), {said}"]
    assert cautions({"start.weights": os.path.abspath("first")}) == []
    assert len(cautions({})) == 1  # of random weights, `unlike_training` warns
    plain: dict[str, Any] = {"hyperparameters.modules": {}}
    write_recipe(tiny.replace(plain), folder / "centre.toml")
    multipliers = "hyperparameters.modules.embedding"
    assert cautions(plain | {multipliers: {}}) == []
    assert cautions(plain | {multipliers: {"lr": 4.0}}) == [f"its recipe has {multipliers}.lr 1.0 (here 4.0), {said}"]
    write_recipe(tiny, folder / "centre.toml")
    assert cautions({"hyperparameters.beta2": 0.9}, f"{LR},hyperparameters.beta2") == [
        "it did not search hyperparameters.beta2, so it says nothing about these values"
    ]
    assert cautions({"scaling.token_exponent": 0.3}) == []  # at its base, the rule changes nothing
    longer = {"scaling.base": tiny.base.model_dump(), "data.tokens": 2 * tiny.data.tokens}
    assert cautions(longer | {"scaling.token_exponent": 0.3})[0].startswith(
        "its recipe has scaling.token_exponent 0.5 (here 0.3), so"
    )
    assert cautions({"model.dropout": 0.1})[0].startswith("the values are from a dropout of 0")
    with pytest.raises(InputError, match="this study searched none of these values; leave --from-study out"):
        earlier_trials(folder, space(tiny, "hyperparameters.grad_clip"))
    (missing,) = cautions({"model.dropout": 0.1}, f"{LR},model.dropout")
    assert missing == "it did not search model.dropout, so it says nothing about these values"
    assert cautions({}, "hyperparameters.modules.*.lr") == []


def test_an_earlier_study_that_says_nothing_is_refused(folder: Path, tiny: Recipe, tmp_path: Path) -> None:
    searched = space(tiny, LR)
    with pytest.raises(InputError, match=r"no study\.json in this folder; give the folder of a study"):
        earlier_trials(tmp_path, searched)
    base = tiny.base.model_dump() | {"tokens": 2 * tiny.base.tokens}
    with pytest.raises(InputError, match="another base or scaling rule"):
        earlier_trials(folder, space(recipe_at(tiny.replace({"scaling.base": base}), {}), LR))
    document = json.loads((folder / "study.json").read_text())
    (folder / "study.json").write_text(json.dumps(document | {"trials": document["trials"][:3]}))
    with pytest.raises(InputError, match="only 3 of its trials are finished, at least 4 are needed"):
        earlier_trials(folder, searched)
    best = {"number": 0, "loss": 2.0, "interval": 5}
    curves = [{**document["trials"][0], "curve": curve} for curve in (None, [5], [[]], [{}])]
    for damage in ({"best": best}, *({"trials": [trial]} for trial in curves), {"trials": 3}):
        (folder / "study.json").write_text(json.dumps(document | damage))
        with pytest.raises(InputError, match=r"its study\.json is damaged; run the leaven tune command"):
            earlier_trials(folder, searched)


def test_zeros_and_multipliers_of_betas_are_compared_or_refused_in_one_line(folder: Path, tiny: Recipe) -> None:
    whole, _ = earlier_trials(folder, space(tiny, "per-module-full,hyperparameters.beta1"))
    assert np.isfinite(whole.points).all()
    write_recipe(tiny.replace({DECAY: 0.0}), folder / "centre.toml")
    with pytest.raises(InputError, match="cannot be compared with this recipe"):
        earlier_trials(folder, space(tiny, f"{DECAY},{LR}"))


def test_a_centre_with_which_the_study_did_not_begin_is_refused(folder: Path, tiny: Recipe) -> None:
    write_recipe(tiny.replace({LR: tiny.hyperparameters.lr / 8}), folder / "centre.toml")
    with pytest.raises(InputError, match=r"lr is 0.00125 in centre.toml, but the study began at 0.01; remove"):
        earlier_trials(folder, space(tiny, LR))


def test_another_vocabulary_than_the_earlier_study_had_is_a_warning(folder: Path, tiny: Recipe) -> None:
    assert unlike_earlier(folder, space(tiny, LR)) == []
    (warning,) = unlike_earlier(folder, space(tiny.replace({"data.source": "other.txt"}), LR))
    assert f"the values are from the text {tiny.data.source}, and this run's text is other.txt" in warning
    relative = tiny.replace({"data.source": os.path.relpath(str(tiny.data.source))})
    assert unlike_earlier(folder, space(relative, LR)) == []
    (warning,) = unlike_earlier(folder, space(tiny.replace({"schedule": {"decay": "constant"}}), LR))
    assert "with the schedule here (constant) it is 100%" in warning
    (warning,) = unlike_earlier(folder, space(tiny.replace({"model.vocab_size": 640}), LR))
    assert warning.startswith(f"--from-study {folder}: the values are from a model with a vocabulary of 320")


def test_a_request_is_checked_in_the_space_that_the_study_searches(folder: Path, tiny: Recipe) -> None:
    """With several durations the batch is not searched."""
    given: dict[str, Any] = {"flops": None, "hours": None, "noise": None, "trials": 8}
    searched = space(tiny.replace({"schedule.decay": "wsd"}), f"{LR},{BATCH}")
    grid = {"durations": (1024, 2048), "from_study": None}
    check_request(tiny, searched, "grid", **given | {"trials": 4, **grid})  # 2 points of lr, not 4 of lr and batch
    with pytest.raises(InputError, match="at least 2\\^2 points"):
        check_request(tiny, searched, "grid", **given | {"trials": 4, "durations": (), "from_study": None})
    with pytest.raises(InputError, match="method treust-region: unknown; did you mean trust-region"):
        check_request(tiny, searched, "treust-region", durations=(), from_study=folder, **given)


def test_a_budget_in_flops_is_for_the_cooldowns_of_a_trial_as_well(tiny: Recipe) -> None:
    """A trial of 4,096 and 8,192 tokens trains the last fifth of the shorter run twice."""
    recipe = tiny.replace({"schedule.decay": "wsd", "schedule.decay_ratio": 0.2})
    trunk = flops_per_token(recipe.model) * 8192
    given: dict[str, Any] = {"trials": None, "hours": None, "noise": None, "from_study": None}
    check_request(recipe, space(recipe, LR), "random", durations=(8192, 4096), flops=1.11 * trunk, **given)
    with pytest.raises(InputError, match=r"--flops \S+ is too small, because one trial takes"):
        check_request(recipe, space(recipe, LR), "random", durations=(8192, 4096), flops=1.09 * trunk, **given)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--flops 1", "--flops 1 is too small"),
        ("--method treust-region", "method treust-region: unknown; did you mean trust-region"),
        ("--method grid --trials 2", "a grid over 9 hyperparameters has at least 2^9 points"),
        ("--from-study nope", "--from-study nope: "),
    ],
)
def test_wrong_arguments_are_refused_before_the_text_is_tokenised(
    tiny_file: Path, monkeypatch: pytest.MonkeyPatch, options: str, said: str
) -> None:
    monkeypatch.setattr("leaven.cli.tune.prepare_text", lambda *_: pytest.fail("tokenised"))
    with refused(said):
        CliRunner().invoke(app, ["tune", str(tiny_file), "--study", "new", *options.split()], catch_exceptions=False)
    assert not Path("new").exists()


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
    assert opened.out.joinpath("best.toml").read_text().count("the search used what laws") == state.informed
    # It resumes without the option, also if the earlier study is gone; but knowledge cannot be added later.
    (folder / "study.json").unlink()
    with study(None) as opened:
        again = opened.run(8, 1)
    assert len(opened.space.axes.knowledge) == len(DIFFERENCES)
    assert again.trials[:6] == state.trials
    informed = space(short, LR).knowing({LR: (0.5, 0.5)}, None)
    with pytest.raises(InputError, match=r"was created without --prior"):
        Study(tmp_path / "study", short, informed, "trust-region", tokens).__enter__()


@pytest.mark.usefixtures("in_this_process")
def test_the_command_says_what_laws_expect(tiny_file: Path, tmp_path: Path) -> None:
    options = ["--study", str(tmp_path / "study"), "--trials", "4", "--workers", "1"]
    options += ["--set", "data.tokens=1024", "--set", "schedule.warmup_tokens=128"]

    def tune(*more: str) -> Result:
        return CliRunner().invoke(app, ["tune", str(tiny_file), *options, *more])

    done = tune("--space", LR, "--prior", "laws")
    assert done.exit_code == 0
    assert f"expected: {LR} " in done.stderr
    assert "prior      " in done.stdout
    none = tune("--space", "hyperparameters.beta1", "--prior", "laws")
    assert "searches none of these" in str(none.exception)
    assert tune("--prior", "law").exit_code == 2
