"""``leaven report``: one self-contained page about a run, a study, a check or a demo, or about the published runs."""

from pathlib import Path
from typing import Annotated

import typer

from leaven.cli._common import JsonOption, console, emit_json
from leaven.recipe.errors import InputError
from leaven.views.catalogue_page import write_catalogue
from leaven.views.page import write_page


def report(
    path: Annotated[
        Path | None,
        typer.Argument(metavar="PATH", help="The folder of a run, a study, a check or a demo.", show_default=False),
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="The HTML file to write.")] = Path("report.html"),
    catalogue: Annotated[bool, typer.Option("--catalogue", help="The published runs, in place of a PATH.")] = False,
    json_output: JsonOption = False,
) -> None:
    """Write one self-contained HTML page about a run, a study, a check or a demo, or about the published runs."""
    if catalogue and path is not None:
        raise InputError(f"--catalogue is a page of its own and takes no PATH; leave out {path} or --catalogue")
    if catalogue:
        written = write_catalogue(output)
    elif path is not None:
        written = write_page(path, output)
    else:
        raise InputError("a report on what? give the folder of a run, a study, a check or a demo, or --catalogue")
    if json_output:
        emit_json({"path": str(written)})
    else:
        console.print(f"wrote {written}", markup=False, soft_wrap=True)
