"""Read runs that any program has logged, from CSV and JSON lines files, TensorBoard and W&B.

In a CSV or JSON lines file, a row is one run (for the check transfer) or one point of a loss curve (for collapse).
The size is in the columns width, depth, batch or tokens. A folder with TensorBoard event files is one run, and so is
a .wandb file. For these, the path replaces the columns: width256-lr0.004 has the width 256 and the lr 0.004.
"""

import csv
import io
import math
import os
import re
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from leaven import storage
from leaven.data.sources import OF_DISKS
from leaven.errors import InputError
from leaven.training.run_logs import (
    by_event_name,
    superseded_events,
    tensorboard_events,
    tensorboard_rows,
    tensorboard_tags,
    wandb_rows,
)

SUFFIXES = (".csv", ".jsonl", ".wandb")
UNREAD = re.compile(r"\.(csv|tsv|jsonl|ndjson|parquet|wandb|(json))(\.(gz|bz2|xz|zst|zip))?$", re.IGNORECASE)
EVENTS = "tfevents"  # part of the name of every TensorBoard event file
TIMES = ("tokens", "step")  # columns for the progress of a run; the first one with values is used
UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
DIGITS = r"(\d+(?:\.\d+|\.(?=e))?(?:e[+-]?\d+)?)"
NUMBER = rf"{DIGITS}(?:([kmbt])(?=tok|[^a-z]|$))?"  # with an optional unit
# The begin of a logarithm's name, as in log2lr-8, log10_lr-3 or ln-lr-6. In log2_width64-lr0.001, log2 is a name of
# its own.
_NEXT = r"(?!width|depth|batch|tokens|seed)(?=[a-z_]+[=_-]*[1-9]\d?(?![\de]|\.\d+e))"
LOG = rf"(?:log(?:2|10)_?{_NEXT}|(?<![a-z])(?:log(?:2|10)?|ln)[-.]{_NEXT})"
# A name and its number, as part of a path. The groups are the name, digits at its end (as in beta2=0.95), the
# separator, the number, its unit, and what may be more digits: _024 in width1_024, and b5 in tokens1b5. In
# lr3e-4b512, b is not a unit, but the next name. NO_COLUMN stands for a condition: in width2-0.95, the width is 2.
NAMED = (
    rf"((?:[a-z]+_)*(?:{LOG})?[a-z]+(?:_[a-z]+)*)((?:\d+(?==\d)|NO_COLUMN\d(?=[_-]\d))?)([=_-]?){DIGITS}(?:([kmbt])(?=tok|[^a-z\d]|$))?"
    r"(_\d{3}(?![a-z\d]))?(?=([kmbtp]\d+)?)"
)
WANDB_ID = r"run-(\d{8}_\d{6}-)?[a-z\d]{8}(?=/|\.wandb$)"  # W&B's own names of folders and files
ONE_OR_TWO = r"\d_0[1-9]\d|\d{1,3}_(000|[1-9]\d\d)"  # such as 1_024; but in lr1_001 and width128_012, a run's number
LETTER_FOR_POINT = r"\d{1,3}[kmbtp]\d+"  # such as 1b5 or 1p5
LARGEST_LOSS = 1e6  # a run with a larger loss has diverged
LARGEST_NUMBER = 1e100  # the largest size or value of a hyperparameter; the smallest is 1 / LARGEST_NUMBER


