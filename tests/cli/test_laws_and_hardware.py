"""leaven laws and leaven hardware: what the documents and screens say of every law and accelerator."""

from pathlib import Path

import pytest
from tests.cli.conftest import Verb, document

from leaven.catalogue.laws import LAWS
from leaven.planning.accelerators import accelerators


def test_the_document_lists_every_law_with_its_trust(leaven: Verb) -> None:
    rows = document(leaven("laws", "--params", "1B", "--tokens", "20B", "--json"))
    assert [row["law"] for row in rows] == [law.name for law in LAWS]
    for row in rows:
        assert row["at_batch"] is None
        assert row["in_range"] is (None if row["extrapolation"] is None else not row["beyond"])
        assert row["trust"] in {"verified", "read", "secondary", "memory"}
    assert next(row for row in rows if row["law"] == "Moonlight Muon 2025")["in_range"] is None


def test_laws_of_the_blocks_use_the_count_without_embeddings(leaven: Verb) -> None:
    """GPT-2 124M has 85M parameters in its blocks; the screen says what the laws count."""
    size = ("--params", "124M", "--tokens", "10B")
    assert "taken as 124 M" in " ".join(leaven("laws", *size)[1].split())
    rows = document(leaven("laws", *size, "--params-non-embedding", "85M", "--json"))
    step = next(row for row in rows if row["law"] == "Step Law 2025")
    assert step["lr"] == pytest.approx(1.79 * 85e6**-0.713 * 10e9**0.307)


def test_the_list_of_accelerators_marks_unverified_numbers(
    leaven: Verb, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LEAVEN_ACCELERATORS", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    code, out, _ = leaven("hardware")
    lines = {line.split()[0]: line for line in out.splitlines()}
    assert code == 0
    assert set(accelerators()) <= lines.keys()
    assert "*" not in lines["H100-SXM-80GB"]
    assert lines["A800-SXM-80GB"].count("*") == 7  # all seven numbers; nobody measured a matmul
