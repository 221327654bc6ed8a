"""The pictures of a plan: memory by stage, the passes of a pipeline, layouts by time and memory, the batch ramp."""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from leaven.planning.layouts import Candidate
from leaven.planning.memory import GIB
from leaven.planning.ramp import RampPlan
from leaven.planning.schedule import Kind, Pass, Timeline
from leaven.views import figures, numbers
from leaven.views.figures import INK, MUTED, PAPER

RANKS, PASSES = 12, 3300  # of a pipeline that are drawn; what is computed has no limit
STEADY = 4  # micro-batches that are drawn of the steady part at either end of a long step
GAP = 0.04  # of the width, where the middle of a long step is left out
DOTS, SLOWEST = 1500, 4  # layouts that are drawn: the best so many, of those up to so many times slower than the best

HUES: dict[str, str] = {
    "weights": "var(--hue-1)",
    "gathered": "var(--hue-8)",
    "grads": "var(--hue-3)",
    "accumulation": "var(--hue-6)",
    "optimizer": "var(--hue-5)",
    "activations": "var(--hue-2)",
    "logits": "var(--hue-4)",
    "buffers": "var(--hue-7)",
    "fixed": "var(--hue-9)",
    "forward": "var(--hue-1)",
    "backward": "var(--hue-2)",
    "input": "var(--hue-2)",
    "weight": "var(--hue-3)",
}
_LEAST_GIB = 0.05  # of a part, to be drawn


def part_hues(stages: Sequence[Mapping[str, float]]) -> dict[str, str]:
    """A colour for every part of memory that is worth one on some rank; what is left is grey."""
    parts = [part for part in stages[0] if max(sizes[part] for sizes in stages) >= _LEAST_GIB]
    return {part: HUES.get(part, MUTED) for part in parts}


_ALL, _USABLE = "{:g} GiB: all of it".format, "{:.3g} GiB: planned with".format


def _level(chart: Any, gib: float, said: str, dash: str = "solid", *, axis: str = "y", log: bool = False) -> None:
    """A line across the picture at so much memory, with its words at its end."""
    other, y = ("x", math.log10(gib) if log else gib) if axis == "y" else ("y", gib)
    early = axis == "x" and gib < chart.layout.xaxis.range[1] / 2  # the words lie where there is room
    chart.add_shape(
        type="line",
        line={"color": INK, "width": 1.2, "dash": dash},
        **{f"{other}ref": "paper", f"{other}0": 0, f"{other}1": 1, f"{axis}0": gib, f"{axis}1": gib},
    )
    chart.add_annotation(
        text=said,
        showarrow=False,
        font={"size": 11.5, "color": INK},
        **{f"{other}ref": "paper", other: 1, axis: y, "xanchor": "left" if early else "right"},
        # Of two levels the words of the dotted one lie within: below it, or beside it and lower.
        yanchor="top" if dash == "dot" else "bottom",
        xshift=(4 if early else -4) if axis == "x" else 0,
    )


