"""Draw the charts of a plan. They show the memory of each rank, the passes of a pipeline, the time and memory of
layouts, and the batch ramp."""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from leaven.documents.planning import RampPlan
from leaven.planning.layouts import LayoutCandidate
from leaven.planning.memory import GIB
from leaven.planning.schedule import Kind, Pass, Timeline
from leaven.views import charts, numbers
from leaven.views.charts import INK, MUTED, PAPER, Figure

RANKS, PASSES = 12, 3300  # largest numbers of ranks and of passes of a pipeline that are drawn
STEADY = 4  # number of steady-state micro-batches drawn at each end of a long step
GAP = 0.04  # share of the width that is left blank for the omitted middle of a long step
DOTS, SLOWEST = 1500, 4  # the largest number of layouts drawn; how many times slower than the fastest they may be

HUES = {
    name: charts.hue(n)
    for n, names in enumerate(
        ("weights forward", "activations backward input", "grads weight", "logits", "optimizer", "accumulation",
         "buffers", "gathered", "fixed")
    )
    for name in names.split()
}  # fmt: skip
_LEAST_GIB = 0.05  # parts of memory that are smaller on every rank are not drawn


def part_hues(stages: Sequence[Mapping[str, float]]) -> dict[str, str]:
    """Return a mapping from each part of memory, such as activations, to its colour. Parts that are small on every
    rank are left out. Parts without a fixed colour are grey."""
    parts = [part for part in stages[0] if max(sizes[part] for sizes in stages) >= _LEAST_GIB]
    return {part: HUES.get(part, MUTED) for part in parts}


def _levels(capacity_gib: float, usable_gib: float, axis: str = "y", end: float = 0, log: bool = False) -> Figure:
    """Return lines at the capacity of a GPU and at the planned limit, as ``shapes`` and ``notes``.

    ``axis`` is the axis of memory. If it is x, the lines are vertical, and labels are on the side with more space.
    ``end`` is then the end of the x axis.
    """
    shapes, notes = [], []
    for gib, label, dash in (
        (capacity_gib, f"{capacity_gib:g} GiB: capacity", "solid"),
        (usable_gib, f"{usable_gib:.3g} GiB: limit of the plan", "dot"),
    ):
        other, early = "x" if axis == "y" else "y", axis == "x" and gib < end / 2
        shapes.append(charts.mark_line(axis, gib, dash=dash, width=1.2))
        notes.append(
            {f"{other}ref": "paper", other: 1, axis: math.log10(gib) if log else gib, "text": label,
             "xanchor": "left" if early else "right", "xshift": (4 if early else -4) if axis == "x" else 0,
             # The label of the dotted line is below the line; the label of the solid line is above it.
             "yanchor": "top" if dash == "dot" else "bottom", "font": {"size": 11.5}}
        )  # fmt: skip
    return {"shapes": shapes, "notes": notes}


