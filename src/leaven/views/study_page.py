"""Render the page of a study. It shows the answer, the search, the values that matter, the multipliers that were
found, all trials, and the cost."""

import math
import shlex
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from leaven.recipe.recipe import split_path
from leaven.tuning.algorithm.noise import GIVEN
from leaven.tuning.study_document import UNDER_WAY, Coordinate, Dimension
from leaven.views import numbers, points, study_charts
from leaven.views.charts import ACCENT, Figure
from leaven.views.folders import StudyView
from leaven.views.recipe_view import acts, depth_chart, multipliers_view, recipe_view
from leaven.views.render import render

FIRST = 14  # number of rows of the table of values that are visible at first
SHOWN = 30  # number of rows of the table of trials that are visible at first, in every sort order
MATTERED, IDLE, UNSURE = "mattered", "not worth tuning", "unsure"


def study_page(study: StudyView) -> str:
    charts, search = search_view(study)
    best, recipe = study.best_recipe, study.best_recipe or study.centre
    known = study_charts.known_curves(study)
    if known:
        charts["curves"] = study_charts.curves(study, known, "training loss, nats per token")
        if ahead := study_charts.against_best(study):
            charts["ahead"] = study_charts.curves(study, ahead, "above the best trial, nats per token")
    charts["front"] = study_charts.front(study)
    charts["timeline"] = study_charts.timeline(study)
    charts["depth"] = depth_chart(best, study.space) if best else None
    return render(
        "study.html.j2",
        charts,
        kind="study",
        title=study.name,
        study=study,
        lost=[f"{n} {state}" for state in ("diverged", "stopped", "failed", *UNDER_WAY) if (n := study.count(state))],
        search=search,
        multipliers=multipliers_view(best, study.space) if best else None,
        changes=changes(study),
        durations=durations(study),
        trials=trial_rows(study),
        shown=SHOWN,
        cost=_cost(study),
        points=points,
        view=recipe_view(recipe, study.centre if best else None, ("centre", "best" if best else "start")),
        commands=[tune_command(study, "centre.toml", "."), "leaven report . -o report.html"],
    )


def search_view(study: StudyView) -> tuple[dict[str, Figure | None], Mapping[str, Any]]:
    """Return the charts of a search, and the context of the macro in ``search.html.j2``. Both are empty until a trial
    has completed."""
    if study.start_loss is None:
        return {}, {}
    kinds = study_charts.by_kind(study)
    slices = study_charts.slices(study)
    charts: dict[str, Figure | None] = {"search": study_charts.search(study)}
    charts |= {f"slice-{i}": chart for i, (_, chart) in enumerate(slices)}
    view = {
        "study": study,
        "marks": [(study_charts.MARKS[name], len(trials)) for name, trials in kinds.items() if name != "best"],
        "best_colour": ACCENT,
        "beyond": len(kinds.get("beyond", ())),
        "slices": [(each, points.change(study.dimension(each.path), each.best)) for each, _ in slices],
        "rows": [_value_row(each, study) for each in study.coordinates],
        "first": FIRST,
        "at_end": [each for each in study.coordinates if each.at_end],
        "unsure": [each.gain for each in study.unsure],
    }
    return charts, view


def word(coordinate: Coordinate, study: StudyView) -> str:
    """Say in a word or two whether a value was worth tuning.

    A value that was not worth tuning can be reset to the start. If the effect of a changed value is unclear, the word
    is "unsure". Return "" for a value that stayed at the start.
    """
    if coordinate.worth or coordinate.path in study.idle:
        return MATTERED if coordinate.worth else IDLE
    return UNSURE if coordinate.best else ""


def _value_row(coordinate: Coordinate, study: StudyView) -> Mapping[str, Any]:
    dimension = study.dimension(coordinate.path)
    highest = max(abs(each.importance) for each in study.coordinates) or 1.0
    flat = () if dimension.levels else coordinate.flat
    return {
        "path": coordinate.path,
        "strip": _strip(coordinate, dimension),
        "best": points.change(dimension, coordinate.best),
        "flat": " to ".join(points.change(dimension, to) for to in flat),
        "gain": coordinate.gain,
        "deviation": coordinate.gain_deviation,
        "bar": 100 * max(coordinate.importance, 0.0) / highest,
        "importance": coordinate.importance,
        "optuna": coordinate.optuna_importance,
        "word": word(coordinate, study),
    }


def _strip(coordinate: Coordinate, dimension: Dimension) -> Mapping[str, Any]:
    """Return the contents of the small picture of a searched value.

    They are the regions where runs diverge, the flat region, the start and the best value. All positions are in
    percent of the picture's width.
    """
    low, high = dimension.box
    places = [coordinate.best, *coordinate.flat, *(point.octaves for point in coordinate.slice)]
    low, high = max(min(low, *places), dimension.low), min(max(high, *places), dimension.high)

    def at(octaves: float) -> float:
        return 100 * (min(max(octaves, low), high) - low) / (high - low)

    def span(first: float, last: float) -> tuple[float, float]:
        return at(first), max(at(last) - at(first), 0.0)

    lost = [point.octaves for point in coordinate.slice if point.risk > 0.5]
    sides = [[o for o in lost if o < coordinate.best], [o for o in lost if o > coordinate.best]]
    best, first, last, lowest, highest = (
        points.change(dimension, to) for to in (coordinate.best, *coordinate.flat, low, high)
    )
    return {
        "lost": [span(min(side), max(side)) for side in sides if side],
        "flat": span(*coordinate.flat),
        "start": at(0.0),
        "best": at(coordinate.best),
        "label": f"best value {best} relative to the start; flat from {first} to {last}; "
        f"shown from {lowest} to {highest}",
    }


