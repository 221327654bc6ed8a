"""Read runs that somebody has trained with any program, from CSV and JSON lines, and check whether they transfer.

A row of a file is one run (for the check transfer) or one point of a loss curve (for the check collapse). Its columns
width, depth, batch and tokens say how large the run is.
"""

import csv
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from leaven import storage
from leaven.documents.checks import CheckDocument
from leaven.errors import InputError
from leaven.training.run_folder import RunFolder
from leaven.verification.collapse import Points
from leaven.verification.model_instance import RunScale
from leaven.verification.optimum import LossGrid
from leaven.verification.sweep import AXES, SWEPT, SweptValue, compare

SUFFIXES = (".csv", ".jsonl")
TIMES = ("tokens", "step")  # columns with the progress of a run; the first that exists is used


@dataclass(frozen=True)
class LoggedRow:
    """A row of a file."""

    place: str  # file and row number, for messages
    values: Mapping[str, Any]  # by column

    def number(self, column: str) -> float:
        """Return a number of the row, which may be NaN or infinite.

        Raises:
            InputError: if the column is missing or empty, or contains no number.
        """
        value = self.values.get(column)
        if value is None or value == "":
            raise InputError(f"{self.place} has no {column}; write a number, or remove the row")
        try:
            if isinstance(value, bool):
                raise ValueError
            return float(value)
        except (TypeError, ValueError):
            hint = "; the loss of a diverged run is nan" if column == "loss" else ""
            raise InputError(f"{self.place}: {column} is {value!r}, which is not a number{hint}") from None

    def above_0(self, column: str) -> float:
        """Return a number above 0.

        Raises:
            InputError: as :meth:`number`, or if the number is not above 0, or infinite.
        """
        value = self.number(column)
        if not 0 < value < math.inf:
            raise InputError(f"{self.place}: {column} is {value:g}; give a number above 0")
        return value


def data_files(path: Path) -> list[Path]:
    """Return the CSV and JSON lines files of a folder and its subfolders, or the file itself.

    Raises:
        InputError: if there is no such file.
    """
    if not path.exists():
        raise InputError(f"{path}: no such file or folder")
    files = (
        sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES and file.is_file())
        if path.is_dir()
        else [path]
    )
    if not files:
        raise InputError(f"{path} has no file that ends in {' or '.join(SUFFIXES)}; give a folder with logged runs")
    return files


def read_rows(path: Path) -> list[LoggedRow]:
    """Return the rows of a file. Rows are counted from 1, without the header of a CSV file.

    Raises:
        InputError: if the file is no text or has no rows, or a row has the wrong form.
    """
    if path.suffix == ".jsonl":
        read = storage.read_json_lines(path)
        if read.damaged:
            raise InputError(f"{path}: line {read.damaged[0]} is not a JSON object; correct or remove it")
        found: list[dict[str, Any]] = read.documents
    else:
        try:
            with path.open(encoding="utf-8-sig", newline="") as file:
                found = list(csv.DictReader(file, skipinitialspace=True))
        except (UnicodeDecodeError, csv.Error):
            raise InputError(f"{path} is not a CSV file; give a text file with a header and commas") from None
    if not found:
        raise InputError(f"{path} has no rows; give one row a run, below a header if it is CSV")
    rows = [LoggedRow(f"{path}: row {number}", values) for number, values in enumerate(found, start=1)]
    for row in rows:
        if len(row.values) == 1 and re.search("[;\t]", next(iter(row.values)) or ""):
            raise InputError(f"{path}: separate the columns by commas")
        if None in row.values:
            raise InputError(f"{row.place} has more cells than the header; quote cells that contain a comma")
    return rows


def scale_of(row: LoggedRow, axes: Iterable[str]) -> RunScale:
    """Return the scale of a row. Its batch and tokens are those of the row, and not ratios."""
    values = {axis: row.above_0(axis) for axis in axes}
    for axis in {"width", "depth"} & values.keys():
        if values[axis] % 1:
            raise InputError(f"{row.place}: {axis} is {values[axis]:g}; give a whole number")
        values[axis] = int(values[axis])
    return RunScale(**{"width": 1, "depth": 1} | values)  # type: ignore[arg-type]


