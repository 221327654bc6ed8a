"""`leaven import config --from torchtitan`: its TOML files, and the JSON files that it saves."""

import json
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import pytest
from tests.errors import refused
from tests.interop.configs.recipes import FAMILIES, PER_MODULE, transferred
from tests.interop.configs.test_import import assert_same

from leaven.interop.configs import from_torchtitan, from_transformers
from leaven.interop.configs.compare import ResolvedRecipe
from leaven.interop.configs.per_parameter import torchtitan
from leaven.recipe.recipe import Recipe
from leaven.scaling.table import parameter_table

TOML = """
[model]
name = "llama3"
flavor = "8B"
[optimizer]
lr = 3e-4
[training]
local_batch_size = 1
seq_len = 8192
steps = 1000
dataset = "c4"
[parallelism]
tensor_parallel_degree = 2
"""


def imported(folder: Path, text: str | dict[str, Any], ranks: int | None = None, name: str = "x.toml") -> Any:
    path = folder / name
    path.write_text(text if isinstance(text, str) else json.dumps(text))
    return from_torchtitan.read(path, "x", ranks)


def saved(recipe: Recipe, fused: bool = False) -> dict[str, Any]:
    """Return what torchtitan 0.3.0 saves of the configuration that leaven exports."""
    run, shape = ResolvedRecipe(recipe), recipe.model
    values = next(torchtitan(run, shape, None)).values
    starts = values["starts"]

    def module(place: str, layer: int = 0, out_features: int = 32) -> dict[str, Any]:
        start = starts[place][layer] if isinstance(starts[place], list) else starts[place]
        function, key = ("constant_", "val") if "norm" in place else ("normal_", "std")
        weight = f"functools.partial(<function {function} at 0x7f00e2f1>, {key}={start!r})"
        base = {"param_init": {"weight": weight}, "sharding_config": {"state_shardings": {"weight": {"tp": "R"}}}}
        if "norm" in place:
            return base | {"normalized_shape": 32, "eps": shape.norm_eps, "elementwise_affine": True}
        if place == "tok_embeddings":
            return base | {"num_embeddings": shape.vocab_size, "embedding_dim": shape.d_model}
        return base | {"in_features": shape.d_model, "out_features": out_features, "bias": False}

    def block(layer: int) -> dict[str, Any]:
        separate = {"wq": "attention.qkv_linear.wq", "wkv": "attention.qkv_linear.wv"}
        qkv = {name: module(place, layer) for name, place in separate.items()}
        if fused:
            qkv = {
                "wqkv": module("attention.wo")
                | {"param_init": {"weight": "<function _fused.<locals>._init at 0x7f00>"}},
                "n_heads": shape.n_heads,
                "n_kv_heads": shape.n_kv_heads,
            }
        return {
            "moe": None,
            "attention": {
                "n_heads": shape.n_heads,
                "n_kv_heads": None if shape.n_kv_heads == shape.n_heads else shape.n_kv_heads,
                "head_dim": shape.d_head,
                "dim": shape.d_model,
                "inner_attention": {"block_size": 128, "kernel_options": {"BACKEND": "FLASH"}},
                "qkv_linear": {"head_dim": shape.d_head, **qkv},
                "wo": module("attention.wo", layer),
                "qk_norm": module("attention.q_norm", layer) if shape.qk_norm else None,
                "rope": {
                    "dim": shape.d_head,
                    "max_seq_len": 4096,
                    "theta": shape.rope_theta,
                    "scaling": "none",
                    "scaling_factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 8192,
                    "rope_factor": 1.0,
                    "beta_fast": 32.0,
                    "beta_slow": 1.0,
                    "original_seq_len": 4096,
                    "truncate": True,
                },
            },
            "feed_forward": {"param_init": None, "sharding_config": None}
            | {name: module(f"feed_forward.{name}", layer, out_features=shape.d_ff) for name in ("w1", "w2", "w3")},
            "attention_norm": module("attention_norm", layer),
            "ffn_norm": module("ffn_norm", layer),
        }

    schedule, wsd = recipe.schedule, recipe.schedule.decay == "wsd"
    ratio = run.cooldown_tokens / recipe.data.tokens if wsd else 0.0 if schedule.decay == "constant" else None
    head = "tok_embeddings" if shape.tied_embeddings else "lm_head"
    return {
        "model_spec": {
            "name": "qwen3" if shape.qk_norm else "llama3",
            "model": {
                "param_init": None,
                "dim": shape.d_model,
                "vocab_size": shape.vocab_size,
                "lm_head": module("attention.wo") | {"param_init": module(head)["param_init"]},
                "tok_embeddings": module("tok_embeddings")
                | (
                    {"param_init": {"weight": "<function skip_param_init at 0x7f00>"}}
                    if shape.tied_embeddings
                    else {}
                ),
                "norm": module("norm"),
                "enable_weight_tying": shape.tied_embeddings,
                "layers": [block(layer) for layer in range(shape.n_layers)],
            },
        },
        "optimizer": {
            "param_groups": [
                {
                    "pattern": pattern,
                    "optimizer_name": "AdamW" if run.decoupled else "Adam",
                    "optimizer_kwargs": {"lr": lr, "betas": [beta1, beta2], "eps": eps, "weight_decay": decay},
                }
                for pattern, (lr, beta1, beta2, eps, decay) in values["groups"]
            ],
            "implementation": "fused",
            "optimizer_factory_kwargs_by_name": {},
        },
        "loss": {"num_chunks": 8, "loss_fn": {"global_vocab_size": shape.vocab_size}},
        "checkpoint": {"enable": False, "initial_load_path": None, "initial_load_in_hf": False, "keep_latest_k": 10},
        "lr_scheduler": {
            "warmup_steps": run.in_steps(schedule.warmup_tokens),
            "total_steps": None,
            "decay_ratio": ratio,
            "decay_type": {"wsd": "sqrt", "constant": "linear"}.get(schedule.decay, schedule.decay),
            "min_lr_factor": schedule.min_lr_ratio,
        },
        "training": {
            "local_batch_size": run.micro_batch,
            "global_batch_size": run.sequences,
            "seq_len": shape.seq_len,
            "max_norm": recipe.hyperparameters.grad_clip.limit or float("inf"),
            "steps": run.steps,
            "dtype": "float32",
            "mixed_precision_param": "bfloat16" if recipe.precision.compute == "bf16" else "float32",
        },
        "parallelism": {"data_parallel_shard_degree": 1, "enable_sequence_parallel": True},
        "activation_checkpoint": None,
        "compile": {"enable": False},
        "debug": {"seed": recipe.data.seed, "print_config": False},
    }


