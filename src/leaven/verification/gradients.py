"""The gradient check: does eps scale with the gradients, and does weight decay keep its effect?

An exponent below is the slope of a log2 quantity over the log2 width or depth of the model.

AdamW divides by ``sqrt(v) + eps``, so the effect of eps is the same at every scale if eps scales like the gradient.
For each group of parameters, the measured exponent of the gradient's RMS must equal the exponent of eps in the
optimizer. The coordinate check cannot test this while eps is small. In large models the gradients are smaller, and
eps matters first in the embedding and the hidden weights (Everett et al. 2024, arXiv 2407.05872).

PyTorch's AdamW shrinks a weight by the share lr x weight_decay in each step. If a rule lowers the lr with the width
and does not change the weight decay, this share vanishes in wide models. No check of activations shows this within a
few steps. So this check requires that the exponent of lr x weight_decay is 0.
:mod:`leaven.verification.invariants` checks everything that follows from the optimizer's settings alone, also over
batch and duration.

Every parameter must change in training. Gains and biases must change by the same amount at every scale, because Adam
changes each entry by about the lr in a step.

If all heads share the gain of a query or key norm, the gain's gradient is a sum over heads. At the start, the terms
of the sum have independent signs. After about 150 steps the terms are coherent, and the measured exponent is 0, which
is also the exponent of the gain's eps. So these gains are judged over width only if the check has at least 150 steps.

If alpha (the rule multiplies a branch by L^-alpha, where L is the depth) is below 1, two quantities may fall with the
depth by up to L^(alpha-1). The first is lr x decay, because the lr inside blocks falls and the published rules do not
change the decay (the option ``scale_decay_with_depth`` raises it). The second is the gradients inside blocks after
some steps. The gradient of a gain is in part proportional to what the block has learnt, and this falls with the lr.
At alpha = 1/2 the exponent of eps is -0.50, and the measured exponent of the pre-MLP gain was -0.59 on text and -0.90
on a Markov chain that is learnt quickly.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from leaven.documents.checks import VerdictRow
from leaven.model.kernels import widened
from leaven.training.loop import Callback, Loop, PlainTraining, StepResult
from leaven.verification.invariants import invariants
from leaven.verification.model_instance import ModelInstance
from leaven.verification.size_check import SizeAxis, SizeCheck
from leaven.verification.small_models import CheckStart

START_LIMIT, END_LIMIT = 0.15, 0.25
"""The limits on the difference between the exponent of the gradient and that of eps, at the start and at the end.

