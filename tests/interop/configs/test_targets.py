"""The exported files read by the targets' own parsers; `make test-targets` installs the targets."""

import importlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.interop.configs.recipes import FAMILIES, PER_MODULE, rows_of, transferred
from tests.interop.configs.test_import import assert_same

from leaven.interop.configs import from_torchtitan
from leaven.interop.configs.export import TARGETS, export
from leaven.recipe.recipe import Recipe
from leaven.scaling.table import parameter_table

SCHEDULES = ["cosine", "linear", "wsd", "constant"]


@pytest.mark.parametrize(
    "changes", [{}, {"precision.compute": "bf16", "layout.zero": 2}, {"precision.compute": "fp16"}]
)
def test_deepspeed_reads_its_config(tiny: Recipe, changes: dict[str, Any]) -> None:
    config = pytest.importorskip("deepspeed.runtime.config")
    read = config.DeepSpeedConfig(json.loads(export("deepspeed", tiny.replace(changes)).files[""]))
    assert (read.train_batch_size, read.gradient_accumulation_steps) == (8, 8)
    assert read.optimizer_name == "adamw"
    assert read.optimizer_params["weight_decay"] == 0.1
    assert read.gradient_clipping == 1.0
    assert read.zero_config.stage == changes.get("layout.zero", 0)
    assert read.scheduler_name == "WarmupCosineLR"


@pytest.mark.parametrize("decay", ["cosine", "constant"])
def test_deepspeeds_schedule_is_two_steps_late_and_multiplies_each_groups_lr(tiny: Recipe, decay: str) -> None:
    schedules = pytest.importorskip("deepspeed.runtime.lr_schedules")
    recipe = tiny.replace({"schedule.decay": decay})
    exported = export("deepspeed", recipe)
    said = json.loads(exported.files[""])["scheduler"]
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for lr in (3.0, 0.5)]
    optimizer = torch.optim.AdamW(groups)
    scheduler = getattr(schedules, said["type"])(optimizer, **said["params"])
    warmup = said["params"]["warmup_num_steps"]
    for step in range(recipe.steps):
        tokens = (step - (step - 1 < warmup)) * recipe.batch.tokens
        ours = recipe.schedule.multiplier(tokens, recipe.data.tokens)
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([3 * ours, ours / 2], abs=1e-7)
        optimizer.step()  # in the order of DeepSpeed's engine
        scheduler.step()
    assert any("warm-up is two steps late, and its decay one step" in note for note in exported.notes)


@pytest.mark.parametrize("micro_batch", [2, 8])
def test_litgpts_schedule_is_late_by_a_micro_batch(tiny: Recipe, micro_batch: int) -> None:
    pretrain = pytest.importorskip("litgpt.pretrain")
    recipe = tiny.replace({"batch.micro_batch": micro_batch})
    per_step, tokens = 8 // micro_batch, micro_batch * recipe.model.seq_len
    ends = recipe.schedule.warmup_tokens // tokens, recipe.data.tokens // tokens
    for step in range(recipe.steps):
        iteration = (step + 1) * per_step - 1  # the lr of the last micro-batch of a step is that of the step
        lr = pretrain.get_lr(0.01, iteration, *ends, 0.001)
        late = (step + 1) * recipe.batch.tokens - tokens
        assert lr == pytest.approx(0.01 * recipe.schedule.multiplier(late, recipe.data.tokens))
    note = f"late by one of {per_step} micro-batches"
    assert any(note in each for each in export("litgpt", recipe).notes)


@pytest.mark.parametrize("family", ["llama", "qwen3", "neox"])
def test_litgpt_reads_its_config_and_builds_the_model(tiny: Recipe, tmp_path: Path, family: str) -> None:
    pretrain = pytest.importorskip("litgpt.pretrain")
    from jsonargparse import ArgumentParser

    recipe = tiny.replace(FAMILIES[family] | {"model.dropout": 0.0})
    (tmp_path / "x.yaml").write_text(export("litgpt", recipe).files[""])
    parser = ArgumentParser()
    parser.add_argument("--config", action="config")
    parser.add_function_arguments(pretrain.setup)
    read = parser.instantiate_classes(parser.parse_args(["--config", str(tmp_path / "x.yaml")]))
    with torch.device("meta"):
        model = pretrain.GPT(read.model_config)
    assert sum(parameter.numel() for parameter in model.parameters()) == recipe.model.params
    assert (read.train.global_batch_size, read.train.max_tokens) == (8, recipe.data.tokens)
    optimizer = pretrain.instantiate_torch_optimizer(read.optimizer, [torch.nn.Parameter(torch.zeros(1))])
    assert isinstance(optimizer, torch.optim.AdamW)
    assert optimizer.defaults["lr"] == 0.01


