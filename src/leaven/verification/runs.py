"""Train the runs of a check in worker processes, and save each result as soon as the run ends.

A run is a trial with a ``key``, under which the result is saved. The key is a hash of everything that determines the
loss, so checks can share a folder, and a stopped check resumes with the missing runs. Only the text is not part of
the key. Its fingerprint is saved beside the result.
"""

import json
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

from leaven import storage
from leaven.documents import sealed
from leaven.documents.checks import CheckDocument
from leaven.errors import InputError
from leaven.training.integrity import is_other_text
from leaven.training.outcome import Outcome
from leaven.training.run_folder import LockedFolder
from leaven.training.trial import WorkerPool
from leaven.verification.foreign import CheckTrial, ModelFamily
from leaven.verification.model_instance import RunSetting

LINES, RESULT = "runs.jsonl", "check.json"
DIGEST = "blake2b"  # key of the digest of a line; lines of benchmarks/lr_transfer.py have no digest
TEXT = "text"  # key of the fingerprint of the text, if there is a text
OTHERS = ("events.jsonl", "metrics.jsonl", "study.json", "centre.toml")  # files of a run or a study
Key = TypeVar("Key")


class ChecksStopped(Exception):
    """The runs were stopped before all had finished. The finished runs are saved, unless the disk is full."""


