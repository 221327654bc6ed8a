"""Draw the charts of a plan: memory of each rank, passes of a pipeline, time and memory of layouts."""

import math
from collections.abc import Iterable, Mapping, Sequence

from leaven.documents.planning import CandidateRow
from leaven.planning.arrangement import Arrangement
from leaven.planning.schedule import Kind, Pass, Timeline
from leaven.views import charts, numbers
from leaven.views.charts import INK, MUTED, PAPER, Figure

RANKS = 12  # largest number of pipeline ranks that are drawn
# Limits on the layouts that are drawn: their number, and their step time / the fastest step time. A layout is also
# drawn if its step takes at most 1.3 times as long as that of the chosen layout.
DOTS, SLOWEST = 1500, 4

HUES = {
    name: charts.hue(n)
    for n, names in enumerate(
        ("weights forward", "activations backward input", "grads weight", "logits", "optimizer", "accumulation",
         "buffers", "gathered", "fixed")
    )
    for name in names.split()
}  # fmt: skip


def part_hues(stages: Sequence[Mapping[str, float]]) -> dict[str, str]:
    """Return {part of memory: colour} for the drawn parts. ``stages`` has a {part: GiB} for each pipeline rank."""
    parts = [part for part in stages[0] if max(sizes[part] for sizes in stages) >= numbers.LEAST_GIB]
    return {part: HUES.get(part, MUTED) for part in parts}


def _levels(capacity_gib: float, usable_gib: float) -> list[tuple[float, str, str]]:
    return [
        (capacity_gib, f"{capacity_gib:g} GiB: capacity", "solid"),
        (usable_gib, f"{usable_gib:.3g} GiB: the planner's limit", "dot"),
    ]


