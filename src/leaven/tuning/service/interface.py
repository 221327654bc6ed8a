"""Types that a search exchanges with its caller: proposals, exceptions of objectives, and results."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from leaven.recipe.errors import InputError
from leaven.training.outcome import Baseline


class Proposal(dict[str, float]):
    """The argument of an objective: a dict of log2 multipliers by name, with attributes.

    - ``number``: of the trial.
    - ``seed``: 0 during the search, so that all trials share init and data order; 1, 2, ... in runs that measure the
      noise or confirm the best points.
    - ``origin``: the trial that this one retries, or its own number: the name under which to look for a checkpoint.
    - ``baseline``: the best finished trial with a curve, for an objective that prunes; None in runs that must finish.
    - ``worker``: the calling thread, from 0. No two concurrent calls have the same.
    """

    def __init__(
        self,
        point: Mapping[str, float],
        number: int,
        seed: int = 0,
        origin: int | None = None,
        baseline: Baseline | None = None,
        *,
        worker: int = 0,
    ) -> None:
        super().__init__(point)
        self.number, self.seed, self.baseline, self.worker = number, seed, baseline, worker
        self.origin = number if origin is None else origin

    @property
    def rival(self) -> Baseline | None:
        """The former name of ``baseline``, for older objectives."""
        return self.baseline


class WorkerDied(Exception):
    """Raised by an objective whose process died. The run is retried once."""


class TrialReleased(Exception):
    """Raised by an objective that was asked to stop. The run is left for the next command."""


class NothingFound(InputError):
    """Raised if no run finished with a finite loss."""


class SearchObserver(Protocol):
    """Callbacks of a search: a trial starts, or trials have ended."""

    def asked(self, proposal: Proposal, /) -> None: ...
    def ended(self, numbers: Sequence[int], /) -> None: ...


@dataclass(frozen=True)
class SearchTrial:
    """A trial with a result."""

    number: int
    params: dict[str, float]  # log2 multipliers
    loss: float  # infinite if it diverged; the predicted loss if it was pruned
    finalist: int | None = None  # index of the finalist that it reruns
    purpose: str = "search"  # search | noise | rerun
    seed: int = 0


@dataclass(frozen=True)
class Found:
    """The result of a search."""

    params: dict[str, float]  # log2 multipliers
    loss: float  # mean of the runs that were not used to choose it, if there are any
    interval: tuple[float, float]  # 95%, from the noise of all repeated points; infinite without fresh runs
    fresh: int  # number of runs that were not used to choose it
    noise: float | None  # standard deviation between runs of one point
    stalled: bool  # whether it stopped early, because some rounds gained less than the noise
    trials: tuple[SearchTrial, ...]  # in the order of their results