@dataclass(frozen=True)
class LoggedRow:
    """A row of a file, a point of a run in TensorBoard or W&B, or the result of a run of leaven."""

    place: str  # for messages: the path and, for a row of a file, its number
    values: Mapping[str, Any]  # by column name
    source: Path | None = None  # the file or folder with the row; None for a run of leaven
    other_loss: Any = None  # the value of the column "loss", if another column is read as the loss

    def has(self, column: str) -> bool:
        return self.values.get(column) not in (None, "")

    def number(self, column: str) -> float:
        """Return a column's number, possibly NaN or infinite. Raise InputError if there is no number."""
        if not self.has(column):
            if column == "loss":
                hint = (
                    "write nan if the run diverged, or else its loss; if it has not finished, remove the row or run"
                )
            else:
                hint = "write a number, or remove the row or run"
            raise InputError(f"{self.place} has no {column}; {hint}")
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
    """Yield (folder, names of its files) for ``path`` and each folder below it, once each. Leave out hidden names.

    Raise InputError if a folder cannot be read. At the end, also raise InputError if an empty folder or a broken
    link is beside a folder with logs. The empty folder or link may belong to a disk that is not mounted.
    """

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
    """Return whether a folder is a run folder of leaven. ``names`` are the names of its files.

    It is one if it has two of the files recipe.toml, metrics.jsonl and events.jsonl, or a recipe.toml and the folder
    ``checkpoints``.
    """
    found = {"recipe.toml", "metrics.jsonl", "events.jsonl"}.intersection(names)
    return len(found) > 1 or ("recipe.toml" in found and (folder / "checkpoints").is_dir())


@dataclass(frozen=True)
class RunLogs:
    """The files and folders with runs at or below a path."""

    own: list[Path]  # run folders of leaven; if there are any, no other runs are read
    others: list[Path]  # files, and folders with event files of TensorBoard
    unread: list[str]  # names of other files that may contain runs

    @classmethod
    def at(cls, path: Path, loss: str, columns: Collection[str]) -> "RunLogs":
        """Return the logs at ``path``, which is a log file or a folder with log files or run folders of leaven.

        ``columns`` are the numbers that may distinguish two runs of other programs, such as the width.
        Raise InputError if there are none. Also raise it if there are run folders of leaven and ``loss`` is not
        ``"loss"``, the only name of their losses.
        """
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
        events = {file for folder in others if folder.is_dir() for file in _event_files(folder)}
        read = events - superseded_events(events, loss)
        others -= {file.parent for file in events} - {file.parent for file in read}
        others -= _beside_chosen(others, loss)
        others -= _older_results(others, loss, path, columns)
        names = [str(file.relative_to(path)) for file in sorted(unread)]
        return cls(sorted(own), sorted(others), names if len(names) < 6 else [*names[:5], f"{len(names) - 5} more"])


def _event_files(folder: Path) -> list[Path]:
    return sorted((file for file in folder.iterdir() if EVENTS in file.name), key=by_event_name)


def _older_results(runs: Iterable[Path], loss: str, root: Path, columns: Collection[str]) -> set[Path]:
    """Return the folders with results of ``add_hparams`` that a later call for the same run has replaced.

    Each call writes a subfolder of the run, for example once an epoch. Subfolders are of different runs if the
    numbers of ``columns`` in their names differ.
    """
    newest: dict[Hashable, tuple[float, Path]] = {}
    found = set[Path]()
    for folder in runs if loss.startswith("hparam/") else ():
        # A run has values of its own. The folder above many runs may have an event file without any.
        if folder.is_dir() and any(tensorboard_tags(file) for file in _event_files(folder.parent)):
            files = [file for file in folder.iterdir() if EVENTS in file.name]
            events = [event for file in files for event in tensorboard_events(file, loss)]
            last = max((time for time, _, row in events if row.get(loss) is not None), default=0.0)
            numbers = _numbers(folder, root, columns)
            run = (folder.parent, *(str(numbers.get(name)) for name in sorted(columns)))
            older, newest[run] = sorted([newest.get(run, (last, folder)), (last, folder)])
            found |= {older[1]} - {newest[run][1]}
    return found


def _beside_chosen(runs: Collection[Path], loss: str) -> set[Path]:
    """Return the folders with event files that are no runs, because ``loss`` names another folder of the same run.

    The loss val/loss is the tag "loss" in the folders called val, if they have this tag. Then the folders beside
    them, such as train, and the one above them are left out.
    """
    chosen = {run for run in runs if run.is_dir() and _tag_in(run, loss) != loss}
    above = {run.parent for run in chosen}
    return {run for run in runs if run.is_dir() and (run in above or run.parent in above)} - chosen


