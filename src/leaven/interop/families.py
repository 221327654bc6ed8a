"""Hugging Face's plain decoders as data.

Names, defaults and layouts are those of the configuration and modelling files of ``transformers`` 5.23.
"""

from typing import Any

from leaven.interop.architectures import Architecture, Config
from leaven.recipe.errors import InputError
from leaven.recipe.shape import ModelShape

_COUNTS = {
    "vocab_size": ("vocab_size",),
    "d_model": ("hidden_size",),
    "n_layers": ("num_hidden_layers",),
    "n_heads": ("num_attention_heads",),
    "d_ff": ("intermediate_size",),
    "seq_len": ("max_position_embeddings",),
    "tied_embeddings": ("tie_word_embeddings",),
    "activation": ("hidden_act",),
}
_LLAMA_KEYS = _COUNTS | {
    "n_kv_heads": ("num_key_value_heads",),
    "d_head": ("head_dim",),
    "norm_eps": ("rms_norm_eps",),
    "dropout": ("attention_dropout",),
    "rope_theta": ("rope_theta",),
    "d_attention": (),
}
_LLAMA_DEFAULTS: Config = {
    "vocab_size": 32_000,
    "hidden_size": 4_096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "intermediate_size": 11_008,
    "max_position_embeddings": 2_048,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "attention_dropout": 0.0,
    "attention_bias": False,
    "mlp_bias": False,
    "rope_theta": 10_000.0,
    "initializer_range": 0.02,
}
_GATED = {"swiglu": ("silu", "swish")}
_UNGATED = {"gelu": ("gelu_pytorch_tanh", "gelu_new"), "relu": ("relu",), "squared_relu": ("relu2",)}
_SIDES = ("query", "key", "value")
_LLAMA_ENDS = {"embedding": "model.embed_tokens", "norm.final": "model.norm", "unembedding": "lm_head"}
_LLAMA_BLOCK = {
    "norm.attention": "input_layernorm",
    "norm.mlp": "post_attention_layernorm",
    **{f"attention.{side}": f"self_attn.{side[0]}_proj" for side in _SIDES},
    "attention.out": "self_attn.o_proj",
    "mlp.gate": "mlp.gate_proj",
    "mlp.in": "mlp.up_proj",
    "mlp.out": "mlp.down_proj",
}

LLAMA = Architecture(
    name="LlamaForCausalLM",
    model_type="llama",
    holds={"norm": ("rmsnorm",), "positions": ("rope",), "qk_norm": (False,)},
    keys=_LLAMA_KEYS | {"bias": ("attention_bias", "mlp_bias")},
    words=_GATED,
    says={},
    defaults=_LLAMA_DEFAULTS,
    blocks="model.layers",
    ends=_LLAMA_ENDS,
    block=_LLAMA_BLOCK,
)

QWEN3 = Architecture(
    name="Qwen3ForCausalLM",
    model_type="qwen3",
    holds={"norm": ("rmsnorm",), "positions": ("rope",), "qk_norm": (True,)},
    keys=_LLAMA_KEYS,
    words=_GATED,
    says={"attention_bias": False, "use_sliding_window": False},
    defaults=_LLAMA_DEFAULTS
    | {
        "vocab_size": 151_936,
        "intermediate_size": 22_016,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "max_position_embeddings": 32_768,
    },
    blocks="model.layers",
    ends=_LLAMA_ENDS,
    block=_LLAMA_BLOCK | {"norm.query": "self_attn.q_norm", "norm.key": "self_attn.k_norm"},
)

