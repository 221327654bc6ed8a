"""A plain transformer with folded weights computes what a model with multipliers does, in float64."""

import pytest
import torch

from leaven.model.transformer import Transformer
from leaven.recipe.recipe import Recipe
from leaven.scaling.table import folding, parameter_table
from leaven.scaling.transfer import transfer

SHAPES = {
    "no norm of queries": {"qk_norm": False},
    "norm of queries": {},
    "norm of each head": {"qk_norm_per_head": True},
    "tied": {"tied_embeddings": True},
    "biases, tied": {"norm": "layernorm", "bias": True, "tied_embeddings": True, "qk_norm": False},
    "output norms": {"norm_placement": "output", "qk_norm_whole": True},
    "sandwich norms, caps": {"norm_placement": "sandwich", "attention_softcap": 2.0, "logit_softcap": 3.0},
    "parallel": {"parallel_branches": True, "attention_bias": "qkv", "rotary_fraction": 0.5, "window": 3},
    "biases": {"norm": "layernorm", "bias": True, "qk_norm": False, "activation": "gelu", "positions": "learned"},
}


@pytest.mark.long
@pytest.mark.parametrize("rule", ["standard", "completep", "complete-d-p"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_folded_weights_compute_the_same_function(tiny: Recipe, shape: dict[str, object], rule: str) -> None:
    changes = {f"model.{key}": value for key, value in shape.items()} | {
        "scaling.rule": rule,
        "hyperparameters.residual": 0.6,
        "hyperparameters.modules": {"mlp.out": {"residual": 1.7}},
    }
    recipe = transfer(tiny.replace(changes), width=64, depth=6, d_head=16)
    table = parameter_table(recipe)
    made = Transformer(recipe.model, table.multipliers, table.attention_scale).double()
    generator = torch.Generator().manual_seed(0)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.3, generator=generator)
    factors = folding(recipe.model, table)
    plain = Transformer(recipe.model).double()
    plain.load_state_dict({name: value * factors.get(name, 1.0) for name, value in made.state_dict().items()})
    tokens = torch.randint(0, 320, (2, 32), generator=generator)
    torch.testing.assert_close(plain(tokens), made(tokens), rtol=1e-11, atol=1e-11)
    plain.load_state_dict(made.state_dict())
    assert not torch.allclose(plain(tokens), made(tokens), rtol=1e-2)
