"""Defines the result of a trial, in the form in which searches, workers and users' objectives exchange it. This
module does not import torch."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# (tokens, loss in nats per token) at points of a run, in the order of tokens.
Curve = tuple[tuple[int, float], ...]


def curve_of(points: Iterable[Sequence[float]]) -> Curve:
    """Convert a list of points, from JSON or from a user's objective, to a curve."""
    return tuple((int(tokens), float(loss)) for tokens, loss in points)


@dataclass(frozen=True)
class Outcome:
    """The outcome of a trial: its loss, its cost and its curve."""

    loss: float  # validation loss, nats per token; not finite if the trial diverged, an estimate if pruned
    tokens: int = 0  # number of tokens trained, including the cooldowns of shorter durations
    flops: float = 0.0  # model FLOPs of these tokens
    seconds: float = 0.0  # training time
    curve: Curve = ()  # training loss, at each point the mean since the previous point
    stopped: bool = False  # pruned: ended early because it could not reach the best trial
    branches: Curve = ()  # validation loss at the end of each duration, if several are trained
    worker: str = ""  # host:pid of the process that trained it

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> "Outcome":
        """Read an outcome from its JSON document."""
        return cls(**{**document, **{key: curve_of(document.get(key, ())) for key in ("curve", "branches")}})

    @property
    def diverged(self) -> bool:
        """Whether the loss is not finite."""
        return not math.isfinite(self.loss)


@dataclass(frozen=True)
class Baseline:
    """The best trial so far, with which running trials are compared."""

    curve: Curve  # of the training loss
    loss: float  # validation loss at its end, nats per token
    noise: float  # standard deviation of the validation loss between seeds, nats per token
