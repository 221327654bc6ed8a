"""leaven hardware: the accelerators that the planner knows, and where each number is from."""

from dataclasses import asdict
from typing import Annotated

import typer

from leaven.cli.common import JsonOption, hand_over
from leaven.documents.catalogue import AcceleratorRow
from leaven.planning.accelerators import ACCELERATORS, DTYPES, Accelerator
from leaven.planning.hardware import find_accelerator, parse_cluster
from leaven.views.terminal.hardware import accelerator_screen, accelerators_screen

app = typer.Typer(add_completion=False)


@app.command()
def hardware(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME]", help="One of them with its sources, e.g. H100-80GB, or cpu.", show_default=False
        ),
    ] = None,
    json_output: JsonOption = False,
) -> None:
    if name is not None:
        found = parse_cluster("cpu").accelerator if name.lower() == "cpu" else find_accelerator(name)
        hand_over(_row(found), accelerator_screen(found), json_output)
        return
    known = list(ACCELERATORS.values())
    hand_over([_row(each) for each in known], accelerators_screen(known), json_output)


def _row(one: Accelerator) -> AcceleratorRow:
    return AcceleratorRow(
        name=one.name,
        peak_tflops={dtype: one.peak(dtype) for dtype in DTYPES},
        matmul_tflops={dtype: dict(one.matmuls).get(dtype) for dtype in DTYPES},
        memory_gib=one.memory_gib,
        memory_tb_s=one.memory_tb_s,
        power_w=one.power_w,
        multiprocessors=one.multiprocessors,
        link_gb_s=one.link_gb_s,
        node_size=one.node_size,
        network_gb_s=one.network_gb_s,
        note=one.note,
        sources=[asdict(source) for source in one.sources],
    )
