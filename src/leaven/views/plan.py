"""The page of a plan: does it fit, where memory and time go, which layouts there are, what it costs."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from leaven.planning.accelerators import CONFIDENCE, Accelerator
from leaven.planning.arrangement import bubble, scheduled
from leaven.planning.cost import Price
from leaven.planning.explain import PARTS
from leaven.planning.flops import CONVENTION
from leaven.planning.layouts import USABLE, Candidate
from leaven.planning.memory import GIB
from leaven.planning.plan import ACCURACY, Plan
from leaven.planning.schedule import Timeline, timeline
from leaven.recipe.files import write_text
from leaven.views import figures, numbers, plan_figures
from leaven.views.chapters import Sheet
from leaven.views.html import Html, element, join
from leaven.views.shell import document
from leaven.views.tables import facts, four, scroll


def write_plan(out: Path, plan: Plan, name: str, command: str, price: Price | None = None) -> Path:
    """The page of a plan of a run with a name, as one HTML file; ``command`` is what made it.

    Raises:
        InputError: if plotly is missing, or the file cannot be written.
    """
    figures.plotly()
    write_text(out, page(plan, name, command, price))
    return out


def page(plan: Plan, name: str, command: str, price: Price | None = None) -> str:
    made = Sheet()
    _memory(made, plan)
    _time(made, plan)
    if plan.arrangement.layout.pp > 1:
        _pipeline(made, plan)
    _layouts(made, plan)
    _ramp(made, plan)
    _assumptions(made, plan)
    code = element("pre", element("code", command), class_="scroll", tabindex="0")
    made.section("The command that made it", None, code)
    kicker = element("p", f"leaven · plan · {plan.cluster}", class_="kicker")
    header = element("header", kicker, element("h1", name), _head(plan, price))
    return document(f"{name} · leaven plan", element("main", header, *made.sections), made.charts)


def _head(plan: Plan, price: Price | None) -> Html:
    memory, has = plan.memory.total / GIB, plan.cluster.accelerator.memory_gib
    size = f"{numbers.quantity(plan.job.model.params)} parameters, {numbers.quantity(plan.tokens)} tokens"
    fits = "It fits" if plan.fits else "It does not fit"
    verdict = (
        f"{size}. {fits}: {memory:.1f} of {has:g} GiB on each GPU, and takes {numbers.seconds(plan.seconds)} on "
        f"{plan.cluster} in the layout {plan.arrangement}."
    )
    return join(
        element("p", verdict, class_="verdict"),
        four(
            ("memory", f"{memory:.1f} GiB", f"on the fullest GPU, of {has:g}", "" if plan.fits else "bad"),
            (
                "MFU",
                f"{plan.speed.mfu:.1%}",
                f"full attention; causal {plan.speed.mfu_causal:.1%}, with recomputation {plan.speed.hfu:.1%}",
                "",
            ),
            (
                "a step",
                numbers.duration(plan.speed.step_seconds),
                f"{numbers.quantity(plan.speed.tokens_per_second)} tokens/s",
                "",
            ),
            ("the run", numbers.seconds(plan.seconds), ", ".join(plan.cost(price).said), ""),
        ),
    )


def _memory(made: Sheet, plan: Plan) -> None:
    stages = [memory.parts_gib for memory in plan.stages]
    capacity = plan.cluster.accelerator.memory_gib
    fullest = max(range(len(stages)), key=lambda rank: sum(stages[rank].values()))
    hues = plan_figures.part_hues(stages)
    several = len(stages) > 1
    told = "What one GPU keeps, by part." + (
        f" A bar is a rank of the pipeline; rank {fullest} needs most, and the numbers beside the parts are its."
        if several
        else " All GPUs need the same."
    )
    shown = [(part, hue, f"{stages[fullest][part]:.1f} GiB") for part, hue in hues.items()]
    made.section(
        "Memory by part",
        told,
        _legend(shown),
        made.chart(
            "memory",
            plan_figures.memory(stages, capacity, USABLE * capacity),
            "memory by part and rank",
            "wide" if several else "small",
        ),
        _folded("Memory of every rank, GiB", _stages(stages)) if several else None,
        _folded(f"Activations of rank {fullest} by operator, GiB", _activations(plan)),
        _folded("What every parameter takes, before it is shared out", _states(plan)),
    )


def _activations(plan: Plan) -> Html:
    parts = sorted(plan.activations.items(), key=lambda part: -part[1])
    rows = [[name.replace("_", " "), f"{size / GIB:.2f}"] for name, size in parts if size]
    return _table(["operator", "GiB"], rows, "activations by operator")


def _states(plan: Plan) -> Html:
    rows = [[f"{state.name}: {state.why}", f"{state.bytes_each}", f"{state.gb:,.1f}"] for state in plan.states]
    rows.append(["sum", "", f"{sum(state.gb for state in plan.states):,.1f}"])
    return _table(["part", "bytes a parameter", "GB in all"], rows, "states of every parameter")


def _stages(stages: Sequence[Mapping[str, float]]) -> Html:
    heads = ["rank", *stages[0], "sum"]
    rows = [
        [str(rank), *(f"{size:.2f}" for size in parts.values()), f"{sum(parts.values()):.2f}"]
        for rank, parts in enumerate(stages)
    ]
    return _table(heads, rows, "memory of every rank")


def _time(made: Sheet, plan: Plan) -> None:
    parts = {PARTS.get(part, part.replace("_", " ")): seconds for part, seconds in vars(plan.time).items() if seconds}
    longest = max(parts.values())
    bars = [
        join(
            element("span", part),
            element("div", element("i", style=f"width:{100 * seconds / longest:.3g}%"), class_="bar"),
            element("span", numbers.duration(seconds), class_="number"),
            element("span", f"{seconds / plan.time.step:.1%}", class_="number quiet"),
        )
        for part, seconds in parts.items()
    ]
    made.section(
        "Time of a step",
        f"{numbers.duration(plan.time.step)} in all; what is hidden behind compute is not counted.",
        element("div", *bars, class_="parts"),
    )


def _pipeline(made: Sheet, plan: Plan) -> None:
    how = plan.arrangement
    layout, p, v = how.layout, how.layout.pp, how.layout.stages_per_rank
    m = scheduled(layout, how.grad_accumulation)
    own, slower = timeline(plan.job.model, how, plan.cluster, plan.job.code), plan.job.slower
    step = Timeline(
        tuple(
            tuple(each._replace(start=slower * each.start, end=slower * each.end) for each in passes)
            for passes in own.ranks
        )
    )
    drawn = plan_figures.window(step, v)
    kinds = {each.kind for each in step.ranks[-1]}
    slots = f"(p − 1) / (v m + p − 1) with p = {p} ranks, v = {v} on each and m = {m} micro-batches"
    against = "without its cut of backward passes" if layout.schedule == "zero-bubble" else "were all stages alike"
    told = (
        f"Each row is a rank, each box the work of a stage on a micro-batch; where there is none, the rank waits: "
        f"{step.bubble:.1%} of the time, and {bubble(m, p, v):.1%} {against}, {slots}."
    )
    if v > 1:
        told += " The later stages of a rank are paler."
    if len(drawn.ranks) < p:
        told += f" {len(drawn.ranks)} of the {p} ranks are drawn."
    if not drawn.whole:
        told += f" The first and the last {numbers.duration(drawn.head)} are drawn, of {numbers.duration(drawn.end)}."
    names = {"forward": "forward", "backward": "backward", "input": "backward, input", "weight": "backward, weights"}
    most = [step.in_flight(rank) / v for rank in range(p)]
    shown = [(names[kind], plan_figures.HUES[kind], "", kind) for kind in names if kind in kinds]
    made.section(
        f"The pipeline: {layout.schedule}",
        told,
        _legend(shown),
        made.chart("passes", plan_figures.passes(step, v), "passes of the pipeline over time", "tall"),
        element(
            "p",
            f"A rank keeps what it needs for at most {most[0]:g} micro-batches at once on rank 0 and {most[-1]:g} on "
            f"rank {p - 1}.",
            class_="told",
        ),
    )


def _layouts(made: Sheet, plan: Plan) -> None:
    candidates, chosen = plan.candidates, plan.chosen
    if not candidates:
        return
    capacity = plan.cluster.accelerator.memory_gib
    chart, drawn = plan_figures.layouts(candidates, plan.pareto, chosen, capacity, USABLE * capacity)
    told = (
        "A dot is a way to run a step: the lower, the more memory is left; the further left, the faster. The line "
        "joins those that no other beats in both. Colour is the tensor-parallel degree; squares compute activations "
        "again."
    )
    if any(not each.trained for each in candidates):
        told += " Crosses share a sequence over ranks (cp): planned and exported, not trained by leaven."
    if drawn < len(candidates):
        told += f" The best {drawn:,} of {len(candidates):,} that fit are drawn."
    shown = [
        (f"tp {tp}", hue, "", f"tp {tp}")
        for tp, hue in plan_figures.tensor_hues(candidates[: plan_figures.DOTS]).items()
    ]
    reasons = [element("li", line) for line in plan.not_lines]
    made.section(
        "The layouts",
        told,
        _legend(shown),
        made.chart("layouts", chart, "layouts by time and memory", "tall"),
        _choices([chosen, *plan.alternatives]),
        join(element("h3", "Why not", class_="next"), element("ul", *reasons, class_="told")) if reasons else None,
    )


def _choices(shown: Sequence[Candidate]) -> Html:
    """The first is the choice; degrees that all have as 1 are left out."""
    degrees = [
        "dp",
        "tp",
        "pp",
        *(d for d in ("cp", "ep") if any(getattr(c.arrangement.layout, d) > 1 for c in shown)),
    ]
    rows = []
    for each in shown:
        how, layout = each.arrangement, each.arrangement.layout
        turns = f" × {layout.stages_per_rank}" if layout.stages_per_rank > 1 else ""
        rows.append(
            [
                "chosen" if each is shown[0] else f"{each.time.step / shown[0].time.step - 1:+.1%}",
                numbers.value(each.time.step),
                f"{each.memory.total / GIB:.1f}",
                *(str(getattr(layout, degree)) for degree in degrees),
                f"{layout.zero}" + (f" in {layout.dp_replicate} replicas" if layout.dp_replicate > 1 else ""),
                str(how.micro_batch),
                str(how.grad_accumulation),
                layout.recompute,
                layout.schedule + turns if layout.pp > 1 else numbers.NONE,
            ]
        )
    heads = ("time", "s a step", "GiB", *degrees, "ZeRO", "micro-batch", "accumulate", "recompute", "schedule")
    return _table(heads, rows, "the best layouts")


def _ramp(made: Sheet, plan: Plan) -> None:
    ramp = plan.ramp
    if len(ramp.points) < 2:
        return
    start, chosen = ramp.start, ramp.chosen
    told = (
        "A small batch is few micro-batches on each rank: pipelines stand still, and what is done once a step is "
        f"shared by few tokens. From {numbers.quantity(start.batch_tokens)} tokens on {start.share:.0%} of the full "
        f"batch's throughput is kept ({ramp.wanted:.0%} was asked for); growing by "
        f"{numbers.quantity(ramp.increment_tokens)} tokens over the first {numbers.quantity(chosen.over_tokens)} it "
        f"costs {_hours(chosen.extra_hours)} more than the full batch would."
    )
    if not all(point.filled for point in ramp.points):
        told += " Hollow: fewer micro-batches than stages, which leaven does not train."
    choices = [*ramp.choices, *([ramp.own] if ramp.own else [])]
    made.section(
        "The batch ramp",
        told,
        made.chart("ramp", plan_figures.ramp(ramp), "throughput over the global batch"),
        _table(
            ("start, tokens", "kept", "increment", "over, tokens", "time", "more than full", "steps"),
            [
                [
                    numbers.quantity(choice.start_tokens)
                    + (", the recipe's" if choice is ramp.own else ", chosen" if choice is chosen else ""),
                    f"{choice.share:.0%}",
                    numbers.quantity(choice.increment_tokens),
                    numbers.quantity(choice.over_tokens),
                    _hours(choice.hours),
                    _hours(choice.extra_hours),
                    f"{choice.steps:,}",
                ]
                for choice in choices
            ],
            "what each start of the ramp costs",
        ),
    )


def _hours(hours: float) -> str:
    return numbers.seconds(3600 * hours) if hours else numbers.NONE


def _assumptions(made: Sheet, plan: Plan) -> None:
    accelerator = plan.cluster.accelerator
    made.section(
        "What the numbers stand on",
        None,
        facts(
            (
                ("FLOPs", CONVENTION),
                (
                    "device",
                    f"{accelerator.name}: peak {accelerator.peak_tflops:g} TFLOP/s, best measured matmul "
                    f"{accelerator.matmul_flops / 1e12:.4g}, memory {accelerator.memory_tb_s:g} TB/s, links "
                    f"{accelerator.link_gb_s:g} GB/s in a node of {accelerator.node_size} and "
                    f"{accelerator.network_gb_s:g} between nodes, one direction",
                ),
                ("sources", _sources(accelerator)),
                (
                    "memory",
                    f"a layout fits if it needs at most {USABLE:.0%} of what a GPU has; the rest is for what the "
                    "count leaves out",
                ),
                (
                    "left out",
                    "stragglers, congestion of the network, a slow host, reading data, validation, checkpoints, and "
                    "every hour that a run stands still",
                ),
                ("calibrated", str(plan.calibration) if plan.calibration else None),
                ("accuracy", ACCURACY),
            )
        ),
    )


def _sources(accelerator: Accelerator) -> str:
    """Where the numbers of a device stand, those from one place together."""
    groups: dict[str, list[str]] = {}
    for of in accelerator.sources:
        groups.setdefault(f"{of.text} ({CONFIDENCE[of.confidence]})", []).append(of.group)
    return "; ".join(f"{', '.join(names)}: {text}" for text, names in groups.items())


def _legend(shown: Sequence[tuple[str, ...]]) -> Html:
    """Colours with their words, and a number where it says something: (name, colour, number[, group])."""
    return element(
        "div",
        *(
            element(
                "button",
                element("i", class_="swatch", style=f"background:{hue}"),
                name,
                element("b", number) if number else None,
                type="button",
                data_group=group[0] if group else name,
                aria_pressed="true",
            )
            for name, hue, number, *group in shown
        ),
        class_="legend",
    )


def _folded(title: str, content: Html) -> Html:
    return element("details", element("summary", title), content)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], label: str) -> Html:
    """The first column in words, the others numbers."""
    top = [element("th", name, scope="col", class_=None if n == 0 else "number") for n, name in enumerate(heads)]
    lines = [
        element("tr", element("th", first, scope="row"), *(element("td", cell, class_="number") for cell in rest))
        for first, *rest in rows
    ]
    table = element("table", element("thead", element("tr", *top)), element("tbody", *lines), class_="plain")
    return scroll(table, label)
