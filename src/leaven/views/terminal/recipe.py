"""Show ``leaven show`` and ``leaven transfer`` in the terminal: the parameter table, initialisations and scaling
rules."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import RenderableType

from leaven.documents.runs import RuleDocument, ShowDocument
from leaven.recipe.init_std import COMPARED, INITS
from leaven.recipe.units import format_quantity
from leaven.views import numbers
from leaven.views.parameters import groups
from leaven.views.tables import Column, Fact, Facts, Table

_PARAMETERS = (
    Column("module", lambda group: group.label, align="left"),
    Column("layers", lambda group: group.layers, align="left"),
    Column("shape", lambda group: " x ".join(f"{size:,}" for size in group.row.shape), unit="(out, in)", drop=1),
    Column("role", lambda group: group.row.role.replace("_", " "), align="left", drop=2),
    Column("init", lambda group: numbers.value(group.row.init_std), unit="std", align="point"),
    Column("lr", lambda group: numbers.value(group.row.lr), unit="(a step)", align="point"),
    Column("decay", lambda group: numbers.value(group.row.weight_decay), unit="(x lr)", align="point"),
    Column("beta1", lambda group: numbers.value(group.row.beta1), align="point"),
    Column("beta2", lambda group: numbers.value(group.row.beta2), align="point"),
    Column("eps", lambda group: numbers.value(group.row.eps), align="point"),
    Column("multiplier", lambda group: numbers.value(group.row.multiplier), unit="(forward)", align="point"),
)


def parameters_screen(shown: ShowDocument) -> Iterator[RenderableType]:
    """Yield the resolved parameter table. Neighbouring layers with equal values have one line.

    ``lr`` is the peak lr of the parameter, and ``decay`` is its weight decay, which the optimizer multiplies by the
    lr.
    """
    scale = " ".join(f"{axis} x{shown.ratios[axis]:.3g}" for axis in ("width", "depth", "batch", "tokens"))
    yield Facts(
        [
            (shown.name, (f"{format_quantity(shown.totals.params)} parameters", f"rule {shown.rule}")),
            ("", (f"{scale} of the base",)),
        ]
    )
    yield Table.of(_PARAMETERS, groups(shown.parameters))


def transfer_screen(shown: ShowDocument) -> Iterator[RenderableType]:
    """Yield the parameter table and, if the recipe is the answer of a study, what its gain is worth at this size."""
    yield from parameters_screen(shown)
    if shown.worth:
        worth = [f"{row.times:.2f}" if math.isfinite(row.times) else "any number of" for row in shown.worth]
        text = (
            f"The study gained {shown.worth[0].gain:.4f} nats. If all of it carries over to this run, it is worth "
            f"{worth[0]} times the tokens; if half of it does, {worth[1]}; if a quarter does, {worth[2]} (loss law "
            "of Besiroglu et al. 2024). How much carries over is not known before."
        )
        yield Facts([("worth", (text,))])


def recipe_screen(shown: ShowDocument) -> Iterator[RenderableType]:
    """Yield the parameter table, settings of the whole model, and a table that compares initialisations."""
    yield from parameters_screen(shown)
    facts: list[Fact] = []
    if shown.start is not None:
        facts.append(("start", (f"from the weights in {shown.start}, not from init std",)))
    facts += [
        ("attention", (f"query . key x {numbers.value(shown.attention_scale)}",)),
        ("optimizer", (shown.optimizer["why"],)),
        ("clip", (shown.clip["why"],)),
    ]
    if (ramp := shown.ramp["why"]) is not None:
        facts.append(("ramp", (ramp,)))
    yield Facts(facts)
    yield from init_table(shown)


_SHARED = {
    "residual": "each branch",
    "attention": "attention logits x sqrt(d_head)",
    "half_life": "half-life of the moments, in steps",
}
_LETTERS = (
    "ratios target / base",
    "I, O fan in and fan out of the tensor (both equal m_N if all widths grow together)",
    "H head dimension",
    "L depth",
    "B batch",
    "D tokens",
    "t token exponent",
    "w 1 - alpha if scale_decay_with_depth, else 0",
    "0 switched off",
)


def rule_table(shown: RuleDocument) -> Iterator[RenderableType]:
    """Yield a scaling rule: a table of its factors by role and quantity, the factors that all roles share, and the
    meaning of the letters."""

    def cell(quantity: str) -> Callable[[str], str]:
        return lambda role: shown.roles[role][quantity].text

    def sources(role: str) -> list[str]:
        """Return the sources of a row. A source that several cells share is printed once."""
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
        (_SHARED.get(name, name.replace("_", " ")), (f"{cell.text}  ({cell.source})",))
        for name, cell in shown.shared.items()
    ]
    yield Facts([(shown.rule, (shown.source,))])
    yield Table.of(columns, shown.roles, sources)
    yield Facts([*shared, ("letters", _LETTERS)])


OWN = "this recipe"
# One module from each group that nearly all initialisations treat alike, with the order in which columns are
# dropped; --json prints every module.
SHOWN = (
    ("embedding", 0),
    ("attention.query", 0),
    ("attention.value", 2),
    ("attention.out", 0),
    ("mlp.gate", 1),
    ("mlp.in", 0),
    ("mlp.out", 0),
    ("unembedding", 0),
)


def init_table(shown: ShowDocument) -> Iterator[RenderableType]:
    """Yield the init std of matrices in this recipe and in each published initialisation."""
    init, found = shown.init, shown.init["starts"]
    there = [(module, drop) for module, drop in SHOWN if any(start["module"] == module for start in found)]
    columns = (
        Column("std", unit="of", align="left"),
        Column("block", align="left"),
        *(
            Column(module.partition(".")[0], unit=module.partition(".")[2], align="point", drop=drop)
            for module, drop in there
        ),
    )
    rows = [
        (name if n == 0 else "", block, *(_cell(found, module, name, n) for module, _ in there))
        for name in (OWN, *COMPARED)
        for n, block in enumerate(_blocks(found, name, shown.scale["depth"]))
    ]
    usual = f"sqrt(1 / (3 d)) is {numbers.value(init['usual_std'])} at d {shown.scale['width']:,}"
    nearest = [f"{each['init']} {each['octaves']:.2g} octaves" for each in init["nearest"][:3]]
    formulas = [f"{name} {published['std']}" for name, published in init["published"].items()]
    not_in_recipes = f"only to compare with: {', '.join(name for name in COMPARED if name not in INITS)}"
    yield Facts([("init", (init["why"], usual))])
    yield Table(columns, rows)
    yield Facts(
        [
            ("nearest", (*nearest, "the mean over all matrices")),
            ("formulas", (*formulas, not_in_recipes)),
            ("letters", ("d width", "L layers", "l layer from 0", "f fan in", "o fan out")),
        ]
    )


def _std(start: Mapping[str, Any], name: str) -> float:
    """Return the init std of a module in this recipe or in a published initialisation."""
    return float(start["std"] if name == OWN else start["published"][name])


def _blocks(found: Sequence[Mapping[str, Any]], name: str, n_layers: int) -> tuple[str, ...]:
    """Return ``all``, or the numbers of the first and the last block if their init stds differ."""
    for module in {start["module"] for start in found}:
        if len({_std(start, name) for start in found if start["module"] == module}) > 1:
            return "0", str(n_layers - 1)
    return ("all",)


def _cell(found: Sequence[Mapping[str, Any]], module: str, name: str, line: int) -> str:
    """Return the init std of a module in the first block (line 0) or the last block (line 1). Modules outside the
    blocks are on line 0."""
    there = [start for start in found if start["module"] == module]
    if line and not there[0]["layers"]:
        return ""
    return numbers.value(_std(there[-1 if line else 0], name))
