"""Trains a recipe in a run folder.

The steps of ``leaven train recipe.toml``, in order. The ten files in bold are the main path.

1. **cli/train.py** (``train``) reads recipe and ``--set`` with ``read_recipe`` of **recipe/files.py**, and counts
   processes and devices.
2. ``prepare`` of **data/tokens.py** turns the text into token ids in shards, by default with a BPE that is trained on
   it. A part is held out for validation. Sample n of the training stream depends only on the seed and n
   (``TokenSet.stream``), so a run resumes without a stored state of the data.
3. **trainer.py**, this file. :func:`_train` compares recipe and text with those in the folder, and locks the folder.
   :func:`_built` builds the state and chooses the micro-batch. :meth:`RunTrainer.start` restores the newest undamaged
   checkpoint. A new run saves a checkpoint before its first step, so that it can always roll back.
4. **engine.py** has the state (``Training``). **scaling/table.py** computes the values of every parameter
   (``parameter_table``) and the groups of the optimizer (``optimizer_groups``). **distributed/sharded_model.py**
   builds the layers of this process (``build_stage``) with their initial values. A single process has all layers.
5. ``Loop.run`` in **loop.py** starts each step before it reads the result of the previous step, so that the device
   does not wait. Callbacks act around the steps, in this order: metrics, profile, validation, checkpoints, spike
   guard.
6. ``Training.issue`` in engine.py takes the step: the next batch, ``ShardedModel.forward_backward`` (a micro-batch at
   a time), and clipping and the update (**optimizer.py**). The lr of each group is multiplied by the schedule and by
   the factors of rewinds and of a batch ramp. The device skips the update if the loss or the gradient norm is not
   finite. With ``on_spike = "skip"``, it also skips the update above the spike guard's limits.
7. ``metrics.py`` measures the step (``Telemetry``), writes it to metrics.jsonl and to the curves
   (``StepLog``), and computes the validation loss (``Validation``).
8. **checkpoint.py** copies the state to host memory (``Checkpoints.save``), and a thread writes it while training
   continues (``write_checkpoint``): safetensors files, then state.json with their digests, then a rename.
9. ``spikes.py`` compares loss, gradient norm and update norm with their usual levels. At an anomaly,
   :meth:`RunTrainer.roll_back` restores a checkpoint before it, and the run skips the data of the anomaly
   (``rewind.py``).
10. :meth:`RunTrainer.train` computes the last validation loss and saves the last checkpoint. After Ctrl-C, a single
    process drops the current step and saves the state before this step. Several processes finish the step.

You can skip ``cli/common.py`` (its ``load_recipe`` and ``prepare_text`` call the functions in 1 and 2),
``recipe/recipe.py`` (the keys of a recipe), ``model/transformer.py`` and ``model/loss.py`` (what they compute),
``run_folder.py`` (the files of a run) and ``run_lines.py`` (appends to metrics.jsonl and events.jsonl, and keeps
lines in memory while the disk is full).
"""

