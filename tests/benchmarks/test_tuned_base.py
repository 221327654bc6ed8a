"""Test that the run that leaven tuned itself agrees with its log, and does not count as a published run."""

import tomllib

from benchmarks.tuned_base import __main__ as study

from leaven.catalogue.neighbours import neighbours
from leaven.catalogue.runs import load_runs, own_runs
from leaven.recipe.files import read_recipe

NAME = read_recipe(study.RECIPE).name


def test_the_files_are_what_the_log_says() -> None:
    trials = study.read_log()
    assert tomllib.loads((study.CATALOGUE / "runs" / f"{NAME}.toml").read_text()) == study.entry(trials)
    assert read_recipe(study.CATALOGUE / "bases" / f"{NAME}.toml") == study.base(trials)


def test_the_loss_of_the_answer_is_of_its_runs() -> None:
    trials = study.read_log()
    best = study.answered(trials).best
    point = next(trial.octaves for trial in trials if trial.number == best.number)
    losses = [trial.loss for trial in trials if trial.octaves == point and trial.loss is not None]
    assert len(losses) >= best.runs
    assert min(losses) <= best.loss <= max(losses)


def test_it_has_no_vote() -> None:
    assert [run.id for run in own_runs()] == [NAME]
    assert NAME not in {run.id for run in load_runs()}
    assert NAME not in {run.id for run in neighbours(67_000, 1_340_000).runs}
