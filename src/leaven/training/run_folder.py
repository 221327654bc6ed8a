"""Reads and locks the folder of a run, and writes its recipe. Does not import torch.

The folder has recipe.toml, tokenizer.json, metrics.jsonl (a line for each step), events.jsonl (such as start,
validation and finish), plan.json (planned and measured time and memory), checkpoints/ and tensorboard/.
"""

import errno
import json
import math
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any

from leaven import storage
from leaven.documents import DIGEST, digest_of
from leaven.errors import InputError
from leaven.recipe.files import read_recipe, read_text, write_recipe
from leaven.recipe.recipe import Difference, Recipe, differences, rearrangement

LOCK = ".lock"
OWNER = ".run"  # file in the folder of checkpoints: the path of the run or study that uses it
UNFINISHED = ".tokens-*.tmp"  # names of checkpoints that are being written, or whose writing was killed
_CHECKPOINT = re.compile(r"tokens-([0-9]{15}|[1-9][0-9]{15,17})")
WRONG_TYPES = ValueError, LookupError, TypeError, AttributeError  # errors that reading a damaged JSON document raises
RETURNS = ("rollback", "rewind")  # names of the events of automatic and manual rewinds
IDENTITY = "run"  # key of the run's identifier in events, metrics, plan.json and the state of a checkpoint
DAMAGED_EVENTS = "restore the file from a copy, or start again with another --run"

# The values that events must have, because a resumed run reads them.
_NUMBER = int, float
_OF_RETURN: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("tokens", "to_tokens", "skip_from", "skip_to"), (int,)),
    "lr": _NUMBER,
    **dict.fromkeys(("lr_tokens", "attempt", "found_step"), (int,)),
    "earlier_rewinds": (list,),
}
_VALUES_OF_EVENTS: dict[str, dict[str, tuple[type, ...]]] = {
    "rollback": _OF_RETURN | {"why": (str,)},
    "rewind": _OF_RETURN | {"asked": (dict,)},
    "stop": {"why": (str,)},
    "finish": {"step": (int,), "tokens": (int,), "seconds": _NUMBER, "loss": _NUMBER},
}
_OPTIONAL_VALUES: dict[str, tuple[type, ...]] = {  # of any event; may be missing or null
    **dict.fromkeys(("bits_per_byte", "averaged_loss", "peak_tflops", "seconds"), _NUMBER),
    "mfu_convention": (str,),
}

# The values that --rewind-to may change, because every step reads them from the recipe. Other keys define the model,
# the data or the initial values; the batch sizes determine at which token count a step starts.
SECTIONS = ("schedule", "stability", "evaluation")
HYPERPARAMETERS = ("lr", "weight_decay", "momentum", "beta1", "beta2", "eps", "grad_clip")


class LockedFolder:
    """A context manager that locks a folder, and creates it if it is missing. Raise InputError if another process has
    locked it. ``kind`` is what messages call the folder, such as "run folder"."""

    def __init__(self, path: Path, kind: str) -> None:
        self._path, self._kind, self._held = path, kind, ExitStack()

    def __enter__(self) -> "LockedFolder":
        storage.make_folder(self._path)
        self._take()
        self._there = self._path.stat()
        return self

    def __exit__(self, *exception: object) -> None:
        self._held.close()

    def _take(self) -> None:
        try:
            self._held.enter_context(storage.lock(self._path / LOCK, seconds=0))
        except TimeoutError:
            raise InputError(
                f"{self._kind} {self._path} is in use by another process; wait until that process ends, or use "
                f"another {self._kind}"
            ) from None
        self._lock = (self._path / LOCK).stat()

    def require(self) -> None:
        """Lock the folder again if its lock file was removed. Raise InputError if the folder was deleted or moved."""
        try:
            if os.path.samestat(self._lock, (self._path / LOCK).stat()):
                return
        except (FileNotFoundError, NotADirectoryError):
            pass
        except OSError:  # the disk has a fault, so nothing is known
            return
        with suppress(OSError):
            if os.path.samestat(self._there, self._path.stat()):
                self._held.close()
                self._take()
                return
        raise InputError(
            f"{self._kind} {self._path} was deleted or moved while it was used; bring it back (is its disk mounted?) "
            "and run the same command again, or start again with another --run"
        )


def checkpoints(folder: Path) -> list[Path]:
    """Return the paths of all checkpoints in a folder, damaged or not. Fewest tokens come first."""
    return sorted((path for path in folder.glob("tokens-*") if _CHECKPOINT.fullmatch(path.name)), key=tokens_of)


def checkpoint_name(tokens: int) -> str:
    """Return the folder name of the checkpoint after ``tokens`` trained tokens."""
    return f"tokens-{tokens:015d}"


