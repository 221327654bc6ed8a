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
from leaven.recipe.recipe import Recipe
from leaven.training.run_folder import RunFolder, changes_of
from leaven.verification.collapse import Points
from leaven.verification.model_instance import RunScale
from leaven.verification.optimum import LossGrid
from leaven.verification.sweep import AXES, SWEPT, SweptValue, compare

SUFFIXES = (".csv", ".jsonl")
TIMES = ("tokens", "step")  # columns with the progress of a run; the first that has values is used
LARGEST_LOSS = 1e6  # a run with a larger loss has diverged


@dataclass(frozen=True)
class LoggedRow:
    """A row of a file."""

    place: str  # file and row number, for messages
    values: Mapping[str, Any]  # by column

    def has(self, column: str) -> bool:
        return self.values.get(column) not in (None, "")

    def number(self, column: str) -> float:
        """Return a number of the row, which may be NaN or infinite.

        Raises:
            InputError: if the column is missing or empty, or contains no number.
        """
        if not self.has(column):
            raise InputError(f"{self.place} has no {column}; write a number, or remove the row")
        value = self.values[column]
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

    def loss(self) -> float:
        """Return the loss, which is NaN if the run has diverged."""
        loss = self.number("loss")
        return loss if abs(loss) <= LARGEST_LOSS else math.nan

    def seed(self) -> float | str | None:
        """Return the seed, or None if the row has none or NaN. 0 and 0.0 are the same seed."""
        value = self.values.get("seed")
        try:
            return None if value in (None, "") or math.isnan(float(value)) else float(value)
        except (TypeError, ValueError, OverflowError):
            return str(value)


def data_files(path: Path) -> list[Path]:
    """Return the CSV and JSON lines files of a folder and its subfolders, or the file itself.

    Raises:
        InputError: if there is no such file.
    """
    if not path.exists():
        raise InputError(f"{path}: no such file or folder")
    files = (
        sorted(file for file in path.rglob("*") if file.suffix.lower() in SUFFIXES and file.is_file())
        if path.is_dir()
        else [path]
    )
    if not files:
        raise InputError(f"{path} has no file that ends in {' or '.join(SUFFIXES)}; give a folder with logged runs")
    return files


