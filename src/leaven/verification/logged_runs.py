"""Runs the checks transfer and collapse on the logs of finished runs of any program, including leaven.

The logs are read by ``logged_rows.py``.
"""

import math
import re
from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import astuple
from itertools import combinations, product
from pathlib import Path
from typing import Any

from leaven.documents.checks import CheckDocument
from leaven.errors import InputError
from leaven.recipe.recipe import Recipe, differing, flatten
from leaven.scaling.transfer import FREE_FIELDS, MINOR_FIELDS
from leaven.training.integrity import faults
from leaven.training.rewind import changed_values, text_left_out
from leaven.training.run_folder import RunFolder, changes_of
from leaven.verification.collapse import Points, collapse
from leaven.verification.logged_rows import TIMES, LoggedRow, RunLogs, is_one_run, size_in
from leaven.verification.model_instance import RunScale, ScaleAxis
from leaven.verification.optimum import LossGrid
from leaven.verification.sweep import AXES, SWEPT, SweptValue, compare

LARGEST_WIDTH = 10**15
CURVE_COLUMNS = {"width", "depth", "batch", "seed"}  # columns that distinguish loss curves
# Columns with the progress of a run, such as _step of W&B; the check transfer takes tokens for a size
PROGRESS = re.compile(
    r"(train(er)?[/_.])?_?(global_?|train_?|training_|num_)?(step|iter|iteration|epoch|update)s?(_num)?"
    r"|it|batch_idx|_runtime|_timestamp|wall_time"
    r"|(?![\w/]*(warmup|cooldown|decay|batch|max|best|per)_)"  # no hyperparameters and results of a run
    r"([\w/]+[_/])?(step|tokens|samples|examples)(_(consumed|seen|processed|total))?"
)
# Columns that may name the run
RUN_NAMES = {f"{run}{end}" for run in ("run", "trial", "experiment") for end in ("", "_id", " id", "_name", " name")}
RUN_NAMES |= {"name", "id"}
STATES = ("state", "status", "run_state")  # columns of W&B, Optuna, Slurm, MLflow and Ray
FINISHED = {
    "",
    "nan",
    "finished",
    "complete",
    "completed",
    "done",
    "success",
    "succeeded",
    "successful",
    "ok",
    "terminated",
}
MOST_LENGTHS = 20  # the most numbers of tokens for which rows with equal other columns are runs, and no loss curve


def _scale_of(row: LoggedRow, axes: Iterable[str]) -> RunScale:
    """Return the scale of a logged run: the values of ``row`` in the columns ``axes``, and 1 for all other axes.

    Batch and tokens are absolute here, unlike in other scales. Raise InputError if width or depth is not a whole
    number, or is too large.
    """
    values = {axis: row.above_0(axis) for axis in axes}
    for axis in {"width", "depth"} & values.keys():
        if values[axis] % 1 or values[axis] > LARGEST_WIDTH:
            limit = f"{LARGEST_WIDTH:,}"
            raise InputError(f"{row.place}: {axis} is {values[axis]:g}; give a whole number of at most {limit}")
        values[axis] = int(values[axis])
    return RunScale(**{"width": 1, "depth": 1} | values)  # type: ignore[arg-type]


def _swept(row: LoggedRow, value: str) -> float:
    """Return the swept value of a row with six digits: 0.01 in float32 is 0.0099999998."""
    return float(f"{row.above_0(value):.6g}")


def _scale_name(scale: RunScale, axes: Iterable[str]) -> str:
    return " ".join(f"{axis} {getattr(scale, axis):.15g}" for axis in axes)  # e.g. width 64 depth 4


