"""The bookkeeping of a rule: what has to stay when the model, the batch or the run grows, read off the optimiser.

Exact and without a step: a module's lr, eps, betas and decay at two scales, and the exponent by which a combination
of them moves with the ratio between the two. The combinations are the same in every form of a rule that trains alike
(multiplier x c, init / c, lr / c, eps x c, decay x c):

- ``lr x eps x entries`` (all entries of the module, in all layers) moves with nothing. A step changes the loss by
  lr x the sum of the gradient's sizes, as much at every scale, and eps goes as the gradient. That eps does so is
  what the gradients show; together they hold the lr of every module, gains among them.
- ``lr x decay x steps``, the share of a weight that goes in a run, moves with nothing; at alpha below 1 it may fall
  in depth as L^(alpha - 1).
- ``beta1``, ``beta2``: the half-life of the moments as a share of the run moves with nothing.
- ``lr`` grows as the root of the batch and falls as duration^-t, t from 0 to 1/2 (Malladi et al. 2022, arXiv
  2205.10287; the literature finds 0.3 to 0.5). With width and depth it moves as its form has it.

``both`` is width and depth at once: an exponent can be right on either axis alone and wrong where they meet. It shows
settings, not behaviour: that an optimiser of these numbers trains alike is for the other checks to say.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from leaven.verification.model_family import ModelFamily, ModelInstance
from leaven.verification.verdict import CheckRow

AXIS = "bookkeeping"
LIMIT = 0.01
"""On exponents that are exact: rounding only."""

FACTOR = 4.0
"""How much larger the batch is, or longer the run, against the family's own."""

COLUMNS = ("lr x eps x entries", "lr x decay x steps", "beta1", "beta2", "lr")
_REASONS = {
    "lr x eps x entries": "lr or eps moved alone?",
    "lr x decay x steps": "lr or decay moved alone?",
    "beta1": "its half-life is not the same share of a run",
    "beta2": "its half-life is not the same share of a run",
    "lr": "it should grow as batch^1/2, fall as tokens^-t",
}


@dataclass(frozen=True)
class GroupSettings:
    """What one parameter's group says. ``entries`` are those of its whole line, all layers."""

    lr: float
    eps: float
    decay: float
    betas: tuple[float, float]
    entries: int

    def value(self, column: str, steps: float) -> float:
        """A combination, in a run of a number of steps."""
        match column:
            case "lr x eps x entries":
                return self.lr * self.eps * self.entries
            case "lr x decay x steps":
                return self.lr * self.decay * steps
            case "lr":
                return self.lr
        beta = self.betas[column == "beta2"]
        return -math.log(2) / math.log(beta) / steps if beta else 0.0


SettingsByLine = Mapping[str, Sequence[GroupSettings]]
"""By line, a parameter after the other, from the first layer to the last."""


@dataclass(frozen=True)
class ScaleChange:
    """From one scale to another: ``ratio`` is that of what grows, ``steps`` that of the number of steps."""

    axis: str
    ratio: float
    small: SettingsByLine
    large: SettingsByLine
    steps: float = 1.0


def settings_of(instance: ModelInstance) -> SettingsByLine:
    """The settings of each parameter by line; parameters without an eps, which no Adam trains, are left out."""
    groups = {parameter: group for group in instance.optimizer.param_groups for parameter in group["params"]}
    lines: dict[str, list[tuple[dict[str, float], int]]] = {}
    for name, parameter in instance.model.named_parameters():
        label = instance.label(name)
        if label is not None and "eps" in groups.get(parameter, {}):
            lines.setdefault(label, []).append((dict(groups[parameter]), parameter.numel()))
    return {
        label: [
            GroupSettings(group["lr"], group["eps"], group["weight_decay"], tuple(group["betas"]), numel * len(line))  # type: ignore[arg-type]
            for group, numel in line
        ]
        for label, line in lines.items()
    }


def invariants(family: ModelFamily, settings: Mapping[tuple[int, int], SettingsByLine]) -> list[CheckRow]:
    """A row a line. ``settings`` are those width and depth; what else it takes is built here."""
    widths, depths = ({size[i] for size in settings} for i in (0, 1))
    base, far = (min(widths), min(depths)), (max(widths), max(depths))
    first = settings[base]
    steps = [ScaleChange("width", w / base[0], first, settings[w, base[1]]) for w in sorted(widths - {base[0]})]
    steps += [ScaleChange("depth", d / base[1], first, settings[base[0], d]) for d in sorted(depths - {base[1]})]
    if far not in settings:
        grown = far[0] * far[1] / (base[0] * base[1])
        steps.append(ScaleChange("both", grown, first, settings_of(family.build(*far, 0))))
    silent = []
    if family.takes_ratios:
        batch, tokens = (
            settings_of(family.build(*base, 0, batch=FACTOR)),
            settings_of(family.build(*base, 0, tokens=FACTOR)),
        )
        for step in (
            ScaleChange("batch", FACTOR, first, batch, 1 / FACTOR),
            ScaleChange("tokens", FACTOR, first, tokens, FACTOR),
        ):
            if step.small == step.large:
                silent.append(
                    CheckRow(step.axis, AXIS, None, None, None, {}, "nothing moves with it under this rule")
                )
            else:
                steps.append(step)
    return [_row(line, steps, family.alpha) for line in first] + silent


def _row(line: str, steps: Sequence[ScaleChange], alpha: float) -> CheckRow:
    worst: dict[str, float | None] = dict.fromkeys(COLUMNS)
    beyond, column, where = -math.inf, COLUMNS[0], ""
    for name in COLUMNS:
        found = -math.inf
        for step in steps:
            low, high = _allowed(name, step.axis, alpha)
            for value in _exponents(line, name, step) if name != "lr" or step.axis in {"batch", "tokens"} else []:
                off = max(low - value, value - high)
                if off > found:
                    found, worst[name] = off, value
                if off > beyond:
                    beyond, column, where = off, name, step.axis
    if not math.isfinite(beyond) and beyond < 0:
        return CheckRow(line, AXIS, None, None, None, worst, "all 0")
    passed = beyond <= LIMIT
    note = "" if passed else f"{column} moves with {'width and depth' if where == 'both' else where}  <- "
    return CheckRow(
        line, AXIS, worst[column], LIMIT, passed, worst, note and note + _REASONS[column], max(beyond, 0.0)
    )


def _exponents(line: str, column: str, step: ScaleChange) -> list[float]:
    """By parameter; with another number of layers those of the first and the last, at the same relative depth."""
    small, large = step.small[line], step.large[line]
    if len(small) != len(large):
        small, large = [small[0], small[-1]], [large[0], large[-1]]
    found = []
    for before, after in zip(small, large, strict=True):
        one, other = before.value(column, 1.0), after.value(column, step.steps)
        if one and other:
            found.append(math.log(other / one) / math.log(step.ratio))
        elif one != other:
            found.append(math.copysign(math.inf, other - one))
    return found


def _allowed(column: str, axis: str, alpha: float) -> tuple[float, float]:
    if column == "lr":
        return (0.5, 0.5) if axis == "batch" else (-0.5, 0.0)
    return (alpha - 1 if column == "lr x decay x steps" and axis in {"depth", "both"} else 0.0), 0.0