def _tag_in(folder: Path, loss: str) -> str:
    """Return the tag of the loss in a folder with event files: "loss" for val/loss in a folder called val."""
    if not loss.startswith(f"{folder.name}/"):
        return loss
    tags = {tag for file in folder.iterdir() if EVENTS in file.name for tag in tensorboard_tags(file)}
    tag = loss.removeprefix(f"{folder.name}/")
    return tag if tag in tags and loss not in tags else loss


def is_one_run(path: Path) -> bool:
    return path.is_dir() or path.suffix.lower() == ".wandb"  # a folder is a run of TensorBoard


def _rows_of_curve(path: Path, root: Path, loss: str, columns: Collection[str]) -> list[LoggedRow]:
    """Return the points of a TensorBoard or W&B run. The numbers of ``columns``, such as the width, come from the
    run's path below ``root``, for example ``width=64/lr=0.01``. Raise InputError if no point has the loss."""
    cut: list[str] = []
    if path.is_dir():
        loss = _tag_in(path, loss)
        events = _event_files(path)
        left_out = superseded_events(events, loss)
        found = [row for file in events if file not in left_out for row in tensorboard_rows(file, loss, cut.append)]
    else:
        found = list(wandb_rows(path, cut.append))
    place = f"{path} ({'; '.join(cut)})" if cut else str(path)
    known = {name: numbers[0] for name, numbers in _numbers(path, root, columns).items() if name in columns}
    rows = [
        LoggedRow(place, {**known, "step": step, "loss": row[loss]}, path)
        for step, row in found
        if row.get(loss) is not None
    ]
    if not rows:
        names = ", ".join(sorted({name for _, row in found for name in row})) or "no columns"
        near = sorted(
            file.parent
            for folder in (() if not path.is_dir() else (path,) if path == root else (path, path.parent))
            for file in folder.glob(f"*/*{EVENTS}*")
            if not re.search(r"\d", file.parent.name) and file.parent != path
        )
        hint = f", or as --loss {near[-1].name}/TAG if it is in {near[-1]}" if near else ""
        raise InputError(f"{place} has no column {loss}; it has {names}; name the loss with --loss{hint}")
    return rows


def _numbers(path: Path, root: Path, columns: Collection[str]) -> dict[str, list[float]]:
    """Return the named numbers in a run's path below ``root``, such as {"width": [256.0]} for ``width256``.

    If the path has no width, a mup_width or model_width is returned as the width, unless the path has both or
    ``columns`` names it. The same holds for the depth. Raise InputError if a number may also be two numbers, or if
    one of ``columns`` has several numbers.
    """
    found: dict[str, list[float]] = {}
    named = re.sub(WANDB_ID, "", path.relative_to(root).as_posix().lower())
    pattern = NAMED.replace("NO_COLUMN", "".join(f"(?<!{re.escape(column)})" for column in columns))
    for letters, digit, separator, number, unit, more, letter in re.findall(pattern, named):
        name = letters + digit
        used = {name, re.sub("^(mup|model)_", "", name)} & {*columns} - {"seed"}
        if used and re.fullmatch(ONE_OR_TWO, number + unit + more):
            where = f"{path}: {name}{number}{more} may be one number or two"
            raise InputError(f"{where}; for one number, remove the _; for two numbers, replace the _ by -")
        whole = used & {"width", "depth"} and letter[:1] in {"b", "p"}  # as in width256b512
        if used and not whole and re.fullmatch(LETTER_FOR_POINT, number + unit + more + letter):
            one = f"{number}.{letter[1:]}{letter[0].strip('p')}"
            where = f"{path}: {name}{number}{letter} may be one number or two"
            raise InputError(f"{where}; if it is one, write {one}; if it is two, write - before {letter[0]}")
        of_log = re.search("(^|_)(log(2|10)|(log|ln)([-._]|lr|wd))", name)
        sign = -1 if of_log and separator == "-" else 1  # as in log2lr-8
        found.setdefault(name, []).append(sign * float(number) * UNITS[unit])
    for size in {"width", "depth"} - found.keys():
        others = [name for name in (f"mup_{size}", f"model_{size}") if name in found and name not in columns]
        if len(others) == 1:
            found[size] = found.pop(others[0])
    for name in found.keys() & {*columns}:
        if len(numbers := dict.fromkeys(found[name])) > 1:
            several = " and ".join(f"{number:g}" for number in numbers)
            raise InputError(f"{path}: {name} is {several}; rename all but one, e.g. with _ for - before {name}")
    return found


