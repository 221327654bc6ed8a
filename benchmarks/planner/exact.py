"""What is exact: identities of a row, parameters, FLOPs, MFU and days, up to the rounding of what is printed."""

import math
import re

from benchmarks.planner.machines import peak_tflops
from benchmarks.planner.models import shape_of
from benchmarks.planner.stacks import Unused, convention_of, conventions, recompute_of
from benchmarks.planner.tables import Row, number
from benchmarks.planner.verdict import Verdict

from leaven.planning.conventions import counted


def identities(row: Row, verdict: Verdict) -> None:
    get = row.whole
    degrees = [get(name) for name in ("dp", "tp", "pp")]
    gpus, nodes = get("gpus"), get("nodes")
    sequences = [get(name) for name in ("dp", "mbs", "gas")]
    said = re.search(r"(\d+) a node", str(row.get("hardware", "")))
    node = int(said[1]) if said else 8
    checks = []
    if all(degrees) and (gpus or nodes):
        checks.append((math.prod(degree or 1 for degree in degrees) * (get("cp") or 1), gpus or node * (nodes or 0)))
    if gpus and nodes:
        checks.append((node * nodes, gpus))
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
    if exact and isinstance(exact, int | float):
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


def rates(row: Row, verdict: Verdict) -> bool:
    """TFLOP/s and MFU as the row prints them, from its own time and the FLOPs of its convention."""
    gpus, tflops, found = row.whole("gpus"), row.number("tflops"), False
    aggregate = row.number("aggregate_pflops")
    if aggregate and tflops and gpus:
        slack = row.table.rounding(aggregate, "aggregate_pflops") + row.table.rounding(tflops, "tflops") * gpus / 1e3
        verdict.flops.append(_beyond(tflops * gpus / 1e3, aggregate, slack) / aggregate)
        found = True
    if tflops and row.number("mfu_pct") and (not conventions(row) or "pct_peak" in row.own):
        printed = row.number("mfu_pct") or 0
        verdict.mfu.append(_beyond(100 * tflops / peak_tflops(row), printed, row.table.rounding(printed, "mfu_pct")))
        return True
    rate = _tokens_per_second(row)
    if rate is None or not conventions(row) or row.get("tflops_formula") == "old":
        return found
    recompute = "selective" if row.number("present_s") else recompute_of(row)
    for column, of in (("tflops", "tflops"), ("mfu_pct", "mfu"), ("hfu_pct", "hfu")):
        printed, convention = row.number(column), convention_of(row, of)
        if not printed or convention is None:
            continue
        achieved = rate * counted(shape_of(row), convention, recompute) / 1e12
        slack = row.table.rounding(printed, column)
        if of == "tflops":
            timed = row.number("iter_s") or row.number("tps") or 1
            slack += printed * row.table.rounding(timed, "iter_s", "tps") / timed
            verdict.flops.append(_beyond(achieved, printed, slack) / printed)
        else:
            verdict.mfu.append(_beyond(100 * achieved / peak_tflops(row), printed, slack))
        found = True
    return found


def _tokens_per_second(row: Row) -> float | None:
    """Of one GPU, from the row's own time."""
    if row.number("tps"):
        return row.number("tps")
    seconds, gpus = row.number("iter_s") or row.number("present_s"), row.whole("gpus")
    batch, length = row.number("gbs"), row.number("seq_len")
    return batch * length / seconds / gpus if seconds and gpus and batch and length else None


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
