"""Read the results of runs that any program has trained, for the checks transfer and collapse.

A row of a CSV or JSON lines file is one run (for transfer) or one point of a loss curve (for collapse). Its columns
give the size: width, depth, batch or tokens. A folder with TensorBoard event files is one run, and so is a .wandb
file. The path of such a run gives its columns: width256-lr0.004 has the width 256 and the lr 0.004.
"""

import csv
import io
import math
import os
import re
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from leaven import storage
from leaven.data.sources import OF_DISKS
from leaven.documents.checks import CheckDocument
from leaven.errors import InputError
from leaven.recipe.recipe import Recipe, flatten
from leaven.training.integrity import faults
from leaven.training.run_folder import RunFolder, changes_of
from leaven.training.run_logs import tensorboard_rows, wandb_rows
from leaven.verification.collapse import Points, collapse
from leaven.verification.model_instance import RunScale, ScaleAxis
from leaven.verification.optimum import LossGrid
from leaven.verification.sweep import AXES, SWEPT, SweptValue, compare

SUFFIXES = (".csv", ".jsonl", ".wandb")
UNREAD = re.compile(r"\.(csv|tsv|jsonl|ndjson|parquet|wandb|(json))(\.(gz|bz2|xz|zst|zip))?$", re.IGNORECASE)
EVENTS = "tfevents"  # part of the name of every TensorBoard event file
TIMES = ("tokens", "step")  # columns for the progress of a run; the first one with values is used
UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
NUMBER = r"(\d+(?:\.\d+|\.(?=e))?(?:e[+-]?\d+)?)(?:([kmbt])(?=tok|[^a-z]|$))?"  # with an optional unit
# A name and its number, as part of a path. The last group is what may be more digits of the number.
NAMED = rf"([a-z]+(?:_[a-z]+)*)[=_-]?{NUMBER}(_\d{{3}}(?![a-z\d]))?"
WANDB_ID = r"run-(\d{8}_\d{6}-)?[a-z\d]{8}(?=/|\.wandb$)"  # W&B's own names of folders and files
ONE_OR_TWO = r"\d_0[1-9]\d|\d{1,3}_(000|[1-9]\d\d)"  # such as 1_024; but in lr1_001 and width128_012, a run's number
LARGEST_LOSS = 1e6  # a run with a larger loss has diverged
LARGEST_NUMBER = 1e100  # the largest size or value of a hyperparameter; the smallest is 1 / LARGEST_NUMBER
LARGEST_WIDTH = 10**15


@dataclass(frozen=True)
class LoggedRow:
    """A row of a file, a point of a run in TensorBoard or W&B, or the result of a run of leaven."""

    place: str  # for messages: the path and, for a row of a file, its number
    values: Mapping[str, Any]  # by column name

    def has(self, column: str) -> bool:
        return self.values.get(column) not in (None, "")

    def number(self, column: str) -> float:
        """Return a column's number, possibly NaN or infinite. Raise InputError if there is no number."""
        if not self.has(column):
            raise InputError(f"{self.place} has no {column}; write a number, or remove the row or run")
        value = self.values[column]
        try:
            return float(str(value))  # float() of a large integer raises OverflowError, and that of its digits is inf
        except ValueError:
            hint = "; the loss of a diverged run is nan" if column == "loss" else ""
            raise InputError(f"{self.place}: {column} is {value!r:.60}, which is not a number{hint}") from None

    def above_0(self, column: str) -> float:
        """Return the number in a column. Raise InputError if it is not in [1 / LARGEST_NUMBER, LARGEST_NUMBER]."""
        value = self.number(column)
        if not 1 / LARGEST_NUMBER <= value <= LARGEST_NUMBER:
            limits = f"{1 / LARGEST_NUMBER:g} to {LARGEST_NUMBER:g}"
            raise InputError(f"{self.place}: {column} is {value:g}; give a number from {limits}")
        return value

    def loss(self) -> float:
        """Return the loss, or NaN if it is not finite or beyond +-LARGEST_LOSS (the run diverged)."""
        loss = self.number("loss")
        return loss if abs(loss) <= LARGEST_LOSS else math.nan

    def seed(self) -> float | str | None:
        """Return the seed, or None if it is missing or nan. 0 and 0.0 are the same seed."""
        value = str(self.values["seed"]) if self.has("seed") else "nan"
        try:
            return None if math.isnan(float(value)) else float(value)
        except ValueError:
            return value


