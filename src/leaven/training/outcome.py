"""What a trial comes to. Without torch: searches, their worker processes and other people's objectives share it."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# (tokens, loss in nats per token) along a run, tokens rising.
Curve = tuple[tuple[int, float], ...]


def curve_of(points: Iterable[Sequence[float]]) -> Curve:
    """A curve that was JSON, which has no tuples, or that somebody else's objective gave."""
    return tuple((int(tokens), float(loss)) for tokens, loss in points)


@dataclass(frozen=True)
class Outcome:
    """A trial's end."""

    loss: float  # validation, nats per token; not finite: it diverged. Of a stopped trial, what is expected of it
    tokens: int = 0  # trained on, in all attempts
    flops: float = 0.0
    seconds: float = 0.0
    curve: Curve = ()  # mean training loss since the point before
    stopped: bool = False  # given up, as hopeless against the curve of the best trial
    branches: Curve = ()  # validation loss at the end of each duration, where durations are compared
    worker: str = ""  # host:pid

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> "Outcome":
        """One that was JSON."""
        return cls(**{**document, **{key: curve_of(document.get(key, ())) for key in ("curve", "branches")}})

    @property
    def diverged(self) -> bool:
        return not math.isfinite(self.loss)


@dataclass(frozen=True)
class Baseline:
    """The best trial so far, for others to be compared with while they run."""

    curve: Curve
    loss: float  # of validation, at its end
    noise: float  # standard deviation between seeds, nats per token
