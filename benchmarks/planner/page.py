"""Write docs/evidence/planner-accuracy.md: the benchmark's output and a chart of predictions against measurements."""

import math
import re
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path

from benchmarks.planner.verdict import BARS, BUBBLE_BAR, Comparison, TableVerdict

from leaven.planning.arrangement import Arrangement
from leaven.planning.timing import step_time
from leaven.recipe.layout import Layout

PAGE = Path(__file__).parents[2] / "docs" / "evidence" / "planner-accuracy.md"
PICTURE = PAGE.with_suffix(".svg")
_FENCE = re.compile(r"```\n\$ python benchmarks/planner_accuracy\.py\n.*?```", re.DOTALL)
_BARS = re.compile(r"\| what \| bar \| result \|\n(?:\|.*\n)+")
_HEAD = "| table | rows with memory | first run | today | rows with time | first run | "
_BLIND_TABLE, _LATER_TABLE = (
    re.compile(rf"{re.escape(_HEAD + last)}.*\n(?:\|.*\n)+") for last in ("second run", "today")
)
# Mean errors of earlier runs on each table of the blind tests, by kind; see the file.
_TESTS: dict[str, dict[str, dict[str, list[float]]]] = tomllib.loads(
    (Path(__file__).parents[1] / "published" / "blind-runs.toml").read_text(encoding="utf-8")
)
BLIND = _TESTS["first"]
LATER = {test: tables for test, tables in _TESTS.items() if test != "first"}
_EARLIER = {table: errors for tables in _TESTS.values() for table, errors in tables.items()}
PROPER = {  # the tables that count
    test: [name for name in tables if not name.endswith(("_fp8", "_unsure", "_natural", "_near"))]
    for test, tables in LATER.items()
}
OTHER_CODES = (
    "automodel",
    "primus",
    "torchtitan",
    "titan",
    "prime_rl",
    "trl",
    "pith",
    "olmoe_h100",
    "halo",
)  # others are Megatron-LM on NVIDIA's devices
SEARCHED = ("simumax_b200_deepseek_v2", "simumax_b200_llama3_70b")
EXPERTS = ("simumax_b200_deepseek_v2", "simumax_b200_deepseek_v3", "megatron_experts_h100", "megatron_bridge_experts")
_TWO_READINGS = ("megatron_experts_h100", "qwen3 row 3")
_COMMAND = "$ python benchmarks/planner_accuracy.py"
# One hue a table, of equal weight on a light and on a dark page (Okabe and Ito's, the yellow darkened).
_HUES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b8860b", "#56b4e9", "#7a5195", "#8c8c8c",
         "#004d40", "#a52a2a", "#7cb342", "#e91e63", "#3f51b5", "#795548", "#607d8b", "#9e9d24")  # fmt: skip
_NOTHING = "no row has it: not checked on a table"
_STYLE = """
text { font: 13px system-ui, sans-serif; fill: #24292f } .small { font-size: 11px; fill: #57606a }
.frame { fill: none; stroke: #8c959f } .grid { stroke: #d0d7de } .even { stroke: #24292f } .band { fill: #afb8c1 }
circle { fill-opacity: .75 }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3 } .small { fill: #9198a1 } .frame { stroke: #656c76 } .grid { stroke: #30363d }
.even { stroke: #e6edf3 } .band { fill: #484f58 } }
""".strip()
_SIZE, _LEFT, _TOP = 330, 62, 46


def renewed(page: str, printed: str, verdicts: list[TableVerdict], later: list[TableVerdict]) -> str:
    """The page with the current output in its code block, and the current results in its tables.

    ``later`` has the results on the tables of the later blind tests.
    """
    page = _FENCE.sub(lambda _: f"```\n{_COMMAND}\n{printed}\n```", page)
    page = _BLIND_TABLE.sub(lambda _: blind_test(verdicts), page)
    page = _LATER_TABLE.sub(lambda _: later_blind_tests(later), page)
    return _BARS.sub(lambda _: bars(verdicts, later), page)


