import json
import shutil
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner
from written import proxy, target

from leaven.recipe.errors import InputError
from leaven.scaling.table import resolve
from leaven.views.terminal import demo_summary, parameter_table


def test_the_parameter_table_has_units_and_a_line_a_group():
    recipe = target(proxy().replace({"hyperparameters.depth": {}}))
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(parameter_table(resolve(recipe), recipe))
    text = console.export_text()
    assert "width x3 depth x2 batch x4" in text
    assert "(a step)" in text
    lines = [line.split() for line in text.splitlines() if line.startswith("attention.out")]
    assert len(lines) == 1
    row = resolve(recipe)["layers.3.attention.out.weight"]
    assert lines[0][1] == "0-7"
    assert lines[0][-1] == "0.5"
    assert float(lines[0][-6]) == pytest.approx(row.lr, rel=1e-2)


def test_a_demo_is_told_in_ten_lines(demo_folder):
    lines = demo_summary(demo_folder, Path("report.html"))
    assert len(lines) <= 10
    text = "\n".join(lines)
    for said in ("+0.1400", "tune 3 min 44 s", "width 64 -> 192", "python-stdlib", "report.html"):
        assert said in text


def test_a_demo_half_done_is_told_as_far_as_it_went(demo_folder, tmp_path):
    folder = Path(shutil.copytree(demo_folder, tmp_path / "demo"))
    document = json.loads((folder / "demo.json").read_text()) | {"arms": [], "corpus": None, "parts": []}
    (folder / "demo.json").write_text(json.dumps(document))
    assert 1 <= len(demo_summary(folder)) <= 3
    with pytest.raises(InputError, match=r"no demo\.json"):
        demo_summary(folder / "proxy")


def test_the_verb_prints_the_path(demo_folder, tmp_path):
    import typer

    from leaven.cli.report import report

    app = typer.Typer()
    app.command()(report)
    out = tmp_path / "r.html"
    ran = CliRunner().invoke(app, [str(demo_folder), "-o", str(out), "--json"])
    assert ran.exit_code == 0, ran.output
    assert json.loads(ran.stdout) == {"path": str(out)}
    assert out.exists()
