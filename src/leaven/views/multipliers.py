"""What was found for each module, as a picture of the network: a row a module, a column a kind of multiplier."""

import math
from typing import TYPE_CHECKING

from leaven.recipe.hyperparameters import DepthProfile, Multipliers
from leaven.recipe.recipe import Recipe
from leaven.views import numbers
from leaven.views.figures import MUTED, PAPER, figure, log_axis, plotly
from leaven.views.html import Html, element
from leaven.views.network import chips, shade
from leaven.views.tables import HEADERS, scroll

if TYPE_CHECKING:
    import plotly.graph_objects as go

NAMES = HEADERS | {"lr": "lr", "residual": "residual"}
DEPTH = "every block"  # the row of the depth profiles


def kinds(recipe: Recipe, space: tuple[str, ...]) -> list[str]:
    """The kinds of multipliers that are searched per module or over depth, or that the recipe has anyhow."""
    values = recipe.hyperparameters
    searched = {path.rpartition(".")[2].partition("[")[0] for path in space if _per_module(path)}
    return [
        kind
        for kind in Multipliers.model_fields
        if kind in searched
        or any(getattr(module, kind) != 1 for module in values.modules.values())
        or set(getattr(values.depth, kind)) != {1.0}
    ]


def _per_module(path: str) -> bool:
    return path.startswith(("hyperparameters.modules.", "hyperparameters.depth."))


def acts(recipe: Recipe, module: str, kind: str) -> bool:
    """Whether a module has anything that such a multiplier multiplies."""
    return recipe.hyperparameters.refusal(recipe.model.roles, module, kind) is None


def layers(recipe: Recipe, module: str, kind: str) -> list[float]:
    """The multiplier of a module by layer, times that of the depth; only one where the module is in no block."""
    own = getattr(recipe.hyperparameters.modules.get(module, Multipliers()), kind)
    if not _inside(recipe)[module]:
        return [own]
    return [own * over for over in profile(recipe, kind)]


def profile(recipe: Recipe, kind: str) -> list[float]:
    """The multiplier of the depth by layer."""
    count = recipe.model.n_layers
    return [DepthProfile.at(getattr(recipe.hyperparameters.depth, kind), layer, count) for layer in range(count)]


def _inside(recipe: Recipe) -> dict[str, bool]:
    return {parameter.module: parameter.layer is not None for parameter in recipe.model.parameters()}


def picture(recipe: Recipe, space: tuple[str, ...]) -> Html | None:
    """Bands of layers, coloured by multiplier on a logarithmic scale round 1; None without any multipliers."""
    columns = kinds(recipe, space)
    if not columns:
        return None
    shown = {
        (module, kind): layers(recipe, module, kind)
        for module in recipe.model.modules
        for kind in columns
        if acts(recipe, module, kind)
    }
    over_depth = {kind: profile(recipe, kind) for kind in columns if set(profile(recipe, kind)) != {1.0}}
    every = [factor for band in (*shown.values(), *over_depth.values()) for factor in band if factor > 0]
    reach = max(math.ceil(max(abs(math.log2(factor)) for factor in every) - 0.25), 1)
    head = [
        element("span", "", class_="net-name"),
        *(element("span", NAMES[kind]) for kind in columns),
    ]
    rows = []
    if over_depth:
        bands = [_band(f"{DEPTH}, {NAMES[kind]}", over_depth.get(kind), reach, "", "depth") for kind in columns]
        rows += [element("span", DEPTH, class_="net-name quiet"), *bands]
    for module in recipe.model.modules:
        rows.append(element("span", module, class_="net-name"))
        own = recipe.hyperparameters.modules.get(module, Multipliers())
        for kind in columns:
            state = "searched" if f"hyperparameters.modules.{module}.{kind}" in space else "left"
            name, number = f"{module}, {NAMES[kind]}", numbers.ratio(getattr(own, kind))
            rows.append(_band(name, shown.get((module, kind)), reach, number, state))
    grid = element("div", *head, *rows, class_="multipliers", style=f"--kinds:{len(columns)}")
    readout = element("p", "Point at a band, or tap it, to read its layers.", class_="readout", aria_live="polite")
    legend = element("p", chips(reach, 3), element("span", "of the global value"), class_="scale")
    return element("div", scroll(grid, "multipliers of every module"), readout, legend, class_="told-by")


