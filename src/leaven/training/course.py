"""How a trial goes: its curve, and when it has diverged. Without torch."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from leaven.training.outcome import Curve, curve_of

POINTS = 32
"""Stretches of equal tokens that a run is looked at in."""


LEARNT = 0.01
"""Nats below a uniform guess: how often each token comes is worth tenths, and is what any run learns first."""


def lost_above(vocab_size: int) -> float:
    """The loss that counts as divergence, in nats: one worse than a uniform guess."""
    return math.log(vocab_size) + 1.0


@dataclass
class Course:
    """A run of ``tokens``, step by step.

    A point of ``curve`` is the mean loss since the one before, at the first step that ends in or after its stretch.
    The run is judged by ``mean``, over about the last stretch: the loss of one small batch of odd text may be above a
    uniform guess, and so may the first ones at a large init. What blew up and settled at a uniform guess, its softmax
    saturated, has diverged as well: such runs end alike to the last digit, and no search finds its way among them.
    """

    vocab_size: int
    tokens: int
    done: int = 0
    mean: float = 0.0
    since: float = 0.0  # sum of loss x tokens since the last point
    curve: Curve = ()

    def lost(self, loss: float, batch_tokens: int) -> bool:
        """Take in a step; whether the run has diverged."""
        before, self.done = self.done, self.done + batch_tokens
        if not math.isfinite(loss):
            return True
        self.mean += (loss - self.mean) * min(POINTS * batch_tokens / self.tokens, 1.0)
        self.since += loss * batch_tokens
        if self.done * POINTS // self.tokens > before * POINTS // self.tokens:
            last = self.curve[-1][0] if self.curve else 0
            self.curve = (*self.curve, (self.done, self.since / (self.done - last)))
            self.since = 0.0
        limit = lost_above(self.vocab_size)
        if self.done >= self.tokens and any(loss > limit for _, loss in self.curve):
            return self.mean > math.log(self.vocab_size) - LEARNT
        return self.mean > limit and self.done > self.tokens / 4

    def taken_up(self, saved: Mapping[str, Any]) -> "Course":
        """Where it was when ``asdict`` was saved as JSON."""
        return Course(**{**saved, "curve": curve_of(saved["curve"])})