GPT2 = Architecture(
    name="GPT2LMHeadModel",
    model_type="gpt2",
    holds={"norm": ("layernorm",), "positions": ("learned",), "qk_norm": (False,), "bias": (True, False)},
    keys={
        "vocab_size": ("vocab_size",),
        "d_model": ("n_embd",),
        "n_layers": ("n_layer",),
        "n_heads": ("n_head",),
        "d_ff": ("n_inner",),
        "seq_len": ("n_positions",),
        "norm_eps": ("layer_norm_epsilon",),
        "tied_embeddings": ("tie_word_embeddings",),
        "activation": ("activation_function",),
        "dropout": ("resid_pdrop", "embd_pdrop", "attn_pdrop"),
        "rope_theta": (),
    },
    words=_UNGATED | {"gelu": ("gelu_new", "gelu_pytorch_tanh")},
    says={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
    defaults={
        "vocab_size": 50_257,
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "n_positions": 1_024,
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
        "activation_function": "gelu_new",
        "resid_pdrop": 0.1,
        "embd_pdrop": 0.1,
        "attn_pdrop": 0.1,
        "initializer_range": 0.02,
    },
    blocks="transformer.h",
    ends={
        "embedding": "transformer.wte",
        "positions": "transformer.wpe",
        "norm.final": "transformer.ln_f",
        "unembedding": "lm_head",
    },
    block={
        "norm.attention": "ln_1",
        "norm.mlp": "ln_2",
        **{f"attention.{side}": "attn.c_attn" for side in _SIDES},
        "attention.out": "attn.c_proj",
        "mlp.in": "mlp.c_fc",
        "mlp.out": "mlp.c_proj",
    },
    conv1d=True,
    buffers=(".attn.bias", ".attn.masked_bias"),
)

GPT_NEOX = Architecture(
    name="GPTNeoXForCausalLM",
    model_type="gpt_neox",
    holds={"norm": ("layernorm",), "positions": ("rope",), "qk_norm": (False,), "bias": (True, False)},
    keys=_COUNTS
    | {
        "norm_eps": ("layer_norm_eps",),
        "dropout": ("attention_dropout", "hidden_dropout"),
        "rope_theta": ("rotary_emb_base",),
    },
    words=_UNGATED,
    says={"use_parallel_residual": False, "attention_bias": True},
    defaults={
        "vocab_size": 50_432,
        "hidden_size": 6_144,
        "num_hidden_layers": 44,
        "num_attention_heads": 64,
        "intermediate_size": 24_576,
        "max_position_embeddings": 2_048,
        "layer_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "hidden_act": "gelu",
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "use_parallel_residual": True,
        "rotary_emb_base": 10_000.0,
        "rotary_pct": 0.25,
        "initializer_range": 0.02,
    },
    blocks="gpt_neox.layers",
    ends={"embedding": "gpt_neox.embed_in", "norm.final": "gpt_neox.final_layer_norm", "unembedding": "embed_out"},
    block={
        "norm.attention": "input_layernorm",
        "norm.mlp": "post_attention_layernorm",
        **{f"attention.{side}": "attention.query_key_value" for side in _SIDES},
        "attention.out": "attention.dense",
        "mlp.in": "mlp.dense_h_to_4h",
        "mlp.out": "mlp.dense_4h_to_h",
    },
    heads_together=True,
    buffers=(".attention.bias", ".attention.masked_bias", "rotary_emb.inv_freq"),
)

BLOOM = Architecture(
    name="BloomForCausalLM",
    model_type="bloom",
    holds={
        "norm": ("layernorm",),
        "positions": ("alibi",),
        "qk_norm": (False,),
        "embedding_norm": (True,),
        "activation": ("gelu",),
        "bias": (True, False),
    },
    keys={
        "vocab_size": ("vocab_size",),
        "d_model": ("hidden_size",),
        "n_layers": ("n_layer",),
        "n_heads": ("n_head",),
        "seq_len": ("seq_length",),
        "norm_eps": ("layer_norm_epsilon",),
        "tied_embeddings": ("tie_word_embeddings",),
        "dropout": ("attention_dropout", "hidden_dropout"),
        "rope_theta": (),
    },
    words={},
    says={"apply_residual_connection_post_layernorm": False},
    defaults={
        "vocab_size": 250_880,
        "hidden_size": 64,
        "n_layer": 2,
        "n_head": 8,
        "seq_length": 2_048,  # in the checkpoint of 176B; no key of the class
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "initializer_range": 0.02,
    },
    blocks="transformer.h",
    ends={
        "embedding": "transformer.word_embeddings",
        "norm.embedding": "transformer.word_embeddings_layernorm",
        "norm.final": "transformer.ln_f",
        "unembedding": "lm_head",
    },
    block={
        "norm.attention": "input_layernorm",
        "norm.mlp": "post_attention_layernorm",
        **{f"attention.{side}": "self_attention.query_key_value" for side in _SIDES},
        "attention.out": "self_attention.dense",
        "mlp.in": "mlp.dense_h_to_4h",
        "mlp.out": "mlp.dense_4h_to_h",
    },
    heads_together=True,
)

ARCHITECTURES = (LLAMA, QWEN3, GPT2, GPT_NEOX, BLOOM)


def holding(shape: ModelShape) -> Architecture:
    """The architecture that holds a shape.

    Raises:
        InputError: naming the keys that stand in the way of the nearest.
    """
    misfits = {architecture.name: architecture.misfits(shape) for architecture in ARCHITECTURES}
    name, wanted = min(misfits.items(), key=lambda item: len(item[1]))
    if wanted:
        changes = ", ".join(f"{key} = {_toml(value)}" for key, value in wanted.items())
        raise InputError(
            f"no Hugging Face architecture that leaven writes holds this model; for the nearest, {name}, "
            f"set [model] {changes}"
        )
    return next(architecture for architecture in ARCHITECTURES if architecture.name == name)


def named(config: Config) -> Architecture:
    """The architecture that a config.json names.

    Raises:
        InputError: if it is none of those that leaven reads.
    """
    names = config.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise InputError(f"config.json: architectures = {names!r}: has to be a list of names")
    for architecture in ARCHITECTURES:
        if architecture.name in names or (not names and config.get("model_type") == architecture.model_type):
            return architecture
    said = ", ".join(names) or config.get("model_type", "none")
    known = ", ".join(architecture.name for architecture in ARCHITECTURES)
    raise InputError(f"config.json: architecture {said}: leaven reads {known}")


def _toml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else f'"{value}"' if isinstance(value, str) else f"{value}"
