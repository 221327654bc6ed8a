"""The coordinate check: do activations, and their changes in training, keep their size as the model grows?

Yang et al. 2022 (Tensor Programs V, arXiv 2203.03466, appendix D.1) train models of several widths for a
few steps on one batch. The RMS of every module's output should not depend on the width. Dey et al. 2025
(CompleteP, arXiv 2505.01618) do the same over depth. This check also judges the *change* of the output
since the first step: a wrong lr shows here first.

Below, N is the width, L is the depth (the number of blocks) and d is the head dimension. The scaling
rule multiplies each residual branch by L^-alpha. Under a correct rule, only these outputs may fall with
the size of the model:

- Over width, outputs whose last dimension does not grow, such as the model's logits, and query . key divided by a
  growing d. Such an output is an average of N terms. At the start, the terms have independent signs, so the
  average falls as N^-1/2. Training adds a part of order 1 with the same sign in all terms, which soon dominates.
- Over depth, the residual stream: the sum of L branches falls as L^(1/2 - alpha), until the stream is almost only the
  embedding. Modules read the stream through a norm, so their outputs must not depend on the depth.
- Over depth at alpha below 1, outputs of the matrices inside blocks, outputs of norms after such a matrix, and the
  attention logits: the rule lowers the lr of these matrices as L^(alpha-1), so the outputs change less in training.
  The norm before a branch reads the stream, so its output must not fall.

If d grows, the attention logits not only may but *must* fall with the width at the start. This detects a model that
divides query . key by sqrt(d), as is usual, instead of d. Before training, the logits of such a model
have the same size at every d. Training aligns queries and keys, and the logits then grow as sqrt(d).
This growth takes more steps than a check has (an exponent of +0.1 after 40 steps), so the start is
judged.

Over depth, a module inside the blocks is measured in the middle block, and the stream after the last
block. A mean over all blocks would include the first block, whose output changes less because its input is
the embedding. The first block has more weight in the mean of a shallow model, so slopes would rise by up to 0.15.
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
from leaven.verification.size_check import NOT_FINITE, WHY_NO_CHANGE, Means, SizeAxis, SizeCheck, Slopes
from leaven.verification.small_models import CheckStart
from leaven.verification.verdict import Exponent

STEPS = 3  # the default number of training steps

LIMITS = {
    "width": {"start": 0.15, "early": 0.15, "late": 0.20},
    "depth": {"start": 0.15, "early": 0.20, "late": 0.30},
}
"""The largest distance of the slope of log2 RMS over log2 size from its allowed range, by axis. ``start`` is for the
initial output. For the trained output and for the change of the output, ``early`` holds for up to `STEPS` training
steps, and ``late`` for more steps.

A wrong power in a rule changes the slope by 0.5 or 1. Errors that were planted in a rule gave slopes of 0.33 or more.
Under correct rules, with a dozen recipes on text (docs/log.md), slopes over width were at most 0.12. Over depth they
were at most 0.08 at the start, and 0.19 after three steps. More seeds or larger sizes do not reduce the slopes over
depth: the outputs of the blocks are partly independent, and the sum of the independent parts falls as L^-1/2. After
more steps, shallow models fit the batch through their attention, whose output had slopes over depth down to -0.46.
"""

MUON = {"width": (0.0, 0.1), "depth": (0.1, 0.0)}
"""How much wider the ``early`` and ``late`` limits are with Muon, by axis: (for slopes below 0, for slopes above 0).