import math
import shutil
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from secrets import token_hex
from statistics import median
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from leaven import __version__, storage
from leaven.data.tokenizer import bits_per_byte_factor
from leaven.distributed.process_group import SINGLE_PROCESS, ProcessGroup
from leaven.documents.runs import TrainDocument
from leaven.errors import AGAIN_AFTER, STOPPING, InputError, Settled, TextUnreadable, out_of_memory, shown
from leaven.interop.weights import start_cautions, tensors_fingerprint, weights_fingerprint
from leaven.planning.flops import utilisation
from leaven.recipe.recipe import BY_REWIND, Difference, Recipe, differing, rearrangement
from leaven.recipe.units import listed
from leaven.training.checkpoint import (
    TEXT,
    Checkpoint,
    Checkpoints,
    Progress,
    is_undone,
    read_checkpoint,
    require_seen,
)
from leaven.training.device import (
    default_device,
    device_peak,
    held_memory,
    mfu_convention,
    plain_torch,
    reset_peak_memory,
)
from leaven.training.engine import StopRequested, Training
from leaven.training.integrity import (
    changed_since,
    faults_in,
    identity_of,
    mark_begun,
    missing_checkpoint,
    require_own_files,
    require_run_of,
    require_text,
    require_tokenizer,
    saved_checkpoints,
    unusable_checkpoints,
)
from leaven.training.loop import Callback, Diverged, Loop
from leaven.training.metrics import Step, StepLog, Validation, writers
from leaven.training.micro_batch import (
    Choice,
    as_started,
    by_rule_of_thumb,
    choose_micro_batch,
    require_memory,
    with_micro_batch,
)
from leaven.training.profiling import RunProfile
from leaven.training.rewind import ManualRewind, Rewind, rewinds_of, seconds_spent
from leaven.training.run_folder import (
    IDENTITY,
    RunFolder,
    brief,
    changes_of,
    checkpoints,
    describe_changes,
    recorded_changes,
    tokens_of,
)
from leaven.training.run_lines import EVENTS, METRICS, RunLines, changed_lines, lines_digest
from leaven.training.spikes import SpikeGuard

if TYPE_CHECKING:
    from leaven.data.tokens import TokenSet

SHORT_PAUSE = 0.5  # seconds between looks at a disk that is full or away
_DROPOUT = threading.Lock()  # held while a single process trains with dropout


def train(
    recipe: Recipe,
    tokens: "TokenSet",
    folder: Path | str,
    *,
    on_step: Callable[[Step], None] = lambda step: None,
    on_event: Callable[[str, dict[str, Any]], None] | None = None,
    stop: Callable[[], bool] = lambda: False,
    log_to: str | Sequence[str] = (),
    rewind: ManualRewind | None = None,
    group: ProcessGroup = SINGLE_PROCESS,
    history: bool = True,
) -> TrainDocument:
    """Train a recipe in a run folder, and return the result.

    A run in the folder resumes from its newest undamaged checkpoint, bit for bit on a CPU
    (docs/concepts/promises.md). A finished run only returns its result. Train one run at a time in a
    process, because dropout seeds torch's global random generator; a second one with dropout is refused.

    Ctrl-C in the main thread saves the state, then raises KeyboardInterrupt. A second Ctrl-C does not wait.
    To stop a run in another thread or at a SIGTERM, and save its state, pass ``stop``.

    Args:
        on_step: called with the metrics of each step.
        on_event: called with the name and values of each event; most are also lines of events.jsonl. Without it,
            Python warnings tell what is lost, damaged or cannot be written, and show ``tokens.notes``.
        stop: polled between steps, and by a single process also within a step. When it returns True, the state is
            saved, and ``finished`` of the result is False. If a disk is full or unreachable at the end, the run
            retries until ``stop`` returns True.
        log_to: names of writers of curves (:data:`leaven.training.metrics.WRITERS`), such as "tensorboard,wandb".
        rewind: a manual rewind to do before training. A repeated call does not rewind again.
        group: the processes of the run. All of them must make this call with the same arguments.
        history: whether to add step times to the calibration history. Set it to False for runs that share a machine.

    Raises:
        InputError: if the recipe cannot be trained, a writer of curves is unknown or not installed, the tokens were
            prepared from another [data] or for another vocabulary size, or the folder cannot be written, is in use,
            or has a run of another recipe or text.
        Diverged: if the run diverges, and rolling back is off or does not help.
    """
    folder = storage.expanded(folder)
    _require_tokens_of(recipe, tokens)
    log_to = writers(log_to)
    on_event = on_event or _warnings_of_faults(folder, tokens, recipe, sys._getframe(1), group)
    with _one_with_dropout(recipe, group), _stopped_by_ctrl_c(stop) as asked, plain_torch():
        summary = _train(recipe, tokens, folder, on_step, on_event, asked, log_to, rewind, group, history=history)
        if asked() and not summary.finished and not stop():
            saved = "saved" if summary.unsaved is None else f"not saved ({summary.unsaved})"
            message = f"{folder}: stopped at {summary.tokens:,} tokens, {saved}; the same call resumes the run"
            warnings.warn(shown(message), stacklevel=2)
    return summary


