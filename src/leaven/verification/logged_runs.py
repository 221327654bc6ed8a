"""Runs the checks transfer and collapse on the logs of finished runs of any program, including leaven.

The logs are read by ``logged_rows.py``.
"""

import math
import re
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

from leaven.documents.checks import CheckDocument
from leaven.errors import InputError
from leaven.recipe.recipe import Recipe, differing, flatten
from leaven.scaling.table import parameter_table
from leaven.training.integrity import faults
from leaven.training.rewind import changed_values
from leaven.training.run_folder import RunFolder, changes_of
from leaven.verification.collapse import Points, collapse
from leaven.verification.logged_rows import (
    TIMES,
    LoggedRow,
    RunLogs,
    by_numbers,
    is_one_run,
    rows_of,
    unused_numbers,
)
from leaven.verification.model_instance import RunScale, ScaleAxis
from leaven.verification.optimum import LossGrid
from leaven.verification.sweep import AXES, SWEPT, SweptValue, compare

LARGEST_WIDTH = 10**15


def _scale_of(row: LoggedRow, axes: Iterable[str]) -> RunScale:
    """Return the scale in the columns ``axes`` of a row. Batch and tokens are absolute. Missing sizes are 1."""
    values = {axis: row.above_0(axis) for axis in axes}
    for axis in {"width", "depth"} & values.keys():
        if values[axis] % 1 or values[axis] > LARGEST_WIDTH:
            limit = f"{LARGEST_WIDTH:,}"
            raise InputError(f"{row.place}: {axis} is {values[axis]:g}; give a whole number of at most {limit}")
        values[axis] = int(values[axis])
    return RunScale(**{"width": 1, "depth": 1} | values)  # type: ignore[arg-type]


def _scale_name(scale: RunScale, axes: Iterable[str]) -> str:
    return " ".join(f"{axis} {getattr(scale, axis):.15g}" for axis in axes)  # e.g. width 64 depth 4


def transfer_of_runs(path: Path, value: str = "lr", loss: str = "loss") -> CheckDocument:
    """Check whether the best value of a hyperparameter is the same at all sizes of logged runs.

    ``value`` and ``loss`` are names of columns. In run folders of leaven, ``value`` is a hyperparameter or a path in
    the recipe. docs/concepts/checks.md describes the files. Raise InputError if the runs cannot be compared.
    """
    logs = RunLogs.at(path, loss)
    value = value.strip() if logs.own else value.strip().lower()
    found, axes, columns = _runs_by_size(path, logs, value, loss)
    scales = sorted(found, key=lambda scale: [getattr(scale, axis) for axis in AXES])
    names = {scale: _scale_name(scale, axes) for scale in scales}
    if len(scales) < 2:
        raise InputError(f"{path} has one size only, {names[scales[0]]}; a check of transfer compares two or more")
    grids = {scale: LossGrid.of(found[scale]) for scale in scales}
    base = grids[scales[0]]
    for scale, grid in grids.items():
        fails = len(base.octaves) and base.octaves[base.means.argmin()] in grid.diverged
        if not grid.has_optimum and not fails:
            raise InputError(
                f"{path}: {names[scale]} has {len(grid.octaves)} values of {value} without a diverged run, but an "
                f"optimum needs at least three; add runs with other values of {value}"
            )
    counts = sorted({len(runs) for values in found.values() for runs in values.values()})
    limit = next((known.shift_limit for known in SWEPT.values() if known.key == value), SWEPT["lr"].shift_limit)
    swept = SweptValue(value, f"runs with {value}", (), limit, more_seeds="more runs for each value, e.g.")
    settings = {
        "rule": None,
        "scales": list(names.values()),
        value: sorted({number for values in found.values() for number in values}),
        "unit": "in base coordinates" if logs.own else "as in the rows",
        "seeds": counts[0] if len(counts) == 1 else f"{counts[0]} to {counts[-1]}",
        "columns not used": sorted(set(columns) - {"loss", loss.lower(), "seed", value, *axes}),
        "files not read": logs.unread,
    }
    return compare("transfer", str(path), swept, grids, names=names, ruled={}, settings=settings)