def _band(name: str, factors: list[float] | None, reach: int, number: str, state: str) -> Html:
    """One multiplier over the layers, and beside it ``number``: that of the module, without that of the depth."""
    if factors is None:
        return element("span", class_="band none")
    told = f"{name}: {numbers.ratio(factors[0])}"
    if len(set(factors)) > 1:
        told = f"{name}, layer by layer: {', '.join(map(numbers.ratio, factors))}"
    if state == "left":
        told += "; not searched"
    svg = element(
        "svg",
        *(
            element("rect", x=i, y=0, width=1.02, height=1, style=f"fill:{shade(factor, reach)}")
            for i, factor in enumerate(factors)
        ),
        viewBox=f"0 0 {len(factors)} 1",
        preserveAspectRatio="none",
        role="img",
        aria_label=told,
        data_told=told,
    )
    return element("span", svg, element("small", number), class_=f"band {state}")


def depth(recipe: Recipe, space: tuple[str, ...]) -> "go.Figure | None":
    """The multipliers over depth, a line a kind, a dot a layer; None where there is no profile."""
    found = {kind: getattr(recipe.hyperparameters.depth, kind) for kind in kinds(recipe, space)}
    found = {kind: points for kind, points in found.items() if len(points) > 1}
    if not found:
        return None
    go = plotly()
    chart = figure("layer", "multiplier")
    last = recipe.model.n_layers - 1
    for i, (kind, points) in enumerate(found.items(), 1):
        colour = f"var(--hue-{i})"
        fine = 10 * (len(points) - 1)
        between = [round(DepthProfile.at(points, i, fine + 1), 5) for i in range(fine + 1)]
        line = {"color": colour, "width": 2}
        x = [last * i / fine for i in range(fine + 1)]
        chart.add_trace(go.Scatter(x=x, y=between, mode="lines", line=line, hoverinfo="skip"))
        marker = {"color": colour, "size": 8, "line": {"color": PAPER, "width": 1.5}}
        said = f"<b>{NAMES[kind]}</b><br>layer %{{x}}: ×%{{y:.3~g}}<extra></extra>"
        y = [round(factor, 5) for factor in profile(recipe, kind)]
        chart.add_trace(go.Scatter(x=list(range(last + 1)), y=y, mode="markers", marker=marker, hovertemplate=said))
        place = {"x": last, "xshift": 8, "xanchor": "left", "y": math.log10(points[-1])}
        chart.add_annotation(**place, text=NAMES[kind], showarrow=False, font={"size": 12, "color": colour})
    chart.add_hline(y=1, line={"color": MUTED, "width": 1, "dash": "dot"}, layer="below")
    every = [point for points in found.values() for point in points] + [1.0]
    log_axis(chart, "yaxis", min(every), max(every), numbers.ratio, pad=0.12)
    chart.update_layout(margin={"l": 48, "r": 90, "t": 26, "b": 44})
    ticks = [place for place in numbers.linear_ticks(0, max(last, 1), 10) if place == int(place)]
    chart.update_xaxes(range=[-0.2, last + 0.2], tickvals=ticks)
    return chart


def summary(recipe: Recipe, space: tuple[str, ...]) -> str:
    """The farthest multipliers of the modules, in words."""
    factors = [
        (getattr(multipliers, kind), module, kind)
        for module, multipliers in recipe.hyperparameters.modules.items()
        for kind in kinds(recipe, space)
        if getattr(multipliers, kind) > 0
    ]
    if not factors:
        return "All modules have the global value."
    high, low = max(factors), min(factors)
    names = [
        f"{NAMES[kind].replace('peak ', '')} of {module} {numbers.ratio(factor)}"
        for factor, module, kind in (low, high)
    ]
    return f"From {names[0]} to {names[1]}."