def blind_test(verdicts: list[TableVerdict]) -> str:
    """The table of the blind test: mean errors of the first runs and of today, by table and over groups of rows."""
    unsearched = [name for name in BLIND if name not in SEARCHED]
    rows = [(f"{name}{' (searched early)' if name in SEARCHED else ''}", [name]) for name in BLIND]
    rows += [
        ("**all rows that were not searched early**", unsearched),
        ("**of these, the rows of models with experts**", [name for name in unsearched if name in EXPERTS]),
        ("**of these, the rows of dense models**", [name for name in unsearched if name not in EXPERTS]),
        ("**all rows of models with experts**", list(EXPERTS)),
    ]
    return f"{_HEAD}second run | today |\n|---|---|---|---|---|---|---|---|\n" + _blind_rows(rows, verdicts)


def later_blind_tests(verdicts: list[TableVerdict]) -> str:
    """The table of the later blind tests: mean errors of the first run and of today."""
    proper = [name for names in PROPER.values() for name in names]
    others = [name for name in proper if name.startswith(OTHER_CODES)]
    rows = list[tuple[str, list[str]]]()
    for test, names in PROPER.items():
        rows += [(name, [name]) for name in names]
        rows += [(f"**the {test} test: all of these**", names)]
    rows += [
        ("**all tests, Megatron-LM and its forks on NVIDIA's devices**", [n for n in proper if n not in others]),
        ("**all tests, other codes or devices**", others),
    ]
    rows += [(name, [name]) for tables in LATER.values() for name in tables if name not in proper]
    return f"{_HEAD}today |\n|---|---|---|---|---|---|---|\n" + _blind_rows(rows, verdicts)


def _blind_rows(rows: Iterable[tuple[str, list[str]]], verdicts: list[TableVerdict]) -> str:
    found = {verdict.table.id: verdict for verdict in verdicts}
    return "".join(f"| {' | '.join([said, *_blind_cells(names, found)])} |\n" for said, names in rows)


def _blind_cells(names: list[str], found: dict[str, TableVerdict]) -> list[str]:
    """Numbers of rows and mean errors over the rows of some tables of a blind test; empty without such rows."""
    cells = []
    for kind in ("memory", "time"):
        rows, *means = blind_means(names, found, kind)
        cells += [f"{rows:.0f}", *(f"{mean:.1%}" for mean in means)] if rows else [""] * (1 + len(means))
    return cells


def blind_means(names: list[str], found: dict[str, TableVerdict], kind: str) -> list[float]:
    """The number of rows of some tables, and their mean errors in the earlier runs and today."""
    rows, sums = 0, list[float]()
    for name in names:
        errors = [*map(abs, found[name].errors(kind))]
        means = [*_EARLIER[name][kind], sum(errors) / max(1, len(errors))]
        rows += len(errors)
        sums = [total + len(errors) * mean for total, mean in zip(sums or [0.0] * len(means), means, strict=True)]
    return [rows, *(total / max(1, rows) for total in sums)]


def as_printed(row: Comparison) -> float:
    """The error of the time of row 3 of Qwen3 in the layout of its table; it is planned in that of its script."""
    assert row.case is not None
    case, layout = row.case, Layout(dp=128, tp=2, ep=4, zero=3, recompute="full")
    return step_time(case.shape, Arrangement(layout, 4, 4), case.cluster, case.stack.code).step / row.measured - 1


