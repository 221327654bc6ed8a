"""The training loop: optimizer steps with callbacks around them. It trains runs, trials of a study, and the models of
checks."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer


@dataclass(frozen=True)
class StepResult:
    """The result of an optimizer step of any model."""

    step: int  # from 1
    tokens: int  # consumed once the step is done
    loss: float  # nats per token
    batch_tokens: int

    @property
    def diverged(self) -> bool:
        """Whether the loss is not finite."""
        return not math.isfinite(self.loss)


class Diverged(RuntimeError):
    """The loss is not finite, or has risen and does not fall again."""


S_co = TypeVar("S_co", bound=StepResult, covariant=True)
S = TypeVar("S", bound=StepResult)
S_contra = TypeVar("S_contra", bound=StepResult, contravariant=True)


class Trainable(Protocol[S_co]):
    """What the loop can train: :class:`leaven.training.engine.Training`, or any class with these members."""

    @property
    def tokens(self) -> int:
        """The tokens trained so far."""
        ...

    @property
    def finished(self) -> bool: ...

    def issue(self) -> Callable[[], S_co]:
        """Start one optimizer step without waiting for it. Returns a function that waits and returns the result."""
        ...


class Callback(Generic[S_contra]):
    """Methods that the loop calls; override those that are needed. Callbacks are called in the order of the loop's
    list, and may raise to end the run."""

    def before_step(self) -> None:
        """Called before each step. The result of the previous step may not have been read yet."""

    def after_step(self, step: S_contra) -> None:
        """Called after each step, once its result has been read."""

    def is_due(self, before: int, after: int) -> bool:
        """Return whether to call :meth:`on_due` after a step from ``before`` to ``after`` tokens, unless it was the
        last one."""
        return False

    def on_due(self) -> None:
        """Called between two steps, once the results of all started steps have been read."""

    def state(self) -> dict[str, Any]:
        """Return the JSON values that this callback saves in a checkpoint. All callbacks share one namespace."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from the current position of the training. ``state`` has the values that all callbacks saved
        there; at the start it is empty."""

    def close(self) -> None:
        """Called at the end of the run, also after an error."""


class Loop(Generic[S]):
    """Trains to the end, with callbacks.

    With ``lookahead`` the result of a step is read after the next one has been started, so that the device never
    waits.
    """

    def __init__(self, training: Trainable[S], callbacks: Sequence[Callback[S]], *, lookahead: bool = False) -> None:
        self._training, self._callbacks, self._lookahead = training, callbacks, lookahead
        self._pending: Callable[[], S] | None = None
        self._discarded = False

    def run(self, stop: Callable[[], bool] = lambda: False) -> bool:
        """Train until done or stopped; returns whether it is done."""
        while not stop():
            if not self._training.finished:
                self._take_step()
            elif self.read():  # after the last step the run may roll back
                break
        self.read()
        return self._training.finished

    def _take_step(self) -> None:
        before = self._training.tokens
        for callback in self._callbacks:
            callback.before_step()
        done, self._pending = self._pending, self._training.issue()
        if not self._hand_over(done) or self._training.finished:
            return
        if not self._lookahead and not self.read():
            return
        due = [callback for callback in self._callbacks if callback.is_due(before, self._training.tokens)]
        if due and self.read():
            for callback in due:
                callback.on_due()

    def read(self) -> bool:
        """Wait for the pending step, if there is one, and hand it to the callbacks. Returns False if one of them has
        moved the run to another state."""
        done, self._pending = self._pending, None
        return self._hand_over(done)

    def _hand_over(self, done: Callable[[], S] | None) -> bool:
        """Wait for a step and hand it to the callbacks. Returns False if one of them has moved the run to another
        state, which drops the pending step."""
        self._discarded = False
        if done is not None:
            step = done()
            for callback in self._callbacks:
                callback.after_step(step)
        return not self._discarded

    def discard(self) -> None:
        """Drop the pending step: the run continues from another state."""
        self._pending, self._discarded = None, True


@dataclass
class PlainTraining:
    """Trains any model with a given loss and optimizer, without clipping. Gradients stay until the next step."""

    optimizer: "Optimizer"
    loss: Callable[[int], "Tensor"]  # mean loss of the batch after so many tokens, ()
    batch_tokens: int
    end: int  # tokens of the whole run
    lr_multiplier: Callable[[int], float] = lambda tokens: 1.0  # on every group's lr, by tokens trained
    tokens: int = 0

    def __post_init__(self) -> None:
        self._peaks = [group["lr"] for group in self.optimizer.param_groups]

    @property
    def finished(self) -> bool:
        return self.tokens >= self.end

    def issue(self) -> Callable[[], StepResult]:
        """Take one optimizer step. Returns a function that returns its result."""
        loss = self.loss(self.tokens)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        self.tokens += self.batch_tokens
        for peak, group in zip(self._peaks, self.optimizer.param_groups, strict=True):
            group["lr"] = peak * self.lr_multiplier(self.tokens)
        self.optimizer.step()
        result = StepResult(self.tokens // self.batch_tokens, self.tokens, loss.item(), self.batch_tokens)
        return lambda: result
