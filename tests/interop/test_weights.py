"""Weights in Hugging Face's format, compared with ``transformers``: logits equal to 1e-5, or 1e-10 in float64."""

import json
import math
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.errors import refused
from tests.interop.families import built
from tokenizers import Tokenizer, models, processors
from torch import Tensor, nn

from leaven.data.tokens import prepare
from leaven.distributed.pieces import Piece, cut, piece_of
from leaven.errors import InputError
from leaven.interop.architectures import ARCHITECTURES, Architecture
from leaven.interop.configs import from_transformers
from leaven.interop.configs.draft import Draft
from leaven.interop.huggingface_config import read_config, shape_of
from leaven.interop.weights import (
    SHARD_BYTES,
    ends_caution,
    not_exported,
    read_huggingface,
    recipe_from,
    require_start,
    router_biases,
    start_cautions,
    start_from,
    tensors_fingerprint,
    weights_fingerprint,
    write_huggingface,
    zeros_caution,
)
from leaven.model.experts import MixtureOfExperts
from leaven.model.transformer import Transformer
from leaven.recipe.data import Data
from leaven.recipe.recipe import Recipe
from leaven.scaling.table import parameter_table
from leaven.scaling.transfer import transfer

GPT = {"norm": "layernorm", "activation": "gelu", "n_kv_heads": 2, "qk_norm": False}
BLOOM = GPT | {"positions": "alibi", "embedding_norm": True, "d_ff": 64}
GEMMA = {"activation": "geglu", "qk_norm": False, "d_attention": 32, "d_head": 16}
GEMMA2 = {
    "norm_placement": "sandwich",
    "window": 7,
    "global_every": 2,
    "attention_softcap": 5.0,
    "logit_softcap": 3.0,
}
COMMAND_R = {"norm": "layernorm", "parallel_branches": True, "rope_theta": 300.0}
EXPERTS = {"number": 6, "active": 2, "d_expert": 24}
DEEPSEEK = EXPERTS | {"shared": 2, "dense_layers": 1, "router": "sigmoid", "balance": "bias", "weight_scale": 2.5}
OUT: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2ForCausalLM", {"qk_norm": False, "attention_bias": "qkv"}),
    "olmo 2": ("Olmo2ForCausalLM", {"norm_placement": "output", "qk_norm_whole": True, "n_kv_heads": 2}),
    "mistral": ("MistralForCausalLM", {"qk_norm": False, "window": 7}),
    "llama, grouped": ("LlamaForCausalLM", {"qk_norm": False, "rope_theta": 300.0}),
    "llama, tied, biases": ("LlamaForCausalLM", {"qk_norm": False, "tied_embeddings": True, "bias": True}),
    "qwen3, grouped": ("Qwen3ForCausalLM", {"norm_eps": 1e-3}),
    "qwen3, wide heads": ("Qwen3ForCausalLM", {"d_attention": 32, "d_head": 16}),
    "gpt2": ("GPT2LMHeadModel", GPT | {"positions": "learned", "bias": True, "tied_embeddings": True}),
    "gpt2, untied, without biases": ("GPT2LMHeadModel", GPT | {"positions": "learned", "activation": "relu"}),
    "gpt-neox": ("GPTNeoXForCausalLM", GPT | {"bias": True, "norm_eps": 1e-4, "rope_theta": 300.0}),
    "gpt-neox, partial rotary": ("GPTNeoXForCausalLM", GPT | {"bias": True, "rotary_fraction": 0.5}),
    "phi": ("PhiForCausalLM", GPT | {"bias": True, "parallel_branches": True, "rotary_fraction": 0.5}),
    "phi, tied, without biases": ("PhiForCausalLM", GPT | {"parallel_branches": True, "tied_embeddings": True}),
    "bloom": ("BloomForCausalLM", BLOOM | {"bias": True, "tied_embeddings": True, "norm_eps": 1e-3}),
    "phi 3": ("Phi3ForCausalLM", {"qk_norm": False, "rotary_fraction": 0.5, "window": 7}),
    "gemma": ("GemmaForCausalLM", GEMMA | {"tied_embeddings": True}),
    "gemma 2": ("Gemma2ForCausalLM", GEMMA | GEMMA2 | {"tied_embeddings": True}),
    "gemma 2, untied, no windows or caps": ("Gemma2ForCausalLM", GEMMA | {"norm_placement": "sandwich"}),
    "command r": ("CohereForCausalLM", COMMAND_R | {"qk_norm": False, "tied_embeddings": True}),
    "command r, untied, norms, biases": (
        "CohereForCausalLM",
        COMMAND_R | {"qk_norm": True, "qk_norm_per_head": True, "attention_bias": "all"},
    ),
    "mixtral": ("MixtralForCausalLM", {"qk_norm": False, "window": 7, "d_ff": 24, "experts": EXPERTS}),
    "qwen3 moe": ("Qwen3MoeForCausalLM", {"experts": EXPERTS | {"dense_layers": 1, "normalise": False}}),
    "olmoe": ("OlmoeForCausalLM", {"qk_norm_whole": True, "n_kv_heads": 2, "d_ff": 24, "experts": EXPERTS}),
    "glm4 moe": ("Glm4MoeForCausalLM", {"rotary_fraction": 0.5, "attention_bias": "qkv", "experts": DEEPSEEK}),
    "glm4 moe, without query norms": ("Glm4MoeForCausalLM", {"qk_norm": False, "experts": DEEPSEEK | {"shared": 1}}),
}


def start(model: Transformer, recipe: Recipe, folder: Path) -> None:
    """Load the weights of a folder into a model."""
    pieces = [piece_of(name, parameter) for name, parameter in model.named_parameters()]
    start_from(pieces, recipe.model, parameter_table(recipe), folder)
    if recipe.model.experts and recipe.model.experts.balance == "bias":
        set_biases(model, router_biases(recipe.model, folder))


def set_biases(model: Transformer, bias_LE: Tensor) -> None:
    for block, bias_E in zip(model.layers, bias_LE, strict=True):
        if isinstance(block.mlp, MixtureOfExperts):
            block.mlp.bias_E = bias_E


