"""Run many training runs and save each result when it ends, so that no run is repeated.

The key of a run is a hash of everything that determines its loss. Several checks can therefore share a folder, and a
check that was stopped or killed resumes with the missing runs.
"""

import json
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Protocol

from leaven import storage
from leaven.documents.checks import CheckDocument
from leaven.recipe.errors import InputError
from leaven.recipe.files import write_text
from leaven.training.outcome import Outcome
from leaven.training.run_folder import locked_folder
from leaven.training.trial import WorkerPool

LINES = "runs.jsonl"
VERDICT = "check.json"


class CheckTrial(Protocol):
    """The description of a training run. It is sent to a worker process, and its key identifies it."""

    @property
    def key(self) -> str:
        """A text that identifies the run. Two trials that compute the same loss have the same key."""
        ...

    @property
    def cost(self) -> float:
        """The expected duration of the run relative to other runs, without a unit."""
        ...

    def run(self) -> Outcome:
        """Train and return the outcome.

        The loss of a diverged run is set to a finite number, so that charts can show it.
        """
        ...


class ChecksStopped(Exception):
    """The error raised if the runs were stopped before all had finished. Finished runs are saved."""


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
        """Set up without starting workers.

        ``on_run`` is called with the number of finished runs and the number of all runs. ``stop`` is called again and
        again, and the runs stop once it returns true.
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
        """Run all trials that have no result yet, the longest first. Return a function from a trial to its outcome.

        Raises:
            InputError: if the folder is in use or cannot be created, or a run's process dies twice.
            ChecksStopped: if ``stop`` returned True.
        """
        wanted = {trial.key: trial for trial in trials}
        pool = self._open()
        missing = sorted(wanted.keys() - self._ended.keys(), key=lambda name: (-wanted[name].cost, name))
        self._on_run(len(wanted) - len(missing), len(wanted))
        queue, died = list(reversed(missing)), set[str]()
        pending: dict[Future[Outcome], str] = {}
        while (queue or pending) and not self._stop():
            while queue and len(pending) < self._workers:
                name = queue.pop()
                pending[pool.submit(wanted[name].run)] = name
            for future in wait(pending, timeout=0.5, return_when=FIRST_COMPLETED).done:
                name = pending.pop(future)
                try:
                    self._ended[name] = future.result()
                except BrokenProcessPool:
                    if name in died:
                        raise InputError(
                            "the process of a run died twice, perhaps out of memory; give fewer --workers"
                        ) from None
                    died.add(name)
                    queue.append(name)
                    continue
                storage.append_json(self.folder / LINES, {"key": name} | asdict(self._ended[name]))
                self._on_run(len(wanted.keys() & self._ended.keys()), len(wanted))
        if wanted.keys() - self._ended.keys():
            raise ChecksStopped(f"{len(wanted.keys() & self._ended.keys())} of {len(wanted)} runs have ended")
        return lambda trial: self._ended[trial.key]

    def _open(self) -> WorkerPool:
        if self._pool is None:
            self._resources.enter_context(locked_folder(self.folder, "--run"))
            self._ended = _read(self.folder / LINES)
            self._pool = self._resources.enter_context(WorkerPool(self._workers))
        return self._pool

    def keep(self, document: CheckDocument) -> CheckDocument:
        """Write the check's document into the folder of the runs, for ``leaven report``."""
        write_text(self.folder / VERDICT, json.dumps(document.dump(), indent=2) + "\n")
        return document


def _read(path: Path) -> dict[str, Outcome]:
    """Read a file of results. Return a mapping from the key of each trial to its outcome. Lines without an outcome
    are ignored."""
    found: dict[str, Outcome] = {}
    for entry in storage.read_json_lines(path).documents:
        with suppress(KeyError, TypeError):
            name = entry.pop("key")
            found[name] = Outcome.of(entry)
    return found
