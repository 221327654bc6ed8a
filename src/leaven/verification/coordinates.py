"""The coordinate check: does what flows through the model, and how it moves, keep its size as the model grows?

Yang et al. 2022 (Tensor Programs V, arXiv 2203.03466, appendix D.1) and the ``mup`` package record the size of every
module's output for a few steps at several widths, on one batch, with a larger lr than for training: a flat line is
right. Dey et al. 2025 (CompleteP, arXiv 2505.01618) do so over depth. Here the *change* of the output since the first
step is judged as well: it shows a wrong lr at once, where the output itself still is mostly its initial value.

Two things may fall, as the square root of what grows, without being wrong: they are sums of independent signs.

- Over width, what a wide input makes finite: the logits, and query . key divided by a growing head dimension. The
  initial part falls as N^-1/2 under muP; with training a part of order 1 takes over.
- Over depth, the residual stream. The sum of L branches at L^-alpha falls as L^(1/2 - alpha) until the embedding is
  all that is left of it. What reads the stream reads it through a norm, and has to be flat.

Attention logits with a growing head dimension *have* to fall at the start: query . key / sqrt(d) is flat only as long
as queries and keys know nothing of each other, and grows as sqrt(d) once training has aligned them. That takes more
steps than a check has (measured after 40: +0.1), so the room for it is asked for at the start.

Below alpha = 1 the rule itself lowers the lr inside blocks, as L^(alpha-1), and with it what a block's own matrices
learn. That is allowed for their outputs alone: a norm hands on what the stream has learnt, and has to be flat.

In the depth of a model, lines are compared at the same relative depth: modules inside blocks in the one that reads
the stream after half of the blocks, streams after the last one. A mean over blocks would count the first, whose input
no block has touched, for one half at depth 2 and one sixteenth at depth 16, and bend every slope by +0.15; a mean of
the two blocks round the middle bends it by +0.2.

What it cannot see: weight decay, eps far below the gradient, clipping, a readout that learns too slowly, anything
that needs many steps.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from leaven.training.loop import Callback, Loop, PlainTraining, StepResult
from leaven.verification.activation_recorder import LOGITS, ActivationRecorder
from leaven.verification.model_family import CheckStart, ModelFamily, ModelInstance
from leaven.verification.size_check import SizeAxis, axes, compare_sizes, corner
from leaven.verification.verdict import CheckRow, Verdict, geometric_mean, slope

STEPS = 3

LIMITS = {
    "width": {"start": 0.15, "early": 0.15, "late": 0.20},
    "depth": {"start": 0.15, "early": 0.20, "late": 0.30},
}
"""On |slope|, log2 over log2: at the start, and of what up to ``STEPS`` steps changed, or more. A wrong power of
width or depth is 0.5 or 1, and planted faults show as 0.33 or more. Right rules measured (docs/log.md: a dozen
recipes on text, widths 64 to 512, depths 2 to 16, three seeds) at most 0.09 in width and 0.08 (start) and 0.19
(early) in depth; growing heads 0.12 in width at the start, for falling logits attend more evenly. Neither more seeds
nor larger sizes bring the rest down: a part of what a block adds is independent of the others', and falls as L^-1/2.

Later is another matter: at some step, the sooner the higher the lr, shallow models fit the one batch through their
attention, and its output falls with depth by up to 0.46 for a while (step 5 at lr 0.008), to be flat again after."""

INDEPENDENT = -0.5
"""The slope of a mean of independent terms, in their number."""

START = CheckStart(hidden=1.0, residual=0.5)
"""Hidden weights at 1/sqrt(fan in): with smaller ones the change of a module is mostly that of its own weights, whose
alignment with the input still falls at these widths (-0.13 for 64 to 256). Branches at half: at depth 2 whole ones
are as large as the embedding, and what reads the stream between them changes by 2^0.25 less than at depth 4; with
smaller ones the change is again mostly that of a module's own weights (-0.11 in width at a quarter)."""

QUANTITIES = ("start", "end", "change")


