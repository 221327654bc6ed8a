"""``leaven report``: one self-contained page about a run, a study, a check or a demo."""

from pathlib import Path
from typing import Annotated

import typer

from leaven.cli._common import JsonOption, console, emit_json
from leaven.report.page import write_page


def report(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="The folder of a run, a study, a check or a demo.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The HTML file to write.")] = Path("report.html"),
    json_output: JsonOption = False,
) -> None:
    """Write one self-contained HTML page about a run, a study, a check or a demo."""
    written = write_page(path, output)
    if json_output:
        emit_json({"path": str(written)})
    else:
        console.print(f"wrote {written}", markup=False, soft_wrap=True)