def changes(study: StudyView) -> Mapping[str, Any] | None:
    """Return the table of the values that changed, at the best point and at the equally good point with the fewest
    changes. Return None if there is no best point, or if the best point is the start."""
    best, fewest = study.best_trial, study.fewer
    if best is None or best.octaves is None:
        return None
    moved = {path: octaves for path, octaves in best.octaves.items() if abs(octaves) > points.UNMOVED}
    if not moved:
        return None

    def cells(dimension: Dimension, value: float | str | None, to: float) -> list[str]:
        octaves = f"{to:+.2f}".replace("-", numbers.MINUS) if dimension.unit == "octave" else numbers.NONE
        return [_shown(value), points.change(dimension, to), octaves]

    rows = []
    for path in sorted(moved, key=lambda path: (-abs((fewest or moved).get(path, 0.0)), -abs(moved[path]))):
        dimension, to = study.dimension(path), (fewest or {}).get(path, 0.0)
        other = None
        if abs(to) > points.UNMOVED:
            other = cells(dimension, points.value(dimension, to, study.centre.model.seq_len), to)
        own = cells(dimension, best.values.get(path), moved[path])
        rows.append({"path": path, "start": _shown(dimension.centre), "best": own, "fewest": other})
    few = sum(abs(octaves) > points.UNMOVED for octaves in (fewest or {}).values())
    betas = any(".beta" in path for path in moved)
    return {"rows": rows, "of": len(best.octaves), "fewest": few if fewest else None, "betas": betas, "first": FIRST}


def _shown(value: float | str | None) -> str:
    return value if isinstance(value, str) else numbers.value(value)


def durations(study: StudyView) -> Sequence[tuple[int, int, float]]:
    """Find the trial with the lowest loss at each duration. Return (tokens, number of the trial, loss) for each
    duration.

    Return an empty list if there is only one duration.
    """
    ends = [
        (tokens, trial.number, loss)
        for trial in study.trials
        if trial.state == "complete" and trial.purpose == "search"
        for tokens, loss in trial.branches
    ]
    lengths = sorted({tokens for tokens, _, _ in ends})
    if len(lengths) < 2:
        return []
    return [min((end for end in ends if end[0] == length), key=lambda end: end[2]) for length in lengths]


def trial_rows(study: StudyView) -> list[Mapping[str, Any]]:
    """Return the rows of the table of trials, sorted by loss. Trials without a loss come last."""
    names, best = points.workers(study), study.best_trial
    lowest = min((t.loss for t in study.trials if t.state == "complete" and t.loss is not None), default=None)
    lowest = best.loss if best else lowest
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
    """Return the cost of the search: time, tokens, FLOPs and machines."""
    ran = [trial for trial in study.trials if trial.seconds]
    workers = {trial.worker for trial in ran if trial.worker}
    speeds = [trial.tokens_per_second for trial in ran if trial.tokens_per_second and trial.state == "complete"]
    ends = [(trial.ended - (trial.seconds or 0.0), trial.ended) for trial in ran if trial.ended]
    return {
        "seconds": study.seconds if ran else None,
        "elapsed": max(ended for _, ended in ends) - min(begun for begun, _ in ends) if ends else None,
        "early": [
            (sum(trial.seconds or 0.0 for trial in ran if trial.state == state), study.count(state), state)
            for state in ("stopped", "diverged", "failed")
        ],
        "tokens": sum(trial.tokens for trial in study.trials),
        "flops": sum(trial.flops for trial in study.trials),
        "speed": statistics.median(speeds) if speeds else None,
        "workers": len(workers),
        "hosts": sorted({worker.rpartition(":")[0] for worker in workers}),
    }


def tune_command(study: StudyView, recipe: str, folder: str) -> str:
    """Return the ``leaven tune`` command that repeats a study. It has the study's space, method and number of trials,
    and the noise if the user gave it."""
    counted = str(max(study.ended, 1))
    options = ["--study", folder, "--trials", counted, "--method", study.method, "--space", _space(study)]
    if study.durations:
        options += ["--durations", ",".join(map(str, study.durations))]
    if study.noise_runs == GIVEN:
        options += ["--noise", repr(study.noise_floor)]
    return shlex.join(["leaven", "tune", recipe, *options])


def _space(study: StudyView) -> str:
    """Return the argument of ``--space`` that selects the searched values. If a quantity is searched in all modules,
    it is written as one pattern."""
    recipe, searched = study.centre, set(study.space)
    names = dict[str, None]()
    for path in study.space:
        *outer, quantity = split_path(path)
        every = {f"hyperparameters.modules.{m}.{quantity}" for m in recipe.model.modules if acts(recipe, m, quantity)}
        whole = len(outer) == 3 and every <= searched
        names[f"hyperparameters.modules.*.{quantity}" if whole else path] = None
    return ",".join(names)
