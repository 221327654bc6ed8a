"""Show the results of ``leaven plan`` in the terminal."""

from collections.abc import Iterator

from rich.console import RenderableType
from rich.text import Text

from leaven.documents.planning import BudgetDocument, CandidateRow, Explanation, Layout, PlanDocument, RampChoice
from leaven.planning.arrangement import Arrangement
from leaven.planning.explain import part_name
from leaven.planning.layouts import EQUAL
from leaven.planning.plan import ACCURACY, ACCURACY_OF_EXPERTS
from leaven.recipe.units import format_parameters, format_quantity, format_seconds
from leaven.views.numbers import LEAST_GIB, costs, duration, published_range
from leaven.views.tables import Cell, Column, Fact, Facts, Table, under

ALTERNATIVES = 3


def plan_screen(plan: PlanDocument) -> Iterator[RenderableType]:
    """Yield the layout, memory, speed, time and cost of a plan, its batch ramp, and alternative layouts."""
    facts: list[Fact] = [
        ("layout", str(Arrangement.read(plan.layout)).split(" · ")),
        (f"memory / {plan.cost.device}", _memory(plan)),
        ("speed", _speed(plan)),
        *([("range", of_time)] if (of_time := published_range(plan)) else []),
        ("time", _time(plan)),
        ("budget", [format_seconds(86_400 * plan.days), *costs(plan.cost), f"on {plan.cluster}"]),
        ("ramp", _ramp(plan)),
        *under("next best", [_alternative(other, plan) for other in plan.alternatives[:ALTERNATIVES]]),
    ]
    has_experts = plan.params_active != plan.params
    if has_experts:
        facts.insert(0, ("model", format_parameters(plan.params, plan.params_active)))
    if plan.untrained is not None:
        untrained = "leaven can plan and export this layout, but not train it"
        facts.append(("not trained", [_alternative(plan.untrained, plan), untrained]))
    if plan.not_:
        facts.append(("why not", plan.not_))
    if plan.explain is not None:
        facts.append(("explain", _explained(plan.explain, plan.speed.step_seconds)))
    facts += under("caution", plan.cautions)
    if plan.calibration is not None:
        facts.append(("calibrated", f"time {plan.calibration.says}"))
    yield Facts(*facts, ("accuracy", ACCURACY_OF_EXPERTS if has_experts else ACCURACY))


def _memory(plan: PlanDocument) -> list[Cell]:
    cells: list[Cell] = [f"{plan.memory.gib:.1f} GiB of {plan.memory.capacity_gib:g}"]
    if not plan.memory.fits:
        cells.append(Text("DOES NOT FIT", style="red"))
    cells += [f"{name} {gib:.1f}" for name, gib in plan.memory.parts.items() if gib >= LEAST_GIB]
    if len(plan.stages) > 1:
        totals = [stage.gib for stage in plan.stages]
        fullest, least = max(totals), min(totals)
        cells.append(f"on rank {totals.index(fullest)} of {len(totals)}, {least:.1f} on rank {totals.index(least)}")
    return cells


def _speed(plan: PlanDocument) -> list[Cell]:
    speed, tflops = plan.speed, plan.speed.tflops_per_gpu
    return [
        f"{tflops:.0f} TFLOP/s" if tflops >= 10 else f"{tflops:.2g} TFLOP/s",
        f"MFU {speed.mfu:.1%} (full attention; causal {speed.mfu_causal:.1%}; HFU {speed.hfu:.1%})",
        f"{duration(speed.step_seconds)} a step",
        f"{format_quantity(speed.tokens_per_second / plan.gpus)} tokens/s/{plan.cost.device}",
    ]


def _time(plan: PlanDocument) -> list[Cell]:
    """Return each part of a step with its share of the step's time. Parts of at most 0.5% are left out."""
    shares = {part: seconds / plan.speed.step_seconds for part, seconds in plan.time.items()}
    return [f"{part_name(part, plan.layout['ep'])} {share:.0%}" for part, share in shares.items() if share > 0.005]


def _ramp(plan: PlanDocument) -> list[Cell]:
    ramp = plan.ramp
    cells: list[Cell] = [f"start at {_start(ramp.chosen)} of full speed"]
    smaller = [choice for choice in ramp.choices if choice.start_tokens < ramp.chosen.start_tokens]
    if smaller:
        cells.append(f"{_start(smaller[-1])}")
    if ramp.start != ramp.points[-1]:
        cells.append(
            f"growing in steps of {format_quantity(ramp.increment_tokens)} tokens over the first "
            f"{format_quantity(ramp.chosen.over_tokens)} tokens; "
            f"{format_seconds(3600 * ramp.chosen.extra_hours)} longer than without a ramp"
        )
    if ramp.own is not None:
        cells.append(
            f"the recipe starts at {_start(ramp.own)}; {format_seconds(3600 * ramp.own.extra_hours)} longer than "
            "without a ramp"
        )
    return cells


