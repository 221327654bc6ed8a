"""Render the pages of ``leaven report``: one self-contained HTML page about a run, a study, a check or a demo."""

import shlex
from pathlib import Path

from leaven.documents.checks import CheckDocument
from leaven.views.check_page import check_page
from leaven.views.folders import DemoView, RunView, StudyView, read_folder
from leaven.views.parameters import at_base
from leaven.views.recipe_view import recipe_view
from leaven.views.render import render
from leaven.views.run_charts import COLOURS, run_charts
from leaven.views.study_page import search_view, study_page, tune_command


def folder_page(folder: Path) -> str:
    """Return an HTML page about the run, study, check or demo in a folder.

    Raises:
        InputError: if the folder contains nothing to report, or plotly is not installed.
    """
    document = read_folder(folder)
    if isinstance(document, CheckDocument):
        return check_page(document)
    if isinstance(document, StudyView):
        return study_page(document)
    return demo_page(document) if isinstance(document, DemoView) else run_page(document)


def run_page(run: RunView) -> str:
    return render(
        "run.html.j2",
        run_charts([run]),
        kind="run",
        title=run.title,
        run=run,
        colours=COLOURS,
        view=recipe_view(run.recipe, at_base(run.recipe), ("base", "target")),
    )


def demo_page(demo: DemoView) -> str:
    """Return the page of a demo, finished or not: its runs, its study, the trained recipe, the cost."""
    runs, mine = [arm.run for arm in demo.arms if arm.run], demo.transferred
    drawn, searched = search_view(demo.study) if demo.study else ({}, {})
    target = demo.target or (mine.run.recipe if mine and mine.run else None)
    proxy = (demo.study.best_recipe if demo.study else None) or (at_base(target) if target else None)
    return render(
        "demo.html.j2",
        (run_charts(runs) if runs else {}) | drawn,
        kind="demo",
        title=demo.file.name,
        demo=demo,
        arms=runs,
        colours=COLOURS,
        found=searched,
        view=recipe_view(target, proxy, ("base", "target")) if target else None,
        commands=_demo_commands(demo),
    )


def _demo_commands(demo: DemoView) -> list[str]:
    """Return the commands that do the same as ``leaven demo``, typed in its folder."""
    lines = [demo.command, ""]
    study, target = demo.study, demo.target
    if study and target:
        scale = ["--width", target.model.d_model, "--depth", target.model.n_layers]
        scale += ["--batch-tokens", target.batch.tokens, "--tokens", target.data.tokens]
        moved = ["leaven", "transfer", f"{demo.study_folder}/best.toml", *scale, "-o", demo.file.target, "--force"]
        lines += [tune_command(study, f"{demo.study_folder}/centre.toml", demo.study_folder)]
        lines += [shlex.join(map(str, moved))]
    for arm in demo.arms:
        recipe = str(demo.file.target) if arm.key == "transferred" and target else f"{arm.folder}/recipe.toml"
        lines.append(shlex.join(["leaven", "train", recipe, "--run", arm.folder]))
    return [*lines, "leaven report . -o report.html"]