def transfer_of_runs(path: Path, value: str = "lr", loss: str = "loss") -> CheckDocument:
    """Check whether the best value of a hyperparameter is the same at all sizes of logged runs.

    ``value`` and ``loss`` are names of columns. In run folders of leaven, ``value`` is a hyperparameter or a path in
    the recipe. docs/concepts/checks.md describes the files. Raise InputError if the runs cannot be compared.
    """
    logs = RunLogs.at(path, loss)
    logs.require_readable_names()
    value = value.strip() if logs.own else value.strip().lower()
    found, axes, columns = _runs_by_size(path, logs, value)
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
    path: Path, logs: RunLogs, value: str
) -> tuple[dict[RunScale, dict[float, dict[Hashable, float]]], list[ScaleAxis], list[str]]:
    """Return the losses ({size: {value: {seed: loss}}}), the columns that give the size, and all column names."""
    if value.lower() in ("loss", "seed"):
        raise InputError(f"--value {value}: give the column of the swept hyperparameter, e.g. lr")
    used = {*AXES, value, "seed"}
    rows = _rows_of_own_runs(logs.own, value) if logs.own else _rows_of_other_runs(logs, value, used)
    columns = dict.fromkeys(column for row in rows for column in row.values)
    axes = [axis for axis in AXES if axis in columns and axis != value]
    for column, hint in (("loss", ""), (value, "; name the swept hyperparameter with --value COLUMN")):
        if column not in columns:
            raise InputError(f"{path} has no column {column}; its columns are {', '.join(columns)}{hint}")
    if not axes:
        has = f"no column {' or '.join(AXES)}; its columns are {', '.join(columns)}"
        raise InputError(f"{path} has {has}; add a column with the size of the runs, e.g. width")
    found: dict[RunScale, dict[float, dict[Hashable, LoggedRow]]] = {}
    exact: dict[float, float] = {}  # the first of the values that are equal up to rounding
    for row in rows:
        number = exact.setdefault(_swept(row, value), row.above_0(value))
        runs = found.setdefault(_scale_of(row, axes), {}).setdefault(number, {})
        seed = row.place if (written := row.seed()) is None else written
        if (first := runs.setdefault(seed, row)) is not row:
            twice = f"{row.place} repeats the size, {value} and seed of {first.place}"
            hint = _one_folder(row, first, logs.loss) or "keep one of the two, such as the last point of a curve"
            raise InputError(f"{twice}; {hint}, or name another swept column with --value")
    if not logs.own:
        _refuse_unfinished_states(rows)
        _refuse_points(rows, axes, value)
    losses = {
        scale: {number: {seed: row.loss() for seed, row in runs.items()} for number, runs in values.items()}
        for scale, values in found.items()
    }
    for values in found.values():
        for runs in values.values():
            first = next(iter(runs.values()))
            _refuse_one_run(runs.values(), _numbers_of(first, [*axes, value]), logs.loss)
        _refuse_copies(runs.values() for runs in values.values())
    return losses, axes, [*columns, *logs.unused_numbers(used)]


def _rows_of_other_runs(logs: RunLogs, value: str, used: Collection[str]) -> list[LoggedRow]:
    """Return all rows of tables, and only the last row of each run of TensorBoard or W&B.

    Raise InputError if two TensorBoard or W&B runs are copies, or if :func:`_refuse_unfinished` does.
    """
    rows, ends, curves = list[LoggedRow](), list[LoggedRow](), dict[Hashable, str]()
    for file in logs.others:
        found_here = logs.rows(file, used)
        if is_one_run(file):
            end = found_here[-1]
            points = _points([row for row in found_here if row.has("loss")] or [end], "step")
            if all(math.isfinite(loss) for _, loss in points):
                _require_new(curves, (*map(end.values.get, (*AXES, value)), *points), str(file), "losses")
            found_here = [end]
            ends.append(end)
        rows += found_here
    _refuse_unfinished(ends)
    return rows


def _refuse_points(rows: Sequence[LoggedRow], axes: Sequence[ScaleAxis], value: str) -> None:
    """Raise InputError if rows may be points of loss curves. The check would take them for runs with other seeds.

    Rows with the same size, value and name may be points of one curve if they have no seed and differ in a column
    such as step. Rows that differ only in tokens may be points if they have more than :data:`MOST_LENGTHS` different
    numbers of tokens. Diverged runs, which end early, are left out.
    """
    names = sorted(RUN_NAMES & {column for row in rows for column in row.values})
    hint = "keep only the last row of each run; if each row is a run, add the column seed or name"
    lengths, runs = dict[Hashable, set[float]](), dict[Hashable, tuple[float, LoggedRow]]()
    others = [axis for axis in axes if axis != "tokens"]
    for row in [row for row in rows if math.isfinite(row.loss())]:
        name = _swept(row, value), row.seed(), *(str(row.values.get(name)) for name in names)
        if "tokens" in axes:
            of_run = lengths.setdefault((_scale_of(row, others), *name), set())
            of_run.add(row.above_0("tokens"))
            if len(of_run) > MOST_LENGTHS:
                raise InputError(
                    f"{row.place}: the rows with {_numbers_of(row, [*others, value])} have more than {MOST_LENGTHS} "
                    f"values of tokens, so they may be points of one run; {hint}"
                )
        for column in filter(PROGRESS.fullmatch, row.values if row.seed() is None else ()):
            if column == value or (at := _progress(row, column)) is None:
                continue
            start, first = runs.setdefault((column, _scale_of(row, axes), *name), (at, row))
            if at != start:
                raise InputError(
                    f"{first.place} and {row.place} both have {_numbers_of(row, [*axes, value])}, but {column} "
                    f"{start:g} and {at:g}, so they may be points of one run; {hint}"
                )


