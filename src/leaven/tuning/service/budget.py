"""The budget of a search: how many more runs it allows, and how many it reserves for confirming the best points."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from leaven.recipe.errors import InputError
from leaven.tuning.algorithm.answer import CONFIRMATIONS, RERUNS
from leaven.tuning.service.trial_log import Evaluation
from leaven.tuning.study_document import covered

RESERVED = 1 / 8  # the largest share of the budget that is reserved for confirmation
FEW = 24  # runs: a smaller budget runs only one finalist, once
# The forms of a confirmation, from cheap to expensive: (finalists, runs of each). Finalists are the best points of a
# search, which are run again with fresh seeds.
FINALS = ((0, 0), (1, 1), (1, RERUNS), (2, RERUNS), (3, RERUNS))


@dataclass(frozen=True)
class Budget:
    """The limits of a search, which all commands of a study share. The search ends when the first of the limits is
    reached; trials that are running then are finished."""

    trials: int | None = None  # number of runs, including repeated and confirmation runs
    flops: float | None = None  # total FLOPs of all runs
    hours: float | None = None  # time during which at least one run is active; parallel runs count once
    run_flops: float | None = None  # FLOPs of one run; if None, the first run starts alone to measure them

    def __post_init__(self) -> None:
        if not self._given:
            raise InputError("the search has no budget; give trials, flops or hours")
        for name, limit in self._given.items():
            if not 0 < limit < math.inf:
                raise InputError(f"{name} = {limit}: give a finite number above 0")

    @property
    def _given(self) -> dict[str, float]:
        limits = {"trials": self.trials, "flops": self.flops, "hours": self.hours}
        return {name: limit for name, limit in limits.items() if limit is not None}

    @property
    def label(self) -> str:
        """This budget as text, such as ``100 trials``. The text is stored with confirmation runs and distinguishes
        them from the confirmation runs of a later, larger budget."""
        return ", ".join(f"{limit:g} {name}" for name, limit in self._given.items())

    @property
    def size(self) -> float:
        """The number of runs that the budget allows, or infinity if the limits do not determine it in advance."""
        flops = self.flops / self.run_flops if self.flops and self.run_flops else math.inf
        return min(self.trials or math.inf, flops)

    @property
    def _finals(self) -> tuple[tuple[int, int], ...]:
        return FINALS[:2] if self.size < FEW else FINALS

    def finals(self, runs: Sequence[Evaluation], now: float) -> tuple[int, int]:
        """Return how many finalists (best points) are run again to confirm them, and how many runs each of them gets.

        The result is the most expensive pair in ``FINALS`` whose runs cost at most ``RESERVED`` (1/8) of the budget
        and at most what is left of the budget. With fewer than ``FEW`` (24) runs in the budget, only the two cheapest
        pairs are allowed.
        """
        affordable = min(min(RESERVED * limit, limit - used) / cost for limit, used, cost in self._limits(runs, now))
        return max(final for final in self._finals if runs_to_confirm(*final) <= max(affordable, 0))

    def reserved(self, runs: Sequence[Evaluation] = (), now: float = 0.0) -> int:
        """Return how many runs are reserved for confirmation."""
        affordable = min(RESERVED * limit / cost for limit, _, cost in self._limits(runs, now))
        costs = {runs_to_confirm(*final) for final in self._finals}
        if any(run.budget not in {"", self.label} for run in runs):
            # A smaller budget has confirmed other finalists. Even a single new finalist is compared with them.
            costs.add(runs_to_confirm(1, RERUNS) + 2 * CONFIRMATIONS)
        return max(cost for cost in costs if cost <= affordable)

    def left(self, runs: Sequence[Evaluation], now: float) -> float:
        """Return how many more runs the budget allows."""
        return min((limit - used) / cost for limit, used, cost in self._limits(runs, now))

    def _limits(self, runs: Sequence[Evaluation], now: float) -> Iterator[tuple[float, float, float]]:
        """Yield (limit, amount used, cost of one run) for each limit, in the unit of the limit."""
        if self.trials is not None:
            yield self.trials, len(runs), 1
        if self.flops is not None:
            spent = [run.flops for run in runs if run.finished]
            whole = [flops for flops in spent if flops > 0]
            if not whole and any(run.state == "complete" for run in runs):
                raise InputError(
                    "the budget is in FLOPs, but the objective returns no FLOPs; set the budget in trials or hours"
                )
            cost = max([*whole, self.run_flops or 0.0]) or self.flops
            # A run whose process died has no count of FLOPs, and may have cost as much as a finished run.
            yield self.flops, sum(spent) + cost * sum(not run.finished for run in runs), cost
        if self.hours is not None:
            hours = busy(runs, now) / 3600
            yield self.hours, hours, max(hours / max(len(runs), 1), 1e-300)


def runs_to_confirm(finalists: int, each: int) -> int:
    """Return the number of runs needed to run each finalist ``each`` times and then confirm the best one."""
    return finalists * each + (2 * CONFIRMATIONS if finalists > 1 else 0)  # 2: the chosen point and the start


def busy(runs: Sequence[Evaluation], now: float) -> float:
    """Return the seconds in which at least one run was active. A run without an end counts until ``now``."""
    return covered((run.began, now if run.until is None else run.until) for run in runs if run.began is not None)