@contextmanager
def _one_with_dropout(recipe: Recipe, group: ProcessGroup) -> Iterator[None]:
    """Raise InputError if another run of this process trains with dropout: masks use torch's global generator."""
    draws = recipe.model.dropout > 0 and group is SINGLE_PROCESS
    if draws and not _DROPOUT.acquire(blocking=False):
        raise InputError(
            "train: another run of this process trains with dropout, and both would draw from torch's global random "
            "generator; train one after the other, or each in its own process"
        )
    try:
        yield
    finally:
        if draws:
            _DROPOUT.release()


def _require_tokens_of(recipe: Recipe, tokens: "TokenSet") -> None:
    """Raise InputError if ``tokens`` were prepared from another [data] or for another vocabulary size."""
    if tokens.data is None:
        return
    of_recipe, of_tokens = (
        {"source": data.sources, "tokenizer": data.tokenizer, "end_of_text": data.end_of_text}
        for data in (recipe.data, tokens.data)
    )
    different = [f"data.{key}" for key in of_recipe if of_recipe[key] != of_tokens[key]]
    trained = recipe.data.tokenizer == "bpe" and tokens.tokenizer_path is not None
    at_other_size = trained and tokens.model_vocab_size not in {None, recipe.model.vocab_size}
    # The ends of documents of text are always known, those of token ids only if they were asked for.
    of_ids = any(source.train_bytes == 0 for source in tokens.sources)
    if of_ids and recipe.data.documents == "isolated" != tokens.data.documents:
        different.append("data.documents")
    if at_other_size or tokens.vocab_size > recipe.model.vocab_size:
        different.append("model.vocab_size")
    if different:
        raise InputError(
            f"train: tokens were prepared from another {listed(different, 'and')} than the recipe's; prepare them "
            "from this recipe: leaven.data.tokens.prepare(recipe.data, recipe.model.vocab_size)"
        )


def _warnings_of_faults(
    folder: Path, tokens: "TokenSet", recipe: Recipe, caller: FrameType, group: ProcessGroup
) -> Callable[[str, Mapping[str, Any]], None]:
    """Warn of the notes about the tokens and the start weights. Return a callback that warns of the faults in an
    event. Only rank 0 warns. Warnings point to the line that ``caller`` executes now; equal ones are shown once."""
    where, registry = (caller.f_code.co_filename, caller.f_lineno), dict[Any, Any]()

    def warn(message: str) -> None:
        if group.is_first:
            warnings.warn_explicit(shown(message), UserWarning, *where, registry=registry)

    def on_event(event: str, values: Mapping[str, Any]) -> None:
        for fault in faults_in(event, values):
            warn(f"{folder}: {fault}")

    of_start = start_cautions(recipe, tokens.tokenizer_path, tokens.end_of_text) if group.is_first else []
    for note in (*tokens.notes, *of_start):
        warn(note)
    return on_event


@contextmanager
def _stopped_by_ctrl_c(stop: Callable[[], bool]) -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether ``stop()`` is true or Ctrl-C was pressed.

    The first Ctrl-C raises KeyboardInterrupt only at the end of the ``with`` block. Another Ctrl-C, more than
    ``AGAIN_AFTER`` seconds later, raises it at once. Outside the main thread, yield ``stop`` itself.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield stop
        return
    first, raised = math.inf, list[BaseException]()

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal first
        now = time.monotonic()
        first = min(first, now)
        try:
            before(number, frame)
        except BaseException as error:
            if now > first + AGAIN_AFTER:
                raise
            if not raised:
                raised.append(error)
                with suppress(OSError, RuntimeError):  # RuntimeError: the signal interrupted another write
                    print(STOPPING, file=sys.stderr, flush=True)

    signal.signal(signal.SIGINT, handle)
    try:
        yield lambda: first < math.inf or stop()
    finally:
        signal.signal(signal.SIGINT, before)
    if raised:
        raise raised[0]


