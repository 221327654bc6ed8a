"""The document of a study: the content of study.json, from which screens and reports are made. Without torch.

An :class:`Answer` is computed from the trials; a :class:`StudyDocument` adds the trials themselves. Losses and noise
are in nats per token. A point maps each path to a distance from the start, in the unit of its dimension.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator

from leaven.documents.runs import BestTrial, TuneDocument
from leaven.training.outcome import Curve

UNDER_WAY = ("running", "waiting")  # states of trials that have not ended


@dataclass(frozen=True)
class Dimension:
    """One searched value: its start, range and unit.

    One ``octave`` doubles the value, one ``tenth`` adds 0.1, and for a ``choice`` the number is the index of one of
    its ``levels``.
    """

    path: str  # of the recipe, dotted; a point of a depth profile is hyperparameters.depth.lr[2]
    centre: float | str  # the value in the recipe that the search started from
    low: float  # how far it may go, at most 0
    high: float
    scale: float = 1.0  # how far away an optimum typically is
    unit: str = "octave"  # octave | tenth | choice
    levels: tuple[str, ...] = ()  # of a choice, the recipe's own first
    near: tuple[float, float] | None = None  # the box in which a search begins; low and high if None
    ends: tuple[str, str] = ("the end of the space",) * 2  # names of low and high; empty for a natural limit

    @property
    def box(self) -> tuple[float, float]:
        return self.near or (self.low, self.high)

    def change(self, to: float, origin: float = 0.0) -> str:
        """Return the change from ``origin`` to ``to`` as text: ``x0.29``, ``+0.05``, or the new level."""
        if self.unit == "choice":
            return self.levels[round(to)] if self.levels else f"{to:g}"
        if self.unit == "tenth":
            return f"{(to - origin) / 10:+.3g}"
        times = 2.0 ** (to - origin)
        return f"x{times:.2f}" if times >= 0.1 else f"x{times:.3g}"


@dataclass(frozen=True)
class StudyTrial:
    """One run of a study."""

    number: int
    state: str  # complete | diverged | stopped | failed | running | waiting (given back or lost, to be run again)
    loss: float | None  # of a stopped trial, the expected loss
    values: dict[str, int | float | str]  # by path, as the recipe has them
    seconds: float | None
    tokens_per_second: float | None
    octaves: dict[str, float] | None = None  # by path, from the start
    purpose: str = "search"  # search | noise (other seeds of the start) | rerun (fresh seeds of the best few)
    confirms: bool = False  # a confirmation run: of the point that reruns chose, with new seeds
    seed: int = 0  # offset from the recipe's; all trials of a search share one, and with it init and data order
    tokens: int = 0
    flops: float = 0.0
    curve: Curve = ()  # training loss
    branches: Curve = ()  # validation loss at the end of each duration, where durations are compared
    worker: str | None = None  # host:pid
    ended: float | None = None  # seconds since 1970


@dataclass(frozen=True)
class Best:
    """A point that was run: its mean loss with a 95% interval."""

    number: int  # of the first trial at this point
    loss: float
    interval: tuple[float, float]
    fresh: int = 0  # number of its runs that were not used to choose it; 0: all were, and the loss is too low
    runs: int = 1  # the loss is the mean of so many runs

    @property
    def certainty(self) -> str:
        """How certain the loss is, as text."""
        if not self.fresh and self.runs > 1:
            return f"the mean of {self.runs} runs that chose it among several, so that it may be too low"
        if not self.fresh:
            return "of the run that chose it, so that it is too low"
        low, high = self.interval
        return f"95% interval {low:.4f} to {high:.4f}" if math.isfinite(low) else "of one run"


@dataclass(frozen=True)
class SlicePoint:
    """The surrogate's prediction at one point of a slice through the best point."""

    octaves: float
    loss: float  # difference from the best point
    deviation: float  # standard deviation of that
    risk: float  # chance of divergence


@dataclass(frozen=True)
class Coordinate:
    """The answer for one value."""

    path: str
    best: float  # octaves from the start
    flat: tuple[float, float]  # octaves between which the loss stays within the noise of the best
    gain: float  # the loss with this value at the start less the loss at the best, all else at the best
    importance: float  # share, of 1, of how much the loss varies along the slice over the values that were tried
    worth: bool  # whether it was worth tuning: the gain is above the noise
    slice: tuple[SlicePoint, ...] = ()
    gain_deviation: float = 0.0  # standard deviation of the gain
    at_end: bool = False  # whether the best is at the limit of the search, so that the optimum may lie beyond
    end: str = ""  # that limit: a bound with its reason, or the recipe's [tuning.octaves]
    optuna_importance: float = 0.0  # share, of 1, by PED-ANOVA: how the best tenth of the trials differs