PLAIN = {"data.documents": "isolated", "hyperparameters.eps": 1e-7}
ROUND_TRIPS: dict[str, dict[str, Any]] = {
    "llama": FAMILIES["llama"] | {"hyperparameters.grad_clip": 0.0, "precision.compute": "bf16"},
    "modules": {"hyperparameters.modules": PER_MODULE["hyperparameters.modules"], "model.qk_norm": False},
    "tied": {"model.tied_embeddings": True, "schedule.decay": "wsd", "data.tokens": 40 * 256},
    "adam": {"hyperparameters.optimizer": "adam", "schedule.decay": "constant"},
    "decayed": {"hyperparameters.decay_norm_and_bias": True, "schedule.decay": "linear"},
}


@pytest.mark.parametrize("name", ROUND_TRIPS)
def test_round_trip_through_the_saved_file(tiny: Recipe, tmp_path: Path, name: str) -> None:
    recipe = tiny.replace(PLAIN | ROUND_TRIPS[name])
    found = imported(tmp_path, saved(recipe))
    assert_same(recipe, found.recipe, {"schedule.min_lr_ratio"} if name == "adam" else set())
    assert found.recipe.hyperparameters.optimizer == recipe.hyperparameters.optimizer
    assert found.unread == ()


def test_parameters_that_differ_over_depth_are_said(tiny: Recipe, tmp_path: Path) -> None:
    recipe = tiny.replace(PLAIN | {"hyperparameters.depth": {"lr": [1.0, 2.0]}})
    found = imported(tmp_path, saved(recipe))
    assert found.recipe.hyperparameters.lr == 0.01
    assert any(line.startswith("lr of mlp.out, 0.01 to 0.02 over depth") for line in found.unread)


def test_gains_of_a_folded_recipe_are_said(tiny: Recipe, tmp_path: Path) -> None:
    recipe = transferred(tiny.replace(PLAIN | {"model.tied_embeddings": True}))
    unread = imported(tmp_path, saved(recipe)).unread
    assert any(line.startswith("initial values of norm.final, 0.25") for line in unread)


