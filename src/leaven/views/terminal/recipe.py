"""A recipe in the terminal: its parameter table, its initialisation beside published ones, and scaling rules."""

from collections.abc import Iterator, Sequence

from rich.console import RenderableType

from leaven.recipe.init_std import COMPARED, INITS
from leaven.recipe.recipe import Recipe
from leaven.recipe.shape import Role
from leaven.recipe.units import format_quantity
from leaven.scaling import rules
from leaven.scaling.starts import ModuleStart, distances, init_reason, starts, usual_std
from leaven.scaling.table import ParameterTable, clip_reason, optimizer_reason, ramp_reason
from leaven.views import numbers
from leaven.views.parameters import QUANTITIES, groups
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


def parameter_table(table: ParameterTable, recipe: Recipe) -> Iterator[RenderableType]:
    """The resolved parameter table, neighbouring layers with equal values as one line.

    ``lr`` is a parameter's own peak, ``decay`` is per step and lr, both as the optimiser gets them.
    """
    at, model = table.ratios, recipe.model
    scale = (f"width x{at.width:.3g}", f"depth x{at.depth:.3g}", f"batch x{at.batch:.3g}", f"tokens x{at.tokens:.3g}")
    yield Facts(
        [
            (recipe.name, (f"{format_quantity(model.params)} parameters", f"rule {table.rule.name}")),
            ("", (f"{' '.join(scale)} of the base",)),
        ]
    )
    rows = [
        (
            group.label,
            group.layers,
            " x ".join(f"{size:,}" for size in group.row.shape),
            str(group.row.role).replace("_", " "),
            *(numbers.value(getattr(group.row, quantity)) for quantity in QUANTITIES),
        )
        for group in groups(table)
    ]
    yield Columns(PARAMETER_COLUMNS, rows)


def recipe_screen(table: ParameterTable, recipe: Recipe) -> Iterator[RenderableType]:
    """``leaven show``: the parameter table, what belongs to no parameter, and the initialisations side by side."""
    yield from parameter_table(table, recipe)
    scale = f"query . key x {numbers.value(table.attention_scale)}"
    weights = recipe.start.weights
    facts: list[Fact] = [("start", (f"from the weights in {weights}, not from init std",))] if weights else []
    facts += [
        ("attention", (scale,)),
        ("optimizer", (optimizer_reason(recipe),)),
        ("clip", (clip_reason(recipe),)),
    ]
    if (ramp := ramp_reason(recipe)) is not None:
        facts.append(("ramp", (ramp,)))
    yield Facts(facts)
    yield from init_table(table, recipe)


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


def rule_table(rule: rules.Rule) -> Iterator[RenderableType]:
    """Role x quantity, what all roles share, and what the letters stand for."""
    rows, notes = [], []
    for role in Role:
        cells = [rule.cells[quantity][role] for quantity in rules.QUANTITIES]
        rows.append((role.replace("_", " "), *(cell.text for cell in cells)))
        # A source that several cells of a row have is told once.
        shared: dict[str, list[str]] = {}
        for quantity, cell in zip(rules.QUANTITIES, cells, strict=True):
            shared.setdefault(cell.source, []).append(quantity.replace("_", " "))
        notes.append([f"{', '.join(quantities)}: {source}" for source, quantities in shared.items()])
    columns = [
        (_SHARED.get(name, name.replace("_", " ")), (f"{cell.text}  ({cell.source})",))
        for name, cell in rule.shared.items()
    ]
    yield Facts([(rule.name, (rule.source,))])
    yield Columns(RULE_COLUMNS, rows, notes)
    yield Facts([*columns, ("letters", _LETTERS)])


OWN = "this recipe"
# Of what starts alike in nearly all inits one module is shown; --json has every module.
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


def init_table(table: ParameterTable, recipe: Recipe) -> Iterator[RenderableType]:
    """Which init applies, what every matrix starts from, and what the published ones would give it."""
    found = starts(recipe, table)
    there = [(module, drop) for module, drop in SHOWN if any(start.module == module for start in found)]
    columns = (
        Column("std", "of", align="left"),
        Column("block", align="left"),
        *(Column(*module.partition(".")[::2], align="point", drop=drop) for module, drop in there),
    )
    rows = [
        (name if n == 0 else "", block, *(_cell(found, module, name, n) for module, _ in there))
        for name in (OWN, *COMPARED)
        for n, block in enumerate(_blocks(found, name, recipe.model.n_layers))
    ]
    width = recipe.model.d_model
    usual = f"sqrt(1 / (3 d)) is {numbers.value(usual_std(width))} at d {width:,}"
    near = [f"{each.init} {each.octaves:.2g} octaves" for each in distances(found)[:3]]
    formulas = [f"{name} {init.text}" for name, init in COMPARED.items()]
    only = f"only to compare with: {', '.join(name for name in COMPARED if name not in INITS)}"
    yield Facts([("init", (init_reason(recipe), usual))])
    yield Columns(columns, rows)
    yield Facts(
        [
            ("nearest", (*near, "the mean over all matrices")),
            ("formulas", (*formulas, only)),
            ("letters", ("d width", "L layers", "l layer from 0", "f fan in", "o fan out")),
        ]
    )


def _of(start: ModuleStart, name: str) -> float:
    return start.std if name == OWN else start.published[name]


def _blocks(found: Sequence[ModuleStart], name: str, n_layers: int) -> tuple[str, ...]:
    """One line for all blocks, or one for the first and one for the last where they differ."""
    for module in {start.module for start in found}:
        if len({_of(start, name) for start in found if start.module == module}) > 1:
            return "0", str(n_layers - 1)
    return ("all",)


def _cell(found: Sequence[ModuleStart], module: str, name: str, line: int) -> str:
    """Of the first block's line, or the last's; what is outside the blocks stands in the first."""
    there = [start for start in found if start.module == module]
    if line and not there[0].layers:
        return ""
    return numbers.value(_of(there[-1 if line else 0], name))
