"""What a search exchanges with its caller: proposals go out, outcomes come back, and in the end what was found."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from leaven.recipe.errors import InputError
from leaven.training.outcome import Baseline


class Proposal(dict[str, float]):
    """Log2 multipliers by name: to an objective it is a dict like any other.

    ``seed`` is 0 throughout the search, so that trials are compared with one init and one data order, and 1, 2 and so
    on in the runs that measure the noise or confirm the best few. ``origin`` is the trial that a retry repeats (its
    own ``number`` otherwise): the name under which to look for a checkpoint. ``baseline`` is the best trial so far
    that has a curve, for an objective that prunes hopeless runs; None in runs that must end. ``worker`` says which
    thread of this command calls, from 0: no two do so at once with the same one.
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
        """The baseline by its former name, for objectives written then."""
        return self.baseline


class WorkerDied(Exception):
    """Raised by an objective whose process died: the run is retried once."""


class TrialReleased(Exception):
    """Raised by an objective that was made to stop: the run is left for the next command."""


class NothingFound(InputError):
    """No run ended with a loss."""


class SearchObserver(Protocol):
    """Callbacks of a search: a trial starts, or trials have ended."""

    def asked(self, proposal: Proposal, /) -> None: ...
    def ended(self, numbers: Sequence[int], /) -> None: ...


@dataclass(frozen=True)
class SearchTrial:
    """A trial that has a result."""

    number: int
    params: dict[str, float]  # log2 multipliers
    loss: float  # infinite where it diverged; where it was stopped, the expected loss
    finalist: int | None = None  # which of the best few it is a rerun of
    purpose: str = "search"  # search | noise | rerun
    seed: int = 0


@dataclass(frozen=True)
class Found:
    """What a search returns."""

    params: dict[str, float]  # log2 multipliers
    loss: float  # the mean of runs that had no part in choosing it, where there are any
    interval: tuple[float, float]  # of 95%, by the noise of all repeated points; infinite without such runs
    fresh: int  # how many these runs are
    noise: float | None  # standard deviation between runs of one point
    stalled: bool  # it stopped before its budget was used, having gained less than the noise for some rounds
    trials: tuple[SearchTrial, ...]  # in the order of their results