def module_of(recipe: Recipe, folder: Path, name: str) -> Any:
    (folder / f"{name}.py").write_text(export("torchtitan", recipe).files[""])
    sys.path.insert(0, str(folder))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.pop(0)


TITAN: dict[str, dict[str, Any]] = {
    "llama": FAMILIES["llama"],
    "qwen3": FAMILIES["qwen3"] | PER_MODULE,
    "tied": {"model.tied_embeddings": True},
    "adam": {"hyperparameters.optimizer": "adam", "schedule.decay": "wsd"},
    "linear": {"schedule.decay": "linear", "layout.recompute": "full", "precision.compute": "bf16"},
}


@pytest.mark.parametrize("name", TITAN)
def test_torchtitan_builds_our_model_groups_and_schedule(tiny: Recipe, tmp_path: Path, name: str) -> None:
    pytest.importorskip("torchtitan.trainer")
    wide = {"model.vocab_size": 640, "model.d_head": 16, "model.d_model": 32, "model.d_ff": 128}
    recipe = tiny.replace(TITAN[name] | wide | {"data.documents": "isolated"})
    assert export("torchtitan", recipe).losses == []
    module = module_of(recipe, tmp_path, f"titan_{name}")
    config = module.tiny()
    torch.manual_seed(0)
    model = config.model_spec.model.build()
    model.init_states()
    assert sum(parameter.numel() for parameter in model.parameters()) == recipe.model.params
    config.optimizer.implementation = "for-loop"
    optimizers = config.optimizer.build(model_parts=[model])
    groups = {id(each): group for one in optimizers for group in one.param_groups for each in group["params"]}
    named = dict(model.named_parameters())
    for place, (row,) in rows_of(recipe, "torchtitan").items():
        parameter = named[place]
        group = groups[id(parameter)]
        found = (group["lr"], group["weight_decay"], *group["betas"], group["eps"])
        assert found == pytest.approx((row.lr, row.weight_decay, row.beta1, row.beta2, row.eps)), row.name
        assert float(parameter.detach().std(unbiased=False)) == pytest.approx(row.init_std, rel=0.15, abs=1e-9)
    schedule = config.lr_scheduler.build(optimizers=optimizers, training_steps=config.training.steps)
    peaks = [group["initial_lr"] for group in optimizers.optimizers[0].param_groups]
    for step in range(recipe.steps):
        end = step + (step < config.lr_scheduler.warmup_steps)  # its decay is that of the beginning of a step
        ours = recipe.schedule.multiplier(end * recipe.batch.tokens, recipe.data.tokens)
        found = [group["lr"] for group in optimizers.optimizers[0].param_groups]
        assert found == pytest.approx([ours * peak for peak in peaks], abs=1e-9), step
        optimizers.step()
        schedule.step()


def test_torchtitans_saved_file_is_imported(tiny: Recipe, tmp_path: Path) -> None:
    pytest.importorskip("torchtitan.trainer")
    recipe = tiny.replace(TITAN["qwen3"] | {"data.documents": "isolated", "hyperparameters.depth": {}})
    (tmp_path / "config.json").write_text(json.dumps(module_of(recipe, tmp_path, "titan_saved").tiny().to_dict()))
    found = from_torchtitan.read(tmp_path / "config.json", "x")
    assert_same(recipe, found.recipe)
    assert found.unread == ()


