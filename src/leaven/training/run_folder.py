"""Reads and writes the folder of a run: recipe, metrics (one line per step), events and checkpoints. This module does
not import torch."""

import json
import math
import os
import re
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from fnmatch import fnmatch
from hashlib import blake2b
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from leaven import storage
from leaven.errors import InputError
from leaven.recipe.files import finite, read_recipe, read_text, write_recipe
from leaven.recipe.recipe import Difference, Recipe, differences, rearrangement
from leaven.training.line_digests import LinesDigest, digest, kept_metrics, lines_digest

LOCK = ".lock"
UNFINISHED = ".tokens-*.tmp"  # names of checkpoints that are being written, or were when the process was killed
_CHECKPOINT = re.compile(r"tokens-([0-9]{15}|[1-9][0-9]{15,17})")
_EMPTY_CURVES = 512  # bytes; a TensorBoard file without a curve is smaller
WRONG_TYPES = ValueError, LookupError, TypeError, AttributeError  # raised by a JSON document that was changed
RETURNS = ("rollback", "rewind")  # names of the events of automatic and manual rewinds
IDENTITY = "run"  # key of the run's identifier in its events and in the state of its checkpoints
MODEL = "model"  # key of the recipe's [model] in the state of a run's checkpoints
TOKENIZER = "tokenizer"  # key of the digest of tokenizer.json in the state of a run's checkpoints
DAMAGED_EVENTS = "restore the file from a copy, or start again with another --run"

# The values that events must have, because a run that is resumed relies on them.
_NUMBER = int, float
_OF_RETURN: dict[str, tuple[type, ...]] = {
    "tokens": (int,),
    "to_tokens": (int,),
    "skip_from": (int,),
    "skip_to": (int,),
    "lr": _NUMBER,
    "lr_tokens": (int,),
    "attempt": (int,),
    "found_step": (int,),
}
_VALUES_OF_EVENTS: dict[str, dict[str, tuple[type, ...]]] = {
    "rollback": _OF_RETURN | {"why": (str,)},
    "rewind": _OF_RETURN | {"asked": (dict,)},
    "stop": {"why": (str,)},
    "finish": {"step": (int,), "tokens": (int,), "seconds": _NUMBER, "loss": (*_NUMBER, type(None))},
}

# The values that --rewind-to may change, because every step reads them from the recipe. Other keys define the model,
# the data or the initial values; the batch sizes determine at which token count a step starts.
SECTIONS = ("schedule", "stability", "evaluation")
HYPERPARAMETERS = ("lr", "weight_decay", "momentum", "beta1", "beta2", "eps", "grad_clip")


@contextmanager
def locked_folder(folder: Path, kind: str) -> Iterator[None]:
    """Create a folder if necessary, and lock it for this process. The lock is released when the process ends, even if
    it is killed.

    Raises:
        InputError: if another process has locked the folder, or it cannot be created.
    """
    storage.make_folder(folder)
    with ExitStack() as held:
        try:
            held.enter_context(storage.lock(folder / LOCK, seconds=0))
        except TimeoutError:
            raise InputError(
                f"{kind} {folder} is in use by another process; wait until that process ends, or use another {kind}"
            ) from None
        yield


def checkpoints(folder: Path) -> list[Path]:
    """Return the paths of the checkpoints in a folder, fewest tokens first. Damaged checkpoints are included until
    they are found and renamed to ``damaged-NAME``. Other names, such as those of a user's copies, are ignored."""
    return sorted((path for path in folder.glob("tokens-*") if _CHECKPOINT.fullmatch(path.name)), key=tokens_of)


def checkpoint_name(tokens: int) -> str:
    """Return the name of the folder of the checkpoint at this number of trained tokens."""
    return f"tokens-{tokens:015d}"


def missing_checkpoint(saved: int | None, found: int) -> str | None:
    """Return the name of the newest checkpoint that was saved, if only older checkpoints were found. Otherwise return
    None.

    ``saved`` and ``found`` are numbers of trained tokens: at the newest checkpoint that was saved (None: no
    checkpoint was saved), and at the newest one that was found. ``saved`` is the result of
    :meth:`RunFolder.newest_saved`. Call that method before reading checkpoints, because the run may be writing a
    newer one.
    """
    return None if saved is None or saved <= found else checkpoint_name(saved)


