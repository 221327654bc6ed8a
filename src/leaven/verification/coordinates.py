"""The coordinate check: do activations, and their changes in training, keep their size as the model grows?

Yang et al. 2022 (Tensor Programs V, arXiv 2203.03466, appendix D.1) and the ``mup`` package train models of several
widths for a few steps on one batch, with a larger lr than in normal training. They record the RMS of every module's
output, which should not depend on the width. Dey et al. 2025 (CompleteP, arXiv 2505.01618) do the same over depth.
This check also judges the *change* of the output since the first step. A wrong lr shows in the change at once, while
the output itself is still mostly its initial value.

Below, N is the width, L is the depth (the number of blocks) and d is the head dimension. The scaling rule multiplies
each residual branch by L^-alpha. Under a right rule, the RMS of these outputs may fall with the size of the model:

- Over width, outputs of fixed size that sum a wide input: the logits, and query . key divided by a growing d. Their
  initial part is a sum of terms with independent signs and falls as N^-1/2. Training adds a part of order 1, which
  soon dominates.
- Over depth, the residual stream: the sum of L branches falls as L^(1/2 - alpha), until the stream is almost only the
  embedding. Modules read the stream through a norm, so their outputs must not depend on the depth.
- Over depth at alpha below 1, outputs of the matrices inside blocks: the rule lowers their lr as L^(alpha-1), so they
  learn less. So do the outputs of norms that read these outputs, such as norms on the outputs of branches. The output
  of a norm before a branch must not fall, because the norm passes on what the stream has learnt.

If d grows, the attention logits *must* fall with the width at the start. This detects a model that divides
query . key by sqrt(d), as is usual, instead of d. The logits of such a model have the same size at every d before
training, and grow as sqrt(d) only after training has aligned queries and keys. This growth takes more steps than a
check has (the slope was +0.1 after 40 steps), so the start is judged.

Over depth, a module inside the blocks is measured in the middle block, and the stream after the last block. A mean
over all blocks would be biased by the first block, whose input is still the embedding. The first block would make up
one half of the mean at depth 2 but one sixteenth at depth 16, so every slope would be too high by 0.15.

The check cannot detect errors in weight decay, in clipping, or in an eps far below the gradient. It also cannot
detect a readout that learns too slowly, or any error that shows only after many steps.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from leaven.documents.checks import VerdictRow
from leaven.model.kernels import widened
from leaven.training.loop import PlainTraining
from leaven.verification.activation_recorder import LOGITS, ActivationRecorder
from leaven.verification.model_instance import ModelInstance, RunScale
from leaven.verification.size_check import NOT_FINITE, WHY_NO_CHANGE, SizeAxis, SizeCheck
from leaven.verification.small_models import CheckStart

STEPS = 3  # the default number of training steps

LIMITS = {
    "width": {"start": 0.15, "early": 0.15, "late": 0.20},
    "depth": {"start": 0.15, "early": 0.20, "late": 0.30},
}
"""The limits on the slope of log2 RMS over log2 size, by axis. ``start`` is for the initial output. The later output
and its change have ``early`` for checks of up to ``STEPS`` steps, and ``late`` for longer checks.

A wrong power in a rule changes the slope by 0.5 or 1; errors that were planted in a rule gave slopes of 0.33 or more.
Right rules, measured with a dozen recipes on text (docs/log.md), had slopes of at most 0.12 over width. Over depth
they had at most 0.08 at the start and 0.19 after three steps. More seeds or larger sizes do not reduce these slopes:
a part of what a block adds to the stream is independent of the other blocks and falls as L^-1/2. After more steps,
shallow models fit the batch through their attention, and for some steps the slope of the attention's output over
depth falls as low as -0.46.
"""

MUON = {"width": (0.0, 0.1), "depth": (0.1, 0.0)}
"""By how much limits are wider after training steps with Muon, by axis: for falling and for growing slopes.

