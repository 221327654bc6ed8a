"""An objective that trains what many threads ask for as one model: `search(..., stack, workers=stack.size)`."""

import threading
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

from leaven.recipe.recipe import Recipe
from leaven.training.outcome import Outcome
from leaven.tuning.proposal import Proposal

if TYPE_CHECKING:
    from leaven.data.tokens import TokenSet

ON_CUDA = 16
"""Trials of a stack, where there is a CUDA device and nobody says otherwise."""

QUIET_SECONDS = 2.0
"""So long after the last proposal a stack begins with those that are there; a search takes a moment for each."""

Run = Callable[[Sequence[Proposal]], Sequence[Outcome]]


class Stack:
    """Gathers the proposals of ``size`` threads, or of all that come, and hands them to ``run`` by their ``key``.

    Each thread gets its own outcome. What ``run`` raises is raised in the threads whose proposals it had. One ``run``
    goes on at a time: proposals that come meanwhile are the next ones.
    """

    def __init__(
        self,
        size: int,
        run: Run,
        key: Callable[[Proposal], Hashable] = lambda proposal: None,
        quiet_seconds: float = QUIET_SECONDS,
    ) -> None:
        self.size, self._run, self._key, self._quiet = size, run, key, quiet_seconds
        self._waiting: list[tuple[Hashable, Proposal, Future[Outcome]]] = []
        self._came = threading.Condition()
        self._device = threading.Lock()

    def __call__(self, proposal: Proposal) -> Outcome:
        key, outcome = self._key(proposal), Future[Outcome]()
        with self._came:
            self._waiting.append((key, proposal, outcome))
            self._came.notify_all()
        while not outcome.done():
            with self._device:  # who has it trains for all, and the others find that it is done
                if not outcome.done():
                    self._train(self._gathered())
        return outcome.result()

    def _gathered(self) -> list[tuple[Hashable, Proposal, Future[Outcome]]]:
        with self._came:
            while len(self._waiting) < self.size and self._came.wait(self._quiet):
                pass
            gathered, self._waiting = self._waiting[: self.size], self._waiting[self.size :]
        return gathered

    def _train(self, gathered: list[tuple[Hashable, Proposal, Future[Outcome]]]) -> None:
        for key in dict.fromkeys(key for key, _, _ in gathered):
            group = [(proposal, future) for other, proposal, future in gathered if other == key]
            try:
                outcomes = self._run([proposal for proposal, _ in group])
                for (_, future), outcome in zip(group, outcomes, strict=True):
                    future.set_result(outcome)
            except BaseException as error:
                for _, future in group:
                    future.set_exception(error)


def stack_of_trials(
    size: int, recipe_of: Callable[[Proposal], Recipe], tokens: "TokenSet", device: str, stop: Callable[[], bool]
) -> Stack:
    """Trials of the recipe that is at each proposal, as many as ``size`` in one model; those that go with no other
    (:func:`leaven.training.stacked.stack_key`) one after the other.

    The objective raises what ``recipe_of`` raises, and :class:`leaven.training.engine.Interrupted` when ``stop`` says
    so.
    """
    from leaven.training.stacked import stack_key, train_stack
    from leaven.training.trial import train_trial

    def key(proposal: Proposal) -> Hashable:
        return stack_key(recipe_of(proposal)) or object()

    def run(proposals: Sequence[Proposal]) -> Sequence[Outcome]:
        recipes, rivals = [recipe_of(proposal) for proposal in proposals], [proposal.rival for proposal in proposals]
        if stack_key(recipes[0]) is None:
            return [train_trial(recipes[0], rival=rivals[0])]
        return train_stack(recipes, tokens, device, rivals, stop)

    return Stack(size, run, key)


def default_size() -> int:
    """Trials of a stack: on a processor, which stacking does not make faster, each is by itself."""
    import torch

    return ON_CUDA if torch.cuda.is_available() else 1
