"""The gradient check: does eps move with the gradient it is added to, and does decay keep its pace?

AdamW divides by ``sqrt(v) + eps``, so eps is neutral at every scale if it moves as the gradient does. For each group
of parameters the exponent of its gradient's RMS, as measured, has to equal the exponent of its eps, as the optimiser
has it. The coordinate check cannot see this while eps is small; at scale the gradients fall, and eps bites first in
the embedding and the hidden weights (Everett et al. 2024, arXiv 2407.05872).

Beside it stands the bookkeeping of decay: PyTorch's AdamW shrinks a weight by lr x weight_decay a step, so a rule
that lowers the lr with width and forgets the decay lets it vanish. No check of activations sees that within a few
steps. The product has to keep its exponent 0.

Gains of query and key norms that all heads share are sums over heads: independent signs at the start, coherent after
about 150 steps, where the exponent of 0 that their eps has is measured. They are judged in width from there on.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from leaven.verification.coordinates import Axis, axes
from leaven.verification.family import Family, Member
from leaven.verification.verdict import Curve, Row, Verdict, curve, geometric_mean, slope

START_LIMIT, END_LIMIT = 0.15, 0.25
"""On the distance between the two exponents. Widths 64 to 512 and depths 2 to 32 measured at most 0.14 at the start;
later, models of different width have learnt different amounts and the slopes drift (-0.77 for -1 after 20 steps)."""

COHERENT_STEPS = 150
WARMUP_STEPS = 20
HIDDEN_STD = 0.5
"""Hidden weights at half of 1/sqrt(fan in): the branches of a few blocks are then small beside the embedding, as
those of many are, and the gradients inside have their exponent of depth from depth 2 on."""


@dataclass(frozen=True)
class Recorded:
    """One parameter line in one run: RMS of its gradient at the first and the last step, and its settings."""

    start: float
    end: float
    eps: float
    decay: float  # lr x weight_decay, the share of a weight that goes in a step
    shape: tuple[int, ...]
    layers: int


Run = dict[str, Recorded]


def gradients(
    family: Family,
    widths: Sequence[int],
    depths: Sequence[int],
    *,
    steps: int = 20,
    seeds: int = 3,
    lr_factor: float = 0.125,
    on_member: Callable[[int, int], None] = lambda done, total: None,
) -> Verdict:
    """Run the check over the same members as the coordinate check; ``lr_factor`` multiplies every lr.

    A fraction of the lr for training keeps the members' gradients comparable: at all of it, without a schedule, the
    slopes of gains scatter by 0.3 after 20 steps; from 1/16 to 1/4 of it they stay within the limits.

    Raises:
        InputError: if the family has no member of one of these sizes.
    """
    chosen = axes(widths, depths)
    wanted = sorted({member for axis in chosen for member in axis.members})
    recorded: dict[tuple[int, int], list[Run]] = {}
    for number, member in enumerate(wanted):
        recorded[member] = [record(family.build(*member, seed), steps, lr_factor) for seed in range(seeds)]
        on_member(number + 1, len(wanted))
    rows: list[Row] = []
    curves: list[Curve] = []
    for axis in chosen:
        for module in recorded[axis.members[0]][0]:
            lines = [[run[module] for run in recorded[member]] for member in axis.members]
            rows.append(_row(axis, module, lines, steps))
            curves += [
                curve(
                    module, axis.name, name, axis.sizes, [[getattr(line, name) for line in seeds] for seeds in lines]
                )
                for name in ("start", "end", "eps")
            ]
    return Verdict(
        check="gradients",
        subject=family.name,
        quantity="slope of log2 gradient RMS over log2 size, less that of eps",
        rows=tuple(rows),
        curves=tuple(curves),
        settings={
            "widths": list(widths),
            "depths": list(depths),
            "steps": steps,
            "seeds": seeds,
            "lr_factor": lr_factor,
        },
    )


def record(member: Member, steps: int, lr_factor: float) -> Run:
    """Train a member for some steps on new batches, with a warm-up, and say what its gradients were and became.

    ``end`` is taken over the last quarter of the steps: a gain has few entries, and one batch is noise.
    """
    first: dict[str, float] = {}
    late: list[dict[str, float]] = []
    member.scale_lr(lr_factor)
    peaks = [group["lr"] for group in member.optimizer.param_groups]
    for step in range(steps + 1):
        member.optimizer.zero_grad(set_to_none=True)
        member.loss(step).backward()  # type: ignore[no-untyped-call]
        if step == 0:
            first = _gradients(member)
        if step >= steps - steps // 4:
            late.append(_gradients(member))
        if step < steps:
            for peak, group in zip(peaks, member.optimizer.param_groups, strict=True):
                group["lr"] = peak * min((step + 1) / WARMUP_STEPS, 1.0)
            member.optimizer.step()
    settings = {
        parameter: (group.get("eps", 0.0), peak * group.get("weight_decay", 0.0))
        for peak, group in zip(peaks, member.optimizer.param_groups, strict=True)
        for parameter in group["params"]
    }
    run: Run = {}
    for name, parameter in member.model.named_parameters():
        label = member.label(name)
        if label is not None and label in first:
            layers = run[label].layers + 1 if label in run else 1
            eps, decay = settings[parameter]
            end = math.sqrt(sum(gradient[label] ** 2 for gradient in late) / len(late))
            run[label] = Recorded(first[label], end, eps, decay, tuple(parameter.shape), layers)
    return run


def _gradients(member: Member) -> dict[str, float]:
    """RMS of the gradient by line, over all entries of all layers."""
    sums: dict[str, tuple[float, int]] = {}
    for name, parameter in member.model.named_parameters():
        label = member.label(name)
        if label is not None and parameter.grad is not None:
            total, count = sums.get(label, (0.0, 0))
            sums[label] = (total + float(parameter.grad.double().square().sum()), count + parameter.numel())
    return {label: math.sqrt(total / count) for label, (total, count) in sums.items()}


def _row(axis: Axis, module: str, lines: Sequence[Sequence[Recorded]], steps: int) -> Row:
    def exponent(name: str) -> float | None:
        return slope(axis.sizes, [geometric_mean([getattr(line, name) for line in seeds]) for seeds in lines])

    parts = {name: exponent(name) for name in ("start", "end", "eps", "decay")}
    start, end, eps, decay = (parts[name] for name in ("start", "end", "eps", "decay"))
    if eps is None:
        return Row(module, axis.name, None, None, None, parts, "no eps")
    shared = axis.name == "width" and lines[0][0].layers > 1 and len({seeds[0].shape for seeds in lines}) == 1
    gaps: list[tuple[float | None, float]] = [(start, START_LIMIT), (end, END_LIMIT)]
    if shared:
        gaps = [(end, START_LIMIT)] if steps >= COHERENT_STEPS else []
    judged = [(abs(value - eps) - limit, value - eps, limit) for value, limit in gaps if value is not None]
    if decay is not None:
        judged.append((abs(decay) - START_LIMIT, decay, START_LIMIT))
    if any(not math.isfinite(seed.end) for seeds in lines for seed in seeds):
        return Row(module, axis.name, None, START_LIMIT, False, parts, "no number any more: lower the lr?", math.inf)
    if not judged:
        note = f"shared by all heads: judged from {COHERENT_STEPS} steps on" if shared else "always 0"
        return Row(module, axis.name, None, None, None, parts, note)
    beyond, value, limit = max(judged)
    if beyond <= 0:
        return Row(module, axis.name, value, limit, True, parts)
    return Row(module, axis.name, value, limit, False, parts, _note(axis.name, value, beyond, decay), beyond)


def _note(axis: str, value: float, beyond: float, decay: float | None) -> str:
    if decay is not None and beyond == abs(decay) - START_LIMIT:
        change = "FALLS" if decay < 0 else "GROWS"
        return f"lr x decay {change} with {axis}  <- decay not moved against the lr?"
    return f"eps {'GROWS' if value < 0 else 'FALLS'} against the gradient with {axis}"