Under a correct rule, slopes over width were from -0.13 to 0.21, and slopes over depth from -0.24 to 0.07
(docs/log.md). One cause: in a matrix with more inputs than outputs, a step of Muon changes only as many input
directions as there are outputs. Over width, the limit for negative slopes is not wider, because an error of -1/2 in
an exponent gives slopes of only -0.17 to -0.24.
"""

INDEPENDENT = -0.5  # the exponent of n in the RMS of a mean of n terms with independent signs


@dataclass(frozen=True)
class ActivationRecord:
    """The outputs of all modules that share a label, measured in one run."""

    squares: dict[str, tuple[float, ...]]  # by part (start, end, change): mean square of the output in each layer
    features: int  # size of the output's last dimension; of attention logits, the head dimension
    container: bool  # whether the output is computed from outputs of child modules, as in a block
    matrix: bool  # whether the module has a matrix, reads the output of one, or is attention logits
    trained: bool  # whether the output requires a gradient
    stuck: bool  # whether a trainable weight of the module did not change at all
    muon: bool  # whether Muon trained matrices of the model


@dataclass(frozen=True)
class CoordinateCheck(SizeCheck[ActivationRecord]):
    steps: int = STEPS

    name = "coordinates"
    quantity = "slope of log2 output RMS over log2 size"
    parts = drawn = ("start", "end", "change")
    start = CheckStart(hidden=1.0, residual=0.5)
    """The start for branches without a norm at the end. With smaller hidden weights or a smaller residual multiplier,
    an output would change mostly because the module's own weights change. At small widths, the alignment of this
    change with the input falls as the width grows (a slope of about -0.1). With a residual multiplier of 1, the
    branches at depth 2 would be as large as the embedding, and outputs that read the stream between two branches
    would change less than at larger depths."""
    start_normed = CheckStart(hidden=1.0, residual=0.125, embedding_lr=4.0)
    """The start for branches that end in a norm. Their outputs have RMS 1, so the residual multiplier is smaller.
    Their outputs also change more in a step, so the embedding gets a larger lr. Otherwise, the stream would change
    mostly through the branches, and at the MLP of the middle block it would change less in deeper models: three
    quarters of all branches are before this MLP at depth 2, but only about one half at depth 16."""

    def axes(self) -> tuple[SizeAxis, ...]:
        axes = super().axes()
        if len(axes) < 2:
            return axes
        # Some errors of a rule show only if width and depth both grow.
        far = tuple(RunScale(width, max(self.depths)) for width in (min(self.widths), max(self.widths)))
        return (*axes, SizeAxis("width", far, f" at depth {max(self.depths)}"))

    def record(self, instance: ModelInstance) -> dict[str, ActivationRecord]:
        """Train a model on one batch for ``steps`` steps. Return a record of each module's output, by label."""
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
        """Return the RMS of a module's output before or after training, or of its change. ``part`` says which.

        Over width, it is the RMS over all layers. Over depth, it is the RMS of one layer: the last layer of a
        container such as a block, or the middle layer of other modules.
        """
        values = measured.squares[part]
        if axis.name == "depth":
            values = (values[-1 if measured.container else len(values) // 2],)
        return math.sqrt(sum(values) / len(values))

    def judge(
        self, axis: SizeAxis, module: str, lines: Sequence[Sequence[ActivationRecord]], means: Means, slopes: Slopes
    ) -> VerdictRow:
        row = partial(VerdictRow, module=module, axis=axis.title, parts=dict(slopes))
        limits = LIMITS[axis.name]
        falling, growing = MUON[axis.name] if lines[0][0].muon else (0.0, 0.0)

        def limit_of(part: str) -> float:
            if part == "start":
                return limits["start"]
            return limits["early" if self.steps <= STEPS else "late"] + (
                growing if (slopes[part] or 0) > 0 else falling
            )

        limit = limit_of("change")
        if failure := _failure(means, [line for seeds in lines for line in seeds]):
            return row(slope=None, limit=limit, passed=False, note=failure, beyond=math.inf)
        of_sizes = [seeds[0] for seeds in lines]
        judged = [
            Exponent(part, value, *_allowed(axis, module, of_sizes, part, self.family.alpha), limit_of(part))
            for part, value in slopes.items()
            if value is not None
        ]
        if not judged:
            return row(slope=None, limit=limit, passed=None, note="always 0")
        worst = max(judged, key=lambda each: each.beyond)
        if worst.beyond <= 0:
            return row(slope=slopes["change"], limit=limit, passed=True)
        note = _note(axis.name, module, worst.value, self.family.rule is None)
        return row(slope=worst.value, limit=worst.limit, passed=False, note=note, beyond=worst.beyond)


def _squares(calls: Tensor) -> tuple[float, ...]:
    return tuple(widened(calls).square().mean((1, 2)).tolist())


def _failure(means: Mapping[str, Sequence[float]], lines: Sequence[ActivationRecord]) -> str:
    """Return why a module fails regardless of its slopes, or "" if the slopes decide."""
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
    """Return the lowest and the highest slope that a correct rule may give; this module's docstring has reasons."""
    if axis.name == "width":
        # Attention logits are sums over the head dimension, so they fall only if this dimension grows.
        logits = module.endswith(LOGITS)
        sums = (len({line.features for line in lines}) == 1) != logits
        return INDEPENDENT * sums, INDEPENDENT * (sums and logits and quantity == "start")
    inside = len(lines[-1].squares["start"]) > 1
    if inside and lines[-1].container:
        return min(1 / 2 - alpha, 0.0), 0.0
    return (alpha - 1) * (inside and lines[-1].matrix and quantity != "start"), 0.0


def _note(axis: str, module: str, value: float, foreign: bool) -> str:
    """Return the direction and usual cause of a slope outside its range. ``foreign``: from a user's factory."""
    if value < 0:
        hint = "scaled twice?"
        if axis == "depth":
            hint = "branches scaled twice" + (
                ", for example by a multiplier and an init of 1/sqrt(2L)?" if foreign else "?"
            )
        return f"SHRINKS with {axis}  <- {hint}"
    if axis == "depth":
        hint = "branches not multiplied by depth^-alpha?"
    elif module.endswith(LOGITS):
        hint = "query . key divided by sqrt(d_head), not by d_head?"
    else:
        hint = "lr or init not divided by width?"
    return f"GROWS with {axis}  <- {hint}"