def _numbers_of(row: LoggedRow, columns: Sequence[str]) -> str:
    return ", ".join(f"{column} {row.number(column):.6g}" for column in columns)  # e.g. width 64, lr 0.001


def _progress(row: LoggedRow, column: str) -> float | None:
    """Return the number in a column such as step, or None if it is missing, invalid, negative or infinite."""
    try:
        return at if 0 <= (at := row.number(column)) < math.inf else None
    except InputError:
        return None


def _refuse_unfinished_states(rows: Iterable[LoggedRow]) -> None:
    for row, column in product(rows, STATES):
        state = str(row.values.get(column) or "").strip().lower()
        if state not in FINISHED and not (row.has("loss") and math.isnan(row.loss())):
            raise InputError(
                f"{row.place}: the {column} of this run is {state}; write nan as its loss if it diverged, write "
                f"finished as its {column} if it has finished, otherwise finish or remove the run"
            )


def _refuse_copies(values: Iterable[Iterable[LoggedRow]]) -> None:
    """Raise InputError if runs seem to be copies of each other, because their losses are equal.

    ``values`` has the runs at each value of the swept hyperparameter. Runs seem to be copies if at least two values
    have several runs, and each of these values has two runs with equal losses. At a single value, equal losses may be
    chance, because logs round losses. Diverged runs are ignored.
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
            f"{row.place} repeats the loss of {first.place}; at this size, every value with several runs has such "
            "repeats, so they are probably copies; remove the copies, or write losses with more digits"
        )


def _one_folder(row: LoggedRow, other: LoggedRow, loss: str) -> str:
    """Return a hint for rows of sibling TensorBoard folders such as train and val, but not seed0, or ""."""
    folders = [Path(str(each.source)) for each in (row, other)]
    if folders[0].parent != folders[1].parent or not all(folder.is_dir() for folder in folders):
        return ""
    return "" if re.search(r"\d", folders[0].name) else f"read one of them with --loss {folders[0].name}/{loss}"


def _refuse_one_run(runs: Iterable[LoggedRow], what: str, loss: str) -> None:
    """Raise InputError if two logs may be of one run, such as the TensorBoard folders train and val.

    At least one must have no seed, and one be of TensorBoard or W&B. ``what`` describes the runs in the message.
    """
    seeded_first = sorted(runs, key=lambda row: row.seed() is None)
    logs = {row.source: row for row in seeded_first if row.source is not None}
    for (file, row), (other_file, other) in combinations(logs.items(), 2):
        if None in (row.seed(), other.seed()) and (is_one_run(file) or is_one_run(other_file)):
            hint = _one_folder(other, row, loss) or "move one of them elsewhere"
            raise InputError(
                f"{row.place} and {other.place} are both logs of {what}, so they may be one run; if so, {hint}; if "
                "not, give both a seed, such as seed0 and seed1 in their names"
            )


def _refuse_unfinished(ends: Sequence[LoggedRow]) -> None:
    """Raise InputError if a run that has not diverged ends before another of its size. ``ends``: last rows."""
    furthest: dict[tuple[Any, ...], LoggedRow] = {}
    for end in sorted(ends, key=lambda row: -row.number("step")):
        last = furthest.setdefault(tuple(end.values.get(axis) for axis in AXES), end)
        if math.isfinite(end.loss()) and end.number("step") < last.number("step"):
            raise InputError(
                f"{end.place} ends at step {end.number('step'):g}, and {last.place} at {last.number('step'):g}; "
                "finish or remove the shorter run, or if it diverged, log nan as its last loss"
            )


def collapse_of_runs(path: Path, irreducible: float | None = None, loss: str = "loss") -> CheckDocument:
    """Check with :func:`collapse` whether the loss curves of logged runs are equal after normalisation.

    :func:`curves_of` explains ``path`` and ``loss``. ``irreducible`` is L0 in nats per token, by default fitted.
    """
    logs = RunLogs.at(path, loss)
    curves, unused = _curves(path, logs)
    settings = {"rule": None, "columns not used": unused, "files not read": logs.unread}
    return collapse(str(path), curves, irreducible, settings)


def curves_of(path: Path, loss: str = "loss") -> dict[str, list[Points]]:
    """Return the loss curves of all runs in a folder or file. The keys name the sizes, the smallest first.

    ``loss`` is the name of a column; rows without a loss are left out. docs/concepts/checks.md describes the
    files. Raise InputError if the runs cannot be used, or if the size of a curve is unclear.
    """
    return _curves(path, RunLogs.at(path, loss))[0]


def _curves(path: Path, logs: RunLogs) -> tuple[dict[str, list[Points]], list[str]]:
    """Return the loss curves by size, and the names of unused columns and of unused numbers in paths (``lr0.01``)."""
    if logs.own:
        return _curves_of_own_runs(logs.own), []
    unused = set[str]()
    found: dict[str, list[Points]] = {}
    sized: dict[tuple[str, ...], Path] = {}  # size columns and the first file that has them
    seen: dict[Hashable, str] = {}  # size and seed, or the points of a curve, and where they are
    firsts: dict[str, list[LoggedRow]] = {}  # the first row of each curve, by size
    order: dict[str, list[float]] = {}  # the numbers by which sizes are sorted
    for file in logs.others:
        rows = logs.rows(file, CURVE_COLUMNS)
        columns = dict.fromkeys(column for row in rows for column in row.values)
        unused |= columns.keys() - {*CURVE_COLUMNS, *TIMES, "loss", logs.loss.lower()}
        every, rows = rows, [row for row in rows if row.has("loss")] or rows
        time = next((column for column in TIMES if any(row.has(column) for row in rows)), None)
        if time is None or "loss" not in columns:
            filled = ", ".join(column for column in columns if any(row.has(column) for row in rows)) or "none"
            needs = f"a loss curve needs {' or '.join(TIMES)}, and loss"
            raise InputError(f"{file}: its columns with values are {filled}; {needs}")
        if not rows[0].has("loss"):
            raise InputError(
                f"{file} has no losses; write nan for those of a diverged run, or move the file elsewhere"
            )
        axes = [axis for axis in ("width", "depth", "batch") if axis in columns]
        sized.setdefault(tuple(axes), file)
        first = (file.relative_to(path).parts or [path.name])[0] if path.is_dir() else file.name
        own_name = file.stem if first == file.name and not file.is_dir() else first
        runs: dict[tuple[str, float | str | None], list[LoggedRow]] = {}
        for row in rows:
            scale = _scale_of(row, axes)
            name = _scale_name(scale, axes) or own_name
            order[name] = [getattr(scale, axis) for axis in axes] or [size_in(name) or 0.0]
            runs.setdefault((name, row.seed()), []).append(row)
        for (name, seed), run in runs.items():
            if seed is not None:
                _require_new(seen, (name, seed), str(file), "size and seed")
            found.setdefault(name, []).append(points := _points(run, time))
            firsts.setdefault(name, []).append(run[0])
            if all(math.isfinite(value) for _, value in points):
                _require_new(seen, tuple(points), run[0].place if len(runs) > 1 else str(file), "losses")
        _refuse_missing_losses(every, axes, time)
        # A trainer may write a state into each row, such as running. The last one of a run counts.
        states = {
            str([row.values.get(key) for key in (*axes, "seed")]): row for row in every if any(map(row.has, STATES))
        }
        _refuse_unfinished_states(states.values())
    if len(sized) > 1:
        (some, one), (others, other), *_ = sized.items()
        raise InputError(
            f"{one} has the size columns {', '.join(some) or 'none'}, and {other} {', '.join(others) or 'none'}; "
            "give all files the same size columns"
        )
    logs.require_readable_names(sized=not any(sized))
    if any(sized):  # else the names of files are the sizes
        unused.update(logs.unused_numbers(CURVE_COLUMNS))
    elif len(found) > 1 and (unnamed := [name for name in found if size_in(name) is None]):
        raise InputError(
            f"{path}: the name {unnamed[0]} must have one number, the size; rename it, e.g. to 50m, or add a column "
            "called width"
        )
    for name, rows in firsts.items():
        _refuse_one_run(rows, name, logs.loss)
    return {name: found[name] for name in sorted(found, key=lambda name: order[name])}, sorted(unused)


def _refuse_missing_losses(rows: Iterable[LoggedRow], axes: Sequence[str], time: str) -> None:
    """Raise InputError if the last row of a run has an empty loss. Ignore rows without ``time`` or a size.

    An empty loss may mean that the run diverged: pandas writes NaN as an empty cell or null.
    """
    ends = dict[Hashable, tuple[float, bool, LoggedRow]]()
    for row in rows:
        if "loss" in row.values and all(row.has(column) for column in (time, *axes)):
            end = (row.number(time), row.has("loss"), row)
            run = (_scale_of(row, axes), row.seed())
            if end[:2] >= ends.get(run, end)[:2]:
                ends[run] = end
    for _, has_loss, row in ends.values():
        if not has_loss:
            raise InputError(
                f"{row.place}: the last row of a run has no loss; write nan if the run diverged there, or else "
                "remove the rows after its last loss"
            )


def _require_new(seen: dict[Hashable, str], run: Hashable, place: str, what: str) -> None:
    """Record that ``run`` is at ``place``. Raise InputError if ``seen`` already has ``run`` at another place."""
    if (first := seen.setdefault(run, place)) != place:
        raise InputError(f"{place} repeats the {what} of {first}; remove one of the two, or move it elsewhere")


def _points(rows: Sequence[LoggedRow], time: str) -> Points:
    """Return a run's points. Raise InputError if the rows seem to come from two runs.

    A run may resume at an earlier step: of the steps 1 2 3 2 3 4, the second 2 and 3 replace the first ones. But it
    must not go back to its first step, or end below its highest step. In a table, it must go back to a step that is
    already there.
    """
    one_run = rows[0].source is not None and is_one_run(rows[0].source)
    run: dict[float, float] = {}
    furthest = -1.0
    for row in rows:
        at = row.number(time)
        if not 0 <= at < math.inf:
            raise InputError(f"{row.place}: {time} is {at:g}; give a finite number of at least 0")
        if run and at <= next(reversed(run)) and (at <= next(iter(run)) or not (one_run or at in run)):
            break
        while run and at <= next(reversed(run)):
            run.popitem()
        run[at] = row.loss()
        furthest = max(furthest, at)
    else:
        if at == furthest:
            return list(run.items())
    hint = f"write each run into its own file, with its rows sorted by {time}, or add the column seed"
    raise InputError(
        f"{row.place}: {time} {at:g} comes after {furthest:g}, so these may be two runs; "
        f"{'move the file of one of them elsewhere' if one_run else hint}"
    )


def _read_own_runs(folders: Sequence[Path], *free: str) -> list[tuple[RunScale, Recipe, RunFolder]]:
    """Return the size, recipe and folder of each run. A size includes the batch and the duration, both in tokens.

    Raise InputError if files of a run were changed or lost, if ``--rewind-to`` changed a run's recipe, if
    ``--skip-tokens`` left out text, or if the runs have different texts. Also raise it if recipes of the same size
    differ in a key that is not in ``free``.
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
                f"{folder} was trained with {changed_at[0]}, because --rewind-to changed its recipe; move the "
                "run to another folder, and train a run in which this value does not change"
            )
        if left_out := text_left_out(run):
            raise InputError(
                f"{folder} skipped {left_out}, because of --skip-tokens; move the run to another "
                "folder, and train a run on the whole text"
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
    *("name", "why", "layout", "tuning", "precision", "stability", "evaluation", "average"),
    *("batch.tokens", "batch.micro_batch", "batch.stages", "batch.ramp.start_tokens", "batch.ramp.increment_tokens"),
    "batch.ramp.over_tokens",
    *("data.source", "data.tokenizer", "data.tokens", "data.seed", "data.corrupt_share", "schedule.warmup_tokens"),
    *(f"model.{field}" for field in FREE_FIELDS),
    *("model.experts.d_expert", "scaling.token_exponent_interval"),
}


