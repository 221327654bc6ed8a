"""What a person sees of a budget: the sizes that fit it, by every law."""

from collections.abc import Sequence

from rich.console import Group

from leaven.cli._common import console, emit_json
from leaven.planning.arrangement import Arrangement
from leaven.planning.budget import BudgetPlan, BudgetRow, budget
from leaven.planning.cost import parse_price
from leaven.planning.plan import ACCURACY
from leaven.recipe.units import format_quantity, format_seconds
from leaven.views.terminal import Column, Columns, Facts

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
        emit_json(found.to_json() | {"next": [next_command(found)]})
    else:
        console.print(budget_screen(found))


def budget_screen(found: BudgetPlan) -> Group:
    """Rows from the largest model to the smallest, what it costs, and what to type next."""
    flops = [6 * row.params * row.tokens for row in found.rows]
    cluster = found.cluster
    note = [cluster.accelerator.note] if cluster.accelerator.note else []
    facts: list[tuple[str, Sequence[str]]] = [
        ("budget", (str(cluster), cluster.nodes_said, format_seconds(found.seconds), *found.cost.said, *note)),
        ("FLOPs", (f"{min(flops):.2e} .. {max(flops):.2e}, 6 N D at the speed of each size", "no ramp, no restarts")),
        *(("" if n else "does not fit", (f"{law}: {why}",)) for n, (law, why) in enumerate(found.refused)),
        *([("accuracy", (ACCURACY,))] if any(row.speed.plan for row in found.rows) else []),
        ("next", (next_command(found), "the middle of these")),
    ]
    return Group(Columns(_COLUMNS, [_cells(row) for row in found.rows]), Facts(facts))


def next_command(found: BudgetPlan) -> str:
    """A recipe of the middle size."""
    middle = found.rows[len(found.rows) // 2]
    sizes = f"--params {_typed(middle.params)} --tokens {_typed(middle.tokens)}"
    return f"leaven new {_typed(middle.params)}.toml {sizes} --gpus {found.cluster}"


def _cells(row: BudgetRow) -> tuple[str, ...]:
    shape, how = row.speed.shape, row.speed.plan and row.speed.plan.arrangement
    return (
        row.law,
        format_quantity(row.params),
        format_quantity(row.tokens),
        f"{row.tokens_per_param:.3g}" if row.tokens_per_param < 1_000 else f"{row.tokens_per_param:,.0f}",
        f"{row.speed.mfu:.0%}",
        f"L {shape.n_layers} d {shape.d_model}",
        _short(how) if how else "not planned",
    )


def _short(how: Arrangement) -> str:
    """``dp 64 zero 3 mbs 2 recompute full``: degrees of one and what follows from the rest are left out."""
    layout = how.layout
    replicas = f" in {layout.dp_replicate}" if layout.dp_replicate > 1 else ""
    turns = f"x{layout.stages_per_rank}" if layout.stages_per_rank > 1 else ""
    ranks = [("dp", layout.dp, replicas), ("tp", layout.tp, ""), ("pp", layout.pp, turns)]
    said = [f"{key} {degree}{more}" for key, degree, more in ranks if degree > 1]
    recompute = "" if layout.recompute == "none" else f" recompute {layout.recompute}"
    return " ".join([*said, f"zero {layout.zero} mbs {how.micro_batch}{recompute}"])


def _typed(count: float) -> str:
    return format_quantity(count).replace(" ", "")
