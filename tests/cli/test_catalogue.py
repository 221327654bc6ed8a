import csv
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from tests.cli.conftest import Verb, document

from leaven.catalogue.laws import LAWS
from leaven.planning.accelerators import accelerators
from leaven.recipe.files import read_recipe, write_recipe

EXAMPLE = Path(__file__).parents[2] / "examples/350m.toml"


def rows_by(key: str, result: tuple[int, str, str]) -> dict[str, Any]:
    return {row[key]: row for row in document(result)}


def test_list_is_sorted_by_size_and_names_sources(leaven: Verb) -> None:
    rows = document(leaven("recipes", "list", "--json"))
    assert len(rows) >= 110
    assert [row["params"] for row in rows] == sorted(row["params"] for row in rows)
    by_id = {row["id"]: row for row in rows}
    assert by_id["nemotron-4-15b"]["peak_lr"] is None
    assert by_id["deepseek-v3"]["params_active"] == 37_000_000_000


@pytest.mark.parametrize(
    ("options", "ids"),
    [
        ("--params 5B..10B --where arch.norm_placement=output", ["olmo2-7b", "olmo3-7b"]),
        ("--kind moe --optimizer adamw --tokens 10T..", ["mimo-v2-flash", "deepseek-v3"]),
        ("--family 'olmo 2'", ["olmo2-7b", "olmo2-13b", "olmo2-32b"]),
        ("--where schedule.shape=wsd --where 'optim.weight_decay<0.1' --params 2T..", []),
    ],
)
def test_list_takes_filters(leaven: Verb, options: str, ids: list[str]) -> None:
    assert [row["id"] for row in document(leaven("recipes", "list", *shlex.split(options), "--json"))] == ids
    assert leaven("recipes", "list", *shlex.split(options))[0] == 0


def test_list_as_csv_leaves_unknown_values_empty(leaven: Verb) -> None:
    by_id = {row["id"]: row for row in csv.DictReader(leaven("recipes", "list", "--csv")[1].splitlines())}
    assert by_id.keys() == rows_by("id", leaven("recipes", "list", "--json")).keys()
    assert float(by_id["pythia-70m"]["peak_lr"]) == 1e-3
    assert by_id["idefics-80b"]["tokens"] == ""


def test_nearest_takes_size_and_stack_from_options_and_recipe(leaven: Verb) -> None:
    asked = ("--params", "7B", "--tokens", "2T", "--norm-placement", "output", "--qk-norm", "--limit", "4", "--json")
    rows = document(leaven("recipes", "nearest", *asked))
    assert (rows[0]["id"], rows[0]["same_stack"]) == ("olmo2-7b", True)
    ids = [row["id"] for row in document(leaven("recipes", "nearest", "--like", EXAMPLE, "--qk-norm", "--json"))]
    assert ids[:2] == ["dclm-411m-1x", "openelm-450m"]


def test_diff_of_runs_and_recipes(leaven: Verb) -> None:
    rows = rows_by("path", leaven("recipes", "diff", "pythia-70m", "gpt-neox-20b", "--json"))
    assert (rows["optim.weight_decay"]["a"], rows["optim.weight_decay"]["b"]) == (0.1, 0.01)
    rows = rows_by("path", leaven("recipes", "diff", "smollm2-135m", EXAMPLE, "--json"))
    assert (rows["model.n_layers"]["a"], rows["model.n_layers"]["b"]) == (30, 24)
    kind = rows["init.kind"]
    assert (kind["a"], kind["b"], kind["counterpart"]) == ("scaled_normal", None, False)
    assert document(leaven("recipes", "diff", EXAMPLE, EXAMPLE, "--json")) == []
    assert leaven("recipes", "diff", EXAMPLE, EXAMPLE) == leaven("recipes", "diff", "olmo-7b", "olmo-7b")


def test_diff_compares_a_recipe_as_it_is_trained(leaven: Verb, tmp_path: Path) -> None:
    """The lr is in base coordinates: at four times the width of the base, hidden matrices get a quarter of it."""
    recipe = read_recipe(EXAMPLE)
    base = {"width": 256, "depth": 24, "batch_tokens": recipe.batch.tokens, "tokens": recipe.data.tokens}
    write_recipe(recipe.replace({"scaling.base": base, "scaling.alpha": 1.0}), tmp_path / "moved.toml")
    for path, lr in ((tmp_path / "moved.toml", 0.0003 / 4), (EXAMPLE, 0.0003)):
        rows = rows_by("path", leaven("recipes", "diff", "pythia-160m", path, "--json"))
        assert rows["hyperparameters.lr"]["b"] == pytest.approx(lr)


