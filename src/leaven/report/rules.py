"""A rule's table for the terminal: role x quantity, each cell with the number of its source, which stands below."""

from rich.table import Table

from leaven.recipe.shape import Role
from leaven.scaling.cells import Cell
from leaven.scaling.rules import QUANTITIES, Rule

HEADERS = {
    "init_variance": "init variance",
    "lr": "lr",
    "eps": "eps",
    "weight_decay": "weight decay",
    "forward": "forward",
}


def rule_table(rule: Rule) -> tuple[Table, list[str]]:
    """The table, and the lines below it: what all roles share, the sources by number, and the letters."""
    sources: dict[str, int] = {}

    def shown(cell: Cell) -> str:
        number = sources.setdefault(cell.source, len(sources) + 1)
        return f"{cell.text} [dim]({number})[/dim]"

    made = Table(
        title=f"{rule.name}: {rule.source}",
        title_justify="left",
        title_style="",
        box=None,
        pad_edge=False,
        header_style="dim",
    )
    made.add_column("role", no_wrap=True)
    for quantity in QUANTITIES:
        made.add_column(HEADERS[quantity])
    for role in Role:
        made.add_row(role.replace("_", " "), *(shown(rule.cells[quantity][role]) for quantity in QUANTITIES))
    shared = [
        f"{_SHARED.get(name, name.replace('_', ' '))}: {cell.text} [dim]({cell.source})[/dim]"
        for name, cell in rule.shared.items()
    ]
    numbered = [f"[dim]({number}) {source}[/dim]" for source, number in sources.items()]
    return made, ["", *shared, "", *numbered, "", LEGEND]


_SHARED = {
    "residual": "each branch before it is added",
    "attention": "attention logits, on top of 1 / sqrt(d_head)",
    "half_life": "half-life of the Adam moments, in steps",
}
LEGEND = (
    "Ratios target / base. I, O: the tensor's own fan in and fan out (both are m_N where all widths grow together); "
    "H: head dimension; L: depth; B: batch; D: tokens. t: token exponent; w: 1 - alpha if scale_decay_with_depth, "
    "else 0. 0: switched off."
)
