"""The module for Megatron-LM, on stand-ins with the names and interfaces of its source, and on megatron-core.

Names and interfaces are those of commit d98e8a6. `make test-targets` installs megatron-core 0.16.1.
"""

import fnmatch
import json
import os
import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from tests.errors import refused
from tests.interop.configs.recipes import FAMILIES, transferred
from torch import nn

from leaven.interop.configs.export import export, write
from leaven.model.transformer import Transformer
from leaven.recipe.recipe import Recipe
from leaven.recipe.shape import ModelShape
from leaven.scaling.table import ParameterRow, folding, parameter_table

WIDE = {"model.d_model": 64, "model.n_heads": 4, "model.n_kv_heads": 2, "model.d_head": 16, "model.d_ff": 128}
# Parts of a fused matrix with different initial values, and blocks with different lr and eps
PARTS = {
    "hyperparameters.grad_clip": 0.0,
    "hyperparameters.modules": {
        "attention.key": {"init_std": 0.5},
        "attention.value": {"init_std": 2.0},
        "mlp.gate": {"init_std": 3.0},
        "attention.out": {"init_std": 0.2, "weight_decay": 2.0, "eps": 10.0},
        "embedding": {"lr": 4.0, "beta2": 2.0},
    },
    "hyperparameters.depth": {"lr": [1.0, 1.5], "init_std": [1.0, 0.5]},
    "schedule.min_lr_ratio": 0.1,
}
CONFIG = SimpleNamespace(lr=0.02, min_lr=0.002)
OURS = {
    "embedding.word_embeddings": "embedding",
    "embedding.position_embeddings": "positions",
    "input_layernorm": "norm.attention",
    "pre_mlp_layernorm": "norm.mlp",
    "self_attention.q_layernorm": "norm.query",
    "self_attention.k_layernorm": "norm.key",
    "self_attention.linear_proj": "attention.out",
    "mlp.linear_fc2": "mlp.out",
    "decoder.final_layernorm": "norm.final",
    "output_layer": "unembedding",
}


def exported(recipe: Recipe, folder: Path) -> Any:
    """Return the exported module."""
    assert export("megatron-module", recipe).losses == []
    write(export("megatron-module", recipe), folder)
    return SimpleNamespace(**runpy.run_path(str(folder / "leaven_table.py")))


# Stand-ins for Megatron-LM ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ParamPredicate:
    name: str
    fn: Any = field(compare=False, hash=False)

    def __call__(self, parameter: nn.Parameter) -> bool:
        return bool(self.fn(parameter))


@dataclass(frozen=True)
class ParamKey:
    name: str = ""
    predicate: Any = ()

    def matches(self, parameter: nn.Parameter, name: str) -> bool:
        return fnmatch.fnmatch(name, self.name) or (bool(self.predicate) and self.predicate(parameter))


