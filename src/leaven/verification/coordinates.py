"""The coordinate check: do activations, and their changes in training, keep their size as the model grows?

Yang et al. 2022 (Tensor Programs V, arXiv 2203.03466, appendix D.1) and the ``mup`` package record the size of every
module's output for a few steps at several widths, on one batch, with a larger lr than for training. The size should
not depend on the width. Dey et al. 2025 (CompleteP, arXiv 2505.01618) do the same over depth. This check also judges
the *change* of the output since the first step. A wrong lr shows in the change at once, while the output is still
mostly its initial value.

Two quantities may fall as the square root of the size without an error in the rule, because they are sums of terms
with independent signs.

- Over width: outputs of fixed size computed from a wide input. They are the logits, and query . key divided by a
  growing head dimension. Under muP their initial part falls as N^-1/2; training adds a part of order 1, which takes
  over.
- Over depth: the residual stream. The sum of L branches at L^-alpha falls as L^(1/2 - alpha), until almost only the
  embedding is left. Modules read the stream through a norm, so their outputs have to be flat.

Attention logits with a growing head dimension *have* to fall at the start: query . key / sqrt(d) is flat only as long
as queries and keys are independent, and grows as sqrt(d) once training has aligned them. The growth takes more steps
than a check has (measured after 40 steps: +0.1), so the check requires the fall at the start.

Below alpha = 1 the rule lowers the lr inside blocks as L^(alpha-1), and so the matrices of a block learn less. For
that reason only the outputs of these matrices may fall. The output of a norm has to be flat, because it passes on
what the stream has learnt.

Over depth, outputs are compared at the same relative depth: modules inside blocks in the middle block, the stream
after the last block. A mean over blocks would give the first block, whose input is still the embedding, a weight of
one half at depth 2 and of one sixteenth at depth 16, and bias every slope by +0.15; a mean of the two middle blocks
would bias it by +0.2.

The check cannot see faults in weight decay, in eps far below the gradient or in clipping, a readout that learns too
slowly, or anything that needs many steps.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from leaven.documents.checks import VerdictRow
from leaven.model.kernels import widened
from leaven.training.loop import Callback, Loop, PlainTraining, StepResult
from leaven.verification.activation_recorder import LOGITS, ActivationRecorder
from leaven.verification.model_instance import ModelInstance, RunScale
from leaven.verification.size_check import SizeAxis, SizeCheck
from leaven.verification.small_models import CheckStart

STEPS = 3

LIMITS = {
    "width": {"start": 0.15, "early": 0.15, "late": 0.20},
    "depth": {"start": 0.15, "early": 0.20, "late": 0.30},
}
"""Limits on |slope| of log2 over log2: of the initial output (start), and of the change after up to ``STEPS`` steps
(early) or more (late). A wrong power of width or depth is 0.5 or 1; planted faults show as 0.33 or more. Right rules
measured (docs/log.md: a dozen
recipes on text, widths 64 to 512, depths 2 to 16, three seeds) at most 0.09 in width and 0.08 (start) and 0.19
(early) in depth; growing heads 0.12 in width at the start, for falling logits attend more evenly. Neither more
seeds nor larger sizes reduce the rest: a part of what a block adds is independent of the other blocks, and falls as
L^-1/2.

