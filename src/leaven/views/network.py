"""The network as a picture: a row a module, a column a layer, coloured by learning rate against the global one."""

import math

from leaven.recipe.recipe import Recipe
from leaven.scaling.table import ParameterRow, ParameterTable
from leaven.views import numbers
from leaven.views.html import Html, element, join
from leaven.views.parameters import label


def picture(recipe: Recipe, table: ParameterTable) -> Html:
    """Inline SVG bands with names beside them. What stands outside the blocks spans all layers."""
    base = recipe.hyperparameters.lr
    rows: dict[str, list[ParameterRow]] = {}
    for row in table.rows:
        rows.setdefault(label(row), []).append(row)
    reach = max((abs(math.log2(row.lr / base)) for row in table.rows if row.lr > 0), default=0.0)
    # Whole octaves for a legend in round numbers; what lies a little beyond has the full colour.
    reach = max(math.ceil(reach - 0.25), 1)
    n_layers = recipe.model.n_layers
    body = [_band(name, members, base, reach, n_layers) for name, members in rows.items()]
    numbering = element("div", *_numbers(n_layers), class_="net-layers", aria_hidden="true")
    axis = join(
        element("span", "layer", class_="net-name"), numbering, element("span", "lr / base", class_="net-range")
    )
    return join(
        element("div", axis, *body, class_="net", role="list"),
        element(
            "p",
            "Point at a block, or tap it, to read its values.",
            class_="readout",
            aria_live="polite",
        ),
        element(
            "p",
            element("span", "lower lr"),
            chips(reach, 4),
            element("span", f"higher lr; 1× is the base lr, {numbers.value(base)}"),
            class_="scale",
        ),
    )


def _numbers(n_layers: int) -> list[Html]:
    """The first layer, the last, and few enough between them to be read on a phone."""
    every = next(step for step in (1, 2, 4, 5, 10, 20, 50, 100, 1000) if n_layers / step <= 12)
    return [
        element("span", i, style=f"left:{100 * (i + 0.5) / n_layers:.4g}%")
        for i in range(n_layers)
        if i % every == 0 and (i == n_layers - 1 or n_layers - 1 - i >= every / 2 or i == 0)
    ]


def _band(name: str, members: list[ParameterRow], base: float, reach: int, n_layers: int) -> Html:
    inside = members[0].layer is not None
    columns = n_layers if inside else 1
    # The same few pixels between two layers as between twenty; between a hundred there is no room.
    gap = 0.008 * columns if 1 < columns <= 40 else 0.0
    cells = []
    for row in members:
        x = row.layer or 0
        factor = row.lr / base
        told = (
            f"{row.name.removesuffix('.weight')}: lr {numbers.value(row.lr)}, {numbers.ratio(factor)} the base lr of "
            f"{numbers.value(base)}; init std {numbers.value(row.init_std)}, "
            f"weight decay {numbers.value(row.weight_decay)}"
        )
        cells.append(
            element(
                "rect",
                element("title", told),
                x=f"{x + gap / 2:.4g}",
                y="0",
                width=f"{1 - gap:.4g}",
                height="1",
                style=f"fill:{shade(factor, reach)}",
                data_told=told,
            )
        )
    svg = element(
        "svg",
        *cells,
        viewBox=f"0 0 {columns} 1",
        preserveAspectRatio="none",
        role="img",
        aria_label=f"{name}: {_range(members, base)}",
    )
    return join(
        element("span", name, class_="net-name"),
        element("div", svg, class_="net-band" if inside else "net-band outside"),
        element("span", _range(members, base), class_="net-range"),
    )


def _range(members: list[ParameterRow], base: float) -> str:
    rates = [row.lr / base for row in members]
    return numbers.span(min(rates), max(rates), numbers.ratio)


def shade(factor: float, reach: int) -> str:
    """Below the base lr towards one colour, above it towards the other, in octaves; at it neither."""
    if factor <= 0:
        return "var(--neutral)"
    octaves = math.log2(factor)
    share = min(abs(octaves) / reach, 1.0)
    side = "var(--high)" if octaves > 0 else "var(--low)"
    return f"color-mix(in oklab, {side} {100 * share:.0f}%, var(--neutral))"


def chips(reach: int, most: int) -> list[Html]:
    """The colours of ``shade`` with their factors: whole octaves, at most so many to either side of 1×."""
    every = -(-reach // most)
    return [
        element("span", element("i", style=f"background:{shade(2.0**step, reach)}"), " ", numbers.ratio(2.0**step))
        for step in range(-(reach // every) * every, reach + 1, every)
    ]
