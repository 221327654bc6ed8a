"""The verb that shows accelerators, and the screen of a budget."""

import json
import re
from pathlib import Path

import pytest
from tests.cli.conftest import Verb

from leaven.planning.accelerators import ACCELERATORS


@pytest.fixture(autouse=True)
def no_file_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LEAVEN_ACCELERATORS", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))


def test_the_list_has_every_accelerator_and_marks_what_was_not_read(leaven: Verb) -> None:
    code, out, _ = leaven("hardware")
    lines = {line.split()[0]: line for line in out.splitlines()}
    assert code == 0
    assert set(ACCELERATORS) <= lines.keys()
    assert "*" not in lines["H100-SXM-80GB"]
    assert lines["A800-SXM-80GB"].count("*") == 7  # all seven numbers; nobody measured a matmul
    assert "remembered" in out


def test_one_of_them_with_every_source(leaven: Verb) -> None:
    _, out, _ = leaven("hardware", "h100 pcie")
    assert out.split()[0] == "H100-PCIe-80GB"
    assert "80% of the peak is assumed" in out
    assert out.count("read in another's") == 4
    _, document, _ = leaven("hardware", "H100-80GB", "--json")
    found = json.loads(document)
    assert (found["peak_tflops"]["fp8"], found["matmul_tflops"]["tf32"], found["multiprocessors"]) == (
        1979,
        None,
        132,
    )
    assert {source["group"] for source in found["sources"]} >= {"peak", "memory", "board", "link", "network"}
    assert json.loads(leaven("hardware", "cpu", "--json")[1])["name"] == "cpu"


def test_the_document_of_all(leaven: Verb) -> None:
    names = [each["name"] for each in json.loads(leaven("hardware", "--json")[1])]
    assert names == list(ACCELERATORS)


def test_bad_input_is_one_line(leaven: Verb, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, err = leaven("hardware", "abacus")
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert "leaven hardware" in err
    path = tmp_path / "mine.toml"
    path.write_text("[Z9]\npeak = { bf17 = 400 }")
    monkeypatch.setenv("LEAVEN_ACCELERATORS", str(path))
    code, out, err = leaven("hardware")
    assert (code, out) == (2, "")
    assert err == f"error: {path}: [Z9] peak.bf17: no such key; did you mean bf16?\n"


def test_the_screen_of_a_budget(leaven: Verb) -> None:
    text = leaven("plan", "--budget", "8xH100 x 3d", "--mfu", "0.4")[1]
    assert "20 tokens a parameter" in text
    assert "8xH100-SXM-80GB · one node · 72 h 00 · 576 GPU-h" in text
    assert text.splitlines()[-1].startswith("next       leaven new ")
    assert "accuracy" not in text  # nothing was planned


def test_a_budget_s_layouts_are_whole_and_what_they_stand_on_is_said(leaven: Verb) -> None:
    """Of many GPUs with little memory: every key there is."""
    many = leaven("plan", "--budget", "512xA100-40GB x 30d")[1]
    assert "…" not in many
    assert re.search(r"  dp 256 tp 2 zero 3 mbs \d+ recompute full\n", many)
    assert re.search(r"  dp 512 in 8 zero 3 mbs \d+\n", many)
    assert "accuracy  mean error on published runs" in many
