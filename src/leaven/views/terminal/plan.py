"""What a person sees of a plan: a line for each question, the reason beside the number."""

from collections.abc import Iterator

from rich.console import RenderableType
from rich.text import Text

from leaven.planning.arrangement import Arrangement
from leaven.planning.budget import BudgetPlan, BudgetRow
from leaven.planning.cost import Price, device
from leaven.planning.explain import PARTS, Explanation
from leaven.planning.layouts import EQUAL, Candidate
from leaven.planning.memory import GIB
from leaven.planning.plan import ACCURACY, Plan
from leaven.planning.ramp import RampChoice
from leaven.recipe.units import format_quantity, format_seconds
from leaven.views.numbers import duration
from leaven.views.terminal.tables import Cell, Column, Columns, Fact, Facts, under

ALTERNATIVES = 3


def plan_screen(found: Plan, price: Price | None = None, asked: str | None = None) -> Iterator[RenderableType]:
    """The layout, whether it fits, how fast, how long and for how much, where its ramp starts, and why no other."""
    facts: list[Fact] = [
        ("layout", str(found.arrangement).split(" · ")),
        (f"memory / {device(found.cluster)}", _memory(found)),
        ("speed", _speed(found)),
        ("time", _time(found)),
        ("budget", [format_seconds(found.seconds), *found.cost(price).said, f"on {found.cluster}"]),
        ("ramp", _ramp(found)),
        *under("next best", [[_alternative(other, found)] for other in found.alternatives[:ALTERNATIVES]]),
    ]
    if found.untrained is not None:
        facts.append(("not trained", [_alternative(found.untrained, found), "leaven plans and exports it"]))
    if found.not_lines:
        facts.append(("not", found.not_lines))
    if asked is not None:
        facts.append(("explain", _explained(found.explain(asked))))
    facts += under("caution", [[line] for line in found.cautions])
    if found.calibration is not None:
        facts.append(("calibrated", [f"time {found.calibration}"]))
    yield Facts([*facts, ("accuracy", [ACCURACY])])


def _memory(found: Plan) -> list[Cell]:
    has = found.cluster.accelerator.memory_gib
    said: list[Cell] = [f"{found.memory.total / GIB:.1f} GiB of {has:g}"]
    if not found.fits:
        said.append(Text("DOES NOT FIT", style="red"))
    said += [f"{name} {gib:.1f}" for name, gib in found.memory.parts_gib.items() if gib >= 0.05]
    if len(found.stages) > 1:
        totals = [memory.total for memory in found.stages]
        fullest, least = max(totals), min(totals)
        said.append(
            f"on rank {totals.index(fullest)} of {len(totals)}, {least / GIB:.1f} on rank {totals.index(least)}"
        )
    return said


def _speed(found: Plan) -> list[Cell]:
    speed = found.speed
    rate = format_quantity(speed.tokens_per_second / found.cluster.gpus)
    return [
        f"{speed.tflops_per_gpu:.0f} TFLOP/s"
        if speed.tflops_per_gpu >= 10
        else f"{speed.tflops_per_gpu:.2g} TFLOP/s",
        f"MFU {speed.mfu:.1%} (full attention; causal {speed.mfu_causal:.1%}; HFU {speed.hfu:.1%})",
        f"{duration(speed.step_seconds)} a step",
        f"{rate} tokens/s/{device(found.cluster)}",
    ]


def _time(found: Plan) -> list[Cell]:
    """Shares of a step of a half per cent or more."""
    shares = {part: seconds / found.time.step for part, seconds in vars(found.time).items()}
    return [f"{PARTS.get(part, part)} {share:.0%}" for part, share in shares.items() if share > 0.005]


def _ramp(found: Plan) -> list[Cell]:
    ramp = found.ramp
    said: list[Cell] = [f"start at {_start(ramp.chosen)} of full speed"]
    smaller = [choice for choice in ramp.choices if choice.start_tokens < ramp.chosen.start_tokens]
    if smaller:
        said.append(f"{_start(smaller[-1])}")
    if ramp.start != ramp.points[-1]:
        said.append(
            f"growing in steps of {format_quantity(ramp.increment_tokens)} tokens over the first "
            f"{format_quantity(ramp.chosen.over_tokens)} tokens: "
            f"{format_seconds(3600 * ramp.chosen.extra_hours)} more than at the full batch"
        )
    if ramp.own is not None:
        said.append(f"the recipe's: {_start(ramp.own)}, {format_seconds(3600 * ramp.own.extra_hours)} more")
    return said


def _start(choice: RampChoice) -> str:
    """Nothing short of full speed is said to be 100% of it."""
    share = choice.share if choice.share >= 1 else min(choice.share, 0.99)
    return f"{format_quantity(choice.start_tokens)} tokens: {share:.0%}"


def _alternative(other: Candidate, found: Plan) -> Text:
    """Memory, time, and what is another than in the choice; dp and accumulation follow from the rest."""
    slower = other.time.step / found.time.step - 1
    dye = "" if abs(slower) <= EQUAL else "red" if slower > 0 else "green"
    mine, chosen = _choices(other), _choices(found.chosen)
    return Text.assemble(
        f"{other.memory.total / GIB:5.1f} GiB  ",
        (f"{slower:+7.1%} time", dye),
        f"  {', '.join(said for said in mine if said not in chosen)}",
    )


def _choices(candidate: Candidate) -> list[str]:
    how, layout = candidate.arrangement, candidate.arrangement.layout
    turns = f" x {layout.stages_per_rank}" if layout.stages_per_rank > 1 else ""
    replicas = "no replicas" if layout.dp_replicate == 1 else f"{layout.dp_replicate} replicas"
    numbers = [f"{key} {getattr(layout, key)}" for key in ("tp", "pp", "cp", "ep", "zero")]
    return [
        *numbers,
        replicas,
        layout.schedule + turns,
        f"micro-batch {how.micro_batch}",
        f"recompute {layout.recompute}",
    ]


def _explained(explained: Explanation) -> list[Cell]:
    """The line, and the parts of a step that differ by 1% of it or more."""
    least = 0.01 * explained.chosen.time.step
    return [
        f"{explained.asked}: {explained.line}",
        *(
            f"{PARTS.get(part, part)} {duration(asked)} against {duration(chosen)}"
            for part, (asked, chosen) in explained.seconds.items()
            if abs(asked - chosen) >= least
        ),
    ]


BUDGET_COLUMNS = (
    Column("by", align="left"),
    Column("params"),
    Column("tokens"),
    Column("tokens", "a param", align="point"),
    Column("MFU"),
    Column("shape", align="left", drop=1),
    Column("layout", align="left", drop=2, free=True),
)


def budget_screen(found: BudgetPlan) -> Iterator[RenderableType]:
    """Rows from the largest model to the smallest, and what it costs."""
    flops = [6 * row.params * row.tokens for row in found.rows]
    cluster = found.cluster
    note = [cluster.accelerator.note] if cluster.accelerator.note else []
    facts: list[Fact] = [
        ("budget", (str(cluster), cluster.nodes_said, format_seconds(found.seconds), *found.cost.said, *note)),
        ("FLOPs", (f"{min(flops):.2e} .. {max(flops):.2e}, 6 N D at the speed of each size", "no ramp, no restarts")),
        *(("" if n else "does not fit", (f"{law}: {why}",)) for n, (law, why) in enumerate(found.refused)),
        *([("accuracy", (ACCURACY,))] if any(row.speed.plan for row in found.rows) else []),
    ]
    yield Columns(BUDGET_COLUMNS, [_cells(row) for row in found.rows])
    yield Facts(facts)


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