def read_rows(path: Path) -> list[LoggedRow]:
    """Return the rows of a file, with columns in lower case. Rows are counted from 1, without the header of a CSV.

    Raises:
        InputError: if the file is no text or has no rows, or a row has the wrong form.
    """
    try:
        if path.suffix.lower() == ".jsonl":
            read = storage.read_json_lines(path)
            if read.damaged:
                raise InputError(f"{path}: line {read.damaged[0]} is not a JSON object; correct or remove it")
            found: list[dict[str, Any]] = read.documents
            headers: Sequence[Iterable[str]] = found
        else:
            with path.open(encoding="utf-8-sig", newline="") as file:
                reader = csv.DictReader(file, skipinitialspace=True)
                found, headers = list(reader), [reader.fieldnames or ()]
    except (UnicodeDecodeError, csv.Error):
        raise InputError(f"{path} is not a CSV file; give a text file with a header and commas") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    if not found:
        raise InputError(f"{path} has no rows; give one row a run, below a header if it is CSV")
    for header in headers:
        names = [column.strip().lower() for column in header]
        if twice := [name for name in names if name and names.count(name) > 1]:
            raise InputError(f"{path} has two columns {twice[0]}; rename or remove one")
    rows = [
        # Cells without a column are at None.
        LoggedRow(f"{path}: row {number}", {column and column.strip().lower(): line[column] for column in line})
        for number, line in enumerate(found, start=1)
    ]
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
    this size, except the best value of the smallest size: the check fails if that diverges at a larger size.

    Raises:
        InputError: if a column is missing or contains no numbers, if there are fewer than two sizes or, at a size,
            fewer than three values, or if the values have different numbers of runs.
    """
    value = value.strip().lower()
    if value in ("loss", "seed"):
        raise InputError(f"--value {value}: give the column of the swept hyperparameter, e.g. lr")
    if _own_runs(path):
        raise InputError(
            f"{path} has run folders of leaven, and a check of transfer reads rows; write a CSV file with the size, "
            f"{value} and final loss of each run"
        )
    rows = [row for file in data_files(path) for row in read_rows(file)]
    columns = dict.fromkeys(column for row in rows for column in row.values)
    axes = [axis for axis in AXES if axis in columns and axis != value]
    for column, hint in (("loss", ""), (value, "; name the swept hyperparameter with --value COLUMN")):
        if column not in columns:
            raise InputError(f"{path} has no column {column}; its columns are {', '.join(columns)}{hint}")
    if not axes:
        raise InputError(f"{path} has no column {' or '.join(AXES)}; add the size of the runs, e.g. width")
    found: dict[RunScale, dict[float, dict[float | str, float]]] = {}
    for row in rows:
        runs = found.setdefault(scale_of(row, axes), {}).setdefault(row.above_0(value), {})
        seed = row.place if (written := row.seed()) is None else written
        if seed in runs:
            raise InputError(
                f"{row.place} repeats the size, {value} and seed of an earlier row; remove one of them, or name "
                "another swept column with --value"
            )
        runs[seed] = row.loss()
    scales = sorted(found, key=lambda scale: [getattr(scale, axis) for axis in AXES])
    names = {scale: scale_name(scale, axes) for scale in scales}
    if len(scales) < 2:
        raise InputError(f"{path} has one size only, {names[scales[0]]}; a check of transfer compares two or more")
    seeds = max(len(runs) for grid in found.values() for runs in grid.values())
    grids, left_out = _grids(path, value, found, names, seeds)
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


def _grids(
    path: Path,
    value: str,
    found: Mapping[RunScale, Mapping[float, Mapping[float | str, float]]],
    names: Mapping[RunScale, str],
    seeds: int,
) -> tuple[dict[RunScale, LossGrid], list[str]]:
    """Return the grid of each size, and the names of the values that are left out. ``found`` has the losses by size,
    value and seed.

    Raises:
        InputError: if a value has fewer runs than ``seeds``, or a size has too few values.
    """
    base = next(iter(names))
    means = {number: fmean(runs.values()) for number, runs in found[base].items()}
    best = min(means, key=lambda number: means[number] if math.isfinite(means[number]) else math.inf)
    grids, left_out = {}, []
    for scale in names:
        grid = {}
        for number, runs in found[scale].items():
            place = f"{names[scale]}, {value} {number:g}"
            if len(runs) < seeds:
                raise InputError(
                    f"{path}: {place} has {len(runs)} runs, others have {seeds}; give all values the same number"
                )
            if all(map(math.isfinite, runs.values())) or (number == best and scale != base):
                grid[number] = list(runs.values())
            else:
                left_out.append(place)
        grids[scale] = LossGrid.of(grid)
        if len(grid) < 3 and grids[scale].finite:
            raise InputError(
                f"{path}: {names[scale]} has {len(grid)} values of {value} without a diverged run, and an optimum "
                "needs three; add runs with other values"
            )
    return grids, left_out


def curves_of(path: Path) -> dict[str, list[Points]]:
    """Return the loss curves in a folder or file: for each size by name, those of all seeds, the smallest size first.

    If the folder has run folders of leaven, these are read. Otherwise, a row of a file is a point of a curve, with
    the columns tokens or step, and loss; rows without a loss are left out. The columns width, depth and batch say
    which size it is, and seed which run; the rows of a size without a seed are one run for each file. Without size
    columns, the name of the subfolder of a file or its own name says which size it is.

    Raises:
        InputError: if there are no curves, a column is missing or contains no numbers, the size of a curve is not
            clear, a run has not finished, or own runs of a size differ in more than the seed.
    """
    if folders := _own_runs(path):
        return _curves_of_own_runs(folders)
    found: dict[str, list[Points]] = {}
    sized: dict[tuple[str, ...], Path] = {}  # size columns and the first file that has them
    for file in data_files(path):
        rows = read_rows(file)
        columns = dict.fromkeys(column for row in rows for column in row.values)
        rows = [row for row in rows if row.has("loss")] or rows
        time = next((column for column in TIMES if any(row.has(column) for row in rows)), None)
        if time is None or "loss" not in columns:
            raise InputError(
                f"{file}: its columns are {', '.join(columns)}; a loss curve needs {' or '.join(TIMES)}, and loss"
            )
        axes = [axis for axis in ("width", "depth", "batch") if axis in columns]
        sized.setdefault(tuple(axes), file)
        first = file.relative_to(path).parts[0] if path.is_dir() else file.name
        own_name = file.stem if first == file.name else first
        runs: dict[tuple[str, float | str | None], list[LoggedRow]] = {}
        for row in rows:
            if row.has("loss"):
                runs.setdefault((scale_name(scale_of(row, axes), axes) or own_name, row.seed()), []).append(row)
        for (name, _), run in runs.items():
            found.setdefault(name, []).append(_points(run, time))
    if not found:
        raise InputError(f"{path} has no losses; fill the column loss")
    if len(sized) > 1:
        (some, one), (others, other), *_ = sized.items()
        raise InputError(
            f"{one} has the size columns {', '.join(some) or 'none'}, and {other} {', '.join(others) or 'none'}; "
            "give all files the same"
        )
    if len(found) > 1 and (unnamed := [name for name in found if not re.search(r"\d", name)]):
        raise InputError(f"{path}: the name {unnamed[0]} says no size; name it by a number, e.g. 50m, or add width")
    return {name: found[name] for name in sorted(found, key=_by_numbers)}


def _points(rows: Sequence[LoggedRow], time: str) -> Points:
    """Return the points of a run. A run that was resumed may repeat steps, of which the last row counts.

    Raises:
        InputError: if a time is not a number of at least 0, or the rows may be of two runs.
    """
    run: dict[float, float] = {}
    furthest = -1.0
    for row in rows:
        at = row.number(time)
        if not 0 <= at < math.inf:
            raise InputError(f"{row.place}: {time} is {at:g}; give a number of at least 0")
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


def _by_numbers(name: str) -> list[str | float]:
    """Return a key that sorts the numbers in names by their value, in which k, m and b are 1e3, 1e6 and 1e9."""
    texts = re.split(r"(\d+(?:\.\d+)?(?:e\d+)?)(?:([kmb])(?![a-z]))?", name.lower())
    factors = {"k": 1e3, "m": 1e6, "b": 1e9}
    numbers = [float(number) * factors.get(unit, 1.0) for number, unit in zip(texts[1::3], texts[2::3], strict=True)]
    return [part for pair in zip(texts[::3], [*numbers, 0.0], strict=True) for part in pair]


def _own_runs(path: Path) -> list[Path]:
    """Return the run folders of leaven in a folder."""
    recipes = path.rglob("recipe.toml") if path.is_dir() else ()
    return sorted(file.parent for file in recipes if (file.parent / "metrics.jsonl").exists())


def _curves_of_own_runs(folders: Sequence[Path]) -> dict[str, list[Points]]:
    found: dict[RunScale, list[Points]] = {}
    firsts: dict[RunScale, tuple[Path, Recipe]] = {}
    for folder in folders:
        run = RunFolder(folder)
        if run.finish() is None:
            raise InputError(f"the run in {folder} has not finished; resume it, or remove it from the folder")
        recipe = run.recipe()
        scale = RunScale(recipe.model.d_model, recipe.model.n_layers, recipe.batch.tokens, recipe.data.tokens)
        first, other = firsts.setdefault(scale, (folder, recipe))
        if changed := [change for change in changes_of(other, recipe) if change[0] != "data.seed"]:
            key, theirs, own = changed[0]
            raise InputError(
                f"{key} is {theirs} in {first} and {own} in {folder}; runs of one size may differ in data.seed "
                "alone; move one of them to another folder"
            )
        lines = [(line["tokens"], line["loss"]) for line in run.metrics()]
        found.setdefault(scale, []).append([(at, math.nan if loss is None else loss) for at, loss in lines])
    scales = sorted(found, key=astuple)
    varied = [axis for axis in AXES if len({getattr(scale, axis) for scale in scales}) > 1]
    axes: Sequence[str] = [axis for axis in varied if axis in ("width", "depth")]
    if len({scale_name(scale, axes) for scale in scales}) < len(scales):
        axes = varied
    return {scale_name(scale, axes or ["width"]): found[scale] for scale in scales}
