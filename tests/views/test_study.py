"""Test the page of a study: its sentences about good, incomplete and failed studies, and its command."""

import html
import json
import math
import re
import shlex

import pytest
import studied
from studied import replace

from leaven.documents import sealed
from leaven.recipe.units import parse_quantity
from leaven.scaling.table import parameter_table
from leaven.tuning.point import values
from leaven.tuning.space import space
from leaven.tuning.study_document import StudyDocument
from leaven.views import points, recipe_view, study_charts
from leaven.views.folders import read_study
from leaven.views.page import folder_page
from leaven.views.study_page import study_page, tune_command


def words(page: str) -> str:
    """Return the text of a page."""
    body = re.sub(r"<[^>]+>", " ", page.partition("<main>")[2].partition("<noscript>")[0])
    return " ".join(html.unescape(body).split())


@pytest.fixture(scope="module")
def state():
    return studied.study()


@pytest.fixture(scope="module")
def study(state, tmp_path_factory):
    return read_study(studied.write(tmp_path_factory.mktemp("studies") / "modules", state))


def test_an_answer_that_is_the_start_claims_no_gain(study):
    at_start = tuple(replace(each, best=0.0, gain=0.0, worth=False) for each in study.coordinates)
    text = words(
        study_page(replace(study, coordinates=at_start, gain=0.0, octaves=dict.fromkeys(study.octaves, 0.0)))
    )
    assert "the start itself: no point is known to be better" in text
    assert "No point was found that is better than the start, so no value has gained anything" in text
    assert "What mattered" not in text


def test_a_gain_is_compared_with_the_noise_and_with_how_well_it_is_known(state):
    state = replace(state, noise_floor=0.0031)
    assert points.result(replace(state, gain=0.003))[-1] == "the gain is not above the noise between seeds"
    assert points.result(replace(state, gain=0.0062, noise_runs=1))[-1] == (
        "the gain is 2.0 times the noise between seeds (estimated from only 1 repeat)"
    )
    assert not any("noise" in line for line in points.result(studied.unjudged(state)))
    doubtful = replace(state, gain=0.003, in_doubt=True)
    assert points.result(doubtful)[-1] == "the gain is not above the noise between seeds; it may be luck"
    assert points.result(replace(doubtful, noise_floor=None))[-1] == (
        "the gain over the start may be luck: the noise between seeds is unknown"
    )
    assert points.result(replace(doubtful, gain=None))[-1] == (
        "the gain over the start may be luck: only trials that chose this point measured it"
    )


@pytest.mark.parametrize("half", [0.002, 0.5])
def test_the_chart_of_the_search_shows_the_whole_interval_of_the_answer(study, half):
    loss = study.best.loss
    wide = replace(study, best=replace(study.best, interval=(loss - half, loss + half)))
    low, high = study_charts.search(wide)["layout"]["yaxis"]["range"]
    assert low < loss - half < loss + half < high


def test_drawn_multipliers_equal_those_of_the_parameter_table(study):
    """The reference is the parameter table: values with multipliers divided by values without multipliers."""
    best = study.best_recipe
    plain = best.replace({"hyperparameters.modules": {}, "hyperparameters.depth": {}})
    assert recipe_view.multiplier_kinds(best, study.space) == ["lr", "init_std", "residual"]
    mine, without = parameter_table(best), parameter_table(plain)
    compared = 0
    for row, neutral in zip(mine.rows, without.rows, strict=True):
        for kind in ("lr", "init_std"):
            if recipe_view.acts(best, row.module, kind) and getattr(neutral, kind):
                got = recipe_view.module_layers(best, row.module, kind)
                factor = got[row.layer if len(got) > 1 else 0]
                assert factor == pytest.approx(getattr(row, kind) / getattr(neutral, kind))
                compared += 1
    assert compared > 100


