"""The gradient check: does eps scale with the gradients, and does weight decay keep its effect?

AdamW divides by ``sqrt(v) + eps``, so the effect of eps is the same at every scale if eps scales as the gradient. For
each group of parameters, the measured exponent of the gradient's RMS has to equal the exponent of eps in the
optimiser. The coordinate check cannot see this while eps is small; in large models the gradients fall, and eps
matters first in the embedding and the hidden weights (Everett et al. 2024, arXiv 2407.05872).

PyTorch's AdamW shrinks a weight by lr x weight_decay in each step. If a rule lowers the lr with width and leaves the
weight decay alone, the decay vanishes, and no check of activations sees that within a few steps. So the exponent of
the product has to be 0. :mod:`leaven.verification.invariants` checks what follows from the optimiser's settings
alone, also over batch and duration.

Every parameter has to change, and gains and biases by the same amount at every scale, since Adam changes each entry
by its lr in a step.

Gains of query and key norms that all heads share are sums over heads: independent signs at the start, coherent after
about 150 steps, where the exponent of 0 that their eps has is measured. They are judged over width only from there
on.

Below alpha = 1 two things may fall with depth by up to L^(alpha-1). lr x decay, since the lr inside blocks does and
the published rules leave the decay unchanged (``scale_decay_with_depth`` raises it instead). And gradients inside
blocks after some steps: the gradient of a gain is in part a product with what its block has learnt, which falls as
the lr does (at alpha = 1/2, where eps has -0.50, the pre-MLP gain's measured -0.59 on text, and -0.90 on a chain that
is soon learnt).
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from leaven.training.loop import Callback, Loop, PlainTraining, StepResult
from leaven.verification.invariants import invariants, settings_of
from leaven.verification.model_family import CheckStart, ModelFamily, ModelInstance
from leaven.verification.size_check import SizeAxis, axes, compare_sizes
from leaven.verification.verdict import CheckRow, Verdict, geometric_mean, slope

START_LIMIT, END_LIMIT = 0.15, 0.25
"""Limits on the difference of the two exponents. Widths 64 to 512 and depths 2 to 32 measured at most 0.14 at the
start; later, models of different width have learnt different amounts and the slopes drift (-0.77 for -1 after 20
steps)."""

COHERENT_STEPS = 150
WARMUP_STEPS = 20
START = CheckStart(hidden=0.5, residual=1.0)
"""Hidden weights start at half of 1/sqrt(fan in). The branches of a few blocks are then small compared with the
embedding, as they are in deep models, and gradients inside have their exponent of depth from depth 2 on."""


@dataclass(frozen=True)
class GradientRecord:
    """The parameters with one label in one run."""

    start: float  # RMS of the gradient at the first step
    end: float  # RMS of the gradient over the last quarter of the steps
    moved: float  # RMS of the change from the first step to the last
    eps: float
    decay: float  # lr x weight_decay, the share by which a weight shrinks in a step
    shape: tuple[int, ...]  # of one layer's parameter
    layers: int


GradientRecords = dict[str, GradientRecord]


def gradients(
    family: ModelFamily,
    widths: Sequence[int],
    depths: Sequence[int],
    *,
    steps: int = 20,
    seeds: int = 3,
    lr_factor: float = 0.125,
    on_member: Callable[[int, int], None] = lambda done, total: None,
) -> Verdict:
    """Run the check over the same models as the coordinate check; ``lr_factor`` multiplies every lr.

    A fraction of the lr for training keeps the models' gradients comparable: at all of it, without a schedule, the
    slopes of gains scatter by 0.3 after 20 steps; from 1/16 to 1/4 of it they stay within the limits.

    Raises:
        InputError: if the family has no model of one of these sizes.
    """
    chosen = axes(widths, depths)
    settings = {scale: settings_of(family.build(*scale, 0)) for axis in chosen for scale in axis.scales}
    verdict = compare_sizes(
        "gradients",
        "slope of log2 gradient RMS over log2 size, less that of eps",
        family,
        chosen,
        record=record,
        judge=lambda axis, module, lines: _row(axis, module, lines, steps, family.alpha),
        curves={
            "start": lambda line, _: line.start,
            "end": lambda line, _: line.end,
            "eps": lambda line, _: line.eps,
        },
        widths=widths,
        depths=depths,
        steps=steps,
        seeds=seeds,
        lr_factor=lr_factor,
        on_member=on_member,
    )
    return replace(verdict, rows=(*invariants(family, settings), *verdict.rows))


class _Gradients(Callback[StepResult]):
    """Keeps the RMS of the gradients of the first step and of the last quarter of the ``steps``."""

    def __init__(self, instance: ModelInstance, steps: int) -> None:
        self._instance, self._steps = instance, steps
        self.first: dict[str, float] = {}
        self.late: list[dict[str, float]] = []

    def after_step(self, step: StepResult) -> None:
        self.take(step.step - 1)

    def take(self, number: int) -> None:
        if number in {0, *range(self._steps - self._steps // 4, self._steps + 1)}:
            found = _rms(self._instance, lambda name, parameter: parameter.grad)
            self.first = self.first if number else found
            self.late += [found] if number >= self._steps - self._steps // 4 else []


def record(instance: ModelInstance, steps: int, lr_factor: float) -> GradientRecords:
    """Train an instance on new batches with a warm-up, and return its gradients at the start and the end.

    The end is the last quarter of the steps, since a gain has few entries and its gradient on one batch is noisy.
    """
    instance.scale_lr(lr_factor)
    before = {name: parameter.detach().clone() for name, parameter in instance.model.named_parameters()}
    # The loop counts tokens: a batch is one here.
    training = PlainTraining(instance.optimizer, instance.loss, 1, steps, lambda done: min(done / WARMUP_STEPS, 1.0))
    peaks = [group["lr"] for group in instance.optimizer.param_groups]
    recorder = _Gradients(instance, steps)
    Loop(training, [recorder]).run()
    instance.optimizer.zero_grad(set_to_none=True)
    instance.loss(steps).backward()  # type: ignore[no-untyped-call]
    recorder.take(steps)
    first, late = recorder.first, recorder.late
    moved = _rms(instance, lambda name, parameter: parameter.detach() - before[name])
    settings = {
        parameter: (group.get("eps", 0.0), peak * group.get("weight_decay", 0.0))
        for peak, group in zip(peaks, instance.optimizer.param_groups, strict=True)
        for parameter in group["params"]
    }
    run: GradientRecords = {}
    for name, parameter in instance.model.named_parameters():
        label = instance.label(name)
        if label is not None and label in first:
            layers = run[label].layers + 1 if label in run else 1
            eps, decay = settings[parameter]
            end = math.sqrt(sum(gradient[label] ** 2 for gradient in late) / len(late))
            run[label] = GradientRecord(first[label], end, moved[label], eps, decay, tuple(parameter.shape), layers)
    return run


def _rms(instance: ModelInstance, of: Callable[[str, Tensor], Tensor | None]) -> dict[str, float]:
    """Return the RMS of ``of(name, parameter)`` by label, over all entries of all layers."""
    sums: dict[str, tuple[float, int]] = {}
    for name, parameter in instance.model.named_parameters():
        label, values = instance.label(name), of(name, parameter)
        if label is not None and values is not None:
            total, count = sums.get(label, (0.0, 0))
            sums[label] = (total + float(values.double().square().sum()), count + values.numel())
    return {label: math.sqrt(total / count) for label, (total, count) in sums.items()}


def _row(
    axis: SizeAxis, module: str, lines: Sequence[Sequence[GradientRecord]], steps: int, alpha: float
) -> CheckRow:
    def exponent(name: str) -> float | None:
        return slope(axis.sizes, [geometric_mean([getattr(line, name) for line in seeds]) for seeds in lines])

    parts = {name: exponent(name) for name in ("start", "end", "eps", "decay", "moved")}
    start, end, eps, decay, moved = parts.values()
    still = _still(seed for seeds in lines for seed in seeds)
    if still:
        return CheckRow(module, axis.name, None, START_LIMIT, False, parts, still, math.inf)
    if eps is None:
        return CheckRow(module, axis.name, None, None, None, parts, "no eps")
    inside = lines[-1][0].layers > 1
    shared = axis.name == "width" and lines[0][0].layers > 1 and len({seeds[0].shape for seeds in lines}) == 1
    lower = alpha - 1 if axis.name == "depth" else 0.0  # the lowest exponent allowed, see the top of this file
    judged = []  # how far beyond its limit, value, limit
    if start is not None and not shared:
        judged.append((abs(start - eps) - START_LIMIT, start - eps, START_LIMIT))
    if end is not None and (not shared or steps >= COHERENT_STEPS):
        limit, gap = START_LIMIT if shared else END_LIMIT, end - eps
        judged.append((max(gap, lower * inside - gap) - limit, gap, limit))
    decayed = None if decay is None else (max(decay, lower - decay) - START_LIMIT, decay, START_LIMIT)
    judged += [decayed] if decayed else []
    # A gain or bias changes by its lr in a step, whatever its gradient, and so by the same amount at every scale.
    gain = moved is not None and all(len(seeds[0].shape) < 2 for seeds in lines)
    went = (max(moved, lower * inside - moved) - END_LIMIT, moved, END_LIMIT) if gain and moved is not None else None
    judged += [went] if went else []
    if any(not math.isfinite(seed.end) for seeds in lines for seed in seeds):
        return CheckRow(module, axis.name, None, START_LIMIT, False, parts, "not finite: lower the lr?", math.inf)
    if not judged:
        note = f"shared by all heads: judged from {COHERENT_STEPS} steps on" if shared else "always 0"
        return CheckRow(module, axis.name, None, None, None, parts, note)
    worst = max(judged)
    beyond, value, limit = worst
    if beyond <= 0:
        return CheckRow(module, axis.name, value, limit, True, parts)
    what = "decay" if worst is decayed else "gain" if worst is went else "eps"
    return CheckRow(module, axis.name, value, limit, False, parts, _note(axis.name, value, what), beyond)


def _still(runs: Iterable[GradientRecord]) -> str:
    """Return why no slope can be judged: a value never changes, or is 0 at some sizes. "" if it can."""
    found = list(runs)
    if not all(run.moved for run in found):
        return "never moves  <- an lr of 0, or no gradient within these steps?"
    named = {"start": "the first gradient", "end": "the gradient", "decay": "lr x decay", "eps": "eps"}
    for name, what in named.items():
        values = [getattr(run, name) for run in found]
        if any(values) and not all(values):
            return f"{what} is 0 at some sizes only"
    return ""


def _note(axis: str, value: float, what: str) -> str:
    if what == "gain":
        return f"its move {'SHRINKS' if value < 0 else 'GROWS'} with {axis}  <- lr of a gain changed with {axis}?"
    if what == "decay":
        change = "FALLS" if value < 0 else "GROWS"
        return f"lr x decay {change} with {axis}  <- only one of lr and decay changed?"
    return f"eps {'GROWS' if value < 0 else 'FALLS'} against the gradient with {axis}"