def scale_name(scale: RunScale, axes: Iterable[str]) -> str:
    """Return a name such as ``width 64 depth 4``."""
    return " ".join(f"{axis} {getattr(scale, axis):.15g}" for axis in axes)


def transfer_of_runs(path: Path, value: str = "lr") -> CheckDocument:
    """Check whether the best value of a hyperparameter is the same at all sizes of the runs in a file or folder.

    A row is a run. Its columns are loss (nats per token), ``value``, one or more of width, depth, batch and tokens,
    and maybe seed. A loss that is not finite means that the run diverged. A value with a diverged run is left out at
    this size.

    Raises:
        InputError: if a column is missing or contains no numbers, if there are fewer than two sizes or, at a size,
            fewer than three values, or if the values have different numbers of runs.
    """
    rows = [row for file in data_files(path) for row in read_rows(file)]
    columns = dict.fromkeys(column for row in rows for column in row.values)
    axes = [axis for axis in AXES if axis in columns and axis != value]
    for column, hint in (("loss", ""), (value, "; name the swept hyperparameter with --value COLUMN")):
        if column not in columns:
            raise InputError(f"{path} has no column {column}; its columns are {', '.join(columns)}{hint}")
    if not axes:
        raise InputError(f"{path} has no column {' or '.join(AXES)}; add the size of the runs, e.g. width")
    found: dict[RunScale, dict[float, dict[str, float]]] = {}
    for row in rows:
        runs = found.setdefault(scale_of(row, axes), {}).setdefault(row.above_0(value), {})
        seed = str(row.values.get("seed", len(runs)))
        if seed in runs:
            raise InputError(f"{row.place} repeats the size, {value} and seed of an earlier row; remove one of them")
        runs[seed] = row.number("loss")
    scales = sorted(found, key=lambda scale: [getattr(scale, axis) for axis in AXES])
    names = {scale: scale_name(scale, axes) for scale in scales}
    if len(scales) < 2:
        raise InputError(f"{path} has one size only, {names[scales[0]]}; a check of transfer compares two or more")
    seeds = max(len(runs) for grid in found.values() for runs in grid.values())
    grids, left_out = {}, []
    for scale in scales:
        grid = {}
        for number, runs in found[scale].items():
            place = f"{names[scale]}, {value} {number:g}"
            if len(runs) < seeds:
                raise InputError(
                    f"{path}: {place} has {len(runs)} runs, others have {seeds}; give all values the same number"
                )
            if all(map(math.isfinite, runs.values())):
                grid[number] = list(runs.values())
            else:
                left_out.append(place)
        if len(grid) < 3:
            raise InputError(
                f"{path}: {names[scale]} has {len(grid)} values of {value} without a diverged run, and an optimum "
                "needs three; add runs with other values"
            )
        grids[scale] = LossGrid.of(grid)
    _require_best_value(path, value, found, names)
    limit = next((known.shift_limit for known in SWEPT.values() if known.key == value), SWEPT["lr"].shift_limit)
    swept = SweptValue(value, f"runs with {value}", (), limit, more_seeds="more runs for each value, e.g.")
    settings = {
        "rule": None,
        "scales": list(names.values()),
        value: sorted({number for values in found.values() for number in values}),
        "unit": "as in the rows",
        "seeds": seeds,
        "left out": left_out,
        "columns not used": sorted({*columns} - {"loss", "seed", value, *axes}),
    }
    return compare("transfer", str(path), swept, grids, names=names, ruled={}, settings=settings)


