"""The accelerators that the planner knows, in the terminal."""

import math
from collections.abc import Iterator, Mapping, Sequence

from rich.console import RenderableType

from leaven.documents.catalogue import AcceleratorRow
from leaven.planning.accelerators import CONFIDENCE, EXAMPLE, user_file
from leaven.views.terminal.tables import Column, Columns, Fact, Facts, at_point

_COLUMNS = (
    Column("accelerator", align="left"),
    Column("16 bit", "TFLOP/s"),
    Column("fp8", "TFLOP/s", drop=2),
    Column("matmul", "TFLOP/s"),
    Column("memory", "GiB"),
    Column("", "TB/s"),
    Column("power", "W", drop=4),
    Column("link", "GB/s"),
    Column("a node", drop=3),
    Column("network", "GB/s"),
)
_GROUP_OF = ("peak", "peak", "matmul", "memory", "memory", "board", "link", "link", "network")
_REMEMBERED = "*"


def accelerators_screen(known: Sequence[AcceleratorRow]) -> Iterator[RenderableType]:
    """Yield the table of all accelerators and its legend."""
    yield Columns(_COLUMNS, _rows(known))
    yield Facts(
        [
            ("16 bit", ("the dense peak in bf16; of a V100 in fp16",)),
            ("matmul", ("the best measured in 16 bit; if unknown, 80% of the peak is assumed",)),
            ("link, network", ("one direction, per accelerator", "a node: accelerators joined by the link")),
            (_REMEMBERED, ("unverified: remembered from data sheets", "sources: leaven hardware NAME")),
            ("yours", (f"a line in {user_file()}, such as", f"Z1-64GB = {EXAMPLE}")),
        ]
    )


def _rows(known: Sequence[AcceleratorRow]) -> list[tuple[str, ...]]:
    """Return the rows of the table: numbers aligned at the decimal point, marked if they are unverified."""
    numbers = [
        (
            one.peak_tflops[_half(one)],
            one.peak_tflops["fp8"],
            one.matmul_tflops[_half(one)],
            one.memory_gib,
            one.memory_tb_s,
            one.power_w,
            one.link_gb_s,
            one.node_size,
            one.network_gb_s,
        )
        for one in known
    ]
    columns = [at_point([_number(row[i]) for row in numbers]) for i in range(len(_GROUP_OF))]
    remembered = [{source.group for source in one.sources if source.confidence == "memory"} for one in known]
    return [
        (
            one.name,
            *(
                column[r] + (_REMEMBERED if group in remembered[r] and number is not None else " ")
                for column, group, number in zip(columns, _GROUP_OF, numbers[r], strict=True)
            ),
        )
        for r, one in enumerate(known)
    ]


def accelerator_screen(one: AcceleratorRow) -> Iterator[RenderableType]:
    """Yield one accelerator, each number with its source."""
    at = {source.group: source for source in one.sources}

    def fact(label: str, group: str, *said: str) -> Fact:
        source = at.get(group)
        where = () if source is None else (f"{source.text} ({CONFIDENCE[source.confidence]})",)
        return label, (*said, *where)

    share = one.planned_tflops / (one.peak_tflops[_half(one)] or math.inf)
    peaks, measured = _by_dtype(one.peak_tflops), _by_dtype(one.matmul_tflops)
    yield Facts(
        [
            ("", (one.name, *([one.note] if one.note else []))),
            fact("peak", "peak", *peaks, "dense TFLOP/s"),
            fact("best matmul", "matmul", *(measured or ("none known",)), f"{share:.0%} of the peak is assumed"),
            fact("memory", "memory", f"{one.memory_gib:.3g} GiB", f"{one.memory_tb_s:.3g} TB/s"),
            fact("board", "board", f"{_number(one.power_w)} W", f"{one.multiprocessors or '-'} multiprocessors"),
            fact("link", "link", f"{one.link_gb_s:g} GB/s one way", f"joins {one.node_size}"),
            fact("network", "network", f"{one.network_gb_s:g} GB/s one way"),
        ]
    )


def _half(one: AcceleratorRow) -> str:
    """Return the 16-bit dtype that is planned with."""
    return "fp16" if one.peak_tflops["bf16"] is None else "bf16"


def _by_dtype(tflops: Mapping[str, float | None]) -> list[str]:
    """Return the known rates as ``dtype rate``."""
    return [f"{dtype} {rate:g}" for dtype, rate in tflops.items() if rate is not None]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"
