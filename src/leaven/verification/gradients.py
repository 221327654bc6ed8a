"""The gradient check: does eps scale with the gradients, and does weight decay keep its effect?

The exponent of a quantity is the slope of its log2 over log2 of the width or depth. For example, a
gradient that halves when the width doubles has the exponent -1 over width. Three properties of a scaling
rule are judged:

- AdamW divides by ``sqrt(v) + eps``, so the exponent of each gradient's RMS must equal that of eps
  (Everett et al. 2024, arXiv 2407.05872).
- AdamW shrinks a weight by the fraction lr x weight_decay in each step. The exponent of lr x
  weight_decay must be 0. If a rule lowers the lr with the width and keeps weight_decay, wide models have
  almost no decay. Activations show this error only after many steps.
- Every parameter with a gradient must change in training. Gains and biases must change by the same
  amount at every scale, because Adam changes each entry by about the lr in a step.

:mod:`leaven.verification.invariants` checks what follows from the optimizer's settings alone. For
matrices that Muon updates, the first property is not judged, because Muon has no eps.

Two kinds of parameters are exceptions over width:

- Gains of query and key norms that all heads share. The gradient is a sum over the heads. At first, the
  terms of the sum have independent signs. After about 150 steps, the signs agree, and the exponents of
  gradient and eps are both 0. So the check judges only the gradient at the end, after 150 steps or more.
- Routers: matrices inside blocks whose number of outputs is the same at every width. The gradient of an
  output is a sum over the width. The terms of the sum have independent signs until the outputs of the
  experts align with the gradient. So the exponent of the gradient may be from -1/2 to 0. The exponent of
  eps is 0. docs/concepts/checks.md has measurements.

The rule multiplies residual branches by L^-alpha, where L is the depth. If alpha is below 1, three
quantities may fall with the depth, at most as L^(alpha-1):

- lr x weight_decay, because the rule lowers the lr inside blocks, and the published rules keep
  weight_decay. (With ``scale_decay_with_depth``, weight_decay rises as the lr falls.)
- Changes of gains and biases inside blocks, because the rule lowers the lr there.
- Gradients inside blocks at the end of the training, relative to eps. Part of a gain's gradient is
  proportional to what the block has learnt. This part falls with the depth. Example: for the gain
  before the MLP at alpha = 1/2, eps had the exponent -0.50. The exponent of the gradient was -0.59 on text,
  and -0.90 on a Markov chain, which a model learns quickly.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from leaven.documents.checks import VerdictRow
from leaven.model.kernels import widened
from leaven.training.loop import PlainTraining
from leaven.verification.coordinates import INDEPENDENT
from leaven.verification.invariants import invariants, numbers
from leaven.verification.model_instance import ModelInstance
from leaven.verification.size_check import NOT_FINITE, WHY_NO_CHANGE, Means, SizeAxis, SizeCheck, Slopes
from leaven.verification.small_models import CheckStart
from leaven.verification.verdict import Exponent

START_LIMIT, END_LIMIT = 0.15, 0.25
"""Largest difference between the exponents (see the top of this file) of gradient and eps.

- ``START_LIMIT``: at the first step; for gains that all heads share, at the end of the training.
- ``END_LIMIT``: at the end of the training, for all other parameters.

``START_LIMIT`` also limits the exponent of lr x weight_decay, and ``END_LIMIT`` the exponent of the changes of gains
and biases.