def test_check_suggests_what_to_set(leaven: Verb) -> None:
    fault = ("--set", "hyperparameters.lr=0.02", "--set", "schedule.warmup_tokens=0")
    code, out, err = leaven("recipes", "check", EXAMPLE, *fault)
    assert (code, err) == (1, "")
    assert "FAR OUTSIDE  lr: peak lr 0.02" in out
    assert "gpt2-350m-llmc" in out
    assert re.search(r"^FAILED: \d+ of \d+ checks outside", out, re.MULTILINE)
    (following,) = (line.removeprefix("next") for line in out.splitlines() if line.startswith("next"))
    code, out, err = leaven(*shlex.split(following)[1:])  # the same command with the suggestions
    assert err == ""
    assert "FAR OUTSIDE" not in out
    assert leaven("recipes", "check", EXAMPLE)[0] == 0


def test_check_as_json(leaven: Verb) -> None:
    code, out, _ = leaven("recipes", "check", EXAMPLE, "--set", "hyperparameters.grad_clip=0", "--json")
    found = document((0, out, ""))
    assert (code, found["passed"]) == (1, False)
    (clip,) = [one for one in found["findings"] if one["check"] == "clip"]
    assert (clip["severity"], clip["value"], clip["factor"]) == ("far outside", None, None)
    assert clip["mends"] == [{"hyperparameters.grad_clip": 1.0}]


def test_check_estimates_the_epochs_of_local_files(leaven: Verb, tmp_path: Path) -> None:
    text, recipe = tmp_path / "text.txt", tmp_path / "wheat.toml"
    text.write_text("a small text " * 10_000)
    assert "epochs of" in leaven("new", recipe, "--params", "125M", "--tokens", "2.5B", "--source", text)[1]
    code, out, _ = leaven("recipes", "check", recipe)
    assert code == 1
    assert "epochs of the text" in out
    text.unlink()
    code, _, err = leaven("recipes", "check", recipe)
    assert code == 0
    assert "the number of epochs is not checked" in err


def test_the_document_lists_every_law_with_its_trust(leaven: Verb) -> None:
    rows = document(leaven("laws", "--params", "1B", "--tokens", "20B", "--json"))
    assert [row["law"] for row in rows] == [law.name for law in LAWS]
    for row in rows:
        assert row["at_batch"] is None
        assert row["in_range"] is (None if row["extrapolation"] is None else not row["beyond"])
        assert row["trust"] in {"verified", "read", "secondary", "memory"}
    assert next(row for row in rows if row["law"] == "Moonlight Muon 2025")["in_range"] is None


def test_laws_of_the_blocks_use_the_count_without_embeddings(leaven: Verb) -> None:
    size = ("--params", "124M", "--tokens", "10B")
    assert "124 M without embeddings (all parameters are used instead" in " ".join(leaven("laws", *size)[1].split())
    changed = [leaven("laws", *size, *more, "--json")[1] for more in ((), ("--params-non-embedding", "85M"))]
    assert changed[0] != changed[1]


def test_the_loss_of_a_mixture_is_apart_from_the_losses_of_dense_models(leaven: Verb) -> None:
    size = ("--params", "1B", "--tokens", "20B")
    assert "loss, dense" not in leaven("laws", *size)[1]
    screen = leaven("laws", *size, "--experts", "16")[1]
    assert re.search(r"loss, 16 experts +2\.\d+ by Ludziejewski 2025 loss", screen)
    assert re.search(r"loss, dense +median 2\.\d+ of 2 laws", screen)


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


def test_only_the_speed_of_an_unmeasured_matmul_is_assumed(leaven: Verb) -> None:
    assert "bf16 794.5 · fp8 1402.6 · 80% of the peak\n" in leaven("hardware", "H100-SXM-80GB")[1]
    assert "none known · 80% of the peak is assumed" in leaven("hardware", "H100-PCIe-80GB")[1]


def test_check_names_a_value_without_effect(leaven: Verb) -> None:
    _, _, err = leaven("recipes", "check", EXAMPLE, "--set", "scaling.rule=mup", "--set", "scaling.alpha=0.5")
    assert "scaling.alpha = 0.5: no effect in this run (rule mup" in err