def unused_numbers(paths: Iterable[Path], root: Path, columns: Collection[str]) -> list[str]:
    """Return the names of numbers in run paths that differ between runs but are not in ``columns``.

    A number is unused if it is in no column, and if it differs between runs or some runs lack it. If runs have
    different digits in a name, such as run1-2024 and run2-2024, the name is returned without them.
    """
    numbers = [_numbers(path, root, columns) for path in paths if is_one_run(path)]
    stems = {name: name.rstrip("0123456789") for each in numbers for name in each}
    in_one_run = {stem for each in numbers for stem, count in Counter(map(stems.get, each)).items() if count > 1}
    several = {stem for stem, count in Counter(stems.values()).items() if count > 1} - in_one_run - {*columns}
    found = {name for name in stems.keys() - {*columns} if len({str(each.get(name)) for each in numbers}) > 1}
    return sorted({stems[name] if stems[name] in several else name for name in found})


def rows_of(path: Path, root: Path, loss: str, columns: Collection[str]) -> list[LoggedRow]:
    """Return the rows of a file or logged run. Copy the column that ``loss`` names to the column "loss"."""
    if is_one_run(path):
        return _rows_of_curve(path, root, loss, columns)
    rows = read_rows(path)
    if (loss := loss.lower()) == "loss":
        return rows
    if not any(row.has(loss) for row in rows):
        columns = dict.fromkeys(column for row in rows for column in row.values)
        raise InputError(f"{path} has no column {loss}; its columns are {', '.join(columns)}")
    named = [{name: value for name, value in row.values.items() if name != "loss"} for row in rows]
    return [
        replace(
            row,
            values=values | ({"loss": values[loss]} if loss in values else {}),
            other_loss=row.values.get("loss"),
        )
        for row, values in zip(rows, named, strict=True)
    ]


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
            f"{path}: row {number}",
            {column.strip().lower(): line[column] for column in line if column.strip()},
            path,
        )
        for number, line in enumerate(found, start=1)
    ]


def _csv_lines(path: Path) -> list[list[str]]:
    """Return the rows of a CSV file, as lists of cells. Leave out blank rows, and empty columns at the right end.

    Raise InputError if a row has more or fewer cells than the header, or if a cell seems to contain the next row.
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
        raise InputError(
            f"{where}, or a cell without its closing quotation mark; correct the cell, or remove its column"
        ) from None
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
            raise InputError(f"{path}: line {line} has {len(cells)} cells, but the header has {count}; {hint}")
    return [cells for _, cells in rows]


def _filled(cells: Sequence[str]) -> int:
    """Return the number of cells up to the last one that is not empty."""
    return max((number for number, cell in enumerate(cells, 1) if cell), default=0)


def by_numbers(name: str) -> list[str | float]:
    """Return a sort key that compares the numbers in names: 900k is before 1b."""
    texts = re.split(NUMBER, name.lower())
    numbers = [float(number) * UNITS[unit or ""] for number, unit in zip(texts[1::3], texts[2::3], strict=True)]
    return [part for pair in zip(texts[::3], [*numbers, 0.0], strict=True) for part in pair]
