"""Logits equal those of Hugging Face's GPT-2 and OPT in float64, with copied weights.

tests/interop/test_weights.py compares the other architectures in fp32.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from leaven.model.transformer import Transformer
from leaven.recipe.shape import ModelShape

L, D, H, E, V, T = 3, 48, 6, 8, 61, 20
EPS = 1e-6  # of leaven's norms
SIZES: dict[str, Any] = {
    "n_layers": L,
    "d_model": D,
    "n_heads": H,
    "n_kv_heads": H,
    "d_head": E,
    "d_ff": 4 * D,
    "vocab_size": V,
    "seq_len": T,
}
GPT = {"norm": "layernorm", "activation": "gelu", "bias": True}
COMMON: dict[str, Any] = {"vocab_size": V, "hidden_size": D, "num_attention_heads": H, "num_hidden_layers": L}


@dataclass(frozen=True)
class Family:
    """A published architecture."""

    shape: dict[str, Any]  # of leaven's model
    theirs: str  # class of transformers
    config: dict[str, Any]  # of that class
    blocks: str  # path of its blocks
    ends: dict[str, str]  # leaven's name -> its name of a module outside the blocks
    block: dict[str, str]  # the same inside a block


FAMILIES = {
    "gpt2": Family(
        GPT | {"positions": "learned", "tied_embeddings": True},
        "GPT2LMHeadModel",
        {
            "vocab_size": V,
            "n_embd": D,
            "n_head": H,
            "n_layer": L,
            "n_positions": T,
            "bos_token_id": 0,
            "eos_token_id": 0,
        },
        "transformer.h",
        {"embedding": "transformer.wte", "positions": "transformer.wpe", "norm.final": "transformer.ln_f"},
        {
            "norm.attention": "ln_1",
            "norm.mlp": "ln_2",
            **{f"attention.{side}": "attn.c_attn" for side in ("query", "key", "value")},
            "attention.out": "attn.c_proj",
            "mlp.in": "mlp.c_fc",
            "mlp.out": "mlp.c_proj",
        },
    ),
    "opt": Family(
        GPT | {"positions": "learned", "activation": "relu", "tied_embeddings": True},
        "OPTForCausalLM",
        COMMON | {"ffn_dim": 4 * D, "max_position_embeddings": T, "word_embed_proj_dim": D, "pad_token_id": 0},
        "model.decoder.layers",
        {
            "embedding": "model.decoder.embed_tokens",
            "positions": "model.decoder.embed_positions",
            "norm.final": "model.decoder.final_layer_norm",
        },
        {
            "norm.attention": "self_attn_layer_norm",
            "norm.mlp": "final_layer_norm",
            **{f"attention.{side}": f"self_attn.{side[0]}_proj" for side in ("query", "key", "value")},
            "attention.out": "self_attn.out_proj",
            "mlp.in": "fc1",
            "mlp.out": "fc2",
        },
    ),
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


def build(family: Family, **dropout: float) -> Any:
    """Their model with every parameter random, gains and biases too."""
    made = getattr(transformers, family.theirs)
    model = made(made.config_class(**family.config, **dropout))
    generator = torch.Generator().manual_seed(2)
    for parameter in model.parameters():
        nn.init.normal_(parameter, 0.0, 0.3, generator=generator)
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.eps = EPS
        if hasattr(module, "gelu_impl"):
            module.gelu_impl = nn.GELU(approximate="tanh")  # theirs has sqrt(2 / pi) in eight digits
    return model.eval()


def copied(family: Family, model: Any, dropout: float = 0.0) -> Transformer:
    """leaven's model of the family with their weights."""
    ours = Transformer(ModelShape(**SIZES | family.shape | {"dropout": dropout}))
    theirs = dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            place, _, kind = name.rpartition(".")
            if name.startswith("layers."):
                _, layer, inner = place.split(".", 2)
                found = theirs[f"{family.blocks}.{layer}.{family.block[inner]}.{kind}"]
            else:
                inner, found = place, theirs[f"{family.ends[place]}.{kind}"]
            parameter.copy_(_part(family, inner, found))
    return ours.eval()


def _part(family: Family, module: str, found: Tensor) -> Tensor:
    """Return the part of their tensor that is one of leaven's modules."""
    gpt2 = family.theirs.startswith("GPT2")
    if gpt2 and found.ndim == 2 and module.startswith(("attention", "mlp")):
        found = found.T  # their Conv1D has (fan in, fan out)
    if module == "positions":
        found = found[-T:]  # OPT has two more in front, for padding
    sides = ("attention.query", "attention.key", "attention.value")
    if module in sides and found.shape[0] == 3 * D:
        third = sides.index(module)
        return found.chunk(3)[third]
    return found


def tokens() -> Tensor:
    return torch.randint(0, V, (2, T), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_logits_equal_those_of_transformers(family: Family) -> None:
    theirs = build(family)
    ours = copied(family, theirs)
    left = sum(p.numel() for p in theirs.parameters()) - sum(p.numel() for p in ours.parameters())
    assert left == (2 * D if family.theirs.startswith("OPT") else 0)  # all of their weights are copied
    expected = theirs(tokens()).logits
    assert expected.dtype == torch.float64
    assert expected.std() > 0.1
    torch.testing.assert_close(ours(tokens()), expected, rtol=1e-10, atol=1e-10)


GPT2_DROPOUT = {"embd_pdrop": 0.3, "attn_pdrop": 0.3, "resid_pdrop": 0.3}


@pytest.mark.parametrize("left_out", [None, *GPT2_DROPOUT])
def test_dropout_acts_in_the_same_places_as_in_gpt2(left_out: str | None) -> None:
    """The same seed draws the same masks in the same order, so training logits are equal; without one of the three
    rates they are not."""
    family = FAMILIES["gpt2"]
    theirs = build(family, **GPT2_DROPOUT | ({left_out: 0.0} if left_out else {})).train()
    ours = copied(family, theirs, dropout=0.3).train()
    torch.manual_seed(7)
    expected = theirs(tokens()).logits
    torch.manual_seed(7)
    found = ours(tokens())
    assert torch.allclose(found, expected, rtol=1e-10, atol=1e-10) is (left_out is None)
