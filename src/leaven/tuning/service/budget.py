"""The budget of a search, and the part that is reserved for confirmation runs."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from leaven.recipe.errors import InputError
from leaven.tuning.algorithm.confirmation import CONFIRMATIONS, RERUNS
from leaven.tuning.service.trial_log import BEGAN, ENDED, FINALIST, Evaluation

FINALISTS = 3  # the most points that are run again with fresh seeds (confirmation.py)
KEPT = 1 / 4  # the largest share of the budget that is reserved for that


@dataclass(frozen=True)
class Budget:
    """Limits for all commands of a study together. The first limit reached ends the search; running trials finish.

    Attributes:
        trials: number of runs of any purpose.
        flops: FLOPs of all runs.
        hours: wall-clock hours in which at least one run was active. Pauses of the study do not count, and parallel
            runs count once.
        run_flops: FLOPs of one run, if known in advance. Otherwise the first run starts alone, because it may use the
            whole budget.
    """

    trials: int | None = None
    flops: float | None = None
    hours: float | None = None
    run_flops: float | None = None

    def __post_init__(self) -> None:
        given = {"trials": self.trials, "flops": self.flops, "hours": self.hours}
        if all(limit is None for limit in given.values()):
            raise InputError("the search has no budget; give trials, flops or hours")
        for name, limit in given.items():
            if limit is not None and not 0 < limit < math.inf:
                raise InputError(f"{name} = {limit}: give a finite number above 0")

    @property
    def label(self) -> str:
        """A text that distinguishes the confirmation runs of this budget from those of a later, larger one."""
        given = {"trials": self.trials, "flops": self.flops, "hours": self.hours}
        return ", ".join(f"{limit:g} {name}" for name, limit in given.items() if limit is not None)

    def finalists(self, runs: Sequence[Evaluation], now: float) -> int:
        """Return how many finalists the reserved and the remaining budget can pay for."""
        affordable = min(min(KEPT * limit, limit - used) / cost for limit, used, cost in self._limits(runs, now))
        return max(few for few in range(FINALISTS + 1) if runs_to_confirm(few) <= affordable or few == 0)

    def kept(self, runs: Sequence[Evaluation] = (), now: float = 0.0) -> int:
        """Return how many runs are reserved for confirmation."""
        affordable = min(KEPT * limit / cost for limit, _, cost in self._limits(runs, now))
        costs = {runs_to_confirm(few) for few in range(FINALISTS + 1)}
        if any(run.origin.user_attrs.get(FINALIST, [self.label])[0] != self.label for run in runs):
            costs.add(runs_to_confirm(1) + 2 * CONFIRMATIONS)  # beside those that a smaller budget has confirmed
        return max(cost for cost in costs if cost <= affordable)

    def room(self, runs: Sequence[Evaluation], now: float) -> bool:
        """Whether the budget allows one more run of the search. Nothing is kept while all runs diverge."""
        nothing = any(run.finished for run in runs) and not any(run.complete for run in runs)
        kept = 0 if nothing else self.kept(runs, now)
        return self.left(runs, now) >= 1 + kept

    def left(self, runs: Sequence[Evaluation], now: float) -> float:
        """Return how many more runs the budget allows."""
        return min((limit - used) / cost for limit, used, cost in self._limits(runs, now))

    def _limits(self, runs: Sequence[Evaluation], now: float) -> Iterator[tuple[float, float, float]]:
        """Yields each limit, how much of it is used, and how much one run costs."""
        if self.trials is not None:
            yield self.trials, len(runs), 1
        if self.flops is not None:
            spent = [float(run.last.user_attrs.get("flops", 0.0)) for run in runs if run.finished]
            whole = [flops for flops in spent if flops > 0]
            if not whole and any(run.complete for run in runs):
                raise InputError(
                    "the budget is in FLOPs, but the objective does not return any; give trials or hours"
                )
            cost = max([*whole, self.run_flops or 0.0]) or self.flops
            # A run that died has no count of FLOPs and may have cost as much as one that finished.
            yield self.flops, sum(spent) + cost * sum(not run.finished for run in runs), cost
        if self.hours is not None:
            hours = busy(runs, now) / 3600
            yield self.hours, hours, max(hours / max(len(runs), 1), 1e-300)


def runs_to_confirm(few: int) -> int:
    """Return how many runs it takes to confirm ``few`` points."""
    return few * RERUNS + (2 * CONFIRMATIONS if few > 1 else 0)  # of the chosen point and of the start


def busy(runs: Sequence[Evaluation], now: float) -> float:
    """Return the seconds in which at least one run was active."""
    return covered((run.last.user_attrs[BEGAN], _end(run, now)) for run in runs if BEGAN in run.last.user_attrs)


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of time spans (begin, end)."""
    total, until = 0.0, -math.inf
    for began, ended in sorted(spans):
        total += max(ended - max(began, until), 0.0)
        until = max(until, ended)
    return total


def _end(run: Evaluation, now: float) -> float:
    """Return when the last attempt of a run ended, or ``now`` if it is running."""
    ended, died = run.last.user_attrs.get(ENDED), run.last.datetime_complete
    if ended is None:
        ended = now if run.running or died is None else died.timestamp()
    return float(ended)
