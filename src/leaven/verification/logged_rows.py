"""Read runs that any program has logged, from CSV and JSON lines files, TensorBoard and W&B.

In a CSV or JSON lines file, a row is one run (for the check transfer) or one point of a loss curve (for collapse).
The size is in the columns width, depth, batch or tokens. A folder with TensorBoard event files is one run, and so is
a .wandb file. For these, the path replaces the columns: width=256,lr=0.004 has the width 256 and the lr 0.004.
"""

import csv
import io
import math
import os
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from leaven import storage
from leaven.data.sources import OF_DISKS
from leaven.errors import InputError
from leaven.training.run_logs import (
    EVENTS,
    OF_HPARAMS,
    EventFile,
    by_event_name,
    is_only_result,
    read_event_file,
    wandb_rows,
)

SUFFIXES = (".csv", ".jsonl", ".wandb")
UNREAD = re.compile(r"\.(csv|tsv|jsonl|ndjson|parquet|wandb|(json))(\.(gz|bz2|xz|zst|zip))?$", re.IGNORECASE)
TEXT = re.compile(r"\.(log|out|txt)$", re.IGNORECASE)  # the end of the name of a text that may be the log of a run
TIMES = ("tokens", "step")  # columns for the progress of a run; the first one with values is used
UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
_NUMBER = r"(\d+(?:\.\d*)?(?:e[+-]?\d+)?)([kmbt]?)"
_NAME = r"[a-z]+(?:_[a-z]+)*"
# A part of a folder's name: a number after its name, as in lr=0.004, lr0.004, lr-0.004 or optim.lr=0.004, a word
# after its name, as in optim=adam, or a name alone. Only before =, a name may have digits, as in beta2=0.95.
_PART = re.compile(rf"(?:{_NAME}\.)*(?:({_NAME})[=_-]?{_NUMBER}|(\w+)={_NUMBER}|{_NAME}(?:={_NAME})?)(?:[-_,. ]+|$)")
_LOGARITHMS = re.compile(r"(?<![a-z])(log|ln)((?![a-z])|[a-z_]+-\d)")  # log2-lr-8 and loglr-8 have no lr
# The name of a size, such as 50m. d24e4 has two numbers, and no exponent.
_SIZE = re.compile(rf"[^\d]*?(?!(?<=[a-z])[\d.]+e[+-]?\d){_NUMBER}[^\d]*")
WANDB_FOLDER = re.compile(r"(offline-)?run-\d{8}_\d{6}-\w+")
WANDB_FILE = re.compile(r"run-\w+\.wandb")
HPARAMS_FOLDER = re.compile(r"\d+\.\d+")  # a time; ``add_hparams`` makes such folders
LARGEST_LOSS = 1e6  # a run with a larger loss has diverged
LARGEST_NUMBER = 1e100  # the largest size or value of a hyperparameter; the smallest is 1 / LARGEST_NUMBER


