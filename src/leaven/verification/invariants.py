"""Invariants of a rule: combinations of optimizer settings that must not change with the model, batch or run length.

The check reads a module's lr, eps, betas and decay at two scales, and computes the exponent of each combination over
the ratio of the scales. This is exact and needs no training step. Some parametrizations are equivalent in training
(multiplier x c, init / c, lr / c, eps x c, decay x c). A combination has the same value for all of them.

- ``lr x eps x entries`` is constant, where the entries are those of the module in all layers. A step changes the loss
  by lr x the sum of absolute gradients, and this change is the same at every scale. Also, eps scales like the
  gradient, which the gradient check tests. Together these two conditions determine the lr of every module, including
  the gains.
- ``lr x decay x steps`` is constant. It is the share by which a weight shrinks in a run. If alpha (the depth exponent
  of the branch multipliers) is below 1, it may fall with the depth L as L^(alpha - 1).
- ``beta1`` and ``beta2`` stand for the half-lives of Adam's moments, relative to the length of the run. They are
  constant.
- ``lr`` grows as the square root of the batch (Malladi et al. 2022, arXiv 2205.10287). It falls as duration^-t with t
  from 0 to 1/2; the literature finds 0.3 to 0.5. It is not judged over width and depth, where the right exponent
  depends on the parametrization.

The axis ``both`` changes width and depth at once, because an exponent can be right on each axis and wrong if both
grow. This check reads only settings. The other checks show whether training behaves in the same way at all scales.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from leaven.documents.checks import VerdictRow
from leaven.verification.model_instance import ModelInstance, RunScale
from leaven.verification.subject import ModelFamily

AXIS = "bookkeeping"
LIMIT = 0.01
"""The limit on how far an exponent may be outside its allowed range. It only allows for rounding errors."""

FACTOR = 4.0
"""The larger batch is this many times the family's batch, and the longer run has this many times its tokens."""

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
    """The optimizer settings of one parameter, and the number of entries of all parameters with its label."""

    lr: float
    eps: float
    decay: float
    betas: tuple[float, float]
    entries: int  # of all parameters with the same label, in all layers

    def value(self, column: str, steps: float) -> float:
        """Return the value of the combination named ``column``, for a run of ``steps``."""
        match column:
            case "lr x eps x entries":
                return self.lr * self.eps * self.entries
            case "lr x decay x steps":
                return self.lr * self.decay * steps
            case "lr":
                return self.lr
        beta = self.betas[column == "beta2"]
        return -math.log(2) / math.log(beta) / steps if beta else 0.0


SettingsByLabel = Mapping[str, Sequence[GroupSettings]]
"""A mapping from each label to the settings of its parameters, from the first layer to the last."""


@dataclass(frozen=True)
class ScaleChange:
    """A larger scale, and how it differs from the smallest scale."""

    axis: str
    ratio: float  # by which the axis grows
    settings: SettingsByLabel
    steps: float = 1.0  # by which the number of steps grows


def settings_of(instance: ModelInstance) -> SettingsByLabel:
    """Return a mapping from each label to the settings of its parameters. Parameters without an eps in their
    optimizer group are left out."""
    groups = {parameter: group for group in instance.optimizer.param_groups for parameter in group["params"]}
    found: dict[str, list[tuple[dict[str, Any], int]]] = {}
    for name, parameter in instance.model.named_parameters():
        label = instance.label(name)
        if label is not None and "eps" in groups.get(parameter, {}):
            found.setdefault(label, []).append((groups[parameter], parameter.numel()))
    return {
        label: [
            GroupSettings(
                group["lr"], group["eps"], group["weight_decay"], tuple(group["betas"]), numel * len(layers)
            )
            for group, numel in layers
        ]
        for label, layers in found.items()
    }


def invariants(family: ModelFamily, widths: Sequence[int], depths: Sequence[int]) -> list[VerdictRow]:
    """Return the rows of the check: a judged row for each label. If the settings do not change with the batch or with
    the tokens, add a row that says so."""
    width, depth = min(widths), min(depths)

    def at(scale: RunScale) -> SettingsByLabel:
        return settings_of(family.build(scale, 0))

    base = at(RunScale(width, depth))
    wider, deeper = sorted({*widths} - {width}), sorted({*depths} - {depth})
    changes = [ScaleChange("width", w / width, at(RunScale(w, depth))) for w in wider]
    changes += [ScaleChange("depth", d / depth, at(RunScale(width, d))) for d in deeper]
    if wider and deeper:
        grown = wider[-1] * deeper[-1] / (width * depth)
        changes.append(ScaleChange("both", grown, at(RunScale(wider[-1], deeper[-1]))))
    ignored = []
    if family.takes_ratios:
        batch, tokens = (at(RunScale(width, depth, **{axis: FACTOR})) for axis in ("batch", "tokens"))
        for change in (
            ScaleChange("batch", FACTOR, batch, 1 / FACTOR),
            ScaleChange("tokens", FACTOR, tokens, FACTOR),
        ):
            if change.settings == base:
                note = "the rule changes nothing with it"
                ignored.append(
                    VerdictRow(module=change.axis, axis=AXIS, slope=None, limit=None, passed=None, note=note)
                )
            else:
                changes.append(change)
    return [_row(label, base, changes, family.alpha) for label in base] + ignored


def _row(label: str, base: SettingsByLabel, changes: Sequence[ScaleChange], alpha: float) -> VerdictRow:
    worst: dict[str, float | None] = dict.fromkeys(COLUMNS)
    beyond, column, where = -math.inf, COLUMNS[0], ""
    for name in COLUMNS:
        found = -math.inf
        for change in changes:
            if name == "lr" and change.axis not in {"batch", "tokens"}:
                continue
            low, high = _allowed(name, change.axis, alpha)
            for value in _exponents(name, base[label], change.settings[label], change):
                off = max(low - value, value - high)
                if off > found:
                    found, worst[name] = off, value
                if off > beyond:
                    beyond, column, where = off, name, change.axis
    row = partial(VerdictRow, module=label, axis=AXIS, parts=worst)
    if beyond == -math.inf:
        return row(slope=None, limit=None, passed=None, note="all 0")
    if beyond <= LIMIT:
        return row(slope=worst[column], limit=LIMIT, passed=True, beyond=max(beyond, 0.0))
    axis = "width and depth" if where == "both" else where
    note = f"{column} changes with {axis}  <- {_REASONS[column]}"
    return row(slope=worst[column], limit=LIMIT, passed=False, note=note, beyond=beyond)


def _exponents(
    column: str, small: Sequence[GroupSettings], large: Sequence[GroupSettings], change: ScaleChange
) -> list[float]:
    """Return the exponents of a combination between two scales, one for each pair of layers.

    If the scales have different numbers of layers, only the first layers and the last layers are compared. An
    exponent is infinite if the combination is 0 at one scale only.
    """
    if len(small) != len(large):
        small, large = [small[0], small[-1]], [large[0], large[-1]]
    found = []
    for before, after in zip(small, large, strict=True):
        one, other = before.value(column, 1.0), after.value(column, change.steps)
        if one and other:
            found.append(math.log(other / one) / math.log(change.ratio))
        elif one != other:
            found.append(math.copysign(math.inf, other - one))
    return found


def _allowed(column: str, axis: str, alpha: float) -> tuple[float, float]:
    """Return the lowest and the highest exponent that a combination may have over an axis."""
    if column == "lr":
        return (0.5, 0.5) if axis == "batch" else (-0.5, 0.0)
    return (alpha - 1 if column == "lr x decay x steps" and axis in {"depth", "both"} else 0.0), 0.0
