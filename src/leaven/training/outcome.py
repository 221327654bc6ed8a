"""The result of a trial. Worker processes and users' objectives return it. Does not import torch."""

import math
import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# (tokens, loss in nats per token) at points of a run, in the order of tokens.
Curve = tuple[tuple[int, float], ...]


def curve_of(points: Iterable[Sequence[float]]) -> Curve:
    return tuple((int(tokens), float(loss)) for tokens, loss in points)


def this_process() -> str:
    """Return ``host:pid`` of this process."""
    return f"{socket.gethostname()}:{os.getpid()}"


@dataclass(frozen=True)
class Outcome:
    loss: float  # validation loss, nats per token; not finite if the trial diverged, an estimate if pruned
    tokens: int = 0  # number of trained tokens; if several durations are trained, with the cooldown of each
    flops: float = 0.0  # model FLOPs of these tokens
    seconds: float = 0.0  # training time
    curve: Curve = ()  # (tokens, training loss) points; each loss is the mean since the previous point
    stopped: bool = False  # whether the trial was pruned: ended early because it could not reach the best trial
    branches: Curve = ()  # if several durations are trained, (duration in tokens, validation loss at its end) of each
    worker: str = ""  # host:pid of the process that trained the trial

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> "Outcome":
        """Return the outcome that a JSON document contains. All values but the loss may be missing. Raise TypeError,
        ValueError or OverflowError if a key is unknown or a value cannot be read."""
        made = cls(**{**document, **{key: curve_of(document.get(key, ())) for key in ("curve", "branches")}})
        if not all(isinstance(each, int | float) for each in (made.loss, made.tokens, made.flops, made.seconds)):
            raise TypeError("a value is no number")
        return made

    @property
    def diverged(self) -> bool:
        return not math.isfinite(self.loss)


@dataclass(frozen=True)
class Baseline:
    """The best trial so far, with which running trials are compared."""

    curve: Curve  # (tokens, training loss) points of this trial
    loss: float  # validation loss at the end of this trial, nats per token
    noise: float  # standard deviation of the validation loss between seeds, nats per token