def _train(  # noqa: PLR0917
    recipe: Recipe,
    tokens: "TokenSet",
    folder: Path,
    on_step: Callable[[Step], None],
    on_event: Callable[[str, dict[str, Any]], None],
    stop: Callable[[], bool],
    log_to: Sequence[str],
    rewind: ManualRewind | None,
    group: ProcessGroup,
    *,
    history: bool,
) -> TrainDocument:
    _require_one_recipe(recipe, tokens, folder, rewind, group)
    run, recipe, rewind = check(recipe, folder, rewind)
    require_text(run, tokens.fingerprint)
    if tokens.tokenizer_path is not None:
        require_tokenizer(run, tokens.tokenizer_path)
    finish = run.finish() if rewind is None else None
    if finish is not None:
        if tokens.tokenizer_path is not None and group.is_first:
            with suppress(InputError):
                run.keep_tokenizer(tokens.tokenizer_path)
        _report_changed_files(run, finish["tokens"], on_event)
        return _summary(run, Progress(finish["step"], finish["tokens"], finish["seconds"]), finish)
    memory_before = held_memory(default_device())
    try:
        training, choice = _built(recipe, tokens, group, stop, run.begun)
    except StopRequested:
        return _summary(run, Progress(), None, "before its first step")
    training.telemetry.peak = peak = device_peak(training.device, recipe.precision.compute)
    factor = bits_per_byte_factor(tokens.tokenizer_path, training.validation_targets())
    rearranged = rearrangement(run.recipe(), training.recipe) if run.recipe_file.exists() else []
    changed = describe_changes(changes_of(run.recipe(), recipe)) if rewind is not None else ""
    # Nothing is written up to here, so that a recipe that cannot be trained leaves no folder.
    with _no_folder_of_a_failed_start(run), _opened(run, training.recipe, rewind, group):
        if tokens.tokenizer_path is not None:
            run.keep_tokenizer(tokens.tokenizer_path)
        reset_peak_memory(training.device)  # timing may have used more than training does
        profile = RunProfile(run, training, memory_before, history, on_event)
        trainer = RunTrainer(run, training, tokens, factor, profile, on_step, on_event, log_to)
        with _closing(trainer.callbacks):
            about: dict[str, Any] = {"mfu_convention": mfu_convention(peak), "peak_tflops": peak.flops / 1e12}
            about |= {"emulated": peak.emulated} if peak.emulated else {}
            about |= {"changed_values": changed} if changed else {}
            about |= {"skipped_tokens": rewinds_of(run)[-1].skipped} if rewind is not None else {}
            trainer.start(**about)
            if rearranged:
                trainer.rearrange(rearranged)
            if choice is not None:
                trainer.event("micro_batch", **asdict(choice))
            return trainer.train(lambda: group.any(stop()))


def _require_one_recipe(
    recipe: Recipe, tokens: "TokenSet", folder: Path, rewind: ManualRewind | None, group: ProcessGroup
) -> None:
    """Raise InputError on all processes if their arguments (except paths), leaven versions or events differ."""
    if group is SINGLE_PROCESS:
        return
    run = RunFolder(folder)
    require_seen(run.events_file, lambda: (seen := RunLines(run).events_digest()) != group.broadcast(seen), group)
    start = None if run.begun else recipe.start.folder
    mine = {
        "[start] weights": start and f"{weights_fingerprint(start)} {tensors_fingerprint(start)}",
        "recipe": recipe.model_dump(exclude={"why", "start", "data"}),
        "data": recipe.data.model_dump(exclude={"source", "tokenizer"}),
        "data.source": [str(share) for share in tokens.proportions]
        + list(tokens.names if len(tokens.names) > 1 else ()),
        "text or tokenizer": tokens.fingerprint,
        "--rewind-to": rewind and asdict(rewind),
        "version of leaven": __version__,
    }
    first = group.broadcast(mine)
    different = [path.removeprefix("recipe.") for path, *_ in differing(first, mine)]
    flags = group.all_gather([float(bool(different))])
    if different:
        raise InputError(f"rank {group.rank} has another {', '.join(different)} than rank 0; give all ranks the same")
    others = [str(rank) for rank, [flag] in enumerate(flags) if flag]
    if others:
        raise Settled(
            f"rank {', '.join(others)} differs from rank 0 in recipe, text, tokenizer, [start], --rewind-to or "
            "leaven version; give all ranks the same"
        )


