"""Checkpoints: a folder that is either whole or not there.

Files are written to a temporary folder beside it, synced, and renamed into place. ``state.json`` is written last: it
holds the length and digest of every file and of itself, so that a damaged checkpoint is noticed and the one before it
is used.
"""

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from leaven.recipe.errors import InputError
from leaven.training.rewind import Rewind, firsts, staying, undone

FORMAT = 2
_FILES = ("model.safetensors", "optimizer.safetensors")
_NAME = "tokens-*"  # with a dot before it one that is being written, with "damaged-" one that was passed over


@dataclass(frozen=True)
class Progress:
    """How far a run is: ``step`` steps done, ``tokens`` trained, ``seconds`` spent on them."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Checkpoint:
    """All that a run is made of at a step. ``state`` is what is no tensor, for JSON: the spike guard; ``rewinds`` are
    the returns of the run up to then."""

    progress: Progress
    model: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    state: Mapping[str, Any] = field(default_factory=dict)
    rewinds: tuple[Rewind, ...] = ()

    def copied(self) -> "Checkpoint":
        """In memory of the host that no training step writes to."""
        model, optimizer = (
            {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
            for tensors in (self.model, self.optimizer)
        )
        return replace(self, model=model, optimizer=optimizer)


def write_checkpoint(folder: Path, checkpoint: Checkpoint) -> Path:
    """Save into ``folder/tokens-NNN``, replacing one that is there.

    Raises:
        OSError, SafetensorError: if the disk is full or not writable; nothing of it is left and all others are
            untouched.
    """
    final = folder / f"tokens-{checkpoint.progress.tokens:015d}"
    temporary = folder / f".{final.name}.tmp"
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        for name, tensors in zip(_FILES, (checkpoint.model, checkpoint.optimizer), strict=True):
            save_file({key: value.detach().cpu().contiguous() for key, value in tensors.items()}, temporary / name)
        state = asdict(checkpoint.progress) | {
            "format": FORMAT,
            "rewinds": [asdict(rewind) for rewind in checkpoint.rewinds],
            "state": checkpoint.state,
            "files": {name: _synced(temporary / name) for name in _FILES},
        }
        with (temporary / "state.json").open("w", encoding="utf-8") as file:
            json.dump(state | {"blake2b": _digest_of(state)}, file, indent=1)
        _synced(temporary / "state.json")
        _sync_folder(temporary)
        if final.exists():  # undone since, or damaged: a run does not come twice to a whole one
            shutil.rmtree(final)
        temporary.rename(final)
        _sync_folder(folder)
    except (OSError, SafetensorError):
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return final


def read_checkpoint(
    folder: Path, rewinds: Sequence[Rewind] = (), tokens: int | None = None
) -> tuple[Checkpoint | None, list[Path]]:
    """The newest whole checkpoint (None if there is none), and the damaged ones that were passed over; with
    ``tokens``, of those at that many tokens only.

    One of a past that the run's ``rewinds`` have undone does not count.

    Raises:
        InputError: if one is there and cannot be read now: that says nothing of what is in it.
    """
    damaged: list[Path] = []
    for candidate in reversed(checkpoints(folder)):
        if tokens is not None and tokens_of(candidate) != tokens:
            continue
        try:
            found = _read(candidate)
        except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError, SafetensorError):
            damaged.append(candidate)
            continue
        except OSError as error:
            raise InputError(
                f"{candidate}: cannot be read: {error.strerror or error}; mend that and run the same command again"
            ) from None
        if not undone(rewinds, len(found.rewinds), found.progress.tokens):
            return found, damaged
    return None, damaged


def checkpoints(folder: Path) -> list[Path]:
    """Checkpoints, the oldest first, whole or not."""
    return sorted(folder.glob(_NAME))


def tokens_of(path: Path) -> int:
    """The tokens trained at a checkpoint, by its name."""
    return int(path.name.rpartition("-")[2])


def _read(folder: Path) -> Checkpoint:
    state = json.loads((folder / "state.json").read_bytes())
    if state.pop("blake2b") != _digest_of(state):
        raise ValueError(f"{folder / 'state.json'} is damaged")
    for name, expected in state["files"].items():
        if _fingerprint(folder / name) != expected:
            raise ValueError(f"{folder / name} is damaged")
    model, optimizer = (load_file(folder / name) for name in _FILES)
    progress = Progress(state["step"], state["tokens"], state["seconds"])
    rewinds = tuple(Rewind(**rewind) for rewind in state["rewinds"])
    return Checkpoint(progress, model, optimizer, state["state"], rewinds)


@dataclass(frozen=True)
class Saved:
    """What became of a checkpoint. ``error`` says why it is not there."""

    progress: Progress
    path: Path | None = None
    error: str | None = None


class Keeper:
    """Writes checkpoints while the training goes on, one at a time, and drops those that are no longer needed.

    ``keep`` counts those that are due, the first in each ``every_tokens``: one that a stop has added comes and goes
    without displacing any, so that a run that was stopped can go back as far as one that was not.
    """

    def __init__(self, folder: Path, every_tokens: int, keep: int, keep_every_tokens: int | None) -> None:
        self._folder, self._every, self._keep, self._keep_every = folder, every_tokens, keep, keep_every_tokens
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[Saved] | None = None

    def save(self, checkpoint: Checkpoint, good_tokens: int) -> None:
        """Begin to write; the state may change as soon as this returns. The newest due checkpoint of at most
        ``good_tokens`` stays, whatever comes after it."""
        assert self._writing is None, "ask outcome() first"
        self._writing = self._thread.submit(self._write, checkpoint.copied(), good_tokens)

    def outcome(self, wait: bool) -> Saved | None:
        """What became of the last one, once; None if there is nothing to tell, or not yet."""
        if self._writing is None or not (wait or self._writing.done()):
            return None
        saved, self._writing = self._writing.result(), None
        return saved

    def close(self) -> None:
        self._thread.shutdown()

    def clear(self, after_tokens: int, damaged: Sequence[Path] = ()) -> None:
        """Before a run goes on from ``after_tokens`` trained: move damaged checkpoints out of the way, and drop the
        whole ones after it, whose past has been undone, and what a kill has left half written."""
        for path in damaged:
            with suppress(OSError):
                path.replace(path.with_name(f"damaged-{path.name}"))
        for path in checkpoints(self._folder):
            if tokens_of(path) > after_tokens and path not in damaged:
                shutil.rmtree(path, ignore_errors=True)
        for path in self._folder.glob(f".{_NAME}.tmp"):
            shutil.rmtree(path, ignore_errors=True)

    def _write(self, checkpoint: Checkpoint, good_tokens: int) -> Saved:
        try:
            path = write_checkpoint(self._folder, checkpoint)
        except (OSError, SafetensorError) as error:
            said = getattr(error, "strerror", None) or str(error)
            return Saved(checkpoint.progress, error=said)
        for old in self._superfluous(good_tokens):
            shutil.rmtree(old, ignore_errors=True)
        return Saved(checkpoint.progress, path)

    def _superfluous(self, good_tokens: int) -> list[Path]:
        there = checkpoints(self._folder)
        due = firsts([tokens_of(path) for path in there], self._every, -1)
        stay = staying(due, good_tokens, self._keep, self._keep_every)
        return [path for path in there[:-1] if tokens_of(path) not in stay]


def _digest_of(state: Mapping[str, Any]) -> str:
    return blake2b(json.dumps(state, sort_keys=True).encode(), digest_size=16).hexdigest()


def _synced(path: Path) -> dict[str, Any]:
    """Sync a file; its length and digest."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return _fingerprint(path)


def _fingerprint(path: Path) -> dict[str, Any]:
    digest = blake2b(digest_size=16)
    with path.open("rb") as file:
        while piece := file.read(2**22):
            digest.update(piece)
    return {"bytes": path.stat().st_size, "blake2b": digest.hexdigest()}


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
