"""On leaven's own model, groups and forward pass are those of the parameter table."""

import pytest
import torch

import leaven
from leaven.errors import InputError
from leaven.model.initialisation import build_model
from leaven.model.transformer import Transformer
from leaven.recipe.recipe import Recipe
from leaven.scaling.rules import RULES
from leaven.scaling.table import parameter_table
from leaven.scaling.transfer import transfer

GROWN = {"width": 32, "depth": 6, "batch_tokens": 512, "tokens": 71_680}
CASES = {
    "gqa and shared qk gains": ({}, GROWN),
    "width only, to half": (
        {"model.d_model": 32, "model.n_heads": 4, "model.n_kv_heads": 2, "model.d_ff": 64},
        {"width": 16},
    ),
    "tied": ({"model.tied_embeddings": True}, GROWN),
    "one kv head fixed": ({"model.n_kv_heads": 2}, GROWN | {"n_kv_heads": 2}),
    "head dimension grows": ({}, GROWN | {"d_head": 16}),
    "gains per head, head dimension grows": ({"model.qk_norm_per_head": True}, GROWN | {"d_head": 16}),
    "biases, layer norms, learned positions": (
        {"model.bias": True, "model.norm": "layernorm", "model.positions": "learned", "model.activation": "gelu"},
        GROWN,
    ),
    "embedding norm, ALiBi, tied": (
        {"model.embedding_norm": True, "model.bias": True, "model.norm": "layernorm", "model.positions": "alibi"}
        | {"model.tied_embeddings": True},
        GROWN,
    ),
    "output norms, all heads together": ({"model.norm_placement": "output", "model.qk_norm_whole": True}, GROWN),
    "sandwich norms, parallel branches, caps": (
        {"model.norm_placement": "sandwich", "model.parallel_branches": True, "model.attention_bias": "qkv"}
        | {"model.attention_softcap": 5.0, "model.logit_softcap": 5.0, "model.window": 5},
        GROWN,
    ),
    "experts, shared ones, a dense layer": (
        {
            "model.experts": {"number": 4, "active": 2, "d_expert": 8, "shared": 1, "dense_layers": 1},
            "hyperparameters.modules": {
                "mlp.router": {"lr": 0.5},
                "mlp.experts.out": {"residual": 0.5},
                "mlp.shared.out": {"residual": 2.0},
            },
        },
        GROWN,
    ),
    "multipliers of modules and depth": (
        {
            "hyperparameters.residual": 0.8,
            "hyperparameters.decay_norm_and_bias": True,
            "hyperparameters.modules": {
                "attention.out": {"residual": 0.5, "init_std": 2.0},
                "embedding": {"lr": 3.0, "beta2": 0.5},
                "norm.query": {"eps": 2.0, "weight_decay": 1.5},
            },
            "hyperparameters.depth": {"lr": (1.0, 2.0), "residual": (1.0, 0.5, 2.0), "init_std": (1.0, 3.0)},
        },
        GROWN,
    ),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("case", CASES)
def test_groups_and_forward_are_those_of_the_table(tiny: Recipe, case: str, rule: str) -> None:
    changes, grown = CASES[case]
    small = tiny.replace(changes | {"scaling.rule": rule, "scaling.alpha": 0.7, "scaling.token_exponent": 0.4})
    recipe = transfer(small, **grown)
    table = parameter_table(recipe)
    model = Transformer(recipe.model)
    groups = leaven.parametrize(
        model,
        base=Transformer(recipe.base_shape),
        hyperparameters=recipe.hyperparameters,
        ratios=leaven.Ratios(batch=table.ratios.batch, tokens=table.ratios.tokens),
        rule=rule,
        alpha=0.7,
        token_exponent=0.4,
        initialise=True,
        seed=5,
    )
    assert sorted(name for group in groups for name in group["param_names"]) == sorted(r.name for r in table.rows)
    parameters = dict(model.named_parameters())
    for group in groups:
        for name, parameter in zip(group["param_names"], group["params"], strict=True):
            row = table[name]
            assert parameter is parameters[name]
            assert group["module"] == row.module
            assert (group["lr"], group["weight_decay"], group["betas"], group["eps"]) == (
                row.lr,
                row.weight_decay,
                (row.beta1, row.beta2),
                row.eps,
            ), name
    reference = build_model(recipe.model, table, 5)
    for name, parameter in reference.named_parameters():
        assert torch.equal(parameter, parameters[name])
    tokens = torch.randint(0, 320, (2, 16), generator=torch.Generator().manual_seed(0))
    ours, theirs = model.double()(tokens), reference.double()(tokens)
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


def test_a_model_with_its_recipes_multipliers_is_refused(tiny: Recipe) -> None:
    recipe = transfer(tiny, depth=4)
    model = build_model(recipe.model, parameter_table(recipe), 0)
    with pytest.raises(InputError, match=r"build it with Transformer\(shape\)"):
        leaven.parametrize(model, base=Transformer(tiny.model), hyperparameters=recipe.hyperparameters)
