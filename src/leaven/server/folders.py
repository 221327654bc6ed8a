"""Find the runs, studies, checks and demos in the folders given to ``leaven serve``, and their progress."""

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from urllib.parse import quote

from leaven.documents.checks import CheckDocument
from leaven.errors import InputError
from leaven.views import numbers
from leaven.views.checks import conclusion
from leaven.views.demo import headline
from leaven.views.folders import KINDS, RunView, StudyView, read_folder

DEEPEST = 6  # levels of subfolders that are searched
SKIPPED = {"checkpoints", "node_modules", "__pycache__", "site-packages"}
SHOWN = {".json", ".jsonl", ".toml"}  # suffixes of the files whose content a page shows
YEAR_9999 = 253_370_764_800.0  # Unix time when this year begins; the time of a file may be later
SILENT = 120.0  # seconds; a run is called running if a file has changed within this time


@dataclass(frozen=True)
class Found:
    root: int  # index of the root, in the order given to ``leaven serve``
    folder: Path
    name: str  # path relative to the root, with \udcXX for a byte that is not UTF-8; "" for the root itself
    kind: str  # run | study | check | demo

    @property
    def address(self) -> str:
        return f"{self.root}/{quote(self.name)}"

    @property
    def stats(self) -> dict[str, os.stat_result]:
        """The size and times of each file that the page shows, by the path of the file."""
        return dict(sorted(_files(self.folder, 2)))

    @property
    def changed(self) -> float:
        """The Unix time of the last change to any file that the page shows: 0 without files, at most `YEAR_9999`."""
        return min(max([0.0, *(stat.st_mtime for stat in self.stats.values())]), YEAR_9999)

    @property
    def when(self) -> str:
        return f"{datetime.fromtimestamp(self.changed):%Y-%m-%d %H:%M}"


@dataclass(frozen=True)
class FolderRow:
    found: Found
    name: str  # name of the recipe, or of the demo
    state: str  # for example running or finished
    progress: str = ""  # for example 2 M of 10 M tokens
    share: float | None = None  # share of the work that is done, from 0 to 1
    loss: float | None = None  # nats per token


def find(roots: list[Path], on_error: Callable[[OSError], None] = lambda error: None) -> Iterator[Found]:
    """Yield the runs, studies, checks and demos in each of ``roots``, at most `DEEPEST` levels deep. Skip
    hidden folders, folders in `SKIPPED`, and folders inside a found folder. ``on_error`` is called for each folder
    that cannot be listed."""
    for index, root in enumerate(roots):
        for path, folders, files in os.walk(root, onerror=on_error):
            folder = Path(path)
            depth = len(folder.relative_to(root).parts)
            kind = next((KINDS[name] for name in KINDS if name in files), None)
            if kind is not None:
                name = folder.relative_to(root).as_posix() if depth else ""
                yield Found(index, folder, name.encode(errors="backslashreplace").decode(), kind)
            inside = depth < DEEPEST and kind is None
            folders[:] = sorted(f for f in folders if f not in SKIPPED and not f.startswith(".")) if inside else []


def tag(found: list[Found]) -> str:
    """Return the HTTP ETag of a page about the folders ``found``. It changes with the files that the page shows."""
    digest = hashlib.blake2b(digest_size=12)
    for each in found:
        digest.update(f"{each.address}\n".encode())
        for path, stat in each.stats.items():
            digest.update(f"{path} {stat.st_mtime_ns} {stat.st_size}\n".encode(errors="surrogateescape"))
    return f'"{digest.hexdigest()}"'


def row(found: Found, now: float) -> FolderRow:
    """Return the row for a folder in the list of folders. ``now`` is the current Unix time."""
    try:
        view = read_folder(found.folder)
    except (InputError, OSError) as error:
        state = str(error).removeprefix(f"{found.folder}").lstrip("/: ")
        return FolderRow(found, found.folder.name, state)
    silent = now - found.changed
    going = "running" if silent < SILENT else f"no change for {numbers.seconds(silent)}"
    if isinstance(view, RunView):
        tokens = view.recipe.data.tokens
        done = f"{numbers.quantity(view.tokens)} of {numbers.quantity(tokens)} tokens"
        state = "finished" if view.finished else f"stopped: {view.stopped}" if view.stopped else going
        loss = view.loss if view.loss is not None else view.steps[-1]["loss"]
        return FolderRow(found, view.title, state, done, min(view.tokens / tokens, 1.0), loss)
    if isinstance(view, StudyView):
        running = len(view.trials) - view.ended
        loss = view.best.loss if view.best else None
        state = f"{running} running" if running and silent < SILENT else "has an answer" if view.best else going
        return FolderRow(found, view.name, state, f"{view.ended} trials", None, loss)
    if isinstance(view, CheckDocument):
        return FolderRow(found, view.subject, conclusion(view), view.check, 1.0)
    return FolderRow(found, view.name, " ".join(headline(view)), f"{len(view.runs)} runs")


def _files(folder: Path, depth: int) -> Iterator[tuple[str, os.stat_result]]:
    entries: list[os.DirEntry[str]] = []
    with suppress(OSError):  # the folder was removed meanwhile
        entries.extend(os.scandir(folder))
    for entry in entries:
        with suppress(OSError):  # the file was removed meanwhile, or is a link to nowhere
            if entry.is_dir(follow_symlinks=False):
                if depth and entry.name not in SKIPPED:
                    yield from _files(Path(entry.path), depth - 1)
            elif Path(entry.name).suffix in SHOWN:
                yield entry.path, entry.stat()
