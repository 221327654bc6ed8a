"""How far the planner is off on a table, by the field it is compared with."""

import math
import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from benchmarks.planner.cases import Case, Unused, case_of, peak_tflops, shape_of
from benchmarks.planner.tables import Row, Table, number
from leaven.planning.arrangement import Arrangement, bubble
from leaven.planning.conventions import counted
from leaven.planning.layouts import evaluate
from leaven.planning.memory import GIB, worst_stage
from leaven.planning.timing import block_time, step_time
from leaven.recipe.layout import Recompute

BARS = {
    "params_err_max": 0.0,
    "flops_err_max": 1e-3,
    "mfu_err_max_points": 0.2,
    "memory_err_mean": 0.08,
    "memory_worst_low": -0.20,
    "time_err_mean": 0.15,
    "days_err_max": 0.02,
    "oom_called_fit": 0,
    "best_in_top3": True,
}
BUBBLE_BAR = 0.005


@dataclass(frozen=True)
class Point:
    """One comparison; ``error`` is predicted / measured - 1."""

    where: str
    kind: Literal["memory", "time"]
    predicted: float
    measured: float
    case: Case | None = None

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    @property
    def tokens(self) -> int:
        return self.case.tokens if self.case else 0


@dataclass
class Verdict:
    """What was found in a table. Errors are beyond the rounding of what is printed, where they are of exact things."""

    table: Table
    points: list[Point] = field(default_factory=list)
    params: list[float] = field(default_factory=list)
    flops: list[float] = field(default_factory=list)
    mfu: list[float] = field(default_factory=list)
    days: list[float] = field(default_factory=list)
    bubbles: list[float] = field(default_factory=list)
    identities: int = 0
    broken: list[str] = field(default_factory=list)
    oom: int = 0
    oom_called_fit: list[str] = field(default_factory=list)
    ran_called_too_large: list[str] = field(default_factory=list)
    ran: int = 0
    groups: list[bool] = field(default_factory=list)
    anomalies: list[str] = field(default_factory=list)
    unused: Counter[str] = field(default_factory=Counter)

    def errors(self, kind: str) -> list[float]:
        return [point.error for point in self.points if point.kind == kind]

    def to_json(self) -> dict[str, Any]:
        memory, time = self.errors("memory"), self.errors("time")
        return {
            "rows": len(self.table.rows),
            "params_err_max": max(self.params, default=None),
            "flops_err_max": max(self.flops, default=None),
            "mfu_err_max_points": max(self.mfu, default=None),
            "memory_rows": len(memory),
            "memory_err_mean": _mean(list(map(abs, memory))),
            "memory_bias": _mean(memory),
            "memory_worst_low": min(memory, default=None),
            "time_rows": len(time),
            "time_err_mean": _mean(list(map(abs, time))),
            "days_err_max": max(self.days, default=None),
            "oom_called_fit": len(self.oom_called_fit) if self.oom else None,
            "best_in_top3": all(self.groups) if self.groups else None,
        }

    def missed(self) -> list[str]:
        """The bars that are missed, in words."""
        found, values = [], self.to_json()
        for name, bar in BARS.items():
            value = values[name]
            if value is None:
                continue
            above = value < bar if name in {"memory_worst_low", "best_in_top3"} else value > bar
            if above:
                found.append(f"{name} {value if isinstance(value, int) else f'{value:.4g}'}, bar {bar}")
        if self.broken:
            found.append(f"identities broken: {', '.join(self.broken)}")
        if max(self.bubbles, default=0) > BUBBLE_BAR:
            found.append(f"bubble {max(self.bubbles):.4g}, bar {BUBBLE_BAR}")
        return found


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def judge(table: Table) -> Verdict:
    """Compare every row of a table."""
    verdict = Verdict(table)
    for row in table.rows:
        if row.get("anomaly"):
            verdict.anomalies.append(f"{row.where}: {row.get('anomaly')}")
            continue
        _identities(row, verdict)
        try:
            _parameters(row, verdict)
            _days(row, verdict)
            used = _measurements(row, verdict)
        except Unused as why:
            verdict.unused[str(why)] += 1
            continue
        if not used:
            verdict.unused["nothing measured that the planner says"] += 1
    _bubbles(verdict)
    _rankings(verdict)
    return verdict