def checkpoint_interval(recipe: Recipe) -> int:
    """Return the number of tokens between two scheduled checkpoints of a run."""
    return recipe.stability.checkpoint_every_tokens or max(recipe.data.tokens // 10, 1)


def tokens_of(path: Path) -> int:
    """Return the number of tokens trained at a checkpoint, read from the name of its folder."""
    return int(path.name.removeprefix("tokens-"))


def read_state(checkpoint: Path) -> dict[str, Any]:
    """Return the content of a checkpoint's state.json. Raise ValueError if it is damaged or belongs to another
    checkpoint, and OSError if it cannot be read."""
    file = checkpoint / "state.json"
    state = storage.json_object(storage.read(file))
    if state is None or state.pop(DIGEST, None) != digest_of(state):
        raise ValueError(f"{file} is damaged")
    if state.get("tokens") != tokens_of(checkpoint):
        raise ValueError(f"{checkpoint} was copied or renamed: its state.json is from another checkpoint")
    return state


class RunFolder:
    """The folder of a run on disk. :class:`leaven.training.run_lines.RunLines` writes metrics and events."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.writes = True  # True in one process of a run; the others write no lines and no recipe
        self.checkpoints = path / "checkpoints"
        self.recipe_file = path / "recipe.toml"
        self.tokenizer_file = path / "tokenizer.json"
        self.plan_file = path / "plan.json"
        self.metrics_file = path / "metrics.jsonl"
        self.events_file = path / "events.jsonl"
        self.identity = ""  # random identifier of the run; empty before the run starts
        self._locked: LockedFolder | None = None  # None until this process locks the folder
        self._claimed: int | None = None  # st_dev of the folder of checkpoints; None until it is claimed
        self._owners: set[str | None] = set()  # the owners that OWNER may name from then on

    def recipe(self) -> Recipe:
        """Return the recipe with which the run trains now: the last one that a manual rewind, a new layout or a new
        micro-batch recorded in events.jsonl, or else recipe.toml. Paths of text and tokenizer are always those in
        recipe.toml, if it exists."""
        change = self.last_change()
        if change is None:
            return read_recipe(self.recipe_file)
        data = change[0].data
        if self.recipe_file.exists():  # the text may have been moved since
            there = read_recipe(self.recipe_file).data
            data = data.model_copy(update={"source": there.source, "tokenizer": there.tokenizer})
        return change[0].model_copy(update={"data": data})

    def last_change(self) -> tuple[Recipe, dict[str, Any]] | None:
        """Return (recipe, {path: value before}) of the last change that events.jsonl records, or None if there is
        none or events are lost. Raise InputError if the recorded recipe is damaged."""
        events = self.read_events()
        changes = [event for event in events if "recipe" in event]
        if not changes or self.rewinds_ahead(events) > 0:
            return None
        try:
            recipe = Recipe.model_validate(changes[-1]["recipe"])
            return recipe, {each["path"]: each["before"] for each in changes[-1].get("changes", ())}
        except WRONG_TYPES:
            raise InputError(f"{self.events_file}: its last recipe is damaged; {DAMAGED_EVENTS}") from None

    def rewinds_ahead(self, events: Sequence[Mapping[str, Any]]) -> int:
        """Return how many more rewinds the newest undamaged checkpoint has recorded than ``events``. Above 0, events
        are lost. Below 0, the checkpoint is older than the last rewind, or there is none."""
        with suppress(*WRONG_TYPES):  # a damaged checkpoint is reported when it is loaded
            known = (len(event["earlier_rewinds"]) + 1 for event in events if event["event"] in RETURNS)
            return len(newest_document(self)["rewinds"]) - max(known, default=0)
        return -1

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Create the folder if necessary, and lock it for this process."""
        with LockedFolder(self.path, "run folder") as self._locked:
            yield

    def begin(self, recipe: Recipe) -> None:
        """Remove files of interrupted writes, and write the recipe file if it is missing or out of date."""
        for file in (self.recipe_file, self.plan_file):
            for torn in self.path.glob(f".{file.name}.*.tmp"):
                if torn.is_file():
                    torn.unlink()
        if not self.recipe_file.exists():
            self.save_recipe(recipe.of_new_run)
        elif differences(read_recipe(self.recipe_file), current := self.recipe()):
            self.save_recipe(current, also_in_events=True)

    def claim_checkpoints(self) -> None:
        """Mark the folder of checkpoints as used by this run or study. Raise InputError if another one uses it."""
        if self._claimed is not None or not self.writes:
            return
        with suppress(OSError):  # the file is needed only to detect that another run uses the folder
            self.checkpoints.mkdir(exist_ok=True)
            self.require_own_checkpoints()
            self._claimed = self.checkpoints.stat().st_dev  # before the write, which fails on a full disk
            ours, self._owners = str(self.path.resolve()), {self.owner()}
            if ours not in self._owners:
                self._owners.add(ours)
                storage.write(self.checkpoints / OWNER, os.fsencode(ours) + b"\n")

    def owner(self) -> str | None:
        """Return the path of the run or study that uses the checkpoints, "" if none does, None if this is unknown."""
        with suppress(OSError):
            # The path may have line breaks. An earlier version wrote a number in a line of its own behind it.
            return os.fsdecode(re.sub(rb"\n\d*\Z", b"", storage.read(self.checkpoints / OWNER)))
        return None

    def require_claimed(self) -> None:
        """Raise OSError if the disk with the checkpoints is not mounted, or if another run's disk is in its place."""
        if self._claimed is None:
            return
        if (self.checkpoints / OWNER).exists():
            if (owner := self.owner()) and owner not in self._owners:
                raise OSError(errno.ESTALE, f"these are the checkpoints of {owner}; mount the disk of this run again")
            return
        there = self.checkpoints if self.checkpoints.exists() else self.path
        if there.stat().st_dev != self._claimed:
            raise OSError(errno.ESTALE, f"{os.strerror(errno.ESTALE)}; mount the disk of this folder again")

    def require_own_checkpoints(self, *, rewinds: bool = False) -> None:
        """Raise InputError if ``checkpoints`` is a link to a folder that another run or study uses, as after ``cp
        -r`` of a run with such a link. With ``rewinds``, also raise InputError for a link to checkpoints without the
        file ``OWNER``, because a rewind deletes checkpoints."""
        owner = self.owner()
        unknown = owner is None and rewinds and bool(checkpoints(self.checkpoints))
        if not self.checkpoints.is_symlink() or not (owner or unknown) or owner == str(self.path.resolve()):
            return
        folder, link = shlex.quote(str(self.checkpoints.resolve())), shlex.quote(str(self.checkpoints))
        unnamed = f"checkpoints without {OWNER}, the file that names their run"
        whose = f"the checkpoints of {owner}" if owner else unnamed
        unused = f"if no other run or study uses these checkpoints, type: echo > {folder}/{OWNER}"
        if owner and not os.path.exists(owner):
            raise InputError(f"{self.checkpoints} is a link to {whose}, which may have been moved; {unused}")
        raise InputError(
            f"{self.checkpoints} is a link to {whose}; {unused}; if {self.path} is a copy of another folder, copy "
            f"the checkpoints with: rm {link} && cp -r {folder} {link}; if not, make an empty folder with: "
            f"rm {link} && mkdir {link}"
        )

    def save_recipe(self, recipe: Recipe, *, also_in_events: bool = False) -> None:
        """Write the recipe file, keeping its comments. If events.jsonl has the recipe too, ignore a full disk."""
        try:
            write_recipe(recipe, self.recipe_file, read_text(self.recipe_file) if self.recipe_file.exists() else "")
        except InputError:
            if not (also_in_events and storage.is_full(self.path)):
                raise

    def require_there(self) -> None:
        """Set ``writes`` to False and raise InputError if the folder that this process locked is gone or moved."""
        try:
            if self._locked is not None:
                self._locked.require()
        except InputError:
            self.writes = False
            raise

    def keep_tokenizer(self, path: Path) -> None:
        """Copy the tokenizer at ``path`` into the run folder unless it has one. The original may be in a cache."""
        if self.writes and not self.tokenizer_file.exists():
            storage.write_text(self.tokenizer_file, read_text(path))

    def lines_of(self, path: Path) -> list[bytes]:
        """Return a file's lines, each with a newline. A last line without newline counts only if it is JSON."""
        *lines, last = _content(path).split(b"\n")
        return [line + b"\n" for line in (lines if storage.json_object(last) is None else [*lines, last])]

    def metrics(self) -> list[dict[str, Any]]:
        """Return the lines of metrics.jsonl in order of steps. If a step was repeated, only its last line counts."""
        return self.read_metrics().documents

    def read_metrics(self) -> storage.JsonLines:
        """Return the lines of :meth:`metrics`, and the line numbers of damaged lines. A line whose step is larger
        than the next line's is left out, because this step may be damaged."""
        read = _read(self.metrics_file)
        lines = [line for line in read.documents if isinstance(line.get("step"), int)]
        by_step = {
            line["step"]: line
            for line, after in pairwise([*lines, {"step": math.inf}])
            if line["step"] <= after["step"]
        }
        return replace(read, documents=[by_step[step] for step in sorted(by_step)], numbers=[])

    def events(self) -> list[dict[str, Any]]:
        """Return the events in events.jsonl. Raise InputError if a value that a resumed run needs is wrong."""
        read = _read(self.events_file)
        for number, event in zip(read.numbers, read.documents, strict=True):
            if not isinstance(event.get("event"), str):
                continue
            given = {key: types for key, types in _OPTIONAL_VALUES.items() if event.get(key) is not None}
            needed = _VALUES_OF_EVENTS.get(event["event"], {}) | given
            for key, types in needed.items():
                value = event.get(key, ...)
                if not isinstance(value, types) or isinstance(value, bool):
                    wrong = f"has no {key}" if value is ... else f"has a wrong {key}"
                    raise InputError(
                        f"{self.events_file}: the event {event['event']} in line {number} {wrong}; {DAMAGED_EVENTS}"
                    )
        return _named_events(read)

    def text(self) -> str | None:
        """Return the fingerprint of the training text that events.jsonl records, or None if it records none."""
        return next((event["text"] for event in self.read_events() if isinstance(event.get("text"), str)), None)

    def read_events(self) -> list[dict[str, Any]]:
        """Return the events in events.jsonl without checking their values."""
        return _named_events(self.event_lines())

    def event_lines(self) -> storage.JsonLines:
        """Return the lines of events.jsonl with their line numbers, and the line numbers of damaged lines."""
        return _read(self.events_file)

    def rollbacks(self) -> list[dict[str, Any]]:
        """Return the events of the automatic rewinds since the last manual rewind."""
        returns = [event for event in self.events() if event["event"] in RETURNS]
        return list(takewhile(lambda event: event["event"] == "rollback", reversed(returns)))[::-1]

    @property
    def begun(self) -> bool:
        return bool(checkpoints(self.checkpoints)) or self.finish() is not None

    def finish(self) -> dict[str, Any] | None:
        """Return the ``finish`` event of the run, or None before the finish or after a later rewind."""
        return finish_of(self.events())


def finish_of(events: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the ``finish`` event after the last rewind, or None."""
    for event in reversed(events):
        if event["event"] == "finish":
            return dict(event)
        if event["event"] in RETURNS:
            break
    return None


def _named_events(read: storage.JsonLines) -> list[dict[str, Any]]:
    return [document for document in read.documents if isinstance(document.get("event"), str)]


def _content(path: Path) -> bytes:
    try:
        return storage.read(path, math.inf)
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None


def newest_document(run: RunFolder, last_return: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the content of the newest undamaged state.json among the checkpoints, or {}. With ``last_return``, the
    event of the last rewind, leave out checkpoints that a rewind undid."""
    for path in reversed(checkpoints(run.checkpoints)):
        with suppress(OSError, *WRONG_TYPES):  # damage is reported when the checkpoint is loaded
            state = read_state(path)
            rewinds = [*last_return["earlier_rewinds"], last_return] if last_return else []
            if all(tokens_of(path) <= rewind["to_tokens"] for rewind in rewinds[len(state["rewinds"]) :]):
                return state
    return {}


def _parse_int(digits: str) -> int:
    """Parse an integer. Raise ValueError for more than 300 digits, which only a damaged line has."""
    if len(digits) > 300:
        raise ValueError("a number is too large")
    return int(digits)


_DECODER = json.JSONDecoder(parse_int=_parse_int)


def _read(path: Path) -> storage.JsonLines:
    storage.require_target(path, "bring it back")
    try:
        return storage.read_json_lines(path, lambda line: _DECODER.decode(line.decode("utf-8-sig")))
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None


def changes_of(there: Recipe, here: Recipe) -> list[Difference]:
    """Return the differences that keep a run of the recipe ``there`` from resuming with ``here``. Layout and
    micro-batch may differ."""
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
    return "; ".join(_change(path, brief(before), brief(now)) for path, before, now in changes)


def _change(path: str, before: str, now: str) -> str:
    if before == now or before.split() != now.split():
        return f"{path} was {before}, is now {now}"
    # Only spaces differ. Messages are shown with single spaces, so show the place with others.
    at = [a == b for a, b in zip(f"{before}\0", f"{now}\0", strict=False)].index(False)
    was, differs = (repr(text[max(0, at - 10) : at + 10])[1:-1].replace(" ", "·") for text in (before, now))
    return f"{path} was ...{was}..., is now ...{differs}... (· is a space)"


def recorded_changes(changes: list[Difference], recipe: Recipe) -> dict[str, Any]:
    """Return values for an event that records changes of a run's recipe. ``recipe`` is the new recipe."""
    listed = [{"path": path, "before": before, "after": after} for path, before, after in changes]
    return {"changes": listed, "recipe": recipe.model_dump(mode="json", exclude_none=True)}


def brief(value: Any) -> str:
    return "not set" if value is None else str(value).lower() if isinstance(value, bool) else f"{value}"