def biases_of(model: Transformer) -> Tensor | None:
    """Return the biases of the routers, (layers, experts), or None if no router has any."""
    found = [getattr(block.mlp, "bias_E", None) for block in model.layers]
    some = next((bias_E for bias_E in found if bias_E is not None), None)
    if some is None:
        return None
    return torch.stack([torch.zeros_like(some) if bias_E is None else bias_E for bias_E in found])


def scaled(tiny: Recipe, shape: dict[str, Any], rule: str = "complete-d-p") -> Recipe:
    """Return a recipe at four times the width and three times the depth of its base, with larger heads."""
    changes = {f"model.{key}": value for key, value in shape.items()}
    stated = tiny.replace(changes | {"scaling.rule": rule, "hyperparameters.residual": 0.7})
    return transfer(stated, width=64, depth=6, d_head=2 * stated.model.d_head)


def random_model(recipe: Recipe) -> Transformer:
    """Return a model with random parameters, including gains and biases, so that a missing one is noticed."""
    table = parameter_table(recipe)
    model = Transformer(recipe.model, table.multipliers, table.attention_scale)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        nn.init.normal_(parameter, 0.0, 0.3, generator=generator)
    experts = recipe.model.experts
    if experts and experts.balance == "bias":
        set_biases(model, torch.randn(recipe.model.n_layers, experts.number, generator=generator))
    return model.eval()


def token_ids(vocab_size: int = 320) -> Tensor:
    return torch.randint(0, vocab_size, (2, 32), generator=torch.Generator().manual_seed(2))


@torch.no_grad()
def assert_same_function(ours: Any, theirs: Any, atol: float = 1e-5) -> None:
    left, right = (out if isinstance(out, Tensor) else out.logits for out in (ours(token_ids()), theirs(token_ids())))
    assert left.std() > 0.05
    torch.testing.assert_close(left, right, rtol=0, atol=atol)


@pytest.fixture(scope="module")
def tokenizer_file(corpus: Path, cache: Path) -> Path:
    return prepare(Data(source=f"{corpus}/*.txt", tokens=1), 320).tokenizer_path


def export(folder: Path, recipe: Recipe, model: Transformer, tokenizer: Path, **how: Any) -> Path:
    write_huggingface(
        folder,
        recipe.model,
        parameter_table(recipe),
        model.state_dict(),
        tokenizer=tokenizer.read_text(),
        end_of_text=("<|endoftext|>", 0),
        router_bias_LE=biases_of(model),
        **how,
    )
    return folder


# completep also has a multiplier of the logits, for a tied and an untied readout, and a norm with and without a bias.
QUICK = ("qwen3, grouped", "gpt2", "gemma 2", "glm4 moe")
RULES: list[Any] = [(name, "complete-d-p") for name in OUT]
RULES += [pytest.param(name, "completep", marks=[pytest.mark.slow] * (name not in QUICK)) for name in OUT]


@pytest.mark.long
@pytest.mark.parametrize(("case", "rule"), RULES)
def test_exported_weights_give_the_same_logits_there_and_back(
    tiny: Recipe, tmp_path: Path, tokenizer_file: Path, case: str, rule: str
) -> None:
    theirs, shape = OUT[case]
    recipe = scaled(tiny, shape, rule)
    model = random_model(recipe)
    assert model.has_multipliers
    size = SHARD_BYTES if rule == "complete-d-p" else 40_000
    folder = export(tmp_path / "out", recipe, model, tokenizer_file, shard_bytes=size)
    assert (folder / "model.safetensors").exists() is (rule == "complete-d-p")
    loaded, problems = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert type(loaded).__name__ == theirs
    assert not any(problems.values())  # missing, unexpected or mismatched tensors
    assert loaded.dtype == torch.float32
    assert getattr(loaded.config, "max_position_embeddings", 32) == 32  # BLOOM has no such limit
    assert_same_function(model, loaded)

    plain = read_huggingface(folder)
    mine = recipe.model.model_copy(update={"rope_theta": 10_000.0} if recipe.model.positions != "rope" else {})
    always_biased = theirs.startswith(("GPT", "Bloom", "PhiFor"))
    assert plain.shape == mine.model_copy(update={"bias": True} if always_biased else {})
    back = recipe.replace({"model": plain.shape.model_dump(), "scaling.base": None, "hyperparameters.residual": 1.0})
    again = Transformer(back.model)
    start(again, back, folder)
    assert_same_function(again, model)
    if not always_biased:  # under the rule whose multipliers were folded
        unfolded = random_model(recipe).requires_grad_(False)
        for parameter in unfolded.parameters():
            parameter.zero_()
        start(unfolded, recipe, folder)
        for name, parameter in model.named_parameters():
            # a gain near 0 has fewer digits as 1 + weight
            atol = 1e-6 if theirs.startswith("Gemma") and "norm" in name else 0
            torch.testing.assert_close(unfolded.get_parameter(name), parameter.data, rtol=1e-6, atol=atol)


@pytest.mark.parametrize(
    "name", ["mixtral", "qwen3 moe", "olmoe", "glm4 moe", "phi 3", "command r, untied, norms, biases", "gemma 2"]
)
def test_tensors_come_back_bit_for_bit(tiny: Recipe, tmp_path: Path, tokenizer_file: Path, name: str) -> None:
    """Without a rule nothing is multiplied, except by sqrt(d_model) = 4 in Gemma. All gains are near 1.

    Biases of routers stay in fp32 when weights are written in bf16.
    """
    recipe = tiny.replace({f"model.{key}": value for key, value in OUT[name][1].items()} | {"scaling.base": None})
    model = random_model(recipe)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if ".norm." in parameter_name or parameter_name.startswith("norm."):
                parameter.copy_(1 + parameter / 4)
    assert not model.has_multipliers
    again = random_model(recipe).requires_grad_(False)
    for parameter in again.parameters():
        parameter.zero_()
    start(again, recipe, export(tmp_path / "fp32", recipe, model, tokenizer_file))
    for parameter_name, parameter in model.named_parameters():
        assert torch.equal(again.get_parameter(parameter_name), parameter), parameter_name
    lower = export(tmp_path / "bf16", recipe, model, tokenizer_file, dtype="bf16")
    if (biases := biases_of(model)) is not None:
        assert torch.equal(router_biases(recipe.model, lower), biases)
        loaded = transformers.AutoModelForCausalLM.from_pretrained(lower)
        assert torch.equal(loaded.model.layers[1].mlp.gate.e_score_correction_bias, biases[1])