def _folders(path: Path) -> Iterator[tuple[Path, list[str]]]:
    """Yield ``path`` and each folder below it once, with the file names. Raise InputError if a run may be
    missing."""

    def refuse(error: OSError) -> None:
        raise InputError(f"{error.filename} cannot be read: {error.strerror}; make it readable, or move it elsewhere")

    seen = {str(above) for above in path.resolve().parents}
    runs, beside, missing = set[Path](), set[Path](), dict[Path, str]()
    links = [path]
    while links:  # after the folders, so that a folder has its own name rather than that of a link to it
        tops, links = links, []
        for folder, inner, files in (each for top in tops for each in os.walk(top, onerror=refuse)):
            if (real := os.path.realpath(folder)) in seen:
                inner.clear()
                continue
            seen.add(real)
            here = Path(folder)
            inner[:] = sorted(name for name in inner if name[0] != "." and name not in OF_DISKS)
            names = sorted(name for name in files if name[0] != ".")
            yield here, names
            own = _is_own_run(here, names)
            if own or any(EVENTS in name or Path(name).suffix.lower() in SUFFIXES for name in names):
                beside.add(here.parent)
            if own or any(EVENTS in name or name.lower().endswith(".wandb") for name in names):
                runs.add(here)
            if not runs.isdisjoint([here, *here.parents]):
                continue
            if not (inner or names):
                missing[here] = f"{here} is empty; if a disk belongs there, mount it, or remove the folder"
            for link in (here / name for name in (*inner, *names) if (here / name).is_symlink()):
                if link.is_dir():
                    links.append(link)
                elif not link.suffix and not link.exists():
                    where = f"{link} is a link to {os.readlink(link)}, which is missing (is its disk mounted?)"
                    missing[link] = f"{where}; bring it back, or remove the link"
    for lost, message in missing.items():
        if lost.parent in beside:
            raise InputError(message)


def _is_own_run(folder: Path, names: Collection[str]) -> bool:
    """Return whether a folder with the files ``names`` is a run folder of leaven. Some files may be missing."""
    found = {"recipe.toml", "metrics.jsonl", "events.jsonl"}.intersection(names)
    return len(found) > 1 or ("recipe.toml" in found and (folder / "checkpoints").is_dir())


@dataclass(frozen=True)
class _Logs:
    """The files and folders with runs at or below a path."""

    own: list[Path]  # run folders of leaven; if there are any, no other runs are read
    others: list[Path]  # files, and folders with event files of TensorBoard
    unread: list[str]  # names of other files that may contain runs

    @classmethod
    def at(cls, path: Path, loss: str) -> "_Logs":
        """Raise InputError if there are no runs, or if run folders of leaven have no loss named ``loss``."""
        if not path.exists():
            raise InputError(f"{path}: no such file or folder")
        if not path.is_dir():
            return cls([], [path], [])
        own, others, unread = set[Path](), set[Path](), set[Path]()
        for folder, names in _folders(path):
            if _is_own_run(folder, names):
                own.add(folder)
            for file in (folder / name for name in names):
                if EVENTS in file.name:
                    others.add(folder)
                elif file.suffix.lower() in SUFFIXES:
                    others.add(file)
                elif (table := UNREAD.search(file.name)) and (folder == path or not table[2]):
                    unread.add(file)  # a .json in an inner folder is often the configuration of a run
        if own and loss != "loss":
            raise InputError(f"{path} contains run folders of leaven, which have one loss; remove --loss {loss}")
        if not own | others:
            kinds = f"no TensorBoard event file, and no file that ends in {' or '.join(SUFFIXES)}"
            raise InputError(f"{path} has {kinds}; give a folder with logged runs")
        if own:
            unread = {file for file in unread if file.suffix.lower() != ".json"}  # such as study.json
            unread = {file for file in unread | others if own.isdisjoint([file, *file.parents])}
            others = set()
        names = [str(file.relative_to(path)) for file in sorted(unread)]
        return cls(sorted(own), sorted(others), names if len(names) < 6 else [*names[:5], f"{len(names) - 5} more"])


def _is_one_run(path: Path) -> bool:
    return path.is_dir() or path.suffix.lower() == ".wandb"  # a folder is a run of TensorBoard


def _rows_of_curve(path: Path, root: Path, loss: str, columns: Collection[str]) -> list[LoggedRow]:
    """Return the points of a TensorBoard or W&B run. ``columns`` are read from the run's path below ``root``."""
    cut: list[str] = []
    if path.is_dir():
        events = sorted(file for file in path.iterdir() if EVENTS in file.name)
        found = [row for file in events for row in tensorboard_rows(file, loss, cut.append)]
    else:
        found = list(wandb_rows(path, cut.append))
    place = f"{path} ({'; '.join(cut)})" if cut else str(path)
    known = {name: number for name, number in _numbers(path, root, columns).items() if name in columns}
    rows = [
        LoggedRow(place, {**known, "step": step, "loss": row[loss]})
        for step, row in found
        if row.get(loss) is not None
    ]
    if not rows:
        names = ", ".join(sorted({name for _, row in found for name in row})) or "no columns"
        raise InputError(f"{place} has no column {loss}; it has {names}; name the loss with --loss")
    return rows


