"""Check without training how a scaling rule changes the optimizer settings with the scale of a run.

The scale is the width and depth of the model, the batch size, and the tokens of the run. For each module, the check
computes the combinations listed below from the settings at two scales. A combination's exponent says how it changes:
it is -2 if the combination falls to a quarter at twice the width. The check compares each exponent with that of a
correct rule, for which these statements hold:

- ``lr x eps x entries`` is constant. Entries is the number of weights of the module, in all layers together. A step
  of Adam changes the loss by lr x entries x (mean absolute gradient). A correct rule keeps this change constant. It
  also makes eps proportional to the mean absolute gradient (see the gradient check).
- ``lr x decay x steps``, the share by which a weight shrinks in a run, is constant. There is one exception: if the
  rule multiplies residual branches by L^-alpha at depth L, with alpha below 1, the share may fall with the depth, but
  no faster than L^(alpha - 1).
- ``beta1`` and ``beta2``: the half-life of each moment of Adam is a constant share of the run.
- ``lr`` grows as the square root of the batch size (Malladi et al. 2022, arXiv 2205.10287). It falls with the tokens
  of the run as tokens^-t, with t from 0 to 1/2 (the literature finds 0.3 to 0.5). Over width and depth, the exponent
  of the lr depends on the parametrization and is not judged.

A parametrization can be written in several ways: a run trains identically if a module's multiplier, eps and decay are
multiplied by c, and its init and lr are divided by c. The products lr x eps and lr x decay do not depend on c. A rule
can be right over width and over depth, but wrong if both grow, so a scale that is larger in both is compared, too.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from leaven.documents.checks import VerdictRow
from leaven.verification.foreign import ForeignFamily
from leaven.verification.model_instance import ModelInstance, RunScale
from leaven.verification.small_models import SmallModels
from leaven.verification.verdict import Exponent

AXIS = "bookkeeping"
LIMIT = 0.01  # how far an exponent may be outside its allowed range, because of rounding errors
FACTOR = 4.0  # larger batch / the family's batch, and longer run / the family's run

# The usual cause of a wrong exponent, by combination.
_REASONS = {
    "lr x eps x entries": "was only one of lr and eps changed?",
    "lr x decay x steps": "was only one of lr and decay changed?",
    "beta1": "its half-life should be the same fraction of every run",
    "beta2": "its half-life should be the same fraction of every run",
    "lr": "it should grow as batch^1/2, and fall as tokens^-t with t from 0 to 1/2",
}
Combinations = dict[str, list[dict[str, float]]]
"""For each module label, one dictionary per layer. It maps combinations, such as "lr x decay x steps", to values."""


def combinations(instance: ModelInstance, n_layers: int, steps: float = 1.0) -> Combinations:
    """Return each parameter's combinations of settings (listed in the module docstring), by module label.

    Parameters that neither AdamW nor Muon trains are left out. ``steps``: those of the run / of the smallest scale.
    """
    groups = {parameter: group for group in instance.optimizer.param_groups for parameter in group["params"]}
    found: dict[str, list[tuple[dict[str, Any], int, bool]]] = {}
    for name, parameter in instance.model.named_parameters():
        label = instance.label(name)
        group = groups.get(parameter, {})
        if label is not None and ("eps" in group or "match" in group):
            inside = numbers(name) > numbers(label)  # a label has no number of a layer
            settings = {"eps": 0.0, "betas": (0.0, 0.0)} | group
            found.setdefault(label, []).append((settings, parameter.numel(), inside))

    def half_life(beta: float) -> float:
        return -math.log(2) / math.log(beta) / steps if beta else 0.0

    return {
        label: [
            {
                "lr x eps x entries": group["lr"] * group["eps"] * (numel * (n_layers if inside else 1)),
                "lr x decay x steps": group["lr"] * group["weight_decay"] * steps,
                "beta1": half_life(group["betas"][0]),
                "beta2": half_life(group["betas"][1]),
                "lr": group["lr"],
            }
            for group, numel, inside in layers
        ]
        for label, layers in found.items()
    }


def numbers(name: str) -> int:
    """Return how many dot-separated parts of a name or label are numbers: 1 for ``layers.3.mlp``."""
    return sum(part.isdigit() for part in name.split("."))


@dataclass(frozen=True)
class ScaleChange:
    """The optimizer settings at one scale, and its size relative to the smallest scale."""

    axis: str  # what is larger: width | depth | both | batch | tokens
    ratio: float  # larger size / smallest size; for both, the product of the ratios of width and depth
    at: Combinations  # the combinations of optimizer settings at the larger scale


def invariants(family: SmallModels | ForeignFamily, widths: Sequence[int], depths: Sequence[int]) -> list[VerdictRow]:
    """Return a row for each module label: the verdict on how its optimizer settings change with the scale."""
    width, depth = min(widths), min(depths)
    wider, deeper = sorted({*widths} - {width}), sorted({*depths} - {depth})

    def at(w: int, d: int) -> Combinations:
        return combinations(family.build(RunScale(w, d), 0), d)

    base = at(width, depth)
    changes = [ScaleChange("width", w / width, at(w, depth)) for w in wider]
    changes += [ScaleChange("depth", d / depth, at(width, d)) for d in deeper]
    if wider and deeper:
        grown = wider[-1] * deeper[-1] / (width * depth)
        changes.append(ScaleChange("both", grown, at(wider[-1], deeper[-1])))
    ignored = []
    for axis, steps in (("batch", 1 / FACTOR), ("tokens", FACTOR)) if family.takes_ratios else ():
        instance = family.build(RunScale(width, depth, **{axis: FACTOR}), 0)
        if combinations(instance, depth) != base:
            changes.append(ScaleChange(axis, FACTOR, combinations(instance, depth, steps)))
        else:
            note = f"the rule changes nothing with the {axis}"
            ignored.append(VerdictRow(module=axis, axis=AXIS, slope=None, limit=None, passed=None, note=note))
    return [_row(label, base[label], changes, family.alpha) for label in base] + ignored


def _row(label: str, base: Sequence[Mapping[str, float]], changes: Sequence[ScaleChange], alpha: float) -> VerdictRow:
    judged = [
        (Exponent(name, value, *_allowed(name, change.axis, alpha), LIMIT), change.axis)
        for name in _REASONS
        for change in changes
        if name != "lr" or change.axis in {"batch", "tokens"}
        for value in _exponents(name, base, change.at[label], change.ratio)
    ]
    # For each combination, the exponent that is farthest outside its range; the first of several.
    largest = {each.what: each.value for each, _ in sorted(reversed(judged), key=lambda pair: pair[0].outside)}
    row = partial(VerdictRow, module=label, axis=AXIS, parts={name: largest.get(name) for name in _REASONS})
    if not judged:
        return row(slope=None, limit=None, passed=None, note="all 0")
    worst, axis = max(judged, key=lambda pair: pair[0].outside)
    if worst.beyond <= 0:
        return row(slope=worst.value, limit=LIMIT, passed=True, beyond=max(worst.outside, 0.0))
    axis = "width and depth" if axis == "both" else axis
    note = f"{worst.what} changes with {axis}  <- {_REASONS[worst.what]}"
    return row(slope=worst.value, limit=LIMIT, passed=False, note=note, beyond=worst.outside)


def _exponents(
    column: str, small: Sequence[Mapping[str, float]], large: Sequence[Mapping[str, float]], ratio: float
) -> list[float]:
    """Return, for each layer, the exponent p in ``large[column] = small[column] * ratio^p``.

    ``ratio`` is the size ratio of the models. If the value of a layer is 0 in both models, the layer is left out. If
    it is 0 in one model, p is infinite. If the models differ in depth, only their first and last layers are compared.
    """
    if len(small) != len(large):
        small, large = [small[0], small[-1]], [large[0], large[-1]]
    found = []
    for before, after in zip(small, large, strict=True):
        one, other = before[column], after[column]
        if one and other:
            found.append(math.log(other / one) / math.log(ratio))
        elif one != other:
            found.append(math.copysign(math.inf, other - one))
    return found


def _allowed(column: str, axis: str, alpha: float) -> tuple[float, float]:
    """Return the lowest and highest allowed exponent with which ``column`` changes along ``axis``."""
    if column == "lr":
        return (0.5, 0.5) if axis == "batch" else (-0.5, 0.0)
    return (alpha - 1 if column == "lr x decay x steps" and axis in {"depth", "both"} else 0.0), 0.0
