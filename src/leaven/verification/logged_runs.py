"""Runs the checks transfer and collapse on the logs of finished runs of any program, including leaven.

The logs are read by ``logged_rows.py``.
"""

import math
import re
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

from leaven.documents.checks import CheckDocument
from leaven.errors import InputError
from leaven.recipe.recipe import Recipe, differing, flatten
from leaven.scaling.table import parameter_table
from leaven.scaling.transfer import FREE_FIELDS, MINOR_FIELDS
from leaven.training.integrity import faults
from leaven.training.rewind import changed_values
from leaven.training.run_folder import RunFolder, changes_of
from leaven.training.run_logs import OF_NAN, is_another_loss
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
CURVE_COLUMNS = {"width", "depth", "batch", "seed"}  # columns that distinguish loss curves
# Columns with the progress of a run, such as _step of W&B; the check transfer takes tokens for a size
PROGRESS = re.compile(
    r"(train(er)?[/_.])?_?(global_?|train_?|training_)?(step|iter|iteration|epoch|update)s?|it"
    r"|((consumed|seen|processed)_(train_)?)(tokens|samples)|(tokens|samples)_(consumed|seen|processed)"
)
# Columns that may name the run
RUN_NAMES = {f"{run}{end}" for run in ("run", "trial", "experiment") for end in ("", "_id", " id", "_name", " name")}
RUN_NAMES |= {"name", "id"}
# First words of the column "state" in tables of W&B, Optuna and Slurm
UNFINISHED = {"crashed", "failed", "killed", "running", "preempted", "preempting"}
UNFINISHED |= {"pruned", "fail", "timeout", "cancelled", "out_of_memory", "node_fail"}
FINISHED = {"finished", "complete", "completed"}
MOST_LENGTHS = 20  # the most steps or tokens for which rows with equal other columns are runs, and no loss curve
LEAST_SHARED = 4  # the least number of equal steps that two loss curves have
LEAST_FALLING = 0.75  # the least share of pairs of points of loss curves whose loss is lower at the later step


def _scale_of(row: LoggedRow, axes: Iterable[str]) -> RunScale:
    """Return the scale of a logged run from the columns ``axes`` of its row. Axes without a column are 1.

    Batch and tokens are absolute, unlike in the scales of a model family. Raise InputError if width or depth is not
    a whole number, or is too large.
    """
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
    logs = RunLogs.at(path, loss, {*AXES, value.strip().lower(), "seed"})
    value = value.strip() if logs.own else value.strip().lower()
    found, axes, columns, unfinished = _runs_by_size(path, logs, value, loss)
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
        "unfinished": unfinished,
    }
    return compare("transfer", str(path), swept, grids, names=names, ruled={}, settings=settings)


def _runs_by_size(
    path: Path, logs: RunLogs, value: str, loss: str
) -> tuple[dict[RunScale, dict[float, dict[Hashable, float]]], list[ScaleAxis], list[str], list[str]]:
    """Return the losses by size, value and seed, and three lists.

    The lists are the columns that give the size, the names of all columns, and the rows of unfinished runs.
    """
    if value.lower() in ("loss", "seed"):
        raise InputError(f"--value {value}: give the column of the swept hyperparameter, e.g. lr")
    used = {*AXES, value, "seed"}
    rows = _rows_of_own_runs(logs.own, value) if logs.own else _rows_of_other_runs(path, logs, value, loss, used)
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
            hint = _one_folder(row, first, loss) or "keep one of them, such as the last point of a curve"
            raise InputError(f"{twice}; {hint}, or name another swept column with --value")
    if not logs.own:
        _refuse_points(rows, axes, value)
    losses = {
        scale: {number: {seed: row.loss() for seed, row in runs.items()} for number, runs in values.items()}
        for scale, values in found.items()
    }
    for values in found.values():
        for runs in values.values():
            first = next(iter(runs.values()))
            _refuse_one_run([*runs.values()], _numbers_of(first, [*axes, value]), path, loss)
        _refuse_copies(runs.values() for runs in values.values())
    unfinished = [] if logs.own else _unfinished(rows, axes, value)
    return losses, axes, [*columns, *unused_numbers(logs.others, path, used)], unfinished


