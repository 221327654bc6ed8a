"""Detects anomalies of a run from its loss, gradient norm and update norm, and rolls the run back or stops it.

At each step, the detector does the following for each of the three quantities:

1. The usual level of the quantity is its median over the last :data:`LEVEL` steps that were not suspicious (see 4).
2. The new value minus this level is divided by a robust standard deviation: 1.4826 times the median of the last
   :data:`WINDOW` absolute differences from the level, but at least a floor.
3. The resulting number of deviations, limited to :data:`CAP`, minus :data:`ALLOWANCE`, is added to a sum that never
   falls below 0 (a one-sided cumulative sum: Page 1954, "Continuous inspection schemes").
4. When the sum reaches :data:`LIMIT`, the run has an anomaly. The anomaly began when the sum last rose above 0. All
   steps since then are suspicious; they do not change the usual level.

Three steps with a large deviation are an anomaly, and so are a dozen steps with a small one. A single batch of
unusual text is not. The detector uses the logarithms of the norms, and divides the update norm by the lr. In a 32B
run, the update norm doubled before loss and gradient changed (marin-community/marin#1368).

A value that is not finite is an anomaly at once, unless steps are skipped (:class:`SpikeDetector`). Other anomalies
are detected only after 2 x :data:`LEVEL` steps. Rate of false alarms: docs/log.md.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

from leaven.recipe.batch import BatchSchedule
from leaven.recipe.recipe import Stability
from leaven.training.checkpoint import checkpoints_to_keep, first_in_each_interval
from leaven.training.loop import Callback
from leaven.training.rewind import Rewind, position

if TYPE_CHECKING:
    from leaven.training.metrics import Step
    from leaven.training.trainer import RunTrainer

LEVEL = 32
WINDOW = 128
ALLOWANCE = 4.0
CAP = 12.0  # largest number of deviations that counts: a step adds at most CAP - ALLOWANCE to the sum
LIMIT = 24.0
OUTSTANDING = 6.0
"""``on_spike = "skip"`` skips a step whose loss or gradient norm is at least this many standard deviations above its
median, as in OLMo-core's SkipStep optimizers."""
PATIENCE = 20  # with ``on_spike = "skip"``, this many skipped steps in a row are an anomaly
# The smallest standard deviations: 0.05 nats, and for the logarithms of the norms 0.25 and 0.1. A floor is harmless
# where the true deviations are smaller, as with large batches.
FLOORS = {"loss": 0.05, "grad_norm": 0.25, "update_norm": 0.1}
TITLES = {"loss": "loss", "grad_norm": "gradient norm", "update_norm": "update norm"}


@dataclass(frozen=True)
class Limits:
    """Upper limits for the loss and the gradient norm. A step is skipped if either reaches its limit."""

    loss: float = math.inf  # nats per token
    grad_norm: float = math.inf  # before clipping


@dataclass(frozen=True)
class Anomaly:
    onset: int  # the first suspicious step
    step: int  # the step at which it was detected
    why: str  # what was found, in words
    numbers: dict[str, dict[str, float]]  # by quantity, at ``step``: "value", "median", "deviations", "sum"


@dataclass
class QuantityMonitor:
    """Tracks a quantity's usual level, and the sum of deviations from this level."""

    floor: float  # lower limit of the standard deviation
    values: list[float] = field(default_factory=list)  # the last :data:`LEVEL` values that were not suspicious
    distances: list[float] = field(default_factory=list)  # distance of each value from the usual level at its step
    total: float = 0.0  # cumulative sum of deviations
    since: int | None = None  # step at which the sum last rose above 0; None while the sum is 0

    @property
    def ready(self) -> bool:
        return len(self.distances) >= LEVEL

    def usual(self) -> tuple[float, float]:
        """Return the median of ``values`` and their robust standard deviation (at least ``floor``)."""
        return median(self.values), max(1.4826 * median(self.distances), self.floor)

    def add(self, step: int, value: float) -> tuple[float, float]:
        """Add the value of a step. Return (usual level before this step, number of standard deviations of ``value``
        above it, which is 0 until enough steps are known)."""
        middle = median(self.values) if self.values else value
        deviations = 0.0
        if self.ready:
            middle, spread = self.usual()
            deviations = (value - middle) / spread
            self.total = max(0.0, self.total + min(deviations, CAP) - ALLOWANCE)
            self.since = None if self.total == 0 else self.since or step
        if self.since is None:
            if len(self.values) == LEVEL:
                self.distances = [*self.distances, abs(value - middle)][-WINDOW:]
            self.values = [*self.values, value][-LEVEL:]
        return middle, deviations


