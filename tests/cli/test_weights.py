"""leaven export weights, leaven new --from-weights and leaven sample."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from tests.cli.conftest import Verb

import leaven as package
from leaven.recipe.files import read_recipe


def test_exported_weights_load_in_transformers_and_train_again(
    leaven: Verb, scaled_run: Path, tmp_path: Path
) -> None:
    out, recipe, again = (tmp_path / name for name in ("out", "next one.toml", "again"))
    code, said, err = leaven("export", "weights", scaled_run, "--to", "huggingface", out, "--json")
    assert (code, err) == (0, "")
    assert json.loads(said) == {
        "path": str(out),
        "architecture": "Qwen3ForCausalLM",
        "tokens": 10_240,
        "next": [f"leaven new out.toml --from-weights {out}"],
        "schema": "leaven.export-weights/1",
    }
    model, tokenizer = package.load(scaled_run)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out)
    tokens = torch.tensor([tokenizer.encode("def function_3(x):").ids])
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, model(tokens), rtol=0, atol=1e-5)

    code, said, _ = leaven("new", recipe, "--from-weights", out, "--tokens", "4k", "--json")
    assert code == 0
    printed = json.loads(said)
    assert printed == {
        "path": str(recipe),
        "architecture": "Qwen3ForCausalLM",
        "params": model.shape.params,
        "tokens": 4_000,
        "schema": "leaven.new-from-weights/1",
    }
    written = read_recipe(recipe)
    assert written.name == "next-one"
    assert written.model == model.shape
    source = read_recipe(scaled_run / "recipe.toml").data.source
    settings = [f"data.source={source}", "batch.tokens=256", "evaluation.tokens=1024", "hyperparameters.lr=0.001"]
    command = ["train", recipe, "--run", again, "--json", *(word for each in settings for word in ("--set", each))]
    trained = json.loads(leaven(*command)[1])
    first = json.loads((again / "metrics.jsonl").read_text().splitlines()[0])["loss"]
    last = json.loads((scaled_run / "metrics.jsonl").read_text().splitlines()[-1])["loss"]
    assert first == pytest.approx(last, abs=0.3)  # of a run from scratch it is log 320 = 5.8
    assert trained["loss"] < first + 0.1
    shown = leaven("show", recipe)[1]
    assert f"from the weights in {out}, not from init std" in " ".join(shown.split())
    moved = tmp_path / "wide.toml"
    assert leaven("transfer", recipe, "--width", 32, "-o", moved)[0] == 0
    wide = read_recipe(moved)
    assert wide.start.weights is None
    assert wide.why["start.weights"] == "left out: these weights have another shape"


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


def test_a_damaged_checkpoint_is_skipped_with_a_warning(leaven: Verb, scaled_run: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(scaled_run, tmp_path / "run"))
    arguments = ("sample", run, "x", "--max-tokens", "1")
    newest = max((run / "checkpoints").iterdir())
    (newest / "model.safetensors").write_bytes(b"torn")
    code, _, err = leaven(*arguments)
    assert code == 0
    assert err.startswith(f"warning: checkpoint {newest.name} is damaged; the checkpoint before it is used")
    shutil.rmtree(run / "checkpoints")
    code, out, err = leaven(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {run}: no checkpoint yet; ")
