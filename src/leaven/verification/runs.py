"""Many whole training runs, each kept as it ends: what was run once is not run again.

A run is known by what it computes, so one folder serves any checks and arms, and a check that was stopped or killed
goes on with the runs that are missing.
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
    """A whole training run as plain data, which goes to a worker process and is known again by its key."""

    @property
    def key(self) -> str:
        """The same for two trials that compute the same loss."""
        ...

    @property
    def cost(self) -> float:
        """How long it takes against others, in no unit."""
        ...

    def run(self) -> Outcome:
        """One that diverged has a finite loss, worse than a uniform guess, so that its curve can be drawn."""
        ...


class ChecksStopped(Exception):
    """The runs were asked to stop before all had ended; those that had are kept."""


@dataclass(frozen=True)
class RunStore:
    """The folder of a check's runs, and how they are run: in ``workers`` processes of one thread."""

    folder: Path
    workers: int = 2
    on_run: Callable[[int, int], None] = lambda done, total: None
    stop: Callable[[], bool] = lambda: False

    def run(self, trials: Iterable[CheckTrial]) -> Callable[[CheckTrial], Outcome]:
        """Run each trial once, the longest first so that none runs alone at the end; outcomes are looked up after.

        Raises:
            InputError: if the folder is in use or cannot be made, or the process of a run dies twice.
            ChecksStopped: if ``stop`` said so.
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
                                raise InputError("the process of a run died twice; is there memory enough?") from None
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
    """The outcomes in a file by the keys of their trials; a line that holds none is passed over."""
    found: dict[str, Outcome] = {}
    for entry in storage.read_json_lines(path).documents:
        with suppress(KeyError, TypeError):
            name = entry.pop("key")
            found[name] = Outcome.of(entry)
    return found