@pytest.mark.long
def test_the_printed_change_of_a_beta_is_its_exponent(study, tmp_path):
    start = study.centre
    beta = space(start, "hyperparameters.beta2").dimensions[0]
    assert values(start, {beta.path: 1.0}) == {beta.path: pytest.approx(start.hyperparameters.beta2**2)}
    assert points.change(beta, 1.0) == "2×"
    said = "2× squares the beta"
    assert said not in words(study_page(study))  # no beta among the first 31 values
    assert said in words(folder_page(studied.write(tmp_path / "study", studied.study(60, 24))))


def test_idle_values_are_called_not_worth_tuning(study):
    effects = {each.path: study.effect(each) for each in study.coordinates}
    assert {path for path, effect in effects.items() if effect == "not worth tuning"} == set(study.idle)
    unsure = [each for each in study.coordinates if effects[each.path] == "unsure"]
    assert unsure  # their gain may be noise, but they are not called not worth tuning
    assert not any(each.worth for each in unsure)


def test_a_loss_without_fresh_seeds_is_called_optimistic(tmp_path):
    state = studied.unjudged(studied.study(6, 24))
    page = folder_page(studied.write(tmp_path / "study", state))
    text = words(page)
    assert "from the trial that was also used to choose this point" in text
    assert "the mean of" not in text
    assert "95%" not in text.split("Where every value")[0]
    document = json.loads((tmp_path / "study/study.json").read_text())
    for empty in (None, [None, None]):
        document["best"]["interval"] = empty
        (tmp_path / "study/study.json").write_text(json.dumps(sealed(document)))
        assert read_study(tmp_path / "study").interval is None


@pytest.mark.parametrize("which", ["global-full", "per-module", "hyperparameters.modules.mlp.in.lr"])
@pytest.mark.parametrize("durations", [(), (250_000, 500_000)])
def test_the_command_on_the_page_makes_the_same_study(study, which, durations):
    searched = space(study.centre, which)
    if durations:
        searched = searched.without("batch.tokens", "").without("schedule.decay", "")
    trials = (replace(study.trials[0], state="running"), *study.trials[1:])
    command = tune_command(replace(study, trials=trials, space=searched.paths, durations=durations), "c.toml", ".")
    words = shlex.split(command)
    options = dict(zip(words[3::2], words[4::2], strict=True))
    assert space(study.centre, options["--space"]).paths == searched.paths
    assert len(options["--space"].split(",")) <= 22
    assert int(options["--trials"]) == len(study.trials) - 1  # one is running
    assert [parse_quantity(each) for each in options.get("--durations", "").split(",") if each] == [*durations]


@pytest.mark.long
@pytest.mark.parametrize(
    ("made", "said"),
    [
        (studied.all_diverged, "All 9 trials diverged, including the start: start from lr at 0.001 or lower"),
        (studied.at_first, "The first trial has not completed yet; 6 values are searched"),
        (studied.bare, "is the best of 24"),
    ],
)
def test_incomplete_studies_have_a_page(tmp_path, made, said):
    page = folder_page(studied.write(tmp_path / "study", made(studied.study(6, 24))))
    assert said in words(page)


def test_infinite_numbers_and_unknown_keys_are_read(tmp_path):
    folder = studied.write(tmp_path / "study", studied.study(6, 24))
    document = json.loads((folder / "study.json").read_text())
    lost = next(trial for trial in document["trials"] if trial["state"] == "diverged")
    lost["loss"] = math.inf
    lost["curve"] += [[900_000, None], [950_000, math.nan]]
    document["written_by_a_newer_one"] = True
    (folder / "study.json").write_text(json.dumps(sealed(document)))
    trial = read_study(folder).trials[lost["number"]]
    assert (trial.loss, len(trial.curve)) == (None, len(lost["curve"]) - 2)
    assert folder_page(folder)


def test_a_pruned_trial_is_stored_as_stopped(state):
    text = state.model_dump_json()
    assert state.count("pruned") == text.count('"state":"stopped"') > 0
    assert '"pruned"' not in text
    assert StudyDocument.model_validate_json(text).count("pruned") == state.count("pruned")
