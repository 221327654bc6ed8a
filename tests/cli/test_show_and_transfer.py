import json
from pathlib import Path

import pytest
from tests.cli.conftest import Verb, document

from leaven.recipe.files import read_recipe, write_recipe
from leaven.storage import digest
from leaven.tuning.study_document import StudyDocument

STUDY = {"name": "tiny", "method": "trust-region", "space": (), "radius": None, "stalled": False, "trials": ()}


def test_show_names_the_init_and_warns_of_one_that_is_too_large(leaven: Verb, tiny_file: Path) -> None:
    named = ("--set", "hyperparameters.init=wang", "--set", "hyperparameters.init_std=")
    shown = document(leaven("show", tiny_file, *named, "--json"))
    assert (shown["init"]["name"], shown["warnings"]) == ("wang", [])
    assert shown["optimizer"]["name"] == "adamw"
    code, _, err = leaven("show", tiny_file, "--set", "hyperparameters.init_std=0.5")
    assert code == 0
    assert "warning: init std 0.5 of attention.query is 3.5 x sqrt(1 / (3 d)) = 0.144" in err


def test_show_lists_what_blocks_have(leaven: Verb, tiny_file: Path) -> None:
    changed = ("--set", "model.norm_placement=sandwich", "--set", "model.window=8")
    shown = document(leaven("show", tiny_file, *changed, "--json"))
    assert shown["blocks"] == {"norm_placement": "sandwich", "window": 8}
    assert "norm_placement sandwich · window 8" in leaven("show", tiny_file, *changed)[1]
    assert document(leaven("show", tiny_file, "--json"))["blocks"] == {}


def test_show_lists_the_experts_and_counts_what_a_token_uses(leaven: Verb, tiny_file: Path) -> None:
    experts = ("--set", "model.experts={number = 4, active = 1, normalise = false, d_expert = 32}")
    plain = document(leaven("show", tiny_file, "--json"))["totals"]
    totals = document(leaven("show", tiny_file, *experts, "--json"))["totals"]
    router, expert = 2 * 4 * 16, 2 * 3 * 16 * 32  # of both layers
    assert totals["params"] == plain["params"] + router + 3 * expert
    assert totals["params_active"] == plain["params"] + router
    code, out, _ = leaven("show", tiny_file, *experts)
    assert code == 0
    assert "of which a token uses" in out
    assert "number 4 · active 1 · d_expert 32 · shared 0" in " ".join(out.split())
    columns = out[out.index("\nstd ") :].splitlines()[2].split()
    assert {"router", "experts.in", "experts.out"} <= set(columns)


def test_show_has_no_beta2_and_eps_of_muon(leaven: Verb, tiny_file: Path) -> None:
    code, out, _ = leaven("show", tiny_file, "--set", "hyperparameters.optimizer=muon")
    rows = {words[0]: words[-3:-1] for words in map(str.split, out.splitlines()) if len(words) > 8}
    assert code == 0
    assert rows["mlp.out"] == ["-", "-"]
    assert "-" not in rows["embedding"]


def test_show_explains_clipping_and_the_ramp(leaven: Verb, tiny_file: Path) -> None:
    clip = 'hyperparameters.grad_clip={mode = "running", limit = 2.0}'
    ramp = "batch.ramp={start_tokens = 64, increment_tokens = 64, over_tokens = 1_000, rule = 'scaled'}"
    shown = document(leaven("show", tiny_file, "--set", clip, "--set", ramp, "--json"))
    assert (shown["clip"]["mode"], shown["clip"]["limit"]) == ("running", 2.0)
    assert "the lr by 0.5, weight decay by 0.5, eps by 2 and" in shown["ramp"]["why"]
    text = " ".join(leaven("show", tiny_file, "--set", clip, "--set", ramp)[1].split())
    assert shown["clip"]["why"] in text
    assert shown["ramp"]["why"] in text


@pytest.mark.parametrize("name", ["standard", "mup", "completep", "complete-d-p"])
def test_show_rule_prints_every_cell_with_its_source(leaven: Verb, name: str) -> None:
    shown = document(leaven("show", "--rule", name, "--json"))
    assert shown["rule"] == name
    assert all(cell["source"] for row in shown["roles"].values() for cell in row.values())
    assert all(cell["source"] for cell in shown["shared"].values())
    text = " ".join(leaven("show", "--rule", name)[1].split())
    assert all(cell["source"] in text for cell in shown["roles"]["hidden_weight"].values())


def test_transfer_writes_the_larger_recipe_and_keeps_comments(leaven: Verb, tiny_file: Path, tmp_path: Path) -> None:
    big = tmp_path / "big.toml"
    scale = ("--width", "32", "--depth", "4", "--batch-tokens", "512", "--tokens", "1M")
    shown = document(leaven("transfer", tiny_file, *scale, "-o", big, "--json"))
    assert shown["ratios"] == {"width": 2, "depth": 2, "batch": 2, "tokens": pytest.approx(1e6 / 10_240)}
    assert "# as small as a transformer gets" in big.read_text()
    assert document(leaven("show", big, "--json"))["parameters"] == shown["parameters"]
    assert read_recipe(big).why
    assert leaven("transfer", tiny_file, "--width", "48", "-o", big, "--force")[0] == 0
    assert read_recipe(big).model.d_model == 48


def test_transfer_writes_to_a_device(leaven: Verb, tiny_file: Path) -> None:
    code, out, _ = leaven("transfer", tiny_file, "--width", "32", "-o", "/dev/null")
    assert code == 0
    assert "wrote /dev/null" in out


