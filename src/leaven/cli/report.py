"""Define the command ``leaven report``."""

from pathlib import Path
from typing import Annotated

import typer

from leaven.catalogue.runs import load_runs
from leaven.cli.common import JsonOption, hand_over
from leaven.documents.runs import ReportDocument
from leaven.recipe.errors import InputError
from leaven.recipe.files import write_text

app = typer.Typer(add_completion=False)


@app.command()
def report(
    path: Annotated[
        Path | None,
        typer.Argument(metavar="PATH", help="The folder of a run, a study, a check or a demo.", show_default=False),
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="The HTML file to write.")] = Path("report.html"),
    catalogue: Annotated[
        bool, typer.Option("--catalogue", help="Describe the published runs, instead of PATH.")
    ] = False,
    json_output: JsonOption = False,
) -> None:
    if catalogue and path is not None:
        raise InputError(f"--catalogue and {path} cannot be combined; leave one of them out")
    if catalogue:
        from leaven.views.catalogue_page import catalogue_page

        html = catalogue_page(load_runs())
    elif path is not None:
        from leaven.views.page import folder_page

        html = folder_page(path)
    else:
        raise InputError("PATH is missing; give the folder of a run, a study, a check or a demo, or --catalogue")
    write_text(output, html)
    hand_over(ReportDocument(path=str(output)), [f"wrote {output}"], json_output)
