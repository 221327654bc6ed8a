"""Prepare a recipe for a page: learning rates in colour, the parameter table, and reasons for values."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from leaven.recipe.hyperparameters import DepthProfile, Multipliers
from leaven.recipe.recipe import Recipe, flatten
from leaven.scaling.table import ParameterRow, parameter_table
from leaven.views import numbers
from leaven.views.parameters import HEADERS, LayerGroup, by_label, reason

KINDS = HEADERS | {"lr": "lr", "residual": "residual"}  # displayed names of the values that a multiplier can change


def recipe_view(recipe: Recipe, beside: Recipe | None, names: tuple[str, str]) -> Mapping[str, Any]:
    """Return the variables of the macros in ``recipe.html.j2``. ``names`` are titles, that of ``beside`` first."""
    table = parameter_table(recipe)
    mine = by_label(table.rows)
    others = by_label(parameter_table(beside).rows) if beside else {}

    def line(name: str, rows: Sequence[ParameterRow]) -> Mapping[str, Any]:
        first, base = rows[0], others.get(name, [])
        cells = [  # (lowest and highest value in ``beside`` or None, the same in ``recipe``, reason)
            (_range(base, quantity), _range(rows, quantity), f"{header}: {reason(recipe, table, first, quantity)}")
            for quantity, header in HEADERS.items()
        ]
        group = LayerGroup(name, first.layer, rows[-1].layer, first)
        return {"group": group, "base": base[0] if base else None, "size": math.prod(first.shape), "cells": cells}

    return {
        "recipe": recipe,
        "names": names if beside else names[1:],
        "headers": list(HEADERS.values()),
        "rule": table.rule,
        "ratios": table.ratios,
        "lines": [line(name, rows) for name, rows in mine.items()],
        "network": _network(mine, recipe.hyperparameters.lr),
        "reasons": reasons(recipe),
    }


def _range(rows: Sequence[ParameterRow], quantity: str) -> tuple[float, float] | None:
    values = [getattr(row, quantity) for row in rows]
    return (min(values), max(values)) if values else None


def _network(rows: Mapping[str, Sequence[ParameterRow]], lr: float) -> Mapping[str, Any]:
    factors = {name: [row.lr / lr for row in members] for name, members in rows.items()}
    reach = octaves_shown([factor for band in factors.values() for factor in band])
    bands = [
        (name, [_band(f"{name}, lr", found, reach, numbers.span(min(found), max(found), numbers.ratio))])
        for name, found in factors.items()
    ]
    return {"kinds": ["lr / base"], "rows": bands, "chips": chips(reach)}


def _band(label: str, factors: Sequence[float], reach: int, text: str, state: str = "") -> Mapping[str, Any]:
    """Return a band of the page: a cell for each layer, coloured by :func:`shade`, and ``text`` beside the cells.

    ``state`` is "left" for a multiplier that the study did not search, "depth" for depth multipliers, or else "".
    """
    layers = ", layer by layer" if len(set(factors)) > 1 else ""
    shown = ", ".join(map(numbers.ratio, factors if layers else factors[:1]))
    return {
        "label": f"{label}{layers}: {shown}{'; not searched' if state == 'left' else ''}",
        "cells": [shade(factor, reach) for factor in factors],
        "text": text,
        "state": state,
    }


def octaves_shown(factors: Sequence[float]) -> int:
    """Return how far ``factors`` reach from 1, in whole octaves (factors of 2), but at least 1."""
    farthest = max((abs(math.log2(factor)) for factor in factors if factor > 0), default=0.0)
    return max(math.ceil(farthest - 0.25), 1)


def shade(factor: float, reach: int) -> str:
    """Return the CSS colour of a factor: neutral for 1 or 0, strongest at ``reach`` or more octaves from 1."""
    if factor <= 0:
        return "var(--neutral)"
    octaves = math.log2(factor)
    share = min(abs(octaves) / reach, 1.0)
    side = "var(--high)" if octaves > 0 else "var(--low)"
    return f"color-mix(in oklab, {side} {100 * share:.0f}%, var(--neutral))"


def chips(reach: int) -> list[tuple[str, float]]:
    """Return the legend of :func:`shade`: pairs (colour, factor) of 1 and up to three powers of 2 on each side."""
    every = -(-reach // 3)
    steps = range(-(reach // every) * every, reach + 1, every)
    return [(shade(2.0**step, reach), 2.0**step) for step in steps]


def reasons(recipe: Recipe) -> Mapping[str | None, list[tuple[list[str], str]]]:
    """Return a recipe's values, as (keys of the path, text), by their reason under ``[why]``; None without one."""
    document = recipe.model_dump(exclude={"why", "name", "tuning"}, exclude_none=True)
    found: dict[str | None, list[tuple[list[str], str]]] = {}
    for path, setting in flatten(document).items():
        neutral = path.startswith(("hyperparameters.modules.", "hyperparameters.depth.")) and setting in (1.0, (1.0,))
        if not neutral and setting not in ({}, ()):
            # A key of [why] is the path of a value, a list item (hyperparameters.depth.lr[2]) or a section.
            known = [key for key in recipe.why if path == key.partition("[")[0] or path.startswith(f"{key}.")]
            reason = recipe.why[max(known, key=len)] if known else None
            found.setdefault(reason, []).append((path.split("."), numbers.setting(setting)))
    return found


