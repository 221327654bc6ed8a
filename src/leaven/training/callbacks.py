"""What a run does beside its steps: log, metrics, validation, checkpoints, spike guard, as callbacks of its loop."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from statistics import median
from typing import TYPE_CHECKING, Any

from leaven.planning.memory import GIB
from leaven.training.checkpoint_manager import CheckpointManager
from leaven.training.loop import Callback
from leaven.training.metrics import Curves
from leaven.training.rewind import oldest_checkpoint, rollback
from leaven.training.spikes import Anomaly, Limits, SpikeDetector, left_out
from leaven.training.step import Step
from leaven.training.throughput import peak_memory, time_fixed_work

if TYPE_CHECKING:
    from leaven.training.session import Session


class RunCallback(Callback[Step]):
    """A callback of a run in a folder."""

    def __init__(self, session: "Session") -> None:
        self.session, self.training = session, session.training


class OnStep(RunCallback):
    """Calls a function with each step."""

    def __init__(self, session: "Session", function: Callable[[Step], None]) -> None:
        super().__init__(session)
        self._function = function

    def after_step(self, step: Step) -> None:
        self._function(step)


class Announcements(RunCallback):
    """Tells the other processes which step is next, and the log when the batch grows."""

    batch_tokens = 0

    def before_step(self) -> None:
        if self.training.next_batch_tokens != self.batch_tokens:
            self.batch_tokens = self.training.next_batch_tokens
            self.session.event("ramp", **self.batch())
        self.session.group.heartbeat(f"in step {self.training.progress.step + 1}")

    def batch(self) -> dict[str, int]:
        """The batch now, in tokens, and the sequences of a forward."""
        size, _ = self.training.forwards(self.batch_tokens // self.training.recipe.model.seq_len)
        return {"batch_tokens": self.batch_tokens, "micro_batch": size}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.batch_tokens = self.training.next_batch_tokens


class MetricsWriter(RunCallback):
    """Writes metrics.jsonl, and curves for TensorBoard, W&B or trackio."""

    def __init__(self, session: "Session", writers: Sequence[str]) -> None:
        super().__init__(session)
        self._writers = writers if session.group.is_first else ()
        self._curves: Curves | None = None

    def after_step(self, step: Step) -> None:
        line = asdict(step)
        if self.training.noise is None:
            del line["noise_scale"]
        self.session.run.record(line)
        if self._curves:
            self._curves.step(step)

    def validation(self, values: dict[str, float | None]) -> None:
        if self._curves:
            self._curves.validation(self.training.progress.step, self.training.tokens, values)

    def restore(self, state: Mapping[str, Any]) -> None:
        run, training = self.session.run, self.training
        run.rewind(training.progress.step)
        self.close()
        self._curves = Curves(self._writers, run.path, training.recipe, training.tokens, lost=self._lost)

    def close(self) -> None:
        if self._curves:
            self._curves.close()

    def _lost(self, writer: str, why: str) -> None:
        self.session.event("curves_lost", writer=writer, why=why)


class Validation(RunCallback):
    """Validates every so many tokens, and compares the processes of a run with each other."""

    def __init__(self, session: "Session", bits_per_byte_factor: float | None) -> None:
        super().__init__(session)
        recipe = self.training.recipe
        self._every = recipe.evaluation.every_tokens or max(recipe.data.tokens // 10, 1)
        self._bits_per_byte_factor = bits_per_byte_factor
        self.owed = False  # a stop may have come in the middle of a validation

    def is_due(self, before: int, after: int) -> bool:
        return after // self._every > before // self._every

    def on_due(self) -> None:
        self.evaluate()

    def evaluate(self) -> dict[str, Any]:
        """The loss in nats per token and in bits per byte."""
        session, training, factor = self.session, self.training, self._bits_per_byte_factor
        session.group.heartbeat(f"in the validation after step {training.progress.step}")
        self.owed = True
        loss = training.evaluate()
        self.owed = False
        values = {"loss": loss, "bits_per_byte": loss * factor if factor else None}
        session.event("validation", **values)
        if session.group.size > 1:
            self._compare_processes()
        session.metrics.validation(values)
        return values

    def state(self) -> dict[str, Any]:
        return {"owes_validation": True} if self.owed and not self.training.finished else {}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.owed = state.get("owes_validation", False)

    def _compare_processes(self) -> None:
        """Log which process is slowest at the same work, and which holds most: all wait for the slowest."""
        device = self.training.device
        of_ranks = self.session.group.all_gather([time_fixed_work(device), peak_memory(device) / GIB])
        seconds, memory = zip(*of_ranks, strict=True)
        slowest, fullest = seconds.index(max(seconds)), memory.index(max(memory))
        ratio = max(seconds) / median(seconds)
        self.session.profile.fullest(max(memory))
        self.session.event("ranks", slowest=slowest, times_the_median=ratio, fullest=fullest, memory_gib=max(memory))


class Checkpoints(RunCallback):
    """Saves a checkpoint every so many tokens, while the training goes on."""

    def __init__(self, session: "Session") -> None:
        super().__init__(session)
        recipe, stability = self.training.recipe, self.training.recipe.stability
        self.every_tokens = stability.checkpoint_every_tokens or max(recipe.data.tokens // 10, 1)
        self._keeper = CheckpointManager(
            session.run.checkpoints,
            self.every_tokens,
            stability.keep,
            stability.keep_every_tokens,
            group=session.group,
        )
        self._saved_step = -1

    def after_step(self, step: Step) -> None:
        self.written(wait=False)

    def is_due(self, before: int, after: int) -> bool:
        return after // self.every_tokens > before // self.every_tokens

    def on_due(self) -> None:
        self.save()

    def save(self) -> None:
        """Begin to write a checkpoint."""
        self.written(wait=True)
        training = self.training
        state = {key: value for each in self.session.callbacks for key, value in each.state().items()}
        checkpoint = replace(training.checkpoint(), state=state, rewinds=self.session.rewinds)
        self._keeper.save(checkpoint, self.session.good_tokens)
        self._saved_step = training.progress.step

    def save_last(self) -> str | None:
        """Write where the run is, unless that is saved; why it could not be."""
        self.written(wait=True)  # all processes come to the same: each has heard what became of it
        if self.training.progress.step != self._saved_step:
            self.save()
        return self.written(wait=True)

    def written(self, wait: bool) -> str | None:
        """Log what became of the last checkpoint, once; why it is not there."""
        saved = self._keeper.outcome(wait)
        if saved is None:
            return None
        at = {"step": saved.progress.step, "tokens": saved.progress.tokens}
        if saved.path is not None:
            self.session.event("checkpoint", **at, path=saved.path.name)
            self.session.profile.write()
        else:
            self._saved_step = -1
            self.session.event("checkpoint_failed", **at, why=saved.error)
        return saved.error

    def restore(self, state: Mapping[str, Any]) -> None:
        self._keeper.clear(self.training.tokens, self.session.damaged)
        self._saved_step = self.training.progress.step

    def close(self) -> None:
        self._keeper.close()


class SpikeGuard(RunCallback):
    """Skips outstanding steps, or takes the run back to a checkpoint, as ``on_spike`` says."""

    def __init__(self, session: "Session") -> None:
        super().__init__(session)
        self.guard: SpikeDetector | None = None

    def before_step(self) -> None:
        self.training.limits = self.guard.limits(self.training.progress.step + 1) if self.guard else Limits()

    def after_step(self, step: Step) -> None:
        if self.guard is None:
            return
        anomaly = self.guard.observe(step)
        if anomaly is not None:
            self.session.loop.discard()
            self._respond(anomaly)
        elif left_out(step):
            told = {key: getattr(step, key) for key in ("step", "tokens", "loss", "grad_norm")}
            self.session.event("skip", **told, limits=asdict(self.guard.limits(step.step)))

    def state(self) -> dict[str, Any]:
        return {"guard": self.guard.state_dict()} if self.guard else {}

    def restore(self, state: Mapping[str, Any]) -> None:
        on_spike = self.training.recipe.stability.on_spike
        self.guard = None if on_spike == "off" else SpikeDetector(skipping=on_spike == "skip")
        if self.guard and "guard" in state:
            self.guard.load_state_dict(state["guard"])

    def _respond(self, anomaly: Anomaly) -> None:
        """Go back to a checkpoint, or end the run."""
        session, recipe = self.session, self.training.recipe
        session.checkpoints.written(wait=True)
        every = session.checkpoints.every_tokens
        oldest = oldest_checkpoint(session.rewinds, anomaly, recipe.batches, recipe.stability, every)
        rewind = rollback(session.rewinds, anomaly, recipe.batches, recipe.stability, oldest)
        tokens, limit = recipe.batches.tokens_at_step(anomaly.step), recipe.stability.max_rollbacks
        told: dict[str, Any] = {"step": anomaly.step, "tokens": tokens, "why": anomaly.why}
        told |= {"onset": anomaly.onset, "numbers": anomaly.numbers}
        if recipe.stability.on_spike != "rollback":
            session.fail(told)
        if rewind.attempt > limit:
            session.fail(told | {"why": f"{anomaly.why}; {limit} rollbacks did not pass it"})
        session.roll_back(rewind, told | asdict(rewind) | {"attempts": limit})