def _numbers(path: Path, root: Path, columns: Collection[str]) -> dict[str, float]:
    """Return the named numbers in a run's path below ``root``.

    Without a width, the mup_width or model_width is the width, unless the path has both. So it is with the depth.
    """
    found = {}
    named = re.sub(WANDB_ID, "", path.relative_to(root).as_posix().lower())
    for name, number, unit, more in re.findall(NAMED, named):
        used = {name, re.sub("^(mup|model)_", "", name)} & {*columns} - {"seed"}
        if used and re.fullmatch(ONE_OR_TWO, number + unit + more):
            where = f"{path}: {name}{number}{more} may be one number or two"
            raise InputError(f"{where}; remove the _ of the number, or write - in place of it")
        found[name] = float(number) * UNITS[unit]
    for size in {"width", "depth"} - found.keys():
        others = [name for name in (f"mup_{size}", f"model_{size}") if name in found and name not in columns]
        if len(others) == 1:
            found[size] = found.pop(others[0])
    return found


def _unused(paths: Iterable[Path], root: Path, columns: Collection[str]) -> list[str]:
    """Return the names of the numbers in paths of runs that differ or that some lack, and that are in no column."""
    numbers = [_numbers(path, root, columns) for path in paths if _is_one_run(path)]
    names = {name for each in numbers for name in each}
    return sorted(name for name in names - {*columns} if len({each.get(name) for each in numbers}) > 1)


def _rows(path: Path, root: Path, loss: str, columns: Collection[str]) -> list[LoggedRow]:
    """Return the rows of a file or logged run. Copy the column that ``loss`` names to the column "loss"."""
    if _is_one_run(path):
        return _rows_of_curve(path, root, loss, columns)
    rows = read_rows(path)
    if (loss := loss.lower()) == "loss":
        return rows
    if not any(row.has(loss) for row in rows):
        columns = dict.fromkeys(column for row in rows for column in row.values)
        raise InputError(f"{path} has no column {loss}; its columns are {', '.join(columns)}")
    return [LoggedRow(row.place, {**row.values, "loss": row.values.get(loss)}) for row in rows]


def read_rows(path: Path) -> list[LoggedRow]:
    """Return the rows of a CSV or JSON lines file, with lower-case columns. Raise InputError if it cannot be used."""
    try:
        if path.suffix.lower() == ".jsonl":
            read = storage.read_json_lines(path)
            if read.damaged:
                raise InputError(f"{path}: line {read.damaged[0]} is not a JSON object; correct or remove it")
            if read.torn:
                raise InputError(f"{path}: its last line is cut; copy the file again, or complete or remove it")
            found: list[dict[str, Any]] = read.documents
            headers: Sequence[Iterable[str]] = found
        else:
            columns, *lines = _csv_lines(path) or [[]]
            found, headers = [dict(zip(columns, line, strict=True)) for line in lines], [columns]
    except UnicodeDecodeError:
        raise InputError(f"{path} is not a CSV file; give a text file with a header and commas") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    if not found:
        raise InputError(f"{path} has no rows; write a row for each run or curve point, below a header if it is CSV")
    for header in headers:
        names = [column.strip().lower() for column in header]
        if twice := [name for name in names if name and names.count(name) > 1]:
            raise InputError(f"{path} has two columns {twice[0]}; rename or remove one")
    return [
        LoggedRow(
            f"{path}: row {number}", {column.strip().lower(): line[column] for column in line if column.strip()}
        )
        for number, line in enumerate(found, start=1)
    ]


def _csv_lines(path: Path) -> list[list[str]]:
    """Return the cells of the rows of a CSV file, without blank rows and without last columns that are empty.

    Raise InputError unless every row has as many cells as the header, and no cell contains a row.
    """
    rows: list[tuple[int, list[str]]] = []  # the line in which a row begins, and its cells
    reader = csv.reader(io.StringIO(storage.read(path).decode("utf-8-sig"), newline=""), skipinitialspace=True)
    begin = 1
    try:
        for cells in reader:
            if any(cells):
                rows.append((begin, cells))
            inner = [line for cell in cells for line in re.split(r"[\r\n]+", cell)[1:] if "," in line]
            if any('"' in line or line.count(",") >= _filled(rows[0][1]) - 1 for line in inner):
                where = f'{path}: line {begin} has a cell that begins with " and seems to contain the next row'
                raise InputError(f"{where}; correct the cell, or remove its column")
            begin = reader.line_num + 1
    except csv.Error:
        where = f"{path}: line {begin} has a cell with more than {csv.field_size_limit():,} characters"
        raise InputError(f'{where}, or one without its closing "; correct it, or remove its column') from None
    if not rows:
        return []
    header = rows[0][1]
    if len(header) == 1 and re.search("[;\t]", header[0]):
        raise InputError(f"{path}: separate the columns by commas")
    named, count = _filled(header), len(header)
    if not any(any(cells[named:count]) for _, cells in rows):
        rows = [(line, cells[: max(named, _filled(cells))]) for line, cells in rows]
        count = named
    for line, cells in rows:
        if len(cells) != count:
            hint = "quote cells that contain a comma"
            if header[0].startswith("#"):
                hint = "remove the first line, which begins with #"
            elif len(cells) < count:
                hint = "copy the file again, or complete or remove the row"
            raise InputError(f"{path}: line {line} has {len(cells)} and the header {count} cells; {hint}")
    return [cells for _, cells in rows]


