"""Train the runs of a check in worker processes, and save each result as soon as the run ends.

A result is saved under a key, the hash of everything that determines the loss of the run. So several checks can share
a folder, and a check that was stopped or killed resumes with the missing runs.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TypeVar

from leaven import storage
from leaven.documents.checks import CheckDocument
from leaven.errors import InputError
from leaven.training.outcome import Outcome
from leaven.training.run_folder import locked_folder
from leaven.training.trial import WorkerPool
from leaven.verification.foreign import CheckTrial, ModelFamily
from leaven.verification.model_instance import RunSetting

LINES, RESULT = "runs.jsonl", "check.json"
Key = TypeVar("Key")


class ChecksStopped(Exception):
    """The runs were stopped before all had finished. The finished runs are saved."""


class RunStore:
    """A context manager that runs trials in one-thread worker processes and saves their results in a folder.

    The first :meth:`run` locks the folder and starts the workers. The end of the context stops them.
    """

    def __init__(
        self,
        folder: Path,
        workers: int = 2,
        on_run: Callable[[int, int], None] = lambda done, total: None,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """Create the store without starting workers.

        ``on_run`` is called with the number of finished runs and the number of all runs. ``stop`` is called
        repeatedly, and the runs stop once it returns true.
        """
        self.folder, self._workers, self._on_run, self._stop = folder, workers, on_run, stop
        self._resources = ExitStack()
        self._pool: WorkerPool | None = None
        self._ended: dict[str, Outcome] = {}

    def __enter__(self) -> "RunStore":
        return self

    def __exit__(self, *exception: object) -> None:
        self._resources.close()

    def run(self, trials: Iterable[CheckTrial]) -> Callable[[CheckTrial], Outcome]:
        """Run the trials that have no result yet, the longest first. Return a function that takes a trial and returns
        its outcome.

        Raises:
            InputError: if the folder is in use or cannot be created, or a run's process dies twice.
            ChecksStopped: if ``stop`` returned True.
        """
        wanted = {trial.key: trial for trial in trials}
        pool = self._open()
        queue = sorted(wanted.keys() - self._ended.keys(), key=lambda key: (wanted[key].cost, key))
        self._on_run(len(wanted) - len(queue), len(wanted))
        died: set[str] = set()  # keys of runs whose process died once
        pending: dict[Future[Outcome], str] = {}
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
                storage.append_json(self.folder / LINES, {"key": key} | asdict(self._ended[key]))
                self._on_run(len(wanted.keys() & self._ended.keys()), len(wanted))
        ended = len(wanted.keys() & self._ended.keys())
        if ended < len(wanted):
            raise ChecksStopped(f"{ended} of {len(wanted)} runs have ended")
        return lambda trial: self._ended[trial.key]

    def losses(self, family: ModelFamily, settings: Mapping[Key, RunSetting], seeds: int) -> dict[Key, list[float]]:
        """Train each setting with the seeds 0 to ``seeds - 1``, and return the losses under the setting's key."""
        trials = {
            key: [family.trial(replace(setting, seed=seed)) for seed in range(seeds)]
            for key, setting in settings.items()
        }
        outcome = self.run(trial for several in trials.values() for trial in several)
        return {key: [outcome(trial).loss for trial in several] for key, several in trials.items()}

    def keep(self, document: CheckDocument) -> CheckDocument:
        """Write the check's document into the folder of the runs, for ``leaven report``."""
        storage.write_text(self.folder / RESULT, json.dumps(document.dump(), indent=2) + "\n")
        return document

    def _open(self) -> WorkerPool:
        """Return the worker pool. The first call locks the folder, reads the saved results and starts the workers.

        Lines of the file that are not outcomes are ignored.

        Raises:
            InputError: if the folder is in use or cannot be created, or has the result of a check without its runs.
        """
        if self._pool is None:
            self._resources.enter_context(locked_folder(self.folder, "--run"))
            if (self.folder / RESULT).exists() and not (self.folder / LINES).exists():
                raise InputError(
                    f"{self.folder} has the result of a check, but not its runs ({LINES}); bring back {LINES}, or "
                    "start again with another --run"
                )
            for entry in storage.read_json_lines(self.folder / LINES).documents:
                with suppress(KeyError, TypeError):
                    key = entry.pop("key")
                    self._ended[key] = Outcome.of(entry)
            self._pool = self._resources.enter_context(WorkerPool(self._workers))
        return self._pool