def _rows_of_other_runs(path: Path, logs: RunLogs, value: str, loss: str, used: Collection[str]) -> list[LoggedRow]:
    """Return the rows of tables, and the last row of each run of TensorBoard or W&B.

    Raise InputError if two such runs are copies, or if one is shorter than others of its size.
    """
    rows, logged, curves = list[LoggedRow](), list[LoggedRow](), dict[Hashable, str]()
    for file in logs.others:
        found_here = rows_of(file, path, loss, used)
        if is_one_run(file):
            logged.append(end := _last(found_here))
            if math.isfinite(end.loss()):
                curve = hash(tuple((row.number("step"), str(row.values["loss"])) for row in found_here))
                _require_new(curves, (*map(end.values.get, (*AXES, value)), curve), str(file), "losses")
            found_here = [end]
        rows += found_here
    _refuse_unfinished(logged)
    return rows


def _refuse_points(rows: Sequence[LoggedRow], axes: Sequence[ScaleAxis], value: str) -> None:
    """Raise InputError if rows are points of loss curves. The check would take them for runs with other seeds.

    Rows may belong to one run if they have the same size, value and name, and no seed. They are points if

    - a column such as step, or tokens as part of the size, has more than :data:`MOST_LENGTHS` values; or
    - at half of the sizes and values, :data:`LEAST_SHARED` steps or more are those of another size or value, and the
      loss falls along them.
    """
    names = sorted(RUN_NAMES & {column for row in rows for column in row.values})
    others = [axis for axis in axes if axis != "tokens"]
    hint = "keep only the last row of each run; if they are runs, add the column seed or name"

    def run_of(row: LoggedRow, sizes: Sequence[ScaleAxis]) -> Hashable:
        return _scale_of(row, sizes), row.above_0(value), row.seed(), *(str(row.values.get(name)) for name in names)

    lengths: dict[Hashable, set[float]] = {}
    for row in rows if others != axes else ():
        of_run = lengths.setdefault(run_of(row, others), set())
        of_run.add(row.above_0("tokens"))
        if len(of_run) > MOST_LENGTHS:
            raise InputError(
                f"{row.place}: {_numbers_of(row, [*others, value])} has more than {MOST_LENGTHS} values of tokens, "
                f"as if they were points of one run; {hint}"
            )
    for column in dict.fromkeys(column for row in rows for column in row.values if PROGRESS.fullmatch(column)):
        if column == value:
            continue
        runs: dict[Hashable, dict[float, LoggedRow]] = {}
        for row in rows:
            at = None if row.seed() is not None else _progress(row, column)
            if at is not None and math.isfinite(row.loss()):
                runs.setdefault(run_of(row, axes), {}).setdefault(at, row)
        many = [steps for steps in runs.values() if len(steps) > MOST_LENGTHS]
        counts = Counter(frozenset(steps) for steps in runs.values())
        shared = [steps for steps in runs.values() if len(steps) >= LEAST_SHARED and counts[frozenset(steps)] > 1]
        for steps in many or (shared if 2 * len(shared) >= len(runs) and _fall(shared) else ()):
            low, high = min(steps), max(steps)
            raise InputError(
                f"{steps[low].place} and {steps[high].place} have {_numbers_of(steps[low], [*axes, value])}, and "
                f"{column} {low:g} and {high:g}, as if they were points of one run; {hint}"
            )


def _fall(runs: Iterable[Mapping[float, LoggedRow]]) -> bool:
    """Return whether the losses of runs, by step, mostly fall. Those of runs with other seeds are in any order."""
    losses = [[steps[at].loss() for at in sorted(steps)] for steps in runs]
    falls = [later < earlier for run in losses for earlier, later in combinations(run, 2)]
    return sum(falls) >= LEAST_FALLING * len(falls)


