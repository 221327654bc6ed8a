"""What study.json holds: written by a search, read by reports. Without torch and optuna, for both to import."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Trial:
    number: int
    state: str  # complete | diverged | failed | running
    loss: float | None
    values: dict[str, float]
    seconds: float | None
    tokens_per_second: float | None


@dataclass(frozen=True)
class Best:
    """The winner: its mean loss over fresh seeds with a 95% interval, in nats per token."""

    number: int
    loss: float
    interval: tuple[float, float]


@dataclass(frozen=True)
class StudyState:
    """A search as it stands. ``space`` are the dotted recipe paths that vary, ``noise_floor`` is in nats."""

    name: str
    method: str
    space: tuple[str, ...]
    noise_floor: float | None
    best: Best | None
    trials: tuple[Trial, ...]

    @property
    def ended(self) -> int:
        """The trials that ``leaven tune --trials`` counts."""
        return sum(trial.state != "running" for trial in self.trials)
