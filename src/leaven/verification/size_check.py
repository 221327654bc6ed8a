"""Short checks: train small models of several widths and depths for some steps and compare what was measured."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from leaven.verification.model_family import ModelFamily, ModelInstance
from leaven.verification.verdict import CheckCurve, CheckRow, Verdict, conclusive, curve, more_sizes

Measured = TypeVar("Measured")
"""What a check measures of one module or parameter in one run."""


@dataclass(frozen=True)
class SizeAxis:
    """Models of which only the width or only the depth grows."""

    name: str  # width | depth
    scales: tuple[tuple[int, int], ...]  # (width, depth) of each model
    where: str = ""  # follows the name in a table, e.g. " at depth 16"

    @property
    def title(self) -> str:
        return self.name + self.where

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(scale[self.name == "depth"] for scale in self.scales)


def axes(widths: Sequence[int], depths: Sequence[int]) -> tuple[SizeAxis, ...]:
    """Return the widths at the smallest depth and the depths at the smallest width, without axes of a single size."""
    width = SizeAxis("width", tuple((size, min(depths)) for size in sorted(set(widths))))
    depth = SizeAxis("depth", tuple((min(widths), size) for size in sorted(set(depths))))
    return tuple(axis for axis in (width, depth) if len(axis.scales) > 1)


def corner(widths: Sequence[int], depths: Sequence[int]) -> tuple[SizeAxis, ...]:
    """Return the narrowest and the widest model at the largest depth, where a rule right on each axis may fail."""
    if len(set(widths)) < 2 or len(set(depths)) < 2:
        return ()
    scales = tuple((width, max(depths)) for width in (min(widths), max(widths)))
    return (SizeAxis("width", scales, f" at depth {max(depths)}"),)


def compare_sizes(
    check: str,
    quantity: str,
    family: ModelFamily,
    chosen: Sequence[SizeAxis],
    *,
    record: Callable[[ModelInstance, int, float], Mapping[str, Measured]],
    judge: Callable[[SizeAxis, str, Sequence[Sequence[Measured]]], CheckRow],
    curves: Mapping[str, Callable[[Measured, SizeAxis], float]],
    widths: Sequence[int],
    depths: Sequence[int],
    steps: int,
    seeds: int,
    lr_factor: float,
    on_member: Callable[[int, int], None],
) -> Verdict:
    """Measure each model with ``record`` for every seed, and judge each module on each axis.

    ``judge`` gets the measurements of one module by size and seed; ``curves`` has the quantities to draw.
    """
    wanted = sorted({scale for axis in chosen for scale in axis.scales})
    measured: dict[tuple[int, int], list[Mapping[str, Measured]]] = {}
    for number, scale in enumerate(wanted):
        measured[scale] = [record(family.build(*scale, seed), steps, lr_factor) for seed in range(seeds)]
        on_member(number + 1, len(wanted))
    rows: list[CheckRow] = []
    drawn: list[CheckCurve] = []
    for axis in chosen:
        for module in measured[axis.scales[0]][0]:
            lines = [[run[module] for run in measured[scale]] for scale in axis.scales]
            rows.append(conclusive(replace(judge(axis, module, lines), axis=axis.title), axis.sizes, seeds))
            for name, value in curves.items():
                by_seed = [[value(line, axis) for line in by_size] for by_size in lines]
                drawn.append(curve(module, axis.title, name, axis.sizes, by_seed))
    return Verdict(
        check=check,
        subject=family.name,
        quantity=quantity,
        rows=tuple(rows),
        curves=tuple(drawn),
        settings={
            "rule": family.rule,
            "widths": list(widths),
            "depths": list(depths),
            "steps": steps,
            "seeds": seeds,
            "lr_factor": lr_factor,
        },
        advice=more_sizes(widths, depths),
    )