After more steps (sooner for a higher lr) shallow models fit the batch through their attention. The slope of the
attention's output over depth then falls to as low as -0.46 for some steps (step 5 at lr 0.008), and returns to 0.
"""

INDEPENDENT = -0.5
"""The slope over n of a mean of n independent terms."""


@dataclass(frozen=True)
class ActivationRecord:
    """The outputs, in one run, of all modules that share a label."""

    squares: dict[str, tuple[float, ...]]  # mean square of each call, by quantity
    features: int  # size of the last dimension, or the head dimension behind attention logits
    container: bool
    matrix: bool  # whether the module itself owns a matrix
    trained: bool  # whether the output requires a gradient
    stuck: bool  # whether a weight of the module is trained and did not change at all

    def rms(self, quantity: str, axis: str) -> float:
        """Return the RMS over all calls for the width axis, or the RMS of the call at the reference depth for the
        depth axis."""
        values = self.squares[quantity]
        if axis == "depth":
            values = (values[-1 if self.container else len(values) // 2],)
        return math.sqrt(sum(values) / len(values))


@dataclass(frozen=True)
class CoordinateCheck(SizeCheck[ActivationRecord]):
    """The coordinate check. See the top of the file."""

    steps: int = STEPS

    name = "coordinates"
    quantity = "slope of log2 output RMS over log2 size"
    parts = drawn = ("start", "end", "change")
    start = CheckStart(hidden=1.0, residual=0.5)
    """Hidden weights start at 1/sqrt(fan in). With smaller weights, a module's output changes mostly because the
    module's own weights change, and their alignment with the input still falls at these widths (slope -0.13 from 64
    to 256). Residual branches start at half. Whole branches are as large as the embedding at depth 2, and modules
    between them change by 2^0.25 less than at depth 4. With smaller branches, outputs again change mostly because of
    the module's own weights (slope -0.11 over width, for branches at a quarter)."""

    def axes(self) -> tuple[SizeAxis, ...]:
        """Return the axes, and width at the largest depth, because a rule may fail only where both grow."""
        axes = super().axes()
        if len(axes) < 2:
            return axes
        far = tuple(RunScale(width, max(self.depths)) for width in (min(self.widths), max(self.widths)))
        return (*axes, SizeAxis("width", far, f" at depth {max(self.depths)}"))

    def record(self, instance: ModelInstance) -> dict[str, ActivationRecord]:
        """Train an instance for some steps on its first batch and return its outputs before and after."""
        instance.scale_lr(self.lr_factor)
        trained = {name: weight for name, weight in instance.model.named_parameters() if weight.requires_grad}
        before = {name: weight.detach().clone() for name, weight in trained.items()}
        with ActivationRecorder(instance.model, instance.label) as recorder:
            outputs = _FirstOutputs(recorder)
            Loop(PlainTraining(instance.optimizer, lambda _: instance.loss(0), 1, self.steps), [outputs]).run()
            instance.loss(0)
            last = recorder.take()
        stuck = {instance.label(name) for name, weight in trained.items() if torch.equal(weight, before[name])}
        return {
            name: ActivationRecord(
                {"start": _squares(first), "end": _squares(last[name]), "change": _squares(last[name] - first)},
                features=recorder.head_sizes.get(name, first.shape[-1]),
                container=name in recorder.containers,
                matrix=name in recorder.matrices,
                trained=name in recorder.trained,
                stuck=name in stuck,
            )
            for name, first in outputs.first.items()
        }

    def value(self, measured: ActivationRecord, part: str, axis: SizeAxis) -> float:
        return measured.rms(part, axis.name)

    def judge(
        self,
        axis: SizeAxis,
        module: str,
        lines: Sequence[Sequence[ActivationRecord]],
        means: Mapping[str, Sequence[float]],
        slopes: Mapping[str, float | None],
    ) -> VerdictRow:
        row = partial(VerdictRow, module=module, axis=axis.title, parts=dict(slopes))
        trained = "early" if self.steps <= STEPS else "late"
        limits = {part: LIMITS[axis.name]["start" if part == "start" else trained] for part in self.parts}
        limit = limits["change"]
        if any(math.isnan(value) for values in means.values() for value in values):
            return row(slope=None, limit=limit, passed=False, note="not finite: lower the lr?", beyond=math.inf)
        if still := _standstill(means, [line for seeds in lines for line in seeds]):
            return row(slope=None, limit=limit, passed=False, note=still, beyond=math.inf)
        beyond = {}
        for part, value in slopes.items():
            if value is not None:
                low, high = _allowed(axis, module, [seeds[0] for seeds in lines], part, self.family.alpha)
                beyond[part] = max(value - high, low - value) - limits[part]
        if not beyond:
            return row(slope=None, limit=limit, passed=None, note="always 0")
        worst = max(beyond, key=lambda part: beyond[part])
        if beyond[worst] <= 0:
            return row(slope=slopes["change"], limit=limit, passed=True)
        note = _note(axis.name, module, slopes[worst] or 0.0, self.family.rule is None)
        return row(slope=slopes[worst], limit=limits[worst], passed=False, note=note, beyond=beyond[worst])


class _FirstOutputs(Callback[StepResult]):
    """A callback that keeps the outputs of the first forward."""

    def __init__(self, recorder: ActivationRecorder) -> None:
        self._recorder = recorder
        self.first: dict[str, Tensor] = {}

    def after_step(self, step: StepResult) -> None:
        outputs = self._recorder.take()
        self.first = self.first or outputs


def _squares(calls: Tensor) -> tuple[float, ...]:
    values: list[float] = widened(calls).square().mean((1, 2)).tolist()
    return tuple(values)


def _standstill(means: Mapping[str, Sequence[float]], lines: Sequence[ActivationRecord]) -> str:
    """Return why no slope can be judged: the output never changes, or is 0 at some sizes. Return "" if one can be
    judged."""
    if any(line.stuck for line in lines):
        return "its weights never change  <- an lr of 0, or no gradient within these steps?"
    if any(line.trained for line in lines) and not any(means["change"]):
        return "never changes  <- an lr of 0, or no gradient within these steps?"
    gone = [q for q, values in means.items() if 0 in values and any(values)]
    return f"{gone[0]} is 0 at some sizes only" if gone else ""


def _allowed(
    axis: SizeAxis, module: str, lines: Sequence[ActivationRecord], quantity: str, alpha: float
) -> tuple[float, float]:
    """Return the lowest and highest slope that the theory at the top of this file allows."""
    if axis.name == "width":
        # Attention logits are sums over the head dimension, so they only fall if it grows.
        logits = module.endswith(LOGITS)
        sums = (len({line.features for line in lines}) == 1) != logits
        return INDEPENDENT * sums, INDEPENDENT * (sums and logits and quantity == "start")
    inside = len(lines[-1].squares["start"]) > 1
    if inside and lines[-1].container:
        return INDEPENDENT, 0.0
    return (alpha - 1) * (inside and lines[-1].matrix and quantity != "start"), 0.0


def _note(axis: str, module: str, value: float, foreign: bool) -> str:
    """Return the usual cause of a slope ``value``. ``foreign``: the model is a factory's, with its initial values."""
    if value < 0:
        hint = "scaled twice?"
        if axis == "depth":
            hint = "branches scaled twice" + (", by an init of 1/sqrt(2L) as well?" if foreign else "?")
        return f"SHRINKS with {axis}  <- {hint}"
    if axis == "depth":
        hint = "branches not multiplied by depth^-alpha?"
    elif module.endswith(LOGITS):
        hint = "query . key divided by sqrt(d) while d grows?"
    else:
        hint = "lr or init not divided by width?"
    return f"GROWS with {axis}  <- {hint}"
