import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.distributed.cut_up import whole_checkpoint

import leaven
from leaven.data.tokens import TokenSet, prepare
from leaven.errors import InputError
from leaven.interop.weights import read_huggingface, recipe_from
from leaven.recipe.files import read_recipe
from leaven.recipe.recipe import Recipe
from leaven.training.load import export_run, load_run
from leaven.training.trainer import Training, train
from leaven.views.folders import read_run


@pytest.fixture
def run(scaled_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(scaled_run, tmp_path / "run"))


def damage(checkpoint: Path) -> None:
    file = checkpoint / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def test_the_model_is_the_one_that_was_trained(scaled_run: Path, tokens: TokenSet) -> None:
    model, tokenizer = leaven.load(scaled_run)
    recipe = read_recipe(scaled_run / "recipe.toml")
    training = Training(recipe, tokens, device="cpu")
    checkpoint = whole_checkpoint(scaled_run / "checkpoints")
    training.restore(checkpoint)
    inputs = torch.from_numpy(training.validation[:2, :-1])
    logits = model(inputs)
    assert logits.shape == (2, 32, 320)
    assert logits.dtype == torch.float32
    assert torch.equal(logits, training.model(inputs))
    assert model.has_multipliers
    assert not model.training
    assert tokenizer.decode(tokenizer.encode("def é(x)").ids) == "def é(x)"


def test_paths_may_be_texts(run: Path, corpus: Path, cache: Path) -> None:
    recipe = read_recipe(str(run / "recipe.toml"))
    tokens = prepare(recipe.data, recipe.model.vocab_size, str(cache))
    assert leaven.train(recipe, tokens, str(run)).finished
    leaven.load(str(run))


def test_a_checkpoint_is_chosen_by_its_tokens(scaled_run: Path) -> None:
    newest, earlier = load_run(scaled_run), load_run(scaled_run, 5_120)
    assert (newest.tokens, earlier.tokens) == (10_240, 5_120)
    name = "layers.0.mlp.in.weight"
    assert not torch.equal(newest.model.get_parameter(name), earlier.model.get_parameter(name))


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(run: Path) -> None:
    newest, before = sorted((run / "checkpoints").glob("tokens-*"), reverse=True)
    damage(newest)
    with pytest.warns(UserWarning, match=f"{newest.name} of .* is damaged; the checkpoint before it is used"):
        model, _ = leaven.load(run)
    assert torch.equal(model.embedding.weight, load_run(run, 5_120).model.embedding.weight)
    with pytest.raises(InputError, match=rf"no checkpoint can be used \(damaged: {newest.name}\)"):
        leaven.load(run, tokens=10_240)
    damage(before)
    with pytest.raises(InputError, match=rf"no checkpoint can be used \(damaged: {newest.name}, {before.name}\)"):
        leaven.load(run)


@pytest.mark.parametrize(
    ("event", "why"),
    [("validation", r"its first \d+ lines have been"), ("finish", "its finish event has been")],
)
def test_a_loss_in_changed_events_is_not_believed(
    run: Path, tokens: TokenSet, tmp_path: Path, event: str, why: str
) -> None:
    events = run / "events.jsonl"
    lines = events.read_text().splitlines(keepends=True)
    last = max(at for at, line in enumerate(lines) if f'"event": "{event}"' in line)
    lines[last] = lines[last].replace('"loss": ', '"loss": 1')
    events.write_text("".join(lines))
    loaded = load_run(run)
    assert re.search(f"events.jsonl is not as it was when the run finished: {why}", loaded.changed or "")
    export_run(loaded, tmp_path / "exported")
    assert "| validation loss | not measured |" in (tmp_path / "exported" / "README.md").read_text()
    assert re.search(f"events.jsonl is not as it was when the run finished: {why}", read_run(run).gaps)
    said: list[str] = []
    train(read_recipe(run / "recipe.toml"), tokens, run, on_event=lambda _, values: said.append(values["why"]))
    assert len(said) == 1
    assert re.match(why, said[0])


def test_a_folder_without_a_whole_run_is_refused(run: Path) -> None:
    (run / "tokenizer.json").write_text("{}")
    with pytest.raises(InputError, match=r"tokenizer.json is not the tokenizer with which the run was trained"):
        leaven.load(run)
    (run / "tokenizer.json").unlink()
    with pytest.raises(InputError, match=r"tokenizer.json is missing; bring it back, or repeat the leaven train"):
        leaven.load(run)
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(InputError, match=r"but events.jsonl says that the run has trained 10,240 tokens"):
        leaven.load(run)
    for name in ("events.jsonl", "metrics.jsonl", "plan.json"):
        (run / name).unlink()
    with pytest.raises(InputError, match=r"no checkpoint yet; leaven train writes one"):
        leaven.load(run)


