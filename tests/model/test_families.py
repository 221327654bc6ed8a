"""Logits equal those of Hugging Face's GPT-2 in float64, with copied weights and the same dropout.

tests/interop/test_weights.py compares the other architectures in fp32.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from leaven.model.transformer import Transformer
from leaven.recipe.shape import ModelShape

L, D, H, E, V, T = 3, 48, 6, 8, 61, 20
EPS = 1e-6  # of leaven's norms
SHAPE: dict[str, Any] = {
    "n_layers": L,
    "d_model": D,
    "n_heads": H,
    "n_kv_heads": H,
    "d_head": E,
    "d_ff": 4 * D,
    "vocab_size": V,
    "seq_len": T,
    "norm": "layernorm",
    "activation": "gelu",
    "bias": True,
    "positions": "learned",
    "tied_embeddings": True,
}
SIDES = ("attention.query", "attention.key", "attention.value")
ENDS = {"embedding": "transformer.wte", "positions": "transformer.wpe", "norm.final": "transformer.ln_f"}
BLOCK = {
    "norm.attention": "ln_1",
    "norm.mlp": "ln_2",
    **dict.fromkeys(SIDES, "attn.c_attn"),
    "attention.out": "attn.c_proj",
    "mlp.in": "mlp.c_fc",
    "mlp.out": "mlp.c_proj",
}


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


def build(**dropout: float) -> Any:
    """Their model with every parameter random, gains and biases too."""
    sizes: dict[str, Any] = {"vocab_size": V, "n_embd": D, "n_head": H, "n_layer": L, "n_positions": T}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, **dropout))
    generator = torch.Generator().manual_seed(2)
    for parameter in model.parameters():
        nn.init.normal_(parameter, 0.0, 0.3, generator=generator)
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.eps = EPS
        if hasattr(module, "gelu_impl"):
            module.gelu_impl = nn.GELU(approximate="tanh")  # theirs has sqrt(2 / pi) in eight digits
    return model.eval()


def copied(model: Any, dropout: float = 0.0) -> Transformer:
    """leaven's model with their weights."""
    ours = Transformer(ModelShape(**SHAPE | {"dropout": dropout}))
    theirs = dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            place, _, kind = name.rpartition(".")
            if name.startswith("layers."):
                _, layer, inner = place.split(".", 2)
                found = theirs[f"transformer.h.{layer}.{BLOCK[inner]}.{kind}"]
                found = found.T if found.ndim == 2 else found  # their Conv1D has (fan in, fan out)
                if inner in SIDES:
                    found = found.chunk(3)[SIDES.index(inner)]
            else:
                found = theirs[f"{ENDS[place]}.{kind}"]
            parameter.copy_(found)
    return ours.eval()


def tokens() -> Tensor:
    return torch.randint(0, V, (2, T), generator=torch.Generator().manual_seed(0))


def test_logits_equal_those_of_transformers() -> None:
    theirs = build()
    ours = copied(theirs)
    assert sum(p.numel() for p in theirs.parameters()) == sum(p.numel() for p in ours.parameters())  # all are copied
    expected = theirs(tokens()).logits
    assert expected.dtype == torch.float64
    assert expected.std() > 0.1
    torch.testing.assert_close(ours(tokens()), expected, rtol=1e-10, atol=1e-10)


RATES = {"embd_pdrop": 0.3, "attn_pdrop": 0.3, "resid_pdrop": 0.3}


@pytest.mark.parametrize("left_out", [None, *RATES])
def test_dropout_acts_in_the_same_places_as_in_gpt2(left_out: str | None) -> None:
    """The same seed draws the same masks in the same order, so training logits are equal; without one of the three
    rates they are not."""
    theirs = build(**RATES | ({left_out: 0.0} if left_out else {})).train()
    ours = copied(theirs, dropout=0.3).train()
    torch.manual_seed(7)
    expected = theirs(tokens()).logits
    torch.manual_seed(7)
    found = ours(tokens())
    assert torch.allclose(found, expected, rtol=1e-10, atol=1e-10) is (left_out is None)