def memory(stages: Sequence[Mapping[str, float]], capacity_gib: float, usable_gib: float) -> Figure:
    """Draw a stacked bar for each pipeline rank, with its parts of memory in GiB. Without pipeline parallelism, draw
    a single horizontal bar."""
    p = len(stages)
    totals = [sum(parts.values()) for parts in stages]
    along, across = ("y", "x") if p > 1 else ("x", "y")  # the axis of memory, and the axis of ranks
    traces = []
    for part, hue in part_hues(stages).items():
        sizes = [parts[part] for parts in stages]
        trace = {
            along: [charts.short(size) for size in sizes],
            across: list(range(p)),
            "type": "bar",
            "orientation": "v" if p > 1 else "h",
            "legendgroup": part,
            "marker": {"color": hue},
            "hovertext": [
                f"<b>{part}</b>, {f'rank {rank}' if p > 1 else 'every GPU'}<br>{size:.1f} of {total:.1f} GiB"
                for rank, (size, total) in enumerate(zip(sizes, totals, strict=True))
            ],
        }
        traces.append(trace if p > 1 else trace | _inside([part], 12))
    end = 1.14 * max(capacity_gib, *totals)
    shown = range(0, p, -(-p // 24))
    ranks = {"tickvals": list(shown), "ticktext": [str(rank) for rank in shown], "range": [-0.6, p - 0.4]}
    gib = {"range": [0, end], "showgrid": True}
    gap = 0.18 if p > 3 else 0.5 if p > 1 else 0.1
    levels = _levels(capacity_gib, usable_gib, along, end)
    layout = levels | {"barmode": "stack", "bargap": gap, "uniformtext": {"mode": "hide", "minsize": 10}}
    if p > 1:
        return charts.figure("rank of the pipeline", "GiB on each GPU", traces, x=ranks, y=gib, **layout)
    room_for_words = {"visible": False, "range": [-0.5, 0.85]}
    return charts.figure("GiB on each GPU", "", traces, x=gib, y=room_for_words, **layout)


def _inside(texts: Sequence[str], size: int) -> Figure:
    """Return the part of a bar trace that writes ``texts`` inside the bars."""
    font = {"color": PAPER, "size": size}
    place = {"textposition": "inside", "insidetextanchor": "middle", "textangle": 0}
    return {"text": list(texts), "textfont": font, **place}


@dataclass(frozen=True)
class StepWindow:
    """The part of a step that is drawn: all of it, or both ends with a gap between them."""

    ranks: tuple[int, ...]
    end: float
    head: float  # passes from 0 to this time are drawn,
    tail: float  # and passes from this time to the end

    @property
    def whole(self) -> bool:
        return self.head >= self.tail

    @property
    def gap(self) -> float:
        return 0 if self.whole else GAP * (self.head + self.end - self.tail)

    def place(self, time: float) -> float:
        return time if self.whole or time <= self.head else time - self.tail + self.head + self.gap

    @property
    def width(self) -> float:
        return self.place(self.end)

    def passes(self, found: Sequence[Pass]) -> Sequence[Pass]:
        """Return the passes that lie completely in the drawn part. ``found`` contains the passes of one rank in order
        of time."""
        if self.whole:
            return found
        first = found[: bisect_right(found, self.head, key=lambda each: each.end)]
        return [*first, *found[max(len(first), bisect_left(found, self.tail, key=lambda each: each.start)) :]]


def window(step: Timeline, stages_per_rank: int = 1) -> StepWindow:
    """Return the largest part of a step that can be drawn legibly."""
    p, end = len(step.ranks), float(step.end)
    ranks = tuple(range(p)) if p <= RANKS else tuple(round(n * (p - 1) / (RANKS - 1)) for n in range(RANKS))
    count = sum(len(step.ranks[rank]) for rank in ranks)
    # The number of forward passes of a rank.
    each = count / len(ranks) / (3 if any(one.kind == "weight" for one in step.ranks[-1]) else 2)
    # Filling the pipeline takes about p micro-batches, and emptying it takes about p as well.
    share = min((p + STEADY) / (each / stages_per_rank + p), PASSES / count / 2)
    return (
        StepWindow(ranks, end, end, end) if share >= 0.4 else StepWindow(ranks, end, end * share, end * (1 - share))
    )


_PASS_NAMES: dict[Kind, str] = {
    "forward": "forward pass",
    "backward": "backward pass",
    "input": "backward pass, for the input",
    "weight": "backward pass, for the weights",
}


def passes(step: Timeline, stages_per_rank: int = 1) -> Figure:
    """Draw the forward and backward passes of each rank over the time of a step. A rank waits where nothing is drawn.
    If a rank has several stages, later stages are paler."""
    p, drawn = len(step.ranks), window(step, stages_per_rank)
    unit, scale = ("ms", 1e3) if step.end < 1 else ("s", 1.0)
    by_kind: dict[Kind, list[tuple[int, Pass]]] = {}
    for row, rank in enumerate(drawn.ranks):
        for each in drawn.passes(step.ranks[rank]):
            if each.end > each.start:
                by_kind.setdefault(each.kind, []).append((row, each))
    traces = []
    for kind, found in by_kind.items():
        turns = [each.stage // p for _, each in found]
        # Boxes show their numbers if all numbers are legible at the width of a page.
        narrowest = min(each.end - each.start for _, each in found) / drawn.width * 1000
        readable = narrowest >= 5 + 6.5 * max(len(str(each.micro_batch)) for _, each in found)
        trace = {
            "type": "bar",
            "orientation": "h",
            "y": [row for row, _ in found],
            "base": [charts.short(drawn.place(each.start)) for _, each in found],
            "x": [charts.short(each.end - each.start) for _, each in found],
            "legendgroup": kind,
            "marker": {
                "color": HUES[kind],
                "opacity": [1 - 0.55 * turn / max(stages_per_rank - 1, 1) for turn in turns],
                "line": {"color": PAPER, "width": 0.6 if narrowest >= 3 else 0.2},
            },
            "hovertext": [
                f"<b>micro-batch {each.micro_batch}, {_PASS_NAMES[kind]}</b><br>stage {each.stage} on rank "
                f"{drawn.ranks[row]}<br>{each.start * scale:.4g} to {each.end * scale:.4g} {unit}"
                for row, each in found
            ],
        }
        traces.append(trace | _inside([str(each.micro_batch) for _, each in found], 10) if readable else trace)
    ticks = [t / scale for t in numbers.linear_ticks(0, drawn.head * scale, 6 if drawn.whole else 3)]
    shapes, notes = [], []
    if not drawn.whole:
        ticks += [t / scale for t in numbers.linear_ticks(drawn.tail * scale, drawn.end * scale, 3)]
        font = {"size": 18, "color": MUTED}
        notes.append({"x": drawn.head + drawn.gap / 2, "yref": "paper", "y": 0.5, "text": "…", "font": font})
        shapes += [charts.mark_line("x", edge, MUTED, "dot") for edge in (drawn.head, drawn.head + drawn.gap)]
    places, labels = [charts.short(drawn.place(t)) for t in ticks], [f"{t * scale:.4g}" for t in ticks]
    rows = len(drawn.ranks)
    return charts.figure(
        f"{'milliseconds' if unit == 'ms' else 'seconds'} from the start of a step",
        "rank of the pipeline",
        traces,
        x={"tickvals": places, "ticktext": labels, "range": [0, drawn.width * 1.005]},
        y={"tickvals": list(range(rows)), "ticktext": [str(rank) for rank in drawn.ranks],
           "range": [rows - 0.4, -0.6], "showgrid": False},
        shapes=shapes,
        notes=notes,
        barmode="overlay",
        bargap=0.12,
        uniformtext={"mode": "hide", "minsize": 8},
    )  # fmt: skip


_SYMBOLS = {"none": "circle", "selective": "diamond", "full": "square"}


def layouts(
    candidates: Sequence[LayoutCandidate],
    front: Sequence[LayoutCandidate],
    chosen: LayoutCandidate,
    capacity_gib: float,
    usable_gib: float,
) -> tuple[Figure, int]:
    """Draw layouts by step time and memory. Return the chart and the number of layouts that it shows.

    ``candidates`` are sorted with the best first. ``front`` contains the layouts that no other layout beats in both
    time and memory.
    """
    slowest = max(SLOWEST * min(each.time.step for each in [*candidates, chosen]), 1.3 * chosen.time.step)
    shown = [each for each in candidates if each.time.step <= slowest][:DOTS]
    times, sizes = [each.time.step for each in [*shown, chosen]], [_gib(each) for each in [*shown, chosen]]

    def dots(found: Sequence[LayoutCandidate], head: str = "", **style: Any) -> Figure:
        x, y = [each.time.step for each in found], [_gib(each) for each in found]
        return charts.scatter(x, y, "markers", hovertext=[_hover(each, head) for each in found], **style)

    line = [each for each in front if each.time.step <= slowest]
    traces = [charts.line([each.time.step for each in line], [_gib(each) for each in line], INK, 1.5, shape="hv")]
    for tp, hue in tensor_hues(shown).items():
        members = [each for each in shown if each.arrangement.layout.tp == tp]
        shapes = [_SYMBOLS[each.arrangement.layout.recompute] if each.trained else "x" for each in members]
        marker = {"color": hue, "size": 8, "opacity": 0.8, "symbol": shapes}
        traces.append(dots(members, legendgroup=f"tp {tp}", marker=marker))
    ring = {"color": INK, "size": 17, "symbol": "circle-open", "line": {"width": 2.5, "color": INK}}
    traces.append(dots([chosen], "<b>chosen</b><br>", marker=ring))
    levels = _levels(capacity_gib, usable_gib, log=True)
    low, high = min(*sizes, capacity_gib / 4) / 1.1, max(*sizes, capacity_gib) * 1.35
    levels["notes"].append(
        {"x": math.log10(chosen.time.step), "y": math.log10(_gib(chosen)), "text": "<b>chosen</b>",
         "xanchor": "left", "xshift": 12, "yanchor": "bottom", "yshift": 4, "font": {"size": 12.5}}
    )  # fmt: skip
    figure = charts.figure(
        "seconds per step",
        "GiB on each GPU",
        traces,
        x=charts.log_axis(min(times) / 1.04, max(times) * 1.04, "{:.3g}".format, most=10),
        y=charts.log_axis(low, high, "{:.3g}".format, most=8),
        **levels,
    )
    return figure, len(shown)


def tensor_hues(candidates: Iterable[LayoutCandidate]) -> dict[int, str]:
    """Return a mapping from each tensor-parallel degree to its colour."""
    degrees = sorted({each.arrangement.layout.tp for each in candidates})
    return {tp: charts.hue(n) for n, tp in enumerate(degrees)}


def _hover(each: LayoutCandidate, head: str) -> str:
    parts = str(each.arrangement).split(" · ")
    rows = [" · ".join(parts[n : n + 4]) for n in range(0, len(parts), 4)]
    if not each.trained:
        rows.append("planned and exported, not trained by leaven")
    return "<br>".join([f"{head}{numbers.duration(each.time.step)} a step, {_gib(each):.1f} GiB", *rows])


def _gib(candidate: LayoutCandidate) -> float:
    return candidate.memory.total / GIB


def ramp(plan: RampPlan) -> Figure:
    """Draw the throughput of one GPU against the global batch size, and mark where a batch ramp starts."""
    full, start, colour = plan.points[-1], plan.start, charts.hue(0)
    marker = {
        "size": 7,
        "color": colour,
        "line": {"width": 1, "color": colour},
        "symbol": ["circle" if point.filled else "circle-open" for point in plan.points],
    }
    hovers = [
        f"<b>{point.global_batch:,} sequences, {numbers.quantity(point.batch_tokens)} tokens</b><br>"
        f"{point.tflops_per_gpu:.3g} TFLOP/s, {point.share:.0%} of the full batch's throughput<br>"
        f"micro-batch {point.micro_batch}, accumulate {point.grad_accumulation}, "
        f"{numbers.value(point.step_seconds)} s a step"
        + ("" if point.filled else "<br>fewer micro-batches than stages: leaven does not train it")
        for point in plan.points
    ]
    x, y = [point.batch_tokens for point in plan.points], [point.tflops_per_gpu for point in plan.points]
    curve = charts.line(x, y, colour, hovertext=hovers) | {"mode": "lines+markers", "marker": marker}
    # The curve rises, so labels are below and to the right of their points, or above and to the left.
    early = start.batch_tokens < math.sqrt(plan.points[0].batch_tokens * full.batch_tokens)
    words = [
        (start, f"<b>start {numbers.quantity(start.batch_tokens)}<br>{start.share:.0%} of full speed</b>", early)
    ]
    if start is not full:
        words.append((full, f"full: {full.tflops_per_gpu:.3g} TFLOP/s", False))
    return charts.figure(
        "global batch, tokens",
        "TFLOP/s of each GPU",
        [curve],
        x=charts.log_axis(x[0], x[-1], numbers.tick, most=8),
        y={"range": [0, 1.18 * max(y)], "showgrid": True},
        shapes=[
            {"type": "line", "x0": start.batch_tokens, "x1": start.batch_tokens, "y0": 0, "y1": start.tflops_per_gpu,
             "line": {"color": INK, "width": 1.2, "dash": "dot"}}
        ],
        notes=[
            {"x": math.log10(point.batch_tokens), "y": point.tflops_per_gpu, "text": label,
             "xanchor": "left" if right else "right", "yanchor": "top" if right else "bottom",
             "xshift": 8 if right else -4, "yshift": -4 if right else 7}
            for point, label, right in words
        ],
        margin={"l": 48, "r": 30, "t": 26, "b": 44},
    )  # fmt: skip