def _identities(row: Row, verdict: Verdict) -> None:
    get = row.whole
    degrees = [get(name) for name in ("dp", "tp", "pp")]
    gpus, nodes = get("gpus"), get("nodes")
    sequences = [get(name) for name in ("dp", "mbs", "gas")]
    checks = []
    if all(degrees) and (gpus or nodes):
        checks.append((math.prod(degree or 1 for degree in degrees) * (get("cp") or 1), gpus or 8 * (nodes or 0)))
    if gpus and nodes:
        checks.append((8 * nodes, gpus))
    if all(sequences) and get("gbs"):
        checks.append((math.prod(size or 1 for size in sequences), get("gbs")))
    if all(sequences) and row.number("tokens_per_batch") and get("seq_len") and "batch_per_dp" not in row.own:
        printed = row.number("tokens_per_batch") or 0
        product = math.prod(size or 1 for size in sequences) * (get("seq_len") or 0)
        rounded = not isinstance(row.get("tokens_per_batch"), int)
        checks.append((round(product / 2**20) if rounded else product, round(printed / 1e6) if rounded else printed))
    for left, right in checks:
        verdict.identities += 1
        if left != right:
            verdict.broken.append(f"{row.where} ({left} is not {right:g})")


def _parameters(row: Row, verdict: Verdict) -> None:
    exact, printed = row.own.get("params"), row.number("params_b")
    size = row.own.get("size")
    if not (exact or printed or size) or row.get("tflops_formula") == "old":
        return
    counted = shape_of(row).params
    if isinstance(exact, int):
        verdict.params.append(abs(counted / exact - 1))
        return
    value = printed or (number(size) or 0) / 1e9
    slack = row.table.rounding(value, "params_b")
    verdict.params.append(max(0.0, abs(counted / 1e9 - value) - slack) / value)


def _beyond(value: float, printed: float, slack: float) -> float:
    """How far a value is from what is printed, beyond its rounding."""
    return max(0.0, abs(value - printed) - slack)


def _measured_step(case: Case) -> float | None:
    """Seconds of a step as the row has it, or as its speed says."""
    row, tokens, gpus = case.row, case.tokens, case.cluster.gpus
    seconds, rate = row.number("iter_s"), row.number("tps")
    if seconds:
        return seconds
    if rate:
        return tokens / rate / gpus
    tflops, mfu = row.number("tflops"), row.number("mfu_pct")
    if tflops:
        return case.flops("tflops")[0] * tokens / (tflops * 1e12 * gpus)
    if mfu:
        return case.flops("mfu")[0] * tokens / (mfu / 100 * peak_tflops(row) * 1e12 * gpus)
    return None


def _measurements(row: Row, verdict: Verdict) -> bool:
    if row.number("total_ms"):
        return _block(row, verdict)
    times: dict[str, Recompute] = {"full_recompute_s": "full", "present_s": "selective"}
    columns = {name: kind for name, kind in times.items() if row.number(name)}
    if columns:
        for name, kind in columns.items():
            case = case_of(row, kind)
            verdict.points.append(_time(case, row.number(name) or 0))
        _speeds(case, row.number("present_s") or 0, verdict)
        return True
    case = case_of(row)
    if row.get("oom"):
        verdict.oom += 1
        if evaluate(case.shape, case.how, case.cluster, case.stack.code).fits(case.cluster):
            verdict.oom_called_fit.append(row.where)
        return True
    measured = _memory(case, verdict)
    if row.get("tflops_formula") == "old":
        return measured
    known = any(row.number(name) for name in ("gbs", "gas", "tokens_per_batch", "batch_per_dp", "lbs", "mbs"))
    step = _measured_step(case)
    if step and known:
        verdict.points.append(_time(case, step))
        _speeds(case, step, verdict)
    return measured or bool(step)


def _time(case: Case, measured: float) -> Point:
    predicted = step_time(case.shape, case.how, case.cluster, case.stack.code).step
    return Point(case.row.where, "time", predicted, measured, case)


def _memory(case: Case, verdict: Verdict) -> bool:
    row = case.row
    gb, gib = row.number("mem_gb"), row.number("mem_gib") or row.number("peak_gib")
    measured = gb * case.stack.gb if gb else (gib or 0) * GIB
    verdict.ran += 1
    candidate = evaluate(case.shape, case.how, case.cluster, case.stack.code)
    if not candidate.fits(case.cluster):
        verdict.ran_called_too_large.append(row.where)
    if not measured:
        return False
    total = worst_stage(case.shape, case.how, case.stack.code).total
    verdict.points.append(Point(row.where, "memory", total, measured, case))
    return True


