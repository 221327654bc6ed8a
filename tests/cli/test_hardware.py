"""leaven hardware."""

import json
from pathlib import Path

import pytest
from tests.cli.conftest import Verb

from leaven.planning.accelerators import accelerators


@pytest.fixture(autouse=True)
def no_user_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LEAVEN_ACCELERATORS", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))


def test_the_list_marks_unverified_numbers(leaven: Verb) -> None:
    code, out, _ = leaven("hardware")
    lines = {line.split()[0]: line for line in out.splitlines()}
    assert code == 0
    assert set(accelerators()) <= lines.keys()
    assert "*" not in lines["H100-SXM-80GB"]
    assert lines["A800-SXM-80GB"].count("*") == 7  # all seven numbers; nobody measured a matmul


def test_one_accelerator_with_its_sources(leaven: Verb) -> None:
    assert leaven("hardware", "h100 pcie")[1].split()[0] == "H100-PCIe-80GB"
    _, document, _ = leaven("hardware", "H100-80GB", "--json")
    found = json.loads(document)
    assert (found["peak_tflops"]["fp8"], found["matmul_tflops"]["tf32"], found["multiprocessors"]) == (
        1979,
        None,
        132,
    )
    assert {source["group"] for source in found["sources"]} >= {"peak", "memory", "board", "link", "network"}
    assert json.loads(leaven("hardware", "cpu", "--json")[1])["name"] == "cpu"
