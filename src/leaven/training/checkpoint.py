"""Writes and reads checkpoints. A checkpoint is a folder that is either complete or absent.

Each process writes its parts of the tensors into a file for the model and a file for the optimizer. The
first process writes ``state.json`` with the digest of every file, and then renames the temporary folder.
If a digest does not match, an earlier checkpoint is used. The number of processes may change between
writing and reading.
"""

import json
import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from leaven import storage
from leaven.distributed.exchange import Exchange
from leaven.distributed.pieces import Place
from leaven.distributed.process_group import SINGLE_PROCESS, ProcessGroup
from leaven.documents import sealed
from leaven.errors import InputError, Settled
from leaven.recipe.recipe import Recipe
from leaven.storage import place_folder, share, sync_file
from leaven.training.average import AVERAGE
from leaven.training.checkpoint_tensors import SavedBlock, SavedTensor, Tensors, dtype_name, merged
from leaven.training.integrity import RECIPE, TOKENIZER, saved_recipe, tokenizer_digest
from leaven.training.loop import Callback
from leaven.training.optimizer import MOMENTS
from leaven.training.rewind import Rewind, undone
from leaven.training.run_folder import (
    IDENTITY,
    UNFINISHED,
    WRONG_TYPES,
    checkpoint_interval,
    checkpoint_name,
    checkpoints,
    read_state,
    tokens_of,
)
from leaven.training.run_lines import EVENTS

if TYPE_CHECKING:
    from leaven.training.metrics import Step
    from leaven.training.trainer import RunTrainer


FORMAT, FORMAT_OF_MANY = 2, 3
"""The number of the format in ``state.json``: 2 if one process wrote the checkpoint, 3 if several did. In format 3,
``state.json`` also lists the parts of each tensor."""
_KINDS = ("model", "optimizer")
*_ADAM, _MUON = MOMENTS
MOST_READS = 10  # of the list of checkpoints: a large checkpoint may always take longer to read than the run keeps it
TEXT = "text"  # key of the fingerprint of the run's text in the state of a checkpoint
END_OF_TEXT = "end_of_text"  # key of the id of the token that ends documents in training; null if unknown


@dataclass(frozen=True)
class Progress:
    step: int = 0  # number of steps done
    tokens: int = 0  # number of tokens trained
    seconds: float = 0.0  # time of steps and validations, also of those that a rollback or rewind has undone