@pytest.fixture
def megatron(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Install stand-ins of the modules that leaven_table imports. ``made`` has the arguments of the optimizer."""
    made: dict[str, Any] = {}
    rank = SimpleNamespace(value=0)

    def get_megatron_optimizer(config: Any, model_chunks: Any, config_overrides: Any = None, **options: Any) -> str:
        made.update(config=config, chunks=model_chunks, overrides=config_overrides, options=options)
        return "optimizer"

    contents = {
        "megatron": {},
        "megatron.core": {},
        "megatron.core.optimizer": {},
        "megatron.core.optimizer.optimizer_config": {"ParamKey": ParamKey, "ParamPredicate": ParamPredicate},
        "megatron.core.parallel_state": {"get_tensor_model_parallel_rank": lambda: rank.value},
        "megatron.bridge": {},
        "megatron.bridge.training": {},
        "megatron.bridge.training.config": {"OptimizerConfigOverrideProvider": object},
        "megatron.training": {},
        "megatron.training.training": {"get_megatron_optimizer": get_megatron_optimizer},
    }
    for name, members in contents.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, module)
    training = sys.modules["megatron.training.training"]
    return SimpleNamespace(made=made, rank=rank, training=training)


def tensors(
    recipe: Recipe, layers: Sequence[int], *, engine: bool, tp: int, last: bool
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the parameters of :func:`gpt` on one tensor-parallel rank."""
    shape = recipe.model
    width, attention, gates = shape.d_model, shape.n_heads * shape.d_head, 2 if shape.activation == "swiglu" else 1
    matrices = {
        "self_attention.linear_qkv": (attention + 2 * shape.n_kv_heads * shape.d_head, width),
        "self_attention.linear_proj": (width, attention),
        "mlp.linear_fc1": (gates * shape.d_ff, width),
        "mlp.linear_fc2": (width, shape.d_ff),
    }
    norms = ("input_layernorm.", "pre_mlp_layernorm.")
    if engine:
        norms = ("self_attention.linear_qkv.layer_norm_", "mlp.linear_fc1.layer_norm_")
    kinds = ("weight", "bias") if shape.norm == "layernorm" else ("weight",)
    block: dict[str, tuple[int, ...]] = {f"{norm}{kind}": (width,) for norm in norms for kind in kinds}
    block |= {f"self_attention.{side}_layernorm.weight": (shape.d_head,) for side in "qk" if shape.qk_norm}
    for name, (rows, columns) in matrices.items():
        split = (rows, columns // tp) if name.endswith(("proj", "fc2")) else (rows // tp, columns)
        block[f"{name}.weight"] = split
        if shape.has_bias(
            "attention.query" if name.endswith("qkv") else "attention.out" if "proj" in name else "mlp"
        ):
            block[f"{name}.bias"] = split[:1]
    vocabulary = (shape.vocab_size // tp, width)
    found: dict[str, tuple[int, ...]] = {"embedding.word_embeddings.weight": vocabulary} if 0 in layers else {}
    if 0 in layers and shape.positions == "learned":
        found["embedding.position_embeddings.weight"] = (shape.seq_len, width)
    for local in range(len(layers)):
        found |= {f"decoder.layers.{local}.{name}": size for name, size in block.items()}
    if last:
        found |= {f"decoder.final_layernorm.{kind}": (width,) for kind in kinds}
        if not shape.tied_embeddings or 0 not in layers:
            found["output_layer.weight"] = vocabulary
    return found


def gpt(recipe: Recipe, layers: Sequence[int], *, engine: bool = False, tp: int = 1, last: bool = True) -> nn.Module:
    """Return a module with the names, shapes and attributes of a GPTModel that has these blocks of the model.

    ``engine``: with the names of Transformer Engine, whose matrices contain the norm before them; the last stage of a
    pipeline has no embedding, the others have no output layer.
    """
    model = nn.Module()
    for name, size in tensors(recipe, layers, engine=engine, tp=tp, last=last).items():
        *path, leaf = name.split(".")
        module = model
        for key in path:
            if key not in module._modules:
                module.add_module(key, nn.Module())
            module = module.get_submodule(key)
        parameter = nn.Parameter(torch.full(size, 7.0))
        if tp > 1 and len(size) == 2:
            parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
        module.register_parameter(leaf, parameter)
    for local, layer in enumerate(layers):
        model.get_submodule(f"decoder.layers.{local}").layer_number = layer + 1  # type: ignore[assignment]
    wrapper = nn.Module()  # as DistributedDataParallel wraps Float16Module
    wrapper.module = nn.Module()
    wrapper.module.module = model
    return wrapper


def settings_of(model: nn.Module, overrides: dict[Any, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the override that Megatron would give each parameter, by its local name. No two may match."""
    found = {}
    for name, parameter in model.named_parameters():
        matching = [override for key, override in overrides.items() if key.matches(parameter, name)]
        assert len(matching) == 1, name
        found[name.removeprefix("module.module.")] = matching[0]
    return found


def parts(recipe: Recipe, name: str, tensor: torch.Tensor, tp: int = 1) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters of the recipe that a tensor of Megatron consists of, with their values there."""
    shape, (path, _, kind) = recipe.model, name.rpartition(".")
    block, inner = "", path
    if path.startswith("decoder.layers."):
        _, _, layer, inner = path.split(".", 3)
        block = f"layers.{layer}."
    if inner == "self_attention.linear_qkv":  # for each group of heads: its queries, its key, its value
        queries = shape.n_heads // shape.n_kv_heads * shape.d_head
        groups = tensor.view(shape.n_kv_heads // tp, queries + 2 * shape.d_head, -1)
        yield f"{block}attention.query.{kind}", groups[:, :queries]
        yield f"{block}attention.key.{kind}", groups[:, queries : queries + shape.d_head]
        yield f"{block}attention.value.{kind}", groups[:, queries + shape.d_head :]
    elif inner == "mlp.linear_fc1" and shape.activation == "swiglu":
        yield f"{block}mlp.gate.{kind}", tensor[: len(tensor) // 2]
        yield f"{block}mlp.in.{kind}", tensor[len(tensor) // 2 :]
    elif inner == "mlp.linear_fc1":
        yield f"{block}mlp.in.{kind}", tensor
    else:
        yield f"{block}{OURS[inner]}.{kind}", tensor


def assert_parameter(recipe: Recipe, row: ParameterRow, override: dict[str, Any], values: torch.Tensor) -> None:
    """Assert that a parameter has the settings and the initial values of its row, with the multiplier folded in."""
    factor = folding(recipe.model, parameter_table(recipe)).get(row.name, 1.0)
    assert override["max_lr"] == pytest.approx(row.lr * factor), row.name
    assert override["min_lr"] == pytest.approx(0.1 * row.lr * factor), row.name
    assert override["start_wd"] * override["wd_mult"] == pytest.approx(row.weight_decay / factor), row.name
    assert override["end_wd"] == override["start_wd"]
    assert override["betas"] == pytest.approx((row.beta1, row.beta2)), row.name
    assert override["eps"] == pytest.approx(row.eps / factor), row.name
    assert float(values.std(unbiased=False)) == pytest.approx(row.init_std * factor, rel=0.1), row.name
    assert float(values.mean()) == pytest.approx(row.init_mean * factor, abs=row.init_std * factor / 4), row.name


SHAPES: dict[str, dict[str, Any]] = {
    "qwen3": PARTS,
    "llama": FAMILIES["llama"] | PARTS,
    "qwen2": FAMILIES["llama"] | PARTS | {"model.attention_bias": "qkv"},
    "tied": PARTS | {"model.tied_embeddings": True},
    "gpt2": FAMILIES["gpt2"]
    | {"model.n_kv_heads": 4, "hyperparameters.grad_clip": 0.0, "schedule.min_lr_ratio": 0.1},
}


@pytest.mark.long
@pytest.mark.parametrize("engine", [False, True])
@pytest.mark.parametrize("kind", [*SHAPES, "transferred"])
def test_every_parameter_has_the_values_of_the_table(
    tiny: Recipe, tmp_path: Path, megatron: Any, kind: str, engine: bool
) -> None:
    recipe = transferred(tiny.replace(PARTS)) if kind == "transferred" else tiny.replace(WIDE | SHAPES[kind])
    table, model = parameter_table(recipe), gpt(recipe, range(recipe.model.n_layers), engine=engine)
    module = exported(recipe, tmp_path / "out")
    overrides = settings_of(model, module.prepare(CONFIG, [model]))
    covered = set()
    for name, parameter in model.named_parameters():
        local = name.removeprefix("module.module.")
        plain = local.replace("self_attention.linear_qkv.layer_norm_", "input_layernorm.")
        plain = plain.replace("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")
        for ours, values in parts(recipe, plain, parameter.detach()):
            assert_parameter(recipe, table[ours], overrides[local], values)
            covered.add(ours)
    assert covered == {row.name for row in table.rows}


def test_pipeline_stages_know_their_layers_and_number_groups_alike(
    tiny: Recipe, tmp_path: Path, megatron: Any
) -> None:
    recipe = tiny.replace(WIDE | PARTS | {"model.n_layers": 4, "model.tied_embeddings": True})
    module, table = exported(recipe, tmp_path / "out"), parameter_table(recipe)
    first, last = gpt(recipe, [0, 1], last=False), gpt(recipe, [2, 3])
    stages = [settings_of(stage, module.prepare(CONFIG, [stage])) for stage in (first, last)]
    for layer in range(4):
        override = stages[layer // 2][f"decoder.layers.{layer % 2}.mlp.linear_fc2.weight"]
        assert override["max_lr"] == pytest.approx(table[f"layers.{layer}.mlp.out.weight"].lr)
    # The stages of a tied model have one embedding.
    embedding = first.module.module.embedding.word_embeddings.weight
    assert torch.equal(embedding, last.module.module.output_layer.weight)
    assert stages[0]["embedding.word_embeddings.weight"] == stages[1]["output_layer.weight"]
    # A resumed run finds a group by its numbers, wherever it is.
    numbered: dict[float, set[tuple[Any, ...]]] = {}
    for override in (each for stage in stages for each in stage.values()):
        numbered.setdefault(override["lr_mult"], set()).add(tuple(sorted(override.items())))
    assert all(len(each) == 1 for each in numbered.values())
    # A model of two chunks on one process, as interleaved stages are
    whole = module.prepare(CONFIG, [gpt(recipe, [0, 1], last=False), gpt(recipe, [2, 3])])
    assert len(whole) == len(numbered)


def test_tensor_parallel_ranks_have_their_rows_and_own_values(tiny: Recipe, tmp_path: Path, megatron: Any) -> None:
    recipe = tiny.replace(WIDE | PARTS | {"layout.tp": 2})
    module, table = exported(recipe, tmp_path / "out"), parameter_table(recipe)
    ranks = []
    for megatron.rank.value in range(2):
        model = gpt(recipe, range(2), tp=2)
        module.prepare(CONFIG, [model])
        block = model.module.module.decoder.layers.get_submodule("1")
        for fused in ("self_attention.linear_qkv", "mlp.linear_fc1"):
            tensor = block.get_submodule(fused).weight.detach()
            for ours, values in parts(recipe, f"decoder.layers.1.{fused}.weight", tensor, tp=2):
                assert float(values.std()) == pytest.approx(table[ours].init_std, rel=0.1), ours
        ranks.append(block.mlp.linear_fc2.weight)
    assert not torch.equal(*ranks)


def test_install_gives_the_overrides_to_megatrons_optimizer(tiny: Recipe, tmp_path: Path, megatron: Any) -> None:
    recipe = tiny.replace(WIDE | PARTS)
    module, model = exported(recipe, tmp_path / "out"), gpt(recipe, range(2))
    module.install()
    call = megatron.training.get_megatron_optimizer
    assert call(CONFIG, [model], config_overrides={"theirs": {}}, use_gloo_process_groups=True) == "optimizer"
    assert megatron.made["options"] == {"use_gloo_process_groups": True}
    assert "theirs" not in megatron.made["overrides"]  # its rules would contradict the table's
    settings_of(model, megatron.made["overrides"])
    # Megatron logs the lr of the group of --lr.
    logged = [override for override in megatron.made["overrides"].values() if override["default_config"]]
    assert len(logged) == 1


def test_megatron_bridge_gets_the_same_overrides(tiny: Recipe, tmp_path: Path, megatron: Any) -> None:
    """Its provider is called with a context, whose model may be one chunk or a list of them."""
    recipe = tiny.replace(WIDE | PARTS)
    module, model = exported(recipe, tmp_path / "out"), gpt(recipe, range(2))
    expected = settings_of(model, module.prepare(CONFIG, [model]))
    for context in (SimpleNamespace(optimizer_config=CONFIG, model=each) for each in (model, [model])):
        assert settings_of(model, module.bridge_provider().build_config_overrides(context)) == expected


def test_without_a_final_lr_it_is_0_and_without_an_lr_nothing_is_made(
    tiny: Recipe, tmp_path: Path, megatron: Any
) -> None:
    """Both are None in an OptimizerConfig by default."""
    recipe = tiny.replace(WIDE | PARTS)
    module, model = exported(recipe, tmp_path / "out"), gpt(recipe, range(2))
    overrides = module.prepare(SimpleNamespace(lr=0.02, min_lr=None), [model])
    assert {each["min_lr"] for each in overrides.values()} == {0.0}
    with pytest.raises(ValueError, match="the optimizer has no lr; set its lr to the value of --lr in args.sh"):
        module.prepare(SimpleNamespace(lr=None, min_lr=None), [model])


def test_other_models_and_sharded_parameters_are_refused(tiny: Recipe, tmp_path: Path, megatron: Any) -> None:
    recipe = tiny.replace(WIDE | PARTS)
    module = exported(recipe, tmp_path / "out")
    other = gpt(recipe.replace({"model.n_layers": 3}), range(3))
    with pytest.raises(ValueError, match="another model: it has no values for decoder.layers.2.input_layernorm"):
        module.prepare(CONFIG, [other])
    odd = gpt(recipe, range(2))
    odd.module.module.decoder.layers.get_submodule("0").self_attention.linear_qkv.weight = nn.Parameter(
        torch.zeros(100, 64)
    )
    with pytest.raises(ValueError, match="100 rows cannot be split into groups of 64 rows; the table belongs"):
        module.prepare(CONFIG, [odd])

    class Quantised(torch.Tensor):
        pass

    odd.module.module.embedding.word_embeddings.weight = nn.Parameter(torch.zeros(512, 64).as_subclass(Quantised))
    with pytest.raises(ValueError, match="needs whole, plain tensors"):
        module.prepare(CONFIG, [odd])
    with refused("layout.zero = 3 selects Megatron-FSDP", "use --set layout.zero=1"):
        export("megatron-module", recipe.replace({"layout.dp": 2, "layout.zero": 3}))


def test_what_the_module_cannot_set_is_a_loss(tiny: Recipe) -> None:
    changes: dict[str, Any] = {
        "hyperparameters.modules": {"attention.key": {"lr": 2.0}, "mlp.in": {"eps": 2.0}},
        "hyperparameters.optimizer": "adam",
    }
    keys = {loss.key for loss in export("megatron-module", tiny.replace(changes)).losses}
    assert keys == {"lr of attention.key", "eps of mlp.in", "hyperparameters.optimizer"}
    biased = tiny.replace({"model.attention_bias": "all"})
    assert [loss.key for loss in export("megatron-module", biased).losses] == ["model.attention_bias"]
    flags = export("megatron-module", tiny).files["args.sh"]
    assert "--swiglu" in flags
    assert "--use-mup" not in flags


# megatron-core itself -----------------------------------------------------------------------------------------------


@pytest.fixture
def core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """megatron-core, with its process groups of a single process."""
    core = pytest.importorskip("megatron.core")
    # On a processor: where it computes rotary positions, and its random numbers of dropout
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    monkeypatch.setattr(core.tensor_parallel, "get_cuda_rng_tracker", lambda: SimpleNamespace(fork=nullcontext))
    for key, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setitem(os.environ, key, value)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    core.parallel_state.initialize_model_parallel()
    yield core
    core.parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


def gpt_of_core(shape: ModelShape) -> nn.Module:
    """Return megatron-core's model of a Qwen3."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=shape.n_layers,
        hidden_size=shape.d_model,
        ffn_hidden_size=shape.d_ff,
        num_attention_heads=shape.n_heads,
        num_query_groups=shape.n_kv_heads,
        kv_channels=shape.d_head,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_eps,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        qk_layernorm=True,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    return GPTModel(
        config,
        get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=True),
        vocab_size=shape.vocab_size,
        max_sequence_length=shape.seq_len,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )


def settings(parameter: nn.Parameter, row: ParameterRow) -> dict[str, Any]:
    """Return the group of one parameter for torch's AdamW."""
    betas = (row.beta1, row.beta2)
    return {"params": [parameter], "lr": row.lr, "betas": betas, "eps": row.eps, "weight_decay": row.weight_decay}


def test_megatron_core_trains_its_own_model(tiny: Recipe, tmp_path: Path, core: Any) -> None:
    """Its GPTModel has these names, its groups have the settings of the table, and it trains like leaven's model."""
    from megatron.core import optimizer as optimizing
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    recipe = transferred(tiny.replace(PARTS))
    module, table, shape = exported(recipe, tmp_path / "out"), parameter_table(recipe), recipe.model
    factors, state, model = folding(shape, table), {}, gpt_of_core(recipe.model)
    adam = optimizing.OptimizerConfig(optimizer="adam", lr=0.01, min_lr=0.001, weight_decay=0.5)
    groups = optimizing._get_param_groups([model], adam, module.prepare(adam, [model]))
    identity = [tuple(map(group.get, core.optimizer.optimizer.param_group_identifier_keys)) for group in groups]
    assert len(set(identity)) == len(groups)  # a resumed run finds every group
    warmup = {"init_lr": 0.0, "max_lr": 0.01, "min_lr": 0.001, "lr_warmup_steps": 10, "lr_decay_steps": 100}
    decay = {"start_wd": 0.5, "end_wd": 0.5, "wd_incr_steps": 10, "wd_incr_style": "constant"}
    scheduler = OptimizerParamScheduler(
        SimpleNamespace(param_groups=groups), lr_decay_style="linear", **warmup, **decay
    )
    scheduler.step(55)  # halfway through the decay to 0.1 of the peak
    group_of = {id(parameter): group for group in groups for parameter in group["params"]}
    for name, parameter in model.named_parameters():
        group = group_of[id(parameter)]
        for ours, values in parts(recipe, name, parameter.detach()):
            row, factor = table[ours], factors.get(ours, 1.0)
            found = (group["lr"], group["weight_decay"], *group["betas"], group["eps"])
            expected = (0.55 * row.lr * factor, row.weight_decay / factor, row.beta1, row.beta2, row.eps / factor)
            assert found == pytest.approx(expected), ours
            state[ours] = values.reshape(row.shape) / factor
    names = json.loads((tmp_path / "out" / "parameters.json").read_text())["parameters"].keys()
    assert names == dict(model.named_parameters()).keys()

    # Both train on the same tokens, Megatron's model folded and leaven's with multipliers.
    mine = Transformer(shape, table.multipliers, table.attention_scale)
    mine.load_state_dict(state)
    rows = [(parameter, table[name]) for name, parameter in mine.named_parameters()]
    optimizers = [torch.optim.AdamW(groups), torch.optim.AdamW([settings(*each) for each in rows])]
    mask = torch.ones(1, 1, shape.seq_len, shape.seq_len, dtype=torch.bool).triu(1)
    for step in range(8):
        tokens = torch.randint(shape.vocab_size, (4, shape.seq_len), generator=torch.Generator().manual_seed(step))
        logits = [model(tokens, torch.arange(shape.seq_len).expand(4, -1), mask), mine(tokens)]
        losses = [nn.functional.cross_entropy(each[:, :-1].mT, tokens[:, 1:]) for each in logits]
        assert float(losses[0]) == pytest.approx(float(losses[1]), rel=1e-6 if step == 0 else 1e-5), step
        for optimizer, loss in zip(optimizers, losses, strict=True):
            optimizer.zero_grad()
            loss.backward()
        scheduler.step(5)
        share = groups[0]["lr"] / groups[0]["max_lr"]
        for group, (_, row) in zip(optimizers[1].param_groups, rows, strict=True):
            group["lr"] = share * row.lr
        for optimizer in optimizers:
            optimizer.step()