def _start(choice: RampChoice) -> str:
    """Return the first batch of a ramp and its speed, ``524 k tokens: 62%``. Only full speed is shown as 100%."""
    share = choice.share if choice.share >= 1 else min(choice.share, 0.99)
    return f"{format_quantity(choice.start_tokens)} tokens: {share:.0%}"


def _alternative(other: CandidateRow, plan: PlanDocument) -> Text:
    slower = other.step_seconds / plan.speed.step_seconds - 1
    style = "" if abs(slower) <= EQUAL else "red" if slower > 0 else "green"
    own, chosen = _choices(other.layout), _choices(plan.layout)
    return Text.assemble(
        f"{other.gib:5.1f} GiB  ",
        (f"{slower:+7.1%} time", style),
        f"  {', '.join(choice for choice in own if choice not in chosen)}",
    )


def _choices(layout: Layout) -> list[str]:
    stages, replicas = layout["stages_per_rank"], layout["dp_replicate"]
    return [
        *(f"{key} {layout[key]}" for key in ("tp", "pp", "cp", "ep", "zero")),
        "no replicas" if replicas == 1 else f"{replicas} replicas",
        layout["schedule"] + (f" x {stages}" if stages > 1 else ""),
        f"micro-batch {layout['micro_batch']}",
        f"recompute {layout['recompute']}",
    ]


def _explained(explained: Explanation, step_seconds: float) -> list[Cell]:
    ep = explained.layout["ep"] if explained.layout else 1
    return [
        f"{explained.asked}: {explained.line}",
        *(
            f"{part_name(part, ep)} {duration(each.asked)} against {duration(each.chosen)}"
            for part, each in explained.seconds.items()
            if abs(each.asked - each.chosen) >= 0.01 * step_seconds
        ),
    ]


_BUDGET = (
    Column("by", lambda row: row.law, align="left"),
    Column("params", lambda row: format_quantity(row.params)),
    Column("tokens", lambda row: format_quantity(row.tokens)),
    Column("tokens", lambda row: _per_param(row.tokens_per_param), unit="a param", align="point"),
    Column("MFU", lambda row: f"{row.mfu:.0%}"),
    Column("shape", lambda row: f"L {row.shape['n_layers']} d {row.shape['d_model']}", align="left", drop=1),
    Column(
        "layout", lambda row: _short(row.layout) if row.layout else "not planned", align="left", drop=2, free=True
    ),
)


def _per_param(number: float) -> str:
    return f"{number:.3g}" if number < 1_000 else f"{number:,.0f}"


def _short(layout: Layout) -> str:
    """Return a layout as short text, for example ``dp 64 zero 3 mbs 2 recompute full``. Degrees of 1 are left out."""
    more = {
        "dp": f" in {layout['dp_replicate']}" if layout["dp_replicate"] > 1 else "",
        "pp": f"x{layout['stages_per_rank']}" if layout["stages_per_rank"] > 1 else "",
    }
    parts = [f"{key} {layout[key]}{more.get(key, '')}" for key in ("dp", "tp", "pp") if layout[key] > 1]
    recompute = "" if layout["recompute"] == "none" else f" recompute {layout['recompute']}"
    return " ".join([*parts, f"zero {layout['zero']} mbs {layout['micro_batch']}{recompute}"])


def budget_screen(budget: BudgetDocument) -> Iterator[RenderableType]:
    """Yield a table of the model sizes that a budget can train, and facts about the budget, such as its cost."""
    flops = [row.flops for row in budget.rows]
    note = [budget.note] if budget.note else []
    facts: list[Fact] = [
        ("budget", (budget.cluster, budget.nodes, format_seconds(86_400 * budget.days), *costs(budget.cost), *note)),
        ("FLOPs", (f"{min(flops):.2e} .. {max(flops):.2e}: 6 N D of each size", "no batch ramp, no restarts")),
        *(("" if n else "does not fit", f"{each.law}: {each.why}") for n, each in enumerate(budget.refused)),
        *([("accuracy", ACCURACY)] if any(row.layout for row in budget.rows) else []),
    ]
    yield Table.of(_BUDGET, budget.rows)
    yield Facts(*facts)