def _numbers_of(row: LoggedRow, columns: Sequence[str]) -> str:
    return ", ".join(f"{column} {row.number(column):.6g}" for column in columns)  # e.g. width 64, lr 0.001


def _progress(row: LoggedRow, column: str) -> float | None:
    """Return the number in a column such as step, or None if there is none of at least 0."""
    try:
        return at if 0 <= (at := row.number(column)) < math.inf else None
    except InputError:
        return None


def _unfinished(rows: Sequence[LoggedRow], axes: Sequence[ScaleAxis], value: str) -> list[str]:
    """Return the rows whose column state, as in a table of W&B or Optuna, says that the run has not finished.

    Diverged runs are left out. Raise InputError if such a run ends at an earlier step than the finished runs of its
    size. The size includes ``value`` if this is the batch, for example, which changes the number of steps.
    """
    sizes = [*axes, *(axis for axis in AXES if axis == value)]
    states = [  # with the first word of a state such as "CANCELLED by 1000"
        (row, str(row.values.get("state", "")).strip().lower().partition(" ")[0])
        for row in rows
        if math.isfinite(row.loss())
    ]
    unfinished = [(row, state) for row, state in states if state in UNFINISHED]
    if not unfinished:
        return []
    least: dict[tuple[RunScale, str], float] = {}  # by size and column, the earliest end of a finished run
    for row, _ in [each for each in states if each[1] in FINISHED]:
        for column in filter(PROGRESS.fullmatch, row.values):
            if (at := _progress(row, column)) is not None:
                size = (_scale_of(row, sizes), column)
                least[size] = min(at, least.get(size, at))
    for row, state in unfinished:
        for column in filter(PROGRESS.fullmatch, row.values):
            at, end = _progress(row, column), least.get((_scale_of(row, sizes), column))
            if at is not None and end is not None and at < end:
                raise InputError(
                    f"{row.place}: this run has {column} {at:g} and the state {state}, and finished runs of its size "
                    f"have {end:g}; write nan as its loss if it diverged, or else finish or remove it"
                )
    names = [f"{row.place} ({state})" for row, state in unfinished]
    return names if len(names) < 6 else [*names[:5], f"{len(names) - 5} more"]


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


def _one_folder(row: LoggedRow, other: LoggedRow, loss: str) -> str:
    """Return a hint for two folders of TensorBoard beside each other, such as train and val. Otherwise return ""."""
    folders = [Path(str(each.source)) for each in (row, other)]
    if folders[0].parent != folders[1].parent or not all(folder.is_dir() for folder in folders):
        return ""
    return "" if re.search(r"\d", folders[0].name) else f"read one of them with --loss {folders[0].name}/{loss}"


def _refuse_one_run(runs: Sequence[LoggedRow], what: str, root: Path, loss: str) -> None:
    """Raise InputError if two logs of the same size and value seem to be one run, although they would be two seeds.

    This holds for two formats, such as W&B and TensorBoard, if one of the logs has no seed. It also holds for two
    folders of TensorBoard without a seed whose paths below ``root`` have the same names with a number, such as
    width64-lr0.01/train and width64-lr0.01/val. ``what`` is the size and value for the message.
    """
    formats: dict[str, LoggedRow] = {}
    numbered: dict[Hashable, LoggedRow] = {}
    for row in [row for row in runs if row.source is not None]:
        file = Path(str(row.source))
        kind = "TensorBoard" if file.is_dir() else "W&B" if is_one_run(file) else "a table"
        formats.setdefault(kind, row)
        for other_kind, other in formats.items():
            if other_kind != kind and None in (row.seed(), other.seed()):
                raise InputError(
                    f"{other.place} ({other_kind}) and {row.place} ({kind}) are both of {what}, as if they were one "
                    "run; move one of the two elsewhere, or if they are two runs, give both a seed"
                )
        if kind != "TensorBoard" or row.seed() is not None:
            continue
        parts = [part for part in file.relative_to(root).parts if re.search(r"\d", part)]
        if (other := numbered.setdefault(tuple(parts), row)) is not row:
            hint = _one_folder(row, other, loss) or "move one of them elsewhere"
            raise InputError(
                f"{other.source} and {file} are both of {what}, and differ only in names without a number, as if "
                f"they were one run; {hint}, or if they are two runs, add seed0 and seed1 to the names"
            )