def bars(verdicts: list[TableVerdict], later: list[TableVerdict]) -> str:
    """The table of limits: what each one limits, and the result."""
    memory = [found for verdict in verdicts if (found := verdict.errors("memory"))]
    time = [found for verdict in verdicts if (found := verdict.errors("time"))]
    groups = [group for verdict in verdicts for group in verdict.groups]
    oom, fit = sum(verdict.oom for verdict in verdicts), sum(len(verdict.oom_called_fit) for verdict in verdicts)
    bubbles = [bubble for verdict in verdicts for bubble in verdict.bubbles]

    def worst(kind: str, form: str, unit: str = "rows") -> tuple[str, float]:
        values = [value for verdict in verdicts for value in getattr(verdict, kind)]
        said = f"{form.format(max(values))} at worst of {len(values)} {unit}" if values else _NOTHING
        return said, max(values, default=0.0)

    def means(tables: list[list[float]]) -> tuple[str, float]:
        found = sorted(sum(map(abs, errors)) / len(errors) for errors in tables)
        return ", ".join(f"{mean:.1%}" for mean in found) or _NOTHING, max(found, default=0.0)

    low = min((min(errors) for errors in memory), default=0.0)
    exact = (
        ("parameters", "the printed digits", "params_err_max", *worst("params", "{:.2%}")),
        ("FLOPs, where the source says how it counts", "0.1%", "flops_err_max", *worst("flops", "{:.2%}")),
        ("MFU and HFU from the row's own time or rate", "0.2 points", "mfu_err_max_points",
         *worst("mfu", "{:.2f}", "numbers")),
        ("days, given TFLOP/s", "2%", "days_err_max", *worst("days", "{:.1%}")),
        ("memory, mean error of a table", "8%", "memory_err_mean", *means(memory)),
        ("time, mean error of a table", "15%", "time_err_mean", *means(time)),
    )  # fmt: skip
    lines = [(what, bar, said, value <= BARS[key]) for what, bar, key, said, value in exact]
    by_name = {verdict.table.id: verdict for verdict in verdicts}
    if by_name.keys() >= set(EXPERTS):
        unsearched = [name for name in EXPERTS if name not in SEARCHED]
        number, first, again, today = blind_means(unsearched, by_name, "time")
        of_experts = f"time, mean error of the {number:.0f} rows with experts that were not searched early"
        row = next(point for point in by_name[_TWO_READINGS[0]].points if point.where.endswith(_TWO_READINGS[1]))
        printed = today + (abs(as_printed(row)) - abs(row.error)) / number
        for when, mean in (
            ("first run, blind", first),
            ("second run", again),
            ("today, not blind", today),
            ("today, with row 3 of Qwen3 as its table prints it", printed),
        ):
            said = f"{mean:.1%}"
            lines.append((f"{of_experts}: {when}", "15%", said, mean <= BARS["time_err_mean"]))
    by_name = {verdict.table.id: verdict for verdict in later}
    if by_name.keys() >= {name for names in PROPER.values() for name in names}:
        for test, names in PROPER.items():
            for kind, bar in (("time", "time_err_mean"), ("memory", "memory_err_mean")):
                rows, first, today = blind_means(names, by_name, kind)
                what = f"{kind}, mean error of the {rows:.0f} rows of the {test} blind test on experts"
                for when, mean in (("its only run", first), ("today, not blind", today)):
                    lines.append((f"{what}: {when}", f"{BARS[bar]:.0%}", f"{mean:.1%}", mean <= BARS[bar]))
    lines += [
        ("memory, lowest row", "-20%", f"{low:.1%}" if memory else _NOTHING, low >= BARS["memory_worst_low"]),
        ("rows that ran out of memory and are called fitting", "none", f"{fit} of {oom}" if oom else _NOTHING,
         not fit),
        ("measured best layout among the three predicted best", "in every group",
         f"{sum(groups)} of {len(groups)}" if groups else _NOTHING, all(groups)),
        ("the bubble", "0.5%", f"{max(bubbles):.2%} at worst" if bubbles else _NOTHING,
         max(bubbles, default=0.0) <= BUBBLE_BAR),
    ]  # fmt: skip
    rows = (
        f"| {what} | {bar} | {said if said is _NOTHING else ('met: ' if met else '**missed**: ') + said} |\n"
        for what, bar, said, met in lines
    )
    return "| what | bar | result |\n|---|---|---|\n" + "".join(rows)


