"""Invariants of a rule: combinations of optimiser settings that must not change with the model, batch or run length.

They are computed exactly, without a training step, from a module's lr, eps, betas and decay at two scales: the
exponent of a combination over the ratio of the scales. The combinations have the same value for all parametrizations
that train alike (multiplier x c, init / c, lr / c, eps x c, decay x c):

- ``lr x eps x entries`` (all entries of the module, in all layers) is constant. A step changes the loss by lr x the
  sum of absolute gradients, which is the same at every scale, and eps scales as the gradient. The gradient check
  tests the latter; together they determine the lr of every module, also of gains.
- ``lr x decay x steps``, the share by which a weight shrinks in a run, is constant; at alpha below 1 it may fall with
  depth as L^(alpha - 1).
- ``beta1``, ``beta2``: the half-life of the moments, relative to the run, is constant.
- ``lr`` grows as the square root of the batch and falls as duration^-t, t from 0 to 1/2 (Malladi et al. 2022, arXiv
  2205.10287; the literature finds 0.3 to 0.5). Over width and depth it depends on the
  parametrization.

``both`` is width and depth at once: an exponent can be right on each axis and wrong where both grow. Only settings
are checked here; the other checks show whether training behaves alike.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from leaven.verification.model_family import ModelFamily, ModelInstance
from leaven.verification.verdict import CheckRow

AXIS = "bookkeeping"
LIMIT = 0.01
"""Limit on the exponents, which are exact but for rounding."""

FACTOR = 4.0
"""Ratio of the larger batch, or of the longer run, to the family's own."""

COLUMNS = ("lr x eps x entries", "lr x decay x steps", "beta1", "beta2", "lr")
_REASONS = {
    "lr x eps x entries": "lr or eps changed without the other?",
    "lr x decay x steps": "lr or decay changed without the other?",
    "beta1": "its half-life is not the same fraction of the run",
    "beta2": "its half-life is not the same fraction of the run",
    "lr": "it should grow as batch^1/2, fall as tokens^-t",
}


@dataclass(frozen=True)
class GroupSettings:
    """The optimiser settings of one parameter."""

    lr: float
    eps: float
    decay: float
    betas: tuple[float, float]
    entries: int  # of all parameters with the same label, in all layers

    def value(self, column: str, steps: float) -> float:
        """Return the value of a combination, for a run of ``steps``."""
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
"""Settings by label, from the first layer to the last."""


@dataclass(frozen=True)
class ScaleChange:
    """A pair of scales to compare."""

    axis: str
    ratio: float  # of what grows
    small: SettingsByLine
    large: SettingsByLine
    steps: float = 1.0  # ratio of the number of steps


def settings_of(instance: ModelInstance) -> SettingsByLine:
    """Return the settings of each parameter by label, without parameters whose optimiser has no eps."""
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
    """Return one row for each label. ``settings`` has those by width and depth; other models are built here."""
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
    """Pair the parameters of two scales; if the number of layers differs, pair the first and the last layers."""
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