@dataclass(frozen=True)
class LoggedRow:
    """A row of a file, a point of a run in TensorBoard or W&B, or the result of a run of leaven."""

    place: str  # for messages: the path and, for a row of a file, its number
    values: dict[str, Any]  # by column name
    source: Path | None = None  # the file or folder with the row; None for a run of leaven

    def has(self, column: str) -> bool:
        return self.values.get(column) not in (None, "")

    def number(self, column: str) -> float:
        """Return a column's number, possibly NaN or infinite. Raise InputError if there is no number."""
        if not self.has(column):
            if column == "loss":
                hint = (
                    "write nan if the run diverged, or its loss if it finished; otherwise remove the row or the run"
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
        """Return the loss, or NaN if the run diverged: if the loss is infinite, NaN, or outside +-`LARGEST_LOSS`."""
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
                missing[here] = f"{here} is empty; if a disk belongs there, mount it; if not, remove the folder"
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
    """Return whether a folder, whose files have these names, is a run folder of leaven."""
    found = {"recipe.toml", "metrics.jsonl", "events.jsonl"}.intersection(names)
    return len(found) > 1 or ("recipe.toml" in found and (folder / "checkpoints").is_dir())


@dataclass(frozen=True)
class RunLogs:
    """The files and folders with runs at or below a path."""

    root: Path  # the path
    own: list[Path]  # run folders of leaven; if there are any, no other runs are read
    others: list[Path]  # tables, files of W&B, and the folders of ``events``
    events: dict[Path, list[EventFile]]  # TensorBoard event files by the folder of their run
    unread: list[str]  # names of other files that may contain runs
    loss: str  # the name of the losses
    names: dict[Path, list[str]]  # for each run of TensorBoard and W&B, the names in its path that have digits

    @classmethod
    def at(cls, path: Path, loss: str) -> "RunLogs":
        """Return the logs at ``path``: a log file, or a folder with log files or with run folders of leaven.

        Raise InputError if there are none. Run folders of leaven also raise InputError if ``loss`` is not ``"loss"``.
        """
        if not path.exists():
            raise InputError(f"{path}: no such file or folder")
        own, files, folders, unread = set[Path](), set[Path](), set[Path](), set[Path]()
        texts = dict[Path, Path]()  # the first text in each folder
        if not path.is_dir():
            files.add(path)
        for folder, names in _folders(path) if path.is_dir() else ():
            if _is_own_run(folder, names):
                own.add(folder)
            for file in (folder / name for name in names):
                if EVENTS in file.name:
                    folders.add(folder)
                elif file.suffix.lower() in SUFFIXES:
                    files.add(file)
                elif (table := UNREAD.search(file.name)) and (folder == path or not table[2]):
                    unread.add(file)  # a .json in an inner folder is often the configuration of a run
                elif TEXT.search(file.name):
                    texts.setdefault(folder, file)
        if own and loss != "loss":
            raise InputError(f"{path} contains run folders of leaven, which have only one loss; remove --loss {loss}")
        if own:
            unread = {file for file in unread if file.suffix.lower() != ".json"}  # such as study.json
            unread = {file for file in unread | files | folders if own.isdisjoint([file, *file.parents])}
            files, folders = set(), set()
        events = _event_files(folders, loss)
        if not (own or files or events):
            kinds = f"no TensorBoard event file, and no file that ends in {' or '.join(SUFFIXES)}"
            raise InputError(f"{path} has {kinds}; give a folder with logged runs")
        runs = {run if run.is_dir() else run.parent for run in (*events, *files) if is_one_run(run)}
        above = {folder for run in runs for folder in run.parents}
        unread |= {  # a folder with a text only may be that of a run whose other log is lost
            file
            for folder, file in texts.items()
            if runs and folder not in above and runs.isdisjoint([folder, *folder.parents])
        }
        names = [str(file.relative_to(path)) for file in sorted(unread)]
        names = names if len(names) < 6 else [*names[:5], f"{len(names) - 5} more"]
        others = sorted([*files, *events])
        in_paths = {run: _names_with_digits(run, path) for run in others if is_one_run(run)}
        return cls(path, sorted(own), others, events, names, loss, in_paths)

    def rows(self, file: Path, columns: Collection[str]) -> list[LoggedRow]:
        """Return the rows of ``file``, a table or a run of TensorBoard or W&B, with ``self.loss`` renamed to "loss".

        ``columns`` are the names of numbers, such as width, to read from the path of a run.
        """
        if is_one_run(file):
            return self._rows_of_run(file, columns)
        rows, loss = read_rows(file), self.loss.lower()
        if loss != "loss":
            if not any(row.has(loss) for row in rows):
                names = dict.fromkeys(column for row in rows for column in row.values)
                raise InputError(f"{file} has no column {loss}; its columns are {', '.join(names)}")
            for row in rows:
                row.values.pop("loss", None)
                if loss in row.values:
                    row.values["loss"] = row.values[loss]
        return rows

    def _rows_of_run(self, run: Path, columns: Collection[str]) -> list[LoggedRow]:
        """Return the points of a TensorBoard or W&B run. Raise InputError if the run has no loss, or if its path
        gives a column two values, such as width=128/width=256."""
        cut: list[str] = []
        if run in self.events:
            names = {tag for file in self.events[run] for tag in file.tags}
            points = [point for file in self.events[run] for point in file.points]
            cut = [file.cut for file in self.events[run] if file.cut]
        else:
            rows = list(wandb_rows(run, cut.append))
            names = {name for _, row in rows for name in row}
            points = [(step, row[self.loss]) for step, row in rows if self.loss in row]
        place = f"{run} ({'; '.join(cut)})" if cut else str(run)
        if not points:
            if run in self.events and is_only_result(run, self.loss):
                raise InputError(f"{place}: {self.loss} is only {OF_HPARAMS}; log the loss as a curve, too")
            has = ", ".join(sorted(names)) or "no columns"
            hint = "name the loss with --loss TAG, or with --loss val/TAG if TAG is in folders called val"
            raise InputError(f"{place} has no column {self.loss}; it has {has}; {hint}")
        known, numbers = {}, self.numbers(run)
        for name in numbers.keys() & {*columns}:
            known[name], *more = dict.fromkeys(numbers[name])
            if more:
                several = " and ".join(f"{number:g}" for number in (known[name], *more))
                raise InputError(
                    f"{run}: {name} is {several}; rename all but one, e.g. replace the - before {name} by _"
                )
        return [LoggedRow(place, {**known, "step": step, "loss": loss}, run) for step, loss in points]

    def numbers(self, run: Path) -> dict[str, list[float]]:
        """Return the named numbers in a run's path, such as {"width": [256.0]} for ``width256``."""
        found: dict[str, list[float]] = {}
        for part in self.names[run]:
            for name, number in named_numbers(part) or ():
                found.setdefault(name, []).append(number)
        return found

    def require_readable_names(self, *, sized: bool = False) -> None:
        """Raise InputError if the paths of two runs differ in a name whose numbers cannot be read, such as lr=2^-8.

        With ``sized``, the first name in a path is the size, such as 50m, and is not checked.
        """
        first: tuple[Path, list[str]] | None = None
        for run, names in self.names.items():
            parts = run.relative_to(self.root).parts
            size = (parts[0] if len(parts) > 1 or run.is_dir() else run.stem) if sized and parts else None
            unread = [name for name in names if named_numbers(name) is None and name != size]
            other, theirs = first = first or (run, unread)
            if unread != theirs:
                name, *_ = (*{*unread}.symmetric_difference(theirs), *unread)
                raise InputError(
                    f"{run} and {other}: cannot read {_parts(name)[1]!r} in the name {name}; rename it to "
                    "names and numbers (no logarithms), such as width=256,lr=0.004,beta2=0.95 or seed0, or give a "
                    "table of the runs"
                )

    def unused_numbers(self, columns: Collection[str]) -> list[str]:
        """Return each name, such as lr in lr=0.004, whose number in the paths differs, but none in ``columns``."""
        every = [self.numbers(run) for run in self.names]
        names = {name for numbers in every for name in numbers} - {*columns}
        return sorted(name for name in names if any(each.get(name) != every[0].get(name) for each in every))


def _event_files(folders: Iterable[Path], loss: str) -> dict[Path, list[EventFile]]:
    """Return the TensorBoard event files of each run, by its folder.

    - If ``loss`` is val/loss, the folder r/val is a run if it has the tag "loss". Then the folders r and r/train are
      runs only if they have the tag val/loss.
    - If ``loss`` is a result of ``add_hparams``, such as hparam/loss, only the newest file with this tag is returned.
    - A folder that contains runs is not a run itself if its files have no tags.
    """
    found, chosen = dict[Path, list[EventFile]](), set[Path]()
    for folder in sorted(folders):
        paths = sorted((file for file in folder.iterdir() if EVENTS in file.name), key=by_event_name)
        every, inner = [read_event_file(file, loss) for file in paths], loss.removeprefix(f"{folder.name}/")
        if inner != loss and not any(file.points for file in every):
            in_folder = [read_event_file(file, inner) for file in paths]
            if any(file.points for file in in_folder):
                every = in_folder
                chosen.add(folder)
        of_run, files = folder, [file for file in every if not file.left_out]
        if all(file.of_hparams for file in every):
            if HPARAMS_FOLDER.fullmatch(folder.name) or any(file.tags for file in found.get(folder.parent, ())):
                of_run = folder.parent
            elif not files:  # a run of which no more is known has no loss
                files = [replace(file, points=[]) for file in every]
        if files:
            found.setdefault(of_run, []).extend(files)
    above = {folder.parent for folder in chosen}
    left_out = {
        folder
        for folder, files in found.items()
        if (folder in above or folder.parent in above) and not any(file.points for file in files)
    }
    left_out |= {
        folder
        for folder, files in found.items()
        if not any(file.tags for file in files) and any(folder in other.parents for other in found)
    }
    runs = {folder: files for folder, files in found.items() if folder not in left_out}
    for folder, files in runs.items():
        if results := [file for file in files if file.of_hparams and file.points]:
            runs[folder] = [max(results, key=lambda file: by_event_name(file.path))]
    return runs


def is_one_run(path: Path) -> bool:
    return path.is_dir() or path.suffix.lower() == ".wandb"  # a folder is a run of TensorBoard


def _names_with_digits(run: Path, root: Path) -> list[str]:
    """Return the parts of a run's path below ``root`` that contain a digit. Names that W&B generates are left out."""
    parts = [*run.relative_to(root).parts]
    if not run.is_dir():
        parts = [part for part in parts[:-1] if not WANDB_FOLDER.fullmatch(part)]
        parts += [] if WANDB_FILE.fullmatch(run.name) else [run.stem]
    return [part for part in parts if re.search(r"\d", part)]


def named_numbers(name: str) -> list[tuple[str, float]] | None:
    """Return the named numbers in a folder's name, such as ("lr", 0.004) in ``lr=0.004``; None if unreadable."""
    found, rest = _parts(name)
    return None if rest else found


def _parts(name: str) -> tuple[list[tuple[str, float]], str]:
    """Return (name, number) pairs from a name such as ``lr=0.1_seed=2``, and the rest that cannot be read."""
    found, at, name = [], 0, name.lower()
    while at < len(name) and (part := _PART.match(name, at)) is not None:
        plain, number, unit, any_name, any_number, any_unit = part.groups()
        if plain or any_name:
            found.append((plain or any_name, float(number or any_number) * UNITS[unit or any_unit or ""]))
        at = part.end()
    logarithm = _LOGARITHMS.search(name)
    return found, name[at if logarithm is None else min(at, logarithm.start()) :]


def read_rows(path: Path) -> list[LoggedRow]:
    """Return the rows of a CSV or JSON lines file, with lower-case columns. Raise InputError if it cannot be used."""
    try:
        if path.suffix.lower() == ".jsonl":
            read = storage.read_json_lines(path, storage.foreign_json)
            if read.damaged:
                raise InputError(f"{path}: line {read.damaged[0]} is not a JSON object; correct or remove it")
            if read.torn:
                raise InputError(
                    f"{path}: its last line is cut; copy the file again, or complete or remove this line"
                )
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
    """Return the rows of a CSV file, as lists of cells, without blank rows.

    Raise InputError if columns are not separated by commas, or if a row has more or fewer cells than the header. Also
    raise it for a line break in a cell, because the cell may lack its closing quotation mark.
    """
    rows = list[list[str]]()
    text = storage.read(path).decode("utf-8-sig")
    header = text.lstrip().partition("\n")[0]
    if "," not in header and re.search("[;\t]", header):
        raise InputError(f"{path}: separate the columns by commas")
    if header.startswith("#"):
        raise InputError(f"{path}: its first line begins with #; begin with the names of the columns, without #")
    reader = csv.reader(io.StringIO(text, newline=""), skipinitialspace=True)
    begin = 1
    try:
        for cells in reader:
            if any("\n" in cell or "\r" in cell for cell in cells):
                raise csv.Error("a cell has a line break, or no closing quotation mark")
            if any(cells):
                rows.append(cells)
            if any(cells) and len(cells) != len(rows[0]):
                raise csv.Error(f"it has {len(cells)} cells, but the header has {len(rows[0])}")
            begin = reader.line_num + 1
    except csv.Error as error:
        raise InputError(
            f"{path}: line {begin}: {error}; correct or remove the line, or if it is the last, copy the file again"
        ) from None
    return rows


def size_in(name: str) -> float | None:
    """Return the only number in a name, such as 9e5 for 900k, or None if it has none or several."""
    found = _SIZE.fullmatch(name.lower())
    return None if found is None else float(found[1]) * UNITS[found[2]]