class SpikeDetector:
    """Detects anomalies of the training metrics. Pass the metrics of every step to :meth:`observe`, in order.

    With ``skipping`` (``on_spike = "skip"``), the trainer skips the update of each step above :meth:`limits`. Then
    there are only two anomalies: :data:`PATIENCE` skipped steps in a row, and an update norm that is not finite.
    """

    def __init__(self, skipping: bool = False) -> None:
        self.skipping = skipping
        self.watches = {name: QuantityMonitor(floor) for name, floor in FLOORS.items()}
        self._left_out = 0
        self._limits: list[tuple[int, Limits]] = []

    @property
    def since(self) -> int | None:
        """The step since which all steps are suspicious, or None if the newest step is not suspicious."""
        return min((watch.since for watch in self.watches.values() if watch.since is not None), default=None)

    def observe(self, step: "Step") -> Anomaly | None:
        """Add the metrics of a step. Return the anomaly that this step reveals, or None."""
        if was_skipped(step):
            return self._leave_out(step)
        if step.skipped:  # the loss scale was too large, and adjusts itself
            return None
        self._left_out = 0
        if not math.isfinite(step.update_norm):  # the parameters are not finite any more
            why = f"update norm {step.update_norm:g} at step {step.step}"
            return Anomaly(self.since or step.step, step.step, why, {"update_norm": {"value": step.update_norm}})
        numbers: dict[str, dict[str, float]] = {}
        for name, value in (("loss", step.loss), ("grad_norm", step.grad_norm), ("update_norm", step.update_norm)):
            unit = step.lr if name == "update_norm" else 1.0
            if name == "loss":
                middle, deviations = self.watches[name].add(step.step, value)
            elif value > 0 and unit > 0:
                middle, deviations = self.watches[name].add(step.step, math.log(value / unit))
                middle = math.exp(middle) * unit
            else:
                continue
            found = {"value": value, "median": middle, "deviations": deviations, "sum": self.watches[name].total}
            numbers[name] = {key: float(f"{number:.6g}") for key, number in found.items()}
        if self.skipping:
            loss, grad_norm = self.watches["loss"], self.watches["grad_norm"]
            if loss.ready and grad_norm.ready:
                tops = [middle + OUTSTANDING * spread for middle, spread in (loss.usual(), grad_norm.usual())]
                limits = Limits(tops[0], math.exp(tops[1]))
                self._limits = [*self._limits[-2:], (step.step + 2, limits)]
            return None
        certain = [name for name in numbers if self.watches[name].total >= LIMIT]
        if not certain:
            return None
        onset = self.since
        assert onset is not None
        moves = " and ".join(
            f"{TITLES[name]} {numbers[name]['deviations']:.1f} standard deviations above its median"
            for name in certain
        )
        was = numbers["loss"]
        why = f"{moves}, loss {was['median']:.2f} -> {was['value']:.2f} within {step.step - onset + 1} steps"
        return Anomaly(onset, step.step, why, numbers)

    def _leave_out(self, step: "Step") -> Anomaly | None:
        self._left_out += 1
        if self.skipping and self._left_out < PATIENCE:
            return None
        onset = step.step - self._left_out + 1
        why = f"loss {step.loss:g}, gradient norm {step.grad_norm:g} at step {step.step}"
        if self._left_out > 1:
            why = f"{self._left_out} steps in a row skipped, the last with {why}"
        numbers = {name: {"value": getattr(step, name)} for name in ("loss", "grad_norm")}
        return Anomaly(min(self.since or onset, onset), step.step, why, numbers)

    def limits(self, step: int) -> Limits:
        """Return the limits of the loss and the gradient norm for ``step``, from the metrics up to ``step - 2``. They
        are infinite at the start of a run, and with :attr:`skipping` False."""
        return next((limits for first, limits in reversed(self._limits) if first <= step), Limits())

    def state_dict(self) -> dict[str, Any]:
        return {
            "watches": {name: asdict(watch) for name, watch in self.watches.items()},
            "left_out": self._left_out,
            "limits": [[step, limits.loss, limits.grad_norm] for step, limits in self._limits],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.watches = {name: QuantityMonitor(**watch) for name, watch in state["watches"].items()}
        self._left_out = state["left_out"]
        self._limits = [(step, Limits(loss, grad_norm)) for step, loss, grad_norm in state["limits"]]


def was_skipped(step: "Step") -> bool:
    """Return whether a step was skipped. Skips that only the fp16 loss scale caused do not count."""
    return step.skipped and (step.diverged or math.isfinite(step.grad_norm))


def rollback(
    rewinds: Sequence[Rewind], anomaly: Anomaly, batches: BatchSchedule, stability: Stability, oldest_tokens: int
) -> Rewind:
    """Return the rewind to make after an anomaly. ``rewinds`` are the earlier rewinds of the run.

    Attempt 1 returns to the state before the n suspicious steps, and skips their data and the data of the next n
    steps. Each time the same anomaly comes again, the next attempt returns further. With m = 4^(k - 1), attempt k

    - returns to (m - 1) x n steps before the suspicious steps, but not beyond ``oldest_tokens``, the token count of
      the oldest checkpoint;
    - skips all data from there to m x n steps after the suspicious steps.
    """
    last = rewinds[-1] if rewinds else None
    again = last is not None and last.attempt > 0 and anomaly.onset <= last.found_step + WINDOW  # the same anomaly
    attempt = last.attempt + 1 if last is not None and again else 1
    steps, wider = anomaly.step - anomaly.onset + 1, 4 ** (attempt - 1)
    first = max(anomaly.onset - 1 - steps * (wider - 1), 0)
    to_tokens = max(batches.tokens_at_step(first), oldest_tokens)
    found_tokens = batches.tokens_at_step(anomaly.step)
    return Rewind(
        to_tokens=to_tokens,
        skip_from=position(rewinds, to_tokens),
        skip_to=position(rewinds, found_tokens) + steps * wider * batches.batch_at(found_tokens),
        lr=stability.rollback_lr,
        lr_tokens=stability.rollback_lr_tokens or 0,
        attempt=attempt,
        found_step=anomaly.step,
    )


def oldest_checkpoint(
    rewinds: Sequence[Rewind], anomaly: Anomaly, batches: BatchSchedule, stability: Stability, every_tokens: int
) -> int:
    """Return the token count of the oldest scheduled checkpoint that exists when ``anomaly`` is found. The disk is
    not read, because it may have damaged checkpoints, and checkpoints outside the schedule."""

    def kept(there: list[int], step: int, good_tokens: int) -> list[int]:
        """Return the token counts of the checkpoints that exist when ``step`` reveals an anomaly, which began after
        ``good_tokens``. ``there`` has those that the previous rewind kept."""
        reached = batches.tokens_at_step(step - 1)
        thresholds = range((there[-1] // every_tokens + 1) * every_tokens, reached + 1, every_tokens)
        due = [batches.tokens_at_step(batches.first_step_at(threshold)) for threshold in thresholds]
        due = first_in_each_interval([*there, *(tokens for tokens in due if tokens <= reached)], every_tokens)
        return checkpoints_to_keep(due, good_tokens, stability.keep, stability.keep_every_tokens)

    there = [0]
    for rewind in rewinds:
        if rewind.attempt:
            there = kept(there, rewind.found_step, rewind.to_tokens)
            there = [tokens for tokens in there if tokens <= rewind.to_tokens]
        else:
            there = [rewind.to_tokens]
    return kept(there, anomaly.step, batches.tokens_at_step(anomaly.onset - 1))[0]


class SpikeGuard(Callback):
    """Skips outlier steps, rolls back to a checkpoint, or stops the run, depending on ``on_spike``."""

    def __init__(self, trainer: "RunTrainer") -> None:
        self.trainer, self.training = trainer, trainer.training
        self.detector: SpikeDetector | None = None

    def before_step(self) -> None:
        self.training.limits = self.detector.limits(self.training.progress.step + 1) if self.detector else Limits()

    def after_step(self, step: "Step") -> None:
        if self.detector is None:
            return
        anomaly = self.detector.observe(step)
        if anomaly is not None:
            self.trainer.loop.rewound()
            self._respond(anomaly)
        elif was_skipped(step):
            values = {key: getattr(step, key) for key in ("step", "tokens", "loss", "grad_norm")}
            self.trainer.event("skip", **values, limits=asdict(self.detector.limits(step.step)))

    @property
    def good_tokens(self) -> int:
        """The number of tokens trained before the first suspicious step, or until now if no step is suspicious."""
        since = self.detector.since if self.detector else None
        return self.training.tokens if since is None else self.training.recipe.batches.tokens_at_step(since - 1)

    def state(self) -> dict[str, Any]:
        return {"guard": self.detector.state_dict()} if self.detector else {}

    def restore(self, state: Mapping[str, Any]) -> None:
        on_spike = self.training.recipe.stability.on_spike
        self.detector = None if on_spike == "off" else SpikeDetector(skipping=on_spike == "skip")
        if self.detector and "guard" in state:
            self.detector.load_state_dict(state["guard"])

    def _respond(self, anomaly: Anomaly) -> None:
        trainer, recipe, rewinds = self.trainer, self.training.recipe, self.training.rewinds
        stability = recipe.stability
        trainer.checkpoints.log_outcome(wait=True)
        values: dict[str, Any] = {"step": anomaly.step, "tokens": recipe.batches.tokens_at_step(anomaly.step)}
        values |= {"why": anomaly.why, "onset": anomaly.onset, "numbers": anomaly.numbers}
        if stability.on_spike != "rollback":
            trainer.fail(values)
        oldest = oldest_checkpoint(rewinds, anomaly, recipe.batches, stability, trainer.checkpoints.every_tokens)
        rewind = rollback(rewinds, anomaly, recipe.batches, stability, oldest)
        if rewind.attempt > stability.max_rollbacks:
            trainer.fail(values | {"why": f"{anomaly.why}; {stability.max_rollbacks} rollbacks did not help"})
        trainer.roll_back(rewind, values | rewind.document() | {"attempts": stability.max_rollbacks})