@pytest.fixture
def adopted(scaled_run: Path, tmp_path: Path) -> Recipe:
    """Return a recipe that starts from the exported weights of the run."""
    run = load_run(scaled_run)
    folder = tmp_path / "exported"
    export_run(run, folder)
    recipe = recipe_from(read_huggingface(folder), "adopted", source=run.recipe.data.source, tokens=2_560).recipe
    return recipe.replace({"batch.tokens": 256, "evaluation.tokens": 1_024})


def test_a_run_starts_from_weights_and_is_resumed(
    scaled_run: Path, adopted: Recipe, tokens: TokenSet, tmp_path: Path
) -> None:
    """Weights are exported, and a new run starts from them: its first loss is that of the exported model."""
    model, _ = leaven.load(scaled_run)
    training = Training(adopted, tokens, device="cpu")
    inputs = torch.from_numpy(training.validation[:, :-1])
    torch.testing.assert_close(training.model(inputs), model(inputs), rtol=0, atol=1e-5)
    scaling = {"width": 8, "depth": 1, "batch_tokens": 256, "tokens": 4_096, "d_head": 4}
    for rule in ("complete-d-p", "completep"):  # the same function under a rule with multipliers
        under = Training(adopted.replace({"scaling.base": scaling, "scaling.rule": rule}), tokens, device="cpu")
        assert under.model.has_multipliers
        torch.testing.assert_close(under.model(inputs), model(inputs), rtol=0, atol=1e-5)

    recipe = adopted.replace({"stability.checkpoint_every_tokens": 1_024, "hyperparameters.lr": 1e-3})
    tokens = replace(tokens, data=recipe.data)
    whole = train(recipe, tokens, tmp_path / "whole")
    before = training.evaluate()
    assert whole.loss < before + 0.05
    lines = iter(range(5))
    train(recipe, tokens, tmp_path / "parts", stop=lambda: next(lines, None) is None)
    resumed = train(recipe, tokens, tmp_path / "parts")
    assert resumed.loss == whole.loss


def test_routers_of_a_new_run_start_with_the_biases_of_its_weights(
    tiny: Recipe, tokens: TokenSet, tmp_path: Path
) -> None:
    experts = {"number": 4, "active": 2, "d_expert": 16, "shared": 1, "router": "sigmoid", "balance": "bias"}
    brief = tiny.replace({"data.tokens": 2_560})
    train(brief.replace({"model.experts": experts | {"bias_step": 0.05}}), tokens, tmp_path / "run")
    run = load_run(tmp_path / "run")
    assert export_run(run, tmp_path / "exported").name == "Glm4MoeForCausalLM"
    used = f"of which a token uses {run.recipe.model.params_active:,} |"
    assert used in (tmp_path / "exported" / "README.md").read_text()
    adopted = recipe_from(read_huggingface(tmp_path / "exported"), "adopted", source=tiny.data.source).recipe
    assert adopted.data.tokens == 20 * tiny.replace({"model.experts": experts}).model.params_active
    training = Training(adopted.replace({"batch.tokens": 256}), tokens, device="cpu")
    assert torch.equal(training.load_balance.bias_LE, run.router_bias_LE)
    inputs = torch.from_numpy(training.validation[:, :-1])
    torch.testing.assert_close(training.model(inputs), run.model(inputs), rtol=0, atol=1e-5)
    training.load_balance.bias_LE.zero_()
    assert not torch.allclose(training.model(inputs), run.model(inputs), rtol=0, atol=1e-5)


def test_the_averaged_weights_are_validated_and_exported(tiny: Recipe, tokens: TokenSet, tmp_path: Path) -> None:
    run, folder = tmp_path / "run", tmp_path / "exported"
    brief = tiny.replace({"data.tokens": 2_560})
    summary = train(brief.replace({"average": {"last": 0.5}, "evaluation.every_tokens": 100_000}), tokens, run)
    assert summary.averaged_loss is not None
    assert summary.averaged_loss != summary.loss
    averaged = load_run(run, averaged=True)
    assert {*averaged.weights} == {*load_run(run).weights}
    training = Training(tiny, tokens, device="cpu")
    with torch.no_grad():
        for each in training.sharded.parameters:
            each.local.copy_(averaged.weights[each.row.name])
    assert training.evaluate() == pytest.approx(summary.averaged_loss, rel=1e-6)
    export_run(averaged, folder)
    card = (folder / "README.md").read_text()
    assert f"| validation loss | {summary.averaged_loss:.4f} nats per token |" in card
    assert "averaged over steps" in card
    train(brief.replace({"average": {"last": 0.05}}), tokens, tmp_path / "late")
    with pytest.raises(InputError, match="at 2,304 tokens the average has not begun; it begins after 2,432"):
        load_run(tmp_path / "late", 2_304, averaged=True)


def test_averaged_weights_need_an_average(run: Path) -> None:
    with pytest.raises(InputError, match=r"no averaged weights: the recipe has no \[average\]; leave out --averaged"):
        load_run(run, averaged=True)
