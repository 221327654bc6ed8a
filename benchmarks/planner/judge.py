"""Plan every row of a table as it ran and compare the result with the measurements."""

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from benchmarks.planner.cases import PlannerCase, case_of, fits
from benchmarks.planner.conventions import counted
from benchmarks.planner.exact import days, flops, identities, mfu, parameters
from benchmarks.planner.machines import peak_tflops
from benchmarks.planner.stacks import Unused, convention_of
from benchmarks.planner.tables import PublishedRow, Table
from benchmarks.planner.verdict import Comparison, TableVerdict

from leaven.planning.arrangement import Arrangement, bubble
from leaven.planning.memory import GIB, stage_memory, worst_stage
from leaven.planning.timing import block_time, step_time
from leaven.recipe.layout import Recompute


def judge(table: Table) -> TableVerdict:
    """Compare every row of a table."""
    verdict = TableVerdict(table)
    for row in table.rows:
        if row.get("anomaly"):
            verdict.anomalies.append(f"{row.where}: {row.get('anomaly')}")
        elif row.wrong:
            verdict.unused[f"row not used: {row.wrong}"] += 1
        else:
            identities(row, verdict)
            _compare(row, verdict)
    _bubbles(verdict)
    _rankings(verdict)
    return verdict


def _compare(row: PublishedRow, verdict: TableVerdict) -> None:
    """Compare all measurements of a row; those that cannot be compared are counted with the reason."""
    judged = False
    for unclear in row.unclear if not row.ran_out else ():
        verdict.unused[f"not compared: {unclear}"] += 1
        judged = True
    for kind, compare in _COMPARISONS.items():
        try:
            judged |= compare(row, verdict)
        except Unused as why:
            verdict.unused[f"{kind} not compared: {why}"] += 1
            judged = True
    if not judged:
        verdict.unused["row not used: nothing measured that the planner says"] += 1


def _measured_step(case: PlannerCase) -> float | None:
    """Seconds per step: stated by the row, or computed from its speed."""
    row, tokens, gpus = case.row, case.tokens, case.cluster.gpus
    seconds, rate = row.number("iter_s"), row.number("tps")
    if seconds:
        return seconds
    if rate:
        return tokens / rate / gpus
    tflops, mfu = row.number("tflops"), row.number("mfu_pct")
    of, rate = ("tflops", tflops) if tflops else ("mfu", (mfu or 0) / 100 * peak_tflops(row))
    if rate:
        of_token = counted(case.shape, convention_of(row, of) or "leaven", case.how.layout.recompute)
        return of_token * tokens / (rate * 1e12 * gpus)
    return None


_BATCH = ("gbs", "gas", "tokens_per_batch", "batch_per_dp")
_TIMED = ("iter_s", "tps", "tflops", "mfu_pct")
_BY_RECOMPUTE: dict[str, Recompute] = {"full_recompute_s": "full", "present_s": "selective"}


def _memory(row: PublishedRow, verdict: TableVerdict) -> bool:
    gb, gib = row.number("mem_gb"), row.number("mem_gib")
    if row.ran_out:
        case = _as_it_ran(row)
        verdict.oom += 1
        if fits(worst_stage(case.shape, case.how, case.stack.code).total, case.cluster):
            verdict.oom_called_fit.append(row.where)
        return True
    if not gb and not gib:
        return False
    case = _as_it_ran(row)
    memory = worst_stage(case.shape, case.how, case.stack.code)
    if case.stack.first_rank:
        memory = stage_memory(case.shape, case.how, 0, case.stack.code)
    elif row.get("measured_on") == "last rank":
        memory = stage_memory(case.shape, case.how, case.how.layout.pp - 1, case.stack.code)
    measured = gb * case.stack.gb if gb else (gib or 0) * GIB
    verdict.points.append(Comparison(row.where, "memory", memory.total, measured, case))
    return True


def _as_it_ran(row: PublishedRow) -> PlannerCase:
    case = case_of(row)
    if case.chosen:
        raise Unused("no micro-batch")
    return case