@dataclass(frozen=True)
class Front:
    """A point of the Pareto front of loss and cost."""

    number: int  # of the trial
    tokens: int
    flops: float
    loss: float


class Answer(BaseModel):
    """The answer of a search."""

    model_config = ConfigDict(frozen=True)

    best: Best | None = None  # of the points run with fresh seeds; None as long as there are none
    octaves: dict[str, float] = {}  # that point; without it, the one that all trials together predict to be best
    noise_floor: float | None = None  # standard deviation between runs of one point
    noise_runs: int = 0  # degrees of freedom of the noise: runs less points; 10^6 where the noise was given
    coordinates: tuple[Coordinate, ...] = ()  # the most important first
    fewest: Best | None = None  # the point with the fewest changes that equals the best within noise, if it was rerun
    fewest_octaves: dict[str, float] | None = None  # that point, measured or predicted
    fewest_cost: float | None = None  # its expected loss less that of the best
    # Paths that were not worth tuning: with all of them at the start, the loss rises by less than the noise. Empty if
    # that holds for every path: then the best is the start, or the trials are too few.
    idle: tuple[str, ...] = ()
    gain: float | None = None  # the start's loss less the best's, over runs that were not used to choose it
    advice: str = ""  # if all trials diverged: which value to lower
    dimensions: tuple[Dimension, ...] = ()  # what was searched

    @property
    def fewer(self) -> dict[str, float] | None:
        """The point with the fewest changes, if it was run and differs from the best."""
        return self.fewest_octaves if self.fewest is not None and self.fewest_octaves != self.octaves else None

    @property
    def unsure(self) -> list[Coordinate]:
        """The changed values whose gain may be noise: neither worth tuning nor idle."""
        return [each for each in self.coordinates if each.best and not each.worth and each.path not in self.idle]

    def dimension(self, path: str) -> Dimension:
        return next(dimension for dimension in self.dimensions if dimension.path == path)


class StudyDocument(Answer):
    """A study. It has a ``best`` once a command has run the search to its end."""

    version: int = 1
    name: str
    method: str
    space: tuple[str, ...]  # recipe paths that vary
    trials: tuple[StudyTrial, ...]
    radius: float | None = None  # of the trust region, as a share of the uncertainty
    stalled: bool = False  # whether it stopped before its budget was used: some rounds gained less than the noise
    durations: tuple[int, ...] = ()  # tokens; each trial trains all of them
    front: tuple[Front, ...] = ()

    @property
    def ended(self) -> int:
        """Trials that have ended, as ``leaven tune --trials`` counts them."""
        return sum(trial.state not in UNDER_WAY for trial in self.trials)

    def summary(self, recipe: Path, following: Sequence[str] = ()) -> TuneDocument:
        """Return what ``leaven tune --json`` prints; ``recipe`` is the file of the best recipe."""
        best = self.best
        return TuneDocument(
            best=best and BestTrial(loss=best.loss, interval=list(best.interval), recipe=str(recipe)),
            trials=self.ended,
            failed=sum(trial.state in {"diverged", "failed"} for trial in self.trials),
            noise_floor=self.noise_floor,
            next=list(following),
        )

    @model_validator(mode="before")
    @classmethod
    def _read(cls, document: Any) -> Any:
        """JSON has no infinities: a trial that diverged has no loss, and such a point of a curve is left out."""
        if not isinstance(document, dict):
            return document
        found = dict(document)
        for name in ("best", "fewest"):
            if isinstance(found.get(name), dict) and None in (found[name].get("interval") or (None,)):
                found[name] = found[name] | {"interval": (-math.inf, math.inf)}
        if isinstance(found.get("trials"), list):
            found["trials"] = [_without_infinities(trial) for trial in found["trials"]]
        return found


def _without_infinities(trial: Any) -> Any:
    if not isinstance(trial, dict):
        return trial

    def known(loss: Any) -> bool:
        return not isinstance(loss, float) or math.isfinite(loss)

    curve = [point for point in trial.get("curve", ()) if point[-1] is not None and known(point[-1])]
    return trial | {"loss": trial.get("loss") if known(trial.get("loss")) else None, "curve": curve}


def signed(loss: float) -> str:
    """Return a difference of losses as text."""
    return f"{round(loss, 4) + 0.0:+.4f}"  # -0.0 + 0.0 is 0.0


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of time spans (begin, end)."""
    total, until = 0.0, -math.inf
    for began, ended in sorted(spans):
        total += max(ended - max(began, until), 0.0)
        until = max(until, ended)
    return total
