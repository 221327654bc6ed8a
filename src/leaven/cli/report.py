"""Defines the command ``leaven report``."""

from pathlib import Path
from typing import Annotated

from leaven.catalogue.runs import load_runs
from leaven.cli.common import JsonOption, argument, option, print_document
from leaven.documents.runs import ReportDocument
from leaven.errors import InputError
from leaven.storage import write_page


def report(
    paths: Annotated[
        list[Path] | None,
        argument(
            "PATH...",
            "The folder of a run, a study, a check or a demo; or the folders of several runs, to compare them with "
            "the first.",
        ),
    ] = None,
    output: Annotated[Path, option("The HTML file to write.", names="--output -o")] = Path("report.html"),
    catalogue: Annotated[
        bool, option("Write a page about the published runs. Give no PATH.", names="--catalogue")
    ] = False,
    json_output: JsonOption = False,
) -> None:
    if catalogue and paths:
        raise InputError(f"--catalogue and {paths[0]} cannot be combined; leave one of them out")
    if not catalogue and not paths:
        raise InputError("PATH is missing; give the folder of a run, a study, a check or a demo, or --catalogue")
    paths = paths or []
    if len(paths) > 1:
        from leaven.views.comparison import comparison_page
        from leaven.views.terminal.files import comparison_screen

        html, document = comparison_page(paths, output)
        write_page(output, html)
        print_document(document, comparison_screen(document), json_output)
        return
    from leaven.views.catalogue_page import catalogue_page
    from leaven.views.page import folder_page

    write_page(output, catalogue_page(load_runs()) if catalogue else folder_page(paths[0]))
    print_document(ReportDocument(path=str(output)), [f"wrote {output}"], json_output)