def test_a_fused_matrix_and_the_named_init(tiny: Recipe, tmp_path: Path) -> None:
    recipe = tiny.replace(PLAIN | {"hyperparameters.init": "depth-scaled", "hyperparameters.init_std": None})
    found = imported(tmp_path, saved(recipe, fused=True))
    assert found.recipe.hyperparameters.init == "depth-scaled"
    assert any(line.startswith("init_std of attention.query") for line in found.unknown)


def test_a_toml_file(tmp_path: Path) -> None:
    found = imported(tmp_path, TOML, ranks=16)
    recipe = found.recipe
    assert recipe.model.params == 8_030_261_248  # the published size of Llama 3 8B
    assert (recipe.batch.tokens, recipe.data.tokens) == (8 * 8192, 1000 * 8 * 8192)
    assert (recipe.layout.dp, recipe.layout.tp, recipe.layout.zero) == (8, 2, 3)
    assert (recipe.schedule.decay, recipe.schedule.min_lr_ratio) == ("linear", 0.0)
    assert recipe.schedule.warmup_tokens == 200 * recipe.batch.tokens
    rows = parameter_table(recipe)
    # torchtitan 0.2.2 decays all parameters, and draws w2, w3 and wo of block l with 0.02 / sqrt(2 (l + 1))
    assert {row.weight_decay for row in rows.rows} == {0.1}
    assert rows["layers.7.mlp.in.weight"].init_std == pytest.approx(0.02 / 4)
    assert rows["layers.7.mlp.gate.weight"].init_std == 0.02
    assert recipe.why["hyperparameters.eps"] == "torchtitan's default of optimizer.eps"
    assert [line.partition(":")[0] for line in found.unread] == ["scaled rotary positions of llama3"]
    assert any("--ranks N" in line for line in imported(tmp_path, TOML).unknown)


@pytest.mark.parametrize(("flavor", "billions"), [("0.6B", 0.596), ("4B", 4.022), ("32B", 32.762)])
def test_flavors_of_qwen3_have_the_published_sizes(tmp_path: Path, flavor: str, billions: float) -> None:
    text = TOML.replace("llama3", "qwen3").replace("8B", flavor)
    assert imported(tmp_path, text).recipe.model.params / 1e9 == pytest.approx(billions, abs=1e-3)


def test_schedules_keys_of_other_versions_and_what_is_ignored(tmp_path: Path) -> None:
    more = TOML + "[lr_scheduler]\nwarmup_steps = 100\ndecay_ratio = 0.2\ndecay_type = 'cosine'\ntotal_steps = 1200\n"
    found = imported(tmp_path, more.replace("local_batch_size", "batch_size").replace("dataset", "surprise"))
    assert (found.recipe.schedule.decay, found.recipe.schedule.decay_ratio) == ("wsd", 0.2)
    assert found.recipe.batch.micro_batch == 1
    assert "training.surprise" in found.unread
    assert sum(line.startswith("lr_scheduler.") for line in found.unread) == 2
    long = imported(tmp_path, more.replace("0.2", "0.9")).recipe  # the decay takes all that follows the warm-up
    assert long.schedule.decay == "cosine"
    sharded = imported(
        tmp_path, TOML + "fsdp_reshard_after_forward = 'never'\ndata_parallel_replicate_degree = 2\n", 8
    )
    layout = sharded.recipe.layout
    assert (layout.dp, layout.dp_replicate, layout.zero) == (4, 2, 2)
    for pp, reshard, zero in ((1, "default", 3), (2, "default", 2), (2, "always", 3), (2, "never", 2)):
        stages = f"fsdp_reshard_after_forward = '{reshard}'\npipeline_parallel_degree = {pp}\n"
        assert imported(tmp_path, TOML + stages, 16).recipe.layout.zero == zero
    newest = TOML.replace("seq_len", "max_context_length").replace(
        "steps", "num_tokens_per_train_step = 65536\nsteps"
    )
    assert imported(tmp_path, newest).recipe.batch.tokens == 65536
    twice = TOML.replace("seq_len = 8192", "seq_len = 8192\nmax_context_length = 8192")
    assert imported(tmp_path, twice).recipe.model.seq_len == 8192


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('"llama3"', '"flux"', "model.name flux: leaven reads llama3 and qwen3"),
        ('"8B"', '"9B"', "model.flavor 9B: leaven knows debugmodel, 8B, 70B, 405B;"),
        ('"8B"', '"all"', "model.flavor all"),
        ("lr = 3e-4", "lr = 'fast'", "optimizer.lr fast must be a number"),
        ("lr = 3e-4", "name = 'Muon'", "optimizer.name Muon: leaven supports only AdamW, Adam"),
        ("tensor_parallel_degree = 2", "tensor_parallel_degree = 0", "tensor_parallel_degree 0 must be at least 1"),
        ("tensor_parallel_degree", "data_parallel_shard_degree = 0\ntensor_parallel_degree", "-1 for all remaining"),
        (
            "tensor_parallel_degree",
            "fsdp_reshard_after_forward = 'some'\ntensor_parallel_degree",
            "only always, never, default",
        ),
        ("flavor", "flavour", "has no model_spec, and no name and flavor under [model]"),
        ("[model]", "[model", "cannot be read as TOML or JSON"),
        (
            "local_batch_size = 1",
            "local_batch_size = 16\nbatch_size = 4",
            "training.local_batch_size and training.batch_size have different values; remove one",
        ),
        (
            "seq_len = 8192",
            "max_context_length = 4096\nseq_len = 8192",
            "training.seq_len and training.max_context_length have different values; remove one",
        ),
    ],
)
def test_unsupported_toml_files_are_refused(tmp_path: Path, old: str, new: str, says: str) -> None:
    with refused("x.toml: ", says):
        imported(tmp_path, TOML.replace(old, new), ranks=16)


