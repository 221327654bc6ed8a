"""``leaven show`` and ``leaven transfer`` in the terminal: parameter table, initialisations and scaling rules."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import RenderableType

from leaven.documents.runs import ParameterValues, RuleDocument, ShowDocument
from leaven.recipe.init_std import COMPARED, INITS
from leaven.recipe.units import format_quantity
from leaven.views import numbers
from leaven.views.parameters import LAYER, QUANTITIES
from leaven.views.terminal.tables import Column, Columns, Fact, Facts

PARAMETER_COLUMNS = (
    Column("module", align="left"),
    Column("layers", align="left"),
    Column("shape", "(out, in)", drop=1),
    Column("role", align="left", drop=2),
    Column("init", "std", align="point"),
    Column("lr", "(a step)", align="point"),
    Column("decay", "(x lr)", align="point"),
    Column("beta1", align="point"),
    Column("beta2", align="point"),
    Column("eps", align="point"),
    Column("multiplier", "(forward)", align="point"),
)


def parameter_table(shown: ShowDocument) -> Iterator[RenderableType]:
    """The resolved parameter table, neighbouring layers with equal values as one line.

    ``lr`` is the parameter's own peak and ``decay`` is multiplied by it, both as the optimizer receives them.
    """
    scale = " ".join(f"{axis} x{shown.ratios[axis]:.3g}" for axis in ("width", "depth", "batch", "tokens"))
    yield Facts(
        [
            (shown.name, (f"{format_quantity(shown.totals.params)} parameters", f"rule {shown.rule}")),
            ("", (f"{scale} of the base",)),
        ]
    )
    rows = [
        (
            label,
            _layers(group),
            " x ".join(f"{size:,}" for size in group[0].shape),
            group[0].role.replace("_", " "),
            *(numbers.value(getattr(group[0], quantity)) for quantity in QUANTITIES),
        )
        for label, groups in _layer_groups(shown.parameters).items()
        for group in groups
    ]
    yield Columns(PARAMETER_COLUMNS, rows)


def _layer_groups(rows: Sequence[ParameterValues]) -> dict[str, list[list[ParameterValues]]]:
    """Parameters by name without the layer; those of neighbouring layers with equal values are one group."""
    by_label: dict[str, list[list[ParameterValues]]] = {}
    for row in rows:
        groups = by_label.setdefault(LAYER.sub("", row.name).removesuffix(".weight"), [])
        if groups and all(getattr(groups[-1][0], key) == getattr(row, key) for key in ("shape", *QUANTITIES)):
            groups[-1].append(row)
        else:
            groups.append([row])
    return by_label


def _layers(group: Sequence[ParameterValues]) -> str:
    first, last = group[0].layer, group[-1].layer
    if first is None:
        return ""
    return f"{first}" if first == last else f"{first}-{last}"


def recipe_screen(shown: ShowDocument) -> Iterator[RenderableType]:
    """``leaven show``: the parameter table, settings of the whole model, and the initialisations side by side."""
    yield from parameter_table(shown)
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


RULE_COLUMNS = (
    Column("role", align="left"),
    Column("init", "variance", align="left"),
    Column("lr", align="left"),
    Column("eps", align="left"),
    Column("weight", "decay", align="left"),
    Column("forward", align="left"),
)
_SHARED = {
    "residual": "each branch",
    "attention": "attention logits x sqrt(d_head)",
    "half_life": "half-life of the moments, in steps",
}
_LETTERS = (
    "ratios target / base",
    "I, O the tensor's own fan in and fan out (both are m_N where all widths grow together)",
    "H head dimension",
    "L depth",
    "B batch",
    "D tokens",
    "t token exponent",
    "w 1 - alpha if scale_decay_with_depth, else 0",
    "0 switched off",
)


def rule_table(shown: RuleDocument) -> Iterator[RenderableType]:
    """A scaling rule: role x quantity, then what all roles share and what the letters stand for."""
    rows, notes = [], []
    for role, cells in shown.roles.items():
        rows.append((role.replace("_", " "), *(cell.text for cell in cells.values())))
        # A source that several cells of a row share is printed once.
        by_source: dict[str, list[str]] = {}
        for quantity, cell in cells.items():
            by_source.setdefault(cell.source, []).append(quantity.replace("_", " "))
        notes.append([f"{', '.join(quantities)}: {source}" for source, quantities in by_source.items()])
    shared = [
        (_SHARED.get(name, name.replace("_", " ")), (f"{cell.text}  ({cell.source})",))
        for name, cell in shown.shared.items()
    ]
    yield Facts([(shown.rule, (shown.source,))])
    yield Columns(RULE_COLUMNS, rows, notes)
    yield Facts([*shared, ("letters", _LETTERS)])


OWN = "this recipe"
# One module of each group that nearly all inits treat alike, with its drop order; --json has every module.
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
    """The init std of every matrix in this recipe, and what each published initialisation would give it."""
    init, found = shown.init, shown.init["starts"]
    there = [(module, drop) for module, drop in SHOWN if any(start["module"] == module for start in found)]
    columns = (
        Column("std", "of", align="left"),
        Column("block", align="left"),
        *(Column(*module.partition(".")[::2], align="point", drop=drop) for module, drop in there),
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
    yield Columns(columns, rows)
    yield Facts(
        [
            ("nearest", (*nearest, "the mean over all matrices")),
            ("formulas", (*formulas, not_in_recipes)),
            ("letters", ("d width", "L layers", "l layer from 0", "f fan in", "o fan out")),
        ]
    )


def _std(start: Mapping[str, Any], name: str) -> float:
    """The std of a module in this recipe, or by a published initialisation."""
    return float(start["std"] if name == OWN else start["published"][name])


def _blocks(found: Sequence[Mapping[str, Any]], name: str, n_layers: int) -> tuple[str, ...]:
    """``all``, or the first and the last block where their stds differ."""
    for module in {start["module"] for start in found}:
        if len({_std(start, name) for start in found if start["module"] == module}) > 1:
            return "0", str(n_layers - 1)
    return ("all",)


def _cell(found: Sequence[Mapping[str, Any]], module: str, name: str, line: int) -> str:
    """The std on the line of the first (0) or the last block (1); modules outside the blocks are on the first."""
    there = [start for start in found if start["module"] == module]
    if line and not there[0]["layers"]:
        return ""
    return numbers.value(_std(there[-1 if line else 0], name))
