"""Export to NeMo Automodel: the lr and decay that its patterns give, and the initial weights.

`make test-targets` installs nemo-automodel, whose own optimizer and scheduler are then compared.
"""

import json
import re
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from tests.interop.configs.recipes import FAMILIES, PER_MODULE, rows_of, transferred
from transformers import AutoConfig, AutoModelForCausalLM

from leaven.interop.configs.export import export, write
from leaven.model.transformer import Transformer
from leaven.recipe.recipe import Recipe
from leaven.scaling.table import folding, parameter_table

# lr and decay by module and by layer, with more than one digit in a layer's number
VARIED: dict[str, Any] = {
    "model.n_layers": 12,
    "model.dropout": 0.0,
    "hyperparameters.grad_clip": 0.0,
    "hyperparameters.decay_norm_and_bias": True,
    "hyperparameters.modules": {
        "embedding": {"lr": 4.0},
        "mlp.out": {"weight_decay": 0.3},
        "norm.final": {"lr": 0.5},
    },
    "hyperparameters.depth": {"lr": [1.0, 1.5], "init_std": [1.0, 0.5]},
}


def written(recipe: Recipe, folder: Path) -> tuple[dict[str, Any], Any]:
    """Return the YAML document of an export, and the model of its config.json."""
    write(export("automodel", recipe), folder)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    return yaml.safe_load((folder / "automodel.yaml").read_text()), model


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_the_first_pattern_of_every_name_gives_its_lr_and_decay(tiny: Recipe, tmp_path: Path, family: str) -> None:
    recipe = tiny.replace(FAMILIES[family] | VARIED)
    assert export("automodel", recipe).losses == []
    document, model = written(recipe, tmp_path / "out")
    optimizer, rows = document["optimizer"], rows_of(recipe, model.config.model_type)
    heads = {"embed_out.weight": "lm_head.weight"}  # NeoX in transformers 5
    for name, found in rows.items():
        names = [heads.get(name, name)] if heads.get(name, name) in dict(model.named_parameters()) else [name]
        override = next(each for each in optimizer["param_group_overrides"] if re.search(each["pattern"], names[0]))
        for row in found:
            assert optimizer["lr"] * override["lr_mult"] == pytest.approx(row.lr), name
            assert optimizer["weight_decay"] * override["wd_mult"] == pytest.approx(row.weight_decay), name
            assert (*optimizer["betas"], optimizer["eps"]) == pytest.approx((row.beta1, row.beta2, row.eps))


