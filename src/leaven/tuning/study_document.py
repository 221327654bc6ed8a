"""The document of a study, saved as study.json. Screens and reports are made from it.

Losses and noise are in nats per token, or in the unit of the loss that a command reports. A point maps the path of
each searched value to a distance from the start value, in the unit of the :class:`Dimension`.
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, PlainSerializer

from leaven import storage
from leaven.catalogue.laws import REPLICATION
from leaven.documents import Sealed
from leaven.documents.runs import BestTrial, Outlook, TuneDocument, WorthRow
from leaven.recipe.recipe import Recipe
from leaven.training.outcome import Curve
from leaven.tuning.point import distance_in, moved

UNDER_WAY = ("running", "waiting")  # states of trials that have not ended
PRUNED = "pruned"  # the state of a trial that was ended early; study.json has "stopped"
MATTERED, NOT_WORTH, UNSURE = "mattered", "not worth tuning", "unsure"  # what :meth:`Answer.effect` returns
# Shares of a study's gain that may remain after the transfer to a larger model; the screen shows each of them. The
# measured share was a quarter, for values by module (docs/log.md, 2026-11-22).
SHARES = (1.0, 0.5, 0.25)
# Run lengths, in tokens, for which the loss law is used: its fitted range, extended by a factor of five. At 10 M
# tokens the law is far off.
WORTH_TOKENS = 1e9, 2.5e12


def _finite(loss: Any) -> Any:
    return None if isinstance(loss, float) and not math.isfinite(loss) else loss


def _finite_points(curve: Any) -> Any:
    try:
        return [point for point in curve if _finite(point[-1]) is not None]
    except (TypeError, LookupError):
        return curve  # not a curve, which pydantic refuses


def _unbounded(interval: Any) -> Any:
    unknown = interval is None or (isinstance(interval, list | tuple) and None in interval)
    return (-math.inf, math.inf) if unknown else interval


# Types of values in study.json. JSON has no infinities; study.json has null in their place.
Loss = Annotated[float | None, BeforeValidator(_finite)]  # None if it is not finite
LossCurve = Annotated[Curve, BeforeValidator(_finite_points)]  # without the points whose loss is not finite
State = Annotated[
    str,
    BeforeValidator(lambda state: PRUNED if state == "stopped" else state),
    PlainSerializer(lambda state: "stopped" if state == PRUNED else state),
]
Interval = Annotated[tuple[float, float], BeforeValidator(_unbounded)]  # infinite if there is none


@dataclass(frozen=True)
class Dimension:
    """One searched value: its start, range and unit.

    Distances from the start are in ``unit``. One ``octave`` doubles a value, or squares a beta. One ``tenth`` adds
    0.1. The distance of a ``choice`` is its index in ``levels``.
    """

    path: str  # in the recipe, such as hyperparameters.lr, or hyperparameters.depth.lr[2] in a depth profile
    centre: float | str  # the value in the recipe that the search started from
    low: float  # the lowest distance from the start point, at most 0
    high: float  # the highest distance from the start point, at least 0
    scale: float = 1.0  # typical distance of an optimum from the start point
    unit: str = "octave"  # octave | tenth | choice
    levels: tuple[str, ...] = ()  # the levels of a choice, starting with the level in the recipe
    near: tuple[float, float] | None = None  # the box in which a search begins; None: the whole range
    ends: tuple[str, str] = ("the end of the space",) * 2  # why the range ends at low and high; "": no value beyond
    expected: tuple[float, float] | None = None  # the optimum that laws expect: distance and standard deviation
    whole: bool = False  # whether all values are whole numbers

    def rounded(self, x: float, more: int = 0) -> float:
        """Return the distance to the whole number nearest to the value at distance ``x``, plus ``more``, clamped to
        the range. If values need not be whole numbers, return ``x``."""
        if not self.whole:
            return x
        assert isinstance(self.centre, float)
        low, value, high = (round(moved(self.unit, self.centre, each)) for each in (self.low, x, self.high))
        return distance_in(self.unit, self.centre, min(max(value + more, low), high))

    def upper(self, x: float) -> bool:
        """Return whether ``x``, a distance from the start, is closer to ``high`` than to ``low``."""
        return self.high - x < x - self.low

    def change(self, to: float, origin: float = 0.0) -> str:
        """Return the change from ``origin`` to ``to``, two distances from the start point, as text: a factor, such as
        ``x0.29`` (for a beta, of log(beta)), a difference, such as ``+0.05``, or the new level of a choice."""
        if self.unit == "choice":
            return self.levels[round(to)] if self.levels else f"{to:g}"
        if self.unit == "tenth":
            return f"{(to - origin) / 10:+.3g}"
        times = 2.0 ** (to - origin)
        return f"x{times:.2f}" if times >= 0.1 else f"x{times:.3g}"


@dataclass(frozen=True)
class StudyTrial:
    """One trial of a study: one training of a point with one seed. A retry belongs to the same trial."""

    number: int  # number of its last attempt; a retry has a number of its own
    state: State  # complete | diverged | pruned | failed (its process died) | running | waiting (for a retry)
    loss: Loss  # validation loss, nats per token; of a pruned trial, the predicted loss
    values: dict[str, bool | int | float | str] = field(default_factory=dict)  # by path, in the units of the recipe
    seconds: float | None = None  # training time; None until the trial has ended
    tokens_per_second: float | None = None  # tokens / seconds
    octaves: dict[str, float] | None = None  # distances from the start point, by path
    purpose: str = "search"  # search | noise (the start, other seeds) | rerun (the best points, fresh seeds)
    confirms: bool = False  # whether this is a confirmation trial: of the chosen point or the start, with a new seed
    seed: int = 0  # added to the recipe's seed; 0 in the search, so that its trials share init and data order
    tokens: int = 0  # number of tokens trained
    flops: float = 0.0  # model FLOPs of these tokens
    curve: LossCurve = ()  # (tokens, training loss)
    branches: Curve = ()  # (tokens, validation loss) of each duration, if the trial compares several durations
    worker: str | None = None  # host:pid of the worker process
    ended: float | None = None  # seconds since 1970


@dataclass(frozen=True)
class Best:
    """A point that was run, with its mean loss and a 95% interval."""

    number: int  # number of the first trial at this point
    loss: float  # mean loss, nats per token
    interval: Interval  # 95% interval of the loss
    fresh: int = 0  # number of trials that were not used to choose the point; if 0, the loss is probably too low
    runs: int = 1  # number of trials whose mean is the loss

    @property
    def certainty(self) -> str:
        """A phrase that says how certain the loss is, such as "95% interval 3.1000 to 3.2000"."""
        if not self.fresh and self.runs > 1:
            return f"the mean of {self.runs} trials that were also used to choose this point, so it may be too low"
        if not self.fresh:
            return "from the trial that was also used to choose this point, so it is probably too low"
        low, high = self.interval
        return f"95% interval {low:.4f} to {high:.4f}" if math.isfinite(low) else "from one trial"


@dataclass(frozen=True)
class SlicePoint:
    """The surrogate's prediction of the loss if one value of the best point is changed."""

    octaves: float  # distance of this value from the start point
    loss: float  # predicted loss minus the predicted loss of the best point, nats
    deviation: float  # standard deviation of this difference
    risk: float  # chance of divergence


