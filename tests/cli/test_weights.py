import json
import re
import shlex
import shutil
from pathlib import Path

import yaml
from tests.cli.conftest import Verb, document
from tests.conftest import TINY

import leaven as package
from leaven.interop.weights import card_caution, model_card
from leaven.recipe.files import parse_recipe, read_recipe
from leaven.training.run_folder import RunFolder

WITH_REASONS = (
    TINY.replace('source = "SOURCE"', 'source = [{ source = "a.txt", weight = 3.0 }, { source = "b.txt" }]')
    + '\n[why]\n"hyperparameters.lr" = "measured\\nhere"\n'
)


def test_exported_weights_are_the_start_of_a_new_recipe(leaven: Verb, scaled_run: Path, tmp_path: Path) -> None:
    out, recipe = tmp_path / "out", tmp_path / "next one.toml"
    printed = document(leaven("export", "weights", scaled_run, "--to", "huggingface", out, "--json"))
    assert printed["schema"] == "leaven.export-weights/1"
    assert (printed["architecture"], printed["tokens"], printed["averaged"]) == ("Qwen3ForCausalLM", 10_240, False)
    assert printed["next"] == [f"leaven new out.toml --from-weights {out}"]
    model, _ = package.load(scaled_run)
    new = document(leaven("new", recipe, "--from-weights", out, "--tokens", "4k", "--json"))
    assert (new["params"], new["params_active"], new["tokens"]) == (model.shape.params, model.shape.params, 4_000)
    check, train = new["next"]
    assert check == f"leaven recipes check {shlex.quote(str(recipe))}"
    assert train == f"leaven train {shlex.quote(str(recipe))} --run 'runs/next one'"
    written = read_recipe(recipe)
    assert written.name == "next-one"
    assert written.model == model.shape
    assert written.start.weights == str(out)
    shown = leaven("show", recipe)[1]
    assert f"from the weights in {out}, not from init std" in " ".join(shown.split())
    moved = tmp_path / "wide.toml"
    assert leaven("transfer", recipe, "--width", 32, "-o", moved)[0] == 0
    wide = read_recipe(moved)
    assert wide.start.weights is None
    assert wide.why["start.weights"] == "left out: the weights of the previous recipe have another shape"


def test_values_of_the_model_card_that_a_new_recipe_does_not_take_are_named(
    leaven: Verb, scaled_run: Path, tmp_path: Path
) -> None:
    out, recipe = tmp_path / "out", tmp_path / "next.toml"
    assert leaven("export", "weights", scaled_run, out)[0] == 0
    said = " ".join(leaven("new", recipe, "--from-weights", out, "--tokens", "4k")[2].split())
    assert f"the recipe in {out / 'README.md'} has other values, which are not taken: " in said
    assert "hyperparameters.lr, " in said
    written = read_recipe(recipe)
    assert card_caution(written.replace({"hyperparameters.modules.mlp.out.lr": 1.0})) == card_caution(written)
    (out / "README.md").write_text("# A model of somebody else\n\n```toml\nname = 1\n```\n")
    code, _, err = leaven("new", recipe.with_name("b.toml"), "--from-weights", out, "--tokens", "4k")
    assert (code, "not taken" in err) == (0, False)


def test_what_a_new_recipe_does_not_take_from_config_json_is_listed(
    leaven: Verb, scaled_run: Path, tmp_path: Path
) -> None:
    out, recipe = tmp_path / "out", tmp_path / "next.toml"
    assert leaven("export", "weights", scaled_run, out)[0] == 0
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.3}))
    assert "ignored   attention_dropout: leaven's" in leaven("new", recipe, "--from-weights", out)[2]
    new = document(leaven("new", recipe, "--from-weights", out, "--force", "--json"))
    assert [line.partition(":")[0] for line in new["unread"]] == ["attention_dropout"]


