"""The shape of a model from a Megatron-LM argument list."""

from typing import Any

from pydantic import ValidationError

from leaven.interop.configs.draft import Draft
from leaven.interop.configs.megatron_flags import MegatronFlags
from leaven.recipe.errors import InputError
from leaven.recipe.files import explain
from leaven.recipe.shape import ModelShape


def read_shape(given: MegatronFlags, draft: Draft) -> ModelShape:
    """The shape, set in the draft with its reasons.

    Raises:
        InputError: naming what is of another kind of model, missing or malformed.
    """
    heads, width = given.count("num-attention-heads"), given.count("hidden-size")
    if width % heads and not given.told("kv-channels"):
        raise InputError(f"{given.origin}: --hidden-size {width} does not divide by --num-attention-heads {heads}")
    d_head = given.count("kv-channels") if given.told("kv-channels") else width // heads
    length = given.count("seq-length")
    values: dict[str, tuple[Any, str]] = {
        "n_layers": (given.count("num-layers"), given.why("num-layers")),
        "d_model": (width, given.why("hidden-size")),
        "n_heads": (heads, given.why("num-attention-heads")),
        "n_kv_heads": _kv_heads(given, heads, draft),
        "d_head": (d_head, given.why("kv-channels", "hidden-size")),
        "d_attention": (heads * d_head if heads * d_head != width else None, given.why("kv-channels")),
        "d_ff": _d_ff(given, width),
        "vocab_size": _vocabulary(given, draft),
        "seq_len": (length, given.why("seq-length")),
        "norm": _choice(given, "normalization", {"RMSNorm": "rmsnorm", "LayerNorm": "layernorm"}),
        "norm_eps": (given.number("norm-epsilon"), given.why("norm-epsilon")),
        "activation": _activation(given),
        "positions": _positions(given),
        "rope_theta": (given.number("rotary-base"), given.why("rotary-base")),
        "qk_norm": ("qk-layernorm" in given.switches, given.why("qk-layernorm")),
        "tied_embeddings": (
            "untie-embeddings-and-output-weights" not in given.switches,
            given.why("untie-embeddings-and-output-weights"),
        ),
        "embedding_norm": ("embed-layernorm" in given.switches, given.why("embed-layernorm")),
        "bias": _bias(given),
        "dropout": _dropout(given, draft),
    }
    if given.number("rotary-percent") != 1:
        raise InputError(f"{given.origin}: --rotary-percent: leaven rotates whole heads (1.0)")
    try:
        shape = ModelShape.model_validate({key: value for key, (value, _) in values.items()})
    except ValidationError as error:
        raise InputError(f"{given.origin}: no shape of leaven's: {explain(error)}") from None
    draft.set_shape(shape, {key: why for key, (_, why) in values.items()})
    return shape


def _choice(given: MegatronFlags, name: str, known: dict[str, str]) -> tuple[str, str]:
    word = given.word(name)
    if word not in known:
        raise InputError(f"{given.origin}: --{name} {word}: leaven reads {', '.join(known)}")
    return known[word], given.why(name)


def _positions(given: MegatronFlags) -> tuple[str, str]:
    if "use-rotary-position-embeddings" in given.switches:
        return "rope", given.why("use-rotary-position-embeddings")
    return _choice(given, "position-embedding-type", {"rope": "rope", "learned_absolute": "learned"})


def _kv_heads(given: MegatronFlags, heads: int, draft: Draft) -> tuple[int, str]:
    if "group-query-attention" in given.switches:
        return given.count("num-query-groups"), given.why("num-query-groups")
    if "num-query-groups" in given.numbers:
        draft.unread.append("--num-query-groups: Megatron reads it beside --group-query-attention only")
    return heads, "--num-attention-heads: no --group-query-attention"


def _bias(given: MegatronFlags) -> tuple[bool, str]:
    if {"disable-bias-linear", "add-qkv-bias"} <= given.switches:
        raise InputError(f"{given.origin}: --add-qkv-bias: leaven has biases in all matrices or in none")
    return "disable-bias-linear" not in given.switches, given.why("disable-bias-linear")


def _d_ff(given: MegatronFlags, width: int) -> tuple[int, str]:
    if given.told("ffn-hidden-size"):
        return given.count("ffn-hidden-size"), given.why("ffn-hidden-size")
    if "swiglu" in given.switches:  # validate_args of arguments.py
        return int(4 * width * 2 / 3 / 64) * 64, "4 x hidden size x 2 / 3, down to a multiple of 64, with --swiglu"
    return 4 * width, "4 x hidden size: no --ffn-hidden-size"


def _vocabulary(given: MegatronFlags, draft: Draft) -> tuple[int, str]:
    if "padded-vocab-size" in given.numbers:
        return given.count("padded-vocab-size"), given.why("padded-vocab-size")
    if "vocab-size" not in given.numbers:
        draft.unknown.append("model.vocab_size: the tokenizer's; 50,304 (GPT-2's, padded) stands there")
        return 50_304, "not told: that of GPT-2's tokenizer, padded"
    multiple = given.count("make-vocab-size-divisible-by") * given.count("tensor-model-parallel-size")
    padded = -(-given.count("vocab-size") // multiple) * multiple
    return padded, f"--vocab-size, padded to a multiple of {multiple}"


def _activation(given: MegatronFlags) -> tuple[str, str]:
    known = {"swiglu": "swiglu", "squared-relu": "squared_relu"}
    told = {f"--{flag}": ours for flag, ours in known.items() if flag in given.switches}
    if "glu-activation" in given.words:  # Megatron-DeepSpeed's; it leaves --ffn-hidden-size at 4 x hidden size
        ours, flag = _choice(given, "glu-activation", {"swiglu": "swiglu"})
        told[flag] = ours
    if len(set(told.values())) > 1:
        raise InputError(f"{given.origin}: {' and '.join(told)}: two activations; take one away")
    return next(((ours, flag) for flag, ours in told.items()), ("gelu", "Megatron's default"))


def _dropout(given: MegatronFlags, draft: Draft) -> tuple[float, str]:
    attention, hidden = given.number("attention-dropout"), given.number("hidden-dropout")
    if attention != hidden:
        draft.unread.append(f"--attention-dropout {attention:g}: leaven has one rate, that of --hidden-dropout")
    return hidden, given.why("hidden-dropout", "attention-dropout")
