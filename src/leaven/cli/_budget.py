"""What a person sees of a budget: the sizes that fit it, by every law."""

from collections.abc import Sequence

from rich.console import Group

from leaven.cli._common import console, emit_json
from leaven.planning.budget import Budget, Row, budget
from leaven.planning.cost import parse_price
from leaven.recipe.units import format_quantity, format_seconds
from leaven.report.terminal import Column, Columns, Facts

_COLUMNS = (
    Column("by", align="left"),
    Column("params"),
    Column("tokens"),
    Column("tokens", "a param", align="point"),
    Column("MFU"),
    Column("shape", align="left", drop=1),
    Column("layout", align="left", drop=2, free=True),
)


def show_budget(text: str, mfu: float | None, price: str | None, json_output: bool) -> None:
    """``leaven plan --budget TEXT [--mfu SHARE] [--price PRICE] [--json]``.

    Raises:
        InputError: if one of them is wrong, or nothing fits.
    """
    found = budget(text, mfu=mfu, price=None if price is None else parse_price(price))
    if json_output:
        emit_json(found.to_json())
    else:
        console.print(budget_screen(found))


def budget_screen(found: Budget) -> Group:
    """Rows from the largest model to the smallest, what it costs, and what to type next."""
    flops = [6 * row.params * row.tokens for row in found.rows]
    cluster = found.cluster
    note = [cluster.accelerator.note] if cluster.accelerator.note else []
    middle = found.rows[len(found.rows) // 2]
    sizes = f"--params {_typed(middle.params)} --tokens {_typed(middle.tokens)}"
    facts: list[tuple[str, Sequence[str]]] = [
        ("budget", (str(cluster), cluster.nodes_said, format_seconds(found.seconds), *found.cost.said, *note)),
        ("FLOPs", (f"{min(flops):.2e} .. {max(flops):.2e}, 6 N D at the speed of each size", "no ramp, no restarts")),
        *(("" if n else "does not fit", (f"{law}: {why}",)) for n, (law, why) in enumerate(found.refused)),
        ("next", (f"leaven new OUT.toml {sizes} --gpus {cluster}", "the middle of these")),
    ]
    return Group(Columns(_COLUMNS, [_cells(row) for row in found.rows]), Facts(facts))


def _cells(row: Row) -> tuple[str, ...]:
    shape, how = row.speed.shape, row.speed.plan and row.speed.plan.arrangement
    return (
        row.law,
        format_quantity(row.params),
        format_quantity(row.tokens),
        f"{row.tokens_per_param:.3g}" if row.tokens_per_param < 1_000 else f"{row.tokens_per_param:,.0f}",
        f"{row.speed.mfu:.0%}",
        f"L {shape.n_layers}  d {shape.d_model}",
        str(how) if how else "not planned",
    )


def _typed(count: float) -> str:
    return format_quantity(count).replace(" ", "")