@dataclass(frozen=True)
class Coordinate:
    """What a search found out about one searched value."""

    path: str  # of the value, in the recipe
    best: float  # distance of the best value from the start point, octaves
    flat: tuple[float, float]  # range of distances, octaves, with a loss as good as the best within the noise
    gain: float  # loss with this value at the start and all others at the best, minus the loss at the best
    importance: float  # share of the variation of the predicted loss that this value causes; all shares sum to 1
    worth: bool  # whether the value was worth tuning: its gain is above the noise
    slice: tuple[SlicePoint, ...] = ()  # the predicted loss as a function of this value
    gain_deviation: float = 0.0  # standard deviation of the gain
    at_end: bool = False  # whether the best value is at the limit of the search; the optimum may lie beyond
    end: str = ""  # name of this limit: a bound with its reason, or the recipe's [tuning.octaves]
    optuna_importance: float = 0.0  # Optuna's PED-ANOVA importance of this value, up to 1


@dataclass(frozen=True)
class Front:
    """A point of the Pareto front of loss and cost."""

    number: int  # number of the trial
    tokens: int  # number of tokens trained
    flops: float  # model FLOPs of these tokens
    loss: float  # mean over seeds, nats per token


class Answer(BaseModel):
    """The answer of a search: the best point, and what the search found out about each searched value."""

    model_config = ConfigDict(frozen=True)

    best: Best | None = None  # the best point; None before the search has ended
    octaves: dict[str, float] = {}  # the best point; if ``best`` is None, the point that is predicted to be best
    noise_floor: float | None = None  # standard deviation between trials of one point
    noise_runs: int = 0  # degrees of freedom of ``noise_floor``: about trials - points; 10^6 if the user gave it
    coordinates: tuple[Coordinate, ...] = ()  # the most important first
    fewest: Best | None = None  # the point with the fewest changes whose loss equals the best loss within the noise
    fewest_octaves: dict[str, float] | None = None  # the point of ``fewest``; predicted if ``fewest`` is None
    fewest_cost: float | None = None  # expected loss at ``fewest_octaves`` minus the expected loss at ``octaves``
    # Paths of values that were not worth tuning: if all of them are reset to the start, the loss rises by less than
    # the noise. Empty if this holds for every value: then the whole gain is in doubt, or there are too few trials.
    idle: tuple[str, ...] = ()
    # Loss of the start minus that of the best point, nats, from trials that were not used to choose the best point.
    gain: float | None = None
    in_doubt: bool = False  # whether the gain over the start may be luck
    outlook: Outlook | None = None  # only after the end of a search with the method trust-region
    # Whether the search uses prior knowledge; False if the trials contradict the knowledge, None if there is none.
    informed: bool | None = None
    advice: str = ""  # if all trials diverged: which value to lower
    dimensions: tuple[Dimension, ...] = ()  # the searched values

    @property
    def moved(self) -> bool:
        return any(self.octaves.values())

    @property
    def fewer(self) -> dict[str, float] | None:
        """The value of :attr:`fewest_octaves`, or None if :attr:`fewest` is None or is the best point."""
        return self.fewest_octaves if self.fewest is not None and self.fewest_octaves != self.octaves else None

    def effect(self, coordinate: Coordinate) -> str:
        """Return whether it helped to tune a value: the first of these texts that applies.

        - "mattered": the gain from tuning the value is above the noise.
        - "not worth tuning": the value is in ``idle``.
        - "unsure": the best value differs from the start, but the gain may be noise.
        - "": the best value is the start.
        """
        if coordinate.worth or coordinate.path in self.idle:
            return MATTERED if coordinate.worth else NOT_WORTH
        return UNSURE if coordinate.best else ""

    def dimension(self, path: str) -> Dimension:
        return next(dimension for dimension in self.dimensions if dimension.path == path)