def memory(stages: Sequence[Mapping[str, float]], capacity_gib: float, usable_gib: float) -> Any:
    """The parts of memory on each rank of the pipeline, one on the other, and what a GPU has.

    ``stages``: GiB by part. Without a pipeline it is one bar that lies.
    """
    go = figures.plotly()
    p = len(stages)
    totals = [sum(parts.values()) for parts in stages]
    along, across = ("y", "x") if p > 1 else ("x", "y")  # of memory, and of ranks
    titles = ("rank of the pipeline", "GiB on each GPU") if p > 1 else ("GiB on each GPU", "")
    chart = figures.figure(
        *titles, barmode="stack", bargap=0.18 if p > 3 else 0.5 if p > 1 else 0.1,
        uniformtext={"mode": "hide", "minsize": 10},
    )  # fmt: skip
    for part, hue in part_hues(stages).items():
        sizes = [parts[part] for parts in stages]
        chart.add_trace(
            go.Bar(
                **{along: [_short(size) for size in sizes], across: list(range(p))},
                orientation="v" if p > 1 else "h",
                name=part,
                legendgroup=part,
                marker={"color": hue, "line": {"color": PAPER, "width": 0.5}},
                text=[part] * p if p == 1 else None,
                textposition="inside",
                insidetextanchor="middle",
                textangle=0,
                textfont={"color": PAPER, "size": 12},
                customdata=[
                    f"<b>{part}</b>, {f'rank {rank}' if p > 1 else 'every GPU'}<br>{size:.1f} of {total:.1f} GiB"
                    for rank, (size, total) in enumerate(zip(sizes, totals, strict=True))
                ],
                hovertemplate="%{customdata}<extra></extra>",
            )
        )
    shown = range(0, p, -(-p // 24))
    ranks = {"tickvals": list(shown), "ticktext": [str(rank) for rank in shown], "range": [-0.6, p - 0.4]}
    if p == 1:
        ranks |= {"visible": False, "range": [-0.5, 0.85]}  # room for the words
    room = {"range": [0, 1.14 * max(capacity_gib, *totals)], "showgrid": True}
    chart.update_layout({f"{across}axis": ranks, f"{along}axis": room})
    _level(chart, capacity_gib, _ALL(capacity_gib), axis=along)
    _level(chart, usable_gib, _USABLE(usable_gib), "dot", axis=along)
    return chart


@dataclass(frozen=True)
class Window:
    """Which passes of a step are drawn, and where: all, or those at both ends with a gap between them."""

    ranks: tuple[int, ...]
    end: float
    head: float  # drawn from 0 to here,
    tail: float  # and from here to the end

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


def window(step: Timeline, stages_per_rank: int = 1) -> Window:
    """The most of a step that is still a picture."""
    p, end = len(step.ranks), float(step.end)
    ranks = tuple(range(p)) if p <= RANKS else tuple(round(n * (p - 1) / (RANKS - 1)) for n in range(RANKS))
    count = sum(len(step.ranks[rank]) for rank in ranks)
    each = count / len(ranks) / (3 if any(one.kind == "weight" for one in step.ranks[-1]) else 2)  # forward passes
    # A step fills its pipeline in about p micro-batches and empties it in as many.
    share = min((p + STEADY) / (each / stages_per_rank + p), PASSES / count / 2)
    return Window(ranks, end, end, end) if share >= 0.4 else Window(ranks, end, end * share, end * (1 - share))


_SAID: dict[Kind, str] = {
    "forward": "forward pass",
    "backward": "backward pass",
    "input": "backward pass, for the input",
    "weight": "backward pass, for the weights",
}


def passes(step: Timeline, stages_per_rank: int = 1) -> Any:
    """Who computes what and when; where nothing is drawn a rank waits. Later stages of a rank are paler."""
    go = figures.plotly()
    p, drawn = len(step.ranks), window(step, stages_per_rank)
    unit, scale = ("ms", 1e3) if step.end < 1 else ("s", 1.0)
    chart = figures.figure(
        f"{'milliseconds' if unit == 'ms' else 'seconds'} from the start of a step",
        "rank of the pipeline",
        barmode="overlay",
        bargap=0.12,
        uniformtext={"mode": "hide", "minsize": 8},
    )
    by_kind: dict[Kind, list[tuple[int, Pass]]] = {}
    for row, rank in enumerate(drawn.ranks):
        for each in _within(step.ranks[rank], drawn):
            if each.end > each.start:
                by_kind.setdefault(each.kind, []).append((row, each))
    for kind, found in by_kind.items():
        turns = [each.stage // p for _, each in found]
        # A number in a box where the numbers of all would be read, at the width of a page.
        narrowest = min(each.end - each.start for _, each in found) / drawn.width * 1000
        readable = narrowest >= 5 + 6.5 * max(len(str(each.micro_batch)) for _, each in found)
        chart.add_trace(
            go.Bar(
                orientation="h",
                y=[row for row, _ in found],
                base=[_short(drawn.place(each.start)) for _, each in found],
                x=[_short(each.end - each.start) for _, each in found],
                name=_SAID[kind],
                legendgroup=kind,
                marker={
                    "color": HUES[kind],
                    "opacity": [1 - 0.55 * turn / max(stages_per_rank - 1, 1) for turn in turns],
                    "line": {"color": PAPER, "width": 0.6 if narrowest >= 3 else 0.2},
                },
                text=[str(each.micro_batch) for _, each in found] if readable else None,
                textposition="inside",
                insidetextanchor="middle",
                textangle=0,
                textfont={"color": PAPER, "size": 10},
                customdata=[
                    f"<b>micro-batch {each.micro_batch}, {_SAID[kind]}</b><br>stage {each.stage} on rank "
                    f"{drawn.ranks[row]}<br>{each.start * scale:.4g} to {each.end * scale:.4g} {unit}"
                    for row, each in found
                ],
                hovertemplate="%{customdata}<extra></extra>",
            )
        )
    chart.update_yaxes(
        tickvals=list(range(len(drawn.ranks))),
        ticktext=[str(rank) for rank in drawn.ranks],
        range=[len(drawn.ranks) - 0.4, -0.6],
        showgrid=False,
    )
    ticks = [t / scale for t in numbers.linear_ticks(0, drawn.head * scale, 6 if drawn.whole else 3)]
    if not drawn.whole:
        ticks += [t / scale for t in numbers.linear_ticks(drawn.tail * scale, drawn.end * scale, 3)]
        middle = drawn.head + drawn.gap / 2
        chart.add_annotation(
            x=middle, yref="paper", y=0.5, text="…", showarrow=False, font={"size": 18, "color": MUTED}
        )
        for edge in (drawn.head, drawn.head + drawn.gap):
            chart.add_shape(
                type="line", x0=edge, x1=edge, yref="paper", y0=0, y1=1,
                line={"color": MUTED, "width": 1, "dash": "dot"},
            )  # fmt: skip
    chart.update_xaxes(
        tickvals=[_short(drawn.place(t)) for t in ticks],
        ticktext=[f"{t * scale:.4g}" for t in ticks],
        range=[0, drawn.width * 1.005],
    )
    return chart


def _within(found: Sequence[Pass], drawn: Window) -> list[Pass]:
    """The passes of a rank that lie wholly in the window; they are in order of time."""
    if drawn.whole:
        return list(found)
    first = found[: bisect_right(found, drawn.head, key=lambda each: each.end)]
    return [*first, *found[max(len(first), bisect_left(found, drawn.tail, key=lambda each: each.start)) :]]


_SYMBOLS = {"none": "circle", "selective": "diamond", "full": "square"}


def layouts(
    candidates: Sequence[Candidate],
    front: Sequence[Candidate],
    chosen: Candidate,
    capacity_gib: float,
    usable_gib: float,
) -> tuple[Any, int]:
    """Layouts by the time of a step and the memory they need; how many of them are drawn beside it.

    ``candidates``, the best first, and those of them that no other beats in both.
    """
    go = figures.plotly()
    slowest = max(SLOWEST * min(each.time.step for each in [*candidates, chosen]), 1.3 * chosen.time.step)
    shown = [each for each in candidates if each.time.step <= slowest][:DOTS]
    chart = figures.figure("seconds a step", "GiB on each GPU")
    inside = [*shown, chosen]
    times, sizes = [each.time.step for each in inside], [_gib(each) for each in inside]
    figures.log_axis(chart, "xaxis", min(times) / 1.04, max(times) * 1.04, _three_digits, most=10)
    low, high = min(*sizes, capacity_gib / 4) / 1.1, max(*sizes, capacity_gib) * 1.35
    figures.log_axis(chart, "yaxis", low, high, _three_digits, most=8)
    line = [each for each in front if each.time.step <= slowest]
    chart.add_trace(
        go.Scatter(
            x=[_short(each.time.step) for each in line], y=[_short(_gib(each)) for each in line], mode="lines",
            line={"color": INK, "width": 1.5, "shape": "hv"}, hoverinfo="skip",
        )
    )  # fmt: skip
    for tp, hue in tensor_hues(shown).items():
        points = [each for each in shown if each.arrangement.layout.tp == tp]
        chart.add_trace(
            go.Scatter(
                x=[_short(each.time.step) for each in points],
                y=[_short(_gib(each)) for each in points],
                mode="markers",
                name=f"tp {tp}",
                legendgroup=f"tp {tp}",
                marker={
                    "color": hue,
                    "size": 8,
                    "opacity": 0.8,
                    "symbol": [_symbol(each) for each in points],
                    "line": {"color": PAPER, "width": 0.8},
                },
                customdata=[_layout_said(each) for each in points],
                hovertemplate="%{customdata}<extra></extra>",
            )
        )
    chart.add_trace(
        go.Scatter(
            x=[_short(chosen.time.step)], y=[_short(_gib(chosen))], mode="markers",
            marker={"color": INK, "size": 17, "symbol": "circle-open", "line": {"width": 2.5, "color": INK}},
            customdata=[_layout_said(chosen, "<b>chosen</b><br>")],
            hovertemplate="%{customdata}<extra></extra>",
        )
    )  # fmt: skip
    chart.add_annotation(
        x=math.log10(chosen.time.step), y=math.log10(_gib(chosen)), text="<b>chosen</b>", showarrow=False,
        xanchor="left", xshift=12, yanchor="bottom", yshift=4, font={"size": 12.5, "color": INK},
    )  # fmt: skip
    _level(chart, capacity_gib, _ALL(capacity_gib), log=True)
    _level(chart, usable_gib, _USABLE(usable_gib), "dot", log=True)
    return chart, len(shown)


def tensor_hues(candidates: Iterable[Candidate]) -> dict[int, str]:
    """A colour for every tensor-parallel degree."""
    degrees = sorted({each.arrangement.layout.tp for each in candidates})
    return {tp: f"var(--hue-{n % 9 + 1})" for n, tp in enumerate(degrees)}


def _symbol(candidate: Candidate) -> str:
    if not candidate.trained:
        return "x"
    return _SYMBOLS[candidate.arrangement.layout.recompute]


def _layout_said(each: Candidate, head: str = "") -> str:
    parts = str(each.arrangement).split(" · ")
    rows = [" · ".join(parts[n : n + 4]) for n in range(0, len(parts), 4)]
    if not each.trained:
        rows.append("planned and exported, not trained by leaven")
    return "<br>".join([f"{head}{numbers.duration(each.time.step)} a step, {_gib(each):.1f} GiB", *rows])


def ramp(plan: RampPlan) -> Any:
    """Throughput of one GPU against the global batch, and where a ramp would start."""
    go = figures.plotly()
    full, start = plan.points[-1], plan.start
    chart = figures.figure("global batch, tokens", "TFLOP/s of each GPU", margin={"l": 48, "r": 30, "t": 26, "b": 44})
    figures.log_axis(chart, "xaxis", plan.points[0].batch_tokens, full.batch_tokens, numbers.tick, most=8)
    top = 1.18 * max(point.tflops_per_gpu for point in plan.points)
    chart.update_yaxes(range=[0, top], showgrid=True)
    chart.add_trace(
        go.Scatter(
            x=[point.batch_tokens for point in plan.points],
            y=[_short(point.tflops_per_gpu) for point in plan.points],
            mode="lines+markers",
            line={"color": "var(--hue-1)", "width": 2},
            marker={
                "size": 7,
                "color": "var(--hue-1)",
                "symbol": ["circle" if point.filled else "circle-open" for point in plan.points],
            },
            customdata=[
                f"<b>{point.global_batch:,} sequences, {numbers.quantity(point.batch_tokens)} tokens</b><br>"
                f"{point.tflops_per_gpu:.3g} TFLOP/s, {point.share:.0%} of the full batch's<br>"
                f"micro-batch {point.micro_batch}, accumulate {point.grad_accumulation}, "
                f"{numbers.value(point.step_seconds)} s a step"
                + ("" if point.filled else "<br>fewer micro-batches than stages: leaven does not train it")
                for point in plan.points
            ],
            hovertemplate="%{customdata}<extra></extra>",
        )
    )
    chart.add_shape(
        type="line", x0=start.batch_tokens, x1=start.batch_tokens, y0=0, y1=start.tflops_per_gpu,
        line={"color": INK, "width": 1.2, "dash": "dot"},
    )  # fmt: skip
    # The curve rises: words lie below it on their point's right, or above it on their point's left.
    middle = (math.log10(plan.points[0].batch_tokens) + math.log10(full.batch_tokens)) / 2
    early = math.log10(start.batch_tokens) < middle
    words = [
        (start, f"<b>start {numbers.quantity(start.batch_tokens)}<br>{start.share:.0%} of full speed</b>", early)
    ]
    if start is not full:
        words.append((full, f"full: {full.tflops_per_gpu:.3g} TFLOP/s", False))
    for point, said, right in words:
        chart.add_annotation(
            x=math.log10(point.batch_tokens), y=point.tflops_per_gpu, text=said, showarrow=False,
            xanchor="left" if right else "right", yanchor="top" if right else "bottom",
            xshift=8 if right else -4, yshift=-4 if right else 7, font={"size": 12, "color": INK},
        )  # fmt: skip
    return chart


def _three_digits(place: float) -> str:
    return f"{place:.3g}"


def _gib(candidate: Candidate) -> float:
    return candidate.memory.total / GIB


def _short(value: float) -> float:
    return float(f"{value:.6g}")