def _require_one_recipe(runs: Sequence[tuple[RunScale, Recipe, RunFolder]], path: str, what: str = "") -> None:
    """Raise InputError if ``leaven transfer`` cannot produce the recipes of all sizes from one recipe.

    The runs then differ in more than their size, so the best values at ``path``, such as the lr, cannot be compared.
    ``what`` is the message's name for the compared values, by default ``path``.
    """
    firsts: dict[RunScale, tuple[Recipe, Path]] = {}
    for scale, recipe, run in sorted(runs, key=lambda each: astuple(each[0])):
        firsts.setdefault(scale, (recipe, run.path))
    (one, folder), *others = firsts.values()
    changes = [
        (its_folder, change)
        for other, its_folder in others
        for change in differing(_kept_values(one, path), _kept_values(other, path))
        # leaven transfer drops a ramp that would begin with a whole batch.
        if not (change[0] == "batch.ramp.rule" and None in change)
    ]
    if changes:
        its_folder, (key, theirs, own) = changes[0]
        of_target = not key.startswith(("hyperparameters.", "model.", "scaling."))
        like = f" (with --like, the target keeps its {key})" if of_target else ""
        raise InputError(
            f"{key} is {theirs} in {folder} and {own} in {its_folder}, so {what or path} cannot be compared between "
            f"the two; make the recipes of all sizes from one recipe with leaven transfer{like}, or move the runs of "
            "one size to another folder"
        )