class StudyDocument(Sealed, Answer):
    """A study: the result of its search (:class:`Answer`), and all trials."""

    version: int = 1
    id: str = ""  # the random id of the study, which is also in its store
    name: str
    method: str
    space: tuple[str, ...]  # paths of the searched values
    trials: tuple[StudyTrial, ...]
    radius: float | None = None  # size of the random moves (``Region.radius``); only for the method trust-region
    stalled: bool = False  # whether the search stopped early because several rounds gained less than the noise
    durations: tuple[int, ...] = ()  # compared run lengths in tokens; each trial trains all of them
    front: tuple[Front, ...] = ()
    written: dict[str, str] = {}  # digests of best.toml and fewest.toml, as leaven wrote them
    command: str = ""  # the shell command of a trial, with placeholders; empty if leaven trained the trials
    loss_pattern: str = ""  # with --command: the regular expression for its losses
    best_command: str = ""  # the command with the best values
    command_folder: str = ""  # the folder in which a command runs, relative to the study's folder
    progress: str = "tokens"  # unit of the curves: tokens, steps or losses (number of losses so far)

    @property
    def ended(self) -> int:
        """The number of trials that have ended. A trial and its retry count once."""
        return sum(trial.state not in UNDER_WAY for trial in self.trials)

    def count(self, state: str) -> int:
        return sum(trial.state == state for trial in self.trials)

    def summary(self, recipe: Path) -> TuneDocument:
        """Return the document that ``leaven tune --json`` prints. ``recipe`` is the file of the best recipe."""
        best = self.best
        return TuneDocument(
            best=best
            and BestTrial(loss=best.loss, interval=list(best.interval), recipe=str(recipe), in_doubt=self.in_doubt),
            outlook=self.outlook,
            trials=self.ended,
            failed=self.count("diverged") + self.count("failed"),
            noise_floor=self.noise_floor,
        )


