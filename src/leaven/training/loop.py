"""The loop over optimizer steps, with callbacks before and after each step. It is used by runs, by trials (except
stacks of trials) and by the checks that train whole runs. `PlainTraining` is for models without a recipe.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from leaven.training.engine import Training


@dataclass(frozen=True)
class StepResult:
    """The result of one optimizer step of any torch model."""

    step: int  # number of the step, from 1
    tokens: int  # number of tokens trained, including this step
    loss: float  # mean over the batch, in nats per token
    batch_tokens: int  # number of tokens in the batch of this step

    @property
    def diverged(self) -> bool:
        return not math.isfinite(self.loss)


class Diverged(RuntimeError):
    """Raised when a run has diverged: for example, its loss is not finite, or has risen and does not fall again."""


def passes(every_tokens: int, before: int, after: int) -> bool:
    """Return whether a multiple of ``every_tokens`` is above ``before`` and not above ``after``."""
    return after // every_tokens > before // every_tokens


class Callback:
    """The base class of callbacks. The loop calls them in the order of its list. An exception ends the run."""

    every_tokens: int | None = None  # :meth:`on_due` is called at each multiple of this token count; None: never

    def before_step(self) -> None:
        """Called before each step. The result of the previous step may not have been read yet."""

    def after_step(self, step: Any) -> None:
        """Called with the result of each step, such as a :class:`leaven.training.metrics.Step`."""

    def on_due(self) -> None:
        """Called between two steps, when the trained tokens reach a multiple of :attr:`every_tokens`, and all earlier
        results have been passed to ``after_step``. Not called after the last step, or after a rewind."""

    def state(self) -> dict[str, Any]:
        """Return the JSON values that this callback saves in a checkpoint. No two callbacks may use the same key."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Prepare to resume. ``state`` has the state of all callbacks, and is empty at the start of a run."""

    def close(self) -> None:
        """Release resources. Called when training ends or stops, also after an error."""


class Loop:
    """Trains until the end of the run, and calls the callbacks. With ``lookahead``, each step starts before the
    result of the previous step is read, so that the device does not wait for the host."""

    def __init__(
        self, training: "Training | PlainTraining", callbacks: Sequence[Callback], *, lookahead: bool = False
    ) -> None:
        self._training, self._callbacks, self._lookahead = training, callbacks, lookahead
        self._unread: Callable[[], StepResult] | None = None  # waits for the step that was started last
        self._rewound = False  # whether a callback has rewound the run after the last step that was read

    def run(self, stop: Callable[[], bool] = lambda: False) -> bool:
        """Train until all steps are done, or until ``stop()`` returns true. Return whether all steps are done."""
        training = self._training
        # When all steps are done, read the result of the last one: a callback may rewind the run, which then goes on.
        while not stop() and (not training.finished or self.read()):
            before = training.tokens
            for callback in self._callbacks:
                callback.before_step()
            previous, self._unread = self._unread, training.issue()
            rewound = self._pass_on(previous) or (not self._lookahead and self.read())
            if not rewound and not training.finished:
                self._call_due(before, training.tokens)
        self.read()
        return training.finished

    def _call_due(self, before: int, after: int) -> None:
        """Call ``on_due`` of due callbacks, unless the last step's result rewinds the run."""
        due = [each for each in self._callbacks if each.every_tokens and passes(each.every_tokens, before, after)]
        if due and not self.read():
            for callback in due:
                callback.on_due()

    def read(self) -> bool:
        """Wait for the last step and pass its result to the callbacks, if this is not done yet. Return whether a
        callback rewound the run."""
        started, self._unread = self._unread, None
        return self._pass_on(started)

    def rewound(self) -> None:
        """Tell the loop that a callback rewinds the run. If the next step has already started, drop its result."""
        self._unread, self._rewound = None, True

    def _pass_on(self, started: Callable[[], StepResult] | None) -> bool:
        self._rewound = False
        if started is not None:
            step = started()
            for callback in self._callbacks:
                callback.after_step(step)
        return self._rewound


@dataclass
class PlainTraining:
    """Trains any model with a given loss and optimizer, without clipping. Gradients are kept until the next step."""

    optimizer: "Optimizer"
    loss: Callable[[int], "Tensor"]  # maps tokens trained to the mean loss of the next batch, a scalar
    batch_tokens: int
    end: int  # number of tokens of the whole run
    lr_multiplier: Callable[[int], float] = lambda tokens: 1.0  # maps tokens trained to the factor on all lrs
    tokens: int = 0  # number of tokens trained

    def __post_init__(self) -> None:
        self._peaks = [group["lr"] for group in self.optimizer.param_groups]

    @property
    def finished(self) -> bool:
        return self.tokens >= self.end

    def issue(self) -> Callable[[], StepResult]:
        """Take one optimizer step. Return a function that returns the result of the step."""
        loss = self.loss(self.tokens)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        self.tokens += self.batch_tokens
        for peak, group in zip(self._peaks, self.optimizer.param_groups, strict=True):
            group["lr"] = peak * self.lr_multiplier(self.tokens)
        self.optimizer.step()
        result = StepResult(self.tokens // self.batch_tokens, self.tokens, loss.item(), self.batch_tokens)
        return lambda: result