@dataclass(frozen=True)
class Checkpoint:
    """The state of a run between steps. Each process saves its part of the tensors, and the first process also saves
    all other fields. In the result of :func:`read_checkpoint`, ``model`` and ``optimizer`` are :class:`Tensors`."""

    progress: Progress
    model: Mapping[str, Tensor]  # the parameters, or parts of them, that this process saves
    optimizer: Mapping[str, Tensor]  # the optimizer states, or parts of them, that this process saves
    state: Mapping[str, Any] = field(default_factory=dict)  # JSON values that the callbacks save
    rewinds: tuple[Rewind, ...] = ()  # all rewinds of the run so far
    # The position of each part in its whole tensor, by name. A tensor without an entry is whole. An entry without a
    # tensor is a part that another process saves.
    places: Mapping[str, Place] = field(default_factory=dict)

    def copied(self) -> "Checkpoint":
        """Return a copy of the checkpoint in host memory, which later training steps do not change."""
        model, optimizer = (
            {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
            for tensors in (self.model, self.optimizer)
        )
        return replace(self, model=model, optimizer=optimizer)


class NotSaved(Exception):
    """Raised when a checkpoint could not be written. Checkpoints at other token counts are unchanged."""


def write_checkpoint(
    folder: Path,
    checkpoint: Checkpoint,
    exchange: Exchange | None = None,
    tidy: Callable[[], None] = lambda: None,
    prepare: Callable[[], None] = lambda: None,
) -> Path:
    """Save a checkpoint as ``folder/tokens-NNN``, replacing an existing checkpoint there. Return its path. All
    processes of ``exchange`` must call this, from any thread, and get the same result.

    Args:
        tidy: called by the first process when the checkpoint is complete, for example to remove older checkpoints.
        prepare: called before anything is written; raises OSError if the checkpoint must not be written now.

    Raises:
        NotSaved: if a process cannot write, rank 1 or higher does not answer, or the parts do not form whole tensors.
        ProcessLost: if rank 0 does not answer.
    """
    exchange = exchange or Exchange()
    final = folder / checkpoint_name(checkpoint.progress.tokens)
    temporary = folder / f".{final.name}.{exchange.name}.tmp"
    mine: dict[str, Any]
    try:
        prepare()
        mine = _write_part(temporary, checkpoint, exchange.group)
    except (OSError, SafetensorError) as error:
        mine = {"error": _reason(error)}
    parts, failed = exchange.gather(mine), None
    if exchange.group.is_first:
        try:
            _commit(temporary, final, checkpoint, parts)
        except (OSError, ValueError) as error:
            failed = _reason(error)
        else:
            with suppress(OSError):  # the next save tries again
                tidy()
    failed = exchange.broadcast(failed)
    if failed is not None:
        shutil.rmtree(temporary, ignore_errors=True)  # on all processes: one may have written late
        raise NotSaved(failed)
    return final


def _write_part(folder: Path, checkpoint: Checkpoint, group: ProcessGroup) -> dict[str, Any]:
    """Write this process's share of the tensors. Return a JSON object with the fingerprint of each file, the shape
    and blocks of each tensor, and the names in ``checkpoint.places`` that other processes save (``of_others``)."""
    folder.parent.mkdir(exist_ok=True)  # without its parents: a run folder that was deleted is not made again
    folder.mkdir(exist_ok=True)
    part: dict[str, Any] = {"files": {}}
    held = set(checkpoint.places)
    for kind, tensors in zip(_KINDS, (checkpoint.model, checkpoint.optimizer), strict=True):
        file = f"{kind}.safetensors"
        if group.size > 1:
            file = f"{kind}-{group.rank + 1:05d}-of-{group.size:05d}.safetensors"
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, folder / file)
        share(folder / file)
        sync_file(folder / file)
        part["files"][file] = _fingerprint(folder / file)
        part[kind] = {}
        for name, tensor in tensors.items():
            shape = tuple(tensor.shape)
            place = checkpoint.places.get(name, Place(shape, (0,) * len(shape)))
            part[kind][name] = SavedTensor(
                dtype_name(tensor), place.shape, (SavedBlock(file, place.offset, shape),)
            ).to_json()
        held -= tensors.keys()
    return part | {"of_others": sorted(held)}


def _commit(temporary: Path, final: Path, checkpoint: Checkpoint, parts: Sequence[Any]) -> None:
    """Check the files of all processes, write ``state.json``, and rename the folder to its final name."""
    errors = [
        (f"rank {rank}: " if len(parts) > 1 else "") + ("does not answer" if part is None else part["error"])
        for rank, part in enumerate(parts)
        if part is None or "error" in part
    ]
    if errors:
        raise OSError("; ".join(errors))
    files: dict[str, Any] = {}
    for rank, part in enumerate(parts):
        for name, written in part["files"].items():
            if not (temporary / name).exists() or (temporary / name).stat().st_size != written["bytes"]:
                raise OSError(
                    f"rank {rank}: {name} is not the file that rank 0 reads; use a run folder that all ranks share"
                )
        files |= part["files"]
    whole = {
        kind: merged([{name: SavedTensor.from_json(each) for name, each in part[kind].items()} for part in parts])
        for kind in _KINDS
    }
    for rank, part in enumerate(parts):
        for name in part["of_others"]:
            if not any(name in tensors for tensors in whole.values()):
                raise ValueError(f"{name}: no process saves this tensor; rank {rank} has a replica that is not saved")
    state = asdict(checkpoint.progress) | {
        "format": FORMAT,
        "rewinds": [rewind.document() for rewind in checkpoint.rewinds],
        "state": checkpoint.state,
        "files": files,
    }
    if len(parts) > 1:
        where = {kind: {name: each.to_json() for name, each in tensors.items()} for kind, tensors in whole.items()}
        state |= {"format": FORMAT_OF_MANY, "tensors": where}
    with (temporary / "state.json").open("w", encoding="utf-8") as file:
        # Indented for people, except with many processes, where the table of blocks makes that slow.
        json.dump(sealed(state), file, indent=1 if len(parts) == 1 else None)
    sync_file(temporary / "state.json")
    if final.exists():  # damaged, or undone by a rewind
        _remove(final)
    place_folder(temporary, final)


