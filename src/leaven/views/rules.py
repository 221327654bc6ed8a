"""A rule's table for the terminal: role x quantity, the sources of a row's cells below it."""

from rich.console import Group

from leaven.recipe.shape import Role
from leaven.scaling.rules import QUANTITIES, Rule
from leaven.views.terminal import Column, Columns, Facts

_COLUMNS = (
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


def rule_table(rule: Rule) -> Group:
    """Role x quantity, what all roles share, and what the letters stand for."""
    rows, notes = [], []
    for role in Role:
        cells = [rule.cells[quantity][role] for quantity in QUANTITIES]
        rows.append((role.replace("_", " "), *(cell.text for cell in cells)))
        # A source that several cells of a row have is told once.
        shared: dict[str, list[str]] = {}
        for quantity, cell in zip(QUANTITIES, cells, strict=True):
            shared.setdefault(cell.source, []).append(quantity.replace("_", " "))
        notes.append([f"{', '.join(quantities)}: {source}" for source, quantities in shared.items()])
    columns = [
        (_SHARED.get(name, name.replace("_", " ")), (f"{cell.text}  ({cell.source})",))
        for name, cell in rule.shared.items()
    ]
    return Group(
        Facts([(rule.name, (rule.source,))]),
        Columns(_COLUMNS, rows, notes),
        Facts([*columns, ("letters", _LETTERS)]),
    )
