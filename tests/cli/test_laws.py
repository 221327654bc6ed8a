"""leaven laws: screen and document."""

import json
import re
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
    line = next(line for line in run(*RUN).splitlines() if line.startswith("Moonlight"))
    assert line.endswith("not known")


def test_every_quantity_has_a_median_and_a_range(flowing: Callable[..., str]) -> None:
    text = flowing(*RUN)
    assert "peak lr median 9.8e-4 of 4 laws · 3.5e-4 .. 2.1e-3, a spread of 6.12x" in text
    assert "2 inside their range: 3.5e-4 .. 1.0e-3" in text
    assert "optimal batch median 1.08 M of 5 laws · 442 k .. 3.27 M" in text
    assert "critical batch median 2.19 M of 3 laws · 1.23 M .. 5.54 M" in text
    assert "loss median 2.555 of 2 laws" in text
    assert "weight decay 0.25 by tau 0.22, at lr 9.8e-4 and batch 1.08 M" in text


def test_extrapolation_is_shown_by_axis(run: Callable[..., str]) -> None:
    """7B against 1B, 2T against 100B tokens; 1.2e20 FLOPs against 2e19; a model of 3M against 9M."""
    lines = run("--params", "7B", "--tokens", "2T").splitlines()
    assert next(line for line in lines if line.startswith("Step Law")).endswith("x20 D, x7 N")
    assert next(line for line in run(*RUN).splitlines() if line.startswith("DeepSeek")).endswith("x6 C")
    below = run("--params", "3M", "--tokens", "3B").splitlines()
    assert next(line for line in below if line.startswith("MiniCPM")).endswith("/3 N")


def test_the_parameter_count_of_each_law_is_stated(run: Callable[..., str], flowing: Callable[..., str]) -> None:
    """GPT-2 124M has 85M parameters in its blocks; the screen says which laws count these."""
    plain = flowing("--params", "124M", "--tokens", "10B")
    text = plain[plain.index("N less embeddings") :].replace(" · ", " ")
    laws_of_body = "Kaplan 2020 learning rate Kaplan 2020 critical batch DeepSeek LLM 2024 MiniCPM 2024 Step Law 2025"
    assert text.startswith(f"N less embeddings {laws_of_body} taken as 124 M, embeddings and all: give --params-non-")
    assert "Porian 2024 Porian 2024, rounded less the input embedding only: taken as 124 M" in text
    typed = ("--params", "124M", "--tokens", "10B", "--params-non-embedding", "85M")
    assert "taken as 85 M" in flowing(*typed)
    assert "give --params-non-embedding" not in flowing(*typed)
    step = next(row for row in json.loads(run(*typed, "--json")) if row["law"] == "Step Law 2025")
    assert step["lr"] == pytest.approx(1.79 * 85e6**-0.713 * 10e9**0.307)


def test_lr_at_a_batch(run: Callable[..., str], flowing: Callable[..., str]) -> None:
    rows = {row["law"]: row for row in json.loads(run(*RUN, "--batch-tokens", "2M", "--json"))}
    kaplan = rows["Kaplan 2020 critical batch"]
    assert kaplan["batch_ratio"] == pytest.approx(2e6 / kaplan["batch_tokens"])
    assert kaplan["at_batch"] is None
    step = rows["Step Law 2025"]["at_batch"]
    assert step["linear"] / step["square_root"] == pytest.approx(step["ratio"] ** 0.5)
    text = flowing(*RUN, "--batch-tokens", "2M")
    assert "0.91x Kaplan 2020 critical batch · 0.36x Power Lines 2025 critical batch 1.6x Zhang 2024" in text
    assert "at the median critical batch of 2.19 M: 1.91x the fewest tokens 2.10x the fewest steps" in text


def test_sizes_for_a_flop_budget(run: Callable[..., str], flowing: Callable[..., str]) -> None:
    rows = json.loads(run("--flops", "5.76e23", "--json"))
    assert [row["law"] for row in rows] == [frontier.name for frontier in FRONTIERS]
    assert {"law", "params", "tokens", "loss", "loss_replication", "in_range", "trust"} <= rows[0].keys()
    text = flowing("--flops", "5.76e23")
    for part in ("67.9 B", "63.7 B", "40.4 B", "72.2 B", "a spread of 2.03x", "all of them extrapolate"):
        assert part in text


def test_absurd_sizes_are_answered_and_flagged(flowing: Callable[..., str]) -> None:
    text = flowing("--params", "1e30", "--tokens", "1e30")
    assert "all of them extrapolate" in text
    assert " inside " not in text
    assert not re.search(r"[0-9]{4,} T", text)