def read_checkpoint(
    folder: Path,
    rewinds: Sequence[Rewind] = (),
    tokens: int | None = None,
    group: ProcessGroup = SINGLE_PROCESS,
    recipe: Recipe | None = None,
) -> tuple[Checkpoint | None, list[Path]]:
    """Return (checkpoint, damaged). ``checkpoint`` is the newest undamaged checkpoint that no rewind has
    undone, or None. ``damaged`` has the paths of newer damaged checkpoints.

    Each process of ``group`` verifies a share of the files. All processes get the same result. A checkpoint that a
    training run removes meanwhile does not count as damaged.

    Args:
        rewinds: the run's rewinds, the same on all processes.
        tokens: if given, consider only the checkpoint at this token count.
        recipe: if given, a checkpoint must have exactly the parameters of this recipe, or it counts as damaged.

    Raises:
        InputError: if reading fails for a reason other than damage, for example missing permissions, or if
            checkpoints were removed in each of `MOST_READS` reads.
    """

    def there() -> list[Path]:
        return [path for path in checkpoints(folder) if tokens is None or tokens_of(path) == tokens]

    def sees_more() -> bool:
        return not {path.name for path in there()} <= {path.name for path in listed}

    for _ in range(MOST_READS):
        listed = group.broadcast(there())
        require_seen(folder, sees_more, group)
        found, damaged = _newest(listed, rewinds, group, recipe)
        if (found is not None and not damaged) or group.broadcast(there()) == listed:
            return found, damaged
    raise InputError(
        f"{folder}: checkpoints were removed while they were read, {MOST_READS} times; run the same command again "
        "when the run has stopped"
    )


def _newest(
    listed: Sequence[Path], rewinds: Sequence[Rewind], group: ProcessGroup, recipe: Recipe | None
) -> tuple[Checkpoint | None, list[Path]]:
    """Do :func:`read_checkpoint` for ``listed``. A checkpoint that was removed meanwhile counts as damaged."""
    damaged: list[Path] = []
    for candidate in reversed(listed):
        if group.size > 1:
            require_seen(candidate, partial(_differs, candidate, group.broadcast(_seen(candidate))), group)
        try:
            found, unreadable = _read(candidate, group, recipe), None
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError, SafetensorError, *WRONG_TYPES):
            found, unreadable = None, None
        except OSError as error:
            found, unreadable = None, error.strerror or str(error)
        # The read error of a checkpoint that was removed, for example ESTALE, is no fault of the disk.
        if group.any(unreadable is not None and not _is_gone(candidate)):
            why = unreadable or "another process cannot read it"
            raise InputError(f"{candidate}: cannot be read: {why}; make it readable and run the same command again")
        anywhere = group.any(found is None)
        if found is None or anywhere:
            damaged.append(candidate)
        elif not undone(found.progress.tokens, later=rewinds[len(found.rewinds) :]):
            return found, damaged
    return None, damaged


def _is_gone(path: Path) -> bool:
    try:
        path.lstat()
    except FileNotFoundError:
        return True
    except OSError:  # unknown, for example without permission
        pass
    return False


def require_seen(path: Path, differs: Callable[[], bool], group: ProcessGroup) -> None:
    """Wait until all processes see the same files at ``path``. A network disk may show new files late.

    ``differs`` returns whether this process sees other files than rank 0. It is called about once a second on
    every process. After `SEEN_AFTER` seconds, all processes raise InputError, with ``path`` in the message.
    """
    if group.size == 1:
        return
    for looks_left in range(SEEN_AFTER, -1, -1):
        late = differs()
        if not group.any(late):
            return
        time.sleep(1 if looks_left else 0)
    kind, who = (InputError, f"rank {group.rank}") if late else (Settled, "another rank")
    raise kind(
        f"{who} does not see {path} as rank 0 does; give all ranks the same run folder (is its disk mounted "
        "everywhere?) and run the same command again"
    )


def _differs(checkpoint: Path, wanted: str) -> bool:
    there = _seen(checkpoint)
    return there != wanted and UNREADABLE not in {there, wanted}  # _read raises the error of an unreadable one


def _seen(checkpoint: Path) -> str:
    """Return the files and sizes of a checkpoint as text, to compare what two processes see."""
    try:
        files = storage.read(checkpoint / "state.json")
        names = sorted((storage.json_object(files) or {})["files"])
        sizes = [(checkpoint / name).stat().st_size if (checkpoint / name).exists() else None for name in names]
        return f"{storage.digest(files, 16)} {sizes}"
    except FileNotFoundError:
        return "missing"
    except (OSError, InputError, *WRONG_TYPES):
        return UNREADABLE