def _refuse_unfinished(ends: Sequence[LoggedRow]) -> None:
    """Raise InputError if a run that has not diverged ends at an earlier step than another run of the same size.

    ``ends`` has the last row of each run. The size includes the batch and the tokens.
    """
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
    logs = RunLogs.at(path, loss, CURVE_COLUMNS)
    curves, unused = _curves(path, logs, loss)
    settings = {"rule": None, "columns not used": unused, "files not read": logs.unread}
    return collapse(str(path), curves, irreducible, settings)


def curves_of(path: Path, loss: str = "loss") -> dict[str, list[Points]]:
    """Return the loss curves of all runs in a folder or file. The keys name the sizes, the smallest first.

    ``loss`` is the name of a column; rows without a loss are left out. docs/concepts/checks.md describes the
    files. Raise InputError if the runs cannot be used, or if the size of a curve is unclear.
    """
    return _curves(path, RunLogs.at(path, loss, CURVE_COLUMNS), loss)[0]


def _curves(  # noqa: PLR0912 (one branch for each way in which curves cannot be compared)
    path: Path, logs: RunLogs, loss: str
) -> tuple[dict[str, list[Points]], list[str]]:
    """Return (loss curves by size, names of unused data). Raise InputError as :func:`curves_of`.

    The unused data are columns, and numbers in the paths of runs, that the check does not use.
    """
    if logs.own:
        return _curves_of_own_runs(logs.own), []
    used = CURVE_COLUMNS
    unused = set[str]()
    found: dict[str, list[Points]] = {}
    sized: dict[tuple[str, ...], Path] = {}  # size columns and the first file that has them
    seen: dict[Hashable, str] = {}  # size and seed, or the points of a curve, and where they are
    firsts: dict[str, list[LoggedRow]] = {}  # the first row of each curve, by size
    for file in logs.others:
        rows = rows_of(file, path, loss, used)
        columns = dict.fromkeys(column for row in rows for column in row.values)
        unused |= columns.keys() - {*used, *TIMES, "loss", loss.lower()}
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
            runs.setdefault((_scale_name(_scale_of(row, axes), axes) or own_name, row.seed()), []).append(row)
        for (name, seed), run in runs.items():
            if seed is not None:
                _require_new(seen, (name, seed), str(file), "size and seed")
            found.setdefault(name, []).append(points := _points(run, time))
            firsts.setdefault(name, []).append(run[0])
            if all(math.isfinite(value) for _, value in points):
                _require_new(seen, tuple(points), run[0].place if len(runs) > 1 else str(file), "losses")
        if len(rows) < len(every):
            _refuse_missing_losses(every, axes, time)
    if len(sized) > 1:
        (some, one), (others, other), *_ = sized.items()
        raise InputError(
            f"{one} has the size columns {', '.join(some) or 'none'}, and {other} {', '.join(others) or 'none'}; "
            "give all files the same size columns"
        )
    if len(found) > 1 and (unnamed := [name for name in found if not re.search(r"\d", name)]):
        raise InputError(
            f"{path}: the name {unnamed[0]} has no number for the size; rename it, e.g. 50m, or add a column width"
        )
    for name, rows in firsts.items():
        _refuse_one_run(rows, name, path, loss)
    if any(sized):  # else the names of files are the sizes
        unused.update(unused_numbers(logs.others, path, used))
    return {name: found[name] for name in sorted(found, key=by_numbers)}, sorted(unused)


