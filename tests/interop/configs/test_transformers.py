"""Export to transformers: the model and optimizer of the folder, compared with the parameter table."""

import dataclasses
import json
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from tests.errors import refused
from tests.interop.configs.recipes import FAMILIES, MIXTURES, PER_MODULE, rows_of, transferred
from tests.interop.configs.test_import import CONFIG
from tests.interop.configs.test_import import folder as import_folder
from transformers import AutoConfig, AutoModelForCausalLM, TrainingArguments, get_scheduler

from leaven.interop.configs import from_transformers
from leaven.interop.configs.export import export, write
from leaven.recipe.recipe import Recipe
from leaven.recipe.schedule import Decay
from leaven.scaling.table import parameter_table


def written(recipe: Recipe, folder: Path) -> Path:
    write(export("transformers", recipe), folder)
    return folder


def prepare_module(folder: Path) -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(folder / "prepare.py")))


def prepared(folder: Path) -> tuple[Any, torch.optim.Optimizer]:
    """Return the model of config.json and the optimizer of prepare.py, as a user makes them."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    return model, prepare_module(folder).prepare(model, folder / "parameters.json")


@pytest.mark.parametrize("family", ["gpt2", "neox", "bloom"])
def test_the_model_has_our_parameters(tiny: Recipe, tmp_path: Path, family: str) -> None:
    recipe = tiny.replace(FAMILIES[family] | {"model.dropout": 0.0})
    model, _ = prepared(written(recipe, tmp_path / "out"))
    assert "import leaven" not in (tmp_path / "out" / "prepare.py").read_text()
    assert sum(parameter.numel() for parameter in model.parameters()) == recipe.model.params
    assert export("transformers", recipe).losses == []


@pytest.mark.parametrize("family", MIXTURES)
def test_experts_get_the_groups_and_initial_values_of_the_table(tiny: Recipe, tmp_path: Path, family: str) -> None:
    """transformers has gate and input of all experts in one parameter, whose parts have their own initial std."""
    modules = {"mlp.experts.gate": {"init_std": 3.0}, "mlp.experts.out": {"lr": 0.5}, "mlp.router": {"lr": 0.25}}
    recipe = tiny.replace(MIXTURES[family] | {"hyperparameters.modules": modules})
    model, optimizer = prepared(written(recipe, tmp_path / "out"))
    assert sum(parameter.numel() for parameter in model.parameters()) == recipe.model.params
    groups = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
    layer, table = model.model.layers[1].mlp, parameter_table(recipe)
    fused = layer.experts.gate_up_proj.detach()
    for module, parameter, owner in (
        ("mlp.experts.gate", fused[:, :32], layer.experts.gate_up_proj),
        ("mlp.experts.in", fused[:, 32:], layer.experts.gate_up_proj),
        ("mlp.experts.out", layer.experts.down_proj.detach(), layer.experts.down_proj),
        ("mlp.router", layer.gate.weight.detach(), layer.gate.weight),
    ):
        row = table[f"layers.1.{module}.weight"]
        assert parameter.shape == row.shape
        assert float(parameter.std()) == pytest.approx(row.init_std, rel=0.4), module
        assert groups[id(owner)]["lr"] == pytest.approx(row.lr)
    lost = {loss.key: loss.why for loss in export("transformers", recipe).losses}
    z_loss = {"model.experts.router_z_loss"} if family == "qwen3-moe" else set()
    assert lost.keys() == {"model.experts.balance"} | z_loss
    other = tiny.replace(MIXTURES[family] | {"hyperparameters.modules": {"mlp.experts.in": {"lr": 0.5}}})
    assert "lr of mlp.experts.in" in {loss.key for loss in export("transformers", other).losses}


@pytest.mark.parametrize("family", ["mixtral", "qwen3-moe"])
def test_the_balance_loss_of_transformers_is_ours_if_all_layers_are_alike(
    tiny: Recipe, tmp_path: Path, family: str
) -> None:
    """With an even load: coefficient x layers with experts here, and coefficient x active experts there."""
    recipe = tiny.replace(MIXTURES[family])
    model, _ = prepared(written(recipe, tmp_path / "out"))
    with torch.no_grad():
        for layer in model.model.layers:
            if hasattr(layer.mlp, "gate"):
                layer.mlp.gate.weight.zero_()
        tokens = torch.randint(0, 320, (2, 32), generator=torch.Generator().manual_seed(0))
        found = model(tokens, labels=tokens)
    experts = recipe.model.experts
    assert experts is not None
    expected = experts.balance_loss * (recipe.model.n_layers - experts.dense_layers)
    added = float(
        found.loss - torch.nn.functional.cross_entropy(found.logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    )
    assert added == pytest.approx(expected, rel=1e-4)


ADAM_LOST = (
    "would be adamw without prepare.py, which trains with torch's Adam: Trainer has no name for Adam with L2 decay"
)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("optimizer", ["adamw", "adam"])
def test_prepare_gives_the_groups_and_initial_values_of_the_table(
    tiny: Recipe, tmp_path: Path, family: str, optimizer: str
) -> None:
    """For a recipe without multipliers every number is equal."""
    wide = {"d_model": 64, "n_heads": 8, "n_kv_heads": 4, "d_ff": 128, "vocab_size": 640}
    changes = FAMILIES[family] | PER_MODULE | {f"model.{key}": size for key, size in wide.items()}
    recipe = tiny.replace(changes | {"hyperparameters.optimizer": optimizer})
    model, found = prepared(written(recipe, tmp_path / "out"))
    assert type(found) is (torch.optim.AdamW if optimizer == "adamw" else torch.optim.Adam)
    groups = {id(parameter): group for group in found.param_groups for parameter in group["params"]}
    for name, (row,) in rows_of(recipe, family).items():
        parameter = model.get_parameter(name)
        group = groups[id(parameter)]
        ours = (row.lr, row.weight_decay, row.beta1, row.beta2, row.eps)
        theirs = (group["lr"], group["weight_decay"], *group["betas"], group["eps"])
        assert theirs == pytest.approx(ours, rel=1e-11), row.name
        assert parameter.shape == row.shape
        assert float(parameter.detach().std(unbiased=False)) == pytest.approx(row.init_std, rel=0.1), row.name
        assert float(parameter.detach().mean()) == pytest.approx(row.init_mean, abs=0.3 * row.init_std + 1e-9)
    losses = [(loss.key, loss.why) for loss in export("transformers", recipe).losses]
    if optimizer == "adamw":
        assert losses == []
    else:  # training_args.json cannot name it
        assert losses == [("hyperparameters.optimizer", ADAM_LOST)]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_multipliers_are_folded_into_start_lr_eps_and_decay(tiny: Recipe, tmp_path: Path, family: str) -> None:
    recipe = transferred(tiny.replace(FAMILIES[family] | {"hyperparameters.grad_clip": 0.0, "model.dropout": 0.0}))
    table, exported = parameter_table(recipe), export("transformers", recipe)
    assert exported.losses == []
    out = table["layers.3.attention.out.weight"]
    assert out.multiplier == pytest.approx(1 / 3)
    key = {"llama": "model.layers.3.self_attn.o_proj.weight", "gpt2": "transformer.h.3.attn.c_proj.weight"}[family]
    found = json.loads(exported.files["parameters.json"])["parameters"][key]
    assert found["lr"] == pytest.approx(out.lr / 3)
    assert found["eps"] == pytest.approx(out.eps * 3)
    assert found["init_std"] == pytest.approx(out.init_std / 3)
    assert found["weight_decay"] * found["lr"] == pytest.approx(out.lr * out.weight_decay)
    clipped = export("transformers", recipe.replace({"hyperparameters.grad_clip": 1.0}))
    assert [loss.key for loss in clipped.losses] == ["hyperparameters.grad_clip"]
    model, _ = prepared(written(recipe, tmp_path / "out"))
    assert sum(parameter.numel() for parameter in model.parameters()) == recipe.model.params


def test_gains_of_gemma_are_stored_minus_1_and_its_embedding_over_sqrt_d_model(tiny: Recipe, tmp_path: Path) -> None:
    """The tied embedding also computes the logits, so the final norm is multiplied by sqrt(d_model) = 8."""
    gemma = {"model.activation": "geglu", "model.qk_norm": False, "model.tied_embeddings": True}
    recipe = transferred(tiny.replace(gemma | {"hyperparameters.grad_clip": 0.0}))
    table, exported = parameter_table(recipe), export("transformers", recipe)
    assert exported.losses == []
    found = json.loads(exported.files["parameters.json"])["parameters"]
    embedding, theirs = table["embedding.weight"], found["model.embed_tokens.weight"]
    assert theirs["init_std"] == pytest.approx(embedding.init_std / 8)
    assert (theirs["lr"], theirs["eps"]) == pytest.approx((embedding.lr / 8, embedding.eps * 8))
    assert found["model.layers.1.input_layernorm.weight"]["init_mean"] == 0
    final = found["model.norm.weight"]
    assert final["init_mean"] == pytest.approx(8 * embedding.multiplier - 1)
    assert final["lr"] == pytest.approx(8 * embedding.multiplier * table["norm.final.weight"].lr)
    model, _ = prepared(written(recipe, tmp_path / "out"))
    assert type(model).__name__ == "GemmaForCausalLM"
    decayed = export("transformers", recipe.replace({"hyperparameters.decay_norm_and_bias": True}))
    assert "hyperparameters.decay_norm_and_bias" in {loss.key for loss in decayed.losses}


def test_parts_of_a_fused_tensor_keep_their_std_and_lose_their_lr(tiny: Recipe, tmp_path: Path) -> None:
    """GPT-2 and NeoX fuse query, key and value, one by blocks, the other by head."""
    query = {"hyperparameters.modules": {"attention.query": {"init_std": 20.0, "lr": 2.0}}}
    for family in ("gpt2", "neox"):
        recipe = tiny.replace(FAMILIES[family] | query | {"model.dropout": 0.0})
        assert [loss.key for loss in export("transformers", recipe).losses] == [
            "lr of attention.key, attention.value"
        ]
        model, _ = prepared(written(recipe, tmp_path / family))
        if family == "gpt2":
            parts = model.transformer.h[0].attn.c_attn.weight.T.reshape(3, 16, 16)
        else:
            weight = model.gpt_neox.layers[0].attention.query_key_value.weight
            parts = weight.reshape(2, 3, 8, 16).transpose(0, 1).reshape(3, 16, 16)
        stds = [float(part.std().detach()) for part in parts]
        assert stds == pytest.approx([2.0, 0.1, 0.1], rel=0.2)


WARMUP = 1_000  # tokens: no whole number of steps
SCHEDULES: dict[str, dict[str, Any]] = {
    "cosine": {},
    "linear": {"schedule.decay": "linear"},
    "linear to 0": {"schedule.decay": "linear", "schedule.min_lr_ratio": 0.0},
    "wsd": {"schedule.decay": "wsd", "schedule.min_lr_ratio": 0.0},
    "inverse_sqrt": {"schedule.decay": "inverse_sqrt"},
    "constant": {"schedule.decay": "constant", "precision.compute": "bf16", "layout.recompute": "full"},
}


PARTS: list[dict[str, float]] = [
    {},
    {"min_lr_ratio": 0.0},
    {"warmup_tokens": WARMUP, "decay_ratio": 0.37},
    {"warmup_tokens": WARMUP, "min_lr_ratio": 0.6},
    {"decay_ratio": 1.0},
    {"warmup_tokens": 0},
]


@pytest.mark.long
@pytest.mark.parametrize(
    ("decay", "more"),
    [(decay, more) for decay in get_args(Decay) for more in (PARTS[:-1] if decay == "inverse_sqrt" else PARTS)],
)
def test_the_schedule_of_prepare_is_the_recipes(
    tiny: Recipe, tmp_path: Path, decay: str, more: dict[str, float]
) -> None:
    """To the last bit, also on resuming, and with a warm-up and a run that are no whole number of steps."""
    changes: dict[str, Any] = {f"schedule.{key}": value for key, value in more.items()}
    recipe = tiny.replace(changes | {"schedule.decay": decay, "data.tokens": tiny.data.tokens - WARMUP})
    exported, folder = export("transformers", recipe), tmp_path / "out"
    assert not any(loss.key.startswith("schedule") for loss in exported.losses)
    assert not any("warmup_tokens" in note for note in exported.notes)
    write(exported, folder)
    module = prepare_module(folder)

    def started() -> tuple[torch.optim.Optimizer, Any]:
        groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for lr in (3.0, 0.5)]
        optimizer = torch.optim.AdamW(groups, lr=1.0)
        return optimizer, module.schedule(optimizer, folder / "parameters.json")

    optimizer, schedule = started()
    for step in range(recipe.steps):
        ours = recipe.schedule.multiplier((step + 1) * recipe.batch.tokens, recipe.data.tokens)
        assert [group["lr"] for group in optimizer.param_groups] == [3 * ours, ours / 2]
        optimizer.step()
        if step == recipe.steps // 2:
            states = optimizer.state_dict(), schedule.state_dict()
            optimizer, schedule = started()
            optimizer.load_state_dict(states[0])
            schedule.load_state_dict(states[1])
        schedule.step()


@pytest.mark.parametrize("name", SCHEDULES)
def test_training_arguments_have_the_closest_schedule_of_transformers(tiny: Recipe, name: str) -> None:
    recipe = tiny.replace(PER_MODULE | SCHEDULES[name])
    arguments = json.loads(export("transformers", recipe).files["training_args.json"])
    assert arguments.keys() <= {field.name for field in dataclasses.fields(TrainingArguments)}
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    groups = [{"params": [parameters[0]], "lr": 3.0}, {"params": [parameters[1]], "lr": 0.5}]
    optimizer = torch.optim.AdamW(groups, lr=arguments["learning_rate"])
    name_and_steps = arguments["lr_scheduler_type"], optimizer, arguments["warmup_steps"], arguments["max_steps"]
    scheduler = get_scheduler(*name_and_steps, arguments.get("lr_scheduler_kwargs") or {})
    late = 0 if name == "cosine" else 1  # leaven uses the lr of the end of a step
    for step in range(arguments["max_steps"]):
        tokens = (step + 1 - late) * recipe.batch.tokens
        ours = recipe.schedule.multiplier(tokens, recipe.data.tokens)
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([3 * ours, ours / 2], abs=1e-7)
        optimizer.step()
        scheduler.step()


def test_biases_that_an_architecture_always_has_are_a_loss(tiny: Recipe) -> None:
    """They can be zero in a checkpoint, but training changes them."""
    exported = export("transformers", tiny.replace(FAMILIES["gpt2"] | {"model.bias": False, "model.dropout": 0.0}))
    assert json.loads(exported.files["config.json"])["architectures"] == ["GPT2LMHeadModel"]
    assert [loss.key for loss in exported.losses] == ["model.bias"]


@pytest.mark.parametrize(("balance", "said"), [("bias", "none"), ("both", "loss")])
def test_biases_of_experts_are_lost_where_an_architecture_has_none(tiny: Recipe, balance: str, said: str) -> None:
    exported = export("transformers", tiny.replace(MIXTURES["mixtral"] | {"model.experts.balance": balance}))
    whys = [loss.why for loss in exported.losses if loss.key == "model.experts.balance"]
    assert whys[0].startswith(f'would be "{said}"')
    assert len(whys) == (2 if said == "loss" else 1)
    config = json.loads(exported.files["config.json"])
    assert ("router_aux_loss_coef" in config and config.get("output_router_logits", False)) is (said == "loss")


@pytest.mark.parametrize(
    ("kind", "options", "unread"),
    [
        ("linear", {}, False),
        ("cosine", {"num_cycles": 0.5}, False),
        ("cosine", {"num_cycles": 1.0}, None),
        ("cosine_with_min_lr", {"min_lr": 2e-4}, False),
        ("cosine_with_min_lr", {"min_lr_rate": 0.3, "num_cycles": 1.0}, None),
        ("cosine_warmup_with_min_lr", {"min_lr_rate": 0.3}, False),
        ("cosine_warmup_with_min_lr", {"min_lr_rate": 0.3, "warmup_lr_rate": 0.5}, True),
        ("polynomial", {"lr_end": 1e-4}, False),
        ("polynomial", {"power": 2.0}, None),
        ("inverse_sqrt", {"timescale": 10}, False),
        ("inverse_sqrt", {"timescale": 50}, True),
        ("constant", {}, False),
        ("constant_with_warmup", {}, False),
        ("warmup_stable_decay", {"num_decay_steps": 20, "decay_type": "1-sqrt"}, False),
        ("warmup_stable_decay", {"num_decay_steps": 20, "decay_type": "1-sqrt", "num_stable_steps": 70}, False),
        ("warmup_stable_decay", {"num_decay_steps": 20, "decay_type": "1-sqrt", "num_stable_steps": 40}, True),
        ("warmup_stable_decay", {"num_decay_steps": 20, "decay_type": "1-sqrt", "warmup_type": "cosine"}, None),
        ("warmup_stable_decay", {"num_decay_steps": 20}, None),
        ("warmup_stable_decay", {"decay_type": "1-sqrt"}, None),
    ],
)
def test_an_imported_schedule_is_that_of_transformers_or_says_what_differs(
    tmp_path: Path, kind: str, options: dict[str, Any], unread: bool | None
) -> None:
    """``unread``: whether something is listed as ignored; None: the schedule is refused."""
    arguments = {"max_steps": 100, "learning_rate": 1e-3, "warmup_steps": 10, "lr_scheduler_type": kind}
    where = import_folder(tmp_path, CONFIG, arguments | {"lr_scheduler_kwargs": options})
    if unread is None:
        with refused("lr_scheduler_kwargs."):
            from_transformers.read(where, "x")
        return
    found = from_transformers.read(where, "x")
    assert bool(found.unread) == unread
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-3)
    scheduler = get_scheduler(kind, optimizer, 10, 100, options)
    schedule, tokens = found.recipe.schedule, found.recipe.data.tokens
    differences = []
    for step in range(100):
        lr = optimizer.param_groups[0]["lr"] / 1e-3
        # transformers' is that of the beginning of a step or, with cosine_warmup_with_min_lr, of its end
        ours = [schedule.multiplier(at * tokens // 100, tokens) for at in (step, step + 1)]
        differences.append(min(abs(lr - each) for each in ours))
        optimizer.step()
        scheduler.step()
    assert (max(differences) < 1e-3) == (not unread)