def _runs_by_size(
    path: Path, logs: RunLogs, value: str, loss: str
) -> tuple[dict[RunScale, dict[float, dict[Hashable, float]]], list[ScaleAxis], list[str]]:
    """Return the losses by size, value and seed; the columns that give the size; and the names of all columns."""
    if value.lower() in ("loss", "seed"):
        raise InputError(f"--value {value}: give the column of the swept hyperparameter, e.g. lr")
    used = {*AXES, value, "seed"}
    if logs.own:
        rows = _rows_of_own_runs(logs.own, value)
    else:
        rows, logged, curves = [], [], dict[Hashable, str]()
        for file in logs.others:
            found_here = rows_of(file, path, loss, used)
            if is_one_run(file):
                logged.append(end := _last(found_here))
                if math.isfinite(end.loss()):
                    curve = hash(tuple((row.number("step"), str(row.values["loss"])) for row in found_here))
                    _require_new(curves, (*map(end.values.get, (*AXES, value)), curve), str(file), "losses")
                found_here = [end]
            rows += found_here
        _refuse_unfinished(logged, value)
    columns = dict.fromkeys(column for row in rows for column in row.values)
    axes = [axis for axis in AXES if axis in columns and axis != value]
    for column, hint in (("loss", ""), (value, "; name the swept hyperparameter with --value COLUMN")):
        if column not in columns:
            raise InputError(f"{path} has no column {column}; its columns are {', '.join(columns)}{hint}")
    if not axes:
        raise InputError(f"{path} has no column {' or '.join(AXES)}; add the size of the runs, e.g. width")
    found: dict[RunScale, dict[float, dict[Hashable, LoggedRow]]] = {}
    for row in rows:
        runs = found.setdefault(_scale_of(row, axes), {}).setdefault(row.above_0(value), {})
        seed = row.place if (written := row.seed()) is None else written
        if (first := runs.setdefault(seed, row)) is not row:
            twice = f"{row.place} repeats the size, {value} and seed of {first.place}"
            raise InputError(f"{twice}; remove one of the two, or name another swept column with --value")
    losses = {
        scale: {number: {seed: row.loss() for seed, row in runs.items()} for number, runs in values.items()}
        for scale, values in found.items()
    }
    for values in found.values():
        _refuse_copies(runs.values() for runs in values.values())
    return losses, axes, [*columns, *unused_numbers(logs.others, path, used)]


def _refuse_copies(values: Iterable[Iterable[LoggedRow]]) -> None:
    """Raise InputError if runs seem to be copies: they have the same loss as another run at the same value.

    ``values`` has the runs of each value. Runs count as copies if at least two values have several runs, and all
    values with several runs repeat a loss. A single value may repeat a loss by chance, because logs round losses.
    Diverged runs are ignored.
    """
    twins = []
    for rows in values:
        firsts: dict[float, LoggedRow] = {}
        runs = [row for row in rows if math.isfinite(row.loss())]
        if len(runs) > 1:
            twins.append([(row, first) for row in runs if (first := firsts.setdefault(row.loss(), row)) is not row])
    if len(twins) > 1 and all(twins):
        row, first = twins[0][0]
        raise InputError(
            f"{row.place} repeats the loss of {first.place}, and at this size, every value with several runs has "
            "such a repeated loss; these runs are probably copies: remove them, or write losses with more digits"
        )


def _refuse_unfinished(ends: Sequence[LoggedRow], value: str) -> None:
    """Raise InputError if a run that has not diverged ends at an earlier step than another run of the same size.

    ``ends`` has the last row of each run. Nothing is compared if ``value`` is part of the size, such as the batch.
    """
    if value in AXES:  # with another batch, a run has another number of steps
        return
    furthest: dict[tuple[Any, ...], LoggedRow] = {}
    for end in sorted(ends, key=lambda row: -row.number("step")):
        last = furthest.setdefault(tuple(end.values.get(axis) for axis in AXES), end)
        if math.isfinite(end.loss()) and end.number("step") < last.number("step"):
            raise InputError(
                f"{end.place} ends at step {end.number('step'):g}, and {last.place} at {last.number('step'):g}; "
                "finish or remove the shorter run, or if it diverged, log nan as its last loss"
            )


def collapse_of_runs(path: Path, irreducible: float | None = None, loss: str = "loss") -> CheckDocument:
    """Check whether the normalised loss curves of logged runs coincide. See :func:`curves_of` and ``collapse``."""
    logs = RunLogs.at(path, loss)
    curves, unused = _curves(path, logs, loss)
    settings = {"rule": None, "columns not used": unused, "files not read": logs.unread}
    return collapse(str(path), curves, irreducible, settings)


