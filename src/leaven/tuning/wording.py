"""An answer in words: for a terminal and for [why]."""

import math
from collections.abc import Callable, Mapping, Sequence

from leaven.recipe.recipe import short_path
from leaven.recipe.units import format_number
from leaven.tuning.algorithm.noise import GIVEN
from leaven.tuning.document import Answer, Best, Coordinate, Dimension, StudyDocument

ROWS, NAMED = 8, 6  # values in the table, names in a sentence

Values = Callable[[Mapping[str, float]], Mapping[str, float | str]]  # of a recipe, at octaves from the start


def lines(answer: Answer, width: int | None = None) -> tuple[str, ...]:
    """What a search found out, in aligned lines; before anything was run with fresh seeds, what is expected.

    The table has as many of its columns as ``width`` characters have room for; sentences are for others to fold.
    """
    if not answer.coordinates:
        return (answer.advice,) if answer.advice else ()
    said = []
    if answer.best is not None:
        against = f", {_signed(-answer.gain)} against the start" if answer.gain is not None and _moved(answer) else ""
        said += [f"best       {answer.best.loss:.4f} nats per token, {_sure(answer.best)}{against}"]
        if answer.best.fresh > 1:
            said += [f"{'':11}the mean of {answer.best.fresh} runs that had no part in choosing it"]
        if not _moved(answer):
            tried = any(each.importance for each in answer.coordinates)
            found = "nothing was found that is known to be better" if tried else "nothing else was run"
            said += [f"{'':11}the start itself: {found}"]
    if answer.noise_floor is not None:
        freedom = "1 degree" if answer.noise_runs == 1 else f"{answer.noise_runs} degrees"
        of = "given" if answer.noise_runs == GIVEN else f"{freedom} of freedom"
        said += [f"noise      {answer.noise_floor:.4f} nats, standard deviation between seeds ({of})"]
    if worth := [each for each in answer.coordinates if each.worth]:
        said += _mattered(answer, worth[:ROWS], width)
        said += [f"{'':11}and {len(worth) - ROWS} more"] if len(worth) > ROWS else []
    for i, each in enumerate(each for each in answer.coordinates if each.at_end):
        said += [f"{'' if i else 'at the end':11}{short_path(each.path)}: {each.end}"]
        said += [f"{'':11}the optimum may lie beyond; {farther(answer.dimension(each.path), each.best)}"]
    said += _fewest(answer)
    if answer.idle:
        said += [
            f"not worth  {len(answer.idle)} of {len(answer.coordinates)}, at the start less than the noise together"
        ]
        said += [f"{'':11}{some([short_path(path) for path in answer.idle])}"]
    known = {each.path for each in answer.coordinates if each.worth or not each.best} | {*answer.idle}
    if unsure := [each.gain for each in answer.coordinates if each.path not in known]:
        together = " together" if len(unsure) > 1 else ""
        told = (
            f"{len(unsure)} not known to have gained more than the noise, {round(sum(unsure), 4) + 0.0:.4f}{together}"
        )
        said += [f"unsure     {told}"]
    return tuple(said)


def farther(dimension: Dimension, best: float) -> str:
    """What to write for a search that goes farther than to the end at which its best is."""
    low, high = dimension.low, dimension.high
    step = 2 * dimension.scale
    low, high = (low, math.ceil(high + step)) if best > 0 else (math.floor(low - step), high)
    # A side without room gets some: 0, the recipe's own value, lies between.
    return f'in the recipe: [tuning.octaves] "{dimension.path}" = [{min(low, -1 / 8):.4g}, {max(high, 1 / 8):.4g}]'


def _mattered(answer: Answer, worth: Sequence[Coordinate], width: int | None) -> list[str]:
    """The table of what mattered; columns that do not fit are left out, those first that say least."""
    names = [short_path(each.path) for each in worth]
    columns = {
        "change": [answer.dimension(each.path).change(each.best) for each in worth],
        "as good between": [_between(answer.dimension(each.path), each.flat) for each in worth],
        "gain": [f"{each.gain:.4f} +-{each.gain_deviation:.4f}" for each in worth],
        "importance": [f"{each.importance:.0%}" for each in worth],
    }
    first = 11 + max(map(len, names))
    wide = {head: max(len(head), *map(len, cells)) for head, cells in columns.items()}
    for head in ("importance", "as good between", "gain"):
        if width is not None and first + sum(2 + wide[kept] for kept in columns) > width:
            del columns[head]
    rows = [("mattered", list(columns))]
    rows += [(f"{'':11}{name}", [cells[i] for cells in columns.values()]) for i, name in enumerate(names)]
    return [
        f"{begin:{first}}" + "".join(f"  {cell:>{wide[head]}}" for head, cell in zip(columns, cells, strict=True))
        for begin, cells in rows
    ]


