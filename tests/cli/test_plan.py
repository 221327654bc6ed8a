import os
import re
import signal
from pathlib import Path

import pytest
import torch
import typer
from tests.cli.conftest import document
from tests.views.planned import RYE

from leaven.cli.plan import by_measurement
from leaven.planning.budget import size_for_time
from leaven.planning.hardware import parse_cluster
from leaven.planning.plan import plan_recipe
from leaven.recipe.recipe import Recipe
from leaven.training.engine import Training

CLUSTER = ("--gpus", "32xH100-80GB")
LAYOUT = ("--layout", "tp=2,pp=4,zero=1,mbs=1")


@pytest.fixture
def rye(tmp_path: Path) -> Path:
    path = tmp_path / "rye.toml"
    path.write_text(RYE)
    return path


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LEAVEN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def planned(rye, leaven):
    """A function that returns the document of a plan, with the given options."""
    return lambda *options: document(leaven("plan", rye, *CLUSTER, *LAYOUT, *options, "--json"))


def test_share_price_and_explain_are_in_the_document(planned):
    plain, asked = planned(), planned("--share", "0.95", "--price", "2", "--explain", "tp=1")
    assert plain["ramp"]["start"]["share"] >= 0.7
    assert asked["ramp"]["start"]["share"] >= 0.95
    assert asked["ramp"]["start"]["batch_tokens"] > plain["ramp"]["start"]["batch_tokens"]
    assert asked["cost"]["money"] == pytest.approx(2 * asked["gpu_hours"])
    assert asked["explain"]["asked"] == "tp=1"
    assert plain["cost"]["money"] is None


def test_another_program_is_planned_by_its_name(rye, leaven, planned):
    own, megatron = planned("--no-history"), planned("--code", "megatron-2026")
    assert megatron["memory"]["gib"] != own["memory"]["gib"]
    assert "the training code megatron-2026" in megatron["cautions"][0]
    code, _, err = leaven("plan", rye, *CLUSTER, "--code", "megatron-2027")
    assert (code, "megatron-2026, megatron-moe" in err) == (2, True)
    assert leaven("plan", rye, *CLUSTER, "--code", "")[0] == 2
    for option in ("--measure", "--history"):
        code, _, err = leaven("plan", rye, *CLUSTER, "--code", "megatron-2026", option)
        assert (code, f"--code cannot be combined with {option}" in err) == (2, True)
    in_fp32 = ("--set", "precision.compute=fp32")
    code, _, err = leaven("plan", rye, *CLUSTER, "--code", "megatron-2026", *in_fp32)
    assert (code, "plan with --set precision.compute=bf16" in err) == (2, True)


def test_the_page_repeats_the_command(rye, leaven, tmp_path):
    page = tmp_path / "plan.html"
    sets = ("--set", "batch.tokens=2097152", "--set", "data.tokens=20_000_000_000")
    code, out, _ = leaven("plan", rye, *CLUSTER, *LAYOUT, *sets, "--moments", "muon", "--no-history", "-o", page)
    assert code == 0
    assert out.splitlines()[-2] == f"wrote {page}"
    html = page.read_text(encoding="utf-8")
    (command,) = re.findall(r"<code>(leaven plan .*?)</code>", html)
    assert command.endswith(
        f"rye.toml --gpus 32xH100-80GB --layout {LAYOUT[1]} --set batch.tokens=2097152 "
        f"--set data.tokens=20_000_000_000 --moments muon --no-history -o {page}"
    )
    assert "20 B tokens" in html


def test_a_measurement_calibrates_later_plans(tiny: Recipe, capsys: pytest.CaptureFixture[str]) -> None:
    torch.set_num_threads(1)
    bare = plan_recipe(tiny, "cpu")
    assert by_measurement(bare, tiny, "cpu", measure=False, history=True) is bare
    now = by_measurement(bare, tiny, "cpu", measure=True, history=True)
    assert now.job.calibration is not None
    assert now.speed.step_seconds == pytest.approx(bare.speed.step_seconds * now.job.calibration.time)
    assert "fastest matrix product" in capsys.readouterr().err
    assert by_measurement(bare, tiny, "cpu", measure=False, history=True).job.calibration == now.job.calibration
    assert by_measurement(bare, tiny, "cpu", measure=False, history=False) is bare


def test_a_history_that_is_damaged_or_cannot_be_written_is_named(
    tiny: Recipe, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.set_num_threads(1)
    bare = plan_recipe(tiny, "cpu")
    by_measurement(bare, tiny, "cpu", measure=False, history=True)
    assert capsys.readouterr().err == ""
    cache.mkdir()
    (cache / "history.jsonl").write_text("\0\0\n")
    by_measurement(bare, tiny, "cpu", measure=False, history=False)
    assert capsys.readouterr().err == ""
    by_measurement(bare, tiny, "cpu", measure=False, history=True)
    assert "history.jsonl is damaged and was skipped; the other lines are used to correct" in capsys.readouterr().err
    told: list[str] = []
    size_for_time(parse_cluster("cpu"), "1h", None, on_fault=told.append)
    assert len(told) == 1
    (cache / "history.jsonl").unlink()
    (cache / "history.jsonl").symlink_to("away")
    by_measurement(bare, tiny, "cpu", measure=True, history=True)
    assert "later plans do not use this measurement, because it cannot be saved: " in capsys.readouterr().err


def test_a_measurement_that_is_stopped_leaves_nothing(
    tiny: Recipe, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    issue = Training.issue

    def interrupted(self: Training, *arguments: object) -> object:
        os.kill(os.getpid(), signal.SIGINT)
        return issue(self)

    monkeypatch.setattr(Training, "issue", interrupted)
    with pytest.raises(typer.Exit) as ended:
        by_measurement(plan_recipe(tiny, "cpu"), tiny, "cpu", measure=True, history=True)
    assert ended.value.exit_code == 75
    assert "nothing is saved" in capsys.readouterr().err
    assert not list(cache.rglob("*"))
