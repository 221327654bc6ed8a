"""The objective of a study: trains the recipe that is at a proposal."""

import math
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from leaven.data.tokens import TokenSet
from leaven.recipe.recipe import Recipe
from leaven.training.outcome import Outcome
from leaven.training.trial import branches_of, train_trial
from leaven.training.worker import Pool
from leaven.tuning.point import moved
from leaven.tuning.service.interface import Proposal, TrialReleased, WorkerDied

Train = Callable[[Proposal], Outcome]

LOOK = 0.25  # seconds between looks at whether to stop


@dataclass(frozen=True)
class Trainer:
    """What is given to train: its recipe around which the proposals are, and where checkpoints go."""

    recipe: Recipe
    tokens: TokenSet
    durations: tuple[int, ...]
    checkpoints: Path
    stop: Callable[[], bool]
    checkpoint_seconds: float = 60
    gives_up: bool = True  # on hopeless trials (prune); curves of other cooldowns cannot be compared

    @contextmanager
    def in_processes(self, workers: int) -> Iterator[Train]:
        """Trains in so many processes of one thread each."""
        with ExitStack() as held:
            # A pool breaks as a whole when a process dies, so each worker has one.
            pools = [held.enter_context(Pool(1)) for _ in range(workers)]
            leaving = threading.Event()
            held.callback(leaving.set)
            yield lambda proposal: self._in_process(pools[proposal.worker], leaving, proposal)

    def _recipe(self, proposal: Proposal) -> Recipe:
        return moved(self.recipe, proposal, self.recipe.data.seed + proposal.seed)

    def _there(self, proposal: Proposal) -> bool:
        """Prepare a proposal, and say whether there is a recipe. With lr x weight_decay above 1, say, or a warm-up
        longer than the shortest duration there is none, and it has diverged at no cost."""
        if not self.gives_up:
            proposal.baseline = None
        try:
            branches_of(self._recipe(proposal), self.durations, self.tokens)
        except ValueError:
            return False
        return True

    def _in_process(self, pool: Pool, leaving: threading.Event, proposal: Proposal) -> Outcome:
        if not self._there(proposal):
            return Outcome(math.inf)
        future = pool.submit(
            train_trial,
            self._recipe(proposal),
            baseline=proposal.baseline,
            checkpoint=self._taken_over(proposal),
            durations=self.durations,
            checkpoint_seconds=self.checkpoint_seconds,
        )
        while not wait([future], timeout=LOOK).done:
            if self.stop() or leaving.is_set():
                raise TrialReleased
        try:
            return future.result()
        except BrokenProcessPool:
            raise WorkerDied from None

    def _taken_over(self, proposal: Proposal) -> Path:
        """A folder of this attempt's own, with what the last one left: a worker of a command that was killed may
        live half a second longer, and must not write between."""
        folder = self.checkpoints / f"{proposal.origin:06d}-{proposal.number:06d}"
        for left in _attempts(self.checkpoints, proposal.origin)[-1:]:
            with suppress(OSError):  # another attempt has it by now, or it is gone: start again
                left.rename(folder)
        return folder


def forget(checkpoints: Path, origin: int) -> None:
    """Remove the checkpoints of all attempts of a run."""
    for left in _attempts(checkpoints, origin):
        shutil.rmtree(left, ignore_errors=True)


def _attempts(checkpoints: Path, origin: int) -> list[Path]:
    return sorted(checkpoints.glob(f"{origin:06d}-*"))
