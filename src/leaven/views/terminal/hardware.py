"""Show in the terminal which accelerators the planner knows."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from rich.console import RenderableType

from leaven.documents.catalogue import AcceleratorRow
from leaven.planning.accelerators import CONFIDENCE, EXAMPLE, USUAL_MATMUL_SHARE, user_file
from leaven.views.numbers import NONE
from leaven.views.tables import Column, Fact, Facts, Table

_UNVERIFIED = "*"


def accelerators_screen(known: Sequence[AcceleratorRow]) -> Iterator[RenderableType]:
    """Yield the table of all accelerators, and the table's legend."""

    def column(
        header: str, group: str, number: Callable[[AcceleratorRow], float | None], unit: str = "", drop: int = 0
    ) -> Column:
        """Return a column of numbers, marked if a source of the row in ``group``, such as "peak", is unverified."""

        def cell(row: AcceleratorRow) -> str:
            value = number(row)
            unverified = any(source.group == group and source.confidence == "memory" for source in row.sources)
            return NONE if value is None else f"{value:g}{_UNVERIFIED * unverified}"

        return Column(header, cell, unit=unit, align="point", drop=drop)

    columns = (
        Column("accelerator", lambda row: row.name, align="left"),
        column("16 bit", "peak", lambda row: row.peak_tflops[_half(row)], "TFLOP/s"),
        column("fp8", "peak", lambda row: row.peak_tflops["fp8"], "TFLOP/s", drop=2),
        column("matmul", "matmul", lambda row: row.matmul_tflops[_half(row)], "TFLOP/s"),
        column("memory", "memory", lambda row: row.memory_gib, "GiB"),
        column("", "memory", lambda row: row.memory_tb_s, "TB/s"),
        column("power", "board", lambda row: row.power_w, "W", drop=4),
        column("link", "link", lambda row: row.link_gb_s, "GB/s"),
        column("a node", "link", lambda row: row.node_size, drop=3),
        column("network", "network", lambda row: row.network_gb_s, "GB/s"),
    )
    yield Table.of(columns, known)
    yield Facts(
        ("16 bit", "dense peak in bf16; for a V100 in fp16"),
        ("matmul", "best measured matmul in 16 bit; without a measurement, 80% of the peak is assumed"),
        ("link, network", ("one direction, per accelerator", "a node: accelerators joined by the link")),
        (_UNVERIFIED, ("unverified: remembered from data sheets", "sources: leaven hardware NAME")),
        ("yours", (f"to add one, write a line in {user_file()}, for example", f"Z1-64GB = {EXAMPLE}")),
    )


def accelerator_screen(one: AcceleratorRow) -> Iterator[RenderableType]:
    at = {source.group: source for source in one.sources}

    def fact(label: str, group: str, *values: str) -> Fact:
        source = at.get(group)
        where = () if source is None else (f"{source.text} ({CONFIDENCE[source.confidence]})",)
        return label, (*values, *where)

    half = _half(one)
    best, peak = one.matmul_tflops[half], one.peak_tflops[half] or math.inf
    share = f"{USUAL_MATMUL_SHARE:.0%} of the peak is assumed" if best is None else f"{best / peak:.0%} of the peak"
    peaks, measured = _by_dtype(one.peak_tflops), _by_dtype(one.matmul_tflops)
    sustained = [f"{operator.replace('_', ' ')} {rate:g}" for operator, rate in one.sustained_tflops.items()]
    yield Facts(
        ("", (one.name, *([one.note] if one.note else []))),
        fact("peak", "peak", *peaks, "dense TFLOP/s"),
        fact("best matmul", "matmul", *(measured or ("none known",)), share),
        *([fact("sustained", "sustained", *sustained)] if sustained else []),
        ("planned", f"{one.planned_tflops:.4g} TFLOP/s in large 16-bit matmuls"),
        fact("memory", "memory", f"{one.memory_gib:.3g} GiB", f"{one.memory_tb_s:.3g} TB/s"),
        fact(
            "board",
            "board",
            f"{NONE if one.power_w is None else format(one.power_w, 'g')} W",
            f"{one.multiprocessors or NONE} multiprocessors",
        ),
        fact("link", "link", f"{one.link_gb_s:g} GB/s one way", f"joins {one.node_size}"),
        fact("network", "network", f"{one.network_gb_s:g} GB/s one way"),
    )


def _half(one: AcceleratorRow) -> str:
    """Return the 16-bit dtype that the planner uses on an accelerator."""
    return "fp16" if one.peak_tflops["bf16"] is None else "bf16"


def _by_dtype(tflops: Mapping[str, float | None]) -> list[str]:
    return [f"{dtype} {rate:g}" for dtype, rate in tflops.items() if rate is not None]