def test_torchtitan_starts_a_transferred_recipe_folded(tiny: Recipe, tmp_path: Path) -> None:
    pytest.importorskip("torchtitan.trainer")
    recipe = transferred(tiny.replace({"hyperparameters.grad_clip": 0.0, "data.documents": "isolated"}))
    assert export("torchtitan", recipe).losses == []
    torch.manual_seed(0)
    model = module_of(recipe, tmp_path, "titan_folded").tiny().model_spec.model.build()
    model.init_states()
    row = parameter_table(recipe)["layers.3.mlp.out.weight"]
    started = dict(model.named_parameters())["layers.3.feed_forward.w2.weight"]
    assert float(started.detach().std()) == pytest.approx(row.init_std * row.multiplier, rel=0.05)


@pytest.mark.parametrize("decay", [*SCHEDULES, "inverse_sqrt"])
def test_megatrons_schedule_is_the_recipes(tiny: Recipe, decay: str) -> None:
    scheduler = pytest.importorskip("megatron.core.optimizer_param_scheduler").OptimizerParamScheduler
    from tests.interop.configs.test_megatron import flags_of

    recipe = tiny.replace({"schedule.decay": decay})
    flags = flags_of(recipe)
    group = {"params": [], "max_lr": flags["lr"], "min_lr": flags["min-lr"]}
    made = scheduler(
        type("Optimizer", (), {"param_groups": [group]})(),
        init_lr=0.0,
        max_lr=flags["lr"],
        min_lr=flags["min-lr"],
        lr_warmup_steps=flags["lr-warmup-samples"],
        lr_decay_steps=flags["lr-decay-samples"],
        lr_decay_style=flags["lr-decay-style"],
        start_wd=0.1,
        end_wd=0.1,
        wd_incr_steps=10,
        wd_incr_style="constant",
        wsd_decay_steps=flags.get("lr-wsd-decay-samples"),
        lr_wsd_decay_style=flags.get("lr-wsd-decay-style"),
        use_checkpoint_opt_param_scheduler=False,
    )
    for step in range(recipe.steps + 1):
        made.num_steps = step * 8
        ours = 0.01 * recipe.schedule.multiplier(step * 256, recipe.data.tokens)
        assert made.get_lr(group) == pytest.approx(ours, rel=1e-6), step


def test_megatrons_init_is_what_is_compared_with(tiny: Recipe) -> None:
    config = pytest.importorskip("megatron.core.transformer.transformer_config").TransformerConfig
    made = config(num_layers=2, hidden_size=1024, num_attention_heads=8, init_method_std=0.1)
    tensors = [torch.empty(1024, 1024) for _ in range(3)]
    made.init_method(tensors[0])
    made.output_layer_init_method(tensors[1])
    made.embedding_init_method(tensors[2])
    stds = [float(tensor.std()) for tensor in tensors]
    assert stds == pytest.approx([0.1, 0.05, 0.1], rel=0.01)
    assert [loss.value for loss in export("megatron", tiny).losses] == ["0.1"]  # and would be 0.05


def test_what_is_lost_is_spelled_as_in_a_recipe(tiny: Recipe) -> None:
    changed = tiny.replace({"average.last": 0.5, "model.parallel_branches": True})
    lines = {loss.key: loss.text for loss in export("torchtitan", changed).losses}
    assert lines["average"].startswith("average = {last = 0.5}: would be none")
    assert lines["model.parallel_branches"].startswith("model.parallel_branches = true: would be false")


@pytest.mark.parametrize("name", TARGETS)
def test_muon_is_lost(tiny: Recipe, name: str) -> None:
    muon = {"match": "spectral", "lr": 0.02, "weight_decay": 0.3}
    with_muon = export(name, tiny.replace({"hyperparameters.optimizer": "muon", "hyperparameters.muon": muon}))
    adamw = export(name, tiny)
    lost = [loss for loss in with_muon.losses if loss not in adamw.losses]
    assert [(loss.key, loss.value) for loss in lost] == [("hyperparameters.optimizer", "muon")]
    assert "would be adamw" in lost[0].why

    def settings(files: Mapping[str, str]) -> set[str]:
        return {line.rstrip(",[] ") for text in files.values() for line in text.splitlines() if "lost" not in line}

    assert settings(adamw.files) <= settings(with_muon.files)  # no lr of Muon for AdamW