def _built(
    recipe: Recipe, tokens: "TokenSet", group: ProcessGroup, stop: Callable[[], bool], resumes: bool
) -> tuple[Training, Choice | None]:
    """Return a run's initial state and micro-batch choice. The choice is None if nothing was measured."""
    if recipe.batch.micro_batch == "auto":
        require_memory(recipe)
        if group is not SINGLE_PROCESS:  # timing that ran out of memory on one device would block the others
            recipe = by_rule_of_thumb(recipe)
    training = Training(recipe, tokens, group=group, resumes=resumes)
    training.stop = stop
    if recipe.batch.micro_batch != "auto":
        return training, None
    choice = choose_micro_batch(training)
    training.recipe = with_micro_batch(recipe, choice.micro_batch, choice.why)
    return training, choice


class RunTrainer:
    """Trains a run from its newest checkpoint, if any, and writes the files in its folder."""

    def __init__(  # noqa: PLR0917
        self,
        run: RunFolder,
        training: Training,
        tokens: "TokenSet",
        bits_per_byte_factor: float | None,
        profile: RunProfile,
        on_step: Callable[[Step], None],
        on_event: Callable[[str, dict[str, Any]], None],
        log_to: Sequence[str],
    ) -> None:
        self.run, self.training, self.tokens, self.profile = run, training, tokens, profile
        self.lines, self._on_event = RunLines(run), on_event
        self.group = training.group
        self.damaged: list[Path] = []  # damaged checkpoints that are newer than the loaded one
        self._unwritten: str | None = None  # the value of ``lines.unwritten`` that was last reported
        self.log = StepLog(self, log_to, on_step)
        self.validation = Validation(self, bits_per_byte_factor)
        self.checkpoints = Checkpoints(self)
        self.spikes = SpikeGuard(self)
        # The guard is last: everything about a step is written before the run rolls back.
        self.callbacks: list[Callback] = [self.log, profile, self.validation, self.checkpoints, self.spikes]
        self.loop = Loop(training, self.callbacks, lookahead=True)

    def start(self, **about: Any) -> None:
        """Restore the newest usable checkpoint, or start a new run. Log a ``resume`` or ``start`` event with
        ``about``. Raise InputError if no checkpoint can be used, if the run was trained on other text, or if its
        files do not belong together."""
        recipe, saved = self.training.recipe, saved_checkpoints(self.run)
        # A network disk may show an event to one process late.
        rewinds, seconds = self.group.broadcast(
            (rewinds_of(self.run), seconds_spent(self.run)) if self.group.is_first else ((), 0.0)
        )
        changed: str | None = None
        found = self._newest(rewinds)
        if found is None and (self.training.resumes or checkpoints(self.run.checkpoints)):
            raise self._unusable()
        if found is not None:
            require_text(self.run, self.tokens.fingerprint, found.state.get(TEXT))
            changed = changed_lines(self.run.lines_of(self.run.events_file), lines_digest(found.state.get(EVENTS)))
        self.run.identity = identity_of(self.run, found.state if found is not None else {}) or token_hex(8)
        missing = None if found is None else missing_checkpoint(saved, found.progress.tokens)
        self._restore(found, rewinds, seconds)
        if changed is not None:
            self.event("file_changed", file="events.jsonl", why=changed)
        self.event(
            "start" if found is None else "resume",
            device=str(self.training.device),
            text=self.tokens.fingerprint,
            **{IDENTITY: self.run.identity},
            epochs=self.tokens.epochs(recipe.data.tokens),
            left_over=self.tokens.left_over(recipe.model.seq_len, recipe.data.tokens),
            damaged_checkpoints=[path.name for path in self.damaged],
            uneven_validation=self.tokens.uneven_validation(recipe.model.seq_len, recipe.evaluation.tokens),
            missing_checkpoint=missing if missing not in {path.name for path in self.damaged} else None,
            **self.log.batch(),
            **about,
        )
        self.profile.write()
        if found is None:  # a run that has trained always has a checkpoint
            self.checkpoints.save()
            if (error := self.checkpoints.log_outcome(wait=True)) is not None:
                raise self._unsaved(error)
        mark_begun(self.run)

    def train(self, stop: Callable[[], bool]) -> TrainDocument:
        """Train until the run is done or ``stop()`` returns True, and return the result. Raise Diverged if the run
        diverges, and InputError if text or checkpoints cannot be read or the end of the run cannot be saved."""
        try:
            if self.validation.owed:
                self.validation.evaluate()
            result = self.validation.evaluate() if self.loop.run(stop) else None
        except StopRequested:
            self.training.abandon_step()
            self.loop.read()
            result = None
        except TextUnreadable:
            if self.group is SINGLE_PROCESS:  # other processes do not know of this error
                with suppress(InputError):
                    self.training.abandon_step()
                    self.loop.read()
                    self.checkpoints.save_last()
            raise
        error = self.checkpoints.save_last()
        if result is not None:
            error = self._save_when_possible(error, stop)
        if result is None or (error is not None and stop()):
            self.event("stop", why="interrupted")
            self._tell_if(self.lines.unwritten, "lines_lost")
            return _summary(self.run, self.training.progress, None, error)
        if error is not None:
            raise self._unsaved(error)
        if not math.isfinite(result["loss"]):
            self.fail({"why": f"the validation loss is {result['loss']:g}: the run has diverged"})
        written = {METRICS: asdict(self.lines.metrics_digest()), EVENTS: asdict(self.lines.events_digest())}
        self.event("finish", **result, seconds=self.training.progress.seconds, **written)
        if self.group.any(self.lines.no_room) and not stop():
            self._tell_if(self.lines.unwritten, "waits")
        while self.group.any(self.lines.no_room) and not stop():
            time.sleep(SHORT_PAUSE)
            self.lines.write_waiting()
        if self.group.any(self.lines.no_room):  # stopped meanwhile
            self._tell_if(self.lines.unwritten, "lines_lost")
            return _summary(self.run, self.training.progress, None)
        self.lines.require_written()
        if self.group.is_first:
            _report_changed_files(self.run, self.training.tokens, self._on_event)
        return _summary(self.run, self.training.progress, result)

    def _save_when_possible(self, error: str | None, stop: Callable[[], bool]) -> str | None:
        """Retry saving after temporary errors until ``stop()`` is true. Return the last error, or None."""
        pauses = left = 1  # number of short pauses before the next attempt, and how many are left
        if waits := self.group.any(error is not None and storage.may_pass(error)):
            self._tell_if(str(error), "waits")
        while waits and not stop():
            time.sleep(SHORT_PAUSE)
            left -= 1
            if left <= 0 and not self.group.any(storage.is_full(self.run.checkpoints)):
                error = self.checkpoints.save_last()
                waits = self.group.any(error is not None and storage.may_pass(error))
                pauses = left = min(2 * pauses, 60)
        return error

    def rearrange(self, changes: list[Difference]) -> None:
        """Record that the run continues with another parallel layout or micro-batch."""
        training = self.training
        why = {path: f"since {training.tokens:,} tokens; before: {brief(before)}" for path, before, _ in changes}
        earlier = self.run.recipe().why
        rewinds = {path: reason for path, reason in earlier.items() if BY_REWIND in reason}
        training.recipe = training.recipe.replace({"why": earlier | training.recipe.why | rewinds | why})
        if self.run.writes:
            self.run.save_recipe(training.recipe, also_in_events=True)
        self.event("layout", **recorded_changes(changes, training.recipe))

    def roll_back(self, rewind: Rewind, values: dict[str, Any]) -> None:
        """Restore the newest undamaged checkpoint at or before the target of ``rewind``. Log a ``rollback`` event
        with ``values``. Raise Diverged if no checkpoint is left, and InputError if all are damaged."""
        rewinds = (*self.training.rewinds, rewind)
        found = self._newest(rewinds)
        if found is None and self.damaged:  # the user may be able to repair one
            raise self._unusable()
        if found is None:
            self.fail(values | {"why": f"{values['why']}; no checkpoint is left to go back to"})
        # The rollback is final once this line is on the disk: if the run is killed later, it resumes rolled back.
        earlier = [each.document() for each in self.training.rewinds]
        seconds = self.training.progress.seconds
        values |= {"earlier_rewinds": earlier, "from_tokens": found.progress.tokens, "seconds": seconds}
        self.lines.event("rollback", **values)
        self._restore(found, rewinds, seconds)
        names = [path.name for path in self.damaged]
        self._on_event("rollback", values | {"damaged_checkpoints": names})

    def fail(self, values: dict[str, Any]) -> NoReturn:
        """Log a ``stop`` event with ``values``, and raise Diverged with the message ``values["why"]``."""
        self.event("stop", **values)
        self._tell_if(self.lines.unwritten, "lines_lost")
        raise Diverged(values["why"])

    def event(self, name: str, **values: Any) -> None:
        """Write an event to the run folder and pass it to ``on_event``."""
        values = self._at | values
        self.lines.event(name, **values)
        self._on_event(name, values)
        if self.lines.unwritten != self._unwritten:
            self._unwritten = self.lines.unwritten
            self._tell_if(self.lines.unwritten, "unwritten")

    @property
    def _at(self) -> dict[str, int]:
        return {"step": self.training.progress.step, "tokens": self.training.tokens}

    def _tell_if(self, why: str | None, event: str) -> None:
        """If there is a reason ``why``, pass it to ``on_event``. Unlike :meth:`event`, do not write to the folder."""
        if why is not None:
            self._on_event(event, self._at | {"why": why})

    def _newest(self, rewinds: tuple[Rewind, ...]) -> Checkpoint | None:
        """Return the newest usable checkpoint, or None, and set :attr:`damaged` to the newer, damaged ones. Raise
        InputError if the checkpoint does not belong to the files of the run."""
        found, damaged = read_checkpoint(self.run.checkpoints, rewinds, group=self.group, recipe=self.training.recipe)
        if found is not None:
            require_own_files(self.run, found.state)
        self.damaged = damaged
        return found

    def _unsaved(self, error: str) -> InputError:
        return InputError(
            f"{self.run.checkpoints}: checkpoint not saved: {error}; correct this and run the same command again"
        )

    def _unusable(self) -> InputError:
        gone = "its checkpoints are gone; bring them back (is their disk mounted?)"
        why = unusable_checkpoints(self.run, self.damaged) or gone
        return InputError(f"{self.run.checkpoints}: {why}, or start again with another --run")

    def _restore(self, found: Checkpoint | None, rewinds: tuple[Rewind, ...], seconds: float) -> None:
        """Continue from ``found`` after ``rewinds``. ``seconds`` includes the time of the steps that they undo."""
        if found is not None:
            self.training.restore(replace(found, progress=replace(found.progress, seconds=seconds)))
        self.training.follow(rewinds)
        # The checkpoints first: they raise InputError if there is a newer one, and nothing must have changed then.
        for callback in sorted(self.callbacks, key=lambda each: each is not self.checkpoints):
            callback.restore(found.state if found is not None else {})