@dataclass(frozen=True)
class ActivationRecord:
    """What one module's line was in one run: mean squares by quantity, one a call, in the order of the calls.

    ``trained`` says whether the output depends on what is trained, ``stuck`` whether a weight of the module's own is
    trained and stayed bit for bit what it was.
    """

    squares: dict[str, tuple[float, ...]]
    features: int
    container: bool
    matrix: bool
    trained: bool
    stuck: bool

    def rms(self, quantity: str, axis: str) -> float:
        """Over all calls in width; at one relative depth in depth."""
        values = self.squares[quantity]
        if axis == "depth":
            values = (values[-1 if self.container else len(values) // 2],)
        return math.sqrt(sum(values) / len(values))


ActivationRecords = dict[str, ActivationRecord]


def coordinates(
    family: ModelFamily,
    widths: Sequence[int],
    depths: Sequence[int],
    *,
    steps: int = STEPS,
    seeds: int = 3,
    lr_factor: float = 1.0,
    on_member: Callable[[int, int], None] = lambda done, total: None,
) -> Verdict:
    """Run the check; ``lr_factor`` multiplies every lr.

    Raises:
        InputError: if the family has no model of one of these sizes.
    """
    return compare_sizes(
        "coordinates",
        "slope of log2 output RMS over log2 size",
        family,
        (*axes(widths, depths), *corner(widths, depths)),
        record=record,
        judge=lambda axis, module, lines: _row(axis, module, lines, steps, family),
        curves={name: partial(_rms, name) for name in QUANTITIES},
        widths=widths,
        depths=depths,
        steps=steps,
        seeds=seeds,
        lr_factor=lr_factor,
        on_member=on_member,
    )


def _rms(quantity: str, line: ActivationRecord, axis: SizeAxis) -> float:
    return line.rms(quantity, axis.name)


class _Outputs(Callback[StepResult]):
    """Keeps what the first forward gave."""

    def __init__(self, recorder: ActivationRecorder) -> None:
        self._recorder = recorder
        self.first: dict[str, Tensor] = {}

    def after_step(self, step: StepResult) -> None:
        outputs = self._recorder.take()
        self.first = self.first or outputs


def record(instance: ModelInstance, steps: int, lr_factor: float) -> ActivationRecords:
    """Train an instance for some steps on its first batch and say what its outputs were and became."""
    instance.scale_lr(lr_factor)
    trained = {name: parameter for name, parameter in instance.model.named_parameters() if parameter.requires_grad}
    before = {name: parameter.detach().clone() for name, parameter in trained.items()}
    with ActivationRecorder(instance.model, instance.label) as recorder:
        kept = _Outputs(recorder)
        Loop(PlainTraining(instance.optimizer, lambda _: instance.loss(0), 1, steps), [kept]).run()
        instance.loss(0)
        outputs = recorder.take()
    first = kept.first or outputs
    stuck = {instance.label(name) for name, parameter in trained.items() if torch.equal(parameter, before[name])}
    return {
        name: ActivationRecord(
            {
                "start": _squares(start),
                "end": _squares(outputs[name]),
                "change": _squares(outputs[name] - start),
            },
            features=recorder.head_sizes.get(name, start.shape[-1]),
            container=name in recorder.containers,
            matrix=name in recorder.matrices,
            trained=name in recorder.trained,
            stuck=name in stuck,
        )
        for name, start in first.items()
    }


def _squares(calls: Tensor) -> tuple[float, ...]:
    values: list[float] = calls.to(torch.float64).square().mean((1, 2)).tolist()
    return tuple(values)


def _row(
    axis: SizeAxis, module: str, lines: Sequence[Sequence[ActivationRecord]], steps: int, family: ModelFamily
) -> CheckRow:
    means = {q: [geometric_mean([line.rms(q, axis.name) for line in seeds]) for seeds in lines] for q in QUANTITIES}
    parts = {quantity: slope(axis.sizes, values) for quantity, values in means.items()}
    trained = "early" if steps <= STEPS else "late"
    limits = {q: LIMITS[axis.name]["start" if q == "start" else trained] for q in QUANTITIES}
    limit = limits["change"]
    if any(math.isnan(value) for values in means.values() for value in values):
        return CheckRow(module, axis.name, None, limit, False, parts, "no number any more: lower the lr?", math.inf)
    still = _still(means, [line for seeds in lines for line in seeds])
    if still:
        return CheckRow(module, axis.name, None, limit, False, parts, still, math.inf)
    allowed = {q: _allowed(axis, module, [seeds[0] for seeds in lines], q, family.alpha) for q in QUANTITIES}
    beyond = {
        q: max(value - allowed[q][1], allowed[q][0] - value) - limits[q]
        for q, value in parts.items()
        if value is not None
    }
    if not beyond:
        return CheckRow(module, axis.name, None, limit, None, parts, "always 0")
    worst = max(beyond, key=lambda quantity: beyond[quantity])
    if beyond[worst] <= 0:
        return CheckRow(module, axis.name, parts["change"], limit, True, parts)
    note = _note(axis.name, module, parts[worst] or 0.0, family.rule is None)
    return CheckRow(module, axis.name, parts[worst], limits[worst], False, parts, note, beyond[worst])


def _still(means: dict[str, list[float]], lines: Sequence[ActivationRecord]) -> str:
    """Why there is no slope to judge where there has to be one: nothing moves, or at some sizes only."""
    if any(line.stuck for line in lines):
        return "its weights never move  <- an lr of 0, or no gradient within these steps?"
    if any(line.trained for line in lines) and not any(means["change"]):
        return "never moves  <- an lr of 0, or no gradient within these steps?"
    gone = [q for q, values in means.items() if 0 in values and any(values)]
    return f"{gone[0]} is 0 at some sizes only" if gone else ""


def _allowed(
    axis: SizeAxis, module: str, lines: Sequence[ActivationRecord], quantity: str, alpha: float
) -> tuple[float, float]:
    """The lowest and the highest slope there may be but for the limits; see the top of this file."""
    if axis.name == "width":
        # Behind the attention logits stands the head dimension: with one that does not grow they do not fall.
        logits = module.endswith(LOGITS)
        sums = (len({line.features for line in lines}) == 1) != logits
        return INDEPENDENT * sums, INDEPENDENT * (sums and logits and quantity == "start")
    inside = len(lines[-1].squares["start"]) > 1
    if inside and lines[-1].container:
        return INDEPENDENT, 0.0
    return (alpha - 1) * (inside and lines[-1].matrix and quantity != "start"), 0.0


def _note(axis: str, module: str, value: float, foreign: bool) -> str:
    """What usually does this. A recipe is checked from initial values of the check's own, a factory from its own."""
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
