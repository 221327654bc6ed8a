"""When a trial is given up because another one is out of its reach, and what is then said of it. Without torch.

Only runs of one schedule are compared, at equal tokens: cut off early, a short cosine run ranks nothing, for a high
lr starts behind and wins in the end. So the margin is what the rival itself has still to gain. That is much while the
lr is high, and goes to nothing as it falls: to win, whoever is further behind would have to gain twice as much. The
constants were chosen on whole curves of one set of trials and tried on another (benchmarks/early_stopping.py,
docs/log.md).
"""

import math
from statistics import fmean

import numpy as np

from leaven.training.outcome import Curve, Rival

SMOOTH = 4
"""Points of a curve that are compared at once."""
FIRST = 0.25
"""Share of the run before which nothing is given up."""
MARGIN = 1.0
"""Share of what the rival has still to gain by which a run may be behind."""
LEAST = 8.0
"""Of the noise between seeds, by which a run may be behind at any time."""
CATCHES_UP = 1.5
"""In shares of what the rival has still to gain: a run that is as far behind as this keeps half of its gap."""


def hopeless_against(curve: Curve, rival: Rival) -> bool:
    """Whether a run of the rival's duration, as far as it is, is out of reach of it."""
    tokens, end = curve[-1][0], rival.curve[-1][0]
    if len(curve) < SMOOTH or tokens < FIRST * end or tokens >= end:
        return False
    return gap(curve, rival) > max(MARGIN * _to_gain(curve, rival), LEAST * rival.noise)


def expected(curve: Curve, rival: Rival) -> float:
    """The validation loss to which a run would have come that is given up.

    It catches up while the rival still gains, and the less of its way the further behind it is.
    """
    behind = gap(curve, rival)
    return rival.loss + behind**2 / (behind + CATCHES_UP * _to_gain(curve, rival))


def gap(curve: Curve, rival: Rival) -> float:
    """How far behind the rival a run is, in nats per token: in its last points, at equal tokens."""
    last = curve[-SMOOTH:]
    return fmean(loss for _, loss in last) - _mean(rival.curve, last)


def _to_gain(curve: Curve, rival: Rival) -> float:
    """By how much the rival's loss still fell from where the curve ends."""
    return _mean(rival.curve, curve[-SMOOTH:]) - _mean(rival.curve, rival.curve[-SMOOTH:])


def comparable(rival: Rival, tokens: int) -> bool:
    """Whether the rival is of a run of so many tokens: their last batches may differ."""
    return bool(rival.curve) and math.isclose(rival.curve[-1][0], tokens, rel_tol=0.02)


def _mean(curve: Curve, at: Curve) -> float:
    """Of a curve at the tokens of another."""
    tokens, losses = zip(*curve, strict=True)
    return float(np.interp([there for there, _ in at], tokens, losses).mean())
