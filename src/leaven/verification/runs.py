"""Run many training runs and save each result when it ends, so that no run is repeated.

The key of a run is a hash of everything that determines its loss. Several checks can therefore share a folder, and a
check that was stopped or killed resumes with the missing runs.
"""

import json
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from leaven import storage
from leaven.recipe.errors import InputError
from leaven.recipe.files import write_text
from leaven.training.outcome import Outcome
from leaven.training.run_folder import held
from leaven.training.worker import Pool
from leaven.verification.verdict import Verdict

LINES = "runs.jsonl"
VERDICT = "check.json"


class CheckTrial(Protocol):
    """A training run as plain data, which is sent to a worker process and identified by its key."""

    @property
    def key(self) -> str:
        """The same for two trials that compute the same loss."""
        ...

    @property
    def cost(self) -> float:
        """Its duration relative to other runs, without a unit."""
        ...

    def run(self) -> Outcome:
        """Train. A run that diverged has a finite loss, worse than a uniform guess, so that it can be drawn."""
        ...


class ChecksStopped(Exception):
    """Raised when the runs were stopped before all had finished. Finished runs are saved."""


@dataclass(frozen=True)
class RunStore:
    """Runs the trials of checks in worker processes of one thread, and saves their results in a folder."""

    folder: Path
    workers: int = 2
    on_run: Callable[[int, int], None] = lambda done, total: None  # progress
    stop: Callable[[], bool] = lambda: False  # whether to stop now

    def run(self, trials: Iterable[CheckTrial]) -> Callable[[CheckTrial], Outcome]:
        """Run each trial that has no result yet, the longest first, and return a function from trials to outcomes.

        Raises:
            InputError: if the folder is in use or cannot be created, or the process of a run dies twice.
            ChecksStopped: if ``stop`` returned True.
        """
        wanted = {trial.key: trial for trial in trials}
        with held(self.folder, "--run"):
            ended = _read(self.folder / LINES)
            missing = sorted(wanted.keys() - ended.keys(), key=lambda name: (-wanted[name].cost, name))
            self.on_run(len(wanted) - len(missing), len(wanted))
            with Pool(self.workers) as pool:
                queue, died = list(reversed(missing)), set[str]()
                pending: dict[Future[Outcome], str] = {}
                while (queue or pending) and not self.stop():
                    while queue and len(pending) < self.workers:
                        name = queue.pop()
                        pending[pool.submit(wanted[name].run)] = name
                    for future in wait(pending, timeout=0.5, return_when=FIRST_COMPLETED).done:
                        name = pending.pop(future)
                        try:
                            ended[name] = future.result()
                        except BrokenProcessPool:
                            if name in died:
                                raise InputError(
                                    "the process of a run died twice (out of memory?); give fewer --workers"
                                ) from None
                            died.add(name)
                            queue.append(name)
                            continue
                        storage.append_json(self.folder / LINES, {"key": name} | asdict(ended[name]))
                        self.on_run(len(wanted.keys() & ended.keys()), len(wanted))
        if wanted.keys() - ended.keys():
            raise ChecksStopped(f"{len(wanted.keys() & ended.keys())} of {len(wanted)} runs have ended")
        return lambda trial: ended[trial.key]

    def keep(self, verdict: Verdict) -> Verdict:
        """Write the verdict beside the runs, for ``leaven report``."""
        write_text(self.folder / VERDICT, json.dumps(verdict.document(), indent=2) + "\n")
        return verdict


def _read(path: Path) -> dict[str, Outcome]:
    """Return the outcomes in a file by the keys of their trials; lines without one are ignored."""
    found: dict[str, Outcome] = {}
    for entry in storage.read_json_lines(path).documents:
        with suppress(KeyError, TypeError):
            name = entry.pop("key")
            found[name] = Outcome.of(entry)
    return found