def _read(folder: Path, group: ProcessGroup, recipe: Recipe | None) -> Checkpoint:
    state = read_state(folder)
    files = sorted(state["files"])
    if any(Path(name).name != name for name in files):
        raise ValueError(f"the state.json of {folder} lists a file outside this folder")
    mine = files[group.rank :: group.size]
    for name in mine:
        if _fingerprint(folder / name) != state["files"][name]:
            raise ValueError(f"{folder / name} is damaged")
    if "tensors" in state:
        model, optimizer = (
            Tensors(folder, {name: SavedTensor.from_json(each) for name, each in state["tensors"][kind].items()})
            for kind in _KINDS
        )
    else:
        model, optimizer = (Tensors.of_file(folder / f"{kind}.safetensors") for kind in _KINDS)
    for tensors in (model, optimizer):
        tensors.require_whole(files, mine)
    if recipe is not None:
        _require_parameters(model, optimizer, recipe)
    progress = Progress(state["step"], state["tokens"], state["seconds"])
    rewinds = tuple(Rewind.of(rewind) for rewind in state["rewinds"])
    values = state["state"]
    if not (
        all(type(count) is int for count in (progress.step, progress.tokens))
        and math.isfinite(progress.seconds)
        and isinstance(values, dict)
        and all(isinstance(values.get(key, ""), str) for key in (TEXT, IDENTITY))
    ):
        raise ValueError("a value of state.json has a wrong type")
    return Checkpoint(progress, model, optimizer, values, rewinds)


def _require_parameters(model: Tensors, optimizer: Tensors, recipe: Recipe) -> None:
    """Raise ValueError if the parameters do not fit the recipe. Moments and averages, if any, must fit too."""
    shapes = {parameter.name: parameter.shape for parameter in recipe.model.parameters()}
    model.require(shapes)
    if len(model) != len(shapes):
        raise ValueError(f"{', '.join({*model} - {*shapes})}: not in the recipe")
    if any(f"{kind}.{name}" in optimizer for kind in (*_ADAM, _MUON) for name in shapes):
        for name, shape in shapes.items():
            muon = f"{_MUON}.{name}" in optimizer
            kinds = [_MUON] if muon else _ADAM
            optimizer.require({f"{kind}.{name}": () if kind == "step" else shape for kind in kinds})
    averages = {f"{AVERAGE}.{name}": shape for name, shape in shapes.items()}
    if any(name in optimizer for name in averages):
        optimizer.require(averages)


def is_undone(checkpoint: Path, rewinds: Sequence[Rewind]) -> bool:
    """Return whether a rewind has undone a checkpoint. Return False if the checkpoint cannot be read."""
    try:
        known = len(read_state(checkpoint)["rewinds"])
    except (OSError, InputError, *WRONG_TYPES):
        return False
    return undone(tokens_of(checkpoint), rewinds[known:])


def _remove(checkpoint: Path) -> None:
    """Remove a checkpoint. It is renamed first, so that a kill does not leave a damaged checkpoint."""
    with suppress(OSError):
        checkpoint = checkpoint.rename(checkpoint.with_name(f".{checkpoint.name}.tmp"))
    shutil.rmtree(checkpoint, ignore_errors=True)


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def _fingerprint(path: Path) -> dict[str, Any]:
    with storage.open_file(path) as file:
        digest = storage.digest(file, 16)
        return {"bytes": file.tell(), "blake2b": digest}


UNREADABLE = "unreadable"
SEEN_AFTER = 60  # seconds after which NFS shows a new file at the latest (its option acdirmax)
GIVE_UP = 5.0  # seconds for which `CheckpointManager.close` waits for processes that may be gone


@dataclass(frozen=True)
class Saved:
    progress: Progress  # the saved position of the run
    path: Path | None = None  # folder of the checkpoint, if it was written
    error: str | None = None  # why it was not written