def tokens_of(path: Path) -> int:
    """Return the number of tokens trained at a checkpoint, read from the name of its folder."""
    return int(path.name.removeprefix("tokens-"))


def read_state(checkpoint: Path) -> dict[str, Any]:
    """Return the content of a checkpoint's state.json.

    Raises:
        ValueError: if the file is damaged, or belongs to another checkpoint.
        OSError: if it cannot be read.
    """
    file = checkpoint / "state.json"
    state = storage.json_object(storage.read(file))
    if state is None or state.pop("blake2b", None) != state_digest(state):
        raise ValueError(f"{file} is damaged")
    if state.get("tokens") != tokens_of(checkpoint):
        raise ValueError(f"{checkpoint} is a copy of another checkpoint")
    return state


def state_digest(state: Mapping[str, Any]) -> str:
    """Return the digest of ``state``. The file state.json contains these values and this digest."""
    return blake2b(json.dumps(state, sort_keys=True).encode(), digest_size=16).hexdigest()


class RunFolder:
    """The folder of a run on disk.

    If a line of metrics.jsonl or events.jsonl cannot be written, for example because the disk is full, it is kept in
    memory and written later. Meanwhile ``unwritten`` is the error message.

    ``writes`` is true in only one process of a run. In the other processes, lines and recipes are not written.
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
        self._waiting: deque[tuple[Path, bytes]] = deque()
        self._lock: os.stat_result | None = None  # the lock file, once this process holds the lock
        self._lines, self._digest = 0, digest(())  # number and digest of the lines of metrics.jsonl

    def recipe(self) -> Recipe:
        """Return the run's current recipe. It is correct even if the process was killed after a manual rewind was
        recorded and before the recipe file was written."""
        changed = [event["recipe"] for event in self.events() if "recipe" in event]
        try:
            return Recipe.model_validate(changed[-1]) if changed else read_recipe(self.recipe_file)
        except ValidationError:
            raise InputError(f"{self._events}: its last recipe is damaged; {DAMAGED_EVENTS}") from None

    def check(self, recipe: Recipe) -> None:
        """Check that this folder does not exist, is empty, or contains a run of this recipe.

        Raises:
            InputError: if the folder contains anything else. Nothing is written.
        """
        storage.require_folder_name(self.path)
        if self.path.exists() and not self.path.is_dir():
            raise InputError(f"{self.path} is a file; --run needs a folder")
        if not self.recipe_file.exists():
            # Temporary files left by an interrupted write of the recipe, the first file, belong to this run.
            known = (LOCK, f".{self.recipe_file.name}.*.tmp")
            entries = self.path.iterdir() if self.path.exists() else ()
            if not all(entry.is_file() and any(fnmatch(entry.name, name) for name in known) for entry in entries):
                raise InputError(f"run folder {self.path} is not empty and holds no recipe.toml; use another --run")
            if self._torchrun_has_trained():
                raise InputError(
                    f"run folder {self.path} was deleted or moved since torchrun started; bring it back (is its disk "
                    "mounted?) and run torchrun again, which starts a new run if the folder is still missing"
                )
            return
        changes = changes_of(self.recipe(), recipe)
        if changes:
            possible = all(changeable(path) for path, _, _ in changes)
            or_back = ", or --rewind-to to change the recipe from a checkpoint on" if possible else ""
            raise InputError(
                f"run folder {self.path} holds a run of another recipe: {describe_changes(changes)}; "
                f"use another --run{or_back}"
            )
        state = self.newest_state()
        identity = state.get(IDENTITY)
        self.check_identity(identity if isinstance(identity, str) else None)
        self.check_tokenizer(state)
        if not checkpoints(self.checkpoints) and self.finish() is None and (trained := self.trained()):
            raise InputError(
                f"run folder {self.path} has no checkpoints, but {trained}; bring back {self.checkpoints} "
                "(is its disk mounted?), or start again with another --run"
            )

    def trained(self) -> str | None:
        """If a file shows that the run has saved a checkpoint, return a sentence with the name of the file and what
        it says. Otherwise return None.

        An example is "events.jsonl says that it has trained 1,024 tokens". Metrics and curves do not count if the
        folder has an unfinished checkpoint, because then the run was killed while it saved its first one.
        """
        events = self.events()
        saved = [tokens for tokens in map(_saved_tokens, events) if tokens is not None]
        if saved:
            return f"{self._events.name} says that it has trained {saved[-1]:,} tokens"
        first_save_failed = any(event["event"] == "checkpoint_failed" for event in events)
        if not first_save_failed and not any(self.checkpoints.glob(UNFINISHED)):
            if lines := self.metrics():
                return f"{self._metrics.name} says that it has trained {lines[-1]['step']:,} steps"
            if (file := self._trained_file(begun=bool(events))) is not None:
                return f"{file.relative_to(self.path)} says that it has been trained"
        return "it had saved one before torchrun restarted it" if self._torchrun_has_trained() else None

    def _trained_file(self, begun: bool) -> Path | None:
        """Return plan.json or a TensorBoard file that shows that the run has trained, or None. ``begun`` says whether
        events.jsonl has a line. Then only a plan.json with measured steps counts, because the first one is written
        before the first step."""
        if self.plan_file.is_file() and (not begun or self._measured_steps()):
            return self.plan_file
        if begun and self._metrics.is_file():
            return None  # a run that starts again empties its metrics and keeps the curves of its first start
        curves = (file for file in self.path.glob("tensorboard/*") if file.is_file())
        return next((file for file in curves if file.stat().st_size > _EMPTY_CURVES), None)

    def _measured_steps(self) -> bool:
        """Return whether plan.json says that steps of the run were timed."""
        try:
            rows = (storage.json_object(storage.read(self.plan_file)) or {})["rows"]
            return any(row["steps"] > 0 for row in rows)
        except (OSError, *WRONG_TYPES):  # damaged or of an older version
            return False

    def mark_trained(self) -> None:
        """Tell later restarts of this process by torchrun that the run has saved a checkpoint. Without torchrun, do
        nothing."""
        mark = _torchrun_mark()
        if mark is not None:
            with suppress(OSError):
                mark.write_text(str(self.path.absolute()), encoding="utf-8")

    def _torchrun_has_trained(self) -> bool:
        """Return whether :meth:`mark_trained` was called for this folder since torchrun was started."""
        mark = _torchrun_mark()
        try:
            return mark is not None and mark.read_text(encoding="utf-8") == str(self.path.absolute())
        except (OSError, ValueError):
            return False

    def newest_saved(self) -> int | None:
        """Return the number of trained tokens at the newest checkpoint according to events.jsonl. Only checkpoints
        since the last rewind count; return None if there are none."""
        for event in reversed(self.events()):
            if event["event"] in RETURNS:
                break
            if (tokens := _saved_tokens(event)) is not None:
                return tokens
        return None

    def check_text(self, fingerprint: str, saved: str | None = None) -> None:
        """Raise InputError if the run was started on another text, that is, on one with another ``fingerprint``.

        The fingerprint of the run's own text is in events.jsonl. If it is not there, the fingerprint in a checkpoint
        of the run, ``saved``, is used. If both are missing, nothing is compared.
        """
        before = next((event["text"] for event in self.events() if "text" in event), saved or fingerprint)
        if before != fingerprint:
            raise InputError(
                f"the run in {self.path} was trained on other text: the files of [data] source or the tokenizer have "
                "changed since; use another --run"
            )

    def identity(self) -> str | None:
        """Return the random identifier that the run got at its start, or None if events.jsonl has none."""
        return next((event[IDENTITY] for event in self.events() if isinstance(event.get(IDENTITY), str)), None)

    def newest_state(self) -> dict[str, Any]:
        """Return the state of the callbacks in the newest checkpoint whose state.json is undamaged, or an empty
        dict."""
        for path in reversed(checkpoints(self.checkpoints)):
            with suppress(OSError, *WRONG_TYPES):  # damage is reported when the checkpoint is loaded
                return dict(read_state(path)["state"])
        return {}

    def tokenizer_digest(self) -> str | None:
        """Return a digest of tokenizer.json, or None if there is no such file."""
        if not self.tokenizer_file.is_file():
            return None
        return blake2b(_content(self.tokenizer_file), digest_size=16).hexdigest()

    def check_tokenizer(self, state: Mapping[str, Any]) -> None:
        """Raise InputError if tokenizer.json is not that of the checkpoint with this ``state``. If the file or the
        digest in the checkpoint is missing, do nothing."""
        saved, there = state.get(TOKENIZER), self.tokenizer_digest()
        if isinstance(saved, str) and there not in {None, saved}:
            raise InputError(
                f"{self.tokenizer_file} is not the tokenizer with which the run was trained; bring back the file of "
                "this run"
            )

    def changed_recipe(self, recipe: Recipe, state: Mapping[str, Any]) -> str | None:
        """Return a sentence if [model] of ``recipe``, read from recipe.toml, is not that of the checkpoint of
        ``state``, else None. Keys that only one of them has do not count: an older version of leaven wrote the
        checkpoint."""
        saved, here = state.get(MODEL), recipe.model.model_dump(mode="json")
        changed = [key for key in here if isinstance(saved, dict) and key in saved and saved[key] != here[key]]
        if not changed:
            return None
        return (
            f"{self.recipe_file} has another model.{changed[0]} than the checkpoint, so it is not the model that was "
            "trained; bring back the file of this run"
        )

    def check_identity(self, saved: str | None) -> None:
        """Raise InputError if the identifiers in a checkpoint (``saved``) and in events.jsonl differ. If one of them
        is missing, as in runs of older versions of leaven, do nothing."""
        if saved is not None and self.identity() not in {None, saved}:
            raise InputError(
                f"{self._events} and {self.checkpoints} belong to different runs; bring back those of one run, or "
                "start again with another --run"
            )

    @contextmanager
    def opened(self, recipe: Recipe) -> Iterator[None]:
        """Create the folder if necessary, and lock it for this process. If it has no recipe file, write ``recipe``.

        Call :meth:`check` before this method, so that no folder is created for a recipe that is refused.
        """
        with locked_folder(self.path, "run folder"):
            self.check(recipe)  # again: another process may have started a run here before this one locked the folder
            for file in (self.recipe_file, self.plan_file):
                for torn in self.path.glob(f".{file.name}.*.tmp"):
                    if torn.is_file():
                        torn.unlink()
            if not self.recipe_file.exists():
                write_recipe(recipe, self.recipe_file)
            self._lock = (self.path / LOCK).stat()
            yield

    def require_there(self) -> None:
        """Raise InputError if the folder that :meth:`opened` has locked was deleted or moved, even if another process
        has made a folder of the same name since."""
        if self._lock is None:
            return
        try:
            there = os.path.samestat(self._lock, (self.path / LOCK).stat())
        except (FileNotFoundError, NotADirectoryError):
            there = False
        except OSError:  # a fault of the disk
            return
        if there:
            return
        self.writes = False
        raise InputError(
            f"run folder {self.path} was deleted or moved while it was used; bring it back (is its disk mounted?) "
            "and run the same command again, or start again with another --run"
        )

    def change_recipe(self, recipe: Recipe, changes: list[Difference], since: str) -> Recipe:
        """Write ``recipe`` as the run's recipe, and return it. For each change, the ``why`` of the recipe gets a
        reason, such as "since 1,000 tokens; before: 0.01"."""
        why = {path: f"since {since}; before: {_brief(before)}" for path, before, _ in changes}
        recipe = recipe.replace({"why": self.recipe().why | recipe.why | why})
        if self.writes:
            write_recipe(recipe, self.recipe_file)
        return recipe

    def keep_tokenizer(self, path: Path) -> None:
        """Copy the tokenizer into the folder, because weights are useless without it and the cache may be cleared."""
        if self.writes and not self.tokenizer_file.exists():
            storage.write_text(self.tokenizer_file, read_text(path))

    def truncate_metrics(self, step: int, written: LinesDigest | None = None) -> str | None:
        """Remove the lines of metrics.jsonl for steps after ``step``, because these steps will be repeated. Remove an
        incomplete last line, too. The file is truncated in place, which works even on a full disk.

        ``written`` is the :meth:`metrics_digest` that was saved at this step. If the remaining lines do not have this
        digest, return a sentence that says what has changed. Otherwise return None.
        """
        waiting = [line for path, line in self._waiting if path == self._metrics]
        self._waiting = deque((path, line) for path, line in self._waiting if path != self._metrics)
        if not self.writes:
            return None
        content = _content(self._metrics)
        on_disk = content.split(b"\n")[:-1]
        lines = [*(line + b"\n" for line in on_disk), *waiting]
        kept, difference = kept_metrics(lines, step, written)
        size = sum(map(len, lines[: min(kept, len(on_disk))]))
        if size < len(content):
            os.truncate(self._metrics, size)
        self._waiting.extend((self._metrics, line) for line in lines[len(on_disk) : kept])
        self._lines, self._digest = kept, digest(lines[:kept])
        return difference

    def metrics_digest(self) -> LinesDigest:
        """Return the number and the digest of all lines of metrics.jsonl, including lines that are still in
        memory."""
        return LinesDigest(self._lines, self._digest.hexdigest())

    def events_digest(self) -> LinesDigest:
        """Return the number and the digest of all lines of events.jsonl, including lines that are still in memory."""
        lines = [*self._lines_of(self._events), *(line for path, line in self._waiting if path == self._events)]
        return LinesDigest(len(lines), digest(lines).hexdigest())

    def changed_since(self, finish: dict[str, Any]) -> dict[str, str]:
        """Compare metrics.jsonl and events.jsonl with their digests in the ``finish`` event. Return the names of the
        files that differ, each with a sentence that says how. If the event has no digests, because an older version
        of leaven wrote it, return an empty dict."""
        metrics, events = (lines_digest(finish.get(key)) for key in ("metrics", "events"))
        found: dict[str, str | None] = {}
        if metrics is not None and isinstance(finish.get("step"), int):
            found[self._metrics.name] = kept_metrics(self._lines_of(self._metrics), finish["step"], metrics)[1]
        if events is not None:
            found[self._events.name] = self.events_changed(events)
        return {file: why for file, why in found.items() if why is not None}

    def events_changed(self, written: LinesDigest | None) -> str | None:
        """Return a message if the first lines of events.jsonl do not have the digest ``written``, else None.

        If ``written`` is None, return a message only if the file is empty or missing.
        """
        lines = self._lines_of(self._events)
        if not lines:
            return "its lines are missing"
        if written is None or digest(lines[: written.lines]).hexdigest() == written.blake2b:
            return None
        if len(lines) < written.lines:
            return f"it had {written.lines:,} lines and now has {len(lines):,}"
        return f"its first {written.lines:,} lines have been changed"

    def _lines_of(self, path: Path) -> list[bytes]:
        """Return the lines of a file with their newlines. An incomplete last line does not count: the next
        append completes or removes it."""
        *lines, last = _content(path).split(b"\n")
        return [line + b"\n" for line in (lines if storage.json_object(last) is None else [*lines, last])]

    def metrics(self) -> list[dict[str, Any]]:
        """Return the lines of metrics.jsonl in order of steps. If a step was repeated, return only its last line."""
        return self.read_metrics().documents

    def read_metrics(self) -> storage.JsonLines:
        """Return the lines of :meth:`metrics`, and the line numbers of damaged lines. A line also counts as damaged
        if its step is not between the steps of the lines around it."""
        read = _read(self._metrics)
        numbered = [
            (number, line)
            for number, line in zip(read.numbers, read.documents, strict=True)
            if isinstance(line.get("step"), int)
        ]
        steps = [line["step"] for _, line in numbered]
        lines: list[tuple[int, dict[str, Any]]] = []
        damaged = list(read.damaged)
        for (number, line), following in zip(numbered, [*steps[1:], math.inf], strict=False):
            before = lines[-1][1]["step"] if lines else -math.inf
            if before < following and not before < line["step"] < following:
                damaged.append(number)
                continue
            while lines and lines[-1][1]["step"] >= line["step"]:
                lines.pop()
            lines.append((number, line))
        return storage.JsonLines([line for _, line in lines], sorted(damaged), [number for number, _ in lines])

    def events(self) -> list[dict[str, Any]]:
        """Return the lines of events.jsonl.

        Raises:
            InputError: if an event lacks a value that is needed to resume a run, or has a wrong value in its place.
        """
        read = _read(self._events)
        for number, event in zip(read.numbers, read.documents, strict=True):
            needed = _VALUES_OF_EVENTS.get(event["event"], {}) if isinstance(event.get("event"), str) else {}
            for key, types in needed.items():
                value = event.get(key, ...)
                if not isinstance(value, types) or isinstance(value, bool):
                    wrong = f"has no {key}" if value is ... else f"has a wrong {key}"
                    raise InputError(
                        f"{self._events}: the event {event['event']} in line {number} {wrong}; {DAMAGED_EVENTS}"
                    )
        return _named_events(read)

    def read_events(self) -> list[dict[str, Any]]:
        """Return the lines of events.jsonl without checking their values."""
        return _named_events(_read(self._events))

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
        return finish_of(self.events())

    def record(self, line: dict[str, Any]) -> None:
        """Append a line to metrics.jsonl. Numbers that are not finite are written as null."""
        written = _json_line(line)
        self._lines += 1
        self._digest.update(written)
        self._append(self._metrics, written)

    def event(self, event: str, **values: Any) -> None:
        """Append a line to events.jsonl, with the time in seconds since 1970."""
        self._append(self._events, _json_line({"event": event, **values, "time": round(time.time(), 3)}))
        if self.writes and event in RETURNS and self.unwritten is None:
            with suppress(OSError):
                storage.sync_file(self._events)  # before the run rolls back

    def require_written(self) -> None:
        """Write the lines that are still in memory, and check that none is left.

        Raises:
            InputError: if some lines cannot be written, for example because the disk is full.
        """
        self._write()
        if self.unwritten is not None:
            raise InputError(
                f"{self._waiting[0][0]}: cannot be written: {self.unwritten}; "
                "make room and run the same command again"
            )

    def _append(self, path: Path, line: bytes) -> None:
        if not self.writes:
            return
        self.require_there()
        self._waiting.append((path, line))
        self._write()

    def _write(self) -> None:
        while self._waiting:
            path, line = self._waiting[0]
            try:
                storage.append(path, line)
            except OSError as error:
                self.unwritten = error.strerror or str(error)
                return
            self._waiting.popleft()
        self.unwritten = None


def _torchrun_mark() -> Path | None:
    """Return the path of a file that shows to later processes of the same torchrun that the run has trained.

    The file is in a log folder that torchrun makes at its start, and keeps when it restarts its processes. Return
    None without torchrun, or if it has no log folder.
    """
    attempt = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", "")).parent.parent
    return attempt.parent / "leaven-run" if attempt.name.startswith("attempt_") else None


def _saved_tokens(event: dict[str, Any]) -> int | None:
    """Return the number of trained tokens at the checkpoint that the event mentions, or None if it mentions none."""
    tokens = event.get("tokens") if event["event"] in ("checkpoint", "resume") else None
    return tokens if isinstance(tokens, int) else None


def _json_line(document: dict[str, Any]) -> bytes:
    return json.dumps(finite(document)).encode() + b"\n"


def finish_of(events: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the last ``finish`` event. Return None if there is no such event, or if the run was rewound after it."""
    for event in reversed(events):
        if event["event"] == "finish":
            return dict(event)
        if event["event"] in RETURNS:
            break
    return None