def _room(row: PublishedRow, verdict: TableVerdict) -> bool:
    """Compare whether the planner expects a row that ran out of memory to do so."""
    ran = any(row.number(name) for name in ("mem_gb", "mem_gib", *_TIMED)) and not row.ran_out
    if ran and not any(row.number(name) for name in ("total_ms", *_BY_RECOMPUTE)):
        try:
            case = _as_it_ran(row)
        except Unused:  # judged by its memory or its time
            return False
        verdict.ran += 1
        if not fits(worst_stage(case.shape, case.how, case.stack.code).total, case.cluster):
            verdict.ran_called_too_large.append(row.where)
    return False


def _time(row: PublishedRow, verdict: TableVerdict) -> bool:
    if row.number("total_ms"):
        return _block(row, verdict)
    columns = {name: kind for name, kind in _BY_RECOMPUTE.items() if row.number(name)}
    for name, kind in columns.items():
        verdict.points.append(_timed(case_of(row, kind), row.number(name) or 0))
    if columns:
        return True
    if row.ran_out or not any(row.number(name) for name in _TIMED):
        return False
    if row.get("tflops_formula") == "old":
        raise Unused("layers altered to fit pp, tflops_formula old")
    case = case_of(row)
    if row.spelled.get("mbs") != "lbs" and not any(row.get(name) for name in _BATCH):
        raise Unused("no batch")
    step = _measured_step(case)
    assert step  # one of _TIMED
    verdict.chosen += case.chosen
    verdict.points.append(_timed(case, step))
    return True


def _timed(case: PlannerCase, measured: float) -> Comparison:
    predicted = step_time(case.shape, case.how, case.cluster, case.stack.code).step
    return Comparison(case.row.where, "time", predicted, measured, case)


_COMPARISONS: dict[str, Callable[[PublishedRow, TableVerdict], bool]] = {
    "parameters": parameters,
    "FLOPs": flops,
    "MFU": mfu,
    "days": days,
    "memory": _memory,
    "room": _room,
    "time": _time,
}


def _block(row: PublishedRow, verdict: TableVerdict) -> bool:
    """Compare the time of one block: forward and backward pass with recomputation."""
    setting = str(row.get("setting", "")).lower()
    recompute: Recompute = "full" if "full" in setting else "selective" if "selective" in setting else "none"
    case = case_of(row, recompute)
    code = replace(case.stack.code, sequence_parallel="sequence parallel" in setting)
    block = block_time(case.shape, case.how, case.cluster, code)
    verdict.points.append(Comparison(row.where, "time", block.total, (row.number("total_ms") or 0) / 1e3, case))
    return True


def _bubbles(verdict: TableVerdict) -> None:
    """Compare the bubble of one layout at three batches or more, which determine its share of a step."""
    groups: dict[Any, list[tuple[float, float]]] = defaultdict(list)
    for point in verdict.points:
        case = point.case
        if point.kind == "time" and case and case.how.layout.pp > 1:
            layout, m = case.how.layout, case.how.grad_accumulation
            slots = m / (1 - bubble(m, layout.pp, layout.stages_per_rank))
            groups[case.shape, layout, case.how.micro_batch, str(case.row.get("precision"))].append(
                (slots, point.measured)
            )
    for found in groups.values():
        if len({slots for slots, _ in found}) < 3:
            continue
        mx, my = sum(x for x, _ in found) / len(found), sum(y for _, y in found) / len(found)
        slope = sum((x - mx) * (y - my) for x, y in found) / sum((x - mx) ** 2 for x, _ in found)
        verdict.bubbles.append(max(abs(my + slope * (x - mx) - y) / y for x, y in found))


def _rankings(verdict: TableVerdict) -> None:
    """Check that the fastest of four layouts or more of a model and machine is among the three predicted fastest."""
    groups: dict[Any, list[Comparison]] = defaultdict(list)
    for point in verdict.points:
        case = point.case
        if point.kind == "time" and case and not case.chosen and not case.row.number("total_ms"):
            groups[case.shape, case.cluster, str(case.row.get("precision")), str(case.row.get("options"))].append(
                point
            )
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
