"""leaven plan as a person types it: its screen, its page, and what it cannot do."""

import io
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.quoted import PAGES, renewed
from rich.console import Console
from tests.views.planned import RYE

from leaven.planning.plan import plan_recipe
from leaven.recipe.files import read_recipe
from leaven.views.terminal import console as terminal
from leaven.views.terminal.plan import plan_screen

CLUSTER = ("--gpus", "32xH100-80GB")
LAYOUT = ("--layout", "tp=2,pp=4,zero=1,mbs=1")


@pytest.fixture
def rye(tmp_path: Path) -> Path:
    path = tmp_path / "rye.toml"
    path.write_text(RYE)
    return path


@pytest.fixture(autouse=True)
def no_runs_of_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEAVEN_CACHE", str(tmp_path / "cache"))


def test_the_screen_is_folded_between_its_parts(rye, leaven, monkeypatch):
    monkeypatch.setattr(terminal.console, "width", 80)
    asked = ("--explain", "tp=4", "--price", "$2.50")
    code, out, _ = leaven("plan", rye, *CLUSTER, *LAYOUT, *asked)
    assert code == 0
    *lines, following = out.splitlines()
    assert following.startswith("next       torchrun --nnodes ")
    labels = [line[:14].strip() for line in lines if line[:14].strip()]
    always = ["layout", "memory / GPU", "speed", "time", "budget", "ramp", "next best"]
    assert labels[: len(always)] == always
    assert labels[-2:] == ["explain", "accuracy"]
    assert all(len(line) <= 80 and line[12:14] == "  " for line in lines)
    parts = [part.strip() for line in lines for part in line[14:].split(" · ")]
    text = " ".join(line[14:] for line in lines)
    assert "micro-batch 1" in parts
    assert re.search(r"\d+\.\d GiB of 80", text)
    assert re.search(r"on rank \d of 4, \d+\.\d on rank \d", text)
    assert re.search(r"\$[\d,]+ at \$2\.50 a GPU-h", text)
    assert re.search(r"start at [\d.]+ k tokens: \d+% of full speed", text)
    assert "tp=4: " in text


def test_what_is_asked_of_the_ramp_and_of_money_is_in_the_document(rye, leaven):
    def document(*options):
        code, out, _ = leaven("plan", rye, *CLUSTER, *LAYOUT, *options, "--json")
        assert code == 0
        return json.loads(out)

    plain, asked = document(), document("--share", "0.95", "--price", "2", "--explain", "tp=1")
    assert plain["ramp"]["start"]["share"] >= 0.7
    assert asked["ramp"]["start"]["share"] >= 0.95
    assert asked["ramp"]["start"]["batch_tokens"] > plain["ramp"]["start"]["batch_tokens"]
    assert asked["cost"]["money"] == pytest.approx(2 * asked["gpu_hours"])
    assert asked["explain"]["asked"] == "tp=1"
    assert plain["cost"]["money"] is None


def test_a_page_is_written_beside_the_screen(rye, leaven, tmp_path):
    page = tmp_path / "plan.html"
    sets = ("--set", "batch.tokens=2097152", "--set", "data.tokens=20_000_000_000")
    code, out, _ = leaven("plan", rye, *CLUSTER, *LAYOUT, *sets, "--moments", "muon", "--no-history", "-o", page)
    assert code == 0
    assert out.splitlines()[-2] == f"wrote {page}"
    html = page.read_text(encoding="utf-8")
    (command,) = re.findall(r"<code>(leaven plan .*?)</code>", html)
    assert command.endswith(
        f"rye.toml --gpus 32xH100-80GB --layout {LAYOUT[1]} --share 0.7 --moments muon --no-history "
        "--set batch.tokens=2097152 --set data.tokens=20_000_000_000"
    )
    assert "20 B tokens" in html


def test_a_published_run_is_planned_by_its_id(leaven, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = tmp_path / "bloom.html"
    code, out, _ = leaven("plan", "bloom-176b", "--gpus", "384xA100-80GB", "--layout", "tp=4,pp=12,mbs=2", "-o", page)
    assert code == 0
    assert "dp 8 · tp 4 · pp 12" in out
    assert "<h1>bloom-176b</h1>" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize(("slower", "dyed"), [(-0.05, "\x1b[32m"), (-0.005, ""), (0.005, ""), (0.05, "\x1b[31m")])
def test_times_within_one_per_cent_are_neither_better_nor_worse(slower, dyed, rye):
    found = plan_recipe(read_recipe(rye), CLUSTER[1], LAYOUT[1])
    longer = found.time.compute + slower * found.time.step
    vars(found)["alternatives"] = (replace(found.chosen, time=replace(found.time, compute=longer)),)
    console = Console(width=120, file=io.StringIO(), force_terminal=True, color_system="standard", no_color=False)
    for part in plan_screen(found.document()):
        console.print(part)
    said = re.escape(f"{slower:+.1%} time")
    assert re.search(rf"GiB  {re.escape(dyed)} *{said}", console.file.getvalue())


def test_the_cpu_is_no_gpu(rye, leaven):
    shape = [f"model.{key}" for key in ("n_layers=2", "d_model=256", "n_heads=2", "n_kv_heads=2", "d_ff=512")]
    sets = [word for override in (*shape, "batch.tokens=16384") for word in ("--set", override)]
    code, out, _ = leaven("plan", rye, "--gpus", "cpu", "--price", "2.5", *sets)
    assert code == 0
    assert "memory / process  " in out
    assert "tokens/s/process" in out
    assert re.search(r"budget  +\d,\d{3}\.\d days · [\d,]+ process-h", out)
    assert re.search(r"[\d,]+ \(no currency given\) at 2\.50 a process-h", out)
    assert "GPU" not in out


def test_a_ramp_says_its_units_and_no_more_than_it_keeps(rye, leaven):
    quick = leaven("plan", rye, *CLUSTER, *LAYOUT, "--share", "0.5")[1]
    text = " ".join(line[14:] for line in quick.splitlines())
    grows = r"growing in steps of [\d.]+ k tokens over the first [\d.]+ B tokens: .* more than at the full batch"
    assert re.search(grows, text)
    full = leaven("plan", rye, *CLUSTER, *LAYOUT, "--share", "1")[1]
    assert "start at 1.05 M tokens: 100% of full speed" in full
    assert "growing" not in full


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_docs_quote_what_is_printed(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text.count("$ leaven plan ") == 1
    assert renewed(text) == text, "type: make docs-plan"
