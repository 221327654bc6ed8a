"""Compare what must be equal up to rounding: identities of a row, parameters, FLOPs, MFU and days."""

import math
import re

from benchmarks.planner.conventions import counted
from benchmarks.planner.machines import peak_tflops
from benchmarks.planner.models import shape_of
from benchmarks.planner.stacks import Unused, convention_of, conventions, recompute_of
from benchmarks.planner.tables import PublishedRow, number
from benchmarks.planner.verdict import TableVerdict


def identities(row: PublishedRow, verdict: TableVerdict) -> None:
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
    if all(sequences) and row.number("tokens_per_batch") and get("seq_len") and row.mine("batch_per_dp") is None:
        printed = row.number("tokens_per_batch") or 0
        product = math.prod(size or 1 for size in sequences) * (get("seq_len") or 0)
        rounded = not isinstance(row.get("tokens_per_batch"), int)
        checks.append((round(product / 2**20) if rounded else product, round(printed / 1e6) if rounded else printed))
    for left, right in checks:
        verdict.identities += 1
        if left != right:
            verdict.broken.append(f"{row.where} ({left} is not {right:g})")


def parameters(row: PublishedRow, verdict: TableVerdict) -> bool:
    """Compare parameter counts: exact ``params``, ``params_b`` in billions, or a ``size`` such as 176B."""
    exact, printed = row.mine("params"), row.number("params_b")
    text = next((value for value in (exact, row.mine("size")) if isinstance(value, str) and number(value)), "")
    value = printed or (number(text) or 0) / 1e9
    whole = not isinstance(exact, str) and number(exact)
    if not whole and not value:
        return False
    if row.get("tflops_formula") == "old":
        raise Unused("layers altered to fit pp, tflops_formula old")
    if whole:
        verdict.params.append(abs(shape_of(row).params / whole - 1))
        return True
    digits = re.search(r"\.(\d+)", text)
    slack = 0.5 * 10.0 ** -len(digits[1]) if digits and not printed else row.table.rounding(value, "params_b")
    verdict.params.append(_beyond(shape_of(row).params / 1e9, value, slack) / value)
    return True


def _beyond(value: float, printed: float, slack: float) -> float:
    """The relative error of a value beyond the rounding of the printed number."""
    return max(0.0, abs(value - printed) - slack)


def flops(row: PublishedRow, verdict: TableVerdict) -> bool:
    """Compare printed TFLOP/s with those of all GPUs, and with those from the row's time and convention."""
    gpus, tflops, aggregate = row.whole("gpus"), row.number("tflops"), row.number("aggregate_pflops")
    if aggregate and tflops and gpus:
        slack = row.table.rounding(aggregate, "aggregate_pflops") + row.table.rounding(tflops, "tflops") * gpus / 1e3
        verdict.flops.append(_beyond(tflops * gpus / 1e3, aggregate, slack) / aggregate)
    elif aggregate:
        raise Unused("an aggregate without TFLOP/s or GPUs")
    rate = _tokens_per_second(row)
    if not tflops or not rate:
        return bool(aggregate)
    achieved = rate * _counted(row, "tflops") / 1e12
    timed = row.number("iter_s") or row.number("tps") or 1
    slack = row.table.rounding(tflops, "tflops") + tflops * row.table.rounding(timed, "iter_s", "tps") / timed
    verdict.flops.append(_beyond(achieved, tflops, slack) / tflops)
    return True


def mfu(row: PublishedRow, verdict: TableVerdict) -> bool:
    """Compare MFU and HFU with the row's TFLOP/s if they share a convention, else with its time."""
    tflops, printed = row.number("tflops"), row.number("mfu_pct")
    share = row.spelled.get("mfu_pct") not in {"mfu", "mfu_pct"} or not conventions(row)
    if tflops and printed and share:
        verdict.mfu.append(_beyond(100 * tflops / peak_tflops(row), printed, row.table.rounding(printed, "mfu_pct")))
        return True
    rate, found = _tokens_per_second(row), False
    for column, of in (("mfu_pct", "mfu"), ("hfu_pct", "hfu")):
        printed = row.number(column)
        if printed and (rate or tflops):
            if not rate:
                raise Unused("a convention of FLOPs and no time")
            achieved = 100 * rate * _counted(row, of) / 1e12 / peak_tflops(row)
            verdict.mfu.append(_beyond(achieved, printed, row.table.rounding(printed, column)))
            found = True
    return found


def _counted(row: PublishedRow, of: str) -> float:
    """FLOPs per token, as the table counts them for a column."""
    if row.get("tflops_formula") == "old":
        raise Unused("tflops_formula old")
    convention = convention_of(row, of)
    if convention is None:
        raise Unused("the table names no convention of FLOPs for it")
    recompute = "selective" if row.number("present_s") else recompute_of(row)
    return counted(shape_of(row), convention, recompute)


def _tokens_per_second(row: PublishedRow) -> float | None:
    """Tokens per second of one GPU, from the row's own time."""
    if row.number("tps"):
        return row.number("tps")
    seconds, gpus = row.number("iter_s") or row.number("present_s"), row.whole("gpus")
    batch, length = row.number("gbs"), row.number("seq_len")
    return batch * length / seconds / gpus if seconds and gpus and batch and length else None


def days(row: PublishedRow, verdict: TableVerdict) -> bool:
    """Compare days (or GPU-days, GPU-hours) of the whole run with the row's TFLOP/s by its convention."""
    columns = [key for key in row.own if _DAYS.search(key) and "predict" not in key and number(row.mine(key))]
    tflops, gpus = row.number("tflops"), row.whole("gpus")
    for column in columns:
        of_gpus = "gpu" in column.lower()
        if not tflops or not (gpus or of_gpus):
            raise Unused("no TFLOP/s" if not tflops else "no number of GPUs")
        flops = _tokens(row, column) * counted(shape_of(row), _of_run(row))
        seconds = flops / (tflops * 1e12) / (1 if of_gpus else gpus or 1)
        printed = number(row.mine(column)) or 0
        unit = 3600 if "hour" in column.lower() else 86_400
        verdict.days.append(_beyond(seconds / unit, printed, row.table.rounding(printed, column)) / printed)
    return bool(columns)


_DAYS = re.compile(r"(?:^|_)(?:days?|gpu_?(?:days|hours))(?:_|$)", re.IGNORECASE)
_MANY = re.compile(r"(\d+(?:\.\d+)?) ?(B|billion|T|trillion)(?:[- ]tokens?)\b", re.IGNORECASE)


def _tokens(row: PublishedRow, column: str) -> float:
    """Tokens of the whole run: from the name of the column, the row, or the text of the table."""
    inside = re.search(r"(\d+(?:\.\d+)?)(b|t)(?![a-z])", column, re.IGNORECASE)
    given = row.number("tokens")
    said = inside or (None if given else _MANY.search(str(row.get("note", ""))))
    if said:
        return float(said[1]) * (1e12 if said[2].lower().startswith("t") else 1e9)
    if not given:
        raise Unused("no stated number of tokens")
    return given


def _of_run(row: PublishedRow) -> str:
    """The convention of a run's TFLOP/s; the one of Megatron's papers if none is named."""
    named = convention_of(row, "tflops")
    if named is None and "megatron" not in row.table.origin.lower():
        raise Unused("the table names no convention of FLOPs for it")
    return named or "narayanan_hw"