def _filled(cells: Sequence[str]) -> int:
    """Return the number of cells up to the last one that is not empty."""
    return max((number for number, cell in enumerate(cells, 1) if cell), default=0)


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
    logs = _Logs.at(path, loss)
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
                f"{path}: {names[scale]} has {len(grid.octaves)} values of {value} without a diverged run, and an "
                "optimum needs three; add runs with other values"
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
    path: Path, logs: _Logs, value: str, loss: str
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
            found_here = _rows(file, path, loss, used)
            if _is_one_run(file):
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
    return losses, axes, [*columns, *_unused(logs.others, path, used)]


def _refuse_copies(values: Iterable[Iterable[LoggedRow]]) -> None:
    """Raise InputError if several of ``values`` have several runs and each of these has two with the same loss.

    This is a copy. If only one or some have, this may be chance: losses may have few digits. Diverged runs do not
    count.
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
            f"{row.place} repeats the loss of {first.place}, and no runs of this size show the noise of seeds; "
            "remove copies of runs, or write losses with more digits"
        )


def _refuse_unfinished(ends: Sequence[LoggedRow], value: str) -> None:
    """Raise InputError if a run has not diverged, but ends before an equally large run. ``ends``: last rows."""
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
    logs = _Logs.at(path, loss)
    curves, unused = _curves(path, logs, loss)
    settings = {"rule": None, "columns not used": unused, "files not read": logs.unread}
    return collapse(str(path), curves, irreducible, settings)


def curves_of(path: Path, loss: str = "loss") -> dict[str, list[Points]]:
    """Return the loss curves of all runs in a folder or file. The keys name the sizes, the smallest first.

    ``loss`` is the name of a column; rows without a loss are left out. docs/concepts/checks.md describes the
    files. Raise InputError if the runs cannot be used, or if the size of a curve is unclear.
    """
    return _curves(path, _Logs.at(path, loss), loss)[0]


def _curves(path: Path, logs: _Logs, loss: str) -> tuple[dict[str, list[Points]], list[str]]:
    """Return the curves by size, and the columns and the numbers in the paths of runs that are not used."""
    if logs.own:
        return _curves_of_own_runs(logs.own), []
    used = {"width", "depth", "batch", "seed"}
    unused = set[str]()
    found: dict[str, list[Points]] = {}
    sized: dict[tuple[str, ...], Path] = {}  # size columns and the first file that has them
    seen: dict[Hashable, str] = {}  # size and seed, or the points of a curve, and where they are
    for file in logs.others:
        rows = _rows(file, path, loss, used)
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
        unused.update(_unused(logs.others, path, used))
    return {name: found[name] for name in sorted(found, key=_by_numbers)}, sorted(unused)


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


def _by_numbers(name: str) -> list[str | float]:
    """Return a sort key that compares the numbers in names: 900k is before 1b."""
    texts = re.split(NUMBER, name.lower())
    numbers = [float(number) * UNITS[unit or ""] for number, unit in zip(texts[1::3], texts[2::3], strict=True)]
    return [part for pair in zip(texts[::3], [*numbers, 0.0], strict=True) for part in pair]


def _read_own_runs(folders: Sequence[Path], *free: str) -> list[tuple[RunScale, Recipe, RunFolder]]:
    """Return the size, recipe and folder of each run. A size gives batch and duration in tokens.

    Raise InputError if files were changed or lost, if texts differ, or if recipes of one size differ in a
    key other than ``free``.
    """
    found = []
    firsts: dict[RunScale, tuple[Path, Recipe]] = {}
    for folder in folders:
        run = RunFolder(folder)
        recipe = run.recipe()
        if (fault := next(faults(run), None)) is not None:
            raise InputError(f"{fault}; to leave the run out, move it to another folder")
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


def _rows_of_own_runs(folders: Sequence[Path], value: str) -> list[LoggedRow]:
    known = Recipe.model_fields["hyperparameters"].annotation
    path = value if "." in value or value not in getattr(known, "model_fields", {}) else f"hyperparameters.{value}"
    runs = _read_own_runs(folders, path, "data.seed")
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