def _kept_values(recipe: Recipe, swept: str) -> dict[str, Any]:
    """Return the values, by path, that recipes of different sizes must share. The value at ``swept`` may differ."""
    values = flatten(recipe.model_dump() | {"scaling": _whole_scaling(recipe)})
    values |= {"data.weights": recipe.data.proportions, "start.weights": recipe.start.weights is not None}
    return {
        path: value
        for path, value in values.items()
        if path != swept and not any(f"{path}.".startswith(f"{free}.") for free in _FREE_BETWEEN_SIZES)
    }


def _whole_scaling(recipe: Recipe) -> dict[str, Any]:
    shape, base = recipe.base_shape, recipe.base
    sizes = {"width": base.width, "depth": base.depth, "batch_tokens": base.batch_tokens, "tokens": base.tokens}
    sizes |= {"d_ff": shape.d_ff, "d_head": shape.d_head, "n_kv_heads": shape.n_kv_heads}
    return recipe.scaling.model_dump() | {"base": sizes}


def _rows_of_own_runs(folders: Sequence[Path], value: str) -> list[LoggedRow]:
    known = Recipe.model_fields["hyperparameters"].annotation
    path = value if "." in value or value not in getattr(known, "model_fields", {}) else f"hyperparameters.{value}"
    runs = _read_own_runs(folders, path, "data.seed")
    _require_one_recipe(runs, path)
    scales = [astuple(scale) for scale, _, _ in runs]
    varied = [axis for axis, values in zip(AXES, zip(*scales, strict=True), strict=True) if len(set(values)) > 1]
    models = [recipe.model.model_dump() for _, recipe, _ in runs]
    minor = [field for field in sorted(MINOR_FIELDS) if any(model[field] != models[0][field] for model in models)]
    rows = []
    for scale, recipe, run in runs:
        found = flatten(recipe.model_dump()).get(path)
        if not isinstance(found, int | float):
            raise InputError(f"--value {value}: {path} is not a number in the recipe of {run.path}; give e.g. lr")
        columns = {value: found, "seed": recipe.data.seed, "loss": _final_loss(run)}
        columns |= {f"model.{field}": getattr(recipe.model, field) for field in minor}  # listed as not used
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
    runs = _read_own_runs(folders, "data.seed")
    _require_one_recipe(runs, "data.seed", "their curves")
    for scale, recipe, run in runs:
        _require_new(seen, (scale, recipe.data.seed), str(run.path), "size and seed")
        if run.finish() is None:
            _final_loss(run)  # raises InputError if the run was interrupted
            raise InputError(
                f"the run in {run.path} diverged, so its curve ends early; move the run to another folder"
            )
        lines = [(line["tokens"], line["loss"]) for line in run.metrics()]
        found.setdefault(scale, []).append([(at, math.nan if loss is None else loss) for at, loss in lines])
    scales = sorted(found, key=astuple)
    varied = [axis for axis in AXES if len({getattr(scale, axis) for scale in scales}) > 1]
    axes: Sequence[str] = [axis for axis in varied if axis in ("width", "depth")]
    if len({_scale_name(scale, axes) for scale in scales}) < len(scales):
        axes = varied
    return {_scale_name(scale, axes or ["width"]): found[scale] for scale in scales}
