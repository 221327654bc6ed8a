"""Reads and writes the folder of a run: recipe, metrics (one line per step), events and checkpoints. Defines the
rewinds of a run, which the events record. This module does not import torch.

A rewind returns the run to an earlier state, automatically after a spike (:mod:`leaven.training.spikes`) or manually
(:class:`ManualRewind`). The list of rewinds and the number of tokens trained determine everything else: which part of
the data is skipped, how far the lr is lowered, and which checkpoints have been undone. The result of a run does not
depend on the checkpoint from which a rewind continued.
"""

import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from leaven import storage
from leaven.recipe.errors import InputError
from leaven.recipe.files import finite, make_folder, read_recipe, read_text, write_recipe, write_text
from leaven.recipe.recipe import Difference, Recipe, differences, rearrangement
from leaven.recipe.units import format_quantity

LOCK = ".lock"
RETURNS = ("rollback", "rewind")  # names of the events of automatic and manual rewinds


# The values that --rewind-to may change, because every step reads them from the recipe. Other keys define the model,
# the data or the initial values; the batch sizes determine at which token count a step starts.
SECTIONS = ("schedule", "stability", "evaluation")
HYPERPARAMETERS = ("lr", "weight_decay", "beta1", "beta2", "eps", "grad_clip")


@dataclass(frozen=True)
class Rewind:
    """A return of a run to an earlier state."""

    to_tokens: int  # number of tokens trained in that state
    skip_from: int  # first token of the stream that is skipped
    skip_to: int  # first token after the skipped part of the stream
    lr: float = 1.0  # factor on the lr right after the rewind
    lr_tokens: int = 0  # number of tokens over which this factor rises to 1
    attempt: int = 0  # number of rewinds for the same anomaly, including this rewind; 0 for a manual rewind
    found_step: int = 0  # step at which the anomaly was found


def skipped(rewinds: Sequence[Rewind]) -> tuple[tuple[int, int], ...]:
    """Return the intervals of the token stream that are skipped, disjoint and in order."""
    stretches: list[tuple[int, int]] = []
    for start, end in sorted((rewind.skip_from, rewind.skip_to) for rewind in rewinds):
        if stretches and start <= stretches[-1][1]:
            stretches[-1] = (stretches[-1][0], max(end, stretches[-1][1]))
        elif start < end:
            stretches.append((start, end))
    return tuple(stretches)


def position(rewinds: Sequence[Rewind], tokens: int) -> int:
    """Return the position in the token stream at which the step after ``tokens`` trained tokens starts."""
    for start, end in skipped(rewinds):
        if tokens >= start:
            tokens += end - start
    return tokens


def lr_factor(rewinds: Sequence[Rewind], tokens: int) -> float:
    """Return the factor that multiplies the schedule's lr after ``tokens`` trained tokens."""
    factor = 1.0
    for rewind in rewinds:
        since = tokens - rewind.to_tokens
        if 0 < since < rewind.lr_tokens:
            factor *= rewind.lr + (1 - rewind.lr) * since / rewind.lr_tokens
    return factor


def undone(rewinds: Sequence[Rewind], known: int, tokens: int) -> bool:
    """Return whether a rewind has undone a state that was saved after ``tokens`` trained tokens. ``known`` is the
    number of rewinds before the state was saved."""
    return any(tokens > rewind.to_tokens for rewind in rewinds[known:])


@contextmanager
def locked_folder(folder: Path, kind: str) -> Iterator[None]:
    """Create a folder and lock it for this process. The lock is released when the process ends, even if it is killed.

    Raises:
        InputError: if another process has locked the folder, or it cannot be created.
    """
    make_folder(folder)
    with ExitStack() as held:
        try:
            held.enter_context(storage.lock(folder / LOCK, seconds=0))
        except TimeoutError:
            raise InputError(
                f"{kind} {folder} is in use by another process; wait until that process ends, or use another {kind}"
            ) from None
        yield