def test_each_process_reads_the_rows_of_its_own_experts(tiny: Recipe, tmp_path: Path, tokenizer_file: Path) -> None:
    """With expert parallelism a process has some of the experts; ZeRO 3 may leave it a part of each or none."""
    recipe = tiny.replace({"model.experts": EXPERTS, "model.qk_norm_whole": True})
    model, name = random_model(recipe), "layers.1.mlp.experts.in.weight"
    whole = model.get_parameter(name).data
    folder = export(tmp_path / "out", recipe, model, tokenizer_file)
    for begin, shape in (((2, 0, 0), (2, 24, 16)), ((4, 12, 0), (2, 6, 16)), ((6, 0, 0), (0, 24, 16))):
        piece = Piece(name, torch.zeros(shape), tuple(whole.shape), begin)
        start_from([piece], recipe.model, parameter_table(recipe), folder)
        assert torch.equal(piece.local, cut(whole, begin, shape))


def test_a_weight_that_the_dtype_cannot_hold_is_refused(tiny: Recipe, tmp_path: Path, tokenizer_file: Path) -> None:
    model = random_model(tiny)
    with torch.no_grad():
        model.embedding.weight[3, 3] = 1e6
    with refused("model.embed_tokens.weight: not every weight is finite in fp16; use another dtype"):
        export(tmp_path / "out", tiny, model, tokenizer_file, dtype="fp16")
    assert not (tmp_path / "out").exists()
    export(tmp_path / "out", tiny, model, tokenizer_file, dtype="bf16")


