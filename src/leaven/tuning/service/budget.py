"""What a search may cost, and how much of it is reserved to confirm the best few."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from leaven.recipe.errors import InputError
from leaven.tuning.algorithm.confirmation import CONFIRMATIONS, RERUNS
from leaven.tuning.service.trial_log import BEGAN, ENDED, FINALIST, Evaluation

FINALISTS = 3  # points that are confirmed by runs of their own (confirmation.py)
KEPT = 1 / 4  # of the budget, at most


@dataclass(frozen=True)
class Budget:
    """Limits for all commands on a study together; the first one reached ends the search. Runs that have begun end.

    Attributes:
        trials: runs, whatever for.
        flops: of all runs.
        hours: in which at least one run was under way. Of a study that was interrupted the time between does not
            count, and of several machines at once the time counts once.
        run_flops: of a run, if that is known before one has ended. Without, the first is taken to cost all there is,
            so that no other begins beside it.
    """

    trials: int | None = None
    flops: float | None = None
    hours: float | None = None
    run_flops: float | None = None

    def __post_init__(self) -> None:
        given = {"trials": self.trials, "flops": self.flops, "hours": self.hours}
        if all(limit is None for limit in given.values()):
            raise InputError("a search without end: give it trials, flops or hours")
        for name, limit in given.items():
            if limit is not None and not 0 < limit < math.inf:
                raise InputError(f"{name} = {limit}: above 0, and finite")

    @property
    def label(self) -> str:
        """Tells the confirmation runs of one budget from those of a larger one, later."""
        given = {"trials": self.trials, "flops": self.flops, "hours": self.hours}
        return ", ".join(f"{limit:g} {name}" for name, limit in given.items() if limit is not None)

    def finalists(self, runs: Sequence[Evaluation], now: float) -> int:
        """How many of the best can be confirmed with what is reserved, and with what is left."""
        affordable = min(min(KEPT * limit, limit - used) / cost for limit, used, cost in self._limits(runs, now))
        return max(few for few in range(FINALISTS + 1) if runs_to_confirm(few) <= affordable or few == 0)

    def kept(self, runs: Sequence[Evaluation] = (), now: float = 0.0) -> int:
        """How many runs are reserved for confirmation."""
        affordable = min(KEPT * limit / cost for limit, _, cost in self._limits(runs, now))
        costs = {runs_to_confirm(few) for few in range(FINALISTS + 1)}
        if any(run.origin.user_attrs.get(FINALIST, [self.label])[0] != self.label for run in runs):
            costs.add(runs_to_confirm(1) + 2 * CONFIRMATIONS)  # beside those that a smaller budget has confirmed
        return max(cost for cost in costs if cost <= affordable)

    def room(self, runs: Sequence[Evaluation], now: float) -> bool:
        """Whether there is room for one more run of the search. Where all diverge there is nothing to confirm."""
        nothing = any(run.finished for run in runs) and not any(run.complete for run in runs)
        kept = 0 if nothing else self.kept(runs, now)
        return self.left(runs, now) >= 1 + kept

    def left(self, runs: Sequence[Evaluation], now: float) -> float:
        """How many more runs there may be."""
        return min((limit - used) / cost for limit, used, cost in self._limits(runs, now))

    def _limits(self, runs: Sequence[Evaluation], now: float) -> Iterator[tuple[float, float, float]]:
        """Of each limit: it, what is used of it, and what a run costs."""
        if self.trials is not None:
            yield self.trials, len(runs), 1
        if self.flops is not None:
            spent = [float(run.last.user_attrs.get("flops", 0.0)) for run in runs if run.finished]
            whole = [flops for flops in spent if flops > 0]
            if not whole and any(run.complete for run in runs):
                raise InputError("flops as a budget: the objective says nothing of FLOPs; give trials or hours")
            cost = max([*whole, self.run_flops or 0.0]) or self.flops
            # What died may have cost as much as what ended, and says nothing of it.
            yield self.flops, sum(spent) + cost * sum(not run.finished for run in runs), cost
        if self.hours is not None:
            hours = busy(runs, now) / 3600
            yield self.hours, hours, max(hours / max(len(runs), 1), 1e-300)


def runs_to_confirm(few: int) -> int:
    """How many runs it takes to confirm so many points."""
    return few * RERUNS + (2 * CONFIRMATIONS if few > 1 else 0)  # of the chosen point and of the start


def busy(runs: Sequence[Evaluation], now: float) -> float:
    """The seconds in which at least one run was under way."""
    return covered((run.last.user_attrs[BEGAN], _end(run, now)) for run in runs if BEGAN in run.last.user_attrs)


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """How long at least one of these spans of time, from when to when, lasts: where they overlap it counts once."""
    total, until = 0.0, -math.inf
    for began, ended in sorted(spans):
        total += max(ended - max(began, until), 0.0)
        until = max(until, ended)
    return total


def _end(run: Evaluation, now: float) -> float:
    """When its last attempt ended, or now; of one that died, as Optuna has it, in the local time of this machine."""
    ended, died = run.last.user_attrs.get(ENDED), run.last.datetime_complete
    if ended is None:
        ended = now if run.running or died is None else died.timestamp()
    return float(ended)
