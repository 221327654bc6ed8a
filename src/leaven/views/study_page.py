"""Render the HTML page of a study: its best values, the search, the values that matter, all trials, and the cost."""

import math
import os
import shlex
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from leaven.recipe.recipe import Recipe, short_path, split_path
from leaven.tuning.algorithm.noise import GIVEN
from leaven.tuning.study_document import UNDER_WAY, Coordinate
from leaven.views import numbers, points, study_charts
from leaven.views.charts import Figure
from leaven.views.folders import StudyView
from leaven.views.recipe_view import acts, multipliers_view, recipe_view
from leaven.views.render import render

FIRST = 14  # number of rows of the table of values that are visible at first
SHOWN = 30  # number of rows of the table of trials that are visible at first, in every sort order


def study_page(study: StudyView) -> str:
    charts, search = search_view(study)
    best, start = study.best_recipe, study.centre if isinstance(study.centre, Recipe) else None
    recipe = best or start
    known = study_charts.known_curves(study)
    if known:
        what = "loss" if study.command else "training loss"
        charts["curves"] = study_charts.curves(study, known, f"{what}, nats per token")
    charts["front"] = study_charts.front(study)
    return render(
        "study.html.j2",
        charts,
        kind="study",
        title=study.name,
        study=study,
        result=points.result(study) if study.best else [],
        others=[*points.counts(study, (*points.EARLY_ENDS, *UNDER_WAY)).values()],
        search=search,
        multipliers=multipliers_view(best, study.space) if best else None,
        changes=changes(study),
        trials=trial_rows(study),
        shown=SHOWN,
        cost=_cost(study),
        view=recipe and recipe_view(recipe, start if best else None, ("centre", "best" if best else "start")),
        commands=[
            *([shlex.join(["cd", study.command_folder])] if study.folder != "." else []),
            tune_command(study, os.path.normpath(Path(study.folder, "centre.toml")), study.folder),
            *([study.best_command] if study.best_command else []),
            shlex.join(["leaven", "report", study.folder, "-o", str(Path(study.folder, "report.html"))]),
        ],
    )


def search_view(study: StudyView) -> tuple[dict[str, Figure | None], Mapping[str, Any]]:
    """Return the charts of a search and the ``view`` of ``search.html.j2``, both empty before a complete trial."""
    if study.start_loss is None:
        return {}, {}
    kinds, slices = study_charts.by_kind(study), study_charts.slices(study)
    charts: dict[str, Figure | None] = {"search": study_charts.search(study)}
    charts |= {f"slice-{i}": chart for i, (_, chart) in enumerate(slices)}
    _, top = study_charts.window(study)
    view = {
        "study": study,
        "marks": [(study_charts.MARKS[name], len(trials)) for name, trials in kinds.items() if name != "best"],
        "answer": study_charts.ANSWER,
        "repeats": points.repeats(study),
        "beyond": sum(trial.state == "complete" and (trial.loss or 0.0) > top for trial in study.trials),
        "slices": [(each, points.change(study.dimension(each.path), each.best)) for each, _ in slices],
        "rows": [_value_row(each, study) for each in study.coordinates],
        "findings": points.findings(study),
        "first": FIRST,
    }
    return charts, view


def _value_row(coordinate: Coordinate, study: StudyView) -> Mapping[str, Any]:
    dimension = study.dimension(coordinate.path)
    return {
        "of": coordinate,
        "best": points.change(dimension, coordinate.best),
        "flat": "" if dimension.levels else " to ".join(points.change(dimension, to) for to in coordinate.flat),
        "bar": 100 * coordinate.importance / (max(each.importance for each in study.coordinates) or 1.0),
        "effect": study.effect(coordinate),
    }


