"""What study.json holds: written by a search, read by reports. Without torch and optuna, for both to import."""

from dataclasses import dataclass

from leaven.training.outcome import Curve

UNDER_WAY = ("running", "waiting")  # states of trials that have not ended


@dataclass(frozen=True)
class Dimension:
    """One searched value: where the search starts, how far it may go, and in which unit.

    A point of a search is a number by path, 0 at the start. In the unit ``octave`` a value doubles from one whole
    number to the next, in ``tenth`` it grows by 0.1, and a ``choice`` has the number of one of its ``levels``.
    """

    path: str  # of the recipe, dotted; a point of a depth profile is hyperparameters.depth.lr[2]
    centre: float | str  # the value in the recipe that the search started from
    low: float  # how far it may go, at most 0
    high: float
    scale: float = 1.0  # how far away an optimum typically is: of a flat value farther
    unit: str = "octave"  # octave | tenth | choice
    levels: tuple[str, ...] = ()  # of a choice, the recipe's own first
    near: tuple[float, float] | None = None  # the box in which a search begins; low and high if None
    ends: tuple[str, str] = ("the end of the space",) * 2  # what low and high are; empty where nothing can lie beyond

    @property
    def box(self) -> tuple[float, float]:
        return self.near or (self.low, self.high)

    def change(self, to: float, origin: float = 0.0) -> str:
        """What moving from ``origin`` to ``to`` does: ``x0.29``, ``+0.05``, or the level that it is then."""
        if self.unit == "choice":
            return self.levels[round(to)] if self.levels else f"{to:g}"
        if self.unit == "tenth":
            return f"{(to - origin) / 10:+.3g}"
        times = 2.0 ** (to - origin)
        return f"x{times:.2f}" if times >= 0.1 else f"x{times:.3g}"


@dataclass(frozen=True)
class Trial:
    number: int
    state: str  # complete | diverged | stopped | failed | running | waiting (given back or lost, to be done again)
    loss: float | None  # nats per token; of a stopped one, what is expected of it
    values: dict[str, float | str]  # by path, as the recipe has them
    seconds: float | None
    tokens_per_second: float | None
    octaves: dict[str, float] | None = None  # by path, from the start, each in the unit of its dimension
    purpose: str = "search"  # search | noise (other seeds of the start) | rerun (other seeds of the best few)
    confirms: bool = False  # a rerun of what reruns chose, which had no part in choosing it
    seed: int = 0  # how far from the recipe's: trials of a search share one, and with it init and order of data
    tokens: int = 0
    flops: float = 0.0
    curve: Curve = ()
    branches: Curve = ()  # validation loss at the end of each duration, where durations are compared
    worker: str | None = None  # host:pid
    ended: float | None = None  # seconds since 1970


@dataclass(frozen=True)
class Best:
    """An answer: its mean loss with a 95% interval, in nats per token."""

    number: int  # of the trial that it is, or that it was first run as
    loss: float
    interval: tuple[float, float]
    fresh: int = 0  # runs that it is the mean of and that did not choose it; 0: it is of those that did, and too low
    runs: int = 1  # that it is the mean of


@dataclass(frozen=True)
class SlicePoint:
    """The landscape along one value through the best point, as all trials together have it."""

    octaves: float
    loss: float  # difference from the best point, nats per token
    deviation: float  # standard deviation of that
    risk: float  # chance of divergence


@dataclass(frozen=True)
class Coordinate:
    """What a search found out of one value."""

    path: str
    best: float  # octaves from the start
    flat: tuple[float, float]  # octaves: between them the loss stays within the noise of the best
    gain: float  # nats per token that moving it from the start to the best brought, all else at the best
    importance: float  # share, of 1, of how much the loss varies along the slice over the values that were tried
    worth: bool  # whether tuning it paid: the gain is above the noise
    slice: tuple[SlicePoint, ...] = ()
    gain_deviation: float = 0.0  # standard deviation of the gain, nats per token
    at_end: bool = False  # the best is as far as the search may go: the optimum may lie beyond
    end: str = ""  # what is there: a bound with its reason, or the recipe's [tuning.octaves]
    optuna_importance: float = 0.0  # share, of 1, by PED-ANOVA: what the best tenth of the trials have in common


@dataclass(frozen=True)
class Front:
    """Loss against cost: a duration at which no cheaper trial has a lower loss."""

    number: int  # of the trial
    tokens: int
    flops: float
    loss: float


@dataclass(frozen=True)
class StudyState:
    """A search as it stands. ``space`` are the dotted recipe paths that vary, ``noise_floor`` is in nats."""

    name: str
    method: str
    space: tuple[str, ...]
    noise_floor: float | None
    best: Best | None
    trials: tuple[Trial, ...]
    dimensions: tuple[Dimension, ...]
    noise_runs: int = 0  # how many runs the noise floor is of, other than one a point
    radius: float | None = None  # octaves, of the trust region
    stalled: bool = False  # it stopped of itself: rounds had gained less than the noise
    fewest: Best | None = None  # of the points equal within noise, the one with the fewest changes
    fewest_octaves: dict[str, float] | None = None
    gain: float | None = None  # nats, how far the best is below the start, by runs that did not choose it
    idle: tuple[str, ...] = ()  # not worth tuning: all of these at the start cost less than the noise together
    durations: tuple[int, ...] = ()  # in tokens, that each trial compared
    coordinates: tuple[Coordinate, ...] = ()  # the most important first
    front: tuple[Front, ...] = ()
    advice: str = ""  # where everything diverged: what to lower

    @property
    def ended(self) -> int:
        """The trials that ``leaven tune --trials`` counts."""
        return sum(trial.state not in UNDER_WAY for trial in self.trials)