@contextmanager
def _closing(callbacks: Sequence[Callback]) -> Iterator[None]:
    """Close the callbacks at the end of the block. If the block raises an error, ignore errors of ``close``."""
    try:
        yield
    except BaseException:
        for callback in callbacks:
            with suppress(Exception):
                callback.close()
        raise
    for callback in callbacks:
        callback.close()


@contextmanager
def _opened(run: RunFolder, recipe: Recipe, rewind: ManualRewind | None, group: ProcessGroup) -> Iterator[None]:
    """Rewind the run if asked, lock its folder and prepare its files, all in the first process. If this fails, all
    processes raise :class:`Settled` with the same message."""
    group.barrier()
    run.writes = group.is_first
    with ExitStack() as stack:
        refused: str | None = None
        try:
            if rewind is not None and group.is_first:
                rewind.go(run, recipe)
            if group.is_first:
                stack.enter_context(run.locked())
                require_run_of(run, recipe)  # again: another process may have started a run here before the lock
                run.begin(recipe)
        except InputError as error:
            refused = str(error)
        refused = group.broadcast(refused)
        if refused is not None:
            raise Settled(refused)
        yield


@contextmanager
def _no_folder_of_a_failed_start(run: RunFolder) -> Iterator[None]:
    """Remove the folder of a new run if memory runs out before the metrics of its first step are written."""
    new = not run.path.exists()
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if new and run.writes and out_of_memory(error) and not run.metrics():
            shutil.rmtree(run.path, ignore_errors=True)
        raise