def test_start_weights_with_the_token_ids_of_another_tokenizer_are_named(
    leaven: Verb, scaled_run: Path, tmp_path: Path
) -> None:
    out, recipe = tmp_path / "out", tmp_path / "next.toml"
    assert leaven("export", "weights", scaled_run, out)[0] == 0
    assert leaven("new", recipe, "--from-weights", out, "--tokens", "1k")[0] == 0
    (tmp_path / "other.txt").write_text("another text of a few tokens\n" * 99)
    # The text is too short for a window, so the run ends after the text has been tokenised.
    train = ["train", recipe, "--run", tmp_path / "run", "--set", f"data.source={tmp_path}/other.txt"]
    train += ["--set", "model.seq_len=4096", "--set", "batch.tokens=4096"]
    for more, told in (([], False), (["--set", "data.tokenizer=bpe"], True)):
        code, _, err = leaven(*train, *more)
        line = " ".join(err.split())
        assert (code, "token ids mean other tokens in data.tokenizer than in the tokenizer" in line) == (2, told)
    assert f'if this is not intended, set data.tokenizer = "{out}/' in line
    whole = (out / "model.safetensors").read_bytes()
    (out / "model.safetensors").write_bytes(whole[: len(whole) // 2].ljust(len(whole), b"\0"))
    for command in (train, ["new", tmp_path / "more.toml", "--from-weights", out]):
        says = f" matrices in {out} are zeros, in whole or in part, such as model."
        assert says in " ".join(leaven(*command)[2].split())


def test_an_exported_folder_has_a_model_card(leaven: Verb, scaled_run: Path, tmp_path: Path) -> None:
    out, early = tmp_path / "out", tmp_path / "early"
    assert leaven("export", "weights", scaled_run, out, "--data-license", "ODC-By 1.0 | see there")[0] == 0
    card = (out / "README.md").read_text()
    recipe = read_recipe(scaled_run / "recipe.toml")
    head, _, rest = card.removeprefix("---\n").partition("---\n")
    assert yaml.safe_load(head)["library_name"] == "transformers"
    assert f"# {recipe.name}\n" in rest
    assert f"| {recipe.data.source} | 100% | ODC-By 1.0 \\| see there |" in rest
    last = [e for e in RunFolder(scaled_run).events() if e["event"] == "validation"][-1]
    loss, bits = f"{last['loss']:.4f} nats per token", f"{last['bits_per_byte']:.4f} bits per byte"
    assert f"| validation loss | {loss}, {bits} |" in rest
    for path, reason in recipe.why.items():
        assert f"| `{path}` | " in rest
        assert reason in rest
    text = rest.partition("```toml\n")[2].partition("\n```")[0]
    assert parse_recipe(text, "README.md") == recipe

    assert leaven("export", "weights", scaled_run, early, "--tokens", "5120", "--dtype", "bf16")[0] == 0
    card = (early / "README.md").read_text()
    assert "**The training is not complete**: these are the weights at 5,120 of 10,240 tokens." in card
    assert f"{last['loss']:.4f} nats" not in card
    assert "| weights | bf16, multipliers folded in |" in card


def test_the_card_of_a_recipe_with_reasons_and_several_sources() -> None:
    recipe = parse_recipe(WITH_REASONS, "mixed.toml")
    card = model_card(recipe, WITH_REASONS, architecture="X", tokens=4096, dtype="fp32", events=[])
    assert "| `hyperparameters.lr` | 0.01 | measured here |" in card
    assert "| a.txt | 75% | not stated |\n| b.txt | 25% | not stated |" in card
    assert "| validation loss | not measured |" in card


def test_the_card_leaves_out_a_validation_that_a_rewind_has_undone() -> None:
    recipe = parse_recipe(WITH_REASONS, "mixed.toml")
    events = [
        {"event": "validation", "tokens": 1024, "loss": 3.0, "bits_per_byte": None},
        {"event": "validation", "tokens": 2048, "loss": 2.0},
        {"event": "rewind", "tokens": 3072, "to_tokens": 1536},
    ]
    during = ["3 k tokens of its text after 8 k tokens left out"]
    card = model_card(recipe, WITH_REASONS, architecture="X", tokens=4096, dtype="fp32", events=events, during=during)
    assert f"| during the run | {during[0]} |\n| scaling rule |" in card
    assert "| validation loss | 3.0000 nats per token" in card


def test_sample_continues_a_text(leaven: Verb, scaled_run: Path) -> None:
    asked = ("sample", scaled_run, "def fun", "--max-tokens", "12", "--seed", "1", "--samples", "2")
    code, said, err = leaven(*asked, "--json")
    assert (code, err) == (0, "")
    printed = json.loads(said)
    assert (printed["run"], printed["tokens"], printed["prompt"]) == (str(scaled_run), 10_240, "def fun")
    assert [set(each) for each in printed["samples"]] == [{"text", "tokens", "ended"}] * 2
    assert printed["samples"][0] != printed["samples"][1]
    code, said, _ = leaven(*asked)
    assert code == 0
    assert all(f"def fun{each['text']}\n" in said for each in printed["samples"])
    code, _, err = leaven("sample", scaled_run, "def fun " * 99, "--max-tokens", "1")
    assert code == 0
    assert re.search(r"TEXT has \d+ tokens, and the model uses only the last 32", err)


def test_a_damaged_checkpoint_is_skipped_with_a_warning(leaven: Verb, scaled_run: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(scaled_run, tmp_path / "run"))
    arguments = ("sample", run, "x", "--max-tokens", "1")
    newest = max((run / "checkpoints").iterdir())
    (newest / "model.safetensors").write_bytes(b"torn")
    code, _, err = leaven(*arguments)
    assert code == 0
    assert err.startswith(f"warning: checkpoint {newest.name} is damaged; the checkpoint before it is used")
