"""What a report tells of: a run, a study or a demo, as frozen data."""

import math
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict

from leaven.recipe.recipe import Recipe
from leaven.tuning.document import UNDER_WAY, StudyDocument, StudyTrial


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


# A diverged run writes NaN; a chart has a gap there.
Number = Annotated[float | None, BeforeValidator(_finite)]


class Entry(BaseModel):
    """Newer writers may add keys; a reader of old pages ignores them."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class Step(Entry):
    """One line of metrics.jsonl. ``tokens`` are those consumed after the step, ``lr`` is that of hidden weights."""

    step: int
    tokens: int
    loss: Number = None
    lr: Number = None
    grad_norm: Number = None
    batch_tokens: Number = None
    tokens_per_second: Number = None
    noise_scale: Number = None


class Part(Entry):
    """One part of a demo and how long it took."""

    name: str
    seconds: float


class Corpus(Entry):
    source: str
    bytes: int
    documents: int | None = None
    train_tokens: int
    validation_tokens: int
    vocab_size: int


class Machine(Entry):
    processor: str | None = None
    cores: int | None = None
    memory_gib: float | None = None
    python: str | None = None
    torch: str | None = None
    platform: str | None = None
    leaven: str | None = None


class Return(Entry):
    """A return of a run to an earlier point: found at ``tokens``, back to ``to_tokens``, from where on ``skip_from``
    to ``skip_to`` of the stream is left out (tokens). ``event`` is ``rollback``, or ``rewind`` for one by hand."""

    event: str
    tokens: int
    to_tokens: int
    skip_from: int
    skip_to: int
    why: str | None = None


@dataclass(frozen=True)
class Run:
    """A training run. ``loss`` is the last validation loss, ``validation`` all of them as (tokens, loss).

    ``stopped`` says why a run that did not finish ended, if it could say it.
    """

    title: str
    recipe: Recipe
    steps: tuple[Step, ...]
    validation: tuple[tuple[int, float], ...]
    loss: float | None
    seconds: float | None
    finished: bool
    stopped: str | None = None
    returns: tuple[Return, ...] = ()
    key: str = "run"

    @property
    def tokens(self) -> int:
        return self.steps[-1].tokens

    @property
    def first_loss(self) -> float | None:
        return next((step.loss for step in self.steps if step.loss is not None), None)

    @property
    def tokens_per_second(self) -> float | None:
        """The median over the steps: the first ones and a pause on the machine do not count."""
        speeds = sorted(step.tokens_per_second for step in self.steps if step.tokens_per_second)
        return speeds[len(speeds) // 2] if speeds else None


class Study(StudyDocument):
    """A search, with the recipe it began from and the best one."""

    centre: Recipe
    best_recipe: Recipe | None

    @property
    def seconds(self) -> float:
        return sum(trial.seconds or 0.0 for trial in self.trials)

    def count(self, state: str) -> int:
        return sum(trial.state == state for trial in self.trials)

    @property
    def under_way(self) -> bool:
        return any(trial.state in UNDER_WAY for trial in self.trials)

    @property
    def moved(self) -> bool:
        """Whether the best is another point than the start."""
        return any(coordinate.best for coordinate in self.coordinates)

    @property
    def best_trial(self) -> StudyTrial | None:
        return next((trial for trial in self.trials if self.best and trial.number == self.best.number), None)

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95% interval of the best; None where it says nothing, or only the run that chose it was there."""
        if self.best is None or not self.best.fresh:
            return None
        low, high = self.best.interval
        return (low, high) if math.isfinite(high - low) else None

    @property
    def unjudged(self) -> bool:
        """Whether the loss of the best is that of the one run which chose it."""
        return self.best is not None and not self.best.fresh and self.best.runs == 1

    @property
    def fewer(self) -> dict[str, float] | None:
        """The octaves, by path, of the point with the fewest changes; None where that is the best point itself."""
        return None if self.best_trial and self.fewest_octaves == self.best_trial.octaves else self.fewest_octaves

    @property
    def start_loss(self) -> float | None:
        """Of the recipe that the search began from, over all its seeds; of the first trial where it was not run."""
        done = [trial for trial in self.trials if trial.loss is not None and trial.state == "complete"]
        at_start = [trial for trial in done if trial.octaves is not None and not any(trial.octaves.values())]
        losses = [trial.loss for trial in at_start or done[:1] if trial.loss is not None]
        return sum(losses) / len(losses) if losses else None


@dataclass(frozen=True)
class Arm:
    """One of the runs that a demo compares. ``run`` is None where it never wrote a step."""

    key: str
    title: str
    why: str
    loss: float | None
    folder: str
    run: Run | None


@dataclass(frozen=True)
class Demo:
    name: str
    verdict: str
    arms: tuple[Arm, ...]
    study: Study | None
    study_folder: str
    target: Recipe | None
    target_path: str
    command: str
    parts: tuple[Part, ...]
    corpus: Corpus | None
    machine: Machine | None

    @property
    def seconds(self) -> float:
        return sum(part.seconds for part in self.parts)

    @property
    def transferred(self) -> Arm | None:
        return next((arm for arm in self.arms if arm.key == "transferred"), None)

    @property
    def rival(self) -> Arm | None:
        """The best of the other arms."""
        others = [arm for arm in self.arms if arm.key != "transferred" and arm.loss is not None]
        return min(others, key=lambda arm: arm.loss or 0.0, default=None)

    @property
    def gain(self) -> float | None:
        """How many nats the transferred arm is better than the best other one (below 0: worse)."""
        mine, rival = self.transferred, self.rival
        if mine is None or mine.loss is None or rival is None or rival.loss is None:
            return None
        return rival.loss - mine.loss


Story = Demo | Study | Run
