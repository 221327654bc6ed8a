"""Ends trials early if they diverge, or if they cannot reach the best trial (pruning). Does not import
torch.

The best trial so far is the baseline. Other trials are compared with it at equal token counts and only
with the same schedule. A trial with a high learning rate is behind at first and may still win. So a trial
is pruned only if it is behind by more than both of these amounts:

- the amount by which the baseline's loss still falls until its end,
- :data:`LEAST` standard deviations of the loss between seeds.

The constants were chosen on one set of trials and tested on another (benchmarks/early_stopping.py).
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

import numpy as np

from leaven.training.loop import Callback, Diverged, StepResult
from leaven.training.outcome import Baseline, Curve, curve_of

POINTS = 32  # intervals of a run, of equal token counts, each with at most one point of the loss curve

LEARNT = 0.01
"""The loss of a run that has not diverged ends at least this many nats below the loss of a uniform guess,
log(vocabulary size). Learning the token frequencies alone gains tenths of a nat."""


def divergence_limit(vocab_size: int) -> float:
    """Return the loss above which a run has diverged, in nats: 1 nat more than the loss of a uniform guess."""
    return math.log(vocab_size) + 1.0


@dataclass
class DivergenceMonitor(Callback):
    """Ends a run when it has diverged. There are three criteria:

    - The loss of a step is not finite or, with ``at_once``, its gradient is not finite.
    - After a quarter of the run, the running mean of the loss is above :func:`divergence_limit`. The mean
      covers about 1/32 of the run.
    - At the end of the run, the running mean is above log(vocabulary size) - :data:`LEARNT`, and a curve
      point was above :func:`divergence_limit`. The softmax of such a run is saturated.
    """

    vocab_size: int
    tokens: int  # number of tokens of the whole run
    at_once: bool = True  # whether a gradient that is not finite also ends the run
    done: int = 0  # tokens trained
    mean: float = 0.0  # running mean of the loss
    since: float = 0.0  # sum of loss x tokens since the last point of the curve
    curve: Curve = ()  # one point for each interval: tokens trained, mean loss since the previous point

    def after_step(self, step: StepResult) -> None:
        if (self.at_once and step.diverged) or self.has_diverged(step.loss, step.batch_tokens):
            raise Diverged(f"mean loss {self.mean:g} at step {step.step}")

    def has_diverged(self, loss: float, batch_tokens: int) -> bool:
        """Add the mean loss of the next step, in nats per token. Return whether the run has diverged."""
        before, self.done = self.done, self.done + batch_tokens
        if not math.isfinite(loss):
            return True
        self.mean += (loss - self.mean) * min(POINTS * batch_tokens / self.tokens, 1.0)
        self.since += loss * batch_tokens
        if self.done * POINTS // self.tokens > before * POINTS // self.tokens:
            last = self.curve[-1][0] if self.curve else 0
            self.curve = (*self.curve, (self.done, self.since / (self.done - last)))
            self.since = 0.0
        limit = divergence_limit(self.vocab_size)
        if self.done >= self.tokens and any(loss > limit for _, loss in self.curve):
            return self.mean > math.log(self.vocab_size) - LEARNT
        return self.mean > limit and self.done > self.tokens / 4

    def state(self) -> dict[str, Any]:
        return {"course": {key: value for key, value in asdict(self).items() if key != "at_once"}}

    def restore(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state["course"], curve=curve_of(state["course"]["curve"]))


class Pruned(Exception):
    """Raised to end a trial that cannot reach the best trial so far. ``expected`` is the validation loss that the
    trial would probably have reached at its end."""

    def __init__(self, expected: float) -> None:
        self.expected = expected


@dataclass
class Pruning(Callback):
    """Ends a trial that cannot reach the best trial so far. Checks at each point of its curve after the warm-up."""

    monitor: DivergenceMonitor  # records the loss curve; must come earlier in the list of callbacks
    baseline: Baseline
    warmup_tokens: int  # no trial is ended earlier

    def after_step(self, step: StepResult) -> None:
        curve, done = self.monitor.curve, self.monitor.done
        new_point = bool(curve) and curve[-1][0] == done > self.warmup_tokens
        if new_point and should_prune(curve, self.baseline):
            raise Pruned(expected(curve, self.baseline))


SMOOTH = 4  # curves are compared by their mean over this many points
FIRST = 0.25  # no trial is pruned before this share of the run is done
MARGIN = 1.0  # a trial may be behind by this many times the amount by which the baseline's loss still falls
LEAST = 8.0  # a trial may be behind by this many standard deviations of the loss between seeds
CATCHES_UP = 1.5
"""If a trial is g nats behind the baseline, and the baseline's loss still falls by r nats, the trial is expected to
end g^2 / (g + `CATCHES_UP` r) nats behind the baseline."""


def should_prune(curve: Curve, baseline: Baseline) -> bool:
    """Return whether a trial's curve is too far behind the baseline (see the module docstring). Never prune at
    the start (:data:`FIRST`, :data:`SMOOTH`) or end of a run."""
    tokens, end = curve[-1][0], baseline.curve[-1][0]
    if len(curve) < SMOOTH or tokens < FIRST * end or tokens >= end:
        return False
    return gap(curve, baseline) > max(MARGIN * _remaining_gain(curve, baseline), LEAST * baseline.noise)


def expected(curve: Curve, baseline: Baseline) -> float:
    """Estimate the final validation loss that a pruned trial would have reached. It would have closed part of its gap
    to the baseline. The larger the gap, the smaller this part (see :data:`CATCHES_UP`)."""
    behind = gap(curve, baseline)
    return baseline.loss + behind**2 / (behind + CATCHES_UP * _remaining_gain(curve, baseline))


def gap(curve: Curve, baseline: Baseline) -> float:
    """Return how much ``curve`` is above the baseline's curve, in nats: the mean over its last :data:`SMOOTH` points,
    at whose token counts the baseline is interpolated."""
    last = curve[-SMOOTH:]
    return fmean(loss for _, loss in last) - _mean(baseline.curve, last)


def _remaining_gain(curve: Curve, baseline: Baseline) -> float:
    """Return how many nats the baseline's loss still falls after the end of ``curve``: a difference of two means over
    :data:`SMOOTH` points."""
    return _mean(baseline.curve, curve[-SMOOTH:]) - _mean(baseline.curve, baseline.curve[-SMOOTH:])


def comparable(baseline: Baseline, tokens: int) -> bool:
    """Return whether the baseline has a curve that ends at about ``tokens`` tokens (within 2%)."""
    return bool(baseline.curve) and math.isclose(baseline.curve[-1][0], tokens, rel_tol=0.02)


def _mean(curve: Curve, at: Curve) -> float:
    """Return the mean loss of ``curve``, interpolated at the token counts of ``at``."""
    tokens, losses = zip(*curve, strict=True)
    return float(np.interp([there for there, _ in at], tokens, losses).mean())