def memory(stages: Sequence[Mapping[str, float]], capacity_gib: float, usable_gib: float) -> Figure:
    """Draw the memory of each pipeline rank as a stacked bar. ``stages`` maps part to GiB, for each rank."""
    p, totals = len(stages), [sum(parts.values()) for parts in stages]
    traces = [
        {
            "type": "bar",
            "orientation": "h",
            "x": [charts.short(parts[part]) for parts in stages],
            "y": list(range(p)),
            "legendgroup": part,
            "marker": {"color": hue},
            "hovertext": [
                f"<b>{part}</b>, {f'rank {rank}' if p > 1 else 'every GPU'}<br>{parts[part]:.1f} of {total:.1f} GiB"
                for rank, (parts, total) in enumerate(zip(stages, totals, strict=True))
            ],
        }
        for part, hue in part_hues(stages).items()
    ]
    end, levels = 1.14 * max(capacity_gib, *totals), _levels(capacity_gib, usable_gib)
    return charts.figure(
        "GiB on each GPU",
        "rank of the pipeline" if p > 1 else "",
        traces,
        x={"range": [0, end], "showgrid": True},
        y={"range": [p - 0.4, -0.6], "showgrid": False, "dtick": -(-p // 12), "showticklabels": p > 1},
        shapes=[charts.mark_line("x", gib, dash=dash, layer="above") for gib, _, dash in levels],
        notes=[
            {"x": gib, "yref": "paper", "y": 1, "yanchor": "bottom", "yshift": 16 * (dash == "solid"), "text": label,
             "xanchor": "left" if gib < end / 2 else "right", "font": {"size": 11.5}}
            for gib, label, dash in levels
        ],
        barmode="stack",
        bargap=0.18,
        margin={"l": 48, "r": 14, "t": 40, "b": 44},
    )  # fmt: skip


_PASS_NAMES: dict[Kind, str] = {
    "forward": "forward pass",
    "backward": "backward pass",
    "input": "backward pass, for the input",
    "weight": "backward pass, for the weights",
}


def drawn_ranks(p: int) -> list[int]:
    """Return the pipeline ranks to draw: all ``p`` ranks, or ``RANKS`` evenly spaced ranks."""
    return list(range(p)) if p <= RANKS else [round(n * (p - 1) / (RANKS - 1)) for n in range(RANKS)]


def passes(step: Timeline, slower: float, stages_per_rank: int) -> Figure:
    """Draw the passes of pipeline ranks over the time of a step x ``slower``, the factor of the calibration."""
    ranks = drawn_ranks(len(step.ranks))
    unit, scale = ("ms", 1e3 * slower) if slower * step.end < 1 else ("s", slower)
    by_kind: dict[Kind, list[tuple[int, Pass]]] = {}
    for row, rank in enumerate(ranks):
        for each in step.ranks[rank]:
            if each.end > each.start:
                by_kind.setdefault(each.kind, []).append((row, each))
    traces = [
        {
            "type": "bar",
            "orientation": "h",
            "y": [row for row, _ in found],
            "base": [charts.short(scale * each.start) for _, each in found],
            "x": [charts.short(scale * (each.end - each.start)) for _, each in found],
            "legendgroup": kind,
            "marker": {
                "color": HUES[kind],
                "opacity": [
                    1 - 0.55 * (each.stage // len(step.ranks)) / max(stages_per_rank - 1, 1) for _, each in found
                ],
            },
            "hovertext": [
                f"<b>micro-batch {each.micro_batch}, {_PASS_NAMES[kind]}</b><br>stage {each.stage} on rank "
                f"{ranks[row]}<br>{each.start * scale:.4g} to {each.end * scale:.4g} {unit}"
                for row, each in found
            ],
            "text": [str(each.micro_batch) for _, each in found],
            "textposition": "inside",
            "insidetextanchor": "middle",
            "textangle": 0,
            "textfont": {"color": PAPER, "size": 10},
        }
        for kind, found in by_kind.items()
    ]
    return charts.figure(
        f"{'milliseconds' if unit == 'ms' else 'seconds'} from the start of a step",
        "rank of the pipeline",
        traces,
        x={"range": [0, 1.005 * scale * step.end]},
        y={"tickvals": list(range(len(ranks))), "ticktext": [str(rank) for rank in ranks],
           "range": [len(ranks) - 0.4, -0.6], "showgrid": False},
        barmode="overlay",
        bargap=0.12,
        uniformtext={"mode": "hide", "minsize": 8},
    )  # fmt: skip


_SYMBOLS = {"none": "circle", "selective": "diamond", "full": "square"}


def drawn_layouts(candidates: Sequence[CandidateRow], chosen: CandidateRow) -> list[CandidateRow]:
    """Return the layouts that the chart shows: at most `DOTS` of the best, and none that are much slower."""
    slowest = _slowest(candidates, chosen)
    return [each for each in candidates if each.step_seconds <= slowest][:DOTS]


def _slowest(candidates: Iterable[CandidateRow], chosen: CandidateRow) -> float:
    fastest = min(each.step_seconds for each in [*candidates, chosen])
    return max(SLOWEST * fastest, 1.3 * chosen.step_seconds)


def layouts(
    shown: Sequence[CandidateRow],
    front: Sequence[CandidateRow],
    chosen: CandidateRow,
    capacity_gib: float,
    usable_gib: float,
) -> Figure:
    """Draw a dot for each layout at its step time and memory, and a line through the layouts of the Pareto front."""
    slowest = _slowest(shown, chosen)
    times, sizes = zip(*map(_place, [*shown, chosen]), strict=True)
    traces = [charts.line([_place(each) for each in front if each.step_seconds <= slowest], INK, 1.5, shape="hv")]
    for tp, hue in tensor_hues(shown).items():
        members = [each for each in shown if each.layout["tp"] == tp]
        shapes = [_SYMBOLS[each.layout["recompute"]] if each.trained else "x" for each in members]
        looks, hovers = {"opacity": 0.8, "symbol": shapes}, list(map(_hover, members))
        traces.append(charts.dots(map(_place, members), hue, marker=looks, legendgroup=f"tp {tp}", hovertext=hovers))
    ring, hovers = {"symbol": "circle-open", "line": {"width": 2.5}}, [f"<b>chosen</b><br>{_hover(chosen)}"]
    traces.append(charts.dots([_place(chosen)], INK, 17, marker=ring, hovertext=hovers))
    low, high = min(*sizes, capacity_gib / 4) / 1.1, max(*sizes, capacity_gib) * 1.35
    time, size = map(math.log10, _place(chosen))
    levels = _levels(capacity_gib, usable_gib)
    return charts.figure(
        "seconds per step",
        "GiB on each GPU",
        traces,
        x=charts.log_axis(min(times) / 1.04, max(times) * 1.04, "{:.3g}".format, most=10),
        y=charts.log_axis(low, high, "{:.3g}".format, most=8),
        shapes=[charts.mark_line("y", gib, dash=dash) for gib, _, dash in levels],
        notes=[
            *(
                {"xref": "paper", "x": 1, "xanchor": "right", "y": math.log10(gib), "text": label,
                 "yanchor": "bottom" if dash == "solid" else "top", "font": {"size": 11.5}}
                for gib, label, dash in levels
            ),
            {"x": time, "xanchor": "left", "xshift": 12, "y": size, "yanchor": "bottom", "text": "<b>chosen</b>"},
        ],
    )  # fmt: skip


def tensor_hues(candidates: Iterable[CandidateRow]) -> dict[int, str]:
    return {tp: charts.hue(n) for n, tp in enumerate(sorted({each.layout["tp"] for each in candidates}))}


def _place(each: CandidateRow) -> tuple[float, float]:
    return each.step_seconds, each.gib


def _hover(each: CandidateRow) -> str:
    parts = str(Arrangement.read(each.layout)).split(" · ")
    rows = [" · ".join(parts[n : n + 4]) for n in range(0, len(parts), 4)]
    if not each.trained:
        rows.append("leaven can plan and export this layout, but not train with it")
    return "<br>".join([f"{numbers.duration(each.step_seconds)} a step, {each.gib:.1f} GiB", *rows])