def changes(study: StudyView) -> Mapping[str, Any] | None:
    """Return a table of the values that differ between the best point and the start, or None if there are none."""
    moved, fewer = (
        {path: to for path, to in (point or {}).items() if abs(to) > points.UNMOVED}
        for point in (study.octaves, study.fewer)
    )
    at_best, at_fewest = study.values(moved), study.values(fewer)
    # A move that is rounded away, such as a batch of 1.04 times the start's in whole sequences, changes nothing.
    moved = {path: to for path, to in moved.items() if at_best[path] != study.dimension(path).centre}
    if study.best is None or not moved:
        return None
    rows = []
    for path in sorted(moved, key=lambda path: (path not in fewer, -abs(moved[path]))):
        found = [study.dimension(path).centre, at_best[path]]
        found += [at_fewest.get(path, "as at the start")] if study.fewer is not None else []
        rows.append([short_path(path), *(each if isinstance(each, str) else numbers.value(each) for each in found)])
    heads = ["value", "start", "best", *(["fewest changes"] if study.fewer is not None else [])]
    return {"heads": heads, "rows": rows}


def trial_rows(study: StudyView) -> list[Mapping[str, Any]]:
    """Return the rows of the table of trials: first the complete trials, then all others, both sorted by loss."""
    names, best = points.workers(study), study.best_trial
    ended = [trial.loss for trial in study.trials if trial.state == "complete" and trial.loss is not None]
    lowest = best.loss if best else min(ended, default=None)
    ranked = sorted(
        study.trials, key=lambda t: (t.state != "complete", math.inf if t.loss is None else t.loss, t.number)
    )
    return [
        {
            "trial": trial,
            "state": "ended" if trial.state == "complete" else f"{trial.state} {points.share(trial, study)}",
            "behind": trial.loss - lowest if trial.loss is not None and lowest is not None else None,
            "best": trial is best,
            "worker": names.get(trial.worker or "", numbers.NONE),
            "changes": points.summary(trial, study, 72, best),
        }
        for trial in ranked
    ]


def _cost(study: StudyView) -> Mapping[str, Any]:
    ran = [trial for trial in study.trials if trial.seconds]
    workers = {trial.worker for trial in ran if trial.worker}
    speeds = [trial.tokens_per_second for trial in ran if trial.tokens_per_second and trial.state == "complete"]
    ends = [(trial.ended - (trial.seconds or 0.0), trial.ended) for trial in ran if trial.ended]
    return {
        "elapsed": max(ended for _, ended in ends) - min(begun for begun, _ in ends) if ends else None,
        "seconds": sum(trial.seconds or 0.0 for trial in ran),
        "early": [
            f"{numbers.seconds(sum(trial.seconds or 0.0 for trial in ran if trial.state == state))} in {trials}"
            for state, trials in points.counts(study).items()
        ],
        "tokens": sum(trial.tokens for trial in study.trials),
        "flops": sum(trial.flops for trial in study.trials),
        "speed": statistics.median(speeds) if speeds else None,
        "workers": len(workers),
        "hosts": sorted({worker.rpartition(":")[0] for worker in workers}),
    }


def tune_command(study: StudyView, recipe: str, folder: str) -> str:
    """Return the command that repeats a study, with the file ``recipe`` and the study folder ``folder``."""
    options = ["--study", folder, "--trials", str(max(study.ended, 1)), "--method", study.method]
    if isinstance(study.centre, Recipe):
        options += ["--space", _space(study, study.centre)]
        options += ["--command", study.command, "--loss", study.loss_pattern] if study.command else []
    if study.durations:
        options += ["--durations", ",".join(map(str, study.durations))]
    if study.noise_runs == GIVEN:
        options += ["--noise", repr(study.noise_floor)]
    command = shlex.join(["leaven", "tune", recipe, *options])
    return command if study.informed is None else f"{command}  # add --prior or --from-study as in the first command"


def _space(study: StudyView, recipe: Recipe) -> str:
    """Return the argument of ``--space``. A value that is searched in all modules is written with ``*``."""
    searched = set(study.space)
    names = dict[str, None]()
    for path in study.space:
        *outer, quantity = split_path(path)
        every = {f"hyperparameters.modules.{m}.{quantity}" for m in recipe.model.modules if acts(recipe, m, quantity)}
        whole = len(outer) == 3 and every <= searched
        names[f"hyperparameters.modules.*.{quantity}" if whole else path] = None
    return ",".join(names)
