"""Show the results of ``leaven show`` and ``leaven transfer`` in the terminal."""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rich.console import RenderableType

from leaven.documents.runs import RuleDocument, ShowDocument
from leaven.recipe.init_std import COMPARED, INITS
from leaven.recipe.units import format_parameters
from leaven.views import numbers
from leaven.views.parameters import LayerGroup, groups
from leaven.views.tables import Column, Fact, Facts, Table
from leaven.views.terminal.findings import written


def _number(header: str, unit: str = "", quantity: str = "") -> Column:
    """Return a table column with this header. It shows the field ``quantity`` of each row, by default ``header``."""
    field = quantity or header

    def text(group: LayerGroup) -> str:
        without = group.row.match and field in {"beta2", "eps"}  # Muon has neither
        return "-" if without else numbers.value(getattr(group.row, field))

    return Column(header, text, unit=unit, align="point")


_PARAMETERS = (
    Column("module", lambda group: group.label, align="left"),
    Column("layers", lambda group: group.layers, align="left"),
    Column("shape", lambda group: " x ".join(f"{size:,}" for size in group.row.shape), unit="(out, in)", drop=1),
    Column("role", lambda group: group.row.role.replace("_", " "), align="left", drop=2),
    _number("init", "std", "init_std"),
    _number("lr", "(a step)"),
    _number("decay", "(x lr)", "weight_decay"),
    _number("beta1"),
    _number("beta2"),
    _number("eps"),
    _number("multiplier", "(forward)"),
)


def parameters_screen(shown: ShowDocument) -> Iterator[RenderableType]:
    """Yield a recipe's size, its ratios to the base, and the parameters. Layers with equal values share a row."""
    scale = " ".join(f"{axis} x{shown.ratios[axis]:.3g}" for axis in ("width", "depth", "batch", "tokens"))
    size = format_parameters(shown.totals.params, shown.totals.params_active)
    yield Facts((shown.name, (size, f"rule {shown.rule}")), ("", f"{scale} of the base"))
    yield Table.of(_PARAMETERS, groups(shown.parameters))


def transfer_screen(shown: ShowDocument) -> Iterator[RenderableType]:
    """Yield the parameter table. If a study chose the values, also yield how many tokens its gain is worth."""
    yield from parameters_screen(shown)
    if shown.worth:
        worth = [f"{row.times:.2f}" if math.isfinite(row.times) else "any number of" for row in shown.worth]
        text = (
            f"The study gained {shown.worth[0].gain:.4f} nats. If this run gains as much, that is worth {worth[0]} "
            f"times the tokens; half of the gain is worth {worth[1]} times, and a quarter {worth[2]} times (loss law "
            "of Besiroglu et al. 2024). How much of the gain this run keeps is known only after the run."
        )
        yield Facts(("worth", text))


def recipe_screen(shown: ShowDocument) -> Iterator[RenderableType]:
    """Yield the parameter table, the settings of the whole model, and a table that compares initialisations."""
    yield from parameters_screen(shown)
    facts: list[Fact] = []
    if shown.start is not None:
        facts.append(("start", f"from the weights in {shown.start}, not from init std"))
    experts = shown.blocks.get("experts") or {}
    blocks = {key: value for key, value in shown.blocks.items() if key != "experts"}
    for label, settings in (("blocks", blocks), ("experts", experts)):
        if settings:
            facts.append((label, " · ".join(f"{key} {written(value)}" for key, value in settings.items())))
    facts += [
        ("attention", f"query . key x {numbers.value(shown.attention_scale)}"),
        ("optimizer", shown.optimizer["why"]),
        ("clip", shown.clip["why"]),
    ]
    if (ramp := shown.ramp["why"]) is not None:
        facts.append(("ramp", ramp))
    yield Facts(*facts)
    yield from init_table(shown)


_SHARED = {
    "residual": "each branch",
    "attention": "attention logits x sqrt(d_head)",
    "half_life": "half-life of the moments, in steps",
    "lr (Muon)": "lr of hidden weights with Muon",
    "weight_decay (Muon)": "weight decay of hidden weights with Muon",
}
_LETTERS = (
    "ratios target / base",
    "I, O fan in and fan out of the tensor (the papers scale all widths by one ratio, m_N)",
    "H head dimension",
    "L depth",
    "B batch",
    "D tokens",
    "M factor on Muon's steps, from the shape of the matrix",
    "t token exponent",
    "w 1 - alpha if scale_decay_with_depth, else 0",
    "0 switched off",
)


