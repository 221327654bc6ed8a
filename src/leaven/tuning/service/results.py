"""The results of a study: its document, its best recipe, and the recipe with the fewest changes that is as good."""

import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import optuna
from optuna.distributions import FloatDistribution

from leaven.recipe.files import write_recipe, write_text
from leaven.recipe.recipe import Recipe
from leaven.recipe.units import format_number
from leaven.tuning.algorithm.answer import answer, front
from leaven.tuning.algorithm.trust_region import RADIUS, Array
from leaven.tuning.point import recipe_at
from leaven.tuning.service.search_plan import region_of
from leaven.tuning.service.trial_log import finished, runs
from leaven.tuning.space import Space
from leaven.tuning.study_document import StudyDocument, signed

FEWEST = 10  # trials for PED-ANOVA, whose best tenth must have one trial at least


def study_document(
    study: optuna.Study,
    space: Space,
    method: str,
    noise: float | None,
    *,
    durations: Sequence[int],
    over: bool,
    stalled: bool,
) -> StudyDocument:
    """Return the document of a study.

    Args:
        noise: the standard deviation of the loss between seeds, if the user gave it.
        over: whether a command has run the search to its end, so that there is a best point.
        stalled: whether the search ended early because some rounds gained less than the noise.
    """
    axes = space.axes
    records = [run.record(axes) for run in runs(study.get_trials(deepcopy=False), len(space.dimensions))]
    by_surrogate = method == "trust-region"
    found = answer(
        records,
        space.dimensions,
        noise,
        over=over,
        by_surrogate=by_surrogate,
        optunas=ped_anova,
        earlier=space.earlier,
    )
    trials = tuple(replace(trial, values=space.values(trial.octaves or {})) for trial in records)
    radius = None
    if by_surrogate:
        radius = region_of(study, axes, noise).radius if finished(study) else RADIUS
    return StudyDocument(
        **vars(found) | {"best": found.best if over else None, "dimensions": space.dimensions, "trials": trials},
        name=study.study_name,
        method=method,
        space=space.paths,
        radius=radius,
        stalled=stalled,
        durations=tuple(durations),
        front=front(trials),
    )


def write_results(out: Path, space: Space, state: StudyDocument) -> None:
    """Write study.json. If there is a best point, write best.toml, and fewest.toml if its point differs."""
    write_text(out / "study.json", state.model_dump_json(indent=2) + "\n")
    if state.best is None:
        return
    write_recipe(_recipe_at(space, state, fewest=False), out / "best.toml")
    if state.fewer is not None:
        write_recipe(_recipe_at(space, state, fewest=True), out / "fewest.toml")
    else:  # remove the one of an earlier answer
        (out / "fewest.toml").unlink(missing_ok=True)


def _recipe_at(space: Space, state: StudyDocument, *, fewest: bool) -> Recipe:
    """Return the best recipe, or the recipe with the fewest changes, with a reason for every searched value."""
    point, start = (state.fewest_octaves or {}) if fewest else state.octaves, space.recipe
    reasons = {path: reason(path, state, space, fewest=fewest) for path in space.paths}
    return recipe_at(start, point).replace({"scaling.base": start.base.model_dump(), "why": start.why | reasons})


def reason(path: str, state: StudyDocument, space: Space, *, fewest: bool = False) -> str:
    """Return the text in ``[why]`` for a value of the best recipe, or of the recipe with the ``fewest`` changes."""
    point, best = (state.fewest_octaves, state.fewest) if fewest else (state.octaves, state.best)
    assert point is not None
    assert best is not None
    start = space.values({**point, path: 0.0})[path]
    start = start if isinstance(start, str) else format_number(start)
    seeds = f" over {best.fresh} fresh seeds" if best.fresh > 1 else ""
    parts = [
        # Not "trial 63 of 64": a retry has another number, and counts once.
        f"study {state.name}, trial {best.number} ({state.method}, {len(state.trials)} trials)",
        f"validation loss {best.loss:.4f}, {best.certainty}{seeds}",
    ]
    if state.informed:
        parts += ["the search used what laws or an earlier study said"]
    if fewest:
        parts += ["the fewest changes that are as good within the noise"]
    if not point[path]:
        parts += ["as at the start"]
    elif fewest:
        parts += [f"{start} at the start"]
    else:
        each = next(coordinate for coordinate in state.coordinates if coordinate.path == path)
        # Sorted, because 1 - beta falls where beta rises.
        ends = [space.values({**point, path: octaves})[path] for octaves in each.flat]
        if numbers := sorted(end for end in ends if not isinstance(end, str)):
            parts += [f"as good between {format_number(numbers[0])} and {format_number(numbers[1])}"]
        doubt = "" if each.worth else ", not known to be more than the noise"
        parts += [f"{start} at the start costs {signed(each.gain)} +-{each.gain_deviation:.4f}{doubt}"]
    return "; ".join(parts)


def ped_anova(points: Array, losses: Array) -> Array:
    """Return PED-ANOVA importances (D,) that sum to 1, for ``points`` (n, D) with ``losses`` (n,).

    For each value, PED-ANOVA compares its distribution in the best tenth of the trials with its distribution in all
    trials (Watanabe et al. 2023, arXiv 2304.10255). Diverged trials have an infinite loss. With too few trials all
    importances are 0. Optuna's other two methods need scikit-learn.
    """
    names = [str(i) for i in range(points.shape[1])]
    ended = losses[np.isfinite(losses)]
    if len(ended) < FEWEST or not points.any():
        return np.zeros(len(names))
    reach = float(np.abs(points).max())
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study()
    optuna.logging.set_verbosity(verbosity)
    study.add_trials(
        optuna.trial.create_trial(
            value=float(min(loss, ended.max())),
            params=dict(zip(names, x.tolist(), strict=True)),
            distributions={name: FloatDistribution(-reach, reach) for name in names},
        )
        for x, loss in zip(points, losses, strict=True)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)  # until Optuna 5
        # If all losses are alike, all trials are the best tenth.
        warnings.filterwarnings("ignore", "Target and region quantiles select the same set of trials")
        shares = optuna.importance.get_param_importances(
            study, evaluator=optuna.importance.PedAnovaImportanceEvaluator()
        )
    return np.array([shares[name] for name in names])