def _named_events(read: storage.JsonLines) -> list[dict[str, Any]]:
    return [document for document in read.documents if isinstance(document.get("event"), str)]


def _content(path: Path) -> bytes:
    """Return the content of a file, or nothing if it is missing."""
    try:
        return storage.read(path, math.inf)
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None


def _read(path: Path) -> storage.JsonLines:
    try:
        return storage.read_json_lines(path)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None


def changes_of(there: Recipe, here: Recipe) -> list[Difference]:
    """Return the differences between two recipes that prevent a run of the recipe ``there`` from being resumed with
    the recipe ``here``. Differences in layout and micro-batch do not prevent it."""
    free = rearrangement(there, here)
    return [change for change in differences(there, here) if change not in free]


def changeable(path: str) -> bool:
    """Return whether ``--rewind-to`` may change the value at a dotted path of the recipe."""
    section, *keys = path.split(".")
    if section == "hyperparameters" and keys[0] in {"modules", "depth", "muon"}:
        return keys[-1] in HYPERPARAMETERS
    return section in SECTIONS or (section == "hyperparameters" and keys[0] in HYPERPARAMETERS)


def describe_changes(changes: list[Difference]) -> str:
    """Return the changes of a recipe on one line, such as "batch.tokens was 256, is now 512"."""
    return "; ".join(f"{path} was {_brief(before)}, is now {_brief(now)}" for path, before, now in changes)


def recorded_changes(changes: list[Difference], recipe: Recipe) -> dict[str, Any]:
    """Return the values that an event records when it changes the recipe of a run: ``changes``, and the new
    ``recipe``."""
    listed = [{"path": path, "before": before, "after": after} for path, before, after in changes]
    return {"changes": listed, "recipe": recipe.model_dump(mode="json", exclude_none=True)}


def _brief(value: Any) -> str:
    return "not set" if value is None else str(value).lower() if isinstance(value, bool) else f"{value}"