class CheckpointManager:
    """Writes checkpoints in a thread while training continues, and removes checkpoints that are no longer needed.

    There are two kinds. The first checkpoint in each interval of ``every_tokens`` is scheduled, and
    :func:`checkpoints_to_keep` decides how long it stays. Any other checkpoint, such as one at a stop, is removed as
    soon as there is a newer one. So stops do not push out scheduled checkpoints, which a rollback may need.

    Every process of a run calls the same methods at the same steps, from its main thread.
    """

    def __init__(
        self,
        folder: Path,
        every_tokens: int,
        keep: int,
        keep_every_tokens: int | None,
        *,
        group: ProcessGroup = SINGLE_PROCESS,
        prepare: Callable[[], None] = lambda: None,
    ) -> None:
        self._prepare = prepare  # an argument of write_checkpoint
        self._for_good: list[int] = []  # token counts of checkpoints that an earlier start has kept for good
        self._folder, self._every, self._keep, self._keep_every = folder, every_tokens, keep, keep_every_tokens
        self._group, self._exchange = group, Exchange(group)
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[Saved] | None = None

    def save(self, checkpoint: Checkpoint, good_tokens: int) -> None:
        """Start writing a copy of the checkpoint in a thread. Call :meth:`outcome` before the next save. The run has
        no anomaly in its first ``good_tokens`` tokens, which decides which older checkpoints are kept."""
        assert self._writing is None, "call outcome() first"
        self._writing = self._thread.submit(self._write, checkpoint.copied(), good_tokens)

    def outcome(self, wait: bool) -> Saved | None:
        """Return the result of the last save once, otherwise None. Without ``wait``, None also while it is in
        progress, so processes may get it at different steps. Raise ProcessLost if rank 0 does not answer."""
        if self._writing is None or not (wait or self._writing.done()):
            return None
        saved, self._writing = self._writing.result(), None
        return saved

    def close(self) -> None:
        """Wait for a write in progress, and end the thread."""
        self._exchange.shorten_timeout(GIVE_UP)
        self._thread.shutdown()

    def clear(self, after_tokens: int, damaged: Sequence[Path] = (), rewinds: Sequence[Rewind] = ()) -> None:
        """Prepare the folder to continue from ``after_tokens``. Call :meth:`outcome` first.

        Raise InputError on all processes, before any change, if a checkpoint after ``after_tokens`` is neither
        ``damaged`` nor undone by one of the ``rewinds``. Otherwise, rename the damaged checkpoints, and remove the
        unfinished ones and the undone ones after ``after_tokens``.
        """
        self._group.barrier()
        new: Path | None = None
        if self._group.is_first:
            later = [path for path in checkpoints(self._folder) if tokens_of(path) > after_tokens]
            others = [path for path in later if path not in damaged and not is_undone(path, rewinds)]
            new = next(iter(others), None)
        if (new := self._group.broadcast(new)) is not None:
            raise InputError(
                f"{new} appeared after the checkpoints were listed (a network disk may show new files late); "
                "run the same command again"
            )
        if self._group.is_first:
            for path in self._folder.glob(UNFINISHED):
                shutil.rmtree(path, ignore_errors=True)
            for path in damaged:
                names = (f"damaged-{path.name}{f'-{n}' if n > 1 else ''}" for n in count(1))
                with suppress(OSError):
                    path.replace(next(free for name in names if not (free := path.with_name(name)).exists()))
            for path in later:
                if path not in damaged:
                    _remove(path)
            # These stay, even if a rewind has changed checkpoint_every_tokens.
            self._for_good = kept_for_good(list(map(tokens_of, checkpoints(self._folder))), self._keep_every)
        self._group.barrier()

    def _write(self, checkpoint: Checkpoint, good_tokens: int) -> Saved:
        def tidy() -> None:
            there = checkpoints(self._folder)
            tokens = [tokens_of(path) for path in there]
            due = first_in_each_interval(tokens, self._every)
            stay = [*self._for_good, *checkpoints_to_keep(due, good_tokens, self._keep, self._keep_every)]
            stay.append(checkpoint.progress.tokens)  # also if a damaged one that could not be renamed is newer
            for path in there[:-1]:
                if tokens_of(path) not in stay:
                    _remove(path)

        try:
            path = write_checkpoint(self._folder, checkpoint, self._exchange, tidy, self._prepare)
        except NotSaved as error:
            return Saved(checkpoint.progress, error=str(error))
        return Saved(checkpoint.progress, path)


