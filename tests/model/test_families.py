"""Logits equal those of Hugging Face's GPT-2 and OPT in float64, with copied weights.

tests/interop/test_weights.py compares the other architectures in fp32.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from leaven.model.transformer import Transformer
from leaven.recipe.shape import ModelShape

L, D, H, V, T = 3, 48, 6, 61, 20
EPS = 1e-6  # of leaven's norms
SHAPE: dict[str, Any] = {
    "n_layers": L,
    "d_model": D,
    "n_heads": H,
    "n_kv_heads": H,
    "d_head": D // H,
    "d_ff": 4 * D,
    "vocab_size": V,
    "seq_len": T,
    "norm": "layernorm",
    "bias": True,
    "positions": "learned",
    "tied_embeddings": True,
}
SIDES = ("attention.query", "attention.key", "attention.value")
NAMES: dict[str, dict[str, str]] = {
    "gpt2": {
        "embedding": "transformer.wte",
        "positions": "transformer.wpe",
        "norm.final": "transformer.ln_f",
        "layers": "transformer.h",
        "norm.attention": "ln_1",
        "norm.mlp": "ln_2",
        **dict.fromkeys(SIDES, "attn.c_attn"),
        "attention.out": "attn.c_proj",
        "mlp.in": "mlp.c_fc",
        "mlp.out": "mlp.c_proj",
    },
    "opt": {
        "embedding": "model.decoder.embed_tokens",
        "positions": "model.decoder.embed_positions",
        "norm.final": "model.decoder.final_layer_norm",
        "layers": "model.decoder.layers",
        "norm.attention": "self_attn_layer_norm",
        "norm.mlp": "final_layer_norm",
        **{side: f"self_attn.{side.split('.')[1][0]}_proj" for side in SIDES},
        "attention.out": "self_attn.out_proj",
        "mlp.in": "fc1",
        "mlp.out": "fc2",
    },
}
"""Their names of leaven's modules."""


@pytest.fixture(autouse=True)
def no_single_precision(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Replace float32 by float64: transformers computes norms and softmaxes in float32 whatever the model's dtype."""
    for name in ("float32", "float"):
        monkeypatch.setattr(torch, name, torch.float64)
    monkeypatch.setattr(Tensor, "float", Tensor.double)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(default)


def build(family: str, **dropout: float) -> Any:
    """Their model with every parameter random, gains and biases too."""
    sizes: dict[str, Any] = {"vocab_size": V, "hidden_size": D, "num_attention_heads": H, "num_hidden_layers": L}
    sizes |= {"max_position_embeddings": T, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    if family == "gpt2":
        model: Any = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **dropout))
    else:
        model = transformers.OPTForCausalLM(transformers.OPTConfig(**sizes, ffn_dim=4 * D, word_embed_proj_dim=D))
    generator = torch.Generator().manual_seed(2)
    for parameter in model.parameters():
        nn.init.normal_(parameter, 0.0, 0.3, generator=generator)
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.eps = EPS
        if hasattr(module, "gelu_impl"):
            module.gelu_impl = nn.GELU(approximate="tanh")  # theirs has sqrt(2 / pi) in eight digits
    return model.eval()


def copied(family: str, model: Any, dropout: float = 0.0) -> Transformer:
    """leaven's model with their weights."""
    activation = "gelu" if family == "gpt2" else "relu"
    ours = Transformer(ModelShape(**SHAPE, activation=activation, dropout=dropout))
    theirs, names = dict(model.named_parameters()), NAMES[family]
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            place, _, kind = name.rpartition(".")
            if not name.startswith("layers."):
                found = theirs[f"{names[place]}.{kind}"]
                parameter.copy_(found[-T:] if place == "positions" else found)  # OPT has two more, for padding
                continue
            _, layer, inner = place.split(".", 2)
            found = theirs[f"{names['layers']}.{layer}.{names[inner]}.{kind}"]
            if family == "gpt2" and found.ndim == 2:
                found = found.T  # their Conv1D has (fan in, fan out)
            parameter.copy_(found.chunk(3)[SIDES.index(inner)] if len(found) == 3 * D else found)
    return ours.eval()


def tokens() -> Tensor:
    return torch.randint(0, V, (2, T), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("family", NAMES)
def test_logits_equal_those_of_transformers(family: str) -> None:
    theirs = build(family)
    ours = copied(family, theirs)
    left = sum(p.numel() for p in theirs.parameters()) - sum(p.numel() for p in ours.parameters())
    assert left == (2 * D if family == "opt" else 0)  # all of their weights are copied
    expected = theirs(tokens()).logits
    assert expected.dtype == torch.float64
    assert expected.std() > 0.1
    torch.testing.assert_close(ours(tokens()), expected, rtol=1e-10, atol=1e-10)


DROPOUT = {"embd_pdrop": 0.3, "attn_pdrop": 0.3, "resid_pdrop": 0.3}


@pytest.mark.parametrize("left_out", [None, *DROPOUT])
def test_dropout_acts_in_the_same_places_as_in_gpt2(left_out: str | None) -> None:
    """The same seed draws the same masks in the same order, so training logits are equal; without one of the three
    rates they are not."""
    theirs = build("gpt2", **DROPOUT | ({left_out: 0.0} if left_out else {})).train()
    ours = copied("gpt2", theirs, dropout=0.3).train()
    torch.manual_seed(7)
    expected = theirs(tokens()).logits
    torch.manual_seed(7)
    found = ours(tokens())
    assert torch.allclose(found, expected, rtol=1e-10, atol=1e-10) is (left_out is None)
