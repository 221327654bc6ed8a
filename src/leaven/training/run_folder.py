"""A run's folder: its resolved recipe, one line a step, one line an event, its checkpoints."""

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from leaven.recipe.errors import InputError
from leaven.recipe.files import make_folder, read_recipe, write_recipe, write_text
from leaven.recipe.recipe import Recipe, differences

LOCK = ".lock"


@contextmanager
def held(folder: Path, what: str) -> Iterator[None]:
    """Make a folder and hold it for this process; the lock goes with the process, however it ends.

    Raises:
        InputError: if another process holds it, or it cannot be made.
    """
    make_folder(folder)
    with (folder / LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(f"{what} {folder} is in use by another process; wait for it or use another") from None
        yield


class RunFolder:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.recipe_file = path / "recipe.toml"
        self._metrics = path / "metrics.jsonl"
        self._events = path / "events.jsonl"

    def check(self, recipe: Recipe) -> None:
        """That this folder is new, empty, or of a run of this recipe.

        Raises:
            InputError: saying what stands in the way; nothing has been written.
        """
        if self.path.exists() and not self.path.is_dir():
            raise InputError(f"{self.path}: a file; --run takes a folder")
        if not self.recipe_file.exists():
            if self.path.exists() and any(entry.name != LOCK for entry in self.path.iterdir()):
                raise InputError(f"run folder {self.path} is not empty and holds no recipe.toml; use another --run")
            return
        changes = differences(read_recipe(self.recipe_file), recipe)
        if changes:
            listed = "; ".join(f"{path} {_brief(there)} there, {_brief(here)} here" for path, there, here in changes)
            raise InputError(f"run folder {self.path} holds another recipe: {listed}; use another --run")

    def check_text(self, fingerprint: str) -> None:
        """That the run, if it has begun, was fed the text of this fingerprint.

        Raises:
            InputError: if its source reads otherwise now than then.
        """
        before = next((event["text"] for event in self.events() if "text" in event), fingerprint)
        if before != fingerprint:
            raise InputError(
                f"run folder {self.path} was trained on other text: what [data] source and tokenizer give has "
                "changed since; use another --run"
            )

    @contextmanager
    def opened(self, recipe: Recipe) -> Iterator["RunFolder"]:
        """Hold the folder for this process; write the resolved recipe if it is new."""
        self.check(recipe)
        with held(self.path, "run folder"):
            self.check(recipe)
            if not self.recipe_file.exists():
                write_recipe(recipe, self.recipe_file)
            yield self

    def rewind(self, step: int) -> None:
        """Drop the metric lines after ``step``, and a torn last line: those steps will be done again."""
        kept = [line for line in _whole_lines(self._metrics) if line["step"] <= step]
        write_text(self._metrics, "".join(f"{json.dumps(line)}\n" for line in kept))

    def metrics(self) -> list[dict[str, Any]]:
        return list(_whole_lines(self._metrics))

    def events(self) -> list[dict[str, Any]]:
        return list(_whole_lines(self._events))

    def record(self, line: dict[str, Any]) -> None:
        """One line of metrics.jsonl."""
        _append(self._metrics, line)

    def event(self, event: str, **values: Any) -> None:
        """One line of events.jsonl, with the time in seconds since 1970."""
        _append(self._events, {"event": event, **values, "time": round(time.time(), 3)})


def _append(path: Path, line: dict[str, Any]) -> None:
    try:
        with path.open("a", encoding="utf-8") as file:
            if file.tell() and not _ends_with_newline(path):
                file.write("\n")
            file.write(f"{json.dumps(line)}\n")
    except OSError as error:
        raise InputError(
            f"{path}: cannot be written: {error.strerror}; make room and run the same command again"
        ) from None


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def _whole_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The JSON lines of a file; a line torn by a crash is passed over."""
    if not path.exists():
        return
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            value = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(value, dict):
            yield value


def _brief(value: Any) -> str:
    return "not set" if value is None else f"{value}"