Under correct rules, at widths 64 to 512 and depths 2 to 32, the difference was at most 0.14 at the start. The limit
at the end is larger, because models of different width have then learnt different amounts: after 20 steps, a gradient
had the exponent -0.77, and eps -1.
"""

COHERENT_STEPS = 150  # with this many steps or more, gains that all heads share are judged over width
WARMUP_STEPS = 20


@dataclass(frozen=True)
class GradientRecord:
    """The measurements of one run for all parameters that have the same label, such as ``mlp.out``."""

    start: float  # RMS of the gradient at the first step
    # RMS of the gradient over the batches of the last quarter of the steps and one more, because one batch is noisy
    end: float
    moved: float  # RMS of the change of the parameter in the training
    eps: float
    decay: float  # lr x weight_decay: the share by which a weight shrinks in a step
    shape: tuple[int, ...]  # shape of the parameter in one layer
    inside: bool  # whether the parameter is inside a block
    muon: bool  # whether Muon updates the parameter, which has no eps


@dataclass(frozen=True)
class GradientCheck(SizeCheck[GradientRecord]):
    steps: int = 20
    lr_factor: float = 0.125
    """At the full lr, without a schedule, the slopes of norm gains scatter by 0.3 after 20 steps. With 1/16 to 1/4 of
    the lr, they stay within the limits."""

    name = "gradients"
    quantity = "slope of log2 gradient RMS over log2 size, minus the slope of log2 eps"
    parts = ("start", "end", "eps", "decay", "moved")
    drawn = ("start", "end", "eps")
    start = CheckStart(hidden=0.5, residual=1.0)
    """With these hidden weights, the outputs of branches are small compared with the embedding even at depth 2, as in
    deep models. So gradients inside blocks have the right exponent from depth 2 on."""
    start_normed = CheckStart(hidden=0.5, residual=0.125)  # the output of a branch that ends in a norm has RMS 1

    def exact_rows(self) -> Sequence[VerdictRow]:
        return invariants(self.family, self.widths, self.depths)

    def record(self, instance: ModelInstance) -> dict[str, GradientRecord]:
        """Train a model with a warm-up, on a new batch in each step. Return {label: record}."""
        instance.scale_lr(self.lr_factor)
        parameters = dict(instance.model.named_parameters())
        before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        settings = {
            parameter: (group.get("eps", 0.0), group["lr"] * group.get("weight_decay", 0.0), "match" in group)
            for group in instance.optimizer.param_groups
            for parameter in group["params"]
        }

        def gradients() -> dict[str, float]:
            return _rms(instance, {name: parameter.grad for name, parameter in parameters.items()})

        # PlainTraining counts tokens; here it counts batches.
        training = PlainTraining(instance.optimizer, instance.loss, 1, self.steps, lambda n: min(n / WARMUP_STEPS, 1))
        first: dict[str, float] = {}
        late: list[dict[str, float]] = []
        for step in range(self.steps):
            training.issue()
            if step == 0:
                first = gradients()
            if step >= self.steps - self.steps // 4:
                late.append(gradients())
        instance.optimizer.zero_grad(set_to_none=True)
        instance.loss(self.steps).backward()  # type: ignore[no-untyped-call]
        late.append(gradients())
        moved = _rms(instance, {name: parameter.detach() - before[name] for name, parameter in parameters.items()})
        records: dict[str, GradientRecord] = {}
        for name, parameter in parameters.items():
            label = instance.label(name)
            if label is not None and any(label in found for found in (first, *late)):
                eps, decay, muon = settings[parameter]
                inside = numbers(name) > numbers(label)  # a label has no number of a block
                end = math.sqrt(sum(gradient.get(label, 0.0) ** 2 for gradient in late) / len(late))
                records[label] = GradientRecord(
                    first.get(label, 0.0), end, moved[label], eps, decay, tuple(parameter.shape), inside, muon
                )
        return records

    def judge(
        self, axis: SizeAxis, module: str, lines: Sequence[Sequence[GradientRecord]], means: Means, slopes: Slopes
    ) -> VerdictRow:
        row = partial(VerdictRow, module=module, axis=axis.title, parts=dict(slopes))
        records = [record for seeds in lines for record in seeds]
        start, end, eps, decay, moved = (slopes[part] for part in self.parts)
        failed = partial(row, slope=None, limit=START_LIMIT, passed=False, beyond=math.inf)
        if failure := _failure(records):
            return failed(note=failure)
        if eps is None and not (decay is not None and records[0].muon):
            return row(slope=None, limit=None, passed=None, note="no eps")
        if not all(math.isfinite(record.end) for record in records):
            return failed(note=NOT_FINITE)
        inside, shapes = records[0].inside, {record.shape for record in records}
        shared = axis.name == "width" and inside and len(shapes) == 1
        fixed_outputs = all(len(shape) == 2 for shape in shapes) and len({shape[0] for shape in shapes}) == 1
        router = axis.name == "width" and inside and fixed_outputs and not shared
        # How low an exponent may be, over depth and for a router (top of this file).
        over_depth = self.family.alpha - 1 if axis.name == "depth" else 0.0
        of_router = INDEPENDENT * router
        judged = []
        if eps is not None and start is not None and not shared:
            judged.append(Exponent("eps", start - eps, of_router, 0.0, START_LIMIT))
        if eps is not None and end is not None and (not shared or self.steps >= COHERENT_STEPS):
            limit = START_LIMIT if shared else END_LIMIT
            judged.append(Exponent("eps", end - eps, over_depth * inside + of_router, 0.0, limit))
        if decay is not None:
            judged.append(Exponent("decay", decay, over_depth, 0.0, START_LIMIT))
        if moved is not None and all(len(seeds[0].shape) < 2 for seeds in lines):
            # A gain or bias changes by its lr in a step, whatever its gradient is, so the same at every scale.
            judged.append(Exponent("gain", moved, over_depth * inside, 0.0, END_LIMIT))
        if not judged:
            note = f"shared by all heads: judged only with {COHERENT_STEPS} or more steps" if shared else "always 0"
            return row(slope=None, limit=None, passed=None, note=note)
        worst = max(judged, key=lambda each: each.beyond)
        if worst.beyond <= 0:
            note = ""
            if router and any(each.what == "eps" and each.value < -each.limit for each in judged):
                note = f"passed: a router's gradient may have an exponent up to {-of_router:g} lower than that of eps"
            return row(slope=worst.value, limit=worst.limit, passed=True, note=note)
        note = _note(axis.name, worst.value, worst.what)
        return row(slope=worst.value, limit=worst.limit, passed=False, note=note, beyond=worst.beyond)


def _rms(instance: ModelInstance, values: Mapping[str, Tensor | None]) -> dict[str, float]:
    """Return, by label, the RMS over all tensors with this label. ``values`` has the tensors by parameter name."""
    sums: dict[str, tuple[float, int]] = {}
    for name, tensor in values.items():
        label = instance.label(name)
        if label is not None and tensor is not None:
            total, count = sums.get(label, (0.0, 0))
            sums[label] = (total + float(widened(tensor).square().sum()), count + tensor.numel())
    return {label: math.sqrt(total / count) for label, (total, count) in sums.items()}


def _failure(records: Sequence[GradientRecord]) -> str:
    """Return why a parameter fails: it never changes, or a value is 0 at some sizes only. Return "" if it passes."""
    if not all(record.moved for record in records):
        return f"never changes{WHY_NO_CHANGE}"
    named = {"start": "the first gradient", "end": "the gradient", "decay": "lr x decay", "eps": "eps"}
    for name, what in named.items():
        values = [getattr(record, name) for record in records]
        if any(values) and not all(values):
            return f"{what} is 0 at some sizes only"
    return ""


def _note(axis: str, value: float, what: str) -> str:
    if what == "gain":
        return f"its change {'SHRINKS' if value < 0 else 'GROWS'} with {axis}  <- does its lr depend on {axis}?"
    if what == "decay":
        change = "FALLS" if value < 0 else "GROWS"
        return f"lr x decay {change} with {axis}  <- does only one of lr and decay depend on {axis}?"
    return f"eps {'GROWS' if value < 0 else 'FALLS'} relative to the gradient with {axis}"