def curves_of(path: Path, loss: str = "loss") -> dict[str, list[Points]]:
    """Return the loss curves of all runs in a folder or file. The keys name the sizes, the smallest first.

    ``loss`` is the name of a column; rows without a loss are left out. docs/concepts/checks.md describes the
    files. Raise InputError if the runs cannot be used, or if the size of a curve is unclear.
    """
    return _curves(path, RunLogs.at(path, loss), loss)[0]


def _curves(path: Path, logs: RunLogs, loss: str) -> tuple[dict[str, list[Points]], list[str]]:
    """Return the curves by size, and the columns and the numbers in the paths of runs that are not used."""
    if logs.own:
        return _curves_of_own_runs(logs.own), []
    used = {"width", "depth", "batch", "seed"}
    unused = set[str]()
    found: dict[str, list[Points]] = {}
    sized: dict[tuple[str, ...], Path] = {}  # size columns and the first file that has them
    seen: dict[Hashable, str] = {}  # size and seed, or the points of a curve, and where they are
    for file in logs.others:
        rows = rows_of(file, path, loss, used)
        columns = dict.fromkeys(column for row in rows for column in row.values)
        unused |= columns.keys() - {*used, *TIMES, "loss", loss.lower()}
        rows = [row for row in rows if row.has("loss")] or rows
        time = next((column for column in TIMES if any(row.has(column) for row in rows)), None)
        if time is None or "loss" not in columns:
            filled = ", ".join(column for column in columns if any(row.has(column) for row in rows)) or "none"
            needs = f"a loss curve needs {' or '.join(TIMES)}, and loss"
            raise InputError(f"{file}: its columns with values are {filled}; {needs}")
        axes = [axis for axis in ("width", "depth", "batch") if axis in columns]
        sized.setdefault(tuple(axes), file)
        first = (file.relative_to(path).parts or [path.name])[0] if path.is_dir() else file.name
        own_name = file.stem if first == file.name and not file.is_dir() else first
        runs: dict[tuple[str, float | str | None], list[LoggedRow]] = {}
        for row in rows:
            if row.has("loss"):
                runs.setdefault((_scale_name(_scale_of(row, axes), axes) or own_name, row.seed()), []).append(row)
        for (name, seed), run in runs.items():
            if seed is not None:
                _require_new(seen, (name, seed), str(file), "size and seed")
            found.setdefault(name, []).append(points := _points(run, time))
            if all(math.isfinite(value) for _, value in points):
                _require_new(seen, tuple(points), run[0].place if len(runs) > 1 else str(file), "losses")
    if not found:
        raise InputError(f"{path} has no losses; fill the column loss")
    if len(sized) > 1:
        (some, one), (others, other), *_ = sized.items()
        raise InputError(
            f"{one} has the size columns {', '.join(some) or 'none'}, and {other} {', '.join(others) or 'none'}; "
            "give all files the same size columns"
        )
    if len(found) > 1 and (unnamed := [name for name in found if not re.search(r"\d", name)]):
        raise InputError(
            f"{path}: the name {unnamed[0]} has no number for the size; rename it, e.g. 50m, or add width"
        )
    if any(sized):  # else the names of files are the sizes
        unused.update(unused_numbers(logs.others, path, used))
    return {name: found[name] for name in sorted(found, key=by_numbers)}, sorted(unused)


def _require_new(seen: dict[Hashable, str], run: Hashable, place: str, what: str) -> None:
    """Add what identifies a run to ``seen``. Raise InputError if another place has the same: a copy is no seed."""
    if (first := seen.setdefault(run, place)) != place:
        raise InputError(f"{place} repeats the {what} of {first}; remove one of the two, or move it elsewhere")


def _points(rows: Sequence[LoggedRow], time: str) -> Points:
    """Return a run's points. Repeated steps replace earlier points. Raise InputError if a second run follows."""
    run: dict[float, float] = {}
    furthest = -1.0
    for row in rows:
        at = row.number(time)
        if not 0 <= at < math.inf:
            raise InputError(f"{row.place}: {time} is {at:g}; give a finite number of at least 0")
        if run and at <= next(reversed(run)) and (at not in run or at == next(iter(run))):
            break
        while run and at <= next(reversed(run)):
            run.popitem()
        run[at] = row.loss()
        furthest = max(furthest, at)
    else:
        if at == furthest:
            return list(run.items())
    raise InputError(
        f"{row.place}: {time} {at:g} comes after {furthest:g}, as if a second run began; write each run into a file "
        "of its own, in the order of time, or add the column seed"
    )


