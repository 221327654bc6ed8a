"""Defines the command ``leaven hardware``."""

from typing import Annotated

from leaven.cli.common import JsonOption, argument, print_document
from leaven.planning.accelerators import accelerators
from leaven.planning.hardware import find_accelerator, parse_cluster
from leaven.views.terminal.hardware import accelerator_screen, accelerators_screen


def hardware(
    name: Annotated[
        str | None,
        argument("NAME", "Show only this accelerator and its sources, e.g. H100-80GB, or cpu for this machine."),
    ] = None,
    json_output: JsonOption = False,
) -> None:
    if name is not None:
        found = parse_cluster("cpu").accelerator if name.lower() == "cpu" else find_accelerator(name)
        row = found.document()
        print_document(row, accelerator_screen(row), json_output)
        return
    rows = [each.document() for each in accelerators().values()]
    print_document(rows, accelerators_screen(rows), json_output)