def _speeds(case: Case, step: float, verdict: Verdict) -> None:
    """TFLOP/s and MFU as the row prints them, from its own time and the FLOPs of its convention."""
    row, gpus = case.row, case.cluster.gpus
    rate = case.tokens / step / gpus
    timed = row.number("iter_s") or row.number("tps") or row.number("present_s")
    tflops = row.number("tflops")
    flops, known = case.flops("tflops")
    if timed and tflops and known and row.get("flops_convention"):
        slack = row.table.rounding(tflops, "tflops") + tflops * row.table.rounding(timed, "iter_s", "tps") / timed
        verdict.flops.append(_beyond(rate * flops / 1e12, tflops, slack) / tflops)
    aggregate = row.number("aggregate_pflops")
    if aggregate and tflops:
        slack = row.table.rounding(aggregate, "aggregate_pflops") + row.table.rounding(tflops, "tflops") * gpus / 1e3
        verdict.flops.append(_beyond(tflops * gpus / 1e3, aggregate, slack) / aggregate)
    peak = peak_tflops(row)
    for column, of in (("mfu_pct", "mfu"), ("hfu_pct", "hfu")):
        printed = row.number(column)
        if not printed:
            continue
        slack = row.table.rounding(printed, column)
        count, known = case.flops(of)
        if timed and known:
            verdict.mfu.append(_beyond(100 * rate * count / 1e12 / peak, printed, slack))
        elif tflops and of == "mfu":
            verdict.mfu.append(_beyond(100 * tflops / peak, printed, slack))


def _block(row: Row, verdict: Verdict) -> bool:
    """One block, timed: forward and backward with what is computed again."""
    setting = str(row.get("setting", "")).lower()
    recompute: Recompute = next((kind for kind in ("full", "selective") if kind in setting), "none")  # type: ignore[assignment]
    case = case_of(row, recompute)
    code = replace(case.stack.code, sequence_parallel="sequence parallel" in setting)
    block = block_time(case.shape, case.how, case.cluster, code)
    seconds = block.forward + block.backward + block.all_reduce
    verdict.points.append(Point(row.where, "time", seconds, (row.number("total_ms") or 0) / 1e3, case))
    return True


def _days(row: Row, verdict: Verdict) -> None:
    """Days of the whole run from the row's own TFLOP/s, by the FLOPs of its convention."""
    column = next((key for key in row.own if "days" in key and row.number(key)), None)
    tflops, gpus = row.number("tflops"), row.whole("gpus")
    if column is None or not tflops or not gpus:
        return
    tokens = row.number("tokens") or row.number("train_tokens") or 1e9 * (row.number("tokens_b") or 0)
    if not tokens:
        said = re.search(r"(\d+(?:\.\d+)?) ?(B|billion|T|trillion)\b(?:[- ]tokens?)", f"{row.get('note', '')}")
        inside = re.search(r"(\d+)(b|t)\b", column)
        match = inside or said
        if match is None:
            raise Unused("days of no stated number of tokens")
        tokens = float(match[1]) * (1e12 if match[2].lower().startswith("t") else 1e9)
    flops = counted(shape_of(row), "narayanan_hw")
    days = tokens * flops / (gpus * tflops * 1e12) / 86_400
    printed = row.number(column) or 0
    verdict.days.append(_beyond(days, printed, row.table.rounding(printed, column)) / printed)


def _bubbles(verdict: Verdict) -> None:
    """One layout at three batches or more: how far from one slope in the planner's slots, which the bubble is part of."""
    groups: dict[Any, list[tuple[float, float]]] = defaultdict(list)
    for point in verdict.points:
        case = point.case
        if point.kind == "time" and case and case.how.layout.pp > 1:
            layout, m = case.how.layout, case.how.grad_accumulation
            slots = m / (1 - bubble(m, layout.pp, layout.stages_per_rank))
            groups[case.shape, layout, case.how.micro_batch, case.row.get("precision")].append(
                (slots, point.measured)
            )
    for found in groups.values():
        if len({slots for slots, _ in found}) < 3:
            continue
        n, mx, my = len(found), sum(x for x, _ in found) / len(found), sum(y for _, y in found) / len(found)
        slope = sum((x - mx) * (y - my) for x, y in found) / sum((x - mx) ** 2 for x, _ in found)
        verdict.bubbles.append(max(abs(my + slope * (x - mx) - y) / y for x, y in found) if n else 0.0)


def _rankings(verdict: Verdict) -> None:
    """Whether the fastest of four or more measured layouts of one model on one machine, in batches within 5%, is of the
    three predicted fastest."""
    groups: dict[Any, list[Point]] = defaultdict(list)
    for point in verdict.points:
        case = point.case
        if point.kind == "time" and case and not case.row.number("total_ms"):
            groups[case.shape, case.cluster, case.row.get("precision"), case.row.get("options")].append(point)
    for points in groups.values():
        left = sorted(points, key=lambda point: -point.tokens)
        while left:
            largest = left[0].tokens
            together = [point for point in left if point.tokens >= 0.95 * largest]
            left = left[len(together) :]
            measured: dict[Arrangement, float] = {}
            predicted: dict[Arrangement, float] = {}
            for point in together:
                how = point.case.how if point.case else None
                assert how is not None
                measured[how] = min(measured.get(how, math.inf), point.measured / point.tokens)
                predicted[how] = point.predicted / point.tokens
            if len(measured) >= 4:
                best = min(measured, key=lambda how: measured[how])
                verdict.groups.append(best in sorted(predicted, key=lambda how: predicted[how])[:3])