def rule_table(shown: RuleDocument) -> Iterator[RenderableType]:
    """Yield a table of a scaling rule's factors by parameter role, its other factors, and a legend."""

    def cell(quantity: str) -> Callable[[str], str]:
        return lambda role: shown.roles[role][quantity].text

    def sources(role: str) -> list[str]:
        by_source: dict[str, list[str]] = {}
        for quantity, cell in shown.roles[role].items():
            by_source.setdefault(cell.source, []).append(quantity.replace("_", " "))
        return [f"{', '.join(quantities)}: {source}" for source, quantities in by_source.items()]

    columns = (
        Column("role", lambda role: role.replace("_", " "), align="left"),
        Column("init", cell("init_variance"), unit="variance", align="left"),
        Column("lr", cell("lr"), align="left"),
        Column("eps", cell("eps"), align="left"),
        Column("weight", cell("weight_decay"), unit="decay", align="left"),
        Column("forward", cell("forward"), align="left"),
    )
    shared = [
        (_SHARED.get(name, name.replace("_", " ")), f"{cell.text}  ({cell.source})")
        for name, cell in shown.shared.items()
    ]
    yield Facts((shown.rule, shown.source))
    yield Table.of(columns, shown.roles, sources)
    yield Facts(*shared, ("letters", _LETTERS))


OWN = "this recipe"
# The modules with a column in the table of initialisations, and their `Column.drop`. Most initialisations treat the
# other modules like one of these; --json prints every module.
SHOWN = (
    ("embedding", 0),
    ("attention.query", 0),
    ("attention.value", 2),
    ("attention.out", 0),
    ("mlp.gate", 1),
    ("mlp.in", 0),
    ("mlp.out", 0),
    ("mlp.router", 0),
    ("mlp.experts.gate", 1),
    ("mlp.experts.in", 0),
    ("mlp.experts.out", 0),
    ("mlp.shared.gate", 3),
    ("mlp.shared.in", 3),
    ("mlp.shared.out", 1),
    ("unembedding", 0),
)


def init_table(shown: ShowDocument) -> Iterator[RenderableType]:
    """Yield a table of the init std in this recipe and in published initialisations, with reasons and formulas."""
    init, n_layers = shown.init, shown.scale["depth"]
    by_module: dict[str, list[Mapping[str, Any]]] = {}  # the matrices of each module, in the order of the layers
    for start in init["starts"]:
        by_module.setdefault(start["module"], []).append(start)
    modules = [(module, drop) for module, drop in SHOWN if module in by_module]
    columns = (
        Column("std", unit="of", align="left"),
        Column("block", align="left"),
        *(
            Column(module.partition(".")[0], unit=module.partition(".")[2], align="point", drop=drop)
            for module, drop in modules
        ),
    )
    rows = []
    for name in (OWN, *COMPARED):
        stds = {
            module: [float(start["std"] if name == OWN else start["published"][name]) for start in starts]
            for module, starts in by_module.items()
        }
        if all(len(set(each)) == 1 for each in stds.values()):
            rows.append([name, "all", *(numbers.value(stds[module][0]) for module, _ in modules)])
        else:  # a row for the first block and one for the last; modules outside the blocks are in the first row
            rows.append([name, "0", *(numbers.value(stds[module][0]) for module, _ in modules)])
            last = [numbers.value(stds[m][-1]) if by_module[m][0]["layers"] else "" for m, _ in modules]
            rows.append(["", str(n_layers - 1), *last])
    usual = f"sqrt(1 / (3 d)) is {numbers.value(init['usual_std'])} at d {shown.scale['width']:,}"
    nearest = [f"{each['init']} {each['octaves']:.2g} octaves" for each in init["nearest"][:3]]
    formulas = [f"{name} {published['std']}" for name, published in init["published"].items()]
    not_in_recipes = f"not available in recipes: {', '.join(name for name in COMPARED if name not in INITS)}"
    yield Facts(("init", (init["why"], usual)))
    yield Table(columns, rows)
    yield Facts(
        ("nearest", (*nearest, "mean distance over all matrices; an octave is a factor of 2")),
        ("formulas", (*formulas, not_in_recipes)),
        ("letters", ("d width", "L layers", "l layer from 0", "f fan in", "o fan out")),
    )