class RunStore:
    """A context manager that runs trials in one-thread worker processes and saves their results in a folder."""

    def __init__(
        self,
        folder: Path,
        workers: int = 2,
        on_run: Callable[[int, int], None] = lambda done, total: None,
        stop: Callable[[], bool] = lambda: False,
        *,
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Create the store without starting workers.

        :meth:`run` calls ``on_run(done, total)`` with numbers of trials, and stops once ``stop`` returns true.
        ``note`` gets messages for the user.
        """
        self.folder, self._workers, self._on_run, self._stop = folder, workers, on_run, stop
        self._note = note
        self._resources, self._locked = ExitStack(), LockedFolder(folder, "--run")
        self._pool: WorkerPool | None = None
        self._ended: dict[str, Outcome] = {}
        self._texts: dict[str, str] = {}  # fingerprints of the texts of finished runs, by key
        self._unsaved: deque[dict[str, Any]] = deque()  # lines of finished runs that could not be written yet
        self._damaged = 0  # number of lines in the folder that are damaged or changed
        self._waits = False  # whether the last write failed; one message is printed

    def __enter__(self) -> "RunStore":
        return self

    def __exit__(self, *exception: object) -> None:
        self._resources.close()

    def run(self, trials: Iterable[CheckTrial]) -> Callable[[CheckTrial], Outcome]:
        """Run the trials that have no result yet, the longest first. Return a function from a trial to its outcome.

        Raise InputError if the folder is unusable, if its runs were trained on another text, or if a run's process
        dies twice. Raise ChecksStopped if the store's ``stop`` returned true before all results were saved.
        """
        wanted = {trial.key: trial for trial in trials}
        first, pool = self._pool is None, self._open()
        texts = {key: text for key, trial in wanted.items() if (text := getattr(trial, "text", None)) is not None}
        if any(self._texts.get(key, text) != text for key, text in texts.items()):
            raise InputError(
                f"{self.folder / LINES} has runs on another text: the files of the source or the tokenizer have "
                "changed since; use another --run"
            )
        queue = sorted(wanted.keys() - self._ended.keys(), key=lambda key: (wanted[key].cost, key))
        if queue:
            self._note_unused(first and len(queue) == len(wanted))
        self._on_run(len(wanted) - len(queue), len(wanted))
        died: set[str] = set()  # keys of runs whose process died once
        pending: dict[Future[Outcome], str] = {}
        try:
            while (queue or pending) and not self._stop():
                while queue and len(pending) < self._workers:
                    key = queue.pop()
                    pending[pool.submit(wanted[key].run)] = key
                for future in wait(pending, timeout=0.5, return_when=FIRST_COMPLETED).done:
                    key = pending.pop(future)
                    try:
                        self._ended[key] = future.result()
                    except BrokenProcessPool:
                        if key in died:
                            raise InputError(
                                "the process of a run died twice; possible cause: out of memory; give fewer --workers"
                            ) from None
                        died.add(key)
                        queue.append(key)
                        continue
                    line = {"key": key} | asdict(self._ended[key])
                    line |= {TEXT: texts[key]} if key in texts else {}
                    self._unsaved.append(line | {DIGEST: _digest(line)})
                    self._on_run(len(wanted.keys() & self._ended.keys()), len(wanted))
                self._save()
        except BaseException:
            if not self._save():
                self._note(f"caution: {len(self._unsaved)} finished runs could not be saved")
            raise
        while not self._save() and not self._stop():
            time.sleep(0.5)
        ended = len(wanted.keys() & self._ended.keys())
        if self._unsaved:
            raise ChecksStopped(
                f"{len(self._unsaved)} of {ended} finished runs could not be saved in {self.folder / LINES} and must "
                "run again"
            )
        if ended < len(wanted):
            raise ChecksStopped(f"{ended} of {len(wanted)} runs have ended")
        return lambda trial: self._ended[trial.key]

    def _note_unused(self, all_of_others: bool) -> None:
        file = self.folder / LINES
        if self._damaged:
            self._note(f"caution: lines of {file} are damaged or changed and do not count: {self._damaged}")
            self._damaged = 0
        elif all_of_others and self._ended:
            self._note(f"no result in {file} fits this model and its settings; every run is trained")

    def _save(self) -> bool:
        """Write the lines of finished runs. Return False on failure. The next call writes the remaining lines."""
        while self._unsaved:
            self._locked.require()
            try:
                # The last call may have written this line and then failed to flush it.
                if self._waits and storage.ends_with(self.folder / LINES, self._unsaved[0]):
                    storage.sync_file(self.folder / LINES)
                else:
                    storage.append_json(self.folder / LINES, self._unsaved[0])
            except OSError as error:
                if not self._waits:
                    why = error.strerror or error
                    self._note(
                        f"caution: {self.folder / LINES}: {why}; finished runs stay in memory until the file can be "
                        "written"
                    )
                self._waits = True
                return False
            self._unsaved.popleft()
        self._waits = False
        return True

    def losses(self, family: ModelFamily, settings: Mapping[Key, RunSetting], seeds: int) -> dict[Key, list[float]]:
        """Train each setting with the seeds 0 to ``seeds - 1``, and return the losses by the keys of ``settings``."""
        trials = {
            key: [family.trial(replace(setting, seed=seed)) for seed in range(seeds)]
            for key, setting in settings.items()
        }
        outcome = self.run(trial for several in trials.values() for trial in several)
        return {key: [outcome(trial).loss for trial in several] for key, several in trials.items()}

    def keep(self, document: CheckDocument) -> CheckDocument:
        """Add the folder's number of runs to a check's document. Write and return the document."""
        if self._pool is not None:  # the folder is locked
            self._locked.require()
        document = document.model_copy(update={"runs": len(self._ended)})
        storage.write_text(self.folder / RESULT, json.dumps(sealed(document.dump()), indent=2) + "\n")
        return document

    def _open(self) -> WorkerPool:
        """Return the worker pool. The first call locks and reads the folder, or raises InputError."""
        if self._pool is None:
            other = next((name for name in OTHERS if (self.folder / name).exists()), None)
            if other is not None and not (self.folder / LINES).exists():
                raise InputError(f"{self.folder} is the folder of a run or a study ({other}); use another --run")
            self._resources.enter_context(self._locked)
            storage.require_plain_file(self.folder / LINES)
            read = storage.read_json_lines(self.folder / LINES)
            self._damaged = len(read.damaged)
            for entry in read.documents:
                digest = entry.pop(DIGEST, None)
                try:
                    if digest not in {None, _digest(entry)}:
                        raise ValueError("a changed line")
                    key = str(entry.pop("key"))
                    entry.pop("earlier_runs", None)  # older versions counted the runs
                    text = entry.pop(TEXT, None)
                    self._ended[key] = Outcome.of(entry)
                    if isinstance(text, str):
                        self._texts[key] = text
                except (KeyError, TypeError, ValueError, OverflowError):
                    self._damaged += 1
            if (self.folder / RESULT).exists() and not self._ended:
                raise InputError(
                    f"{self.folder} has the result of a check, but {LINES} has no readable runs; bring this file "
                    "back, or start again with another --run"
                )
            if not self._ended and is_other_text(self.folder / LINES, "key"):
                raise InputError(f"{self.folder / LINES} has lines that are no runs of a check; use another --run")
            self._pool = self._resources.enter_context(WorkerPool(self._workers))
        return self._pool


def _digest(line: Mapping[str, Any]) -> str:
    return storage.digest(json.dumps(line, sort_keys=True).encode())