def test_files_nested_too_deeply_are_refused(tmp_path: Path) -> None:
    deep = 100_000 * "["
    with refused("x.toml: cannot be read as TOML or JSON"):
        imported(tmp_path, f'{{"model_spec": {deep}')
    (tmp_path / "config.json").write_text(deep)
    with refused("config.json: cannot be read as JSON"):
        from_transformers.read(tmp_path, "x")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("attention.wo.bias", True),
        ("attention.qkv_linear.wq.rank", 8),
        ("attention.inner_attention.window_size", [7, 7]),
        ("attention.head_dim", 4),
        ("attention.rope.scaling", "yarn"),
        ("attention_norm.eps", 0.001),
        ("ffn_norm.elementwise_affine", False),
        ("feed_forward.gate", {"in_features": 32}),
        ("feed_forward.w1.param_init.weight", "<function normal_>, mean=0.5, std=0.1"),
        ("ffn_norm.param_init.weight", "<function normal_>, mean=1.0, std=0.5"),
    ],
)
def test_every_other_value_of_a_saved_model_is_listed(tiny: Recipe, tmp_path: Path, path: str, value: Any) -> None:
    document = saved(tiny.replace(PLAIN))
    *places, key = path.split(".")
    for block in document["model_spec"]["model"]["layers"]:
        reduce(getitem, places, block)[key] = value
    line = f"model_spec.model.layers.{path} {value}"
    if "param_init" in places:
        line = f"initial values of {'mlp.gate, 0.5' if 'w1' in places else 'norm.mlp, 1 with std 0.5'}: in leaven, "
    if key == "gate":
        line = f"model_spec.model.layers.{path}.in_features 32"
    assert [each[: len(line)] for each in imported(tmp_path, document).unread] == [line]


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("loss", "loss_fn", {"label_smoothing": 0.1}),
        ("optimizer", "implementation", "fused_opt_states_bf16"),
        ("checkpoint", "initial_load_in_hf", True),
    ],
)
def test_other_values_of_harmless_keys_are_listed(
    tiny: Recipe, tmp_path: Path, section: str, key: str, value: Any
) -> None:
    document = saved(tiny.replace(PLAIN))
    document[section][key] = value
    assert [line.startswith(f"{section}.{key}") for line in imported(tmp_path, document).unread] == [True]


def test_a_window_and_the_further_options_of_adam(tiny: Recipe, tmp_path: Path) -> None:
    document = saved(tiny.replace(PLAIN | {"hyperparameters.optimizer": "adam"}))
    for block in document["model_spec"]["model"]["layers"]:
        block["attention"]["inner_attention"] = {"window_size": [7, 0]}
    for group in document["optimizer"]["param_groups"]:
        group["optimizer_kwargs"] |= {"decoupled_weight_decay": True, "amsgrad": True, "maximize": False}
    found = imported(tmp_path, document)
    assert found.recipe.model.window == 8
    assert found.recipe.hyperparameters.optimizer == "adamw"
    assert found.unread == ("param_groups.optimizer_kwargs.amsgrad True",)


