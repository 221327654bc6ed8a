"""A study whose trials run a shell command, such as another trainer or a cluster job.

Each attempt at a trial has a folder ``trials/NUMBER`` in the study's folder. It contains:

- ``output.log``, the output of the command.
- ``out``, a folder that is empty at first; ``{out}`` in the command is its path.
- The files to which ``{recipe}`` and ``{config}`` in the command refer.

With ``resume = true``, all attempts at a trial share the folder of the first one.

How a trial ends:

- Complete: the command ends with exit code 0 and has reported a loss.
- Diverged: a loss is NaN or infinite, or the output matches the pattern ``diverged``. leaven then ends the command.
  If the values of a trial are not allowed together, the trial counts as diverged, and no command runs.
- Pruned: its losses are too far behind those of the best trial. leaven then ends the command.
- Failed: two attempts at the trial failed. An attempt fails if the exit code is not 0, no loss can be read, the
  command takes longer than ``timeout_seconds``, or leaven itself dies. An attempt that ends while the disk of the
  study is full, or because the user stops the search, does not count.

If the command fails at the start point before any trial has a result, the command is probably wrong, so the search
ends. If many attempts in a row fail, the machine is probably at fault (``search_loop.py``).
"""

import math
import os
import re
import shlex
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Self

from leaven.errors import InputError
from leaven.planning.this_machine import VISIBLE
from leaven.storage import is_full, make_folder, open_file, open_to_write, require_file, write_text
from leaven.training.early_stopping import expected, should_prune
from leaven.training.outcome import Curve, Outcome, this_process
from leaven.tuning.command import OUT, RECIPE, SEED, Command, CommandSpace, fill, inputs_of, values_of
from leaven.tuning.point import Value
from leaven.tuning.service.leases import machine
from leaven.tuning.service.losses import read_losses, why_none, written_losses
from leaven.tuning.service.processes import Commands
from leaven.tuning.service.search_loop import Objectives, Proposal, TrialReleased, WorkerDied
from leaven.tuning.service.stores import StoreGone
from leaven.tuning.service.study import BaseStudy
from leaven.tuning.service.study_folder import free_name
from leaven.tuning.space import SearchSpace
from leaven.tuning.study_document import StudyDocument

TRIALS, OUTPUT, BEST = "trials", "output.log", "best"
# Study attribute: the folder in which commands run, relative to the study's folder. With a database, each machine has
# an attribute FOLDER:MACHINE with the absolute folder.
FOLDER = "leaven:folder"
COMMAND_POLL = 0.25  # seconds between checks of a running command
# After a command has ended, leaven waits this share of the command's run time, but at most ``COMMAND_POLL``: the
# signal that ended the command may be about to reach leaven, too, and then the trial does not count.
SETTLING = 0.02
READING = 0.1  # the largest share of the time that is spent on reading the losses of a running command
MOST_BYTES = 2**26  # only so many bytes at the end of an output are searched for the pattern ``diverged``
AWAY_SECONDS = 300.0  # how long leaven waits for the losses of an ended command if their disk is unreachable
LAST_BYTES, LAST_LINES, LAST_CHARACTERS = 2**16, 4, 400  # how much of a failed command's output a message shows