Right rules at widths 64 to 512 and depths 2 to 32 differed by at most 0.14 at the start. The limit at the end is
larger, because by then models of different width have learnt different amounts and the slopes drift: after 20 steps a
slope was -0.77 where the rule has -1.
"""

COHERENT_STEPS = 150
WARMUP_STEPS = 20


@dataclass(frozen=True)
class GradientRecord:
    """What a run measures of all parameters that share a label."""

    start: float  # RMS of the gradient at the first step
    end: float  # RMS of the gradient over the last quarter of the steps
    moved: float  # RMS of the change from the first step to the last
    eps: float
    decay: float  # lr x weight_decay, the share by which a weight shrinks in a step
    shape: tuple[int, ...]  # of one layer's parameter
    layers: int


@dataclass(frozen=True)
class GradientCheck(SizeCheck[GradientRecord]):
    """The gradient check, which the top of this file explains."""

    steps: int = 20
    lr_factor: float = 0.125
    """The check trains with this fraction of the family's lr, so that the gradients of the models stay comparable. At
    the full lr, without a schedule, the slopes of gains scatter by 0.3 after 20 steps. With 1/16 to 1/4 of the lr,
    the slopes stay within the limits."""

    name = "gradients"
    quantity = "slope of log2 gradient RMS over log2 size, less that of eps"
    parts = ("start", "end", "eps", "decay", "moved")
    drawn = ("start", "end", "eps")
    start = CheckStart(hidden=0.5, residual=1.0)
    """The initial values of the small models. Hidden weights start with a std of half of 1/sqrt(width). The branches
    of a few blocks are then small compared with the embedding, as they are in deep models. So gradients inside blocks
    already show the right exponent of depth from depth 2 on."""

    def exact_rows(self) -> Sequence[VerdictRow]:
        return invariants(self.family, self.widths, self.depths)

    def record(self, instance: ModelInstance) -> dict[str, GradientRecord]:
        """Train a model with a warm-up, on a new batch in each step. Return its gradients at the start and the end.

        Gradients at the end are averaged over the last quarter of the steps, because a gain has few entries and its
        gradient on one batch is noisy.
        """
        instance.scale_lr(self.lr_factor)
        before = {name: parameter.detach().clone() for name, parameter in instance.model.named_parameters()}
        groups = instance.optimizer.param_groups
        settings = {
            parameter: (group.get("eps", 0.0), group["lr"] * group.get("weight_decay", 0.0))
            for group in groups
            for parameter in group["params"]
        }
        recorder = _GradientRecorder(instance, self.steps)
        # The loop counts tokens: a batch is one here.
        training = PlainTraining(instance.optimizer, instance.loss, 1, self.steps, lambda n: min(n / WARMUP_STEPS, 1))
        Loop(training, [recorder]).run()
        instance.optimizer.zero_grad(set_to_none=True)
        instance.loss(self.steps).backward()  # type: ignore[no-untyped-call]
        recorder.take(self.steps)
        moved = _rms(instance, lambda name, parameter: parameter.detach() - before[name])
        records: dict[str, GradientRecord] = {}
        for name, parameter in instance.model.named_parameters():
            label = instance.label(name)
            if label is not None and label in recorder.first:
                layers = records[label].layers + 1 if label in records else 1
                eps, decay = settings[parameter]
                late = [gradient[label] for gradient in recorder.late]
                end = math.sqrt(sum(value**2 for value in late) / len(late))
                records[label] = GradientRecord(
                    recorder.first[label], end, moved[label], eps, decay, tuple(parameter.shape), layers
                )
        return records

    def value(self, measured: GradientRecord, part: str, axis: SizeAxis) -> float:
        value: float = getattr(measured, part)
        return value

    def judge(
        self,
        axis: SizeAxis,
        module: str,
        lines: Sequence[Sequence[GradientRecord]],
        means: Mapping[str, Sequence[float]],
        slopes: Mapping[str, float | None],
    ) -> VerdictRow:
        row = partial(VerdictRow, module=module, axis=axis.title, parts=dict(slopes))
        records = [record for seeds in lines for record in seeds]
        start, end, eps, decay, moved = (slopes[part] for part in self.parts)
        if still := _standstill(records):
            return row(slope=None, limit=START_LIMIT, passed=False, note=still, beyond=math.inf)
        if eps is None:
            return row(slope=None, limit=None, passed=None, note="no eps")
        if not all(math.isfinite(record.end) for record in records):
            note = "not finite: lower the lr?"
            return row(slope=None, limit=START_LIMIT, passed=False, note=note, beyond=math.inf)
        inside = lines[-1][0].layers > 1
        shared = axis.name == "width" and lines[0][0].layers > 1 and len({seeds[0].shape for seeds in lines}) == 1
        lower = (
            self.family.alpha - 1 if axis.name == "depth" else 0.0
        )  # the lowest exponent, see the top of this file
        judged = []  # how far beyond its limit, value, limit, what it is
        if start is not None and not shared:
            judged.append((abs(start - eps) - START_LIMIT, start - eps, START_LIMIT, "eps"))
        if end is not None and (not shared or self.steps >= COHERENT_STEPS):
            limit, gap = START_LIMIT if shared else END_LIMIT, end - eps
            judged.append((max(gap, lower * inside - gap) - limit, gap, limit, "eps"))
        if decay is not None:
            judged.append((max(decay, lower - decay) - START_LIMIT, decay, START_LIMIT, "decay"))
        if moved is not None and all(len(seeds[0].shape) < 2 for seeds in lines):
            # A gain or bias changes by its lr in a step, whatever its gradient, so by the same amount at every scale.
            judged.append((max(moved, lower * inside - moved) - END_LIMIT, moved, END_LIMIT, "gain"))
        if not judged:
            note = f"shared by all heads: judged from {COHERENT_STEPS} steps on" if shared else "always 0"
            return row(slope=None, limit=None, passed=None, note=note)
        beyond, value, limit, what = max(judged)
        if beyond <= 0:
            return row(slope=value, limit=limit, passed=True)
        return row(slope=value, limit=limit, passed=False, note=_note(axis.name, value, what), beyond=beyond)


class _GradientRecorder(Callback):
    """A callback that keeps the RMS of each gradient in the first step, and in each step of the last quarter of
    ``steps``."""

    def __init__(self, instance: ModelInstance, steps: int) -> None:
        self._instance, self._steps = instance, steps
        self.first: dict[str, float] = {}
        self.late: list[dict[str, float]] = []

    def after_step(self, step: StepResult) -> None:
        self.take(step.step - 1)

    def take(self, number: int) -> None:
        """Keep the RMS of the current gradients if the step ``number``, counted from 0, is one of the steps to
        keep."""
        late = number >= self._steps - self._steps // 4
        if number == 0 or late:
            found = _rms(self._instance, lambda name, parameter: parameter.grad)
            self.first = self.first if number else found
            self.late += [found] if late else []


def _rms(instance: ModelInstance, of: Callable[[str, Tensor], Tensor | None]) -> dict[str, float]:
    """Return a mapping from each label to the RMS of ``of(name, parameter)`` over all entries of all layers.

    A parameter is left out if ``of`` returns None for it.
    """
    sums: dict[str, tuple[float, int]] = {}
    for name, parameter in instance.model.named_parameters():
        label, values = instance.label(name), of(name, parameter)
        if label is not None and values is not None:
            total, count = sums.get(label, (0.0, 0))
            sums[label] = (total + float(widened(values).square().sum()), count + values.numel())
    return {label: math.sqrt(total / count) for label, (total, count) in sums.items()}


def _standstill(records: Sequence[GradientRecord]) -> str:
    """Return the reason why no slope can be judged, or "" if a slope can be judged.

    No slope can be judged if a parameter never changes, or if a quantity is 0 at some sizes only.
    """
    if not all(record.moved for record in records):
        return "never changes  <- an lr of 0, or no gradient within these steps?"
    named = {"start": "the first gradient", "end": "the gradient", "decay": "lr x decay", "eps": "eps"}
    for name, what in named.items():
        values = [getattr(record, name) for record in records]
        if any(values) and not all(values):
            return f"{what} is 0 at some sizes only"
    return ""


def _note(axis: str, value: float, what: str) -> str:
    if what == "gain":
        return f"its change {'SHRINKS' if value < 0 else 'GROWS'} with {axis}  <- lr of a gain changed with {axis}?"
    if what == "decay":
        change = "FALLS" if value < 0 else "GROWS"
        return f"lr x decay {change} with {axis}  <- only one of lr and decay changed?"
    return f"eps {'GROWS' if value < 0 else 'FALLS'} against the gradient with {axis}"
