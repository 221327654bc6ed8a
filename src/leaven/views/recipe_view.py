"""Prepare a recipe for a page: the parameter table, and reasons for values."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from leaven.recipe.recipe import Recipe, flatten
from leaven.scaling.table import ParameterRow, parameter_table
from leaven.views import numbers
from leaven.views.parameters import HEADERS, LayerGroup, by_label, reason


def recipe_view(recipe: Recipe, beside: Recipe | None, names: tuple[str, str]) -> Mapping[str, Any]:
    """Return the variables of the macros in ``recipe.html.j2``, by name.

    ``beside`` is a recipe to show next to ``recipe``, or None. ``names`` are the titles of the two columns,
    ``beside`` first.
    """
    table = parameter_table(recipe)
    mine = by_label(table.rows)
    others = by_label(parameter_table(beside).rows) if beside else {}

    def line(name: str, rows: Sequence[ParameterRow]) -> Mapping[str, Any]:
        """Return the table line of the parameter ``name``. ``rows`` has its row in each layer.
        The line has one cell for each quantity, such as lr: (range over the layers of ``beside``, range over the
        layers of ``recipe``, reason). The first range is None if ``beside`` does not have the parameter."""
        first, base = rows[0], others.get(name, [])
        cells = [
            (_range(base, quantity), _range(rows, quantity), f"{header}: {reason(recipe, table, first, quantity)}")
            for quantity, header in HEADERS.items()
        ]
        group = LayerGroup(name, first.layer, rows[-1].layer, first)
        return {"group": group, "base": base[0] if base else None, "size": math.prod(first.shape), "cells": cells}

    return {
        "names": names if beside else names[1:],
        "headers": list(HEADERS.values()),
        "rule": table.rule,
        "ratios": table.ratios,
        "lines": [line(name, rows) for name, rows in mine.items()],
        "reasons": reasons(recipe),
    }


def _range(rows: Sequence[ParameterRow], quantity: str) -> tuple[float, float] | None:
    values = [getattr(row, quantity) for row in rows]
    return (min(values), max(values)) if values else None


def reasons(recipe: Recipe) -> Mapping[str | None, list[tuple[list[str], str]]]:
    """Return a recipe's values by their reason under ``[why]``. Values without a reason are under None.

    A value is (keys of its path, text). The name, [tuning], multipliers of 1 and empty values are left out.
    """
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
