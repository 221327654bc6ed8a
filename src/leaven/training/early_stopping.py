"""When a trial is over before its end: it has diverged, or a better one is out of its reach. Without torch.

Only runs of one schedule are compared, at equal tokens: cut off early, a short cosine run ranks nothing, for a high
lr starts behind and wins in the end. So the margin is what the baseline itself has still to gain. That is much while
the lr is high, and goes to nothing as it falls: to win, whoever is further behind would have to gain twice as much.
The constants were chosen on whole curves of one set of trials and tried on another (benchmarks/early_stopping.py,
docs/log.md).
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

import numpy as np

from leaven.training.loop import Callback, Diverged, StepResult
from leaven.training.outcome import Baseline, Curve, curve_of

POINTS = 32
"""Stretches of equal tokens that a run is looked at in."""


LEARNT = 0.01
"""Nats below a uniform guess: how often each token comes is worth tenths, and is what any run learns first."""


def lost_above(vocab_size: int) -> float:
    """The loss that counts as divergence, in nats: one worse than a uniform guess."""
    return math.log(vocab_size) + 1.0


@dataclass
class DivergenceMonitor(Callback[StepResult]):
    """Follows a run of ``tokens`` and ends it when it has diverged.

    A point of ``curve`` is the mean loss since the one before, at the first step that ends in or after its stretch.
    The run is judged by ``mean``, over about the last stretch: the loss of one small batch of odd text may be above a
    uniform guess, and so may the first ones at a large init. What blew up and settled at a uniform guess, its softmax
    saturated, has diverged as well: such runs end alike to the last digit, and no search finds its way among them.
    """

    vocab_size: int
    tokens: int  # of the whole run
    at_once: bool = True  # whether a gradient that is not finite ends the run, as a loss does
    done: int = 0  # tokens
    mean: float = 0.0  # of the loss, over about the last stretch
    since: float = 0.0  # sum of loss x tokens since the last point
    curve: Curve = ()

    def after_step(self, step: StepResult) -> None:
        if (self.at_once and step.diverged) or self.lost(step.loss, step.batch_tokens):
            raise Diverged(f"mean loss {self.mean:g} at step {step.step}")

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

    def state(self) -> dict[str, Any]:
        return {"course": {key: value for key, value in asdict(self).items() if key != "at_once"}}

    def restore(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state["course"], curve=curve_of(state["course"]["curve"]))


class Pruned(Exception):
    """A trial is out of reach of its baseline. ``expected``: the validation loss that it would have come to."""

    def __init__(self, expected: float) -> None:
        self.expected = expected


@dataclass
class Pruning(Callback[StepResult]):
    """Ends a trial that is out of reach of its baseline, at a point of its curve after the warm-up.

    It comes after the monitor in the list of callbacks.
    """

    monitor: DivergenceMonitor
    baseline: Baseline
    warmup_tokens: int

    def before_step(self) -> None:
        self._points = len(self.monitor.curve)

    def after_step(self, step: StepResult) -> None:
        curve = self.monitor.curve
        looked_at = len(curve) > self._points and self.monitor.done > self.warmup_tokens
        if looked_at and out_of_reach(curve, self.baseline):
            raise Pruned(expected(curve, self.baseline))


SMOOTH = 4
"""Points of a curve that are compared at once."""
FIRST = 0.25
"""Share of the run before which nothing is given up."""
MARGIN = 1.0
"""Share of what the baseline has still to gain by which a run may be behind."""
LEAST = 8.0
"""Of the noise between seeds, by which a run may be behind at any time."""
CATCHES_UP = 1.5
"""In shares of what the baseline has still to gain: a run that is as far behind as this keeps half of its gap."""


def out_of_reach(curve: Curve, baseline: Baseline) -> bool:
    """Whether a run of the baseline's duration, as far as it is, is out of reach of it."""
    tokens, end = curve[-1][0], baseline.curve[-1][0]
    if len(curve) < SMOOTH or tokens < FIRST * end or tokens >= end:
        return False
    return gap(curve, baseline) > max(MARGIN * _to_gain(curve, baseline), LEAST * baseline.noise)


def expected(curve: Curve, baseline: Baseline) -> float:
    """The validation loss to which a run would have come that is given up.

    It catches up while the baseline still gains, and the less of its way the further behind it is.
    """
    behind = gap(curve, baseline)
    return baseline.loss + behind**2 / (behind + CATCHES_UP * _to_gain(curve, baseline))


def gap(curve: Curve, baseline: Baseline) -> float:
    """How far behind the baseline a run is, in nats per token: in its last points, at equal tokens."""
    last = curve[-SMOOTH:]
    return fmean(loss for _, loss in last) - _mean(baseline.curve, last)


def _to_gain(curve: Curve, baseline: Baseline) -> float:
    """By how much the baseline's loss still fell from where the curve ends."""
    return _mean(baseline.curve, curve[-SMOOTH:]) - _mean(baseline.curve, baseline.curve[-SMOOTH:])


def comparable(baseline: Baseline, tokens: int) -> bool:
    """Whether the baseline is of a run of so many tokens: their last batches may differ."""
    return bool(baseline.curve) and math.isclose(baseline.curve[-1][0], tokens, rel_tol=0.02)


def _mean(curve: Curve, at: Curve) -> float:
    """Of a curve at the tokens of another."""
    tokens, losses = zip(*curve, strict=True)
    return float(np.interp([there for there, _ in at], tokens, losses).mean())
