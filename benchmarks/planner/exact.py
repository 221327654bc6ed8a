"""What is exact: identities of a row, parameters, FLOPs, MFU and days, up to the rounding of what is printed."""

import math
import re

from benchmarks.planner.cases import Case, Unused, conventions, peak_tflops, shape_of
from benchmarks.planner.tables import Row, number
from benchmarks.planner.verdict import Verdict

from leaven.planning.conventions import counted


def identities(row: Row, verdict: Verdict) -> None:
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


def parameters(row: Row, verdict: Verdict) -> bool:
    """Exact ``params``, ``params_b`` in thousand millions, or a ``size`` as it is written: 176B."""
    exact, printed = row.own.get("params"), row.number("params_b")
    if row.get("tflops_formula") == "old":
        return False
    if isinstance(exact, int | float):
        verdict.params.append(abs(shape_of(row).params / exact - 1))
        return True
    value = printed or (number(row.own.get("size")) or 0) / 1e9
    if not value:
        return False
    slack = row.table.rounding(value, "params_b")
    verdict.params.append(_beyond(shape_of(row).params / 1e9, value, slack) / value)
    return True


def _beyond(value: float, printed: float, slack: float) -> float:
    """How far a value is from what is printed, beyond its rounding."""
    return max(0.0, abs(value - printed) - slack)


def speeds(case: Case, step: float, verdict: Verdict) -> None:
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


def days(row: Row, verdict: Verdict) -> bool:
    """Days of the whole run from the row's own TFLOP/s, by the FLOPs of its convention."""
    column = next((key for key in row.own if "days" in key and row.number(key)), None)
    tflops, gpus = row.number("tflops"), row.whole("gpus")
    if column is None or not tflops or not gpus:
        return False
    tokens = row.number("tokens") or row.number("train_tokens") or 1e9 * (row.number("tokens_b") or 0)
    if not tokens:
        said = re.search(r"(\d+(?:\.\d+)?) ?(B|billion|T|trillion)\b(?:[- ]tokens?)", f"{row.get('note', '')}")
        inside = re.search(r"(\d+)(b|t)\b", column)
        match = inside or said
        if match is None:
            raise Unused("days of no stated number of tokens")
        tokens = float(match[1]) * (1e12 if match[2].lower().startswith("t") else 1e9)
    named = conventions(row) or ["narayanan_hw"]
    predicted = tokens * counted(shape_of(row), named[0]) / (gpus * tflops * 1e12) / 86_400
    printed = row.number(column) or 0
    verdict.days.append(_beyond(predicted, printed, row.table.rounding(printed, column)) / printed)
    return True
