"""Render the HTML page about a run, a study, a check or a demo."""

from pathlib import Path

from leaven.documents.checks import CheckDocument
from leaven.documents.runs import DemoDocument
from leaven.views.check_page import check_page
from leaven.views.demo import demo_page
from leaven.views.folders import StudyView, read_folder
from leaven.views.parameters import at_base
from leaven.views.recipe_view import recipe_view
from leaven.views.render import render
from leaven.views.run_charts import run_charts
from leaven.views.study_page import study_page


def folder_page(folder: Path) -> str:
    """Return an HTML page about the run, study, check or demo in a folder. Raise InputError if it cannot be shown, a
    demo has not finished, or plotly is missing."""
    document = read_folder(folder)
    if isinstance(document, CheckDocument):
        return check_page(document)
    if isinstance(document, StudyView):
        return study_page(document)
    if isinstance(document, DemoDocument):
        return demo_page(document)
    return render(
        "run.html.j2",
        run_charts(document),
        kind="run",
        title=document.title,
        run=document,
        view=recipe_view(document.recipe, at_base(document.recipe), ("base", "target")),
    )