def _refuse_missing_losses(rows: Sequence[LoggedRow], axes: Iterable[str], time: str) -> None:
    """Raise InputError if losses of a run may have been NaN and were written as empty cells or null, as by pandas.

    Without this error, the curve would end at the last finite loss, as if the run had not diverged. The error is
    raised if a run has more rows without a loss at its end than lie between any two of its losses, or if it has no
    loss at all. Rows of another kind, such as evaluations, do not count.
    """
    runs: dict[tuple[RunScale, float | str | None], list[LoggedRow]] = {}
    for row in rows:
        with suppress(InputError):  # for a row without a loss, which may be of another kind
            if row.number(time) >= 0:
                runs.setdefault((_scale_of(row, axes), row.seed()), []).append(row)
    everywhere = _filled_columns(row for row in rows if row.has("loss"))
    with_loss = {scale for (scale, _), run in runs.items() if any(row.has("loss") for row in run)}
    for (scale, seed), run in runs.items():
        losses = [number for number, row in enumerate(run) if row.has("loss")]
        if not losses and seed is None and scale in with_loss:
            continue
        known = _filled_columns(run[number] for number in losses) if losses else everywhere
        last = run[losses[-1]].number(time) if losses else -1.0
        missing = [
            row
            for row in run[losses[-1] + 1 if losses else 0 :]
            if row.number(time) > last
            and "loss" in row.values
            and all(name in known or OF_NAN.search(name) for name in _filled_columns([row]))
        ]
        gap = max(end - start - 1 for start, end in pairwise([-1, *losses])) if losses else 1
        diverged = not all(math.isfinite(run[number].loss()) for number in losses)
        if len(missing) <= gap or diverged or _has_another_loss(missing[-1]):
            continue
        size = " ".join(
            [
                _scale_name(scale, axes),
                *([f"seed {seed:g}" if isinstance(seed, float) else f"seed {seed}"] if seed is not None else []),
            ]
        )
        what = f"a run{f' of {size}' if size else ''} has no loss from {time} {missing[0].number(time):g} on"
        raise InputError(
            f"{missing[0].place}: {what}, in {len(missing)} rows; write nan as the loss if the run diverged there, "
            "or remove these rows"
        )


def _filled_columns(rows: Iterable[LoggedRow]) -> set[str]:
    """Return the names of the columns that have a value in any of the rows."""
    return {name for row in rows for name in row.values if row.has(name)}


def _has_another_loss(row: LoggedRow) -> bool:
    """Return whether a row has a finite loss in another column, such as val_loss, so that its loss is not NaN."""
    for name, value in (*row.values.items(), ("loss", row.other_loss)):
        with suppress(ValueError):
            if value not in (None, "") and is_another_loss(name, float(str(value))):
                return True
    return False


def _require_new(seen: dict[Hashable, str], run: Hashable, place: str, what: str) -> None:
    """Record that ``run`` is at ``place``. Raise InputError if ``seen`` already has ``run`` at another place.

    ``run`` is what identifies a run, such as its size and seed. ``what`` is the word for it in the message. So a copy
    of a run cannot count as another seed.
    """
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
    *(f"model.{field}" for field in FREE_FIELDS),
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
    changes = [
        (its_folder, change)
        for other, its_folder in others
        for change in differing(_kept_values(one, path), _kept_values(other, path))
    ]
    if not path.startswith("scaling.") and any(change[0].startswith("scaling.") for _, change in changes):
        recipes = [recipe for recipe, _ in firsts.values()]
        if any(all(_scaled_alike(each, recipe) for recipe in recipes) for each in recipes):
            changes = [(of, change) for of, change in changes if not change[0].startswith("scaling.")]
    if changes:
        its_folder, (key, theirs, own) = changes[0]
        of_target = not key.startswith(("hyperparameters.", "model.", "scaling."))
        like = f" (with --like, the target keeps its {key})" if of_target else ""
        raise InputError(
            f"{key} is {theirs} in {folder} and {own} in {its_folder}, so {path} cannot be compared between the "
            f"two; make the recipes of all sizes from one recipe with leaven transfer{like}, or move the runs of one "
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