@pytest.mark.parametrize(("cut", "std"), [(1.0, 0.2 * 0.5396), (6.0, 0.2)])
def test_truncated_initial_values(tiny: Recipe, tmp_path: Path, cut: float, std: float) -> None:
    document = saved(tiny.replace(PLAIN))
    for block in document["model_spec"]["model"]["layers"]:
        weight = f"functools.partial(<function trunc_normal_ at 0x7f00>, std=0.2, a={-0.2 * cut}, b={0.2 * cut})"
        block["feed_forward"]["w3"]["param_init"]["weight"] = weight
    found = imported(tmp_path, document)
    assert parameter_table(found.recipe)["layers.1.mlp.in.weight"].init_std == pytest.approx(std, rel=1e-3)
    assert [line[:9] for line in found.unread] == ["truncated"] * (cut < 3)


def test_unsupported_saved_files_are_refused(tiny: Recipe, tmp_path: Path) -> None:
    document = saved(tiny.replace(PLAIN))
    groups, model = document["optimizer"]["param_groups"], document["model_spec"]["model"]
    block = model["layers"][0]

    def fault(part: dict[str, Any], key: str, value: Any, says: str) -> None:
        before, part[key] = part[key], value
        with refused(says):
            imported(tmp_path, document)
        part[key] = before

    last = model["layers"][1]
    fault(last["attention"], "n_heads", 1, "n_heads is 2 in block 0 and 1 in block 1; in leaven all blocks")
    fault(last["feed_forward"]["w1"], "out_features", 8, "in block 0 and 8 in block 1")
    fault(document, "activation_checkpoint", "full", "must be an object or null")
    fault(groups[-1], "pattern", "nothing", "no pattern matches")
    fault(groups[-1], "optimizer_name", "Muon", "give one, AdamW or Adam")
    fault(document["training"], "max_norm", 0.0, "training.max_norm 0 makes all gradients 0")
    fault(
        block["attention"], "inner_attention", {"window_size": [7, 0]}, "window is 8 in block 0 and None in block 1"
    )
    fault(block, "moe", {"num_experts": 8}, "leaven does not import torchtitan's experts")
    fault(block["feed_forward"]["w1"], "param_init", {"weight": "<function orthogonal_>"}, "which leaven cannot read")
    fault(groups[-1], "optimizer_kwargs", {"betas": [0.9]}, "not a file of torchtitan 0.3")
    fault(groups[-1], "optimizer_kwargs", {"lr": "high"}, "must be a number")
    fault(model["norm"], "eps", "tiny", "not a file of torchtitan 0.3")
    fault(document["model_spec"], "model", {}, "not a file of torchtitan 0.3")
    fault(document["model_spec"], "name", ["x"], "model_spec.name ['x']: leaven reads llama3 and qwen3")
    with refused("--ranks 3: ", "need 1 processes"):
        imported(tmp_path, document, ranks=3)
    with refused("leaven does not run Python files; run torchtitan with --debug.save_config_file"):
        imported(tmp_path, "", name="x.py")
    with refused("no such file"):
        from_torchtitan.read(tmp_path / "nowhere.toml", "x")


def test_start_weights_and_a_module_of_settings_are_listed(tmp_path: Path) -> None:
    sections = (
        '[job]\nconfig_file = "a"\ncustom_config_module = "mine"\n[checkpoint]\ninterval = 5\ninitial_load_path = "w"'
    )
    unread = imported(tmp_path, f"{TOML}{sections}\ninitial_load_model_only = true\nkeep_latest_k = 2\n").unread
    assert [line for line in unread if line.startswith(("job", "checkpoint"))] == [
        "job.custom_config_module", "checkpoint.initial_load_path",
    ]  # fmt: skip


def test_steps_in_the_backward_pass_are_not_clipped(tmp_path: Path) -> None:
    found = imported(tmp_path, TOML.replace("[optimizer]", "[optimizer]\nearly_step_in_backward = true"))
    assert found.recipe.hyperparameters.grad_clip.limit == 0
    assert any(line.startswith("optimizer.early_step_in_backward") for line in found.unread)


def test_training_with_rare_synchronisation_is_listed(tmp_path: Path) -> None:
    section = '[fault_tolerance]\nenable = true\nsemi_sync_method = "diloco"\n[experimental]\ncustom_import = "'
    listed = {"fault_tolerance.semi_sync_method", "experimental.custom_import"}
    for name, expected in (("", {"fault_tolerance.semi_sync_method"}), ("mine", listed)):
        unread = imported(tmp_path, f'{TOML}{section}{name}"').unread
        assert {line for line in unread if line.startswith(("fault", "experimental"))} == expected