A step of Muon on a matrix with more inputs than outputs moves only as many directions as it has outputs. The share of
the inputs in these directions depends on the ratio of the width to the number of tokens in the batch. Measured with a
correct rule (docs/log.md): slopes from -0.13 to 0.21 over width, the largest at the outputs of such matrices, and
from -0.24 to 0.07 over depth. They are similar after one step, with a smaller lr, and with more Newton-Schulz
iterations. The other two limits are not wider, because an error of -1/2 in an exponent over width gives slopes of
only -0.17 to -0.24.
"""

INDEPENDENT = -0.5
"""The slope of log RMS over log n for a mean of n independent terms, whose RMS falls as n^-1/2."""


@dataclass(frozen=True)
class ActivationRecord:
    """The outputs of all modules that share a label, measured in one run."""

    squares: dict[str, tuple[float, ...]]  # by part (start, end, change): mean square of the output in each layer
    features: int  # size of the output's last dimension; of attention logits, the head dimension
    container: bool  # whether the output is computed from outputs of child modules, as in a block
    matrix: bool  # whether the module has a matrix as a direct parameter
    trained: bool  # whether the output requires a gradient
    stuck: bool  # whether a trainable weight of the module did not change at all
    muon: bool  # whether Muon trained matrices of the model


@dataclass(frozen=True)
class CoordinateCheck(SizeCheck[ActivationRecord]):
    """The coordinate check, which the top of this file explains."""

    steps: int = STEPS

    name = "coordinates"
    quantity = "slope of log2 output RMS over log2 size"
    parts = drawn = ("start", "end", "change")
    start = CheckStart(hidden=1.0, residual=0.5)
    """With smaller hidden weights or branches, an output would change mostly because the module's own weights change.
    The alignment of this change with the input still falls with the width at small widths (a slope of about -0.1).
    With a residual multiplier of 1, the branches would be as large as the embedding at depth 2, and modules between
    them would change less than at depth 4, by a factor of 2^0.25."""
    start_normed = CheckStart(hidden=1.0, residual=0.125, embedding_lr=4.0)
    """The start for models whose branches end in a norm. The output of such a branch has RMS 1, so the multiplier is
    smaller here. The output also changes more in a step: with the embedding's own lr, most of the change of the
    stream would come from the branches. At depth 2, three quarters of the branches come before the MLP of the middle
    block, at depth 16 about one half."""

    def axes(self) -> tuple[SizeAxis, ...]:
        """Return the axes along which models grow.

        If both width and depth vary, there is one axis more than in other size checks: the smallest and the largest
        width at the largest depth. This axis finds errors of a rule that show only where width and depth both grow.
        """
        axes = super().axes()
        if len(axes) < 2:
            return axes
        far = tuple(RunScale(width, max(self.depths)) for width in (min(self.widths), max(self.widths)))
        return (*axes, SizeAxis("width", far, f" at depth {max(self.depths)}"))

    def record(self, instance: ModelInstance) -> dict[str, ActivationRecord]:
        """Train a model for some steps on its first batch. Return the outputs of its modules before and after, by
        label."""
        instance.scale_lr(self.lr_factor)
        trained = {name: weight for name, weight in instance.model.named_parameters() if weight.requires_grad}
        before = {name: weight.detach().clone() for name, weight in trained.items()}
        training = PlainTraining(instance.optimizer, lambda _: instance.loss(0), 1, self.steps)
        start: dict[str, Tensor] = {}
        with ActivationRecorder(instance.model, instance.label) as recorder:
            for _ in range(self.steps):
                training.issue()
                outputs = recorder.take()
                start = start or outputs
            instance.loss(0)
            last = recorder.take()
        muon = any("match" in group for group in instance.optimizer.param_groups)
        stuck = {instance.label(name) for name, weight in trained.items() if torch.equal(weight, before[name])}
        return {
            name: ActivationRecord(
                {"start": _squares(first), "end": _squares(last[name]), "change": _squares(last[name] - first)},
                features=recorder.head_sizes.get(name, first.shape[-1]),
                container=name in recorder.containers,
                matrix=name in recorder.matrices,
                trained=name in recorder.trained,
                stuck=name in stuck,
                muon=muon,
            )
            for name, first in start.items()
        }

    def value(self, measured: ActivationRecord, part: str, axis: SizeAxis) -> float:
        """Return the RMS of a module's output at the start or at the end of the training, or of the output's change.

        ``part`` selects one of these. If the width varies, this is the RMS of all layers together. If the depth
        varies, it is the RMS of one layer: the middle one, or the last one for a container such as a block.
        """
        values = measured.squares[part]
        if axis.name == "depth":
            values = (values[-1 if measured.container else len(values) // 2],)
        return math.sqrt(sum(values) / len(values))

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
        falling, growing = MUON[axis.name] if lines[0][0].muon else (0.0, 0.0)

        def limit_of(part: str) -> float:
            more = growing if (slopes[part] or 0.0) > 0 else falling
            return limits[part] + more * (part != "start")

        limit = limit_of("change")
        if failure := _failure(means, [line for seeds in lines for line in seeds]):
            return row(slope=None, limit=limit, passed=False, note=failure, beyond=math.inf)
        beyond = {}
        for part, value in slopes.items():
            if value is not None:
                low, high = _allowed(axis, module, [seeds[0] for seeds in lines], part, self.family.alpha)
                beyond[part] = max(value - high, low - value) - limit_of(part)
        if not beyond:
            return row(slope=None, limit=limit, passed=None, note="always 0")
        worst = max(beyond, key=lambda part: beyond[part])
        if beyond[worst] <= 0:
            return row(slope=slopes["change"], limit=limit, passed=True)
        note = _note(axis.name, module, slopes[worst] or 0.0, self.family.rule is None)
        return row(slope=slopes[worst], limit=limit_of(worst), passed=False, note=note, beyond=beyond[worst])


def _squares(calls: Tensor) -> tuple[float, ...]:
    return tuple(widened(calls).square().mean((1, 2)).tolist())


def _failure(means: Mapping[str, Sequence[float]], lines: Sequence[ActivationRecord]) -> str:
    """Return the reason why a module fails whatever its slopes are, or "" if its slopes can be judged.

    The reasons are: an output is NaN, weights or outputs never change, or a quantity is 0 at some sizes only.
    """
    if any(math.isnan(value) for values in means.values() for value in values):
        return NOT_FINITE
    if any(line.stuck for line in lines):
        return f"its weights never change{WHY_NO_CHANGE}"
    if any(line.trained for line in lines) and not any(means["change"]):
        return f"never changes{WHY_NO_CHANGE}"
    gone = [q for q, values in means.items() if 0 in values and any(values)]
    return f"{gone[0]} is 0 at some sizes only" if gone else ""


def _allowed(
    axis: SizeAxis, module: str, lines: Sequence[ActivationRecord], quantity: str, alpha: float
) -> tuple[float, float]:
    """Return the lowest and the highest slope under a right rule, which the top of this file explains."""
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
    """Return a note on the usual cause of a slope of this ``value``, which is beyond the limits. ``foreign`` says
    whether a user's factory function made the model."""
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