def _last(rows: Sequence[LoggedRow]) -> LoggedRow:
    """Return the last row of a run. Raise InputError if its step is not finite or not the highest."""
    last, highest = rows[-1].number("step"), max(row.number("step") for row in rows)
    if not last == highest < math.inf:
        raise InputError(
            f"{rows[-1].place}: step {last:g} comes after {highest:g}, as if a second run began; write each run into "
            "a file of its own, in the order of time"
        )
    return rows[-1]


def _read_own_runs(folders: Sequence[Path], *free: str) -> list[tuple[RunScale, Recipe, RunFolder]]:
    """Return the size, recipe and folder of each run. A size includes the batch and the duration, both in tokens.

    Raise InputError if files of a run were changed or lost, if ``--rewind-to`` changed a run's recipe, or if the runs
    have different texts. Also raise it if recipes of the same size differ in a key that is not in ``free``.
    """
    found = []
    firsts: dict[RunScale, tuple[Path, Recipe]] = {}
    for folder in folders:
        run = RunFolder(folder)
        recipe = run.recipe()
        if (fault := next(faults(run), None)) is not None:
            raise InputError(f"{fault}; to leave the run out, move it to another folder")
        if changed_at := changed_values(run):
            raise InputError(
                f"{folder} was trained with {changed_at[0]}, because --rewind-to changed its recipe; move it to "
                "another folder, and train a run with one value"
            )
        scale = RunScale(recipe.model.d_model, recipe.model.n_layers, recipe.batch.tokens, recipe.data.tokens)
        first, other = firsts.setdefault(scale, (folder, recipe))
        if changed := [change for change in changes_of(other, recipe) if change[0] not in free]:
            key, theirs, own = changed[0]
            raise InputError(
                f"{key} is {theirs} in {first} and {own} in {folder}, but runs of one size may differ only in "
                f"{' and '.join(free)}; move one of the two runs to another folder"
            )
        found.append((scale, recipe, run))
    texts = {text: run.path for *_, run in found if (text := run.text()) is not None}
    if len(texts) > 1:
        several = " and ".join(map(str, texts.values()))
        raise InputError(f"{several} were trained on different texts; give runs on one text and with one tokenizer")
    return found


# Parts of a recipe that may differ between sizes, by dotted path. All other values must be equal.
_FREE_BETWEEN_SIZES = {
    *("name", "why", "layout", "tuning", "batch", "precision", "stability", "evaluation", "average"),
    *("data.source", "data.tokenizer", "data.tokens", "data.seed", "data.corrupt_share", "schedule.warmup_tokens"),
    *(f"model.{size}" for size in ("n_layers", "d_model", "n_heads", "n_kv_heads", "d_head", "d_attention", "d_ff")),
    *("model.experts.d_expert", "scaling.token_exponent_interval"),
}


def _require_one_recipe(runs: Sequence[tuple[RunScale, Recipe, RunFolder]], path: str) -> None:
    """Raise InputError unless the recipes of all sizes could come from one recipe by ``leaven transfer``.

    Otherwise the number at ``path``, such as the lr, is converted in different ways, or other values than the size
    change its best value.
    """
    firsts: dict[RunScale, tuple[Recipe, Path]] = {}
    for scale, recipe, run in sorted(runs, key=lambda each: astuple(each[0])):
        firsts.setdefault(scale, (recipe, run.path))
    (one, folder), *others = firsts.values()
    for other, its_folder in others:
        changes = differing(_kept_values(one, path), _kept_values(other, path))
        if changes and not path.startswith("scaling."):
            recipes = [recipe for recipe, _ in firsts.values()]
            if any(all(_scaled_alike(each, recipe) for recipe in recipes) for each in recipes):
                changes = [change for change in changes if not change[0].startswith("scaling.")]
        if changes:
            key, theirs, own = changes[0]
            raise InputError(
                f"{key} is {theirs} in {folder} and {own} in {its_folder}, so {path} cannot be compared between the "
                "two; make the recipes of all sizes from one recipe with leaven transfer, or move the runs of one "
                "size to another folder"
            )


