"""Published initialisations of a transformers model."""

import pytest
import torch
from tests.interop.families import gpt2, llama

import leaven

TUNED = {"lr": 0.01, "weight_decay": 0.1, "init": "mitchell"}


def test_a_named_init_draws_the_stds_of_its_formula() -> None:
    model = llama(64, 4)
    leaven.parametrize(model, base=llama(32, 2), hyperparameters=TUNED, rule="standard", initialise=True)
    values = dict(model.named_parameters())
    d, d_ff = 64, 192
    for layer in range(4):
        block = f"model.layers.{layer}"
        for name, std in {
            "self_attn.q_proj": d**-0.5,
            "mlp.up_proj": d**-0.5,
            "self_attn.o_proj": (2 * d * (layer + 1)) ** -0.5,
            "mlp.down_proj": (2 * d_ff * (layer + 1)) ** -0.5,
        }.items():
            tensor = values[f"{block}.{name}.weight"]
            assert tensor.std().item() == pytest.approx(std, rel=5 / (2 * tensor.numel()) ** 0.5)
    assert torch.equal(values["model.norm.weight"], torch.ones(d))


def test_depth_scaled_init_is_smaller_for_gated_mlps() -> None:
    found = {}
    for build, name in ((llama, "model.layers.1.mlp.up_proj.weight"), (gpt2, "transformer.h.1.mlp.c_fc.weight")):
        model, tuned = build(64, 2), TUNED | {"init": "depth-scaled"}
        leaven.parametrize(model, base=build(32, 2), hyperparameters=tuned, rule="standard", initialise=True)
        found[build] = dict(model.named_parameters())[name].std().item()
    assert found[llama] == pytest.approx(0.02 / 2, rel=0.05)
    assert found[gpt2] == pytest.approx(0.02, rel=0.05)