def test_transfer_warns_outside_tested_ranges(leaven: Verb, tiny_file: Path) -> None:
    code, out, err = leaven("transfer", tiny_file, "--depth", "80", "--d-ff", "48", "--kv-heads", "2", "--json")
    shown = json.loads(out)
    assert code == 0
    assert {warning["about"] for warning in shown["warnings"]} == {"depth ratio", "tokens per parameter"}
    assert err.splitlines() == [f"warning: {warning['message']}" for warning in shown["warnings"]]
    assert [row["shape"] for row in shown["parameters"] if row["name"] == "layers.9.mlp.in.weight"] == [[48, 16]]
    assert shown["scale"]["base"]["d_ff"] == 32
    longer = leaven("transfer", tiny_file, "--width", "32", "--set", "model.seq_len=64", "--json")
    assert [warning["about"] for warning in json.loads(longer[1])["warnings"]] == ["seq_len"]
    other = leaven("transfer", tiny_file, "--like", tiny_file, "--set", "model.vocab_size=640", "--json")
    assert "vocab_size" in [warning["about"] for warning in json.loads(other[1])["warnings"]]
    for change in ("hyperparameters.lr=1", "scaling={alpha=0.5}"):
        code, _, err = leaven("transfer", tiny_file, "--like", tiny_file, "--set", change)
        assert (code, "cannot be used, because --like takes this value from" in err) == (2, True)
    near = leaven("transfer", tiny_file, "--width", "32", "--json")
    assert (json.loads(near[1])["warnings"], near[2]) == ([], "")


def test_transfer_says_that_a_best_toml_was_edited(leaven: Verb, tiny_file: Path, tmp_path: Path) -> None:
    best = tmp_path / "best.toml"
    best.write_text(tiny_file.read_text())
    study = StudyDocument(**STUDY, written={"best.toml": digest(best.read_bytes())})
    (tmp_path / "study.json").write_text(study.model_dump_json())
    assert leaven("transfer", best, "--width", "32")[2] == ""
    best.write_text(best.read_text().replace("lr = 0.0", "lr = 0.00"))
    edited = "was edited after leaven tune wrote it, so the reasons in [why] may not fit the values"
    edited = f"warning: {best} {edited}\n"
    assert leaven("transfer", best, "--width", "32")[2] == edited
    assert leaven("transfer", tiny_file, "--width", "32")[2] == ""


def test_transfer_says_what_a_studys_gain_is_worth_at_the_target(
    leaven: Verb, tiny_file: Path, tmp_path: Path
) -> None:
    best = tmp_path / "best.toml"
    best.write_text(tiny_file.read_text())

    def worth(
        tokens: str, gain: float | None = 0.1, name: str = "best.toml", **about: bool
    ) -> list[dict[str, float]]:
        (tmp_path / "study.json").write_text(StudyDocument(**STUDY, gain=gain, **about).model_dump_json())
        return list(document(leaven("transfer", tmp_path / name, "--tokens", tokens, "--json"))["worth"])

    # B / D^beta = 2085.4 / (2e10)^0.3658 nats are what more tokens could gain.
    reducible = 2085.4 / 2e10**0.3658
    by_hand = [(1 - share * 0.1 / reducible) ** (-1 / 0.3658) for share in (1, 0.5, 0.25)]
    assert [row["times"] for row in worth("20B")] == pytest.approx(by_hand)
    text = " ".join(leaven("transfer", best, "--tokens", "20B")[1].split())
    assert f"gained 0.1000 nats. If this run gains as much, that is worth {by_hand[0]:.2f} times" in text
    assert worth("20B", gain=None) == worth("20B", gain=-0.01) == worth("20M") == []
    assert worth("20B", in_doubt=True) == []
    (tmp_path / "centre.toml").write_text(tiny_file.read_text())
    assert worth("20B", name="centre.toml") == []
    (tmp_path / "study.json").write_text("{")
    assert document(leaven("transfer", best, "--tokens", "20B", "--json"))["worth"] == []


def test_a_set_value_that_a_transfer_scales_is_named(leaven: Verb, tiny_file: Path, tmp_path: Path) -> None:
    sets = ("--set", "stability.checkpoint_every_tokens=4096", "--set", "stability.keep=3")
    command = ("transfer", tiny_file, *sets, "-o", tmp_path / "big.toml", "--tokens")
    tokens = read_recipe(tiny_file).data.tokens
    code, _, err = leaven(*command, str(2 * tokens))
    assert code == 0
    said = "every_tokens applies before the transfer: it sets 4096, and the new recipe has 8192"
    assert said in " ".join(err.split())
    assert "stability.keep" not in err


def test_a_recipe_of_a_run_that_a_rewind_changed_is_named(leaven: Verb, tiny_file: Path, tmp_path: Path) -> None:
    why = "since 5,120 tokens, by --rewind-to; before: 0.02"
    rewound = tmp_path / "rewound.toml"
    write_recipe(read_recipe(tiny_file).replace({"why": {"hyperparameters.lr": why}}), rewound)
    said = "belongs to a run that began with other values of hyperparameters.lr, which --rewind-to changed"
    for command in (
        ("show",),
        ("recipes", "check"),
        ("export", "config", "--to", "torchtitan", "-o", tmp_path / "x.toml"),
    ):
        assert said in " ".join(leaven(*command[:2], rewound, *command[2:])[2].split())
    assert leaven("transfer", rewound, "--tokens", "20480", "-o", tmp_path / "new.toml")[0] == 0
    assert "rewind" not in (tmp_path / "new.toml").read_text()
