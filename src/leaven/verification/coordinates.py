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

In the depth of a model, lines are compared at the same relative depth: modules inside blocks in the middle block,
streams after the last one. A mean over blocks would count the first, whose input no block has touched, for one half
at depth 2 and one sixteenth at depth 16, and bend every slope by +0.15.

What it cannot see: weight decay, eps far below the gradient, clipping, a readout that learns too slowly, anything
that needs many steps.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from leaven.verification.family import Family, Member
from leaven.verification.probe import LOGITS, Probe
from leaven.verification.verdict import Curve, Row, Verdict, curve, geometric_mean, slope

LIMITS = {"width": {"start": 0.10, "later": 0.20}, "depth": {"start": 0.15, "later": 0.30}}
"""On |slope|, log2 over log2, at the start and of what training changed. A wrong power of width or depth is 0.5 or 1,
and planted faults show as 0.4 or more. A right rule measured at most 0.06 at the start; later at most 0.14 in width
(64 to 256: alignment of updates with inputs still falls) and 0.28 in depth (2 to 16: few blocks are not many)."""

INDEPENDENT = -0.5
"""The slope of a mean of independent terms, in their number."""

HIDDEN_STD = 1.0
"""Hidden weights at 1/sqrt(fan in). With smaller ones the change of a module is mostly that of its own weights, whose
alignment with the input still falls at these widths (-0.13 for 64 to 256)."""

QUANTITIES = ("start", "end", "change")


@dataclass(frozen=True)
class Axis:
    """One direction: the members' widths and depths, of which only one grows."""

    name: str  # width | depth
    members: tuple[tuple[int, int], ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(member[self.name == "depth"] for member in self.members)


def axes(widths: Sequence[int], depths: Sequence[int]) -> tuple[Axis, ...]:
    """Widths at the smallest depth and depths at the smallest width; an axis of one size is none."""
    width = Axis("width", tuple((size, min(depths)) for size in sorted(set(widths))))
    depth = Axis("depth", tuple((min(widths), size) for size in sorted(set(depths))))
    return tuple(axis for axis in (width, depth) if len(axis.members) > 1)


@dataclass(frozen=True)
class Recorded:
    """What one module's line was in one run: mean squares by quantity, one a call, in the order of the calls."""

    squares: dict[str, tuple[float, ...]]
    features: int
    container: bool

    def rms(self, quantity: str, axis: str) -> float:
        """Over all calls in width; at one relative depth in depth."""
        values = self.squares[quantity]
        if axis == "depth":
            values = (values[-1 if self.container else len(values) // 2],)
        return math.sqrt(sum(values) / len(values))


Run = dict[str, Recorded]


def coordinates(
    family: Family,
    widths: Sequence[int],
    depths: Sequence[int],
    *,
    steps: int = 10,
    seeds: int = 3,
    lr_factor: float = 1.0,
    on_member: Callable[[int, int], None] = lambda done, total: None,
) -> Verdict:
    """Run the check; ``lr_factor`` multiplies every lr.

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
            rows.append(_row(axis, module, lines))
            curves += [
                curve(module, axis.name, quantity, axis.sizes, _by_seed(lines, quantity, axis))
                for quantity in QUANTITIES
            ]
    settings = {
        "widths": list(widths),
        "depths": list(depths),
        "steps": steps,
        "seeds": seeds,
        "lr_factor": lr_factor,
    }
    return Verdict(
        check="coordinates",
        subject=family.name,
        quantity="slope of log2 output RMS over log2 size",
        rows=tuple(rows),
        curves=tuple(curves),
        settings=settings,
    )


def record(member: Member, steps: int, lr_factor: float) -> Run:
    """Train a member for some steps on its first batch and say what its outputs were and became."""
    member.scale_lr(lr_factor)
    first: dict[str, Tensor] = {}
    with Probe(member.model, member.label) as probe:
        for step in range(steps + 1):
            loss = member.loss(0)
            outputs = probe.take()
            first = first or outputs
            if step < steps:
                member.optimizer.zero_grad(set_to_none=True)
                loss.backward()  # type: ignore[no-untyped-call]
                member.optimizer.step()
    return {
        name: Recorded(
            {
                "start": _squares(start),
                "end": _squares(outputs[name]),
                "change": _squares(outputs[name] - start),
            },
            features=probe.head_sizes.get(name, start.shape[-1]),
            container=name in probe.containers,
        )
        for name, start in first.items()
    }


def _squares(calls: Tensor) -> tuple[float, ...]:
    values: list[float] = calls.to(torch.float64).square().mean((1, 2)).tolist()
    return tuple(values)


def _by_seed(lines: Sequence[Sequence[Recorded]], quantity: str, axis: Axis) -> list[list[float]]:
    return [[line.rms(quantity, axis.name) for line in seeds] for seeds in lines]


def _row(axis: Axis, module: str, lines: Sequence[Sequence[Recorded]]) -> Row:
    means = {q: [geometric_mean(values) for values in _by_seed(lines, q, axis)] for q in QUANTITIES}
    parts = {quantity: slope(axis.sizes, values) for quantity, values in means.items()}
    limits = {q: LIMITS[axis.name]["start" if q == "start" else "later"] for q in QUANTITIES}
    limit = limits["change"]
    if any(math.isnan(value) for values in means.values() for value in values):
        return Row(module, axis.name, None, limit, False, parts, "no number any more: lower the lr?", math.inf)
    fall = INDEPENDENT if _may_fall(axis, module, [seeds[0] for seeds in lines]) else 0.0
    rise = dict.fromkeys(QUANTITIES, 0.0)
    if axis.name == "width" and module.endswith(LOGITS):
        rise["start"] = fall
    beyond = {q: max(value - rise[q], fall - value) - limits[q] for q, value in parts.items() if value is not None}
    if not beyond:
        return Row(module, axis.name, None, limit, None, parts, "always 0")
    worst = max(beyond, key=lambda quantity: beyond[quantity])
    if beyond[worst] <= 0:
        return Row(module, axis.name, parts["change"], limit, True, parts)
    note = _note(axis.name, module, parts[worst] or 0.0)
    return Row(module, axis.name, parts[worst], limits[worst], False, parts, note, beyond[worst])


def _may_fall(axis: Axis, module: str, lines: Sequence[Recorded]) -> bool:
    """Whether it is a sum of terms that start independent; see the top of this file."""
    if axis.name == "width":
        # Behind the attention logits stands the head dimension: with one that does not grow they do not fall.
        return (len({line.features for line in lines}) == 1) != module.endswith(LOGITS)
    return lines[-1].container and len(lines[-1].squares["start"]) > 1


def _note(axis: str, module: str, value: float) -> str:
    """What usually does this."""
    if value < 0:
        hint = "scaled twice?" if axis == "width" else "branches scaled twice, by an init of 1/sqrt(2L) as well?"
        return f"SHRINKS with {axis}  <- {hint}"
    if axis == "depth":
        hint = "branches not multiplied by depth^-alpha?"
    elif module.endswith(LOGITS):
        hint = "query . key divided by sqrt(d) while d grows?"
    else:
        hint = "lr or init not divided by width?"
    return f"GROWS with {axis}  <- {hint}"