def _between(dimension: Dimension, flat: tuple[float, float]) -> str:
    return "" if dimension.unit == "choice" else " to ".join(map(dimension.change, flat))


def stopped(ended: int, trials: int | None) -> str:
    """That a search ended after so many trials, of as many as there might have been, for want of gain."""
    of = f"{ended} of {trials}" if trials is not None and trials > ended else f"{ended}"
    return f"stopped    after {of} trials: the last rounds gained less than the noise"


def _fewest(answer: Answer) -> list[str]:
    assert answer.fewest_octaves is not None
    if not _moved(answer):
        return []
    if answer.fewest_octaves == answer.octaves:
        return ["fewest     no point with fewer changes that was run is equal to the best within noise"]
    moved = {path: octaves for path, octaves in answer.fewest_octaves.items() if octaves}
    far = sum(abs(x) for path, x in moved.items() if answer.dimension(path).unit == "octave")
    said = [f"fewest     {len(moved)} of {len(answer.octaves)} changed, {far:.1f} octaves in all"]
    if not moved:
        said = ["fewest     none changed: the start"]
    said[0] += f", equal to the best within noise; expected {_signed(answer.fewest_cost or 0.0)}"
    if answer.fewest is not None:
        said += [f"{'':11}measured {answer.fewest.loss:.4f}, {_sure(answer.fewest)}"]
    if moved:
        ordered = sorted(moved.items(), key=lambda item: -abs(item[1]))
        said += [f"{'':11}" + some([f"{short_path(path)} {answer.dimension(path).change(x)}" for path, x in ordered])]
    return said


def _sure(best: Best) -> str:
    """How sure a loss is."""
    if not best.fresh and best.runs > 1:
        return f"the mean of {best.runs} runs that chose it among several, so that it may be too low"
    if not best.fresh:
        return "of the run that chose it, so that it is too low"
    low, high = best.interval
    if not math.isfinite(low):
        return "of one run"
    return f"95% interval {low:.4f} to {high:.4f}"


def _moved(answer: Answer) -> bool:
    return any(answer.octaves.values())


def _signed(loss: float) -> str:
    return f"{round(loss, 4) + 0.0:+.4f}"  # -0.0 + 0.0 is 0.0


def why(path: str, study: StudyDocument, values: Values, *, fewest: bool = False) -> str:
    """The reason for a value of the best recipe, or of that with the fewest changes.

    ``values`` are those of a recipe at octaves from the start.
    """
    point, best = (study.fewest_octaves, study.fewest) if fewest else (study.octaves, study.best)
    assert point is not None
    assert best is not None
    start = values({**point, path: 0.0})[path]
    start = start if isinstance(start, str) else format_number(start)
    runs = f" over {best.fresh} fresh seeds" if best.fresh > 1 else ""
    reasons = [
        # Not "trial 63 of 64": a retry has another number, and counts once.
        f"study {study.name}, trial {best.number} ({study.method}, {len(study.trials)} trials)",
        f"validation loss {best.loss:.4f}, {_sure(best)}{runs}",
    ]
    if fewest:
        reasons += ["the fewest changes that are as good within the noise"]
    if not point[path]:
        reasons += ["as at the start"]
    elif fewest:
        reasons += [f"{start} at the start"]
    else:
        each = next(coordinate for coordinate in study.coordinates if coordinate.path == path)
        # What an octave does to a value is the space's matter, and 1 - beta falls where beta rises.
        ends = [values({**point, path: octaves})[path] for octaves in each.flat]
        if numbers := sorted(end for end in ends if not isinstance(end, str)):
            reasons += [f"as good between {format_number(numbers[0])} and {format_number(numbers[1])}"]
        doubt = "" if each.worth else ", not known to be more than the noise"
        reasons += [f"{start} at the start costs {_signed(each.gain)} +-{each.gain_deviation:.4f}{doubt}"]
    return "; ".join(reasons)


def some(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more