def signed(loss: float) -> str:
    """Return a difference of losses as text with its sign and four decimals, such as ``-0.0123``."""
    return f"{round(loss, 4) + 0.0:+.4f}"  # -0.0 + 0.0 is 0.0


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Return the time that the ``spans`` (begin, end) cover. Overlaps count once."""
    total, until = 0.0, -math.inf
    for began, ended in sorted(spans):
        total += max(ended - max(began, until), 0.0)
        until = max(until, ended)
    return total


def front(trials: Sequence[StudyTrial]) -> tuple[Front, ...]:
    """Return the Pareto front of loss and FLOPs, cheapest first, of means over seeds. A trial with several durations
    gives a candidate for each."""
    of_point: dict[tuple[tuple[tuple[str, float], ...], int], list[tuple[int, float, float]]] = {}
    for trial in trials:
        if trial.state == "complete" and trial.octaves and trial.flops and trial.tokens and trial.loss is not None:
            point = tuple(sorted(trial.octaves.items()))
            for tokens, loss in trial.branches or ((trial.tokens, trial.loss),):
                cost = trial.flops * tokens / trial.tokens
                of_point.setdefault((point, tokens), []).append((trial.number, cost, loss))
    means = []
    for (_, tokens), of in of_point.items():
        numbers, costs, losses = zip(*of, strict=True)
        means.append(Front(min(numbers), tokens, statistics.fmean(costs), statistics.fmean(losses)))
    found: list[Front] = []
    for each in sorted(means, key=lambda front: (front.flops, front.loss)):
        if not found or each.loss < found[-1].loss:
            found.append(each)
    return tuple(found)


def edited(answer: Path) -> bool:
    """Return whether the user changed ``answer``, a best.toml or fewest.toml of a study. False for other files."""
    study = _study_of(answer)
    written = study and study.written.get(answer.name)
    return written is not None and storage.digest(storage.read(answer)) != written


def read_document(folder: Path) -> StudyDocument:
    """Return the document of the study in a folder. Raise OSError or ValueError if it cannot be read."""
    return StudyDocument.model_validate_json(storage.read(folder / "study.json"))


def _study_of(answer: Path) -> StudyDocument | None:
    with suppress(OSError, ValueError):
        return read_document(answer.parent)
    return None


def worth_at(answer: Path, target: Recipe) -> list[WorthRow]:
    """Return what a study's gain is worth in training tokens of ``target``, one row for each share in ``SHARES``.

    The ``times`` of a row is the factor on the tokens of ``target`` that would lower its loss by (share) x (gain).
    ``answer`` is the best.toml of the study. The list is empty if the study has no gain, if it may be luck, or if the
    target's tokens are outside ``WORTH_TOKENS``.
    """
    study = _study_of(answer) if answer.name == "best.toml" else None
    tokens, (fewest, most) = target.data.tokens, WORTH_TOKENS
    if study is None or study.in_doubt or study.gain is None or study.gain <= 0 or not fewest <= tokens <= most:
        return []
    return [
        WorthRow(share=share, gain=share * study.gain, times=REPLICATION.worth_in_tokens(tokens, share * study.gain))
        for share in SHARES
    ]
