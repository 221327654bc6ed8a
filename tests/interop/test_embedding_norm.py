"""A norm between embedding and blocks: recognised by name for BLOOM, otherwise it needs a role."""

import pytest
import torch
from tests.interop.families import LENGTH, VOCABULARY, tokens
from torch import nn
from transformers import BloomConfig
from transformers.models.bloom.modeling_bloom import BloomForCausalLM

import leaven
from leaven.recipe.errors import InputError
from leaven.scaling.table import ParameterRow

TUNED = {"lr": 0.01, "init_std": 0.1, "weight_decay": 0.1}


def bloom(width: int, depth: int) -> nn.Module:
    return BloomForCausalLM(
        BloomConfig(vocab_size=VOCABULARY, hidden_size=width, n_layer=depth, n_head=width // 8, seq_length=LENGTH)
    )


class Model(nn.Module):
    """A model with a norm before the blocks whose name does not show its role."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.first_norm = nn.LayerNorm(width)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"mlp": nn.ModuleDict({"in": nn.Linear(width, width), "out": nn.Linear(width, width)})})
            for _ in range(depth)
        )
        self.unembedding = nn.Linear(width, VOCABULARY)


def rows(model: nn.Module) -> dict[str, ParameterRow]:
    return {row.name: row for row in model.leaven_rows}


def test_blooms_embedding_norm_scales_like_the_embedding() -> None:
    model = bloom(64, 6)
    leaven.parametrize(model, base=bloom(32, 2), hyperparameters=TUNED, ratios=leaven.Ratios(batch=2, tokens=8))
    found = rows(model)
    gain, bias, final, embedding = (
        found[f"transformer.{name}"]
        for name in (
            "word_embeddings_layernorm.weight",
            "word_embeddings_layernorm.bias",
            "ln_f.weight",
            "word_embeddings.weight",
        )
    )
    assert (gain.role, gain.module) == ("embedding_norm", "norm.embedding")
    assert (bias.role, bias.module) == ("embedding_bias", "biases")
    assert (final.role, embedding.role) == ("final_norm", "tied_embedding")
    for row in (gain, bias):
        assert row.lr == pytest.approx(0.01 / 2)  # sqrt(2 / 8); independent of depth
        assert row.eps == embedding.eps == pytest.approx(1e-8 * 2 / 2)
        assert row.weight_decay == 0
    assert torch.isfinite(model(tokens()).logits).all()


def test_an_unknown_norm_before_the_blocks_needs_a_role() -> None:
    with pytest.raises(InputError, match=r"first_norm.weight .* before the blocks; .*'embedding_norm'"):
        leaven.parametrize(Model(32, 2), base=Model(16, 2), hyperparameters=TUNED)
    model = Model(32, 2)
    roles = {"first_norm.weight": "embedding_norm", "first_norm.bias": "embedding_bias"}
    leaven.parametrize(model, base=Model(16, 2), hyperparameters=TUNED, roles=roles)
    assert rows(model)["first_norm.weight"].module == "norm.embedding"
