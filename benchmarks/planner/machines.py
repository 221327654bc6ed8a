"""Read the machine of a row from the text of its table."""

import re
from dataclasses import replace
from typing import Any

from benchmarks.planner.stacks import Unused, in_fp8
from benchmarks.planner.tables import PublishedRow

from leaven.errors import InputError
from leaven.planning.accelerators import Accelerator, accelerators
from leaven.planning.hardware import find_accelerator

_KIND = re.compile(r"\b(GB?[23]00|GH200|[ABHLV]\d{2,3}S?|MI\d{3}X|TPUv\w+)", re.IGNORECASE)


def machine_of(row: PublishedRow) -> Accelerator:
    """The accelerator, with details from the text: "8 a node", "96 GB (HBM2e 2.4 TB/s)", "400 Gb/s"."""
    said = str(row.get("hardware", ""))
    text = str(row.get("gpu") or said)
    kinds = {kind.upper() for kind in _KIND.findall(text)}
    if len(kinds) != 1:
        raise Unused("no GPU is named" if not kinds else "several GPUs are named, none of them for the row")
    kind = kinds.pop().replace("TPUV", "TPUv")
    wanted = [kind, *(["PCIe"] if "pcie" in text.lower() else [])]
    memory = re.search(r"(?<!\d)(\d+) ?GB\b", text)
    try:
        found = find_accelerator("-".join([*wanted, *([f"{memory[1]}GB"] if memory else [])]))
    except InputError:
        try:
            found = find_accelerator("-".join(wanted))
        except InputError:
            raise Unused(f"{kind} is no accelerator of the planner's") from None
    changes: dict[str, Any] = {"memory_gib": float(memory[1])} if memory else {}
    for name, pattern, unit in (
        ("node_size", r"(\d+) a node", int),
        ("memory_tb_s", r"([\d.]+) TB/s", float),
        ("network_gb_s", r"([\d.]+) Gb/s(?! (?:a|per) node)", lambda bits: float(bits) / 8),
    ):
        match = re.search(pattern, said)
        if match:
            changes[name] = unit(match[1])
    of_node = re.search(r"([\d.]+) Gb/s (?:a|per) node", said)
    if of_node:
        changes["network_gb_s"] = float(of_node[1]) / 8 / changes.get("node_size", found.node_size)
    held = re.search(r"(\d+) W limit", said)
    if held and found.power_w:  # a board held to less power than its kind: the rate goes with its root, as clocks do
        kind_w = max(
            other.power_w or 0 for other in accelerators().values() if other.peak_tflops == found.peak_tflops
        )
        changes["matmuls"] = tuple(
            (dtype, (found.matmul(dtype) or rate) * (float(held[1]) / kind_w) ** 0.5) for dtype, rate in found.peaks
        )
    if "Jean Zay" in said:  # 4 Omni-Path adapters of 100 Gb/s a node of 8: BLOOM's model card
        changes["network_gb_s"] = 6.25
    return replace(found, **changes)


def peak_tflops(row: PublishedRow) -> float:
    """The peak that an MFU of the table is relative to: stated by the table, else the machine's for the row's dtype.

    Raises:
        Unused: if the row uses fp8 and the machine has no fp8 peak.
    """
    given = row.number("peak_tflops")
    if given:
        return given
    if in_fp8(row):
        peak = machine_of(row).peak("fp8")
        if peak is None:
            raise Unused("the machine has no peak in fp8")
        return peak
    per_kind = re.search(rf"([\d.]+) \({re.escape(str(row.get('gpu', '')))}\)", str(row.get("hardware", "")), re.I)
    return float(per_kind[1]) if per_kind and row.get("gpu") else machine_of(row).peak_tflops