@dataclass
class CommandTrainer:
    """The objective of a :class:`CommandStudy`: runs the command with the values of a proposal."""

    command: Command
    space: SearchSpace
    folder: Path  # contains a folder for each attempt
    devices: Sequence[str | None]  # the GPUs of each worker, as in ``CUDA_VISIBLE_DEVICES``; None: all GPUs
    works: bool  # whether a trial of the study already has a result, so that the command is known to work
    stop: Callable[[], bool]  # returns whether to stop; running trials are then ended, and run again later
    note: Callable[[str], None]  # shows a line to the user
    one_folder: bool = True  # whether all machines of the study use ``folder``; false with a database

    def __post_init__(self) -> None:
        self._leaving, self._commands = threading.Event(), Commands()
        self._waits = False  # whether the user knows that trials wait, because the disk is full

    def __enter__(self) -> "CommandTrainer":
        self._commands.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._leaving.set()
        self._commands.__exit__()

    def __call__(self, proposal: Proposal) -> Outcome:
        """Run the command and return its outcome. The loss is infinite if the values cannot be combined.

        Raises:
            TrialReleased: if the search stopped the command, or if a full disk may have lost output.
            WorkerDied: if the command failed for another reason, or if no process can be started.
            StoreGone: if the command has ended, but its losses cannot be read for ``AWAY_SECONDS``.
            InputError: if the command failed at the start point before any trial had a result, if the folders of all
                trials are gone, or if the file of the command's output was replaced.
        """
        command = self.command
        number = proposal.origin if command.resume else proposal.number
        folder = self.folder / f"{number:06d}"
        try:
            values = values_of(command, self.space, proposal, folder, proposal.seed, proposal.worker)
        except ValueError:  # values that are invalid together, such as a warm-up longer than the run
            return Outcome(math.inf)
        self._check_folder(folder, retry=number != proposal.number)
        make_folder(folder / "out")
        for path, text in inputs_of(command, self.space, proposal, values).items():
            make_folder(path.parent)
            write_text(path, text)
        output = self._open_output(folder / OUTPUT)
        try:
            outcome = self._run(proposal, values, folder, output)
        except InputError:  # this ends the search, so end the other commands, too
            self._leaving.set()
            raise
        finally:
            with suppress(OSError):  # a network disk is full or away
                output.close()
        if is_full(self.folder):  # also if the command succeeded: it may have lost the end of its log
            how = outcome if isinstance(outcome, str) else "ended"
            self.note(f"trial {proposal.number} {how}; the disk of {self.folder} is full, so the trial runs again")
            raise TrialReleased
        if isinstance(outcome, str):
            raise self._failure(proposal, folder / OUTPUT, outcome)
        self.works = True
        return outcome

    def _run(self, proposal: Proposal, values: Mapping[str, Value], folder: Path, output: BinaryIO) -> Outcome | str:
        """Run the command. Return its outcome, or a text such as "ended with exit code 1" if it failed."""
        command = self.command
        # Without this, a command in Python would keep its output, and so its losses, in a buffer.
        environment = {"PYTHONUNBUFFERED": "1"}
        if (device := self.devices[proposal.worker]) is not None:
            environment[VISIBLE] = device
        environment |= {name: fill(text, values) for name, text in command.environment.items()}
        where = Path(fill(command.loss.where, values)) if command.loss.where else folder / OUTPUT
        earlier = written_losses(command.loss, where) if command.resume else []
        try:
            process = self._commands.start(command.filled(values), environment, output)
        except BlockingIOError as error:  # too many processes on this machine, perhaps of other programs
            raise WorkerDied(f"could not be started: {error.strerror}") from None
        try:
            outcome = self._watch(process, proposal, folder / OUTPUT, where)
            _require_same_file(output, folder / OUTPUT)
            complete = isinstance(outcome, Outcome) and math.isfinite(outcome.loss) and not outcome.stopped
            if complete and earlier and earlier == written_losses(command.loss, where):
                self.note(
                    f"trial {proposal.number} ended with exit code 0, but reported no further loss; the last loss of "
                    f"an earlier attempt counts; see {folder / OUTPUT}"
                )
            return outcome
        finally:
            if left := self._commands.end(process):
                pids = ", ".join(map(str, left))
                self.note(
                    f"trial {proposal.number}: process {pids} cannot be ended; possible cause: it belongs to another "
                    "user; end it yourself"
                )

    def _check_folder(self, folder: Path, *, retry: bool) -> None:
        """Before the command starts, rename a folder that already exists. If this is a ``retry`` of an attempt that
        used the folder, keep it; if it is missing, tell the user, or raise InputError if its disk seems unmounted."""
        made_before = self.folder.exists()
        make_folder(self.folder)
        if folder.exists() and not retry:
            moved = free_name(folder)
            folder.rename(moved)
            self.note(f"{folder} was left by a trial that the store does not have; it was renamed to {moved}")
        elif retry and not folder.exists():
            missing = f"{folder}, the folder of an earlier attempt at this trial, is gone"
            # The mount point of a disk that is not mounted is empty, or has a file that says so.
            if made_before and self.one_folder and not any(path.name.isdigit() for path in self.folder.iterdir()):
                self._leaving.set()
                create = f"mkdir {shlex.quote(str(folder))}"
                raise InputError(f"{missing}; mount its disk, or type {create} to begin the trial again")
            self.note(f"{missing}; the trial begins again")

    def has_room(self) -> bool:
        """Return whether the disk has room. Tell the user about a full disk once."""
        full = is_full(self.folder if self.folder.exists() else self.folder.parent)
        if full and not self._waits:
            self.note(f"the next trial waits, because the disk of {self.folder} is full; make room")
        self._waits = full
        return not full

    def _open_output(self, path: Path) -> BinaryIO:
        """Open the file for a command's output. Lock it if several attempts write to it (``resume = true``)."""
        if not self.command.resume:
            return open_to_write(path, os.O_CREAT | os.O_TRUNC)
        output = self._locked(path, separate=False)
        if os.fstat(output.fileno()).st_nlink != 1:  # it has a second name: open a copy; or it was removed meanwhile
            output.close()
            output = self._locked(path, separate=True)
        if os.fstat(output.fileno()).st_size:  # an attempt that was killed may have left a part of a line
            with suppress(OSError):
                os.write(output.fileno(), b"\n")
        return output

    def _locked(self, path: Path, *, separate: bool) -> BinaryIO:
        """Open a file and lock it, once no earlier attempt holds the lock. For ``separate``, see
        :func:`open_to_write`. Raise TrialReleased if the search is stopped meanwhile."""
        import fcntl  # not available on Windows

        output = open_to_write(path, os.O_CREAT | os.O_APPEND, separate=separate)
        try:
            while not (self.stop() or self._leaving.is_set()):
                try:
                    fcntl.flock(output, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    return output
                except BlockingIOError:
                    time.sleep(COMMAND_POLL)
                except OSError:  # the file system does not support locks
                    return output
            raise TrialReleased
        except BaseException:
            output.close()
            raise

    def _watch(
        self, process: "subprocess.Popen[bytes]", proposal: Proposal, output: Path, where: Path
    ) -> Outcome | str:
        """Watch a command until it ends, diverges, should be pruned or times out. Return its outcome, or why it
        failed. Raise TrialReleased if the search stops meanwhile. ``output`` is the file of its printed text, and
        ``where`` the path of its losses."""
        command, began, next_look = self.command, time.monotonic(), 0.0
        baseline = proposal.baseline if command.prune else None
        while True:
            with suppress(subprocess.TimeoutExpired):
                process.wait(COMMAND_POLL)
            code, look = process.poll(), time.monotonic()
            if code is not None:  # the signal that ended the command may reach leaven, too
                time.sleep(min(COMMAND_POLL, SETTLING * (look - began)))
            if self.stop() or self._leaving.is_set():
                raise TrialReleased
            if code is None:
                if command.timeout_seconds is not None and look - began > command.timeout_seconds:
                    return f"took longer than timeout_seconds = {command.timeout_seconds:g}"
                if look < next_look:
                    continue
            try:
                found, text = self._reported(proposal, output, where, complete=code is not None)
            except InputError as error:
                return f"reported a loss that cannot be read: {error}"
            curve = tuple(sorted(found))  # by step: a resumed attempt may repeat steps of the earlier attempt
            ran = Outcome(
                loss=found[-1][1] if found else math.nan,
                tokens=curve[-1][0] if curve and command.loss.tokens_per_step else 0,
                seconds=look - began,
                curve=curve,
                worker=f"{this_process()}-{proposal.worker + 1}",
            )
            finite = all(math.isfinite(loss) for _, loss in curve)
            if not finite or (command.diverged and re.search(command.diverged, text)):
                return replace(ran, loss=math.inf)
            if code is None:
                if baseline is not None and curve and should_prune(curve, baseline):
                    return replace(ran, loss=expected(curve, baseline), stopped=True)
                next_look = look + (time.monotonic() - look) / READING
                continue
            if code:
                return f"ended with exit code {code}" if code > 0 else f"was killed by signal {-code}"
            return ran if curve else why_none(command.loss, where)

    def _reported(self, proposal: Proposal, output: Path, where: Path, *, complete: bool) -> tuple[Curve, str]:
        """Return the losses of a command, and the last part of its output ("" if the command has no ``diverged``).

        If its files cannot be read, return ((), "") while it runs, but wait for them if it is ``complete``. Raise
        StoreGone after `AWAY_SECONDS` of waiting, and TrialReleased if the search is stopped meanwhile.
        """
        command, began, warned = self.command, time.monotonic(), False
        while True:
            try:
                require_file(output)
                losses = read_losses(command.loss, where, complete=complete, resumed=command.resume)
                return losses, _end_of(output, MOST_BYTES) if command.diverged else ""
            except OSError as error:
                if not complete:
                    return (), ""
                if time.monotonic() - began > AWAY_SECONDS:
                    raise StoreGone(
                        f"{where} cannot be read ({error.strerror}); mount its disk, then run the same command again"
                    ) from None
            if not warned:
                self.note(f"trial {proposal.number} has ended, but {where} cannot be read; waiting for its disk")
                warned = True
            time.sleep(COMMAND_POLL)
            if self.stop() or self._leaving.is_set():
                raise TrialReleased

    def _failure(self, proposal: Proposal, output: Path, how: str) -> Exception:
        """Return WorkerDied or, if the start point failed before any trial had a result, InputError."""
        lines = [line.strip() for line in _end_of(output, LAST_BYTES).splitlines() if line.strip()]
        last = " | ".join(lines[-LAST_LINES:])[-LAST_CHARACTERS:] or "none"
        message = f"{how}; the last lines of its output ({output}): {last}"
        if not self.works and not any(proposal.values()):
            self._leaving.set()
            return InputError(f"the first run of the command {message}")
        self.note(f"trial {proposal.number} {message}")
        return WorkerDied(message)


def _require_same_file(output: BinaryIO, path: Path) -> None:
    """Raise InputError if another program replaced the file at ``path`` after leaven opened it as ``output``."""
    try:
        there = os.stat(path)
    except OSError:  # the file was moved or its disk is away, so no other file was read
        return
    with suppress(OSError):  # raised if another machine has removed the open file
        if os.path.samestat(os.fstat(output.fileno()), there):
            return
    raise InputError(
        f"{path} was replaced while the trial's command ran, so the losses of this trial were not used; run the same "
        "leaven command again (possible causes: another study in this folder, an editor, a sync program)"
    )


def _end_of(output: Path, most: int) -> str:
    with open_file(output) as file:
        file.seek(max(file.seek(0, os.SEEK_END) - most, 0))
        return file.read().decode(errors="replace").replace("\r\n", "\n").replace("\r", "\n")


class CommandStudy(BaseStudy):
    """A study whose trials run ``command``. See :class:`BaseStudy` for the other arguments.

    The constructor raises InputError on Windows, if the command does not fit the space (:meth:`Command.check`), or if
    ``noise`` is not 0 and the command has no placeholder for the seed. A study in a journal must run in the folder in
    which it began; entering the context in another folder raises InputError.
    """

    def __init__(
        self,
        out: Path,
        command: Command,
        space: SearchSpace,
        method: str,
        store: str | None = None,
        *,
        noise: float | None = None,
        from_study: Path | None = None,
    ) -> None:
        command.check(space)
        if os.name == "nt":
            raise InputError("a study over a command needs /bin/sh, which Windows does not have; use WSL")
        if noise != 0 and not {SEED, RECIPE, "data.seed"} & command.used:
            raise InputError(
                "the command has no {seed}, so its trials cannot have different seeds; add {seed}, or give --noise 0 "
                "if equal values always give the same loss"
            )
        self._command = command
        shared: dict[str, Any] = {"command": command.settings}
        if isinstance(space, CommandSpace):  # a machine that uses another folder has no centre.toml to compare with
            shared["values"] = {name: value.model_dump(mode="json") for name, value in space.file.space.items()}
        choices = [{each.path: float(level)} for each in space.dimensions for level in range(1, len(each.levels))]
        for choice in ({}, *choices):  # before anything is written, fill the command with every text
            try:
                values = values_of(command, space, dict.fromkeys(space.paths, 0.0) | choice, out / BEST)
            except ValueError:  # values that are invalid together
                continue
            command.filled(values)
        super().__init__(
            out,
            space.within_near() if method == "grid" else space,
            method,
            store,
            noise=noise,
            from_study=from_study,
            shared=shared,
            about={
                "command": command.command,
                "loss_pattern": command.loss.pattern or "",
                "progress": command.loss.progress,
                "command_folder": os.path.relpath(os.path.realpath(os.curdir), os.path.realpath(out)),
            },
        )

    def __enter__(self) -> Self:
        opened = super().__enter__()
        study, in_journal = self._stored.study, isinstance(self._where, Path)
        key, here = FOLDER, self._about["command_folder"]
        if not in_journal:  # machines that share a database may use different folders
            key, here = f"{FOLDER}:{machine()}", os.path.realpath(os.curdir)
        if (there := study.user_attrs.get(key)) is None:
            study.set_user_attr(key, here)
        elif there != here and in_journal:
            folder = shlex.quote(os.path.relpath(os.path.realpath(self.out / there)))
            raise InputError(
                f"{self._name} has run its command in another folder so far; type cd {folder} first, or, if you "
                "moved the study, move it back"
            )
        elif there != here:
            self._note(
                f"caution: {self._name} began in {there} on this machine, and its command now runs in {here}; if "
                "the programs in the two folders differ, use another --study, because their losses cannot be compared"
            )
        return opened

    @contextmanager
    def _trainer(self, devices: Sequence[str | None]) -> Iterator[Objectives]:
        with CommandTrainer(
            self._command,
            self.space,
            self.out / TRIALS,
            devices=devices,
            works=any(trial.has_result for trial in self._stored.trials),
            stop=self._stop,
            note=self._note,
            one_folder=isinstance(self._where, Path),
        ) as trainer:
            self._ready = trainer.has_room
            yield lambda proposals: [trainer(each) for each in proposals]

    def state(self) -> StudyDocument:
        state = super().state()
        if state.best is None:
            return state
        best = self._command.line(self._best_values(state.octaves))
        return state.model_copy(update={"best_command": best})

    def _inputs(self, state: StudyDocument) -> dict[str, str]:
        if state.best is None:
            return {}
        found = inputs_of(self._command, self.space, state.octaves, self._best_values(state.octaves))
        return {str(path.relative_to(self.out.absolute())): text for path, text in found.items()}

    def _best_values(self, point: Mapping[str, float]) -> dict[str, Value]:
        found = values_of(self._command, self.space, point, self.out / BEST)
        return found | {OUT: str(Path("runs", self.space.name))}
