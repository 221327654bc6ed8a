"""Write the results of a study: its document and two recipes, with a reason for every searched value.

The recipes are the best one, and the one with the fewest changes among those that are as good within the noise.
"""

from pathlib import Path

from leaven.recipe.files import write_recipe, write_text
from leaven.recipe.recipe import Recipe
from leaven.recipe.units import format_number
from leaven.tuning.point import recipe_at
from leaven.tuning.space import Space
from leaven.tuning.study_document import StudyDocument, signed


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
    """Return the reason, for ``[why]``, of the value at ``path`` in the best recipe. If ``fewest`` is true, return
    that of the recipe with the fewest changes."""
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
