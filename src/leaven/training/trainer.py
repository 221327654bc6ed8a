"""Training a recipe in a folder that holds everything the run needs."""

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from leaven.data.tokenizer import bits_per_byte_factor
from leaven.distributed.process_group import SINGLE_PROCESS, ProcessGroup
from leaven.recipe.errors import InputError, Settled, out_of_memory
from leaven.recipe.recipe import Recipe, rearrangement
from leaven.training.checkpoint import Progress, checkpoints, tokens_of
from leaven.training.engine import StopRequested, Training, check_trainable, default_device
from leaven.training.manual_rewind import ManualRewind
from leaven.training.micro_batch import as_begun, by_thumb, require_memory, settle
from leaven.training.run_folder import RunFolder
from leaven.training.run_profile import RunProfile
from leaven.training.session import Session
from leaven.training.step import Step
from leaven.training.throughput import device_peak, held_memory, reset_peak_memory, utilisation

if TYPE_CHECKING:
    from leaven.data.tokens import TokenSet


@dataclass(frozen=True)
class Summary:
    """How a run ended."""

    loss: float | None  # validation, nats per token; None while the run is not finished
    tokens: int
    steps: int
    seconds: float
    mfu: float | None  # median over the steps
    rollbacks: int
    finished: bool
    bits_per_byte: float | None  # the same loss per byte of text; None where the tokenizer does not tell bytes
    mfu_causal: float | None  # the same speed, as causal MFU and as HFU
    hfu: float | None
    mfu_convention: str | None
    unsaved: str | None = None  # why a run that was stopped could not be saved
    saved_tokens: int = 0  # trained at the newest checkpoint, from which the run resumes
    noise_scale: float | None = None  # tokens; the last that was measured


def train(
    recipe: Recipe,
    tokens: "TokenSet",
    folder: Path,
    *,
    on_step: Callable[[Step], None] = lambda step: None,
    on_event: Callable[[str, dict[str, Any]], None] = lambda event, values: None,
    stop: Callable[[], bool] = lambda: False,
    log_to: Sequence[str] = (),
    back: ManualRewind | None = None,
    group: ProcessGroup = SINGLE_PROCESS,
    history: bool = True,
) -> Summary:
    """Train a recipe in a run folder, from its newest whole checkpoint if it has one.

    The losses are the same, to the last bit on one device, however often the run is stopped or killed. Every process
    of a ``group`` calls this with the same arguments; the first one writes.

    Args:
        stop: called before every forward, on any process. When it returns True, the current step is given up, the
        step
            before is saved, and the summary is not ``finished``.
        log_to: writers of curves (:data:`leaven.training.metrics.WRITERS`).
        back: a manual rewind to do first, once: the same call again resumes.
        history: whether the step times go into the history that calibrates plans; not where runs side by side would
            slow each other down.

    Raises:
        InputError: if the folder holds another recipe, is in use, or cannot be written.
        Diverged: if there is an anomaly and ``on_spike`` is ``stop``, or rolling back does not help.
    """
    run, recipe, back = check(recipe, folder, back)
    run.check_text(tokens.fingerprint)
    ended = _ended(run) if back is None else None
    if ended is not None:
        return ended
    check_trainable(recipe, tokens, group)
    recipe, timed = _with_micro_batch(recipe, group)
    footing = held_memory(default_device())
    # Before anything is written: what cannot be trained leaves no folder.
    training = Training(recipe, tokens, group=group)
    training.stop = stop
    try:
        choice = settle(training) if timed else None
    except StopRequested:
        return _summary(run, training.progress, None, "before its first step")
    training.peak = device_peak(training.device, recipe.precision.compute)
    factor = bits_per_byte_factor(tokens.tokenizer_path, training.validation_targets())
    moved = rearrangement(run.recipe(), training.recipe) if run.recipe_file.exists() else []
    with _no_folder_of_a_failed_start(run), _opened(run, training.recipe, back, group):
        run.keep_tokenizer(tokens.tokenizer_path)
        reset_peak_memory(training.device)  # trying micro-batches took more
        session = Session(
            run,
            training,
            on_step,
            on_event,
            profile=RunProfile(run, training, footing, history),
            log_to=log_to,
            bits_per_byte_factor=factor,
            group=group,
        )
        try:
            if moved:
                session.rearrange(moved)
            if choice is not None:
                session.event("micro_batch", **choice.to_json())
            end = session.train(lambda: group.any(stop()))
        finally:
            session.close()
        return _summary(run, training.progress, end, session.unsaved)