def test_prepare_draws_and_writes_the_initial_weights(
    tiny: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The written model computes what a model of leaven with these weights, unfolded, computes."""
    changes = {"hyperparameters.grad_clip": 0.0, "model.norm_eps": 1e-5, "data.seed": 7}
    recipe = transferred(tiny.replace(changes))
    written(recipe, tmp_path / "out")
    monkeypatch.setattr(sys, "argv", ["prepare.py", str(tmp_path / "start")])
    script = runpy.run_path(str(tmp_path / "out" / "prepare.py"), run_name="__main__")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "start")
    torch.manual_seed(7)
    fresh = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path / "out"))
    script["prepare"](fresh, tmp_path / "out" / "parameters.json")
    assert all(map(torch.equal, fresh.parameters(), model.parameters()))
    table, factors, state = parameter_table(recipe), folding(recipe.model, parameter_table(recipe)), {}
    named = dict(model.named_parameters())
    for name, (row,) in rows_of(recipe, "qwen3").items():
        factor, values = factors.get(row.name, 1.0), named[name].detach()
        assert float(values.std(unbiased=False)) == pytest.approx(row.init_std * factor, rel=0.1, abs=1e-9), name
        state[row.name] = values / factor
    ours = Transformer(recipe.model, table.multipliers, table.attention_scale)
    ours.load_state_dict(state)
    tokens = torch.randint(recipe.model.vocab_size, (2, 8))
    torch.testing.assert_close(model(input_ids=tokens).logits, ours(tokens), rtol=1e-4, atol=1e-5)


def test_what_automodel_cannot_express_is_a_loss(tiny: Recipe) -> None:
    keys = {loss.key for loss in export("automodel", tiny.replace(PER_MODULE)).losses}
    assert keys == {"beta2 of mlp.out", "eps of mlp.out"}
    undecayed = export("automodel", tiny.replace({"hyperparameters.weight_decay": 0.0}))
    assert yaml.safe_load(undecayed.files["automodel.yaml"])["optimizer"]["weight_decay"] == 0.0
    blocks = [name for name in tiny.model.modules if name.startswith(("attention", "mlp"))]
    parts = {"hyperparameters.modules": {name: {"weight_decay": 0.0} for name in blocks}}
    document = yaml.safe_load(export("automodel", tiny.replace(parts)).files["automodel.yaml"])
    assert document["optimizer"]["weight_decay"] == 0.1
    assert document["clip_grad_norm"]["max_norm"] == 1.0
    unclipped = export("automodel", tiny.replace({"hyperparameters.grad_clip": 0.0})).files["automodel.yaml"]
    assert yaml.safe_load(unclipped)["clip_grad_norm"]["max_norm"] == float("inf")


def test_the_layout_is_written_or_said(tiny: Recipe) -> None:
    """The keys of `distributed`; Automodel itself stops at pp_size > 1 without `pipeline`."""

    def exported(**layout: Any) -> tuple[dict[str, Any], str]:
        sizes = {f"layout.{key}": value for key, value in layout.items()}
        found = export("automodel", tiny.replace(sizes | {"batch.tokens": 64 * 64, "batch.micro_batch": 1}))
        document = yaml.safe_load(found.files["automodel.yaml"])
        assert "dp" not in " ".join(loss.key for loss in found.losses)
        return document, "; ".join(found.notes)

    document, notes = exported(dp=16, zero=3, dp_replicate=4, recompute="selective")
    sizes = document["distributed"]
    assert (sizes["dp_size"], sizes["dp_replicate_size"], sizes["activation_checkpointing"]) == (16, 4, "selective")
    assert not {"reshard_after_forward", "pipeline"} & sizes.keys()
    assert "zero" not in notes
    document, notes = exported(dp=4, zero=1, dp_replicate=4)
    assert document["distributed"]["dp_replicate_size"] == 1
    assert document["distributed"]["reshard_after_forward"] is False
    assert "zero 1 is written as 2" in notes
    assert "dp_replicate 4 is written as 1" in notes
    document, notes = exported(dp=2, zero=1, pp=2, schedule="zero-bubble")
    assert document["distributed"]["pipeline"] == {"pp_schedule": "1F1B", "pp_microbatch_size": 1, "dtype": "float32"}
    assert "zero-bubble is written as 1F1B" in notes
    steps = document["step_scheduler"]
    assert steps["local_batch_size"] * 2 == steps["global_batch_size"]


@pytest.mark.parametrize("decay", ["cosine", "linear", "wsd", "inverse_sqrt", "constant"])
def test_automodels_own_optimizer_and_schedule(tiny: Recipe, tmp_path: Path, decay: str) -> None:
    optim = pytest.importorskip("nemo_automodel.components.optim.optimizer")
    recipe = tiny.replace(VARIED | {"schedule.decay": decay})
    document, model = written(recipe, tmp_path / "out")
    settings = document["optimizer"]
    kind = {"torch.optim.AdamW": optim.AdamWConfig}[settings.pop("_target_")]
    optimizers = kind(**settings).build(model)
    steps = SimpleNamespace(epoch_len=None, num_epochs=1, max_steps=document["step_scheduler"]["max_steps"])
    (scheduler,) = optim.LRSchedulerConfig(**document["lr_scheduler"]).build(optimizers, steps)
    group_of = {id(each): group for group in optimizers[0].param_groups for each in group["params"]}
    rows, named = rows_of(recipe, "qwen3"), dict(model.named_parameters())
    for step in range(recipe.steps):
        share = recipe.schedule.multiplier(step * recipe.batch.tokens, recipe.data.tokens)  # its lr of a step's start
        for name, (row,) in rows.items():
            group = group_of[id(named[name])]
            assert group["lr"] == pytest.approx(share * row.lr, rel=1e-6), (name, step)
            assert group["weight_decay"] == pytest.approx(row.weight_decay), name
            assert (*group["betas"], group["eps"]) == pytest.approx((row.beta1, row.beta2, row.eps))
        scheduler.step(1)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["leaven"]["lost"] == []
