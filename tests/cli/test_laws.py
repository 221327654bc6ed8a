"""leaven laws: screen and document."""

import json
from collections.abc import Callable

import pytest
from tests.cli.conftest import Verb

from leaven.catalogue.laws import FRONTIERS, LAWS

RUN = ("--params", "1B", "--tokens", "20B")


@pytest.fixture
def run(leaven: Verb) -> Callable[..., str]:
    """Standard output of ``leaven laws``."""
    return lambda *options: leaven("laws", *options)[1]


@pytest.fixture
def flowing(run: Callable[..., str]) -> Callable[..., str]:
    """The same without line breaks."""
    return lambda *options: " ".join(run(*options).split())


def test_the_document_lists_every_law_with_its_trust(run: Callable[..., str]) -> None:
    rows = json.loads(run(*RUN, "--json"))
    assert [row["law"] for row in rows] == [law.name for law in LAWS]
    keys = {"law", "lr", "batch_tokens", "in_range", "conditions", "source"}
    for row in rows:
        assert keys <= row.keys()
        assert row["at_batch"] is None
        assert row["in_range"] is (None if row["extrapolation"] is None else not row["beyond"])
        assert row["trust"] in {"verified", "read", "secondary", "memory"}
    assert next(row for row in rows if row["law"] == "Moonlight Muon 2025")["in_range"] is None


def test_laws_of_the_blocks_use_the_count_without_embeddings(
    run: Callable[..., str], flowing: Callable[..., str]
) -> None:
    """GPT-2 124M has 85M parameters in its blocks; the screen says what the laws count."""
    assert "taken as 124 M, embeddings included; give --params-non-" in flowing("--params", "124M", "--tokens", "10B")
    typed = ("--params", "124M", "--tokens", "10B", "--params-non-embedding", "85M")
    assert "taken as 85 M" in flowing(*typed)
    step = next(row for row in json.loads(run(*typed, "--json")) if row["law"] == "Step Law 2025")
    assert step["lr"] == pytest.approx(1.79 * 85e6**-0.713 * 10e9**0.307)


def test_lr_at_a_batch(run: Callable[..., str], flowing: Callable[..., str]) -> None:
    rows = {row["law"]: row for row in json.loads(run(*RUN, "--batch-tokens", "2M", "--json"))}
    kaplan = rows["Kaplan 2020 critical batch"]
    assert kaplan["batch_ratio"] == pytest.approx(2e6 / kaplan["batch_tokens"])
    assert kaplan["at_batch"] is None
    step = rows["Step Law 2025"]["at_batch"]
    assert step["linear"] / step["square_root"] == pytest.approx(step["ratio"] ** 0.5)
    assert "at the median critical batch of 2.19 M: 1.91x the fewest" in flowing(*RUN, "--batch-tokens", "2M")


def test_sizes_for_a_flop_budget(run: Callable[..., str], flowing: Callable[..., str]) -> None:
    rows = json.loads(run("--flops", "5.76e23", "--json"))
    assert [row["law"] for row in rows] == [frontier.name for frontier in FRONTIERS]
    assert {"law", "params", "tokens", "loss", "loss_replication", "in_range", "trust"} <= rows[0].keys()
    assert "a spread of 2.03x" in flowing("--flops", "5.76e23")