def _with_micro_batch(recipe: Recipe, group: ProcessGroup) -> tuple[Recipe, bool]:
    """Returns the recipe with its micro-batch, and whether that is still to be timed: on one device only, since
    several would have to run out of memory together."""
    if recipe.batch.micro_batch != "auto":
        return recipe, False
    require_memory(recipe)
    return (recipe, True) if group is SINGLE_PROCESS else (by_thumb(recipe), False)


@contextmanager
def _opened(run: RunFolder, recipe: Recipe, back: ManualRewind | None, group: ProcessGroup) -> Iterator[None]:
    """Lock the folder once every process has read it. The first process changes it, for all."""
    group.barrier()
    run.writes = group.is_first
    with ExitStack() as stack:
        refused: str | None = None
        try:
            if back is not None and group.is_first:
                back.go(run, recipe)
            if group.is_first:
                stack.enter_context(run.opened(recipe))
        except InputError as error:
            refused = str(error)
        refused = group.broadcast(refused)
        if refused is not None:
            raise Settled(refused)
        yield


@contextmanager
def _no_folder_of_a_failed_start(run: RunFolder) -> Iterator[None]:
    """Remove the folder of a new run that runs out of memory before its first step."""
    new = not run.path.exists()
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if new and run.writes and out_of_memory(error) and not run.metrics():
            shutil.rmtree(run.path, ignore_errors=True)
        raise


def check(
    recipe: Recipe, folder: Path, back: ManualRewind | None = None
) -> tuple[RunFolder, Recipe, ManualRewind | None]:
    """Returns the run of a folder, the recipe as it will be trained there, and the rewind that is still to be done.

    Raises:
        InputError: if the folder cannot hold this run, or the run cannot go back like this.
    """
    run, recipe = RunFolder(folder), as_begun(recipe, folder)
    if back is not None and not back.done(run, recipe):
        back.check(run, recipe)
        return run, recipe, back
    run.check(recipe)
    return run, recipe, None


def _ended(run: RunFolder) -> Summary | None:
    """Returns the summary of a run that has finished before."""
    finish = run.finish()
    if finish is None:
        return None
    return _summary(run, Progress(finish["step"], finish["tokens"], finish["seconds"]), finish)


def _summary(run: RunFolder, progress: Progress, ended: dict[str, Any] | None, unsaved: str | None = None) -> Summary:
    # Where the peak is measured, each start has its own: the speed of all steps over that of the last start.
    starts = [event for event in run.events() if event.get("peak_tflops")]
    metrics = run.metrics()
    speeds = [line["tflops"] for line in metrics]
    noise = [line["noise_scale"] for line in metrics if line.get("noise_scale") is not None]
    used = utilisation(run.recipe(), median(speeds) / starts[-1]["peak_tflops"]) if starts and speeds else None
    return Summary(
        loss=ended["loss"] if ended else None,
        tokens=progress.tokens,
        steps=progress.step,
        seconds=progress.seconds,
        mfu=used.mfu if used else None,
        rollbacks=len(run.rollbacks()),
        finished=ended is not None,
        bits_per_byte=ended.get("bits_per_byte") if ended else None,
        mfu_causal=used.mfu_causal if used else None,
        hfu=used.hfu if used else None,
        mfu_convention=starts[-1]["mfu_convention"] if starts else None,
        unsaved=unsaved,
        saved_tokens=max(map(tokens_of, checkpoints(run.checkpoints)), default=0),
        noise_scale=noise[-1] if noise else None,
    )