def test_a_bias_on_the_logits_is_refused(tmp_path: Path) -> None:
    foreign("phi", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.bias"][3] = 0.5
    save_file(tensors, tmp_path / "model.safetensors")
    with refused("lm_head.bias is not 0, and leaven's models have no bias on the logits"):
        read_huggingface(tmp_path)


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path, tokenizer_file: Path) -> None:
    change(tmp_path, "glm4 moe", num_nextn_predict_layers=1)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {"model.layers.3.eh_proj.weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    plain = read_huggingface(tmp_path)
    assert plain.shape.n_layers == 3
    shutil.copy(tokenizer_file, tmp_path / "tokenizer.json")
    for found in (recipe_from(plain, "x", source="tiny-shakespeare"), from_transformers.read(tmp_path, "x")):
        assert "layers for multi-token prediction: leaven has none" in found.unread
    save_file(tensors | {"model.layers.4.eh_proj.weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match=r"contains model\.layers\.4\.eh_proj"):
        read_huggingface(tmp_path)


def test_a_start_from_weights_reads_config_json_as_an_import_does(tmp_path: Path, tokenizer_file: Path) -> None:
    shutil.copy(tokenizer_file, tmp_path / "tokenizer.json")
    stated: dict[str, Any] = {"attention_dropout": 0.3, "output_router_logits": True, "router_aux_loss_coef": 0.5}
    for router_logits in (True, False):
        change(tmp_path, "mixtral", **stated | {"output_router_logits": router_logits})
        adopted = recipe_from(read_huggingface(tmp_path), "x", source="tiny-shakespeare")
        imported = from_transformers.read(tmp_path, "x")
        assert adopted.recipe.model == imported.recipe.model
        assert [line.partition(":")[0] for line in adopted.unread] == ["attention_dropout"]
        assert set(adopted.unread) < set(imported.unread)
        assert set(adopted.unknown) < set(imported.unknown)
        assert bool(adopted.unknown) is not router_logits


def test_a_run_needs_the_routers_of_its_start_weights(tiny: Recipe, tmp_path: Path, tokenizer_file: Path) -> None:
    """What only training uses, and the size of an MLP that no layer has, may differ."""
    recipe = tiny.replace({"model.experts": DEEPSEEK | {"dense_layers": 0}})
    folder = export(tmp_path / "out", recipe, random_model(recipe), tokenizer_file)
    free = {"model.experts.bias_step": 0.1, "model.experts.router_z_loss": 0.1, "model.d_ff": 48}
    require_start(recipe.replace(free).model, folder)
    for changes, says in (
        ({"model.experts.balance": "loss"}, "has experts.balance bias, [model] has loss"),
        ({"model.experts.active": 3}, "has experts.active 2, [model] has 3"),
        ({"model.experts": None}, "has experts.number 6, [model] has None"),
    ):
        with refused(says):
            require_start(recipe.replace(changes).model, folder)


@pytest.mark.parametrize(
    ("shape", "says"),
    [
        ({"experts": EXPERTS | {"balance": "bias"}}, 'Qwen3MoeForCausalLM, set [model] experts.balance = "loss"'),
        ({"experts": EXPERTS | {"shared": 1}}, "Qwen3MoeForCausalLM, set [model] experts.shared = 0"),
        ({"norm_placement": "output"}, "Olmo2ForCausalLM, set [model] qk_norm_whole = true"),
        ({"parallel_branches": True}, 'CohereForCausalLM, set [model] norm = "layernorm", qk_norm_per_head = true'),
        ({"norm_placement": "sandwich"}, 'Gemma2ForCausalLM, set [model] activation = "geglu", qk_norm = false'),
        ({"activation": "squared_relu"}, 'Qwen3ForCausalLM, set [model] activation = "swiglu"'),
        (BLOOM | {"d_ff": 32}, "BloomForCausalLM, set [model] d_ff = 64"),
        ({"logit_softcap": 30.0, "embedding_norm": True}, "embedding_norm = false and remove logit_softcap"),
    ],
)
def test_shapes_without_an_architecture_name_the_nearest_and_its_keys(
    tiny: Recipe, tmp_path: Path, tokenizer_file: Path, shape: dict[str, Any], says: str
) -> None:
    recipe = tiny.replace({"model.qk_norm": True} | {f"model.{key}": value for key, value in shape.items()})
    with refused(says):
        export(tmp_path / "out", recipe, random_model(recipe), tokenizer_file)
    assert not list(tmp_path.iterdir())


GEMMA_2B = {"hidden_size": 2_048, "intermediate_size": 16_384, "num_hidden_layers": 18}
GEMMA_2B |= {"num_attention_heads": 8, "num_key_value_heads": 1}


@pytest.mark.parametrize(
    ("name", "config", "params"),
    [
        ("GemmaForCausalLM", GEMMA_2B, 2_506_172_416),
        ("Gemma2ForCausalLM", {}, 2_614_341_888),
        ("Phi3ForCausalLM", {"sliding_window": 2_047}, 3_821_079_552),
        ("CohereForCausalLM", {}, 34_980_831_232),
    ],
)
def test_published_configs_have_the_published_sizes(name: str, config: dict[str, Any], params: int) -> None:
    """Gemma 2B, Gemma 2 2B, Phi-3 mini 4k and Command R; all other keys are the defaults of transformers."""
    (architecture,) = (each for each in ARCHITECTURES if each.name == name)
    assert shape_of(architecture, config).params == params


def test_transformers_reads_the_tokenizer_and_generates(tiny: Recipe, tmp_path: Path, tokenizer_file: Path) -> None:
    recipe = scaled(tiny, {"qk_norm": False})
    folder = export(tmp_path / "out", recipe, random_model(recipe), tokenizer_file, dtype="bf16")
    theirs, ours = transformers.AutoTokenizer.from_pretrained(folder), Tokenizer.from_file(str(tokenizer_file))
    text = "def function_1(x):\n    return x * 1 + é"
    assert theirs(text).input_ids == ours.encode(text).ids
    assert theirs.decode(theirs(text).input_ids) == text
    assert (theirs.eos_token_id, theirs.model_max_length) == (0, 32)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.bfloat16
    assert (model.generation_config.eos_token_id, model.generation_config.pad_token_id) == (0, 0)
    assert model.generate(**theirs(text, return_tensors="pt"), max_new_tokens=3).shape[1] > len(ours.encode(text).ids)


COMMON = {"vocab_size": 320, "hidden_size": 48, "num_attention_heads": 6, "num_hidden_layers": 3}
LLAMA = COMMON | {"num_key_value_heads": 2, "intermediate_size": 80, "max_position_embeddings": 32}
GPT2 = {"vocab_size": 320, "n_embd": 48, "n_head": 6, "n_layer": 3, "n_positions": 32}
GPT2 |= {"bos_token_id": 0, "eos_token_id": 0}
ROPE = {"rope_type": "default", "rope_theta": 700.0}
PHI3 = {"pad_token_id": 0, "rope_parameters": ROPE | {"partial_rotary_factor": 0.5}}
NEOX = COMMON | {"max_position_embeddings": 32, "intermediate_size": 80, "hidden_act": "gelu_new"}
IN: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", LLAMA | {"rms_norm_eps": 1e-3, "rope_parameters": ROPE}),
    "llama, tied": ("LlamaForCausalLM", LLAMA | {"tie_word_embeddings": True}),
    "llama, biases": ("LlamaForCausalLM", LLAMA | {"attention_bias": True, "mlp_bias": True}),
    "qwen3": ("Qwen3ForCausalLM", LLAMA | {"head_dim": 8, "rope_parameters": ROPE}),
    "phi 3": ("Phi3ForCausalLM", LLAMA | PHI3),
    "gemma, untied": ("GemmaForCausalLM", LLAMA | {"head_dim": 8, "tie_word_embeddings": False}),
    "gemma 2": ("Gemma2ForCausalLM", LLAMA | {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 5}),
    "gemma 2, every third layer global": (
        "Gemma2ForCausalLM",
        LLAMA
        | {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 5, "attn_logit_softcapping": None}
        | {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"]},
    ),
    "command r": ("CohereForCausalLM", LLAMA | {"logit_scale": 0.25}),
    "command r, untied, norms, biases": (
        "CohereForCausalLM",
        LLAMA | {"use_qk_norm": True, "attention_bias": True, "tie_word_embeddings": False, "logit_scale": 0.5},
    ),
    "mistral": ("MistralForCausalLM", LLAMA | {"rope_parameters": ROPE, "sliding_window": None}),
    "mistral, long window": ("MistralForCausalLM", LLAMA | {"sliding_window": 32}),
    "mistral, short window": ("MistralForCausalLM", LLAMA | {"sliding_window": 5}),
    "gpt2": ("GPT2LMHeadModel", GPT2),
    "gpt2, untied, wide": ("GPT2LMHeadModel", GPT2 | {"n_inner": 80, "tie_word_embeddings": False}),
    "bloom": (
        "BloomForCausalLM",
        {"vocab_size": 320, "hidden_size": 48, "n_head": 6, "n_layer": 3, "seq_length": 32},
    ),
    "gpt-neox": (
        "GPTNeoXForCausalLM",
        NEOX | {"use_parallel_residual": False, "rope_parameters": ROPE | {"partial_rotary_factor": 1.0}},
    ),
    "gpt-neox, partial rotary": (
        "GPTNeoXForCausalLM",
        NEOX | {"use_parallel_residual": False, "rope_parameters": ROPE | {"partial_rotary_factor": 0.5}},
    ),
    "phi": (
        "PhiForCausalLM",
        LLAMA | {"rope_parameters": ROPE | {"partial_rotary_factor": 0.5}, "tie_word_embeddings": False},
    ),
    "mixtral": ("MixtralForCausalLM", LLAMA | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3 moe": (
        "Qwen3MoeForCausalLM",
        LLAMA
        | {"head_dim": 8, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
        | {"mlp_only_layers": [0], "norm_topk_prob": True},
    ),
    "olmoe": ("OlmoeForCausalLM", LLAMA | {"num_experts": 6, "num_experts_per_tok": 3, "pad_token_id": 0}),
    "glm4 moe": (
        "Glm4MoeForCausalLM",
        LLAMA
        | {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "use_qk_norm": True}
        | {"attention_bias": True, "routed_scaling_factor": 2.5, "n_shared_experts": 2},
    ),
}


def foreign(name: str, folder: Path, tokenizer: Path | None = None, **how: Any) -> Any:
    """Save a random model of transformers, and return it."""
    class_name, config = IN[name]
    model: Any = built(class_name, **config)
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        nn.init.normal_(parameter, 0.0, 0.3, generator=generator)
    for buffer_name, buffer in model.named_buffers():
        if buffer_name.endswith("e_score_correction_bias"):
            nn.init.normal_(buffer, 0.0, 0.3, generator=generator)
    if class_name == "PhiForCausalLM":
        model.lm_head.bias.data.zero_()
    model.eval().save_pretrained(folder, **how)
    if tokenizer:
        (folder / "tokenizer.json").write_bytes(tokenizer.read_bytes())
    return model


@pytest.fixture
def no_single_precision(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Replace float32 by float64: transformers computes norms and softmaxes in float32 whatever the model's dtype."""
    for name in ("float32", "float"):
        monkeypatch.setattr(torch, name, torch.float64)
    monkeypatch.setattr(Tensor, "float", Tensor.double)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(default)


@pytest.mark.long
@pytest.mark.usefixtures("no_single_precision")
@pytest.mark.parametrize("name", IN)
def test_weights_of_transformers_give_the_same_logits_in_float64(tiny: Recipe, tmp_path: Path, name: str) -> None:
    """Without a rule, and under a rule whose multipliers are divided out."""
    theirs = foreign(name, tmp_path, max_shard_size="50KB")
    theirs.set_experts_implementation("eager")  # the grouped kernel has no float64
    for module in theirs.modules():
        if hasattr(module, "gelu_impl"):
            module.gelu_impl = nn.GELU(approximate="tanh")  # theirs has sqrt(2 / pi) in eight digits
    assert (tmp_path / "model.safetensors.index.json").exists()
    shape = read_huggingface(tmp_path).shape
    smaller = {"width": 24, "depth": 2, "batch_tokens": 256, "tokens": 10_240, "d_head": shape.d_head // 2}
    smaller["d_ff"] = 80
    for base in (None, smaller):
        recipe = tiny.replace({"model": shape.model_dump(), "scaling.base": base, "scaling.rule": "completep"})
        model = random_model(recipe)
        assert model.has_multipliers is (base is not None)
        start(model, recipe, tmp_path)
        assert_same_function(model, theirs, atol=1e-10)


@pytest.mark.parametrize("left_out", [None, "embd_pdrop", "attn_pdrop", "resid_pdrop"])
def test_dropout_acts_in_the_same_places_as_in_gpt2(tiny: Recipe, tmp_path: Path, left_out: str | None) -> None:
    """The same seed draws the same masks in the same order, so training logits are equal; without one of the three
    rates they are not."""
    foreign("gpt2", tmp_path)
    shape = read_huggingface(tmp_path).shape
    assert shape.dropout == 0.1
    model = Transformer(shape)
    start(model, tiny.replace({"model": shape.model_dump(), "scaling.base": None}), tmp_path)
    changed = {left_out: 0.0} if left_out else {}
    theirs = transformers.GPT2LMHeadModel.from_pretrained(tmp_path, **changed).train()
    torch.manual_seed(7)
    expected = theirs(token_ids()).logits
    torch.manual_seed(7)
    found = model.train()(token_ids())
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-4) is (left_out is None)


def test_checkpoints_of_older_versions_are_read(tiny: Recipe, tmp_path: Path) -> None:
    """GPT-2 on the Hub has no head and contains masks; old configs have old rope keys and lack defaults."""
    theirs = foreign("gpt2", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    bare["h.0.attn.bias"] = torch.ones(1, 1, 32, 32)
    save_file(bare, tmp_path / "model.safetensors")
    recipe = tiny.replace({"model": read_huggingface(tmp_path).shape.model_dump()})
    model = random_model(recipe)
    start(model, recipe, tmp_path)
    assert_same_function(model, theirs)

    config = change(tmp_path / "llama", "llama", rope_parameters=None, rope_theta=500.0, num_key_value_heads=6)
    config.pop("head_dim", None)
    (tmp_path / "llama" / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=r"k_proj.weight is \(16, 48\), not the \(48, 48\) of config.json"):
        read_huggingface(tmp_path / "llama")
    (tmp_path / "llama" / "config.json").write_text(json.dumps(config | {"num_key_value_heads": 2}))
    assert read_huggingface(tmp_path / "llama").shape.rope_theta == 500.0


def change(folder: Path, name: str, **changes: Any) -> dict[str, Any]:
    """Save a model of transformers with changed values in its config.json, and return the config."""
    foreign(name, folder)
    config: dict[str, Any] = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    return config


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("llama", {"is_causal": False}, "is_causal = false: leaven supports LlamaForCausalLM only with true"),
        (
            "mistral, short window",
            {"layer_types": ["sliding_attention", "full_attention", "full_attention"]},
            "leaven supports MistralForCausalLM only with a sliding window in all layers",
        ),
        ("llama", {"tie_word_embeddings": True}, "model.embed_tokens.weight and lm_head.weight differ, but config"),
        ("llama", {"architectures": ["FalconForCausalLM"]}, "FalconForCausalLM is not supported; leaven reads Llama"),
        ("mistral", {"sliding_window": False}, "sliding_window = False must be a count above 0"),
        (
            "llama",
            {"attention_bias": True},
            "attention_bias = True, mlp_bias = False: leaven has only one value, bias,",
        ),
        ("llama", {"head_dim": 16}, "q_proj.weight is (48, 48), not the (96, 48) of config.json"),
        ("llama", {"num_hidden_layers": 4}, "model.layers.3.input_layernorm.weight is missing"),
        ("llama", {"num_hidden_layers": 2}, "contains model.layers.2."),
        ("gpt2", {"activation_function": "gelu"}, "gelu_new, gelu_pytorch_tanh, relu, relu2"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx = true"),
        ("llama", {"architectures": ["Gemma3ForCausalLM"]}, "Gemma3ForCausalLM has rotary positions with two thetas"),
        ("gemma 2", {"query_pre_attn_scalar": 9}, "query_pre_attn_scalar = 9: leaven divides"),
        (
            "gemma 2",
            {"layer_types": ["full_attention", "full_attention", "sliding_attention"]},
            "or in all but every n-th",
        ),
        ("qwen3 moe", {"decoder_sparse_step": 2}, "decoder_sparse_step = 2"),
        ("qwen3 moe", {"num_local_experts": 5}, "mlp.gate.weight is (6, 48), not the (5, 48) of config.json"),
        ("glm4 moe", {"n_group": 2}, "n_group = 2"),
        ("qwen3 moe", {"mlp_only_layers": [1]}, "mlp_only_layers = [1]: leaven supports layers without"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv = 8.0: leaven supports OlmoeForCausalLM only with null"),
        ("glm4 moe", {"num_experts_per_tok": 7}, "active 7 is more than number 6"),
        # values of the wrong type
        ("llama", {"num_attention_heads": 0, "head_dim": None}, "num_attention_heads = 0 must be a count above 0"),
        ("llama", {"hidden_act": ["silu"]}, "hidden_act = ['silu'] must be a word"),
        ("llama", {"rope_parameters": {"rope_theta": "abc"}}, "rope_theta = 'abc' must be a finite number"),
        ("llama", {"architectures": [5]}, "architectures = [5] must be a list of names"),
        (
            "llama",
            {"architectures": None, "model_type": None},
            "config.json: has neither architectures nor model_type",
        ),
        ("llama", {"architectures": {}}, "architectures = {} must be a list of names"),
        ("llama", {"model_type": []}, "model_type = [] must be a word"),
        ("llama", {"rms_norm_eps": 1e308}, "norm_eps: input should be less than or equal to 1"),
        (
            "mixtral",
            {"router_jitter_noise": 0.1},
            "router_jitter_noise = 0.1: leaven supports MixtralForCausalLM only with 0.0",
        ),
        (
            "llama",
            {"model_type": "mistral"},
            "LlamaForCausalLM, whose model_type is llama, but model_type is mistral; correct",
        ),
        (
            "gemma 2",
            {"num_hidden_layers": 2_000_000_000, "layer_types": None},
            "2,000,000,000 layers; leaven supports at most",
        ),
        # old and new spelling together: transformers uses the old one
        ("llama", {"rope_parameters": ROPE, "rope_scaling": {"type": "linear", "factor": 4.0}}, "rope_type 'linear'"),
        ("llama", {"rope_scaling": ROPE | {"partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5"),
    ],
)
def test_unsupported_configs_are_refused(tmp_path: Path, name: str, changes: dict[str, Any], says: str) -> None:
    change(tmp_path, name, **changes)
    with refused(says, str(tmp_path)):
        read_huggingface(tmp_path)


# Keys that change neither the model nor its training, and those that `_balance_loss` and `further_tokens` read
OTHER_KEYS = {
    "bos_token_id", "eos_token_id", "pad_token_id", "use_cache", "pretraining_tp", "slow_but_exact",
    "reorder_and_upcast_attn", "summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels",
    "summary_first_dropout", "classifier_dropout", "is_decoder", "original_max_position_embeddings",
    "embd_pdrop",  # of Phi 3, which does not use it
    "sliding_window", "max_window_layers",  # with use_sliding_window only, which is refused
    "output_router_logits", "router_aux_loss_coef", "num_nextn_predict_layers",
}  # fmt: skip


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda each: each.name)
def test_the_keys_of_transformers_are_known(architecture: Architecture) -> None:
    theirs = transformers.CONFIG_MAPPING[architecture.model_type]
    pairs = {frozenset(pair) for pair in theirs.attribute_map.items()}
    more = {frozenset(("n_embed", "hidden_size"))} if architecture.model_type == "bloom" else set()
    assert {frozenset(pair) for pair in architecture.aliases.items()} == pairs | more
    known = {key for several in architecture.keys.values() for key in several} | architecture.required.keys()
    known |= {*architecture.absent, *architecture.aliases, architecture.logit_scale, "initializer_range"}
    known |= OTHER_KEYS | {"rope_parameters", "layer_types"} | transformers.PreTrainedConfig().to_dict().keys()
    assert sorted(theirs().to_dict().keys() - known) == []


@pytest.mark.parametrize(("name", "key", "value"), [
    (architecture.name, alias, architecture.defaults[key] * 2)
    for architecture in ARCHITECTURES
    for alias, key in architecture.aliases.items()
    if key in architecture.defaults
])  # fmt: skip
def test_other_names_of_keys_are_read(tmp_path: Path, name: str, key: str, value: int) -> None:
    (architecture,) = (each for each in ARCHITECTURES if each.name == name)
    current, plain = architecture.aliases[key], {"head_dim": 128}
    shape = shape_of(architecture, plain | {current: value})
    assert shape != shape_of(architecture, plain)
    assert shape_of(architecture, plain | {key: value}) == shape
    assert shape_of(architecture, plain | {key: value, current: value}) == shape
    with refused(f"{key} = {value} and {current} = {value + 1} mean the same; remove one"):
        shape_of(architecture, plain | {key: value, current: value + 1})
    (tmp_path / "config.json").write_text(json.dumps(plain | {"model_type": architecture.model_type, key: value}))
    draft = Draft("x")
    draft.set_architecture(read_config(tmp_path / "config.json"), "config.json")
    assert f"{key} of config.json" in draft.why.values()


def test_a_nan_is_not_two_values_of_one_key() -> None:
    with refused("vocab_size = nan"):
        shape_of(ARCHITECTURES[0], {"vocab_size": math.nan})


def test_both_spellings_of_rope_theta_are_read_as_transformers_does(tmp_path: Path) -> None:
    for folder, scaling in (("theta", ROPE | {"rope_theta": 90.0}), ("none", {"rope_type": "default"})):
        change(tmp_path / folder, "llama", rope_parameters=ROPE, rope_scaling=scaling)
        theirs = transformers.AutoConfig.from_pretrained(tmp_path / folder).rope_parameters["rope_theta"]
        assert read_huggingface(tmp_path / folder).shape.rope_theta == theirs != ROPE["rope_theta"]


def test_a_mistral_without_a_key_of_a_window_has_one(tmp_path: Path) -> None:
    """Read as transformers reads it: a missing key is its default of 4,096 tokens, null is no window."""
    config = change(tmp_path, "mistral", max_position_embeddings=8_192)
    assert read_huggingface(tmp_path).shape.window is None
    config.pop("sliding_window")
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = read_huggingface(tmp_path).shape.window
    assert found == transformers.AutoConfig.from_pretrained(tmp_path).sliding_window == 4_096


def test_missing_keys_of_config_json_have_defaults(tmp_path: Path, tokenizer_file: Path) -> None:
    config = change(tmp_path, "llama", rms_norm_eps=None, rope_parameters=None, rope_theta=None)
    shape = read_huggingface(tmp_path).shape
    assert (shape.norm_eps, shape.rope_theta) == (1e-6, 10_000.0)
    (tmp_path / "tokenizer.json").write_bytes(tokenizer_file.read_bytes())
    reasons = []
    for stated in ({"initializer_range": 0.3}, {"initializer_range": None}):
        (tmp_path / "config.json").write_text(json.dumps(config | stated))
        recipe = recipe_from(read_huggingface(tmp_path), "own", source="python-stdlib").recipe
        reasons.append((recipe.hyperparameters.init_std, recipe.why["hyperparameters.init_std"].partition(";")[0]))
    default = "default of LlamaForCausalLM, not in config.json"
    assert reasons == [(0.3, "initializer_range of config.json"), (0.02, default)]
    (tmp_path / "config.json").write_text(json.dumps(config | {"initializer_range": -1}))
    with pytest.raises(InputError, match=r"not a valid recipe: \[hyperparameters\] init_std"):
        recipe_from(read_huggingface(tmp_path), "own", source="python-stdlib")
    empty = '{"model": {"type": "BPE", "vocab": {}, "merges": []}, "added_tokens": []}'
    for text, says in (("{}", "is not a tokenizer.json"), (empty, "no end-of-text token")):
        (tmp_path / "tokenizer.json").write_text(text)
        with pytest.raises(InputError, match=says):
            recipe_from(read_huggingface(tmp_path), "own", source="python-stdlib")


def test_a_tied_matrix_that_is_saved_twice_is_read(tmp_path: Path) -> None:
    foreign("llama, tied", tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    save_file(weights | {"lm_head.weight": weights["model.embed_tokens.weight"].clone()}, file)
    assert read_huggingface(tmp_path).shape.tied_embeddings


def test_damaged_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"config.json: no such file"):
        read_huggingface(tmp_path)
    foreign("llama", tmp_path)
    file = tmp_path / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError, match=r"model.safetensors: damaged"):
        read_huggingface(tmp_path)
    file.rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(InputError, match=r"no model.safetensors; save the model there with save_pretrained"):
        read_huggingface(tmp_path)
    file.mkdir()
    with pytest.raises(InputError, match=r"model.safetensors: cannot be read: Is a directory; make it readable"):
        read_huggingface(tmp_path)
    file.rmdir()
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InputError, match=r"config.json: cannot be read"):
        read_huggingface(tmp_path)
    foreign("llama", tmp_path)
    for index in ('{"weight_map": [1, 2]}', '{"weight_map": {"a": 5}}', "{}", "[]"):
        (tmp_path / "model.safetensors.index.json").write_text(index)
        with pytest.raises(
            InputError, match=r"index.json: (weight_map must map tensors to files in its folder|not a JSON object)"
        ):
            read_huggingface(tmp_path)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_weights_with_an_adapter_are_refused(tmp_path: Path, name: str) -> None:
    foreign("llama", tmp_path)
    (tmp_path / name).write_text("{}")
    with refused(f"{tmp_path}: {name}: leaven does not read adapters; merge it into the weights with PEFT"):
        read_huggingface(tmp_path)


def test_weights_beside_those_of_an_earlier_model(tmp_path: Path) -> None:
    """save_pretrained writes a model into the folder of an earlier one, of which it leaves files."""
    foreign("llama", tmp_path, max_shard_size="50KB")
    foreign("llama", tmp_path)  # removes the shards, and leaves their index
    read_huggingface(tmp_path)
    foreign("llama", tmp_path, max_shard_size="50KB")  # leaves model.safetensors
    with refused(
        "model.safetensors contains one model, and the files that model.safetensors.index.json lists contain another"
    ):
        read_huggingface(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    read_huggingface(tmp_path)


def test_other_ends_of_documents_than_those_of_the_weights_are_named(tmp_path: Path) -> None:
    vocabulary = {"[UNK]": 0, "a": 1, "<s>": 2, "</s>": 3, "<eos>": 4}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.add_special_tokens(["<s>", "</s>", "<eos>"])
    path = tmp_path / "tokenizer.json"

    def caution(eos: object) -> str | None:
        tokenizer.save(str(path))
        (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": eos}))
        return ends_caution(tmp_path, path, 3)

    assert [caution(eos) for eos in (3, [4, 3], None, "3", -1, 10**12)] == [None] * 6
    assert "documents end with </s>, but the model in" in (caution(4) or "")
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 2)])
    assert "the tokenizer puts <s> before a text, but training does not" in (caution(3) or "")
    tokenizer.post_processor = processors.TemplateProcessing("</s> $A", special_tokens=[("</s>", 3)])
    assert caution(3) is None


def test_weights_that_are_zeros_in_part_are_named(tmp_path: Path) -> None:
    for name in ("llama", "gpt2"):
        foreign(name, tmp_path)
        file = tmp_path / "model.safetensors"
        whole, weights = file.read_bytes(), load_file(file)
        # Untrained models may have outputs and biases of 0, and vocabularies unused tokens.
        ends = ("o_proj.weight", "down_proj.weight", "c_proj.weight", "lm_head.weight", "bias", "layernorm.weight")
        by_design = {key: tensor * (not key.endswith(ends)) for key, tensor in weights.items()}
        for vocabulary in ("model.embed_tokens.weight", "transformer.wte.weight"):
            if vocabulary in by_design:
                by_design[vocabulary][[0, -1, -2]] = 0
        save_file(by_design, file)
        assert zeros_caution(tmp_path) is None
        size = len(whole)
        for first, last in ((size // 2, size), (size // 3, size // 2), (int(size * 0.9), size)):
            file.write_bytes(whole[:first] + bytes(last - first) + whole[last:])
            assert " matrices in " in (zeros_caution(tmp_path) or "")
    (tmp_path / "config.json").unlink()
    assert zeros_caution(tmp_path) is None


@pytest.mark.parametrize(
    ("model", "zeros", "named"),
    [
        ("llama", r"lm_head.weight|.*norm.weight|.*o_proj.weight", None),
        ("llama", r"model.embed_tokens.weight", "1 of .* such as model.embed_tokens.weight"),
        ("llama", r"model.layers.1.self_attn.q_proj.weight", "1 of .* if they are zeros on purpose, ignore"),
        ("mixtral", r".*experts.\d+.w2.weight", None),
        ("mixtral", r".*layers.0.*experts.1.w1.weight", "1 of .* such as .*experts.1.w1.weight"),
    ],
)
def test_tensors_that_are_zeros_are_named(model: str, zeros: str, named: str | None, tmp_path: Path) -> None:
    foreign(model, tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    assert any(re.fullmatch(zeros, key) for key in weights)
    save_file({key: tensor * (not re.fullmatch(zeros, key)) for key, tensor in weights.items()}, file)
    found = zeros_caution(tmp_path)
    assert found is None if named is None else re.search(named, found or "")


def test_a_tensor_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    foreign("llama", tmp_path)
    file, name = tmp_path / "model.safetensors", "model.layers.1.mlp.up_proj.weight"
    weights = load_file(file)
    save_file(weights | {name.removeprefix("model."): weights[name] * 2}, file)
    with refused(f"{name} and ", "are the same tensor; remove one"):
        read_huggingface(tmp_path)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float8_e4m3fn, torch.complex64])
def test_weights_that_are_quantised_or_no_numbers_are_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    foreign("llama", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    save_file(weights | {name: weights[name].to(dtype)}, tmp_path / "model.safetensors")
    with refused(f"{name} has dtype ", "save the model without quantisation"):
        read_huggingface(tmp_path)


def test_an_export_is_written_whole_or_not_at_all(
    tiny: Recipe, tmp_path: Path, tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = scaled(tiny, {})
    model = random_model(recipe)

    def full(tensors: Any, path: Path, metadata: Any) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("leaven.interop.weights.save_file", full)
        with pytest.raises(InputError, match=r"cannot be written: No space left on device; nothing was written"):
            export(tmp_path / "out", recipe, model, tokenizer_file)
    assert not list(tmp_path.iterdir())
    (tmp_path / "out").mkdir()
    export(tmp_path / "out", recipe, model, tokenizer_file)  # an empty folder will do
    before = sorted((tmp_path / "out").iterdir())
    assert len({path.stat().st_mode for path in before}) == 1
    with pytest.raises(InputError, match=r"exists already; give another name"):
        export(tmp_path / "out", recipe, model, tokenizer_file)
    assert sorted((tmp_path / "out").iterdir()) == before


def test_start_weights_of_another_shape_are_refused(tiny: Recipe, tmp_path: Path) -> None:
    foreign("gpt2", tmp_path)
    shape = read_huggingface(tmp_path).shape
    for changes, says in (
        ({"n_layers": 2}, r"has n_layers 3, \[model\] has 2"),
        ({"seq_len": 16}, r"has seq_len 32, \[model\] has 16"),
        ({"norm_eps": 1e-6}, r"has norm_eps 1e-05, \[model\] has 1e-06"),
    ):
        recipe = tiny.replace({"model": shape.model_dump() | changes})
        with pytest.raises(InputError, match=says):
            start(random_model(recipe), recipe, tmp_path)
    foreign("llama", tmp_path / "rope")
    longer = read_huggingface(tmp_path / "rope").shape.model_dump()
    longer |= {"seq_len": 64, "rope_theta": 1e6, "dropout": 0.1}
    recipe = tiny.replace({"model": longer})
    start(random_model(recipe), recipe, tmp_path / "rope")
    given = recipe.replace({"start.weights": str(tmp_path / "rope")})
    angles = start_cautions(given, None, None)[-1]
    assert angles.startswith("model.rope_theta is 1,000,000.0, and the model in ")
    shorter = {"model.seq_len": 16, "model.rope_theta": 10_000.0, "batch.tokens": given.batch.tokens}
    length = start_cautions(given.replace(shorter), None, None)[-1]
    assert length.endswith("takes 32; an export states 16")


def test_the_fingerprint_of_weights_has_every_file_that_is_read(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors", "consolidated.safetensors"):
        (tmp_path / name).write_text("{}")
    before = weights_fingerprint(tmp_path)
    assert before == "815700f6e50364efc59562709e55ddc7"  # as in the studies of earlier versions
    (tmp_path / "consolidated.safetensors").write_text("not read")
    assert weights_fingerprint(tmp_path) == before
    index = {"weight_map": {"lm_head.weight": "weights-a.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    found = set()
    for content in ("a", "b"):
        (tmp_path / "weights-a.safetensors").write_text(content)
        found.add(weights_fingerprint(tmp_path))
    assert len(found) == 2


def test_the_fingerprint_of_tensors_has_what_the_samples_of_a_file_miss(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    weights = {"a": torch.ones(1_370_000), "b": torch.ones(16), "c": torch.ones(1_230_000)}  # 10 MB

    def fingerprints(**changed: Tensor) -> tuple[str, str]:
        save_file(weights | changed, file)
        return weights_fingerprint(tmp_path), tensors_fingerprint(tmp_path)

    samples, tensors = fingerprints()
    assert fingerprints() == (samples, tensors)
    found = {tensors}
    for changed in ({"b": weights["b"] * 3}, {"b": torch.tensor([*[1.0] * 15, 2.0])}):
        of_samples, of_tensors = fingerprints(**changed)
        assert of_samples == samples  # as in the studies of earlier versions
        found.add(of_tensors)
    ends = weights["c"].clone()
    ends[-1] = 2
    found |= {fingerprints(c=weights["c"] * 2)[1], fingerprints(c=ends)[1]}
    save_file(dict(weights), file, {"format": "pt"})
    found.add(tensors_fingerprint(tmp_path))
    assert len(found) == 6
    content = file.read_bytes()
    for damaged in (
        content[:1_000],
        b"",
        b"\xff" * 99,
        *(content.replace(b"[5480000", new, 1) for new in (b"[0000000", b"[-100000", b'["20000"', b"[6500000")),
    ):
        file.write_bytes(damaged)
        tensors_fingerprint(tmp_path)
    # Many tensors in the same place: each byte is read once.
    header = json.dumps({str(number): {"data_offsets": [0, 2**18]} for number in range(100_000)}).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(2**18))
    tensors_fingerprint(tmp_path)


def test_what_an_export_does_not_have_is_named(tmp_path: Path) -> None:
    assert not_exported(tmp_path) is None
    (tmp_path / "tokenizer_config.json").write_text('{"model_max_length": 8}')
    assert not_exported(tmp_path) is None
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    (tmp_path / "generation_config.json").touch()
    said = "generation_config.json and the chat_template of tokenizer_config.json"
    assert f"not in the export: {said} of {tmp_path}" in (not_exported(tmp_path) or "")