def _require_best_value(
    path: Path,
    value: str,
    found: Mapping[RunScale, Mapping[float, Mapping[str, float]]],
    names: Mapping[RunScale, str],
) -> None:
    """Raise InputError if the best value of the smallest size diverged at another size. ``found`` has the losses by
    size, value and seed."""
    base, *larger = names
    means = {number: fmean(runs.values()) for number, runs in found[base].items()}
    best = min((number for number in means if math.isfinite(means[number])), key=lambda number: means[number])
    for scale in larger:
        if not all(map(math.isfinite, found[scale].get(best, {}).values())):
            raise InputError(
                f"{path}: {value} {best:g}, the best at {names[base]}, diverged at {names[scale]}, so it does not "
                "transfer; a shift cannot be measured beyond a divergence"
            )


def curves_of(path: Path) -> dict[str, list[Points]]:
    """Return the loss curves in a folder or file: for each size by name, those of all seeds, the smallest size first.

    If the folder has run folders of leaven, these are read. Otherwise, a row of a file is a point of a curve, with
    the columns tokens or step, and loss; rows without a loss are left out. The columns width, depth and batch say
    which size it is, and seed which run. Without them, each file is a run, and the name of its subfolder or its own
    name says which size it is.

    Raises:
        InputError: if there are no curves, a column is missing or contains no numbers, or a run has not finished.
    """
    recipes = path.rglob("recipe.toml") if path.is_dir() else ()
    if folders := sorted(file.parent for file in recipes if (file.parent / "metrics.jsonl").exists()):
        return _curves_of_own_runs(folders)
    found: dict[str, dict[tuple[Path, str], dict[float, float]]] = {}
    for file in data_files(path):
        rows = read_rows(file)
        columns = dict.fromkeys(column for row in rows for column in row.values)
        time = next((column for column in TIMES if column in columns), None)
        if time is None or "loss" not in columns:
            raise InputError(
                f"{file}: its columns are {', '.join(columns)}; a loss curve needs {' or '.join(TIMES)}, and loss"
            )
        axes = [axis for axis in ("width", "depth", "batch") if axis in columns]
        first = file.relative_to(path).parts[0] if path.is_dir() else file.name
        own_name = file.stem if first == file.name else first
        for row in rows:
            if row.values.get("loss") in (None, ""):
                continue
            name = scale_name(scale_of(row, axes), axes) or own_name
            run = found.setdefault(name, {}).setdefault((file, str(row.values.get("seed"))), {})
            at = row.number(time)
            if run and at == next(iter(run)):  # later steps may be repeated, by a run that was resumed
                raise InputError(
                    f"{row.place} repeats {time} {at:g}, the first of a run; write each run into a "
                    "file of its own, or add the column seed"
                )
            run[at] = row.number("loss")
    if not found:
        raise InputError(f"{path} has no losses; fill the column loss")
    return {name: [sorted(run.items()) for run in found[name].values()] for name in sorted(found, key=_by_numbers)}


def _by_numbers(name: str) -> list[str | float]:
    """Return a key that sorts the numbers in names by their value."""
    return [float(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]


def _curves_of_own_runs(folders: Sequence[Path]) -> dict[str, list[Points]]:
    found: dict[RunScale, list[Points]] = {}
    for folder in folders:
        run = RunFolder(folder)
        if run.finish() is None:
            raise InputError(f"the run in {folder} has not finished; resume it, or remove it from the folder")
        recipe = run.recipe()
        scale = RunScale(recipe.model.d_model, recipe.model.n_layers, recipe.batch.tokens, recipe.data.tokens)
        found.setdefault(scale, []).append([(line["tokens"], line["loss"]) for line in run.metrics()])
    scales = sorted(found, key=astuple)
    varied = [axis for axis in AXES if len({getattr(scale, axis) for scale in scales}) > 1]
    axes: Sequence[str] = [axis for axis in varied if axis in ("width", "depth")]
    if len({scale_name(scale, axes) for scale in scales}) < len(scales):
        axes = varied
    return {scale_name(scale, axes or ["width"]): found[scale] for scale in scales}