def checkpoints_to_keep(due: Sequence[int], good_tokens: int, keep: int, keep_every_tokens: int | None) -> list[int]:
    """Return which of the scheduled checkpoints ``due`` to keep, as ascending token counts.

    These are kept: the newest ``keep``; the last at or before ``good_tokens``; with ``keep_every_tokens``, the first
    in each interval of this length, except the first interval.
    """
    stay = {*due[-keep:], *[tokens for tokens in due if tokens <= good_tokens][-1:]}
    return sorted(stay.union(kept_for_good(due, keep_every_tokens)))


def kept_for_good(tokens: Sequence[int], every_tokens: int | None) -> list[int]:
    """Return :func:`first_in_each_interval` without the first interval. With intervals of 2 tokens, 0, 2, 3 and 5
    become 2 and 5."""
    if every_tokens is None:
        return []
    return [count for count in first_in_each_interval(tokens, every_tokens) if count >= every_tokens]


def first_in_each_interval(there: Sequence[int], every_tokens: int) -> list[int]:
    """For each interval of ``every_tokens`` tokens, return the lowest token count in ``there`` (ascending).
    With intervals of 2 tokens, 0, 2, 3 and 5 become 0, 2 and 5."""
    return sorted({tokens // every_tokens: tokens for tokens in reversed(there)}.values())


class Checkpoints(Callback):
    """Saves a checkpoint at a fixed interval in tokens, and logs each save as an event."""

    every_tokens: int

    def __init__(self, trainer: "RunTrainer") -> None:
        self.trainer, self.training = trainer, trainer.training
        recipe, stability = self.training.recipe, self.training.recipe.stability
        self.every_tokens = checkpoint_interval(recipe)
        self._manager = CheckpointManager(
            trainer.run.checkpoints,
            self.every_tokens,
            stability.keep,
            stability.keep_every_tokens,
            group=trainer.group,
            prepare=self._prepare,
        )
        self._saved_step = -1
        # A run on token ids has no tokenizer of its own, even if the user has put one into the folder.
        self._tokenizer = tokenizer_digest(trainer.run) if trainer.tokens.tokenizer_path is not None else None

    def _prepare(self) -> None:
        self.trainer.lines.sync()  # a resumed run does not repeat these steps, so a power cut must keep their lines
        self.trainer.run.require_claimed()

    def after_step(self, step: "Step") -> None:
        self.log_outcome(wait=False)

    def on_due(self) -> None:
        self.save()

    def save(self) -> None:
        self.log_outcome(wait=True)
        self.trainer.run.require_there()
        self.trainer.run.require_own_checkpoints()
        training = self.training
        state = {key: value for each in self.trainer.callbacks for key, value in each.state().items()}
        state[TEXT], state[END_OF_TEXT] = self.trainer.tokens.fingerprint, self.trainer.tokens.end_of_text
        state[IDENTITY] = self.trainer.run.identity
        state[RECIPE] = saved_recipe(training.recipe)
        if self._tokenizer is not None:
            state[TOKENIZER] = self._tokenizer
        state[EVENTS] = asdict(self.trainer.lines.events_digest())
        self._manager.save(training.checkpoint(state), self.trainer.spikes.good_tokens)
        self._saved_step = training.progress.step

    def save_last(self) -> str | None:
        """Save the current state if it is not saved yet, and wait until it is written. Return the error, or None."""
        self.log_outcome(wait=True)  # afterwards all processes have the same saved step
        if self.training.progress.step != self._saved_step:
            self.save()
        return self.log_outcome(wait=True)

    def log_outcome(self, wait: bool) -> str | None:
        """Log the last save if not yet logged. Return its error or None. With ``wait``, first wait for the save."""
        saved = self._manager.outcome(wait)
        if saved is None:
            return None
        at = {"step": saved.progress.step, "tokens": saved.progress.tokens}
        if saved.path is not None:
            self.trainer.event("checkpoint", **at, path=saved.path.name)
            self.trainer.profile.write()
        else:
            self._saved_step = -1
            if saved.progress.step:  # without its first checkpoint, the run ends with this error
                self.trainer.event("checkpoint_failed", **at, why=saved.error)
        return saved.error

    def restore(self, state: Mapping[str, Any]) -> None:
        self._manager.clear(self.training.tokens, self.trainer.damaged, self.training.rewinds)
        self.trainer.run.claim_checkpoints()
        self._saved_step = self.training.progress.step

    def close(self) -> None:
        self._manager.close()
        self.log_outcome(wait=False)