def check(
    recipe: Recipe, folder: Path, rewind: ManualRewind | None = None
) -> tuple[RunFolder, Recipe, ManualRewind | None]:
    """Return the run folder, the recipe with the run's micro-batch in place of "auto", and the rewind, or None if the
    run has done it already. Raise InputError if the recipe cannot be trained in the folder."""
    run = RunFolder(folder)
    recipe = as_started(recipe, run)
    if rewind is not None and not rewind.done(run, recipe):
        rewind.check(run, recipe)
        return run, recipe, rewind
    require_run_of(run, recipe)
    return run, recipe, None


def _report_changed_files(run: RunFolder, tokens: int, on_event: Callable[[str, dict[str, Any]], None]) -> None:
    changed = changed_since(run, run.finish())
    if not checkpoints(run.checkpoints):
        changed[run.checkpoints.name] = "no checkpoint is there"
    for file, why in changed.items():
        on_event("finished_file_changed", {"file": file, "tokens": tokens, "why": why})


def _summary(
    run: RunFolder, progress: Progress, finish: dict[str, Any] | None, unsaved: str | None = None
) -> TrainDocument:
    # Each start may have measured another peak; the speed of all steps is divided by the latest.
    starts = [event for event in run.events() if _positive(event.get("peak_tflops"))]
    metrics = run.metrics()
    speeds = [line["tflops"] for line in metrics if _positive(line.get("tflops"))]
    noise = [line["noise_scale"] for line in metrics if _positive(line.get("noise_scale"))]
    rewinds = rewinds_of(run) if finish is None else ()
    used: dict[str, Any] = dict.fromkeys(("mfu", "mfu_causal", "hfu"))
    if starts and speeds:
        recipe = run.recipe()
        mfu = median(speeds) / starts[-1]["peak_tflops"]
        used = utilisation(recipe.model, recipe.layout.recompute, mfu)
    return TrainDocument(
        loss=finish["loss"] if finish else None,
        tokens=progress.tokens,
        steps=progress.step,
        seconds=progress.seconds,
        rollbacks=len(run.rollbacks()),
        finished=finish is not None,
        bits_per_byte=finish.get("bits_per_byte") if finish else None,
        **used,
        mfu_convention=starts[-1].get("mfu_convention") if starts else None,
        unsaved=unsaved,
        saved_tokens=max(
            (tokens_of(path) for path in checkpoints(run.checkpoints) if not is_undone(path, rewinds)), default=0
        ),
        noise_scale=noise[-1] if noise else None,
        averaged_loss=finish.get("averaged_loss") if finish else None,
    )


def _positive(value: Any) -> bool:
    """Return whether a value from a possibly damaged file is a positive number."""
    return isinstance(value, int | float) and value > 0
