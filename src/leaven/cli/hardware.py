"""leaven hardware: the accelerators that the planner knows, and where each number is from."""

from dataclasses import asdict
from typing import Annotated, Any

import typer

from leaven.cli._common import JsonOption, console, emit_json
from leaven.planning.accelerators import ACCELERATORS, CONFIDENCE, DTYPES, EXAMPLE, Accelerator, user_file
from leaven.planning.hardware import find_accelerator, parse_cluster
from leaven.views.terminal import Column, Columns, Facts, at_point

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


def hardware(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME]", help="One of them with its sources, e.g. H100-80GB, or cpu.", show_default=False
        ),
    ] = None,
    json_output: JsonOption = False,
) -> None:
    """The accelerators that the planner knows: rates, memory, power and links, each with its source."""
    if name is not None:
        found = parse_cluster("cpu").accelerator if name.lower() == "cpu" else find_accelerator(name)
        if json_output:
            emit_json(_document(found))
        else:
            console.print(Facts(_facts(found)))
        return
    known = list(ACCELERATORS.values())
    if json_output:
        emit_json([_document(each) for each in known])
        return
    console.print(Columns(_COLUMNS, _rows(known)))
    console.print(
        Facts(
            [
                ("16 bit", ("the dense peak in bf16, of a V100 in fp16",)),
                (
                    "matmul",
                    ("the best in 16 bit that anybody measured; where nobody did, 80% of the peak is planned with",),
                ),
                ("link, network", ("one direction, of one accelerator", "a node is what the link joins")),
                (_REMEMBERED, ("read nowhere: remembered from data sheets", "sources: leaven hardware NAME")),
                ("yours", (f"a line in {user_file()}, such as", f"Z1-64GB = {EXAMPLE}")),
            ]
        )
    )


def _rows(known: list[Accelerator]) -> list[tuple[str, ...]]:
    """Numbers at their points, each with its mark."""
    numbers = [
        (
            one.peak_tflops,
            one.peak("fp8"),
            one.best_matmul_tflops,
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


def _facts(one: Accelerator) -> list[tuple[str, tuple[str, ...]]]:
    at = {source.group: source for source in one.sources}

    def fact(label: str, group: str, *said: str) -> tuple[str, tuple[str, ...]]:
        source = at.get(group)
        where = () if source is None else (f"{source.text} ({CONFIDENCE[source.confidence]})",)
        return label, (*said, *where)

    share = one.matmul_flops / 1e12 / one.peak_tflops
    measured = tuple(f"{dtype} {rate:g}" for dtype, rate in one.matmuls)
    return [
        ("", (one.name, *([one.note] if one.note else []))),
        fact("peak", "peak", *(f"{dtype} {rate:g}" for dtype, rate in one.peaks), "dense TFLOP/s"),
        fact("best matmul", "matmul", *(measured or ("nobody's",)), f"{share:.0%} of the peak is planned with"),
        fact("memory", "memory", f"{one.memory_gib:.3g} GiB", f"{one.memory_tb_s:.3g} TB/s"),
        fact("board", "board", f"{_number(one.power_w)} W", f"{one.multiprocessors or '-'} multiprocessors"),
        fact("link", "link", f"{one.link_gb_s:g} GB/s one way", f"joins {one.node_size}"),
        fact("network", "network", f"{one.network_gb_s:g} GB/s one way"),
    ]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"


def _document(one: Accelerator) -> dict[str, Any]:
    return {
        "name": one.name,
        "peak_tflops": {dtype: one.peak(dtype) for dtype in DTYPES},
        "matmul_tflops": {dtype: dict(one.matmuls).get(dtype) for dtype in DTYPES},
        "memory_gib": one.memory_gib,
        "memory_tb_s": one.memory_tb_s,
        "power_w": one.power_w,
        "multiprocessors": one.multiprocessors,
        "link_gb_s": one.link_gb_s,
        "node_size": one.node_size,
        "network_gb_s": one.network_gb_s,
        "note": one.note,
        "sources": [asdict(source) for source in one.sources],
    }