class RunFolder:
    """The folder of a run on disk. While the disk is full, ``unwritten`` is the error message, and lines are kept in
    memory and written later.

    ``writes`` is true in only one process of a run. In the other processes, methods that write do nothing.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.writes = True
        self.checkpoints = path / "checkpoints"
        self.recipe_file = path / "recipe.toml"
        self.tokenizer_file = path / "tokenizer.json"
        self.plan_file = path / "plan.json"
        self.unwritten: str | None = None
        self._metrics = path / "metrics.jsonl"
        self._events = path / "events.jsonl"
        self._waiting: deque[tuple[Path, dict[str, Any]]] = deque()

    def recipe(self) -> Recipe:
        """Return the run's current recipe. It is correct even if the process was killed after a manual rewind was
        recorded and before the recipe file was written."""
        changed = [event["recipe"] for event in self.events() if "recipe" in event]
        return Recipe.model_validate(changed[-1]) if changed else read_recipe(self.recipe_file)

    def check(self, recipe: Recipe) -> None:
        """Check that this folder does not exist, is empty, or contains a run of this recipe.

        Raises:
            InputError: if the folder contains anything else. Nothing is written.
        """
        if self.path.exists() and not self.path.is_dir():
            raise InputError(f"{self.path} is a file; --run needs a folder")
        if not self.recipe_file.exists():
            # Temporary files left by an interrupted write of the recipe, the first file, belong to this run.
            known = (LOCK, f".{self.recipe_file.name}.*.tmp")
            entries = self.path.iterdir() if self.path.exists() else ()
            if not all(any(fnmatch(entry.name, name) for name in known) for entry in entries):
                raise InputError(f"run folder {self.path} is not empty and holds no recipe.toml; use another --run")
            return
        changes = changes_of(self.recipe(), recipe)
        if changes:
            possible = all(changeable(path) for path, _, _ in changes)
            or_back = ", or --rewind-to to change the recipe from a checkpoint on" if possible else ""
            raise InputError(
                f"run folder {self.path} holds a run of another recipe: {describe_changes(changes)}; "
                f"use another --run{or_back}"
            )

    def check_text(self, fingerprint: str) -> None:
        """Check that the run, if it has begun, has been trained on the text with this ``fingerprint``.

        Raises:
            InputError: if the text has changed since the run began.
        """
        before = next((event["text"] for event in self.events() if "text" in event), fingerprint)
        if before != fingerprint:
            raise InputError(
                f"the run in {self.path} was trained on other text: the files of [data] source or the tokenizer have "
                "changed since; use another --run"
            )

    @contextmanager
    def opened(self, recipe: Recipe) -> Iterator["RunFolder"]:
        """Lock the folder for this process. If the folder is new, write the resolved recipe."""
        self.check(recipe)
        with locked_folder(self.path, "run folder"):
            self.check(recipe)
            for file in (self.recipe_file, self.plan_file):
                for torn in self.path.glob(f".{file.name}.*.tmp"):
                    torn.unlink()
            if not self.recipe_file.exists():
                write_recipe(recipe, self.recipe_file)
            yield self

    def change_recipe(self, recipe: Recipe, changes: list[Difference], since: str) -> Recipe:
        """Write ``recipe`` as the run's recipe, and return it. The reasons in ``why`` name the old value of each
        change and ``since`` when it applies, for example "1,000 tokens"."""
        why = {path: f"since {since}; before: {_brief(before)}" for path, before, _ in changes}
        recipe = recipe.replace({"why": self.recipe().why | recipe.why | why})
        if self.writes:
            write_recipe(recipe, self.recipe_file)
        return recipe

    def keep_tokenizer(self, path: Path) -> None:
        """Copy the tokenizer into the folder, because weights are useless without it and the cache may be cleared."""
        if self.writes and not self.tokenizer_file.exists():
            write_text(self.tokenizer_file, read_text(path))

    def truncate_metrics(self, step: int) -> None:
        """Remove the lines of metrics.jsonl after ``step``, whose steps will be repeated, and an incomplete last
        line. The file is truncated, which works even on a full disk."""
        self._waiting = deque(waiting for waiting in self._waiting if waiting[0] != self._metrics)
        if not self.writes or not self._metrics.exists():
            return
        end, kept = 0, 0
        for line in self._metrics.read_bytes().splitlines(keepends=True):
            end += len(line)
            found = storage.json_object(line) or {}
            if found.get("step", 0) > step:
                break
            if "step" in found and line.endswith(b"\n"):
                kept = end
        os.truncate(self._metrics, kept)

    def metrics(self) -> list[dict[str, Any]]:
        """Return the lines of metrics.jsonl in order of steps. If a step was repeated, return only its last line."""
        lines: list[dict[str, Any]] = []
        for line in _documents(self._metrics, "step"):
            while lines and lines[-1]["step"] >= line["step"]:
                lines.pop()
            lines.append(line)
        return lines

    def events(self) -> list[dict[str, Any]]:
        """Return the lines of events.jsonl."""
        return _documents(self._events, "event")

    def rewinds(self) -> tuple[Rewind, ...]:
        """Return the automatic and manual rewinds of the run, in order."""
        keys = [field.name for field in fields(Rewind)]
        returns = [event for event in self.events() if event["event"] in RETURNS]
        return tuple(Rewind(**{key: event[key] for key in keys}) for event in returns)

    def rollbacks(self) -> list[dict[str, Any]]:
        """Return the events of the automatic rewinds since the last manual rewind."""
        found: list[dict[str, Any]] = []
        for event in self.events():
            if event["event"] == "rewind":
                found = []
            elif event["event"] == "rollback":
                found.append(event)
        return found

    def finish(self) -> dict[str, Any] | None:
        """Return the ``finish`` event of the run. Return None if the run has not finished, or was rewound after it
        finished."""
        for event in reversed(self.events()):
            if event["event"] == "finish":
                return dict(event)
            if event["event"] in RETURNS:
                break
        return None

    def record(self, line: dict[str, Any]) -> None:
        """Append a line to metrics.jsonl. Numbers that are not finite are written as null."""
        self._append(self._metrics, line)

    def event(self, event: str, **values: Any) -> None:
        """Append a line to events.jsonl, with the time in seconds since 1970."""
        self._append(self._events, {"event": event, **values, "time": round(time.time(), 3)})
        if self.writes and event in RETURNS and self.unwritten is None:
            with suppress(OSError):
                storage.sync_file(self._events)  # before the run rolls back

    def require_written(self) -> None:
        """Check that every line has been written.

        Raises:
            InputError: if there is no room on the disk for some lines.
        """
        self._write()
        if self.unwritten is not None:
            raise InputError(
                f"{self._waiting[0][0]}: cannot be written: {self.unwritten}; "
                "make room and run the same command again"
            )

    def _append(self, path: Path, line: dict[str, Any]) -> None:
        if not self.writes:
            return
        self._waiting.append((path, finite(line)))
        self._write()

    def _write(self) -> None:
        """Write the waiting lines in order, until none is left or the disk is full."""
        while self._waiting:
            path, line = self._waiting[0]
            try:
                storage.append_json(path, line)
            except OSError as error:
                self.unwritten = error.strerror or str(error)
                return
            self._waiting.popleft()
        self.unwritten = None


@dataclass(frozen=True)
class ManualRewind:
    """A request to continue from an earlier checkpoint."""

    rewind_to: int  # tokens trained; the newest whole checkpoint at or before this count is used
    skip_tokens: int = 0  # tokens of the data to skip from there on, rounded up to whole sequences

    def done(self, run: RunFolder, recipe: Recipe) -> bool:
        """Return whether this rewind has been done already: whether the run's last manual rewind had these arguments
        and the recipe has not changed since. The run then resumes without a rewind."""
        returns = [event for event in run.events() if event["event"] == "rewind"]
        return bool(returns) and returns[-1]["asked"] == asdict(self) and not changes_of(run.recipe(), recipe)

    def check(self, run: RunFolder, recipe: Recipe) -> None:
        """Raise InputError if the folder has no run or no suitable checkpoint, or if the recipe changes a value that
        must stay the same during a run."""
        if not run.recipe_file.exists():
            raise InputError(f"--rewind-to: there is no run in {run.path}; check --run")
        refused = [change for change in changes_of(run.recipe(), recipe) if not changeable(change[0])]
        if refused:
            raise InputError(
                f"--rewind-to: {describe_changes(refused)}; a run can change only [{'], ['.join(SECTIONS)}] and "
                f"{', '.join(HYPERPARAMETERS)} with --rewind-to; use another --run"
            )
        self._target(run)

    def go(self, run: RunFolder, recipe: Recipe) -> None:
        """Record the rewind in the run folder. If the recipe has changed, write the new recipe, which the run uses
        from the checkpoint on."""
        with locked_folder(run.path, "run folder"):
            changes = changes_of(run.recipe(), recipe)
            to_tokens, rewinds = self._target(run), run.rewinds()
            start, seq_len = position(rewinds, to_tokens), recipe.model.seq_len
            rewind = Rewind(to_tokens, start, start + -(-self.skip_tokens // seq_len) * seq_len)
            lines = run.metrics()
            at = {key: lines[-1][key] if lines else 0 for key in ("step", "tokens")}
            changed = logged(changes, recipe) if changes else {"changes": []}
            run.event("rewind", **at, **asdict(rewind), asked=asdict(self), **changed)
            run.require_written()
            if changes:
                run.change_recipe(recipe, changes, f"{to_tokens:,} tokens, by --rewind-to")

    def _target(self, run: RunFolder) -> int:
        from leaven.training.checkpoint import checkpoints, read_checkpoint, tokens_of  # imports torch

        to_here = Rewind(self.rewind_to, 0, 0)
        found, _ = read_checkpoint(run.checkpoints, (*run.rewinds(), to_here))
        if found is None:
            there = ", ".join(format_quantity(tokens_of(path)) for path in checkpoints(run.checkpoints))
            raise InputError(
                f"--rewind-to {format_quantity(self.rewind_to)}: no whole checkpoint at or before this count; "
                + (f"there are checkpoints at {there} tokens" if there else "the run folder has none")
            )
        return found.progress.tokens


def changes_of(there: Recipe, here: Recipe) -> list[Difference]:
    """Return the differences between two recipes that prevent a run of one from being resumed with the other.
    Differences in layout and micro-batch do not count."""
    free = rearrangement(there, here)
    return [change for change in differences(there, here) if change not in free]


def logged(changes: list[Difference], recipe: Recipe) -> dict[str, Any]:
    """Return the values of the event that records these changes of a run's recipe. ``recipe`` is the new recipe."""
    listed = [{"path": path, "before": before, "after": after} for path, before, after in changes]
    return {"changes": listed, "recipe": recipe.model_dump(mode="json", exclude_none=True)}


def changeable(path: str) -> bool:
    """Return whether --rewind-to can change the recipe's value at a dotted path."""
    section, *keys = path.split(".")
    if section == "hyperparameters" and keys[0] in {"modules", "depth"}:
        return keys[-1] in HYPERPARAMETERS
    return section in SECTIONS or (section == "hyperparameters" and keys[0] in HYPERPARAMETERS)


def describe_changes(changes: list[Difference]) -> str:
    """Return the values of a run or study that a new recipe changes, as one line with the old and the new value."""
    return "; ".join(f"{path} was {_brief(before)}, is now {_brief(now)}" for path, before, now in changes)


def _documents(path: Path, key: str) -> list[dict[str, Any]]:
    """Read a file with one JSON object per line, and return the objects that contain ``key``."""
    try:
        return [document for document in storage.read_json_lines(path).documents if key in document]
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None


def _brief(value: Any) -> str:
    return "not set" if value is None else f"{value}"
