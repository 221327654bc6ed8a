"""Checkpoints: a folder that is either whole or not there.

Files are written to a temporary folder beside it, synced, and renamed into place. ``state.json`` holds the length and
digest of every file, so that a damaged checkpoint is noticed and the one before it is used.
"""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from leaven.recipe.errors import InputError

KEEP = 2  # one to go on from, one in case it turns out damaged
_FILES = ("model.safetensors", "optimizer.safetensors")


@dataclass(frozen=True)
class Progress:
    """How far a run is: ``step`` steps done, ``tokens`` consumed, ``seconds`` spent on them."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Checkpoint:
    progress: Progress
    model: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]


def write_checkpoint(folder: Path, checkpoint: Checkpoint) -> Path:
    """Save into ``folder/tokens-NNN`` and drop all but the newest :data:`KEEP`.

    Raises:
        InputError: if the disk is full or not writable; older checkpoints are untouched.
    """
    final = folder / f"tokens-{checkpoint.progress.tokens:015d}"
    temporary = folder / f".{final.name}.tmp"
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        files = {}
        for name, tensors in zip(_FILES, (checkpoint.model, checkpoint.optimizer), strict=True):
            content = save({key: value.detach().cpu().contiguous() for key, value in tensors.items()})
            _write(temporary / name, content)
            files[name] = {"bytes": len(content), "blake2b": blake2b(content, digest_size=16).hexdigest()}
        state = asdict(checkpoint.progress) | {"format": 1, "files": files}
        _write(temporary / "state.json", json.dumps(state, indent=2).encode())
        if final.exists():  # left by a run that was rewound: same tokens, but perhaps a damaged file
            shutil.rmtree(final)
        temporary.rename(final)
        _sync_folder(folder)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        newest = next(_folders(folder), None)
        kept = f"{newest.name} is whole" if newest else "there is none before it"
        raise InputError(
            f"{final}: checkpoint not saved: {error.strerror or error}; {kept}; "
            "make room and run the same command again"
        ) from None
    for old in list(_folders(folder))[KEEP:]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def read_checkpoint(folder: Path) -> tuple[Checkpoint | None, list[Path]]:
    """The newest whole checkpoint (None if there is none), and the damaged ones that were passed over."""
    damaged: list[Path] = []
    for candidate in _folders(folder):
        try:
            return _read(candidate), damaged
        except (OSError, ValueError, KeyError, SafetensorError):
            damaged.append(candidate)
    return None, damaged


def _read(folder: Path) -> Checkpoint:
    state = json.loads((folder / "state.json").read_bytes())
    tensors = []
    for name in _FILES:
        content = (folder / name).read_bytes()
        expected = state["files"][name]
        if blake2b(content, digest_size=16).hexdigest() != expected["blake2b"]:
            raise ValueError(f"{folder / name} is damaged")
        tensors.append(load(content))
    return Checkpoint(Progress(state["step"], state["tokens"], state["seconds"]), *tensors)


def _folders(folder: Path) -> Iterator[Path]:
    """Checkpoints, newest first. Temporary ones begin with a dot and do not count."""
    return iter(sorted(folder.glob("tokens-*"), reverse=True))


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