def _kept_values(recipe: Recipe, swept: str) -> dict[str, Any]:
    """Return the values of a recipe that must be equal at all sizes, by path. They include those of its base."""
    values = flatten(recipe.model_dump() | {"scaling": _whole_scaling(recipe)})
    values |= {"data.weights": recipe.data.proportions, "start.weights": recipe.start.weights is not None}
    return {
        path: value
        for path, value in values.items()
        if path != swept and not any(f"{path}.".startswith(f"{free}.") for free in _FREE_BETWEEN_SIZES)
    }


def _whole_scaling(recipe: Recipe) -> dict[str, Any]:
    """Return the table [scaling] of a recipe with all sizes of its base."""
    shape, base = recipe.base_shape, recipe.base
    sizes = {"width": base.width, "depth": base.depth, "batch_tokens": base.batch_tokens, "tokens": base.tokens}
    sizes |= {"d_ff": shape.d_ff, "d_head": shape.d_head, "n_kv_heads": shape.n_kv_heads}
    return recipe.scaling.model_dump() | {"base": sizes}


def _scaled_alike(one: Recipe, other: Recipe) -> bool:
    """Return whether rule and base of ``one`` give ``other`` the values that it has.

    This is so with another base if the rule changes nothing between the two bases.
    """
    try:
        moved = other.replace({"scaling": _whole_scaling(one)})
    except ValueError:  # this base does not fit the model
        return False
    tables = [parameter_table(recipe) for recipe in (other, moved)]
    own, theirs = [(table.rows, table.attention_scale, table.beta2, table.router_losses) for table in tables]
    return own == theirs


def _rows_of_own_runs(folders: Sequence[Path], value: str) -> list[LoggedRow]:
    known = Recipe.model_fields["hyperparameters"].annotation
    path = value if "." in value or value not in getattr(known, "model_fields", {}) else f"hyperparameters.{value}"
    runs = _read_own_runs(folders, path, "data.seed")
    _require_one_recipe(runs, path)
    scales = [astuple(scale) for scale, _, _ in runs]
    varied = [axis for axis, values in zip(AXES, zip(*scales, strict=True), strict=True) if len(set(values)) > 1]
    rows = []
    for scale, recipe, run in runs:
        found = flatten(recipe.model_dump()).get(path)
        if not isinstance(found, int | float):
            raise InputError(f"--value {value}: {path} is not a number in the recipe of {run.path}; give e.g. lr")
        columns = {value: found, "seed": recipe.data.seed, "loss": _final_loss(run)}
        rows.append(LoggedRow(str(run.path), columns | {axis: getattr(scale, axis) for axis in varied or ["width"]}))
    return rows


def _final_loss(run: RunFolder) -> float:
    """Return the final validation loss, or NaN if the run diverged. Raise InputError if it has not finished."""
    if (finish := run.finish()) is not None:
        return math.nan if finish["loss"] is None else float(finish["loss"])
    last = (run.events() or [{"event": None}])[-1]
    if last["event"] == "stop" and last["why"] != "interrupted":
        return math.nan
    raise InputError(f"the run in {run.path} has not finished; resume it, or move it to another folder")


def _curves_of_own_runs(folders: Sequence[Path]) -> dict[str, list[Points]]:
    found: dict[RunScale, list[Points]] = {}
    seen: dict[Hashable, str] = {}
    for scale, recipe, run in _read_own_runs(folders, "data.seed"):
        _require_new(seen, (scale, recipe.data.seed), str(run.path), "size and seed")
        if run.finish() is None:
            _final_loss(run)  # raises InputError if the run was interrupted
            raise InputError(f"the run in {run.path} diverged, so its curve is cut; move it to another folder")
        lines = [(line["tokens"], line["loss"]) for line in run.metrics()]
        found.setdefault(scale, []).append([(at, math.nan if loss is None else loss) for at, loss in lines])
    scales = sorted(found, key=astuple)
    varied = [axis for axis in AXES if len({getattr(scale, axis) for scale in scales}) > 1]
    axes: Sequence[str] = [axis for axis in varied if axis in ("width", "depth")]
    if len({_scale_name(scale, axes) for scale in scales}) < len(scales):
        axes = varied
    return {_scale_name(scale, axes or ["width"]): found[scale] for scale in scales}