def multiplier_kinds(recipe: Recipe, space: Sequence[str]) -> list[str]:
    """Return each kind of multiplier, such as ``lr``, that differs from 1 or has a searched path in ``space``."""
    values = recipe.hyperparameters
    per_module = ("hyperparameters.modules.", "hyperparameters.depth.")
    searched = {path.rpartition(".")[2].partition("[")[0] for path in space if path.startswith(per_module)}
    return [
        kind
        for kind in Multipliers.model_fields
        if kind in searched
        or any(getattr(module, kind) != 1 for module in values.modules.values())
        or set(getattr(values.depth, kind)) != {1.0}
    ]


def acts(recipe: Recipe, module: str, kind: str) -> bool:
    """Return whether a multiplier ``kind``, such as ``init_std``, has an effect on ``module``, such as ``mlp.in``."""
    return recipe.hyperparameters.refusal(recipe.model.roles, module, kind) is None


def over_depth(recipe: Recipe, kind: str) -> list[float]:
    count, points = recipe.model.n_layers, getattr(recipe.hyperparameters.depth, kind)
    return [DepthProfile.at(points, layer, count) for layer in range(count)]


def module_layers(recipe: Recipe, module: str, kind: str) -> list[float]:
    """Return a module's multiplier of ``kind`` x the depth multiplier, for each layer. A module outside the layers
    has one number, without the depth multiplier."""
    own = getattr(recipe.hyperparameters.modules.get(module, Multipliers()), kind)
    inside = any(each.module == module and each.layer is not None for each in recipe.model.parameters())
    return [own * over for over in over_depth(recipe, kind)] if inside else [own]


def multipliers_view(recipe: Recipe, space: Sequence[str]) -> Mapping[str, Any] | None:
    """Return the table of the multipliers in a study's best recipe, or None without multipliers."""
    kinds = multiplier_kinds(recipe, space)
    if not kinds:
        return None
    modules, own = recipe.model.modules, recipe.hyperparameters.modules
    layers = {(m, kind): module_layers(recipe, m, kind) for m in modules for kind in kinds if acts(recipe, m, kind)}
    depth = {kind: profile for kind in kinds if set(profile := over_depth(recipe, kind)) != {1.0}}
    reach = octaves_shown([factor for band in (*layers.values(), *depth.values()) for factor in band])

    def band(module: str, kind: str) -> Mapping[str, Any] | None:
        if (module, kind) not in layers:
            return None
        state = "" if f"hyperparameters.modules.{module}.{kind}" in space else "left"
        number = numbers.ratio(getattr(own.get(module, Multipliers()), kind))
        return _band(f"{module}, {KINDS[kind]}", layers[module, kind], reach, number, state)

    rows = [(module, [band(module, kind) for kind in kinds]) for module in modules]
    if depth:
        block = "every block"
        profiles = [
            _band(f"{block}, {KINDS[kind]}", depth[kind], reach, "", "depth") if kind in depth else None
            for kind in kinds
        ]
        rows.insert(0, (block, profiles))
    factors = [
        (getattr(m, kind), name, kind) for name, m in own.items() for kind in kinds if getattr(m, kind) not in (0, 1)
    ]
    ends = [(KINDS[kind], name, factor) for factor, name, kind in ((min(factors), max(factors)) if factors else ())]
    return {"kinds": [KINDS[kind] for kind in kinds], "rows": rows, "chips": chips(reach), "ends": ends}