def picture(verdicts: list[TableVerdict]) -> str:
    """An SVG of two panels: step time in seconds and memory in GiB, each point a published row."""
    tables = [verdict.table.id for verdict in verdicts if verdict.points]
    hues = dict(zip(tables, _HUES, strict=False))
    width, height = 2 * (_SIZE + _LEFT) + 24, _TOP + _SIZE + 70 + 18 * math.ceil(len(tables) / 2)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        'aria-label="Predicted against measured step time and memory">',
        f"<style>{_STYLE}</style>",
    ]
    panels: tuple[tuple[str, str, float, Callable[[float], float]], ...] = (
        ("time", "step time, s (band: 15%)", 0.15, lambda seconds: seconds),
        ("memory", "memory of a GPU, GiB (band: 8%)", 0.08, lambda size: size / 2**30),
    )
    for number, (kind, title, band, unit) in enumerate(panels):
        found = [(v.table.id, point) for v in verdicts for point in v.points if point.kind == kind]
        parts += _panel(found, hues, (title, band, unit), number * (_SIZE + _LEFT + 12) + _LEFT)
    for number, table in enumerate(tables):
        x, y = _LEFT + (number % 2) * (_SIZE + _LEFT + 12), _TOP + _SIZE + 62 + 18 * (number // 2)
        parts.append(
            f'<circle cx="{x}" cy="{y - 4}" r="5" fill="{hues[table]}"/><text x="{x + 12}" y="{y}">{table}</text>'
        )
    return "\n".join([*parts, "</svg>", ""])


def _panel(
    found: list[tuple[str, Comparison]],
    hues: dict[str, str],
    panel: tuple[str, float, Callable[[float], float]],
    left: float,
) -> list[str]:
    title, band, unit = panel
    ends = [unit(value) for _, point in found for value in (point.predicted, point.measured)]
    low, high = math.log10(min(ends)) - 0.05, math.log10(max(ends)) + 0.05

    def at(value: float) -> float:
        return (math.log10(value) - low) / (high - low) * _SIZE

    bottom = _TOP + _SIZE
    shift = math.log10(1 + band) / (high - low) * _SIZE
    parts = [
        f'<clipPath id="p{left:.0f}"><rect x="{left}" y="{_TOP}" width="{_SIZE}" height="{_SIZE}"/></clipPath>',
        f'<g clip-path="url(#p{left:.0f})"><path class="band" fill-opacity=".35" d="M{left} {bottom - shift:.1f}'
        f'L{left + _SIZE} {_TOP - shift:.1f}L{left + _SIZE} {_TOP + shift:.1f}L{left} {bottom + shift:.1f}z"/></g>',
        f'<text x="{left}" y="{_TOP - 14}">{title}</text>',
    ]
    ticks = [digit * 10.0**power for power in range(-3, 4) for digit in (1, 2, 5)]
    for tick in ticks if high - low < 1.5 else ticks[::3]:
        if low < math.log10(tick) < high:
            x, y = left + at(tick), bottom - at(tick)
            parts.append(f'<path class="grid" d="M{x:.1f} {_TOP}V{bottom}M{left} {y:.1f}H{left + _SIZE}"/>')
            parts.append(f'<text class="small" text-anchor="middle" x="{x:.1f}" y="{bottom + 15}">{tick:g}</text>')
            parts.append(f'<text class="small" text-anchor="end" x="{left - 6}" y="{y + 4:.1f}">{tick:g}</text>')
    parts.append(f'<path class="even" d="M{left} {bottom}L{left + _SIZE} {_TOP}"/>')
    parts.append(f'<rect class="frame" x="{left}" y="{_TOP}" width="{_SIZE}" height="{_SIZE}"/>')
    middle = _TOP + _SIZE / 2
    parts.append(f'<text class="small" text-anchor="middle" x="{left + _SIZE / 2}" y="{bottom + 34}">measured</text>')
    parts.append(
        f'<text class="small" text-anchor="middle" transform="rotate(-90 {left - 44} {middle})" x="{left - 44}" '
        f'y="{middle}">predicted</text>'
    )
    for table, point in found:
        x, y = left + at(unit(point.measured)), bottom - at(unit(point.predicted))
        said = f"{point.where}: {unit(point.predicted):.3g} predicted, {unit(point.measured):.3g} measured"
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{hues[table]}"><title>{said}</title></circle>')
    return parts
